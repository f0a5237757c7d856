// What the command-line tools around a real model share: the model, a text, and contexts for pairs of cache types.
#pragma once

#include "../harness/tokens.h"

#include <memory>
#include <string>
#include <vector>

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;

[[noreturn]] void fail(const std::string & why);

// All of these end the program where something is wrong.

// Loads backends too; errors of llama.cpp are printed from here on.
Model read_model(const std::string & path, int gpu_layers = 0);

// The tokens of a text file, of which there must be as many as are needed.
std::vector<llama_token> read_tokens(const std::string & path, const llama_model * model, int needed);

struct ContextSize {
    int cells;
    int batch, ubatch; // tokens of a batch, and of those that are computed at once
    int threads;
    int sequences = 1; // share the cells
};

// Of a pair K/V, with flash attention.
Context new_context(llama_model * model, const std::string & pair, const ContextSize & size);
