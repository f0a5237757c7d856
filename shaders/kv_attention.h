// Attention over compressed rows: scores from levels and scales as stored, values summed as stored.
//
// A lane takes a whole cell for the scores: it unpacks each byte of the row once, in registers, and multiplies it into
// the queries of all the heads that share the KV head, which lie in threadgroup memory where all lanes read the same
// place at the same time. So scores need no sum over lanes. For the values it is the other way round: a lane takes every
// 32nd value of the row, neighbours read neighbouring bytes, and the weights of a cell are the same for all.

#pragma once

#include "kv_row.h"

#include <metal_stdlib>
using namespace metal;

// s[r] = q[r] . row for `rows` queries of `size` values each.
static inline void kv_scores(
        device const uchar * row, uint kind, uint size, threadgroup const float * q, uint rows,
        threadgroup const float * levels, thread float * s) {
    for (uint r = 0; r < rows; ++r) {
        s[r] = 0.0f;
    }
    if (kind == KV_KIND_F16) {
        for (uint i = 0; i < size/4; ++i) {
            const float4 k = (float4) ((device const half4 *) row)[i];
            for (uint r = 0; r < rows; ++r) {
                s[r] += dot(k, ((threadgroup const float4 *) (q + r*size))[i]);
            }
        }
        return;
    }
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
                for (uint r = 0; r < rows; ++r) {
                    s[r] += dot(k, *(threadgroup const float4 *) (q + r*size + start + at));
                }
            }
        }
        start += chunk.count;
    }
}

// ALiBi.
static inline float kv_slope(constant kv_attn_args & args, uint head) {
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
