// Models of random weights, small enough to be made and loaded in no time. What they say means nothing, but it depends on
// every key and value: queries and keys are scaled so that attention is neither even nor a single cell.

#include "life.h"

#include "ggml.h"
#include "gguf.h"
#include "llama-cpp.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

const Shape HEADS_OF_64  = { "heads-of-64",  "llama",  3, 4, 2,  64,  0 };
const Shape HEADS_OF_128 = { "heads-of-128", "llama",  2, 2, 1, 128,  0 };
const Shape HEADS_OF_80  = { "heads-of-80",  "llama",  2, 4, 4,  80,  0 };
const Shape WINDOWED     = { "windowed",     "gemma2", 4, 4, 2,  64, 64 };
const Shape BIASED       = { "biased",       "qwen2",  3, 4, 2,  64,  0 };
const Shape BIASED_FUSED = { "biased-fused", "qwen2",  3, 4, 2,  64,  0 };
const Shape NORMED       = { "normed",       "qwen3",  3, 4, 2,  64,  0 };

namespace {

constexpr int N_EMBD = 256, N_FF = 256;

class Writer {
  public:
    Writer(const Shape & shape) : shape_(shape), rng_(7*shape.head_size + shape.n_layer) {
        ggml_init_params params = { (size_t) 64 << 20, nullptr, false };
        ctx_  = ggml_init(params);
        gguf_ = gguf_init_empty();
    }

    ~Writer() {
        gguf_free(gguf_);
        ggml_free(ctx_);
    }

    void key(const std::string & name, uint32_t value) { gguf_set_val_u32(gguf_, named(name).c_str(), value); }
    void key(const std::string & name, float value)    { gguf_set_val_f32(gguf_, named(name).c_str(), value); }
    void key(const std::string & name, const char * value) { gguf_set_val_str(gguf_, name.c_str(), value); }

    void weight(const std::string & name, int n_in, int n_out, float gain) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, n_in, n_out);
        for (int64_t i = 0; i < ggml_nelements(t); i++) {
            ((float *) t->data)[i] = rng_.normal()*gain/std::sqrt((float) n_in);
        }
        add(t, name + ".weight");
    }

    void norm(const std::string & name, int n, float value) {
        ggml_tensor * t = ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, n);
        for (int i = 0; i < n; i++) {
            ((float *) t->data)[i] = value*(0.8f + 0.4f*rng_.uniform());
        }
        add(t, name + ".weight");
    }

    // Values of each part's size and either sign, one part after the other.
    void bias(const std::string & name, const std::vector<std::pair<int, float>> & parts) {
        int64_t n = 0;
        for (const auto & part : parts) {
            n += part.first;
        }
        ggml_tensor * t = ggml_new_tensor_1d(ctx_, GGML_TYPE_F32, n);
        float * x = (float *) t->data;
        for (const auto & [count, size] : parts) {
            for (int i = 0; i < count; i++) {
                *x++ = rng_.below(2) ? size : -size;
            }
        }
        add(t, name + ".bias");
    }

    bool write(const std::string & path) { return gguf_write_to_file(gguf_, path.c_str(), false); }

  private:
    const Shape &  shape_;
    Rng            rng_;
    ggml_context * ctx_;
    gguf_context * gguf_;

    std::string named(const std::string & name) { return std::string(shape_.arch) + "." + name; }

    void add(ggml_tensor * t, const std::string & name) {
        ggml_set_name(t, name.c_str());
        gguf_add_tensor(gguf_, t);
    }
};

