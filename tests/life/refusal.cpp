// States that a context cannot take: refused with a reason, and the context is as if nobody had asked.

#include "life.h"

#include <cstring>

namespace {

bool taken(llama_context * ctx, const uint8_t * data, size_t size, bool whole) {
    return (whole ? llama_state_set_data(ctx, data, size) : llama_state_seq_set_data(ctx, data, size, 0)) > 0;
}

// A context, and what its state was before anything was tried on it.
struct Victim {
    Context              ctx;
    std::vector<uint8_t> before;

    Victim(const Shape & shape, const Pair & types, const Setup & setup) : ctx(new_context(shape, types, setup)) {
        decode(ctx.get(), text(0, 0, 75));
        before = state_of(ctx.get(), true);
    }

    // `words`: what the reason must name.
    void refuses(const std::vector<uint8_t> & state, bool whole, const std::vector<std::string> & words, const std::string & what) {
        take_log();
        check(!taken(ctx.get(), state.data(), state.size(), whole), what + " is refused");
        const std::string reason = take_log();
        for (const std::string & word : words) {
            check(reason.find(word) != std::string::npos, what + ": no '" + word + "' in: " + reason);
        }
        check(state_of(ctx.get(), true) == before, what + ": the context is unchanged");
        count("bad states refused");
    }

