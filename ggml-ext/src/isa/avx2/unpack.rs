//! Rows to levels and scales.
//!
//! A kind of row says how 32 of its values become levels in a register ([`Chunks`]); the forms that products want
//! are written once, over that.

use super::polar::PolarChunks;
use super::signs::{Signs, TurboChunks};
use super::{columns, pairs};
use crate::codec::format::RowFormat;
use crate::codec::levels::{LevelLayout, Scales};
use crate::codec::plain::BLOCK;
use crate::codec::srft::{Srft, LEVELS_2, LEVELS_3, LEVELS_4};
use crate::isa::{with_chunks, LevelBlock, Role, BUNDLE, MAX_ROW_BYTES};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// See [`crate::isa::Kernels::unpack`]; BIAS is mixed into the levels of scores.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack<const BIAS: u8>(
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
        unpack_bundles::<BIAS>(Rows { layout, data, stride, n: whole }, role, 0, out);
        if rest > 0 {
            // A copy of the last rows makes one more bundle, whose other rows are nobody's.
            let mut copy = MaybeUninit::<[u8; BUNDLE * MAX_ROW_BYTES]>::uninit();
            let (copy, bytes) = (copy.as_mut_ptr().cast::<u8>(), layout.row_bytes);
            for i in 0..BUNDLE {
                let row = data.add((whole + i.min(rest - 1)) * stride);
                std::ptr::copy_nonoverlapping(row, copy.add(i * bytes), bytes);
            }
            unpack_bundles::<BIAS>(Rows { layout, data: copy, stride: bytes, n: BUNDLE }, role, whole, out);
        }
    }
}

/// Whole bundles, to the cells from `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_bundles<const BIAS: u8>(rows: Rows, role: Role, first: usize, out: LevelBlock) {
    let levels = out.levels.wrapping_add(first * out.width);
    // SAFETY: the caller's promise is passed on.
    unsafe {
        let out = LevelBlock { levels, scales: out.scale_at(first, 0), ..out };
        match role {
            Role::Dot => columns::unpack(rows, BIAS, out),
            Role::Weigh => pairs::unpack(rows, out),
            Role::Expand => unpack_rows(rows, out),
        }
        rows.scales(out);
    }
}

/// A kind of row, 32 values at a time.
pub(super) trait Chunks: Copy {
    /// Levels of values 32 * chunk .. 32 * chunk + 32 of a row padded to a multiple of 64, level zero beyond its end.
    ///
    /// # Safety
    /// A row of this kind, on a CPU with AVX2.
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m256i;
}

#[derive(Clone, Copy)]
pub(super) struct SrftChunks<const BITS: u32> {
    table: __m256i,
    flips: __m256i,
    size: usize,
    /// Where the codes begin.
    codes: usize,
}

impl<const BITS: u32> SrftChunks<BITS> {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn new(f: Srft, flip: u8) -> Self {
        let flips = _mm256_set1_epi8(flip as i8);
        SrftChunks { table: table::<BITS>(flip), flips, size: f.size(), codes: f.scale_bytes() }
    }

    /// The same packing with other levels, codes beginning at byte `codes`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn over(levels: &[i8], size: usize, codes: usize, flip: u8) -> Self {
        SrftChunks { table: table_of(levels, flip), flips: _mm256_set1_epi8(flip as i8), size, codes }
    }
}

impl<const BITS: u32> Chunks for SrftChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            // Codes are packed by 64 values.
            let (start, half) = (chunk / 2 * 64, chunk % 2);
            let codes = row.add(self.codes + code_bytes(BITS, start));
            if self.size - start < 64 {
                return levels_of_tail(self, self.size - start, codes, half);
            }
            match BITS {
                8 => _mm256_xor_si256(_mm256_loadu_si256(codes.add(32 * half).cast()), self.flips),
                _ => _mm256_shuffle_epi8(self.table, codes_of_half::<BITS>(codes, half)),
            }
        }
    }
}

/// q8_0 and q4_0: blocks of 32 with the scale in front.
#[derive(Clone, Copy)]
pub(super) struct BlockChunks<const BITS: u32> {
    pub size: usize,
    pub flip: u8,
}

impl<const BITS: u32> Chunks for BlockChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m256i {
        // SAFETY: the caller's promise; the row may end before its padding does.
        unsafe {
            let flips = _mm256_set1_epi8(self.flip as i8);
            if chunk * BLOCK >= self.size {
                return flips;
            }
            let codes = row.add(chunk * (2 + code_bytes(BITS, BLOCK)) + 2);
            let levels = match BITS {
                8 => _mm256_loadu_si256(codes.cast()),
                _ => _mm256_sub_epi8(codes_32::<4>(codes), _mm256_set1_epi8(8)),
            };
            _mm256_xor_si256(levels, flips)
        }
    }
}

