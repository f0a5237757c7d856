//! kv_attn_decode, kv_attn_merge and kv_attn_prefill against attention in f64 on the decoded rows.

use anyhow::{ensure, Context, Result};
use ggml_ext::rotation::HEAD_SIZES;
use half::f16;

use super::values::{bytes, bytes_mut, is_grouped, kind, row_bytes, store_cells, width, Noise, Side};
use super::{cases, seeded_mistakes, Setup};
use crate::metal::{Argument, Launch, Library, Order};
use crate::suite::Tally;

/// Of the result, whose values are about one.
const BOUND: f64 = 1e-3;
const SIMDGROUPS: u32 = 4;
const MOST_ROWS: usize = 8;
const MOST_VALUES: usize = 1152;
const PREFILL_WIDEST: usize = 640;
/// The tables of levels of K and V.
const LEVELS: usize = 64 + 16;

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
    k_cells: u32,
    scale: f32,
    softcap: f32,
    slope_low: f32,
    slope_high: f32,
    first_chunk: u32,
    main_chunks: u32,
    sum_width: u32,
    hidden_words: u32,
    padding: u32,
    q_nb: [u64; 3],
    k_nb: [u64; 3],
    v_nb: [u64; 3],
    mask_nb: [u64; 3],
    dst_nb: [u64; 3],
}

const _: () = assert!(std::mem::size_of::<Args>() == 22 * 4 + 15 * 8);

#[derive(Clone, Copy, Debug)]
struct Case {
    q: &'static str,
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
    q: "f32",
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

impl Case {
    fn widths(&self) -> (usize, usize) {
        (width(self.k, self.k_size), width(self.v, self.v_size))
    }

    fn widest(&self) -> usize {
        let (k, v) = self.widths();
        k.max(v)
    }
}

fn sized(case: Case, size: usize) -> Case {
    Case { k_size: size, v_size: size, out_size: size, ..case }
}

/// The kernels for few query rows and for many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Decode,
    Prefill,
}

struct Shader {
    way: Way,
    library: Library,
}

impl Shader {
    fn kernel(&self) -> &'static str {
        match self.way {
            Way::Decode => "kv_attn_decode",
            Way::Prefill => "kv_attn_prefill",
        }
    }
}

pub fn run(setup: &Setup, tally: &mut Tally) -> Result<()> {
    let decode = Shader { way: Way::Decode, library: setup.shader("kv_decode")? };
    with_shader(setup, tally, &decode, PLAIN)?;
    let prefill = Shader { way: Way::Prefill, library: setup.shader("kv_prefill")? };
    // 33 rows for each KV head: two blocks, two blocks, and a row.
    with_shader(setup, tally, &prefill, Case { tokens: 11, cells: 150, chunk_cells: 150, ..PLAIN })
}

