// Keys of f16 as decode_keys.cuh has rows of levels: precise rows beside delta8. By f16 tensor cores, with the bytes of the queries as halves.
#pragma once

#include "decode_keys.cuh"

namespace kv {
namespace {

// Halves, with zeros for what is not finite.
__device__ __forceinline__ uint finite_or_zero(uint halves) {
    const __half2 infinite = __half2half2(__ushort_as_half(0x7c00));
    return halves & __hgt2_mask(infinite, __habs2(*(const __half2 *) &halves));
}

// A lane has values 4t to 4t + 3 of each 16 of cells g and g + 8.
template <uint D, uint QB> struct decode_half_keys {
    static constexpr bool JOINED = false;
    static constexpr uint STEPS = D/16;

    struct queries {
        uint b[STEPS][QB][2];
    };

    uint words[2][STEPS][2];

    static __device__ __forceinline__ uint codes_at(uint t) { return 8*t; }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t *, const uint8_t * codes_of, uint step, uint cell, uint last, uint g, uint = 0) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step;
#pragma unroll
            for (uint i = 0; i < STEPS; ++i) {
                load_two<Bytes, 8>(words[n][i], codes_of + at + 32*i);
            }
        }
    }

    __device__ __forceinline__ void join() {}

    struct loaded_queries {
        uint words[STEPS][QB];

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
            load_query_words(words, planes, g, [&](uint step) { return 16*step + 4*t; });
        }
    };

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint) {
#pragma unroll
        for (uint i = 0; i < STEPS*QB; ++i) {
            const uint bytes = from.words[i/QB][i % QB] ^ 0x80808080;
            q.b[i/QB][i % QB][0] = halves_of_bytes(bytes, 0);
            q.b[i/QB][i % QB][1] = halves_of_bytes(bytes, 1);
        }
    }

    // Halves have no scales.
    __device__ __forceinline__ float scale_of(uint, uint, uint) const {
        return 1.0f;
    }

    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint, const Scales &, float (&s)[QB][2]) const {
        float sums[QB][4] = {};
#pragma unroll
        for (uint i = 0; i < STEPS; ++i) {
            const uint a[4] = { finite_or_zero(words[0][i][0]), finite_or_zero(words[1][i][0]), finite_or_zero(words[0][i][1]), finite_or_zero(words[1][i][1]) };
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                mma_f16(sums[qb], a, q.b[i][qb][0], q.b[i][qb][1]);
            }
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            s[i/2][i % 2] = joined_planes(sums[i/2][i % 2*2], sums[i/2][i % 2*2 + 1]);
        }
    }
};

}  // namespace
}  // namespace kv
