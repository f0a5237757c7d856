//! AVX-512 with BW, DQ and VL, and the same with VNNI. No instruction of VBMI is used.
//!
//! The two tables differ in how they multiply ([`products`]); loops and layouts are shared. Levels are unsigned bytes (128
//! added, which one subtraction per group undoes), and a product takes four of them in each lane:
//!
//! - scores ([`columns`]): a lane is a cell, so a register holds four values of sixteen cells, queries come as broadcast
//!   words of four values, and sums need no shuffles at the end;
//! - weighted sums ([`quads`]): a lane is a value, so a register holds sixteen values of four cells, and weights come as
//!   broadcast words of four cells.
//!
//! The shuffles that bring rows into these two forms are done once per cell, on packed codes where that is possible.

mod columns;
mod matrix;
mod polar;
mod products;
mod quads;
mod unpack;

use super::avx2::sums_of_quarters;
use super::{compile_portable_kernels, scalar};
use super::{Kernels, LevelBlock, Matrix, Queries, Sight, CELLS};
use crate::codec::delta::{Chain, Delta, RowKind};
use crate::codec::polar::Polar;
use crate::codec::{Format, RowFormat};
use crate::lanes::{Simd, LANES};
use crate::rotation::Rotation;
use products::{Madd, Pairs, Vnni};
use std::arch::x86_64::*;

const AVX512BW: Kernels = Kernels {
    name: "avx512bw",
    encode,
    decode,
    encode_key,
    follow,
    frame_and_chain,
    chain_scores,
    rotate,
    rotate_back,
    unpack: unpack::unpack,
    widen: matrix::widen,
    quantize_query,
    pairs: true,
    dot_levels,
    dot_floats,
    dot_halves,
    weigh_levels,
    expand: matrix::expand,
    gemm64: matrix::gemm64,
    transpose: matrix::transpose,
    softcap,
    sight,
    mask_scores,
    exponentials,
    scale,
    polar_tables,
    polar_scores: polar::scores,
};

/// The table without VNNI, where the CPU has the instructions.
pub fn bw_kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = AVX512BW;
    let there = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    there.then_some(&KERNELS)
}

/// The table with VNNI, where the CPU has the instructions.
pub fn kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = Kernels {
        name: "avx512",
        pairs: false,
        dot_levels: vnni_dot_levels,
        weigh_levels: vnni_weigh_levels,
        ..AVX512BW
    };
    bw_kernels().filter(|_| is_x86_feature_detected!("avx512vnni")).map(|_| &KERNELS)
}

