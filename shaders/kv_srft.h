// srft8, srft4, srft3, srft2: the row format of ggml-ext/src/codec/srft.rs.
//
//     row    = scales: f16 x groups | codes of chunk 0 | codes of chunk 1 | ...
//     chunks = 64 values while 64 remain, then 32, then 16
//
// A code is an index into a table of levels and decodes to level * scale / 128. Tables, search and refit are the
// definition's; sums run over lanes in another order, so a code may differ where a value lies within float rounding of
// the middle between two levels.

#pragma once

#include "kv_args.h"

#include <metal_stdlib>
using namespace metal;

#define KV_SRFT_UNIT 128.0f

constant float kv_levels_4[16] = { -127.0f, -98.0f, -78.0f, -61.0f, -46.0f, -32.0f, -19.0f, -7.0f,
                                   6.0f,    18.0f,  31.0f,  44.0f,  57.0f,  72.0f,  90.0f,  112.0f };
constant float kv_levels_3[8] = { -127.0f, -77.0f, -44.0f, -17.0f, 8.0f, 34.0f, 63.0f, 101.0f };
constant float kv_levels_2[4] = { -127.0f, -44.0f, 18.0f, 88.0f };
// Scales that are tried, relative to the one that maps the largest value to the first level.
constant float kv_search_4[5] = { 0.85f, 0.9175f, 0.985f, 1.0525f, 1.12f };
constant float kv_search_3[5] = { 0.75f, 0.85f, 0.95f, 1.05f, 1.15f };
constant float kv_search_2[5] = { 0.6f, 0.75f, 0.9f, 1.05f, 1.2f };

// Bits of a code in a row of levels: srft's, delta's differences, turbo's first stage.
static inline uint kv_code_bits(uint kind) {
    if (kind == KV_KIND_SRFT8) {
        return 8;
    }
    if (kind == KV_KIND_SRFT4 || kind == KV_KIND_DELTA4) {
        return 4;
    }
    return kind == KV_KIND_SRFT3 || kind == KV_KIND_DELTA3 || kind == KV_KIND_TURBO4 ? 3 : 2;
}

static inline constant float * kv_srft_levels(uint bits) {
    return bits == 4 ? kv_levels_4 : bits == 3 ? kv_levels_3 : kv_levels_2;
}

// Values that share a scale.
static inline uint kv_srft_group(uint size) {
    return size % 32 == 0 ? 32 : 16;
}

static inline uint kv_srft_scale_bytes(uint size) {
    return size/kv_srft_group(size)*2;
}

// The chunk of value i: its first value and how many it has.
static inline uint2 kv_srft_chunk(uint size, uint i) {
    const uint whole = size/64*64;
    if (i < whole) {
        return uint2(i/64*64, 64);
    }
    const bool has_32 = size % 64 >= 32;
    if (has_32 && i < whole + 32) {
        return uint2(whole, 32);
    }
    return uint2(has_32 ? whole + 32 : whole, 16);
}

// Byte b of the codes of a row, from one code per value.
static inline uchar kv_srft_packed(threadgroup const uchar * codes, uint bits, uint size, uint b) {
    const uint2 chunk = kv_srft_chunk(size, b*8/bits);
    const uint j = b - chunk.x*bits/8, c = chunk.y;
    threadgroup const uchar * code = codes + chunk.x;
    if (bits == 8) {
        return code[j];
    }
    if (bits == 4) {
        return code[j] | code[j + c/2] << 4;
    }
    if (j < c/4) {
        return (code[j] & 3) | (code[j + c/4] & 3) << 2 | (code[j + c/2] & 3) << 4 | (code[j + 3*c/4] & 3) << 6;
    }
    uint high = 0;
    for (uint bit = 0; bit < 8; ++bit) {
        high |= (uint) (code[8*(j - c/4) + bit] >> 2) << bit;
    }
    return (uchar) high;
}

// Values of a lane while a row is encoded: a power of two, so that a group is a power of two of lanes.
static inline uint kv_srft_lane_values(uint size) {
    return size == 64 ? 2 : size <= 128 ? 4 : size <= 256 ? 8 : size <= 512 ? 16 : 32;
}

#define KV_SRFT_LANE_VALUES 32

// Over the lanes of a group.
static inline float2 kv_group_sum(float2 x, uint lanes) {
    for (uint m = 1; m < lanes; m *= 2) {
        x += simd_shuffle_xor(x, (ushort) m);
    }
    return x;
}

