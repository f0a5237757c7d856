// Attention of many query rows: any K with any V, of up to 128 values.
//
// A block takes one KV head, 64 or 128 query rows (token by token, the heads of the KV head side by side) and a chunk of cells,
// 64 at a time. K and V of a tile are unpacked into shared memory as kv_tile.cu does it, those of the next are on their way
// meanwhile. A warp has 16 rows, and all that concerns them stays in its registers: scores, softmax, weights as the first
// operand of P V, and the sums. Cells lie in the tiles so that a lane has the scores of 16 neighbours.
//
// delta and bands: a tile is a group. Its I-frame is two more rows of K, halves and what they leave, so that q.m is one more product; the
// recursion runs over the 16 cells of a lane, and then over the four lanes of a row.

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
    float *  chain;              // delta: [cell] its factor of the cell before; [cell] the product of those of its lane up to here
    uint *   kinds;              // delta: bits of cells that stand alone, and of empty ones; then two words of hidden cells
    uint8_t * k_raw, * v_raw;
};

__host__ __device__ constexpr size_t prefill_bytes(uint rows, uint k_width) {
    return 2*sizeof(__half)*rows*(k_width + 8) + sizeof(__half)*(K_ROWS + CELLS)*TILE_STEP + sizeof(float)*(K_ROWS*SCALES + KV_LEVELS + KV_V_LEVELS + 2*256 + rows + 2*CELLS + 8);
}

__device__ __forceinline__ prefill_memory carve(uint8_t * memory, uint rows, uint k_width, uint k_raw_bytes) {
    prefill_memory m;
    m.high     = (__half *) memory;
    m.low      = m.high + rows*(k_width + 8);
    m.k_tile   = m.low + rows*(k_width + 8);
    m.v_tile   = m.k_tile + K_ROWS*TILE_STEP;
    m.scales   = (float *) (m.v_tile + CELLS*TILE_STEP);
    m.k_levels = m.scales + K_ROWS*SCALES;
    m.v_levels = m.k_levels + KV_LEVELS;
    m.k_pairs  = (uint *) (m.v_levels + KV_V_LEVELS);
    m.v_pairs  = m.k_pairs + 256;
    m.masks    = m.v_pairs + 256;
    m.chain    = (float *) (m.masks + rows);
    m.kinds    = (uint *) (m.chain + 2*CELLS);
    m.k_raw    = (uint8_t *) (m.kinds + 8);
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

// Rows of a tile to halves, at the places of their cells.
template <bool VALUES> __device__ __forceinline__ void unpack_rows(
        const uint8_t * raw, uint step, uint kind, uint size, uint width, uint count, const float * levels, const uint * pairs, __half * tile, float * scales) {
    const bool by_words = size % 64 == 0;
    if (by_words && (kind == KV_KIND_SRFT4 || kind == KV_KIND_DELTA4)) {
        unpack_4_bit<VALUES, true>(raw, step, size, 0, width, count, nullptr, pairs, tile, scales);
    } else if (by_words && (kind == KV_KIND_SRFT3 || kind == KV_KIND_DELTA3)) {
        unpack_few_bits<3, VALUES>(raw, step, size, count, tile, scales);
    } else if (by_words && kind == KV_KIND_SRFT8) {
        unpack_8_bit<VALUES>(raw, step, size, count, tile, scales);
    } else if (by_words && kind == KV_KIND_SRFT2) {
        unpack_few_bits<2, VALUES>(raw, step, size, count, tile, scales);
    } else {
        unpack<VALUES, true>(raw, step, kind, size, 0, width, count, nullptr, levels, tile, scales);
    }
}

// How the cells of a group hang together, and its I-frame; `rows` of it are there, the first `count` are looked at.
__device__ __forceinline__ void unpack_group(const attn_params & p, const prefill_memory & m, const uint8_t * group, uint step, uint width, uint rows, uint count) {
    for (uint i = threadIdx.x; i < width; i += blockDim.x) {
        const float x = kv_delta_frame(group, step, p.k_kind, p.k_size, rows, i);
        const __half high = __float2half_rn(x);
        m.k_tile[FRAME*TILE_STEP + i] = high;
        m.k_tile[(FRAME + 1)*TILE_STEP + i] = __float2half_rn(x - __half2float(high));
    }
    if (threadIdx.x >= 32) {
        return;
    }
    const uint lane = threadIdx.x;
    bool written = false; // the cell before lane 0's
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
        const uint cell = 32*n + lane, kind = cell < count ? kv_delta_kind(group + cell*step, p.k_kind, p.k_size) : KV_DELTA_EMPTY;
        const uint empty = __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_EMPTY), alone = __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_ALONE);
        const bool before = lane == 0 ? written : (empty >> (lane - 1) & 1) == 0;
        written = empty >> 31 == 0;
        const float factor = kind == KV_DELTA_CHAINED && before ? KV_DELTA_RHO : 0.0f;
        float product = factor;
