// Attention of many query rows over a cache that was expanded to halves (../kv_expand.cu), with the products of warpgroups: prompts
// on Hopper.
//
// A block has 128 query rows of a KV head (its heads side by side, token by token) and a share of the cells. One thread asks for tiles
// of keys and values, two warpgroups of 64 rows each work on them. While the values of a tile are multiplied with their weights,
// the scores of the next tile become weights.
//
// Tiles of the mask that are all zero are not read again, and cells that it hides from all rows of a block are not read at
// all: kv_prompt_classes says which.

#include "kv_prompt.cuh"

#include "../bulk_copy.cuh"
#include "wgmma.cuh"

namespace kv {
namespace {

constexpr uint GROUP_THREADS = 128, GROUPS = PROMPT_ROWS/64, THREADS = GROUP_THREADS*(1 + GROUPS), STAGES = 2;
constexpr uint CLASS_WARPS = 8;

// What a block knows of a tile of the mask.
constexpr uint8_t NOT_SEEN = 0, MIXED = 1, OPEN = 2;
constexpr uint MIXED_TILE = 0x8000, MOST_TILES = 0x2000; // of a block's list

// A warp looks at the mask of a tile, of all tokens that a block has. Where it can, a lane takes units of 16 bytes, of every n-th token.
__global__ void __launch_bounds__(32*CLASS_WARPS) kv_prompt_classes(const KV_IN_PLACE prompt_params p) {
    const kv_attn_args & args = p.attn.args;
    const uint lane = threadIdx.x % 32, tile = blockIdx.x*CLASS_WARPS + threadIdx.x/32, row_tile = blockIdx.y, stream = blockIdx.z;
    if (tile >= p.tiles) {
        return;
    }
    const uint group = args.heads/args.kv_heads, first = row_tile*PROMPT_ROWS/group;
    const uint end = ::min((row_tile*PROMPT_ROWS + PROMPT_ROWS - 1)/group + 1, args.tokens);
    const uint begin = tile*p.tile_cells, cells = ::min(p.tile_cells, args.cells - begin);
    uint any = 0, seen = 0; // bits of the mask, and of what is not -inf
    const auto look = [&](uint bits) {
        any  |= bits;
        seen |= bits ^ HIDDEN_MASK*0x10001u;
    };
    const uint8_t * mask = p.attn.mask + mask_offset(p.attn, 0, 0, stream) + 2*begin;
    if (cells == p.tile_cells && (((uintptr_t) mask | args.mask_nb[0]) & 15) == 0) {
        const uint units = cells/8, step = 32/units;
#pragma unroll 8
        for (uint token = first + lane/units; token < end; token += step) {
            const uint4 bits = *(const uint4 *) (mask + token*args.mask_nb[0] + lane % units*16);
            look(bits.x);
            look(bits.y);
            look(bits.z);
            look(bits.w);
        }
    } else {
        for (uint token = first; token < end; ++token) {
            for (uint cell = lane; cell < cells; cell += 32) {
                look(*(const unsigned short *) (mask + token*args.mask_nb[0] + 2*cell)*0x10001u);
            }
        }
    }
    any  = __reduce_or_sync(0xffffffff, any);
    seen = __reduce_or_sync(0xffffffff, seen);
    if (lane == 0) {
        p.classes[((size_t) stream*p.row_tiles + row_tile)*p.tiles + tile] = seen == 0 ? NOT_SEEN : any != 0 || cells < p.tile_cells ? MIXED : OPEN;
    }
}

// Shared memory of a block; tiles begin at multiples of 1024 bytes.
template <uint D> struct layout {
    static constexpr uint CELLS = prompt_cells(D), TILE = CELLS*D*2, QUERIES = 0, KEYS = PROMPT_ROWS*D*2, VALUES = KEYS + STAGES*TILE;
    static constexpr uint LIST = VALUES + STAGES*TILE, COUNT = LIST + 2*MOST_TILES, BARS = COUNT + 8, END = BARS + 8*(1 + 4*STAGES);
    static constexpr uint BYTES = END + 1024; // wherever it begins
};

// The softmax of a thread's two rows.
struct rows_softmax {
    float top[2], sum[2];
    bool  changed;
    float factor[2];

