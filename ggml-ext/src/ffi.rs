//! The C boundary: include/ggml-ext.h. Nothing unwinds across it.

use crate::attention::{self, Attention, AttentionOp, Phase};
use crate::codec::format::RowFormat;
use crate::guard::{self, Weights};
use crate::isa::{self, Kernels};
use crate::lanes::Lanes;
use crate::metal;
use crate::rows;
use crate::spec::{self, registry, Keeps, Layer, Member, Side, Spec};
use crate::state;
use crate::table::{self, Concrete, Entry, Family};
use crate::tensor::Tensor;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Mutex, OnceLock, PoisonError};

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
    quantized: bool,
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
        serves_k: f.serves(Side::K),
        serves_v: f.serves(Side::V),
        group_cells: f.at(128).map_or(1, |c| c.group_cells() as i32),
        quantized: true,
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
        serves_k: c.family.serves(Side::K),
        serves_v: c.family.serves(Side::V),
        group_cells: c.group_cells() as i32,
        quantized: true,
    }
}

fn spec_row(id: i32, spec: &'static Spec) -> CType {
    let serves = |side| spec.members().all(|m| m.check_side(side).is_ok());
    CType {
        id,
        name: leak(spec.text()),
        family: leak(&spec.default().name()),
        head_size: 0,
        row_bytes: 0,
        bits: spec.default().bits_per_value(),
        serves_k: serves(Side::K),
        serves_v: serves(Side::V),
        group_cells: 1,
        quantized: spec.members().any(Member::is_quantized),
    }
}

/// One row a spec, made when it is first asked for and kept as long as the spec.
fn spec_row_of(id: i32) -> Option<&'static CType> {
    static ROWS: Mutex<Option<HashMap<i32, &'static CType>>> = Mutex::new(None);
    let spec = registry::by_id(id)?;
    let mut rows = ROWS.lock().unwrap_or_else(PoisonError::into_inner);
    Some(rows.get_or_insert_default().entry(id).or_insert_with(|| Box::leak(Box::new(spec_row(id, spec)))))
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

/// Runs `f` for a caller with room for a message: what an error or a panic says, terminated, and `otherwise` beside it. It is
/// empty where `f` succeeds and has written none.
///
/// # Safety
/// `err` is null or has room for `err_size` bytes.
unsafe fn answered<T>(otherwise: T, err: *mut c_char, err_size: usize, f: impl FnOnce() -> Result<T, String>) -> T {
    // SAFETY: the caller's promise.
    let say = |message: &str| unsafe { write_message(message, err, err_size) };
    say("");
    let f = || {
        #[cfg(test)]
        tests::panic_where_asked();
        f()
    };
    let message = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(answer)) => return answer,
        Ok(Err(message)) => message,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("an error inside of ggml-ext, please report it: {}", text.unwrap_or("it says nothing"))
        }
    };
    say(&message);
    otherwise
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
        if id >= registry::SPEC_BASE {
            return spec_row_of(id).map_or(std::ptr::null(), std::ptr::from_ref);
        }
        let rows = type_rows();
        rows.binary_search_by_key(&id, |r| r.id).map_or(std::ptr::null(), |i| &rows[i])
    })
}

/// # Safety
/// `name` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_type_from_name(name: *const c_char) -> i32 {
    // SAFETY: the caller's promise; a message is not asked for.
    unsafe { ggml_ext_type_parse(name, std::ptr::null_mut(), 0) }
}

/// # Safety
/// `text` is null or a C string; `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_type_parse(text: *const c_char, err: *mut c_char, err_size: usize) -> i32 {
    let parse = || {
        if text.is_null() {
            return Err("no cache type given".into());
        }
        // SAFETY: the caller's promise.
        let text = unsafe { CStr::from_ptr(text) };
        // Bytes that are no text become marks that no name has, so the error shows where they are.
        registry::id_of(&text.to_string_lossy())
    };
    // SAFETY: the caller's promise.
    unsafe { answered(-1, err, err_size, parse) }
}

/// # Safety
/// None needed.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_family_names() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    guarded(c"".as_ptr(), || NAMES.get_or_init(|| CString::new(table::family_names()).unwrap_or_default()).as_ptr())
}

