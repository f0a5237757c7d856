#include "cases.h"
#include "steps.h"
#include "writes.h"

#include "../ops/attention_case.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace {

GpuTest gpu;

// Of |want|: a whole result, and its worst vector, where weighted values nearly cancel.
constexpr double BOUND_F64 = 1e-3;
// With K of polar, turbo and qjl1 on CUDA: they are attended to as halves, and ggml's kernels add halves (qjl1 at 256: 1.3e-3).
constexpr double BOUND_F64_HALVES = 2e-3;
constexpr double BOUND_CPU = 2.5e-2;
constexpr double BOUND_CPU_WORST = 8e-2;
// Short vectors have fewer values to average over.
constexpr double BOUND_CPU_WORST_64 = 1e-1;
// With 2 bits a code on the other side of a tie is a value that is off by a third of its range.
constexpr double BOUND_CPU_WORST_2_BITS = 2e-1;

// A code within rounding of a tie is rare, and so are two scales of 8 bits that fit a group equally well, of which the other one
// has other codes: of a small cache a few such groups are more. In a group of cells it moves the differences of the rows behind it.
double bytes_bound(ggml_type type, size_t bytes) {
    return is_grouped(type) ? 2e-2 : 2e-3 + 128.0/bytes;
}

// A cache against the CPU's. Poisoned rows are left out, which nobody sees: beside a value of a million the others are nothing, so that all of the
// rotated row are equally large, and many scales fit it equally well.
void check_bytes(const AttentionCase & c, const AttentionRun & run, ggml_tensor * cache, const ggml_tensor * of_cpu, const char * what) {
    std::vector<uint8_t> bytes = get_bytes(cache), wanted = get_bytes(of_cpu);
    for (int64_t st = 0; st < c.shape.n_stream && c.poison; st++) {
        for (int64_t cell = 0; cell < c.shape.n_kv; cell++) {
            if (run.hidden(st, cell)) {
                const size_t at = st*cache->nb[2] + cell*cache->nb[1];
                std::copy_n(&wanted[at], cache->nb[1], &bytes[at]);
            }
        }
    }
    check_below(differing(bytes, wanted), bytes_bound(cache->type, bytes.size()), what);
}

// Precise rows of recent cells: rows that these stand for, and those of no cell, may hold anything.
void recent(const AttentionCase & c) {
    const Device device(gpu.backend);
    AttentionRun r(c);
    if (!r.write() || !r.attend()) {
        return;
    }
    if (gpu.after_case) {
        gpu.after_case();
    }
    const std::vector<float> got = r.output();
    check_below(total_error(got, r.want_from_decoded()), BOUND_F64, "error from f64 with precise rows");
    r.spoil_unseen();
    if (r.attend()) {
        check(r.output() == got, "what is not to be seen does not matter");
    }
}

void run(const AttentionCase & c) {
    // bands are not there at every head size
    if (c.type_k == GGML_TYPE_COUNT || !begin_case(c.name())) {
        return;
    }
    if (gpu.before_case) {
        gpu.before_case();
    }
    if (c.slots > 0) {
        recent(c);
        return;
    }
    AttentionRun cpu(c);
    const Device device(gpu.backend);
    AttentionRun here(c);
    if (!cpu.write() || !cpu.attend() || !here.write() || !here.attend()) {
        return;
    }
    if (gpu.after_case) {
        gpu.after_case();
    }
    check_bytes(c, here, here.k_cache(), cpu.k_cache(), "bytes of K that differ from the CPU's");
    if (!c.mla) {
        check_bytes(c, here, here.v_cache(), cpu.v_cache(), "bytes of V that differ from the CPU's");
    }
    const std::vector<float> got = here.output(), of_cpu = cpu.output();
    const std::string k = ggml_type_name(c.type_k);
    const bool halves = gpu.is_fast && (k.rfind("polar", 0) == 0 || k.rfind("turbo", 0) == 0 || k.rfind("qjl", 0) == 0);
    check_below(total_error(got, here.want_from_decoded()), halves ? BOUND_F64_HALVES : BOUND_F64, "error from f64 on the device's rows");
    const std::vector<double> wanted(of_cpu.begin(), of_cpu.end());
    check_below(total_error(got, wanted), BOUND_CPU, "difference from the CPU backend");
    const bool   coarse = is_ours(c.type_v) && bits_of(c.type_v) < 3.0;
    const double worst  = coarse ? BOUND_CPU_WORST_2_BITS : c.shape.dv <= 64 ? BOUND_CPU_WORST_64 : BOUND_CPU_WORST;
    check_below(worst_error(got, wanted, c.shape.dv), worst, "difference of the worst vector from the CPU backend");
}

