//! kv_attn_decode and kv_attn_merge against attention in f64 on the decoded rows.

use anyhow::{ensure, Context, Result};
use half::f16;

use super::values::{bytes, bytes_mut, kind, row_bytes, store, Noise};
use super::{cases, seeded_mistakes, Setup};
use crate::metal::{Argument, Launch, Library, Order};
use crate::suite::Tally;

/// Of the result, whose values are about one.
const BOUND: f64 = 1e-3;
const SIMDGROUPS: u32 = 4;
const MOST_ROWS: usize = 8;
const MOST_VALUES: usize = 1152;

/// `struct kv_attn_args` of shaders/kv_args.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Args {
    cells: u32,
    heads: u32,
    kv_heads: u32,
    tokens: u32,
    streams: u32,
    kv_streams: u32,
    chunk_cells: u32,
    chunks: u32,
    mask_rows: [u32; 2],
    out_size: u32,
    slope_heads: u32,
    scale: f32,
    softcap: f32,
    slope_low: f32,
    slope_high: f32,
    q_nb: [u64; 3],
    k_nb: [u64; 3],
    v_nb: [u64; 3],
    mask_nb: [u64; 3],
    dst_nb: [u64; 3],
}

const _: () = assert!(std::mem::size_of::<Args>() == 16 * 4 + 15 * 8);

#[derive(Clone, Copy, Debug)]
struct Case {
    k: &'static str,
    v: &'static str,
    k_size: usize,
    v_size: usize,
    /// Values that are written of a result row.
    out_size: usize,
    kv_heads: usize,
    group: usize,
    tokens: usize,
    streams: usize,
    cells: usize,
    chunk_cells: usize,
    masked: bool,
    /// The mask has planes for this many heads.
    mask_heads: usize,
    max_bias: f32,
    softcap: f32,
    sinks: bool,
}

const PLAIN: Case = Case {
    k: "srft4",
    v: "srft4",
    k_size: 64,
    v_size: 64,
    out_size: 64,
    kv_heads: 2,
    group: 3,
    tokens: 1,
    streams: 1,
    cells: 200,
    chunk_cells: 200,
    masked: true,
    mask_heads: 1,
    max_bias: 0.0,
    softcap: 0.0,
    sinks: false,
};

fn sized(case: Case, size: usize) -> Case {
    Case { k_size: size, v_size: size, out_size: size, ..case }
}

pub fn run(setup: &Setup, tally: &mut Tally) -> Result<()> {
    let library = setup.shader("kv_attention.metal")?;
    let pairs = [
        ("srft8", "srft8"),
        ("srft4", "srft4"),
        ("srft3", "srft3"),
        ("srft2", "srft2"),
        ("srft8", "srft3"),
        ("srft4", "srft2"),
        ("f16", "srft4"),
        ("srft4", "f16"),
        ("q8_0", "srft4"),
        ("srft8", "q8_0"),
        ("q4_0", "srft3"),
        ("srft4", "q4_0"),
        ("f16", "q8_0"),
    ];
    let sizes: &[usize] = if setup.quick { &[64, 80, 128] } else { &[64, 80, 96, 112, 128, 192, 256, 512, 576] };
    for (k, v) in pairs {
        let block = |name: &str| matches!(name, "q8_0" | "q4_0");
        let fits = |size: &&usize| size.is_multiple_of(32) || !(block(k) || block(v));
        let list: Vec<Case> = sizes
            .iter()
            .filter(fits)
            .map(|&size| {
                // Long rows are dear here; 70 cells are two and a bit of what a simdgroup takes.
                let cells = if size > 256 { 70 } else { 200 };
                sized(Case { k, v, cells, chunk_cells: 96, ..PLAIN }, size)
            })
            .collect();
        check(&library, tally, &format!("kv_attn_decode {k}/{v}: {} head sizes", list.len()), &list);
    }
    let more: [(&str, &[Case]); 9] = [
        ("one chunk, one dispatch", &[PLAIN, sized(Case { k: "f16", ..PLAIN }, 128)]),
        (
            "one cell; cells that end with a chunk; one more",
            &[
                Case { cells: 1, ..PLAIN },
                Case { cells: 256, chunk_cells: 128, ..PLAIN },
                Case { cells: 257, chunk_cells: 128, ..PLAIN },
            ],
        ),
        ("softcap", &[Case { softcap: 20.0, chunk_cells: 64, ..PLAIN }, Case { softcap: 2.0, ..PLAIN }]),
        ("sinks", &[Case { sinks: true, chunk_cells: 64, ..PLAIN }, Case { sinks: true, ..PLAIN }]),
        (
            "ALiBi, head counts that are a power of two and not",
            &[Case { max_bias: 8.0, group: 4, chunk_cells: 64, ..PLAIN }, Case { max_bias: 8.0, ..PLAIN }],
        ),
        (
            "no mask; a mask for each head",
            &[Case { masked: false, chunk_cells: 64, ..PLAIN }, Case { mask_heads: 6, chunk_cells: 64, ..PLAIN }],
        ),
        ("several tokens and streams", &[Case { tokens: 3, streams: 2, chunk_cells: 96, ..PLAIN }]),
        (
            "more query heads than a threadgroup takes; one",
            &[Case { group: 11, cells: 70, chunk_cells: 64, ..PLAIN }, Case { group: 1, ..PLAIN }],
        ),
        (
            "K and V of different sizes; a view of V",
            &[
                Case { k_size: 192, v_size: 128, out_size: 128, cells: 70, ..PLAIN },
                Case {
                    k_size: 576,
                    v_size: 576,
                    out_size: 512,
                    kv_heads: 1,
                    group: 5,
                    cells: 40,
                    chunk_cells: 32,
                    ..PLAIN
                },
            ],
        ),
    ];
    for (what, list) in more {
        check(&library, tally, &format!("kv_attn_decode: {what}"), list);
    }
    tally.check("kv_attn_decode: what hidden cells hold does not matter", || hidden(&library));
    tally.check("kv_attn_decode: a bit that is flipped in the cache shows", || canary(&library));
    seeded_mistakes(&library, tally, "kv_attention.metal", || {
        for case in [PLAIN, Case { chunk_cells: 64, ..PLAIN }] {
            Problem::new(case)?.compare(&library)?;
        }
        Ok(())
    })?;
    if setup.soak {
        let long = sized(Case { cells: 4096, chunk_cells: 512, group: 8, kv_heads: 1, ..PLAIN }, 128);
        check(&library, tally, "kv_attn_decode: 4096 cells", &[long]);
    }
    Ok(())
}

