// Which kernel decodes a pair of types: each K has a file of its own, so that they are compiled side by side.
#pragma once

#include "attention.cuh"

namespace kv {

// Of decode_rows.cuh: a block has four warps and takes eight query rows; a warp takes 64 cells at a time.
namespace {
constexpr uint WARPS = 4, THREADS = 32*WARPS, ROWS = 8, BLOCK = 64;
// What a block keeps of recent cells: bits of its chunk of the cache, or the cells of its chunk of precise rows.
constexpr uint RECENT_WORDS = WARPS*BLOCK, MOST_CHUNK_CELLS = 32*RECENT_WORDS;
}  // namespace

// Cells of one product.
constexpr uint STEP = 16;

// Cells of a tile that is copied as a whole, and what a chunk of those has at most: cells times rows of the mask.
constexpr uint TILE = 32, TILE_MASK = 2048;

struct decode_choice {
    // rows to registers (decode_rows.cuh)
    void (*kernel)(const attn_params) = nullptr; // null where there is none
    void (*recent)(const attn_params) = nullptr; // with precise rows beside the cache
    uint   blocks_per_sm = 0;
    size_t shared_bytes  = 0;
    // tiles of all KV heads to shared memory (decode_bulk.cuh)
    void (*bulk)(const attn_params)        = nullptr;
    void (*bulk_recent)(const attn_params) = nullptr;
    kv_cuda_teams (*teams_of)(uint heads, size_t shared_bytes) = nullptr; // none where they do not fit
};

// Of V's kind, a head size of 64, 128 or 256, and one or two blocks of four query rows.
decode_choice decode_of_srft8(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_srft4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_srft3(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_srft2(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_delta8(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_delta4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_delta3(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_band4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_band3(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_band2(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_polar4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_polar3(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_turbo4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_turbo3(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_qjl1(uint v_kind, uint size, uint row_blocks);

}  // namespace kv
