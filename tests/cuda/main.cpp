// kv-test-cuda: ggml's CUDA backend with our patch against its CPU backend and f64; with --bench, what our ops take beside
// the backend's own.

#include "../gpu/cases.h"
#include "../harness/harness.h"
#include "bench.h"

#include "ggml-cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

int64_t ggml_ext_cuda_fused(); // of the shim in ggml's CUDA backend

namespace {

std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> res;
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        res.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return res;
}

}  // namespace

int main(int argc, char ** argv) {
    bool         benching = false;
    BenchOptions options;
    options.cells = { 8192, 32768, 131072 };
    options.pairs = { "srft4/srft4", "delta4/srft4", "srft8/srft8", "srft3/srft3", "srft2/srft2", "delta3/srft3", "band4/srft4", "band3/srft3", "band2/srft2", "delta8/srft8", "polar4/polar4", "polar3/polar3", "turbo4/turbo4", "turbo3/turbo3", "qjl1/srft4" };
    begin_program("cuda", argc, argv, {
        { "--bench", nullptr,  [&](const char *) { benching = true; } },
        { "--cells", "N,…",    [&](const char * list) {
            options.cells.clear();
            for (const std::string & n : split(list)) {
                options.cells.push_back(atoll(n.c_str()));
            }
        } },
        { "--pairs", "K/V,…",  [&](const char * list) { options.pairs = split(list); } },
        { "--window", "N",     [&](const char * n) { options.window = atoi(n); } },
        { "--only",   "TEXT",  [&](const char * text) { options.only = text; } },
    });
    ggml_log_set(print_errors, nullptr);
    ggml_backend_load_all();
    if (ggml_backend_cuda_get_device_count() == 0) {
        printf("no CUDA device\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    ggml_backend_t backend = ggml_backend_cuda_init(0);
    if (!backend) {
        fprintf(stderr, "the CUDA backend does not start; its message is above\n");
        return 1;
    }
    if (benching) {
        bench(backend, options);
        return 0;
    }
    GpuTest test;
    test.backend = backend;
    test.name    = "CUDA";
    test.is_fast = true;
    test.fused   = ggml_ext_cuda_fused;
    run_gpu_cases(test);
    return end_program();
}
