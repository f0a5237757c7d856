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
}  // namespace kv
