// band4, band3, band2: differences in bands of 32 values, as ggml-ext/src/codec/band.rs stores them.
//
//     row     = scales: a byte for each band | chunk 0 | chunk 1 | ...     a chunk is two bands, the second has two bits less
//     5 and 3   byte v: value v of the second band | value v of the first << 3
//     4 and 2   byte j: values j and j + 16 of the first band, 16 of them; then values j, j + 8, j + 16 and j + 24 of the second
//     3 and 1   byte j: values j and j + 16 << 4, each of them of the first band | of the second << 3
//
// A code of 5 bits is a sign and one of sixteen magnitudes; the level of a code with a sign is the complement, -1 - magnitude.
// Such a table is odd, so that its scale needs no sign: that bit is half a step.
//
// Levels of all widths are in one table, those of codes of b bits from place 2^b on.

#pragma once

#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

#define KV_BAND 32

// Scales that are tried for codes of 5 bits: how many, and the first of them, in half steps from the one that maps the largest
// value to the end of the table.
#define KV_BAND_TRIES_5 6
#define KV_BAND_FIRST_5 (-1)
#define KV_BAND_SIGN_5 16

// Where the codes of a band are.
struct kv_band {
    uint bits;  // of a code
    uint codes; // the first byte
    uint parts; // values that share a byte, 32/parts apart
    uint shift; // where the code of the first of them begins
};

static inline kv_band kv_band_at(uint kind, uint size, uint band) {
    const uint chunk = band/2, second = band % 2, half_of = size/(4*KV_BAND);
    // Half of the chunks have other widths.
    const bool mixed = kind == KV_KIND_BAND3 && size % (4*KV_BAND) == 0 && half_of > 1;
    const uint wide = !mixed ? kv_code_bits(kind) + 1 : chunk < half_of ? 5 : 3;
    const uint before = mixed && chunk >= half_of ? 32*half_of + 16*(chunk - half_of) : 8*(wide - 1)*chunk;
    kv_band res;
    res.bits = wide - 2*second;
    res.codes = size/KV_BAND + before + (wide == 4 ? 16*second : 0);
    res.parts = wide == 5 ? 1 : wide == 4 && second != 0 ? 4 : 2;
    res.shift = (wide == 5 && second == 0) || (wide == 3 && second != 0) ? 3 : 0;
    return res;
}

// The code of value v, given its byte.
static inline uint kv_band_code(uint bits, uint parts, uint shift, uint v, uint byte) {
    return byte >> (shift + 8/parts*(v/(KV_BAND/parts))) & ((1u << bits) - 1);
}

// The scale of a byte: kv_srft_scale, with half steps where codes have 5 bits.
static inline float kv_band_scale(uint bits, uint code) {
    const uint c = code & 127;
    return c == 0 ? 0.0f : as_type<float>((c << 20) + (120u << 23) + (code >> 7 << (bits == 5 ? 19 : 31)));
}

// What a level times its scale is multiplied by: the widest bands are not to shrink.
static inline float kv_band_unit(uint kind, uint size) {
    return kv_srft_unit(kv_band_at(kind, size, 0).bits);
}

// The table of levels, by the first 32 threads.
static inline void kv_band_levels(uint thread_index, threadgroup float * levels) {
    if (thread_index < 32) {
        levels[32 + thread_index] = kv_levels_5[thread_index];
        const uint bits = 31 - clz(thread_index | 2);
        levels[thread_index] = thread_index < 2 ? 0.0f : kv_srft_levels(bits)[thread_index - (1u << bits)];
    }
}

// The code of the level that is nearest to y, by halves: `levels` are those of its width. Of 5 bits they lie on both sides of
// -1/2, as far from it.
static inline uint kv_band_nearest(threadgroup const float * levels, uint bits, float y) {
    const bool odd = bits == 5;
    const float x = odd ? fabs(y + 0.5f) - 0.5f : y;
    uint code = 0;
    for (uint step = 1u << (odd ? 3 : bits - 1); step > 0; step /= 2) {
        const uint next = code + step;
        code = x > 0.5f*(levels[next - 1] + levels[next]) ? next : code;
    }
    return odd && y <= -0.5f ? code + KV_BAND_SIGN_5 : code;
}

