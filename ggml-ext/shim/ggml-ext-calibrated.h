// Calibrated keys and values (docs/calibration.md). llama_kv_cache has an object of this. The cache stores M key instead of the key, with a
// matrix M for each layer and KV head, and queries are multiplied by the inverse of M, transposed, so that scores stay what they are.
// Values of our types are stored without the center of their layer and KV head, and the result of attention gets it back: shares of attention
// sum up to one.
//
// All of this is ops of the graph, so every device has them and no cache type knows of them. Keys are multiplied where they
// are written (cpy_k). Queries are multiplied where attention meets the cache (build_attn_mha): the view that get_k returns carries the
// matrices, and that of get_v the centers. K-shift takes keys back, turns them, and multiplies again. Matrices and centers lie in buffers of
// their own, which clear() leaves alone, on the device of their layer. Matrices are f16: each token reads them all, which with f32 takes twice as long, and f32 was no
// closer even where keys are large (Qwen2.5).
#pragma once

#include "ggml-ext-calibration.h"

#include "ggml-cpp.h"
#include "llama-impl.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

class ggml_ext_calibrated {
  public:
    // Before the layers are made. A file that the spec names is read at once; one beside the model when a layer needs it.
    template <typename Model> void init(ggml_type type_k, const Model & model) {
        char file[8192];
        named        = ggml_ext_calibration_file((int32_t) type_k, ggml_ext_model_path(&model).c_str(), file, sizeof(file));
        path         = file;
        gains        = ggml_ext_gains_by_calibration((int32_t) type_k);
        arch         = model.arch_name();
        is_mla       = model.hparams.is_mla() || arch == "deepseek4";
        is_gathered  = arch == "minimax-m3";
        no_alloc     = model.hparams.no_alloc;
        model_digest = [&model] { return ggml_ext_model_digest(model); };
        if (named) {
            read();
        }
    }

    // Layer number `ikv` of the cache, layer `il` of the model. `v`: NULL where there are no values, or they lie transposed. `n_head`: KV heads.
    // `buft`: where its keys are.
    void add_layer(size_t ikv, uint32_t il, const ggml_tensor * k, const ggml_tensor * v, int64_t n_head, ggml_backend_buffer_type_t buft) {
        if (v && n_head > 0 && v->ne[0] > 0) {
            with_values.push_back({ ikv, il, v, n_head, buft });
        }
        const bool needs = ggml_ext_needs_calibration(k->type);
        if ((!named && !needs) || n_head == 0 || k->ne[0] == 0) {
            return;
        }
        // The guard raised it, since its keys are large: turned, they would lose more than they gain.
        if (gains && !ggml_ext_gains_by_calibration(k->type)) {
            return;
        }
        if (is_mla) {
            throw std::runtime_error("calibrated keys: this model keeps latents (MLA), of which keys and values are made; use a K cache type without cal=");
        }
        if (is_gathered) {
            throw std::runtime_error("calibrated keys: this model gathers the cells that it attends to by itself, without calibration; use a K cache type without cal=");
        }
        if (!file) {
            read();
        }
        const auto it = file->layers.find((int) il);
        if (it == file->layers.end()) {
            if (needs) {
                throw std::runtime_error("calibration " + path + " has no layer " + std::to_string(il) + ", whose K cache type " + ggml_type_name(k->type) +
                                         " needs it: " + command());
            }
            return;
        }
        const int64_t size = k->ne[0]/n_head;
        if (it->second.size != size || it->second.heads != n_head) {
            throw std::runtime_error("calibration " + path + ": layer " + std::to_string(il) + " has " + std::to_string(it->second.heads) + " heads of " +
                                     std::to_string(it->second.size) + ", this model has " + std::to_string(n_head) + " of " + std::to_string(size) + ": " + command());
        }
        ggml_ext_order_bands(k->type, it->second);
        ggml_context * ctx = context_for(buft, true);
        layer & l = layers[ikv];
        l.m = ggml_new_tensor_3d(ctx, TYPE, size, size, n_head);
        l.n = ggml_new_tensor_3d(ctx, TYPE, size, size, n_head);
        ggml_format_name(l.m, "k_cal_l%d", (int) il);
        ggml_format_name(l.n, "q_cal_l%d", (int) il);
        pending.push_back({ &it->second, l });
    }

