// Saved states of caches with our types: what the patches in llama-context.cpp and llama-kv-cache.cpp call.
//
// llama.cpp's caches write and read their state through an interface of four functions. Here are implementations of it
// that go between: one asks the caches of a context what they are and takes their metadata down, one passes their rows
// on, and one reads. Nothing of a context is touched before the header of a state was compared with it as a whole, its
// lengths follow from its cells, its metadata was checked and all of its bytes are there. Rows then go from the file to
// their places in pieces: a restore takes memory for the metadata and for a piece, whatever the size of the state.
//
// Precise rows of recent cells (ggml-ext-recent.h) follow those of their stream.
//
// Rows that stand alone pass as they are. Cells that are coded together travel as whole groups (see src/state.rs), without
// what other sequences have in them.
// States of caches without a type of ours and without a calibration are llama.cpp's own, byte for byte.
#pragma once

#include "ggml-ext-groups.h"
#include "ggml-ext-recent.h"
#include "ggml-ext-seam.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

// The whole groups that cells of a tensor touch, each once, as the ranges of one tensor come by in ascending order.
class ggml_ext_group_ranges {
  public:
    // The bytes [offset, offset + size) as they travel; size 0 where they went along with the range before.
    void widen(const ggml_tensor * tensor, size_t & offset, size_t & size) {
        const size_t group = ggml_ext_group_cells(tensor->type)*tensor->nb[1];
        const size_t total = tensor->ne[1]*tensor->nb[1];
        if (group == tensor->nb[1]) {
            return;
        }
        if (tensor != last) {
            last = tensor;
            done = 0;
        }
        const size_t end   = std::min(total, (offset + size + group - 1)/group*group);
        const size_t begin = std::max(done, offset/group*group);
        offset = begin;
        size   = end > begin ? end - begin : 0;
        done   = end;
    }

  private:
    const ggml_tensor * last = nullptr;
    size_t              done = 0;
};

// Asks caches what they are. With `brief` they say that alone; without, what llama.cpp writes of cells is taken down and
// rows are counted.
class ggml_ext_state_survey : public llama_io_write_i {
  public:
    struct cache_parts {
        ggml_ext_state_cache              cache = {};
        std::vector<ggml_ext_state_layer> layers;
        std::vector<ggml_ext_state_range> ranges;
    };

    const bool               brief;
    std::vector<cache_parts> caches;
    std::vector<uint8_t>     meta;
    uint64_t                 data_bytes = 0;
    size_t                   n_known    = 0;      // caches that come before anything else
    bool                     others     = false;  // there is something else: recurrent states
    bool                     ours       = false;
    bool                     grouped    = false;

