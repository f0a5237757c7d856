// Cells that are coded together (delta, bands): a row depends on the rows of its group that were written before it, and on nothing
// else. So a block takes the rows of the op that fall into one group of one head: its warps rotate them, and code
// them in their order. Row numbers are on the device: each row of the op has a block, which may have several, and the one whose row
// is the first of its group does the work.
#pragma once

#include "levels.cuh"
#include "rows.cuh"

namespace kv {
namespace {

// The group of a unit: where its first row begins, of this head, and the cell in it. Nothing where the index is none of the
// cache's.
struct group_place {
    uint64_t group; // bytes from the beginning of the cache
    uint     cell;
    uint     rows; // of the group
    bool     found;
};

// Rows of the group of this cell of a stream.
__device__ __forceinline__ uint rows_of_group(const kv_rows_args & args, uint cell) {
    return ::min((uint) KV_DELTA_CELLS, args.cells - cell/KV_DELTA_CELLS*KV_DELTA_CELLS);
}

__device__ __forceinline__ group_place group_of(const rows_params & p, uint size, uint unit) {
    const kv_rows_args & args = p.args;
    group_place res;
    if (p.index_bytes != 0 && args.rows[1]*args.rows[2] == 1 && args.cache_nb[0] == args.cell_step) {
        // as llama.cpp writes: row numbers are cells
        const uint row = args.rows[0] == 1 ? 0 : unit/args.heads, head = unit - row*args.heads;
        const int64_t target = row_number(p.index + row*args.index_nb[0], p.index_bytes);
        res.found = target >= 0 && target < (int64_t) args.cache_rows[0];
        const uint beyond = (uint) target + args.first_cell, cell = beyond < args.cells ? beyond : beyond % args.cells;
        res.cell  = cell % KV_DELTA_CELLS;
        res.rows  = rows_of_group(args, cell);
        res.group = (uint64_t) ((uint) target - res.cell)*args.cell_step + (uint64_t) head*kv_row_bytes(p.kind, size);
        return res;
    }
    const unit_place u = place_of(p, unit, size*args.value_step);
    const uint cell = (uint) ((u.cache/args.cell_step + args.first_cell) % args.cells);
    res.found = u.found;
    res.cell  = cell % KV_DELTA_CELLS;
    res.rows  = rows_of_group(args, cell);
    res.group = u.cache - res.cell*args.cell_step;
    return res;
}

// What a warp keeps from row to row. Rows of the group are in memory; what they are and the slots that say so are here, so
// that a row is written without waiting for another.
struct group_writer {
    uint8_t * group;
    uint64_t  step;
    uint      rows;    // of the group
    uint      share;   // where the slots of a row begin
    int       at;      // the row whose deviation is in u, -1 for none
    uint64_t  written; // a bit for each row
    uint64_t  chained;
    uint64_t  alone;
    uint      slots[2]; // the first slots of rows `lane` and `lane + 32`

    __device__ __forceinline__ group_writer(const rows_params & p, const group_place & place, uint size) :
        group(p.to + place.group), step(p.args.cell_step), rows(place.rows), share(kv_delta_share(p.kind, size)), at(-1), written(0), chained(0), alone(0) {}

    __device__ __forceinline__ bool is_written(uint t) const { return (written >> t & 1) != 0; }
    // Has row t a row before it that it is chained to?
    __device__ __forceinline__ bool is_chained(uint t) const { return t > 0 && (chained >> t & 1) != 0 && is_written(t - 1); }
    // The row that t leads back to, if each is chained to the one before.
    __device__ __forceinline__ uint start_of(uint t) const {
        const uint64_t starts = ~(chained & written << 1) | 1;
        return 63 - __clzll((long long) (starts & (~0ull >> (63 - t))));
    }
    __device__ __forceinline__ bool is_alone(uint t) const { return (alone >> t & 1) != 0; }

    __device__ __forceinline__ bool is_framed() const { return (__shfl_sync(KV_ALL_LANES, slots[0], 0) & KV_DELTA_FRAMED) != 0; }

    // The first slot of row t.
    __device__ __forceinline__ uint16_t * slot_of(uint t) const { return (uint16_t *) (group + t*step + share); }

    // Asks for row n, if it is one of those before t.
    __device__ __forceinline__ void prefetch(uint n, uint t) const {
#ifdef __CUDA_ARCH__
        if (n < t) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(group + n*step));
            asm volatile("prefetch.global.L2 [%0];" :: "l"(group + n*step + share));
        }
#endif
    }

    // What rows are, from memory.
    __device__ __forceinline__ void look(uint lane) {
        written = chained = alone = 0;
        for (uint n = 0; n < 2; ++n) {
            slots[n] = lane + 32*n < rows ? *slot_of(lane + 32*n) : 0;
            const uint kind = slots[n] & KV_DELTA_KIND;
            written |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind != KV_DELTA_EMPTY) << 32*n;
            chained |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_CHAINED) << 32*n;
            alone   |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_ALONE) << 32*n;
        }
    }

    // Row t is of this kind from now on.
    __device__ __forceinline__ void set_kind(uint t, uint kind, uint lane) {
        set_kinds(t, 1, kind == KV_DELTA_CHAINED ? 1 : 0, kind == KV_DELTA_ALONE ? 1 : 0, lane, true);
    }

    // So are `count` rows from t on, by a bit for each: chained, alone, or neither; `stores`: or does another warp write it?
    __device__ __forceinline__ void set_kinds(uint t, uint count, uint are_chained, uint are_alone, uint lane, bool stores) {
        for (uint n = 0; n < 2; ++n) {
            const uint i = lane + 32*n - t;
            if (stores && i < count) {
                const uint kind = (are_chained >> i & 1) != 0 ? KV_DELTA_CHAINED : (are_alone >> i & 1) != 0 ? KV_DELTA_ALONE : KV_DELTA_RESTART;
                slots[n] = (slots[n] & ~KV_DELTA_KIND) | kind;
                *slot_of(lane + 32*n) = (uint16_t) slots[n];
            }
        }
        const uint64_t rows_of = (uint64_t) (count < 32 ? (1u << count) - 1 : ~0u) << t;
        written |= rows_of;
        chained = (chained & ~rows_of) | (uint64_t) are_chained << t;
        alone   = (alone & ~rows_of) | (uint64_t) are_alone << t;
    }
};

