// Runs translated shaders: one fiber for each GPU thread, one threadgroup after the other, on one thread of the CPU.
//
// The scheduler takes a simdgroup, lets each of its lanes run until it waits, and when all have come to the same
// operation lets them go on with each other's values, until the whole simdgroup stands at a threadgroup barrier; then the
// next simdgroup. When all stand at the barrier it opens. Between two meeting points the order of lanes and of
// simdgroups is the launch's to choose: a shader whose result depends on it has a race.
//
// Threadgroup memory is filled with ones before each threadgroup (NaN as a float), and lies between two fences that are
// looked at afterwards; in a build with AddressSanitizer each piece is an allocation of its own instead.

#include "../harness/random.h"
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define MSL_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MSL_ASAN 1
#endif
#endif
#ifdef MSL_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves what a call must preserve, exchanges the stacks, and returns on the other one.
extern "C" void msl_switch_stack(void ** save, void * load);

#if defined(__APPLE__)
#define MSL_SYMBOL "_msl_switch_stack"
#else
#define MSL_SYMBOL "msl_switch_stack"
#endif

#if defined(__x86_64__)
asm(".text\n.globl " MSL_SYMBOL "\n" MSL_SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
static void * first_stack(char * top, void (*entry)()) {
    void ** sp = (void **) ((uintptr_t) top & ~(uintptr_t) 63);
    *--sp = nullptr; // where the entry would return to; also aligns the stack as after a call
    *--sp = (void *) entry;
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(".text\n.balign 4\n.globl " MSL_SYMBOL "\n" MSL_SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
static void * first_stack(char * top, void (*entry)()) {
    void ** sp = (void **) ((uintptr_t) top & ~(uintptr_t) 63) - 20;
    memset(sp, 0, 160);
    sp[11] = (void *) entry; // x30
    return sp;
}
#else
#error "fibers know x86-64 and aarch64"
#endif

namespace msl {
namespace {

constexpr size_t STACK_BYTES = 256*1024;
size_t threadgroup_limit = 32*1024;
constexpr uint32_t THREAD_LIMIT = 1024;
constexpr uint32_t MOST_LOOKS = 100;
constexpr unsigned char POISON = 0xff;

struct Constant {
    const char * name;
    long index;
    void * at;
    void (*set)(void *, double);
    bool is_set;
};

std::map<std::string, Kernel> & kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

std::vector<Constant> & constants() {
    static std::vector<Constant> all;
    return all;
}

// Barriers in the order in which they were first met.
std::vector<Site> & barriers() {
    static std::vector<Site> all;
    return all;
}

int barrier_number(const Site & site) {
    std::vector<Site> & all = barriers();
    const auto same = [&](const Site & s) { return s.line == site.line && strcmp(s.file, site.file) == 0; };
    const auto found = std::find_if(all.begin(), all.end(), same);
    if (found == all.end()) all.push_back(site);
    return (int) (std::find_if(all.begin(), all.end(), same) - all.begin());
}

struct Fiber {
    Fiber() : stack((char *) mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (stack == MAP_FAILED) abort();
        mprotect(stack, 4096, PROT_NONE); // an overflow stops here
    }
    ~Fiber() { munmap(stack, STACK_BYTES); }
    Fiber(const Fiber &) = delete;

    char * stack;
    void * sp = nullptr;
    Wait waits = Wait::Nothing;
    Site site = {};
    Place place = {};
    size_t slot_bytes = 0;
    alignas(64) unsigned char slot[SLOT_BYTES];
    Exchange * exchange = nullptr;
    void * fake_stack = nullptr; // AddressSanitizer's
};

// A piece of threadgroup memory.
class Piece {
  public:
    explicit Piece(size_t bytes) : bytes_(bytes), memory_(nullptr) {
        if (posix_memalign((void **) &memory_, 64, bytes + 2*FENCE)) abort();
    }
    Piece(Piece && o) : bytes_(o.bytes_), memory_(o.memory_) { o.memory_ = nullptr; }
    ~Piece() { free(memory_); }

    void * data() { return memory_ + FENCE; }
    size_t bytes() const { return bytes_; }
    void poison() {
        memset(memory_, PATTERN, FENCE);
        memset(memory_ + FENCE, POISON, bytes_);
        memset(memory_ + FENCE + bytes_, PATTERN, FENCE);
    }
    bool fences_stand() const {
        for (size_t i = 0; i < FENCE; ++i) {
            if (memory_[i] != PATTERN || memory_[FENCE + bytes_ + i] != PATTERN) return false;
        }
        return true;
    }

  private:
#ifdef MSL_ASAN
    static constexpr size_t FENCE = 0;
#else
    static constexpr size_t FENCE = 256;
#endif
    static constexpr unsigned char PATTERN = 0xa5;
    size_t bytes_;
    unsigned char * memory_;
};

// One launch under way.
class Runner {
  public:
    Runner(const struct msl_launch & launch, Kernel kernel, struct msl_counts & counts)
        : launch_(launch), kernel_(kernel), counts_(counts), random_(launch.seed),
          threads_(launch.group[0]*launch.group[1]*launch.group[2]), simdgroups_((threads_ + LANES - 1)/LANES),
          buffers_(launch.buffers, launch.buffers + launch.n_buffers) {
        buffers_.resize(std::max<size_t>(buffers_.size(), 32), nullptr);
        for (size_t i = 0; i < launch.n_threadgroup; ++i) {
            arguments_.emplace_back(launch.threadgroup_bytes[i]);
            threadgroup_.push_back(arguments_.back().data());
        }
        threadgroup_.resize(std::max<size_t>(threadgroup_.size(), 8), nullptr);
        for (uint32_t i = 0; i < threads_; ++i) fibers_.emplace_back(new Fiber());
        for (uint32_t i = 0; i < simdgroups_; ++i) exchanges_.emplace_back(new Exchange());
    }

    bool run() {
        const uint32_t * n = launch_.grid;
        for (uint32_t z = 0; z < n[2]; ++z) {
            for (uint32_t y = 0; y < n[1]; ++y) {
                for (uint32_t x = 0; x < n[0]; ++x) {
                    const uint32_t at[3] = { x, y, z };
                    begin(at);
                    while (message.empty() && step()) {
                    }
                    end();
                    if (!message.empty()) return false;
                    counts_.threadgroups++;
                }
            }
        }
        return true;
    }

    // Called on a fiber.
    Fiber & current() { return *current_; }
    void leave(Fiber & f) {
#ifdef MSL_ASAN
        __sanitizer_start_switch_fiber(f.waits == Wait::End ? nullptr : &f.fake_stack, stack_bottom_, stack_size_);
#endif
        msl_switch_stack(&f.sp, scheduler_sp_);
#ifdef MSL_ASAN
        __sanitizer_finish_switch_fiber(f.fake_stack, &stack_bottom_, &stack_size_);
#endif
    }
    void fail(const std::string & what) {
        if (message.empty()) message = what;
    }
    bool strict() const { return launch_.strict != 0; }
    bool ignores(const Site & site) const { return barrier_number(site) == launch_.ignored_barrier; }
    void * storage(int declaration, size_t bytes) {
        auto found = declared_.find(declaration);
        if (found == declared_.end()) {
            found = declared_.emplace(declaration, Piece(bytes)).first;
            found->second.poison();
        }
        return found->second.data();
    }

    std::string message;

    static thread_local Runner * active;

  private:
    static void fiber_main() {
        Runner * r = active;
        Fiber & f = *r->current_;
#ifdef MSL_ASAN
        __sanitizer_finish_switch_fiber(nullptr, &r->stack_bottom_, &r->stack_size_);
#endif
        const Call call = { r->buffers_.data(), r->threadgroup_.data(), &f.place };
        r->kernel_(call);
        f.waits = Wait::End;
        r->leave(f);
        abort();
    }

    void resume(Fiber & f) {
        current_ = &f;
        counts_.switches++;
#ifdef MSL_ASAN
        __sanitizer_start_switch_fiber(&fake_stack_, f.stack, STACK_BYTES);
#endif
        msl_switch_stack(&scheduler_sp_, f.sp);
#ifdef MSL_ASAN
        __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
    }

    void begin(const uint32_t at[3]) {
        for (Piece & p : arguments_) p.poison();
        const uint32_t * group = launch_.group;
        for (uint32_t t = 0; t < threads_; ++t) {
            Fiber & f = *fibers_[t];
            const uint32_t in_group[3] = { t % group[0], t/group[0] % group[1], t/group[0]/group[1] };
            for (int d = 0; d < 3; ++d) {
                f.place.threadgroup_position_in_grid[d] = at[d];
                f.place.thread_position_in_threadgroup[d] = in_group[d];
                f.place.thread_position_in_grid[d] = at[d]*group[d] + in_group[d];
                f.place.threads_per_threadgroup[d] = group[d];
                f.place.threadgroups_per_grid[d] = launch_.grid[d];
                f.place.threads_per_grid[d] = launch_.grid[d]*group[d];
            }
            f.place.thread_index_in_threadgroup = t;
            f.place.thread_index_in_simdgroup = t % LANES;
            f.place.simdgroup_index_in_threadgroup = t/LANES;
            f.place.simdgroups_per_threadgroup = simdgroups_;
            f.waits = Wait::Nothing;
            f.exchange = exchanges_[t/LANES].get();
#ifdef MSL_ASAN
            // A thread that was given up has left its marks.
            __asan_unpoison_memory_region(f.stack, STACK_BYTES);
#endif
            f.sp = first_stack(f.stack + STACK_BYTES, fiber_main);
            f.fake_stack = nullptr;
        }
    }

    void end() {
        size_t bytes = 0;
        bool stand = true;
        for (const Piece & p : arguments_) {
            bytes += p.bytes();
            stand &= p.fences_stand();
        }
        for (const auto & d : declared_) {
            bytes += d.second.bytes();
            stand &= d.second.fences_stand();
        }
        if (!stand) fail("threadgroup memory was written beside its bounds");
        if (strict() && bytes > threadgroup_limit) {
            fail(std::to_string(bytes) + " bytes of threadgroup memory, " + std::to_string(threadgroup_limit) + " are there");
        }
        declared_.clear();
    }

    std::vector<uint32_t> order(uint32_t n) {
        std::vector<uint32_t> o(n);
        for (uint32_t i = 0; i < n; ++i) o[i] = launch_.order == MSL_REVERSE ? n - 1 - i : i;
        if (launch_.order == MSL_RANDOM) random_.shuffle(o);
        return o;
    }

    // Every simdgroup to the next threadgroup barrier or the end; false when all threads have ended.
    bool step() {
        for (uint32_t s : order(simdgroups_)) {
            if (!run_simdgroup(s)) return false;
        }
        Fiber * waiting = nullptr, * ended = nullptr;
        for (auto & f : fibers_) {
            if (f->waits == Wait::Others) {
                looks_ = counts_.simd_operations == operations_ ? looks_ + 1 : 0;
                operations_ = counts_.simd_operations;
                if (looks_ > MOST_LOOKS) return diverged("threads wait for each other", *f, *f);
                return true;
            }
        }
        for (auto & f : fibers_) {
            if (f->waits == Wait::End) {
                ended = f.get();
            } else if (!waiting) {
                waiting = f.get();
            } else if (strict() && !(f->site == waiting->site)) {
                return diverged("simdgroups wait at different barriers", *waiting, *f);
            }
        }
        if (!waiting) return false;
        if (ended && strict()) return diverged("a thread ended that others wait for at a barrier", *waiting, *ended);
        counts_.barriers++;
        for (auto & f : fibers_) {
            if (f->waits == Wait::GroupBarrier) f->waits = Wait::Nothing;
        }
        return true;
    }

    // Until all its lanes wait for the threadgroup or have ended.
    bool run_simdgroup(uint32_t s) {
        const uint32_t first = s*LANES, lanes = std::min(LANES, threads_ - first);
        for (;;) {
            for (uint32_t i : order(lanes)) {
                Fiber & f = *fibers_[first + i];
                if (f.waits == Wait::Nothing || f.waits == Wait::Others) {
                    f.waits = Wait::Nothing;
                    resume(f);
                }
                if (!message.empty()) return false;
            }
            Fiber * chosen = nullptr;
            for (uint32_t i = 0; i < lanes; ++i) {
                Fiber & f = *fibers_[first + i];
                if (f.waits == Wait::End) continue;
                if (f.waits == Wait::Others) return true;
                if (!chosen) {
                    chosen = &f;
                } else if (f.waits != chosen->waits || !(f.site == chosen->site)) {
                    if (strict()) return diverged("lanes of a simdgroup wait at different places", *chosen, f);
                    // The branch that is behind in the source goes first.
                    if (f.waits != Wait::GroupBarrier && (chosen->waits == Wait::GroupBarrier || f.site.line < chosen->site.line)) chosen = &f;
                }
            }
            if (!chosen || chosen->waits == Wait::GroupBarrier) return true;
            counts_.simd_operations++;
            const Wait waits = chosen->waits;
            const Site site = chosen->site;
            Exchange & e = *exchanges_[s];
            e.active = 0;
            for (uint32_t i = 0; i < LANES; ++i) {
                Fiber * f = i < lanes ? fibers_[first + i].get() : nullptr;
                if (f && f->waits == waits && f->site == site) {
                    e.active |= 1u << i;
                    if (waits == Wait::SimdOp) memcpy(e.values[i], f->slot, f->slot_bytes);
                    f->waits = Wait::Nothing;
                } else {
                    memset(e.values[i], POISON, SLOT_BYTES);
                }
            }
        }
    }

    static std::string told(const Fiber & f) {
        std::string text = "thread " + std::to_string(f.place.thread_index_in_threadgroup);
        if (f.waits == Wait::End) return text + " has ended";
        return text + " at " + f.site.file + ":" + std::to_string(f.site.line);
    }

    bool diverged(const char * what, const Fiber & a, const Fiber & b) {
        fail(std::string(what) + ": " + told(a) + ", " + told(b));
        return false;
    }

    const struct msl_launch & launch_;
    const Kernel kernel_;
    struct msl_counts & counts_;
    Rng random_;
    const uint32_t threads_, simdgroups_;
    std::vector<void *> buffers_, threadgroup_;
    std::vector<Piece> arguments_;
    std::map<int, Piece> declared_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<std::unique_ptr<Exchange>> exchanges_;
    Fiber * current_ = nullptr;
    uint32_t looks_ = 0; // rounds in which a thread looked for something that had not come, and nobody did anything else
    uint64_t operations_ = 0;
    void * scheduler_sp_ = nullptr;
    const void * stack_bottom_ = nullptr;
    size_t stack_size_ = 0;
    void * fake_stack_ = nullptr;
};

thread_local Runner * Runner::active = nullptr;

} // namespace

KernelEntry::KernelEntry(const char * name, Kernel kernel) {
    kernels()[name] = kernel;
}

ConstantEntry::ConstantEntry(const char * name, long index, void * at, void (*set)(void *, double)) {
    constants().push_back({ name, index, at, set, false });
}

bool constant_is_set(const void * at) {
    for (const Constant & c : constants()) {
        if (c.at == at) return c.is_set;
    }
    return false;
}

const Exchange & exchange(const void * value, size_t bytes, Site site, uint32_t & lane) {
    Runner & r = *Runner::active;
    Fiber & f = r.current();
    memcpy(f.slot, value, bytes);
    f.slot_bytes = bytes;
    f.waits = Wait::SimdOp;
    f.site = site;
    lane = f.place.thread_index_in_simdgroup;
    r.leave(f);
    return *f.exchange;
}

void wait(Wait kind, Site site) {
    Runner & r = *Runner::active;
    if (r.ignores(site)) return;
    Fiber & f = r.current();
    f.waits = kind;
    f.site = site;
    r.leave(f);
}

void let_others_run(Site site) {
    Runner & r = *Runner::active;
    Fiber & f = r.current();
    f.waits = Wait::Others;
    f.site = site;
    r.leave(f);
}

uint32_t lane() {
    return Runner::active->current().place.thread_index_in_simdgroup;
}

const Place & place() {
    return Runner::active->current().place;
}

void limit_threadgroup_memory(size_t bytes) {
    threadgroup_limit = bytes;
}

void * shared_storage(int declaration, size_t bytes) {
    return Runner::active->storage(declaration, bytes);
}

void undefined(const char * what, Site site) {
    Runner & r = *Runner::active;
    if (!r.strict()) return;
    Fiber & f = r.current();
    f.site = site;
    f.waits = Wait::SimdBarrier;
    r.fail(std::string(what) + ": thread " + std::to_string(f.place.thread_index_in_threadgroup) + " at " + site.file + ":" + std::to_string(site.line));
    r.leave(f); // The scheduler never comes back.
}

} // namespace msl

extern "C" {

int msl_launch(const struct msl_launch * launch, struct msl_counts * counts, char * message, size_t message_size) {
    const auto say = [&](const std::string & text) {
        snprintf(message, message_size, "%s: %s", launch->kernel, text.c_str());
        return 1;
    };
    const auto found = msl::kernels().find(launch->kernel);
    if (found == msl::kernels().end()) return say("there is no such kernel");
    const uint64_t threads = (uint64_t) launch->group[0]*launch->group[1]*launch->group[2];
    if (threads == 0 || threads > msl::THREAD_LIMIT) {
        return say(std::to_string(threads) + " threads in a threadgroup, 1 to " + std::to_string(msl::THREAD_LIMIT) + " can be");
    }
    *counts = {};
    msl::Runner runner(*launch, found->second, *counts);
    msl::Runner::active = &runner;
    const bool ok = runner.run();
    msl::Runner::active = nullptr;
    return ok ? 0 : say(runner.message);
}

void msl_clear_constants(void) {
    for (msl::Constant & c : msl::constants()) {
        c.is_set = false;
        c.set(c.at, 0.0);
    }
}

int msl_set_constant(long index, double value) {
    int missing = 1;
    for (msl::Constant & c : msl::constants()) {
        if (c.index != index) continue;
        c.set(c.at, value);
        c.is_set = true;
        missing = 0;
    }
    return missing;
}

const char * msl_unset_constant(void) {
    for (const msl::Constant & c : msl::constants()) {
        if (!c.is_set) return c.name;
    }
    return nullptr;
}

int msl_barrier(size_t i, const char ** file) {
    if (i >= msl::barriers().size()) return 0;
    *file = msl::barriers()[i].file;
    return msl::barriers()[i].line;
}

const char * msl_kernel_name(size_t i) {
    for (const auto & k : msl::kernels()) {
        if (i-- == 0) return k.first.c_str();
    }
    return nullptr;
}

}
