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

// How a lane's cell hangs on those before it, of eight that follow each other: cell g is the lane's.
struct chained_cells {
    float factor[3]; // of w of the cell 1, 2 and 4 before
    float reach;     // of that before the eight
    float through;   // the same of the last of them

    __device__ __forceinline__ chained_cells() {}

    // `chained` has a bit for each of them that hangs on the one before.
    __device__ __forceinline__ chained_cells(uint g, uint chained) {
        const float one = KV_DELTA_RHO, two = one*one, four = two*two;
        const auto all = [&](uint count) { return g >= count && (~chained >> (g - count + 1) & ((1u << count) - 1)) == 0; };
        factor[0] = all(1) ? one : 0.0f;
        factor[1] = all(2) ? two : 0.0f;
        factor[2] = all(4) ? four : 0.0f;
        reach     = (~chained & ((2u << g) - 1)) == 0 ? exp2f((float) (g + 1)*log2f(KV_DELTA_RHO)) : 0.0f;
        through   = chained == 0xff ? four*four : 0.0f;
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
    float base[QB];     // q.m
    float carry[QB];    // w of the cell before, as if nothing but residuals counted
    float left_out;     // the part of m that the cell before is without

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            dots[i] = 0.0f;
        }
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            carry[qb] = 0.0f;
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
            // A lane's row t: first one of two, with the lane beside it, and then one of these, with the lane two away.
            const auto exchanged = [&](float first, float second, uint which, uint n) {
                return (which ? second : first) + __shfl_xor_sync(KV_ALL_LANES, which ? first : second, n);
            };
            const float * const of = dots + 4*qb;
            float x = exchanged(exchanged(of[0], of[1], t % 2, 1), exchanged(of[2], of[3], t % 2, 1), t/2, 2);
#pragma unroll
            for (uint n = 4; n < 32; n *= 2) {
                x += __shfl_xor_sync(KV_ALL_LANES, x, n);
            }
            base[qb] = framed ? unit*x : 0.0f;
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
    template <uint STEPS> __device__ __forceinline__ void follow_whole(const chained_cells & cells, uint lane, float (&s)[STEPS][QB][2]) {
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            float w[2*STEPS];
            follow_cells(w, s, qb, [&](uint) { return cells; }, carry[qb], lane);
#pragma unroll
            for (uint i = 0; i < 2*STEPS; ++i) {
                s[i/2][qb][i % 2] = w[i] + base[qb];
            }
        }
    }

    // From q.d of cells g, g + 8 and so on, behind the `first` of the group, to products with what the cells have beside m.
    template <uint STEPS> __device__ __forceinline__ void follow(uint first, uint lane, float (&s)[STEPS][QB][2]) {
        chained_cells cells[2*STEPS];
        find_chains(cells, first, lane);
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
            float w[2*STEPS];
            follow_cells(w, s, qb, [&](uint i) { return cells[i]; }, carry[qb], lane);
#pragma unroll
            for (uint i = 0; i < 2*STEPS; ++i) {
                s[i/2][qb][i % 2] = w[i];
            }
        }
    }

    // And from those to the scores of their keys.
    template <uint STEPS> __device__ __forceinline__ void add_base(uint first, uint lane, float (&s)[STEPS][QB][2]) {
        const uint g = lane/4, low = of_half(kinds[0], first) >> first % 32, high = of_half(kinds[1], first) >> first % 32;
        float part[2*STEPS];
#pragma unroll
        for (uint i = 0; i < 2*STEPS; ++i) {
            part[i] = 1.0f;
        }
        if (((kinds[0][0] & ~kinds[1][0]) | (kinds[0][1] & ~kinds[1][1])) != 0) {
            // A row alone is without m, and those that hang on it are without a part of it.
            float alone[STEPS][1][2];
#pragma unroll
            for (uint i = 0; i < 2*STEPS; ++i) {
                alone[i/2][0][i % 2] = (low & ~high) >> (g + 8*i) & 1 ? 1.0f : 0.0f;
            }
            chained_cells cells[2*STEPS];
            find_chains(cells, first, lane);
            float without[2*STEPS];
            follow_cells(without, alone, 0, [&](uint i) { return cells[i]; }, left_out, lane);
#pragma unroll
            for (uint i = 0; i < 2*STEPS; ++i) {
                part[i] -= without[i];
            }
        }
#pragma unroll
        for (uint i = 0; i < 2*STEPS*QB; ++i) {
            const uint n = i/QB, qb = i % QB;
            float & x = s[n/2][qb][n % 2];
            x = ((low | high) >> (g + 8*n) & 1) != 0 ? fmaf(part[n], base[qb], x) : 0.0f;
        }
    }

  private:
    static __device__ __forceinline__ uint of_half(const uint (&words)[2], uint first) {
        return first >= 32 ? words[1] : words[0];
    }

    // What the lane's cells are in the scan over those from `first` on, eight at a time.
    template <uint COUNT> __device__ __forceinline__ void find_chains(chained_cells (&cells)[COUNT], uint first, uint lane) const {
        static_assert(KV_DELTA_EMPTY == 0 && KV_DELTA_ALONE == 1 && KV_DELTA_CHAINED == 3, "");
        const uint low = of_half(kinds[0], first), high = of_half(kinds[1], first);
        // The first of a group has none before it, and nothing is carried to it.
        const uint before = (low | high) << 1 | (first >= 32 ? (kinds[0][0] | kinds[1][0]) >> 31 : 0);
        const uint chained = (low & high & before) >> first % 32; // a bit for each that hangs on the one before
#pragma unroll
        for (uint i = 0; i < COUNT; ++i) {
            cells[i] = chained_cells(lane/4, chained >> 8*i & 0xff);
        }
    }

    // w of the lane's cells from their q.d, and of the cell before them all: each eight by themselves, and then what the eight before leave.
    template <uint STEPS, uint BLOCKS, typename Cells> static __device__ __forceinline__ void follow_cells(
            float (&w)[2*STEPS], const float (&s)[STEPS][BLOCKS][2], uint qb, const Cells & cells_of, float & before, uint lane) {
        float left[2*STEPS];
#pragma unroll
        for (uint i = 0; i < 2*STEPS; ++i) {
            const chained_cells cells = cells_of(i);
            w[i] = s[i/2][qb][i % 2];
#pragma unroll
            for (uint j = 0; j < 3; ++j) {
                w[i] = fmaf(cells.factor[j], __shfl_up_sync(KV_ALL_LANES, w[i], 4u << j), w[i]);
            }
            left[i] = __shfl_sync(KV_ALL_LANES, w[i], 28 + lane % 4);
        }
#pragma unroll
        for (uint i = 0; i < 2*STEPS; ++i) {
            const chained_cells cells = cells_of(i);
            w[i]   = fmaf(cells.reach, before, w[i]);
            before = fmaf(cells.through, before, left[i]);
        }
    }
};

}  // namespace
}  // namespace kv
