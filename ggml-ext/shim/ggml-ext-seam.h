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

#define GGML_EXT_PRODUCT 0x6b766d6d
#define GGML_EXT_CENTER  0x6b766365

#ifdef __cplusplus
#    include <stdexcept>
#    include <string>
#    include <vector>
extern "C" {
#endif

// base

// The traits of any id outside ggml's own table, never NULL: a concrete type, a family or a spec (block size 1, type
// size 0), or a placeholder named "unknown".
const struct ggml_type_traits * ggml_ext_type_traits(enum ggml_type type);

// A type that a tensor may have.
bool ggml_ext_is_concrete(enum ggml_type type);

// ggml_quantize_chunk for a concrete type whose rows stand alone: the bytes written, 0 for other ids.
size_t ggml_ext_quantize(enum ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row);

// Does this op compute with one of our types? (Views do not compute.)
bool ggml_ext_concerns(const struct ggml_tensor * op);

// Ops of calibrated caches that the library has too where they are computed on a CPU; other devices see ordinary ones. The mark is in the
// last of an op's parameters, which these ops do not use.
static inline void ggml_ext_mark(struct ggml_tensor * op, int32_t mark) {
    op->op_params[GGML_MAX_OP_PARAMS/sizeof(op->op_params[0]) - 1] = mark;
}
static inline bool ggml_ext_is_marked(const struct ggml_tensor * op, int32_t mark) {
    return op->op_params[GGML_MAX_OP_PARAMS/sizeof(op->op_params[0]) - 1] == mark;
}

// A MUL_MAT of f16 matrices and f32 rows.
static inline void ggml_ext_mark_product(struct ggml_tensor * op) { ggml_ext_mark(op, GGML_EXT_PRODUCT); }
static inline bool ggml_ext_is_product(const struct ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT && ggml_ext_is_marked(op, GGML_EXT_PRODUCT);
}

// A SUB of values and the centers of their heads, and an ADD of these to the result of an attention.
static inline void ggml_ext_mark_center(struct ggml_tensor * op) { ggml_ext_mark(op, GGML_EXT_CENTER); }
static inline bool ggml_ext_is_centering(const struct ggml_tensor * op) { return op->op == GGML_OP_SUB && ggml_ext_is_marked(op, GGML_EXT_CENTER); }
static inline bool ggml_ext_is_uncentering(const struct ggml_tensor * op) { return op->op == GGML_OP_ADD && ggml_ext_is_marked(op, GGML_EXT_CENTER); }

// Has this device code for our types? Backends that know nothing of them may claim their ops by what they exclude.
bool ggml_ext_device_serves(ggml_backend_dev_t dev);

// RPC. What a server says of our types in its greeting: a version, 0 where one of its devices does not serve them.
uint8_t ggml_ext_rpc_greeting(const ggml_backend_t * backends, size_t n);
// A client has been greeted.
void ggml_ext_rpc_greeted(const char * endpoint, uint8_t greeting);
// Does that server have the types that this library has?
bool ggml_ext_rpc_serves(const char * endpoint);

// The type of one layer of a cache, resolved from what the user asked for, and asked of the device that holds the
// layer (NULL: the CPU). GGML_TYPE_COUNT, with a message, where it cannot be.
enum ggml_type ggml_ext_cache_type_for(enum ggml_type type, char side, const struct ggml_ext_layer * layer,
                                       ggml_backend_dev_t dev, char * err, size_t err_size);

// Has a layer of any cache of this process had a type whose cells are coded together?
bool ggml_ext_groups_in_use(void);

// Says in the log what of a spec changes nothing on a model (ggml_ext_idle_parts).
void ggml_ext_warn_of_idle_parts(enum ggml_type type, char side, const uint8_t * layers, int32_t n_layer);

// Values of a small tensor of the model, wherever it lies: how many were read, 0 where it has none to read.
size_t ggml_ext_read_floats(const struct ggml_tensor * t, int64_t first, int64_t n, float * dst);

// Is there for every op of a graph that computes with our types a backend that serves it? The scheduler aborts where not.
bool ggml_ext_graph_served(struct ggml_cgraph * graph, const ggml_backend_t * backends, size_t n, char * err, size_t err_size);

// Does the device attend to precise rows of these types beside a K and V of a layer?
bool ggml_ext_device_attends_recent(ggml_backend_dev_t dev, const struct ggml_tensor * k, const struct ggml_tensor * v,
                                    enum ggml_type recent_k, enum ggml_type recent_v, int64_t n_head);

// What the log says of one side of a cache: "srft4 x28 + f16 x2, 5.27 bits/value", or ggml's name of the type alone.
// `recent_bytes` are those of its precise rows, of so many slots a stream.
void ggml_ext_cache_mix_of(const struct ggml_tensor * const * layers, int n, size_t recent_bytes, uint32_t recent_slots, char * text, size_t size);

// CPU

const struct ggml_type_traits_cpu * ggml_ext_type_traits_cpu(enum ggml_type type);

// Carries our ops into the CPU backend's list of extras. It holds no tensor: nothing can be allocated from it.
ggml_backend_buffer_type_t ggml_ext_cpu_buffer_type(void);

bool ggml_ext_cpu_supports_op(const struct ggml_tensor * op);

// Rows that are written and products, from node `first` on, one behind the other without a wait between threads: as long as none meets
// the memory of another, except for keys that each thread writes as it multiplied them. How many nodes behind `first` are done; 0, and
// nothing is, where there is but one such op. It is asked about every node, and prefetches the matrices of products that come next.
int ggml_ext_cpu_fuse(const struct ggml_cgraph * graph, int first, const struct ggml_compute_params * params);

// How many waits of all threads ggml_ext_cpu_fuse has left out in this process: for tests.
int64_t ggml_ext_cpu_waits_saved(void);

// Families and concrete types alike, without asking the table; not specs, which no tensor has.
static inline bool ggml_ext_is_ours(enum ggml_type type) {
    return (uint32_t) type >= GGML_EXT_TYPE_BASE && (uint32_t) type < GGML_EXT_TYPE_LIMIT;
}

#ifdef __cplusplus
}

