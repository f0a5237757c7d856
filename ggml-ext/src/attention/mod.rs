//! Attention over compressed rows: one op, nothing decompressed to memory, nothing rotated back per cell.
//!
//! ```text
//! q' = R_k q                            once per query row
//! s_c = q' . k_c                        from levels and scales as stored
//! o'  = sum_c softmax(s)_c v_c          in V's rotated domain
//! o   = R_v^-1 o'                       once per query row
//! ```
//!
//! The query rows that share a KV head are worked on together, so a cell is loaded and unpacked once for all of them
//! ([`tile`]). Cells go by in blocks of 64 with an online softmax; a block that the mask hides from every row is never
//! read, and V of a block is not read when every weight in it is zero.
//!
//! Few queries (decoding): the cells are split over threads and the partial (max, sum, vector) triples merged. Many
//! queries (prefill): the query rows are split over threads. Which way depends on shapes and the number of threads
//! alone, so the same call gives the same bits.

mod scores;
mod tile;

#[cfg(test)]
mod tests;

use crate::codec::plain::Plain;
use crate::codec::polar;
use crate::isa::{self, Kernels, CELLS};
use crate::room::Room;
use crate::tensor::{Side, Tensor};
use std::ops::Range;
use tile::{RowState, Scratch, Tile, TileShape};

pub use scores::{check_mul_mat, mul_mat};

/// FLASH_ATTN_EXT: what `struct ggml_ext_attention` of the C header holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionOp {
    /// [dk, n_q, n_head, ne3]
    pub q: Tensor,
    /// [dk, n_kv, n_head_kv, ne3]
    pub k: Tensor,
    /// [dv, n_kv, n_head_kv, ne3]
    pub v: Tensor,
    /// [dv, n_head, n_q, ne3]
    pub dst: Tensor,
    /// f16 [n_kv, n_q, *, *]
    pub mask: *const Tensor,
    /// f32 [n_head]
    pub sinks: *const Tensor,
    /// Multiplies the scores.
    pub scale: f32,
    /// ALiBi.
    pub max_bias: f32,
    /// 0: none.
    pub logit_softcap: f32,
}

/// Query rows of a KV head up to which the cells are split over threads rather than the rows.
const SPLIT_ROWS: usize = 64;
/// Query rows of a tile when rows are split over threads.
const TILE_ROWS: usize = 128;

/// An attention, checked.
pub struct Attention<'a> {
    op: &'a AttentionOp,
    k: Side,
    v: Side,
    mask: Option<&'a Tensor>,
    sinks: Option<&'a Tensor>,
    /// Query heads that share a KV head.
    group: usize,
    kernels: &'static Kernels,
}

/// The query rows of one tile: tokens of one KV head of one stream; row r is token r / group, head r % group.
#[derive(Clone)]
struct Rows {
    stream: usize,
    kv_head: usize,
    tokens: Range<usize>,
}

impl<'a> Attention<'a> {
    /// Checks types and shapes; the message says what does not fit.
    pub fn new(op: &'a AttentionOp) -> Result<Attention<'a>, String> {
        Attention::with(op, isa::kernels())
    }

    /// The same with given kernels.
    pub fn with(op: &'a AttentionOp, kernels: &'static Kernels) -> Result<Attention<'a>, String> {
        let (q, k, v, dst) = (&op.q, &op.k, &op.v, &op.dst);
        // SAFETY: null or a tensor that outlives the call.
        let (mask, sinks) = unsafe { (op.mask.as_ref(), op.sinks.as_ref()) };
        let want = |ok: bool, what: &str| if ok { Ok(()) } else { Err(what.to_string()) };
        let (k_side, v_side) = (Side::new(k, "K")?, Side::new(v, "V")?);
        want(q.is_float(), "queries must be f32 or f16")?;
        want(
            k.n(0) == k_side.size && q.n(0) == k_side.size,
            "queries and keys must have the same size, that of the key type",
        )?;
        want(
            k.n(1) == v.n(1) && k.n(2) == v.n(2) && k.n(3) == v.n(3),
            "K and V must have the same cells, heads and streams",
        )?;
        want(k.n(2) > 0 && k.n(3) > 0, "there must be a KV head")?;
        want(
            q.n(2) > 0 && q.n(3) > 0 && q.n(2) % k.n(2) == 0 && q.n(3) % k.n(3) == 0,
            "query heads must be a multiple of KV heads",
        )?;
        q.check("the queries")?;
        dst.check_result("the result")?;
        want(
            dst.n(0) == v.n(0) && dst.n(1) == q.n(2) && dst.n(2) == q.n(1) && dst.n(3) == q.n(3),
            "the result must be [value size, heads, queries, streams]",
        )?;
        if let Some(m) = mask {
            want(m.plain() == Some(Plain::F16) && m.nb[0] == 2, "the mask must be f16")?;
            want(
                m.n(0) >= k.n(1) && m.n(1) >= q.n(1) && m.n(2) > 0 && m.n(3) > 0,
                "the mask must cover all cells and queries",
            )?;
            m.check("the mask")?;
        }
        if let Some(s) = sinks {
            want(
                s.plain() == Some(Plain::F32) && s.nb[0] == 4 && s.n(0) >= q.n(2),
                "there must be an f32 sink per head",
            )?;
            s.check("the sinks")?;
        }
        Ok(Attention { op, k: k_side, v: v_side, mask, sinks, group: q.n(2) / k.n(2), kernels })
    }