// u becomes the deviation of row t, which lies at `row`, from that of row t - 1.
__device__ __forceinline__ void writer_step(
        const group_writer & w, uint kind, uint size, uint t, const uint8_t * row, const float * m, const float * levels, uint lane, float * u) {
    const bool chained = w.is_chained(t), alone = w.is_alone(t);
    for (uint i = lane; i < size; i += 32) {
        const float d = kv_row_value(row, kind, size, i, levels);
        u[i] = chained ? fmaf(u[i], KV_DELTA_RHO, d) : alone ? d - m[i] : d;
    }
}

// u goes on from row `first` to row t, which hang together from `start` on: several rows are asked for at once.
template <uint KIND> __device__ __forceinline__ void writer_follow(
        const group_writer & w, uint size, uint start, uint first, uint t, const float * m, const float * levels, uint lane, float * u) {
    constexpr uint AT_ONCE = 8;
    const bool alone = w.is_alone(start);
    for (uint i = lane; i < size; i += 32) {
        float x = u[i];
        for (uint row = first; row <= t; row += AT_ONCE) {
            float d[AT_ONCE];
#pragma unroll
            for (uint n = 0; n < AT_ONCE; ++n) {
                d[n] = kv_row_value(w.group + ::min(row + n, t)*w.step, KIND, size, i, levels);
            }
#pragma unroll
            for (uint n = 0; n < AT_ONCE; ++n) {
                if (row + n <= t) {
                    x = row + n > start ? fmaf(x, KV_DELTA_RHO, d[n]) : alone ? d[n] - m[i] : d[n];
                }
            }
        }
        u[i] = x;
    }
}

// Brings u to row t, which is written. SIZE: kernels for a size seldom come here, and have the loop that takes fewer instructions.
template <uint SIZE, bool BANDS> static __device__ void writer_go_to(group_writer & w, uint kind, uint size, uint t, const float * m, const float * levels, uint lane, float * u) {
    if (w.at == (int) t) {
        return;
    }
    const uint start = w.start_of(t), first = w.at >= (int) start && w.at < (int) t ? (uint) w.at + 1 : start;
    w.prefetch(first + lane, t + 1);
    w.prefetch(first + lane + 32, t + 1);
    if (SIZE != 0 || BANDS) {
        for (uint row = first; row <= t; ++row) {
            writer_step(w, kind, size, row, w.group + row*w.step, m, levels, lane, u);
        }
    } else if (kind == KV_KIND_DELTA8) {
        writer_follow<KV_KIND_DELTA8>(w, size, start, first, t, m, levels, lane, u);
    } else if (kind == KV_KIND_DELTA4) {
        writer_follow<KV_KIND_DELTA4>(w, size, start, first, t, m, levels, lane, u);
    } else {
        writer_follow<KV_KIND_DELTA3>(w, size, start, first, t, m, levels, lane, u);
    }
    w.at = (int) t;
}

// Of rows further back nothing is left in a deviation: RHO^48 is 4e-8.
constexpr uint MOST_CHAINED = 48;

// The rows that the deviation of row t, which is written, comes from, in parts for as many warps.
template <uint PARTS> struct chained_rows {
    uint start, first, share, end;

    __device__ __forceinline__ chained_rows(const group_writer & w, uint t) : end(t + 1) {
        start = w.start_of(t);
        first = ::max(start, end - ::min(end, MOST_CHAINED));
        share = (end - first + PARTS - 1)/PARTS;
    }

    __device__ __forceinline__ uint begin_of(uint part) const { return ::min(first + part*share, end); }

    // What the rows of a part leave, to `parts`, [part][SIZE]. `values_of` gives the lane's values of a row.
    template <uint SIZE, uint N, typename Values> __device__ __forceinline__ void sum_up(
            const group_writer & w, const Values & values_of, const float (&m)[N], uint part, uint lane, float * parts) const {
        float u[N] = {};
#pragma unroll 4
        for (uint row = begin_of(part); row < begin_of(part + 1); ++row) {
            float d[N];
            values_of(w.group + row*w.step, d);
            const bool alone = row == start && w.is_alone(row);
            for (uint i = 0; i < N; ++i) {
                u[i] = fmaf(u[i], KV_DELTA_RHO, alone ? d[i] - m[i] : d[i]);
            }
        }
        for (uint i = 0; i < N; ++i) {
            parts[part*SIZE + lane*N + i] = u[i];
        }
    }

    // The deviation, from all parts.
    template <uint SIZE, uint N> __device__ __forceinline__ void join(const float * parts, uint lane, float (&u)[N]) const {
        for (uint i = 0; i < N; ++i) {
            u[i] = parts[lane*N + i];
        }
#pragma unroll 1
        for (uint part = 1; part < PARTS; ++part) {
            float factor = 1.0f;
            for (uint row = begin_of(part); row < begin_of(part + 1); ++row) {
                factor *= KV_DELTA_RHO;
            }
            for (uint i = 0; i < N; ++i) {
                u[i] = fmaf(u[i], factor, parts[part*SIZE + lane*N + i]);
            }
        }
    }
};

// The kind of row that leaves the least to code, of each kind the lane's part of the squares; `has_before`: may it be chained?
__device__ __forceinline__ uint cheapest_kind(float alone, float restart, float chained, bool has_before) {
    for (int n = 16; n > 0; n /= 2) {
        alone += __shfl_xor_sync(KV_ALL_LANES, alone, n);
        restart += __shfl_xor_sync(KV_ALL_LANES, restart, n);
        chained += __shfl_xor_sync(KV_ALL_LANES, chained, n);
    }
    return has_before && chained < fminf(restart, alone) ? KV_DELTA_CHAINED : restart <= alone ? KV_DELTA_RESTART : KV_DELTA_ALONE;
}

