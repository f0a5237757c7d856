//! Who does what: query rows and cells over threads.
//!
//! ```text
//!            blocks of cells ->
//! panel 0    t0 t0 t0 t0 t0 t1      a panel: some query rows of one KV head, or all rows of neighbouring heads
//! panel 1    t1 t1 t1 t1 t2 t2      a share: so many blocks of panels, one after another
//! panel 2    t2 t2 t2 t3 t3 t3
//! ```
//!
//! Every thread that has any has the same number of blocks, to within one, whatever the number of panels. It has one panel in
//! memory at a time, and only its first and its last one can be shared with other threads, so there are at most two panels of partial results a
//! thread. What a shared panel costs is that its queries are rotated once more.
//!
//! Panels are made as follows.
//!
//! - A long cache and few rows (decoding): neighbouring heads lie side by side in a cell, so they share a panel, and each line
//!   of the cache is read once. Where threads are so many that they would be busy with rotating queries, panels have
//!   fewer heads.
//! - Many rows: a panel has up to [`Work::most_rows`] rows of one head.
//! - A prompt that is a large part of the cache: the mask hides the last cells from the first rows, so blocks are no measure of
//!   work. Threads get whole panels, the last rows of a head beside its first, in a number that comes out even.
//!
//! Blocks of a shared panel are taken in runs of neighbours, which memory is faster for. Runs are dealt out: each thread has every n-th of them. So
//! what the mask hides (the end of the cache, other sequences, what has left a sliding window) is hidden from all threads alike, but for a run.

use crate::isa::CELLS;
use std::ops::Range;

/// Unpacking a block of K and V takes as long as so many query rows and a block: by the counts of decoding with three and four
/// rows a cell (tests/counts), with AVX-512.
const UNPACK: usize = 3;
/// Rotating and quantizing a query takes as long as so many blocks of its row, likewise.
const ROTATE: usize = 3;
/// Panels are made so that threads spend at most one part in so many on rotating queries that others rotate too.
const LONG: usize = 8;
/// Rows of a head that are not cut further: unpacking would take too large a part.
const FEWEST_ROWS: usize = 24;
/// A thread has about so many runs of a panel's blocks or more, of so many blocks at most.
const RUNS: usize = 16;
const LONGEST_RUN: usize = 16;
/// The mask's triangle is seen where queries are more than one in so many cells.
const TRIANGLE: usize = 8;

/// What is to be divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub streams: usize,
    /// KV heads.
    pub heads: usize,
    /// Query rows of a KV head and stream: query heads times tokens.
    pub rows: usize,
    /// Rows of a panel at most.
    pub most_rows: usize,
    pub tokens: usize,
    pub cells: usize,
    /// Is there a mask?
    pub masked: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Split {
    work: Work,
    /// Parts that the rows of a head are cut into.
    chunks: usize,
    /// KV heads of a panel.
    together: usize,
    blocks: usize,
    /// Parts of a panel that threads can take: its blocks, or all of it.
    parts: usize,
    /// Threads that have something to do.
    threads: usize,
}

/// The order of a shared panel's blocks: runs of so many; those of one thread follow each other, and blocks that are no whole run come last.
#[derive(Clone, Copy, Debug)]
struct Order {
    run: usize,
    runs: usize,
    threads: usize,
}

/// Query rows of neighbouring KV heads.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Panel {
    pub stream: usize,
    pub heads: Range<usize>,
    /// Of each head.
    pub rows: Range<usize>,
}

/// Query rows of one KV head of one stream.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TileRows {
    pub stream: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
}

impl Panel {
    /// The rows of its head number `at`.
    pub fn tile(&self, at: usize) -> TileRows {
        TileRows { stream: self.stream, kv_head: self.heads.start + at, rows: self.rows.clone() }
    }

    /// Head by head.
    pub fn tiles(&self) -> impl Iterator<Item = TileRows> + '_ {
        (0..self.heads.len()).map(|at| self.tile(at))
    }
}

/// What a thread does of one panel.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub panel: Panel,
    parts: Range<usize>,
    /// Where the partial results go, 0 or 1; None: the thread has the whole panel.
    pub slot: Option<usize>,
}

/// A panel of several threads.
#[derive(Clone, Debug)]
pub(super) struct SharedPanel {
    pub panel: Panel,
    pub threads: Range<usize>,
    /// Slot of the first thread; all others have the panel first.
    first_slot: usize,
}

impl SharedPanel {
    pub fn slot(&self, thread: usize) -> usize {
        if thread == self.threads.start {
            self.first_slot
        } else {
            0
        }
    }
}

