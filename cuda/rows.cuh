// Rows into the cache: where the heads of an op lie, and a head's codes.
//
// A warp works on one head of one row, alone. Without an index the heads of one side go to the heads of the other in their
// order, whatever the shapes. Common head sizes are template arguments, so that the rotation stays in registers; 0 stands
// for the others.
#pragma once

#include "codec.cuh"
#include "kv_cuda.h"
#include "small_divisor.cuh"

namespace kv {
namespace {

using namespace metal;

using uint = unsigned;

constexpr int ROW_WARPS = 4;

struct rows_params {
    kv_rows_args    args;
    uint            kind, size, float_kind, index_bytes;
    const uint8_t * from;
    const uint8_t * index;
    uint8_t *       to;
    const float *   center; // of each head, null for none
    small_divisor   heads;   // no factor where there are too many
    bool            several; // matrices of rows
};

// What is not a number counts as 0, and nothing is beyond a million.
__device__ __forceinline__ float clean(float x) {
    const uint bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0.0f;
    }
    return fminf(fmaxf(x, -1e6f), 1e6f);
}

struct unit_place {
    uint64_t floats; // bytes
    uint64_t cache;
    bool     found; // the index is one of the cache's rows
};

// `float_bytes` are those of a head on the other side.
__device__ __forceinline__ unit_place place_of(const rows_params & p, uint unit, uint64_t float_bytes) {
    const kv_rows_args & args = p.args;
    const uint head_bytes = kv_row_bytes(p.kind, p.size);
    unit_place u;
    const uint row = p.heads.factor != 0 ? p.heads.quotient(unit) : unit/args.heads, head = unit - row*args.heads;
    uint i1 = row, i2 = 0, i3 = 0;
    if (p.several) {
        const uint above = row/args.rows[0];
        i1 = row - above*args.rows[0];
        i3 = above/args.rows[1];
        i2 = above - i3*args.rows[1];
    }
    u.floats = i1*args.float_nb[0] + i2*args.float_nb[1] + i3*args.float_nb[2] + head*float_bytes;
    if (p.index_bytes == 0) {
        const uint cache_row = unit/args.cache_heads;
        const uint c1 = cache_row % args.cache_rows[0], c2 = cache_row/args.cache_rows[0] % args.cache_rows[1];
        const uint c3 = cache_row/args.cache_rows[0]/args.cache_rows[1];
        u.found = true;
        u.cache = c1*args.cache_nb[0] + c2*args.cache_nb[1] + c3*args.cache_nb[2] + (uint64_t) (unit % args.cache_heads)*head_bytes;
        return u;
    }
    const uint8_t * at = p.index + i1*args.index_nb[0];
    if (p.several) {
        at += i2 % args.index_rows[0]*args.index_nb[1] + i3 % args.index_rows[1]*args.index_nb[2];
    }
    const int64_t target = row_number(at, p.index_bytes);
    u.found = target >= 0 && target < (int64_t) args.cache_rows[0];
    u.cache = (uint64_t) target*args.cache_nb[0] + i2*args.cache_nb[1] + i3*args.cache_nb[2] + (uint64_t) head*head_bytes;
    return u;
}

// Levels are integers, so the middle between two is a multiple of 0.5, and what is nearest to y follows from ceil(2 y) alone.
struct nearest_table {
    float   level[512]; // of ceil(2 y) + 256
    uint8_t code[512];
};

__device__ __forceinline__ void fill_nearest(uint bits, const float * levels, nearest_table & table, uint threads) {
    // In ascending order: of 5 bits negative levels have the upper half of the codes, and the largest of them comes first.
    const auto code_of = [&](uint place) { return bits != 5 ? place : place < KV_BAND_SIGN_5 ? 2*KV_BAND_SIGN_5 - 1 - place : place - KV_BAND_SIGN_5; };
    for (uint i = threadIdx.x; i < 512; i += threads) {
        uint place = 0;
        for (uint step = 1u << (bits - 1); step > 0; step /= 2) {
            const uint next = place + step;
            place = (float) ((int) i - 256) > levels[code_of(next - 1)] + levels[code_of(next)] ? next : place;
        }
        table.code[i]  = (uint8_t) code_of(place);
        table.level[i] = levels[code_of(place)];
    }
}

// The place of what is nearest to y, by twice that.
__device__ __forceinline__ uint nearest_place(float twice) {
    // A sum with this has no bits behind the point, and its lowest are those of an integer. Conversions take a pipe that is narrow.
    constexpr float    UP      = 12582912.0f;
    constexpr unsigned UP_BITS = 0x4b400000;
    return __float_as_uint(__fadd_ru(fminf(fmaxf(twice, -256.0f), 255.0f), UP)) - (UP_BITS - 256);
}

// Values of a row in registers: lane has N, `lane*N` and behind it. Those of a group of 32 are in 32/N lanes. The largest value is by its
// magnitude, twice its bits, and one more where it is positive: so a number says both, and of equal ones the positive is larger.
template <uint N> __device__ __forceinline__ uint largest_of_lane(const float (&x)[N]) {
    uint largest = 0;
    for (uint i = 0; i < N; ++i) {
        const uint bits = __float_as_uint(x[i]);
        largest = ::max(largest, bits << 1 | (~bits >> 31));
    }
    return largest;
}

template <uint N> __device__ __forceinline__ uint largest_of_group(const float (&x)[N]) {
    uint largest = largest_of_lane(x);
    for (uint n = 1; n < 32/N; n *= 2) {
        largest = ::max(largest, __shfl_xor_sync(KV_ALL_LANES, largest, n));
    }
    return largest;
}

// The scale of a group, of which KV_SRFT_UNIT is stored, 0 for none, and by how much it makes the squared error less than the group's energy.
struct scale_choice {
    float scale;
    float gain;
};

// What the exponent of such a float has more than that of a stored scale, in place: 120 (kv_srft_scale), less the 7 of KV_SRFT_UNIT.
constexpr uint SCALE_EXPONENT = 113u << 23;
static_assert(KV_SRFT_UNIT == 128.0f, "");

// The byte of a scale.
__device__ __forceinline__ uint8_t byte_of_scale(uint bits, float scale) {
    const uint x = __float_as_uint(scale), magnitude = x & 0x7fffffffu;
    return magnitude == 0 ? (uint8_t) 0 : (uint8_t) ((magnitude - SCALE_EXPONENT) >> 20 | (x >> (bits == 5 ? 19 : 31) & 1) << 7);
}

// COUNT of the scales that are tried for a group of `bits`, from number `first` on: what does not depend on its values. Behind the last
// that one comes again.
template <uint COUNT> struct scale_tries {
    float inverse_end[COUNT]; // 1/the level that the largest value is to be near
    int   steps[COUNT];       // from the scale that brings it there, as the bits of a float
    uint  last[COUNT];        // is that the last level?
    uint  kept, signs;        // bits of scales that are stored, without the sign, and the sign if that is one

    __device__ __forceinline__ scale_tries(uint bits, uint tries, uint first) {
        const bool fine = bits == 5;
        const auto levels = kv_srft_levels(bits);
        kept  = fine ? 0x7ff80000 : 0x7ff00000;
        signs = fine ? 0 : 0x80000000;
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            const uint count = fine ? KV_BAND_TRIES_5 : 2*tries, n = ::min(first + c, count - 1);
            last[c]        = !fine && n >= tries ? 1 : 0;
            inverse_end[c] = 1.0f/(fine ? 127.0f : last[c] ? levels[(1u << bits) - 1] : -levels[0]);
            steps[c]       = fine ? ((int) n + KV_BAND_FIRST_5)*(1 << 19) : kv_search[bits - 1][last[c]][last[c] ? n - tries : n]*(1 << 20);
        }
    }

