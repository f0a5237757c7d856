// Calibrated keys and values: whatever the matrices and centers are, a model says what it says without them; states and files of another calibration are refused.

#include "life.h"

#include "center.h"
#include "ggml-ext-calibration.h"
#include "ggml-ext-seam.h"

#include "ggml-cpp.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <tuple>

std::string calibrate_program;

namespace {

bool has(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

// Any invertible matrices: a rotation by pairs of values, and lengths that differ by a factor of ten. Layers from `first` on. Centers of
// values of up to half of `center`.
std::string write_calibration(const Shape & shape, const char * name, uint64_t seed, int first = 0, uint64_t digest_change = 0, float center = 0.1f) {
    const int d = shape.head_size, n = shape.n_head_kv;
    ggml_ext_calibration what;
    what.architecture = shape.arch;
    what.text         = "a test";
    what.model        = ggml_ext_model_digest(*model_of(shape)) ^ digest_change;
    what.tokens       = 1;
    Rng rng(seed);
    for (int il = first; il < shape.n_layer; il++) {
        ggml_ext_calibration::layer & layer = what.layers[il];
        layer = { d, n, std::vector<float>((size_t) d*d*n), std::vector<float>((size_t) d*n) };
        for (float & x : layer.center) {
            x = center*(rng.uniform() - 0.5f);
        }
        for (int head = 0; head < n; head++) {
            float * m = &layer.m[(size_t) head*d*d];
            for (int i = 0; i < d; i++) {
                m[i*d + i] = std::exp(2.3f*(rng.uniform() - 0.5f));
            }
            for (int turn = 0; turn < 8*d; turn++) {
                const int a = rng.below(d), b = (a + 1 + rng.below(d - 1))%d;
                const float angle = 6.28f*rng.uniform(), c = std::cos(angle), s = std::sin(angle);
                for (int j = 0; j < d; j++) {
                    const float x = m[a*d + j], y = m[b*d + j];
                    m[a*d + j] = c*x - s*y;
                    m[b*d + j] = s*x + c*y;
                }
            }
        }
    }
    const std::string path = folder() + "/" + name + ".kv-cal.gguf";
    ggml_ext_calibration_write(what, path);
    return path;
}

// The file that types find which need one and name none.
std::string file_beside(const Shape & shape) {
    return folder() + "/" + shape.name + ".kv-cal.gguf";
}

double divergence(const std::vector<float> & a, const std::vector<float> & b) {
    check(!a.empty() && a.size() == b.size() && all_finite(b), "it says something");
    return a.size() == b.size() ? mean(kl_divergences(a, b, N_VOCAB)) : INFINITY;
}

// ggml's own attention on CUDA has no kernel for capped scores of heads of 64, and aborts: then the case is skipped.
bool aborts(const std::string & type_k, const Shape & shape) {
    const bool res = gpu_layers > 0 && &shape == &WINDOWED && (type_k == "f32" || type_k == "f16" || type_k == "q8_0");
    if (res) {
        skip("ggml's attention on CUDA has no kernel for capped scores of heads of 64");
    }
    return res;
}

void test_scores() {
    const std::pair<const char *, double> types[] = { { "f32", 1e-5 }, { "f16", 1e-5 }, { "srft8", 0.002 }, { "q8_0", 0.003 }, { "delta4", 0.2 } };
    for (const Shape * shape : { &HEADS_OF_64, &HEADS_OF_128, &HEADS_OF_80, &WINDOWED, &BIASED }) {
        const std::string file = write_calibration(*shape, shape->name, 3);
        for (const auto & [type, bound] : types) {
            // large keys lose more to their rounding when they are turned at random
            const double most = shape == &BIASED ? 10*bound : bound;
            const Pair plain = { type, "f16" }, calibrated = { std::string(type) + ",cal=" + file, "f16" };
            if (!serves(plain, *shape) || !begin_case(std::string("calibrated keys of ") + shape->name + ", " + type) || aborts(type, *shape)) {
                continue;
            }
            for (const bool unified : { true, false }) {
                const Setup setup = { 256, 2, unified };
                Context a = new_context(*shape, plain, setup), b = new_context(*shape, calibrated, setup);
                std::vector<Token> tokens = wanted(text(0, 0, 90));
                const std::vector<Token> second = wanted(text(1, 0, 70));
                tokens.insert(tokens.end(), second.begin(), second.end());
                check_below(divergence(decode(a.get(), tokens), decode(b.get(), tokens)), most, std::string("prompts, ") + type);
                std::vector<float> x, y;
                for (llama_pos pos = 90; pos < 100; pos++) {
                    const auto one = decode(a.get(), text(0, pos, pos + 1)), other = decode(b.get(), text(0, pos, pos + 1));
                    x.insert(x.end(), one.begin(), one.end());
                    y.insert(y.end(), other.begin(), other.end());
                }
                check_below(divergence(x, y), most, std::string("single tokens, ") + type);
            }
        }
    }
    if (begin_case("calibrated keys of some layers")) {
        const std::string file = write_calibration(HEADS_OF_64, "some", 5, 1);
        take_log();
        Context a = new_context(HEADS_OF_64, { "f16", "f16" }, {}), b = new_context(HEADS_OF_64, { "f16,cal=" + file, "f16" }, {});
        const std::string log = take_log();
        check(has(log, "keys of 2 layers and values of 0 are calibrated by " + file + " (digest "), "the log says which: " + log);
        const std::vector<Token> tokens = wanted(text(0, 0, 90));
        check_below(divergence(decode(a.get(), tokens), decode(b.get(), tokens)), 1e-5, "some layers");
    }
}

// Values lose their centers where they are stored, and results get them back.
void test_values() {
    const std::pair<const char *, double> types[] = { { "srft8", 0.002 }, { "srft4", 0.1 } };
    for (const Shape * shape : { &HEADS_OF_64, &HEADS_OF_128, &HEADS_OF_80, &WINDOWED, &BIASED }) {
        // the model's values are smaller than that: a center that is not given back, or to another head, shows
        const std::string file = write_calibration(*shape, (std::string(shape->name) + "-values").c_str(), 4, 0, 0, 1.0f);
        for (const auto & [type, of_values] : types) {
            // beside precise keys, and beside those that a GPU has a kernel for which gives centers back
            for (const auto & [key, recent, of_keys] : { std::tuple<std::string, std::string, double>{ "f16", ",recent=0", 0.0 }, { "f16", "", 0.0 }, { "srft8", "", 0.002 } }) {
                const Pair exact = { "f16", "f16" }, calibrated = { key + ",cal=" + file, type + recent };
                if (!serves(calibrated, *shape) || !begin_case(std::string("values without centers of ") + shape->name + ", " + key + "/" + type + recent) || aborts("f16", *shape)) {
                    continue;
                }
                const double bound = of_values + (shape == &BIASED ? 10*of_keys : of_keys);
                for (const bool unified : { true, false }) {
                    const Setup setup = { 256, 2, unified };
                    take_log();
                    Context a = new_context(*shape, exact, setup), b = new_context(*shape, calibrated, setup);
                    const std::string log = take_log();
                    check(has(log, " and values of ") && !has(log, "values of 0 "), "the log says so: " + log);
                    std::vector<Token> tokens = wanted(text(0, 0, 90));
                    const std::vector<Token> second = wanted(text(1, 0, 70));
                    tokens.insert(tokens.end(), second.begin(), second.end());
                    check_below(divergence(decode(a.get(), tokens), decode(b.get(), tokens)), bound, std::string("prompts, ") + type);
                    std::vector<float> x, y;
                    int64_t saved = 0;
                    for (llama_pos pos = 90; pos < 100; pos++) {
                        const auto one = decode(a.get(), text(0, pos, pos + 1));
                        const int64_t before = ggml_ext_cpu_waits_saved();
                        const auto other = decode(b.get(), text(0, pos, pos + 1));
                        saved += ggml_ext_cpu_waits_saved() - before;
                        x.insert(x.end(), one.begin(), one.end());
                        y.insert(y.end(), other.begin(), other.end());
                    }
                    // values lose their centers where they are written, and attention gives results theirs back
                    check(gpu_layers > 0 || saved >= 2*10*shape->n_layer, "threads wait for neither: " + std::to_string(saved) + " waits saved");
                    check_below(divergence(x, y), bound, std::string("single tokens, ") + type);
                }
            }
        }
    }
    if (begin_case("values that llama.cpp rotates, or that are not of our types, have no centers")) {
        const std::string file = write_calibration(HEADS_OF_64, "rotated", 4, 0, 0, 1.0f);
        const std::pair<std::string, std::string> layers[] = { { "f16", "0" }, { "q8_0", "0" }, { "srft4,0=q8_0", "0" }, { "srft4,0=f16", "2" }, { "srft4", "3" } };
        for (const auto & [v, n] : layers) {
            take_log();
            new_context(HEADS_OF_64, { "f16,cal=" + file, v }, {});
            const std::string log = take_log();
            check(has(log, "and values of " + n + " are calibrated"), n + " of " + v + ": " + log);
        }
    }
}

// Against f64, and what is known of ALiBi.
void test_center() {
    if (!begin_case("the center of values")) {
        return;
    }
    constexpr int D = 5, N = 200, QUERIES = 7;
    Rng rng(8);
    const std::vector<float> values = rng.normals(D*N), mask = rng.normals(N);
    Center center(D);
    std::vector<double> sum(D);
    double weight = 0.0;
    for (int query = 0; query < QUERIES; query++) {
        const Softmax softmax = { 1.5f, query % 2 ? 3.0f : 0.0f, query % 3 ? 0.25f : 1.0f };
        std::vector<float> products = rng.normals(N), hidden = mask;
        for (int i = query; i < N; i += 9) {
            hidden[i] = -INFINITY;
        }
        std::vector<double> p(N);
        double total = 0.0;
        for (int i = 0; i < N; i++) {
            const double s = 1.5*products[i], capped = query % 2 ? 3.0*std::tanh(s/3.0) : s;
            p[i] = std::isinf(hidden[i]) ? 0.0 : std::exp(capped + (query % 3 ? 0.25 : 1.0)*hidden[i]);
            total += p[i];
        }
        for (int i = 0; i < N; i++) {
            for (int j = 0; j < D; j++) {
                sum[j] += p[i]*p[i]/total/total*values[i*D + j];
            }
            weight += p[i]*p[i]/total/total;
        }
        check(softmax.shares(products.data(), hidden.data(), N), "there are cells enough");
        center.add(products.data(), values.data(), N);
    }
    const std::vector<float> mean = center.mean();
    check((int) mean.size() == D, "it has all components");
    for (int j = 0; j < D && j < (int) mean.size(); j++) {
        check_below(std::abs(mean[j] - sum[j]/weight), 1e-4, "component " + std::to_string(j));
    }
    std::vector<float> few(63);
    check(!Softmax().shares(few.data(), nullptr, few.size()) && Center(D).mean().empty(), "few cells tell nothing");
    // 8 heads: 2^-1 … 2^-8; of 12, the last four lie between the first of these
    for (int head = 0; head < 12; head++) {
        check(alibi_slope(8.0f, head, 8) == std::exp2(-(float) (head + 1)) || head > 7, "slopes of eight heads");
        check(alibi_slope(8.0f, head, 12) == (head < 8 ? std::exp2(-(float) (head + 1)) : std::exp2(-0.5f*(2*(head - 8) + 1))), "slopes of twelve heads");
        check(alibi_slope(0.0f, head, 12) == 1.0f, "no ALiBi");
    }
}

void test_raised() {
    const std::string file = write_calibration(BIASED, "raised", 5);
    // Of three layers one is raised where that helps.
    for (const auto & [type, layers] : { std::pair<std::string, std::string>{ "delta4", "2" }, { "delta4,guard=off", "3" }, { "f16", "3" } }) {
        if (begin_case("layers that the guard raises are not calibrated, " + type)) {
            take_log();
            new_context(BIASED, { type + ",cal=" + file, "f16" }, {});
            const std::string log = take_log();
            check(has(log, "keys of " + layers + " layers and"), layers + " layers of " + type + ": " + log);
        }
    }
}

void test_life() {
    const std::string file = write_calibration(HEADS_OF_64, "life", 7);
    for (const auto & [type, bound] : { std::pair<std::string, double>{ "f16", 1e-5 }, { "srft8", 0.002 } }) {
        if (begin_case("calibrated keys are shifted, " + type)) {
            Context a = new_context(HEADS_OF_64, { type, "srft8" }, {}), b = new_context(HEADS_OF_64, { type + ",cal=" + file, "srft8" }, {});
            for (llama_context * ctx : { a.get(), b.get() }) {
                decode(ctx, text(0, 0, 120));
                llama_memory_t mem = llama_get_memory(ctx);
                check(llama_memory_can_shift(mem), "it can be shifted");
                llama_memory_seq_rm(mem, 0, 10, 40);
                llama_memory_seq_add(mem, 0, 40, -1, -30);
            }
            const std::vector<Token> more = wanted(text(0, 90, 110));
            check_below(divergence(decode(a.get(), more), decode(b.get(), more)), std::max(bound, 0.002), "shifted keys, " + type);
        }
        if (begin_case("clearing leaves the matrices alone, " + type)) {
            Context b = new_context(HEADS_OF_64, { type + ",cal=" + file, "srft8" }, {});
            const std::vector<Token> tokens = wanted(text(0, 0, 50));
            const auto first = decode(b.get(), tokens);
            llama_memory_clear(llama_get_memory(b.get()), true);
            check(decode(b.get(), tokens) == first, "the same again");
        }
    }
}

Context restored_plain(const Pair & types, const std::vector<uint8_t> & state, bool whole) {
    Context res = new_context(HEADS_OF_64, types, {});
    check(whole ? restore_state(res.get(), state) : restore_state(res.get(), state, 0), "a plain state is restored");
    return res;
}

void test_states() {
    const std::string file = write_calibration(HEADS_OF_64, "states", 11), other = write_calibration(HEADS_OF_64, "other", 12);
    for (const auto & [type, v] : { std::pair<std::string, std::string>{ "f16", "f16" }, { "delta4", "f16" }, { "delta4", "srft4" } }) {
        if (!begin_case("states of calibrated keys, " + type + "/" + v)) {
            continue;
        }
        const Pair with = { type + ",cal=" + file, v }, without = { type, v }, another = { type + ",cal=" + other, v };
        Context source = new_context(HEADS_OF_64, with, {}), plain = new_context(HEADS_OF_64, without, {});
        decode(source.get(), text(0, 0, 100));
        decode(plain.get(), text(0, 0, 100));
        for (const bool whole : { true, false }) {
            const auto state = state_of(source.get(), whole), of_plain = state_of(plain.get(), whole);
            Context same = new_context(HEADS_OF_64, with, {}), bare = new_context(HEADS_OF_64, without, {}), third = new_context(HEADS_OF_64, another, {});
            const auto restore = [&](Context & to, const std::vector<uint8_t> & from) {
                take_log();
                return whole ? restore_state(to.get(), from) : restore_state(to.get(), from, 0);
            };
            check(restore(same, state), "it is restored");
            check(!restore(third, state), "a state of another calibration is refused");
            check(has(take_log(), "calibration of digest"), "and the log has the digests");
            check(!restore(bare, state), "a context without calibration refuses it");
            check(has(take_log(), "cal=FILE"), "and says what to do");
            check(!restore(third, of_plain), "a state without calibration is refused");
            const std::string log = take_log();
            check(has(log, "calibrat"), "and the log says why: " + log);
            // with its matrices, and not by others
            Context copy = new_context(HEADS_OF_64, with, {});
            check(restore(copy, state), "it is restored again");
            const std::vector<Token> more = wanted(text(0, 100, 110));
            const auto gone_on = decode(same.get(), more);
            check(!gone_on.empty() && decode(copy.get(), more) == gone_on, "copies go on alike");
            check_below(divergence(decode(restored_plain(without, of_plain, whole).get(), more), gone_on), type == "f16" ? 1e-5 : 0.2, "restored, " + type);
        }
    }
}

bool refused(const Pair & types, const std::vector<std::string> & words, const std::string & what) {
    llama_context_params p = llama_context_default_params();
    p.n_ctx           = 256;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    p.type_k          = cache_type(types.k);
    p.type_v          = cache_type(types.v);
    take_log();
    Context ctx(llama_init_from_model(model_of(HEADS_OF_64), p), llama_free);
    const std::string log = take_log();
    check(!ctx, what + " is refused");
    for (const std::string & word : words) {
        check(has(log, word), what + ": no '" + word + "' in: " + log);
    }
    return !ctx;
}

void test_refusals() {
    if (!begin_case("calibrations that do not fit")) {
        return;
    }
    const std::string command = "cargo kv calibrate";
    refused({ "f16,cal=" + folder() + "/none.gguf", "f16" }, { "none.gguf", "cannot be opened", command }, "a file that is not there");
    remove(file_beside(HEADS_OF_64).c_str());
    refused({ "band3", "f16" }, { file_beside(HEADS_OF_64), "cannot be opened", command }, "a type that needs one, where there is none");
    refused({ "f16,cal=" + write_calibration(HEADS_OF_128, "large", 1), "f16" }, { "another model", command }, "a calibration of another model");
    refused({ "f16,cal=" + write_calibration(HEADS_OF_64, "changed", 1, 0, 1), "f16" }, { "another model", command }, "another digest");
    model_of(HEADS_OF_64);
    refused({ "f16,cal=" + folder() + "/" + HEADS_OF_64.name + ".gguf", "f16" }, { "no file of `cargo kv calibrate`" }, "a model as calibration");
    const std::string cut = folder() + "/cut.gguf";
    {
        std::ifstream from(write_calibration(HEADS_OF_64, "whole", 1), std::ios::binary);
        std::string bytes{ std::istreambuf_iterator<char>(from), std::istreambuf_iterator<char>() };
        std::ofstream(cut, std::ios::binary).write(bytes.data(), (std::streamsize) bytes.size()/2);
    }
    refused({ "f16,cal=" + cut, "f16" }, { "cut.gguf", command }, "a file that was cut");
    const auto changed = [](const char * name, auto && change) {
        ggml_ext_calibration what = ggml_ext_calibration_read(write_calibration(HEADS_OF_64, name, 1));
        change(what.layers.begin()->second);
        ggml_ext_calibration_write(what, what.path);
        return what.path;
    };
    refused({ "f16,cal=" + changed("no-number", [](ggml_ext_calibration::layer & l) { l.center[3] = NAN; }), "srft4" }, { "v_center", "no numbers", command }, "a center of NaN");
    refused({ "f16,cal=" + changed("short", [](ggml_ext_calibration::layer & l) { l.center.resize(l.center.size()/2); }), "srft4" }, { "centers of", command }, "a center of another size");
    {
        const std::string old = write_calibration(HEADS_OF_64, "old", 1);
        std::ifstream from(old, std::ios::binary);
        std::string bytes{ std::istreambuf_iterator<char>(from), std::istreambuf_iterator<char>() };
        const std::string key = "kv-cal.version";
        bytes[bytes.find(key) + key.size() + 4] = 1; // behind the type of the number
        std::ofstream(old, std::ios::binary).write(bytes.data(), (std::streamsize) bytes.size());
        refused({ "f16,cal=" + old, "f16" }, { "it has version 1", command }, "a file of version 1");
    }
    refused({ "f16", "f16,cal=" + cut }, { "is said of keys" }, "a calibration of V");
}

// From the program that makes calibrations to a cache that uses one.
void test_program() {
    if (!begin_case("the program calibrates")) {
        return;
    }
    if (calibrate_program.empty()) {
        skip("no --calibrate PROGRAM was given");
        return;
    }
    for (const Shape * shape : { &HEADS_OF_64, &HEADS_OF_80, &WINDOWED, &BIASED }) {
        if (aborts("f16", *shape)) {
            continue;
        }
        model_of(*shape);
        const std::string words = folder() + "/words.txt", file = folder() + "/" + shape->name + ".made.gguf";
        {
            std::ofstream to(words, std::ios::binary);
            for (llama_pos pos = 0; pos < 1000; pos++) {
                to.put((char) token_at(0, pos));
            }
        }
        const auto run = [&](const std::string & text) {
            return system(("\"" + calibrate_program + "\" --model \"" + folder() + "/" + shape->name + ".gguf\" --text \"" + text + "\" --out \"" + file +
                           "\" --text-name words --tokens 600 > \"" + folder() + "/calibrate.log\" 2>&1").c_str());
        };
        check(run(folder() + "/no-words.txt") != 0, "without a text it fails");
        check(run(words) == 0, std::string("it makes a file for ") + shape->name);
        const ggml_ext_calibration made = ggml_ext_calibration_read(file);
        check((int) made.layers.size() == shape->n_layer && made.tokens == 600 && made.text == "words" && made.architecture == shape->arch, "it says what it is");
        const std::vector<Token> tokens = wanted(text(0, 0, 200));
        const auto exact = decode(new_context(*shape, { "f16", "f16" }, {}).get(), tokens);
        const auto loss  = [&](const std::string & k, const std::string & v = "f16") { return divergence(exact, decode(new_context(*shape, { k, v }, {}).get(), tokens)); };
        if (shape == &BIASED) {
            // all values of a head have a bias in common
            const double plain = loss("f16", "srft3,recent=0"), centered = loss("f16,cal=" + file, "srft3,recent=0");
            check_below(centered, 0.9*plain, "srft3 values without centers, beside plain ones of " + std::to_string(plain));
            continue;
        }
        check(std::all_of(made.layers.begin(), made.layers.end(), [&](const auto & l) {
            return l.second.center.size() == (size_t) shape->head_size*shape->n_head_kv && std::any_of(l.second.center.begin(), l.second.center.end(), [](float x) { return x != 0.0f; });
        }), "all layers have centers of values");
        check_below(loss("f16,cal=" + file), 1e-5, "f16 keys, calibrated");
        // random weights have hardly a shape
        check_below(loss("srft3,recent=0,cal=" + file), 1.3*loss("srft3,recent=0"), "srft3 keys, calibrated, beside plain ones");
    }
}

}  // namespace

void calibrate_beside(const Shape & shape) {
    if (!std::ifstream(file_beside(shape))) {
        write_calibration(shape, shape.name, 3);
    }
}

void test_calibrated() {
    test_scores();
    test_values();
    test_center();
    test_raised();
    test_life();
    test_states();
    test_refusals();
    test_program();
}
