//! Rows to levels and scales.
//!
//! A kind of row says how 32 of its values become levels in two registers ([`Chunks`]); the forms that products want
//! ([`Forms`]) are written once, over that.

use super::polar::PolarChunks;
use super::products::fcvtl;
use super::signs::{Signs, TurboChunks};
use crate::codec::format::RowFormat;
use crate::codec::levels::{LevelLayout, Packing, Scales};
use crate::codec::plain::BLOCK;
use crate::codec::srft::{Srft, LEVELS_2, LEVELS_3, LEVELS_4};
use crate::isa::{with_chunks, LevelBlock, Role, BUNDLE, MAX_ROW_BYTES};
use std::arch::aarch64::*;
use std::mem::MaybeUninit;

/// 32 levels.
pub(super) type Levels = [int8x16_t; 2];

/// How a table wants the levels of a block.
pub(super) trait Forms {
    /// Levels for its `dot_levels`.
    ///
    /// # Safety
    /// Whole bundles of rows, and room for them.
    unsafe fn for_scores(rows: Rows, out: LevelBlock);

    /// Levels for its `weigh_levels`.
    ///
    /// # Safety
    /// As [`Forms::for_scores`].
    unsafe fn for_sums(rows: Rows, out: LevelBlock);
}

/// See [`crate::isa::Kernels::unpack`].
#[target_feature(enable = "neon")]
pub(super) unsafe fn unpack<F: Forms>(
    layout: LevelLayout,
    data: *const u8,
    stride: usize,
    n: usize,
    role: Role,
    out: LevelBlock,
) {
    let (whole, rest) = (n / BUNDLE * BUNDLE, n % BUNDLE);
    // SAFETY: the caller's promise is passed on; the block has room for whole bundles.
    unsafe {
        unpack_bundles::<F>(Rows { layout, data, stride, n: whole }, role, 0, out);
        if rest > 0 {
            // A copy of the last rows makes one more bundle, whose other rows are nobody's.
            let mut copy = MaybeUninit::<[u8; BUNDLE * MAX_ROW_BYTES]>::uninit();
            let (copy, bytes) = (copy.as_mut_ptr().cast::<u8>(), layout.row_bytes);
            for i in 0..BUNDLE {
                let row = data.add((whole + i.min(rest - 1)) * stride);
                std::ptr::copy_nonoverlapping(row, copy.add(i * bytes), bytes);
            }
            unpack_bundles::<F>(Rows { layout, data: copy, stride: bytes, n: BUNDLE }, role, whole, out);
        }
    }
}

/// Whole bundles, to the cells from `first` on.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack_bundles<F: Forms>(rows: Rows, role: Role, first: usize, out: LevelBlock) {
    let levels = out.levels.wrapping_add(first * out.width);
    // SAFETY: the caller's promise is passed on.
    unsafe {
        let out = LevelBlock { levels, scales: out.scale_at(first, 0), ..out };
        match role {
            Role::Dot => F::for_scores(rows, out),
            Role::Weigh => F::for_sums(rows, out),
            Role::Expand => unpack_rows(rows, out),
        }
        rows.scales(out);
    }
}

/// A kind of row, 32 values at a time.
pub(super) trait Chunks: Copy {
    /// Levels of values 32 * chunk .. 32 * chunk + 32 of a row padded to a multiple of 64, zero beyond its end.
    ///
    /// # Safety
    /// A row of this kind.
    unsafe fn levels(self, row: *const u8, chunk: usize) -> Levels;
}

#[derive(Clone, Copy)]
pub(super) struct SrftChunks<const BITS: u32> {
    table: int8x16_t,
    size: usize,
    /// Where the codes begin.
    codes: usize,
}

impl<const BITS: u32> SrftChunks<BITS> {
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn new(f: Srft) -> Self {
        SrftChunks { table: table::<BITS>(), size: f.size(), codes: f.scale_bytes() }
    }

    /// The same packing with other levels, codes beginning at byte `codes`.
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn over(levels: &[i8], size: usize, codes: usize) -> Self {
        SrftChunks { table: table_of(levels), size, codes }
    }

    /// Codes to levels.
    #[inline]
    #[target_feature(enable = "neon")]
    fn look(self, codes: uint8x16_t) -> int8x16_t {
        match BITS {
            8 => vreinterpretq_s8_u8(codes),
            _ => vqtbl1q_s8(self.table, codes),
        }
    }

