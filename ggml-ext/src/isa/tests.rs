//! The same list for every instruction set, against the scalar definition, and that against f64.

use super::*;
use crate::codec::delta::Delta;
use crate::codec::plain::Blocks;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
#[cfg(target_arch = "x86_64")]
use crate::lanes::{Lanes, Simd, LANES};
use crate::random::Noise;
use crate::rotation::HEAD_SIZES;
use crate::table;
use proptest::prelude::*;

fn formats() -> impl Iterator<Item = Srft> {
    HEAD_SIZES.into_iter().flat_map(|size| [2, 3, 4, 8].into_iter().filter_map(move |bits| Srft::new(bits, size)))
}

/// The tables to try: all that are there; or, where GGML_EXT_ISA names one, that one and scalar.
pub(crate) fn tried() -> impl Iterator<Item = &'static Kernels> {
    let named = std::env::var("GGML_EXT_ISA").ok();
    available().iter().copied().filter(move |k| k.name == "scalar" || named.as_ref().is_none_or(|n| n == k.name))
}

/// Those of them that are compared with scalar.
pub(crate) fn others() -> impl Iterator<Item = &'static Kernels> {
    tried().filter(|k| k.name != "scalar")
}

/// Every n-th of many cases, where GGML_EXT_TEST_STEP=n, for machines that are slow because they are emulated. Cases are
/// products of lists: with an n that is prime to the lengths of these, what one list has meets all that another has.
pub(crate) fn stepped<T>(cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let step = std::env::var("GGML_EXT_TEST_STEP").map_or(1, |n| n.parse().expect("GGML_EXT_TEST_STEP is a number"));
    cases.into_iter().step_by(step)
}

/// `cargo kv test --only neon` reads the line that this prints.
#[test]
fn the_table_in_use_is_the_best_or_the_one_named() {
    println!("table in use: {}", kernels().name);
    let want = std::env::var("GGML_EXT_ISA").unwrap_or_else(|_| available()[0].name.to_string());
    assert_eq!(kernels().name, want);
}

/// So many cases of a property, or fewer where PROPTEST_CASES asks for fewer.
pub(crate) fn at_most(cases: u32) -> ProptestConfig {
    ProptestConfig::with_cases(ProptestConfig::default().cases.min(cases))
}

fn wild() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -3.0f32..3.0,
        1 => Just(0.0),
        1 => any::<f32>(),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, 1e-40, -1e9]),
    ]
}

proptest! {
    #![proptest_config(at_most(64))]

    #[test]
    fn codes_are_bit_exact(values in prop::collection::vec(wild(), 576), plain in any::<bool>(), seed in any::<u64>()) {
        let gaussian = Noise::new(seed).row(576);
        let values = if plain { &gaussian } else { &values };
        for f in all_formats() {
            let (mut want, mut got) = (vec![0u8; f.row_bytes()], vec![0u8; f.row_bytes()]);
            scalar::encode(f, &values[..f.size()], &mut want);
            for k in others() {
                // SAFETY: the table is available on this CPU.
                unsafe { (k.encode)(f, &values[..f.size()], &mut got) };
                prop_assert_eq!(&got, &want, "{} {:?}", k.name, f);
            }
            let (mut want_back, mut back) = (vec![0.0f32; f.size()], vec![0.0f32; f.size()]);
            scalar::decode(f, &want, &mut want_back);
            for k in others() {
                // SAFETY: as above.
                unsafe { (k.decode)(f, &want, &mut back) };
                prop_assert_eq!(&back, &want_back, "{} {:?}", k.name, f);
            }
        }
    }

    #[test]
    fn any_bytes_unpack_alike(bytes in prop::collection::vec(any::<u8>(), 640 * 3)) {
        for f in all_formats() {
            unpacks_alike(f.levels(), &bytes, f.row_bytes())?;
        }
        for size in [32, 64, 96, 128, 160, 512] {
            for kind in [Plain::Q8_0, Plain::Q4_0] {
                unpacks_alike(Blocks::new(kind, size).unwrap().levels(), &bytes, kind.row_bytes(size))?;
            }
        }
    }
}

struct Block {
    levels: Vec<i8>,
    scales: Vec<f32>,
    rows: LevelLayout,
}

impl Block {
    fn new(rows: LevelLayout) -> Block {
        // Stale contents must not matter.
        let width = padded(rows.values);
        Block { levels: vec![77; CELLS * width], scales: vec![1e3; CELLS * width / rows.scale_group], rows }
    }

