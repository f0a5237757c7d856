//! Some query rows of one KV head against a range of cells.
//!
//! What is stored as levels is never more than unpacked: V's levels are weighed with 16-bit weights, K's are scored by
//! [`super::queries`], and all that is read or written beside the cache stays in the first-level cache. A side that is
//! stored as floats goes through f32 rows.

use super::memory::{bytes_of, BlockRoom, BlockShape, Cut};
use super::queries::{QueryRows, MANY_ROWS};
use super::recent::NOWHERE;
use super::side::{Cells, KvSide};
use super::split::TileRows;
use super::Attention;
use crate::codec::plain::Plain;
use crate::isa::{prefetch, Matrix, MatrixMut, Role, Sight, CELLS};
use half::f16;
use std::ops::Range;

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
    /// Padded width of V.
    pub v: usize,
    /// Bytes of the query rows.
    pub query_bytes: usize,
    /// Of a block of K or V.
    pub block: BlockShape,
}

impl TileShape {
    /// Bytes of what a tile keeps from block to block.
    pub fn tile_bytes(self) -> usize {
        2 * bytes_of::<f32>(self.rows) + bytes_of::<f32>(self.rows * self.v) + self.query_bytes
    }

    /// Bytes of what serves one block at a time, whichever tile it is for.
    pub fn scratch_bytes(self) -> usize {
        2 * bytes_of::<f32>(self.rows * CELLS) + self.block.bytes()
    }
}

/// The buffers of one thread for the block at hand.
pub(super) struct Scratch {
    /// Scores, then weights: rows of CELLS.
    scores: *mut f32,
    /// Masks of the block: rows of CELLS, one where each run of query rows begins.
    masks: *mut f32,
    room: BlockRoom,
    /// What each run of rows sees of the block.
    sights: Vec<Sight>,
    /// Cells that have a precise row: bits by stream and block, none where no cell has one.
    hidden: Vec<u64>,
}

/// Which cells a block of scores is of.
enum Seen<'a> {
    /// One after the other from `first` on, but for those with a bit; those of the block that comes next begin at `next`.
    Run { first: usize, next: usize, hidden: u64 },
    /// These.
    Listed(&'a [usize; CELLS]),
}

impl Scratch {
    /// # Safety
    /// `memory` is 64-byte aligned, has shape.scratch_bytes() bytes and is this thread's alone.
    pub unsafe fn new(shape: TileShape, memory: *mut u8, hidden: Vec<u64>) -> Scratch {
        // SAFETY: the caller's promise.
        let mut cut = unsafe { Cut::new(memory, shape.scratch_bytes()) };
        Scratch {
            scores: cut.take(shape.rows * CELLS),
            masks: cut.take(shape.rows * CELLS),
            room: shape.block.take(&mut cut),
            sights: vec![Sight::Open; shape.rows],
            hidden,
        }
    }
}

/// Rows that share a row of the mask: mostly the heads of a token.
struct MaskRun {
    mask: Option<*const u8>,
    rows: Range<usize>,
}

/// Query rows of one KV head and their results so far.
pub(super) struct Tile<'a> {
    attention: &'a Attention<'a>,
    shape: TileShape,
    rows: TileRows,
    /// The number of rows.
    count: usize,
    /// Per row: maximum and sum.
    max: *mut f32,
    sum: *mut f32,
    runs: Vec<MaskRun>,
    queries: QueryRows<'a>,
    /// For the keys of precise rows, where they want another form.
    recent_queries: Option<QueryRows<'a>>,
    /// Rows of shape.v.
    acc: *mut f32,
}

