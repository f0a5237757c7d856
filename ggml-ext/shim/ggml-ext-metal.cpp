// The shim's part in the Metal backend: ops on our types as dispatches of the kernels in shaders/.
//
// Nothing here computes; it describes tensors to the kernels (shaders/kv_args.h), chooses how an op is split over
// threadgroups, and has Metal compile the kernel for the types at hand when it is first needed. The text of the shaders
// is in the library (ggml_ext_metal_source). What is refused is refused in `refusal`, for supports_op, with a reason.

#include "ggml-ext-metal.h"

#include "../shaders/kv_args.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int    SIMDGROUPS       = 4;   // of a threadgroup
constexpr int    PREFILL_TOKENS   = 16;  // from here on matrices; below, every token reads the cache for itself
constexpr int    THREADGROUPS     = 512; // that a decode should have, where there are cells enough
constexpr size_t THREADGROUP_ROOM = 32*1024;

constexpr const char * SET_GROUPS = "kv_set_groups";

// One side of an attention, or the cache of a row op.
struct rows_of {
    uint32_t kind;
    int      size;  // values of a head
    int      width; // values of its row in the domain that scores and sums are taken in
};

// The family's smallest type stands for all its sizes; ggml's types stand for themselves.
uint32_t kind_of(ggml_type type) {
    return ggml_ext_is_ours(type) ? GGML_EXT_TYPE_BASE + (type - GGML_EXT_TYPE_BASE)/16*16 : type;
}

rows_of describe(const ggml_tensor * t) {
    const uint32_t kind = kind_of(t->type);
    const int      size = ggml_ext_is_ours(t->type) ? (int) ggml_blck_size(t->type) : (int) t->ne[0];
    return { kind, size, KV_KIND_IS_TURBO(kind) ? 2*size : size };
}

