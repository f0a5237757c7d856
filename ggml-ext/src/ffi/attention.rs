//! Attention, and products with keys.

use super::{answered, count, guarded, report, share, tensors, thread};
use crate::attention::{self, Attention, AttentionOp, Phase};
use crate::tensor::{Tensor, Untyped};
use crate::{center, products};
use std::ffi::{c_char, c_int};

/// Can it be served? The message says why not. Shapes and types alone are looked at, not `data`.
///
/// # Safety
/// `op` is NULL or a description; `err` is NULL or has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_supports(
    op: *const AttentionOp,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    // SAFETY: the caller's promise.
    let check = || Attention::new(unsafe { op.as_ref() }.ok_or("no attention given")?).map(|_| true);
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// Bytes that the threads of the op share; 0 where it is not served.
///
/// # Safety
/// `op` is NULL or a description.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_work_size(op: *const AttentionOp, n_threads: c_int) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        unsafe { op.as_ref() }.map_or(0, |op| attention::work_size(op, count(n_threads)).unwrap_or(0))
    })
}

/// # Safety
/// As [`ggml_ext_attention_compute`].
unsafe fn step(
    op: *const AttentionOp,
    phase: Phase,
    ith: c_int,
    nth: c_int,
    work: *mut Untyped,
    work_size: usize,
) -> Result<(), String> {
    let (ith, nth) = thread(ith, nth)?;
    // SAFETY: the caller's promise.
    unsafe { attention::step(op.as_ref().ok_or("no attention given")?, phase, ith, nth, work, work_size) }
}

/// Every thread calls _compute, all wait for each other, every thread calls _finish. `work` is shared by all.
/// False: something went wrong inside; dst is filled with NaN so that it shows, and the reason is on stderr.
///
/// # Safety
/// `op` is NULL or a description of memory that is there; `work` is NULL or has `work_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_compute(
    op: *const AttentionOp,
    ith: c_int,
    nth: c_int,
    work: *mut Untyped,
    work_size: usize,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe { step(op, Phase::Compute, ith, nth, work, work_size) })
}

/// The second step of a thread.
///
/// # Safety
/// As ggml_ext_attention_compute, after every thread's has returned.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_finish(
    op: *const AttentionOp,
    ith: c_int,
    nth: c_int,
    work: *mut Untyped,
    work_size: usize,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe { step(op, Phase::Finish, ith, nth, work, work_size) })
}

/// MUL_MAT with k of ours: dst[i, j] = k_row(i) . q_row(j), broadcast over dims 2 and 3 as ggml does; q f32 or f16.
///
/// # Safety
/// The pointers are NULL or descriptions.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_mul_mat_supports(k: *const Tensor, q: *const Tensor, dst: *const Tensor) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise.
        unsafe { tensors([k, q, dst]) }.and_then(|[k, q, dst]| attention::check_mul_mat(k, q, dst)).is_ok()
    })
}

/// The share of a thread.
///
/// # Safety
/// The pointers are NULL or descriptions of memory that is there.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_mul_mat(
    k: *const Tensor,
    q: *const Tensor,
    dst: *const Tensor,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe { share([k, q, dst], ith, nth, |[k, q, dst], ith, nth| attention::mul_mat(k, q, dst, ith, nth)) })
}

/// Is there ggml_ext_multiply for matrices of this size?
#[no_mangle]
pub extern "C" fn ggml_ext_multiplies(size: i64) -> bool {
    guarded(false, || usize::try_from(size).is_ok_and(products::serves))
}

/// Does each of nth threads find in its share of ggml_ext_multiply all heads that its share of ggml_ext_set_rows writes? Then there is
/// no need to wait between the two.
///
/// # Safety
/// The pointers are NULL or descriptions.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_heads_stay(
    m: *const Tensor,
    x: *const Tensor,
    product: *const Tensor,
    cache: *const Tensor,
    rows: *const Tensor,
    nth: c_int,
) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise is passed on.
        let all = unsafe { tensors([m, x, product, cache, rows]) };
        let Ok((_, nth)) = thread(0, nth) else { return false };
        all.is_ok_and(|[m, x, product, cache, rows]| products::heads_stay([m, x, product], [cache, rows], nth))
    })
}

/// MUL_MAT of f16 matrices and f32 rows, dst[i, j] = m_row(i) . x_row(j), as calibrated keys and queries are multiplied: a
/// square matrix for each of some heads.
///
/// # Safety
/// The pointers are NULL or descriptions of memory that is there.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_multiply(
    m: *const Tensor,
    x: *const Tensor,
    dst: *const Tensor,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe { share([m, x, dst], ith, nth, |[m, x, dst], ith, nth| products::multiply(m, x, dst, ith, nth)) })
}

/// SUB of f32 values, [head size, heads, tokens], and the center of each head: what a calibrated cache stores.
///
/// # Safety
/// The pointers are NULL or descriptions of memory that is there.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_subtract(
    x: *const Tensor,
    center: *const Tensor,
    dst: *const Tensor,
    ith: c_int,
    nth: c_int,
) -> bool {
    let subtract = |[x, center, dst]: [&Tensor; 3], ith, nth| {
        // SAFETY: the caller's promise.
        unsafe { center::subtract(x, center, dst, ith, nth) }
    };
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe { share([x, center, dst], ith, nth, subtract) })
}

/// Does each thread find in its share of ggml_ext_subtract all rows that its share of ggml_ext_set_rows writes? Then there is
/// no need to wait between the two.
///
/// # Safety
/// The pointers are NULL or descriptions.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_rows_stay(
    x: *const Tensor,
    center: *const Tensor,
    dst: *const Tensor,
    cache: *const Tensor,
    rows: *const Tensor,
) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise is passed on.
        let all = unsafe { tensors([x, center, dst, cache, rows]) };
        all.is_ok_and(|[x, center, dst, cache, rows]| center::rows_stay([x, center, dst], [cache, rows]))
    })
}
