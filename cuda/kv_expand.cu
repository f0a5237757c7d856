// Caches as halves, in the domain of their rows, for attention by ggml's own f16 kernels: prompts, and pairs of types that
// kv_decode.cu does not know. What they take is memory for the halves of one layer.
//
//     q' = R q                     floats                          kv_expand_queries
//     k', v'                       [stream][KV head][cell][value]  kv_expand_rows, _lanes, _4_bit, _groups
//     precise rows of recent cells in place of theirs              kv_expand_columns
//     o  = R^-1 o'                                                 kv_expand_results

// Nothing that is rotated here is stored: see kv_attention.cu.
#define KV_ROOTS_BY_SINE

#include "attention.cuh"
#include "tile.cuh"

namespace kv {
namespace {

constexpr uint WARPS = 4, THREADS = 32*WARPS;

// A cache, or precise rows of one.
struct expand_params {
    const uint8_t * rows;
    uint64_t        nb[3]; // from cell to cell, head to head, stream to stream
    uint            kind, size, cells, heads;
    uint            all_cells; // grouped: of a stream of the cache
    __half *        to;
    uint            to_cells;  // of a head
    // precise rows
    uint            to_kind;
    const uint8_t * columns;
    uint64_t        columns_nb[2];
    uint            first_column;
};

__device__ __forceinline__ __half * place_of(const expand_params & p, uint cell, uint head, uint stream, uint width) {
    return p.to + (((size_t) stream*p.heads + head)*p.to_cells + cell)*width;
}

__device__ __forceinline__ __half half_of_value(float x) {
    return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

// 2, 4 or 8 values.
template <uint N> __device__ __forceinline__ void store_halves(__half * to, const float (&x)[N]) {
    uint y[N/2];
#pragma unroll
    for (uint i = 0; i < N/2; ++i) {
        const __half2 two = __halves2half2(half_of_value(x[2*i]), half_of_value(x[2*i + 1]));
        y[i] = *(const uint *) &two;
    }
    if constexpr (N == 8) {
        *(uint4 *) to = make_uint4(y[0], y[1], y[2], y[3]);
    } else if constexpr (N == 4) {
        *(uint2 *) to = make_uint2(y[0], y[1]);
    } else {
        *(uint *) to = y[0];
    }
}

// A block takes 64 cells of a head, a thread four values at a time.
__global__ void __launch_bounds__(THREADS) kv_expand_rows(const expand_params p) {
    __shared__ float levels[KV_LEVELS];
    const uint width = kv_width(p.kind, p.size), lanes = width/4, head = blockIdx.y, stream = blockIdx.z, first = blockIdx.x*CELLS;
    const uint8_t * rows = p.rows + head*p.nb[1] + stream*p.nb[2];
    fill_levels(p.kind, threadIdx.x, levels);
    __syncthreads();
    const uint count = ::min(CELLS, p.cells - first)*lanes;
    for (uint n = threadIdx.x; n < count; n += THREADS) {
        const uint cell = first + n/lanes, i = n % lanes*4;
        float x[4], scale;
        four_of(rows + cell*p.nb[0], p.kind, p.size, i, levels, x, scale);
        const float y[4] = { x[0]*scale, x[1]*scale, x[2]*scale, x[3]*scale };
        store_halves(place_of(p, cell, head, stream, width) + i, y);
    }
}

// The same of codes of 2 or 3 bits at common sizes: a warp takes a row at a time.
template <uint SIZE, uint BITS> __global__ void __launch_bounds__(THREADS) kv_expand_lanes(const expand_params p) {
    constexpr uint N = SIZE/32;
    __shared__ float levels[KV_LEVELS];
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, head = blockIdx.y, stream = blockIdx.z, first = blockIdx.x*CELLS;
    fill_levels(p.kind, threadIdx.x, levels);
    __syncthreads();
    const uint8_t * rows = p.rows + first*p.nb[0] + head*p.nb[1] + stream*p.nb[2];
    const uint count = ::min(CELLS, p.cells - first);
#pragma unroll 4
    for (uint cell = warp; cell < count; cell += WARPS) {
        float x[N];
        row_values<SIZE, BITS>(rows + cell*p.nb[0], levels, lane, x);
        store_halves(place_of(p, first + cell, head, stream, SIZE) + N*lane, x);
    }
}

// The same of rows of 4 bits that stand alone: a thread takes two words, eight values of one scale and eight of the next.
__global__ void __launch_bounds__(THREADS) kv_expand_4_bit(const expand_params p) {
    __shared__ uint pairs[256];
    const uint size = p.size, parts = size/16, head = blockIdx.y, stream = blockIdx.z, first = blockIdx.x*CELLS;
    const uint8_t * rows = p.rows + head*p.nb[1] + stream*p.nb[2];
    fill_pairs(1.0f, threadIdx.x, pairs);
    __syncthreads();
    const bool whole = is_whole(rows + size/32) && p.nb[0] % 4 == 0;
    const uint count = ::min(CELLS, p.cells - first)*parts;
#pragma unroll 4
    for (uint n = threadIdx.x; n < count; n += THREADS) {
        const uint cell = first + n/parts, part = n % parts, c = part/4, j = part % 4*8;
        const uint8_t * row = rows + cell*p.nb[0];
        const uint both = *(const uint16_t *) (row + 2*c);
        const uint codes[2] = { word_at(row + size/32 + 8*part, whole), word_at(row + size/32 + 8*part + 4, whole) };
        __half * to = place_of(p, cell, head, stream, size) + 64*c + j;
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            const float scale = kv_srft_scale(both >> 8*i)*kv_srft_unit(4);
            uint x[4];
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                const uint four = codes[n] >> 4*i & 0x0f0f0f0f, two = four | four >> 4;
                const uint found[2] = { pairs[two & 0xff], pairs[two >> 16 & 0xff] };
#pragma unroll
                for (uint m = 0; m < 2; ++m) {
                    const ::float2 levels = __half22float2(*(const __half2 *) &found[m]);
                    const __half2 y = __floats2half2_rn(levels.x*scale, levels.y*scale);
                    x[2*n + m] = *(const uint *) &y;
                }
            }
            *(uint4 *) (to + 32*i) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// A warp takes a group of a head, a lane N values at a time; BITS 0: bands, SIZE 0: of any kind and size. Several rows are asked for at
// once, since each is a wait for memory.
template <uint SIZE, uint BITS> __global__ void __launch_bounds__(THREADS) kv_expand_groups(const expand_params p) {
    constexpr uint N = SIZE ? SIZE/32 : 4, AT_ONCE = 32/N;
    __shared__ float levels[KV_LEVELS];
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, head = blockIdx.y, stream = blockIdx.z;
    const uint first = (blockIdx.x*WARPS + warp)*KV_DELTA_CELLS, size = SIZE ? SIZE : p.size;
    fill_levels(p.kind, threadIdx.x, levels);
    __syncthreads();
    if (first >= p.cells) {
        return;
    }
    const uint8_t * group = p.rows + first*p.nb[0] + head*p.nb[1] + stream*p.nb[2];
    const uint rows = ::min((uint) KV_DELTA_CELLS, p.all_cells - first), count = ::min((uint) KV_DELTA_CELLS, p.cells - first);
    const band_lane<SIZE ? SIZE : 128, N> band(SIZE && BITS == 0 ? p.kind : KV_KIND_BAND4, levels, lane);
    uint64_t written = 0, chained = 0, alone = 0; // a bit for each row
    for (uint n = 0; n < 2; ++n) {
        const uint kind = lane + 32*n < rows ? kv_delta_kind(group + (lane + 32*n)*p.nb[0], p.kind, size) : KV_DELTA_EMPTY;
        written |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind != KV_DELTA_EMPTY) << 32*n;
        chained |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_CHAINED) << 32*n;
        alone   |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_ALONE) << 32*n;
    }
    for (uint i = N*lane; i < size; i += 32*N) {
        float m[N], u[N];
        for (uint n = 0; n < N; ++n) {
            m[n] = kv_delta_frame(group, p.nb[0], p.kind, size, rows, i + n);
            u[n] = 0.0f;
        }
        for (uint t = 0; t < count; t += AT_ONCE) {
            float d[AT_ONCE][N];
#pragma unroll
            for (uint n = 0; n < AT_ONCE; ++n) {
                const uint8_t * row = group + ::min(t + n, count - 1)*p.nb[0];
                if constexpr (SIZE != 0 && BITS == 0) {
                    band.values(row, d[n]);
                } else if constexpr (SIZE != 0) {
                    row_values<SIZE, BITS>(row, levels, lane, d[n]);
                } else {
                    float scale;
                    four_of(row, p.kind, size, i, levels, d[n], scale);
                    for (uint j = 0; j < N; ++j) {
                        d[n][j] *= scale;
                    }
                }
            }
#pragma unroll
            for (uint n = 0; n < AT_ONCE; ++n) {
                const uint row = t + n;
                const bool follows = row > 0 && (chained >> row & 1) != 0 && (written >> (row - 1) & 1) != 0;
                const bool by_itself = (alone >> row & 1) != 0, there = (written >> row & 1) != 0;
                float y[N];
#pragma unroll
                for (uint j = 0; j < N; ++j) {
                    u[j] = follows ? fmaf(u[j], KV_DELTA_RHO, d[n][j]) : by_itself ? d[n][j] - m[j] : d[n][j];
                    y[j] = there ? m[j] + u[j] : 0.0f;
                }
                if (row < count) {
                    store_halves(place_of(p, first + row, head, stream, size) + i, y);
                }
            }
        }
    }
}

// R^-1 y, the first `count` values of it.
__device__ __forceinline__ void rotate_back(const float * y, uint size, uint lane, float * to, uint count) {
    vec2 z[KV_ROTATION_VALUES];
    kv_rotate_back(y, size, KV_SIGNS_ROTATION, lane, z);
    __syncwarp();
    const uint first = kv_rotated_first(size, lane);
    for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
        if (lane < kv_rotation_lanes(size) && first + i < count) {
            to[first + i] = z[i/2][i % 2];
        }
    }
}

