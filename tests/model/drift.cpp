// kv-drift: how far caches move a model from f16 along a text, for `cargo kv drift`.
//
//     kv-drift -m MODEL.gguf -f TEXT --pair srft4/srft4 [--pair K/V …] [-n 4096] [-c 4096] [--keep 4] [-b 128] [-t THREADS] [-ngl LAYERS]
//
// n tokens of a text are decoded side by side: by a context with an f16 cache, by one with f16 in smaller batches, whose distance
// is noise, and by one for each pair. Where the context of c cells is full, all of them shift as llama-completion does: the
// first `keep` tokens stay, half of the others go. Prints a line for each pair and each bucket of 1024 tokens.

#include "../harness/harness.h"
#include "../harness/tokens.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int BUCKET = 1024;

struct Options {
    std::string              model, text;
    std::vector<std::string> pairs;
    int n = 4096, cells = 4096, keep = 4, batch = 128, threads = 1, gpu_layers = 0;
};

// What is measured of a pair in a bucket.
struct Bucket {
    std::vector<double> klds;
    int                 same_top = 0;
};

struct Runner {
    std::string         name;
    Context             ctx;
    std::vector<Bucket> buckets;
};

[[noreturn]] void fail(const std::string & why) {
    fprintf(stderr, "error: %s\n", why.c_str());
    exit(1);
}

Context new_context(const Options & o, llama_model * model, const std::string & pair, int ubatch) {
    const size_t slash = pair.rfind('/');
    if (slash == std::string::npos) {
        fail(pair + " is not a pair K/V");
    }
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = o.cells;
    p.n_batch         = o.batch;
    p.n_ubatch        = ubatch;
    p.n_threads       = o.threads;
    p.n_threads_batch = o.threads;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.type_k          = cache_type(pair.substr(0, slash));
    p.type_v          = cache_type(pair.substr(slash + 1));
    llama_context * ctx = llama_init_from_model(model, p);
    if (!ctx) {
        fail("no context could be made with " + pair);
    }
    return Context(ctx, llama_free);
}

void shift(llama_context * ctx, int keep, int discard, int n_past) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (!llama_memory_can_shift(memory)) {
        fail("this cache cannot be shifted: give -c as many cells as -n tokens");
    }
    if (!llama_memory_seq_rm(memory, 0, keep, keep + discard)) {
        fail("cells could not be removed");
    }
    llama_memory_seq_add(memory, 0, keep + discard, n_past, -discard);
}

void add(Runner & runner, int bucket, const std::vector<float> & want, const std::vector<float> & got, int n_vocab, int threads) {
    if (got.size() != want.size() || got.empty()) {
        fail("decoding failed with " + runner.name);
    }
    runner.buckets.resize(std::max(runner.buckets.size(), (size_t) bucket + 1));
    Bucket & b = runner.buckets[bucket];
    const std::vector<double> klds = kl_divergences(want, got, n_vocab, threads);
    b.klds.insert(b.klds.end(), klds.begin(), klds.end());
    const auto top = [&](const std::vector<float> & logits, size_t at) {
        return std::max_element(logits.begin() + at, logits.begin() + at + n_vocab) - logits.begin();
    };
    for (size_t at = 0; at < want.size(); at += n_vocab) {
        b.same_top += top(want, at) == top(got, at);
    }
}

std::vector<llama_token> read_tokens(const Options & o, const llama_model * model) {
    std::stringstream text;
    text << std::ifstream(o.text).rdbuf();
    const std::string raw = text.str();
    std::vector<llama_token> tokens(raw.size() + 8);
    const int n = llama_tokenize(llama_model_get_vocab(model), raw.data(), (int32_t) raw.size(), tokens.data(), (int32_t) tokens.size(), true, false);
    if (n < o.n) {
        fail(o.text + " has " + std::to_string(n) + " tokens, " + std::to_string(o.n) + " are needed");
    }
    tokens.resize(o.n);
    return tokens;
}

