// Attention with tiles: any K with any V, few query rows or many.
//
// A block of four warps takes one KV head, 16 * MB query rows (token by token, the heads of the KV head side by side) and a
// chunk of cells, 64 at a time:
//
//     S = Q' K^T        a slab of 128 values of 64 rows of K is unpacked into shared memory as halves; each warp multiplies 16
//                       of the cells. Halves hold what is exact in them, levels and not values: the scale of a cell's 16
//                       values multiplies the product, in floats. Queries are two halves a value.
//     softmax           a warp for a row, two cells a lane
//     O' = D O' + P V   a slab of V the same way, but as values; each warp has 32 columns of each slab
//
// Rows travel to shared memory as they are stored while other work is done, V's while scores are computed, the next tile's K
// while V is added; where shared memory is too small for that they are read where they lie. Tiles that no row sees are skipped
// before they are read. Rows of V that nobody sees may hold anything: they are zero.
//
// delta and bands: a tile is a group. Its I-frame is one more row of K, so that q.m is one more product; the recursion runs over the
// rows of S, two cells a lane.

#include "attention.cuh"
#include "mma.cuh"
#include "tile.cuh"

namespace kv {
namespace {

using namespace metal;

constexpr uint WARPS = 4, THREADS = 32*WARPS;
constexpr uint S_STEP = K_ROWS + 2, P_STEP = CELLS + 8;

// Shared memory, in the order of its parts.
struct tile_memory {
    __half * high, * low; // [row][query_step]
    __half * tile;        // [cell][TILE_STEP]
    __half * weights;     // [row][P_STEP]
    float *  scales;      // [SCALES][cell]
    float *  s;           // [row][S_STEP]
    float *  softs;       // [row][2]: largest, sum
    float *  factors;     // [row]
    float *  query_scale; // [row]
    float *  slopes;      // [row]
    uint *   masks;       // [row]: where its mask begins
    float *  k_levels, * v_levels; // [KV_LEVELS], [KV_V_LEVELS]
    uint *   live;        // [2]: cells that somebody sees, a bit each; then two words of hidden cells
    uint *   k_pairs, * v_pairs;   // [256]: two levels of 4 bits as halves, of V by the unit of scales
    uint8_t * k_raw, * v_raw;      // [cell][raw_step]: rows as they are stored
};

__host__ __device__ constexpr size_t tile_bytes(uint rows, uint k_width) {
    return 2*sizeof(__half)*rows*(k_width + 8) + sizeof(__half)*(K_ROWS*TILE_STEP + rows*P_STEP) +
           sizeof(float)*(K_ROWS*SCALES + rows*S_STEP + 6*rows + KV_LEVELS + KV_V_LEVELS + 4 + 2*256);
}

__device__ __forceinline__ tile_memory carve(uint8_t * memory, uint rows, uint k_width, uint k_raw_bytes) {
    tile_memory m;
    m.high        = (__half *) memory;
    m.low         = m.high + rows*(k_width + 8);
    m.tile        = m.low + rows*(k_width + 8);
    m.weights     = m.tile + K_ROWS*TILE_STEP;
    m.scales      = (float *) (m.weights + rows*P_STEP);
    m.s           = m.scales + K_ROWS*SCALES;
    m.softs       = m.s + rows*S_STEP;
    m.factors     = m.softs + 2*rows;
    m.query_scale = m.factors + rows;
    m.slopes      = m.query_scale + rows;
    m.masks       = (uint *) (m.slopes + rows);
    m.k_levels    = (float *) (m.masks + rows);
    m.v_levels    = m.k_levels + KV_LEVELS;
    m.live        = (uint *) (m.v_levels + KV_V_LEVELS);
    m.k_pairs     = m.live + 4;
    m.v_pairs     = m.k_pairs + 256;
    m.k_raw       = (uint8_t *) (m.v_pairs + 256);
    m.v_raw       = m.k_raw + k_raw_bytes;
    return m;
}

// The I-frame of a group as one more row of K.
__device__ __forceinline__ void unpack_frame(
        const uint8_t * group, uint64_t step, uint kind, uint size, uint rows, uint first, uint width, __half * tile, float * scales) {
    for (uint i = threadIdx.x; i < width; i += THREADS) {
        tile[FRAME*TILE_STEP + i] = __float2half_rn(kv_delta_frame(group, step, kind, size, rows, first + i));
    }
    if (threadIdx.x < SCALES) {
        scales[threadIdx.x*K_ROWS + FRAME] = 1.0f;
    }
}

template <int MB, int NS> __global__ void __launch_bounds__(THREADS) kv_tile(const attn_params p, bool staged) {
    extern __shared__ __align__(16) uint8_t memory[];
    constexpr uint ROWS = 16*MB;
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    const uint k_width = kv_width(p.k_kind, p.k_size), v_width = kv_width(p.v_kind, p.v_size), query_step = k_width + 8;
    const uint k_raw_step = raw_step_of(p.k_bytes), v_raw_step = raw_step_of(p.v_bytes);
    const uint k_bytes = p.k_bytes, v_bytes = p.v_bytes;
    const tile_memory m = carve(memory, ROWS, k_width, staged ? CELLS*k_raw_step : 0);
    const kv_attn_args & args = p.args;
    const bool is_delta = KV_KIND_IS_DELTA(p.k_kind);
    const uint heads_per_kv = args.heads/args.kv_heads, all_rows = heads_per_kv*args.tokens;
    const uint first_row = blockIdx.x*ROWS, used = min(ROWS, all_rows - first_row), chunk = blockIdx.y;
    const uint kv_head = blockIdx.z % args.kv_heads, stream = blockIdx.z/args.kv_heads;
    const uint kv_stream = stream/(args.streams/args.kv_streams);
    const uint8_t * keys   = p.k + kv_head*args.k_nb[1] + kv_stream*args.k_nb[2];
    const uint8_t * values = p.v + kv_head*args.v_nb[1] + kv_stream*args.v_nb[2];
    const row_units k_units = units_of(keys, args.k_nb[0]), v_units = units_of(values, args.v_nb[0]);
    const uint * hidden = hidden_of(p, kv_stream);

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
        m.softs[2*r]     = HIDDEN;
        m.softs[2*r + 1] = 0.0f;
        m.factors[r]     = 1.0f;
        m.query_scale[r] = r < used ? p.query_scale[query_row + r] : 0.0f;
        const uint row = first_row + min(r, used - 1), head = kv_head*heads_per_kv + row % heads_per_kv;
        m.slopes[r]      = slope_of(p, head);
        m.masks[r]       = mask_offset(p, row/heads_per_kv, head, stream);
    }
    for (uint i = threadIdx.x; i < 8*TILE_STEP; i += THREADS) {
        m.tile[FRAME*TILE_STEP + i] = __ushort_as_half(0);
    }
    for (uint i = threadIdx.x; i < 8*SCALES; i += THREADS) {
        m.scales[i/8*K_ROWS + FRAME + i % 8] = 0.0f;
    }

