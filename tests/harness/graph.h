// Types by name, and graphs of ggml on a backend.
#pragma once

#include "ggml-backend.h"
#include "ggml-ext.h"
#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

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
bool      is_grouped(ggml_type type);  // cells are coded together
double    bits_of(ggml_type type);

// graphs

// Graphs that are made while this lives are on the backend; nullptr, and where there is none: on the CPU's.
class Device {
  public:
    explicit Device(ggml_backend_t backend);
    ~Device();
    Device(const Device &) = delete;
    Device & operator=(const Device &) = delete;
};

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
// The share of bytes that differ.
double differing(const std::vector<uint8_t> & a, const std::vector<uint8_t> & b);
// first, first + 1, …: indices of rows that follow each other
std::vector<int64_t> counting(int64_t first, int64_t n);
