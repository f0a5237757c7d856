// Attention of a few query rows over rows of levels: K of srft or delta, V of srft, head sizes 64, 128 and 256.
//
// A block of four warps takes one KV head, up to eight query rows and a chunk of cells; its warps take blocks of 64 cells in
// turn, each alone, 16 cells at a time. Rows go from memory to registers: keys while the values before
// them are added, values while keys are multiplied. What nobody sees is not read.
//
//     K   16 cells x 32 values by integer tensor cores, queries as two planes of 8 bits (decode_keys.cuh).
//     V   values x 16 cells by f16 tensor cores. Weights carry the scales (decode_values.cuh).
//
// The softmax is relative to the largest score so far, which changes a few times in a chunk: until then nothing is rescaled.
//
// delta: w_t = q.d_t + RHO w_(t-1) over 16 cells is a scan of three shuffles for each half of them.
//
// Precise rows of recent cells are further chunks of the same launch, of srft8: a launch of their own would take longer than
// they do. Their mask is that of the cells they stand for, and blocks of the cache leave those cells out.
#pragma once

#include "decode_keys.cuh"
#include "decode_values.cuh"

namespace kv {
namespace {

using namespace metal;

constexpr uint STEP = 16; // cells of one product

// Blocks that a multiprocessor has registers for.
template <uint K, uint V, uint D, uint QB> constexpr uint blocks_per_sm() {
    return D == 256 ? 2 : D == 128 && (QB == 2 || (is_delta(K) && code_bits(V) == 3)) ? 3 : 4;
}

template <uint V, uint D> struct decode_memory {
    static constexpr uint TABLE = decode_values<V, D>::TABLE_BYTES, SUMS = WARPS*ROWS*D*4;

    uint   table[(TABLE > SUMS ? TABLE : SUMS)/4]; // what V looks up; behind the loop, sums of the warps
    float  q[ROWS][D];                             // rotated queries
    signed char planes[2][ROWS][D];
    float  query_scale[ROWS];
    __half weights[WARPS][ROWS][STEP + 8];
    float  softs[WARPS][ROWS][2];
    uint   recent[RECENT_WORDS];
};

// Queries of row r, rotated, and as two planes of bytes.
template <uint K, uint D, typename Memory> __device__ __forceinline__ void prepare_query(const attn_params & p, Memory & m, uint r, const uint8_t * from, uint lane) {
    float * q = m.q[r];
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
        m.planes[0][r][i] = (signed char) (int) first;
        m.planes[1][r][i] = (signed char) (int) rintf((x - first)*SECOND_PLANE);
    }
    if (lane == 0) {
        m.query_scale[r] = largest/127.0f/SECOND_PLANE*level_unit(K);
    }
}

// How 16 cells of a group hang together, and what they leave to the next 16.
template <uint KIND, uint QB> struct decode_group {
    uint  kinds[2][2];  // bits 0 of the kinds of cells 0 to 31, of the others; bits 1
    float base[QB][2];  // q.m
    float carry[QB][2]; // w of the cell before
    bool  written;      // is there one?

    // Rows of a group carry the I-frame and what they are in the same words.
    template <uint D, typename Memory> __device__ __forceinline__ void begin(
            const Memory & m, const uint8_t * group, uint step, uint rows, uint lane, uint t) {
        constexpr uint SLOTS = D/64;
        const uint8_t * shares = group + level_scale_bytes(KIND, D) + D*code_bits(KIND)/8;
        uint stored[2*SLOTS]; // slots of 32/SLOTS rows each
#pragma unroll
        for (uint i = 0; i < 2*SLOTS; ++i) {
            const uint row = (lane + 32*i)/SLOTS;
            stored[i] = row < rows ? __ldg((const unsigned short *) (shares + row*step) + lane % SLOTS) : 0;
        }
        const bool framed = (__shfl_sync(KV_ALL_LANES, stored[0], 0) & KV_DELTA_FRAMED) != 0;
        float dots[4*QB] = {};
#pragma unroll
        for (uint i = 0; i < 2*SLOTS; ++i) {
            const float frame = framed ? kv_delta_value((unsigned short) stored[i]) : 0.0f;
#pragma unroll
            for (uint r = 0; r < 4*QB; ++r) {
                dots[r] = fmaf(m.q[r][lane + 32*i], frame, dots[r]);
            }
        }
#pragma unroll
        for (uint half_of = 0; half_of < 2; ++half_of) {
            uint kind = 0; // of cell `lane` of these 32
#pragma unroll
            for (uint i = 0; i < SLOTS; ++i) {
                const uint first_slot = __shfl_sync(KV_ALL_LANES, stored[half_of*SLOTS + i], SLOTS*lane % 32);
                kind = lane/(32/SLOTS) == i ? first_slot : kind;
            }
            kinds[0][half_of] = __ballot_sync(KV_ALL_LANES, (kind & 1) != 0);
            kinds[1][half_of] = __ballot_sync(KV_ALL_LANES, (kind & 2) != 0);
        }
#pragma unroll
        for (uint r = 0; r < 4*QB; ++r) {
            dots[r] = simd_sum(dots[r]);
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            base[i/2][i % 2] = t % 2 ? dots[i/2*4 + 2 + i % 2] : dots[i/2*4 + i % 2];
            carry[i/2][i % 2] = 0.0f;
        }
        written = false;
    }

    // From q.d of cells g and g + 8 of the 16 from `first` on, a cell of the group, to the scores of their keys.
    __device__ __forceinline__ void follow(uint first, uint lane, float (&s)[QB][4]) {
        const uint g = lane/4, last = 28 + lane % 4;
        const uint bits[2] = { (first < 32 ? kinds[0][0] : kinds[0][1]) >> first % 32, (first < 32 ? kinds[1][0] : kinds[1][1]) >> first % 32 };
        bool empty[2], alone[2];
        float factor[2][3], whole[2];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint kind = (bits[0] >> (g + 8*n) & 1) | (bits[1] >> (g + 8*n) & 1) << 1;
            empty[n] = kind == KV_DELTA_EMPTY;
            alone[n] = kind == KV_DELTA_ALONE;
            const bool before = __shfl_up_sync(KV_ALL_LANES, (int) !empty[n], 4) != 0;
            float f = kind == KV_DELTA_CHAINED && (g == 0 ? written : before) ? KV_DELTA_RHO : 0.0f;
#pragma unroll
            for (uint i = 0; i < 3; ++i) {
                const float other = __shfl_up_sync(KV_ALL_LANES, f, 4u << i);
                factor[n][i] = g >= 1u << i ? f : 0.0f;
                f = g >= 1u << i ? f*other : f;
            }
            whole[n] = f;
            written = __shfl_sync(KV_ALL_LANES, (int) !empty[n], last) != 0;
        }
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                const uint n = i/2;
                // cells g of both rows come before cells g + 8
                float w = alone[n] ? s[qb][i] - base[qb][i % 2] : s[qb][i];
#pragma unroll
                for (uint j = 0; j < 3; ++j) {
                    w = fmaf(factor[n][j], __shfl_up_sync(KV_ALL_LANES, w, 4u << j), w);
                }
                w = fmaf(whole[n], carry[qb][i % 2], w);
                carry[qb][i % 2] = __shfl_sync(KV_ALL_LANES, w, last);
                s[qb][i] = empty[n] ? 0.0f : w + base[qb][i % 2];
            }
        }
    }
};

