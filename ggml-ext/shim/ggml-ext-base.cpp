// The shim's part in ggml-base: our types as ggml's type traits, and the questions that come up when a cache is made.

#include "ggml-ext-seam.h"

#include "ggml-impl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int N_TYPES = GGML_EXT_TYPE_LIMIT - GGML_EXT_TYPE_BASE;

// ggml's row functions get no type, so there is one of each per id.
template <int ID> void to_float(const void * src, float * dst, int64_t n) {
    ggml_ext_decode(ID, src, dst, n);
}

template <int ID> void from_float_ref(const float * src, void * dst, int64_t n) {
    ggml_ext_encode_ref(ID, src, dst, n);
}

template <int ID> ggml_type_traits traits_of() {
    const ggml_ext_type * type = ggml_ext_type_get(ID);
    if (!type) {
        return { "unknown", 1, 0, 0, false, nullptr, nullptr };
    }
    if (type->head_size == 0) {
        return { type->name, 1, 0, 0, true, nullptr, nullptr };
    }
    if (type->group_cells > 1) {
        // a row means nothing without its group, and these functions are given rows alone
        return { type->name, type->head_size, 0, type->row_bytes, true, nullptr, nullptr };
    }
    return { type->name, type->head_size, 0, type->row_bytes, true, to_float<ID>, from_float_ref<ID> };
}

template <int... I> std::array<ggml_type_traits, N_TYPES> traits_of_all(std::integer_sequence<int, I...>) {
    return { { traits_of<GGML_EXT_TYPE_BASE + I>()... } };
}

// Made when a spec's id is first asked for, and kept: what is given out stays where it is.
const ggml_type_traits * spec_traits(ggml_type id) {
    static std::mutex mutex;
    static std::unordered_map<int32_t, ggml_type_traits> all;

    const ggml_ext_type * type = ggml_ext_type_get(id);
    if (!type) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    return &all.insert({ id, { type->name, 1, 0, 0, type->quantized, nullptr, nullptr } }).first->second;
}

// Would the device write rows of this type? Its answer for SET_ROWS is the one that backends give by naming types.
bool device_writes(ggml_backend_dev_t dev, ggml_type type, int32_t head_size) {
    const ggml_init_params params = { 4*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true };
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init(params), ggml_free);

    ggml_tensor * dst  = ggml_new_tensor_2d(ctx.get(), type,          head_size, 2);
    ggml_tensor * src  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, head_size, 1);
    ggml_tensor * rows = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 1);

    return ggml_backend_dev_supports_op(dev, ggml_set_rows(ctx.get(), dst, src, rows));
}

}  // namespace

const ggml_type_traits * ggml_ext_type_traits(ggml_type type) {
    static const std::array<ggml_type_traits, N_TYPES> all = traits_of_all(std::make_integer_sequence<int, N_TYPES>());
    static const ggml_type_traits unknown = { "unknown", 1, 0, 0, false, nullptr, nullptr };

    if ((uint32_t) type >= GGML_EXT_SPEC_BASE && (uint32_t) type < GGML_EXT_SPEC_LIMIT) {
        const ggml_type_traits * traits = spec_traits(type);
        return traits ? traits : &unknown;
    }
    return ggml_ext_is_ours(type) ? &all[(uint32_t) type - GGML_EXT_TYPE_BASE] : &unknown;
}

bool ggml_ext_is_concrete(ggml_type type) {
    return ggml_ext_type_traits(type)->type_size != 0;
}

size_t ggml_ext_quantize(ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row) {
    if (!ggml_ext_type_traits(type)->from_float_ref) {
        return 0;
    }
    const size_t row_size = ggml_row_size(type, n_per_row);
    for (int64_t i = 0; i < nrows; i++) {
        ggml_ext_type_traits(type)->from_float_ref(src + i*n_per_row, (char *) dst + i*row_size, n_per_row);
    }
    return nrows*row_size;
}

bool ggml_ext_concerns(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            break;
    }
    if ((uint32_t) op->type >= GGML_TYPE_COUNT) {
        return true;
    }
    for (const ggml_tensor * src : op->src) {
        if (src && (uint32_t) src->type >= GGML_TYPE_COUNT) {
            return true;
        }
    }
    return false;
}

