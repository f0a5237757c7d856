// Products of queries with the keys of 16 cells in bands, by integer tensor cores: decode_keys.cuh for rows whose codes have other
// widths in each band of 32 values.
//
// A band makes one product, or two of 4 bits, which are added up. Which values of a band a lane has is free, as long as queries have the same
// order; it follows from how codes are packed (kv_band.h), so that each of them is a selector of prmt where it lies:
//
//     5 and 3   Two words, of values 8t to 8t + 7 of both bands. A shift apart, nibbles of one word are those places of the first band that
//               are in the other, in between; so are those of the second band. Signs of the first are the upper bits of bytes.
//     4 and 2   A word of the first band, of values 4t to 4t + 3 and of those 16 behind, by the two halves of the table of decode_keys.cuh.
//               A word of the second has four values and those 8, 16 and 24 behind; two lanes share it.
//     3 and 1   A word, of values 4t to 4t + 3 and of those 16 behind, of both bands
#pragma once

#include "decode_keys.cuh"

namespace kv {
namespace {

// Magnitudes of 5 bits (kv_srft.h). A selector from 8 on gives the sign of one of them, zero, so two lookups of eight make one of 16. The second
// eight are found by the complement of the selector.
constexpr byte_table SMALL = { four_bytes(2, 8, 14, 20), four_bytes(26, 32, 38, 44) }, LARGE = { four_bytes(126, 109, 96, 85), four_bytes(75, 66, 58, 51) };
constexpr uint ONE_BIT_0 = four_bytes(-127, -127, -127, -127), ONE_BIT_1 = four_bytes(77, 77, 77, 77);

// The first byte of a chunk of a row.
template <uint KIND, uint D> __host__ __device__ constexpr uint chunk_at(uint chunk) {
    uint at = D/32;
    for (uint c = 0; c < chunk; ++c) {
        at += 8*(wide_band_bits(KIND, D, c) - 1);
    }
    return at;
}

template <uint KIND, uint D, uint QB> struct decode_band_keys {
    static constexpr uint C = D/64, SCALES = D/32, FIRST_WIDE = wide_band_bits(KIND, D, 0);
    static constexpr bool JOINED = false;
    static constexpr uint CELL_SCALES = 2*C;

    static __device__ __forceinline__ uint scale_number(uint c, uint second) { return 2*c + second; }
    static __device__ __forceinline__ uint shift_of(uint) { return 0; }

    struct queries {
        uint b[C][2][QB][2];     // [chunk][band][block of rows][half of the 32 values]
        uint small, large;       // 5 bits: the first magnitudes of each half
        uint lower, upper, ones; // 4 bits: the first levels of each half; -1
        uint three;              // 3 bits: the first levels
    };

    uint scales[2][(SCALES + 3)/4];
    uint words[2][C][2];

    // Where the lane's codes of the first chunk begin, in this.
    static __device__ __forceinline__ uint codes_at(uint t) {
        return FIRST_WIDE == 5 ? 8*t : 4*t;
    }

    // COUNT words of a row, where `from` is that many bytes from its beginning. Rows begin at words, and their codes at a multiple of two bytes.
    template <typename Bytes, uint COUNT> static __device__ __forceinline__ void load_words(uint (&to)[2], const uint8_t * from) {
        if constexpr (SCALES % 4 != 0) {
            uint around[COUNT + 1];
#pragma unroll
            for (uint i = 0; i <= COUNT; ++i) {
                around[i] = Bytes::template at<uint>(from - 2 + 4*i);
            }
#pragma unroll
            for (uint i = 0; i < COUNT; ++i) {
                to[i] = __funnelshift_r(around[i], around[i + 1], 16);
            }
        } else if constexpr (COUNT == 2) {
            load_two<Bytes, level_row_align(KIND, D)>(to, from);
        } else {
            to[0] = Bytes::template at<uint>(from);
        }
    }

    // `codes_of` is that of row 0. Caches are below 4 GiB.
    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g, uint = 0) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step;
            const uint8_t * row = rows + at;
            load_scales<Bytes, SCALES, 4>(scales[n], row);
            load_chunks<Bytes>(words[n], row, codes_of + at, std::make_integer_sequence<uint, C>());
        }
    }

    __device__ __forceinline__ void join() {}

    // What the lane needs of the queries, as it lies in their planes.
    struct loaded_queries {
        query_bytes bytes[4*C*QB];

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
#pragma unroll
            for (uint i = 0; i < 4*C*QB; ++i) {
                const uint half_of = i % 2, qb = i/2 % QB, second = i/2/QB % 2, c = i/4/QB, wide = wide_band_bits(KIND, D, c);
                uint first = 0, apart = 0; // of two values and two others
                if (wide == 5) {
                    first = 8*t + 2*half_of;
                    apart = 4;
                } else if (wide == 4 && second != 0) {
                    first = t % 2*4 + t/2*16 + 2*half_of;
                    apart = 8;
                } else if (wide == 3 && second != 0) {
                    first = 4*t + 16*half_of;
                    apart = 2;
                } else {
                    first = 4*t + 2*half_of;
                    apart = 16;
                }
                bytes[i].load(&planes[g % 2][4*qb + g/2][64*c + 32*second + first], apart);
            }
        }
    };

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint) {
        // So that they stay in registers.
        q.small = opaque(SMALL.first);
        q.large = opaque(LARGE.first);
        q.lower = opaque(LOWER_0);
        q.upper = opaque(UPPER_0);
        q.ones  = kept(~0u);
        q.three = opaque(level_bytes<3>().first);
#pragma unroll
        for (uint i = 0; i < 4*C*QB; ++i) {
            uint & b = (&q.b[0][0][0][0])[i];
            b = wide_band_bits(KIND, D, i/4/QB) == 3 && i/2/QB % 2 != 0 ? from.bytes[i].in_a_row() : from.bytes[i].in_turn();
            keep(b);
        }
    }

    __device__ __forceinline__ float scale_of(uint n, uint c, uint second) const {
        return kv_band_scale(wide_band_bits(KIND, D, c) - 2*second, scales[n][c/2] >> (16*(c % 2) + 8*second) & 255);
    }

    // As decode_keys has it.
    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint t, const Scales & scale_of, float (&s)[QB][2]) const {
#pragma unroll
        for (uint i = 0; i < 2*C; ++i) {
            const uint c = i/2, second = i % 2, wide = wide_band_bits(KIND, D, c);
            uint a[4], more[4];
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                if (second == 0) {
                    levels_of(q, wide, words[n][c], a[n], a[n + 2], more[n], more[n + 2]);
                } else {
                    narrow_levels_of(q, wide, words[n][c], t, a[n], a[n + 2]);
                }
            }
            const float s0 = scale_of(0, c, second), s1 = scale_of(1, c, second);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                int sums[4];
                first_mma_s8(sums, a, q.b[c][second][qb][0], q.b[c][second][qb][1]);
                if (wide == 4 && second == 0) {
                    mma_s8(sums, more, q.b[c][second][qb][0], q.b[c][second][qb][1]);
                }
#pragma unroll
                for (uint n = 0; n < 2; ++n) {
                    const float scale = n == 0 ? s0 : s1, sum = joined_planes(sums[2*n], sums[2*n + 1]);
                    s[qb][n] = i == 0 ? scale*sum : fmaf(scale, sum, s[qb][n]);
                }
            }
        }
    }

  private:
    template <typename Bytes, uint... CHUNKS>
    static __device__ __forceinline__ void load_chunks(uint (&to)[C][2], const uint8_t * row, const uint8_t * codes, std::integer_sequence<uint, CHUNKS...>) {
        (load_chunk<Bytes, CHUNKS>(to[CHUNKS], row, codes), ...);
    }

    template <typename Bytes, uint CHUNK> static __device__ __forceinline__ void load_chunk(uint (&to)[2], const uint8_t * row, const uint8_t * codes) {
        constexpr uint WIDE = wide_band_bits(KIND, D, CHUNK), AT = chunk_at<KIND, D>(CHUNK);
        load_words<Bytes, WIDE == 5 ? 2 : 1>(to, (FIRST_WIDE == 5 && WIDE != 5 ? row + threadIdx.x % 4*4 : codes) + AT);
        if constexpr (WIDE == 4) {
            uint narrow[2];
            load_words<Bytes, 1>(narrow, row + threadIdx.x % 2*4 + AT + 16);
            to[1] = narrow[0];
        }
    }

    // The lane's eight values of the first band of a chunk: four levels each in x and y, and what is added to them.
    static __device__ __forceinline__ void levels_of(const queries & q, uint wide, const uint (&words)[2], uint & x, uint & y, uint & more_x, uint & more_y) {
        if (wide == 5) {
            const auto look_up = [&](uint places, uint sign) {
                return (prmt(q.small, SMALL.second, places) | prmt(q.large, LARGE.second, complement(places, q.ones))) ^ sign;
            };
            const uint places = choose(0x0f0f0f0f, words[0] >> 3, words[1] << 1);
            x = look_up(places, prmt(words[0], words[1], 0xd9c8));
            y = look_up(places >> 16, prmt(words[0], words[1], 0xfbea));
        } else if (wide == 4) {
            x = prmt(q.lower, LOWER_1, words[0]);
            y = prmt(q.lower, LOWER_1, words[0] >> 16);
            const uint others = complement(words[0], q.ones);
            more_x = prmt(q.upper, UPPER_1, others);
            more_y = prmt(q.upper, UPPER_1, others >> 16);
        } else {
            const uint places = words[0] & 0x77777777;
            x = prmt(q.three, level_bytes<3>().second, places);
            y = prmt(q.three, level_bytes<3>().second, places >> 16);
        }
    }

    // And of the second one.
    static __device__ __forceinline__ void narrow_levels_of(const queries & q, uint wide, const uint (&words)[2], uint t, uint & x, uint & y) {
        if (wide == 5) {
            const uint places = choose(0x0f0f0f0f, words[0], words[1] << 4) & 0x77777777;
            x = prmt(q.three, level_bytes<3>().second, places);
            y = prmt(q.three, level_bytes<3>().second, places >> 16);
        } else if (wide == 4) {
            const uint two = words[1] >> t/2*4, places = choose(0x03030303, two, two << 2) & 0x33333333;
            x = prmt(level_bytes<2>().first, 0, places);
            y = prmt(level_bytes<2>().first, 0, places >> 16);
        } else {
            x = choose(prmt(words[0] << 4, 0, 0xba98), ONE_BIT_1, ONE_BIT_0);
            y = choose(prmt(words[0], 0, 0xba98), ONE_BIT_1, ONE_BIT_0);
        }
    }
};

}  // namespace
}  // namespace kv
