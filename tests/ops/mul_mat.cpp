// MUL_MAT with a K of ours: scores without flash attention.

#include "harness.h"
#include "reference.h"

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
    ggml_tensor * kq = ggml_mul_mat(ctx, ggml_permute(ctx, k, 0, 2, 1, 3), ggml_permute(ctx, q, 0, 2, 1, 3));
    g.add(kq);
    g.allocate(0xff);

    const std::vector<float> keys = rng.normals(ggml_nelements(cache));
    std::vector<uint8_t> bytes(ggml_nbytes(cache));
    ggml_ext_encode_ref(type->id, keys.data(), bytes.data(), (int64_t) keys.size());
    std::vector<float> decoded(keys.size());
    ggml_ext_decode_key(type->id, bytes.data(), decoded.data(), (int64_t) keys.size());
    set_bytes(cache, bytes);
    set_floats(q, rng.normals(ggml_nelements(q)));
    const std::vector<float> queries = get_floats(q);
    if (!g.compute()) {
        return;
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
}
