// The shim's part in the CUDA backend: ops on our types as launches of the kernels in cuda/.
//
// Nothing here computes; it describes tensors to the kernels and takes their scratch from the backend's pool, so that an op
// neither synchronizes nor allocates and CUDA graphs can capture it.
//
// What a layer writes for a token, and the attention over it, are fewer launches than ops: those ops follow each other in a graph.
//
// Attention of a few query rows reads the cache as it is. For prompts the cache is expanded to halves in scratch, as ggml does with
// its quantized types, and attended to by our kernel for Hopper or by ggml's own.

#include "ggml-ext-cuda.h"

#include "ggml-ext-cuda-args.h"

#include "ggml-cuda/common.cuh"
#include "ggml-cuda/fattn.cuh"

#include <atomic>

namespace {

using namespace ggml_ext_gpu;

static kv_cuda_device device_of(int id) {
    const auto & info = ggml_cuda_info().devices[id];
    return { info.cc, info.nsm, info.smpbo };
}

// The op on halves in the domains of K and V: with tensors of its own, whose data is not there yet.
struct expanded_op {
    kv_cuda_expanded sizes;
    ggml_tensor      q, k, v, op;
    bool             supported;

    expanded_op(int device, const ggml_tensor * from, const kv_cuda_attention & attention) : sizes(kv_cuda_expanded_of(attention)) {
        const kv_attn_args & args = attention.args;
        q = tensor(GGML_TYPE_F32, sizes.k_width, args.tokens, args.heads, args.streams);
        k = tensor(GGML_TYPE_F16, sizes.k_width, args.cells, args.kv_heads, args.kv_streams);
        v = tensor(GGML_TYPE_F16, sizes.v_width, args.cells, args.kv_heads, args.kv_streams);
        op = tensor(GGML_TYPE_F32, sizes.v_width, args.heads, args.tokens, args.streams);
        op.op = GGML_OP_FLASH_ATTN_EXT;
        memcpy(op.op_params, from->op_params, sizeof(op.op_params));
        op.src[0] = &q;
        op.src[1] = &k;
        op.src[2] = &v;
        op.src[3] = from->src[3];
        op.src[4] = from->src[4];
        // ggml's kernels have softcap at these widths alone, and take K for V at 576.
        const bool known = (args.softcap == 0.0f || sizes.k_width == 128 || sizes.k_width == 256 || sizes.k_width == 512) && sizes.k_width != 576;
        supported = known && args.streams == args.kv_streams && attention.v_size == args.out_size && ggml_cuda_flash_attn_ext_supported(device, &op);
    }

    static ggml_tensor tensor(ggml_type type, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
        ggml_tensor res = {};
        res.type = type;
        const int64_t ne[GGML_MAX_DIMS] = { n0, n1, n2, n3 };
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            res.ne[i] = ne[i];
            res.nb[i] = i == 0 ? ggml_type_size(type) : res.nb[i - 1]*ne[i - 1];
        }
        return res;
    }
};

static std::string refusal_on(int id, const ggml_tensor * op) {
    const kv_cuda_device device = device_of(id);
    if (device.cc < KV_CUDA_OLDEST || !GGML_CUDA_CC_IS_NVIDIA(device.cc)) {
        return "the GPU is older than Turing (compute capability 7.5), whose tensor cores the kernels use";
    }
    const std::string why = refusal(CUDA, op);
    if (!why.empty() || op->op != GGML_OP_FLASH_ATTN_EXT) {
        return why;
    }
    const kv_cuda_attention attention = describe_attention(op);
    kv_cuda_plan plan;
    const bool served = kv_cuda_plan_attention(attention, device, {}, plan) || expanded_op(id, op, attention).supported;
    return served ? "" : "rows too wide for the GPU's shared memory";
}

static cudaError_t attend_expanded(ggml_backend_cuda_context & ctx, const kv_cuda_attention & attention, expanded_op & expanded) {
    ggml_cuda_pool_alloc<float> queries(ctx.pool(), expanded.sizes.queries), results(ctx.pool(), expanded.sizes.results);
    ggml_cuda_pool_alloc<half> keys(ctx.pool(), expanded.sizes.keys), values(ctx.pool(), expanded.sizes.values);
    expanded.q.data  = queries.get();
    expanded.k.data  = keys.get();
    expanded.v.data  = values.get();
    expanded.op.data = results.get();
    const cudaError_t err = kv_cuda_expand(attention, queries.get(), keys.get(), values.get(), ctx.stream());
    if (err != cudaSuccess) {
        return err;
    }
    ggml_cuda_flash_attn_ext(ctx, &expanded.op);
    return kv_cuda_leave_domain(attention, results.get(), ctx.stream());
}

