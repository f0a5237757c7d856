// Rows of polar (kv_polar.h) as operands of f16 tensor cores: K as in decode_halves.cuh, V as in decode_values.cuh.
//
// A lane has two neighbouring pairs of a block of 16 values, which share all weights but that of level 2. So one lookup has the weights of both, by
// six bits: two of each of three levels, cosines turned to sines where the pairs' places ask for it. Another lookup for each pair has its
// direction. Both tables lie in shared memory, with a copy for each lane, so that no two lanes meet in a bank.
//
// The radius of a block is a scale of its sums where it is K, and of the weights where it is V. Rows of heads of 64
// begin at any byte, others at even ones.
#pragma once

#include "decode_halves.cuh"
#include "decode_values.cuh"

namespace kv {
namespace {

// Entries of the tables, 128 bytes apart, and all of them.
constexpr uint POLAR_WEIGHTS = 64, POLAR_DIRECTIONS = 16, POLAR_BYTES = (POLAR_WEIGHTS + POLAR_DIRECTIONS)*128;

struct polar_table {
    uint at; // the lane's copy of the first entry, an address of shared memory

    __device__ __forceinline__ uint weights(uint index) const { return shared_word(at + index*128); }
    __device__ __forceinline__ uint direction(uint code) const { return shared_word(at + (POLAR_WEIGHTS*128 + code*128)); }
};

__device__ __forceinline__ void fill_polar_table(uint * table, uint bits, uint thread, uint threads) {
    for (uint i = thread; i < POLAR_BYTES/4; i += threads) {
        const uint entry = i/32;
        vec2 two = 0.0f;
        if (entry < POLAR_WEIGHTS) {
            const float of_both = kv_polar_cosines[8 + entry/16]*kv_polar_cosines[4 + entry/4 % 4];
            two = vec2(of_both*kv_polar_cosines[entry % 4], of_both*kv_polar_cosines[3 - entry % 4]);
        } else {
            two = kv_polar_direction(bits, entry - POLAR_WEIGHTS);
        }
        const __half2 pair = __floats2half2_rn(two.x, two.y);
        table[i] = *(const uint *) &pair;
    }
}

// Two bytes at any address.
template <typename Bytes, uint D> __device__ __forceinline__ uint two_bytes(const uint8_t * from) {
    if constexpr (D == 64) {
        return Bytes::template at<uint8_t>(from) | (uint) Bytes::template at<uint8_t>(from + 1) << 8;
    } else {
        return Bytes::template at<unsigned short>(from);
    }
}

// What a lane has of a row: pairs 2 `quarter` and the next of every STRIDE-th block from `first` on.
template <uint KIND, uint D, uint STRIDE> struct polar_row {
    static constexpr uint BITS = KIND == KV_KIND_POLAR4 ? 4 : 3, BLOCKS = D/16, COUNT = BLOCKS/STRIDE;
    static constexpr uint UPPER_AT = 2*BLOCKS, FIRST_AT = UPPER_AT + (14*BLOCKS + 7)/8, WORDS = (14*BLOCKS + 31)/32;
    static_assert(STRIDE <= 2, "codes of a block are found in two words");
    static_assert(UPPER_AT + STRIDE - 1 + 4*(WORDS + 1) <= level_row_bytes(KIND, D), "more codes follow in the row");

    uint upper[WORDS + 1], shift; // of words around them: more codes follow in the row
    uint codes[COUNT], radii[COUNT];

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * row, uint quarter, uint first) {
        // The second block begins a byte and six bits further on.
        const uint8_t * from = row + UPPER_AT + first;
        const uint odd = (uint) (uintptr_t) from & 3;
        shift = 8*odd + 6*first;
#pragma unroll
        for (uint i = 0; i <= WORDS; ++i) {
            upper[i] = Bytes::template at<uint>(from - odd + 4*i);
        }
#pragma unroll
        for (uint i = 0; i < COUNT; ++i) {
            const uint block = STRIDE*i + first;
            radii[i] = two_bytes<Bytes, D>(row + 2*block);
            if constexpr (BITS == 4) {
                codes[i] = Bytes::template at<uint8_t>(row + FIRST_AT + 4*block + quarter);
            } else {
                // Six bits, from bit 6 `quarter` of three bytes on, of the two bytes that hold them.
                const uint8_t * at = row + FIRST_AT + 3*block + quarter/2;
                codes[i] = (Bytes::template at<uint8_t>(at) | (uint) Bytes::template at<uint8_t>(at + 1) << 8) >> (6*quarter - quarter/2*8);
            }
        }
    }

    // Words from their bytes, before they are used.
    __device__ __forceinline__ void join() {
#pragma unroll
        for (uint i = 0; i < WORDS; ++i) {
            upper[i] = __funnelshift_r(upper[i], upper[i + 1], shift);
        }
    }

    // Weights of both pairs of the lane's i-th block.
    __device__ __forceinline__ uint weights_of(uint i, uint quarter, const polar_table & table) const {
        const uint bit = 14*STRIDE*i, word = bit/32, by = bit % 32;
        const uint x = by <= 18 ? upper[word] >> by : __funnelshift_r(upper[word], upper[word + 1 < WORDS ? word + 1 : word], by);
        const uint mirrored = (quarter % 2 != 0 ? 0x0c : 0) | (quarter/2 != 0 ? 0x30 : 0);
        return table.weights((choose(0x03, x >> 2*quarter, choose(0x0c, x >> (6 + quarter/2*2), x >> 8)) & 0x3f) ^ mirrored);
    }

