#include "kv-bench.h"

#include "../harness/random.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-ext.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Rows written by one SET_ROWS when a cache is filled: an ubatch of llama.cpp.
constexpr int64_t FILL_TOKENS = 512;

// KV_BENCH_DEVICE=gpu asks for the GPU's ops instead of the CPU's.
bool on_gpu() {
    static const bool gpu = [] {
        const char * device = getenv("KV_BENCH_DEVICE");
        return device && strcmp(device, "gpu") == 0;
    }();
    return gpu;
}

ggml_backend_t backend() {
    static ggml_backend_t chosen = [] {
        const enum ggml_backend_dev_type type = on_gpu() ? GGML_BACKEND_DEVICE_TYPE_GPU : GGML_BACKEND_DEVICE_TYPE_CPU;
        return ggml_backend_init_by_type(type, nullptr);
    }();
    if (!chosen) {
        throw std::runtime_error("there is no such device");
    }
    return chosen;
}

// By name, so that a build whose backends are loaded at run time serves too.
template <typename F> F of_cpu(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend()));
    F f = (F) ggml_backend_reg_get_proc_address(reg, name);
    if (!f) {
        throw std::runtime_error(std::string("the CPU backend has no ") + name);
    }
    return f;
}

// A pool that lives on between graphs, as llama.cpp's tools attach one; without it each graph would start its threads
// anew.
void use_threads(int n) {
    if (on_gpu()) {
        return;
    }
    static int               current = 0;
    static ggml_threadpool_t pool    = nullptr;
    static auto pool_new  = of_cpu<decltype(&ggml_threadpool_new)>("ggml_threadpool_new");
    static auto pool_free = of_cpu<decltype(&ggml_threadpool_free)>("ggml_threadpool_free");
    static auto pool_set  = of_cpu<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool");
    static auto set_n     = of_cpu<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads");
    if (n == current) {
        return;
    }
    pool_set(backend(), nullptr);
    if (pool) {
        pool_free(pool);
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    pool    = pool_new(&params);
    current = n;
    set_n(backend(), n);
    pool_set(backend(), pool);
}

// n normal values: a window, somewhere, of a few millions that are drawn once.
const float * normals(size_t n, Rng & rng) {
    static std::vector<float> pool;
    const size_t spare = 1 << 20;
    if (pool.size() < n + spare) {
        pool = Rng(1).normals(n + spare);
    }
    return pool.data() + rng.below((int64_t) (pool.size() - n));
}

ggml_type type_of(const std::string & name, int head_size) {
    const int32_t family = ggml_ext_type_from_name(name.c_str());
    if (family >= GGML_EXT_TYPE_BASE) {
        char err[256] = "";
        ggml_ext_layer layer = {};
        layer.n_layer   = 1;
        layer.head_size = head_size;
        const int32_t id = ggml_ext_resolve(family, 'k', &layer, err, sizeof(err));
        if (id < 0) {
            throw std::runtime_error(err);
        }
        return (ggml_type) id;
    }
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * its = ggml_type_name((ggml_type) i);
        if (its && its == name) {
            if (head_size % ggml_blck_size((ggml_type) i) != 0) {
                break;
            }
            return (ggml_type) i;
        }
    }
    throw std::runtime_error("no type " + name + " for heads of " + std::to_string(head_size));
}

struct Graph {
    ggml_context *        ctx;
    ggml_cgraph *         graph;
    ggml_backend_buffer_t buffer = nullptr;

    explicit Graph(int tensors) {
        ctx   = ggml_init({ (tensors + 16)*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*.no_alloc =*/ true });
        graph = ggml_new_graph(ctx);
    }
    ~Graph() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    Graph(const Graph &) = delete;
    Graph & operator=(const Graph &) = delete;

    void allocate() {
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend());
        if (!buffer) {
            throw std::runtime_error("no memory for it");
        }
    }
    // ggml computes what it does not support too, or aborts in it
    void check() const {
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            if (!ggml_backend_supports_op(backend(), node)) {
                throw std::runtime_error(std::string(ggml_backend_name(backend())) + " refuses " + ggml_op_desc(node));
            }
        }
    }
    bool compute() { return ggml_backend_graph_compute(backend(), graph) == GGML_STATUS_SUCCESS; }
};

// Writes every row of `cache` with random values, a batch at a time.
void fill(ggml_tensor * cache, Rng & rng) {
    const int64_t width = cache->ne[0];
    for (int64_t first = 0; first < cache->ne[1]; first += FILL_TOKENS) {
        const int64_t n = std::min(FILL_TOKENS, cache->ne[1] - first);
        Graph g(8);
        ggml_tensor * src = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, width, n);
        ggml_tensor * at  = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I64, n);
        ggml_build_forward_expand(g.graph, ggml_set_rows(g.ctx, cache, src, at));
        g.allocate();
        g.check();
        std::vector<int64_t> rows(n);
        std::iota(rows.begin(), rows.end(), first);
        ggml_backend_tensor_set(src, normals(width*n, rng), 0, ggml_nbytes(src));
        ggml_backend_tensor_set(at, rows.data(), 0, ggml_nbytes(at));
        if (!g.compute()) {
            throw std::runtime_error("the cache could not be written");
        }
    }
}