    // Scores to weights; what was summed up before is to be multiplied by `factor`, if that is not one for all rows of the warp.
    template <uint N> __device__ __forceinline__ void weigh(float (&s)[N]) {
        float most[2] = { s[0], s[2] };
#pragma unroll
        for (uint i = 0; i < N; i += 4) {
            most[0] = fmaxf(most[0], fmaxf(s[i], s[i + 1]));
            most[1] = fmaxf(most[1], fmaxf(s[i + 2], s[i + 3]));
        }
        float less[2];
        bool mine = false;
#pragma unroll
        for (uint r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffff, most[r], 2));
            most[r] = fmaxf(most[r], top[r]);
            mine = mine || most[r] > top[r];
            factor[r] = exp2f((top[r] - most[r])*LOG2_E);
            top[r] = most[r];
            less[r] = most[r]*LOG2_E;
            sum[r] *= factor[r];
        }
        changed = __any_sync(0xffffffff, mine);
#pragma unroll
        for (uint i = 0; i < N; ++i) {
            const uint r = i/2 % 2;
            s[i] = exp2f(fmaf(s[i], LOG2_E, -less[r]));
            sum[r] += s[i];
        }
    }
};

__device__ __forceinline__ uint half_pair(float a, float b) {
    const __half2 two = __floats2half2_rn(a, b);
    return *(const uint *) &two;
}

