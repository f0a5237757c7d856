#include "backend.h"

#include "cuda_runtime.h"

#include "ggml-backend-impl.h"
#include "ggml-ext-cuda-graph.h"

#include <vector>

namespace {

using namespace ggml_ext_gpu;

bool    prompts = false;
int64_t fused_ops = 0;
Decoded decoded = {};

constexpr kv_cuda_device HOPPER = { 900, 6, 227*1024 };
kv_cuda_device device_now = { 750, 6, 163*1024 };

// The attention at `node`, which becomes the last node that is done.
cudaError_t attend(const ggml_cgraph * graph, int & node) {
    const attention_of_graph found(graph, node);
    kv_cuda_attention attention = describe_attention(found.op);
    const auto scratch_of = [](size_t bytes) { return std::vector<uint64_t>(bytes/8 + 1, ~0ull); }; // NaN as floats and as halves
    kv_cuda_prompt prompt;
    if (prompts && kv_cuda_plan_prompt(attention, HOPPER, prompt)) {
        ++decoded.prompts;
        return kv_cuda_attend_prompt(attention, prompt, scratch_of(prompt.scratch_bytes).data(), nullptr);
    }
    kv_cuda_plan plan;
    if (!kv_cuda_plan_attention(attention, device_now, {}, plan)) {
        return cudaErrorNotSupported;
    }
    decoded.all += plan.main.decode ? 1 : 0;
    decoded.bulk += plan.main.bulk.teams > 0 ? 1 : 0;
    attention.center = found.center;
    fused_ops += found.center ? 2 : 0;
    node = found.last;
    return kv_cuda_attend(attention, plan, {}, scratch_of(plan.scratch_bytes).data(), nullptr);
}

// Rows that are written together from `node` on, or one op.
cudaError_t compute_rows_from(const ggml_cgraph * graph, int & node) {
    if (graph->nodes[node]->op == GGML_OP_SET_ROWS) {
        const writes_of_graph found(graph, node);
        if (found.writes.count > 1) {
            for (; node <= found.last; node = node_behind(graph, node)) {
                ++fused_ops;
            }
            node = found.last;
            return kv_cuda_set_rows(found.writes, nullptr);
        }
    }
    return compute_rows(graph->nodes[node], nullptr);
}

ggml_backend_t cpu() {
    static ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    return backend;
}

ggml_status compute_graph(ggml_backend_t, ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        if (is_nothing(node)) {
            continue;
        }
        if (ggml_ext_concerns(node)) { // and is supported: rows or attention
            if ((node->op == GGML_OP_FLASH_ATTN_EXT ? attend(graph, i) : compute_rows_from(graph, i)) != cudaSuccess) {
                return GGML_STATUS_FAILED;
            }
            continue;
        }
        ggml_cgraph one = ggml_graph_view(graph, i, i + 1);
        if (ggml_backend_graph_compute(cpu(), &one) != GGML_STATUS_SUCCESS) {
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

bool supports(ggml_backend_dev_t, const ggml_tensor * op) {
    if (!ggml_ext_concerns(op)) {
        return ggml_backend_supports_op(cpu(), op);
    }
    kv_cuda_plan plan;
    return refusal(CUDA, op).empty() && (op->op != GGML_OP_FLASH_ATTN_EXT || kv_cuda_plan_attention(describe_attention(op), device_now, {}, plan));
}

const char * name_of(ggml_backend_t) {
    return "CUDA, emulated";
}

const char * name_of_device(ggml_backend_dev_t) {
    return "CUDA0";
}

const char * name_of_reg(ggml_backend_reg_t) {
    return "CUDA";
}

enum ggml_backend_dev_type type_of(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

ggml_backend_buffer_type_t memory_of(ggml_backend_dev_t) {
    return ggml_backend_get_default_buffer_type(cpu());
}

}  // namespace

ggml_backend_t emulated_backend() {
    static ggml_backend_reg    reg    = {};
    static ggml_backend_device device = {};
    static ggml_backend        backend = {};
    reg.iface.get_name           = name_of_reg;
    device.iface.get_name        = name_of_device;
    device.iface.get_type        = type_of;
    device.iface.supports_op     = supports;
    device.iface.get_buffer_type = memory_of;
    device.reg                   = &reg;
    backend.iface.get_name       = name_of;
    backend.iface.graph_compute  = compute_graph;
    backend.device               = &device;
    return &backend;
}

int64_t emulated_fused() {
    return fused_ops;
}

Decoded emulated_decoded() {
    return decoded;
}

void emulate_gpu(int cc, int multiprocessors) {
    device_now.cc = cc;
    device_now.sms = multiprocessors;
    device_now.shared_bytes = (cc >= 900 ? 227 : 163)*1024;
}

void emulate_prompts(bool yes) {
    prompts = yes;
}
