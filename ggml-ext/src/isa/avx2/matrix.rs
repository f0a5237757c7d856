//! Rows as floats, and products of small matrices of them.

use crate::codec::plain::Plain;
use crate::isa::{by_rows, scalar, LevelBlock, Matrix, MatrixMut, CELLS};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn widen(
    kind: Plain,
    data: *const u8,
    stride: usize,
    n: usize,
    size: usize,
    out: *mut f32,
    width: usize,
) {
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

#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn expand(v: LevelBlock, n: usize, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { scalar::expand(v, n, out) }
}

#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn gemm64(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize) {
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
pub(super) unsafe fn transpose(x: *const f32, width: usize, out: *mut f32) {
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
