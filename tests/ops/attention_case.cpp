#include "attention_case.h"

#include <algorithm>
#include <cmath>

std::string AttentionCase::name() const {
    static const char * const masks[] = { "no mask", "causal", "mask per head", "alibi", "rows without cells", "a window" };
    const AttentionShape & s = shape;
    std::string res = std::string("attention ") + ggml_type_name(type_k) + "/" + ggml_type_name(type_v) +
        " d=" + std::to_string(s.dk) + "/" + std::to_string(s.dv) +
        " heads=" + std::to_string(s.n_head) + "/" + std::to_string(s.n_head_kv) +
        " q=" + std::to_string(s.n_q) + " kv=" + std::to_string(s.n_kv) + " " + masks[(int) mask];
    if (s.n_stream > 1)            { res += " streams=" + std::to_string(s.n_stream); }
    if (s.softcap != 0.0f)         { res += " softcap"; }
    if (sinks)                     { res += " sinks"; }
    if (mla)                       { res += " mla"; }
    if (poison)                    { res += " poison"; }
    if (loud != 1.0f)              { res += " values x " + std::to_string(loud); }
    if (type_q != GGML_TYPE_F32)   { res += std::string(" q:") + ggml_type_name(type_q); }
    if (slots > 0)                 { res += std::string(scattered ? " scattered" : "") + " window=" + std::to_string(slots); }
    if (batch > 0)                 { res += " batch=" + std::to_string(batch); }
    return res;
}

AttentionCase make_case(const std::string & k, const std::string & v, int dk, int dv, int n_q, int n_kv) {
    AttentionCase c;
    c.type_k     = type_for(k, dk);
    c.type_v     = type_for(v, dv);
    c.shape.dk   = dk;
    c.shape.dv   = dv;
    c.shape.n_q  = n_q;
    c.shape.n_kv = n_kv;
    return c;
}

AttentionCase make_case(const std::string & k, const std::string & v, int d, int n_q, int n_kv) {
    return make_case(k, v, d, d, n_q, n_kv);
}

AttentionCase make_mla_case(const std::string & type, int n_q, int n_kv) {
    AttentionCase c = make_case(type, type, 576, n_q, n_kv);
    c.mla             = true;
    c.shape.dv        = 512;
    c.shape.n_head    = 8;
    c.shape.n_head_kv = 1;
    return c;
}

std::vector<AttentionCase> meanings_of(const AttentionCase & base) {
    std::vector<AttentionCase> res(6, base);
    res[0].mask = Mask::none;
    res[1].mask = Mask::per_head;
    res[2].mask = Mask::alibi;
    res[2].shape.max_bias = 8.0f;
    res[2].shape.softcap  = 20.0f;
    res[2].shape.n_stream = 2;
    res[2].sinks  = true;
    res[3].mask   = Mask::rows_gone;
    res[3].sinks  = true;
    res[4].type_q = GGML_TYPE_F16;
    res[5].mask   = Mask::window;
    return res;
}

AttentionCase with_recent(AttentionCase c, int turn) {
    const int slots[] = { 64, 1, 100, 128, 300 };
    c.slots     = slots[turn % 5];
    c.batch     = turn % 2 == 0 ? 0 : c.shape.n_q > 1 ? c.shape.n_q : 5;
    c.scattered = turn % 3 != 0;
    return c;
}

namespace {

// srft8 beside ours, f16 beside delta8 and blocks of ggml's, floats beside themselves.
ggml_type precise_type(ggml_type type, int64_t d) {
    if (type == type_for("delta8", (int) d)) {
        return GGML_TYPE_F16;
    }
    const bool is_float = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    return is_ours(type) ? type_for("srft8", (int) d) : is_float ? type : GGML_TYPE_F16;
}

// As in real models: a few channels of K stand far off, and V has a mean.
std::vector<float> keys_like_real(Rng & rng, int64_t rows, int64_t d) {
    std::vector<float> res = rng.normals(rows*d);
    for (size_t i = 0; i < res.size(); i++) {
        if (i % d % 29 == 3) {
            res[i] = 4.0f + 0.5f*res[i];
        }
    }
    return res;
}

std::vector<float> values_like_real(Rng & rng, int64_t rows, int64_t d) {
    std::vector<float> res = rng.normals(rows*d);
    for (float & x : res) {
        x += 0.25f;
    }
    return res;
}

}  // namespace

