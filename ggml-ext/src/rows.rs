//! Rows in and out of a cache: SET_ROWS, GET_ROWS and copies.
//!
//! A row of ggml's holds the heads of a cell one after the other; the unit of work here is one head. Rows that stand alone
//! are shared out between threads as they come. Rows of a group are written in the order of the op, so each thread takes
//! whole heads of streams, which know nothing of each other. Of a single row each thread takes heads that lie side by side, of whatever
//! type: those that it multiplied itself, where keys are calibrated ([`crate::products::heads_stay`]).

use crate::codec::delta::Delta;
use crate::codec::plain::Plain;
use crate::codec::RowFormat;
use crate::groups::{self, GroupLayout, Walker};
use crate::isa::scalar;
use crate::isa::{kernels, Kernels};
use crate::rotation::MAX_HEAD;
use crate::table::{self, Concrete, Entry};
use crate::tensor::{read_floats, write_floats, Tensor, I32, I64};
use std::ops::Range;

/// The share of thread `ith` of `nth` in `n` units.
pub fn share(n: usize, ith: usize, nth: usize) -> Range<usize> {
    n * ith / nth..n * (ith + 1) / nth
}

/// Rows whose values lie one after the other.
fn contiguous_float_rows(t: &Tensor) -> bool {
    t.is_float() && t.plain().is_some_and(|p| t.nb[0] == p.row_bytes(1))
}

/// An index tensor's value.
unsafe fn index(t: &Tensor, bytes: usize, at: [usize; 3]) -> i64 {
    // SAFETY: the caller keeps to the tensor's shape.
    unsafe {
        let p = t.data.add(at[0] * t.nb[0] + at[1] * t.nb[1] + at[2] * t.nb[2]);
        if bytes == 8 {
            p.cast::<i64>().read_unaligned()
        } else {
            i64::from(p.cast::<i32>().read_unaligned())
        }
    }
}

/// The values of an index tensor: how many bytes each has.
fn index_bytes_of(t: &Tensor) -> Option<usize> {
    match t.kind {
        I32 => Some(4),
        I64 => Some(8),
        _ => None,
    }
}

/// Can rows of `src` be encoded into rows `rows` of `dst`? The message says why not.
pub fn check_set_rows(dst: &Tensor, src: &Tensor, rows: &Tensor) -> Result<Concrete, String> {
    let Some(c) = dst.concrete() else { return Err(format!("SET_ROWS to type {}, which is not ours", dst.kind)) };
    let fits = contiguous_float_rows(src)
        && src.n(0) == dst.n(0)
        && dst.n(0).is_multiple_of(c.head_size)
        && (2..4).all(|d| src.n(d) == dst.n(d));
    if !fits {
        return Err(format!(
            "SET_ROWS of {:?} values of type {} to {:?} of {}: wanted the same rows, of f32 or f16, all of whole heads",
            src.ne,
            src.kind,
            dst.ne,
            c.name()
        ));
    }
    let broadcasts = |d: usize| rows.n(d) > 0 && src.n(d + 1).is_multiple_of(rows.n(d));
    if index_bytes_of(rows).is_none() || rows.n(0) != src.n(1) || !broadcasts(1) || !broadcasts(2) {
        return Err(format!(
            "SET_ROWS of {:?} values with {:?} row indices of type {}: wanted one for each row, i32 or i64",
            src.ne, rows.ne, rows.kind
        ));
    }
    dst.check("the target of SET_ROWS")?;
    dst.check_apart("the target of SET_ROWS")?;
    src.check("the source of SET_ROWS")?;
    src.check_apart("the source of SET_ROWS")?;
    rows.check("the row indices of SET_ROWS")?;
    rows.check_apart("the row indices of SET_ROWS")?;
    if let Some(f) = c.format().grouped() {
        GroupLayout::of(dst, f)?;
    }
    Ok(c)
}