    fn raw(&mut self) -> LevelBlock {
        LevelBlock {
            levels: self.levels.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            width: padded(self.rows.values),
            scale_group: self.rows.scale_group,
        }
    }
}

/// Query rows as bytes, with room of their own.
struct Bytes {
    bytes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    raw: Queries,
}

impl Bytes {
    fn new(kernels: &Kernels, rows: LevelLayout, queries: &[Vec<f32>], pairs: bool) -> Bytes {
        let (width, scale_group, count) = (padded(rows.values), rows.scale_group, queries.len());
        let (mut bytes, mut scales) = (vec![99i8; count * width], vec![9.0f32; count * width / scale_group]);
        let mut sums = vec![99; count * width / scale_group];
        let raw = Queries {
            bytes: bytes.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            sums: sums.as_mut_ptr(),
            count,
            width,
            scale_group,
            pairs,
        };
        for (r, q) in queries.iter().enumerate() {
            // SAFETY: room for `count` rows, kernels of this CPU.
            unsafe { (kernels.quantize_query)(q, 0.5, raw, r) };
        }
        Bytes { bytes, scales, sums, raw }
    }

    /// Value i of row r.
    fn value(&self, r: usize, i: usize) -> f64 {
        self.bytes[r * self.raw.width + i] as f64
            * self.scales[r * self.raw.scale_groups() + i / self.raw.scale_group] as f64
    }
}

fn unpacks_alike(rows: LevelLayout, bytes: &[u8], row_bytes: usize) -> Result<(), TestCaseError> {
    let stride = row_bytes + 7;
    let n = bytes.len() / (stride + 1);
    let n = n.min(3);
    let (mut want, mut got) = (Block::new(rows), Block::new(rows));
    // SAFETY: n rows of the bytes, blocks of the padded width.
    unsafe {
        scalar::unpack(&rows, StoredRows::new(bytes.as_ptr(), stride, n), Role::Expand, want.raw());
        for k in others() {
            (k.unpack)(&rows, StoredRows::new(bytes.as_ptr(), stride, n), Role::Expand, got.raw());
            let width = padded(rows.values);
            prop_assert_eq!(&got.levels[..n * width], &want.levels[..n * width], "{} {:?}", k.name, rows);
            for (c, g) in (0..n).flat_map(|c| (0..width / rows.scale_group).map(move |g| (c, g))) {
                prop_assert_eq!(*got.raw().scale_at(c, g), *want.raw().scale_at(c, g), "{} {:?}", k.name, rows);
            }
        }
    }
    Ok(())
}

/// A cache of n Gaussian rows, encoded.
fn encoded(f: Srft, n: usize, noise: &mut Noise) -> Vec<u8> {
    let mut bytes = vec![0u8; n * f.row_bytes()];
    for row in bytes.chunks_exact_mut(f.row_bytes()) {
        scalar::encode(f.into(), &noise.row(f.size()), row);
    }
    bytes
}

#[test]
fn queries_keep_their_values_and_are_alike_everywhere() {
    let mut noise = Noise::new(4);
    for f in formats() {
        let rows = f.levels();
        let mut queries: Vec<Vec<f32>> = (0..3).map(|_| noise.row(f.size())).collect();
        // A large channel, a zero group, and a denormal query.
        queries[0][5] = 1e4;
        queries[1][..f.scale_group()].fill(0.0);
        queries[2].fill(1e-42);
        for pairs in [false, true] {
            let want = Bytes::new(&scalar::KERNELS, rows, &queries, pairs);
            for (r, q) in queries.iter().enumerate() {
                for (g, q) in q.chunks_exact(f.scale_group()).enumerate() {
                    let together = |x: &[f32], sign: f32| x.iter().map(|x| (sign * x).max(0.0)).sum::<f32>();
                    let tops = q.chunks_exact(2).map(|x| match pairs {
                        true => together(x, 1.0).max(together(x, -1.0)),
                        false => x[0].abs().max(x[1].abs()),
                    });
                    let top = tops.fold(0.0, f32::max);
                    for (i, &x) in q.iter().enumerate() {
                        let error = (want.value(r, g * f.scale_group() + i) - 0.5 * x as f64).abs();
                        assert!(error <= 0.5 * (0.502 / 127.0) * top as f64 + 1e-41, "row {r}: {x} is off by {error}");
                    }
                }
            }
            for x in want.bytes.chunks_exact(2).map(|x| [i32::from(x[0]), i32::from(x[1])]).filter(|_| pairs) {
                assert!(x[0].signum() * x[1].signum() < 0 || (x[0] + x[1]).abs() <= 128, "{x:?}");
            }
            for k in others() {
                let got = Bytes::new(k, rows, &queries, pairs);
                assert_eq!((&got.bytes, &got.scales, &got.sums), (&want.bytes, &want.scales, &want.sums), "{}", k.name);
            }
            let mut queries = queries.clone();
            for bad in [f32::NAN, f32::INFINITY] {
                queries[0][f.size() - 1] = bad;
                for k in tried() {
                    let got = Bytes::new(k, rows, &queries[..1], pairs);
                    assert!(got.scales.iter().all(|s| s.is_nan()), "{}", k.name);
                }
            }
        }
    }
}