// Codes a key for row t, from the deviation `before` of the row before where there is one and it helps: in `line`, and from
// there to its row.
__device__ __forceinline__ void writer_encode(
        group_writer & w, uint kind, uint size, uint t, const float * key, const float * m, const float * before, bool has_before,
        const float * levels, uint lane, float * work, uint8_t * line) {
    float alone = 0.0f, restart = 0.0f, chained = 0.0f;
    for (uint i = lane; i < size; i += 32) {
        const float x = key[i], from_m = x - m[i];
        alone = fmaf(x, x, alone);
        restart = fmaf(from_m, from_m, restart);
        const float from_both = has_before ? fmaf(before[i], -KV_DELTA_RHO, from_m) : 0.0f;
        chained = fmaf(from_both, from_both, chained);
    }
    const uint row_kind = cheapest_kind(alone, restart, chained, has_before);
    for (uint i = lane; i < size; i += 32) {
        const float from_m = key[i] - m[i];
        work[i] = row_kind == KV_DELTA_CHAINED   ? fmaf(before[i], -KV_DELTA_RHO, from_m)
                  : row_kind == KV_DELTA_RESTART ? from_m
                                                 : key[i];
    }
    kv_row_encode_difference(work, kind, size, levels, lane, line);
    __syncwarp();
    uint16_t * row = (uint16_t *) (w.group + t*w.step);
    for (uint i = lane; i < w.share/2; i += 32) {
        row[i] = ((const uint16_t *) line)[i];
    }
    w.set_kind(t, row_kind, lane);
}

// The I-frame of a group: the key; zeros where rows are there already without one.
static __device__ void writer_found(group_writer & w, uint size, const float * key, uint lane, float * m) {
    const bool taken = w.written != 0;
    bool beyond = false;
    for (uint i = lane; i < size; i += 32) {
        m[i] = taken ? 0.0f : key[i];
        beyond = beyond || fabsf(m[i]) > KV_DELTA_LIMIT;
    }
    beyond = simd_any(beyond);
    const uint slots = kv_delta_slots(size);
    for (uint i = lane; i < ::max(size, w.rows*slots); i += 32) {
        const uint16_t stored = i < size && !beyond ? kv_delta_slot(m[i]) : (uint16_t) 0;
        const bool kept = i < w.rows*slots;
        if (kept && i % slots != 0) {
            w.slot_of(i/slots)[i % slots] = stored;
        }
        if (i < size) {
            m[i] = kept ? kv_delta_value(stored) : 0.0f;
        }
    }
    __syncwarp();
    // First slots are those of the lanes: what rows are stays.
    for (uint n = 0; n < 2; ++n) {
        const uint row = lane + 32*n, stored = row*slots < size ? kv_delta_slot(m[row*slots]) : 0;
        w.slots[n] = stored | (w.slots[n] & KV_DELTA_KIND) | (row == 0 ? KV_DELTA_FRAMED : 0);
        if (row < w.rows) {
            *w.slot_of(row) = (uint16_t) w.slots[n];
        }
    }
}

// Keys of a group that are rotated together, before they are coded one after the other.
__host__ __device__ constexpr uint batch_of(uint template_size) {
    return template_size ? 32 : 8;
}

__host__ __device__ constexpr uint group_floats(uint template_size, uint size) {
    return size*(batch_of(template_size) + 4);
}

// Rows of an op that are looked at together.
constexpr uint LOOKED_AT = 2048;

// Bits without the first n of those that are set.
__device__ __forceinline__ uint without_first(uint bits, uint n) {
    for (; n > 0; --n) {
        bits &= bits - 1;
    }
    return bits;
}

// The place of the bit that so many others that are set come before.
__device__ __forceinline__ uint place_of_rank(uint bits, uint rank) {
    uint place = 0;
#pragma unroll
    for (uint step = 16; step > 0; step /= 2) {
        place += __popc(bits & ((1u << (place + step)) - 1)) <= rank ? step : 0;
    }
    return place;
}

// What a lane packs of a row of bands: a word of its codes, and a byte of its scales. kv_band_byte, which makes a byte at a time,
// took a quarter of the time of 512 rows.
template <uint SIZE> struct band_word {
    static constexpr uint MOST = SIZE/8; // words of a row, and lanes that make them

    uint chunk; // that the word is of; behind the last one for none
    uint bits;  // of the first band's codes
    uint place; // of the word in the chunk
    uint at;    // its first byte in the row
    uint lane;

    __device__ __forceinline__ band_word(uint kind, uint word) : chunk(0), bits(0), place(word), at(SIZE/KV_BAND + 4*word), lane(word) {
        for (; chunk < SIZE/(2*KV_BAND); ++chunk) {
            bits = kv_band_at(kind, SIZE, 2*chunk).bits;
            const uint words = 2*(bits - 1);
            if (place < words) {
                break;
            }
            place -= words;
        }
    }

    __device__ __forceinline__ void pack(const uint8_t * codes, uint8_t * row) const {
        if (lane < SIZE/KV_BAND) {
            row[lane] = codes[SIZE + lane];
        }
        if (chunk == SIZE/(2*KV_BAND)) {
            return; // there are fewer words
        }
        // A word has four codes of a band, and eight words a band.
        const uint * const four = (const uint *) (codes + chunk*2*KV_BAND) + place;
        uint word;
        if (bits == 5) {
            word = four[8] | four[0] << 3;
        } else if (bits == 3) {
            word = four[0] | four[8] << 3 | four[4] << 4 | four[12] << 7;
        } else if (place < 4) {
            word = four[0] | four[4] << 4;
        } else {
            word = four[4] | four[6] << 2 | four[8] << 4 | four[10] << 6; // `place` counts from 4 on here
        }
        store(row + at, word);
    }

    // Codes begin at a multiple of four bytes, but for heads of 64, two bytes behind one.
    static __device__ __forceinline__ void store(uint8_t * to, uint word) {
        if constexpr (SIZE/KV_BAND % 4 == 0) {
            *(uint *) to = word;
        } else {
            ((uint16_t *) to)[0] = (uint16_t) word;
            ((uint16_t *) to)[1] = (uint16_t) (word >> 16);
        }
    }
};

