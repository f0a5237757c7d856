#include "writes.h"

#include "../harness/graph.h"
#include "../harness/harness.h"
#include "../harness/random.h"
#include "../ops/reference.h"

#include <algorithm>

std::vector<float> rows_after(ggml_type our, int64_t row_size, int64_t n_cells, const std::vector<Write> & writes) {
    Graph g;
    ggml_tensor * cache = ggml_new_tensor_2d(g.ctx(), our, row_size, n_cells);
    std::vector<ggml_tensor *> sources, indices;
    for (const Write & write : writes) {
        sources.push_back(ggml_new_tensor_2d(g.ctx(), GGML_TYPE_F32, row_size, (int64_t) write.cells.size()));
        indices.push_back(ggml_new_tensor_1d(g.ctx(), GGML_TYPE_I64, (int64_t) write.cells.size()));
        g.add(ggml_set_rows(g.ctx(), cache, sources.back(), indices.back()));
    }
    ggml_tensor * read = ggml_new_tensor_1d(g.ctx(), GGML_TYPE_I32, n_cells);
    ggml_tensor * rows = ggml_get_rows(g.ctx(), cache, read);
    g.add(rows);
    g.allocate(0);
    for (size_t i = 0; i < writes.size(); i++) {
        set_floats(sources[i], writes[i].rows);
        set_indices(indices[i], writes[i].cells);
    }
    set_indices(read, counting(0, n_cells));
    return g.compute() ? get_floats(rows) : std::vector<float>();
}

namespace {

// A cell that is overwritten again and again, with neighbours that were coded after it.
void overwriting(const std::string & family, int d, int64_t n_rows, const RowsAfter & on_device) {
    if (!begin_case("overwriting " + family + " " + std::to_string(d) + " by " + std::to_string(n_rows))) {
        return;
    }
    const ggml_type our = type_for(family, d);
    const int64_t row_size = 2*d, n_cells = 150;
    Rng rng(seed_of(family) + d);
    const std::vector<float> mean = rng.normals(row_size, 3.0f);
    std::vector<Write> writes;
    for (int64_t turn = 0; turn < 7; turn++) {
        Write write;
        write.rows = rng.normals(row_size*n_rows, 0.5f);
        for (size_t i = 0; i < write.rows.size(); i++) {
            write.rows[i] += mean[i % mean.size()];
        }
        // at first in a row, then anywhere, and at last over what is there
        write.cells = turn < 3 ? counting(turn*n_rows, n_rows) : turn < 6 ? rng.distinct(n_rows, n_cells) : counting(n_rows/2, n_rows);
        writes.push_back(write);
    }
    const std::vector<float> of_cpu = rows_after(our, row_size, n_cells, writes), got = on_device(our, row_size, n_cells, writes);
    if (of_cpu.empty() || got.empty()) {
        return;
    }
    const std::vector<double> wanted(of_cpu.begin(), of_cpu.end());
    check_below(total_error(got, wanted), is_grouped(our) ? 1.5e-2 : 1e-2, "difference of overwritten rows from the CPU's");
}

// Keys that follow each other.
std::vector<float> keys_in_a_row(Rng & rng, int64_t row_size, int64_t n) {
    std::vector<float> x = rng.normals(row_size*n, 0.5f);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] += 2.0f + (i >= (size_t) row_size ? 0.7f*(x[i - row_size] - 2.0f) : 0.0f);
    }
    return x;
}

// What a cache that loses nothing would hold.
std::vector<double> exact_rows(int64_t row_size, int64_t n_cells, const std::vector<Write> & writes) {
    std::vector<double> res(row_size*n_cells, 0.0);
    for (const Write & write : writes) {
        for (size_t i = 0; i < write.rows.size(); i++) {
            res[write.cells[i/row_size]*row_size + i % row_size] = write.rows[i];
        }
    }
    return res;
}

void check_empty(const std::vector<float> & rows, int64_t row_size, const std::vector<int64_t> & cells) {
    for (int64_t cell : cells) {
        check(std::all_of(&rows[cell*row_size], &rows[cell*row_size] + row_size, [](float x) { return x == 0.0f; }), "a cell that nobody has written reads as zeros");
    }
}