#[test]
fn dots_agree_with_scalar_to_the_bit_and_with_f64() {
    let mut noise = Noise::new(5);
    for f in formats() {
        for (rows, n) in [(1, 64), (3, 37), (8, 5)] {
            let kind = f.levels();
            let bytes = encoded(f, n, &mut noise);
            let queries: Vec<Vec<f32>> = (0..rows).map(|_| noise.row(f.size())).collect();
            let mut results = Vec::new();
            for (k, pairs) in tried().flat_map(|k| [(k, false), (k, true)]) {
                let mut block = Block::new(kind);
                let q = Bytes::new(k, kind, &queries, pairs);
                let mut out = vec![0.0f32; rows * CELLS];
                // SAFETY: buffers of the promised shapes, kernels of this CPU.
                unsafe {
                    (k.unpack)(&kind, StoredRows::new(bytes.as_ptr(), f.row_bytes(), n), Role::Dot, block.raw());
                    (k.dot_levels)(block.raw(), n, q.raw, out.as_mut_ptr());
                }
                for r in 0..rows {
                    for c in 0..n {
                        let mut x = vec![0.0f32; f.size()];
                        f.decode_rotated(&bytes[c * f.row_bytes()..], &mut x);
                        let want: f64 = x.iter().enumerate().map(|(i, &x)| x as f64 * q.value(r, i)).sum();
                        let got = out[r * CELLS + c] as f64;
                        assert!(
                            (got - want).abs() < 2e-5 * (1.0 + want.abs()),
                            "{} {f:?}: {got}, wanted {want}",
                            k.name
                        );
                    }
                }
                let seen = (0..rows).flat_map(|r| out[r * CELLS..r * CELLS + n].to_vec()).collect::<Vec<f32>>();
                results.push((k.name, seen));
            }
            let (_, references) = results.split_last_chunk::<2>().unwrap();
            for (i, (name, got)) in results.iter().enumerate() {
                assert_eq!(got, &references[i % 2].1, "{name} {f:?}");
            }
        }
    }
}

/// Scores to the bit and weighted sums closely, of n rows with random queries and weights, in every instruction set.
fn multiplied_alike(kind: LevelLayout, bytes: &[u8], stride: usize, (n, rows): (usize, usize), noise: &mut Noise) {
    let queries: Vec<Vec<f32>> = (0..rows).map(|_| noise.row(kind.values)).collect();
    let weights: Vec<f32> = (0..rows * CELLS).map(|i| if i % CELLS < n { noise.uniform() } else { 0.0 }).collect();
    let run = |k: &Kernels, pairs: bool| {
        let mut block = Block::new(kind);
        let q = Bytes::new(k, kind, &queries, pairs);
        let (mut scores, mut acc) = (vec![0.0f32; rows * CELLS], vec![0.0f32; rows * padded(kind.values)]);
        // SAFETY: buffers of the promised shapes, kernels of this CPU.
        unsafe {
            (k.unpack)(&kind, StoredRows::new(bytes.as_ptr(), stride, n), Role::Dot, block.raw());
            (k.dot_levels)(block.raw(), n, q.raw, scores.as_mut_ptr());
            (k.unpack)(&kind, StoredRows::new(bytes.as_ptr(), stride, n), Role::Weigh, block.raw());
            (k.weigh_levels)(block.raw(), n, weights.as_ptr(), rows, acc.as_mut_ptr());
        }
        let seen: Vec<f32> = (0..rows).flat_map(|r| scores[r * CELLS..r * CELLS + n].to_vec()).collect();
        (seen, acc)
    };
    let wanted = [false, true].map(|pairs| run(&scalar::KERNELS, pairs));
    for (k, pairs) in others().flat_map(|k| [(k, false), (k, true)]) {
        let (got, want) = (run(k, pairs), &wanted[usize::from(pairs)]);
        assert_eq!(got.0, want.0, "{} {kind:?}", k.name);
        let norm = want.1.iter().map(|x| x.abs()).fold(0.0, f32::max);
        for (a, b) in got.1.iter().zip(&want.1) {
            assert!((a - b).abs() < 1e-3 * norm, "{} {kind:?}: {a}, wanted {b}", k.name);
        }
    }
}