/// dst row rows[i] = encode(src row i). Nothing is written where a row is not there; -1 leaves a row out, where rows stand
/// alone.
///
/// # Safety
/// Memory is as described.
pub unsafe fn set_rows(
    dst: &Tensor,
    src: &Tensor,
    rows: &Tensor,
    index_bytes: usize,
    ith: usize,
    nth: usize,
) -> Result<(), String> {
    let c = check_set_rows(dst, src, rows)?;
    if index_bytes_of(rows) != Some(index_bytes) {
        return Err(format!("SET_ROWS by indices of {index_bytes} bytes and type {}", rows.kind));
    }
    if src.is_empty() {
        return Ok(());
    }
    dst.check_there("the target of SET_ROWS")?;
    src.check_there("the source of SET_ROWS")?;
    rows.check_there("the row indices of SET_ROWS")?;
    let (format, kernels) = (c.format(), kernels());
    let (heads, rows_of_src) = (dst.n(0) / c.head_size, src.rows());
    let kind = src.plain().unwrap_or(Plain::F32);
    let mut values = [0.0f32; MAX_HEAD];
    let place = |row: usize| [row % src.n(1), row / src.n(1) % src.n(2), row / src.n(1) / src.n(2)];
    let target = |[i1, i2, i3]: [usize; 3]| {
        // SAFETY: within the indices, which broadcast.
        let target = unsafe { index(rows, index_bytes, [i1, i2 % rows.n(1), i3 % rows.n(2)]) };
        if target == -1 && format.grouped().is_none() {
            return Ok(None);
        }
        let found = usize::try_from(target).ok().filter(|&t| t < dst.n(1));
        found.map(Some).ok_or_else(|| format!("SET_ROWS to row {target} of a cache of {}", dst.n(1)))
    };
    (0..rows_of_src).try_for_each(|row| target(place(row)).map(drop))?;
    // Row `row` of the source, one head of it: where its values are, and where they go. The indices are looked at again:
    // they may lie in what is written.
    let find = |row: usize, head: usize| {
        let at @ [i1, i2, i3] = place(row);
        let Some(target) = target(at)? else { return Ok(None) };
        // SAFETY: indices within the shapes.
        unsafe {
            let from = src.row(i1, i2, i3).add(head * c.head_size * src.nb[0]);
            Ok::<_, String>(Some((from, dst.row(target, i2, i3).add(head * c.row_bytes()))))
        }
    };
    let values = &mut values[..c.head_size];
    match format.grouped() {
        None => {
            for unit in share(rows_of_src * heads, ith, nth) {
                let Some((from, to)) = find(unit / heads, unit % heads)? else { continue };
                // SAFETY: the row of one head; kernels run on the CPU they were chosen for.
                unsafe {
                    read_floats(kind, from, src.nb[0], values);
                    (kernels.encode)(format, values, bytes_mut(to, c.row_bytes()));
                }
            }
        }
        Some(f) => {
            let (layout, mut walker) = (GroupLayout::of(dst, f)?, Walker::new(f, kernels));
            let of_one_row = share(heads, ith, nth);
            for unit in 0..heads * rows_of_src {
                let Some((from, to)) = find(unit % rows_of_src, unit / rows_of_src)? else { continue };
                let (place, lane) = layout.place(to);
                let own = if rows_of_src == 1 { of_one_row.contains(&unit) } else { lane % nth == ith };
                if own {
                    // SAFETY: the row of one head, of a lane that is this thread's alone.
                    unsafe {
                        read_floats(kind, from, src.nb[0], values);
                        walker.write(place, values);
                    }
                }
            }
        }
    }
    Ok(())
}

unsafe fn bytes_mut<'a>(row: *mut u8, n: usize) -> &'a mut [u8] {
    // SAFETY: the caller's row.
    unsafe { std::slice::from_raw_parts_mut(row, n) }
}

unsafe fn bytes<'a>(row: *const u8, n: usize) -> &'a [u8] {
    // SAFETY: the caller's row.
    unsafe { std::slice::from_raw_parts(row, n) }
}

/// Can rows `rows` of `src` be decoded into `dst`? The message says why not.
pub fn check_get_rows(dst: &Tensor, src: &Tensor, rows: &Tensor) -> Result<Concrete, String> {
    let Some(c) = src.concrete() else { return Err(format!("GET_ROWS of type {}, which is not ours", src.kind)) };
    dst.check_result("the result of GET_ROWS")?;
    if src.n(0) != dst.n(0) || !src.n(0).is_multiple_of(c.head_size) {
        return Err(format!(
            "GET_ROWS of {:?} values of {} to {:?}: wanted the same rows, of whole heads",
            src.ne,
            c.name(),
            dst.ne
        ));
    }
    let indexed = rows.kind == I32 && (1..4).all(|d| dst.n(d) == rows.n(d - 1));
    if !indexed || rows.n(3) != 1 || src.n(2) != rows.n(1) || src.n(3) != rows.n(2) {
        return Err(format!(
            "GET_ROWS of {:?} values to {:?} with {:?} row indices of type {}: wanted one for each row, i32",
            src.ne, dst.ne, rows.ne, rows.kind
        ));
    }
    src.check("the source of GET_ROWS")?;
    rows.check("the row indices of GET_ROWS")?;
    if let Some(f) = c.format().grouped() {
        GroupLayout::of(src, f)?;
    }
    Ok(c)
}

