// SET_ROWS, GET_ROWS, CPY, DUP, CONT and CONCAT against the reference format: bytes in, values out, nothing else touched.

#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

std::vector<uint8_t> encoded(const ggml_ext_type * type, const float * src, int64_t n) {
    std::vector<uint8_t> res(n/type->head_size*type->row_bytes);
    ggml_ext_encode_ref(type->id, src, res.data(), n);
    return res;
}

std::vector<float> decoded(const ggml_ext_type * type, const uint8_t * src, int64_t n) {
    std::vector<float> res(n);
    ggml_ext_decode(type->id, src, res.data(), n);
    return res;
}

std::vector<uint8_t> noise(Rng & rng, size_t n) {
    std::vector<uint8_t> res(n);
    for (uint8_t & b : res) {
        b = (uint8_t) rng.next();
    }
    return res;
}

std::vector<float> through_f16(std::vector<float> x) {
    for (float & v : x) {
        v = ggml_fp16_to_fp32(ggml_fp32_to_fp16(v));
    }
    return x;
}

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

void set_then_get(const ggml_ext_type * type, ggml_type src_type, ggml_type idx_type, int64_t n_stream, bool strided) {
    if (!begin_case(std::string("rows ") + type->name + " from " + ggml_type_name(src_type) + " by " +
                    ggml_type_name(idx_type) + " streams=" + std::to_string(n_stream) + (strided ? " strided" : ""))) {
        return;
    }
    Rng rng(seed_of(type->name) + src_type + 100*idx_type + n_stream);

    const int64_t n = 3*type->head_size, n_cells = 23, n_rows = 9;
    const size_t  row_bytes = 3*type->row_bytes;

    Graph g;
    ggml_tensor * cache = ggml_new_tensor_3d(g.ctx(), (ggml_type) type->id, n, n_cells, n_stream);
    // strided: rows with a gap between them, as a view of a fused QKV row has
    const int64_t n_src = strided ? 2*n : n;
    ggml_tensor * whole = ggml_new_tensor_3d(g.ctx(), src_type, n_src, n_rows, n_stream);
    ggml_tensor * src   = ggml_view_3d(g.ctx(), whole, n, n_rows, n_stream, whole->nb[1], whole->nb[2], (n_src - n)*whole->nb[0]);
    ggml_tensor * rows  = ggml_new_tensor_2d(g.ctx(), idx_type, n_rows, n_stream);
    ggml_tensor * read  = ggml_new_tensor_2d(g.ctx(), GGML_TYPE_I32, n_rows, n_stream);
    g.add(ggml_set_rows(g.ctx(), cache, src, rows));
    ggml_tensor * got = ggml_get_rows(g.ctx(), cache, read);
    g.add(got);
    g.allocate(0);

    std::vector<float> values = rng.normals(ggml_nelements(whole), 3.0f);
    if (src_type == GGML_TYPE_F16) {
        values = through_f16(values);
    }
    std::vector<int64_t> to;
    for (int64_t s = 0; s < n_stream; s++) {
        for (int64_t r : rng.distinct(n_rows, n_cells)) {
            to.push_back(r);
        }
    }
    const std::vector<uint8_t> before = noise(rng, ggml_nbytes(cache));
    set_bytes(cache, before);
    set_floats(whole, values);
    set_indices(rows, to);
    set_indices(read, to);
    if (!g.compute()) {
        return;
    }

    std::vector<uint8_t> want = before;
    for (int64_t i = 0; i < n_stream*n_rows; i++) {
        const std::vector<uint8_t> row = encoded(type, &values[i*n_src + n_src - n], n);
        std::copy(row.begin(), row.end(), &want[(i/n_rows*n_cells + to[i])*row_bytes]);
    }
    const std::vector<uint8_t> after = get_bytes(cache);
    const std::vector<float>   back  = get_floats(got);
    int wrong = 0, touched = 0, unread = 0;
    for (int64_t s = 0; s < n_stream; s++) {
        for (int64_t r = 0; r < n_cells; r++) {
            const size_t at = (s*n_cells + r)*row_bytes;
            const int64_t * begin = &to[s*n_rows], * end = begin + n_rows;
            const int64_t * hit = std::find(begin, end, r);
            const bool same = memcmp(&after[at], &want[at], row_bytes) == 0;
            wrong   += hit != end && !same;
            touched += hit == end && !same;
            if (hit != end) {
                const int64_t i = hit - to.data();
                const std::vector<float> values_back = decoded(type, &after[at], n);
                unread += memcmp(&back[i*n], values_back.data(), n*sizeof(float)) != 0;
            }
        }
    }
    check(wrong == 0, std::to_string(wrong) + " rows differ from the reference format");
    check(touched == 0, std::to_string(touched) + " rows were touched that were not written");
    check(unread == 0, std::to_string(unread) + " rows come back other than they decode");
}

