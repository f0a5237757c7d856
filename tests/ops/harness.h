// What every subject shares: counting checks, deterministic values, and a graph on the CPU backend.
#pragma once

#include "ggml-backend.h"
#include "ggml-ext.h"
#include "ggml.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// cases

extern bool quick;  // --quick: a subset that still meets every op and every type

// True where --filter lets this case run; checks that follow are counted under its name.
bool begin_case(const std::string & name);
void check(bool ok, const std::string & what);
// `value` <= `bound`, NaN fails; the largest ratio of each `what` is printed at the end with --verbose.
void check_below(double value, double bound, const std::string & what);
void skip(const std::string & why);

// types

struct Family {
    std::string name;
    bool        serves_k;
    bool        serves_v;
};

const std::vector<Family> &          families();
const std::vector<const ggml_ext_type *> & concrete_types();
// The type of a family ("srft4") at a head size, or ggml's type of that name ("f16"); GGML_TYPE_COUNT for none.
ggml_type type_for(const std::string & name, int head_size);
bool      is_ours(ggml_type type);
double    bits_of(ggml_type type);

// values

struct Rng {
    uint64_t state;
    explicit Rng(uint64_t seed) : state(seed*0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull) {}
    uint64_t next();
    int64_t  below(int64_t n) { return (int64_t) (next() % (uint64_t) n); }
    float    uniform();  // [0, 1)
    float    normal();
    std::vector<float>   normals(size_t n, float scale = 1.0f);
    std::vector<int64_t> distinct(size_t n, int64_t below);  // in random order
};

uint64_t seed_of(const std::string & text);

// graphs

// Graphs made from now on live on this backend; the CPU's where nothing was said, or nullptr.
void run_on(ggml_backend_t backend);

// All tensors of a graph live in one buffer of their own; nothing is reused, so every intermediate can be read.
class Graph {
  public:
    Graph();
    ~Graph();

    ggml_context * ctx() const { return ctx_; }
    void           add(ggml_tensor * node);  // in the order of calls, as llama.cpp orders writes and reads

    void allocate(uint8_t fill);
    // False, and a failed check, where the backend would not take a node.
    bool compute(int n_threads = 2);

    static bool supports(const ggml_tensor * op);  // by the backend that graphs are made on now

  private:
    ggml_backend_t        backend_;
    ggml_context *        ctx_;
    ggml_cgraph *         graph_;
    ggml_backend_buffer_t buffer_ = nullptr;
};

void set_floats(ggml_tensor * t, const std::vector<float> & values);  // f32, f16
void set_indices(ggml_tensor * t, const std::vector<int64_t> & values);  // i32, i64
void set_bytes(ggml_tensor * t, const std::vector<uint8_t> & bytes);
std::vector<float>   get_floats(const ggml_tensor * t);  // f32, f16
std::vector<uint8_t> get_bytes(const ggml_tensor * t);

// subjects

void test_accessors();
void test_spec();
void test_rows();
void test_groups();
void test_attention();
void test_mul_mat();
void test_canary();
void test_refusal();
void test_crafted();
