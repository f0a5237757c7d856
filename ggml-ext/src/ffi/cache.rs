//! Which types the caches of a context get.

use super::{answered, count, guarded, noted, slice, text};
use crate::guard::{self, Weights};
use crate::spec::{self, calibration, recent, AskedType, ContextKind, Keeps, Layer, Side};
use std::ffi::c_char;
use std::path::Path;

/// May a context be made with these cache types, for a model of so many layers? `is_ggml_*`: the id is one of ggml's
/// own types. Refuses ids that are nobody's, types on a side they do not serve, specs of layers that the model does not
/// have, and a compressed V without flash attention: `flash_attn_off`, or an architecture (llama.cpp's name, may be NULL)
/// that llama.cpp always computes without.
///
/// # Safety
/// `arch` is NULL or a C string; `err` is NULL or has room for `err_size` bytes.
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
    let check = || {
        // SAFETY: the caller's promise.
        let arch = unsafe { text(arch) }.unwrap_or_default();
        let (k, v) = (AskedType { id: type_k, is_ggml: is_ggml_k }, AskedType { id: type_v, is_ggml: is_ggml_v });
        spec::check_cache(k, v, &ContextKind { n_layer: count(n_layer), arch: &arch, flash_attn_off }).map(|()| true)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// What of a spec changes nothing on a model: layers named that keep no K and V, `swa` where none has a window. Empty for
/// other types. `layers` has a character a layer: '-' keeps nothing of its own, 'a' all cells, 'w' those of a window.
///
/// # Safety
/// `layers` is NULL or has `n_layer` characters; `message` is NULL or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_idle_parts(
    id: i32,
    layers: *const u8,
    n_layer: i32,
    message: *mut c_char,
    size: usize,
) {
    let keeps = |layer: &u8| match layer {
        b'-' => Keeps::Nothing,
        b'w' => Keeps::Window,
        _ => Keeps::All,
    };
    let find = || {
        let Some(n) = usize::try_from(n_layer).ok().filter(|_| !layers.is_null()) else { return String::new() };
        // SAFETY: the caller's promise.
        let layers: Vec<_> = unsafe { slice(layers, n) }.iter().map(keeps).collect();
        spec::idle_parts(id, &layers)
    };
    // SAFETY: the caller's promise.
    unsafe { noted((), message, size, || Ok(((), find()))) }
}

/// One layer of a model, as its cache is made. From `scale` on it is what the guard looks at: zeros and NULL where a model
/// has none of it or its weights are not loaded.
#[repr(C)]
pub struct CLayer {
    /// from 0
    index: i32,
    /// of the model
    n_layer: i32,
    /// of the side that is asked for
    head_size: i32,
    /// attends to a window alone
    sliding: bool,
    /// scores are multiplied by it; 0: 1/sqrt(head_size)
    scale: f32,
    /// added to the keys of all heads
    k_bias: *const f32,
    n_k_bias: i32,
    /// gains of the norm of queries
    q_norm: *const f32,
    n_q_norm: i32,
    /// gains of the norm of keys
    k_norm: *const f32,
    n_k_norm: i32,
}

impl CLayer {
    /// A layer without weights.
    #[cfg(test)]
    pub(super) fn plain(n_layer: i32, head_size: i32) -> CLayer {
        let none = std::ptr::null();
        CLayer {
            index: 0,
            n_layer,
            head_size,
            sliding: false,
            scale: 0.0,
            k_bias: none,
            n_k_bias: 0,
            q_norm: none,
            n_q_norm: 0,
            k_norm: none,
            n_k_norm: 0,
        }
    }

    fn layer(&self) -> Layer {
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
        let floats = |data: *const f32, n: i32| unsafe { slice(data, count(n)) };
        Weights {
            k_bias: floats(self.k_bias, self.n_k_bias),
            q_norm: floats(self.q_norm, self.n_q_norm),
            k_norm: floats(self.k_norm, self.n_k_norm),
            scale: self.scale,
        }
    }
}

