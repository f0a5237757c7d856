// kv-drift: how far caches move a model from f16 along a text, for `cargo kv drift`.
//
//     kv-drift -m MODEL.gguf -f TEXT --pair srft4/srft4 [--pair K/V …] [-n 4096] [-c 4096] [--keep 4] [-b 128] [-t THREADS] [-ngl LAYERS]
//
// n tokens of a text are decoded side by side: by a context with an f16 cache, by one with f16 in smaller batches, whose distance
// is noise, and by one for each pair. Where the context of c cells is full, all of them shift as llama-completion does: the
// first `keep` tokens stay, half of the others go. Prints a line for each pair and each bucket of 1024 tokens.

#include "../harness/harness.h"
#include "tool.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
    const Model model = read_model(o.model, o.gpu_layers);
    const std::vector<llama_token> text = read_tokens(o.text, model.get(), o.n);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));

    const ContextSize size = { o.cells, o.batch, o.batch, o.threads };
    const Context base = new_context(model.get(), "f16/f16", size);
    std::vector<Runner> runners;
    runners.push_back({ "noise", new_context(model.get(), "f16/f16", { o.cells, o.batch, o.batch/4, o.threads }), {} });
    for (const std::string & pair : o.pairs) {
        runners.push_back({ pair, new_context(model.get(), pair, size), {} });
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
    return 0;
}
