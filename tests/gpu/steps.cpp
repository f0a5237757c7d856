#include "steps.h"

#include "../harness/graph.h"
#include "../harness/harness.h"
#include "../harness/random.h"

#include "ggml-ext-seam.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <memory>

namespace {

struct StepCase {
    std::string k, v;
    int         d, heads, kv_heads;
    int         tokens; // of a step
    int         slots;  // of a window of precise rows, 0 for none
    bool        calibrated = false;
    int         cells = 192; // that are written in the end
    bool        read_again = false; // centered values are needed behind the attention, so that their op can't be left out
};

constexpr int CELLS = 192; // of a cache

// A tensor that another graph has computed: to graphs that are made while this lives it has no op.
class Made {
  public:
    explicit Made(ggml_tensor * t) : t_(t), op_(t ? *t : ggml_tensor()) {
        if (t_) {
            t_->op = GGML_OP_NONE;
            std::fill(std::begin(t_->src), std::end(t_->src), nullptr);
        }
    }
    ~Made() {
        if (t_) {
            t_->op = op_.op;
            std::copy(std::begin(op_.src), std::end(op_.src), t_->src);
        }
    }
    Made(const Made &) = delete;
    Made & operator=(const Made &) = delete;

  private:
    ggml_tensor * t_;
    ggml_tensor   op_;
};

// A layer of a cache. Its ops of a step are in one graph, or in one each.
class Layer {
  public:
    Layer(const StepCase & c, bool together) : c_(c), rng_(c.d + c.tokens) {
        ggml_context * ctx = store_.ctx();
        const auto side = [&](const std::string & type, int rows) { return ggml_new_tensor_2d(ctx, type_for(type, c.d), c.d*c.kv_heads, rows); };
        sides_.push_back({ side(c.k, CELLS) });
        sides_.push_back({ side(c.v, CELLS) });
        if (c.slots > 0) {
            sides_.push_back({ side(c.k == "delta8" ? "f16" : "srft8", c.slots) });
            sides_.push_back({ side("srft8", c.slots) });
        }
        for (size_t i = 0; i < sides_.size(); i++) {
            sides_[i].source = i < 2 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.d*c.kv_heads, c.tokens) : sides_[i - 2].source;
            sides_[i].index  = i % 2 == 0 ? ggml_new_tensor_1d(ctx, GGML_TYPE_I64, c.tokens) : sides_[i - 1].index;
        }
        if (c.calibrated) {
            q_        = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.d, c.heads, c.tokens);
            matrices_ = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, c.d, c.d, c.kv_heads);
            center_   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.d, c.kv_heads);
        } else {
            q_ = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.d, c.tokens, c.heads, 1);
        }
        mask_    = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, CELLS, c.tokens, 1, 1);
        columns_ = c.slots > 0 ? ggml_new_tensor_2d(ctx, GGML_TYPE_I64, c.slots, 1) : nullptr;
        store_.allocate(0);
        if (c.calibrated) {
            set_floats(matrices_, rng_.normals(ggml_nelements(matrices_), 1.0f/std::sqrt((float) c.d)));
            set_floats(center_, rng_.normals(ggml_nelements(center_), 2.0f));
        }
        slots_.assign(c.slots, -1);
        const auto ops = ops_of_step();
        ggml_tensor * last = nullptr;
        n_ops_ = (int) ops.size();
        for (int i = 0; i < (together ? 1 : n_ops_); i++) {
            graphs_.push_back(std::make_unique<Graph>());
            Graph & g = *graphs_.back();
            ggml_new_tensor_1d(g.ctx(), GGML_TYPE_F32, 1); // a graph has a buffer, also where its ops are views
            for (int op = together ? 0 : i; op < (together ? n_ops_ : i + 1); op++) {
                ggml_tensor * node = ops[op](g.ctx());
                const Made made(together ? nullptr : last);
                g.add(node);
                last = node;
            }
            g.allocate(0xff);
        }
    }

    int ops() const { return n_ops_; }

    // Tokens `first` and those behind it.
    bool step(int first) {
        std::vector<int64_t> cells, slots;
        for (int t = first; t < first + c_.tokens; t++) {
            cells.push_back(t);
            if (c_.slots > 0) {
                slots.push_back(t % c_.slots);
                slots_[slots.back()] = t;
            }
        }
        for (size_t i = 0; i < sides_.size(); i++) {
            if (i < 2) {
                // tokens follow each other
                const size_t row = (size_t) c_.d*c_.kv_heads;
                std::vector<float> x = rng_.normals(row*c_.tokens), & last = sides_[i].last;
                last.resize(row);
                for (size_t n = 0; n < x.size(); n++) {
                    last[n % row] = 0.9f*last[n % row] + 0.45f*x[n];
                    x[n] = last[n % row] + (n % 29 == 3 ? 4.0f : 0.25f);
                }
                set_floats(sides_[i].source, x);
            }
            if (i % 2 == 0) {
                set_indices(sides_[i].index, i < 2 ? cells : slots);
            }
        }
        if (columns_) {
            set_indices(columns_, slots_);
        }
        set_floats(q_, rng_.normals(ggml_nelements(q_), 1.5f));
        std::vector<float> mask(ggml_nelements(mask_));
        for (int t = 0; t < c_.tokens; t++) {
            for (int cell = 0; cell < CELLS; cell++) {
                mask[t*CELLS + cell] = cell <= first + t ? 0.0f : -INFINITY;
            }
        }
        set_floats(mask_, mask);
        for (const auto & g : graphs_) {
            if (!g->compute()) {
                return false;
            }
        }
        return true;
    }

    std::vector<float> output() const {
        std::vector<float> res = get_floats(out_);
        if (squares_) {
            const std::vector<float> more = get_floats(squares_);
            res.insert(res.end(), more.begin(), more.end());
        }
        return res;
    }

    // Of K, V, and the windows of both.
    std::vector<std::vector<uint8_t>> bytes() const {
        std::vector<std::vector<uint8_t>> res;
        for (const Side & s : sides_) {
            res.push_back(get_bytes(s.cache));
        }
        return res;
    }

  private:
    struct Side {
        ggml_tensor *      cache, * source = nullptr, * index = nullptr;
        std::vector<float> last;
    };

    StepCase                            c_;
    Rng                                 rng_;
    Graph                               store_;
    std::vector<std::unique_ptr<Graph>> graphs_;
    std::vector<Side>                   sides_; // K, V, and the windows of both
    std::vector<int64_t>                slots_; // the cell that each holds
    int                                 n_ops_ = 0;
    ggml_tensor *                       q_ = nullptr, * mask_ = nullptr, * columns_ = nullptr, * out_ = nullptr;
    ggml_tensor *                       matrices_ = nullptr, * center_ = nullptr; // of a calibration
    ggml_tensor *                       values_ = nullptr, * queries_ = nullptr;  // what it makes of them
    ggml_tensor *                       squares_ = nullptr;                       // of centered values

    typedef std::function<ggml_tensor * (ggml_context *)> Op;

    std::vector<Op> ops_of_step() {
        const auto write = [this](size_t side) {
            return [this, side](ggml_context * ctx) {
                ggml_tensor * from = sides_[side].source;
                if (c_.calibrated && side % 2 == 1) {
                    from = ggml_view_2d(ctx, values_, from->ne[0], from->ne[1], values_->nb[2], 0);
                }
                return ggml_set_rows(ctx, sides_[side].cache, from, sides_[side].index);
            };
        };
        std::vector<Op> res;
        if (!c_.calibrated) {
            for (size_t side = 0; side < sides_.size(); side++) {
                res.push_back(write(side));
            }
            res.push_back([this](ggml_context * ctx) { return attention(ctx, q_); });
            return res;
        }
        // as llama.cpp orders them
        for (size_t side : { 0, 1 }) {
            if (side == 1) {
                res.push_back([this](ggml_context * ctx) {
                    values_ = ggml_sub(ctx, ggml_reshape_3d(ctx, sides_[1].source, c_.d, c_.kv_heads, c_.tokens), center_);
                    ggml_ext_mark_center(values_);
                    return values_;
                });
            }
            if (c_.slots > 0) {
                res.push_back(write(side + 2));
            }
            res.push_back(write(side));
        }
        res.push_back([this](ggml_context * ctx) {
            queries_ = ggml_mul_mat(ctx, matrices_, ggml_reshape_4d(ctx, q_, c_.d, c_.heads/c_.kv_heads, c_.kv_heads, c_.tokens));
            ggml_ext_mark_product(queries_);
            return queries_;
        });
        res.push_back([this](ggml_context * ctx) { return attention(ctx, ggml_permute(ctx, ggml_reshape_3d(ctx, queries_, c_.d, c_.heads, c_.tokens), 0, 2, 1, 3)); });
        res.push_back([this](ggml_context * ctx) {
            out_ = ggml_add_inplace(ctx, ggml_reshape_4d(ctx, out_, c_.d, c_.heads/c_.kv_heads, c_.kv_heads, c_.tokens), ggml_reshape_3d(ctx, center_, c_.d, 1, c_.kv_heads));
            ggml_ext_mark_center(out_);
            return out_;
        });
        if (c_.read_again) {
            res.push_back([this](ggml_context * ctx) {
                squares_ = ggml_sqr(ctx, values_);
                return squares_;
            });
        }
        return res;
    }

    ggml_tensor * attention(ggml_context * ctx, ggml_tensor * q) {
        const auto heads = [&](ggml_tensor * t, int64_t n) {
            ggml_tensor * view = ggml_view_4d(ctx, t, c_.d, c_.kv_heads, n, 1, ggml_row_size(t->type, c_.d), t->nb[1], t->nb[2], 0);
            return ggml_permute(ctx, view, 0, 2, 1, 3);
        };
        out_ = ggml_flash_attn_ext(ctx, q, heads(sides_[0].cache, CELLS), heads(sides_[1].cache, CELLS), mask_, 1.0f/std::sqrt((float) c_.d), 0.0f, 0.0f);
        if (columns_) {
            out_->src[5] = heads(sides_[2].cache, c_.slots);
            out_->src[6] = heads(sides_[3].cache, c_.slots);
            out_->src[7] = columns_;
        }
        return out_;
    }
};

