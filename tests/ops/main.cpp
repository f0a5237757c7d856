// kv-test-ops: the ops of ggml's CPU backend on our cache types, against definitions written out in double precision.

#include "ops.h"

#include <cstdio>

int main(int argc, char ** argv) {
    begin_program("ops", argc, argv);
    ggml_backend_load_all();

    // first, while nothing has asked for a type yet
    test_accessors();
    test_spec();
    test_rows();
    test_groups();
    test_mul_mat();
    test_together();
    test_attention();
    test_canary();
    test_refusal();
    test_crafted();

    if (verbose) {
        printf("instruction set: %s\n", ggml_ext_isa());
    }
    return end_program();
}