AttentionRun::AttentionRun(const AttentionCase & c) : c_(c), kv_size_(c.shape.n_kv + 8 + c.shape.n_kv % 2) {
    Rng rng(seed_of(c.name()));
    make_values(rng);
    make_recent(rng);
    make_write(rng);
    make_attend();
}

void AttentionRun::make_values(Rng & rng) {
    const AttentionShape & s = c_.shape;
    q_ = rng.normals(s.n_stream*s.n_q*s.n_head*s.dk, 1.5f);
    k_ = keys_like_real(rng, s.n_stream*s.n_kv*s.n_head_kv, s.dk);
    v_ = values_like_real(rng, s.n_stream*s.n_kv*s.n_head_kv, s.dv);
    if (c_.loud != 1.0f) {
        for (size_t i = 0; i < v_.size(); i++) {
            v_[i] = i/s.dv % 5 == 3 ? 0.0f : v_[i]*c_.loud;
        }
        for (size_t i = 0; i < k_.size(); i++) {
            k_[i] = i/s.dk % 5 == 2 ? 0.0f : k_[i];
        }
    }
    if (c_.type_q == GGML_TYPE_F16) {
        for (float & x : q_) {
            x = ggml_fp16_to_fp32(ggml_fp32_to_fp16(x));
        }
    }
    if (c_.mla) {
        for (int64_t row = 0; row < s.n_stream*s.n_kv*s.n_head_kv; row++) {
            std::copy_n(&k_[row*s.dk], s.dv, &v_[row*s.dv]);
        }
    }

    mask_heads_ = c_.mask == Mask::per_head ? s.n_head : 1;
    if (c_.mask != Mask::none) {
        mask_.resize(s.n_stream*mask_heads_*s.n_q*s.n_kv);
        size_t i = 0;
        for (int64_t st = 0; st < s.n_stream; st++) {
            for (int64_t h = 0; h < mask_heads_; h++) {
                for (int64_t iq = 0; iq < s.n_q; iq++) {
                    for (int64_t cell = 0; cell < s.n_kv; cell++, i++) {
                        // a query sees the cells up to its own, and not every third
                        const int64_t last = s.n_kv - s.n_q + iq;
                        bool seen = cell <= std::max<int64_t>(last, 0) && cell % 3 != 1;
                        if (c_.mask == Mask::per_head) {
                            seen = seen && (cell + h) % 4 != 2;
                        }
                        if (c_.mask == Mask::rows_gone) {
                            seen = seen && iq % 2 == 1;
                        }
                        if (c_.mask == Mask::window) {
                            seen = cell <= std::max<int64_t>(last, 0) && cell + 300 > last; // all of the last ones
                        }
                        const float bias = c_.mask == Mask::alibi ? -std::fabs((float) (last - cell)) : 0.0f;
                        mask_[i] = seen ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(bias)) : -INFINITY;
                    }
                }
            }
        }
    }
    if (c_.sinks) {
        sinks_ = rng.normals(s.n_head);
    }
    if (c_.poison) {
        const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f };
        for (int64_t st = 0; st < s.n_stream; st++) {
            for (int64_t cell = 0; cell < s.n_kv; cell++) {
                if (!hidden(st, cell)) {
                    continue;
                }
                for (int64_t h = 0; h < s.n_head_kv; h++) {
                    const int64_t row = (st*s.n_kv + cell)*s.n_head_kv + h;
                    k_[row*s.dk + rng.below(s.dk)] = bad[rng.below(4)];
                    v_[row*s.dv + rng.below(s.dv)] = bad[rng.below(4)];
                }
            }
        }
    }
}

