//! Polar rows: their levels, a chunk of four blocks at a time, and scores by the tables of queries.
//!
//! Scores. A lane is a cell. The codes of four blocks are read as 16 bytes of each of sixteen rows and transposed by
//! words, the 14 upper bits of the four and their radii as 16 more. A shift brings a code to the low bits of its word,
//! where `vpermps` takes it as the index of a table of sixteen floats; it ignores the bits above.

use super::columns::words_of_4;
use super::unpack::Chunks;
use crate::codec::polar::{Polar, BLOCK, COSINES, FIXED_WEIGHTS, PAIRS, TABLE, UPPER_BITS};
use crate::isa::{BUNDLE, CELLS};
use std::arch::x86_64::*;

/// Bytes of the upper codes of four blocks.
const UPPER_BYTES: usize = 4 * UPPER_BITS / 8;

/// Pairs of bytes and shifts that bring the codes of the 32 pairs of a chunk to the low bits of words.
struct Places {
    bytes: [u8; 64],
    shifts: [u16; 32],
}

/// The places of fields whose first bit, in pair j of block b, is `at(b, j)`.
macro_rules! places {
    (|$b:ident, $j:ident| $at:expr) => {{
        let mut places = Places { bytes: [0; 64], shifts: [0; 32] };
        let mut i = 0;
        while i < 32 {
            let ($b, $j) = (i / PAIRS, i % PAIRS);
            let at = $at;
            places.bytes[2 * i] = (at / 8) as u8;
            places.bytes[2 * i + 1] = (at / 8 + 1) as u8;
            places.shifts[i] = (at % 8) as u16;
            i += 1;
        }
        places
    }};
}

static FIRST_4: Places = places!(|b, j| 4 * (b * PAIRS + j));
static FIRST_3: Places = places!(|b, j| 3 * (b * PAIRS + j));
/// Codes of levels 2, 3 and 4.
static UPPER: [Places; 3] = [
    places!(|b, j| UPPER_BITS * b + 2 * (j / 2)),
    places!(|b, j| UPPER_BITS * b + 8 + 2 * (j / 4)),
    places!(|b, _j| UPPER_BITS * b + 12),
];

#[derive(Clone, Copy)]
pub(super) struct PolarChunks {
    format: Polar,
    cosines: __m512i,
    sines: __m512i,
    /// The 64 products of three cosines.
    weights: [__m512i; 2],
    flip: __m512i,
}

impl PolarChunks {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub fn new(format: Polar, flip: u8) -> Self {
        let table = format.level_table();
        let (mut cosines, mut sines) = ([0i16; 32], [0i16; 32]);
        for i in 0..32 {
            (cosines[i], sines[i]) = table[i % TABLE];
        }
        // SAFETY: arrays of the registers' size.
        let load = |x: &[i16]| unsafe { _mm512_loadu_si512(x[..32].as_ptr().cast()) };
        PolarChunks {
            format,
            cosines: load(&cosines),
            sines: load(&sines),
            weights: [load(&FIXED_WEIGHTS), load(&FIXED_WEIGHTS[32..])],
            flip: _mm512_set1_epi8(flip as i8),
        }
    }

    /// 64 levels, of the codes of level 1 and of the others.
    ///
    /// # Safety
    /// A CPU with AVX-512.
    #[inline(always)]
    unsafe fn combine(self, first: __m128i, upper: __m128i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let code = fields(first, if self.format.bits() == 4 { &FIRST_4 } else { &FIRST_3 });
            let three = _mm512_set1_epi16(3);
            // As weight_index has it: level 4 in bits 0, level 3 in bits 2, level 2 in bits 4.
            let level_4 = _mm512_and_si512(fields(upper, &UPPER[2]), three);
            let level_3 = _mm512_slli_epi16::<2>(_mm512_and_si512(fields(upper, &UPPER[1]), three));
            let level_2 = _mm512_slli_epi16::<4>(_mm512_and_si512(fields(upper, &UPPER[0]), three));
            let mirrored = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x30, 0x0c, 0x3c, 0x03, 0x33, 0x0f, 0x3f));
            let index = _mm512_xor_si512(_mm512_or_si512(level_4, _mm512_or_si512(level_3, level_2)), mirrored);
            let weight = _mm512_permutex2var_epi16(self.weights[0], index, self.weights[1]);
            let x = _mm512_mulhrs_epi16(weight, _mm512_permutexvar_epi16(code, self.cosines));
            let y = _mm512_mulhrs_epi16(weight, _mm512_permutexvar_epi16(code, self.sines));
            let levels = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi16(0xff)), _mm512_slli_epi16::<8>(y));
            _mm512_xor_si512(levels, self.flip)
        }
    }
}

