//! Rows that hold signs: qjl1, and the second half of turbo's.

use super::unpack::{spread_bits, Chunks, SrftChunks};
use crate::codec::format::RowFormat;
use crate::codec::qjl::{self, Qjl};
use crate::codec::turbo::{Turbo, NORM_BYTES};
use crate::isa::padded;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(super) struct Signs {
    plus: __m256i,
    flips: __m256i,
    size: usize,
    /// Where the bits begin.
    bits: usize,
}

impl Signs {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new(level: i8, size: usize, bits: usize, flip: u8) -> Signs {
        Signs { plus: _mm256_set1_epi8(level), flips: _mm256_set1_epi8(flip as i8), size, bits }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn of_qjl(f: Qjl, flip: u8) -> Signs {
        Signs::new(qjl::SIGN_LEVEL, f.size(), qjl::NORM_BYTES, flip)
    }
}

impl Chunks for Signs {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m256i {
        // SAFETY: the bits of this chunk, 16 where no more are left, on a CPU with AVX2.
        unsafe {
            let bits = row.add(self.bits + 4 * chunk);
            let left = self.size.saturating_sub(32 * chunk);
            let negative = match left {
                0 => return self.flips,
                16 => u32::from(bits.cast::<u16>().read_unaligned()),
                _ => bits.cast::<u32>().read_unaligned(),
            };
            // All ones where set: (x ^ m) - m negates.
            let set = spread_bits(negative);
            let mut levels = _mm256_sub_epi8(_mm256_xor_si256(self.plus, set), set);
            if left == 16 {
                levels = _mm256_inserti128_si256::<1>(levels, _mm_setzero_si128());
            }
            _mm256_xor_si256(levels, self.flips)
        }
    }
}

/// Levels of stage 1, packed in BITS, and signs behind them.
#[derive(Clone, Copy)]
pub(super) struct TurboChunks<const BITS: u32> {
    levels: SrftChunks<BITS>,
    signs: Signs,
    /// The first chunk of signs.
    half: usize,
}

impl<const BITS: u32> TurboChunks<BITS> {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn new(f: Turbo, flip: u8) -> Self {
        let quantizer = f.quantizer();
        TurboChunks {
            levels: SrftChunks::over(quantizer.table, f.size(), NORM_BYTES, flip),
            signs: Signs::new(quantizer.sign_level, f.size(), f.sign_offset(), flip),
            half: padded(f.size()) / 32,
        }
    }
}

impl<const BITS: u32> Chunks for TurboChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            if chunk < self.half {
                self.levels.levels(row, chunk)
            } else {
                self.signs.levels(row, chunk - self.half)
            }
        }
    }
}
