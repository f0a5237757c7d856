// In the place of CUDA's header: halves.
#pragma once

#include "cuda_runtime.h"

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float x) : bits(ggml_fp32_to_fp16(x)) {}
    operator float() const { return ggml_fp16_to_fp32(bits); }
};

struct __half2 {
    __half x, y;
};

typedef __half half;

inline __half         __float2half_rn(float x) { return x; }
inline float          __half2float(__half x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

inline __half __ushort_as_half(unsigned short bits) {
    __half res;
    res.bits = bits;
    return res;
}

inline __half2  __halves2half2(__half a, __half b) { return { a, b }; }
inline __half2  __floats2half2_rn(float a, float b) { return { __float2half_rn(a), __float2half_rn(b) }; }
inline ::float2 __half22float2(__half2 x) { return { x.x, x.y }; }
inline __half2  __hsub2(__half2 a, __half2 b) { return { (float) a.x - (float) b.x, (float) a.y - (float) b.y }; }
inline __half2  __hmul2(__half2 a, __half2 b) { return { (float) a.x*(float) b.x, (float) a.y*(float) b.y }; }
inline __half2  __hmin2(__half2 a, __half2 b) { return { fminf(a.x, b.x), fminf(a.y, b.y) }; }
inline __half2  __hmax2(__half2 a, __half2 b) { return { fmaxf(a.x, b.x), fmaxf(a.y, b.y) }; }
inline __half2  __half2half2(__half x) { return { x, x }; }
inline __half2  __float2half2_rn(float x) { return { x, x }; }
inline __half2  __low2half2(__half2 x) { return { x.x, x.x }; }
inline __half2  __high2half2(__half2 x) { return { x.y, x.y }; }
inline float    __low2float(__half2 x) { return x.x; }
inline float    __high2float(__half2 x) { return x.y; }
inline __half2  __habs2(__half2 x) { return { fabsf(x.x), fabsf(x.y) }; }
inline unsigned __hne2_mask(__half2 a, __half2 b) { return ((float) a.x != (float) b.x ? 0xffffu : 0) | ((float) a.y != (float) b.y ? 0xffff0000u : 0); }
inline unsigned __hgt2_mask(__half2 a, __half2 b) { return ((float) a.x > (float) b.x ? 0xffffu : 0) | ((float) a.y > (float) b.y ? 0xffff0000u : 0); }