// Of up to 32 blocks of a warp, from `first` on, those that a row sees. Several are looked at together: each is a wait for
// memory.
__device__ __forceinline__ uint visible_blocks(
        const attn_params & p, bool one_mask, uint first_row, uint used, uint kv_head, uint stream, uint first, uint end, uint count, uint lane) {
    count = min(count, 32u);
    if (!p.mask) {
        return count == 32 ? ~0u : (1u << count) - 1;
    }
    const uint heads_per_kv = p.args.heads/p.args.kv_heads;
    constexpr uint AT_ONCE = 8;
    uint visible = 0;
    for (uint r = 0; r < (one_mask ? 1 : used); ++r) {
        const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        const uint at = mask_offset(p, token, head, stream);
        for (uint n = 0; n < count; n += AT_ONCE) {
            bool seen[AT_ONCE];
#pragma unroll
            for (uint i = 0; i < AT_ONCE; ++i) {
                const uint cell = first + (n + i)*WARPS*BLOCK + lane;
                seen[i] = bias_at(p, at, cell, end) > HIDDEN || bias_at(p, at, cell + 32, end) > HIDDEN;
            }
#pragma unroll
            for (uint i = 0; i < AT_ONCE; ++i) {
                visible |= simd_any(seen[i]) ? 1u << (n + i) : 0;
            }
        }
    }
    return visible;
}