    /// The first or second 32 of the values behind the last 64, padded.
    #[inline(never)]
    #[target_feature(enable = "neon")]
    unsafe fn levels_of_tail(self, tail: usize, codes: *const u8, half: usize) -> Levels {
        let zero = vdupq_n_s8(0);
        // SAFETY: the tail's chunks of 32 and 16 values.
        unsafe {
            if half == 0 && tail >= 32 {
                return codes_32::<BITS>(codes).map(|codes| self.look(codes));
            }
            // Sixteen values are the first of a tail of 16 and the last of one of 48.
            if tail.is_multiple_of(32) || (half == 1) != (tail > 32) {
                return [zero; 2];
            }
            [self.look(codes_16::<BITS>(codes.add(code_bytes(BITS, 32 * half)))), zero]
        }
    }
}

impl<const BITS: u32> Chunks for SrftChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> Levels {
        // SAFETY: the caller's promise.
        unsafe {
            // Codes are packed by 64 values.
            let (start, half) = (chunk / 2 * 64, chunk % 2);
            let codes = row.add(self.codes + code_bytes(BITS, start));
            if self.size - start < 64 {
                return self.levels_of_tail(self.size - start, codes, half);
            }
            let [a, b] = codes_of_half::<BITS>(codes, half);
            [self.look(a), self.look(b)]
        }
    }
}

/// q8_0 and q4_0: blocks of 32 with the scale in front.
#[derive(Clone, Copy)]
pub(super) struct BlockChunks<const BITS: u32> {
    pub size: usize,
}

impl<const BITS: u32> Chunks for BlockChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> Levels {
        // SAFETY: the caller's promise; the row may end before its padding does.
        unsafe {
            if chunk * BLOCK >= self.size {
                return [vdupq_n_s8(0); 2];
            }
            let codes = codes_32::<BITS>(row.add(chunk * (2 + code_bytes(BITS, BLOCK)) + 2));
            let middle = vdupq_n_s8(if BITS == 8 { 0 } else { 8 });
            [vsubq_s8(vreinterpretq_s8_u8(codes[0]), middle), vsubq_s8(vreinterpretq_s8_u8(codes[1]), middle)]
        }
    }
}

/// Levels one row after the other.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn unpack_rows(rows: Rows, out: LevelBlock) {
    with_chunks!(rows.layout.packing, |chunks| {
        for c in 0..rows.n {
            for chunk in 0..out.width / 32 {
                // SAFETY: a chunk of row c, and room for it.
                unsafe {
                    let [a, b] = chunks.levels(rows.row(c), chunk);
                    let to = out.levels.add(c * out.width + 32 * chunk);
                    vst1q_s8(to, a);
                    vst1q_s8(to.add(16), b);
                }
            }
        }
    })
}

/// Calls `put` with registers of N rows beside each other, `turn` having mixed them, for N rows of the block at a time:
/// `turn` works on 16 bytes of each row, so values 16i .. 16i + 16 of N cells are 16 N bytes of the block.
#[inline(always)]
pub(super) unsafe fn unpack_turned<const N: usize>(
    rows: Rows,
    out: LevelBlock,
    turn: impl Fn([int8x16_t; N]) -> [int8x16_t; N] + Copy,
) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => turn_nibbles(rows, f, out, turn),
            packing => with_chunks!(packing, |chunks| turn_levels(chunks, rows, out, turn)),
        }
    }
}

