// Attention of a few query rows over precise rows of recent cells, beside the blocks of decode_bulk.cuh.
//
// There are few of them, one of which has just been written, and the blocks get the multiprocessors that the launch before leaves last. So
// what counts is the way from there to the sums: a warp takes 16 cells of a KV head, and all that it needs of them is asked for at once.
#pragma once

#include "bulk_copy.cuh"
#include "decode_softmax.cuh"

namespace kv {
namespace {

// Rows that were written by the launch before: not by the path for what never changes.
struct written_bytes {
    static constexpr bool ENDS = true;
    template <typename T> static __device__ __forceinline__ T at(const uint8_t * from) {
        return __ldcg((const T *) from);
    }
};

template <uint D, uint QB> struct precise_memory {
    static constexpr uint MOST_WARPS = 24; // of decode_bulk.cuh

    float  softs[MOST_WARPS*4*QB][2];
    float  slopes[MOST_WARPS*4*QB];
    __half weights[MOST_WARPS][8][STEP + 8];
    __align__(128) float sums[1]; // of the warps
};

// The block's chunk, of precise rows beside a cache of CACHE; warps are teams, as in decode_bulk.cuh.
template <uint CACHE, uint D, uint QB> __device__ __forceinline__ void decode_precise_block(const attn_params & p, uint8_t * raw) {
#if KV_HAS_BULK_COPIES
    constexpr uint K = precise_kind(CACHE), V = KV_KIND_SRFT8, ROWS = 4*QB;
    typedef decode_keys_of<K, D, QB> keys_of;
    typedef decode_values_of<V, D> values_of;
    auto & m = *(precise_memory<D, QB> *) raw;
    const kv_attn_args & args = p.args;
    const uint chunk = blockIdx.z;
    const attn_part & part = p.part[chunk < p.part[1].first_chunk ? 0 : 1];
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    const block_place block(p, ROWS);
    const uint heads = args.kv_heads, team = p.kv_heads.quotient(warp), head = warp - team*heads, teams = p.bulk.teams, step = teams*STEP;
    const uint end = min(part.count, (chunk - part.first_chunk + 1)*p.part_chunk_cells), last = part.count - 1;
    uint first = (chunk - part.first_chunk)*p.part_chunk_cells + team*STEP;

    if (lane < ROWS) {
        m.slopes[warp*ROWS + lane] = slope_of(p, block.head_of(head, lane));
    }
    for (uint i = lane; i < sizeof(m.weights[0])/4; i += 32) {
        ((uint *) m.weights[warp])[i] = 0;
    }
    __syncwarp();
    typedef decode_sums<K, V, D, QB, 1> sums_of;
    uint mask_at[QB];
#pragma unroll
    for (uint qb = 0; qb < QB; ++qb) {
        mask_at[qb] = mask_offset(p, block.token_of(sums_of::row_of(qb, t)), block.stream);
    }
    const uint8_t * keys   = part.k + head*part.k_nb[1] + block.kv_stream*part.k_nb[2];
    const uint8_t * values = part.v + head*part.v_nb[1] + block.kv_stream*part.v_nb[2];
    const auto table = values_of::table_of([]() { return 0; });
    typename keys_of::queries b;
    sums_of sums;
    bool waited = false;
#pragma unroll 1
    while (team < teams) { // warps behind them have nothing to do here
        // What the mask says of cells g and g + 8; it need not wait.
        unsigned short masked[QB][2];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint i = first + g + 8*n, cell = i < end ? cell_of(p.columns, p.columns_nb, part.first_column + i, block.kv_stream, args.cells) : ~0u;
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                masked[qb][n] = cell == ~0u ? HIDDEN_MASK : mask_bits(p, mask_at[qb], cell);
            }
        }
        if (!waited) {
            waited = true;
            wait_for_previous();
            // Their own queries come last where they are not those of the cache.
            const size_t query_row = (block.query_block(heads, has_precise_queries(CACHE, true)) + head)*ROWS;
            typename keys_of::loaded_queries loaded;
            loaded.load((const signed char (*)[ROWS][D]) (p.query_planes + query_row*2*query_width(CACHE, D)), g, t);
            keys_of::fill(b, loaded, g);
            float scale_of_row[QB];
            sums_of::load_scales(scale_of_row, p.query_scale + query_row, t);
            sums.begin(p, scale_of_row, key_unit<K, D>());
        }
        keys_of k;
        values_of v;
        k.template load<written_bytes>(keys, keys + keys_of::codes_at(t), (uint) part.k_nb[0], first, last, g);
        v.template load<written_bytes>(values, values + values_of::codes_at(g), (uint) part.v_nb[0], first, last, t);
        typename sums_of::scores scores[1], & s = scores[0];
        k.join();
        k.products(b, t, [&](uint n, uint c, uint second) { return k.scale_of(n, c, second); }, s[0]);
        sums.scale(s);
        sums.cap(args, s);
        sums.add_bias(s, [&](uint qb, uint behind) { return bias_of(masked[qb][behind/8]); }, m.slopes + warp*ROWS, t);
        sums.meet(scores);
        sums.weights_of(s);
        sums.store_weights(s, g, t, &m.weights[warp][0][0], STEP + 8);
        __syncwarp();
        v.join();
        ::uint2 weights[QB];
        sums.load_weights(weights, &m.weights[warp][0][0], STEP + 8, g, t);
        v.add(weights, table, g, [&](uint half_of, auto & scales) { v.scales_of(half_of, g, scales); }, sums.acc);
        __syncwarp(); // the next weights take the place of these
        first += step;
        if (first >= end) {
            let_next_begin();
            break;
        }
    }
    store_teams<ROWS>(p, sums, block, chunk, teams, m.softs, m.sums);
#endif
}

// The same as a call, which looks for parameters in memory: the code for the cache is then as it is without precise rows.
template <uint CACHE, uint D, uint QB> __device__ __noinline__ void call_precise_block(const attn_params & p, uint8_t * raw) {
    decode_precise_block<CACHE, D, QB>(p, raw);
}

}  // namespace
}  // namespace kv
