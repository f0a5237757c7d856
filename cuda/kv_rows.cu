// SET_ROWS, GET_ROWS and copies: what ../shaders/kv_rows.metal does, with the same headers.
//
// A warp works on one head of one row, alone. Without an index the heads of one side go to the heads of the other in their
// order, whatever the shapes. Common head sizes are template arguments, so that the rotation stays in registers; 0 stands
// for the others.
//
// Cells that are coded together (delta, bands): a row depends on the rows of its group that were written before it, and on nothing
// else. So a block takes the rows of the op that fall into one group of one head: its warps rotate them, and one warp codes
// them in their order. Row numbers are on the device: each row of the op has a block, and the one whose row is the first of
// its group does the work.

#include "codec.cuh"
#include "kv_cuda.h"

namespace {

using namespace kv;
using namespace kv::metal;

using uint = unsigned;

constexpr int WARPS = 4;

struct rows_params {
    kv_rows_args    args;
    uint            kind, size, float_kind, index_bytes;
    const uint8_t * from;
    const uint8_t * index;
    uint8_t *       to;
};

// What is not a number counts as 0, and nothing is beyond a million.
__device__ __forceinline__ float clean(float x) {
    const uint bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0.0f;
    }
    return fminf(fmaxf(x, -1e6f), 1e6f);
}

struct unit_place {
    uint64_t floats; // bytes
    uint64_t cache;
    bool     found; // the index is one of the cache's rows
};

// `float_bytes` are those of a head on the other side.
__device__ __forceinline__ unit_place place_of(const rows_params & p, uint unit, uint64_t float_bytes) {
    const kv_rows_args & args = p.args;
    const uint head_bytes = kv_row_bytes(p.kind, p.size);
    unit_place u;
    const uint head = unit % args.heads, row = unit/args.heads;
    const uint i1 = row % args.rows[0], i2 = row/args.rows[0] % args.rows[1], i3 = row/args.rows[0]/args.rows[1];
    u.floats = i1*args.float_nb[0] + i2*args.float_nb[1] + i3*args.float_nb[2] + head*float_bytes;
    if (p.index_bytes == 0) {
        const uint cache_row = unit/args.cache_heads;
        const uint c1 = cache_row % args.cache_rows[0], c2 = cache_row/args.cache_rows[0] % args.cache_rows[1];
        const uint c3 = cache_row/args.cache_rows[0]/args.cache_rows[1];
        u.found = true;
        u.cache = c1*args.cache_nb[0] + c2*args.cache_nb[1] + c3*args.cache_nb[2] + (uint64_t) (unit % args.cache_heads)*head_bytes;
        return u;
    }
    const uint8_t * at = p.index + i1*args.index_nb[0] + i2 % args.index_rows[0]*args.index_nb[1] +
                         i3 % args.index_rows[1]*args.index_nb[2];
    const int64_t target = p.index_bytes == 8 ? *(const int64_t *) at : (int64_t) *(const int32_t *) at;
    u.found = target >= 0 && target < (int64_t) args.cache_rows[0];
    u.cache = (uint64_t) target*args.cache_nb[0] + i2*args.cache_nb[1] + i3*args.cache_nb[2] + (uint64_t) head*head_bytes;
    return u;
}

__device__ __forceinline__ void store_float(uint8_t * at, uint kind, float x) {
    if (kind == KV_KIND_F16) {
        *(__half *) at = __float2half_rn(x);
    } else if (kind == KV_KIND_BF16) {
        // To the nearest, ties to even.
        const uint bits = __float_as_uint(x);
        *(uint16_t *) at = (uint16_t) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        *(float *) at = x;
    }
}

template <uint SIZE> __global__ void __launch_bounds__(32*WARPS) kv_set_rows(const rows_params p) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.size, kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    const uint unit = blockIdx.x*WARPS + warp;
    if (unit >= p.args.units) {
        return;
    }
    const unit_place u = place_of(p, unit, size*p.args.value_step);
    if (!u.found) {
        return;
    }
    float * y = memory + warp*KV_ROWS_FLOATS(size);
    uint8_t * row = p.to + u.cache;
    for (uint i = lane; i < size; i += 32) {
        y[i] = clean(kv_float_at(p.from + u.floats + i*p.args.value_step, p.float_kind));
    }
    kv_row_encode(y, kind, size, lane, row);
}