// Rows one by one, as tokens are decoded: behind others, the first of a group, one of zeros, and one before a row that is there.
void appending(const std::string & family, int d, const RowsAfter & on_device) {
    if (!begin_case("appending " + family + " " + std::to_string(d))) {
        return;
    }
    const ggml_type our = type_for(family, d);
    const int64_t row_size = 2*d, n_cells = 80, n_first = 61;
    Rng rng(seed_of(family) + 3*d);
    const std::vector<float> keys = keys_in_a_row(rng, row_size, n_cells);
    const auto key = [&](int64_t n) { return std::vector<float>(&keys[n*row_size], &keys[n*row_size] + row_size); };
    std::vector<Write> writes = { { counting(0, n_first), std::vector<float>(keys.begin(), keys.begin() + n_first*row_size) } };
    for (int64_t cell = n_first; cell < n_first + 6; cell++) {
        writes.push_back({ { cell }, key(cell) });
    }
    writes.push_back({ { n_cells - 4 }, std::vector<float>(row_size, 0.0f) });
    writes.push_back({ { n_cells - 2 }, key(n_cells - 2) });
    writes.push_back({ { 55 }, key(55) });
    const std::vector<double> exact = exact_rows(row_size, n_cells, writes);
    const std::vector<float> of_cpu = rows_after(our, row_size, n_cells, writes), got = on_device(our, row_size, n_cells, writes);
    if (of_cpu.empty() || got.empty()) {
        return;
    }
    const std::vector<double> wanted(of_cpu.begin(), of_cpu.end());
    check_below(total_error(got, wanted), is_grouped(our) ? 1.5e-2 : 1e-2, "difference of appended rows from the CPU's");
    check_below(total_error(got, exact), 1.02*total_error(of_cpu, exact), "loss of appended rows, by the CPU's");
    check_empty(got, row_size, { n_cells - 5, n_cells - 4, n_cells - 3, n_cells - 1 });
}

// The same cells twice in one op, keys of zeros for cells that are written and for some that are not, and a cell behind one that is empty.
void rewriting(const std::string & family, int d, bool by_many, const RowsAfter & on_device) {
    if (!begin_case("rewriting " + family + " " + std::to_string(d) + (by_many ? " by many" : ""))) {
        return;
    }
    const ggml_type our = type_for(family, d);
    const int64_t row_size = 2*d, n_cells = 64, n_first = by_many ? 44 : 20;
    std::vector<int64_t> again = { 5, 6, 7, 5, 6, 50, 51, 19, 52 };
    std::vector<bool>    zeros = { false, true, false, false, false, true, false, false, true };
    if (by_many) { // runs of them, one over another, and a row behind each
        for (int64_t first : { 10, 15 }) {
            for (int64_t cell : counting(first, 25)) {
                again.push_back(cell);
                zeros.push_back(false);
            }
        }
    }
    Rng rng(seed_of(family) + 2*d);
    std::vector<Write> writes = { { counting(0, n_first), keys_in_a_row(rng, row_size, n_first) } };
    writes.push_back({ again, keys_in_a_row(rng, row_size, (int64_t) again.size()) });
    for (size_t i = 0; i < writes[1].rows.size(); i++) {
        writes[1].rows[i] = zeros[i/row_size] ? 0.0f : writes[1].rows[i];
    }
    const std::vector<double> exact = exact_rows(row_size, n_cells, writes);
    const std::vector<float> of_cpu = rows_after(our, row_size, n_cells, writes), got = on_device(our, row_size, n_cells, writes);
    if (of_cpu.empty() || got.empty()) {
        return;
    }
    // The CPU codes the row behind anew for each that is written, the GPU once for a run of them: other codes, no other loss.
    const double loss = total_error(of_cpu, exact);
    const std::vector<double> wanted(of_cpu.begin(), of_cpu.end());
    check_below(total_error(got, wanted), loss, "difference of rewritten rows from the CPU's, by what the CPU's lose");
    check_below(total_error(got, exact), 1.05*loss, "loss of rewritten rows, by the CPU's");
    check_empty(got, row_size, { 50, 52, 63 });
}

}  // namespace

void test_writes(const RowsAfter & on_device, const std::vector<int> & head_sizes) {
    for (const char * family : { "srft4", "delta8", "delta4", "delta3", "band4", "band3" }) {
        for (int d : head_sizes) {
            overwriting(family, d, 40, on_device);
            overwriting(family, d, 20, on_device);
            appending(family, d, on_device);
            if (is_grouped(type_for(family, d))) {
                rewriting(family, d, false, on_device); // of other types any thread may be the last at a cell
                rewriting(family, d, true, on_device);
            }
        }
    }
}
