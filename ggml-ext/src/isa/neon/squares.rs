//! Scores and weighted sums with i8mm, whose `smmla` multiplies two rows of eight bytes by two others.
//!
//! ```text
//! scores  per 2 cells: width / 8 pieces of 16 bytes; half c of piece j = values 8j..8j+8 of cell c
//! sums    per 8 cells: width / 2 pieces of 16 bytes; half v of piece j = value 2j + v of the eight cells
//! ```
//!
//! A score's other side is two queries, a sum's the high and the low bytes of one row of weights: twice the products of
//! `sdot` an instruction, which pays most where many query rows share the unpacking.

use super::products::smmla;
use super::unpack::unpack_turned;
use super::weights::{add_sums, joined, largest_scales, Weights};
use crate::isa::generic::PackedRows;
use crate::isa::{by_rows, LevelBlock, Queries, BUNDLE, CELLS, MAX_WIDTH};
use std::arch::aarch64::*;

/// Cells of a piece of scores.
const SCORE_CELLS: usize = 2;
/// Cells of a piece of sums, and of a step of scores.
const SUM_CELLS: usize = 8;
/// Pieces of values that are worked on together: as many as leave room for the sums of four rows.
const PIECES: usize = 4;

/// Fills the levels of a block for scores.
#[inline(always)]
pub(super) unsafe fn unpack_scores(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on; NEON is always there.
    unsafe { unpack_turned::<SCORE_CELLS>(rows, out, |x| halves(x)) }
}

/// Fills the levels of a block for sums; cells beyond n have weight 0 and may hold anything.
#[inline(always)]
pub(super) unsafe fn unpack_sums(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on; NEON is always there.
    unsafe { unpack_turned::<SUM_CELLS>(rows, out, |x| interleave(x)) }
}

/// The lower halves of both, the upper halves of both.
#[inline(always)]
unsafe fn halves([a, b]: [int8x16_t; SCORE_CELLS]) -> [int8x16_t; SCORE_CELLS] {
    // SAFETY: NEON is always there.
    unsafe {
        let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
        [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))]
    }
}

/// The bytes of the eight by turns.
#[inline(always)]
unsafe fn interleave(mut v: [int8x16_t; SUM_CELLS]) -> [int8x16_t; SUM_CELLS] {
    // Each round puts the first half beside the second: after three, eight neighbours are of the eight registers.
    for _ in 0..3 {
        let x = v;
        for i in 0..SUM_CELLS / 2 {
            // SAFETY: NEON is always there.
            unsafe {
                v[2 * i] = vzip1q_s8(x[i], x[i + SUM_CELLS / 2]);
                v[2 * i + 1] = vzip2q_s8(x[i], x[i + SUM_CELLS / 2]);
            }
        }
    }
    v
}

/// See [`crate::isa::Kernels::dot_levels`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    by_rows!(q.count, [1 2 3 4], |first, COUNT| {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match (COUNT.div_ceil(2), k.scale_group) {
                (1, 32) => dot_rows::<COUNT, 1, 32>(k, n, q, first, out),
                (1, _) => dot_rows::<COUNT, 1, 16>(k, n, q, first, out),
                (_, 32) => dot_rows::<COUNT, 2, 32>(k, n, q, first, out),
                _ => dot_rows::<COUNT, 2, 16>(k, n, q, first, out),
            }
        }
    });
}

