// Weighted sums of the values of 16 cells, by f16 tensor cores: rows of the sums are values, columns query rows.
//
// The weights carry the scales, so that a product has values of one scale. Two cells make an operand:
//
//     4 bits   Codes of two cells make a byte, and a table in shared memory (a copy for each lane, so that no two lanes meet in
//              a bank) has the two levels as halves.
//     3, 2     Levels are halves by two lookups of prmt, of their lower and of their upper bytes.
//     8        A byte is a half by its place in one.
#pragma once

#include "decode_keys.cuh"
#include "mma.cuh"

namespace kv {
namespace {

__device__ __forceinline__ uint finite(uint halves) {
    const __half2 low = __float2half2_rn(-65504.0f), high = __float2half2_rn(65504.0f);
    const __half2 x = __hmin2(__hmax2(*(const __half2 *) &halves, low), high);
    return *(const uint *) &x;
}

// The table that V of 4 bits looks up: an entry for each byte, two codes, with a copy for each lane. It does not change once it
// stands, so that loads may be moved.
struct lane_table {
    uint at; // the lane's copy of the first entry, an address of shared memory

    // Two halves for byte n of a word.
    __device__ __forceinline__ uint operator()(uint word, uint n) const {
        uint r;
        asm("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at + prmt(word, 0, 0x4440 | n)*128));
        return r;
    }
};

// The same with 256 bytes from entry to entry, at a multiple of 64 KiB: an address is made by one instruction.
struct wide_lane_table {
    uint at;

    __device__ __forceinline__ uint operator()(uint word, uint n) const {
        uint r;
        asm("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(prmt(word, at, 0x7604 | n << 4)));
        return r;
    }
};

// What V of 3 and 2 bits looks up: levels as halves, the first ones of the table of their lower bytes and of that of their upper bytes.
struct half_tables {
    uint low, high;