// Families and ggml's types on either side, by decoding (one chunk, several) and by prefill.
void pairs() {
    std::vector<std::pair<std::string, std::string>> names = { { "srft8", "srft3" }, { "f16", "srft4" }, { "q8_0", "srft4" }, { "delta4", "srft4" }, { "delta8", "srft4" },
                                                               { "delta3", "srft3" }, { "q4_0", "srft8" }, { "f32", "turbo3" },
                                                               { "srft4", "f32" }, { "turbo4", "q8_0" }, { "qjl1", "polar3" }, { "srft4", "turbo4" } };
    if (gpu.is_fast) {
        names.insert(names.end(), { { "srft8", "srft4" }, { "srft4", "srft3" }, { "srft3", "srft2" }, { "delta4", "srft3" }, { "delta3", "srft4" }, { "delta4", "f16" }, { "delta3", "srft8" },
                                    { "band4", "srft4" }, { "band4", "srft3" }, { "band3", "srft4" }, { "band3", "srft3" }, { "band2", "srft3" }, { "band2", "srft2" } });
    }
    for (const Family & f : families()) {
        if (f.serves_k) { names.emplace_back(f.name, f.serves_v ? f.name : "f16"); }
        if (f.serves_v) { names.emplace_back("q8_0", f.name); }
    }
    int turn = 0;
    for (int d : { 64, 128, 256 }) {
        for (const auto & [k, v] : names) {
            // one chunk, the second of two halves of a group, more chunks than one
            const int n_kvs[] = { 70, 31, 150 };
            run(make_case(k, v, d, 1, n_kvs[turn % 3]));
            if (!quick || turn % 3 == 0) {
                run(make_case(k, v, d, 17, 70));
                run(with_recent(make_case(k, v, d, 17, 70), turn));
            }
            if (!quick || turn % 3 == 1) {
                run(with_recent(make_case(k, v, d, 1, n_kvs[turn % 3]), turn));
            }
            turn++;
        }
        // the short list has other pairs at the next head size
        turn += names.size() % 3 == 0;
    }
}

// Everything that the op can mean, for a few pairs.
void meanings(const std::string & k, const std::string & v, int n_q) {
    const int d = 128;
    const AttentionCase base = make_case(k, v, d, n_q, 104); // rows of the mask begin at multiples of 16 bytes

    int turn = n_q;
    for (const AttentionCase & c : meanings_of(base)) {
        run(c);
        run(with_recent(c, turn++));
        if (gpu.is_fast) {
            run(with_recent(c, turn++));
        }
    }
    AttentionCase c = base;
    // hidden neighbours of a group are read for the sake of others
    if (!is_grouped(base.type_k)) {
        c.poison = true;
        run(c);
    }
    for (auto [n_head, n_head_kv] : { std::pair<int, int>{ 3, 3 }, { 10, 1 }, { 16, 2 } }) {
        c = base;
        c.shape.n_head    = n_head;
        c.shape.n_head_kv = n_head_kv;
        run(c);
        run(with_recent(c, turn++));
    }
    c = base;
    c.shape.n_kv     = n_q == 1 ? 600 : 300;
    c.shape.n_stream = 2;
    run(c);
    run(with_recent(c, 3));
}

void other_sizes() {
    for (int n_q : { 1, 16 }) {
        int turn = n_q;
        for (const AttentionCase & c : { make_case("srft4", "srft8", 192, 128, n_q, 70), make_mla_case("srft4", n_q, 40), make_case("polar4", "polar3", 80, n_q, 70),
                                         make_case("turbo4", "turbo3", 112, n_q, 40), make_case("delta4", "srft3", 96, n_q, 130), make_case("turbo3", "turbo4", 512, n_q, 33),
                                         make_case("srft4", "turbo3", 320, n_q, 40), make_case("delta4", "polar4", 384, n_q, 70), make_case("srft8", "srft4", 80, n_q, 100), make_case("delta8", "srft4", 112, n_q, 130),
                                         make_case("band3", "srft3", 384, n_q, 70), make_case("band2", "srft4", 192, 128, n_q, 70), make_case("band4", "srft8", 576, n_q, 40) }) {
            run(c);
            run(with_recent(c, turn++));
        }
    }
}

