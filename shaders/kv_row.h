// All that kernels know of the kinds of rows: ours, and ggml's f32, f16, bf16, q8_0 and q4_0. Every choice by kind that is not
// for speed is made here, for Metal and CUDA alike.
//
// Stored levels come in chunks. A byte at place j of a chunk of c values holds value j, and where 2 or 4 values share a byte also
// those behind it at steps of c/2 or c/4: so a loop over the bytes of a chunk meets every value once. The third bit of a code
// is elsewhere, but in bands, whose bytes may have bits of another band.
//
// Values are those of the domain that the kind's scores and sums are taken in: rotated, projected, or plain. delta's are
// differences, which mean nothing without their group.

#pragma once

#include "kv_band.h"
#include "kv_polar.h"
#include "kv_rotation.h"
#include "kv_signs.h"
#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

// Values of a row in its domain.
static inline uint kv_width(uint kind, uint size) {
    return KV_WIDTH(kind, size);
}

static inline bool kv_is_plain(uint kind) {
    return kind < KV_KIND_SRFT8;
}

static inline bool kv_is_float(uint kind) {
    return kind == KV_KIND_F32 || kind == KV_KIND_F16 || kind == KV_KIND_BF16;
}

// Has the row levels in chunks? All of it, but for turbo's signs.
static inline bool kv_is_chunked(uint kind) {
    return !kv_is_float(kind) && !KV_KIND_IS_POLAR(kind) && kind != KV_KIND_QJL1;
}

// Does a row end in signs?
static inline bool kv_has_signs(uint kind) {
    return KV_KIND_IS_TURBO(kind) || kind == KV_KIND_QJL1;
}

// Bytes of the row of one head, of a kind of ours.
static inline uint kv_row_bytes(uint kind, uint size) {
    if (KV_KIND_IS_POLAR(kind)) {
        return kv_polar_row_bytes(kv_polar_bits(kind), size);
    }
    if (kv_has_signs(kind)) {
        return kv_sign_offset(kind, size) + size/8;
    }
    const uint bits = kv_code_bits(kind), levels = kv_srft_scale_bytes(bits, size) + size*bits/8;
    return KV_KIND_IS_DELTA(kind) ? levels + (size + 63)/64*2 : levels;
}

// Do rows lie in the rotated domain? The head is then what kv_rotate_back makes of it; else it is itself.
static inline bool kv_is_rotated(uint kind) {
    return !kv_is_plain(kind) && kind != KV_KIND_QJL1 && !KV_KIND_IS_BAND(kind);
}

struct kv_chunk {
    uint start; // first value
    uint count;
    uint parts; // values that share a byte
    uint bits;  // of a code
    uint shift; // where the first code of a byte begins
    device const uchar * codes;
    device const uchar * high; // of codes of 3 bits the highest, eight in a byte; not of bands
};

// The chunk that holds value i.
static inline kv_chunk kv_row_chunk(device const uchar * row, uint kind, uint size, uint i) {
    kv_chunk chunk;
    chunk.shift = 0;
    if (KV_KIND_IS_BAND(kind)) {
        const kv_band band = kv_band_at(kind, size, i/KV_BAND);
        chunk.start = i/KV_BAND*KV_BAND;
        chunk.count = KV_BAND;
        chunk.parts = band.parts;
        chunk.bits = band.bits;
        chunk.shift = band.shift;
        chunk.codes = row + band.codes;
        chunk.high = chunk.codes;
    } else if (!kv_is_plain(kind)) {
        const uint bits = kv_code_bits(kind);
        const uint2 place = kv_srft_chunk(size, i);
        chunk.start = place.x;
        chunk.count = place.y;
        chunk.parts = bits == 8 ? 1 : bits == 4 ? 2 : 4;
        chunk.bits = bits;
        chunk.codes = row + (KV_KIND_IS_TURBO(kind) ? KV_TURBO_NORM_BYTES : kv_srft_scale_bytes(bits, size)) + place.x*bits/8;
        chunk.high = chunk.codes + place.y/4;
    } else {
        const bool is_q8 = kind == KV_KIND_Q8_0;
        chunk.start = i/32*32;
        chunk.count = 32;
        chunk.parts = is_q8 ? 1 : 2;
        chunk.bits = is_q8 ? 8 : 4;
        chunk.codes = row + i/32*(is_q8 ? 34 : 18) + 2;
        chunk.high = chunk.codes;
    }
    return chunk;
}

