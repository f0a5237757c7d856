// Rows of polar (kv_polar.h) as operands of f16 tensor cores: K as in decode_halves.cuh, V as in decode_values.cuh.
//
// A lane has whole blocks of 16 values that follow each other in the row (of V of 64 values a half), so that its codes are a few words, and where
// they are in these is known when this is compiled. Two neighbouring pairs share all weights but that of level 2: one lookup has the weights of both, by
// six bits, two of each of three levels, cosines turned to sines where the pairs' places ask for it. Another lookup for each pair has its
// direction. Both tables lie in shared memory, with a copy for each lane, so that no two lanes meet in a bank. The radius is a factor of the weights.
//
// Rows of heads of 64 begin at any byte, others at even ones.
#pragma once

#include "decode_halves.cuh"
#include "decode_values.cuh"

namespace kv {
namespace {

// Entries of the tables, 128 bytes apart, and all of them.
constexpr uint POLAR_WEIGHTS = 64, POLAR_DIRECTIONS = 16, POLAR_BYTES = (POLAR_WEIGHTS + POLAR_DIRECTIONS)*128;

// An entry's place is the lane's, with the number of the entry from bit 7 on. Where the table lies at a multiple of the bytes of all weights, places are
// addresses of shared memory; elsewhere it begins at one.
struct polar_table {
    uint of_lane, begin;

    __device__ __forceinline__ uint weights(uint place) const { return shared_word(begin + place); }
    __device__ __forceinline__ uint direction(uint place) const { return weights(place + POLAR_WEIGHTS*128); }
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

// COUNT bits of a row: the words that they lie in, of which the first has up to MOST others before them.
template <uint COUNT, uint MOST> struct row_bits {
    static constexpr uint KEPT = (COUNT + 31)/32, WORDS = (COUNT + MOST + 31)/32;

    uint words[WORDS], shift;

    // `at` bits behind a word. Words that none of them lie in are not read.
    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * word, uint at) {
        const uint8_t * from = word + at/32*4;
        shift = at % 32;
#pragma unroll
        for (uint i = 0; i < WORDS; ++i) {
            words[i] = Bytes::template at<uint>(from + 4*(32*i < COUNT ? i : min(i, (shift + COUNT - 1)/32)));
        }
    }

    __device__ __forceinline__ void join() {
#pragma unroll
        for (uint i = 0; i < KEPT; ++i) {
            words[i] = i + 1 < WORDS ? __funnelshift_r(words[i], words[i + 1 < WORDS ? i + 1 : i], shift) : words[i] >> shift;
        }
    }

    // The n bits from this one on, and perhaps others above them.
    __device__ __forceinline__ uint from(uint bit, uint n) const {
        const uint i = bit/32, by = bit % 32;
        return by + n <= 32 ? words[i] >> by : __funnelshift_r(words[i], words[i + 1 < WORDS ? i + 1 : i], by);
    }
};

// Two bytes at any address.
template <typename Bytes, uint D> __device__ __forceinline__ uint two_bytes(const uint8_t * from) {
    if constexpr (D == 64) {
        return Bytes::template at<uint8_t>(from) | (uint) Bytes::template at<uint8_t>(from + 1) << 8;
    } else {
        return Bytes::template at<unsigned short>(from);
    }
}

// What one of LANES lanes has of a row.
template <uint KIND, uint D, uint LANES> struct polar_part {
    static constexpr uint BITS = KIND == KV_KIND_POLAR4 ? 4 : 3, PAIRS = D/2/LANES, HALVES = PAIRS/4, BLOCKS = (HALVES + 1)/2;
    static constexpr uint UPPER_AT = D/16*2, FIRST_AT = UPPER_AT + (14*(D/16) + 7)/8, FIRST = BITS*PAIRS;
    static constexpr bool SHARED = HALVES == 1; // two lanes have a block

    row_bits<14*BLOCKS, 30>                                                 upper;
    row_bits<FIRST, FIRST % 8 != 0 ? 28 : FIRST % 16 != 0 || D == 64 ? 24 : 16> codes;
    uint radii[BLOCKS];

    // Of the row that begins `odd` bytes behind a word.
    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * word, uint odd, uint lane) {
        const uint block = SHARED ? lane/2 : BLOCKS*lane;
#pragma unroll
        for (uint i = 0; i < BLOCKS; ++i) {
            radii[i] = two_bytes<Bytes, D>(word + odd + 2*(block + i));
        }
        upper.template load<Bytes>(word, 8*(odd + UPPER_AT) + 14*block);
        codes.template load<Bytes>(word, 8*(odd + FIRST_AT) + FIRST*lane);
    }

    // Words from their bytes, before they are used.
    __device__ __forceinline__ void join() {
        upper.join();
        codes.join();
    }

    // Four pairs, the i-th of the lane's.
    __device__ __forceinline__ void pairs_of(uint i, uint lane, const polar_table & table, uint (&pairs)[4]) const {
        const uint block = i/2, half = SHARED ? lane % 2 : i % 2, x = upper.from(14*block, 14), first = codes.from(4*BITS*i, 4*BITS);
        const uint radius = finite_or_zero(prmt(radii[block], 0, 0x1010));
        const uint level_2 = x >> 4*half, level_3 = x >> 2*half << 1, level_4 = (half ? ~x : x) >> 1;
        const uint of_both = choose(0x1800, level_4, table.of_lane);
        const uint weights[2] = { times(table.weights(choose(0x180, level_2 << 7, choose(0x600, level_3, of_both))), radius),
                                  times(table.weights(choose(0x180, level_2 << 5, choose_not(0x600, level_3, of_both))), radius) };
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint code = BITS*n <= 7 ? first << (7 - BITS*n) : first >> (BITS*n - 7);
            pairs[n] = half_times(weights[n/2], n % 2, table.direction(choose(((1 << BITS) - 1) << 7, code, table.of_lane)));
        }
    }
};