/// ggml's own rows, whose scales lie between the codes.
#[test]
fn dots_and_weighing_of_block_rows_agree_with_scalar() {
    let mut noise = Noise::new(15);
    for (size, eight) in [(64, true), (64, false), (96, true), (160, false), (256, true)] {
        let kind = Blocks::new(if eight { Plain::Q8_0 } else { Plain::Q4_0 }, size).unwrap().levels();
        let stride = size / 32 * if eight { 34 } else { 18 };
        let (n, rows) = (29, 4);
        let mut bytes: Vec<u8> = (0..n * stride).map(|_| noise.bits() as u8).collect();
        for block in bytes.chunks_exact_mut(if eight { 34 } else { 18 }) {
            let scale = half::f16::from_f32(noise.gaussian());
            block[..2].copy_from_slice(&scale.to_le_bytes());
            // ggml never stores -128, but others may.
            block[2] = 0x80;
        }
        multiplied_alike(kind, &bytes, stride, (n, rows), &mut noise);
    }
}

/// Sums of products on the way must not be cut off, in 16 bits for example.
#[test]
fn largest_products_fit() {
    let (size, n) = (64, 16);
    let kind = Blocks::new(Plain::Q8_0, size).unwrap().levels();
    let mut noise = Noise::new(17);
    let mut bytes = Vec::new();
    for c in 0..n {
        for _ in 0..size / 32 {
            bytes.extend(half::f16::ONE.to_le_bytes());
            bytes.extend(
                (0..32).map(|i| {
                    [0x80, 0x7f, if i % 2 == 0 { 0x80 } else { 0x7f }, 0x80 - (noise.bits() & 1) as u8][c % 4]
                }),
            );
        }
    }
    let queries =
        [[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [1.0, 0.99], [-3.0, -2.0]].map(|two| two.repeat(size / 2)).to_vec();
    let scores = |k: &Kernels, pairs: bool| {
        let (mut block, q) = (Block::new(kind), Bytes::new(k, kind, &queries, pairs));
        let mut scores = vec![0.0f32; queries.len() * CELLS];
        // SAFETY: n rows and as many cells of the block, kernels of this CPU.
        unsafe {
            (k.unpack)(&kind, StoredRows::new(bytes.as_ptr(), bytes.len() / n, n), Role::Dot, block.raw());
            (k.dot_levels)(block.raw(), n, q.raw, scores.as_mut_ptr());
        }
        scores.chunks_exact(CELLS).flat_map(|row| row[..n].to_vec()).collect::<Vec<f32>>()
    };
    for pairs in [false, true] {
        let want = scores(&scalar::KERNELS, pairs);
        for k in others() {
            assert_eq!(scores(k, pairs), want, "{}", k.name);
        }
    }
}

#[test]
fn weighing_agrees_with_f64() {
    let mut noise = Noise::new(6);
    for f in formats() {
        // Few rows, many, and more than are multiplied by what is unpacked once.
        for rows in (1..=9).chain([12, 13, 131]) {
            let (n, width, kind) = (21, padded(f.size()), f.levels());
            let bytes = encoded(f, n, &mut noise);
            // Attention leaves no weight on cells that are not there.
            let weights: Vec<f32> =
                (0..rows * CELLS).map(|i| if i % CELLS < n { noise.uniform() } else { 0.0 }).collect();
            for k in tried() {
                let mut block = Block::new(kind);
                let mut acc = vec![0.5f32; rows * width];
                // SAFETY: buffers of the promised shapes, kernels of this CPU.
                unsafe {
                    (k.unpack)(&kind, StoredRows::new(bytes.as_ptr(), f.row_bytes(), n), Role::Weigh, block.raw());
                    (k.weigh_levels)(block.raw(), n, weights.as_ptr(), rows, acc.as_mut_ptr());
                }
                let mut want = vec![0.5f64; rows * width];
                for c in 0..n {
                    let mut x = vec![0.0f32; f.size()];
                    f.decode_rotated(&bytes[c * f.row_bytes()..], &mut x);
                    for r in 0..rows {
                        for (i, &x) in x.iter().enumerate() {
                            want[r * width + i] += weights[r * CELLS + c] as f64 * x as f64;
                        }
                    }
                }
                for (a, b) in acc.iter().zip(&want) {
                    assert!(
                        (*a as f64 - b).abs() < 6e-4 * (1.0 + b.abs()),
                        "{} {f:?} rows {rows}: {a}, wanted {b}",
                        k.name
                    );
                }
            }
        }
    }
}

/// A cell with nearly all the weight and small values must not drown the others.
#[test]
fn weighing_keeps_the_cells_beside_a_sink() {
    let mut noise = Noise::new(16);
    let f = Srft::new(4, 64).unwrap();
    let mut bytes = encoded(f, CELLS, &mut noise);
    scalar::encode(f.into(), &noise.row(64).iter().map(|x| x * 1e-4).collect::<Vec<_>>(), &mut bytes[..f.row_bytes()]);
    let mut weights = vec![1e-5f32; CELLS];
    weights[0] = 0.999;
    let mut want = [0.0f64; 64];
    for c in 0..CELLS {
        let mut x = [0.0f32; 64];
        f.decode_rotated(&bytes[c * f.row_bytes()..], &mut x);
        for (w, &x) in want.iter_mut().zip(&x) {
            *w += weights[c] as f64 * x as f64;
        }
    }
    for k in tried() {
        let mut block = Block::new(f.levels());
        let mut acc = [0.0f32; 64];
        // SAFETY: buffers of the promised shapes, kernels of this CPU.
        unsafe {
            (k.unpack)(&f.levels(), StoredRows::new(bytes.as_ptr(), f.row_bytes(), CELLS), Role::Weigh, block.raw());
            (k.weigh_levels)(block.raw(), CELLS, weights.as_ptr(), 1, acc.as_mut_ptr());
        }
        let error: f64 = acc.iter().zip(&want).map(|(&a, b)| (a as f64 - b).powi(2)).sum();
        let norm: f64 = want.iter().map(|b| b * b).sum();
        assert!((error / norm).sqrt() < 1e-3, "{}: {}", k.name, (error / norm).sqrt());
    }
}

#[test]
fn matrix_kernels_agree_with_f64() {
    let mut noise = Noise::new(7);
    for (rows, depth) in [(1, 64), (5, 3), (6, 80), (7, 64), (16, 128), (23, 33)] {
        let (a, b) = (noise.row(rows * (depth + 3)), noise.row(depth * 70));
        for k in tried() {
            let mut c = vec![0.25f32; rows * 66];
            // SAFETY: matrices of the given strides.
            unsafe {
                (k.gemm64)(
                    Matrix(a.as_ptr(), depth + 3),
                    Matrix(b.as_ptr(), 70),
                    MatrixMut(c.as_mut_ptr(), 66),
                    rows,
                    depth,
                );
            }
            for r in 0..rows {
                for i in 0..66 {
                    let sum: f64 = (0..depth).map(|d| a[r * (depth + 3) + d] as f64 * b[d * 70 + i] as f64).sum();
                    let want = if i < 64 { 0.25 + sum } else { 0.25 };
                    assert!((c[r * 66 + i] as f64 - want).abs() < 1e-4, "{} {rows}x{depth}", k.name);
                }
            }
        }
    }
    for width in [64, 128, 192] {
        let x = noise.row(CELLS * width);
        for k in tried() {
            let mut t = vec![0.0; CELLS * width];
            // SAFETY: CELLS rows of `width` and back.
            unsafe { (k.transpose)(x.as_ptr(), width, t.as_mut_ptr()) };
            for c in 0..CELLS {
                for i in 0..width {
                    assert_eq!(t[i * CELLS + c], x[c * width + i], "{}", k.name);
                }
            }
        }
    }
}

#[test]
fn floats_widen_exactly() {
    let mut noise = Noise::new(8);
    for size in [16, 40, 64, 80, 128] {
        let values = noise.row(3 * size);
        let half: Vec<u16> = values.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect();
        let brain: Vec<u16> = values.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect();
        let width = padded(size);
        for k in tried() {
            for (kind, data, step) in [
                (Plain::F16, half.as_ptr().cast::<u8>(), 2),
                (Plain::Bf16, brain.as_ptr().cast(), 2),
                (Plain::F32, values.as_ptr().cast(), 4),
            ] {
                let mut out = vec![9.0f32; 3 * width];
                // SAFETY: three rows of `size` values.
                unsafe { (k.widen)(kind, data, step * size, 3, size, out.as_mut_ptr(), width) };
                for c in 0..3 {
                    for i in 0..width {
                        let want = match kind {
                            _ if i >= size => 0.0,
                            Plain::F16 => half::f16::from_bits(half[c * size + i]).to_f32(),
                            Plain::Bf16 => half::bf16::from_bits(brain[c * size + i]).to_f32(),
                            _ => values[c * size + i],
                        };
                        assert_eq!(out[c * width + i], want, "{} {kind:?} {size}", k.name);
                    }
                }
            }
        }
    }
}

#[test]
fn rotations_agree_with_scalar_to_the_bit() {
    let mut noise = Noise::new(20);
    for r in HEAD_SIZES.into_iter().filter_map(Rotation::of) {
        let x = noise.row(r.size());
        let run = |k: &Kernels| {
            let (mut y, mut back) = (vec![0.0f32; x.len()], vec![0.0f32; x.len()]);
            // SAFETY: kernels of this CPU.
            unsafe {
                (k.rotate)(r, &x, &mut y);
                (k.rotate_back)(r, &y, &mut back);
            }
            (y, back)
        };
        let want = run(&scalar::KERNELS);
        assert!(want.1.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-5), "{} does not come back", r.size());
        for k in others() {
            assert_eq!(run(k), want, "{} {}", k.name, r.size());
        }
    }
}

