//! Some query rows of one KV head against a range of cells.
//!
//! Two ways through a block, by the number of rows. Few rows: K's levels meet 8-bit queries in integer dot products and
//! V's levels are weighed as they are unpacked; all that is read or written beside the cache stays in the first-level
//! cache. Many rows: K and V of the block become f32 tiles (K transposed) and both products are one small matrix
//! kernel, whose cost per row is lower and which pays for the tiles from about a dozen rows on.

use super::{Attention, Rows};
use crate::codec::plain::Plain;
use crate::isa::{LevelBlock, Matrix, MatrixMut, Role, CELLS};
use std::ops::Range;

/// Rows from which tiles of floats pay.
const MANY_ROWS: usize = 12;

/// The result of a row so far: maximum score, sum of weights, weighted sum of values.
pub(super) struct RowState<'a> {
    pub max: f32,
    pub sum: f32,
    pub acc: &'a mut [f32],
}

/// What a tile's buffers are sized by: rows, padded widths of K and V.
#[derive(Clone, Copy)]
pub(super) struct TileShape {
    pub rows: usize,
    pub k: usize,
    pub v: usize,
}

impl TileShape {
    fn widest(self) -> usize {
        self.k.max(self.v)
    }

    /// Bytes of the buffers, each beginning at a multiple of 64.
    pub fn bytes(self) -> usize {
        let floats = self.rows * (3 + self.k + self.v + CELLS)
            + CELLS * self.widest() / 4
            + 2 * CELLS * self.widest()
            + CELLS * (1 + self.rows);
        (4 * floats + self.rows * self.k + CELLS * self.widest() + 12 * 64).next_multiple_of(64)
    }
}

/// The buffers of one thread.
pub(super) struct Tile<'a> {
    attention: &'a Attention<'a>,
    shape: TileShape,
    /// Per row: maximum, sum, and what its 8-bit query is multiplied by.
    max: *mut f32,
    sum: *mut f32,
    q_scale: *mut f32,
    /// Queries as floats and as bytes, rows of shape.k.
    q: *mut f32,
    q8: *mut i8,
    /// Scores, then weights: rows of CELLS.
    scores: *mut f32,
    /// Masks of the block: one row of CELLS per query row.
    masks: *mut f32,
    /// Rows of shape.v.
    acc: *mut f32,
    block: LevelBlock,
    floats: *mut f32,
    transposed: *mut f32,
    /// What each row sees of the block.
    sights: Vec<Sight>,
}

/// What the mask says of a block for one row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sight {
    /// All cells, nothing to add.
    Open,
    /// Something to add, kept in `masks`.
    Mixed,
    /// No cell.
    Hidden,
}