/// # Safety
/// `shader` is a terminated string.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_metal_source(shader: *const c_char) -> *const c_char {
    // SAFETY: the caller's promise.
    let shader = unsafe { CStr::from_ptr(shader) };
    guarded(std::ptr::null(), || shader.to_str().ok().and_then(metal::source).map_or(std::ptr::null(), CStr::as_ptr))
}

/// What a cache type stands for.
enum Asked {
    Spec(&'static Spec),
    Member(Member),
    /// A type of ggml's that its tools do not offer for a cache: llama.cpp decides.
    Ggml,
}

impl Asked {
    fn new(id: i32, is_ggml: bool, side: Side) -> Result<Asked, String> {
        match (registry::by_id(id), Member::by_id(id)) {
            (Some(spec), _) => Ok(Asked::Spec(spec)),
            (None, Some(member)) => Ok(Asked::Member(member)),
            (None, None) if is_ggml => Ok(Asked::Ggml),
            (None, None) => Err(format!("{side} cache type {id} does not exist: there are {}", spec::names())),
        }
    }

    fn check(&self, side: Side, n_layer: usize) -> Result<(), String> {
        match self {
            Asked::Spec(spec) => spec.check(side, n_layer),
            Asked::Member(member) => member.check_side(side),
            Asked::Ggml => Ok(()),
        }
    }

    /// The first of its types that is coded, if it is more than one of ggml's alone.
    fn compressed(&self) -> Option<String> {
        match self {
            Asked::Spec(spec) => spec.members().find(|m| m.is_quantized()).map(Member::name),
            Asked::Member(member @ Member::Ours(_)) => Some(member.name()),
            Asked::Member(_) | Asked::Ggml => None,
        }
    }
}

/// Why llama.cpp computes an architecture's attention without flash attention, whatever was asked for.
fn no_flash_attention(arch: &str) -> Option<&'static str> {
    match arch {
        "grok" => Some("which llama.cpp turns off for grok"),
        "t5" => Some("which has no room for the bias that t5 adds to its scores"),
        _ => None,
    }
}