// Blocks of the cache alone, of the cache beside precise rows, and of these.
enum class decode_rows { alone, main, precise };

template <uint K, uint V, uint D, uint QB, decode_rows OF> __device__ __forceinline__ void decode_block(const attn_params & p, uint8_t * raw, const attn_part & part) {
    constexpr uint C = D/64;
    constexpr bool DELTA = is_delta(K), PRECISE = OF == decode_rows::precise, RECENT = OF == decode_rows::main;
    typedef decode_keys<K, D, QB> keys_of;
    typedef decode_values<V, D> values_of;
    auto & m = *(decode_memory<V, D> *) raw;
    const kv_attn_args & args = p.args;
    const uint64_t (&k_nb)[3] = PRECISE ? part.k_nb : args.k_nb, (&v_nb)[3] = PRECISE ? part.v_nb : args.v_nb;
    const uint cells = PRECISE ? part.count : args.cells, chunk_cells = PRECISE ? p.part_chunk_cells : args.chunk_cells;
    uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    keep(warp);
    keep(lane);
    keep(g);
    keep(t);
    const uint heads_per_kv = args.heads/args.kv_heads, all_rows = heads_per_kv*args.tokens;
    const uint row_blocks = (all_rows + ROWS - 1)/ROWS;
    const uint kv_head = blockIdx.x % args.kv_heads, first_row = blockIdx.x/args.kv_heads % row_blocks*ROWS, stream = blockIdx.z;
    const uint chunk = PRECISE ? blockIdx.y - part.first_chunk : blockIdx.y;
    const uint used = min(ROWS, all_rows - first_row), kv_stream = stream/(args.streams/args.kv_streams);
    const uint8_t * keys   = (PRECISE ? part.k : p.k) + kv_head*k_nb[1] + kv_stream*k_nb[2];
    const uint8_t * values = (PRECISE ? part.v : p.v) + kv_head*v_nb[1] + kv_stream*v_nb[2];
    const uint8_t * k_codes = keys + keys_of::codes_at(t), * v_codes = values + values_of::codes_at(g);
    keep(keys);
    keep(values);
    keep(k_codes);
    keep(v_codes);
    const uint k_step = (uint) k_nb[0], v_step = (uint) v_nb[0];
    const uint begin = chunk*chunk_cells, end = min(cells, begin + chunk_cells), last = cells - 1;
    const uint blocks = end > begin ? (end - begin + BLOCK - 1)/BLOCK : 0;

    // Asked for before the queries are made; bits are set behind them.
    const auto column = [&](uint i) { return cell_of(p.columns, p.columns_nb, i, kv_stream, args.cells); };
    uint first_recent = ~0u;
    if (PRECISE) {
        for (uint i = threadIdx.x; i < RECENT_WORDS; i += THREADS) {
            m.recent[i] = begin + i < end ? column(part.first_column + begin + i) : ~0u;
        }
    } else if (RECENT) {
        first_recent = threadIdx.x < p.column_count ? column(threadIdx.x) : ~0u;
        for (uint i = threadIdx.x; i < RECENT_WORDS; i += THREADS) {
            const uint there = min(max(end, begin + 32*i) - begin - 32*i, 32u);
            m.recent[i] = there == 32 ? 0 : ~0u << there; // what is beyond the end is hidden, too
        }
    }

    if constexpr (values_of::TABLE_BYTES != 0) {
        for (uint i = threadIdx.x; i < values_of::TABLE_BYTES/128; i += THREADS) {
            const __half2 pair = __floats2half2_rn(kv_levels_4[i % 16], kv_levels_4[i/16]);
            const uint x = *(const uint *) &pair;
            for (uint l = 0; l < 8; ++l) {
                *(uint4 *) &m.table[i*32 + (l + i) % 8*4] = make_uint4(x, x, x, x);
            }
        }
    }
    for (uint i = threadIdx.x; i < sizeof(m.weights)/4; i += THREADS) {
        ((uint *) m.weights)[i] = 0;
    }
    for (uint r = warp; r < ROWS; r += WARPS) {
        const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        const uint8_t * from = p.q + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
        prepare_query<K, D>(p, m, r, r < used ? from : nullptr, lane);
    }
    __syncthreads();
    if (RECENT) {
        for (uint i = threadIdx.x; i < p.column_count; i += THREADS) {
            const uint at = (i == threadIdx.x ? first_recent : column(i)) - begin; // large where the cell comes before
            if (at < end - begin) {
                atomicOr(&m.recent[at/32], 1u << at % 32);
            }
        }
        __syncthreads();
    }

    typename keys_of::queries b;
    keys_of::fill(b, m.planes, g, t);
    // What the lane has of the rows: 2 (t % 2) and the next, of each block. Scores are in units of log 2.
    const bool softcap = args.softcap != 0.0f;
    float factor_of[QB][2], slope[QB][2], ref[QB][2], sum[QB][2];
    uint mask_at[QB][2];
#pragma unroll
    for (uint i = 0; i < 2*QB; ++i) {
        const uint r = i/2*4 + t % 2*2 + i % 2, row = first_row + min(r, used - 1);
        const uint token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        mask_at[i/2][i % 2] = mask_offset(p, token, head, stream);
        factor_of[i/2][i % 2] = m.query_scale[r]*(DELTA || softcap ? 1.0f : args.scale*LOG2_E);
        slope[i/2][i % 2] = slope_of(p, head)*LOG2_E;
        ref[i/2][i % 2] = HIDDEN;
        sum[i/2][i % 2] = 0.0f;
    }
    const bool one_mask = args.tokens == 1 && args.mask_rows[0] == 1;
    const uint table = (uint) __cvta_generic_to_shared(&m.table[lane]);
    // Where the lane's weights go, and where its operand comes from.
    __half * const weights_to = &m.weights[warp][(QB == 2 && t >= 2 ? 4 : 0) + t % 2*2][g];
    const uint * const weights_from = (const uint *) &m.weights[warp][g][2*t];

    float acc[C][2][2][4]; // [chunk][scale][pair of values]
#pragma unroll
    for (uint i = 0; i < C*16; ++i) {
        (&acc[0][0][0][0])[i] = 0.0f;
    }

    decode_group<K, QB> group;
    // 32 blocks of this warp at a time: which of them somebody sees.
    for (uint span = warp; span < blocks; span += 32*WARPS) {
        uint visible = 1;
        if (PRECISE) {
            const uint both = m.recent[span*BLOCK + lane] & m.recent[span*BLOCK + 32 + lane];
            visible = simd_any(both != ~0u) ? 1 : 0;
        } else {
            visible = visible_blocks(p, one_mask, first_row, used, kv_head, stream, begin + span*BLOCK, end, (blocks - span + WARPS - 1)/WARPS, lane);
            if (RECENT) {
                const uint at = (span + lane*WARPS)*BLOCK/32;
                const bool gone = at + 1 < RECENT_WORDS && (m.recent[at] & m.recent[at + 1]) == ~0u;
                visible &= ~__ballot_sync(KV_ALL_LANES, gone);
            }
        }
        if (visible == 0) {
            continue;
        }
        uint cell = begin + (span + (__ffs(visible) - 1)*WARPS)*BLOCK;
        visible &= visible - 1;
        keys_of k;
        values_of v;
        k.load(keys, k_codes, k_step, cell, last, g);
        for (bool more = true; more;) {
            v.load(values, v_codes, v_step, cell, last, t);
            // Masks are asked for here and looked at behind the products.
            unsigned short masked[QB][4];
            const uint here = cell;
            // Of cells g and g + 8: where the mask has them, and a bit each where they are not to be seen.
            uint cell_at[2], gone = RECENT ? m.recent[(here - begin)/32] >> ((here - begin) % 32 + g) : 0;
#pragma unroll
            for (uint n = 0; n < 2; ++n) {
                cell_at[n] = min(here + g + 8*n, last);
                if (PRECISE) {
                    cell_at[n] = m.recent[here - begin + g + 8*n];
                    gone |= cell_at[n] == ~0u ? 1u << 8*n : 0;
                    cell_at[n] = min(cell_at[n], args.cells - 1);
                }
            }
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                if (i % 2 == 0 && (i < 4 || !one_mask)) {
                    masked[i/4][i % 4] = mask_bits(p, mask_at[i/4][0], cell_at[i % 4/2]);
                } else if (one_mask) {
                    masked[i/4][i % 4] = masked[0][i % 4/2*2];
                } else {
                    masked[i/4][i % 4] = mask_bits(p, mask_at[i/4][1], cell_at[i % 4/2]);
                }
            }

            float s[QB][4];
            k.join(t);
            k.products(b, t, s);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    s[qb][i] = (s[qb][i] + __shfl_xor_sync(KV_ALL_LANES, s[qb][i], 2))*factor_of[qb][i % 2];
                }
            }
            if (DELTA) {
                if ((cell - begin) % BLOCK == 0) {
                    group.template begin<D>(m, keys + cell*k_step, k_step, min(BLOCK, args.k_cells - cell), lane, t);
                }
                group.follow((cell - begin) % BLOCK, lane, s);
            }
            // Keys of the next 16 cells are on their way while these values are added; values while keys are multiplied.
            cell += STEP;
            if ((cell - begin) % BLOCK == 0 || cell >= end) {
                more = visible != 0;
                cell = begin + (span + (more ? __ffs(visible) - 1 : 0)*WARPS)*BLOCK;
                visible &= visible - 1;
            }
            if (more) {
                k.load(keys, k_codes, k_step, cell, last, g);
            }

            bool larger = false;
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                float & x = s[i/4][i % 4];
                if (softcap) {
                    x = soft_capped(x*args.scale, args.softcap)*LOG2_E;
                } else if (DELTA) {
                    x *= args.scale*LOG2_E;
                }
                const float bias = __half2float(__ushort_as_half(masked[i/4][i % 4]));
                const bool beyond = OF == decode_rows::alone ? here + g + i % 4/2*8 >= end : (gone >> i % 4/2*8 & 1) != 0;
                const bool hidden = !(bias > -65504.0f) || beyond;
                x = hidden ? -INFINITY : fmaf(slope[i/4][i % 2], bias, x);
                larger = larger || x > ref[i/4][i % 2];
            }
            if (__any_sync(KV_ALL_LANES, larger)) {
                float factor[QB][2];
#pragma unroll
                for (uint i = 0; i < 2*QB; ++i) {
                    float & r = ref[i/2][i % 2];
                    float top = fmaxf(s[i/2][i % 2], s[i/2][i % 2 + 2]);
                    top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 4));
                    top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 8));
                    top = fmaxf(fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 16)), r);
                    factor[i/2][i % 2] = exp2f(r - top);
                    sum[i/2][i % 2] *= factor[i/2][i % 2];
                    r = top;
                }
                // Columns 2t and 2t + 1 of the sums.
                const float f0 = t < 2 ? factor[0][0] : factor[QB - 1][0], f1 = t < 2 ? factor[0][1] : factor[QB - 1][1];