// What the guard looks at in one layer of a model.
struct ggml_ext_layer_weights {
    std::vector<float> k_bias, q_norm, k_norm;

    template <typename Layer, typename Hparams> ggml_ext_layer_weights(const Layer & layer, const Hparams & hparams, uint32_t il) {
        if (hparams.no_alloc || hparams.is_mla()) {
            return; // nothing is loaded; MLA keeps latents, and its fields of these names are other things
        }
        const int64_t n_k = hparams.n_embd_k_gqa(il);
        if (layer.wqkv_b) {
            read(k_bias, layer.wqkv_b, (int64_t) hparams.n_embd_head_k(il)*hparams.n_head(il), n_k);
        } else if (layer.wk_b && ggml_nelements(layer.wk_b) == n_k) {
            read(k_bias, layer.wk_b, 0, n_k);
        }
        if (layer.attn_q_norm && layer.attn_k_norm) {
            read(q_norm, layer.attn_q_norm, 0, ggml_nelements(layer.attn_q_norm));
            read(k_norm, layer.attn_k_norm, 0, ggml_nelements(layer.attn_k_norm));
        }
    }

  private:
    static void read(std::vector<float> & dst, const ggml_tensor * t, int64_t first, int64_t n) {
        dst.resize(n);
        dst.resize(ggml_ext_read_floats(t, first, n, dst.data()));
    }
};

// ggml_ext_cache_type_for as llama_kv_cache wants it: its constructor throws.
template <typename Model, typename Hparams>
ggml_type ggml_ext_cache_type(ggml_type type, char side, const Model & model, const Hparams & hparams, uint32_t il, ggml_backend_dev_t dev) {
    if ((uint32_t) type < GGML_TYPE_COUNT) {
        return type;
    }
    const ggml_ext_layer_weights weights(model.layers[il], hparams, il);

    ggml_ext_layer layer = {};
    layer.scale     = hparams.f_attention_scale;
    layer.k_bias    = weights.k_bias.data();
    layer.n_k_bias  = (int32_t) weights.k_bias.size();
    layer.q_norm    = weights.q_norm.data();
    layer.n_q_norm  = (int32_t) weights.q_norm.size();
    layer.k_norm    = weights.k_norm.data();
    layer.n_k_norm  = (int32_t) weights.k_norm.size();
    layer.index     = (int32_t) il;
    layer.n_layer   = (int32_t) model.hparams.n_layer(); // the model's: some caches get hparams of their own
    layer.head_size = (int32_t) (side == 'k' ? hparams.n_embd_head_k(il) : hparams.n_embd_head_v(il));
    layer.sliding   = hparams.is_swa(il);

    char err[1024];
    const ggml_type res = ggml_ext_cache_type_for(type, side, &layer, dev, err, sizeof(err));
    if (res == GGML_TYPE_COUNT) {
        throw std::runtime_error(err);
    }
    return res;
}

