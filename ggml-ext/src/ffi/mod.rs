//! The C boundary. Each entry point converts its arguments, calls one function of the crate, and turns the result, or a
//! panic, into an answer for C: nothing unwinds across it.
//!
//! include/ggml-ext.h is generated from the `extern "C"` functions and `#[repr(C)]` structs, comments included; a test
//! compares the two (`cargo test -p kv --test header`, which also writes the new text where they differ).

mod attention;
mod cache;
mod rows;
mod state;
mod types;

pub use attention::*;
pub use cache::*;
pub use rows::*;
pub use state::*;
pub use types::*;

use crate::error::panic_text;
use crate::tensor::Tensor;
use std::borrow::Cow;
use std::ffi::{c_char, c_int, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Runs `f`; a panic becomes `otherwise` and a line on stderr (the panic hook's own).
fn guarded<T>(otherwise: T, f: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or(otherwise)
}

/// The result of an op as C sees it; the reason of a failure goes to stderr.
fn report(result: impl FnOnce() -> Result<(), String>) -> bool {
    guarded(false, || match result() {
        Ok(()) => true,
        Err(reason) => {
            eprintln!("ggml-ext: {reason}");
            false
        }
    })
}

/// Runs `f` for a caller with room for a message, always terminated: the note that comes with its answer, or what an error
/// or a panic says, and `otherwise` beside it.
///
/// # Safety
/// `message` is null or has room for `size` bytes.
unsafe fn noted<T>(
    otherwise: T,
    message: *mut c_char,
    size: usize,
    f: impl FnOnce() -> Result<(T, String), String>,
) -> T {
    let f = || {
        #[cfg(test)]
        tests::panic_where_asked();
        f()
    };
    let (answer, text) = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok((answer, note))) => (answer, note),
        Ok(Err(reason)) => (otherwise, reason),
        Err(panic) => (otherwise, format!("an error inside of ggml-ext, please report it: {}", panic_text(&*panic))),
    };
    // SAFETY: the caller's promise.
    unsafe { write_message(&text, message, size) };
    answer
}

/// The same for an answer without a note: the message is empty where `f` succeeds.
///
/// # Safety
/// As [`noted`].
unsafe fn answered<T>(otherwise: T, err: *mut c_char, err_size: usize, f: impl FnOnce() -> Result<T, String>) -> T {
    // SAFETY: the caller's promise is passed on.
    unsafe { noted(otherwise, err, err_size, || f().map(|answer| (answer, String::new()))) }
}

/// # Safety
/// `to` is null or has room for `size` bytes.
unsafe fn write_message(message: &str, to: *mut c_char, size: usize) {
    if to.is_null() || size == 0 {
        return;
    }
    let mut n = message.len().min(size - 1);
    while !message.is_char_boundary(n) {
        n -= 1;
    }
    // SAFETY: the caller has room for `size` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(message.as_ptr(), to.cast(), n);
        *to.add(n) = 0;
    }
}

/// Bytes that are no text become marks that no name has, so that a message shows where they are.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn text<'a>(text: *const c_char) -> Option<Cow<'a, str>> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// # Safety
/// `data` holds n of them, or is null, or n is 0.
unsafe fn slice<'a, T>(data: *const T, n: usize) -> &'a [T] {
    if n == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, n) }
}

/// # Safety
/// As [`slice`], and nobody else uses the memory meanwhile.
unsafe fn slice_mut<'a, T>(data: *mut T, n: usize) -> &'a mut [T] {
    if n == 0 || data.is_null() {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(data, n) }
}

/// # Safety
/// The pointers are null or descriptions.
unsafe fn tensors<'a, const N: usize>(tensors: [*const Tensor; N]) -> Result<[&'a Tensor; N], String> {
    if tensors.iter().any(|t| t.is_null()) {
        return Err("a tensor of the op is not there".into());
    }
    // SAFETY: the caller's promise.
    Ok(tensors.map(|t| unsafe { &*t }))
}

/// The number of a thread, and of how many.
fn thread(ith: c_int, nth: c_int) -> Result<(usize, usize), String> {
    match (usize::try_from(ith), usize::try_from(nth)) {
        (Ok(i), Ok(n)) if i < n => Ok((i, n)),
        _ => Err(format!("there is no thread {ith} of {nth}")),
    }
}

/// A thread's share of an op on tensors.
///
/// # Safety
/// The pointers are null or descriptions.
unsafe fn share<'a, const N: usize>(
    given: [*const Tensor; N],
    ith: c_int,
    nth: c_int,
    op: impl FnOnce([&'a Tensor; N], usize, usize) -> Result<(), String>,
) -> Result<(), String> {
    let (ith, nth) = thread(ith, nth)?;
    // SAFETY: the caller's promise.
    op(unsafe { tensors(given) }?, ith, nth)
}

/// Negative counts are nothing.
fn count(n: i32) -> usize {
    usize::try_from(n).unwrap_or(0)
}

#[cfg(test)]
mod tests;
