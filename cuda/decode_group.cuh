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
// the others, `make_base`, `find_kinds`. For its cells in their order: `follow`, and behind `make_base` `add_base`.
template <uint KIND, uint D, uint QB> struct decode_group {
    static constexpr uint SLOTS = D/64; // of a row
    static constexpr uint SHARE = level_scale_bytes(KIND, D) + D*code_bits(KIND)/8;

    uint  firsts[2];    // the first slots of cells `lane` and `lane` + 32
    uint  kinds[2][2];  // bits 0 of the kinds of cells 0 to 31, of the others; bits 1
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

    // Where the queries of a lane's slots begin, among those in the domain of keys, [row][value], with `query_step` floats from 32 of
    // them to the next.
    static __device__ __forceinline__ uint query_at(uint query_step, uint lane) {
        return SLOTS*lane/32*query_step + SLOTS*lane % 32;
    }

    // What 32 rows of the group carry, `count` of which are there: a lane has one of them, `row`. `q` are its queries. The first 32 come
    // first.
    template <typename Bytes> __device__ __forceinline__ void take(uint half_of, const uint8_t * row, uint count, const float * q, uint query_step, uint lane) {
        slot_words<SLOTS> slots = {};
        if (lane < count) {
            slots.template load<Bytes>(row + SHARE);
        }
        firsts[0] = firsts[1];
        firsts[1] = slots.words[0];
        float m[SLOTS];
#pragma unroll
        for (uint i = 0; i < SLOTS; ++i) {
            m[i] = slots.value(i);
            keep(m[i]); // else it is made for each row
        }
#pragma unroll
        for (uint r = 0; r < 4*QB; ++r) {
            float values[SLOTS];
            load_floats(values, q + (half_of*SLOTS + r*(D/32))*query_step);
#pragma unroll
            for (uint i = 0; i < SLOTS; ++i) {
                dots[r] = fmaf(values[i], m[i], dots[r]);
            }
        }
    }

    // q.m of the lane's query rows, in units of `unit`.
    __device__ __forceinline__ void make_base(float unit, uint t) {
        const bool framed = (__shfl_sync(KV_ALL_LANES, firsts[0], 0) & KV_DELTA_FRAMED) != 0;
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            // Rows 2 (t % 2) and the next, then one of them, t/2, and at last both again.
            const auto exchanged = [&](float first, float second, uint which, uint n) {
                return (which ? second : first) + __shfl_xor_sync(KV_ALL_LANES, which ? first : second, n);
            };
            const float * const of = dots + 4*qb;
            float x = exchanged(exchanged(of[0], of[2], t % 2, 1), exchanged(of[1], of[3], t % 2, 1), t/2, 2);
#pragma unroll
            for (uint n = 4; n < 32; n *= 2) {
                x += __shfl_xor_sync(KV_ALL_LANES, x, n);
            }
            x = framed ? unit*x : 0.0f;
            const float y = __shfl_xor_sync(KV_ALL_LANES, x, 2);
            base[qb][0] = t/2 ? y : x;
            base[qb][1] = t/2 ? x : y;
        }
    }

    // Do all of its cells hang on the one before? The first, which has none before it, begins with the I-frame.
    __device__ __forceinline__ bool is_whole(uint lane) const {
        static_assert(KV_DELTA_CHAINED == 3 && KV_DELTA_RESTART == 2, "");
        return __all_sync(KV_ALL_LANES, ((firsts[0] | (lane == 0 ? 1 : 0)) & firsts[1] & 3) == 3);
    }

    // What its cells are, if not.
    __device__ __forceinline__ void find_kinds() {
#pragma unroll
        for (uint i = 0; i < 4; ++i) {
            kinds[i/2][i % 2] = __ballot_sync(KV_ALL_LANES, (firsts[i % 2] >> i/2 & 1) != 0);
        }
    }

    // From q.d to scores in such a group.
    template <uint STEPS, typename Chain> __device__ __forceinline__ void follow_whole(const Chain & cells, uint lane, float (&s)[QB][4]) {
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            float & x = s[i/2][i % 2], & y = s[i/2][i % 2 + 2];
            cells.follow(x, y, carry[i/2][i % 2], lane);
            x += base[i/2][i % 2];
            y += base[i/2][i % 2];
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
            follow_by<STEPS>(factor[0], factor[1], whole, inner, STEPS == 2 ? __shfl_sync(KV_ALL_LANES, whole[1], 28 + lane % 2) : 0.0f, w0, w1, before, lane);
        }
    };

    template <uint STEPS> static __device__ __forceinline__ void follow_by(
            const float (&factor0)[3], const float (&factor1)[3], const float (&whole)[2], float inner, float of_16, float & w0, float & w1, float & before, uint lane) {
        const uint t = lane % 4, last = 28 + (STEPS == 2 ? t % 2 : t);
#pragma unroll
        for (uint j = 0; j < 3; ++j) {
            w0 = fmaf(factor0[j], __shfl_up_sync(KV_ALL_LANES, w0, 4u << j), w0);
            w1 = fmaf(factor1[j], __shfl_up_sync(KV_ALL_LANES, w1, 4u << j), w1);
        }
        w1 = fmaf(inner, __shfl_sync(KV_ALL_LANES, w0, 28 + t), w1);
        if (STEPS == 2) {
            // what the first 16 leave, with what came before them
            const float left = fmaf(of_16, before, __shfl_sync(KV_ALL_LANES, w1, last));
            before = t/2 ? left : before;
        }
        w0 = fmaf(whole[0], before, w0);
        w1 = fmaf(whole[1], before, w1);
        before = __shfl_sync(KV_ALL_LANES, w1, last + (STEPS == 2 ? 2 : 0));
    }

  public:
    // The same where all hang on the one before: made once.
    template <uint STEPS> struct whole_chain {
        float factor[3], whole[2];

        __device__ __forceinline__ explicit whole_chain(uint lane) {
            const uint g = lane/4;
            const float one = KV_DELTA_RHO, two = one*one, four = two*two;
            factor[0] = g >= 1 ? one : 0.0f;
            factor[1] = g >= 2 ? two : 0.0f;
            factor[2] = g >= 4 ? four : 0.0f;
            whole[0]  = exp2f((float) (g + 1)*log2f(KV_DELTA_RHO));
            whole[1]  = whole[0]*(four*four);
        }

        __device__ __forceinline__ void follow(float & w0, float & w1, float & before, uint lane) const {
            constexpr float one = KV_DELTA_RHO, two = one*one, four = two*two, eight = four*four;
            follow_by<STEPS>(factor, factor, whole, whole[0], eight*eight, w0, w1, before, lane);
        }
    };
};

}  // namespace
}  // namespace kv
