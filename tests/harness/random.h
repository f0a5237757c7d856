// Random numbers that are the same in every run and on every machine: splitmix64.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct Rng {
    uint64_t state;

    explicit Rng(uint64_t seed) : state(seed*0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull) {}

    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27))*0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    int64_t below(int64_t n) { return (int64_t) (next() % (uint64_t) n); }

    // [0, 1)
    float uniform() { return (float) (next() >> 40)/(float) (1 << 24); }

    float normal() {
        const double u = 1.0 - uniform();
        const double v = uniform();
        return (float) (std::sqrt(-2.0*std::log(u))*std::cos(6.283185307179586*v));
    }

    std::vector<float> normals(size_t n, float scale = 1.0f) {
        std::vector<float> res(n);
        for (float & x : res) {
            x = scale*normal();
        }
        return res;
    }

    // not std::shuffle, which every library defines in its own way
    template <typename T> void shuffle(std::vector<T> & items) {
        for (size_t i = items.size(); i > 1; i--) {
            std::swap(items[i - 1], items[(size_t) below((int64_t) i)]);
        }
    }

    // n numbers below `limit`, all different, in random order
    std::vector<int64_t> distinct(size_t n, int64_t limit) {
        std::vector<int64_t> all((size_t) limit);
        for (size_t i = 0; i < all.size(); i++) {
            all[i] = (int64_t) i;
        }
        shuffle(all);
        all.resize(n);
        return all;
    }
};

// FNV-1a
inline uint64_t seed_of(const std::string & text) {
    uint64_t h = 14695981039346656037ull;
    for (unsigned char c : text) {
        h = (h ^ c)*1099511628211ull;
    }
    return h;
}