    // kv_band_try, or kv_srft_try.
    __device__ __forceinline__ float scale(uint c, uint largest) const {
        constexpr int LEAST = (int) (SCALE_EXPONENT + (1 << 20)), MOST = (int) (SCALE_EXPONENT + (255 << 19));
        const int base = (int) __float_as_uint(__uint_as_float(largest >> 1)*inverse_end[c]), magnitude = ::min(::max(base + steps[c], LEAST), MOST);
        return __uint_as_float(((uint) magnitude & kept) | ((largest ^ last[c]) << 31 & signs));
    }
};

// What each of the scales that are tried gains, the lane's part of it: sums of products are only made of that.
template <uint COUNT, uint N> struct scale_gains {
    float scale[COUNT];
    float gain[COUNT];

    __device__ __forceinline__ scale_gains(const float (&x)[N], uint largest, const scale_tries<COUNT> & tries, const nearest_table & table) {
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            float xq = 0.0f, qq = 0.0f;
            scale[c] = tries.scale(c, largest);
            const float inverse = 2.0f/scale[c];
            for (uint i = 0; i < N; ++i) {
                const float q = table.level[nearest_place(x[i]*inverse)];
                xq = fmaf(x[i], q, xq);
                qq = fmaf(q, q, qq);
            }
            gain[c] = scale[c]*(2.0f*xq - scale[c]*qq);
        }
    }

    // A round of the sum over the lanes of a group, with those n lanes further.
    __device__ __forceinline__ void add(uint n) {
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            gain[c] += __shfl_xor_sync(KV_ALL_LANES, gain[c], n);
        }
    }

    __device__ __forceinline__ scale_choice best() const {
        scale_choice res = { 0.0f, 0.0f };
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            res.scale = gain[c] > res.gain ? scale[c] : res.scale;
            res.gain  = gain[c] > res.gain ? gain[c] : res.gain;
        }
        return res;
    }
};

