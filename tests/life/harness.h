// What every subject shares: counting checks, a tiny model, contexts of it, and what they say.
#pragma once

#include "ggml-ext.h"
#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

extern bool quick;  // --quick: fewer walks
extern bool soak;   // --soak: many more
extern bool verbose;

// cases

bool begin_case(const std::string & name);
void check(bool ok, const std::string & what);
// `value` <= `bound`, NaN fails.
void check_below(double value, double bound, const std::string & what);
// Things tried that are not checks of their own: printed at the end.
void count(const std::string & what, int64_t n = 1);

struct Rng {
    uint64_t state;
    explicit Rng(uint64_t seed) : state(seed*0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull) {}
    uint64_t next();
    int64_t  below(int64_t n) { return (int64_t) (next() % (uint64_t) n); }
    float    uniform();  // [0, 1)
    float    normal();
};

// models

// Random weights; made when first asked for, in the folder given by --dir.
struct Shape {
    const char * name;
    const char * arch;      // "llama", "gemma2" (every other layer has a window), "qwen2" (biases), "qwen3" (norms)
    int          n_layer;
    int          n_head;
    int          n_head_kv;
    int          head_size;
    int          window;
};

extern const Shape HEADS_OF_64, HEADS_OF_128, HEADS_OF_80, WINDOWED;
// Their keys are large in one layer, by its bias or by its norms.
extern const Shape BIASED, BIASED_FUSED, NORMED;
constexpr int LARGE_LAYER = 1;
constexpr int N_VOCAB = 256;

llama_model * model_of(const Shape & shape);

// contexts

struct Pair {
    std::string k, v;
    std::string name() const { return k + "/" + v; }
};

// Every family on every side that it serves, alone and with others.
std::vector<Pair> all_pairs();
// ggml's blocks of 32 do not divide every head.
bool serves(const Pair & types, const Shape & shape);
// Coded by their neighbours, some layer at least.
bool is_grouped(const Pair & types);
// What K and V of a pair may lose on these models, as the mean KL of many distributions.
double loss_of(const Pair & types);

struct Setup {
    uint32_t cells   = 512;
    uint32_t n_seq   = 1;
    bool     unified = true;
    int      threads = 1;
    bool     swa_full = false;
};

using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;
Context new_context(const Shape & shape, const Pair & types, const Setup & setup);

struct Token {
    llama_token  token;
    llama_pos    pos;
    llama_seq_id seq;
    bool         wanted;  // its logits
};

// The logits of those that want them, one after the other; empty where decoding failed.
std::vector<float> decode(llama_context * ctx, const std::vector<Token> & tokens);
// Tokens of a text that is the same wherever it is asked for.
llama_token token_at(llama_seq_id seq, llama_pos pos);
std::vector<Token> text(llama_seq_id seq, llama_pos from, llama_pos to);

// of the distributions that two rows of logits stand for
double kl_divergence(const float * a, const float * b);
double largest_difference(const std::vector<float> & a, const std::vector<float> & b);
bool   all_finite(const std::vector<float> & x);

// What the log has said since it was last asked.
std::string take_log();
// llama.cpp's log goes here.
void take_down(ggml_log_level level, const char * text, void * data);

const std::string & folder();

// subjects

void test_state();
void test_refusal();
void test_files();
void test_memories();
void test_guard();
void test_history();
void test_walks();
