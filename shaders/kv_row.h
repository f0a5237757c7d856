// Reading a row of any kind: ours, and ggml's f16, q8_0 and q4_0.
//
// Stored levels come in chunks. A byte at place j of a chunk of c values holds value j, and with 4 or 2 bits a code also
// the values behind it at steps of c/2 or c/4: so a loop over the bytes of a chunk meets every value once.

#pragma once

#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

struct kv_chunk {
    uint start; // first value
    uint count;
    uint parts; // values that share a byte
    device const uchar * codes;
};

// The chunk that holds value i.
static inline kv_chunk kv_row_chunk(device const uchar * row, uint kind, uint size, uint i) {
    kv_chunk chunk;
    if (kv_is_srft(kind)) {
        const uint bits = kv_srft_bits(kind);
        const uint2 place = kv_srft_chunk(size, i);
        chunk.start = place.x;
        chunk.count = place.y;
        chunk.parts = bits == 8 ? 1 : bits == 4 ? 2 : 4;
        chunk.codes = row + kv_srft_scale_bytes(size) + place.x*bits/8;
    } else {
        const bool is_q8 = kind == KV_KIND_Q8_0;
        chunk.start = i/32*32;
        chunk.count = 32;
        chunk.parts = is_q8 ? 1 : 2;
        chunk.codes = row + i/32*(is_q8 ? 34 : 18) + 2;
    }
    return chunk;
}

// The factor of the levels at value i. Any bytes give something finite.
static inline float kv_row_scale(device const uchar * row, uint kind, uint size, uint i) {
    if (kv_is_srft(kind)) {
        const ushort stored = ((device const ushort *) row)[i/kv_srft_group(size)];
        // By its bits: fast mathematics knows no infinity.
        return (stored & 0x7c00) != 0x7c00 ? (float) as_type<half>(stored)/KV_SRFT_UNIT : 0.0f;
    }
    return (float) *(device const half *) (row + i/32*(kind == KV_KIND_Q8_0 ? 34 : 18));
}

// The level of value `at` of a chunk, given the byte that holds it.
static inline float kv_row_level(kv_chunk chunk, uint kind, uint at, uchar byte, threadgroup const float * levels) {
    const uint part = at/(chunk.count/chunk.parts);
    if (chunk.parts == 1) {
        return (float) (char) byte;
    }
    if (kind == KV_KIND_Q4_0) {
        return (float) (byte >> 4*part & 15) - 8.0f;
    }
    if (kind == KV_KIND_SRFT4) {
        return levels[byte >> 4*part & 15];
    }
    uint code = byte >> 2*part & 3;
    if (kind == KV_KIND_SRFT3) {
        code |= (uint) (chunk.codes[chunk.count/4 + at/8] >> at % 8 & 1) << 2;
    }
    return levels[code];
}

// Value i of a row.
static inline float kv_row_value(device const uchar * row, uint kind, uint size, uint i, threadgroup const float * levels) {
    if (kind == KV_KIND_F16) {
        return (float) ((device const half *) row)[i];
    }
    const kv_chunk chunk = kv_row_chunk(row, kind, size, i);
    const uint at = i - chunk.start;
    const uchar byte = chunk.codes[at % (chunk.count/chunk.parts)];
    return kv_row_level(chunk, kind, at, byte, levels)*kv_row_scale(row, kind, size, i);
}

// Fills the table of levels that a kind needs, 16 floats: it is read at places that differ from lane to lane.
static inline void kv_row_levels(uint kind, uint thread_index, threadgroup float * levels) {
    if (kv_is_srft(kind) && kind != KV_KIND_SRFT8) {
        const uint bits = kv_srft_bits(kind);
        if (thread_index < (1u << bits)) {
            levels[thread_index] = kv_srft_levels(bits)[thread_index];
        }
    }
}
