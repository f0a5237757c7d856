// Our ops on a GPU backend against ggml's CPU backend and f64.
//
// The same cases are built on both devices: SET_ROWS in random order, GET_ROWS of what was written, FLASH_ATTN_EXT. The
// cache must hold the same bytes but for codes that lie within float rounding of a tie, and attention must be within 1e-3 of
// f64 on the rows that the device has, and as near to the CPU's as the CPU's 8-bit queries allow.
#pragma once

#include "ggml-backend.h"

#include <functional>
#include <string>

struct GpuTest {
    ggml_backend_t        backend = nullptr;
    std::string           name; // as refusals have it
    bool                  is_fast = false; // long cases too
    std::function<int64_t()> fused; // ops so far that were launched together with others; may be empty
    std::function<void()> before_case, after_case; // may be empty
};

void run_gpu_cases(const GpuTest & test);
