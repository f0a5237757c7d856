// A backend of ggml whose memory is the CPU's and whose ops on our types are the kernels of cuda/, emulated; all others are the CPU backend's.
#pragma once

#include "ggml-backend.h"

#include <cstdint>

ggml_backend_t emulated_backend();
// How many ops so far were done together with others.
int64_t emulated_fused();
// From now on as on Hopper: the cache is expanded, and attended to by its kernel where that serves the op.
void emulate_hopper(bool yes);
