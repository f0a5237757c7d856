// Launches that begin before the one before them has ended.
//
// A kernel may read before it waits only if the launch before it waits before it lets it begin: then all that came earlier has ended.
// What that launch itself makes is read behind the wait, or where it is announced (queries.cuh).
#pragma once

#include <cuda_runtime.h>

#include <stdint.h>

namespace kv {

// Parameters that are indexed where they are, and not copied first.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define KV_IN_PLACE
#else
#define KV_IN_PLACE __grid_constant__
#endif

// A block's dynamic shared memory, in a header: cmake changes the text of sources alone where kernels are emulated.
#ifdef KV_CUDA_EMULATED
#define KV_SHARED_BYTES(name) uint8_t * const name = (uint8_t *) cuda_emulated::dynamic_shared()
#else
#define KV_SHARED_BYTES(name) extern __shared__ __align__(128) uint8_t name[]
#endif

// Lets the launch behind this one begin; it waits for the end of this one where it needs to.
static __device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the launch before.
static __device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Were the kernels compiled for the current GPU, or for one so old that they neither wait nor copy in bulk? (kv_decode.cu)
bool has_early_launches();

// Launches a kernel while the one before it is still under way, if it can wait for that where it needs to.
template <typename Params> static cudaError_t launch_early(void (*kernel)(Params), dim3 grid, unsigned threads, size_t shared, cudaStream_t stream, const Params & p) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim          = grid;
    config.blockDim         = threads;
    config.dynamicSmemBytes = shared;
    config.stream           = stream;
    config.attrs            = &early;
    config.numAttrs         = has_early_launches() ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace kv
