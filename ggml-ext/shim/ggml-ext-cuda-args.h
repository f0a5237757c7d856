// Ops as the kernels of CUDA see them, and those that need no scratch.
#pragma once

#include "ggml-ext-gpu.h"

#include "../../cuda/kv_cuda.h"

namespace ggml_ext_gpu {

constexpr backend CUDA = { "CUDA", 16 };

inline kv_cuda_attention describe_attention(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3], * sinks = op->src[4];
    float max_bias;
    memcpy(&max_bias, (const float *) op->op_params + 1, sizeof(float));

    kv_cuda_attention res = {};
    res.args   = attention_args(op);
    res.k_kind  = describe(k).kind;
    res.v_kind  = describe(v).kind;
    res.q_kind  = kind_of(q->type);
    res.k_size  = (uint32_t) describe(k).size;
    res.v_size  = (uint32_t) describe(v).size;
    res.k_bytes = (uint32_t) describe(k).bytes;
    res.v_bytes = (uint32_t) describe(v).bytes;
    res.alibi   = max_bias != 0.0f;
    res.q      = q->data;
    res.k      = k->data;
    res.v      = v->data;
    res.mask   = mask ? mask->data : nullptr;
    res.sinks  = sinks ? (const float *) sinks->data : nullptr;
    res.dst    = op->data;
    if (!has_recent(op)) {
        return res;
    }
    res.recent  = recent_args(op, res.args);
    res.columns = op->src[SRC_CELLS]->data;
    for (int i : { SRC_WINDOW_K, SRC_BATCH_K }) {
        const ggml_tensor * pk = op->src[i], * pv = op->src[i + 1];
        if (!pk) {
            continue;
        }
        kv_cuda_recent & part = res.part[res.parts++];
        part.args         = recent_attention_args(res.args, res.recent, pk, pv);
        part.k_kind       = describe(pk).kind;
        part.v_kind       = describe(pv).kind;
        part.k_bytes      = (uint32_t) describe(pk).bytes;
        part.v_bytes      = (uint32_t) describe(pv).bytes;
        part.first_column = i == SRC_WINDOW_K ? 0 : (uint32_t) op->src[SRC_WINDOW_K]->ne[1];
        part.k            = pk->data;
        part.v            = pv->data;
    }
    return res;
}

// `floats` is the side that is not a cache; where both are, the one that is written.
inline kv_cuda_rows describe_rows(const ggml_tensor * cache, const ggml_tensor * from, const ggml_tensor * index, const ggml_tensor * to) {
    const bool both = ggml_ext_is_ours(from->type) && ggml_ext_is_ours(to->type);
    const ggml_tensor * floats = both || from == cache ? to : from;
    kv_cuda_rows res = {};
    res.args       = rows_args(cache, floats);
    res.kind       = describe(cache).kind;
    res.size       = (uint32_t) describe(cache).size;
    res.float_kind = both ? KV_KIND_F32 : kind_of(floats->type);
    res.from       = from->data;
    res.to         = to->data;
    if (index) {
        res.index       = index->data;
        res.index_bytes = index->type == GGML_TYPE_I64 ? 8 : 4;
        res.args.index_rows[0] = (uint32_t) index->ne[1];
        res.args.index_rows[1] = (uint32_t) index->ne[2];
        strides(res.args.index_nb, index, 0);
    }
    return res;
}

// A node that computes nothing.
inline bool is_nothing(const ggml_tensor * t) {
    return ggml_is_empty(t) || t->op == GGML_OP_NONE || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

inline cudaError_t set_rows(const kv_cuda_rows & rows, cudaStream_t stream) {
    kv_cuda_writes writes = {};
    writes.op[writes.count++] = rows;
    return kv_cuda_set_rows(writes, stream);
}

// SET_ROWS, GET_ROWS and copies.
inline cudaError_t compute_rows(ggml_tensor * op, cudaStream_t stream) {
    const ggml_tensor * src = op->src[0];
    if (op->op == GGML_OP_SET_ROWS) {
        return set_rows(describe_rows(op, src, op->src[1], op), stream);
    }
    if (op->op == GGML_OP_GET_ROWS) {
        return kv_cuda_get_rows(describe_rows(src, src, op->src[1], op), stream);
    }
    if (!ggml_ext_is_ours(src->type)) {
        return set_rows(describe_rows(op, src, nullptr, op), stream);
    }
    const kv_cuda_rows rows = describe_rows(src, src, nullptr, op);
    return ggml_ext_is_ours(op->type) ? kv_cuda_copy_rows(rows, stream) : kv_cuda_get_rows(rows, stream);
}

}  // namespace ggml_ext_gpu
