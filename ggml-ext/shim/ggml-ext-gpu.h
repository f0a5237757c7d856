// What the shims of GPU backends share: tensors as the kernels see them (shaders/kv_args.h), and what is refused, with its
// reason.
#pragma once

#include "ggml-ext-seam.h"

#include "../shaders/kv_args.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace ggml_ext_gpu {

struct backend {
    const char * name;
    int          float_step; // sizes of rows of floats are multiples of it
};

inline int divided(int64_t a, int64_t b) {
    return (int) ((a + b - 1)/b);
}

// One side of an attention, or the cache of a row op.
struct rows_of {
    uint32_t kind;
    int      size;  // values of a head
    int      width; // values of its row in the domain that scores and sums are taken in
    size_t   bytes; // of the row of a head
};

// The family's smallest type stands for all its sizes; ggml's types stand for themselves.
inline uint32_t kind_of(ggml_type type) {
    return ggml_ext_is_ours(type) ? GGML_EXT_TYPE_BASE + (type - GGML_EXT_TYPE_BASE)/16*16 : type;
}

inline rows_of describe(const ggml_tensor * t) {
    const uint32_t kind = kind_of(t->type);
    const int      size = ggml_ext_is_ours(t->type) ? (int) ggml_blck_size(t->type) : (int) t->ne[0];
    const size_t bytes = ggml_ext_is_ours(t->type) ? ggml_type_size(t->type) : ggml_row_size(t->type, size);
    return { kind, size, KV_WIDTH(kind, size), bytes };
}

inline bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// What a backend's kernels know: ours at every head size, ggml's where their steps fit.
inline bool is_known(const rows_of & r, const backend & b) {
    switch (r.kind) {
        case KV_KIND_F32:
        case KV_KIND_F16:
        case KV_KIND_BF16:
            return r.size % b.float_step == 0 && r.size <= KV_LARGEST_SIZE;
        case KV_KIND_Q8_0:
        case KV_KIND_Q4_0:
            return r.size % 32 == 0 && r.size <= KV_LARGEST_SIZE;
        default:
            return KV_KIND_IS_SERVED(r.kind);
    }
}

// A type whose rows mean nothing without their group.
inline bool is_grouped(ggml_type type) {
    return ggml_ext_is_ours(type) && ggml_ext_type_get(type)->group_cells > 1;
}

// Where the cells of a tensor lie in the cache that it is a view of: groups are counted from the beginning of a stream.
struct cells_of {
    uint32_t cells;      // of a stream
    uint32_t first_cell;
    uint64_t step;       // bytes from cell to cell
    int      heads;
    int      streams;
    bool     whole;      // the tensor begins with the first head of a cell
};

inline cells_of cells(const ggml_tensor * t) {
    const ggml_tensor * cache = t->view_src ? t->view_src : t;
    const size_t offset = t->view_src ? t->view_offs : 0;
    cells_of res = {};
    res.cells      = (uint32_t) cache->ne[1];
    res.first_cell = (uint32_t) (offset/cache->nb[1]);
    res.step       = cache->nb[1];
    res.heads      = (int) (cache->nb[1]/ggml_type_size(cache->type));
    res.streams    = (int) (cache->ne[2]*cache->ne[3]);
    res.whole      = offset % cache->nb[1] == 0;
    return res;
}

// refusals: empty where there is nothing to say

inline std::string refuse_cache(const backend & b, const ggml_tensor * cache) {
    const rows_of r = describe(cache);
    if (!ggml_ext_is_ours(cache->type) || !is_known(r, b)) {
        return std::string("there is no ") + b.name + " kernel for rows of " + ggml_type_name(cache->type);
    }
    if (cache->ne[0] % r.size != 0 || cache->nb[0] != ggml_type_size(cache->type)) {
        return "a cache row that is not made of whole heads";
    }
    if (is_grouped(cache->type) && (!cells(cache).whole || cells(cache).first_cell % cells(cache).cells != 0)) {
        return "cells that are coded together, not from the beginning of a stream";
    }
    return "";
}

inline std::string refuse_floats(const ggml_tensor * t) {
    if (!is_float(t->type)) {
        return std::string("rows of ") + ggml_type_name(t->type) + " on the other side";
    }
    return "";
}

// `floats` are as wide as the cache's rows, and `index` says which of those.
inline std::string refuse_rows(const backend & b, const ggml_tensor * cache, const ggml_tensor * floats, const ggml_tensor * index) {
    const std::string why = refuse_cache(b, cache);
    if (!why.empty()) {
        return why;
    }
    if (floats->ne[0] != cache->ne[0]) {
        return "rows of another width";
    }
    if (index->type != GGML_TYPE_I64 && index->type != GGML_TYPE_I32) {
        return "row numbers that are neither i64 nor i32";
    }
    return "";
}