#[test]
fn levels_expand_exactly() {
    let mut noise = Noise::new(21);
    for f in all_formats() {
        let (kind, stride, n) = (f.levels(), f.row_bytes(), 29);
        let bytes = encoded_rows(f, n, &mut noise);
        let width = padded(kind.values);
        let run = |k: &Kernels| {
            let (mut block, mut out) = (Block::new(kind), vec![7.0f32; n * width]);
            // SAFETY: n rows, buffers of the padded width, kernels of this CPU.
            unsafe {
                (k.unpack)(&kind, StoredRows::new(bytes.as_ptr(), stride, n), Role::Expand, block.raw());
                (k.expand)(block.raw(), n, out.as_mut_ptr());
            }
            out
        };
        let want = run(&scalar::KERNELS);
        for k in others() {
            assert_eq!(run(k), want, "{} {f:?}", k.name);
        }
    }
}

#[test]
fn products_of_floats_agree_with_f64() {
    let mut noise = Noise::new(22);
    for (width, n, rows) in [(64, 64, 1), (128, 37, 3), (192, 5, 8), (576, 1, 4)] {
        let (keys, queries) = (noise.row(n * width), noise.row(rows * width));
        for k in tried() {
            let mut out = vec![7.0f32; rows * CELLS];
            // SAFETY: n keys and `rows` queries of `width`, kernels of this CPU.
            unsafe { (k.dot_floats)(keys.as_ptr(), width, n, queries.as_ptr(), rows, out.as_mut_ptr()) };
            for (r, c) in (0..rows).flat_map(|r| (0..n).map(move |c| (r, c))) {
                let (q, key) = (&queries[r * width..][..width], &keys[c * width..][..width]);
                let want: f64 = q.iter().zip(key).map(|(&a, &b)| a as f64 * b as f64).sum();
                assert!((out[r * CELLS + c] as f64 - want).abs() < 1e-4, "{} {width}", k.name);
            }
        }
    }
}