    // Both pairs, times these weights.
    __device__ __forceinline__ void pairs_of(uint i, uint weights, const polar_table & table, uint & first, uint & second) const {
        constexpr uint MASK = (1 << BITS) - 1;
        const __half2 & two = *(const __half2 *) &weights;
        const __half2 low = __low2half2(two), high = __high2half2(two);
        first  = times(table.direction(codes[i] & MASK), *(const uint *) &low);
        second = times(table.direction(codes[i] >> BITS & MASK), *(const uint *) &high);
    }
};

// Keys: lane t of four has pairs 2t and 2t + 1 of all blocks, which are values 4t to 4t + 3.
template <uint KIND, uint D, uint QB> struct decode_polar_keys {
    typedef decode_half_keys<D, QB>  halves;
    typedef polar_row<KIND, D, 1>    row_of;
    static constexpr bool CHOOSES_SCALES = false, JOINED = false, ROW_FOR_LANE = false;
    static constexpr uint BLOCKS = D/16, CELL_SCALES = BLOCKS, LANE_SCALES = BLOCKS;

    struct queries : halves::queries {
        polar_table table; // set where shared memory is known
    };

    typedef typename halves::loaded_queries loaded_queries;

    row_of rows[2];

    static __device__ __forceinline__ uint lane_scales_at(uint) { return 0; }
    static __device__ __forceinline__ uint scale_number(uint block, uint) { return block; }
    static __device__ __forceinline__ uint codes_at(uint) { return 0; }
    static __device__ __forceinline__ uint shift_of(uint) { return 0; }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * first_row, const uint8_t *, uint step, uint cell, uint last, uint g, uint = 0) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            rows[n].template load<Bytes>(first_row + (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step, threadIdx.x % 4, 0);
        }
    }

    __device__ __forceinline__ void join() {
        rows[0].join();
        rows[1].join();
    }

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint g) {
        halves::fill(q, from, g);
    }

    __device__ __forceinline__ float scale_of(uint n, uint block, uint) const {
        return norm_of(rows[n].radii[block]);
    }

    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint t, const Scales & scale_of, float (&s)[QB][4]) const {
#pragma unroll
        for (uint block = 0; block < BLOCKS; ++block) {
            uint a[4];
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                rows[n].pairs_of(block, rows[n].weights_of(block, t, q.table), q.table, a[n], a[n + 2]);
            }
            const float s0 = scale_of(0, block, 0), s1 = scale_of(1, block, 0);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                float sums[4] = {};
                mma_f16(sums, a, q.b[block][qb][0], q.b[block][qb][1]);
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    s[qb][i] = block == 0 ? (i < 2 ? s0 : s1)*sums[i] : fmaf(i < 2 ? s0 : s1, sums[i], s[qb][i]);
                }
            }
        }
        by_planes<QB>(t, s);
    }
};

// Values: of each two blocks lanes g < 4 have the first and the others the second, pairs 2 (g % 4) and the next. A register is a pair of a cell:
// four columns of the weights are for its first value, with zeros where the second is multiplied, and four for its second.
template <uint KIND, uint D> struct decode_polar_values {
    typedef polar_row<KIND, D, 2> row_of;
    static constexpr bool JOINED = false;
    static constexpr uint C = D/64, CHUNKS = C, WIDTH = D, ROW_STEP = 2, SCALE_WORDS = 1, SLACK = 3, TABLE_BYTES = 0;

    row_of rows[4];

    static __device__ __forceinline__ float unit_of(uint) { return 1.0f; }
    static __device__ __forceinline__ uint  shift_of(uint) { return 0; }
    static __device__ __forceinline__ uint  codes_at(uint) { return 0; }

    template <typename Table> static __device__ __forceinline__ polar_table table_of(const Table & of_lane) {
        return { of_lane().at };
    }

    static __device__ __forceinline__ uint value_of(uint i, uint g, uint t) {
        return 16*(i/4*2 + g/4) + 4*(g % 4) + i/2 % 2*2 + t/2;
    }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * first_row, const uint8_t *, uint step, uint cell, uint last, uint t, uint = 0) {
        const uint g = threadIdx.x % 32/4;
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            rows[n].template load<Bytes>(first_row + (Bytes::ENDS ? min(cell + t + 4*n, last) : cell + t + 4*n)*step, g % 4, g/4);
        }
    }

    __device__ __forceinline__ void join() {
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            rows[n].join();
        }
    }

    // Scales are in the rows' halves, not in the weights.
    template <typename Scales> __device__ __forceinline__ void scales_of(uint, uint, Scales &) const {}

    template <uint QB, typename Table, typename Scales> __device__ __forceinline__ void add(const ::uint2 (&weights)[QB], const Table & table, uint g, const Scales &, float (&acc)[QB][C][2][4]) const {
        const uint of_lane = 0x3c003c00 & half_of_lane(g);
#pragma unroll
        for (uint half_of = 0; half_of < 2; ++half_of) {
            uint b[QB][2];
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                b[qb][0] = half_times(weights[qb].x, half_of, of_lane);
                b[qb][1] = half_times(weights[qb].y, half_of, of_lane);
            }
#pragma unroll
            for (uint i = 0; i < 2*C; ++i) {
                uint a[4];
#pragma unroll
                for (uint n = 0; n < 2; ++n) {
                    const row_of & row = rows[2*half_of + n];
                    const uint radius = finite_or_zero(prmt(row.radii[i], 0, 0x1010));
                    row.pairs_of(i, times(row.weights_of(i, g % 4, table), radius), table, a[2*n], a[2*n + 1]);
                }
#pragma unroll
                for (uint qb = 0; qb < QB; ++qb) {
                    mma_f16(acc[qb][i/2][i % 2], a, b[qb][0], b[qb][1]);
                }
            }
        }
    }
};

}  // namespace
}  // namespace kv
