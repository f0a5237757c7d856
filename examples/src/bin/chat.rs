//! Talk to a model whose cache is compressed: the answer streams, and the end says what it cost.
//!
//!     cargo run --release --bin chat -- -m MODEL.gguf --cache-type-k srft4 --cache-type-v srft4
//!
//! Lines come from stdin, or one from `--prompt`.

use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use kv_examples::{answer, cache_mib, load, new_context, text, tokens, CacheOptions};
use llama_cpp_2::model::LlamaChatMessage;

#[derive(Parser)]
#[command(about = "Talk to a model whose KV cache is compressed")]
struct Options {
    #[command(flatten)]
    cache: CacheOptions,
    /// What the model is told before the first line
    #[arg(long)]
    system: Option<String>,
    /// Answer this and end
    #[arg(short, long)]
    prompt: Option<String>,
    /// Tokens of an answer at most
    #[arg(short, default_value_t = 256)]
    n: usize,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let (backend, model) = load(&options.cache)?;
    let template = model.chat_template(None)?;
    let mut context = new_context(&backend, &model, &options.cache)?;
    let message = |role: &str, content: &str| LlamaChatMessage::new(role.into(), content.into());

    let mut chat = Vec::new();
    if let Some(system) = &options.system {
        chat.push(message("system", system)?);
    }
    let (mut said, mut past) = (0, 0);
    let (mut generated, mut seconds) = (0, 0.0);
    let mut lines = std::io::stdin().lock().lines();
    let mut prompt = options.prompt.clone();
    loop {
        let line = match prompt.take() {
            Some(prompt) => prompt,
            None if options.prompt.is_some() => break,
            None => {
                print!("> ");
                std::io::stdout().flush()?;
                match lines.next() {
                    Some(line) => line?,
                    None => break,
                }
            }
        };
        chat.push(message("user", &line)?);
        // The whole talk as the model's template writes it; what the cache holds already is not read again.
        let whole = model.apply_chat_template(&template, &chat, true)?;
        let new = tokens(&model, &whole[said..], past == 0, true);
        let start = Instant::now();
        let mut first = None;
        let mut piece = Vec::new();
        let reply = answer(&model, &mut context, &new, past, options.n, |token| {
            first.get_or_insert_with(Instant::now);
            // A character may take several tokens.
            piece.extend(model.vocab().token_to_piece(token, false, None));
            if let Ok(done) = std::str::from_utf8(&piece) {
                print!("{done}");
                // A closed terminal ends the program at the next line.
                let _ = std::io::stdout().flush();
                piece.clear();
            }
        })?;
        println!();
        generated += reply.len();
        seconds += first.unwrap_or(start).elapsed().as_secs_f64();
        past += new.len() + reply.len();
        let reply = text(&model, &reply);
        chat.push(message("assistant", &reply)?);
        // The mark that ends an answer is the template's, and is read with the next line.
        let upto = model.apply_chat_template(&template, &chat, false)?;
        said = upto.rfind(&reply).map_or(upto.len(), |at| at + reply.len());
    }
    let (k, v) = (options.cache.cache_type_k, options.cache.cache_type_v);
    println!(
        "[ {k}/{v}: {:.1} tokens/s, cache {:.2} MiB for {} cells, {past} used ]",
        generated as f64 / seconds.max(1e-9),
        cache_mib(context.n_ctx(), &options.cache)?,
        context.n_ctx(),
    );
    Ok(())
}