    template <typename Memory>
    ggml_ext_state_survey(const Memory & memory, llama_seq_id seq_id, llama_state_seq_flags flags, bool brief) : brief(brief) {
        // nothing goes to a device here, and recurrent memories abort where that would need several copies
        memory.state_write(*this, seq_id, flags & ~LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    }

    void write(const void * src, size_t size) override {
        others = others || brief; // caches that describe themselves have said all by then
        if (!brief) {
            meta.insert(meta.end(), (const uint8_t *) src, (const uint8_t *) src + size);
        }
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        groups.widen(tensor, offset, size);
        data_bytes += size;
    }

    size_t n_bytes() override { return meta.size() + data_bytes; }

    // Valid as long as the survey is.
    ggml_ext_state state(llama_seq_id seq_id) {
        plain.clear();
        for (cache_parts & c : caches) {
            c.cache.layers   = c.layers.data();
            c.cache.n_layers = c.layers.size();
            c.cache.ranges   = c.ranges.data();
            c.cache.n_ranges = c.ranges.size();
            plain.push_back(c.cache);
        }
        ggml_ext_state res = {};
        res.one_sequence = seq_id >= 0;
        res.foreign      = (uint32_t) LLAMA_SESSION_VERSION << 16 | LLAMA_STATE_SEQ_VERSION;
        res.meta_bytes   = meta.size();
        res.meta_sum     = ggml_ext_state_checksum(meta.data(), meta.size());
        res.data_bytes   = data_bytes;
        res.caches       = plain.data();
        res.n_caches     = plain.size();
        res.n_known      = n_known;
        res.others       = others;
        return res;
    }

    // "K delta4_64 x28, V srft4_64 x28"
    std::string types() const {
        std::string res;
        const bool  calibrated = std::any_of(caches.begin(), caches.end(), [](const cache_parts & c) { return c.cache.calibration != 0; });
        for (const char side : { 'K', 'V' }) {
            std::vector<std::string> names;
            for (const cache_parts & c : caches) {
                for (const ggml_ext_state_layer & layer : c.layers) {
                    const int32_t     type = side == 'K' ? layer.type_k : layer.type_v;
                    const std::string name = type < 0 ? "none" : ggml_type_name((ggml_type) type);
                    if (std::find(names.begin(), names.end(), name) == names.end()) {
                        names.push_back(name);
                    }
                }
            }
            res += std::string(res.empty() ? "" : ", ") + side;
            for (const std::string & name : names) {
                res += " " + name;
            }
            res += side == 'K' && calibrated ? " (calibrated)" : "";
        }
        return res;
    }

  private:
    ggml_ext_group_ranges             groups;
    std::vector<ggml_ext_state_cache> plain;
};

// What llama_kv_cache::state_write says of itself, before it writes anything. True: that was all that is wanted.
// `extension`: bytes of a cell's metadata beside its position and sequences. `dest` are the cells of the stream that a
// single sequence has; NULL for a whole context. `calibration`: the digest of that which keys and values are stored by, 0 for none.
template <typename Layers, typename Streams, typename Cells>
bool ggml_ext_state_describe(llama_io_write_i & io, const Layers & layers, const ggml_ext_recent & recent, uint64_t calibration,
                             const Streams & streams, uint32_t n_seq_max, bool v_trans, bool rotated, uint32_t n_swa, llama_swa_type swa_type, size_t extension,
                             const Cells * dest, llama_seq_id seq_id) {
    auto * survey = dynamic_cast<ggml_ext_state_survey *>(&io);
    if (!survey) {
        return false;
    }
    survey->caches.emplace_back();
    auto & [cache, parts, ranges] = survey->caches.back();

    cache.streams      = (uint32_t) streams.size();
    cache.cells        = streams[0].size();
    cache.v_transposed = v_trans;
    cache.rotated      = rotated;
    cache.extension    = (uint32_t) extension;
    cache.calibration  = calibration;
    survey->ours       = survey->ours || calibration != 0;
    survey->n_known    = survey->others ? survey->n_known : survey->caches.size();
    cache.sequences    = survey->brief ? n_seq_max : 0;
    for (uint32_t s = 0; s < n_seq_max && !survey->brief; s++) {
        for (const auto & cells : streams) {
            cache.sequences = cells.seq_pos_max(s) >= 0 ? s + 1 : cache.sequences;
        }
    }

    for (const auto & layer : layers) {
        ggml_ext_state_layer part = {};
        part.index   = layer.il;
        part.type_k  = layer.k->type;
        part.n_k     = (uint32_t) layer.k->ne[0];
        part.bytes_k = layer.k->nb[1];
        part.type_v  = layer.v ? layer.v->type : -1;
        part.n_v     = layer.v ? (uint32_t) layer.v->ne[0] : 0;
        part.bytes_v = layer.v ? layer.v->nb[1] : 0;
        const ggml_tensor * recent_k = recent.rows(parts.size(), 'k'), * recent_v = recent.rows(parts.size(), 'v');
        part.recent_k       = recent_k ? recent_k->type : -1;
        part.recent_v       = recent_v ? recent_v->type : -1;
        part.recent_bytes_k = recent_k ? recent_k->nb[1] : 0;
        part.recent_bytes_v = recent_v ? recent_v->nb[1] : 0;
        parts.push_back(part);
        survey->ours    = survey->ours || ggml_ext_is_ours(layer.k->type) || (layer.v && ggml_ext_is_ours(layer.v->type));
        survey->grouped = survey->grouped || ggml_ext_group_cells(layer.k->type) > 1;
    }

    // What a single sequence may take, as llama_kv_cache::find_slot sees it: free cells, its own, and with a window those
    // that a sequence has left behind it.
    for (uint32_t i = 0; survey->brief && dest && i < dest->size(); i++) {
        const int others = dest->is_empty(i) ? 0 : (int) dest->seq_count(i) - dest->seq_has(i, seq_id);
        bool      free   = others == 0;
        for (llama_seq_id s = 0; n_swa > 0 && others == 1 && !free && s < (llama_seq_id) n_seq_max; s++) {
            free = s != seq_id && dest->seq_has(i, s) &&
                   llama_hparams::is_masked_swa(n_swa, swa_type, dest->pos_get(i), dest->seq_pos_max(s) + 1);
        }
        if (free) {
            ranges.push_back({ 0, i, i + 1 });
        }
    }
    return survey->brief;
}

// Passes rows on and nothing else. Of groups, what belongs to cells that are not saved is taken out.
class ggml_ext_state_rows : public llama_io_write_i {
  public:
    explicit ggml_ext_state_rows(llama_io_write_i & io) : io(io) {}

