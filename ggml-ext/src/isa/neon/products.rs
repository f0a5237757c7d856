//! The instructions that the compiler has no stable name for, each behind one function.
//!
//! They are assembled whatever the target's features are; a function that uses one belongs to a table that is only given
//! out where the CPU has it. The conversion of 16-bit floats is in every NEON.

use std::arch::aarch64::*;
use std::arch::asm;

/// sums + the products of four bytes of `x` and of word LANE of `q` in each lane: `sdot`.
///
/// # Safety
/// The CPU has dotprod.
#[inline(always)]
pub(super) unsafe fn sdot<const LANE: i32>(mut sums: int32x4_t, x: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: no memory, no flags.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sums:v}.4s, {x:v}.16b, {q:v}.4b[{lane}]",
            sums = inout(vreg) sums, x = in(vreg) x, q = in(vreg) q, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// sums + a b^T, where a and b are two rows of eight bytes and the sums two rows of two: `smmla`.
///
/// # Safety
/// The CPU has i8mm.
#[inline(always)]
pub(super) unsafe fn smmla(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: no memory, no flags.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Four 16-bit floats, widened: `fcvtl`.
#[inline(always)]
pub(super) fn fcvtl(x: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: no memory, no flags, an instruction of every NEON.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {x:v}.4h",
            wide = lateout(vreg) wide, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// How scores of four cells in the lanes of a register are summed.
pub(super) trait Products {
    /// The sums on their way.
    type Sums: Copy;

    /// None yet.
    ///
    /// # Safety
    /// As [`Products::add`].
    unsafe fn zero() -> Self::Sums;

    /// + the products of two columns and of words 2 * HALF and 2 * HALF + 1 of the query.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn add<const HALF: usize>(sums: Self::Sums, columns: [int8x16_t; 2], q: int8x16_t) -> Self::Sums;

    /// A sum per cell.
    ///
    /// # Safety
    /// As [`Products::add`].
    unsafe fn total(sums: Self::Sums) -> int32x4_t;
}

/// Every NEON: products of bytes in 16 bits, two of them added there, which fits: a level is at most 128 in magnitude
/// and a query 127. Lower and upper halves of columns are two cells each.
pub(super) struct Long;

impl Products for Long {
    type Sums = [int32x4_t; 2];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        // SAFETY: NEON is always there.
        unsafe { [vdupq_n_s32(0); 2] }
    }

    #[inline(always)]
    unsafe fn add<const HALF: usize>([low, high]: Self::Sums, [a, b]: [int8x16_t; 2], q: int8x16_t) -> Self::Sums {
        // SAFETY: NEON is always there.
        unsafe {
            let q = vreinterpretq_s32_s8(q);
            let (qa, qb) = match HALF {
                0 => (vdupq_laneq_s32::<0>(q), vdupq_laneq_s32::<1>(q)),
                _ => (vdupq_laneq_s32::<2>(q), vdupq_laneq_s32::<3>(q)),
            };
            let (qa, qb) = (vreinterpretq_s8_s32(qa), vreinterpretq_s8_s32(qb));
            let of_low = vmull_s8(vget_low_s8(a), vget_low_s8(qa));
            let of_low = vmlal_s8(of_low, vget_low_s8(b), vget_low_s8(qb));
            let of_high = vmlal_high_s8(vmull_high_s8(a, qa), b, qb);
            [vpadalq_s16(low, of_low), vpadalq_s16(high, of_high)]
        }
    }

    #[inline(always)]
    unsafe fn total([low, high]: Self::Sums) -> int32x4_t {
        // SAFETY: NEON is always there.
        unsafe { vpaddq_s32(low, high) }
    }
}

/// With dotprod.
pub(super) struct Dot;

impl Products for Dot {
    type Sums = int32x4_t;

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        // SAFETY: NEON is always there.
        unsafe { vdupq_n_s32(0) }
    }

    #[inline(always)]
    unsafe fn add<const HALF: usize>(sums: Self::Sums, [a, b]: [int8x16_t; 2], q: int8x16_t) -> Self::Sums {
        // SAFETY: the caller's promise.
        unsafe {
            match HALF {
                0 => sdot::<1>(sdot::<0>(sums, a, q), b, q),
                _ => sdot::<3>(sdot::<2>(sums, a, q), b, q),
            }
        }
    }

    #[inline(always)]
    unsafe fn total(sums: Self::Sums) -> int32x4_t {
        sums
    }
}