fn check(library: &Library, tally: &mut Tally, what: &str, list: &[Case]) {
    let mut worst = 0.0f64;
    cases(tally, &format!("{what}, in 3 orders"), 3 * list.len() as u64, || {
        for case in list {
            let problem = Problem::new(*case)?;
            worst = worst.max(problem.compare(library).with_context(|| format!("{case:?}"))?);
        }
        Ok(())
    });
    println!("      largest error {worst:.1e}");
}

/// One side of a cache: [stream][cell][head] rows, as llama.cpp lays them out.
struct Cache {
    row_bytes: usize,
    heads: usize,
    cells: usize,
    size: usize,
    bytes: Vec<u8>,
    /// What the rows decode to.
    values: Vec<f32>,
}

impl Cache {
    fn new(name: &str, size: usize, case: &Case, noise: &mut Noise) -> Result<Cache> {
        let (row_bytes, rows) = (row_bytes(name, size)?, case.streams * case.cells * case.kv_heads);
        let mut cache = Cache {
            row_bytes,
            heads: case.kv_heads,
            cells: case.cells,
            size,
            bytes: vec![0; rows * row_bytes],
            values: noise.row(rows * size),
        };
        for (row, x) in cache.bytes.chunks_exact_mut(row_bytes).zip(cache.values.chunks_exact_mut(size)) {
            store(name, x, row)?;
        }
        Ok(cache)
    }

    fn row(&self, cell: usize, head: usize, stream: usize) -> usize {
        (stream * self.cells + cell) * self.heads + head
    }

    fn value(&self, cell: usize, head: usize, stream: usize) -> &[f32] {
        &self.values[self.row(cell, head, stream) * self.size..][..self.size]
    }

    fn nb(&self) -> [u64; 3] {
        let cell = self.row_bytes * self.heads;
        [cell, self.row_bytes, cell * self.cells].map(|n| n as u64)
    }
}

struct Problem {
    case: Case,
    /// [stream][head][token][value]
    q: Vec<f32>,
    k: Cache,
    v: Cache,
    /// [mask head][token][cell], the same for all streams.
    mask: Vec<u16>,
    sinks: Vec<f32>,
}

impl Problem {
    fn new(case: Case) -> Result<Problem> {
        let noise = &mut Noise::new(case.k_size as u64 + 1000 * case.cells as u64);
        let heads = case.kv_heads * case.group;
        let k = Cache::new(case.k, case.k_size, &case, noise)?;
        let v = Cache::new(case.v, case.v_size, &case, noise)?;
        let q = noise.row(case.streams * heads * case.tokens * case.k_size);
        let mut mask = Vec::new();
        for i in 0..case.mask_heads * case.tokens * case.cells {
            let (cell, token) = (i % case.cells, i / case.cells % case.tokens);
            // A causal edge, 40 hidden cells in a row, holes, and a bias on the others.
            let hidden = cell > case.cells - case.tokens + token || (64..104).contains(&cell) || i % 7 == 3 && cell > 0;
            mask.push(f16::from_f32(if hidden { f32::NEG_INFINITY } else { -noise.uniform() }).to_bits());
        }
        let sinks = (0..heads).map(|h| if h % 2 == 0 { 5.0 } else { -1.0 } + noise.gaussian()).collect();
        Ok(Problem { case, q, k, v, mask, sinks })
    }