    __syncthreads();

    float acc[MB][NS][4][4];
#pragma unroll
    for (int i = 0; i < MB*NS*16; ++i) {
        (&acc[0][0][0][0])[i] = 0.0f;
    }
    const uint end = min(args.cells, (chunk + 1)*args.chunk_cells);

    const uint2 range = hidden ? hidden_range(hidden, chunk*args.chunk_cells, end, m.live + 2) : make_uint2(~0u, 0);
    // The first tile from `cell` on that a row sees; a barrier for all.
    const auto visible_from = [&](uint cell) {
        for (; cell < end; cell += CELLS) {
            const bool look = cell + CELLS > range.x && cell < range.y;
            const uint gone[2] = { look ? hidden[cell/32] : 0, look ? hidden[cell/32 + 1] : 0 };
            bool any = !p.mask && (gone[0] & gone[1]) != ~0u;
            // Heads of a token share a mask, mostly: the row of its first head stands for all.
            const uint step = args.mask_rows[0] == 1 ? heads_per_kv : 1;
            for (uint r = args.mask_rows[0] == 1 ? warp*step : warp; r < used + step - 1 && !any; r += WARPS*step) {
                const uint at = m.masks[min(r, used - 1)];
                any = (bias_at(p, at, cell + lane, end) > HIDDEN && (gone[0] >> lane & 1) == 0) || (bias_at(p, at, cell + 32 + lane, end) > HIDDEN && (gone[1] >> lane & 1) == 0);
            }
            if (__syncthreads_or(any)) {
                break;
            }
        }
        return cell;
    };
    // An I-frame also lies in rows that are not looked at.
    const auto k_count = [&](uint cell) { return min(CELLS, (is_delta ? args.k_cells : end) - cell); };
    const auto stage_k = [&](uint cell) {
        if (staged && cell < end) {
            stage(keys + cell*args.k_nb[0], args.k_nb[0], k_units, k_bytes, k_count(cell), k_raw_step, m.k_raw);
        }
        commit_staged();
    };

