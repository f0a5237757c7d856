// Bulk copies from memory to shared memory, and the barriers that they arrive at: from Hopper on.
#pragma once

#include <cuda_runtime.h>

#include <stdint.h>

namespace kv {

using uint = unsigned;

static __device__ __forceinline__ uint shared_address(const void * at) {
#ifdef KV_CUDA_EMULATED
    return cuda_emulated::shared_address(at);
#else
    return (uint) __cvta_generic_to_shared(at);
#endif
}

// A phase ends with so many arrivals and the bytes that were asked for.
static __device__ __forceinline__ void begin_barrier(uint bar, uint arrivals) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::begin_barrier(bar, arrivals);
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(arrivals) : "memory");
#endif
}

// Barriers that have begun are there for copies, and when threads have met, for them.
static __device__ __forceinline__ void announce_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

static __device__ __forceinline__ void arrive(uint bar) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::arrive(bar);
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
#endif
}

// Waits for the end of the phase of this parity.
static __device__ __forceinline__ void await(uint bar, uint parity) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::await(bar, parity);
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@there bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" :: "r"(bar), "r"(parity) : "memory");
#endif
}

// Asks for bytes of the cache, from an address that is a multiple of 16. What is no multiple of 16 is copied here.
static __device__ __forceinline__ void ask_for(uint8_t * to, const uint8_t * from, uint bytes, uint bar) {
#if defined(KV_CUDA_EMULATED)
    memcpy(to, from, bytes);
    cuda_emulated::arrive(bar);
#elif __CUDA_ARCH__ >= 900
    const uint most = bytes & ~15u;
#pragma unroll 1
    for (uint i = most; i < bytes; i += 2) {
        *(unsigned short *) (to + i) = __ldcg((const unsigned short *) (from + i));
    }
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(most) : "memory");
    if (most > 0) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(shared_address(to)), "l"(from), "r"(most), "r"(bar) : "memory");
    }
#endif
}

}  // namespace kv
