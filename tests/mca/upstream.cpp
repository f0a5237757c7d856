// ggml's own loops of a decode step, between two marks: what `cargo kv mca` traces beside ours.
//
// 64 cells of one KV head of size 128, four query heads, one after the other, as ggml-cpu's flash attention has them for
// one token: a dot product and a weighted addition for each cell and query head.

#include "ggml-quants.h"
#include "quants.h"
#include "vec.h"

#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
// the trace is cut here
__attribute__((noinline)) void kv_mark(void) {
    asm volatile("" ::: "memory");
}

// what the sources above would take from the rest of ggml
void ggml_abort(const char * file, int line, const char *, ...) {
    fprintf(stderr, "%s:%d: ggml_abort\n", file, line);
    __builtin_trap();
}
}

static constexpr int SIZE  = 128;
static constexpr int HEADS = 4;
static constexpr int CELLS = 64;

// a value that the compiler does not know, as the op has it
template <typename F> static F opaque(F f) {
    asm volatile("" : "+r"(f));
    return f;
}

int main(int argc, char ** argv) {
    const char * name = argc > 1 ? argv[1] : "";
    // large enough for any of the types; zeros are numbers in all of them
    std::vector<char> cells(CELLS * SIZE * 4), queries(HEADS * SIZE * 4), sums(HEADS * SIZE * 4);
    std::vector<float> weights(HEADS * CELLS, 0.5f), scores(HEADS * CELLS);
    float values[SIZE];
    const int n = opaque(SIZE);

    auto each = [&](size_t row, auto work) {
        kv_mark();
        for (int h = 0; h < HEADS; h++) {
            for (int c = 0; c < CELLS; c++) {
                work(h, cells.data() + c * row, h * CELLS + c);
                // the op does other things between two cells, so sums go to memory and back
                asm volatile("" ::: "memory");
            }
        }
        kv_mark();
    };
    if (!strcmp(name, "f16-k")) {
        auto dot = opaque((ggml_vec_dot_t) ggml_vec_dot_f16);
        each(2 * SIZE, [&](int h, char * k, int at) { dot(n, &scores[at], 0, k, 0, &queries[h * 2 * SIZE], 0, 1); });
    } else if (!strcmp(name, "f16-v")) {
        each(2 * SIZE, [&](int h, char * v, int at) {
            ggml_vec_mad_f16(n, (ggml_fp16_t *) &sums[h * 2 * SIZE], (ggml_fp16_t *) v, weights[at]);
        });
    } else if (!strcmp(name, "q4_0-k")) {
        auto dot = opaque((ggml_vec_dot_t) ggml_vec_dot_q4_0_q8_0);
        each(SIZE / 32 * 18, [&](int h, char * k, int at) {
            dot(n, &scores[at], 0, k, 0, &queries[h * (SIZE / 32 * 34)], 0, 1);
        });
    } else if (!strcmp(name, "q4_0-v")) {
        auto to_float = opaque((ggml_to_float_t) dequantize_row_q4_0);
        each(SIZE / 32 * 18, [&](int h, char * v, int at) {
            to_float(v, values, n);
            ggml_vec_mad_f32(n, (float *) &sums[h * 4 * SIZE], values, weights[at]);
        });
    } else {
        fprintf(stderr, "usage: %s f16-k | f16-v | q4_0-k | q4_0-v\n", argv[0]);
        return 1;
    }
    return 0;
}
