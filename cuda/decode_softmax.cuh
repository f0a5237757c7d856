// What the decoding kernels share: queries, the softmax of a warp's query rows, and the sums of V under way.
//
// The softmax is relative to a score that was the largest once. Until one is larger by SLACK nothing is rescaled, which is a few times in
// a chunk.
#pragma once

#include "decode_bands.cuh"
#include "decode_group.cuh"
#include "decode_halves.cuh"
#include "decode_polar.cuh"
#include "decode_signs.cuh"
#include "decode_values.cuh"
#include "queries.cuh"

namespace kv {
namespace {

using namespace metal;

template <uint KIND, uint D, uint QB> struct decode_keys_choice {
    typedef decode_keys<KIND, D, QB>       levels;
    typedef decode_band_keys<KIND, D, QB>  bands;
    typedef decode_turbo_keys<KIND, D, QB> turbo;
    typedef decode_qjl_keys<D, QB>         qjl;
    typedef decode_half_keys<D, QB>        halves;
    typedef decode_polar_keys<KIND, D, QB> polar;

    typedef std::conditional_t<KV_KIND_IS_BAND(KIND), bands, std::conditional_t<KV_KIND_IS_TURBO(KIND), turbo,
            std::conditional_t<KV_KIND_IS_POLAR(KIND), polar, std::conditional_t<KIND == KV_KIND_QJL1, qjl, std::conditional_t<KIND == KV_KIND_F16, halves, levels>>>>> type;
};

// What reads K of a kind.
template <uint KIND, uint D, uint QB> using decode_keys_of = typename decode_keys_choice<KIND, D, QB>::type;

// What reads V.
template <uint KIND, uint D> using decode_values_of = std::conditional_t<KV_KIND_IS_POLAR(KIND), decode_polar_values<KIND, D>, decode_values<KIND, D>>;

// The kind of polar that K or V is, else 0: both look up the same tables.
template <uint K, uint V> __host__ __device__ constexpr uint polar_of() {
    static_assert(!KV_KIND_IS_POLAR(K) || !KV_KIND_IS_POLAR(V) || K == V, "one table of directions");
    return KV_KIND_IS_POLAR(K) ? K : KV_KIND_IS_POLAR(V) ? V : 0;
}

// What products with keys of a kind are multiplied by, beside scales.
template <uint K, uint D> __device__ __forceinline__ float key_unit() {
    if constexpr (K == KV_KIND_QJL1) {
        return sign_unit<D>();
    } else {
        return level_unit(K, D);
    }
}

// A lane has query rows 2 (t % 2) and the next of each block of four, and of 16 cells g and g + 8. Of two times 16 cells lanes t < 2
// have the first and the others the second; of 16 alone they have the same. Scores are in units of log 2.
template <uint K, uint V, uint D, uint QB, uint STEPS> struct decode_sums {
    static_assert(STEPS == 1 || STEPS == 2, "");
    typedef decode_values_of<V, D> values_of;
    static constexpr uint C = values_of::CHUNKS, WIDTH = values_of::WIDTH;
    static constexpr bool DELTA = is_delta(K), ROW_FOR_LANE = decode_keys_of<K, D, QB>::ROW_FOR_LANE;

    float factor[QB][2], ref[QB][2]; // ref: what the sums are relative to
    float most_product[QB][2];       // of products that need no other ref; below a factor of zero there are none
    float acc[QB][C][2][4]; // [block of rows][chunk][pair of values]: lanes t < 2 have the first scale, the others the second
    float weight[QB][2];    // sums of the weights of the lane's cells
    bool  softcap, alibi;

    // The lane's query row, of the block's.
    static __device__ __forceinline__ uint row_of(uint i, uint t) {
        return i/2*4 + t % 2*2 + i % 2;
    }

    // Of those of all rows.
    static __device__ __forceinline__ void load_scales(float (&res)[2*QB], const float * query_scale, uint t) {
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            res[i] = query_scale[row_of(i, t)];
        }
    }

    // What scores of delta are in units of: products with I-frames, too.
    static __device__ __forceinline__ float score_unit(const attn_params & p) {
        return p.args.softcap != 0.0f ? 1.0f : p.args.scale*LOG2_E;
    }

    // What products are multiplied by: the scales of the lane's query rows, and `unit`.
    __device__ __forceinline__ void begin(const attn_params & p, const float (&query_scale)[2*QB], float unit) {
        softcap = p.args.softcap != 0.0f;
        alibi = p.alibi;
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            factor[i/2][i % 2] = query_scale[i]*unit*score_unit(p);
            ref[i/2][i % 2] = HIDDEN;
            most_product[i/2][i % 2] = -INFINITY;
            weight[i/2][i % 2] = 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < QB*C*8; ++i) {
            (&acc[0][0][0][0])[i] = 0.0f;
        }
    }

    // What a lane has of products with 16 keys: of the query rows of a block.
    typedef float products[QB][ROW_FOR_LANE ? 2 : 4];

    // Products of the queries with STEPS times 16 keys, of which lanes t and t ^ 2 have parts, or a query row each. `score` has their
    // factor, but of residuals.
    __device__ __forceinline__ void join(const products (&parts)[STEPS], uint t, float (&s)[QB][4]) const {
        if constexpr (ROW_FOR_LANE) {
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                const float first = parts[0][i/2][i % 2], second = parts[STEPS - 1][i/2][i % 2];
                const float received = __shfl_xor_sync(KV_ALL_LANES, t < 2 ? second : first, 2);
                s[i/2][i % 2*2]     = (t < 2 ? first : received)*(DELTA ? factor[i/2][0] : 1.0f);
                s[i/2][i % 2*2 + 1] = (t < 2 ? received : second)*(DELTA ? factor[i/2][1] : 1.0f);
            }
        } else {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                const float first = parts[0][i/4][i % 4], second = parts[STEPS - 1][i/4][i % 4];
                const float mine = t < 2 ? first : second, others = t < 2 ? second : first;
                s[i/4][i % 4] = (mine + __shfl_xor_sync(KV_ALL_LANES, others, 2))*(DELTA ? factor[i/4][i % 2] : 1.0f);
            }
        }
    }

    // From products to scores, but for the mask.
    __device__ __forceinline__ void score(const kv_attn_args & args, float (&s)[QB][4]) const {
        scale(s);
        cap(args, s);
    }

    __device__ __forceinline__ void scale(float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 4*QB && !DELTA; ++i) {
            s[i/4][i % 4] *= factor[i/4][i % 2];
        }
    }

    __device__ __forceinline__ void cap(const kv_attn_args & args, float (&s)[QB][4]) const {
        if (softcap) {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                s[i/4][i % 4] = soft_capped(s[i/4][i % 4]*args.scale, args.softcap)*LOG2_E;
            }
        }
    }

    // What the mask adds to them, in units of log 2. `slopes` are those of ALiBi, by row.
    __device__ __forceinline__ void add_bias(float (&s)[QB][4], const float (&bias)[QB][4], const float * slopes, uint t) const {
        if (alibi) {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                s[i/4][i % 4] = fmaf(bias[i/4][i % 4], slopes[row_of(i/4*2 + i % 2, t)], s[i/4][i % 4]);
            }
        } else {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                s[i/4][i % 4] += bias[i/4][i % 4];
            }
        }
    }

    // The largest score of the lane's cells for its row i.
    template <uint N> static __device__ __forceinline__ float top_of(const float (&s)[N][QB][4], uint i) {
        float x = fmaxf(s[0][i/2][i % 2], s[0][i/2][i % 2 + 2]);
#pragma unroll
        for (uint n = 1; n < N; ++n) {
            x = fmaxf(x, fmaxf(s[n][i/2][i % 2], s[n][i/2][i % 2 + 2]));
        }
        return x;
    }

    // Is a score of these much larger than what the sums are relative to?
    template <uint N> __device__ __forceinline__ bool are_beyond(const float (&s)[N][QB][4]) const {
        bool res = false;
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            res = res || top_of(s, i) > ref[i/2][i % 2] + (float) values_of::SLACK;
        }
        return __any_sync(KV_ALL_LANES, res);
    }

    // Scores that are weighed next: where one is beyond, it takes the place of what the sums are relative to.
    template <uint N> __device__ __forceinline__ void meet(const float (&s)[N][QB][4], uint t) {
        if (are_beyond(s)) {
            take_largest(s, t);
        }
    }

    template <uint N> __device__ __forceinline__ void take_largest(const float (&s)[N][QB][4], uint t) {
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            float & r = ref[i/2][i % 2];
            float x = fmaxf(r, top_of(s, i));
            for (uint n = STEPS == 2 ? 2 : 4; n < 32; n *= 2) {
                x = fmaxf(x, __shfl_xor_sync(KV_ALL_LANES, x, n));
            }
            const float less = exp2f(r - x);
            r = x;
            const float f = factor[i/2][i % 2], most = x + (float) values_of::SLACK;
            most_product[i/2][i % 2] = f > 0.0f ? most/f : f == 0.0f && most >= 0.0f ? INFINITY : -INFINITY; // rows of zeros fill a block
            // Columns 2t and 2t + 1 of the sums.
#pragma unroll
            for (uint n = 0; n < C*8; n += 2) {
                (&acc[i/2][0][0][0])[n + i % 2] *= less;
            }
            weight[i/2][i % 2] *= less;
        }
    }

    __device__ __forceinline__ void weights_of(float (&w)[QB][4], const float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            w[i/4][i % 4] = exp2f(s[i/4][i % 4] - ref[i/4][i % 2]);
        }
    }

    // The same of products that have no factor yet, without a mask and a cap.
    __device__ __forceinline__ void weights_of_products(float (&w)[QB][4], const float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            w[i/4][i % 4] = exp2f(fmaf(s[i/4][i % 4], factor[i/4][i % 2], -ref[i/4][i % 2]));
        }
    }

    __device__ __forceinline__ bool are_products_beyond(const float (&s)[1][QB][4]) const {
        bool res = false;
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            res = res || !(top_of(s, i) <= most_product[i/2][i % 2]);
        }
        return __any_sync(KV_ALL_LANES, res);
    }

    // Weights as halves in shared memory, [row][cell], `row_step` from row to row.
    __device__ __forceinline__ void store_weights(const float (&w)[QB][4], uint g, uint t, __half * weights, uint row_step) {
        __half * const to = weights + t % 2*2*row_step + weight_at(g) + (STEPS == 2 ? t/2*STEP : 0);
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            const float x = w[i/2][i % 2], y = w[i/2][i % 2 + 2];
            weight[i/2][i % 2] += x + y;
            // Where lanes t and t ^ 2 have the same, one of them stores it.
            if (STEPS == 2 || t/2 == i/2 % 2) {
                *(__half2 *) (to + (i/2*4 + i % 2)*row_step) = __floats2half2_rn(x, y);
            }
        }
    }

    // From scores to weights.
    __device__ __forceinline__ void weigh(const float (&s)[QB][4], uint g, uint t, __half * weights, uint row_step) {
        float w[QB][4];
        weights_of(w, s);
        store_weights(w, g, t, weights, row_step);
    }

    // What the lane multiplies with: weights of row g % 4 of each block of rows, for its cells.
    static __device__ __forceinline__ void load_weights(::uint2 (&res)[QB], const __half * weights, uint row_step, uint g, uint t) {
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            res[qb] = *(const ::uint2 *) (weights + (4*qb + g % 4)*row_step + 4*t);
        }
    }

    // At the end: the softmax of the rows, [row][largest score, sum], and the sums of V, [row][value].
    __device__ __forceinline__ void store_softs(float (*softs)[2], uint g, uint t) const {
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            float all = weight[i/2][i % 2];
            for (uint n = STEPS == 2 ? 2 : 4; n < 32; n *= 2) {
                all += __shfl_xor_sync(KV_ALL_LANES, all, n);
            }
            if (g == 0 && t < 2) {
                softs[row_of(i, t)][0] = ref[i/2][i % 2];
                softs[row_of(i, t)][1] = all;
            }
        }
    }

    __device__ __forceinline__ void store_sums(float * to, uint g, uint t) const {
#pragma unroll
        for (uint i = 0; i < QB*C*8; i += 4) {
            const float * x = &acc[0][0][0][0] + i;
            float * const from = to + row_of(i/(C*8)*2, t)*WIDTH + values_of::value_of(i % (C*8), g, t); // and ROW_STEP behind it
            if constexpr (values_of::ROW_STEP == 1) {
                *(::float2 *) from           = make_float2(x[0], x[2]);
                *(::float2 *) (from + WIDTH) = make_float2(x[1], x[3]);
            } else {
                from[0]                           = x[0];
                from[values_of::ROW_STEP]         = x[2];
                from[WIDTH]                       = x[1];
                from[WIDTH + values_of::ROW_STEP] = x[3];
            }
        }
    }
};