// The best of the scales that are tried.
template <uint COUNT, uint N> __device__ __forceinline__ scale_choice best_scale(const float (&x)[N], const scale_tries<COUNT> & tries, const nearest_table & table) {
    scale_gains<COUNT, N> gains(x, largest_of_group(x), tries, table);
    for (uint n = 1; n < 32/N; n *= 2) {
        gains.add(n);
    }
    return gains.best();
}

// The lane's codes, and what they decode to, `unit` times a level and its scale.
template <uint N> __device__ __forceinline__ void code_values(const float (&x)[N], float scale, float unit, const nearest_table & table, uint8_t (&codes)[N], float (&decoded)[N]) {
    const bool zero = scale == 0.0f;
    const float inverse = zero ? 0.0f : 2.0f/scale, factor = scale*(unit*KV_SRFT_UNIT);
    for (uint i = 0; i < N; ++i) {
        const uint place = nearest_place(x[i]*inverse);
        decoded[i] = table.level[place]*factor;
        codes[i] = zero ? (uint8_t) 0 : table.code[place];
    }
}

// A row's codes in shared memory: one of each value, and then those of its scales.
template <uint SIZE, uint N> __device__ __forceinline__ void keep_codes(const uint8_t (&codes)[N], uint8_t scale_code, uint lane, uint8_t * to) {
    static_assert(N == 2 || N % 4 == 0, "");
    if constexpr (N == 2) {
        *(uint16_t *) (to + lane*N) = (uint16_t) (codes[0] | codes[1] << 8);
    } else {
#pragma unroll
        for (uint i = 0; i < N; i += 4) {
            *(uint *) (to + lane*N + i) = codes[i] | (uint) codes[i + 1] << 8 | (uint) codes[i + 2] << 16 | (uint) codes[i + 3] << 24;
        }
    }
    if (lane % (32/N) == 0) {
        to[SIZE + lane*N/32] = scale_code;
    }
}

// From there to its bytes in the cache, by one warp.
template <uint SIZE, uint BITS> __device__ __forceinline__ void pack_row(const uint8_t * codes, uint lane, uint8_t * row) {
    if (lane < SIZE/32) {
        row[lane] = codes[SIZE + lane];
    }
    uint8_t * body = row + kv_srft_scale_bytes(BITS, SIZE);
    if constexpr (BITS == 4) {
        // A byte has a value of one group and one of the next.
#pragma unroll
        for (uint i = lane; i < SIZE/4; i += 32) {
            const uint16_t * from = (const uint16_t *) (codes + i/16*64) + i % 16;
            ((uint16_t *) body)[i] = (uint16_t) (from[0] | from[16] << 4);
        }
    } else {
        for (uint b = lane; b < SIZE*BITS/8; b += 32) {
            body[b] = kv_srft_packed(codes, BITS, SIZE, b);
        }
    }
}

// kv_srft_encode by one warp, with `kept` for its codes.
template <uint SIZE, uint BITS, uint N> __device__ __forceinline__ void encode_row(const float (&x)[N], uint lane, const nearest_table & table, uint8_t * kept, uint8_t * row) {
    constexpr uint TRIES = BITS == 4 ? KV_SRFT_TRIES_4 : KV_SRFT_TRIES;
    const float scale = best_scale(x, scale_tries<2*TRIES>(BITS, TRIES, 0), table).scale;
    uint8_t codes[N];
    float decoded[N];
    code_values(x, scale, kv_srft_unit(BITS), table, codes, decoded);
    keep_codes<SIZE>(codes, byte_of_scale(BITS, scale), lane, kept);
    __syncwarp();
    pack_row<SIZE, BITS>(kept, lane, row);
    __syncwarp();
}