// The floats of a head that has been decoded into its domain, in the warp's own shared memory.
__device__ __forceinline__ void store_floats(const rows_params & p, uint size, const float * y, uint lane, uint8_t * to) {
    const uint64_t step = p.args.value_step;
    __syncwarp();
    if (!kv_is_rotated(p.kind)) {
        for (uint i = lane; i < size; i += 32) {
            store_float(to + i*step, p.float_kind, y[i]);
        }
        return;
    }
    vec2 z[KV_ROTATION_VALUES];
    kv_rotate_back(y, size, KV_SIGNS_ROTATION, lane, z);
    const uint first = kv_rotated_first(size, lane);
    if (lane < kv_rotation_lanes(size)) {
        for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
            store_float(to + (first + i)*step, p.float_kind, z[i/2][i % 2]);
        }
    }
}

// What a row of a group stands for, in its domain: from the last row before it that is not chained.
__device__ __forceinline__ void delta_key(
        const uint8_t * group, uint64_t step, uint kind, uint size, uint rows, uint row, const float * levels, uint lane, float * y) {
    const auto kind_of = [&](uint t) { return kv_delta_kind(group + t*step, kind, size); };
    uint first = row;
    while (first > 0 && kind_of(first) == KV_DELTA_CHAINED && kind_of(first - 1) != KV_DELTA_EMPTY) {
        --first;
    }
    const bool empty = kind_of(row) == KV_DELTA_EMPTY;
    for (uint i = lane; i < size; i += 32) {
        const float m = kv_delta_frame(group, step, kind, size, rows, i);
        float u = 0.0f;
        for (uint t = first; t <= row; ++t) {
            const float d = kv_row_value(group + t*step, kind, size, i, levels);
            const bool alone = kind_of(t) == KV_DELTA_ALONE;
            u = t > first ? fmaf(u, KV_DELTA_RHO, d) : alone ? d - m : d;
        }
        y[i] = empty ? 0.0f : m + u;
    }
}

template <uint SIZE> __global__ void __launch_bounds__(32*WARPS) kv_get_rows(const rows_params p) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.size, kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    const uint unit = blockIdx.x*WARPS + warp;
    if (unit >= p.args.units) {
        return;
    }
    const unit_place u = place_of(p, unit, size*p.args.value_step);
    if (!u.found) {
        return;
    }
    // Behind the row of each warp is its table.
    float * y = memory + warp*KV_ROWS_FLOATS(size), * levels = y + size;
    const uint8_t * row = p.from + u.cache;
    kv_row_levels(kind, lane, levels);
    __syncwarp();
    if (KV_KIND_IS_DELTA(kind)) {
        const uint64_t step = p.args.cell_step;
        const uint cell = (uint) ((u.cache/step + p.args.first_cell) % p.args.cells), in_group = cell % KV_DELTA_CELLS;
        const uint rows = ::min((uint) KV_DELTA_CELLS, p.args.cells - (cell - in_group));
        delta_key(row - in_group*step, step, kind, size, rows, in_group, levels, lane, y);
        store_floats(p, size, y, lane, p.to + u.floats);
        return;
    }
    kv_row_decode(row, kind, size, levels, lane, y);
    store_floats(p, size, y, lane, p.to + u.floats);
}

__global__ void __launch_bounds__(32*WARPS) kv_copy_rows(const rows_params p) {
    const uint unit = blockIdx.x*WARPS + threadIdx.x/32, lane = threadIdx.x % 32;
    if (unit >= p.args.units) {
        return;
    }
    // The other side is a cache too: a head of it is one step.
    const unit_place u = place_of(p, unit, p.args.value_step);
    for (uint i = lane; i < kv_row_bytes(p.kind, p.size); i += 32) {
        p.to[u.floats + i] = p.from[u.cache + i];
    }
}

// groups