fn with_shader(setup: &Setup, tally: &mut Tally, shader: &Shader, plain: Case) -> Result<()> {
    let kernel = shader.kernel();
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
        ("bf16", "srft4"),
        ("srft4", "bf16"),
        ("f32", "srft8"),
        ("srft3", "f32"),
        ("polar4", "polar4"),
        ("polar3", "polar3"),
        ("turbo4", "turbo4"),
        ("turbo3", "turbo3"),
        ("qjl1", "srft4"),
        ("delta8", "srft4"),
        ("delta4", "srft4"),
        ("delta3", "turbo3"),
        ("band4", "srft4"),
        ("band3", "srft3"),
        ("band2", "polar4"),
        ("turbo4", "q8_0"),
        ("q8_0", "polar4"),
    ];
    for (k, v) in pairs {
        // All sizes for what has a kind of its own, some for mixtures.
        let sizes: &[usize] = match () {
            () if setup.quick => &[64, 80, 128],
            () if k == v || setup.soak => &HEAD_SIZES,
            () => &[64, 112, 128, 256],
        };
        let block = |name: &str| matches!(name, "q8_0" | "q4_0");
        let fits = |size: &&usize| (size.is_multiple_of(32) || !(block(k) || block(v))) && row_bytes(k, **size).is_ok();
        let list: Vec<Case> = sizes
            .iter()
            .filter(fits)
            .map(|&size| {
                // Long rows are dear here; 70 cells are two and a bit of what a simdgroup takes.
                let cells = if size > 256 { 70 } else { plain.cells };
                // A group of cells is in one chunk.
                let chunk_cells = if is_grouped(k) { 128 } else { 96 };
                sized(Case { k, v, cells, chunk_cells, ..plain }, size)
            })
            // The widest have no room in prefill's threadgroup memory: they are decoded, whatever the tokens.
            .filter(|c| shader.way == Way::Decode || c.widest() <= PREFILL_WIDEST)
            .collect();
        check(shader, tally, &format!("{kernel} {k}/{v}: {} head sizes", list.len()), &list);
    }
    let chunked = Case { chunk_cells: 64, ..plain };
    let more: [(&str, Vec<Case>); 12] = [
        ("one chunk, one dispatch", vec![plain, sized(Case { k: "f16", ..plain }, 128)]),
        (
            "one cell; cells that end with a chunk; one more",
            vec![
                Case { cells: 1, chunk_cells: 1, tokens: 1, ..plain },
                Case { cells: 256, chunk_cells: 128, ..plain },
                Case { cells: 257, chunk_cells: 128, ..plain },
            ],
        ),
        ("queries of f16", vec![Case { q: "f16", ..plain }, Case { q: "f16", k: "f16", ..chunked }]),
        (
            "delta: groups that end early, no cell seen in the first half of one, several chunks",
            vec![
                Case { k: "delta4", cells: 131, chunk_cells: 64, ..plain },
                Case { k: "delta3", cells: 104, chunk_cells: 128, masked: false, ..plain },
                Case { k: "delta8", cells: 170, chunk_cells: 64, ..plain },
                Case { k: "delta4", cells: 200, chunk_cells: 128, tokens: 2, streams: 2, ..plain },
            ],
        ),
        (
            "bands of all widths in a row; groups that end early",
            vec![
                sized(Case { k: "band3", cells: 70, chunk_cells: 128, ..plain }, 256),
                Case { k: "band2", cells: 131, chunk_cells: 64, ..plain },
            ],
        ),
        ("softcap", vec![Case { softcap: 20.0, ..chunked }, Case { softcap: 2.0, ..plain }]),
        ("sinks", vec![Case { sinks: true, ..chunked }, Case { sinks: true, ..plain }]),
        (
            "ALiBi, head counts that are a power of two and not",
            vec![Case { max_bias: 8.0, group: 4, ..chunked }, Case { max_bias: 8.0, ..plain }],
        ),
        ("no mask; a mask for each head", vec![Case { masked: false, ..chunked }, Case { mask_heads: 6, ..chunked }]),
        ("several tokens and streams", vec![Case { tokens: 3, streams: 2, ..chunked }]),
        (
            "more query heads than a threadgroup takes; one",
            vec![Case { group: 11, cells: 70, ..chunked }, Case { group: 1, ..plain }],
        ),
        (
            "K and V of different sizes; a view of V",
            vec![
                Case { k_size: 192, v_size: 128, out_size: 128, cells: 70, chunk_cells: 70, ..plain },
                Case {
                    k_size: 576,
                    v_size: 576,
                    out_size: 512,
                    kv_heads: 1,
                    group: 5,
                    tokens: 2,
                    cells: 40,
                    chunk_cells: 32,
                    ..plain
                },
            ],
        ),
    ];
    for (what, list) in more {
        check(shader, tally, &format!("{kernel}: {what}"), &list);
    }
    tally.check(&format!("{kernel}: what hidden cells hold does not matter"), || hidden(shader));
    tally.check(&format!("{kernel}: a bit that is flipped in the cache shows"), || canary(shader));
    seeded_mistakes(&shader.library, tally, kernel, || {
        // 128 values are two slabs of prefill's.
        let delta = Case { k: "delta4", chunk_cells: 128, ..plain };
        for case in [sized(plain, 128), chunked, Case { k: "turbo4", v: "turbo4", ..plain }, delta] {
            Problem::new(case)?.compare(shader)?;
        }
        Ok(())
    })?;
    if setup.soak {
        let long = sized(Case { cells: 4096, chunk_cells: 512, group: 8, kv_heads: 1, ..plain }, 128);
        check(shader, tally, &format!("{kernel}: 4096 cells"), &[long]);
    }
    Ok(())
}

