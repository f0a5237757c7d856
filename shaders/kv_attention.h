// Attention over compressed rows, what decoding and prefill share: the query into K's domain, the score of a cell, the
// softmax under way, and the end of a row.

#pragma once

#include "kv_args.h"
#include "kv_delta.h"
#include "kv_rotation.h"
#include "kv_row.h"
#include "kv_signs.h"

#include <metal_stdlib>
using namespace metal;

constant int FC_attn_k_kind [[function_constant(10)]];
constant int FC_attn_v_kind [[function_constant(11)]];
constant int FC_attn_k_size [[function_constant(12)]];
constant int FC_attn_v_size [[function_constant(13)]];
constant bool FC_attn_mask [[function_constant(14)]];
constant bool FC_attn_softcap [[function_constant(15)]];
constant bool FC_attn_sinks [[function_constant(16)]];
constant bool FC_attn_alibi [[function_constant(17)]];
constant bool FC_attn_whole [[function_constant(19)]]; // one chunk and no precise rows: no second step
constant int FC_attn_q_kind [[function_constant(20)]]; // KV_KIND_F32 or KV_KIND_F16
constant bool FC_attn_hides [[function_constant(21)]]; // cells that have precise rows are left out

// ALiBi.
static inline float kv_attn_slope(constant kv_attn_args & args, uint head) {
    if (!FC_attn_alibi) {
        return 1.0f;
    }
    const uint base = args.slope_heads;
    return head < base ? pow(args.slope_low, (float) (head + 1)) : pow(args.slope_high, (float) (2*(head - base) + 1));
}

// The score of a cell that is hidden, or of none at all. A finite number: Metal's fast mathematics may take infinities for
// something that does not happen.
#define KV_HIDDEN (-0.5f*FLT_MAX)

// A softmax that is under way: the largest score, and the sum of exponentials relative to it.
struct kv_softmax {
    float largest;
    float sum;
};

// The factor that brings sums relative to `from` to the larger score `to`. Without any score there is nothing to bring.
static inline float kv_rescale(float from, float to) {
    return from <= KV_HIDDEN ? 0.0f : exp(from - to);
}

// What the mask adds to the score of a cell, KV_HIDDEN where it must not be seen. `mask` is the row of the token, `hidden` the
// bits of the KV stream's cells.
static inline float kv_attn_bias(
        constant kv_attn_args & args, device const uchar * mask, device const uint * hidden, uint head, uint cell) {
    if (FC_attn_hides && (hidden[cell/32] >> cell % 32 & 1) != 0) {
        return KV_HIDDEN;
    }
    if (!FC_attn_mask) {
        return 0.0f;
    }
    const half m = ((device const half *) (mask + head % args.mask_rows[0]*args.mask_nb[1]))[cell];
    return m > -MAXHALF ? (float) m : KV_HIDDEN;
}

static inline float kv_attn_score(constant kv_attn_args & args, float product, float bias, float slope) {
    if (bias == KV_HIDDEN) {
        return KV_HIDDEN;
    }
    float score = product*args.scale;
    if (FC_attn_softcap) {
        score = args.softcap*precise::tanh(score/args.softcap);
    }
    return score + slope*bias;
}

// From the sums of one query row, in the simdgroup's own threadgroup memory, to the result.
static inline void kv_attn_end(
        constant kv_attn_args & args, threadgroup float * o, kv_softmax soft, device const float * sinks, uint head,
        device float * result, uint lane) {
    const uint size = FC_attn_v_size;
    float factor = 1.0f;
    if (FC_attn_sinks) {
        const float sink = sinks[head];
        if (sink > soft.largest) {
            factor = kv_rescale(soft.largest, sink);
            soft.sum *= factor;
            soft.largest = sink;
        }
        soft.sum += kv_rescale(sink, soft.largest);
    }
    // A row that sees no cell is zero.
    factor = soft.sum == 0.0f ? 0.0f : factor/soft.sum;
    for (uint i = lane; i < kv_width(FC_attn_v_kind, size); i += 32) {
        o[i] *= factor;
    }
    if (kv_is_plain(FC_attn_v_kind)) {
        // Each lane reads what it has written.
        for (uint i = lane; i < args.out_size; i += 32) {
            result[i] = o[i];
        }
        return;
    }
    kv_leave_domain(o, FC_attn_v_kind, size, lane);
    float2 z[KV_ROTATION_VALUES];
    kv_rotate_back(o, size, KV_SIGNS_ROTATION, lane, z);
    const uint first = kv_rotated_first(size, lane);
    for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
        if (lane < kv_rotation_lanes(size) && first + i < args.out_size) {
            result[first + i] = z[i/2][i % 2];
        }
    }
}

// Where the partial result of a chunk goes: the largest score, the sum, and the vector.
static inline device float * kv_attn_partial(
        constant kv_attn_args & args, device float * partials, uint head, uint token, uint stream, uint chunk) {
    const ulong at = (((ulong) stream*args.tokens + token)*args.heads + head)*args.chunks + args.first_chunk + chunk;
    return partials + at*(args.sum_width + 2);
}

static inline device float * kv_attn_result(constant kv_attn_args & args, device uchar * dst, uint head, uint token, uint stream) {
    return (device float *) (dst + head*args.dst_nb[0] + token*args.dst_nb[1] + stream*args.dst_nb[2]);
}

// The query of one head, in K's domain: q takes K's width.
static inline void kv_attn_query(device const uchar * from, uint lane, threadgroup float * q) {
    const uint size = FC_attn_k_size, step = kv_float_bytes(FC_attn_q_kind);
    for (uint i = lane; i < size; i += 32) {
        q[i] = kv_float_at(from + i*step, FC_attn_q_kind);
    }
    kv_enter_domain(q, FC_attn_k_kind, size, lane);
}
