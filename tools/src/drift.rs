//! `cargo kv drift`: divergence from f16 along a text, by position, and over context shifts.
//!
//! llama-perplexity prints means over whole chunks. Here a text is one sequence, and each thousand of its tokens has a row: errors
//! that grow with the length of a context, or with each shift of it, are seen as such.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

use crate::pair::pairs;
use crate::plot::{self, curves};
use crate::progress::{self, Bar};
use crate::table::Table;
use crate::{build_tree, cpu, digest, model, process};

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Plain text (default: Hamlet, fetched)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Pairs K/V,K/V,… (T alone is T/T)
    #[arg(long, value_name = "K/V,…", default_value = "srft4,delta4/srft4,q4_0")]
    pub types: String,
    /// Tokens of the text
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(128..))]
    pub tokens: u32,
    /// Cells of the cache (default: as many as tokens); where they are full, the context shifts
    #[arg(long, value_name = "N")]
    pub ctx: Option<u32>,
    /// Tokens at the beginning that a shift keeps
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub keep: u32,
    /// Tokens that are computed at once
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(4..))]
    pub batch: u32,
    /// Layers of the model on a GPU
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub gpu_layers: u32,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    /// Write JSON there
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Measure nothing, and take the results that an earlier run wrote by --json
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "model", "text", "types", "tokens", "ctx", "batch"])]
    pub from: Option<PathBuf>,
    /// Draw the divergence by position there
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Write the table as Markdown there
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

const PROGRAM: &str = "kv-drift";

/// A pair in a thousand tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Bucket {
    pair: String,
    /// The first token.
    from: u64,
    tokens: u64,
    /// Shifts of the context before its last token.
    shifts: u32,
    kld: f64,
    kld_median: f64,
    /// Tokens whose most likely token is the same, in percent.
    same_top: f64,
}

#[derive(Serialize, Deserialize)]
struct Results {
    model: String,
    model_sha: String,
    text: String,
    build: String,
    ctx: u32,
    keep: u32,
    batch: u32,
    buckets: Vec<Bucket>,
}

pub fn drift(options: &Options) -> Result<()> {
    if let Some(path) = &options.plot {
        plot::check_name(path)?;
    }
    let results = match &options.from {
        Some(path) => read(path)?,
        None => measure(options)?,
    };
    write_out(options, &results)
}

fn read(path: &Path) -> Result<Results> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let results: Results = serde_json::from_str(&text)
        .with_context(|| format!("{} is not a result of cargo kv drift --json", path.display()))?;
    ensure!(!results.buckets.is_empty(), "{} has no results: measure again", path.display());
    Ok(results)
}

fn measure(options: &Options) -> Result<Results> {
    let pairs = pairs("none", std::slice::from_ref(&options.types))?;
    let model = model::model_or_default(options.model.as_deref())?;
    let text = model::text_or_default(options.text.as_deref())?;
    let bin = build_tree::build(&options.build, &[PROGRAM.into()])?;
    let ctx = options.ctx.unwrap_or(options.tokens);
    let mut c = Command::new(bin.join(PROGRAM));
    c.arg("-m").arg(&model).arg("-f").arg(&text);
    let threads = options.threads.unwrap_or_else(cpu::cores);
    let numbers = [options.tokens, ctx, options.keep, options.batch, threads, options.gpu_layers];
    for (name, number) in ["-n", "-c", "--keep", "-b", "-t", "-ngl"].iter().zip(numbers) {
        c.args([name, number.to_string().as_str()]);
    }
    // f16, the first, is what the others are beside.
    for pair in &pairs[1..] {
        c.args(["--pair", &format!("{}/{}", pair.k, pair.v)]);
    }
    let bar = Bar::new(u64::from(options.tokens), "decoding");
    let mut buckets = Vec::new();
    process::follow(&mut c, |line| match progress::step(line) {
        Some((n, total)) => bar.set(n, total, ""),
        None => buckets.extend(parse(line)),
    })?;
    drop(bar);
    ensure!(!buckets.is_empty(), "no result in the output of {}", process::shown(&c));
    for bucket in &mut buckets {
        let pair = pairs.iter().find(|pair| format!("{}/{}", pair.k, pair.v) == bucket.pair);
        // The program has f16 beside itself, in batches of a quarter.
        bucket.pair = pair.map_or_else(|| format!("f16, -ub {}", options.batch / 4), |pair| pair.name());
    }
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Results {
        model: name(&model),
        model_sha: digest::file(&model)?,
        text: name(&text),
        build: digest::programs(&bin, PROGRAM)?,
        ctx,
        keep: options.keep,
        batch: options.batch,
        buckets,
    })
}

