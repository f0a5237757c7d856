// Caches as halves, in the domain of their rows, for attention by kernels for halves: prompts, and pairs of types that
// kv_decode.cu does not know. What they take is memory for the halves of one layer.
//
//     q' = R q                                                     kv_expand_queries
//     k', v'                                                       kv_expand_rows, _lanes, _4_bit, _groups
//     precise rows of recent cells in place of theirs              kv_expand_columns
//     attention                                                    ggml's own f16 kernels, or hopper/kv_prompt.cu
//     o  = R^-1 o'                                                 kv_expand_results
//
// ggml reads [stream][KV head][cell][value], and queries as floats; on Hopper both are tiles (hopper/kv_prompt.cuh).

// Nothing that is rotated here is stored: see kv_attention.cu.
#define KV_ROOTS_BY_SINE

#include "attention.cuh"
#include "hopper/kv_prompt.cuh"
#include "tile.cuh"

namespace kv {
namespace {

constexpr uint WARPS = 4, THREADS = 32*WARPS;

constexpr __host__ __device__ uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

// A cache, or precise rows of one.
struct expand_params {
    const uint8_t * rows;
    uint64_t        nb[3]; // from cell to cell, head to head, stream to stream
    uint            kind, size, cells, heads;
    uint            all_cells; // grouped: of a stream of the cache
    __half *        to;
    uint            to_cells;   // of a head
    uint            tile_cells; // 0: no tiles
    uint            to_width;   // of a row there: zeros behind its values, where it is wider
    // precise rows
    uint            to_kind;
    const uint8_t * columns;
    uint64_t        columns_nb[2];
    uint            first_column;
};

// The place of value `i`, from which those of a unit of 16 bytes lie side by side.
__device__ __forceinline__ __half * place_of(const expand_params & p, uint cell, uint head, uint stream, uint i) {
    const uint rows = p.tile_cells, width = p.to_width;
    if (rows == 0) {
        return p.to + (((size_t) stream*p.heads + head)*p.to_cells + cell)*width + i;
    }
    const uint row = cell & (rows - 1); // a power of two
    const size_t tiled_cells = (p.to_cells + rows - 1) & ~(rows - 1);
    return p.to + (((size_t) stream*p.heads + head)*tiled_cells + (cell - row))*width + place_in_tile(rows, row, i);
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

// Rows of the last tile behind the last cell are zeros: they are multiplied, with weights of zero.
__global__ void __launch_bounds__(THREADS) kv_expand_tail(const expand_params p) {
    for (uint i = threadIdx.x; i < p.to_width; i += THREADS) {
        *place_of(p, p.cells + blockIdx.x, blockIdx.y, blockIdx.z, i) = __ushort_as_half(0);
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
        store_halves(place_of(p, cell, head, stream, i), y);
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
        store_halves(place_of(p, first + cell, head, stream, N*lane), x);
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
            *(uint4 *) place_of(p, cell, head, stream, 64*c + 32*i + j) = make_uint4(x[0], x[1], x[2], x[3]);
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
                    store_halves(place_of(p, first + row, head, stream, i), y);
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
    const uint size = p.size;
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
    for (uint i = lane; i < p.to_width; i += 32) {
        *place_of(p, cell, head, stream, i) = i < size ? half_of_value(y[i]) : __ushort_as_half(0);
    }
}

// A warp for a query row. To floats, or with the scale of scores to tiles of halves; zeros behind them, where rows are wider there.
template <uint SIZE> __global__ void __launch_bounds__(THREADS) kv_expand_queries(const attn_params p, float * to, __half * tiles, uint to_width) {
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
    if (!tiles) {
        for (uint i = lane; i < to_width; i += 32) {
            to[(size_t) row*to_width + i] = i < width ? q[i] : 0.0f;
        }
        return;
    }
    const uint group = p.args.heads/p.args.kv_heads, in_group = token*group + head % group, row_tiles = divided(group*p.args.tokens, PROMPT_ROWS);
    __half * tile = tiles + (((size_t) stream*p.args.kv_heads + head/group)*row_tiles + in_group/PROMPT_ROWS)*PROMPT_ROWS*to_width;
    for (uint i = lane; i < to_width; i += 32) {
        tile[place_in_tile(PROMPT_ROWS, in_group % PROMPT_ROWS, i)] = half_of_value(i < width ? q[i]*p.args.scale : 0.0f);
    }
}

// The sum of a result's shares, by their largest scores and sums of weights, of which all lanes have values lane + 32i.
__device__ __forceinline__ void join_shares(const attn_params & p, uint row, uint head, uint width, uint from_width, uint lane, float * o) {
    const uint shares = p.args.chunks;
    const float2 * metas = p.metas + (size_t) row*shares;
    float largest = p.sinks ? p.sinks[head] : HIDDEN;
    for (uint n = 0; n < shares; ++n) {
        largest = fmaxf(largest, metas[n].x);
    }
    float sum = p.sinks ? rescale(p.sinks[head], largest) : 0.0f;
    for (uint i = lane; i < width; i += 32) {
        o[i] = 0.0f;
    }
    for (uint n = 0; n < shares; ++n) {
        const float weight = rescale(metas[n].x, largest);
        const float * from = p.sums + ((size_t) row*shares + n)*from_width;
        sum = fmaf(weight, metas[n].y, sum);
        for (uint i = lane; i < width; i += 32) {
            o[i] = fmaf(weight, from[i], o[i]);
        }
    }
    const float factor = 1.0f/sum; // not a number where a row sees no cell
    for (uint i = lane; i < width; i += 32) {
        o[i] *= factor;
    }
}

// A warp for a result: of ggml's attention, or of shares. `from_width` values of each are there.
template <uint SIZE> __global__ void __launch_bounds__(THREADS) kv_expand_results(const attn_params p, uint from_width) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.v_size, width = kv_width(p.v_kind, size), lane = threadIdx.x % 32;
    const uint row = blockIdx.x*WARPS + threadIdx.x/32; // by stream, token, head
    if (row >= p.args.streams*p.args.heads*p.args.tokens) {
        return;
    }
    const uint head = row % p.args.heads, token = row/p.args.heads % p.args.tokens, stream = row/p.args.heads/p.args.tokens;
    float * result = (float *) (p.dst + head*p.args.dst_nb[0] + token*p.args.dst_nb[1] + stream*p.args.dst_nb[2]);
    float * o = memory + threadIdx.x/32*width;
    if (p.metas) {
        join_shares(p, row, head, width, from_width, lane, o);
    } else {
        for (uint i = lane; i < width; i += 32) {
            o[i] = p.sums[(size_t) row*from_width + i];
        }
    }
    for (uint i = lane; i < width; i += 32) {
        o[i] = fabsf(o[i]) <= FLT_MAX ? o[i] : 0.0f; // a row that sees no cell is zero
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

void set_strides(uint64_t (&to)[3], const uint64_t (&from)[3]) {
    for (int i = 0; i < 3; ++i) {
        to[i] = from[i];
    }
}

// The kernel for rows of so many bits at a common size.
#define KV_OF_BITS(size, kernel, bits, other) \
    ((size) == 64 ? kernel<64, bits> : (size) == 128 ? kernel<128, bits> : (size) == 256 ? kernel<256, bits> : other)

// K or V of the op; in tiles of so many cells if that is not 0.
cudaError_t expand(const kv_cuda_attention & op, bool values, __half * to, uint to_width, uint tile_cells, cudaStream_t stream) {
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
    p.tile_cells = tile_cells;
    p.to_width   = to_width;
    set_strides(p.nb, values ? args.v_nb : args.k_nb);
    if (to_width != KV_WIDTH(p.kind, p.size)) {
        const size_t cells = tile_cells != 0 ? (size_t) divided(args.cells, tile_cells)*tile_cells : args.cells;
        const cudaError_t err = cudaMemsetAsync(to, 0, sizeof(__half)*cells*to_width*args.kv_heads*args.kv_streams, stream);
        if (err != cudaSuccess) {
            return err;
        }
    } else if (tile_cells != 0 && args.cells % tile_cells != 0) {
        kv_expand_tail<<<dim3(tile_cells - args.cells % tile_cells, args.kv_heads, args.kv_streams), THREADS, 0, stream>>>(p);
    }
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
    if (op.k_size == op.v_size) {
        // Beside rows of turbo others get as wide: kernels for halves have K and V of one width.
        res.k_width = res.v_width = res.k_width > res.v_width ? res.k_width : res.v_width;
    }
    res.queries = rows*res.k_width;
    res.keys    = cells*res.k_width;
    res.values  = cells*res.v_width;
    res.results = rows*res.v_width;
    return res;
}

namespace kv {
namespace {

cudaError_t expand_queries(const kv_cuda_attention & op, float * floats, __half * tiles, uint to_width, cudaStream_t stream) {
    attn_params p = {};
    p.args   = op.args;
    p.k_kind = op.k_kind;
    p.q_kind = op.q_kind;
    p.k_size = op.k_size;
    p.q      = (const uint8_t *) op.q;
    const uint rows = op.args.streams*op.args.heads*op.args.tokens;
    const auto kernel = KV_BY_SIZE(op.k_size, kv_expand_queries);
    kernel<<<divided(rows, WARPS), THREADS, sizeof(float)*WARPS*KV_WIDTH(op.k_kind, op.k_size), stream>>>(p, floats, tiles, to_width);
    return cudaGetLastError();
}

// metas: null for one share, that is normalized already.
cudaError_t store_results(const kv_cuda_attention & op, const float * sums, uint width, float2 * metas, uint shares, cudaStream_t stream) {
    attn_params p = {};
    p.args   = op.args;
    p.v_kind = op.v_kind;
    p.v_size = op.v_size;
    p.dst    = (uint8_t *) op.dst;
    p.sums   = (float *) sums;
    p.metas  = metas;
    p.sinks  = op.sinks;
    p.args.chunks = shares;
    const uint rows = op.args.streams*op.args.heads*op.args.tokens;
    const auto kernel = KV_BY_SIZE(op.v_size, kv_expand_results);
    kernel<<<divided(rows, WARPS), THREADS, sizeof(float)*WARPS*KV_WIDTH(op.v_kind, op.v_size), stream>>>(p, width);
    return cudaGetLastError();
}

}  // namespace
}  // namespace kv

cudaError_t kv_cuda_expand(const kv_cuda_attention & op, float * queries, void * keys, void * values, cudaStream_t stream) {
    const kv_cuda_expanded sizes = kv_cuda_expanded_of(op);
    cudaError_t err = kv::expand_queries(op, queries, nullptr, sizes.k_width, stream);
    err = err == cudaSuccess ? kv::expand(op, false, (__half *) keys, sizes.k_width, 0, stream) : err;
    return err == cudaSuccess ? kv::expand(op, true, (__half *) values, sizes.v_width, 0, stream) : err;
}

cudaError_t kv_cuda_leave_domain(const kv_cuda_attention & op, const float * results, cudaStream_t stream) {
    return kv::store_results(op, results, kv_cuda_expanded_of(op).v_width, nullptr, 1, stream);
}

#ifdef KV_CUDA_HOPPER

bool kv_cuda_plan_prompt(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_prompt & plan) {
    plan = {};
    const kv_attn_args & args = op.args;
    const kv_cuda_expanded sizes = kv_cuda_expanded_of(op);
    const bool known = sizes.k_width == sizes.v_width && (sizes.k_width == 64 || sizes.k_width == 128 || sizes.k_width == 256);
    // A mask for each head is no mask for a block.
    if (device.cc != 900 || kv_cuda_path_is("rows") || kv_cuda_path_is("tile") || !known || args.cells == 0 || (op.mask && args.mask_rows[0] != 1) || !kv::mask_is_small(op) ||
        kv::prompt_shared_bytes(sizes.k_width) > device.shared_bytes) {
        return false;
    }
    using kv::divided;
    plan.width      = sizes.k_width;
    plan.tile_cells = kv::prompt_cells(plan.width);
    plan.tiles      = divided(args.cells, plan.tile_cells);
    plan.row_tiles  = divided(args.heads/args.kv_heads*args.tokens, kv::PROMPT_ROWS);
    // As many shares as fill the multiprocessors well, each of a few tiles at least; a share costs about as much as two tiles, and memory for its sums.
    const uint32_t blocks = plan.row_tiles*args.kv_heads*args.streams;
    uint32_t most = divided(plan.tiles, 4), least = divided(plan.tiles, kv::prompt_most_tiles()), best = ~0u;
    most = most > (uint32_t) device.sms ? (uint32_t) device.sms : most;
    for (uint32_t shares = least; shares <= (most > least ? most : least); ++shares) {
        const uint32_t waves = divided(blocks*shares, (uint32_t) device.sms), steps = waves*(divided(plan.tiles, shares) + 2);
        if (20ull*steps < 19ull*best) {
            best = steps;
            plan.share_tiles = divided(plan.tiles, shares);
        }
    }
    plan.shares = divided(plan.tiles, plan.share_tiles);
    const size_t rows = (size_t) args.streams*args.heads*args.tokens, cells = (size_t) args.kv_streams*args.kv_heads*plan.tiles*plan.tile_cells;
    size_t at = 0;
    const auto take = [&](size_t bytes) {
        const size_t res = at;
        at += kv::padded(bytes);
        return res;
    };
    plan.queries = take(sizeof(__half)*blocks*kv::PROMPT_ROWS*plan.width);
    plan.keys    = take(sizeof(__half)*cells*plan.width);
    plan.values  = take(sizeof(__half)*cells*plan.width);
    plan.classes = take(op.mask ? (size_t) args.streams*plan.row_tiles*plan.tiles : 0);
    plan.metas   = take(sizeof(float2)*rows*plan.shares);
    plan.sums    = take(sizeof(float)*rows*plan.shares*plan.width);
    plan.scratch_bytes = at;
    return true;
}

cudaError_t kv_cuda_attend_prompt(const kv_cuda_attention & op, const kv_cuda_prompt & plan, void * scratch, cudaStream_t stream) {
    uint8_t * base = (uint8_t *) scratch;
    kv::prompt_params p = {};
    p.attn.args        = op.args;
    p.attn.args.chunks = plan.shares;
    p.attn.alibi       = op.alibi;
    p.attn.mask        = (const uint8_t *) op.mask;
    p.attn.metas       = (float2 *) (base + plan.metas);
    p.attn.sums        = (float *) (base + plan.sums);
    p.queries     = (const __half *) (base + plan.queries);
    p.keys        = (const __half *) (base + plan.keys);
    p.values      = (const __half *) (base + plan.values);
    p.classes     = base + plan.classes;
    p.row_tiles   = plan.row_tiles;
    p.tiles       = plan.tiles;
    p.tile_cells  = plan.tile_cells;
    p.share_tiles = plan.share_tiles;
    cudaError_t err = op.mask ? kv::launch_prompt_classes(p, stream) : cudaSuccess;
    err = err == cudaSuccess ? kv::expand_queries(op, nullptr, (__half *) p.queries, plan.width, stream) : err;
    err = err == cudaSuccess ? kv::expand(op, false, (__half *) p.keys, plan.width, plan.tile_cells, stream) : err;
    err = err == cudaSuccess ? kv::expand(op, true, (__half *) p.values, plan.width, plan.tile_cells, stream) : err;
    err = err == cudaSuccess ? kv::launch_prompt(p, plan.width, stream) : err;
    return err == cudaSuccess ? kv::store_results(op, p.attn.sums, plan.width, p.attn.metas, plan.shares, stream) : err;
}

#else

bool kv_cuda_plan_prompt(const kv_cuda_attention &, const kv_cuda_device &, kv_cuda_prompt &) {
    return false;
}

cudaError_t kv_cuda_attend_prompt(const kv_cuda_attention &, const kv_cuda_prompt &, void *, cudaStream_t) {
    return cudaErrorNotSupported;
}

#endif
