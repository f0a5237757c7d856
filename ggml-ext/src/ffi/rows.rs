//! Rows in and out of a cache.

use super::{guarded, report, share, slice, slice_mut, tensors};
use crate::isa::{self, Kernels};
use crate::rows;
use crate::tensor::{Tensor, Untyped};
use std::ffi::c_int;

/// The number of values of rows that are there.
fn values<A, B>(src: *const A, dst: *const B, n: i64) -> Result<usize, String> {
    match usize::try_from(n) {
        Ok(n) if n == 0 || (!src.is_null() && !dst.is_null()) => Ok(n),
        _ => Err(format!("there is no memory of {n} values")),
    }
}

/// # Safety
/// `src` holds n values, `dst` has room for their rows.
unsafe fn encode(id: i32, src: *const f32, dst: *mut Untyped, n: i64, kernels: &'static Kernels) -> Result<(), String> {
    let n = values(src, dst, n)?;
    // SAFETY: the caller's promise.
    let (values, rows) = unsafe { (slice(src, n), slice_mut(dst, rows::stored_bytes(id, n)?)) };
    rows::encode(id, kernels, values, rows)
}

/// Encodes rows of a concrete type: n is a multiple of the head size. False (nothing written) for other ids or sizes.
/// Where cells are coded together, the rows are those of one head in consecutive cells from the beginning of a group.
///
/// # Safety
/// `src` holds n values, `dst` has room for their rows.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_encode(id: i32, src: *const f32, dst: *mut Untyped, n: i64) -> bool {
    // SAFETY: the caller's promise is passed on.
    guarded(false, || unsafe { encode(id, src, dst, n, isa::kernels()) }.is_ok())
}

/// The same by the scalar definition of the format, whatever the CPU offers: what every fast path is compared with.
///
/// # Safety
/// As ggml_ext_encode.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_encode_ref(id: i32, src: *const f32, dst: *mut Untyped, n: i64) -> bool {
    // SAFETY: the caller's promise is passed on.
    guarded(false, || unsafe { encode(id, src, dst, n, &isa::scalar::KERNELS) }.is_ok())
}

/// # Safety
/// `src` holds the rows of n values, `dst` has room for the values.
unsafe fn decode(
    id: i32,
    src: *const Untyped,
    dst: *mut f32,
    n: i64,
    decode: impl FnOnce(&[u8], &mut [f32]) -> Result<(), String>,
) -> Result<(), String> {
    let n = values(src, dst, n)?;
    // SAFETY: the caller's promise.
    let (rows, values) = unsafe { (slice(src, rows::stored_bytes(id, n)?), slice_mut(dst, n)) };
    decode(rows, values)
}

/// The way back.
///
/// # Safety
/// `src` holds the rows of n values, `dst` has room for the values.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_decode(id: i32, src: *const Untyped, dst: *mut f32, n: i64) -> bool {
    let f = |rows: &[u8], values: &mut [f32]| rows::decode(id, isa::kernels(), rows, values);
    // SAFETY: the caller's promise is passed on.
    guarded(false, || unsafe { decode(id, src, dst, n, f) }.is_ok())
}

/// The vectors whose products with queries are the scores: what rows decode to, except where a type's estimate without
/// bias is not its best reconstruction (turbo, qjl). For tests.
///
/// # Safety
/// As ggml_ext_decode.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_decode_key(id: i32, src: *const Untyped, dst: *mut f32, n: i64) -> bool {
    let f = |rows: &[u8], values: &mut [f32]| rows::decode_key(id, rows, values);
    // SAFETY: the caller's promise is passed on.
    guarded(false, || unsafe { decode(id, src, dst, n, f) }.is_ok())
}

/// SET_ROWS: can dst row rows[i] = encode(src row i) be served? This and the other _supports look at descriptions alone.
///
/// # Safety
/// The pointers are NULL or descriptions.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_set_rows_supports(
    dst: *const Tensor,
    src: *const Tensor,
    rows: *const Tensor,
) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise.
        unsafe { tensors([dst, src, rows]) }.and_then(|[dst, src, rows]| rows::check_set_rows(dst, src, rows)).is_ok()
    })
}

/// The share of a thread; index tensor i32 or i64 (index_bytes 4 or 8). False from this and the other ops: nothing was
/// computed, dst of GET_ROWS and MUL_MAT is filled with NaN, that of the others is as it was, and the reason is on stderr.
///
/// # Safety
/// The pointers are NULL or descriptions of memory that is there.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_set_rows(
    dst: *const Tensor,
    src: *const Tensor,
    rows: *const Tensor,
    index_bytes: c_int,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe {
        share([dst, src, rows], ith, nth, |[dst, src, rows], ith, nth| {
            rows::set_rows(dst, src, rows, index_bytes as usize, ith, nth)
        })
    })
}

/// GET_ROWS: can dst row i = decode(src row rows[i]) be served, dst f32, rows i32?
///
/// # Safety
/// The pointers are NULL or descriptions.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_get_rows_supports(
    dst: *const Tensor,
    src: *const Tensor,
    rows: *const Tensor,
) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise.
        unsafe { tensors([dst, src, rows]) }.and_then(|[dst, src, rows]| rows::check_get_rows(dst, src, rows)).is_ok()
    })
}

/// The share of a thread.
///
/// # Safety
/// The pointers are NULL or descriptions of memory that is there.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_get_rows(
    dst: *const Tensor,
    src: *const Tensor,
    rows: *const Tensor,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe {
        share([dst, src, rows], ith, nth, |[dst, src, rows], ith, nth| rows::get_rows(dst, src, rows, ith, nth))
    })
}

/// CPY, DUP, CONT: between a type of ours and f32 or f16 or itself, any strides, shapes that hold the same rows.
///
/// # Safety
/// The pointers are NULL or descriptions.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_copy_supports(dst: *const Tensor, src: *const Tensor) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise.
        unsafe { tensors([dst, src]) }.and_then(|[dst, src]| rows::check_copy(dst, src)).is_ok()
    })
}

/// The share of a thread.
///
/// # Safety
/// The pointers are NULL or descriptions of memory that is there.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_copy(dst: *const Tensor, src: *const Tensor, ith: c_int, nth: c_int) -> bool {
    // SAFETY: the caller's promise is passed on.
    report(|| unsafe { share([dst, src], ith, nth, |[dst, src], ith, nth| rows::copy(dst, src, ith, nth)) })
}

/// An op that there is not: its result becomes NaN, where it is rows of f32 and memory is as described.
///
/// # Safety
/// `dst` is NULL or a description of memory that is there, and no thread uses it.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_not_served(dst: *const Tensor) {
    guarded((), || {
        // SAFETY: the caller's promise.
        if let Some(dst) = unsafe { dst.as_ref() } {
            // SAFETY: the caller's promise.
            unsafe { dst.fill_nan() };
        }
    });
}
