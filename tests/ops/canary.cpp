// Is the cache read at all, and only where it should be? A flipped bit in a cell that a query sees must change the
// output; a flipped bit in a cell that no query sees must not.

#include "attention_case.h"

#include <cstring>

namespace {

bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

std::vector<float> decoded(const ggml_ext_type * type, char side, const uint8_t * row) {
    std::vector<float> res(type->head_size);
    (side == 'k' ? ggml_ext_decode_key : ggml_ext_decode)(type->id, row, res.data(), type->head_size);
    return res;
}

// The byte that fills up an odd number of 8-bit scales.
bool is_filling(const ggml_ext_type * type, size_t at) {
    const std::string family = type->family;
    const bool        has_codes = (family.rfind("srft", 0) == 0 && family != "srft8") || (family.rfind("delta", 0) == 0 && family != "delta8");
    const size_t      scales    = type->head_size/(type->head_size % 32 ? 16 : 32);
    return has_codes && scales % 2 == 1 && at == scales;
}

// A bit of this byte that the format knows: where codes do not fill their bytes, the last has bits that mean nothing.
int meaningful_bit(const ggml_ext_type * type, char side, const uint8_t * row, size_t at, Rng & rng) {
    std::vector<uint8_t> flipped(row, row + type->row_bytes);
    const int start = (int) rng.below(8);
    if (type->group_cells > 1) {
        // A row of a group does not decode alone. Of its share of the I-frame the first 16-bit slot has three flags, and
        // the others leave those bits out.
        const size_t slots = type->row_bytes - 2*((type->head_size + 63)/64);
        return at >= slots + 2 && (at - slots) % 2 == 0 ? 3 + start % 5 : start;
    }
    for (int i = 0; i < 8; i++) {
        const int bit = (start + i) % 8;
        flipped[at] = (uint8_t) (row[at] ^ (1u << bit));
        if (!same(decoded(type, side, flipped.data()), decoded(type, side, row))) {
            return bit;
        }
    }
    check(false, "byte " + std::to_string(at) + " of a row means nothing");
    return start;
}

void flip(const ggml_ext_type * type, char side, int64_t n_q) {
    AttentionCase c;
    // few cells, so that each has weight; several queries, so that no channel is zero in all of them
    c.shape.dk = c.shape.dv = type->head_size;
    c.shape.n_q    = n_q;
    // what a whole group shares moves all its scores alike: there must be another
    const bool grouped = type->group_cells > 1;
    c.shape.n_kv   = grouped ? type->group_cells + 6 : 9;
    c.shape.n_head = 8;
    c.type_k = side == 'k' ? (ggml_type) type->id : GGML_TYPE_F16;
    c.type_v = side == 'v' ? (ggml_type) type->id : GGML_TYPE_F16;
    if (!begin_case(std::string("canary ") + side + " " + c.name())) {
        return;
    }
    AttentionRun r(c);
    // one thread: thousands of tiny graphs would mostly wait for each other
    if (!r.write() || !r.attend(1)) {
        return;
    }
    ggml_tensor * cache = side == 'k' ? r.k_cache() : r.v_cache();
    const std::vector<uint8_t> bytes = get_bytes(cache);
    const std::vector<float>   clean = r.output();
    Rng rng(seed_of(type->name) + side);

    // every byte of a head's row gets its turn, so codes and scales both do
    int silent = 0, loud = 0;
    const size_t step = quick ? 7 : 1;
    for (size_t at = rng.below(step); at < type->row_bytes; at += step) {
        if (is_filling(type, at)) {
            continue;
        }
        for (int64_t cell : { 0, 1 }) {  // seen by all, hidden from all
            std::vector<uint8_t> flipped = bytes;
            const size_t head = rng.below(c.shape.n_head_kv);
            uint8_t * row = &flipped[cell*cache->nb[1] + head*type->row_bytes];
            row[at] ^= (uint8_t) (1u << meaningful_bit(type, side, row, at, rng));
            set_bytes(cache, flipped);
            if (!r.attend(1)) {
                return;
            }
            const bool changed = !same(r.output(), clean);
            silent += r.hidden(0, cell) ? 0 : !changed;
            // others of its group may hang on a hidden cell
            loud   += r.hidden(0, cell) && !grouped ? changed : 0;
        }
    }
    check(r.hidden(0, 1) && !r.hidden(0, 0), "the mask hides one cell and shows the other");
    check(silent == 0, std::to_string(silent) + " flips in a seen cell changed nothing");
    check(loud == 0, std::to_string(loud) + " flips in a hidden cell changed the output");

    set_bytes(cache, bytes);
    r.attend(1);
    check(same(r.output(), clean), "the old bytes give the old output");
}

}  // namespace

void test_canary() {
    for (const ggml_ext_type * type : concrete_types()) {
        for (int64_t n_q : { 1, 5 }) {
            if (type->serves_k) { flip(type, 'k', n_q); }
            if (type->serves_v) { flip(type, 'v', n_q); }
        }
    }
}