// lane_table, with `step` words from entry to entry.
__device__ __forceinline__ void fill_table(uint * table, uint step, uint thread, uint threads) {
    for (uint i = thread; i < 256; i += threads) {
        const __half2 pair = __floats2half2_rn(level_of_4(i % 16), level_of_4(i/16));
        const uint x = *(const uint *) &pair;
        for (uint l = 0; l < 8; ++l) {
            *(uint4 *) &table[i*step + (l + i) % 8*4] = make_uint4(x, x, x, x);
        }
    }
}

// Four values of a result of a chunk, from the sums of `warps` warps, `softs_step` rows and `sums_step` floats apart.
__device__ __forceinline__ void store_result(
        const attn_params & p, size_t at, uint value, const float (*softs)[2], uint softs_step, const float * sums, uint sums_step, uint warps, float unit) {
    float largest = HIDDEN, all = 0.0f;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (uint w = 0; w < warps; ++w) {
        largest = fmaxf(largest, softs[w*softs_step][0]);
    }
#pragma unroll 1
    for (uint w = 0; w < warps; ++w) {
        const float factor = exp2f(softs[w*softs_step][0] - largest);
        const float4 y = *(const float4 *) (sums + w*sums_step);
        all = fmaf(factor, softs[w*softs_step][1], all);
        x.x = fmaf(factor, y.x, x.x);
        x.y = fmaf(factor, y.y, x.y);
        x.z = fmaf(factor, y.z, x.z);
        x.w = fmaf(factor, y.w, x.w);
    }
    *(float4 *) (p.sums + at*p.args.sum_width + value) = make_float4(x.x*unit, x.y*unit, x.z*unit, x.w*unit);
    if (value == 0) {
        p.metas[at] = make_float2(largest <= HIDDEN ? HIDDEN : largest/LOG2_E, all);
    }
}

