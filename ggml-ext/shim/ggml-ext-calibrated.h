// Calibrated keys: a cache that stores M key instead of the key, with a matrix M for each layer and KV head, and multiplies queries
// by the inverse of M, transposed, so that scores stay what they are (docs/calibration.md). llama_kv_cache has an object of this.
//
// The products are ops of the graph, so every device has them and no cache type knows of them. Keys are multiplied where they
// are written (cpy_k). Queries are multiplied where attention meets the cache (build_attn_mha): the view that get_k returns carries the
// matrices. K-shift takes keys back, turns them, and multiplies again. The matrices lie in buffers of their own, which clear() leaves
// alone, on the device of their layer. They are f16: each token reads them all, which with f32 takes twice as long, and f32 was no
// closer even where keys are large (Qwen2.5).
#pragma once

#include "ggml-ext-calibration.h"

#include "ggml-cpp.h"
#include "llama-impl.h"

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
        no_alloc     = model.hparams.no_alloc;
        model_digest = [&model] { return ggml_ext_model_digest(model); };
        if (named) {
            read();
        }
    }

    // Layer number `ikv` of the cache, layer `il` of the model. `buft`: where its keys are.
    void add_layer(size_t ikv, uint32_t il, const ggml_tensor * k, int64_t n_head, ggml_backend_buffer_type_t buft) {
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
        ggml_context * ctx = context_for(buft);
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
        for (auto & [buft, ctx] : contexts) {
            ggml_backend_buffer_t buffer = nullptr;
            if (no_alloc) {
                buffer = ggml_backend_buft_alloc_buffer(buft, 0);
                for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
                    t->buffer = buffer;
                }
            } else {
                buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
            }
            if (!buffer) {
                throw std::runtime_error("no memory for the matrices of calibrated keys");
            }
            ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            buffers.emplace_back(buffer);
        }
        for (const auto & [of, l] : pending) {
            if (!no_alloc) {
                set(l.m, of->m);
                set(l.n, ggml_ext_inverse_transposed(*of));
            }
        }
        if (!pending.empty()) {
            own_digest = file->digest;
            LLAMA_LOG_INFO("%s: keys of %zu layers are calibrated by %s (digest %016llx, %u tokens of %s)\n", __func__, pending.size(), path.c_str(),
                           (unsigned long long) own_digest, file->tokens, file->text.c_str());
        }
        pending.clear();
        file.reset();
    }

    bool empty() const { return layers.empty(); }
    bool has(size_t ikv) const { return layers.count(ikv) > 0; }

    // Of the calibration that keys are stored by; 0 where they are stored as they are.
    uint64_t digest() const { return own_digest; }

    // graphs

    // In cpy_k: [head size, KV heads, tokens].
    ggml_tensor * keys(ggml_context * ctx, size_t ikv, ggml_tensor * k) const {
        const auto it = layers.find(ikv);
        return it == layers.end() ? k : contiguous(ctx, multiply(ctx, it->second.m, k));
    }

    // In get_k: the view knows from here on what its queries are to be multiplied by.
    ggml_tensor * attach(size_t ikv, ggml_tensor * view) const {
        const auto it = layers.find(ikv);
        if (it != layers.end()) {
            view->src[4] = it->second.n;
        }
        return view;
    }

    // K-shift: from what is stored to keys.
    ggml_tensor * undo(ggml_context * ctx, size_t ikv, ggml_tensor * k) const {
        const auto it = layers.find(ikv);
        return it == layers.end() ? k : contiguous(ctx, multiply(ctx, ggml_cont(ctx, ggml_transpose(ctx, it->second.n)), k));
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
    };

    std::map<size_t, layer> layers;
    uint64_t                own_digest = 0;

    std::vector<std::pair<ggml_backend_buffer_type_t, ggml_context_ptr>> contexts;
    std::vector<ggml_backend_buffer_ptr>                                 buffers;

    // while the cache is made
    std::string                         path, arch;
    bool                                named = false, gains = false, is_mla = false, no_alloc = false;
    std::function<uint64_t()>           model_digest;
    std::optional<ggml_ext_calibration> file;
    std::vector<std::pair<const ggml_ext_calibration::layer *, layer>> pending;

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

    ggml_context * context_for(ggml_backend_buffer_type_t buft) {
        for (auto & [of, ctx] : contexts) {
            if (of == buft) {
                return ctx.get();
            }
        }
        ggml_context * ctx = ggml_init({ 2*1024*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true });
        contexts.emplace_back(buft, ctx);
        return ctx;
    }
};

// In build_attn_mha: queries that meet calibrated keys.
inline ggml_tensor * ggml_ext_calibrated_queries(ggml_context * ctx, ggml_tensor * q, const ggml_tensor * k) {
    return k->op == GGML_OP_VIEW && k->src[4] ? ggml_ext_calibrated::multiply(ctx, k->src[4], q) : q;
}
