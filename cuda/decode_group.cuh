// Groups of delta: from products with residuals to products with keys.
//
// w_t = q.d_t + RHO w_(t-1) over 16 cells is a scan of three shuffles for each half of them.
#pragma once

#include "decode.h"
#include "levels.cuh"

namespace kv {
namespace {

using namespace metal;

// How 16 cells of a group hang together, and what they leave to the next 16.
template <uint KIND, uint D, uint QB> struct decode_group {
    static constexpr uint SLOTS = D/64; // of a row

    uint  stored[2*SLOTS]; // slots of 32/SLOTS rows each
    uint  kinds[2][2];  // bits 0 of the kinds of cells 0 to 31, of the others; bits 1
    float base[QB][2];  // q.m
    float carry[QB][2]; // w of the cell before
    bool  written;      // is there one?

    // Asks for the slots of a group's rows: they carry the I-frame and what the rows are.
    __device__ __forceinline__ void ask(const uint8_t * group, uint step, uint rows, uint lane) {
        const uint8_t * shares = group + level_scale_bytes(KIND, D) + D*code_bits(KIND)/8;
#pragma unroll
        for (uint i = 0; i < 2*SLOTS; ++i) {
            const uint row = (lane + 32*i)/SLOTS;
            // by L2: the launch before may have written them while this one was under way
            stored[i] = row < rows ? __ldcg((const unsigned short *) (shares + row*step) + lane % SLOTS) : 0;
        }
    }

    // A group begins, with the slots that were asked for. `q` are rotated queries, [row][value], with `step` floats from 32 of
    // them to the next.
    __device__ __forceinline__ void begin(const float * q, uint step, uint lane, uint t) {
        const bool framed = (__shfl_sync(KV_ALL_LANES, stored[0], 0) & KV_DELTA_FRAMED) != 0;
        float dots[4*QB] = {};
#pragma unroll
        for (uint i = 0; i < 2*SLOTS; ++i) {
            const float frame = framed ? kv_delta_value((unsigned short) stored[i]) : 0.0f;
#pragma unroll
            for (uint r = 0; r < 4*QB; ++r) {
                dots[r] = fmaf(q[(r*(D/32) + i)*step + lane], frame, dots[r]);
            }
        }
#pragma unroll
        for (uint half_of = 0; half_of < 2; ++half_of) {
            uint kind = 0; // of cell `lane` of these 32
#pragma unroll
            for (uint i = 0; i < SLOTS; ++i) {
                const uint first_slot = __shfl_sync(KV_ALL_LANES, stored[half_of*SLOTS + i], SLOTS*lane % 32);
                kind = lane/(32/SLOTS) == i ? first_slot : kind;
            }
            kinds[0][half_of] = __ballot_sync(KV_ALL_LANES, (kind & 1) != 0);
            kinds[1][half_of] = __ballot_sync(KV_ALL_LANES, (kind & 2) != 0);
        }
#pragma unroll
        for (uint r = 0; r < 4*QB; ++r) {
            dots[r] = simd_sum(dots[r]);
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            base[i/2][i % 2] = t % 2 ? dots[i/2*4 + 2 + i % 2] : dots[i/2*4 + i % 2];
            carry[i/2][i % 2] = 0.0f;
        }
        written = false;
    }

    // From q.d of cells g and g + 8 of the 16 from `first` on, a cell of the group, to the scores of their keys.
    __device__ __forceinline__ void follow(uint first, uint lane, float (&s)[QB][4]) {
        const uint g = lane/4, last = 28 + lane % 4;
        const uint bits[2] = { (first < 32 ? kinds[0][0] : kinds[0][1]) >> first % 32, (first < 32 ? kinds[1][0] : kinds[1][1]) >> first % 32 };
        bool empty[2], alone[2];
        float factor[2][3], whole[2];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint kind = (bits[0] >> (g + 8*n) & 1) | (bits[1] >> (g + 8*n) & 1) << 1;
            empty[n] = kind == KV_DELTA_EMPTY;
            alone[n] = kind == KV_DELTA_ALONE;
            const bool before = __shfl_up_sync(KV_ALL_LANES, (int) !empty[n], 4) != 0;
            float f = kind == KV_DELTA_CHAINED && (g == 0 ? written : before) ? KV_DELTA_RHO : 0.0f;
#pragma unroll
            for (uint i = 0; i < 3; ++i) {
                const float other = __shfl_up_sync(KV_ALL_LANES, f, 4u << i);
                factor[n][i] = g >= 1u << i ? f : 0.0f;
                f = g >= 1u << i ? f*other : f;
            }
            whole[n] = f;
            written = __shfl_sync(KV_ALL_LANES, (int) !empty[n], last) != 0;
        }
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                const uint n = i/2;
                // cells g of both rows come before cells g + 8
                float w = alone[n] ? s[qb][i] - base[qb][i % 2] : s[qb][i];
#pragma unroll
                for (uint j = 0; j < 3; ++j) {
                    w = fmaf(factor[n][j], __shfl_up_sync(KV_ALL_LANES, w, 4u << j), w);
                }
                w = fmaf(whole[n], carry[qb][i % 2], w);
                carry[qb][i % 2] = __shfl_sync(KV_ALL_LANES, w, last);
                s[qb][i] = empty[n] ? 0.0f : w + base[qb][i % 2];
            }
        }
    }
};

}  // namespace
}  // namespace kv
