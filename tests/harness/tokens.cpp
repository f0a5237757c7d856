#include "tokens.h"

#include "ggml-ext.h"
#include "harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

namespace {

double log_sum(const float * x, int n) {
    const double top = *std::max_element(x, x + n);
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += std::exp(x[i] - top);
    }
    return top + std::log(sum);
}

}  // namespace

ggml_type cache_type(const std::string & spec) {
    if (spec == "f32") {
        return GGML_TYPE_F32; // not for command lines
    }
    char err[1024];
    const int32_t id = ggml_ext_type_parse(spec.c_str(), err, sizeof(err));
    if (id < 0) {
        fprintf(stderr, "%s\n", err);
        exit(2);
    }
    return (ggml_type) id;
}

int n_logits(const llama_context * ctx) {
    return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
}

std::vector<float> decode(llama_context * ctx, const std::vector<Token> & tokens, bool encodes) {
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
        const bool ok = (!encodes || llama_encode(ctx, batch) == 0) && llama_decode(ctx, batch) == 0;
        for (size_t i = 0; ok && i < n; i++) {
            if (tokens[first + i].wanted) {
                const float * logits = llama_get_logits_ith(ctx, (int32_t) i);
                res.insert(res.end(), logits, logits + n_logits(ctx));
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

std::vector<double> kl_divergences(const std::vector<float> & a, const std::vector<float> & b, int n, int threads) {
    std::vector<double> res(std::min(a.size(), b.size())/n);
    const auto every = [&](size_t first) {
        for (size_t row = first; row < res.size(); row += threads) {
            const float * of_a = &a[row*n], * of_b = &b[row*n];
            const double za = log_sum(of_a, n), zb = log_sum(of_b, n);
            for (int i = 0; i < n; i++) {
                res[row] += std::exp(of_a[i] - za)*((of_a[i] - za) - (of_b[i] - zb));
            }
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) {
        others.emplace_back(every, i);
    }
    every(0);
    for (std::thread & t : others) {
        t.join();
    }
    return res;
}

double mean(const std::vector<double> & values) {
    return std::accumulate(values.begin(), values.end(), 0.0)/(double) values.size();
}

double largest(const std::vector<double> & values) {
    double res = 0.0;
    for (double v : values) {
        if (std::isnan(v)) {
            return v;
        }
        res = std::max(res, v);
    }
    return res;
}

std::vector<uint8_t> save_state(llama_context * ctx) {
    std::vector<uint8_t> res(llama_state_get_size(ctx));
    const size_t n = llama_state_get_data(ctx, res.data(), res.size());
    check(n == res.size() && n > 0, "a state has the size that was told");
    count("states saved");
    return res;
}

std::vector<uint8_t> save_state(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags) {
    std::vector<uint8_t> res(llama_state_seq_get_size_ext(ctx, seq, flags));
    const size_t n = llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq, flags);
    check(n == res.size() && n > 0, "a sequence's state has the size that was told");
    count("states saved");
    return res;
}

bool restore_state(llama_context * ctx, const std::vector<uint8_t> & state) {
    count("states restored");
    return llama_state_set_data(ctx, state.data(), state.size()) == state.size();
}

bool restore_state(llama_context * ctx, const std::vector<uint8_t> & state, llama_seq_id seq, llama_state_seq_flags flags) {
    count("states restored");
    return llama_state_seq_set_data_ext(ctx, state.data(), state.size(), seq, flags) == state.size();
}
