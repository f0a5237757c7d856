//! Rows as floats, and products of small matrices of them.

use super::products::fcvtl;
use crate::codec::plain::Plain;
use crate::isa::{by_rows, scalar, LevelBlock, Matrix, MatrixMut, CELLS};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub(super) unsafe fn widen(
    kind: Plain,
    data: *const u8,
    stride: usize,
    n: usize,
    size: usize,
    out: *mut f32,
    width: usize,
) {
    let whole = size / 4 * 4;
    for c in 0..n {
        // SAFETY: four values at a time of row c; what is left of it is less than four.
        unsafe {
            let (row, out) = (data.add(c * stride), out.add(c * width));
            for i in (0..whole).step_by(4) {
                let x = match kind {
                    Plain::F16 => fcvtl(vld1_u16(row.add(2 * i).cast())),
                    Plain::Bf16 => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(row.add(2 * i).cast()))),
                    _ => vld1q_f32(row.add(4 * i).cast()),
                };
                vst1q_f32(out.add(i), x);
            }
            let bytes = if kind == Plain::F32 { 4 } else { 2 };
            scalar::widen(kind, row.add(bytes * whole), stride, 1, size - whole, out.add(whole), width - whole);
        }
    }
}

#[target_feature(enable = "neon")]
pub(super) unsafe fn expand(v: LevelBlock, n: usize, out: *mut f32) {
    // SAFETY: the caller's promise is passed on.
    unsafe { scalar::expand(v, n, out) }
}

/// Registers of columns that are worked on together.
const COLUMNS: usize = 4;

#[target_feature(enable = "neon")]
pub(super) unsafe fn gemm64(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize) {
    by_rows!(rows, [1 2 3 4 5 6], |first, COUNT| {
        for at in (0..64).step_by(4 * COLUMNS) {
            // SAFETY: rows first..first+COUNT, sixteen columns.
            unsafe {
                let c = |h: usize, i: usize| c.0.add((first + h) * c.1 + at + 4 * i);
                let mut sums = [[vdupq_n_f32(0.0); COLUMNS]; COUNT];
                for h in 0..COUNT {
                    for i in 0..COLUMNS {
                        sums[h][i] = vld1q_f32(c(h, i));
                    }
                }
                for k in 0..depth {
                    let mut x = [vdupq_n_f32(0.0); COLUMNS];
                    for i in 0..COLUMNS {
                        x[i] = vld1q_f32(b.0.add(k * b.1 + at + 4 * i));
                    }
                    for h in 0..COUNT {
                        let w = *a.0.add((first + h) * a.1 + k);
                        for i in 0..COLUMNS {
                            sums[h][i] = vfmaq_n_f32(sums[h][i], x[i], w);
                        }
                    }
                }
                for h in 0..COUNT {
                    for i in 0..COLUMNS {
                        vst1q_f32(c(h, i), sums[h][i]);
                    }
                }
            }
        }
    });
}

#[target_feature(enable = "neon")]
pub(super) unsafe fn transpose(x: *const f32, width: usize, out: *mut f32) {
    for i in (0..width).step_by(4) {
        for c in (0..CELLS).step_by(4) {
            // SAFETY: four rows of four values of both.
            unsafe {
                let v = |a: usize| vld1q_f32(x.add((c + a) * width + i));
                let (v0, v1, v2, v3) = (v(0), v(1), v(2), v(3));
                let (even, odd) =
                    (|x, y| vreinterpretq_f64_f32(vtrn1q_f32(x, y)), |x, y| vreinterpretq_f64_f32(vtrn2q_f32(x, y)));
                let (a, b) = (even(v0, v1), odd(v0, v1));
                let (y, z) = (even(v2, v3), odd(v2, v3));
                let rows = [vtrn1q_f64(a, y), vtrn1q_f64(b, z), vtrn2q_f64(a, y), vtrn2q_f64(b, z)];
                for (b, row) in rows.into_iter().enumerate() {
                    vst1q_f32(out.add((i + b) * CELLS + c), vreinterpretq_f32_f64(row));
                }
            }
        }
    }
}
