//! `cargo kv bench`: attention and encode alone, ours beside upstream's.
//!
//! The ops run inside ggml, in a library that is built with llama.cpp (tests/bench). Which instruction set our kernels
//! use is settled once a process, so each one is measured in a child of its own, and upstream's types with it: a ratio
//! is always between two numbers of the same process. With `--metal` the ops are those of the GPU, ours and upstream's;
//! `--cuda` has a program of its own.

pub mod bandwidth;
mod busy;
mod cuda;
mod library;
mod measure;
pub mod pinned;
mod plan;
mod report;
mod shape;
mod shares;
mod worker;

use std::fs;
use std::path::PathBuf;

use anyhow::{bail, Context, Result};

use crate::build_tree;
use crate::progress::Spinner;
use library::Library;
use plan::Plan;

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// Shapes, as d128 (all of that head size) or d128:32/8 (default: d64 9/3, d128 12/2, d128 32/8, d256 4/1, d512 16/2)
    #[arg(long, value_name = "SHAPE,…", value_delimiter = ',')]
    pub shapes: Vec<String>,
    /// Cells in the cache (default: 1024,8192,32768,131072)
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub cells: Vec<usize>,
    /// Pairs K/V,… (T alone is T/T; default: all of ours); f16, q8_0 and q4_0 are always measured
    #[arg(long, value_name = "K/V,…", value_delimiter = ',')]
    pub types: Vec<String>,
    /// Instruction sets of ours: avx512, avx2, scalar, …; `all` is every one of this CPU but scalar (default: the best)
    #[arg(long, value_name = "ISA,…", value_delimiter = ',')]
    pub isa: Vec<String>,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Queries at once: 1 is decoding, hundreds are a prompt
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1")]
    pub queries: Vec<usize>,
    /// The threads' shares of ours alone, run one after another on one core, for batches of so many tokens: their CPU
    /// time in all and the longest of them, with any number of --threads
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with_all = ["queries", "encode", "isa", "metal", "cuda"])]
    pub tokens: Vec<usize>,
    /// Only the writing of rows
    #[arg(long)]
    pub encode: bool,
    /// Two shapes, fewer types and cells, shorter measurements
    #[arg(long)]
    pub quick: bool,
    /// Write JSON there (- is stdout, instead of the tables)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The child's part: measure with this library, print lines for the parent
    #[arg(long, hide = true, value_name = "LIBRARY")]
    pub worker: Option<PathBuf>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

pub fn bench(options: &Options) -> Result<()> {
    if options.build.cuda {
        return cuda::bench(options);
    }
    if !options.tokens.is_empty() {
        return shares::bench(options);
    }
    let plan = Plan::new(options)?;
    if let Some(library) = &options.worker {
        return worker::serve(&plan, library);
    }
    if plan.cases.is_empty() {
        let why: Vec<String> = plan.left_out.iter().map(|l| l.text()).collect();
        bail!("nothing is left to measure:\n{}", why.join("\n"));
    }
    let library = Library::path(&build_tree::build(&options.build, &[library::TARGET.into()])?);
    let watch = busy::Watch::start();
    let read = {
        let _spinner = Spinner::new("measuring the read bandwidth of the memory");
        bandwidth::measure(&plan.threads, if options.quick { 3 } else { 5 })
    };
    let read: Vec<(usize, f64)> = plan.threads.iter().copied().zip(read).collect();
    let mut rows = Vec::new();
    for isa in isas(&options.isa) {
        rows.extend(worker::collect(&plan, &library, isa, options.build.metal)?);
    }
    let pinned = (!options.isa.is_empty())
        .then(|| pinned::table(&isas(&options.isa).into_iter().flatten().collect::<Vec<_>>()))
        .flatten();
    let report = report::Report { plan: &plan, rows, read, others: watch.others() };
    let json = serde_json::to_string_pretty(&report.as_json())?;
    let text = report.as_text() + &pinned.map(|table| format!("\n{table}\n")).unwrap_or_default();
    match &options.json {
        Some(path) if path.as_os_str() == "-" => println!("{json}"),
        Some(path) => {
            fs::write(path, json + "\n").with_context(|| format!("cannot write {}", path.display()))?;
            print!("{text}");
        }
        None => print!("{text}"),
    }
    Ok(())
}

/// The instruction sets to measure, each in a child; None is the best one.
fn isas(wanted: &[String]) -> Vec<Option<&str>> {
    match wanted {
        [] => vec![None],
        [all] if all == "all" => {
            ggml_ext::isa::available().iter().map(|k| k.name).filter(|&name| name != "scalar").map(Some).collect()
        }
        some => some.iter().map(|name| Some(name.as_str())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_instruction_sets_are_those_of_this_cpu() {
        assert_eq!(isas(&[]), [None]);
        assert_eq!(isas(&["avx2".into(), "scalar".into()]), [Some("avx2"), Some("scalar")]);
        let wanted = ["all".into()];
        let all = isas(&wanted);
        assert_eq!(all.len(), ggml_ext::isa::available().len() - 1);
        assert!(!all.contains(&Some("scalar")) && !all.contains(&None));
    }
}