    // A layer whose keys are those of another cache.
    void share(size_t ikv, const ggml_ext_calibrated & other, size_t of) {
        const auto it = other.layers.find(of);
        if (it != other.layers.end()) {
            layers[ikv] = it->second;
            own_digest  = other.own_digest;
        }
    }

    // Behind the layers: memory for the matrices, and these.
    void load() {
        add_centers();
        for (const place & of : places) {
            ggml_backend_buffer_t buffer = nullptr;
            if (no_alloc) {
                buffer = ggml_backend_buft_alloc_buffer(of.buft, 0);
                for (ggml_tensor * t = ggml_get_first_tensor(of.ctx.get()); t; t = ggml_get_next_tensor(of.ctx.get(), t)) {
                    t->buffer = buffer;
                }
            } else {
                buffer = ggml_backend_alloc_ctx_tensors_from_buft(of.ctx.get(), of.buft);
            }
            if (!buffer) {
                throw std::runtime_error("no memory for the matrices and centers of a calibration");
            }
            if (of.weights) {
                ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            }
            buffers.emplace_back(buffer);
        }
        for (const auto & [of, l] : pending) {
            if (!no_alloc) {
                set(l.m, of->m);
                set(l.n, ggml_ext_inverse_transposed(*of));
            }
        }
        for (const auto & [of, l] : pending_centers) {
            if (!no_alloc) {
                ggml_backend_tensor_set(l.c, of->center.data(), 0, ggml_nbytes(l.c));
            }
        }
        if (!pending.empty() || !pending_centers.empty()) {
            own_digest = file->digest;
            LLAMA_LOG_INFO("%s: keys of %zu layers and values of %zu are calibrated by %s (digest %016llx, %u tokens of %s)\n", __func__, pending.size(),
                           pending_centers.size(), path.c_str(), (unsigned long long) own_digest, file->tokens, file->text.c_str());
        }
        pending.clear();
        pending_centers.clear();
        with_values.clear();
        file.reset();
    }

    // of keys
    bool empty() const {
        return std::none_of(layers.begin(), layers.end(), [](const auto & l) { return l.second.m; });
    }
    bool has(size_t ikv) const { return find(ikv).m; }

    // Of the calibration that keys and values are stored by; 0 where they are stored as they are.
    uint64_t digest() const { return own_digest; }

    // graphs

    // In cpy_k: [head size, KV heads, tokens].
    ggml_tensor * keys(ggml_context * ctx, size_t ikv, ggml_tensor * k) const {
        const layer l = find(ikv);
        return l.m ? contiguous(ctx, multiply(ctx, l.m, k)) : k;
    }

    // In cpy_v: [head size, KV heads, tokens].
    ggml_tensor * values(ggml_context * ctx, size_t ikv, ggml_tensor * v) const {
        const layer l = find(ikv);
        if (!l.c) {
            return v;
        }
        v = ggml_sub(ctx, v, l.c);
        ggml_ext_mark_center(v);
        return v;
    }

    // In get_k: the view knows from here on what its queries are to be multiplied by.
    ggml_tensor * attach(size_t ikv, ggml_tensor * view) const {
        view->src[4] = find(ikv).n;
        return view;
    }

    // In get_v: the view knows what its results lack.
    ggml_tensor * attach_values(size_t ikv, ggml_tensor * view) const {
        view->src[4] = find(ikv).c;
        return view;
    }

