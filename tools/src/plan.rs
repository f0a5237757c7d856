//! `cargo kv plan`: what the caches of a model take by type, what context fits a memory, and how fast it can be read.
//!
//! Everything follows from the header of the GGUF file, except the few weights that the guard looks at and the bandwidth of
//! the memory, which is measured.

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, ensure, Context, Result};
use ggml_ext::spec::{check_cache, parse, AskedType, ContextKind, Member};
use ggml_ext::{CacheSize, ContextShape, Gguf, KvType, ModelShape};
use serde_json::{json, Value};

use crate::bench::bandwidth;
use crate::pair::Pair;
use crate::table::Table;
use crate::{cpu, types};

/// What is planned unless something else is asked for, the best first: pairs and their KL divergence, measured on
/// SmolLM2-135M at 2048 tokens (docs/quality.md).
const KNOWN: [(&str, f64); 9] = [
    ("f16", 0.0),
    ("srft8", 0.00385),
    ("q8_0", 0.00391),
    ("delta4/srft4", 0.0057),
    ("srft4", 0.0081),
    ("delta3/srft3", 0.01007),
    ("srft3", 0.0203),
    ("q4_0", 0.04836),
    ("srft2", 0.10089),
];

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model; of several files the first
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,
    /// Memory for weights, caches and compute buffers: 16G, 512M (default: this machine's)
    #[arg(long, value_parser = parse_memory)]
    pub memory: Option<u64>,
    /// Cells of all sequences, as llama.cpp's -c (default: what the model was trained for)
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Sequences, as -np
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// Sequences share the cells, as -kvu
    #[arg(long)]
    pub kv_unified: bool,
    /// Layers with a window keep all cells, as --swa-full
    #[arg(long)]
    pub swa_full: bool,
    /// Tokens that are computed at once, as -ub
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub ubatch: u32,
    /// Further pairs K/V,K/V,… (T alone is T/T), types or specs by layer
    #[arg(long, value_name = "K/V,…")]
    pub types: Vec<String>,
    /// GB/s of the memory that holds weights and cache (default: measured here, on all cores)
    #[arg(long, value_name = "GB/s")]
    pub bandwidth: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// "16G", "1.5GiB", "512M", or bytes.
pub fn parse_memory(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is no size of a memory: write 16G, 1.5G, 512M or a number of bytes");
    let upper = text.trim().to_ascii_uppercase();
    let short = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
    let digits = short.trim_end_matches(['K', 'M', 'G', 'T']);
    let unit: u64 = match &short[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return Err(wrong()),
    };
    let bytes = digits.trim().parse::<f64>().map_err(|_| wrong())? * unit as f64;
    (bytes >= 1.0 && bytes < 2f64.powi(60)).then_some(bytes as u64).ok_or_else(wrong)
}

/// A model as its file describes it.
pub struct Model {
    pub file: Gguf,
    pub shape: ModelShape,
    pub weights: u64,
}

impl Model {
    pub fn open(path: &Path) -> Result<Model> {
        let file = Gguf::open(path)?;
        let shape = file.shape().with_context(|| format!("cannot plan for {}", path.display()))?;
        let weights = file.weight_bytes().with_context(|| format!("cannot plan for {}", path.display()))?;
        Ok(Model { file, shape, weights })
    }

    /// The caches that llama.cpp makes for a context, or why it refuses to.
    pub fn cache(&self, context: &ContextShape, k: KvType, v: KvType) -> Result<CacheSize> {
        let arch = self.file.architecture();
        let asked = |kind: KvType| AskedType { id: kind.id(), is_ggml: !kind.is_ours() };
        let kind = ContextKind { n_layer: self.shape.layers.len(), arch, flash_attn_off: !context.flash_attention };
        check_cache(asked(k), asked(v), &kind).map_err(|e| anyhow!(e))?;
        ensure!(k == v || !self.shape.shares_rows(), "K and V share their rows in {arch}: one type for both");
        // As llama.cpp does, whatever it was asked for.
        let mut context = *context;
        context.flash_attention &= arch != "grok";
        ensure!(context.flash_attention || !is_quantized(v), "V cache type {v} needs flash attention");
        Ok(CacheSize::of(&self.shape, &context, k, v)?)
    }

    /// What llama.cpp takes beside weights and caches: the activations of a batch, the mask of its attention, a row of logits for
    /// each sequence, and 64 MiB for the rest. Its own buffers were 21 to 44 MiB where this is 86 to 108 (docs/plan.md).
    pub fn compute_bytes(&self, context: &ContextShape) -> u64 {
        let number = |key: &str| self.file.largest_number(key).unwrap_or(0) as f64;
        let experts = number("expert_feed_forward_length") * (number("expert_used_count") + 1.0);
        let hidden = number("feed_forward_length").max(experts);
        let cells = context.cells / if context.unified { 1 } else { context.sequences };
        let token = 4.0 * (3.0 * hidden + 4.0 * number("embedding_length")) + 2.0 * cells as f64;
        (64 << 20) + (context.batch as f64 * token) as u64 + 4 * (context.sequences * self.file.vocabulary()) as u64
    }

