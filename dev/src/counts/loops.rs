//! The loops that are counted, through the C boundary, as llama.cpp comes to them.

use std::collections::BTreeMap;

use anyhow::{anyhow, bail, Context, Result};
use ggml_ext::attention::AttentionOp;
use ggml_ext::ffi;
use ggml_ext::random::Noise;
use ggml_ext::table::{self, Concrete, Entry};
use ggml_ext::tensor::{Tensor, View};

/// ggml's ids.
const F32: i32 = 0;
const F16: i32 = 1;

/// Instructions per unit, by name with the instruction set in front.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts(pub BTreeMap<String, f64>);

enum What {
    /// Rows written.
    Encode,
    /// One KV head with `group` query heads, `queries` of each.
    Attention { group: usize, queries: usize },
}

struct Loop {
    /// Families of K and V; the first is the one that is written.
    pair: [&'static str; 2],
    size: usize,
    what: What,
}

/// The function that callgrind collects in.
#[export_name = "kv_counted"]
#[inline(never)]
pub fn counted(work: &mut dyn FnMut()) {
    work()
}

const ALONE: [&str; 8] = ["srft8", "srft4", "srft3", "srft2", "delta4", "band4", "polar4", "turbo4"];
const PAIRS: [[&str; 2]; 12] = [
    ["srft8", "srft8"],
    ["srft4", "srft4"],
    ["srft3", "srft3"],
    ["srft2", "srft2"],
    ["delta4", "srft4"],
    ["delta3", "srft3"],
    ["band4", "srft4"],
    ["band3", "srft3"],
    ["band2", "srft2"],
    ["polar4", "polar4"],
    ["turbo4", "turbo4"],
    ["qjl1", "srft4"],
];

fn all() -> Vec<Loop> {
    let attention = |pair, size, group, queries| Loop { pair, size, what: What::Attention { group, queries } };
    let mut loops: Vec<Loop> = ALONE.map(|t| Loop { pair: [t, t], size: 128, what: What::Encode }).into();
    loops.extend(PAIRS.map(|pair| attention(pair, 64, 3, 1)));
    loops.extend(PAIRS.map(|pair| attention(pair, 128, 4, 1)));
    loops.extend([["srft4", "srft4"], ["delta4", "srft4"]].map(|pair| attention(pair, 64, 3, 48)));
    loops
}

fn chosen(only: &str) -> Vec<Loop> {
    all().into_iter().filter(|l| l.name().starts_with(only)).collect()
}

pub fn names(only: &str) -> Vec<String> {
    chosen(only).iter().map(Loop::name).collect()
}

impl Loop {
    fn name(&self) -> String {
        let Loop { pair: [k, v], size, what } = self;
        let pair = if k == v { k.to_string() } else { format!("{k}/{v}") };
        match what {
            What::Encode => format!("encode {k} d{size}, per row"),
            What::Attention { group, queries: 1 } => format!("decode {pair} d{size} x{group}, per cell"),
            What::Attention { group, queries } => {
                format!("prefill {pair} d{size} x{group}, {queries} queries, per cell and query row")
            }
        }
    }

    /// Rows or cells of the short and of the long run: whole blocks of 64 cells.
    fn lengths(&self) -> (usize, usize) {
        match self.what {
            What::Encode => (2, 10),
            What::Attention { queries: 1, .. } => (128, 384),
            What::Attention { .. } => (64, 128),
        }
    }

    fn per_unit(&self, short: u64, long: u64) -> f64 {
        let (from, to) = self.lengths();
        let rows = match self.what {
            What::Attention { group, queries } if queries > 1 => group * queries,
            _ => 1,
        };
        (long as f64 - short as f64) / ((to - from) * rows) as f64
    }

    fn concrete(&self, family: &str) -> Result<Concrete> {
        match table::by_name(family) {
            Some(Entry::Family(f)) => f.at(self.size).with_context(|| format!("{family} at {}", self.size)),
            _ => Err(anyhow!("no family {family}")),
        }
    }

