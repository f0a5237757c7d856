// Products of queries with the keys of 16 cells, by integer tensor cores.
//
// Queries are two planes of 8 bits, and the second operand has eight columns: four query rows, twice. Lanes t and t ^ 2 have
// sums of the same rows, which the caller adds.
//
//     4 bits   A code is a selector of prmt: one lookup has the levels of the lower half of the table, one those of the upper
//              half, and both are multiplied with the queries, so that nothing has to choose between them. A byte of the row
//              holds values of two scales; four columns have the queries of one of them and zeros in between, four those of
//              the other.
//     others   32 values of one scale make one product. Four columns have the first plane of the queries, four the second.
//
// At head size 64 rows begin at even addresses, some of them in the middle of a word, and their codes two bytes behind. They are
// loaded by the words that they lie in and put together when they are used: a lane has the word before its own from its
// neighbour, and the first, which has the scales in it, for itself.
#pragma once

#include "decode.h"
#include "levels.cuh"

namespace kv {
namespace {

__device__ __forceinline__ void mma_s8(int (&d)[4], const uint (&a)[4], uint b0, uint b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Levels of kv_srft.h. A selector from 8 on gives the sign of a byte: of the lower half -1, of the upper half 0, so the upper
// half is one larger. The upper half is found by the complement of the code.
constexpr uint LOWER_0 = four_bytes(-127, -98, -78, -61), LOWER_1 = four_bytes(-46, -32, -19, -7);
constexpr uint UPPER_0 = four_bytes(113, 91, 73, 58), UPPER_1 = four_bytes(45, 32, 19, 7);

// Steps of the second plane of queries in one of the first.
constexpr int SECOND_PLANE = 254;

// The word at an address; if that is even, the one that it lies in.
__device__ __forceinline__ uint load_word(const uint8_t * at) {
    return __ldg((const uint *) ((uintptr_t) at & ~(uintptr_t) 3));
}

// Does an even address lie in the middle of a word?
__device__ __forceinline__ bool is_odd(const uint8_t * at) {
    return ((uintptr_t) at & 2) != 0;
}

// A word of codes of a row: of one that begins in the middle of a word it is one, else half of it lies in the word before.
__device__ __forceinline__ uint joined(uint before, uint word, bool odd) {
    return odd ? word : __funnelshift_r(before, word, 16);
}

template <uint ALIGN> __device__ __forceinline__ void load_two(uint (&words)[2], const uint8_t * at) {
    if (ALIGN >= 8) {
        const ::uint2 two = __ldg((const ::uint2 *) at);
        words[0] = two.x;
        words[1] = two.y;
    } else {
        words[0] = __ldg((const uint *) at);
        words[1] = __ldg((const uint *) (at + 4));
    }
}

// Scales of a row as they are stored: BYTES of them, in words.
template <uint BYTES, uint ALIGN> __device__ __forceinline__ void load_scales(uint (&scales)[(BYTES + 3)/4], const uint8_t * row) {
    if constexpr (BYTES == 2) {
        scales[0] = load_word(row);
    } else if constexpr (ALIGN >= 8 && BYTES % 8 == 0) {
#pragma unroll
        for (uint i = 0; i < BYTES/4; i += 2) {
            const ::uint2 two = __ldg((const ::uint2 *) (row + 4*i));
            scales[i] = two.x;
            scales[i + 1] = two.y;
        }
    } else {
#pragma unroll
        for (uint i = 0; i < BYTES/4; ++i) {
            scales[i] = __ldg((const uint *) (row + 4*i));
        }
    }
}

// The compiler is to keep it, not to make it anew in the loop.
__device__ __forceinline__ void keep(uint & x) {
    asm volatile("" : "+r"(x));
}

__device__ __forceinline__ void keep(const uint8_t *& x) {
    asm volatile("" : "+l"(x));
}

// Scale n of a row; zero for a half that is not finite.
template <uint BITS, uint WORDS> __device__ __forceinline__ float scale_at(const uint (&scales)[WORDS], uint n) {
    if constexpr (BITS == 8) {
        const float x = __half2float(__ushort_as_half((unsigned short) (scales[n/2] >> 16*(n % 2))));
        return fabsf(x) <= 65504.0f ? x : 0.0f;
    } else {
        return kv_srft_scale(scales[n/4] >> 8*(n % 4));
    }
}

// Four bytes of a plane, `step` apart by twos: bytes 0, step, 1, step + 1; with step 2 as they lie.
__device__ __forceinline__ uint query_bytes(const signed char * q, uint step) {
    return (uint) (uint8_t) q[0] | (uint) (uint8_t) q[step == 2 ? 1 : step] << 8 | (uint) (uint8_t) q[step == 2 ? 2 : 1] << 16 | (uint) (uint8_t) q[step + 1] << 24;
}

// What a lane has of 16 rows of K: of cells g and g + 8. QB is the number of blocks of four query rows.
template <uint KIND, uint D, uint QB> struct decode_keys {
    static constexpr uint C = D/64, BITS = code_bits(KIND), ALIGN = level_row_align(KIND, D), CHUNK = 8*BITS;
    static constexpr uint SCALES = level_scale_bytes(KIND, D), WORDS = BITS == 8 ? 4 : BITS == 4 ? 2 : 1;
    static constexpr bool JOINED = ALIGN == 2; // words are put together by `join`

    struct queries {
        uint b[BITS == 4 ? 2 : 1][C][2][QB][2]; // [plane][chunk][word or scale][block of rows][half of the 32 values]
    };

    uint scales[2][(SCALES + 3)/4];
    uint codes[2][C][WORDS];
    uint upper[2][C][2];
    bool odd[2];

    // Where the lane's codes of a row begin.
    static __device__ __forceinline__ uint codes_at(uint t) {
        return SCALES + (BITS <= 3 ? 4 : 8)*t;
    }

    // `codes_of` is that of row 0. Caches are below 4 GiB.
    __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = min(cell + g + 8*n, last)*step;
            load_scales<SCALES, ALIGN>(scales[n], rows + at);
            if constexpr (JOINED) {
                odd[n] = is_odd(rows + at);
                // The later one of the two words that a word of codes lies in.
                const uint8_t * later = codes_of + at + 2, * upper_at = rows + at + SCALES + 16 + 2;
#pragma unroll
                for (uint i = 0; i < WORDS; ++i) {
                    codes[n][0][i] = load_word(later + 4*i);
                }
                if (BITS == 3) {
                    upper[n][0][0] = load_word(upper_at);
                    upper[n][0][1] = load_word(upper_at + 4);
                }
            } else {
#pragma unroll
                for (uint c = 0; c < C; ++c) {
                    load_chunk(c, n, codes_of + at + CHUNK*c, rows + at + SCALES + CHUNK*c + 16);
                }
            }
        }
    }