fn write_out(options: &Options, results: &Results) -> Result<()> {
    let write =
        |path: &Path, text: String| fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    let note = format!(
        "model {}, {}, {} cells, batches of {}, keep {}: mean KLD beside f16 in the same batches and with the same shifts",
        results.model, results.text, results.ctx, results.batch, results.keep
    );
    print!("{}\n{note}\n", table(&results.buckets));
    if let Some(path) = &options.json {
        write(path, serde_json::to_string_pretty(results)? + "\n")?;
    }
    if let Some(path) = &options.markdown {
        write(path, format!("### {}\n\n{}\n- {note}\n", results.model, table(&results.buckets).markdown()))?;
    }
    if let Some(path) = &options.plot {
        let above = format!("KL divergence from f16, {}, {} cells", results.model, results.ctx);
        let frame = curves::Frame { above: &above, below: "tokens", scale: curves::Scale::Fitting };
        curves::write(path, &frame, &by_position(&results.buckets))?;
    }
    Ok(())
}

/// A curve for each pair, a point in the middle of each thousand.
fn by_position(buckets: &[Bucket]) -> Vec<curves::Curve> {
    let mut curves: Vec<curves::Curve> = Vec::new();
    for bucket in buckets {
        let point = (bucket.from as f64 + bucket.tokens as f64 / 2.0, bucket.kld);
        match curves.iter_mut().find(|c| c.name == bucket.pair) {
            Some(curve) => curve.points.push(point),
            None => curves.push(curves::Curve { name: bucket.pair.clone(), points: vec![point] }),
        }
    }
    curves
}

/// `bucket PAIR FROM TOKENS SHIFTS KLD MEDIAN SAME-TOP`, with tabs between.
fn parse(line: &str) -> Option<Bucket> {
    let fields: Vec<&str> = line.split('\t').collect();
    let ["bucket", pair, from, tokens, shifts, kld, median, same_top] = fields[..] else { return None };
    let tokens: u64 = tokens.parse().ok()?;
    Some(Bucket {
        pair: pair.into(),
        from: from.parse().ok()?,
        tokens,
        shifts: shifts.parse().ok()?,
        kld: kld.parse().ok()?,
        kld_median: median.parse().ok()?,
        same_top: 100.0 * same_top.parse::<f64>().ok()? / tokens as f64,
    })
}

/// A row for each thousand tokens, a column for each pair, and their means.
fn table(buckets: &[Bucket]) -> Table {
    let mut names: Vec<&str> = Vec::new();
    buckets.iter().for_each(|b| {
        if !names.contains(&b.pair.as_str()) {
            names.push(&b.pair);
        }
    });
    let header: Vec<&str> = ["tokens", "shifts"].into_iter().chain(names.iter().copied()).collect();
    let mut table = Table::new(&header, 1);
    let of = |name: &str| buckets.iter().filter(|b| b.pair == name).collect::<Vec<_>>();
    for (i, first) in of(names[0]).iter().enumerate() {
        let mut row = vec![format!("{}-{}", first.from, first.from + first.tokens - 1), first.shifts.to_string()];
        row.extend(names.iter().map(|name| of(name).get(i).map_or("-".into(), |b| format!("{:.5}", b.kld))));
        table.row(row);
    }
    let mean = |value: fn(&Bucket) -> f64, name: &str| {
        let sum: f64 = of(name).iter().map(|b| value(b) * b.tokens as f64).sum();
        sum / of(name).iter().map(|b| b.tokens as f64).sum::<f64>()
    };
    let shifts = of(names[0]).last().map_or(0, |b| b.shifts).to_string();
    let klds = names.iter().map(|name| format!("{:.5}", mean(|b| b.kld, name)));
    table.row(["all".to_string(), shifts].into_iter().chain(klds).collect());
    let tops = names.iter().map(|name| format!("{:.2}", mean(|b| b.same_top, name)));
    table.row(["same top %".to_string(), "-".into()].into_iter().chain(tops).collect());
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Captured: SmolLM2-135M, Hamlet, -n 1280 -c 512 -b 64.
    const OUTPUT: &str = "\
[1280/1280]
bucket\tnoise\t0\t1024\t3\t0.00376037\t0.00275167\t987
bucket\tnoise\t1024\t256\t4\t0.00341938\t0.0029913\t241
bucket\tsrft4/srft4\t0\t1024\t3\t0.00974467\t0.00687882\t952
bucket\tsrft4/srft4\t1024\t256\t4\t0.0116166\t0.00754693\t236
";

    #[test]
    fn a_row_for_each_thousand() {
        let buckets: Vec<Bucket> = OUTPUT.lines().filter_map(parse).collect();
        assert_eq!((buckets.len(), buckets[0].pair.as_str()), (4, "noise"));
        let text = table(&buckets).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["tokens", "shifts", "noise", "srft4/srft4"]);
        assert_eq!(lines[1], ["0-1023", "3", "0.00376", "0.00974"]);
        assert_eq!(lines[2], ["1024-1279", "4", "0.00342", "0.01162"]);
        // (0.00974467 * 1024 + 0.0116166 * 256) / 1280, (952 + 236) / 1280
        assert_eq!(lines[3], ["all", "4", "0.00369", "0.01012"]);
        assert_eq!(lines[4][3..], ["-", "95.94", "92.81"]);
        assert_eq!(parse("bucket\tsrft4\t1"), None);
        let curves = by_position(&buckets);
        assert_eq!((curves.len(), curves[1].name.as_str()), (2, "srft4/srft4"));
        assert_eq!(curves[1].points, [(512.0, 0.00974467), (1152.0, 0.0116166)]);
    }
}
