// Keys that end in signs: qjl1, which has nothing else, and turbo, whose levels come before them.
//
// A sign is one byte of an operand, 1 or -1. A lane has a fourth of a row's, as they lie: of the word that holds them, bits i of its bytes are
// four values of one register, so that a shift, a mask and a multiplication make them. Queries have the same order. All signs of a row
// have one scale, so that their products are added up as integers.
#pragma once

#include "decode_keys.cuh"

namespace kv {
namespace {

// Four bytes, 1 or -1, for bits i of the bytes of a word.
__device__ __forceinline__ uint signs_of(uint word, uint i) {
    return (word >> i & 0x01010101)*0xfe + 0x01010101;
}

// What a sign of a row is multiplied by, beside its norm.
template <uint D> __device__ __forceinline__ float sign_unit() {
    return kv_mean_magnitudes[kv_size_index(D)];
}

// Signs of 16 rows: of cells g and g + 8 a lane has D/4 values each, from t*D/4 on.
template <uint D, uint QB> struct decode_signs {
    static constexpr uint STEPS = D/32, WORDS = D <= 128 ? 1 : D/128; // of a product; of a lane's part of a row
    static constexpr uint BYTES = D/32;                               // of that part

    struct queries {
        uint b[STEPS][QB][2]; // [product][block of rows][half of the 32 values]
    };

    uint words[2][WORDS];

    // ALIGNED: signs begin at a multiple of four bytes, else of two.
    template <typename Bytes, bool ALIGNED> __device__ __forceinline__ void load(uint n, const uint8_t * from) {
#pragma unroll
        for (uint i = 0; i < WORDS; ++i) {
            if constexpr (D == 64) {
                words[n][i] = Bytes::template at<unsigned short>(from);
            } else if constexpr (ALIGNED) {
                words[n][i] = Bytes::template at<uint>(from + 4*i);
            } else {
                words[n][i] = Bytes::template at<unsigned short>(from + 4*i) | (uint) Bytes::template at<unsigned short>(from + 4*i + 2) << 16;
            }
        }
    }

    // What the lane needs of the queries, as it lies in their planes, from value FIRST on.
    template <uint FIRST> struct loaded_queries {
        uint words[D/16][QB];

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
            load_query_words(words, planes, g, [&](uint step) { return FIRST + D/4*t + 4*step; });
        }

        __device__ __forceinline__ void fill(queries & q) const {
#pragma unroll
            for (uint i = 0; i < 2*STEPS*QB; ++i) {
                const uint half_of = i % 2, qb = i/2 % QB, step = i/2/QB;
                // Byte `at` of four words, and which they are: of D = 64 every word, else every other one.
                const uint at = D == 64 ? step + 2*half_of : step % 4, first = D == 64 ? 0 : step/4*8 + half_of, apart = D == 64 ? 1 : 2;
                const uint low = prmt(words[first][qb], words[first + apart][qb], at | (4 + at) << 4), high = prmt(words[first + 2*apart][qb], words[first + 3*apart][qb], at | (4 + at) << 4);
                uint & b = q.b[step][qb][half_of];
                b = prmt(low, high, 0x5410);
                keep(b);
            }
        }
    };

    // Products of all signs with the queries, times what those of cell g and of cell g + 8 are multiplied by.
    __device__ __forceinline__ void products(const queries & q, float scale, float scale_behind, float (&s)[QB][2]) const {
        int sums[QB][4];
#pragma unroll
        for (uint step = 0; step < STEPS; ++step) {
            uint a[4];
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                // Of D = 64 bits of a nibble are those of a byte.
                const uint word = D == 64 ? prmt(words[n][0], words[n][0] >> 4, 0x5140) : words[n][step/4], i = step % 4;
                a[n]     = signs_of(word, i);
                a[n + 2] = signs_of(word, D == 64 ? i + 2 : i + 4);
            }
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                step == 0 ? first_mma_s8(sums[qb], a, q.b[step][qb][0], q.b[step][qb][1]) : mma_s8(sums[qb], a, q.b[step][qb][0], q.b[step][qb][1]);
            }
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            s[i/2][i % 2] = (i % 2 == 0 ? scale : scale_behind)*joined_planes(sums[i/2][i % 2*2], sums[i/2][i % 2*2 + 1]);
        }
    }
};