    void write(const void *, size_t) override {}

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        groups.widen(tensor, offset, size);
        const uint32_t group = ggml_ext_group_cells(tensor->type);
        if (group == 1) {
            io.write_tensor(tensor, offset, size);
            return;
        }
        if (!wanted) {
            throw std::runtime_error("rows are written before their cells are named");
        }
        // whole groups, about a megabyte at a time
        const size_t  cell  = tensor->nb[1];
        const size_t  step  = std::max<size_t>(1, (1 << 20)/(group*cell))*group*cell;
        const int32_t heads = (int32_t) (tensor->ne[0]/ggml_blck_size(tensor->type));
        for (const size_t end = offset + size; offset < end; offset += step) {
            buffer.resize(std::min(step, end - offset));
            ggml_backend_tensor_get(tensor, buffer.data(), offset, buffer.size());
            if (!ggml_ext_state_keep(tensor->type, heads, buffer.data(), buffer.size()/cell, wanted.get() + offset/cell)) {
                throw std::runtime_error("the rows of other sequences could not be taken out");
            }
            io.write(buffer.data(), buffer.size());
        }
    }

    size_t n_bytes() override { return io.n_bytes(); }

    template <typename Cells> void stream(const Cells & cells, llama_seq_id seq_id) {
        wanted.reset(new bool[cells.size()]);
        for (uint32_t i = 0; i < cells.size(); i++) {
            wanted[i] = !cells.is_empty(i) && (seq_id < 0 || cells.seq_has(i, seq_id));
        }
    }

  private:
    llama_io_write_i &      io;
    ggml_ext_group_ranges   groups;
    std::unique_ptr<bool[]> wanted;  // the sequence's cells of the stream whose rows come next, behind its window too
    std::vector<uint8_t>    buffer;
};

// The cells of one stream that llama_kv_cache::state_write is about to write.
template <typename Cells, typename Ranges>
void ggml_ext_state_cells(llama_io_write_i & io, uint32_t stream, const Cells & cells, llama_seq_id seq_id, const Ranges & ranges) {
    if (auto * survey = dynamic_cast<ggml_ext_state_survey *>(&io)) {
        for (const auto & range : ranges) {
            survey->caches.back().ranges.push_back({ stream, range.first, range.second });
        }
    } else if (auto * rows = dynamic_cast<ggml_ext_state_rows *>(&io)) {
        rows->stream(cells, seq_id);
    }
}