    fn heads(&self) -> usize {
        self.case.kv_heads * self.case.group
    }

    fn scale(&self) -> f32 {
        2.0 / (self.case.k_size as f32).sqrt()
    }

    /// Query heads of a threadgroup, as a host has to choose them.
    fn rows(&self) -> usize {
        let widest = self.case.k_size.max(self.case.v_size);
        self.case.group.min(MOST_ROWS).min(MOST_VALUES / widest)
    }

    fn args(&self) -> Args {
        let c = &self.case;
        let heads = self.heads();
        let slope_heads = 1u32 << heads.ilog2();
        let (q_row, dst_row) = (4 * c.k_size, 4 * c.out_size);
        Args {
            cells: c.cells as u32,
            heads: heads as u32,
            kv_heads: c.kv_heads as u32,
            tokens: c.tokens as u32,
            streams: c.streams as u32,
            kv_streams: c.streams as u32,
            chunk_cells: c.chunk_cells as u32,
            chunks: c.cells.div_ceil(c.chunk_cells) as u32,
            mask_rows: [c.mask_heads as u32, 1],
            out_size: c.out_size as u32,
            slope_heads,
            scale: self.scale(),
            softcap: c.softcap,
            slope_low: (-c.max_bias / slope_heads as f32).exp2(),
            slope_high: (-c.max_bias / 2.0 / slope_heads as f32).exp2(),
            q_nb: [q_row, q_row * c.tokens, q_row * c.tokens * heads].map(|n| n as u64),
            k_nb: self.k.nb(),
            v_nb: self.v.nb(),
            mask_nb: [2 * c.cells, 2 * c.cells * c.tokens, 0].map(|n| n as u64),
            dst_nb: [dst_row, dst_row * heads, dst_row * heads * c.tokens].map(|n| n as u64),
        }
    }

    /// [stream][token][head][value]
    fn run(&self, library: &Library, order: Order) -> Result<Vec<f32>> {
        let c = &self.case;
        let (args, rows) = (self.args(), self.rows());
        let whole = args.chunks == 1;
        let flag = |on: bool| if on { 1.0 } else { 0.0 };
        let constants = [
            (10, kind(c.k)?.into()),
            (11, kind(c.v)?.into()),
            (12, c.k_size as f64),
            (13, c.v_size as f64),
            (14, rows as f64),
            (15, flag(c.masked)),
            (16, flag(c.softcap != 0.0)),
            (17, flag(c.sinks)),
            (18, flag(c.max_bias != 0.0)),
            (19, flag(whole)),
        ];
        let results = c.streams * c.tokens * self.heads();
        let mut dst = vec![f32::NAN; results * c.out_size];
        let mut partials = vec![f32::NAN; if whole { 0 } else { results * args.chunks as usize * (c.v_size + 2) }];
        let simdgroups = SIMDGROUPS as usize;
        let floats = rows * c.k_size + 32 + simdgroups * rows * (32 + 2 + c.v_size);
        let blocks = c.group.div_ceil(rows);
        let args_buffer = [args];
        library.launch(Launch {
            kernel: "kv_attn_decode",
            grid: [args.chunks, (c.kv_heads * blocks) as u32, (c.tokens * c.streams) as u32],
            group: [32 * SIMDGROUPS, 1, 1],
            buffers: vec![
                Argument::Read(bytes(&args_buffer)),
                Argument::Read(bytes(&self.q)),
                Argument::Read(&self.k.bytes),
                Argument::Read(&self.v.bytes),
                Argument::Read(bytes(&self.mask)),
                Argument::Read(bytes(&self.sinks)),
                Argument::Write(bytes_mut(&mut dst)),
                Argument::Write(bytes_mut(&mut partials)),
            ],
            threadgroup: &[4 * floats],
            constants: &constants,
            order,
            strict: true,
        })?;
        if !whole {
            library.launch(Launch {
                kernel: "kv_attn_merge",
                grid: [self.heads(), c.tokens, c.streams].map(|n| n as u32),
                group: [32, 1, 1],
                buffers: vec![
                    Argument::Read(bytes(&args_buffer)),
                    Argument::Read(&[]),
                    Argument::Read(&[]),
                    Argument::Read(&[]),
                    Argument::Read(&[]),
                    Argument::Read(bytes(&self.sinks)),
                    Argument::Write(bytes_mut(&mut dst)),
                    Argument::Read(bytes(&partials)),
                ],
                threadgroup: &[4 * c.v_size],
                constants: &constants,
                order,
                strict: true,
            })?;
        }
        Ok(dst)
    }

