//! AVX-512 with VNNI.
//!
//! A chunk of 64 values is one register of levels. `vpdpbusd` multiplies unsigned by signed bytes, so levels for dot
//! products are stored with 128 added and each sum starts at -128 times the sum of its four query values, which costs
//! nothing per cell. Scores of sixteen cells are added up together: a tree of shuffles does in 46 instructions
//! what sixteen separate sums would do in 112.

use super::{compile_portable_kernels, scalar};
use super::{Kernels, LevelBlock, LevelRows, Matrix, MatrixMut, Role, CELLS};
use crate::codec::plain::{Plain, BLOCK};
use crate::codec::srft::{Srft, LEVELS_2, LEVELS_3, LEVELS_4, SCALE_UNIT};
use crate::lanes::{Simd, LANES};
use crate::rotation::{Rotation, MAX_HEAD};
use std::arch::x86_64::*;

/// The table, where the CPU has the instructions.
pub fn kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = Kernels {
        name: "avx512",
        encode,
        decode,
        rotate,
        rotate_back,
        unpack,
        widen,
        quantize_query,
        dot_levels,
        dot_floats,
        weigh_levels,
        expand,
        gemm64,
        transpose,
        softcap,
        mask_scores,
        exponentials,
        scale,
    };
    let there = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    there.then_some(&KERNELS)
}

compile_portable_kernels!("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c", F32x16);

/// Sixteen lanes in one register.
#[derive(Clone, Copy)]
struct F32x16(__m512);

// SAFETY of the blocks below: values of this type exist only inside functions that enable AVX-512.
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
    fn times_power_of_two(self, n: Self) -> Self {
        F32x16(unsafe { _mm512_scalef_ps(self.0, n.0) })
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
    fn sum(self) -> f32 {
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)))
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
}

/// What turns signed levels into the unsigned ones of dot products.
const BIAS: u8 = 0x80;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")]
unsafe fn unpack(rows: LevelRows, data: *const u8, stride: usize, n: usize, role: Role, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        if role == Role::Weigh {
            return unpack_pairs(rows, data, stride, n, out);
        }
        let flip = if role == Role::Dot { BIAS } else { 0 };
        unpack_plain(rows, data, stride, n, flip, out);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn unpack_plain(rows: LevelRows, data: *const u8, stride: usize, n: usize, flip: u8, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows {
            LevelRows::Srft(f) => match f.bits() {
                8 => unpack_srft::<8>(f, data, stride, n, flip, out),
                4 => unpack_srft::<4>(f, data, stride, n, flip, out),
                3 => unpack_srft::<3>(f, data, stride, n, flip, out),
                _ => unpack_srft::<2>(f, data, stride, n, flip, out),
            },
            LevelRows::Q8_0(size) => unpack_blocks::<8>(size, data, stride, n, flip, out),
            LevelRows::Q4_0(size) => unpack_blocks::<4>(size, data, stride, n, flip, out),
        }
    }
}

/// The level table of a width in bits in each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn table<const BITS: u32>(flip: u8) -> __m512i {
    let mut t = [0u8; 16];
    for (i, t) in t.iter_mut().enumerate() {
        *t = match BITS {
            4 => LEVELS_4.table[i],
            3 => LEVELS_3.table[i % 8],
            _ => LEVELS_2.table[i % 4],
        } as u8
            ^ flip;
    }
    // SAFETY: sixteen bytes.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(t.as_ptr().cast()) })
}

/// Bytes of the codes of one chunk of C values.
const fn code_bytes(bits: u32, c: usize) -> usize {
    bits as usize * c / 8
}