// Which query rows a block of teams has: warps of a team have a KV head each, and its query rows of some tokens. Blocks are (rows, stream,
// chunk), so that the last chunks of all streams, which are of precise rows, come last.
struct block_place {
    small_divisor heads_per_kv;
    uint          stream, kv_stream, first_row, used;

    __device__ __forceinline__ block_place(const attn_params & p, uint rows) :
        heads_per_kv(p.heads_per_kv), stream(blockIdx.y), kv_stream(p.streams_per_kv.quotient(stream)), first_row(blockIdx.x*rows),
        used(min(rows, heads_per_kv.by*p.args.tokens - first_row)) {}

    // Rows behind those that are used are like the last.
    __device__ __forceinline__ uint token_of(uint row) const {
        return heads_per_kv.quotient(first_row + min(row, used - 1));
    }

    __device__ __forceinline__ uint head_of(uint kv_head, uint row) const {
        return kv_head*heads_per_kv.by + heads_per_kv.rest(first_row + row);
    }

    // Where the queries of the block are, in units of the rows of a KV head: those of the cache, or the others behind them.
    __device__ __forceinline__ size_t query_block(uint kv_heads, bool others) const {
        return ((size_t) (stream + (others ? gridDim.y : 0))*gridDim.x + blockIdx.x)*kv_heads;
    }
};

// What a block's warps have, as a chunk of the results. `softs` and `all_sums` are shared memory for all warps.
template <uint ROWS, typename Sums> __device__ __forceinline__ void store_teams(
        const attn_params & p, const Sums & sums, const block_place & at, uint chunk, uint teams, float (*softs)[2], float * all_sums) {
    constexpr uint W = Sums::WIDTH;
    const uint warp = threadIdx.x/32, g = threadIdx.x % 32/4, t = threadIdx.x % 4, heads = p.args.kv_heads;
    const bool works = warp < heads*teams;
    if (works) {
        sums.store_softs(softs + warp*ROWS, g, t);
    }
    __syncthreads(); // what was where the sums come is done with
    if (works) {
        sums.store_sums(all_sums + warp*ROWS*W, g, t);
    }
    __syncthreads();
#pragma unroll 1
    for (uint i = 4*threadIdx.x; i < heads*ROWS*W; i += 4*blockDim.x) {
        const uint head = i/(ROWS*W), r = i/W % ROWS, token = at.token_of(r);
        if (r < at.used) {
            const uint of_token = head*at.heads_per_kv.by + at.first_row + r - token*at.heads_per_kv.by;
            const size_t result = (size_t) (at.stream*p.args.tokens + token)*p.args.heads + of_token;
            store_result(p, result*p.args.chunks + p.args.first_chunk + chunk, i % W, softs + head*ROWS + r, heads*ROWS, all_sums + i, heads*ROWS*W, teams, Sums::values_of::unit_of(i % W));
        }
    }
}

// Of which rows: of the cache alone, of the cache beside precise rows, or of these.
enum class decode_rows { alone, main, precise };

}  // namespace
}  // namespace kv
