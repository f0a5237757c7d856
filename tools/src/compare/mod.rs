//! `cargo kv compare`: K/V pairs side by side, through llama.cpp's own tools and in one run.

mod known;
mod perplexity;
mod report;
mod size;
mod speed;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use crate::bench::bandwidth;
use crate::pair::pairs;
use crate::progress::Bar;
use crate::{build_tree, cache, cpu, model, plot};

use known::{Known, Source};
pub use perplexity::{Perplexity, Statistics};
pub use report::{Measured, Row};
pub use size::CacheSize;

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model, repeatable (default: SmolLM2-135M-Instruct, fetched)
    #[arg(long, value_name = "FILE")]
    pub model: Vec<PathBuf>,
    /// Plain text to predict (default: Hamlet, fetched)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Pairs K/V,K/V,… (T alone is T/T), types or specs by layer; f16 is always measured
    #[arg(long, value_name = "K/V,…")]
    pub types: Vec<String>,
    /// Upstream's pairs to measure as well; none: f16 only
    #[arg(long, value_name = "K/V,…", default_value = "q8_0,q4_0")]
    pub beside: String,
    /// Tokens per chunk of text
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    pub ctx: u32,
    /// Chunks of text
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: u32,
    /// Tokens already in the cache when speed is measured
    #[arg(long, default_value_t = 2048, value_name = "N")]
    pub depth: u32,
    /// Rounds over all pairs when speed is measured; the fastest repetition counts
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
    /// Write JSON there (- is stdout, instead of the tables)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Reuse the quality results of the same build that the file of --json has, measure the rest, and keep everything
    /// else in the file
    #[arg(long, requires = "json")]
    pub resume: bool,
    /// Write the tables as Markdown there
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Draw KL divergence and decode speed against bits/value there
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

/// What all runs of one model share.
#[derive(Clone)]
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
    let pairs = pairs(&options.beside, &options.types)?;
    if options.no_quality && options.no_speed {
        bail!("--no-quality and --no-speed together leave nothing to measure: drop one");
    }
    if let Some(path) = &options.plot {
        plot::check_name(path)?;
    }
    let known = match &options.json {
        Some(path) if options.resume => Known::read(path)?,
        _ => Known::default(),
    };
    let setups = prepare(options)?;
    let (quality, speed) = (!options.no_quality, !options.no_speed);
    let n = pairs.len() as u64;
    // f16's logits are a step of their own, and so are f16 in small batches and the decoding without a cache in each round
    let steps = if quality { n + 2 } else { 0 } + if speed { (n + 1) * u64::from(options.rounds) } else { 0 };
    let bar = Bar::new(steps * setups.len() as u64, "comparing");
    let bandwidth = speed.then(|| bandwidth::measure(&[setups[0].threads as usize], 5)[0]);
    let mut step = 0;
    let mut all = Vec::new();
    for setup in setups {
        let mut measured = Measured::new(setup, &pairs, bandwidth);
        if quality {
            measured.add_noise();
        }
        all.push(begin(options, measured, &known)?);
        if quality {
            measure_quality(options, &mut all, &known, &bar, &mut step)?;
        }
        if speed {
            let measured = all.last_mut().context("was pushed")?;
            measure_speed(measured, options.rounds, &bar, &mut step)?;
            measured.finish();
        }
    }
    drop(bar);
    write_out(options, &all, &known)
}

/// One setup a model.
fn prepare(options: &Options) -> Result<Vec<Setup>> {
    let models = match options.model.as_slice() {
        [] => vec![model::default_model()?],
        given => given.iter().map(|path| model::model_or_default(Some(path))).collect::<Result<_>>()?,
    };
    let text = model::text_or_default(options.text.as_deref())?;
    let bin = build_tree::build(&options.build, &["llama-perplexity".into(), "llama-bench".into()])?;
    let threads = options.threads.unwrap_or_else(cpu::cores);
    let Options { ctx, chunks, depth, .. } = *options;
    let setup = |model| Setup { bin: bin.clone(), model, text: text.clone(), ctx, chunks, depth, threads };
    Ok(models.into_iter().map(setup).collect())
}

/// What is known first, whatever is measured: it is shown beside the rest.
fn begin(options: &Options, mut measured: Measured, known: &Known) -> Result<Measured> {
    if options.json.is_some() {
        measured.source = Source::of(&measured.setup)?;
        known.take_over(&mut measured);
        measured.finish();
    }
    Ok(measured)
}

