//! Scores without i8mm: four cells side by side in the lanes of a register.
//!
//! ```text
//! levels  per 4 cells: width / 4 columns of 16 bytes; lane c of column j = values 4j..4j+4 of cell c
//! ```
//!
//! `sdot` takes one word of a query register for all lanes, so queries need no broadcast, and sums no shuffle at the end.

use super::products::Products;
use super::unpack::unpack_turned;
use crate::isa::generic::PackedRows;
use crate::isa::{by_rows, LevelBlock, Queries, CELLS};
use std::arch::aarch64::*;

/// Cells of a register.
const LANES: usize = 4;
/// Registers of cells that are worked on together: as many as leave room for the sums of four queries.
const REGISTERS: usize = 2;

/// Fills the levels of a block.
#[inline(always)]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on; NEON is always there.
    unsafe { unpack_turned::<LANES>(rows, out, |x| words_of_4(x)) }
}

/// Result k has word k of the four.
#[inline(always)]
unsafe fn words_of_4(v: [int8x16_t; LANES]) -> [int8x16_t; LANES] {
    // SAFETY: NEON is always there.
    unsafe {
        let v = |i: usize| vreinterpretq_s32_s8(v[i]);
        let (a, b) = (vtrn1q_s32(v(0), v(1)), vtrn2q_s32(v(0), v(1)));
        let (c, d) = (vtrn1q_s32(v(2), v(3)), vtrn2q_s32(v(2), v(3)));
        let low = |x, y| vreinterpretq_s8_s64(vtrn1q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
        let high = |x, y| vreinterpretq_s8_s64(vtrn2q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
        [low(a, c), low(b, d), high(a, c), high(b, d)]
    }
}

/// See [`crate::isa::Kernels::dot_levels`].
#[inline(always)]
pub(super) unsafe fn dot_levels<P: Products>(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    by_rows!(q.count, [1 2 3 4], |first, COUNT| {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match k.scale_group {
                32 => dot_rows::<P, COUNT, 32>(k, n, q, first, out),
                _ => dot_rows::<P, COUNT, 16>(k, n, q, first, out),
            }
        }
    });
}

/// H rows against eight cells at a time.
#[inline(always)]
unsafe fn dot_rows<P: Products, const H: usize, const GROUP: usize>(
    k: LevelBlock,
    n: usize,
    q: Queries,
    first: usize,
    out: *mut f32,
) {
    let (width, groups) = (k.width, k.width / GROUP);
    for c in (0..n).step_by(REGISTERS * LANES) {
        // SAFETY: eight cells of the block, which has room for CELLS whatever n is; H rows of q and out.
        unsafe {
            let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; H];
            for g in 0..groups {
                let mut dots = [[P::zero(); REGISTERS]; H];
                for at in (g * GROUP..(g + 1) * GROUP).step_by(16) {
                    let columns = k.levels.add(c * width + LANES * at);
                    let column = |b: usize, j: usize| vld1q_s8(columns.add(b * LANES * width + 16 * j));
                    let mut word = [vdupq_n_s8(0); H];
                    for (h, word) in word.iter_mut().enumerate() {
                        *word = vld1q_s8(q.bytes.add((first + h) * width + at));
                    }
                    for b in 0..REGISTERS {
                        let (one, two) = ([column(b, 0), column(b, 1)], [column(b, 2), column(b, 3)]);
                        for h in 0..H {
                            dots[h][b] = P::add::<0>(dots[h][b], one, word[h]);
                            dots[h][b] = P::add::<1>(dots[h][b], two, word[h]);
                        }
                    }
                }
                for b in 0..REGISTERS {
                    let of_key = vld1q_f32(k.scale_at(c + b * LANES, g));
                    for h in 0..H {
                        let scale = vmulq_n_f32(of_key, *q.scales.add((first + h) * groups + g));
                        sums[h][b] = vfmaq_f32(sums[h][b], vcvtq_f32_s32(P::total(dots[h][b])), scale);
                    }
                }
            }
            for (h, sums) in sums.iter().enumerate() {
                for (b, &sum) in sums.iter().enumerate() {
                    vst1q_f32(out.add((first + h) * CELLS + c + b * LANES), sum);
                }
            }
        }
    }
}