void AttentionRun::make_recent(Rng & rng) {
    const AttentionShape & s = c_.shape;
    if (c_.slots == 0) {
        return;
    }
    for (int64_t st = 0; st < s.n_stream; st++) {
        std::vector<int64_t> cells = rng.distinct(s.n_kv, s.n_kv);
        if (!c_.scattered) {
            // the last ones, where a ring has them
            const int64_t turned = rng.below(c_.columns());
            for (int64_t i = 0; i < s.n_kv; i++) {
                cells[i] = s.n_kv - 1 - (i + turned) % std::min(c_.columns(), s.n_kv);
            }
            cells.resize(std::min(c_.columns(), s.n_kv));
        }
        int64_t used = 0;
        for (int64_t i = 0; i < c_.columns(); i++) {
            const bool none = i % 7 == 5 || used == (int64_t) cells.size();
            columns_.push_back(i % 11 == 9 ? s.n_kv + i : none ? -1 : cells[used++]);
        }
    }
    precise_k_ = keys_like_real(rng, (int64_t) columns_.size()*s.n_head_kv, s.dk);
    precise_v_ = values_like_real(rng, (int64_t) columns_.size()*s.n_head_kv, s.dv);
    if (c_.mla) {
        for (size_t row = 0; row < columns_.size()*s.n_head_kv; row++) {
            std::copy_n(&precise_k_[row*s.dk], s.dv, &precise_v_[row*s.dv]);
        }
    }
    precise_.push_back({ 0, c_.slots });
    if (c_.batch > 0) {
        precise_.push_back({ c_.slots, c_.batch });
    }
}

void AttentionRun::make_write(Rng & rng) {
    const AttentionShape & s = c_.shape;
    ggml_context * ctx = write_.ctx();

    // rows in random order; the indices count over all streams, as llama.cpp's do
    std::vector<int64_t> cells, order;
    for (int64_t st = 0; st < s.n_stream; st++) {
        for (int64_t cell : rng.distinct(s.n_kv, s.n_kv)) {
            cells.push_back(st*kv_size_ + cell);
            order.push_back(st*s.n_kv + cell);
        }
    }
    std::vector<int64_t> read;
    for (int64_t st = 0; st < s.n_stream; st++) {
        for (int64_t cell = 0; cell < s.n_kv; cell++) {
            read.push_back(st*kv_size_ + cell);
        }
    }

    // Rows `order` of the values go to rows `to` of a cache of `size` cells, and rows `read` come back.
    struct Side {
        ggml_type                  type;
        int64_t                    n, size;
        const std::vector<float> & values;
        std::vector<int64_t>       to, order, read_rows;
        ggml_tensor *              cache = nullptr, * src = nullptr, * rows = nullptr, * read = nullptr, * got = nullptr;

        Side(ggml_type type, int64_t n, int64_t size, const std::vector<float> & values, const std::vector<int64_t> & to,
             const std::vector<int64_t> & order, const std::vector<int64_t> & read_rows)
            : type(type), n(n), size(size), values(values), to(to), order(order), read_rows(read_rows) {}
    };
    std::vector<Side> sides;
    sides.emplace_back(c_.type_k, s.dk*s.n_head_kv, kv_size_, k_, cells, order, read);
    if (!c_.mla) {
        sides.emplace_back(c_.type_v, s.dv*s.n_head_kv, kv_size_, v_, cells, order, read);
    }
    for (const Precise & p : precise_) {
        // what has no cell is not written, but for a row: SET_ROWS has one at least
        std::vector<int64_t> to, from;
        for (int64_t i = 0; i < s.n_stream*p.count; i++) {
            const int64_t column = i/p.count*c_.columns() + p.first + i % p.count;
            if (columns_[column] >= 0 || (to.empty() && i == s.n_stream*p.count - 1)) {
                to.push_back(i);
                from.push_back(column);
            }
        }
        sides.emplace_back(precise_type(c_.type_k, s.dk), s.dk*s.n_head_kv, p.count, precise_k_, to, from, counting(0, s.n_stream*p.count));
        if (!c_.mla) {
            sides.emplace_back(precise_type(c_.type_v, s.dv), s.dv*s.n_head_kv, p.count, precise_v_, to, from, counting(0, s.n_stream*p.count));
        }
    }
    for (Side & side : sides) {
        side.cache = ggml_new_tensor_3d(ctx, side.type, side.n, side.size, s.n_stream);
        side.src   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, side.n, (int64_t) side.to.size());
        side.rows  = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, (int64_t) side.to.size());
        side.read  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (int64_t) side.read_rows.size());
        ggml_tensor * merged = ggml_reshape_2d(ctx, side.cache, side.n, side.size*s.n_stream);
        write_.add(ggml_set_rows(ctx, merged, side.src, side.rows));
        side.got = ggml_get_rows(ctx, merged, side.read);
        write_.add(side.got);
    }
    // where cells are coded together the memory tells what is there already
    const ggml_ext_type * ext = ggml_ext_type_get(c_.type_k);
    write_.allocate(ext && ext->group_cells > 1 ? 0 : 0xff);
    for (Side & side : sides) {
        std::vector<float> src;
        for (int64_t row : side.order) {
            src.insert(src.end(), &side.values[row*side.n], &side.values[row*side.n] + side.n);
        }
        set_floats(side.src, src);
        set_indices(side.rows, side.to);
        set_indices(side.read, side.read_rows);
    }
    const size_t step = c_.mla ? 1 : 2;
    k_cache_ = sides[0].cache;
    k_read_  = sides[0].got;
    v_cache_ = c_.mla ? nullptr : sides[1].cache;
    v_read_  = c_.mla ? nullptr : sides[1].got;
    for (size_t i = 0; i < precise_.size(); i++) {
        const Side & k = sides[(i + 1)*step], & v = sides[(i + 2)*step - 1];
        precise_[i].k_cache = k.cache;
        precise_[i].k_read  = k.got;
        precise_[i].v_cache = c_.mla ? nullptr : v.cache;
        precise_[i].v_read  = c_.mla ? nullptr : v.got;
    }
}