bool is_float(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// The shaders know these; ours at every head size, ggml's where a lane's steps fit.
bool is_known(const rows_of & r) {
    switch (r.kind) {
        case KV_KIND_F32:
        case KV_KIND_F16:
        case KV_KIND_BF16:
            return r.size % 8 == 0 && r.size <= KV_LARGEST_SIZE;
        case KV_KIND_Q8_0:
        case KV_KIND_Q4_0:
            return r.size % 32 == 0 && r.size <= KV_LARGEST_SIZE;
        default:
            return KV_KIND_IS_SERVED(r.kind);
    }
}

// A type whose rows mean nothing without their group.
bool is_grouped(ggml_type type) {
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

cells_of cells(const ggml_tensor * t) {
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

struct constant {
    int32_t index;
    int32_t value;
    bool    is_bool;
};

// How an attention is split.
struct attention_plan {
    bool    prefill;
    int     rows;        // query rows of a threadgroup
    int     blocks;      // decode: threadgroups for the heads of a KV head; prefill: blocks of 8 rows
    int     chunk_cells;
    int     chunks;
    size_t  memory;      // bytes of threadgroup memory
};

int divided(int64_t a, int64_t b) {
    return (int) ((a + b - 1)/b);
}

attention_plan plan_of(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2];
    const rows_of kr = describe(k), vr = describe(v);
    const int  widest = std::max(kr.width, vr.width);
    const int  heads_per_kv = (int) (q->ne[2]/k->ne[2]);

    attention_plan plan = {};
    plan.prefill = q->ne[1] >= PREFILL_TOKENS && widest <= KV_PREFILL_WIDEST;
    if (plan.prefill) {
        plan.blocks      = widest <= 256 ? 2 : 1;
        plan.rows        = 8*plan.blocks;
        plan.chunks      = 1;
        plan.chunk_cells = (int) k->ne[1];
        plan.memory      = sizeof(float)*KV_PREFILL_FLOATS(plan.rows, kr.width, vr.width);
        return plan;
    }
    plan.rows   = std::max(1, std::min({ heads_per_kv, KV_ATTN_ROWS, KV_ATTN_VALUES/widest }));
    plan.blocks = divided(heads_per_kv, plan.rows);
    const int64_t others = k->ne[2]*plan.blocks*q->ne[1]*q->ne[3];
    const int     step   = SIMDGROUPS*(is_grouped(k->type) ? 64 : 32); // a turn of all simdgroups
    const int64_t most   = divided(k->ne[1], step);
    const int64_t chunks = std::min<int64_t>(most, divided(THREADGROUPS, others));
    plan.chunk_cells = (int) GGML_PAD(divided(k->ne[1], chunks), step);
    plan.chunks      = divided(k->ne[1], plan.chunk_cells);
    plan.memory      = sizeof(float)*KV_DECODE_FLOATS(plan.rows, SIMDGROUPS, kr.width, vr.width);
    return plan;
}

size_t partials_offset(const ggml_tensor * op) {
    return GGML_PAD(ggml_nbytes(op), 16);
}

// refusals: empty where there is nothing to say

std::string refuse_cache(const ggml_tensor * cache) {
    const rows_of r = describe(cache);
    if (!ggml_ext_is_ours(cache->type) || !is_known(r)) {
        return std::string("there is no Metal kernel for rows of ") + ggml_type_name(cache->type);
    }
    if (cache->ne[0] % r.size != 0 || cache->nb[0] != ggml_type_size(cache->type)) {
        return "a cache row that is not made of whole heads";
    }
    if (is_grouped(cache->type) && (!cells(cache).whole || cells(cache).first_cell % cells(cache).cells != 0)) {
        return "cells that are coded together, not from the beginning of a stream";
    }
    return "";
}

std::string refuse_floats(const ggml_tensor * t) {
    if (!is_float(t->type)) {
        return std::string("rows of ") + ggml_type_name(t->type) + " on the other side";
    }
    return "";
}

// `floats` are as wide as the cache's rows, and `index` says which of those.
std::string refuse_rows(const ggml_tensor * cache, const ggml_tensor * floats, const ggml_tensor * index) {
    const std::string why = refuse_cache(cache);
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

std::string refuse_set_rows(const ggml_tensor * op) {
    const std::string why = refuse_rows(op, op->src[0], op->src[1]);
    return !why.empty() ? why : refuse_floats(op->src[0]);
}

std::string refuse_get_rows(const ggml_tensor * op) {
    const std::string why = refuse_rows(op->src[0], op, op->src[1]);
    return !why.empty() ? why : op->type != GGML_TYPE_F32 ? "rows to another type than f32" : "";
}

std::string refuse_copy(const ggml_tensor * op) {
    const ggml_tensor * src = op->src[0];
    const bool from_ours = ggml_ext_is_ours(src->type), to_ours = ggml_ext_is_ours(op->type);
    if (from_ours && to_ours && src->type != op->type) {
        return "a copy from one of our types to another";
    }
    for (const ggml_tensor * t : { src, op }) {
        const std::string why = ggml_ext_is_ours(t->type) ? refuse_cache(t) : refuse_floats(t);
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

std::string refuse_attention(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3], * sinks = op->src[4];
    const rows_of kr = describe(k), vr = describe(v);
    if (!is_known(kr) || !is_known(vr)) {
        return std::string("there is no Metal kernel for K of ") + ggml_type_name(k->type) + " with V of " + ggml_type_name(v->type);
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
        if (t->nb[0] != ggml_type_size(t->type)) {
            return "rows that are not in one piece";
        }
        // kernels read four floats at once
        if (is_float(t->type) && (t->nb[1] | t->nb[2] | t->nb[3] | t->view_offs) % (4*ggml_type_size(t->type)) != 0) {
            return "rows of floats that are not aligned to four";
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
    if (plan_of(op).memory > THREADGROUP_ROOM) {
        return "rows too wide for threadgroup memory";
    }
    return "";
}

std::string refusal(ggml_metal_device_t dev, const ggml_tensor * op) {
    const ggml_metal_device_props * props = ggml_metal_device_get_props(dev);
    if (!props->has_simdgroup_reduction || !props->has_simdgroup_mm || props->max_theadgroup_memory_size < THREADGROUP_ROOM) {
        return "the GPU has no simdgroup matrices or too little threadgroup memory (an Apple GPU from M1 on is needed)";
    }
    switch (op->op) {
        case GGML_OP_SET_ROWS:
            return refuse_set_rows(op);
        case GGML_OP_GET_ROWS:
            return refuse_get_rows(op);
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            return refuse_copy(op);
        case GGML_OP_FLASH_ATTN_EXT:
            return refuse_attention(op);
        case GGML_OP_MUL_MAT:
            return "attention over a compressed K runs on Metal as flash attention alone (-fa on)";
        default:
            return "there is no Metal kernel for this op";
    }
}

std::string told(const ggml_tensor * op) {
    std::string res = ggml_op_desc(op);
    for (int i = 0; i < 3 && op->src[i]; i++) {
        res += std::string(i == 0 ? " (" : ", ") + ggml_type_name(op->src[i]->type);
    }
    return res + ") -> " + ggml_type_name(op->type);
}

// pipelines

// One library for each shader and device, kept to the end of the process as the devices are.
ggml_metal_library_t library(ggml_metal_device_t dev, const char * shader) {
    static std::mutex mutex;
    static std::map<std::pair<ggml_metal_device_t, std::string>, ggml_metal_library_t> all;

    const std::lock_guard<std::mutex> lock(mutex);
    ggml_metal_library_t & lib = all[{ dev, shader }];
    if (!lib) {
        lib = ggml_metal_library_init_from_source(dev, ggml_ext_metal_source(shader), /*verbose =*/ true);
    }
    if (!lib) {
        GGML_ABORT("ggml-ext: Metal does not compile the shader %s; its message is above", shader);
    }
    return lib;
}

ggml_metal_pipeline_with_params pipeline(ggml_metal_device_t dev, const char * shader, const char * kernel,
                                         const std::vector<constant> & constants) {
    std::string name = kernel;
    for (const constant & c : constants) {
        name += "_" + std::to_string(c.index) + "=" + std::to_string(c.value);
    }
    ggml_metal_library_t lib = library(dev, shader);
    ggml_metal_pipeline_with_params res = ggml_metal_library_get_pipeline(lib, name.c_str());
    if (!res.pipeline) {
        ggml_metal_cv_t cv = ggml_metal_cv_init();
        for (const constant & c : constants) {
            if (c.is_bool) {
                ggml_metal_cv_set_bool(cv, c.value != 0, c.index);
            } else {
                ggml_metal_cv_set_int32(cv, c.value, c.index);
            }
        }
        res = ggml_metal_library_compile_pipeline(lib, kernel, name.c_str(), cv);
        ggml_metal_cv_free(cv);
    }
    if (!res.pipeline) {
        GGML_ABORT("ggml-ext: Metal does not make the pipeline %s; its message is above", name.c_str());
    }
    return res;
}

ggml_metal_buffer_id buffer_of(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);
}

void set_memory(ggml_metal_encoder_t enc, size_t bytes) {
    ggml_metal_encoder_set_threadgroup_memory_size(enc, GGML_PAD(bytes, 16), 0);
}

// ops

void strides(uint64_t (&dst)[3], const ggml_tensor * t, int first = 1) {
    for (int i = 0; i < 3; i++) {
        dst[i] = t->nb[first + i];
    }
}

// `floats` is the side that is not a cache; where both are, the one that is written.
kv_rows_args rows_args(const ggml_tensor * cache, const ggml_tensor * floats) {
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

// The constants of kv_rows.metal.
std::vector<constant> rows_constants(const ggml_tensor * cache, ggml_type other, int index_bytes) {
    const rows_of r = describe(cache);
    return { { 0, (int32_t) r.kind, false }, { 1, r.size, false }, { 2, (int32_t) kind_of(other), false }, { 3, index_bytes, false } };
}

void encode_rows(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const char * kernel, const ggml_tensor * cache,
                 const ggml_tensor * from, const ggml_tensor * index, const ggml_tensor * to) {
    const bool both = ggml_ext_is_ours(from->type) && ggml_ext_is_ours(to->type);
    const ggml_tensor * floats = both || from == cache ? to : from;
    kv_rows_args args = rows_args(cache, floats);
    int index_bytes = 0;
    if (index) {
        index_bytes = index->type == GGML_TYPE_I64 ? 8 : 4;
        args.index_rows[0] = (uint32_t) index->ne[1];
        args.index_rows[1] = (uint32_t) index->ne[2];
        strides(args.index_nb, index, 0);
    }
    const auto p = pipeline(dev, "kv_rows", kernel, rows_constants(cache, both ? GGML_TYPE_F32 : floats->type, index_bytes));
    ggml_metal_encoder_set_pipeline(enc, p);
    ggml_metal_encoder_set_bytes   (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (enc, buffer_of(from), 1);
    ggml_metal_encoder_set_buffer  (enc, buffer_of(index ? index : from), 2);
    ggml_metal_encoder_set_buffer  (enc, buffer_of(to), 3);
    if (strcmp(kernel, SET_GROUPS) == 0) {
        // a simdgroup for each head of each stream
        const cells_of c = cells(cache);
        set_memory(enc, sizeof(float)*KV_DELTA_FLOATS(describe(cache).size));
        ggml_metal_encoder_dispatch_threadgroups(enc, c.heads, c.streams, 1, 32, 1, 1);
        return;
    }
    set_memory(enc, sizeof(float)*SIMDGROUPS*KV_ROWS_FLOATS(describe(cache).size));
    ggml_metal_encoder_dispatch_threadgroups(enc, divided(args.units, SIMDGROUPS), 1, 1, 32*SIMDGROUPS, 1, 1);
}

const char * set_kernel(const ggml_tensor * cache) {
    return is_grouped(cache->type) ? SET_GROUPS : "kv_set_rows";
}

void encode_copy(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const ggml_tensor * op) {
    const ggml_tensor * src = op->src[0];
    if (!ggml_ext_is_ours(src->type)) {
        encode_rows(dev, enc, set_kernel(op), op, src, nullptr, op);
    } else if (!ggml_ext_is_ours(op->type)) {
        encode_rows(dev, enc, "kv_get_rows", src, src, nullptr, op);
    } else {
        encode_rows(dev, enc, "kv_copy_rows", src, src, nullptr, op);
    }
}

kv_attn_args attention_args(const ggml_tensor * op, const attention_plan & plan) {
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
    args.chunk_cells = (uint32_t) plan.chunk_cells;
    args.chunks      = (uint32_t) plan.chunks;
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
    if (mask) {
        args.mask_rows[0] = (uint32_t) mask->ne[2];
        args.mask_rows[1] = (uint32_t) mask->ne[3];
        strides(args.mask_nb, mask);
    }
    return args;
}

void encode_attention(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3], * sinks = op->src[4];
    const rows_of kr = describe(k), vr = describe(v);
    const attention_plan plan = plan_of(op);
    kv_attn_args args = attention_args(op, plan);
    float max_bias;
    memcpy(&max_bias, (const float *) op->op_params + 1, sizeof(float));

    std::vector<constant> constants = {
        { 10, (int32_t) kr.kind, false }, { 11, (int32_t) vr.kind, false }, { 12, kr.size, false }, { 13, vr.size, false },
        { 14, mask != nullptr, true }, { 15, args.softcap != 0.0f, true }, { 16, sinks != nullptr, true },
        { 17, max_bias != 0.0f, true }, { 18, plan.prefill ? plan.blocks : plan.rows, false },
    };
    if (!plan.prefill) {
        constants.push_back({ 19, plan.chunks == 1, true });
    }
    constants.push_back({ 20, (int32_t) kind_of(q->type), false });

    const ggml_metal_buffer_id dst = buffer_of(op);
    const ggml_metal_buffer_id partials = { dst.metal, dst.offs + (plan.chunks > 1 ? partials_offset(op) : 0) };
    // where the op has none, something that is there
    const ggml_metal_buffer_id sinks_or_any = sinks ? buffer_of(sinks) : dst;

    const char * shader = plan.prefill ? "kv_prefill" : "kv_decode";
    ggml_metal_encoder_set_pipeline(enc, pipeline(dev, shader, plan.prefill ? "kv_attn_prefill" : "kv_attn_decode", constants));
    ggml_metal_encoder_set_bytes (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer(enc, buffer_of(q), 1);
    ggml_metal_encoder_set_buffer(enc, buffer_of(k), 2);
    ggml_metal_encoder_set_buffer(enc, buffer_of(v), 3);
    ggml_metal_encoder_set_buffer(enc, mask ? buffer_of(mask) : dst, 4);
    ggml_metal_encoder_set_buffer(enc, sinks_or_any, 5);
    ggml_metal_encoder_set_buffer(enc, dst, 6);
    if (!plan.prefill) {
        ggml_metal_encoder_set_buffer(enc, partials, 7);
    }
    set_memory(enc, plan.memory);
    if (plan.prefill) {
        const int tiles = divided((int64_t) args.tokens*(args.heads/args.kv_heads), plan.rows);
        ggml_metal_encoder_dispatch_threadgroups(enc, tiles, args.kv_heads, args.streams, 32*SIMDGROUPS, 1, 1);
        return;
    }
    ggml_metal_encoder_dispatch_threadgroups(enc, plan.chunks, args.kv_heads*plan.blocks, args.tokens*args.streams, 32*SIMDGROUPS, 1, 1);
    if (plan.chunks == 1) {
        return;
    }
    // the partial results are written before they are merged
    ggml_metal_encoder_memory_barrier(enc);
    ggml_metal_encoder_set_pipeline(enc, pipeline(dev, shader, "kv_attn_merge", constants));
    ggml_metal_encoder_set_bytes (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer(enc, sinks_or_any, 5);
    ggml_metal_encoder_set_buffer(enc, dst, 6);
    ggml_metal_encoder_set_buffer(enc, partials, 7);
    set_memory(enc, sizeof(float)*KV_MERGE_FLOATS(vr.width));
    ggml_metal_encoder_dispatch_threadgroups(enc, args.heads, args.tokens, args.streams, 32, 1, 1);
}

}  // namespace

bool ggml_ext_metal_supports_op(ggml_metal_device_t dev, const ggml_tensor * op) {
    const std::string why = refusal(dev, op);
    if (why.empty()) {
        return true;
    }
    const std::string text = told(op) + ": " + why;
    GGML_LOG_DEBUG("ggml-ext: not on Metal: %s\n", text.c_str());

    static std::mutex mutex;
    static std::set<std::string> warned;
    const std::lock_guard<std::mutex> lock(mutex);
    if (warned.insert(text).second) {
        GGML_LOG_WARN("ggml-ext: not on Metal: %s\n", text.c_str());
    }
    return false;
}

size_t ggml_ext_metal_scratch(const ggml_tensor * op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !refuse_attention(op).empty()) {
        return 0;
    }
    const attention_plan plan = plan_of(op);
    if (plan.chunks == 1) {
        return 0;
    }
    const size_t results = op->src[0]->ne[1]*op->src[0]->ne[2]*op->src[0]->ne[3];
    const size_t floats  = results*plan.chunks*(describe(op->src[2]).width + 2);
    return partials_offset(op) - ggml_nbytes(op) + sizeof(float)*floats;
}

void ggml_ext_metal_encode(ggml_metal_device_t dev, ggml_metal_encoder_t enc, ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_SET_ROWS:
            return encode_rows(dev, enc, set_kernel(op), op, op->src[0], op->src[1], op);
        case GGML_OP_GET_ROWS:
            return encode_rows(dev, enc, "kv_get_rows", op->src[0], op->src[0], op->src[1], op);
        case GGML_OP_FLASH_ATTN_EXT:
            return encode_attention(dev, enc, op);
        default:
            return encode_copy(dev, enc, op);
    }
}
