//! Rows whose meaning lies in their group: reading and writing single cells of a delta cache.
//!
//! A row of [`crate::codec::delta`] is a difference from the row before, so a [`Walker`] goes through the rows of one
//! head and keeps what the last one left: the I-frame and the deviation from it. The next row then costs one step; any
//! other begins at the restart row before it, at most 63 steps of a multiplication and an addition per value.
//!
//! Rows are written one at a time in the order of the calls, so that the bytes depend on the order of writes alone:
//!
//! ```text
//! a group without I-frame gets one: this key
//! row t becomes what is the least of key - m - RHO u_(t-1), key - m and the key
//! row t+1, if it was chained to what row t held, is coded anew without it, with the value that it had
//! ```
//!
//! No group looks at another, so groups can be written side by side, moved, saved and restored by themselves, and a key has
//! the same bytes whatever the cells around its group have held. (The mean of the group before is the better I-frame
//! by 0 to 7% of the divergence, docs/types.md, but ties every group to the history of its neighbour.)
//!
//! So a write touches one row more at most. That row is rounded once more, and the rows chained to it move by RHO,
//! RHO^2, … of what that rounding took; it is not chained anymore and not touched again, so losses do not add up over
//! generations. A key of zeros leaves an empty cell alone, since it reads as zeros already: llama.cpp shifts keys by
//! reading and writing the whole cache, and cells that nobody has used must not settle on an I-frame by that.

use crate::codec::clean;
use crate::codec::delta::{Delta, RowKind, GROUP_CELLS};
use crate::codec::RowFormat;
use crate::isa::{padded, Kernels, LevelBlock, Role, StoredRows, CELLS};
use crate::lanes::{Lanes, LANES};
use crate::room::Room;
use crate::rotation::MAX_HEAD;
use crate::tensor::Tensor;
use std::mem::MaybeUninit;

/// One row of one head, in its group.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The group's first row.
    pub group: *mut u8,
    /// Bytes from a row to the next.
    pub stride: usize,
    /// Rows of the group: GROUP_CELLS, fewer at the end of a cache.
    pub rows: usize,
    /// The row's number in the group.
    pub row: usize,
}

/// Where the rows of a cache lie: all of one base tensor, whatever view of it an op has.
#[derive(Clone, Copy, Debug)]
pub struct GroupLayout {
    base: *mut u8,
    /// Bytes of a cell, all heads.
    stride: usize,
    /// Cells of a stream.
    cells: usize,
    /// Bytes of the row of one head.
    row_bytes: usize,
}

impl GroupLayout {
    /// Of the cache that a tensor is, or is a view of: all groups that its rows are in lie within that cache, or it is an
    /// error.
    pub fn of(tensor: &Tensor, format: Delta) -> Result<GroupLayout, String> {
        tensor.check("a cache")?;
        let (offset, stride, cells) = tensor.origin();
        let row_bytes = format.row_bytes();
        // Rows, cells and streams without gaps: what is a row of the tensor then is one of the cache.
        if stride == 0 || !stride.is_multiple_of(row_bytes) || !offset.is_multiple_of(row_bytes) {
            return Err(format!(
                "a cache of cells of {stride} bytes, viewed from byte {offset} on: wanted whole rows of {row_bytes} bytes"
            ));
        }
        let bytes = if tensor.is_view() { tensor.view.bytes } else { tensor.touched().unwrap_or(0) };
        let stream = stride.checked_mul(cells).filter(|&stream| stream > 0 && bytes.is_multiple_of(stream));
        if bytes == 0 || stream.is_none() {
            return Err(format!(
                "a cache of {bytes} bytes: wanted whole streams of {cells} cells of {stride} bytes, all of which hold rows"
            ));
        }
        Ok(GroupLayout::new(tensor.data.wrapping_sub(offset), stride, cells, format))
    }

