// What the decoding kernels share: queries, the softmax of a warp's query rows, and the sums of V under way.
//
// The softmax is relative to the largest score so far, which changes a few times in a chunk: until then nothing is rescaled.
#pragma once

#include "decode_bands.cuh"
#include "decode_group.cuh"
#include "decode_values.cuh"
#include "queries.cuh"

namespace kv {
namespace {

using namespace metal;

// A lane has query rows 2 (t % 2) and the next of each block of four, and of 16 cells g and g + 8. Of two times 16 cells lanes t < 2
// have the first and the others the second; of 16 alone they have the same. Scores are in units of log 2.
template <uint K, uint V, uint D, uint QB, uint STEPS> struct decode_sums {
    static_assert(STEPS == 1 || STEPS == 2, "");
    static constexpr uint C = D/64;
    static constexpr bool DELTA = is_delta(K);

    float factor[QB][2], ref[QB][2];
    float acc[C][2][2][4]; // [chunk][scale][pair of values]
    float weight[4];       // sums of the weights, as those of a value that is 1 everywhere; the last two are the first again
    bool  softcap, alibi;

    // The lane's query row, of the block's.
    static __device__ __forceinline__ uint row_of(uint i, uint t) {
        return i/2*4 + t % 2*2 + i % 2;
    }

    // What scores of delta are in units of: products with I-frames, too.
    static __device__ __forceinline__ float score_unit(const attn_params & p) {
        return p.args.softcap != 0.0f ? 1.0f : p.args.scale*LOG2_E;
    }

    // What products are multiplied by: `query_scale` of a row, and `unit`.
    __device__ __forceinline__ void begin(const attn_params & p, const float * query_scale, float unit, uint t) {
        softcap = p.args.softcap != 0.0f;
        alibi = p.alibi;
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            factor[i/2][i % 2] = query_scale[row_of(i, t)]*unit*score_unit(p);
            ref[i/2][i % 2] = HIDDEN;
        }
#pragma unroll
        for (uint i = 0; i < C*16; ++i) {
            (&acc[0][0][0][0])[i] = 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            weight[i] = 0.0f;
        }
    }

    // Products of the queries with STEPS times 16 keys, of which lanes t and t ^ 2 have parts. `weigh` has their factor, but of
    // residuals.
    __device__ __forceinline__ void join(const float (&parts)[STEPS][QB][4], uint t, float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            const float first = parts[0][i/4][i % 4], second = parts[STEPS - 1][i/4][i % 4];
            const float mine = t < 2 ? first : second, others = t < 2 ? second : first;
            s[i/4][i % 4] = (mine + __shfl_xor_sync(KV_ALL_LANES, others, 2))*(DELTA ? factor[i/4][i % 2] : 1.0f);
        }
    }

    // From products and what the mask adds to them, in units of log 2, to scores. `slopes` are those of ALiBi, by row.
    __device__ __forceinline__ void score(const kv_attn_args & args, float (&s)[QB][4], float (&bias)[QB][4], const float * slopes, uint t) const {
        if (alibi) {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                bias[i/4][i % 4] *= slopes[row_of(i/4*2 + i % 2, t)];
            }
        }
        if (softcap) {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                float & x = s[i/4][i % 4];
                x = fmaf(soft_capped(x*(DELTA ? 1.0f : factor[i/4][i % 2])*args.scale, args.softcap), LOG2_E, bias[i/4][i % 4]);
            }
        } else {
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                s[i/4][i % 4] = fmaf(s[i/4][i % 4], DELTA ? 1.0f : factor[i/4][i % 2], bias[i/4][i % 4]);
            }
        }
    }

    // Scores that are weighed next: if one of them is the largest so far, the sums are made relative to it.
    template <uint N> __device__ __forceinline__ void meet(const float (&s)[N][QB][4], uint t) {
        float top[QB][2];
        bool larger = false;
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            float & x = top[i/2][i % 2];
            x = fmaxf(s[0][i/2][i % 2], s[0][i/2][i % 2 + 2]);
#pragma unroll
            for (uint n = 1; n < N; ++n) {
                x = fmaxf(x, fmaxf(s[n][i/2][i % 2], s[n][i/2][i % 2 + 2]));
            }
            larger = larger || x > ref[i/2][i % 2];
        }
        if (__any_sync(KV_ALL_LANES, larger)) {
            float less[QB][2];
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                float & r = ref[i/2][i % 2];
                float x = fmaxf(r, top[i/2][i % 2]);
                for (uint n = STEPS == 2 ? 2 : 4; n < 32; n *= 2) {
                    x = fmaxf(x, __shfl_xor_sync(KV_ALL_LANES, x, n));
                }
                less[i/2][i % 2] = exp2f(r - x);
                r = x;
            }
            // Columns 2t and 2t + 1 of the sums.
            const float f0 = t < 2 ? less[0][0] : less[QB - 1][0], f1 = t < 2 ? less[0][1] : less[QB - 1][1];