    __device__ __forceinline__ void load_chunk(uint c, uint n, const uint8_t * from, const uint8_t * upper_at) {
        if constexpr (BITS <= 3) {
            codes[n][c][0] = __ldg((const uint *) from);
            if (BITS == 3) {
                load_two<ALIGN>(upper[n][c], upper_at);
            }
        } else {
#pragma unroll
            for (uint i = 0; i < WORDS; i += 2) {
                uint two[2];
                load_two<ALIGN>(two, from + 16*i);
                codes[n][c][i] = two[0];
                codes[n][c][i + 1] = two[1];
            }
        }
    }

    // What was loaded by the words that it lies in, before it is used.
    __device__ __forceinline__ void join(uint t) {
        if constexpr (JOINED) {
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                uint (&words)[WORDS] = codes[n][0];
                const uint other = __shfl_up_sync(KV_ALL_LANES, words[WORDS - 1], 1, 4);
                uint before = t == 0 ? scales[n][0] : other;
                if constexpr (BITS == 3) {
                    const uint last = __shfl_sync(KV_ALL_LANES, words[0], 3, 4);
                    upper[n][0][1] = joined(upper[n][0][0], upper[n][0][1], odd[n]);
                    upper[n][0][0] = joined(last, upper[n][0][0], odd[n]);
                }
#pragma unroll
                for (uint i = 0; i < WORDS; ++i) {
                    const uint word = words[i];
                    words[i] = joined(before, word, odd[n]);
                    before = word;
                }
                scales[n][0] = odd[n] ? scales[n][0] >> 16 : scales[n][0];
            }
        }
    }

    template <typename Planes> static __device__ __forceinline__ void fill(queries & q, const Planes & planes, uint g, uint t) {
        if constexpr (BITS == 4) {
            // Column g is row g % 4 of the queries, of the first scale of a byte's two or the second.
#pragma unroll
            for (uint i = 0; i < 2*C*2*QB*2; ++i) {
                const uint half_of = i % 2, qb = i/2 % QB, word = i/2/QB % 2, c = i/4/QB % C, plane = i/4/QB/C;
                const signed char * from = &planes[plane][4*qb + g % 4][64*c + 8*t + 4*word + 2*half_of + (g < 4 ? 0 : 32)];
                const uint two = (uint) (uint8_t) from[0] | (uint) (uint8_t) from[1] << 16;
                q.b[plane][c][word][qb][half_of] = g < 4 ? two : two << 8;
                keep(q.b[plane][c][word][qb][half_of]);
            }
        } else {
            // Column g is row g % 4 of the queries, of plane g/4.
#pragma unroll
            for (uint i = 0; i < C*2*QB*2; ++i) {
                const uint half_of = i % 2, qb = i/2 % QB, scale = i/2/QB % 2, c = i/4/QB;
                const signed char * from = &planes[g/4][4*qb + g % 4][64*c + 32*scale + (BITS == 8 ? 8*t + 4*half_of : 4*t + 2*half_of)];
                q.b[0][c][scale][qb][half_of] = query_bytes(from, BITS == 8 ? 2 : 16);
                keep(q.b[0][c][scale][qb][half_of]);
            }
        }
    }

