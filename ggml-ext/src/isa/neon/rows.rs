//! Weighted sums on every NEON: one cell at a time, rows as they are, levels widened to 16 bits for `smlal`.

use super::weights::{add_sums, largest_scales, Weights};
use crate::isa::{by_rows, LevelBlock, BUNDLE, CELLS};
use std::arch::aarch64::*;

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
            let mut words = [[vdupq_n_s16(0); H]; CELLS / 8];
            for b in 0..bundles {
                for h in 0..H {
                    [words[2 * b][h], words[2 * b + 1][h]] = rows[h].words(b, v.scale_at(b * BUNDLE, g));
                }
            }
            for at in (g * v.scale_group..(g + 1) * v.scale_group).step_by(16) {
                let sums = weigh_sixteen::<H>(v.levels.add(at), v.width, &words[..2 * bundles]);
                for h in 0..H {
                    for (i, &sum) in sums[h].iter().enumerate() {
                        add_sums(acc.add(h * v.width + at + 4 * i), sum, rows[h].unit);
                    }
                }
            }
        }
    }
}

/// Sums of sixteen values over eights of cells.
#[inline(always)]
unsafe fn weigh_sixteen<const H: usize>(
    levels: *const i8,
    width: usize,
    words: &[[int16x8_t; H]],
) -> [[int32x4_t; 4]; H] {
    // SAFETY: eight cells of levels to each register of weights; NEON is always there.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 4]; H];
        for (eight, words) in words.iter().enumerate() {
            macro_rules! cells {
                ($($cell:literal)+) => {$(
                    let x = vld1q_s8(levels.add((8 * eight + $cell) * width));
                    let (a, b) = (vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
                    for h in 0..H {
                        let w = words[h];
                        sums[h][0] = vmlal_laneq_s16::<$cell>(sums[h][0], vget_low_s16(a), w);
                        sums[h][1] = vmlal_high_laneq_s16::<$cell>(sums[h][1], a, w);
                        sums[h][2] = vmlal_laneq_s16::<$cell>(sums[h][2], vget_low_s16(b), w);
                        sums[h][3] = vmlal_high_laneq_s16::<$cell>(sums[h][3], b, w);
                    }
                )+};
            }
            cells!(0 1 2 3 4 5 6 7);
        }
        sums
    }
}