static inline float2 kv_group_max(float2 x, uint lanes) {
    for (uint m = 1; m < lanes; m *= 2) {
        x = max(x, simd_shuffle_xor(x, (ushort) m));
    }
    return x;
}

// The place of the level that is nearest to y.
static inline uint kv_nearest(constant float * levels, uint count, float y) {
    uint code = 0;
    for (uint i = 1; i < count; ++i) {
        code = y > 0.5f*(levels[i - 1] + levels[i]) ? i : code;
    }
    return code;
}

// A scale as it is stored: flags in bit 0 of the first two, where there are any.
static inline ushort kv_srft_stored(float scale, uint group, uint flags) {
    const ushort stored = as_type<ushort>((half) clamp(scale*KV_SRFT_UNIT, -65504.0f, 65504.0f));
    if (flags == 0 || group > 1) {
        return stored;
    }
    return (stored & 0xfffe) | (flags >> group & 1);
}

// A rotated row, in the simdgroup's own threadgroup memory, to its bytes. The memory is used up. `flags` are bit 0 of scales 0
// and 1; zero for rows that have none.
static inline void kv_srft_encode(threadgroup float * y, uint bits, uint size, uint flags, uint lane, device uchar * row) {
#pragma METAL fp math_mode(safe)
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint group = kv_srft_group(size);
    const uint count = kv_srft_lane_values(size), lanes = group/count;
    const uint first_value = lane*count;
    const bool mine = first_value < size;
    float x[KV_SRFT_LANE_VALUES];
    float top = -FLT_MAX, bottom = FLT_MAX;
    for (uint i = 0; i < count; ++i) {
        x[i] = mine ? y[first_value + i] : 0.0f;
        top = max(top, x[i]);
        bottom = min(bottom, x[i]);
    }
    const float2 ends = kv_group_max(float2(top, -bottom), lanes);
    // Everybody has read; the memory can take the codes.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup uchar * codes = (threadgroup uchar *) y;
    float scale = 0.0f;
    const bool empty = max(ends.x, ends.y) < 1e-9f;
    if (bits == 8) {
        const float largest = max(ends.x, ends.y);
        const float inverse = 127.0f/largest;
        for (uint i = 0; i < count; ++i) {
            if (mine) {
                codes[first_value + i] = empty ? (uchar) 0 : (uchar) (int) rint(x[i]*inverse);
            }
        }
        scale = largest/127.0f;
    } else {
        const auto levels = kv_srft_levels(bits);
        const auto search = bits == 4 ? kv_search_4 : bits == 3 ? kv_search_3 : kv_search_2;
        const uint level_count = 1u << bits;
        // The largest value, sign included, goes to the first level.
        const float largest = ends.y > ends.x ? -ends.y : ends.x;
        const float first = largest/levels[0];
        float best = first, gain = -1.0f;
        for (uint s = 0; s < 5; ++s) {
            const float inverse = 1.0f/(first*search[s]);
            float2 sums = float2(0.0f);
            for (uint i = 0; i < count; ++i) {
                const float q = levels[kv_nearest(levels, level_count, x[i]*inverse)];
                sums = fma(float2(x[i], q), float2(q), sums);
            }
            sums = kv_group_sum(sums, lanes);
            // The squared error is sum(x^2) - sum(x q)^2 / sum(q^2).
            const float g = sums.x*sums.x/sums.y;
            if (g > gain) {
                gain = g;
                best = sums.x/sums.y;
            }
        }
        const float inverse = 1.0f/best;
        float2 sums = float2(0.0f);
        for (uint i = 0; i < count; ++i) {
            const uint code = kv_nearest(levels, level_count, x[i]*inverse);
            sums = fma(float2(x[i]), float2(x[i], levels[code]), sums);
            if (mine) {
                codes[first_value + i] = empty ? (uchar) 0 : (uchar) code;
            }
        }
        sums = kv_group_sum(sums, lanes);
        // Without bias: sum(x^2) / sum(x q).
        scale = sums.x/sums.y;
    }
    if (mine && first_value % group == 0) {
        ((device ushort *) row)[first_value/group] = kv_srft_stored(empty ? 0.0f : scale, first_value/group, flags);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    device uchar * body = row + kv_srft_scale_bytes(size);
    for (uint b = lane; b < size*bits/8; b += 32) {
        body[b] = kv_srft_packed(codes, bits, size, b);
    }
}
