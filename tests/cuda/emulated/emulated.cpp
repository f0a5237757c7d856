#include "cuda_runtime.h"

#include <map>

namespace cuda_emulated {
namespace {

constexpr size_t SHARED_LIMIT = 227*1024; // of a block on Hopper

const std::function<void()> * current = nullptr;
void *   shared_memory = nullptr;
int      order = MSL_FORWARD;
uint32_t seed = 0;

uint32_t groups_of_thread[1024]; // of products, that it has asked for

void run_thread(const msl::Call & call) {
    shared_memory = call.threadgroup[0];
    groups_of_thread[call.place->thread_index_in_threadgroup] = 0;
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

void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char * file, int line) {
    struct operands {
        int8_t a[4][4], b[2][4];
    };
    operands own;
    memcpy(own.a, a, sizeof(own.a));
    memcpy(own.b[0], &b0, sizeof(own.b[0]));
    memcpy(own.b[1], &b1, sizeof(own.b[1]));
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&own, sizeof(own), { file, line, MMA_BYTES }, lane);
    const auto of = [&](uint32_t lane) { return (const operands *) all.values[lane]; };
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t row = lane/4 + i/2*8, column = lane % 4*2 + i % 2;
        for (uint32_t k = 0; k < 32; ++k) {
            d[i] += of(row % 8*4 + k % 16/4)->a[row/8 + k/16*2][k % 4]*of(column*4 + k % 16/4)->b[k/16][k % 4];
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

// As on GPUs that have bulk copies, where the system has what is before.
constexpr uint32_t SHARED_BASE = 1024;

uint32_t shared_address(const void * at) {
    return (uint32_t) ((const char *) at - (const char *) shared_memory) + SHARED_BASE;
}

void * at_shared_address(uint32_t address) {
    return (char *) shared_memory + (address - SHARED_BASE);
}

namespace {

float half_at(uint32_t address) {
    address ^= (address >> 7 & 7) << 4; // as tiles lie: units of 16 bytes, by their row
    ggml_fp16_t half;
    memcpy(&half, at_shared_address(address), sizeof(half));
    return ggml_fp16_to_fp32(half);
}

struct descriptor {
    uint32_t start, panel, eight_rows; // bytes

    explicit descriptor(uint64_t bits) : start((uint32_t) (bits & 0x3fff) << 4), panel((uint32_t) (bits >> 16 & 0x3fff) << 4), eight_rows((uint32_t) (bits >> 32 & 0x3fff) << 4) {}

    // Value k of a row that lies in one piece; value n of row k, where rows are summed over.
    float in_row(uint32_t row, uint32_t k) const { return half_at(start + row/8*eight_rows + row % 8*128 + 2*k); }
    float of_rows(uint32_t n, uint32_t k) const { return half_at(start + n/64*panel + k/8*eight_rows + k % 8*128 + n % 64*2); }
};

}  // namespace

void multiply_shared(float * d, size_t sums, uint64_t a, uint64_t b, bool add) {
    const descriptor of_a(a), of_b(b);
    const uint32_t thread = msl::place().thread_index_in_threadgroup, lane = thread % 32, first = thread/32 % 4*16 + lane/4;
    for (size_t i = 0; i < sums; ++i) {
        const uint32_t row = first + i/2 % 2*8, column = i/4*8 + lane % 4*2 + i % 2;
        float sum = add ? d[i] : 0.0f;
        for (uint32_t k = 0; k < 16; ++k) {
            sum += of_a.in_row(row, k)*of_b.in_row(column, k);
        }
        d[i] = sum;
    }
}

void multiply_registers(float * d, size_t sums, const uint32_t (&a)[4], uint64_t b, const char * file, int line) {
    const descriptor of_b(b);
    uint32_t lane;
    const msl::Exchange & all = msl::exchange(&a, sizeof(a), { file, line, WARPGROUP }, lane);
    float rows[2][16];
    for (uint32_t i = 0; i < 32; ++i) {
        const uint32_t k = i % 16, pair = ((const uint32_t *) all.values[lane/4*4 + k % 8/2])[i/16 + k/8*2];
        rows[i/16][k] = ggml_fp16_to_fp32((ggml_fp16_t) (pair >> 16*(k % 2)));
    }
    for (size_t i = 0; i < sums; ++i) {
        const uint32_t column = i/4*8 + lane % 4*2 + i % 2;
        for (uint32_t k = 0; k < 16; ++k) {
            d[i] += rows[i/2 % 2][k]*of_b.of_rows(column, k);
        }
    }
}

void end_group() {
    groups_of_thread[msl::place().thread_index_in_threadgroup]++;
}

void await_groups(uint32_t under_way, const char * file, int line) {
    const uint32_t thread = msl::place().thread_index_in_threadgroup, first = thread/128*128, own = groups_of_thread[thread];
    for (uint32_t i = first; i < first + 128; ++i) {
        while (groups_of_thread[i] + under_way < own) {
            msl::let_others_run({ file, line, AWAIT });
        }
    }
}

namespace {

struct barrier {
    uint32_t arrivals, left, phase;
};

std::map<uint32_t, barrier> barriers;

}  // namespace

void begin_barrier(uint32_t bar, uint32_t arrivals) {
    barriers[bar] = { arrivals, arrivals, 0 };
}

uint32_t pending(uint32_t bar) {
    return barriers.at(bar).left;
}

void arrive(uint32_t bar) {
    barrier & b = barriers.at(bar);
    if (--b.left == 0) {
        b.left = b.arrivals;
        b.phase++;
    }
}

void await(uint32_t bar, uint32_t parity, const char * file, int line) {
    while ((barriers.at(bar).phase & 1) == parity) {
        msl::let_others_run({ file, line, AWAIT });
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
