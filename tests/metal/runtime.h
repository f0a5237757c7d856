// What translated shaders and the runtime that runs them say to each other, and the C entry points for the host.
//
// A GPU thread is a fiber. It runs until it needs the others: an operation over its simdgroup or a barrier. There it
// leaves what it brings in its slot and goes back to the scheduler, which lets it go on when all have come.

#pragma once

#include <cstddef>
#include <cstdint>

namespace msl {

constexpr uint32_t LANES = 32;
// The largest thing that lanes exchange: a 4x4 matrix of floats.
constexpr size_t SLOT_BYTES = 64;

enum class Wait : uint8_t { Nothing, SimdOp, SimdBarrier, GroupBarrier, Others, End };

// Where in the shader a thread waits: lanes that wait at different places have diverged.
struct Site {
    const char * file;
    int line;
    int op;
    bool operator==(const Site & o) const { return file == o.file && line == o.line && op == o.op; }
};

// What the lanes of a simdgroup brought to an operation; a lane that is not in `active` did not come.
struct Exchange {
    uint32_t active;
    alignas(64) unsigned char values[LANES][SLOT_BYTES];
};

// The values of the attributes of one thread.
struct Place {
    uint32_t threadgroup_position_in_grid[3];
    uint32_t thread_position_in_threadgroup[3];
    uint32_t thread_position_in_grid[3];
    uint32_t threads_per_threadgroup[3];
    uint32_t threadgroups_per_grid[3];
    uint32_t threads_per_grid[3];
    uint32_t thread_index_in_threadgroup;
    uint32_t thread_index_in_simdgroup;
    uint32_t simdgroup_index_in_threadgroup;
    uint32_t simdgroups_per_threadgroup;
};

// What a kernel is called with.
struct Call {
    void * const * buffers;
    void * const * threadgroup;
    const Place * place;
};

typedef void (*Kernel)(const Call &);

struct KernelEntry {
    KernelEntry(const char * name, Kernel kernel);
};

// A function constant: the host sets it before a launch.
struct ConstantEntry {
    ConstantEntry(const char * name, long index, void * at, void (*set)(void *, double));
};
bool constant_is_set(const void * at);

// All lanes of the simdgroup that are here bring `bytes` bytes; returns what they brought.
const Exchange & exchange(const void * value, size_t bytes, Site site, uint32_t & lane);
void wait(Wait kind, Site site);
// Lets other threads run, for one that looks again and again whether something has come.
void let_others_run(Site site);
// The lane that asks, and where its thread is.
uint32_t lane();
const Place & place();
// Storage that the threads of a threadgroup share, one for each declaration.
void * shared_storage(int declaration, size_t bytes);
// Ends the launch with a message. With `strict` off, returns where the language leaves the result open.
void undefined(const char * what, Site site);
// Bytes of threadgroup memory that a threadgroup may have, 32 KiB until then.
void limit_threadgroup_memory(size_t bytes);

} // namespace msl

extern "C" {

enum msl_order { MSL_FORWARD, MSL_REVERSE, MSL_RANDOM };

struct msl_launch {
    const char * kernel;
    uint32_t grid[3];  // threadgroups
    uint32_t group[3]; // threads of a threadgroup
    void * const * buffers;
    size_t n_buffers;
    const size_t * threadgroup_bytes; // of [[threadgroup(n)]]
    size_t n_threadgroup;
    int32_t order;  // of threads between two points where they meet
    uint32_t seed;  // of MSL_RANDOM
    int32_t strict; // what the language leaves open is an error
    int32_t ignored_barrier; // the number of a barrier that nobody waits at: a test of tests; -1 for none
};

struct msl_counts {
    uint64_t threadgroups, switches, simd_operations, barriers;
};

// 0, or 1 and a message.
int msl_launch(const struct msl_launch * launch, struct msl_counts * counts, char * message, size_t message_size);
// Function constants are unset until they are set; returns 1 where there is none of this index.
void msl_clear_constants(void);
int msl_set_constant(long index, double value);
// The name of a constant that is not set, or null.
const char * msl_unset_constant(void);
// The line and the file of barrier number i, as they were met in all launches so far; 0 where there are fewer.
int msl_barrier(size_t i, const char ** file);
// The name of kernel number i, or null.
const char * msl_kernel_name(size_t i);

}