// A cell that has a precise row: its place among the cells that are written, and the slot that it had.
struct ggml_ext_recent_cell {
    uint32_t place, slot;
};

// Behind the rows of a stream: which of its cells have precise rows, and those. Nothing where a cache keeps none.
template <typename Ranges>
void ggml_ext_state_write_recent(llama_io_write_i & io, const ggml_ext_recent & recent, size_t n_layers, uint32_t stream, const Ranges & ranges) {
    if (recent.empty()) {
        return;
    }
    std::vector<ggml_ext_recent_cell> list;
    uint32_t place = 0;
    for (const auto & range : ranges) {
        for (uint32_t cell = range.first; cell < range.second; cell++, place++) {
            if (const int64_t slot = recent.map(stream).find(cell); slot >= 0) {
                list.push_back({ place, (uint32_t) slot });
            }
        }
    }
    // the order in which they will be pushed out
    std::sort(list.begin(), list.end(), [&](const auto & a, const auto & b) {
        return recent.map(stream).written(a.slot) < recent.map(stream).written(b.slot);
    });
    const uint32_t n = (uint32_t) list.size();
    io.write(&n, sizeof(n));
    io.write(list.data(), n*sizeof(list[0]));
    for (size_t ikv = 0; ikv < n_layers; ikv++) {
        for (const char side : { 'k', 'v' }) {
            ggml_tensor * rows = recent.rows(ikv, side);
            // slots that lie side by side at once
            for (size_t i = 0, end = 0; rows && i < list.size(); i = end) {
                for (end = i + 1; end < list.size() && list[end].slot == list[end - 1].slot + 1;) {
                    end++;
                }
                io.write_tensor(rows, recent.offset(rows, stream, list[i].slot), (end - i)*rows->nb[1]);
            }
        }
    }
}

// llama.cpp keeps states on the device row by row; groups go through the host.
template <typename Memory> llama_state_seq_flags ggml_ext_state_flags(const Memory * memory, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (memory && (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) && ggml_ext_state_survey(*memory, seq_id, flags, true).grouped) {
        flags &= ~LLAMA_STATE_SEQ_FLAGS_ON_DEVICE;
    }
    return flags;
}

template <typename Memory> void ggml_ext_state_write(llama_io_write_i & io, const Memory & memory, llama_seq_id seq_id, llama_state_seq_flags flags) {
    // what stays on the device stays in the process
    if ((flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) || !ggml_ext_state_survey(memory, seq_id, flags, true).ours) {
        memory.state_write(io, seq_id, flags);
        return;
    }
    ggml_ext_state_survey survey(memory, seq_id, flags, false);
    const ggml_ext_state  state = survey.state(seq_id);
    std::vector<uint8_t>  header(ggml_ext_state_header(&state, nullptr, 0));
    ggml_ext_state_header(&state, header.data(), header.size());

    io.write(header.data(), header.size());
    io.write(survey.meta.data(), survey.meta.size());
    ggml_ext_state_rows rows(io);
    memory.state_write(rows, seq_id, flags);
}