// A warp takes a precise row of a head to the place of its cell, in the domain of the rows there.
__global__ void __launch_bounds__(THREADS) kv_expand_columns(const expand_params p) {
    extern __shared__ float memory[];
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, column = blockIdx.x*WARPS + warp, head = blockIdx.y, stream = blockIdx.z;
    const uint size = p.size, width = kv_width(p.to_kind, size);
    const uint cell = column < p.cells ? cell_of(p.columns, p.columns_nb, p.first_column + column, stream, p.to_cells) : ~0u;
    if (cell == ~0u) {
        return;
    }
    float * y = memory + warp*KV_ROWS_FLOATS(size), * levels = y + size;
    kv_row_levels(p.kind, lane, levels);
    __syncwarp();
    kv_row_decode(p.rows + column*p.nb[0] + head*p.nb[1] + stream*p.nb[2], p.kind, size, levels, lane, y);
    __syncwarp();
    if (kv_is_rotated(p.kind) && !kv_is_rotated(p.to_kind)) {
        rotate_back(y, size, lane, y, size);
        __syncwarp();
    } else if (!kv_is_rotated(p.kind) && kv_is_rotated(p.to_kind)) {
        kv_rotate_from(y, size, KV_SIGNS_ROTATION, 1.0f, lane, y);
        __syncwarp();
    }
    if (p.to_kind == KV_KIND_QJL1) {
        kv_project(y, size, 1.0f/kv_score_factors[kv_size_index(size)], lane); // queries have the factor
        __syncwarp();
    }
    __half * to = place_of(p, cell, head, stream, width);
    for (uint i = lane; i < width; i += 32) {
        to[i] = i < size ? half_of_value(y[i]) : __ushort_as_half(0);
    }
}

