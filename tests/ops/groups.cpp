// Types whose cells are coded together: rows go in by SET_ROWS and come out by GET_ROWS and CPY, whatever the view, the
// batches, the threads and the order.

#include "ops.h"
#include "reference.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t HEADS = 3, CELLS = 150, STREAMS = 2;

// Keys as models have them: a mean that stays and a part that changes slowly from cell to cell.
std::vector<float> keys_in_order(Rng & rng, int64_t n, int64_t width) {
    const std::vector<float> mean = rng.normals(width, 3.0f);
    std::vector<float> slow = rng.normals(width), res;
    for (int64_t i = 0; i < n; i++) {
        const std::vector<float> fresh = rng.normals(width, 0.43f);
        for (int64_t j = 0; j < width; j++) {
            slow[j] = 0.9f*slow[j] + fresh[j];
            res.push_back(mean[j] + slow[j]);
        }
    }
    return res;
}

// A cache of two streams, and what was last written to each row.
class Cache {
  public:
    Cache(const ggml_ext_type * type, uint8_t fill) : width_(HEADS*type->head_size), values_(CELLS*STREAMS*width_, 0.0f) {
        cache_ = ggml_new_tensor_3d(memory_.ctx(), (ggml_type) type->id, width_, CELLS, STREAMS);
        memory_.allocate(fill);
    }

    ggml_tensor * tensor() const { return cache_; }
    int64_t       width()  const { return width_; }

    // The streams as one, as llama.cpp writes them.
    ggml_tensor * merged(ggml_context * ctx) const { return ggml_reshape_2d(ctx, cache_, width_, CELLS*STREAMS); }

    bool write(const std::vector<int64_t> & rows, const float * values, int n_threads = 2) {
        Graph g;
        ggml_tensor * src = ggml_new_tensor_2d(g.ctx(), GGML_TYPE_F32, width_, (int64_t) rows.size());
        ggml_tensor * at  = ggml_new_tensor_1d(g.ctx(), GGML_TYPE_I64, (int64_t) rows.size());
        g.add(ggml_set_rows(g.ctx(), merged(g.ctx()), src, at));
        g.allocate(0);
        set_floats(src, std::vector<float>(values, values + rows.size()*width_));
        set_indices(at, rows);
        for (size_t i = 0; i < rows.size(); i++) {
            std::copy_n(values + i*width_, width_, &values_[rows[i]*width_]);
        }
        return g.compute(n_threads);
    }

    std::vector<float> read() const {
        Graph g;
        ggml_tensor * at  = ggml_new_tensor_1d(g.ctx(), GGML_TYPE_I32, CELLS*STREAMS);
        ggml_tensor * got = ggml_get_rows(g.ctx(), merged(g.ctx()), at);
        g.add(got);
        g.allocate(0);
        std::vector<int64_t> rows;
        for (int64_t i = 0; i < CELLS*STREAMS; i++) {
            rows.push_back(i);
        }
        set_indices(at, rows);
        return g.compute() ? get_floats(got) : std::vector<float>();
    }

    std::vector<double> want() const { return std::vector<double>(values_.begin(), values_.end()); }

  private:
    int64_t            width_;
    std::vector<float> values_;
    Graph              memory_;
    ggml_tensor *      cache_;
};

// What a row may lose, as a share of its length: more than one rounding of keys that share nothing would.
double rounding(const ggml_ext_type * type) {
    // values of these tests weigh the same, and half of those in bands have a bit less
    const bool bands = ggml_ext_needs_calibration(type->id);
    return type->bits > 4.0 ? 0.13 : !bands ? 0.26 : type->bits > 3.0 ? 0.4 : 0.6;
}

// Rows in order, stream after stream: what keys have in common is not coded again.
void in_order(const ggml_ext_type * type) {
    if (!begin_case(std::string("groups in order ") + type->name)) {
        return;
    }
    Rng rng(seed_of(type->name));
    Cache cache(type, 0);
    const std::vector<float> keys = keys_in_order(rng, CELLS*STREAMS, cache.width());
    for (int64_t first = 0; first < CELLS*STREAMS; ) {
        std::vector<int64_t> rows;
        const int64_t n = std::min<int64_t>(1 + rng.below(90), CELLS*STREAMS - first);
        for (int64_t i = 0; i < n; i++) {
            rows.push_back(first + i);
        }
        if (!cache.write(rows, &keys[first*cache.width()])) {
            return;
        }
        first += n;
    }
    const std::vector<float> back = cache.read();
    check_below(total_error(back, cache.want()), 0.4*rounding(type), "error of keys that are alike");
    check_below(worst_error(back, cache.want(), cache.width()), rounding(type), "error of the worst such key");

    // the rows of one head of the first group, as the library encodes them by itself
    const size_t row = type->row_bytes, d = type->head_size;
    std::vector<float> head;
    for (int64_t c = 0; c < CELLS; c++) {
        head.insert(head.end(), &keys[c*cache.width() + d], &keys[c*cache.width() + 2*d]);
    }
    std::vector<uint8_t> alone(CELLS*row);
    ggml_ext_encode_ref(type->id, head.data(), alone.data(), (int64_t) head.size());
    const std::vector<uint8_t> bytes = get_bytes(cache.tensor());
    int wrong = 0;
    for (int64_t c = 0; c < CELLS; c++) {
        wrong += memcmp(&bytes[(c*HEADS + 1)*row], &alone[c*row], row) != 0;
    }
    check(wrong == 0, std::to_string(wrong) + " rows differ from the reference format");
}

