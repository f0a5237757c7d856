//! AVX2 with FMA and F16C.
//!
//! Without VNNI a product of bytes goes through `vpmaddubsw`, which multiplies unsigned by signed: the sign of the level
//! moves to the query, and pairs stay within 16 bits because levels and queries do not pass 127.

mod polar;

use super::{by_rows, compile_portable_kernels, scalar};
use super::{Kernels, LevelBlock, LevelRows, Matrix, MatrixMut, Queries, Role, Sight, CELLS, MAX_WIDTH};
use crate::codec::delta::{Chain, Delta, Kind};
use crate::codec::format::Format;
use crate::codec::plain::{Plain, BLOCK};
use crate::codec::polar::Polar;
use crate::codec::qjl;
use crate::codec::srft::{Srft, LEVELS_2, LEVELS_3, LEVELS_4, SCALE_UNIT};
use crate::codec::turbo::NORM_BYTES;
use crate::lanes::{Lanes, Simd, LANES};
use crate::rotation::Rotation;
use std::arch::x86_64::*;

/// The table, where the CPU has the instructions.
pub fn kernels() -> Option<&'static Kernels> {
    static KERNELS: Kernels = Kernels {
        name: "avx2",
        encode,
        decode,
        encode_key,
        follow,
        group,
        chain_scores,
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
        sight,
        mask_scores,
        exponentials,
        scale,
        polar_tables,
        polar_scores: polar::scores,
    };
    let there = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    there.then_some(&KERNELS)
}

compile_portable_kernels!("avx2,fma,f16c", F32x16);

/// Sixteen lanes in two registers.
#[derive(Clone, Copy)]
struct F32x16(__m256, __m256);

// SAFETY of the blocks below: values of this type exist only inside functions that enable AVX2 and FMA.
impl Simd for F32x16 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        unsafe { F32x16(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        let x = &x[..LANES];
        unsafe { F32x16(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())) }
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
        let mut lanes = [0.0f32; LANES];
        self.store(&mut lanes);
        Lanes(lanes).store_bytes(x);
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
    fn times_power_of_two(self, n: Self) -> Self {
        unsafe {
            let exponent = |n: __m256| _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            let add = |a: __m256, n: __m256| _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent(n)));
            F32x16(add(self.0, n.0), add(self.1, n.1))
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
    fn last(self) -> f32 {
        unsafe { _mm256_cvtss_f32(_mm256_permutevar8x32_ps(self.1, _mm256_set1_epi32(7))) }
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

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack(rows: LevelRows, data: *const u8, stride: usize, n: usize, _role: Role, out: LevelBlock) {
    let mut scales = [0.0f32; MAX_WIDTH / 16];
    if let LevelRows::Polar(f) = rows {
        // SAFETY: the caller's promise is passed on.
        return unsafe { unpack_polar(f, data, stride, n, out) };
    }
    for c in 0..n {
        // SAFETY: row c and cell c of the promised sizes.
        unsafe {
            let (row, levels) = (data.add(c * stride), out.levels.add(c * out.width));
            match rows {
                LevelRows::Turbo(f) if f.size() % 64 == 0 => {
                    match f.bits() {
                        4 => unpack_codes::<3>(f.quantizer().table, f.size(), row.add(NORM_BYTES), levels),
                        _ => unpack_codes::<2>(f.quantizer().table, f.size(), row.add(NORM_BYTES), levels),
                    }
                    let signs = row.add(f.sign_offset());
                    unpack_signs(f.quantizer().sign_level, f.size(), signs, levels.add(f.size()));
                    let half = f.size() / BLOCK;
                    let [of_levels, of_signs] = f.scale_factors();
                    scales[..half].fill(stored_scale(row) * of_levels);
                    scales[half..2 * half].fill(stored_scale(row.add(2)) * of_signs);
                }
                LevelRows::Qjl(f) if f.size() % 64 == 0 => {
                    unpack_signs(qjl::SIGN_LEVEL, f.size(), row.add(qjl::NORM_BYTES), levels);
                    scales[..f.size() / BLOCK].fill(stored_scale(row) * f.scale_factor());
                }
                // Whole chunks only: the odd head sizes end in shorter ones.
                LevelRows::Srft(f) if f.size() % 64 == 0 => match f.bits() {
                    8 => unpack_srft::<8>(f, row, levels, &mut scales),
                    4 => unpack_srft::<4>(f, row, levels, &mut scales),
                    3 => unpack_srft::<3>(f, row, levels, &mut scales),
                    _ => unpack_srft::<2>(f, row, levels, &mut scales),
                },
                _ => {
                    let levels = std::slice::from_raw_parts_mut(levels, out.width);
                    scalar::unpack_row(rows, row, levels, &mut scales[..out.groups()]);
                }
            }
            for (g, &s) in scales[..out.groups()].iter().enumerate() {
                *out.scale_at(c, g) = s;
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_srft<const BITS: u32>(f: Srft, row: *const u8, levels: *mut i8, scales: &mut [f32]) {
    let table: &[i8] = match BITS {
        4 => &LEVELS_4.table,
        3 => &LEVELS_3.table,
        _ => &LEVELS_2.table,
    };
    // SAFETY: offsets stay inside the row and the buffers.
    unsafe {
        unpack_codes::<BITS>(table, f.size(), row.add(f.scale_bytes()), levels);
        // Head sizes of whole chunks have groups of 32.
        for g in 0..f.size() / BLOCK {
            scales[g] = stored_scale(row.add(2 * g)) / SCALE_UNIT;
        }
    }
}

/// Whole chunks of codes to levels.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_codes<const BITS: u32>(table: &[i8], size: usize, codes: *const u8, levels: *mut i8) {
    let mut repeated = [0u8; 16];
    for (i, t) in repeated.iter_mut().enumerate() {
        *t = table[i % table.len()] as u8;
    }
    // SAFETY: offsets stay inside the row and the buffers.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(repeated.as_ptr().cast()));
        for half in 0..size / 32 {
            let chunk = codes.add(half / 2 * 8 * BITS as usize);
            let l = match BITS {
                8 => _mm256_loadu_si256(chunk.add(half % 2 * 32).cast()),
                _ => _mm256_shuffle_epi8(table, half_codes::<BITS>(chunk, half % 2)),
            };
            _mm256_storeu_si256(levels.add(half * 32).cast(), l);
        }
    }
}

/// 32 bits at a time to levels, negative where a bit is set.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack_signs(level: i8, size: usize, bits: *const u8, levels: *mut i8) {
    let plus = _mm256_set1_epi8(level);
    for i in 0..size / 32 {
        // SAFETY: four bytes of bits, 32 levels.
        unsafe {
            // All ones where set: (x ^ m) - m negates.
            let set = spread_bits(bits.add(4 * i));
            let l = _mm256_sub_epi8(_mm256_xor_si256(plus, set), set);
            _mm256_storeu_si256(levels.add(32 * i).cast(), l);
        }
    }
}

/// Byte i is all ones where bit i%8 of byte i/8 is set.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn spread_bits(bits: *const u8) -> __m256i {
    // SAFETY: four bytes.
    let bits = _mm256_set1_epi32(unsafe { bits.cast::<i32>().read_unaligned() });
    let spread = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(bits, spread), bit), bit)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_polar(f: Polar, data: *const u8, stride: usize, n: usize, out: LevelBlock) {
    let tables = polar::LevelTables::new(f);
    let mut scales = [0.0f32; MAX_WIDTH / 16];
    for c in 0..n {
        // SAFETY: row c and cell c of the promised sizes.
        unsafe {
            let levels = out.levels.add(c * out.width);
            polar::levels(f, &tables, data.add(c * stride), levels, &mut scales);
            std::slice::from_raw_parts_mut(levels.add(f.size()), out.width - f.size()).fill(0);
            for (g, &s) in scales[..out.groups()].iter().enumerate() {
                *out.scale_at(c, g) = s;
            }
        }
    }
}

/// A stored scale; NaN and infinities count as zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn stored_scale(at: *const u8) -> f32 {
    // SAFETY: two bytes.
    let bits = unsafe { at.cast::<u16>().read_unaligned() };
    let x = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));
    if x.is_finite() {
        x
    } else {
        0.0
    }
}

