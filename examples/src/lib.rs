//! What the examples share: a model, contexts whose cache has a given type, and greedy answers.

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{bail, Context as _, Result};
use ggml_ext::{cache_bytes, Gguf, KvType};
use llama_cpp_2::context::params::{KvCacheType, LlamaContextParams};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;

/// The model and the cache that a program is asked for.
#[derive(Clone, Debug, clap::Args)]
pub struct CacheOptions {
    /// GGUF file
    #[arg(short, long, value_name = "FILE")]
    pub model: PathBuf,
    /// Type of K, as llama.cpp's --cache-type-k
    #[arg(long, default_value = "srft4", value_name = "TYPE")]
    pub cache_type_k: KvType,
    /// Type of V
    #[arg(long, default_value = "srft4", value_name = "TYPE")]
    pub cache_type_v: KvType,
    /// Cells of the cache
    #[arg(short, long, default_value_t = 1024)]
    pub ctx: u32,
    /// Threads (default: one a core)
    #[arg(short, long)]
    pub threads: Option<i32>,
    /// Show llama.cpp's own log
    #[arg(long)]
    pub log: bool,
}

/// Reads a model; llama.cpp's log goes to stderr only where it is wanted.
pub fn load(options: &CacheOptions) -> Result<(LlamaBackend, LlamaModel)> {
    let mut backend = LlamaBackend::init()?;
    if !options.log {
        backend.void_logs();
    }
    let file = &options.model;
    if !file.is_file() {
        bail!("there is no model {}", file.display());
    }
    let model = LlamaModel::load_from_file(&backend, file, &LlamaModelParams::default())
        .with_context(|| format!("cannot read {}", file.display()))?;
    Ok((backend, model))
}

/// A context with these cache types: the two calls that differ from any other program over llama-cpp-2.
pub fn new_context<'a>(
    backend: &LlamaBackend,
    model: &'a LlamaModel,
    options: &CacheOptions,
) -> Result<LlamaContext<'a>> {
    let mut params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(options.ctx))
        .with_type_k(KvCacheType::from(u32::from(options.cache_type_k)))
        .with_type_v(KvCacheType::from(u32::from(options.cache_type_v)));
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as i32);
    let threads = options.threads.unwrap_or(cores);
    params = params.with_n_threads(threads).with_n_threads_batch(threads);
    model.new_context(backend, params).with_context(|| {
        let (k, v) = (options.cache_type_k, options.cache_type_v);
        format!("llama.cpp refuses a {k}/{v} cache for this model; --log shows why")
    })
}

/// MiB of the caches of a context with `n_ctx` cells, of one sequence: what the model's file says of its layers, counted as
/// llama.cpp does.
pub fn cache_mib(n_ctx: u32, options: &CacheOptions) -> Result<f64> {
    let shape = Gguf::open(&options.model)?.shape()?;
    let bytes = cache_bytes(&shape, n_ctx as usize, options.cache_type_k, options.cache_type_v)?;
    Ok(bytes as f64 / f64::from(1 << 20))
}

/// Reads `prompt` behind the first `past` cells, then takes the likeliest token until the model ends its answer, `most`
/// tokens are there, or the context is full. `each` gets every token as it comes. Prompt and answer are in the cache then.
pub fn answer(
    model: &LlamaModel,
    context: &mut LlamaContext<'_>,
    prompt: &[LlamaToken],
    past: usize,
    most: usize,
    mut each: impl FnMut(LlamaToken),
) -> Result<Vec<LlamaToken>> {
    let cells = context.n_ctx() as usize;
    if prompt.is_empty() || past + prompt.len() > cells {
        bail!("{} tokens behind {past} do not fit a context of {}", prompt.len(), context.n_ctx());
    }
    let step = context.n_batch() as usize;
    let mut batch = LlamaBatch::new(step, 1);
    for (i, chunk) in prompt.chunks(step).enumerate() {
        batch.clear();
        for (j, &token) in chunk.iter().enumerate() {
            let at = i * step + j;
            batch.add(token, (past + at) as i32, &[0], at + 1 == prompt.len())?;
        }
        context.decode(&mut batch)?;
    }
    let mut sampler = LlamaSampler::greedy();
    let mut tokens = Vec::new();
    while tokens.len() < most.min(cells - past - prompt.len()) {
        let token = sampler.sample(context, batch.n_tokens() - 1);
        if model.vocab().is_eog(token) {
            break;
        }
        each(token);
        batch.clear();
        batch.add(token, (past + prompt.len() + tokens.len()) as i32, &[0], true)?;
        context.decode(&mut batch)?;
        tokens.push(token);
    }
    Ok(tokens)
}

/// Tokens of a text; `special` reads `<|…|>` as what it stands for.
pub fn tokens(model: &LlamaModel, text: &str, first: bool, special: bool) -> Vec<LlamaToken> {
    model.vocab().tokenize(text.as_bytes(), first, special)
}

/// The text of tokens; bytes that are no UTF-8 by themselves are shown as such.
pub fn text(model: &LlamaModel, tokens: &[LlamaToken]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|&t| model.vocab().token_to_piece(t, false, None)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