// The tensors of one side of a cache, without the layers that have none.
template <typename Layers> std::vector<const ggml_tensor *> ggml_ext_cache_tensors(char side, const Layers & layers) {
    std::vector<const ggml_tensor *> res;
    for (const auto & layer : layers) {
        if (const ggml_tensor * t = side == 'k' ? layer.k : layer.v) {
            res.push_back(t);
        }
    }
    return res;
}

template <typename Layers, typename Recent>
std::string ggml_ext_cache_mix(ggml_type type, char side, const Layers & layers, const Recent & recent) {
    const auto tensors = ggml_ext_cache_tensors(side, layers);
    char text[1024];
    ggml_ext_cache_mix_of(tensors.data(), (int) tensors.size(), recent.bytes(side), recent.slots(), text, sizeof(text));
    return tensors.empty() ? ggml_type_name(type) : text;
}

// Upstream rotates all layers of a cache or none: it does where a layer has one of its quantized types. The others are
// then rotated too, which changes neither scores nor sums. Our types need it for none: they rotate inside.
template <typename Layers> bool ggml_ext_cache_wants_rotation(char side, const Layers & layers) {
    for (const ggml_tensor * t : ggml_ext_cache_tensors(side, layers)) {
        if (ggml_is_quantized(t->type) && !ggml_ext_is_ours(t->type)) {
            return true;
        }
    }
    return false;
}

// Is a K row of this type, in a cache of these layers, one piece? Ours are, and so is a float row that upstream rotates
// for the sake of other layers.
template <typename Layers> bool ggml_ext_cache_whole_rows(ggml_type type, const Layers & layers) {
    return ggml_ext_is_ours(type) || (!ggml_is_quantized(type) && ggml_ext_cache_wants_rotation('k', layers));
}

// ggml_ext_check_cache as llama_init_from_model wants it: empty, or why not.
template <typename Model>
std::string ggml_ext_check_context(ggml_type type_k, ggml_type type_v, const Model & model, bool flash_attn_off) {
    const auto & hparams = model.hparams;
    std::vector<uint8_t> layers(hparams.n_layer());
    // recurrent layers keep no K and V, except where all are: then each has attention beside it, or none has
    bool all_recurrent = true;
    for (uint32_t il = 0; il < layers.size(); il++) {
        all_recurrent = all_recurrent && hparams.is_recr(il);
    }
    for (uint32_t il = 0; il < layers.size(); il++) {
        const bool keeps = hparams.has_kv(il) && hparams.n_head_kv(il) > 0 && (all_recurrent || !hparams.is_recr(il));
        layers[il] = !keeps ? '-' : hparams.is_swa(il) ? 'w' : 'a';
    }
    const int32_t n_layer = (int32_t) layers.size();

    char err[1024];
    const bool ok = ggml_ext_check_cache((int32_t) type_k, (uint32_t) type_k < GGML_TYPE_COUNT,
                                         (int32_t) type_v, (uint32_t) type_v < GGML_TYPE_COUNT,
                                         n_layer, model.arch_name().c_str(), flash_attn_off, err, sizeof(err));
    if (!ok) {
        return err;
    }
    ggml_ext_warn_of_idle_parts(type_k, 'K', layers.data(), n_layer);
    ggml_ext_warn_of_idle_parts(type_v, 'V', layers.data(), n_layer);
    return "";
}

// ggml_ext_graph_served as llama_context wants it when it reserves a graph: it throws.
inline void ggml_ext_check_graph(ggml_cgraph * graph, const std::vector<ggml_backend_t> & backends) {
    char err[1024];
    if (!ggml_ext_graph_served(graph, backends.data(), backends.size(), err, sizeof(err))) {
        throw std::runtime_error(err);
    }
}

// The type of an indexer's cache beside attention's of this type: it holds no K or V, and what models do with its rows is
// not what our types serve.
inline ggml_type ggml_ext_indexer_type(ggml_type type_k) {
    return (uint32_t) type_k < GGML_TYPE_COUNT ? type_k : GGML_TYPE_F16;
}
#endif
