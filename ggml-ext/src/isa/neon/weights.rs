//! Weights of cells as 16-bit numbers, with the scales of the cells in them.
//!
//! Values are summed in integers: a weight times the scale of a group becomes a 16-bit number, and levels are never
//! converted to floats. What a row loses is 1/65278 of the largest product of a cell's weight and scale in the block, far
//! below what 8-bit queries leave. With [`sdot`](super::products::sdot) and `smmla` a weight is 256 * high + low, two
//! signed bytes, whose sums come together at the end.

use crate::isa::{LevelBlock, BUNDLE, CELLS};
use std::arch::aarch64::*;

/// The largest weight, 256 * 127 + 127. CELLS of them times a level of 128 stay within 32 bits.
const LARGEST: f32 = 32639.0;

/// Registers of four cells in a block.
const REGISTERS: usize = CELLS / 4;

/// The largest scale of each cell: a sink has much weight and small values, and must not set the unit of the others.
#[inline(always)]
pub(super) unsafe fn largest_scales(v: LevelBlock, n: usize) -> [f32; CELLS] {
    let mut tops = [0.0f32; CELLS];
    for c in (0..n).step_by(4) {
        // SAFETY: scales of four cells, which are in the block whatever n is.
        unsafe {
            let mut top = vdupq_n_f32(0.0);
            for g in 0..v.scale_groups() {
                top = vmaxq_f32(top, vabsq_f32(vld1q_f32(v.scale_at(c, g))));
            }
            vst1q_f32(tops.as_mut_ptr().add(c), top);
        }
    }
    tops
}

/// A row of weights, and what a 16-bit one is worth.
#[derive(Clone, Copy)]
pub(super) struct Weights {
    /// Such that times any scale of its cell each fits 16 bits.
    scaled: [float32x4_t; REGISTERS],
    pub unit: f32,
}

impl Weights {
    /// H rows of CELLS weights.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    pub unsafe fn rows<const H: usize>(weights: *const f32, tops: &[f32; CELLS]) -> [Weights; H] {
        // SAFETY: the caller's promise; NEON is always there.
        unsafe {
            let mut rows = [Weights { scaled: [vdupq_n_f32(0.0); REGISTERS], unit: 0.0 }; H];
            for (h, row) in rows.iter_mut().enumerate() {
                let weight = |i: usize| vld1q_f32(weights.add(h * CELLS + 4 * i));
                let mut most = vdupq_n_f32(0.0);
                for i in 0..REGISTERS {
                    most = vmaxq_f32(most, vmulq_f32(weight(i), vld1q_f32(tops.as_ptr().add(4 * i))));
                }
                let largest = vmaxvq_f32(most);
                // Below this nothing is left in f32 either.
                let (factor, unit) = if largest > 1e-30 { (LARGEST / largest, largest / LARGEST) } else { (0.0, 0.0) };
                for (i, scaled) in row.scaled.iter_mut().enumerate() {
                    *scaled = vmulq_n_f32(weight(i), factor);
                }
                row.unit = unit;
            }
            rows
        }
    }

    /// The 16-bit weights of a bundle for the values whose scales are these.
    ///
    /// # Safety
    /// `scales` of sixteen cells.
    #[inline(always)]
    pub unsafe fn words(&self, bundle: usize, scales: *const f32) -> [int16x8_t; 2] {
        // SAFETY: the caller's promise; NEON is always there.
        unsafe {
            let four = |i: usize| {
                let w = vmulq_f32(vld1q_f32(scales.add(4 * i)), self.scaled[bundle * BUNDLE / 4 + i]);
                vreinterpretq_s16_s32(vcvtnq_s32_f32(w))
            };
            [vuzp1q_s16(four(0), four(1)), vuzp1q_s16(four(2), four(3))]
        }
    }
}

/// sums * unit is added to four values.
///
/// # Safety
/// Four values.
#[inline(always)]
pub(super) unsafe fn add_sums(to: *mut f32, sums: int32x4_t, unit: f32) {
    // SAFETY: the caller's promise.
    unsafe { vst1q_f32(to, vfmaq_n_f32(vld1q_f32(to), vcvtq_f32_s32(sums), unit)) }
}

/// 256 * high + low.
#[inline(always)]
pub(super) unsafe fn joined(high: int32x4_t, low: int32x4_t) -> int32x4_t {
    // SAFETY: NEON is always there.
    unsafe { vaddq_s32(vshlq_n_s32::<8>(high), low) }
}