// The group of a unit: where its first row begins, of this head, and the cell in it. Nothing where the index is none of the
// cache's.
struct group_place {
    uint64_t group; // bytes from the beginning of the cache
    uint     cell;
    bool     found;
};

__device__ __forceinline__ group_place group_of(const rows_params & p, uint size, uint unit) {
    const kv_rows_args & args = p.args;
    group_place res;
    if (p.index_bytes != 0 && args.rows[1]*args.rows[2] == 1 && args.cache_nb[0] == args.cell_step) {
        // as llama.cpp writes: row numbers are cells
        const uint row = unit/args.heads, head = unit - row*args.heads;
        const uint8_t * at = p.index + row*args.index_nb[0];
        const int64_t target = p.index_bytes == 8 ? *(const int64_t *) at : (int64_t) *(const int32_t *) at;
        res.found = target >= 0 && target < (int64_t) args.cache_rows[0];
        res.cell  = ((uint) target + args.first_cell) % args.cells % KV_DELTA_CELLS;
        res.group = (uint64_t) ((uint) target - res.cell)*args.cell_step + (uint64_t) head*kv_row_bytes(p.kind, size);
        return res;
    }
    const unit_place u = place_of(p, unit, size*args.value_step);
    res.found = u.found;
    res.cell  = (uint) ((u.cache/args.cell_step + args.first_cell) % args.cells) % KV_DELTA_CELLS;
    res.group = u.cache - res.cell*args.cell_step;
    return res;
}

// What a warp keeps from row to row. Rows of the group are in memory; what they are and the slots that say so are here, so
// that a row is written without waiting for another.
struct group_writer {
    uint8_t * group;
    uint64_t  step;
    uint      rows;    // of the group
    uint      share;   // where the slots of a row begin
    int       at;      // the row whose deviation is in u, -1 for none
    uint64_t  written; // a bit for each row
    uint64_t  chained;
    uint64_t  alone;
    uint      slots[2]; // the first slots of rows `lane` and `lane + 32`

    __device__ __forceinline__ bool is_written(uint t) const { return (written >> t & 1) != 0; }
    // Has row t a row before it that it is chained to?
    __device__ __forceinline__ bool is_chained(uint t) const { return t > 0 && (chained >> t & 1) != 0 && is_written(t - 1); }
    __device__ __forceinline__ bool is_alone(uint t) const { return (alone >> t & 1) != 0; }

    __device__ __forceinline__ bool is_framed() const { return (__shfl_sync(KV_ALL_LANES, slots[0], 0) & KV_DELTA_FRAMED) != 0; }

    // The first slot of row t.
    __device__ __forceinline__ uint16_t * slot_of(uint t) const { return (uint16_t *) (group + t*step + share); }

    // What rows are, from memory.
    __device__ __forceinline__ void look(uint lane) {
        written = chained = alone = 0;
        for (uint n = 0; n < 2; ++n) {
            slots[n] = lane + 32*n < rows ? *slot_of(lane + 32*n) : 0;
            const uint kind = slots[n] & KV_DELTA_KIND;
            written |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind != KV_DELTA_EMPTY) << 32*n;
            chained |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_CHAINED) << 32*n;
            alone   |= (uint64_t) __ballot_sync(KV_ALL_LANES, kind == KV_DELTA_ALONE) << 32*n;
        }
    }

    // Row t is of this kind from now on.
    __device__ __forceinline__ void set_kind(uint t, uint kind, uint lane) {
        for (uint n = 0; n < 2; ++n) {
            if (lane + 32*n == t) {
                slots[n] = (slots[n] & ~KV_DELTA_KIND) | kind;
                *slot_of(t) = (uint16_t) slots[n];
            }
        }
        const uint64_t bit = 1ull << t;
        written |= bit;
        chained = kind == KV_DELTA_CHAINED ? chained | bit : chained & ~bit;
        alone   = kind == KV_DELTA_ALONE ? alone | bit : alone & ~bit;
    }
};