    fn layers(&self) -> String {
        let layers = &self.shape.layers;
        let windows: Vec<usize> = layers.iter().filter(|l| !l.keeps_all).filter_map(|l| l.window).collect();
        let without = layers.iter().filter(|l| l.kv_heads == 0).count();
        let mut text = format!("{} layers", layers.len());
        if let Some(window) = windows.first() {
            text += &format!(", {} with a window of {window}", windows.len());
        }
        if without > 0 {
            text += &format!(", {without} without K and V of their own");
        }
        text
    }
}

struct Row {
    pair: Pair,
    kld: Option<f64>,
    outcome: Result<Sizes>,
}

struct Sizes {
    cache: CacheSize,
    fits: bool,
    /// None where any context fits.
    largest: Option<usize>,
    speed: f64,
}

struct Plan {
    model: Model,
    context: ContextShape,
    memory: u64,
    bandwidth: f64,
    rows: Vec<Row>,
}

pub fn plan(options: &Options) -> Result<()> {
    let plan = Plan::new(options)?;
    match options.json {
        true => println!("{}", serde_json::to_string_pretty(&plan.as_json())?),
        false => print!("{}", plan.as_text(options)),
    }
    Ok(())
}

impl Plan {
    fn new(options: &Options) -> Result<Plan> {
        let pairs = pairs(&options.types)?;
        let model = Model::open(&options.model)?;
        ensure!(
            model.shape.layers.iter().any(|layer| layer.kv_heads > 0),
            "{} models have no KV cache: there is nothing to plan",
            model.file.architecture()
        );
        let trained = model.file.number("context_length");
        let Some(cells) = options.ctx.map(|n| n as usize).or(trained) else {
            bail!("the file does not say what context the model was trained for: give --ctx");
        };
        let mut context = ContextShape::new(cells);
        context.sequences = options.parallel as usize;
        context.unified = options.kv_unified;
        context.full_windows = options.swa_full;
        context.batch = options.ubatch as usize;
        let memory = options.memory.map_or_else(machine_memory, Ok)?;
        let bandwidth = options.bandwidth.unwrap_or_else(|| bandwidth::measure(&[cpu::cores() as usize], 3)[0]);
        let mut plan = Plan { model, context, memory, bandwidth, rows: Vec::new() };
        for pair in pairs {
            let kld = KNOWN.iter().find(|known| known.0 == pair.name()).map(|known| known.1);
            let outcome = plan.sizes(&pair);
            plan.rows.push(Row { pair, kld, outcome });
        }
        Ok(plan)
    }

    fn sizes(&self, pair: &Pair) -> Result<Sizes> {
        let (k, v): (KvType, KvType) = (pair.k.parse()?, pair.v.parse()?);
        let cache = self.model.cache(&self.context, k, v)?;
        let fits = |context: &ContextShape| -> Result<bool> {
            let needed = self.model.weights.saturating_add(self.model.compute_bytes(context));
            Ok(needed.saturating_add(self.model.cache(context, k, v)?.bytes()) <= self.memory)
        };
        let (fits, largest) = (fits(&self.context)?, self.context.largest(fits)?);
        // A token of a sequence looks at that sequence's cells, or at all where they are shared.
        let streams = if self.context.unified { 1 } else { self.context.sequences };
        let read = self.model.file.weight_bytes_per_token()? + cache.bytes() / streams as u64;
        let speed = self.bandwidth * 1e9 / read.max(1) as f64;
        Ok(Sizes { cache, fits, largest, speed })
    }

    /// The best of what fits, by its divergence.
    fn recommended(&self) -> Option<&Row> {
        let fits = |row: &&Row| row.outcome.as_ref().is_ok_and(|sizes| sizes.fits) && row.kld.is_some();
        self.rows.iter().filter(fits).min_by(|a, b| a.kld.partial_cmp(&b.kld).unwrap_or(std::cmp::Ordering::Equal))
    }

