// History: a text has the same keys whatever the cache held before, and whatever is decoded beside it.
//
// Each case decodes a text in a context that has a history and in a fresh one, in the same batches, since ggml's products
// differ by their widths. Keys that are coded in groups get groups of their own, founded anew, and attention takes a group
// at a time, so both say the same bit for bit. Other types differ by the order of sums alone. And what is saved of one sequence has nothing of the others in it.

#include "life.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

// What sums in another order lead to where codes fall to the other side.
constexpr double OTHER_ORDER = 2e-3;

void remove_all(llama_context * ctx, llama_seq_id seq, llama_pos from = -1, llama_pos to = -1) {
    llama_memory_seq_rm(llama_get_memory(ctx), seq, from, to);
}

void check_like_fresh(const Pair & types, const std::vector<float> & fresh, const std::vector<float> & got, const std::string & what) {
    check(!fresh.empty() && fresh.size() == got.size(), what + ": it decodes");
    check_below(largest(kl_divergences(fresh, got, N_VOCAB)), is_grouped(types) ? 0.0 : OTHER_ORDER, what + ": KL to a fresh context");
}

std::vector<float> fresh(const Shape & shape, const Pair & types, const std::vector<Token> & tokens, bool swa_full = false) {
    Context ctx = new_context(shape, types, { 512, 4, true, 1, swa_full });
    return decode(ctx.get(), tokens);
}

// Other texts were there, at other positions, and are gone.
void test_reused_cells(const Shape & shape, const Pair & types) {
    const auto want = fresh(shape, types, wanted(text(0, 0, 200)));
    Context ctx = new_context(shape, types, { 512, 4, true });
    for (llama_seq_id seq : { 1, 2, 3 }) {
        decode(ctx.get(), text(seq, 40, 190));
    }
    for (llama_seq_id seq : { 1, 2, 3 }) {
        remove_all(ctx.get(), seq);
    }
    check_like_fresh(types, want, decode(ctx.get(), wanted(text(0, 0, 200))), "cells that others had");

    // the end is taken back and written again, in the middle of a group
    remove_all(ctx.get(), 0, 150, -1);
    decode(ctx.get(), text(1, 0, 70));
    Context other = new_context(shape, types, { 512, 4, true });
    decode(other.get(), text(0, 0, 200));
    remove_all(other.get(), 0, 150, -1);
    check_like_fresh(types, decode(other.get(), wanted(text(0, 150, 200))), decode(ctx.get(), wanted(text(0, 150, 200))), "an end that is written again");
}

// A token of each of four sequences at a time.
std::vector<std::vector<float>> in_turns(llama_context * ctx, llama_pos n) {
    std::vector<std::vector<float>> res(4);
    for (llama_pos pos = 0; pos < n; pos++) {
        std::vector<Token> batch;
        for (llama_seq_id seq = 0; seq < 4; seq++) {
            batch.push_back({ token_at(seq, pos), pos, seq, true });
        }
        const auto logits = decode(ctx, batch);
        for (size_t seq = 0; seq < 4 && logits.size() == 4*N_VOCAB; seq++) {
            res[seq].insert(res[seq].end(), logits.begin() + seq*N_VOCAB, logits.begin() + (seq + 1)*N_VOCAB);
        }
    }
    return res;
}

// Four slots of a server that share a cache, over what earlier requests have left, against four that have one each.
void test_slots(const Shape & shape, const Pair & types) {
    for (const int recent : { 0, 24 }) {
        Context shared = new_context(shape, types, { 512, 4, true, 1, false, recent }), own = new_context(shape, types, { 512, 4, false, 1, false, recent });
        for (llama_seq_id seq : { 3, 1 }) {
            decode(shared.get(), text(seq, 30, 120));
            remove_all(shared.get(), seq);
        }
        const auto want = in_turns(own.get(), 100), got = in_turns(shared.get(), 100);
        for (size_t seq = 0; seq < 4; seq++) {
            const std::string slot = "slot " + std::to_string(seq) + " of four";
            if (recent == 0) {
                check_like_fresh(types, want[seq], got[seq], slot);
            } else {
                // each keeps its last cells; batches that are not of the same size show each token a few more or less
                check_below(largest(kl_divergences(want[seq], got[seq], N_VOCAB)), 1e-3, slot + ", with recent cells: KL");
            }
        }
    }
}

// A window's cells go round: a group is written again when the window has passed it.
void test_window(const Pair & types) {
    const llama_pos n = 400;
    const auto want = fresh(WINDOWED, types, wanted(text(0, 0, n)), true);
    check_like_fresh(types, want, fresh(WINDOWED, types, wanted(text(0, 0, n)), false), "cells that go round");
}

