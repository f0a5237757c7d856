// kv-steps: what a step of decoding takes with several pairs of cache types, beside each other.
//
//     kv-steps -m MODEL.gguf --pair f16/f16 --pair srft4/srft4 [--pair K/V …] [--depth 4136] [--tokens 1] [--rounds 200] [-t THREADS] [-ngl LAYERS]
//
// A context for each pair, all of one model and one pool of threads, with `depth` tokens in its cache. They decode the same `tokens` tokens by turns,
// whose cells are removed again, so that a machine that is slower for a while is so for all. Prints milliseconds of the fastest tenth, of the first
// quarter and of the median step of each pair, and how many times as fast as the first pair's they are. The default depth is in the middle of a group of 64
// cells, where writing a key of delta takes more than at its beginning.

#include "../harness/harness.h"
#include "../harness/random.h"
#include "tool.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

struct Options {
    std::string              model;
    std::vector<std::string> pairs;
    int depth = 4136, tokens = 1, rounds = 200, threads = 2, gpu_layers = 0;
};

struct Runner {
    std::string         pair;
    Context             ctx;
    std::vector<double> ms;
};

// One for all contexts: those of their own would go on polling while another context works.
class Threads {
  public:
    explicit Threads(int n) {
        ggml_backend_reg_t cpu = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
        make_ = (decltype(make_)) ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new");
        free_ = (decltype(free_)) ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_free");
        if (!make_ || !free_) {
            fail("the CPU backend has no pools of threads");
        }
        ggml_threadpool_params params = ggml_threadpool_params_default(n);
        pool_ = make_(&params);
    }
    ~Threads() { free_(pool_); }

    ggml_threadpool_t pool() const { return pool_; }

  private:
    decltype(&ggml_threadpool_new)  make_ = nullptr;
    decltype(&ggml_threadpool_free) free_ = nullptr;
    ggml_threadpool_t               pool_ = nullptr;
};

// Milliseconds; the last token wants its logits, as in a chat.
double decode_at(llama_context * ctx, std::vector<llama_token> & tokens, int first, int count) {
    std::vector<Token> batch;
    for (int i = first; i < first + count; i++) {
        batch.push_back({ tokens[i], i, 0, i + 1 == first + count });
    }
    const auto begin = std::chrono::steady_clock::now();
    if (decode(ctx, batch).empty()) {
        fail("decoding failed");
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

double quantile(std::vector<double> x, double of) {
    std::sort(x.begin(), x.end());
    return x[(size_t) (of*(x.size() - 1))];
}

}  // namespace

int main(int argc, char ** argv) {
    Options o;
    read_options(argc, argv, {
        { "-m",       "MODEL",   [&](const char * x) { o.model = x; } },
        { "--pair",   "K/V",     [&](const char * x) { o.pairs.push_back(x); } },
        { "--depth",  "TOKENS",  [&](const char * x) { o.depth = atoi(x); } },
        { "--tokens", "N",       [&](const char * x) { o.tokens = atoi(x); } },
        { "--rounds", "N",       [&](const char * x) { o.rounds = atoi(x); } },
        { "-t",       "THREADS", [&](const char * x) { o.threads = atoi(x); } },
        { "-ngl",     "LAYERS",  [&](const char * x) { o.gpu_layers = atoi(x); } },
    });
    if (o.pairs.empty() || o.depth < 0 || o.tokens < 1 || o.rounds < 1 || o.threads < 1) {
        fail("wanted one --pair or more, --depth of at least 0, and --tokens, --rounds and -t of at least 1");
    }
    const Model model = read_model(o.model, o.gpu_layers);
    const int   batch = std::max(512, o.tokens);
    const Threads threads(o.threads);
    std::vector<Runner> runners;
    for (const std::string & pair : o.pairs) {
        runners.push_back({ pair, new_context(model.get(), pair, { o.depth + o.tokens + 64, batch, batch, o.threads }), {} });
        llama_attach_threadpool(runners.back().ctx.get(), threads.pool(), threads.pool());
    }
    std::vector<llama_token> tokens(o.depth + o.tokens);
    Rng rng(1);
    for (llama_token & t : tokens) {
        t = (llama_token) rng.below(n_logits(runners[0].ctx.get()));
    }
    const int warm_up = 2;
    for (Runner & r : runners) {
        for (int at = 0; at < o.depth; at += 512) {
            decode_at(r.ctx.get(), tokens, at, std::min(512, o.depth - at));
        }
    }
    for (int round = -warm_up; round < o.rounds; round++) {
        for (size_t i = 0; i < runners.size(); i++) {
            Runner & r = runners[(i + (size_t) (round + warm_up)) % runners.size()];
            const double ms = decode_at(r.ctx.get(), tokens, o.depth, o.tokens);
            if (!llama_memory_seq_rm(llama_get_memory(r.ctx.get()), 0, o.depth, -1)) {
                fail("cells of a step could not be removed with " + r.pair);
            }
            if (round >= 0) {
                r.ms.push_back(ms);
            }
        }
    }

    printf("%d tokens a step behind %d, %d threads, %d rounds\n", o.tokens, o.depth, o.threads, o.rounds);
    printf("%-32s %21s   %21s   %21s\n", "K/V", "10%", "25%", "50%");
    for (const Runner & r : runners) {
        printf("%-32s", r.pair.c_str());
        for (const double of : { 0.10, 0.25, 0.50 }) {
            const double mine = quantile(r.ms, of), first = quantile(runners[0].ms, of);
            printf(" %9.3f ms %6.3f x%s", mine, first/mine, of < 0.5 ? "  " : "\n");
        }
    }
    return 0;
}
