//! Groups against keys that are kept as f32 and against a decoder in f64.

use super::*;
use crate::codec::delta::RHO;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::tests::{at_most, others, stepped};
use crate::isa::{kernels, scalar};
use crate::random::Noise;
use crate::rotation::HEAD_SIZES;
use crate::rows;
use proptest::prelude::*;

fn formats() -> impl Iterator<Item = Delta> {
    HEAD_SIZES.into_iter().flat_map(|size| {
        (2..=4).flat_map(move |bits| [Delta::new(bits, size), Delta::banded(bits, size)].into_iter().flatten())
    })
}

/// What one encoding may lose of the energy that it encodes.
fn loss(f: Delta) -> f64 {
    // Rows of the tests weigh the same everywhere, and half of a banded one has a bit less.
    match (f.residual().bits(), f.bands()) {
        (4, None) => 0.03,
        (4, Some(_)) => 0.08,
        (3, None) => 0.11,
        (3, Some(_)) => 0.3,
        _ => 0.5,
    }
}

/// A cache of two heads and its keys.
struct Cache {
    format: Delta,
    cells: usize,
    bytes: Vec<u8>,
    keys: Vec<Option<Vec<f32>>>,
}

const HEADS: usize = 2;

impl Cache {
    fn new(format: Delta, cells: usize) -> Cache {
        let bytes = vec![0; cells * HEADS * format.row_bytes()];
        Cache { format, cells, bytes, keys: vec![None; cells * HEADS] }
    }

    fn place(&self, cell: usize, head: usize) -> Place {
        let (row, base) = (self.format.row_bytes(), self.bytes.as_ptr().cast_mut());
        let layout = GroupLayout { base, stride: HEADS * row, cells: self.cells, row_bytes: row };
        let (place, lane) = layout.place(base.wrapping_add((cell * HEADS + head) * row));
        assert_eq!(lane, head);
        place
    }

    fn write(&mut self, walker: &mut Walker, cell: usize, head: usize, key: Vec<f32>) {
        // SAFETY: the cache is this test's alone.
        unsafe { walker.write(self.place(cell, head), &key) };
        self.keys[cell * HEADS + head] = Some(key);
    }

    /// All rows, decoded with a walker of its own each.
    fn read(&self) -> Vec<Vec<f32>> {
        (0..self.cells * HEADS)
            .map(|i| {
                let mut x = vec![0.0; self.format.size()];
                // SAFETY: as above.
                unsafe { Walker::new(self.format, kernels()).read(self.place(i / HEADS, i % HEADS), &mut x) };
                x
            })
            .collect()
    }

    fn row(&self, cell: usize, head: usize) -> &[u8] {
        let bytes = self.format.row_bytes();
        &self.bytes[(cell * HEADS + head) * bytes..][..bytes]
    }

    fn kind(&self, cell: usize, head: usize) -> RowKind {
        self.format.kind(self.row(cell, head))
    }

    /// A key from the definition of the format, in f64 but for the rotation back.
    fn naive(&self, cell: usize, head: usize) -> Vec<f32> {
        let (f, size, first) = (self.format, self.format.size(), cell - cell % GROUP_CELLS);
        let rows = GROUP_CELLS.min(self.cells - first);
        let share = |i: usize| {
            let (row, slot) = (i / f.slots(), i % f.slots());
            if row >= rows || self.row(first, head)[f.residual().row_bytes()] & 4 == 0 {
                return 0.0;
            }
            let at = f.residual().row_bytes() + 2 * slot;
            let stored = &self.row(first + row, head)[at..at + 2];
            let x = half::f16::from_le_bytes([stored[0] & !7, stored[1]]);
            if x.is_finite() {
                x.to_f64()
            } else {
                0.0
            }
        };
        let m: Vec<f64> = (0..size).map(share).collect();
        let mut key = vec![0.0f64; size];
        for c in first..=cell {
            let mut d = vec![0.0f32; size];
            f.residual().decode(self.row(c, head), &mut d);
            let after = c > first && self.kind(c - 1, head) != RowKind::Empty;
            for (i, key) in key.iter_mut().enumerate() {
                *key = f64::from(d[i])
                    + match self.kind(c, head) {
                        RowKind::Chained if after => m[i] + f64::from(RHO) * (*key - m[i]),
                        RowKind::Chained | RowKind::Restart => m[i],
                        RowKind::Alone | RowKind::Empty => 0.0,
                    };
            }
        }
        let mut x = vec![0.0; size];
        if self.kind(cell, head) != RowKind::Empty {
            // SAFETY: kernels of this CPU.
            unsafe { f.domain().leave(kernels(), &key.iter().map(|&x| x as f32).collect::<Vec<_>>(), &mut x) };
        }
        x
    }
}