impl Split {
    /// Depends on shapes and the number of threads alone: the same call gives the same bits.
    pub fn new(work: Work, threads: usize) -> Split {
        let (heads, blocks) = (work.streams * work.heads, work.cells.div_ceil(CELLS));
        let chunks = work.rows.div_ceil(work.most_rows).max(1);
        let mut split = Split { work, chunks, together: 1, blocks, parts: 1, threads };
        if blocks <= 1 || (work.masked && work.tokens * TRIANGLE > work.cells) {
            return split.with_whole_panels(threads);
        }
        // Blocks of one panel that a thread should have.
        let long = (LONG * ROTATE * work.rows / (work.rows + UNPACK)).max(1);
        let enough = |panels: usize| panels * blocks >= (threads - 1) * long;
        if chunks == 1 {
            let fits =
                |&n: &usize| work.heads.is_multiple_of(n) && n * work.rows <= work.most_rows && enough(heads / n);
            split.together = (1..=work.heads).rev().find(fits).unwrap_or(1);
        }
        if !enough(split.panels()) {
            let wanted = (threads * long).div_ceil(heads * blocks);
            let range = chunks..=chunks.max(work.rows / FEWEST_ROWS);
            let wanted = wanted.clamp(*range.start(), *range.end());
            // As many threads for each panel, where that can be.
            let even = (wanted..=*range.end()).find(|chunks| threads.is_multiple_of(heads * chunks));
            split.chunks = even.unwrap_or(wanted);
        }
        let Some(threads) = split.threads_for_parts(threads) else { return split.with_whole_panels(threads) };
        Split { parts: blocks, threads, ..split }
    }

    fn with_whole_panels(mut self, threads: usize) -> Split {
        self.chunks = self.work.chunks_for_whole_panels(self.chunks, threads);
        self.threads = threads.min(self.panels()).max(1);
        self
    }

    /// How many threads share the panels' blocks; None where whole panels are better.
    ///
    /// Who shares a panel rotates its queries once more. That may take a fifth of the time of all, and more with few tokens, where the
    /// time to the answer counts: a batch with one more token then takes longer anyway.
    fn threads_for_parts(&self, threads: usize) -> Option<usize> {
        let (panels, rows) = (self.panels(), self.tile_rows());
        let twice = (0.2 + 1.6 / self.work.tokens as f64).min(1.0);
        let (rotate, attend) = ((ROTATE * rows) as f64, (self.blocks * (rows + UNPACK)) as f64);
        let more = (panels as f64 * twice * (rotate + attend) / rotate) as usize;
        if panels == 0 || (threads <= panels && more < threads) {
            return None;
        }
        // The same number for each panel, or as many as there are: then some have two panels to rotate.
        let even = threads.min(panels + more).min(panels * self.blocks) / panels * panels;
        let uneven = threads.min(more).min(panels * self.blocks);
        let time = |rotations: f64, n: usize| rotations * rotate + attend * panels as f64 / n as f64;
        Some(if time(1.0, even) <= time(2.0, uneven) { even } else { uneven })
    }

    fn panels(&self) -> usize {
        if self.work.rows == 0 {
            return 0;
        }
        self.work.streams * self.work.heads / self.together * self.chunks
    }

    /// Rows of a head in a panel, at most.
    pub fn tile_rows(&self) -> usize {
        self.work.rows.div_ceil(self.chunks)
    }

    /// KV heads in a panel.
    pub fn tiles(&self) -> usize {
        self.together
    }

    /// Threads that have something to do: the first ones.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Can a panel be shared?
    pub fn shares_panels(&self) -> bool {
        self.shared().next().is_some()
    }

    /// The last rows of a head follow its first, the last but one the second: two neighbours together see as much of the
    /// cache as any other two.
    fn panel(&self, number: usize) -> Panel {
        let (column, at) = (number / self.chunks, number % self.chunks);
        let chunk = if at.is_multiple_of(2) { at / 2 } else { self.chunks - 1 - at / 2 };
        let columns = self.work.heads / self.together;
        let head = column % columns * self.together;
        let row = |chunk: usize| chunk * self.work.rows / self.chunks;
        Panel { stream: column / columns, heads: head..head + self.together, rows: row(chunk)..row(chunk + 1) }
    }

    /// Parts of all panels, counted through.
    fn share(&self, thread: usize) -> Range<usize> {
        if thread >= self.threads {
            return 0..0;
        }
        let all = self.panels() * self.parts;
        all * thread / self.threads..all * (thread + 1) / self.threads
    }