/// # Safety
/// `arch` is null or ends with a zero; `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_check_cache(
    type_k: i32,
    is_ggml_k: bool,
    type_v: i32,
    is_ggml_v: bool,
    n_layer: i32,
    arch: *const c_char,
    flash_attn_off: bool,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    let arch = match arch.is_null() {
        true => "",
        // SAFETY: the caller's promise.
        false => unsafe { CStr::from_ptr(arch) }.to_str().unwrap_or_default(),
    };
    let check = || {
        let n_layer = usize::try_from(n_layer).unwrap_or(0);
        Asked::new(type_k, is_ggml_k, Side::K)?.check(Side::K, n_layer)?;
        let v = Asked::new(type_v, is_ggml_v, Side::V)?;
        v.check(Side::V, n_layer)?;
        match v.compressed() {
            Some(name) if no_flash_attention(arch).is_some() => Err(format!(
                "V cache type {name} needs flash attention, {}: use f16, bf16 or f32 for V; K may keep its type",
                no_flash_attention(arch).unwrap_or_default()
            )),
            Some(name) if flash_attn_off => Err(format!(
                "V cache type {name} needs flash attention: turn it on (-fa on), or use f16, bf16 or f32 for V"
            )),
            _ => Ok(true),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// # Safety
/// `layers` is null or has `n_layer` bytes; `message` has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_idle_parts(
    id: i32,
    layers: *const u8,
    n_layer: i32,
    message: *mut c_char,
    size: usize,
) {
    let find = || {
        let idle = match (registry::by_id(id), usize::try_from(n_layer)) {
            (Some(spec), Ok(n)) if !layers.is_null() => {
                // SAFETY: the caller's promise.
                let layers = unsafe { std::slice::from_raw_parts(layers, n) };
                let keeps = |&layer: &u8| match layer {
                    b'-' => Keeps::Nothing,
                    b'w' => Keeps::Window,
                    _ => Keeps::All,
                };
                spec.idle_parts(&layers.iter().map(keeps).collect::<Vec<_>>())
            }
            _ => Vec::new(),
        };
        // SAFETY: the caller's promise.
        unsafe { write_message(&idle.join("; "), message, size) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { answered((), message, size, find) }
}

/// `struct ggml_ext_layer`.
#[repr(C)]
pub struct CLayer {
    index: i32,
    n_layer: i32,
    head_size: i32,
    sliding: bool,
    scale: f32,
    k_bias: *const f32,
    n_k_bias: i32,
    q_norm: *const f32,
    n_q_norm: i32,
    k_norm: *const f32,
    n_k_norm: i32,
}

impl CLayer {
    fn layer(&self) -> Layer {
        let count = |n: i32| usize::try_from(n).unwrap_or(0);
        Layer {
            index: count(self.index),
            n_layer: count(self.n_layer),
            head_size: count(self.head_size),
            sliding: self.sliding,
        }
    }

    /// # Safety
    /// The arrays are as long as said.
    unsafe fn weights(&self) -> Weights<'_> {
        // SAFETY: the caller's promise.
        let slice = |data: *const f32, n: i32| match usize::try_from(n) {
            Ok(n) if n > 0 && !data.is_null() => unsafe { std::slice::from_raw_parts(data, n) },
            _ => &[],
        };
        Weights {
            k_bias: slice(self.k_bias, self.n_k_bias),
            q_norm: slice(self.q_norm, self.n_q_norm),
            k_norm: slice(self.k_norm, self.n_k_norm),
            scale: self.scale,
        }
    }
}

/// The type of a layer's tensor, and what the guard has to say of it.
fn resolve(id: i32, side: Side, layer: &Layer, weights: &Weights) -> Result<(i32, Option<String>), String> {
    let (member, guarded) = match registry::by_id(id) {
        Some(spec) => {
            spec.check(side, layer.n_layer)?;
            let (member, named) = spec.member(layer);
            (member, spec.guard && !named)
        }
        None => match table::by_id(id) {
            Some(ours) => (Member::Ours(ours), true),
            None => return Ok((id, None)),
        },
    };
    // What cannot be had at all is an error, not something to raise.
    let asked = member.resolve(side, layer)?;
    match guarded.then(|| guard::raise(member, side, layer, weights)).flatten() {
        Some(raised) => Ok((raised.to.resolve(side, layer)?, Some(raised.reason))),
        None => Ok((asked, None)),
    }
}

/// # Safety
/// `layer` is null or a description with arrays as long as said; `message` has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_resolve(
    id: i32,
    side: c_char,
    layer: *const CLayer,
    message: *mut c_char,
    size: usize,
) -> i32 {
    let find = || {
        let side = if (side as u8).eq_ignore_ascii_case(&b'v') { Side::V } else { Side::K };
        // SAFETY: the caller's promise.
        let layer = unsafe { layer.as_ref() }.ok_or("no layer given")?;
        // SAFETY: the caller's promise.
        let (id, raised) = resolve(id, side, &layer.layer(), &unsafe { layer.weights() })?;
        // SAFETY: the caller's promise.
        unsafe { write_message(&raised.unwrap_or_default(), message, size) };
        Ok(id)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(-1, message, size, find) }
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
            rows::encode_cells(c.format(), kernels, x, out);
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
            rows::decode_cells(c.format(), kernels, stored, out);
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
        let f = c.format();
        if f.grouped().is_some() {
            return false;
        }
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
    let check = || {
        // SAFETY: the caller's promise.
        let op = unsafe { op.as_ref() }.ok_or("no attention given")?;
        Attention::new(op).map(|_| true)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
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
    phase: Phase,
    step: unsafe fn(&Attention, usize, usize, *mut u8),
) -> bool {
    let attempt = || -> Result<(), String> {
        // SAFETY: the caller's promise.
        let op = unsafe { op.as_ref() }.ok_or("no attention given")?;
        let (ith, nth) = (ith as usize, nth as usize);
        let a = match Attention::new(op).and_then(|a| a.check_data().map(|()| a)) {
            Ok(a) => a,
            // SAFETY: the caller's promise; all threads refuse, and one writes.
            Err(reason) => return Err(unsafe { rows::refuse(&op.dst, ith, reason) }),
        };
        let need = a.work_size(nth);
        // SAFETY: the caller promises tensors as described; the work memory is checked before it is used.
        unsafe {
            if work.is_null() || work_size < need {
                a.poison(phase, ith, nth, None);
                return Err(format!("attention needs {need} bytes of work memory, got {work_size}"));
            }
            catch_unwind(AssertUnwindSafe(|| step(&a, ith, nth, work))).map_err(|_| {
                a.poison(phase, ith, nth, Some(work));
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
    unsafe {
        attention_step(op, ith, nth, work, work_size, Phase::Compute, |a, ith, nth, work| a.compute(ith, nth, work))
    }
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
    unsafe {
        attention_step(op, ith, nth, work, work_size, Phase::Finish, |a, ith, nth, work| a.finish(ith, nth, work))
    }
}

/// # Safety
/// Descriptions; data is not looked at.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_mul_mat_supports(k: *const Tensor, q: *const Tensor, dst: *const Tensor) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { attention::check_mul_mat(&*k, &*q, &*dst).is_ok() })
}

/// # Safety
/// Memory is as described.
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
pub unsafe extern "C" fn ggml_ext_set_rows_supports(
    dst: *const Tensor,
    src: *const Tensor,
    index: *const Tensor,
) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { rows::check_set_rows(&*dst, &*src, &*index).is_ok() })
}

/// # Safety
/// Memory is as described.
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
pub unsafe extern "C" fn ggml_ext_get_rows_supports(
    dst: *const Tensor,
    src: *const Tensor,
    index: *const Tensor,
) -> bool {
    // SAFETY: the caller's promise.
    guarded(false, || unsafe { rows::check_get_rows(&*dst, &*src, &*index).is_ok() })
}

/// # Safety
/// Memory is as described.
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
    guarded(false, || unsafe { rows::check_copy(&*dst, &*src).is_ok() })
}

/// # Safety
/// Memory is as described.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_copy(dst: *const Tensor, src: *const Tensor, ith: c_int, nth: c_int) -> bool {
    // SAFETY: the caller's promise.
    report(|| unsafe { rows::copy(&*dst, &*src, ith as usize, nth as usize) })
}

/// # Safety
/// Memory is as described, and no thread uses it.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_not_served(dst: *const Tensor) {
    // SAFETY: the caller's promise.
    guarded((), || unsafe { (*dst).fill_nan() });
}