template <typename F> kvb_problem * guarded(char * err, size_t err_size, F make) {
    try {
        return make();
    } catch (const std::exception & e) {
        snprintf(err, err_size, "%s", e.what());
        return nullptr;
    }
}

}  // namespace

struct kvb_problem {
    Graph    cache{ 256 };  // tensors that are written before, or that stand for what earlier ops left
    Graph    graph{ 256 };
    uint64_t bytes   = 0;
    int      threads = 1;
};

kvb_problem * kvb_attention(const char * type_k, const char * type_v, int head_size, int n_head, int n_head_kv,
                            int64_t cells, int queries, int threads, char * err, size_t err_size) {
    return guarded(err, err_size, [&] {
        auto p = std::make_unique<kvb_problem>();
        p->threads = threads;
        use_threads(threads);
        Rng rng(7);

        const int64_t width = (int64_t) head_size*n_head_kv;
        ggml_tensor * k_cache = ggml_new_tensor_2d(p->cache.ctx, type_of(type_k, head_size), width, cells);
        ggml_tensor * v_cache = ggml_new_tensor_2d(p->cache.ctx, type_of(type_v, head_size), width, cells);
        p->cache.allocate();
        p->bytes = ggml_nbytes(k_cache) + ggml_nbytes(v_cache);
        fill(k_cache, rng);
        fill(v_cache, rng);

        // as build_attn_mha makes it
        ggml_context * ctx = p->graph.ctx;
        const auto view = [&](ggml_tensor * cache) {
            ggml_tensor * t = ggml_view_4d(ctx, cache, head_size, n_head_kv, cells, 1,
                ggml_row_size(cache->type, head_size), cache->nb[1], cache->nb[1]*cells, 0);
            return ggml_permute(ctx, t, 0, 2, 1, 3);
        };
        ggml_tensor * q    = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, head_size, n_head, queries, 1);
        ggml_tensor * mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, cells, queries, 1, 1);
        ggml_tensor * out  = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), view(k_cache), view(v_cache), mask,
            1.0f/std::sqrt((float) head_size), 0.0f, 0.0f);
        ggml_flash_attn_ext_set_prec(out, GGML_PREC_F32);
        ggml_build_forward_expand(p->graph.graph, out);
        p->graph.allocate();
        p->graph.check();

        ggml_backend_tensor_set(q, normals(ggml_nelements(q), rng), 0, ggml_nbytes(q));
        std::vector<ggml_fp16_t> seen(cells*queries, ggml_fp32_to_fp16(0.0f));
        for (int64_t i = 0; i < queries; i++) {
            for (int64_t cell = std::max<int64_t>(cells - queries + i + 1, 0); cell < cells; cell++) {
                seen[i*cells + cell] = ggml_fp32_to_fp16(-INFINITY);
            }
        }
        ggml_backend_tensor_set(mask, seen.data(), 0, ggml_nbytes(mask));
        return p.release();
    });
}

kvb_problem * kvb_encode(const char * type, int head_size, int n_head_kv, int tokens, int ops, int threads,
                         char * err, size_t err_size) {
    return guarded(err, err_size, [&] {
        auto p = std::make_unique<kvb_problem>();
        p->threads = threads;
        use_threads(threads);
        Rng rng(11);

        const int64_t width = (int64_t) head_size*n_head_kv;
        const ggml_type t = type_of(type, head_size);
        ggml_tensor * src = ggml_new_tensor_2d(p->cache.ctx, GGML_TYPE_F32, width, tokens);
        ggml_tensor * at  = ggml_new_tensor_1d(p->cache.ctx, GGML_TYPE_I64, tokens);
        std::vector<ggml_tensor *> caches;
        for (int i = 0; i < ops; i++) {
            caches.push_back(ggml_new_tensor_2d(p->cache.ctx, t, width, std::max<int64_t>(tokens, 256)));
        }
        p->cache.allocate();
        ggml_backend_buffer_clear(p->cache.buffer, 0);
        std::vector<int64_t> rows(tokens);
        std::iota(rows.begin(), rows.end(), 0);
        ggml_backend_tensor_set(src, normals(width*tokens, rng), 0, ggml_nbytes(src));
        ggml_backend_tensor_set(at, rows.data(), 0, ggml_nbytes(at));

        for (ggml_tensor * cache : caches) {
            p->bytes += ggml_row_size(t, width)*tokens;
            ggml_build_forward_expand(p->graph.graph, ggml_set_rows(p->graph.ctx, cache, src, at));
        }
        // the results are views of the caches, so there is nothing to allocate
        for (int i = 0; i < ggml_graph_n_nodes(p->graph.graph); i++) {
            ggml_backend_view_init(ggml_graph_node(p->graph.graph, i));
        }
        p->graph.check();
        return p.release();
    });
}

int kvb_run(kvb_problem * problem) {
    use_threads(problem->threads);
    return problem->graph.compute() ? 0 : 1;
}

uint64_t kvb_cache_bytes(const kvb_problem * problem) {
    return problem->bytes;
}

void kvb_free(kvb_problem * problem) {
    delete problem;
}

const char * kvb_isa(void) {
    return ggml_ext_isa();
}
