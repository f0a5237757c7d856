// What the attention kernels share: their parameters, the mask, the score of a cell, the softmax under way.
#pragma once

#include "codec.cuh"
#include "kv_cuda.h"
#include "launch.cuh"
#include "small_divisor.cuh"

// The kernel for a head size: common ones are template arguments, 0 stands for the others.
#define KV_BY_SIZE(size, kernel)                                             \
    ((size) == 64 ? kernel<64> : (size) == 128 ? kernel<128> : (size) == 256 ? kernel<256> : kernel<0>)

namespace kv {

using uint = unsigned;

// Precise rows that a decoding kernel attends to beside the cache.
struct attn_part {
    const uint8_t * k;
    const uint8_t * v;
    uint64_t        k_nb[3], v_nb[3];
    uint            count;
    uint            first_column;
    uint            first_chunk;
};

// Rows that the launch before writes, by 4 or 8 bytes of an index.
struct attn_write {
    const uint8_t * to;
    const uint8_t * index;
    uint64_t        row_step, index_step;
    uint            index_bytes, count;
};

struct attn_params {
    kv_attn_args    args;
    uint            k_kind, v_kind, q_kind;
    uint            k_size, v_size;   // values of a head
    uint            k_bytes, v_bytes; // of its row
    kv_cuda_teams   bulk; // of a block of decode_bulk.cuh
    small_divisor   kv_heads, heads_per_kv, streams_per_kv, teams;
    bool            alibi;
    const uint8_t * q;
    const uint8_t * k;
    const uint8_t * v;
    const uint8_t * mask;
    const float *   sinks;
    const float *   center; // of each KV head, which results get; null for none
    uint8_t *       dst;
    // cells that have precise rows
    const uint *    hidden;  // [KV stream][hidden_words], null for none
    const uint8_t * columns; // the same as a list, where a kernel takes precise rows along; else null
    uint            column_count, part_chunk_cells;
    uint64_t        columns_nb[2];
    attn_part       part[2];
    // what the launch that makes the queries writes to the cache
    attn_write      writes[KV_CUDA_WRITES];
    uint            write_count, write_rows; // rows of the one that has most
    bool            announced; // does the launch behind it look for each query, and not wait for the end?
    // scratch
    __half *        query_high; // [query row][width of K], by stream, KV head, token, head: two halves make a value
    __half *        query_low;
    float *         query_scale; // [query row]: what those are multiplied by
    signed char *   query_planes; // of decode_bulk.cuh, instead of halves: [stream][block of rows][KV head][plane][row][value], where each has room for rows as wide as K's
    float2 *        metas;       // [result][chunk]: largest score, sum
    float *         sums;        // [result][chunk][sum_width]; results by stream, token, head
};

// The bits of a KV stream's cells that have precise rows, null for none.
static __device__ __forceinline__ const uint * hidden_of(const attn_params & p, uint kv_stream) {
    return p.hidden ? p.hidden + kv_stream*p.args.hidden_words : nullptr;
}

// Hidden cells of a chunk lie in [x, y), mostly near its end: elsewhere nobody needs to look. By all threads; `range` is two
// words of shared memory.
static __device__ __forceinline__ uint2 hidden_range(const uint * hidden, uint begin, uint end, uint * range) {
    if (threadIdx.x == 0) {
        range[0] = ~0u;
        range[1] = 0;
    }
    __syncthreads();
    for (uint word = begin/32 + threadIdx.x; word < (end + 31)/32; word += blockDim.x) {
        if (hidden[word] != 0) {
            atomicMin(&range[0], word*32);
            atomicMax(&range[1], word*32 + 32);
        }
    }
    __syncthreads();
    return make_uint2(range[0], range[1]);
}

// What a column says, and the cell that is, ~0 for none.
static __device__ __forceinline__ long long column_at(const uint8_t * columns, const uint64_t (&nb)[2], uint column, uint kv_stream) {
    return *(const long long *) (columns + column*nb[0] + kv_stream*nb[1]);
}

static __device__ __forceinline__ uint cell_of(long long column, uint cells) {
    return column >= 0 && column < (long long) cells ? (uint) column : ~0u;
}

static __device__ __forceinline__ uint cell_of(const uint8_t * columns, const uint64_t (&nb)[2], uint column, uint kv_stream, uint cells) {
    return cell_of(column_at(columns, nb, column, kv_stream), cells);
}

// The score of a cell that is hidden, or of none at all.
constexpr float HIDDEN = -0.5f*FLT_MAX;

// The factor that brings sums relative to `from` to the larger score `to`. Without any score there is nothing to bring.
static __device__ __forceinline__ float rescale(float from, float to) {
    return from <= HIDDEN ? 0.0f : __expf(from - to);
}

static __device__ __forceinline__ float slope_of(const attn_params & p, uint head) {
    if (!p.alibi) {
        return 1.0f;
    }
    const uint base = p.args.slope_heads;
    return head < base ? exp2f(log2f(p.args.slope_low)*(float) (head + 1)) : exp2f(log2f(p.args.slope_high)*(float) (2*(head - base) + 1));
}

constexpr float LOG2_E = 1.44269504f;

// Where the row of the mask begins; masks are below 4 GiB.
static __device__ __forceinline__ uint mask_offset(const attn_params & p, uint token, uint head, uint stream) {
    return (uint) (token*p.args.mask_nb[0] + head % p.args.mask_rows[0]*p.args.mask_nb[1] + stream % p.args.mask_rows[1]*p.args.mask_nb[2]);
}

// The same of a mask for all heads.
static __device__ __forceinline__ uint mask_offset(const attn_params & p, uint token, uint stream) {
    return (uint) (token*p.args.mask_nb[0] + (p.args.mask_rows[1] == 1 ? 0 : stream % p.args.mask_rows[1])*p.args.mask_nb[2]);
}

// The mask as it is stored, a half; zero where there is none.
static __device__ __forceinline__ unsigned short mask_bits(const attn_params & p, uint offset, uint cell) {
    return p.mask ? *(const unsigned short *) (p.mask + (offset + 2*cell)) : (unsigned short) 0;
}

constexpr unsigned short HIDDEN_MASK = 0xfc00;

// What it adds to a score, -inf where a cell must not be seen.
static __device__ __forceinline__ float mask_value(unsigned short mask) {
    const float m = __half2float(__ushort_as_half(mask));
    return m > -65504.0f ? m : -INFINITY;
}

// The same in units of log 2.
static __device__ __forceinline__ float bias_of(unsigned short mask) {
    return mask_value(mask)*LOG2_E;
}

// What the mask adds to the score of a cell; from `end` on there is none to be seen.
static __device__ __forceinline__ float bias_at(const attn_params & p, uint offset, uint cell, uint end) {
    return cell >= end ? -INFINITY : mask_value(mask_bits(p, offset, cell));
}

// tanh by its definition: the fast one has three digits.
static __device__ __forceinline__ float soft_capped(float score, float softcap) {
    const float e = __expf(2.0f*score/softcap);
    return softcap*(isinf(e) ? 1.0f : 1.0f - 2.0f/(e + 1.0f));
}

// mask_offset holds it.
static inline bool mask_is_small(const kv_cuda_attention & op) {
    const kv_attn_args & a = op.args;
    return ((uint64_t) a.tokens*a.mask_nb[0] + a.mask_rows[0]*a.mask_nb[1] + a.mask_rows[1]*a.mask_nb[2]) >> 32 == 0;
}

// A kernel may take all the shared memory that there is. Not less: in a captured graph the last word counts for all launches.
template <typename Kernel> static cudaError_t allow_shared(Kernel kernel, const kv_cuda_split & split) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) split.shared_limit);
}

