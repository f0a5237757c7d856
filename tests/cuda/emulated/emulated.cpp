#include "cuda_runtime.h"

namespace cuda_emulated {
namespace {

constexpr size_t SHARED_LIMIT = 227*1024; // of a block on Hopper

const std::function<void()> * current = nullptr;
void *   shared_memory = nullptr;
int      order = MSL_FORWARD;
uint32_t seed = 0;

void run_thread(const msl::Call & call) {
    shared_memory = call.threadgroup[0];
    (*current)();
}

const msl::KernelEntry entry("cuda", run_thread);

}  // namespace

void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char * file, int line) {
    struct operands {
        uint32_t a[4], b[2];
    };
    const operands own = { { a[0], a[1], a[2], a[3] }, { b0, b1 } };
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&own, sizeof(own), { file, line, MMA }, lane);
    const auto value = [](uint32_t pair, uint32_t i) { return ggml_fp16_to_fp32((ggml_fp16_t) (pair >> 16*i)); };
    const auto of = [&](uint32_t lane) { return (const operands *) all.values[lane]; };
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = lane/4 + i/2*8, column = lane % 4*2 + i % 2;
        for (uint32_t k = 0; k < 16; ++k) {
            const uint32_t x = of(row % 8*4 + k % 8/2)->a[row/8 + k/8*2], y = of(column*4 + k % 8/2)->b[k/8];
            d[i] += value(x, k % 2)*value(y, k % 2);
        }
    }
}

void load_matrices(uint32_t (&r)[4], const void * row, bool transposed, const char * file, int line) {
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&row, sizeof(row), { file, line, MATRICES }, lane);
    const auto half_at = [&](uint32_t matrix, uint32_t row, uint32_t column) { return (uint32_t) (*(const uint16_t * const *) all.values[8*matrix + row])[column]; };
    for (uint32_t n = 0; n < 4; ++n) {
        const uint32_t g = lane/4, t = lane % 4;
        r[n] = transposed ? half_at(n, 2*t, g) | half_at(n, 2*t + 1, g) << 16 : half_at(n, g, 2*t) | half_at(n, g, 2*t + 1) << 16;
    }
}

void run(dim3 grid, dim3 block, size_t shared, const std::function<void()> & kernel) {
    struct msl_launch launch = {};
    launch.kernel = "cuda";
    const dim3 sizes[2] = { grid, block };
    for (int i = 0; i < 2; ++i) {
        uint32_t * to = i == 0 ? launch.grid : launch.group;
        to[0] = sizes[i].x;
        to[1] = sizes[i].y;
        to[2] = sizes[i].z;
    }
    const size_t bytes = shared > 0 ? shared : 1;
    launch.threadgroup_bytes = &bytes;
    launch.n_threadgroup     = 1;
    launch.order             = order;
    launch.seed              = seed;
    launch.strict            = 1;
    launch.ignored_barrier   = -1;
    msl::limit_threadgroup_memory(SHARED_LIMIT);
    current = &kernel;
    struct msl_counts counts;
    char message[1000];
    if (msl_launch(&launch, &counts, message, sizeof(message)) != 0) {
        fprintf(stderr, "%s\n", message);
        exit(1);
    }
}

void * dynamic_shared() {
    return shared_memory;
}

void set_order(int of_order, uint32_t of_seed) {
    order = of_order;
    seed  = of_seed;
}

}  // namespace cuda_emulated
