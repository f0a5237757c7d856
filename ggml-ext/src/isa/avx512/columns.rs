//! Scores: sixteen cells side by side in the lanes of a register.
//!
//! ```text
//! levels  per bundle of 16 cells: width / 4 columns of 64 bytes; lane c of column j = values 4j..4j+4 of cell c
//! ```

use super::products::ScoreProducts;
use super::unpack::{nibble_levels, nibble_table, sixteens};
use super::BIAS;
use crate::codec::levels::Packing;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::generic::{code_bytes, opaque, unpack_bands, unpack_turned, with_chunks, PackedRows, Words};
use crate::isa::{by_rows, LevelBlock, Queries, BUNDLE, CELLS, MAX_WIDTH};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Fills the levels of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => unpack_nibbles(rows, f, out),
            Packing::Bands(f) => {
                for first in (0..rows.stored.n).step_by(BUNDLE) {
                    rows.prefetch_next::<__m512i, BUNDLE>(first);
                }
                unpack_bands::<__m512i>(rows, f, BIAS, out);
            }
            packing => with_chunks!(__m512i, packing, BIAS, |chunks| {
                unpack_turned::<_, BUNDLE>(chunks, rows, out, |x| words_of_16(x))
            }),
        }
    }
}

/// Codes change places while they are still packed: half the shuffles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn unpack_nibbles(rows: PackedRows, f: Srft, out: LevelBlock) {
    let table = nibble_table();
    for first in (0..rows.stored.n).step_by(BUNDLE) {
        let stride = opaque(rows.stored.stride);
        rows.prefetch_next::<__m512i, BUNDLE>(first);
        for chunk in 0..f.size() / 64 {
            // SAFETY: a bundle of rows and of the block.
            unsafe {
                let codes = codes(rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64)), stride);
                let out = out.levels.add(first * out.width + chunk * 1024);
                for (j, codes) in codes.into_iter().enumerate() {
                    let (low, high) = nibble_levels(codes, table);
                    _mm512_storeu_si512(out.add(64 * j).cast(), low);
                    _mm512_storeu_si512(out.add(64 * (8 + j)).cast(), high);
                }
            }
        }
    }
}

/// Result j has word j of the 32 bytes at `p` and at the fifteen places `stride` further each.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn codes(p: *const u8, stride: usize) -> [__m512i; 8] {
    // SAFETY: the caller's rows have these bytes.
    unsafe {
        let four = |p: *const u8| {
            let two = |p: *const u8| {
                let low = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
                _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(p.add(4 * stride).cast()))
            };
            words_of_4([two(p), two(p.add(stride)), two(p.add(2 * stride)), two(p.add(3 * stride))])
        };
        // The halves of a are the cells 0..4 and 4..8, those of b 8..12 and 12..16.
        let (a, b) = (four(p), four(p.add(8 * stride)));
        let mut out = [_mm512_setzero_si512(); 8];
        for k in 0..4 {
            out[k] = _mm512_shuffle_i32x4::<0x88>(a[k], b[k]);
            out[4 + k] = _mm512_shuffle_i32x4::<0xdd>(a[k], b[k]);
        }
        out
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: the caller's promise is a CPU with AVX-512, and that pointers hold what is read"
)]
impl Words for __m512i {
    #[inline(always)]
    unsafe fn words(p: *const u8, stride: usize) -> [Self; 4] {
        unsafe { words_of_4(sixteens(p, opaque(stride))) }
    }
    #[inline(always)]
    unsafe fn eight_words(p: *const u8, stride: usize) -> [Self; 8] {
        unsafe { codes(p, opaque(stride)) }
    }
}