// Queries into K's domain, as halves.
cudaError_t launch_queries(const attn_params & p, cudaStream_t stream);

struct bulk_queries;

// kv_rows.cu: rows into the cache, if there are any, and queries as bytes.
cudaError_t launch_write_and_queries(const kv_cuda_writes & writes, const attn_params & p, const bulk_queries & queries, cudaStream_t stream);

// kv_tile.cu
void        plan_tile(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_split & plan);
cudaError_t launch_tile(const attn_params & p, const kv_cuda_split & plan, cudaStream_t stream);

// kv_decode.cu
size_t      bulk_query_rows(const kv_cuda_attention & op); // blocks of rows filled up
bool        plan_decode(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_split & plan);
cudaError_t launch_decode(const attn_params & p, const kv_cuda_split & plan, const kv_cuda_writes & writes, cudaStream_t stream);

// kv_recent.cu: the bits of cells that have precise rows, and the mask of the columns.
cudaError_t launch_columns(const kv_cuda_attention & op, void * hidden, void * mask, cudaStream_t stream);

// Bytes of a part of the scratch: the next begins at a multiple of 256.
static inline size_t padded(size_t bytes) {
    return (bytes + 255)/256*256;
}

static inline uint width_of(uint32_t kind, uint32_t size) {
    return KV_WIDTH(kind, size);
}

}  // namespace kv
