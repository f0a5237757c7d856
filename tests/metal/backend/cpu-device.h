// What a test can ask of the Metal device that runs on the CPU; a GPU does nothing of it and counts nothing.
#pragma once

#include <cstdint>

// The order of lanes (tests/metal/runtime.h) of launches from now on; a seed goes with the random one.
void cpu_metal_set_order(int order, uint32_t seed);

// A test of tests: encoders from now on forget the barriers that are put into them.
void cpu_metal_ignore_barriers(bool ignore);

bool cpu_metal_is_cpu();

// Dispatches, barriers and pipelines so far.
struct cpu_metal_counts {
    uint64_t dispatches, barriers, pipelines;
};
cpu_metal_counts cpu_metal_count();