// A state of ours: compared with the context when it is made, and then read by the caches.
class ggml_ext_state_reader : public llama_io_read_i {
  public:
    // The magic has been read. Throws where the context cannot take the state; nothing has happened then.
    ggml_ext_state_reader(llama_io_read_i & io, ggml_ext_state_survey & context, llama_seq_id seq_id) : io(io) {
        char err[1024] = "";
        const ggml_ext_state here = context.state(seq_id);
        std::vector<uint8_t> header(GGML_EXT_STATE_PREFIX);
        const uint32_t magic = GGML_EXT_STATE_MAGIC;
        memcpy(header.data(), &magic, sizeof(magic));
        io.read(header.data() + sizeof(magic), header.size() - sizeof(magic));
        const int64_t rest = ggml_ext_state_header_rest(header.data(), &here, err, sizeof(err));
        if (rest < 0) {
            refuse(err);
        }
        require("its header", rest, 0, false);
        header.resize(GGML_EXT_STATE_PREFIX + rest);
        io.read(header.data() + GGML_EXT_STATE_PREFIX, rest);

        ggml_ext_state found = {};
        if (!ggml_ext_state_check(header.data(), header.size(), &here, &found, err, sizeof(err))) {
            refuse(err);
        }
        require("its metadata and rows", found.meta_bytes, found.data_bytes, seq_id < 0);
        meta.resize(found.meta_bytes);
        io.read(meta.data(), meta.size());
        if (!ggml_ext_state_check_meta(header.data(), header.size(), &here, meta.data(), meta.size(), err, sizeof(err))) {
            refuse(err);
        }
        data_left = found.data_bytes;

        for (size_t c = 0; c < context.caches.size(); c++) {
            uint32_t cells = 0;
            std::vector<ggml_ext_state_range> ranges(ggml_ext_state_ranges(header.data(), header.size(), c, nullptr, 0, &cells));
            ggml_ext_state_ranges(header.data(), header.size(), c, ranges.data(), ranges.size(), &cells);
            recent.emplace_back(context.caches[c].layers.size());
            ggml_ext_state_layers(header.data(), header.size(), c, recent.back().data(), recent.back().size());
            for (const ggml_ext_state_range & range : ranges) {
                if (streams.empty() || streams.back().cache != c || streams.back().number != range.stream) {
                    streams.emplace_back();
                    streams.back().cache        = c;
                    streams.back().number       = range.stream;
                    streams.back().source_cells = cells;
                }
                for (uint32_t cell = range.from; cell < range.to; cell++) {
                    streams.back().from.push_back(cell);
                }
            }
        }
    }

    void read(void * dst, size_t size) override {
        if (size > meta.size() - meta_read) {
            refuse("what it says of its cells ends too early");
        }
        memcpy(dst, meta.data() + meta_read, size);
        meta_read += size;
    }

