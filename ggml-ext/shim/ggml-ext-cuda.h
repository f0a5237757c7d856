// What the patch of ggml's CUDA backend calls. GGML_EXT_CUDA is defined where our kernels are part of the backend; without
// them (HIP, MUSA) nothing is served.
#pragma once

#include "ggml-ext-seam.h"

struct ggml_backend_cuda_context;

#ifdef GGML_EXT_CUDA
// For ops that concern our types (ggml_ext_concerns). Why an op is refused is in the debug log, and once as a warning.
bool ggml_ext_cuda_supports_op(int device, const ggml_tensor * op);
// The launches of an op that is supported, on the context's stream. False where there are none for it.
bool ggml_ext_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * op);
#else
static inline bool ggml_ext_cuda_supports_op(int, const ggml_tensor *) { return false; }
static inline bool ggml_ext_cuda_compute(ggml_backend_cuda_context &, ggml_tensor *) { return false; }
#endif
