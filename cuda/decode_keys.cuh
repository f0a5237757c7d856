// Products of queries with the keys of 16 cells, by integer tensor cores.
//
// Queries are two planes of 8 bits, and the second operand has eight columns: four query rows, twice. Columns 2t and 2t + 1 are of
// query row t, whose lane has both sums and adds them.
//
//     4 bits   A code is a selector of prmt: one lookup has the levels of the lower half of the table, one those of the upper
//              half, and both are multiplied with the queries, so that nothing has to choose between them. A byte of the row
//              holds values of two scales; the first column has the queries of one of them and zeros in between, the second those
//              of the other.
//     others   32 values of one scale make one product. The two columns have the two planes of the query.
//
// At head size 64 rows begin at even addresses, some of them in the middle of a word, and their codes two bytes behind. They are
// loaded by the words that they lie in and put together when they are used.
#pragma once

#include "decode.h"
#include "levels.cuh"
#include "mma.cuh"
#include "queries.cuh"

namespace kv {
namespace {

// Levels of kv_srft.h. A selector from 8 on gives the sign of a byte: of the lower half -1, of the upper half 0, so the upper
// half is one larger. The upper half is found by the complement of the code.
constexpr uint LOWER_0 = four_bytes(-127, -96, -76, -59), LOWER_1 = four_bytes(-45, -33, -21, -9);
constexpr uint UPPER_0 = four_bytes(118, 93, 73, 57), UPPER_1 = four_bytes(42, 29, 16, 4);

// A level without a look at memory, which takes a microsecond at the beginning of a kernel.
__device__ __forceinline__ float level_of_4(uint code) {
    return code < 8 ? (float) (signed char) prmt(LOWER_0, LOWER_1, code) : (float) ((signed char) prmt(UPPER_0, UPPER_1, 15 - code) - 1);
}

// Where rows are read from: the cache itself, or a tile of it in shared memory.
struct cache_bytes {
    static constexpr bool ENDS = true; // there may be less rows than are read: the last one again
    template <typename T> static __device__ __forceinline__ T at(const uint8_t * from) {
        return __ldg((const T *) from);
    }
};

struct tile_bytes {
    static constexpr bool ENDS = false;
    template <typename T> static __device__ __forceinline__ T at(const uint8_t * from) {
        return *(const T *) from;
    }
};

// A row that begins at an even address, perhaps in the middle of a word: the words that it lies in, and by how much its codes, which begin
// two or four bytes behind it, are shifted in those.
struct even_row {
    const uint8_t * words;
    uint            shift;

    static __device__ __forceinline__ even_row of(const uint8_t * row, uint scales) {
        const uint odd = (uint) (uintptr_t) row & 2;
        return { row - odd, shift_of(odd, scales) };
    }

    // Where the row begins `odd` bytes behind a word, and with so many bytes of scales.
    static __device__ __forceinline__ uint shift_of(uint odd, uint scales) {
        return 8*(odd + scales % 4);
    }

    template <typename Bytes> __device__ __forceinline__ uint word(uint at) const {
        return Bytes::template at<uint>(words + at);
    }

