//! Saved states. A state of a cache with a type of ours begins with a header that names the format, is compared with the
//! caches of a context before anything is touched, and covers what llama.cpp itself does not check. [`crate::state`] has
//! the layout.

use super::{answered, count, guarded, report, slice, slice_mut};
use crate::state::{self, Range};
use crate::tensor::Untyped;
use std::ffi::c_char;

/// The first four bytes of a state of ours, 0x7473766b: a state of stock llama.cpp has the number of streams there.
pub const GGML_EXT_STATE_MAGIC: u32 = 0x7473_766b;
/// Bytes from which the length of the header is known.
pub const GGML_EXT_STATE_PREFIX: usize = 20;

// The generator of the header reads literals alone.
const _: () = assert!(GGML_EXT_STATE_MAGIC == state::MAGIC && GGML_EXT_STATE_PREFIX == state::PREFIX_BYTES);

/// A layer of a cache.
#[repr(C)]
pub struct CStateLayer {
    /// in the model
    index: u32,
    /// -1: none
    type_k: i32,
    /// -1: none
    type_v: i32,
    /// values of a cell, all heads
    n_k: u32,
    n_v: u32,
    /// of a cell
    bytes_k: u64,
    bytes_v: u64,
    /// of precise rows of recent cells; -1: none
    recent_k: i32,
    recent_v: i32,
    /// of a cell
    recent_bytes_k: u64,
    recent_bytes_v: u64,
}

/// A cache of a context, or what a state has of one.
#[repr(C)]
pub struct CStateCache {
    streams: u32,
    /// of a stream
    cells: u32,
    /// a state's: those that it has; a context's: those that it may have
    sequences: u32,
    v_transposed: bool,
    /// by llama.cpp
    rotated: bool,
    /// a context's: bytes of a cell's metadata beside its position and sequences
    extension: u32,
    /// digest of the calibration that keys and values are stored by; 0: none
    calibration: u64,
    layers: *const CStateLayer,
    n_layers: usize,
    /// a state's: its cells; a context's: those that a sequence may take
    ranges: *const Range,
    n_ranges: usize,
}

/// A state, or the context that is to take one.
#[repr(C)]
pub struct CState {
    one_sequence: bool,
    /// version of llama.cpp's states
    foreign: u32,
    /// what llama.cpp writes of cells
    meta_bytes: u64,
    /// its ggml_ext_state_checksum
    meta_sum: u64,
    /// rows
    data_bytes: u64,
    caches: *const CStateCache,
    n_caches: usize,
    /// a context's: caches whose metadata comes before that of anything else
    n_known: usize,
    /// a context's: there is something else, recurrent states
    others: bool,
}

impl CStateCache {
    /// # Safety
    /// The arrays are as long as said.
    unsafe fn cache(&self) -> state::StateCache {
        let layer = |l: &CStateLayer| state::Layer {
            index: l.index,
            k: state::StateSide::new(l.type_k, l.n_k, l.bytes_k),
            v: state::StateSide::new(l.type_v, l.n_v, l.bytes_v),
            recent: [
                state::StateSide::new(l.recent_k, l.n_k, l.recent_bytes_k),
                state::StateSide::new(l.recent_v, l.n_v, l.recent_bytes_v),
            ],
        };
        // SAFETY: the caller's promise.
        let (layers, ranges) = unsafe { (slice(self.layers, self.n_layers), slice(self.ranges, self.n_ranges)) };
        state::StateCache {
            streams: self.streams,
            cells: self.cells,
            sequences: self.sequences,
            flags: state::StateCache::flags(self.v_transposed, self.rotated),
            calibration: self.calibration,
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
    /// As [`CState::header`], where it is not null.
    unsafe fn context(context: *const CState) -> Result<state::Context, String> {
        // SAFETY: the caller's promise.
        unsafe {
            let context = context.as_ref().ok_or("no context given")?;
            let extensions = slice(context.caches, context.n_caches).iter().map(|c| c.extension).collect();
            Ok(state::Context { live: context.header(), extensions, known: context.n_known, others: context.others })
        }
    }

    /// Takes what a header tells, except its caches.
    fn fill(&mut self, header: &state::Header) {
        self.one_sequence = header.one_sequence();
        self.foreign = header.foreign;
        self.meta_bytes = header.meta_bytes;
        self.meta_sum = header.meta_sum;
        self.data_bytes = header.data_bytes;
    }
}

/// The header of a state, prefix included: its length; written where it fits into `size`.
///
/// # Safety
/// `state` is NULL or a description with arrays as long as said; `dst` is NULL or has room for `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_header(state: *const CState, dst: *mut Untyped, size: usize) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        let bytes = unsafe { state.as_ref().map_or_else(Vec::new, |s| s.header().to_bytes()) };
        // SAFETY: the caller's promise.
        if let Some(dst) = unsafe { slice_mut(dst, size) }.get_mut(..bytes.len()) {
            dst.copy_from_slice(&bytes);
        }
        bytes.len()
    })
}

