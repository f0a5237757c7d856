//! Rows to levels and scales: what [`crate::isa::generic`] needs to know of AVX-512's registers.

use super::columns::{self, words_of_4};
use super::polar::PolarChunks;
use super::{quads, BIAS};
use crate::codec::levels::LevelLayout;
use crate::codec::srft::LEVELS_4;
use crate::isa::generic::{
    by_bundles, code_bytes, code_shifts, level_table, opaque, unpack_rows, unpack_scales, Bytes, HalvedBytes,
    PackedRows, ScaleLanes, CODE_OFFSET, CODE_SHIFT,
};
use crate::isa::{LevelBlock, Role, StoredRows, BUNDLE, CELLS};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
pub(super) unsafe fn unpack(layout: &LevelLayout, rows: StoredRows, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        by_bundles(layout, rows, out, |rows, out| unpack_bundles(rows, role, out));
        // Sums are taken over whole blocks: what is not there counts nothing.
        for c in (rows.n.next_multiple_of(BUNDLE)..CELLS).step_by(BUNDLE) {
            for g in 0..out.scale_groups() {
                _mm512_storeu_ps(out.scale_at(c, g), _mm512_setzero_ps());
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
unsafe fn unpack_bundles(rows: PackedRows, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match role {
            Role::Dot => columns::unpack(rows, out),
            Role::Weigh => quads::unpack(rows, out),
            Role::Expand => unpack_rows::<__m512i>(rows, out),
        }
        unpack_scales::<__m512>(rows, out);
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: the caller's promise is a CPU with AVX-512, and that pointers hold what is read or written"
)]
impl Bytes for __m512i {
    const COUNT: usize = 64;
    type Polar = PolarChunks;

    #[inline(always)]
    unsafe fn splat(x: u8) -> Self {
        unsafe { _mm512_set1_epi8(x as i8) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut i8) {
        unsafe { _mm512_storeu_si512(to.cast(), self) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { _mm512_add_epi8(self, b) }
    }
    #[inline(always)]
    unsafe fn table(entries: [u8; 16]) -> Self {
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(entries.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn lookup(self, codes: Self) -> Self {
        unsafe { _mm512_shuffle_epi8(self, codes) }
    }
    #[inline(always)]
    unsafe fn choose(bits: u64, set: Self, clear: Self) -> Self {
        unsafe { _mm512_mask_blend_epi8(bits, clear, set) }
    }
    #[inline(always)]
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self) -> Self {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<SHIFT>(self), _mm512_set1_epi8(MASK as i8)) }
    }
    #[inline(always)]
    unsafe fn flipped_by(self, signs: Self) -> Self {
        // -1 - x
        unsafe { _mm512_mask_sub_epi8(self, _mm512_movepi8_mask(signs), _mm512_set1_epi8(-1), self) }
    }
    #[inline(always)]
    unsafe fn codes<const BITS: u32, const VALUES: usize>(p: *const u8, _part: usize) -> Self {
        unsafe {
            let x = match code_bytes(BITS, VALUES) {
                4 => _mm512_set1_epi32(p.cast::<i32>().read_unaligned()),
                8 => _mm512_set1_epi64(p.cast::<i64>().read_unaligned()),
                16 => _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())),
                32 => _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast())),
                _ => _mm512_loadu_si512(p.cast()),
            };
            if BITS == 8 {
                return x;
            }
            let shifts = _mm512_loadu_si512(const { &code_shifts(BITS, VALUES) }.as_ptr().cast());
            _mm512_and_si512(_mm512_srlv_epi32(x, shifts), _mm512_set1_epi8((1 << (BITS % 8)) - 1))
        }
    }
    /// A third of the time would go by waiting for memory.
    #[inline(always)]
    fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

/// The table of 4-bit codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn nibble_table() -> __m512i {
    // SAFETY: AVX-512 is enabled.
    unsafe { __m512i::table(level_table(&LEVELS_4.table, BIAS)) }
}

/// The levels of the low and of the high four bits of each byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn nibble_levels(codes: __m512i, table: __m512i) -> (__m512i, __m512i) {
    let nibble = _mm512_set1_epi8(15);
    let low = _mm512_and_si512(codes, nibble);
    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
    (_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high))
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: the caller's promise is a CPU with AVX-512, and that pointers hold what is read or written"
)]
impl ScaleLanes for __m512 {
    const ROWS: usize = 16;
    type Words = __m512i;
    type Neighbours = [__m512i; 4];

