// Recent cells: the last cells of each sequence are kept as precise rows too, and attention reads those.
//
// A cache whose types gain by it has a second pair of tensors a layer, of a few slots a stream. Every row is written to its cell,
// compressed, as without; the rows of the last tokens of each sequence are written to slots as well. Which slot holds which
// cell is known here, on the host, and each graph gets it: beside the cells that llama.cpp writes to, the input of a graph has
// the slots to write to and the list of the cells that attention finds in slots. So a slot that is not in the list is never
// read, whatever is in it.
//
// Tokens of a batch see each other precisely. A small batch is written to slots first and read there. A large one would push out
// what its first tokens want to see: then attention gets the slots as they were before, in a copy, and the batch's own rows.
#pragma once

#include "ggml-ext-seam.h"

#include "llama-impl.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// Which slots of one stream hold which cells.
class ggml_ext_slot_map {
  public:
    // `share`: slots that a sequence may have while others want some
    void init(uint32_t n_slots, uint32_t share) {
        slots.assign(n_slots, {});
        this->share = std::max(1u, share);
    }

    uint32_t size() const { return (uint32_t) slots.size(); }

    int64_t cell(uint32_t slot) const { return slots[slot].cell; }

    // The slot of a cell, -1 where it has none.
    int64_t find(int64_t cell) const {
        const auto it = slot_of.find(cell);
        return it == slot_of.end() ? -1 : (int64_t) it->second;
    }

    // The same, where it was this sequence's.
    int64_t find(int64_t cell, llama_seq_id seq_id) const {
        const int64_t res = find(cell);
        return res >= 0 && slots[res].seq_id == seq_id ? res : -1;
    }

    // What is in a slot of this cell is not its row any more.
    void drop(int64_t cell) {
        const auto it = slot_of.find(cell);
        if (it != slot_of.end()) {
            slots[it->second].cell = -1;
            slot_of.erase(it);
        }
    }

    // When a slot was written: the larger the later.
    uint64_t written(uint32_t slot) const { return slots[slot].written; }

    // A slot for a cell that is written now. `alive`: does anyone still have this cell? `wanted`: a slot that it is to have if
    // it can be, any number for none.
    template <typename Alive> uint32_t take(int64_t cell, llama_seq_id seq_id, const Alive & alive, uint32_t wanted = UINT32_MAX) {
        drop(cell);
        const auto is_free = [&](const slot & s) { return s.cell < 0 || !alive(s.cell); };
        if (wanted < slots.size() && is_free(slots[wanted])) {
            return give(wanted, cell, seq_id);
        }
        uint32_t own = 0, oldest_own = 0, oldest = 0, n_free = 0, free = 0;
        for (uint32_t i = 0; i < slots.size(); i++) {
            const slot & s = slots[i];
            if (is_free(s)) {
                free = n_free++ == 0 ? i : free;
            } else if (s.seq_id == seq_id) {
                oldest_own = own++ == 0 || s.written < slots[oldest_own].written ? i : oldest_own;
            }
            oldest = s.written < slots[oldest].written ? i : oldest;
        }
        return give(own >= share ? oldest_own : n_free > 0 ? free : oldest, cell, seq_id);
    }

    // How many tokens of a batch a sequence may have in slots.
    uint32_t most() const { return std::min(share, size()); }

  private:
    struct slot {
        int64_t      cell    = -1;
        llama_seq_id seq_id  = -1;
        uint64_t     written = 0;
    };

    std::vector<slot>                     slots;
    std::unordered_map<int64_t, uint32_t> slot_of;
    uint32_t                              share = 1;
    uint64_t                              clock = 0;

    uint32_t give(uint32_t at, int64_t cell, llama_seq_id seq_id) {
        if (slots[at].cell >= 0) {
            slot_of.erase(slots[at].cell);
        }
        slots[at] = { cell, seq_id, ++clock };
        slot_of[cell] = at;
        return at;
    }
};

