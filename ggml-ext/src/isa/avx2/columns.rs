//! Scores: eight cells side by side in the lanes of a register.
//!
//! ```text
//! levels  per 8 cells: width / 4 columns of 32 bytes; lane c of column j = values 4j..4j+4 of cell c
//! ```

use super::products::{ScoreProducts, BIAS};
use super::settled;
use super::unpack::{nibble_levels, nibble_table};
use crate::codec::levels::Packing;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::generic::{code_bytes, unpack_bands, unpack_turned, with_chunks, PackedRows, Words};
use crate::isa::{by_rows, LevelBlock, Queries, CELLS};
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

/// H rows against sixteen cells at a time, so that a broadcast word serves twice. Group by group: what a group begins with and is multiplied
/// by are whole registers then, which are loaded where they are used, and sums of groups are where the result will be. There are no
/// registers for either beside the dots.
#[inline(always)]
unsafe fn dot_rows<P: ScoreProducts, const H: usize, const GROUP: usize>(
    k: LevelBlock,
    n: usize,
    q: Queries,
    first: usize,
    out: *mut f32,
) {
    let groups = k.width / GROUP;
    // SAFETY: H rows of q and out; both have room for CELLS cells whatever n is.
    unsafe {
        let out = out.add(first * CELLS);
        for c in (0..n.next_multiple_of(2 * LANES)).step_by(LANES) {
            for h in 0..H {
                _mm256_storeu_ps(out.add(h * CELLS + c), _mm256_setzero_ps());
            }
        }
        for g in 0..groups {
            let of_query = |h: usize| (first + h) * groups + g;
            let mut starts = [_mm256_setzero_si256(); H];
            let mut scales = [_mm256_setzero_ps(); H];
            for h in 0..H {
                starts[h] = P::start(*q.sums.add(of_query(h)));
                scales[h] = _mm256_set1_ps(*q.scales.add(of_query(h)));
            }
            let words = q.bytes.add(first * q.width + g * GROUP);
            for c in (0..n).step_by(2 * LANES) {
                let dots = dot_group::<P, H, GROUP>(k, c, g, starts, words);
                for b in 0..2 {
                    let of_cells = _mm256_loadu_ps(k.scale_at(c + b * LANES, g));
                    for h in 0..H {
                        let sum = out.add(h * CELLS + c + b * LANES);
                        let (dot, scale) = (_mm256_cvtepi32_ps(dots[h][b]), _mm256_mul_ps(of_cells, scales[h]));
                        _mm256_storeu_ps(sum, _mm256_fmadd_ps(dot, scale, _mm256_loadu_ps(sum)));
                    }
                }
            }
        }
    }
}

/// Sixteen cells from c on, the values of group g. `words` are those of the first of H rows.
#[inline(always)]
unsafe fn dot_group<P: ScoreProducts, const H: usize, const GROUP: usize>(
    k: LevelBlock,
    c: usize,
    g: usize,
    starts: [__m256i; H],
    words: *const i8,
) -> [[__m256i; 2]; H] {
    // SAFETY: sixteen cells of the block and the words of H rows.
    unsafe {
        let columns = k.levels.add(c * k.width + LANES * g * GROUP);
        let dots = add_words::<P, H>(starts.map(|start| [start; 2]), columns, words, k.width);
        match GROUP {
            32 => add_words::<P, H>(dots, columns.add(LANES * 16), words.add(16), k.width),
            _ => dots,
        }
    }
}

/// Four words and columns. A function without a loop that the compiler would keep: two of them are a group.
#[inline(always)]
unsafe fn add_words<P: ScoreProducts, const H: usize>(
    mut dots: [[__m256i; 2]; H],
    columns: *const i8,
    words: *const i8,
    width: usize,
) -> [[__m256i; 2]; H] {
    for j in 0..4 {
        // SAFETY: the caller's promise.
        unsafe {
            let column = columns.add(32 * j);
            let (x0, x1) = (_mm256_loadu_si256(column.cast()), _mm256_loadu_si256(column.add(LANES * width).cast()));
            for (h, dots) in dots.iter_mut().enumerate() {
                let word = _mm256_set1_epi32(words.add(h * width + 4 * j).cast::<i32>().read_unaligned());
                dots[0] = settled(P::add_quads(dots[0], x0, word));
                dots[1] = settled(P::add_quads(dots[1], x1, word));
            }
        }
    }
    dots
}