template <uint D> __global__ void __launch_bounds__(THREADS, 1) kv_prompt(const KV_IN_PLACE prompt_params p) {
#if KV_HAS_WGMMA
    using at = layout<D>;
    constexpr uint CELLS = at::CELLS, SLAB = D < 128 ? D : 128, SLABS = D/SLAB;
    extern __shared__ uint8_t memory[];
    uint8_t * shared = memory + (1024 - (shared_address(memory) & 1023)) % 1024;
    const uint base = shared_address(shared), q_there = base + at::BARS, k_there = q_there + 8, k_free = k_there + 8*STAGES;
    const uint v_there = k_free + 8*STAGES, v_free = v_there + 8*STAGES;
    unsigned short * list = (unsigned short *) (shared + at::LIST);
    uint * count = (uint *) (shared + at::COUNT);

    const kv_attn_args & args = p.attn.args;
    const uint row_tile = p.row_tiles - 1 - blockIdx.x, kv_head = blockIdx.y % args.kv_heads, share = blockIdx.y/args.kv_heads, stream = blockIdx.z;
    const uint first_tile = share*p.share_tiles, last_tile = ::min(first_tile + p.share_tiles, p.tiles);
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32;

    if (warp == 0) {
        const uint8_t * classes = p.attn.mask ? p.classes + ((size_t) stream*p.row_tiles + row_tile)*p.tiles : nullptr;
        uint n = 0;
        for (uint first = first_tile; first < last_tile; first += 32) {
            const uint tile = first + lane;
            const uint of = tile >= last_tile ? NOT_SEEN : classes ? classes[tile] : (tile + 1)*CELLS > args.cells ? MIXED : OPEN;
            const uint seen = __ballot_sync(0xffffffff, of != NOT_SEEN);
            if (of != NOT_SEEN) {
                list[n + __popc(seen & ((1u << lane) - 1))] = (unsigned short) ((tile - first_tile) | (of == MIXED ? MIXED_TILE : 0));
            }
            n += __popc(seen);
        }
        if (lane == 0) {
            *count = n;
            begin_barrier(q_there, 1);
            for (uint i = 0; i < STAGES; ++i) {
                begin_barrier(k_there + 8*i, 1);
                begin_barrier(v_there + 8*i, 1);
                begin_barrier(k_free + 8*i, GROUPS);
                begin_barrier(v_free + 8*i, GROUPS);
            }
            announce_barriers();
        }
    }
    __syncthreads();
    const uint tiles = *count;

    if (warp < 4) {
        leave_registers<24>();
        // A block without tiles asks for nothing: nobody would wait for it, and a copy must not outlive its block.
        if (threadIdx.x == 0 && tiles > 0) {
            const uint kv_stream = stream/(args.streams/args.kv_streams);
            const size_t of_head = ((size_t) kv_stream*args.kv_heads + kv_head)*p.tiles*at::TILE;
            const uint8_t * keys = (const uint8_t *) p.keys + of_head, * values = (const uint8_t *) p.values + of_head;
            const uint8_t * queries = (const uint8_t *) p.queries + (((size_t) stream*args.kv_heads + kv_head)*p.row_tiles + row_tile)*(PROMPT_ROWS*D*2);
            ask_for<false>(shared + at::QUERIES, queries, PROMPT_ROWS*D*2, q_there);
            for (uint i = 0; i < tiles; ++i) {
                const uint stage = i % STAGES, parity = i/STAGES & 1;
                const size_t from = (size_t) (first_tile + (list[i] & (MIXED_TILE - 1)))*at::TILE;
                await(k_free + 8*stage, parity ^ 1);
                ask_for<false>(shared + at::KEYS + stage*at::TILE, keys + from, at::TILE, k_there + 8*stage);
                await(v_free + 8*stage, parity ^ 1);
                ask_for<false>(shared + at::VALUES + stage*at::TILE, values + from, at::TILE, v_there + 8*stage);
            }
        }
        return;
    }
    take_registers<240>();
    const uint wg = warp/4 - 1, t = lane % 4, group = args.heads/args.kv_heads;
    const uint row = row_tile*PROMPT_ROWS + wg*64 + warp % 4*16 + lane/4; // and 8 behind it
    uint head[2], token[2], mask_at[2];
    float slope[2];
#pragma unroll
    for (uint r = 0; r < 2; ++r) {
        const uint of = ::min(row + 8*r, args.tokens*group - 1); // a row of none is as the last
        token[r]   = of/group;
        head[r]    = kv_head*group + of % group;
        mask_at[r] = mask_offset(p.attn, token[r], head[r], stream);
        slope[r]   = slope_of(p.attn, head[r]);
    }
    float o[SLABS][SLAB/2], s[CELLS/2];
    uint weights[CELLS/16][4];
#pragma unroll
    for (uint i = 0; i < SLABS; ++i) {
#pragma unroll
        for (uint j = 0; j < SLAB/2; ++j) {
            o[i][j] = 0.0f;
        }
    }
    rows_softmax rows = { { HIDDEN, HIDDEN }, { 0.0f, 0.0f } };

    const auto ask_scores = [&](uint stage) {
        const uint64_t q = operand_at(base + at::QUERIES + wg*64*128, 16), k = operand_at(base + at::KEYS + stage*at::TILE, 16);
        pin(s);
        begin_products();
#pragma unroll
        for (uint i = 0; i < D; i += 16) {
            const uint in_panel = i % 64*2 >> 4;
            multiply_shared(s, q + (i/64*(PROMPT_ROWS*128) >> 4) + in_panel, k + (i/64*(CELLS*128) >> 4) + in_panel, i != 0);
        }
        end_group();
        pin(s);
    };
    const auto ask_sums = [&](uint stage) {
        const uint64_t v = operand_at(base + at::VALUES + stage*at::TILE, CELLS*128);
#pragma unroll
        for (uint i = 0; i < SLABS; ++i) {
            pin(o[i]);
        }
        begin_products();
#pragma unroll
        for (uint j = 0; j < CELLS/16; ++j) {
#pragma unroll
            for (uint i = 0; i < SLABS; ++i) {
                multiply_registers(o[i], weights[j], v + (i*(SLAB/64)*(CELLS*128) >> 4) + (j*2048 >> 4));
            }
        }
        end_group();
#pragma unroll
        for (uint i = 0; i < SLABS; ++i) {
            pin(o[i]);
        }
    };
    // Scores of a tile to weights, as floats.
    const auto weigh = [&](uint entry) {
        if (args.softcap != 0.0f) {
#pragma unroll
            for (uint i = 0; i < CELLS/2; ++i) {
                s[i] = soft_capped(s[i], args.softcap);
            }
        }
        if (entry & MIXED_TILE) {
            const uint first = (first_tile + (entry & (MIXED_TILE - 1)))*CELLS + 2*t;
#pragma unroll
            for (uint i = 0; i < CELLS/2; ++i) {
                const uint r = i/2 % 2, cell = first + i/4*8 + i % 2;
                s[i] = cell < args.cells ? fmaf(slope[r], mask_value(mask_bits(p.attn, mask_at[r], cell)), s[i]) : -INFINITY;
            }
        }
        rows.weigh(s);
    };
    const auto keep_weights = [&]() {
#pragma unroll
        for (uint j = 0; j < CELLS/16; ++j) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                weights[j][i] = half_pair(s[8*j + 2*i], s[8*j + 2*i + 1]);
            }
        }
    };
    const auto let_go = [&](uint bar) {
        if (threadIdx.x % GROUP_THREADS == 0) {
            arrive(bar);
        }
    };

    if (tiles > 0) {
        await(q_there, 0);
        await(k_there, 0);
        ask_scores(0);
        await_groups<0>();
        pin(s);
        let_go(k_free);
        weigh(list[0]);
        keep_weights();
        for (uint i = 1; i < tiles; ++i) {
            const uint stage = i % STAGES, before = (i - 1) % STAGES;
            await(k_there + 8*stage, i/STAGES & 1);
            ask_scores(stage);
            await(v_there + 8*before, (i - 1)/STAGES & 1);
            ask_sums(before);
            await_groups<1>();
            pin(s);
            let_go(k_free + 8*stage);
            weigh(list[i]);
            await_groups<0>();
#pragma unroll
            for (uint j = 0; j < SLABS; ++j) {
                pin(o[j]);
            }
            let_go(v_free + 8*before);
            if (rows.changed) {
#pragma unroll
                for (uint j = 0; j < SLABS; ++j) {
#pragma unroll
                    for (uint n = 0; n < SLAB/2; ++n) {
                        o[j][n] *= rows.factor[n/2 % 2];
                    }
                }
            }
            keep_weights();
        }
        const uint before = (tiles - 1) % STAGES;
        await(v_there + 8*before, (tiles - 1)/STAGES & 1);
        ask_sums(before);
        await_groups<0>();
#pragma unroll
        for (uint j = 0; j < SLABS; ++j) {
            pin(o[j]);
        }
    }
