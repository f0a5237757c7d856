//! The products that scores and weighted sums are made of, with and without VNNI.
//!
//! Levels are unsigned bytes, 128 added, four to a lane. `vpdpbusd` multiplies them by signed bytes and adds all four.
//! Without it:
//!
//! - A mask and a shift make 16-bit numbers of the even and of the odd bytes, once for all rows of queries or weights, and
//!   two `vpmaddwd` and two additions do the rest.
//! - `vpmaddubsw` adds the products of two neighbours in 16 bits, and `vpmaddwd` adds these sums. 255 * 128 fits, so two
//!   neighbours of one sign in a query must not add up to more ([`crate::isa::Queries::pairs`]).
//!
//! The methods are inlined into functions that enable the instructions.

use std::arch::x86_64::*;

/// How scores are multiplied.
pub(super) trait ScoreProducts {
    /// Four levels in each lane, as they are multiplied.
    type Levels: Copy;
    /// Four query bytes, the same in all lanes, as they are multiplied.
    type Quad: Copy;

    /// The 64 levels at `p`.
    unsafe fn levels(p: *const i8) -> Self::Levels;

    /// A row of `width` query bytes as [`ScoreProducts::quad`] reads it: where it is, or in `room`, which has `width / 2` words.
    unsafe fn query_words(bytes: *const i8, width: usize, room: *mut i32) -> *const i32;

    /// Quad j of such a row.
    unsafe fn quad(words: *const i32, width: usize, j: usize) -> Self::Quad;

    /// sums + the products of four levels and four query bytes in each lane.
    unsafe fn add_quads(sums: __m512i, levels: Self::Levels, query: Self::Quad) -> __m512i;
}

/// How weighted sums are multiplied: levels as those of scores.
pub(super) trait WeightProducts: ScoreProducts {
    /// Sums under way.
    type Sums: Copy;

    /// 16-bit weights, four of a quad of cells side by side, as two words of each quad: the first words of all quads, and
    /// the second. Of the two registers the first has quads 0 and 1 of each 128-bit part, the second 2 and 3.
    unsafe fn weight_words(weights: [__m512i; 2]) -> [__m512i; 2];

    /// No sums.
    unsafe fn no_sums() -> Self::Sums;

    /// sums + the products of four levels and the weights of their cells in each lane.
    unsafe fn add_weighted(sums: Self::Sums, levels: Self::Levels, weights: [__m512i; 2]) -> Self::Sums;

    /// The sums as numbers.
    unsafe fn total(sums: Self::Sums) -> __m512i;
}

/// AVX-512 BW. A quad is its bytes 0 and 2, and 1 and 3, as 16-bit numbers.
pub(super) struct Madd;

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: called only in functions that enable AVX-512 BW, with pointers to what is read or written"
)]
impl ScoreProducts for Madd {
    type Levels = [__m512i; 2];
    type Quad = [__m512i; 2];

    #[inline(always)]
    unsafe fn levels(p: *const i8) -> [__m512i; 2] {
        unsafe {
            let x = _mm512_loadu_si512(p.cast());
            [_mm512_and_si512(x, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(x)]
        }
    }

    #[inline(always)]
    unsafe fn query_words(bytes: *const i8, width: usize, room: *mut i32) -> *const i32 {
        for i in (0..width).step_by(64) {
            unsafe {
                let x = _mm512_loadu_si512(bytes.add(i).cast());
                let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x));
                _mm512_storeu_si512(room.add(i / 4).cast(), even);
                _mm512_storeu_si512(room.add(width / 4 + i / 4).cast(), _mm512_srai_epi16::<8>(x));
            }
        }
        room
    }

    #[inline(always)]
    unsafe fn quad(words: *const i32, width: usize, j: usize) -> [__m512i; 2] {
        unsafe { [_mm512_set1_epi32(*words.add(j)), _mm512_set1_epi32(*words.add(width / 4 + j))] }
    }

    #[inline(always)]
    unsafe fn add_quads(sums: __m512i, levels: [__m512i; 2], query: [__m512i; 2]) -> __m512i {
        unsafe { Self::add_weighted(sums, levels, query) }
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: called only in functions that enable AVX-512 BW, with pointers to what is read"
)]
impl WeightProducts for Madd {
    type Sums = __m512i;

