#include "harness.h"

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#ifndef _WIN32
#    include <unistd.h>
#endif

bool quick = false, soak = false, verbose = false;

namespace {

struct Peak {
    double      ratio = -1.0;
    double      value = 0.0;
    std::string where;
};

const char * part = "";
std::string  filter;
char         current[256]; // read by a signal handler
int          passed = 0, failed = 0, skipped = 0;

std::map<std::string, int64_t> counts;
std::map<std::string, Peak>    peaks;

std::string log_text;
std::mutex  log_mutex;

// An abort ends the program: the suite then sees no counts, and this says where it was.
void print_case(int) {
#ifndef _WIN32
    const auto print = [](const char * text) { (void) !write(1, text, strlen(text)); };
    print("FAIL  ");
    print(part);
    print(": aborted in ");
    print(current);
    print("\n");
#endif
    std::signal(SIGABRT, SIG_DFL);
    std::abort();
}

[[noreturn]] void print_usage(const char * program, const std::vector<Option> & options) {
    fprintf(stderr, "usage: %s", program);
    for (const Option & o : options) {
        fprintf(stderr, " [%s%s%s]", o.name, o.value ? " " : "", o.value ? o.value : "");
    }
    fprintf(stderr, "\n");
    exit(2);
}

}  // namespace

void read_options(int argc, char ** argv, const std::vector<Option> & options) {
    for (int i = 1; i < argc; i++) {
        const Option * found = nullptr;
        for (const Option & o : options) {
            found = strcmp(argv[i], o.name) == 0 ? &o : found;
        }
        if (!found || (found->value && i + 1 == argc)) {
            print_usage(argv[0], options);
        }
        found->take(found->value ? argv[++i] : nullptr);
    }
}

void begin_program(const char * name, int argc, char ** argv, const std::vector<Option> & own) {
    part = name;
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // a run that is cut off leaves what it printed
    std::vector<Option> options = {
        { "--quick",   nullptr, [](const char *) { quick = true; } },
        { "--soak",    nullptr, [](const char *) { soak = true; } },
        { "--verbose", nullptr, [](const char *) { verbose = true; } },
        { "--filter",  "TEXT",  [](const char * text) { filter = text; } },
    };
    options.insert(options.end(), own.begin(), own.end());
    read_options(argc, argv, options);
    quick = quick && !soak;
    std::signal(SIGABRT, print_case);
}

int end_program() {
    if (verbose) {
        for (const auto & [what, peak] : peaks) {
            printf("closest to its bound: %-52s %.3g (%.2f of it) %s\n", what.c_str(), peak.value, peak.ratio, peak.where.c_str());
        }
    }
    for (const auto & [what, n] : counts) {
        printf("%s: %lld %s\n", part, (long long) n, what.c_str());
    }
    if (passed == 0) {
        printf("nothing was tested\n");
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed == 0 && passed > 0 ? 0 : 1;
}

bool begin_case(const std::string & name) {
    snprintf(current, sizeof(current), "%s", name.c_str());
    const bool runs = name.find(filter) != std::string::npos;
    if (runs && verbose) {
        printf("      %s\n", current);
        fflush(stdout);
    }
    return runs;
}

void check(bool ok, const std::string & what) {
    (ok ? passed : failed)++;
    if (!ok) {
        printf("FAIL  %s: %s: %s\n", part, current, what.c_str());
        fflush(stdout);
    }
}

void check_below(double value, double bound, const std::string & what) {
    Peak & peak = peaks[what];
    const double ratio = std::isnan(value) ? INFINITY : value/bound;
    if (ratio > peak.ratio) {
        peak = { ratio, value, current };
    }
    char text[80];
    snprintf(text, sizeof(text), " is %.3g, wanted at most %.3g", value, bound);
    if (verbose) {
        printf("      %s: %s%s\n", current, what.c_str(), text);
    }
    check(value <= bound, what + text);
}

void skip(const std::string & why) {
    skipped++;
    printf("skip %s: %s\n", current, why.c_str());
}

void count(const std::string & what, int64_t n) {
    counts[what] += n;
}

void keep_log(ggml_log_level level, const char * text, void *) {
    const std::lock_guard<std::mutex> lock(log_mutex);
    if (level != GGML_LOG_LEVEL_DEBUG) {
        log_text += text;
        if (log_text.size() > 1 << 20) {
            log_text.erase(0, log_text.size()/2);
        }
    }
}

void print_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

std::string take_log() {
    const std::lock_guard<std::mutex> lock(log_mutex);
    return std::exchange(log_text, {});
}
