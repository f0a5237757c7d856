//! Tensors as ggml lays them out, described plainly.

use crate::codec::plain::{Plain, BLOCK};
use crate::table::{self, Concrete, Entry};
use half::f16;

/// A byte of memory whose type is not known here: `void` in the C header.
pub type Untyped = u8;

/// Decodes n values of a foreign type.
pub type ToFloat = unsafe extern "C" fn(src: *const Untyped, dst: *mut f32, n: i64);

/// A tensor as ggml lays it out. Shapes, steps, views and indices are not trusted: an op that would touch a byte outside
/// of the tensor, or outside of what it is a view of, is refused. What is trusted is that this memory is there.
/// cbindgen:field-names=[type, ne, nb, data, to_float, view]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// ggml's or our type id.
    pub kind: i32,
    /// Values per dimension.
    pub ne: [i64; 4],
    /// Bytes per step of a dimension.
    pub nb: [usize; 4],
    /// The first value.
    pub data: *mut Untyped,
    /// For types that are not read here; may be NULL for ours, f32, f16, bf16, q8_0 and q4_0.
    pub to_float: Option<unsafe extern "C" fn(src: *const Untyped, dst: *mut f32, n: i64)>,
    /// Where it is a view: of what.
    pub view: View,
}

/// What a tensor is a view of; all zero where it is none. Cells that are coded together are counted from the beginning of
/// the cache itself.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Bytes from the beginning of the viewed tensor to `data`.
    pub offset: usize,
    /// The viewed tensor's nb[1]: a cell, all heads.
    pub row_bytes: usize,
    /// The viewed tensor's ne[1]: cells of a stream.
    pub rows: i64,
    /// Where the viewed tensor begins.
    pub data: *mut Untyped,
    /// Of the viewed tensor.
    pub bytes: usize,
    /// Of the tensor itself, view or not, where it has a `to_float`.
    pub foreign_bytes: usize,
}

impl Default for View {
    fn default() -> View {
        View { offset: 0, row_bytes: 0, rows: 0, data: std::ptr::null_mut(), bytes: 0, foreign_bytes: 0 }
    }
}

/// ggml's ids of index types.
pub const I32: i32 = 26;
/// 64-bit ones.
pub const I64: i32 = 27;

impl Tensor {
    /// The concrete type of ours, if it is one.
    pub fn concrete(&self) -> Option<Concrete> {
        match table::by_id(self.kind) {
            Some(Entry::Concrete(c)) => Some(c),
            _ => None,
        }
    }

    /// ggml's plain type, if it is one.
    pub fn plain(&self) -> Option<Plain> {
        Plain::from_ggml(self.kind)
    }

    /// Is it f32 or f16?
    pub fn is_float(&self) -> bool {
        matches!(self.plain(), Some(Plain::F32 | Plain::F16))
    }

    /// Values along dimension `d`; negative counts are nothing.
    pub fn n(&self, d: usize) -> usize {
        usize::try_from(self.ne[d]).unwrap_or(0)
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.n(1) * self.n(2) * self.n(3)
    }

    /// The number of values, where it can be counted.
    pub fn values(&self) -> Option<usize> {
        (0..4).try_fold(1usize, |n, d| n.checked_mul(self.n(d)))
    }

    /// Has it no values?
    pub fn is_empty(&self) -> bool {
        self.ne.iter().any(|&n| n <= 0)
    }

    /// Is it a view of another tensor?
    pub fn is_view(&self) -> bool {
        self.view.rows != 0 || self.view.bytes != 0 || self.view.offset != 0
    }

    /// Bytes of what ggml calls an element or a block, and how many a row has: what is touched of a row whatever part of
    /// it is wanted.
    fn units(&self) -> Option<(usize, usize)> {
        Some(match (self.concrete(), self.plain(), self.kind) {
            (Some(c), ..) => (c.row_bytes(), self.n(0).div_ceil(c.head_size)),
            (_, Some(p @ (Plain::Q8_0 | Plain::Q4_0)), _) => (p.row_bytes(BLOCK), self.n(0).div_ceil(BLOCK)),
            (_, Some(p), _) => (p.row_bytes(1), self.n(0)),
            (.., I32) => (4, self.n(0)),
            (.., I64) => (8, self.n(0)),
            _ => return None,
        })
    }

