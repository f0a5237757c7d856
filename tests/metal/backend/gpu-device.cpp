// The real Metal backend: nothing to set and nothing to count.

#include "cpu-device.h"

void cpu_metal_set_order(int, uint32_t) {}

void cpu_metal_ignore_barriers(bool) {}

bool cpu_metal_is_cpu() {
    return false;
}

cpu_metal_counts cpu_metal_count() {
    return {};
}