/// `struct ggml_ext_state_layer`.
#[repr(C)]
pub struct CStateLayer {
    index: u32,
    type_k: i32,
    type_v: i32,
    n_k: u32,
    n_v: u32,
    bytes_k: u64,
    bytes_v: u64,
}

/// `struct ggml_ext_state_cache`.
#[repr(C)]
pub struct CStateCache {
    streams: u32,
    cells: u32,
    sequences: u32,
    v_transposed: bool,
    rotated: bool,
    extension: u32,
    layers: *const CStateLayer,
    n_layers: usize,
    ranges: *const state::Range,
    n_ranges: usize,
}

/// `struct ggml_ext_state`.
#[repr(C)]
pub struct CState {
    one_sequence: bool,
    foreign: u32,
    meta_bytes: u64,
    meta_sum: u64,
    data_bytes: u64,
    caches: *const CStateCache,
    n_caches: usize,
    n_known: usize,
    others: bool,
}

/// # Safety
/// `data` holds n of them, or n is 0.
unsafe fn slice<'a, T>(data: *const T, n: usize) -> &'a [T] {
    if n == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, n) }
}

impl CStateCache {
    /// # Safety
    /// The arrays are as long as said.
    unsafe fn cache(&self) -> state::Cache {
        let layer = |l: &CStateLayer| state::Layer {
            index: l.index,
            k: if l.type_k < 0 { state::Side::NONE } else { state::Side::new(l.type_k, l.n_k, l.bytes_k) },
            v: if l.type_v < 0 { state::Side::NONE } else { state::Side::new(l.type_v, l.n_v, l.bytes_v) },
        };
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        // SAFETY: the caller's promise.
        let (layers, ranges) = unsafe { (slice(self.layers, self.n_layers), slice(self.ranges, self.n_ranges)) };
        state::Cache {
            streams: self.streams,
            cells: self.cells,
            sequences: self.sequences,
            flags: flag(self.v_transposed, state::V_TRANSPOSED) | flag(self.rotated, state::ROTATED),
            layers: layers.iter().map(layer).collect(),
            ranges: ranges.to_vec(),
        }
    }
}