/// Levels one row after the other.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_rows(rows: Rows, out: LevelBlock) {
    with_chunks!(rows.layout.packing, flip: 0, |chunks| {
        for c in 0..rows.n {
            for chunk in 0..out.width / 32 {
                // SAFETY: a chunk of row c, and room for it.
                unsafe {
                    let levels = chunks.levels(rows.row(c), chunk);
                    _mm256_storeu_si256(out.levels.add(c * out.width + 32 * chunk).cast(), levels);
                }
            }
        }
    })
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

    /// The scales of all rows, eight rows at a time.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(self, out: LevelBlock) {
        let (step, unit) = match self.layout.scales {
            Scales::PerGroup { step, unit } => (step, unit),
            // SAFETY: the caller's promise is passed on.
            Scales::PerHalf(units) => return unsafe { self.scales_per_half(units, out) },
        };
        let groups = self.layout.values / self.layout.group;
        for first in (0..self.n).step_by(8) {
            // SAFETY: eight rows and as many cells of the block.
            unsafe {
                // Neighbours come with the same words.
                for g in (0..groups).step_by(if step == 2 { 2 } else { 1 }) {
                    let [one, next] = finite_scales(words(self.row(first).add(g * step), self.stride));
                    let unit = _mm256_set1_ps(unit);
                    _mm256_storeu_ps(out.scale_at(first, g), _mm256_mul_ps(one, unit));
                    if step == 2 && g + 1 < groups {
                        _mm256_storeu_ps(out.scale_at(first, g + 1), _mm256_mul_ps(next, unit));
                    }
                }
                for g in groups..out.groups() {
                    _mm256_storeu_ps(out.scale_at(first, g), _mm256_setzero_ps());
                }
            }
        }
    }

    /// Two scales a row: that of the levels for the first half of the groups, that of the signs for the second.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales_per_half(self, [of_levels, of_signs]: [f32; 2], out: LevelBlock) {
        let half = out.groups() / 2;
        for first in (0..self.n).step_by(8) {
            // SAFETY: eight rows and as many cells of the block.
            unsafe {
                let [levels, signs] = finite_scales(words(self.row(first), self.stride));
                let levels = _mm256_mul_ps(levels, _mm256_set1_ps(of_levels));
                let signs = _mm256_mul_ps(signs, _mm256_set1_ps(of_signs));
                for g in 0..half {
                    _mm256_storeu_ps(out.scale_at(first, g), levels);
                    _mm256_storeu_ps(out.scale_at(first, half + g), signs);
                }
            }
        }
    }
}

/// The four bytes at `p` and those of the seven rows after it; inside the rows, since codes follow scales.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn words(p: *const u8, stride: usize) -> __m256i {
    // SAFETY: see above.
    unsafe {
        let four = |p: *const u8| {
            let word = |offset: usize| p.add(offset).cast::<i32>().read_unaligned();
            _mm_setr_epi32(word(0), word(stride), word(2 * stride), word(3 * stride))
        };
        _mm256_set_m128i(four(p.add(4 * stride)), four(p))
    }
}

/// The stored scales in the lower and in the upper halves of words; NaN and infinities count as zero.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn finite_scales(words: __m256i) -> [__m256; 2] {
    let exponent = _mm256_set1_epi16(0x7c00);
    let bad = _mm256_cmpeq_epi16(_mm256_and_si256(words, exponent), exponent);
    let words = _mm256_andnot_si256(bad, words);
    let (low, high) = (_mm256_and_si256(words, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32::<16>(words));
    // Packing works on 128-bit parts.
    let halves = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(low, high));
    [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

/// The level table of a width in bits in each 128-bit part.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn table<const BITS: u32>(flip: u8) -> __m256i {
    match BITS {
        4 => table_of(&LEVELS_4.table, flip),
        3 => table_of(&LEVELS_3.table, flip),
        _ => table_of(&LEVELS_2.table, flip),
    }
}

/// Levels, repeated to sixteen, in each 128-bit part.
#[inline]
#[target_feature(enable = "avx2")]
fn table_of(levels: &[i8], flip: u8) -> __m256i {
    let mut t = [0u8; 16];
    for (i, t) in t.iter_mut().enumerate() {
        *t = levels[i % levels.len()] as u8 ^ flip;
    }
    // SAFETY: sixteen bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(t.as_ptr().cast()) })
}

