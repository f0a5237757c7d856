// The SRFT of one row by one simdgroup, in registers and shuffles.
//
// The transform is defined in ggml-ext/src/rotation.rs: signs, a real Fourier transform of n = 2N values, packed real and
// orthonormal, computed as a complex transform of N values. Here N = P * L, L being the largest power of two up to 32 that
// divides N, and lane l holds the P values j = p L + l. With k = k1 + P k2
//
//     Z[k] = sum_l w_L^(l k2) ( w_N^(l k1) sum_p w_P^(p k1) z[p L + l] )
//
// so: a transform of P values inside each lane (P is 1 to 9), a twiddle, and a radix-2 transform of L values across
// lanes, log2 L shuffles for each of the P values. Loads are coalesced, no threadgroup memory is touched, and at the
// end the lane whose reversed bits are k2 holds the P neighbours Z[P k2 ...]. The mirror image Z[N - k], which the
// unmixing needs, is in the lane with all bits flipped, again one shuffle.
//
// | size | 64 | 80 | 96 | 112 | 128 | 192 | 256 | 320 | 384 | 512 | 576 |
// |---|---|---|---|---|---|---|---|---|---|---|---|
// | L | 32 | 8 | 16 | 8 | 32 | 32 | 32 | 32 | 32 | 32 | 32 |
// | P | 1 | 5 | 3 | 7 | 2 | 3 | 4 | 5 | 6 | 8 | 9 |
//
// Where L is below 32 the lanes above repeat what the first L do, so that shuffles are uniform.

#pragma once

#include "kv_tables.h"

#include <metal_stdlib>
using namespace metal;

// The largest P.
#define KV_ROTATION_VALUES 9

static inline uint kv_rotation_lanes(uint size) {
    return size % 64 == 0 ? 32 : size % 32 == 0 ? 16 : 8;
}

static inline uint kv_rotation_values(uint size) {
    return size/2/kv_rotation_lanes(size);
}

// Which k2 a lane holds after the transform, and which lane holds a k2.
static inline uint kv_rotation_reversed(uint size, uint lane) {
    return reverse_bits(lane) >> (clz(kv_rotation_lanes(size)) + 1);
}

// e^(-2 pi i k / size), k below size. With KV_ROOTS_BY_SINE to 21 bits, without a table: for what is not stored.
static inline float2 kv_root(uint size, uint k) {
    const bool beyond = k >= size/2;
    const uint i = beyond ? k - size/2 : k;
    float2 w;
#ifdef KV_ROOTS_BY_SINE
    const float angle = (float) i*(-6.28318531f/(float) size);
    w = float2(fast::cos(angle), fast::sin(angle));
#else
    if (size == 112) {
        w = kv_roots_112[i];
    } else if (size == 384) {
        w = kv_roots_384[i];
    } else if (512 % size == 0) {
        w = kv_roots_512[i*(512/size)];
    } else if (320 % size == 0) {
        w = kv_roots_320[i*(320/size)];
    } else {
        w = kv_roots_576[i*(576/size)];
    }
#endif
    return beyond ? -w : w;
}

// The place of a size in tables by head size.
static inline uint kv_size_index(uint size) {
    return size == 64 ? 0 : size == 80 ? 1 : size == 96 ? 2 : size == 112 ? 3 : size == 128 ? 4 : size == 192 ? 5 : size == 256 ? 6 : size == 512 ? 7 : size == 576 ? 8 : size == 320 ? 9 : 10;
}

// Whose signs: the rotation's, or those of the two transforms of the projection.
#define KV_SIGNS_ROTATION 0
#define KV_SIGNS_FIRST 1
#define KV_SIGNS_SECOND 2

// Words of the signs of one set.
#define KV_SIGN_WORDS 86

// The sign of value i.
static inline float kv_sign(uint size, uint set, uint i) {
    const uint word = size == 64    ? 0
                      : size == 80  ? 2
                      : size == 96  ? 5
                      : size == 112 ? 8
                      : size == 128 ? 12
                      : size == 192 ? 16
                      : size == 256 ? 22
                      : size == 512 ? 30
                      : size == 576 ? 46
                      : size == 320 ? 64
                                    : 74;
    return (kv_signs[KV_SIGN_WORDS*set + word + i/32] >> (i % 32) & 1) != 0 ? -1.0f : 1.0f;
}

static inline float2 kv_product(float2 a, float2 b) {
    return float2(fma(-a.y, b.y, a.x*b.x), fma(a.x, b.y, a.y*b.x));
}