/// Bytes of the header behind the prefix; -1, with a message, where it is none, of another version, or longer than that of
/// any state that the context could take.
///
/// # Safety
/// `prefix` is NULL or has GGML_EXT_STATE_PREFIX bytes; `context` is NULL or a description; `err` is NULL or has room for
/// `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_header_rest(
    prefix: *const Untyped,
    context: *const CState,
    err: *mut c_char,
    err_size: usize,
) -> i64 {
    // SAFETY: the caller's promise.
    let rest = || unsafe {
        let bytes = CState::context(context)?.body_bytes(slice(prefix, GGML_EXT_STATE_PREFIX))?;
        Ok(bytes as i64)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(-1, err, err_size, rest) }
}

/// Can the context take the state with this header, and do the lengths that it tells follow from its cells? `found` (not its
/// caches) is filled where it can; the message says what differs.
///
/// # Safety
/// `header` has `size` bytes; `context` is NULL or a description; `found` is NULL or may be written; `err` is NULL or has
/// room for `err_size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_check(
    header: *const Untyped,
    size: usize,
    context: *const CState,
    found: *mut CState,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    // SAFETY: the caller's promise.
    let check = || unsafe {
        let header = CState::context(context)?.read(slice(header, size))?;
        if let Some(found) = found.as_mut() {
            found.fill(&header);
        }
        Ok(true)
    };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// Is this the metadata of the state with this header, and can the context take it?
///
/// # Safety
/// `header` and `meta` have so many bytes; `context` is NULL or a description; `err` is NULL or has room for `err_size`
/// bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_check_meta(
    header: *const Untyped,
    size: usize,
    context: *const CState,
    meta: *const Untyped,
    meta_size: usize,
    err: *mut c_char,
    err_size: usize,
) -> bool {
    // SAFETY: the caller's promise.
    let check =
        || unsafe { CState::context(context)?.read_meta(slice(header, size), slice(meta, meta_size)).map(|()| true) };
    // SAFETY: the caller's promise.
    unsafe { answered(false, err, err_size, check) }
}

/// The cells of cache number `cache` of a header: how many ranges, at most `n` of them written; `cells` gets the size of a
/// stream.
///
/// # Safety
/// `header` has `size` bytes; `dst` is NULL or has room for n ranges; `cells` is NULL or may be written.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_ranges(
    header: *const Untyped,
    size: usize,
    cache: usize,
    dst: *mut Range,
    n: usize,
    cells: *mut u32,
) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        let (header, dst, cells) = unsafe { (slice(header, size), slice_mut(dst, n), cells.as_mut()) };
        let Ok(found) = state::Header::from_bytes(header) else { return 0 };
        let Some(cache) = found.caches.get(cache) else { return 0 };
        if let Some(cells) = cells {
            *cells = cache.cells;
        }
        for (dst, range) in dst.iter_mut().zip(&cache.ranges) {
            *dst = *range;
        }
        cache.ranges.len()
    })
}

