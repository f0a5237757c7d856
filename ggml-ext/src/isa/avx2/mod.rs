//! AVX2 with FMA and F16C, and the same with AVX-VNNI, for CPUs without AVX-512.
//!
//! The two tables differ in how they multiply ([`products`]); loops and layouts are shared:
//!
//! - scores ([`columns`]): a lane is a cell, so a register holds four values of eight cells, queries come as broadcast
//!   words of four values, and sums need no shuffles at the end;
//! - weighted sums ([`pairs`]): a lane is a value, so a register holds eight values of two cells as 16-bit numbers, and
//!   weights come as broadcast words of two cells.
//!
//! The shuffles that bring rows into these two forms are done once per cell, on packed codes where that is possible.

mod columns;
mod matrix;
mod pairs;
mod polar;
mod products;
mod unpack;

use super::{compile_portable_kernels, scalar};
use super::{Kernels, LevelBlock, Matrix, Queries, Sight, CELLS};
use crate::codec::delta::{Chain, Delta, RowKind};
use crate::codec::polar::Polar;
use crate::codec::{Format, RowFormat};
use crate::lanes::{Simd, LANES};
use crate::rotation::Rotation;
use products::{Madd, Pairs, Vnni};
use std::arch::asm;
use std::arch::x86_64::*;

const AVX2: Kernels = Kernels {
    name: "avx2",
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

/// The table, where the CPU has the instructions.
pub fn kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = AVX2;
    let there = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    there.then_some(&KERNELS)
}

/// The table with VNNI, where the CPU has the instructions.
pub fn vnni_kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels =
        Kernels { name: "avxvnni", pairs: false, dot_levels: vnni_dot_levels, weigh_levels: vnni_weigh_levels, ..AVX2 };
    kernels().filter(|_| is_x86_feature_detected!("avxvnni")).map(|_| &KERNELS)
}

compile_portable_kernels!("avx2,fma,f16c", F32x16);

