// kv-calibrate: reads a text with a model and writes the shape of its keys and the centers of its values, for `cargo kv calibrate`.
//
// Keys are read where they are written to the cache (SET_ROWS into cache_k_lN), queries and values where attention meets the cache, so
// what counts is what a cache sees, whatever the architecture does before. Layers whose values are a part of their keys (MLA) are
// left out. Values of layers with attention sinks have no center, since shares of attention do not sum up to one there.

#include "center.h"
#include "shape.h"

#include "ggml-ext-calibration.h"

#include "ggml-cpp.h"
#include "llama-cpp.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Options {
    std::string model, text, text_name, out;
    int         tokens  = 4096;
    int         threads = 1;
};

Options read_options(int argc, char ** argv) {
    Options o;
    const std::map<std::string, std::function<void(const char *)>> known = {
        { "--model",     [&](const char * x) { o.model = x; } },
        { "--text",      [&](const char * x) { o.text = x; } },
        { "--text-name", [&](const char * x) { o.text_name = x; } },
        { "--out",       [&](const char * x) { o.out = x; } },
        { "--tokens",    [&](const char * x) { o.tokens = atoi(x); } },
        { "--threads",   [&](const char * x) { o.threads = atoi(x); } },
    };
    for (int i = 1; i < argc; i += 2) {
        const auto it = known.find(argv[i]);
        if (it == known.end() || i + 1 == argc) {
            throw std::runtime_error(std::string("what is ") + argv[i] + "? Usage: kv-calibrate --model FILE --text FILE --out FILE "
                                     "[--text-name NAME] [--tokens N] [--threads N]");
        }
        it->second(argv[i + 1]);
    }
    if (o.model.empty() || o.text.empty() || o.out.empty() || o.tokens < 64 || o.threads < 1) {
        throw std::runtime_error("--model, --text and --out are needed, and at least 64 --tokens and one of --threads");
    }
    return o;
}

// One layer of a cache.
struct Layer {
    int                    size = 0, heads = 0;
    std::vector<Moment>    queries, residuals; // of each KV head
    std::vector<Residuals> coders;
    bool                   latent = false;     // its values are a part of its keys

    int                    value_size = 0;
    std::vector<Center>    centers;            // of each KV head, or none

    void init(int size_, int heads_) {
        if (!coders.empty()) {
            return;
        }
        size  = size_;
        heads = heads_;
        queries.assign(heads, Moment(size));
        residuals.assign(heads, Moment(size));
        coders.assign(heads, Residuals(size));
    }
};

template <typename F> void in_parallel(int threads, F && f) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) {
        others.emplace_back([&f, i] { f(i); });
    }
    f(0);
    for (std::thread & t : others) {
        t.join();
    }
}

// What the graphs of a context show.
class Observer {
  public:
    explicit Observer(int threads) : threads_(threads) {}

    static bool callback(ggml_tensor * t, bool ask, void * self) { return ((Observer *) self)->observe(t, ask); }

    void restart() {
        for (auto & [_, layer] : layers) {
            for (Residuals & coder : layer.coders) {
                coder.restart();
            }
        }
    }

    std::map<int, Layer> layers;
    std::string          error;

  private:
    int                  threads_;
    std::vector<uint8_t> bytes_;
    std::vector<float>   rows_, coded_;

    // The layer whose keys a tensor is a view of; -1: none.
    static int layer_of(const ggml_tensor * t) {
        while (t && t->view_src) {
            t = t->view_src;
        }
        int il = -1, end = 0;
        return t && sscanf(t->name, "cache_k_l%d%n", &il, &end) == 1 && t->name[end] == 0 ? il : -1;
    }

    // An attention over cells: its queries and keys.
    static bool is_attention(const ggml_tensor * t, const ggml_tensor *& q, const ggml_tensor *& k) {
        if (t->op == GGML_OP_FLASH_ATTN_EXT) {
            q = t->src[0];
            k = t->src[1];
        } else if (t->op == GGML_OP_MUL_MAT) {
            k = t->src[0];
            q = t->src[1];
        } else {
            return false;
        }
        return layer_of(k) >= 0;
    }

