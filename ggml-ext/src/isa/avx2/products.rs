//! The products that scores and weighted sums are made of, with and without VNNI.
//!
//! All multiply unsigned by signed bytes, four to a lane. Levels of scores are unsigned, 128 added, which one subtraction
//! per group undoes. `vpdpbusd` takes the products to 32 bits at once; `vpmaddubsw` adds those of two neighbours in 16 bits,
//! where 255 * 128 fits: two neighbours of one sign in a query must not add up to more ([`crate::isa::Queries::pairs`]).
//! For other queries the sign of a level moves to the query: a magnitude is at most 128 and a query at most 127, and
//! 2 * 128 * 127 fits.
//!
//! The methods are inlined into functions that enable the instructions.

use std::arch::x86_64::*;

/// How scores are multiplied.
pub(super) trait ScoreProducts {
    /// What the sums of a group begin with, if its query bytes add up to `sum`.
    #[inline(always)]
    unsafe fn start(sum: i32) -> __m256i {
        // SAFETY: the caller's promise is a CPU with AVX2.
        unsafe { _mm256_set1_epi32(sum * -i32::from(BIAS)) }
    }

    /// sums + the products of four levels and four query bytes in each lane.
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i;
}

/// How weighted sums are multiplied.
pub(super) trait WeightProducts {
    /// sums + the products of two 16-bit numbers in each lane.
    unsafe fn add_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

/// What is mixed into the sign bit of levels of scores, which makes 128 more of them.
pub(super) const BIAS: u8 = 0x80;

/// AVX2, for queries whose neighbours fit.
pub(super) struct Pairs;

#[expect(clippy::undocumented_unsafe_blocks, reason = "for all: called only in functions that enable AVX2")]
impl ScoreProducts for Pairs {
    #[inline(always)]
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i {
        unsafe {
            let pairs = _mm256_maddubs_epi16(levels, query);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

/// AVX2.
pub(super) struct Madd;

#[expect(clippy::undocumented_unsafe_blocks, reason = "for all: called only in functions that enable AVX2")]
impl ScoreProducts for Madd {
    #[inline(always)]
    unsafe fn start(_sum: i32) -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i {
        unsafe {
            let levels = _mm256_xor_si256(levels, _mm256_set1_epi8(BIAS as i8));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(query, levels));
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

#[expect(clippy::undocumented_unsafe_blocks, reason = "called only in functions that enable AVX2")]
impl WeightProducts for Madd {
    #[inline(always)]
    unsafe fn add_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)) }
    }
}

/// AVX-VNNI.
pub(super) struct Vnni;

#[expect(clippy::undocumented_unsafe_blocks, reason = "called only in functions that enable AVX-VNNI")]
impl ScoreProducts for Vnni {
    #[inline(always)]
    unsafe fn add_quads(sums: __m256i, levels: __m256i, query: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(sums, levels, query) }
    }
}

#[expect(clippy::undocumented_unsafe_blocks, reason = "called only in functions that enable AVX-VNNI")]
impl WeightProducts for Vnni {
    #[inline(always)]
    unsafe fn add_pairs(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_dpwssd_avx_epi32(sums, a, b) }
    }
}