bool write_model(const Shape & shape, const std::string & path) {
    const bool gemma = strcmp(shape.arch, "gemma2") == 0;
    const int  n_q = shape.n_head*shape.head_size, n_kv = shape.n_head_kv*shape.head_size;
    Writer w(shape);
    w.key("general.architecture", shape.arch);
    w.key("tokenizer.ggml.model", "no_vocab");
    w.key("vocab_size", (uint32_t) N_VOCAB);
    w.key("context_length", 8192u);
    w.key("embedding_length", (uint32_t) N_EMBD);
    w.key("feed_forward_length", (uint32_t) N_FF);
    w.key("block_count", (uint32_t) shape.n_layer);
    w.key("attention.head_count", (uint32_t) shape.n_head);
    w.key("attention.head_count_kv", (uint32_t) shape.n_head_kv);
    w.key("attention.key_length", (uint32_t) shape.head_size);
    w.key("attention.value_length", (uint32_t) shape.head_size);
    w.key("attention.layer_norm_rms_epsilon", 1e-5f);
    w.key("rope.dimension_count", (uint32_t) shape.head_size);
    if (shape.window > 0) {
        w.key("attention.sliding_window", (uint32_t) shape.window);
    }
    w.weight("token_embd", N_EMBD, N_VOCAB, gemma ? 1.0f : 16.0f);
    if (!gemma) {
        w.weight("output", N_EMBD, N_VOCAB, 2.0f);
    }
    w.norm("output_norm", N_EMBD, gemma ? 2.5f : 1.0f);
    for (int il = 0; il < shape.n_layer; il++) {
        const std::string blk = "blk." + std::to_string(il) + ".";
        w.norm(blk + "attn_norm", N_EMBD, 1.0f);
        const bool large = il == LARGE_LAYER;
        // a head's keys, all of which have it
        const std::vector<std::pair<int, float>> bias = { { n_kv - shape.head_size, 0.5f }, { shape.head_size, large ? 40.0f : 0.5f } };
        if (&shape == &BIASED_FUSED) {
            w.weight(blk + "attn_qkv", N_EMBD, n_q + 2*n_kv, 1.0f);
            w.bias(blk + "attn_qkv", { { n_q, 0.5f }, bias[0], bias[1], { n_kv, 0.5f } });
        } else {
            w.weight(blk + "attn_q", N_EMBD, n_q, 1.2f);
            w.weight(blk + "attn_k", N_EMBD, n_kv, 1.2f);
            w.weight(blk + "attn_v", N_EMBD, n_kv, 1.0f);
        }
        if (&shape == &BIASED) {
            w.bias(blk + "attn_q", { { n_q, 0.5f } });
            w.bias(blk + "attn_k", bias);
            w.bias(blk + "attn_v", { { n_kv, 0.5f } });
        }
        if (&shape == &NORMED) {
            w.norm(blk + "attn_q_norm", shape.head_size, large ? 8.0f : 0.7f);
            w.norm(blk + "attn_k_norm", shape.head_size, large ? 8.0f : 0.7f);
        }
        w.weight(blk + "attn_output", n_q, N_EMBD, 1.5f);
        w.norm(blk + "ffn_norm", N_EMBD, 1.0f);
        w.weight(blk + "ffn_gate", N_EMBD, N_FF, 1.0f);
        w.weight(blk + "ffn_up", N_EMBD, N_FF, 1.0f);
        w.weight(blk + "ffn_down", N_FF, N_EMBD, 1.0f);
        if (gemma) {
            w.norm(blk + "post_attention_norm", N_EMBD, 1.0f);
            w.norm(blk + "post_ffw_norm", N_EMBD, 1.0f);
        }
    }
    return w.write(path);
}

}  // namespace

int gpu_layers = 0;

llama_model * model_of(const Shape & shape) {
    static std::map<std::string, llama_model_ptr> models;
    llama_model_ptr & model = models[shape.name];
    if (!model) {
        const std::string path = folder() + "/" + shape.name + ".gguf";
        if (!write_model(shape, path)) {
            fprintf(stderr, "cannot write %s\n", path.c_str());
            exit(2);
        }
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = gpu_layers;
        model.reset(llama_model_load_from_file(path.c_str(), params));
        if (!model) {
            fprintf(stderr, "cannot load %s\n%s\n", path.c_str(), take_log().c_str());
            exit(2);
        }
    }
    return model.get();
}
