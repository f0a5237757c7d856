// kv-random-model: a model of random weights, for measuring where no real one can be fetched.
//
//     kv-random-model [--layers 32] -o FILE
//
// It has the shape of Llama 3.1 8B and weights of q4_0 (4.5 GB). What it says means nothing, but its activations are of usual size,
// so all ops take the time that they take in a real model. Its vocabulary has a token for each byte, so that it reads any text.

#include "../harness/harness.h"
#include "../harness/random.h"

#include "ggml.h"
#include "gguf.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr int64_t N_VOCAB = 128256, N_EMBD = 4096, N_FF = 14336, N_HEAD = 32, N_HEAD_KV = 8, HEAD_SIZE = 128;

// A block of q4_0: a scale, then 32 codes, whose values are from -8 to 7.
constexpr size_t VALUES = 32, CODE_BYTES = VALUES/2, BLOCK_BYTES = sizeof(ggml_fp16_t) + CODE_BYTES;
constexpr float  SPREAD = 4.61f; // of the values

[[noreturn]] void fail(const std::string & why) {
    fprintf(stderr, "kv-random-model: %s\n", why.c_str());
    exit(1);
}

struct File {
    std::string path;
    FILE *      file;

    explicit File(const std::string & path) : path(path), file(fopen(path.c_str(), "ab")) {
        if (!file) {
            fail("cannot write " + path);
        }
    }

    void add(const void * data, size_t size) {
        if (fwrite(data, 1, size, file) != size) {
            fail("cannot write " + path + ": is the disk full?");
        }
    }

    void close() {
        if (fclose(file) != 0) {
            fail("cannot write " + path + ": is the disk full?");
        }
    }
};

// First what it holds, then the weights one after the other: they are more than memory may have.
class Writer {
  public:
    explicit Writer(int n_layer) {
        ctx_.reset(ggml_init({ ggml_tensor_overhead()*(size_t) (16*n_layer + 16), nullptr, true }));
        gguf_.reset(gguf_init_empty());
    }

    void text(const char * name, const char * value)    { gguf_set_val_str(gguf_.get(), name, value); }
    void number(const char * name, int64_t value)       { gguf_set_val_u32(gguf_.get(), name, (uint32_t) value); }
    void number(const char * name, float value)         { gguf_set_val_f32(gguf_.get(), name, value); }

    void vocabulary() {
        std::vector<std::string> tokens = { "<unk>", "<s>", "</s>" };
        std::vector<int32_t>     types  = { 2, 3, 3 }; // unknown, control, control
        for (int byte = 0; byte < 256; byte++) {
            char name[8];
            snprintf(name, sizeof name, "<0x%02X>", byte);
            tokens.push_back(name);
            types.push_back(6);
        }
        while ((int64_t) tokens.size() < N_VOCAB) {
            tokens.push_back("token" + std::to_string(tokens.size()));
            types.push_back(1);
        }
        std::vector<const char *> names;
        for (const std::string & token : tokens) {
            names.push_back(token.c_str());
        }
        const std::vector<float> scores(tokens.size(), 0.0f);
        text("tokenizer.ggml.model", "llama");
        gguf_set_arr_str(gguf_.get(), "tokenizer.ggml.tokens", names.data(), names.size());
        gguf_set_arr_data(gguf_.get(), "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
        gguf_set_arr_data(gguf_.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
        number("tokenizer.ggml.bos_token_id", (int64_t) 1);
        number("tokenizer.ggml.eos_token_id", (int64_t) 2);
        number("tokenizer.ggml.unknown_token_id", (int64_t) 0);
    }

    // Results have `gain` times the size of what comes in.
    void weight(const std::string & name, int64_t n_in, int64_t n_out, float gain) {
        add(ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_Q4_0, n_in, n_out), name, gain/std::sqrt((float) n_in));
    }

    void norm(const std::string & name) { add(ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, N_EMBD), name, 1.0f); }

    void write(const std::string & path) {
        if (!gguf_write_to_file(gguf_.get(), path.c_str(), true)) {
            fail("cannot write " + path);
        }
        File file(path);
        for (const Tensor & t : tensors_) {
            const size_t size = ggml_nbytes(t.tensor);
            if (t.tensor->type == GGML_TYPE_F32) {
                const std::vector<float> ones(size/sizeof(float), t.size);
                file.add(ones.data(), size);
            } else {
                blocks(file, size/BLOCK_BYTES, t.size);
            }
            const std::array<char, 64> zeros = {};
            const size_t align = gguf_get_alignment(gguf_.get());
            file.add(zeros.data(), (align - size % align) % align);
        }
        file.close();
    }