fn energy(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>().sqrt()
}

/// Keys of several texts: each has a mean that all share and a part that changes slowly.
struct Texts {
    noise: Noise,
    mean: Vec<f32>,
    slow: Vec<Vec<f32>>,
}

impl Texts {
    fn new(size: usize, seed: u64) -> Texts {
        let mut noise = Noise::new(seed);
        let mean = noise.row(size).iter().map(|x| 3.0 * x).collect();
        let slow = (0..3).map(|_| noise.row(size)).collect();
        Texts { noise, mean, slow }
    }

    fn key(&mut self, text: usize) -> Vec<f32> {
        let fresh = self.noise.row(self.mean.len());
        for (slow, fresh) in self.slow[text].iter_mut().zip(fresh) {
            *slow = 0.9 * *slow + 0.43 * fresh;
        }
        self.mean.iter().zip(&self.slow[text]).map(|(m, s)| m + s).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    /// The next cell, of one of the texts.
    Append(usize),
    /// Any cell.
    Write(usize, usize),
    /// Zeros to any cell.
    Zero(usize),
    /// All memory.
    Clear,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        20 => (0usize..3).prop_map(Act::Append),
        6 => (0usize..150, 0usize..3).prop_map(|(cell, text)| Act::Write(cell, text)),
        1 => (0usize..150).prop_map(Act::Zero),
        1 => Just(Act::Clear),
    ]
}

proptest! {
    #![proptest_config(at_most(24))]

    /// A write changes its row and, by no more than one rounding, the row behind it and what hangs on that one.
    #[test]
    fn writes_leave_other_cells_alone(
        acts in prop::collection::vec(act(), 1..260),
        bits in 3u32..=4,
        size in prop::sample::select(vec![64usize, 80, 128]),
        seed in any::<u64>(),
    ) {
        let f = Delta::new(bits, size).unwrap();
        // Two whole groups and a piece of one.
        let mut cache = Cache::new(f, 150);
        let mut texts = Texts::new(size, seed);
        let mut walker = Walker::new(f, kernels());
        let (mut next, mut before) = (0, cache.read());
        for act in acts {
            let (cell, key) = match act {
                Act::Append(text) => {
                    next = (next + 1) % cache.cells;
                    (next, texts.key(text))
                }
                Act::Write(cell, text) => (cell, texts.key(text)),
                Act::Zero(cell) => (cell, vec![0.0; size]),
                Act::Clear => {
                    cache = Cache::new(f, 150);
                    walker = Walker::new(f, kernels());
                    before = cache.read();
                    continue;
                }
            };
            let old = cache.bytes.clone();
            // SAFETY: a row of the cache.
            let fresh = unsafe { !f.has_frame(cache.row(cell - cell % GROUP_CELLS, 1).as_ptr()) };
            cache.write(&mut walker, cell, 1, key);
            let after = cache.read();
            // The own row: one rounding of the key or of its distance from the I-frame.
            let m = {
                let place = cache.place(cell, 1);
                let (mut m, mut plain) = (vec![0.0; size], vec![0.0; size]);
                // SAFETY: rows of the cache, kernels of this CPU.
                unsafe {
                    f.frame::<Lanes>(place.group, place.stride, place.rows, &mut m);
                    f.domain().leave(kernels(), &m, &mut plain);
                }
                plain
            };
            let key = cache.keys[cell * HEADS + 1].as_ref().unwrap();
            let error = distance(&after[cell * HEADS + 1], key);
            let least = |x: &[f32]| loss(f).sqrt() * distance(x, &m).min(energy(x).sqrt()) + 1e-3;
            prop_assert!(error <= least(key), "row {}: wrong by {} of {}", cell, error, least(key));
            // The rows behind it.
            let mut moved = 0.0;
            for c in 0..cache.cells {
                let change = distance(&after[c * HEADS + 1], &before[c * HEADS + 1]);
                let coded = |row: &[u8]| (row[..f.residual().row_bytes()].to_vec(), f.kind(row));
                let touched =
                    coded(cache.row(c, 1)) != coded(&old[(c * HEADS + 1) * f.row_bytes()..][..f.row_bytes()]);
                if c == cell {
                    continue;
                }
                let same_group = c / GROUP_CELLS == cell / GROUP_CELLS;
                if c == cell + 1 && same_group && touched {
                    moved = least(&before[c * HEADS + 1]);
                    prop_assert_ne!(cache.kind(c, 1), RowKind::Chained);
                } else {
                    prop_assert!(!touched, "row {} was touched by a write to {}", c, cell);
                    let hangs_on = c > cell + 1 && same_group && cache.kind(c, 1) == RowKind::Chained;
                    moved *= if hangs_on { f64::from(RHO) } else { 0.0 };
                }
                // Along a chain what is left of a move falls below what f32 rounds; rows that hang on nothing stay exactly.
                let rounding = if moved > 0.0 { 1e-5 * (1.0 + energy(&before[c * HEADS + 1]).sqrt()) } else { 0.0 };
                prop_assert!(
                    change <= 1.01 * moved + rounding,
                    "row {} moved by {} of {} after a write to {}", c, change, moved, cell
                );
                prop_assert_eq!(&after[c * HEADS], &before[c * HEADS], "the other head");
            }
            if !fresh {
                let shares = |bytes: &[u8]| {
                    let share = |r: &[u8]| {
                        let mut share = r[f.residual().row_bytes()..].to_vec();
                        share[0] &= !3;
                        share
                    };
                    bytes.chunks_exact(f.row_bytes()).flat_map(share).collect::<Vec<_>>()
                };
                prop_assert_eq!(shares(&cache.bytes), shares(&old), "an I-frame stays");
            }
            before = after;
        }
    }

    #[test]
    fn any_bytes_decode_to_finite_values_and_take_writes(
        bytes in prop::collection::vec(any::<u8>(), 70 * HEADS * 46),
        values in prop::collection::vec(prop_oneof![
            4 => -4.0f32..4.0,
            1 => any::<f32>(),
            1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-42]),
        ], 64),
        cell in 0usize..70,
    ) {
        for bits in [3, 4] {
            let f = Delta::new(bits, 64).unwrap();
            let mut cache = Cache::new(f, 70);
            let n = cache.bytes.len();
            cache.bytes.copy_from_slice(&bytes[..n]);
            let mut before = cache.read();
            prop_assert!(before.iter().flatten().all(|x| x.is_finite()));
            cache.write(&mut Walker::new(f, kernels()), cell, 0, values.clone());
            let after = cache.read();
            prop_assert!(after.iter().flatten().all(|x| x.is_finite()));
            for c in (0..cell).chain((cell / 64 + 1) * 64..70) {
                // Where there was no I-frame its first value becomes the smallest f16 instead of zero.
                let moved = distance(&after[c * HEADS], &before[c * HEADS]);
                prop_assert!(moved <= 1e-6 * (1.0 + energy(&before[c * HEADS]).sqrt()), "row {} moved by {}", c, moved);
            }
            // The same again says the same.
            before = after;
            prop_assert_eq!(cache.read(), before);
        }
    }
}

