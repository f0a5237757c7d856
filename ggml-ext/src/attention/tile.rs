//! Some query rows of one KV head against a range of cells.
//!
//! What is stored as levels is never more than unpacked: K's levels meet 8-bit queries in integer dot products, V's
//! levels are weighed with 16-bit weights (polar keys meet tables of queries instead), and all that is read or written beside the cache stays in the first-level
//! cache. A side that is stored as floats goes through f32 rows; with many query rows K's are transposed, so that both
//! products are one small matrix kernel.

use super::split::Rows;
use super::Attention;
use crate::codec::plain::Plain;
use crate::isa::{Matrix, MatrixMut, Queries, Role, Sight, CELLS};
use crate::tensor::Cells;

/// Rows from which transposing K's floats pays.
const MANY_ROWS: usize = 12;

/// The result of a row so far: maximum score, sum of weights, weighted sum of values.
pub(super) struct RowState<'a> {
    pub max: f32,
    pub sum: f32,
    pub acc: &'a mut [f32],
}

/// What buffers are sized by.
#[derive(Clone, Copy)]
pub(super) struct TileShape {
    /// Query rows of a tile.
    pub rows: usize,
    /// Padded widths of K and V.
    pub k: usize,
    pub v: usize,
    /// Groups of a key.
    pub k_groups: usize,
    /// Floats of the tables of a query, where scores are taken by such.
    pub tables: usize,
    /// Is a side stored as floats?
    pub floats: bool,
}

impl TileShape {
    fn widest(self) -> usize {
        self.k.max(self.v)
    }

    /// Floats of one f32 block, where there are such.
    fn float_cells(self) -> usize {
        if self.floats {
            CELLS * self.widest()
        } else {
            0
        }
    }

    /// Bytes of what a tile keeps from block to block; each buffer begins at a multiple of 64.
    pub fn tile_bytes(self) -> usize {
        let groups = self.rows * self.k_groups;
        let tables = self.rows * self.tables;
        let floats = [self.rows, self.rows, groups, groups, tables, self.rows * self.k, self.rows * self.v];
        floats.iter().map(|n| (4 * n).next_multiple_of(64)).sum::<usize>() + (self.rows * self.k).next_multiple_of(64)
    }

    /// Bytes of what serves one block at a time, whichever tile it is for.
    pub fn scratch_bytes(self) -> usize {
        let (cells, floats) = (CELLS * self.widest(), self.float_cells());
        let floats = [self.rows * CELLS, self.rows * CELLS, cells / 16, self.k, floats, floats];
        floats.iter().map(|n| (4 * n).next_multiple_of(64)).sum::<usize>() + cells.next_multiple_of(64)
    }
}

/// Cuts memory into buffers that begin at multiples of 64.
struct Cut(*mut u8);

impl Cut {
    /// The next n values.
    ///
    /// # Safety
    /// The memory that is left has room for them, rounded up to 64 bytes.
    unsafe fn take<T>(&mut self, n: usize) -> *mut T {
        let here = self.0;
        // SAFETY: the caller's promise.
        self.0 = unsafe { here.add((n * size_of::<T>()).next_multiple_of(64)) };
        here.cast()
    }
}

/// The buffers of one thread for the block at hand.
pub(super) struct Scratch {
    /// Scores, then weights: rows of CELLS.
    scores: *mut f32,
    /// Masks of the block: one row of CELLS per query row.
    masks: *mut f32,
    levels: *mut i8,
    scales: *mut f32,
    /// The I-frame of the block, where its cells are a group.
    frame: *mut f32,
    floats: *mut f32,
    transposed: *mut f32,
    /// What each row sees of the block.
    sights: Vec<Sight>,
}

impl Scratch {
    /// # Safety
    /// `memory` is 64-byte aligned, has shape.scratch_bytes() bytes and is this thread's alone.
    pub unsafe fn new(shape: TileShape, memory: *mut u8) -> Scratch {
        let (mut cut, cells) = (Cut(memory), CELLS * shape.widest());
        // SAFETY: scratch_bytes() adds up the same buffers.
        unsafe {
            Scratch {
                scores: cut.take(shape.rows * CELLS),
                masks: cut.take(shape.rows * CELLS),
                levels: cut.take(cells),
                scales: cut.take(cells / 16),
                frame: cut.take(shape.k),
                floats: cut.take(shape.float_cells()),
                transposed: cut.take(shape.float_cells()),
                sights: vec![Sight::Open; shape.rows],
            }
        }
    }
}