    fn slope(&self, head: usize) -> f64 {
        let Case { max_bias, .. } = self.case;
        if max_bias == 0.0 {
            return 1.0;
        }
        let base = 1usize << self.heads().ilog2();
        let (bias, power) = match head < base {
            true => (f64::from(max_bias), head + 1),
            false => (f64::from(max_bias) / 2.0, 2 * (head - base) + 1),
        };
        (-bias / base as f64).exp2().powi(power as i32)
    }

    /// Straight from the definition.
    fn naive(&self) -> Vec<f64> {
        let c = &self.case;
        let mut all = Vec::new();
        for row in 0..c.streams * c.tokens * self.heads() {
            let (head, token) = (row % self.heads(), row / self.heads() % c.tokens);
            let stream = row / self.heads() / c.tokens;
            let q = &self.q[((stream * self.heads() + head) * c.tokens + token) * c.k_size..][..c.k_size];
            let mut scores = Vec::new();
            for cell in 0..c.cells {
                let k = self.k.value(cell, head / c.group, stream);
                let mut s: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                s *= f64::from(self.scale());
                if c.softcap != 0.0 {
                    s = f64::from(c.softcap) * (s / f64::from(c.softcap)).tanh();
                }
                if c.masked {
                    let at = (head % c.mask_heads * c.tokens + token) * c.cells + cell;
                    s += self.slope(head) * f64::from(f16::from_bits(self.mask[at]).to_f32());
                }
                scores.push(s);
            }
            let sink = f64::from(self.sinks[head]);
            let mut largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if c.sinks {
                largest = largest.max(sink);
            }
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = weights.iter().sum::<f64>() + if c.sinks { (sink - largest).exp() } else { 0.0 };
            let mut result = vec![0.0f64; c.out_size];
            for (cell, &weight) in weights.iter().enumerate().filter(|(_, &w)| w > 0.0) {
                for (r, &v) in result.iter_mut().zip(self.v.value(cell, head / c.group, stream)) {
                    *r += weight / sum * f64::from(v);
                }
            }
            all.extend(result);
        }
        all
    }

    /// The largest error; the same bits in every order.
    fn compare(&self, library: &Library) -> Result<f64> {
        let got = self.run(library, Order::Forward)?;
        for order in [Order::Reverse, Order::Random(1)] {
            ensure!(bytes(&got) == bytes(&self.run(library, order)?), "the result depends on the order of lanes");
        }
        let mut worst = 0.0f64;
        for (i, (&got, wanted)) in got.iter().zip(self.naive()).enumerate() {
            let error = (f64::from(got) - wanted).abs();
            ensure!(error <= BOUND, "value {i}: {got}, wanted {wanted}");
            worst = worst.max(error);
        }
        Ok(worst)
    }
}

fn hidden(library: &Library) -> Result<()> {
    for (k, v) in [("srft4", "srft4"), ("f16", "f16")] {
        let mut p = Problem::new(sized(Case { k, v, chunk_cells: 64, ..PLAIN }, 64))?;
        let before = p.run(library, Order::Forward)?;
        for cell in 0..p.case.cells {
            if f16::from_bits(p.mask[cell]).to_f32() == f32::NEG_INFINITY {
                for head in 0..p.case.kv_heads {
                    for cache in [&mut p.k, &mut p.v] {
                        let at = cache.row(cell, head, 0) * cache.row_bytes;
                        // NaN as a half.
                        cache.bytes[at..at + cache.row_bytes].fill(0xff);
                    }
                }
            }
        }
        ensure!(bytes(&before) == bytes(&p.run(library, Order::Forward)?), "{k}/{v}: hidden cells were seen");
    }
    Ok(())
}

fn canary(library: &Library) -> Result<()> {
    for side in ["K", "V"] {
        let mut p = Problem::new(PLAIN)?;
        let before = p.run(library, Order::Forward)?;
        let cache = if side == "K" { &mut p.k } else { &mut p.v };
        // Cell 0 of head 1 is seen by heads 3, 4 and 5.
        let at = cache.row(0, 1, 0) * cache.row_bytes;
        cache.bytes[at + cache.row_bytes - 1] ^= 0x80;
        let after = p.run(library, Order::Forward)?;
        let of = |head: usize| head * p.case.out_size..(head + 1) * p.case.out_size;
        for head in 0..6 {
            let same = before[of(head)] == after[of(head)];
            ensure!(same == (head < 3), "{side}: head {head} {}", if same { "did not notice" } else { "changed" });
        }
    }
    Ok(())
}
