// kv_set_rows: rows of floats into the cache. kv_get_rows: rows of the cache as floats.
//
// One simdgroup works on one head of one row, alone: it never waits for the others of its threadgroup, so a threadgroup may
// have as many as fit. Each has `size` floats of threadgroup memory.

#include "kv_args.h"
#include "kv_rotation.h"
#include "kv_row.h"
#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

constant uint FC_rows_kind [[function_constant(0)]];
constant uint FC_rows_size [[function_constant(1)]];
constant uint FC_rows_float_kind [[function_constant(2)]]; // KV_KIND_F32 or KV_KIND_F16
constant uint FC_rows_index_bytes [[function_constant(3)]]; // 4 or 8

// What is not a number counts as 0, and nothing is beyond a million: a bad row stays finite. Seen by its bits, because
// fast mathematics takes every number for one.
static inline float kv_clean(float x) {
    const uint bits = as_type<uint>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0.0f;
    }
    if ((bits & 0x7fffffffu) > as_type<uint>(1e6f)) {
        return bits >> 31 != 0 ? -1e6f : 1e6f;
    }
    return x;
}

static inline float kv_float_at(device const uchar * from, uint kind, ulong step, uint i) {
    device const uchar * at = from + i*step;
    return kind == KV_KIND_F16 ? (float) *(device const half *) at : *(device const float *) at;
}

// Where a unit's parts are.
struct kv_unit {
    uint head;
    ulong floats; // bytes
    ulong cache;
    bool found; // the index is one of the cache's rows
};

static inline kv_unit kv_unit_at(constant kv_rows_args & args, device const uchar * index, uint unit, uint row_bytes) {
    kv_unit u;
    u.head = unit % args.heads;
    const uint row = unit/args.heads;
    const uint i1 = row % args.rows[0], i2 = row/args.rows[0] % args.rows[1], i3 = row/args.rows[0]/args.rows[1];
    device const uchar * at = index + i1*args.index_nb[0] + i2 % args.index_rows[0]*args.index_nb[1] +
                              i3 % args.index_rows[1]*args.index_nb[2];
    const long target = FC_rows_index_bytes == 8 ? *(device const long *) at : (long) *(device const int *) at;
    u.found = target >= 0 && target < (long) args.cache_rows;
    u.floats = i1*args.float_nb[0] + i2*args.float_nb[1] + i3*args.float_nb[2] + u.head*FC_rows_size*args.value_step;
    u.cache = (ulong) target*args.cache_nb[0] + i2*args.cache_nb[1] + i3*args.cache_nb[2] + u.head*row_bytes;
    return u;
}

kernel void kv_set_rows(
        constant kv_rows_args & args [[buffer(0)]],
        device const uchar * source [[buffer(1)]],
        device const uchar * index [[buffer(2)]],
        device uchar * cache [[buffer(3)]],
        threadgroup float * memory [[threadgroup(0)]],
        uint3 group [[threadgroup_position_in_grid]],
        ushort simdgroup [[simdgroup_index_in_threadgroup]],
        ushort simdgroups [[simdgroups_per_threadgroup]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint size = FC_rows_size, unit = group.x*simdgroups + simdgroup;
    if (unit >= args.units) {
        return;
    }
    const uint row_bytes = kv_srft_scale_bytes(size) + size*kv_srft_bits(FC_rows_kind)/8;
    const kv_unit u = kv_unit_at(args, index, unit, row_bytes);
    if (!u.found) {
        return;
    }
    float2 z[KV_ROTATION_VALUES];
    const uint lanes = kv_rotation_lanes(size);
    for (uint p = 0; p < kv_rotation_values(size); ++p) {
        const uint i = 2*(p*lanes + lane % lanes);
        for (uint part = 0; part < 2; ++part) {
            const float x = kv_float_at(source + u.floats, FC_rows_float_kind, args.value_step, i + part);
            z[p][part] = kv_clean(x)*kv_sign(size, i + part);
        }
    }
    threadgroup float * y = memory + simdgroup*size;
    kv_rotate(z, size, lane, y);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    kv_srft_encode(y, FC_rows_kind, size, lane, cache + u.cache);
}

kernel void kv_get_rows(
        constant kv_rows_args & args [[buffer(0)]],
        device const uchar * cache [[buffer(1)]],
        device const uchar * index [[buffer(2)]],
        device uchar * target [[buffer(3)]],
        threadgroup float * memory [[threadgroup(0)]],
        uint3 group [[threadgroup_position_in_grid]],
        ushort simdgroup [[simdgroup_index_in_threadgroup]],
        ushort simdgroups [[simdgroups_per_threadgroup]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint size = FC_rows_size, unit = group.x*simdgroups + simdgroup;
    if (unit >= args.units) {
        return;
    }
    const uint row_bytes = kv_srft_scale_bytes(size) + size*kv_srft_bits(FC_rows_kind)/8;
    const kv_unit u = kv_unit_at(args, index, unit, row_bytes);
    if (!u.found) {
        return;
    }
    // Behind the row of each simdgroup is its table.
    threadgroup float * y = memory + simdgroup*(size + 16), * levels = y + size;
    kv_row_levels(FC_rows_kind, lane, levels);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < size; i += 32) {
        y[i] = kv_row_value(cache + u.cache, FC_rows_kind, size, i, levels);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float2 z[KV_ROTATION_VALUES];
    kv_rotate_back(y, size, lane, z);
    const uint lanes = kv_rotation_lanes(size), values = kv_rotation_values(size);
    const uint first = 2*values*kv_rotation_reversed(size, lane % lanes);
    if (lane < lanes) {
        for (uint i = 0; i < 2*values; ++i) {
            device uchar * at = target + u.floats + (first + i)*args.value_step;
            if (FC_rows_float_kind == KV_KIND_F16) {
                *(device half *) at = (half) z[i/2][i % 2];
            } else {
                *(device float *) at = z[i/2][i % 2];
            }
        }
    }
}
