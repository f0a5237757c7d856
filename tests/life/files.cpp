// State files that were cut, that somebody has crafted, or that are large: what cannot be restored is refused before
// anything is changed or allocated for it, and what can takes no memory of its size.

#include "life.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace {

using Bytes = std::vector<uint8_t>;

// magic, version, number of tokens, one token
constexpr size_t FILE_HEAD = 16;
constexpr double MIB = 1 << 20;

std::string path() {
    return folder() + "/state.bin";
}

Bytes read_file() {
    std::ifstream in(path(), std::ios::binary);
    return Bytes(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

void write_file(const uint8_t * data, size_t size) {
    std::ofstream out(path(), std::ios::binary | std::ios::trunc);
    out.write((const char *) data, (std::streamsize) size);
}

// A session file, or one of sequence 0.
Bytes file_of(llama_context * ctx, bool whole) {
    const llama_token token = 7;
    const bool ok = whole ? llama_state_save_file(ctx, path().c_str(), &token, 1) : llama_state_seq_save_file(ctx, path().c_str(), 0, &token, 1) > 0;
    check(ok, "a file is written");
    return read_file();
}

bool load_file(llama_context * ctx, bool whole) {
    llama_token tokens[4];
    size_t n = 0;
    return whole ? llama_state_load_file(ctx, path().c_str(), tokens, 4, &n) : llama_state_seq_load_file(ctx, path().c_str(), 0, tokens, 4, &n) > 0;
}

bool load_bytes(llama_context * ctx, const Bytes & state, bool whole) {
    return (whole ? llama_state_set_data(ctx, state.data(), state.size()) : llama_state_seq_set_data(ctx, state.data(), state.size(), 0)) > 0;
}

uint64_t number(const Bytes & bytes, size_t at, size_t size) {
    uint64_t res = 0;
    memcpy(&res, &bytes[at], size);
    return res;
}

void set_number(Bytes & bytes, size_t at, uint64_t value, size_t size) {
    memcpy(&bytes[at], &value, size);
}

// Where our header is in a state: behind the name of the architecture, or llama.cpp's magic and number of the sequence
// (a file of a sequence has neither).
size_t find_header(const Bytes & bytes) {
    const uint32_t magic = GGML_EXT_STATE_MAGIC;
    const auto at = std::search(bytes.begin(), bytes.end(), (const uint8_t *) &magic, (const uint8_t *) (&magic + 1));
    return at - bytes.begin();
}

// The checksum that fits what the header says.
void seal(Bytes & bytes, size_t at) {
    Bytes header(bytes.begin() + at, bytes.begin() + at + 12);
    const size_t body = std::min<size_t>(number(bytes, at + 8, 4), bytes.size() - at - GGML_EXT_STATE_PREFIX);
    header.insert(header.end(), bytes.begin() + at + GGML_EXT_STATE_PREFIX, bytes.begin() + at + GGML_EXT_STATE_PREFIX + body);
    set_number(bytes, at + 12, ggml_ext_state_checksum(header.data(), header.size()), 8);
}

// Of this process, in MiB, where the system tells: "VmRSS:", "VmHWM:" (the most since it was reset).
double memory(const std::string & name) {
    std::ifstream in("/proc/self/status");
    for (std::string word; in >> word;) {
        double kib = 0;
        if (word == name && in >> kib) {
            return kib/1024;
        }
    }
    return -1;
}

// The most that `what` takes beside what was taken before; -1 where the system does not tell.
template <typename What> double peak_of(const What & what) {
    std::ofstream reset("/proc/self/clear_refs");
    reset << "5" << std::flush;
    const double before = memory("VmRSS:");
    const bool   tells  = reset.good() && before > 0 && memory("VmHWM:") < before + 1;
    what();
    count(tells ? "peaks of memory taken" : "peaks of memory that this system does not tell");
    return tells ? memory("VmHWM:") - before : -1;
}

// A context and its twin, on which nothing is tried.
struct Victim {
    Context ctx, twin;
    Bytes   before;

    explicit Victim(const Pair & types) : ctx(new_context(HEADS_OF_64, types, { 512, 2, true })), twin(new_context(HEADS_OF_64, types, { 512, 2, true })) {
        for (llama_context * c : { ctx.get(), twin.get() }) {
            decode(c, text(0, 0, 75));
            decode(c, text(1, 0, 20));
        }
        before = state_of(ctx.get(), true);
    }

    void is_unchanged(const std::string & after) {
        check(state_of(ctx.get(), true) == before, after + ": the context is unchanged");
    }

    void answers_as_before() {
        for (llama_seq_id seq : { 0, 1 }) {
            const auto next = text(seq, seq == 0 ? 75 : 20, seq == 0 ? 80 : 25);
            check_below(largest_difference(decode(twin.get(), next), decode(ctx.get(), next)), 0.0, "largest difference to a context on which nothing was tried");
        }
    }
};

void test_cut(const Pair & types) {
    const bool ours = types.k != "f16";
    Context source = new_context(HEADS_OF_64, types, { 512, 2, true });
    decode(source.get(), text(0, 0, 100));
    Victim victim(types);
    for (bool whole : { true, false }) {
        const Bytes file = file_of(source.get(), whole);
        std::vector<size_t> sizes = { 0, 3, 4, 11, 12, 14, FILE_HEAD, FILE_HEAD + 2, file.size()/2, file.size() - 5000, file.size() - 1 };
        if (ours) {
            const size_t at = find_header(file), body = at + GGML_EXT_STATE_PREFIX;
            const size_t meta = body + number(file, at + 8, 4), rows = meta + number(file, body + 8, 8);
            check(at >= FILE_HEAD && rows + number(file, body + 24, 8) == file.size(), "a file has a header, metadata and rows");
            for (size_t size : { at + 4, at + 19, body, body + 100, meta - 1, meta, meta + 50, rows - 1, rows, rows + 1, rows + 4096 }) {
                sizes.push_back(size);
            }
        }
        take_log();
        for (size_t size : sizes) {
            const std::string what = std::string(whole ? "a session" : "a sequence") + " cut to " + std::to_string(size) + " of " + std::to_string(file.size()) + " bytes";
            write_file(file.data(), size);
            check(!load_file(victim.ctx.get(), whole), what + " is refused");
            count("cut files refused");
            if (ours) {
                victim.is_unchanged(what);
            }
        }
        check(!take_log().empty(), "the log says why");
        if (ours && whole) {
            Bytes longer = file;
            longer.push_back(0);
            write_file(longer.data(), longer.size());
            check(!load_file(victim.ctx.get(), whole), "a session file with a byte too many is refused");
            check(take_log().find("follow in the file") != std::string::npos, "the log tells of the byte");
            victim.is_unchanged("a byte too many");
        }
    }
    if (ours) {
        victim.answers_as_before();
    }
    for (bool whole : { true, false }) {
        file_of(source.get(), whole);
        check(load_file(victim.ctx.get(), whole), "the file is restored when nothing is missing: " + take_log());
        check(state_of(victim.ctx.get(), false) == state_of(source.get(), false), "and is what was saved");
    }
}

// Lengths and counts that promise more than there is, with checksums that fit.
void test_crafted(const Pair & types) {
    Context source = new_context(HEADS_OF_64, types, { 512, 2, true });
    decode(source.get(), text(0, 0, 100));
    Victim victim(types);

    struct Lie {
        const char * field;
        size_t       at;  // behind the prefix
        uint64_t     value;
        size_t       size;
        const char * word;
    };
    const size_t layer = 148, ranges = 56 + 3*layer;
    const std::vector<Lie> lies = {
        { "meta_bytes", 8, 6ull << 30, 8, "meta_bytes 6442450944" },
        { "meta_bytes", 8, UINT64_MAX, 8, "meta_bytes" },
        { "data_bytes", 24, 6ull << 30, 8, "data_bytes 6442450944" },
        { "data_bytes", 24, UINT64_MAX - 4, 8, "data_bytes" },
        { "number of caches", 32, UINT32_MAX, 4, "entries" },
        { "streams", 36, UINT32_MAX, 4, "4294967295 streams" },
        { "number of layers", 52, 50000000, 4, "50000000 entries" },
        { "number of ranges", ranges, 1u << 31, 4, "2147483648 entries" },
        { "end of a range", ranges + 12, 400, 4, "meta_bytes" },
        { "bytes of a row", 56 + 4 + 8, 1ull << 40, 8, "bytes of a cell" },
    };
    for (bool whole : { true, false }) {
        const Bytes state = state_of(source.get(), whole), file = file_of(source.get(), whole);
        const auto refuse = [&](const Bytes & bad, bool is_file, const std::string & what, const std::string & word) {
            const std::string name = what + (whole ? " of a context in a " : " of a sequence in a ") + (is_file ? "file" : "buffer");
            take_log();
            bool taken = true;
            if (is_file) {
                write_file(bad.data(), bad.size());
            }
            const double peak = peak_of([&]() { taken = is_file ? load_file(victim.ctx.get(), whole) : load_bytes(victim.ctx.get(), bad, whole); });
            const std::string log = take_log();
            check(!taken, name + " is refused");
            check(log.find(word) != std::string::npos, name + ": no '" + word + "' in: " + log);
            check_below(peak, 16, name + ": MiB that it takes");
            victim.is_unchanged(name);
            count("crafted states refused");
        };
        for (const bool is_file : { true, false }) {
            const Bytes & good = is_file ? file : state;
            const size_t at = find_header(good);
            for (const Lie & lie : lies) {
                Bytes bad = good;
                set_number(bad, at + GGML_EXT_STATE_PREFIX + lie.at, lie.value, lie.size);
                seal(bad, at);
                refuse(bad, is_file, lie.field, lie.word);
            }
            Bytes bad = good;
            set_number(bad, at + 8, 1u << 28, 4); // the length of the header itself
            refuse(bad, is_file, "length of the header", "268435456 bytes");
            if (whole) {
                bad = good;
                set_number(bad, is_file ? FILE_HEAD : 0, UINT32_MAX, 4); // the name of the architecture
                refuse(bad, is_file, "length of a name", "longer than what is left");
            }

            // metadata that llama.cpp would notice when it has begun
            const size_t body = at + GGML_EXT_STATE_PREFIX, meta = body + number(good, at + 8, 4), n = number(good, body + 8, 8);
            const size_t list = n - 4 - 8*Setup().recent; // of the cells that have precise rows
            for (const size_t field : { (size_t) 0, (size_t) 4, (size_t) 12, list - 4, list - 12, list, list + 4 }) {
                bad = good;
                set_number(bad, meta + field, field == list + 4 ? 100 : 77, 4);
                set_number(bad, body + 16, ggml_ext_state_checksum(&bad[meta], n), 8);
                seal(bad, at);
                refuse(bad, is_file, "metadata at " + std::to_string(field), "does not fit its header");
            }
        }
    }
    victim.answers_as_before();
}

// A sequence of n cells, with rows of any bytes where they stand alone, made of a state of a few: what decoding that many would take too long for.
Bytes many_cells(const Bytes & few, uint32_t n) {
    const size_t begin = 8, body = begin + GGML_EXT_STATE_PREFIX, header = body + number(few, begin + 8, 4);
    const uint32_t n_layer = (uint32_t) number(few, body + 52, 4);
    std::vector<ggml_ext_state_layer> layers(n_layer);
    uint64_t data_bytes = 0;
    ggml_ext_state_layers(&few[begin], header - begin, 0, layers.data(), n_layer);
    for (const ggml_ext_state_layer & layer : layers) {
        data_bytes += n*(layer.bytes_k + layer.bytes_v);
    }
    // n is a whole number of groups; no cell has a precise row
    const size_t tail = 8 + n_layer*24, tail_of_few = header + 8 + number(few, header + 4, 4)*12;
    Bytes meta(8 + (size_t) n*12 + tail + 4);
    set_number(meta, 0, 1, 4);
    set_number(meta, 4, n, 4);
    for (uint32_t i = 0; i < n; i++) {
        set_number(meta, 8 + 12*(size_t) i, i, 4);
        set_number(meta, 12 + 12*(size_t) i, 1, 4);
    }
    std::copy_n(few.begin() + tail_of_few, tail, meta.end() - tail - 4);

    const ggml_ext_state_range range = { 0, 0, n };
    ggml_ext_state_cache cache = {};
    cache.streams   = 1;
    cache.cells     = n;
    cache.sequences = 1;
    cache.rotated   = number(few, body + 48, 4) & 2;
    cache.layers    = layers.data();
    cache.n_layers  = n_layer;
    cache.ranges    = &range;
    cache.n_ranges  = 1;
    ggml_ext_state state = {};
    state.one_sequence = true;
    state.foreign      = (uint32_t) number(few, body + 4, 4);
    state.meta_bytes   = meta.size();
    state.meta_sum     = ggml_ext_state_checksum(meta.data(), meta.size());
    state.data_bytes   = data_bytes;
    state.caches       = &cache;
    state.n_caches     = 1;

    Bytes res(few.begin(), few.begin() + begin);
    Bytes head(ggml_ext_state_header(&state, nullptr, 0));
    ggml_ext_state_header(&state, head.data(), head.size());
    res.insert(res.end(), head.begin(), head.end());
    res.insert(res.end(), meta.begin(), meta.end());
    const size_t rows = res.size();
    res.resize(rows + data_bytes);
    Rng rng(3);
    for (size_t i = rows; i + 8 <= res.size(); i += 8) {
        set_number(res, i, rng.next(), 8);
    }
    // Groups of any bytes are coded anew when they are saved again, unless they are empty. Keys come first.
    uint64_t grouped = 0;
    for (const ggml_ext_state_layer & layer : layers) {
        grouped += ggml_ext_type_get(layer.type_k)->group_cells > 1 ? n*layer.bytes_k : 0;
    }
    std::fill_n(res.begin() + rows, grouped, 0);
    return res;
}

void test_large(const Pair & types) {
    constexpr uint32_t N = 1 << 17;
    Bytes few, file;
    {
        Context source = new_context(HEADS_OF_64, types, { 512, 1, true });
        decode(source.get(), text(0, 0, 3));
        few  = state_of(source.get(), false);
        file = file_of(source.get(), false);
    }
    const Bytes state = many_cells(few, N);
    check((double) state.size() > 48*MIB, "the state is large"); // a piece is 4 MiB, a layer's keys 9
    file.resize(FILE_HEAD);
    file.insert(file.end(), state.begin() + 8, state.end());
    write_file(file.data(), file.size());
    Context ctx = new_context(HEADS_OF_64, types, { N, 1, true });

    // Most of the first time's is llama.cpp's own for its cells, which it keeps.
    const std::string size = std::to_string((int) (state.size()/MIB)) + " MiB";
    for (const double bound : { 40, 12 }) {
        bool ok = false;
        const double peak = peak_of([&]() { ok = load_file(ctx.get(), false); });
        check(ok, "a large file is restored: " + take_log());
        check_below(peak, bound, "MiB that restoring a file of " + size + " takes");
        check(state_of(ctx.get(), false) == state, "a large state from a file is what it was");
    }
    bool ok = false;
    const double peak = peak_of([&]() { ok = load_bytes(ctx.get(), state, false); });
    check(ok && state_of(ctx.get(), false) == state, "a large state from a buffer is what it was: " + take_log());
    check_below(peak, 12, "MiB that restoring a buffer of " + size + " takes");
}

// A disk that fails when the first rows are on their way: the file ends where the log speaks.
std::string truncated;

void keep_log_and_truncate(ggml_log_level level, const char * text, void * data) {
    if (strstr(text, "written anew") && truncated.empty()) {
        truncated = text;
        std::error_code error;
        std::filesystem::resize_file(path(), 20000, error);
    }
    keep_log(level, text, data);
}

void test_failing_disk() {
    const Pair types = { "delta4", "srft4" };
    Context source = new_context(HEADS_OF_64, types, { 256, 2, true });
    decode(source.get(), text(0, 0, 100));

    // no free group: keys are written anew, and the log says that before the first row is read
    Context ctx = new_context(HEADS_OF_64, types, { 256, 3, true });
    decode(ctx.get(), text(1, 0, 256));
    llama_memory_t mem = llama_get_memory(ctx.get());
    for (llama_pos first = 10; first < 256; first += 64) {
        llama_memory_seq_rm(mem, 1, first, first + 30);
    }
    decode(ctx.get(), text(0, 0, 5));
    check(file_of(source.get(), false).size() > 30000, "a file is larger than what is left of it");
    take_log();
    truncated.clear();
    llama_log_set(keep_log_and_truncate, nullptr);
    const bool taken = load_file(ctx.get(), false);
    llama_log_set(keep_log, nullptr);
    const std::string log = take_log();
    check(!truncated.empty(), "the file was cut while it was read: " + log);
    check(!taken, "a read that fails is an error");
    check(log.find("sequence is empty now") != std::string::npos && log.find("reached end of file") != std::string::npos, "the log says what happened: " + log);
    check(llama_memory_seq_pos_max(mem, 0) == -1, "nothing half restored stays behind");
    check(llama_memory_seq_pos_max(mem, 1) == 255 && !save_state(ctx.get(), 1).empty(), "other sequences stay");
    const auto logits = decode(ctx.get(), text(0, 0, 5));
    check(!logits.empty() && all_finite(logits), "the context goes on");
}

}  // namespace

void test_files() {
    const std::vector<Pair> ours = { { "srft4", "srft4" }, { "delta4", "srft4" } };
    for (const Pair & types : ours) {
        if (begin_case("cut files of " + types.name())) {
            test_cut(types);
        }
        if (begin_case("crafted states of " + types.name())) {
            test_crafted(types);
        }
        if (begin_case("large states of " + types.name())) {
            test_large(types);
        }
    }
    if (begin_case("cut files of f16/f16")) {
        test_cut({ "f16", "f16" });
    }
    if (begin_case("a file that cannot be read to its end")) {
        test_failing_disk();
    }
    remove(path().c_str());
}