    // Rows go to their places piece by piece. Of cells that are coded together all go with the first of a stream's runs.
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        try {
            if (ggml_ext_group_cells(tensor->type) == 1) {
                read_rows(tensor, offset, size);
            } else if (tensor != grouped) {
                grouped = tensor;
                current().whole ? read_groups(tensor, current()) : read_anew(tensor, current());
            }
        } catch (const std::exception & e) {
            why = why.empty() ? e.what() : why; // llama.cpp says the same of whatever happens here
            throw;
        }
    }

    size_t n_bytes() override { return io.n_bytes(); }

    // The cells that a stream's rows are to have: `to` has those that llama.cpp chose, and gets others where cells are coded
    // together and can go to whole groups that are free. `fixed`: they are to stay.
    template <typename Layers, typename Cells> void place(const Layers & layers, const Cells & cells, std::vector<uint32_t> & to, bool fixed) {
        if (n_placed == streams.size() || streams[n_placed].from.size() != to.size()) {
            refuse("its cells are not those that its header tells");
        }
        stream & s = streams[n_placed++];
        const uint32_t group = ggml_ext_cache_group_cells(layers);
        if (group > 1 && !fixed) {
            std::unique_ptr<bool[]> free(new bool[cells.size()]);
            for (uint32_t i = 0; i < cells.size(); i++) {
                free[i] = cells.is_empty(i);
            }
            s.whole = ggml_ext_state_place(s.from.data(), s.from.size(), s.source_cells, free.get(), cells.size(), (int32_t) group, to.data());
        }
        if (group > 1 && !s.whole) {
            for (const uint32_t begin : ggml_ext_groups_of(to, group)) {
                bool free = true;
                for (uint32_t i = begin; i < std::min(begin + group, cells.size()) && free; i++) {
                    free = cells.is_empty(i);
                }
                if (free) {
                    s.renewed.push_back(begin);
                }
            }
            LLAMA_LOG_WARN("%s: there are not enough free groups of %u cells: keys are decoded and written anew\n", __func__, group);
        }
        s.to = to;
    }

    // Layers of the cache whose stream was placed last, as the state has them.
    const std::vector<ggml_ext_state_layer> & layers() { return recent[current().cache]; }

    // Rows that this context does not keep.
    void skip(size_t size) {
        take(size);
        std::vector<uint8_t> bytes(std::min(size, PIECE));
        for (size_t done = 0; done < size; done += bytes.size()) {
            io.read(bytes.data(), std::min(bytes.size(), size - done));
        }
    }

    // The caches have read what they wanted.
    void finish() {
        if (meta_read != meta.size() || data_left != 0) {
            refuse("it holds more than the caches of this context read");
        }
    }

    // Why reading failed, in the reader's own words where it has some.
    const std::string & reason(const std::string & otherwise) const { return why.empty() ? otherwise : why; }

  private:
    struct stream {
        size_t   cache;
        uint32_t number;
        uint32_t source_cells;
        bool     whole = false;
        std::vector<uint32_t> from, to;
        std::vector<uint32_t> renewed;  // first cells of groups that were free: what is in them is forgotten

        // Does cell number i begin a group, and how many rows has that?
        bool   begins(size_t i, uint32_t group) const { return i == 0 || from[i]/group != from[i - 1]/group; }
        size_t rows(size_t i, uint32_t group) const { return std::min(group, source_cells - from[i]/group*group); }
    };

    static constexpr size_t PIECE = 4 << 20;  // bytes on their way at a time

    llama_io_read_i &    io;
    std::vector<uint8_t> meta;
    size_t               meta_read = 0, n_placed = 0;
    uint64_t             data_left = 0;
    std::vector<stream>  streams;
    std::vector<std::vector<ggml_ext_state_layer>> recent;  // of each cache
    const ggml_tensor *  grouped = nullptr;
    std::string          why;

    [[noreturn]] void refuse(const std::string & reason) {
        why = reason;
        throw std::runtime_error("this state cannot be restored here: " + reason);
    }

    // `a` and `b` more bytes are there; of a whole context's state in a file no others.
    void require(const char * what, uint64_t a, uint64_t b, bool to_the_end) {
        bool           is_file = false;
        const uint64_t left    = io.n_left(is_file);
        if (a > left || b > left - a) {
            refuse(std::string(what) + " take " + std::to_string(a + b) + " bytes and " + std::to_string(left) + " are left: it was cut");
        }
        if (to_the_end && is_file && a + b != left) {
            refuse(std::string(what) + " take " + std::to_string(a + b) + " bytes and " + std::to_string(left) + " follow in the file");
        }
    }

    const stream & current() {
        if (n_placed == 0) {
            refuse("its rows come before its cells");
        }
        return streams[n_placed - 1];
    }

    void take(size_t size) {
        if (size > data_left) {
            refuse("its rows end too early");
        }
        data_left -= size;
    }

    void read_rows(ggml_tensor * t, size_t offset, size_t size) {
        take(size);
        // a recurrent layer may have a tensor of nothing
        const size_t piece = std::max<size_t>(1, PIECE/std::max<size_t>(1, t->nb[1]))*std::max<size_t>(1, t->nb[1]);
        for (size_t done = 0; done < size; done += piece) {
            io.read_tensor(t, offset + done, std::min(piece, size - done));
        }
    }

    // Whole groups, those that lie side by side at once.
    void read_groups(ggml_tensor * t, const stream & s) {
        const uint32_t group = ggml_ext_group_cells(t->type);
        size_t begin = 0, end = 0;
        for (size_t i = 0; i < s.from.size(); i++) {
            if (!s.begins(i, group)) {
                continue;
            }
            const size_t at = s.to[i]/group*group*t->nb[1];
            if (at != end) {
                read_rows(t, begin, end - begin);
                begin = at;
            }
            end = at + s.rows(i, group)*t->nb[1];
        }
        read_rows(t, begin, end - begin);
    }

    // The groups of a layer, decoded, and its keys written to the cells that there are.
    void read_anew(ggml_tensor * t, const stream & s) {
        const uint32_t group = ggml_ext_group_cells(t->type);
        std::vector<uint32_t> rows;  // in the groups that travelled
        size_t first = 0, end = 0;
        for (size_t i = 0; i < s.from.size(); i++) {
            if (s.begins(i, group)) {
                first = end;
                end += s.rows(i, group);
            }
            rows.push_back((uint32_t) first + s.from[i]%group);
        }
        std::vector<uint8_t> groups(end*t->nb[1]), cache(t->ne[1]*t->nb[1]);
        take(groups.size());
        io.read(groups.data(), groups.size());
        ggml_backend_tensor_get(t, cache.data(), 0, cache.size());
        for (const uint32_t cell : s.renewed) {
            std::fill_n(cache.begin() + cell*t->nb[1], std::min<size_t>(group, t->ne[1] - cell)*t->nb[1], 0);
        }
        if (!ggml_ext_state_recode(t->type, (int32_t) (t->ne[0]/ggml_blck_size(t->type)), groups.data(), end, cache.data(), t->ne[1],
                                   rows.data(), s.to.data(), rows.size())) {
            refuse("its keys could not be decoded");
        }
        ggml_backend_tensor_set(t, cache.data(), 0, cache.size());
    }
};

