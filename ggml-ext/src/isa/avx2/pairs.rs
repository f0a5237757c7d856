//! Weighted sums: two cells at a time, values side by side in the lanes of a register.
//!
//! ```text
//! levels  per pair of cells: width / 32 pieces of 64 bytes; bytes alternate between the two cells, and the 8 values of
//!         each 16 bytes are, of the piece's 32: 0..8, 16..24, 8..16, 24..32
//! ```
//!
//! A weight times a scale becomes a 16-bit number. One `vpmaddwd` and an addition, or one `vpdpwssd`, then take two cells
//! of eight values, as many instructions per value as a fused multiply-add or half of that, and levels are only widened
//! to 16 bits, never converted to floats. What a row loses is 1/65534 of the largest product of a cell's weight and scale
//! in the block, far below what 8-bit queries leave.

use super::products::WeightProducts;
use super::unpack::{nibble_levels, nibble_table};
use crate::codec::levels::Packing;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::generic::{code_bytes, unpack_turned, with_chunks, PackedRows};
use crate::isa::{by_rows, LevelBlock, BUNDLE, CELLS};
use std::arch::x86_64::*;

/// The largest 16-bit weight. CELLS of them times a level of 128 stay within 32 bits.
const LARGEST: f32 = 32767.0;

/// Registers of eight cells in a block.
const REGISTERS: usize = CELLS / 8;

/// Fills the levels of a block; cells beyond n have weight 0 and may hold anything.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => unpack_nibbles(rows, f, out),
            packing => with_chunks!(__m256i, packing, 0, |chunks| {
                unpack_turned::<_, 2>(chunks, rows, out, |[a, b]| interleave(a, b))
            }),
        }
    }
}

/// Codes change places while they are still packed: half the shuffles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_nibbles(rows: PackedRows, f: Srft, out: LevelBlock) {
    let table = nibble_table(0);
    for first in (0..rows.stored.n).step_by(2) {
        for chunk in 0..f.size() / 64 {
            // SAFETY: two rows, and a pair of the block.
            unsafe {
                let from = rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64));
                let to = out.levels.add(first * out.width + chunk * 128);
                let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(rows.stored.stride).cast()));
                for (i, codes) in interleave(a, b).into_iter().enumerate() {
                    let (low, high) = nibble_levels(codes, table);
                    _mm256_storeu_si256(to.add(32 * i).cast(), low);
                    _mm256_storeu_si256(to.add(64 + 32 * i).cast(), high);
                }
            }
        }
    }
}

/// The bytes of both by turns: of each 128-bit part the lower eight, then the upper eight.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave(a: __m256i, b: __m256i) -> [__m256i; 2] {
    [_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)]
}

/// See [`crate::isa::Kernels::weigh_levels`].
#[inline(always)]
pub(super) unsafe fn weigh_levels<P: WeightProducts>(
    v: LevelBlock,
    n: usize,
    weights: *const f32,
    rows: usize,
    acc: *mut f32,
) {
    // The largest scale of each cell: a sink has much weight and small values, and must not set the unit of the others.
    let mut tops = [0.0f32; CELLS];
    for c in (0..n).step_by(8) {
        // SAFETY: scales of eight cells.
        unsafe {
            let mut top = _mm256_setzero_ps();
            for g in 0..v.scale_groups() {
                let scales = _mm256_loadu_ps(v.scale_at(c, g));
                top = _mm256_max_ps(top, _mm256_andnot_ps(_mm256_set1_ps(-0.0), scales));
            }
            _mm256_storeu_ps(tops.as_mut_ptr().add(c), top);
        }
    }
    by_rows!(rows, [1 2 3 4], |first, COUNT| {
        // SAFETY: COUNT rows of weights and sums.
        unsafe { weigh_rows::<P, COUNT>(v, n, &tops, weights.add(first * CELLS), acc.add(first * v.width)) }
    });
}