#pragma unroll
            for (uint i = 0; i < C*16; i += 2) {
                (&acc[0][0][0][0])[i] *= f0;
                (&acc[0][0][0][0])[i + 1] *= f1;
            }
            weight[0] *= f0;
            weight[1] *= f1;
        }
    }

    // From scores to weights: halves in shared memory, [row][cell], `row_step` from row to row.
    __device__ __forceinline__ void weigh(const float (&s)[QB][4], uint g, uint t, __half * weights, uint row_step) const {
        __half * const to = weights + t % 2*2*row_step + weight_at(g) + (STEPS == 2 ? t/2*STEP : 0);
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            const __half w = __float2half_rn(exp2f(s[i/4][i % 4] - ref[i/4][i % 2]));
            // Where lanes t and t ^ 2 have the same, one of them stores it.
            if (STEPS == 2 || t/2 == i/4 % 2) {
                to[(i/4*4 + i % 2)*row_step + i % 4/2*2] = w;
            }
        }
    }

    // The weights of row g for cells t, t + 4, t + 8 and t + 12.
    __device__ __forceinline__ void count(::uint2 weights) {
        constexpr uint ONES = 0x3c003c00;
        const uint a[4] = { ONES, ONES, ONES, ONES };
        mma_f16(weight, a, weights.x, weights.y);
    }

    // At the end: the softmax of the rows, [row][largest score, sum], and the sums of V, [row][value].
    __device__ __forceinline__ void store_softs(float (*softs)[2], uint g, uint t) const {
        if (g == 0) {
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                if (t/2 == i/2) {
                    softs[row_of(i, t)][0] = ref[i/2][i % 2];
                }
            }
            // columns 2t and 2t + 1, as of the sums
            if (t < 2*QB) {
                softs[2*t][1]     = weight[0];
                softs[2*t + 1][1] = weight[1];
            }
        }
    }

    __device__ __forceinline__ void store_sums(float * to, uint g, uint t) const {
        if (t < 2*QB) {
#pragma unroll
            for (uint i = 0; i < C*16; i += 4) {
                const float * x = &acc[0][0][0][0] + i;
                const uint value = decode_values<V, D>::value_of(i, g); // and the one behind it
                *(::float2 *) (to + 2*t*D + value)       = make_float2(x[0], x[2]);
                *(::float2 *) (to + (2*t + 1)*D + value) = make_float2(x[1], x[3]);
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
    uint stream, kv_stream, heads_per_kv, first_row, used;

    __device__ __forceinline__ block_place(const kv_attn_args & args, uint rows) :
        stream(blockIdx.y), kv_stream(stream/(args.streams/args.kv_streams)), heads_per_kv(args.heads/args.kv_heads), first_row(blockIdx.x*rows),
        used(min(rows, heads_per_kv*args.tokens - first_row)) {}

    // Rows behind those that are used are like the last.
    __device__ __forceinline__ uint token_of(uint row) const {
        return (first_row + min(row, used - 1))/heads_per_kv;
    }

    __device__ __forceinline__ uint head_of(uint kv_head, uint row) const {
        return kv_head*heads_per_kv + (first_row + row) % heads_per_kv;
    }

    // Where the queries of the block are, in units of the rows of a KV head: those of the cache, or the others behind them.
    __device__ __forceinline__ size_t query_block(uint kv_heads, bool others) const {
        return ((size_t) (stream + (others ? gridDim.y : 0))*gridDim.x + blockIdx.x)*kv_heads;
    }
};

// What a block's warps have, as a chunk of the results. `softs` and `all_sums` are shared memory for all warps.
template <uint D, uint ROWS, typename Sums> __device__ __forceinline__ void store_teams(
        const attn_params & p, const Sums & sums, const block_place & at, uint chunk, uint teams, float (*softs)[2], float * all_sums, float unit) {
    const uint warp = threadIdx.x/32, g = threadIdx.x % 32/4, t = threadIdx.x % 4, heads = p.args.kv_heads;
    sums.store_softs(softs + warp*ROWS, g, t);
    __syncthreads(); // what was where the sums come is done with
    sums.store_sums(all_sums + warp*ROWS*D, g, t);
    __syncthreads();
#pragma unroll 1
    for (uint i = 4*threadIdx.x; i < heads*ROWS*D; i += 4*blockDim.x) {
        const uint head = i/(ROWS*D), r = i/D % ROWS, token = at.token_of(r);
        if (r < at.used) {
            const size_t result = (size_t) (at.stream*p.args.tokens + token)*p.args.heads + head*at.heads_per_kv + at.first_row + r - token*at.heads_per_kv;
            store_result(p, result*p.args.chunks + p.args.first_chunk + chunk, i % D, softs + head*ROWS + r, heads*ROWS, all_sums + i, heads*ROWS*D, teams, unit);
        }
    }
}

// Of which rows: of the cache alone, of the cache beside precise rows, or of these.
enum class decode_rows { alone, main, precise };

}  // namespace
}  // namespace kv
