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
//! Where a cell has a precise row beside its own, that one is read ([`recent`]): such rows are further blocks, behind those of
//! the cells.
//!
//! Query rows and cells are divided over threads ([`split`]); where several threads have the same rows and different cells,
//! their partial (max, sum, vector) triples are merged. Who does what depends on shapes and the number of threads alone,
//! so the same call gives the same bits.

mod memory;
mod queries;
mod recent;
mod run;
mod scores;
pub(crate) mod side;
mod split;
mod tile;

#[cfg(test)]
mod tests;

use crate::codec::plain::Plain;
use crate::isa::{self, Kernels, CELLS};
use crate::room::Room;
use crate::tensor::Tensor;
use memory::BlockShape;
use queries::{same_form, QueryRows};
use recent::{ColumnBlock, Recent};
use side::KvSide;
use split::{SharedPanel, Split, TileRows, Work};
use tile::{RowState, Scratch, Tile, TileShape};

pub use recent::RecentRows;
pub use run::{run, step, work_size};
pub use scores::{check_mul_mat, mul_mat};

/// FLASH_ATTN_EXT.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionOp<'a> {
    /// f32 or f16 [dk, n_q, n_head, ne3]
    pub q: Tensor,
    /// [dk, n_kv, n_head_kv, ne3]
    pub k: Tensor,
    /// [dv, n_kv, n_head_kv, ne3]
    pub v: Tensor,
    /// f32 [dv, n_head, n_q, ne3]
    pub dst: Tensor,
    /// f16 [n_kv, n_q, *, *], or NULL
    pub mask: Option<&'a Tensor>,
    /// f32 [n_head], or NULL
    pub sinks: Option<&'a Tensor>,
    /// Precise rows of recent cells, or NULL
    pub recent: Option<&'a RecentRows<'a>>,
    /// f32 [dv, 1, n_head_kv]: added to each result, that of a query that sees nothing too, or NULL
    pub center: Option<&'a Tensor>,
    /// Multiplies the scores.
    pub scale: f32,
    /// ALiBi.
    pub max_bias: f32,
    /// 0: none.
    pub logit_softcap: f32,
}

/// Query rows that a thread works on at once, at most.
const MOST_ROWS: usize = 128;
/// Bytes of work memory of a thread, at most, unless a single row needs more.
const THREAD_BYTES: usize = 4 << 20;

/// An attention, checked.
pub struct Attention<'a> {
    op: &'a AttentionOp<'a>,
    k: KvSide,
    v: KvSide,
    mask: Option<&'a Tensor>,
    sinks: Option<&'a Tensor>,
    recent: Option<Recent>,
    /// Query heads that share a KV head.
    heads_per_kv: usize,
    kernels: &'static Kernels,
}

/// The two steps of an attention: every thread does the first before any does the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// [`Attention::compute`]
    Compute,
    /// [`Attention::finish`]
    Finish,
}

/// The parts of the work memory, which threads have equally much of.
struct WorkLayout {
    /// Of the tiles of a panel.
    tile: TileShape,
    /// Bytes before a thread's partial results.
    partials: usize,
    /// Bytes of a thread.
    bytes: usize,
    /// f32 values of a panel's partial results.
    slot: usize,
}

impl WorkLayout {
    /// # Safety
    /// `work` has the bytes of all threads and 64 for the alignment.
    unsafe fn thread(&self, work: *mut u8, thread: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { work.add(work.align_offset(64) + thread * self.bytes) }
    }

    /// The partial result of row `index` of a panel.
    ///
    /// # Safety
    /// As [`WorkLayout::thread`].
    unsafe fn partial(&self, work: *mut u8, thread: usize, slot: usize, index: usize) -> *mut f32 {
        let at = slot * self.slot + index * (2 + self.tile.v);
        // SAFETY: the caller's promise.
        unsafe { self.thread(work, thread).add(self.partials).cast::<f32>().add(at) }
    }
}