    // s[r] of cells g and g + 8, in units of the queries' planes and of the scales; lanes t and t ^ 2 have a part each.
    __device__ __forceinline__ void products(const queries & q, uint t, float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            s[i/4][i % 4] = 0.0f;
        }
        if constexpr (BITS == 4) {
            products_4(q, t, s);
        } else {
            products_by_scale(q, t, s);
        }
    }

    __device__ __forceinline__ void products_by_scale(const queries & q, uint t, float (&s)[QB][4]) const {
#pragma unroll
        for (uint i = 0; i < 2*C; ++i) {
            const uint c = i/2, scale = i % 2;
            uint a[4];
            if constexpr (BITS == 8) {
                a[0] = codes[0][c][2*scale];
                a[1] = codes[1][c][2*scale];
                a[2] = codes[0][c][2*scale + 1];
                a[3] = codes[1][c][2*scale + 1];
            } else {
                constexpr byte_table levels = level_bytes<BITS == 3 ? 3 : 2>();
                const uint x = selectors_of<BITS>(codes[0][c][0], scale, upper[0][c][scale], t), y = selectors_of<BITS>(codes[1][c][0], scale, upper[1][c][scale], t);
                a[0] = prmt(levels.first, levels.second, x);
                a[1] = prmt(levels.first, levels.second, y);
                a[2] = prmt(levels.first, levels.second, x >> 16);
                a[3] = prmt(levels.first, levels.second, y >> 16);
            }
            const float s0 = scale_at<BITS>(scales[0], i), s1 = scale_at<BITS>(scales[1], i);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                int sums[4] = {};
                mma_s8(sums, a, q.b[0][c][scale][qb][0], q.b[0][c][scale][qb][1]);
#pragma unroll
                for (uint n = 0; n < 4; ++n) {
                    s[qb][n] = fmaf(n < 2 ? s0 : s1, (float) sums[n], s[qb][n]);
                }
            }
        }
        const float unit = t < 2 ? (float) SECOND_PLANE : 1.0f;
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            s[i/4][i % 4] *= unit;
        }
    }

    // The first or the second scale of chunk c.
    template <uint WORDS_OF_ROW> static __device__ __forceinline__ float scale_of_half(const uint (&scales)[WORDS_OF_ROW], uint c, uint second) {
        return kv_srft_scale(scales[c/2] >> (16*(c % 2) + 8*second));
    }

    __device__ __forceinline__ void products_4(const queries & q, uint t, float (&s)[QB][4]) const {
#pragma unroll
        for (uint c = 0; c < C; ++c) {
            int sums[2][QB][4] = {};
#pragma unroll
            for (uint word = 0; word < 2; ++word) {
                const uint x = codes[0][c][word % WORDS], y = codes[1][c][word % WORDS];
                const uint lower[4] = { prmt(LOWER_0, LOWER_1, x), prmt(LOWER_0, LOWER_1, y), prmt(LOWER_0, LOWER_1, x >> 16), prmt(LOWER_0, LOWER_1, y >> 16) };
                const uint upper[4] = { prmt(UPPER_0, UPPER_1, ~x), prmt(UPPER_0, UPPER_1, ~y), prmt(UPPER_0, UPPER_1, ~x >> 16), prmt(UPPER_0, UPPER_1, ~y >> 16) };
#pragma unroll
                for (uint i = 0; i < 2*QB; ++i) {
                    const uint plane = BITS == 4 ? i/QB : 0, qb = i % QB;
                    mma_s8(sums[i/QB][qb], lower, q.b[plane][c][word][qb][0], q.b[plane][c][word][qb][1]);
                    mma_s8(sums[i/QB][qb], upper, q.b[plane][c][word][qb][0], q.b[plane][c][word][qb][1]);
                }
            }
            const float s0 = scale_of_half(scales[0], c, t/2), s1 = scale_of_half(scales[1], c, t/2);
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                const float x = (float) (sums[0][i/4][i % 4]*SECOND_PLANE + sums[1][i/4][i % 4]);
                s[i/4][i % 4] = fmaf(i % 4 < 2 ? s0 : s1, x, s[i/4][i % 4]);
            }
        }
    }
};

}  // namespace
}  // namespace kv
