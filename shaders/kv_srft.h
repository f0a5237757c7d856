// srft8, srft4, srft3, srft2: the row format of ggml-ext/src/codec/srft.rs. Also levels and scales of groups whose codes have any
// number of bits, which bands are made of.
//
//     row    = scales: a byte for each group, padded to an even number, or (8 bits) f16 x groups | codes of chunk 0 | ...
//     chunks = 64 values while 64 remain, then 32, then 16
//
// A code is an index into a table of levels and decodes to level * scale * unit. Tables and search are the definition's;
// sums run over lanes in another order, so a scale may differ where two fit a group equally well, and a code where a value
// lies within float rounding of the middle between two levels.

#pragma once

#include "kv_args.h"

#include <metal_stdlib>
using namespace metal;

// Stored scales are relative to this.
#define KV_SRFT_UNIT 128.0f
// Fitting shrinks values by this part on average: they are read so much larger.
#define KV_SRFT_KAPPA_5 1.0015f
#define KV_SRFT_KAPPA_4 1.0059f
#define KV_SRFT_KAPPA_3 1.0251f
#define KV_SRFT_KAPPA_2 1.1079f

// By code: a sign and a place among sixteen magnitudes, whose complement a code with a sign has. All others ascend.
constant float kv_levels_5[32] = { 2.0f,   8.0f,   14.0f,  20.0f,  26.0f,  32.0f,  38.0f,  44.0f,  51.0f,  58.0f,  66.0f,
                                   75.0f,  85.0f,  96.0f,  109.0f, 126.0f, -3.0f,  -9.0f,  -15.0f, -21.0f, -27.0f, -33.0f,
                                   -39.0f, -45.0f, -52.0f, -59.0f, -67.0f, -76.0f, -86.0f, -97.0f, -110.0f, -127.0f };
constant float kv_levels_4[16] = { -127.0f, -96.0f, -76.0f, -59.0f, -45.0f, -33.0f, -21.0f, -9.0f,
                                   3.0f,    15.0f,  28.0f,  41.0f,  56.0f,  72.0f,  92.0f,  117.0f };
constant float kv_levels_3[8] = { -127.0f, -77.0f, -44.0f, -17.0f, 8.0f, 34.0f, 63.0f, 101.0f };
constant float kv_levels_2[4] = { -127.0f, -44.0f, 18.0f, 88.0f };
constant float kv_levels_1[2] = { -127.0f, 77.0f };
// Scales that are tried, in steps of their code from the one that maps the largest value to the first level, and from the one
// that maps it to the last; for codes of 1 to 4 bits. Of 4 bits there are three, and the last of them again.
#define KV_SRFT_TRIES 4
#define KV_SRFT_TRIES_4 3 // of 4 bits
constant int kv_search[4][2][KV_SRFT_TRIES] = { { { -12, -10, -9, -7 }, { -17, -15, -13, -11 } },
                                                { { -5, -3, -2, -1 }, { -7, -6, -5, -4 } },
                                                { { -2, -1, 0, 1 }, { -3, -2, -1, 0 } },
                                                { { -1, 0, 1, 1 }, { -1, 0, 1, 1 } } };

// Bits of a code in a row of levels, of bands the mean: srft's, delta's differences, turbo's first stage.
static inline uint kv_code_bits(uint kind) {
    if (kind == KV_KIND_SRFT8 || kind == KV_KIND_DELTA8) {
        return 8;
    }
    if (kind == KV_KIND_SRFT4 || kind == KV_KIND_DELTA4 || kind == KV_KIND_BAND4) {
        return 4;
    }
    return kind == KV_KIND_SRFT3 || kind == KV_KIND_DELTA3 || kind == KV_KIND_BAND3 || kind == KV_KIND_TURBO4 ? 3 : 2;
}

// Levels in ascending order, of 1 to 4 bits.
static inline constant float * kv_srft_levels(uint bits) {
    return bits == 4 ? kv_levels_4 : bits == 3 ? kv_levels_3 : bits == 2 ? kv_levels_2 : kv_levels_1;
}

// Values that share a scale.
static inline uint kv_srft_group(uint size) {
    return size % 32 == 0 ? 32 : 16;
}

// Bytes of the scales of a row, which come first.
static inline uint kv_srft_scale_bytes(uint bits, uint size) {
    const uint groups = size/kv_srft_group(size);
    return bits == 8 ? 2*groups : (groups + 1)/2*2;
}