/// H rows, in PAIRS pairs, against eight cells at a time.
#[inline(always)]
unsafe fn dot_rows<const H: usize, const PAIRS: usize, const GROUP: usize>(
    k: LevelBlock,
    n: usize,
    q: Queries,
    first: usize,
    out: *mut f32,
) {
    let (width, groups) = (k.width, k.width / GROUP);
    // SAFETY: eight cells of the block at a time, which has room for CELLS whatever n is; H rows of q and out.
    unsafe {
        // Two rows by turns, eight bytes each; the last row stands in for one that is missing.
        let mut queries = std::mem::MaybeUninit::<[[i8; 2 * MAX_WIDTH]; PAIRS]>::uninit();
        let queries: [*mut i8; PAIRS] =
            std::array::from_fn(|p| queries.as_mut_ptr().cast::<i8>().add(p * 2 * MAX_WIDTH));
        for (p, to) in queries.iter().enumerate() {
            let row = |h: usize| q.bytes.add((first + h.min(H - 1)) * width);
            for at in (0..width).step_by(16) {
                let [low, high] = halves([vld1q_s8(row(2 * p).add(at)), vld1q_s8(row(2 * p + 1).add(at))]);
                vst1q_s8(to.add(2 * at), low);
                vst1q_s8(to.add(2 * at + 16), high);
            }
        }
        for c in (0..n).step_by(SUM_CELLS) {
            let mut sums = [[vdupq_n_f32(0.0); 2]; H];
            for g in 0..groups {
                let mut dots = [[vdupq_n_s32(0); SUM_CELLS / SCORE_CELLS]; PAIRS];
                for at in (g * GROUP..(g + 1) * GROUP).step_by(8) {
                    for i in 0..SUM_CELLS / SCORE_CELLS {
                        let x = vld1q_s8(k.levels.add((c + SCORE_CELLS * i) * width + SCORE_CELLS * at));
                        for p in 0..PAIRS {
                            dots[p][i] = smmla(dots[p][i], x, vld1q_s8(queries[p].add(SCORE_CELLS * at)));
                        }
                    }
                }
                for b in 0..2 {
                    let of_key = vld1q_f32(k.scale_at(c + 4 * b, g));
                    for h in 0..H {
                        // Lanes are cell 0 with both queries, cell 1 with both.
                        let (x, y) = (dots[h / 2][2 * b], dots[h / 2][2 * b + 1]);
                        let dot = if h % 2 == 0 { vuzp1q_s32(x, y) } else { vuzp2q_s32(x, y) };
                        let scale = vmulq_n_f32(of_key, *q.scales.add((first + h) * groups + g));
                        sums[h][b] = vfmaq_f32(sums[h][b], vcvtq_f32_s32(dot), scale);
                    }
                }
            }
            for (h, sums) in sums.iter().enumerate() {
                for (b, &sum) in sums.iter().enumerate() {
                    vst1q_f32(out.add((first + h) * CELLS + c + 4 * b), sum);
                }
            }
        }
    }
}

/// See [`crate::isa::Kernels::weigh_levels`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn weigh_levels(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    // SAFETY: COUNT rows of weights and sums.
    unsafe {
        let tops = largest_scales(v, n);
        by_rows!(rows, [1 2 3 4], |first, COUNT| {
            weigh_rows::<COUNT>(v, n, &tops, weights.add(first * CELLS), acc.add(first * v.width))
        });
    }
}

/// H rows of weights.
#[inline(always)]
unsafe fn weigh_rows<const H: usize>(v: LevelBlock, n: usize, tops: &[f32; CELLS], weights: *const f32, acc: *mut f32) {
    let bundles = n.div_ceil(BUNDLE);
    // SAFETY: H rows of CELLS weights and of `width` sums; `bundles` bundles of the block.
    unsafe {
        let rows: [Weights; H] = Weights::rows(weights, tops);
        for g in 0..v.scale_groups() {
            // Of eight cells the high bytes, then the low ones.
            let mut bytes = [[vdupq_n_s8(0); H]; CELLS / SUM_CELLS];
            for b in 0..bundles {
                for h in 0..H {
                    for (i, x) in rows[h].words(b, v.scale_at(b * BUNDLE, g)).into_iter().enumerate() {
                        bytes[2 * b + i][h] = vcombine_s8(vrshrn_n_s16::<8>(x), vmovn_s16(x));
                    }
                }
            }
            for at in (g * v.scale_group..(g + 1) * v.scale_group).step_by(2 * PIECES) {
                let sums = weigh_values::<H>(v.levels.add(SUM_CELLS * at), v.width, &bytes[..2 * bundles]);
                for h in 0..H {
                    for i in 0..PIECES / 2 {
                        // Lanes are value 0 with high and low bytes, value 1 with both.
                        let (x, y) = (sums[h][2 * i], sums[h][2 * i + 1]);
                        let sum = joined(vuzp1q_s32(x, y), vuzp2q_s32(x, y));
                        add_sums(acc.add(h * v.width + at + 4 * i), sum, rows[h].unit);
                    }
                }
            }
        }
    }
}

/// Sums of eight values.
#[inline(always)]
unsafe fn weigh_values<const H: usize>(
    levels: *const i8,
    width: usize,
    bytes: &[[int8x16_t; H]],
) -> [[int32x4_t; PIECES]; H] {
    // SAFETY: eight cells of levels to each register of weights, on a CPU with i8mm.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); PIECES]; H];
        for (eight, bytes) in bytes.iter().enumerate() {
            for i in 0..PIECES {
                let x = vld1q_s8(levels.add(eight * SUM_CELLS * width + 16 * i));
                for h in 0..H {
                    sums[h][i] = smmla(sums[h][i], x, bytes[h]);
                }
            }
        }
        sums
    }
}
