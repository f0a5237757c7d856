// Attention over compressed rows, what decoding and prefill share: the query into K's domain, the score of a cell, the
// softmax under way, and the end of a row.

#pragma once

#include "kv_args.h"
#include "kv_rotation.h"
#include "kv_row.h"

#include <metal_stdlib>
using namespace metal;

constant uint FC_attn_k_kind [[function_constant(10)]];
constant uint FC_attn_v_kind [[function_constant(11)]];
constant uint FC_attn_k_size [[function_constant(12)]];
constant uint FC_attn_v_size [[function_constant(13)]];
constant bool FC_attn_mask [[function_constant(14)]];
constant bool FC_attn_softcap [[function_constant(15)]];
constant bool FC_attn_sinks [[function_constant(16)]];
constant bool FC_attn_alibi [[function_constant(17)]];

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

// What the mask adds to the score of a cell, KV_HIDDEN where it must not be seen. `mask` is the row of the token.
static inline float kv_attn_bias(constant kv_attn_args & args, device const uchar * mask, uint head, uint cell) {
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
    for (uint i = lane; i < size; i += 32) {
        o[i] *= factor;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (!kv_is_srft(FC_attn_v_kind)) {
        for (uint i = lane; i < args.out_size; i += 32) {
            result[i] = o[i];
        }
        return;
    }
    float2 z[KV_ROTATION_VALUES];
    kv_rotate_back(o, size, lane, z);
    const uint lanes = kv_rotation_lanes(size), values = kv_rotation_values(size);
    const uint first = 2*values*kv_rotation_reversed(size, lane % lanes);
    for (uint i = 0; i < 2*values; ++i) {
        if (lane < lanes && first + i < args.out_size) {
            result[first + i] = z[i/2][i % 2];
        }
    }
}

static inline device float * kv_attn_result(constant kv_attn_args & args, device uchar * dst, uint head, uint token, uint stream) {
    return (device float *) (dst + head*args.dst_nb[0] + token*args.dst_nb[1] + stream*args.dst_nb[2]);
}

// The query of one head, in K's domain.
static inline void kv_attn_query(device const float * from, uint lane, threadgroup float * q) {
    const uint size = FC_attn_k_size;
    if (!kv_is_srft(FC_attn_k_kind)) {
        for (uint i = lane; i < size; i += 32) {
            q[i] = from[i];
        }
        return;
    }
    float2 z[KV_ROTATION_VALUES];
    const uint lanes = kv_rotation_lanes(size);
    for (uint p = 0; p < kv_rotation_values(size); ++p) {
        const uint i = 2*(p*lanes + lane % lanes);
        z[p] = float2(from[i]*kv_sign(size, i), from[i + 1]*kv_sign(size, i + 1));
    }
    kv_rotate(z, size, lane, q);
}