// u becomes the deviation of row t, which lies at `row`, from that of row t - 1.
__device__ __forceinline__ void writer_step(
        const group_writer & w, uint kind, uint size, uint t, const uint8_t * row, const float * m, const float * levels, uint lane, float * u) {
    const bool chained = w.is_chained(t), alone = w.is_alone(t);
    for (uint i = lane; i < size; i += 32) {
        const float d = kv_row_value(row, kind, size, i, levels);
        u[i] = chained ? fmaf(u[i], KV_DELTA_RHO, d) : alone ? d - m[i] : d;
    }
}

// Brings u to row t, which is written.
static __device__ void writer_go_to(group_writer & w, uint kind, uint size, uint t, const float * m, const float * levels, uint lane, float * u) {
    if (w.at == (int) t) {
        return;
    }
    uint first = t;
    while (w.at + 1 != (int) first && w.is_chained(first)) {
        --first;
    }
    for (uint row = first; row <= t; ++row) {
        writer_step(w, kind, size, row, w.group + row*w.step, m, levels, lane, u);
    }
    w.at = (int) t;
}

// Codes a key for row t, from the deviation `before` of the row before where there is one and it helps: in `line`, and from
// there to its row.
__device__ __forceinline__ void writer_encode(
        group_writer & w, uint kind, uint size, uint t, const float * key, const float * m, const float * before, bool has_before,
        const float * levels, uint lane, float * work, uint8_t * line) {
    float alone = 0.0f, restart = 0.0f, chained = 0.0f;
    for (uint i = lane; i < size; i += 32) {
        const float x = key[i], from_m = x - m[i];
        alone = fmaf(x, x, alone);
        restart = fmaf(from_m, from_m, restart);
        const float from_both = has_before ? fmaf(before[i], -KV_DELTA_RHO, from_m) : 0.0f;
        chained = fmaf(from_both, from_both, chained);
    }
    for (int n = 16; n > 0; n /= 2) {
        alone += __shfl_xor_sync(KV_ALL_LANES, alone, n);
        restart += __shfl_xor_sync(KV_ALL_LANES, restart, n);
        chained += __shfl_xor_sync(KV_ALL_LANES, chained, n);
    }
    const uint row_kind = has_before && chained < fminf(restart, alone) ? KV_DELTA_CHAINED
                          : restart <= alone                           ? KV_DELTA_RESTART
                                                                       : KV_DELTA_ALONE;
    for (uint i = lane; i < size; i += 32) {
        const float from_m = key[i] - m[i];
        work[i] = row_kind == KV_DELTA_CHAINED   ? fmaf(before[i], -KV_DELTA_RHO, from_m)
                  : row_kind == KV_DELTA_RESTART ? from_m
                                                 : key[i];
    }
    kv_row_encode_difference(work, kind, size, levels, lane, line);
    __syncwarp();
    uint16_t * row = (uint16_t *) (w.group + t*w.step);
    for (uint i = lane; i < w.share/2; i += 32) {
        row[i] = ((const uint16_t *) line)[i];
    }
    w.set_kind(t, row_kind, lane);
}

// The I-frame of a group: the key; zeros where rows are there already without one.
static __device__ void writer_found(group_writer & w, uint size, const float * key, uint lane, float * m) {
    const bool taken = w.written != 0;
    bool beyond = false;
    for (uint i = lane; i < size; i += 32) {
        m[i] = taken ? 0.0f : key[i];
        beyond = beyond || fabsf(m[i]) > KV_DELTA_LIMIT;
    }
    beyond = simd_any(beyond);
    const uint slots = kv_delta_slots(size);
    for (uint i = lane; i < ::max(size, w.rows*slots); i += 32) {
        const uint16_t stored = i < size && !beyond ? kv_delta_slot(m[i]) : (uint16_t) 0;
        const bool kept = i < w.rows*slots;
        if (kept && i % slots != 0) {
            w.slot_of(i/slots)[i % slots] = stored;
        }
        if (i < size) {
            m[i] = kept ? kv_delta_value(stored) : 0.0f;
        }
    }
    __syncwarp();
    // First slots are those of the lanes: what rows are stays.
    for (uint n = 0; n < 2; ++n) {
        const uint row = lane + 32*n, stored = row*slots < size ? kv_delta_slot(m[row*slots]) : 0;
        w.slots[n] = stored | (w.slots[n] & KV_DELTA_KIND) | (row == 0 ? KV_DELTA_FRAMED : 0);
        if (row < w.rows) {
            *w.slot_of(row) = (uint16_t) w.slots[n];
        }
    }
    w.at = -1;
}

