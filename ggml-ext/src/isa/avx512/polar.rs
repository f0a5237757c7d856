//! Polar rows: their levels, a chunk of four blocks at a time, and scores by the tables of queries.
//!
//! Scores. A lane is a cell. Radii and upper codes of sixteen rows are read sixteen bytes at a time and transposed by words,
//! and so are the codes of level 1 of four blocks. A shift brings a code to the low bits of its word, where `vpermps`
//! takes it as the index of a table of sixteen floats; it ignores the bits above.

use super::columns::words_of_4;
use super::unpack::{finite_halves, sixteens};
use crate::codec::polar::{Polar, BLOCK, COSINES, FIXED_WEIGHTS, PAIRS, TABLE, UPPER_BITS};
use crate::codec::RowFormat;
use crate::isa::generic::polar::pair_weights;
use crate::isa::generic::rows::whole_bundle;
use crate::isa::generic::{self, opaque, Chunks};
use crate::isa::{by_rows, StoredRows, BUNDLE, CELLS, MAX_ROW_BYTES};
use crate::rotation::MAX_HEAD;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

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

/// Where the upper codes of a pair begin, once its word holds the fourteen bits of its block, such that level 2 ends in
/// bits 0 and 1 and level 3 in bits 2 and 3; and what mirrors the index where a weight takes a sine.
struct Upper {
    level_2: [u16; 32],
    level_3: [u16; 32],
    mirrored: [u16; 32],
}

static UPPER: Upper = {
    let mut upper = Upper { level_2: [0; 32], level_3: [0; 32], mirrored: [0; 32] };
    let mut i = 0;
    while i < 32 {
        let j = i as u16 % PAIRS as u16;
        upper.level_2[i] = 2 * (j / 2);
        upper.level_3[i] = 8 - 2 + 2 * (j / 4);
        upper.mirrored[i] = (0x03 * (j & 1)) | (0x0c * (j >> 1 & 1)) | (0x30 * (j >> 2 & 1));
        i += 1;
    }
    upper
};

/// The products of three cosines with level 2 in the lowest bits of the index.
static WEIGHTS: [i16; 64] = {
    let (mut weights, mut i) = ([0; 64], 0);
    while i < 64 {
        weights[i] = FIXED_WEIGHTS[i >> 4 | i & 0x0c | (i & 3) << 4];
        i += 1;
    }
    weights
};

#[derive(Clone, Copy)]
pub struct PolarChunks {
    format: Polar,
    cosines: __m512i,
    sines: __m512i,
    /// The 64 products of three cosines.
    weights: [__m512i; 2],
    bias: __m512i,
}

impl PolarChunks {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn new(format: Polar, bias: u8) -> Self {
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
            weights: [load(&WEIGHTS), load(&WEIGHTS[32..])],
            bias: _mm512_set1_epi8(bias as i8),
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
            // Eight bytes are four pairs: each gets the bits of its block to its lowest word, and that to all four.
            let blocks = _mm512_setr_epi64(0, 0, 14, 14, 28, 28, 42, 42);
            let lowest = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9));
            let upper = shuffle_bytes(_mm512_srlv_epi64(_mm512_broadcastq_epi64(upper), blocks), lowest);
            let level_2 = _mm512_srlv_epi16(upper, words(&UPPER.level_2));
            let level_3 = _mm512_srlv_epi16(upper, words(&UPPER.level_3));
            let level_4 = _mm512_srli_epi16::<8>(upper);
            let index = select(_mm512_set1_epi16(0x0003), level_2, level_3);
            let index = select(_mm512_set1_epi16(0x000f), index, level_4);
            let index = _mm512_xor_si512(index, words(&UPPER.mirrored));
            let weight = _mm512_permutex2var_epi16(self.weights[0], index, self.weights[1]);
            let x = _mm512_mulhrs_epi16(weight, _mm512_permutexvar_epi16(code, self.cosines));
            let y = _mm512_mulhrs_epi16(weight, _mm512_permutexvar_epi16(code, self.sines));
            let levels = select(_mm512_set1_epi16(0x00ff), x, _mm512_slli_epi16::<8>(y));
            _mm512_add_epi8(levels, self.bias)
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words(x: &[u16; 32]) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

/// Bits of a where the mask is set, of b where it is not.
#[inline]
#[target_feature(enable = "avx512f")]
fn select(mask: __m512i, a: __m512i, b: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0xe4>(a, b, mask)
}

impl generic::PolarChunks<__m512i> for PolarChunks {
    #[inline(always)]
    unsafe fn new(f: Polar, bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe { PolarChunks::new(f, bias) }
    }
}

impl Chunks<__m512i> for PolarChunks {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        4 * (at + 1) <= self.format.blocks()
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> __m512i {
        let f = self.format;
        // SAFETY: the caller's promise. Codes of level 1 follow those of the others, so there are eight bytes.
        unsafe {
            let upper = _mm_loadl_epi64(row.add(f.upper_offset() + UPPER_BYTES * at).cast());
            self.combine(first_codes(f, row, at, 4), upper)
        }
    }

