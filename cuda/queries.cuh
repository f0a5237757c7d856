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

// What the keys of a cache are multiplied with: the query itself, rotated, projected (kv_signs.h), or rotated and behind that this projected, which
// is twice as wide.
enum class query_domain { as_it_is, rotated, projected, both };

static __host__ __device__ __forceinline__ constexpr query_domain query_domain_of(uint k_kind) {
    return KV_KIND_IS_BAND(k_kind) || k_kind < KV_KIND_SRFT8 ? query_domain::as_it_is : k_kind == KV_KIND_QJL1 ? query_domain::projected :
           KV_KIND_IS_TURBO(k_kind) ? query_domain::both : query_domain::rotated;
}

static __host__ __device__ __forceinline__ constexpr bool is_projected(query_domain domain) {
    return domain == query_domain::projected || domain == query_domain::both;
}

// Values of a query of keys of this kind.
static __host__ __device__ __forceinline__ constexpr uint query_width(uint k_kind, uint size) {
    return query_domain_of(k_kind) == query_domain::both ? 2*size : size;
}

// Precise rows beside a cache: what their keys are.
__host__ __device__ constexpr uint precise_kind(uint k_kind) {
    return k_kind == KV_KIND_DELTA8 ? KV_KIND_F16 : KV_KIND_SRFT8;
}

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

    // In this domain, of two the first: values `first` and behind it, P of them, and those D/2 behind these. PROJECTED: it may be that.
    template <bool PROJECTED> __device__ __forceinline__ uint enter_domain(query_domain domain, uint lane) {
        if (domain == query_domain::as_it_is) {
            return P*lane;
        }
        if constexpr (PROJECTED) {
            if (domain == query_domain::projected) {
                *this = projected(*this, lane);
                return P*kv_rotation_reversed(D, lane);
            }
        }
        return transform(KV_SIGNS_ROTATION, 1.0f, lane);
    }

    // The second of both domains, from the first.
    __device__ __forceinline__ void enter_second_domain(uint lane) {
        reorder(lane);
        *this = projected(*this, lane);
    }

    // The lane's largest value.
    __device__ __forceinline__ float largest() const {
        float res = 0.0f;
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            res = fmaxf(res, fmaxf(fabsf(z[i].x), fabsf(z[i].y)));
        }
        return res;
    }

    // As two planes of bytes relative to the largest value of the query, which the warp has all of.
    __device__ __forceinline__ void store_planes(uint first, float largest, signed char * first_plane, signed char * second_plane) const {
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
    }

    // What planes are multiplied by.
    static __device__ __forceinline__ float scale_of(float largest) {
        return largest/127.0f/SECOND_PLANE;
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

  private:
    __device__ __forceinline__ uint transform(uint signs, float factor, uint lane) {
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            const uint at = 2*(32*i + lane);
            z[i] = vec2(z[i].x*kv_sign(D, signs, at), z[i].y*kv_sign(D, signs, at + 1))*factor;
        }
        return kv_rotate_lanes(z, D, lane);
    }

    // As kv_project, with the factor of scores. A call, so that its code is out of the way where queries are only rotated.
    static __device__ __noinline__ query_part projected(query_part query, uint lane) {
        query.transform(KV_SIGNS_FIRST, 1.0f, lane);
        query.reorder(lane);
        query.transform(KV_SIGNS_SECOND, kv_score_factors[kv_size_index(D)], lane);
        return query;
    }

    // From the order in which a transform leaves values to the one in which the next takes them.
    __device__ __forceinline__ void reorder(uint lane) {
        vec2 res[P];
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            const uint value = 2*(32*i + lane), place = value % (D/2);
            const auto value_of = [&](uint at) {
                float found = 0.0f;
#pragma unroll
                for (uint n = 0; n < P; ++n) {
                    const uint from = kv_rotation_reversed(D, at/P);
                    const float x = simd_shuffle(z[n].x, from), y = simd_shuffle(z[n].y, from);
                    found = at % P == n ? (value < D/2 ? x : y) : found;
                }
                return found;
            };
            const float first = value_of(place), second = value_of(place + 1);
            res[i] = vec2(first, second);
        }