/// The type of one layer's tensor: ids that are neither a family's nor a spec's come back as they are. -1 where a type
/// does not serve that head size; the message names the layer, the size and what would do. Where the guard keeps the
/// layer at a higher type, the message says why and what it costs; otherwise it is empty. `side` is 'k' or 'v'.
///
/// # Safety
/// `layer` is NULL or a description with arrays as long as said; `message` is NULL or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_resolve(
    id: i32,
    side: c_char,
    layer: *const CLayer,
    message: *mut c_char,
    size: usize,
) -> i32 {
    let resolve = || {
        let is_v = side == b'v' as c_char || side == b'V' as c_char;
        let side = if is_v { Side::V } else { Side::K };
        // SAFETY: the caller's promise.
        let layer = unsafe { layer.as_ref() }.ok_or("no layer given")?;
        // SAFETY: the caller's promise.
        let resolved = guard::resolve(id, side, &layer.layer(), &unsafe { layer.weights() })?;
        Ok((resolved.id, resolved.raised.unwrap_or_default()))
    };
    // SAFETY: the caller's promise.
    unsafe { noted(-1, message, size, resolve) }
}

/// Cells that a cache of these types keeps as precise rows too: 128 of a sequence, at most one in 16, unless a spec says
/// another number ("srft4,recent=64"). `cells` of a stream, which so many sequences share; `window`: cells that a layer looks back
/// at, 0 for all.
#[no_mangle]
pub extern "C" fn ggml_ext_recent_slots(type_k: i32, type_v: i32, cells: u32, sequences: u32, window: u32) -> u32 {
    guarded(0, || recent::slots(type_k, type_v, cells, sequences, window))
}

/// Does a spec of either side ask for precise rows by number?
#[no_mangle]
pub extern "C" fn ggml_ext_recent_named(type_k: i32, type_v: i32) -> bool {
    guarded(false, || recent::is_named(type_k, type_v))
}

/// The type of precise rows beside rows of this one, -1 where it has none.
#[no_mangle]
pub extern "C" fn ggml_ext_recent_type(id: i32) -> i32 {
    guarded(-1, || recent::type_beside(id).unwrap_or(-1))
}

/// The types of the precise rows of a layer whose tensors have these types; `type_v` is -1 where there is no V, and so is
/// `recent_v` then. False where neither side gains by them.
///
/// # Safety
/// The pointers are NULL or places to write to.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_recent_types(
    type_k: i32,
    type_v: i32,
    recent_k: *mut i32,
    recent_v: *mut i32,
) -> bool {
    guarded(false, || {
        let Some((k, v)) = recent::types(type_k, (type_v >= 0).then_some(type_v)) else { return false };
        // SAFETY: the caller's promise.
        let (Some(recent_k), Some(recent_v)) = (unsafe { recent_k.as_mut() }, unsafe { recent_v.as_mut() }) else {
            return false;
        };
        (*recent_k, *recent_v) = (k, v.unwrap_or(-1));
        true
    })
}

/// The calibration that a K cache type names ("delta4,cal=FILE"), or where it names none the file beside a model of this path
/// (NULL or empty: not known). True where it was named; `file` is empty where there is neither.
///
/// # Safety
/// `model` is NULL or a C string; `file` is NULL or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_calibration_file(
    type_k: i32,
    model: *const c_char,
    file: *mut c_char,
    size: usize,
) -> bool {
    let find = || {
        if let Some(named) = calibration::file(type_k) {
            return (true, named.to_string());
        }
        // SAFETY: the caller's promise.
        let model = unsafe { text(model) }.filter(|path| !path.is_empty());
        (false, model.map_or_else(String::new, |path| calibration::beside(Path::new(&*path)).display().to_string()))
    };
    // SAFETY: the caller's promise.
    unsafe { noted(false, file, size, || Ok(find())) }
}

/// The order in which the rows of a type hold the bands of calibrated keys, 32 components each: `order`, of `size`, gets the
/// band of components that is the row's first, second, … The number of bands; 0 for types without.
///
/// # Safety
/// `order` has room for `size` numbers.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_band_order(id: i32, order: *mut i32, size: usize) -> usize {
    guarded(0, || {
        let Some(bands) = calibration::bands(id).filter(|bands| bands.bands() <= size) else { return 0 };
        for (i, band) in bands.order().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *order.add(i) = band as i32 };
        }
        bands.bands()
    })
}

/// Does a K tensor of this type need a calibration?
#[no_mangle]
pub extern "C" fn ggml_ext_needs_calibration(id: i32) -> bool {
    guarded(false, || calibration::needs(id))
}

/// Do keys of this type gain by a calibration? Of a spec: those of most layers.
#[no_mangle]
pub extern "C" fn ggml_ext_gains_by_calibration(id: i32) -> bool {
    guarded(false, || calibration::gains(id))
}