    bool observe(ggml_tensor * t, bool ask) {
        const ggml_tensor * q = nullptr, * k = nullptr;
        const bool writes  = t->op == GGML_OP_SET_ROWS && layer_of(t) >= 0;
        const bool attends = is_attention(t, q, k);
        if (ask) {
            // keys are read before they are stored: without a stop behind RoPE, CUDA would write its result to the cache alone
            return writes || attends || t->op == GGML_OP_ROPE;
        }
        try {
            if (writes) {
                take_keys(layers[layer_of(t)], t->src[0]);
            } else if (attends) {
                Layer & layer = layers[layer_of(k)];
                layer.latent  = layer.latent || (t->src[2] && layer_of(t->src[2]) >= 0);
                layer.init((int) k->ne[0], (int) k->ne[2]);
                take_queries(layer, q);
                take_residuals(layer);
                if (t->op == GGML_OP_FLASH_ATTN_EXT && !t->src[4]) {
                    take_values(layer, t);
                }
            }
        } catch (const std::exception & e) {
            error = e.what();
            return false;
        }
        return true;
    }

    // All of a tensor, whose rows are contiguous.
    const uint8_t * read(const ggml_tensor * t, ggml_type type = GGML_TYPE_F32) {
        if (t->type != type || t->nb[0] != ggml_type_size(type)) {
            throw std::runtime_error(std::string(t->name) + " is no tensor of " + ggml_type_name(type));
        }
        bytes_.resize(ggml_nbytes(t));
        ggml_backend_tensor_get(t, bytes_.data(), 0, bytes_.size());
        return bytes_.data();
    }

    // The same as f32, row after row, without what may lie between.
    std::vector<float> read_halves(const ggml_tensor * t) {
        const uint8_t * data = read(t, GGML_TYPE_F16);
        std::vector<float> res(ggml_nelements(t));
        for (int64_t i = 0; i < ggml_nrows(t); i++) {
            const int64_t i1 = i % t->ne[1], i2 = i/t->ne[1] % t->ne[2], i3 = i/t->ne[1]/t->ne[2];
            ggml_fp16_to_fp32_row((const ggml_fp16_t *) (data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3]), &res[i*t->ne[0]], t->ne[0]);
        }
        return res;
    }

    // Keys come before the attention, which shows how many heads they are of.
    struct Pending {
        std::vector<float> keys;
        int64_t            values = 0;
    };
    std::map<const Layer *, Pending> pending_;

    void take_keys(Layer & layer, const ggml_tensor * t) {
        const uint8_t * data = read(t);
        Pending & to = pending_[&layer];
        to.values = t->ne[0];
        to.keys.clear();
        for (int64_t i = 0; i < ggml_nrows(t); i++) {
            const float * row = (const float *) (data + i*t->nb[1]);
            to.keys.insert(to.keys.end(), row, row + t->ne[0]);
        }
    }

    void take_residuals(Layer & layer) {
        Pending & from = pending_[&layer];
        if (from.keys.empty() || from.values != (int64_t) layer.size*layer.heads) {
            return;
        }
        const size_t n = from.keys.size()/from.values;
        coded_.resize(n*layer.size);
        for (int h = 0; h < layer.heads; h++) {
            for (size_t i = 0; i < n; i++) {
                layer.coders[h].next(&from.keys[i*from.values + (size_t) h*layer.size], &coded_[i*layer.size]);
            }
            in_parallel(threads_, [&](int part) { layer.residuals[h].add(coded_.data(), n, part, threads_); });
            layer.residuals[h].count(n);
        }
        from.keys.clear();
    }

    // One query of sixteen: its shares of attention are computed anew.
    void take_values(Layer & layer, const ggml_tensor * t) {
        constexpr int64_t STEP = 16;
        const ggml_tensor * q = t->src[0], * k = t->src[1], * v = t->src[2], * mask = t->src[3];
        const int64_t cells = k->ne[1], heads = q->ne[2], group = heads/layer.heads;
        const bool halves = k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && (!mask || mask->type == GGML_TYPE_F16);
        if (!halves || q->ne[3] != 1 || v->ne[2] != layer.heads || (mask && (mask->ne[0] != cells || mask->ne[2] != 1))) {
            return;
        }
        layer.value_size = (int) v->ne[0];
        layer.centers.resize(layer.heads, Center(layer.value_size));

        const std::vector<float> keys = read_halves(k), values = read_halves(v), hidden = mask ? read_halves(mask) : std::vector<float>();
        const uint8_t * queries = read(q);
        float params[3]; // scale, ALiBi, cap
        memcpy(params, t->op_params, sizeof(params));

        in_parallel(threads_, [&](int part) {
            const size_t d = layer.size;
            std::vector<float> turned(d*cells), shares(cells);
            for (int h = part; h < layer.heads; h += threads_) {
                // a line for each component, so that products are sums of whole lines
                for (int64_t i = 0; i < cells; i++) {
                    for (size_t j = 0; j < d; j++) {
                        turned[j*cells + i] = keys[(h*cells + i)*d + j];
                    }
                }
                for (int64_t head = h*group; head < (h + 1)*group; head++) {
                    const Softmax softmax = { params[0], params[2], alibi_slope(params[1], (int) head, (int) heads) };
                    for (int64_t i = 0; i < q->ne[1]; i += STEP) {
                        const float * query = (const float *) (queries + i*q->nb[1] + head*q->nb[2]);
                        std::fill(shares.begin(), shares.end(), 0.0f);
                        float * __restrict to = shares.data();
                        for (size_t j = 0; j < d; j++) {
                            const float * line = &turned[j*cells];
                            for (int64_t c = 0; c < cells; c++) {
                                to[c] += query[j]*line[c];
                            }
                        }
                        if (softmax.shares(to, mask ? &hidden[i*cells] : nullptr, cells)) {
                            layer.centers[h].add(to, &values[(size_t) h*cells*layer.value_size], cells);
                        }
                    }
                }
            }
        });
    }

    // [values, tokens, query heads]: those of a KV head one after the other.
    void take_queries(Layer & layer, const ggml_tensor * t) {
        const uint8_t * data  = read(t);
        const int64_t   group = t->ne[2]/layer.heads;
        if (t->ne[0] != layer.size || group < 1) {
            throw std::runtime_error(std::string(t->name) + " has no queries for the keys of its layer");
        }
        for (int h = 0; h < layer.heads; h++) {
            rows_.clear();
            for (int64_t s = 0; s < t->ne[3]; s++) {
                for (int64_t head = h*group; head < (h + 1)*group; head++) {
                    for (int64_t i = 0; i < t->ne[1]; i++) {
                        const float * row = (const float *) (data + i*t->nb[1] + head*t->nb[2] + s*t->nb[3]);
                        rows_.insert(rows_.end(), row, row + layer.size);
                    }
                }
            }
            const size_t n = rows_.size()/layer.size;
            in_parallel(threads_, [&](int part) { layer.queries[h].add(rows_.data(), n, part, threads_); });
            layer.queries[h].count(n);
        }
    }
};

