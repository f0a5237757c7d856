// Groups of delta and bands: from products with residuals to products with keys.
//
// w_t = q.d_t + RHO w_(t-1) is a scan of three shuffles over eight cells, whose factors follow from the kinds of the cells: a power of
// RHO where all the cells hang together that it reaches across, else 0.
#pragma once

#include "decode.h"
#include "levels.cuh"

namespace kv {
namespace {

using namespace metal;

// How 16 or 32 cells of a group hang together, and what they leave to the next.
template <uint KIND, uint D, uint QB> struct decode_group {
    static constexpr uint SLOTS = D/64; // of a row

    uint  stored[2*SLOTS]; // slots of 32/SLOTS rows each
    uint  kinds[2][2];  // bits 0 of the kinds of cells 0 to 31, of the others; bits 1
    float base[QB][2];  // q.m
    float carry[QB][2]; // w of the cell before

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

    // A group begins, with the slots that were asked for. `q` are queries in the domain of keys, [row][value], with `step` floats from 32 of
    // them to the next; products are in units of `unit`.
    __device__ __forceinline__ void begin(const float * q, uint step, float unit, uint lane, uint t) {
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
            base[i/2][i % 2] = unit*(t % 2 ? dots[i/2*4 + 2 + i % 2] : dots[i/2*4 + i % 2]);
            carry[i/2][i % 2] = 0.0f;
        }
    }

    // From q.d of cells g and g + 8 of the 16 from `first` on, a cell of the group, to the scores of their keys. With STEPS of two, of
    // 32 cells: lanes t < 2 have the first 16 of them.
    template <uint STEPS> __device__ __forceinline__ void follow(uint first, uint lane, float (&s)[QB][4]) {
        const uint g = lane/4, t = lane % 4, second = STEPS == 2 ? t/2 : 0, last = 28 + (STEPS == 2 ? t % 2 : t);
        const bool upper = first >= 32;
        const uint low = upper ? kinds[0][1] : kinds[0][0], high = upper ? kinds[1][1] : kinds[1][0];
        static_assert(KV_DELTA_EMPTY == 0 && KV_DELTA_ALONE == 1 && KV_DELTA_CHAINED == 3, "");
        const uint written = low | high, before = written << 1 | (upper ? (kinds[0][0] | kinds[1][0]) >> 31 : 0);
        // of the lane's 16 cells: a bit for each that hangs on the one before, is alone, is there
        const uint at = first % 32 + 16*second, chained = (low & high & before) >> at, alone = (low & ~high) >> at, there = written >> at;
        float factor[2][3], whole[2];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint bits = chained >> 8*n;
            const auto all = [&](uint reach) { return g >= reach && (~bits >> (g - reach + 1) & ((1u << reach) - 1)) == 0; };
            factor[n][0] = all(1) ? KV_DELTA_RHO : 0.0f;
            factor[n][1] = all(2) ? KV_DELTA_RHO*KV_DELTA_RHO : 0.0f;
            factor[n][2] = all(4) ? KV_DELTA_RHO*KV_DELTA_RHO*KV_DELTA_RHO*KV_DELTA_RHO : 0.0f;
            whole[n] = (~bits & ((2u << g) - 1)) == 0 ? exp2f((float) (g + 1)*log2f(KV_DELTA_RHO)) : 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            float & w = s[i/4][i % 4];
            w = (alone >> (g + i % 4/2*8) & 1) != 0 ? w - base[i/4][i % 2] : w;
#pragma unroll
            for (uint j = 0; j < 3; ++j) {
                w = fmaf(factor[i % 4/2][j], __shfl_up_sync(KV_ALL_LANES, w, 4u << j), w);
            }
        }
        // Eight cells, the eight behind them, and the 16 of the other lanes.
        const float inner = whole[1];
        whole[1] *= __shfl_sync(KV_ALL_LANES, whole[0], 28 + t);
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            float & w0 = s[i/2][i % 2], & w1 = s[i/2][i % 2 + 2], & from = carry[i/2][i % 2];
            w1 = fmaf(inner, __shfl_sync(KV_ALL_LANES, w0, 28 + t), w1);
            if (STEPS == 2) {
                // what the first 16 leave, with what came before them
                const float left = fmaf(__shfl_sync(KV_ALL_LANES, whole[1], last), from, __shfl_sync(KV_ALL_LANES, w1, last));
                from = second ? left : from;
            }
            w0 = fmaf(whole[0], from, w0);
            w1 = fmaf(whole[1], from, w1);
            from = __shfl_sync(KV_ALL_LANES, w1, last + (STEPS == 2 ? 2 : 0));
            w0 = (there >> g & 1) != 0 ? w0 + base[i/2][i % 2] : 0.0f;
            w1 = (there >> (g + 8) & 1) != 0 ? w1 + base[i/2][i % 2] : 0.0f;
        }
    }
};

}  // namespace
}  // namespace kv
