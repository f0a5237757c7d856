//! The C boundary: include/ggml-ext.h. Nothing unwinds across it.

use crate::attention::{self, Attention, AttentionOp};
use crate::groups;
use crate::isa::{self, Kernels};
use crate::lanes::Lanes;
use crate::rows;
use crate::table::{self, Concrete, Entry, Family, Storage};
use crate::tensor::Tensor;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::OnceLock;

/// `struct ggml_ext_type`.
#[repr(C)]
pub struct CType {
    id: i32,
    name: *const c_char,
    family: *const c_char,
    head_size: i32,
    row_bytes: usize,
    bits: f64,
    serves_k: bool,
    serves_v: bool,
    group_cells: i32,
}

// SAFETY: the strings are leaked and never written.
unsafe impl Send for CType {}
// SAFETY: as above.
unsafe impl Sync for CType {}

fn leak(s: &str) -> *const c_char {
    CString::new(s).unwrap_or_default().into_raw()
}

fn family_row(f: &'static Family) -> CType {
    CType {
        id: f.id(),
        name: leak(f.name),
        family: leak(f.name),
        head_size: 0,
        row_bytes: 0,
        bits: f.at(128).map_or(0.0, Concrete::bits_per_value),
        serves_k: f.serves_k,
        serves_v: f.serves_v,
        group_cells: f.at(128).map_or(1, |c| c.group_cells() as i32),
    }
}

fn concrete_row(c: Concrete) -> CType {
    CType {
        id: c.id(),
        name: leak(&c.name()),
        family: leak(c.family.name),
        head_size: c.head_size as i32,
        row_bytes: c.row_bytes(),
        bits: c.bits_per_value(),
        serves_k: c.family.serves_k,
        serves_v: c.family.serves_v,
        group_cells: c.group_cells() as i32,
    }
}

fn type_rows() -> &'static [CType] {
    static ROWS: OnceLock<Vec<CType>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let mut rows: Vec<CType> =
            table::concrete().map(concrete_row).chain(table::families().iter().map(family_row)).collect();
        rows.sort_by_key(|r| r.id);
        rows
    })
}

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

unsafe fn write_message(message: &str, err: *mut c_char, size: usize) {
    if err.is_null() || size == 0 {
        return;
    }
    let mut n = message.len().min(size - 1);
    while !message.is_char_boundary(n) {
        n -= 1;
    }
    // SAFETY: the caller has room for `size` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(message.as_ptr(), err.cast(), n);
        *err.add(n) = 0;
    }
}

/// # Safety
/// None needed; unsafe only as part of the C boundary.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_type_get(id: i32) -> *const CType {
    guarded(std::ptr::null(), || {
        let rows = type_rows();
        rows.binary_search_by_key(&id, |r| r.id).map_or(std::ptr::null(), |i| &rows[i])
    })
}

/// # Safety
/// `name` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_type_from_name(name: *const c_char) -> i32 {
    guarded(-1, || {
        if name.is_null() {
            return -1;
        }
        // SAFETY: the caller's promise.
        let name = unsafe { CStr::from_ptr(name) };
        match name.to_str().ok().and_then(table::by_name) {
            Some(Entry::Family(f)) => f.id(),
            Some(Entry::Concrete(c)) => c.id(),
            None => -1,
        }
    })
}

/// # Safety
/// None needed.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_family_names() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    guarded(c"".as_ptr(), || NAMES.get_or_init(|| CString::new(table::family_names()).unwrap_or_default()).as_ptr())
}

fn check_side(id: i32, is_ggml: bool, side: char) -> Result<bool, String> {
    let ids = || format!("there are f16, bf16, q8_0, q4_0 and others of ggml's, and {}", table::family_names());
    match table::by_id(id) {
        None if is_ggml => Ok(false),
        None => Err(format!("{side} cache type {id} does not exist: {}", ids())),
        Some(Entry::Concrete(c)) => serves(c.family, side).map(|()| true),
        Some(Entry::Family(f)) => serves(f, side).map(|()| true),
    }
}