impl Chunks for PolarChunks {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m512i {
        let f = self.format;
        // SAFETY: the caller's promise; what is read lies in the row.
        unsafe {
            if f.blocks() >= 4 * (chunk + 1) && f.bits() == 4 {
                // Codes of level 1 follow those of the others, so there are eight bytes.
                let first = _mm_loadu_si128(row.add(f.first_offset() + 16 * chunk).cast());
                let upper = _mm_loadl_epi64(row.add(f.upper_offset() + UPPER_BYTES * chunk).cast());
                return self.combine(first, upper);
            }
            let blocks = (f.blocks() - 4 * chunk).min(4);
            let levels = self.combine(first_codes(f, row, chunk, blocks), upper_codes(f, row, chunk, blocks));
            _mm512_mask_mov_epi8(self.flip, u64::MAX >> (64 - BLOCK * blocks), levels)
        }
    }
}

/// A field in the low bits of each word; what is above it is not cleared.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fields(bytes: __m128i, places: &Places) -> __m512i {
    // SAFETY: 64 bytes each.
    unsafe {
        let pairs = _mm512_loadu_si512(places.bytes.as_ptr().cast());
        let words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), pairs);
        _mm512_srlv_epi16(words, _mm512_loadu_si512(places.shifts.as_ptr().cast()))
    }
}

/// The bytes of the codes of level 1 of some blocks of a chunk.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn first_codes(f: Polar, row: *const u8, chunk: usize, blocks: usize) -> __m128i {
    let there = 0xffffu16 >> (16 - f.first_bytes() * blocks);
    // SAFETY: no other bytes are touched.
    unsafe { _mm_maskz_loadu_epi8(there, row.add(f.first_offset() + 4 * f.first_bytes() * chunk).cast()) }
}

/// The same of the upper levels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn upper_codes(f: Polar, row: *const u8, chunk: usize, blocks: usize) -> __m128i {
    let there = 0xffffu16 >> (16 - (UPPER_BITS * blocks).div_ceil(8));
    // SAFETY: no other bytes are touched.
    unsafe { _mm_maskz_loadu_epi8(there, row.add(f.upper_offset() + UPPER_BYTES * chunk).cast()) }
}

/// Cosines and sines of a level from 2 on, for the two low bits of a word.
#[inline]
#[target_feature(enable = "avx512f")]
fn cosines(level: usize) -> (__m512, __m512) {
    let c = COSINES[level - 2];
    (
        _mm512_broadcast_f32x4(_mm_setr_ps(c[0], c[1], c[2], c[3])),
        _mm512_broadcast_f32x4(_mm_setr_ps(c[3], c[2], c[1], c[0])),
    )
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
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

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
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
        // SAFETY: a bundle of rows; sixteen scores of each query, for which rows of CELLS have room.
        unsafe {
            for r in 0..rows {
                _mm512_storeu_ps(out.add(r * CELLS + c), _mm512_setzero_ps());
            }
            // Cells beyond n are stood in for by the last one.
            let from = std::array::from_fn(|i| data.add((c + i).min(n - 1) * stride));
            for chunk in 0..f.blocks().div_ceil(4) {
                let blocks = (f.blocks() - 4 * chunk).min(4);
                let (first, rest) = transposed::<BITS>(f, from, chunk, blocks);
                for b in 0..blocks {
                    let weights = weights(upper_of(rest, b), radius_of(rest, b));
                    let codes = codes::<BITS>(first[b]);
                    let tables = tables.add((4 * chunk + b) * PAIRS * TABLE);
                    for r in 0..rows {
                        let (tables, out) = (tables.add(r * row_tables), out.add(r * CELLS + c));
                        let mut sum = _mm512_loadu_ps(out);
                        for j in 0..PAIRS {
                            let table = _mm512_loadu_ps(tables.add(j * TABLE));
                            sum = _mm512_fmadd_ps(weights[j], _mm512_permutexvar_ps(codes[j], table), sum);
                        }
                        _mm512_storeu_ps(out, sum);
                    }
                }
            }
        }
    }
}

