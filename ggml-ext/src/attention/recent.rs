//! Precise rows of recent cells: they are attended to in the place of the cells' own rows.
//!
//! Columns stand for cells: first the slots of a window that the cache keeps, then the tokens of the batch at hand. A list
//! says which cell a column holds. The cell itself is hidden, and the column has its mask; a column whose cell is not there,
//! -1 or beyond the cells that are looked at, is not there either. So what slots hold that no column names does not matter.

use super::side::KvSide;
use crate::isa::CELLS;
use crate::tensor::{Tensor, I64};

/// Precise rows of recent cells, as further sources of an attention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RecentRows<'a> {
    /// [dk, slots, n_head_kv, ne3]
    pub k: Tensor,
    /// [dv, slots, n_head_kv, ne3]
    pub v: Tensor,
    /// i64 [slots + tokens, ne3]: the cell of each column
    pub cells: Tensor,
    /// [dk, tokens, n_head_kv, ne3] of the batch, or NULL
    pub batch_k: Option<&'a Tensor>,
    /// [dv, tokens, n_head_kv, ne3] of the batch, or NULL
    pub batch_v: Option<&'a Tensor>,
}

/// Columns whose rows lie in one pair of tensors.
pub(super) struct Part {
    pub k: KvSide,
    pub v: KvSide,
    /// The number of its first column.
    column: usize,
}

/// The columns of an attention, checked.
pub(super) struct Recent {
    parts: Vec<Part>,
    cells: Tensor,
}

/// A block of columns: those from `first` on of a part.
#[derive(Clone, Copy)]
pub(super) struct ColumnBlock<'a> {
    pub part: &'a Part,
    pub first: usize,
    pub n: usize,
}

/// No cell.
pub(super) const NOWHERE: usize = usize::MAX;

impl Recent {
    /// Do they fit the K and V of an attention?
    pub fn new(rows: &RecentRows, k: &KvSide, v: &KvSide, shapes: [&Tensor; 2]) -> Result<Recent, String> {
        let want = |ok: bool, what: &str| if ok { Ok(()) } else { Err(format!("recent rows: {what}")) };
        let mut recent = Recent { parts: Vec::new(), cells: rows.cells };
        let batch = match (rows.batch_k, rows.batch_v) {
            (Some(k), Some(v)) => Some((k, v)),
            (None, None) => None,
            _ => return Err("recent rows: the batch must have both K and V, or neither".into()),
        };
        let mut columns = 0;
        for (part_k, part_v) in std::iter::once((&rows.k, &rows.v)).chain(batch) {
            for (t, [of, window]) in [(part_k, [shapes[0], &rows.k]), (part_v, [shapes[1], &rows.v])] {
                let fits = t.n(0) == of.n(0) && t.n(2) == of.n(2) && t.n(3) == of.n(3);
                want(
                    fits && t.n(1) == part_k.n(1),
                    "they must have K's and V's heads and streams, and one number of cells",
                )?;
                want(t.kind == window.kind, "the batch must have the window's types")?;
            }
            let part = Part {
                k: KvSide::new(part_k, "K").map_err(|e| format!("recent rows: {e}"))?,
                v: KvSide::new(part_v, "V").map_err(|e| format!("recent rows: {e}"))?,
                column: columns,
            };
            want(!part.k.is_grouped(), "their K must be of rows that stand alone")?;
            want(part.k.size == k.size && part.v.size == v.size, "they must be of K's and V's head sizes")?;
            let sums = v.domain.takes(part.v.domain) && (part.v.has_levels() || part.v.width == v.width);
            want(sums, "their V must be rotated as V is")?;
            columns += part_k.n(1);
            recent.parts.push(part);
        }
        let cells = &rows.cells;
        let listed = cells.kind == I64 && cells.n(0) == columns && cells.n(1) == shapes[0].n(3) && cells.nb[0] == 8;
        want(listed && cells.n(2) == 1 && cells.n(3) == 1, "there must be a list of i64 with the cell of each column")?;
        cells.check("the cells of recent rows")?;
        Ok(recent)
    }

    /// Of the window, and of the batch if there is one.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Blocks of all columns; a block is of one part.
    pub fn blocks(&self) -> usize {
        self.parts.iter().map(|p| p.k.cells().div_ceil(CELLS)).sum()
    }

    /// Block number `block`.
    pub fn block(&self, mut block: usize) -> ColumnBlock<'_> {
        for part in &self.parts {
            let blocks = part.k.cells().div_ceil(CELLS);
            if block < blocks {
                let first = block * CELLS;
                return ColumnBlock { part, first, n: CELLS.min(part.k.cells() - first) };
            }
            block -= blocks;
        }
        unreachable!("a block below their number")
    }

    /// The cells of a stream's columns of a block; NOWHERE beyond the block, and for what is not below `cells`.
    ///
    /// # Safety
    /// The list holds what its shape says.
    pub unsafe fn cells_of(&self, block: ColumnBlock, stream: usize, cells: usize) -> [usize; CELLS] {
        let mut res = [NOWHERE; CELLS];
        for (i, cell) in res[..block.n].iter_mut().enumerate() {
            // SAFETY: a value of the list.
            let value = unsafe { self.value(block.part.column + block.first + i, stream) };
            *cell = usize::try_from(value).ok().filter(|&c| c < cells).unwrap_or(NOWHERE);
        }
        res
    }

    /// For each stream and block of `cells` cells, which of them are hidden: a bit for each.
    ///
    /// # Safety
    /// As [`Recent::cells_of`].
    pub unsafe fn hidden(&self, cells: usize) -> Vec<u64> {
        let blocks = cells.div_ceil(CELLS);
        let mut res = vec![0; blocks * self.cells.n(1)];
        for stream in 0..self.cells.n(1) {
            for column in 0..self.cells.n(0) {
                // SAFETY: the caller's promise.
                let cell = usize::try_from(unsafe { self.value(column, stream) });
                if let Some(cell) = cell.ok().filter(|&c| c < cells) {
                    res[stream * blocks + cell / CELLS] |= 1u64 << (cell % CELLS);
                }
            }
        }
        res
    }

    unsafe fn value(&self, column: usize, stream: usize) -> i64 {
        // SAFETY: the caller keeps to the list's shape.
        unsafe {
            self.cells.data.add(column * self.cells.nb[0] + stream * self.cells.nb[1]).cast::<i64>().read_unaligned()
        }
    }
}

impl RecentRows<'_> {
    /// Its tensors, by name.
    pub(super) fn tensors(&self) -> [(Option<&Tensor>, &'static str); 5] {
        [
            (Some(&self.k), "the recent rows of K"),
            (Some(&self.v), "the recent rows of V"),
            (Some(&self.cells), "the cells of recent rows"),
            (self.batch_k, "the batch's rows of K"),
            (self.batch_v, "the batch's rows of V"),
        ]
    }
}