    fn count(&self, length: usize, count: &mut impl FnMut(&mut dyn FnMut()) -> Result<u64>) -> Result<u64> {
        let [k, v] = [self.concrete(self.pair[0])?, self.concrete(self.pair[1])?];
        match self.what {
            What::Encode => {
                let x = values(length * self.size, 1);
                let mut rows = vec![0u8; length * k.row_bytes()];
                let mut ok = false;
                let n = count(&mut || ok = encode(k, &x, &mut rows));
                succeeded(ok)?;
                n
            }
            What::Attention { group, queries } => Attention::new([k, v], group, queries, length)?.count(count),
        }
    }
}

fn succeeded(ok: bool) -> Result<()> {
    if !ok {
        bail!("the library refused it, or failed");
    }
    Ok(())
}

fn encode(kind: Concrete, x: &[f32], rows: &mut [u8]) -> bool {
    // SAFETY: as many rows as x has values for.
    unsafe { ffi::ggml_ext_encode(kind.id(), x.as_ptr(), rows.as_mut_ptr(), x.len() as i64) }
}

/// Owns what the op points at.
struct Attention {
    rows: [Vec<u8>; 2],
    q: Vec<f32>,
    mask: Vec<u16>,
    out: Vec<f32>,
    kinds: [Concrete; 2],
    group: usize,
    queries: usize,
    cells: usize,
}

impl Attention {
    fn new(kinds: [Concrete; 2], group: usize, queries: usize, cells: usize) -> Result<Attention> {
        let size = kinds[0].head_size;
        let mut rows = kinds.map(|kind| vec![0u8; cells * kind.row_bytes()]);
        for ((kind, x), rows) in kinds.into_iter().zip([keys(cells, size), values(cells * size, 2)]).zip(&mut rows) {
            succeeded(encode(kind, &x, rows))?;
        }
        Ok(Attention {
            rows,
            q: values(size * queries * group, 3),
            // llama.cpp always gives one.
            mask: vec![0; cells * queries],
            out: vec![0.0; size * group * queries],
            kinds,
            group,
            queries,
            cells,
        })
    }

    fn count(mut self, count: &mut impl FnMut(&mut dyn FnMut()) -> Result<u64>) -> Result<u64> {
        let (size, group, queries, cells) = (self.kinds[0].head_size, self.group, self.queries, self.cells);
        let [k, v] = [0, 1].map(|side: usize| {
            let (kind, rows) = (self.kinds[side], self.rows[side].as_mut_ptr());
            tensor(kind.id(), kind.row_bytes(), [size, cells, 1, 1], rows)
        });
        let mask = tensor(F16, 2 * cells, [cells, queries, 1, 1], self.mask.as_mut_ptr().cast());
        let op = AttentionOp {
            q: tensor(F32, 4 * size, [size, queries, group, 1], self.q.as_mut_ptr().cast()),
            k,
            v,
            dst: tensor(F32, 4 * size, [size, group, queries, 1], self.out.as_mut_ptr().cast()),
            mask: Some(&mask),
            sinks: None,
            recent: None,
            center: None,
            scale: 1.0 / (size as f32).sqrt(),
            max_bias: 0.0,
            logit_softcap: 0.0,
        };
        // SAFETY: the op describes buffers that live in self.
        let bytes = unsafe { ffi::ggml_ext_attention_work_size(&op, 1) };
        let mut work = vec![0u8; bytes];
        let mut ok = false;
        let n = count(&mut || {
            // SAFETY: as above; the work buffer has the size that was asked for.
            ok = unsafe {
                ffi::ggml_ext_attention_compute(&op, 0, 1, work.as_mut_ptr(), bytes)
                    && ffi::ggml_ext_attention_finish(&op, 0, 1, work.as_mut_ptr(), bytes)
            }
        });
        succeeded(ok)?;
        n
    }
}

/// Contiguous, rows of `row_bytes`.
fn tensor(kind: i32, row_bytes: usize, ne: [usize; 4], data: *mut u8) -> Tensor {
    let value = match kind {
        F32 => 4,
        F16 => 2,
        _ => row_bytes,
    };
    let plane = row_bytes * ne[1];
    let nb = [value, row_bytes, plane, plane * ne[2]];
    Tensor { kind, ne: ne.map(|n| n as i64), nb, data, to_float: None, view: View::default() }
}

/// The same in every run.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut noise = Noise::new(seed);
    let mut uniform = || noise.uniform() - 0.5;
    // Four of them are near enough to a normal value.
    (0..n).map(|_| (0..4).map(|_| uniform()).sum::<f32>() * 1.7).collect()
}

