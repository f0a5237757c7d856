#include "life.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

std::string directory = ".";

const std::string & folder() {
    return directory;
}

std::vector<Pair> all_pairs() {
    std::vector<Pair> res;
    std::string names = ggml_ext_family_names();
    for (size_t at = 0; at < names.size();) {
        const size_t end = std::min(names.find(", ", at), names.size());
        const std::string name = names.substr(at, end - at);
        const ggml_ext_type * type = ggml_ext_type_get(ggml_ext_type_from_name(name.c_str()));
        if (type->serves_k && type->serves_v) {
            res.push_back({ name, name });
        } else if (type->serves_k) {
            res.push_back({ name, "f16" });
        } else {
            res.push_back({ "f16", name });
        }
        at = end + 2;
    }
    res.push_back({ "delta4", "srft4" });
    res.push_back({ "delta8", "srft4" });
    res.push_back({ "band4", "srft4" });
    res.push_back({ "q8_0", "srft4" });
    res.push_back({ "srft4,0=delta4,1=f16", "srft3,-1=srft8" });
    return res;
}

static bool is_banded(const Pair & types) {
    return types.k.find("band") != std::string::npos;
}

bool serves(const Pair & types, const Shape & shape) {
    return (shape.head_size%32 == 0 || types.k.find("q8_0") == std::string::npos) && (shape.head_size%64 == 0 || !is_banded(types));
}

bool is_grouped(const Pair & types) {
    return types.k.find("delta") != std::string::npos || is_banded(types);
}

// Measured means are a half to two thirds of these. A family that is not listed may lose as much as any.
double loss_of(const Pair & types) {
    static const std::map<std::string, double> bounds = {
        { "srft8", 0.0005 }, { "delta8", 0.0005 }, { "srft4", 0.045 }, { "srft3", 0.2 },   { "srft2", 0.8 },  { "delta4", 0.03 }, { "delta3", 0.12 },
        { "polar4", 0.25 },  { "polar3", 0.55 }, { "turbo4", 0.15 }, { "turbo3", 0.4 }, { "qjl1", 1.1 },    { "q8_0", 0.0005 },
        { "f16", 1e-5 },
    };
    double res = 0.0;
    for (const std::string & spec : { types.k, types.v }) {
        double of_spec = 0.0;
        for (const auto & [name, bound] : bounds) {
            if (spec.find(name) != std::string::npos) {
                of_spec = std::max(of_spec, bound);
            }
        }
        res = std::max(res, of_spec > 0.0 ? of_spec : 1.1);
    }
    return res;
}

// The default depends on the number of cells, and states go from one context to a larger one.
static std::string with_recent(const std::string & type, int recent) {
    const bool ours = cache_type(type) >= GGML_TYPE_COUNT;
    return ours && type.find("recent=") == std::string::npos ? type + ",recent=" + std::to_string(recent) : type;
}

Context new_context(const Shape & shape, const Pair & types, const Setup & setup) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = setup.cells*(setup.unified ? 1 : setup.n_seq);
    p.n_batch         = 256;
    p.n_ubatch        = 64;
    p.n_seq_max       = setup.n_seq;
    p.kv_unified      = setup.unified;
    p.swa_full        = setup.swa_full;
    p.n_threads       = setup.threads;
    p.n_threads_batch = setup.threads;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.offload_kqv     = gpu_layers > 0 && !setup.on_cpu;
    p.no_perf         = true;
    p.type_k          = cache_type(with_recent(types.k, setup.recent));
    p.type_v          = cache_type(with_recent(types.v, setup.recent));
    llama_model * model = model_of(shape);
    if (is_banded(types) && types.k.find("cal=") == std::string::npos) {
        calibrate_beside(shape);
    }
    llama_context * ctx = llama_init_from_model(model, p);
    if (!ctx) {
        fprintf(stderr, "no context with %s\n%s\n", types.name().c_str(), take_log().c_str());
        exit(2);
    }
    return Context(ctx, llama_free);
}

llama_token token_at(llama_seq_id seq, llama_pos pos) {
    // words of eight tokens that come again, as in text
    Rng word((uint64_t) seq*131 + Rng((uint64_t) pos/8).next()%12);
    for (llama_pos i = 0; i < pos%8; i++) {
        word.next();
    }
    return (llama_token) word.below(N_VOCAB);
}

std::vector<Token> text(llama_seq_id seq, llama_pos from, llama_pos to) {
    std::vector<Token> res;
    for (llama_pos pos = from; pos < to; pos++) {
        res.push_back({ token_at(seq, pos), pos, seq, pos + 1 == to });
    }
    return res;
}

std::vector<Token> wanted(std::vector<Token> tokens) {
    for (Token & t : tokens) {
        t.wanted = true;
    }
    return tokens;
}

double largest_difference(const std::vector<float> & a, const std::vector<float> & b) {
    if (a.size() != b.size() || a.empty()) {
        return INFINITY;
    }
    std::vector<double> differences(a.size());
    for (size_t i = 0; i < a.size(); i++) {
        differences[i] = std::abs((double) a[i] - b[i]);
    }
    return largest(differences);
}

bool all_finite(const std::vector<float> & x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

std::vector<uint8_t> state_of(llama_context * ctx, bool whole) {
    return whole ? save_state(ctx) : save_state(ctx, 0);
}

std::vector<uint8_t> rows_of(const std::vector<uint8_t> & state) {
    uint64_t bytes = 0;
    if (state.size() > 8 + GGML_EXT_STATE_PREFIX + 32) {
        memcpy(&bytes, &state[8 + GGML_EXT_STATE_PREFIX + 24], sizeof(bytes));
    }
    return bytes < state.size() ? std::vector<uint8_t>(state.end() - bytes, state.end()) : std::vector<uint8_t>();
}