/// Query rows of one KV head and their results so far.
pub(super) struct Tile<'a> {
    attention: &'a Attention<'a>,
    shape: TileShape,
    rows: Rows,
    /// The number of rows.
    count: usize,
    /// Per row: maximum and sum.
    max: *mut f32,
    sum: *mut f32,
    /// Queries as floats, rows of shape.k, and as bytes.
    q: *mut f32,
    queries: Queries,
    /// Rows of shape.tables.
    tables: *mut f32,
    /// Rows of shape.v.
    acc: *mut f32,
}

impl<'a> Tile<'a> {
    /// Rotates the queries and begins with empty results.
    ///
    /// # Safety
    /// `memory` is 64-byte aligned, has shape.tile_bytes() bytes and is this tile's alone; `shape` has room for the rows; the
    /// tensors hold what their shapes say.
    pub unsafe fn new(attention: &'a Attention<'a>, shape: TileShape, rows: Rows, memory: *mut u8) -> Tile<'a> {
        let mut cut = Cut(memory);
        let count = rows.rows.len();
        // SAFETY: tile_bytes() adds up the same buffers; the tensors hold what they say.
        unsafe {
            let mut tile = Tile {
                attention,
                shape,
                count,
                rows,
                max: cut.take(shape.rows),
                sum: cut.take(shape.rows),
                q: cut.take(shape.rows * shape.k),
                queries: Queries {
                    scales: cut.take(shape.rows * shape.k_groups),
                    sums: cut.take(shape.rows * shape.k_groups),
                    bytes: cut.take(shape.rows * shape.k),
                    count,
                    width: shape.k,
                    group: attention.k.group(),
                },
                tables: cut.take(shape.rows * shape.tables),
                acc: cut.take(shape.rows * shape.v),
            };
            tile.prepare();
            tile
        }
    }

    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// (query head, token) of row r.
    fn place(&self, r: usize) -> (usize, usize) {
        self.attention.place(&self.rows, r)
    }

    /// The rows' results.
    pub fn states(&mut self) -> impl Iterator<Item = RowState<'_>> {
        let (max, sum, acc, width) = (self.max, self.sum, self.acc, self.shape.v);
        // SAFETY: row r < count of the buffers, each given out once.
        (0..self.count).map(move |r| unsafe {
            RowState {
                max: *max.add(r),
                sum: *sum.add(r),
                acc: std::slice::from_raw_parts_mut(acc.add(r * width), width),
            }
        })
    }

    /// By the whole op, not by the tile: the rows of a shorter last tile are worked on like the others.
    fn many(&self) -> bool {
        self.attention.rows() >= MANY_ROWS
    }

    /// Attends to cells first..first+n, n <= CELLS.
    ///
    /// # Safety
    /// The tensors hold what their shapes say and have these cells.
    pub unsafe fn attend(&mut self, first: usize, n: usize, scratch: &mut Scratch) {
        // SAFETY: buffers are sized for shape.rows >= count rows and CELLS cells; indices come from the tensors' shapes.
        unsafe {
            if self.look(first, n, scratch) {
                self.score(first, n, scratch);
                if self.soften(n, scratch) {
                    self.weigh(first, n, scratch);
                }
            }
        }
    }

    /// What queries are multiplied by.
    fn scale(&self) -> f32 {
        let op = self.attention.op;
        if op.logit_softcap == 0.0 {
            op.scale
        } else {
            op.scale / op.logit_softcap
        }
    }

    /// Rotated queries, in the form that this run uses, and empty results.
    unsafe fn prepare(&mut self) {
        let a = self.attention;
        let (width, scale) = (self.shape.k, self.scale());
        // SAFETY: rows r < count of the buffers.
        unsafe {
            for r in 0..self.count {
                let (head, token) = self.place(r);
                let q = std::slice::from_raw_parts_mut(self.q.add(r * width), width);
                a.query(head, token, self.rows.stream, q);
                // A query that is not finite has no scores: its result is NaN, as it would be in f32.
                let finite = q.iter().all(|x| x.is_finite());
                if let Some(f) = a.k.contracted() {
                    (a.kernels.scale)(q, scale);
                    let len = self.shape.tables;
                    (a.kernels.polar_tables)(f, q, std::slice::from_raw_parts_mut(self.tables.add(r * len), len));
                } else if a.k.has_levels() {
                    (a.kernels.quantize_query)(q, scale, self.queries, r);
                } else {
                    (a.kernels.scale)(q, scale);
                }
                *self.max.add(r) = f32::NEG_INFINITY;
                *self.sum.add(r) = if finite { 0.0 } else { f32::NAN };
            }
            std::slice::from_raw_parts_mut(self.acc, self.count * self.shape.v).fill(0.0);
        }
    }

    /// Reads the mask of a block; false where it hides the block from every row.
    unsafe fn look(&self, first: usize, n: usize, scratch: &mut Scratch) -> bool {
        let a = self.attention;
        let Some(mask) = a.mask else { return true };
        let mut seen = false;
        let mut previous: Option<(*const u8, usize)> = None;
        for r in 0..self.count {
            let (head, token) = self.place(r);
            // SAFETY: n cells of a mask row; row r of `masks`.
            unsafe {
                let Some(row) = a.mask_row(token, head, self.rows.stream, first) else { return true };
                // Heads of a token mostly share their mask.
                if let Some((same, of)) = previous.filter(|p| p.0 == row) {
                    scratch.sights[r] = scratch.sights[of];
                    if scratch.sights[r] == Sight::Mixed {
                        std::ptr::copy_nonoverlapping(
                            scratch.masks.add(of * CELLS),
                            scratch.masks.add(r * CELLS),
                            CELLS,
                        );
                    }
                    previous = Some((same, of));
                    continue;
                }
                previous = Some((row, r));
                scratch.sights[r] = (a.kernels.sight)(row, n);
                if scratch.sights[r] == Sight::Mixed {
                    let out = scratch.masks.add(r * CELLS);
                    (a.kernels.widen)(Plain::F16, row, mask.nb[1], 1, n, out, CELLS);
                }
                seen |= scratch.sights[r] != Sight::Hidden;
            }
        }
        seen
    }

    fn cells(&self, first: usize, n: usize) -> Cells {
        Cells { first, n, head: self.rows.kv_head, stream: self.attention.kv_stream(self.rows.stream) }
    }

    /// Scores of the block: `scores[r][c]`.
    unsafe fn score(&self, first: usize, n: usize, scratch: &mut Scratch) {
        let a = self.attention;
        let (kernels, cells) = (a.kernels, self.cells(first, n));
        // SAFETY: see attend.
        unsafe {
            if let Some(f) = a.k.contracted() {
                return a.k.contract(kernels, f, cells, self.tables, self.count, scratch.scores);
            }
            if a.k.has_levels() {
                let block = a.k.block(scratch.levels, scratch.scales);
                a.k.levels(kernels, cells, Role::Dot, block);
                (kernels.dot_levels)(block, n, self.queries, scratch.scores);
                if let Some(chain) = a.k.chain(kernels, cells, scratch.frame) {
                    // The I-frame meets the query as it is: it is far larger than the differences.
                    let (m, q) =
                        (std::slice::from_raw_parts(scratch.frame, self.shape.k), Matrix(self.q, self.shape.k));
                    (kernels.chain_scores)(&chain, m, q, self.scale(), self.count, scratch.scores);
                }
                return;
            }
            a.k.floats(kernels, cells, scratch.floats);
            if self.many() {
                (kernels.transpose)(scratch.floats, self.shape.k, scratch.transposed);
                std::slice::from_raw_parts_mut(scratch.scores, self.count * CELLS).fill(0.0);
                let (q, k) = (Matrix(self.q, self.shape.k), Matrix(scratch.transposed, CELLS));
                (kernels.gemm64)(q, k, MatrixMut(scratch.scores, CELLS), self.count, a.k.size);
            } else {
                (kernels.dot_floats)(scratch.floats, self.shape.k, n, self.q, self.count, scratch.scores);
            }
        }
    }

    /// Scores to weights, with the maxima and sums brought up to date; false where every weight is zero.
    unsafe fn soften(&mut self, n: usize, scratch: &mut Scratch) -> bool {
        let a = self.attention;
        let mut any = false;
        for r in 0..self.count {
            // SAFETY: row r of the buffers.
            unsafe {
                let scores = &mut *scratch.scores.add(r * CELLS).cast::<[f32; CELLS]>();
                if scratch.sights[r] == Sight::Hidden {
                    scores.fill(0.0);
                    continue;
                }
                if a.op.logit_softcap != 0.0 {
                    (a.kernels.softcap)(scores, a.op.logit_softcap);
                }
                scores[n..].fill(f32::NEG_INFINITY);
                let mask =
                    (scratch.sights[r] == Sight::Mixed).then(|| &*scratch.masks.add(r * CELLS).cast::<[f32; CELLS]>());
                let slope = if a.op.max_bias > 0.0 { a.slope(self.place(r).0) } else { 1.0 };
                let top = (a.kernels.mask_scores)(scores, mask, slope);
                let old = *self.max.add(r);
                if top == f32::NEG_INFINITY {
                    if scores.iter().any(|s| s.is_nan()) {
                        *self.sum.add(r) = f32::NAN;
                    }
                    scores.fill(0.0);
                    continue;
                }
                let new = old.max(top);
                if new > old {
                    let factor = (old - new).exp();
                    *self.max.add(r) = new;
                    *self.sum.add(r) *= factor;
                    let acc = std::slice::from_raw_parts_mut(self.acc.add(r * self.shape.v), self.shape.v);
                    (a.kernels.scale)(acc, factor);
                }
                let sum = (a.kernels.exponentials)(scores, new);
                *self.sum.add(r) += sum;
                any |= sum != 0.0;
            }
        }
        any
    }

    /// Adds the weighted values of the block.
    unsafe fn weigh(&mut self, first: usize, n: usize, scratch: &mut Scratch) {
        let a = self.attention;
        let (kernels, cells, width) = (a.kernels, self.cells(first, n), self.shape.v);
        // SAFETY: see attend.
        unsafe {
            if a.v.has_levels() {
                let block = a.v.block(scratch.levels, scratch.scales);
                a.v.levels(kernels, cells, Role::Weigh, block);
                return (kernels.weigh_levels)(block, n, scratch.scores, self.count, self.acc);
            }
            a.v.floats(kernels, cells, scratch.floats);
            for c in 0..n {
                self.keep_apart(c, scratch);
            }
            for at in (0..width).step_by(64) {
                let (w, v) = (Matrix(scratch.scores, CELLS), Matrix(scratch.floats.add(at), width));
                (kernels.gemm64)(w, v, MatrixMut(self.acc.add(at), width), self.count, n);
            }
        }
    }

    /// A value that is not finite must not reach the rows that do not see its cell, as 0 * NaN: such a cell is added row by
    /// row and taken out of the product.
    unsafe fn keep_apart(&self, cell: usize, scratch: &Scratch) {
        let width = self.shape.v;
        // SAFETY: cell `cell` of the block, rows below count.
        unsafe {
            let weight = |r: usize| *scratch.scores.add(r * CELLS + cell);
            if (0..self.count).all(|r| weight(r) != 0.0) {
                return;
            }
            let value = std::slice::from_raw_parts_mut(scratch.floats.add(cell * width), width);
            if value.iter().all(|x| x.is_finite()) {
                return;
            }
            for r in (0..self.count).filter(|&r| weight(r) != 0.0) {
                for (i, x) in value.iter().enumerate() {
                    *self.acc.add(r * width + i) += weight(r) * x;
                }
            }
            value.fill(0.0);
        }
    }
}