// A warp for a query row.
template <uint SIZE> __global__ void __launch_bounds__(THREADS) kv_expand_queries(const attn_params p, float * to) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.k_size, width = kv_width(p.k_kind, size), lane = threadIdx.x % 32;
    const uint row = blockIdx.x*WARPS + threadIdx.x/32; // by stream, head, token
    if (row >= p.args.streams*p.args.heads*p.args.tokens) {
        return;
    }
    const uint token = row % p.args.tokens, head = row/p.args.tokens % p.args.heads, stream = row/p.args.tokens/p.args.heads;
    const uint8_t * from = p.q + token*p.args.q_nb[0] + head*p.args.q_nb[1] + stream*p.args.q_nb[2];
    float * q = memory + threadIdx.x/32*width;
    for (uint i = lane; i < size; i += 32) {
        q[i] = kv_float_at(from + i*kv_float_bytes(p.q_kind), p.q_kind);
    }
    kv_enter_domain(q, p.k_kind, size, lane);
    __syncwarp();
    for (uint i = lane; i < width; i += 32) {
        to[(size_t) row*width + i] = q[i];
    }
}

// A warp for a result of ggml's attention.
template <uint SIZE> __global__ void __launch_bounds__(THREADS) kv_expand_results(const attn_params p) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.v_size, width = kv_width(p.v_kind, size), lane = threadIdx.x % 32;
    const uint row = blockIdx.x*WARPS + threadIdx.x/32; // by stream, token, head
    if (row >= p.args.streams*p.args.heads*p.args.tokens) {
        return;
    }
    const uint head = row % p.args.heads, token = row/p.args.heads % p.args.tokens, stream = row/p.args.heads/p.args.tokens;
    float * result = (float *) (p.dst + head*p.args.dst_nb[0] + token*p.args.dst_nb[1] + stream*p.args.dst_nb[2]);
    float * o = memory + threadIdx.x/32*width;
    for (uint i = lane; i < width; i += 32) {
        const float x = p.sums[(size_t) row*width + i];
        o[i] = fabsf(x) <= FLT_MAX ? x : 0.0f; // a row that sees no cell is zero; ggml's is none
    }
    __syncwarp();
    if (kv_is_plain(p.v_kind)) {
        for (uint i = lane; i < p.args.out_size; i += 32) {
            result[i] = o[i];
        }
        return;
    }
    kv_leave_domain(o, p.v_kind, size, lane);
    rotate_back(o, size, lane, result, p.args.out_size);
}

uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

void set_strides(uint64_t (&to)[3], const uint64_t (&from)[3]) {
    for (int i = 0; i < 3; ++i) {
        to[i] = from[i];
    }
}

// The kernel for rows of so many bits at a common size.
#define KV_OF_BITS(size, kernel, bits, other) \
    ((size) == 64 ? kernel<64, bits> : (size) == 128 ? kernel<128, bits> : (size) == 256 ? kernel<256, bits> : other)

cudaError_t expand(const kv_cuda_attention & op, bool values, __half * to, cudaStream_t stream) {
    const kv_attn_args & args = op.args;
    expand_params p = {};
    p.rows      = (const uint8_t *) (values ? op.v : op.k);
    p.kind      = values ? op.v_kind : op.k_kind;
    p.size      = values ? op.v_size : op.k_size;
    p.cells     = args.cells;
    p.heads     = args.kv_heads;
    p.all_cells = args.k_cells;
    p.to        = to;
    p.to_cells  = args.cells;
    set_strides(p.nb, values ? args.v_nb : args.k_nb);
    // Kernels for common sizes read words: of four bytes but at size 64, and rows begin at even addresses.
    const uint common = p.size == 64 || (((uintptr_t) p.rows | p.nb[0] | p.nb[1] | p.nb[2]) & 3) == 0 ? p.size : 0;
    const dim3 by_cells(divided(args.cells, CELLS), args.kv_heads, args.kv_streams);
    if (KV_KIND_IS_DELTA(p.kind)) {
        const auto any = kv_expand_groups<0, 0>;
        const auto kernel = p.kind == KV_KIND_DELTA4   ? KV_OF_BITS(common, kv_expand_groups, 4, any)
                            : p.kind == KV_KIND_DELTA3 ? KV_OF_BITS(common, kv_expand_groups, 3, any)
                            : KV_KIND_IS_BAND(p.kind)  ? KV_OF_BITS(common, kv_expand_groups, 0, any)
                                                       : any;
        kernel<<<dim3(divided(args.cells, WARPS*KV_DELTA_CELLS), args.kv_heads, args.kv_streams), THREADS, 0, stream>>>(p);
    } else if (p.kind == KV_KIND_SRFT4 && p.size % 64 == 0) {
        kv_expand_4_bit<<<by_cells, THREADS, 0, stream>>>(p);
    } else {
        const auto kernel = p.kind == KV_KIND_SRFT3   ? KV_OF_BITS(common, kv_expand_lanes, 3, kv_expand_rows)
                            : p.kind == KV_KIND_SRFT2 ? KV_OF_BITS(common, kv_expand_lanes, 2, kv_expand_rows)
                                                      : kv_expand_rows;
        kernel<<<by_cells, THREADS, 0, stream>>>(p);
    }
    p.to_kind       = p.kind;
    p.columns       = (const uint8_t *) op.columns;
    p.columns_nb[0] = op.recent.columns_nb[0];
    p.columns_nb[1] = op.recent.columns_nb[1];
    for (uint i = 0; i < op.parts; ++i) {
        const kv_cuda_recent & part = op.part[i];
        p.rows         = (const uint8_t *) (values ? part.v : part.k);
        p.kind         = values ? part.v_kind : part.k_kind;
        p.cells        = part.args.cells;
        p.first_column = part.first_column;
        set_strides(p.nb, values ? part.args.v_nb : part.args.k_nb);
        kv_expand_columns<<<dim3(divided(p.cells, WARPS), args.kv_heads, args.kv_streams), THREADS, sizeof(float)*WARPS*KV_ROWS_FLOATS(p.size), stream>>>(p);
    }
    return cudaGetLastError();
}

}  // namespace
}  // namespace kv

