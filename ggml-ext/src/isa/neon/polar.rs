//! Polar rows: their levels, a block at a time, and scores by the tables of queries, four cells in the lanes.
//!
//! Scores. A table of sixteen floats would be four registers to `tbl`. But the second half of the directions of a codebook
//! is the first half turned by 180 degrees, so an entry is minus another one to the bit, and the sign goes to the weight,
//! which all queries share: the table is two registers, of 8 directions one.

use crate::codec::polar::{self, Polar, COSINES, PAIRS, TABLE};
use crate::codec::RowFormat;
use crate::isa::generic::polar::{first_codes, pair_weights, upper_codes};
use crate::isa::generic::{self, Chunks, ScaleLanes};
use crate::isa::{by_rows, StoredRows, BUNDLE, CELLS};
use std::arch::aarch64::*;

/// Levels, a block at a time.
#[derive(Clone, Copy)]
pub struct PolarChunks {
    format: Polar,
    /// Words of cosines and of sines of level 1.
    first: [uint8x16x2_t; 2],
    /// Bytes of a block's codes of level 1, a word for each, how far down the code lies in it, and its bits.
    first_bytes: uint8x16_t,
    first_down: int16x8_t,
    first_mask: uint16x8_t,
    /// Cosines of levels 2, 3, 4 as words.
    upper: [uint8x16_t; 3],
}

/// Where the codes of level 1 lie, of 3 bits and of 4. Those of 3 bits are at 0 3 6 | 9 12 15 | 18 21.
const FIRST_BYTES: [[u8; 16]; 2] =
    [[0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3], [0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 0, 3, 0]];
const FIRST_DOWN: [[i16; PAIRS]; 2] = [[0, -3, -6, -1, -4, -7, -2, -5], [0, -4, 0, -4, 0, -4, 0, -4]];
/// Where those of levels 2, 3 and 4 lie, and which pairs take the sine, the cosine of the mirrored code.
const UPPER_DOWN: [[i16; PAIRS]; 3] =
    [[0, 0, -2, -2, -4, -4, -6, -6], [-8, -8, -8, -8, -10, -10, -10, -10], [-12; PAIRS]];
const MIRRORED: [[u16; PAIRS]; 3] =
    [words_of([0, 3, 0, 3, 0, 3, 0, 3]), words_of([0, 0, 3, 3, 0, 0, 3, 3]), words_of([0, 0, 0, 0, 3, 3, 3, 3])];

/// Entry k of a table of words is bytes 2k and 2k + 1: k * TWICE with the lowest bit of the upper byte set.
const TWICE: u16 = 0x202;
const NEXT: u16 = 0x100;

/// What turns k * TWICE into the bytes of entry k ^ x.
const fn words_of(mut x: [u16; PAIRS]) -> [u16; PAIRS] {
    let mut i = 0;
    while i < PAIRS {
        x[i] = (x[i] * TWICE) | NEXT;
        i += 1;
    }
    x
}

impl PolarChunks {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new(f: Polar) -> PolarChunks {
        let (table, four) = (f.level_table(), usize::from(f.bits() == 4));
        let sixteen = |of: &dyn Fn(usize) -> i16| {
            let words: [i16; 16] = std::array::from_fn(of);
            // SAFETY: 32 bytes.
            unsafe { uint8x16x2_t(vld1q_u8(words.as_ptr().cast()), vld1q_u8(words[8..].as_ptr().cast())) }
        };
        // SAFETY: sixteen bytes each.
        let (first_bytes, first_down) =
            unsafe { (vld1q_u8(FIRST_BYTES[four].as_ptr()), vld1q_s16(FIRST_DOWN[four].as_ptr())) };
        PolarChunks {
            format: f,
            first: [sixteen(&|i| table[i].0), sixteen(&|i| table[i].1)],
            first_bytes,
            first_down,
            first_mask: vdupq_n_u16((1 << f.bits()) - 1),
            upper: [0, 1, 2].map(|level| sixteen(&|i| polar::fixed_cosine(level, i % 4)).0),
        }
    }

    /// The levels of a block.
    #[inline(always)]
    unsafe fn block(&self, row: *const u8, block: usize) -> int8x16_t {
        let f = self.format;
        // SAFETY: a block of the row; NEON is always there.
        unsafe {
            let upper = vdupq_n_u16(upper_codes(f, row, block) as u16);
            let factor = |level: usize| {
                let code = vandq_u16(vshlq_u16(upper, vld1q_s16(UPPER_DOWN[level].as_ptr())), vdupq_n_u16(3));
                let entry = veorq_u16(vmulq_n_u16(code, TWICE), vld1q_u16(MIRRORED[level].as_ptr()));
                vreinterpretq_s16_u8(vqtbl1q_u8(self.upper[level], vreinterpretq_u8_u16(entry)))
            };
            let weight = vqrdmulhq_s16(vqrdmulhq_s16(factor(2), factor(1)), factor(0));
            let codes = vreinterpretq_u8_u32(vdupq_n_u32(first_codes(f, row, block)));
            let codes = vreinterpretq_u16_u8(vqtbl1q_u8(codes, self.first_bytes));
            let code = vandq_u16(vshlq_u16(codes, self.first_down), self.first_mask);
            let entry = vreinterpretq_u8_u16(vorrq_u16(vmulq_n_u16(code, TWICE), vdupq_n_u16(NEXT)));
            let look = |table: uint8x16x2_t| vreinterpretq_s16_u8(vqtbl2q_u8(table, entry));
            let x = vqrdmulhq_s16(weight, look(self.first[0]));
            let y = vqrdmulhq_s16(weight, look(self.first[1]));
            vreinterpretq_s8_s16(vsliq_n_s16::<8>(x, y))
        }
    }
}