impl<'a> Tile<'a> {
    /// # Safety
    /// `memory` is 64-byte aligned, has shape.bytes() bytes and is this thread's alone.
    pub unsafe fn new(attention: &'a Attention<'a>, memory: *mut u8) -> Tile<'a> {
        let shape = attention.tile_shape();
        let mut at = memory;
        let mut take = |bytes: usize| {
            let here = at;
            // SAFETY: bytes() adds up the same buffers.
            at = unsafe { at.add(bytes.next_multiple_of(64)) };
            here
        };
        let wide = shape.widest();
        Tile {
            attention,
            shape,
            max: take(4 * shape.rows).cast(),
            sum: take(4 * shape.rows).cast(),
            q_scale: take(4 * shape.rows).cast(),
            q: take(4 * shape.rows * shape.k).cast(),
            q8: take(shape.rows * shape.k).cast(),
            scores: take(4 * shape.rows * CELLS).cast(),
            masks: take(4 * shape.rows * CELLS).cast(),
            acc: take(4 * shape.rows * shape.v).cast(),
            block: LevelBlock { levels: take(CELLS * wide).cast(), scales: take(CELLS * wide).cast(), width: 0 },
            floats: take(4 * CELLS * wide).cast(),
            transposed: take(4 * CELLS * wide).cast(),
            sights: vec![Sight::Open; shape.rows],
        }
    }

    /// The rows' results after [`Tile::run`].
    pub fn states(&mut self, rows: &Rows) -> impl Iterator<Item = RowState<'_>> {
        let count = rows.tokens.len() * self.attention.group;
        let (max, sum, acc, width) = (self.max, self.sum, self.acc, self.shape.v);
        // SAFETY: row r < count of the buffers, each given out once.
        (0..count).map(move |r| unsafe {
            RowState {
                max: *max.add(r),
                sum: *sum.add(r),
                acc: std::slice::from_raw_parts_mut(acc.add(r * width), width),
            }
        })
    }

    /// Attends to `cells`.
    ///
    /// # Safety
    /// The tensors hold what their shapes say.
    pub unsafe fn run(&mut self, rows: &Rows, cells: Range<usize>) {
        let count = rows.tokens.len() * self.attention.group;
        // By the whole op, not by the tile: the rows of a shorter last tile are worked on like the others.
        let many = self.attention.queries() * self.attention.group >= MANY_ROWS;
        // SAFETY: buffers are sized for shape.rows >= count rows and CELLS cells; indices come from the tensors' shapes.
        unsafe {
            self.prepare(rows, count, many || !self.attention.k.has_levels());
            for first in cells.clone().step_by(CELLS) {
                let n = CELLS.min(cells.end - first);
                if !self.look(rows, count, first, n) {
                    continue;
                }
                self.score(rows, count, first, n, many);
                if self.soften(rows, count, n) {
                    self.weigh(rows, count, first, n, many);
                }
            }
        }
    }

    /// Rotated queries, in the form that this run uses, and empty results.
    unsafe fn prepare(&mut self, rows: &Rows, count: usize, as_floats: bool) {
        let a = self.attention;
        let width = self.shape.k;
        let scale = if a.op.logit_softcap == 0.0 { a.op.scale } else { a.op.scale / a.op.logit_softcap };
        // SAFETY: rows r < count of the buffers.
        unsafe {
            for r in 0..count {
                let (head, token) = a.place(rows, r);
                let q = std::slice::from_raw_parts_mut(self.q.add(r * width), width);
                a.query(head, token, rows.stream, q);
                if as_floats {
                    (a.kernels.scale)(q, scale);
                } else {
                    *self.q_scale.add(r) =
                        scale * (a.kernels.quantize_query)(&q[..a.k.size], self.q8.add(r * width), width);
                }
                // A query that is not finite has no scores: its result is NaN, as it would be in f32.
                let finite = q.iter().all(|x| x.is_finite());
                *self.max.add(r) = f32::NEG_INFINITY;
                *self.sum.add(r) = if finite { 0.0 } else { f32::NAN };
            }
            std::slice::from_raw_parts_mut(self.acc, count * self.shape.v).fill(0.0);
        }
    }

    /// Reads the mask of a block; false where it hides the block from every row.
    unsafe fn look(&mut self, rows: &Rows, count: usize, first: usize, n: usize) -> bool {
        let a = self.attention;
        let Some(mask) = a.mask else { return true };
        let mut seen = false;
        let mut previous: Option<(*const u8, usize)> = None;
        for r in 0..count {
            let (head, token) = a.place(rows, r);
            // SAFETY: n cells of a mask row; row r of `masks`.
            unsafe {
                let Some(row) = a.mask_row(token, head, rows.stream, first) else { return true };
                // Heads of a token mostly share their mask.
                if let Some((same, of)) = previous.filter(|p| p.0 == row) {
                    self.sights[r] = self.sights[of];
                    if self.sights[r] == Sight::Mixed {
                        std::ptr::copy_nonoverlapping(self.masks.add(of * CELLS), self.masks.add(r * CELLS), CELLS);
                    }
                    previous = Some((same, of));
                    continue;
                }
                previous = Some((row, r));
                let (mut any, mut all_hidden) = (0u16, true);
                for c in 0..n {
                    let m = row.add(2 * c).cast::<u16>().read_unaligned();
                    any |= m & 0x7fff;
                    all_hidden &= m == 0xfc00;
                }
                self.sights[r] = match (any, all_hidden) {
                    (0, _) => Sight::Open,
                    (_, true) => Sight::Hidden,
                    _ => {
                        let out = self.masks.add(r * CELLS);
                        (a.kernels.widen)(Plain::F16, row, mask.nb[1], 1, n, out, CELLS);
                        Sight::Mixed
                    }
                };
                seen |= self.sights[r] != Sight::Hidden;
            }
        }
        seen
    }

    /// Scores of the block: `scores[r][c]`.
    unsafe fn score(&mut self, rows: &Rows, count: usize, first: usize, n: usize, many: bool) {
        let a = self.attention;
        let (kernels, stream) = (a.kernels, a.kv_stream(rows.stream));
        let block = LevelBlock { width: self.shape.k, ..self.block };
        // SAFETY: see run.
        unsafe {
            if a.k.has_levels() && !many {
                a.k.levels(kernels, first, n, rows.kv_head, stream, Role::Dot, block);
                let q_scales = std::slice::from_raw_parts(self.q_scale, count);
                (kernels.dot_levels)(block, n, self.q8, q_scales, self.scores);
                return;
            }
            a.k.floats(kernels, first, n, rows.kv_head, stream, block, self.floats);
            if many {
                (kernels.transpose)(self.floats, self.shape.k, self.transposed);
                std::slice::from_raw_parts_mut(self.scores, count * CELLS).fill(0.0);
                let (q, k) = (Matrix(self.q, self.shape.k), Matrix(self.transposed, CELLS));
                (kernels.gemm64)(q, k, MatrixMut(self.scores, CELLS), count, a.k.size);
            } else {
                (kernels.dot_floats)(self.floats, self.shape.k, n, self.q, count, self.scores);
            }
        }
    }

    /// Scores to weights, with the maxima and sums brought up to date; false where every weight is zero.
    unsafe fn soften(&mut self, rows: &Rows, count: usize, n: usize) -> bool {
        let a = self.attention;
        let mut any = false;
        for r in 0..count {
            // SAFETY: row r of the buffers.
            unsafe {
                let scores = &mut *self.scores.add(r * CELLS).cast::<[f32; CELLS]>();
                if self.sights[r] == Sight::Hidden {
                    scores.fill(0.0);
                    continue;
                }
                if a.op.logit_softcap != 0.0 {
                    (a.kernels.softcap)(scores, a.op.logit_softcap);
                }
                scores[n..].fill(f32::NEG_INFINITY);
                let mask = (self.sights[r] == Sight::Mixed).then(|| &*self.masks.add(r * CELLS).cast::<[f32; CELLS]>());
                let slope = if a.op.max_bias > 0.0 { a.slope(a.place(rows, r).0) } else { 1.0 };
                let top = (a.kernels.mask_scores)(scores, mask, slope);
                let old = *self.max.add(r);
                if top == f32::NEG_INFINITY {
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
    unsafe fn weigh(&mut self, rows: &Rows, count: usize, first: usize, n: usize, many: bool) {
        let a = self.attention;
        let (kernels, stream, width) = (a.kernels, a.kv_stream(rows.stream), self.shape.v);
        let block = LevelBlock { width, ..self.block };
        // SAFETY: see run.
        unsafe {
            if a.v.has_levels() && !many {
                a.v.levels(kernels, first, n, rows.kv_head, stream, Role::Weigh, block);
                (kernels.weigh_levels)(block, n, self.scores, count, self.acc);
                return;
            }
            a.v.floats(kernels, first, n, rows.kv_head, stream, block, self.floats);
            // A cell that no row sees may hold anything, a NaN too: it must not reach the sums as 0 * NaN.
            for c in 0..n {
                if (0..count).all(|r| *self.scores.add(r * CELLS + c) == 0.0) {
                    std::slice::from_raw_parts_mut(self.floats.add(c * width), width).fill(0.0);
                }
            }
            for at in (0..width).step_by(64) {
                let (w, v) = (Matrix(self.scores, CELLS), Matrix(self.floats.add(at), width));
                (kernels.gemm64)(w, v, MatrixMut(self.acc.add(at), width), count, n);
            }
        }
    }
}