// TABLES: widths that codes of a row have.
template <uint TABLES> struct group_memory {
    nearest_table nearest[TABLES];
    float         levels[KV_LEVELS];
    uint          same[LOOKED_AT/32]; // a bit for each: is it of the group?
    uint8_t       cells_of_rows[LOOKED_AT];
    uint          cells[32];
    bool          zero[32];
    scale_choice  choices[2][ROW_WARPS][256/32]; // of each warp, for each group; of two rows in turns
    uint8_t       line[KV_LARGEST_SIZE + 128];
};

// Scales that a warp tries.
constexpr uint OWN_TRIES = 2*KV_SRFT_TRIES/ROW_WARPS;
static_assert(OWN_TRIES*ROW_WARPS == 2*KV_SRFT_TRIES, "each warp tries as many");

// The best scale of the lane's group, from the best one of each warp. `turn` changes from row to row, so that the warps meet once for each.
template <uint N, uint TABLES> __device__ __forceinline__ float best_of_warps(const scale_choice & mine, uint warp, uint lane, uint turn, group_memory<TABLES> & memory) {
    constexpr uint LANES = 32/N;
    if (lane % LANES == 0) {
        memory.choices[turn][warp][lane/LANES] = mine;
    }
    sync_warps<ROW_WARPS>();
    // Of two that gain the same it is the first one's; a warp that found none has a scale of 0.
    static_assert(ROW_WARPS == 4, "");
    const auto of = [&](uint n) { return memory.choices[turn][n][lane/LANES]; };
    const auto better = [](const scale_choice & first, const scale_choice & second) { return second.gain > first.gain ? second : first; };
    return better(better(of(0), of(1)), better(of(2), of(3))).scale;
}

// How the values of a lane are coded, in rows that have a kernel for their size.
template <uint SIZE, bool BANDS, uint N> struct lane_codec {
    band_lane<SIZE, N>     band;
    scale_tries<OWN_TRIES> tries;
    uint                   bits;
    float                  unit;
    uint                   table; // of nearest levels

    static __device__ __forceinline__ uint tries_of(uint kind) { return BANDS ? KV_SRFT_TRIES : kv_srft_tries(kv_code_bits(kind)); }

    __device__ __forceinline__ lane_codec(uint kind, const float * levels, uint warp, uint lane) :
        band(BANDS ? kind : KV_KIND_BAND4, levels, lane), tries(BANDS ? band.band.bits : kv_code_bits(kind), tries_of(kind), warp*OWN_TRIES),
        bits(BANDS ? band.band.bits : kv_code_bits(kind)), unit(BANDS ? band.unit : kv_srft_unit(kv_code_bits(kind))), table(BANDS ? band.table_of(band.band.bits) : 0) {}

    // The tables that codes are looked up in, by all warps. They have been filled when these have met.
    template <uint TABLES> static __device__ __forceinline__ void fill_tables(uint kind, group_memory<TABLES> & memory) {
        if constexpr (BANDS) {
            for (int bits = (int) kv_band_at(kind, SIZE, 0).bits; bits > 0; bits -= 2) {
                fill_nearest(bits, memory.levels + (1u << bits), memory.nearest[band_lane<SIZE, N>::table_of(bits)], 32*ROW_WARPS);
            }
        } else {
            fill_nearest(kv_code_bits(kind), memory.levels, memory.nearest[0], 32*ROW_WARPS);
        }
    }

    // With the values of rows: what the lane has of one.
    template <typename With> __device__ __forceinline__ void with_values(uint kind, const float * levels, uint lane, const With & with) const {
        if constexpr (BANDS) {
            with([&](const uint8_t * row, float (&d)[N]) { band.values(row, d); });
        } else if (kind == KV_KIND_DELTA4) {
            with([&](const uint8_t * row, float (&d)[N]) { row_values<SIZE, 4>(row, levels, lane, d); });
        } else {
            with([&](const uint8_t * row, float (&d)[N]) { row_values<SIZE, 3>(row, levels, lane, d); });
        }
    }

    // Codes of a warp's share of some rows, a bit for each, to their bytes in the cache; `codes_of` gives those of row k, `row_of` its bytes.
    template <typename Codes, typename Row> static __device__ __forceinline__ void pack(uint kind, uint rows, uint warp, uint lane, const Codes & codes_of, const Row & row_of) {
        const auto each = [&](const auto & what) {
            for (uint left = without_first(rows, warp); left != 0; left = without_first(left, ROW_WARPS)) {
                const uint k = __ffs(left) - 1;
                what(codes_of(k), row_of(k));
            }
        };
        if constexpr (BANDS) {
            constexpr uint LANES = band_word<SIZE>::MOST, AT_ONCE = 32/LANES;
            const band_word<SIZE> word(kind, lane % LANES);
            for (uint rank = warp*AT_ONCE + lane/LANES; rank < __popc(rows); rank += ROW_WARPS*AT_ONCE) {
                const uint k = place_of_rank(rows, rank);
                word.pack(codes_of(k), row_of(k));
            }
        } else if (kind == KV_KIND_DELTA4) {
            each([&](const uint8_t * codes, uint8_t * row) { pack_row<SIZE, 4>(codes, lane, row); });
        } else {
            each([&](const uint8_t * codes, uint8_t * row) { pack_row<SIZE, 3>(codes, lane, row); });
        }
    }
};

