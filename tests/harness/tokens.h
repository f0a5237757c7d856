// Contexts of llama.cpp: tokens in, logits and states out.
#pragma once

#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;

// Of the name or spec of a cache type; ends the program where there is no such type.
ggml_type cache_type(const std::string & spec);

struct Token {
    llama_token  token;
    llama_pos    pos;
    llama_seq_id seq;
    bool         wanted; // its logits
};

// The logits of those that want them, one after the other; empty where decoding failed. Models with an encoder encode each
// batch first.
std::vector<float> decode(llama_context * ctx, const std::vector<Token> & tokens, bool encodes = false);

// The number of logits of a token.
int n_logits(const llama_context * ctx);

// The KL divergence of each distribution of b from that of a; `n` logits are one distribution, which a thread takes.
std::vector<double> kl_divergences(const std::vector<float> & a, const std::vector<float> & b, int n, int threads = 1);
double mean(const std::vector<double> & values);
double largest(const std::vector<double> & values); // NaN where one of them is; 0 where there is none

// States of all sequences, and of one.
std::vector<uint8_t> save_state(llama_context * ctx);
std::vector<uint8_t> save_state(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags = 0);
bool restore_state(llama_context * ctx, const std::vector<uint8_t> & state);
bool restore_state(llama_context * ctx, const std::vector<uint8_t> & state, llama_seq_id seq, llama_state_seq_flags flags = 0);
