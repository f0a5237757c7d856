// kv_attn_decode: one threadgroup for a KV head, a chunk of its cells and a query token. kv_attn_merge: its second step.
// kv_attn_hidden, kv_attn_columns: before both, where recent cells have precise rows.
//
//     q' = R q                        once per query head, by a simdgroup each
//     s  = q' . k                     32 cells at a time for each simdgroup
//     o' = sum softmax(s) v           in V's rotated domain, in registers
//     merge of the simdgroups, and where there is one chunk only the end: sinks, 1/sum, R^-1, result
//
// With several chunks the partial results (largest, sum, vector) go to a buffer and kv_attn_merge ends.
// All query heads of the KV head are worked on together, up to KV_ATTN_ROWS in a threadgroup; a larger group of heads
// takes several threadgroups. K and V are read as they are stored and their kinds are independent.
//
// A lane takes a whole cell for the scores: it unpacks each byte of the row once, in registers, and multiplies it into
// the queries of all the heads, which lie in threadgroup memory where all lanes read the same place at the same time.
// So scores need no sum over lanes. For the values it is the other way round: a lane takes every 32nd value of the row,
// neighbours read neighbouring bytes, and the weights of a cell are the same for all.
//
// Cells of delta are taken 64 at a time, in two halves: the second goes on where the first has left the recursion.
//
// The simdgroups' results are merged pair by pair: half of them leave theirs where the queries and weights were, the other
// half takes them up, until one has all. So threadgroup memory is small and a core holds several threadgroups.

#include "kv_args.h"
#include "kv_attention.h"
#include "kv_delta.h"
#include "kv_row.h"

#include <metal_stdlib>
using namespace metal;

constant int FC_attn_rows [[function_constant(18)]]; // query heads of a threadgroup

// V's values of one lane, for all query heads.
#define KV_ATTN_LANE_VALUES (KV_ATTN_VALUES/32)

// s[r] += q[r] . k for four values of a row.
static inline void kv_score_four(float4 k, threadgroup const float * q, uint width, uint rows, thread float * s) {
    for (uint r = 0; r < rows; ++r) {
        s[r] += dot(k, *(threadgroup const float4 *) (q + r*width));
    }
}

// s[r] = q[r] . row for `rows` queries.
static inline void kv_scores(
        device const uchar * row, uint kind, uint size, threadgroup const float * q, uint rows,
        threadgroup const float * levels, thread float * s) {
    const uint width = kv_width(kind, size);
    for (uint r = 0; r < rows; ++r) {
        s[r] = 0.0f;
    }
    if (kv_is_float(kind)) {
        for (uint i = 0; i < size; i += 4) {
            kv_score_four(kv_four_floats(row, kind, i), q + i, width, rows, s);
        }
    }
    if (!kv_is_float(kind) && !kv_is_chunked(kind) && !kv_has_signs(kind)) {
        for (uint i = 0; i < size; i += 4) {
            kv_score_four(kv_row_four(row, kind, size, i, levels), q + i, width, rows, s);
        }
    }
    if (kv_is_chunked(kind)) {
        for (uint start = 0; start < size;) {
            const kv_chunk chunk = kv_row_chunk(row, kind, size, start);
            const uint step = chunk.count/chunk.parts;
            for (uint j = 0; j < step; j += 4) {
                const uchar4 bytes = *(device const packed_uchar4 *) (chunk.codes + j);
                for (uint part = 0; part < chunk.parts; ++part) {
                    const uint at = part*step + j;
                    float4 k;
                    for (uint i = 0; i < 4; ++i) {
                        k[i] = kv_row_level(chunk, kind, at + i, bytes[i], levels);
                    }
                    k *= kv_row_scale(row, kind, size, start + at);
                    kv_score_four(k, q + start + at, width, rows, s);
                }
            }
            start += chunk.count;
        }
    }
    if (kv_has_signs(kind)) {
        const float magnitude = kv_sign_magnitude(row, kind, size);
        for (uint i = 0; i < size; i += 4) {
            float4 k;
            for (uint j = 0; j < 4; ++j) {
                k[j] = kv_signed(row, kind, size, i + j, magnitude);
            }
            kv_score_four(k, q + width - size + i, width, rows, s);
        }
    }
}

