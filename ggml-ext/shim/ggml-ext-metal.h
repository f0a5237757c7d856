// What the patch of ggml's Metal backend calls.
#pragma once

#include "ggml-ext-seam.h"
#include "ggml-metal-device.h"

#ifdef __cplusplus
extern "C" {
#endif

// For ops that concern our types (ggml_ext_concerns). Why an op is refused is in the debug log, and once as a warning: it
// will be computed elsewhere, or not at all.
bool ggml_ext_metal_supports_op(ggml_metal_device_t dev, const struct ggml_tensor * op);

// Bytes behind the result that the op needs while it runs.
size_t ggml_ext_metal_scratch(const struct ggml_tensor * op);

// The dispatches of an op that is supported.
void ggml_ext_metal_encode(ggml_metal_device_t dev, ggml_metal_encoder_t enc, struct ggml_tensor * op);

#ifdef __cplusplus
}
#endif