kv_cuda_expanded kv_cuda_expanded_of(const kv_cuda_attention & op) {
    const size_t rows = (size_t) op.args.streams*op.args.heads*op.args.tokens, cells = (size_t) op.args.kv_streams*op.args.kv_heads*op.args.cells;
    kv_cuda_expanded res;
    res.k_width = KV_WIDTH(op.k_kind, op.k_size);
    res.v_width = KV_WIDTH(op.v_kind, op.v_size);
    res.queries = rows*res.k_width;
    res.keys    = cells*res.k_width;
    res.values  = cells*res.v_width;
    res.results = rows*res.v_width;
    return res;
}

cudaError_t kv_cuda_expand(const kv_cuda_attention & op, float * queries, void * keys, void * values, cudaStream_t stream) {
    kv::attn_params p = {};
    p.args   = op.args;
    p.k_kind = op.k_kind;
    p.q_kind = op.q_kind;
    p.k_size = op.k_size;
    p.q      = (const uint8_t *) op.q;
    const unsigned rows = op.args.streams*op.args.heads*op.args.tokens;
    const auto kernel = KV_BY_SIZE(op.k_size, kv::kv_expand_queries);
    kernel<<<kv::divided(rows, kv::WARPS), kv::THREADS, sizeof(float)*kv::WARPS*KV_WIDTH(op.k_kind, op.k_size), stream>>>(p, queries);
    cudaError_t err = cudaGetLastError();
    err = err == cudaSuccess ? kv::expand(op, false, (__half *) keys, stream) : err;
    return err == cudaSuccess ? kv::expand(op, true, (__half *) values, stream) : err;
}

cudaError_t kv_cuda_leave_domain(const kv_cuda_attention & op, const float * results, cudaStream_t stream) {
    kv::attn_params p = {};
    p.args   = op.args;
    p.v_kind = op.v_kind;
    p.v_size = op.v_size;
    p.dst    = (uint8_t *) op.dst;
    p.sums   = (float *) results;
    const unsigned rows = op.args.streams*op.args.heads*op.args.tokens;
    const auto kernel = KV_BY_SIZE(op.v_size, kv::kv_expand_results);
    kernel<<<kv::divided(rows, kv::WARPS), kv::THREADS, sizeof(float)*kv::WARPS*KV_WIDTH(op.v_kind, op.v_size), stream>>>(p);
    return cudaGetLastError();
}