impl CState {
    /// # Safety
    /// The arrays are as long as said.
    unsafe fn header(&self) -> state::Header {
        state::Header {
            kind: u32::from(self.one_sequence),
            foreign: self.foreign,
            meta_bytes: self.meta_bytes,
            meta_sum: self.meta_sum,
            data_bytes: self.data_bytes,
            // SAFETY: the caller's promise.
            caches: unsafe { slice(self.caches, self.n_caches).iter().map(|c| c.cache()).collect() },
        }
    }

    /// # Safety
    /// The arrays are as long as said.
    unsafe fn context(&self) -> state::Context {
        // SAFETY: the caller's promise.
        let (live, extensions) =
            unsafe { (self.header(), slice(self.caches, self.n_caches).iter().map(|c| c.extension).collect()) };
        state::Context { live, extensions, known: self.n_known, others: self.others }
    }
}

/// # Safety
/// `state` is a description with arrays as long as said; `dst` has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_header(state: *const CState, dst: *mut u8, size: usize) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        unsafe {
            let Some(state) = state.as_ref() else { return 0 };
            let bytes = state.header().to_bytes();
            if !dst.is_null() && bytes.len() <= size {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst, bytes.len());
            }
            bytes.len()
        }
    })
}

/// # Safety
/// `prefix` holds GGML_EXT_STATE_PREFIX bytes, `context` is a description, `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_header_rest(
    prefix: *const u8,
    context: *const CState,
    err: *mut c_char,
    err_size: usize,
) -> i64 {
    let count = || {
        // SAFETY: the caller's promise.
        let (context, prefix) = unsafe { (context.as_ref(), slice(prefix, state::PREFIX_BYTES)) };
        // SAFETY: the caller's promise.
        Ok(unsafe { context.ok_or("no context given")?.context() }.body_bytes(prefix)? as i64)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(-1, err, err_size, count) }
}

/// # Safety
/// `header` holds `size` bytes, `context` is a description, `found` may be written, `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_check(
    header: *const u8,
    size: usize,
    context: *const CState,
    found: *mut CState,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    let check = || {
        // SAFETY: the caller's promise.
        unsafe {
            let header = state::Header::from_bytes(slice(header, size))?;
            context.as_ref().ok_or("no context given")?.context().check(&header)?;
            if let Some(found) = found.as_mut() {
                found.one_sequence = header.kind == 1;
                found.foreign = header.foreign;
                found.meta_bytes = header.meta_bytes;
                found.meta_sum = header.meta_sum;
                found.data_bytes = header.data_bytes;
            }
        }
        Ok(true)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// # Safety
/// `header` and `meta` hold so many bytes, `context` is a description, `err` has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_check_meta(
    header: *const u8,
    size: usize,
    context: *const CState,
    meta: *const u8,
    meta_size: usize,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    let check = || {
        // SAFETY: the caller's promise.
        unsafe {
            let header = state::Header::from_bytes(slice(header, size))?;
            context.as_ref().ok_or("no context given")?.context().check_meta(&header, slice(meta, meta_size))?;
        }
        Ok(true)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// # Safety
/// `header` holds `size` bytes, `dst` has room for n ranges, `cells` may be written.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_ranges(
    header: *const u8,
    size: usize,
    cache: usize,
    dst: *mut state::Range,
    n: usize,
    cells: *mut u32,
) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        unsafe {
            let Ok(header) = state::Header::from_bytes(slice(header, size)) else { return 0 };
            let Some(cache) = header.caches.get(cache) else { return 0 };
            if let Some(cells) = cells.as_mut() {
                *cells = cache.cells;
            }
            let written = n.min(cache.ranges.len());
            if written > 0 && !dst.is_null() {
                std::ptr::copy_nonoverlapping(cache.ranges.as_ptr(), dst, written);
            }
            cache.ranges.len()
        }
    })
}

/// # Safety
/// `data` holds `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_checksum(data: *const u8, size: usize) -> u64 {
    // SAFETY: the caller's promise.
    guarded(0, || state::checksum(&[unsafe { slice(data, size) }]))
}

