//! Rows that hold signs: qjl1, and the second half of turbo's. 64 sign bits are one mask register.

use super::unpack::{Chunks, SrftChunks};
use crate::codec::format::RowFormat;
use crate::codec::qjl::{self, Qjl};
use crate::codec::turbo::{Turbo, NORM_BYTES};
use crate::isa::padded;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(super) struct Signs {
    plus: __m512i,
    minus: __m512i,
    zero: __m512i,
    size: usize,
    /// Where the bits begin.
    bits: usize,
}

impl Signs {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn new(level: i8, size: usize, bits: usize, flip: u8) -> Signs {
        let all = |level: i8| _mm512_set1_epi8((level as u8 ^ flip) as i8);
        Signs { plus: all(level), minus: all(-level), zero: all(0), size, bits }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub fn of_qjl(f: Qjl, flip: u8) -> Signs {
        Signs::new(qjl::SIGN_LEVEL, f.size(), qjl::NORM_BYTES, flip)
    }
}

impl Chunks for Signs {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m512i {
        let left = self.size - 64 * chunk;
        // SAFETY: the bits of this chunk, on a CPU with AVX-512.
        unsafe {
            let bits = row.add(self.bits + 8 * chunk);
            if left >= 64 {
                return _mm512_mask_blend_epi8(bits.cast::<u64>().read_unaligned(), self.plus, self.minus);
            }
            let mut negative = 0;
            for i in 0..left / 16 {
                negative |= u64::from(bits.add(2 * i).cast::<u16>().read_unaligned()) << (16 * i);
            }
            let signed = _mm512_mask_blend_epi8(negative, self.plus, self.minus);
            _mm512_mask_blend_epi8((1 << left) - 1, self.zero, signed)
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
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub fn new(f: Turbo, flip: u8) -> Self {
        let quantizer = f.quantizer();
        TurboChunks {
            levels: SrftChunks::over(quantizer.table, f.size(), NORM_BYTES, flip),
            signs: Signs::new(quantizer.sign_level, f.size(), f.sign_offset(), flip),
            half: padded(f.size()) / 64,
        }
    }
}

impl<const BITS: u32> Chunks for TurboChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m512i {
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
