//! K or V of an attention: how its rows are read, whatever their type.

use crate::codec::delta::{Chain, Delta, GROUP_CELLS};
use crate::codec::levels::LevelLayout;
use crate::codec::plain::{Blocks, Plain, BLOCK};
use crate::codec::{RowFormat, Scorer};
use crate::domain::Domain;
use crate::groups::GroupLayout;
use crate::isa::{padded, Kernels, LevelBlock, Role, StoredRows};
use crate::room::Room;
use crate::rotation::MAX_HEAD;
use crate::table::Concrete;
use crate::tensor::{read_floats, Tensor, ToFloat};

/// How rows are read.
#[derive(Clone, Copy)]
enum Reader {
    /// As levels and scales.
    Levels(LevelLayout),
    /// As floats.
    Floats(Plain),
    /// As floats, through ggml.
    Foreign(ToFloat),
}

/// Cells first..first+n of one head of one stream, at most a block of them.
#[derive(Clone, Copy, Debug)]
pub struct Cells {
    /// The first cell.
    pub first: usize,
    /// How many.
    pub n: usize,
    /// The first cell of those that are read next, of the same head and stream.
    pub next: usize,
    /// The KV head.
    pub head: usize,
    /// The stream.
    pub stream: usize,
}

/// K or V of an attention: the reader and the geometry.
#[derive(Clone, Copy)]
pub struct KvSide {
    reader: Reader,
    /// Values of a head.
    pub size: usize,
    /// Values of a stored row, padded.
    pub width: usize,
    /// What rows are stored in.
    pub domain: Domain,
    /// How scores are taken, where rows have levels.
    pub scorer: Scorer,
    /// Where levels are differences within groups of cells.
    grouped: Option<Delta>,
    tensor: Tensor,
}

/// Blocks of attention must be groups, and are counted from the beginning of the view.
fn check_groups(tensor: &Tensor, c: Concrete, format: Delta, name: &str) -> Result<(), String> {
    let (offset, row_bytes, rows) = tensor.origin();
    if name != "K" {
        return Err(format!("{} is not for {name}: {}", c.name(), c.family.sides.refusal()));
    }
    GroupLayout::of(tensor, format)?;
    let heads = tensor.n(2).saturating_sub(1).saturating_mul(tensor.nb[2]);
    // All heads are of one cell, and all streams begin at the same one. Heads may be described as streams (MiniMax-M3).
    let heads_end = (offset % row_bytes + format.row_bytes()).saturating_add(heads);
    let streams = tensor.n(3).saturating_sub(1).saturating_mul(tensor.nb[3]);
    let whole_streams = tensor.nb[3].is_multiple_of(row_bytes * rows) || heads_end.saturating_add(streams) <= row_bytes;
    if (tensor.nb[1] != row_bytes && tensor.n(1) > 1) || heads_end > row_bytes || !whole_streams {
        return Err(format!(
            "{name} of type {} must be a view of consecutive cells: it steps by {:?} bytes in a cache of {rows} cells of \
             {row_bytes} bytes",
            c.name(),
            tensor.nb
        ));
    }
    let cell = offset / row_bytes % rows;
    if !cell.is_multiple_of(GROUP_CELLS) || cell + tensor.n(1) > rows {
        return Err(format!(
            "{name} of type {} is viewed from cell {cell} on, {} of {rows} cells: a view must begin at a multiple of \
             {GROUP_CELLS} and stay within a stream",
            c.name(),
            tensor.n(1)
        ));
    }
    Ok(())
}

impl KvSide {
    /// `name` is for the message.
    pub fn new(tensor: &Tensor, name: &str) -> Result<KvSide, String> {
        tensor.check(name)?;
        tensor.check_apart(name)?;
        match tensor.concrete() {
            Some(c) => KvSide::ours(tensor, c, name),
            None => KvSide::others(tensor, name),
        }
    }

    fn ours(tensor: &Tensor, c: Concrete, name: &str) -> Result<KvSide, String> {
        let (ne0, format) = (tensor.n(0), c.format());
        // A view of the first values of each row is what MLA caches use as V; anything else is not a head.
        if ne0 > c.head_size || ne0 == 0 || tensor.nb[0] != c.row_bytes() {
            return Err(format!("{name} of type {} has rows of {ne0} values, wanted {}", c.name(), c.head_size));
        }
        if name == "V" && !c.family.sides.serve_v() {
            return Err(format!("{} is not for V: {}", c.name(), c.family.sides.refusal()));
        }
        if let Some(f) = format.grouped() {
            check_groups(tensor, c, f, name)?;
        }
        Ok(KvSide {
            reader: Reader::Levels(format.levels()),
            size: c.head_size,
            width: padded(format.levels().values),
            domain: format.domain(),
            scorer: format.scorer(),
            grouped: format.grouped(),
            tensor: *tensor,
        })
    }