    // The two bytes of the row's scales, in the lower half of a word; the upper has others.
    template <typename Bytes> __device__ __forceinline__ uint scales() const {
        return word<Bytes>(0) >> (shift & 32)/2;
    }
};

// A word of codes from the two that it lies in, or from the second alone.
__device__ __forceinline__ uint joined(uint before, uint word, uint shift) {
    return __funnelshift_rc(before, word, shift);
}

template <typename Bytes, uint ALIGN> __device__ __forceinline__ void load_two(uint (&words)[2], const uint8_t * from) {
    if (ALIGN >= 8) {
        const ::uint2 two = Bytes::template at<::uint2>(from);
        words[0] = two.x;
        words[1] = two.y;
    } else {
        words[0] = Bytes::template at<uint>(from);
        words[1] = Bytes::template at<uint>(from + 4);
    }
}

// Scales of a row as they are stored: BYTES of them, in words.
template <typename Bytes, uint BYTES, uint ALIGN> __device__ __forceinline__ void load_scales(uint (&scales)[(BYTES + 3)/4], const uint8_t * row) {
    if constexpr (BYTES == 2) {
        scales[0] = even_row::of(row, BYTES).scales<Bytes>();
    } else if constexpr (ALIGN == 2) {
#pragma unroll
        for (uint i = 0; i < BYTES/4; ++i) {
            scales[i] = Bytes::template at<unsigned short>(row + 4*i) | (uint) Bytes::template at<unsigned short>(row + 4*i + 2) << 16;
        }
    } else if constexpr (ALIGN >= 8 && BYTES % 8 == 0) {
#pragma unroll
        for (uint i = 0; i < BYTES/4; i += 2) {
            const ::uint2 two = Bytes::template at<::uint2>(row + 4*i);
            scales[i] = two.x;
            scales[i + 1] = two.y;
        }
    } else {
#pragma unroll
        for (uint i = 0; i < BYTES/4; ++i) {
            scales[i] = Bytes::template at<uint>(row + 4*i);
        }
    }
}

// 1, 2 or a multiple of 4 floats, from an address that is a multiple of as many.
template <uint N> __device__ __forceinline__ void load_floats(float (&x)[N], const float * from) {
    if constexpr (N == 1) {
        x[0] = *from;
    } else if constexpr (N == 2) {
        const ::float2 two = *(const ::float2 *) from;
        x[0] = two.x;
        x[1] = two.y;
    } else {
#pragma unroll
        for (uint i = 0; i < N; i += 4) {
            const ::float4 four = *(const ::float4 *) (from + i);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
        }
    }
}

// The compiler is to keep it, not to make it anew in the loop.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ void keep(uint & x) {
    asm volatile("" : "+r"(x));
}

__device__ __forceinline__ void keep(float & x) {
    asm volatile("" : "+f"(x));
}

__device__ __forceinline__ void keep(const uint8_t *& x) {
    asm volatile("" : "+l"(x));
}
#else
template <typename T> __device__ __forceinline__ void keep(T &) {}
#endif

// A constant that the compiler does not know, and so does not make anew in the loop: blocks have one row of threads.
__device__ __forceinline__ uint opaque(uint constant) {
    return constant + threadIdx.y;
}

// The same, which is kept in a register whatever that takes.
__device__ __forceinline__ uint kept(uint constant) {
    return constant + __shfl_sync(KV_ALL_LANES, threadIdx.y, 0);
}

// What a lane has, an address of shared memory for example.
__device__ __forceinline__ uint kept(uint x, uint lane) {
    return __shfl_sync(KV_ALL_LANES, x, lane);
}

__device__ __forceinline__ uint8_t * kept(const uint8_t * shared, uint lane) {
    return (uint8_t *) __cvta_shared_to_generic(kept((uint) __cvta_generic_to_shared(shared), lane));
}

// The complement of codes, with -1 in a register: lookups and shifts share a pipe, multiplications have another.
__device__ __forceinline__ uint complement(uint codes, uint ones) {
    return codes*ones + ones;
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

// What a norm counts, as stored in the lower half of a word: zero where it is not finite.
__device__ __forceinline__ float norm_of(uint word) {
    return scale_at<8>((const uint (&)[1]) word, 0);
}

// Two bytes of a plane, and the two `apart` behind them, if that is not 0.
struct query_bytes {
    uint first, second;

    __device__ __forceinline__ void load(const signed char * q, uint apart) {
        first  = *(const unsigned short *) q;
        second = apart ? *(const unsigned short *) (q + apart) : 0;
    }

    __device__ __forceinline__ uint in_a_row() const { return prmt(first, second, 0x5410); }
    __device__ __forceinline__ uint in_turn() const { return prmt(first, second, 0x5140); }
};

// What a lane multiplies with, as it lies in the planes of the queries: four values from place_of(step) on, of each step and block of rows.
template <uint STEPS, uint QB, typename Planes, typename Place> __device__ __forceinline__ void load_query_words(uint (&words)[STEPS][QB], const Planes & planes, uint g, const Place & place_of) {
#pragma unroll
    for (uint i = 0; i < STEPS*QB; ++i) {
        words[i/QB][i % QB] = *(const uint *) &planes[g % 2][4*(i % QB) + g/2][place_of(i/QB)];
    }
}

// A sum with the first plane of a query and one with the second. Of integers both fit: 256 levels of 8 bits by as many bytes.
__device__ __forceinline__ float joined_planes(int first, int second) {
    return (float) (first*SECOND_PLANE + second);
}

__device__ __forceinline__ float joined_planes(float first, float second) {
    return fmaf(first, (float) SECOND_PLANE, second);
}

// What a lane has of 16 rows of K: of cells g and g + 8. QB is the number of blocks of four query rows.
template <uint KIND, uint D, uint QB> struct decode_keys {
    static constexpr uint C = D/64, BITS = code_bits(KIND), ALIGN = level_row_align(KIND, D), CHUNK = 8*BITS;
    static constexpr uint SCALES = level_scale_bytes(KIND, D), WORDS = BITS == 8 ? 4 : BITS == 4 ? 2 : 1;
    static constexpr bool JOINED = ALIGN == 2; // words are put together by `join`
    static constexpr bool ONE_SCALE = KV_KIND_IS_TURBO(KIND);
    static constexpr uint TABLE = table_of_codes(KIND, BITS);
    // Of 8 bits a lane has two runs of codes of a chunk, 32 bytes apart.
    static constexpr uint RUNS = BITS == 8 ? 2 : 1, RUN = WORDS/RUNS;
    static constexpr uint CELL_SCALES = 2*C; // of a cell as floats, in a tile (decode_bulk.cuh)

    static __device__ __forceinline__ uint scale_number(uint c, uint second) { return 2*c + second; }

    struct queries {
        uint b[BITS == 4 ? 2 : 1][C][2][QB][2]; // [plane][chunk][word or scale][block of rows][half of the 32 values]
        uint lower, upper;                      // 4 bits: the first levels of each half of the table; 3 and 2: the first ones
        uint ones;                              // 4 bits: -1
    };

    uint scales[2][(SCALES + 3)/4];
    uint codes[2][C][WORDS + (JOINED ? RUNS : 0)];
    uint upper[2][C][JOINED ? 3 : 2];
    uint shift[2];

    // Where the lane's codes of a row begin.
    static __device__ __forceinline__ uint codes_at(uint t) {
        return SCALES + (BITS <= 3 ? 4 : 8)*t;
    }

    // JOINED: by how much codes are shifted, where rows begin `odd` bytes behind a word.
    static __device__ __forceinline__ uint shift_of(uint odd) {
        return even_row::shift_of(odd, SCALES);
    }

    // `codes_of` is that of row 0. Caches are below 4 GiB. Of a tile, all rows that a lane reads begin in the same half of a word: what is given is
    // the word, and by how much codes are shifted in it.
    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g, uint shift_of_rows = 0) {
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + g + 8*n, last) : cell + g + 8*n)*step;
            load_scales<Bytes, SCALES, ALIGN>(scales[n], rows + at); // of a tile nobody needs them
            if constexpr (JOINED) {
                const even_row row = Bytes::ENDS ? even_row::of(rows + at, SCALES) : even_row { rows + at, shift_of_rows };
                shift[n] = row.shift;
#pragma unroll
                for (uint i = 0; i < WORDS + RUNS; ++i) {
                    const uint word = i/(RUN + 1)*32 + i % (RUN + 1)*4; // behind the one that has the last bytes of the scales, or the first codes
                    codes[n][0][i] = Bytes::ENDS ? row.template word<Bytes>((uint) (codes_of - rows) - SCALES % 4 + word) : Bytes::template at<uint>(codes_of + at - SCALES % 4 + word);
                }
                for (uint i = 0; i < 3 && BITS == 3; ++i) {
                    upper[n][0][i] = row.template word<Bytes>(16 + 4*i);
                }
            } else {
#pragma unroll
                for (uint c = 0; c < C; ++c) {
                    load_chunk<Bytes>(c, n, codes_of + at + CHUNK*c, rows + at + SCALES + CHUNK*c + 16);
                }
            }
        }
    }

    template <typename Bytes> __device__ __forceinline__ void load_chunk(uint c, uint n, const uint8_t * from, const uint8_t * upper_at) {
        if constexpr (BITS <= 3) {
            codes[n][c][0] = Bytes::template at<uint>(from);
            if (BITS == 3) {
                load_two<Bytes, ALIGN>(upper[n][c], upper_at);
            }
        } else {
#pragma unroll
            for (uint i = 0; i < WORDS; i += 2) {
                uint two[2];
                load_two<Bytes, ALIGN>(two, from + 16*i);
                codes[n][c][i] = two[0];
                codes[n][c][i + 1] = two[1];
            }
        }
    }

    // What was loaded by the words that it lies in, before it is used.
    __device__ __forceinline__ void join() {
#pragma unroll
        for (uint n = 0; n < 2 && JOINED; ++n) {
#pragma unroll
            for (uint i = 0; i < WORDS; ++i) {
                const uint from = i + i/RUN;
                codes[n][0][i] = joined(codes[n][0][from], codes[n][0][from + (JOINED ? 1 : 0)], shift[n]);
            }
            for (uint i = 0; i < 2 && BITS == 3; ++i) {
                upper[n][0][i] = joined(upper[n][0][i], upper[n][0][i + (JOINED ? 1 : 0)], shift[n]);
            }
        }
    }

    // What the lane needs of the queries, as it lies in their planes.
    struct loaded_queries {
        query_bytes bytes[sizeof(queries::b)/4];

        template <typename Planes> __device__ __forceinline__ void load(const Planes & planes, uint g, uint t) {
#pragma unroll
            for (uint i = 0; i < sizeof(queries::b)/4; ++i) {
                const uint half_of = i % 2, qb = i/2 % QB, word = i/2/QB % 2, c = i/4/QB % C, plane = i/4/QB/C;
                if constexpr (BITS == 4) {
                    bytes[i].load(&planes[plane][4*qb + g/2][64*c + 8*t + 4*word + 2*half_of + g % 2*32], 0);
                } else {
                    bytes[i].load(&planes[g % 2][4*qb + g/2][64*c + 32*word + (BITS == 8 ? 8*t + 4*half_of : 4*t + 2*half_of)], BITS == 8 ? 2 : 16);
                }
            }
        }
    };

    static __device__ __forceinline__ void fill(queries & q, const loaded_queries & from, uint g) {
        if constexpr (BITS == 4) {
            q.lower = kept(LOWER_0);
            q.upper = kept(UPPER_0);
            q.ones  = kept(~0u);
        } else {
            q.lower = opaque(level_bytes<TABLE>().first);
        }
#pragma unroll
        for (uint i = 0; i < sizeof(q.b)/4; ++i) {
            uint & b = (&q.b[0][0][0][0][0])[i];
            if constexpr (BITS == 4) {
                const uint two = prmt(from.bytes[i].first, 0, 0x4140); // bytes 0 and 2
                b = g % 2 == 0 ? two : two << 8;
            } else {
                b = BITS == 8 ? from.bytes[i].in_a_row() : from.bytes[i].in_turn();
            }
            keep(b);
        }
    }

    // The first or the second scale of chunk c of the lane's row n, as it was loaded.
    __device__ __forceinline__ float scale_of(uint n, uint c, uint second) const {
        if constexpr (BITS == 4) {
            return kv_srft_scale(scales[n][c/2] >> (16*(c % 2) + 8*second));
        } else {
            return scale_at<BITS>(scales[n], 2*c + second);
        }
    }

    // Of the lane's query row with the keys of cells g and g + 8, in units of the queries' second plane and of the scales. `scale_of` gives
    // the scales of row n of these two: chunk c, the first or the second.
    template <typename Scales> __device__ __forceinline__ void products(const queries & q, uint t, const Scales & scale_of, float (&s)[QB][2]) const {
        if constexpr (BITS == 4) {
            products_4(q, scale_of, s);
        } else {
            products_by_scale(q, t, scale_of, s);
        }
    }

    template <typename Scales> __device__ __forceinline__ void products_by_scale(const queries & q, uint t, const Scales & scale_of, float (&s)[QB][2]) const {
        [[maybe_unused]] int all[QB][4]; // ONE_SCALE
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
                constexpr byte_table levels = level_bytes<TABLE>();
                const uint x = selectors_of<BITS>(codes[0][c][0], scale, upper[0][c][scale], t), y = selectors_of<BITS>(codes[1][c][0], scale, upper[1][c][scale], t);
                a[0] = prmt(q.lower, levels.second, x);
                a[1] = prmt(q.lower, levels.second, y);
                a[2] = prmt(q.lower, levels.second, x >> 16);
                a[3] = prmt(q.lower, levels.second, y >> 16);
            }
            if constexpr (ONE_SCALE) {
#pragma unroll
                for (uint qb = 0; qb < QB; ++qb) {
                    const uint b0 = q.b[0][c][scale][qb][0], b1 = q.b[0][c][scale][qb][1];
                    i == 0 ? first_mma_s8(all[qb], a, b0, b1) : mma_s8(all[qb], a, b0, b1);
                }
                continue;
            }
            const float s0 = scale_of(0, c, scale), s1 = scale_of(1, c, scale);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
                int sums[4];
                first_mma_s8(sums, a, q.b[0][c][scale][qb][0], q.b[0][c][scale][qb][1]);
