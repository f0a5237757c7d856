// polar4, polar3: the row format of ggml-ext/src/codec/polar.rs.
//
//     row   = radii: f16 x d/16 | upper: 14 bits x d/16, tightly, low bits first | level 1: 32 (24) bits x d/16
//     upper   code of level 2, pair j, in bits 2j (j < 4); of level 3 in bits 8 + 2j (j < 2); of level 4 in bits 12
//     level 1 code of pair j in bits 4j (3j)
//
// A row has an odd number of bytes at some head sizes, so everything is read and written by bytes.

#pragma once

#include "kv_args.h"

#include <metal_stdlib>
using namespace metal;

// cos of the four centroids of levels 2, 3 and 4, descending; read backwards they are the sines.
constant float kv_polar_cosines[12] = { 0.95240794f, 0.8056762f, 0.5923562f, 0.30482637f, 0.91052276f, 0.7810911f,
                                        0.62441707f, 0.41345898f, 0.8657176f, 0.7610219f, 0.6487262f, 0.5005328f };
// tan of the boundary between the first and the second cell of levels 2, 3 and 4.
constant float kv_polar_tangents[3] = { 0.51031836f, 0.61354194f, 0.70648f };
// cos of the middles of the sectors of a quadrant: 4 for polar4, 2 for polar3.
constant float kv_polar_sectors[6] = { 0.98078525f, 0.8314696f, 0.55557024f, 0.19509032f, 0.9238795f, 0.38268343f };

static inline uint kv_polar_bits(uint kind) {
    return kind == KV_KIND_POLAR4 ? 4 : 3;
}

// Where the codes of level 1 begin.
static inline uint kv_polar_first(uint size) {
    return size/16*2 + (size/16*14 + 7)/8;
}

static inline uint kv_polar_row_bytes(uint bits, uint size) {
    return kv_polar_first(size) + size/16*bits;
}

static inline ushort kv_two_bytes(device const uchar * at) {
    return (ushort) (at[0] | at[1] << 8);
}

// The radius of a block; any bytes give something finite.
static inline float kv_polar_radius(device const uchar * row, uint block) {
    const ushort stored = kv_two_bytes(row + 2*block);
    return (stored & 0x7c00) != 0x7c00 ? (float) as_type<half>(stored) : 0.0f;
}

// The codes of levels 2 to 4 of a block.
static inline uint kv_polar_upper(device const uchar * row, uint size, uint block) {
    device const uchar * at = row + size/16*2 + 14*block/8;
    const uint shift = 14*block % 8;
    uint word = at[0] | at[1] << 8;
    if (shift > 2) {
        word |= (uint) at[2] << 16;
    }
    return word >> shift & 0x3fff;
}

// The code of level 1 of pair j of a block.
static inline uint kv_polar_code(device const uchar * row, uint bits, uint size, uint block, uint j) {
    device const uchar * at = row + kv_polar_first(size) + block*bits;
    if (bits == 4) {
        return at[j/2] >> 4*(j % 2) & 15;
    }
    const uint word = at[0] | at[1] << 8 | (uint) at[2] << 16;
    return word >> 3*j & 7;
}

// Cosine and sine of the middle of a sector.
static inline float2 kv_polar_direction(uint bits, uint code) {
    const uint quarter = 1u << (bits - 2), quadrant = code/quarter % 4, n = code % quarter;
    const uint first = bits == 4 ? 0 : 4;
    const float c = kv_polar_sectors[first + n], s = kv_polar_sectors[first + quarter - 1 - n];
    return quadrant == 0 ? float2(c, s) : quadrant == 1 ? float2(-s, c) : quadrant == 2 ? float2(-c, -s) : float2(s, -c);
}