/// Where the row that row `row` of the result comes from is: the index, and the dimensions behind it.
unsafe fn source_row(src: &Tensor, rows: &Tensor, row: usize) -> Result<([usize; 3], usize), String> {
    let at @ [i1, i2, i3] = [row % rows.n(0), row / rows.n(0) % rows.n(1), row / rows.n(0) / rows.n(1)];
    // SAFETY: within the indices, says the caller.
    let from = unsafe { index(rows, 4, [i1, i2, i3]) };
    let found = usize::try_from(from).ok().filter(|&r| r < src.n(1));
    found.map(|from| (at, from)).ok_or_else(|| format!("GET_ROWS of row {from} of {}", src.n(1)))
}

/// dst row i = decode(src row rows[i]). Where a row is not there, all are NaN.
///
/// # Safety
/// Memory is as described.
pub unsafe fn get_rows(dst: &Tensor, src: &Tensor, rows: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    if dst.is_empty() {
        return check_get_rows(dst, src, rows).map(drop);
    }
    let check = || -> Result<Concrete, String> {
        let c = check_get_rows(dst, src, rows)?;
        dst.check_there("the result of GET_ROWS")?;
        src.check_there("the source of GET_ROWS")?;
        rows.check_there("the row indices of GET_ROWS")?;
        // SAFETY: within the indices.
        (0..dst.rows()).try_for_each(|row| unsafe { source_row(src, rows, row).map(drop) })?;
        Ok(c)
    };
    let c = match check() {
        Ok(c) => c,
        // SAFETY: the caller's promise; all threads refuse, and one writes.
        Err(reason) => return Err(unsafe { refuse(dst, ith, reason) }),
    };
    let (format, kernels) = (c.format(), kernels());
    let heads = src.n(0) / c.head_size;
    let total = dst.rows();
    let mut walker = match format.grouped() {
        Some(f) => Some((GroupLayout::of(src, f)?, Walker::new(f, kernels))),
        None => None,
    };
    // One head after the other: neighbours in a group are then read one after the other.
    for unit in share(total * heads, ith, nth) {
        let (head, row) = (unit / total, unit % total);
        // SAFETY: indices within the shapes; the source row is checked; nobody writes to the source meanwhile.
        unsafe {
            let ([i1, i2, i3], from) = source_row(src, rows, row)?;
            let from = src.row(from, i2, i3).add(head * c.row_bytes());
            let to = dst.row(i1, i2, i3).cast::<f32>().add(head * c.head_size);
            let to = std::slice::from_raw_parts_mut(to, c.head_size);
            match &mut walker {
                None => (kernels.decode)(format, bytes(from, c.row_bytes()), to),
                Some((layout, walker)) => walker.read(layout.place(from).0, to),
            }
        }
    }
    Ok(())
}

/// The reason of a refusal that every thread comes to; the result becomes NaN.
///
/// # Safety
/// Memory is as described, and no thread uses `dst`.
pub unsafe fn refuse(dst: &Tensor, ith: usize, reason: String) -> String {
    if ith == 0 {
        // SAFETY: the caller's promise.
        unsafe { dst.fill_nan() };
    }
    reason
}

/// Can `src` be copied to `dst`, one of them ours? The message says why not.
pub fn check_copy(dst: &Tensor, src: &Tensor) -> Result<Concrete, String> {
    let Some(c) = dst.concrete().or(src.concrete()) else { return Err("a copy of types that are not ours".into()) };
    let whole = |t: &Tensor| match t.concrete() {
        Some(c) => t.n(0).is_multiple_of(c.head_size) && t.nb[0] == c.row_bytes(),
        None => t.is_float(),
    };
    // Bytes of a group mean what they do in their order alone.
    let in_order = |t: &Tensor, c: Concrete| {
        let row = t.n(0) / c.head_size * c.row_bytes();
        let steps = [row, row.saturating_mul(t.n(1)), row.saturating_mul(t.n(1)).saturating_mul(t.n(2))];
        c.group_cells() == 1 || t.nb[1..] == steps
    };
    let same = match (dst.concrete(), src.concrete()) {
        (Some(d), Some(s)) => d == s && in_order(dst, d) && in_order(src, s),
        _ => true,
    };
    if !same || !whole(dst) || !whole(src) || dst.values().is_none() || dst.values() != src.values() {
        return Err(format!(
            "a copy of {:?} values of type {} to {:?} of type {}: wanted as many, of f32, f16 or the same type, all of whole \
             heads, and in order where cells are coded together",
            src.ne, src.kind, dst.ne, dst.kind
        ));
    }
    dst.check("the target of a copy")?;
    dst.check_apart("the target of a copy")?;
    src.check("the source of a copy")?;
    if let Some(f) = c.format().grouped() {
        for t in [dst, src].into_iter().filter(|t| t.concrete().is_some() && t.values() != Some(0)) {
            GroupLayout::of(t, f)?;
        }
    }
    Ok(c)
}

