// kv-test-archs: every architecture of llama.cpp's test-llama-archs with caches of our types.
//
// A life is a prompt, tokens one by one, a shift of the context, a state of all sequences and one of a single sequence. A
// context with our types lives it beside one with an f32 cache and two with q8_0 and q4_0: the logits may be as far off as
// upstream's types of as many bits are, by a factor and a floor, and a restored context goes on as the one that was saved.
// What llama.cpp cannot do with a type must be refused when the context is made, with the reason; nothing may abort.

#include "fixtures.h"
#include "sizes.h"

#include "../harness/harness.h"
#include "../harness/tokens.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace {

struct Types {
    std::string k, v;
    bool        flash_attn;
    std::string like;  // upstream's type of as many bits

    std::string name() const { return k + "/" + v + (flash_attn ? "" : " without flash attention"); }
    bool        grouped() const { return k.rfind("delta", 0) == 0; }
    // The same pair of upstream's types.
    Types upstream() const { return { like, v == "f16" ? v : like, flash_attn, like }; }
};

const Types OURS[] = {
    { "srft8",  "srft8", true,  "q8_0" },
    { "srft4",  "srft4", true,  "q4_0" },
    { "delta4", "srft4", true,  "q4_0" },
    { "srft4",  "f16",   false, "q4_0" },
    { "delta4", "f16",   false, "q4_0" },
};

const Types EXACT = { "f32", "f32", false, "" };

Context new_context(llama_model * model, const Types & types, uint32_t n_stream) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = 256*n_stream;
    p.n_batch         = 256;
    p.n_ubatch        = 256;
    p.n_seq_max       = n_stream;
    p.kv_unified      = false;
    p.n_threads       = 1;
    p.n_threads_batch = 1;
    p.type_k          = cache_type(types.k);
    p.type_v          = cache_type(types.v);
    p.flash_attn_type = types.flash_attn ? LLAMA_FLASH_ATTN_TYPE_AUTO : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.no_perf         = true;
    take_log();
    return Context(llama_init_from_model(model, p), llama_free);
}

// What a context is asked to do, and the logits that it gave.
class Life {
  public:
    Life(const Fixture & fixture, llama_model * model, const Types & types, uint32_t n_stream)
        : fixture(fixture), n_stream(n_stream), ctx(new_context(model, types, n_stream)), next(n_stream, 0) {}

    explicit operator bool() const { return ctx != nullptr; }

    bool has_memory() const { return llama_get_memory(ctx.get()) != nullptr; }

    bool can_shift() const { return has_memory() && llama_memory_can_shift(llama_get_memory(ctx.get())); }

    // `n` more tokens of each sequence in one batch; all their logits, empty where decoding failed
    std::vector<float> append(int n) {
        std::vector<Token> tokens;
        for (uint32_t s = 0; s < n_stream; s++) {
            for (int i = 0; i < n; i++, next[s]++) {
                const llama_token token = (next[s]*7 + next[s]/5*31 + (llama_pos) s*17 + 3) % 128;
                tokens.push_back({ token, next[s], (llama_seq_id) s, true });
            }
        }
        return decode(ctx.get(), tokens, fixture.encodes);
    }

    // Drops the tokens after the first four of each sequence and moves the others up; false where the memory cannot.
    bool shift() {
        llama_memory_t memory = llama_get_memory(ctx.get());
        for (uint32_t s = 0; s < n_stream; s++) {
            if (!llama_memory_seq_rm(memory, (llama_seq_id) s, 4, 4 + SHIFT)) {
                return false;
            }
            llama_memory_seq_add(memory, (llama_seq_id) s, 4 + SHIFT, -1, -SHIFT);
            next[s] -= SHIFT;
        }
        return true;
    }

    std::vector<uint8_t> save() const { return save_state(ctx.get()); }

    std::vector<uint8_t> save(llama_seq_id seq) const { return save_state(ctx.get(), seq); }

    // With the positions that its sequences had reached when it was saved.
    bool restore(const std::vector<uint8_t> & state, const std::vector<llama_pos> & positions) {
        next = positions;
        return restore_state(ctx.get(), state);
    }

    bool restore(const std::vector<uint8_t> & state, llama_seq_id seq) { return restore_state(ctx.get(), state, seq); }