#pragma unroll
                for (uint n = 0; n < 2; ++n) {
                    const float scale = n == 0 ? s0 : s1, sum = joined_planes(sums[2*n], sums[2*n + 1]);
                    s[qb][n] = i == 0 ? scale*sum : fmaf(scale, sum, s[qb][n]);
                }
            }
        }
        if constexpr (ONE_SCALE) {
            const float s0 = scale_of(0, 0, 0), s1 = scale_of(1, 0, 0);
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                s[i/2][i % 2] = (i % 2 == 0 ? s0 : s1)*joined_planes(all[i/2][i % 2*2], all[i/2][i % 2*2 + 1]);
            }
        }
    }

    template <typename Scales> __device__ __forceinline__ void products_4(const queries & q, const Scales & scale_of, float (&s)[QB][2]) const {
#pragma unroll
        for (uint c = 0; c < C; ++c) {
            int sums[2][QB][4];
#pragma unroll
            for (uint word = 0; word < 2; ++word) {
                const uint x = codes[0][c][word % WORDS], y = codes[1][c][word % WORDS];
                const uint lower[4] = { prmt(q.lower, LOWER_1, x), prmt(q.lower, LOWER_1, y), prmt(q.lower, LOWER_1, x >> 16), prmt(q.lower, LOWER_1, y >> 16) };
                const auto others = [&](uint x) { return complement(x, q.ones); };
                const uint upper[4] = { prmt(q.upper, UPPER_1, others(x)), prmt(q.upper, UPPER_1, others(y)), prmt(q.upper, UPPER_1, others(x >> 16)), prmt(q.upper, UPPER_1, others(y >> 16)) };
#pragma unroll
                for (uint i = 0; i < 2*QB; ++i) {
                    const uint plane = BITS == 4 ? i/QB : 0, qb = i % QB;
                    if (word == 0) {
                        first_mma_s8(sums[i/QB][qb], lower, q.b[plane][c][word][qb][0], q.b[plane][c][word][qb][1]);
                    } else {
                        mma_s8(sums[i/QB][qb], lower, q.b[plane][c][word][qb][0], q.b[plane][c][word][qb][1]);
                    }
                    mma_s8(sums[i/QB][qb], upper, q.b[plane][c][word][qb][0], q.b[plane][c][word][qb][1]);
                }
            }
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                const uint qb = i/4, n = i/2 % 2, second = i % 2;
                const float scale = scale_of(n, c, second), sum = joined_planes(sums[0][qb][i % 4], sums[1][qb][i % 4]);
                s[qb][n] = c == 0 && second == 0 ? scale*sum : fmaf(scale, sum, s[qb][n]);
            }
        }
    }
};

}  // namespace
}  // namespace kv
