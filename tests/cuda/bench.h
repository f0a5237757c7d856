// What our ops take on a CUDA device, beside the backend's own.
#pragma once

#include "ggml-backend.h"

#include <string>
#include <vector>

struct BenchOptions {
    std::vector<int64_t>     cells;
    std::vector<std::string> pairs;  // "srft4/srft4"
    std::string              only;       // what has this in its name; all if empty
    int                      window = 0; // every shape once more with precise rows of so many recent cells
};

void bench(ggml_backend_t backend, const BenchOptions & options);
