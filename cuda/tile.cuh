// Tiles of 64 cells in shared memory: rows as they are stored, and unpacked as halves.
#pragma once

#include "attention.cuh"
#include "levels.cuh"

namespace kv {

using namespace metal;

constexpr uint CELLS = 64, SLAB = 128;
constexpr uint FRAME = CELLS;                 // the row of K that holds an I-frame
constexpr uint K_ROWS = CELLS + 8;            // a block of columns more
constexpr uint TILE_STEP = SLAB + 8;          // halves from row to row: neighbours lie in other banks
constexpr uint SCALES = SLAB/16;              // of a row of a slab

// Rows are copied to shared memory in units that the step from row to row is a multiple of, from the beginning of the unit that
// they begin in: so they begin as far behind a unit there.
struct row_units {
    uint unit, shift;
};

static __device__ __forceinline__ row_units units_of(const uint8_t * rows, uint64_t step) {
    const uint low = (uint) step, unit = low % 16 == 0 ? 16 : low % 8 == 0 ? 8 : low % 4 == 0 ? 4 : low % 2 == 0 ? 2 : 1;
    return { unit, (uint) (uintptr_t) rows % unit };
}

// Bytes from row to row of a tile of rows as they are stored, wherever in a unit they begin.
static __host__ __device__ inline uint raw_step_of(uint row_bytes) {
    return (row_bytes + 15 + 15)/16*16;
}

// What sums of values are multiplied by at the end: without it values of 4, 3 and 2 bits are exact as halves.
static __device__ __forceinline__ float value_unit(uint kind) {
    return KV_KIND_IS_SRFT(kind) ? kv_srft_unit(kv_code_bits(kind))*KV_SRFT_UNIT : 1.0f;
}

static __device__ __forceinline__ void fill_levels(uint kind, uint thread, float * levels) {
    if (KV_KIND_IS_BAND(kind)) {
        kv_band_levels(thread, levels);
        return;
    }
    if (kv_is_plain(kind) || !kv_is_chunked(kind) || kv_code_bits(kind) == 8 || thread >= 1u << kv_code_bits(kind)) {
        return;
    }
    levels[thread] = KV_KIND_IS_TURBO(kind) ? rintf(kv_turbo_levels(kind)[thread]*turbo_unit(kind))
                                            : kv_srft_levels(kv_code_bits(kind))[thread];
}

// Values i to i + 3 of a row, of its width, without the factor that they share with the others of 16.
static __device__ __forceinline__ void four_of(const uint8_t * row, uint kind, uint size, uint i, const float * levels, float (&x)[4], float & scale) {
    if (kv_is_float(kind)) {
        for (uint n = 0; n < 4; ++n) {
            x[n] = kv_float_at(row + (i + n)*kv_float_bytes(kind), kind);
        }
        scale = 1.0f;
        return;
    }
    if (KV_KIND_IS_POLAR(kind)) {
        const uint bits = kv_polar_bits(kind), block = i/16, upper = kv_polar_upper(row, size, block);
        for (uint n = 0; n < 4; n += 2) {
            const uint j = (i + n) % 16/2;
            const vec2 pair = kv_polar_weight(upper, j)*kv_polar_direction(bits, kv_polar_code(row, bits, size, block, j));
            x[n]     = pair.x;
            x[n + 1] = pair.y;
        }
        scale = kv_polar_radius(row, block);
        return;
    }
    if (kind == KV_KIND_QJL1 || (KV_KIND_IS_TURBO(kind) && i >= size)) {
        const uint at = i % size, signs = row[kv_sign_offset(kind, size) + at/8] >> at % 8;
        for (uint n = 0; n < 4; ++n) {
            x[n] = (signs >> n & 1) != 0 ? -1.0f : 1.0f;
        }
        scale = kv_sign_magnitude(row, kind, size);
        return;
    }
    const kv_chunk chunk = kv_row_chunk(row, kind, size, i);
    const uint at = i - chunk.start, step = chunk.count/chunk.parts;
    // Rows begin at even addresses.
    const uint16_t * bytes = (const uint16_t *) (chunk.codes + at % step);
    const uint word = bytes[0] | (uint) bytes[1] << 16;
    for (uint n = 0; n < 4; ++n) {
        x[n] = kv_row_level(chunk, kind, at + n, (uint8_t) (word >> 8*n), levels);
    }
    scale = kv_row_scale(row, kind, size, i);
    if (KV_KIND_IS_TURBO(kind)) {
        scale /= turbo_unit(kind);
    }
}

// Rows of 4-bit levels in chunks of 64.
static __device__ __forceinline__ bool is_4_bit(uint kind, uint size) {
    return (kind == KV_KIND_SRFT4 || kind == KV_KIND_DELTA4) && size % 64 == 0;
}

static __device__ __forceinline__ void fill_pairs(float unit, uint thread, uint * pairs) {
    for (uint i = thread; i < 256; i += blockDim.x) {
        const __half2 pair = __floats2half2_rn(kv_levels_4[i % 16]*unit, kv_levels_4[i/16]*unit);
        pairs[i] = *(const uint *) &pair;
    }
}

// Rows as they are stored to shared memory, by all threads; they are there behind wait_staged and a barrier, each of them
// `by.shift` bytes behind its place.
static __device__ __forceinline__ void stage(const uint8_t * rows, uint64_t step, row_units by, uint bytes, uint count, uint raw_step, uint8_t * raw) {
    const uint unit = by.unit, units = (by.shift + bytes + unit - 1)/unit, magic = 0xffffffffu/units + 1;
    for (uint i = threadIdx.x; i < count*units; i += blockDim.x) {
        const uint cell = units == 1 ? i : __umulhi(i, magic), at = (i - cell*units)*unit;
        const uint8_t * from = rows - by.shift + cell*step + at;
        uint8_t * to = raw + cell*raw_step + at;
#if __CUDA_ARCH__ >= 800
        const uint address = (uint) __cvta_generic_to_shared(to);
        if (unit == 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
        } else if (unit == 8) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(address), "l"(from) : "memory");
        } else if (unit == 4) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(address), "l"(from) : "memory");
        } else