/// The levels of a whole chunk.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn levels_64<const BITS: u32>(codes: *const u8, table: __m512i, flips: __m512i) -> __m512i {
    // SAFETY: the chunk's bytes.
    unsafe {
        match BITS {
            8 => _mm512_xor_si512(_mm512_loadu_si512(codes.cast()), flips),
            _ => _mm512_shuffle_epi8(table, codes_64::<BITS>(codes)),
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn unpack_srft<const BITS: u32>(f: Srft, data: *const u8, stride: usize, n: usize, flip: u8, out: LevelBlock) {
    let table = table::<BITS>(flip);
    let flips = _mm512_set1_epi8(flip as i8);
    let (wide, chunks, tail) = (f.group() == 32, f.size() / 64, f.size() % 64);
    for c in 0..n {
        // SAFETY: offsets stay inside the row and the padded buffers; eight bytes of scales never reach past the row's
        // end, because at least as many bytes of codes follow the scales.
        unsafe {
            let (row, levels) = (data.add(c * stride), out.levels.add(c * out.width));
            let scales = out.scales.add(c * out.width / 4);
            let body = row.add(f.scale_bytes());
            for chunk in 0..chunks {
                let l = levels_64::<BITS>(body.add(chunk * code_bytes(BITS, 64)), table, flips);
                _mm512_storeu_si512(levels.add(chunk * 64).cast(), l);
                lane_scales(row, chunk, wide, scales.add(chunk * 16));
            }
            if tail != 0 {
                unpack_tail::<BITS>(f, row, levels, scales, table, flip);
            }
        }
    }
}

/// The values behind the last whole chunk, padded to one.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn unpack_tail<const BITS: u32>(
    f: Srft,
    row: *const u8,
    levels: *mut i8,
    scales: *mut f32,
    table: __m512i,
    flip: u8,
) {
    let flips = _mm512_set1_epi8(flip as i8);
    let tail = f.size() % 64;
    let start = f.size() - tail;
    // SAFETY: as in unpack_srft.
    unsafe {
        let mut codes = row.add(f.scale_bytes() + start * BITS as usize / 8);
        let mut l = [flip; 64];
        if tail >= 32 {
            let x = match BITS {
                8 => _mm256_xor_si256(_mm256_loadu_si256(codes.cast()), _mm512_castsi512_si256(flips)),
                _ => _mm256_shuffle_epi8(_mm512_castsi512_si256(table), codes_32::<BITS>(codes)),
            };
            _mm256_storeu_si256(l.as_mut_ptr().cast(), x);
            codes = codes.add(code_bytes(BITS, 32));
        }
        if !tail.is_multiple_of(32) {
            let x = match BITS {
                8 => _mm_xor_si128(_mm_loadu_si128(codes.cast()), _mm512_castsi512_si128(flips)),
                _ => _mm_shuffle_epi8(_mm512_castsi512_si128(table), codes_16::<BITS>(codes)),
            };
            _mm_storeu_si128(l.as_mut_ptr().add(tail & 32).cast(), x);
        }
        _mm512_storeu_si512(levels.add(start).cast(), _mm512_loadu_si512(l.as_ptr().cast()));
        // Fewer than four scales may be left: take them one by one.
        let mut of_lane = [0.0f32; 16];
        for (lane, s) in of_lane[..tail / 4].iter_mut().enumerate() {
            let g = (start + lane * 4) / f.group();
            let stored = _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(row.add(2 * g).cast::<u16>().read_unaligned())));
            let x = _mm_cvtss_f32(stored);
            *s = if x.is_finite() { x / SCALE_UNIT } else { 0.0 };
        }
        _mm512_storeu_ps(scales.add(start / 4), _mm512_loadu_ps(of_lane.as_ptr()));
    }
}

/// Four cells at a time, in the form that [`weigh_levels`] reads:
///
/// ```text
/// levels  per pair of cells, width slices of 16 values: a0 b0 a1 b1 … a15 b15
/// scales  per four cells, width slices of 16 values: the scale of that slice in each of the four
/// ```
///
/// so that 16-bit products of two cells at a time need no shuffle, and weights are multiplied by scales four cells at once.
/// Cells beyond n count as zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn unpack_pairs(rows: LevelRows, data: *const u8, stride: usize, n: usize, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows {
            LevelRows::Srft(f) if f.size().is_multiple_of(64) => match f.bits() {
                8 => pairs_srft::<8>(f, data, stride, n, out),
                4 => pairs_srft::<4>(f, data, stride, n, out),
                3 => pairs_srft::<3>(f, data, stride, n, out),
                _ => pairs_srft::<2>(f, data, stride, n, out),
            },
            _ => pairs_any(rows, data, stride, n, out),
        }
    }
}