// Byte j of a chunk, from one code per value.
static inline uchar kv_band_byte(threadgroup const uchar * codes, uint wide, uint j) {
    threadgroup const uchar * second = codes + KV_BAND;
    if (wide == 5) {
        return (uchar) (second[j] | codes[j] << 3);
    }
    if (wide == 3) {
        return (uchar) (codes[j] | second[j] << 3 | codes[j + 16] << 4 | second[j + 16] << 7);
    }
    if (j < 16) {
        return (uchar) (codes[j] | codes[j + 16] << 4);
    }
    second += j - 16;
    return (uchar) (second[0] | second[8] << 2 | second[16] << 4 | second[24] << 6);
}

// The code of scale number `which` of those that are tried for a group with this largest value, sign included.
static inline uint kv_band_try(float largest, uint bits, uint which) {
    if (bits != 5) {
        return kv_srft_try(largest, bits, which >= KV_SRFT_TRIES, which % KV_SRFT_TRIES);
    }
    const int steps = (int) (as_type<uint>(fabs(largest)*KV_SRFT_UNIT/127.0f) >> 19) - (120 << 4);
    const int step = which < KV_BAND_TRIES_5 ? (int) which : KV_BAND_TRIES_5 - 1;
    const uint code = (uint) clamp(steps + KV_BAND_FIRST_5 + step, 2, 255);
    return code >> 1 | (code & 1) << 7;
}

// kv_srft_encode for bands: lanes have codes of different widths, and all try equally often. Who is done tries the last scale again.
static inline void kv_band_encode(
        threadgroup float * y, uint kind, uint size, threadgroup const float * all_levels, uint lane, device uchar * row) {
#pragma METAL fp math_mode(safe)
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint count = kv_srft_lane_values(size), lanes = KV_BAND/count, first_value = lane*count;
    const bool mine = first_value < size;
    const uint bits = kv_band_at(kind, size, mine ? first_value/KV_BAND : 0).bits;
    threadgroup const float * levels = all_levels + (1u << bits);
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
    const float largest = ends.y > ends.x ? -ends.y : ends.x;
    // The squared error is sum(x^2) - gain.
    uint best = 0;
    float gain = 0.0f;
    for (uint n = 0; n < 2*KV_SRFT_TRIES; ++n) {
        const uint code = kv_band_try(largest, bits, n);
        const float scale = kv_band_scale(bits, code)/KV_SRFT_UNIT, inverse = 1.0f/scale;
        float2 sums = float2(0.0f);
        for (uint i = 0; i < count; ++i) {
            const float q = levels[kv_band_nearest(levels, bits, x[i]*inverse)];
            sums = fma(float2(x[i], q), float2(q), sums);
        }
        sums = kv_group_sum(sums, lanes);
        const float g = scale*(2.0f*sums.x - scale*sums.y);
        if (g > gain) {
            gain = g;
            best = code;
        }
    }
    const float inverse = best == 0 ? 0.0f : KV_SRFT_UNIT/kv_band_scale(bits, best);
    for (uint i = 0; i < count; ++i) {
        if (mine) {
            codes[first_value + i] = best == 0 ? (uchar) 0 : (uchar) kv_band_nearest(levels, bits, x[i]*inverse);
        }
    }
    if (mine && first_value % KV_BAND == 0) {
        row[first_value/KV_BAND] = (uchar) best;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint n = 0; n < size/KV_BAND; n += 2) {
        const kv_band wide = kv_band_at(kind, size, n);
        if (lane < 8*(wide.bits - 1)) {
            row[wide.codes + lane] = kv_band_byte(codes + KV_BAND*n, wide.bits, lane);
        }
    }
}