// Rows of cells `apart` from each other, a multiple of four, from this one on: all begin as far behind a word.
template <typename Bytes, uint COUNT, typename Part> __device__ __forceinline__ void load_parts(Part (&parts)[COUNT], const uint8_t * first_row, uint step, uint cell, uint apart, uint last, uint lane) {
    const uint8_t * from = first_row + cell*step;
    const uint odd_of_all = (uint) (uintptr_t) from & 3;
#pragma unroll
    for (uint n = 0; n < COUNT; ++n) {
        const uint8_t * row = Bytes::ENDS ? first_row + min(cell + apart*n, last)*step : from + apart*n*step;
        const uint odd = Bytes::ENDS ? (uint) (uintptr_t) row & 3 : odd_of_all;
        parts[n].template load<Bytes>(row - odd, odd, lane);
    }
}

// Keys: lane t of four has a quarter of a row, four values of it in each product.
template <uint KIND, uint D, uint QB> struct decode_polar_keys {
    typedef polar_part<KIND, D, 4> part;
    static constexpr bool JOINED = false;
    static constexpr uint STEPS = D/16, CELL_SCALES = 1; // which nobody asks for: radii are in the weights

    struct queries : decode_half_keys<D, QB>::queries {
        polar_table table; // set where shared memory is known
    };

    struct loaded_queries : decode_half_keys<D, QB>::loaded_queries {
        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
            load_query_words(this->words, planes, g, [&](uint step) { return D/4*t + 4*step; });
        }
    };

    part rows[2];

    static __device__ __forceinline__ uint scale_number(uint, uint) { return 0; }
    static __device__ __forceinline__ uint codes_at(uint) { return 0; }
    static __device__ __forceinline__ uint shift_of(uint) { return 0; }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * first_row, const uint8_t *, uint step, uint cell, uint last, uint g, uint = 0) {
        load_parts<Bytes>(rows, first_row, step, cell + g, 8, last, threadIdx.x % 4);
    }

    __device__ __forceinline__ void join() {
        rows[0].join();
        rows[1].join();
    }

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint g) {
        decode_half_keys<D, QB>::fill(q, from, g);
    }

    __device__ __forceinline__ float scale_of(uint, uint, uint) const {
        return 1.0f;
    }

    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint t, const Scales &, float (&s)[QB][2]) const {
        float sums[2][QB][4] = {}; // of every other step: none waits for the one before
#pragma unroll
        for (uint i = 0; i < part::HALVES; ++i) {
            uint pairs[2][4];
            rows[0].pairs_of(i, t, q.table, pairs[0]);
            rows[1].pairs_of(i, t, q.table, pairs[1]);
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                const uint a[4] = { pairs[0][2*n], pairs[1][2*n], pairs[0][2*n + 1], pairs[1][2*n + 1] };
#pragma unroll
                for (uint qb = 0; qb < QB; ++qb) {
                    mma_f16(sums[n][qb], a, q.b[2*i + n][qb][0], q.b[2*i + n][qb][1]);
                }
            }
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            const auto sum = [&](uint plane) { return sums[0][i/2][i % 2*2 + plane] + sums[1][i/2][i % 2*2 + plane]; };
            s[i/2][i % 2] = joined_planes(sum(0), sum(1));
        }
    }
};

// Values: lane g of eight has an eighth of a row. A register is a pair of a cell: even columns of the weights are for its first value, with zeros where the
// second is multiplied, odd ones for its second.
template <uint KIND, uint D> struct decode_polar_values {
    typedef polar_part<KIND, D, 8> part;
    static constexpr bool JOINED = false, IN_A_ROW = true;
    static constexpr uint C = D/64, CHUNKS = C, WIDTH = D, SCALE_WORDS = 1, SLACK = 3, TABLE_BYTES = 0;

    part rows[4];

    static __device__ __forceinline__ float unit_of(uint) { return 1.0f; }
    static __device__ __forceinline__ uint  shift_of(uint) { return 0; }
    static __device__ __forceinline__ uint  codes_at(uint) { return 0; }

    template <typename Table> static __device__ __forceinline__ polar_table table_of(const Table & table) {
        return table();
    }

    static __device__ __forceinline__ uint value_of(uint i, uint g) {
        return D/8*g + i;
    }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * first_row, const uint8_t *, uint step, uint cell, uint last, uint t, uint = 0) {
        load_parts<Bytes>(rows, first_row, step, cell + t, 4, last, threadIdx.x % 32/4);
    }

    __device__ __forceinline__ void join() {
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            rows[n].join();
        }
    }

    // Radii are in the rows' halves, not in the weights.
    template <typename Scales> __device__ __forceinline__ void scales_of(uint, uint, Scales &) const {}

    template <uint QB, typename Scales> __device__ __forceinline__ void add(const ::uint2 (&weights)[QB], const polar_table & table, uint g, const Scales &, float (&acc)[QB][C][2][4]) const {
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
            for (uint i = 0; i < part::HALVES; ++i) {
                uint pairs[2][4];
                rows[2*half_of].pairs_of(i, g, table, pairs[0]);
                rows[2*half_of + 1].pairs_of(i, g, table, pairs[1]);
#pragma unroll
                for (uint n = 0; n < 2; ++n) {
                    const uint a[4] = { pairs[0][2*n], pairs[0][2*n + 1], pairs[1][2*n], pairs[1][2*n + 1] };
#pragma unroll
                    for (uint qb = 0; qb < QB; ++qb) {
                        mma_f16(acc[qb][i][n], a, b[qb][0], b[qb][1]);
                    }
                }
            }
        }
    }
};

}  // namespace
}  // namespace kv