/// H rows of weights.
#[inline(always)]
unsafe fn weigh_rows<P: WeightProducts, const H: usize>(
    v: LevelBlock,
    n: usize,
    tops: &[f32; CELLS],
    weights: *const f32,
    acc: *mut f32,
) {
    let bundles = n.div_ceil(BUNDLE);
    // SAFETY: H rows of CELLS weights and of `width` sums; `bundles` bundles of the block.
    unsafe {
        let mut scaled = [[_mm256_setzero_ps(); REGISTERS]; H];
        let mut units = [0.0f32; H];
        for h in 0..H {
            units[h] = scale_weights(weights.add(h * CELLS), tops, &mut scaled[h]);
        }
        for g in 0..v.scale_groups() {
            // Cells in order, so that a word has the weights of a pair.
            let mut words = [[_mm256_setzero_si256(); CELLS / BUNDLE]; H];
            for b in 0..bundles {
                let scales = v.scale_at(b * BUNDLE, g);
                let (low, high) = (_mm256_loadu_ps(scales), _mm256_loadu_ps(scales.add(8)));
                for h in 0..H {
                    let low = _mm256_cvtps_epi32(_mm256_mul_ps(low, scaled[h][2 * b]));
                    let high = _mm256_cvtps_epi32(_mm256_mul_ps(high, scaled[h][2 * b + 1]));
                    words[h][b] = _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi32(low, high));
                }
            }
            for at in (g * v.scale_group..(g + 1) * v.scale_group).step_by(16) {
                let sums = weigh_sixteen::<P, H>(v.levels.add(at / 32 * 64 + at % 32), v.width, &words, bundles);
                for h in 0..H {
                    for i in 0..2 {
                        let to = acc.add(h * v.width + at + 8 * i);
                        let (sum, unit) = (_mm256_cvtepi32_ps(sums[h][i]), _mm256_set1_ps(units[h]));
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(sum, unit, _mm256_loadu_ps(to)));
                    }
                }
            }
        }
    }
}

/// Sixteen values: more would not leave registers for H weights and the products on their way.
#[inline(always)]
unsafe fn weigh_sixteen<P: WeightProducts, const H: usize>(
    levels: *const i8,
    width: usize,
    words: &[[__m256i; CELLS / BUNDLE]; H],
    bundles: usize,
) -> [[__m256i; 2]; H] {
    /// Pairs in one turn of the loop.
    const TURN: usize = 4;
    // SAFETY: `bundles` bundles of levels and of weights.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; H];
        for turn in 0..bundles * BUNDLE / 2 / TURN {
            for pair in TURN * turn..TURN * (turn + 1) {
                let mut w = [_mm256_setzero_si256(); H];
                for h in 0..H {
                    w[h] = _mm256_set1_epi32(*words[h].as_ptr().cast::<i32>().add(pair));
                }
                for i in 0..2 {
                    let x = _mm_loadu_si128(levels.add(2 * pair * width + 32 * i).cast());
                    let x = _mm256_cvtepi8_epi16(x);
                    for h in 0..H {
                        sums[h][i] = P::add_pairs(sums[h][i], x, w[h]);
                    }
                }
            }
        }
        sums
    }
}

/// A row of weights such that times any scale they fit 16 bits, and what one of these is worth.
#[inline(always)]
unsafe fn scale_weights(weights: *const f32, tops: &[f32; CELLS], scaled: &mut [__m256; REGISTERS]) -> f32 {
    // SAFETY: CELLS weights.
    unsafe {
        let mut most = _mm256_setzero_ps();
        for (i, w) in scaled.iter_mut().enumerate() {
            *w = _mm256_loadu_ps(weights.add(8 * i));
            most = _mm256_max_ps(most, _mm256_mul_ps(*w, _mm256_loadu_ps(tops.as_ptr().add(8 * i))));
        }
        let half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
        let two = _mm_max_ps(half, _mm_movehl_ps(half, half));
        let largest = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
        // Below this nothing is left in f32 either.
        let (factor, unit) = if largest > 1e-30 { (LARGEST / largest, largest / LARGEST) } else { (0.0, 0.0) };
        for w in scaled {
            *w = _mm256_mul_ps(*w, _mm256_set1_ps(factor));
        }
        unit
    }
}