double distance(const std::vector<float> & x, const std::vector<float> & wanted) {
    double error = 0.0, all = 0.0;
    for (size_t i = 0; i < x.size(); i++) {
        error += (double) (x[i] - wanted[i])*(x[i] - wanted[i]);
        all   += (double) wanted[i]*wanted[i];
    }
    return std::sqrt(error/all);
}

void run(const StepCase & c, ggml_backend_t backend, const std::function<int64_t()> & fused, int alone = -1) {
    if (!begin_case(std::string(c.calibrated ? "calibrated " : "") + "steps of " + c.k + "/" + c.v + " d=" + std::to_string(c.d) + " heads=" + std::to_string(c.heads) + "/" +
                    std::to_string(c.kv_heads) + " tokens=" + std::to_string(c.tokens) + " window=" + std::to_string(c.slots) + (c.read_again ? " values read again" : ""))) {
        return;
    }
    Layer of_cpu(c, true);
    const Device device(backend);
    Layer together(c, true), apart(c, false);
    bool same = true;
    const int64_t before = fused ? fused() : 0;
    for (int first = 0; first + c.tokens <= c.cells; first += c.tokens) {
        if (!of_cpu.step(first) || !together.step(first) || !apart.step(first)) {
            return;
        }
        same = same && together.output() == apart.output();
    }
    // GGML_EXT_CUDA_PATH may ask for other kernels
    if (fused && c.k != "delta8" && !getenv("GGML_EXT_CUDA_PATH")) { // rows of delta8 are written by a kernel that makes no queries
        const int64_t ops = fused() - before;
        const bool as_many = alone >= 0 ? ops == (int64_t) (together.ops() - alone)*(c.cells/c.tokens) : c.read_again ? ops > 0 : ops > 0 && ops % together.ops() == 0;
        check(as_many, "the ops of a step that can be are launched together");
    }
    check(same, "results of ops in one graph are those of ops in graphs of their own");
    // they differ by the bytes below, and since queries have 16 bits
    check_below(distance(together.output(), of_cpu.output()), 2e-2, "distance from the CPU's results");
    const auto here = together.bytes(), there = of_cpu.bytes();
    check(here == apart.bytes(), "bytes of the cache and of the window are the same");
    for (size_t i = 0; i < here.size(); i++) {
        // codes within rounding of a tie, and those behind them in a group
        const bool grouped = i == 0 && is_grouped(type_for(c.k, c.d));
        check_below(differing(here[i], there[i]), grouped ? 4e-2 : 2e-3 + 128.0/here[i].size(), "bytes that differ from the CPU's");
    }
}

}  // namespace

