// The guard in a cache that llama.cpp makes: what it reads of a model's weights, and what it is worth.

#include "life.h"

namespace {

bool has(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

// The mean divergence of what a model says with these types from what it says with f16.
double loss(const Shape & shape, const Pair & types) {
    Context exact = new_context(shape, { "f16", "f16" }, {}), coded = new_context(shape, types, {});
    const std::vector<Token> tokens = wanted(text(0, 0, 100));
    const auto a = decode(exact.get(), tokens), b = decode(coded.get(), tokens);
    check(a.size() == tokens.size()*N_VOCAB && b.size() == a.size() && all_finite(b), "it says something");
    return mean(kl_divergences(a, b, N_VOCAB));
}

// What the log says when a cache is made.
std::string log_of(const Shape & shape, const Pair & types) {
    take_log();
    new_context(shape, types, {});
    return take_log();
}

struct Case {
    const Shape & shape;
    const char *  reason;
};

void test_weights() {
    const Case cases[] = {
        { BIASED,       "K bias has an rms of 40.0 in a head" },
        { BIASED_FUSED, "K bias has an rms of 40.0 in a head" },
        { NORMED,       "norms have gains of 8." },
    };
    for (const auto & [shape, reason] : cases) {
        if (!begin_case(std::string("the guard on ") + shape.name)) {
            continue;
        }
        const std::string layer = std::to_string(LARGE_LAYER), raised = "guard: layer " + layer + ": K raised from srft4 to delta8";
        const std::string log = log_of(shape, { "srft4", "srft4" });
        check(has(log, raised) && has(log, reason), raised + " because of " + reason + ": " + log);
        check(log.find("guard:") == log.rfind("guard:"), "no other layer is: " + log);
        check(has(log, "K (srft4 x2 + delta8 x1, 6.29 bits/value with 24 recent cells)"), "the line of the cache tells the mix: " + log);
        check(!has(log_of(shape, { "srft4,guard=off", "srft4" }), "guard:"), "guard=off raises nothing");
        check(!has(log_of(shape, { "srft4," + layer + "=srft4", "srft4" }), "guard:"), "a layer named by number is the user's");
        check(!has(log_of(shape, { "f16", "srft4" }), "guard:"), "V is left alone");

        const double guarded = loss(shape, { "srft4", "f16" }), bare = loss(shape, { "srft4,guard=off", "f16" });
        check_below(guarded, 0.5*bare, "what the guard leaves of the loss of " + std::to_string(bare));
    }
    if (begin_case("the guard where there is nothing to see")) {
        for (const Shape * shape : { &HEADS_OF_64, &HEADS_OF_128, &WINDOWED }) {
            check(!has(log_of(*shape, { "srft2", "srft2" }), "guard:"), shape->name);
        }
    }
}

void test_idle_parts() {
    if (!begin_case("parts of a spec that do nothing")) {
        return;
    }
    const std::string said = "swa=srft3 does nothing";
    check(has(log_of(HEADS_OF_64, { "srft4,swa=srft3", "f16" }), "K cache type: " + said), "K, no window");
    check(has(log_of(HEADS_OF_64, { "f16", "srft4,swa=srft3" }), "V cache type: " + said), "V, no window");
    check(!has(log_of(WINDOWED, { "srft4,swa=srft3,-1=f16", "srft4,0=f16" }), "does nothing"), "windows and layers that are there");
}

}  // namespace

void test_guard() {
    test_weights();
    test_idle_parts();
}