// writer_encode by all warps, with the lane's part of the key, the I-frame and the deviation in registers; the latter becomes that of the new row,
// whose kind comes back. Its codes go to `kept` when all warps have come so far.
template <uint SIZE, bool BANDS, uint N, uint TABLES> __device__ __forceinline__ uint writer_encode_lanes(
        const lane_codec<SIZE, BANDS, N> & codec, const float (&key)[N], const float (&m)[N], float (&u)[N], bool has_before, uint warp, uint lane, uint turn,
        group_memory<TABLES> & memory, uint8_t * kept) {
    constexpr uint LANES = 32/N;
    const nearest_table & table = memory.nearest[codec.table];
    // Squares that are left to code: of a chained row less those of a restart, and less those of one alone.
    float x[N], from_m[N], by_restart = 0.0f, by_alone = 0.0f;
    for (uint i = 0; i < N; ++i) {
        from_m[i] = key[i] - m[i];
        x[i] = has_before ? fmaf(u[i], -KV_DELTA_RHO, from_m[i]) : from_m[i];
        const float square = x[i]*x[i];
        by_restart += fmaf(-from_m[i], from_m[i], square);
        by_alone   += fmaf(-key[i], key[i], square);
    }
    const auto add = [&](uint n) {
        by_restart += __shfl_xor_sync(KV_ALL_LANES, by_restart, n);
        by_alone   += __shfl_xor_sync(KV_ALL_LANES, by_alone, n);
    };
    // Scales are tried for what it will be as a rule, while the sums are made that say what it is.
    uint largest = largest_of_lane(x);
    for (uint n = 1; n < LANES; n *= 2) {
        largest = ::max(largest, __shfl_xor_sync(KV_ALL_LANES, largest, n));
        add(n);
    }
    scale_gains<OWN_TRIES, N> gains(x, largest, codec.tries, table);
    for (uint n = 1; n < LANES; n *= 2) {
        gains.add(n);
        if (n*LANES < 32) {
            add(n*LANES);
        }
    }
    for (uint n = LANES*LANES; n < 32; n *= 2) {
        add(n);
    }
    scale_choice choice = gains.best();
    const uint kind = has_before && by_restart < 0.0f && by_alone < 0.0f ? KV_DELTA_CHAINED : by_alone <= by_restart ? KV_DELTA_RESTART : KV_DELTA_ALONE;
    if (kind != (has_before ? KV_DELTA_CHAINED : KV_DELTA_RESTART)) {
        for (uint i = 0; i < N; ++i) {
            x[i] = kind == KV_DELTA_RESTART ? from_m[i] : key[i];
        }
        choice = best_scale(x, codec.tries, table);
    }
    const float scale = best_of_warps<N>(choice, warp, lane, turn, memory);
    uint8_t codes[N];
    float d[N];
    code_values(x, scale, codec.unit, table, codes, d);
    if (warp == 0) {
        keep_codes<SIZE>(codes, byte_of_scale(codec.bits, scale), lane, kept);
    }
    for (uint i = 0; i < N; ++i) {
        u[i] = kind == KV_DELTA_CHAINED ? fmaf(u[i], KV_DELTA_RHO, d[i]) : kind == KV_DELTA_ALONE ? d[i] - m[i] : d[i];
    }
    return kind;
}

// Those of the `rows` of a head, from `from` on, that fall into a group, bit by bit, and their cells. By all warps.
template <uint TABLES> __device__ __forceinline__ void find_rows(
        const rows_params & p, uint size, uint head, uint stride, uint from, uint rows, uint64_t group, uint warp, uint lane, group_memory<TABLES> & memory) {
    constexpr uint AT_ONCE = 4; // each is a wait for memory
    sync_warps<ROW_WARPS>(); // others may still read what was found before
    for (uint first = warp*32; first < ::min(rows - from, LOOKED_AT); first += 32*ROW_WARPS*AT_ONCE) {
        group_place place[AT_ONCE];
#pragma unroll
        for (uint i = 0; i < AT_ONCE; ++i) {
            const uint row = from + first + 32*ROW_WARPS*i + lane;
            place[i] = group_of(p, size, head + ::min(row, rows - 1)*stride);
            place[i].found = place[i].found && row < rows;
        }
#pragma unroll
        for (uint i = 0; i < AT_ONCE; ++i) {
            const uint at = first + 32*ROW_WARPS*i;
            const uint same = __ballot_sync(KV_ALL_LANES, place[i].found && place[i].group == group);
            memory.same[at/32] = same;
            memory.cells_of_rows[at + lane] = (uint8_t) place[i].cell;
        }
    }
    sync_warps<ROW_WARPS>();
}

// Rows of one head of the op that a block looks at, so that all blocks of a batch are there at once.
__host__ __device__ constexpr uint block_rows_of(uint units) {
    return units <= 512 ? 1 : units <= 16384 ? (units + 511)/512 : 32;
}

// Rows of a group are `stride` units apart where the heads of both sides agree, and are looked for one by one where they do not
// (copies between other shapes).
__host__ __device__ inline uint group_stride(const kv_rows_args & args, uint index_bytes) {
    return index_bytes != 0 || args.heads == args.cache_heads ? args.heads : 1;
}

