// Rows of signs: turbo4, turbo3 and qjl1, the formats of ggml-ext/src/codec/turbo.rs and qjl.rs.
//
//     turbo   row = rms of the row: f16 | rms of the residual: f16 | codes of stage 1 as srft packs 3 and 2 bits | signs
//     qjl1    row = rms of the row: f16 | signs
//     signs   of value i in bit i%8 of byte i/8, set where it is negative
//
// turbo's rows are twice as wide as the head: the values of stage 1, and the signs of the projected residual.

#pragma once

#include "kv_rotation.h"
#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

// Levels of stage 1, in standard deviations: the definition's 8-bit levels by its unit.
constant float kv_turbo_levels_3[8] = { -88.0f/40.91f, -55.0f/40.91f, -31.0f/40.91f, -10.0f/40.91f,
                                        10.0f/40.91f,  31.0f/40.91f,  55.0f/40.91f,  88.0f/40.91f };
constant float kv_turbo_levels_2[4] = { -110.0f/72.83f, -33.0f/72.83f, 33.0f/72.83f, 110.0f/72.83f };

#define KV_TURBO_NORM_BYTES 4
#define KV_QJL_NORM_BYTES 2

static inline constant float * kv_turbo_levels(uint kind) {
    return kind == KV_KIND_TURBO4 ? kv_turbo_levels_3 : kv_turbo_levels_2;
}

// Where the signs of a row begin.
static inline uint kv_sign_offset(uint kind, uint size) {
    return kind == KV_KIND_QJL1 ? KV_QJL_NORM_BYTES : KV_TURBO_NORM_BYTES + size*kv_code_bits(kind)/8;
}

// A stored norm; any bytes give something finite.
static inline float kv_norm(device const uchar * row, uint which) {
    const ushort stored = ((device const ushort *) row)[which];
    return (stored & 0x7c00) != 0x7c00 ? (float) as_type<half>(stored) : 0.0f;
}

// The magnitude of the values that the signs stand for.
static inline float kv_sign_magnitude(device const uchar * row, uint kind, uint size) {
    return kv_norm(row, kind == KV_KIND_QJL1 ? 0 : 1)*kv_mean_magnitudes[kv_size_index(size)];
}

static inline float kv_signed(device const uchar * row, uint kind, uint size, uint i, float magnitude) {
    return (row[kv_sign_offset(kind, size) + i/8] >> i % 8 & 1) != 0 ? -magnitude : magnitude;
}

// The root mean square of `size` values that the simdgroup has written.
static inline float kv_rms(threadgroup const float * y, uint size, uint lane) {
    float sum = 0.0f;
    for (uint i = lane; i < size; i += 32) {
        sum = fma(y[i], y[i], sum);
    }
    return sqrt(simd_sum(sum)/size);
}

// Stores a norm and returns what a reader will find.
static inline float kv_store_norm(device uchar * row, uint which, float norm, uint lane) {
    const half stored = (half) min(norm, 65504.0f);
    if (lane == 0) {
        ((device half *) row)[which] = stored;
    }
    return (float) stored;
}

static inline void kv_store_signs(threadgroup const float * y, uint size, uint lane, device uchar * signs) {
    for (uint b = lane; b < size/8; b += 32) {
        uint byte = 0;
        for (uint i = 0; i < 8; ++i) {
            byte |= (uint) (y[8*b + i] < 0.0f) << i;
        }
        signs[b] = (uchar) byte;
    }
}

// Both transforms of the projection, in place.
static inline void kv_project(threadgroup float * y, uint size, float factor, uint lane) {
    kv_rotate_from(y, size, KV_SIGNS_FIRST, 1.0f, lane, y);
    kv_rotate_from(y, size, KV_SIGNS_SECOND, factor, lane, y);
}

// The way back.
static inline void kv_project_back(threadgroup float * y, uint size, uint lane) {
    kv_rotate_back_in_place(y, size, KV_SIGNS_SECOND, lane);
    kv_rotate_back_in_place(y, size, KV_SIGNS_FIRST, lane);
}

// A row behind the projection, in the simdgroup's own threadgroup memory, to its bytes.
static inline void kv_qjl_encode(threadgroup const float * y, uint size, uint lane, device uchar * row) {
#pragma METAL fp math_mode(safe)
    simdgroup_barrier(mem_flags::mem_threadgroup);
    kv_store_norm(row, 0, kv_rms(y, size, lane), lane);
    kv_store_signs(y, size, lane, row + KV_QJL_NORM_BYTES);
}

// A rotated row, in the simdgroup's own threadgroup memory, to its bytes. The memory is used up; `codes` has room for a byte a
// value.
static inline void kv_turbo_encode(threadgroup float * y, threadgroup uchar * codes, uint kind, uint size, uint lane, device uchar * row) {
#pragma METAL fp math_mode(safe)
    const uint bits = kv_code_bits(kind);
    const auto levels = kv_turbo_levels(kind);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float scale = kv_store_norm(row, 0, kv_rms(y, size, lane), lane);
    const float inverse = scale > 0.0f ? 1.0f/scale : 0.0f;
    for (uint i = lane; i < size; i += 32) {
        const uint code = kv_nearest(levels, 1u << bits, y[i]*inverse);
        codes[i] = (uchar) code;
        y[i] = fma(levels[code], -scale, y[i]);
    }
    // Orders the codes too.
    kv_project(y, size, 1.0f, lane);
    for (uint b = lane; b < size*bits/8; b += 32) {
        row[KV_TURBO_NORM_BYTES + b] = kv_srft_packed(codes, bits, size, b);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    kv_store_norm(row, 1, kv_rms(y, size, lane), lane);
    kv_store_signs(y, size, lane, row + kv_sign_offset(kind, size));
}