// The precise rows of one llama_kv_cache.
class ggml_ext_recent {
  public:
    // Before the layers are made. Without flash attention there is none, nor where cells are another cache's.
    void init(ggml_type type_k, ggml_type type_v, uint32_t kv_size, uint32_t n_seq_max, uint32_t n_stream, uint32_t n_swa, bool off) {
        const uint32_t n_seq = n_seq_max/n_stream;
        n_slots = off ? 0 : ggml_ext_recent_slots(type_k, type_v, kv_size, n_seq, n_swa);
        named   = ggml_ext_recent_named(type_k, type_v);
        streams.resize(n_stream);
        n_share = std::max(1u, n_slots/n_seq);
        for (auto & s : streams) {
            s.init(n_slots, n_share);
        }
    }

    // The tensors of layer number `ikv` of the cache, beside its own. `dev`: where they are to be, NULL for the CPU.
    void add_layer(ggml_context * ctx, size_t ikv, ggml_tensor * k, ggml_tensor * v, int64_t n_head, ggml_backend_dev_t dev) {
        int32_t type_k, type_v;
        if (n_slots == 0 || n_head == 0 || k->ne[0] == 0 || !ggml_ext_recent_types(k->type, v ? v->type : -1, &type_k, &type_v)) {
            return;
        }
        if (dev && !ggml_ext_device_attends_recent(dev, k, v, (ggml_type) type_k, (ggml_type) type_v, n_head)) {
            if (named) {
                throw std::runtime_error(std::string("device ") + ggml_backend_dev_name(dev) +
                    " has no code for recent cells: say recent=0, or keep the cache on the CPU (-nkvo, --no-kv-offload)");
            }
            if (!warned) {
                LLAMA_LOG_WARN("%s: device %s has no code for recent cells: its layers do without\n", __func__, ggml_backend_dev_name(dev));
                warned = true;
            }
            return;
        }
        layer & l = layers[ikv];
        l.k.rows = slots_of(ctx, (ggml_type) type_k, k);
        l.v.rows = v ? slots_of(ctx, (ggml_type) type_v, v) : nullptr;
    }

    bool empty() const { return layers.empty(); }

    // Of one side, for the log.
    size_t bytes(char side) const {
        size_t res = 0;
        for (const auto & [_, l] : layers) {
            const ggml_tensor * rows = (side == 'k' ? l.k : l.v).rows;
            res += rows ? ggml_nbytes(rows) : 0;
        }
        return res;
    }

    uint32_t slots() const { return layers.empty() ? 0 : n_slots; }

    // graphs