    template <uint BITS> static __device__ __forceinline__ half_tables of() {
        return { opaque(half_bytes<BITS, 0>().first), opaque(half_bytes<BITS, 8>().first) };
    }
};

// Where the weight of a cell, of 16, goes: lane t multiplies cells t, t + 4, t + 8 and t + 12.
__device__ __forceinline__ uint weight_at(uint cell) {
    return 4*(cell % 4) + cell/4;
}

// What a lane has of 16 rows of V: of cells t, t + 4, t + 8, t + 12.
template <uint KIND, uint D> struct decode_values {
    static constexpr uint C = D/64, BITS = code_bits(KIND), ALIGN = level_row_align(KIND, D), CHUNK = 8*BITS;
    static constexpr uint SCALES = level_scale_bytes(KIND, D);
    static constexpr bool JOINED = ALIGN == 2; // words are put together by `join`
    // Weights are small, and so may scales be: their product keeps its digits if these are larger by 2^POWER.
    static constexpr uint  POWER = BITS == 8 ? 0 : 7;
    static constexpr float UNIT  = level_unit(KIND, D)/(1 << POWER); // of the sums
    static constexpr uint  TABLE_BYTES = BITS == 4 ? 256*32*4 : 0; // [two codes][lane]: two halves

    uint scales[4][(SCALES + 3)/4];
    uint codes[4][C][BITS == 8 || JOINED ? 2 : 1];
    uint upper[4][C][JOINED ? 3 : 2];
    uint shift[4];

    // What levels are looked up in: `of_lane` of 4 bits; of 8 bits nobody asks.
    template <typename Table> static __device__ __forceinline__ auto table_of(const Table & of_lane) {
        if constexpr (BITS == 4) {
            return of_lane();
        } else {
            return half_tables::of<BITS == 2 ? 2 : 3>();
        }
    }

    static __device__ __forceinline__ uint codes_at(uint g) {
        return SCALES + (BITS <= 3 ? 2 : 4)*g;
    }

    // The value that sum i of the lane is of; i is made of chunk, scale, pair and place of the mma's four.
    static __device__ __forceinline__ uint value_of(uint i, uint g) {
        return i/16*64 + i/8 % 2*32 + i/2 % 2 + (BITS <= 3 ? 2*g + i/4 % 2*16 : 4*g + i/4 % 2*2);
    }

    template <typename Bytes> __device__ __forceinline__ void load(const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint t) {
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint at = (Bytes::ENDS ? min(cell + t + 4*n, last) : cell + t + 4*n)*step;
            load_scales<Bytes, SCALES, ALIGN>(scales[n], rows + at); // of a tile nobody needs them
            if constexpr (JOINED) {
                const even_row row = Bytes::ENDS || n == 0 ? even_row(rows + at) : even_row(rows + (cell + t)*step).behind(4*n*step);
                shift[n] = row.shift;
                for (uint i = 0; i < 2 && BITS == 4; ++i) {
                    codes[n][0][i] = row.template word<Bytes>((uint) (codes_of - rows) - SCALES + 4*i);
                }
                for (uint i = 0; i < 3 && BITS == 3; ++i) {
                    upper[n][0][i] = row.template word<Bytes>(16 + 4*i);
                }
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
    }

    // The levels of cells `first` and the next: of the lane's four values of a scale.
    template <typename Table> __device__ __forceinline__ void levels_of(uint (&x)[4], uint first, uint c, uint scale, const Table & table, uint g) const {
        if constexpr (BITS == 8) {
            const uint a = codes[first][c][scale], b = codes[first + 1][c][scale];
            const uint front = prmt(a, b, 0x5140) ^ 0x80808080, back = prmt(a, b, 0x7362) ^ 0x80808080;
            x[0] = halves_of_bytes(front, 0);
            x[1] = halves_of_bytes(front, 1);
            x[2] = halves_of_bytes(back, 0);
            x[3] = halves_of_bytes(back, 1);
        } else if constexpr (BITS == 4) {
            const uint a = codes[first][c][0], b = codes[first + 1][c][0];
            const uint both = scale ? choose(0x0f0f0f0f, a >> 4, b) : choose(0x0f0f0f0f, a, b << 4);
#pragma unroll
            for (uint n = 0; n < 4; ++n) {
                x[n] = table(both, n);
            }
        } else {
            // Values 2g and 2g + 1 in the lower half, those 16 behind in the upper, of the two scales in turn.
            const uint a = (codes[first][c][0] | codes[first][c][0] << 14) & 0x33333333;
            const uint b = (codes[first + 1][c][0] | codes[first + 1][c][0] << 14) & 0x33333333;
            uint both = scale ? choose(0x03030303, a >> 4, b) : choose(0x03030303, a, b << 4);
            if (BITS == 3) {
                const uint y = upper[first + 1][c][scale];
                const uint bits = choose(0x000f000f, upper[first][c][scale] >> 2*g, __funnelshift_r(y, y, 2*g - 4)) & 0x00330033;
                both |= bits*0x204 & 0x44444444;
            }
            constexpr byte_table low = half_bytes<BITS == 3 ? 3 : 2, 0>(), high = half_bytes<BITS == 3 ? 3 : 2, 8>();
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                const uint selector = both >> 16*n, l = prmt(table.low, low.second, selector), h = prmt(table.high, high.second, selector);
                x[2*n]     = prmt(l, h, 0x5140);
                x[2*n + 1] = prmt(l, h, 0x7362);
            }
        }
    }

    // Scale i of the lane's four cells, as halves.
    __device__ __forceinline__ ::uint2 scales_of(uint i) const {
        const auto of_two = [&](uint first) {
            if constexpr (BITS == 8) {
                return finite(prmt(scales[first][i/2], scales[first + 1][i/2], i % 2 ? 0x7632 : 0x5410));
            } else {
                const uint selector = i % 4 | (i % 4 + 4) << 8;
                return halves_of_scales<POWER>(prmt(scales[first][i/4], scales[first + 1][i/4], selector) & 0x00ff00ff);
            }
        };
        return make_uint2(of_two(0), of_two(2));
    }

    // `weights` are those of row g for cells t, t + 4, t + 8 and t + 12; acc is [chunk][scale][pair of values]. `scales_of` gives scale i
    // of these cells.
    template <typename Table, typename Scales> __device__ __forceinline__ void add(::uint2 weights, const Table & table, uint g, const Scales & scales_of, float (&acc)[C][2][2][4]) const {
#pragma unroll
        for (uint i = 0; i < 2*C; ++i) {
            const uint c = i/2, scale = i % 2;
            const ::uint2 scales = scales_of(i);
            const uint b0 = times(weights.x, scales.x), b1 = times(weights.y, scales.y);
            uint x[4], y[4];
            levels_of(x, 0, c, scale, table, g);
            levels_of(y, 2, c, scale, table, g);
#pragma unroll
            for (uint pair = 0; pair < 2; ++pair) {
                const uint a[4] = { x[2*pair], x[2*pair + 1], y[2*pair], y[2*pair + 1] };
                mma_f16(acc[c][scale][pair], a, b0, b1);
            }
        }
    }
};

}  // namespace
}  // namespace kv