// For caches without a type of ours: a state of llama.cpp's own passes as it is, even one without a byte. One of ours is
// refused by what it is at its first number, which no cache has acted on.
class ggml_ext_state_stock : public llama_io_read_i {
  public:
    ggml_ext_state_stock(llama_io_read_i & io, ggml_ext_state_survey & context, llama_seq_id seq_id)
        : io(io), context(context), seq_id(seq_id) {}

    void read(void * dst, size_t size) override {
        io.read(dst, size);
        const uint32_t magic = GGML_EXT_STATE_MAGIC;
        if (first && size == sizeof(magic) && memcmp(dst, &magic, size) == 0) {
            ggml_ext_state_reader(io, context, seq_id); // says what differs
            throw std::runtime_error("this state cannot be restored here: it begins as one of ggml-ext's types, and this context has " + context.types());
        }
        first = false;
    }

    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override { io.read_tensor(tensor, offset, size); }
    void   discard() override { io.discard(); }
    size_t n_bytes() override { return io.n_bytes(); }
    size_t n_left(bool & is_file) override { return io.n_left(is_file); }

  private:
    llama_io_read_i &       io;
    ggml_ext_state_survey & context;
    const llama_seq_id      seq_id;
    bool                    first = true;
};

// In llama_kv_cache::state_read_meta, when cells have been chosen.
template <typename Layers, typename Cells>
void ggml_ext_state_place_cells(llama_io_read_i & io, const Layers & layers, const Cells & cells, std::vector<uint32_t> & to, bool fixed) {
    if (auto * reader = dynamic_cast<ggml_ext_state_reader *>(&io)) {
        reader->place(layers, cells, to, fixed);
    }
}

template <typename Memory> void ggml_ext_state_read(llama_io_read_i & io, Memory & memory, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) {
        memory.state_read(io, seq_id, flags);
        return;
    }
    ggml_ext_state_survey context(memory, seq_id, flags, true);
    if (!context.ours) {
        ggml_ext_state_stock stock(io, context, seq_id);
        memory.state_read(stock, seq_id, flags);
        return;
    }
    uint32_t first;
    io.read(&first, sizeof(first));
    if (first != GGML_EXT_STATE_MAGIC) {
        throw std::runtime_error("this state cannot be restored here: it names no format, as states of stock llama.cpp and of its own types do, and this "
                                 "context has " + context.types());
    }
    ggml_ext_state_reader reader(io, context, seq_id);
    try {
        memory.state_read(reader, seq_id, flags);
        reader.finish();
    } catch (const std::exception & e) {
        // Rows may have been written: nothing half restored stays behind, in no cache.
        if (seq_id < 0) {
            memory.clear(true);
        } else {
            memory.seq_rm(seq_id, -1, -1);
        }
        throw std::runtime_error("this state could not be read to its end, and the " + std::string(seq_id < 0 ? "context" : "sequence") +
                                 " is empty now: " + reader.reason(e.what()));
    }
}