    /// Whose share a part is.
    fn thread_of(&self, part: usize) -> usize {
        ((part + 1) * self.threads - 1) / (self.panels() * self.parts)
    }

    /// What a thread does, one piece after another.
    pub fn pieces(&self, thread: usize) -> impl Iterator<Item = Piece> + '_ {
        let (share, parts) = (self.share(thread), self.parts);
        let first = share.start / parts;
        let numbers = first..if share.is_empty() { first } else { share.end.div_ceil(parts) };
        numbers.map(move |number| {
            let start = number * parts;
            let mine = share.start.max(start) - start..share.end.min(start + parts) - start;
            let slot = (mine != (0..parts)).then_some((number != first) as usize);
            Piece { panel: self.panel(number), parts: mine, slot }
        })
    }

    /// The blocks of cells of a piece.
    pub fn blocks(&self, piece: &Piece) -> impl Iterator<Item = usize> {
        let order = piece.slot.map(|_| Order::new(self.blocks, self.threads.div_ceil(self.panels())));
        let range = if order.is_some() { piece.parts.clone() } else { 0..self.blocks };
        range.map(move |i| order.map_or(i, |order| order.block(i)))
    }

    /// The panels of several threads: a share ends within each.
    pub fn shared(&self) -> impl Iterator<Item = SharedPanel> + '_ {
        let mut last = None;
        (1..self.threads).filter_map(move |thread| {
            let end = self.share(thread).start;
            let number = end / self.parts;
            if end.is_multiple_of(self.parts) || last == Some(number) {
                return None;
            }
            last = Some(number);
            let first = self.thread_of(number * self.parts);
            let threads = first..self.thread_of((number + 1) * self.parts - 1) + 1;
            let first_slot = (self.share(first).start / self.parts != number) as usize;
            Some(SharedPanel { panel: self.panel(number), threads, first_slot })
        })
    }
}

impl Work {
    /// The number of chunks, `fewest` or more, with which the thread that has most to do has least.
    fn chunks_for_whole_panels(&self, fewest: usize, threads: usize) -> usize {
        let heads = self.streams * self.heads;
        // How much more the last rows see than the first ones, as a part of the sum.
        let seen = |cells: usize| cells.div_ceil(CELLS) as f64;
        let (least, most) = (seen(self.cells.saturating_sub(self.tokens) + 1), seen(self.cells));
        let spread = if self.masked && threads > 1 { (most - least).max(0.0) / (most + least) } else { 0.0 };
        let time = |chunks: usize| {
            let each = (heads * chunks).div_ceil(threads);
            // A panel that has no partner is of the last rows, for some thread.
            let alone = if each.is_multiple_of(2) { 0.0 } else { spread };
            (self.rows.div_ceil(chunks) + UNPACK) as f64 * (each as f64 + alone)
        };
        let most = self.rows / FEWEST_ROWS;
        let others = (1..=8).map(|each| (each * threads / heads).min(most)).filter(|&chunks| chunks > fewest);
        others.fold(fewest, |best, chunks| if time(chunks) < time(best) { chunks } else { best })
    }
}

impl Order {
    /// Of the blocks of a panel that about so many threads share.
    fn new(blocks: usize, threads: usize) -> Order {
        let run = (blocks / (RUNS * threads)).clamp(1, LONGEST_RUN);
        Order { run, runs: blocks / run, threads }
    }

