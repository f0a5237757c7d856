// Weighted sums of the values of 16 cells, by f16 tensor cores: rows of the sums are values, columns query rows.
//
// The weights carry the scales. Values j and j + 32 of a cell, which have a scale each, make an operand, as a row has them side by side:
// even columns are of the first scale, with zeros where the second is multiplied, odd ones of the second.
//
//     4 bits   A byte has the two codes, and a table in shared memory (a copy for each lane, so that no two lanes meet in
//              a bank) has the two levels as halves.
//     3, 2     Levels are halves by two lookups of prmt, of their lower and of their upper bytes.
//     8        A byte is a half by its place in one.
//     turbo    Levels of 3 or 2 bits, with one scale for all, and behind them as many values that are signs: 1 or -1 by the upper bit of a half.
#pragma once

#include "decode_halves.cuh"
#include "decode_keys.cuh"

namespace kv {
namespace {

// A word of shared memory that does not change once it stands, so that loads may be moved.
__device__ __forceinline__ uint shared_word(uint address) {
#ifdef KV_CUDA_EMULATED
    return *(const uint *) __cvta_shared_to_generic(address);
#else
    uint r;
    asm("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
#endif
}

// The table that V of 4 bits looks up: an entry for each byte, two codes, with a copy for each lane.
struct lane_table {
    uint at; // the lane's copy of the first entry, an address of shared memory

    // Two halves for byte n of a word.
    __device__ __forceinline__ uint operator()(uint word, uint n) const {
        return shared_word(at + prmt(word, 0, 0x4440 | n)*128);
    }
};

// The same with 256 bytes from entry to entry, at a multiple of 64 KiB: an address is made by one instruction.
struct wide_lane_table {
    uint at;

    __device__ __forceinline__ uint operator()(uint word, uint n) const {
        return shared_word(prmt(word, at, 0x7604 | n << 4));
    }
};

// What V of 3 and 2 bits looks up: levels as halves, the first ones of the table of their lower bytes and of that of their upper bytes.
struct half_tables {
    uint low, high;

    template <uint TABLE> static __device__ __forceinline__ half_tables of() {
        return { opaque(half_bytes<TABLE, 0>().first), opaque(half_bytes<TABLE, 8>().first) };
    }
};

// Where the weight of a cell, of 16, goes: lane t multiplies cells t and t + 4, and then t + 8 and t + 12. Those of cells g and g + 8 are
// side by side.
__device__ __forceinline__ uint weight_at(uint cell) {
    return 4*(cell % 4) + cell/4 % 2*2 + cell/8;
}

// The lower or the upper half of a, times both of b.
__device__ __forceinline__ uint half_times(uint a, uint upper, uint b) {
    const __half2 & two = *(const __half2 *) &a;
    const __half2 x = __hmul2(upper ? __high2half2(two) : __low2half2(two), *(const __half2 *) &b);
    return *(const uint *) &x;
}

// Of the halves of two scales the one that a lane multiplies with.
__device__ __forceinline__ uint half_of_lane(uint g) {
    return g % 2 == 0 ? 0x0000ffff : 0xffff0000;
}

// What a lane has of 16 rows of V: of cells t, t + 4, t + 8, t + 12.
template <uint KIND, uint D> struct decode_values {
    static constexpr uint C = D/64, BITS = code_bits(KIND), ALIGN = level_row_align(KIND, D), CHUNK = 8*BITS;
    static constexpr uint SCALES = level_scale_bytes(KIND, D);
    static constexpr bool JOINED = ALIGN == 2; // words are put together by `join`
    static constexpr bool SIGNS = KV_KIND_IS_TURBO(KIND);
    static constexpr uint TABLE = table_of_codes(KIND, BITS);
    static constexpr uint CHUNKS = SIGNS ? 2*C : C, WIDTH = 64*CHUNKS; // of the sums: behind those of levels, those of signs
    static constexpr uint SCALE_WORDS = SIGNS ? 2 : C;                 // of a row: two halves each
    static constexpr bool IN_A_ROW = false;                            // are the sums that a lane has of a product neighbours? Else those of rows g and g + 8 are
    // Weights are up to 2^SLACK (decode_softmax.cuh), but small as a rule, and so may scales be: their product keeps its digits if these are
    // larger by 2^POWER. With more the largest of both would be no half. Scales of 8 bits are halves already.
    static constexpr uint  SLACK = BITS == 8 || SIGNS ? 0 : 3;
    static constexpr uint  POWER = BITS == 8 || SIGNS ? 0 : 7 - SLACK;
    static constexpr uint  TABLE_BYTES = BITS == 4 ? 256*32*4 : 0; // [two codes][lane]: two halves

    uint scales[4][(SCALES + 3)/4];
    uint codes[4][C][BITS == 8 || JOINED ? 2 : 1];
    uint upper[4][C][JOINED ? 3 : 2];
    uint shift[4];
    uint signs[4]; // D/8 bits of a row: value D/8 g + i in bit i, and that D/16 behind it 16 bits further up

    // What the sums of a value are multiplied by.
    static __device__ __forceinline__ float unit_of(uint value) {
        return SIGNS && value >= D ? kv_mean_magnitudes[kv_size_index(D)] : level_unit(KIND, D)/(1 << POWER);
    }

    // JOINED: as decode_keys has it.
    static __device__ __forceinline__ uint shift_of(uint odd) {
        return even_row::shift_of(odd, SCALES);
    }

    // What levels are looked up in: `of_lane` of 4 bits; of 8 bits nobody asks.
    template <typename Table> static __device__ __forceinline__ auto table_of(const Table & of_lane) {
        if constexpr (BITS == 4) {
            return of_lane();
        } else {
            return half_tables::of<TABLE>();
        }
    }

    static __device__ __forceinline__ uint codes_at(uint g) {
        return SCALES + (BITS <= 3 ? 2 : 4)*g;
    }

    // The value that sum i of the lane is of; i is made of chunk, pair and place of the mma's four.
    static __device__ __forceinline__ uint value_of(uint i, uint g) {
        if (SIGNS && i >= 8*C) {
            const uint n = i - 8*C;
            return D + D/8*g + D/16*(n % 2) + n/8*4 + n/4 % 2*2 + n/2 % 2;
        }
        return i/8*64 + i % 2*32 + i/2 % 2 + (BITS <= 3 ? 2*g + i/4 % 2*16 : 4*g + i/4 % 2*2);
    }

    // As decode_keys has it; up to 3 bits `codes_of` is where codes begin.
    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint t, uint shift_of_rows = 0) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + t + 4*n, last) : cell + t + 4*n)*step;
            load_scales<Bytes, SCALES, ALIGN>(scales[n], rows + at); // of a tile nobody needs them
            if constexpr (JOINED) {
                const even_row row = Bytes::ENDS ? even_row::of(rows + at, SCALES) : even_row { rows + at, shift_of_rows };
                shift[n] = row.shift;
                for (uint i = 0; i < 2 && BITS == 4; ++i) {
                    codes[n][0][i] = Bytes::ENDS ? row.template word<Bytes>((uint) (codes_of - rows) - SCALES + 4*i) : Bytes::template at<uint>(codes_of + at - SCALES + 4*i);
                }
                for (uint i = 0; i < 3 && BITS == 3; ++i) {
                    upper[n][0][i] = row.template word<Bytes>(16 + 4*i);
                }
            }
            if constexpr (SIGNS) {
                load_signs<Bytes>(n, rows + at + signs_at(KIND, D) + threadIdx.x % 32/4*(D/64));
            }
#pragma unroll
            for (uint c = 0; c < C; ++c) {
                [[maybe_unused]] const uint8_t * from = codes_of + at + CHUNK*c;
                if constexpr (BITS <= 3) {
                    codes[n][c][0] = Bytes::template at<unsigned short>(from);
                    if constexpr (BITS == 3 && !JOINED) {
                        load_two<Bytes, ALIGN>(upper[n][c], rows + at + SCALES + CHUNK*c + 16);
                    }
                } else if constexpr (BITS == 8) {
                    codes[n][c][0] = Bytes::template at<uint>(from);
                    codes[n][c][1] = Bytes::template at<uint>(from + 32);
                } else if constexpr (!JOINED) {
                    codes[n][c][0] = Bytes::template at<uint>(from);
                }
            }
        }
    }

    template <typename Bytes> __device__ __forceinline__ void load_signs(uint n, const uint8_t * from) {
        if constexpr (D == 64) {
            signs[n] = Bytes::template at<uint8_t>(from);
        } else if constexpr (D == 128) {
            signs[n] = Bytes::template at<unsigned short>(from);
        } else {
            signs[n] = Bytes::template at<uint>(from);
        }
    }

    // What was loaded by the words that it lies in, before it is used.
    __device__ __forceinline__ void join() {
#pragma unroll
        for (uint n = 0; n < 4 && JOINED; ++n) {
            if constexpr (BITS == 4) {
                codes[n][0][0] = joined(codes[n][0][0], codes[n][0][JOINED ? 1 : 0], shift[n]);
            }
            for (uint i = 0; i < 2 && BITS == 3; ++i) {
                upper[n][0][i] = joined(upper[n][0][i], upper[n][0][i + (JOINED ? 1 : 0)], shift[n]);
            }
        }
#pragma unroll
        for (uint n = 0; n < 4 && SIGNS && D <= 128; ++n) {
            signs[n] = D == 64 ? signs[n] | signs[n] << 12 : prmt(signs[n], 0, 0x4140);
        }
    }

    // The levels of the n-th cell: of four values of the first scale of a chunk, and of those 32 behind.
    template <typename Table> __device__ __forceinline__ void levels_of(uint (&x)[4], uint n, uint c, const Table & table, uint g) const {
        if (SIGNS && c >= C) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                x[i] = (signs[n] << (15 - (4*(c - C) + i)) & 0x80008000) | 0x3c003c00;
            }
            return;
        }
        if constexpr (BITS == 8) {
            const uint a = codes[n][c][0], b = codes[n][c][1];
            const uint front = prmt(a, b, 0x5140) ^ 0x80808080, back = prmt(a, b, 0x7362) ^ 0x80808080;
            x[0] = halves_of_bytes(front, 0);
            x[1] = halves_of_bytes(front, 1);
            x[2] = halves_of_bytes(back, 0);
            x[3] = halves_of_bytes(back, 1);
        } else if constexpr (BITS == 4) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                x[i] = table(codes[n][c][0], i);
            }
        } else {
            // Values 2g and 2g + 1 in the lower half, those 16 behind in the upper, of the two scales in turn.
            uint both = (codes[n][c][0] | codes[n][c][0] << 14) & 0x33333333;
            if (BITS == 3) {
                const uint y = upper[n][c][1];
                const uint bits = choose(0x000f000f, upper[n][c][0] >> 2*g, __funnelshift_r(y, y, 2*g - 4)) & 0x00330033;
                both |= bits*0x204 & 0x44444444;
            }
            constexpr byte_table low = half_bytes<TABLE, 0>(), high = half_bytes<TABLE, 8>();
#pragma unroll
            for (uint i = 0; i < 2; ++i) {
                const uint selector = both >> 16*i, l = prmt(table.low, low.second, selector), h = prmt(table.high, high.second, selector);
                x[2*i]     = prmt(l, h, 0x5140);
                x[2*i + 1] = prmt(l, h, 0x7362);
            }
        }
    }

    // The two scales of chunk c of a row as halves, from its scales as they are stored; of turbo that of levels or of signs.
    static __device__ __forceinline__ uint two_scales(const uint (&words)[(SCALES + 3)/4], uint c) {
        if constexpr (SIGNS) {
            return finite_or_zero(prmt(words[0], 0, c ? 0x3232 : 0x1010));
        } else if constexpr (BITS == 8) {
            return finite_or_zero(words[c]);
        } else {
            return halves_of_scales<POWER>(prmt(words[c/2], 0, c % 2 ? 0x4342 : 0x4140));
        }
    }

    // The scales of the lane's cells 2 `half_of` and the next as they were loaded, with a zero for the one that it does not multiply with.
    __device__ __forceinline__ void scales_of(uint half_of, uint g, uint (&res)[2][SCALE_WORDS]) const {
#pragma unroll
        for (uint i = 0; i < 2*SCALE_WORDS; ++i) {
            res[i/SCALE_WORDS][i % SCALE_WORDS] = two_scales(scales[2*half_of + i/SCALE_WORDS], i % SCALE_WORDS) & half_of_lane(g);
        }
    }

    // `weights` are those of row g/2 of each block of query rows, as they lie in shared memory; acc is [block of rows][chunk][pair of
    // values]. `scales_of` is as above.
    template <uint QB, typename Table, typename Scales> __device__ __forceinline__ void add(const ::uint2 (&weights)[QB], const Table & table, uint g, const Scales & scales_of, float (&acc)[QB][CHUNKS][2][4]) const {
#pragma unroll
        for (uint half_of = 0; half_of < 2; ++half_of) {
            uint scales[2][SCALE_WORDS];
            scales_of(half_of, scales);
#pragma unroll
            for (uint c = 0; c < CHUNKS; ++c) {
                const uint scale = SIGNS ? c/C : c;
                uint x[4], y[4];
                levels_of(x, 2*half_of, c, table, g);
                levels_of(y, 2*half_of + 1, c, table, g);
#pragma unroll
                for (uint qb = 0; qb < QB; ++qb) {
                    const uint b0 = half_times(weights[qb].x, half_of, scales[0][scale]), b1 = half_times(weights[qb].y, half_of, scales[1][scale]);
#pragma unroll
                    for (uint pair = 0; pair < 2; ++pair) {
                        const uint a[4] = { x[2*pair], x[2*pair + 1], y[2*pair], y[2*pair + 1] };
                        mma_f16(acc[qb][c][pair], a, b0, b1);
                    }
                }
            }
        }
    }
};

}  // namespace
}  // namespace kv