// There and back by CPY; DUP and CONT; through permuted views, as K-shift does it.
void copies(const ggml_ext_type * type, ggml_type other) {
    if (!begin_case(std::string("copies ") + type->name + " and " + ggml_type_name(other))) {
        return;
    }
    const ggml_type our = (ggml_type) type->id;
    Rng rng(seed_of(type->name) + other);

    const int64_t d = type->head_size, n_head = 3, n = 5;
    Graph g;
    ggml_context * ctx = g.ctx();
    ggml_tensor * plain   = ggml_new_tensor_3d(ctx, other, d, n_head, n);
    ggml_tensor * cache   = ggml_new_tensor_3d(ctx, our, d, n_head, n);
    ggml_tensor * to_ours = ggml_cpy(ctx, plain, cache);
    g.add(to_ours);
    ggml_tensor * dup     = ggml_dup(ctx, to_ours);
    ggml_tensor * turned  = ggml_cont(ctx, ggml_permute(ctx, to_ours, 0, 2, 1, 3));
    ggml_tensor * back    = ggml_cast(ctx, to_ours, other);
    ggml_tensor * back_t  = ggml_cast(ctx, ggml_permute(ctx, to_ours, 0, 2, 1, 3), other);
    // other shape, same rows
    ggml_tensor * flat    = ggml_cpy(ctx, to_ours, ggml_new_tensor_2d(ctx, our, d*n_head, n));
    // from a permuted source
    ggml_tensor * from_t  = ggml_cpy(ctx, ggml_permute(ctx, plain, 0, 2, 1, 3), ggml_new_tensor_3d(ctx, our, d, n, n_head));
    for (ggml_tensor * t : { dup, turned, back, back_t, flat, from_t }) {
        g.add(t);
    }
    g.allocate(0xff);
    const std::vector<float> values = other == GGML_TYPE_F16 ? through_f16(rng.normals(d*n_head*n)) : rng.normals(d*n_head*n);
    set_floats(plain, values);
    if (!g.compute()) {
        return;
    }

    const auto permuted = [&](const auto & rows, size_t size) {
        auto res = rows;
        for (int64_t h = 0; h < n_head; h++) {
            for (int64_t i = 0; i < n; i++) {
                std::copy_n(rows.begin() + (i*n_head + h)*size, size, res.begin() + (h*n + i)*size);
            }
        }
        return res;
    };
    const std::vector<uint8_t> bytes = encoded(type, values.data(), (int64_t) values.size());
    std::vector<float> floats = decoded(type, bytes.data(), (int64_t) values.size());
    if (other == GGML_TYPE_F16) {
        floats = through_f16(floats);
    }
    check(get_bytes(cache) == bytes, "CPY to ours is the reference format");
    check(get_bytes(dup) == bytes, "DUP keeps the bytes");
    check(get_bytes(flat) == bytes, "CPY to another shape keeps the bytes");
    check(get_bytes(turned) == permuted(bytes, type->row_bytes), "CONT of a permuted view moves whole rows");
    check(get_bytes(from_t) == permuted(bytes, type->row_bytes), "CPY from a permuted view");
    check(same_bits(get_floats(back), floats), "CPY from ours decodes");
    check(same_bits(get_floats(back_t), permuted(floats, d)), "CPY from a permuted view of ours");
}

