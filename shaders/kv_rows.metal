// kv_set_rows: rows of floats into the cache. kv_get_rows: rows of the cache as floats. kv_copy_rows: rows as they are.
//
// One simdgroup works on one head of one row, alone: it never waits for the others of its threadgroup, so a threadgroup may
// have as many as fit. Each has KV_ROWS_FLOATS of threadgroup memory. Without an index (index bytes 0) they are copies: the heads of
// one side go to the heads of the other in their order, whatever the shapes.
//
// kv_set_groups: the same for cells that are coded together. A row depends on the rows written before it, so one simdgroup
// takes all rows of one head of one stream, in the order of the op.

#include "kv_args.h"
#include "kv_delta.h"
#include "kv_rotation.h"
#include "kv_row.h"
#include "kv_srft.h"

#include <metal_stdlib>
using namespace metal;

constant int FC_rows_kind [[function_constant(0)]];
constant int FC_rows_size [[function_constant(1)]];
constant int FC_rows_float_kind [[function_constant(2)]]; // KV_KIND_F32, KV_KIND_F16 or KV_KIND_BF16
constant int FC_rows_index_bytes [[function_constant(3)]]; // 4 or 8; 0: no index

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

// Where a unit's parts are.
struct kv_unit {
    ulong floats; // bytes
    ulong cache;
    bool found; // the index is one of the cache's rows
};

// `float_bytes` are those of a head on the other side.
static inline kv_unit kv_unit_at(constant kv_rows_args & args, device const uchar * index, uint unit, ulong float_bytes) {
    const uint head_bytes = kv_row_bytes(FC_rows_kind, FC_rows_size);
    kv_unit u;
    const uint head = unit % args.heads, row = unit/args.heads;
    const uint i1 = row % args.rows[0], i2 = row/args.rows[0] % args.rows[1], i3 = row/args.rows[0]/args.rows[1];
    u.floats = i1*args.float_nb[0] + i2*args.float_nb[1] + i3*args.float_nb[2] + head*float_bytes;
    if (FC_rows_index_bytes == 0) {
        const uint cache_row = unit/args.cache_heads;
        const uint c1 = cache_row % args.cache_rows[0], c2 = cache_row/args.cache_rows[0] % args.cache_rows[1];
        const uint c3 = cache_row/args.cache_rows[0]/args.cache_rows[1];
        u.found = true;
        u.cache = c1*args.cache_nb[0] + c2*args.cache_nb[1] + c3*args.cache_nb[2] + unit % args.cache_heads*head_bytes;
        return u;
    }
    device const uchar * at = index + i1*args.index_nb[0] + i2 % args.index_rows[0]*args.index_nb[1] +
                              i3 % args.index_rows[1]*args.index_nb[2];
    const long target = FC_rows_index_bytes == 8 ? *(device const long *) at : (long) *(device const int *) at;
    u.found = target >= 0 && target < (long) args.cache_rows[0];
    u.cache = (ulong) target*args.cache_nb[0] + i2*args.cache_nb[1] + i3*args.cache_nb[2] + head*head_bytes;
    return u;
}

// The floats of a head, clean, to the simdgroup's own threadgroup memory.
static inline void kv_load_floats(device const uchar * from, ulong step, uint lane, threadgroup float * y) {
    for (uint i = lane; i < (uint) FC_rows_size; i += 32) {
        y[i] = kv_clean(kv_float_at(from + i*step, FC_rows_float_kind));
    }
}

static inline void kv_store_float(device uchar * at, float x) {
    if (FC_rows_float_kind == KV_KIND_F16) {
        *(device half *) at = (half) x;
    } else if (FC_rows_float_kind == KV_KIND_BF16) {
        // To the nearest, ties to even.
        const uint bits = as_type<uint>(x);
        *(device ushort *) at = (ushort) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        *(device float *) at = x;
    }
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
    const uint size = FC_rows_size, kind = FC_rows_kind, unit = group.x*simdgroups + simdgroup;
    if (unit >= args.units) {
        return;
    }
    const kv_unit u = kv_unit_at(args, index, unit, size*args.value_step);
    if (!u.found) {
        return;
    }
    threadgroup float * y = memory + simdgroup*KV_ROWS_FLOATS(size);
    device uchar * row = cache + u.cache;
    kv_load_floats(source + u.floats, args.value_step, lane, y);
    kv_row_encode(y, kind, size, lane, row);
}