// Levels are integers, so the middle between two is a multiple of 0.5, and what is nearest to y follows from ceil(2 y) alone.
struct nearest_table {
    float   level[512]; // of ceil(2 y) + 256
    uint8_t code[512];
};

__device__ __forceinline__ void fill_nearest(uint bits, const float * levels, nearest_table & table) {
    for (uint i = threadIdx.x; i < 512; i += blockDim.x) {
        uint code = 0;
        for (uint c = 1; c < 1u << bits; ++c) {
            code += (float) ((int) i - 256) > levels[c - 1] + levels[c] ? 1 : 0;
        }
        table.code[i]  = (uint8_t) code;
        table.level[i] = levels[code];
    }
}

__device__ __forceinline__ uint nearest_place(float y) {
    return (uint) (::min(::max(__float2int_ru(2.0f*y), -256), 255) + 256);
}

// kv_srft_encode for values in registers, `lane*N` and behind it; also what they decode to. `codes` is the warp's.
template <uint SIZE, uint BITS, uint N> __device__ __forceinline__ void encode_row(
        const float (&x)[N], uint lane, const nearest_table & table, uint8_t * codes, uint8_t * row, float (&decoded)[N]) {
    constexpr uint GROUP = 32, LANES = GROUP/N, MOST = 8;
    float top = x[0], bottom = x[0];
    for (uint i = 1; i < N; ++i) {
        top = fmaxf(top, x[i]);
        bottom = fminf(bottom, x[i]);
    }
    for (uint n = 1; n < LANES; n *= 2) {
        top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, n));
        bottom = fminf(bottom, __shfl_xor_sync(KV_ALL_LANES, bottom, n));
    }
    const float largest = -bottom > top ? bottom : top;
    const uint tries = kv_srft_tries(BITS);
    float xq[MOST], qq[MOST], scale[MOST];
    uint code[MOST];
#pragma unroll
    for (uint n = 0; n < MOST; ++n) {
        xq[n] = qq[n] = scale[n] = 0.0f;
        code[n] = 0;
        if (n < 2*tries) {
            const bool last = n >= tries;
            code[n]  = kv_srft_try(largest, BITS, last, last ? n - tries : n);
            scale[n] = kv_srft_scale(code[n])/KV_SRFT_UNIT;
            const float inverse = 1.0f/scale[n];
            for (uint i = 0; i < N; ++i) {
                const float q = table.level[nearest_place(x[i]*inverse)];
                xq[n] = fmaf(x[i], q, xq[n]);
                qq[n] = fmaf(q, q, qq[n]);
            }
        }
    }
    for (uint m = 1; m < LANES; m *= 2) {
#pragma unroll
        for (uint n = 0; n < MOST; ++n) {
            if (n < 2*tries) {
                xq[n] += __shfl_xor_sync(KV_ALL_LANES, xq[n], m);
                qq[n] += __shfl_xor_sync(KV_ALL_LANES, qq[n], m);
            }
        }
    }
    // The squared error is sum(x^2) - gain.
    uint best = 0;
    float gain = 0.0f, unit = 0.0f;
#pragma unroll
    for (uint n = 0; n < MOST; ++n) {
        const float g = scale[n]*(2.0f*xq[n] - scale[n]*qq[n]);
        best = g > gain ? code[n] : best;
        unit = g > gain ? scale[n] : unit;
        gain = g > gain ? g : gain;
    }
    const float inverse = best == 0 ? 0.0f : 1.0f/unit, kappa = kv_srft_unit(BITS)*KV_SRFT_UNIT;
    for (uint i = 0; i < N; ++i) {
        const uint at = nearest_place(x[i]*inverse);
        codes[lane*N + i] = best == 0 ? (uint8_t) 0 : table.code[at];
        decoded[i] = table.level[at]*unit*kappa;
    }
    if (lane % LANES == 0) {
        row[lane/LANES] = (uint8_t) best;
    }
    __syncwarp();
    uint8_t * body = row + kv_srft_scale_bytes(BITS, SIZE);
    for (uint b = lane; b < SIZE*BITS/8; b += 32) {
        body[b] = kv_srft_packed(codes, BITS, SIZE, b);
    }
    __syncwarp();
}