    /// Of streams of `cells` cells of `stride` bytes, one after the other from `base` on.
    pub fn new(base: *mut u8, stride: usize, cells: usize, format: Delta) -> GroupLayout {
        GroupLayout { base, stride, cells, row_bytes: format.row_bytes() }
    }

    /// The place of the row of one head that begins at `row`, and the number of its head and stream: writes to
    /// different ones of these have nothing to do with each other.
    pub fn place(&self, row: *mut u8) -> (Place, usize) {
        let offset = row as usize - self.base as usize;
        let (cell, head) = (offset / self.stride, offset % self.stride / self.row_bytes);
        let (cell, stream) = (cell % self.cells, cell / self.cells);
        let in_group = cell % GROUP_CELLS;
        let place = Place {
            group: row.wrapping_sub(in_group * self.stride),
            stride: self.stride,
            rows: GROUP_CELLS.min(self.cells - (cell - in_group)),
            row: in_group,
        };
        (place, stream * (self.stride / self.row_bytes) + head)
    }
}

/// Goes through the rows of a cache.
pub struct Walker {
    format: Delta,
    kernels: &'static Kernels,
    width: usize,
    /// The group whose I-frame is in `m`.
    group: *const u8,
    m: Box<[f32]>,
    /// The row whose deviation is in `u`.
    at: Option<usize>,
    u: Box<[f32]>,
}

impl Walker {
    /// Nothing read yet.
    pub fn new(format: Delta, kernels: &'static Kernels) -> Walker {
        let width = padded(format.size());
        Walker {
            format,
            kernels,
            width,
            group: std::ptr::null(),
            m: vec![0.0; width].into(),
            at: None,
            u: vec![0.0; width].into(),
        }
    }

    /// Decodes a row.
    ///
    /// # Safety
    /// The place is within a cache of this format that nobody writes meanwhile, and was written through this walker
    /// alone since it last read there.
    pub unsafe fn read(&mut self, place: Place, x: &mut [f32]) {
        let size = self.format.size();
        // SAFETY: the caller's promise; kernels run on the CPU they were chosen for.
        unsafe {
            if kind(self.format, place, place.row) == RowKind::Empty {
                return x[..size].fill(0.0);
            }
            self.enter(place);
            self.go_to(place, place.row);
            let mut key = Room::new();
            let key = key.zeros(size);
            self.key(key);
            self.format.domain().leave(self.kernels, key, &mut x[..size]);
        }
    }

    /// Encodes a row.
    ///
    /// # Safety
    /// As [`Walker::read`], and nobody reads meanwhile.
    pub unsafe fn write(&mut self, place: Place, x: &[f32]) {
        let (size, row) = (self.format.size(), place.row);
        // SAFETY: the caller's promise; kernels run on the CPU they were chosen for.
        unsafe {
            if x[..size].iter().all(|&x| x == 0.0) && kind(self.format, place, row) == RowKind::Empty {
                return;
            }
            let (mut plain, mut key) = (Room::new(), Room::new());
            let (plain, key) = (plain.zeros(size), key.zeros(size));
            clean(&x[..size], plain);
            self.format.domain().enter(self.kernels, plain, key);
            self.enter(place);
            if !self.format.has_frame(place.group) {
                self.found(place, key);
            }
            let follows = row > 0 && kind(self.format, place, row - 1) != RowKind::Empty;
            if follows {
                self.go_to(place, row - 1);
            }
            let mut after = Room::new();
            let after =
                (row + 1 < place.rows && stored_kind(self.format, place, row + 1) == RowKind::Chained).then(|| {
                    let (at, u) = (self.at, self.u.clone());
                    self.go_to(place, row + 1);
                    let after = after.zeros(size);
                    self.key(after);
                    (self.at, self.u) = (at, u);
                    after
                });
            self.encode(place, row, key, follows);
            if let Some(after) = after {
                self.encode(place, row + 1, after, false);
            }
        }
        // The next row takes this step if it is chained to this one; during generation another walker writes it.
        self.at = self.at.filter(|&at| at < row);
    }

