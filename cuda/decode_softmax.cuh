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

template <uint STEPS, uint QB> __device__ __forceinline__ void copy_scores(float (&to)[STEPS][QB][2], const float (&from)[STEPS][QB][2]) {
#pragma unroll
    for (uint i = 0; i < 2*QB*STEPS; ++i) {
        to[i/(2*QB)][i/2 % QB][i % 2] = from[i/(2*QB)][i/2 % QB][i % 2];
    }
}

// A lane has query row t of each block of four, and cells g and g + 8 of each 16. Scores are in units of log 2.
template <uint K, uint V, uint D, uint QB, uint STEPS> struct decode_sums {
    static_assert(STEPS == 1 || STEPS == 2, "");
    typedef decode_values_of<V, D> values_of;
    static constexpr uint C = values_of::CHUNKS, WIDTH = values_of::WIDTH;

    typedef float scores[STEPS][QB][2]; // of STEPS times 16 cells

    float factor[QB], ref[QB]; // ref: what the sums are relative to
    float most_product[QB];    // of products that need no other ref; below a factor of zero there are none
    float acc[QB][C][2][4];    // [block of rows][chunk][pair of values][sums of a product: of the first scale and of the second by turns]
    float weight[QB];          // sums of the weights of the lane's cells
    bool  softcap, alibi;

    // The lane's query row, of the block's.
    static __device__ __forceinline__ uint row_of(uint qb, uint t) {
        return 4*qb + t;
    }

    // Of those of all rows.
    static __device__ __forceinline__ void load_scales(float (&res)[QB], const float * query_scale, uint t) {
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            res[qb] = query_scale[row_of(qb, t)];
        }
    }

    // What scores of delta are in units of: products with I-frames, too.
    static __device__ __forceinline__ float score_unit(const attn_params & p) {
        return p.args.softcap != 0.0f ? 1.0f : p.args.scale*LOG2_E;
    }

    // What products are multiplied by: the scales of the lane's query rows, and `unit`.
    __device__ __forceinline__ void begin(const attn_params & p, const float (&query_scale)[QB], float unit) {
        softcap = p.args.softcap != 0.0f;
        alibi = p.alibi;
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            factor[qb] = query_scale[qb]*unit*score_unit(p);
            ref[qb] = HIDDEN;
            most_product[qb] = -INFINITY;
            weight[qb] = 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < QB*C*8; ++i) {
            (&acc[0][0][0][0])[i] = 0.0f;
        }
    }

    // For each score: `what` of it, its block of rows, and how far behind cell g its cell is.
    template <typename What> static __device__ __forceinline__ void for_scores(scores & s, const What & what) {
#pragma unroll
        for (uint i = 0; i < 2*QB*STEPS; ++i) {
            what(s[i/(2*QB)][i/2 % QB][i % 2], i/2 % QB, i/(2*QB)*STEP + i % 2*8);
        }
    }

    // From products to scores, but for the cap and the mask.
    __device__ __forceinline__ void scale(scores & s) const {
        for_scores(s, [&](float & x, uint qb, uint) { x *= factor[qb]; });
    }

    __device__ __forceinline__ void cap(const kv_attn_args & args, scores & s) const {
        if (softcap) {
            for_scores(s, [&](float & x, uint, uint) { x = soft_capped(x*args.scale, args.softcap)*LOG2_E; });
        }
    }

    // What the mask adds to them, in units of log 2: `bias_at` a cell so far behind g, for a block of rows. `slopes` are those of ALiBi, by row.
    template <typename Bias> __device__ __forceinline__ void add_bias(scores & s, const Bias & bias_at, const float * slopes, uint t) const {
        if (alibi) {
            for_scores(s, [&](float & x, uint qb, uint behind) { x = fmaf(bias_at(qb, behind), slopes[row_of(qb, t)], x); });
        } else {
            for_scores(s, [&](float & x, uint qb, uint behind) { x += bias_at(qb, behind); });
        }
    }

    // The largest of a row's scores in N of these.
    template <uint N> static __device__ __forceinline__ float top_of(const scores (&s)[N], uint qb) {
        float x = s[0][0][qb][0];
#pragma unroll
        for (uint i = 1; i < 2*STEPS*N; ++i) {
            x = fmaxf(x, s[i/(2*STEPS)][i/2 % STEPS][qb][i % 2]);
        }
        return x;
    }

    // Is a score of these, or a product, much larger than what the sums are relative to? `most` are the largest that are not.
    template <uint N, typename Most> static __device__ __forceinline__ bool are_beyond(const scores (&s)[N], const Most & most) {
        bool res = false;
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            res = res || !(top_of(s, qb) <= most(qb));
        }
        return __any_sync(KV_ALL_LANES, res);
    }

    __device__ __forceinline__ bool are_products_beyond(const scores (&s)[1]) const {
        return are_beyond(s, [&](uint qb) { return most_product[qb]; });
    }

    // Scores that are weighed next: where one is beyond, it takes the place of what the sums are relative to.
    template <uint N> __device__ __forceinline__ void meet(const scores (&s)[N]) {
        if (are_beyond(s, [&](uint qb) { return ref[qb] + (float) values_of::SLACK; })) {
            take_largest(s);
        }
    }

    template <uint N> __device__ __forceinline__ void take_largest(const scores (&s)[N]) {
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            const float x = of_lanes(fmaxf(ref[qb], top_of(s, qb)), [](float a, float b) { return fmaxf(a, b); });
            const float less = exp2f(ref[qb] - x), most = x + (float) values_of::SLACK, f = factor[qb];
            ref[qb] = x;
            most_product[qb] = f > 0.0f ? most/f : f == 0.0f && most >= 0.0f ? INFINITY : -INFINITY; // rows of zeros fill a block
#pragma unroll
            for (uint n = 0; n < C*8; ++n) {
                (&acc[qb][0][0][0])[n] *= less;
            }
            weight[qb] *= less;
        }
    }

    // Scores to weights.
    __device__ __forceinline__ void weights_of(scores & s) const {
        for_scores(s, [&](float & x, uint qb, uint) { x = exp2f(x - ref[qb]); });
    }

    // The same of products that have no factor yet, without a mask and a cap.
    __device__ __forceinline__ void weights_of_products(scores & s) const {
        for_scores(s, [&](float & x, uint qb, uint) { x = exp2f(fmaf(x, factor[qb], -ref[qb])); });
    }

    // Weights as halves in shared memory, [row][cell], `row_step` from row to row.
    __device__ __forceinline__ void store_weights(const scores & w, uint g, uint t, __half * weights, uint row_step) {
        __half * const to = weights + t*row_step + weight_at(g);
#pragma unroll
        for (uint i = 0; i < QB*STEPS; ++i) {
            const float x = w[i/QB][i % QB][0], y = w[i/QB][i % QB][1];
            weight[i % QB] += x + y;
            *(__half2 *) (to + 4*(i % QB)*row_step + i/QB*STEP) = __floats2half2_rn(x, y);
        }
    }

    // What the lane multiplies with: weights of row g/2 of each block of rows, for its cells.
    static __device__ __forceinline__ void load_weights(::uint2 (&res)[QB], const __half * weights, uint row_step, uint g, uint t) {
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            res[qb] = *(const ::uint2 *) (weights + (4*qb + g/2)*row_step + 4*t);
        }
    }

    // At the end: the softmax of the rows, [row][largest score, sum], and the sums of V, [row][value].
    __device__ __forceinline__ void store_softs(float (*softs)[2], uint g, uint t) const {
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            const float all = of_lanes(weight[qb], [](float a, float b) { return a + b; });
            if (g == 0) {
                softs[row_of(qb, t)][0] = ref[qb];
                softs[row_of(qb, t)][1] = all;
            }
        }
    }

    __device__ __forceinline__ void store_sums(float * to, uint g, uint t) const {
#pragma unroll
        for (uint i = 0; i < QB*C*8; i += 4) {
            const float * x = &acc[0][0][0][0] + i;
            float * const row = to + row_of(i/(C*8), t)*WIDTH;
            const auto value_of = [&](uint place) { return values_of::value_of(i % (C*8) + place, g); };
            if constexpr (values_of::IN_A_ROW) {
                *(::float4 *) (row + value_of(0)) = make_float4(x[0], x[1], x[2], x[3]);
            } else {
                *(::float2 *) (row + value_of(0)) = make_float2(x[0], x[2]);
                *(::float2 *) (row + value_of(1)) = make_float2(x[1], x[3]);
            }
        }
    }

  private:
    // Of the lanes that have the same row.
    template <typename Both> static __device__ __forceinline__ float of_lanes(float x, const Both & both) {
#pragma unroll
        for (uint n = 4; n < 32; n *= 2) {
            x = both(x, __shfl_xor_sync(KV_ALL_LANES, x, n));
        }
        return x;
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