void AttentionRun::make_attend() {
    const AttentionShape & s = c_.shape;
    ggml_context * ctx = attend_.ctx();

    const auto view = [&](ggml_tensor * cache, int64_t d_row, int64_t d, int64_t n) {
        ggml_tensor * t = ggml_view_4d(ctx, cache, d, s.n_head_kv, n, s.n_stream,
            ggml_row_size(cache->type, d_row), cache->nb[1], cache->nb[2], 0);
        return ggml_permute(ctx, t, 0, 2, 1, 3);
    };
    ggml_tensor * q = ggml_new_tensor_4d(ctx, c_.type_q, s.dk, s.n_head, s.n_q, s.n_stream);
    ggml_tensor * k = view(k_cache_, s.dk, s.dk, s.n_kv);
    ggml_tensor * v = c_.mla ? view(k_cache_, s.dk, s.dv, s.n_kv) : view(v_cache_, s.dv, s.dv, s.n_kv);
    ggml_tensor * mask = mask_.empty() ? nullptr :
        ggml_new_tensor_4d(ctx, GGML_TYPE_F16, s.n_kv, s.n_q, mask_heads_, s.n_stream);

    out_ = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), k, v, mask, s.scale_or_default(), s.max_bias, s.softcap);
    ggml_tensor * sinks = nullptr;
    if (!sinks_.empty()) {
        sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, s.n_head);
        ggml_flash_attn_ext_add_sinks(out_, sinks);
    }
    ggml_tensor * cells = nullptr;
    for (size_t i = 0; i < precise_.size(); i++) {
        const Precise & p = precise_[i];
        out_->src[i == 0 ? 5 : 8] = view(p.k_cache, s.dk, s.dk, p.count);
        out_->src[i == 0 ? 6 : 9] = c_.mla ? view(p.k_cache, s.dk, s.dv, p.count) : view(p.v_cache, s.dv, s.dv, p.count);
        out_->src[7] = cells = cells ? cells : ggml_new_tensor_2d(ctx, GGML_TYPE_I64, c_.columns(), s.n_stream);
    }
    attend_.add(out_);
    attend_.allocate(0xff);
    if (cells) {
        set_indices(cells, columns_);
    }

    set_floats(q, q_);
    if (mask) {
        set_floats(mask, mask_);
    }
    if (sinks) {
        set_floats(sinks, sinks_);
    }
}

bool AttentionRun::write() {
    return write_.compute();
}

bool AttentionRun::attend(int n_threads) {
    return attend_.compute(n_threads);
}

std::vector<float> AttentionRun::replaced(std::vector<float> rows, const std::vector<float> & precise, int64_t d) const {
    const AttentionShape & s = c_.shape;
    const int64_t n = s.n_head_kv*d;
    for (size_t i = 0; i < columns_.size(); i++) {
        const int64_t st = (int64_t) i/c_.columns();
        if (columns_[i] >= 0 && columns_[i] < s.n_kv) {
            std::copy_n(&precise[i*n], n, &rows[(st*s.n_kv + columns_[i])*n]);
        }
    }
    return rows;
}

