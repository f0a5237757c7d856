// Attention of a few query rows over rows of levels, head sizes 64, 128 and 256.
//
// A block of four warps takes one KV head, up to eight query rows and a chunk of cells; its warps take blocks of 64 cells in
// turn, each alone, 16 cells at a time. Rows go from memory to registers: keys while the values before
// them are added, values while keys are multiplied. What nobody sees is not read.
//
//     K   16 cells x 32 values by integer tensor cores, queries as two planes of 8 bits (decode_keys.cuh).
//     V   values x 16 cells by f16 tensor cores. Weights carry the scales (decode_values.cuh).
//
// Precise rows of recent cells are further chunks of the same launch, of srft8 (K beside delta8: f16): a launch of their own would take longer than
// they do. Their mask is that of the cells they stand for, and blocks of the cache leave those cells out.
#pragma once

#include "decode_softmax.cuh"

namespace kv {
namespace {

using namespace metal;

// Blocks that a multiprocessor has registers for.
template <uint K, uint V, uint D, uint QB> constexpr uint blocks_per_sm() {
    if (D != 256 && (KV_KIND_IS_POLAR(K) || KV_KIND_IS_TURBO(V))) { // rows on their way, or twice as many sums
        return D == 128 ? (KV_KIND_IS_POLAR(V) || QB == 2 ? 2 : 3) : QB == 2 ? 3 : 4;
    }
    return D == 256 ? 2 : D == 128 && (QB == 2 || (is_delta(K) && (code_bits(K) == 8 || code_bits(V) == 3))) ? 3 : 4;
}

template <uint K, uint V, uint D> struct decode_memory {
    static constexpr uint TABLE = decode_values_of<V, D>::TABLE_BYTES, SUMS = WARPS*ROWS*decode_values_of<V, D>::WIDTH*4;

    uint   table[(TABLE > SUMS ? TABLE : SUMS)/4]; // what V looks up; behind the loop, sums of the warps
    float  q[is_delta(K) ? ROWS : 1][D];           // queries in the domain of keys, for I-frames
    signed char planes[2][ROWS][query_width(K, D)];
    float  query_scale[ROWS], slopes[ROWS];
    __half weights[WARPS][ROWS][STEP + 8];
    float  softs[WARPS][ROWS][2];
    uint   recent[RECENT_WORDS];
    uint   polar[polar_of<K, V>() != 0 ? POLAR_BYTES/4 : 1]; // what polar looks up
};

// Of up to 32 blocks of a warp, from `first` on, those that a row sees. Several are looked at together: each is a wait for
// memory.
__device__ __forceinline__ uint visible_blocks(
        const attn_params & p, bool one_mask, uint first_row, uint used, uint kv_head, uint stream, uint first, uint end, uint count, uint lane) {
    count = min(count, 32u);
    if (!p.mask) {
        return count == 32 ? ~0u : (1u << count) - 1;
    }
    const uint heads_per_kv = p.args.heads/p.args.kv_heads;
    constexpr uint AT_ONCE = 8;
    uint visible = 0;
    for (uint r = 0; r < (one_mask ? 1 : used); ++r) {
        const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        const uint at = mask_offset(p, token, head, stream);
        for (uint n = 0; n < count; n += AT_ONCE) {
            bool seen[AT_ONCE];
#pragma unroll
            for (uint i = 0; i < AT_ONCE; ++i) {
                const uint cell = first + (n + i)*WARPS*BLOCK + lane;
                seen[i] = bias_at(p, at, cell, end) > HIDDEN || bias_at(p, at, cell + 32, end) > HIDDEN;
            }
#pragma unroll
            for (uint i = 0; i < AT_ONCE; ++i) {
                visible |= simd_any(seen[i]) ? 1u << (n + i) : 0;
            }
        }
    }
    return visible;
}

template <uint K, uint V, uint D, uint QB, decode_rows OF> __device__ __forceinline__ void decode_block(const attn_params & p, uint8_t * raw, const attn_part & part) {
    constexpr bool DELTA = is_delta(K), PRECISE = OF == decode_rows::precise, RECENT = OF == decode_rows::main;
    typedef decode_keys_of<K, D, QB> keys_of;
    typedef decode_values_of<V, D> values_of;
    auto & m = *(decode_memory<K, V, D> *) raw;
    const kv_attn_args & args = p.args;
    const uint64_t (&k_nb)[3] = PRECISE ? part.k_nb : args.k_nb, (&v_nb)[3] = PRECISE ? part.v_nb : args.v_nb;
    const uint cells = PRECISE ? part.count : args.cells, chunk_cells = PRECISE ? p.part_chunk_cells : args.chunk_cells;
    uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    keep(warp);
    keep(lane);
    keep(g);
    keep(t);
    const uint heads_per_kv = args.heads/args.kv_heads, all_rows = heads_per_kv*args.tokens;
    const uint row_blocks = (all_rows + ROWS - 1)/ROWS;
    const uint kv_head = blockIdx.x % args.kv_heads, first_row = blockIdx.x/args.kv_heads % row_blocks*ROWS, stream = blockIdx.z;
    const uint chunk = PRECISE ? blockIdx.y - part.first_chunk : blockIdx.y;
    const uint used = min(ROWS, all_rows - first_row), kv_stream = stream/(args.streams/args.kv_streams);
    const uint8_t * keys   = (PRECISE ? part.k : p.k) + kv_head*k_nb[1] + kv_stream*k_nb[2];
    const uint8_t * values = (PRECISE ? part.v : p.v) + kv_head*v_nb[1] + kv_stream*v_nb[2];
    const uint8_t * k_codes = keys + keys_of::codes_at(t), * v_codes = values + values_of::codes_at(g);
    keep(keys);
    keep(values);
    keep(k_codes);
    keep(v_codes);
    const uint k_step = (uint) k_nb[0], v_step = (uint) v_nb[0];
    const uint begin = chunk*chunk_cells, end = min(cells, begin + chunk_cells), last = cells - 1;
    const uint blocks = end > begin ? (end - begin + BLOCK - 1)/BLOCK : 0;

    // Asked for before the queries are made; bits are set behind them.
    const auto column = [&](uint i) { return cell_of(p.columns, p.columns_nb, i, kv_stream, args.cells); };
    uint first_recent = ~0u;
    if (PRECISE) {
        for (uint i = threadIdx.x; i < RECENT_WORDS; i += THREADS) {
            m.recent[i] = begin + i < end ? column(part.first_column + begin + i) : ~0u;
        }
    } else if (RECENT) {
        first_recent = threadIdx.x < p.column_count ? column(threadIdx.x) : ~0u;
        for (uint i = threadIdx.x; i < RECENT_WORDS; i += THREADS) {
            const uint there = min(max(end, begin + 32*i) - begin - 32*i, 32u);
            m.recent[i] = there == 32 ? 0 : ~0u << there; // what is beyond the end is hidden, too
        }
    }

    if constexpr (values_of::TABLE_BYTES != 0) {
        fill_table(m.table, 32, threadIdx.x, THREADS);
    }
    if constexpr (polar_of<K, V>() != 0) {
        fill_polar_table(m.polar, polar_part<polar_of<K, V>(), D, 4>::BITS, threadIdx.x, THREADS);
    }
    for (uint i = threadIdx.x; i < sizeof(m.weights)/4; i += THREADS) {
        ((uint *) m.weights)[i] = 0;
    }
    if (threadIdx.x < ROWS) {
        m.slopes[threadIdx.x] = slope_of(p, kv_head*heads_per_kv + (first_row + threadIdx.x) % heads_per_kv);
    }
    for (uint r = warp; r < ROWS; r += WARPS) {
        const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        const uint8_t * from = p.q + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
        query_part<D> query;
        constexpr query_domain DOMAIN = query_domain_of(K);
        query.load(p, r < used ? from : nullptr, DOMAIN == query_domain::as_it_is, lane);
        const uint first = store_query<D, is_projected(DOMAIN)>(query, DOMAIN, lane, m.planes[0][r], m.planes[1][r], &m.query_scale[r]);
        if constexpr (DELTA) {
            query.store_floats(first, m.q[r], 32);
        }
    }
    __syncthreads();
    if (RECENT) {
        for (uint i = threadIdx.x; i < p.column_count; i += THREADS) {
            const uint at = (i == threadIdx.x ? first_recent : column(i)) - begin; // large where the cell comes before
            if (at < end - begin) {
                atomicOr(&m.recent[at/32], 1u << at % 32);
            }
        }
        __syncthreads();
    }

    typename keys_of::queries b;
    typename keys_of::loaded_queries loaded;
    loaded.load(m.planes, g, t);
    keys_of::fill(b, loaded, g);
    const polar_table polar = { 4*lane, (uint) __cvta_generic_to_shared(m.polar) };
    if constexpr (KV_KIND_IS_POLAR(K)) {
        b.table = polar;
    }
    decode_sums<K, V, D, QB, 1> sums;
    float scale_of_row[QB];
    sums.load_scales(scale_of_row, m.query_scale, t);
    sums.begin(p, scale_of_row, key_unit<K, D>());
    uint mask_at[QB];
#pragma unroll
    for (uint qb = 0; qb < QB; ++qb) {
        const uint row = first_row + min(sums.row_of(qb, t), used - 1);
        mask_at[qb] = mask_offset(p, row/heads_per_kv, kv_head*heads_per_kv + row % heads_per_kv, stream);
    }
    const bool one_mask = args.tokens == 1 && args.mask_rows[0] == 1;
    const auto table = values_of::table_of([&]() {
        if constexpr (KV_KIND_IS_POLAR(V)) {
            return polar;
        } else {
            return lane_table { (uint) __cvta_generic_to_shared(&m.table[lane]) };
        }
    });

    decode_group<K, D, QB> group;
    // 32 blocks of this warp at a time: which of them somebody sees.
    for (uint span = warp; span < blocks; span += 32*WARPS) {
        uint visible = 1;
        if (PRECISE) {
            const uint both = m.recent[span*BLOCK + lane] & m.recent[span*BLOCK + 32 + lane];
            visible = simd_any(both != ~0u) ? 1 : 0;
        } else {
            visible = visible_blocks(p, one_mask, first_row, used, kv_head, stream, begin + span*BLOCK, end, (blocks - span + WARPS - 1)/WARPS, lane);
            if (RECENT) {
                const uint at = (span + lane*WARPS)*BLOCK/32;
                const bool gone = at + 1 < RECENT_WORDS && (m.recent[at] & m.recent[at + 1]) == ~0u;
                visible &= ~__ballot_sync(KV_ALL_LANES, gone);
            }
        }
        if (visible == 0) {
            continue;
        }
        uint cell = begin + (span + (__ffs(visible) - 1)*WARPS)*BLOCK;
        visible &= visible - 1;
        keys_of k;
        values_of v;
        k.template load<cache_bytes>(keys, k_codes, k_step, cell, last, g);
        for (bool more = true; more;) {
            v.template load<cache_bytes>(values, v_codes, v_step, cell, last, t);
            // Masks are asked for here and looked at behind the products.
            unsigned short masked[QB][2];
            const uint here = cell;
            // Of cells g and g + 8: where the mask has them, and a bit each where they are not to be seen.
            uint cell_at[2], gone;
            gone = RECENT ? m.recent[(here - begin)/32] >> ((here - begin) % 32 + g) : 0;
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                cell_at[n] = min(here + g + 8*n, last);
                if (OF == decode_rows::alone) {
                    gone |= here + g + 8*n >= end ? 1u << 8*n : 0;
                }
                if (PRECISE) {
                    cell_at[n] = m.recent[here - begin + g + 8*n];
                    gone |= cell_at[n] == ~0u ? 1u << 8*n : 0;
                    cell_at[n] = min(cell_at[n], args.cells - 1);
                }
            }
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                const uint qb = i/2, n = i % 2;
                masked[qb][n] = one_mask && qb > 0 ? masked[0][n] : mask_bits(p, mask_at[qb], cell_at[n]);
            }

            typename decltype(sums)::scores scores[1], & s = scores[0];
            k.join();
            k.products(b, t, [&](uint n, uint c, uint second) { return k.scale_of(n, c, second); }, s[0]);
            sums.scale(s);
            if (DELTA) {
                if ((cell - begin) % BLOCK == 0) {
                    const uint there = args.k_cells - cell;
                    group.begin();
                    group.template take<cache_bytes>(0, keys + (cell + lane)*k_step, there, &m.q[0][0] + group.query_at(32, lane), 32, lane);
                    group.template take<cache_bytes>(1, keys + (cell + 32 + lane)*k_step, there > 32 ? there - 32 : 0, &m.q[0][0] + group.query_at(32, lane), 32, lane);
                    group.find_kinds();
                    group.make_base(sums.score_unit(p), t);
                }
                group.follow((cell - begin) % BLOCK, lane, s);
                group.add_base((cell - begin) % BLOCK, lane, s);
            }
            // Keys of the next 16 cells are on their way while these values are added; values while keys are multiplied.
            cell += STEP;
            if ((cell - begin) % BLOCK == 0 || cell >= end) {
                more = visible != 0;
                cell = begin + (span + (more ? __ffs(visible) - 1 : 0)*WARPS)*BLOCK;
                visible &= visible - 1;
            }
            if (more) {
                k.template load<cache_bytes>(keys, k_codes, k_step, cell, last, g);
            }

            sums.cap(args, s);
            sums.add_bias(s, [&](uint qb, uint behind) { return (gone >> behind & 1) != 0 ? -INFINITY : bias_of(masked[qb][behind/8]); }, m.slopes, t);
            sums.meet(scores);
            sums.weights_of(s);
            sums.store_weights(s, g, t, &m.weights[warp][0][0], STEP + 8);
            __syncwarp();
            v.join();
            ::uint2 weights[QB];
            sums.load_weights(weights, &m.weights[warp][0][0], STEP + 8, g, t);
            v.add(weights, table, g, [&](uint half_of, auto & scales) { v.scales_of(half_of, g, scales); }, sums.acc);
            // The next weights take the place of these.
            __syncwarp();
        }
    }
    sums.store_softs(m.softs[warp], g, t);
    // The table is done with: sums of the warps, [warp][row][value].
    __syncthreads();
    float * o = (float *) m.table;
    constexpr uint W = values_of::WIDTH;
    sums.store_sums(o + warp*ROWS*W, g, t);
    __syncthreads();
    const uint results = stream*args.tokens*args.heads + kv_head*heads_per_kv;
    for (uint i = 4*threadIdx.x; i < used*W; i += 4*THREADS) {
        const uint r = i/W, row = first_row + r;
        const size_t at = (size_t) (results + row/heads_per_kv*args.heads + row % heads_per_kv)*args.chunks + args.first_chunk + blockIdx.y;
        store_result(p, at, i % W, &m.softs[0][r], ROWS, o + i, ROWS*W, WARPS, values_of::unit_of(i % W));
    }
}

template <uint K, uint V, uint D, uint QB> __global__ void __launch_bounds__(THREADS, blocks_per_sm<K, V, D, QB>()) kv_decode(const attn_params p) {
    KV_SHARED_BYTES(raw);
    decode_block<K, V, D, QB, decode_rows::alone>(p, raw, p.part[0]);
}

// A kernel of its own: what it has more of would make the other slower.
template <uint K, uint V, uint D, uint QB> __global__ void __launch_bounds__(THREADS, blocks_per_sm<K, V, D, QB>()) kv_decode_recent(const attn_params p) {
    KV_SHARED_BYTES(raw);
    if (blockIdx.y < p.args.main_chunks) {
        decode_block<K, V, D, QB, decode_rows::main>(p, raw, p.part[0]);
    } else {
        const attn_part part = blockIdx.y < p.part[1].first_chunk ? p.part[0] : p.part[1];
        decode_block<precise_kind(K), KV_KIND_SRFT8, D, QB, decode_rows::precise>(p, raw, part);
    }
}

}  // namespace
}  // namespace kv