/// Stores the levels of one chunk of two cells.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store_pair(a: __m512i, b: __m512i, out: *mut i8) {
    let (low, high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
    // Slice i is in lane i of both.
    let first = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
    let second = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
    // SAFETY: 128 bytes of the block.
    unsafe {
        _mm512_storeu_si512(out.cast(), first);
        _mm512_storeu_si512(out.add(64).cast(), second);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn pairs_srft<const BITS: u32>(f: Srft, data: *const u8, stride: usize, n: usize, out: LevelBlock) {
    let table = table::<BITS>(0);
    let zero = _mm512_setzero_si512();
    let order = _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7);
    for c in (0..n).step_by(4) {
        // SAFETY: rows c.. below n; four cells of the block, whose room is a multiple of four.
        unsafe {
            // Rows beyond n are stood in for by the last one and given no scale.
            let at = |i: usize| data.add((c + i).min(n - 1) * stride);
            let cells = [at(0), at(1), at(2), at(3)];
            let there = _cvtu32_mask16(0x1111 * ((1u32 << (n - c).min(4)) - 1));
            for chunk in 0..f.size() / 64 {
                let codes = f.scale_bytes() + chunk * code_bytes(BITS, 64);
                let mut l = [zero; 4];
                for (l, cell) in l.iter_mut().zip(cells) {
                    *l = levels_64::<BITS>(cell.add(codes), table, zero);
                }
                store_pair(l[0], l[1], out.levels.add(c * out.width + chunk * 128));
                store_pair(l[2], l[3], out.levels.add((c + 2) * out.width + chunk * 128));
                // Two scales a cell: head sizes of whole chunks have groups of 32.
                let two = |cell: *const u8| cell.add(4 * chunk).cast::<i32>().read_unaligned();
                let stored = _mm_setr_epi32(two(cells[0]), two(cells[1]), two(cells[2]), two(cells[3]));
                let x = _mm512_permutexvar_ps(order, _mm512_castps256_ps512(_mm256_cvtph_ps(stored)));
                let good = _kandn_mask16(_mm512_fpclass_ps_mask::<0x99>(x), there);
                let x = _mm512_maskz_mul_ps(good, x, _mm512_set1_ps(1.0 / SCALE_UNIT));
                _mm512_storeu_ps(out.scales.add(c * out.width / 16 + chunk * 16), x);
            }
        }
    }
}

/// The same for every other kind of row, by way of the plain form.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn pairs_any(rows: LevelRows, data: *const u8, stride: usize, n: usize, out: LevelBlock) {
    let (mut levels, mut scales) = ([0i8; 4 * MAX_HEAD], [0.0f32; MAX_HEAD]);
    for c in (0..n).step_by(4) {
        let count = (n - c).min(4);
        levels.fill(0);
        scales.fill(0.0);
        let plain = LevelBlock { levels: levels.as_mut_ptr(), scales: scales.as_mut_ptr(), width: out.width };
        // SAFETY: rows c..c+count; four cells of the block; rows are no wider than MAX_HEAD.
        unsafe {
            unpack_plain(rows, data.add(c * stride), stride, count, 0, plain);
            for chunk in 0..out.width / 64 {
                for pair in 0..2 {
                    let of = |i: usize| {
                        _mm512_loadu_si512(levels.as_ptr().add((2 * pair + i) * out.width + chunk * 64).cast())
                    };
                    store_pair(of(0), of(1), out.levels.add((c + 2 * pair) * out.width + chunk * 128));
                }
                for lane in 0..16 {
                    let (slice, cell) = (chunk * 4 + lane / 4, lane % 4);
                    *out.scales.add(c * out.width / 16 + chunk * 16 + lane) =
                        scales[(cell * out.width + slice * 16) / 4];
                }
            }
        }
    }
}

