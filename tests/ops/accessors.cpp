// ggml's accessors answer for our ids, from any thread, and for ids that are nobody's.

#include "ops.h"

#include <cstring>
#include <thread>

#if !defined(_WIN32)
#    include <sys/wait.h>
#    include <unistd.h>
#endif

namespace {

bool agrees(const ggml_ext_type * ext) {
    const ggml_type type = (ggml_type) ext->id;
    return strcmp(ggml_type_name(type), ext->name) == 0 &&
           ggml_blck_size(type) == ext->head_size &&
           ggml_type_size(type) == ext->row_bytes &&
           ggml_row_size(type, 3*(int64_t) ext->head_size) == 3*ext->row_bytes &&
           ggml_is_quantized(type) &&
           // rows that mean nothing without their group have no row functions
           (ggml_get_type_traits(type)->to_float != nullptr) == (ext->group_cells == 1) &&
           (ggml_get_type_traits(type)->from_float_ref != nullptr) == (ext->group_cells == 1);
}

bool is_placeholder(int id) {
    const ggml_type type = (ggml_type) id;
    return strcmp(ggml_type_name(type), "unknown") == 0 && ggml_blck_size(type) == 1 && ggml_type_size(type) == 0 &&
           ggml_row_size(type, 128) == 0 && !ggml_is_quantized(type) &&
           !ggml_get_type_traits(type)->to_float;
}

// Does ggml refuse to make a tensor of this type? Its way to refuse is to abort, so a child process tries.
bool refuses_tensor(int id) {
#if defined(_WIN32)
    return id != 0;
#else
    fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
        ggml_set_abort_callback([](const char *) { _exit(42); });
        Graph graph;
        ggml_new_tensor_1d(graph.ctx(), (ggml_type) id, 1152);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 42;
#endif
}

}  // namespace

void test_accessors() {
    if (begin_case("accessors from several threads at once")) {
        std::vector<int> good(8, 0);
        std::vector<std::thread> threads;
        for (size_t i = 0; i < good.size(); i++) {
            threads.emplace_back([&good, i] {
                bool ok = true;
                for (int round = 0; round < 100; round++) {
                    for (const ggml_ext_type * ext : concrete_types()) {
                        ok = ok && agrees(ext);
                    }
                }
                good[i] = ok;
            });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        for (int ok : good) {
            check(ok, "a thread sees the table");
        }
    }

    for (const ggml_ext_type * ext : concrete_types()) {
        if (!begin_case(std::string("accessors ") + ext->name)) {
            continue;
        }
        const ggml_type type = (ggml_type) ext->id;
        check(agrees(ext), "name, sizes, quantized and row functions are those of the table");
        check(ggml_ext_type_from_name(ext->name) == ext->id, "the name leads back to the id");

        Graph graph;
        const ggml_tensor * t = ggml_new_tensor_2d(graph.ctx(), type, 2*ext->head_size, 3);
        check(ggml_nbytes(t) == 6*ext->row_bytes && t->nb[1] == 2*ext->row_bytes, "a tensor has whole rows");
        check(ggml_is_contiguous(t), "a tensor is contiguous");

        if (ext->group_cells > 1) {
            continue;
        }
        Rng rng(ext->id);
        const std::vector<float> src = rng.normals(4*(size_t) ext->head_size);
        std::vector<uint8_t> want(4*ext->row_bytes), got(4*ext->row_bytes);
        ggml_ext_encode_ref(ext->id, src.data(), want.data(), (int64_t) src.size());
        const size_t n = ggml_quantize_chunk(type, src.data(), got.data(), 0, 2, 2*ext->head_size, nullptr);
        check(n == want.size() && got == want, "ggml_quantize_chunk writes the reference format");
    }

    if (begin_case("accessors of families")) {
        for (const Family & family : families()) {
            const ggml_type type = (ggml_type) ggml_ext_type_from_name(family.name.c_str());
            check(ggml_type_name(type) == family.name && ggml_blck_size(type) == 1 && ggml_type_size(type) == 0 &&
                  ggml_is_quantized(type), family.name);
            check(refuses_tensor(type), family.name + " makes no tensor");
            check(std::string(ggml_ext_family_names()).find(family.name) != std::string::npos, family.name + " is offered");
        }
    }

    if (begin_case("accessors of unknown ids")) {
        for (int id : { -1, -2147483647 - 1, GGML_TYPE_COUNT + 1, 127, GGML_EXT_TYPE_LIMIT, 9999, 2147483647 }) {
            check(is_placeholder(id), "id " + std::to_string(id));
        }
        for (int id : { -1, 127, 9999 }) {
            check(refuses_tensor(id), "id " + std::to_string(id) + " makes no tensor");
        }
        for (int id = GGML_EXT_TYPE_BASE; id < GGML_EXT_TYPE_LIMIT; id++) {
            if (!ggml_ext_type_get(id)) {
                check(is_placeholder(id), "gap " + std::to_string(id));
            }
        }
    }
}