// Cells enough for many chunks, and rows enough for several tiles of them.
void long_ones() {
    int turn = 0;
    for (const auto & [k, v] : { std::pair<const char *, const char *>{ "srft4", "srft4" }, { "delta4", "srft4" }, { "delta3", "srft3" }, { "srft8", "srft8" }, { "srft3", "srft2" }, { "delta8", "srft4" },
                                 { "srft8", "srft4" }, { "srft8", "srft3" }, { "srft4", "srft3" }, { "srft3", "srft3" }, { "srft2", "srft2" }, { "delta4", "srft3" }, { "delta3", "srft4" },
                                 { "band4", "srft4" }, { "band4", "srft3" }, { "band3", "srft4" }, { "band3", "srft3" }, { "band2", "srft3" }, { "band2", "srft2" }, { "polar4", "turbo4" }, { "f16", "srft4" }, { "srft4", "q8_0" }, { "bf16", "srft4" }, { "q4_0", "srft8" },
                                 { "delta8", "srft8" }, { "polar4", "polar4" }, { "polar4", "srft4" }, { "polar3", "polar3" }, { "polar3", "srft3" }, { "turbo4", "turbo4" }, { "turbo4", "srft4" },
                                 { "turbo3", "turbo3" }, { "turbo3", "srft3" }, { "qjl1", "srft4" }, { "qjl1", "srft3" } }) {
        for (int d : { 64, 128, 256 }) {
            for (auto [n_head, n_head_kv] : { std::pair<int, int>{ 8, 2 }, { 9, 3 }, { 16, 2 }, { 7, 1 }, { 2, 2 } }) {
                AttentionCase c = make_case(k, v, d, 1, 2000 + 13*n_head);
                c.shape.n_head    = n_head;
                c.shape.n_head_kv = n_head_kv;
                run(c);
                run(with_recent(c, turn++));
            }
            AttentionCase c = make_case(k, v, d, 3, 1504);
            c.shape.n_stream = 2;
            run(c);
            run(with_recent(c, turn++));
            c = make_case(k, v, d, 100, 700);
            run(c);
            run(with_recent(c, turn++));
            // heads of other alignments
            c.shape.n_head    = 9;
            c.shape.n_head_kv = 3;
            run(c);
            // many cells that nobody sees
            c = make_case(k, v, d, 40, 2600);
            c.mask = Mask::window;
            run(c);
        }
    }
}

// Chunks of more tiles than a block has room for at once.
void long_chunks() {
    for (const auto & [k, v] : { std::pair<const char *, const char *>{ "srft4", "srft4" }, { "srft8", "srft8" }, { "qjl1", "srft4" }, { "delta4", "srft4" }, { "polar4", "polar4" } }) {
        AttentionCase c = make_case(k, v, 128, 1, 17600);
        c.shape.n_stream  = 8;
        c.shape.n_head    = 6;
        c.shape.n_head_kv = 2;
        run(c);
    }
}

// Scales of all sizes, and groups without one.
void quiet_and_loud() {
    for (float loud : { 0.003f, 0.01f, 60.0f }) {
        for (const auto & [k, v] : { std::pair<const char *, const char *>{ "srft4", "srft4" }, { "srft3", "srft3" }, { "srft2", "srft2" }, { "delta4", "srft4" }, { "delta3", "srft3" }, { "band3", "srft3" }, { "polar4", "polar4" } }) {
            for (int d : { 64, 80, 128 }) {
                for (int n_q : { 1, 17 }) {
                    if (quick && (d + n_q) % 3 != 0) {
                        continue;
                    }
                    AttentionCase c = make_case(k, v, d, n_q, 100);
                    c.loud = loud;
                    run(c);
                }
            }
        }
    }
    // Scales near the end of halves, times weights.
    for (int d : { 64, 128 }) {
        AttentionCase c = make_case("srft8", "srft8", d, 1, 300);
        c.loud = 12000.0f;
        run(c);
        run(with_recent(c, 1));
    }
}