/// Keys that follow each other as real ones do, about a mean: almost every row of delta and bands hangs on the one before.
fn keys(cells: usize, size: usize) -> Vec<f32> {
    let (mut keys, mean) = (values(cells * size, 1), values(size, 4));
    for i in size..keys.len() {
        keys[i] = 0.4 * keys[i] + 0.9 * keys[i - size];
    }
    for (x, mean) in keys.iter_mut().zip(mean.iter().cycle()) {
        *x += 3.0 * mean;
    }
    keys
}

/// Counts the chosen loops and prints `short long` of each, a line each.
pub fn run(only: &str, count: &mut impl FnMut(&mut dyn FnMut()) -> Result<u64>) -> Result<()> {
    for l in chosen(only) {
        let (short, long) = l.lengths();
        // Tables that are made at first use are not part of the loop.
        l.count(short, &mut |work| {
            work();
            Ok(0)
        })?;
        let (short, long) = (l.count(short, count)?, l.count(long, count)?);
        println!("{short} {long}");
    }
    Ok(())
}

impl Counts {
    /// From the short and the long run of each chosen loop.
    pub fn of(isa: &str, only: &str, pairs: impl Iterator<Item = (u64, u64)>) -> Counts {
        let loops = chosen(only);
        let per_unit =
            |(l, (short, long)): (&Loop, (u64, u64))| (format!("{isa} {}", l.name()), l.per_unit(short, long));
        Counts(loops.iter().zip(pairs).map(per_unit).collect())
    }

    /// From the lines that `run` printed.
    pub fn parse(isa: &str, only: &str, text: &str) -> Result<Counts> {
        let pair = |line: &str| {
            let (short, long) = line.split_once(' ')?;
            Some((short.parse().ok()?, long.parse().ok()?))
        };
        let pairs: Vec<(u64, u64)> = text.lines().filter_map(pair).collect();
        if pairs.len() != names(only).len() {
            bail!("{} loops, but these counts:\n{text}", names(only).len());
        }
        Ok(Counts::of(isa, only, pairs.into_iter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_can_be_chosen() {
        let mut all = names("");
        assert_eq!(names("decode srft4 d128 x4"), ["decode srft4 d128 x4, per cell"]);
        all.sort();
        all.dedup();
        assert_eq!(all.len(), ALONE.len() + 2 * PAIRS.len() + 2);
    }

    #[test]
    fn every_loop_runs() {
        let mut calls = 0;
        run("", &mut |work| {
            work();
            calls += 1;
            Ok(calls)
        })
        .unwrap();
        assert_eq!(calls, 2 * names("").len() as u64);
    }

    #[test]
    fn lines_become_counts_per_unit() {
        let counts = Counts::parse("avx2", "encode srft4", "1000 9000\n").unwrap();
        assert_eq!(counts.0["avx2 encode srft4 d128, per row"], 1000.0);
        let counts = Counts::parse("avx2", "prefill srft4", "0 9216\n").unwrap();
        assert_eq!(counts.0.values().next(), Some(&1.0));
        assert!(Counts::parse("avx2", "encode srft4", "nothing\n").is_err());
    }
}
