// Saved and restored: what a context says next must not depend on whether its cache has been away.
//
// Where a restored cache lies as it lay before, what follows is equal bit for bit. llama.cpp closes gaps between cells of
// types whose rows stand alone; sums are then taken in another order, and what follows is equal but for that. Keys that
// are coded in groups stay equal bit for bit wherever whole groups are free; a case of its own restores into a cache
// without a free group, where they are rounded once more.

#include "life.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace {

constexpr double OTHER_ORDER  = 2e-4; // KL of sums in another order
constexpr double OTHER_DEVICE = 5e-3; // and of another precision

void append(std::vector<Token> & to, const std::vector<Token> & tokens) {
    to.insert(to.end(), tokens.begin(), tokens.end());
}

// The next tokens of a sequence as another sequence says them.
std::vector<Token> next(llama_seq_id text_of, llama_pos from, llama_pos to, llama_seq_id seq) {
    std::vector<Token> res = text(text_of, from, to);
    for (Token & t : res) {
        t.seq = seq;
    }
    return wanted(res);
}

void check_same(const std::vector<float> & want, const std::vector<float> & got, double bound, const std::string & what) {
    check(!want.empty() && want.size() == got.size(), what + ": it decodes");
    if (want.empty() || want.size() != got.size()) {
        return;
    }
    if (bound == 0.0) {
        check_below(largest_difference(want, got), 0.0, what + ": largest difference");
    } else {
        check_below(largest(kl_divergences(want, got, N_VOCAB)), bound, what + ": KL");
    }
}

// 150 tokens of one sequence in order: the simplest session.
void test_in_order(const Shape & shape, const Pair & types, bool unified) {
    const Setup setup = { 512, 2, unified };
    Context a = new_context(shape, types, setup), b = new_context(shape, types, setup);
    decode(a.get(), text(0, 0, 150));
    decode(b.get(), text(1, 0, 30)); // what was there before is gone

    const auto state = save_state(a.get());
    check(restore_state(b.get(), state), "a whole context is restored: " + take_log());
    check(save_state(b.get()) == state, "what is restored and saved again is the same byte for byte");
    const auto file = folder() + "/session.bin";
    std::vector<llama_token> tokens(150, 7), back(200);
    check(llama_state_save_file(a.get(), file.c_str(), tokens.data(), tokens.size()), "a session file is written");

    const auto want = decode(a.get(), next(0, 150, 220, 0)); // over the end of a group
    check_same(want, decode(b.get(), next(0, 150, 220, 0)), 0.0, "the rest of the session");

    Context c = new_context(shape, types, { 1024, 2, unified });
    size_t n = 0;
    check(llama_state_load_file(c.get(), file.c_str(), back.data(), back.size(), &n) && n == tokens.size(),
          "a session file is read in a larger context: " + take_log());
    check_same(want, decode(c.get(), next(0, 150, 220, 0)), 0.0, "the rest of the session from a file");
    remove(file.c_str());
}

// Two sequences in turns, with gaps: cells of one are scattered over the groups.
void mix(llama_context * ctx, llama_pos n0, llama_pos n1) {
    for (llama_pos at = 0; at < std::max(n0, n1); at += 13) {
        std::vector<Token> batch;
        append(batch, text(0, std::min(at, n0), std::min(at + 13, n0)));
        append(batch, text(1, std::min(at, n1), std::min(at + 13, n1)));
        decode(ctx, batch);
    }
}

void test_with_gaps(const Shape & shape, const Pair & types) {
    const Setup setup = { 512, 3, true };
    Context a = new_context(shape, types, setup), b = new_context(shape, types, setup);
    mix(a.get(), 140, 90);
    llama_memory_seq_rm(llama_get_memory(a.get()), 0, 60, 90);

    const auto state = save_state(a.get());
    check(restore_state(b.get(), state), "a context with gaps is restored: " + take_log());
    for (llama_seq_id seq : { 0, 1 }) {
        const llama_pos from = seq == 0 ? 140 : 90;
        const auto want = decode(a.get(), next(seq, from, from + 3, seq));
        // the first key of a group is gone, so that what is left of the group was coded anew
        check_same(want, decode(b.get(), next(seq, from, from + 3, seq)), is_grouped(types) ? loss_of(types) : OTHER_ORDER, "a sequence after gaps");
    }
}