impl generic::PolarChunks<int8x16_t> for PolarChunks {
    /// Levels of NEON have no bias.
    #[inline(always)]
    unsafe fn new(f: Polar, _bias: u8) -> Self {
        // SAFETY: NEON is always there.
        unsafe { PolarChunks::new(f) }
    }
}

impl Chunks<int8x16_t> for PolarChunks {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        at < self.format.blocks()
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> int8x16_t {
        // SAFETY: a block of the row; NEON is always there.
        unsafe { self.block(row, at) }
    }

    #[inline(always)]
    unsafe fn tail(self, _row: *const u8, _at: usize) -> int8x16_t {
        // SAFETY: NEON is always there.
        unsafe { vdupq_n_s8(0) }
    }
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
pub(super) unsafe fn scores(f: Polar, stored: StoredRows, tables: *const f32, rows: usize, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match f.bits() {
            4 => scores_of::<4>(f, stored, tables, rows, out),
            _ => scores_of::<3>(f, stored, tables, rows, out),
        }
    }
}

#[inline(always)]
unsafe fn scores_of<const BITS: u32>(f: Polar, stored: StoredRows, tables: *const f32, rows: usize, out: *mut f32) {
    let row_tables = f.size() / 2 * TABLE;
    // SAFETY: NEON is always there.
    let zero = unsafe { Pair { index: [vdupq_n_u8(0); REGISTERS], weight: [vdupq_n_f32(0.0); REGISTERS] } };
    let mut pairs = [zero; PAIRS];
    for c in (0..stored.n).step_by(BUNDLE) {
        // Cells beyond n are stood in for by the last one.
        let row = |i: usize| {
            // SAFETY: a row that is there.
            unsafe { stored.row((c + i).min(stored.n - 1)) }
        };
        // SAFETY: sixteen scores of each query, for which rows of CELLS have room; blocks of rows that are there.
        unsafe {
            for r in 0..rows {
                for i in 0..REGISTERS {
                    vst1q_f32(out.add(r * CELLS + c + 4 * i), vdupq_n_f32(0.0));
                }
            }
            for block in 0..f.blocks() {
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
        let words = |word: [u32; 4]| vld1q_u32(word.as_ptr());
        let [a, b, c, d] = rows;
        let first = |row| first_codes(f, row, block);
        let upper = |row| upper_codes(f, row, block);
        let radius = |row: *const u8| u32::from(row.add(2 * block).cast::<u16>().read_unaligned());
        let codes = words([first(a), first(b), first(c), first(d)]);
        let upper = words([upper(a), upper(b), upper(c), upper(d)]);
        let radius = float32x4_t::finite_halves(words([radius(a), radius(b), radius(c), radius(d)]))[0];
        let weights = weights(upper, radius);
        // The highest bit of a code turns the direction round; so does a radius below zero, for all of them.
        let highest = if BITS == 4 { 0x8888_8888 } else { 0x0092_4924 };
        let negative = vcltq_s32(vreinterpretq_s32_f32(radius), vdupq_n_s32(0));
        let codes = veorq_u32(codes, vandq_u32(negative, vdupq_n_u32(highest)));
        for (j, pair) in pairs.iter_mut().enumerate() {
            let at = (BITS as usize * j) as i32;
            let code = vandq_u32(vshlq_u32(codes, vdupq_n_s32(-at)), vdupq_n_u32((1 << (BITS - 1)) - 1));
            pair.index[i] = entry(code);
            let sign = vshlq_u32(codes, vdupq_n_s32(32 - BITS as i32 - at));
            let weight = vbslq_u32(vdupq_n_u32(1 << 31), sign, vreinterpretq_u32_f32(weights[j]));
            pair.weight[i] = vreinterpretq_f32_u32(weight);
        }
    }
}

/// The bytes of entry k of a table of floats.
#[inline(always)]
unsafe fn entry(k: uint32x4_t) -> uint8x16_t {
    // SAFETY: NEON is always there.
    unsafe { vreinterpretq_u8_u32(vmlaq_u32(vdupq_n_u32(0x0302_0100), k, vdupq_n_u32(0x0404_0404))) }
}

/// A block of sixteen cells meets the tables of H queries. A call, or the compiler would copy the pairs to where it has
/// them at hand for all queries.
#[inline(never)]
#[target_feature(enable = "neon")]
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
                // Loaded as a pair, or the compiler would move them into neighbours for each look.
                let both = vld1q_u8_x2(table);
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = match BITS {
                        4 => vqtbl2q_u8(both, pair.index[i]),
                        _ => vqtbl1q_u8(both.0, pair.index[i]),
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
    pair_weights(radius, |at, level, x| {
        // SAFETY: four floats; NEON is always there.
        unsafe {
            let index = entry(vandq_u32(vshlq_u32(upper, vdupq_n_s32(-(at as i32))), vdupq_n_u32(3)));
            let c = COSINES[level - 2];
            // The sine of a code is the cosine of 3 - code.
            let of = |table: [f32; 4]| {
                let table = vld1q_u8(table.as_ptr().cast());
                vmulq_f32(x, vreinterpretq_f32_u8(vqtbl1q_u8(table, index)))
            };
            (of(c), of([c[3], c[2], c[1], c[0]]))
        }
    })
}
