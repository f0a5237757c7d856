//! `cargo kv bench --tokens`: what each thread of an attention has to do.
//!
//! The shares of the threads are computed one after another on one core, so that a machine with two cores shows what 64
//! threads would do: CPU time in all, which should grow with the tokens, and the longest share, for which all others wait.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use ggml_ext::attention::AttentionOp;
use ggml_ext::random::Noise;
use ggml_ext::tensor::{Tensor, View};
use ggml_ext::{ffi, Cache, KvType};
use half::f16;
use serde_json::json;

use super::plan;
use super::shape::Shape;
use super::Options;
use crate::cpu;
use crate::pair::Pair;
use crate::progress::Spinner;
use crate::table::Table;

/// Each share is taken at least so often, and again until all rounds have taken so long; the fastest counts.
const ROUNDS: usize = 5;
const LONG_ENOUGH: Duration = Duration::from_secs(1);
/// Cells where none are given.
const CELLS: usize = 8192;

/// What one attention costs.
struct Shares {
    shape: Shape,
    pair: Pair,
    cells: usize,
    tokens: usize,
    threads: usize,
    work_bytes: usize,
    /// CPU time of each thread.
    times: Vec<Duration>,
}

impl Shares {
    fn total_ms(&self) -> f64 {
        1e3 * self.times.iter().sum::<Duration>().as_secs_f64()
    }

    fn longest_ms(&self) -> f64 {
        1e3 * self.times.iter().max().map_or(0.0, Duration::as_secs_f64)
    }

    /// The longest share over the mean.
    fn imbalance(&self) -> f64 {
        self.longest_ms() * self.threads as f64 / self.total_ms()
    }
}

pub fn bench(options: &Options) -> Result<()> {
    let one = |list: &[usize], otherwise: usize| if list.is_empty() { vec![otherwise] } else { list.to_vec() };
    let (cells, threads) = (one(&options.cells, CELLS), one(&options.threads, cpu::cores() as usize));
    if [&cells, &threads, &options.tokens].iter().any(|list| list.contains(&0)) {
        bail!("cells, threads and tokens are counted from 1");
    }
    let types = if options.types.is_empty() { vec!["srft4".to_string()] } else { options.types.clone() };
    let pairs: Vec<Pair> = types.iter().map(|name| Pair::parse(name)).collect::<Result<_>>()?;
    let mut all = Vec::new();
    for shape in plan::shapes(options)? {
        for (pair, &cells) in pairs.iter().flat_map(|p| cells.iter().map(move |c| (p, c))) {
            let _spinner = Spinner::new(&format!("{}, {}, {cells} cells", shape.name(), pair.name()));
            let problem = Problem::new(shape, pair, cells)?;
            for &threads in &threads {
                for &tokens in &options.tokens {
                    all.push(problem.shares(tokens, threads)?);
                }
            }
        }
    }
    let json = serde_json::to_string_pretty(&all.iter().map(as_json).collect::<Vec<_>>())?;
    match &options.json {
        Some(path) if path.as_os_str() == "-" => println!("{json}"),
        Some(path) => {
            fs::write(path, json + "\n").with_context(|| format!("cannot write {}", path.display()))?;
            print!("{}", as_text(&all));
        }
        None => print!("{}", as_text(&all)),
    }
    Ok(())
}

fn as_json(s: &Shares) -> serde_json::Value {
    json!({
        "kind": "shares", "shape": s.shape.name(), "k": s.pair.k, "v": s.pair.v, "cells": s.cells, "threads": s.threads,
        "tokens": s.tokens, "work_bytes": s.work_bytes, "total_ms": s.total_ms(), "longest_ms": s.longest_ms(),
        "imbalance": s.imbalance(),
    })
}