// One sequence out of a mix, to another number in another context with other cells taken, and back.
void test_sequence(const Shape & shape, const Pair & types, bool unified) {
    Context a = new_context(shape, types, { 512, 2, unified });
    mix(a.get(), 70, 120);
    const auto state = save_state(a.get(), 1);
    const auto file  = folder() + "/sequence.bin";
    llama_token token = 1, back[4];
    check(llama_state_seq_save_file(a.get(), file.c_str(), 1, &token, 1) > 0, "a sequence's file is written");
    const auto want = decode(a.get(), next(1, 120, 124, 1));

    Context b = new_context(shape, types, { 1024, unified ? 4u : 2u, unified });
    const llama_seq_id to = unified ? 3 : 0;
    decode(b.get(), text(unified ? 0 : 1, 0, 37));
    check(restore_state(b.get(), state, to), "a sequence is restored to other cells: " + take_log());
    if (is_grouped(types)) {
        check(!rows_of(state).empty() && rows_of(save_state(b.get(), to)) == rows_of(state), "groups are the same byte for byte in other cells");
    }
    // keys that follow are coded by other neighbours
    const double bound = is_grouped(types) && unified ? loss_of(types) : OTHER_ORDER;
    check_same(want, decode(b.get(), next(1, 120, 124, to)), bound, "the sequence in other cells");

    size_t n = 0;
    check(llama_state_seq_load_file(b.get(), file.c_str(), to, back, 4, &n) > 0 && n == 1,
          "a sequence's file is read over a sequence that is there: " + take_log());
    check_same(want, decode(b.get(), next(1, 120, 124, to)), bound, "the sequence from a file");
    remove(file.c_str());
}

// Free cells everywhere and no free group.
void test_crowded(const Shape & shape, const Pair & types) {
    Context source = new_context(shape, types, { 256, 2, true });
    decode(source.get(), text(1, 0, 60));
    const auto moved = save_state(source.get(), 1);
    const auto want  = decode(source.get(), next(1, 60, 64, 1));

    Context b = new_context(shape, types, { 256, 2, true });
    decode(b.get(), text(0, 0, 256));
    for (llama_pos at = 20; at < 256; at += 64) {
        llama_memory_seq_rm(llama_get_memory(b.get()), 0, at, at + 24);
    }
    take_log();
    check(restore_state(b.get(), moved, 1), "a sequence is restored where no group is free");
    const bool grouped = is_grouped(types);
    check((take_log().find("written anew") != std::string::npos) == grouped, "the log says so where keys are written anew, and only there");
    check_same(want, decode(b.get(), next(1, 60, 64, 1)), grouped ? 2*loss_of(types) : OTHER_ORDER, "the sequence among others");

    // the others are as they were
    const auto before = save_state(b.get(), 0);
    check(restore_state(b.get(), moved, 1), "and once more");
    check(save_state(b.get(), 0) == before || grouped, "other sequences keep their bytes");
}

