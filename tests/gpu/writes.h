// Rows that are written over others, on a device and on the CPU.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <vector>

struct Write {
    std::vector<int64_t> cells;
    std::vector<float>   rows;
};

// Rows of a cache after writes to it, one op each; none where an op failed.
typedef std::function<std::vector<float>(ggml_type our, int64_t row_size, int64_t n_cells, const std::vector<Write> & writes)> RowsAfter;

// By the backend that graphs are made on now.
std::vector<float> rows_after(ggml_type our, int64_t row_size, int64_t n_cells, const std::vector<Write> & writes);

void test_writes(const RowsAfter & on_device, const std::vector<int> & head_sizes);