// Keys of a group that are rotated together, before they are coded one after the other.
__host__ __device__ constexpr uint batch_of(uint template_size) {
    return template_size ? 32 : 8;
}

struct group_memory {
    nearest_table nearest;
    float         levels[KV_LEVELS];
    uint          cells[32];
    bool          zero[32];
    uint8_t       codes[KV_LARGEST_SIZE];
    uint8_t       line[KV_LARGEST_SIZE + 128];
};

// writer_encode with the I-frame and the deviation in registers; the latter becomes that of row t.
template <uint SIZE, uint N> __device__ __forceinline__ void writer_encode_lanes(
        group_writer & w, uint kind, uint t, const float * key, const float (&m)[N], float (&u)[N], bool has_before, uint lane, group_memory & memory) {
    float x[N], alone = 0.0f, restart = 0.0f, chained = 0.0f;
    for (uint i = 0; i < N; ++i) {
        x[i] = key[lane*N + i];
        const float from_m = x[i] - m[i];
        alone = fmaf(x[i], x[i], alone);
        restart = fmaf(from_m, from_m, restart);
        const float from_both = has_before ? fmaf(u[i], -KV_DELTA_RHO, from_m) : 0.0f;
        chained = fmaf(from_both, from_both, chained);
    }
    for (int n = 16; n > 0; n /= 2) {
        alone += __shfl_xor_sync(KV_ALL_LANES, alone, n);
        restart += __shfl_xor_sync(KV_ALL_LANES, restart, n);
        chained += __shfl_xor_sync(KV_ALL_LANES, chained, n);
    }
    const uint row_kind = has_before && chained < fminf(restart, alone) ? KV_DELTA_CHAINED
                          : restart <= alone                           ? KV_DELTA_RESTART
                                                                       : KV_DELTA_ALONE;
    for (uint i = 0; i < N; ++i) {
        const float from_m = x[i] - m[i];
        x[i] = row_kind == KV_DELTA_CHAINED ? fmaf(u[i], -KV_DELTA_RHO, from_m) : row_kind == KV_DELTA_RESTART ? from_m : x[i];
    }
    float d[N];
    uint8_t * row = w.group + t*w.step;
    if (kind == KV_KIND_DELTA4) {
        encode_row<SIZE, 4>(x, lane, memory.nearest, memory.codes, row, d);
    } else {
        encode_row<SIZE, 3>(x, lane, memory.nearest, memory.codes, row, d);
    }
    w.set_kind(t, row_kind, lane);
    for (uint i = 0; i < N; ++i) {
        u[i] = row_kind == KV_DELTA_CHAINED ? fmaf(u[i], KV_DELTA_RHO, d[i]) : row_kind == KV_DELTA_ALONE ? d[i] - m[i] : d[i];
    }
}