// The rows of the op that fall into the group of row `own` of a head, whose place is `mine`, if that is the first of them; `memory` has
// group_floats floats.
template <uint SIZE, bool BANDS, uint TABLES> __device__ __forceinline__ void write_group(
        const rows_params & p, uint head, uint stride, uint own, const group_place & mine, float * memory, group_memory<TABLES> & own_memory) {
    constexpr uint BATCH = batch_of(SIZE);
    // m and u are in registers.
    constexpr bool IN_LANES = SIZE != 0;
    constexpr uint PER_LANE = SIZE ? SIZE/32 : 1, AT_ONCE = SIZE == 256 ? 2 : 4;
    const uint size = SIZE ? SIZE : p.size, kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32, rows = p.args.units/stride;
    // Of a few rows each warp finds for itself which of them fall into the group, and where.
    const bool few = rows <= 32;
    uint same = 1, cell = mine.cell;
    if (few && rows > 1) {
        group_place other = group_of(p, size, head + ::min(lane, rows - 1)*stride);
        same = __ballot_sync(KV_ALL_LANES, lane < rows && other.found && other.group == mine.group);
        cell = other.cell;
        if ((same & ((1u << own) - 1)) != 0) {
            return;
        }
    }
    uint looked_at = few ? LOOKED_AT : 0;
    for (; looked_at <= own; looked_at += LOOKED_AT) {
        find_rows(p, size, head, stride, looked_at, rows, mine.group, warp, lane, own_memory);
        for (uint at = 0; at < LOOKED_AT && looked_at + at < own; at += 32) {
            const uint before = own - looked_at - at;
            if ((own_memory.same[at/32] & (before >= 32 ? ~0u : (1u << before) - 1)) != 0) {
                return; // all warps see the same
            }
        }
    }

    float * keys = memory, * m = keys + BATCH*size, * u = m + size, * work = u + size, * spare = work + size; // keys: [row][size]
    float * levels = own_memory.levels;
    kv_row_levels(kind, threadIdx.x, levels);
    sync_warps<ROW_WARPS>();
    constexpr uint N = SIZE == 64 ? 2 : SIZE == 128 ? 4 : 8;
    typedef lane_codec<SIZE ? SIZE : 256, BANDS, N> codec_of;
    const codec_of codec(IN_LANES || BANDS ? kind : KV_KIND_DELTA4, levels, warp, lane); // else nobody asks
    if constexpr (IN_LANES) {
        codec_of::fill_tables(kind, own_memory);
    }
    group_writer w(p, mine, size);
    w.look(lane);
    bool framed = w.is_framed();
    if (warp == 0) {
        for (uint i = lane; i < size; i += 32) {
            m[i] = kv_delta_frame(w.group, w.step, kind, size, w.rows, i);
        }
        __syncwarp();
    }
    float mr[N] = {}, ur[N] = {}; // of the lane, the same in all warps: what m and u are otherwise
    const auto from_memory = [&](const float * from, float (&to)[N]) {
        for (uint i = 0; i < N && IN_LANES; ++i) {
            to[i] = from[lane*N + i];
        }
    };
    const auto to_memory = [&](const float (&from)[N], float * to) {
        for (uint i = 0; i < N && IN_LANES; ++i) {
            to[lane*N + i] = from[i];
        }
    };
    if (IN_LANES) {
        sync_warps<ROW_WARPS>();
    }
    from_memory(m, mr);

    // Mostly the op's first row of the group follows one that is written.
    const uint before = mine.cell - 1;
    if constexpr (IN_LANES) {
        if (mine.cell > 0 && w.is_written(before)) {
            const chained_rows<ROW_WARPS> chain(w, before);
            codec.with_values(kind, levels, lane, [&](const auto & values_of) { chain.template sum_up<SIZE>(w, values_of, mr, warp, lane, keys); });
            sync_warps<ROW_WARPS>();
            chain.template join<SIZE>(keys, lane, ur);
            sync_warps<ROW_WARPS>(); // keys come where the parts were
            w.at = (int) before;
        }
    }

    // Rows of the op that follow each other are a run. The row behind it, if it is chained to what is overwritten, is kept as the key that it
    // stands for.
    uint run_next = ~0u, after = 0;
    bool has_after = false;
    // Where a run goes to that goes on with row `end`, by the rows `left` of 32 that begin at `base`, and those that come then.
    const auto run_goes_to = [&](uint end, uint base, uint left, uint cell) {
        for (;;) {
            const bool other = (left >> lane & 1) != 0 && cell != end + __popc(left & ((1u << lane) - 1));
            const uint others = __ballot_sync(KV_ALL_LANES, other);
            if (others != 0) {
                return end + __popc(left & ((1u << (__ffs(others) - 1)) - 1));
            }
            end += __popc(left);
            base += 32;
            if (few || base >= rows || base >= looked_at) {
                return end;
            }
            left = own_memory.same[base % LOOKED_AT/32];
            cell = own_memory.cells_of_rows[base % LOOKED_AT + lane];
        }
    };

    uint turn = 0;
    for (uint base = own/32*32; base < rows; base += 32) {
        if (base >= looked_at) {
            find_rows(p, size, head, stride, looked_at, rows, mine.group, warp, lane, own_memory);
            looked_at += LOOKED_AT;
        }
        uint left = few ? same : own_memory.same[base % LOOKED_AT/32];
        cell = few ? cell : own_memory.cells_of_rows[base % LOOKED_AT + lane];
        const uint64_t floats_at = place_of(p, head + ::min(base + lane, rows - 1)*stride, size*p.args.value_step).floats;
        while (left != 0) {
            const uint count = ::min((uint) __popc(left), BATCH);
            // A lane knows where its row is; a warp has every n-th. Several are asked for at once, since each is a wait for memory.
            const uint rank = __popc(left & ((1u << lane) - 1));
            if (warp == 0 && (left >> lane & 1) != 0 && rank < count) {
                own_memory.cells[rank] = cell;
            }
            uint rest = without_first(left, warp), has_values = 0; // a bit for each row: has it a value that is not zero?
            for (uint first = warp; first < count; first += AT_ONCE*ROW_WARPS) {
                float x[AT_ONCE][PER_LANE];
#pragma unroll
                for (uint n = 0; n < AT_ONCE; ++n, rest = without_first(rest, ROW_WARPS)) {
                    const uint k = first + n*ROW_WARPS;
                    if (k >= count) {
                        continue;
                    }
                    const uint8_t * floats = p.from + __shfl_sync(KV_ALL_LANES, floats_at, __ffs(rest) - 1);
                    for (uint i = 0; i < PER_LANE && IN_LANES; ++i) {
                        x[n][i] = kv_float_at(floats + (i*32 + lane)*p.args.value_step, p.float_kind);
                    }
                    for (uint i = lane; i < size && !IN_LANES; i += 32) {
                        const float value = kv_float_at(floats + i*p.args.value_step, p.float_kind);
                        has_values |= (__float_as_uint(value) & 0x7fffffffu) != 0 ? 1u << k : 0;
                        keys[k*size + i] = clean(value);
                    }
                }
#pragma unroll
                for (uint n = 0; n < AT_ONCE && IN_LANES; ++n) {
                    const uint k = first + n*ROW_WARPS;
                    for (uint i = 0; i < PER_LANE && k < count; ++i) {
                        has_values |= (__float_as_uint(x[n][i]) & 0x7fffffffu) != 0 ? 1u << k : 0;
                        keys[k*size + i*32 + lane] = clean(x[n][i]);
                    }
                }
            }
            left = without_first(left, count);
            for (uint k = warp; k < count; k += ROW_WARPS) {
                const bool zero = simd_all((has_values >> k & 1) == 0);
                if (!BANDS) {
                    kv_rotate_from(keys + k*size, size, KV_SIGNS_ROTATION, 1.0f, lane, keys + k*size);
                }
                if (lane == 0) {
                    own_memory.zero[k] = zero;
                }
            }
            sync_warps<ROW_WARPS>();
            // Codes take the place of their key, and rows are packed when others need them or all are there: `waiting` has a bit for each.
            uint waiting = 0;
            const auto pack_those = [&]() {
                sync_warps<ROW_WARPS>();
                codec_of::pack(kind, waiting, warp, lane, [&](uint k) { return (const uint8_t *) (keys + k*size); }, [&](uint k) { return w.group + own_memory.cells[k]*w.step; });
                waiting = 0;
                sync_warps<ROW_WARPS>();
            };
            uint64_t coded = 0; // rows of the group that wait
            for (uint k = 0, stop; k < count && (IN_LANES || warp == 0); k = stop) {
                const uint t = own_memory.cells[k];
                float * key = keys + k*size;
                stop = k + 1;
                if (t != run_next || t == after) {
                    after = t + 1;
                    uint next = k + 1;
                    for (; next < count && own_memory.cells[next] == after; ++next) {
                        ++after;
                    }
                    if (next == count) {
                        after = run_goes_to(after, base, left, cell);
                    }
                    const uint64_t run = (after < 64 ? (1ull << after) - 1 : ~0ull) & ~0ull << t;
                    has_after = after < w.rows && (w.chained >> after & 1) != 0;
                    const bool goes_back = t > 0 && w.is_written(t - 1) && w.at != (int) t - 1;
                    if (IN_LANES && (has_after || goes_back || (coded & run) != 0)) {
                        pack_those(); // and all are done with what is written here
                        coded = 0;
                    }
                    if (has_after || goes_back) {
                        if (warp == 0) {
                            to_memory(ur, u);
                        }
                        __syncwarp();
                        if (has_after && warp == 0) {
                            writer_go_to<SIZE, BANDS>(w, kind, size, after, m, levels, lane, u);
                            for (uint i = lane; i < size; i += 32) {
                                spare[i] = m[i] + u[i];
                            }
                        }
                        if (t > 0 && w.is_written(t - 1) && warp == 0) {
                            writer_go_to<SIZE, BANDS>(w, kind, size, t - 1, m, levels, lane, u);
                        }
                        __syncwarp();
                        if (IN_LANES) {
                            sync_warps<ROW_WARPS>();
                        }
                        from_memory(u, ur);
                        w.at = (int) t - 1; // if that is not written, nobody asks for its deviation
                    }
                }
                run_next = t + 1;
                // A key of zeros leaves an empty cell alone: it reads as zeros already.
                if (own_memory.zero[k] && !w.is_written(t)) {
                    continue;
                }
                if (!framed) {
                    if (warp == 0) {
                        writer_found(w, size, key, lane, m);
                    }
                    framed = true;
                    if (IN_LANES) {
                        sync_warps<ROW_WARPS>();
                    }
                    from_memory(m, mr);
                }
                const bool has_before = t > 0 && w.is_written(t - 1);
                if constexpr (!IN_LANES) {
                    writer_encode(w, kind, size, t, key, m, u, has_before, levels, lane, work, own_memory.line);
                    writer_step(w, kind, size, t, own_memory.line, m, levels, lane, u);
                    w.at = (int) t;
                    if (has_after && t + 1 == after) {
                        __syncwarp();
                        writer_encode(w, kind, size, t + 1, spare, m, u, false, levels, lane, work, own_memory.line);
                    }
                } else {
                    // Rows of the run that are here, one after the other, and what they are in the end: a row waits for the one before.
                    const uint cell_of_lane = t + lane - k;
                    const bool stops = lane > k && lane < count && (own_memory.cells[lane] != cell_of_lane || cell_of_lane >= after || (own_memory.zero[lane] && !w.is_written(cell_of_lane)));
                    const uint stopping = __ballot_sync(KV_ALL_LANES, stops);
                    stop = stopping != 0 ? __ffs(stopping) - 1 : count;
                    uint are_chained = 0, are_alone = 0;
                    float values[N];
                    from_memory(key, values);
                    for (uint n = k; n < stop; ++n, turn ^= 1) {
                        float next[N];
                        from_memory(keys + ::min(n + 1, stop - 1)*size, next);
                        const uint row_kind = writer_encode_lanes<SIZE, BANDS>(codec, values, mr, ur, has_before || n > k, warp, lane, turn, own_memory, (uint8_t *) (keys + n*size));
                        are_chained |= row_kind == KV_DELTA_CHAINED ? 1u << (n - k) : 0;
                        are_alone   |= row_kind == KV_DELTA_ALONE ? 1u << (n - k) : 0;
                        for (uint i = 0; i < N; ++i) {
                            values[i] = next[i];
                        }
                    }
                    const uint those = (stop < 32 ? (1u << stop) - 1 : ~0u) & ~0u << k;
                    w.set_kinds(t, stop - k, are_chained, are_alone, lane, warp == 0);
                    waiting |= those;
                    coded |= (uint64_t) (those >> k) << t;
                    run_next = t + stop - k;
                    w.at = (int) run_next - 1;
                    if (has_after && run_next == after) {
                        float other[N];
                        for (uint i = 0; i < N; ++i) {
                            other[i] = ur[i];
                        }
                        from_memory(spare, values);
                        const uint row_kind = writer_encode_lanes<SIZE, BANDS>(codec, values, mr, other, false, warp, lane, turn, own_memory, (uint8_t *) work);
                        turn ^= 1;
                        w.set_kinds(after, 1, row_kind == KV_DELTA_CHAINED ? 1 : 0, row_kind == KV_DELTA_ALONE ? 1 : 0, lane, warp == 0);
                        __syncwarp();
                        codec_of::pack(kind, warp == 0 ? 1 : 0, warp, lane, [&](uint) { return (const uint8_t *) work; }, [&](uint) { return w.group + after*w.step; });
                        __syncwarp();
                    }
                }
            }
            if constexpr (IN_LANES) {
                pack_those();
            } else {
                sync_warps<ROW_WARPS>();
            }
        }
    }
}

// The only row of the op that a head has, as when a token is decoded: the code above comes from memory each time then, and most of it is for
// other cases. False, and nothing is written, where this is one of those: the first row of a group, or one before a row that is chained to it.
template <uint SIZE, bool BANDS, uint TABLES> __device__ __forceinline__ bool write_single_row(const rows_params & p, uint head, float * memory, group_memory<TABLES> & own_memory) {
    constexpr uint N = SIZE/32, PARTS = ROW_WARPS - 1;
    const uint kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    const group_place mine = group_of(p, SIZE, head);
    typedef lane_codec<SIZE, BANDS, N> codec_of;
    kv_row_levels(kind, threadIdx.x, own_memory.levels);
    sync_warps<ROW_WARPS>();
    if (!mine.found) {
        return true;
    }
    // All that is read is asked for: the key, the rows before it, and what the rows are.
    group_writer w(p, mine, SIZE);
    const uint t = mine.cell;
    float * key = memory, * parts = memory + SIZE;
    float x[N], m[N], u[N] = {};
    if (warp == 0) {
        for (uint i = 0; i < N; ++i) {
            x[i] = kv_float_at(p.from + (head*SIZE + i*32 + lane)*p.args.value_step, p.float_kind);
        }
    } else {
        w.prefetch(lane + 32*(warp - 1), t);
    }
    const uint slots = kv_delta_slots(SIZE);
    for (uint i = 0; i < N; ++i) {
        const uint row = (lane*N + i)/slots;
        m[i] = row < w.rows ? kv_delta_value(w.slot_of(row)[(lane*N + i) % slots]) : 0.0f; // if there is an I-frame
    }
    w.look(lane);
    const codec_of codec(kind, own_memory.levels, warp, lane);
    codec_of::fill_tables(kind, own_memory);
    if (!w.is_framed() || (t + 1 < w.rows && (w.chained >> (t + 1) & 1) != 0)) {
        return false;
    }
    const bool has_before = t > 0 && w.is_written(t - 1);
    const chained_rows<PARTS> chain(w, has_before ? t - 1 : 0);
    if (warp == 0) {
        bool has_values = false;
        for (uint i = 0; i < N; ++i) {
            has_values = has_values || (__float_as_uint(x[i]) & 0x7fffffffu) != 0;
            key[i*32 + lane] = clean(x[i]);
        }
        const bool zero = simd_all(!has_values);
        if (lane == 0) {
            own_memory.zero[0] = zero;
        }
        __syncwarp();
        if (!BANDS) {
            kv_rotate_from(key, SIZE, KV_SIGNS_ROTATION, 1.0f, lane, key);
        }
    } else if (has_before) {
        codec.with_values(kind, own_memory.levels, lane, [&](const auto & values_of) { chain.template sum_up<SIZE>(w, values_of, m, warp - 1, lane, parts); });
    }
    sync_warps<ROW_WARPS>();
    // A key of zeros leaves an empty cell alone.
    if (own_memory.zero[0] && !w.is_written(t)) {
        return true;
    }
    if (has_before) {
        chain.template join<SIZE>(parts, lane, u);
    }
    for (uint i = 0; i < N; ++i) {
        x[i] = key[lane*N + i];
    }
    uint8_t * kept = (uint8_t *) key;
    const uint row_kind = writer_encode_lanes<SIZE, BANDS>(codec, x, m, u, has_before, warp, lane, 0, own_memory, kept);
    if (warp == 0) {
        w.set_kind(t, row_kind, lane);
        __syncwarp();
        codec_of::pack(kind, 1, warp, lane, [&](uint) { return kept; }, [&](uint) { return w.group + t*w.step; });
    }
    return true;
}

// A block has rows of one head.
template <uint SIZE, bool BANDS, uint TABLES> __device__ __forceinline__ void write_groups(const rows_params & p, float * memory, group_memory<TABLES> & own_memory) {
    const uint size = SIZE ? SIZE : p.size, lane = threadIdx.x % 32;
    const uint stride = group_stride(p.args, p.index_bytes), rows = p.args.units/stride, count = block_rows_of(p.args.units);
    const uint head = blockIdx.x % stride, first = blockIdx.x/stride*count;
    if constexpr (SIZE != 0) {
        if (rows == 1 && first == 0 && p.index_bytes != 0) { // other ops of the launch may have more blocks
            if (write_single_row<SIZE, BANDS>(p, head, memory, own_memory)) {
                return;
            }
            sync_warps<ROW_WARPS>(); // its tables are filled once more
        }
    }
    const uint row = ::min(first + lane, rows - 1);
    group_place mine = group_of(p, size, head + row*stride), before = {};
    if (row > 0) {
        before = group_of(p, size, head + (row - 1)*stride);
    }
    // Most rows follow one of their group.
    const bool begins = lane < count && first + lane < rows && mine.found && !(before.found && before.group == mine.group);
    for (uint left = __ballot_sync(KV_ALL_LANES, begins); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const group_place place = { __shfl_sync(KV_ALL_LANES, mine.group, from), __shfl_sync(KV_ALL_LANES, mine.cell, from), __shfl_sync(KV_ALL_LANES, mine.rows, from), true };
        write_group<SIZE, BANDS>(p, head, stride, first + from, place, memory, own_memory);
    }
}

}  // namespace
}  // namespace kv
