// kv-history: what the history of a cache costs, on a real model.
//
//     kv-history -m MODEL.gguf -f TEXT -k delta4 -v f16 [-n 384] [-t THREADS] [--limit 1.1]
//
// Four pieces of a text, n tokens each, are decoded by a context with an f16 cache and by contexts with the given types: fresh, one
// piece at a time; in cells that other texts at other positions have used and left; and as four slots of a server, a token
// of each in turn. Prints the mean KL divergence of the last half of each piece from f16's, and fails where one is beyond
// `--limit` times the fresh one.

#include "../harness/harness.h"
#include "../harness/tokens.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Logits = std::vector<float>;  // of the last half of a piece

constexpr int PIECES = 4;

struct Job {
    llama_model *            model;
    std::vector<llama_token> tokens;  // pieces of n, then as many that come before
    int                      n       = 384;
    int                      threads = 2;
};

[[noreturn]] void fail(const std::string & why) {
    fprintf(stderr, "kv-history: %s\n", why.c_str());
    exit(1);
}

Context new_context(const Job & job, ggml_type k, ggml_type v) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = PIECES*(job.n + 64);
    p.n_seq_max       = PIECES;
    p.kv_unified      = true;
    p.n_batch         = 512;
    p.n_threads       = job.threads;
    p.n_threads_batch = job.threads;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.type_k          = k;
    p.type_v          = v;
    llama_context * ctx = llama_init_from_model(job.model, p);
    if (!ctx) {
        fail("no context could be made");
    }
    return Context(ctx, llama_free);
}

// Tokens from..to of a piece as a sequence, at positions from `pos` on; logits are added where they are wanted.
struct Part {
    int          piece, from, to;
    llama_seq_id seq;
    llama_pos    pos;
    Logits *     logits;
};

void decode(const Job & job, llama_context * ctx, const std::vector<Part> & parts) {
    std::vector<Token>    tokens;
    std::vector<Logits *> wants;
    for (const Part & p : parts) {
        for (int i = p.from; i < p.to; i++) {
            const bool wanted = p.logits && i >= job.n/2;
            tokens.push_back({ job.tokens[p.piece*job.n + i], p.pos + i - p.from, p.seq, wanted });
            if (wanted) {
                wants.push_back(p.logits);
            }
        }
    }
    if (wants.empty()) {
        // a batch that fails has no logits: one token must want them
        tokens.back().wanted = true;
        wants.push_back(nullptr);
    }
    const std::vector<float> logits = decode(ctx, tokens);
    const size_t n = (size_t) n_logits(ctx);
    if (logits.size() != wants.size()*n) {
        fail("decoding failed");
    }
    for (size_t i = 0; i < wants.size(); i++) {
        if (wants[i]) {
            wants[i]->insert(wants[i]->end(), &logits[i*n], &logits[i*n] + n);
        }
    }
}

void decode_piece(const Job & job, llama_context * ctx, int piece, llama_seq_id seq, llama_pos pos, Logits * logits) {
    for (int from = 0; from < job.n; from += 128) {
        const int to = std::min(from + 128, job.n);
        decode(job, ctx, { { piece, from, to, seq, pos + from, logits } });
    }
}

std::vector<Logits> fresh(const Job & job, ggml_type k, ggml_type v) {
    std::vector<Logits> res(PIECES);
    for (int piece = 0; piece < PIECES; piece++) {
        decode_piece(job, new_context(job, k, v).get(), piece, 0, 0, &res[piece]);
    }
    return res;
}

// Other texts first, the second half of each at positions of its own, then all are removed.
std::vector<Logits> reused(const Job & job, ggml_type k, ggml_type v) {
    std::vector<Logits> res(PIECES);
    Context ctx = new_context(job, k, v);
    for (int piece = 0; piece < PIECES; piece++) {
        for (llama_seq_id seq = 0; seq < PIECES; seq++) {
            decode_piece(job, ctx.get(), PIECES + (piece + seq)%PIECES, seq, 100*(seq + 1), nullptr);
        }
        llama_memory_seq_rm(llama_get_memory(ctx.get()), -1, -1, -1);
        decode_piece(job, ctx.get(), piece, piece, 0, &res[piece]);
        llama_memory_seq_rm(llama_get_memory(ctx.get()), -1, -1, -1);
    }
    return res;
}

