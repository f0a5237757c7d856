// Attention as ggml defines FLASH_ATTN_EXT, written out in double precision.
#pragma once

#include <cstdint>
#include <vector>

struct AttentionShape {
    int64_t dk        = 128;
    int64_t dv        = 128;
    int64_t n_head    = 4;
    int64_t n_head_kv = 2;
    int64_t n_q       = 1;
    int64_t n_kv      = 64;
    int64_t n_stream  = 1;
    float   scale     = 0.0f;  // 0: 1/sqrt(dk)
    float   max_bias  = 0.0f;
    float   softcap   = 0.0f;

    float scale_or_default() const;
};

// q [n_stream][n_q][n_head][dk], k [n_stream][n_kv][n_head_kv][dk], v likewise, mask [n_stream][mask_heads][n_q][n_kv] or
// empty, sinks [n_head] or empty; the result is [n_stream][n_q][n_head][dv]. A row whose cells are all masked is 0.
std::vector<double> attention_reference(const AttentionShape & s, const std::vector<float> & q, const std::vector<float> & k,
                                        const std::vector<float> & v, const std::vector<float> & mask, int64_t mask_heads,
                                        const std::vector<float> & sinks);

// |got - want| / |want| of one vector of n; 0/0 is 0.
double relative_error(const float * got, const double * want, int64_t n);
// The largest over all vectors of n.
double worst_error(const std::vector<float> & got, const std::vector<double> & want, int64_t n);
// Over everything as one vector.
double total_error(const std::vector<float> & got, const std::vector<double> & want);
