// Rows into the cache: where the heads of an op lie, and a head's codes.
//
// A warp works on one head of one row, alone. Without an index the heads of one side go to the heads of the other in their
// order, whatever the shapes. Common head sizes are template arguments, so that the rotation stays in registers; 0 stands
// for the others.
#pragma once

#include "codec.cuh"
#include "kv_cuda.h"

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
    const uint head = unit % args.heads, row = unit/args.heads;
    const uint i1 = row % args.rows[0], i2 = row/args.rows[0] % args.rows[1], i3 = row/args.rows[0]/args.rows[1];
    u.floats = i1*args.float_nb[0] + i2*args.float_nb[1] + i3*args.float_nb[2] + head*float_bytes;
    if (p.index_bytes == 0) {
        const uint cache_row = unit/args.cache_heads;
        const uint c1 = cache_row % args.cache_rows[0], c2 = cache_row/args.cache_rows[0] % args.cache_rows[1];
        const uint c3 = cache_row/args.cache_rows[0]/args.cache_rows[1];
        u.found = true;
        u.cache = c1*args.cache_nb[0] + c2*args.cache_nb[1] + c3*args.cache_nb[2] + (uint64_t) (unit % args.cache_heads)*head_bytes;
        return u;
    }
    const uint8_t * at = p.index + i1*args.index_nb[0] + i2 % args.index_rows[0]*args.index_nb[1] +
                         i3 % args.index_rows[1]*args.index_nb[2];
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
    for (uint i = threadIdx.x; i < 512; i += threads) {
        uint code = 0;
        for (uint step = 1u << (bits - 1); step > 0; step /= 2) {
            const uint next = code + step;
            code = (float) ((int) i - 256) > levels[next - 1] + levels[next] ? next : code;
        }
        table.code[i]  = (uint8_t) code;
        table.level[i] = levels[code];
    }
}

__device__ __forceinline__ uint nearest_place(float y) {
    return (uint) (::min(::max(__float2int_ru(2.0f*y), -256), 255) + 256);
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

// The code of a group's scale, and by how much it makes the squared error less than the group's energy.
struct scale_choice {
    uint  code;
    float gain;
};

// COUNT of the scales that are tried for a group of `bits`, from number `first` on: what does not depend on its values. Behind the last
// that one comes again.
template <uint COUNT> struct scale_tries {
    float inverse_end[COUNT]; // 1/the level that the largest value is to be near
    int   shift[COUNT];
    bool  last[COUNT];

    __device__ __forceinline__ scale_tries(uint bits, uint tries, uint first) {
        const auto levels = kv_srft_levels(bits);
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            const uint n = ::min(first + c, 2*tries - 1);
            last[c]        = n >= tries;
            inverse_end[c] = 1.0f/(last[c] ? levels[(1u << bits) - 1] : -levels[0]);
            shift[c]       = kv_search[bits - 1][last[c]][last[c] ? n - tries : n] - (120 << 3);
        }
    }

    // kv_srft_try
    __device__ __forceinline__ uint code(uint c, uint largest) const {
        const uint base = __float_as_uint(__uint_as_float(largest >> 1)*KV_SRFT_UNIT*inverse_end[c]);
        return (uint) ::min(::max((int) (base >> 20) + shift[c], 1), 127) | (((largest & 1) == 0) == last[c] ? 128u : 0u);
    }
};

// What each of the scales that are tried gains, the lane's part of it: sums of products are only made of that.
template <uint COUNT, uint N> struct scale_gains {
    uint  code[COUNT];
    float gain[COUNT];

    __device__ __forceinline__ scale_gains(const float (&x)[N], uint largest, const scale_tries<COUNT> & tries, const nearest_table & table) {
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            float xq = 0.0f, qq = 0.0f;
            code[c] = tries.code(c, largest);
            const float scale = kv_srft_scale(code[c])/KV_SRFT_UNIT, inverse = 1.0f/scale;
            for (uint i = 0; i < N; ++i) {
                const float q = table.level[nearest_place(x[i]*inverse)];
                xq = fmaf(x[i], q, xq);
                qq = fmaf(q, q, qq);
            }
            gain[c] = scale*(2.0f*xq - scale*qq);
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
        scale_choice res = { 0, 0.0f };
#pragma unroll
        for (uint c = 0; c < COUNT; ++c) {
            res.code = gain[c] > res.gain ? code[c] : res.code;
            res.gain = gain[c] > res.gain ? gain[c] : res.gain;
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
template <uint N> __device__ __forceinline__ void code_values(const float (&x)[N], uint scale_code, float unit, const nearest_table & table, uint8_t (&codes)[N], float (&decoded)[N]) {
    const bool zero = scale_code == 0;
    const float scale = kv_srft_scale(scale_code), inverse = zero ? 0.0f : KV_SRFT_UNIT/scale;
    for (uint i = 0; i < N; ++i) {
        const uint place = nearest_place(x[i]*inverse);
        decoded[i] = table.level[place]*(scale*unit);
        codes[i] = zero ? (uint8_t) 0 : table.code[place];
    }
}

// A row's codes in shared memory: one of each value, and then those of its scales.
template <uint SIZE, uint N> __device__ __forceinline__ void keep_codes(const uint8_t (&codes)[N], uint scale_code, uint lane, uint8_t * to) {
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
        to[SIZE + lane*N/32] = (uint8_t) scale_code;
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
    const uint scale_code = best_scale(x, scale_tries<2*TRIES>(BITS, TRIES, 0), table).code;
    uint8_t codes[N];
    float decoded[N];
    code_values(x, scale_code, kv_srft_unit(BITS), table, codes, decoded);
    keep_codes<SIZE>(codes, scale_code, lane, kept);
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
