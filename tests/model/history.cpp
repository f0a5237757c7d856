// kv-history: what the history of a cache costs, on a real model.
//
//     kv-history -m MODEL.gguf -f TEXT -k delta4 -v f16 [-n 384] [-t THREADS] [--limit 1.1]
//
// Four pieces of a text, n tokens each, are decoded by a context with an f16 cache and by contexts with the given types: fresh, one
// piece at a time; in cells that other texts at other positions have used and left; and as four slots of a server, a token
// of each in turn. Prints the mean KL divergence of the last half of each piece from f16's, and fails where one is beyond
// `--limit` times the fresh one.

#include "ggml-ext.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;
using Logits  = std::vector<std::vector<float>>;  // of the last half of a piece

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

ggml_type type_of(const char * name) {
    char err[1024];
    const int32_t id = ggml_ext_type_parse(name, err, sizeof(err));
    if (id < 0) {
        fail(err);
    }
    return (ggml_type) id;
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
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(job.model));
    int total = 0;
    for (const Part & p : parts) {
        total += p.to - p.from;
    }
    llama_batch batch = llama_batch_init(total, 0, 1);
    std::vector<Logits *> wants;
    for (const Part & p : parts) {
        for (int i = p.from; i < p.to; i++) {
            const int at = batch.n_tokens++;
            batch.token[at]     = job.tokens[p.piece*job.n + i];
            batch.pos[at]       = p.pos + i - p.from;
            batch.n_seq_id[at]  = 1;
            batch.seq_id[at][0] = p.seq;
            batch.logits[at]    = p.logits && i >= job.n/2;
            wants.push_back(batch.logits[at] ? p.logits : nullptr);
        }
    }
    if (llama_decode(ctx, batch) != 0) {
        fail("decoding failed");
    }
    for (int at = 0; at < batch.n_tokens; at++) {
        if (wants[at]) {
            const float * x = llama_get_logits_ith(ctx, at);
            wants[at]->emplace_back(x, x + n_vocab);
        }
    }
    llama_batch_free(batch);
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

double divergence(const std::vector<Logits> & want, const std::vector<Logits> & got) {
    double sum = 0.0;
    size_t n = 0;
    for (size_t piece = 0; piece < want.size(); piece++) {
        for (size_t i = 0; i < want[piece].size(); i++, n++) {
            const auto & a = want[piece][i], & b = got[piece].at(i);
            const auto log_sum = [](const std::vector<float> & x) {
                const double top = *std::max_element(x.begin(), x.end());
                double sum = 0.0;
                for (const float v : x) {
                    sum += std::exp(v - top);
                }
                return top + std::log(sum);
            };
            const double za = log_sum(a), zb = log_sum(b);
            for (size_t t = 0; t < a.size(); t++) {
                sum += std::exp(a[t] - za)*((a[t] - za) - (b[t] - zb));
            }
        }
    }
    return sum/n;
}

}  // namespace

int main(int argc, char ** argv) {
    Job job = {};
    std::string model, file;
    const char * k = "delta4", * v = "f16";
    double limit = INFINITY;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) {
            fail(std::string("a value is missing after ") + argv[i]);
        }
        const char * value = argv[i + 1];
        if (!strcmp(argv[i], "-m")) {
            model = value;
        } else if (!strcmp(argv[i], "-f")) {
            file = value;
        } else if (!strcmp(argv[i], "-k")) {
            k = value;
        } else if (!strcmp(argv[i], "-v")) {
            v = value;
        } else if (!strcmp(argv[i], "-n")) {
            job.n = atoi(value);
        } else if (!strcmp(argv[i], "-t")) {
            job.threads = atoi(value);
        } else if (!strcmp(argv[i], "--limit")) {
            limit = atof(value);
        } else {
            fail(std::string("what is ") + argv[i] + "? usage: kv-history -m MODEL -f TEXT [-k TYPE] [-v TYPE] [-n TOKENS] [-t THREADS] [--limit RATIO]");
        }
    }
    if (job.n < 2 || job.threads < 1) {
        fail("-n must be at least 2 and -t at least 1");
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
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

    const ggml_type type_k = type_of(k), type_v = type_of(v);
    const auto want = fresh(job, GGML_TYPE_F16, GGML_TYPE_F16);
    const double base = divergence(want, fresh(job, type_k, type_v));
    printf("%s/%s: KLD %.5f in a fresh cache\n", k, v, base);
    bool good = std::isfinite(base);
    const auto report = [&](const char * what, const std::vector<Logits> & got) {
        const double kld = divergence(want, got);
        printf("%s/%s: KLD %.5f %s, %.3f of the fresh one\n", k, v, kld, what, kld/base);
        fflush(stdout);
        good = good && kld <= limit*base;
    };
    report("in cells that other texts have used", reused(job, type_k, type_v));
    report("as four slots in turns", slots(job, type_k, type_v));
    llama_model_free(job.model);
    return good ? 0 : 1;
}
