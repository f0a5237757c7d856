// Products of queries with the keys of 16 cells in bands, by integer tensor cores: decode_keys.cuh for rows whose codes have other
// widths in each band of 32 values.
//
// A band makes one product, or two that are added up. Four columns of the second operand have the first plane of the queries, four the
// second. Which values of a band a lane has is free, as long as queries have the same order; it follows from how codes are packed
// (kv_band.h):
//
//     5 bits   A word has the lower four bits of values 4t to 4t + 3 and of those 16 behind, which look up the negative half of the
//              table and the positive one. The fifth bit says which of them counts.
//     4 bits   the same words, by the two halves of the table of decode_keys.cuh
//     3, 2     A word has the lower two bits of four values and of those 8, 16 and 24 behind; two lanes share it.
//     1 bit    eight values side by side
#pragma once

#include "decode_keys.cuh"

namespace kv {
namespace {

// Levels of 5 bits (kv_srft.h). What a selector from 8 on gives is all ones in the negative half and none in the positive one, so two
// lookups of eight levels make one of 16. The second eight are found by the complement of the code.
constexpr byte_table NEGATIVE_0 = { four_bytes(-127, -111, -96, -85), four_bytes(-76, -68, -61, -53) }, NEGATIVE_1 = { four_bytes(-4, -9, -15, -21), four_bytes(-27, -33, -40, -46) };
constexpr byte_table POSITIVE_0 = { four_bytes(2, 8, 14, 20), four_bytes(26, 32, 38, 44) }, POSITIVE_1 = { four_bytes(111, 99, 89, 80), four_bytes(72, 64, 57, 50) };
constexpr uint ONE_BIT_0 = four_bytes(-127, -127, -127, -127), ONE_BIT_1 = four_bytes(77, 77, 77, 77);

// Four bits to the signs of four bytes.
__device__ __forceinline__ uint to_signs(uint bits) {
    return (bits & 15)*0x10204080;
}

// Where the codes of a band are, in a row.
struct band_place {
    uint bits;
    uint low;  // words of the lower bits
    uint high; // a word of high bits
};

template <uint KIND, uint D> __host__ __device__ constexpr band_place band_at(uint chunk, uint second) {
    uint at = D/32;
    for (uint c = 0; c < chunk; ++c) {
        at += 8*(wide_band_bits(KIND, D, c) - 1);
    }
    const uint wide = wide_band_bits(KIND, D, chunk), low = wide == 3 ? 2 : 4; // lower bits of the first band; the second has two less
    return { wide - 2*second, at + 4*low*second, at + 4*(2*low - 2) + 4*second };
}

template <uint KIND, uint D, uint QB> struct decode_band_keys {
    static constexpr uint C = D/64, SCALES = D/32;
    static constexpr bool CHOOSES_SCALES = false, JOINED = false;

    struct queries {
        uint b[C][2][QB][2];           // [chunk][band][block of rows][half of the 32 values]
        uint negative[2], positive[2]; // the first levels of each eight
        uint lower, upper;
        uint narrow; // of 3 and 2 bits, one of which a row has at most
        uint ones;   // -1
    };

    uint scales[2][(SCALES + 3)/4];
    uint low[2][C][2], high[2][C][2];

    // Where words of the lane begin, in bands of 4 and 5 bits.
    static __device__ __forceinline__ uint codes_at(uint t) {
        return 4*t;
    }

    // A word of a row, which begins at a multiple of four.
    template <typename Bytes> static __device__ __forceinline__ uint word_at(const uint8_t * row, uint at) {
        if constexpr (SCALES % 4 == 0) {
            return Bytes::template at<uint>(row + at);
        } else {
            return __funnelshift_r(Bytes::template at<uint>(row + at - 2), Bytes::template at<uint>(row + at + 2), 16);
        }
    }

    // Which values of a band the lane has: the first of them.
    static __device__ __forceinline__ uint first_value(uint bits, uint t) {
        return bits >= 4 ? 4*t : bits >= 2 ? t % 2*4 + t/2*16 : 8*t;
    }

    // `codes_of` is that of row 0. Caches are below 4 GiB.
    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g, uint = 0) {
        const uint narrow = threadIdx.x % 2*4;
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step;
            const uint8_t * row = rows + at;
            load_scales<Bytes, SCALES, 4>(scales[n], row);
#pragma unroll
            for (uint i = 0; i < 2*C; ++i) {
                const band_place band = band_at<KIND, D>(i/2, i % 2);
                if (band.bits >= 2) {
                    low[n][i/2][i % 2] = word_at<Bytes>(band.bits >= 4 ? codes_of + at : row + narrow, band.low);
                }
                if (band.bits % 2 == 1) {
                    high[n][i/2][i % 2] = word_at<Bytes>(row, band.high);
                }
            }
        }
    }

    __device__ __forceinline__ void join() {}