/// Result j has word j of sixteen rows of 64 bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn words_of_16(v: [__m512i; 16]) -> [__m512i; 16] {
    let quarter = |i: usize| words_of_4([v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]]);
    let (a, b, c, d) = (quarter(0), quarter(1), quarter(2), quarter(3));
    let mut out = [_mm512_setzero_si512(); 16];
    for k in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x44>(a[k], b[k]);
        let high = _mm512_shuffle_i32x4::<0xee>(a[k], b[k]);
        let low_2 = _mm512_shuffle_i32x4::<0x44>(c[k], d[k]);
        let high_2 = _mm512_shuffle_i32x4::<0xee>(c[k], d[k]);
        out[k] = _mm512_shuffle_i32x4::<0x88>(low, low_2);
        out[4 + k] = _mm512_shuffle_i32x4::<0xdd>(low, low_2);
        out[8 + k] = _mm512_shuffle_i32x4::<0x88>(high, high_2);
        out[12 + k] = _mm512_shuffle_i32x4::<0xdd>(high, high_2);
    }
    out
}

/// In each 128-bit part, result k has word k of the four.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn words_of_4(v: [__m512i; 4]) -> [__m512i; 4] {
    let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    let (c, d) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    [_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)]
}

/// See [`crate::isa::Kernels::dot_levels`].
#[inline(always)]
pub(super) unsafe fn dot_levels<P: ScoreProducts>(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    by_rows!(q.count, [1 2 3 4 5 6], |first, COUNT| {
        // Enough sums under way to hide the latency of the products, not more than there are registers.
        const BUNDLES: usize = if COUNT <= 3 { 4 } else { 2 };
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match k.scale_group {
                32 => dot_rows::<P, COUNT, BUNDLES, 32>(k, n, q, first, out),
                _ => dot_rows::<P, COUNT, BUNDLES, 16>(k, n, q, first, out),
            }
        }
    });
}

/// H rows against B bundles at a time.
#[inline(always)]
unsafe fn dot_rows<P: ScoreProducts, const H: usize, const B: usize, const GROUP: usize>(
    k: LevelBlock,
    n: usize,
    q: Queries,
    first: usize,
    out: *mut f32,
) {
    let (width, groups) = (k.width, k.width / GROUP);
    let mut room = MaybeUninit::<[[i32; MAX_WIDTH / 2]; H]>::uninit();
    let mut rows = [std::ptr::null(); H];
    for (h, row) in rows.iter_mut().enumerate() {
        // SAFETY: a row of q, and room for the widest.
        unsafe {
            let room = room.as_mut_ptr().cast::<i32>().add(h * MAX_WIDTH / 2);
            *row = P::query_words(q.bytes.add((first + h) * width), width, room);
        }
    }
    for c in (0..n).step_by(B * BUNDLE) {
        // SAFETY: B bundles of the block, which has room for CELLS whatever n is; H rows of q and out.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); B]; H];
            for g in 0..groups {
                let mut dots = [[_mm512_setzero_si512(); B]; H];
                for (h, dots) in dots.iter_mut().enumerate() {
                    *dots = [_mm512_set1_epi32(*q.sums.add((first + h) * groups + g) * -i32::from(BIAS)); B];
                }
                let levels = k.levels.add(c * width + 16 * g * GROUP);
                for j in 0..GROUP / 4 {
                    let mut x = [P::levels(levels.add(64 * j)); B];
                    for (b, x) in x.iter_mut().enumerate() {
                        *x = P::levels(levels.add(b * BUNDLE * width + 64 * j));
                    }
                    for (&row, dots) in rows.iter().zip(&mut dots) {
                        let quad = P::quad(row, width, g * GROUP / 4 + j);
                        for b in 0..B {
                            dots[b] = P::add_quads(dots[b], x[b], quad);
                        }
                    }
                }
                let mut scales = [_mm512_setzero_ps(); B];
                for (b, scales) in scales.iter_mut().enumerate() {
                    *scales = _mm512_loadu_ps(k.scale_at(c + b * BUNDLE, g));
                }
                for h in 0..H {
                    let of_query = _mm512_set1_ps(*q.scales.add((first + h) * groups + g));
                    for b in 0..B {
                        let dot = _mm512_cvtepi32_ps(dots[h][b]);
                        sums[h][b] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scales[b], of_query), sums[h][b]);
                    }
                }
            }
            for (h, sums) in sums.iter().enumerate() {
                for (b, &sum) in sums.iter().enumerate() {
                    _mm512_storeu_ps(out.add((first + h) * CELLS + c + b * BUNDLE), sum);
                }
            }
        }
    }
}
