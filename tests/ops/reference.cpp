#include "reference.h"

#include <algorithm>
#include <cmath>

float AttentionShape::scale_or_default() const {
    return scale != 0.0f ? scale : 1.0f/std::sqrt((float) dk);
}

namespace {

// ALiBi: the slope by which head h multiplies its mask.
double slope(const AttentionShape & s, int64_t h) {
    if (s.max_bias <= 0.0f) {
        return 1.0;
    }
    const int64_t pow2 = (int64_t) 1 << (int64_t) std::floor(std::log2((double) s.n_head));
    return h < pow2 ? std::pow(2.0, -(double) s.max_bias/pow2*(h + 1))
                    : std::pow(2.0, -(double) s.max_bias/2.0/pow2*(2*(h - pow2) + 1));
}

}  // namespace

std::vector<double> attention_reference(const AttentionShape & s, const std::vector<float> & q, const std::vector<float> & k,
                                        const std::vector<float> & v, const std::vector<float> & mask, int64_t mask_heads,
                                        const std::vector<float> & sinks) {
    std::vector<double> out(s.n_stream*s.n_q*s.n_head*s.dv, 0.0);
    std::vector<double> score(s.n_kv);

    for (int64_t st = 0; st < s.n_stream; st++) {
        for (int64_t iq = 0; iq < s.n_q; iq++) {
            for (int64_t h = 0; h < s.n_head; h++) {
                const int64_t h_kv  = h/(s.n_head/s.n_head_kv);
                const float * q_row = &q[((st*s.n_q + iq)*s.n_head + h)*s.dk];
                double top = sinks.empty() ? -INFINITY : sinks[h];

                for (int64_t c = 0; c < s.n_kv; c++) {
                    const double bias = mask.empty() ? 0.0 :
                        slope(s, h)*mask[((st*mask_heads + h%mask_heads)*s.n_q + iq)*s.n_kv + c];
                    if (std::isinf(bias)) {
                        score[c] = -INFINITY;
                        continue;
                    }
                    const float * k_row = &k[((st*s.n_kv + c)*s.n_head_kv + h_kv)*s.dk];
                    double dot = 0.0;
                    for (int64_t i = 0; i < s.dk; i++) {
                        dot += (double) q_row[i]*k_row[i];
                    }
                    dot *= s.scale_or_default();
                    if (s.softcap != 0.0f) {
                        dot = s.softcap*std::tanh(dot/s.softcap);
                    }
                    score[c] = dot + bias;
                    top = std::max(top, score[c]);
                }

                if (std::isinf(top)) {
                    continue;
                }
                double   sum = sinks.empty() ? 0.0 : std::exp(sinks[h] - top);
                double * o   = &out[((st*s.n_q + iq)*s.n_head + h)*s.dv];
                for (int64_t c = 0; c < s.n_kv; c++) {
                    if (std::isinf(score[c])) {
                        continue;
                    }
                    const double  w     = std::exp(score[c] - top);
                    const float * v_row = &v[((st*s.n_kv + c)*s.n_head_kv + h_kv)*s.dv];
                    sum += w;
                    for (int64_t i = 0; i < s.dv; i++) {
                        o[i] += w*v_row[i];
                    }
                }
                for (int64_t i = 0; i < s.dv; i++) {
                    o[i] /= sum;
                }
            }
        }
    }
    return out;
}

double relative_error(const float * got, const double * want, int64_t n) {
    double diff = 0.0;
    double norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        diff += (got[i] - want[i])*(got[i] - want[i]);
        norm += want[i]*want[i];
    }
    return diff == 0.0 ? 0.0 : std::sqrt(diff/norm);
}

double worst_error(const std::vector<float> & got, const std::vector<double> & want, int64_t n) {
    double worst = 0.0;
    for (size_t i = 0; i < got.size(); i += n) {
        const double e = relative_error(&got[i], &want[i], n);
        if (!(e <= worst)) {
            worst = e;  // NaN stays
        }
        if (std::isnan(e)) {
            return e;
        }
    }
    return worst;
}

double total_error(const std::vector<float> & got, const std::vector<double> & want) {
    return relative_error(got.data(), want.data(), (int64_t) got.size());
}