inline std::string refuse_set_rows(const backend & b, const ggml_tensor * op) {
    const std::string why = refuse_rows(b, op, op->src[0], op->src[1]);
    return !why.empty() ? why : refuse_floats(op->src[0]);
}

inline std::string refuse_get_rows(const backend & b, const ggml_tensor * op) {
    const std::string why = refuse_rows(b, op->src[0], op, op->src[1]);
    return !why.empty() ? why : op->type != GGML_TYPE_F32 ? "rows to another type than f32" : "";
}

inline std::string refuse_copy(const backend & b, const ggml_tensor * op) {
    const ggml_tensor * src = op->src[0];
    const bool from_ours = ggml_ext_is_ours(src->type), to_ours = ggml_ext_is_ours(op->type);
    if (from_ours && to_ours && src->type != op->type) {
        return "a copy from one of our types to another";
    }
    for (const ggml_tensor * t : { src, op }) {
        const std::string why = ggml_ext_is_ours(t->type) ? refuse_cache(b, t) : refuse_floats(t);
        if (!why.empty()) {
            return why;
        }
    }
    const int size = (int) ggml_blck_size(from_ours ? src->type : op->type);
    if (ggml_nelements(src) != ggml_nelements(op)) {
        return "a copy between tensors of different sizes";
    }
    if (src->ne[0] % size != 0 || op->ne[0] % size != 0) {
        return "a copy in which heads do not lie in one row";
    }
    // bytes of a group mean what they do in their order alone
    if (is_grouped(src->type) && is_grouped(op->type) && !(ggml_is_contiguous(src) && ggml_is_contiguous(op))) {
        return "a copy of cells that are coded together, out of their order";
    }
    return "";
}

// Sources of an attention beside those of ggml: precise rows of recent cells, of a window and of the batch itself.
enum { SRC_WINDOW_K = 5, SRC_WINDOW_V, SRC_CELLS, SRC_BATCH_K, SRC_BATCH_V };

inline bool has_recent(const ggml_tensor * op) {
    return std::any_of(op->src + SRC_WINDOW_K, op->src + SRC_BATCH_V + 1, [](const ggml_tensor * t) { return t != nullptr; });
}

inline std::string refuse_pieces(const ggml_tensor * t) {
    if (t->nb[0] != ggml_type_size(t->type)) {
        return "rows that are not in one piece";
    }
    // kernels read four floats at once
    if (is_float(t->type) && (t->nb[1] | t->nb[2] | t->nb[3] | t->view_offs) % (4*ggml_type_size(t->type)) != 0) {
        return "rows of floats that are not aligned to four";
    }
    return "";
}

inline std::string refuse_recent(const ggml_tensor * op) {
    const ggml_tensor * k = op->src[1], * v = op->src[2], * cells = op->src[SRC_CELLS];
    const ggml_tensor * kw = op->src[SRC_WINDOW_K], * kb = op->src[SRC_BATCH_K];
    for (int i = SRC_WINDOW_K; i <= SRC_BATCH_V; i++) {
        const bool needed = i <= SRC_CELLS || op->src[SRC_BATCH_K] || op->src[SRC_BATCH_V];
        if (needed && !op->src[i]) {
            return "precise rows without src[" + std::to_string(i) + "]";
        }
    }
    for (int i : { SRC_WINDOW_K, SRC_BATCH_K }) {
        for (int side : { 0, 1 }) {
            const ggml_tensor * t = op->src[i + side], * main = side == 0 ? k : v;
            if (!t) {
                continue;
            }
            if ((int32_t) t->type != ggml_ext_recent_type((int32_t) main->type)) {
                return std::string("precise rows of ") + ggml_type_name(t->type) + " beside rows of " + ggml_type_name(main->type);
            }
            if (t->ne[0] != main->ne[0] || t->ne[1] != op->src[i]->ne[1] || t->ne[1] < 1 || t->ne[1] >= 1 << 24 || t->ne[2] != main->ne[2] || t->ne[3] != main->ne[3]) {
                return "precise rows in src[" + std::to_string(i + side) + "] whose shape is not that of K and V";
            }
            const std::string why = refuse_pieces(t);
            if (!why.empty()) {
                return why;
            }
        }
    }
    if (cells->type != GGML_TYPE_I64 || (cells->nb[0] | cells->nb[1] | cells->view_offs | (uintptr_t) cells->data) % 8 != 0) {
        return std::string("cells of precise rows as ") + ggml_type_name(cells->type) + ", not aligned i64";
    }
    if (cells->ne[0] != kw->ne[1] + (kb ? kb->ne[1] : 0) || cells->ne[1] != k->ne[3] || cells->ne[2] != 1 || cells->ne[3] != 1) {
        return "another number of cells than of precise rows";
    }
    return "";
}

