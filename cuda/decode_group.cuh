// Groups of delta and bands: from products with residuals to products with keys.
//
// w_t = q.d_t + RHO w_(t-1) is a scan of three shuffles over eight cells, whose factors follow from the kinds of the cells: a power of
// RHO where all the cells hang together that it reaches across, else 0. It needs nothing but the cells before. q.m comes from all 64
// rows of the group, and what it adds to a score is added when they have been there.
#pragma once

#include "decode_keys.cuh"

namespace kv {
namespace {

using namespace metal;

// Slots of a row: its share of the I-frame, of which the first carries what the row is.
template <uint SLOTS> struct slot_words {
    uint words[(SLOTS + 1)/2];

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * from) {
        if constexpr (SLOTS == 1) {
            words[0] = Bytes::template at<unsigned short>(from);
        } else if constexpr (SLOTS == 2) {
            words[0] = Bytes::template at<uint>(from);
        } else {
            static_assert(SLOTS == 4, "");
            const ::uint2 two = Bytes::template at<::uint2>(from);
            words[0] = two.x;
            words[1] = two.y;
        }
    }

    __device__ __forceinline__ float value(uint i) const {
        return kv_delta_value((unsigned short) (words[i/2] >> 16*(i % 2)));
    }
};

// How the cells of a group hang together, and what they leave to the next ones. For each group: `begin`, `take` its first 32 rows and
// the others, `make_base`. For its cells in their order: `follow`, and behind `make_base` `add_base`.
template <uint KIND, uint D, uint QB> struct decode_group {
    static constexpr uint SLOTS = D/64; // of a row
    static constexpr uint SHARE = level_scale_bytes(KIND, D) + D*code_bits(KIND)/8;

    uint  kinds[2][2];  // bits 0 of the kinds of cells 0 to 31, of the others; bits 1
    bool  framed;       // is there an I-frame?
    float dots[4*QB];   // the lane's part of q.m
    float base[QB][2];  // q.m
    float carry[QB][2]; // w of the cell before, as if nothing but residuals counted
    float left_out;     // the part of m that the cell before is without

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            dots[i] = 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            carry[i/2][i % 2] = 0.0f;
        }
        left_out = 0.0f;
    }

    // What 32 rows of the group carry, `count` of which are there: a lane has one of them. `q` are queries in the domain of keys,
    // [row][value], with `query_step` floats from 32 of them to the next.
    template <typename Bytes> __device__ __forceinline__ void take(uint half_of, const uint8_t * rows, uint step, uint count, const float * q, uint query_step, uint lane) {
        slot_words<SLOTS> slots = {};
        if (lane < count) {
            slots.template load<Bytes>(rows + lane*step + SHARE);
        }
        const uint first = slots.words[0], low = __ballot_sync(KV_ALL_LANES, (first & 1) != 0), high = __ballot_sync(KV_ALL_LANES, (first & 2) != 0);
        if (half_of == 0) {
            framed = (__shfl_sync(KV_ALL_LANES, first, 0) & KV_DELTA_FRAMED) != 0;
            kinds[0][0] = low;
            kinds[1][0] = high;
        } else {
            kinds[0][1] = low;
            kinds[1][1] = high;
        }
        const float * const from = q + (half_of*SLOTS + SLOTS*lane/32)*query_step + SLOTS*lane % 32;
#pragma unroll
        for (uint r = 0; r < 4*QB; ++r) {
            float values[SLOTS];
            load_floats(values, from + r*(D/32)*query_step);
#pragma unroll
            for (uint i = 0; i < SLOTS; ++i) {
                dots[r] = fmaf(values[i], slots.value(i), dots[r]);
            }
        }
    }

    // q.m of the lane's query rows, in units of `unit`.
    __device__ __forceinline__ void make_base(float unit, uint t) {
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            const float first = dots[i/2*4 + i % 2], second = dots[i/2*4 + 2 + i % 2];
            float x = (t % 2 ? second : first) + __shfl_xor_sync(KV_ALL_LANES, t % 2 ? first : second, 1);
#pragma unroll
            for (uint n = 2; n < 32; n *= 2) {
                x += __shfl_xor_sync(KV_ALL_LANES, x, n);
            }
            base[i/2][i % 2] = framed ? unit*x : 0.0f;
        }
    }

    // From q.d of cells g and g + 8 of the 16 from `first` on, a cell of the group, to products with what the cells have beside m. With
    // STEPS of two, of 32 cells: lanes t < 2 have the first 16 of them.
    template <uint STEPS> __device__ __forceinline__ void follow(uint first, uint lane, float (&s)[QB][4]) {
        const chain<STEPS> cells(*this, first, lane);
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            cells.follow(s[i/2][i % 2], s[i/2][i % 2 + 2], carry[i/2][i % 2], lane);
        }
    }

    // And from those to the scores of their keys.
    template <uint STEPS> __device__ __forceinline__ void add_base(uint first, uint lane, float (&s)[QB][4]) {
        const uint at = place_of<STEPS>(first, lane), g = lane/4;
        const uint low = of_half(kinds[0], first), high = of_half(kinds[1], first), there = (low | high) >> at;
        float part[2] = { 1.0f, 1.0f };
        if (((kinds[0][0] & ~kinds[1][0]) | (kinds[0][1] & ~kinds[1][1])) != 0) {
            // A row alone is without m, and those that hang on it are without a part of it.
            const uint alone = (low & ~high) >> at;
            float x = alone >> g & 1 ? 1.0f : 0.0f, y = alone >> (g + 8) & 1 ? 1.0f : 0.0f;
            chain<STEPS>(*this, first, lane).follow(x, y, left_out, lane);
            part[0] -= x;
            part[1] -= y;
        }
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            float & x = s[i/4][i % 4];
            x = (there >> (g + i % 4/2*8) & 1) != 0 ? fmaf(part[i % 4/2], base[i/4][i % 2], x) : 0.0f;
        }
    }

  private:
    static __device__ __forceinline__ uint of_half(const uint (&words)[2], uint first) {
        return first >= 32 ? words[1] : words[0];
    }

    // Where the lane's 16 cells begin, of the 32 that they are among.
    template <uint STEPS> static __device__ __forceinline__ uint place_of(uint first, uint lane) {
        return first % 32 + (STEPS == 2 ? lane % 4/2*16 : 0);
    }

    // The scan over the cells of a call of `follow`.
    template <uint STEPS> struct chain {
        float factor[2][3], whole[2], inner; // of eight cells and of the eight behind them

        __device__ __forceinline__ chain(const decode_group & group, uint first, uint lane) {
            const uint g = lane/4, t = lane % 4;
            const uint low = of_half(group.kinds[0], first), high = of_half(group.kinds[1], first);
            static_assert(KV_DELTA_EMPTY == 0 && KV_DELTA_ALONE == 1 && KV_DELTA_CHAINED == 3, "");
            const float one = KV_DELTA_RHO, two = one*one, four = two*two;
            // The first of a group has none before it, and nothing is carried to it.
            const bool follows = first < 32 || (group.kinds[0][0] | group.kinds[1][0]) >> 31 != 0;
            if ((low & high) == ~0u && follows) {
                // They all hang on the one before.
#pragma unroll
                for (uint n = 0; n < 2; ++n) {
                    factor[n][0] = g >= 1 ? one : 0.0f;
                    factor[n][1] = g >= 2 ? two : 0.0f;
                    factor[n][2] = g >= 4 ? four : 0.0f;
                    whole[n] = exp2f((float) (g + 1)*log2f(KV_DELTA_RHO));
                }
            } else {
                const uint before = (low | high) << 1 | (first >= 32 && follows ? 1 : 0);
                const uint chained = (low & high & before) >> place_of<STEPS>(first, lane); // a bit for each that hangs on the one before
#pragma unroll
                for (uint n = 0; n < 2; ++n) {
                    const uint bits = chained >> 8*n;
                    const auto all = [&](uint reach) { return g >= reach && (~bits >> (g - reach + 1) & ((1u << reach) - 1)) == 0; };
                    factor[n][0] = all(1) ? one : 0.0f;
                    factor[n][1] = all(2) ? two : 0.0f;
                    factor[n][2] = all(4) ? four : 0.0f;
                    whole[n] = (~bits & ((2u << g) - 1)) == 0 ? exp2f((float) (g + 1)*log2f(KV_DELTA_RHO)) : 0.0f;
                }
            }
            inner = whole[1];
            whole[1] *= __shfl_sync(KV_ALL_LANES, whole[0], 28 + t);
        }

        // w0 of cell g, w1 of cell g + 8, and of the cell before them all.
        __device__ __forceinline__ void follow(float & w0, float & w1, float & before, uint lane) const {
            const uint t = lane % 4, last = 28 + (STEPS == 2 ? t % 2 : t);
#pragma unroll
            for (uint j = 0; j < 3; ++j) {
                w0 = fmaf(factor[0][j], __shfl_up_sync(KV_ALL_LANES, w0, 4u << j), w0);
                w1 = fmaf(factor[1][j], __shfl_up_sync(KV_ALL_LANES, w1, 4u << j), w1);
            }
            w1 = fmaf(inner, __shfl_sync(KV_ALL_LANES, w0, 28 + t), w1);
            if (STEPS == 2) {
                // what the first 16 leave, with what came before them
                const float left = fmaf(__shfl_sync(KV_ALL_LANES, whole[1], last), before, __shfl_sync(KV_ALL_LANES, w1, last));
                before = t/2 ? left : before;
            }
            w0 = fmaf(whole[0], before, w0);
            w1 = fmaf(whole[1], before, w1);
            before = __shfl_sync(KV_ALL_LANES, w1, last + (STEPS == 2 ? 2 : 0));
        }
    };
};

}  // namespace
}  // namespace kv
