//! The products that scores and weighted sums are made of, with and without VNNI.
//!
//! Both multiply unsigned by signed bytes, four to a lane. `vpdpbusd` takes them to 32 bits at once, so levels become
//! unsigned by adding 128, which one subtraction per group undoes. `vpmaddubsw` adds pairs in 16 bits, so there the sign
//! of a level moves to the query: a magnitude is at most 128 and a query at most 127, and 2 * 128 * 127 fits.
//!
//! The methods are inlined into functions that enable the instructions.

use std::arch::x86_64::*;

/// How a table multiplies.
pub(super) trait Products {
    /// What is mixed into the sign bit of levels of scores.
    const BIAS: u8;

    /// What the sums of a group begin with, if its query bytes add up to `sum`.
    unsafe fn start(sum: i32) -> __m256i;

    /// sums + the products of four levels and four query bytes in each lane.
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i;

    /// sums + the products of two 16-bit numbers in each lane.
    unsafe fn add_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

/// AVX2.
pub(super) struct Madd;

#[expect(clippy::undocumented_unsafe_blocks, reason = "for all: called only in functions that enable AVX2")]
impl Products for Madd {
    const BIAS: u8 = 0;

    #[inline(always)]
    unsafe fn start(_sum: i32) -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i {
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(query, levels));
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn add_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)) }
    }
}

/// AVX-VNNI.
pub(super) struct Vnni;

#[expect(clippy::undocumented_unsafe_blocks, reason = "for all: called only in functions that enable AVX-VNNI")]
impl Products for Vnni {
    const BIAS: u8 = 0x80;

    #[inline(always)]
    unsafe fn start(sum: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(sum * -i32::from(Self::BIAS)) }
    }

    #[inline(always)]
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(sums, levels, query) }
    }

    #[inline(always)]
    unsafe fn add_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_dpwssd_avx_epi32(sums, a, b) }
    }
}
