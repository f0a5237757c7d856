// MUL_MAT with a K of ours: scores without flash attention. And products of calibrated keys and queries.

#include "ops.h"
#include "reference.h"

#include "ggml-ext-seam.h"

namespace {

// q may be rounded to 8 bits on the way
constexpr double BOUND = 1e-2;

void scores(const ggml_ext_type * type, ggml_type q_type, int64_t n_q, int64_t n_kv, int64_t n_head, int64_t n_head_kv, int64_t n_stream) {
    if (!begin_case(std::string("mul_mat ") + type->name + " by " + ggml_type_name(q_type) + " q=" + std::to_string(n_q) +
                    " kv=" + std::to_string(n_kv) + " heads=" + std::to_string(n_head) + "/" + std::to_string(n_head_kv) +
                    " streams=" + std::to_string(n_stream))) {
        return;
    }
    Rng rng(seed_of(type->name) + n_q);
    const int64_t d = type->head_size, kv_size = n_kv + 5;

    Graph g;
    ggml_context * ctx = g.ctx();
    ggml_tensor * cache = ggml_new_tensor_3d(ctx, (ggml_type) type->id, d*n_head_kv, kv_size, n_stream);
    ggml_tensor * k = ggml_view_4d(ctx, cache, d, n_head_kv, n_kv, n_stream, type->row_bytes, cache->nb[1], cache->nb[2], 0);
    ggml_tensor * q = ggml_new_tensor_4d(ctx, q_type, d, n_head, n_q, n_stream);
    ggml_tensor * src  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d*n_head_kv, kv_size*n_stream);
    ggml_tensor * rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, kv_size*n_stream);
    ggml_tensor * flat = ggml_reshape_2d(ctx, cache, d*n_head_kv, kv_size*n_stream);
    ggml_tensor * read = ggml_get_rows(ctx, flat, rows);
    g.add(ggml_set_rows(ctx, flat, src, rows));
    g.add(read);
    ggml_tensor * kq = ggml_mul_mat(ctx, ggml_permute(ctx, k, 0, 2, 1, 3), ggml_permute(ctx, q, 0, 2, 1, 3));
    g.add(kq);
    // where cells are coded together the memory tells what is there already
    g.allocate(type->group_cells > 1 ? 0 : 0xff);

    std::vector<int64_t> order;
    for (int64_t i = 0; i < kv_size*n_stream; i++) {
        order.push_back(i);
    }
    set_floats(src, rng.normals(ggml_nelements(cache)));
    set_indices(rows, order);
    set_floats(q, rng.normals(ggml_nelements(q)));
    const std::vector<float> queries = get_floats(q);
    if (!g.compute()) {
        return;
    }
    // what a score is the product with is not always what a row decodes to
    std::vector<float> decoded = get_floats(read);
    if (type->group_cells == 1) {
        const std::vector<uint8_t> bytes = get_bytes(cache);
        ggml_ext_decode_key(type->id, bytes.data(), decoded.data(), (int64_t) decoded.size());
    }

    std::vector<double> want;
    for (int64_t s = 0; s < n_stream; s++) {
        for (int64_t h = 0; h < n_head; h++) {
            for (int64_t iq = 0; iq < n_q; iq++) {
                for (int64_t c = 0; c < n_kv; c++) {
                    const float * k_row = &decoded[((s*kv_size + c)*n_head_kv + h/(n_head/n_head_kv))*d];
                    const float * q_row = &queries[((s*n_q + iq)*n_head + h)*d];
                    double dot = 0.0;
                    for (int64_t i = 0; i < d; i++) {
                        dot += (double) k_row[i]*q_row[i];
                    }
                    want.push_back(dot);
                }
            }
        }
    }
    check_below(total_error(get_floats(kq), want), BOUND, "error of the scores");
}

// Marked, as ggml-ext-calibrated.h marks them, they are computed in f32: ggml itself rounds x to f16 first.
void products(int64_t d, int64_t n_head, int64_t n_head_kv, int64_t n_tokens) {
    if (!begin_case("products d=" + std::to_string(d) + " heads=" + std::to_string(n_head) + "/" + std::to_string(n_head_kv) + " tokens=" + std::to_string(n_tokens))) {
        return;
    }
    Rng rng(d + n_tokens);
    Graph g;
    ggml_context * ctx = g.ctx();
    ggml_tensor * m = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, d, d, n_head_kv);
    ggml_tensor * x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_head, n_tokens);
    ggml_tensor * y[2];
    for (int marked = 0; marked < 2; marked++) {
        y[marked] = ggml_mul_mat(ctx, m, ggml_permute(ctx, x, 0, 2, 1, 3)); // [d, tokens, heads]
        if (marked) {
            ggml_ext_mark_product(y[marked]);
        }
        g.add(y[marked]);
    }
    g.allocate(0xff);
    set_floats(m, rng.normals(ggml_nelements(m)));
    set_floats(x, rng.normals(ggml_nelements(x)));
    const std::vector<float> matrices = get_floats(m), rows = get_floats(x);
    if (!g.compute()) {
        return;
    }
    std::vector<double> want;
    for (int64_t h = 0; h < n_head; h++) {
        for (int64_t t = 0; t < n_tokens; t++) {
            for (int64_t i = 0; i < d; i++) {
                const float * m_row = &matrices[((h/(n_head/n_head_kv))*d + i)*d];
                const float * x_row = &rows[(t*n_head + h)*d];
                double dot = 0.0;
                for (int64_t j = 0; j < d; j++) {
                    dot += (double) m_row[j]*x_row[j];
                }
                want.push_back(dot);
            }
        }
    }
    check_below(total_error(get_floats(y[1]), want), 1e-6, "error of a marked product");
    check_below(total_error(get_floats(y[0]), want), 1e-3, "error of an ordinary one");
}

}  // namespace

void test_mul_mat() {
    for (const ggml_ext_type * type : concrete_types()) {
        if (!type->serves_k) {
            continue;
        }
        scores(type, GGML_TYPE_F32, 1, 300, 4, 2, 1);
        scores(type, GGML_TYPE_F32, 7, 31, 3, 1, 2);
        if (!quick) {
            scores(type, GGML_TYPE_F16, 2, 64, 8, 8, 1);
            scores(type, GGML_TYPE_F32, 33, 1, 4, 4, 1);
        }
    }
    for (int64_t d : { 64, 80, 128, 256 }) {
        for (int64_t n_tokens : { 1, 3, 40 }) {
            products(d, 6, 2, n_tokens);
        }
    }
}