    #[inline(always)]
    unsafe fn tail(self, row: *const u8, at: usize) -> __m512i {
        let (f, blocks) = (self.format, self.format.blocks() - 4 * at);
        // SAFETY: the caller's promise; what is read lies in the row.
        unsafe {
            let levels = self.combine(first_codes(f, row, at, blocks), upper_codes(f, row, at, blocks));
            _mm512_mask_mov_epi8(self.bias, u64::MAX >> (64 - BLOCK * blocks), levels)
        }
    }
}

/// `vpshufb` itself: the compiler would take two shuffles of words for it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shuffle_bytes(x: __m512i, order: __m512i) -> __m512i {
    let out: __m512i;
    // SAFETY: registers only.
    unsafe {
        asm!("vpshufb {out}, {x}, {order}", out = lateout(zmm_reg) out, x = in(zmm_reg) x, order = in(zmm_reg) order,
            options(pure, nomem, nostack, preserves_flags));
    }
    out
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
    let bytes = f.first_bytes() * blocks;
    // SAFETY: no other bytes are touched.
    unsafe {
        let from = row.add(f.first_offset() + 4 * f.first_bytes() * chunk);
        match bytes {
            16 => _mm_loadu_si128(from.cast()),
            _ => _mm_maskz_loadu_epi8(0xffff >> (16 - bytes), from.cast()),
        }
    }
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
pub(super) unsafe fn scores(f: Polar, stored: StoredRows, tables: *const f32, rows: usize, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        // Queries of a decode step are few, and then their number is a constant of the loops.
        macro_rules! by_count {
            ($($count:literal)+) => {
                match (f.bits(), rows) {
                    $((4, $count) => scores_of::<4, $count>(f, stored, tables, rows, out),)+
                    (4, _) => scores_of::<4, 0>(f, stored, tables, rows, out),
                    $((_, $count) => scores_of::<3, $count>(f, stored, tables, rows, out),)+
                    _ => scores_of::<3, 0>(f, stored, tables, rows, out),
                }
            };
        }
        by_count!(1 2 3 4 5 6)
    }
}

/// ROWS queries, any number if 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
unsafe fn scores_of<const BITS: u32, const ROWS: usize>(
    f: Polar,
    stored: StoredRows,
    tables: *const f32,
    rows: usize,
    out: *mut f32,
) {
    let row_tables = f.size() / 2 * TABLE;
    for c in (0..stored.n).step_by(BUNDLE) {
        // SAFETY: a bundle of rows; sixteen scores of each query, for which rows of CELLS have room.
        unsafe {
            for r in 0..rows {
                _mm512_storeu_ps(out.add(r * CELLS + c), _mm512_setzero_ps());
            }
            stored.prefetch_next::<__m512i, BUNDLE>(c, f.row_bytes());
            let mut copy = MaybeUninit::<[u8; BUNDLE * MAX_ROW_BYTES]>::uninit();
            let (from, stride) = whole_bundle(stored.row(c), stored.stride, stored.n - c, f.row_bytes(), &mut copy);
            let mut head = Head::EMPTY;
            head.read(f, from, opaque(stride));
            for chunk in 0..f.blocks().div_ceil(4) {
                let blocks = (f.blocks() - 4 * chunk).min(4);
                let first = first_words::<BITS>(f, from, opaque(stride), chunk, blocks);
                for b in 0..blocks {
                    let block = 4 * chunk + b;
                    let weights = weights(head.upper(f, block), head.radius(block));
                    let codes = codes::<BITS>(first[b]);
                    let tables = tables.add(block * PAIRS * TABLE);
                    if ROWS > 0 {
                        add_scores::<ROWS>(&weights, &codes, tables, row_tables, out.add(c));
                    } else {
                        by_rows!(rows, [1 2 3 4 5 6], |r, COUNT| {
                            let (tables, out) = (tables.add(r * row_tables), out.add(r * CELLS + c));
                            add_scores::<COUNT>(&weights, &codes, tables, row_tables, out);
                        });
                    }
                }
            }
        }
    }
}

/// What a block adds to the scores of sixteen cells.
#[inline]
#[target_feature(enable = "avx512f,fma")]
unsafe fn add_scores<const COUNT: usize>(
    weights: &[__m512; PAIRS],
    codes: &[__m512i; PAIRS],
    tables: *const f32,
    row_tables: usize,
    out: *mut f32,
) {
    // SAFETY: tables of COUNT queries, sixteen scores of each.
    unsafe {
        // Side by side, since every sum waits for the one before.
        let mut sums = [_mm512_setzero_ps(); COUNT];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = _mm512_loadu_ps(out.add(i * CELLS));
        }
        for j in 0..PAIRS {
            for (i, sum) in sums.iter_mut().enumerate() {
                let table = _mm512_loadu_ps(tables.add(i * row_tables + j * TABLE));
                *sum = _mm512_fmadd_ps(weights[j], _mm512_permutexvar_ps(codes[j], table), *sum);
            }
        }
        for (i, sum) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(out.add(i * CELLS), sum);
        }
    }
}

