// The shim's part in ggml-base: files of calibrations, and where models come from.

#include "ggml-ext-calibration.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

namespace {

constexpr const char * KEY_TYPE         = "general.type";
constexpr const char * KEY_VERSION      = "kv-cal.version";
constexpr const char * KEY_ARCHITECTURE = "kv-cal.architecture";
constexpr const char * KEY_MODEL        = "kv-cal.model";
constexpr const char * KEY_TEXT         = "kv-cal.text";
constexpr const char * KEY_TOKENS       = "kv-cal.tokens";
constexpr const char * KEYS             = "blk.%d.k_cal";
constexpr const char * CENTERS          = "blk.%d.v_center";
constexpr const char * TYPE             = "kv-calibration";

constexpr uint32_t VERSION = 2;
constexpr int64_t  LARGEST = 1024; // head size, and number of heads

[[noreturn]] void refuse(const std::string & path, const std::string & why) {
    throw std::runtime_error("calibration " + path + ": " + why);
}

class Reader {
  public:
    explicit Reader(const std::string & path) : path_(path) {
        // a missing file gets a message of its own, not a log line of gguf's
        if (FILE * file = fopen(path.c_str(), "rb")) {
            fclose(file);
        } else {
            refuse(path, "the file cannot be opened");
        }
        ggml_context * data = nullptr;
        gguf_.reset(gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ false, /*.ctx =*/ &data }));
        data_.reset(data);
        if (!gguf_ || text(KEY_TYPE) != TYPE) {
            refuse(path, "this is no file of `cargo kv calibrate`");
        }
    }

    std::string text(const char * name) const {
        const int64_t id = find(name, GGUF_TYPE_STRING);
        return id < 0 ? "" : gguf_get_val_str(gguf_.get(), id);
    }
    uint32_t number(const char * name) const {
        const int64_t id = find(name, GGUF_TYPE_UINT32);
        return id < 0 ? 0 : gguf_get_val_u32(gguf_.get(), id);
    }
    uint64_t long_number(const char * name) const {
        const int64_t id = find(name, GGUF_TYPE_UINT64);
        return id < 0 ? 0 : gguf_get_val_u64(gguf_.get(), id);
    }

    // All tensors of a name, each with the number of its layer, and a sum of its bytes.
    template <typename F> void for_each(const char * name, std::vector<uint64_t> & sums, F && take) const {
        const std::string all = std::string(name) + "%n";
        for (ggml_tensor * t = ggml_get_first_tensor(data_.get()); t; t = ggml_get_next_tensor(data_.get(), t)) {
            int il = -1, end = 0;
            if (sscanf(t->name, all.c_str(), &il, &end) == 1 && il >= 0 && end > 0 && t->name[end] == 0) {
                take(il, t);
                sums.push_back((uint64_t) il);
                sums.push_back(ggml_ext_state_checksum(t->data, ggml_nbytes(t)));
            }
        }
    }

  private:
    std::string      path_;
    gguf_context_ptr gguf_;
    ggml_context_ptr data_;

    int64_t find(const char * name, gguf_type type) const {
        const int64_t id = gguf_find_key(gguf_.get(), name);
        return id >= 0 && gguf_get_kv_type(gguf_.get(), id) == type ? id : -1;
    }
};

}  // namespace

ggml_ext_calibration ggml_ext_calibration_read(const std::string & path) {
    const Reader reader(path);
    const uint32_t version = reader.number(KEY_VERSION);
    if (version != VERSION) {
        refuse(path, "it has version " + std::to_string(version) + ", this build reads version " + std::to_string(VERSION) +
                         ": make it anew by `cargo kv calibrate`");
    }
    ggml_ext_calibration res;
    res.path         = path;
    res.architecture = reader.text(KEY_ARCHITECTURE);
    res.text         = reader.text(KEY_TEXT);
    res.model        = reader.long_number(KEY_MODEL);
    res.tokens       = reader.number(KEY_TOKENS);

    const auto check_numbers = [&](const ggml_tensor * t, const std::vector<float> & values) {
        if (!std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); })) {
            refuse(path, std::string(t->name) + " has values that are no numbers");
        }
    };
    std::vector<uint64_t> sums;
    reader.for_each(KEYS, sums, [&](int il, const ggml_tensor * t) {
        if (t->type != GGML_TYPE_F16 || t->ne[0] != t->ne[1] || t->ne[0] > LARGEST || t->ne[2] > LARGEST || t->ne[3] != 1) {
            refuse(path, std::string(t->name) + " has another form than matrices of heads");
        }
        ggml_ext_calibration::layer & layer = res.layers[il];
        layer.size  = t->ne[0];
        layer.heads = t->ne[2];
        layer.m.resize(ggml_nelements(t));
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) t->data, layer.m.data(), (int64_t) layer.m.size());
        check_numbers(t, layer.m);
    });
    reader.for_each(CENTERS, sums, [&](int il, const ggml_tensor * t) {
        const auto it = res.layers.find(il);
        if (t->type != GGML_TYPE_F32 || it == res.layers.end() || t->ne[0] > LARGEST || t->ne[1] != it->second.heads || t->ne[2] != 1 || t->ne[3] != 1) {
            refuse(path, std::string(t->name) + " has another form than centers of heads");
        }
        it->second.center.assign((const float *) t->data, (const float *) t->data + ggml_nelements(t));
        check_numbers(t, it->second.center);
    });
    if (res.layers.empty()) {
        refuse(path, "it has no layers");
    }
    res.digest = ggml_ext_state_checksum(sums.data(), sums.size()*sizeof(sums[0]));
    return res;
}