    // The input of llama_kv_cache::cpy_k: a row of cells, and where there are slots
    // row 1: the slot of each token, -1 for none
    // row 2: the same, but a slot that nobody reads for none: ggml's own types
    // from row 3 on: for each stream, the cell of each column (slots, then the batch's tokens where it is large)
    ggml_tensor * build_idxs(ggml_context * ctx, uint32_t n_tokens, uint32_t n_seqs_unq) {
        forget_graph();
        n_stream = streams.size() == 1 ? 1 : n_seqs_unq;
        n_batch  = n_tokens;
        large    = is_large(n_tokens/n_stream, streams.size() == 1 ? n_seqs_unq : 1);
        if (layers.empty()) {
            return ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_tokens);
        }
        const uint64_t n_list = (uint64_t) n_stream*n_columns(), n_rows = 3 + (n_list + n_tokens - 1)/n_tokens;
        graph = ctx;
        idxs  = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, n_tokens, (int64_t) n_rows);
        // once for all layers: what goes to another device goes there once
        for (int row = 0; row < 3; row++) {
            rows_of_idxs[row] = ggml_view_1d(ctx, idxs, n_tokens, row*idxs->nb[1]);
        }
        list = ggml_view_2d(ctx, idxs, n_columns(), n_stream, n_columns()*idxs->nb[0], 3*idxs->nb[1]);
        return idxs;
    }

    // llama.cpp's own row of it.
    ggml_tensor * own_idxs(ggml_tensor * of) const { return of == idxs ? rows_of_idxs[0] : of; }

    // In cpy_k and cpy_v: `set` writes the rows `cur` to their cells; it comes behind what is written here. `of` is the input that
    // says where to.
    ggml_tensor * write(ggml_context * ctx, size_t ikv, char side, ggml_tensor * of, uint32_t first_stream, ggml_tensor * cur, ggml_tensor * set) {
        side_of * s = find(ctx, ikv, side);
        // V has an input of its own, and is written behind K
        if (!s || (side == 'k' ? of != idxs : !find(ctx, ikv, 'k')->written) || cur->ne[1] != (int64_t) n_batch) {
            return set;
        }
        ggml_tensor * rows  = ggml_reshape_2d(ctx, s->rows, s->rows->ne[0], s->rows->ne[1]*s->rows->ne[2]);
        ggml_tensor * write = ggml_set_rows(ctx, rows, cur, rows_of_idxs[ggml_ext_is_ours(rows->type) ? 1 : 2]);
        if (large) {
            if (!s->before) {
                s->before = ggml_cont(ctx, ggml_view_3d(ctx, s->rows, s->rows->ne[0], n_slots, n_stream, s->rows->nb[1], s->rows->nb[2],
                                                        first_stream*s->rows->nb[2]));
            }
            s->batch      = ggml_cast(ctx, cur, s->rows->type);
            write->src[3] = s->before; // read before it is written
        }
        s->written  = true;
        set->src[3] = write;
        return set;
    }

    // In get_k and get_v: `view` is what attention reads of one side, and knows from here on where precise rows are.
    ggml_tensor * attach(ggml_context * ctx, size_t ikv, char side, uint32_t first_stream, ggml_tensor * view) {
        side_of * s = find(ctx, ikv, side);
        if (!s || !s->written || view->ne[3] != (int64_t) n_stream) {
            return view;
        }
        const auto heads = [&](ggml_tensor * t, int64_t n, uint32_t first) {
            const size_t head = ggml_row_size(t->type, view->ne[0]), cell = ggml_row_size(t->type, s->rows->ne[0]);
            const size_t step = t == s->rows ? t->nb[2] : n*cell;
            return ggml_view_4d(ctx, t, view->ne[0], view->ne[1], n, n_stream, head, cell, step, first*step);
        };
        view->src[1] = s->before ? heads(s->before, n_slots, 0) : heads(s->rows, n_slots, first_stream);
        view->src[2] = list;
        view->src[3] = s->batch ? heads(s->batch, n_batch/n_stream, 0) : nullptr;
        return view;
    }

    // In set_input_k_idxs: the tokens of a batch get slots. `info` has llama.cpp's cells for them.
    template <typename Ubatch, typename Info, typename Cells>
    void set_idxs(ggml_tensor * dst, const Ubatch & ubatch, const Info & info, const Cells & cells_of_streams) {
        // the graph is built: one that comes without an input of ours has no precise rows
        forget_graph();
        const bool     listed   = dst->ne[1] > 1;
        const uint32_t n        = (uint32_t) info.size(), n_tokens = (uint32_t) dst->ne[0];
        const bool     is_large = this->is_large(n, streams.size() == 1 ? ubatch.n_seqs_unq : 1);
        const uint32_t columns  = n_slots + (is_large ? n : 0);
        int64_t *      data     = (int64_t *) dst->data;
        for (uint32_t s = 0; s < info.n_stream(); s++) {
            auto &         map    = streams[info.strm[s]];
            const auto &   cells  = cells_of_streams[info.strm[s]];
            const auto &   idxs   = info.idxs[s];
            const int64_t  first  = (int64_t) info.strm[s]*(n_slots + 1);
            int64_t *      slot   = data + n_tokens + s*n;
            int64_t *      column = data + 3*(size_t) n_tokens + (size_t) s*columns;
            const auto     alive  = [&](int64_t cell) { return !cells.is_empty((uint32_t) cell); };
            // a cell that its sequence writes again keeps its slot: a model's layers may be written by different graphs, in turn
            std::vector<int64_t> had(n);
            for (uint32_t i = 0; i < n; i++) {
                had[i] = map.find(idxs[i], ubatch.seq_id[s*n + i][0]);
                map.drop(idxs[i]);
            }
            if (!listed) {
                continue;
            }
            const auto list_slots = [&] {
                for (uint32_t i = 0; i < n_slots; i++) {
                    column[i] = map.cell(i);
                }
            };
            if (is_large) {
                list_slots();
                std::copy(idxs.begin(), idxs.end(), column + n_slots);
            }
            // the last tokens of each sequence
            std::vector<bool> kept(n);
            std::unordered_map<llama_seq_id, uint32_t> counts;
            for (uint32_t i = n; i-- > 0;) {
                kept[i] = counts[ubatch.seq_id[s*n + i][0]]++ < map.most();
            }
            for (uint32_t i = 0; i < n; i++) {
                slot[i] = kept[i] ? (int64_t) map.take(idxs[i], ubatch.seq_id[s*n + i][0], alive, (uint32_t) had[i]) : -1;
            }
            // one that was taken and given away within the batch is the last one's
            for (uint32_t i = 0; i < n; i++) {
                const bool has = slot[i] >= 0 && map.find(idxs[i]) == slot[i];
                slot[n_tokens + i] = first + (has ? slot[i] : n_slots);
                slot[i]            = has ? first + slot[i] : -1;
            }
            if (!is_large) {
                list_slots();
            }
        }
    }

    // the life of a cache

    // Cells that are written by other means than a graph.
    template <typename Cells> void drop(uint32_t stream, const Cells & cells) {
        for (const auto cell : cells) {
            streams[stream].drop(cell);
        }
    }

    const ggml_ext_slot_map & map(uint32_t stream) const { return streams[stream]; }
    ggml_ext_slot_map &       map(uint32_t stream) { return streams[stream]; }

    // The tensor of one side of a layer and its bytes from slot to slot; NULL where there is none.
    ggml_tensor * rows(size_t ikv, char side) const {
        const auto it = layers.find(ikv);
        return it == layers.end() ? nullptr : side == 'k' ? it->second.k.rows : it->second.v.rows;
    }

    // Where a slot's row begins.
    size_t offset(const ggml_tensor * rows, uint32_t stream, uint32_t slot) const {
        return stream*rows->nb[2] + slot*rows->nb[1];
    }

    void copy_stream(uint32_t src, uint32_t dst) {
        for (auto & [_, l] : layers) {
            for (ggml_tensor * rows : { l.k.rows, l.v.rows }) {
                if (rows) {
                    std::vector<uint8_t> bytes(rows->nb[2]);
                    ggml_backend_tensor_get(rows, bytes.data(), src*rows->nb[2], bytes.size());
                    ggml_backend_tensor_set(rows, bytes.data(), dst*rows->nb[2], bytes.size());
                }
            }
        }
        if (!layers.empty()) {
            streams[dst] = streams[src];
        }
    }

    // K-shift: rows of all streams, and by how much each is shifted, behind the shifts of all cells.
    int64_t n_shifts() const { return layers.empty() ? 0 : (int64_t) streams.size()*(n_slots + 1); }

    ggml_tensor * shifted_rows(ggml_context * ctx, size_t ikv, int64_t n_rot, int64_t n_head) const {
        ggml_tensor * rows = this->rows(ikv, 'k');
        return rows ? ggml_view_3d(ctx, rows, n_rot, n_head, n_shifts(), ggml_row_size(rows->type, rows->ne[0]/n_head), rows->nb[1], 0) : nullptr;
    }

    template <typename Cells> void set_shifts(int32_t * data, const Cells & cells_of_streams) const {
        for (size_t s = 0; s < streams.size() && !layers.empty(); s++) {
            for (uint32_t i = 0; i <= n_slots; i++) {
                const int64_t cell = i < n_slots ? streams[s].cell(i) : -1;
                const auto &  all  = cells_of_streams[s];
                data[s*(n_slots + 1) + i] = cell < 0 || all.is_empty((uint32_t) cell) ? 0 : all.get_shift((uint32_t) cell);
            }
        }
    }

  private:
    struct side_of {
        ggml_tensor * rows = nullptr; // [values, slots + 1, streams]: the last slot is never read

        // of the graph that is being built
        ggml_tensor * before  = nullptr;
        ggml_tensor * batch   = nullptr;
        bool          written = false;

        void reset() { before = batch = nullptr; written = false; }
    };

    struct layer {
        side_of k, v;
    };

    std::map<size_t, layer>        layers;
    std::vector<ggml_ext_slot_map> streams;
    uint32_t                       n_slots = 0, n_share = 0;
    bool                           named = false, warned = false;

    // of the graph that is being built
    const ggml_context * graph = nullptr;
    ggml_tensor *        idxs  = nullptr, * list = nullptr, * rows_of_idxs[3] = {};
    uint32_t             n_batch = 0, n_stream = 1;
    bool                 large = false;

    void forget_graph() {
        idxs = nullptr;
        for (auto & [_, l] : layers) {
            l.k.reset();
            l.v.reset();
        }
    }

    // Would these tokens of a stream, of so many sequences, push out too much of what they want to see?
    bool     is_large(uint32_t n, uint32_t n_seqs) const { return 4*(uint64_t) n > std::min<uint64_t>(n_slots, (uint64_t) n_share*n_seqs); }
    uint32_t n_columns() const { return n_slots + (large ? n_batch/n_stream : 0); }

    ggml_tensor * slots_of(ggml_context * ctx, ggml_type type, const ggml_tensor * of) const {
        ggml_tensor * res = ggml_new_tensor_3d(ctx, type, of->ne[0], n_slots + 1, of->ne[2]);
        ggml_format_name(res, "%s_recent", of->name);
        return res;
    }

    side_of * find(const ggml_context * ctx, size_t ikv, char side) {
        const auto it = layers.find(ikv);
        if (it == layers.end() || !idxs || graph != ctx) {
            return nullptr;
        }
        side_of & res = side == 'k' ? it->second.k : it->second.v;
        return res.rows ? &res : nullptr;
    }
};

