// The codecs, from the headers that the Metal kernels have too: rows, levels, rotation, groups. In namespace kv, with Metal's
// names for warps and vectors (msl/metal_stdlib).
#pragma once

#include <cstring>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <stdint.h>

#include "../shaders/kv_args.h"

#pragma nv_diag_suppress 177  // a function that this file does not use
#pragma nv_diag_suppress 161  // Metal's pragmas, as 20199
#pragma nv_diag_suppress 1835 // __device__ before a parameter
#pragma nv_diag_suppress 20199

namespace kv {
#include <metal_stdlib>
#include "../shaders/kv_band.h"
#include "../shaders/kv_delta.h"
#include "../shaders/kv_polar.h"
#include "../shaders/kv_rotation.h"
#include "../shaders/kv_row.h"
#include "../shaders/kv_signs.h"
#include "../shaders/kv_srft.h"
#undef device
#undef thread
#undef threadgroup
#undef constant
#undef inline
#undef char
#undef float2
#undef float4
#undef uint2
#pragma pop_macro("__device__")

// A number of an index of rows, of 4 or 8 bytes.
static __device__ __forceinline__ int64_t row_number(const uint8_t * at, unsigned bytes) {
    return bytes == 8 ? *(const int64_t *) at : (int64_t) *(const int32_t *) at;
}
}  // namespace kv
