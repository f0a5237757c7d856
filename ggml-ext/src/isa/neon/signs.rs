//! Rows that hold signs: qjl1, and the second half of turbo's.

use super::unpack::{spread_bits, Chunks, Levels, SrftChunks};
use crate::codec::format::RowFormat;
use crate::codec::qjl::{self, Qjl};
use crate::codec::turbo::{Turbo, NORM_BYTES};
use crate::isa::padded;
use std::arch::aarch64::*;

#[derive(Clone, Copy)]
pub(super) struct Signs {
    plus: int8x16_t,
    size: usize,
    /// Where the bits begin.
    bits: usize,
}

impl Signs {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new(level: i8, size: usize, bits: usize) -> Signs {
        Signs { plus: vdupq_n_s8(level), size, bits }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub fn of_qjl(f: Qjl) -> Signs {
        Signs::new(qjl::SIGN_LEVEL, f.size(), qjl::NORM_BYTES)
    }
}

impl Chunks for Signs {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> Levels {
        // SAFETY: the bits of this chunk, 16 where no more are left; NEON is always there.
        unsafe {
            let bits = row.add(self.bits + 4 * chunk);
            let left = self.size.saturating_sub(32 * chunk);
            let negative = match left {
                0 => return [vdupq_n_s8(0); 2],
                16 => u32::from(bits.cast::<u16>().read_unaligned()),
                _ => bits.cast::<u32>().read_unaligned(),
            };
            let [a, b] = spread_bits(negative);
            let minus = vnegq_s8(self.plus);
            let second = if left == 16 { vdupq_n_s8(0) } else { vbslq_s8(b, minus, self.plus) };
            [vbslq_s8(a, minus, self.plus), second]
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
    #[target_feature(enable = "neon")]
    pub fn new(f: Turbo) -> Self {
        let quantizer = f.quantizer();
        TurboChunks {
            levels: SrftChunks::over(quantizer.table, f.size(), NORM_BYTES),
            signs: Signs::new(quantizer.sign_level, f.size(), f.sign_offset()),
            half: padded(f.size()) / 32,
        }
    }
}

impl<const BITS: u32> Chunks for TurboChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> Levels {
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