    llama_seq_id last_seq() const { return (llama_seq_id) n_stream - 1; }

    const std::vector<llama_pos> & positions() const { return next; }

    bool forget(llama_seq_id seq) { return llama_memory_seq_rm(llama_get_memory(ctx.get()), seq, -1, -1); }

  private:
    static constexpr llama_pos SHIFT = 8;

    const Fixture &        fixture;
    uint32_t               n_stream;
    Context                ctx;
    std::vector<llama_pos> next;
};

// The logits of what all contexts of a fixture do.
struct Record {
    std::vector<float> prompt, tokens, shifted;  // the last empty where the memory cannot shift
};

constexpr int PROMPT = 70, TOKENS = 2;

Record live(Life & life, bool shifts) {
    Record res;
    res.prompt = life.append(PROMPT);
    for (int i = 0; i < TOKENS; i++) {
        const auto logits = life.append(1);
        res.tokens.insert(res.tokens.end(), logits.begin(), logits.end());
    }
    if (shifts && life.shift()) {
        res.shifted = life.append(1);
    }
    count("contexts");
    return res;
}

double nmse(const std::vector<float> & wanted, const std::vector<float> & found) {
    return wanted.empty() || wanted.size() != found.size() ? NAN : nmse_of(wanted, found);
}

// Why a context cannot be had, as its log must say: the beginning of a sentence, empty where it must be made.
std::string refusal_of(const Fixture & fixture, const Types & types) {
    const bool v_compressed = types.v != "f16";
    if (fixture.one_kind && types.k != types.v) {
        return "model does not support different K";
    }
    if (v_compressed && (fixture.arch == "grok" || fixture.arch == "t5")) {
        return "needs flash attention, which";
    }
    return "";
}

// What upstream's own types lose: the bound of ours. None where their blocks do not divide the heads.
struct Loss {
    double prompt, tokens, shifted;
};

std::optional<Loss> loss_of(const Fixture & fixture, llama_model * model, const Types & types, uint32_t n_stream, const Record & exact) {
    if (!refusal_of(fixture, types).empty()) {
        return {};
    }
    Life life(fixture, model, types, n_stream);
    if (!life) {
        return {};
    }
    const Record record = live(life, !exact.shifted.empty());
    return Loss{ nmse(exact.prompt, record.prompt), nmse(exact.tokens, record.tokens), nmse(exact.shifted, record.shifted) };
}

// What ours may lose, given what upstream's type of as many bits loses. Measured: 0.7 to 1.0 of that in the median of models; at most
// 3 times as much for a prompt, and 9 times for the few logits behind it, where an expert that is chosen or not decides. What
// is broken is off by 1, logits of another model by 2.
double bound_of(double loss, const std::string & like, bool prompt) {
    if (!std::isfinite(loss)) {
        return like == "q8_0" ? 2e-3 : 0.1;
    }
    return std::min(std::max((prompt ? 5.0 : 15.0)*loss, 1e-6), 0.5);
}

// A context that a state was restored into goes on as the one that it is of. Keys that are coded by their neighbours may be
// coded anew where some of these are not in the state; kv-test-life has the cases where they must not.
void test_states(Life & life, Life & other, const Types & types, double loss) {
    constexpr double SAME = 1e-5; // gaps between cells are closed, so sums have another order
    const llama_seq_id last = life.last_seq();
    const auto all = life.save();
    const auto one = life.save(last);
    const auto positions = life.positions();
    const auto wanted = life.append(1);

    check(other.restore(all, positions), "the state of all sequences comes back");
    check_below(nmse(wanted, other.append(1)), types.grouped() ? loss : SAME, "NMSE after restoring all sequences");
    check(other.restore(all, positions) && other.forget(last) && other.restore(one, last), "the state of one sequence comes back");
    check_below(nmse(wanted, other.append(1)), types.grouped() ? loss : SAME, "NMSE after restoring one sequence");
}