// The same beside another sequence that stays where the window comes by, in batches of several parts: llama.cpp tries all parts
// on the cells before it computes the first.
void test_shared_window(const Pair & types) {
    std::vector<float> logits[2];
    for (const bool swa_full : { true, false }) {
        Context ctx = new_context(WINDOWED, types, { 1024, 4, true, 1, swa_full });
        decode(ctx.get(), text(0, 0, 330));
        for (llama_seq_id seq : { 2, 3, 1 }) {
            decode(ctx.get(), text(seq, 0, 5)); // behind the window: a free group each
        }
        remove_all(ctx.get(), 2);
        remove_all(ctx.get(), 3);
        decode(ctx.get(), text(0, 330, 512));
        logits[swa_full] = decode(ctx.get(), wanted(text(0, 512, 712)));
    }
    check(logits[0].size() == 200*N_VOCAB && logits[1].size() == logits[0].size(), "every batch decodes: " + take_log());
    check_below(largest(kl_divergences(logits[1], logits[0], N_VOCAB)), OTHER_ORDER, "KL to a cache that keeps all cells");
}

// A cache so full that sequences share groups still takes every token.
void test_full(const Shape & shape, const Pair & types) {
    Context ctx = new_context(shape, types, { 256, 4, true });
    bool good = true;
    for (llama_pos pos = 0; pos < 64; pos++) {
        std::vector<Token> batch;
        for (llama_seq_id seq = 0; seq < 4; seq++) {
            // the first is longer by what the others lack: 100 + 3*52 cells
            const llama_pos more = seq == 0 ? 36 : -12;
            if (pos < 64 + std::min(more, 0)) {
                batch.push_back({ token_at(seq, pos), pos, seq, true });
            }
        }
        good = good && !decode(ctx.get(), batch).empty();
    }
    check(good, "four sequences decode: " + take_log());
    const auto end = decode(ctx.get(), wanted(text(0, 64, 100)));
    check(end.size() == 36*N_VOCAB && all_finite(end), "the last free cells of other groups are used: " + take_log());
    check(decode(ctx.get(), text(0, 100, 101)).empty(), "a full cache is full");
    take_log();
}

// What is saved of a sequence is the same whatever others hold: those that live beside it, those that go on from a common
// beginning in the same group, and those that are gone.
void test_private_states(const Shape & shape, const Pair & types) {
    std::vector<std::vector<uint8_t>> rows;
    for (const llama_seq_id other : { 2, 3 }) {
        Context ctx = new_context(shape, types, { 512, 4, true });
        llama_memory_t memory = llama_get_memory(ctx.get());
        decode(ctx.get(), text(other, 0, 100));
        remove_all(ctx.get(), other);
        decode(ctx.get(), text(0, 0, 50));
        llama_memory_seq_cp(memory, 0, 1, -1, -1);
        std::vector<Token> secret = text(other, 50, 60);
        for (Token & t : secret) {
            t.seq = 0; // in the group of the common beginning
        }
        decode(ctx.get(), secret);
        decode(ctx.get(), text(1, 50, 90));
        decode(ctx.get(), text(other, 0, 20));
        rows.push_back(rows_of(save_state(ctx.get(), 1)));
        check(!rows.back().empty(), "a state has rows");
    }
    check(rows[0] == rows[1], "a state is the same byte for byte whatever other sequences hold");
}

}  // namespace

void test_history() {
    for (const Pair & types : { Pair{ "delta4", "srft4" }, Pair{ "delta3", "srft3" }, Pair{ "srft4", "srft4" }, Pair{ "srft4,0=delta4,1=f16", "f16" } }) {
        for (const Shape * shape : { &HEADS_OF_64, &HEADS_OF_128 }) {
            if (quick && shape != &HEADS_OF_64) {
                continue;
            }
            const std::string name = types.name() + " " + shape->name;
            if (begin_case("history: reused cells " + name)) {
                test_reused_cells(*shape, types);
            }
            if (begin_case("history: four slots " + name)) {
                test_slots(*shape, types);
            }
            if (begin_case("history: a full cache " + name)) {
                test_full(*shape, types);
            }
            if (begin_case("history: private states " + name)) {
                test_private_states(*shape, types);
            }
        }
        if (begin_case("history: a window " + types.name())) {
            test_window(types);
        }
        if (begin_case("history: a window beside others " + types.name())) {
            test_shared_window(types);
        }
    }
}
