// FLASH_ATTN_EXT: how it is split, its first step (queries into K's domain) and its last (chunks to results).
//
//     q' = R q                   once per query row                         kv_queries
//     s  = q' . k, softmax, o' = sum p v      for a chunk of cells          kv_decode.cu, kv_prefill.cu, kv_tile.cu
//     merge, sinks, 1/sum, R^-1  once per result                            kv_merge

#include "attention.cuh"

#include <cstdlib>

namespace kv {
namespace {

using namespace metal;

constexpr uint QUERY_WARPS = 4;

// A warp for a query row. Halves and what they leave, relative to a power of two near the largest value: 22 bits in all.
template <uint SIZE> __global__ void __launch_bounds__(32*QUERY_WARPS) kv_queries(const attn_params p) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.k_size, width = kv_width(p.k_kind, size), lane = threadIdx.x % 32;
    const uint row = blockIdx.x*QUERY_WARPS + threadIdx.x/32;
    if (row >= p.args.streams*p.args.heads*p.args.tokens) {
        return;
    }
    const uint heads_per_kv = p.args.heads/p.args.kv_heads, rows = heads_per_kv*p.args.tokens;
    const uint stream = row/rows/p.args.kv_heads, kv_head = row/rows % p.args.kv_heads;
    const uint token = row % rows/heads_per_kv, head = kv_head*heads_per_kv + row % rows % heads_per_kv;
    const uint8_t * from = p.q + token*p.args.q_nb[0] + head*p.args.q_nb[1] + stream*p.args.q_nb[2];
    float * q = memory + threadIdx.x/32*width;
    for (uint i = lane; i < size; i += 32) {
        q[i] = kv_float_at(from + i*kv_float_bytes(p.q_kind), p.q_kind);
    }
    kv_enter_domain(q, p.k_kind, size, lane);
    __syncwarp();
    float largest = 0.0f;
    for (uint i = lane; i < width; i += 32) {
        largest = fmaxf(largest, fabsf(q[i]));
    }
    largest = simd_max(largest);
    // A power of two whose inverse is one too.
    const uint exponent = __float_as_uint(largest) >> 23;
    const bool usual = exponent > 1 && exponent < 253;
    const float scale = usual ? __uint_as_float(exponent << 23) : 1.0f, inverse = usual ? __uint_as_float((254 - exponent) << 23) : 1.0f;
    for (uint i = lane; i < width; i += 32) {
        const float x = q[i]*inverse;
        const __half high = __float2half_rn(x);
        p.query_high[(size_t) row*width + i] = high;
        p.query_low[(size_t) row*width + i] = __float2half_rn(x - __half2float(high));
    }
    if (lane == 0) {
        p.query_scale[row] = scale;
    }
}

constexpr uint MERGE_LANES = 128, AT_ONCE = 16;

// A block for a result. Parts of MERGE_LANES threads take chunks in turn.
template <uint SIZE> __global__ void __launch_bounds__(4*MERGE_LANES) kv_merge(const attn_params p) {
    extern __shared__ float memory[];
    __shared__ float reduced[2][4*MERGE_LANES/32];
    const uint size = SIZE ? SIZE : p.v_size, width = kv_width(p.v_kind, size), chunks = p.args.chunks;
    const uint parts = blockDim.x/MERGE_LANES, part = threadIdx.x/MERGE_LANES, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    float * weights = memory, * o = memory + (chunks + 3)/4*4; // [part][width]
    const float2 * metas = p.metas + (size_t) blockIdx.x*chunks;
    const float * sums = p.sums + (size_t) blockIdx.x*chunks*width;

    float largest = HIDDEN, sum = 0.0f;
    for (uint c = threadIdx.x; c < chunks; c += blockDim.x) {
        largest = fmaxf(largest, metas[c].x);
    }
    largest = simd_max(largest);
    if (lane == 0) {
        reduced[0][warp] = largest;
    }
    __syncthreads();
    for (uint w = 0; w < blockDim.x/32; ++w) {
        largest = fmaxf(largest, reduced[0][w]);
    }
    for (uint c = threadIdx.x; c < chunks; c += blockDim.x) {
        const float2 meta = metas[c];
        weights[c] = rescale(meta.x, largest);
        sum = fmaf(weights[c], meta.y, sum);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        reduced[1][warp] = sum;
    }
    __syncthreads();
    sum = 0.0f;
    for (uint w = 0; w < blockDim.x/32; ++w) {
        sum += reduced[1][w];
    }
    for (uint i = threadIdx.x % MERGE_LANES; i < width; i += MERGE_LANES) {
        float x = 0.0f;
        for (uint c = part; c < chunks; c += AT_ONCE*parts) {
            // Each is a wait for memory. A chunk without a weight was perhaps not written.
            float weight[AT_ONCE], value[AT_ONCE];
#pragma unroll
            for (uint n = 0; n < AT_ONCE; ++n) {
                weight[n] = c + n*parts < chunks ? weights[c + n*parts] : 0.0f;
                value[n]  = weight[n] != 0.0f ? sums[(size_t) (c + n*parts)*width + i] : 0.0f;
            }
#pragma unroll
            for (uint n = 0; n < AT_ONCE; ++n) {
                x = fmaf(weight[n], value[n], x);
            }
        }
        o[part*width + i] = x;
    }
    __syncthreads();
    if (warp != 0) {
        return;
    }
    const uint head = blockIdx.x % p.args.heads, token = blockIdx.x/p.args.heads % p.args.tokens;
    const uint stream = blockIdx.x/p.args.heads/p.args.tokens;
    float * result = (float *) (p.dst + head*p.args.dst_nb[0] + token*p.args.dst_nb[1] + stream*p.args.dst_nb[2]);
    float factor = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[head];
        if (sink > largest) {
            factor = rescale(largest, sink);
            sum *= factor;
            largest = sink;
        }
        sum += rescale(sink, largest);
    }
    // A row that sees no cell is zero.
    factor = sum == 0.0f ? 0.0f : factor/sum;
    for (uint i = lane; i < width; i += 32) {
        float x = 0.0f;
        for (uint n = 0; n < parts; ++n) {
            x += o[n*width + i];
        }
        o[i] = x*factor;
    }
    if (kv_is_plain(p.v_kind)) {
        __syncwarp();
        for (uint i = lane; i < p.args.out_size; i += 32) {
            result[i] = o[i];
        }
        return;
    }
    kv_leave_domain(o, p.v_kind, size, lane);
    vec2 z[KV_ROTATION_VALUES];
    kv_rotate_back(o, size, KV_SIGNS_ROTATION, lane, z);
    const uint first = kv_rotated_first(size, lane);
    for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
        if (lane < kv_rotation_lanes(size) && first + i < p.args.out_size) {
            result[first + i] = z[i/2][i % 2];
        }
    }
}

