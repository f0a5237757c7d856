//! Polar rows: their levels, two blocks at a time, and scores by the tables of queries, eight cells in the lanes.

use crate::codec::polar::{self, Polar, COSINES, PAIRS, TABLE};
use crate::codec::scales::load_f16;
use crate::codec::RowFormat;
use crate::isa::generic::polar::{first_codes, pair_weights, upper_codes};
use crate::isa::generic::{self, Chunks};
use crate::isa::{StoredRows, CELLS};
use std::arch::x86_64::*;

/// Levels, two blocks at a time.
#[derive(Clone, Copy)]
pub struct PolarChunks {
    format: Polar,
    bias: __m256i,
    /// Low and high bytes of cosines and sines of level 1.
    first: [__m256i; 4],
    /// Cosines of levels 2, 3, 4 as words.
    upper: [__m256i; 3],
}

impl PolarChunks {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new(f: Polar, bias: u8) -> PolarChunks {
        let table = f.level_table();
        let bytes = |of: &dyn Fn(usize) -> u8| {
            let mut b = [0u8; 16];
            for (i, b) in b.iter_mut().enumerate() {
                *b = of(i);
            }
            // SAFETY: sixteen bytes.
            _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(b.as_ptr().cast()) })
        };
        PolarChunks {
            format: f,
            bias: _mm256_set1_epi8(bias as i8),
            first: [
                bytes(&|i| table[i].0.to_le_bytes()[0]),
                bytes(&|i| table[i].0.to_le_bytes()[1]),
                bytes(&|i| table[i].1.to_le_bytes()[0]),
                bytes(&|i| table[i].1.to_le_bytes()[1]),
            ],
            upper: [0, 1, 2].map(|level| bytes(&|i| polar::fixed_cosine(level, i / 2 % 4).to_le_bytes()[i % 2])),
        }
    }

    /// Entries of a table of words by codes in the low bytes of words.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn look(low: __m256i, high: __m256i, codes: __m256i) -> __m256i {
        // The high bytes of the index are set to choose zero.
        let index = _mm256_or_si256(codes, _mm256_set1_epi16(0x8000_u16 as i16));
        let high = _mm256_shuffle_epi8(high, index);
        _mm256_or_si256(_mm256_shuffle_epi8(low, index), _mm256_slli_epi16::<8>(high))
    }

    /// The levels of two blocks.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn two_blocks(self, row: *const u8, block: usize, second: usize) -> __m256i {
        let f = self.format;
        // A code at bit s of a word comes to its lowest bits by a shift to the top and one to the bottom.
        let upper_at = |at: [usize; 8]| {
            let power = at.map(|s| (1u16 << (14 - s)) as i16);
            let half = _mm_setr_epi16(power[0], power[1], power[2], power[3], power[4], power[5], power[6], power[7]);
            _mm256_broadcastsi128_si256(half)
        };
        let places = [upper_at([0, 0, 2, 2, 4, 4, 6, 6]), upper_at([8, 8, 8, 8, 10, 10, 10, 10]), upper_at([12; 8])];
        let mirrored = [
            _mm256_broadcastsi128_si256(_mm_setr_epi16(0, 3, 0, 3, 0, 3, 0, 3)),
            _mm256_broadcastsi128_si256(_mm_setr_epi16(0, 0, 3, 3, 0, 0, 3, 3)),
            _mm256_broadcastsi128_si256(_mm_setr_epi16(0, 0, 0, 0, 3, 3, 3, 3)),
        ];
        // SAFETY: blocks of the row.
        unsafe {
            let (a, b) = (first_codes(f, row, block), first_codes(f, row, second));
            let code = first_fields(f, _mm256_set_m128i(_mm_set1_epi32(b as i32), _mm_set1_epi32(a as i32)));
            let (a, b) = (upper_codes(f, row, block), upper_codes(f, row, second));
            let upper = _mm256_set_m128i(_mm_set1_epi16(b as i16), _mm_set1_epi16(a as i16));
            let mut factors = [_mm256_setzero_si256(); 3];
            for level in 0..3 {
                let code = _mm256_srli_epi16::<14>(_mm256_mullo_epi16(upper, places[level]));
                let code = _mm256_xor_si256(code, mirrored[level]);
                // Word k of a table is bytes 2k and 2k + 1.
                let pair =
                    _mm256_add_epi16(_mm256_mullo_epi16(code, _mm256_set1_epi16(0x202)), _mm256_set1_epi16(0x100));
                factors[level] = _mm256_shuffle_epi8(self.upper[level], pair);
            }
            let weight = _mm256_mulhrs_epi16(_mm256_mulhrs_epi16(factors[2], factors[1]), factors[0]);
            let x = _mm256_mulhrs_epi16(weight, PolarChunks::look(self.first[0], self.first[1], code));
            let y = _mm256_mulhrs_epi16(weight, PolarChunks::look(self.first[2], self.first[3], code));
            _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi16(0xff)), _mm256_slli_epi16::<8>(y))
        }
    }
}

impl generic::PolarChunks<__m256i> for PolarChunks {
    #[inline(always)]
    unsafe fn new(f: Polar, bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe { PolarChunks::new(f, bias) }
    }
}