// The factor of the levels at value i. Any bytes give something finite.
static inline float kv_row_scale(device const uchar * row, uint kind, uint size, uint i) {
    if (KV_KIND_IS_TURBO(kind)) {
        return kv_norm(row, 0);
    }
    if (KV_KIND_IS_BAND(kind)) {
        return kv_band_scale(kv_band_at(kind, size, i/KV_BAND).bits, row[i/KV_BAND])*kv_band_unit(kind, size);
    }
    if (!kv_is_plain(kind)) {
        const uint group = i/kv_srft_group(size);
        return (kv_code_bits(kind) == 8 ? kv_norm(row, group) : kv_srft_scale(row[group]))*kv_srft_unit(kv_code_bits(kind));
    }
    return (float) *(device const half *) (row + i/32*(kind == KV_KIND_Q8_0 ? 34 : 18));
}

// The level of value `at` of a chunk, given the byte that holds it.
static inline float kv_row_level(kv_chunk chunk, uint kind, uint at, uchar byte, threadgroup const float * levels) {
    if (KV_KIND_IS_BAND(kind)) {
        return levels[(1u << chunk.bits) + kv_band_code(chunk.bits, chunk.parts, chunk.shift, at, byte)];
    }
    const uint part = at/(chunk.count/chunk.parts);
    if (chunk.parts == 1) {
        return (float) (char) byte;
    }
    if (kind == KV_KIND_Q4_0) {
        return (float) (byte >> 4*part & 15) - 8.0f;
    }
    uint code = chunk.parts == 2 ? byte >> 4*part & 15 : byte >> 2*part & 3;
    if (chunk.bits == 3) {
        code |= (uint) (chunk.high[at/8] >> at % 8 & 1) << 2;
    }
    return levels[code];
}

static inline float kv_float_at(device const uchar * at, uint kind) {
    if (kind == KV_KIND_F16) {
        return (float) *(device const half *) at;
    }
    if (kind == KV_KIND_BF16) {
        return as_type<float>((uint) *(device const ushort *) at << 16);
    }
    return *(device const float *) at;
}

static inline uint kv_float_bytes(uint kind) {
    return kind == KV_KIND_F32 ? 4 : 2;
}

// Values i to i + 3 of a row of floats.
static inline float4 kv_four_floats(device const uchar * row, uint kind, uint i) {
    if (kind == KV_KIND_F16) {
        return (float4) *(device const half4 *) (row + 2*i);
    }
    if (kind == KV_KIND_BF16) {
        const ushort4 bits = *(device const ushort4 *) (row + 2*i);
        return float4(as_type<float>((uint) bits.x << 16), as_type<float>((uint) bits.y << 16),
                      as_type<float>((uint) bits.z << 16), as_type<float>((uint) bits.w << 16));
    }
    return *(device const float4 *) (row + 4*i);
}

// Value i of a row, below its width.
static inline float kv_row_value(device const uchar * row, uint kind, uint size, uint i, threadgroup const float * levels) {
    if (kv_is_float(kind)) {
        return kv_float_at(row + i*kv_float_bytes(kind), kind);
    }
    if (KV_KIND_IS_POLAR(kind)) {
        return kv_polar_pair(row, kv_polar_bits(kind), size, i/2)[i % 2];
    }
    if (kind == KV_KIND_QJL1 || (KV_KIND_IS_TURBO(kind) && i >= size)) {
        return kv_signed(row, kind, size, i % size, kv_sign_magnitude(row, kind, size));
    }
    const kv_chunk chunk = kv_row_chunk(row, kind, size, i);
    const uint at = i - chunk.start;
    const uchar byte = chunk.codes[at % (chunk.count/chunk.parts)];
    return kv_row_level(chunk, kind, at, byte, levels)*kv_row_scale(row, kind, size, i);
}

// Fills the table of levels that a kind needs, KV_LEVELS floats at most: it is read at places that differ from lane to lane.
static inline void kv_row_levels(uint kind, uint thread_index, threadgroup float * levels) {
    if (kv_is_plain(kind) || !kv_is_chunked(kind) || kind == KV_KIND_SRFT8 || kind == KV_KIND_DELTA8) {
        return;
    }
    if (KV_KIND_IS_BAND(kind)) {
        kv_band_levels(thread_index, levels);
        return;
    }
    const uint bits = kv_code_bits(kind);
    const auto table = KV_KIND_IS_TURBO(kind) ? kv_turbo_levels(kind) : kv_srft_levels(bits);
    if (thread_index < (1u << bits)) {
        levels[thread_index] = table[thread_index];
    }
}

