//! Polar rows: their levels, a block at a time, and scores by the tables of queries, four cells in the lanes.
//!
//! Scores. A table of sixteen floats would be four registers to `tbl`. But the second half of the directions of a codebook
//! is the first half turned by 180 degrees, so an entry is minus another one to the bit, and the sign goes to the weight,
//! which all queries share: the table is two registers, of 8 directions one.

use super::unpack::{finite_scales, Chunks, Levels};
use crate::codec::polar::{self, Polar, COSINES, PAIRS, TABLE, UPPER_BITS};
use crate::isa::{by_rows, BUNDLE, CELLS};
use std::arch::aarch64::*;

/// The codes of level 1 of a block, from bit 0 on. What lies above them is not cleared.
#[inline(always)]
unsafe fn first_codes(f: Polar, row: *const u8, block: usize) -> u32 {
    // SAFETY: with 3 bits a word would reach past the last block, so it begins a byte before; other codes lie there.
    unsafe {
        if f.bits() == 4 {
            row.add(f.first_offset() + 4 * block).cast::<u32>().read_unaligned()
        } else {
            row.add(f.first_offset() + 3 * block - 1).cast::<u32>().read_unaligned() >> 8
        }
    }
}

/// The same of the upper levels: codes of level 1 follow them, so a word is always there.
#[inline(always)]
unsafe fn upper_codes(f: Polar, row: *const u8, block: usize) -> u32 {
    let bit = UPPER_BITS * block;
    // SAFETY: see above.
    unsafe { row.add(f.upper_offset() + bit / 8).cast::<u32>().read_unaligned() >> (bit % 8) }
}

/// Levels, a block at a time.
#[derive(Clone, Copy)]
pub(super) struct PolarChunks {
    format: Polar,
    /// Words of cosines and of sines of level 1.
    first: [uint8x16x2_t; 2],
    /// Cosines of levels 2, 3, 4 as words.
    upper: [uint8x16_t; 3],
}

impl PolarChunks {
    #[inline]
    #[target_feature(enable = "neon")]
    pub fn new(f: Polar) -> PolarChunks {
        let table = f.level_table();
        let sixteen = |of: &dyn Fn(usize) -> i16| {
            let words: [i16; 16] = std::array::from_fn(of);
            // SAFETY: 32 bytes.
            unsafe { uint8x16x2_t(vld1q_u8(words.as_ptr().cast()), vld1q_u8(words[8..].as_ptr().cast())) }
        };
        PolarChunks {
            format: f,
            first: [sixteen(&|i| table[i].0), sixteen(&|i| table[i].1)],
            upper: [0, 1, 2].map(|level| sixteen(&|i| polar::fixed_cosine(level, i % 4)).0),
        }
    }

    /// The levels of a block.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn block(self, row: *const u8, block: usize) -> int8x16_t {
        const UPPER_AT: [[u8; PAIRS]; 3] = [[0, 0, 2, 2, 4, 4, 6, 6], [8, 8, 8, 8, 10, 10, 10, 10], [12; 8]];
        const MIRRORED: [[u8; PAIRS]; 3] =
            [[0, 3, 0, 3, 0, 3, 0, 3], [0, 0, 3, 3, 0, 0, 3, 3], [0, 0, 0, 0, 3, 3, 3, 3]];
        let f = self.format;
        // SAFETY: a block of the row; eight bytes.
        unsafe {
            let shift = |at: &[u8; PAIRS]| vnegq_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(at.as_ptr()))));
            // Entry k of a table of words is bytes 2k and 2k + 1.
            let pair = |code: uint16x8_t| vreinterpretq_u8_u16(vmlaq_u16(vdupq_n_u16(0x100), code, vdupq_n_u16(0x202)));
            let upper = vdupq_n_u16(upper_codes(f, row, block) as u16);
            let mut factors = [vdupq_n_s16(0); 3];
            for level in 0..3 {
                let code = vandq_u16(vshlq_u16(upper, shift(&UPPER_AT[level])), vdupq_n_u16(3));
                let code = veorq_u16(code, vmovl_u8(vld1_u8(MIRRORED[level].as_ptr())));
                factors[level] = vreinterpretq_s16_u8(vqtbl1q_u8(self.upper[level], pair(code)));
            }
            let weight = vqrdmulhq_s16(vqrdmulhq_s16(factors[2], factors[1]), factors[0]);
            let code = pair(first_fields(f, first_codes(f, row, block)));
            let look = |table: uint8x16x2_t| vreinterpretq_s16_u8(vqtbl2q_u8(table, code));
            let x = vqrdmulhq_s16(weight, look(self.first[0]));
            let y = vqrdmulhq_s16(weight, look(self.first[1]));
            vreinterpretq_s8_s16(vsliq_n_s16::<8>(x, y))
        }
    }
}

