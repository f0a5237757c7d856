// Attention of many query rows: any K but delta with any V, of up to 128 values.
//
// A block takes one KV head, 64 or 128 query rows (token by token, the heads of the KV head side by side) and a chunk of cells,
// 64 at a time. K and V of a tile are unpacked into shared memory as kv_tile.cu does it, those of the next are on their way
// meanwhile. A warp has 16 rows, and all that concerns them stays in its registers: scores, softmax, weights as the first
// operand of P V, and the sums.

#include "attention.cuh"
#include "mma.cuh"
#include "tile.cuh"

namespace kv {
namespace {

constexpr uint MOST_WIDTH = SLAB, BLOCKS = CELLS/8;

struct prefill_memory {
    __half * high, * low;        // [row][query_step]
    __half * k_tile, * v_tile;   // [cell][TILE_STEP]
    float *  scales;             // [SCALES][K_ROWS]
    float *  k_levels, * v_levels;
    uint *   k_pairs, * v_pairs; // [256]
    uint *   masks;              // [row]
    uint8_t * k_raw, * v_raw;
};

__host__ __device__ constexpr size_t prefill_bytes(uint rows, uint k_width) {
    return 2*sizeof(__half)*rows*(k_width + 8) + 2*sizeof(__half)*CELLS*TILE_STEP + sizeof(float)*(K_ROWS*SCALES + 32 + 2*256 + rows);
}

__device__ __forceinline__ prefill_memory carve(uint8_t * memory, uint rows, uint k_width, uint k_raw_bytes) {
    prefill_memory m;
    m.high     = (__half *) memory;
    m.low      = m.high + rows*(k_width + 8);
    m.k_tile   = m.low + rows*(k_width + 8);
    m.v_tile   = m.k_tile + CELLS*TILE_STEP;
    m.scales   = (float *) (m.v_tile + CELLS*TILE_STEP);
    m.k_levels = m.scales + K_ROWS*SCALES;
    m.v_levels = m.k_levels + 16;
    m.k_pairs  = (uint *) (m.v_levels + 16);
    m.v_pairs  = m.k_pairs + 256;
    m.masks    = m.v_pairs + 256;
    m.k_raw    = (uint8_t *) (m.masks + rows);
    m.v_raw    = m.k_raw + k_raw_bytes;
    return m;
}

// Two neighbours of a row of the mask as they are stored; hidden from `end` on.
__device__ __forceinline__ uint two_masks(const attn_params & p, uint offset, uint cell, uint end, bool whole) {
    constexpr uint GONE = 0xfc00; // -inf
    if (!p.mask) {
        return cell + 1 < end ? 0 : cell < end ? GONE << 16 : GONE << 16 | GONE;
    }
    const uint8_t * at = p.mask + (offset + 2*cell);
    if (whole && cell + 1 < end) {
        return *(const uint *) at;
    }
    const uint first = cell < end ? *(const unsigned short *) at : GONE, second = cell + 1 < end ? *(const unsigned short *) (at + 2) : GONE;
    return first | second << 16;
}

__device__ __forceinline__ uint two_halves(float a, float b) {
    const __half2 x = __floats2half2_rn(a, b);
    return *(const uint *) &x;
}

// WIDTH is that of K, 0 for any; V has up to 8*COLUMNS values, and what is beyond its width is computed and not looked at.
template <uint WARPS, uint WIDTH, uint COLUMNS> __global__ void __launch_bounds__(32*WARPS) kv_prefill(const attn_params p) {
    extern __shared__ __align__(16) uint8_t memory[];
    constexpr uint ROWS = 16*WARPS, THREADS = 32*WARPS;
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    const kv_attn_args & args = p.args;
    const uint k_width = WIDTH ? WIDTH : kv_width(p.k_kind, p.k_size), v_width = kv_width(p.v_kind, p.v_size), query_step = k_width + 8;
    const uint k_raw_step = raw_step_of(p.k_bytes), v_raw_step = raw_step_of(p.v_bytes);
    const uint k_bytes = p.k_bytes, v_bytes = p.v_bytes;
    const prefill_memory m = carve(memory, ROWS, k_width, CELLS*k_raw_step);
    const uint heads_per_kv = args.heads/args.kv_heads, all_rows = heads_per_kv*args.tokens;
    const uint first_row = blockIdx.x*ROWS, used = min(ROWS, all_rows - first_row), chunk = blockIdx.y;
    const uint kv_head = blockIdx.z % args.kv_heads, stream = blockIdx.z/args.kv_heads;
    const uint kv_stream = stream/(args.streams/args.kv_streams);
    const uint8_t * keys   = p.k + kv_head*args.k_nb[1] + kv_stream*args.k_nb[2];
    const uint8_t * values = p.v + kv_head*args.v_nb[1] + kv_stream*args.v_nb[2];
    const bool k_4_bit = is_4_bit(p.k_kind, p.k_size), v_4_bit = is_4_bit(p.v_kind, p.v_size);
    // Do 32 values share a scale?
    const bool wide = k_width % 32 == 0 && !KV_KIND_IS_POLAR(p.k_kind) && p.k_kind != KV_KIND_BF16 && p.k_kind != KV_KIND_F32;
    const bool mask_is_whole = (((uintptr_t) p.mask | args.mask_nb[0] | args.mask_nb[1] | args.mask_nb[2]) & 3) == 0;

    fill_levels(p.k_kind, threadIdx.x, m.k_levels);
    fill_levels(p.v_kind, threadIdx.x, m.v_levels);
    fill_pairs(1.0f, threadIdx.x, m.k_pairs);
    fill_pairs(1.0f/KV_SRFT_UNIT, threadIdx.x, m.v_pairs);
    const size_t query_row = (size_t) (stream*args.kv_heads + kv_head)*all_rows + first_row;
    for (uint i = threadIdx.x; i < ROWS*k_width/8; i += THREADS) {
        const uint r = i/(k_width/8), at = i % (k_width/8)*8;
        const size_t from = (query_row + r)*k_width + at;
        *(uint4 *) (m.high + r*query_step + at) = r < used ? *(const uint4 *) (p.query_high + from) : make_uint4(0, 0, 0, 0);
        *(uint4 *) (m.low + r*query_step + at)  = r < used ? *(const uint4 *) (p.query_low + from) : make_uint4(0, 0, 0, 0);
    }
    for (uint r = threadIdx.x; r < ROWS; r += THREADS) {
        const uint row = first_row + min(r, used - 1);
        m.masks[r] = mask_offset(p, row/heads_per_kv, kv_head*heads_per_kv + row % heads_per_kv, stream);
    }
    __syncthreads();

    // Rows g and g + 8 of the warp's.
    float factor_of[2], slope[2], largest[2], sum[2];
    uint mask_at[2];
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
        const uint r = min(warp*16 + g + 8*n, used - 1);
        factor_of[n] = p.query_scale[query_row + r]*args.scale*(args.softcap != 0.0f ? 1.0f : LOG2_E);
        slope[n]     = slope_of(p, kv_head*heads_per_kv + (first_row + r) % heads_per_kv)*LOG2_E;
        mask_at[n]   = m.masks[r];
        largest[n]   = HIDDEN;
        sum[n]       = 0.0f;
    }
    float acc[COLUMNS][4];
#pragma unroll
    for (uint i = 0; i < COLUMNS*4; ++i) {
        acc[i/4][i % 4] = 0.0f;
    }
    const uint end = min(args.cells, (chunk + 1)*args.chunk_cells);
    // The first tile from `cell` on that a row sees; a barrier for all.
    const auto visible_from = [&](uint cell) {
        for (; cell < end; cell += CELLS) {
            bool any = !p.mask;
            // Heads of a token share a mask, mostly: the row of its first head stands for all.
            const uint step = args.mask_rows[0] == 1 ? heads_per_kv : 1;
            for (uint r = warp*step; r < used + step - 1 && !any; r += WARPS*step) {
                const uint at = m.masks[min(r, used - 1)];
                any = bias_at(p, at, cell + lane, end) > HIDDEN || bias_at(p, at, cell + 32 + lane, end) > HIDDEN;
            }
            if (__syncthreads_or(any)) {
                break;
            }
        }
        return cell;
    };
    const auto stage_tile = [&](uint cell) {
        if (cell < end) {
            const uint count = min(CELLS, end - cell);
            stage(keys + cell*args.k_nb[0], args.k_nb[0], k_bytes, count, k_raw_step, m.k_raw);
            stage(values + cell*args.v_nb[0], args.v_nb[0], v_bytes, count, v_raw_step, m.v_raw);
        }
        commit_staged();
    };

