// What all test programs share: options, counting of checks, and the log of ggml and llama.cpp.
//
//     int main(int argc, char ** argv) {
//         begin_program("ops", argc, argv);
//         test_this();
//         return end_program();
//     }
#pragma once

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// programs

extern bool quick;   // --quick: a subset that still meets every op and every type
extern bool soak;    // --soak: the long form, where there is one
extern bool verbose; // --verbose: every case and every measured value

struct Option {
    const char * name;  // "--dir"
    const char * value; // as the usage shows it, nullptr for a switch

    std::function<void(const char * value)> take;
};

// Ends the program with its usage where the command line has anything else.
void read_options(int argc, char ** argv, const std::vector<Option> & options);

// `part` is the name that the suite has for the program. Reads --quick, --soak, --verbose, --filter TEXT and the options of
// the program.
void begin_program(const char * part, int argc, char ** argv, const std::vector<Option> & own = {});

// Prints `N passed, N failed, N skipped` behind what was counted, and returns the exit status.
int end_program();

// cases

// True where --filter lets this case run; checks that follow are counted under its name.
bool begin_case(const std::string & name);
void check(bool ok, const std::string & what);
// `value` <= `bound`, NaN fails; the largest ratio of each `what` is printed at the end with --verbose.
void check_below(double value, double bound, const std::string & what);
void skip(const std::string & why);
// Things tried that are not checks of their own: printed at the end.
void count(const std::string & what, int64_t n = 1);

// log

// Callbacks of ggml_log_set and llama_log_set. Kept: all but debug messages, until take_log.
void        keep_log(ggml_log_level level, const char * text, void * data);
void        print_errors(ggml_log_level level, const char * text, void * data);
std::string take_log();