fn serves(f: &Family, side: char) -> Result<(), String> {
    let ok = if side == 'K' { f.serves_k } else { f.serves_v };
    let others: Vec<_> = table::families()
        .iter()
        .filter(|f| if side == 'K' { f.serves_k } else { f.serves_v })
        .map(|f| f.name)
        .collect();
    if ok {
        Ok(())
    } else {
        let why = if f.refusal.is_empty() { String::new() } else { format!(" ({})", f.refusal) };
        Err(format!("{} is not for {side}{why}: use {}", f.name, others.join(", ")))
    }
}

/// # Safety
/// `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_check_cache(
    type_k: i32,
    is_ggml_k: bool,
    type_v: i32,
    is_ggml_v: bool,
    flash_attn_off: bool,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    let check = || -> Result<(), String> {
        check_side(type_k, is_ggml_k, 'K')?;
        let ours = check_side(type_v, is_ggml_v, 'V')?;
        if ours && flash_attn_off {
            let name = match table::by_id(type_v) {
                Some(Entry::Family(f)) => f.name.to_string(),
                Some(Entry::Concrete(c)) => c.name(),
                None => String::new(),
            };
            return Err(format!(
                "V cache type {name} needs flash attention: turn it on (-fa on), or use f16, bf16 or f32 for V"
            ));
        }
        Ok(())
    };
    guarded(false, || match check() {
        Ok(()) => true,
        Err(message) => {
            // SAFETY: the caller's promise.
            unsafe { write_message(&message, err, err_size) };
            false
        }
    })
}

fn resolve(id: i32, side: char, layer: i32, head_size: i32) -> Result<i32, String> {
    let side = side.to_ascii_uppercase();
    let sizes = |f: &Family| f.head_sizes().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let head = usize::try_from(head_size).unwrap_or(0);
    let ggml = if head % 32 == 0 { "f16, bf16, q8_0 or q4_0" } else { "f16 or bf16" };
    match table::by_id(id) {
        None => Ok(id),
        Some(Entry::Family(f)) => f.at(head).map(Concrete::id).ok_or_else(|| {
            format!(
                "layer {layer}: {side} cache type {} does not serve head size {head_size} (it serves {}); use {ggml} for {side} with this model",
                f.name,
                sizes(f)
            )
        }),
        Some(Entry::Concrete(c)) if c.head_size == head => Ok(id),
        Some(Entry::Concrete(c)) => Err(format!(
            "layer {layer}: {side} cache type {} is for heads of {}, this layer has {head_size}; use {} and each layer gets its size",
            c.name(),
            c.head_size,
            c.family.name
        )),
    }
}

/// # Safety
/// `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_resolve(
    id: i32,
    side: c_char,
    layer: i32,
    head_size: i32,
    err: *mut c_char,
    err_size: usize,
) -> i32 {
    guarded(-1, || match resolve(id, side as u8 as char, layer, head_size) {
        Ok(id) => id,
        Err(message) => {
            // SAFETY: the caller's promise.
            unsafe { write_message(&message, err, err_size) };
            -1
        }
    })
}

/// The type of an id and the number of rows that n values are.
fn row_format(id: i32, n: i64) -> Option<(Concrete, usize)> {
    let Some(Entry::Concrete(c)) = table::by_id(id) else { return None };
    let n = usize::try_from(n).ok()?;
    (n % c.head_size == 0).then_some((c, n / c.head_size))
}