    /// Bytes from `data` to the end of the last one that an op may touch; None where no memory is so large, or the type is
    /// not known.
    pub fn touched(&self) -> Option<usize> {
        if self.is_empty() {
            return Some(0);
        }
        let Some((bytes, n)) = self.units() else {
            return (self.to_float.is_some() && self.view.foreign_bytes > 0).then_some(self.view.foreign_bytes);
        };
        let steps = [n, self.n(1), self.n(2), self.n(3)];
        let last = steps.iter().zip(self.nb).try_fold(bytes, |end, (n, nb)| end.checked_add((n - 1).checked_mul(nb)?));
        last.filter(|&end| end <= isize::MAX as usize)
    }

    /// Does all that an op may touch lie in the memory that the tensor has, as it is described? Tensors come from programs
    /// and, over RPC, from other machines: nothing in them is taken for granted. `name` is for the message.
    pub fn check(&self, name: &str) -> Result<(), String> {
        let shape = || format!("{:?} with steps of {:?} bytes", self.ne, self.nb);
        if self.ne.iter().any(|&n| n < 0) {
            return Err(format!("{name} is {}: a dimension is negative", shape()));
        }
        let Some(touched) = self.touched() else {
            return Err(format!("{name} of type {} is {}: it cannot be read", self.kind, shape()));
        };
        if touched == 0 {
            return Ok(());
        }
        if let Some(c) = self.concrete() {
            let row = c.row_bytes();
            if self.nb[0] != row || (1..4).any(|d| self.ne[d] > 1 && !self.nb[d].is_multiple_of(row)) {
                return Err(format!("{name} of type {} is {}: rows are of {row} bytes", c.name(), shape()));
            }
            if !self.is_view() && !self.n(0).is_multiple_of(c.head_size) {
                return Err(format!("{name} of type {} is {}: a part of a row must be a view", c.name(), shape()));
            }
        } else if let Some(p @ (Plain::Q8_0 | Plain::Q4_0)) = self.plain() {
            if self.nb[0] != p.row_bytes(BLOCK) || !self.n(0).is_multiple_of(BLOCK) {
                return Err(format!("{name} is {}: wanted whole blocks of {BLOCK} values", shape()));
            }
        }
        if !self.is_view() {
            return Ok(());
        }
        let View { offset, bytes, data, .. } = self.view;
        if offset.checked_add(touched).is_none_or(|end| end > bytes) {
            return Err(format!(
                "{name} is {}: {touched} bytes from byte {offset} on, and what it is a view of has {bytes}",
                shape()
            ));
        }
        if !self.data.is_null() && !data.is_null() && self.data != data.wrapping_add(offset) {
            return Err(format!("{name} is a view from byte {offset} on, but its data does not begin there"));
        }
        Ok(())
    }

    /// The same for memory that is about to be used: it must be there.
    pub fn check_data(&self, name: &str) -> Result<(), String> {
        self.check(name)?;
        self.check_there(name)
    }

    /// Of a tensor that was checked: is its memory there?
    pub fn check_there(&self, name: &str) -> Result<(), String> {
        if self.is_empty() {
            return Ok(());
        }
        if self.data.is_null() {
            return Err(format!("{name} has no memory"));
        }
        if self.is_view() && self.data != self.view.data.wrapping_add(self.view.offset) {
            return Err(format!("{name} is a view of a tensor that has no memory"));
        }
        Ok(())
    }

    /// Has every value a place of its own? Threads write to different ones, and a few bytes cannot pass for many cells.
    pub fn check_apart(&self, name: &str) -> Result<(), String> {
        if self.is_empty() {
            return Ok(());
        }
        let steps =
            |n: usize| [(self.nb[0], n), (self.nb[1], self.n(1)), (self.nb[2], self.n(2)), (self.nb[3], self.n(3))];
        let (mut end, mut steps) = if let Some((bytes, n)) = self.units() {
            (bytes, steps(n))
        } else {
            // A row of a foreign type is what is left of the whole.
            let Some(all) = self.touched() else {
                return Ok(());
            };
            let steps = steps(1);
            let rest = steps[1..]
                .iter()
                .fold(0usize, |sum, &(nb, n)| sum.saturating_add((n.saturating_sub(1)).saturating_mul(nb)));
            (all.saturating_sub(rest), steps)
        };
        steps.sort_unstable();
        for (nb, n) in steps.into_iter().filter(|s| s.1 > 1) {
            if nb < end {
                return Err(format!("{name} is {:?} with steps of {:?} bytes: rows overlap", self.ne, self.nb));
            }
            end += (n - 1) * nb;
        }
        Ok(())
    }