impl Chunks<__m256i> for PolarChunks {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        2 * at + 1 < self.format.blocks()
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> __m256i {
        // SAFETY: blocks of the row, on a CPU with AVX2.
        unsafe { _mm256_add_epi8(self.two_blocks(row, 2 * at, 2 * at + 1), self.bias) }
    }

    #[inline(always)]
    unsafe fn tail(self, row: *const u8, at: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            if 2 * at >= self.format.blocks() {
                return self.bias;
            }
            let levels = self.two_blocks(row, 2 * at, 2 * at);
            _mm256_add_epi8(_mm256_inserti128_si256::<1>(levels, _mm_setzero_si128()), self.bias)
        }
    }
}

/// The codes of level 1 of two blocks, whose words fill a half each, as words.
#[inline]
#[target_feature(enable = "avx2")]
fn first_fields(f: Polar, words: __m256i) -> __m256i {
    let half = |x: __m128i| _mm256_broadcastsi128_si256(x);
    if f.bits() == 4 {
        let bytes = half(_mm_setr_epi8(0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 4, 3, 4));
        let up = half(_mm_setr_epi16(1 << 12, 1 << 8, 1 << 12, 1 << 8, 1 << 12, 1 << 8, 1 << 12, 1 << 8));
        return _mm256_srli_epi16::<12>(_mm256_mullo_epi16(_mm256_shuffle_epi8(words, bytes), up));
    }
    // Codes at bits 0 3 6 | 9 12 15 | 18 21: bytes 0 0 0 1 1 1 2 2, shifts 0 3 6 1 4 7 2 5.
    let bytes = half(_mm_setr_epi8(0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3));
    let up = half(_mm_setr_epi16(1 << 13, 1 << 10, 1 << 7, 1 << 12, 1 << 9, 1 << 6, 1 << 11, 1 << 8));
    _mm256_srli_epi16::<13>(_mm256_mullo_epi16(_mm256_shuffle_epi8(words, bytes), up))
}

/// See `Kernels::polar_scores`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn scores(f: Polar, stored: StoredRows, tables: *const f32, rows: usize, out: *mut f32) {
    let row_tables = f.size() / 2 * TABLE;
    for c in (0..stored.n).step_by(8) {
        // Cells beyond n are stood in for by the last one.
        let row = |i: usize| {
            // SAFETY: a row that is there.
            unsafe { stored.row((c + i).min(stored.n - 1)) }
        };
        // SAFETY: eight scores of each query, for which rows of CELLS have room; blocks of rows that are there.
        unsafe {
            for r in 0..rows {
                _mm256_storeu_ps(out.add(r * CELLS + c), _mm256_setzero_ps());
            }
            for block in 0..f.blocks() {
                let eight = |of: &dyn Fn(*const u8) -> i32| {
                    let x: [i32; 8] = std::array::from_fn(|i| of(row(i)));
                    _mm256_loadu_si256(x.as_ptr().cast())
                };
                let codes = eight(&|row| first_codes(f, row, block) as i32);
                let upper = eight(&|row| upper_codes(f, row, block) as i32);
                let radii: [f32; 8] =
                    std::array::from_fn(|i| load_f16(&row(i).add(2 * block).cast::<[u8; 2]>().read()));
                let weights = weights(upper, _mm256_loadu_ps(radii.as_ptr()));
                let mut code = [codes; PAIRS];
                for (j, code) in code.iter_mut().enumerate() {
                    *code = _mm256_srlv_epi32(codes, _mm256_set1_epi32((f.bits() as usize * j) as i32));
                }
                for r in 0..rows {
                    let (tables, out) = (tables.add(r * row_tables + block * PAIRS * TABLE), out.add(r * CELLS + c));
                    let mut sum = _mm256_loadu_ps(out);
                    for j in 0..PAIRS {
                        let table = tables.add(j * TABLE);
                        let mut x = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), code[j]);
                        if f.bits() == 4 {
                            let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.add(8)), code[j]);
                            x = _mm256_blendv_ps(x, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(code[j])));
                        }
                        sum = _mm256_fmadd_ps(weights[j], x, sum);
                    }
                    _mm256_storeu_ps(out, sum);
                }
            }
        }
    }
}

/// What the tables' entries of the eight pairs are multiplied by.
#[inline]
#[target_feature(enable = "avx2")]
fn weights(upper: __m256i, radius: __m256) -> [__m256; PAIRS] {
    pair_weights(radius, |at, level, x| {
        let c = COSINES[level - 2];
        let code = _mm256_srlv_epi32(upper, _mm256_set1_epi32(at as i32));
        let cos = _mm256_setr_ps(c[0], c[1], c[2], c[3], c[0], c[1], c[2], c[3]);
        let sin = _mm256_setr_ps(c[3], c[2], c[1], c[0], c[3], c[2], c[1], c[0]);
        (_mm256_mul_ps(x, _mm256_permutevar_ps(cos, code)), _mm256_mul_ps(x, _mm256_permutevar_ps(sin, code)))
    })
}