    uint next = visible_from(chunk*args.chunk_cells);
    stage_k(next);
    while (next < end) {
        const uint cell = next, count = min(CELLS, end - cell);
        const uint8_t * k_rows = staged ? m.k_raw + k_units.shift : keys + cell*args.k_nb[0];
        const uint8_t * v_rows = staged ? m.v_raw + v_units.shift : values + cell*args.v_nb[0];
        const uint64_t k_step = staged ? k_raw_step : args.k_nb[0], v_step = staged ? v_raw_step : args.v_nb[0];
        if (staged) {
            stage(values + cell*args.v_nb[0], args.v_nb[0], v_units, v_bytes, count, v_raw_step, m.v_raw);
        }
        commit_staged();
        // Masks are asked for early, too.
        float bias[4*MB][2];
#pragma unroll
        for (uint n = 0; n < 4*MB; ++n) {
            const uint at = m.masks[min(warp + 4*n, used - 1)];
            bias[n][0] = bias_at(p, at, cell + lane, end);
            bias[n][1] = bias_at(p, at, cell + 32 + lane, end);
        }
        if (cell + CELLS > range.x && cell < range.y) {
            const bool gone[2] = { (hidden[cell/32] >> lane & 1) != 0, (hidden[cell/32 + 1] >> lane & 1) != 0 };
#pragma unroll
            for (uint n = 0; n < 8*MB; ++n) {
                bias[n/2][n % 2] = gone[n % 2] ? -INFINITY : bias[n/2][n % 2];
            }
        }
        next = visible_from(cell + CELLS);
        wait_staged();
        // Also the end of the tile before.
        __syncthreads();
        if (threadIdx.x < 2) {
            m.live[threadIdx.x] = 0;
        }

        float scores[MB][2][4], frame[4];
#pragma unroll
        for (int i = 0; i < MB*8; ++i) {
            (&scores[0][0][0])[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            frame[i] = 0.0f;
        }
        for (uint first = 0; first < k_width; first += SLAB) {
            const uint width = min(SLAB, k_width - first);
            if (first > 0) {
                __syncthreads();
            }
            if (staged && is_4_bit(p.k_kind, p.k_size)) {
                unpack_4_bit<false>(k_rows, k_raw_step, p.k_size, first, width, count, nullptr, m.k_pairs, m.tile, m.scales);
            } else {
                unpack<false>(k_rows, k_step, p.k_kind, p.k_size, first, width, count, nullptr, m.k_levels, m.tile, m.scales);
            }
            if (is_delta) {
                unpack_frame(k_rows, k_step, p.k_kind, p.k_size, k_count(cell), first, width, m.tile, m.scales);
            }
            __syncthreads();
            for (uint i = 0; i < width; i += 16) {
                uint32_t b[4], bf[4];
                load_matrices(b, m.tile + (warp*16 + lane/16*8 + lane % 8)*TILE_STEP + i + lane/8 % 2*8);
                const float * sc = m.scales + i/16*K_ROWS + warp*16 + 2*t;
                const float s0 = sc[0], s1 = sc[1], s2 = sc[8], s3 = sc[9];
                if (is_delta) {
                    load_matrices(bf, m.tile + (FRAME + lane % 8)*TILE_STEP + i + lane/8 % 2*8);
                }
#pragma unroll
                for (int mb = 0; mb < MB; ++mb) {
                    uint32_t high[4], low[4];
                    const uint at = (mb*16 + lane % 16)*query_step + first + i + lane/16*8;
                    load_matrices(high, m.high + at);
                    load_matrices(low, m.low + at);
                    float x[4] = {}, y[4] = {};
                    mma_f16(x, high, b[0], b[1]);
                    mma_f16(y, high, b[2], b[3]);
                    mma_f16(x, low, b[0], b[1]);
                    mma_f16(y, low, b[2], b[3]);
                    scores[mb][0][0] = fmaf(s0, x[0], scores[mb][0][0]);
                    scores[mb][0][1] = fmaf(s1, x[1], scores[mb][0][1]);
                    scores[mb][0][2] = fmaf(s0, x[2], scores[mb][0][2]);
                    scores[mb][0][3] = fmaf(s1, x[3], scores[mb][0][3]);
                    scores[mb][1][0] = fmaf(s2, y[0], scores[mb][1][0]);
                    scores[mb][1][1] = fmaf(s3, y[1], scores[mb][1][1]);
                    scores[mb][1][2] = fmaf(s2, y[2], scores[mb][1][2]);
                    scores[mb][1][3] = fmaf(s3, y[3], scores[mb][1][3]);
                    if (is_delta && mb == (int) warp) {
                        mma_f16(frame, high, bf[0], bf[1]);
                        mma_f16(frame, low, bf[0], bf[1]);
                    }
                }
            }
        }
#pragma unroll
        for (int mb = 0; mb < MB; ++mb) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float * to = m.s + (mb*16 + g)*S_STEP + warp*16 + n*8 + 2*t;
                *(float2 *) to = make_float2(scores[mb][n][0], scores[mb][n][1]);
                *(float2 *) (to + 8*S_STEP) = make_float2(scores[mb][n][2], scores[mb][n][3]);
            }
        }
        if (is_delta && warp < MB && t == 0) {
            m.s[(warp*16 + g)*S_STEP + FRAME] = frame[0];
            m.s[(warp*16 + g + 8)*S_STEP + FRAME] = frame[2];
        }
        __syncthreads();