// One block for (row of the op, head of the row).
template <uint SIZE, bool BANDS> __global__ void __launch_bounds__(32*WARPS) kv_set_groups(const rows_params p) {
    extern __shared__ float memory[];
    __shared__ group_memory own_memory;
    constexpr uint BATCH = batch_of(SIZE);
    // Codes of a lane are of one width, and m and u are in registers.
    constexpr bool IN_LANES = SIZE != 0 && !BANDS;
    const uint size = SIZE ? SIZE : p.size, kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32, units = p.args.units;
    // Rows of different heads of a row of floats are different units; those of a group are `stride` apart where the heads of
    // both sides agree, and are looked for one by one where they do not (copies between other shapes).
    const uint own = blockIdx.x, stride = p.index_bytes != 0 || p.args.heads == p.args.cache_heads ? p.args.heads : 1;
    const group_place mine = group_of(p, size, own);
    // The nearest first: most rows follow one of their group.
    for (int last = (int) own - (int) stride; last >= 0 && mine.found; last -= (int) (32*stride)) {
        const int unit = last - (int) (lane*stride);
        bool same = false;
        if (unit >= 0) {
            const group_place other = group_of(p, size, (uint) unit);
            same = other.found && other.group == mine.group;
        }
        if (simd_any(same)) {
            return; // all warps look at the same
        }
    }
    if (!mine.found) {
        return;
    }

    float * keys = memory, * m = keys + BATCH*size, * u = m + size, * work = u + size, * spare = work + size; // keys: [row][size]
    float * levels = own_memory.levels;
    kv_row_levels(kind, threadIdx.x, levels);
    __syncthreads();
    if (IN_LANES) {
        fill_nearest(kv_code_bits(kind), levels, own_memory.nearest);
    }
    group_writer w;
    w.group = p.to + mine.group;
    w.step  = p.args.cell_step;
    w.at    = -1;
    const uint64_t first_cell = mine.group/w.step + p.args.first_cell;
    w.rows = ::min((uint) KV_DELTA_CELLS, p.args.cells - (uint) (first_cell % p.args.cells));
    w.share = kv_delta_share(kind, size);
    w.look(lane);
    bool framed = w.is_framed();
    if (warp == 0) {
        for (uint i = lane; i < size; i += 32) {
            m[i] = kv_delta_frame(w.group, w.step, kind, size, w.rows, i);
        }
        __syncwarp();
    }
    constexpr uint N = SIZE == 64 ? 2 : SIZE == 128 ? 4 : 8;
    float mr[N], ur[N]; // of the lane: what m and u are otherwise
    for (uint i = 0; i < N; ++i) {
        mr[i] = IN_LANES && warp == 0 ? m[lane*N + i] : 0.0f;
        ur[i] = 0.0f;
    }

    for (uint base = own; base < units; base += 32*stride) {
        uint cell = 0;
        bool same = false;
        if (base + lane*stride < units) {
            const group_place other = group_of(p, size, base + lane*stride);
            same = other.found && other.group == mine.group;
            cell = other.cell;
        }
        uint left = __ballot_sync(KV_ALL_LANES, same);
        while (left != 0) {
            const uint count = ::min((uint) __popc(left), BATCH);
            for (uint k = 0; k < count; ++k, left &= left - 1) {
                const uint from = __ffs(left) - 1, t = __shfl_sync(KV_ALL_LANES, cell, from);
                if (k % WARPS != warp) {
                    continue;
                }
                const unit_place place = place_of(p, base + from*stride, size*p.args.value_step);
                float * key = keys + k*size;
                bool zero = true;
                for (uint i = lane; i < size; i += 32) {
                    const float x = kv_float_at(p.from + place.floats + i*p.args.value_step, p.float_kind);
                    zero = zero && (__float_as_uint(x) & 0x7fffffffu) == 0;
                    key[i] = clean(x);
                }
                zero = simd_all(zero);
                if (!BANDS) {
                    kv_rotate_from(key, size, KV_SIGNS_ROTATION, 1.0f, lane, key);
                }
                if (lane == 0) {
                    own_memory.cells[k] = t;
                    own_memory.zero[k] = zero;
                }
            }
            __syncthreads();
            for (uint k = 0; k < count && warp == 0; ++k) {
                const uint t = own_memory.cells[k];
                const float * key = keys + k*size;
                // A key of zeros leaves an empty cell alone: it reads as zeros already.
                if (own_memory.zero[k] && !w.is_written(t)) {
                    continue;
                }
                if (!framed) {
                    writer_found(w, size, key, lane, m);
                    framed = true;
                    for (uint i = 0; i < N && IN_LANES; ++i) {
                        mr[i] = m[lane*N + i];
                    }
                }
                // The row behind, if it is chained to what is overwritten, is kept as the key that it stands for.
                const bool has_before = t > 0 && w.is_written(t - 1);
                const bool has_after = t + 1 < w.rows && (w.chained >> (t + 1) & 1) != 0;
                if (has_after || (has_before && w.at != (int) t - 1)) {
                    for (uint i = 0; i < N && IN_LANES; ++i) {
                        u[lane*N + i] = ur[i];
                    }
                    __syncwarp();
                    if (has_after) {
                        writer_go_to(w, kind, size, t + 1, m, levels, lane, u);
                        for (uint i = lane; i < size; i += 32) {
                            spare[i] = m[i] + u[i];
                        }
                    }
                    if (has_before) {
                        writer_go_to(w, kind, size, t - 1, m, levels, lane, u);
                    }
                    __syncwarp();
                    for (uint i = 0; i < N && IN_LANES; ++i) {
                        ur[i] = u[lane*N + i];
                    }
                }
                if constexpr (!IN_LANES) {
                    writer_encode(w, kind, size, t, key, m, u, has_before, levels, lane, work, own_memory.line);
                    writer_step(w, kind, size, t, own_memory.line, m, levels, lane, u);
                    w.at = (int) t;
                    if (has_after) {
                        __syncwarp();
                        writer_encode(w, kind, size, t + 1, spare, m, u, false, levels, lane, work, own_memory.line);
                    }
                } else {
                    writer_encode_lanes<SIZE>(w, kind, t, key, mr, ur, has_before, lane, own_memory);
                    w.at = (int) t;
                    if (has_after) {
                        float other[N];
                        for (uint i = 0; i < N; ++i) {
                            other[i] = ur[i];
                        }
                        writer_encode_lanes<SIZE>(w, kind, t + 1, spare, mr, other, false, lane, own_memory);
                    }
                }
            }
            __syncthreads();
        }
    }
}