    /// A side of ggml's types.
    fn others(tensor: &Tensor, name: &str) -> Result<KvSide, String> {
        let size = tensor.n(0);
        if size == 0 || size > MAX_HEAD {
            return Err(format!("{name} has rows of {size} values, wanted 1 to {MAX_HEAD}"));
        }
        let blocks = tensor.plain().and_then(|p| Blocks::new(p, size));
        let reader = match (tensor.plain(), tensor.to_float) {
            (Some(p @ (Plain::F32 | Plain::F16 | Plain::Bf16)), _) if tensor.nb[0] == p.row_bytes(1) => {
                Some(Reader::Floats(p))
            }
            (None, Some(f)) => Some(Reader::Foreign(f)),
            _ => blocks.map(|b| Reader::Levels(b.levels())),
        };
        let Some(reader) = reader else {
            return Err(format!("{name} of type {} with rows of {size} values cannot be read", tensor.kind));
        };
        Ok(KvSide {
            reader,
            size,
            width: padded(size),
            domain: Domain::Plain,
            scorer: Scorer::Levels,
            grouped: None,
            tensor: *tensor,
        })
    }

    /// Are cells coded together?
    pub fn is_grouped(&self) -> bool {
        self.grouped.is_some()
    }

    /// Cells.
    pub fn cells(&self) -> usize {
        self.tensor.n(1)
    }

    /// Does it unpack to levels?
    pub fn has_levels(&self) -> bool {
        matches!(self.reader, Reader::Levels(_))
    }

    /// Are they levels of few bits?
    pub fn has_coarse_levels(&self) -> bool {
        matches!(self.reader, Reader::Levels(layout) if layout.packing.is_coarse())
    }

    /// Values that share a scale, 32 where there are no levels.
    pub fn scale_group(&self) -> usize {
        match self.reader {
            Reader::Levels(layout) => layout.scale_group,
            _ => BLOCK,
        }
    }

    /// The rows of these cells.
    ///
    /// # Safety
    /// The cells are within the tensor.
    pub unsafe fn rows(&self, cells: Cells) -> StoredRows {
        let stride = self.tensor.nb[1];
        // SAFETY: the caller's promise.
        let data = unsafe { self.tensor.row(cells.first, cells.head, cells.stream) };
        let ahead = (cells.next as isize - cells.first as isize) * stride as isize;
        StoredRows { data, stride, n: cells.n, ahead }
    }

    /// A block over these buffers, shaped for this side's levels.
    pub fn block(&self, levels: *mut i8, scales: *mut f32) -> LevelBlock {
        LevelBlock { levels, scales, width: self.width, scale_group: self.scale_group() }
    }

    /// Unpacks cells as levels.
    ///
    /// # Safety
    /// It has levels, the cells are within the tensor, `out` has room.
    pub unsafe fn levels(&self, kernels: &Kernels, cells: Cells, role: Role, out: LevelBlock) {
        if let Reader::Levels(layout) = &self.reader {
            // SAFETY: the caller's promise.
            unsafe { (kernels.unpack)(layout, self.rows(cells), role, out) }
        }
    }

    /// What the scores of a block's differences lack, where levels are such: the I-frame in `m`, and who passes on to whom.
    ///
    /// # Safety
    /// The cells are a whole block, or what the tensor has of one; `m` has room for `width` values.
    pub unsafe fn chain(&self, kernels: &Kernels, cells: Cells, m: *mut f32) -> Option<Chain> {
        let format = self.grouped?;
        let (offset, row_bytes, rows) = self.tensor.origin();
        let rows = GROUP_CELLS.min(rows - offset / row_bytes % rows - cells.first);
        // SAFETY: the cache goes on behind a view that ends within a group.
        unsafe {
            let m = std::slice::from_raw_parts_mut(m, self.width);
            Some((kernels.frame_and_chain)(format, self.rows(cells).data, row_bytes, rows, m))
        }
    }

    /// Reads cells that are not levels as f32 rows of `width`.
    ///
    /// # Safety
    /// As [`KvSide::levels`], but it has no levels.
    pub unsafe fn floats(&self, kernels: &Kernels, cells: Cells, out: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let StoredRows { data, stride, .. } = self.rows(cells);
            match self.reader {
                Reader::Levels(_) => unreachable!("levels are read as such"),
                Reader::Floats(kind) => (kernels.widen)(kind, data, stride, cells.n, self.size, out, self.width),
                Reader::Foreign(to_float) => {
                    for c in 0..cells.n {
                        let row = out.add(c * self.width);
                        to_float(data.add(c * stride), row, self.size as i64);
                        std::slice::from_raw_parts_mut(row.add(self.size), self.width - self.size).fill(0.0);
                    }
                }
            }
        }
    }

    /// A row of queries, in the domain that this side's rows are stored in.
    ///
    /// # Safety
    /// `q` has that row, of this side's size, and `out` is as wide as stored rows are; kernels run on the CPU they were
    /// chosen for.
    pub unsafe fn enter_query(&self, kernels: &Kernels, q: &Tensor, row: [usize; 3], out: &mut [f32]) {
        let mut plain = Room::new();
        let plain = plain.zeros(self.size);
        // SAFETY: the caller's promise.
        unsafe {
            read_floats(q.plain().unwrap_or(Plain::F32), q.row(row[0], row[1], row[2]), q.nb[0], plain);
            self.domain.enter(kernels, plain, out);
        }
    }
}