#[target_feature(enable = "avx2,fma")]
unsafe fn dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match q.pairs {
            true => columns::dot_levels::<Pairs>(k, n, q, out),
            false => columns::dot_levels::<Madd>(k, n, q, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,avxvnni")]
unsafe fn vnni_dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { columns::dot_levels::<Vnni>(k, n, q, out) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn weigh_levels(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { pairs::weigh_levels::<Madd>(v, n, weights, rows, acc) }
}

#[target_feature(enable = "avx2,fma,avxvnni")]
unsafe fn vnni_weigh_levels(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { pairs::weigh_levels::<Vnni>(v, n, weights, rows, acc) }
}

/// The same, but for the compiler, which knows nothing of it: sums are complete before what follows, and not mixed with others until there
/// are no registers left; constants are not made again wherever there are none.
#[inline]
#[target_feature(enable = "avx2")]
fn settled(mut x: __m256i) -> __m256i {
    // SAFETY: nothing happens.
    unsafe { asm!("/* {0} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// table(i), for i below 8 and places -i: `vpermps` looks at three bits.
#[inline(always)]
fn backwards(table: impl Fn(usize) -> f32) -> [f32; 8] {
    std::array::from_fn(|place| table((8 - place) % 8))
}

/// See [`Simd::between`]. By halving: the first comparison is with the middle limit, the next with one of two, and so on; those that
/// are greater make the place in the next table, negative because a comparison that holds is -1.
///
/// # Safety
/// A CPU with AVX2.
#[inline(always)]
unsafe fn between<const N: usize>(x: __m256, limits: &[f32; N], values: &[f32; N]) -> __m256 {
    let entry = |table: &dyn Fn(usize) -> f32, at: __m256i| {
        let eight = backwards(table);
        // SAFETY: eight are read.
        unsafe { _mm256_permutevar8x32_ps(_mm256_loadu_ps(eight.as_ptr()), at) }
    };
    // SAFETY: the caller's promise.
    unsafe {
        let greater = |limit: __m256| _mm256_cmp_ps::<_CMP_GT_OQ>(x, limit);
        let high = greater(_mm256_set1_ps(limits[N / 2]));
        let mut at = _mm256_castps_si256(high);
        for k in 1..N.ilog2() {
            let limit = |i: usize| limits[((N >> (k + 1)) + i * (N >> k)) % N];
            let above = greater(entry(&limit, at));
            at = _mm256_add_epi32(_mm256_add_epi32(at, at), _mm256_castps_si256(above));
        }
        match N {
            16 => _mm256_blendv_ps(entry(&|i| values[i % N], at), entry(&|i| values[(8 + i) % N], at), high),
            _ => entry(&|i| values[i % N], at),
        }
    }
}

/// The sums of four lanes each, lane i with i+2 and then i+1.
///
/// # Safety
/// A CPU with SSE.
#[inline(always)]
pub(super) unsafe fn sums_of_quarters([a, b, c, d]: [__m128; 4]) -> [f32; 4] {
    // SAFETY: the caller's promise; four are written.
    unsafe {
        let ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        let mut sums = [0.0; 4];
        let all = _mm_add_ps(_mm_shuffle_ps::<0x88>(ab, cd), _mm_shuffle_ps::<0xdd>(ab, cd));
        _mm_storeu_ps(sums.as_mut_ptr(), all);
        sums
    }
}

/// Sixteen lanes in two registers.
#[derive(Clone, Copy)]
pub(super) struct F32x16(__m256, __m256);

#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "for all: values of this type exist only inside functions that enable AVX2 and FMA"
)]
impl Simd for F32x16 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        unsafe { F32x16(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn constant(x: f32) -> Self {
        unsafe {
            let x = _mm256_castsi256_ps(settled(_mm256_castps_si256(_mm256_set1_ps(x))));
            F32x16(x, x)
        }
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        let x = &x[..LANES];
        unsafe { F32x16(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())) }
    }
    #[inline(always)]
    unsafe fn load_halves(x: *const u8) -> Self {
        unsafe {
            F32x16(_mm256_cvtph_ps(_mm_loadu_si128(x.cast())), _mm256_cvtph_ps(_mm_loadu_si128(x.add(16).cast())))
        }
    }
    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        let x = &mut x[..LANES];
        unsafe {
            _mm256_storeu_ps(x.as_mut_ptr(), self.0);
            _mm256_storeu_ps(x[8..].as_mut_ptr(), self.1);
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: &mut [u8]) {
        unsafe {
            let low_byte = |x: __m256| _mm256_and_si256(_mm256_cvttps_epi32(x), _mm256_set1_epi32(255));
            // Packing works on 128-bit parts: 0-3 8-11 | 4-7 12-15.
            let words = _mm256_packus_epi32(low_byte(self.0), low_byte(self.1));
            let words = _mm256_permute4x64_epi64::<0xd8>(words);
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(x[..LANES].as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn times(self, b: Self) -> Self {
        unsafe { F32x16(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn over(self, b: Self) -> Self {
        unsafe { F32x16(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn plus(self, b: Self) -> Self {
        unsafe { F32x16(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn minus(self, b: Self) -> Self {
        unsafe { F32x16(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn power_of_lowest_bits(self) -> Self {
        unsafe {
            let up = |x: __m256| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x)));
            F32x16(up(self.0), up(self.1))
        }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        unsafe { F32x16(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        unsafe { F32x16(_mm256_max_ps(self.0, b.0), _mm256_max_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        unsafe { F32x16(_mm256_min_ps(self.0, b.0), _mm256_min_ps(self.1, b.1)) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            F32x16(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
        }
    }
    #[inline(always)]
    fn above(self, limit: Self, yes: Self, no: Self) -> Self {
        unsafe {
            F32x16(
                _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, limit.0)),
                _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_GT_OQ>(self.1, limit.1)),
            )
        }
    }
    #[inline(always)]
    fn between<const N: usize>(self, limits: &[f32; N], values: &[f32; N]) -> Self {
        unsafe { F32x16(between(self.0, limits, values), between(self.1, limits, values)) }
    }
    #[inline(always)]
    fn fma_where(self, mask: u16, b: Self, c: Self) -> Self {
        unsafe {
            let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let lanes = |mask: u16| {
                let set = _mm256_and_si256(_mm256_set1_epi32(i32::from(mask)), bits);
                _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bits))
            };
            F32x16(
                _mm256_blendv_ps(c.0, _mm256_fmadd_ps(self.0, b.0, c.0), lanes(mask)),
                _mm256_blendv_ps(c.1, _mm256_fmadd_ps(self.1, b.1, c.1), lanes(mask >> 8)),
            )
        }
    }
    #[inline(always)]
    fn shifted<const N: usize>(self) -> Self {
        unsafe {
            if N == 8 {
                return F32x16(_mm256_setzero_ps(), self.0);
            }
            // By whole halves of registers, then within what each half has before it.
            let low = _mm256_permute2f128_ps::<0x08>(self.0, self.0);
            let high = _mm256_permute2f128_ps::<0x21>(self.0, self.1);
            if N == 4 {
                return F32x16(low, high);
            }
            let join = |x: __m256, before: __m256| {
                let (x, before) = (_mm256_castps_si256(x), _mm256_castps_si256(before));
                _mm256_castsi256_ps(match N {
                    1 => _mm256_alignr_epi8::<12>(x, before),
                    _ => _mm256_alignr_epi8::<8>(x, before),
                })
            };
            F32x16(join(self.0, low), join(self.1, high))
        }
    }
    #[inline(always)]
    fn last_four(self) -> Self {
        unsafe {
            let four = _mm256_permute2f128_ps::<0x11>(self.1, self.1);
            F32x16(four, four)
        }
    }
    #[inline(always)]
    fn bits<const BIT: u32>(words: &[u32]) -> u16 {
        let words = &words[..LANES];
        let half = |at: usize| unsafe {
            let x = _mm256_loadu_si256(words[at..].as_ptr().cast());
            let top = _mm256_sll_epi32(x, _mm_cvtsi32_si128(31 - BIT as i32));
            _mm256_movemask_ps(_mm256_castsi256_ps(top)) as u16
        };
        half(0) | half(8) << 8
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let a = _mm256_add_ps(self.0, self.1);
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
                let a = _mm256_add_ps(x.0, x.1);
                _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a))
            };
            sums_of_quarters([quarter(four[0]), quarter(four[1]), quarter(four[2]), quarter(four[3])])
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe {
            let a = _mm256_max_ps(self.0, self.1);
            let b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_max_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)))
        }
    }
    #[inline(always)]
    fn smallest(self) -> f32 {
        unsafe {
            let a = _mm256_min_ps(self.0, self.1);
            let b = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_min_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_min_ss(c, _mm_movehdup_ps(c)))
        }
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