/// The codes of values 0..32 or 32..64 of a chunk.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn half_codes<const BITS: u32>(chunk: *const u8, half: usize) -> __m256i {
    // SAFETY: the chunk's 32, 24 or 16 bytes.
    unsafe {
        if BITS == 4 {
            let b = _mm256_loadu_si256(chunk.cast());
            let b = if half == 0 { b } else { _mm256_srli_epi16::<4>(b) };
            return _mm256_and_si256(b, _mm256_set1_epi8(15));
        }
        let b = _mm256_broadcastsi128_si256(_mm_loadu_si128(chunk.cast()));
        let s = 4 * half as i32;
        let shifts = _mm256_setr_epi32(s, s, s, s, s + 2, s + 2, s + 2, s + 2);
        let low = _mm256_and_si256(_mm256_srlv_epi32(b, shifts), _mm256_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let set = spread_bits(chunk.add(16 + 4 * half));
        _mm256_or_si256(low, _mm256_and_si256(set, _mm256_set1_epi8(4)))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(kind: Plain, data: *const u8, stride: usize, n: usize, size: usize, out: *mut f32, width: usize) {
    if !size.is_multiple_of(8) {
        // SAFETY: the caller's promise is passed on.
        return unsafe { scalar::widen(kind, data, stride, n, size, out, width) };
    }
    for c in 0..n {
        // SAFETY: eight values at a time of row c.
        unsafe {
            let (row, out) = (data.add(c * stride), out.add(c * width));
            for i in (0..width).step_by(8) {
                let x = if i >= size {
                    _mm256_setzero_ps()
                } else {
                    match kind {
                        Plain::F16 => _mm256_cvtph_ps(_mm_loadu_si128(row.add(2 * i).cast())),
                        Plain::Bf16 => {
                            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(row.add(2 * i).cast()));
                            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
                        }
                        _ => _mm256_loadu_ps(row.add(4 * i).cast()),
                    }
                };
                _mm256_storeu_ps(out.add(i), x);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_levels(k: LevelBlock, n: usize, q: Queries, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { scalar::dot_levels(k, n, q, out) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn weigh_levels(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32) {
    by_rows!(rows, [1 2 3], |first, COUNT| {
        // SAFETY: rows first..first+COUNT of weights and acc.
        unsafe { weigh_rows::<COUNT>(v, n, weights.add(first * CELLS), acc.add(first * v.width)) }
    });
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn weigh_rows<const H: usize>(v: LevelBlock, n: usize, weights: *const f32, acc: *mut f32) {
    let width = v.width;
    for at in (0..width).step_by(32) {
        // SAFETY: 32 values of n cells and of H rows.
        unsafe {
            let mut sums = load_sums::<H>(MatrixMut(acc.add(at), width));
            for c in 0..n {
                let levels = v.levels.add(c * width + at);
                let mut x = [_mm256_setzero_ps(); 4];
                for (i, x) in x.iter_mut().enumerate() {
                    let l = _mm256_cvtepi8_epi32(_mm_loadl_epi64(levels.add(8 * i).cast()));
                    *x = _mm256_mul_ps(_mm256_cvtepi32_ps(l), _mm256_set1_ps(*v.scale_at(c, (at + 8 * i) / v.group)));
                }
                add_weighted(&mut sums, x, weights.add(c), CELLS);
            }
            store_sums(sums, MatrixMut(acc.add(at), width));
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn expand(v: LevelBlock, n: usize, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { scalar::expand(v, n, out) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn gemm64(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize) {
    by_rows!(rows, [1 2 3], |first, COUNT| {
        for half in [0, 32] {
            // SAFETY: rows first..first+COUNT, columns half..half+32.
            unsafe {
                let c = MatrixMut(c.0.add(first * c.1 + half), c.1);
                let mut sums = load_sums::<COUNT>(c);
                for k in 0..depth {
                    let mut x = [_mm256_setzero_ps(); 4];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = _mm256_loadu_ps(b.0.add(k * b.1 + half + 8 * i));
                    }
                    add_weighted(&mut sums, x, a.0.add(first * a.1 + k), a.1);
                }
                store_sums(sums, c);
            }
        }
    });
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load_sums<const H: usize>(c: MatrixMut) -> [[__m256; 4]; H] {
    let mut sums = [[_mm256_setzero_ps(); 4]; H];
    for (h, sums) in sums.iter_mut().enumerate() {
        for (i, s) in sums.iter_mut().enumerate() {
            // SAFETY: 32 values of row h.
            *s = unsafe { _mm256_loadu_ps(c.0.add(h * c.1 + 8 * i)) };
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn store_sums<const H: usize>(sums: [[__m256; 4]; H], c: MatrixMut) {
    for (h, sums) in sums.iter().enumerate() {
        for (i, s) in sums.iter().enumerate() {
            // SAFETY: 32 values of row h.
            unsafe { _mm256_storeu_ps(c.0.add(h * c.1 + 8 * i), *s) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_weighted<const H: usize>(
    sums: &mut [[__m256; 4]; H],
    x: [__m256; 4],
    weights: *const f32,
    stride: usize,
) {
    for (h, sums) in sums.iter_mut().enumerate() {
        // SAFETY: H weights, `stride` apart.
        let w = _mm256_set1_ps(unsafe { *weights.add(h * stride) });
        for (s, x) in sums.iter_mut().zip(x) {
            *s = _mm256_fmadd_ps(x, w, *s);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn transpose(x: *const f32, width: usize, out: *mut f32) {
    for i in (0..width).step_by(8) {
        for c in (0..CELLS).step_by(8) {
            // SAFETY: eight rows of eight values of both.
            unsafe {
                let mut v = [_mm256_setzero_ps(); 8];
                for (a, v) in v.iter_mut().enumerate() {
                    *v = _mm256_loadu_ps(x.add((c + a) * width + i));
                }
                // Pairs of rows, then of pairs, then the 128-bit halves.
                let mut p = [_mm256_setzero_ps(); 8];
                for a in 0..4 {
                    p[2 * a] = _mm256_unpacklo_ps(v[2 * a], v[2 * a + 1]);
                    p[2 * a + 1] = _mm256_unpackhi_ps(v[2 * a], v[2 * a + 1]);
                }
                let mut q = [_mm256_setzero_ps(); 8];
                for a in 0..2 {
                    for b in 0..2 {
                        let (x, y) = (p[4 * a + b], p[4 * a + 2 + b]);
                        q[4 * a + 2 * b] = _mm256_shuffle_ps::<0x44>(x, y);
                        q[4 * a + 2 * b + 1] = _mm256_shuffle_ps::<0xee>(x, y);
                    }
                }
                for b in 0..4 {
                    _mm256_storeu_ps(out.add((i + b) * CELLS + c), _mm256_permute2f128_ps::<0x20>(q[b], q[4 + b]));
                    _mm256_storeu_ps(out.add((i + 4 + b) * CELLS + c), _mm256_permute2f128_ps::<0x31>(q[b], q[4 + b]));
                }
            }
        }
    }
}