/// The scales of one whole chunk, one per four values.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn lane_scales(row: *const u8, chunk: usize, wide: bool, out: *mut f32) {
    // SAFETY: see unpack_srft.
    unsafe {
        let (stored, lanes) = if wide {
            let two = row.add(4 * chunk).cast::<i32>().read_unaligned();
            (_mm_cvtsi32_si128(two), _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1))
        } else {
            let four = row.add(8 * chunk).cast::<i64>().read_unaligned();
            (_mm_cvtsi64_si128(four), _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))
        };
        let x = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_cvtph_ps(stored)));
        // NaN and infinities count as zero.
        let bad = _mm512_fpclass_ps_mask::<0x99>(x);
        _mm512_storeu_ps(out, _mm512_maskz_mul_ps(!bad, x, _mm512_set1_ps(1.0 / SCALE_UNIT)));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn codes_64<const BITS: u32>(p: *const u8) -> __m512i {
    // SAFETY: the chunk's 32, 24 or 16 bytes.
    unsafe {
        if BITS == 4 {
            let b = _mm256_loadu_si256(p.cast());
            let nibble = _mm256_set1_epi8(15);
            let low = _mm256_and_si256(b, nibble);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(b), nibble);
            return _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        }
        let b = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
        let shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        let low = _mm512_and_si512(_mm512_srlv_epi32(b, shifts), _mm512_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(16).cast::<u64>().read_unaligned();
        _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(4))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn codes_32<const BITS: u32>(p: *const u8) -> __m256i {
    // SAFETY: the chunk's 16, 12 or 8 bytes.
    unsafe {
        if BITS == 4 {
            let b = _mm_loadu_si128(p.cast());
            let high = _mm_srli_epi16::<4>(b);
            return _mm256_and_si256(_mm256_set_m128i(high, b), _mm256_set1_epi8(15));
        }
        let b = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
        let low = _mm256_and_si256(_mm256_srlv_epi64(b, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(8).cast::<u32>().read_unaligned();
        _mm256_mask_add_epi8(low, high, low, _mm256_set1_epi8(4))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn codes_16<const BITS: u32>(p: *const u8) -> __m128i {
    // SAFETY: the chunk's 8, 6 or 4 bytes.
    unsafe {
        if BITS == 4 {
            let b = p.cast::<i64>().read_unaligned();
            return _mm_and_si128(_mm_set_epi64x(b >> 4, b), _mm_set1_epi8(15));
        }
        let b = _mm_set1_epi32(p.cast::<i32>().read_unaligned());
        let low = _mm_and_si128(_mm_srlv_epi32(b, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(4).cast::<u16>().read_unaligned();
        _mm_mask_add_epi8(low, high, low, _mm_set1_epi8(4))
    }
}

/// q8_0 and q4_0: blocks of 32 with the scale in front.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn unpack_blocks<const BITS: u32>(
    size: usize,
    data: *const u8,
    stride: usize,
    n: usize,
    flip: u8,
    out: LevelBlock,
) {
    for c in 0..n {
        // SAFETY: block b of row c; the buffers are `width` wide.
        unsafe {
            let (row, levels) = (data.add(c * stride), out.levels.add(c * out.width));
            let scales = out.scales.add(c * out.width / 4);
            for b in 0..size / BLOCK {
                let block = row.add(b * (2 + code_bytes(BITS, BLOCK)));
                let l = if BITS == 8 {
                    _mm256_loadu_si256(block.add(2).cast())
                } else {
                    let codes = codes_32::<4>(block.add(2));
                    _mm256_sub_epi8(codes, _mm256_set1_epi8(8))
                };
                let l = _mm256_xor_si256(l, _mm256_set1_epi8(flip as i8));
                _mm256_storeu_si256(levels.add(b * BLOCK).cast(), l);
                let scale = _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(block.cast::<u16>().read_unaligned())));
                let x = _mm256_broadcastss_ps(scale);
                let bad = _mm256_fpclass_ps_mask::<0x99>(x);
                _mm256_storeu_ps(scales.add(b * BLOCK / 4), _mm256_maskz_mov_ps(!bad, x));
            }
            for i in size..out.width {
                *levels.add(i) = flip as i8;
            }
            for i in size / 4..out.width / 4 {
                *scales.add(i) = 0.0;
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn widen(kind: Plain, data: *const u8, stride: usize, n: usize, size: usize, out: *mut f32, width: usize) {
    if !size.is_multiple_of(16) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { scalar::widen(kind, data, stride, n, size, out, width) };
    }
    for c in 0..n {
        // SAFETY: sixteen values at a time of row c.
        unsafe {
            let (row, out) = (data.add(c * stride), out.add(c * width));
            for i in (0..width).step_by(16) {
                let x = if i >= size {
                    _mm512_setzero_ps()
                } else {
                    match kind {
                        Plain::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(row.add(2 * i).cast())),
                        Plain::Bf16 => {
                            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(row.add(2 * i).cast()));
                            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
                        }
                        _ => _mm512_loadu_ps(row.add(4 * i).cast()),
                    }
                };
                _mm512_storeu_ps(out.add(i), x);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn dot_levels(k: LevelBlock, n: usize, q: *const i8, q_scales: &[f32], out: *mut f32) {
    // SAFETY: the caller's promise is passed on. A width that is known makes all offsets constants.
    unsafe {
        match k.width {
            64 => dot_wide::<64>(k, n, q, q_scales, out),
            128 => dot_wide::<128>(k, n, q, q_scales, out),
            192 => dot_wide::<192>(k, n, q, q_scales, out),
            256 => dot_wide::<256>(k, n, q, q_scales, out),
            512 => dot_wide::<512>(k, n, q, q_scales, out),
            576 => dot_wide::<576>(k, n, q, q_scales, out),
            _ => dot_wide::<0>(k, n, q, q_scales, out),
        }
    }
}

/// WIDTH 0 takes the width from the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn dot_wide<const WIDTH: usize>(k: LevelBlock, n: usize, q: *const i8, q_scales: &[f32], out: *mut f32) {
    let width = if WIDTH == 0 { k.width } else { WIDTH };
    for c in (0..n).step_by(16) {
        for (r, &q_scale) in q_scales.iter().enumerate() {
            // SAFETY: sixteen cells of the block, which has room for CELLS whatever n is.
            unsafe {
                let (levels, scales) = (k.levels.add(c * width), k.scales.add(c * width / 4));
                let mut sums = [_mm512_setzero_ps(); 16];
                for chunk in 0..width / 64 {
                    let q = _mm512_loadu_si512(q.add(r * width + chunk * 64).cast());
                    let bias = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(BIAS as i8), q);
                    let start = _mm512_sub_epi32(_mm512_setzero_si512(), bias);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let l = _mm512_loadu_si512(levels.add(i * width + chunk * 64).cast());
                        let dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, l, q));
                        *sum = _mm512_fmadd_ps(dot, _mm512_loadu_ps(scales.add(i * width / 4 + chunk * 16)), *sum);
                    }
                }
                let total = _mm512_mul_ps(sum_of_each(sums), _mm512_set1_ps(q_scale));
                _mm512_storeu_ps(out.add(r * CELLS + c), total);
            }
        }
    }
}

/// Lane c of the result is the sum of vector c, taken in the order of `Lanes::sum`.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_of_each(v: [__m512; 16]) -> __m512 {
    let mut a = [_mm512_setzero_ps(); 8];
    for i in 0..8 {
        let (x, y) = (v[2 * i], v[2 * i + 1]);
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xee>(x, y));
    }
    let mut b = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        let (x, y) = (a[2 * i], a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y));
    }
    let mut c = [_mm512_setzero_ps(); 2];
    for i in 0..2 {
        let (x, y) = (b[2 * i], b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(x, y), _mm512_shuffle_ps::<0xee>(x, y));
    }
    let d = _mm512_add_ps(_mm512_shuffle_ps::<0x88>(c[0], c[1]), _mm512_shuffle_ps::<0xdd>(c[0], c[1]));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_ps(order, d)
}

