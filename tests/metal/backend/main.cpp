// kv-test-metal: ggml's Metal backend with our patch, its device a CPU (cpu-device.cpp) or on a Mac the GPU, against ggml's CPU
// backend and f64.

#include "../../gpu/cases.h"
#include "../../ops/attention_case.h"
#include "../runtime.h"
#include "cpu-device.h"

#include "ggml-backend-impl.h"
#include "ggml-metal.h"

#include <cstdio>

namespace {

ggml_backend_t metal() {
    static ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(ggml_backend_metal_reg(), 0), nullptr);
    return backend;
}

// Reads and writes of one graph are kept apart by barriers: without them results must be wrong, or nothing was tested.
void missing_barriers() {
    if (!cpu_metal_is_cpu() || !begin_case("missing barriers are noticed")) {
        return;
    }
    const AttentionCase c = make_case("srft4", "srft4", 64, 1, 600);
    const Device device(metal());
    AttentionRun good(c), bad(c);
    good.write();
    good.attend();
    bad.write();
    const uint64_t before = cpu_metal_count().barriers;
    cpu_metal_ignore_barriers(true);
    bad.attend();
    cpu_metal_ignore_barriers(false);
    check(cpu_metal_count().barriers > before, "chunks are merged behind a barrier");
    check(get_bytes(good.k_cache()) == get_bytes(bad.k_cache()) && good.output() != bad.output(), "merged too early, the result is wrong");
}

}  // namespace

int main(int argc, char ** argv) {
    begin_program("metal", argc, argv);
    ggml_log_set(print_errors, nullptr);
    ggml_backend_load_all();

    static uint32_t turn = 0;
    static uint64_t before = 0;
    GpuTest test;
    test.backend = metal();
    test.name    = "Metal";
    test.before_case = [] {
        const int orders[] = { MSL_FORWARD, MSL_REVERSE, MSL_RANDOM };
        cpu_metal_set_order(orders[turn % 3], turn + 1);
        turn++;
        before = cpu_metal_count().dispatches;
    };
    test.after_case = [] {
        check(!cpu_metal_is_cpu() || cpu_metal_count().dispatches >= before + 3, "the device was used");
    };
    run_gpu_cases(test);
    missing_barriers();

    const cpu_metal_counts counts = cpu_metal_count();
    printf("%llu dispatches, %llu barriers, %llu pipelines\n", (unsigned long long) counts.dispatches,
           (unsigned long long) counts.barriers, (unsigned long long) counts.pipelines);
    return end_program();
}