    #[inline(always)]
    unsafe fn words(p: *const u8, stride: usize) -> __m512i {
        // Or the compiler would keep sixteen row pointers where one and multiples of the stride do, and spend more
        // instructions on saving and loading them than on the rows.
        let stride = opaque(stride);
        unsafe {
            let four = |p: *const u8| {
                let word = |offset: usize| p.add(offset).cast::<i32>().read_unaligned();
                _mm_setr_epi32(word(0), word(stride), word(2 * stride), word(3 * stride))
            };
            let low = _mm256_set_m128i(four(p.add(4 * stride)), four(p));
            let high = _mm256_set_m128i(four(p.add(12 * stride)), four(p.add(8 * stride)));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
    #[inline(always)]
    unsafe fn neighbours(p: *const u8, stride: usize, bytes: usize) -> [__m512i; 4] {
        unsafe {
            match bytes {
                1..=4 => [Self::words(p, stride); 4],
                _ => words_of_4(sixteens(p, opaque(stride))),
            }
        }
    }
    #[inline(always)]
    unsafe fn finite_halves(words: __m512i) -> [Self; 2] {
        unsafe { finite_halves(words).map(|halves| _mm512_cvtph_ps(halves)) }
    }
    #[inline(always)]
    unsafe fn code_scales(words: __m512i, halved: HalvedBytes) -> [Self; 4] {
        unsafe {
            let even = halves_of_codes(words, halved);
            let even = halves(even);
            let odd = halves(halves_of_codes(_mm512_srli_epi16::<8>(words), HalvedBytes::NONE));
            [_mm512_cvtph_ps(even[0]), _mm512_cvtph_ps(odd[0]), _mm512_cvtph_ps(even[1]), _mm512_cvtph_ps(odd[1])]
        }
    }
    #[inline(always)]
    unsafe fn store_scaled(self, unit: f32, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, _mm512_mul_ps(self, _mm512_set1_ps(unit))) }
    }
}

/// The sixteen bytes at `p` and those of the fifteen rows after it: part k of result i is row i + 4k.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn sixteens(p: *const u8, stride: usize) -> [__m512i; 4] {
    let mut out = [_mm512_setzero_si512(); 4];
    for (i, out) in out.iter_mut().enumerate() {
        // SAFETY: the caller's rows have these bytes.
        unsafe {
            let part = |k: usize| _mm_loadu_si128(p.add((i + 4 * k) * stride).cast());
            let x = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(part(0)), part(1));
            *out = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(x, part(2)), part(3));
        }
    }
    out
}

/// The f16 numbers of codes, which are in the lower bytes of halves: bit 7 is the sign, or half a step. Code 0 is zero either way.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves_of_codes(codes: __m512i, halved: HalvedBytes) -> __m512i {
    let sign = _mm512_and_si512(_mm512_slli_epi16::<8>(codes), _mm512_set1_epi32(halved.sign));
    let half = _mm512_and_si512(_mm512_srli_epi16::<1>(codes), _mm512_set1_epi32(halved.half));
    let c = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    let shifted = _mm512_slli_epi16::<{ CODE_SHIFT as u32 }>(c);
    let offset = _mm512_or_si512(half, _mm512_set1_epi16(CODE_OFFSET));
    _mm512_or_si512(_mm512_mask_add_epi16(c, _mm512_test_epi16_mask(c, c), shifted, offset), sign)
}

/// The f16 numbers in the lower halves of words, and those in the upper ones; NaN and infinities become zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn finite_halves(words: __m512i) -> [__m256i; 2] {
    let exponent = _mm512_set1_epi16(0x7c00);
    let finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
    halves(_mm512_maskz_mov_epi16(finite, words))
}

/// The lower halves of words, and the upper ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves(words: __m512i) -> [__m256i; 2] {
    const ORDER: [i16; 32] = {
        let (mut order, mut i) = ([0; 32], 0);
        while i < 16 {
            (order[i], order[16 + i]) = (2 * i as i16, 2 * i as i16 + 1);
            i += 1;
        }
        order
    };
    // SAFETY: 64 bytes.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    let both = _mm512_permutexvar_epi16(order, words);
    [_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both)]
}
