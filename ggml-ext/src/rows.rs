//! Rows in and out of a cache: SET_ROWS, GET_ROWS and copies.
//!
//! A row of ggml's holds the heads of a cell one after the other; the unit of work here is one head. Rows that stand alone
//! are shared out between threads as they come. Rows of a group are written in the order of the op, so each thread takes
//! whole heads of streams, which know nothing of each other.

use crate::codec::delta::Delta;
use crate::codec::plain::Plain;
use crate::groups::{Layout, Walker};
use crate::isa::{kernels, Kernels};
use crate::rotation::MAX_HEAD;
use crate::table::{Concrete, Storage};
use crate::tensor::{read_floats, write_floats, Tensor};
use std::ops::Range;

/// The share of thread `ith` of `nth` in `n` units.
fn share(n: usize, ith: usize, nth: usize) -> Range<usize> {
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

/// Can rows of `src` be encoded into `dst`?
pub fn set_rows_supports(dst: &Tensor, src: &Tensor) -> bool {
    dst.concrete().is_some_and(|c| {
        contiguous_float_rows(src)
            && src.n(0) == dst.n(0)
            && dst.n(0).is_multiple_of(c.head_size)
            && dst.nb[0] == c.row_bytes()
    })
}

/// dst row rows[i] = encode(src row i).
///
/// # Safety
/// The tensors hold what their shapes say.
pub unsafe fn set_rows(
    dst: &Tensor,
    src: &Tensor,
    rows: &Tensor,
    index_bytes: usize,
    ith: usize,
    nth: usize,
) -> Result<(), String> {
    let Some(c) = dst.concrete().filter(|_| set_rows_supports(dst, src)) else {
        return Err("SET_ROWS of shapes or types that were not offered".into());
    };
    if rows.n(1) == 0 || rows.n(2) == 0 || !matches!(index_bytes, 4 | 8) {
        return Err("SET_ROWS without row indices".into());
    }
    let (format, kernels) = (c.storage(), kernels());
    let (heads, rows_of_src) = (dst.n(0) / c.head_size, src.rows());
    let kind = src.plain().unwrap_or(Plain::F32);
    let mut values = [0.0f32; MAX_HEAD];
    // Row `row` of the source, one head of it: where its values are, and where they go.
    let find = |row: usize, head: usize| {
        let (i1, i2, i3) = (row % src.n(1), row / src.n(1) % src.n(2), row / src.n(1) / src.n(2));
        // SAFETY: indices within the shapes; the target row is checked.
        unsafe {
            let target = index(rows, index_bytes, [i1, i2 % rows.n(1), i3 % rows.n(2)]);
            let Some(target) = usize::try_from(target).ok().filter(|&t| t < dst.n(1)) else {
                return Err(format!("SET_ROWS to row {target} of a cache of {}", dst.n(1)));
            };
            let from = src.row(i1, i2, i3).add(head * c.head_size * src.nb[0]);
            Ok((from, dst.row(target, i2, i3).add(head * c.row_bytes())))
        }
    };
    let values = &mut values[..c.head_size];
    match format {
        Storage::Alone(f) => {
            for unit in share(rows_of_src * heads, ith, nth) {
                let (from, to) = find(unit / heads, unit % heads)?;
                // SAFETY: the row of one head; kernels run on the CPU they were chosen for.
                unsafe {
                    read_floats(kind, from, src.nb[0], values);
                    (kernels.encode)(f, values, bytes_mut(to, c.row_bytes()));
                }
            }
        }
        Storage::Grouped(f) => {
            let (layout, mut walker) = (Layout::of(dst, f), Walker::new(f, kernels));
            for unit in 0..heads * rows_of_src {
                let (from, to) = find(unit % rows_of_src, unit / rows_of_src)?;
                let (place, lane) = layout.place(to);
                if lane % nth == ith {
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

/// Can rows of `src` be decoded into `dst`?
pub fn get_rows_supports(dst: &Tensor, src: &Tensor) -> bool {
    src.concrete().is_some_and(|c| {
        let floats = dst.plain() == Some(Plain::F32) && dst.nb[0] == 4;
        floats && src.n(0) == dst.n(0) && src.n(0).is_multiple_of(c.head_size) && src.nb[0] == c.row_bytes()
    })
}

/// dst row i = decode(src row rows[i]).
///
/// # Safety
/// The tensors hold what their shapes say.
pub unsafe fn get_rows(dst: &Tensor, src: &Tensor, rows: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    let Some(c) = src.concrete().filter(|_| get_rows_supports(dst, src)) else {
        return Err("GET_ROWS of shapes or types that were not offered".into());
    };
    let (format, kernels) = (c.storage(), kernels());
    let heads = src.n(0) / c.head_size;
    let total = rows.n(0) * rows.n(1) * rows.n(2);
    let mut walker = match format {
        Storage::Grouped(f) => Some((Layout::of(src, f), Walker::new(f, kernels))),
        Storage::Alone(_) => None,
    };
    // One head after the other: neighbours in a group are then read one after the other.
    for unit in share(total * heads, ith, nth) {
        let (head, row) = (unit / total, unit % total);
        let (i1, i2, i3) = (row % rows.n(0), row / rows.n(0) % rows.n(1), row / rows.n(0) / rows.n(1));
        // SAFETY: indices within the shapes; the source row is checked; nobody writes to the source meanwhile.
        unsafe {
            let from = index(rows, 4, [i1, i2, i3]);
            let Some(from) = usize::try_from(from).ok().filter(|&r| r < src.n(1)) else {
                return Err(format!("GET_ROWS of row {from} of {}", src.n(1)));
            };
            let from = src.row(from, i2, i3).add(head * c.row_bytes());
            let to = dst.row(i1, i2, i3).cast::<f32>().add(head * c.head_size);
            let to = std::slice::from_raw_parts_mut(to, c.head_size);
            match (format, &mut walker) {
                (Storage::Alone(f), _) => (kernels.decode)(f, bytes(from, c.row_bytes()), to),
                (_, Some((layout, walker))) => walker.read(layout.place(from).0, to),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Can `src` be copied to `dst`, one of them ours?
pub fn copy_supports(dst: &Tensor, src: &Tensor) -> bool {
    let whole = |t: &Tensor| match t.concrete() {
        Some(c) => t.n(0).is_multiple_of(c.head_size) && t.nb[0] == c.row_bytes(),
        None => t.is_float(),
    };
    // Bytes of a group mean what they do in their order alone.
    let in_order = |t: &Tensor, c: Concrete| {
        let row = t.n(0) / c.head_size * c.row_bytes();
        c.group_cells() == 1 || (t.nb[1] == row && t.nb[2] == row * t.n(1) && t.nb[3] == row * t.n(1) * t.n(2))
    };
    let same = match (dst.concrete(), src.concrete()) {
        (Some(d), Some(s)) => d == s && in_order(dst, d) && in_order(src, s),
        (None, None) => false,
        _ => true,
    };
    let values = |t: &Tensor| t.n(0) * t.rows();
    same && whole(dst) && whole(src) && values(dst) == values(src)
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
/// The tensors hold what their shapes say.
pub unsafe fn copy(dst: &Tensor, src: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    let Some(c) = dst.concrete().or(src.concrete()).filter(|_| copy_supports(dst, src)) else {
        return Err("a copy between shapes or types that were not offered".into());
    };
    let kernels = kernels();
    let (size, row_bytes) = (c.head_size, c.row_bytes());
    let units = src.n(0) * src.rows() / size;
    let mut values = [0.0f32; MAX_HEAD];
    let values = &mut values[..size];
    // SAFETY (of all that follows): units and values within the shapes; kernels run on the CPU they were chosen for.
    match (dst.concrete(), src.concrete(), c.storage()) {
        (Some(_), Some(_), _) => {
            for unit in share(units, ith, nth) {
                unsafe { std::ptr::copy(place_head(src, size, unit), place_head(dst, size, unit), row_bytes) };
            }
        }
        (Some(_), None, Storage::Alone(f)) => {
            for unit in share(units, ith, nth) {
                unsafe {
                    read_head(src, unit, values);
                    (kernels.encode)(f, values, bytes_mut(place_head(dst, size, unit), row_bytes));
                }
            }
        }
        (Some(_), None, Storage::Grouped(f)) => {
            let layout = Layout::of(dst, f);
            let mut walkers = walkers(dst, f, kernels);
            for unit in 0..units {
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
        (_, _, Storage::Alone(f)) => {
            for unit in share(units, ith, nth) {
                unsafe {
                    (kernels.decode)(f, bytes(place_head(src, size, unit), row_bytes), values);
                    write_head(dst, unit, values);
                }
            }
        }
        (_, _, Storage::Grouped(f)) => {
            let layout = Layout::of(src, f);
            let mut walkers = walkers(src, f, kernels);
            for unit in share(units, ith, nth) {
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

/// A walker for each head of a cache.
fn walkers(t: &Tensor, f: Delta, kernels: &'static Kernels) -> Vec<Walker> {
    (0..(t.origin().1 / f.row_bytes()).max(1)).map(|_| Walker::new(f, kernels)).collect()
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
