//! The definition of every kernel, in portable Rust. The compiler vectorizes much of it where it may.

use super::{
    padded, Kernels, LevelBlock, Matrix, MatrixMut, Queries, Role, Sight, StoredRows, CELLS, MATRIX_ROWS, MAX_WIDTH,
};
use crate::codec::delta::{Chain, Delta, Links, RowKind};
use crate::codec::levels::LevelLayout;
use crate::codec::plain::Plain;
use crate::codec::polar::Polar;
use crate::codec::{Format, RowFormat};
use crate::lanes::{round_even, Exp, Lanes, Simd, LANES};
use crate::rotation::{Rotation, MAX_HEAD};
use half::{bf16, f16};

/// The table.
pub static KERNELS: Kernels = Kernels {
    name: "scalar",
    encode,
    decode,
    encode_key: |f, x, m, before, row| f.encode_key::<Lanes>(x, m, before, row),
    follow,
    frame_and_chain: frame_and_chain::<Lanes>,
    chain_scores: chain_scores::<Lanes>,
    rotate: |r: &Rotation, x, y| Lanes::rotate(r, x, y),
    rotate_back: |r: &Rotation, y, x| Lanes::rotate_back(r, y, x),
    unpack,
    widen,
    quantize_query: quantize_query::<Lanes>,
    pairs: false,
    dot_levels,
    dot_floats: dot_floats::<Lanes>,
    dot_halves: dot_halves::<Lanes>,
    weigh_levels,
    expand,
    gemm64,
    transpose,
    softcap: |s, c| softcap::<Lanes>(s, c),
    sight,
    mask_scores: |s, m, slope| mask_scores::<Lanes>(s, m, slope),
    exponentials: |s, m| exponentials::<Lanes>(s, m),
    scale: |x, f| scale(x, f),
    polar_tables: |f, q, out| f.tables(q, out),
    polar_scores,
};

/// Encodes a row by itself. A call, as are the two below: codecs are inlined where they are named, and are large.
#[inline(never)]
pub fn encode(f: Format, x: &[f32], row: &mut [u8]) {
    f.encode::<Lanes>(x, row);
}

/// See [`RowFormat::decode`].
#[inline(never)]
pub fn decode(f: Format, row: &[u8], x: &mut [f32]) {
    f.decode::<Lanes>(row, x);
}

/// See [`RowFormat::decode_key`].
#[inline(never)]
pub fn decode_key(f: Format, row: &[u8], x: &mut [f32]) {
    f.decode_key::<Lanes>(row, x);
}

/// See [`Kernels::unpack`].
///
/// # Safety
/// `data` holds n rows `stride` bytes apart, `out` has room for n cells.
pub unsafe fn unpack(layout: &LevelLayout, rows: StoredRows, _role: Role, out: LevelBlock) {
    let mut scales = [0.0f32; MAX_WIDTH / 16];
    for c in 0..rows.n {
        // SAFETY: c < n rows of the promised size, and as many rows of the buffers.
        unsafe {
            let row = std::slice::from_raw_parts(rows.row(c), layout.row_bytes);
            let levels = std::slice::from_raw_parts_mut(out.levels.add(c * out.width), out.width);
            unpack_row(layout, row, levels, &mut scales[..out.scale_groups()]);
            for (g, &s) in scales[..out.scale_groups()].iter().enumerate() {
                *out.scale_at(c, g) = s;
            }
        }
    }
}

/// One row of [`unpack`], padded with zeros.
#[inline]
pub fn unpack_row(layout: &LevelLayout, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
    levels[layout.values..].fill(0);
    scales[layout.values / layout.scale_group..].fill(0.0);
    layout.packing.unpack(row, levels, scales);
}