fn as_text(all: &[Shares]) -> String {
    let header =
        ["shape", "K/V", "cells", "threads", "tokens", "work MiB", "CPU ms", "longest ms", "longest/mean", "note"];
    let mut table = Table::new(&header, 2);
    let mut most: Option<&Shares> = None;
    for s in all {
        let same = |o: &&Shares| (&o.pair, o.shape, o.cells, o.threads) == (&s.pair, s.shape, s.cells, s.threads);
        most = most.filter(same);
        let drop = most.filter(|m| m.tokens < s.tokens).map_or(0.0, |m| 1.0 - s.total_ms() / m.total_ms());
        let note =
            if drop > 0.2 { format!("{:.0}% less CPU time than with fewer tokens", 100.0 * drop) } else { "".into() };
        table.row(vec![
            s.shape.name(),
            s.pair.name(),
            s.cells.to_string(),
            s.threads.to_string(),
            s.tokens.to_string(),
            format!("{:.1}", s.work_bytes as f64 / (1 << 20) as f64),
            format!("{:.3}", s.total_ms()),
            format!("{:.3}", s.longest_ms()),
            format!("{:.2}", s.imbalance()),
            note,
        ]);
        if most.is_none_or(|m| s.total_ms() > m.total_ms()) {
            most = Some(s);
        }
    }
    format!(
        "{table}CPU ms: of all threads together, each of which ran alone; one layer, the fastest of {ROUNDS} runs or more\n"
    )
}

/// A filled cache.
struct Problem {
    shape: Shape,
    pair: Pair,
    cells: usize,
    k: Cache,
    /// None: a view of K.
    v: Option<Cache>,
}

impl Problem {
    fn new(shape: Shape, pair: &Pair, cells: usize) -> Result<Problem> {
        if shape.view.is_some() && pair.k != pair.v {
            bail!("{}, {}: V is a view of K, so both are of one type", shape.name(), pair.name());
        }
        let cache = |name: &str, seed| -> Result<Cache> {
            let kind: KvType = name.parse()?;
            let mut cache = Cache::new(kind, shape.head_size, shape.kv_heads, cells)?;
            let cell = shape.kv_heads * shape.head_size;
            // A pattern of 64 cells again and again: what the rows hold does not change the time.
            let some = values(cell * cells.min(64), seed);
            for first in (0..cells).step_by(64) {
                cache.write(first, &some[..cell * (cells - first).min(64)])?;
            }
            Ok(cache)
        };
        let v = if shape.view.is_some() { None } else { Some(cache(&pair.v, 2)?) };
        Ok(Problem { shape, pair: pair.clone(), cells, k: cache(&pair.k, 1)?, v })
    }

    fn shares(&self, tokens: usize, threads: usize) -> Result<Shares> {
        let (shape, cells) = (self.shape, self.cells);
        let (d, heads) = (shape.head_size, shape.heads);
        let dv = shape.view.unwrap_or(d);
        let mut q = values(d * tokens * heads, 3);
        let mut out = vec![0.0f32; dv * heads * tokens];
        // Causal: the queries are those of the last cells.
        let seen = |t: usize| (cells + t + 1).saturating_sub(tokens);
        let mut mask: Vec<f16> = (0..tokens * cells)
            .map(|i| if i % cells < seen(i / cells).max(1) { f16::ZERO } else { f16::NEG_INFINITY })
            .collect();
        let mask = dense(1, 2, [cells, tokens, 1], mask.as_mut_ptr().cast());
        let k = rows(&self.k, cells);
        let op = AttentionOp {
            q: dense(0, 4, [d, tokens, heads], q.as_mut_ptr().cast()),
            v: self.v.as_ref().map_or(Tensor { ne: [dv as i64, k.ne[1], k.ne[2], k.ne[3]], ..k }, |v| rows(v, cells)),
            k,
            dst: dense(0, 4, [dv, heads, tokens], out.as_mut_ptr().cast()),
            mask: Some(&mask),
            sinks: None,
            recent: None,
            center: None,
            scale: 1.0 / (d as f32).sqrt(),
            max_bias: 0.0,
            logit_softcap: 0.0,
        };
        let nth = threads as i32;
        // SAFETY: a description of buffers that live until the end of this function.
        let work_bytes = unsafe { ffi::ggml_ext_attention_work_size(&op, nth) };
        if work_bytes == 0 {
            bail!("{}, {}: attention refuses it", shape.name(), self.pair.name());
        }
        let mut work = vec![0u8; work_bytes];
        let mut times = vec![Duration::MAX; threads];
        let begin = Instant::now();
        let mut rounds = 0;
        while rounds < ROUNDS || begin.elapsed() < LONG_ENOUGH {
            rounds += 1;
            let mut round = vec![Duration::ZERO; threads];
            for step in [ffi::ggml_ext_attention_compute, ffi::ggml_ext_attention_finish] {
                // Another one begins each round: the first finds code and memory cold after the step before, which on a
                // core for each thread would be so for all of them.
                for ith in (0..threads).map(|i| (i + rounds) % threads) {
                    let start = cpu_time()?;
                    // SAFETY: as above, with the memory that was asked for; one thread after another.
                    let ok = unsafe { step(&op, ith as i32, nth, work.as_mut_ptr(), work_bytes) };
                    round[ith] += cpu_time()? - start;
                    if !ok {
                        bail!("attention failed");
                    }
                }
            }
            times.iter_mut().zip(round).for_each(|(t, now)| *t = now.min(*t));
        }
        Ok(Shares { shape, pair: self.pair.clone(), cells, tokens, threads, work_bytes, times })
    }
}