        kv_delta_chain chain[2];
        if (is_delta) {
            const uint8_t * row = k_rows + lane*k_step;
            const uint kind0 = lane < count ? kv_delta_kind(row, p.k_kind, p.k_size) : KV_DELTA_EMPTY;
            const uint kind1 = lane + 32 < count ? kv_delta_kind(row + 32*k_step, p.k_kind, p.k_size) : KV_DELTA_EMPTY;
            chain[0] = kv_delta_chain_of(kind0, true, false, lane);
            chain[1] = kv_delta_chain_of(kind1, false, simd_broadcast((uint) !chain[0].empty, 31) != 0, lane);
        }
        if (is_delta) {
            __syncthreads(); // the kinds have been read
        }
        stage_k(next);
        uint seen[2] = { 0, 0 };
#pragma unroll
        for (uint turn = 0; turn < 4*MB; ++turn) {
            const uint r = warp + 4*turn;
            if (r >= used) {
                break;
            }
            const float slope = m.slopes[r], query_scale = m.query_scale[r];
            float product[2], score[2];
            for (uint n = 0; n < 2; ++n) {
                product[n] = m.s[r*S_STEP + 32*n + lane]*query_scale;
            }
            if (is_delta) {
                const float base = m.s[r*S_STEP + FRAME]*query_scale;
                const float w0 = kv_delta_follow(chain[0], product[0], base, 0.0f);
                const float w1 = kv_delta_follow(chain[1], product[1], base, simd_broadcast(w0, 31));
                product[0] = chain[0].empty ? 0.0f : w0 + base;
                product[1] = chain[1].empty ? 0.0f : w1 + base;
            }
            for (uint n = 0; n < 2; ++n) {
                const float x = product[n]*args.scale;
                // A key that is hidden may hold anything.
                const float capped = args.softcap != 0.0f ? soft_capped(x, args.softcap) : x;
                score[n] = bias[turn][n] == -INFINITY ? -INFINITY : fmaf(slope, bias[turn][n], capped);
            }
            const float before = m.softs[2*r], largest = fmaxf(before, simd_max(fmaxf(score[0], score[1])));
            const float factor = rescale(before, largest);
            float sum = 0.0f;
            for (uint n = 0; n < 2; ++n) {
                const __half weight = __float2half_rn(__expf(score[n] - largest));
                m.weights[r*P_STEP + 32*n + lane] = weight;
                sum += __half2float(weight);
                seen[n] |= __ballot_sync(KV_ALL_LANES, __half2float(weight) != 0.0f);
            }
            sum = simd_sum(sum);
            if (lane == 0) {
                m.softs[2*r]     = largest;
                m.softs[2*r + 1] = fmaf(m.softs[2*r + 1], factor, sum);
                m.factors[r]     = factor;
            }
        }
        for (uint r = used + warp; r < ROWS; r += WARPS) {
            m.weights[r*P_STEP + lane] = m.weights[r*P_STEP + 32 + lane] = __ushort_as_half(0);
        }
        if (lane < 2) {
            atomicOr(&m.live[lane], lane == 0 ? seen[0] : seen[1]);
        }
        wait_staged();
        __syncthreads();

#pragma unroll
        for (int mb = 0; mb < MB; ++mb) {
            const float f0 = m.factors[mb*16 + g], f1 = m.factors[mb*16 + g + 8];
#pragma unroll
            for (int i = 0; i < NS*4; ++i) {
                float (&d)[4] = acc[mb][i/4][i % 4];
                d[0] *= f0;
                d[1] *= f0;
                d[2] *= f1;
                d[3] *= f1;
            }
        }
#pragma unroll
        for (int slab = 0; slab < NS; ++slab) {
            const uint first = slab*SLAB;
            if (first >= v_width) {
                break;
            }
            const uint width = min(SLAB, v_width - first);
            if (slab > 0) {
                __syncthreads();
            }
            if (staged && is_4_bit(p.v_kind, p.v_size)) {
                unpack_4_bit<true>(v_rows, v_raw_step, p.v_size, first, width, count, m.live, m.v_pairs, m.tile, nullptr);
            } else {
                unpack<true>(v_rows, v_step, p.v_kind, p.v_size, first, width, count, m.live, m.v_levels, m.tile, nullptr);
            }
            __syncthreads();
            if (warp*32 >= width) {
                continue;
            }
#pragma unroll
            for (uint i = 0; i < CELLS; i += 16) {
                uint32_t b[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    load_matrices_transposed(b[n], m.tile + (i + lane/8 % 2*8 + lane % 8)*TILE_STEP + warp*32 + n*16 + lane/16*8);
                }
#pragma unroll
                for (int mb = 0; mb < MB; ++mb) {
                    uint32_t a[4];
                    load_matrices(a, m.weights + (mb*16 + lane % 16)*P_STEP + i + lane/16*8);
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        mma_f16(acc[mb][slab][n], a, b[n/2][n % 2*2], b[n/2][n % 2*2 + 1]);
                    }
                }
            }
        }
    }
    __syncthreads();

    const uint results = (stream*args.tokens)*args.heads + kv_head*heads_per_kv;
    const float unit = value_unit(p.v_kind);