/// # Safety
/// The arrays are as long as said.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_place(
    cells: *const u32,
    n: usize,
    source_cells: u32,
    free: *const bool,
    n_free: usize,
    group_cells: i32,
    to: *mut u32,
) -> bool {
    guarded(false, || {
        let Some(group) = usize::try_from(group_cells).ok().filter(|&g| g > 0) else { return false };
        // SAFETY: the caller's promise.
        unsafe {
            let Some(placed) = state::place_groups(slice(cells, n), source_cells, slice(free, n_free), group) else {
                return false;
            };
            std::ptr::copy_nonoverlapping(placed.as_ptr(), to, n);
        }
        true
    })
}

/// # Safety
/// `src` and `dst` hold their cells of so many heads; `from` and `to` hold n cells each.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_recode(
    id: i32,
    heads: i32,
    src: *const u8,
    src_cells: usize,
    dst: *mut u8,
    dst_cells: usize,
    from: *const u32,
    to: *const u32,
    n: usize,
) -> bool {
    let src = state::Rows { data: src.cast_mut(), cells: src_cells };
    let dst = state::Rows { data: dst, cells: dst_cells };
    // SAFETY: the caller's promise; what is read is not written.
    report(|| unsafe { state::recode(id, usize::try_from(heads).unwrap_or(0), src, dst, slice(from, n), slice(to, n)) })
}

/// # Safety
/// `rows` holds so many cells of so many heads from the beginning of a group on, and is the caller's alone; `keep` has a
/// flag for each cell.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_keep(
    id: i32,
    heads: i32,
    rows: *mut u8,
    cells: usize,
    keep: *const bool,
) -> bool {
    let rows = state::Rows { data: rows, cells };
    // SAFETY: the caller's promise.
    report(|| unsafe { state::keep(id, usize::try_from(heads).unwrap_or(0), rows, slice(keep, cells)) })
}