#pragma unroll
                for (uint i = 0; i < C*16; i += 2) {
                    (&acc[0][0][0][0])[i] *= f0;
                    (&acc[0][0][0][0])[i + 1] *= f1;
                }
            }
            __half w[QB][4];
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                w[i/4][i % 4] = __float2half_rn(exp2f(s[i/4][i % 4] - ref[i/4][i % 2]));
                sum[i/4][i % 2] += __half2float(w[i/4][i % 4]);
            }
            // Lanes t and t ^ 2 have the same: one of them stores a block of rows.
            if (QB == 2 || t < 2) {
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    weights_to[i % 2*(STEP + 8) + i/2*8] = QB == 2 && t >= 2 ? w[QB - 1][i] : w[0][i];
                }
            }
            __syncwarp();
            v.join(g);
            v.add(weights_from[0], weights_from[4], table, g, acc);
            // The next weights take the place of these.
            __syncwarp();
        }
    }
#pragma unroll
    for (uint i = 0; i < 2*QB; ++i) {
        for (uint n = 4; n < 32; n *= 2) {
            sum[i/2][i % 2] += __shfl_xor_sync(KV_ALL_LANES, sum[i/2][i % 2], n);
        }
        if (g == 0 && t/2 == i/2) {
            m.softs[warp][i/2*4 + t % 2*2 + i % 2][0] = ref[i/2][i % 2];
            m.softs[warp][i/2*4 + t % 2*2 + i % 2][1] = sum[i/2][i % 2];
        }
    }
    // The table is done with: sums of the warps, [warp][row][value].
    __syncthreads();
    float * o = (float *) m.table;
    if (t < 2*QB) {
#pragma unroll
        for (uint i = 0; i < C*16; ++i) {
            const uint at = values_of::value_of(i, g), r = 2*t + i % 2;
            o[(warp*ROWS + r)*D + at] = (&acc[0][0][0][0])[i];
        }
    }
    __syncthreads();
    const uint results = stream*args.tokens*args.heads + kv_head*heads_per_kv;
    for (uint i = threadIdx.x; i < used*D; i += THREADS) {
        const uint r = i/D, value = i % D, row = first_row + r;
        float largest = HIDDEN, all = 0.0f, x = 0.0f;
        for (uint w = 0; w < WARPS; ++w) {
            largest = fmaxf(largest, m.softs[w][r][0]);
        }
        for (uint w = 0; w < WARPS; ++w) {
            const float factor = exp2f(m.softs[w][r][0] - largest);
            all = fmaf(factor, m.softs[w][r][1], all);
            x = fmaf(factor, o[(w*ROWS + r)*D + value], x);
        }
        const size_t at = (size_t) (results + row/heads_per_kv*args.heads + row % heads_per_kv)*args.chunks + args.first_chunk + blockIdx.y;
        p.sums[at*args.sum_width + value] = x*values_of::UNIT;
        if (value == 0) {
            p.metas[at] = make_float2(largest <= HIDDEN ? HIDDEN : largest/LOG2_E, all);
        }
    }
}

template <uint K, uint V, uint D, uint QB> __global__ void __launch_bounds__(THREADS, blocks_per_sm<K, V, D, QB>()) kv_decode(const attn_params p) {
    extern __shared__ __align__(16) uint8_t raw[];
    decode_block<K, V, D, QB, decode_rows::alone>(p, raw, p.part[0]);
}

// A kernel of its own: what it has more of would make the other slower.
template <uint K, uint V, uint D, uint QB> __global__ void __launch_bounds__(THREADS, blocks_per_sm<K, V, D, QB>()) kv_decode_recent(const attn_params p) {
    extern __shared__ __align__(16) uint8_t raw[];
    if (blockIdx.y < p.args.main_chunks) {
        decode_block<K, V, D, QB, decode_rows::main>(p, raw, p.part[0]);
    } else {
        const attn_part part = blockIdx.y < p.part[1].first_chunk ? p.part[0] : p.part[1];
        decode_block<KV_KIND_SRFT8, KV_KIND_SRFT8, D, QB, decode_rows::precise>(p, raw, part);
    }
}

template <uint K, uint V, uint D> static decode_choice choice_of(uint row_blocks) {
    constexpr size_t main = sizeof(decode_memory<V, D>), precise = sizeof(decode_memory<KV_KIND_SRFT8, D>);
    return { row_blocks == 1 ? kv_decode<K, V, D, 1> : kv_decode<K, V, D, 2>,
             row_blocks == 1 ? kv_decode_recent<K, V, D, 1> : kv_decode_recent<K, V, D, 2>,
             row_blocks == 1 ? blocks_per_sm<K, V, D, 1>() : blocks_per_sm<K, V, D, 2>(), main > precise ? main : precise };
}

template <uint K, uint V> static decode_choice choice_of(uint size, uint row_blocks) {
    return size == 64 ? choice_of<K, V, 64>(row_blocks) : size == 128 ? choice_of<K, V, 128>(row_blocks) : choice_of<K, V, 256>(row_blocks);
}

}  // namespace
}  // namespace kv