#pragma unroll
        for (uint i = 0; i < P; ++i) {
            z[i] = res[i];
        }
    }
};

// A query of a warp in the domain of keys of this kind, as planes of KV_WIDTH values each, and what they are multiplied by. Returns where the lane's
// values begin.
template <uint D, bool PROJECTED> __device__ __forceinline__ uint store_query(query_part<D> & query, query_domain domain, uint lane, signed char * first_plane, signed char * second_plane, float * scale) {
    const uint first = query.template enter_domain<PROJECTED>(domain, lane);
    float largest = simd_max(query.largest());
    if constexpr (PROJECTED) {
        if (domain == query_domain::both) {
            query_part<D> second = query;
            second.enter_second_domain(lane);
            largest = fmaxf(largest, simd_max(second.largest()));
            second.store_planes(first, largest, first_plane + D, second_plane + D);
        }
    }
    query.store_planes(first, largest, first_plane, second_plane);
    if (lane == 0) {
        *scale = query.scale_of(largest);
    }
    return first;
}

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
    return query_domain_of(k_kind) != query_domain_of(precise_kind(k_kind)) && has_precise_rows;
}

// Brings precise rows to the L2 before the launch behind this one reads most of the cache: behind that they would wait. A warp takes every n-th part.
static __device__ __forceinline__ void prefetch_precise_rows(const attn_params & p, uint warp, uint warps, uint lane) {
#ifdef __CUDA_ARCH__
    constexpr uint LINE = 128, MOST_BYTES = 1 << 20;
    const uint thread = warp*32 + lane, threads = warps*32;
    for (uint i = 0; i < (p.columns ? 2*p.args.kv_streams : 0); ++i) {
        const attn_part & part = p.part[i % 2];
        const uint8_t * k = part.k + i/2*part.k_nb[2], * v = part.v + i/2*part.v_nb[2];
        const uint k_bytes = ::min(part.count*(uint) part.k_nb[0], MOST_BYTES), v_bytes = ::min(part.count*(uint) part.v_nb[0], MOST_BYTES);
        for (uint at = LINE*thread; at < ::max(k_bytes, v_bytes); at += LINE*threads) {
            if (at < k_bytes) {
                asm volatile("prefetch.global.L2 [%0];" :: "l"(k + at));
            }
            if (at < v_bytes) {
                asm volatile("prefetch.global.L2 [%0];" :: "l"(v + at));
            }
        }
    }
#endif
}

// A warp makes every n-th row. The launch that reads them may begin when the scales of all rows say that these are not there yet.
// PROJECTED: keys may be of such a domain.
template <uint D, bool PROJECTED> __device__ __forceinline__ void write_queries(const attn_params & p, const bulk_queries & of, uint warp, uint warps, uint block_warps, uint lane) {
    const kv_attn_args & args = p.args;
    query_part<D> query;
    const query_domain own = query_domain_of(p.k_kind), precise = query_domain_of(precise_kind(p.k_kind));
    const auto domain_of = [&](uint i) { return i < of.rows ? own : precise; };
    const auto load = [&](uint n) {
        const uint i = n < of.rows ? n : n - of.rows, of_head = of.block_rows.quotient(i), of_block = p.kv_heads.quotient(of_head), stream = of.blocks.quotient(of_block);
        const uint kv_head = of_head - of_block*args.kv_heads, block = of_block - stream*of.blocks.by;
        const uint row = i + (block - of_head)*of.block_rows.by, token = p.heads_per_kv.quotient(row), head = (kv_head - token)*p.heads_per_kv.by + row;
        const uint8_t * from = p.q + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
        query.load(p, token < args.tokens ? from : nullptr, domain_of(n) == query_domain::as_it_is, lane);
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
        const uint most = query_width(p.k_kind, D), width = i < of.rows ? most : D;
        const uint block_row = of.block_rows.rest(i);
        signed char * to = p.query_planes + (size_t) (i - block_row)*2*most + block_row*width;
        float scale = 0.0f;
        store_query<D, PROJECTED>(query, domain_of(i), lane, to, to + of.block_rows.by*width, &scale);
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