inline std::string refuse_attention(const backend & b, const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3], * sinks = op->src[4];
    const rows_of kr = describe(k), vr = describe(v);
    if (!is_known(kr, b) || !is_known(vr, b)) {
        return std::string("there is no ") + b.name + " kernel for K of " + ggml_type_name(k->type) + " with V of " + ggml_type_name(v->type);
    }
    if (KV_KIND_K_ONLY(vr.kind)) {
        return std::string("rows of ") + ggml_type_name(v->type) + " cannot be values";
    }
    if (k->ne[0] != kr.size || v->ne[0] > vr.size) {
        return "rows that are not those of one head";
    }
    if ((q->type != GGML_TYPE_F32 && q->type != GGML_TYPE_F16) || q->nb[0] != ggml_type_size(q->type)) {
        return std::string("queries of ") + ggml_type_name(q->type) + ", or not in one piece";
    }
    for (const ggml_tensor * t : { k, v }) {
        const std::string why = refuse_pieces(t);
        if (!why.empty()) {
            return why;
        }
    }
    if (q->ne[0] != k->ne[0] || k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] || k->ne[3] != v->ne[3] ||
        q->ne[2] % k->ne[2] != 0 || q->ne[3] % k->ne[3] != 0) {
        return "shapes of K and V that do not fit";
    }
    if (is_grouped(k->type)) {
        const cells_of c = cells(k);
        if (!c.whole || c.first_cell % 64 != 0 || k->nb[1] != c.step || c.first_cell % c.cells + k->ne[1] > c.cells) {
            return "cells that are coded together, from the middle of a group on";
        }
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1])) {
        return "a mask that is not f16, or too small";
    }
    if (sinks && sinks->type != GGML_TYPE_F32) {
        return "sinks that are not f32";
    }
    if (op->type != GGML_TYPE_F32 || op->nb[0] != 4) {
        return "a result that is not f32";
    }
    return has_recent(op) ? refuse_recent(op) : "";
}

// Why an op that concerns our types is not the backend's, empty where it is. What depends on the device comes on top.
inline std::string refusal(const backend & b, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_SET_ROWS:
            return refuse_set_rows(b, op);
        case GGML_OP_GET_ROWS:
            return refuse_get_rows(b, op);
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            return refuse_copy(b, op);
        case GGML_OP_FLASH_ATTN_EXT:
            return refuse_attention(b, op);
        case GGML_OP_MUL_MAT:
            return std::string("attention over a compressed K runs on ") + b.name + " as flash attention alone (-fa on)";
        default:
            return std::string("there is no ") + b.name + " kernel for this op";
    }
}

inline std::string told(const ggml_tensor * op) {
    std::string res = ggml_op_desc(op);
    for (int i = 0; i < 3 && op->src[i]; i++) {
        res += std::string(i == 0 ? " (" : ", ") + ggml_type_name(op->src[i]->type);
    }
    return res + ") -> " + ggml_type_name(op->type);
}

// The reason to the debug log, and once as a warning: the op will be computed elsewhere, or not at all.
inline void say_refused(const backend & b, const ggml_tensor * op, const std::string & why) {
    const std::string text = told(op) + ": " + why;
    GGML_LOG_DEBUG("ggml-ext: not on %s: %s\n", b.name, text.c_str());

    static std::mutex mutex;
    static std::set<std::string> warned;
    const std::lock_guard<std::mutex> lock(mutex);
    if (warned.insert(text).second) {
        GGML_LOG_WARN("ggml-ext: not on %s: %s\n", b.name, text.c_str());
    }
}

inline void strides(uint64_t (&dst)[3], const ggml_tensor * t, int first = 1) {
    for (int i = 0; i < 3; i++) {
        dst[i] = t->nb[first + i];
    }
}

