// Cache specs across the C boundary: their ids as ggml's accessors see them, and the types that layers get.

#include "ops.h"

#include <cstring>
#include <thread>

namespace {

constexpr int N_LAYER = 30;

int32_t parse(const char * text, std::string & message) {
    char err[2048] = "";
    const int32_t id = ggml_ext_type_parse(text, err, sizeof(err));
    message = err;
    return id;
}

int32_t parse(const char * text) {
    std::string ignored;
    return parse(text, ignored);
}

// ggml's name of the type that a layer gets, or the message.
std::string layer_type(const char * text, int index, int head_size = 64, bool sliding = false) {
    char err[1024] = "";
    ggml_ext_layer layer = {};
    layer.index     = index;
    layer.n_layer   = N_LAYER;
    layer.head_size = head_size;
    layer.sliding   = sliding;
    const int32_t id = ggml_ext_resolve(parse(text), 'k', &layer, err, sizeof(err));
    return id < 0 ? err : ggml_type_name((ggml_type) id);
}

// Empty, or why a context is refused.
std::string refusal(const char * k, const char * v, bool flash_attn_off = false, const char * arch = nullptr) {
    char err[1024] = "";
    const int32_t id_k = parse(k);
    const int32_t id_v = parse(v);
    const bool ok = ggml_ext_check_cache(id_k, id_k < GGML_TYPE_COUNT, id_v, id_v < GGML_TYPE_COUNT, N_LAYER,
                                         arch, flash_attn_off, err, sizeof(err));
    return ok ? "" : err;
}

bool has(const std::string & text, const char * part) {
    return text.find(part) != std::string::npos;
}

void accessors() {
    for (const char * text : { "srft4,0-1=srft8,-1=f16", "srft4,swa=srft8", "srft4,guard=off", "q8_0,0=f16" }) {
        if (!begin_case(std::string("accessors of the spec ") + text)) {
            continue;
        }
        const int32_t id = parse(text);
        const ggml_type type = (ggml_type) id;
        check(id >= GGML_EXT_SPEC_BASE && id < GGML_EXT_SPEC_LIMIT, "its id is of the range of specs");
        check(parse(text) == id && ggml_ext_type_from_name(text) == id, "the same text has the same id");
        check(strcmp(ggml_type_name(type), text) == 0, "its name is its text");
        check(ggml_type_name(type) == ggml_type_name(type) && ggml_get_type_traits(type) == ggml_get_type_traits(type), "its traits stay where they are");
        check(ggml_blck_size(type) == 1 && ggml_type_size(type) == 0 && ggml_row_size(type, 64) == 0, "it has no size");
        check(ggml_is_quantized(type), "it is quantized");
    }
    if (begin_case("a spec of floats")) {
        check(!ggml_is_quantized((ggml_type) parse("f16,0=bf16")), "is not quantized");
        check(refusal("f16", "f16,0=bf16", /*flash_attn_off =*/ true).empty(), "needs no flash attention");
    }
    if (begin_case("ids of the range that are nobody's")) {
        for (int id : { GGML_EXT_SPEC_LIMIT - 1, GGML_EXT_SPEC_LIMIT, GGML_EXT_SPEC_BASE - 1 }) {
            check(strcmp(ggml_type_name((ggml_type) id), "unknown") == 0, std::to_string(id));
        }
    }
    if (begin_case("specs from several threads at once")) {
        std::vector<int> good(8, 0);
        std::vector<std::thread> threads;
        for (size_t i = 0; i < good.size(); i++) {
            threads.emplace_back([&good, i] {
                bool ok = true;
                for (int n = 0; n < 200; n++) {
                    const std::string text = "srft8," + std::to_string(n) + "=f16";
                    ok = ok && text == ggml_type_name((ggml_type) parse(text.c_str()));
                }
                good[i] = ok;
            });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        for (int ok : good) {
            check(ok, "a thread sees its specs");
        }
    }
}

void layers() {
    if (begin_case("layers of a spec")) {
        const char * spec = "srft4,0-1=srft8,-1=f16,5=q8_0,swa=srft3";
        check(layer_type(spec, 0) == "srft8_64" && layer_type(spec, 1, 128) == "srft8_128", "a range");
        check(layer_type(spec, 2) == "srft4_64", "the rest");
        check(layer_type(spec, 5) == "q8_0" && layer_type(spec, N_LAYER - 1) == "f16", "ggml's own types");
        check(layer_type(spec, 7, 64, /*sliding =*/ true) == "srft3_64", "a sliding window");
        check(layer_type(spec, 5, 64, /*sliding =*/ true) == "q8_0", "a number beats the window");
    }
    if (begin_case("names of one type are its id")) {
        check(parse("srft4,guard=on") == parse("srft4"), "srft4");
        for (const char * name : { "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl" }) {
            const ggml_type type = type_for(name, 64);
            check(parse(name) == (int32_t) type, std::string(name) + " has ggml's id");
            // what the library believes of it shows in its refusals
            const bool divides = 80 % ggml_blck_size(type) == 0;
            check(has(layer_type((std::string(name) + ",0=f32").c_str(), 3, 80), "do not divide") == !divides, std::string(name) + " has ggml's block size");
        }
    }
}

// ggml's name of the type that a layer with this K bias gets, and what the guard says of it.
std::string guarded_type(const char * text, char side, float bias_rms, std::string & said, int head_size = 64) {
    std::vector<float> bias(2*head_size, 0.5f);
    for (int i = 0; i < head_size; i++) {
        bias[i] = i % 2 ? bias_rms : -bias_rms;
    }
    ggml_ext_layer layer = {};
    layer.index     = 4;
    layer.n_layer   = N_LAYER;
    layer.head_size = head_size;
    layer.k_bias    = bias.data();
    layer.n_k_bias  = (int32_t) bias.size();

    char message[1024] = "stale";
    const int32_t id = ggml_ext_resolve(parse(text), side, &layer, message, sizeof(message));
    said = message;
    return id < 0 ? "refused" : ggml_type_name((ggml_type) id);
}

void guard() {
    if (!begin_case("the guard")) {
        return;
    }
    std::string said;
    check(guarded_type("srft4", 'k', 80.0f, said) == "delta8_64", "a huge bias raises K");
    check(has(said, "layer 4") && has(said, "delta8") && has(said, "80.0") && has(said, "bits/value"), "it says why: " + said);
    check(guarded_type("srft4", 'k', 2.0f, said) == "srft4_64" && said.empty(), "a small bias raises nothing");
    check(guarded_type("srft4", 'v', 80.0f, said) == "srft4_64" && said.empty(), "V is left alone");
    check(guarded_type("srft4,guard=off", 'k', 80.0f, said) == "srft4_64" && said.empty(), "guard=off");
    check(guarded_type("srft8,4=srft4", 'k', 80.0f, said) == "srft4_64" && said.empty(), "a layer named by number is the user's");
    check(guarded_type("srft4,3=f16", 'k', 80.0f, said, 128) == "delta8_128", "in a spec too");
    check(guarded_type("q4_0", 'k', 80.0f, said) == "q4_0" && said.empty(), "ggml's types are ggml's");
    check(guarded_type("srft4", 'k', 80.0f, said, 72) == "refused" && has(said, "72"), "what cannot be is still an error");
}

void refusals() {
    if (begin_case("bad specs")) {
        std::string message;
        for (const char * text : { "", ",", "nosuch", "srft4,", "srft4,srft8", "srft4,1-0=srft8", "srft4,0=", "srft4,x=f16",
                                   "srft4,guard=2", "srft4,swa=f16,swa=f16", "srft4\xff", "\xff,0=f16" }) {
            check(parse(text, message) == -1 && has(message, "^") && has(message, "srft8") && has(message, "q8_0"), text);
        }
        check(parse("srft4,0-1=srft9", message) == -1 && has(message, "\n    srft4,0-1=srft9\n              ^"), "the place is shown");
        check(ggml_ext_type_parse(nullptr, nullptr, 0) == -1 && ggml_ext_type_from_name(nullptr) == -1, "no text");
        char little[8] = "";
        check(ggml_ext_type_parse("nosuch", little, sizeof(little)) == -1 && memchr(little, 0, sizeof(little)), "little room");
    }
    if (begin_case("specs that a model does not fit")) {
        check(refusal("srft4,0-29=srft8", "srft4,-30=f16").empty(), "(all of its layers)");
        for (const char * spec : { "srft4,30=srft8", "srft4,-31=srft8", "srft4,28-30=srft8" }) {
            check(has(refusal(spec, "f16"), spec) && has(refusal("f16", spec), "0 to 29"), spec);
            check(has(layer_type(spec, 0), "0 to 29"), std::string(spec) + " has no layer 0");
        }
        check(has(layer_type("srft4,3=q8_0", 3, 80), "layer 3"), "q8_0 at head size 80");
        check(has(layer_type("f16,3=srft4", 3, 72), "layer 3"), "srft4 at head size 72");
        check(layer_type("f16,3=srft4", 4, 72) == "f16", "(a layer beside it)");
        check(has(refusal("f16", "f16,0=q8_0", /*flash_attn_off =*/ true), "flash"), "a quantized V without flash attention");
        check(refusal("srft4,0=q8_0", "f16", /*flash_attn_off =*/ true).empty(), "(K alone)");
        for (const char * arch : { "grok", "t5" }) {
            const std::string why = refusal("srft4", "srft4", /*flash_attn_off =*/ true, arch);
            check(has(why, arch) && has(why, "f16") && !has(why, "-fa on"), "flash attention that cannot be had: " + why);
            check(refusal("srft4", "f16", /*flash_attn_off =*/ true, arch).empty(), "(K alone)");
        }
        check(has(refusal("srft4", "srft4", /*flash_attn_off =*/ true, "llama"), "-fa on"), "where it can be had");
        const auto idle = [](const char * spec, const char * layers) {
            char text[1024] = "stale";
            ggml_ext_idle_parts(parse(spec), (const uint8_t *) layers, (int32_t) strlen(layers), text, sizeof(text));
            return std::string(text);
        };
        check(idle("srft4,1=f16,swa=srft3", "awa-").empty() && idle("srft4", "aa").empty() && idle("f16", "aa").empty(), "parts that do something");
        check(has(idle("srft4,-1=f16", "awa-"), "-1=f16"), "a layer that keeps nothing");
        check(has(idle("srft4,swa=srft3", "aa-"), "swa=srft3"), "no layer with a window");
        char text[8] = "stale";
        ggml_ext_idle_parts(parse("srft4,0=f16"), nullptr, 5, text, sizeof(text));
        check(text[0] == 0, "no layers given");
        for (const Family & family : families()) {
            const std::string spec = "f16,0=" + family.name;
            check(refusal(spec.c_str(), "f16").empty() == family.serves_k, spec + " for K");
            check(refusal("f16", spec.c_str()).empty() == family.serves_v, spec + " for V");
        }
    }
}

}  // namespace

void test_spec() {
    accessors();
    layers();
    guard();
    refusals();
}