static rows_params params_of(const kv_cuda_rows & op) {
    return { op.args, op.kind, op.size, op.float_kind, op.index_bytes, (const uint8_t *) op.from, (const uint8_t *) op.index, (uint8_t *) op.to };
}

// The instance for a head size.
#define KV_BY_SIZE(size, kernel)                                             \
    ((size) == 64 ? kernel<64> : (size) == 128 ? kernel<128> : (size) == 256 ? kernel<256> : kernel<0>)

template <bool BANDS> static auto set_groups_of(uint size) {
    return size == 64 ? kv_set_groups<64, BANDS> : size == 128 ? kv_set_groups<128, BANDS> : size == 256 ? kv_set_groups<256, BANDS> : kv_set_groups<0, BANDS>;
}

}  // namespace

cudaError_t kv_cuda_set_rows(const kv_cuda_rows & op, cudaStream_t stream) {
    const rows_params p = params_of(op);
    if (op.args.units == 0) {
        return cudaSuccess;
    }
    if (KV_KIND_IS_DELTA(op.kind)) {
        const bool known = op.size == 64 || op.size == 128 || op.size == 256;
        const size_t shared = sizeof(float)*op.size*(batch_of(known) + 4);
        const auto kernel = KV_KIND_IS_BAND(op.kind) ? set_groups_of<true>(op.size) : set_groups_of<false>(op.size);
        kernel<<<op.args.units, 32*WARPS, shared, stream>>>(p);
    } else {
        const size_t shared = sizeof(float)*WARPS*KV_ROWS_FLOATS(op.size);
        KV_BY_SIZE(op.size, kv_set_rows)<<<(op.args.units + WARPS - 1)/WARPS, 32*WARPS, shared, stream>>>(p);
    }
    return cudaGetLastError();
}

cudaError_t kv_cuda_get_rows(const kv_cuda_rows & op, cudaStream_t stream) {
    if (op.args.units == 0) {
        return cudaSuccess;
    }
    const size_t shared = sizeof(float)*WARPS*KV_ROWS_FLOATS(op.size);
    KV_BY_SIZE(op.size, kv_get_rows)<<<(op.args.units + WARPS - 1)/WARPS, 32*WARPS, shared, stream>>>(params_of(op));
    return cudaGetLastError();
}

cudaError_t kv_cuda_copy_rows(const kv_cuda_rows & op, cudaStream_t stream) {
    if (op.args.units == 0) {
        return cudaSuccess;
    }
    kv_copy_rows<<<(op.args.units + WARPS - 1)/WARPS, 32*WARPS, 0, stream>>>(params_of(op));
    return cudaGetLastError();
}