impl Chunks for PolarChunks {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> Levels {
        let blocks = self.format.blocks();
        let of = |block: usize| {
            // SAFETY: a block of the row; NEON is always there.
            unsafe {
                if block < blocks {
                    self.block(row, block)
                } else {
                    vdupq_n_s8(0)
                }
            }
        };
        [of(2 * chunk), of(2 * chunk + 1)]
    }
}

/// The codes of level 1 of a block as words.
#[inline]
#[target_feature(enable = "neon")]
fn first_fields(f: Polar, word: u32) -> uint16x8_t {
    // Codes of 3 bits are at 0 3 6 | 9 12 15 | 18 21.
    const BYTES: [[u8; 16]; 2] =
        [[0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3], [0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 0, 3, 0]];
    const DOWN: [[i16; PAIRS]; 2] = [[0, -3, -6, -1, -4, -7, -2, -5], [0, -4, 0, -4, 0, -4, 0, -4]];
    let (four, bytes) = (usize::from(f.bits() == 4), vreinterpretq_u8_u32(vdupq_n_u32(word)));
    // SAFETY: sixteen bytes each.
    let (places, down) = unsafe { (vld1q_u8(BYTES[four].as_ptr()), vld1q_s16(DOWN[four].as_ptr())) };
    let fields = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(bytes, places)), down);
    vandq_u16(fields, vdupq_n_u16((1 << f.bits()) - 1))
}

/// Registers of a bundle of cells.
const REGISTERS: usize = BUNDLE / 4;

/// What the pairs of a block have for all queries: where the entries lie and what they are multiplied by.
#[derive(Clone, Copy)]
struct Pair {
    index: [uint8x16_t; REGISTERS],
    weight: [float32x4_t; REGISTERS],
}

/// See `Kernels::polar_scores`.
#[target_feature(enable = "neon")]
pub(super) unsafe fn scores(
    f: Polar,
    data: *const u8,
    stride: usize,
    n: usize,
    tables: *const f32,
    rows: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match f.bits() {
            4 => scores_of::<4>(f, data, stride, n, tables, rows, out),
            _ => scores_of::<3>(f, data, stride, n, tables, rows, out),
        }
    }
}

#[inline(always)]
unsafe fn scores_of<const BITS: u32>(
    f: Polar,
    data: *const u8,
    stride: usize,
    n: usize,
    tables: *const f32,
    rows: usize,
    out: *mut f32,
) {
    let row_tables = f.size() / 2 * TABLE;
    for c in (0..n).step_by(BUNDLE) {
        // Cells beyond n are stood in for by the last one.
        let row = |i: usize| {
            // SAFETY: a row that is there.
            unsafe { data.add((c + i).min(n - 1) * stride) }
        };
        // SAFETY: sixteen scores of each query, for which rows of CELLS have room; blocks of rows that are there.
        unsafe {
            for r in 0..rows {
                for i in 0..REGISTERS {
                    vst1q_f32(out.add(r * CELLS + c + 4 * i), vdupq_n_f32(0.0));
                }
            }
            for block in 0..f.blocks() {
                let zero = Pair { index: [vdupq_n_u8(0); REGISTERS], weight: [vdupq_n_f32(0.0); REGISTERS] };
                let mut pairs = [zero; PAIRS];
                for i in 0..REGISTERS {
                    prepare::<BITS>(
                        f,
                        block,
                        [row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3)],
                        i,
                        &mut pairs,
                    );
                }
                by_rows!(rows, [1 2 3 4], |first, COUNT| {
                    let tables = tables.add(first * row_tables + block * PAIRS * TABLE);
                    add_block::<BITS, COUNT>(&pairs, tables, row_tables, out.add(first * CELLS + c));
                });
            }
        }
    }
}