// The floats of a head that has been decoded into its domain, in the simdgroup's own threadgroup memory.
static inline void kv_store_floats(threadgroup const float * y, ulong step, uint lane, device uchar * to) {
    const uint size = FC_rows_size;
    if (!kv_is_rotated(FC_rows_kind)) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = lane; i < size; i += 32) {
            kv_store_float(to + i*step, y[i]);
        }
        return;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float2 z[KV_ROTATION_VALUES];
    kv_rotate_back(y, size, KV_SIGNS_ROTATION, lane, z);
    const uint first = kv_rotated_first(size, lane);
    if (lane < kv_rotation_lanes(size)) {
        for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
            kv_store_float(to + (first + i)*step, z[i/2][i % 2]);
        }
    }
}

// What a row of a group says it is.
static inline uint kv_kind_of(device const uchar * row) {
    return kv_delta_kind(row, FC_rows_kind, FC_rows_size);
}

// Has row t of a group a row before it that it is chained to?
static inline bool kv_chained(device const uchar * group_row, ulong step, uint t) {
    return t > 0 && kv_kind_of(group_row + t*step) == KV_DELTA_CHAINED && kv_kind_of(group_row + (t - 1)*step) != KV_DELTA_EMPTY;
}

// What a row of a group stands for, in its domain: from the last row before it that is not chained.
static inline void kv_delta_key(
        device const uchar * group_row, ulong step, uint rows, uint row, threadgroup const float * levels, uint lane,
        threadgroup float * y) {
    const uint size = FC_rows_size, kind = FC_rows_kind;
    uint first = row;
    while (kv_chained(group_row, step, first)) {
        --first;
    }
    const bool empty = kv_kind_of(group_row + row*step) == KV_DELTA_EMPTY;
    for (uint i = lane; i < size; i += 32) {
        const float m = kv_delta_frame(group_row, step, kind, size, rows, i);
        float u = 0.0f;
        for (uint t = first; t <= row; ++t) {
            const float d = kv_row_value(group_row + t*step, kind, size, i, levels);
            const bool alone = kv_kind_of(group_row + t*step) == KV_DELTA_ALONE;
            u = t > first ? fma(u, KV_DELTA_RHO, d) : alone ? d - m : d;
        }
        y[i] = empty ? 0.0f : m + u;
    }
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
    const uint size = FC_rows_size, kind = FC_rows_kind, unit = group.x*simdgroups + simdgroup;
    if (unit >= args.units) {
        return;
    }
    const kv_unit u = kv_unit_at(args, index, unit, size*args.value_step);
    if (!u.found) {
        return;
    }
    // Behind the row of each simdgroup is its table.
    threadgroup float * y = memory + simdgroup*KV_ROWS_FLOATS(size), * levels = y + size;
    device const uchar * row = cache + u.cache;
    kv_row_levels(kind, lane, levels);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (KV_KIND_IS_DELTA(kind)) {
        const uint cell = (uint) ((u.cache/args.cell_step + args.first_cell) % args.cells), in_group = cell % KV_DELTA_CELLS;
        const uint rows = min((uint) KV_DELTA_CELLS, args.cells - (cell - in_group));
        kv_delta_key(row - in_group*args.cell_step, args.cell_step, rows, in_group, levels, lane, y);
        kv_store_floats(y, args.value_step, lane, target + u.floats);
        return;
    }
    kv_row_decode(row, kind, size, levels, lane, y);
    kv_store_floats(y, args.value_step, lane, target + u.floats);
}

