// band4, band3, band2: differences in bands of 32 values, as ggml-ext/src/codec/band.rs stores them.
//
//     row     = scales: a byte for each band | chunk 0 | chunk 1 | ...     a chunk is two bands, the second has two bits less
//     5 and 3   4 low bits of the first band | 2 low bits of the second | the high bits of both, one per value
//     4 and 2   4 bits of the first band | 2 bits of the second
//     3 and 1   2 low bits of the first band | the high bits of both, which are all that the second has
//
// Levels of all widths are in one table, those of codes of b bits from place 2^b on.

#pragma once

#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

#define KV_BAND 32

// Where the codes of a band are.
struct kv_band {
    uint bits;  // of a code
    uint low;   // of them, side by side in bytes; what is beyond is a high bit
    uint codes; // the first byte of the low bits
    uint high;  // and of the high ones
};

static inline kv_band kv_band_at(uint kind, uint size, uint band) {
    const uint chunk = band/2, second = band % 2, half_of = size/(4*KV_BAND);
    // Half of the chunks have other widths.
    const bool mixed = kind == KV_KIND_BAND3 && size % (4*KV_BAND) == 0 && half_of > 1;
    const uint wide = !mixed ? kv_code_bits(kind) + 1 : chunk < half_of ? 5 : 3;
    const uint before = mixed && chunk >= half_of ? 32*half_of + 16*(chunk - half_of) : 8*(wide - 1)*chunk;
    const uint at = size/KV_BAND + before, low = wide == 3 ? 2 : 4;
    kv_band res;
    res.bits = wide - 2*second;
    res.low = low - 2*second;
    res.codes = at + 4*low*second;
    res.high = at + 4*(2*low - 2) + 4*second;
    return res;
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

// The place of the level that is nearest to y, by halves: `levels` are those of its width.
static inline uint kv_band_nearest(threadgroup const float * levels, uint bits, float y) {
    uint code = 0;
    for (uint step = 1u << (bits - 1); step > 0; step /= 2) {
        const uint next = code + step;
        code = y > 0.5f*(levels[next - 1] + levels[next]) ? next : code;
    }
    return code;
}

// Byte j of the low bits of a band, and of the high ones, from one code per value.
static inline uchar kv_band_low(threadgroup const uchar * codes, uint bits, uint j) {
    uint res = 0;
    for (uint part = 0; part < 8/bits; ++part) {
        res |= (codes[j + part*4*bits] & ((1u << bits) - 1)) << bits*part;
    }
    return (uchar) res;
}

static inline uchar kv_band_high(threadgroup const uchar * codes, uint low, uint j) {
    uint res = 0;
    for (uint bit = 0; bit < 8; ++bit) {
        res |= (uint) (codes[8*j + bit] >> low & 1) << bit;
    }
    return (uchar) res;
}

// The codes of a band of a row, one for each value, to their bytes, by a simdgroup.
static inline void kv_band_pack(threadgroup const uchar * codes, kv_band band, uint lane, device uchar * row) {
    const uint low_bytes = 4*band.low, j = lane - low_bytes;
    if (lane < low_bytes) {
        row[band.codes + lane] = kv_band_low(codes, band.low, lane);
    } else if (j < 4 && band.bits > band.low) {
        row[band.high + j] = kv_band_high(codes, band.low, j);
    }
}

// kv_srft_encode for bands: lanes have codes of different widths, and all try equally often.
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
        const uint code = kv_srft_try(largest, bits, n >= KV_SRFT_TRIES, n % KV_SRFT_TRIES);
        const float scale = kv_srft_scale(code)/KV_SRFT_UNIT, inverse = 1.0f/scale;
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
    const float inverse = best == 0 ? 0.0f : KV_SRFT_UNIT/kv_srft_scale(best);
    for (uint i = 0; i < count; ++i) {
        if (mine) {
            codes[first_value + i] = best == 0 ? (uchar) 0 : (uchar) kv_band_nearest(levels, bits, x[i]*inverse);
        }
    }
    if (mine && first_value % KV_BAND == 0) {
        row[first_value/KV_BAND] = (uchar) best;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint n = 0; n < size/KV_BAND; ++n) {
        kv_band_pack(codes + KV_BAND*n, kv_band_at(kind, size, n), lane, row);
    }
}