/// # Safety
/// None needed.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_isa() -> *const c_char {
    static NAME: OnceLock<CString> = OnceLock::new();
    guarded(c"".as_ptr(), || NAME.get_or_init(|| CString::new(isa::kernels().name).unwrap_or_default()).as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{dense, Cache};
    use std::cell::Cell;

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(guarded(7, || panic!("injected")), 7);
        assert!(!report(|| panic!("injected")));
        assert!(!report(|| Err("a reason".into())) && report(|| Ok(())));
    }

    thread_local! {
        static PANIC: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn panic_where_asked() {
        if PANIC.take() {
            panic!("injected");
        }
    }

    /// What a function leaves in a caller's buffer that nobody initialised, and what it answers.
    fn message_of<T>(call: impl FnOnce(*mut c_char, usize) -> T) -> (T, String) {
        let mut buffer = [0x5au8; 256];
        let answer = call(buffer.as_mut_ptr().cast(), buffer.len() - 1);
        assert_eq!(buffer[buffer.len() - 1], 0x5a, "it was written behind the buffer");
        let message = CStr::from_bytes_until_nul(&buffer).expect("a message is terminated");
        (answer, message.to_str().expect("it is text").to_string())
    }

    #[test]
    fn messages_are_written_whatever_happens() {
        let layer = CLayer {
            index: 0,
            n_layer: 2,
            head_size: 64,
            sliding: false,
            scale: 0.125,
            k_bias: std::ptr::null(),
            n_k_bias: 0,
            q_norm: std::ptr::null(),
            n_q_norm: 0,
            k_norm: std::ptr::null(),
            n_k_norm: 0,
        };
        let id = registry::id_of("srft4").expect("a family");
        let spec = registry::id_of("srft4,0=srft8").expect("a spec");
        let (null, none) = (std::ptr::null(), std::ptr::null_mut());
        // Each answers 1 where it succeeds. SAFETY of all: what is pointed to is there or null, and the buffer as large as said.
        type Call<'a> = (&'a str, &'a dyn Fn(*mut c_char, usize) -> bool);
        let calls: [Call; 8] = [
            ("parse", &|err, n| unsafe { ggml_ext_type_parse(c"srft4".as_ptr(), err, n) >= 0 }),
            ("check_cache", &|err, n| unsafe {
                ggml_ext_check_cache(id, false, id, false, 2, std::ptr::null(), false, err, n)
            }),
            ("idle_parts", &|err, n| unsafe {
                ggml_ext_idle_parts(spec, b"aa".as_ptr(), 2, err, n);
                true
            }),
            ("resolve", &|err, n| unsafe { ggml_ext_resolve(id, b'k' as c_char, &layer, err, n) >= 0 }),
            ("attention_supports", &|err, n| unsafe { ggml_ext_attention_supports(null, err, n) }),
            ("state_header_rest", &|err, n| unsafe {
                ggml_ext_state_header_rest(null.cast(), null.cast(), err, n) >= 0
            }),
            ("state_check_meta", &|err, n| unsafe {
                ggml_ext_state_check_meta(null.cast(), 0, null.cast(), null.cast(), 0, err, n)
            }),
            ("state_check", &|err, n| unsafe { ggml_ext_state_check(null.cast(), 0, null.cast(), none, err, n) }),
        ];
        for (name, call) in calls {
            // The last four are given nothing, and say so.
            let (ok, said) = message_of(call);
            assert_eq!(said.is_empty(), ok, "{name}: {said:?}");
            PANIC.set(true);
            let (ok, said) = message_of(call);
            assert!(!PANIC.take(), "{name} has its message from somewhere else");
            assert!(said.contains("injected"), "{name}: {said:?}");
            assert!(!ok || name == "idle_parts", "{name}: a panic is no success");
            // No room, or none wanted.
            PANIC.set(true);
            call(std::ptr::null_mut(), 0);
            assert!(!PANIC.take());
        }
    }

    /// One query on two heads over a few cells, with `threads` threads of which the last one panics in `compute`.
    fn attention_that_panics(threads: c_int) -> (bool, Vec<f32>) {
        let kind = "srft4".parse().expect("a family");
        let mut cache = Cache::new(kind, 64, 1, 600).expect("64 is served");
        cache.write(0, &vec![0.5; 600 * 64]).expect("all cells");
        let (q, mut out) = (vec![0.5f32; 2 * 64], vec![0.0f32; 2 * 64]);
        let op = AttentionOp {
            q: dense(0, 4, q.as_ptr().cast(), [64, 1, 2]),
            k: cache.attention_tensor(600),
            v: cache.attention_tensor(600),
            dst: dense(0, 4, out.as_mut_ptr().cast(), [64, 2, 1]),
            mask: std::ptr::null(),
            sinks: std::ptr::null(),
            scale: 0.125,
            max_bias: 0.0,
            logit_softcap: 0.0,
        };
        // SAFETY: tensors as described, and the memory that is asked for.
        let mut work = vec![0u8; unsafe { ggml_ext_attention_work_size(&op, threads) }];
        let (memory, size) = (work.as_mut_ptr(), work.len());
        let mut ok = true;
        for i in 0..threads {
            // SAFETY: as above, one after the other.
            ok &= unsafe {
                if i + 1 == threads {
                    attention_step(&op, i, threads, memory, size, Phase::Compute, |_, _, _, _| panic!("injected"))
                } else {
                    ggml_ext_attention_compute(&op, i, threads, memory, size)
                }
            };
        }
        for i in 0..threads {
            // SAFETY: as above, after every compute.
            ok &= unsafe { ggml_ext_attention_finish(&op, i, threads, memory, size) };
        }
        (ok, out)
    }

    #[test]
    fn attention_that_panics_says_so_and_leaves_no_garbage() {
        for threads in [1, 2, 3] {
            let (ok, out) = attention_that_panics(threads);
            assert!(!ok, "{threads} threads: nobody was told");
            assert!(out.iter().all(|x| x.is_nan()), "{threads} threads: {:?}", &out[..4]);
        }
    }

    #[test]
    fn every_function_that_c_calls_is_guarded() {
        let source = include_str!("ffi.rs").split("mod tests {").next().unwrap_or_default();
        let exported: Vec<&str> = source.split("#[no_mangle]\n").skip(1).collect();
        assert!(exported.len() > 20, "{} functions", exported.len());
        for text in exported {
            let body = text.split("\n}\n").next().unwrap_or_default();
            let guards =
                ["guarded(", "answered(", "report(", "attention_step(", "encode_rows(", "ggml_ext_type_parse("];
            assert!(guards.iter().any(|g| body.contains(g)), "it could unwind into C:\n{body}");
            let has_buffer = ["err: *mut c_char", "message: *mut c_char"].iter().any(|p| body.contains(p));
            assert!(!has_buffer || body.contains("answered("), "a panic would leave no message:\n{body}");
        }
    }
}
