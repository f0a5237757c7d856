#include "bench.h"

#include "../harness/graph.h"
#include "../harness/random.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>

namespace {

// Bytes that lie between two reads of the same ones: several times the L2.
constexpr double APART = 400e6;
constexpr int    MOST_NODES = 48;

struct Shape {
    int     d, heads, kv_heads;
    int64_t cells;
    int     tokens, streams;
    int     slots = 0; // of a window of precise rows; a prompt then brings its own as well
    bool    step = false; // what a layer does for a token: reads weights and writes rows as well
};

// Weights that a layer reads between two attentions, as in a model of 8B with 4 bits: the L2 holds nothing else then, not even code.
constexpr int64_t WEIGHT_ROWS = 17090, WEIGHT_WIDTH = 4096;

struct Context {
    ggml_context *        ctx;
    ggml_backend_buffer_t buffer = nullptr;

    explicit Context(int tensors) : ctx(ggml_init({ ggml_tensor_overhead()*tensors + ggml_graph_overhead_custom(2048, false), nullptr, true })) {}
    ~Context() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

// Rows that follow each other, as keys do.
std::vector<float> keys_of_noise(int seed, int64_t width, int64_t rows) {
    std::vector<float> x = Rng(seed).normals(width*rows);
    for (int64_t i = width; i < width*rows; i++) {
        x[i] = 0.7f*x[i - width] + 0.7f*x[i];
    }
    return x;
}

// The bytes of rows of noise, written by the backend itself: groups are whole.
std::vector<uint8_t> rows_of_noise(ggml_backend_t backend, ggml_type type, int64_t width, int64_t rows) {
    Context c(16);
    ggml_tensor * cache  = ggml_new_tensor_2d(c.ctx, type, width, rows);
    ggml_tensor * floats = ggml_new_tensor_2d(c.ctx, GGML_TYPE_F32, width, rows);
    ggml_tensor * index  = ggml_new_tensor_1d(c.ctx, GGML_TYPE_I64, rows);
    ggml_cgraph * graph  = ggml_new_graph(c.ctx);
    ggml_build_forward_expand(graph, ggml_set_rows(c.ctx, cache, floats, index));
    c.buffer = ggml_backend_alloc_ctx_tensors(c.ctx, backend);
    ggml_backend_buffer_clear(c.buffer, 0);
    set_floats(floats, keys_of_noise(7, width, rows));
    set_indices(index, counting(0, rows));
    ggml_backend_graph_compute(backend, graph);
    return get_bytes(cache);
}

void fill(ggml_tensor * t, const std::vector<uint8_t> & bytes) {
    for (size_t at = 0; at < ggml_nbytes(t); at += bytes.size()) {
        ggml_backend_tensor_set(t, bytes.data(), at, std::min(bytes.size(), ggml_nbytes(t) - at));
    }
}

// Milliseconds of one node.
double timed(ggml_backend_t backend, ggml_cgraph * graph, int nodes, int inner) {
    for (int i = 0; i < 4; i++) {
        ggml_backend_graph_compute(backend, graph);
    }
    std::vector<double> ms;
    for (int r = 0; r < 9; r++) {
        ggml_backend_synchronize(backend);
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < inner; i++) {
            ggml_backend_graph_compute_async(backend, graph);
        }
        ggml_backend_synchronize(backend);
        ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count()/inner/nodes);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size()/2];
}

// Reads weights; those of four layers in turns.
class Weights {
  public:
    explicit Weights(ggml_context * ctx) : ctx_(ctx), x_(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, WEIGHT_WIDTH)) {
        for (ggml_tensor * & t : of_layers_) {
            t = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, WEIGHT_WIDTH, WEIGHT_ROWS);
        }
    }

    void read(ggml_cgraph * graph) {
        ggml_tensor * y = ggml_mul_mat(ctx_, of_layers_[turn_++ % 4], x_);
        ggml_set_output(y);
        ggml_build_forward_expand(graph, y);
    }

  private:
    ggml_context * ctx_;
    ggml_tensor *  x_, * of_layers_[4];
    int            turn_ = 0;
};

double reading_weights(ggml_backend_t backend) {
    const int nodes = 16;
    Context c(nodes + 16);
    ggml_cgraph * graph = ggml_new_graph_custom(c.ctx, 2048, false);
    Weights weights(c.ctx);
    for (int i = 0; i < nodes; i++) {
        weights.read(graph);
    }
    c.buffer = ggml_backend_alloc_ctx_tensors(c.ctx, backend);
    ggml_backend_buffer_clear(c.buffer, 0);
    return timed(backend, graph, nodes, 4);
}

