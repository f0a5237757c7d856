// Attention of prompts on Hopper: what kv_expand.cu and kv_prompt.cu share.
#pragma once

#include "../attention.cuh"

namespace kv {

constexpr uint PROMPT_ROWS = 128; // of a block

// Cells of a tile.
constexpr uint prompt_cells(uint width) {
    return width == 256 ? 64 : 128;
}

// A tile is panels of 64 values: [panel][row][64], rows of 128 bytes, in which unit u of 16 bytes lies at u ^ (row % 8), as the products of
// warpgroups read them.
static __device__ __forceinline__ uint place_in_tile(uint rows, uint row, uint i) {
    return (i/64*rows + row)*64 + ((i/8 ^ row) & 7)*8 + i % 8;
}

// attn.args.chunks: shares of the cells. A row of a KV head is a token and one of its query heads.
struct prompt_params {
    attn_params    attn;
    const __half * queries;     // [stream][KV head][tile of rows], rows by token and head
    const __half * keys;        // [KV stream][KV head][tile]
    const __half * values;
    uint8_t *      classes;     // [stream][tile of rows][tile]: what the mask says
    uint           row_tiles, tiles, tile_cells, share_tiles;
};

uint        prompt_most_tiles(); // of a share
size_t      prompt_shared_bytes(uint width);
cudaError_t launch_prompt_classes(const prompt_params & p, cudaStream_t stream);
cudaError_t launch_prompt(const prompt_params & p, uint width, cudaStream_t stream);

}  // namespace kv