// CPY there and back, through the views that a context shift has, and of rows as they are.
void copies(const std::string & family, int d, ggml_type other) {
    const ggml_type our = type_for(family, d);
    if (!begin_case("copies " + family + " " + std::to_string(d) + " and " + ggml_type_name(other))) {
        return;
    }
    const int64_t n_head = 2, n = 70;
    std::vector<std::vector<float>> backs;
    std::vector<std::vector<uint8_t>> caches;
    for (ggml_backend_t backend : { (ggml_backend_t) nullptr, gpu.backend }) {
        const Device device(backend);
        Graph g;
        ggml_context * ctx = g.ctx();
        ggml_tensor * plain = ggml_new_tensor_3d(ctx, other, d, n_head, n);
        ggml_tensor * cache = ggml_new_tensor_2d(ctx, our, d*n_head, n);
        ggml_tensor * view  = ggml_view_3d(ctx, cache, d, n_head, n, ggml_row_size(our, d), cache->nb[1], 0);
        g.add(ggml_cpy(ctx, plain, view));
        ggml_tensor * same = ggml_cpy(ctx, cache, ggml_new_tensor_3d(ctx, our, d, n_head, n));
        g.add(same);
        // of the same rows in another order of dimensions
        ggml_tensor * back = ggml_cast(ctx, ggml_permute(ctx, view, 0, 2, 1, 3), other);
        g.add(back);
        g.allocate(0);
        Rng rng(seed_of(family) + d);
        set_floats(plain, rng.normals(d*n_head*n, 2.0f));
        if (!g.compute()) {
            return;
        }
        check(get_bytes(same) == get_bytes(cache), "a copy has the bytes of the original");
        backs.push_back(get_floats(back));
        caches.push_back(get_bytes(cache));
    }
    check_below(differing(caches[0], caches[1]), bytes_bound(our, caches[0].size()), "bytes of a copy that differ from the CPU's");
    const std::vector<double> wanted(backs[0].begin(), backs[0].end());
    check_below(total_error(backs[1], wanted), is_grouped(our) ? 2e-2 : 1e-2, "difference of what comes back");
}

void flipped_bits() {
    for (const char * side : { "K", "V" }) {
        if (!begin_case(std::string("a flipped bit of ") + side)) {
            continue;
        }
        const Device device(gpu.backend);
        AttentionRun r(make_case("srft4", "srft4", 128, 1, 70));
        if (!r.write() || !r.attend()) {
            continue;
        }
        const std::vector<float> before = r.output();
        ggml_tensor * cache = side[0] == 'K' ? r.k_cache() : r.v_cache();
        std::vector<uint8_t> bytes = get_bytes(cache);
        bytes[ggml_type_size(cache->type) - 1] ^= 0x80;
        set_bytes(cache, bytes);
        r.attend();
        check(r.output() != before, "the result changes");
    }
}

using Refused = std::function<void(const std::string & what, const ggml_tensor * op, const std::string & why)>;

// An attention with precise rows, wrong in one way: turn 0 in none.
void precise_reasons(int turn, const Refused & refused) {
    Graph g;
    ggml_context * ctx = g.ctx();
    const ggml_type srft8 = type_for("srft8", 128), srft4 = type_for("srft4", 128);
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 128, 1, 4, 1);
    ggml_tensor * k = ggml_new_tensor_4d(ctx, srft4, 128, 64, 2, 1);
    ggml_tensor * op = ggml_flash_attn_ext(ctx, q, k, k, nullptr, 1.0f, 0.0f, 0.0f);
    op->src[5] = op->src[6] = ggml_new_tensor_4d(ctx, srft8, 128, 8, 2, 1);
    op->src[8] = op->src[9] = ggml_new_tensor_4d(ctx, srft8, 128, 3, 2, 1);
    op->src[7] = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, 11, 1);
    if (turn == 0) {
        if (begin_case("precise rows are served")) {
            check(Graph::supports(op), "as they should be");
        }
    } else if (turn <= 5) {
        const int src = 4 + turn;
        op->src[src] = nullptr;
        refused("precise rows without source " + std::to_string(src), op, "without src[" + std::to_string(src) + "]");
    } else {
        const auto with = [&](const char * what, int src, ggml_type type, std::vector<int64_t> ne, const char * why) {
            ne.resize(4, 1);
            op->src[src] = ggml_new_tensor(ctx, type, 4, ne.data());
            refused(what, op, why);
        };
        switch (turn) {
            case 6:  return with("a window of srft4", 5, srft4, { 128, 8, 2 }, "precise rows of srft4_128");
            case 7:  return with("a window of f16 beside srft4", 6, GGML_TYPE_F16, { 128, 8, 2 }, "precise rows of f16");
            case 8:  return with("a window of another head size", 5, type_for("srft8", 64), { 64, 8, 2 }, "precise rows of srft8_64");
            case 9:  return with("a window of more rows on one side", 6, srft8, { 128, 9, 2 }, "src[6] whose shape");
            case 10: return with("a batch of other heads", 8, srft8, { 128, 3, 1 }, "src[8] whose shape");
            case 11: return with("cells of i32", 7, GGML_TYPE_I32, { 11 }, "not aligned i64");
            case 12: return with("cells for the window alone", 7, GGML_TYPE_I64, { 8 }, "number of cells");
            default: break;
        }
        op->src[6] = ggml_permute(ctx, ggml_new_tensor_4d(ctx, srft8, 128, 2, 8, 1), 1, 2, 0, 3);
        if (begin_case("refusal of a window that is turned")) {
            check(!Graph::supports(op), "a window that is turned");
        }
    }
}