unsafe fn encode_rows(id: i32, src: *const f32, dst: *mut u8, n: i64, kernels: fn() -> &'static Kernels) -> bool {
    guarded(false, || {
        let Some((c, rows)) = row_format(id, n) else { return false };
        let (size, bytes, kernels) = (c.head_size, c.row_bytes(), kernels());
        // SAFETY: the caller promises n values and as many rows of bytes.
        unsafe {
            let x = std::slice::from_raw_parts(src, rows * size);
            let out = std::slice::from_raw_parts_mut(dst, rows * bytes);
            match c.storage() {
                Storage::Alone(f) => {
                    x.chunks_exact(size)
                        .zip(out.chunks_exact_mut(bytes))
                        .for_each(|(x, row)| (kernels.encode)(f, x, row));
                }
                Storage::Grouped(f) => groups::encode(f, kernels, x, out),
            }
        }
        true
    })
}

/// # Safety
/// `src` holds n values, `dst` has room for their rows.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_encode(id: i32, src: *const f32, dst: *mut u8, n: i64) -> bool {
    // SAFETY: the caller's promise is passed on.
    unsafe { encode_rows(id, src, dst, n, isa::kernels) }
}

/// # Safety
/// As [`ggml_ext_encode`].
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_encode_ref(id: i32, src: *const f32, dst: *mut u8, n: i64) -> bool {
    // SAFETY: the caller's promise is passed on.
    unsafe { encode_rows(id, src, dst, n, || &isa::scalar::KERNELS) }
}

/// # Safety
/// `src` holds the rows of n values, `dst` has room for them.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_decode(id: i32, src: *const u8, dst: *mut f32, n: i64) -> bool {
    guarded(false, || {
        let Some((c, rows)) = row_format(id, n) else { return false };
        let (size, bytes, kernels) = (c.head_size, c.row_bytes(), isa::kernels());
        // SAFETY: the caller's promise.
        unsafe {
            let stored = std::slice::from_raw_parts(src, rows * bytes);
            let out = std::slice::from_raw_parts_mut(dst, rows * size);
            match c.storage() {
                Storage::Alone(f) => {
                    stored
                        .chunks_exact(bytes)
                        .zip(out.chunks_exact_mut(size))
                        .for_each(|(row, x)| (kernels.decode)(f, row, x));
                }
                Storage::Grouped(f) => groups::decode(f, kernels, stored, out),
            }
        }
        true
    })
}

/// # Safety
/// As [`ggml_ext_decode`].
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_decode_key(id: i32, src: *const u8, dst: *mut f32, n: i64) -> bool {
    guarded(false, || {
        let Some((c, rows)) = row_format(id, n) else { return false };
        let Some(f) = c.format() else { return false };
        for r in 0..rows {
            // SAFETY: the caller's promise.
            unsafe {
                let row = std::slice::from_raw_parts(src.add(r * f.row_bytes()), f.row_bytes());
                f.decode_key::<Lanes>(row, std::slice::from_raw_parts_mut(dst.add(r * f.size()), f.size()));
            }
        }
        true
    })
}

/// # Safety
/// `op` is a description; `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_supports(
    op: *const AttentionOp,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    guarded(false, || {
        // SAFETY: the caller's promise.
        let Some(op) = (unsafe { op.as_ref() }) else { return false };
        match Attention::new(op) {
            Ok(_) => true,
            Err(message) => {
                // SAFETY: the caller's promise.
                unsafe { write_message(&message, err, err_size) };
                false
            }
        }
    })
}

/// # Safety
/// `op` is a description.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_work_size(op: *const AttentionOp, n_threads: c_int) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        let op = unsafe { op.as_ref() };
        op.and_then(|op| Attention::new(op).ok())
            .map_or(0, |a| a.work_size(usize::try_from(n_threads).unwrap_or(1).max(1)))
    })
}