/// The layers of cache number `cache` of a header: how many, at most `n` of them written.
///
/// # Safety
/// `header` has `size` bytes; `dst` is NULL or has room for n layers.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_layers(
    header: *const Untyped,
    size: usize,
    cache: usize,
    dst: *mut CStateLayer,
    n: usize,
) -> usize {
    guarded(0, || {
        // SAFETY: the caller's promise.
        let (header, dst) = unsafe { (slice(header, size), slice_mut(dst, n)) };
        let Ok(found) = state::Header::from_bytes(header) else { return 0 };
        let Some(cache) = found.caches.get(cache) else { return 0 };
        for (dst, l) in dst.iter_mut().zip(&cache.layers) {
            *dst = CStateLayer {
                index: l.index,
                type_k: l.k.kind,
                type_v: l.v.kind,
                n_k: l.k.values,
                n_v: l.v.values,
                bytes_k: l.k.row_bytes,
                bytes_v: l.v.row_bytes,
                recent_k: l.recent[0].kind,
                recent_v: l.recent[1].kind,
                recent_bytes_k: l.recent[0].row_bytes,
                recent_bytes_v: l.recent[1].row_bytes,
            };
        }
        cache.layers.len()
    })
}

/// Of the metadata of a state.
///
/// # Safety
/// `data` has `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_checksum(data: *const Untyped, size: usize) -> u64 {
    // SAFETY: the caller's promise.
    guarded(0, || state::checksum(&[unsafe { slice(data, size) }]))
}

/// Where the cells of whole groups go: to[i] for the ascending cells[i] of a stream of `source_cells`, in a stream of n_free
/// cells of which free[i] says whether they are. False where there are not enough free groups.
///
/// # Safety
/// `cells` and `to` have n elements, `free` has n_free.
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
        // SAFETY: the caller's promise.
        let (cells, free, to) = unsafe { (slice(cells, n), slice(free, n_free), slice_mut(to, n)) };
        let placed = state::place_groups(cells, source_cells, free, count(group_cells));
        placed.map(|placed| to.copy_from_slice(&placed)).is_some()
    })
}

/// Whole groups of a cache, `cells` cells of so many heads: what belongs to cells that keep[i] does not name is taken out.
/// Rows that are left keep their bits, unless they or their I-frame are coded by what goes: then they are coded anew.
///
/// # Safety
/// `rows` has the cells from the beginning of a group on, and is the caller's alone; `keep` has a flag for each cell.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_keep(
    id: i32,
    heads: i32,
    rows: *mut Untyped,
    cells: usize,
    keep: *const bool,
) -> bool {
    let rows = state::CacheRows { data: rows, cells };
    if cells > 0 && (rows.data.is_null() || keep.is_null()) {
        return report(|| Err("rows of a cache without memory".into()));
    }
    // SAFETY: the caller's promise.
    report(|| unsafe { state::keep(id, count(heads), rows, slice(keep, cells)) })
}

/// Cells from[i] of `src` decoded and written to cells to[i] of `dst`, for types whose cells are coded together.
///
/// # Safety
/// `src` and `dst` have their cells of so many heads, and `dst` is the caller's alone; `from` and `to` have n cells each.
#[no_mangle]
pub unsafe extern "C" fn ggml_ext_state_recode(
    id: i32,
    heads: i32,
    src: *const Untyped,
    src_cells: usize,
    dst: *mut Untyped,
    dst_cells: usize,
    from: *const u32,
    to: *const u32,
    n: usize,
) -> bool {
    let src = state::CacheRows { data: src.cast_mut(), cells: src_cells };
    let dst = state::CacheRows { data: dst, cells: dst_cells };
    if n > 0 && (src.data.is_null() || dst.data.is_null() || from.is_null() || to.is_null()) {
        return report(|| Err("rows of a cache without memory".into()));
    }
    // SAFETY: the caller's promise; what is read is not written.
    report(|| unsafe { state::recode(id, count(heads), src, dst, slice(from, n), slice(to, n)) })
}