double attention(ggml_backend_t backend, ggml_type type_k, ggml_type type_v, const Shape & s) {
    const int64_t width = (int64_t) s.d*s.kv_heads;
    const double bytes = (double) (ggml_row_size(type_k, width) + ggml_row_size(type_v, width))*s.cells*s.streams;
    const int nodes = (int) std::min<double>(MOST_NODES, std::max(s.tokens > 1 ? 2.0 : 4.0, std::ceil(APART/bytes)));
    Context c(nodes*26 + 24);
    ggml_cgraph * graph = ggml_new_graph_custom(c.ctx, 2048, false);
    ggml_tensor * q    = ggml_new_tensor_4d(c.ctx, GGML_TYPE_F32, s.d, s.tokens, s.heads, s.streams);
    ggml_tensor * mask = ggml_new_tensor_4d(c.ctx, GGML_TYPE_F16, s.cells, GGML_PAD(s.tokens, 64), 1, s.streams);
    const int batch = s.tokens > 1 ? s.tokens : 0;
    const ggml_type precise = type_for("srft8", s.d);
    ggml_tensor * cells = s.slots > 0 ? ggml_new_tensor_2d(c.ctx, GGML_TYPE_I64, s.slots + batch, s.streams) : nullptr;
    std::vector<ggml_tensor *> ks, vs, precise_rows;
    std::unique_ptr<Weights> weights;
    ggml_tensor * rows = nullptr, * last_cell = nullptr, * last_slot = nullptr;
    if (s.step) {
        weights   = std::make_unique<Weights>(c.ctx);
        rows      = ggml_new_tensor_2d(c.ctx, GGML_TYPE_F32, width, 1);
        last_cell = ggml_new_tensor_1d(c.ctx, GGML_TYPE_I64, 1);
        last_slot = ggml_new_tensor_1d(c.ctx, GGML_TYPE_I64, 1);
    }
    for (int i = 0; i < nodes; i++) {
        const auto side = [&](ggml_type type, int64_t n, std::vector<ggml_tensor *> & all) {
            ggml_tensor * t = ggml_new_tensor_3d(c.ctx, type, width, n, s.streams);
            all.push_back(t);
            return ggml_permute(c.ctx, ggml_view_4d(c.ctx, t, s.d, s.kv_heads, n, s.streams, ggml_row_size(type, s.d), t->nb[1], t->nb[2], 0), 0, 2, 1, 3);
        };
        ggml_tensor * k = side(type_k, s.cells, ks), * v = side(type_v, s.cells, vs);
        ggml_tensor * out = ggml_flash_attn_ext(c.ctx, q, k, v, mask, 1.0f/std::sqrt((float) s.d), 0.0f, 0.0f);
        ggml_set_output(out);
        for (int n = 0; n < 2 && cells; n++) {
            out->src[5 + n] = side(precise, s.slots, precise_rows);
            out->src[8 + n] = batch > 0 ? side(precise, batch, precise_rows) : nullptr;
            out->src[7]     = cells;
        }
        if (!ggml_backend_supports_op(backend, out)) {
            return NAN;
        }
        if (s.step) {
            weights->read(graph);
            const auto write = [&](ggml_tensor * to, ggml_tensor * index) { ggml_build_forward_expand(graph, ggml_set_rows(c.ctx, to, rows, index)); };
            write(ks.back(), last_cell);
            write(vs.back(), last_cell);
            for (int n = 0; n < 2 && cells; n++) {
                write(precise_rows[precise_rows.size() - 2 + n], last_slot);
            }
        }
        ggml_build_forward_expand(graph, out);
    }
    c.buffer = ggml_backend_alloc_ctx_tensors(c.ctx, backend);
    if (!c.buffer) {
        return NAN;
    }
    const std::vector<uint8_t> k_bytes = rows_of_noise(backend, type_k, width, 1024), v_bytes = rows_of_noise(backend, type_v, width, 1024);
    for (int i = 0; i < nodes; i++) {
        fill(ks[i], k_bytes);
        fill(vs[i], v_bytes);
    }
    if (s.step) {
        set_floats(rows, keys_of_noise(5, width, 1));
        set_indices(last_cell, { s.cells - 1 });
        set_indices(last_slot, { (2*s.slots - 1 - 37) % std::max(s.slots, 1) });
    }
    if (cells) {
        // the last cells: the batch's own, and before them a ring
        std::vector<int64_t> list;
        for (int st = 0; st < s.streams; st++) {
            for (int i = 0; i < s.slots; i++) {
                list.push_back(s.cells - batch - s.slots + (i + 37) % s.slots);
            }
            for (int i = 0; i < batch; i++) {
                list.push_back(s.cells - batch + i);
            }
        }
        set_indices(cells, list);
        const std::vector<uint8_t> bytes = rows_of_noise(backend, precise, width, 256);
        for (ggml_tensor * t : precise_rows) {
            fill(t, bytes);
        }
    }
    Rng rng(1);
    set_floats(q, rng.normals(ggml_nelements(q)));
    std::vector<ggml_fp16_t> m(ggml_nelements(mask), ggml_fp32_to_fp16(0.0f));
    for (int st = 0; st < s.streams; st++) {
        for (int t = 0; t < s.tokens; t++) {
            for (int64_t cell = s.cells - s.tokens + t + 1; cell < s.cells; cell++) {
                m[(st*mask->ne[1] + t)*s.cells + cell] = ggml_fp32_to_fp16(-INFINITY);
            }
        }
    }
    ggml_backend_tensor_set(mask, m.data(), 0, ggml_nbytes(mask));
    return timed(backend, graph, nodes, s.tokens > 1 ? 2 : 10);
}