bool ggml_ext_device_serves(ggml_backend_dev_t dev) {
    const char * name = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
    // "RPC[host:port]": what stands behind it is the server's to know
    return strcmp(name, "CPU") == 0 || strcmp(name, "MTL") == 0 || strcmp(name, "CUDA") == 0 || strncmp(name, "RPC", 3) == 0;
}

// Both ends must agree on what rows and sources of ops mean: raised with a version of any type's tables (src/table.rs), and with
// what attention takes (2: precise rows of recent cells).
static constexpr uint8_t RPC_VERSION = 5;

uint8_t ggml_ext_rpc_greeting(const ggml_backend_t * backends, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!ggml_ext_device_serves(ggml_backend_get_device(backends[i]))) {
            return 0;
        }
    }
    return RPC_VERSION;
}

namespace {

std::atomic<bool> groups_in_use{false};

std::mutex                               greetings_mutex;
std::unordered_map<std::string, uint8_t> greetings;

}  // namespace

void ggml_ext_rpc_greeted(const char * endpoint, uint8_t greeting) {
    std::lock_guard<std::mutex> lock(greetings_mutex);
    greetings[endpoint] = greeting;
}

bool ggml_ext_rpc_serves(const char * endpoint) {
    std::lock_guard<std::mutex> lock(greetings_mutex);
    const auto it = greetings.find(endpoint);
    return it != greetings.end() && it->second == RPC_VERSION;
}

ggml_type ggml_ext_cache_type_for(ggml_type type, char side, const ggml_ext_layer * layer, ggml_backend_dev_t dev,
                                  char * err, size_t err_size) {
    const int32_t id = ggml_ext_resolve(type, side, layer, err, err_size);
    if (id < 0) {
        return GGML_TYPE_COUNT;
    }
    if (err[0] != 0) {
        GGML_LOG_WARN("guard: %s\n", err);
    }

    const ggml_type res = (ggml_type) id;
    if (ggml_ext_is_ours(res) && dev && !device_writes(dev, res, layer->head_size)) {
        const bool rpc = strncmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC", 3) == 0;
        snprintf(err, err_size, "layer %d: device %s does not serve cache type %s%s: keep the cache on the CPU "
                 "(-nkvo, --no-kv-offload) or choose another type", layer->index, ggml_backend_dev_name(dev),
                 ggml_ext_type_get(id)->family, rpc ? " (the server behind it does not have the type, or another version of it)" : "");
        return GGML_TYPE_COUNT;
    }
    if (ggml_ext_is_ours(res) && ggml_ext_type_get(id)->group_cells > 1) {
        groups_in_use = true;
    }
    return res;
}

bool ggml_ext_groups_in_use(void) {
    return groups_in_use;
}

bool ggml_ext_device_attends_recent(ggml_backend_dev_t dev, const ggml_tensor * k, const ggml_tensor * v, ggml_type recent_k,
                                    ggml_type recent_v, int64_t n_head) {
    const ggml_init_params params = { 32*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true };
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init(params), ggml_free);

    // views of a cache, as llama.cpp's are
    const auto rows = [&](ggml_type type, int64_t n_cells, const ggml_tensor * of) {
        ggml_tensor * cache = ggml_new_tensor_2d(ctx.get(), type, of->ne[0], n_cells);
        const int64_t size  = of->ne[0]/n_head;
        ggml_tensor * view  = ggml_view_4d(ctx.get(), cache, size, n_head, n_cells, 1, ggml_row_size(type, size), cache->nb[1], ggml_nbytes(cache), 0);
        return ggml_permute(ctx.get(), view, 0, 2, 1, 3);
    };
    const int64_t cells = std::min<int64_t>(256, k->ne[1]), slots = 64;
    ggml_tensor * q    = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, k->ne[0]/n_head, 1, n_head, 1);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, cells, 1);
    // V of MLA is a part of K; what matters here is that it has K's type
    ggml_tensor * op = ggml_flash_attn_ext(ctx.get(), q, rows(k->type, cells, k), rows(v ? v->type : k->type, cells, v ? v : k), mask, 1.0f, 0.0f, 0.0f);
    op->src[5] = rows(recent_k, slots, k);
    op->src[6] = rows(v ? recent_v : recent_k, slots, v ? v : k);
    op->src[7] = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I64, slots, 1);
    return ggml_backend_dev_supports_op(dev, op);
}