static inline void kv_dft_4(thread float2 & a, thread float2 & b, thread float2 & c, thread float2 & d) {
    const float2 s0 = a + c, d0 = a - c, s1 = b + d, d1 = b - d;
    a = s0 + s1;
    b = float2(d0.x + d1.y, d0.y - d1.x);
    c = s0 - s1;
    d = float2(d0.x - d1.y, d0.y + d1.x);
}

// The transform of an odd number of values: sums and differences of mirrored values against cos and sin.
static inline void kv_dft_odd(thread float2 * z, uint size, uint count) {
    float2 result[KV_ROTATION_VALUES];
    result[0] = z[0];
    for (uint i = 1; i < count; ++i) {
        result[0] += z[i];
    }
    for (uint j = 1; j <= count/2; ++j) {
        float2 c = z[0], s = float2(0.0f);
        for (uint i = 1; i <= count/2; ++i) {
            const float2 w = kv_root(size, i*j % count*(size/count));
            c = fma(z[i] + z[count - i], float2(w.x), c);
            s = fma(z[i] - z[count - i], float2(w.y), s);
        }
        // w.y is -sin, so this is c + i s with the signs of e^-i.
        result[j] = float2(c.x - s.y, c.y + s.x);
        result[count - j] = float2(c.x + s.y, c.y - s.x);
    }
    for (uint i = 0; i < count; ++i) {
        z[i] = result[i];
    }
}

// The transform of the `count` values of a lane, in place.
static inline void kv_dft(thread float2 * z, uint size, uint count) {
    if (count == 1) {
        return;
    }
    if (count == 2) {
        const float2 a = z[0];
        z[0] = a + z[1];
        z[1] = a - z[1];
        return;
    }
    if (count == 4) {
        kv_dft_4(z[0], z[1], z[2], z[3]);
        return;
    }
    if (count == 8) {
        float2 even[4], odd[4];
        for (uint i = 0; i < 4; ++i) {
            even[i] = z[2*i];
            odd[i] = z[2*i + 1];
        }
        kv_dft_4(even[0], even[1], even[2], even[3]);
        kv_dft_4(odd[0], odd[1], odd[2], odd[3]);
        for (uint i = 0; i < 4; ++i) {
            const float2 turned = kv_product(odd[i], kv_root(size, i*(size/8)));
            z[i] = even[i] + turned;
            z[i + 4] = even[i] - turned;
        }
        return;
    }
    if (count == 6) {
        // Good and Thomas: three transforms of pairs, two of threes, and no twiddle between them.
        float2 sums[3], differences[3];
        for (uint i = 0; i < 3; ++i) {
            const float2 a = z[2*i], b = z[(2*i + 3) % 6];
            sums[i] = a + b;
            differences[i] = a - b;
        }
        kv_dft_odd(sums, size, 3);
        kv_dft_odd(differences, size, 3);
        for (uint k = 0; k < 3; ++k) {
            z[4*k % 6] = sums[k];
            z[(4*k + 3) % 6] = differences[k];
        }
        return;
    }
    kv_dft_odd(z, size, count);
}

// The complex transform: lane l brings z[p] = value p L + l and leaves with z[k1] = value P k2 + k1, k2 being its reversed
// bits.
static inline void kv_transform(thread float2 * z, uint size, uint lane) {
#pragma METAL fp math_mode(safe)
    const uint lanes = kv_rotation_lanes(size), values = kv_rotation_values(size);
    const uint l = lane % lanes;
    kv_dft(z, size, values);
    for (uint k1 = 1; k1 < values; ++k1) {
        z[k1] = kv_product(z[k1], kv_root(size, 2*l*k1));
    }
    for (uint m = lanes/2; m > 0; m /= 2) {
        const bool upper = (l & m) != 0;
        const float2 w = kv_root(size, (l & (m - 1))*(size/2/m));
        for (uint i = 0; i < values; ++i) {
            const float2 other = simd_shuffle_xor(z[i], (ushort) m);
            z[i] = upper ? kv_product(other - z[i], w) : z[i] + other;
        }
    }
}