#define KV_BY_SIZE(size, kernel)                                             \
    ((size) == 64 ? kernel<64> : (size) == 128 ? kernel<128> : (size) == 256 ? kernel<256> : kernel<0>)

static size_t padded(size_t bytes) {
    return (bytes + 255)/256*256;
}

// Where the parts of the scratch begin.
struct scratch_layout {
    size_t low, scales, metas, sums, end;
};

static scratch_layout layout_of(const kv_cuda_attention & op, const kv_cuda_plan & plan) {
    const size_t rows = (size_t) op.args.streams*op.args.heads*op.args.tokens;
    scratch_layout res;
    res.low    = padded(rows*width_of(op.k_kind, op.k_size)*sizeof(__half));
    res.scales = 2*res.low;
    res.metas  = res.scales + padded(rows*sizeof(float));
    res.sums   = res.metas + padded(rows*plan.chunks*sizeof(float2));
    res.end    = res.sums + padded(rows*plan.chunks*width_of(op.v_kind, op.v_size)*sizeof(float));
    return res;
}

}  // namespace

cudaError_t launch_queries(const attn_params & p, cudaStream_t stream) {
    const uint rows = p.args.streams*p.args.heads*p.args.tokens;
    const size_t shared = sizeof(float)*QUERY_WARPS*width_of(p.k_kind, p.k_size);
    KV_BY_SIZE(p.k_size, kv_queries)<<<(rows + QUERY_WARPS - 1)/QUERY_WARPS, 32*QUERY_WARPS, shared, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_merge(const attn_params & p, cudaStream_t stream) {
    const uint results = p.args.streams*p.args.tokens*p.args.heads, parts = p.args.chunks > 8 ? 4 : 1;
    const size_t shared = sizeof(float)*((p.args.chunks + 3)/4*4 + parts*width_of(p.v_kind, p.v_size));
    KV_BY_SIZE(p.v_size, kv_merge)<<<results, parts*MERGE_LANES, shared, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv

bool kv_cuda_plan_attention(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_plan & plan) {
    plan = {};
    if (device.cc < KV_CUDA_OLDEST || !kv::mask_is_small(op)) {
        return false;
    }
    // For tests, and to see what the others take.
    static const char * const path = getenv("GGML_EXT_CUDA_PATH");
    const bool tiles_alone = path && strcmp(path, "tile") == 0;
    if (tiles_alone || (!kv::plan_decode(op, device, plan) && !kv::plan_prefill(op, device, plan))) {
        kv::plan_tile(op, device, plan);
    }
    plan.scratch_bytes = kv::layout_of(op, plan).end;
    return plan.shared_bytes <= device.shared_bytes;
}

cudaError_t kv_cuda_attend(const kv_cuda_attention & op, const kv_cuda_plan & plan, void * scratch, cudaStream_t stream) {
    const kv::scratch_layout at = kv::layout_of(op, plan);
    uint8_t * base = (uint8_t *) scratch;
    kv::attn_params p = {};
    p.args = op.args;
    p.args.chunk_cells = plan.chunk_cells;
    p.args.chunks      = plan.chunks;
    p.k_kind  = op.k_kind;
    p.v_kind  = op.v_kind;
    p.q_kind  = op.q_kind;
    p.k_size  = op.k_size;
    p.v_size  = op.v_size;
    p.k_bytes = op.k_bytes;
    p.v_bytes = op.v_bytes;
    p.alibi   = op.alibi;
    p.q      = (const uint8_t *) op.q;
    p.k      = (const uint8_t *) op.k;
    p.v      = (const uint8_t *) op.v;
    p.mask   = (const uint8_t *) op.mask;
    p.sinks  = op.sinks;
    p.dst    = (uint8_t *) op.dst;
    p.query_high  = (__half *) base;
    p.query_low   = (__half *) (base + at.low);
    p.query_scale = (float *) (base + at.scales);
    p.metas       = (float2 *) (base + at.metas);
    p.sums        = (float *) (base + at.sums);

    cudaError_t err;
    if (plan.decode) {
        err = kv::launch_decode(p, plan, stream);
    } else {
        err = kv::launch_queries(p, stream);
        if (err == cudaSuccess) {
            err = plan.prefill ? kv::launch_prefill(p, plan, stream) : kv::launch_tile(p, plan, stream);
        }
    }
    return err == cudaSuccess ? kv::launch_merge(p, stream) : err;
}