#[test]
fn decoding_agrees_with_f64() {
    for (f, cells) in stepped(formats().flat_map(|f| [3, 64, 100].map(|cells| (f, cells)))) {
        let mut cache = Cache::new(f, cells);
        let mut texts = Texts::new(f.size(), 7);
        let mut walker = Walker::new(f, &scalar::KERNELS);
        for i in 0..cells * 3 / 2 {
            let cell = if i < cells { i } else { i * 37 % cells };
            let key = texts.key(i % 2);
            cache.write(&mut walker, cell, i % HEADS, key);
        }
        for (i, x) in cache.read().iter().enumerate() {
            let want = cache.naive(i / HEADS, i % HEADS);
            assert!(distance(x, &want) <= 1e-5 * (1.0 + energy(&want).sqrt()), "{f:?} {cells} cells, row {i}");
        }
    }
}

#[test]
fn prediction_pays_on_keys_that_are_alike() {
    for bits in [3, 4] {
        let f = Delta::new(bits, 128).unwrap();
        let mut texts = Texts::new(128, 3);
        let keys: Vec<f32> = (0..256).flat_map(|_| texts.key(0)).collect();
        let (mut rows, mut back) = (vec![0; 256 * f.row_bytes()], vec![0.0; keys.len()]);
        encode(f, &scalar::KERNELS, &keys, &mut rows);
        decode(f, &scalar::KERNELS, &rows, &mut back);
        let by_itself = Srft::new(bits, 128).unwrap();
        let (mut row, mut alone) = (vec![0; by_itself.row_bytes()], vec![0.0; 128]);
        let mut lost_alone = 0.0;
        for x in keys.chunks_exact(128) {
            scalar::encode(by_itself.into(), x, &mut row);
            scalar::decode(by_itself.into(), &row, &mut alone);
            lost_alone += distance(x, &alone).powi(2);
        }
        let lost = distance(&keys, &back).powi(2);
        assert!(lost < 0.1 * lost_alone, "{bits} bits: {lost} against {lost_alone}");
    }
}

