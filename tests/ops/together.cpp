// Ops of a CPU's graph that threads go through without waiting for each other (ggml_ext_cpu_fuse), and those that must wait: products of
// calibrated keys and queries, centers of values, and rows that are written. One thread does them in their order, which is what several must come to.

#include "ops.h"

#include "ggml-ext-seam.h"

namespace {

// What the allocator of a graph may do: a result lies where something was that nobody needs any more.
enum class Reuse { none, keys, multiplied };

struct Results {
    std::vector<uint8_t> k, v;
    std::vector<float>   queries;

    int64_t waits_saved = 0;

    bool operator==(const Results & other) const { return k == other.k && v == other.v && queries == other.queries; }
};

ggml_tensor * product(ggml_context * ctx, ggml_tensor * m, ggml_tensor * x) {
    ggml_tensor * y = ggml_mul_mat(ctx, m, ggml_reshape_4d(ctx, x, x->ne[0], x->ne[1]/m->ne[2], m->ne[2], x->ne[2]));
    ggml_ext_mark_product(y);
    return y;
}

// As a layer has them: keys are multiplied and written, values lose their centers and are written, queries are multiplied.
Results layer(const ggml_ext_type * type_k, const ggml_ext_type * type_v, int64_t n_tokens, Reuse reuse, bool centered, int n_threads) {
    const int64_t d = type_k->head_size, n_head_kv = 3, n_head = 6, n_cells = 256;
    Rng rng(seed_of(type_k->name));
    Graph g;
    ggml_context * ctx = g.ctx();
    const auto floats = [&](int64_t heads) { return ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, heads, n_tokens); };
    const auto matrix = [&] { return ggml_new_tensor_3d(ctx, GGML_TYPE_F16, d, d, n_head_kv); };
    const auto cache  = [&](const ggml_ext_type * t) { return ggml_new_tensor_2d(ctx, (ggml_type) t->id, d*n_head_kv, n_cells); };
    ggml_tensor * k = floats(n_head_kv), * v = floats(n_head_kv), * q = floats(n_head), * m_k = matrix(), * m_q = matrix();
    ggml_tensor * center = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d, n_head_kv);
    ggml_tensor * cache_k = cache(type_k), * cache_v = cache(type_v), * rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_tokens);

    ggml_tensor * keys = product(ctx, m_k, k);
    g.add(keys);
    g.add(ggml_set_rows(ctx, cache_k, ggml_reshape_2d(ctx, keys, d*n_head_kv, n_tokens), rows));
    ggml_tensor * values = centered ? ggml_sub(ctx, v, center) : v;
    if (centered) {
        ggml_ext_mark_center(values);
    }
    g.add(ggml_set_rows(ctx, cache_v, ggml_reshape_2d(ctx, values, d*n_head_kv, n_tokens), rows));
    ggml_tensor * queries = product(ctx, m_q, q);
    g.add(queries);
    g.allocate(0);
    if (reuse != Reuse::none) {
        // queries are twice as long as keys: what lies behind those is not read again
        queries->data = reuse == Reuse::keys ? k->data : keys->data;
    }
    for (ggml_tensor * t : { m_k, m_q, k, v, q, center }) {
        set_floats(t, rng.normals(ggml_nelements(t)));
    }
    set_indices(rows, counting(70, n_tokens));
    const int64_t before = ggml_ext_cpu_waits_saved();
    if (!g.compute(n_threads)) {
        return {};
    }
    return { get_bytes(cache_k), get_bytes(cache_v), get_floats(queries), ggml_ext_cpu_waits_saved() - before };
}

void together(const char * k, const char * v, int64_t n_tokens, Reuse reuse, bool centered) {
    const char * names[] = { "nothing", "keys", "multiplied keys" };
    if (!begin_case(std::string("together ") + k + "/" + v + " tokens=" + std::to_string(n_tokens) + " queries where " + names[(int) reuse] + " were" +
                    (centered ? ", values without centers" : ""))) {
        return;
    }
    // one token is done before anybody could be too early: larger heads, and more often
    const int d = n_tokens == 1 ? 256 : 64, n_times = n_tokens == 1 ? 24 : 12;
    const ggml_ext_type * type_k = ggml_ext_type_get(type_for(k, d)), * type_v = ggml_ext_type_get(type_for(v, d));
    const Results want = layer(type_k, type_v, n_tokens, reuse, centered, 1);
    for (int i = 0; i < n_times; i++) {
        const int     n_threads = 2 + i % 4;
        const Results got       = layer(type_k, type_v, n_tokens, reuse, centered, n_threads);
        check(got == want, "several threads come to what one does");
        // of one token a thread has its own heads, unless there are five threads for three; queries wait where they reuse memory
        const int64_t saved = (n_tokens == 1 && n_threads < 5 ? 2 : 1) + (reuse == Reuse::none) + centered;
        check(got.waits_saved == saved, std::to_string(got.waits_saved) + " waits are saved, not " + std::to_string(saved));
    }
}

