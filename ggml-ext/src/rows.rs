//! Rows in and out of a cache: SET_ROWS, GET_ROWS and copies.
//!
//! A row of ggml's holds the heads of a cell one after the other; the unit of work here is one head.

use crate::codec::plain::Plain;
use crate::isa::kernels;
use crate::rotation::MAX_HEAD;
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
    let (format, kernels) = (c.format(), kernels());
    let heads = dst.n(0) / c.head_size;
    let kind = src.plain().unwrap_or(Plain::F32);
    let mut values = [0.0f32; MAX_HEAD];
    for unit in share(src.rows() * heads, ith, nth) {
        let (head, row) = (unit % heads, unit / heads);
        let (i1, i2, i3) = (row % src.n(1), row / src.n(1) % src.n(2), row / src.n(1) / src.n(2));
        // SAFETY: indices within the shapes; the target row is checked.
        unsafe {
            let target = index(rows, index_bytes, [i1, i2 % rows.n(1), i3 % rows.n(2)]);
            let Some(target) = usize::try_from(target).ok().filter(|&t| t < dst.n(1)) else {
                return Err(format!("SET_ROWS to row {target} of a cache of {}", dst.n(1)));
            };
            let from = src.row(i1, i2, i3).add(head * c.head_size * src.nb[0]);
            read_floats(kind, from, src.nb[0], &mut values[..c.head_size]);
            let to = dst.row(target, i2, i3).add(head * c.row_bytes());
            let to = std::slice::from_raw_parts_mut(to, c.row_bytes());
            (kernels.encode)(format, &values[..c.head_size], to);
        }
    }
    Ok(())
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
    let (format, kernels) = (c.format(), kernels());
    let heads = src.n(0) / c.head_size;
    let total = rows.n(0) * rows.n(1) * rows.n(2);
    for unit in share(total * heads, ith, nth) {
        let (head, row) = (unit % heads, unit / heads);
        let (i1, i2, i3) = (row % rows.n(0), row / rows.n(0) % rows.n(1), row / rows.n(0) / rows.n(1));
        // SAFETY: indices within the shapes; the source row is checked.
        unsafe {
            let from = index(rows, 4, [i1, i2, i3]);
            let Some(from) = usize::try_from(from).ok().filter(|&r| r < src.n(1)) else {
                return Err(format!("GET_ROWS of row {from} of {}", src.n(1)));
            };
            let from = std::slice::from_raw_parts(src.row(from, i2, i3).add(head * c.row_bytes()), c.row_bytes());
            let to = dst.row(i1, i2, i3).cast::<f32>().add(head * c.head_size);
            (kernels.decode)(format, from, std::slice::from_raw_parts_mut(to, c.head_size));
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
    let same = match (dst.concrete(), src.concrete()) {
        (Some(d), Some(s)) => d == s,
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
    let (format, kernels) = (c.format(), kernels());
    let (size, bytes) = (c.head_size, c.row_bytes());
    let mut values = [0.0f32; MAX_HEAD];
    let floats = if dst.concrete().is_some() { src } else { dst };
    let kind = floats.plain().unwrap_or(Plain::F32);
    // Does a head stay within a row of the float tensor?
    let in_row = floats.n(0) % size == 0;
    for unit in share(src.n(0) * src.rows() / size, ith, nth) {
        // SAFETY: units and values within the shapes.
        unsafe {
            match (dst.concrete(), src.concrete()) {
                (Some(_), Some(_)) => {
                    std::ptr::copy(place_head(src, size, unit), place_head(dst, size, unit), bytes);
                }
                (Some(_), None) => {
                    if in_row {
                        read_floats(kind, place(src, unit * size), src.nb[0], &mut values[..size]);
                    } else {
                        for (i, v) in values[..size].iter_mut().enumerate() {
                            read_floats(kind, place(src, unit * size + i), 0, std::slice::from_mut(v));
                        }
                    }
                    let to = std::slice::from_raw_parts_mut(place_head(dst, size, unit), bytes);
                    (kernels.encode)(format, &values[..size], to);
                }
                _ => {
                    let from = std::slice::from_raw_parts(place_head(src, size, unit), bytes);
                    (kernels.decode)(format, from, &mut values[..size]);
                    if in_row {
                        write_floats(kind, &values[..size], place(dst, unit * size), dst.nb[0]);
                    } else {
                        for (i, &v) in values[..size].iter().enumerate() {
                            write_floats(kind, &[v], place(dst, unit * size + i), 0);
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
