//! Greedy tokens through the bare bindings, so that the same code runs over the original crate and over ours.

use llama_cpp_sys_2::*;
use std::ffi::CString;

/// The `n` likeliest tokens behind `prompt`, with the cache type that llama.cpp has by default.
pub fn greedy(model: &str, prompt: &str, n: usize) -> Vec<llama_token> {
    // SAFETY: each pointer is checked, used within its owner's life, and freed once.
    unsafe {
        llama_backend_init();
        llama_log_set(Some(silent), std::ptr::null_mut());
        let path = CString::new(model).expect("a path without a null byte");
        let model = llama_model_load_from_file(path.as_ptr(), llama_model_default_params());
        assert!(!model.is_null(), "the model cannot be read");
        let mut params = llama_context_default_params();
        (params.n_ctx, params.n_threads, params.n_threads_batch) = (512, 1, 1);
        let context = llama_init_from_model(model, params);
        assert!(!context.is_null(), "no context");
        let vocab = llama_model_get_vocab(model);

        let mut tokens: Vec<llama_token> = vec![0; prompt.len() + 8];
        let (text, room) = (CString::new(prompt).expect("a prompt without a null byte"), tokens.len() as i32);
        let found = llama_tokenize(vocab, text.as_ptr(), prompt.len() as i32, tokens.as_mut_ptr(), room, true, false);
        tokens.truncate(usize::try_from(found).expect("the prompt has tokens"));

        let mut out: Vec<llama_token> = Vec::new();
        while out.len() < n {
            let batch = llama_batch_get_one(tokens.as_mut_ptr(), tokens.len() as i32);
            assert_eq!(llama_decode(context, batch), 0, "decoding failed");
            let size = llama_vocab_n_tokens(vocab) as usize;
            let logits = std::slice::from_raw_parts(llama_get_logits_ith(context, -1), size);
            let best = (0..size).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary");
            out.push(best as llama_token);
            tokens = vec![best as llama_token];
        }
        llama_free(context);
        llama_model_free(model);
        out
    }
}

unsafe extern "C" fn silent(_: ggml_log_level, _: *const std::ffi::c_char, _: *mut std::ffi::c_void) {}