#else
        if (unit >= 4) {
            for (uint n = 0; n < unit; n += 4) {
                *(uint *) (to + n) = *(const uint *) (from + n);
            }
        } else
#endif
        if (unit == 2) {
            *(uint16_t *) to = *(const uint16_t *) from;
        } else {
            *to = *from;
        }
    }
}

// One group of copies ends here.
static __device__ __forceinline__ void commit_staged() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All groups but the last are there.
static __device__ __forceinline__ void wait_staged() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

// Do words begin there? Else at even addresses.
static __device__ __forceinline__ bool is_whole(const uint8_t * at) {
    return (uintptr_t) at % 4 == 0;
}

static __device__ __forceinline__ uint word_at(const uint8_t * at, bool whole) {
    if (whole) {
        return *(const uint *) at;
    }
    return *(const uint16_t *) at | (uint) *(const uint16_t *) (at + 2) << 16;
}

// Both scales of a chunk, bytes, as halves; then one of them, twice.
static __device__ __forceinline__ uint both_halves(uint both) {
    return halves_of_scales<0>((both & 0xff) | (both & 0xff00) << 8);
}

static __device__ __forceinline__ uint twice(uint halves, uint which) {
    return prmt(halves, 0, which ? 0x3232 : 0x1010);
}

// `unpack` of 4-bit rows in shared memory: a word of codes is four values of one scale and four of the next.
template <bool VALUES> static __device__ __forceinline__ void unpack_4_bit(
        const uint8_t * raw, uint step, uint size, uint first, uint width, uint count, const uint * live, const uint * pairs, __half * tile, float * scales) {
    const uint words = width/8, word = threadIdx.x % words, c = word/8, j = word % 8*4;
    const bool whole = is_whole(raw + size/32);
#pragma unroll 4
    for (uint cell = threadIdx.x/words; cell < CELLS; cell += blockDim.x/words) {
        const bool there = live ? (live[cell/32] >> cell % 32 & 1) != 0 : cell < count;
        const uint8_t * row = raw + cell*step;
        const uint both = there ? *(const uint16_t *) (row + first/32 + 2*c) : 0;
        const uint codes = there ? word_at(row + size/32 + first/2 + 4*word, whole) : 0;
        const uint low = codes & 0x0f0f0f0f, high = codes >> 4 & 0x0f0f0f0f, l = low | low >> 4, h = high | high >> 4;
        uint x[4] = { pairs[l & 0xff], pairs[l >> 16 & 0xff], pairs[h & 0xff], pairs[h >> 16 & 0xff] };
        if (VALUES) {
            const uint halves = both_halves(both);
            x[0] = times(x[0], twice(halves, 0));
            x[1] = times(x[1], twice(halves, 0));
            x[2] = times(x[2], twice(halves, 1));
            x[3] = times(x[3], twice(halves, 1));
        } else if (j == 0) {
            float * to = scales + 4*c*K_ROWS + cell;
            to[0] = to[K_ROWS] = kv_srft_scale(both)*kv_srft_unit(4);
            to[2*K_ROWS] = to[3*K_ROWS] = kv_srft_scale(both >> 8)*kv_srft_unit(4);
        }
        __half * to = tile + cell*TILE_STEP + 64*c + j;
        *(uint2 *) to        = make_uint2(x[0], x[1]);
        *(uint2 *) (to + 32) = make_uint2(x[2], x[3]);
    }
}

