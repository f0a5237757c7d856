//! NEON, and the same with dotprod and with i8mm.
//!
//! The tables differ in how they multiply levels, and so in the form that they want them in ([`unpack`]):
//!
//! | table | scores | weighted sums |
//! |---|---|---|
//! | neon | [`columns`]: `smull`, `smlal`, `sadalp` | [`rows`]: `smlal` of 16 bits |
//! | dotprod | [`columns`]: `sdot` | [`quads`]: `sdot`, twice for a weight of two bytes |
//! | i8mm | [`squares`]: `smmla` | [`squares`]: `smmla` |
//!
//! What works on floats is the same in all of them: 16-bit floats are only ever converted, which every NEON can. Functions
//! of a table do not enable its features for the compiler: the few instructions in question are assembled by hand
//! ([`products`]), so everything inlines into everything.

mod columns;
mod matrix;
mod polar;
mod products;
mod quads;
mod rows;
mod squares;
mod unpack;
mod weights;

use super::generic::{unpack_rows, PackedRows};
use super::{compile_portable_kernels, scalar};
use super::{Kernels, LevelBlock, Matrix, Queries, Sight, CELLS};
use crate::codec::delta::{Chain, Delta, RowKind};
use crate::codec::polar::Polar;
use crate::codec::{Format, RowFormat};
use crate::lanes::{Simd, LANES};
use crate::rotation::Rotation;
use products::{fcvtl, Dot, Long};
use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;
use unpack::Forms;

const NEON: Kernels = Kernels {
    name: "neon",
    encode,
    decode,
    encode_key,
    follow,
    frame_and_chain,
    chain_scores,
    rotate,
    rotate_back,
    unpack: unpack::unpack::<Plain>,
    widen: matrix::widen,
    quantize_query,
    pairs: false,
    dot_levels: columns::dot_levels::<Long>,
    dot_floats,
    dot_halves,
    weigh_levels: rows::weigh_levels,
    expand: matrix::expand,
    gemm64: matrix::gemm64,
    transpose: matrix::transpose,
    softcap,
    sight,
    mask_scores,
    exponentials,
    scale,
    polar_tables,
    polar_scores: polar::scores,
};

/// The table of every CPU.
pub fn kernels() -> &'static Kernels {
    static KERNELS: Kernels = NEON;
    &KERNELS
}

/// The table with dotprod, where the CPU has it.
pub fn dotprod_kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = Kernels {
        name: "dotprod",
        unpack: unpack::unpack::<WithDotprod>,
        dot_levels: columns::dot_levels::<Dot>,
        weigh_levels: quads::weigh_levels,
        ..NEON
    };
    is_aarch64_feature_detected!("dotprod").then_some(&KERNELS)
}

/// The table with i8mm, where the CPU has it.
pub fn i8mm_kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = Kernels {
        name: "i8mm",
        unpack: unpack::unpack::<WithI8mm>,
        dot_levels: squares::dot_levels,
        weigh_levels: squares::weigh_levels,
        ..NEON
    };
    is_aarch64_feature_detected!("i8mm").then_some(&KERNELS)
}

/// The forms of each table.
struct Plain;
struct WithDotprod;
struct WithI8mm;

#[expect(clippy::undocumented_unsafe_blocks, reason = "the caller's promise is passed on")]
impl Forms for Plain {
    #[inline(always)]
    unsafe fn for_scores(rows: PackedRows, out: LevelBlock) {
        unsafe { columns::unpack(rows, out) }
    }
    #[inline(always)]
    unsafe fn for_sums(rows: PackedRows, out: LevelBlock) {
        unsafe { unpack_rows::<int8x16_t>(rows, out) }
    }
}

#[expect(clippy::undocumented_unsafe_blocks, reason = "the caller's promise is passed on")]
impl Forms for WithDotprod {
    #[inline(always)]
    unsafe fn for_scores(rows: PackedRows, out: LevelBlock) {
        unsafe { columns::unpack(rows, out) }
    }
    #[inline(always)]
    unsafe fn for_sums(rows: PackedRows, out: LevelBlock) {
        unsafe { quads::unpack(rows, out) }
    }
}

#[expect(clippy::undocumented_unsafe_blocks, reason = "the caller's promise is passed on")]
impl Forms for WithI8mm {
    #[inline(always)]
    unsafe fn for_scores(rows: PackedRows, out: LevelBlock) {
        unsafe { squares::unpack_scores(rows, out) }
    }
    #[inline(always)]
    unsafe fn for_sums(rows: PackedRows, out: LevelBlock) {
        unsafe { squares::unpack_sums(rows, out) }
    }
}

compile_portable_kernels!("neon", F32x16);

/// Sixteen lanes in four registers.
#[derive(Clone, Copy)]
struct F32x16([float32x4_t; 4]);