    /// Rows of f32 that results are written to.
    pub fn check_result(&self, name: &str) -> Result<(), String> {
        let aligned = (1..4).all(|d| self.ne[d] <= 1 || self.nb[d].is_multiple_of(size_of::<f32>()));
        if self.plain() != Some(Plain::F32) || self.nb[0] != size_of::<f32>() || !aligned {
            return Err(format!("{name} must be rows of f32, and is type {} with steps of {:?}", self.kind, self.nb));
        }
        if !(self.data as usize).is_multiple_of(size_of::<f32>()) {
            return Err(format!("{name} must begin at a multiple of {} bytes", size_of::<f32>()));
        }
        self.check(name)?;
        self.check_apart(name)
    }

    /// A result that there will not be is NaN, where it has memory at all: what was there must not pass for one.
    ///
    /// # Safety
    /// The memory is as described, and nobody else uses it.
    pub unsafe fn fill_nan(&self) {
        if self.check_result("").is_err() || self.check_data("").is_err() || self.is_empty() {
            return;
        }
        for (i3, i2, i1) in
            (0..self.n(3)).flat_map(|i3| (0..self.n(2)).flat_map(move |i2| (0..self.n(1)).map(move |i1| (i3, i2, i1))))
        {
            // SAFETY: a row of the tensor, of aligned f32.
            unsafe { std::slice::from_raw_parts_mut(self.row(i1, i2, i3).cast::<f32>(), self.n(0)).fill(f32::NAN) };
        }
    }

    /// Bytes from the beginning of the tensor that holds the data, its bytes per row, and its rows along dimension 1.
    pub fn origin(&self) -> (usize, usize, usize) {
        if self.is_view() {
            return (self.view.offset, self.view.row_bytes, usize::try_from(self.view.rows).unwrap_or(0));
        }
        (0, self.nb[1], self.n(1))
    }

    /// Where the row (i1, i2, i3) begins.
    ///
    /// # Safety
    /// The indices are within the tensor.
    pub unsafe fn row(&self, i1: usize, i2: usize, i3: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.data.add(i1 * self.nb[1] + i2 * self.nb[2] + i3 * self.nb[3]) }
    }
}

/// Reads f32 or f16 values, `step` bytes apart.
///
/// # Safety
/// `data` holds them.
pub unsafe fn read_floats(kind: Plain, data: *const u8, step: usize, out: &mut [f32]) {
    if kind == Plain::F32 && step == size_of::<f32>() {
        // SAFETY: the caller's promise; bytes need no alignment.
        return unsafe { std::ptr::copy_nonoverlapping(data, out.as_mut_ptr().cast(), size_of_val(out)) };
    }
    for (i, out) in out.iter_mut().enumerate() {
        // SAFETY: value i; byte-wise, alignment does not matter.
        *out = unsafe {
            match kind {
                Plain::F16 => f16::from_bits(data.add(i * step).cast::<u16>().read_unaligned()).to_f32(),
                _ => data.add(i * step).cast::<f32>().read_unaligned(),
            }
        };
    }
}

/// Writes f32 or f16 values, `step` bytes apart.
///
/// # Safety
/// `data` has room for them.
pub unsafe fn write_floats(kind: Plain, values: &[f32], data: *mut u8, step: usize) {
    for (i, &x) in values.iter().enumerate() {
        // SAFETY: value i.
        unsafe {
            match kind {
                Plain::F16 => data.add(i * step).cast::<u16>().write_unaligned(f16::from_f32(x).to_bits()),
                _ => data.add(i * step).cast::<f32>().write_unaligned(x),
            }
        }
    }
}

#[cfg(test)]
mod tests;