/// Where value number `flat` is, counted along the dimensions, in a tensor of floats.
unsafe fn place(t: &Tensor, flat: usize) -> *mut u8 {
    let (i0, row) = (flat % t.n(0), flat / t.n(0));
    // SAFETY: flat is below the number of values.
    unsafe { place_row(t, row).add(i0 * t.nb[0]) }
}

unsafe fn place_row(t: &Tensor, row: usize) -> *mut u8 {
    // SAFETY: row is below the number of rows.
    unsafe { t.row(row % t.n(1), row / t.n(1) % t.n(2), row / t.n(1) / t.n(2)) }
}

/// Where head number `unit` is in a tensor of ours.
unsafe fn place_head(t: &Tensor, head_size: usize, unit: usize) -> *mut u8 {
    let heads = t.n(0) / head_size;
    // SAFETY: unit is below the number of heads.
    unsafe { place_row(t, unit / heads).add(unit % heads * t.nb[0]) }
}

/// CPY, DUP, CONT: the values in order, whatever the shapes and strides.
///
/// # Safety
/// Memory is as described.
pub unsafe fn copy(dst: &Tensor, src: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    let c = check_copy(dst, src)?;
    if src.values() == Some(0) {
        return Ok(());
    }
    dst.check_there("the target of a copy")?;
    src.check_there("the source of a copy")?;
    let (format, kernels) = (c.format(), kernels());
    let (size, row_bytes) = (c.head_size, c.row_bytes());
    let units = src.n(0) * src.rows() / size;
    let mut values = [0.0f32; MAX_HEAD];
    let values = &mut values[..size];
    match (dst.concrete(), src.concrete(), format.grouped()) {
        (Some(_), Some(_), _) => {
            for unit in share(units, ith, nth) {
                // SAFETY: a unit within both shapes.
                unsafe { std::ptr::copy(place_head(src, size, unit), place_head(dst, size, unit), row_bytes) };
            }
        }
        (Some(_), None, None) => {
            for unit in share(units, ith, nth) {
                // SAFETY: a unit within both shapes; kernels run on the CPU they were chosen for.
                unsafe {
                    read_head(src, unit, values);
                    (kernels.encode)(format, values, bytes_mut(place_head(dst, size, unit), row_bytes));
                }
            }
        }
        (Some(_), None, Some(f)) => {
            let layout = GroupLayout::of(dst, f)?;
            let mut walkers = walkers(dst, f, kernels);
            for unit in 0..units {
                // SAFETY: a unit within both shapes, of a lane that is this thread's alone.
                unsafe {
                    let (place, lane) = layout.place(place_head(dst, size, unit));
                    if lane % nth == ith {
                        read_head(src, unit, values);
                        let heads = walkers.len();
                        walkers[lane % heads].write(place, values);
                    }
                }
            }
        }
        (_, _, None) => {
            for unit in share(units, ith, nth) {
                // SAFETY: a unit within both shapes; kernels run on the CPU they were chosen for.
                unsafe {
                    (kernels.decode)(format, bytes(place_head(src, size, unit), row_bytes), values);
                    write_head(dst, unit, values);
                }
            }
        }
        (_, _, Some(f)) => {
            let layout = GroupLayout::of(src, f)?;
            let mut walkers = walkers(src, f, kernels);
            for unit in share(units, ith, nth) {
                // SAFETY: a unit within both shapes; kernels run on the CPU they were chosen for.
                unsafe {
                    let (place, lane) = layout.place(place_head(src, size, unit));
                    let heads = walkers.len();
                    walkers[lane % heads].read(place, values);
                    write_head(dst, unit, values);
                }
            }
        }
    }
    Ok(())
}