// In build_attn_mha: an attention whose K and V have precise rows gets them as sources. Where V is a part of K (MLA), so are
// its precise rows.
inline void ggml_ext_attend_recent(ggml_context * ctx, ggml_tensor * attention) {
    const auto view_of = [](ggml_tensor * t) {
        while (t && t->op == GGML_OP_PERMUTE) {
            t = t->src[0];
        }
        return t && t->op == GGML_OP_VIEW ? t : nullptr;
    };
    ggml_tensor * k = view_of(attention->src[1]), * v = view_of(attention->src[2]);
    if (!k || !v || !k->src[1] || (!v->src[1] && v->view_src != k->view_src)) {
        return;
    }
    const auto part = [&](ggml_tensor * of_k, ggml_tensor * of_v) {
        ggml_tensor * res = v->src[1] ? of_v : ggml_view_4d(ctx, of_k, v->ne[0], of_k->ne[1], of_k->ne[2], of_k->ne[3], of_k->nb[1],
                                                            of_k->nb[2], of_k->nb[3], 0);
        return ggml_permute(ctx, res, 0, 2, 1, 3);
    };
    attention->src[5] = ggml_permute(ctx, k->src[1], 0, 2, 1, 3);
    attention->src[6] = part(k->src[1], v->src[1]);
    attention->src[7] = k->src[2];
    if (k->src[3]) {
        attention->src[8] = ggml_permute(ctx, k->src[3], 0, 2, 1, 3);
        attention->src[9] = part(k->src[3], v->src[3]);
    }
}