/// See [`Kernels::follow`].
///
/// # Safety
/// The block holds as many cells, of u.len() values.
#[inline(always)]
pub unsafe fn follow(d: LevelBlock, cells: usize, first: RowKind, m: &[f32], u: &mut [f32]) {
    for (i, (u, m)) in u.as_chunks_mut::<LANES>().0.iter_mut().zip(m.chunks_exact(LANES)).enumerate() {
        let mut row = *u;
        for c in 0..cells {
            // SAFETY: sixteen levels of cell c, and their scale.
            let (levels, scale) = unsafe {
                let levels = d.levels.add(c * d.width + i * LANES).cast::<[i8; LANES]>();
                (&*levels, *d.scale_at(c, i * LANES / d.scale_group))
            };
            Delta::follow(levels, scale, if c == 0 { first } else { RowKind::Chained }, m, &mut row);
        }
        *u = row;
    }
}

/// See [`Kernels::group`].
///
/// # Safety
/// `data` holds the rows.
#[inline(always)]
pub unsafe fn frame_and_chain<S: Simd>(f: Delta, data: *const u8, stride: usize, rows: usize, m: &mut [f32]) -> Chain {
    m[f.size()..].fill(0.0);
    // SAFETY: the caller's promise.
    unsafe {
        f.frame::<S>(data, stride, rows, m);
        f.flags::<S>(data, stride, rows).chain()
    }
}

/// See [`Kernels::chain_scores`].
///
/// # Safety
/// As the shapes say.
#[inline(always)]
pub unsafe fn chain_scores<S: Simd>(chain: &Chain, m: &[f32], q: Matrix, factor: f32, rows: usize, scores: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(whole) = chain.whole() {
            linked_scores::<S>(&whole, m, q, factor, rows, scores);
        } else {
            linked_scores::<S>(&chain.links::<S>(), m, q, factor, rows, scores);
        }
    }
}

/// # Safety
/// As the shapes say.
#[inline(always)]
unsafe fn linked_scores<S: Simd>(links: &impl Links, m: &[f32], q: Matrix, factor: f32, rows: usize, scores: *mut f32) {
    for first in (0..rows).step_by(4) {
        // Four at a time, so that m is loaded once and sums have no steps of their own: the last one again where there are fewer.
        let mut sums = [S::splat(0.0); 4];
        for (i, m) in m.chunks_exact(LANES).enumerate() {
            let m = S::load(m);
            for (j, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a row of q, as wide as m.
                let q = unsafe { &*q.0.add((first + j).min(rows - 1) * q.1 + i * LANES).cast::<[f32; LANES]>() };
                *sum = S::load(q).fma(m, *sum);
            }
        }
        for (r, sum) in (first..rows).zip(S::sums(sums)) {
            // SAFETY: row r of the scores.
            let scores = unsafe { &mut *scores.add(r * CELLS).cast::<[f32; CELLS]>() };
            links.scores::<S>(scores, sum * factor);
        }
    }
}

/// See [`Kernels::widen`].
///
/// # Safety
/// `data` holds n rows of `size` values, `out` n rows of `width`.
#[inline]
pub unsafe fn widen(kind: Plain, data: *const u8, stride: usize, n: usize, size: usize, out: *mut f32, width: usize) {
    for c in 0..n {
        // SAFETY: row c of both; values are read byte-wise, so alignment does not matter.
        unsafe {
            let (row, out) = (data.add(c * stride), std::slice::from_raw_parts_mut(out.add(c * width), width));
            out[size..].fill(0.0);
            for (i, out) in out[..size].iter_mut().enumerate() {
                *out = match kind {
                    Plain::F16 => f16::from_bits(row.add(2 * i).cast::<u16>().read_unaligned()).to_f32(),
                    Plain::Bf16 => bf16::from_bits(row.add(2 * i).cast::<u16>().read_unaligned()).to_f32(),
                    _ => row.add(4 * i).cast::<f32>().read_unaligned(),
                };
            }
        }
    }
}