    uint next = visible_from(chunk*args.chunk_cells);
    stage_tile(next);
    while (next < end) {
        const uint cell = next, count = min(CELLS, end - cell);
        wait_all_staged();
        // Also the end of the tile before.
        __syncthreads();
        if (k_4_bit) {
            unpack_4_bit<false>(m.k_raw, k_raw_step, p.k_size, 0, k_width, count, nullptr, m.k_pairs, m.k_tile, m.scales);
        } else {
            unpack<false>(m.k_raw, k_raw_step, p.k_kind, p.k_size, 0, k_width, count, nullptr, m.k_levels, m.k_tile, m.scales);
        }
        if (v_4_bit) {
            unpack_4_bit<true>(m.v_raw, v_raw_step, p.v_size, 0, v_width, count, nullptr, m.v_pairs, m.v_tile, nullptr);
        } else {
            unpack<true>(m.v_raw, v_raw_step, p.v_kind, p.v_size, 0, v_width, count, nullptr, m.v_levels, m.v_tile, nullptr);
        }
        uint masked[2][BLOCKS];
        if (p.mask && mask_is_whole && count == CELLS) {
            const uint * from[2] = { (const uint *) (p.mask + (mask_at[0] + 2*cell)) + t, (const uint *) (p.mask + (mask_at[1] + 2*cell)) + t };
#pragma unroll
            for (uint i = 0; i < 2*BLOCKS; ++i) {
                masked[i/BLOCKS][i % BLOCKS] = from[i/BLOCKS][i % BLOCKS*4];
            }
        } else {
#pragma unroll
            for (uint i = 0; i < 2*BLOCKS; ++i) {
                masked[i/BLOCKS][i % BLOCKS] = two_masks(p, mask_at[i/BLOCKS], cell + i % BLOCKS*8 + 2*t, end, mask_is_whole);
            }
        }
        next = visible_from(cell + CELLS);
        __syncthreads();
        stage_tile(next);

        float s[BLOCKS][4], x[BLOCKS][4];
#pragma unroll
        for (uint i = 0; i < BLOCKS*4; ++i) {
            s[i/4][i % 4] = x[i/4][i % 4] = 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < (WIDTH ? WIDTH : k_width); i += 16) {
            uint32_t high[4], low[4], b[BLOCKS/2][4];
            const uint at = (warp*16 + lane % 16)*query_step + i + lane/16*8;
            load_matrices(high, m.high + at);
            load_matrices(low, m.low + at);
#pragma unroll
            for (uint n = 0; n < BLOCKS/2; ++n) {
                load_matrices(b[n], m.k_tile + (n*16 + lane/16*8 + lane % 8)*TILE_STEP + i + lane/8 % 2*8);
            }
#pragma unroll
            for (uint n = 0; n < BLOCKS; ++n) {
                mma_f16(x[n], high, b[n/2][n % 2*2], b[n/2][n % 2*2 + 1]);
            }
#pragma unroll
            for (uint n = 0; n < BLOCKS; ++n) {
                mma_f16(x[n], low, b[n/2][n % 2*2], b[n/2][n % 2*2 + 1]);
            }
            if (wide && i % 32 == 0) {
                continue;
            }
#pragma unroll
            for (uint n = 0; n < BLOCKS; ++n) {
                const float2 scale = *(const float2 *) (m.scales + i/16*K_ROWS + n*8 + 2*t);
                s[n][0] = fmaf(scale.x, x[n][0], s[n][0]);
                s[n][1] = fmaf(scale.y, x[n][1], s[n][1]);
                s[n][2] = fmaf(scale.x, x[n][2], s[n][2]);
                s[n][3] = fmaf(scale.y, x[n][3], s[n][3]);
                x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
            }
        }

        // Scores in units of log 2. Far from the end of the mask nothing is hidden and nothing is added.
        uint any_mask = 0;
#pragma unroll
        for (uint i = 0; i < 2*BLOCKS; ++i) {
            any_mask |= masked[i/BLOCKS][i % BLOCKS];
        }
        float top[2] = { largest[0], largest[1] };
#pragma unroll
        for (uint i = 0; i < 4*BLOCKS; ++i) {
            s[i/4][i % 4] *= factor_of[i % 4/2];
        }
        if (args.softcap != 0.0f) {
#pragma unroll
            for (uint i = 0; i < 4*BLOCKS; ++i) {
                s[i/4][i % 4] = soft_capped(s[i/4][i % 4], args.softcap)*LOG2_E;
            }
        }
        if (__any_sync(KV_ALL_LANES, any_mask != 0)) {
#pragma unroll
            for (uint i = 0; i < 4*BLOCKS; ++i) {
                const float bias = __half2float(__ushort_as_half((unsigned short) (masked[i % 4/2][i/4] >> i % 2*16)));
                // A key that is hidden may hold anything.
                s[i/4][i % 4] = bias > -65504.0f ? fmaf(slope[i % 4/2], bias, s[i/4][i % 4]) : -INFINITY;
            }
        }
#pragma unroll
        for (uint i = 0; i < 4*BLOCKS; ++i) {
            top[i % 4/2] = fmaxf(top[i % 4/2], s[i/4][i % 4]);
        }
        float factor[2];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            top[n] = fmaxf(top[n], __shfl_xor_sync(KV_ALL_LANES, top[n], 1));
            top[n] = fmaxf(top[n], __shfl_xor_sync(KV_ALL_LANES, top[n], 2));
            factor[n]  = exp2f(largest[n] - top[n]);
            largest[n] = top[n];
            sum[n]    *= factor[n];
        }
        uint weights[BLOCKS][2]; // of rows g and g + 8: two cells
#pragma unroll
        for (uint i = 0; i < 2*BLOCKS; ++i) {
            const uint n = i/2, r = i % 2;
            weights[n][r] = two_halves(exp2f(s[n][2*r] - largest[r]), exp2f(s[n][2*r + 1] - largest[r]));
            const float2 rounded = __half22float2(*(const __half2 *) &weights[n][r]);
            sum[r] += rounded.x + rounded.y;
        }
        if (__any_sync(KV_ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (uint i = 0; i < COLUMNS*4; ++i) {
                acc[i/4][i % 4] *= factor[i % 4/2];
            }
        }
#pragma unroll
        for (uint i = 0; i < CELLS/16; ++i) {
            const uint32_t a[4] = { weights[2*i][0], weights[2*i][1], weights[2*i + 1][0], weights[2*i + 1][1] };
#pragma unroll
            for (uint n = 0; n < COLUMNS; n += 2) {
                uint32_t b[4];
                load_matrices_transposed(b, m.v_tile + (i*16 + lane/8 % 2*8 + lane % 8)*TILE_STEP + n*8 + lane/16*8);
                mma_f16(acc[n], a, b[0], b[1]);
                mma_f16(acc[n + 1], a, b[2], b[3]);
            }
        }
    }