void test_types(const Fixture & fixture, llama_model * model, const Types & types, uint32_t n_stream, const Record & exact, const std::optional<Loss> & upstream) {
    begin_case(fixture.name + " " + types.name() + ", " + std::to_string(n_stream) + " stream" + (n_stream == 1 ? "" : "s"));
    const std::string refusal = refusal_of(fixture, types);
    Life life(fixture, model, types, n_stream);
    const std::string log = take_log();
    if (!refusal.empty()) {
        check(!life && log.find(refusal) != std::string::npos, life ? "a context that cannot work was made" : "refused without the reason: " + log);
        count("contexts refused");
        return;
    }
    check(!!life, "no context: " + log);
    if (!life) {
        return;
    }
    check(life.can_shift() || exact.shifted.empty(), "it shifts as others do");
    const Record record = live(life, !exact.shifted.empty());
    const Loss loss = upstream.value_or(Loss{ NAN, NAN, NAN });
    check_below(nmse(exact.prompt, record.prompt), bound_of(loss.prompt, types.like, true), "NMSE of the prompt");
    check_below(nmse(exact.tokens, record.tokens), bound_of(loss.tokens, types.like, false), "NMSE of tokens");
    if (!exact.shifted.empty()) {
        check_below(nmse(exact.shifted, record.shifted), bound_of(loss.shifted, types.like, false), "NMSE after a shift");
        count("shifts");
    }
    if (life.has_memory() && !fixture.encodes) {
        Life other(fixture, model, types, n_stream);
        test_states(life, other, types, bound_of(loss.tokens, types.like, false));
    }
}

// An encoder is there for one sequence; kimi-linear's graph cannot be built for several, with stock types too.
bool streams_work(const Fixture & fixture) {
    return !fixture.encodes && fixture.arch != "kimi-linear";
}

// This model has no layer with a window and yet a cache for such layers; shifting that aborts, with stock types too.
bool shift_works(const Fixture & fixture) {
    return fixture.arch != "lfm2";
}

void test_fixture(const Fixture & fixture, size_t seed) {
    if (!begin_case(fixture.name)) {
        return;
    }
    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(fixture.load(seed), llama_model_free);
    check(model != nullptr, "the model is made");
    if (!model) {
        return;
    }
    count("models");
    const Types & shifted_by = OURS[refusal_of(fixture, OURS[0]).empty() ? 0 : 3];
    for (uint32_t n_stream : { 1u, 3u }) {
        if (streams_work(fixture) ? quick && n_stream == 1 : n_stream > 1) {
            continue;
        }
        begin_case(fixture.name + ", upstream's types");
        Life exact_life(fixture, model.get(), EXACT, n_stream);
        check(!!exact_life, "a context with an f32 cache: " + take_log());
        if (!exact_life) {
            continue;
        }
        // llama.cpp shifts quantized keys of which RoPE turns a part, and aborts: what ours refuse is asked of none
        const bool   shifts = shift_works(fixture) && Life(fixture, model.get(), shifted_by, n_stream).can_shift();
        const Record exact  = live(exact_life, shifts);
        std::map<std::string, std::optional<Loss>> upstream;
        for (const Types & types : OURS) {
            if (quick && &types != &OURS[1] && &types != &OURS[2]) {
                continue;
            }
            const Types theirs = types.upstream();
            if (upstream.find(theirs.name()) == upstream.end()) {
                begin_case(fixture.name + " " + theirs.name());
                // without flash attention llama.cpp does not ask whether its blocks divide the heads, and aborts
                const Types with_v = { theirs.k, theirs.k, true, theirs.like };
                const bool  fits   = theirs.flash_attn || upstream[with_v.name()] || !refusal_of(fixture, with_v).empty();
                upstream[theirs.name()] = fits ? loss_of(fixture, model.get(), theirs, n_stream, exact) : std::nullopt;
            }
            test_types(fixture, model.get(), types, n_stream, exact, upstream[theirs.name()]);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    std::string sizes;
    begin_program("archs", argc, argv, { { "--sizes", "DIR", [&](const char * dir) { sizes = dir; } } });
    llama_log_set(keep_log, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    if (!sizes.empty()) {
        print_sizes(sizes);
        return end_program();
    }
    for (const Fixture & fixture : fixtures()) {
        for (size_t seed = 1; seed <= (soak ? 5 : 1); seed++) {
            test_fixture(fixture, seed);
        }
    }
    return end_program();
}