/// The rows that are worked on together: four registers of sums each.
const ROWS: usize = 6;

/// Splits rows into nearly equal parts of at most ROWS and calls the body with the part's size as a constant.
macro_rules! by_rows {
    ($rows:expr, |$first:ident, $count:ident| $body:expr) => {{
        let parts = $rows.div_ceil(ROWS);
        let mut $first = 0;
        for part in 0..parts {
            let count = ($rows - $first).div_ceil(parts - part);
            match count {
                1 => {
                    const $count: usize = 1;
                    $body
                }
                2 => {
                    const $count: usize = 2;
                    $body
                }
                3 => {
                    const $count: usize = 3;
                    $body
                }
                4 => {
                    const $count: usize = 4;
                    $body
                }
                5 => {
                    const $count: usize = 5;
                    $body
                }
                _ => {
                    const $count: usize = 6;
                    $body
                }
            }
            $first += count;
        }
    }};
}

/// Weights times scales become 16-bit numbers, so that `vpdpwssd` takes two cells at once and levels need no conversion to
/// floats: half the multiplications and a third of the other instructions of the float way. What a row loses is 1/65534
/// of the largest product of a cell's weight and scale in the block, far below what 8-bit queries leave.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn weigh_levels(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    let bundles = n.div_ceil(4);
    // The largest scale of each cell: a sink has much weight and small values, and must not set the unit of the others.
    let mut tops = [0.0f32; CELLS];
    // SAFETY: the scales of `bundles` times four cells; rows of weights and acc.
    unsafe {
        for b in 0..bundles {
            let mut top = _mm512_setzero_ps();
            for i in (0..v.width / 4).step_by(16) {
                top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(v.scales.add(b * v.width / 4 + i))));
            }
            let top = _mm256_max_ps(_mm512_castps512_ps256(top), _mm512_extractf32x8_ps::<1>(top));
            let top = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps::<1>(top));
            _mm_storeu_ps(tops.as_mut_ptr().add(4 * b), top);
        }
        by_rows!(rows, |first, COUNT| weigh_rows::<COUNT>(
            v,
            bundles,
            &tops,
            weights.add(first * CELLS),
            acc.add(first * v.width)
        ));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn weigh_rows<const H: usize>(
    v: LevelBlock,
    bundles: usize,
    tops: &[f32; CELLS],
    weights: *const f32,
    acc: *mut f32,
) {
    let width = v.width;
    // Sixteen 16-bit weights per row and bundle: four slices of four cells.
    let mut short = [[_mm256_setzero_si256(); H]; CELLS / 4];
    let mut unit = [0.0f32; H];
    // SAFETY: H rows of CELLS weights, `width` sums each; four cells of each bundle.
    unsafe {
        let mut scaled = [[0.0f32; CELLS]; H];
        for h in 0..H {
            let w = weights.add(h * CELLS);
            let mut most = _mm512_setzero_ps();
            for i in (0..CELLS).step_by(16) {
                let product = _mm512_mul_ps(_mm512_loadu_ps(w.add(i)), _mm512_loadu_ps(tops.as_ptr().add(i)));
                most = _mm512_max_ps(most, product);
            }
            let largest = _mm512_reduce_max_ps(most);
            // Below this nothing is left in f32 either.
            let factor = if largest > 1e-30 { 32767.0 / largest } else { 0.0 };
            unit[h] = if largest > 1e-30 { largest / 32767.0 } else { 0.0 };
            for i in (0..CELLS).step_by(16) {
                let x = _mm512_mul_ps(_mm512_loadu_ps(w.add(i)), _mm512_set1_ps(factor));
                _mm512_storeu_ps(scaled[h].as_mut_ptr().add(i), x);
            }
        }
        for at in (0..width).step_by(64) {
            for (b, short) in short[..bundles].iter_mut().enumerate() {
                let scales = _mm512_loadu_ps(v.scales.add(b * width / 4 + at / 4));
                for h in 0..H {
                    let w = _mm512_broadcast_f32x4(_mm_loadu_ps(scaled[h].as_ptr().add(4 * b)));
                    short[h] = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(w, scales)));
                }
            }
            let mut sums = [[_mm512_setzero_si512(); 4]; H];
            for (b, short) in short[..bundles].iter().enumerate() {
                for pair in 0..2 {
                    let levels = v.levels.add((4 * b + 2 * pair) * width + 2 * at);
                    let mut x = [_mm512_setzero_si512(); 4];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(levels.add(32 * i).cast()));
                    }
                    for h in 0..H {
                        // Dword 2i + pair of a bundle's weights: slice i, this pair of cells.
                        let w = short[h..].as_ptr().cast::<i32>().add(pair);
                        for i in 0..4 {
                            sums[h][i] = _mm512_dpwssd_epi32(sums[h][i], x[i], _mm512_set1_epi32(*w.add(2 * i)));
                        }
                    }
                }
            }
            for h in 0..H {
                for i in 0..4 {
                    let to = acc.add(h * width + at + 16 * i);
                    let sum = _mm512_cvtepi32_ps(sums[h][i]);
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, _mm512_set1_ps(unit[h]), _mm512_loadu_ps(to)));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn expand(v: LevelBlock, n: usize, out: *mut f32) {
    for at in (0..n * v.width).step_by(16) {
        // SAFETY: sixteen values of a row, whose width is a multiple of sixteen; a group is never smaller.
        unsafe {
            let l = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v.levels.add(at).cast())));
            _mm512_storeu_ps(out.add(at), _mm512_mul_ps(l, _mm512_set1_ps(*v.scales.add(at / 4))));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn gemm64(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize) {
    by_rows!(rows, |first, COUNT| {
        // SAFETY: rows first..first+COUNT.
        unsafe { gemm_rows::<COUNT>(Matrix(a.0.add(first * a.1), a.1), b, MatrixMut(c.0.add(first * c.1), c.1), depth) }
    });
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn gemm_rows<const H: usize>(a: Matrix, b: Matrix, c: MatrixMut, depth: usize) {
    // SAFETY: H rows of a and c, `depth` rows of b.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 4]; H];
        for (h, sums) in sums.iter_mut().enumerate() {
            for (i, s) in sums.iter_mut().enumerate() {
                *s = _mm512_loadu_ps(c.0.add(h * c.1 + 16 * i));
            }
        }
        for k in 0..depth {
            let mut x = [_mm512_setzero_ps(); 4];
            for (i, x) in x.iter_mut().enumerate() {
                *x = _mm512_loadu_ps(b.0.add(k * b.1 + 16 * i));
            }
            for (h, sums) in sums.iter_mut().enumerate() {
                let w = _mm512_set1_ps(*a.0.add(h * a.1 + k));
                for (s, x) in sums.iter_mut().zip(x) {
                    *s = _mm512_fmadd_ps(x, w, *s);
                }
            }
        }
        for (h, sums) in sums.iter().enumerate() {
            for (i, s) in sums.iter().enumerate() {
                _mm512_storeu_ps(c.0.add(h * c.1 + 16 * i), *s);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn transpose(x: *const f32, width: usize, out: *mut f32) {
    for i in (0..width).step_by(16) {
        for c in (0..CELLS).step_by(16) {
            // SAFETY: sixteen rows of sixteen values of both.
            unsafe {
                let mut v = [_mm512_setzero_ps(); 16];
                for (a, v) in v.iter_mut().enumerate() {
                    *v = _mm512_loadu_ps(x.add((c + a) * width + i));
                }
                // Pairs of rows, pairs of pairs; then 4 x 4 blocks of 128 bits in two steps.
                let mut p = [_mm512_setzero_ps(); 16];
                for a in 0..8 {
                    p[2 * a] = _mm512_unpacklo_ps(v[2 * a], v[2 * a + 1]);
                    p[2 * a + 1] = _mm512_unpackhi_ps(v[2 * a], v[2 * a + 1]);
                }
                let mut q = [_mm512_setzero_ps(); 16];
                for a in 0..4 {
                    for b in 0..2 {
                        let (x, y) = (p[4 * a + b], p[4 * a + 2 + b]);
                        q[4 * a + 2 * b] = _mm512_shuffle_ps::<0x44>(x, y);
                        q[4 * a + 2 * b + 1] = _mm512_shuffle_ps::<0xee>(x, y);
                    }
                }
                // q[4a + b] holds, in its block l, column 4l + b of rows 4a..4a+4.
                for b in 0..4 {
                    let r = [
                        _mm512_shuffle_f32x4::<0x44>(q[b], q[4 + b]),
                        _mm512_shuffle_f32x4::<0xee>(q[b], q[4 + b]),
                        _mm512_shuffle_f32x4::<0x44>(q[8 + b], q[12 + b]),
                        _mm512_shuffle_f32x4::<0xee>(q[8 + b], q[12 + b]),
                    ];
                    let columns = [
                        _mm512_shuffle_f32x4::<0x88>(r[0], r[2]),
                        _mm512_shuffle_f32x4::<0xdd>(r[0], r[2]),
                        _mm512_shuffle_f32x4::<0x88>(r[1], r[3]),
                        _mm512_shuffle_f32x4::<0xdd>(r[1], r[3]),
                    ];
                    for (l, column) in columns.iter().enumerate() {
                        _mm512_storeu_ps(out.add((i + 4 * l + b) * CELLS + c), *column);
                    }
                }
            }
        }
    }
}