  private:
    struct Tensor {
        const ggml_tensor * tensor;
        float               size; // of its values
    };

    std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx_  = { nullptr, ggml_free };
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> gguf_ = { nullptr, gguf_free };
    std::vector<Tensor> tensors_;
    Rng                 rng_ = Rng(1);

    void add(ggml_tensor * t, const std::string & name, float size) {
        ggml_set_name(t, (name + ".weight").c_str());
        gguf_add_tensor(gguf_.get(), t);
        tensors_.push_back({ t, size });
    }

    void blocks(File & file, size_t n, float size) {
        ggml_fp16_t scales[64];
        for (int i = 0; i < 64; i++) {
            scales[i] = ggml_fp32_to_fp16(size/SPREAD*(0.75f + 0.5f*(float) i/63.0f));
        }
        std::vector<uint8_t> bytes;
        while (n > 0) {
            const size_t now = n < 65536 ? n : 65536;
            bytes.resize(now*BLOCK_BYTES);
            for (uint8_t * at = bytes.data(); at < bytes.data() + bytes.size(); at += BLOCK_BYTES) {
                const uint64_t codes[CODE_BYTES/8] = { rng_.next(), rng_.next() };
                memcpy(at, &scales[rng_.next() % 64], sizeof(ggml_fp16_t));
                memcpy(at + sizeof(ggml_fp16_t), codes, CODE_BYTES);
            }
            file.add(bytes.data(), bytes.size());
            n -= now;
        }
    }
};

}  // namespace

int main(int argc, char ** argv) {
    int         n_layer = 32;
    std::string path;
    read_options(argc, argv, {
        { "--layers", "N",    [&](const char * value) { n_layer = atoi(value); } },
        { "-o",       "FILE", [&](const char * value) { path = value; } },
    });
    if (path.empty() || n_layer < 1 || n_layer > 256) {
        fail("usage: kv-random-model [--layers N] -o FILE, with 1 to 256 layers");
    }

    Writer w(n_layer);
    w.text("general.architecture", "llama");
    w.text("general.name", "random weights");
    w.number("general.file_type", (int64_t) 2); // mostly q4_0
    w.number("llama.vocab_size", N_VOCAB);
    w.number("llama.context_length", (int64_t) 131072);
    w.number("llama.embedding_length", N_EMBD);
    w.number("llama.feed_forward_length", N_FF);
    w.number("llama.block_count", (int64_t) n_layer);
    w.number("llama.attention.head_count", N_HEAD);
    w.number("llama.attention.head_count_kv", N_HEAD_KV);
    w.number("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    w.number("llama.rope.dimension_count", HEAD_SIZE);
    w.number("llama.rope.freq_base", 500000.0f);
    w.vocabulary();

    w.weight("token_embd", N_EMBD, N_VOCAB, 16.0f);
    for (int il = 0; il < n_layer; il++) {
        const std::string blk = "blk." + std::to_string(il) + ".";
        w.norm(blk + "attn_norm");
        // attention is neither even nor a single cell
        w.weight(blk + "attn_q", N_EMBD, N_HEAD*HEAD_SIZE, 1.2f);
        w.weight(blk + "attn_k", N_EMBD, N_HEAD_KV*HEAD_SIZE, 1.2f);
        w.weight(blk + "attn_v", N_EMBD, N_HEAD_KV*HEAD_SIZE, 1.0f);
        w.weight(blk + "attn_output", N_HEAD*HEAD_SIZE, N_EMBD, 1.0f);
        w.norm(blk + "ffn_norm");
        w.weight(blk + "ffn_gate", N_EMBD, N_FF, 1.0f);
        w.weight(blk + "ffn_up", N_EMBD, N_FF, 1.0f);
        w.weight(blk + "ffn_down", N_FF, N_EMBD, 1.0f);
    }
    w.norm("output_norm");
    w.weight("output", N_EMBD, N_VOCAB, 2.0f);
    w.write(path);
    return 0;
}