impl F32x16 {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        F32x16::by_register(|i| f(self.0[i], b.0[i]))
    }

    /// Written out: the library's function for it is not always inlined.
    #[inline(always)]
    fn by_register(f: impl Fn(usize) -> float32x4_t) -> Self {
        F32x16([f(0), f(1), f(2), f(3)])
    }

    /// Lane i with i+8, then i+4, i+2, i+1, in the first lane.
    #[inline(always)]
    fn fold(self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> f32 {
        let [a, b, c, d] = self.0;
        // SAFETY: NEON is always there.
        unsafe {
            let four = f(f(a, c), f(b, d));
            let two = f(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(f(two, vextq_f32::<1>(two, two)))
        }
    }
}

/// Not `fmax`: where there is a NaN the second one counts.
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is always there.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

#[inline(always)]
fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: NEON is always there.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: NEON is always there, and slices are as long as what is read of them"
)]
impl Simd for F32x16 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        unsafe { F32x16([vdupq_n_f32(x); 4]) }
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        let x = &x[..LANES];
        F32x16::by_register(|i| unsafe { vld1q_f32(x[4 * i..].as_ptr()) })
    }
    #[inline(always)]
    unsafe fn load_halves(x: *const u8) -> Self {
        F32x16::by_register(|i| unsafe { fcvtl(vld1_u16(x.add(8 * i).cast())) })
    }
    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        let x = &mut x[..LANES];
        for (i, v) in self.0.into_iter().enumerate() {
            unsafe { vst1q_f32(x[4 * i..].as_mut_ptr(), v) }
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: &mut [u8]) {
        unsafe {
            let whole = |i: usize| vreinterpretq_s16_s32(vcvtq_s32_f32(self.0[i]));
            let low = vreinterpretq_u8_s16(vuzp1q_s16(whole(0), whole(1)));
            let high = vreinterpretq_u8_s16(vuzp1q_s16(whole(2), whole(3)));
            vst1q_u8(x[..LANES].as_mut_ptr(), vuzp1q_u8(low, high));
        }
    }
    #[inline(always)]
    fn times(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    fn over(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        self.zip(b, |a, b| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    fn power_of_lowest_bits(self) -> Self {
        F32x16::by_register(|i| unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(self.0[i]))) })
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        F32x16::by_register(|i| unsafe { vfmaq_f32(c.0[i], self.0[i], b.0[i]) })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, larger)
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.zip(b, smaller)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        F32x16::by_register(|i| unsafe { vabsq_f32(self.0[i]) })
    }
    #[inline(always)]
    fn above(self, limit: Self, yes: Self, no: Self) -> Self {
        F32x16::by_register(|i| unsafe { vbslq_f32(vcgtq_f32(self.0[i], limit.0[i]), yes.0[i], no.0[i]) })
    }
    #[inline(always)]
    fn fma_where(self, mask: u16, b: Self, c: Self) -> Self {
        let sum = self.fma(b, c);
        F32x16::by_register(|i| unsafe {
            let bit = vld1q_u32([1u32, 2, 4, 8].as_ptr());
            vbslq_f32(vtstq_u32(vdupq_n_u32(u32::from(mask) >> (4 * i)), bit), sum.0[i], c.0[i])
        })
    }
    #[inline(always)]
    fn shifted<const N: usize>(self) -> Self {
        unsafe {
            let zero = vdupq_n_f32(0.0);
            let [a, b, c, d] = self.0;
            match N {
                8 => F32x16([zero, zero, a, b]),
                4 => F32x16([zero, a, b, c]),
                2 => {
                    F32x16([vextq_f32::<2>(zero, a), vextq_f32::<2>(a, b), vextq_f32::<2>(b, c), vextq_f32::<2>(c, d)])
                }
                _ => {
                    F32x16([vextq_f32::<3>(zero, a), vextq_f32::<3>(a, b), vextq_f32::<3>(b, c), vextq_f32::<3>(c, d)])
                }
            }
        }
    }
    #[inline(always)]
    fn last_four(self) -> Self {
        F32x16([self.0[3]; 4])
    }
    #[inline(always)]
    fn bits<const BIT: u32>(words: &[u32]) -> u16 {
        let words = &words[..LANES];
        (0..4).fold(0, |bits, i| unsafe {
            let x = vld1q_u32(words[4 * i..].as_ptr());
            let set = vandq_u32(vtstq_u32(x, vdupq_n_u32(1 << BIT)), vld1q_u32([1u32, 2, 4, 8].as_ptr()));
            bits | (vaddvq_u32(set) as u16) << (4 * i)
        })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        self.fold(|a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    fn sums(four: [Self; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = four.map(|F32x16([a, b, c, d])| vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d)));
            let low = |a, b| vcombine_f32(vget_low_f32(a), vget_low_f32(b));
            let high = |a, b| vcombine_f32(vget_high_f32(a), vget_high_f32(b));
            let mut sums = [0.0; 4];
            let [ab, cd] = [(a, b), (c, d)].map(|(a, b)| vaddq_f32(low(a, b), high(a, b)));
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(ab, cd));
            sums
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.fold(larger)
    }
    #[inline(always)]
    fn smallest(self) -> f32 {
        self.fold(smaller)
    }
    #[inline(always)]
    fn rotate(r: &Rotation, x: &[f32], y: &mut [f32]) {
        unsafe { rotate(r, x, y) }
    }
    #[inline(always)]
    fn rotate_back(r: &Rotation, y: &[f32], x: &mut [f32]) {
        unsafe { rotate_back(r, y, x) }
    }
}