    // K-shift: from what is stored to keys.
    ggml_tensor * undo(ggml_context * ctx, size_t ikv, ggml_tensor * k) const {
        const layer l = find(ikv);
        return l.n ? contiguous(ctx, multiply(ctx, ggml_cont(ctx, ggml_transpose(ctx, l.n)), k)) : k;
    }

    // [head size, heads, tokens]; each matrix is for so many heads in a row. Many tokens are the columns of a product for each head, as
    // queries are beside a cache, and the result is permuted; few are multiplied where they lie.
    static ggml_tensor * multiply(ggml_context * ctx, ggml_tensor * matrices, ggml_tensor * x) {
        const int64_t size = x->ne[0], heads = x->ne[1], tokens = x->ne[2], n = matrices->ne[2];
        const bool    many = tokens > 8;
        x = many ? ggml_permute(ctx, x, 0, 2, 1, 3) : ggml_reshape_4d(ctx, contiguous(ctx, x), size, heads/n, n, tokens);
        x = ggml_mul_mat(ctx, matrices, x);
        ggml_prec_set_acc(x, GGML_PREC_F32);
        if (ggml_ext_multiplies(size)) {
            ggml_ext_mark_product(x);
        }
        return many ? ggml_permute(ctx, x, 0, 2, 1, 3) : ggml_reshape_3d(ctx, x, size, heads, tokens);
    }

  private:
    static constexpr ggml_type TYPE = GGML_TYPE_F16;

    struct layer {
        ggml_tensor * m = nullptr, * n = nullptr; // [head size, head size, KV heads]
        ggml_tensor * c = nullptr;                // [head size of values, KV heads]
    };

    std::map<size_t, layer> layers;
    uint64_t                own_digest = 0;

    struct place {
        ggml_backend_buffer_type_t buft;
        bool                       weights;
        ggml_context_ptr           ctx;
    };
    std::vector<place>                   places;
    std::vector<ggml_backend_buffer_ptr> buffers;

    // while the cache is made
    std::string                         path, arch;
    bool                                named = false, gains = false, is_mla = false, is_gathered = false, no_alloc = false;
    std::function<uint64_t()>           model_digest;
    std::optional<ggml_ext_calibration> file;
    std::vector<std::pair<const ggml_ext_calibration::layer *, layer>> pending, pending_centers;

    struct layer_with_values {
        size_t                     ikv;
        uint32_t                   il;
        const ggml_tensor *        v;
        int64_t                    n_head;
        ggml_backend_buffer_type_t buft;
    };
    std::vector<layer_with_values> with_values;

    layer find(size_t ikv) const {
        const auto it = layers.find(ikv);
        return it == layers.end() ? layer() : it->second;
    }

