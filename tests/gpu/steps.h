// What a layer does for a token: rows of K and V go to the cache and to a window of precise rows, and are attended to. A backend
// may launch ops of one graph together; the results must be those of ops that it gets one by one.
#pragma once

#include "ggml-backend.h"

#include <cstdint>
#include <functional>

// `fused`: how many ops so far were launched together with others; empty where nobody counts. What a GPU writes together without an attention behind it is not counted.
void run_steps(ggml_backend_t backend, const std::function<int64_t()> & fused);

// The same with calibrated keys and values: queries are multiplied by matrices, values lose their centers and results get them back. `cells` are written in
// each case. `alone`: so many ops of a step are launched alone, where each step is evaluated once; a GPU evaluates the first twice, to record it.
void run_calibrated_steps(ggml_backend_t backend, const std::function<int64_t()> & fused, int cells, int alone = -1);