// y = R x: z holds (x[2j], x[2j + 1]), signs applied, at j = p L + l, and then (y[k], y[n + k]) at k = P k2 + k1 = `first` + k1.
static inline uint kv_rotate_lanes(thread float2 * z, uint size, uint lane) {
    const uint lanes = kv_rotation_lanes(size), values = kv_rotation_values(size);
    const uint n = size/2;
    kv_transform(z, size, lane);
    const uint l = lane % lanes, k2 = kv_rotation_reversed(size, l);
    const uint opposite = kv_rotation_reversed(size, (lanes - k2) % lanes);
    // X_k = E_k + w^k O_k with E, O the transforms of the even and odd values.
    const float scale = 0.5f*sqrt(1.0f/n), side = sqrt(0.5f/n);
    const float2 first = simd_shuffle(z[0], (ushort) (lane - l + opposite));
    float2 result[KV_ROTATION_VALUES];
    for (uint k1 = 0; k1 < values; ++k1) {
        const float2 mirror = k1 == 0 ? first : simd_shuffle_xor(z[values - k1], (ushort) (lanes - 1));
        const uint k = values*k2 + k1;
        const float2 a = z[k1], w = kv_root(size, k);
        const float2 e = float2(a.x + mirror.x, a.y - mirror.y);
        const float2 o = float2(a.y + mirror.y, mirror.x - a.x);
        result[k1] = float2(fma(o.y, -w.y, fma(o.x, w.x, e.x)), fma(o.y, w.x, fma(o.x, w.y, e.y)))*scale;
        if (k == 0) {
            result[k1] = float2(a.x + a.y, a.x - a.y)*side;
        }
    }
    for (uint k1 = 0; k1 < values; ++k1) {
        z[k1] = result[k1];
    }
    return values*k2;
}

// The same to y, the simdgroup's own threadgroup memory, which others may read behind a barrier.
static inline void kv_rotate(thread float2 * z, uint size, uint lane, threadgroup float * y) {
    const uint first = kv_rotate_lanes(z, size, lane);
    if (lane < kv_rotation_lanes(size)) {
        for (uint k1 = 0; k1 < kv_rotation_values(size); ++k1) {
            y[first + k1] = z[k1].x;
            y[size/2 + first + k1] = z[k1].y;
        }
    }
}

// x = R^-1 y: z[k1] becomes (x[2j], x[2j + 1]) at j = P k2 + k1.
static inline void kv_rotate_back(threadgroup const float * y, uint size, uint set, uint lane, thread float2 * z) {
    const uint lanes = kv_rotation_lanes(size), values = kv_rotation_values(size);
    const uint n = size/2;
    const uint l = lane % lanes, k2 = kv_rotation_reversed(size, l);
    const float scale = 0.5f*sqrt(1.0f/n), side = sqrt(0.5f/n);
    for (uint p = 0; p < values; ++p) {
        const uint k = p*lanes + l;
        if (k == 0) {
            z[p] = float2(y[0] - y[n], y[0] + y[n])*side;
            continue;
        }
        const float2 a = float2(y[k], y[n + k]), b = float2(y[n - k], y[n + n - k]);
        const float2 w = kv_root(size, k);
        const float2 d = float2(a.x - b.x, a.y + b.y);
        // O_k = conj(w^k) (X_k - conj X_(N-k)), Z_k = E_k + i O_k.
        const float2 o = float2(fma(d.y, w.y, d.x*w.x), fma(d.x, -w.y, d.y*w.x));
        // The inverse of a transform is the transform with real and imaginary parts exchanged.
        z[p] = float2(a.y - b.y + o.x, a.x + b.x - o.y)*scale;
    }
    kv_transform(z, size, lane);
    for (uint k1 = 0; k1 < values; ++k1) {
        const uint j = values*k2 + k1;
        z[k1] = float2(z[k1].y*kv_sign(size, set, 2*j), z[k1].x*kv_sign(size, set, 2*j + 1));
    }
}

// The first value that a lane holds after kv_rotate_back, 2 P of them; lanes from kv_rotation_lanes on repeat the first.
static inline uint kv_rotated_first(uint size, uint lane) {
    return 2*kv_rotation_values(size)*kv_rotation_reversed(size, lane % kv_rotation_lanes(size));
}

// y = factor * R x from threadgroup memory that the simdgroup has written, y may be x.
static inline void kv_rotate_from(threadgroup const float * x, uint size, uint set, float factor, uint lane, threadgroup float * y) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float2 z[KV_ROTATION_VALUES];
    const uint lanes = kv_rotation_lanes(size);
    for (uint p = 0; p < kv_rotation_values(size); ++p) {
        const uint i = 2*(p*lanes + lane % lanes);
        z[p] = float2(x[i]*kv_sign(size, set, i), x[i + 1]*kv_sign(size, set, i + 1))*factor;
    }
    // All have read before one writes; a shuffle stands between, but orders no memory.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    kv_rotate(z, size, lane, y);
}

// y = R^-1 y in place, for whoever reads it behind a barrier.
static inline void kv_rotate_back_in_place(threadgroup float * y, uint size, uint set, uint lane) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float2 z[KV_ROTATION_VALUES];
    kv_rotate_back(y, size, set, lane, z);
    // All have read before one writes; a shuffle stands between, but orders no memory.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint first = kv_rotated_first(size, lane);
    if (lane < kv_rotation_lanes(size)) {
        for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
            y[first + i] = z[i/2][i % 2];
        }
    }
}