Options read(int argc, char ** argv) {
    Options o;
    read_options(argc, argv, {
        { "-m",     "MODEL",   [&](const char * x) { o.model = x; } },
        { "-f",     "TEXT",    [&](const char * x) { o.text = x; } },
        { "--pair", "K/V",     [&](const char * x) { o.pairs.push_back(x); } },
        { "-n",     "TOKENS",  [&](const char * x) { o.n = atoi(x); } },
        { "-c",     "CELLS",   [&](const char * x) { o.cells = atoi(x); } },
        { "--keep", "TOKENS",  [&](const char * x) { o.keep = atoi(x); } },
        { "-b",     "TOKENS",  [&](const char * x) { o.batch = atoi(x); } },
        { "-t",     "THREADS", [&](const char * x) { o.threads = atoi(x); } },
        { "-ngl",   "LAYERS",  [&](const char * x) { o.gpu_layers = atoi(x); } },
    });
    if (o.batch < 4 || o.threads < 1 || o.n < o.batch || o.keep < 0 || o.cells < o.keep + 4*o.batch) {
        fail("-b must be at least 4, -n at least -b, and -c at least --keep and four times -b");
    }
    return o;
}

}  // namespace

int main(int argc, char ** argv) {
    const Options o = read(argc, argv);
    llama_log_set(print_errors, nullptr);
    llama_backend_init();
    ggml_backend_load_all();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = o.gpu_layers;
    llama_model * model = llama_model_load_from_file(o.model.c_str(), params);
    if (!model) {
        fail("the model cannot be read: " + o.model);
    }
    const std::vector<llama_token> text = read_tokens(o, model);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    const Context base = new_context(o, model, "f16/f16", o.batch);
    std::vector<Runner> runners;
    runners.push_back({ "noise", new_context(o, model, "f16/f16", o.batch/4), {} });
    for (const std::string & pair : o.pairs) {
        runners.push_back({ pair, new_context(o, model, pair, o.batch), {} });
    }

    int n_past = 0, shifts = 0;
    std::vector<int> shifts_at; // at the end of each bucket
    for (int at = 0; at < o.n; ) {
        // no batch is in two buckets
        const int bucket = at/BUCKET;
        const int size   = std::min({ o.batch, o.n - at, (bucket + 1)*BUCKET - at });
        if (n_past + size > o.cells) {
            const int discard = (n_past - o.keep)/2;
            shift(base.get(), o.keep, discard, n_past);
            for (Runner & r : runners) {
                shift(r.ctx.get(), o.keep, discard, n_past);
            }
            n_past -= discard;
            shifts++;
        }
        std::vector<Token> tokens;
        for (int i = 0; i < size; i++) {
            tokens.push_back({ text[at + i], n_past + i, 0, true });
        }
        const std::vector<float> want = decode(base.get(), tokens);
        if (want.empty()) {
            fail("decoding failed with f16");
        }
        for (Runner & r : runners) {
            add(r, bucket, want, decode(r.ctx.get(), tokens), n_vocab, o.threads);
        }
        n_past += size;
        at     += size;
        shifts_at.resize(bucket + 1);
        shifts_at[bucket] = shifts;
        printf("[%d/%d]\n", at, o.n);
        fflush(stdout);
    }
    for (Runner & r : runners) {
        for (size_t i = 0; i < r.buckets.size(); i++) {
            Bucket & b = r.buckets[i];
            const double kld = mean(b.klds);
            std::nth_element(b.klds.begin(), b.klds.begin() + b.klds.size()/2, b.klds.end());
            printf("bucket\t%s\t%zu\t%zu\t%d\t%.6g\t%.6g\t%d\n", r.name.c_str(), i*BUCKET, b.klds.size(), shifts_at[i], kld,
                   b.klds[b.klds.size()/2], b.same_top);
        }
    }
    runners.clear();
    return 0;
}