    fn block(self, at: usize) -> usize {
        let (number, of_run) = (at / self.run, at % self.run);
        if number >= self.runs {
            return at;
        }
        // The first threads have one more.
        let (each, more) = (self.runs / self.threads, self.runs % self.threads);
        let (thread, turn) = if number < more * (each + 1) {
            (number / (each + 1), number % (each + 1))
        } else {
            let rest = number - more * (each + 1);
            (more + rest / each, rest % each)
        };
        (turn * self.threads + thread) * self.run + of_run
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::tests::stepped;

    /// KV heads and query heads of each: Llama-3-70B, SmolLM2, Qwen2.5-1.5B, DeepSeek-V3, heads of their own.
    const MODELS: [(usize, usize); 5] = [(8, 8), (3, 3), (2, 6), (1, 128), (32, 1)];
    const THREADS: [usize; 12] = [1, 2, 3, 6, 7, 16, 24, 48, 64, 100, 128, 256];

    fn work((heads, heads_per_kv): (usize, usize), tokens: usize, cells: usize) -> Work {
        Work { streams: 1, heads, rows: heads_per_kv * tokens, most_rows: 128, tokens, cells, masked: true }
    }

    fn token_counts() -> impl Iterator<Item = usize> + Clone {
        (1..=40).chain((44..=256).step_by(4)).chain((272..=2048).step_by(48))
    }

    /// Every row meets every block once, a thread has at most two unfinished panels, and they are found again.
    #[test]
    fn everything_is_done_once() {
        let lists = [(1, 1, 128), (2, 3, 128), (3, 2, 16), (1, 6, 7)];
        let cases = lists.into_iter().flat_map(|list| {
            let sizes = [0, 1, 5, 30, 129, 400].into_iter().flat_map(|rows| [0, 1, 2, 3, 7, 40].map(|b| (rows, b)));
            sizes.flat_map(move |size| [1, 2, 3, 5, 8, 31, 200].into_iter().map(move |t| (list, size, t)))
        });
        for ((streams, heads, most_rows), (rows, blocks), threads) in stepped(cases) {
            for masked in [false, true] {
                let cells = (blocks * CELLS).saturating_sub(3);
                let split = Split::new(Work { streams, heads, rows, most_rows, tokens: rows, cells, masked }, threads);
                let mut done = vec![0; streams * heads * rows * blocks.max(1)];
                let mut partial = Vec::new();
                for thread in 0..threads {
                    let pieces: Vec<Piece> = split.pieces(thread).collect();
                    assert!(pieces.is_empty() || thread < split.threads());
                    for piece in &pieces {
                        let Panel { stream, heads: of, rows: range } = piece.panel.clone();
                        assert!(range.len() <= split.tile_rows() && of.len() <= split.tiles());
                        assert!(of.len() * range.len() <= most_rows);
                        let seen: Vec<usize> = if blocks == 0 { vec![0] } else { split.blocks(piece).collect() };
                        for (head, row) in of.flat_map(|h| range.clone().map(move |r| (h, r))) {
                            let at = ((stream * heads + head) * rows + row) * blocks.max(1);
                            seen.iter().for_each(|block| done[at + block] += 1);
                        }
                        partial.extend(piece.slot.map(|slot| (piece.panel.clone(), thread, slot)));
                    }
                    let mut slots: Vec<usize> = pieces.iter().filter_map(|p| p.slot).collect();
                    slots.dedup();
                    assert_eq!(slots.len(), pieces.iter().filter(|p| p.slot.is_some()).count());
                }
                assert!(done.iter().all(|&n| n == 1), "{split:?}");
                let merged: Vec<_> = split
                    .shared()
                    .flat_map(|s| s.threads.clone().map(move |t| (s.panel.clone(), t, s.slot(t))))
                    .collect();
                partial.sort_by_key(|p| (p.0.stream, p.0.heads.start, p.0.rows.start, p.1));
                let mut sorted = merged.clone();
                sorted.sort_by_key(|p| (p.0.stream, p.0.heads.start, p.0.rows.start, p.1));
                assert_eq!(sorted, partial, "{split:?}");
                assert_eq!(split.shares_panels(), !partial.is_empty());
            }
        }
    }

    /// Wherever the part of the cache lies that is seen, no thread has much more of it than another; and threads that have many blocks have
    /// neighbours.
    #[test]
    fn shares_are_spread() {
        let cases = [(128, 2), (128, 8), (129, 3), (256, 8), (512, 2), (1024, 7), (1024, 16), (1039, 16), (2048, 64)];
        for (blocks, threads) in cases {
            let order = Order::new(blocks, threads);
            let all: Vec<usize> = (0..blocks).map(|at| order.block(at)).collect();
            for part in [2, 3, 4] {
                let seen = blocks / part;
                for first in (0..=blocks - seen).step_by(5) {
                    let of_thread = |thread: usize| {
                        let share = &all[blocks * thread / threads..blocks * (thread + 1) / threads];
                        share.iter().filter(|&&block| (first..first + seen).contains(&block)).count()
                    };
                    let most = (0..threads).map(of_thread).max().unwrap_or(0);
                    let mean = seen as f64 / threads as f64;
                    let wanted = (1.3 * mean).max(mean + 2.0);
                    assert!(
                        most as f64 <= wanted,
                        "{most}, {mean} each, {blocks} blocks, {threads} threads: {order:?}"
                    );
                }
            }
            let neighbours = all.windows(2).filter(|w| w[1] == w[0] + 1).count();
            let long = [(128, 2), (512, 2)].contains(&(blocks, threads));
            assert!(!long || 4 * neighbours >= 3 * blocks, "{neighbours} of {blocks}, {threads} threads");
            let mut sorted = all;
            sorted.sort();
            assert!(sorted.into_iter().eq(0..blocks), "{blocks}");
        }
    }

    /// Of each thread, in units of a query row and block.
    fn times(work: Work, threads: usize) -> Vec<f64> {
        let split = Split::new(work, threads);
        let heads_per_kv = work.rows / work.tokens;
        let time = |piece: Piece| {
            let Panel { heads, rows, .. } = piece.panel.clone();
            let last = (rows.end - 1) / heads_per_kv;
            // The queries are those of the last cells.
            let seen = (work.cells + last + 1).saturating_sub(work.tokens);
            let blocks = split.blocks(&piece).filter(|block| block * CELLS < seen).count();
            // And a result is rotated back, or a quarter of that for a partial one.
            let rotate = ROTATE as f64 + if piece.slot.is_some() { 0.25 } else { 1.0 };
            heads.len() as f64 * ((blocks * (rows.len() + UNPACK)) as f64 + rows.len() as f64 * rotate)
        };
        (0..threads).map(|thread| split.pieces(thread).map(time).sum()).collect()
    }

    /// More tokens never take a fifth less than fewer.
    #[test]
    fn no_cliff() {
        let cases = MODELS
            .into_iter()
            .flat_map(|m| THREADS.into_iter().flat_map(move |t| [300, 2048, 8192].map(|c| (m, t, c))));
        for (model, threads, cells) in stepped(cases) {
            let mut most = (0.0, 0);
            for tokens in token_counts().filter(|&tokens| tokens <= cells) {
                let total: f64 = times(work(model, tokens, cells), threads).iter().sum();
                assert!(
                    total > 0.8 * most.0,
                    "{model:?}, {threads} threads, {cells} cells: {total:.0} with {tokens} tokens, {:.0} with {}",
                    most.0,
                    most.1
                );
                most = if total > most.0 { (total, tokens) } else { most };
            }
        }
    }

    /// The longest share over the mean of those that are not empty, decoding with 8192 cells and with prompts of 64 tokens or more.
    #[test]
    fn shares_are_equal() {
        // Three KV heads do not divide 64 threads, nor 21 threads 128 blocks.
        for (model, [deep, prompt]) in
            MODELS.into_iter().zip([[1.1, 1.1], [1.14, 1.2], [1.12, 1.15], [1.12, 1.1], [1.1, 1.1]])
        {
            for threads in [16, 64] {
                let longest = |tokens: usize, cells: usize| {
                    let times: Vec<f64> =
                        times(work(model, tokens, cells), threads).into_iter().filter(|&t| t > 0.0).collect();
                    times.iter().copied().fold(0.0, f64::max) * times.len() as f64 / times.iter().sum::<f64>()
                };
                for tokens in [1, 2, 3, 5, 8, 64, 112, 256, 512] {
                    let ratio = longest(tokens, 8192);
                    assert!(ratio < deep, "{model:?}, {threads} threads, {tokens} tokens: {ratio}");
                }
                // A prompt alone: there must be enough rows for all.
                for tokens in [64, 96, 128, 192, 256, 384, 512] {
                    if model.0 * model.1 * tokens < 2 * FEWEST_ROWS * threads {
                        continue;
                    }
                    let ratio = longest(tokens, tokens.next_multiple_of(256));
                    assert!(ratio < prompt, "{model:?}, {threads} threads, prompt of {tokens}: {ratio}");
                }
            }
        }
    }

    #[test]
    fn one_thread_cuts_nothing_that_fits() {
        for tokens in [1, 7, 16, 40, 64] {
            let split = Split::new(work((2, 3), tokens, 200), 1);
            assert_eq!(split.chunks, (3 * tokens).div_ceil(128), "{tokens}");
            assert!(!split.shares_panels());
        }
    }

    #[test]
    fn heads_stay_together_on_long_caches() {
        let split = |tokens, cells, threads| Split::new(work((8, 4), tokens, cells), threads);
        assert_eq!(split(1, 8192, 8).together, 8);
        assert_eq!(split(4, 32768, 16).together, 8);
        assert_eq!(split(8, 32768, 16).together, 4);
        assert_eq!(split(1, 8192, 16).together, 4);
        assert_eq!(split(1, 8192, 64).together, 1);
        assert_eq!(split(1, 512, 64).together, 1);
    }
}