impl<'a> Attention<'a> {
    /// Checks types and shapes; the message says what does not fit.
    pub fn new(op: &'a AttentionOp<'a>) -> Result<Attention<'a>, String> {
        Attention::with(op, isa::kernels())
    }

    /// The same with given kernels.
    pub fn with(op: &'a AttentionOp<'a>, kernels: &'static Kernels) -> Result<Attention<'a>, String> {
        let (q, k, v, dst) = (&op.q, &op.k, &op.v, &op.dst);
        let (mask, sinks) = (op.mask, op.sinks);
        let want = |ok: bool, what: &str| if ok { Ok(()) } else { Err(what.to_string()) };
        let (k_side, v_side) = (KvSide::new(k, "K")?, KvSide::new(v, "V")?);
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
                s.plain() == Some(Plain::F32) && s.nb[0] == 4 && s.n(0) >= q.n(2) && (1..4).all(|d| s.n(d) > 0),
                "there must be an f32 sink per head",
            )?;
            s.check("the sinks")?;
        }
        if let Some(c) = op.center {
            want(
                c.plain() == Some(Plain::F32) && c.nb[0] == 4 && c.ne == [dst.ne[0], 1, k.ne[2], 1],
                "the center must be an f32 row for each KV head",
            )?;
            c.check("the center")?;
        }
        let recent = op.recent.map(|rows| Recent::new(rows, &k_side, &v_side, [k, v])).transpose()?;
        Ok(Attention { op, k: k_side, v: v_side, mask, sinks, recent, heads_per_kv: q.n(2) / k.n(2), kernels })
    }

    /// Is the memory of all tensors there?
    pub fn check_data(&self) -> Result<(), String> {
        let AttentionOp { q, k, v, dst, .. } = self.op;
        let tensors = [(q, "the queries"), (k, "K"), (v, "V"), (dst, "the result")].map(|(t, name)| (Some(t), name));
        let others = [(self.mask, "the mask"), (self.sinks, "the sinks"), (self.op.center, "the center")];
        let recent = self.op.recent.map(RecentRows::tensors).into_iter().flatten();
        let all = tensors.into_iter().chain(others).chain(recent);
        all.into_iter().try_for_each(|(t, name)| t.map_or(Ok(()), |t| t.check_data(name)))
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

    /// Query rows of a KV head and stream: row r is token r / heads_per_kv, head r % heads_per_kv.
    fn rows(&self) -> usize {
        self.queries() * self.heads_per_kv
    }

    fn split(&self, threads: usize) -> Split {
        let bytes = |rows: &usize| {
            let shape = self.tile_shape(*rows);
            shape.scratch_bytes() + shape.tile_bytes() + self.partial_bytes(2 * rows)
        };
        // Buffers of several tiles are rounded up one by one.
        let fits = |rows: &usize| bytes(rows) <= THREAD_BYTES - THREAD_BYTES / 64;
        let work = Work {
            streams: self.streams(),
            heads: self.op.k.n(2),
            rows: self.rows(),
            most_rows: (0..=MOST_ROWS.ilog2()).map(|n| MOST_ROWS >> n).find(fits).unwrap_or(1),
            tokens: self.queries(),
            cells: self.recent.as_ref().map_or(self.k.cells(), |r| (self.cell_blocks() + r.blocks()) * CELLS),
            masked: self.mask.is_some(),
        };
        Split::new(work, threads)
    }

    /// Blocks of cells; those of precise rows come behind them.
    fn cell_blocks(&self) -> usize {
        self.k.cells().div_ceil(CELLS)
    }

    /// The columns of a block, where it is one of precise rows.
    fn columns(&self, block: usize) -> Option<ColumnBlock<'_>> {
        let past = block.checked_sub(self.cell_blocks())?;
        self.recent.as_ref().map(|r| r.block(past))
    }

    /// The keys of precise rows, where queries for them have a form of their own.
    fn recent_keys(&self) -> Option<&KvSide> {
        self.recent.as_ref().map(|r| &r.parts()[0].k).filter(|k| !same_form(k, &self.k, self.kernels))
    }

    /// `rows`: query rows of a tile.
    fn tile_shape(&self, rows: usize) -> TileShape {
        let recent = self.recent.iter().flat_map(|r| r.parts()).flat_map(|p| [&p.k, &p.v]);
        let sides = || [&self.k, &self.v].into_iter().chain(recent.clone());
        let block =
            BlockShape { width: sides().map(|s| s.width).max().unwrap_or(0), floats: !sides().all(KvSide::has_levels) };
        let keys = std::iter::once(&self.k).chain(self.recent_keys());
        TileShape { rows, v: self.v.width, query_bytes: keys.map(|k| QueryRows::bytes(k, rows)).sum(), block }
    }

    /// f32 values of a partial result of one query row: maximum, sum, vector.
    fn partial_len(&self) -> usize {
        2 + self.v.width
    }

    fn partial_bytes(&self, rows: usize) -> usize {
        (4 * rows * self.partial_len()).next_multiple_of(64)
    }

    /// Where a thread's buffers lie: those of the block at hand, tiles, two panels of partial results.
    fn layout(&self, split: &Split) -> WorkLayout {
        let tile = self.tile_shape(split.tile_rows());
        let partials = tile.scratch_bytes() + split.tiles() * tile.tile_bytes();
        let slots = if split.shares_panels() { 2 } else { 0 };
        let bytes = partials + self.partial_bytes(slots * split.tiles() * tile.rows);
        WorkLayout { tile, partials, bytes, slot: split.tiles() * tile.rows * self.partial_len() }
    }

    /// Bytes that [`Attention::compute`] and [`Attention::finish`] need, for all threads together.
    pub fn work_size(&self, threads: usize) -> usize {
        let split = self.split(threads);
        split.threads() * self.layout(&split).bytes + 64
    }

    /// The share of thread `ith` of `nth`.
    ///
    /// # Safety
    /// The tensors hold what their shapes say; `work` has work_size(nth) bytes, shared by all threads.
    pub unsafe fn compute(&self, ith: usize, nth: usize, work: *mut u8) {
        let split = self.split(nth);
        let layout = self.layout(&split);
        let tile = layout.tile;
        if ith >= split.threads() {
            return;
        }
        // SAFETY: each thread that has a share has its own part of the work buffer.
        unsafe {
            let memory = layout.thread(work, ith);
            let hidden = self.recent.as_ref().map_or_else(Vec::new, |r| r.hidden(self.k.cells()));
            let mut scratch = Scratch::new(tile, memory, hidden);
            let tile_memory = |i: usize| memory.add(tile.scratch_bytes() + i * tile.tile_bytes());
            for piece in split.pieces(ith) {
                let mut tiles: Vec<Tile> = (0..)
                    .zip(piece.panel.tiles())
                    .map(|(i, rows)| Tile::new(self, tile, rows, tile_memory(i)))
                    .collect();
                // All KV heads of the panel take a block before the next one is touched: heads lie side by side in a
                // cell, so each line of the cache is read from memory once.
                let mut blocks = split.blocks(&piece).peekable();
                while let Some(block) = blocks.next() {
                    let next = blocks.peek().copied().filter(|&next| next < self.cell_blocks()).unwrap_or(block);
                    for tile in &mut tiles {
                        tile.attend(block, next, &mut scratch);
                    }
                }
                for (i, t) in tiles.iter_mut().enumerate() {
                    let rows = t.rows().clone();
                    for (r, state) in t.states().enumerate() {
                        match piece.slot {
                            None => {
                                let (head, token) = self.place(&rows, r);
                                self.write(state, head, token, rows.stream);
                            }
                            Some(slot) => {
                                let partial = layout.partial(work, ith, slot, i * tile.rows + r);
                                let partial = std::slice::from_raw_parts_mut(partial, self.partial_len());
                                (partial[0], partial[1]) = (state.max, state.sum);
                                partial[2..].copy_from_slice(state.acc);
                            }
                        }
                    }
                }
            }
        }
    }

    /// (query head, token) of row r of a tile.
    fn place(&self, rows: &TileRows, r: usize) -> (usize, usize) {
        let row = rows.rows.start + r;
        (rows.kv_head * self.heads_per_kv + row % self.heads_per_kv, row / self.heads_per_kv)
    }

    /// What is left when all threads have computed: merging the partial results.
    ///
    /// # Safety
    /// As [`Attention::compute`], after every thread's has returned.
    pub unsafe fn finish(&self, ith: usize, nth: usize, work: *mut u8) {
        let split = self.split(nth);
        let layout = self.layout(&split);
        self.merged(&split, ith, nth, |shared, index, head, token| {
            // SAFETY: the partials were written by compute; each thread reads its own rows of them.
            unsafe {
                let partial = |thread: usize| {
                    let at = layout.partial(work, thread, shared.slot(thread), index);
                    std::slice::from_raw_parts_mut(at, self.partial_len())
                };
                let max = shared.threads.clone().map(|t| partial(t)[0]).fold(f32::NEG_INFINITY, f32::max);
                // A thread that saw nothing has no maximum.
                let weight = |p: &[f32]| if p[1] == 0.0 { 0.0 } else { (p[0] - max).exp() };
                let first = partial(shared.threads.start);
                let of_first = weight(first);
                let mut sum = first[1] * of_first;
                let acc = &mut first[2..];
                (self.kernels.scale)(acc, of_first);
                for t in shared.threads.clone().skip(1) {
                    let p = partial(t);
                    let weight = weight(p);
                    sum += p[1] * weight;
                    for (a, &x) in acc.iter_mut().zip(&p[2..]) {
                        *a += x * weight;
                    }
                }
                self.write(RowState { max, sum, acc }, head, token, shared.panel.stream);
            }
        });
    }

    /// The rows that a thread merges: panel, place among the panel's partial results, head and token.
    fn merged(&self, split: &Split, ith: usize, nth: usize, mut take: impl FnMut(&SharedPanel, usize, usize, usize)) {
        let mut next = ith;
        for shared in split.shared() {
            let count = shared.panel.rows.len();
            let all = shared.panel.heads.len() * count;
            while next < all {
                let (tile, r) = (next / count, next % count);
                let rows = shared.panel.tile(tile);
                let (head, token) = self.place(&rows, r);
                take(&shared, tile * split.tile_rows() + r, head, token);
                next += nth;
            }
            next -= all;
        }
    }

    /// Makes what a thread was to do NaN: a failure must show.
    ///
    /// # Safety
    /// As [`Attention::compute`] or [`Attention::finish`], whichever failed; without `work`, rows of the result that are
    /// nobody else's are written.
    pub unsafe fn poison(&self, phase: Phase, ith: usize, nth: usize, work: Option<*mut u8>) {
        let nan = |head: usize, token: usize, stream: usize| {
            // SAFETY: a row of the result, which is f32 and contiguous.
            unsafe {
                let row = self.op.dst.row(head, token, stream).cast::<f32>();
                std::slice::from_raw_parts_mut(row, self.op.dst.n(0)).fill(f32::NAN);
            }
        };
        let split = self.split(nth);
        let Some(work) = work else {
            for at in (ith..self.streams() * self.queries() * self.heads()).step_by(nth) {
                nan(at % self.heads(), at / self.heads() % self.queries(), at / self.heads() / self.queries());
            }
            return;
        };
        if phase == Phase::Finish {
            return self.merged(&split, ith, nth, |shared, _, head, token| nan(head, token, shared.panel.stream));
        }
        let layout = self.layout(&split);
        for piece in split.pieces(ith) {
            if let Some(slot) = piece.slot {
                // SAFETY: a slot of this thread.
                unsafe {
                    let partials = layout.partial(work, ith, slot, 0);
                    std::slice::from_raw_parts_mut(partials, layout.slot).fill(f32::NAN);
                }
                continue;
            }
            for rows in piece.panel.tiles() {
                for r in 0..rows.rows.len() {
                    let (head, token) = self.place(&rows, r);
                    nan(head, token, rows.stream);
                }
            }
        }
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

    /// The mask row of a token and head.
    unsafe fn mask_row(&self, token: usize, head: usize, stream: usize) -> Option<*const u8> {
        let m = self.mask?;
        // Mostly there is one for all heads, and divisions take their time.
        let of = |i: usize, n: usize| if n == 1 { 0 } else { i % n };
        // SAFETY: checked by new; dimensions 2 and 3 repeat.
        Some(unsafe { m.row(token, of(head, m.n(2)), of(stream, m.n(3))).cast_const() })
    }

    /// Sinks, normalization, rotation back, center, result.
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
            if let Some(center) = self.op.center {
                let center = center.row(0, head / self.heads_per_kv, 0).cast::<f32>();
                for (i, x) in dst.iter_mut().enumerate() {
                    *x += center.add(i).read_unaligned();
                }
            }
        }
    }
}