    // Where the keys of a layer are calibrated, the values of all are, if they are of our types. Not where llama.cpp rotates values, which it does for
    // all layers if one has a quantized type of its own: the centers are of values as they are.
    void add_centers() {
        const auto rotates = [](const layer_with_values & l) { return ggml_is_quantized(l.v->type) && !ggml_ext_is_ours(l.v->type); };
        if (!file || is_gathered || std::any_of(with_values.begin(), with_values.end(), rotates)) {
            return;
        }
        for (const layer_with_values & of : with_values) {
            const auto    it   = file->layers.find((int) of.il);
            const int64_t size = of.v->ne[0]/of.n_head;
            if (!ggml_ext_is_ours(of.v->type) || it == file->layers.end() || it->second.center.empty()) {
                continue;
            }
            if (it->second.heads != of.n_head || (int64_t) it->second.center.size() != size*of.n_head) {
                throw std::runtime_error("calibration " + path + ": the values of layer " + std::to_string(of.il) + " have centers of " + std::to_string(it->second.heads) +
                                         " heads with " + std::to_string(it->second.center.size()) + " numbers, this model has " + std::to_string(of.n_head) + " of " +
                                         std::to_string(size) + ": " + command());
            }
            ggml_context * ctx = context_for(of.buft, false);
            layer & l = layers[of.ikv];
            l.c = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, size, of.n_head);
            ggml_format_name(l.c, "v_center_l%d", (int) of.il);
            pending_centers.push_back({ &it->second, l });
        }
    }

    // With the strides of one that was never permuted, which a dimension of 1 may lack and still be contiguous.
    static ggml_tensor * contiguous(ggml_context * ctx, ggml_tensor * x) {
        return ggml_is_contiguous(x) ? ggml_reshape_3d(ctx, x, x->ne[0], x->ne[1], x->ne[2]) : ggml_cont(ctx, x);
    }

    static void set(ggml_tensor * t, const std::vector<float> & values) {
        std::vector<ggml_fp16_t> halves(values.size());
        ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t) values.size());
        ggml_backend_tensor_set(t, halves.data(), 0, ggml_nbytes(t));
    }

    static std::string command() { return "make one by `cargo kv calibrate -m MODEL.gguf`"; }

    void read() {
        if (path.empty()) {
            throw std::runtime_error("the K cache type needs a calibration of the model, and it is not known where the model lies: say cal=FILE, or " + command());
        }
        try {
            file = ggml_ext_calibration_read(path);
        } catch (const std::exception & e) {
            throw std::runtime_error(std::string(e.what()) + ": " + command() + (named ? "" : ", or say cal=FILE"));
        }
        // a dry run has nothing to compare
        const uint64_t here = no_alloc ? file->model : model_digest();
        if (file->model != here) {
            char digests[64];
            snprintf(digests, sizeof(digests), "%016llx, not %016llx", (unsigned long long) file->model, (unsigned long long) here);
            throw std::runtime_error("calibration " + path + " is of another model (" + file->architecture + ", " + digests + "): " + command());
        }
    }

    // Not weights: ops with those are sent from a CPU to a GPU where they have many rows, and a SUB counts each head as one.
    ggml_context * context_for(ggml_backend_buffer_type_t buft, bool weights) {
        for (const place & of : places) {
            if (of.buft == buft && of.weights == weights) {
                return of.ctx.get();
            }
        }
        places.push_back({ buft, weights, ggml_context_ptr(ggml_init({ 2*1024*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true })) });
        return places.back().ctx.get();
    }
};

// In build_attn_mha: the result of an attention over values that were stored without their centers.
inline ggml_tensor * ggml_ext_calibrated_values(ggml_context * ctx, ggml_tensor * attention) {
    const ggml_tensor * v = attention->src[2];
    while (v && v->op == GGML_OP_PERMUTE) {
        v = v->src[0];
    }
    if (!v || v->op != GGML_OP_VIEW || !v->src[4] || v->src[4]->type != GGML_TYPE_F32) {
        return attention;
    }
    if (attention->src[4]) {
        throw std::runtime_error("the calibration has centers of values for a layer with attention sinks, whose shares do not sum up to one: make one by `cargo kv calibrate -m MODEL.gguf`");
    }
    // query heads of a KV head in a row
    ggml_tensor * center = v->src[4];
    const int64_t size = center->ne[0], heads = center->ne[1], group = attention->ne[1]/heads;
    ggml_tensor * res = ggml_reshape_4d(ctx, attention, size, group, heads, attention->ne[2]*attention->ne[3]);
    // in place, or backends cannot leave it to the attention: the allocator seldom finds that out by itself
    res = ggml_add_inplace(ctx, res, ggml_reshape_3d(ctx, center, size, 1, heads));
    ggml_ext_mark_center(res);
    return ggml_reshape_4d(ctx, res, size, attention->ne[1], attention->ne[2], attention->ne[3]);
}

// In build_attn_mha: queries that meet calibrated keys.
inline ggml_tensor * ggml_ext_calibrated_queries(ggml_context * ctx, ggml_tensor * q, const ggml_tensor * k) {
    return k->op == GGML_OP_VIEW && k->src[4] ? ggml_ext_calibrated::multiply(ctx, k->src[4], q) : q;
}