    #[inline(always)]
    unsafe fn weight_words(weights: [__m512i; 2]) -> [__m512i; 2] {
        unsafe {
            let turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
            let a = _mm512_castsi512_ps(_mm512_shuffle_epi8(weights[0], turn));
            let b = _mm512_castsi512_ps(_mm512_shuffle_epi8(weights[1], turn));
            let (first, second) = (_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
            [_mm512_castps_si512(first), _mm512_castps_si512(second)]
        }
    }

    #[inline(always)]
    unsafe fn no_sums() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }

    /// CELLS levels of 255 times weights of 15 bits stay within 32 bits.
    #[inline(always)]
    unsafe fn add_weighted(sums: __m512i, levels: [__m512i; 2], weights: [__m512i; 2]) -> __m512i {
        unsafe {
            let sums = _mm512_add_epi32(sums, _mm512_madd_epi16(levels[0], weights[0]));
            _mm512_add_epi32(sums, _mm512_madd_epi16(levels[1], weights[1]))
        }
    }

    #[inline(always)]
    unsafe fn total(sums: __m512i) -> __m512i {
        sums
    }
}

/// How scores are multiplied where levels and queries stay the bytes that they are.
pub(super) trait ByteProducts {
    /// sums + the products of four levels and four query bytes in each lane.
    unsafe fn add_bytes(sums: __m512i, levels: __m512i, query: __m512i) -> __m512i;
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: called only in functions that enable AVX-512 BW and what P needs, with pointers to what is read"
)]
impl<P: ByteProducts> ScoreProducts for P {
    type Levels = __m512i;
    type Quad = __m512i;

    #[inline(always)]
    unsafe fn levels(p: *const i8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn query_words(bytes: *const i8, _width: usize, _room: *mut i32) -> *const i32 {
        bytes.cast()
    }

    #[inline(always)]
    unsafe fn quad(words: *const i32, _width: usize, j: usize) -> __m512i {
        unsafe { _mm512_set1_epi32(words.add(j).read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn add_quads(sums: __m512i, levels: __m512i, query: __m512i) -> __m512i {
        unsafe { P::add_bytes(sums, levels, query) }
    }
}

/// AVX-512 BW, for queries whose neighbours fit.
pub(super) struct Pairs;

#[expect(clippy::undocumented_unsafe_blocks, reason = "called only in functions that enable AVX-512 BW")]
impl ByteProducts for Pairs {
    #[inline(always)]
    unsafe fn add_bytes(sums: __m512i, levels: __m512i, query: __m512i) -> __m512i {
        unsafe {
            let pairs = _mm512_maddubs_epi16(levels, query);
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}

/// AVX-512 VNNI. A quad is its four bytes, and 16-bit weights are a high and a low byte each, both signed.
pub(super) struct Vnni;

#[expect(clippy::undocumented_unsafe_blocks, reason = "called only in functions that enable AVX-512 VNNI")]
impl ByteProducts for Vnni {
    #[inline(always)]
    unsafe fn add_bytes(sums: __m512i, levels: __m512i, query: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, levels, query) }
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: called only in functions that enable AVX-512 VNNI, with pointers to what is read"
)]
impl WeightProducts for Vnni {
    type Sums = [__m512i; 2];

    /// x = 256 * high + low with low in -128..128.
    #[inline(always)]
    unsafe fn weight_words(weights: [__m512i; 2]) -> [__m512i; 2] {
        unsafe {
            let mut split = [weights; 2];
            for i in 0..2 {
                split[0][i] = _mm512_srai_epi16::<8>(_mm512_add_epi16(weights[i], _mm512_set1_epi16(128)));
                split[1][i] = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(weights[i]));
            }
            let [high, low] = split;
            [_mm512_packs_epi16(high[0], high[1]), _mm512_packs_epi16(low[0], low[1])]
        }
    }

    #[inline(always)]
    unsafe fn no_sums() -> [__m512i; 2] {
        unsafe { [_mm512_setzero_si512(); 2] }
    }

    #[inline(always)]
    unsafe fn add_weighted(sums: [__m512i; 2], levels: __m512i, weights: [__m512i; 2]) -> [__m512i; 2] {
        unsafe { [_mm512_dpbusd_epi32(sums[0], levels, weights[0]), _mm512_dpbusd_epi32(sums[1], levels, weights[1])] }
    }

    #[inline(always)]
    unsafe fn total(sums: [__m512i; 2]) -> __m512i {
        unsafe { _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0]), sums[1]) }
    }
}
