#include "harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

bool quick = false, soak = false, verbose = false;

std::string filter, directory = ".";
int passed = 0, failed = 0;
std::map<std::string, int64_t> counts;

namespace {

std::string case_name;
std::string log_text;
std::mutex  log_mutex;

}  // namespace

bool begin_case(const std::string & name) {
    case_name = name;
    const bool runs = name.find(filter) != std::string::npos;
    if (runs && verbose) {
        printf("      %s\n", name.c_str());
        fflush(stdout);
    }
    return runs;
}

void check(bool ok, const std::string & what) {
    if (ok) {
        passed++;
    } else {
        failed++;
        printf("FAIL  life: %s: %s\n", case_name.c_str(), what.c_str());
        fflush(stdout);
    }
}

void check_below(double value, double bound, const std::string & what) {
    char text[64];
    snprintf(text, sizeof(text), " is %.3g, wanted at most %.3g", value, bound);
    if (verbose) {
        printf("      %s: %s%s\n", case_name.c_str(), what.c_str(), text);
    }
    check(value <= bound, what + text);
}

void count(const std::string & what, int64_t n) {
    counts[what] += n;
}

uint64_t Rng::next() {
    state += 0x9e3779b97f4a7c15ull;
    uint64_t z = state;
    z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27))*0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

float Rng::uniform() {
    return (float) (next() >> 40)/(float) (1 << 24);
}

float Rng::normal() {
    return std::sqrt(-2.0f*std::log(1.0f - uniform()))*std::cos(6.2831853f*uniform());
}

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
    res.push_back({ "q8_0", "srft4" });
    res.push_back({ "srft4,0=delta4,1=f16", "srft3,-1=srft8" });
    return res;
}

bool serves(const Pair & types, const Shape & shape) {
    return shape.head_size%32 == 0 || types.k.find("q8_0") == std::string::npos;
}

bool is_grouped(const Pair & types) {
    return types.k.find("delta") != std::string::npos;
}

// Measured means are a half to two thirds of these.
double loss_of(const Pair & types) {
    static const std::map<std::string, double> bounds = {
        { "srft8", 0.0005 }, { "srft4", 0.045 }, { "srft3", 0.2 },   { "srft2", 0.8 },  { "delta4", 0.03 }, { "delta3", 0.12 },
        { "polar4", 0.25 },  { "polar3", 0.55 }, { "turbo4", 0.15 }, { "turbo3", 0.4 }, { "qjl1", 1.1 },    { "q8_0", 0.0005 },
        { "f16", 1e-5 },
    };
    double res = 0.0;
    for (const std::string & spec : { types.k, types.v }) {
        for (const auto & [name, bound] : bounds) {
            if (spec.find(name) != std::string::npos) {
                res = std::max(res, bound);
            }
        }
    }
    return res;
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
    p.offload_kqv     = false;
    p.no_perf         = true;
    char err[1024];
    const auto type = [&](const std::string & name) {
        if (name == "f32") {
            return GGML_TYPE_F32;
        }
        const int32_t id = ggml_ext_type_parse(name.c_str(), err, sizeof(err));
        if (id < 0) {
            fprintf(stderr, "%s\n", err);
            exit(2);
        }
        return (ggml_type) id;
    };
    p.type_k = type(types.k);
    p.type_v = type(types.v);
    llama_context * ctx = llama_init_from_model(model_of(shape), p);
    if (!ctx) {
        fprintf(stderr, "no context with %s\n%s\n", types.name().c_str(), take_log().c_str());
        exit(2);
    }
    return Context(ctx, llama_free);
}

std::vector<float> decode(llama_context * ctx, const std::vector<Token> & tokens) {
    std::vector<float> res;
    const size_t step = llama_n_batch(ctx);
    for (size_t first = 0; first < tokens.size(); first += step) {
        const size_t n = std::min(step, tokens.size() - first);
        llama_batch batch = llama_batch_init((int32_t) n, 0, 1);
        batch.n_tokens = (int32_t) n;
        for (size_t i = 0; i < n; i++) {
            const Token & t = tokens[first + i];
            batch.token[i]     = t.token;
            batch.pos[i]       = t.pos;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = t.seq;
            batch.logits[i]    = t.wanted;
        }
        const bool ok = llama_decode(ctx, batch) == 0;
        for (size_t i = 0; ok && i < n; i++) {
            if (tokens[first + i].wanted) {
                const float * logits = llama_get_logits_ith(ctx, (int32_t) i);
                res.insert(res.end(), logits, logits + N_VOCAB);
            }
        }
        llama_batch_free(batch);
        count("tokens decoded", (int64_t) n);
        if (!ok) {
            return {};
        }
    }
    return res;
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

double kl_divergence(const float * a, const float * b) {
    const auto log_sum = [](const float * x) {
        double top = x[0], sum = 0.0;
        for (int i = 0; i < N_VOCAB; i++) {
            top = std::max(top, (double) x[i]);
        }
        for (int i = 0; i < N_VOCAB; i++) {
            sum += std::exp(x[i] - top);
        }
        return top + std::log(sum);
    };
    const double za = log_sum(a), zb = log_sum(b);
    double res = 0.0;
    for (int i = 0; i < N_VOCAB; i++) {
        res += std::exp(a[i] - za)*((a[i] - za) - (b[i] - zb));
    }
    return res;
}

double largest_difference(const std::vector<float> & a, const std::vector<float> & b) {
    if (a.size() != b.size() || a.empty()) {
        return INFINITY;
    }
    double res = 0.0;
    for (size_t i = 0; i < a.size(); i++) {
        const double d = std::abs((double) a[i] - b[i]);
        res = d <= res ? res : d; // NaN stays
    }
    return res;
}

bool all_finite(const std::vector<float> & x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

void take_down(ggml_log_level level, const char * text, void *) {
    std::lock_guard<std::mutex> lock(log_mutex);
    if (level != GGML_LOG_LEVEL_DEBUG) {
        log_text += text;
        if (log_text.size() > 1 << 20) {
            log_text.erase(0, log_text.size()/2);
        }
    }
}

std::string take_log() {
    std::lock_guard<std::mutex> lock(log_mutex);
    std::string res;
    std::swap(res, log_text);
    return res;
}