/// The quality of the last model's pairs. What is found is written at once: the next pair may take an hour, and the
/// machine may not last as long.
fn measure_quality(options: &Options, all: &mut [Measured], known: &Known, bar: &Bar, step: &mut u64) -> Result<()> {
    let Some(last) = all.len().checked_sub(1) else { return Ok(()) };
    // The logits can take gigabytes: they go away with the folder, whatever happens.
    let scratch = cache::Scratch::new()?;
    let (setup, name) = (all[last].setup.clone(), all[last].name());
    let run = Perplexity::new(&setup, &scratch.path().join("logits"));
    if all[last].rows.iter().any(|row| row.quality.is_none()) {
        bar.begin(*step, &format!("{name} f16 logits"));
        run.write_base()?;
    }
    *step += 1;
    for i in 0..all[last].rows.len() {
        // f16 too: what the file of logits itself loses is then seen, not assumed.
        if all[last].rows[i].quality.is_none() {
            let row = &mut all[last].rows[i];
            bar.begin(*step, &format!("{name} {} quality", row.name()));
            let got = if row.small_batch { run.measure_noise() } else { run.measure(&row.pair) }?;
            // llama.cpp rounds a context up to 256 cells.
            (row.quality, row.size) = (Some(got.statistics), got.size.map(|size| size.at(setup.ctx)));
        }
        all[last].finish();
        if let Some(path) = options.json.as_deref().filter(|path| *path != Path::new("-")) {
            write_json(path, all, known)?;
        }
        *step += 1;
    }
    Ok(())
}

/// All at once, so that a file is never half written.
fn write_json(path: &Path, all: &[Measured], known: &Known) -> Result<()> {
    let part = path.with_extension("json.part");
    let text = serde_json::to_string_pretty(&known.joined(report::as_records(all)))? + "\n";
    let written = fs::write(&part, text).and_then(|()| fs::rename(&part, path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn measure_speed(measured: &mut Measured, rounds: u32, bar: &Bar, step: &mut u64) -> Result<()> {
    let name = measured.name();
    for round in 1..=rounds {
        bar.begin(*step, &format!("{name} without a cache, round {round} of {rounds}"));
        measured.tg_empty.extend(speed::measure_empty(&measured.setup)?);
        *step += 1;
        // Alternating, so that a machine that slows down slows every pair.
        for row in measured.rows.iter_mut().filter(|row| !row.small_batch) {
            bar.begin(*step, &format!("{name} {} speed, round {round} of {rounds}", row.pair.name()));
            let got = speed::measure(&measured.setup, &row.pair)?;
            row.pp.extend(got.pp);
            row.tg.extend(got.tg);
            row.size = row.size.or(got.size.map(|size| size.at(measured.setup.ctx)));
            *step += 1;
        }
    }
    Ok(())
}

fn write_out(options: &Options, all: &[Measured], known: &Known) -> Result<()> {
    let write =
        |path: &Path, text: String| fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    let to_stdout = options.json.as_deref() == Some(Path::new("-"));
    if let Some(path) = &options.json {
        if to_stdout {
            println!("{}", serde_json::to_string_pretty(&report::as_records(all))?);
        } else {
            write_json(path, all, known)?;
        }
    }
    if !to_stdout {
        print!("{}", report::as_text(all));
    }
    if let Some(path) = &options.markdown {
        write(path, report::as_markdown(all))?;
    }
    if let Some(path) = &options.plot {
        plot::write(path, &report::as_series(all))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn what_is_known_is_shown_without_measuring_quality() {
        let dir = cache::Scratch::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["llama-perplexity", "m.gguf", "t.txt"] {
            fs::write(at(name), name).unwrap();
        }
        let mut old = report::tests::measured();
        old.setup = Setup { bin: dir.path().into(), model: at("m.gguf"), text: at("t.txt"), ..old.setup };
        old.source = Source::of(&old.setup).unwrap();
        let pairs: Vec<_> = old.rows.iter().map(|row| row.pair.clone()).collect();
        write_json(&at("r.json"), std::slice::from_ref(&old), &Known::default()).unwrap();

        let json = at("r.json");
        let options =
            Cli::parse_from(["compare", "--json", json.to_str().unwrap(), "--resume", "--no-quality"]).options;
        let known = Known::read(&json).unwrap();
        let new = begin(&options, Measured::new(old.setup.clone(), &pairs, None), &known).unwrap();
        assert!(report::as_text(std::slice::from_ref(&new)).contains("12345.6789"));
        // And the file has lost nothing.
        let before = fs::read_to_string(&json).unwrap();
        write_json(&json, &[new], &known).unwrap();
        assert_eq!(fs::read_to_string(&json).unwrap(), before);
    }
}
