// The file of a calibration: for each layer, the matrices M of its KV heads by which keys are stored, y = M key, and the centers that
// values are stored without. `cargo kv calibrate` writes it (calibrate/), ggml-ext-calibrated.h computes with what is in it.
//
//     general.type         "kv-calibration"
//     kv-cal.version       2
//     kv-cal.architecture  of the model
//     kv-cal.model         ggml_ext_model_digest
//     kv-cal.text, kv-cal.tokens
//     blk.N.k_cal          f16 [head size, head size, KV heads]: row after row of M, head after head
//     blk.N.v_center       f32 [head size of values, KV heads]; may be missing
#pragma once

#include "ggml-ext-seam.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

struct ggml_ext_calibration {
    struct layer {
        int64_t            size = 0, heads = 0;
        std::vector<float> m;      // head after head, row after row
        std::vector<float> center; // of values, head after head; none where it is empty
    };

    std::string          path, architecture, text;
    uint64_t             model  = 0; // digest of the model
    uint64_t             digest = 0; // of the matrices and centers
    uint32_t             tokens = 0;
    std::map<int, layer> layers;
};

// Throws where the file cannot be read or is no calibration.
ggml_ext_calibration ggml_ext_calibration_read(const std::string & path);

// The digest is what reading finds. Throws where the file cannot be written.
void ggml_ext_calibration_write(const ggml_ext_calibration & what, const std::string & path);

// The inverse of each matrix, transposed, computed in f64. Throws where there is none.
std::vector<float> ggml_ext_inverse_transposed(const ggml_ext_calibration::layer & of);

// Puts the bands of components of a layer where the rows of its cache type have them.
void ggml_ext_order_bands(ggml_type type, ggml_ext_calibration::layer & of);

// Where a model was loaded from; empty where that is not known.
void        ggml_ext_model_loaded(const void * model, const std::string & path);
std::string ggml_ext_model_path(const void * model);

// Which model it is: its architecture, the shape of its attention, and the norms and biases of all layers. Those are the same
// numbers on every device and in every quantization of a model, so one calibration serves all of these.
template <typename Model> uint64_t ggml_ext_model_digest(const Model & model) {
    const auto &         hparams = model.hparams;
    const std::string    arch    = model.arch_name();
    std::vector<uint8_t> bytes(arch.begin(), arch.end());
    const auto add = [&](const void * data, size_t n) {
        const size_t at = bytes.size();
        bytes.resize(at + n);
        if (n > 0) {
            memcpy(bytes.data() + at, data, n);
        }
    };
    bool any = false;
    std::vector<float> values;
    const auto add_tensor = [&](const ggml_tensor * t) {
        const int64_t n = t ? ggml_nelements(t) : 0;
        values.resize(n);
        values.resize(n > 0 ? ggml_ext_read_floats(t, 0, n, values.data()) : 0);
        any = any || !values.empty();
        add(values.data(), values.size()*sizeof(float));
    };
    for (uint32_t il = 0; il < hparams.n_layer(); il++) {
        const uint32_t shape[] = { il, hparams.n_head(il), hparams.n_head_kv(il), hparams.n_embd_head_k(il) };
        add(shape, sizeof(shape));
        const auto & layer = model.layers[il];
        for (const ggml_tensor * t : { layer.attn_norm, layer.attn_q_norm, layer.attn_k_norm, layer.wqkv_b, layer.wq_b, layer.wk_b, layer.ffn_norm }) {
            // what has two dimensions may lie repacked
            add_tensor(t && ggml_nrows(t) == 1 ? t : nullptr);
        }
    }
    add_tensor(model.output_norm);
    if (const ggml_tensor * t = model.tok_embd; !any && t && t->buffer) {
        std::vector<uint8_t> some(std::min<size_t>(ggml_nbytes(t), 1 << 16));
        ggml_backend_tensor_get(t, some.data(), 0, some.size());
        add(some.data(), some.size());
    }
    return ggml_ext_state_checksum(bytes.data(), bytes.size());
}