    // What the lane needs of the queries, as it lies in their planes.
    struct loaded_queries {
        query_bytes bytes[4*C*QB];

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
            // Column g is row g % 4 of the queries, of plane g/4.
#pragma unroll
            for (uint i = 0; i < 4*C*QB; ++i) {
                const uint half_of = i % 2, qb = i/2 % QB, second = i/2/QB % 2, c = i/4/QB, bits = band_at<KIND, D>(c, second).bits;
                bytes[i].load(&planes[g/4][4*qb + g % 4][64*c + 32*second + first_value(bits, t) + (bits >= 2 ? 2 : 4)*half_of], bits >= 4 ? 16 : bits >= 2 ? 8 : 2);
            }
        }
    };

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint) {
        // So that they stay in registers.
        q.negative[0] = opaque(NEGATIVE_0.first);
        q.negative[1] = opaque(NEGATIVE_1.first);
        q.positive[0] = opaque(POSITIVE_0.first);
        q.positive[1] = opaque(POSITIVE_1.first);
        q.lower = opaque(LOWER_0);
        q.upper = opaque(UPPER_0);
        q.ones  = kept(~0u);
        q.narrow = opaque(KIND == KV_KIND_BAND3 && D != 256 ? level_bytes<2>().first : level_bytes<3>().first);
#pragma unroll
        for (uint i = 0; i < 4*C*QB; ++i) {
            uint & b = (&q.b[0][0][0][0])[i];
            b = band_at<KIND, D>(i/4/QB, i/2/QB % 2).bits >= 2 ? from.bytes[i].in_turn() : from.bytes[i].in_a_row();
            keep(b);
        }
    }

    __device__ __forceinline__ float scale_of(uint n, uint c, uint second) const {
        return scale_at<4>(scales[n], 2*c + second);
    }

    // As decode_keys has them.
    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint t, const Scales & scale_of, float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 2*C; ++i) {
            const uint c = i/2, second = i % 2, bits = band_at<KIND, D>(c, second).bits;
            uint a[4], more[4];
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                levels_of(q, bits, low[n][c][second], high[n][c][second], t, a[n], a[n + 2], more[n], more[n + 2]);
            }
            const float s0 = scale_of(0, c, second), s1 = scale_of(1, c, second);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                int sums[4];
                first_mma_s8(sums, a, q.b[c][second][qb][0], q.b[c][second][qb][1]);
                if (bits >= 4) {
                    mma_s8(sums, more, q.b[c][second][qb][0], q.b[c][second][qb][1]);
                }
#pragma unroll
                for (uint n = 0; n < 4; ++n) {
                    s[qb][n] = i == 0 ? (n < 2 ? s0 : s1)*(float) sums[n] : fmaf(n < 2 ? s0 : s1, (float) sums[n], s[qb][n]);
                }
            }
        }
        const float unit = t < 2 ? (float) SECOND_PLANE : 1.0f;
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            s[i/4][i % 4] *= unit;
        }
    }

  private:
    // The lane's eight values of a band: four levels each in x and y, and what is added to them.
    static __device__ __forceinline__ void levels_of(const queries & q, uint bits, uint low, uint high, uint t, uint & x, uint & y, uint & more_x, uint & more_y) {
        if (bits == 5) {
            const uint first = to_signs(high >> 4*t), behind = to_signs(high >> (4*t + 16));
            const auto look_up = [&](uint codes, uint is_positive, uint & negative, uint & positive) {
                const uint others = complement(codes, q.ones);
                negative = prmt(q.negative[0], NEGATIVE_0.second, codes) & prmt(q.negative[1], NEGATIVE_1.second, others) & ~is_positive;
                positive = (prmt(q.positive[0], POSITIVE_0.second, codes) | prmt(q.positive[1], POSITIVE_1.second, others)) & is_positive;
            };
            look_up(low, prmt(first, behind, 0xd9c8), x, more_x);
            look_up(low >> 16, prmt(first, behind, 0xfbea), y, more_y);
        } else if (bits == 4) {
            x = prmt(q.lower, LOWER_1, low);
            y = prmt(q.lower, LOWER_1, low >> 16);
            const uint others = complement(low, q.ones);
            more_x = prmt(q.upper, UPPER_1, others);
            more_y = prmt(q.upper, UPPER_1, others >> 16);
        } else if (bits >= 2) {
            const byte_table levels = bits == 3 ? level_bytes<3>() : level_bytes<2>();
            const uint two = low >> t/2*4;
            uint selectors = choose(0x03030303, two, two << 2) & 0x33333333;
            if (bits == 3) {
                const uint from = high >> first_value(bits, t);
                selectors |= (from & 15)*0x00810204 & 0x04040404; // bit i goes to byte i
                selectors |= (from >> 8 & 15)*0x08102040 & 0x40404040;
            }
            x = prmt(q.narrow, levels.second, selectors);
            y = prmt(q.narrow, levels.second, selectors >> 16);
        } else {
            x = choose(prmt(to_signs(high >> 8*t), 0, 0xba98), ONE_BIT_1, ONE_BIT_0);
            y = choose(prmt(to_signs(high >> (8*t + 4)), 0, 0xba98), ONE_BIT_1, ONE_BIT_0);
        }
    }
};

template <uint KIND, uint D, uint QB> using decode_keys_of = std::conditional_t<KV_KIND_IS_BAND(KIND), decode_band_keys<KIND, D, QB>, decode_keys<KIND, D, QB>>;

}  // namespace
}  // namespace kv