static cudaError_t attend(ggml_backend_cuda_context & ctx, ggml_tensor * op) {
    const kv_cuda_attention attention = describe_attention(op);
    kv_cuda_plan plan;
    const bool planned = kv_cuda_plan_attention(attention, device_of(ctx.device), {}, plan);
    kv_cuda_prompt prompt;
    if (!(planned && plan.together) && kv_cuda_plan_prompt(attention, device_of(ctx.device), prompt)) {
        ggml_cuda_pool_alloc<uint8_t> scratch(ctx.pool(), prompt.scratch_bytes);
        return kv_cuda_attend_prompt(attention, prompt, scratch.get(), ctx.stream());
    }
    if (!(planned && plan.together) && !kv_cuda_path_is("tile") && !kv_cuda_path_is("own")) {
        expanded_op expanded(ctx.device, op, attention);
        if (expanded.supported) {
            return attend_expanded(ctx, attention, expanded);
        }
    }
    if (!planned) {
        return cudaErrorNotSupported;
    }
    ggml_cuda_pool_alloc<uint8_t> scratch(ctx.pool(), plan.scratch_bytes);
    return kv_cuda_attend(attention, plan, {}, scratch.get(), ctx.stream());
}

// Rows that one launch writes, beginning with node `first`, and the node of the last.
struct writes_of_graph {
    kv_cuda_writes      writes = {};
    const ggml_tensor * op[KV_CUDA_WRITES];
    int                 last = 0;

    writes_of_graph(const ggml_cgraph * graph, int first) : last(first) {
        for (int i = first; i < graph->n_nodes && writes.count < KV_CUDA_WRITES; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            if (is_nothing(node)) {
                continue;
            }
            if (node->op != GGML_OP_SET_ROWS || !ggml_ext_is_ours(node->type) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || !add(node)) {
                break;
            }
            last = i;
        }
    }

  private:
    static bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
        const char * of_a = (const char *) a->data, * of_b = (const char *) b->data;
        return of_a < of_b + ggml_nbytes(b) && of_b < of_a + ggml_nbytes(a);
    }

    bool add(const ggml_tensor * node) {
        const kv_cuda_rows rows = describe_rows(node, node->src[0], node->src[1], node);
        for (int i = 0; i < writes.count; ++i) {
            if (!kv_cuda_write_together(writes.op[i], rows) || overlap(node, op[i]) || overlap(node->src[0], op[i]) || overlap(node->src[1], op[i]) ||
                overlap(node, op[i]->src[0]) || overlap(node, op[i]->src[1])) {
                return false;
            }
        }
        op[writes.count]          = node;
        writes.op[writes.count++] = rows;
        return true;
    }
};

}  // namespace

bool ggml_ext_cuda_supports_op(int device, const ggml_tensor * op) {
    const std::string why = refusal_on(device, op);
    if (!why.empty()) {
        say_refused(CUDA, op, why);
    }
    return why.empty();
}

static std::atomic<int64_t> fused_launches;

int64_t ggml_ext_cuda_fused() {
    return fused_launches;
}

int ggml_ext_cuda_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int first) {
    // where streams run side by side, neighbours may be on different ones
    if (graph->nodes[first]->op != GGML_OP_SET_ROWS || !ctx.stream_context().concurrent_events.empty()) {
        return 0;
    }
    const writes_of_graph found(graph, first);
    int next = found.last + 1;
    while (next < graph->n_nodes && is_nothing(graph->nodes[next])) {
        ++next;
    }
    const ggml_tensor * op = next < graph->n_nodes ? graph->nodes[next] : nullptr;
    if (found.writes.count > 0 && op && op->op == GGML_OP_FLASH_ATTN_EXT && ggml_ext_concerns(op) && (op->flags & GGML_TENSOR_FLAG_COMPUTE) != 0) {
        const kv_cuda_attention attention = describe_attention(op);
        kv_cuda_plan plan;
        if (kv_cuda_plan_attention(attention, device_of(ctx.device), found.writes, plan) && kv_cuda_writes_first(attention, plan, found.writes)) {
            ggml_cuda_pool_alloc<uint8_t> scratch(ctx.pool(), plan.scratch_bytes);
            CUDA_CHECK(kv_cuda_attend(attention, plan, found.writes, scratch.get(), ctx.stream()));
            ++fused_launches;
            return next - first;
        }
    }
    if (found.writes.count < 2) {
        return 0;
    }
    CUDA_CHECK(kv_cuda_set_rows(found.writes, ctx.stream()));
    return found.last - first;
}

bool ggml_ext_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_SET_ROWS:
        case GGML_OP_GET_ROWS:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            CUDA_CHECK(compute_rows(op, ctx.stream()));
            return true;
        case GGML_OP_FLASH_ATTN_EXT:
            CUDA_CHECK(attend(ctx, op));
            return true;
        default:
            return false;
    }
}
