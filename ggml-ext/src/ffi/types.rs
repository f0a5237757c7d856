//! The types by id and name, and what the library says of itself.

use super::{answered, guarded, text};
use crate::isa;
use crate::metal;
use crate::spec::{registry, TypeInfo};
use crate::table;
use std::collections::BTreeMap;
use std::ffi::{c_char, CStr, CString};
use std::sync::{OnceLock, PoisonError, RwLock};

/// Ids above ggml's own: GGML_EXT_TYPE_BASE + 16*family + size index is a concrete type (one family at one head
/// size) and is stable for ever, because state files hold it. Size index 15 stands for the family as a whole: it is
/// what a user asks for, and becomes a concrete type per layer (ggml_ext_resolve). No tensor has a family's id.
pub const GGML_EXT_TYPE_BASE: i32 = 128;
/// All ids of families and concrete types are below it.
pub const GGML_EXT_TYPE_LIMIT: i32 = 384;

/// Ids of specs ("srft4,0-1=srft8"): given out one after the other as ggml_ext_type_parse meets new texts, the same
/// text always the same id, good for this process alone. They go wherever a cache type goes and become a concrete type
/// per layer; no tensor and no state file has one.
pub const GGML_EXT_SPEC_BASE: i32 = 0x10000;
/// All ids of specs are below it.
pub const GGML_EXT_SPEC_LIMIT: i32 = 0x20000;

// The generator of the header reads literals alone.
const _: () = assert!(GGML_EXT_TYPE_BASE == table::ID_BASE && GGML_EXT_TYPE_LIMIT <= registry::SPEC_BASE);
const _: () = assert!(GGML_EXT_SPEC_BASE == registry::SPEC_BASE && GGML_EXT_SPEC_LIMIT == registry::SPEC_LIMIT);

/// A cache type of ours: a family, a concrete type or a spec.
#[repr(C)]
pub struct CType {
    /// As asked for.
    id: i32,
    /// "srft4" for a family, "srft4_128" for a concrete type, a spec's text
    name: *const c_char,
    /// "srft4"; of a spec, its first type
    family: *const c_char,
    /// values in a row of one head = ggml's block size; 0 for a family or a spec
    head_size: i32,
    /// bytes of such a row = ggml's type size; 0 for a family or a spec
    row_bytes: usize,
    /// bits per value; for a family, those of head size 128; of a spec, its first type's
    bits: f64,
    /// may hold keys
    serves_k: bool,
    /// may hold values
    serves_v: bool,
    /// cells that are coded together, 1 where each row stands alone
    group_cells: i32,
    /// false for a spec of f32, f16 and bf16 alone
    quantized: bool,
}

// SAFETY: the strings are leaked and never written.
unsafe impl Send for CType {}
// SAFETY: as above.
unsafe impl Sync for CType {}

impl CType {
    /// Its strings stay for the life of the process.
    fn leaked(info: TypeInfo) -> &'static CType {
        let leak = |s: String| CString::new(s).unwrap_or_default().into_raw().cast_const();
        Box::leak(Box::new(CType {
            id: info.id,
            name: leak(info.name),
            family: leak(info.family),
            head_size: info.head_size as i32,
            row_bytes: info.row_bytes,
            bits: info.bits,
            serves_k: info.serves_k,
            serves_v: info.serves_v,
            group_cells: info.group_cells as i32,
            quantized: info.quantized,
        }))
    }

    /// Made when an id is first asked for.
    fn of(id: i32) -> Option<&'static CType> {
        static KNOWN: RwLock<BTreeMap<i32, &'static CType>> = RwLock::new(BTreeMap::new());
        if let Some(known) = KNOWN.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
            return Some(known);
        }
        let info = TypeInfo::of(id)?;
        let mut all = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
        Some(all.entry(id).or_insert_with(|| CType::leaked(info)))
    }
}

/// NULL where the id is neither a family nor a concrete type nor a spec of ours.
#[no_mangle]
pub extern "C" fn ggml_ext_type_get(id: i32) -> *const CType {
    guarded(std::ptr::null(), || CType::of(id).map_or(std::ptr::null(), std::ptr::from_ref))
}

/// The id of a cache type as a user writes it: a family ("srft4"), a concrete type ("srft4_128"), one of ggml's own
/// ("q8_0"), or a spec of them by layer ("srft4,0-1=srft8,-1=f16", "srft4,swa=srft3", "srft4,guard=off"). -1, with a
/// message that points at the place and lists what exists, for anything else.
///
/// # Safety
/// `name` is NULL or a C string; `err` is NULL or has room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_type_parse(name: *const c_char, err: *mut c_char, err_size: usize) -> i32 {
    // SAFETY: the caller's promise.
    let parse = || registry::id_of(&unsafe { text(name) }.ok_or("no cache type given")?);
    // SAFETY: the caller's promise.
    unsafe { answered(-1, err, err_size, parse) }
}

/// The same without a message.
///
/// # Safety
/// `name` is NULL or a C string.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_type_from_name(name: *const c_char) -> i32 {
    // SAFETY: the caller's promise; a message is not asked for.
    unsafe { ggml_ext_type_parse(name, std::ptr::null_mut(), 0) }
}

/// "srft8, srft4, …": the families, for help texts and error messages.
#[no_mangle]
pub extern "C" fn ggml_ext_family_names() -> *const c_char {
    static NAMES: OnceLock<CString> = OnceLock::new();
    guarded(c"".as_ptr(), || NAMES.get_or_init(|| CString::new(table::family_names()).unwrap_or_default()).as_ptr())
}

/// The text of one of the Metal shaders ("kv_rows", "kv_decode", "kv_prefill"), headers included; NULL for any other name.
///
/// # Safety
/// `shader` is NULL or a C string.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_metal_source(shader: *const c_char) -> *const c_char {
    guarded(std::ptr::null(), || {
        // SAFETY: the caller's promise.
        unsafe { text(shader) }.and_then(|name| metal::source(&name)).map_or(std::ptr::null(), CStr::as_ptr)
    })
}

/// The instruction set in use ("avx512", "avx2", "neon", "scalar"); GGML_EXT_ISA in the environment chooses a lesser one.
#[no_mangle]
pub extern "C" fn ggml_ext_isa() -> *const c_char {
    static NAME: OnceLock<CString> = OnceLock::new();
    guarded(c"".as_ptr(), || NAME.get_or_init(|| CString::new(isa::kernels().name).unwrap_or_default()).as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_below_their_limit() {
        let most = table::families().iter().map(table::Family::id).max();
        assert!(most.is_some_and(|id| id < GGML_EXT_TYPE_LIMIT), "{most:?}: raise GGML_EXT_TYPE_LIMIT");
    }

    #[test]
    fn a_type_is_described_once() {
        let first = ggml_ext_type_get(148);
        // SAFETY: kept for good.
        let c = unsafe { first.as_ref() }.expect("srft4_128");
        // SAFETY: as above.
        assert_eq!(unsafe { text(c.name) }.as_deref(), Some("srft4_128"));
        // SAFETY: as above.
        assert_eq!(unsafe { text(c.family) }.as_deref(), Some("srft4"));
        assert_eq!((c.id, c.head_size, c.row_bytes), (148, 128, 68));
        assert_eq!(ggml_ext_type_get(148), first);
        assert!(ggml_ext_type_get(1).is_null());
    }
}
