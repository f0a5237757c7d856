// Cells whose keys are coded together: which cells llama.cpp gives to tokens, and when a group begins anew.
//
// A group of 64 cells has one I-frame, its first key, and a key is coded by its difference from the key in the cell before
// it. So two things decide how well keys are coded: that neighbouring cells hold neighbouring tokens of one sequence, and
// that a group whose tokens are all gone does not keep the I-frame of a text that nobody remembers. llama.cpp gives
// tokens the first free cells, which puts the tokens of sequences that are decoded together side by side, and tells
// nobody when a cell dies. Here
//
// - a token goes to the cell behind its predecessor's, in the same group; where that is taken or the group is full, to the
//   first cell of a group that is free as a whole, the next one if it can be; only where there is none to any free cell;
// - a group that is free as a whole is cleared before it is written again.
//
// A text then has the same keys whatever the cache held before and whatever is decoded beside it, as long as there are free
// groups.
#pragma once

#include "ggml-ext-seam.h"

#include "llama-hparams.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

inline uint32_t ggml_ext_group_cells(ggml_type type) {
    return ggml_ext_is_ours(type) ? (uint32_t) ggml_ext_type_get(type)->group_cells : 1;
}

template <typename Layers> uint32_t ggml_ext_cache_group_cells(const Layers & layers) {
    uint32_t res = 1;
    for (const auto & layer : layers) {
        res = layer.k ? std::max(res, ggml_ext_group_cells(layer.k->type)) : res;
    }
    return res;
}

// The first cells of the groups that these cells are in, each once.
inline std::set<uint32_t> ggml_ext_groups_of(const std::vector<uint32_t> & cells, uint32_t group) {
    std::set<uint32_t> res;
    for (const uint32_t cell : cells) {
        res.insert(cell/group*group);
    }
    return res;
}

// May a new token have this cell? As llama_kv_cache::find_slot says it: an empty one, or one of a single sequence that its
// sliding window hides from all tokens to come.
template <typename Cells> bool ggml_ext_cell_is_free(const Cells & cells, uint32_t i, uint32_t n_swa, llama_swa_type swa_type) {
    return cells.is_empty(i) || (cells.seq_count(i) == 1 &&
        llama_hparams::is_masked_swa(n_swa, swa_type, cells.pos_get(i), cells.seq_pos_max(cells.seq_get(i)) + 1));
}

template <typename Cells> class ggml_ext_placer {
  public:
    ggml_ext_placer(const Cells & cells, uint32_t group, uint32_t n_swa, llama_swa_type swa_type)
        : cells(cells), group(group), n_groups((cells.size() + group - 1)/group), n_swa(n_swa), swa_type(swa_type) {}

    uint32_t place(llama_seq_id seq_id, llama_pos pos) {
        int64_t before = -1;  // the cell of the token before
        if (const auto it = last.find(seq_id); it != last.end()) {
            before = it->second;
        } else if (const auto & all = cells.seq_pos_get(seq_id); !all.empty()) {
            const auto next = all.lower_bound({ pos, 0 });
            before = next == all.begin() ? -1 : std::prev(next)->second;
        }
        uint32_t cell = (uint32_t) (before + 1);
        if (cell%group == 0 || cell >= cells.size() || !is_free(cell)) {
            cell = free_group_or_cell(before < 0 ? 0 : (uint32_t) before/group + 1);
        }
        taken.insert(cell);
        last[seq_id] = cell;
        return cell;
    }

  private:
    const Cells &        cells;
    const uint32_t       group, n_groups, n_swa;
    const llama_swa_type swa_type;

    std::unordered_map<llama_seq_id, uint32_t> last;  // the newest cell of each sequence in this batch
    std::set<uint32_t>                         taken;
    uint32_t no_group_below = 0, no_cell_below = 0;    // what was not free stays so while a batch is placed

    bool is_free(uint32_t cell) const {
        return taken.count(cell) == 0 && ggml_ext_cell_is_free(cells, cell, n_swa, swa_type);
    }

    bool group_is_free(uint32_t g) const {
        for (uint32_t cell = g*group; cell < std::min((g + 1)*group, cells.size()); cell++) {
            if (!is_free(cell)) {
                return false;
            }
        }
        return g < n_groups;
    }

    uint32_t free_group_or_cell(uint32_t wanted) {
        if (group_is_free(wanted)) {
            return wanted*group;
        }
        for (; no_group_below < n_groups; no_group_below++) {
            if (group_is_free(no_group_below)) {
                return no_group_below*group;
            }
        }
        // find_slot has counted the free cells: there is one
        while (no_cell_below + 1 < cells.size() && !is_free(no_cell_below)) {
            no_cell_below++;
        }
        return no_cell_below;
    }
};