    /// The key that m and u make, in the rotated domain.
    fn key(&self, key: &mut [f32]) {
        for (key, (m, u)) in key.iter_mut().zip(self.m.iter().zip(&self.u)) {
            *key = m + u;
        }
    }

    /// Encodes a rotated key, from the deviation in `u` if that is of the row before.
    unsafe fn encode(&mut self, place: Place, row: usize, key: &[f32], follows: bool) {
        let size = self.format.size();
        // SAFETY: the caller's row; kernels run on the CPU they were chosen for.
        unsafe {
            let bytes = std::slice::from_raw_parts_mut(place.group.add(row * place.stride), self.format.row_bytes());
            let before = follows.then(|| &self.u[..size]);
            (self.kernels.encode_key)(self.format, key, &self.m[..size], before, bytes);
        }
    }

    /// Takes up the I-frame of a group.
    unsafe fn enter(&mut self, place: Place) {
        if self.group != place.group.cast_const() {
            self.group = place.group;
            self.at = None;
            // SAFETY: the caller's promise.
            unsafe { self.format.frame::<Lanes>(place.group, place.stride, place.rows, &mut self.m) };
        }
    }

    /// Gives a group its I-frame: the key.
    unsafe fn found(&mut self, place: Place, key: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            // Rows that are there without one, from elsewhere, have been read with zeros.
            if self.format.flags::<Lanes>(place.group, place.stride, place.rows).written != 0 {
                self.m.fill(0.0);
            } else {
                self.m[..key.len()].copy_from_slice(key);
            }
            self.format.set_frame(&mut self.m, place.group, place.stride, place.rows);
        }
    }

    /// Is the I-frame the key of one of these rows, or of nobody? A row that founded its group is as far from it as its
    /// slots round, and stays so while it is there.
    unsafe fn frame_is_one_of(&mut self, place: Place, rows: u64) -> bool {
        const NEAR: f32 = 1.0 / 128.0;
        // At the end of a cache a group has no room for all of it.
        let stored = self.format.size().min(place.rows * self.format.slots());
        let largest = |x: &[f32]| x[..stored].iter().fold(0.0f32, |max, x| max.max(x.abs()));
        // SAFETY: the caller's promise.
        unsafe {
            self.enter(place);
            let near = NEAR * largest(&self.m);
            near == 0.0
                || (0..place.rows).filter(|row| rows >> row & 1 != 0).any(|row| {
                    self.go_to(place, row);
                    largest(&self.u) <= near
                })
        }
    }

    /// Brings `u` to a written row.
    unsafe fn go_to(&mut self, place: Place, row: usize) {
        if self.at == Some(row) {
            return;
        }
        // SAFETY: the caller's promise; rows up to `row`.
        unsafe {
            let mut first = row;
            while self.at.is_none_or(|at| at + 1 != first) && kind(self.format, place, first) == RowKind::Chained {
                first -= 1;
            }
            self.step(place, first, row);
        }
        self.at = Some(row);
    }

    /// Rows first..=last, from the deviation of the row before `first`; those after it are chained.
    unsafe fn step(&mut self, place: Place, first: usize, last: usize) {
        let layout = self.format.levels();
        // Room for a block of any size: on the stack it costs nothing.
        let mut levels = [MaybeUninit::<i8>::uninit(); CELLS * padded(MAX_HEAD)];
        let mut scales = [MaybeUninit::<f32>::uninit(); CELLS * padded(MAX_HEAD) / LANES];
        let block = LevelBlock {
            levels: levels.as_mut_ptr().cast(),
            scales: scales.as_mut_ptr().cast(),
            width: self.width,
            scale_group: layout.scale_group,
        };
        let cells = last + 1 - first;
        // SAFETY: rows of the group, at most a block of them, which the kernels find unpacked.
        unsafe {
            let data = place.group.add(first * place.stride);
            (self.kernels.unpack)(&layout, StoredRows::new(data, place.stride, cells), Role::Expand, block);
            (self.kernels.follow)(block, cells, kind(self.format, place, first), &self.m, &mut self.u);
        }
    }
}

