//! What the tests share.

use ggml_ext::KvType;
use kv_examples::CacheOptions;

/// The model that `KV_MODEL` names, with a small cache. `cargo kv test --only wrapper` sets it.
pub fn options() -> CacheOptions {
    let model = std::env::var_os("KV_MODEL").expect("KV_MODEL must name a GGUF file, SmolLM2-135M say").into();
    CacheOptions {
        model,
        cache_type_k: KvType::F16,
        cache_type_v: KvType::F16,
        ctx: 256, // More would wait for each other in a spin, which on a busy machine takes minutes.
        threads: Some(1),
        log: false,
    }
}