#pragma unroll
        for (uint i = 1; i < 16; i *= 2) {
            const float other = __shfl_up_sync(KV_ALL_LANES, product, i, 16);
            product = lane % 16 >= i ? product*other : product;
        }
        m.chain[cell] = factor;
        m.chain[CELLS + cell] = product;
        if (lane == 0) {
            m.kinds[n] = alone;
            m.kinds[2 + n] = empty;
        }
    }
}

// From q.d of the 16 cells of lane t to the scores of their keys, for two rows of queries.
__device__ __forceinline__ void follow_chain(const prefill_memory & m, const float (&base)[2], uint t, float (&s)[BLOCKS][4]) {
    const uint alone = m.kinds[t/2] >> t % 2*16 & 0xffff, empty = m.kinds[2 + t/2] >> t % 2*16 & 0xffff;
    if (__any_sync(KV_ALL_LANES, alone != 0)) {
#pragma unroll
        for (uint i = 0; i < 16; ++i) {
            const bool is = (alone >> i & 1) != 0;
            s[i/2][i % 2]     -= is ? base[0] : 0.0f;
            s[i/2][i % 2 + 2] -= is ? base[1] : 0.0f;
        }
    }
    const float * factors = m.chain + 16*t, * products = factors + CELLS;
#pragma unroll
    for (uint i = 1; i < 16; ++i) {
        s[i/2][i % 2]     = fmaf(factors[i], s[(i - 1)/2][(i - 1) % 2], s[i/2][i % 2]);
        s[i/2][i % 2 + 2] = fmaf(factors[i], s[(i - 1)/2][(i - 1) % 2 + 2], s[i/2][i % 2 + 2]);
    }
    float carry[2] = { s[BLOCKS - 1][1], s[BLOCKS - 1][3] }, whole = products[15];
#pragma unroll
    for (uint i = 1; i < 4; i *= 2) {
        const float first = __shfl_up_sync(KV_ALL_LANES, carry[0], i, 4), second = __shfl_up_sync(KV_ALL_LANES, carry[1], i, 4);
        const float other = __shfl_up_sync(KV_ALL_LANES, whole, i, 4);
        if (t >= i) {
            carry[0] = fmaf(whole, first, carry[0]);
            carry[1] = fmaf(whole, second, carry[1]);
            whole *= other;
        }
    }
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
        carry[n] = __shfl_up_sync(KV_ALL_LANES, carry[n], 1, 4);
        carry[n] = t == 0 ? 0.0f : carry[n];
    }
#pragma unroll
    for (uint i = 0; i < 16; ++i) {
        s[i/2][i % 2]     = fmaf(products[i], carry[0], s[i/2][i % 2]) + base[0];
        s[i/2][i % 2 + 2] = fmaf(products[i], carry[1], s[i/2][i % 2 + 2]) + base[1];
    }
    if (__any_sync(KV_ALL_LANES, empty != 0)) {
#pragma unroll
        for (uint i = 0; i < 16; ++i) {
            const bool is = (empty >> i & 1) != 0;
            s[i/2][i % 2]     = is ? 0.0f : s[i/2][i % 2];
            s[i/2][i % 2 + 2] = is ? 0.0f : s[i/2][i % 2 + 2];
        }
    }
}

