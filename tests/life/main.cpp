// kv-test-life: what a cache goes through in its life, on a tiny random model, for every family.

#include "harness.h"

#include "ggml-backend.h"

#include <cstdio>
#include <cstring>
#include <map>

extern std::string filter, directory;
extern int         passed, failed;
extern std::map<std::string, int64_t> counts;

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            quick = true;
        } else if (strcmp(argv[i], "--soak") == 0) {
            soak = true;
        } else if (strcmp(argv[i], "--verbose") == 0) {
            verbose = true;
        } else if (strcmp(argv[i], "--filter") == 0 && i + 1 < argc) {
            filter = argv[++i];
        } else if (strcmp(argv[i], "--dir") == 0 && i + 1 < argc) {
            directory = argv[++i];
        } else {
            fprintf(stderr, "usage: %s [--quick | --soak] [--verbose] [--filter TEXT] [--dir FOLDER]\n", argv[0]);
            return 2;
        }
    }
    llama_log_set(take_down, nullptr);
    ggml_backend_load_all();
    llama_backend_init();

    test_state();
    test_refusal();
    test_files();
    test_memories();
    test_guard();
    test_history();
    test_walks();

    for (const auto & [what, n] : counts) {
        printf("life: %lld %s\n", (long long) n, what.c_str());
    }
    if (passed == 0) {
        printf("nothing was tested\n");
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