// All pieces at once, a token of each in turn.
std::vector<Logits> slots(const Job & job, ggml_type k, ggml_type v) {
    std::vector<Logits> res(PIECES);
    Context ctx = new_context(job, k, v);
    for (int i = 0; i < job.n; i++) {
        std::vector<Part> parts;
        for (int piece = 0; piece < PIECES; piece++) {
            parts.push_back({ piece, i, i + 1, piece, i, &res[piece] });
        }
        decode(job, ctx.get(), parts);
    }
    return res;
}

double divergence(const Job & job, const std::vector<Logits> & want, const std::vector<Logits> & got) {
    const int n = llama_vocab_n_tokens(llama_model_get_vocab(job.model));
    std::vector<double> all;
    for (size_t piece = 0; piece < want.size(); piece++) {
        const std::vector<double> kls = kl_divergences(want[piece], got[piece], n);
        all.insert(all.end(), kls.begin(), kls.end());
    }
    return mean(all);
}

}  // namespace

int main(int argc, char ** argv) {
    Job job = {};
    std::string model, file;
    std::string k = "delta4", v = "f16";
    double limit = INFINITY;
    read_options(argc, argv, {
        { "-m",      "MODEL",   [&](const char * x) { model = x; } },
        { "-f",      "TEXT",    [&](const char * x) { file = x; } },
        { "-k",      "TYPE",    [&](const char * x) { k = x; } },
        { "-v",      "TYPE",    [&](const char * x) { v = x; } },
        { "-n",      "TOKENS",  [&](const char * x) { job.n = atoi(x); } },
        { "-t",      "THREADS", [&](const char * x) { job.threads = atoi(x); } },
        { "--limit", "RATIO",   [&](const char * x) { limit = atof(x); } },
    });
    if (job.n < 2 || job.threads < 1) {
        fail("-n must be at least 2 and -t at least 1");
    }
    llama_log_set(print_errors, nullptr);
    llama_backend_init();
    ggml_backend_load_all();
    job.model = llama_model_load_from_file(model.c_str(), llama_model_default_params());
    if (!job.model) {
        fail("the model cannot be read: " + model);
    }
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    const std::string raw = text.str();
    job.tokens.resize(raw.size() + 8);
    const int n = llama_tokenize(llama_model_get_vocab(job.model), raw.data(), (int32_t) raw.size(), job.tokens.data(), (int32_t) job.tokens.size(), true, false);
    if (n < 2*PIECES*job.n) {
        fail(file + " has " + std::to_string(n) + " tokens, " + std::to_string(2*PIECES*job.n) + " are needed");
    }

    const ggml_type type_k = cache_type(k), type_v = cache_type(v);
    const auto want = fresh(job, GGML_TYPE_F16, GGML_TYPE_F16);
    const double base = divergence(job, want, fresh(job, type_k, type_v));
    printf("%s/%s: KLD %.5f in a fresh cache\n", k.c_str(), v.c_str(), base);
    bool good = std::isfinite(base);
    const auto report = [&](const char * what, const std::vector<Logits> & got) {
        const double kld = divergence(job, want, got);
        printf("%s/%s: KLD %.5f %s, %.3f of the fresh one\n", k.c_str(), v.c_str(), kld, what, kld/base);
        fflush(stdout);
        good = good && kld <= limit*base;
    };
    report("in cells that other texts have used", reused(job, type_k, type_v));
    report("as four slots in turns", slots(job, type_k, type_v));
    llama_model_free(job.model);
    return good ? 0 : 1;
}