/// Lanes beside limits, on them and beyond all of them, and sums of four.
#[cfg(target_arch = "x86_64")]
fn lanes_are_those_of_plain_rust<S: Simd>() {
    fn places<S: Simd, const N: usize>() {
        let limits: [f32; N] = std::array::from_fn(|i| 3.0 * i as f32 - N as f32);
        let values: [f32; N] = std::array::from_fn(|i| 100.0 + i as f32);
        let beside = limits.iter().flat_map(|&x| [x.next_down(), x, x.next_up()]);
        let odd = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE];
        let mut all: Vec<f32> = beside.chain(odd).collect();
        all.resize(all.len().next_multiple_of(LANES), 0.5);
        for x in all.chunks_exact(LANES) {
            let (mut got, mut want) = ([0.0; LANES], [0.0; LANES]);
            S::load(x).between(&limits, &values).store(&mut got);
            Lanes::load(x).between(&limits, &values).store(&mut want);
            assert_eq!(got, want, "{N} limits and {x:?}");
        }
    }
    places::<S, 2>();
    places::<S, 4>();
    places::<S, 8>();
    places::<S, 16>();
    let rows = Noise::new(24).row(4 * LANES);
    let four: [&[f32]; 4] = std::array::from_fn(|i| &rows[i * LANES..][..LANES]);
    assert_eq!(S::sums(four.map(S::load)), four.map(|x| Lanes::load(x).sum()));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn lanes_of_registers_are_those_of_plain_rust() {
    if avx2::kernels().is_some() {
        lanes_are_those_of_plain_rust::<avx2::F32x16>();
    }
    if avx512::bw_kernels().is_some() {
        lanes_are_those_of_plain_rust::<avx512::F32x16>();
    }
}

