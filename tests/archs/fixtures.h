// The tiny random models of llama.cpp's own test-llama-archs, one or two for each architecture.
#pragma once

#include "llama.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

struct Fixture {
    std::string name;     // "llama, MoE"
    std::string arch;
    bool        encodes;  // an encoder, or a model without a cache, that llama.cpp's test runs by llama_encode first
    bool        one_kind; // of cache type: K and V share their rows, and llama.cpp wants one type for both

    std::function<llama_model *(size_t seed)>      load;
    std::function<bool(const std::string & path)> write; // its header as a GGUF file, without the weights
};

std::vector<Fixture> fixtures();

// mean squared difference over mean square, as upstream's test has it
double nmse_of(const std::vector<float> & wanted, const std::vector<float> & found);
