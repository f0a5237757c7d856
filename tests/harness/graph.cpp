#include "graph.h"

#include "harness.h"

#include <cstring>
#include <numeric>

namespace {

ggml_backend_t chosen = nullptr;

ggml_backend_t backend() {
    static ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    return chosen ? chosen : cpu;
}

void set_threads(ggml_backend_t backend, int n) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend, n);
    }
}

}  // namespace

const std::vector<const ggml_ext_type *> & concrete_types() {
    static const auto all = [] {
        std::vector<const ggml_ext_type *> res;
        for (int id = GGML_EXT_TYPE_BASE; id < GGML_EXT_TYPE_LIMIT; id++) {
            const ggml_ext_type * type = ggml_ext_type_get(id);
            if (type && type->head_size > 0) {
                res.push_back(type);
            }
        }
        return res;
    }();
    return all;
}

const std::vector<Family> & families() {
    static const auto all = [] {
        std::vector<Family> res;
        for (int id = GGML_EXT_TYPE_BASE; id < GGML_EXT_TYPE_LIMIT; id++) {
            const ggml_ext_type * type = ggml_ext_type_get(id);
            if (type && type->head_size == 0) {
                res.push_back({ type->name, type->serves_k, type->serves_v });
            }
        }
        return res;
    }();
    return all;
}

ggml_type type_for(const std::string & name, int head_size) {
    for (const ggml_ext_type * type : concrete_types()) {
        if (type->family == name && type->head_size == head_size) {
            return (ggml_type) type->id;
        }
    }
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * its = ggml_type_name((ggml_type) i);
        if (its && its == name) {
            return (ggml_type) i;
        }
    }
    return GGML_TYPE_COUNT;
}

bool is_grouped(ggml_type type) {
    return is_ours(type) && ggml_ext_type_get(type)->group_cells > 1;
}

bool is_ours(ggml_type type) {
    return (uint32_t) type >= GGML_EXT_TYPE_BASE;
}

double bits_of(ggml_type type) {
    return 8.0*ggml_type_size(type)/ggml_blck_size(type);
}

Device::Device(ggml_backend_t backend) {
    chosen = backend;
}

Device::~Device() {
    chosen = nullptr;
}

Graph::Graph() : backend_(backend()) {
    const ggml_init_params params = { 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*.no_alloc =*/ true };
    ctx_   = ggml_init(params);
    graph_ = ggml_new_graph(ctx_);
}

Graph::~Graph() {
    ggml_backend_buffer_free(buffer_);
    ggml_free(ctx_);
}

void Graph::add(ggml_tensor * node) {
    ggml_build_forward_expand(graph_, node);
}

void Graph::allocate(uint8_t fill) {
    buffer_ = ggml_backend_alloc_ctx_tensors(ctx_, backend_);
    ggml_backend_buffer_clear(buffer_, fill);
}

bool Graph::supports(const ggml_tensor * op) {
    return ggml_backend_supports_op(backend(), op);
}

bool Graph::compute(int n_threads) {
    for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
        const ggml_tensor * node = ggml_graph_node(graph_, i);
        if (!ggml_backend_supports_op(backend_, node)) {
            check(false, std::string("the backend refuses ") + ggml_op_desc(node));
            return false;
        }
    }
    set_threads(backend_, n_threads);
    const bool ok = ggml_backend_graph_compute(backend_, graph_) == GGML_STATUS_SUCCESS;
    if (!ok) {
        check(false, "the graph is computed");
    }
    return ok;
}

void set_floats(ggml_tensor * t, const std::vector<float> & values) {
    GGML_ASSERT((int64_t) values.size() == ggml_nelements(t));
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, values.data(), 0, values.size()*sizeof(float));
        return;
    }
    GGML_ASSERT(t->type == GGML_TYPE_F16);
    std::vector<ggml_fp16_t> half(values.size());
    ggml_fp32_to_fp16_row(values.data(), half.data(), (int64_t) half.size());
    ggml_backend_tensor_set(t, half.data(), 0, half.size()*sizeof(ggml_fp16_t));
}

void set_indices(ggml_tensor * t, const std::vector<int64_t> & values) {
    GGML_ASSERT((int64_t) values.size() == ggml_nelements(t));
    if (t->type == GGML_TYPE_I64) {
        ggml_backend_tensor_set(t, values.data(), 0, values.size()*sizeof(int64_t));
        return;
    }
    const std::vector<int32_t> narrow(values.begin(), values.end());
    ggml_backend_tensor_set(t, narrow.data(), 0, narrow.size()*sizeof(int32_t));
}

void set_bytes(ggml_tensor * t, const std::vector<uint8_t> & bytes) {
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

std::vector<float> get_floats(const ggml_tensor * t) {
    const std::vector<uint8_t> bytes = get_bytes(t);
    std::vector<float> res(ggml_nelements(t));
    if (t->type == GGML_TYPE_F32) {
        memcpy(res.data(), bytes.data(), bytes.size());
    } else {
        GGML_ASSERT(t->type == GGML_TYPE_F16);
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) bytes.data(), res.data(), (int64_t) res.size());
    }
    return res;
}

std::vector<uint8_t> get_bytes(const ggml_tensor * t) {
    std::vector<uint8_t> res(ggml_nbytes(t));
    ggml_backend_tensor_get(t, res.data(), 0, res.size());
    return res;
}

std::vector<int64_t> counting(int64_t first, int64_t n) {
    std::vector<int64_t> res((size_t) n);
    std::iota(res.begin(), res.end(), first);
    return res;
}

double differing(const std::vector<uint8_t> & a, const std::vector<uint8_t> & b) {
    size_t n = 0;
    for (size_t i = 0; i < a.size(); i++) {
        n += a[i] != b[i];
    }
    return (double) n/a.size();
}
