// Write then read: SET_ROWS followed by FLASH_ATTN_EXT, over types, head sizes, pairs and everything the op can mean.
//
// Two references. From the decoded rows the answer is exact up to the 8 bits of q, so its bound is tight and catches
// every error of layout, masking or order. From the original rows it shows that the type holds what it promises.

#include "attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

// |error| of a whole output against the decoded rows, and of its worst vector: what rounding q to 8 bits leaves.
// The worst seen is 0.0283, srft2 with few cells, where the weighted values nearly cancel.
constexpr double BOUND_TOTAL = 1.4e-2;
constexpr double BOUND_WORST = 3.2e-2;

// against the original rows, by the coarser of the two types
double loose_bound(const AttentionCase & c) {
    // rows of these tests weigh the same everywhere, and half of a banded one has a bit less
    const auto bits_by = [](ggml_type type) {
        return bits_of(type) - (ggml_ext_needs_calibration((int32_t) type) ? 0.75 : 0.0);
    };
    const double bits = std::min(bits_by(c.type_k), bits_by(c.mla ? c.type_k : c.type_v));
    return bits > 8.0 ? 0.025 : bits > 5.45 ? 0.08 : bits > 4.4 ? 0.25 : bits > 3.6 ? 0.42 : bits > 3.0 ? 0.65 :
           bits > 2.0 ? 0.8 : 1.5;
}

void run(const AttentionCase & c) {
    // bands are not there at every head size
    if (c.type_k == GGML_TYPE_COUNT || c.type_v == GGML_TYPE_COUNT || !begin_case(c.name())) {
        return;
    }
    AttentionRun r(c);
    if (!r.write() || !r.attend()) {
        return;
    }
    const std::vector<float> got = r.output();
    const std::vector<double> decoded = r.want_from_decoded();
    check_below(total_error(got, decoded), BOUND_TOTAL, "error of the output from the decoded rows");
    check_below(worst_error(got, decoded, c.shape.dv), BOUND_WORST, "error of the worst vector from the decoded rows");
    const double loose = loose_bound(c);
    check_below(total_error(got, r.want_from_original()), loose, "error from the original rows, types bound by " + std::to_string(loose).substr(0, 5));
    if (c.slots > 0) {
        r.spoil_unseen();
        check(r.attend() && r.output() == got, "what is not to be seen does not matter");
    }
}

template <typename F> void run_with(AttentionCase c, F change) {
    change(c);
    run(c);
}

bool divides(const std::string & type, int head_size) {
    return head_size % ggml_blck_size(type_for(type, head_size)) == 0;
}

// any K with any V: all families and ggml's common types on either side, one of them ours
void cross_product() {
    std::vector<Family> all = families();
    for (const char * other : { "f16", "bf16", "q8_0", "q4_0" }) {
        all.push_back({ other, true, true });
    }
    const int n_qs[]  = { 1, 7, 33 };
    const int n_kvs[] = { 70, 31, 256, 130 };
    int turn = 0;

    for (int d : { 64, 128 }) {
        for (const Family & k : all) {
            for (const Family & v : all) {
                const AttentionCase c = make_case(k.name, v.name, d, n_qs[turn % 3], n_kvs[turn % 4]);
                turn++;
                if (k.serves_k && v.serves_v && (is_ours(c.type_k) || is_ours(c.type_v))) {
                    run(c);
                }
            }
        }
    }
}

// other head sizes: every family on either side with itself, with the others, and with ggml's types
void pairs() {
    const int n_qs[]  = { 1, 2, 7, 33 };
    const int n_kvs[] = { 31, 64, 256, 300, 1, 65 };
    int turn = 0;

    for (int d : { 80, 256, 320, 384, 512 }) {
        const bool mixed = !quick && d != 320 && d != 384;
        std::vector<std::pair<std::string, std::string>> names;
        for (const Family & a : families()) {
            for (const Family & b : families()) {
                if (a.serves_k && b.serves_v && (a.name == b.name || mixed)) {
                    names.emplace_back(a.name, b.name);
                }
            }
            for (const char * other : { "f16", "bf16", "q8_0", "q4_0", "q5_1", "f32" }) {
                if (divides(other, d)) {
                    if (a.serves_k) { names.emplace_back(a.name, other); }
                    if (a.serves_v) { names.emplace_back(other, a.name); }
                }
            }
        }
        for (const auto & [k, v] : names) {
            run(make_case(k, v, d, n_qs[turn % 4], n_kvs[turn % (quick ? 2 : 6)]));
            turn++;
        }
    }
}

