// The center of the values of a head: what a cache may take off each of them, since shares of attention sum up to one and the center
// can be added to its result.
//
// An error of a stored value is as large as the value, and reaches a result by the value's share p of it. So what is stored should be
// small where p^2 is large: the center is the mean of all values weighted by p^2, over queries and cells. The plain mean does harm: most
// of p^2 falls on the first cell of a text, whose value is nearly nothing in many heads, and would become the largest.
#pragma once

#include <cstddef>
#include <vector>

// Attention as FLASH_ATTN_EXT has it, for one query head.
struct Softmax {
    float scale = 1.0f, softcap = 0.0f, slope = 1.0f;

    // Of products of a query with keys, and what a mask has for them, the shares of attention, in place. False: there are too few cells to
    // tell anything.
    bool shares(float * products, const float * mask, size_t n) const;
};

// ALiBi's factor of the mask for a query head.
float alibi_slope(float max_bias, int head, int heads);

class Center {
  public:
    explicit Center(int size) : sum_(size) {}

    // The shares of `n` cells in one result, and their values, cell after cell.
    void add(const float * shares, const float * values, size_t n);

    // Empty where nothing was seen.
    std::vector<float> mean() const;

  private:
    std::vector<double> sum_;
    double              weight_ = 0.0;
};
