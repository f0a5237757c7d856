// kv-test-cuda-emulated: kernels of cuda/ on a CPU, as they are but for what cmake changes in their text (cuda_runtime.h), beside ggml's CPU
// backend and f64. Threads run in three orders, which must give the same to the bit.

#include "backend.h"
#include "cuda_runtime.h"

#include "../../gpu/steps.h"
#include "../../gpu/writes.h"
#include "../../harness/graph.h"
#include "../../harness/harness.h"
#include "../../harness/random.h"
#include "../../ops/attention_case.h"

#include <functional>
#include <tuple>

namespace {

// The pairs that have decoding kernels.
const std::vector<std::pair<const char *, std::vector<const char *>>> DECODED = {
    { "srft8",  { "srft8", "srft4", "srft3" } },
    { "srft4",  { "srft4", "srft3" } },
    { "srft3",  { "srft3", "srft2" } },
    { "srft2",  { "srft2" } },
    { "delta4", { "srft4", "srft3" } },
    { "delta3", { "srft4", "srft3" } },
    { "delta8", { "srft8", "srft4" } },
    { "band4",  { "srft4", "srft3" } },
    { "band3",  { "srft4", "srft3" } },
    { "band2",  { "srft3", "srft2" } },
    { "polar4", { "polar4", "srft4" } },
    { "polar3", { "polar3", "srft3" } },
    { "turbo4", { "turbo4", "srft4" } },
    { "turbo3", { "turbo3", "srft3" } },
    { "qjl1",   { "srft4", "srft3" } },
};

// What `run` gives in all orders, if that is the same.
std::vector<float> in_all_orders(const std::function<std::vector<float>()> & run) {
    const Device device(emulated_backend());
    cuda_emulated::set_order(MSL_FORWARD, 0);
    const std::vector<float> res = run();
    for (int order : { MSL_REVERSE, MSL_RANDOM }) {
        cuda_emulated::set_order(order, 1);
        check(run() == res, order == MSL_REVERSE ? "threads in reverse order give the same" : "threads in random order give the same");
    }
    return res;
}

std::vector<float> rows_after_emulated(ggml_type our, int64_t row_size, int64_t n_cells, const std::vector<Write> & writes) {
    return in_all_orders([&] { return rows_after(our, row_size, n_cells, writes); });
}

// All families, once by rows in a row and once by some of them in other places; sizes with kernels of their own and without.
void rows_of_all() {
    for (const Family & family : families()) {
        for (int d : { 64, 80, 128, 256 }) {
            const ggml_type our = type_for(family.name, d);
            if (our == GGML_TYPE_COUNT || (quick && d > 80) || !begin_case("rows of " + family.name + " " + std::to_string(d))) {
                continue;
            }
            const int64_t row_size = 3*d, n_cells = 80;
            Rng rng(seed_of(family.name) + d);
            std::vector<Write> writes;
            for (int64_t n : { 70, 1, 5 }) {
                Write write = { n == 70 ? counting(0, n) : n == 1 ? counting(70, 1) : rng.distinct(n, n_cells), rng.normals(row_size*n, 2.0f) };
                write.rows[0] = NAN;
                write.rows[row_size - 1] = INFINITY;
                writes.push_back(write);
            }
            const std::vector<float> of_cpu = rows_after(our, row_size, n_cells, writes), got = rows_after_emulated(our, row_size, n_cells, writes);
            const std::vector<double> wanted(of_cpu.begin(), of_cpu.end());
            check_below(total_error(got, wanted), is_grouped(our) ? 1.5e-2 : 1e-2, "difference from the CPU's rows");
        }
    }
}

// False where it is not among the cases that are asked for.
bool attention(const AttentionCase & c, const std::string & way = "") {
    if (c.type_k == GGML_TYPE_COUNT || c.type_v == GGML_TYPE_COUNT || !begin_case(way + c.name())) {
        return false;
    }
    const Device device(emulated_backend());
    AttentionRun run(c);
    cuda_emulated::set_order(MSL_FORWARD, 0);
    if (!run.write()) {
        return true;
    }
    const std::vector<float> got = in_all_orders([&] { return run.attend() ? run.output() : std::vector<float>(); });
    check_below(total_error(got, run.want_from_decoded()), 1e-3, "error from f64 on the rows that are there");
    return true;
}

void attention_of_all() {
    int turn = 0;
    for (const auto & [k, v] : { std::pair<const char *, const char *>{ "srft4", "srft4" }, { "delta4", "srft4" }, { "band3", "srft3" }, { "srft8", "srft2" }, { "polar4", "turbo4" }, { "qjl1", "srft4" }, { "f16", "srft4" } }) {
        for (int d : { 64, 128 }) {
            for (int n_q : { 1, 20 }) {
                if (quick && (d == 64) == (n_q == 1)) {
                    continue;
                }
                const AttentionCase c = make_case(k, v, d, n_q, 150);
                attention(c);
                attention(with_recent(c, turn++));
            }
        }
    }
    // The other widths of bands.
    for (const auto & [k, v, d] : { std::tuple<const char *, const char *, int>{ "band4", "srft4", 128 }, { "band2", "srft2", 64 }, { "band3", "srft3", 256 } }) {
        attention(make_case(k, v, d, 1, 150));
    }
    for (const AttentionCase & c : meanings_of(make_case("srft4", "srft4", 64, 5, 200))) {
        attention(c);
    }
}

// By the kernels that read the cache as it is, and by no other: by rows, as before Hopper, and by bulk copies.
void decoding(const AttentionCase & c) {
    for (const int cc : { 800, 900 }) {
        emulate_gpu(cc);
        const Decoded before = emulated_decoded();
        if (attention(c, cc == 800 ? "by rows: " : "by bulk copies: ")) {
            const Decoded now = emulated_decoded();
            check(now.all == before.all + 3, "decoded, in each order");
            check(now.bulk == before.bulk + (cc == 800 ? 0 : 3), cc == 800 ? "without bulk copies" : "with bulk copies");
        }
    }
    emulate_gpu(750);
}

// Query rows of one block and of two, of more than one of them, precise rows beside them.
void decoding_of_all() {
    constexpr int CELLS = 199; // a cache of 208, so that streams begin at multiples of 16 bytes, as bulk copies do
    const auto cells_of = [&](int tokens) { return tokens == 1 ? CELLS : CELLS + 1; }; // and rows of the mask
    const int sizes[] = { 128, 64, 256 }, tokens[] = { 1, 4, 1, 9 };
    int turn = 0;
    for (const auto & [k, values] : DECODED) {
        for (const char * v : values) {
            // Of each pair one size, or all of them.
            for (int i = 0; i < (quick ? 1 : 3); i++) {
                const int n = tokens[(turn/3 + i) % 4];
                const AttentionCase c = make_case(k, v, sizes[(turn + i) % 3], n, cells_of(n));
                decoding((turn + i) % 2 == 0 ? c : with_recent(c, turn));
            }
            ++turn;
        }
    }
    for (const AttentionCase & c : meanings_of(make_case("srft4", "srft4", 128, 2, cells_of(2)))) {
        if (c.mask != Mask::per_head) { // by rows alone
            decoding(c);
        }
    }
    // Rows of 27 bytes, three heads of them: a tile may end anywhere.
    AttentionCase odd = make_case("polar3", "polar3", 64, 1, CELLS);
    odd.shape.n_head_kv = 3;
    odd.shape.n_head    = 6;
    decoding(odd);
    for (const auto & [k, v] : { std::pair<const char *, const char *>{ "polar4", "polar4" }, { "turbo4", "turbo4" }, { "qjl1", "srft4" }, { "delta8", "srft8" } }) {
        AttentionCase c = make_case(k, v, 128, 1, CELLS);
        c.mask   = Mask::window;
        c.poison = true;
        c.loud   = 1e3f;
        decoding(c);
        c.loud = 0.003f;
        decoding(c);
    }
}

// Slots that tiles come into again and again: one block has all cells. Asked for by warps beside the teams (srft and qjl1 of 128), of which there are
// fewer than teams where KV heads are few, or by the last warp that is done with a slot; query rows that fill a block, and others.
void decoding_of_long_chunks() {
    struct Long {
        const char * k, * v;
        int          d, heads, kv_heads, tokens, cells;
    };
    const Long all[] = {
        { "srft4", "srft4", 128, 32, 8, 1, 616 }, { "srft4", "srft4", 128, 9, 3, 1, 1100 },  { "srft8", "srft8", 128, 2, 1, 1, 1990 }, { "qjl1", "srft4", 128, 4, 2, 2, 1000 },
        { "delta4", "srft4", 128, 16, 4, 1, 900 }, { "polar4", "polar4", 128, 8, 4, 1, 700 }, { "srft3", "srft2", 64, 9, 3, 1, 1496 },  { "srft4", "srft3", 256, 4, 4, 1, 300 },
    };
    int turn = 0;
    for (const Long & l : all) {
        AttentionCase c = make_case(l.k, l.v, l.d, l.tokens, l.cells);
        c.shape.n_head    = l.heads;
        c.shape.n_head_kv = l.kv_heads;
        emulate_gpu(900, 1);
        const Decoded before = emulated_decoded();
        if (attention(turn % 3 == 2 ? with_recent(c, turn) : c, "long chunks: ")) {
            check(emulated_decoded().bulk == before.bulk + 3, "with bulk copies");
        }
        emulate_gpu(750);
        ++turn;
    }
}

// Rows of a state file may hold anything: a scale or a norm that is no finite number counts as zero, as on the CPU.
void decoding_of_bad_scales() {
    const uint8_t bad[] = { 0x00, 0x7c, 0x00, 0xfc, 0xff, 0x7f }; // inf, -inf, NaN
    for (const auto & [k, v] : { std::pair<const char *, const char *>{ "srft8", "srft8" }, { "polar4", "polar4" }, { "turbo4", "turbo4" }, { "qjl1", "srft4" } }) {
        for (const int cc : { 750, 800, 900 }) {
            AttentionCase c = make_case(k, v, 128, 1, 200);
            if (!begin_case("bad scales, GPU " + std::to_string(cc) + ": " + c.name())) {
                continue;
            }
            AttentionRun of_cpu(c);
            if (!of_cpu.write()) {
                continue;
            }
            for (ggml_tensor * cache : { of_cpu.k_cache(), of_cpu.v_cache() }) {
                std::vector<uint8_t> bytes = get_bytes(cache);
                const int norm = ggml_type_name(cache->type)[0] == 't' ? 2 : 0; // turbo has two
                for (int i = 0; i < 30; i++) {
                    std::copy_n(&bad[i % 3*2], 2, &bytes[(5 + 6*i)*cache->nb[1] + i % 2*norm]);
                }
                set_bytes(cache, bytes);
            }
            if (!of_cpu.attend()) {
                continue;
            }
            const std::vector<float> want = of_cpu.output();
            emulate_gpu(cc);
            const Decoded before = emulated_decoded();
            const Device device(emulated_backend());
            AttentionRun run(c);
            set_bytes(run.k_cache(), get_bytes(of_cpu.k_cache()));
            set_bytes(run.v_cache(), get_bytes(of_cpu.v_cache()));
            const std::vector<float> got = in_all_orders([&] { return run.attend() ? run.output() : std::vector<float>(); });
            check_below(total_error(got, std::vector<double>(want.begin(), want.end())), 1e-2, "difference from the CPU");
            const Decoded now = emulated_decoded();
            check(now.all == before.all + (cc == 750 ? 0 : 3) && now.bulk == before.bulk + (cc == 900 ? 3 : 0), "by the kernel of this GPU");
            emulate_gpu(750);
        }
    }
}

// By the kernel for Hopper, and by no other.
void prompt(const AttentionCase & c) {
    const int64_t before = emulated_decoded().prompts;
    if (attention(c, "prompt: ")) {
        check(emulated_decoded().prompts == before + 3, "a prompt, in each order");
    }
}

// More rows than a block has, fewer, cells that fill no tile, several shares of them, tiles that nobody sees.
void prompts() {
    emulate_prompts(true);
    for (const auto & [k, v] : { std::pair<const char *, const char *>{ "srft4", "srft4" }, { "delta3", "srft3" }, { "band4", "srft8" }, { "polar4", "srft2" }, { "f16", "srft4" } }) {
        prompt(make_case(k, v, 64, 40, 300));
    }
    // One side is twice as wide, or both are.
    prompt(make_case("turbo4", "srft4", 64, 20, 150));
    prompt(with_recent(make_case("delta4", "turbo3", 64, 20, 150), 1));
    prompt(with_recent(make_case("turbo3", "turbo3", 64, 20, 150), 0));
    AttentionCase c = make_case("srft4", "srft4", 64, 90, 1300);
    c.mask = Mask::window;
    prompt(c);
    prompt(with_recent(make_case("srft4", "srft4", 128, 20, 300), 1));
    c.shape.n_q = 5;
    c.mask = Mask::none;
    prompt(c);
    if (!quick) {
        prompt(with_recent(make_case("turbo4", "srft4", 128, 20, 200), 1));
        prompt(with_recent(make_case("delta8", "srft4", 256, 20, 200), 0));
        for (const AttentionCase & c : meanings_of(make_case("srft4", "srft4", 64, 5, 1100))) {
            attention(c);
        }
    }
    emulate_prompts(false);
}

// Rows together, and an attention with its centers; queries are multiplied by the CPU.
void calibrated_steps() {
    for (const int order : { MSL_FORWARD, MSL_REVERSE, MSL_RANDOM }) {
        cuda_emulated::set_order(order, 1);
        run_calibrated_steps(emulated_backend(), emulated_fused, quick ? 3 : 20, /*alone =*/ 1);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    begin_program("cuda", argc, argv);
    ggml_log_set(print_errors, nullptr);
    ggml_backend_load_all();
    rows_of_all();
    test_writes(rows_after_emulated, quick ? std::vector<int>{ 64 } : std::vector<int>{ 128, 64, 256 });
    attention_of_all();
    decoding_of_all();
    decoding_of_long_chunks();
    decoding_of_bad_scales();
    calibrated_steps();
    prompts();
    return end_program();
}
