#include "center.h"

#include <algorithm>
#include <cmath>

bool Softmax::shares(float * products, const float * mask, size_t n) const {
    constexpr size_t FEW = 64;
    float  most = -INFINITY;
    size_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        const float x = softcap > 0.0f ? softcap*std::tanh(scale*products[i]/softcap) : scale*products[i];
        products[i] = x + (mask ? slope*mask[i] : 0.0f);
        most        = std::max(most, products[i]);
        seen       += products[i] > -INFINITY;
    }
    if (seen < FEW) {
        return false;
    }
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        products[i] = std::exp(products[i] - most);
        sum        += products[i];
    }
    for (size_t i = 0; i < n; i++) {
        products[i] = (float) (products[i]/sum);
    }
    return true;
}

float alibi_slope(float max_bias, int head, int heads) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    const int   whole = 1 << (int) std::floor(std::log2((float) heads));
    const float step  = head < whole ? max_bias : max_bias/2;
    return std::exp2(-step/whole*(head < whole ? head + 1 : 2*(head - whole) + 1));
}

void Center::add(const float * shares, const float * values, size_t n) {
    // squares of smaller shares do not matter
    const float  least = 1e-3f*(*std::max_element(shares, shares + n));
    const size_t d     = sum_.size();
    for (size_t i = 0; i < n; i++) {
        if (shares[i] < least) {
            continue;
        }
        const double w = (double) shares[i]*shares[i];
        for (size_t j = 0; j < d; j++) {
            sum_[j] += w*values[i*d + j];
        }
        weight_ += w;
    }
}

std::vector<float> Center::mean() const {
    std::vector<float> res;
    for (size_t j = 0; weight_ > 0.0 && j < sum_.size(); j++) {
        res.push_back((float) (sum_[j]/weight_));
    }
    return res;
}