#[test]
fn products_of_matrices_of_halves_agree_with_f64() {
    let mut noise = Noise::new(23);
    for (size, stride, rows) in [(16, 16, 1), (64, 64, 3), (80, 96, 2), (128, 128, 8), (576, 577, 4)] {
        let m: Vec<half::f16> = noise.row(MATRIX_ROWS * stride).into_iter().map(half::f16::from_f32).collect();
        let x = noise.row(rows * size);
        for k in tried() {
            let mut out = vec![7.0f32; rows * MATRIX_ROWS];
            // SAFETY: the rows of a matrix and `rows` of `size`, kernels of this CPU.
            unsafe { (k.dot_halves)(m.as_ptr().cast(), 2 * stride, size, x.as_ptr(), rows, out.as_mut_ptr()) };
            for (r, i) in (0..rows).flat_map(|r| (0..MATRIX_ROWS).map(move |i| (r, i))) {
                let (x, row) = (&x[r * size..][..size], &m[i * stride..][..size]);
                let want: f64 = x.iter().zip(row).map(|(&a, &b)| f64::from(a) * b.to_f64()).sum();
                let got = f64::from(out[r * MATRIX_ROWS + i]);
                assert!((got - want).abs() < 1e-4, "{} {size}: {got} instead of {want}", k.name);
            }
        }
    }
}

#[test]
fn masks_are_seen_as_they_are() {
    let (open, hidden, bias) = (0x0000u16, half::f16::NEG_INFINITY.to_bits(), half::f16::from_f32(-0.5).to_bits());
    for n in [1, 7, 8, 31, 63, CELLS] {
        for at in [0, n / 2, n - 1] {
            let with = |all: u16, one: u16| (0..n).map(|i| if i == at { one } else { all }).collect::<Vec<u16>>();
            for (mask, want) in [
                (with(open, open), Sight::Open),
                (with(hidden, hidden), Sight::Hidden),
                (with(open, bias), Sight::Mixed),
                (with(hidden, bias), Sight::Mixed),
            ] {
                for k in tried() {
                    // SAFETY: n values, kernels of this CPU.
                    let seen = unsafe { (k.sight)(mask.as_ptr().cast(), n) };
                    assert_eq!(seen, want, "{} {n} cells, {mask:?}", k.name);
                }
            }
        }
    }
}

#[test]
fn row_helpers_agree_with_scalar_to_the_bit() {
    let mut noise = Noise::new(9);
    for _ in 0..50 {
        let mut scores = [0.0f32; CELLS];
        let mut mask = [0.0f32; CELLS];
        for i in 0..CELLS {
            scores[i] = 10.0 * noise.gaussian();
            mask[i] = if noise.uniform() < 0.3 { f32::NEG_INFINITY } else { noise.gaussian() };
        }
        let run = |k: &Kernels| {
            let mut s = scores;
            // SAFETY: kernels of this CPU.
            unsafe {
                (k.softcap)(&mut s, 30.0);
                let max = (k.mask_scores)(&mut s, Some(&mask), 0.5);
                let sum = (k.exponentials)(&mut s, max);
                (k.scale)(&mut s, 1.0 / sum);
                (s, max, sum)
            }
        };
        let want = run(&scalar::KERNELS);
        for k in others() {
            assert_eq!(run(k), want, "{}", k.name);
        }
        let total: f64 = want.0.iter().map(|&x| x as f64).sum();
        assert!((total - 1.0).abs() < 1e-5);
        let c = (0..CELLS).find(|&c| mask[c].is_finite()).unwrap();
        let exact = |c: usize| 30.0 * (scores[c] as f64).tanh() + 0.5 * mask[c] as f64;
        assert!((want.0[c] as f64 * want.2 as f64 - (exact(c) - want.1 as f64).exp()).abs() < 1e-5);
    }
}

/// Every row format of ours at every head size.
fn all_formats() -> impl Iterator<Item = Format> {
    table::concrete().map(table::Concrete::format)
}

fn polar_formats() -> impl Iterator<Item = Polar> {
    all_formats().filter_map(|f| if let Format::Polar(f) = f { Some(f) } else { None })
}