// What ggml_ext_state_write_recent wrote, for the cells that a stream's rows went to. Cells of which the state has no precise
// row have none from here on.
template <typename Cells>
void ggml_ext_state_read_recent(llama_io_read_i & io, ggml_ext_recent & recent, size_t n_layers, uint32_t stream, const Cells & cells,
                                const std::vector<uint32_t> & to, uint32_t n_seq_max) {
    auto * reader = dynamic_cast<ggml_ext_state_reader *>(&io);
    // of a state that stayed on the device: this context's own
    const auto bytes_of = [&](size_t ikv, char side) -> size_t {
        if (reader) {
            const ggml_ext_state_layer & layer = reader->layers()[ikv];
            const bool has = (side == 'k' ? layer.recent_k : layer.recent_v) >= 0;
            return has ? (side == 'k' ? layer.recent_bytes_k : layer.recent_bytes_v) : 0;
        }
        const ggml_tensor * rows = recent.rows(ikv, side);
        return rows ? rows->nb[1] : 0;
    };
    const auto is_same = [&](size_t ikv, char side, const ggml_tensor * rows) {
        return rows && (!reader || (side == 'k' ? reader->layers()[ikv].recent_k : reader->layers()[ikv].recent_v) == rows->type);
    };
    bool any = false;
    for (size_t ikv = 0; ikv < n_layers; ikv++) {
        any = any || bytes_of(ikv, 'k') > 0 || bytes_of(ikv, 'v') > 0;
    }
    recent.drop(stream, to);
    if (!any) {
        return;
    }
    uint32_t n;
    io.read(&n, sizeof(n));
    if (n > to.size()) {
        throw std::runtime_error("it has more precise rows than cells");
    }
    std::vector<ggml_ext_recent_cell> list(n);
    io.read(list.data(), n*sizeof(list[0]));

    // Every layer must have a cell's rows, or it has none.
    bool whole = !recent.empty();
    for (size_t ikv = 0; ikv < n_layers; ikv++) {
        for (const char side : { 'k', 'v' }) {
            const ggml_tensor * rows = recent.rows(ikv, side);
            whole = whole && (!rows || (bytes_of(ikv, side) > 0 && is_same(ikv, side, rows)));
        }
    }
    std::vector<uint32_t> slots;
    for (uint32_t i = 0; i < n && whole; i++) {
        const uint32_t cell = to.at(list[i].place);
        llama_seq_id owner = 0;
        while (owner + 1 < (llama_seq_id) n_seq_max && !cells.seq_has(cell, owner)) {
            owner++;
        }
        const auto alive = [&](int64_t c) { return !cells.is_empty((uint32_t) c); };
        slots.push_back(recent.map(stream).take(cell, owner, alive, list[i].slot));
    }
    for (size_t ikv = 0; ikv < n_layers; ikv++) {
        for (const char side : { 'k', 'v' }) {
            const size_t  bytes = bytes_of(ikv, side);
            ggml_tensor * rows  = recent.rows(ikv, side);
            if (!whole || !rows) {
                if (reader && bytes > 0) {
                    reader->skip(n*bytes);
                }
                continue;
            }
            // slots that lie side by side at once
            for (size_t i = 0, end = 0; i < n; i = end) {
                for (end = i + 1; end < n && slots[end] == slots[end - 1] + 1;) {
                    end++;
                }
                io.read_tensor(rows, recent.offset(rows, stream, slots[i]), (end - i)*bytes);
            }
        }
    }
}