std::vector<llama_token> tokens_of(const llama_model * model, const std::string & path, int most) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot read " + path);
    }
    std::string text{ std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>() };
    text.resize(std::min<size_t>(text.size(), (size_t) most*32));
    std::vector<llama_token> res;
    const llama_vocab * vocab = llama_model_get_vocab(model);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        // no words, so the bytes stand for them: models of tests
        for (const char c : text) {
            res.push_back((llama_token) ((uint8_t) c%llama_vocab_n_tokens(vocab)));
        }
    } else {
        res.resize(text.size() + 16);
        const int n = llama_tokenize(vocab, text.data(), (int32_t) text.size(), res.data(), (int32_t) res.size(), true, false);
        res.resize(std::max(0, n));
    }
    if ((int) res.size() > most) {
        res.resize(most);
    } else if ((int) res.size() < most) {
        printf("note: the text has %zu tokens, fewer than the %d that were asked for\n", res.size(), most);
    }
    if (res.size() < 64) {
        throw std::runtime_error("the text has " + std::to_string(res.size()) + " tokens: give a longer one");
    }
    return res;
}

// Keys of a model by a text. Progress goes to stdout.
std::map<int, Layer> observe(llama_model * model, const std::vector<llama_token> & tokens, int threads) {
    constexpr int BATCH = 512;
    Observer observer(threads);
    const int n_train = llama_model_n_ctx_train(model), n = (int) tokens.size();
    const int n_ctx = n_train > 0 ? std::min(n_train, n) : n;

    llama_context_params p = llama_context_default_params();
    p.n_ctx             = n_ctx;
    p.n_batch           = BATCH;
    p.n_ubatch          = BATCH;
    p.n_threads         = threads;
    p.n_threads_batch   = threads;
    p.no_perf           = true;
    p.flash_attn_type   = LLAMA_FLASH_ATTN_TYPE_ENABLED; // as the cache types of values need it
    p.cb_eval           = Observer::callback;
    p.cb_eval_user_data = &observer;
    llama_context_ptr ctx(llama_init_from_model(model, p));
    if (!ctx) {
        throw std::runtime_error("no context could be made with this model");
    }
    std::vector<llama_token> batch;
    for (int at = 0, place = 0; at < n;) {
        if (place == n_ctx) {
            llama_memory_clear(llama_get_memory(ctx.get()), true);
            observer.restart();
            place = 0;
        }
        const int size = std::min({ BATCH, n - at, n_ctx - place });
        batch.assign(tokens.begin() + at, tokens.begin() + at + size);
        if (llama_decode(ctx.get(), llama_batch_get_one(batch.data(), size)) != 0 || !observer.error.empty()) {
            throw std::runtime_error(observer.error.empty() ? "the model could not read the text" : observer.error);
        }
        at += size;
        place += size;
        printf("[%d/%d]\n", at, n);
        fflush(stdout);
    }
    return std::move(observer.layers);
}