/// Codes change places while they are still packed: half the shuffles.
#[inline(always)]
unsafe fn turn_nibbles<const N: usize>(
    rows: Rows,
    f: Srft,
    out: LevelBlock,
    turn: impl Fn([int8x16_t; N]) -> [int8x16_t; N],
) {
    // SAFETY: N rows and as many cells of the block; NEON is always there.
    unsafe {
        let table = table::<4>();
        for first in (0..rows.n).step_by(N) {
            for chunk in 0..f.size() / 64 {
                let from = rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64));
                let to = out.levels.add(first * out.width + chunk * 64 * N);
                for half in 0..2 {
                    let mut x = [vdupq_n_s8(0); N];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = vld1q_s8(from.add(i * rows.stride + 16 * half).cast());
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

/// Every other kind of row.
#[inline(always)]
unsafe fn turn_levels<const N: usize>(
    chunks: impl Chunks,
    rows: Rows,
    out: LevelBlock,
    turn: impl Fn([int8x16_t; N]) -> [int8x16_t; N],
) {
    // SAFETY: chunks of N rows, as many cells of the block; NEON is always there.
    unsafe {
        for first in (0..rows.n).step_by(N) {
            for chunk in 0..out.width / 32 {
                let (mut a, mut b) = ([vdupq_n_s8(0); N], [vdupq_n_s8(0); N]);
                for i in 0..N {
                    [a[i], b[i]] = chunks.levels(rows.row(first + i), chunk);
                }
                let to = out.levels.add(first * out.width + chunk * 32 * N);
                for (j, x) in turn(a).into_iter().chain(turn(b)).enumerate() {
                    vst1q_s8(to.add(16 * j), x);
                }
            }
        }
    }
}

/// Packed rows of one kind, whole bundles of them.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub layout: LevelLayout,
    pub data: *const u8,
    pub stride: usize,
    pub n: usize,
}

impl Rows {
    /// Row c.
    #[inline(always)]
    pub unsafe fn row(self, c: usize) -> *const u8 {
        // SAFETY: the caller keeps c below n.
        unsafe { self.data.add(c * self.stride) }
    }

    /// The scales of all rows, four rows at a time.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales(self, out: LevelBlock) {
        let (step, unit) = match self.layout.scales {
            Scales::PerGroup { step, unit } => (step, unit),
            // SAFETY: the caller's promise is passed on.
            Scales::PerHalf(units) => return unsafe { self.scales_per_half(units, out) },
        };
        let groups = self.layout.values / self.layout.group;
        for first in (0..self.n).step_by(4) {
            // SAFETY: four rows and as many cells of the block.
            unsafe {
                // Neighbours come with the same words.
                for g in (0..groups).step_by(if step == 2 { 2 } else { 1 }) {
                    let [one, next] = finite_scales(words(self.row(first).add(g * step), self.stride));
                    vst1q_f32(out.scale_at(first, g), vmulq_n_f32(one, unit));
                    if step == 2 && g + 1 < groups {
                        vst1q_f32(out.scale_at(first, g + 1), vmulq_n_f32(next, unit));
                    }
                }
                for g in groups..out.groups() {
                    vst1q_f32(out.scale_at(first, g), vdupq_n_f32(0.0));
                }
            }
        }
    }

    /// Two scales a row: that of the levels for the first half of the groups, that of the signs for the second.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales_per_half(self, [of_levels, of_signs]: [f32; 2], out: LevelBlock) {
        let half = out.groups() / 2;
        for first in (0..self.n).step_by(4) {
            // SAFETY: four rows and as many cells of the block.
            unsafe {
                let [levels, signs] = finite_scales(words(self.row(first), self.stride));
                let (levels, signs) = (vmulq_n_f32(levels, of_levels), vmulq_n_f32(signs, of_signs));
                for g in 0..half {
                    vst1q_f32(out.scale_at(first, g), levels);
                    vst1q_f32(out.scale_at(first, half + g), signs);
                }
            }
        }
    }
}

/// The four bytes at `p` and those of the three rows after it; inside the rows, since codes follow scales.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn words(p: *const u8, stride: usize) -> uint32x4_t {
    // SAFETY: see above.
    unsafe {
        let word = |i: usize| p.add(i * stride).cast::<u32>();
        let x = vld1q_lane_u32::<0>(word(0), vdupq_n_u32(0));
        let x = vld1q_lane_u32::<1>(word(1), x);
        let x = vld1q_lane_u32::<2>(word(2), x);
        vld1q_lane_u32::<3>(word(3), x)
    }
}

/// The stored scales in the lower and in the upper halves of words; NaN and infinities count as zero.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn finite_scales(words: uint32x4_t) -> [float32x4_t; 2] {
    let (words, exponent) = (vreinterpretq_u16_u32(words), vdupq_n_u16(0x7c00));
    let bad = vceqq_u16(vandq_u16(words, exponent), exponent);
    let words = vreinterpretq_u32_u16(vbicq_u16(words, bad));
    [fcvtl(vmovn_u32(words)), fcvtl(vshrn_n_u32::<16>(words))]
}

/// The level table of a width in bits.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn table<const BITS: u32>() -> int8x16_t {
    match BITS {
        4 => table_of(&LEVELS_4.table),
        3 => table_of(&LEVELS_3.table),
        _ => table_of(&LEVELS_2.table),
    }
}

/// Levels, repeated to sixteen.
#[inline]
#[target_feature(enable = "neon")]
fn table_of(levels: &[i8]) -> int8x16_t {
    let mut t = [0i8; 16];
    for (i, t) in t.iter_mut().enumerate() {
        *t = levels[i % levels.len()];
    }
    // SAFETY: sixteen bytes.
    unsafe { vld1q_s8(t.as_ptr()) }
}

