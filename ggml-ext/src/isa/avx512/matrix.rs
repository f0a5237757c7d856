//! Rows as floats, and products of small matrices of them.

use crate::codec::plain::Plain;
use crate::isa::{by_rows, scalar, LevelBlock, Matrix, MatrixMut, CELLS};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn widen(
    kind: Plain,
    data: *const u8,
    stride: usize,
    n: usize,
    size: usize,
    out: *mut f32,
    width: usize,
) {
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn expand(v: LevelBlock, n: usize, out: *mut f32) {
    for c in 0..n {
        for i in (0..v.width).step_by(16) {
            // SAFETY: sixteen values of a cell; a group is never smaller.
            unsafe {
                let at = c * v.width + i;
                let l = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v.levels.add(at).cast())));
                _mm512_storeu_ps(out.add(at), _mm512_mul_ps(l, _mm512_set1_ps(*v.scale_at(c, i / v.scale_group))));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
pub(super) unsafe fn gemm64(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize) {
    by_rows!(rows, [1 2 3 4 5 6], |first, COUNT| {
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
pub(super) unsafe fn transpose(x: *const f32, width: usize, out: *mut f32) {
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