fn check(shader: &Shader, tally: &mut Tally, what: &str, list: &[Case]) {
    let mut worst = 0.0f64;
    cases(tally, &format!("{what}, in 3 orders"), 3 * list.len() as u64, || {
        for case in list {
            let problem = Problem::new(*case)?;
            worst = worst.max(problem.compare(shader).with_context(|| format!("{case:?}"))?);
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
    fn new(name: &str, size: usize, side: Side, case: &Case, noise: &mut Noise) -> Result<Cache> {
        let (row_bytes, rows) = (row_bytes(name, size)?, case.streams * case.cells * case.kv_heads);
        let mut cache = Cache {
            row_bytes,
            heads: case.kv_heads,
            cells: case.cells,
            size,
            bytes: vec![0; rows * row_bytes],
            values: noise.row(rows * size),
        };
        for stream in 0..case.streams {
            for head in 0..case.kv_heads {
                let mut x = Vec::new();
                for cell in 0..case.cells {
                    x.extend_from_slice(cache.value(cell, head, stream));
                }
                if is_grouped(name) {
                    // Keys like each other, so that rows are chained; here and there one that is not.
                    let first = x[..size].to_vec();
                    for (cell, x) in x.chunks_exact_mut(size).enumerate() {
                        let like = if cell % 37 == 20 { 0.0 } else { 1.0 };
                        x.iter_mut().zip(&first).for_each(|(x, f)| *x = 0.3 * *x + like * f);
                    }
                }
                let at = cache.row(0, head, stream) * row_bytes;
                store_cells(name, size, &mut x, side, &mut cache.bytes[at..], row_bytes * case.kv_heads)?;
                for (cell, x) in x.chunks_exact(size).enumerate() {
                    let at = cache.row(cell, head, stream) * size;
                    cache.values[at..at + size].copy_from_slice(x);
                }
            }
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
        let k = Cache::new(case.k, case.k_size, Side::Key, &case, noise)?;
        let v = Cache::new(case.v, case.v_size, Side::Value, &case, noise)?;
        let mut q = noise.row(case.streams * heads * case.tokens * case.k_size);
        if case.q == "f16" {
            q.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
        }
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
        self.case.group.min(MOST_ROWS).min(MOST_VALUES / self.case.widest())
    }

    fn args(&self) -> Args {
        let c = &self.case;
        let heads = self.heads();
        let slope_heads = 1u32 << heads.ilog2();
        let (q_row, dst_row) = (if c.q == "f16" { 2 } else { 4 } * c.k_size, 4 * c.out_size);
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
            k_cells: c.cells as u32,
            scale: self.scale(),
            softcap: c.softcap,
            slope_low: (-c.max_bias / slope_heads as f32).exp2(),
            slope_high: (-c.max_bias / 2.0 / slope_heads as f32).exp2(),
            first_chunk: 0,
            main_chunks: c.cells.div_ceil(c.chunk_cells) as u32,
            sum_width: c.widths().1 as u32,
            hidden_words: 0,
            padding: 0,
            q_nb: [q_row, q_row * c.tokens, q_row * c.tokens * heads].map(|n| n as u64),
            k_nb: self.k.nb(),
            v_nb: self.v.nb(),
            mask_nb: [2 * c.cells, 2 * c.cells * c.tokens, 0].map(|n| n as u64),
            dst_nb: [dst_row, dst_row * heads, dst_row * heads * c.tokens].map(|n| n as u64),
        }
    }

    /// The constants that both ways have.
    fn constants(&self) -> Result<Vec<(i64, f64)>> {
        let c = &self.case;
        let flag = |on: bool| if on { 1.0 } else { 0.0 };
        Ok(vec![
            (10, kind(c.k)?.into()),
            (11, kind(c.v)?.into()),
            (12, c.k_size as f64),
            (13, c.v_size as f64),
            (14, flag(c.masked)),
            (15, flag(c.softcap != 0.0)),
            (16, flag(c.sinks)),
            (17, flag(c.max_bias != 0.0)),
            (20, kind(c.q)?.into()),
            (21, 0.0),
        ])
    }

    /// The queries as the kernel finds them.
    fn queries(&self) -> Vec<u8> {
        match self.case.q {
            "f16" => self.q.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            _ => bytes(&self.q).to_vec(),
        }
    }

    /// [stream][token][head][value]
    fn run(&self, shader: &Shader, order: Order) -> Result<Vec<f32>> {
        let c = &self.case;
        let mut dst = vec![f32::NAN; c.streams * c.tokens * self.heads() * c.out_size];
        match shader.way {
            Way::Decode => self.decode(&shader.library, order, &mut dst)?,
            Way::Prefill => self.prefill(&shader.library, order, &mut dst)?,
        }
        Ok(dst)
    }

    fn decode(&self, library: &Library, order: Order, dst: &mut [f32]) -> Result<()> {
        let c = &self.case;
        let (args, rows, queries) = (self.args(), self.rows(), self.queries());
        let (k_width, v_width) = c.widths();
        let whole = args.chunks == 1;
        let mut constants = self.constants()?;
        constants.extend([(18, rows as f64), (19, if whole { 1.0 } else { 0.0 })]);
        let results = c.streams * c.tokens * self.heads();
        let mut partials = vec![f32::NAN; if whole { 0 } else { results * args.chunks as usize * (v_width + 2) }];
        let simdgroups = SIMDGROUPS as usize;
        let floats = LEVELS + (rows * k_width + simdgroups * 32 * rows).max(simdgroups / 2 * rows * (v_width + 2));
        let blocks = c.group.div_ceil(rows);
        let args_buffer = [args];
        library.launch(Launch {
            kernel: "kv_attn_decode",
            grid: [args.chunks, (c.kv_heads * blocks) as u32, (c.tokens * c.streams) as u32],
            group: [32 * SIMDGROUPS, 1, 1],
            buffers: vec![
                Argument::Read(bytes(&args_buffer)),
                Argument::Read(&queries),
                Argument::Read(&self.k.bytes),
                Argument::Read(&self.v.bytes),
                Argument::Read(bytes(&self.mask)),
                Argument::Read(bytes(&self.sinks)),
                Argument::Write(bytes_mut(dst)),
                Argument::Write(bytes_mut(&mut partials)),
                Argument::Read(&[]),
            ],
            threadgroup: &[4 * floats],
            constants: &constants,
            order,
            strict: true,
        })?;
        if whole {
            return Ok(());
        }
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
                Argument::Write(bytes_mut(dst)),
                Argument::Read(bytes(&partials)),
            ],
            threadgroup: &[4 * v_width],
            constants: &constants,
            order,
            strict: true,
        })?;
        Ok(())
    }

    fn prefill(&self, library: &Library, order: Order, dst: &mut [f32]) -> Result<()> {
        let c = &self.case;
        let ((k_width, v_width), queries) = (c.widths(), self.queries());
        let blocks = if c.widest() <= 256 { 2 } else { 1 };
        let rows = 8 * blocks;
        let (cells, slab) = (32, 64);
        let mut constants = self.constants()?;
        constants.extend([(18, blocks as f64), (19, 1.0)]);
        let tiles = (cells * slab + rows * k_width).max(rows * v_width);
        let floats = LEVELS + 2 * rows + 5 * cells + 64 * blocks + rows * cells + tiles;
        library.launch(Launch {
            kernel: "kv_attn_prefill",
            grid: [(c.tokens * c.group).div_ceil(rows), c.kv_heads, c.streams].map(|n| n as u32),
            group: [32 * SIMDGROUPS, 1, 1],
            buffers: vec![
                Argument::Read(bytes(&[self.args()])),
                Argument::Read(&queries),
                Argument::Read(&self.k.bytes),
                Argument::Read(&self.v.bytes),
                Argument::Read(bytes(&self.mask)),
                Argument::Read(bytes(&self.sinks)),
                Argument::Write(bytes_mut(dst)),
                Argument::Read(&[]),
                Argument::Read(&[]),
            ],
            threadgroup: &[4 * floats],
            constants: &constants,
            order,
            strict: true,
        })?;
        Ok(())
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
    fn compare(&self, shader: &Shader) -> Result<f64> {
        let got = self.run(shader, Order::Forward)?;
        for order in [Order::Reverse, Order::Random(1)] {
            ensure!(bytes(&got) == bytes(&self.run(shader, order)?), "the result depends on the order of lanes");
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

fn hidden(shader: &Shader) -> Result<()> {
    for (k, v) in [("srft4", "srft4"), ("f16", "f16")] {
        let mut p = Problem::new(sized(Case { k, v, chunk_cells: 64, ..PLAIN }, 64))?;
        let before = p.run(shader, Order::Forward)?;
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
        ensure!(bytes(&before) == bytes(&p.run(shader, Order::Forward)?), "{k}/{v}: hidden cells were seen");
    }
    Ok(())
}

fn canary(shader: &Shader) -> Result<()> {
    for side in ["K", "V"] {
        let mut p = Problem::new(PLAIN)?;
        let before = p.run(shader, Order::Forward)?;
        let cache = if side == "K" { &mut p.k } else { &mut p.v };
        // Cell 0 of head 1 is seen by heads 3, 4 and 5.
        let at = cache.row(0, 1, 0) * cache.row_bytes;
        cache.bytes[at + cache.row_bytes - 1] ^= 0x80;
        let after = p.run(shader, Order::Forward)?;
        let of = |head: usize| head * p.case.out_size..(head + 1) * p.case.out_size;
        for head in 0..6 {
            let same = before[of(head)] == after[of(head)];
            ensure!(same == (head < 3), "{side}: head {head} {}", if same { "did not notice" } else { "changed" });
        }
    }
    Ok(())
}