#pragma unroll
    for (int mb = 0; mb < MB; ++mb) {
#pragma unroll
        for (int half_of = 0; half_of < 2; ++half_of) {
            const uint r = mb*16 + g + 8*half_of, row = first_row + r;
            if (r >= used) {
                continue;
            }
            const size_t at = (size_t) (results + row/heads_per_kv*args.heads + row % heads_per_kv)*args.chunks + args.first_chunk + chunk;
            if (warp == 0 && t == 0) {
                p.metas[at] = make_float2(m.softs[2*r], m.softs[2*r + 1]);
            }
#pragma unroll
            for (int i = 0; i < NS*4; ++i) {
                const uint column = i/4*SLAB + warp*32 + i % 4*8 + 2*t;
                if (column < v_width) {
                    *(float2 *) (p.sums + at*args.sum_width + column) =
                        make_float2(acc[mb][i/4][i % 4][2*half_of]*unit, acc[mb][i/4][i % 4][2*half_of + 1]*unit);
                }
            }
        }
    }
}

typedef void (*tile_kernel)(const attn_params, bool);

// Blocks of rows, and slabs of V; in the order of what is tried.
struct tile_instance {
    int         row_blocks, slabs;
    tile_kernel kernel;
};

const tile_instance INSTANCES[] = {
    { 4, 1, kv_tile<4, 1> }, { 2, 2, kv_tile<2, 2> }, { 1, 1, kv_tile<1, 1> },
    { 1, 2, kv_tile<1, 2> }, { 1, 5, kv_tile<1, 5> }, { 1, 9, kv_tile<1, 9> },
};

static uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

}  // namespace

void plan_tile(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_split & plan) {
    const uint k_width = width_of(op.k_kind, op.k_size), v_width = width_of(op.v_kind, op.v_size);
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens;
    for (const tile_instance & i : INSTANCES) {
        plan.row_blocks   = i.row_blocks;
        plan.slabs        = i.slabs;
        plan.shared_bytes = tile_bytes(16*i.row_blocks, k_width);
        if ((uint) i.slabs*SLAB >= v_width && (i.row_blocks == 1 || rows > 16) && plan.shared_bytes <= device.shared_bytes) {
            break;
        }
    }
    const size_t raw = CELLS*(raw_step_of(op.k_bytes) + raw_step_of(op.v_bytes));
    plan.shared_limit = device.shared_bytes;
    plan.staged = plan.shared_bytes + raw <= device.shared_bytes;
    plan.shared_bytes += plan.staged ? raw : 0;
    const uint blocks = divided(rows, 16*plan.row_blocks)*op.args.kv_heads*op.args.streams;
    const uint wanted = divided(4*device.sms, blocks);
    const uint most   = divided(op.args.cells, 2*CELLS);
    const uint chunks = wanted < most ? wanted : most;
    plan.chunk_cells = divided(divided(op.args.cells, chunks ? chunks : 1), CELLS)*CELLS;
    plan.chunks      = divided(op.args.cells, plan.chunk_cells);
}

cudaError_t launch_tile(const attn_params & p, const kv_cuda_split & plan, cudaStream_t stream) {
    const uint rows = p.args.heads/p.args.kv_heads*p.args.tokens;
    for (const tile_instance & i : INSTANCES) {
        if (i.row_blocks != plan.row_blocks || i.slabs != plan.slabs) {
            continue;
        }
        const cudaError_t err = allow_shared(i.kernel, plan);
        if (err != cudaSuccess) {
            return err;
        }
        const dim3 grid(divided(rows, 16*plan.row_blocks), plan.chunks, p.args.kv_heads*p.args.streams);
        i.kernel<<<grid, THREADS, plan.shared_bytes, stream>>>(p, plan.staged);
        return cudaGetLastError();
    }
    return cudaErrorInvalidValue;
}

}  // namespace kv