/// Entries and weights of four cells.
#[inline(always)]
unsafe fn prepare<const BITS: u32>(f: Polar, block: usize, rows: [*const u8; 4], i: usize, pairs: &mut [Pair; PAIRS]) {
    // SAFETY: a block of rows that are there; NEON is always there.
    unsafe {
        let four = |of: &dyn Fn(*const u8) -> u32| vld1q_u32(rows.map(of).as_ptr());
        let codes = four(&|row| first_codes(f, row, block));
        let upper = four(&|row| upper_codes(f, row, block));
        let radius = four(&|row| u32::from(row.add(2 * block).cast::<u16>().read_unaligned()));
        let weights = weights(upper, finite_scales(radius)[0]);
        for (j, pair) in pairs.iter_mut().enumerate() {
            let code = vshlq_u32(codes, vdupq_n_s32(-((BITS as usize * j) as i32)));
            pair.index[i] = entry(vandq_u32(code, vdupq_n_u32((1 << (BITS - 1)) - 1)));
            // The highest bit of a code turns the direction round.
            let sign = vandq_u32(vshlq_u32(code, vdupq_n_s32(32 - BITS as i32)), vdupq_n_u32(1 << 31));
            pair.weight[i] = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(weights[j]), sign));
        }
    }
}

/// The bytes of entry k of a table of floats.
#[inline(always)]
unsafe fn entry(k: uint32x4_t) -> uint8x16_t {
    // SAFETY: NEON is always there.
    unsafe { vreinterpretq_u8_u32(vmlaq_u32(vdupq_n_u32(0x0302_0100), k, vdupq_n_u32(0x0404_0404))) }
}

/// A block of sixteen cells meets the tables of H queries.
#[inline(always)]
unsafe fn add_block<const BITS: u32, const H: usize>(
    pairs: &[Pair; PAIRS],
    tables: *const f32,
    row_tables: usize,
    out: *mut f32,
) {
    // SAFETY: H rows of tables and of sixteen scores.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); REGISTERS]; H];
        for (h, sums) in sums.iter_mut().enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = vld1q_f32(out.add(h * CELLS + 4 * i));
            }
        }
        for (j, pair) in pairs.iter().enumerate() {
            for (h, sums) in sums.iter_mut().enumerate() {
                let table = tables.add(h * row_tables + j * TABLE).cast::<u8>();
                let (low, high) = (vld1q_u8(table), vld1q_u8(table.add(16)));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = match BITS {
                        4 => vqtbl2q_u8(uint8x16x2_t(low, high), pair.index[i]),
                        _ => vqtbl1q_u8(low, pair.index[i]),
                    };
                    *sum = vfmaq_f32(*sum, pair.weight[i], vreinterpretq_f32_u8(x));
                }
            }
        }
        for (h, sums) in sums.iter().enumerate() {
            for (i, &sum) in sums.iter().enumerate() {
                vst1q_f32(out.add(h * CELLS + 4 * i), sum);
            }
        }
    }
}

/// What the tables' entries of the eight pairs are multiplied by.
#[inline(always)]
unsafe fn weights(upper: uint32x4_t, radius: float32x4_t) -> [float32x4_t; PAIRS] {
    let look = |at: i32, level: usize, x: float32x4_t| {
        // SAFETY: four floats; NEON is always there.
        unsafe {
            let code = vandq_u32(vshlq_u32(upper, vdupq_n_s32(-at)), vdupq_n_u32(3));
            let cos = vld1q_u8(COSINES[level - 2].as_ptr().cast());
            let index = entry(code);
            // The sine of a code is the cosine of 3 - code.
            let mirrored = veorq_u8(index, vdupq_n_u8(12));
            let of = |index: uint8x16_t| vmulq_f32(x, vreinterpretq_f32_u8(vqtbl1q_u8(cos, index)));
            (of(index), of(mirrored))
        }
    };
    let (left, right) = look(12, 4, radius);
    let (a, b) = look(8, 3, left);
    let (c, d) = look(10, 3, right);
    let (w0, w1) = look(0, 2, a);
    let (w2, w3) = look(2, 2, b);
    let (w4, w5) = look(4, 2, c);
    let (w6, w7) = look(6, 2, d);
    [w0, w1, w2, w3, w4, w5, w6, w7]
}
