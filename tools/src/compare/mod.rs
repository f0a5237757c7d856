//! `cargo kv compare`: K/V pairs side by side, through llama.cpp's own tools and in one run.

mod perplexity;
mod report;
mod speed;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use crate::progress::Bar;
use crate::types::{self, Side};
use crate::{build_tree, cache, model};

pub use perplexity::{CacheSize, Perplexity, Statistics};
pub use report::Row;

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Plain text to predict (default: Hamlet, fetched)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Pairs K/V,K/V,… (T alone is T/T), types or specs by layer; f16, q8_0 and q4_0 are always measured
    #[arg(long, value_name = "K/V,…")]
    pub types: Vec<String>,
    /// Tokens a chunk of text
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    pub ctx: u32,
    /// Chunks of text
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: u32,
    /// Tokens already in the cache when speed is measured
    #[arg(long, default_value_t = 2048, value_name = "N")]
    pub depth: u32,
    /// Rounds over all pairs when speed is measured; the median round counts
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    /// Leave out perplexity and KL divergence
    #[arg(long)]
    pub no_quality: bool,
    /// Leave out speed
    #[arg(long)]
    pub no_speed: bool,
    /// Write JSON there (- is stdout, instead of the table)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

/// A cache type for K and one for V.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub k: String,
    pub v: String,
}

impl Pair {
    pub fn parse(text: &str) -> Result<Pair> {
        let (k, v) = text.split_once('/').unwrap_or((text, text));
        let (k, v) = (k.trim(), v.trim());
        types::check(k, Side::K)?;
        types::check(v, Side::V)?;
        Ok(Pair { k: k.into(), v: v.into() })
    }

    pub fn name(&self) -> String {
        if self.k == self.v {
            self.k.clone()
        } else {
            format!("{}/{}", self.k, self.v)
        }
    }
}

/// f16 first, because the others are compared with it; then upstream's; then what was asked for, once each.
fn pairs(asked: &[String]) -> Result<Vec<Pair>> {
    let mut names: Vec<String> = ["f16", "q8_0", "q4_0"].map(String::from).to_vec();
    if asked.is_empty() {
        // A type for keys alone stands beside f16.
        let beside = |f: &types::Family| if f.v { f.name.to_string() } else { format!("{}/f16", f.name) };
        names.extend(types::families().iter().filter(|f| f.k).map(beside));
        names.push("q8_0/srft4".into());
    }
    names.extend(asked.iter().flat_map(|list| types::split(list)).filter(|name| !name.trim().is_empty()));
    let mut pairs: Vec<Pair> = Vec::new();
    for name in &names {
        let pair = Pair::parse(name)?;
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    Ok(pairs)
}

/// What all runs share.
pub struct Setup {
    pub bin: PathBuf,
    pub model: PathBuf,
    pub text: PathBuf,
    pub ctx: u32,
    pub chunks: u32,
    pub depth: u32,
    pub threads: u32,
}

pub fn compare(options: &Options) -> Result<()> {
    let pairs = pairs(&options.types)?;
    if options.no_quality && options.no_speed {
        bail!("--no-quality and --no-speed together leave nothing to measure: drop one");
    }
    let setup = prepare(options)?;
    let (quality, speed) = (!options.no_quality, !options.no_speed);
    let n = pairs.len() as u64;
    let bar =
        Bar::new(if quality { n + 1 } else { 0 } + if speed { n * u64::from(options.rounds) } else { 0 }, "comparing");
    let mut rows: Vec<Row> = pairs.iter().map(|pair| Row::new(pair.clone())).collect();
    let mut step = 0;
    if quality {
        measure_quality(&setup, &mut rows, &bar, &mut step)?;
    }
    if speed {
        measure_speed(&setup, options.rounds, &mut rows, &bar, &mut step)?;
    }
    drop(bar);
    report::finish(&mut rows);
    write_out(options, &setup, &rows)
}

fn prepare(options: &Options) -> Result<Setup> {
    let file = |given: &Option<PathBuf>, what: &str, default: fn() -> Result<PathBuf>| match given {
        None => default(),
        Some(path) if path.is_file() => Ok(path.clone()),
        Some(path) => bail!("no {what} at {}", path.display()),
    };
    let model = file(&options.model, "model", model::default_model)?;
    let text = file(&options.text, "text", model::default_text)?;
    let bin = build_tree::build(&options.build, &["llama-perplexity".into(), "llama-bench".into()])?;
    let threads = options.threads.unwrap_or_else(cores);
    let Options { ctx, chunks, depth, .. } = *options;
    Ok(Setup { bin, model, text, ctx, chunks, depth, threads })
}

pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

fn measure_quality(setup: &Setup, rows: &mut [Row], bar: &Bar, step: &mut u64) -> Result<()> {
    // The logits can take gigabytes: they go away with the folder, whatever happens.
    let scratch = cache::Scratch::new()?;
    let run = Perplexity::new(setup, &scratch.path().join("logits"));
    bar.begin(*step, "f16 logits");
    run.write_base()?;
    *step += 1;
    for row in rows {
        bar.begin(*step, &format!("{} quality", row.pair.name()));
        // f16 too: what the file of logits itself loses is then seen, not assumed.
        let got = run.measure(&row.pair)?;
        row.quality = Some(got.statistics);
        row.size = got.size;
        *step += 1;
    }
    Ok(())
}

fn measure_speed(setup: &Setup, rounds: u32, rows: &mut [Row], bar: &Bar, step: &mut u64) -> Result<()> {
    for round in 1..=rounds {
        // Alternating, so that a machine that slows down slows every pair.
        for row in rows.iter_mut() {
            bar.begin(*step, &format!("{} speed, round {round} of {rounds}", row.pair.name()));
            let got = speed::measure(setup, &row.pair)?;
            row.pp.push(got.pp);
            row.tg.push(got.tg);
            row.size = row.size.or(got.size.map(|size| size.at(setup.ctx)));
            *step += 1;
        }
    }
    Ok(())
}

fn write_out(options: &Options, setup: &Setup, rows: &[Row]) -> Result<()> {
    let json = || serde_json::to_string_pretty(&report::as_json(rows, setup)).map(|text| text + "\n");
    match &options.json {
        Some(path) if path == Path::new("-") => print!("{}", json()?),
        Some(path) => {
            fs::write(path, json()?).with_context(|| format!("cannot write {}", path.display()))?;
            print!("{}", report::as_text(rows, setup));
        }
        None => print!("{}", report::as_text(rows, setup)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_begin_with_upstream_and_are_named_once() {
        let names = |asked: &[&str]| {
            let asked: Vec<String> = asked.iter().map(|s| s.to_string()).collect();
            pairs(&asked).unwrap().iter().map(Pair::name).collect::<Vec<_>>()
        };
        assert_eq!(
            names(&["srft4,q8_0/srft4", "q4_0", "srft4/srft4"]),
            ["f16", "q8_0", "q4_0", "srft4", "q8_0/srft4"]
        );
        assert_eq!(
            names(&["srft4,0-1=srft8/srft3,-1=f16,srft4"])[3..],
            ["srft4,0-1=srft8/srft3,-1=f16".to_string(), "srft4".into()]
        );
        let default = names(&[]);
        assert!(["srft8", "srft4", "polar3", "qjl1/f16", "q8_0/srft4"]
            .iter()
            .all(|n| default.contains(&n.to_string())));
        assert!(pairs(&["f16/nosuch".into()]).is_err());
    }
}