void reasons() {
    const Device device(gpu.backend);
    const auto refused = [](const std::string & what, const ggml_tensor * op, const std::string & why) {
        if (!begin_case("refusal of " + what)) {
            return;
        }
        take_log();
        ggml_log_set(keep_log, nullptr);
        const bool taken = Graph::supports(op);
        ggml_log_set(print_errors, nullptr);
        const std::string logged = take_log();
        check(!taken, "it is refused");
        check(logged.find(why) != std::string::npos, "the log says why, not: " + logged);
    };
    Graph g;
    ggml_context * ctx = g.ctx();
    const ggml_type srft4 = type_for("srft4", 128);
    ggml_tensor * k  = ggml_new_tensor_4d(ctx, srft4, 128, 64, 2, 1);
    ggml_tensor * q  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 128, 1, 4, 1);
    ggml_tensor * v5 = ggml_new_tensor_4d(ctx, GGML_TYPE_Q5_1, 128, 64, 2, 1);
    ggml_tensor * i  = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 1);
    ggml_tensor * q8 = ggml_new_tensor_2d(ctx, GGML_TYPE_Q8_0, 128, 1);
    refused("MUL_MAT", ggml_mul_mat(ctx, k, q), "-fa on");
    refused("V of q5_1", ggml_flash_attn_ext(ctx, q, k, v5, nullptr, 1.0f, 0.0f, 0.0f), "V of q5_1");
    ggml_tensor * set = ggml_set_rows(ctx, ggml_reshape_2d(ctx, k, 128, 128), ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 128, 1), i);
    set->src[0] = q8;
    refused("SET_ROWS from q8_0", set, "rows of q8_0");
    ggml_tensor * scale = ggml_scale(ctx, q, 2.0f);
    scale->src[0] = k;
    refused("SCALE", scale, std::string("no ") + gpu.name + " kernel for this op");

    for (int src = 0; src < 14; src++) {
        precise_reasons(src, refused);
    }
}

}  // namespace

void run_gpu_cases(const GpuTest & test) {
    gpu = test;
    // refusals are warnings, and there are many of them in these cases
    ggml_log_set(print_errors, nullptr);
    pairs();
    for (int n_q : { 1, 17 }) {
        meanings("srft4", "srft4", n_q);
        meanings("delta4", "srft3", n_q);
        if (gpu.is_fast) {
            meanings("srft8", "srft8", n_q);
            meanings("srft3", "srft2", n_q);
            meanings("delta3", "srft4", n_q);
            meanings("band4", "srft4", n_q);
        }
        if (!quick) {
            meanings("f16", "srft4", n_q);
            meanings("turbo4", "turbo4", n_q);
        }
    }
    other_sizes();
    quiet_and_loud();
    if (gpu.is_fast) {
        long_ones();
        long_chunks();
        run_steps(gpu.backend, gpu.fused);
        run_calibrated_steps(gpu.backend, gpu.fused, 192);
    }
    for (const Family & f : families()) {
        copies(f.name, 128, GGML_TYPE_F32);
        copies(f.name, type_for(f.name, 80) == GGML_TYPE_COUNT ? 256 : 80, GGML_TYPE_F16);
    }
    const auto on_gpu = [](ggml_type our, int64_t row_size, int64_t n_cells, const std::vector<Write> & writes) {
        const Device device(gpu.backend);
        return rows_after(our, row_size, n_cells, writes);
    };
    test_writes(on_gpu, { 128, 64, 256 });
    flipped_bits();
    reasons();
    {
        const Device device(gpu.backend);
        test_refusal();
    }
}