static __device__ __forceinline__ uint2 four_halves(const float (&x)[4]) {
    const __half2 a = __floats2half2_rn(x[0], x[1]), b = __floats2half2_rn(x[2], x[3]);
    return { *(const uint *) &a, *(const uint *) &b };
}

// Values first .. first + width of the cells of a tile, by all threads: as halves with a scale for 16 of them, or (VALUES) as
// halves that have their scale in them, but for value_unit; of the first `count` cells, or of those that `live` has a bit for.
template <bool VALUES> static __device__ __noinline__ void unpack(
        const uint8_t * rows, uint64_t step, uint kind, uint size, uint first, uint width, uint count, const uint * live,
        const float * levels, __half * tile, float * scales) {
    const uint quads = width/4, lanes = quads <= 16 ? 16 : 32, quad = threadIdx.x % lanes;
    for (uint cell = threadIdx.x/lanes; cell < CELLS; cell += blockDim.x/lanes) {
        const bool there = live ? (live[cell/32] >> cell % 32 & 1) != 0 : cell < count;
        float x[4] = {}, scale = 0.0f;
        if (there && quad < quads) {
            four_of(rows + cell*step, kind, size, first + 4*quad, levels, x, scale);
        }
        if (!VALUES && (kind == KV_KIND_BF16 || kind == KV_KIND_F32)) {
            // Beyond what a half holds: relative to a power of two, for 16 values.
            float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
            largest = fmaxf(largest, __shfl_xor_sync(KV_ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(KV_ALL_LANES, largest, 2));
            const uint exponent = __float_as_uint(largest) >> 23;
            if (exponent > 1 && exponent < 253) {
                scale = __uint_as_float(exponent << 23);
                for (uint n = 0; n < 4; ++n) {
                    x[n] *= __uint_as_float((254 - exponent) << 23);
                }
            }
        }
        if (quad >= quads) {
            continue;
        }
        if (VALUES) {
            scale /= value_unit(kind);
            for (uint n = 0; n < 4; ++n) {
                x[n] = fminf(fmaxf(x[n]*scale, -65504.0f), 65504.0f);
            }
        } else if (quad % 4 == 0) {
            scales[quad/4*K_ROWS + cell] = scale;
        }
        *(uint2 *) (tile + cell*TILE_STEP + 4*quad) = four_halves(x);
    }
}

}  // namespace kv