// Rows in any order, again and again: the bytes depend on the order of writes alone.
void any_order(const ggml_ext_type * type, uint8_t fill) {
    if (!begin_case(std::string("groups in any order ") + type->name + (fill ? " over garbage" : ""))) {
        return;
    }
    Rng rng(seed_of(type->name) + fill);
    const int64_t n = 500, width = HEADS*type->head_size;
    std::vector<int64_t> rows = rng.distinct(CELLS*STREAMS, CELLS*STREAMS);
    while ((int64_t) rows.size() < n) {
        rows.push_back(rng.below(CELLS*STREAMS));
    }
    const std::vector<float> values = rng.normals(n*width);

    std::vector<std::vector<uint8_t>> bytes;
    for (auto [batch, n_threads] : { std::pair<int64_t, int>{ n, 1 }, { n, 3 }, { 7, 2 } }) {
        Cache cache(type, fill);
        for (int64_t first = 0; first < n; first += batch) {
            const int64_t count = std::min(batch, n - first);
            if (!cache.write({ &rows[first], &rows[first] + count }, &values[first*width], n_threads)) {
                return;
            }
        }
        bytes.push_back(get_bytes(cache.tensor()));
        // a rewritten neighbour costs another rounding
        check_below(worst_error(cache.read(), cache.want(), type->head_size), 2.5*rounding(type), "error of the worst key in any order");
    }
    check(bytes[1] == bytes[0], "threads do not show");
    check(bytes[2] == bytes[0], "batches do not show");
}

// K-shift: the whole cache as [d, heads, cells of all streams] to f32 and back.
void shift(const ggml_ext_type * type) {
    if (!begin_case(std::string("groups shifted ") + type->name)) {
        return;
    }
    Rng rng(seed_of(type->name));
    Cache cache(type, 0);
    // the second half of the second stream is never written
    const int64_t n = CELLS + CELLS/2;
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < n; i++) {
        rows.push_back(i);
    }
    if (!cache.write(rows, keys_in_order(rng, n, cache.width()).data())) {
        return;
    }
    const std::vector<uint8_t> before = get_bytes(cache.tensor());
    const std::vector<float>   values = cache.read();

    Graph g;
    ggml_context * ctx = g.ctx();
    const int64_t d = type->head_size;
    ggml_tensor * view = ggml_view_3d(ctx, cache.tensor(), d, HEADS, CELLS*STREAMS, type->row_bytes, HEADS*type->row_bytes, 0);
    ggml_tensor * f32  = ggml_cast(ctx, view, GGML_TYPE_F32);
    g.add(f32);
    g.add(ggml_cpy(ctx, f32, view));
    g.allocate(0);
    if (!g.compute()) {
        return;
    }
    const std::vector<float> cast = get_floats(f32);
    check(cast == values, "CPY to f32 decodes as GET_ROWS");
    const std::vector<double> want(values.begin(), values.end());
    check_below(total_error(cache.read(), want), 0.4*rounding(type), "error of a key that was written back");
    const size_t used = n*HEADS*type->row_bytes, next_group = (CELLS + 2*64)*HEADS*type->row_bytes;
    const std::vector<uint8_t> after = get_bytes(cache.tensor());
    check(after.size() > used && std::equal(after.begin() + next_group, after.end(), before.begin() + next_group),
          "a group that was never written stays so");
    for (size_t i = n*cache.width(); i < values.size(); i++) {
        if (cast[i] != 0.0f) {
            check(false, "a cell that was never written is zeros");
            break;
        }
    }
}

// What would tear groups apart is refused.
void refusals(const ggml_ext_type * type) {
    if (!begin_case(std::string("groups torn apart ") + type->name)) {
        return;
    }
    Graph g;
    ggml_context * ctx = g.ctx();
    const int64_t d = type->head_size;
    ggml_tensor * cache = ggml_new_tensor_3d(ctx, (ggml_type) type->id, 2*d, 256, 1);
    const auto heads = [&](int64_t first) {
        ggml_tensor * t = ggml_view_4d(ctx, cache, d, 2, 128, 1, type->row_bytes, cache->nb[1], cache->nb[2], first*cache->nb[1]);
        return ggml_permute(ctx, t, 0, 2, 1, 3);
    };
    ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, 1, 2);
    ggml_tensor * v = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, d, 128, 2);
    const auto attention = [&](ggml_tensor * k, ggml_tensor * v) {
        return Graph::supports(ggml_flash_attn_ext(ctx, q, k, v, nullptr, 1.0f, 0.0f, 0.0f));
    };
    check(attention(heads(0), v) && attention(heads(64), v), "(views from the beginning of a group are served)");
    check(!attention(heads(5), v), "attention from the middle of a group");
    check(Graph::supports(ggml_mul_mat(ctx, heads(64), q)), "(scores from the beginning of a group are served)");
    check(!Graph::supports(ggml_mul_mat(ctx, heads(5), q)), "scores from the middle of a group");
    check(!attention(v, heads(0)), "as V");
    check(!Graph::supports(ggml_cont(ctx, heads(0))), "CONT of a permuted view");
    check(Graph::supports(ggml_dup(ctx, cache)), "(the cache as a whole can be copied)");
}

}  // namespace

void test_groups() {
    for (const ggml_ext_type * type : concrete_types()) {
        if (type->group_cells == 1 || (quick && type->head_size > 128)) {
            continue;
        }
        in_order(type);
        any_order(type, 0);
        any_order(type, 0xff);
        shift(type);
        refusals(type);
    }
}