/// Words of sixteen rows: the codes of level 1 of the blocks of a chunk; upper codes (two words) and radii (two).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn transposed<const BITS: u32>(
    f: Polar,
    rows: [*const u8; BUNDLE],
    chunk: usize,
    blocks: usize,
) -> ([__m512i; 4], [__m512i; 4]) {
    let (mut first, mut rest) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
    for i in 0..4 {
        let (mut x, mut y) = ([_mm_setzero_si128(); 4], [_mm_setzero_si128(); 4]);
        for part in 0..4 {
            // SAFETY: rows that are there, bytes of these blocks.
            unsafe {
                let row = rows[i + 4 * part];
                x[part] = first_codes(f, row, chunk, blocks);
                let radii = _mm_maskz_loadu_epi8(0xff >> (8 - 2 * blocks), row.add(8 * chunk).cast());
                y[part] = _mm_unpacklo_epi64(upper_codes(f, row, chunk, blocks), radii);
            }
        }
        (first[i], rest[i]) = (joined(x), joined(y));
        if BITS == 3 {
            let spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
            first[i] = _mm512_shuffle_epi8(first[i], _mm512_broadcast_i32x4(spread));
        }
    }
    (words_of_4(first), words_of_4(rest))
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn joined(x: [__m128i; 4]) -> __m512i {
    let y = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(x[0]), x[1]);
    _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(y, x[2]), x[3])
}

/// The upper codes of block b from bit 0 on, others above them.
#[inline]
#[target_feature(enable = "avx512f")]
fn upper_of(rest: [__m512i; 4], b: usize) -> __m512i {
    match b {
        0 => rest[0],
        1 => _mm512_srli_epi32::<14>(rest[0]),
        2 => _mm512_or_si512(_mm512_srli_epi32::<28>(rest[0]), _mm512_slli_epi32::<4>(rest[1])),
        _ => _mm512_srli_epi32::<10>(rest[1]),
    }
}

/// The radii of block b; NaN and infinities count as zero.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,f16c")]
fn radius_of(rest: [__m512i; 4], b: usize) -> __m512 {
    let words = if b.is_multiple_of(2) { rest[2 + b / 2] } else { _mm512_srli_epi32::<16>(rest[2 + b / 2]) };
    let x = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
    _mm512_maskz_mov_ps(!_mm512_fpclass_ps_mask::<0x99>(x), x)
}

/// What the tables' entries of the eight pairs are multiplied by.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn weights(upper: __m512i, radius: __m512) -> [__m512; PAIRS] {
    let look = |at: u32, (cos, sin): (__m512, __m512), x: __m512| {
        let code = _mm512_srlv_epi32(upper, _mm512_set1_epi32(at as i32));
        (_mm512_mul_ps(x, _mm512_permutexvar_ps(code, cos)), _mm512_mul_ps(x, _mm512_permutexvar_ps(code, sin)))
    };
    let (level_2, level_3, level_4) = (cosines(2), cosines(3), cosines(4));
    let (left, right) = look(12, level_4, radius);
    let (a, b) = look(8, level_3, left);
    let (c, d) = look(10, level_3, right);
    let (w0, w1) = look(0, level_2, a);
    let (w2, w3) = look(2, level_2, b);
    let (w4, w5) = look(4, level_2, c);
    let (w6, w7) = look(6, level_2, d);
    [w0, w1, w2, w3, w4, w5, w6, w7]
}

/// The codes of level 1 of the eight pairs in the low bits of words.
#[inline]
#[target_feature(enable = "avx512f")]
fn codes<const BITS: u32>(words: __m512i) -> [__m512i; PAIRS] {
    let mut codes = [words; PAIRS];
    for (j, code) in codes.iter_mut().enumerate() {
        *code = _mm512_srlv_epi32(words, _mm512_set1_epi32((BITS as usize * j) as i32));
    }
    codes
}