impl<'a> Tile<'a> {
    /// Rotates the queries and begins with empty results.
    ///
    /// # Safety
    /// `memory` is 64-byte aligned, has shape.tile_bytes() bytes and is this tile's alone; `shape` has room for the rows; the
    /// tensors hold what their shapes say.
    pub unsafe fn new(attention: &'a Attention<'a>, shape: TileShape, rows: TileRows, memory: *mut u8) -> Tile<'a> {
        let (op, count) = (attention.op, rows.rows.len());
        let factor = if op.logit_softcap == 0.0 { op.scale } else { op.scale / op.logit_softcap };
        // SAFETY: the caller's promise.
        let (queries, recent_queries, mut cut) = unsafe {
            let mut cut = Cut::new(memory, shape.tile_bytes());
            let mut queries = |k: &'a KvSide| QueryRows::new(k, attention.kernels, shape.rows, factor, &mut cut);
            (queries(&attention.k), attention.recent_keys().map(queries), cut)
        };
        let mut tile = Tile {
            attention,
            shape,
            count,
            rows,
            runs: Vec::new(),
            queries,
            recent_queries,
            max: cut.take(shape.rows),
            sum: cut.take(shape.rows),
            acc: cut.take(shape.rows * shape.v),
        };
        // SAFETY: the caller's promise.
        unsafe { tile.prepare() };
        tile
    }

    pub fn rows(&self) -> &TileRows {
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

    /// Attends to a block: of cells, or of precise rows behind them. Block `next` is one of cells, which comes behind it, or the same.
    ///
    /// # Safety
    /// The tensors hold what their shapes say; there is such a block.
    pub unsafe fn attend(&mut self, block: usize, next: usize, scratch: &mut Scratch) {
        let a = self.attention;
        let stream = a.kv_stream(self.rows.stream);
        // SAFETY: buffers are sized for shape.rows >= count rows and CELLS cells; indices come from the tensors' shapes.
        unsafe {
            match a.columns(block) {
                None => {
                    let (first, next) = (block * CELLS, next * CELLS);
                    let n = CELLS.min(a.k.cells() - first);
                    let hidden = scratch.hidden.get(stream * a.cell_blocks() + block).copied().unwrap_or(0);
                    if hidden.trailing_ones() as usize >= n {
                        return;
                    }
                    let cells = self.cells(first, n, next);
                    self.attend_to((&a.k, &a.v), cells, &Seen::Run { first, next, hidden }, scratch);
                }
                Some(columns) => {
                    let Some(recent) = &a.recent else { return };
                    let cells = recent.cells_of(columns, stream, a.k.cells());
                    let first = cells[0];
                    // The tokens of a batch mostly lie one after the other.
                    let run = first != NOWHERE && (0..columns.n).all(|i| cells[i] == first + i);
                    let seen = if run { Seen::Run { first, next: first, hidden: 0 } } else { Seen::Listed(&cells) };
                    if cells[..columns.n].iter().any(|&c| c != NOWHERE) {
                        let part = columns.part;
                        let rows = self.cells(columns.first, columns.n, columns.first);
                        self.attend_to((&part.k, &part.v), rows, &seen, scratch);
                    }
                }
            }
        }
    }

    /// Attends to these rows of K and V, which stand for the cells that are seen.
    unsafe fn attend_to(&mut self, (k, v): (&KvSide, &KvSide), cells: Cells, seen: &Seen, scratch: &mut Scratch) {
        let precise = !std::ptr::eq(k, &self.attention.k);
        // SAFETY: see attend.
        unsafe {
            if self.look(seen, cells.n, scratch) {
                let queries = self.recent_queries.as_ref().filter(|_| precise).unwrap_or(&self.queries);
                queries.score(k, cells, self.count, self.many(), &scratch.room, scratch.scores);
                if self.soften(cells.n, scratch) {
                    self.weigh(v, cells, scratch);
                }
            }
        }
    }

    /// Queries in the form that K is scored in, empty results, and which rows share a row of the mask.
    unsafe fn prepare(&mut self) {
        let a = self.attention;
        for r in 0..self.count {
            let (head, token) = self.place(r);
            // SAFETY: rows r < count of the buffers and of q.
            unsafe {
                let at = [token, head, self.rows.stream];
                let finite = self.queries.set(r, &a.op.q, at);
                if let Some(queries) = &mut self.recent_queries {
                    queries.set(r, &a.op.q, at);
                }
                *self.max.add(r) = f32::NEG_INFINITY;
                // A query that is not finite has no scores: its result is NaN, as it would be in f32.
                *self.sum.add(r) = if finite { 0.0 } else { f32::NAN };
                let mask = a.mask_row(token, head, self.rows.stream);
                match self.runs.last_mut().filter(|run| run.mask == mask) {
                    Some(run) => run.rows.end = r + 1,
                    None => self.runs.push(MaskRun { mask, rows: r..r + 1 }),
                }
            }
        }
        // SAFETY: the buffer's values.
        unsafe { std::slice::from_raw_parts_mut(self.acc, self.count * self.shape.v).fill(0.0) };
    }

    /// Reads the mask of a block; false where it hides the block from every row.
    unsafe fn look(&self, seen: &Seen, n: usize, scratch: &mut Scratch) -> bool {
        let a = self.attention;
        if a.mask.is_none() && a.recent.is_none() {
            return true;
        }
        let mut any = false;
        for (run, sight) in self.runs.iter().zip(&mut scratch.sights) {
            // SAFETY: the cells of a mask row; the first of the run's rows of `masks`.
            *sight = unsafe { self.sight(run.mask, seen, n, &mut *scratch.masks.add(run.rows.start * CELLS).cast()) };
            any |= *sight != Sight::Hidden;
        }
        any
    }

    /// What a mask row shows of a block; the values in `out`, where they are mixed.
    unsafe fn sight(&self, row: Option<*const u8>, seen: &Seen, n: usize, out: &mut [f32; CELLS]) -> Sight {
        let kernels = self.attention.kernels;
        // SAFETY: cells of the mask row.
        unsafe {
            match seen {
                Seen::Run { first, next, hidden } => {
                    if let Some(row) = row {
                        // The mask of the next block: rows of it are far apart, and nothing else asks for them ahead.
                        let next = row.wrapping_add(2 * next);
                        prefetch(next);
                        prefetch(next.wrapping_add(2 * CELLS - 1));
                    }
                    let row = row.map(|row| row.add(2 * first));
                    let sight = row.map_or(Sight::Open, |row| (kernels.sight)(row, n));
                    match row.filter(|_| sight == Sight::Mixed) {
                        Some(row) => (kernels.widen)(Plain::F16, row, 2 * CELLS, 1, n, out.as_mut_ptr(), CELLS),
                        None if *hidden != 0 => out.fill(0.0),
                        None => {}
                    }
                    if *hidden == 0 || sight == Sight::Hidden {
                        return sight;
                    }
                    let hide = out.iter_mut().enumerate().filter(|(i, _)| hidden >> i & 1 == 1);
                    hide.for_each(|(_, x)| *x = f32::NEG_INFINITY);
                }
                Seen::Listed(cells) => {
                    for (x, &cell) in out.iter_mut().zip(*cells) {
                        *x = match row {
                            _ if cell == NOWHERE => f32::NEG_INFINITY,
                            Some(row) => f16::from_bits(row.add(2 * cell).cast::<u16>().read_unaligned()).to_f32(),
                            None => 0.0,
                        };
                    }
                }
            }
        }
        if out[..n].iter().all(|&x| x == f32::NEG_INFINITY) {
            Sight::Hidden
        } else {
            Sight::Mixed
        }
    }

    fn cells(&self, first: usize, n: usize, next: usize) -> Cells {
        Cells { first, n, next, head: self.rows.kv_head, stream: self.attention.kv_stream(self.rows.stream) }
    }

    /// Scores to weights, with the maxima and sums brought up to date; false where every weight is zero.
    unsafe fn soften(&mut self, n: usize, scratch: &mut Scratch) -> bool {
        let mut any = false;
        for (run, &sight) in self.runs.iter().zip(&scratch.sights) {
            // SAFETY: rows of the buffers; the mask was read where it is mixed.
            unsafe {
                let mask = || &*scratch.masks.add(run.rows.start * CELLS).cast::<[f32; CELLS]>();
                let mask = (sight == Sight::Mixed).then(mask);
                for r in run.rows.clone() {
                    let scores = &mut *scratch.scores.add(r * CELLS).cast::<[f32; CELLS]>();
                    if sight == Sight::Hidden {
                        scores.fill(0.0);
                    } else {
                        let top = self.finish_scores(r, n, mask, scores);
                        any |= self.weights(r, top, scores);
                    }
                }
            }
        }
        any
    }

    /// What is done to the n scores of row r before the softmax. The largest one.
    unsafe fn finish_scores(&self, r: usize, n: usize, mask: Option<&[f32; CELLS]>, scores: &mut [f32; CELLS]) -> f32 {
        let a = self.attention;
        // SAFETY: kernels run on the CPU they were chosen for.
        unsafe {
            if a.op.logit_softcap != 0.0 {
                (a.kernels.softcap)(scores, a.op.logit_softcap);
            }
            scores[n..].fill(f32::NEG_INFINITY);
            let slope = if a.op.max_bias > 0.0 { a.slope(self.place(r).0) } else { 1.0 };
            (a.kernels.mask_scores)(scores, mask, slope)
        }
    }

    /// Scores of row r, the largest of which is `top`, to weights; false where all are zero.
    unsafe fn weights(&self, r: usize, top: f32, scores: &mut [f32; CELLS]) -> bool {
        let kernels = self.attention.kernels;
        // SAFETY: row r of the buffers.
        unsafe {
            let (max, sum) = (&mut *self.max.add(r), &mut *self.sum.add(r));
            if top == f32::NEG_INFINITY {
                if scores.iter().any(|s| s.is_nan()) {
                    *sum = f32::NAN;
                }
                scores.fill(0.0);
                return false;
            }
            if top > *max {
                let factor = (*max - top).exp();
                *max = top;
                *sum *= factor;
                let acc = std::slice::from_raw_parts_mut(self.acc.add(r * self.shape.v), self.shape.v);
                (kernels.scale)(acc, factor);
            }
            let more = (kernels.exponentials)(scores, *max);
            *sum += more;
            more != 0.0
        }
    }

    /// Adds the weighted values of the block.
    unsafe fn weigh(&mut self, v: &KvSide, cells: Cells, scratch: &mut Scratch) {
        let (kernels, n, width) = (self.attention.kernels, cells.n, self.shape.v);
        // SAFETY: see attend.
        unsafe {
            if v.has_levels() {
                let block = v.block(scratch.room.levels, scratch.room.scales);
                v.levels(kernels, cells, Role::Weigh, block);
                if v.width == width {
                    return (kernels.weigh_levels)(block, n, scratch.scores, self.count, self.acc);
                }
                // Precise rows are added to the first values of wider ones.
                for r in 0..self.count {
                    let (weights, acc) = (scratch.scores.add(r * CELLS), self.acc.add(r * width));
                    (kernels.weigh_levels)(block, n, weights, 1, acc);
                }
                return;
            }
            v.floats(kernels, cells, scratch.room.floats);
            for c in 0..n {
                self.keep_apart(c, scratch);
            }
            for at in (0..width).step_by(64) {
                let (w, v) = (Matrix(scratch.scores, CELLS), Matrix(scratch.room.floats.add(at), width));
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
            let value = std::slice::from_raw_parts_mut(scratch.room.floats.add(cell * width), width);
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