void run_steps(ggml_backend_t backend, const std::function<int64_t()> & fused) {
    int turn = 0;
    for (int d : { 128, 64, 256 }) {
        for (const auto & [k, v] : { std::pair<std::string, std::string>{ "srft4", "srft4" }, { "delta4", "srft4" }, { "delta3", "srft3" }, { "srft8", "srft8" }, { "band4", "srft4" }, { "delta8", "srft4" }, { "polar4", "polar4" }, { "turbo4", "turbo4" }, { "turbo3", "turbo3" }, { "qjl1", "srft4" } }) {
            if (quick && turn++ % 3 != 0) {
                continue;
            }
            for (int slots : { 0, 32 }) {
                run({ k, v, d, 8, 4, 1, slots }, backend, fused);
            }
            run({ k, v, d, 4, 4, 3, 12 }, backend, fused);
        }
    }
}

void run_calibrated_steps(ggml_backend_t backend, const std::function<int64_t()> & fused, int cells, int alone) {
    for (const auto & [k, v] : { std::pair<std::string, std::string>{ "srft4", "srft4" }, { "band4", "srft4" }, { "delta3", "srft3" } }) {
        for (int d : { 64, 128 }) {
            if (quick && d == (k == "band4" ? 64 : 128)) {
                continue;
            }
            for (int slots : { 0, 32 }) {
                run({ k, v, d, 8, 4, 1, slots, true, cells }, backend, fused, alone);
            }
            run({ k, v, d, 4, 4, 3, 12, true, std::min(3*cells, CELLS) }, backend, fused, alone);
        }
    }
    // SUB is an op of its own then, and so is what reads it. Rows of V are written behind it, by a launch for two of them where there is a window.
    run({ "srft4", "srft4", 64, 8, 4, 1, 0, true, cells, true }, backend, fused, alone < 0 ? -1 : alone + 4);
    run({ "srft4", "srft4", 64, 8, 4, 1, 32, true, cells, true }, backend, fused, alone < 0 ? -1 : alone + 2);
}