kernel void kv_copy_rows(
        constant kv_rows_args & args [[buffer(0)]],
        device const uchar * cache [[buffer(1)]],
        device const uchar * index [[buffer(2)]],
        device uchar * target [[buffer(3)]],
        uint3 group [[threadgroup_position_in_grid]],
        ushort simdgroup [[simdgroup_index_in_threadgroup]],
        ushort simdgroups [[simdgroups_per_threadgroup]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint unit = group.x*simdgroups + simdgroup;
    if (unit >= args.units) {
        return;
    }
    // The other side is a cache too: a head of it is one step.
    const kv_unit u = kv_unit_at(args, index, unit, args.value_step);
    for (uint i = lane; i < kv_row_bytes(FC_rows_kind, FC_rows_size); i += 32) {
        target[u.floats + i] = cache[u.cache + i];
    }
}

// The writer of one head of one stream: what it keeps from row to row. All of it is the same in all lanes; arrays are in the
// simdgroup's own threadgroup memory.
struct kv_writer {
    device uchar * group_row; // the first row of the group whose I-frame is in m, null for none
    ulong step;
    uint rows; // of the group
    int at;    // the row whose deviation is in u, -1 for none
};

// u becomes the deviation of row t, from that of row t - 1.
static inline void kv_writer_step(
        kv_writer w, uint t, threadgroup const float * m, threadgroup const float * levels, uint lane, threadgroup float * u) {
    device const uchar * row = w.group_row + t*w.step;
    const bool chained = kv_chained(w.group_row, w.step, t), alone = kv_kind_of(row) == KV_DELTA_ALONE;
    for (uint i = lane; i < (uint) FC_rows_size; i += 32) {
        const float d = kv_row_value(row, FC_rows_kind, FC_rows_size, i, levels);
        u[i] = chained ? fma(u[i], KV_DELTA_RHO, d) : alone ? d - m[i] : d;
    }
}

// Brings u to row t, which is written.
static inline kv_writer kv_writer_go_to(
        kv_writer w, uint t, threadgroup const float * m, threadgroup const float * levels, uint lane, threadgroup float * u) {
    if (w.at == (int) t) {
        return w;
    }
    uint first = t;
    while (w.at + 1 != (int) first && kv_chained(w.group_row, w.step, first)) {
        --first;
    }
    for (uint row = first; row <= t; ++row) {
        kv_writer_step(w, row, m, levels, lane, u);
    }
    w.at = (int) t;
    return w;
}

// Codes a key in row t, from the deviation `before` of the row before where there is one and it helps.
static inline void kv_writer_encode(
        kv_writer w, uint t, threadgroup const float * key, threadgroup const float * m, threadgroup const float * before,
        bool has_before, threadgroup const float * levels, uint lane, threadgroup float * work) {
    const uint size = FC_rows_size;
    float alone = 0.0f, restart = 0.0f, chained = 0.0f;
    for (uint i = lane; i < size; i += 32) {
        const float x = key[i], from_m = x - m[i];
        alone = fma(x, x, alone);
        restart = fma(from_m, from_m, restart);
        const float from_both = has_before ? fma(before[i], -KV_DELTA_RHO, from_m) : 0.0f;
        chained = fma(from_both, from_both, chained);
    }
    alone = simd_sum(alone);
    restart = simd_sum(restart);
    chained = simd_sum(chained);
    const uint kind = has_before && chained < min(restart, alone) ? KV_DELTA_CHAINED
                      : restart <= alone                          ? KV_DELTA_RESTART
                                                                  : KV_DELTA_ALONE;
    for (uint i = lane; i < size; i += 32) {
        const float from_m = key[i] - m[i];
        work[i] = kind == KV_DELTA_CHAINED   ? fma(before[i], -KV_DELTA_RHO, from_m)
                  : kind == KV_DELTA_RESTART ? from_m
                                             : key[i];
    }
    device uchar * row = w.group_row + t*w.step;
    kv_row_encode_difference(work, FC_rows_kind, size, levels, lane, row);
    if (lane == 0) {
        device ushort * slot = (device ushort *) (row + kv_delta_share(FC_rows_kind, size));
        *slot = (*slot & ~KV_DELTA_KIND) | kind;
    }
    // The row is read again, by other lanes, and so is the memory of its codes written.
    simdgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
}

// The I-frame of a group: the key; zeros where rows are there already without one.
static inline kv_writer kv_writer_found(
        kv_writer w, threadgroup const float * key, uint lane, threadgroup float * m) {
    const uint size = FC_rows_size, kind = FC_rows_kind;
    bool taken = false;
    for (uint t = lane; t < w.rows; t += 32) {
        taken = taken || kv_kind_of(w.group_row + t*w.step) != KV_DELTA_EMPTY;
    }
    taken = simd_any(taken);
    bool beyond = false;
    for (uint i = lane; i < size; i += 32) {
        m[i] = taken ? 0.0f : key[i];
        beyond = beyond || fabs(m[i]) > KV_DELTA_LIMIT;
    }
    beyond = simd_any(beyond);
    const uint share = kv_delta_share(kind, size), slots = kv_delta_slots(size);
    for (uint i = lane; i < max(size, w.rows*slots); i += 32) {
        const ushort stored = i < size && !beyond ? kv_delta_slot(m[i]) : (ushort) 0;
        const bool kept = i < w.rows*slots;
        if (kept) {
            device ushort * slot = (device ushort *) (w.group_row + i/slots*w.step + share) + i % slots;
            const ushort flags = i % slots == 0 ? *slot & KV_DELTA_KIND : 0;
            *slot = stored | flags | (i == 0 ? KV_DELTA_FRAMED : 0);
        }
        if (i < size) {
            m[i] = kept ? kv_delta_value(stored) : 0.0f;
        }
    }
    // Other lanes look for the I-frame; a shuffle stands between, but orders no memory.
    simdgroup_barrier(mem_flags::mem_device);
    w.at = -1;
    return w;
}

kernel void kv_set_groups(
        constant kv_rows_args & args [[buffer(0)]],
        device const uchar * source [[buffer(1)]],
        device const uchar * index [[buffer(2)]],
        device uchar * cache [[buffer(3)]],
        threadgroup float * memory [[threadgroup(0)]],
        uint3 group [[threadgroup_position_in_grid]],
        ushort lane [[thread_index_in_simdgroup]]) {
    const uint size = FC_rows_size, kind = FC_rows_kind, head_bytes = kv_row_bytes(kind, size);
    const uint own_head = group.x, own_stream = group.y;
    threadgroup float * m = memory, * u = m + size, * key = u + size, * work = key + size, * spare = work + size;
    threadgroup float * levels = spare + size;
    // Read behind the barrier of the first row.
    kv_row_levels(kind, lane, levels);
    kv_writer w;
    w.group_row = nullptr;
    w.step = args.cell_step;
    w.rows = 0;
    w.at = -1;
    for (uint row = 0; row < args.units/args.heads; ++row) {
        for (uint head = 0; head < args.heads; ++head) {
            const kv_unit unit = kv_unit_at(args, index, row*args.heads + head, size*args.value_step);
            const ulong cell_of_all = unit.cache/w.step + args.first_cell;
            if (!unit.found || unit.cache % w.step/head_bytes != own_head || cell_of_all/args.cells != own_stream) {
                continue;
            }
            const uint cell = (uint) (cell_of_all % args.cells), t = cell % KV_DELTA_CELLS;
            device uchar * target = cache + unit.cache;
            bool zero = true;
            for (uint i = lane; i < size; i += 32) {
                const float x = kv_float_at(source + unit.floats + i*args.value_step, FC_rows_float_kind);
                zero = zero && (as_type<uint>(x) & 0x7fffffffu) == 0;
                key[i] = kv_clean(x);
            }
            // A key of zeros leaves an empty cell alone: it reads as zeros already.
            if (simd_all(zero) && kv_kind_of(target) == KV_DELTA_EMPTY) {
                continue;
            }
            kv_enter_domain(key, kind, size, lane);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            device uchar * group_row = target - t*w.step;
            if (group_row != w.group_row) {
                w.group_row = group_row;
                w.rows = min((uint) KV_DELTA_CELLS, args.cells - (cell - t));
                w.at = -1;
                for (uint i = lane; i < size; i += 32) {
                    m[i] = kv_delta_frame(group_row, w.step, kind, size, w.rows, i);
                }
            }
            if (!kv_delta_framed(group_row, kind, size)) {
                w = kv_writer_found(w, key, lane, m);
            }
            // The row behind, if it is chained to what is overwritten, is kept as the key that it stands for.
            const bool has_before = t > 0 && kv_kind_of(target - w.step) != KV_DELTA_EMPTY;
            const bool has_after = t + 1 < w.rows && kv_kind_of(target + w.step) == KV_DELTA_CHAINED;
            if (has_after) {
                w = kv_writer_go_to(w, t + 1, m, levels, lane, u);
                for (uint i = lane; i < size; i += 32) {
                    spare[i] = m[i] + u[i];
                }
            }
            if (has_before) {
                w = kv_writer_go_to(w, t - 1, m, levels, lane, u);
            }
            kv_writer_encode(w, t, key, m, u, has_before, levels, lane, work);
            kv_writer_step(w, t, m, levels, lane, u);
            w.at = (int) t;
            if (has_after) {
                kv_writer_encode(w, t + 1, spare, m, u, false, levels, lane, work);
            }
        }
    }
}