double writing(ggml_backend_t backend, ggml_type type, int64_t width, int tokens) {
    const int nodes = 16;
    Context c(nodes*4 + 16);
    ggml_cgraph * graph  = ggml_new_graph_custom(c.ctx, 2048, false);
    ggml_tensor * floats = ggml_new_tensor_2d(c.ctx, GGML_TYPE_F32, width, tokens);
    ggml_tensor * index  = ggml_new_tensor_1d(c.ctx, GGML_TYPE_I64, tokens);
    // one cache for all: rows of several could be written by one launch
    ggml_tensor * cache = ggml_new_tensor_2d(c.ctx, type, width, 8192);
    for (int i = 0; i < nodes; i++) {
        ggml_tensor * set = ggml_set_rows(c.ctx, cache, floats, index);
        ggml_set_output(set);
        ggml_build_forward_expand(graph, set);
    }
    c.buffer = ggml_backend_alloc_ctx_tensors(c.ctx, backend);
    ggml_backend_buffer_clear(c.buffer, 0);
    set_floats(floats, keys_of_noise(3, width, tokens));
    // a few tokens go on with a group
    const int64_t first = tokens < 64 ? 1024 + 40 : 1024;
    const std::vector<uint8_t> before = rows_of_noise(backend, type, width, first);
    ggml_backend_tensor_set(cache, before.data(), 0, before.size());
    set_indices(index, counting(first, tokens));
    return timed(backend, graph, nodes, 4);
}

const char * const WRITING = "writing a layer of 8 x 128";

void all_writing(ggml_backend_t backend) {
    printf("%s:\n", WRITING);
    for (const char * type : { "f16", "q4_0", "srft4", "srft8", "srft3", "delta8", "delta4", "delta3", "band4", "band3", "polar4", "turbo4", "qjl1" }) {
        printf("  %-8s", type);
        for (int tokens : { 1, 16, 512 }) {
            printf(" %4d tokens %8.4f", tokens, writing(backend, type_for(type, 128), 8*128, tokens));
        }
        printf("\n");
        fflush(stdout);
    }
}

}  // namespace

void bench(ggml_backend_t backend, const BenchOptions & options) {
    printf("device: %s\nms of one op; decode of one token; x: times as fast as f16\n", ggml_backend_dev_description(ggml_backend_get_device(backend)));
    const auto wanted = [&](const std::string & name) { return name.find(options.only) != std::string::npos; };
    if (wanted(WRITING)) {
        all_writing(backend);
    }
    std::vector<std::string> pairs = { "f16/f16", "q8_0/q8_0", "q4_0/q4_0" };
    pairs.insert(pairs.end(), options.pairs.begin(), options.pairs.end());
    struct Row {
        const char * name;
        Shape        shape;
    };
    std::vector<Row> rows;
    for (int64_t cells : options.cells) {
        rows.push_back({ "decode 32/8 x 128", { 128, 32, 8, cells, 1, 1 } });
    }
    const double of_weights = reading_weights(backend);
    for (int64_t cells : options.cells) {
        rows.push_back({ "a layer's step between 140 MB of weights, 32/8 x 128", { 128, 32, 8, cells, 1, 1, 0, true } });
    }
    rows.push_back({ "decode 9/3 x 64",   { 64,  9,  3, 131072, 1,   1 } });
    rows.push_back({ "decode 8/4 x 256",  { 256, 8,  4, 131072, 1,   1 } });
    rows.push_back({ "decode, 8 streams", { 128, 32, 8, 32768,  1,   8 } });
    rows.push_back({ "prefill of 512",    { 128, 32, 8, 32768,  512, 1 } });
    for (const Row & row : rows) {
        if (!wanted(row.name)) {
            continue;
        }
        printf("%s, %lld cells:\n", row.name, (long long) row.shape.cells);
        double of_f16 = NAN;
        for (const std::string & pair : pairs) {
            const size_t slash = pair.find('/');
            const ggml_type k = type_for(pair.substr(0, slash), row.shape.d), v = type_for(pair.substr(slash + 1), row.shape.d);
            const double less = row.shape.step ? of_weights : 0.0, ms = attention(backend, k, v, row.shape) - less;
            of_f16 = pair == "f16/f16" ? ms : of_f16;
            printf("  %-14s %8.4f  x %.2f", pair.c_str(), ms, of_f16/ms);
            if (options.window > 0 && is_ours(k) && is_ours(v)) {
                Shape with = row.shape;
                with.slots = options.window;
                const double recent = attention(backend, k, v, with) - less;
                printf("  with a window of %d %8.4f, %.1f%% of the speed", options.window, recent, 100.0*ms/recent);
            }
            printf("\n");
            fflush(stdout);
        }
    }
}