compile_portable_kernels!("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c", F32x16);

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match q.pairs {
            true => columns::dot_levels::<Pairs>(k, n, q, out),
            false => columns::dot_levels::<Madd>(k, n, q, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn vnni_dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { columns::dot_levels::<Vnni>(k, n, q, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn weigh_levels(v: LevelBlock, _n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { quads::weigh_levels::<Madd>(v, weights, rows, acc) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn vnni_weigh_levels(v: LevelBlock, _n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { quads::weigh_levels::<Vnni>(v, weights, rows, acc) }
}

/// Sixteen lanes in one register.
#[derive(Clone, Copy)]
pub(super) struct F32x16(__m512);

/// Entries of a table of up to 16.
#[inline]
#[target_feature(enable = "avx512f")]
fn entry<const N: usize>(table: &[f32; N], at: __m512i) -> __m512 {
    const { assert!(N <= 16) };
    // SAFETY: N are read.
    unsafe { _mm512_permutexvar_ps(at, _mm512_maskz_loadu_ps(0xffff >> (16 - N), table.as_ptr())) }
}

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: values of this type exist only inside functions that enable AVX-512"
)]
impl Simd for F32x16 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        F32x16(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        F32x16(unsafe { _mm512_loadu_ps(x[..LANES].as_ptr()) })
    }
    #[inline(always)]
    unsafe fn load_halves(x: *const u8) -> Self {
        F32x16(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.cast())) })
    }
    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        unsafe { _mm512_storeu_ps(x[..LANES].as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn store_bytes(self, x: &mut [u8]) {
        unsafe { _mm_storeu_si128(x[..LANES].as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(self.0))) }
    }
    #[inline(always)]
    fn times(self, b: Self) -> Self {
        F32x16(unsafe { _mm512_mul_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn over(self, b: Self) -> Self {
        F32x16(unsafe { _mm512_div_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        F32x16(unsafe { _mm512_add_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        F32x16(unsafe { _mm512_sub_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn power_of_lowest_bits(self) -> Self {
        F32x16(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0))) })
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        F32x16(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        F32x16(unsafe { _mm512_max_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        F32x16(unsafe { _mm512_min_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        F32x16(unsafe { _mm512_abs_ps(self.0) })
    }
    #[inline(always)]
    fn above(self, limit: Self, yes: Self, no: Self) -> Self {
        F32x16(unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, limit.0), no.0, yes.0) })
    }
    #[inline(always)]
    fn between<const N: usize>(self, limits: &[f32; N], values: &[f32; N]) -> Self {
        unsafe {
            let (mut at, mut step) = (_mm512_setzero_si512(), N as i32 / 2);
            // Halving: a quarter of the comparisons.
            while step > 0 {
                let further = _mm512_add_epi32(at, _mm512_set1_epi32(step));
                let above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, entry(limits, further));
                at = _mm512_mask_mov_epi32(at, above, further);
                step /= 2;
            }
            F32x16(entry(values, at))
        }
    }
    #[inline(always)]
    fn fma_where(self, mask: u16, b: Self, c: Self) -> Self {
        F32x16(unsafe { _mm512_mask3_fmadd_ps(self.0, b.0, c.0, mask) })
    }
    #[inline(always)]
    fn shifted<const N: usize>(self) -> Self {
        unsafe {
            let (x, zero) = (_mm512_castps_si512(self.0), _mm512_setzero_si512());
            F32x16(_mm512_castsi512_ps(match N {
                1 => _mm512_alignr_epi32::<15>(x, zero),
                2 => _mm512_alignr_epi32::<14>(x, zero),
                4 => _mm512_alignr_epi32::<12>(x, zero),
                _ => _mm512_alignr_epi32::<8>(x, zero),
            }))
        }
    }
    #[inline(always)]
    fn last_four(self) -> Self {
        unsafe { F32x16(_mm512_shuffle_f32x4::<0xff>(self.0, self.0)) }
    }
    #[inline(always)]
    fn bits<const BIT: u32>(words: &[u32]) -> u16 {
        unsafe {
            let words = _mm512_loadu_si512(words[..LANES].as_ptr().cast());
            _mm512_test_epi32_mask(words, _mm512_set1_epi32(1 << BIT))
        }
    }
    #[inline(always)]
    unsafe fn words(data: *const u8, stride: usize, words: &mut [u32]) {
        unsafe {
            let row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let offsets = _mm512_mullo_epi32(row, _mm512_set1_epi32(stride as i32));
            let gathered = _mm512_i32gather_epi32::<1>(offsets, data.cast());
            _mm512_storeu_si512(words[..LANES].as_mut_ptr().cast(), gathered);
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)))
        }
    }
    #[inline(always)]
    fn sums(four: [Self; 4]) -> [f32; 4] {
        unsafe {
            // No map of the array: it is not inlined everywhere, and then nothing in it is.
            let quarter = |x: Self| {
                let a = _mm256_add_ps(_mm512_castps512_ps256(x.0), _mm512_extractf32x8_ps::<1>(x.0));
                _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a))
            };
            sums_of_quarters([quarter(four[0]), quarter(four[1]), quarter(four[2]), quarter(four[3])])
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    fn smallest(self) -> f32 {
        unsafe { _mm512_reduce_min_ps(self.0) }
    }
    #[inline(always)]
    fn rotate(r: &Rotation, x: &[f32], y: &mut [f32]) {
        unsafe { rotate(r, x, y) }
    }
    #[inline(always)]
    fn rotate_back(r: &Rotation, y: &[f32], x: &mut [f32]) {
        unsafe { rotate_back(r, y, x) }
    }
}

/// What turns signed levels into unsigned ones.
const BIAS: u8 = 0x80;
