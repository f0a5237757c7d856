// The shape of keys: from second moments of queries and of what delta has to code, the matrix that keys are stored by.
//
// With S_q the second moment of the queries that meet the keys of a head, an error e of a key costs e^T S_q e on average. With
// S_r the second moment of what is coded, let A^T A = S_q + a little, and
//
//     A S_r A^T = P diag(l) P^T,  l descending            y = diag(l^-1/4) P^T A key
//
// In y all directions cost the same, the components are uncorrelated, and the first ones have most to code: their second
// moment is sqrt(l). Bands of 32 components are rotated within themselves, so that the values of a band look alike. (Any factor
// A gives the same y: another one is QA with an orthogonal Q, and P becomes QP. The Cholesky factor is the cheapest.)
#pragma once

#include <cstddef>
#include <vector>

constexpr int BAND = 32;

// Sums of x x^T over many rows: in f32 over the rows of one call, in f64 over calls. The upper triangle alone is kept.
class Moment {
  public:
    explicit Moment(int size) : d_(size), sum_((size_t) size*size) {}

    // `n` rows one after the other. Those i of the matrix that are `part` modulo `parts`: threads share them.
    void add(const float * rows, size_t n, int part, int parts);
    void count(size_t n) { n_ += n; }

    int size() const { return d_; }
    // The mean, as a whole symmetric matrix.
    std::vector<double> mean() const;

  private:
    int                 d_;
    size_t              n_ = 0;
    std::vector<double> sum_;
};

// What delta has left to code of the keys of one head, key after key: groups of 64 that are coded against their first key, each
// key by 0.7 of the one before or by nothing (ggml-ext/src/codec/delta.rs).
class Residuals {
  public:
    explicit Residuals(int size) : d_(size), first_(size), before_(size) {}

    void next(const float * key, float * residual);
    void restart() { place_ = 0; }

  private:
    int                d_, place_ = 0;
    std::vector<float> first_, before_;
};

// Of a symmetric matrix of n x n, which is overwritten: its eigenvalues, ascending, and row i of `vectors` for value i.
void eigen(std::vector<double> & matrix, int n, std::vector<double> & values, std::vector<double> & vectors);

// The matrix M of a head, row after row: y = M key. Where nothing was seen, that of the rotations alone.
std::vector<float> shape_matrix(const Moment & queries, const Moment & residuals);