#pragma unroll
    for (uint r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(0xffffffff, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(0xffffffff, rows.sum[r], 2);
        if (row + 8*r >= args.tokens*group) {
            continue;
        }
        const size_t result = (((size_t) stream*args.tokens + token[r])*args.heads + head[r])*args.chunks + share;
        if (t == 0) {
            p.attn.metas[result] = make_float2(rows.top[r], rows.sum[r]);
        }
#pragma unroll
        for (uint j = 0; j < SLABS; ++j) {
#pragma unroll
            for (uint n = 0; n < SLAB/8; ++n) {
                *(::float2 *) (p.attn.sums + result*D + j*SLAB + 8*n + 2*t) = make_float2(o[j][4*n + 2*r], o[j][4*n + 2*r + 1]);
            }
        }
    }
#endif
}

template <uint D> cudaError_t launch(const prompt_params & p, cudaStream_t stream) {
    const kv_attn_args & args = p.attn.args;
    const cudaError_t err = cudaFuncSetAttribute(kv_prompt<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) layout<D>::BYTES);
    if (err != cudaSuccess) {
        return err;
    }
    kv_prompt<D><<<dim3(p.row_tiles, args.kv_heads*args.chunks, args.streams), THREADS, layout<D>::BYTES, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace

uint prompt_most_tiles() {
    return MOST_TILES;
}

size_t prompt_shared_bytes(uint width) {
    return width == 64 ? layout<64>::BYTES : width == 128 ? layout<128>::BYTES : layout<256>::BYTES;
}

cudaError_t launch_prompt_classes(const prompt_params & p, cudaStream_t stream) {
    kv_prompt_classes<<<dim3((p.tiles + CLASS_WARPS - 1)/CLASS_WARPS, p.row_tiles, p.attn.args.streams), 32*CLASS_WARPS, 0, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_prompt(const prompt_params & p, uint width, cudaStream_t stream) {
    return width == 64 ? launch<64>(p, stream) : width == 128 ? launch<128>(p, stream) : launch<256>(p, stream);
}

}  // namespace kv
