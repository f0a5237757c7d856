// What the patch of ggml's CUDA backend calls. GGML_EXT_CUDA is defined where our kernels are part of the backend; without
// them (HIP, MUSA) nothing is served.
#pragma once

#include "ggml-ext-seam.h"

struct ggml_backend_cuda_context;
struct ggml_cgraph;

#ifdef GGML_EXT_CUDA
// For ops that concern our types (ggml_ext_concerns). Why an op is refused is in the debug log, and once as a warning.
bool ggml_ext_cuda_supports_op(int device, const ggml_tensor * op);
// The launches of an op that is supported, on the context's stream. False where there are none for it.
bool ggml_ext_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * op);
// Nodes behind node `first` of a graph that were launched together with it; 0 where it was not launched.
int  ggml_ext_cuda_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int first);
// How often an attention was launched together with what a layer writes before it; for tests.
int64_t ggml_ext_cuda_fused();
#else
static inline bool ggml_ext_cuda_supports_op(int, const ggml_tensor *) { return false; }
static inline bool ggml_ext_cuda_compute(ggml_backend_cuda_context &, ggml_tensor *) { return false; }
static inline int  ggml_ext_cuda_fuse(ggml_backend_cuda_context &, const ggml_cgraph *, int) { return 0; }
#endif
