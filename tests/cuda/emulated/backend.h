// A backend of ggml whose memory is the CPU's and whose ops on our types are the kernels of cuda/, emulated; all others are the CPU backend's.
#pragma once

#include "ggml-backend.h"

#include <cstdint>

ggml_backend_t emulated_backend();
// How many ops so far were done together with others.
int64_t emulated_fused();
// From now on as on this GPU: 750 attends by kv_tile.cu, 800 decodes by rows, 900 by bulk copies.
// It has few multiprocessors: cells are split, and blocks are not many.
void emulate_gpu(int cc, int multiprocessors = 6);
// How many attentions so far were decoded: by kernels that read the cache as it is (kv_decode.cu), and those among them that copy in bulk. And prompts by the
// kernel for Hopper.
struct Decoded {
    int64_t all, bulk, prompts;
};
Decoded emulated_decoded();
// As on Hopper where there are many rows: the cache is expanded, and attended to by its kernel where that serves the op.
void emulate_prompts(bool yes);
