//! A prompt read once, its compressed cache kept in a file, and answered from there as often as one likes.
//!
//!     cargo run --release --bin session -- -m MODEL.gguf save long.kv --prompt-file book.txt
//!     cargo run --release --bin session -- -m MODEL.gguf restore long.kv --prompt "The end of it was"
//!
//! A file belongs to a model and a pair of types: llama.cpp refuses it for others.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use kv_examples::{answer, load, new_context, text, tokens, CacheOptions};

#[derive(Parser)]
#[command(about = "Save and restore a session with a compressed KV cache")]
struct Options {
    #[command(flatten)]
    cache: CacheOptions,
    #[command(subcommand)]
    verb: Verb,
    /// Tokens of the answer
    #[arg(short, default_value_t = 32, global = true)]
    n: usize,
}

#[derive(Subcommand)]
enum Verb {
    /// Read a prompt, write the session, answer
    Save {
        file: PathBuf,
        #[arg(short, long, required_unless_present = "prompt_file")]
        prompt: Option<String>,
        #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
        prompt_file: Option<PathBuf>,
    },
    /// Read a session, go on with it, answer
    Restore {
        file: PathBuf,
        /// Said after what the session holds
        #[arg(short, long)]
        prompt: Option<String>,
    },
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (backend, model) = load(&options.cache)?;
    let mut context = new_context(&backend, &model, &options.cache)?;
    let start = Instant::now();
    // The last token of a session is read when it goes on, because an answer needs its logits, which no file holds.
    let (past, prompt, file) = match &options.verb {
        Verb::Save { file, prompt, prompt_file } => {
            let prompt = match prompt_file {
                Some(file) => std::fs::read_to_string(file).with_context(|| format!("no {}", file.display()))?,
                None => prompt.clone().unwrap_or_default(),
            };
            let all = tokens(&model, &prompt, true, false);
            let (last, before) = all.split_last().context("the prompt is empty")?;
            if !before.is_empty() {
                answer(&model, &mut context, before, 0, 0, |_| ())?;
            }
            context.state_save_file(file, &all)?;
            (before.len(), vec![*last], file)
        }
        Verb::Restore { file, prompt } => {
            let n_ctx = context.n_ctx() as usize;
            let all = context
                .state_load_file(file, n_ctx)
                .with_context(|| format!("{} is no session of this model and these types", file.display()))?;
            let (last, before) = all.split_last().context("the session is empty")?;
            let mut new = vec![*last];
            new.extend(prompt.iter().flat_map(|p| tokens(&model, p, false, false)));
            (before.len(), new, file)
        }
    };
    let ready = start.elapsed().as_secs_f64();
    let reply = answer(&model, &mut context, &prompt, past, options.n, |_| ())?;
    println!("{}", text(&model, &reply));
    let size = std::fs::metadata(file)?.len() as f64 / f64::from(1 << 20);
    let (k, v) = (options.cache.cache_type_k, options.cache.cache_type_v);
    println!("[ {k}/{v}: {past} cells in {size:.2} MiB, ready after {ready:.2} s ]");
    Ok(())
}
