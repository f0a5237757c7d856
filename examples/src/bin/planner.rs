//! What context fits? The cache types side by side for a model and a memory: `cargo kv plan` in a few lines.
//!
//!     cargo run --release --bin planner -- --memory 8G --model MODEL.gguf
//!     cargo run --release --bin planner -- --memory 8G --layers 32 --kv-heads 8 --head-size 128 --weights 4.5G

use std::path::PathBuf;

use anyhow::{bail, Result};
use clap::Parser;
use ggml_ext::{largest_context, CacheSize, ContextShape, Gguf, KvType, ModelShape};

#[derive(Parser)]
#[command(about = "What context fits into a memory, by cache type")]
struct Options {
    /// Memory for weights and cache together: 8G, 512M
    #[arg(long, value_parser = bytes)]
    memory: u64,
    /// Take shape and weights from this GGUF file
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["layers", "kv_heads", "head_size", "weights"])]
    model: Option<PathBuf>,
    #[arg(long, requires_all = ["kv_heads", "head_size"])]
    layers: Option<usize>,
    #[arg(long)]
    kv_heads: Option<usize>,
    #[arg(long)]
    head_size: Option<usize>,
    /// Memory that the weights take
    #[arg(long, default_value = "0", value_parser = bytes)]
    weights: u64,
    /// Pairs to compare, with blanks between them: K/V, or one for both, types or specs by layer
    #[arg(long, num_args = 1.., value_name = "K/V",
          default_values = ["f16", "q8_0", "q8_0/srft4", "srft8", "delta4/srft4", "srft4", "delta3/srft3", "srft3", "srft2"])]
    types: Vec<String>,
}

fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.to_ascii_uppercase().chars().last() {
        Some('G') => (&text[..text.len() - 1], 1u64 << 30),
        Some('M') => (&text[..text.len() - 1], 1 << 20),
        Some('K') => (&text[..text.len() - 1], 1 << 10),
        _ => (text, 1),
    };
    match number.parse::<f64>() {
        Ok(n) if n >= 0.0 && n.is_finite() => Ok((n * unit as f64) as u64),
        _ => Err(format!("'{text}' is no memory: write 8G, 512M or a number of bytes")),
    }
}

fn pair(text: &str) -> Result<(KvType, KvType)> {
    let (k, v) = text.split_once('/').unwrap_or((text, text));
    Ok((k.parse()?, v.parse()?))
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (shape, weights) = match (&options.model, options.layers, options.kv_heads, options.head_size) {
        (Some(file), ..) => {
            let model = Gguf::open(file)?;
            (model.shape()?, model.weight_bytes()?)
        }
        (None, Some(layers), Some(heads), Some(size)) => (ModelShape::uniform(layers, heads, size), options.weights),
        _ => bail!("give --model, or --layers, --kv-heads and --head-size"),
    };
    let Some(budget) = options.memory.checked_sub(weights) else {
        bail!("the weights alone take {:.2} GiB", weights as f64 / f64::from(1 << 30));
    };
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("{:.0} MiB for the cache of {} layers", mib(budget), shape.layers.len());
    println!("{:<14}{:>12}{:>16}{:>14}", "K/V", "bits/value", "MiB for 8192", "context");
    for text in &options.types {
        let (k, v) = pair(text)?;
        match CacheSize::of(&shape, &ContextShape::new(8192), k, v) {
            Ok(size) => println!(
                "{text:<14}{:>12.2}{:>16.2}{:>14}",
                size.bits_per_value(),
                mib(size.bytes()),
                largest_context(&shape, budget, k, v)?
            ),
            Err(why) => println!("{text:<14} {why}"),
        }
    }
    Ok(())
}