std::vector<double> AttentionRun::want_from_decoded() const {
    const AttentionShape & s = c_.shape;
    // by stream and column, as they are read
    const auto precise = [&](ggml_tensor * Precise::*read, int64_t d) {
        std::vector<float> all(columns_.size()*s.n_head_kv*d);
        const int64_t n = s.n_head_kv*d;
        for (const Precise & p : precise_) {
            const std::vector<float> rows = get_floats(p.*read);
            for (int64_t st = 0; st < s.n_stream; st++) {
                std::copy_n(&rows[st*p.count*n], p.count*n, &all[(st*c_.columns() + p.first)*n]);
            }
        }
        return all;
    };
    const std::vector<float> precise_k = precise(&Precise::k_read, s.dk);
    const std::vector<float> k_rows = get_floats(k_read_);
    std::vector<float> v;
    if (c_.mla) {
        const std::vector<float> both = replaced(k_rows, precise_k, s.dk);
        for (size_t row = 0; row < both.size(); row += s.dk) {
            v.insert(v.end(), &both[row], &both[row] + s.dv);
        }
    } else {
        v = replaced(get_floats(v_read_), precise(&Precise::v_read, s.dv), s.dv);
    }
    // rows of a group do not decode by themselves, and stand for what GET_ROWS gives
    const ggml_ext_type * ext = ggml_ext_type_get(c_.type_k);
    const std::vector<float> k = ext && ext->group_cells == 1 ? keys() : k_rows;
    return attention_reference(s, q_, replaced(k, precise_k, s.dk), v, mask_, mask_heads_, sinks_);
}

std::vector<float> AttentionRun::keys() const {
    const AttentionShape & s = c_.shape;
    const std::vector<uint8_t> bytes = get_bytes(k_cache_);
    const int64_t n = s.n_kv*s.n_head_kv*s.dk;
    std::vector<float> res(s.n_stream*n);
    for (int64_t st = 0; st < s.n_stream; st++) {
        ggml_ext_decode_key(c_.type_k, &bytes[st*k_cache_->nb[2]], &res[st*n], n);
    }
    return res;
}

std::vector<double> AttentionRun::want_from_original() const {
    return attention_reference(c_.shape, q_, replaced(k_, precise_k_, c_.shape.dk), replaced(v_, precise_v_, c_.shape.dv), mask_, mask_heads_, sinks_);
}

void AttentionRun::spoil_unseen() {
    const AttentionShape & s = c_.shape;
    Rng rng(seed_of(c_.name()) + 1);
    const auto spoil = [&](ggml_tensor * cache, const std::vector<int64_t> & rows) {
        std::vector<uint8_t> bytes = get_bytes(cache);
        for (int64_t row : rows) {
            for (size_t i = 0; i < cache->nb[1]; i++) {
                bytes[row*cache->nb[1] + i] = row % 2 == 0 ? 0xff : (uint8_t) rng.below(256);
            }
        }
        set_bytes(cache, bytes);
    };
    std::vector<int64_t> cells;
    for (size_t i = 0; i < columns_.size(); i++) {
        if (columns_[i] >= 0 && columns_[i] < s.n_kv) {
            cells.push_back((int64_t) i/c_.columns()*kv_size_ + columns_[i]);
        }
    }
    const ggml_ext_type * ext = ggml_ext_type_get(c_.type_k);
    if (!ext || ext->group_cells == 1) {
        spoil(k_cache_, cells);
    }
    if (v_cache_) {
        spoil(v_cache_, cells);
    }
    for (const Precise & p : precise_) {
        std::vector<int64_t> rows;
        for (int64_t i = 0; i < s.n_stream*p.count; i++) {
            const int64_t cell = columns_[i/p.count*c_.columns() + p.first + i % p.count];
            if (cell < 0 || cell >= s.n_kv) {
                rows.push_back(i);
            }
        }
        spoil(p.k_cache, rows);
        if (p.v_cache) {
            spoil(p.v_cache, rows);
        }
    }
}

bool AttentionRun::hidden(int64_t stream, int64_t cell) const {
    if (mask_.empty()) {
        return false;
    }
    const AttentionShape & s = c_.shape;
    for (int64_t row = 0; row < mask_heads_*s.n_q; row++) {
        if (!std::isinf(mask_[(stream*mask_heads_*s.n_q + row)*s.n_kv + cell])) {
            return false;
        }
    }
    return true;
}
