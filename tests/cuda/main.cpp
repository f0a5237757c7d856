// kv-test-cuda: ggml's CUDA backend with our patch against its CPU backend and f64; with --bench, what our ops take beside
// the backend's own.

#include "../gpu/cases.h"
#include "../ops/harness.h"
#include "bench.h"

#include "ggml-cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

extern bool        verbose;
extern std::string filter;
extern int         passed, failed, skipped;
void               print_peaks();

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
    options.pairs = { "srft4/srft4", "delta4/srft4", "srft8/srft8", "srft3/srft3", "delta3/srft3", "polar4/polar4", "turbo4/turbo4", "qjl1/srft4" };
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            quick = true;
        } else if (strcmp(argv[i], "--soak") == 0) {
            quick = false;
        } else if (strcmp(argv[i], "--verbose") == 0) {
            verbose = true;
        } else if (strcmp(argv[i], "--bench") == 0) {
            benching = true;
        } else if (strcmp(argv[i], "--filter") == 0 && i + 1 < argc) {
            filter = argv[++i];
        } else if (strcmp(argv[i], "--pairs") == 0 && i + 1 < argc) {
            options.pairs = split(argv[++i]);
        } else if (strcmp(argv[i], "--cells") == 0 && i + 1 < argc) {
            options.cells.clear();
            for (const std::string & n : split(argv[++i])) {
                options.cells.push_back(atoll(n.c_str()));
            }
        } else {
            fprintf(stderr, "usage: %s [--quick | --soak] [--verbose] [--filter TEXT] | --bench [--cells N,…] [--pairs K/V,…]\n", argv[0]);
            return 2;
        }
    }
    ggml_log_set(only_errors, nullptr);
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
    run_gpu_cases(test);
    if (verbose) {
        print_peaks();
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed == 0 && passed > 0 ? 0 : 1;
}