/// See [`Kernels::quantize_query`].
///
/// # Safety
/// `out` has room for row `row`, which is no narrower than q.
#[inline(always)]
pub unsafe fn quantize_query<S: Simd>(q: &[f32], factor: f32, out: Queries, row: usize) -> bool {
    // A query that is not finite has no 8-bit form: its scores are NaN, as they would be in f32. x - x is 0, or else NaN.
    let mut nothing = S::splat(0.0);
    for x in q.chunks_exact(LANES).map(S::load) {
        nothing = nothing.plus(x.minus(x));
    }
    let finite = nothing.sum() == 0.0;
    for g in 0..out.scale_groups() {
        // SAFETY: group g of the row.
        let (bytes, scale, sum) = unsafe {
            let at = row * out.scale_groups() + g;
            let bytes = out.bytes.add(row * out.width + g * out.scale_group).cast::<u8>();
            let bytes = std::slice::from_raw_parts_mut(bytes, out.scale_group);
            (bytes, &mut *out.scales.add(at), &mut *out.sums.add(at))
        };
        let values = q.get(g * out.scale_group..(g + 1) * out.scale_group).unwrap_or(&[]);
        let (none, one) = (S::splat(0.0), S::splat(1.0));
        let mut top = none;
        for x in values.chunks_exact(LANES).map(S::load) {
            if out.pairs {
                // Lanes 2i + 1 have what two neighbours are together, as far as they have that sign. A byte is rounded up by half at most, so
                // that 127 become no more than 128.
                for part in [x.max(none), none.minus(x).max(none)] {
                    top = part.shifted::<1>().fma_where(0xaaaa, one, part).max(top);
                }
            } else {
                top = x.abs().max(top);
            }
        }
        let largest = top.largest().min(f32::MAX);
        if largest == 0.0 || !finite {
            bytes.fill(0);
            (*scale, *sum) = (if finite { 0.0 } else { f32::NAN }, 0);
            continue;
        }
        // A reciprocal that f32 has.
        let inverse = S::splat(127.0 / largest.max(1e-36));
        let mut total = S::splat(0.0);
        for (bytes, x) in bytes.chunks_exact_mut(LANES).zip(values.chunks_exact(LANES)) {
            let whole = round_even(S::load(x).times(inverse));
            whole.store_bytes(bytes);
            total = total.plus(whole);
        }
        *scale = largest / 127.0 * factor;
        // Whole numbers that f32 has all of.
        *sum = total.sum() as i32;
    }
    finite
}

/// See [`Kernels::dot_levels`].
///
/// # Safety
/// The buffers hold n cells, `q` its rows, `out` as many rows of CELLS.
#[inline(always)]
pub unsafe fn dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    for r in 0..q.count {
        for c in 0..n {
            let mut sum = 0.0f32;
            for g in 0..k.scale_groups() {
                // SAFETY: group g of row r and of cell c.
                unsafe {
                    let bytes = std::slice::from_raw_parts(q.bytes.add(r * q.width + g * q.scale_group), q.scale_group);
                    let levels =
                        std::slice::from_raw_parts(k.levels.add(c * k.width + g * k.scale_group), k.scale_group);
                    let dot: i32 = bytes.iter().zip(levels).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
                    let scale = *k.scale_at(c, g) * *q.scales.add(r * q.scale_groups() + g);
                    sum = (dot as f32).mul_add(scale, sum);
                }
            }
            // SAFETY: cell c of row r.
            unsafe { *out.add(r * CELLS + c) = sum };
        }
    }
}

/// See [`Kernels::dot_floats`].
///
/// # Safety
/// As the shapes say.
#[inline(always)]
pub unsafe fn dot_floats<S: Simd>(k: *const f32, width: usize, n: usize, q: *const f32, rows: usize, out: *mut f32) {
    for c in 0..n {
        for r in 0..rows {
            // SAFETY: cell c and row r, both `width` wide.
            unsafe {
                let k = std::slice::from_raw_parts(k.add(c * width), width);
                let q = std::slice::from_raw_parts(q.add(r * width), width);
                let mut sum = S::splat(0.0);
                for (k, q) in k.chunks_exact(LANES).zip(q.chunks_exact(LANES)) {
                    sum = S::load(k).fma(S::load(q), sum);
                }
                *out.add(r * CELLS + c) = sum.sum();
            }
        }
    }
}