// Values i to i + 3 of a row, below its width.
static inline float4 kv_row_four(device const uchar * row, uint kind, uint size, uint i, threadgroup const float * levels) {
    if (KV_KIND_IS_POLAR(kind)) {
        const float2 a = kv_polar_pair(row, kv_polar_bits(kind), size, i/2);
        const float2 b = kv_polar_pair(row, kv_polar_bits(kind), size, i/2 + 1);
        return float4(a.x, a.y, b.x, b.y);
    }
    return float4(kv_row_value(row, kind, size, i, levels), kv_row_value(row, kind, size, i + 1, levels),
                  kv_row_value(row, kind, size, i + 2, levels), kv_row_value(row, kind, size, i + 3, levels));
}

// A row that stands alone of the head in y, which is clean. y has KV_ROWS_FLOATS(size) floats and is used up.
static inline void kv_row_encode(threadgroup float * y, uint kind, uint size, uint lane, device uchar * row) {
    if (kind == KV_KIND_QJL1) {
        kv_project(y, size, 1.0f, lane);
        kv_qjl_encode(y, size, lane, row);
        return;
    }
    kv_rotate_from(y, size, KV_SIGNS_ROTATION, 1.0f, lane, y);
    if (KV_KIND_IS_POLAR(kind)) {
        kv_polar_encode(y, kv_polar_bits(kind), size, lane, row);
    } else if (KV_KIND_IS_TURBO(kind)) {
        kv_turbo_encode(y, (threadgroup uchar *) (y + size), kind, size, lane, row);
    } else if (kind == KV_KIND_SRFT8) {
        kv_srft_encode(y, 8, size, lane, row); // constants, where `kind` is none
    } else if (kind == KV_KIND_SRFT4) {
        kv_srft_encode(y, 4, size, lane, row);
    } else if (kind == KV_KIND_SRFT3) {
        kv_srft_encode(y, 3, size, lane, row);
    } else {
        kv_srft_encode(y, 2, size, lane, row);
    }
}

// A difference in y, which is used up: the row's scales and codes.
static inline void kv_row_encode_difference(
        threadgroup float * y, uint kind, uint size, threadgroup const float * levels, uint lane, device uchar * row) {
    if (KV_KIND_IS_BAND(kind)) {
        kv_band_encode(y, kind, size, levels, lane, row);
    } else if (kind == KV_KIND_DELTA4) {
        kv_srft_encode(y, 4, size, lane, row);
    } else if (kind == KV_KIND_DELTA3) {
        kv_srft_encode(y, 3, size, lane, row);
    } else {
        kv_srft_encode(y, 8, size, lane, row);
    }
}

// The head of a row that stands alone, rotated where kv_is_rotated says so. Other lanes see it behind a barrier.
static inline void kv_row_decode(
        device const uchar * row, uint kind, uint size, threadgroup const float * levels, uint lane, threadgroup float * y) {
    // Of turbo the signs first: they are turned back before the levels join them.
    const uint signs = KV_KIND_IS_TURBO(kind) ? size : 0;
    for (uint i = lane; i < size; i += 32) {
        y[i] = kv_row_value(row, kind, size, signs + i, levels);
    }
    if (kv_has_signs(kind)) {
        kv_project_back(y, size, lane);
    }
    if (KV_KIND_IS_TURBO(kind)) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < size; i += 32) {
            y[i] += kv_row_value(row, kind, size, i, levels);
        }
    }
}

// A query in q, or a key of a group, to the domain that rows of K are in: q takes kv_width values.
static inline void kv_enter_domain(threadgroup float * q, uint kind, uint size, uint lane) {
    const float factor = kv_has_signs(kind) ? kv_score_factors[kv_size_index(size)] : 1.0f;
    if (kind == KV_KIND_QJL1) {
        kv_project(q, size, factor, lane);
        return;
    }
    if (!kv_is_rotated(kind)) {
        return;
    }
    kv_rotate_from(q, size, KV_SIGNS_ROTATION, 1.0f, lane, q);
    if (KV_KIND_IS_TURBO(kind)) {
        kv_rotate_from(q, size, KV_SIGNS_FIRST, 1.0f, lane, q + size);
        kv_rotate_from(q + size, size, KV_SIGNS_SECOND, factor, lane, q + size);
    }
}

// A sum of rows of V, kv_width values, to one head: rotated where kv_is_rotated says so.
static inline void kv_leave_domain(threadgroup float * o, uint kind, uint size, uint lane) {
    if (KV_KIND_IS_TURBO(kind)) {
        // a + P^T b
        kv_project_back(o + size, size, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < size; i += 32) {
            o[i] += o[size + i];
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}