/// The levels of the low and of the high four bits of each byte.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn nibble_levels(codes: __m256i, table: __m256i) -> (__m256i, __m256i) {
    let nibble = _mm256_set1_epi8(15);
    let low = _mm256_and_si256(codes, nibble);
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
    (_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high))
}

/// Bytes of the codes of so many values.
pub(super) const fn code_bytes(bits: u32, values: usize) -> usize {
    bits as usize * values / 8
}

/// The first or second 32 of the values behind the last 64, padded.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn levels_of_tail<const BITS: u32>(
    chunks: SrftChunks<BITS>,
    tail: usize,
    codes: *const u8,
    half: usize,
) -> __m256i {
    let SrftChunks { table, flips, .. } = chunks;
    // SAFETY: the tail's chunks of 32 and 16 values.
    unsafe {
        if half == 0 && tail >= 32 {
            return match BITS {
                8 => _mm256_xor_si256(_mm256_loadu_si256(codes.cast()), flips),
                _ => _mm256_shuffle_epi8(table, codes_32::<BITS>(codes)),
            };
        }
        // Sixteen values are the first of a tail of 16 and the last of one of 48.
        if tail.is_multiple_of(32) || (half == 1) != (tail > 32) {
            return flips;
        }
        let codes = codes.add(code_bytes(BITS, 32 * half));
        let sixteen = match BITS {
            8 => _mm_xor_si128(_mm_loadu_si128(codes.cast()), _mm256_castsi256_si128(flips)),
            _ => _mm_shuffle_epi8(_mm256_castsi256_si128(table), codes_16::<BITS>(codes)),
        };
        _mm256_inserti128_si256::<0>(flips, sixteen)
    }
}

/// The codes of values 0..32 or 32..64 of 64.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn codes_of_half<const BITS: u32>(p: *const u8, half: usize) -> __m256i {
    // SAFETY: the 32, 24 or 16 bytes of 64 codes.
    unsafe {
        if BITS == 4 {
            let b = _mm256_loadu_si256(p.cast());
            let b = if half == 0 { b } else { _mm256_srli_epi16::<4>(b) };
            return _mm256_and_si256(b, _mm256_set1_epi8(15));
        }
        let b = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
        let s = 4 * half as i32;
        let shifts = _mm256_setr_epi32(s, s, s, s, s + 2, s + 2, s + 2, s + 2);
        let low = _mm256_and_si256(_mm256_srlv_epi32(b, shifts), _mm256_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        _mm256_or_si256(low, fours(p.add(16 + 4 * half).cast::<u32>().read_unaligned()))
    }
}

/// The codes of a chunk of 32 values.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn codes_32<const BITS: u32>(p: *const u8) -> __m256i {
    // SAFETY: the chunk's 16, 12 or 8 bytes.
    unsafe {
        if BITS == 4 {
            let b = _mm_loadu_si128(p.cast());
            return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(b), b), _mm256_set1_epi8(15));
        }
        let b = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
        let low = _mm256_and_si256(_mm256_srlv_epi64(b, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        _mm256_or_si256(low, fours(p.add(8).cast::<u32>().read_unaligned()))
    }
}

/// The codes of a chunk of 16 values.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn codes_16<const BITS: u32>(p: *const u8) -> __m128i {
    // SAFETY: the chunk's 8, 6 or 4 bytes.
    unsafe {
        if BITS == 4 {
            let b = p.cast::<i64>().read_unaligned();
            return _mm_and_si128(_mm_set_epi64x(b >> 4, b), _mm_set1_epi8(15));
        }
        let b = _mm_set1_epi32(p.cast::<i32>().read_unaligned());
        let low = _mm_and_si128(_mm_srlv_epi32(b, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(4).cast::<u16>().read_unaligned();
        _mm_or_si128(low, _mm256_castsi256_si128(fours(u32::from(high))))
    }
}

/// Byte i is 4 where bit i is set, else 0.
#[inline]
#[target_feature(enable = "avx2")]
fn fours(bits: u32) -> __m256i {
    _mm256_and_si256(spread_bits(bits), _mm256_set1_epi8(4))
}

/// Byte i is all ones where bit i is set, else 0.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn spread_bits(bits: u32) -> __m256i {
    // Byte i/8 of the bits goes to byte i, where its bit i%8 decides.
    let spread = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), spread);
    _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit)
}
