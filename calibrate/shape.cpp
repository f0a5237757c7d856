#include "shape.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>

void Moment::add(const float * rows, size_t n, int part, int parts) {
    std::vector<float> line(d_);
    for (int i = part; i < d_; i += parts) {
        std::fill(line.begin(), line.end(), 0.0f);
        float * __restrict to = line.data();
        size_t t = 0;
        for (; t + 4 <= n; t += 4) {
            const float * a = rows + t*d_, * b = a + d_, * c = b + d_, * d = c + d_;
            const float   x = a[i], y = b[i], z = c[i], w = d[i];
            for (int j = i; j < d_; j++) {
                to[j] += x*a[j] + y*b[j] + z*c[j] + w*d[j];
            }
        }
        for (; t < n; t++) {
            const float * a = rows + t*d_;
            for (int j = i; j < d_; j++) {
                to[j] += a[i]*a[j];
            }
        }
        for (int j = i; j < d_; j++) {
            sum_[(size_t) i*d_ + j] += line[j];
        }
    }
}

std::vector<double> Moment::mean() const {
    std::vector<double> res((size_t) d_*d_);
    for (int i = 0; i < d_; i++) {
        for (int j = i; j < d_; j++) {
            res[(size_t) i*d_ + j] = res[(size_t) j*d_ + i] = n_ > 0 ? sum_[(size_t) i*d_ + j]/n_ : 0.0;
        }
    }
    return res;
}

void Residuals::next(const float * key, float * residual) {
    constexpr int   GROUP = 64;
    constexpr float RHO   = 0.7f;
    if (place_ == 0) {
        first_.assign(key, key + d_);
    }
    float restart = 0.0f, chained = 0.0f;
    for (int i = 0; i < d_; i++) {
        const float u = key[i] - first_[i], r = u - RHO*before_[i];
        restart += u*u;
        chained += r*r;
    }
    const float rho = place_ > 0 && chained < restart ? RHO : 0.0f;
    for (int i = 0; i < d_; i++) {
        const float u = key[i] - first_[i];
        residual[i]   = u - rho*before_[i];
        before_[i]    = u;
    }
    place_ = (place_ + 1)%GROUP;
}

// Householder's reduction to a tridiagonal matrix, then the implicit QL method. All loops run along rows.
void eigen(std::vector<double> & a, int n, std::vector<double> & d, std::vector<double> & z) {
    const auto row = [n](std::vector<double> & m, int i) { return m.data() + (size_t) i*n; };
    std::vector<double> e(n), beta(n), p(n);
    d.assign(n, 0.0);
    for (int k = 0; k + 2 < n; k++) {
        double * v = row(a, k); // row k right of the diagonal becomes the vector of the reflection
        double norm = 0.0;
        for (int j = k + 1; j < n; j++) {
            norm += v[j]*v[j];
        }
        norm = std::sqrt(norm);
        e[k] = v[k + 1] > 0.0 ? -norm : norm;
        if (norm == 0.0) {
            continue;
        }
        const double head = v[k + 1] - e[k];
        beta[k] = 1.0/(norm*(norm + std::abs(v[k + 1])));
        v[k + 1] = head;
        double pv = 0.0;
        for (int i = k + 1; i < n; i++) {
            const double * r = row(a, i);
            double s = 0.0;
            for (int j = k + 1; j < n; j++) {
                s += r[j]*v[j];
            }
            p[i] = beta[k]*s;
            pv += p[i]*v[i];
        }
        for (int i = k + 1; i < n; i++) {
            p[i] -= 0.5*beta[k]*pv*v[i];
        }
        for (int i = k + 1; i < n; i++) {
            double * __restrict r = row(a, i);
            const double x = v[i], y = p[i];
            for (int j = k + 1; j < n; j++) {
                r[j] -= x*p[j] + y*v[j];
            }
        }
    }
    for (int i = 0; i < n; i++) {
        d[i] = a[(size_t) i*n + i];
    }
    if (n > 1) {
        e[n - 2] = a[(size_t) (n - 2)*n + n - 1];
    }
    e[n - 1] = 0.0;

    // the product of the reflections, transposed: row i will be vector i
    z.assign((size_t) n*n, 0.0);
    for (int i = 0; i < n; i++) {
        z[(size_t) i*n + i] = 1.0;
    }
    for (int k = n - 3; k >= 0; k--) {
        const double * v = row(a, k);
        for (int i = k + 1; i < n && beta[k] > 0.0; i++) {
            double * __restrict r = row(z, i);
            double s = 0.0;
            for (int j = k + 1; j < n; j++) {
                s += r[j]*v[j];
            }
            s *= beta[k];
            for (int j = k + 1; j < n; j++) {
                r[j] -= s*v[j];
            }
        }
    }

    for (int l = 0; l < n; l++) {
        for (int turn = 0;; turn++) {
            int m = l;
            while (m + 1 < n && std::abs(e[m]) > 1e-15*(std::abs(d[m]) + std::abs(d[m + 1]))) {
                m++;
            }
            if (m == l) {
                break;
            }
            if (turn == 60) {
                throw std::runtime_error("the eigenvalues of a moment were not found");
            }
            double g = (d[l + 1] - d[l])/(2.0*e[l]), r = std::hypot(g, 1.0), s = 1.0, c = 1.0, sum = 0.0;
            g = d[m] - d[l] + e[l]/(g + std::copysign(r, g));
            int i = m - 1;
            for (; i >= l; i--) {
                const double f = s*e[i], b = c*e[i];
                e[i + 1] = r = std::hypot(f, g);
                if (r == 0.0) {
                    d[i + 1] -= sum;
                    e[m] = 0.0;
                    break;
                }
                s = f/r;
                c = g/r;
                g = d[i + 1] - sum;
                r = (d[i] - g)*s + 2.0*c*b;
                sum = s*r;
                d[i + 1] = g + sum;
                g = c*r - b;
                double * __restrict lower = row(z, i), * __restrict upper = row(z, i + 1);
                for (int k = 0; k < n; k++) {
                    const double x = upper[k], y = lower[k];
                    upper[k] = s*y + c*x;
                    lower[k] = c*y - s*x;
                }
            }
            if (r == 0.0 && i >= l) {
                continue;
            }
            d[l] -= sum;
            e[l] = g;
            e[m] = 0.0;
        }
    }

    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int i, int j) { return d[i] < d[j]; });
    const std::vector<double> values = d, vectors = z;
    for (int i = 0; i < n; i++) {
        d[i] = values[order[i]];
        std::copy_n(vectors.begin() + (size_t) order[i]*n, n, z.begin() + (size_t) i*n);
    }
}