// qjl1, as decode_keys has other rows. Its scale is its norm; the unit of signs is that of all scores.
template <uint D, uint QB> struct decode_qjl_keys {
    static constexpr bool JOINED = false;
    static constexpr uint CELL_SCALES = 1;

    typedef decode_signs<D, QB> signs_of_rows;
    typedef typename signs_of_rows::queries queries;

    uint          norms[2];
    signs_of_rows signs;

    static __device__ __forceinline__ uint scale_number(uint, uint) { return 0; }
    static __device__ __forceinline__ uint codes_at(uint t) { return KV_QJL_NORM_BYTES + signs_of_rows::BYTES*t; }
    static __device__ __forceinline__ uint shift_of(uint) { return 0; }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g, uint = 0) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step;
            norms[n] = Bytes::template at<unsigned short>(rows + at); // of a tile nobody needs it
            signs.template load<Bytes, false>(n, codes_of + at);
        }
    }

    __device__ __forceinline__ void join() {}

    struct loaded_queries {
        typename signs_of_rows::template loaded_queries<0> of_signs;

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
            of_signs.load(planes, g, t);
        }
    };

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint) {
        from.of_signs.fill(q);
    }

    __device__ __forceinline__ float scale_of(uint n, uint, uint) const {
        return norm_of(norms[n]);
    }

    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint, const Scales & scale_of, float (&s)[QB][2]) const {
        signs.products(q, scale_of(0, 0, 0), scale_of(1, 0, 0), s);
    }
};

// turbo: its levels as decode_keys has them, with the norm of the row as their only scale, and signs, whose scale is the other norm in units of
// the levels.
template <uint KIND, uint D, uint QB> struct decode_turbo_keys {
    static constexpr bool JOINED = false;
    static constexpr uint CELL_SCALES = 2;

    typedef decode_keys<KIND, D, QB> levels_of_rows;
    typedef decode_signs<D, QB> signs_of_rows;

    struct queries {
        typename levels_of_rows::queries levels;
        typename signs_of_rows::queries  signs;
    };

    levels_of_rows levels;
    signs_of_rows  signs;

    static __device__ __forceinline__ uint scale_number(uint, uint second) { return second; }
    static __device__ __forceinline__ uint codes_at(uint t) { return levels_of_rows::codes_at(t); }
    static __device__ __forceinline__ uint shift_of(uint) { return 0; }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g, uint = 0) {
        levels.template load<Bytes>(rows, codes_of, step, cell, last, g);
        const uint part = threadIdx.x % 4*signs_of_rows::BYTES;
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step;
            signs.template load<Bytes, true>(n, rows + (at + part) + signs_at(KIND, D));
        }
    }

    __device__ __forceinline__ void join() {}

    struct loaded_queries {
        typename levels_of_rows::loaded_queries levels;
        typename signs_of_rows::template loaded_queries<D> signs;

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
            levels.load(planes, g, t);
            signs.load(planes, g, t);
        }
    };

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint g) {
        levels_of_rows::fill(q.levels, from.levels, g);
        from.signs.fill(q.signs);
    }

    // Of the levels or of the signs, from the word that holds both norms.
    static __device__ __forceinline__ float scale_of(uint norms, uint second) {
        return second ? norm_of(norms >> 16)*(sign_unit<D>()*turbo_unit(KIND)) : norm_of(norms & 0xffff);
    }

    __device__ __forceinline__ float scale_of(uint n, uint, uint second) const {
        return scale_of(levels.scales[n][0], second);
    }

    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint t, const Scales & scale_of, float (&s)[QB][2]) const {
        levels.products(q.levels, t, scale_of, s);
        float second[QB][2];
        signs.products(q.signs, scale_of(0, 0, 1), scale_of(1, 0, 1), second);
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            s[i/2][i % 2] += second[i/2][i % 2];
        }
    }
};

}  // namespace
}  // namespace kv
