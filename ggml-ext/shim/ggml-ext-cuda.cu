// The shim's part in the CUDA backend: ops on our types as launches of the kernels in cuda/.
//
// Nothing here computes; it describes tensors to the kernels and takes their scratch from the backend's pool, so that an op
// neither synchronizes nor allocates and CUDA graphs can capture it.
//
// What a layer writes for a token, and the attention over it, are fewer launches than ops (ggml-ext-cuda-graph.h).
//
// Attention of a few query rows reads the cache as it is. For prompts the cache is expanded to halves in scratch, as ggml does with
// its quantized types, and attended to by our kernel for Hopper or by ggml's own.

#include "ggml-ext-cuda.h"

#include "ggml-ext-cuda-graph.h"

#include "ggml-cuda/common.cuh"
#include "ggml-cuda/fattn.cuh"
#include "ggml-cuda/mmf.cuh"
#include "ggml-cuda/mmvf.cuh"

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

// MUL_MAT as ggml-cuda computes it for the few queries of a step. False, and nothing is done, where it has another kernel for it.
static bool multiply(ggml_backend_cuda_context & ctx, ggml_tensor & op) {
    const ggml_tensor * a = op.src[0], * x = op.src[1];
    const auto & device = ggml_cuda_info().devices[ctx.device];
    if (x->type != GGML_TYPE_F32 || op.type != GGML_TYPE_F32) {
        return false;
    }
    if (ggml_cuda_should_use_mmvf(a->type, device.cc, a->ne, a->nb, x->ne[1])) {
        ggml_cuda_mul_mat_vec_f(ctx, a, x, nullptr, &op);
        return true;
    }
    if (ggml_cuda_should_use_mmf(a->type, device.cc, device.warp_size, a->ne, a->nb, (int) x->ne[1], /*mul_mat_id =*/ false)) {
        ggml_cuda_mul_mat_f(ctx, a, x, nullptr, &op);
        return true;
    }
    return false;
}

// All of these in the launches of one attention. False, and nothing is done, where that is not possible.
static bool attend_and_write(ggml_backend_cuda_context & ctx, const kv_cuda_writes & writes, const attention_of_graph & found) {
    kv_cuda_attention attention = describe_attention(found.op);
    attention.center = found.center;
    kv_cuda_plan plan;
    if (!kv_cuda_plan_attention(attention, device_of(ctx.device), writes, plan) || !kv_cuda_writes_first(attention, plan, writes)) {
        return false;
    }
    ggml_cuda_pool_alloc<float> queries(ctx.pool());
    if (found.product) {
        // Not to where the graph has them: rows that are still to be written may lie there.
        ggml_tensor product = *found.product;
        product.data = queries.alloc(ggml_nelements(&product));
        attention.q  = (const char *) product.data + ((const char *) attention.q - (const char *) found.product->data);
        if (!multiply(ctx, product)) {
            return false;
        }
    }
    ggml_cuda_pool_alloc<uint8_t> scratch(ctx.pool(), plan.scratch_bytes);
    CUDA_CHECK(kv_cuda_attend(attention, plan, writes, scratch.get(), ctx.stream()));
    return true;
}

}  // namespace

bool ggml_ext_cuda_supports_op(int device, const ggml_tensor * op) {
    const std::string why = refusal_on(device, op);
    if (!why.empty()) {
        say_refused(CUDA, op, why);
    }
    return why.empty();
}

static std::atomic<int64_t> fused_ops;

int64_t ggml_ext_cuda_fused() {
    return fused_ops;
}

int ggml_ext_cuda_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int first) {
    // where streams run side by side, neighbours may be on different ones
    if (graph->nodes[first]->op != GGML_OP_SET_ROWS || !ctx.stream_context().concurrent_events.empty()) {
        return 0;
    }
    const writes_of_graph found(graph, first);
    if (found.writes.count > 0) {
        const attention_of_graph behind(graph, node_behind(graph, found.last));
        if (behind.op && attend_and_write(ctx, found.writes, behind)) {
            for (int i = first; i <= behind.last; i = node_behind(graph, i)) {
                ++fused_ops;
            }
            return behind.last - first;
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
