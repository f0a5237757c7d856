#include "tool.h"

#include "../harness/harness.h"

#include "ggml-backend.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

void fail(const std::string & why) {
    fprintf(stderr, "error: %s\n", why.c_str());
    exit(1);
}

Model read_model(const std::string & path, int gpu_layers) {
    llama_log_set(print_errors, nullptr);
    llama_backend_init();
    ggml_backend_load_all();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = gpu_layers;
    llama_model * model = llama_model_load_from_file(path.c_str(), params);
    if (!model) {
        fail("the model cannot be read: " + path);
    }
    return Model(model, llama_model_free);
}

std::vector<llama_token> read_tokens(const std::string & path, const llama_model * model, int needed) {
    std::ifstream file(path);
    if (!file) {
        fail("the text cannot be read: " + path);
    }
    std::stringstream text;
    text << file.rdbuf();
    const std::string raw = text.str();
    std::vector<llama_token> tokens(raw.size() + 8);
    const int n = llama_tokenize(llama_model_get_vocab(model), raw.data(), (int32_t) raw.size(), tokens.data(), (int32_t) tokens.size(), true, false);
    if (n < needed) {
        fail(path + " has " + std::to_string(n) + " tokens, " + std::to_string(needed) + " are needed");
    }
    tokens.resize(n);
    return tokens;
}

Context new_context(llama_model * model, const std::string & pair, const ContextSize & size) {
    const size_t slash = pair.rfind('/');
    if (slash == std::string::npos) {
        fail(pair + " is not a pair K/V");
    }
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = size.cells;
    p.n_seq_max       = size.sequences;
    p.kv_unified      = true;
    p.n_batch         = size.batch;
    p.n_ubatch        = size.ubatch;
    p.n_threads       = size.threads;
    p.n_threads_batch = size.threads;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.type_k          = cache_type(pair.substr(0, slash));
    p.type_v          = cache_type(pair.substr(slash + 1));
    llama_context * ctx = llama_init_from_model(model, p);
    if (!ctx) {
        fail("no context could be made with " + pair);
    }
    return Context(ctx, llama_free);
}
