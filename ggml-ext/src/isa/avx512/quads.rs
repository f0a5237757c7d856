//! Weighted sums: four cells at a time, values side by side in the lanes of a register.
//!
//! ```text
//! levels  per quad of 4 cells: width / 16 pieces of 64 bytes; lane i of piece j = value 16j + i of the four cells
//! ```
//!
//! A weight times a scale becomes a 16-bit number, and four of them two words ([`Products::weight_words`]): two products take
//! four cells of sixteen values, and levels are never converted to floats. What a row loses is 1/65024 of the largest product
//! of a cell's weight and scale in the block, far below what 8-bit queries leave.

use super::products::WeightProducts;
use super::unpack::{nibble_levels, nibble_table};
use super::BIAS;
use crate::codec::levels::Packing;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::generic::{code_bytes, opaque, unpack_turned, with_chunks, PackedRows};
use crate::isa::{by_rows, LevelBlock, BUNDLE, CELLS};
use std::arch::asm;
use std::arch::x86_64::*;

/// The largest 16-bit weight: its high byte must not pass 127.
const LARGEST: f32 = 32512.0;

/// Fills the levels of a block; cells beyond n have weight 0 and may hold anything.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => unpack_nibbles(rows, f, out),
            packing => with_chunks!(__m512i, packing, BIAS, |chunks| {
                unpack_turned::<_, 4>(chunks, rows, out, |x| values_of_4(x))
            }),
        }
    }
}

/// Codes change places while they are still packed: half the shuffles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn unpack_nibbles(rows: PackedRows, f: Srft, out: LevelBlock) {
    let table = nibble_table();
    // Word k of each cell to part k, then byte i of each word to word i.
    let words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for first in (0..rows.stored.n).step_by(4) {
        let stride = opaque(rows.stored.stride);
        rows.prefetch_next::<__m512i, 4>(first);
        for chunk in 0..f.size() / 64 {
            // SAFETY: four rows, and a quad of the block.
            unsafe {
                let from = rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64));
                let out = out.levels.add(first * out.width + chunk * 256);
                for half in 0..2 {
                    let part = |i: usize| _mm_loadu_si128(from.add(i * stride + 16 * half).cast());
                    let x = _mm512_castsi128_si512(part(0));
                    let x = _mm512_inserti32x4::<1>(x, part(1));
                    let x = _mm512_inserti32x4::<2>(x, part(2));
                    let x = _mm512_inserti32x4::<3>(x, part(3));
                    let codes = _mm512_shuffle_epi8(permute_words(words, x), bytes);
                    let (low, high) = nibble_levels(codes, table);
                    _mm512_storeu_si512(out.add(64 * half).cast(), low);
                    _mm512_storeu_si512(out.add(64 * half + 128).cast(), high);
                }
            }
        }
    }
}

/// `vpermd` itself: the compiler would merge it with the shuffle that follows and then need seven instructions for what
/// without VBMI no single one can do.
#[inline]
#[target_feature(enable = "avx512f")]
fn permute_words(order: __m512i, x: __m512i) -> __m512i {
    let out: __m512i;
    // SAFETY: registers only.
    unsafe {
        asm!("vpermd {out}, {order}, {x}", out = lateout(zmm_reg) out, order = in(zmm_reg) order, x = in(zmm_reg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    out
}

/// Result j has values 16j..16j+16 of four rows of 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn values_of_4(v: [__m512i; 4]) -> [__m512i; 4] {
    // Once word 4k + i is word k of part i, the rest stays within parts.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let v = v.map(|v| permute_words(order, v));
    let (a, b) = (_mm512_unpacklo_epi8(v[0], v[1]), _mm512_unpackhi_epi8(v[0], v[1]));
    let (c, d) = (_mm512_unpacklo_epi8(v[2], v[3]), _mm512_unpackhi_epi8(v[2], v[3]));
    [_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)]
}

/// Bundles of a block: sums are taken over all of them, since weights and scales are zero where there is no cell.
const BUNDLES: usize = CELLS / BUNDLE;

/// See [`crate::isa::Kernels::weigh_levels`].
#[inline(always)]
pub(super) unsafe fn weigh_levels<P: WeightProducts>(v: LevelBlock, weights: *const f32, rows: usize, acc: *mut f32) {
    // SAFETY: scales of all bundles.
    let tops = unsafe { largest_scales(v) };
    by_rows!(rows, [1 2 3 4 5 6], |first, COUNT| {
        // SAFETY: COUNT rows of weights and sums.
        unsafe {
            let (weights, acc) = (weights.add(first * CELLS), acc.add(first * v.width));
            match v.scale_group {
                32 => weigh_rows::<P, COUNT, 2>(v, &tops, weights, acc),
                _ => weigh_rows::<P, COUNT, 1>(v, &tops, weights, acc),
            }
        }
    });
}

/// The largest scale of each cell: a sink has much weight and small values, and must not set the unit of the others.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn largest_scales(v: LevelBlock) -> [__m512; BUNDLES] {
    let mut tops = [_mm512_setzero_ps(); BUNDLES];
    for (b, top) in tops.iter_mut().enumerate() {
        for g in 0..v.scale_groups() {
            // SAFETY: scales of a bundle.
            let scales = unsafe { _mm512_loadu_ps(v.scale_at(b * BUNDLE, g)) };
            *top = _mm512_max_ps(*top, _mm512_abs_ps(scales));
        }
    }
    tops
}