/// A walker for each head of a cache. A cell of more heads than any model has shares them: a head has always the same.
fn walkers(t: &Tensor, f: Delta, kernels: &'static Kernels) -> Vec<Walker> {
    (0..(t.origin().1 / f.row_bytes()).clamp(1, 256)).map(|_| Walker::new(f, kernels)).collect()
}

/// Values unit * n.. of a tensor of floats; a head may end in another row than it begins.
unsafe fn read_head(t: &Tensor, unit: usize, values: &mut [f32]) {
    let (kind, size) = (t.plain().unwrap_or(Plain::F32), values.len());
    // SAFETY: within the tensor, says the caller.
    unsafe {
        if t.n(0).is_multiple_of(size) {
            return read_floats(kind, place(t, unit * size), t.nb[0], values);
        }
        for (i, v) in values.iter_mut().enumerate() {
            read_floats(kind, place(t, unit * size + i), 0, std::slice::from_mut(v));
        }
    }
}

/// The way back.
unsafe fn write_head(t: &Tensor, unit: usize, values: &[f32]) {
    let (kind, size) = (t.plain().unwrap_or(Plain::F32), values.len());
    // SAFETY: within the tensor, says the caller.
    unsafe {
        if t.n(0).is_multiple_of(size) {
            return write_floats(kind, values, place(t, unit * size), t.nb[0]);
        }
        for (i, &v) in values.iter().enumerate() {
            write_floats(kind, &[v], place(t, unit * size + i), 0);
        }
    }
}

/// The concrete type of an id.
fn concrete(id: i32) -> Result<Concrete, String> {
    match table::by_id(id) {
        Some(Entry::Concrete(c)) => Ok(c),
        _ => Err(format!("type {id} is not one of ours at a head size")),
    }
}

/// Bytes of the rows that n values are in a concrete type.
pub fn stored_bytes(id: i32, n: usize) -> Result<usize, String> {
    let c = concrete(id)?;
    if !n.is_multiple_of(c.head_size) {
        return Err(format!("{n} values are no whole rows of {}", c.name()));
    }
    (n / c.head_size).checked_mul(c.row_bytes()).ok_or_else(|| format!("{n} values are more than any memory has"))
}

/// The type of an id, where `rows` are the bytes of so many values of it.
fn check_rows(id: i32, values: usize, rows: usize) -> Result<Concrete, String> {
    match stored_bytes(id, values)? {
        want if want == rows => concrete(id),
        want => Err(format!("{rows} bytes for {values} values: wanted {want}")),
    }
}

/// Encodes rows of one head, which lie one after the other. Where cells are coded together they are consecutive cells from
/// the beginning of a group.
pub fn encode(id: i32, kernels: &'static Kernels, values: &[f32], rows: &mut [u8]) -> Result<(), String> {
    let c = check_rows(id, values.len(), rows.len())?;
    match c.format().grouped() {
        Some(f) => groups::encode(f, kernels, values, rows),
        None => {
            for (x, row) in values.chunks_exact(c.head_size).zip(rows.chunks_exact_mut(c.row_bytes())) {
                // SAFETY: kernels run on the CPU they were chosen for.
                unsafe { (kernels.encode)(c.format(), x, row) };
            }
        }
    }
    Ok(())
}

/// The way back.
pub fn decode(id: i32, kernels: &'static Kernels, rows: &[u8], values: &mut [f32]) -> Result<(), String> {
    let c = check_rows(id, values.len(), rows.len())?;
    match c.format().grouped() {
        Some(f) => groups::decode(f, kernels, rows, values),
        None => {
            for (row, x) in rows.chunks_exact(c.row_bytes()).zip(values.chunks_exact_mut(c.head_size)) {
                // SAFETY: kernels run on the CPU they were chosen for.
                unsafe { (kernels.decode)(c.format(), row, x) };
            }
        }
    }
    Ok(())
}

/// The vectors whose products with queries are the scores, for types whose rows stand alone.
pub fn decode_key(id: i32, rows: &[u8], values: &mut [f32]) -> Result<(), String> {
    let c = check_rows(id, values.len(), rows.len())?;
    if c.group_cells() > 1 {
        return Err(format!("rows of {} are coded together", c.name()));
    }
    for (row, x) in rows.chunks_exact(c.row_bytes()).zip(values.chunks_exact_mut(c.head_size)) {
        scalar::decode_key(c.format(), row, x);
    }
    Ok(())
}
