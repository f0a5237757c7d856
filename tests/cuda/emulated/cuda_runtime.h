// In the place of CUDA's header: what the kernels in cuda/ use of the language, for a C++ compiler. A thread of the GPU is a fiber of
// ../../metal/runtime.h, whose simdgroups are warps; blocks run one after the other.
//
// What cmake changes in the text of a file: `kernel<<<…>>>(…)` is `kernel / cuda_emulated::launch(…)(…)`,
// and dynamic shared memory is asked for by a call.
#pragma once

#include "../../metal/runtime.h"

#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

using std::isinf;

#define __global__
#define __device__
#define __host__
#define __forceinline__ __inline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static
#define __noinline__ __attribute__((noinline))

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct ushort4 { unsigned short x, y, z, w; };
struct char4 { signed char x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

inline float2 make_float2(float x, float y) { return { x, y }; }
inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
inline uint2  make_uint2(unsigned x, unsigned y) { return { x, y }; }
inline uint4  make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return { x, y, z, w }; }

// numbers

inline int                min(int a, int b) { return a < b ? a : b; }
inline unsigned           min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned long      min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline int                max(int a, int b) { return a > b ? a : b; }
inline unsigned           max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned long      max(unsigned long a, unsigned long b) { return a > b ? a : b; }

inline unsigned __float_as_uint(float x) {
    unsigned res;
    memcpy(&res, &x, sizeof(res));
    return res;
}

inline float __uint_as_float(unsigned x) {
    float res;
    memcpy(&res, &x, sizeof(res));
    return res;
}

inline float    __fadd_rn(float a, float b) { return a + b; }
inline float    __fadd_ru(float a, float b) {
    const float sum = a + b;
    return (double) sum < (double) a + (double) b ? nextafterf(sum, INFINITY) : sum;
}
inline float    __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float    __fsqrt_rn(float x) { return sqrtf(x); }
inline float    __cosf(float x) { return cosf(x); }
inline float    __sinf(float x) { return sinf(x); }
inline float    __expf(float x) { return expf(x); }
inline float    __fmul_rn(float a, float b) { return a*b; }
inline int      __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int      __ffsll(long long x) { return __builtin_ffsll(x); }
inline int      __popc(unsigned x) { return __builtin_popcount(x); }
inline int      __ffs(unsigned x) { return __builtin_ffs((int) x); }
inline int      __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int      __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long) x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned) ((uint64_t) a*b >> 32); }

// The words as one, high above low, shifted right; by 32 at most, or by the lower five bits.
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) { return (unsigned) (((uint64_t) high << 32 | low) >> (by < 32 ? by : 32)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return (unsigned) (((uint64_t) high << 32 | low) >> (by & 31)); }

inline unsigned __brev(unsigned x) {
    unsigned res = 0;
    for (int i = 0; i < 32; ++i) {
        res |= (x >> i & 1) << (31 - i);
    }
    return res;
}

inline void __threadfence() {}
[[noreturn]] inline void __trap() { abort(); }

template <typename T> T __ldg(const T * at) { return *at; }
template <typename T> T __ldcg(const T * at) { return *at; }

// Threads run one at a time.
inline unsigned atomicMin(unsigned * at, unsigned x) {
    const unsigned before = *at;
    *at = min(before, x);
    return before;
}

inline unsigned atomicMax(unsigned * at, unsigned x) {
    const unsigned before = *at;
    *at = max(before, x);
    return before;
}

inline unsigned atomicOr(unsigned * at, unsigned x) {
    const unsigned before = *at;
    *at |= x;
    return before;
}

// warps: all lanes come, as the mask that every caller gives says

#define CUDA_HERE const char * file = __builtin_FILE(), int line = __builtin_LINE()

namespace cuda_emulated {

enum op { SHUFFLE, SHUFFLE_UP, SHUFFLE_XOR, VOTE, BARRIER, MMA, MMA_BYTES, MATRICES, WARPGROUP, AWAIT };

template <typename T> T of_lane(T x, msl::Site site, unsigned (*from)(unsigned lane, unsigned n), unsigned n) {
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&x, sizeof(x), site, lane);
    T res;
    memcpy(&res, all.values[from(lane, n) % msl::LANES], sizeof(res));
    return res;
}

}  // namespace cuda_emulated

template <typename T> T __shfl_sync(unsigned, T x, unsigned n, CUDA_HERE) {
    return cuda_emulated::of_lane(x, { file, line, cuda_emulated::SHUFFLE }, [](unsigned, unsigned n) { return n; }, n);
}

template <typename T> T __shfl_up_sync(unsigned, T x, unsigned n, CUDA_HERE) {
    return cuda_emulated::of_lane(x, { file, line, cuda_emulated::SHUFFLE_UP }, [](unsigned lane, unsigned n) { return lane < n ? lane : lane - n; }, n);
}

template <typename T> T __shfl_xor_sync(unsigned, T x, unsigned n, CUDA_HERE) {
    return cuda_emulated::of_lane(x, { file, line, cuda_emulated::SHUFFLE_XOR }, [](unsigned lane, unsigned n) { return lane ^ n; }, n);
}

inline unsigned __ballot_sync(unsigned, bool x, CUDA_HERE) {
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&x, sizeof(x), { file, line, cuda_emulated::VOTE }, lane);
    unsigned res = 0;
    for (unsigned i = 0; i < msl::LANES; ++i) {
        res |= (all.active >> i & 1) != 0 && all.values[i][0] != 0 ? 1u << i : 0;
    }
    return res;
}

inline bool __any_sync(unsigned mask, bool x, CUDA_HERE) { return __ballot_sync(mask, x, file, line) != 0; }
inline bool __all_sync(unsigned mask, bool x, CUDA_HERE) { return __ballot_sync(mask, !x, file, line) == 0; }
inline void __syncwarp(CUDA_HERE) { msl::wait(msl::Wait::SimdBarrier, { file, line, cuda_emulated::BARRIER }); }
inline void __syncthreads(CUDA_HERE) { msl::wait(msl::Wait::GroupBarrier, { file, line, cuda_emulated::BARRIER }); }

inline unsigned __reduce_or_sync(unsigned, unsigned x, CUDA_HERE) {
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&x, sizeof(x), { file, line, cuda_emulated::VOTE }, lane);
    unsigned res = 0;
    for (unsigned i = 0; i < msl::LANES; ++i) {
        res |= *(const unsigned *) all.values[i];
    }
    return res;
}

inline int __syncthreads_or(int x, CUDA_HERE) {
    static int any = 0;
    __syncthreads(file, line); // all have seen and cleared what was said before
    any |= x;
    __syncthreads(file, line);
    const int res = any;
    __syncthreads(file, line);
    any = 0;
    return res;
}

// tensor cores: cuda/mma.cuh says who has what

namespace cuda_emulated {

void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CUDA_HERE);
void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CUDA_HERE);
void load_matrices(uint32_t (&r)[4], const void * row, bool transposed, CUDA_HERE);

// Products of warpgroups, at once: sums of a thread in the order of cuda/hopper/wgmma.cuh, operands by their descriptors.
void multiply_shared(float * d, size_t sums, uint64_t a, uint64_t b, bool add);
void multiply_registers(float * d, size_t sums, const uint32_t (&a)[4], uint64_t b, CUDA_HERE);
// A group of products has ended when all threads of the warpgroup have asked for it.
void end_group();
void await_groups(uint32_t under_way, CUDA_HERE);

// Barriers of bulk copies, by their address. A copy is done when it is asked for.
uint32_t shared_address(const void * at);
void *   at_shared_address(uint32_t address);
void     begin_barrier(uint32_t bar, uint32_t arrivals);
void     arrive(uint32_t bar);
uint32_t pending(uint32_t bar); // arrivals that the phase waits for
void     await(uint32_t bar, uint32_t parity, CUDA_HERE);

}  // namespace cuda_emulated

inline size_t __cvta_generic_to_shared(const void * at) { return cuda_emulated::shared_address(at); }
inline void * __cvta_shared_to_generic(size_t address) { return cuda_emulated::at_shared_address((uint32_t) address); }

// launches

namespace cuda_emulated {

// Runs a block for each place of the grid, in the order that the tests ask for; the process ends where lanes diverge, or a thread is not where
// others wait for it.
void run(dim3 grid, dim3 block, size_t shared, const std::function<void()> & kernel);
void * dynamic_shared();
void set_order(int order, uint32_t seed); // of msl_order

template <typename... Args> struct call {
    dim3                grid, block;
    size_t              shared;
    std::tuple<Args...> args;
};

struct launch {
    dim3   grid, block;
    size_t shared;

    launch(dim3 grid, dim3 block, size_t shared = 0, void * = nullptr) : grid(grid), block(block), shared(shared) {}
    template <typename... Args> call<Args...> operator()(const Args &... args) const { return { grid, block, shared, { args... } }; }
};

template <typename... Params, typename... Args> void operator/(void (*kernel)(Params...), const call<Args...> & c) {
    run(c.grid, c.block, c.shared, [&] { std::apply(kernel, c.args); });
}

}  // namespace cuda_emulated

using cuda_emulated::operator/;

namespace cuda_emulated {

template <uint32_t (msl::Place::*OF)[3], int AXIS> struct axis {
    operator unsigned() const { return (msl::place().*OF)[AXIS]; }
};

template <uint32_t (msl::Place::*OF)[3]> struct axes {
    axis<OF, 0> x;
    axis<OF, 1> y;
    axis<OF, 2> z;
};

}  // namespace cuda_emulated

constexpr cuda_emulated::axes<&msl::Place::thread_position_in_threadgroup> threadIdx = {};
constexpr cuda_emulated::axes<&msl::Place::threadgroup_position_in_grid>   blockIdx  = {};
constexpr cuda_emulated::axes<&msl::Place::threads_per_threadgroup>        blockDim  = {};
constexpr cuda_emulated::axes<&msl::Place::threadgroups_per_grid>          gridDim   = {};

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorNotSupported };
typedef void * cudaStream_t;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaMemsetAsync(void * to, int byte, size_t count, cudaStream_t) {
    memset(to, byte, count);
    return cudaSuccess;
}

// As the kernels were compiled for the newest GPU.
struct cudaFuncAttributes { int ptxVersion; };
inline cudaError_t cudaGetDevice(int * device) { *device = 0; return cudaSuccess; }
template <typename Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * res, Kernel) { res->ptxVersion = 90; return cudaSuccess; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) { return cudaSuccess; }

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};

struct cudaLaunchConfig_t {
    dim3                  gridDim, blockDim;
    size_t                dynamicSmemBytes;
    cudaStream_t          stream;
    cudaLaunchAttribute * attrs;
    unsigned              numAttrs;
};

template <typename Params> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(Params), const Params & p) {
    cuda_emulated::run(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { kernel(p); });
    return cudaSuccess;
}