/// See [`Kernels::dot_halves`].
///
/// # Safety
/// As the shapes say.
#[inline(always)]
pub unsafe fn dot_halves<S: Simd>(m: *const u8, stride: usize, size: usize, x: *const f32, rows: usize, out: *mut f32) {
    for first in (0..MATRIX_ROWS).step_by(4) {
        for r in 0..rows {
            // SAFETY: four rows of f16 and row r of x, sixteen values at a time.
            unsafe {
                let x = std::slice::from_raw_parts(x.add(r * size), size);
                let mut sums = [S::splat(0.0); 4];
                for (i, x) in x.chunks_exact(LANES).enumerate() {
                    let x = S::load(x);
                    for (j, sum) in sums.iter_mut().enumerate() {
                        *sum = S::load_halves(m.add((first + j) * stride + 2 * LANES * i)).fma(x, *sum);
                    }
                }
                out.add(r * MATRIX_ROWS + first).cast::<[f32; 4]>().write_unaligned(S::sums(sums));
            }
        }
    }
}

/// See [`Kernels::weigh_levels`].
///
/// # Safety
/// As the shapes say.
pub unsafe fn weigh_levels(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    for c in 0..n {
        for i in 0..v.width {
            // SAFETY: value i of cell c, and the rows of weights and acc.
            unsafe {
                let value = f32::from(*v.levels.add(c * v.width + i)) * *v.scale_at(c, i / v.scale_group);
                for r in 0..rows {
                    let a = acc.add(r * v.width + i);
                    *a = value.mul_add(*weights.add(r * CELLS + c), *a);
                }
            }
        }
    }
}

/// See [`Kernels::expand`].
///
/// # Safety
/// As the shapes say.
#[inline(always)]
pub unsafe fn expand(v: LevelBlock, n: usize, out: *mut f32) {
    for c in 0..n {
        for g in 0..v.scale_groups() {
            // SAFETY: group g of cell c.
            unsafe {
                let at = c * v.width + g * v.scale_group;
                let levels = std::slice::from_raw_parts(v.levels.add(at), v.scale_group);
                let scale = *v.scale_at(c, g);
                let out = std::slice::from_raw_parts_mut(out.add(at), v.scale_group);
                for (o, &l) in out.iter_mut().zip(levels) {
                    *o = f32::from(l) * scale;
                }
            }
        }
    }
}

/// See [`Kernels::gemm64`].
///
/// # Safety
/// As the shapes say.
pub unsafe fn gemm64(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize) {
    for r in 0..rows {
        for k in 0..depth {
            for i in 0..64 {
                // SAFETY: within the shapes.
                unsafe {
                    let at = c.0.add(r * c.1 + i);
                    *at = (*a.0.add(r * a.1 + k)).mul_add(*b.0.add(k * b.1 + i), *at);
                }
            }
        }
    }
}

/// See [`Kernels::transpose`].
///
/// # Safety
/// As the shapes say.
#[inline(always)]
pub unsafe fn transpose(x: *const f32, width: usize, out: *mut f32) {
    const TILE: usize = 8;
    for i in (0..width).step_by(TILE) {
        for c in (0..CELLS).step_by(TILE) {
            // SAFETY: a tile of both; width and CELLS are multiples of TILE.
            unsafe {
                let mut tile = [[0.0f32; TILE]; TILE];
                for (a, row) in tile.iter_mut().enumerate() {
                    row.copy_from_slice(std::slice::from_raw_parts(x.add((c + a) * width + i), TILE));
                }
                for b in 0..TILE {
                    let to = std::slice::from_raw_parts_mut(out.add((i + b) * CELLS + c), TILE);
                    for (a, to) in to.iter_mut().enumerate() {
                        *to = tile[a][b];
                    }
                }
            }
        }
    }
}

