// Which kernel decodes a pair of types: each K has a file of its own, so that they are compiled side by side.
#pragma once

#include "attention.cuh"

namespace kv {

// A block has four warps and takes eight query rows; a warp takes 64 cells at a time.
namespace {
constexpr uint WARPS = 4, THREADS = 32*WARPS, ROWS = 8, BLOCK = 64;
// What a block keeps of recent cells: bits of its chunk of the cache, or the cells of its chunk of precise rows.
constexpr uint RECENT_WORDS = WARPS*BLOCK, MOST_CHUNK_CELLS = 32*RECENT_WORDS;
}  // namespace

struct decode_choice {
    void (*kernel)(const attn_params); // null where there is none
    void (*recent)(const attn_params); // with precise rows beside the cache
    uint   blocks_per_sm;
    size_t shared_bytes;
};

// Of V's kind, a head size of 64, 128 or 256, and one or two blocks of four query rows.
decode_choice decode_of_srft8(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_srft4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_srft3(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_srft2(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_delta4(uint v_kind, uint size, uint row_blocks);
decode_choice decode_of_delta3(uint v_kind, uint size, uint row_blocks);

}  // namespace kv