// What a level times its scale is multiplied by.
static inline float kv_srft_unit(uint bits) {
    const float kappa = bits == 8   ? 1.0f
                        : bits == 5 ? KV_SRFT_KAPPA_5
                        : bits == 4 ? KV_SRFT_KAPPA_4
                        : bits == 3 ? KV_SRFT_KAPPA_3
                                    : KV_SRFT_KAPPA_2;
    return kappa/KV_SRFT_UNIT;
}

// The scale of a byte: 0, or (1 + (c & 7)/8) * 2^((c >> 3) - 7) for c in the lower seven bits, negative where the upper is set.
static inline float kv_srft_scale(uint code) {
    const uint c = code & 127;
    return c == 0 ? 0.0f : as_type<float>(((c << 20) + (120u << 23)) | (code & 128) << 24);
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

// Scales that are tried for each end of the table.
static inline uint kv_srft_tries(uint bits) {
    return bits == 4 ? KV_SRFT_TRIES_4 : KV_SRFT_TRIES;
}

// The code of scale number `which` of those that are tried for a group with this largest value, sign included: `last` where it is
// to go towards the last level, else towards the first.
static inline uint kv_srft_try(float largest, uint bits, bool last, uint which) {
    const auto levels = kv_srft_levels(bits);
    const float end = last ? levels[(1u << bits) - 1] : -levels[0];
    const uint base = as_type<uint>(fabs(largest)*KV_SRFT_UNIT/end);
    const int code = clamp((int) (base >> 20) - (120 << 3) + kv_search[bits - 1][last][which], 1, 127);
    return (uint) code | ((largest < 0.0f) == last ? 128u : 0u);
}

// A rotated row, in the simdgroup's own threadgroup memory, to its bytes. The memory is used up.
static inline void kv_srft_encode(threadgroup float * y, uint bits, uint size, uint lane, device uchar * row) {
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
    const bool first_lane = mine && first_value % group == 0;
    if (bits == 8) {
        const float largest = max(ends.x, ends.y);
        const bool empty = largest < 1e-9f;
        const float inverse = 127.0f/largest;
        for (uint i = 0; i < count; ++i) {
            if (mine) {
                codes[first_value + i] = empty ? (uchar) 0 : (uchar) (int) rint(x[i]*inverse);
            }
        }
        if (first_lane) {
            const float scale = empty ? 0.0f : largest/127.0f*KV_SRFT_UNIT;
            ((device ushort *) row)[first_value/group] = as_type<ushort>((half) min(scale, 65504.0f));
        }
    } else {
        const auto levels = kv_srft_levels(bits);
        const uint level_count = 1u << bits;
        const float largest = ends.y > ends.x ? -ends.y : ends.x;
        // The squared error is sum(x^2) - gain.
        uint best = 0;
        float gain = 0.0f;
        for (uint n = 0; n < 2*kv_srft_tries(bits); ++n) {
            const bool last = n >= kv_srft_tries(bits);
            const uint code = kv_srft_try(largest, bits, last, last ? n - kv_srft_tries(bits) : n);
            const float scale = kv_srft_scale(code)/KV_SRFT_UNIT, inverse = 1.0f/scale;
            float2 sums = float2(0.0f);
            for (uint i = 0; i < count; ++i) {
                const float q = levels[kv_nearest(levels, level_count, x[i]*inverse)];
                sums = fma(float2(x[i], q), float2(q), sums);
            }
            sums = kv_group_sum(sums, lanes);
            const float g = scale*(2.0f*sums.x - scale*sums.y);
            if (g > gain) {
                gain = g;
                best = code;
            }
        }
        const float inverse = best == 0 ? 0.0f : KV_SRFT_UNIT/kv_srft_scale(best);
        for (uint i = 0; i < count; ++i) {
            if (mine) {
                codes[first_value + i] = best == 0 ? (uchar) 0 : (uchar) kv_nearest(levels, level_count, x[i]*inverse);
            }
        }
        if (first_lane) {
            row[first_value/group] = (uchar) best;
        }
        const uint groups = size/group;
        if (lane == 0 && groups % 2 != 0) {
            row[groups] = 0;
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    device uchar * body = row + kv_srft_scale_bytes(bits, size);
    for (uint b = lane; b < size*bits/8; b += 32) {
        body[b] = kv_srft_packed(codes, bits, size, b);
    }
}
