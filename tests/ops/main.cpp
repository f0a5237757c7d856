// kv-test-ops: the ops of ggml's CPU backend on our cache types, against definitions written out in double precision.

#include "harness.h"

#include <cstdio>
#include <cstring>

extern bool        verbose;
extern std::string filter;
extern int         passed, failed, skipped;
void               print_peaks();

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            quick = true;
        } else if (strcmp(argv[i], "--soak") == 0) {
            quick = false; // the full list is the long form
        } else if (strcmp(argv[i], "--verbose") == 0) {
            verbose = true;
        } else if (strcmp(argv[i], "--filter") == 0 && i + 1 < argc) {
            filter = argv[++i];
        } else {
            fprintf(stderr, "usage: %s [--quick | --soak] [--verbose] [--filter TEXT]\n", argv[0]);
            return 2;
        }
    }

    ggml_backend_load_all();

    // first, while nothing has asked for a type yet
    test_accessors();
    test_spec();
    test_rows();
    test_groups();
    test_mul_mat();
    test_attention();
    test_canary();
    test_refusal();
    test_crafted();

    if (verbose) {
        printf("instruction set: %s\n", ggml_ext_isa());
        print_peaks();
    }
    if (passed == 0) {
        printf("nothing was tested\n");
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed == 0 && passed > 0 ? 0 : 1;
}
