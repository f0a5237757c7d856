// What the decoding kernels share: queries, the softmax of a warp's query rows, and the sums of V under way.
//
// The softmax is relative to the largest score so far, which changes a few times in a chunk: until then nothing is rescaled.
#pragma once

#include "decode_group.cuh"
#include "decode_keys.cuh"
#include "decode_values.cuh"
#include "queries.cuh"

namespace kv {
namespace {

using namespace metal;

constexpr uint STEP = 16; // cells of one product

// A lane has query rows 2 (t % 2) and the next of each block of four, and of 16 cells g and g + 8. Scores are in units of log 2.
template <uint K, uint V, uint D, uint QB> struct decode_sums {
    static constexpr uint C = D/64;
    static constexpr bool DELTA = is_delta(K);

    float factor[QB][2], slope[QB][2], ref[QB][2], sum[QB][2];
    float acc[C][2][2][4]; // [chunk][scale][pair of values]
    bool  softcap;

    // The lane's query row, of the block's.
    static __device__ __forceinline__ uint row_of(uint i, uint t) {
        return i/2*4 + t % 2*2 + i % 2;
    }

    // What products are multiplied by: `query_scale` of a row, and `unit`.
    __device__ __forceinline__ void begin(const attn_params & p, const float * query_scale, float unit, uint first_row, uint used, uint kv_head, uint heads_per_kv, uint t) {
        softcap = p.args.softcap != 0.0f;
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            const uint r = row_of(i, t), row = first_row + min(r, used - 1), head = kv_head*heads_per_kv + row % heads_per_kv;
            factor[i/2][i % 2] = query_scale[r]*unit*(DELTA || softcap ? 1.0f : p.args.scale*LOG2_E);
            slope[i/2][i % 2] = slope_of(p, head)*LOG2_E;
            ref[i/2][i % 2] = HIDDEN;
            sum[i/2][i % 2] = 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < C*16; ++i) {
            (&acc[0][0][0][0])[i] = 0.0f;
        }
    }

    // Products of the queries with 16 keys, or with their residuals.
    template <typename Scales> __device__ __forceinline__ void products(
            decode_keys<K, D, QB> & k, const typename decode_keys<K, D, QB>::queries & q, uint t, const Scales & scale_of, float (&s)[QB][4]) const {
        k.join(t);
        k.products(q, t, scale_of, s);
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            s[i/4][i % 4] = (s[i/4][i % 4] + __shfl_xor_sync(KV_ALL_LANES, s[i/4][i % 4], 2))*factor[i/4][i % 2];
        }
    }

    // From the products of N times 16 cells, what the mask has of them and a bit for each cell that is not to be seen, to
    // weights: halves in shared memory, [row][cell], `row_step` from row to row.
    template <uint N> __device__ __forceinline__ void weigh(
            const kv_attn_args & args, float (&s)[N][QB][4], const unsigned short (&masked)[N][QB][4], const uint (&gone)[N], uint g, uint t, __half * weights, uint row_step) {
        bool larger = false;
        if (softcap) {
#pragma unroll
            for (uint j = 0; j < N*4*QB; ++j) {
                float & x = s[j/(4*QB)][j/4 % QB][j % 4];
                x = soft_capped(x*args.scale, args.softcap)*LOG2_E;
            }
        }
#pragma unroll
        for (uint j = 0; j < N*4*QB; ++j) {
            const uint n = j/(4*QB), i = j % (4*QB);
            float & x = s[n][i/4][i % 4];
            if (DELTA) {
                x *= softcap ? 1.0f : args.scale*LOG2_E;
            }
            const float bias = __half2float(__ushort_as_half(masked[n][i/4][i % 4]));
            const bool hidden = !(bias > -65504.0f) || (gone[n] >> i % 4/2*8 & 1) != 0;
            x = hidden ? -INFINITY : fmaf(slope[i/4][i % 2], bias, x);
            larger = larger || x > ref[i/4][i % 2];
        }
        if (__any_sync(KV_ALL_LANES, larger)) {
            float less[QB][2];
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                float & r = ref[i/2][i % 2];
                float top = r;
#pragma unroll
                for (uint n = 0; n < N; ++n) {
                    top = fmaxf(top, fmaxf(s[n][i/2][i % 2], s[n][i/2][i % 2 + 2]));
                }
                top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 4));
                top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 8));
                top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 16));
                less[i/2][i % 2] = exp2f(r - top);
                sum[i/2][i % 2] *= less[i/2][i % 2];
                r = top;
            }
            // Columns 2t and 2t + 1 of the sums.
            const float f0 = t < 2 ? less[0][0] : less[QB - 1][0], f1 = t < 2 ? less[0][1] : less[QB - 1][1];
#pragma unroll
            for (uint i = 0; i < C*16; i += 2) {
                (&acc[0][0][0][0])[i] *= f0;
                (&acc[0][0][0][0])[i + 1] *= f1;
            }
        }
        // Lanes t and t ^ 2 have the same: one of them stores a block of rows.
        __half * const to = weights + ((QB == 2 && t >= 2 ? 4 : 0) + t % 2*2)*row_step + weight_at(g);
#pragma unroll
        for (uint n = 0; n < N; ++n) {
            __half w[QB][4];
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                w[i/4][i % 4] = __float2half_rn(exp2f(s[n][i/4][i % 4] - ref[i/4][i % 2]));
                sum[i/4][i % 2] += __half2float(w[i/4][i % 4]);
            }
            if (QB == 2 || t < 2) {
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    to[i % 2*row_step + n*STEP + i/2*8] = QB == 2 && t >= 2 ? w[QB - 1][i] : w[0][i];
                }
            }
        }
    }

    // At the end: the softmax of the rows, [row][largest score, sum], and the sums of V, [row][value].
    __device__ __forceinline__ void store_softs(float (*softs)[2], uint g, uint t) {
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            for (uint n = 4; n < 32; n *= 2) {
                sum[i/2][i % 2] += __shfl_xor_sync(KV_ALL_LANES, sum[i/2][i % 2], n);
            }
            if (g == 0 && t/2 == i/2) {
                softs[row_of(i, t)][0] = ref[i/2][i % 2];
                softs[row_of(i, t)][1] = sum[i/2][i % 2];
            }
        }
    }

    __device__ __forceinline__ void store_sums(float * to, uint g, uint t) const {
        if (t < 2*QB) {
#pragma unroll
            for (uint i = 0; i < C*16; ++i) {
                to[(2*t + i % 2)*D + decode_values<V, D>::value_of(i, g)] = (&acc[0][0][0][0])[i];
            }
        }
    }
};

// lane_table, with `step` words from entry to entry.
__device__ __forceinline__ void fill_table(uint * table, uint step, uint thread, uint threads) {
    for (uint i = thread; i < 256; i += threads) {
        const __half2 pair = __floats2half2_rn(kv_levels_4[i % 16], kv_levels_4[i/16]);
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

// Of which rows: of the cache alone, of the cache beside precise rows, or of these.
enum class decode_rows { alone, main, precise };

}  // namespace
}  // namespace kv