// At the end of llama_kv_cache::find_slot: `idxs` has free cells for the tokens of one stream, which begin at `first` in the
// batch, and gets others where cells are coded together.
template <typename Layers, typename Cells, typename Ubatch>
void ggml_ext_place_tokens(const Layers & layers, const Cells & cells, const Ubatch & ubatch, uint32_t first, uint32_t n_swa,
                           llama_swa_type swa_type, std::vector<uint32_t> & idxs) {
    const uint32_t group = ggml_ext_cache_group_cells(layers);
    if (group == 1) {
        return;
    }
    ggml_ext_placer<Cells> placer(cells, group, n_swa, swa_type);
    for (uint32_t i = 0; i < idxs.size(); i++) {
        idxs[i] = placer.place(ubatch.seq_id[first + i][0], ubatch.pos[first + i]);
    }
}

// Before llama_kv_cache_context::apply gives cells to the tokens of a batch: groups that are free as a whole and are
// about to be written are cleared, so that the first key founds them anew. What a sliding window has left in them is
// forgotten with its keys; returned is the last position that each sequence has lost so, since llama.cpp wants it to lose
// all before that as well. Nothing may be computing with the cache (llama_context::process_ubatch waits).
template <typename Layers, typename Streams, typename Slots>
std::map<llama_seq_id, llama_pos> ggml_ext_renew_groups(const Layers & layers, Streams & streams, const Slots & slots, uint32_t n_swa, llama_swa_type swa_type) {
    std::map<llama_seq_id, llama_pos> lost;
    const uint32_t group = ggml_ext_cache_group_cells(layers);
    for (size_t s = 0; group > 1 && s < slots.n_stream(); s++) {
        auto & cells = streams[slots.strm[s]];
        const auto & written = slots.idxs[s];
        const auto end_of = [&](uint32_t first) { return std::min(first + group, cells.size()); };
        // Which ones, before a cell is removed: what a window hides depends on a sequence's last position.
        std::vector<uint32_t> renewed;
        for (const uint32_t first : ggml_ext_groups_of(written, group)) {
            bool free = true, empty = true;
            for (uint32_t i = first; i < end_of(first) && free; i++) {
                free  = ggml_ext_cell_is_free(cells, i, n_swa, swa_type);
                empty = empty && cells.is_empty(i);
            }
            // A token that goes on in a group does not end it, though its window may hide all that is there.
            if (free && (empty || std::find(written.begin(), written.end(), first) != written.end())) {
                renewed.push_back(first);
            }
        }
        for (const uint32_t first : renewed) {
            for (uint32_t i = first; i < end_of(first); i++) {
                if (!cells.is_empty(i)) {
                    const llama_seq_id seq_id = cells.seq_get(i);
                    const auto at = lost.emplace(seq_id, cells.pos_get(i)).first;
                    at->second = std::max(at->second, cells.pos_get(i));
                    cells.rm(i);
                }
            }
            for (const auto & layer : layers) {
                ggml_tensor * k = layer.k ? layer.k_stream[slots.strm[s]] : nullptr;
                if (k && ggml_ext_group_cells(k->type) > 1) {
                    ggml_backend_tensor_memset(k, 0, first*k->nb[1], (end_of(first) - first)*k->nb[1]);
                }
            }
        }
    }
    return lost;
}

// llama_kv_cache::prepare tries batches on its cells and puts back those that it gave to tokens, but not what a window lost
// meanwhile (llama_kv_cache::apply_ubatch). With groups a token may go to any free group, so that would be a part of the
// window itself: then all cells are put back. Caches of windows are small.
template <typename Layers, typename Streams> class ggml_ext_cells_kept {
  public:
    ggml_ext_cells_kept(const Layers & layers, Streams & streams, uint32_t n_swa) : streams(streams) {
        if (n_swa > 0 && ggml_ext_cache_group_cells(layers) > 1) {
            kept = streams;
        }
    }

    void put_back() {
        if (!kept.empty()) {
            streams = std::move(kept);
        }
    }

  private:
    Streams & streams;
    Streams   kept;
};
