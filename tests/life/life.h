// What the subjects of kv-test-life share: tiny models, contexts of them, and texts.
#pragma once

#include "../harness/harness.h"
#include "../harness/random.h"
#include "../harness/tokens.h"

#include "ggml-ext.h"

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

// Given by --gpu-layers: layers of a model that are on the GPU.
extern int gpu_layers;

llama_model * model_of(const Shape & shape);

// contexts

struct Pair {
    std::string k, v;
    std::string name() const { return k + "/" + v; }
};

// Every family on every side that it serves, alone and with others.
std::vector<Pair> all_pairs();
// ggml's blocks of 32 do not divide every head, nor do two bands of 32.
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
    int      recent   = 24; // cells of a sequence that are kept as precise rows, where the types say nothing
    bool     on_cpu   = false; // caches, though layers are on the GPU
};

// Types that need a calibration find one of random matrices beside the model.
Context new_context(const Shape & shape, const Pair & types, const Setup & setup);
void    calibrate_beside(const Shape & shape);

// Tokens of a text that is the same wherever it is asked for.
llama_token token_at(llama_seq_id seq, llama_pos pos);
std::vector<Token> text(llama_seq_id seq, llama_pos from, llama_pos to);

// The same with logits of every token.
std::vector<Token> wanted(std::vector<Token> tokens);

double largest_difference(const std::vector<float> & a, const std::vector<float> & b);
bool   all_finite(const std::vector<float> & x);

// The state of a whole context, or of sequence 0.
std::vector<uint8_t> state_of(llama_context * ctx, bool whole);
// The rows of a sequence's state, behind llama.cpp's magic and number, the header and what it says of cells; empty where it
// has none.
std::vector<uint8_t> rows_of(const std::vector<uint8_t> & state);

// Given by --dir.
const std::string & folder();

// subjects

void test_state();
void test_refusal();
void test_files();
void test_memories();
void test_guard();
void test_history();
void test_walks();
void test_calibrated();