unsafe fn attention_step(
    op: *const AttentionOp,
    ith: c_int,
    nth: c_int,
    work: *mut u8,
    work_size: usize,
    step: unsafe fn(&Attention, usize, usize, *mut u8),
) -> bool {
    let attempt = || -> Result<(), String> {
        // SAFETY: the caller's promise.
        let op = unsafe { op.as_ref() }.ok_or("no attention given")?;
        let a = Attention::new(op)?;
        let (ith, nth) = (ith as usize, nth as usize);
        let need = a.work_size(nth);
        // SAFETY: the caller promises tensors as described; the work memory is checked before it is used.
        unsafe {
            if work.is_null() || work_size < need {
                a.poison(ith, nth, None);
                return Err(format!("attention needs {need} bytes of work memory, got {work_size}"));
            }
            catch_unwind(AssertUnwindSafe(|| step(&a, ith, nth, work))).map_err(|_| {
                a.poison(ith, nth, Some(work));
                "attention failed; its result is NaN".to_string()
            })
        }
    };
    report(attempt)
}

/// # Safety
/// The tensors hold what their shapes say; `work` is shared by the threads of one op.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_compute(
    op: *const AttentionOp,
    ith: c_int,
    nth: c_int,
    work: *mut u8,
    work_size: usize,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    unsafe { attention_step(op, ith, nth, work, work_size, |a, ith, nth, work| a.compute(ith, nth, work)) }
}

/// # Safety
/// As [`ggml_ext_attention_compute`], after every thread's has returned.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_attention_finish(
    op: *const AttentionOp,
    ith: c_int,
    nth: c_int,
    work: *mut u8,
    work_size: usize,
) -> bool {
    // SAFETY: the caller's promise is passed on.
    unsafe { attention_step(op, ith, nth, work, work_size, |a, ith, nth, work| a.finish(ith, nth, work)) }
}

/// # Safety
/// Descriptions; data is not looked at.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_mul_mat_supports(k: *const Tensor, q: *const Tensor) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { attention::mul_mat_supports(&*k, &*q) })
}

/// # Safety
/// The tensors hold what their shapes say.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_mul_mat(
    k: *const Tensor,
    q: *const Tensor,
    dst: *const Tensor,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise.
    report(|| unsafe { attention::mul_mat(&*k, &*q, &*dst, ith as usize, nth as usize) })
}

/// # Safety
/// Descriptions; data is not looked at.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_set_rows_supports(dst: *const Tensor, src: *const Tensor) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { rows::set_rows_supports(&*dst, &*src) })
}

/// # Safety
/// The tensors hold what their shapes say.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_set_rows(
    dst: *const Tensor,
    src: *const Tensor,
    index: *const Tensor,
    index_bytes: c_int,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise.
    report(|| unsafe { rows::set_rows(&*dst, &*src, &*index, index_bytes as usize, ith as usize, nth as usize) })
}

/// # Safety
/// Descriptions; data is not looked at.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_get_rows_supports(dst: *const Tensor, src: *const Tensor) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { rows::get_rows_supports(&*dst, &*src) })
}

/// # Safety
/// The tensors hold what their shapes say.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_get_rows(
    dst: *const Tensor,
    src: *const Tensor,
    index: *const Tensor,
    ith: c_int,
    nth: c_int,
) -> bool {
    // SAFETY: the caller's promise.
    report(|| unsafe { rows::get_rows(&*dst, &*src, &*index, ith as usize, nth as usize) })
}

/// # Safety
/// Descriptions; data is not looked at.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_copy_supports(dst: *const Tensor, src: *const Tensor) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { rows::copy_supports(&*dst, &*src) })
}

/// # Safety
/// The tensors hold what their shapes say.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_copy(dst: *const Tensor, src: *const Tensor, ith: c_int, nth: c_int) -> bool {
    // SAFETY: the caller's promise.
    report(|| unsafe { rows::copy(&*dst, &*src, ith as usize, nth as usize) })
}

/// # Safety
/// None needed.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_isa() -> *const c_char {
    guarded(c"".as_ptr(), || match isa::kernels().name {
        "avx512" => c"avx512".as_ptr(),
        "avx2" => c"avx2".as_ptr(),
        "neon" => c"neon".as_ptr(),
        _ => c"scalar".as_ptr(),
    })
}