// What pair j of a block is multiplied by, without the radius: a product of three cosines or, mirrored, sines.
static inline float kv_polar_weight(uint upper, uint j) {
    const uint a = (upper >> 12 & 3) ^ (j >> 2 & 1)*3;
    const uint b = (upper >> (8 + 2*(j >> 2)) & 3) ^ (j >> 1 & 1)*3;
    const uint c = (upper >> 2*(j >> 1) & 3) ^ (j & 1)*3;
    return kv_polar_cosines[8 + a]*kv_polar_cosines[4 + b]*kv_polar_cosines[c];
}

// Values 2 p and 2 p + 1 of a row.
static inline float2 kv_polar_pair(device const uchar * row, uint bits, uint size, uint p) {
    const uint block = p/8, j = p % 8;
    const float weight = kv_polar_radius(row, block)*kv_polar_weight(kv_polar_upper(row, size, block), j);
    return weight*kv_polar_direction(bits, kv_polar_code(row, bits, size, block, j));
}

// The sector of (x, y), counted from the positive x axis against the clock.
static inline uint kv_polar_sector(uint bits, float x, float y) {
    const float a = fabs(x), b = fabs(y), tangent = 0.41421357f;
    const uint half_of = 1u << (bits - 1);
    const uint n = bits == 4 ? (uint) (b > a*tangent) + (uint) (b > a) + (uint) (b*tangent > a) : (uint) (b > a);
    if (y < 0.0f) {
        return x < 0.0f ? half_of + n : 2*half_of - 1 - n;
    }
    return x < 0.0f ? half_of - 1 - n : n;
}

static inline float kv_polar_length(float a, float b) {
    return sqrt(fma(b, b, a*a));
}

// A rotated row, in the simdgroup's own threadgroup memory, to its bytes; a lane takes whole blocks. The memory is used up.
static inline void kv_polar_encode(threadgroup float * y, uint bits, uint size, uint lane, device uchar * row) {
#pragma METAL fp math_mode(safe)
    const uint blocks = size/16;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    // A lane has two blocks at most: 36 at head size 576.
    uint uppers[2];
    for (uint turn = 0; turn < 2; ++turn) {
        const uint block = lane + 32*turn;
        uppers[turn] = 0;
        if (block >= blocks) {
            continue;
        }
        float radius[8];
        uint word = 0, upper = 0;
        for (uint j = 0; j < 8; ++j) {
            const float a = y[16*block + 2*j], b = y[16*block + 2*j + 1];
            word |= kv_polar_sector(bits, a, b) << bits*j;
            radius[j] = kv_polar_length(a, b);
        }
        uint start = 0;
        for (uint level = 0; level < 3; ++level) {
            const float low = kv_polar_tangents[level];
            for (uint j = 0; j < 4u >> level; ++j) {
                const float l = radius[2*j], r = radius[2*j + 1];
                upper |= ((uint) (r > l*low) + (uint) (r > l) + (uint) (r*low > l)) << start;
                start += 2;
                radius[j] = kv_polar_length(l, r);
            }
        }
        for (uint i = 0; i < bits; ++i) {
            row[kv_polar_first(size) + block*bits + i] = (uchar) (word >> 8*i);
        }
        const ushort stored = as_type<ushort>((half) min(radius[0], 65504.0f));
        row[2*block] = (uchar) stored;
        row[2*block + 1] = (uchar) (stored >> 8);
        uppers[turn] = upper;
    }
    // Codes of 14 bits share bytes: they go through memory, which everybody is done with.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup ushort * codes = (threadgroup ushort *) y;
    for (uint turn = 0; turn < 2; ++turn) {
        if (lane + 32*turn < blocks) {
            codes[lane + 32*turn] = (ushort) uppers[turn];
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = lane; b < (14*blocks + 7)/8; b += 32) {
        const uint block = 8*b/14, shift = 8*b % 14;
        uint bits_of_byte = codes[block] >> shift;
        if (shift > 6 && block + 1 < blocks) {
            bits_of_byte |= (uint) codes[block + 1] << (14 - shift);
        }
        row[2*blocks + b] = (uchar) bits_of_byte;
    }
}