/// Most blocks of a row.
const MAX_BLOCKS: usize = (MAX_HEAD / BLOCK).next_multiple_of(2);
/// Most words of radii and upper codes, and one more.
const HEAD_WORDS: usize = (MAX_BLOCKS * (16 + UPPER_BITS)).div_ceil(128) * 4 + 1;

/// What stands in front of the codes of level 1, of sixteen rows.
struct Head {
    radii: [MaybeUninit<__m512>; MAX_BLOCKS],
    words: [MaybeUninit<__m512i>; HEAD_WORDS],
}

impl Head {
    const EMPTY: Head = Head {
        radii: [const { MaybeUninit::uninit() }; MAX_BLOCKS],
        words: [const { MaybeUninit::uninit() }; HEAD_WORDS],
    };

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,f16c")]
    unsafe fn read(&mut self, f: Polar, from: *const u8, stride: usize) {
        let sixteen = (f.blocks() * (16 + UPPER_BITS)).div_ceil(128);
        for (i, four) in self.words.chunks_exact_mut(4).take(sixteen).enumerate() {
            // SAFETY: the codes of level 1 have more bytes than are read beyond the head.
            let words = words_of_4(unsafe { sixteens(from.add(16 * i), stride) });
            for (to, word) in four.iter_mut().zip(words) {
                to.write(word);
            }
        }
        self.words[4 * sixteen].write(_mm512_setzero_si512());
        for (two, word) in self.radii.chunks_exact_mut(2).zip(&self.words).take(f.blocks().div_ceil(2)) {
            // SAFETY: written above, since radii are the first words.
            let [even, odd] = finite_halves(unsafe { word.assume_init() });
            two[0].write(_mm512_cvtph_ps(even));
            two[1].write(_mm512_cvtph_ps(odd));
        }
    }

    /// The radii of a block.
    ///
    /// # Safety
    /// A block of what was read.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn radius(&self, block: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { self.radii.get_unchecked(block).assume_init() }
    }

    /// The upper codes of a block from bit 0 on, others above them.
    ///
    /// # Safety
    /// As [`Head::radius`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn upper(&self, f: Polar, block: usize) -> __m512i {
        let bit = 16 * f.blocks() + UPPER_BITS * block;
        // SAFETY: the caller's promise; there is one word more than was read.
        let word = |i: usize| unsafe { self.words.get_unchecked(i).assume_init() };
        let (low, high) = (word(bit / 32), word(bit / 32 + 1));
        // Broadcast from memory they cost no shuffle.
        static SHIFTS: [i32; 32] = {
            let (mut shifts, mut i) = ([0; 32], 0);
            while i < 32 {
                shifts[i] = i as i32;
                i += 1;
            }
            shifts
        };
        let shift = _mm512_set1_epi32(SHIFTS[bit % 32]);
        let rest = _mm512_sub_epi32(_mm512_set1_epi32(32), shift);
        _mm512_or_si512(_mm512_srlv_epi32(low, shift), _mm512_sllv_epi32(high, rest))
    }
}

/// The codes of level 1 of the blocks of a chunk, a word each, of sixteen rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn first_words<const BITS: u32>(
    f: Polar,
    from: *const u8,
    stride: usize,
    chunk: usize,
    blocks: usize,
) -> [__m512i; 4] {
    // SAFETY: rows that are there, bytes of these blocks.
    unsafe {
        if BITS == 4 && blocks == 4 {
            return words_of_4(sixteens(from.add(f.first_offset() + 16 * chunk), stride));
        }
        let mut first = [_mm512_setzero_si512(); 4];
        for (i, first) in first.iter_mut().enumerate() {
            let mut x = [_mm_setzero_si128(); 4];
            for (part, x) in x.iter_mut().enumerate() {
                *x = first_codes(f, from.add((i + 4 * part) * stride), chunk, blocks);
            }
            *first = joined(x);
            if BITS == 3 {
                let spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
                *first = _mm512_shuffle_epi8(*first, _mm512_broadcast_i32x4(spread));
            }
        }
        words_of_4(first)
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn joined(x: [__m128i; 4]) -> __m512i {
    let y = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(x[0]), x[1]);
    _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(y, x[2]), x[3])
}

/// What the tables' entries of the eight pairs are multiplied by.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn weights(upper: __m512i, radius: __m512) -> [__m512; PAIRS] {
    pair_weights(radius, |at, level, x| {
        let (cos, sin) = cosines(level);
        let code = _mm512_srlv_epi32(upper, _mm512_set1_epi32(at as i32));
        (_mm512_mul_ps(x, _mm512_permutexvar_ps(code, cos)), _mm512_mul_ps(x, _mm512_permutexvar_ps(code, sin)))
    })
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