void ggml_ext_calibration_write(const ggml_ext_calibration & what, const std::string & path) {
    size_t bytes = 0;
    for (const auto & [_, layer] : what.layers) {
        bytes += layer.m.size()*sizeof(ggml_fp16_t) + layer.center.size()*sizeof(float) + 2*(ggml_tensor_overhead() + 64);
    }
    ggml_context_ptr ctx(ggml_init({ bytes, nullptr, false }));
    gguf_context_ptr gguf(gguf_init_empty());
    gguf_set_val_str(gguf.get(), KEY_TYPE, TYPE);
    gguf_set_val_u32(gguf.get(), KEY_VERSION, VERSION);
    gguf_set_val_str(gguf.get(), KEY_ARCHITECTURE, what.architecture.c_str());
    gguf_set_val_u64(gguf.get(), KEY_MODEL, what.model);
    gguf_set_val_str(gguf.get(), KEY_TEXT, what.text.c_str());
    gguf_set_val_u32(gguf.get(), KEY_TOKENS, what.tokens);
    for (const auto & [il, layer] : what.layers) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, layer.size, layer.size, layer.heads);
        ggml_format_name(t, KEYS, il);
        ggml_fp32_to_fp16_row(layer.m.data(), (ggml_fp16_t *) t->data, (int64_t) layer.m.size());
        gguf_add_tensor(gguf.get(), t);
        if (!layer.center.empty()) {
            t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, (int64_t) layer.center.size()/layer.heads, layer.heads);
            ggml_format_name(t, CENTERS, il);
            std::copy(layer.center.begin(), layer.center.end(), (float *) t->data);
            gguf_add_tensor(gguf.get(), t);
        }
    }
    if (!gguf_write_to_file(gguf.get(), path.c_str(), false)) {
        throw std::runtime_error("cannot write " + path);
    }
}

void ggml_ext_order_bands(ggml_type type, ggml_ext_calibration::layer & of) {
    constexpr int64_t BAND = 32;
    std::vector<int32_t> order(of.size/BAND);
    const size_t bands = ggml_ext_band_order((int32_t) type, order.data(), order.size());
    if (bands == 0) {
        return;
    }
    const std::vector<float> sorted = of.m;
    for (int64_t i = 0; i < of.heads*(int64_t) bands; i++) {
        const int64_t head = i/bands*bands;
        std::copy_n(&sorted[(head + order[i % bands])*BAND*of.size], BAND*of.size, &of.m[i*BAND*of.size]);
    }
}

std::vector<float> ggml_ext_inverse_transposed(const ggml_ext_calibration::layer & of) {
    const int64_t n = of.size;
    std::vector<float>  res(of.m.size());
    std::vector<double> a(n*n), b(n*n);
    for (int64_t head = 0; head < of.heads; head++) {
        // Gauss and Jordan, with the largest of a column as pivot
        for (int64_t i = 0; i < n*n; i++) {
            a[i] = of.m[head*n*n + i];
            b[i] = i/n == i%n ? 1.0 : 0.0;
        }
        for (int64_t k = 0; k < n; k++) {
            int64_t best = k;
            for (int64_t i = k + 1; i < n; i++) {
                best = std::abs(a[i*n + k]) > std::abs(a[best*n + k]) ? i : best;
            }
            if (std::abs(a[best*n + k]) < 1e-12) {
                throw std::runtime_error("a matrix of the calibration has no inverse");
            }
            if (best != k) {
                std::swap_ranges(&a[k*n], &a[k*n] + n, &a[best*n]);
                std::swap_ranges(&b[k*n], &b[k*n] + n, &b[best*n]);
            }
            double * __restrict ak = &a[k*n], * __restrict bk = &b[k*n];
            const double scale = 1.0/ak[k];
            for (int64_t j = 0; j < n; j++) {
                ak[j] *= scale;
                bk[j] *= scale;
            }
            for (int64_t i = 0; i < n; i++) {
                const double f = a[i*n + k];
                if (i == k || f == 0.0) {
                    continue;
                }
                double * __restrict ai = &a[i*n], * __restrict bi = &b[i*n];
                for (int64_t j = k; j < n; j++) {
                    ai[j] -= f*ak[j];
                }
                for (int64_t j = 0; j < n; j++) {
                    bi[j] -= f*bk[j];
                }
            }
        }
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                res[head*n*n + j*n + i] = (float) b[i*n + j];
            }
        }
    }
    return res;
}

namespace {

std::mutex                                    paths_mutex;
std::unordered_map<const void *, std::string> paths;

}  // namespace

void ggml_ext_model_loaded(const void * model, const std::string & path) {
    const std::lock_guard<std::mutex> lock(paths_mutex);
    paths[model] = path; // the place of a model that is gone may be another's
}

std::string ggml_ext_model_path(const void * model) {
    const std::lock_guard<std::mutex> lock(paths_mutex);
    const auto it = paths.find(model);
    return it == paths.end() ? "" : it->second;
}