// The result of an attention gets its centers back: in one go where it lies, and in two elsewhere.
void results_with_centers(int64_t n_tokens) {
    if (!begin_case("together: centers of results, tokens=" + std::to_string(n_tokens))) {
        return;
    }
    const int64_t d = 64, n_head_kv = 2, n_head = 6, n_cells = 256;
    const ggml_ext_type * type = ggml_ext_type_get(type_for("srft4", (int) d));
    std::vector<float> plain, centers;
    for (const bool marked : { false, true }) {
        for (const bool in_place : { false, true }) {
            Rng rng(7);
            Graph g;
            ggml_context * ctx = g.ctx();
            ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_tokens, n_head), * center = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d, n_head_kv);
            ggml_tensor * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d*n_head_kv, n_cells), * at = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_cells);
            ggml_tensor * cache = ggml_new_tensor_2d(ctx, (ggml_type) type->id, d*n_head_kv, n_cells);
            g.add(ggml_set_rows(ctx, cache, rows, at));
            ggml_tensor * kv  = ggml_permute(ctx, ggml_view_3d(ctx, cache, d, n_head_kv, n_cells, ggml_row_size(cache->type, d), cache->nb[1], 0), 0, 2, 1, 3);
            ggml_tensor * att = ggml_flash_attn_ext(ctx, q, kv, kv, nullptr, 0.125f, 0.0f, 0.0f);
            g.add(att);
            ggml_tensor * res = ggml_add(ctx, ggml_reshape_4d(ctx, att, d, n_head/n_head_kv, n_head_kv, n_tokens), ggml_reshape_3d(ctx, center, d, 1, n_head_kv));
            if (marked) {
                ggml_ext_mark_center(res);
            }
            g.add(res);
            g.allocate(0);
            if (in_place) {
                res->data = att->data;
            }
            for (ggml_tensor * t : { q, rows, center }) {
                set_floats(t, rng.normals(ggml_nelements(t)));
            }
            set_indices(at, counting(0, n_cells));
            const int64_t before = ggml_ext_cpu_waits_saved();
            if (!g.compute(3)) {
                return;
            }
            const std::vector<float> got = get_floats(res);
            if (!marked && !in_place) {
                plain   = got;
                centers = get_floats(center);
                const std::vector<float> without = get_floats(att);
                bool all = true;
                for (size_t i = 0; i < got.size(); i++) {
                    const size_t head = i/d % n_head/(n_head/n_head_kv);
                    all = all && got[i] == without[i] + centers[head*d + i % d];
                }
                check(all, "each head has the center of its KV head");
            }
            check(got == plain, "the result is the same, whoever adds");
            const int64_t saved = ggml_ext_cpu_waits_saved() - before;
            check(saved == (marked && in_place), std::to_string(saved) + " waits are saved");
        }
    }
}

// Matrices that an RPC server may be sent: nobody runs through memory that their steps tell of, while others are multiplied.
void crafted() {
    if (!begin_case("together: matrices with steps of 2^62 bytes")) {
        return;
    }
    const int64_t d = 64;
    Graph g;
    ggml_context * ctx = g.ctx();
    ggml_tensor * w = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d, d), * x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, 1, 1);
    ggml_tensor * m = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, d, d, 1);
    ggml_tensor * before = ggml_mul_mat(ctx, w, x), * y = product(ctx, m, x), * z = product(ctx, m, x);
    for (ggml_tensor * t : { before, y, z }) {
        g.add(t);
    }
    g.allocate(0);
    Rng rng(62);
    for (ggml_tensor * t : { w, x, m }) {
        set_floats(t, rng.normals(ggml_nelements(t)));
    }
    g.compute();
    const std::vector<float> want = get_floats(y);
    set_floats(y, std::vector<float>(d));
    m->nb[2] = m->nb[3] = (size_t) 1 << 62;
    check(g.compute() && get_floats(y) == want && get_floats(z) == want, "one matrix has no next one, wherever that would be");
}

}  // namespace

void test_together() {
    crafted();
    for (const int64_t n_tokens : { 1, 40 }) {
        results_with_centers(n_tokens);
    }
    for (const Reuse reuse : { Reuse::none, Reuse::keys, Reuse::multiplied }) {
        for (const int64_t n_tokens : { 1, 8, 100 }) {
            for (const bool centered : { false, true }) {
                together("delta4", "srft4", n_tokens, reuse, centered);
                together("srft8", "srft3", n_tokens, reuse, centered);
            }
        }
    }
}
