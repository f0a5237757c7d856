// kv-history: what the history of a cache costs, on a real model.
//
//     kv-history -m MODEL.gguf -f TEXT --pair delta4/f16 [-n 384] [-t THREADS] [--limit 1.1]
//
// Four pieces of a text, n tokens each, are decoded by a context with an f16 cache and by contexts with the given types: fresh, one
// piece at a time; in cells that other texts at other positions have used and left; and as four slots of a server, a token
// of each in turn. Prints the mean KL divergence of the last half of each piece from f16's, and fails where one is beyond
// `--limit` times the fresh one.

#include "../harness/harness.h"
#include "tool.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using Logits = std::vector<float>;  // of the last half of a piece

constexpr int PIECES = 4;

struct Job {
    Model                    model   = Model(nullptr, llama_model_free);
    std::vector<llama_token> tokens;  // pieces of n, then as many that come before
    int                      n       = 384;
    int                      threads = 2;
};

Context new_context(const Job & job, const std::string & pair) {
    return new_context(job.model.get(), pair, { PIECES*(job.n + 64), 512, 512, job.threads, PIECES });
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

std::vector<Logits> fresh(const Job & job, const std::string & pair) {
    std::vector<Logits> res(PIECES);
    for (int piece = 0; piece < PIECES; piece++) {
        decode_piece(job, new_context(job, pair).get(), piece, 0, 0, &res[piece]);
    }
    return res;
}

// Other texts first, the second half of each at positions of its own, then all are removed.
std::vector<Logits> reused(const Job & job, const std::string & pair) {
    std::vector<Logits> res(PIECES);
    Context ctx = new_context(job, pair);
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
std::vector<Logits> slots(const Job & job, const std::string & pair) {
    std::vector<Logits> res(PIECES);
    Context ctx = new_context(job, pair);
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
    const int n = llama_vocab_n_tokens(llama_model_get_vocab(job.model.get()));
    std::vector<double> all;
    for (size_t piece = 0; piece < want.size(); piece++) {
        const std::vector<double> kls = kl_divergences(want[piece], got[piece], n);
        all.insert(all.end(), kls.begin(), kls.end());
    }
    return mean(all);
}

}  // namespace

int main(int argc, char ** argv) {
    Job job;
    std::string model, file;
    std::string pair = "delta4/f16";
    double limit = INFINITY;
    read_options(argc, argv, {
        { "-m",      "MODEL",   [&](const char * x) { model = x; } },
        { "-f",      "TEXT",    [&](const char * x) { file = x; } },
        { "--pair",  "K/V",     [&](const char * x) { pair = x; } },
        { "-n",      "TOKENS",  [&](const char * x) { job.n = atoi(x); } },
        { "-t",      "THREADS", [&](const char * x) { job.threads = atoi(x); } },
        { "--limit", "RATIO",   [&](const char * x) { limit = atof(x); } },
    });
    if (job.n < 2 || job.threads < 1) {
        fail("-n must be at least 2 and -t at least 1");
    }
    job.model  = read_model(model);
    job.tokens = read_tokens(file, job.model.get(), 2*PIECES*job.n);

    const auto want = fresh(job, "f16/f16");
    const double base = divergence(job, want, fresh(job, pair));
    printf("%s: KLD %.5f in a fresh cache\n", pair.c_str(), base);
    bool good = std::isfinite(base);
    const auto report = [&](const char * what, const std::vector<Logits> & got) {
        const double kld = divergence(job, want, got);
        printf("%s: KLD %.5f %s, %.3f of the fresh one\n", pair.c_str(), kld, what, kld/base);
        fflush(stdout);
        good = good && kld <= limit*base;
    };
    report("in cells that other texts have used", reused(job, pair));
    report("as four slots in turns", slots(job, pair));
    return good ? 0 : 1;
}
