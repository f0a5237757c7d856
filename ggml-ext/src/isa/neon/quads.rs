//! Weighted sums with dotprod: four cells at a time, values in the lanes of a register.
//!
//! ```text
//! levels  per 4 cells: width / 4 pieces of 16 bytes; byte c of lane v of piece j = value 4j + v of cell c
//! ```
//!
//! `sdot` then takes four cells of four values with one word of weights for all lanes, once for the high and once for the
//! low bytes of the weights: eight products of 16 bits an instruction, where `smlal` has four and wants levels of 16 bits.

use super::products::sdot;
use super::unpack::unpack_turned;
use super::weights::{add_sums, joined, largest_scales, Weights};
use crate::isa::generic::PackedRows;
use crate::isa::{by_rows, LevelBlock, BUNDLE, CELLS};
use std::arch::aarch64::*;

/// Cells whose bytes share a lane.
const QUAD: usize = 4;
/// Registers of values that are worked on together: as many as leave room for the sums of four rows.
const REGISTERS: usize = 2;

/// The high bytes of the weights of sixteen cells, and the low ones.
type Bytes = [int8x16_t; 2];

/// Fills the levels of a block; cells beyond n have weight 0 and may hold anything.
#[inline(always)]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on; NEON is always there.
    unsafe { unpack_turned::<QUAD>(rows, out, |x| interleave(x)) }
}

/// The bytes of the four by turns.
#[inline(always)]
unsafe fn interleave(v: [int8x16_t; QUAD]) -> [int8x16_t; QUAD] {
    // SAFETY: NEON is always there.
    unsafe {
        let (a, b) = (vzip1q_s8(v[0], v[2]), vzip1q_s8(v[1], v[3]));
        let (c, d) = (vzip2q_s8(v[0], v[2]), vzip2q_s8(v[1], v[3]));
        [vzip1q_s8(a, b), vzip2q_s8(a, b), vzip1q_s8(c, d), vzip2q_s8(c, d)]
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
            let mut bytes = [[[vdupq_n_s8(0); 2]; H]; CELLS / BUNDLE];
            for (b, bytes) in bytes[..bundles].iter_mut().enumerate() {
                for (h, bytes) in bytes.iter_mut().enumerate() {
                    *bytes = split(rows[h].words(b, v.scale_at(b * BUNDLE, g)));
                }
            }
            for at in (g * v.scale_group..(g + 1) * v.scale_group).step_by(4 * REGISTERS) {
                let sums = weigh_values::<H>(v.levels.add(QUAD * at), v.width, &bytes[..bundles]);
                for h in 0..H {
                    for (i, &[high, low]) in sums[h].iter().enumerate() {
                        add_sums(acc.add(h * v.width + at + 4 * i), joined(high, low), rows[h].unit);
                    }
                }
            }
        }
    }
}

/// High and low bytes.
#[inline(always)]
unsafe fn split([a, b]: [int16x8_t; 2]) -> Bytes {
    // SAFETY: NEON is always there.
    unsafe {
        let high = vrshrn_high_n_s16::<8>(vrshrn_n_s16::<8>(a), b);
        [high, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b))]
    }
}

/// Sums of eight values with the high and with the low bytes.
#[inline(always)]
unsafe fn weigh_values<const H: usize>(
    levels: *const i8,
    width: usize,
    bytes: &[[Bytes; H]],
) -> [[[int32x4_t; 2]; REGISTERS]; H] {
    // SAFETY: as many bundles of levels as of weights, on a CPU with dotprod.
    unsafe {
        let mut sums = [[[vdupq_n_s32(0); 2]; REGISTERS]; H];
        for (b, bytes) in bytes.iter().enumerate() {
            macro_rules! quad {
                ($quad:literal) => {
                    let from = levels.add((b * BUNDLE + QUAD * $quad) * width);
                    for i in 0..REGISTERS {
                        let x = vld1q_s8(from.add(16 * i));
                        for h in 0..H {
                            for part in 0..2 {
                                sums[h][i][part] = sdot::<$quad>(sums[h][i][part], x, bytes[h][part]);
                            }
                        }
                    }
                };
            }
            quad!(0);
            quad!(1);
            quad!(2);
            quad!(3);
        }
        sums
    }
}