/// H rows of weights; a group is PIECES registers of values.
#[inline(always)]
unsafe fn weigh_rows<P: WeightProducts, const H: usize, const PIECES: usize>(
    v: LevelBlock,
    tops: &[__m512; BUNDLES],
    weights: *const f32,
    acc: *mut f32,
) {
    let width = v.width;
    // SAFETY: H rows of CELLS weights and of `width` sums; a whole block.
    unsafe {
        let mut scaled = [[_mm512_setzero_ps(); BUNDLES]; H];
        let mut unit = [0.0f32; H];
        for h in 0..H {
            let mut most = _mm512_setzero_ps();
            for b in 0..BUNDLES {
                scaled[h][b] = _mm512_loadu_ps(weights.add(h * CELLS + b * BUNDLE));
                most = _mm512_max_ps(most, _mm512_mul_ps(scaled[h][b], tops[b]));
            }
            // Below this nothing is left in f32 either.
            let largest = _mm512_reduce_max_ps(most).max(1e-30);
            unit[h] = largest * (1.0 / LARGEST);
            let factor = _mm512_set1_ps(LARGEST / largest);
            for w in &mut scaled[h] {
                *w = _mm512_mul_ps(*w, factor);
            }
        }
        for g in 0..v.scale_groups() {
            let mut scales = [_mm512_setzero_ps(); BUNDLES];
            for (b, scales) in scales.iter_mut().enumerate() {
                *scales = _mm512_loadu_ps(v.scale_at(b * BUNDLE, g));
            }
            let mut split =
                [SplitWeights { first: [0; CELLS / 4], second: [0; CELLS / 4], bias: _mm512_setzero_si512() }; H];
            for h in 0..H {
                split_weights::<P>(&scaled[h], &scales, &mut split[h]);
            }
            let mut sums = [[P::no_sums(); PIECES]; H];
            for b in 0..BUNDLES {
                for quad in 0..4 {
                    let levels = v.levels.add((b * BUNDLE + 4 * quad) * width + 64 * g * PIECES);
                    let mut x = [P::levels(levels); PIECES];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = P::levels(levels.add(64 * i));
                    }
                    for h in 0..H {
                        // Quads lie in the order that packing leaves them in.
                        let at = 4 * quad + b;
                        let words = [_mm512_set1_epi32(split[h].first[at]), _mm512_set1_epi32(split[h].second[at])];
                        for i in 0..PIECES {
                            sums[h][i] = P::add_weighted(sums[h][i], x[i], words);
                        }
                    }
                }
            }
            for h in 0..H {
                for i in 0..PIECES {
                    let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(P::total(sums[h][i]), split[h].bias));
                    let to = acc.add(h * width + 16 * (g * PIECES + i));
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, _mm512_set1_ps(unit[h]), _mm512_loadu_ps(to)));
                }
            }
        }
    }
}

/// 16-bit weights of a block: words 4 * quad + bundle have the four cells of that quad.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct SplitWeights {
    first: [i32; CELLS / 4],
    second: [i32; CELLS / 4],
    /// What the bias of the levels adds to a sum, in every lane.
    bias: __m512i,
}

#[inline(always)]
unsafe fn split_weights<P: WeightProducts>(
    weights: &[__m512; BUNDLES],
    scales: &[__m512; BUNDLES],
    split: &mut SplitWeights,
) {
    // SAFETY: AVX-512 BW is the caller's promise; 64 bytes are stored each.
    unsafe {
        let mut products = [_mm512_setzero_si512(); BUNDLES];
        for b in 0..BUNDLES {
            products[b] = _mm512_cvtps_epi32(_mm512_mul_ps(weights[b], scales[b]));
        }
        let [a, b, c, d] = products;
        let pairs = [_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)];
        let one = _mm512_set1_epi16(1);
        let mut total = _mm512_add_epi32(_mm512_madd_epi16(pairs[0], one), _mm512_madd_epi16(pairs[1], one));
        total = _mm512_add_epi32(total, _mm512_shuffle_i32x4::<0x4e>(total, total));
        total = _mm512_add_epi32(total, _mm512_shuffle_i32x4::<0xb1>(total, total));
        total = _mm512_add_epi32(total, _mm512_shuffle_epi32::<0x4e>(total));
        total = _mm512_add_epi32(total, _mm512_shuffle_epi32::<0xb1>(total));
        split.bias = _mm512_slli_epi32::<7>(total);
        let [first, second] = P::weight_words(pairs);
        _mm512_store_si512(split.first.as_mut_ptr().cast(), first);
        _mm512_store_si512(split.second.as_mut_ptr().cast(), second);
    }
}

const _: () = assert!(BIAS == 1 << 7);