/// Gaussian rows, encoded.
fn encoded_rows(f: Format, n: usize, noise: &mut Noise) -> Vec<u8> {
    let mut bytes = vec![0u8; n * f.row_bytes()];
    for row in bytes.chunks_exact_mut(f.row_bytes()) {
        scalar::encode(f, &noise.row(f.size()), row);
    }
    bytes
}

/// Whatever a row is, its levels meet queries and weights alike everywhere.
#[test]
fn levels_of_every_format_are_multiplied_alike() {
    let mut noise = Noise::new(17);
    for f in all_formats() {
        let (kind, stride, n, rows) = (f.levels(), f.row_bytes(), 29, 3);
        let bytes = encoded_rows(f, n, &mut noise);
        multiplied_alike(kind, &bytes, stride, (n, rows), &mut noise);
    }
}

#[test]
fn polar_scores_agree_with_scalar_to_the_bit_and_with_f64() {
    let mut noise = Noise::new(18);
    for f in polar_formats() {
        for (rows, n) in [(1, 64), (3, 37), (8, 5)] {
            let bytes = encoded_rows(Format::Polar(f), n, &mut noise);
            let queries: Vec<Vec<f32>> = (0..rows).map(|_| noise.row(f.size())).collect();
            let len = f.table_len();
            let run = |k: &Kernels| {
                let (mut tables, mut out) = (vec![0.0f32; rows * len], vec![7.0f32; rows * CELLS]);
                // SAFETY: buffers of the promised shapes, kernels of this CPU.
                unsafe {
                    for (q, tables) in queries.iter().zip(tables.chunks_exact_mut(len)) {
                        (k.polar_tables)(f, q, tables);
                    }
                    let stored = StoredRows::new(bytes.as_ptr(), f.row_bytes(), n);
                    (k.polar_scores)(f, stored, tables.as_ptr(), rows, out.as_mut_ptr());
                }
                (0..rows).flat_map(|r| out[r * CELLS..r * CELLS + n].to_vec()).collect::<Vec<f32>>()
            };
            let want = run(&scalar::KERNELS);
            for (r, q) in queries.iter().enumerate() {
                for c in 0..n {
                    let mut x = vec![0.0f32; f.size()];
                    f.decode_rotated(&bytes[c * f.row_bytes()..], &mut x);
                    let exact: f64 = x.iter().zip(q).map(|(&x, &q)| x as f64 * q as f64).sum();
                    let got = want[r * n + c] as f64;
                    assert!((got - exact).abs() < 1e-4 * (1.0 + exact.abs()), "{f:?}: {got}, wanted {exact}");
                }
            }
            for k in others() {
                assert_eq!(run(k), want, "{} {f:?}", k.name);
            }
        }
    }
}

/// Any bytes as a group: I-frame, kinds and scores are the same everywhere. (Keys: see the tests of groups and attention.)
#[test]
fn chains_agree_with_scalar_to_the_bit() {
    let mut noise = Noise::new(10);
    for f in HEAD_SIZES.into_iter().flat_map(|size| [Delta::new(3, size), Delta::banded(2, size)]).flatten() {
        let (stride, width, queries) = (f.row_bytes() + 3, padded(f.size()), 3);
        for rows in [1, 37, 64] {
            let mut bytes: Vec<u8> = (0..64 * stride).map(|_| noise.bits() as u8).collect();
            bytes[f.residual().row_bytes()] |= 4;
            let (q, dots) = (noise.row(queries * width), noise.row(queries * CELLS));
            let run = |k: &Kernels| {
                let (mut m, mut scores) = (vec![7.0f32; width], dots.clone());
                // SAFETY: 64 rows, buffers of the promised shapes, kernels of this CPU.
                unsafe {
                    let chain = (k.frame_and_chain)(f, bytes.as_ptr(), stride, rows, &mut m);
                    // Bits that make numbers, not all of them small.
                    m.iter_mut().for_each(|m| *m = m.clamp(-4.0, 4.0));
                    let q = Matrix(q.as_ptr(), width);
                    (k.chain_scores)(&chain, &m, q, 0.5, queries, scores.as_mut_ptr());
                }
                (m, scores)
            };
            let want = run(&scalar::KERNELS);
            assert!(want.0[f.size()..].iter().all(|&m| m == 0.0) && want.1.iter().all(|s| s.is_finite()));
            for k in others() {
                assert_eq!(run(k), want, "{} {f:?} {rows} rows", k.name);
            }
        }
    }
}