std::map<int, ggml_ext_calibration::layer> shapes(const std::map<int, Layer> & layers, int threads) {
    std::map<int, ggml_ext_calibration::layer> res;
    std::vector<std::pair<int, int>> work; // layers and heads
    for (const auto & [il, layer] : layers) {
        if (layer.latent || layer.coders.empty()) {
            continue;
        }
        for (int h = 0; h < layer.heads; h++) {
            work.push_back({ il, h });
        }
        ggml_ext_calibration::layer & to = res[il];
        to.size  = layer.size;
        to.heads = layer.heads;
        to.m.resize((size_t) layer.size*layer.size*layer.heads);
        for (const Center & center : layer.centers) {
            const std::vector<float> mean = center.mean();
            to.center.insert(to.center.end(), mean.begin(), mean.end());
        }
        if (to.center.size() != (size_t) layer.value_size*layer.heads) {
            to.center.clear();
        }
    }
    std::vector<std::string> errors(threads);
    in_parallel(threads, [&](int part) {
        try {
            for (size_t i = part; i < work.size(); i += threads) {
                const auto [il, h] = work[i];
                const Layer & of = layers.at(il);
                const std::vector<float> m = shape_matrix(of.queries[h], of.residuals[h]);
                std::copy(m.begin(), m.end(), res.at(il).m.begin() + (ptrdiff_t) m.size()*h);
            }
        } catch (const std::exception & e) {
            errors[part] = e.what();
        }
    });
    for (const std::string & error : errors) {
        if (!error.empty()) {
            throw std::runtime_error(error);
        }
    }
    return res;
}

// Whole or not at all: what a reader finds.
ggml_ext_calibration write(const ggml_ext_calibration & what, const std::string & path) {
    const std::string part = path + ".part";
    ggml_ext_calibration_write(what, part);
    ggml_ext_calibration written = ggml_ext_calibration_read(part);
    remove(path.c_str());
    if (rename(part.c_str(), path.c_str()) != 0) {
        throw std::runtime_error("cannot write " + path);
    }
    return written;
}

void calibrate(const Options & o) {
    llama_model_ptr model(llama_model_load_from_file(o.model.c_str(), llama_model_default_params()));
    if (!model) {
        throw std::runtime_error("cannot load " + o.model);
    }
    const std::vector<llama_token> tokens = tokens_of(model.get(), o.text, o.tokens);
    const std::map<int, Layer> layers = observe(model.get(), tokens, o.threads);
    ggml_ext_calibration found;
    found.architecture = model->arch_name();
    found.text         = o.text_name;
    found.model        = ggml_ext_model_digest(*model);
    found.tokens       = (uint32_t) tokens.size();
    found.layers       = shapes(layers, o.threads);
    if (found.layers.empty()) {
        const bool latent = std::any_of(layers.begin(), layers.end(), [](const auto & l) { return l.second.latent; });
        throw std::runtime_error(latent ? "this model keeps latents (MLA), of which keys and values are made: there are no keys to calibrate"
                                        : "this model keeps no keys in a cache: there is nothing to calibrate");
    }
    const ggml_ext_calibration written = write(found, o.out);
    const auto centers = std::count_if(written.layers.begin(), written.layers.end(), [](const auto & l) { return !l.second.center.empty(); });
    printf("done: keys of %zu layers and values of %d, %u tokens, digest %016llx\n", written.layers.size(), (int) centers, written.tokens,
           (unsigned long long) written.digest);
}

}  // namespace

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    try {
        calibrate(read_options(argc, argv));
    } catch (const std::exception & e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 1;
    }
    return 0;
}