    /// Is the memory of all tensors there?
    pub fn check_data(&self) -> Result<(), String> {
        let AttentionOp { q, k, v, dst, .. } = self.op;
        let tensors = [(q, "the queries"), (k, "K"), (v, "V"), (dst, "the result")].map(|(t, name)| (Some(t), name));
        let others = [(self.mask, "the mask"), (self.sinks, "the sinks")];
        tensors.iter().chain(&others).try_for_each(|(t, name)| t.map_or(Ok(()), |t| t.check_data(name)))
    }

    fn queries(&self) -> usize {
        self.op.q.n(1)
    }

    fn heads(&self) -> usize {
        self.op.q.n(2)
    }

    fn streams(&self) -> usize {
        self.op.q.n(3)
    }

    fn splits_cells(&self, threads: usize) -> bool {
        self.queries() * self.group <= SPLIT_ROWS || self.tiles().count() < threads
    }

    fn tile_tokens(&self) -> usize {
        (TILE_ROWS / self.group).max(1)
    }

    /// All tiles, in the order in which threads take them.
    fn tiles(&self) -> impl Iterator<Item = Rows> + '_ {
        let tokens = self.tile_tokens();
        let starts = (0..self.queries()).step_by(tokens);
        starts.flat_map(move |t| {
            let end = (t + tokens).min(self.queries());
            (0..self.streams()).flat_map(move |stream| {
                (0..self.op.k.n(2)).map(move |kv_head| Rows { stream, kv_head, tokens: t..end })
            })
        })
    }

    fn tile_shape(&self) -> TileShape {
        TileShape {
            rows: self.tile_tokens().min(self.queries().max(1)) * self.group,
            k: self.k.width,
            v: self.v.width,
            k_groups: self.k.width / self.k.group(),
            tables: self.k.contracted().map_or(0, |f| f.size() / 2 * polar::TABLE),
            floats: !(self.k.has_levels() && self.v.has_levels()),
        }
    }

    /// f32 values of a partial result of one query row: maximum, sum, vector.
    fn partial_len(&self) -> usize {
        2 + self.v.width
    }

    /// Bytes of one thread's buffers.
    fn thread_bytes(&self, threads: usize) -> usize {
        let shape = self.tile_shape();
        let tiles = if self.splits_cells(threads) { self.tiles().count() } else { 1 };
        shape.scratch_bytes() + tiles * shape.tile_bytes()
    }

    /// Bytes that [`Attention::compute`] and [`Attention::finish`] need, for all threads together.
    pub fn work_size(&self, threads: usize) -> usize {
        let rows = self.streams() * self.heads() * self.queries();
        let partials = if self.splits_cells(threads) { threads * rows * self.partial_len() } else { 0 };
        threads * self.thread_bytes(threads) + 4 * partials + 64
    }

    /// The share of thread `ith` of `nth`.
    ///
    /// # Safety
    /// The tensors hold what their shapes say; `work` has work_size(nth) bytes, shared by all threads.
    pub unsafe fn compute(&self, ith: usize, nth: usize, work: *mut u8) {
        let (shape, cells) = (self.tile_shape(), self.k.cells());
        // SAFETY: each thread has its own part of the work buffer, then come the partials.
        unsafe {
            let (memory, partials) = self.work_parts(ith, nth, work);
            let mut scratch = Scratch::new(shape, memory);
            let memory = memory.add(shape.scratch_bytes());
            if !self.splits_cells(nth) {
                for rows in self.tiles().skip(ith).step_by(nth) {
                    let mut tile = Tile::new(self, rows.clone(), memory);
                    for first in (0..cells).step_by(CELLS) {
                        tile.attend(first, CELLS.min(cells - first), &mut scratch);
                    }
                    self.give(&mut tile, |state, head, token| self.write(state, head, token, rows.stream));
                }
                return;
            }
            // All KV heads take a block before the next one is touched: heads lie side by side in a cell, so each
            // line of the cache is read from memory once.
            let mut tiles: Vec<(Rows, Tile)> = self
                .tiles()
                .enumerate()
                .map(|(i, rows)| (rows.clone(), Tile::new(self, rows, memory.add(i * shape.tile_bytes()))))
                .collect();
            let blocks = cells.div_ceil(CELLS);
            for block in blocks * ith / nth..blocks * (ith + 1) / nth {
                let first = block * CELLS;
                for (_, tile) in &mut tiles {
                    tile.attend(first, CELLS.min(cells - first), &mut scratch);
                }
            }
            for (rows, tile) in &mut tiles {
                self.give(tile, |state, head, token| {
                    let at = self.partial_index(ith, rows.stream, token, head);
                    let partial =
                        std::slice::from_raw_parts_mut(partials.add(at * self.partial_len()), self.partial_len());
                    (partial[0], partial[1]) = (state.max, state.sum);
                    partial[2..].copy_from_slice(state.acc);
                });
            }
        }
    }

    /// Hands out the results of a tile, row by row, with head and token.
    fn give(&self, tile: &mut Tile, mut take: impl FnMut(RowState, usize, usize)) {
        let places: Vec<_> = (0..tile.states().count()).map(|r| tile.place(r)).collect();
        for (state, (head, token)) in tile.states().zip(places) {
            take(state, head, token);
        }
    }

    /// What is left when all threads have computed: merging the partial results.
    ///
    /// # Safety
    /// As [`Attention::compute`], after every thread's has returned.
    pub unsafe fn finish(&self, ith: usize, nth: usize, work: *mut u8) {
        if !self.splits_cells(nth) {
            return;
        }
        // SAFETY: the partials were written by compute; each thread reads its own rows of them.
        unsafe {
            let (_, partials) = self.work_parts(ith, nth, work);
            let partial = |thread: usize, at: usize| {
                let at = (thread * self.streams() * self.queries() * self.heads() + at) * self.partial_len();
                std::slice::from_raw_parts_mut(partials.add(at), self.partial_len())
            };
            for at in (ith..self.streams() * self.queries() * self.heads()).step_by(nth) {
                let (head, token) = (at % self.heads(), at / self.heads() % self.queries());
                let stream = at / self.heads() / self.queries();
                let max = (0..nth).map(|t| partial(t, at)[0]).fold(f32::NEG_INFINITY, f32::max);
                // A thread that saw nothing has no maximum.
                let weight = |p: &[f32]| if p[1] == 0.0 { 0.0 } else { (p[0] - max).exp() };
                let first = partial(0, at);
                let of_first = weight(first);
                let mut sum = first[1] * of_first;
                let acc = &mut first[2..];
                (self.kernels.scale)(acc, of_first);
                for t in 1..nth {
                    let p = partial(t, at);
                    let weight = weight(p);
                    sum += p[1] * weight;
                    for (a, &x) in acc.iter_mut().zip(&p[2..]) {
                        *a += x * weight;
                    }
                }
                self.write(RowState { max, sum, acc }, head, token, stream);
            }
        }
    }

    /// Makes the share of a thread NaN, in the partial results where there are such: a failure must show.
    ///
    /// # Safety
    /// As [`Attention::compute`]; without `work` the rows of the result itself are written.
    pub unsafe fn poison(&self, ith: usize, nth: usize, work: Option<*mut u8>) {
        let rows = self.streams() * self.queries() * self.heads();
        // SAFETY: this thread's partials, or its rows of the result.
        unsafe {
            if let Some(work) = work.filter(|_| self.splits_cells(nth)) {
                let (_, partials) = self.work_parts(ith, nth, work);
                let mine = partials.add(ith * rows * self.partial_len());
                return std::slice::from_raw_parts_mut(mine, rows * self.partial_len()).fill(f32::NAN);
            }
            for at in (ith..rows).step_by(nth) {
                let (head, token) = (at % self.heads(), at / self.heads() % self.queries());
                let row = self.op.dst.row(head, token, at / self.heads() / self.queries()).cast::<f32>();
                std::slice::from_raw_parts_mut(row, self.op.dst.n(0)).fill(f32::NAN);
            }
        }
    }

    unsafe fn work_parts(&self, ith: usize, nth: usize, work: *mut u8) -> (*mut u8, *mut f32) {
        let bytes = self.thread_bytes(nth);
        // SAFETY: work_size counts the alignment, the scratch of all threads and the partials.
        unsafe {
            let work = work.add(work.align_offset(64));
            (work.add(ith * bytes), work.add(nth * bytes).cast())
        }
    }

    fn partial_index(&self, thread: usize, stream: usize, token: usize, head: usize) -> usize {
        ((thread * self.streams() + stream) * self.queries() + token) * self.heads() + head
    }

    fn kv_stream(&self, stream: usize) -> usize {
        stream / (self.streams() / self.op.k.n(3))
    }

    /// ALiBi's slope, 1 without it.
    fn slope(&self, head: usize) -> f32 {
        if self.op.max_bias <= 0.0 {
            return 1.0;
        }
        let base = 1usize << self.heads().ilog2();
        let (bias, power) =
            if head < base { (self.op.max_bias, head + 1) } else { (self.op.max_bias / 2.0, 2 * (head - base) + 1) };
        (-bias / base as f32).exp2().powi(power as i32)
    }

    /// The mask row of a token and head from cell `first` on.
    unsafe fn mask_row(&self, token: usize, head: usize, stream: usize, first: usize) -> Option<*const u8> {
        let m = self.mask?;
        // SAFETY: checked by new; dimensions 2 and 3 repeat.
        Some(unsafe { m.row(token, head % m.n(2), stream % m.n(3)).add(2 * first) })
    }

    /// The query row in K's domain, `k.width` values.
    unsafe fn query(&self, head: usize, token: usize, stream: usize, out: &mut [f32]) {
        // SAFETY: a row of q, whose size new checked; kernels run on the CPU they were chosen for.
        unsafe { self.k.enter_query(self.kernels, &self.op.q, [token, head, stream], out) }
    }

    /// Sinks, normalization, rotation back, result.
    unsafe fn write(&self, mut state: RowState, head: usize, token: usize, stream: usize) {
        if let Some(sinks) = self.sinks {
            // SAFETY: new checked that there is a sink per head.
            let sink = unsafe { sinks.data.cast::<f32>().add(head).read_unaligned() };
            if sink > state.max {
                let factor = (state.max - sink).exp();
                state.sum *= factor;
                // SAFETY: kernels run on the CPU they were chosen for.
                unsafe { (self.kernels.scale)(state.acc, factor) };
                state.max = sink;
            }
            state.sum += (sink - state.max).exp();
        }
        let norm = if state.sum == 0.0 { 0.0 } else { 1.0 / state.sum };
        // SAFETY: a row of the result, which is f32 and contiguous.
        unsafe {
            (self.kernels.scale)(state.acc, norm);
            let dst =
                std::slice::from_raw_parts_mut(self.op.dst.row(head, token, stream).cast::<f32>(), self.op.dst.n(0));
            if dst.len() == self.v.size {
                self.v.domain.leave(self.kernels, state.acc, dst);
            } else {
                let mut whole = Room::new();
                let whole = whole.zeros(self.v.size);
                self.v.domain.leave(self.kernels, state.acc, whole);
                dst.copy_from_slice(&whole[..dst.len()]);
            }
        }
    }
}
