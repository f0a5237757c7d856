// The caches of every fixture, in bytes, for `cargo kv plan` to be compared with.
#pragma once

#include <string>

// Writes the header of each model to `dir` and prints a line for each context: what it was asked for, and its bytes.
void print_sizes(const std::string & dir);
