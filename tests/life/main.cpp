// kv-test-life: what a cache goes through in its life, on a tiny random model, for every family.

#include "life.h"

#include "ggml-backend.h"

#include <cstdlib>

extern std::string directory, calibrate_program;

int main(int argc, char ** argv) {
    begin_program("life", argc, argv, {
        { "--dir", "FOLDER", [](const char * folder) { directory = folder; } },
        { "--gpu-layers", "N", [](const char * n) { gpu_layers = atoi(n); } }, // of each model, with their caches
        { "--calibrate", "PROGRAM", [](const char * program) { calibrate_program = program; } }, // kv-calibrate
    });
    llama_log_set(keep_log, nullptr);
    ggml_backend_load_all();
    llama_backend_init();

    test_state();
    test_refusal();
    test_files();
    test_memories();
    test_guard();
    test_history();
    test_calibrated();
    test_walks();
    return end_program();
}