namespace {

// Orthonormal rows from normal numbers of a fixed seed, the same for all heads.
std::vector<double> rotation(int n) {
    uint64_t state = 0x9e3779b97f4a7c15ull*(uint64_t) n;
    const auto uniform = [&] {
        state = state*6364136223846793005ull + 1442695040888963407ull;
        return ((double) (state >> 11) + 0.5)/9007199254740992.0;
    };
    std::vector<double> res((size_t) n*n);
    for (double & x : res) {
        const double radius = std::sqrt(-2.0*std::log(uniform()));
        x = radius*std::cos(6.283185307179586*uniform());
    }
    for (int i = 0; i < n; i++) {
        double * r = &res[(size_t) i*n];
        for (int turn = 0; turn < 2; turn++) {
            for (int j = 0; j < i; j++) {
                const double * q = &res[(size_t) j*n];
                const double   s = std::inner_product(r, r + n, q, 0.0);
                for (int k = 0; k < n; k++) {
                    r[k] -= s*q[k];
                }
            }
        }
        const double norm = std::sqrt(std::inner_product(r, r + n, r, 0.0));
        for (int k = 0; k < n; k++) {
            r[k] /= norm;
        }
    }
    return res;
}

// The upper triangular A with A^T A = s.
std::vector<double> cholesky(const std::vector<double> & s, int n) {
    std::vector<double> a = s;
    for (int i = 0; i < n; i++) {
        double * __restrict r = &a[(size_t) i*n];
        std::fill_n(r, i, 0.0);
        const double scale = 1.0/std::sqrt(r[i]);
        for (int j = i; j < n; j++) {
            r[j] *= scale;
        }
        for (int k = i + 1; k < n; k++) {
            double * __restrict to = &a[(size_t) k*n];
            const double f = r[k];
            for (int j = k; j < n; j++) {
                to[j] -= f*r[j];
            }
        }
    }
    return a;
}

// x y, or x y^T: rows of n.
std::vector<double> product(const std::vector<double> & x, const std::vector<double> & y, int n, bool transposed) {
    std::vector<double> res((size_t) n*n);
    for (int i = 0; i < n; i++) {
        double * __restrict r = &res[(size_t) i*n];
        for (int k = 0; k < n; k++) {
            const double * q = &y[(size_t) k*n];
            if (transposed) {
                r[k] = std::inner_product(q, q + n, &x[(size_t) i*n], 0.0);
                continue;
            }
            const double f = x[(size_t) i*n + k];
            for (int j = 0; f != 0.0 && j < n; j++) {
                r[j] += f*q[j];
            }
        }
    }
    return res;
}

double trace(const std::vector<double> & s, int n) {
    double res = 0.0;
    for (int i = 0; i < n; i++) {
        res += s[(size_t) i*n + i];
    }
    return res;
}

}  // namespace

std::vector<float> shape_matrix(const Moment & queries, const Moment & residuals) {
    constexpr double RIDGE = 0.01, LEAST = 1e-6;
    const int n = queries.size();
    std::vector<double> s_q = queries.mean();
    const std::vector<double> s_r = residuals.mean();
    const double q = trace(s_q, n)/n, r = trace(s_r, n)/n;

    std::vector<double> y((size_t) n*n); // before the bands are rotated
    if (q > 0.0 && r > 0.0 && std::isfinite(q) && std::isfinite(r)) {
        for (int i = 0; i < n; i++) {
            s_q[(size_t) i*n + i] += RIDGE*q;
        }
        const std::vector<double> a = cholesky(s_q, n);
        std::vector<double> shape = product(product(a, s_r, n, false), a, n, true), l, p;
        eigen(shape, n, l, p);
        std::reverse(l.begin(), l.end());
        for (int i = 0; i < n/2; i++) {
            std::swap_ranges(&p[(size_t) i*n], &p[(size_t) i*n] + n, &p[(size_t) (n - 1 - i)*n]);
        }
        y = product(p, a, n, false);
        for (int i = 0; i < n; i++) {
            const double scale = std::pow(std::max(l[i], LEAST*l[0]), -0.25);
            for (int j = 0; j < n; j++) {
                y[(size_t) i*n + j] *= scale;
            }
        }
    } else {
        for (int i = 0; i < n; i++) {
            y[(size_t) i*n + i] = 1.0;
        }
    }

    std::vector<float> res((size_t) n*n);
    for (int first = 0; first < n; first += BAND) {
        const int size = std::min(BAND, n - first);
        const std::vector<double> turn = rotation(size);
        for (int i = 0; i < size; i++) {
            for (int j = 0; j < n; j++) {
                double s = 0.0;
                for (int k = 0; k < size; k++) {
                    s += turn[(size_t) i*size + k]*y[(size_t) (first + k)*n + j];
                }
                res[(size_t) (first + i)*n + j] = (float) s;
            }
        }
    }
    return res;
}
