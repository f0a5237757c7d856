// Queries in K's domain as bytes, which decoding kernels multiply.
#pragma once

#include "attention.cuh"
#include "levels.cuh"

namespace kv {

// Queries of blocks that copy tiles (decode_bulk.cuh): rows of such a block, blocks of a stream, and rows of all, filled up. They are
// made twice where precise rows need others than the cache.
struct bulk_queries {
    small_divisor block_rows, blocks;
    uint          rows, all_rows; // of the cache's domain; and those of precise rows, which may have as many of their own
};

namespace {

using namespace metal;

// Steps of the second plane of queries in one of the first.
constexpr int SECOND_PLANE = 254;

// A lane's part of a query.
template <uint D> struct query_part {
    static constexpr uint P = D/64;
    static_assert(P == 1 || P == 2 || P == 4, "");

    vec2 z[P];

    // As it is stored, in the order in which it is rotated or, `as_it_is`, in the one of the result. `from` is null for none.
    __device__ __forceinline__ void load(const attn_params & p, const uint8_t * from, bool as_it_is, uint lane) {
        const auto value = [&](uint i) { return kv_float_at(from + i*kv_float_bytes(p.q_kind), p.q_kind); };
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            const uint at = as_it_is ? P*lane + i : 2*(32*i + lane), behind = as_it_is ? at + D/2 : at + 1;
            z[i] = from ? vec2(value(at), value(behind)) : vec2(0.0f, 0.0f);
        }
    }

    // In the domain of keys, which for bands is its own: values `first` and behind it, P of them, and those D/2 behind these.
    __device__ __forceinline__ uint enter_domain(bool as_it_is, uint lane) {
        if (as_it_is) {
            return P*lane;
        }
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            const uint at = 2*(32*i + lane);
            z[i] = vec2(z[i].x*kv_sign(D, KV_SIGNS_ROTATION, at), z[i].y*kv_sign(D, KV_SIGNS_ROTATION, at + 1));
        }
        return kv_rotate_lanes(z, D, lane);
    }

    // As two planes of bytes, and what these are multiplied by. The warp has all of the query.
    __device__ __forceinline__ void store_planes(uint first, uint lane, signed char * first_plane, signed char * second_plane, float * scale) const {
        float largest = 0.0f;
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            largest = fmaxf(largest, fmaxf(fabsf(z[i].x), fabsf(z[i].y)));
        }
        largest = simd_max(largest);
        const float inverse = largest > 0.0f ? 127.0f/largest : 0.0f;
        // The low byte of what is added to this is the nearest integer.
        constexpr float NEAREST = 12582912.0f;
        uint low[2*P], lower[2*P];
#pragma unroll
        for (uint i = 0; i < 2*P; ++i) {
            const float x = (i < P ? z[i % P].x : z[i % P].y)*inverse, rounded = __fadd_rn(x, NEAREST);
            low[i]   = __float_as_uint(rounded);
            lower[i] = __float_as_uint(__fmaf_rn(x - __fadd_rn(rounded, -NEAREST), (float) SECOND_PLANE, NEAREST));
        }
#pragma unroll
        for (uint half_of = 0; half_of < 2; ++half_of) {
            store_bytes(first_plane + half_of*D/2 + first, low + half_of*P);
            store_bytes(second_plane + half_of*D/2 + first, lower + half_of*P);
        }
        if (lane == 0) {
            *scale = largest/127.0f/SECOND_PLANE;
        }
    }

    // The low bytes of P words.
    static __device__ __forceinline__ void store_bytes(signed char * to, const uint * words) {
        if constexpr (P == 1) {
            *to = (signed char) words[0];
        } else if constexpr (P == 2) {
            *(unsigned short *) to = (unsigned short) prmt(words[0], words[1], 0x0040);
        } else {
            *(uint *) to = prmt(prmt(words[0], words[1], 0x0040), prmt(words[2], words[3], 0x0040), 0x5410);
        }
    }

    // As floats, `step` from 32 of them to the next.
    __device__ __forceinline__ void store_floats(uint first, float * to, uint step) const {
        const auto store = [&](uint i, float value) { to[i/32*step + i % 32] = value; };
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            store(first + i, z[i].x);
            store(D/2 + first + i, z[i].y);
        }
    }
};