    // Many of them: the context is compared now and then.
    void refuses_quietly(const uint8_t * data, size_t size, bool whole, const std::string & what) {
        const bool refused = !taken(ctx.get(), data, size, whole);
        if (!refused) {
            check(false, what + " is refused");
        }
        count("bad states refused");
    }
};

void test_other_types() {
    const std::vector<Pair> pairs = { { "delta4", "srft4" }, { "srft4", "srft4" }, { "delta3", "srft4" }, { "srft4", "srft3" }, { "f16", "f16" } };
    for (const Pair & from : pairs) {
        Context source = new_context(HEADS_OF_64, from, { 512, 2, true });
        decode(source.get(), text(0, 0, 100));
        for (const Pair & to : pairs) {
            if (from.name() == to.name() || !begin_case("a state of " + from.name() + " for " + to.name())) {
                continue;
            }
            Victim victim(HEADS_OF_64, to, { 512, 2, true });
            for (bool whole : { true, false }) {
                std::vector<std::string> words;
                if (from.k == "f16") {
                    words = { "stock llama.cpp", to.k + "_64" };
                } else {
                    const bool k = from.k != to.k;
                    const auto name = [](const std::string & t) { return t == "f16" ? t : t + "_64"; };
                    words = { "layer 0", name(k ? from.k : from.v), name(k ? to.k : to.v) };
                }
                victim.refuses(state_of(source.get(), whole), whole, words, whole ? "a whole state" : "a sequence");
            }
            check(!decode(victim.ctx.get(), text(0, 75, 80)).empty(), "the context still decodes");
        }
    }
}

void test_other_contexts() {
    const Pair types = { "delta4", "srft4" };
    if (begin_case("states of other models and geometries")) {
        Victim victim(HEADS_OF_64, types, { 512, 2, true });
        for (const Shape * shape : { &HEADS_OF_128, &HEADS_OF_80 }) {
            Context other = new_context(*shape, types, { 512, 2, true });
            decode(other.get(), text(0, 0, 100));
            victim.refuses(state_of(other.get(), true), true, { "layers" }, "another model");
        }
        Context streams = new_context(HEADS_OF_64, types, { 512, 2, false });
        decode(streams.get(), text(0, 0, 100));
        victim.refuses(state_of(streams.get(), true), true, { "2 streams", "1" }, "a state of streams");
        Context large = new_context(HEADS_OF_64, types, { 1024, 2, true });
        decode(large.get(), text(0, 0, 600));
        for (bool whole : { true, false }) {
            victim.refuses(state_of(large.get(), whole), whole, { "600 cells", "free" }, "more cells than there are");
        }
        Context many = new_context(HEADS_OF_64, types, { 512, 4, true });
        decode(many.get(), text(3, 0, 20));
        victim.refuses(state_of(many.get(), true), true, { "4 sequences" }, "more sequences than there may be");
    }
    if (begin_case("states of stock types for which there is no room")) {
        // llama.cpp's own rule: what was there is gone
        for (const char * type : { "f16", "q8_0" }) {
            Context large = new_context(HEADS_OF_64, { type, type }, { 1024, 2, true }), small = new_context(HEADS_OF_64, { type, type }, { 512, 2, true });
            decode(large.get(), text(0, 0, 600));
            for (bool whole : { true, false }) {
                check(!restore_state(small.get(), state_of(large.get(), whole), whole ? -1 : 0), std::string("a state of ") + type + " without room is refused");
                check(!decode(small.get(), text(1, 0, 20)).empty(), "the context goes on");
                llama_memory_clear(llama_get_memory(small.get()), true);
            }
        }
    }
    if (begin_case("no room for a sequence")) {
        Context source = new_context(HEADS_OF_64, types, { 512, 2, true });
        decode(source.get(), text(0, 0, 100));
        Victim victim(HEADS_OF_64, types, { 256, 2, true });
        decode(victim.ctx.get(), text(1, 0, 160));
        victim.before = state_of(victim.ctx.get(), true);
        victim.refuses(state_of(source.get(), false), false, { "100 cells", "96 are free" }, "a sequence without room");
    }
}

uint32_t u32_at(const std::vector<uint8_t> & bytes, size_t at) {
    uint32_t res;
    memcpy(&res, &bytes[at], sizeof(res));
    return res;
}

uint64_t u64_at(const std::vector<uint8_t> & bytes, size_t at) {
    return u32_at(bytes, at) | (uint64_t) u32_at(bytes, at + 4) << 32;
}

void test_damage() {
    for (const Pair & types : { Pair{ "delta4", "srft4" }, Pair{ "srft4", "srft4" } }) {
        if (!begin_case("damaged states of " + types.name())) {
            continue;
        }
        Victim victim(HEADS_OF_64, types, { 512, 2, true });
        Context source = new_context(HEADS_OF_64, types, { 512, 2, true });
        decode(source.get(), text(0, 0, 100));
        const auto state = state_of(source.get(), false);
        // magic and sequence of llama.cpp, then ours
        const size_t begin = 8, header = begin + GGML_EXT_STATE_PREFIX + u32_at(state, begin + 8);
        const size_t meta  = header + u64_at(state, begin + GGML_EXT_STATE_PREFIX + 8);
        check(u32_at(state, begin) == GGML_EXT_STATE_MAGIC && meta < state.size(), "the state has a header");

        std::vector<uint8_t> bad = state;
        for (size_t bit = 8*begin; bit < 8*meta; bit += bit < 8*header || soak ? 1 : 7) {
            bad[bit/8] ^= 1 << bit%8;
            victim.refuses_quietly(bad.data(), bad.size(), false, "bit " + std::to_string(bit) + " flipped");
            bad[bit/8] ^= 1 << bit%8;
        }
        for (size_t size = 0; size < state.size(); size += size < meta ? 1 : 997) {
            victim.refuses_quietly(state.data(), size, false, "a state cut to " + std::to_string(size) + " bytes");
        }
        check(state_of(victim.ctx.get(), true) == victim.before, "the context is unchanged");
        check(take_log().find("checksum") != std::string::npos, "the log tells of checksums");

        // whatever rows hold, they are read as something
        Rng rng(5);
        for (int i = 0; i < (quick ? 20 : 200); i++) {
            bad = state;
            for (int n = 0; n < 50; n++) {
                bad[meta + rng.below((int64_t) (state.size() - meta))] = (uint8_t) rng.next();
            }
            check(taken(victim.ctx.get(), bad.data(), bad.size(), false), "rows of any bytes are taken");
            const auto logits = decode(victim.ctx.get(), { { 1, 100, 0, true } });
            check(logits.size() == N_VOCAB && all_finite(logits), "rows of any bytes are read as something");
            count("states with damaged rows");
        }
    }
}

}  // namespace

void test_refusal() {
    test_other_types();
    test_other_contexts();
    test_damage();
}
