// Queries in K's domain as bytes, which decoding kernels multiply.
#pragma once

#include "attention.cuh"

namespace kv {

// Queries of blocks that copy tiles (decode_bulk.cuh): rows of such a block, blocks of a stream, and rows of all, filled up.
struct bulk_queries {
    uint block_rows, blocks, rows;
};

namespace {

using namespace metal;

// Steps of the second plane of queries in one of the first.
constexpr int SECOND_PLANE = 254;

// A query, rotated, as two planes of bytes, and what these are multiplied by. `from` is null for none.
template <uint D> __device__ __forceinline__ void prepare_query(
        const attn_params & p, const uint8_t * from, uint lane, float * q, signed char * first_plane, signed char * second_plane, float * scale) {
    float largest = 0.0f;
    if (from) {
        for (uint i = lane; i < D; i += 32) {
            q[i] = kv_float_at(from + i*kv_float_bytes(p.q_kind), p.q_kind);
        }
        kv_rotate_from(q, D, KV_SIGNS_ROTATION, 1.0f, lane, q);
        __syncwarp();
        for (uint i = lane; i < D; i += 32) {
            largest = fmaxf(largest, fabsf(q[i]));
        }
        largest = simd_max(largest);
    } else {
        for (uint i = lane; i < D; i += 32) {
            q[i] = 0.0f;
        }
    }
    const float inverse = largest > 0.0f ? 127.0f/largest : 0.0f;
    for (uint i = lane; i < D; i += 32) {
        const float x = q[i]*inverse, first = rintf(x);
        first_plane[i] = (signed char) (int) first;
        second_plane[i] = (signed char) (int) rintf((x - first)*SECOND_PLANE);
    }
    if (lane == 0) {
        *scale = largest/127.0f/SECOND_PLANE;
    }
}

// A warp for a row; `memory` has D floats for each warp.
template <uint D> __device__ __forceinline__ void write_queries(const attn_params & p, const bulk_queries & of, float * memory) {
    const kv_attn_args & args = p.args;
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, row_of_all = blockIdx.x*(blockDim.x/32) + warp, heads_per_kv = args.heads/args.kv_heads;
    prefetch_rotation(lane);
    if (row_of_all >= of.rows) {
        return;
    }
    const uint r = row_of_all % of.block_rows, kv_head = row_of_all/of.block_rows % args.kv_heads;
    const uint block = row_of_all/of.block_rows/args.kv_heads % of.blocks, stream = row_of_all/of.block_rows/args.kv_heads/of.blocks;
    const uint row = block*of.block_rows + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
    const uint8_t * from = p.q + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
    signed char * first = p.query_planes + ((size_t) (row_of_all/of.block_rows)*2*of.block_rows + r)*D;
    prepare_query<D>(p, token < args.tokens ? from : nullptr, lane, memory + warp*D, first, first + of.block_rows*D, p.query_scale + row_of_all);
}

}  // namespace
}  // namespace kv