    const uint results = stream*args.tokens*args.heads + kv_head*heads_per_kv;
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
        sum[n] += __shfl_xor_sync(KV_ALL_LANES, sum[n], 1);
        sum[n] += __shfl_xor_sync(KV_ALL_LANES, sum[n], 2);
        const uint r = warp*16 + g + 8*n, row = first_row + r;
        if (r >= used) {
            continue;
        }
        const size_t at = (size_t) (results + row/heads_per_kv*args.heads + row % heads_per_kv)*args.chunks + chunk;
        if (t == 0) {
            p.metas[at] = make_float2(largest[n] <= HIDDEN ? HIDDEN : largest[n]/LOG2_E, sum[n]);
        }
#pragma unroll
        for (uint i = 0; i < COLUMNS; ++i) {
            if (i*8 < v_width) {
                *(float2 *) (p.sums + at*v_width + i*8 + 2*t) = make_float2(acc[i][2*n], acc[i][2*n + 1]);
            }
        }
    }
}

typedef void (*prefill_kernel)(const attn_params);

template <uint WARPS> static prefill_kernel kernel_of(uint k_width, uint v_width) {
    return k_width == 128 && v_width == 128 ? kv_prefill<WARPS, 128, 16>
           : k_width == 64 && v_width <= 64 ? kv_prefill<WARPS, 64, 8>
                                            : kv_prefill<WARPS, 0, 16>;
}

static uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

}  // namespace

bool plan_prefill(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_plan & plan) {
    const uint k_width = width_of(op.k_kind, op.k_size), v_width = width_of(op.v_kind, op.v_size);
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens;
    if (KV_KIND_IS_DELTA(op.k_kind) || k_width > MOST_WIDTH || v_width > MOST_WIDTH || rows < 48) {
        return false;
    }
    const size_t raw = CELLS*(raw_step_of(op.k_bytes) + raw_step_of(op.v_bytes));
    for (uint warps : { 8u, 4u }) {
        const uint blocks = divided(rows, 16*warps)*op.args.kv_heads*op.args.streams;
        plan.shared_bytes = prefill_bytes(16*warps, k_width) + raw;
        if (plan.shared_bytes > device.shared_bytes || (warps == 8 && rows <= 64)) {
            continue;
        }
        const uint wanted = divided(2*device.sms, blocks), most = divided(op.args.cells, 4*CELLS);
        const uint chunks = wanted < most ? wanted : most;
        plan.prefill     = true;
        plan.row_blocks  = (int) warps;
        plan.chunk_cells = divided(divided(op.args.cells, chunks ? chunks : 1), CELLS)*CELLS;
        plan.chunks      = divided(op.args.cells, plan.chunk_cells);
        return true;
    }
    return false;
}

cudaError_t launch_prefill(const attn_params & p, const kv_cuda_plan & plan, cudaStream_t stream) {
    const uint rows = p.args.heads/p.args.kv_heads*p.args.tokens, warps = (uint) plan.row_blocks;
    const uint k_width = width_of(p.k_kind, p.k_size), v_width = width_of(p.v_kind, p.v_size);
    const auto kernel = warps == 8 ? kernel_of<8>(k_width, v_width) : kernel_of<4>(k_width, v_width);
    const cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) plan.shared_bytes);
    if (err != cudaSuccess) {
        return err;
    }
    const dim3 grid(divided(rows, 16*warps), plan.chunks, p.args.kv_heads*p.args.streams);
    kernel<<<grid, 32*warps, plan.shared_bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv
