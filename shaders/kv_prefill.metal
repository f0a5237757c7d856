// kv_attn_prefill: many query rows at once, with matrices.
//
// A threadgroup takes one KV head and 8 or 16 query rows (token by token, the heads of the KV head side by side), and goes
// over all cells, 32 at a time:
//
//     S = Q' K^T      a slab of 64 values of the 32 rows of K is unpacked into threadgroup memory, for all rows of Q';
//                     each simdgroup multiplies 8 of the cells
//     softmax         a lane for a cell, rows shared out to the simdgroups
//     O' = D O' + P V a slab of V the same way; O' stays in matrices, each simdgroup has its columns of every slab; D holds
//                     the factors of the softmax on its diagonal
//
// The cache is unpacked into threadgroup memory alone, once for 8 or 16 rows. Floats throughout: a half would be as fast and
// cost three digits. 32 cells that no row sees are skipped before they are read, half of all under a causal mask.
//
// delta: S is made of the differences, and the recursion is run over its rows before the softmax, a lane for a cell, the
// second 32 cells of a group going on where the first have left it. So the first are never skipped.

#include "kv_args.h"
#include "kv_attention.h"
#include "kv_delta.h"
#include "kv_row.h"

#include <metal_stdlib>
using namespace metal;

constant int FC_attn_blocks [[function_constant(18)]]; // blocks of 8 query rows: 1 or 2

#define KV_PREFILL_SIMDGROUPS 4
#define KV_PREFILL_CELLS 32
#define KV_PREFILL_SLAB 64
#define KV_PREFILL_BLOCKS 2
#define KV_PREFILL_SLABS (KV_PREFILL_WIDEST/KV_PREFILL_SLAB)
// Columns of 8 that a simdgroup has of a slab.
#define KV_PREFILL_COLUMNS (KV_PREFILL_SLAB/8/KV_PREFILL_SIMDGROUPS)
// Matrices of sums: one block of rows of the widest, or two blocks of four slabs.
#define KV_PREFILL_SUMS (KV_PREFILL_SLABS*KV_PREFILL_COLUMNS)
// Query rows of a simdgroup.
#define KV_PREFILL_OWN_ROWS (8*KV_PREFILL_BLOCKS/KV_PREFILL_SIMDGROUPS)

// Values first .. first + width of 32 rows as floats, by all threads. A row that is not `live` is zero: its cell is hidden
// or beyond the end, and may hold anything, which even a weight of zero would not keep out. Rows of delta are all needed.
static inline void kv_prefill_slab(
        device const uchar * rows, ulong step, threadgroup const float * live, uint count, uint kind, uint size, uint first,
        uint width, threadgroup const float * levels, uint thread_index, threadgroup float * slab) {
    for (uint i = thread_index; i < KV_PREFILL_CELLS*width; i += 32*KV_PREFILL_SIMDGROUPS) {
        const uint c = i/width, at = i % width;
        const bool wanted = KV_KIND_IS_DELTA(kind) ? c < count : live[c] != 0.0f;
        slab[c*KV_PREFILL_SLAB + at] = wanted ? kv_row_value(rows + c*step, kind, size, first + at, levels) : 0.0f;
    }
}

kernel void kv_attn_prefill(
        constant kv_attn_args & args [[buffer(0)]],
        device const uchar * queries [[buffer(1)]],
        device const uchar * keys [[buffer(2)]],
        device const uchar * values [[buffer(3)]],
        device const uchar * mask [[buffer(4)]],
        device const float * sinks [[buffer(5)]],
        device uchar * dst [[buffer(6)]],
        device float * partials [[buffer(7)]],
        device const uint * hidden [[buffer(8)]],
        threadgroup float * memory [[threadgroup(0)]],
        uint3 group [[threadgroup_position_in_grid]],
        ushort simdgroup [[simdgroup_index_in_threadgroup]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint k_size = FC_attn_k_size, v_size = FC_attn_v_size, rows = 8*FC_attn_blocks;
    const uint k_width = kv_width(FC_attn_k_kind, k_size), v_width = kv_width(FC_attn_v_kind, v_size);
    const bool is_delta = KV_KIND_IS_DELTA(FC_attn_k_kind);
    const uint heads_per_kv = args.heads/args.kv_heads, all_rows = heads_per_kv*args.tokens;
    const uint first_row = group.x*rows, kv_head = group.y, stream = group.z;
    const uint kv_stream = stream/(args.streams/args.kv_streams);
    const uint thread_index = simdgroup*32 + lane;

    threadgroup float * k_levels = memory;                                // [KV_LEVELS]
    threadgroup float * v_levels = k_levels + KV_LEVELS;                  // [KV_V_LEVELS]
    threadgroup float * softs = v_levels + KV_V_LEVELS;                   // [row][2]
    threadgroup float * seen = softs + 2*rows;                            // [simdgroup][cell]
    threadgroup float * live = seen + KV_PREFILL_SIMDGROUPS*KV_PREFILL_CELLS; // [cell]
    threadgroup float * diagonal = live + KV_PREFILL_CELLS;               // [block][8][8]
    threadgroup float * s = diagonal + 64*FC_attn_blocks;                 // [row][cell]
    threadgroup float * slab = s + rows*KV_PREFILL_CELLS;                 // [cell][slab]
    threadgroup float * q = slab + KV_PREFILL_CELLS*KV_PREFILL_SLAB;      // [row][k_width]
    threadgroup float * o = slab;                                         // [row][v_width], at the end

    kv_row_levels(FC_attn_k_kind, thread_index, k_levels);
    kv_row_levels(FC_attn_v_kind, thread_index, v_levels);
    for (uint i = thread_index; i < 64*FC_attn_blocks; i += 32*KV_PREFILL_SIMDGROUPS) {
        diagonal[i] = 0.0f;
    }
    for (uint r = simdgroup; r < rows; r += KV_PREFILL_SIMDGROUPS) {
        const uint row = first_row + r;
        if (row < all_rows) {
            const uint token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
            device const uchar * from = queries + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
            kv_attn_query(from, lane, q + r*k_width);
        } else {
            for (uint i = lane; i < k_width; i += 32) {
                q[r*k_width + i] = 0.0f;
            }
        }
        if (lane == 0) {
            softs[2*r] = KV_HIDDEN;
            softs[2*r + 1] = 0.0f;
        }
    }
    // The first 32 cells begin with a barrier, before any of this is read.

    simdgroup_float8x8 acc[KV_PREFILL_SUMS];
    for (uint i = 0; i < KV_PREFILL_SUMS; ++i) {
        acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    keys += kv_head*args.k_nb[1] + kv_stream*args.k_nb[2];
    values += kv_head*args.v_nb[1] + kv_stream*args.v_nb[2];
    mask += stream % args.mask_rows[1]*args.mask_nb[2];
    hidden += kv_stream*args.hidden_words;

    // Of a group of delta's cells: q.m, and w of the last cell so far.
    float base[KV_PREFILL_OWN_ROWS], carry[KV_PREFILL_OWN_ROWS];
    for (uint i = 0; i < KV_PREFILL_OWN_ROWS; ++i) {
        base[i] = 0.0f;
        carry[i] = 0.0f;
    }

    for (uint cell = 0; cell < args.cells; cell += KV_PREFILL_CELLS) {
        bool any = false;
        for (uint r = simdgroup; r < rows; r += KV_PREFILL_SIMDGROUPS) {
            const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
            const bool there = row < all_rows && cell + lane < args.cells;
            const float bias = there ? kv_attn_bias(args, mask + token*args.mask_nb[0], hidden, head, cell + lane) : KV_HIDDEN;
            any = any || bias != KV_HIDDEN;
        }
        seen[simdgroup*KV_PREFILL_CELLS + lane] = any ? 1.0f : 0.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float rows_that_see = 0.0f;
        for (uint g = 0; g < KV_PREFILL_SIMDGROUPS; ++g) {
            rows_that_see += seen[g*KV_PREFILL_CELLS + lane];
        }
        if (simdgroup == 0) {
            live[lane] = rows_that_see;
        }
        const bool unseen = !simd_any(rows_that_see != 0.0f);
        // Everybody has looked before the next 32 cells are looked at, and `live` stands.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (unseen && !(is_delta && cell % KV_DELTA_CELLS == 0)) {
            continue;
        }
        const uint count = min((uint) KV_PREFILL_CELLS, args.cells - cell);

        simdgroup_float8x8 scores[KV_PREFILL_BLOCKS];
        for (uint b = 0; b < KV_PREFILL_BLOCKS; ++b) {
            scores[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        for (uint first = 0; first < k_width; first += KV_PREFILL_SLAB) {
            const uint width = min((uint) KV_PREFILL_SLAB, k_width - first);
            kv_prefill_slab(
                    keys + cell*args.k_nb[0], args.k_nb[0], live, count, FC_attn_k_kind, k_size, first, width, k_levels, thread_index, slab);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = 0; i < width; i += 8) {
                simdgroup_float8x8 k;
                simdgroup_load(k, slab + simdgroup*8*KV_PREFILL_SLAB + i, KV_PREFILL_SLAB, ulong2(0, 0), true);
                for (uint b = 0; b < FC_attn_blocks; ++b) {
                    simdgroup_float8x8 x;
                    simdgroup_load(x, q + b*8*k_width + first + i, k_width, ulong2(0, 0), false);
                    simdgroup_multiply_accumulate(scores[b], x, k, scores[b]);
                }
            }
            // The next slab takes the place of this one.
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint b = 0; b < FC_attn_blocks; ++b) {
            simdgroup_store(scores[b], s + b*8*KV_PREFILL_CELLS + simdgroup*8, KV_PREFILL_CELLS, ulong2(0, 0), false);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        kv_delta_chain chain;
        if (is_delta) {
            device const uchar * row = keys + (cell + lane)*args.k_nb[0];
            const uint stored = lane < count ? kv_delta_kind(row, FC_attn_k_kind, k_size) : KV_DELTA_EMPTY;
            const bool begins = cell % KV_DELTA_CELLS == 0;
            const bool written = !begins && kv_delta_kind(row - (lane + 1)*args.k_nb[0], FC_attn_k_kind, k_size) != KV_DELTA_EMPTY;
            chain = kv_delta_chain_of(stored, begins, written, lane);
        }
        for (uint r = simdgroup; r < rows; r += KV_PREFILL_SIMDGROUPS) {
            const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
            const bool there = row < all_rows && cell + lane < args.cells;
            const float bias = there ? kv_attn_bias(args, mask + token*args.mask_nb[0], hidden, head, cell + lane) : KV_HIDDEN;
            float product = s[r*KV_PREFILL_CELLS + lane];
            if (is_delta) {
                const uint own = r/KV_PREFILL_SIMDGROUPS;
                if (cell % KV_DELTA_CELLS == 0) {
                    const uint group_rows = min((uint) KV_DELTA_CELLS, args.k_cells - cell);
                    base[own] = kv_delta_base(
                            keys + cell*args.k_nb[0], args.k_nb[0], FC_attn_k_kind, k_size, group_rows, q + r*k_width, lane);
                    carry[own] = 0.0f;
                }
                const float w = kv_delta_follow(chain, product, base[own], carry[own]);
                product = chain.empty ? 0.0f : w + base[own];
                carry[own] = simd_broadcast(w, (ushort) 31);
            }
            const float score = kv_attn_score(args, product, bias, kv_attn_slope(args, head));
            const float before = softs[2*r], sum = softs[2*r + 1];
            const float largest = max(before, simd_max(score)), weight = kv_rescale(score, largest);
            const float factor = kv_rescale(before, largest), weights = simd_sum(weight);
            s[r*KV_PREFILL_CELLS + lane] = weight;
            if (lane == 0) {
                softs[2*r] = largest;
                softs[2*r + 1] = sum*factor + weights;
                diagonal[r/8*64 + r % 8*9] = factor;
            }
        }

        for (uint n = 0; n < KV_PREFILL_SLABS; ++n) {
            const uint first = n*KV_PREFILL_SLAB;
            if (first >= v_width) {
                break;
            }
            const uint width = min((uint) KV_PREFILL_SLAB, v_width - first);
            kv_prefill_slab(
                    values + cell*args.v_nb[0], args.v_nb[0], live, count, FC_attn_v_kind, v_size, first, width, v_levels, thread_index, slab);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint b = 0; b < FC_attn_blocks; ++b) {
                simdgroup_float8x8 d;
                simdgroup_load(d, diagonal + 64*b, 8, ulong2(0, 0), false);
                for (uint c = 0; c < KV_PREFILL_COLUMNS; ++c) {
                    const uint column = 8*(simdgroup*KV_PREFILL_COLUMNS + c);
                    if (column < width) {
                        thread simdgroup_float8x8 & sum = acc[(n*FC_attn_blocks + b)*KV_PREFILL_COLUMNS + c];
                        simdgroup_multiply(sum, d, sum);
                        for (uint i = 0; i < KV_PREFILL_CELLS; i += 8) {
                            simdgroup_float8x8 p, v;
                            simdgroup_load(p, s + b*8*KV_PREFILL_CELLS + i, KV_PREFILL_CELLS, ulong2(0, 0), false);
                            simdgroup_load(v, slab + i*KV_PREFILL_SLAB + column, KV_PREFILL_SLAB, ulong2(0, 0), false);
                            simdgroup_multiply_accumulate(sum, p, v, sum);
                        }
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }

    // The slab and the queries are done with.
    for (uint n = 0; n < KV_PREFILL_SLABS; ++n) {
        for (uint b = 0; b < FC_attn_blocks; ++b) {
            for (uint c = 0; c < KV_PREFILL_COLUMNS; ++c) {
                const uint column = n*KV_PREFILL_SLAB + 8*(simdgroup*KV_PREFILL_COLUMNS + c);
                if (column < v_width) {
                    simdgroup_store(
                            acc[(n*FC_attn_blocks + b)*KV_PREFILL_COLUMNS + c], o + b*8*v_width + column, v_width, ulong2(0, 0), false);
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = simdgroup; r < rows; r += KV_PREFILL_SIMDGROUPS) {
        const uint row = first_row + r;
        if (row < all_rows) {
            const uint token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
            if (!FC_attn_whole) {
                device float * partial = kv_attn_partial(args, partials, head, token, stream, 0);
                if (lane < 2) {
                    partial[lane] = softs[2*r + lane];
                }
                for (uint i = lane; i < v_width; i += 32) {
                    partial[2 + i] = o[r*v_width + i];
                }
                continue;
            }
            kv_softmax soft;
            soft.largest = softs[2*r];
            soft.sum = softs[2*r + 1];
            kv_attn_end(args, o + r*v_width, soft, sinks, head, kv_attn_result(args, dst, head, token, stream), lane);
        }
    }
}