#[test]
fn every_instruction_set_writes_the_same_bytes_and_reads_the_same_values() {
    for f in formats() {
        let mut texts = Texts::new(f.size(), 11);
        let writes: Vec<(usize, Vec<f32>)> =
            (0..150).map(|i| (if i < 100 { i } else { i * 29 % 100 }, texts.key(i % 2))).collect();
        let run = |kernels: &'static Kernels| {
            let mut cache = Cache::new(f, 100);
            let mut walker = Walker::new(f, kernels);
            for (cell, key) in &writes {
                cache.write(&mut walker, *cell, 0, key.clone());
            }
            let mut out = vec![vec![0.0f32; f.size()]; 100];
            for (cell, out) in out.iter_mut().enumerate() {
                // SAFETY: the cache is this test's alone.
                unsafe { walker.read(cache.place(cell, 0), out) };
            }
            (cache.bytes, out)
        };
        let want = run(&scalar::KERNELS);
        for k in others() {
            assert!(run(k) == want, "{} {f:?}", k.name);
        }
    }
}

/// The order of writes decides, not how many came at once or on how many threads.
#[test]
fn batches_and_threads_do_not_show() {
    const CELLS: usize = 130;
    let c = crate::table::by_name("delta4_64");
    let Some(crate::table::Entry::Concrete(c)) = c else { panic!() };
    let (heads, streams, n) = (3usize, 2usize, 400usize);
    let mut noise = Noise::new(1);
    let values = noise.row(n * heads * 64);
    // Appends, then rewrites with repetitions, over both streams.
    let targets: Vec<i64> =
        (0..n).map(|i| if i < 2 * CELLS { i as i64 } else { (noise.bits() % (2 * CELLS as u64)) as i64 }).collect();
    let run = |batch: usize, threads: usize| {
        let row = heads * c.row_bytes();
        let mut bytes = vec![0u8; row * CELLS * streams];
        // As llama.cpp writes: the streams as one tensor, a view of the cache.
        let dst = Tensor {
            kind: c.id(),
            ne: [heads as i64 * 64, (CELLS * streams) as i64, 1, 1],
            nb: [c.row_bytes(), row, row * CELLS * streams, row * CELLS * streams],
            data: bytes.as_mut_ptr(),
            to_float: None,
            view: crate::tensor::View {
                row_bytes: row,
                rows: CELLS as i64,
                data: bytes.as_mut_ptr(),
                bytes: bytes.len(),
                ..Default::default()
            },
        };
        for start in (0..n).step_by(batch) {
            let count = batch.min(n - start);
            let src = Tensor {
                kind: 0,
                ne: [heads as i64 * 64, count as i64, 1, 1],
                nb: [4, 4 * heads * 64, 4 * heads * 64 * count, 4 * heads * 64 * count],
                data: values[start * heads * 64..].as_ptr().cast_mut().cast(),
                to_float: None,
                view: Default::default(),
            };
            let index = Tensor {
                kind: 27,
                ne: [count as i64, 1, 1, 1],
                nb: [8, 8 * count, 8 * count, 8 * count],
                data: targets[start..].as_ptr().cast_mut().cast(),
                to_float: None,
                view: Default::default(),
            };
            for ith in 0..threads {
                // SAFETY: tensors of the given shapes.
                unsafe { rows::set_rows(&dst, &src, &index, 8, ith, threads) }.unwrap();
            }
        }
        bytes
    };
    let want = run(n, 1);
    for (batch, threads) in [(n, 2), (n, 5), (1, 1), (7, 3), (64, 2)] {
        assert!(run(batch, threads) == want, "batches of {batch}, {threads} threads");
    }
}

#[test]
fn zeros_leave_an_unwritten_cell_alone() {
    let f = Delta::new(4, 64).unwrap();
    let mut cache = Cache::new(f, 64);
    let mut walker = Walker::new(f, kernels());
    cache.write(&mut walker, 5, 0, vec![0.0; 64]);
    assert!(cache.bytes.iter().all(|&b| b == 0));
    cache.write(&mut walker, 5, 0, Noise::new(2).row(64));
    cache.write(&mut walker, 5, 0, vec![0.0; 64]);
    assert_ne!(cache.kind(5, 0), RowKind::Empty);
    assert!(energy(&cache.read()[5 * HEADS]) < 0.5);
    assert!(cache.read()[6 * HEADS].iter().all(|&x| x == 0.0));
}

#[test]
fn sizes_are_the_published_ones() {
    let bytes = |bits, size| Delta::new(bits, size).unwrap().row_bytes();
    assert_eq!(bytes(4, 64), 36);
    assert_eq!(bytes(4, 128), 72);
    assert_eq!(bytes(3, 128), 56);
    assert_eq!(bytes(4, 80), 50);
    assert_eq!(bytes(3, 576), 252);
    assert_eq!(bytes(4, 320), 180);
    assert_eq!(bytes(4, 384), 216);
    assert_eq!(Delta::new(2, 64), None);
}