/// Bytes of the codes of so many values.
pub(super) const fn code_bytes(bits: u32, values: usize) -> usize {
    bits as usize * values / 8
}

/// Each byte shifted down by as much as its byte of `by` says.
#[inline]
#[target_feature(enable = "neon")]
fn shifted_down(x: uint8x16_t, by: u128) -> uint8x16_t {
    let by: [i8; 16] = by.to_le_bytes().map(|b| -(b as i8));
    // SAFETY: sixteen bytes.
    vshlq_u8(x, unsafe { vld1q_s8(by.as_ptr()) })
}

/// The codes of values 0..32 or 32..64 of 64.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn codes_of_half<const BITS: u32>(p: *const u8, half: usize) -> [uint8x16_t; 2] {
    // SAFETY: the 64, 32, 24 or 16 bytes of 64 codes.
    unsafe {
        if BITS == 8 {
            return [vld1q_u8(p.add(32 * half)), vld1q_u8(p.add(32 * half + 16))];
        }
        if BITS == 4 {
            let (a, b) = (vld1q_u8(p), vld1q_u8(p.add(16)));
            return match half {
                0 => [vandq_u8(a, vdupq_n_u8(15)), vandq_u8(b, vdupq_n_u8(15))],
                _ => [vshrq_n_u8::<4>(a), vshrq_n_u8::<4>(b)],
            };
        }
        let b = vld1q_u8(p);
        let b = if half == 0 { b } else { vshrq_n_u8::<4>(b) };
        let low = [vandq_u8(b, vdupq_n_u8(3)), vandq_u8(vshrq_n_u8::<2>(b), vdupq_n_u8(3))];
        if BITS == 2 {
            return low;
        }
        with_fours(low, p.add(16 + 4 * half).cast::<u32>().read_unaligned())
    }
}

/// The codes of a chunk of 32 values.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn codes_32<const BITS: u32>(p: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the chunk's 32, 16, 12 or 8 bytes.
    unsafe {
        if BITS == 8 {
            return [vld1q_u8(p), vld1q_u8(p.add(16))];
        }
        if BITS == 4 {
            let b = vld1q_u8(p);
            return [vandq_u8(b, vdupq_n_u8(15)), vshrq_n_u8::<4>(b)];
        }
        let b = vld1_u8(p);
        let b = shifted_down(vcombine_u8(b, b), 0x0202_0202_0202_0202_u128 << 64);
        let low = [vandq_u8(b, vdupq_n_u8(3)), vandq_u8(vshrq_n_u8::<4>(b), vdupq_n_u8(3))];
        if BITS == 2 {
            return low;
        }
        with_fours(low, p.add(8).cast::<u32>().read_unaligned())
    }
}

/// The codes of a chunk of 16 values.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn codes_16<const BITS: u32>(p: *const u8) -> uint8x16_t {
    // SAFETY: the chunk's 16, 8, 6 or 4 bytes.
    unsafe {
        if BITS == 8 {
            return vld1q_u8(p);
        }
        if BITS == 4 {
            let b = vld1_u8(p);
            return vcombine_u8(vand_u8(b, vdup_n_u8(15)), vshr_n_u8::<4>(b));
        }
        let b = vreinterpretq_u8_u32(vdupq_n_u32(p.cast::<u32>().read_unaligned()));
        let low = vandq_u8(shifted_down(b, 0x0606_0606_0404_0404_0202_0202_0000_0000), vdupq_n_u8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(4).cast::<u16>().read_unaligned();
        with_fours([low, low], u32::from(high))[0]
    }
}

/// + 4 where bit i of the bits is set.
#[inline]
#[target_feature(enable = "neon")]
fn with_fours(low: [uint8x16_t; 2], bits: u32) -> [uint8x16_t; 2] {
    let [a, b] = spread_bits(bits);
    let four = vdupq_n_u8(4);
    [vorrq_u8(low[0], vandq_u8(a, four)), vorrq_u8(low[1], vandq_u8(b, four))]
}

/// Byte i is all ones where bit i is set, else 0.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn spread_bits(bits: u32) -> [uint8x16_t; 2] {
    // Byte i/8 of the bits goes to byte i, where its bit i%8 decides.
    let bits = vreinterpretq_u8_u32(vdupq_n_u32(bits));
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let low = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
    let high = vcombine_u8(vdup_n_u8(2), vdup_n_u8(3));
    [vtstq_u8(vqtbl1q_u8(bits, low), bit), vtstq_u8(vqtbl1q_u8(bits, high), bit)]
}
