//! Scores: eight cells side by side in the lanes of a register.
//!
//! ```text
//! levels  per 8 cells: width / 4 columns of 32 bytes; lane c of column j = values 4j..4j+4 of cell c
//! ```

use super::products::{ScoreProducts, BIAS};
use super::unpack::{nibble_levels, nibble_table};
use crate::codec::levels::Packing;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::generic::{code_bytes, unpack_bands, unpack_turned, with_chunks, PackedRows, Words};
use crate::isa::{by_rows, LevelBlock, Queries, CELLS};
use std::arch::asm;
use std::arch::x86_64::*;

/// Cells of a register.
const LANES: usize = 8;

/// Fills the levels of a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => unpack_nibbles(rows, f, out),
            Packing::Bands(f) => unpack_bands::<__m256i>(rows, f, BIAS, out),
            packing => with_chunks!(__m256i, packing, BIAS, |chunks| {
                unpack_turned::<_, LANES>(chunks, rows, out, |x| words_of_8(x))
            }),
        }
    }
}

/// Codes change places while they are still packed: half the shuffles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_nibbles(rows: PackedRows, f: Srft, out: LevelBlock) {
    let table = nibble_table(BIAS);
    for first in (0..rows.stored.n).step_by(LANES) {
        for chunk in 0..f.size() / 64 {
            // SAFETY: eight rows and as many cells of the block.
            unsafe {
                let from = rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64));
                let to = out.levels.add(first * out.width + chunk * 64 * LANES);
                for half in 0..2 {
                    let mut x = [_mm256_setzero_si256(); 4];
                    for (i, x) in x.iter_mut().enumerate() {
                        let part = |i: usize| _mm_loadu_si128(from.add(i * rows.stored.stride + 16 * half).cast());
                        *x = _mm256_set_m128i(part(i + 4), part(i));
                    }
                    for (j, codes) in words_of_4(x).into_iter().enumerate() {
                        let (low, high) = nibble_levels(codes, table);
                        _mm256_storeu_si256(to.add(32 * (4 * half + j)).cast(), low);
                        _mm256_storeu_si256(to.add(32 * (8 + 4 * half + j)).cast(), high);
                    }
                }
            }
        }
    }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: the caller's promise is a CPU with AVX2, and that pointers hold what is read"
)]
impl Words for __m256i {
    #[inline(always)]
    unsafe fn words(p: *const u8, stride: usize) -> [Self; 4] {
        unsafe {
            let mut x = [_mm256_setzero_si256(); 4];
            for (i, x) in x.iter_mut().enumerate() {
                let part = |i: usize| _mm_loadu_si128(p.add(i * stride).cast());
                *x = _mm256_set_m128i(part(i + 4), part(i));
            }
            words_of_4(x)
        }
    }
}

/// Result j has word j of eight rows of 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn words_of_8(v: [__m256i; 8]) -> [__m256i; 8] {
    let (a, b) = (words_of_4([v[0], v[1], v[2], v[3]]), words_of_4([v[4], v[5], v[6], v[7]]));
    let mut out = [_mm256_setzero_si256(); 8];
    for k in 0..4 {
        out[k] = _mm256_permute2x128_si256::<0x20>(a[k], b[k]);
        out[4 + k] = _mm256_permute2x128_si256::<0x31>(a[k], b[k]);
    }
    out
}

/// In each 128-bit part, result k has word k of the four.
#[inline]
#[target_feature(enable = "avx2")]
fn words_of_4(v: [__m256i; 4]) -> [__m256i; 4] {
    let (a, b) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    let (c, d) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    [_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)]
}

/// The same, as a sum that is complete before what follows: or the compiler would mix columns until it runs out of registers.
#[inline]
#[target_feature(enable = "avx2")]
fn settled(mut x: __m256i) -> __m256i {
    // SAFETY: nothing happens.
    unsafe { asm!("/* {0} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// See [`crate::isa::Kernels::dot_levels`].
#[inline(always)]
pub(super) unsafe fn dot_levels<P: ScoreProducts>(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    by_rows!(q.count, [1 2 3 4], |first, COUNT| {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match k.scale_group {
                32 => dot_rows::<P, COUNT, 32>(k, n, q, first, out),
                _ => dot_rows::<P, COUNT, 16>(k, n, q, first, out),
            }
        }
    });
}

/// H rows against sixteen cells at a time, so that a broadcast word serves twice.
#[inline(always)]
unsafe fn dot_rows<P: ScoreProducts, const H: usize, const GROUP: usize>(
    k: LevelBlock,
    n: usize,
    q: Queries,
    first: usize,
    out: *mut f32,
) {
    let (width, groups) = (k.width, k.width / GROUP);
    for c in (0..n).step_by(2 * LANES) {
        // SAFETY: sixteen cells of the block, which has room for CELLS whatever n is; H rows of q and out.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); 2]; H];
            for g in 0..groups {
                let mut dots = [[_mm256_setzero_si256(); 2]; H];
                for (h, dots) in dots.iter_mut().enumerate() {
                    *dots = [P::start(*q.sums.add((first + h) * groups + g)); 2];
                }
                for j in g * GROUP / 4..(g + 1) * GROUP / 4 {
                    let column = k.levels.add(c * width + 32 * j);
                    let x0 = _mm256_loadu_si256(column.cast());
                    let x1 = _mm256_loadu_si256(column.add(LANES * width).cast());
                    for (h, dots) in dots.iter_mut().enumerate() {
                        let word = q.bytes.add((first + h) * width + 4 * j).cast::<i32>().read_unaligned();
                        let word = _mm256_set1_epi32(word);
                        dots[0] = settled(P::add_quads(dots[0], x0, word));
                        dots[1] = settled(P::add_quads(dots[1], x1, word));
                    }
                }
                for h in 0..H {
                    let of_query = _mm256_set1_ps(*q.scales.add((first + h) * groups + g));
                    for b in 0..2 {
                        let scale = _mm256_mul_ps(_mm256_loadu_ps(k.scale_at(c + b * LANES, g)), of_query);
                        sums[h][b] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[h][b]), scale, sums[h][b]);
                    }
                }
            }
            for (h, sums) in sums.iter().enumerate() {
                for (b, &sum) in sums.iter().enumerate() {
                    _mm256_storeu_ps(out.add((first + h) * CELLS + c + b * LANES), sum);
                }
            }
        }
    }
}
