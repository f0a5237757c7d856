// Bulk copies from memory to shared memory, and the barriers that they arrive at: from Hopper on.
#pragma once

#include <cuda_runtime.h>

#include <stdint.h>

// Kernels that copy in bulk have a body where there are copies.
#if defined(KV_CUDA_EMULATED) || __CUDA_ARCH__ >= 900
#define KV_HAS_BULK_COPIES 1
#else
#define KV_HAS_BULK_COPIES 0
#endif

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

// What bulk copies overwrite or read was written before this by the thread that asks for them.
static __device__ __forceinline__ void end_writes_before_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

static __device__ __forceinline__ void arrive(uint bar) {
#if defined(KV_CUDA_EMULATED)
    cuda_emulated::arrive(bar);
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
#endif
}

// Counts a warp that is done with what lies behind a barrier. By lane 0. ASKS: for `was_last`, which looks at it later: it takes a while.
template <bool ASKS> static __device__ __forceinline__ unsigned long long leave(uint bar, uint lane) {
    unsigned long long state = 0;
#if defined(KV_CUDA_EMULATED)
    if (lane == 0) {
        state = cuda_emulated::pending(bar);
        cuda_emulated::arrive(bar);
    }
#elif __CUDA_ARCH__ >= 900
    if constexpr (ASKS) {
        asm volatile(
            "{\n"
            ".reg .pred first;\n"
            "setp.eq.u32 first, %2, 0;\n"
            "@first mbarrier.arrive.shared::cta.b64 %0, [%1];\n"
            "}" : "+l"(state) : "r"(bar), "r"(lane) : "memory");
    } else if (lane == 0) {
        arrive(bar);
    }
#endif
    return state;
}

// Were all others done before? Then what they read has been read.
static __device__ __forceinline__ bool was_last(uint bar, unsigned long long state, uint lane) {
#if defined(KV_CUDA_EMULATED)
    return lane == 0 && state == 1;
#elif __CUDA_ARCH__ >= 900
    uint pending;
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
    if (lane == 0 && pending == 1) {
        asm volatile(
            "{\n"
            ".reg .pred there;\n"
            "mbarrier.test_wait.shared::cta.b64 there, [%0], %1;\n"
            "}" :: "r"(bar), "l"(state) : "memory");
        return true;
    }
#endif
    return false;
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

// Asks for bytes of the cache, from an address that is a multiple of 16. What is no multiple of 16 is copied here. ONCE: few others read them,
// if any, and they need not stay in the L2.
template <bool ONCE> static __device__ __forceinline__ void ask_for(uint8_t * to, const uint8_t * from, uint bytes, uint bar) {
#if KV_HAS_BULK_COPIES
    const uint most = bytes & ~15u;
#pragma unroll 1
    for (uint i = most; i + 1 < bytes; i += 2) {
        *(unsigned short *) (to + i) = __ldcg((const unsigned short *) (from + i));
    }
    if (bytes % 2 != 0) {
        to[bytes - 1] = __ldcg(from + bytes - 1);
    }
#endif
#if defined(KV_CUDA_EMULATED)
    memcpy(to, from, most);
    cuda_emulated::arrive(bar);
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(most) : "memory");
    if (most > 0) {
        if constexpr (ONCE) {
            unsigned long long policy;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                         :: "r"(shared_address(to)), "l"(from), "r"(most), "r"(bar), "l"(policy) : "memory");
        } else {
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         :: "r"(shared_address(to)), "l"(from), "r"(most), "r"(bar) : "memory");
        }
    }
#endif
}

}  // namespace kv
