// Products of a warpgroup, 64 rows by 64 or 128 columns of halves into floats, which go on while the warps do something else: of
// Hopper alone (sm_90a).
//
// Of a thread, sums 4n to 4n + 3 are of rows g and g + 8 (of 16 that a warp has), columns 8n + 2t and 8n + 2t + 1: g = lane/4, t = lane % 4. As
// an operand of the next product a register has two neighbours, in the same order.
//
// Operands in shared memory are tiles (kv_prompt.cuh), which begin at multiples of 1024 bytes.
#pragma once

#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(KV_CUDA_EMULATED)
#define KV_HAS_WGMMA 1
#else
#define KV_HAS_WGMMA 0
#endif

namespace kv {

using uint = unsigned;

// How an operand lies: eight rows are 1024 bytes, and a panel is so many bytes, which counts where rows are summed over.
static __device__ __forceinline__ uint64_t operand_at(uint address, uint panel_bytes) {
    return (uint64_t) 1 << 62 | (uint64_t) (1024 >> 4) << 32 | (uint64_t) (panel_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// What was computed before is there for the products that follow.
static __device__ __forceinline__ void begin_products() {
#if KV_HAS_WGMMA && !defined(KV_CUDA_EMULATED)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// The products since the last call are a group.
static __device__ __forceinline__ void end_group() {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::end_group();
#elif KV_HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most N groups are under way.
template <int N> static __device__ __forceinline__ void await_groups() {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::await_groups(N);
#elif KV_HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
#endif
}

// The compiler is not to move what it does with sums across this.
template <uint N> static __device__ __forceinline__ void pin(float (&d)[N]) {
#ifndef KV_CUDA_EMULATED
#pragma unroll
    for (uint i = 0; i < N; ++i) {
        asm volatile("" : "+f"(d[i]) :: "memory");
    }
#endif
}

// Registers of the warps of a warpgroup from here on.
template <uint N> static __device__ __forceinline__ void take_registers() {
#if KV_HAS_WGMMA && !defined(KV_CUDA_EMULATED)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
#endif
}

template <uint N> static __device__ __forceinline__ void leave_registers() {
#if KV_HAS_WGMMA && !defined(KV_CUDA_EMULATED)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
#endif
}

#define KV_SUMS_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KV_SUMS_32(d)   KV_SUMS_8(d, 0), KV_SUMS_8(d, 8), KV_SUMS_8(d, 16), KV_SUMS_8(d, 24)
#define KV_SUMS_64(d)   KV_SUMS_32(d), KV_SUMS_8(d, 32), KV_SUMS_8(d, 40), KV_SUMS_8(d, 48), KV_SUMS_8(d, 56)

// d = a b' (+ d) over 16 values of rows of both, which lie in shared memory.
static __device__ __forceinline__ void multiply_shared(float (&d)[32], uint64_t a, uint64_t b, bool add) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::multiply_shared(d, sizeof(d)/sizeof(float), a, b, add);
#elif KV_HAS_WGMMA
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        " %16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, add, 1, 1, 0, 0;\n"
        "}" : KV_SUMS_32(d) : "l"(a), "l"(b), "r"((int) add));
#endif
}

static __device__ __forceinline__ void multiply_shared(float (&d)[64], uint64_t a, uint64_t b, bool add) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::multiply_shared(d, sizeof(d)/sizeof(float), a, b, add);
#elif KV_HAS_WGMMA
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        " %16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        " %32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        " %48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, add, 1, 1, 0, 0;\n"
        "}" : KV_SUMS_64(d) : "l"(a), "l"(b), "r"((int) add));
#endif
}

// d += a b over 16 rows of b in shared memory, a in registers.
static __device__ __forceinline__ void multiply_registers(float (&d)[32], const uint (&a)[4], uint64_t b) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::multiply_registers(d, sizeof(d)/sizeof(float), a, b);
#elif KV_HAS_WGMMA
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        " %16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
        : KV_SUMS_32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

static __device__ __forceinline__ void multiply_registers(float (&d)[64], const uint (&a)[4], uint64_t b) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::multiply_registers(d, sizeof(d)/sizeof(float), a, b);
#elif KV_HAS_WGMMA
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        " %16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        " %32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        " %48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : KV_SUMS_64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

#undef KV_SUMS_8
#undef KV_SUMS_32
#undef KV_SUMS_64

}  // namespace kv