const _: () = assert!(GROUP_CELLS == CELLS);

/// Rows of one head in consecutive cells, from the beginning of a group.
pub fn encode(format: Delta, kernels: &'static Kernels, x: &[f32], rows: &mut [u8]) {
    rows.fill(0);
    let mut walker = Walker::new(format, kernels);
    for (row, x) in x.chunks_exact(format.size()).enumerate() {
        // SAFETY: row `row` of the slice, which this function has to itself.
        unsafe { walker.write(place_in(format, rows.as_mut_ptr(), rows.len(), row), x) };
    }
}

/// The way back.
pub fn decode(format: Delta, kernels: &'static Kernels, rows: &[u8], x: &mut [f32]) {
    let mut walker = Walker::new(format, kernels);
    for (row, x) in x.chunks_exact_mut(format.size()).enumerate() {
        // SAFETY: row `row` of the slice; reading writes nothing.
        unsafe { walker.read(place_in(format, rows.as_ptr().cast_mut(), rows.len(), row), x) };
    }
}

fn place_in(format: Delta, rows: *mut u8, bytes: usize, row: usize) -> Place {
    let stride = format.row_bytes();
    let layout = GroupLayout::new(rows, stride, bytes / stride, format);
    layout.place(rows.wrapping_add(row * stride)).0
}

/// Empties the rows of a group that bit t of `kept` does not name, so that nothing of their keys is left: see
/// [`crate::state::keep`].
///
/// # Safety
/// `place` is a row of a group of this format that is the caller's alone.
pub unsafe fn keep(format: Delta, kernels: &'static Kernels, place: Place, kept: u64) {
    let size = format.size();
    let at = |row: usize| Place { row, ..place };
    // SAFETY: rows of the caller's group.
    unsafe {
        let flags = format.flags::<Lanes>(place.group, place.stride, place.rows);
        let stays = flags.written & kept;
        let leans_on_others = flags.chained & stays & !(stays << 1) != 0;
        let at_row = |row: usize| place.group.add(row * place.stride);
        let mut walker = Walker::new(format, kernels);
        if stays == 0 || (!leans_on_others && walker.frame_is_one_of(place, stays)) {
            for row in (0..place.rows).filter(|row| stays >> row & 1 == 0) {
                match stays {
                    0 => at_row(row).write_bytes(0, format.row_bytes()),
                    _ => format.empty(at_row(row)),
                }
            }
            return;
        }
        let rows: Vec<usize> = (0..place.rows).filter(|row| stays >> row & 1 != 0).collect();
        let mut keys = vec![0.0f32; rows.len() * size];
        for (&row, key) in rows.iter().zip(keys.chunks_exact_mut(size)) {
            walker.read(at(row), key);
        }
        (0..place.rows).for_each(|row| at_row(row).write_bytes(0, format.row_bytes()));
        let mut walker = Walker::new(format, kernels);
        for (&row, key) in rows.iter().zip(keys.chunks_exact(size)) {
            walker.write(at(row), key);
        }
    }
}

/// What a row says it is.
unsafe fn stored_kind(format: Delta, place: Place, row: usize) -> RowKind {
    // SAFETY: the caller's row.
    format.kind(unsafe { std::slice::from_raw_parts(place.group.add(row * place.stride), format.row_bytes()) })
}

/// What a row is to a reader: one that says chained is that only where the row before is there.
unsafe fn kind(format: Delta, place: Place, row: usize) -> RowKind {
    // SAFETY: the caller's row, and the one before where there is one.
    unsafe {
        match stored_kind(format, place, row) {
            RowKind::Chained if row == 0 || stored_kind(format, place, row - 1) == RowKind::Empty => RowKind::Restart,
            kind => kind,
        }
    }
}

#[cfg(test)]
mod tests;