void ggml_ext_warn_of_idle_parts(ggml_type type, char side, const uint8_t * layers, int32_t n_layer) {
    char idle[1024];
    ggml_ext_idle_parts(type, layers, n_layer, idle, sizeof(idle));
    if (idle[0] != 0) {
        GGML_LOG_WARN("%c cache type: %s\n", side, idle);
    }
}

size_t ggml_ext_read_floats(const ggml_tensor * t, int64_t first, int64_t n, float * dst) {
    // a dry run has tensors without data
    if (!t || !t->buffer || !t->data || (t->type != GGML_TYPE_F32 && t->type != GGML_TYPE_F16 && t->type != GGML_TYPE_BF16) ||
        !ggml_is_contiguous(t) || first < 0 || first + n > ggml_nelements(t)) {
        return 0;
    }
    std::vector<uint8_t> bytes(n*ggml_type_size(t->type));
    ggml_backend_tensor_get(t, bytes.data(), first*ggml_type_size(t->type), bytes.size());
    if (t->type == GGML_TYPE_F32) {
        memcpy(dst, bytes.data(), bytes.size());
    } else {
        ggml_get_type_traits(t->type)->to_float(bytes.data(), dst, n);
    }
    return (size_t) n;
}

bool ggml_ext_graph_served(ggml_cgraph * graph, const ggml_backend_t * backends, size_t n, char * err, size_t err_size) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * op = ggml_graph_node(graph, i);
        if (!ggml_ext_concerns(op) || std::any_of(backends, backends + n, [&](ggml_backend_t b) { return ggml_backend_supports_op(b, op); })) {
            continue;
        }
        // the tensor of ours: an operand, or else the result
        const ggml_tensor * cache = op;
        for (const ggml_tensor * src : op->src) {
            if (src && (uint32_t) src->type >= GGML_TYPE_COUNT) {
                cache = src;
                break;
            }
        }
        while (cache->view_src) {
            cache = cache->view_src;
        }
        snprintf(err, err_size, "this model computes %s (%s) with its cache %s, which cache type %s does not serve here: "
                 "use f16 or one of ggml's own types for it", ggml_op_name(op->op), op->name, cache->name, ggml_type_name(cache->type));
        return false;
    }
    return true;
}

void ggml_ext_cache_mix_of(const ggml_tensor * const * layers, int n, size_t recent_bytes, uint32_t recent_slots, char * text, size_t size) {
    std::vector<std::pair<std::string, int>> counts;  // in the order of layers
    double bytes  = (double) recent_bytes;
    double values = 0.0;
    bool   plain  = true;
    for (int i = 0; i < n; i++) {
        const ggml_type type = layers[i]->type;
        const std::string name = ggml_ext_is_ours(type) ? ggml_ext_type_get(type)->family : ggml_type_name(type);
        plain   = plain && !ggml_ext_is_ours(type) && type == layers[0]->type;
        bytes  += (double) ggml_nbytes(layers[i]);
        values += (double) ggml_nelements(layers[i]);

        size_t at = 0;
        while (at < counts.size() && counts[at].first != name) {
            at++;
        }
        if (at == counts.size()) {
            counts.push_back({ name, 0 });
        }
        counts[at].second++;
    }

    std::string mix;
    for (const auto & [name, count] : counts) {
        mix += (mix.empty() ? "" : " + ") + name + (counts.size() == 1 ? "" : " x" + std::to_string(count));
    }
    if ((plain && recent_bytes == 0) || values == 0.0) {
        snprintf(text, size, "%s", mix.c_str());
    } else {
        const std::string recent = recent_bytes == 0 ? "" : " with " + std::to_string(recent_slots) + " recent cells";
        snprintf(text, size, "%s, %.2f bits/value%s", mix.c_str(), 8.0*bytes/values, recent.c_str());
    }
}

// The library is an archive: what ggml-base does not mention would not become part of it, and the CPU backends,
// llama.cpp and its tools find these functions in ggml-base alone where libraries are shared.
extern "C" const void * const ggml_ext_entry_points[];
extern "C" const void * const ggml_ext_entry_points[] = {
#define ENTRY_POINT(f) (const void *) f,
    GGML_EXT_ENTRY_POINTS(ENTRY_POINT)
#undef ENTRY_POINT
};
