// The shim's part in the Metal backend: ops on our types as dispatches of the kernels in shaders/.
//
// Nothing here computes; it describes tensors to the kernels (shaders/kv_args.h), chooses how an op is split over
// threadgroups, and has Metal compile the kernel for the types at hand when it is first needed. The text of the shaders
// is in the library (ggml_ext_metal_source). What is refused is refused in `refusal_on`, for supports_op, with a reason.

#include "ggml-ext-metal.h"

#include "ggml-ext-gpu.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace ggml_ext_gpu;

constexpr backend METAL = { "Metal", 8 };

constexpr int    SIMDGROUPS       = 4;   // of a threadgroup
constexpr int    PREFILL_TOKENS   = 16;  // from here on matrices; below, every token reads the cache for itself
constexpr int    THREADGROUPS     = 512; // that a decode should have, where there are cells enough
constexpr size_t THREADGROUP_ROOM = 32*1024;

constexpr const char * SET_GROUPS = "kv_set_groups";

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

attention_plan plan_of(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v) {
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

// An op: the cache, and where there are precise rows a window of them and a batch.
struct attention_part {
    const ggml_tensor * k, * v;
    uint32_t            first_column;
    attention_plan      plan;
};

struct attention_parts {
    std::vector<attention_part> all;
    int                         chunks = 0;
    bool                        whole;  // one dispatch makes the result
    kv_attn_args                args;
    kv_recent_args              recent = {};
    // behind the result
    size_t                      partials, hidden, mask, end;
};

attention_parts parts_of(const ggml_tensor * op) {
    attention_parts res;
    res.args = attention_args(op);
    for (int i : { 1, (int) SRC_WINDOW_K, (int) SRC_BATCH_K }) {
        if (op->src[i]) {
            const uint32_t first = i == SRC_BATCH_K ? (uint32_t) op->src[SRC_WINDOW_K]->ne[1] : 0;
            res.all.push_back({ op->src[i], op->src[i + 1], first, plan_of(op->src[0], op->src[i], op->src[i + 1]) });
            res.chunks += res.all.back().plan.chunks;
        }
    }
    res.whole    = res.chunks == 1;
    res.partials = GGML_PAD(ggml_nbytes(op), 16);
    const size_t results = op->src[0]->ne[1]*op->src[0]->ne[2]*op->src[0]->ne[3];
    res.hidden = res.partials + (res.whole ? 0 : GGML_PAD(sizeof(float)*results*res.chunks*(res.args.sum_width + 2), 16));
    res.mask = res.end = res.hidden;
    if (has_recent(op)) {
        res.recent = recent_args(op, res.args);
        res.mask   = res.hidden + GGML_PAD(hidden_bytes(res.recent), 16);
        res.end    = res.mask + columns_mask_bytes(res.recent);
    }
    return res;
}

std::string refusal_on(ggml_metal_device_t dev, const ggml_tensor * op) {
    const ggml_metal_device_props * props = ggml_metal_device_get_props(dev);
    if (!props->has_simdgroup_reduction || !props->has_simdgroup_mm || props->max_theadgroup_memory_size < THREADGROUP_ROOM) {
        return "the GPU has no simdgroup matrices or too little threadgroup memory (an Apple GPU from M1 on is needed)";
    }
    const std::string why = refusal(METAL, op);
    if (!why.empty() || op->op != GGML_OP_FLASH_ATTN_EXT) {
        return why;
    }
    const attention_parts parts = parts_of(op);
    const bool fits = std::all_of(parts.all.begin(), parts.all.end(), [](const attention_part & p) { return p.plan.memory <= THREADGROUP_ROOM; });
    return fits ? "" : "rows too wide for threadgroup memory";
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

// Which cells have precise rows, and the mask of these.
void encode_columns(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const ggml_tensor * op, const attention_parts & parts,
                    const std::vector<constant> & constants) {
    const ggml_tensor * mask = op->src[3];
    const ggml_metal_buffer_id dst = buffer_of(op);
    ggml_metal_encoder_set_pipeline(enc, pipeline(dev, "kv_decode", "kv_attn_hidden", constants));
    ggml_metal_encoder_set_bytes (enc, const_cast<kv_recent_args *>(&parts.recent), sizeof(parts.recent), 0);
    ggml_metal_encoder_set_buffer(enc, buffer_of(op->src[SRC_CELLS]), 1);
    ggml_metal_encoder_set_buffer(enc, { dst.metal, dst.offs + parts.hidden }, 3);
    set_memory(enc, KV_COLUMNS_CELLS);
    ggml_metal_encoder_dispatch_threadgroups(enc, divided(parts.recent.cells, KV_COLUMNS_CELLS), parts.recent.kv_streams, 1, 32*SIMDGROUPS, 1, 1);

    ggml_metal_encoder_set_pipeline(enc, pipeline(dev, "kv_decode", "kv_attn_columns", constants));
    ggml_metal_encoder_set_bytes (enc, const_cast<kv_recent_args *>(&parts.recent), sizeof(parts.recent), 0);
    ggml_metal_encoder_set_buffer(enc, buffer_of(op->src[SRC_CELLS]), 1);
    ggml_metal_encoder_set_buffer(enc, mask ? buffer_of(mask) : dst, 2);
    ggml_metal_encoder_set_buffer(enc, { dst.metal, dst.offs + parts.mask }, 4);
    ggml_metal_encoder_dispatch_threadgroups(enc, parts.recent.tokens, parts.recent.mask_rows[0], parts.recent.streams, 32*SIMDGROUPS, 1, 1);
    // both are read by all that follows
    ggml_metal_encoder_memory_barrier(enc);
}

void encode_attention(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * mask = op->src[3], * sinks = op->src[4];
    const attention_parts parts = parts_of(op);
    const bool recent = parts.all.size() > 1;
    float max_bias;
    memcpy(&max_bias, (const float *) op->op_params + 1, sizeof(float));

    const ggml_metal_buffer_id dst = buffer_of(op);
    const ggml_metal_buffer_id partials = { dst.metal, dst.offs + (parts.whole ? 0 : parts.partials) };
    const ggml_metal_buffer_id hidden = { dst.metal, dst.offs + (recent ? parts.hidden : 0) };
    // where the op has none, something that is there
    const ggml_metal_buffer_id sinks_or_any = sinks ? buffer_of(sinks) : dst;
    const auto constants_of = [&](const attention_part & part) {
        const rows_of kr = describe(part.k), vr = describe(part.v);
        const bool main = &part == &parts.all[0];
        return std::vector<constant> {
            { 10, (int32_t) kr.kind, false }, { 11, (int32_t) vr.kind, false }, { 12, kr.size, false }, { 13, vr.size, false },
            { 14, !main || mask, true }, { 15, parts.args.softcap != 0.0f, true }, { 16, sinks != nullptr, true },
            { 17, max_bias != 0.0f, true }, { 18, part.plan.prefill ? part.plan.blocks : part.plan.rows, false }, { 19, parts.whole, true },
            { 20, (int32_t) kind_of(q->type), false }, { 21, recent && main, true },
        };
    };
    if (recent) {
        encode_columns(dev, enc, op, parts, constants_of(parts.all[0]));
    }
    kv_attn_args main_args = parts.args;
    main_args.chunks      = (uint32_t) parts.chunks;
    main_args.main_chunks = (uint32_t) parts.all[0].plan.chunks;
    uint32_t first_chunk = 0;
    for (const attention_part & part : parts.all) {
        const bool main = &part == &parts.all[0];
        const attention_plan & plan = part.plan;
        kv_attn_args args = main ? main_args : recent_attention_args(main_args, parts.recent, part.k, part.v);
        args.chunk_cells = (uint32_t) plan.chunk_cells;
        args.first_chunk = first_chunk;
        first_chunk += (uint32_t) plan.chunks;
        const ggml_metal_buffer_id columns_mask = { dst.metal, dst.offs + parts.mask + 2*part.first_column };

        ggml_metal_encoder_set_pipeline(enc, pipeline(dev, plan.prefill ? "kv_prefill" : "kv_decode", plan.prefill ? "kv_attn_prefill" : "kv_attn_decode", constants_of(part)));
        ggml_metal_encoder_set_bytes (enc, &args, sizeof(args), 0);
        ggml_metal_encoder_set_buffer(enc, buffer_of(q), 1);
        ggml_metal_encoder_set_buffer(enc, buffer_of(part.k), 2);
        ggml_metal_encoder_set_buffer(enc, buffer_of(part.v), 3);
        ggml_metal_encoder_set_buffer(enc, !main ? columns_mask : mask ? buffer_of(mask) : dst, 4);
        ggml_metal_encoder_set_buffer(enc, sinks_or_any, 5);
        ggml_metal_encoder_set_buffer(enc, dst, 6);
        ggml_metal_encoder_set_buffer(enc, partials, 7);
        ggml_metal_encoder_set_buffer(enc, hidden, 8);
        set_memory(enc, plan.memory);
        if (plan.prefill) {
            const int tiles = divided((int64_t) args.tokens*(args.heads/args.kv_heads), plan.rows);
            ggml_metal_encoder_dispatch_threadgroups(enc, tiles, args.kv_heads, args.streams, 32*SIMDGROUPS, 1, 1);
        } else {
            ggml_metal_encoder_dispatch_threadgroups(enc, plan.chunks, args.kv_heads*plan.blocks, args.tokens*args.streams, 32*SIMDGROUPS, 1, 1);
        }
    }
    if (parts.whole) {
        return;
    }
    // the partial results are written before they are merged
    ggml_metal_encoder_memory_barrier(enc);
    ggml_metal_encoder_set_pipeline(enc, pipeline(dev, "kv_decode", "kv_attn_merge", constants_of(parts.all[0])));
    ggml_metal_encoder_set_bytes (enc, &main_args, sizeof(main_args), 0);
    ggml_metal_encoder_set_buffer(enc, sinks_or_any, 5);
    ggml_metal_encoder_set_buffer(enc, dst, 6);
    ggml_metal_encoder_set_buffer(enc, partials, 7);
    set_memory(enc, sizeof(float)*KV_MERGE_FLOATS(main_args.sum_width));
    ggml_metal_encoder_dispatch_threadgroups(enc, main_args.heads, main_args.tokens, main_args.streams, 32, 1, 1);
}

}  // namespace

bool ggml_ext_metal_supports_op(ggml_metal_device_t dev, const ggml_tensor * op) {
    const std::string why = refusal_on(dev, op);
    if (!why.empty()) {
        say_refused(METAL, op, why);
    }
    return why.empty();
}

size_t ggml_ext_metal_scratch(const ggml_tensor * op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !refuse_attention(METAL, op).empty()) {
        return 0;
    }
    return parts_of(op).end - ggml_nbytes(op);
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