/// See [`Kernels::softcap`]: tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|).
#[inline(always)]
pub fn softcap<S: Simd>(scores: &mut [f32; CELLS], cap: f32) {
    let (exp, one) = (Exp::<S>::constants(), S::splat(1.0));
    for s in scores.chunks_exact_mut(LANES) {
        let x = S::load(s);
        let e = exp.of(x.abs().times(S::splat(-2.0)));
        let y = one.minus(e).over(one.plus(e)).times(S::splat(cap));
        S::splat(0.0).above(x, y.times(S::splat(-1.0)), y).store(s);
    }
}

/// See [`Kernels::sight`].
///
/// # Safety
/// `row` holds n <= CELLS 16-bit floats, aligned or not.
#[inline(always)]
pub unsafe fn sight(row: *const u8, n: usize) -> Sight {
    let mut mask = [0u16; CELLS];
    let (mut any, mut unlike) = (0u16, 0u16);
    // SAFETY: the caller's promise. A whole block has a length that the compiler knows.
    unsafe {
        if n == CELLS {
            mask = row.cast::<[u16; CELLS]>().read_unaligned();
            for m in mask {
                any |= m & 0x7fff;
                unlike |= m ^ MINUS_INFINITY;
            }
        } else {
            std::ptr::copy_nonoverlapping(row, mask.as_mut_ptr().cast(), 2 * n);
            for &m in &mask[..n] {
                any |= m & 0x7fff;
                unlike |= m ^ MINUS_INFINITY;
            }
        }
    }
    match (any, unlike) {
        (0, _) => Sight::Open,
        (_, 0) => Sight::Hidden,
        _ => Sight::Mixed,
    }
}

/// As an f16.
const MINUS_INFINITY: u16 = 0xfc00;

/// See [`Kernels::mask_scores`].
#[inline(always)]
pub fn mask_scores<S: Simd>(scores: &mut [f32; CELLS], mask: Option<&[f32; CELLS]>, slope: f32) -> f32 {
    let hidden = S::splat(f32::NEG_INFINITY);
    let mut top = hidden;
    if let Some(mask) = mask {
        for (s, m) in scores.chunks_exact_mut(LANES).zip(mask.chunks_exact(LANES)) {
            let m = S::load(m);
            // A hidden cell may hold anything, a NaN too.
            let masked = m.above(hidden, m.fma(S::splat(slope), S::load(s)), hidden);
            masked.store(s);
            top = masked.max(top);
        }
    } else {
        for s in scores.chunks_exact(LANES) {
            top = S::load(s).max(top);
        }
    }
    top.largest()
}

/// See [`Kernels::polar_scores`].
///
/// # Safety
/// As the shapes say.
pub unsafe fn polar_scores(f: Polar, rows: StoredRows, tables: *const f32, queries: usize, out: *mut f32) {
    let len = f.table_len();
    for r in 0..queries {
        for c in 0..rows.n {
            // SAFETY: row c, the tables of query r, cell c of its scores.
            unsafe {
                let row = std::slice::from_raw_parts(rows.row(c), f.row_bytes());
                *out.add(r * CELLS + c) = f.score(row, std::slice::from_raw_parts(tables.add(r * len), len));
            }
        }
    }
}

/// See [`Kernels::scale`].
#[inline(always)]
pub fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

/// See [`Kernels::exponentials`].
#[inline(always)]
pub fn exponentials<S: Simd>(scores: &mut [f32; CELLS], max: f32) -> f32 {
    let (exp, less) = (Exp::<S>::constants(), S::constant(-max));
    let mut sum = S::splat(0.0);
    for s in scores.chunks_exact_mut(LANES) {
        let e = exp.of(S::load(s).plus(less));
        e.store(s);
        sum = sum.plus(e);
    }
    sum.sum()
}

const _: () = assert!(padded(MAX_HEAD) == MAX_HEAD);
