// What the patches call: the side of the shim that llama.cpp sees.
//
// Base part (ggml-ext-base.cpp, compiled into ggml-base): the type table as ggml reads it, and what llama.cpp asks
// when it makes a cache. CPU part (ggml-ext-cpu.cpp, compiled into every CPU backend): the ops. Tensors reach the Rust
// library only through these two files.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-ext.h"
#include "ggml.h"

#ifdef __cplusplus
#    include <stdexcept>
#    include <string>
extern "C" {
#endif

// base

// The traits of any id outside ggml's own table, never NULL: a concrete type, a family (block size 1, type size 0),
// or a placeholder named "unknown".
const struct ggml_type_traits * ggml_ext_type_traits(enum ggml_type type);

// A type that a tensor may have.
bool ggml_ext_is_concrete(enum ggml_type type);

// ggml_quantize_chunk for a concrete type whose rows stand alone: the bytes written, 0 for other ids.
size_t ggml_ext_quantize(enum ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row);

// Does this op compute with one of our types? (Views do not compute.)
bool ggml_ext_concerns(const struct ggml_tensor * op);

// Has this device code for our types? Backends that know nothing of them may claim their ops by what they exclude.
bool ggml_ext_device_serves(ggml_backend_dev_t dev);

// The concrete type of one layer of a cache, resolved from what the user asked for, and asked of the device that
// holds the layer (NULL: the CPU). GGML_TYPE_COUNT, with a message, where it cannot be.
enum ggml_type ggml_ext_cache_type_for(enum ggml_type type, char side, int32_t layer, int32_t head_size,
                                       ggml_backend_dev_t dev, char * err, size_t err_size);

// CPU

const struct ggml_type_traits_cpu * ggml_ext_type_traits_cpu(enum ggml_type type);

// Carries our ops into the CPU backend's list of extras. It holds no tensor: nothing can be allocated from it.
ggml_backend_buffer_type_t ggml_ext_cpu_buffer_type(void);

bool ggml_ext_cpu_supports_op(const struct ggml_tensor * op);

// Families and concrete types alike, without asking the table.
static inline bool ggml_ext_is_ours(enum ggml_type type) {
    return (uint32_t) type >= GGML_EXT_TYPE_BASE && (uint32_t) type < GGML_EXT_TYPE_LIMIT;
}

#ifdef __cplusplus
}

// ggml_ext_cache_type_for as llama_kv_cache wants it: its constructor throws.
inline ggml_type ggml_ext_cache_type(ggml_type type, char side, uint32_t layer, uint32_t head_size, ggml_backend_dev_t dev) {
    char err[512];
    const ggml_type res = ggml_ext_cache_type_for(type, side, (int32_t) layer, (int32_t) head_size, dev, err, sizeof(err));
    if (res == GGML_TYPE_COUNT) {
        throw std::runtime_error(err);
    }
    return res;
}

// ggml_ext_check_cache as llama_init_from_model wants it: empty, or why not.
inline std::string ggml_ext_check_context(ggml_type type_k, ggml_type type_v, bool flash_attn_off) {
    char err[512];
    const bool ok = ggml_ext_check_cache((int32_t) type_k, (uint32_t) type_k < GGML_TYPE_COUNT,
                                         (int32_t) type_v, (uint32_t) type_v < GGML_TYPE_COUNT, flash_attn_off, err, sizeof(err));
    return ok ? "" : err;
}
#endif