/// Contiguous.
fn dense(kind: i32, width: usize, ne: [usize; 3], data: *mut u8) -> Tensor {
    let nb = [width, width * ne[0], width * ne[0] * ne[1], width * ne[0] * ne[1] * ne[2]];
    Tensor { kind, ne: [ne[0] as i64, ne[1] as i64, ne[2] as i64, 1], nb, data, to_float: None, view: View::default() }
}

/// Heads lie side by side in a cell.
fn rows(cache: &Cache, cells: usize) -> Tensor {
    let cell = cache.as_bytes().len() / cache.cells();
    let row = cell / cache.heads();
    let unit = if cache.kind().is_ours() { row } else { row / cache.head_size() };
    Tensor {
        kind: cache.kind().id(),
        ne: [cache.head_size() as i64, cells as i64, cache.heads() as i64, 1],
        nb: [unit, cell, row, cell * cells],
        data: cache.as_bytes().as_ptr().cast_mut(),
        to_float: None,
        view: View {
            row_bytes: cell,
            rows: cache.cells() as i64,
            data: cache.as_bytes().as_ptr().cast_mut(),
            bytes: cache.as_bytes().len(),
            ..View::default()
        },
    }
}

/// The same in every run.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut noise = Noise::new(seed);
    let mut uniform = || noise.uniform() - 0.5;
    (0..n).map(|_| 3.4 * uniform()).collect()
}

/// Of this thread alone, whatever else the machine does.
#[cfg(unix)]
fn cpu_time() -> Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it fills the struct.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(not(unix))]
fn cpu_time() -> Result<Duration> {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    Ok(START.get_or_init(std::time::Instant::now).elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(shape: &str, pair: &str) -> Shares {
        let problem = Problem::new(Shape::parse(shape).unwrap()[0], &Pair::parse(pair).unwrap(), 130).unwrap();
        problem.shares(5, 7).unwrap()
    }

    #[test]
    fn every_share_is_timed() {
        for (shape, pair) in [("d64:4/2", "delta4/srft4"), ("d64:4/2", "f16/srft4"), ("d576/512:3/1", "srft4")] {
            let s = shares(shape, pair);
            assert_eq!(s.times.len(), 7);
            assert!(s.total_ms() > 0.0 && s.imbalance() >= 1.0 && s.work_bytes > 0, "{shape}");
        }
    }

    #[test]
    fn a_cliff_is_named() {
        let with =
            |tokens, ms| Shares { tokens, times: vec![Duration::from_millis(ms); 7], ..shares("d64:4/2", "srft4") };
        let text = as_text(&[with(1, 10), with(2, 30), with(3, 20), with(4, 25)]);
        let noted: Vec<bool> = text.lines().map(|l| l.contains("less CPU time")).collect();
        assert_eq!(noted, [false, false, false, true, false, false], "{text}");
        assert!(text.contains("33% less"), "{text}");
    }
}
