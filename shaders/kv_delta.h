// delta8, delta4, delta3, band4, band3, band2: the row format of ggml-ext/src/codec/delta.rs, rows that are differences from what their
// group makes expect.
//
//     u_t = d_t + RHO u_(t-1)    a chained row         row = scales and codes of d | its share of m: f16 x slots
//     u_t = d_t                  a restart row         kind: bits 0 and 1 of the row's first slot
//     u_t = d_t - m              a row alone           I-frame: bit 2 of the first slot of the group's first row
//
// with u = key - m in the domain of the row. So with w_t = q.d_t + RHO w_(t-1) the score of a cell is q.m + w_t, and over 32
// cells, one in each lane, the recursion is a scan of five shuffles.

#pragma once

#include "kv_row.h"

#include <metal_stdlib>
using namespace metal;

#define KV_DELTA_CELLS 64
#define KV_DELTA_RHO 0.7f
// An I-frame with a value beyond this is not used.
#define KV_DELTA_LIMIT 4096.0f

// What a row is, in the lowest bits of its first slot.
#define KV_DELTA_KIND 3
#define KV_DELTA_EMPTY 0
#define KV_DELTA_ALONE 1
#define KV_DELTA_RESTART 2
#define KV_DELTA_CHAINED 3
// In the first slot of a group's first row: there is an I-frame.
#define KV_DELTA_FRAMED 4
// The bits of a slot that are not part of m.
#define KV_DELTA_FLAGS 7

// Values of the I-frame that a row carries.
static inline uint kv_delta_slots(uint size) {
    return (size + KV_DELTA_CELLS - 1)/KV_DELTA_CELLS;
}

// Where they begin.
static inline uint kv_delta_share(uint kind, uint size) {
    const uint bits = kv_code_bits(kind);
    return kv_srft_scale_bytes(bits, size) + size*bits/8;
}

// The slot of a row that holds its flags.
static inline ushort kv_delta_first_slot(device const uchar * row, uint kind, uint size) {
    return *(device const ushort *) (row + kv_delta_share(kind, size));
}

// What a row says it is.
static inline uint kv_delta_kind(device const uchar * row, uint kind, uint size) {
    return kv_delta_first_slot(row, kind, size) & KV_DELTA_KIND;
}

// Is there an I-frame in the group that begins with this row?
static inline bool kv_delta_framed(device const uchar * group, uint kind, uint size) {
    return (kv_delta_first_slot(group, kind, size) & KV_DELTA_FRAMED) != 0;
}

// The value of a slot. Any bits give something finite.
static inline float kv_delta_value(ushort slot) {
    const ushort bits = slot & ~KV_DELTA_FLAGS;
    return (bits & 0x7c00) != 0x7c00 ? (float) as_type<half>(bits) : 0.0f;
}

// A value as a slot without flags: to the nearest.
static inline ushort kv_delta_slot(float value) {
    return (as_type<ushort>((half) value) + (KV_DELTA_FLAGS + 1)/2) & ~KV_DELTA_FLAGS;
}

// Value i of the I-frame of a group of `rows` rows, `step` bytes apart.
static inline float kv_delta_frame(device const uchar * group, ulong step, uint kind, uint size, uint rows, uint i) {
    const uint slots = kv_delta_slots(size), row = i/slots;
    if (row >= rows || !kv_delta_framed(group, kind, size)) {
        return 0.0f;
    }
    return kv_delta_value(((device const ushort *) (group + row*step + kv_delta_share(kind, size)))[i % slots]);
}

// q.m, by a simdgroup.
static inline float kv_delta_base(
        device const uchar * group, ulong step, uint kind, uint size, uint rows, threadgroup const float * q, uint lane) {
    float sum = 0.0f;
    for (uint i = lane; i < size; i += 32) {
        sum = fma(q[i], kv_delta_frame(group, step, kind, size, rows, i), sum);
    }
    return simd_sum(sum);
}

// How 32 cells of a group hang together: what each lane needs to know for all queries.
struct kv_delta_chain {
    float factor[5]; // of the value 1, 2, 4, 8, 16 lanes before
    float carried;   // of what the 32 cells before left
    bool empty;
    bool alone;
};

// `stored` is the kind that the lane's row says it is; `begins` where the 32 cells are the first of their group, else
// `written_before` tells whether the cell before them is written.
static inline kv_delta_chain kv_delta_chain_of(uint stored, bool begins, bool written_before, uint lane) {
    kv_delta_chain chain;
    chain.empty = stored == KV_DELTA_EMPTY;
    chain.alone = stored == KV_DELTA_ALONE;
    const uint before = simd_shuffle_up((uint) !chain.empty, (ushort) 1);
    const bool written = lane == 0 ? !begins && written_before : before != 0;
    float factor = stored == KV_DELTA_CHAINED && written ? KV_DELTA_RHO : 0.0f;
    for (uint i = 0; i < 5; ++i) {
        const uint distance = 1u << i;
        const float other = simd_shuffle_up(factor, (ushort) distance);
        chain.factor[i] = lane >= distance ? factor : 0.0f;
        factor = lane >= distance ? factor*other : factor;
    }
    chain.carried = factor;
    return chain;
}

// From q.d of the lane's row to the score of its key without q.m, w; `carry` is the w of the cell before the 32.
static inline float kv_delta_follow(kv_delta_chain chain, float product, float base, float carry) {
    float w = chain.alone ? product - base : product;
    for (uint i = 0; i < 5; ++i) {
        w = fma(chain.factor[i], simd_shuffle_up(w, (ushort) (1u << i)), w);
    }
    return fma(chain.carried, carry, w);
}