// WIDTH is that of K, 0 for any; V has up to 8*COLUMNS values, and what is beyond its width is computed and not looked at.
template <uint WARPS, uint WIDTH, uint COLUMNS, bool DELTA> __global__ void __launch_bounds__(32*WARPS) kv_prefill(const attn_params p) {
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
    const row_units k_units = units_of(keys, args.k_nb[0]), v_units = units_of(values, args.v_nb[0]);
    const uint8_t * k_rows = m.k_raw + k_units.shift, * v_rows = m.v_raw + v_units.shift; // of a tile
    const uint * hidden = hidden_of(p, kv_stream);
    // Do 32 values share a scale?
    const bool wide = k_width % 32 == 0 && !KV_KIND_IS_POLAR(p.k_kind) && p.k_kind != KV_KIND_BF16 && p.k_kind != KV_KIND_F32;
    const bool mask_is_whole = (((uintptr_t) p.mask | args.mask_nb[0] | args.mask_nb[1] | args.mask_nb[2]) & 3) == 0;
    const bool mask_is_wide = (((uintptr_t) p.mask | args.mask_nb[0] | args.mask_nb[1] | args.mask_nb[2]) & 15) == 0;

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
    if (DELTA) {
        for (uint i = threadIdx.x; i < (K_ROWS - CELLS)*TILE_STEP; i += THREADS) {
            m.k_tile[FRAME*TILE_STEP + i] = __float2half_rn(0.0f);
        }
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
    const uint2 range = hidden ? hidden_range(hidden, chunk*args.chunk_cells, end, m.kinds + 4) : make_uint2(~0u, 0);
    // The first tile from `cell` on that a row sees; a barrier for all.
    const auto visible_from = [&](uint cell) {
        for (; cell < end; cell += CELLS) {
            const bool look = cell + CELLS > range.x && cell < range.y;
            const uint gone[2] = { look ? hidden[cell/32] : 0, look ? hidden[cell/32 + 1] : 0 };
            bool any = !p.mask && (gone[0] & gone[1]) != ~0u;
            // Heads of a token share a mask, mostly: the row of its first head stands for all.
            const uint step = args.mask_rows[0] == 1 ? heads_per_kv : 1;
            for (uint r = warp*step; r < used + step - 1 && !any; r += WARPS*step) {
                const uint at = m.masks[min(r, used - 1)];
                any = (bias_at(p, at, cell + lane, end) > HIDDEN && (gone[0] >> lane & 1) == 0) || (bias_at(p, at, cell + 32 + lane, end) > HIDDEN && (gone[1] >> lane & 1) == 0);
            }
            if (__syncthreads_or(any)) {
                break;
            }
        }
        return cell;
    };
    // Of delta the whole group: rows that nobody looks at hold a share of the I-frame.
    const auto k_count = [&](uint cell) { return min(CELLS, (DELTA ? args.k_cells : end) - cell); };
    const auto stage_tile = [&](uint cell) {
        if (cell < end) {
            const uint count = min(CELLS, end - cell);
            stage(keys + cell*args.k_nb[0], args.k_nb[0], k_units, k_bytes, k_count(cell), k_raw_step, m.k_raw);
            stage(values + cell*args.v_nb[0], args.v_nb[0], v_units, v_bytes, count, v_raw_step, m.v_raw);
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
        unpack_rows<false>(k_rows, k_raw_step, p.k_kind, p.k_size, k_width, count, m.k_levels, m.k_pairs, m.k_tile, m.scales);
        unpack_rows<true>(v_rows, v_raw_step, p.v_kind, p.v_size, v_width, count, m.v_levels, m.v_pairs, m.v_tile, nullptr);
        if (DELTA) {
            unpack_group(p, m, k_rows, k_raw_step, k_width, k_count(cell), count);
        }
        uint masked[2][BLOCKS];
        if (p.mask && mask_is_wide && count == CELLS) {
#pragma unroll
            for (uint i = 0; i < BLOCKS/2; ++i) {
                const uint4 eight = *((const uint4 *) (p.mask + (mask_at[i/2] + 2*cell)) + 2*t + i % 2);
                masked[i/2][i % 2*4]     = eight.x;
                masked[i/2][i % 2*4 + 1] = eight.y;
                masked[i/2][i % 2*4 + 2] = eight.z;
                masked[i/2][i % 2*4 + 3] = eight.w;
            }
        } else {
#pragma unroll
            for (uint i = 0; i < 2*BLOCKS; ++i) {
                masked[i/BLOCKS][i % BLOCKS] = two_masks(p, mask_at[i/BLOCKS], cell + 16*t + i % BLOCKS*2, end, mask_is_whole);
            }
        }
        if (cell + CELLS > range.x && cell < range.y) {
            // -inf, or not a number: hidden both.
            const uint gone = hidden[(cell + 16*t)/32] >> 16*(t % 2);
#pragma unroll
            for (uint i = 0; i < BLOCKS; ++i) {
                const uint bits = (gone >> 2*i & 1)*0xfc00u | (gone >> 2*i & 2)*0x7e000000u;
                masked[0][i] |= bits;
                masked[1][i] |= bits;
            }
        }
        next = visible_from(cell + CELLS);
        __syncthreads();
        stage_tile(next);

        float s[BLOCKS][4], x[BLOCKS][4], frame[4] = {};
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
            if (DELTA) {
                uint32_t f[4];
                load_matrices(f, m.k_tile + (FRAME + lane % 8)*TILE_STEP + i + lane/8 % 2*8);
                mma_f16(frame, high, f[0], f[1]);
                mma_f16(frame, low, f[0], f[1]);
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

        if (DELTA) {
            const float base[2] = { __shfl_sync(KV_ALL_LANES, frame[0] + frame[1], lane & ~3u), __shfl_sync(KV_ALL_LANES, frame[2] + frame[3], lane & ~3u) };
            follow_chain(m, base, t, s);
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
    const float unit = value_unit(p.v_kind);
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
        sum[n] += __shfl_xor_sync(KV_ALL_LANES, sum[n], 1);
        sum[n] += __shfl_xor_sync(KV_ALL_LANES, sum[n], 2);
        const uint r = warp*16 + g + 8*n, row = first_row + r;
        if (r >= used) {
            continue;
        }
        const size_t at = (size_t) (results + row/heads_per_kv*args.heads + row % heads_per_kv)*args.chunks + args.first_chunk + chunk;
        if (t == 0) {
            p.metas[at] = make_float2(largest[n] <= HIDDEN ? HIDDEN : largest[n]/LOG2_E, sum[n]);
        }
#pragma unroll
        for (uint i = 0; i < COLUMNS; ++i) {
            if (i*8 < v_width) {
                *(float2 *) (p.sums + at*args.sum_width + i*8 + 2*t) = make_float2(acc[i][2*n]*unit, acc[i][2*n + 1]*unit);
            }
        }
    }
}

typedef void (*prefill_kernel)(const attn_params);

template <uint WARPS, bool DELTA> static prefill_kernel kernel_of(uint k_width, uint v_width) {
    return k_width == 128 && v_width == 128 ? kv_prefill<WARPS, 128, 16, DELTA>
           : k_width == 64 && v_width <= 64 ? kv_prefill<WARPS, 64, 8, DELTA>
                                            : kv_prefill<WARPS, 0, 16, DELTA>;
}

static prefill_kernel kernel_of(uint warps, bool is_delta, uint k_width, uint v_width) {
    return warps == 8 ? (is_delta ? kernel_of<8, true>(k_width, v_width) : kernel_of<8, false>(k_width, v_width))
                      : (is_delta ? kernel_of<4, true>(k_width, v_width) : kernel_of<4, false>(k_width, v_width));
}

static uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

}  // namespace

bool plan_prefill(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_split & plan) {
    const uint k_width = width_of(op.k_kind, op.k_size), v_width = width_of(op.v_kind, op.v_size);
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens;
    if (k_width > MOST_WIDTH || v_width > MOST_WIDTH || rows < 48) {
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
        plan.shared_limit = device.shared_bytes;
        plan.row_blocks  = (int) warps;
        plan.chunk_cells = divided(divided(op.args.cells, chunks ? chunks : 1), CELLS)*CELLS;
        plan.chunks      = divided(op.args.cells, plan.chunk_cells);
        return true;
    }
    return false;
}

cudaError_t launch_prefill(const attn_params & p, const kv_cuda_split & plan, cudaStream_t stream) {
    const uint rows = p.args.heads/p.args.kv_heads*p.args.tokens, warps = (uint) plan.row_blocks;
    const uint k_width = width_of(p.k_kind, p.k_size), v_width = width_of(p.v_kind, p.v_size);
    const prefill_kernel kernel = kernel_of(warps, KV_KIND_IS_DELTA(p.k_kind), k_width, v_width);
    const cudaError_t err = allow_shared(kernel, plan);
    if (err != cudaSuccess) {
        return err;
    }
    const dim3 grid(divided(rows, 16*warps), plan.chunks, p.args.kv_heads*p.args.streams);
    kernel<<<grid, 32*warps, plan.shared_bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv
