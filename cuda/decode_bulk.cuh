// Attention of a few query rows over tiles of 32 cells, all KV heads of them together: what a block reads is contiguous, and bulk
// copies bring it to shared memory while the tiles before are worked on. For caches whose KV heads lie side by side, from
// Hopper on.
//
// A block takes a chunk of cells. Its warps are teams, a warp for each KV head; teams take tiles in turn (of groups of delta, two
// tiles: keys of both, and then values of both), each through slots of its own. Warps beside them ask for what comes into a slot next, or, where
// registers are too few for such, the last warp of a team that is done with it.
//
// The mask of the chunk lies in shared memory. Cells that nobody is to see are hidden in it: those that have a precise row, and
// those behind the last. Tiles that the mask hides are not read, but for the first. Precise rows have blocks of their own
// (decode_precise.cuh).
//
// The launch before makes the queries and writes rows to the cache. A block waits for the queries alone, if they are announced (else for
// the end of that launch), and goes on while rows are being written: tiles that have such rows come last, and are asked for when that launch has
// ended.
#pragma once

#include "bulk_copy.cuh"
#include "decode_precise.cuh"

namespace kv {
namespace {

constexpr uint TILE_STEPS = TILE/STEP;
constexpr uint TILE_WEIGHTS = TILE + 16;

// Warps that a multiprocessor has registers for.
template <uint K, uint D, uint QB> constexpr uint bulk_warps() {
    if (D == 64 && QB == 1 && !KV_KIND_IS_TURBO(K) && !KV_KIND_IS_POLAR(K)) {
        return is_delta(K) ? 20 : 24;
    }
    // turbo has twice as many sums and queries, polar what its codes are made of.
    return D == 256 || (D == 128 && QB == 2 && (is_delta(K) || KV_KIND_IS_TURBO(K) || KV_KIND_IS_POLAR(K))) ? 8 : 16;
}

// Warps beside these that ask for tiles; with them a warp has 96 registers where it had 128, which are too few for the others.
template <uint K, uint D, uint QB> constexpr uint bulk_askers() {
    return D == 128 && QB == 1 && !is_delta(K) && !KV_KIND_IS_TURBO(K) && !KV_KIND_IS_POLAR(K) ? 4 : 0;
}

// Where a block's own shared memory begins: the system has what is before. It is the same on all GPUs that have bulk copies, and a
// block looks.
constexpr uint SHARED_BASE = 1024;

// How a block's shared memory is used. Offsets are in bytes.
//
//     barriers, lists, mask, queries of delta | slots || table of V, with gaps of 128 bytes || tables of polar | weights | slots
//
// The table lies at a multiple of 64 KiB (wide_lane_table); what fits into its gaps is there. Without a table all is in a row, but for polar's, which lie at a
// multiple of 8 KiB. A
// slot holds a tile of K or of V; APART, those before the table hold V and those behind it K.
template <uint K, uint V, uint D, uint QB> struct bulk_layout {
    static constexpr uint WARPS = bulk_warps<K, D, QB>(), ASKERS = bulk_askers<K, D, QB>(), ROWS = 4*QB, UNIT = is_delta(K) ? 2 : 1, MOST_DEPTH = 4;
    static constexpr uint K_ROW = level_row_bytes(K, D), V_ROW = level_row_bytes(V, D), WIDER_ROW = K_ROW > V_ROW ? K_ROW : V_ROW;
    static constexpr bool WITH_TABLE = decode_values_of<V, D>::TABLE_BYTES != 0;
    // Where rows of K are much wider than those of V, tiles of V lie before the table and those of K behind it; else all have slots of one size.
    static constexpr bool APART = WITH_TABLE && 2*K_ROW > 3*V_ROW;
    // Scales of a warp's tile, in pieces of 128 bytes; they begin PIECE bytes apart.
    static constexpr uint KEY_PIECES = TILE*decode_keys_of<K, D, QB>::CELL_SCALES*4/128, VALUE_PIECES = 2*decode_values_of<V, D>::SCALE_WORDS;
    static constexpr uint SCALE_PIECES = KEY_PIECES > VALUE_PIECES ? KEY_PIECES : VALUE_PIECES, PIECE = WITH_TABLE ? 256 : 128;
    static constexpr uint VALUES = decode_values_of<V, D>::WIDTH;
    // what does not depend on the number of heads
    static constexpr uint BARS    = 0;
    static constexpr uint DONE    = BARS + WARPS*MOST_DEPTH*16;
    static constexpr uint COUNT   = DONE + WARPS*MOST_DEPTH*16; // two
    static constexpr uint MASK_BAR = COUNT + 8;
    static constexpr uint PLACES  = MASK_BAR + 8; // of slots: K, V
    static constexpr uint LIST    = PLACES + WARPS*MOST_DEPTH*8;
    static constexpr uint SEEN    = LIST + TILE_MASK/TILE*2;
    static constexpr uint MASKED  = SEEN + TILE_MASK/TILE;
    static constexpr uint SOFTS   = MASKED + TILE_MASK/TILE;
    static constexpr uint SLOPES  = SOFTS + WARPS*ROWS*8;
    static constexpr uint MASK    = SLOPES + WARPS*ROWS*4;
    static constexpr uint FRONT   = MASK + TILE_MASK*2; // what follows the table, where there is one
    static constexpr uint TABLE   = (1 << 16) - SHARED_BASE, GAPS = TABLE + 128;
    static constexpr uint WARP_WEIGHTS = ROWS*TILE_WEIGHTS*2;
    static constexpr bool WITH_POLAR = polar_of<K, V>() != 0; // what polar looks up, at an address that is a multiple of its weights' bytes
    static constexpr uint POLAR   = WITH_TABLE ? TABLE + (1 << 16) : (SHARED_BASE + FRONT + POLAR_WEIGHTS*128 - 1)/(POLAR_WEIGHTS*128)*(POLAR_WEIGHTS*128) - SHARED_BASE;
    static constexpr uint WEIGHTS = WITH_POLAR ? POLAR + POLAR_BYTES : WITH_TABLE ? TABLE + (1 << 16) : FRONT, WEIGHT_BYTES = WARPS*WARP_WEIGHTS;
    static constexpr uint SCALES  = WITH_TABLE ? GAPS : WEIGHTS + WEIGHT_BYTES;
    static constexpr uint BACK    = WITH_TABLE ? WEIGHTS + WEIGHT_BYTES : SCALES + WARPS*SCALE_PIECES*PIECE;

    static_assert(MASK % 16 == 0, "it is copied");
    static_assert(ASKERS == 0 || UNIT == 1, "they ask for tiles one by one");
    static_assert(WARPS + ASKERS <= precise_memory<D, QB>::MOST_WARPS, "");
    static_assert((SHARED_BASE + POLAR) % (POLAR_WEIGHTS*128) == 0 || !WITH_POLAR, "places in its tables are addresses");
    static_assert(!WITH_TABLE || (WARPS*SCALE_PIECES <= 256 && WARPS*ROWS*VALUES*4 <= 1 << 16), "scales lie in the gaps, and sums in the place of the table");

    uint queries, query_step; // of delta, and floats from 32 of them to the next
    uint slot_bytes, value_bytes, front, back, front_slots; // value_bytes: of a tile of V, APART

    __host__ __device__ bulk_layout(uint heads, uint first_slots) {
        const uint pieces = heads*ROWS*(D/32);
        const bool in_gaps = WITH_TABLE && WARPS*SCALE_PIECES + pieces <= 256;
        const uint apart = is_delta(K) && !in_gaps ? pieces*128 : 0;
        queries     = in_gaps ? GAPS + WARPS*SCALE_PIECES*PIECE : WITH_TABLE ? FRONT : BACK;
        query_step  = in_gaps ? PIECE/4 : 32;
        front       = (FRONT + (WITH_TABLE ? apart : 0) + 127)/128*128;
        back        = (BACK + (WITH_TABLE ? 0 : apart) + 127)/128*128;
        slot_bytes  = (heads*WIDER_ROW*TILE + 127)/128*128;
        value_bytes = (heads*V_ROW*TILE + 127)/128*128;
        front_slots = first_slots;
    }

    // Of K where it is even, else of V.
    __device__ __forceinline__ uint slot_at(uint slot) const {
        if (APART) {
            return slot % 2 != 0 ? front + slot/2*value_bytes : back + slot/2*slot_bytes;
        }
        return slot < front_slots ? front + slot*slot_bytes : back + (slot - front_slots)*slot_bytes;
    }

    static kv_cuda_teams teams(uint heads, size_t shared_bytes) {
        const bulk_layout at(heads, 0);
        const uint end = (uint) shared_bytes - (D == 64 ? 16 : 0); // rows that begin in the middle of a word are read beyond their end
        if (WITH_TABLE && at.front > TABLE) {
            return {};
        }
        const uint front_slots = WITH_TABLE && at.front < TABLE ? (TABLE - at.front)/(APART ? at.value_bytes : at.slot_bytes) : 0, back_slots = end > at.back ? (end - at.back)/at.slot_bytes : 0;
        for (uint teams = WARPS/heads; teams > 0; --teams) {
            const uint most = APART ? (front_slots < back_slots ? front_slots : back_slots) : (front_slots + back_slots)/2, depth = most/teams/UNIT*UNIT;
            // Sums of the warps take the place of the table, or of the slots.
            const bool sums_fit = WITH_TABLE ? at.back <= end : at.back + heads*teams*ROWS*VALUES*4 <= end;
            if (depth > 0 && sums_fit) {
                return { teams, depth > MOST_DEPTH ? MOST_DEPTH : depth, front_slots, (int) teams < (int) ASKERS ? teams : ASKERS };
            }
        }
        return {};
    }
};

// Where the scales of a cell of a tile lie, so many words of each: of K floats; of V halves, the first ones of chunks beside zeros, and then the
// second ones. Those of cells g + 8 n and t + 4 n lie as far behind those of g and t as those of 8 n and 4 n behind the first.
template <uint WORDS, uint PIECE> __device__ __forceinline__ uint scales_place(uint cell) {
    constexpr uint CELLS = 32/WORDS; // of a piece
    return cell/CELLS*PIECE + cell % CELLS*(4*WORDS);
}

// 1, 2 or a multiple of 4 words.
template <uint N> __device__ __forceinline__ void load_words(uint (&x)[N], const uint8_t * from) {
    if constexpr (N == 1) {
        x[0] = *(const uint *) from;
    } else if constexpr (N == 2) {
        const ::uint2 two = *(const ::uint2 *) from;
        x[0] = two.x;
        x[1] = two.y;
    } else {
#pragma unroll
        for (uint i = 0; i < N; i += 4) {
            const ::uint4 four = *(const ::uint4 *) (from + 4*i);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
        }
    }
}

template <uint K, uint D> __device__ __forceinline__ void make_level_scales(uint8_t * at, const uint8_t * row) {
    constexpr uint C = D/64, COUNT = 2*C, BYTES = level_scale_bytes(K, D);
    uint words[(BYTES + 3)/4];
    if constexpr (BYTES == 2) {
        words[0] = *(const unsigned short *) row;
    } else {
        load_scales<tile_bytes, BYTES, level_row_align(K, D)>(words, row);
    }
    uint halves[(C + 1)/2*2];
    const auto scale = [&](uint i) {
        if constexpr (code_bits(K) == 8) {
            return scale_at<8>(words, i);
        } else {
            const __half2 two = *(const __half2 *) &halves[i/2];
            return i % 2 ? __high2float(two) : __low2float(two);
        }
    };
    if constexpr (code_bits(K) != 8) {
#pragma unroll
        for (uint c = 0; c < C; ++c) {
            if constexpr (KV_KIND_IS_BAND(K)) {
                halves[c] = wide_band_bits(K, D, c) == 5 ? halves_of_band_scales<true>(words[c/2], c % 2) : halves_of_band_scales<false>(words[c/2], c % 2);
            } else {
                halves[c] = halves_of_scales<0>(prmt(words[c/2], 0, c % 2 ? 0x4342 : 0x4140));
            }
        }
    }
    if constexpr (COUNT == 2) {
        *(::float2 *) at = make_float2(scale(0), scale(1));
    } else {
#pragma unroll
        for (uint i = 0; i < COUNT; i += 4) {
            *(::float4 *) (at + 4*i) = make_float4(scale(i), scale(i + 1), scale(i + 2), scale(i + 3));
        }
    }
}

// They are made once, by the lane of a cell.
template <uint K, uint D> __device__ __forceinline__ void make_key_scales(uint8_t * at, const uint8_t * row) {
    if constexpr (KV_KIND_IS_TURBO(K)) {
        const uint norms = *(const uint *) row;
        *(::float2 *) at = make_float2(decode_turbo_keys<K, D, 1>::scale_of(norms, 0), decode_turbo_keys<K, D, 1>::scale_of(norms, 1));
    } else if constexpr (K == KV_KIND_QJL1) {
        *(float *) at = norm_of(*(const unsigned short *) row);
    } else if constexpr (!KV_KIND_IS_POLAR(K)) {
        make_level_scales<K, D>(at, row);
    }
}

template <uint V, uint D> __device__ __forceinline__ void make_value_scales(uint8_t * at, const uint8_t * row) {
    constexpr uint C = decode_values_of<V, D>::SCALE_WORDS, BYTES = level_scale_bytes(V, D);
    uint words[(BYTES + 3)/4];
    if constexpr (BYTES == 2) {
        words[0] = *(const unsigned short *) row;
    } else {
        load_scales<tile_bytes, BYTES, level_row_align(V, D)>(words, row);
    }
    uint halves[2*C];
#pragma unroll
    for (uint i = 0; i < 2*C; ++i) {
        halves[i] = decode_values_of<V, D>::two_scales(words, i % C) & half_of_lane(i < C ? 0 : 1);
    }
    if constexpr (C == 1) {
        *(::uint2 *) at = make_uint2(halves[0], halves[1]);
    } else {
#pragma unroll
        for (uint i = 0; i < 2*C; i += 4) {
            *(::uint4 *) (at + 4*i) = make_uint4(halves[i], halves[i + 1], halves[i + 2], halves[i + 3]);
        }
    }
}

// Four values of the queries of a block in a row, in planes as queries.cuh makes them.
struct four_queries {
    char4 first, second;
    float scale;

    __device__ __forceinline__ void load(const signed char * planes, const float * scales, uint rows, uint size, uint i) {
        const signed char * from = planes + (i/(rows*size)*2*rows + i/size % rows)*size + i % size;
        first  = *(const char4 *) from;
        second = *(const char4 *) (from + rows*size);
        scale  = scales[i/size];
    }

    __device__ __forceinline__ float4 joined() const {
        const auto value = [&](int a, int b) { return (float) (a*SECOND_PLANE + b)*scale; };
        return make_float4(value(first.x, second.x), value(first.y, second.y), value(first.z, second.z), value(first.w, second.w));
    }
};

// A row that the launch before writes, the n-th of all; a lane has one, and the lanes of a warp look at those of all writes together. Its
// number is on its way until it is looked at.
struct written_row {
    const attn_write * to;
    int64_t            number;

    __device__ __forceinline__ written_row(const attn_params & p, uint n) : to(nullptr), number(0) {
        const uint rows = p.write_rows;
        if (n < p.write_count*rows) {
            to     = &p.writes[n/rows];
            number = row_number(to->index + min(n % rows, to->count - 1)*to->index_step, to->index_bytes);
        }
    }

    // The bit of the unit of `unit_bytes` that it is in, if it is among these bytes.
    __device__ __forceinline__ unsigned long long unit_of(const uint8_t * rows, uint bytes, uint unit_bytes) const {
        if (!to) {
            return 0;
        }
        const uint8_t * at = to->to + number*(int64_t) to->row_step;
        return at + to->row_step > rows && at < rows + bytes ? 1ull << (at > rows ? (uint) (at - rows)/unit_bytes : 0) : 0;
    }
};

static_assert(TILE_MASK/TILE <= 64, "a bit for each tile of a chunk");

__device__ __forceinline__ unsigned long long or_of_lanes(unsigned long long x) {
#if defined(KV_CUDA_EMULATED) || __CUDA_ARCH__ >= 800
    return (unsigned long long) __reduce_or_sync(KV_ALL_LANES, (uint) (x >> 32)) << 32 | __reduce_or_sync(KV_ALL_LANES, (uint) x);
#else
    return x;
#endif
}

template <uint K, uint V, uint D, uint QB, bool RECENT> __device__ __forceinline__ void decode_bulk_block(const attn_params & p, uint8_t * raw) {
#if KV_HAS_BULK_COPIES
    typedef bulk_layout<K, V, D, QB> layout;
    typedef decode_keys_of<K, D, QB> keys_of;
    typedef decode_values_of<V, D> values_of;
    constexpr bool DELTA = is_delta(K);
    constexpr uint ROWS = layout::ROWS, UNIT = layout::UNIT, SCALE_WORDS = values_of::SCALE_WORDS, QUERY = query_width(K, D);
    const kv_attn_args & args = p.args;
    const uint heads = args.kv_heads, threads = blockDim.x;
    const uint teams = p.bulk.teams, depth = p.bulk.depth;
    const layout at(heads, p.bulk.front_slots);
    const block_place block(p, ROWS);
    const uint k_cell = heads*layout::K_ROW, v_cell = heads*layout::V_ROW;
    uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    keep(warp);
    keep(lane);
    keep(g);
    keep(t);
    const uint team = p.kv_heads.quotient(warp), head = warp - team*heads;
    const uint first_token = block.token_of(0), mask_rows = block.token_of(ROWS - 1) - first_token + 1;
    const uint chunk_cells = args.chunk_cells, begin = blockIdx.z*chunk_cells, end = min(args.cells, begin + chunk_cells);
    const uint tiles = (end - begin + UNIT*TILE - 1)/(UNIT*TILE)*UNIT;
    // Rows of K: a group is read as a whole, for its I-frame.
    const uint key_count = DELTA ? min(tiles*TILE, args.k_cells - begin) : end - begin;
    const uint8_t * keys   = p.k + block.kv_stream*args.k_nb[2] + (size_t) begin*k_cell;
    const uint8_t * values = p.v + block.kv_stream*args.v_nb[2] + (size_t) begin*v_cell;

    if ((layout::WITH_TABLE || layout::WITH_POLAR) && shared_address(raw) != SHARED_BASE) {
        __trap();
    }
    const uint bars = shared_address(raw + layout::BARS), done = shared_address(raw + layout::DONE); // of a tile: keys, values
    unsigned short * const list = (unsigned short *) (raw + layout::LIST), * const mask = (unsigned short *) (raw + layout::MASK);
    uint * const places = (uint *) (raw + layout::PLACES);
    if (threadIdx.x < 2*teams*depth) { // a block has at least as many threads
        places[threadIdx.x] = at.slot_at(threadIdx.x);
    }
    const auto ask_keys = [&](uint slot, uint first) {
        const uint count = key_count > first ? min(key_count - first, TILE) : 0;
        ask_for<true>(raw + places[2*slot], keys + first*k_cell, count*k_cell, bars + 16*slot);
    };
    const auto ask_values = [&](uint slot, uint first) {
        const uint count = end - begin > first ? min(end - begin - first, TILE) : 0;
        ask_for<true>(raw + places[2*slot + 1], values + first*v_cell, count*v_cell, bars + 16*slot + 8);
    };
    // The n-th tile of a team, among those that are read.
    const auto tile_at = [&](uint team, uint n) { return (n/UNIT*teams + team)*UNIT + n % UNIT; };

    // The mask and rows that are being written are asked for before any tile, behind which they would wait for microseconds.
    const uint mask_bar = shared_address(raw + layout::MASK_BAR);
    if (threadIdx.x == 0) {
        begin_barrier(mask_bar, mask_rows);
        end_writes_before_copies();
        for (uint row = 0; row < mask_rows; ++row) {
            ask_for<false>((uint8_t *) (mask + row*chunk_cells), p.mask + mask_offset(p, first_token + row, block.stream) + 2*begin, p.mask ? 2*(end - begin) : 0, mask_bar);
        }
    }
    written_row written(p, lane);
    const auto column = [&](uint i) { return column_at(p.columns, p.columns_nb, i, block.kv_stream); };
    const long long first_column = RECENT && threadIdx.x < p.column_count ? column(threadIdx.x) : -1;
    uint8_t * const seen = raw + layout::SEEN, * const masked = raw + layout::MASKED; // of tiles: is there a cell to be seen, and does the mask add anything?
    if (threadIdx.x < TILE_MASK/TILE) { // a block has at least as many threads
        seen[threadIdx.x]   = 0;
        masked[threadIdx.x] = 0;
    }
    if (warp == 0) {
        for (uint i = lane; i < 2*teams*depth; i += 32) {
            begin_barrier(bars + 8*i, 1);
            begin_barrier(done + 8*i, heads);
        }
        end_writes_before_copies();
    }
    __syncthreads();

    // Units that the launch before writes to, a bit for each. A written row changes others of a group of delta, which is one unit.
    unsigned long long late = 0;
    for (uint i = lane; i < p.write_count*p.write_rows; i += 32) {
        if (i != lane) {
            written = written_row(p, i);
        }
        late |= written.unit_of(keys, key_count*k_cell, UNIT*TILE*k_cell) | written.unit_of(values, (end - begin)*v_cell, UNIT*TILE*v_cell);
    }
    late = or_of_lanes(late);
    // How many of the units before this one are not written to.
    const auto place_of_early = [&](uint unit) { return unit - __popcll(late & ((1ull << unit) - 1)); };
    const uint units = tiles/UNIT, at_once = min((units - __popcll(late))*UNIT, teams*depth);
    // Asks for tiles that are on their way when the work begins, a warp for one: keys of the first tile of each team, its values,
    // keys of the second and so on. They are read whether they are seen or not, so the mask need not be known.
    const auto ask_tiles = [&](uint from, uint to) {
        for (uint i = from + warp; i < to; i += threads/32) {
            const uint side = p.teams.quotient(i), of = i - side*teams, n = side/2, slot = of*depth + n, place = tile_at(of, n);
            if (lane == 0 && place < at_once) {
                uint unit = place/UNIT;
                for (unsigned long long before = late; before != 0 && (uint) __ffsll(before) <= unit + 1; before &= before - 1) {
                    ++unit;
                }
                const uint first = (unit*UNIT + place % UNIT)*TILE;
                side % 2 != 0 ? ask_values(slot, first) : ask_keys(slot, first);
            }
        }
    };
    // Of few tiles keys alone at first: queries would wait behind the values.
    const uint first_asked = tiles > teams*UNIT ? 2*teams : teams;
    ask_tiles(0, first_asked);
    if constexpr (values_of::TABLE_BYTES != 0) {
        fill_table((uint *) (raw + layout::TABLE), 64, threadIdx.x, threads);
    }
    if constexpr (layout::WITH_POLAR) {
        fill_polar_table((uint *) (raw + layout::POLAR), polar_part<polar_of<K, V>(), D, 4>::BITS, threadIdx.x, threads);
    }

    // What a row sees of each tile. The lanes of a warp have the cells of one.
    await(mask_bar, 0);
    uint row = 0;
#pragma unroll 1
    for (uint cell = threadIdx.x; ; cell += threads) {
        for (; cell >= chunk_cells && row < mask_rows; cell -= chunk_cells) {
            ++row;
        }
        if (row == mask_rows) {
            break;
        }
        unsigned short * const at_cell = mask + row*chunk_cells + cell;
        const unsigned short here = cell >= end - begin ? HIDDEN_MASK : p.mask ? *at_cell : (unsigned short) 0;
        const bool visible = bias_of(here) != -INFINITY;
        *at_cell = visible ? here : HIDDEN_MASK;
        if (__any_sync(KV_ALL_LANES, visible)) {
            seen[cell/TILE] = 1;
        }
        if (__any_sync(KV_ALL_LANES, here != 0)) {
            masked[cell/TILE] = 1;
        }
    }

    float * const slopes = (float *) (raw + layout::SLOPES), * const q = (float *) (raw + at.queries);
    if (threadIdx.x < heads*ROWS) {
        slopes[threadIdx.x] = slope_of(p, block.head_of(threadIdx.x/ROWS, threadIdx.x % ROWS));
    }
    __syncthreads();
    if (RECENT) {
        for (uint i = threadIdx.x; i < p.column_count; i += threads) {
            const uint cell = cell_of(i == threadIdx.x ? first_column : column(i), args.cells) - begin; // large where the cell comes before
            for (uint r = 0; r < mask_rows && cell < end - begin; ++r) {
                mask[r*chunk_cells + cell] = HIDDEN_MASK;
                masked[cell/TILE] = 1;
            }
        }
    }
    if (RECENT) {
        __syncthreads();
        // What is written is recent as a rule, and then nobody sees it here.
        for (unsigned long long left = warp == 0 ? late : 0; left != 0; left &= left - 1) {
            const uint first = (__ffsll(left) - 1)*UNIT;
            bool visible = false;
            for (uint i = lane; i < UNIT*TILE*mask_rows; i += 32) {
                visible = visible || mask[i/(UNIT*TILE)*chunk_cells + first*TILE + i % (UNIT*TILE)] != HIDDEN_MASK;
            }
            visible = __any_sync(KV_ALL_LANES, visible);
            if (lane < UNIT) {
                seen[first + lane] = visible;
            }
        }
        __syncwarp();
    }
    uint * const counts = (uint *) (raw + layout::COUNT); // of tiles that are read, and of those among them that are not written to
    if (warp == 0) {
        uint count = 0, early = 0;
        for (uint written_to = 0; written_to < 2; ++written_to) {
            for (uint unit = 0; unit < units && (written_to == 0 || late != 0); unit += 32) {
                const uint mine = unit + lane, first = mine*UNIT;
                const bool of_these = mine < units && (late >> mine & 1) == written_to;
                const bool read = of_these && (seen[first] != 0 || seen[first + UNIT - 1] != 0 || (written_to == 0 && place_of_early(mine)*UNIT < at_once));
                const uint all = __ballot_sync(KV_ALL_LANES, read);
                for (uint i = 0; i < UNIT && read; ++i) {
                    list[(count + __popc(all & ((1u << lane) - 1)))*UNIT + i] = (unsigned short) ((first + i)*TILE + (masked[first + i] | (args.softcap != 0.0f ? 2 : 0)));
                }
                count += __popc(all);
            }
            early = written_to == 0 ? count : early;
        }
        if (lane == 0) {
            counts[0] = count*UNIT;
            counts[1] = early*UNIT;
        }
    }

    const size_t query_block = block.query_block(heads, false);
    const signed char * const planes = p.query_planes + query_block*2*ROWS*QUERY;
    const float * const query_scale = p.query_scale + query_block*ROWS;
    if (!p.announced) {
        wait_for_previous();
    } else if (warp == threads/32 - 1) {
        await_queries(query_scale, heads*ROWS, lane); // one warp: all of them would get in the way of those who write
    }
    __syncthreads();
    // All that is needed of them is asked for before the other tiles.
    const uint query_count = heads*ROWS*D;
    four_queries ahead[DELTA ? 2 : 1];
#pragma unroll
    for (uint n = 0; n < 2 && DELTA; ++n) {
        ahead[n].load(planes, query_scale, ROWS, D, min(4*(threadIdx.x + n*threads), query_count - 4));
    }
    typename keys_of::loaded_queries loaded;
    loaded.load((const signed char (*)[ROWS][QUERY]) (planes + head*2*ROWS*QUERY), g, t);
    typedef decode_sums<K, V, D, QB, TILE_STEPS> sums_of;
    float scale_of_row[QB];
    sums_of::load_scales(scale_of_row, query_scale + head*ROWS, t);
    ask_tiles(first_asked, 2*teams*depth);
    if constexpr (DELTA) {
        uint n = 0;
        for (uint i = 4*threadIdx.x; i < query_count; i += 4*threads, ++n) {
            if (n >= 2) {
                ahead[0].load(planes, query_scale, ROWS, D, i);
            }
            *(float4 *) (q + i/32*at.query_step + i % 32) = (n == 1 ? ahead[1] : ahead[0]).joined();
        }
    }
    typename keys_of::queries b;
    keys_of::fill(b, loaded, g);
    const polar_table polar = { layout::WITH_POLAR ? kept(shared_address(raw + layout::POLAR) + 4*lane, lane) : 0, 0 };
    if constexpr (KV_KIND_IS_POLAR(K)) {
        b.table = polar;
    }
    sums_of sums;
    sums.begin(p, scale_of_row, key_unit<K, D>());
    if (DELTA) {
        __syncthreads();
    }

    const bool one_mask = mask_rows == 1;
    const auto table = values_of::table_of([&]() {
        if constexpr (KV_KIND_IS_POLAR(V)) {
            return polar;
        } else {
            return wide_lane_table { shared_address(raw + layout::TABLE + 4*lane) };
        }
    });
    __half * const weights = (__half *) (raw + layout::WEIGHTS + warp*layout::WARP_WEIGHTS);
    uint8_t * const row_scales = raw + layout::SCALES + warp*layout::SCALE_PIECES*layout::PIECE;
    constexpr uint KEY_WORDS = keys_of::CELL_SCALES, VALUE_WORDS = 2*SCALE_WORDS;
    const uint8_t * const key_scales = kept(row_scales + scales_place<KEY_WORDS, layout::PIECE>(g), lane);
    const uint8_t * const value_scales = kept(row_scales + scales_place<VALUE_WORDS, layout::PIECE>(t) + g % 2*(4*SCALE_WORDS), lane);
    uint8_t * const key_scales_to = kept(row_scales + scales_place<KEY_WORDS, layout::PIECE>(lane), lane);
    uint8_t * const value_scales_to = KEY_WORDS == VALUE_WORDS ? key_scales_to : kept(row_scales + scales_place<VALUE_WORDS, layout::PIECE>(lane), lane);
    // What the lane reads of a tile, where its slot is the first of shared memory: the row whose scales it makes, those whose codes it has, and its codes.
    const uint8_t * const k_row = kept(raw + head*layout::K_ROW + lane*k_cell, lane), * const v_row = layout::K_ROW == layout::V_ROW ? k_row : kept(raw + head*layout::V_ROW + lane*v_cell, lane);
    const uint k_begin = head*layout::K_ROW + g*k_cell, v_begin = head*layout::V_ROW + t*v_cell;
    const uint8_t * const k_first = raw + k_begin - (keys_of::JOINED ? k_begin & 2 : 0), * const v_first = raw + v_begin - (values_of::JOINED ? v_begin & 2 : 0);
    const uint8_t * const k_codes = KV_KIND_IS_BAND(K) ? k_first + keys_of::codes_at(t) : kept(k_first + keys_of::codes_at(t), lane);
    const uint8_t * const v_codes = kept((code_bits(V) <= 3 ? raw + v_begin : v_first) + values_of::codes_at(g), lane);
    const uint k_shift = keys_of::JOINED ? kept(keys_of::shift_of(k_begin & 2), lane) : 0, v_shift = values_of::JOINED ? kept(values_of::shift_of(v_begin & 2), lane) : 0;
    decode_group<K, D, QB> group;
    const float * const q_of_lane = DELTA ? (const float *) kept((const uint8_t *) (q + head*ROWS*(D/32)*at.query_step + group.query_at(at.query_step, lane)), lane) : nullptr;
    const chained_cells whole(lane/4, 0xff);
    // The first cell of the n-th tile that is read. The list says as well whether the mask adds anything to a tile.
    const auto first_of = [&](uint n) { return list[n]/TILE*TILE; };
    // Scores of a group's second tile to the place of the first.
    const auto move_up = [](typename sums_of::scores (&s)[UNIT]) {
        if constexpr (UNIT == 2) {
            copy_scores(s[0], s[1]);
        }
    };
    uint tile = team*UNIT, ring = 0, parity = 0, count = counts[1]; // tiles that are not written to, and then the others
    uint next_team = warp - heads*teams, next_n = 0, uses = 0; // of a warp that asks: whose tile comes next, which, and how often slots have been used
    while (true) {
        // A tile, or the two of a group: its keys, and then its values.
#pragma unroll 1
        for (; team < teams && tile < count; tile += UNIT*teams) { // all teams are there, but registers are fewer so
            const auto slot_of = [&](uint i) { return team*depth + ring + i; };
            // Is there a tile that comes next into a slot, and was this warp the last that was done with it?
            const auto asks = [&](uint bar, unsigned long long left, uint i) { return layout::ASKERS == 0 && tile + depth*teams + i < count && was_last(bar, left, lane); };
            const uint listed = UNIT == 2 ? *(const uint *) &list[tile] : 0; // of both
            typename sums_of::scores s[UNIT]; // of the tile at hand: the last one while keys are multiplied, the first one while values are
            if (DELTA) {
                group.begin();
            }
#pragma unroll 1
            for (uint i = 0; i < UNIT; ++i) {
                const uint slot = slot_of(i);
                const uint k_at = places[2*slot];
                await(bars + 16*slot, parity);
                const auto load_keys = [&](uint step) {
                    keys_of k;
                    k.template load<tile_bytes>(k_first + k_at, k_codes + k_at, k_cell, step*STEP, TILE - 1, 0, k_shift);
                    return k;
                };
                keys_of k = load_keys(0); // on their way while scales are made
                make_key_scales<K, D>(key_scales_to, k_row + k_at);
                if (DELTA) {
                    const uint first = (listed >> 16*i & 0xffff)/TILE*TILE;
                    group.template take<tile_bytes>(i, k_row + k_at, key_count > first ? key_count - first : 0, q_of_lane, at.query_step, lane);
                }
                __syncwarp();
                move_up(s);
#pragma unroll
                for (uint step = 0; step < TILE_STEPS; ++step) {
                    if (step > 0) {
                        k = load_keys(step);
                    }
                    k.join();
                    const auto scales_at = [&](uint n) { return (const float *) (key_scales + scales_place<KEY_WORDS, layout::PIECE>(step*STEP + 8*n)); };
                    float scales[2][KEY_WORDS];
                    load_floats(scales[0], scales_at(0));
                    load_floats(scales[1], scales_at(1));
                    k.products(b, t, [&](uint n, uint c, uint second) { return scales[n][keys_of::scale_number(c, second)]; }, s[UNIT - 1][step]);
                }
                __syncwarp();
                const auto left = leave<layout::ASKERS == 0>(done + 16*slot, lane);
                if (DELTA) {
                    sums.scale(s[UNIT - 1]);
                }
                if (asks(done + 16*slot, left, i)) {
                    ask_keys(slot, first_of(tile + depth*teams + i));
                }
            }
            if (DELTA) {
                if (group.is_whole(lane)) {
                    group.make_base(sums.score_unit(p), t); // in both branches, each of which has other work while lanes wait for each other
#pragma unroll
                    for (uint i = 0; i < UNIT; ++i) {
                        group.follow_whole(whole, lane, s[i]);
                    }
                } else {
                    group.make_base(sums.score_unit(p), t);
                    group.find_kinds();
#pragma unroll
                    for (uint i = 0; i < UNIT; ++i) {
                        group.follow(i*TILE, lane, s[i]);
                    }
#pragma unroll
                    for (uint i = 0; i < UNIT; ++i) {
                        group.add_base(i*TILE, lane, s[i]);
                    }
                }
            }
            const auto score = [&]() {
#pragma unroll
                for (uint i = 0; i < UNIT; ++i) {
                    if (!DELTA) {
                        sums.scale(s[i]);
                    }
                    const uint here = UNIT == 2 ? listed >> 16*i & 0xffff : list[tile];
                    if (here % TILE != 0) {
                        sums.cap(args, s[i]);
                        uint own = lane;
                        keep(own); // so that what follows is made here, not kept: few tiles need it
                        const uint own_t = own % 4;
                        const unsigned short * const seen_by = mask + here/TILE*TILE + own/4;
                        float bias[QB][2*TILE_STEPS];
#pragma unroll
                        for (uint x = 0; x < 2*TILE_STEPS*QB; ++x) {
                            const uint qb = x/(2*TILE_STEPS), n = x % (2*TILE_STEPS);
                            bias[qb][n] = one_mask && qb > 0 ? bias[0][n] :
                                __half2float(__ushort_as_half(seen_by[(block.token_of(sums.row_of(qb, own_t)) - first_token)*chunk_cells + 8*n]))*LOG2_E;
                        }
                        sums.add_bias(s[i], [&](uint qb, uint behind) { return bias[qb][behind/8]; }, slopes + head*ROWS, own_t);
                    }
                }
            };
            if (UNIT == 2) {
                score();
                sums.meet(s);
            }
#pragma unroll 1
            for (uint i = 0; i < UNIT; ++i) {
                const uint slot = slot_of(i);
                const uint v_at = places[2*slot + 1];
                await(bars + 16*slot + 8, parity);
                const auto load_values = [&](uint step) {
                    values_of v;
                    v.template load<tile_bytes>(v_first + v_at, v_codes + v_at, v_cell, step*STEP, TILE - 1, 0, v_shift);
                    return v;
                };
                values_of v = load_values(0);
                if constexpr (!KV_KIND_IS_POLAR(V)) {
                    make_value_scales<V, D>(value_scales_to, v_row + v_at);
                }
                if constexpr (UNIT == 1) { // while scales and the first codes are on their way
                    typename sums_of::scores w;
                    copy_scores(w, s[0]);
                    sums.weights_of_products(w); // as a rule they are right, and made while lanes hear of each other
                    const bool masked_tile = list[tile] % TILE != 0;
                    if (sums.are_products_beyond(s) || masked_tile) {
                        score();
                        sums.meet(s);
                        copy_scores(w, s[0]);
                        sums.weights_of(w);
                    }
                    sums.store_weights(w, g, t, weights, TILE_WEIGHTS);
                } else {
                    sums.weights_of(s[0]);
                    sums.store_weights(s[0], g, t, weights, TILE_WEIGHTS);
                }
                __syncwarp();
#pragma unroll
                for (uint step = 0; step < TILE_STEPS; ++step) {
                    if (step > 0) {
                        v = load_values(step);
                    }
                    v.join();
                    const auto scales_of = [&](uint half_of, uint (&two)[2][SCALE_WORDS]) {
                        load_words(two[0], value_scales + scales_place<VALUE_WORDS, layout::PIECE>(step*STEP + 8*half_of));
                        load_words(two[1], value_scales + scales_place<VALUE_WORDS, layout::PIECE>(step*STEP + 8*half_of + 4));
                    };
                    ::uint2 w[QB];
                    sums.load_weights(w, weights + step*STEP, TILE_WEIGHTS, g, t);
                    v.add(w, table, g, scales_of, sums.acc);
                }
                __syncwarp();
                const auto left = leave<layout::ASKERS == 0>(done + 16*slot + 8, lane);
                move_up(s);
                if (asks(done + 16*slot + 8, left, i)) {
                    ask_values(slot, first_of(tile + depth*teams + i));
                }
            }
            parity ^= ring + UNIT == depth ? 1 : 0;
            ring = ring + UNIT == depth ? 0 : ring + UNIT;
        }
        // Of a warp that asks: the tiles of its teams, in the order in which they come. The phase before the first has ended.
        if (layout::ASKERS != 0 && team >= teams && lane == 0) {
            for (uint next = next_n*teams + next_team; next < count; next = next_n*teams + next_team) {
                if (next >= at_once) {
                    const uint slot = next_team*depth + ring;
                    await(done + 16*slot, (uses + 1) % 2);
                    ask_keys(slot, first_of(next));
                    await(done + 16*slot + 8, (uses + 1) % 2);
                    ask_values(slot, first_of(next));
                }
                next_team += p.bulk.askers;
                if (next_team >= teams) {
                    next_team = warp - heads*teams;
                    ++next_n;
                    uses += ring + 1 == depth ? 1 : 0;
                    ring = ring + 1 == depth ? 0 : ring + 1;
                }
            }
        }
        __syncwarp();
        wait_for_previous(); // also at the end: what comes next takes the end of this launch for that of all before
        if (count == counts[0]) {
            break;
        }
        __syncthreads(); // all are done with the slots
        count = counts[0];
        end_writes_before_copies(); // the end of a tile may have been stored where a copy comes now
        if (layout::ASKERS == 0 && head == 0 && lane == 0 && team < teams) {
            for (uint i = 0; i < depth; ++i) {
                const uint slot = team*depth + (ring + i) % depth, next = tile + i/UNIT*UNIT*teams + i % UNIT;
                if (next < count) {
                    ask_keys(slot, first_of(next));
                    ask_values(slot, first_of(next));
                }
            }
        }
    }
    if (team < teams) {
        let_next_begin();
    }

    float * const all_sums = (float *) (raw + (layout::WITH_TABLE ? layout::TABLE : at.back)); // [warp][row][value]
    store_teams<ROWS>(p, sums, block, blockIdx.z, teams, (float (*)[2]) (raw + layout::SOFTS), all_sums);
#endif
}

template <uint K, uint V, uint D, uint QB> __global__ void __launch_bounds__(32*(bulk_warps<K, D, QB>() + bulk_askers<K, D, QB>()), 1) kv_decode_bulk(const KV_IN_PLACE attn_params p) {
    KV_SHARED_BYTES(raw);
    decode_bulk_block<K, V, D, QB, false>(p, raw);
}

template <uint K, uint V, uint D, uint QB> __global__ void __launch_bounds__(32*(bulk_warps<K, D, QB>() + bulk_askers<K, D, QB>()), 1) kv_decode_bulk_recent(const KV_IN_PLACE attn_params p) {
    KV_SHARED_BYTES(raw);
    if (blockIdx.z < p.args.main_chunks) {
        decode_bulk_block<K, V, D, QB, true>(p, raw);
    } else {
        // Heads of 256 are 6% slower with this code among theirs; elsewhere 0 to 2%, and a call takes 2 us.
        if constexpr (D == 256) {
            call_precise_block<K, D, QB>(p, raw);
        } else {
            decode_precise_block<K, D, QB>(p, raw);
        }
    }
}

// How many teams a block has for this many KV heads, and how many tiles each has at a time.
template <uint K, uint V, uint D, uint QB> static kv_cuda_teams teams_of(uint heads, size_t shared_bytes) {
    return bulk_layout<K, V, D, QB>::teams(heads, shared_bytes);
}

}  // namespace
}  // namespace kv
