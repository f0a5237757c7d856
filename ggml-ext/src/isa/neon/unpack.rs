//! Rows to levels and scales: what [`generic`] needs to know of NEON's registers, and how rows side by side are turned.

use super::polar::PolarChunks;
use super::products::fcvtl;
use crate::codec::levels::{LevelLayout, Packing};
use crate::codec::srft::{Srft, LEVELS_4};
use crate::codec::RowFormat;
use crate::isa::generic::{
    self, by_bundles, code_bytes, code_shifts, first_shift, unpack_rows, unpack_scales, with_chunks, Bytes,
    HalvedBytes, PackedRows, ScaleLanes, CODE_OFFSET, CODE_SHIFT,
};
use crate::isa::{LevelBlock, Role, StoredRows};
use std::arch::aarch64::*;

/// How a table wants the levels of a block.
pub(super) trait Forms {
    /// Levels for its `dot_levels`.
    ///
    /// # Safety
    /// Whole bundles of rows, and room for them.
    unsafe fn for_scores(rows: PackedRows, out: LevelBlock);

    /// Levels for its `weigh_levels`.
    ///
    /// # Safety
    /// As [`Forms::for_scores`].
    unsafe fn for_sums(rows: PackedRows, out: LevelBlock);
}

/// See [`crate::isa::Kernels::unpack`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn unpack<F: Forms>(layout: &LevelLayout, rows: StoredRows, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe { by_bundles(layout, rows, out, |rows, out| unpack_bundles::<F>(rows, role, out)) }
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack_bundles<F: Forms>(rows: PackedRows, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match role {
            Role::Dot => F::for_scores(rows, out),
            Role::Weigh => F::for_sums(rows, out),
            Role::Expand => unpack_rows::<int8x16_t>(rows, out),
        }
        unpack_scales::<float32x4_t>(rows, out);
    }
}

/// [`generic::unpack_turned`], with codes of 4 bits turned while they are still packed.
#[inline(always)]
pub(super) unsafe fn unpack_turned<const N: usize>(
    rows: PackedRows,
    out: LevelBlock,
    turn: impl Fn([int8x16_t; N]) -> [int8x16_t; N] + Copy,
) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => turn_nibbles(rows, f, out, turn),
            packing => with_chunks!(int8x16_t, packing, 0, |chunks| generic::unpack_turned(chunks, rows, out, turn)),
        }
    }
}

/// Half the shuffles.
#[inline(always)]
unsafe fn turn_nibbles<const N: usize>(
    rows: PackedRows,
    f: Srft,
    out: LevelBlock,
    turn: impl Fn([int8x16_t; N]) -> [int8x16_t; N],
) {
    // SAFETY: N rows and as many cells of the block; NEON is always there.
    unsafe {
        let table = vld1q_s8(LEVELS_4.table.as_ptr());
        for first in (0..rows.stored.n).step_by(N) {
            for chunk in 0..f.size() / 64 {
                let from = rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64));
                let to = out.levels.add(first * out.width + chunk * 64 * N);
                for half in 0..2 {
                    let mut x = [vdupq_n_s8(0); N];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = vld1q_s8(from.add(i * rows.stored.stride + 16 * half).cast());
                    }
                    for (j, codes) in turn(x).into_iter().enumerate() {
                        let codes = vreinterpretq_u8_s8(codes);
                        let low = vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(15)));
                        let high = vqtbl1q_s8(table, vshrq_n_u8::<4>(codes));
                        vst1q_s8(to.add(16 * (N * half + j)), low);
                        vst1q_s8(to.add(16 * (2 * N + N * half + j)), high);
                    }
                }
            }
        }
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: NEON is always there, and pointers hold what is read or written"
)]
impl Bytes for int8x16_t {
    const COUNT: usize = 16;
    type Polar = PolarChunks;