// States that stay on the device: kept in the process, and moved by llama.cpp.
void test_on_device(const Shape & shape, const Pair & types) {
    Context a = new_context(shape, types, { 512, 2, true }), twin = new_context(shape, types, { 512, 2, true });
    for (llama_context * ctx : { a.get(), twin.get() }) {
        decode(ctx, text(1, 0, 21));
        decode(ctx, text(0, 0, 90));
    }
    const auto state = save_state(a.get(), 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    decode(a.get(), next(1, 90, 120, 0)); // another way to go on, which is taken back
    check(restore_state(a.get(), state, 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE), "a state on the device is restored: " + take_log());
    check_same(decode(twin.get(), next(0, 90, 100, 0)), decode(a.get(), next(0, 90, 100, 0)), is_grouped(types) ? loss_of(types) : OTHER_ORDER,
               "after a state on the device");
}

// A state goes from the CPU to the GPU as it is, or back: a whole context, and a sequence of it.
void test_across(const Shape & shape, const Pair & types, bool to_gpu) {
    Setup on_gpu = { 512, 2, true }, on_cpu = on_gpu;
    on_cpu.on_cpu = true;
    Context a = new_context(shape, types, to_gpu ? on_cpu : on_gpu), b = new_context(shape, types, to_gpu ? on_gpu : on_cpu);
    decode(a.get(), text(0, 0, 150));
    const auto state = save_state(a.get());
    check(restore_state(b.get(), state), "a context of another device is restored: " + take_log());
    check(save_state(b.get()) == state, "what is restored and saved again is the same byte for byte");
    const auto want = decode(a.get(), next(0, 150, 200, 0));
    check_same(want, decode(b.get(), next(0, 150, 200, 0)), OTHER_DEVICE, "the rest of the session on another device");

    const auto sequence = save_state(a.get(), 0);
    check(restore_state(b.get(), sequence, 1), "a sequence of another device is restored beside another: " + take_log());
    check_same(decode(a.get(), next(0, 200, 210, 0)), decode(b.get(), next(0, 200, 210, 1)), OTHER_DEVICE, "a sequence on another device");
}

void test_windowed(const Pair & types) {
    const Setup setup = { 512, 2, true };
    Context a = new_context(WINDOWED, types, setup), b = new_context(WINDOWED, types, setup);
    mix(a.get(), 150, 100);
    check(restore_state(b.get(), save_state(a.get())), "both caches of a model with windows are restored: " + take_log());
    check_same(decode(a.get(), next(0, 150, 153, 0)), decode(b.get(), next(0, 150, 153, 0)), OTHER_ORDER, "with windows");
    const auto state = save_state(a.get(), 1);
    check(restore_state(b.get(), state, 1), "a sequence with windows is restored: " + take_log());
    check_same(decode(a.get(), next(1, 100, 103, 1)), decode(b.get(), next(1, 100, 103, 1)), is_grouped(types) ? loss_of(types) : OTHER_ORDER,
               "a sequence with windows");
}

}  // namespace

void test_state() {
    std::vector<Pair> pairs = all_pairs();
    pairs.push_back({ "f16", "f16" });
    pairs.push_back({ "q8_0", "q8_0" });
    for (const Pair & types : pairs) {
        for (bool unified : { true, false }) {
            const char * where = unified ? " unified" : " streams";
            if (begin_case("state in order " + types.name() + where)) {
                test_in_order(HEADS_OF_64, types, unified);
            }
            if (begin_case("state of a sequence " + types.name() + where)) {
                test_sequence(HEADS_OF_64, types, unified);
            }
        }
        if (begin_case("state with gaps " + types.name())) {
            test_with_gaps(HEADS_OF_64, types);
        }
        if (begin_case("state among others " + types.name())) {
            test_crowded(HEADS_OF_64, types);
        }
        if (begin_case("state on the device " + types.name())) {
            test_on_device(HEADS_OF_64, types);
        }
        for (bool to_gpu : { true, false }) {
            if (gpu_layers > 0 && begin_case(std::string("state ") + (to_gpu ? "from the CPU to the GPU " : "from the GPU to the CPU ") + types.name())) {
                test_across(HEADS_OF_64, types, to_gpu);
            }
        }
        // ggml's own attention on CUDA has no kernel for capped scores of heads of 64, and aborts
        const bool aborts = gpu_layers > 0 && (types.k == "f16" || types.k == "q8_0") && types.k == types.v;
        if (!aborts && begin_case("state with windows " + types.name())) {
            test_windowed(types);
        }
        for (const Shape * shape : { &HEADS_OF_128, &HEADS_OF_80 }) {
            if (!quick && serves(types, *shape) && begin_case("state " + std::string(shape->name) + " " + types.name())) {
                test_sequence(*shape, types, true);
            }
        }
    }
    // some layers with precise rows and some without
    const Pair mixed = { "srft4,0=srft8", "srft3,0=srft8" };
    if (begin_case("state on the device " + mixed.name())) {
        test_on_device(HEADS_OF_64, mixed);
    }
}