    fn as_text(&self, options: &Options) -> String {
        let (model, context) = (&self.model, &self.context);
        let mut text = format!(
            "{}, {}, weights {}\n{} cells, {} sequence{}; memory {}, {} of it for compute buffers\n",
            model.file.architecture(),
            model.layers(),
            size(model.weights),
            context.cells,
            context.sequences,
            if context.sequences == 1 { "" } else { "s" },
            size(self.memory),
            size(model.compute_bytes(context)),
        );
        let longest = context.cells / if context.unified { 1 } else { context.sequences };
        if let Some(trained) = model.file.number("context_length").filter(|&n| n < longest) {
            text += &format!("The model was trained for {trained} tokens, and a sequence may have {longest} here.\n");
        }
        if !model.file.architecture_is_known() {
            text += "This architecture is not known: its layers are taken to be all alike.\n";
        }
        let mut table = Table::new(&["K/V", "bits/value", "cache", "fits", "largest context", "tokens/s <=", "KLD"], 1);
        let mut refused = String::new();
        for row in &self.rows {
            let name = row.pair.name();
            match &row.outcome {
                Err(why) => refused += &format!("{name}: {why:#}\n"),
                Ok(sizes) => table.row(vec![
                    name,
                    format!("{:.2}", sizes.cache.bits_per_value()),
                    size(sizes.cache.bytes()),
                    if sizes.fits { "yes" } else { "no" }.into(),
                    sizes.largest.map_or("any".into(), |n| n.to_string()),
                    format!("{:.1}", sizes.speed),
                    row.kld.map_or(String::new(), |kld| format!("{kld:.4}")),
                ]),
            }
        }
        text += &format!("\n{table}\n{refused}");
        let raised = |row: &&Row| row.outcome.as_ref().is_ok_and(|sizes| !sizes.cache.raised.is_empty());
        if let Some((row, Ok(sizes))) = self.rows.iter().find(raised).map(|row| (row, &row.outcome)) {
            let (name, n) = (row.pair.name(), sizes.cache.raised.len());
            text += &format!("The guard raises layers, {n} of {name}: {}\n", sizes.cache.raised[0]);
        }
        text += &format!(
            "tokens/s: an upper estimate, {:.1} GB/s over the weights and the full cache that a token reads. KLD: SmolLM2-135M, 2048 tokens.\n",
            self.bandwidth
        );
        text + &match self.recommended() {
            Some(row) => format!(
                "Recommended, the best quality that fits: {}\n\n    cargo kv llama-server -- -m {} -c {} -np {}{}{} -fa on --cache-type-k {} --cache-type-v {}\n",
                row.pair.name(),
                options.model.display(),
                context.cells,
                context.sequences,
                if context.unified { " -kvu" } else { "" },
                if context.full_windows { " --swa-full" } else { "" },
                row.pair.k,
                row.pair.v
            ),
            None => "Nothing fits: take a shorter context or a smaller model.\n".into(),
        }
    }

    fn as_json(&self) -> Value {
        let row = |row: &Row| match &row.outcome {
            Err(why) => json!({ "pair": row.pair.name(), "refused": format!("{why:#}") }),
            Ok(sizes) => json!({
                "pair": row.pair.name(), "k": row.pair.k, "v": row.pair.v, "kld": row.kld,
                "k_bytes": sizes.cache.k, "v_bytes": sizes.cache.v, "state_bytes": sizes.cache.states,
                "cache_bytes": sizes.cache.bytes(), "bits_per_value": sizes.cache.bits_per_value(), "fits": sizes.fits,
                "largest_context": sizes.largest, "tokens_per_second_at_most": sizes.speed, "raised": sizes.cache.raised,
            }),
        };
        json!({
            "architecture": self.model.file.architecture(), "layers": self.model.shape.layers.len(),
            "weight_bytes": self.model.weights, "compute_bytes": self.model.compute_bytes(&self.context),
            "memory_bytes": self.memory, "cells": self.context.cells, "sequences": self.context.sequences,
            "bandwidth_gb_per_s": self.bandwidth, "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "recommended": self.recommended().map(|row| row.pair.name()),
        })
    }
}

fn pairs(asked: &[String]) -> Result<Vec<Pair>> {
    let mut pairs = KNOWN.iter().map(|known| Pair::parse(known.0)).collect::<Result<Vec<_>>>()?;
    for name in asked.iter().flat_map(|list| types::split(list)).filter(|name| !name.trim().is_empty()) {
        let pair = Pair::parse(&name)?;
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    Ok(pairs)
}

fn is_quantized(kind: KvType) -> bool {
    parse(&kind.to_string()).is_ok_and(|spec| spec.members().any(Member::is_quantized))
}

fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 {
        format!("{mib:.2} MiB")
    } else {
        format!("{:.2} GiB", mib / 1024.0)
    }
}

/// What the machine has in all.
fn machine_memory() -> Result<u64> {
    #[cfg(unix)]
    {
        // SAFETY: sysconf takes a number and returns one.
        let (pages, bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        if pages > 0 && bytes > 0 {
            return Ok(pages as u64 * bytes as u64);
        }
    }
    bail!("this machine does not say how much memory it has: give --memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memories() {
        let bytes = |text: &str| parse_memory(text).unwrap();
        assert_eq!([bytes("16G"), bytes("16gib"), bytes("16 GB")], [16 << 30; 3]);
        assert_eq!([bytes("1.5G"), bytes("512M"), bytes("2T"), bytes("4096")], [3 << 29, 1 << 29, 2 << 40, 4096]);
        for bad in ["", "G", "16X", "-1G", "nan", "16GG", "0", "1e30"] {
            assert!(parse_memory(bad).unwrap_err().contains("512M"), "{bad}");
        }
    }

    #[test]
    fn known_pairs_come_best_first_and_once() {
        assert!(KNOWN.windows(2).all(|pair| pair[0].1 < pair[1].1));
        let names: Vec<String> = pairs(&["srft4,q8_0/srft4".into()]).unwrap().iter().map(Pair::name).collect();
        assert_eq!(names.len(), KNOWN.len() + 1);
        assert_eq!(names.last().unwrap(), "q8_0/srft4");
    }
}