    #[inline(always)]
    unsafe fn splat(x: u8) -> Self {
        unsafe { vdupq_n_s8(x as i8) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut i8) {
        unsafe { vst1q_s8(to, self) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { vaddq_s8(self, b) }
    }
    #[inline(always)]
    unsafe fn table(entries: [u8; 16]) -> Self {
        unsafe { vld1q_s8(entries.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn lookup(self, codes: Self) -> Self {
        unsafe { vqtbl1q_s8(self, vreinterpretq_u8_s8(codes)) }
    }
    #[inline(always)]
    unsafe fn choose(bits: u64, set: Self, clear: Self) -> Self {
        unsafe {
            // Byte i/8 of the bits goes to byte i, where its bit i%8 decides.
            let bits = vreinterpretq_u8_u16(vdupq_n_u16(bits as u16));
            let bits = vqtbl1q_u8(bits, vcombine_u8(vdup_n_u8(0), vdup_n_u8(1)));
            let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
            vbslq_s8(vtstq_u8(bits, bit), set, clear)
        }
    }
    #[inline(always)]
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self) -> Self {
        unsafe {
            let shifted = vshlq_u8(vreinterpretq_u8_s8(self), vdupq_n_s8(-(SHIFT as i8)));
            vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8(MASK)))
        }
    }
    #[inline(always)]
    unsafe fn flipped_by(self, signs: Self) -> Self {
        unsafe { veorq_s8(self, vshrq_n_s8::<7>(signs)) }
    }
    #[inline(always)]
    unsafe fn codes<const BITS: u32, const VALUES: usize>(p: *const u8, part: usize) -> Self {
        let bytes = code_bytes(BITS, VALUES);
        unsafe {
            let x = match bytes {
                4 => vdupq_n_u32(p.cast::<u32>().read_unaligned()),
                8 => vreinterpretq_u32_u64(vdupq_n_u64(p.cast::<u64>().read_unaligned())),
                _ => vreinterpretq_u32_u8(vld1q_u8(p.add(16 * part % bytes))),
            };
            if BITS == 8 {
                return vreinterpretq_s8_u32(x);
            }
            let first = vdupq_n_s32(first_shift::<Self>(BITS, VALUES, part) as i32);
            let shifts = vld1q_s32(const { &code_shifts(BITS, VALUES) }.as_ptr().cast());
            let x = vshlq_u32(x, vnegq_s32(vaddq_s32(first, shifts)));
            vandq_s8(vreinterpretq_s8_u32(x), vdupq_n_s8((1 << (BITS % 8)) - 1))
        }
    }
}

/// The f16 numbers of codes, which are in the lower bytes of halves: bit 7 is the sign, or half a step. Code 0 is zero either way.
#[inline(always)]
fn halves_of_codes(codes: uint16x8_t, halved: HalvedBytes) -> uint32x4_t {
    // SAFETY: NEON is always there.
    unsafe {
        let bits = |word: i32| vreinterpretq_u16_s32(vdupq_n_s32(word));
        let sign = vandq_u16(vshlq_n_u16::<8>(codes), bits(halved.sign));
        let half = vandq_u16(vshrq_n_u16::<1>(codes), bits(halved.half));
        let c = vandq_u16(codes, vdupq_n_u16(0x7f));
        let offset = vandq_u16(vtstq_u16(c, c), vorrq_u16(half, vdupq_n_u16(CODE_OFFSET as u16)));
        let magnitude = vaddq_u16(vshlq_n_u16::<CODE_SHIFT>(c), offset);
        vreinterpretq_u32_u16(vorrq_u16(magnitude, sign))
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: NEON is always there, and pointers hold what is read or written"
)]
impl ScaleLanes for float32x4_t {
    const ROWS: usize = 4;
    type Words = uint32x4_t;
    type Neighbours = [uint32x4_t; 1];

    #[inline(always)]
    unsafe fn words(p: *const u8, stride: usize) -> uint32x4_t {
        unsafe {
            let word = |i: usize| p.add(i * stride).cast::<u32>();
            let x = vld1q_lane_u32::<0>(word(0), vdupq_n_u32(0));
            let x = vld1q_lane_u32::<1>(word(1), x);
            let x = vld1q_lane_u32::<2>(word(2), x);
            vld1q_lane_u32::<3>(word(3), x)
        }
    }
    #[inline(always)]
    unsafe fn neighbours(p: *const u8, stride: usize, _bytes: usize) -> [uint32x4_t; 1] {
        unsafe { [Self::words(p, stride)] }
    }
    #[inline(always)]
    unsafe fn finite_halves(words: uint32x4_t) -> [Self; 2] {
        unsafe {
            let (words, exponent) = (vreinterpretq_u16_u32(words), vdupq_n_u16(0x7c00));
            let bad = vceqq_u16(vandq_u16(words, exponent), exponent);
            let words = vreinterpretq_u32_u16(vbicq_u16(words, bad));
            [fcvtl(vmovn_u32(words)), fcvtl(vshrn_n_u32::<16>(words))]
        }
    }
    #[inline(always)]
    unsafe fn code_scales(words: uint32x4_t, halved: HalvedBytes) -> [Self; 4] {
        unsafe {
            let words = vreinterpretq_u16_u32(words);
            let even = halves_of_codes(words, halved);
            let odd = halves_of_codes(vshrq_n_u16::<8>(words), HalvedBytes::NONE);
            [
                fcvtl(vmovn_u32(even)),
                fcvtl(vmovn_u32(odd)),
                fcvtl(vshrn_n_u32::<16>(even)),
                fcvtl(vshrn_n_u32::<16>(odd)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_scaled(self, unit: f32, to: *mut f32) {
        unsafe { vst1q_f32(to, vmulq_n_f32(self, unit)) }
    }
}