// Brings what a row's code looks up near, by a warp that has nothing else to do yet.
static __device__ __forceinline__ void prefetch_tables(uint lane) {
#ifdef __CUDA_ARCH__
    const void * const small = lane == 0 ? (const void *) kv_search : lane == 1 ? kv_levels_5 : lane == 2 ? kv_levels_4 : kv_levels_3;
    asm volatile("prefetch.global.L1 [%0];" :: "l"(small));
    if (lane*128 < sizeof(kv_roots_512)) {
        asm volatile("prefetch.global.L1 [%0];" :: "l"((const uint8_t *) kv_roots_512 + lane*128));
    }
    if (lane*128 < sizeof(kv_signs)) {
        asm volatile("prefetch.global.L1 [%0];" :: "l"((const uint8_t *) kv_signs + lane*128));
    }
#endif
}

// In place of the scale of a row that is not there yet; no scale is this.
constexpr uint NO_QUERY = ~0u;

// Are queries of the cache of another domain than those of its precise rows, if it has any? Then there are both.
static __host__ __device__ __forceinline__ bool has_precise_queries(uint k_kind, bool has_precise_rows) {
    return KV_KIND_IS_BAND(k_kind) && has_precise_rows;
}

// Brings precise rows to the L2 before the launch behind this one reads most of the cache: behind that they would wait. A warp takes every n-th part.
static __device__ __forceinline__ void prefetch_precise_rows(const attn_params & p, uint warp, uint warps, uint lane) {
#ifdef __CUDA_ARCH__
    constexpr uint LINE = 128, MOST_BYTES = 1 << 20;
    const uint thread = warp*32 + lane, threads = warps*32;
    for (uint i = 0; i < (p.columns ? 2*p.args.kv_streams : 0); ++i) {
        const attn_part & part = p.part[i % 2];
        const uint8_t * k = part.k + i/2*part.k_nb[2], * v = part.v + i/2*part.v_nb[2];
        const uint bytes = part.count*::min((uint) part.k_nb[0], (uint) part.v_nb[0]);
        for (uint at = LINE*thread; at < ::min(bytes, MOST_BYTES); at += LINE*threads) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(k + at));
            asm volatile("prefetch.global.L2 [%0];" :: "l"(v + at));
        }
    }
#endif
}

// A warp makes every n-th row. The launch that reads them may begin when the scales of all rows say that these are not there yet.
template <uint D> __device__ __forceinline__ void write_queries(const attn_params & p, const bulk_queries & of, uint warp, uint warps, uint block_warps, uint lane) {
    const kv_attn_args & args = p.args;
    query_part<D> query;
    const auto is_as_it_is = [&](uint i) { return KV_KIND_IS_BAND(p.k_kind) && i < of.rows; };
    const auto load = [&](uint n) {
        const uint i = n < of.rows ? n : n - of.rows, of_head = of.block_rows.quotient(i), of_block = p.kv_heads.quotient(of_head), stream = of.blocks.quotient(of_block);
        const uint kv_head = of_head - of_block*args.kv_heads, block = of_block - stream*of.blocks.by;
        const uint row = i + (block - of_head)*of.block_rows.by, token = p.heads_per_kv.quotient(row), head = (kv_head - token)*p.heads_per_kv.by + row;
        const uint8_t * from = p.q + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
        query.load(p, token < args.tokens ? from : nullptr, is_as_it_is(n), lane);
    };
    if (p.announced) {
        for (uint i = warp + lane*warps; i < of.all_rows; i += 32*warps) {
            *(volatile uint *) (p.query_scale + i) = NO_QUERY;
        }
        if (warp < of.all_rows) {
            load(warp); // comes while the stores go
        }
        __threadfence();
#ifdef __CUDA_ARCH__
        asm volatile("bar.sync 2, %0;" :: "r"(32*block_warps) : "memory");
#endif
    }
    let_next_begin();
    for (uint i = warp; i < of.all_rows; i += warps) {
        if (i != warp || !p.announced) {
            load(i);
        }
        const uint first = query.enter_domain(is_as_it_is(i), lane);
        signed char * to = p.query_planes + (size_t) (i + of.block_rows.quotient(i)*of.block_rows.by)*D;
        float scale = 0.0f;
        query.store_planes(first, lane, to, to + of.block_rows.by*D, &scale);
        if (p.announced) {
            __syncwarp();
            if (lane == 0) {
                __threadfence();
            }
        }
        if (lane == 0) {
            *(volatile float *) (p.query_scale + i) = scale;
        }
    }
    prefetch_precise_rows(p, warp, warps, lane);
}

// Waits for rows of write_queries. By a warp.
static __device__ __forceinline__ void await_queries(const float * scales, uint rows, uint lane) {
    for (uint i = lane; i < rows; i += 32) {
#if __CUDA_ARCH__ >= 700
        uint scale = NO_QUERY;
        while (scale == NO_QUERY) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(scale) : "l"(scales + i) : "memory");
        }
#endif
    }
    __syncwarp();
}

}  // namespace
}  // namespace kv
