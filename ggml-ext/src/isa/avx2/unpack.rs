//! Rows to levels and scales: what [`crate::isa::generic`] needs to know of AVX2's registers.

use super::polar::PolarChunks;
use super::{columns, pairs};
use crate::codec::levels::LevelLayout;
use crate::codec::srft::LEVELS_4;
use crate::isa::generic::{
    by_bundles, code_bytes, code_shifts, first_shift, level_table, unpack_rows, unpack_scales, Bytes, HalvedBytes,
    PackedRows, ScaleLanes, CODE_OFFSET, CODE_SHIFT,
};
use crate::isa::{LevelBlock, Role, StoredRows};
use std::arch::x86_64::*;

/// See [`crate::isa::Kernels::unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack(layout: &LevelLayout, rows: StoredRows, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe { by_bundles(layout, rows, out, |rows, out| unpack_bundles(rows, role, out)) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_bundles(rows: PackedRows, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match role {
            Role::Dot => columns::unpack(rows, out),
            Role::Weigh => pairs::unpack(rows, out),
            Role::Expand => expand(rows, out),
        }
        scales(rows, out);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn expand(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe { unpack_rows::<__m256i>(rows, out) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe { unpack_scales::<__m256>(rows, out) }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: the caller's promise is a CPU with AVX2, and that pointers hold what is read or written"
)]
impl Bytes for __m256i {
    const COUNT: usize = 32;
    type Polar = PolarChunks;

    #[inline(always)]
    unsafe fn splat(x: u8) -> Self {
        unsafe { _mm256_set1_epi8(x as i8) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut i8) {
        unsafe { _mm256_storeu_si256(to.cast(), self) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { _mm256_add_epi8(self, b) }
    }
    #[inline(always)]
    unsafe fn table(entries: [u8; 16]) -> Self {
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(entries.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn lookup(self, codes: Self) -> Self {
        unsafe { _mm256_shuffle_epi8(self, codes) }
    }
    #[inline(always)]
    unsafe fn choose(bits: u64, set: Self, clear: Self) -> Self {
        unsafe { _mm256_blendv_epi8(clear, set, spread_bits(bits as u32)) }
    }
    #[inline(always)]
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self) -> Self {
        unsafe {
            let shifted = match SHIFT {
                0 => self,
                2 => _mm256_srli_epi16::<2>(self),
                3 => _mm256_srli_epi16::<3>(self),
                4 => _mm256_srli_epi16::<4>(self),
                6 => _mm256_srli_epi16::<6>(self),
                _ => unreachable!(),
            };
            _mm256_and_si256(shifted, _mm256_set1_epi8(MASK as i8))
        }
    }
    #[inline(always)]
    unsafe fn flipped_by(self, signs: Self) -> Self {
        unsafe { _mm256_xor_si256(self, _mm256_cmpgt_epi8(_mm256_setzero_si256(), signs)) }
    }
    #[inline(always)]
    unsafe fn codes<const BITS: u32, const VALUES: usize>(p: *const u8, part: usize) -> Self {
        let bytes = code_bytes(BITS, VALUES);
        unsafe {
            let x = match bytes {
                4 => _mm256_set1_epi32(p.cast::<i32>().read_unaligned()),
                8 => _mm256_set1_epi64x(p.cast::<i64>().read_unaligned()),
                16 => _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())),
                _ => _mm256_loadu_si256(p.add(32 * part % bytes).cast()),
            };
            if BITS == 8 {
                return x;
            }
            let first = _mm256_set1_epi32(first_shift::<Self>(BITS, VALUES, part) as i32);
            let shifts = _mm256_loadu_si256(const { &code_shifts(BITS, VALUES) }.as_ptr().cast());
            let x = _mm256_srlv_epi32(x, _mm256_add_epi32(first, shifts));
            _mm256_and_si256(x, _mm256_set1_epi8((1 << (BITS % 8)) - 1))
        }
    }
}

/// Byte i is all ones where bit i is set, else 0.
#[inline]
#[target_feature(enable = "avx2")]
fn spread_bits(bits: u32) -> __m256i {
    // Byte i/8 of the bits goes to byte i, where its bit i%8 decides.
    let spread = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), spread);
    _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit)
}

/// The f16 numbers of codes, which are in the lower bytes of halves: bit 7 is the sign, or half a step. Code 0 is zero either way.
#[inline]
#[target_feature(enable = "avx2")]
fn halves_of_codes(codes: __m256i, halved: HalvedBytes) -> __m256i {
    let sign = _mm256_and_si256(_mm256_slli_epi16::<8>(codes), _mm256_set1_epi32(halved.sign));
    let half = _mm256_and_si256(_mm256_srli_epi16::<1>(codes), _mm256_set1_epi32(halved.half));
    let c = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
    let zero = _mm256_cmpeq_epi16(c, _mm256_setzero_si256());
    let offset = _mm256_andnot_si256(zero, _mm256_or_si256(half, _mm256_set1_epi16(CODE_OFFSET)));
    _mm256_or_si256(_mm256_add_epi16(_mm256_slli_epi16::<CODE_SHIFT>(c), offset), sign)
}

/// The f16 numbers in the lower halves of words, and those in the upper ones.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_halves(words: __m256i) -> [__m256; 2] {
    let (low, high) = (_mm256_and_si256(words, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32::<16>(words));
    // Packing works on 128-bit parts.
    let halves = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(low, high));
    [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

/// The table of 4-bit codes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn nibble_table(bias: u8) -> __m256i {
    // SAFETY: AVX2 is enabled.
    unsafe { __m256i::table(level_table(&LEVELS_4.table, bias)) }
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

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: the caller's promise is a CPU with AVX2, and that pointers hold what is read or written"
)]
impl ScaleLanes for __m256 {
    const ROWS: usize = 8;
    type Words = __m256i;
    type Neighbours = [__m256i; 1];

    #[inline(always)]
    unsafe fn words(p: *const u8, stride: usize) -> __m256i {
        unsafe {
            let four = |p: *const u8| {
                let word = |offset: usize| p.add(offset).cast::<i32>().read_unaligned();
                _mm_setr_epi32(word(0), word(stride), word(2 * stride), word(3 * stride))
            };
            _mm256_set_m128i(four(p.add(4 * stride)), four(p))
        }
    }
    #[inline(always)]
    unsafe fn neighbours(p: *const u8, stride: usize, _bytes: usize) -> [__m256i; 1] {
        unsafe { [Self::words(p, stride)] }
    }
    #[inline(always)]
    unsafe fn finite_halves(words: __m256i) -> [Self; 2] {
        unsafe {
            let exponent = _mm256_set1_epi16(0x7c00);
            let bad = _mm256_cmpeq_epi16(_mm256_and_si256(words, exponent), exponent);
            widen_halves(_mm256_andnot_si256(bad, words))
        }
    }
    #[inline(always)]
    unsafe fn code_scales(words: __m256i, halved: HalvedBytes) -> [Self; 4] {
        unsafe {
            let even = halves_of_codes(words, halved);
            let even = widen_halves(even);
            let odd = widen_halves(halves_of_codes(_mm256_srli_epi16::<8>(words), HalvedBytes::NONE));
            [even[0], odd[0], even[1], odd[1]]
        }
    }
    #[inline(always)]
    unsafe fn store_scaled(self, unit: f32, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, _mm256_mul_ps(self, _mm256_set1_ps(unit))) }
    }
}