// The first warps of a block wait for each other.
template <uint WARPS> __device__ __forceinline__ void sync_warps() {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync 1, %0;" :: "n"(32*WARPS) : "memory");
#elif defined(KV_CUDA_EMULATED)
    __syncthreads(); // there are no others
#endif
}

// Heads of rows that stand alone, a warp for each of the block's first; `memory` has KV_ROWS_FLOATS(size) floats for each warp. SRFT:
// of those kinds alone.
template <uint SIZE, bool SRFT, uint WARPS> __device__ __forceinline__ void write_rows(const rows_params & p, float * memory, float * levels, nearest_table & nearest) {
    const uint size = SIZE ? SIZE : p.size, kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32, units = p.args.units;
    if (blockIdx.x*WARPS >= units) {
        return;
    }
    constexpr uint N = SIZE ? SIZE/32 : 1;
    // Codes from registers: those of tables, at common sizes.
    const bool in_lanes = SIZE != 0 && (kind == KV_KIND_SRFT4 || kind == KV_KIND_SRFT3 || kind == KV_KIND_SRFT2);
    float * y = memory + warp*KV_ROWS_FLOATS(size);
    unit_place u = {};
    float first[N], center[N] = {};
    // A head is on its way while the table is filled.
    const auto center_of = [&](uint unit) { return p.center + unit % p.args.heads*size; };
    const auto ask = [&](uint unit) {
        u = place_of(p, unit, size*p.args.value_step);
        for (uint i = 0; i < N && SIZE != 0; ++i) {
            first[i] = kv_float_at(p.from + u.floats + (i*32 + lane)*p.args.value_step, p.float_kind);
        }
        for (uint i = 0; i < N && SIZE != 0 && p.center; ++i) {
            center[i] = center_of(unit)[i*32 + lane];
        }
    };
    uint unit = blockIdx.x*WARPS + warp;
    if (unit < units) {
        ask(unit);
    }
    if (in_lanes) {
        kv_row_levels(kind, threadIdx.x, levels);
        sync_warps<WARPS>();
        fill_nearest(kv_code_bits(kind), levels, nearest, 32*WARPS);
        sync_warps<WARPS>();
    }
    while (unit < units) {
        uint8_t * row = p.to + u.cache;
        const bool found = u.found;
        for (uint i = 0; i < N && SIZE != 0; ++i) {
            y[i*32 + lane] = clean(first[i] - center[i]);
        }
        for (uint i = lane; i < size && SIZE == 0; i += 32) {
            y[i] = clean(kv_float_at(p.from + u.floats + i*p.args.value_step, p.float_kind) - (p.center ? center_of(unit)[i] : 0.0f));
        }
        unit += gridDim.x*WARPS;
        if (unit < units) {
            ask(unit);
        }
        if (!found) {
            continue;
        }
        if constexpr (SIZE != 0) {
            if (in_lanes) {
                kv_rotate_from(y, size, KV_SIGNS_ROTATION, 1.0f, lane, y);
                __syncwarp();
                float x[N];
                for (uint i = 0; i < N; ++i) {
                    x[i] = y[lane*N + i];
                }
                __syncwarp();
                uint8_t * codes = (uint8_t *) y;
                if (kind == KV_KIND_SRFT4) {
                    encode_row<SIZE, 4>(x, lane, nearest, codes, row);
                } else if (kind == KV_KIND_SRFT3) {
                    encode_row<SIZE, 3>(x, lane, nearest, codes, row);
                } else {
                    encode_row<SIZE, 2>(x, lane, nearest, codes, row);
                }
                continue;
            }
        }
        if constexpr (SRFT) {
            kv_rotate_from(y, size, KV_SIGNS_ROTATION, 1.0f, lane, y);
            kv_srft_encode(y, 8, size, lane, row);
        } else {
            kv_row_encode(y, kind, size, lane, row);
        }
        __syncwarp();
    }
}

}  // namespace
}  // namespace kv