// what the op can mean, for a few pairs
void meanings(const std::string & k, const std::string & v, int d) {
    const AttentionCase base = make_case(k, v, d, 7, 100);

    for (const AttentionCase & c : meanings_of(base)) {
        run(c);
    }
    run_with(base, [](AttentionCase & c) { c.mask = Mask::alibi; c.shape.max_bias = 8.0f; });
    // not a power of two: two kinds of slopes
    run_with(base, [](AttentionCase & c) { c.mask = Mask::alibi; c.shape.max_bias = 8.0f; c.shape.n_head = 6; c.shape.n_head_kv = 3; });
    run_with(base, [](AttentionCase & c) { c.shape.softcap = 30.0f; });
    run_with(base, [](AttentionCase & c) { c.sinks = true; });
    run_with(base, [](AttentionCase & c) { c.mask = Mask::rows_gone; });
    run_with(base, [](AttentionCase & c) { c.poison = true; });

    const std::pair<int, int> heads[] = { { 3, 3 }, { 6, 2 }, { 8, 2 }, { 16, 2 }, { 8, 1 }, { 5, 1 }, { 1, 1 } };
    for (auto [n_head, n_head_kv] : heads) {
        for (int n_q : { 1, 7 }) {
            AttentionCase c = make_case(k, v, d, n_q, 100);
            c.shape.n_head    = n_head;
            c.shape.n_head_kv = n_head_kv;
            run(c);
        }
    }

    for (int n_q : { 1, 2, 7, 33 }) {
        for (int n_kv : { 1, 31, 64, 256, 300, 1024 }) {
            if (quick && n_kv > 100) {
                continue;
            }
            AttentionCase c = make_case(k, v, d, n_q, n_kv);
            run(c);
            if (n_kv == 300 || n_kv == 31) {
                c.shape.n_stream = 2;
                run(c);
                c.mask = Mask::none;
                run(c);
            }
        }
    }
}

void different_head_sizes(const std::string & k, const std::string & v) {
    for (int n_q : { 1, 7 }) {
        run(make_case(k, v, 192, 128, n_q, 70));
        run(make_case(k, v, 64, 256, n_q, 70));
    }
}

void mla(const std::string & name) {
    for (int n_q : { 1, 7 }) {
        for (int n_stream : { 1, 2 }) {
            AttentionCase c = make_mla_case(name, n_q, 70);
            c.shape.n_stream = n_stream;
            run(c);
        }
    }
}

// Precise rows of recent cells, for any K with any V and all that the op can mean.
void recent() {
    std::vector<Family> all = families();
    for (const char * other : { "f16", "bf16", "q8_0", "q4_0", "f32" }) {
        all.push_back({ other, true, true });
    }
    const int n_qs[]  = { 1, 7, 33 };
    const int n_kvs[] = { 70, 31, 256, 130 };
    int turn = 0;
    for (int d : { 64, 128, 256, 80 }) {
        for (const Family & k : all) {
            for (const Family & v : all) {
                if (!k.serves_k || !v.serves_v || !divides(k.name, d) || !divides(v.name, d)) {
                    continue;
                }
                const AttentionCase c = make_case(k.name, v.name, d, n_qs[turn % 3], n_kvs[turn % 4]);
                if ((is_ours(c.type_k) || is_ours(c.type_v)) && (!quick || turn % 5 == 0)) {
                    run(with_recent(c, turn));
                }
                turn++;
            }
        }
    }
    for (const Family & f : families()) {
        const std::string v = f.serves_v ? f.name : "srft4";
        for (int n_q : { 1, 7 }) {
            for (const AttentionCase & c : meanings_of(make_case(f.name, v, 128, n_q, 300))) {
                run(with_recent(c, turn++));
            }
            if (f.serves_v) {
                run(with_recent(make_mla_case(f.name, n_q, 70), turn++));
            }
            run(with_recent(make_case(f.name, v, 192, 128, n_q, 70), turn++));
            AttentionCase c = make_case(f.name, v, 64, n_q, 300);
            c.shape.n_head   = 12;
            c.shape.n_stream = 3;
            c.poison = true;
            for (int i = 0; i < 5; i++) {
                run(with_recent(c, turn++));
            }
        }
    }
}

void threads(const std::string & k, const std::string & v, int d, int n_q, int n_kv) {
    const AttentionCase c = make_case(k, v, d, n_q, n_kv);
    if (!begin_case("threads " + c.name())) {
        return;
    }
    AttentionRun r(c);
    if (!r.write()) {
        return;
    }
    std::vector<std::vector<float>> outs;
    for (int n_threads : { 1, 2, 3 }) {
        r.attend(n_threads);
        outs.push_back(r.output());
        r.attend(n_threads);
        check(memcmp(outs.back().data(), r.output().data(), outs.back().size()*sizeof(float)) == 0,
              "the same bits twice with " + std::to_string(n_threads) + " threads");
    }
    const std::vector<double> one(outs[0].begin(), outs[0].end());
    check_below(worst_error(outs[1], one, d), 1e-5, "difference between 1 and 2 threads");
    check_below(worst_error(outs[2], one, d), 1e-5, "difference between 1 and 3 threads");
}

}  // namespace

void test_attention() {
    cross_product();
    pairs();
    recent();

    for (const Family & f : families()) {
        if (f.serves_k && f.serves_v) {
            meanings(f.name, f.name, 128);
            mla(f.name);
        }
        if (f.serves_k) {
            different_head_sizes(f.name, "f16");
            threads(f.name, "f16", 128, 1, 300);
            if (!quick) { meanings(f.name, "f16", 64); }
        }
        if (f.serves_v) {
            different_head_sizes("q8_0", f.name);
            threads("q8_0", f.name, 64, 7, 1024);
            if (!quick) { meanings("q8_0", f.name, 64); }
        }
        if (f.serves_k && f.serves_v) {
            different_head_sizes(f.name, f.name);
            threads(f.name, f.name, 128, 1, 1024);
            threads(f.name, f.name, 80, 33, 300);
        }
    }
}
