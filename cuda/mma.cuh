// Tensor cores: products of 16 x 16 by 16 x 8 halves into floats, the loads of their operands from shared memory, and products of
// 16 x 32 by 32 x 8 bytes into integers.
//
//     a   16 x 16: rows g and g + 8, columns 2t and 2t + 8, two neighbours in a register    g = lane/4, t = lane % 4
//     b   16 x 8:  rows 2t and 2t + 8, column g
//     d   16 x 8:  rows g and g + 8, columns 2t and 2t + 1
//
// Of bytes four neighbours are in a register, columns 4t and 4t + 16 of a, and the same rows of b.
#pragma once

#ifdef KV_CUDA_EMULATED
#include "cuda_runtime.h"
#endif

#include <stdint.h>

namespace kv {

static __device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::mma_f16(d, a, b0, b1);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
    __trap(); // refused by the host
#endif
}

// Four matrices of 8 x 8 halves; lanes 8n to 8n + 7 bring the addresses of the rows of matrix n.
static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void * row) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::load_matrices(r, row, false);
#elif __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((uint32_t) __cvta_generic_to_shared(row)) : "memory");
#endif
}

static __device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void * row) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::load_matrices(r, row, true);
#elif __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((uint32_t) __cvta_generic_to_shared(row)) : "memory");
#endif
}

// d = a b
static __device__ __forceinline__ void first_mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(KV_CUDA_EMULATED)
    d[0] = d[1] = d[2] = d[3] = 0;
    cuda_emulated::mma_s8(d, a, b0, b1);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
#endif
}

// d += a b
static __device__ __forceinline__ void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::mma_s8(d, a, b0, b1);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace kv