// `floats` is the side that is not a cache; where both are, the one that is written.
inline kv_rows_args rows_args(const ggml_tensor * cache, const ggml_tensor * floats) {
    const int size = describe(cache).size;
    kv_rows_args args = {};
    args.heads       = (uint32_t) (floats->ne[0]/size);
    args.cache_heads = (uint32_t) (cache->ne[0]/size);
    args.units       = (uint32_t) (ggml_nelements(floats)/size);
    for (int i = 0; i < 3; i++) {
        args.rows[i] = (uint32_t) floats->ne[1 + i];
    }
    args.cache_rows[0] = (uint32_t) cache->ne[1];
    args.cache_rows[1] = (uint32_t) cache->ne[2];
    args.value_step    = floats->nb[0];
    const cells_of c = cells(cache);
    args.cells      = c.cells;
    args.first_cell = c.first_cell;
    args.cell_step  = c.step;
    strides(args.float_nb, floats);
    strides(args.cache_nb, cache);
    return args;
}

// Without the split into chunks.
inline kv_attn_args attention_args(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3];
    float scale, max_bias, softcap;
    memcpy(&scale,    (const float *) op->op_params + 0, sizeof(float));
    memcpy(&max_bias, (const float *) op->op_params + 1, sizeof(float));
    memcpy(&softcap,  (const float *) op->op_params + 2, sizeof(float));

    kv_attn_args args = {};
    args.cells       = (uint32_t) k->ne[1];
    args.heads       = (uint32_t) q->ne[2];
    args.kv_heads    = (uint32_t) k->ne[2];
    args.tokens      = (uint32_t) q->ne[1];
    args.streams     = (uint32_t) q->ne[3];
    args.kv_streams  = (uint32_t) k->ne[3];
    args.out_size    = (uint32_t) v->ne[0];
    args.k_cells     = is_grouped(k->type) ? cells(k).cells - cells(k).first_cell % cells(k).cells : args.cells;
    args.slope_heads = 1u << (uint32_t) std::floor(std::log2(args.heads));
    args.scale       = scale;
    args.softcap     = softcap;
    args.slope_low   = std::pow(2.0f, -max_bias/args.slope_heads);
    args.slope_high  = std::pow(2.0f, -max_bias/2.0f/args.slope_heads);
    args.mask_rows[0] = args.mask_rows[1] = 1;
    strides(args.q_nb, q);
    strides(args.k_nb, k);
    strides(args.v_nb, v);
    strides(args.dst_nb, op);
    args.sum_width   = (uint32_t) describe(v).width;
    args.hidden_words = has_recent(op) ? KV_HIDDEN_WORDS(args.cells) : 0;
    if (mask) {
        args.mask_rows[0] = (uint32_t) mask->ne[2];
        args.mask_rows[1] = (uint32_t) mask->ne[3];
        strides(args.mask_nb, mask);
    }
    return args;
}

// What kv_attn_columns gets. The mask of the columns is for every query stream, since streams of queries may share the cells of one.
inline kv_recent_args recent_args(const ggml_tensor * op, const kv_attn_args & main) {
    const ggml_tensor * cells = op->src[SRC_CELLS], * mask = op->src[3];
    kv_recent_args args = {};
    args.cells         = main.cells;
    args.columns       = (uint32_t) cells->ne[0];
    args.tokens        = mask ? main.tokens : 1;
    args.streams       = main.streams;
    args.kv_streams    = main.kv_streams;
    args.mask_rows[0]  = main.mask_rows[0];
    args.mask_rows[1]  = main.mask_rows[1];
    args.hidden_words  = KV_HIDDEN_WORDS(main.cells);
    args.columns_nb[0] = cells->nb[0];
    args.columns_nb[1] = cells->nb[1];
    args.row_bytes     = GGML_PAD(2*args.columns, 16);
    memcpy(args.mask_nb, main.mask_nb, sizeof(args.mask_nb));
    return args;
}

inline size_t hidden_bytes(const kv_recent_args & args) {
    return sizeof(uint32_t)*args.hidden_words*args.kv_streams;
}

inline size_t columns_mask_bytes(const kv_recent_args & args) {
    return args.row_bytes*args.tokens*args.mask_rows[0]*args.streams;
}

// An attention over precise rows alone, with the mask of their columns.
inline kv_attn_args recent_attention_args(const kv_attn_args & main, const kv_recent_args & recent, const ggml_tensor * k, const ggml_tensor * v) {
    kv_attn_args args = main;
    args.cells        = args.k_cells = (uint32_t) k->ne[1];
    args.hidden_words = 0;
    strides(args.k_nb, k);
    strides(args.v_nb, v);
    args.mask_rows[1] = recent.streams;
    args.mask_nb[0]   = recent.tokens > 1 ? recent.row_bytes : 0;
    args.mask_nb[1]   = recent.row_bytes*recent.tokens;
    args.mask_nb[2]   = args.mask_nb[1]*recent.mask_rows[0];
    return args;
}

}  // namespace ggml_ext_gpu