// The cells of two caches behind one another, each a view of its first cells, in two streams, as DeepSeek-V4 has it.
void joined(const ggml_ext_type * type) {
    if (!begin_case(std::string("joined ") + type->name)) {
        return;
    }
    const ggml_type our = (ggml_type) type->id;
    Rng rng(seed_of(type->name) + 1);

    const int64_t d = type->head_size, n_head = 2, n_stream = 2, n_cells = 9, n[] = { 5, 3 };
    const size_t  cell = n_head*type->row_bytes;
    Graph g;
    ggml_tensor *        caches[2];
    ggml_tensor *        views[2];
    std::vector<uint8_t> bytes[2];
    for (int i = 0; i < 2; i++) {
        caches[i] = ggml_new_tensor_3d(g.ctx(), our, d*n_head, n_cells, n_stream);
        views[i]  = ggml_view_4d(g.ctx(), caches[i], d, n_head, n[i], n_stream, type->row_bytes, cell, n_cells*cell, 0);
        bytes[i]  = noise(rng, n_stream*n_cells*cell);
    }
    ggml_tensor * all = ggml_concat(g.ctx(), views[0], views[1], 2);
    g.add(all);
    check(!Graph::supports(ggml_concat(g.ctx(), views[0], views[0], 0)), "rows are not joined end to end");
    g.allocate(0xff);
    set_bytes(caches[0], bytes[0]);
    set_bytes(caches[1], bytes[1]);
    if (!g.compute()) {
        return;
    }
    std::vector<uint8_t> wanted;
    for (int64_t s = 0; s < n_stream; s++) {
        for (int i = 0; i < 2; i++) {
            const auto first = bytes[i].begin() + s*n_cells*cell;
            wanted.insert(wanted.end(), first, first + n[i]*cell);
        }
    }
    check(get_bytes(all) == wanted, "CONCAT moves whole rows");
}

// Encoding takes anything; what was finite stays finite.
void strange_values(const ggml_ext_type * type) {
    if (!begin_case(std::string("strange values ") + type->name)) {
        return;
    }
    const int64_t d = type->head_size;
    const float values[] = { 0.0f, -0.0f, 1e-42f, 1e-30f, 65504.0f, 1e30f, -3.4e38f, INFINITY, -INFINITY, NAN };
    for (float value : values) {
        for (bool alone : { true, false }) {
            std::vector<float> src(d, alone ? 0.0f : value);
            src[d/3] = value;
            std::vector<uint8_t> fast(type->row_bytes), ref(type->row_bytes);
            std::vector<float> out(d, NAN);
            const bool ok = ggml_ext_encode(type->id, src.data(), fast.data(), d) &&
                            ggml_ext_encode_ref(type->id, src.data(), ref.data(), d) &&
                            ggml_ext_decode(type->id, fast.data(), out.data(), d);
            check(ok && fast == ref, "the reference and the fast encoder agree on " + std::to_string(value));
            if (std::fabs(value) < 1000.0f) {
                check(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x) && std::fabs(x) < 1000.0f; }),
                      "small values stay small: " + std::to_string(value));
            }
        }
    }
}

}  // namespace

void test_rows() {
    for (const ggml_ext_type * type : concrete_types()) {
        strange_values(type);
        if (type->group_cells > 1) {
            continue;  // see groups.cpp
        }
        for (ggml_type src : { GGML_TYPE_F32, GGML_TYPE_F16 }) {
            for (ggml_type idx : { GGML_TYPE_I64, GGML_TYPE_I32 }) {
                for (int64_t n_stream : { 1, 2 }) {
                    if (!quick || (src == GGML_TYPE_F32) == (idx == GGML_TYPE_I64)) {
                        set_then_get(type, src, idx, n_stream, n_stream == 2);
                    }
                }
            }
            copies(type, src);
        }
        joined(type);
    }
}