kernel void kv_attn_decode(
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
        ushort simdgroups [[simdgroups_per_threadgroup]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint rows = FC_attn_rows, k_size = FC_attn_k_size, v_size = FC_attn_v_size;
    const uint k_width = kv_width(FC_attn_k_kind, k_size), v_width = kv_width(FC_attn_v_kind, v_size);
    const uint heads_per_kv = args.heads/args.kv_heads, blocks = (heads_per_kv + rows - 1)/rows;
    const uint chunk = group.x, kv_head = group.y/blocks, first_row = group.y % blocks*rows;
    const uint first_head = kv_head*heads_per_kv + first_row, used = min(rows, heads_per_kv - first_row);
    const uint token = group.z % args.tokens, stream = group.z/args.tokens;
    const uint kv_stream = stream/(args.streams/args.kv_streams);

    threadgroup float * k_levels = memory;                     // [KV_LEVELS]
    threadgroup float * v_levels = k_levels + KV_LEVELS;       // [KV_V_LEVELS]
    threadgroup float * q = v_levels + KV_V_LEVELS;            // [row][k_width]
    threadgroup float * weights = q + rows*k_width + simdgroup*32*rows; // [simdgroup][cell][row]
    threadgroup float * sums = v_levels + KV_V_LEVELS;         // [half of the simdgroups][row][2 + v_width], at the end

    kv_row_levels(FC_attn_k_kind, simdgroup*32 + lane, k_levels);
    kv_row_levels(FC_attn_v_kind, simdgroup*32 + lane, v_levels);
    for (uint r = simdgroup; r < used; r += simdgroups) {
        device const uchar * from = queries + token*args.q_nb[0] + (first_head + r)*args.q_nb[1] + stream*args.q_nb[2];
        kv_attn_query(from, lane, q + r*k_width);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    kv_softmax soft[KV_ATTN_ROWS];
    float slope[KV_ATTN_ROWS], base[KV_ATTN_ROWS], carry[KV_ATTN_ROWS];
    for (uint r = 0; r < used; ++r) {
        soft[r].largest = KV_HIDDEN;
        soft[r].sum = 0.0f;
        slope[r] = kv_attn_slope(args, first_head + r);
    }
    const uint lane_values = (v_width + 31)/32;
    float acc[KV_ATTN_LANE_VALUES];
    for (uint i = 0; i < rows*lane_values; ++i) {
        acc[i] = 0.0f;
    }
    keys += kv_head*args.k_nb[1] + kv_stream*args.k_nb[2];
    values += kv_head*args.v_nb[1] + kv_stream*args.v_nb[2];
    mask += token*args.mask_nb[0] + stream % args.mask_rows[1]*args.mask_nb[2];
    hidden += kv_stream*args.hidden_words;
    const uint end = min(args.cells, (chunk + 1)*args.chunk_cells);
    const bool is_delta = KV_KIND_IS_DELTA(FC_attn_k_kind);
    const uint together = is_delta ? KV_DELTA_CELLS : 32;
    bool written = false;

    for (uint turn = 0;; ++turn) {
        // `together` cells in a row, then those of the other simdgroups are stepped over.
        const uint half_of = turn % (together/32);
        const uint begin = chunk*args.chunk_cells + (turn/(together/32)*simdgroups + simdgroup)*together;
        const uint first = begin + 32*half_of;
        if (begin >= end) {
            break;
        }
        if (first >= end) {
            continue;
        }
        const uint cell = first + lane;
        float s[KV_ATTN_ROWS] = {}, bias[KV_ATTN_ROWS];
        bool seen = false, needed = false;
        for (uint r = 0; r < used; ++r) {
            bias[r] = cell < end ? kv_attn_bias(args, mask, hidden, first_head + r, cell) : KV_HIDDEN;
            seen = seen || bias[r] != KV_HIDDEN;
            // The first half of a group is needed by the second.
            if (is_delta && half_of == 0 && cell + 32 < end) {
                needed = needed || kv_attn_bias(args, mask, hidden, first_head + r, cell + 32) != KV_HIDDEN;
            }
        }
        // 32 cells that nobody sees are not read.
        if (!simd_any(seen || needed)) {
            continue;
        }
        if (is_delta ? cell < end : seen) {
            kv_scores(keys + cell*args.k_nb[0], FC_attn_k_kind, k_size, q, used, k_levels, s);
        }
        if (is_delta) {
            const uint stored = cell < end ? kv_delta_kind(keys + cell*args.k_nb[0], FC_attn_k_kind, k_size) : KV_DELTA_EMPTY;
            const kv_delta_chain chain = kv_delta_chain_of(stored, half_of == 0, written, lane);
            for (uint r = 0; r < used; ++r) {
                if (half_of == 0) {
                    const uint group_rows = min((uint) KV_DELTA_CELLS, args.k_cells - begin);
                    base[r] = kv_delta_base(keys + begin*args.k_nb[0], args.k_nb[0], FC_attn_k_kind, k_size, group_rows, q + r*k_width, lane);
                    carry[r] = 0.0f;
                }
                const float w = kv_delta_follow(chain, s[r], base[r], carry[r]);
                s[r] = chain.empty ? 0.0f : w + base[r];
                carry[r] = simd_broadcast(w, (ushort) 31);
            }
            written = simd_broadcast((uint) !chain.empty, (ushort) 31) != 0;
        }
        for (uint r = 0; r < used; ++r) {
            const float score = kv_attn_score(args, s[r], bias[r], slope[r]);
            const float largest = max(soft[r].largest, simd_max(score));
            const float factor = kv_rescale(soft[r].largest, largest), weight = kv_rescale(score, largest);
            soft[r].largest = largest;
            soft[r].sum = soft[r].sum*factor + simd_sum(weight);
            weights[lane*rows + r] = weight;
            for (uint i = 0; i < lane_values; ++i) {
                acc[r*lane_values + i] *= factor;
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint c = 0; c < min(32u, end - first); ++c) {
            // A cell of weight zero is hidden, and may hold anything.
            bool counts = false;
            for (uint r = 0; r < used; ++r) {
                counts = counts || weights[c*rows + r] != 0.0f;
            }
            if (!counts) {
                continue;
            }
            device const uchar * row = values + (first + c)*args.v_nb[0];
            for (uint i = 0; i < lane_values; ++i) {
                const uint at = lane + 32*i;
                if (at < v_width) {
                    const float v = kv_row_value(row, FC_attn_v_kind, v_size, at, v_levels);
                    for (uint r = 0; r < used; ++r) {
                        acc[r*lane_values + i] = fma(weights[c*rows + r], v, acc[r*lane_values + i]);
                    }
                }
            }
        }
        // The next 32 cells overwrite the weights; a shuffle stands between, but orders no memory.
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    const uint step = 2 + v_width;
    for (uint others = simdgroups/2; others > 0; others /= 2) {
        // Queries, weights and what was left before are done with.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup >= others && simdgroup < 2*others) {
            for (uint r = 0; r < used; ++r) {
                threadgroup float * to = sums + ((simdgroup - others)*rows + r)*step;
                if (lane == 0) {
                    to[0] = soft[r].largest;
                    to[1] = soft[r].sum;
                }
                for (uint i = 0; i < lane_values; ++i) {
                    if (lane + 32*i < v_width) {
                        to[2 + lane + 32*i] = acc[r*lane_values + i];
                    }
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup < others) {
            for (uint r = 0; r < used; ++r) {
                threadgroup const float * from = sums + (simdgroup*rows + r)*step;
                const float largest = max(soft[r].largest, from[0]);
                const float mine = kv_rescale(soft[r].largest, largest), theirs = kv_rescale(from[0], largest);
                soft[r].largest = largest;
                soft[r].sum = fma(from[1], theirs, soft[r].sum*mine);
                for (uint i = 0; i < lane_values; ++i) {
                    if (lane + 32*i < v_width) {
                        acc[r*lane_values + i] = fma(from[2 + lane + 32*i], theirs, acc[r*lane_values + i]*mine);
                    }
                }
            }
        }
    }
    if (!FC_attn_whole) {
        for (uint r = 0; r < used && simdgroup == 0; ++r) {
            device float * partial = kv_attn_partial(args, partials, first_head + r, token, stream, chunk);
            if (lane == 0) {
                partial[0] = soft[r].largest;
                partial[1] = soft[r].sum;
            }
            for (uint i = 0; i < lane_values; ++i) {
                if (lane + 32*i < v_width) {
                    partial[2 + lane + 32*i] = acc[r*lane_values + i];
                }
            }
        }
        return;
    }
    // One simdgroup has everything: the others help to end the rows. What it read last lies where its results go.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = 0; r < used && simdgroup == 0; ++r) {
        threadgroup float * to = sums + r*step;
        if (lane == 0) {
            to[0] = soft[r].largest;
            to[1] = soft[r].sum;
        }
        for (uint i = 0; i < lane_values; ++i) {
            if (lane + 32*i < v_width) {
                to[2 + lane + 32*i] = acc[r*lane_values + i];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = simdgroup; r < used; r += simdgroups) {
        kv_softmax all;
        all.largest = sums[r*step];
        all.sum = sums[r*step + 1];
        const uint head = first_head + r;
        kv_attn_end(args, sums + r*step + 2, all, sinks, head, kv_attn_result(args, dst, head, token, stream), lane);
    }
}

// The cell of a column, or that there is none.
static inline long kv_column_cell(constant kv_recent_args & args, device const uchar * columns, uint column, uint kv_stream) {
    const long cell = *(device const long *) (columns + column*args.columns_nb[0] + kv_stream*args.columns_nb[1]);
    return cell >= 0 && cell < (long) args.cells ? cell : -1;
}

// Bits of cells that have precise rows: a threadgroup for KV_COLUMNS_CELLS cells of a KV stream.
kernel void kv_attn_hidden(
        constant kv_recent_args & args [[buffer(0)]],
        device const uchar * columns [[buffer(1)]],
        device uint * hidden [[buffer(3)]],
        threadgroup uchar * flags [[threadgroup(0)]],
        uint3 group [[threadgroup_position_in_grid]],
        uint thread_index [[thread_index_in_threadgroup]],
        uint3 threads [[threads_per_threadgroup]]) {
    const uint first = group.x*KV_COLUMNS_CELLS;
    for (uint i = thread_index; i < KV_COLUMNS_CELLS; i += threads.x) {
        flags[i] = 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < args.columns; i += threads.x) {
        const long cell = kv_column_cell(args, columns, i, group.y);
        if (cell >= (long) first && cell < (long) (first + KV_COLUMNS_CELLS)) {
            flags[cell - (long) first] = 1;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < KV_COLUMNS_CELLS/32; i += threads.x) {
        uint word = 0;
        for (uint n = 0; n < 32; ++n) {
            word |= (uint) flags[32*i + n] << n;
        }
        if (first/32 + i < args.hidden_words) {
            hidden[group.y*args.hidden_words + first/32 + i] = word;
        }
    }
}

// The mask of the columns: a threadgroup for a token, a head of the mask and a query stream.
kernel void kv_attn_columns(
        constant kv_recent_args & args [[buffer(0)]],
        device const uchar * columns [[buffer(1)]],
        device const uchar * mask [[buffer(2)]],
        device uchar * rows [[buffer(4)]],
        uint3 group [[threadgroup_position_in_grid]],
        uint thread_index [[thread_index_in_threadgroup]],
        uint3 threads [[threads_per_threadgroup]]) {
    const uint token = group.x, head = group.y, stream = group.z, kv_stream = stream/(args.streams/args.kv_streams);
    device const ushort * from =
        (device const ushort *) (mask + token*args.mask_nb[0] + head*args.mask_nb[1] + stream % args.mask_rows[1]*args.mask_nb[2]);
    device ushort * to =
        (device ushort *) (rows + (((ulong) stream*args.mask_rows[0] + head)*args.tokens + token)*args.row_bytes);
    for (uint i = thread_index; i < args.columns; i += threads.x) {
        const long cell = kv_column_cell(args, columns, i, kv_stream);
        const ushort gone = 0xfc00; // -inf
        to[i] = cell < 0 ? gone : FC_attn_mask ? from[cell] : (ushort) 0;
    }
}

// One simdgroup for a query head and token.
kernel void kv_attn_merge(
        constant kv_attn_args & args [[buffer(0)]],
        device const float * sinks [[buffer(5)]],
        device uchar * dst [[buffer(6)]],
        device const float * partials [[buffer(7)]],
        threadgroup float * o [[threadgroup(0)]],
        uint3 group [[threadgroup_position_in_grid]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint head = group.x, token = group.y, stream = group.z, size = kv_width(FC_attn_v_kind, FC_attn_v_size);
    const uint narrow = FC_attn_v_size; // precise rows have nothing in turbo's second half
    const ulong at = (((ulong) stream*args.tokens + token)*args.heads + head)*args.chunks;
    device const float * partial = partials + at*(size + 2);
    kv_softmax all;
    all.largest = KV_HIDDEN;
    all.sum = 0.0f;
    for (uint c = lane; c < args.chunks; c += 32) {
        all.largest = max(all.largest, partial[c*(size + 2)]);
    }
    all.largest = simd_max(all.largest);
    for (uint c = lane; c < args.chunks; c += 32) {
        device const float * p = partial + c*(size + 2);
        all.sum += p[1]*kv_rescale(p[0], all.largest);
    }
    all.sum = simd_sum(all.sum);
    for (uint i = lane; i < size; i += 32) {
        float sum = 0.0f;
        for (uint c = 0; c < (i < narrow ? args.chunks : args.main_chunks); ++c) {
            device const float * p = partial + c*(size + 2);
            sum = fma(p[2 + i], kv_rescale(p[0], all.largest), sum);
        }
        o[i] = sum;
    }
    kv_attn_end(args, o, all, sinks, head, kv_attn_result(args, dst, head, token, stream), lane);
}
