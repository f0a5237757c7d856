// What the host hands to the kernels: plain structs, read by the shaders and by whoever launches them.
//
// Strides are in bytes, of dimensions 1 to 3 of a tensor; where dimension 0 has one it is named. The order of members leaves
// no holes.

#pragma once

#ifndef __METAL_VERSION__
#include <stdint.h>
#endif

// Kinds of rows: ggml's type ids, and for our families the id of the smallest head size.
#define KV_KIND_F32 0
#define KV_KIND_F16 1
#define KV_KIND_Q4_0 2
#define KV_KIND_Q8_0 8
#define KV_KIND_SRFT8 128
#define KV_KIND_SRFT4 144
#define KV_KIND_SRFT3 160
#define KV_KIND_SRFT2 176

// kv_set_rows and kv_get_rows. A unit is one head of one row; one simdgroup works on one unit.
struct kv_rows_args {
    uint32_t units;         // heads * rows[0] * rows[1] * rows[2]
    uint32_t heads;         // heads that lie side by side in a row
    uint32_t rows[3];       // rows of the floats, by dimension
    uint32_t index_rows[2]; // the index repeats along dimensions 1 and 2
    uint32_t cache_rows;    // an index beyond is not followed
    uint64_t value_step;    // bytes from float to float
    uint64_t float_nb[3];
    uint64_t cache_nb[3];
    uint64_t index_nb[3]; // of its dimensions 0 to 2
};

// kv_attn_decode and kv_attn_merge.
struct kv_attn_args {
    uint32_t cells;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t tokens;
    uint32_t streams;     // of queries
    uint32_t kv_streams;  // divides streams
    uint32_t chunk_cells; // cells of one threadgroup
    uint32_t chunks;
    uint32_t mask_rows[2]; // the mask repeats along dimensions 2 and 3
    uint32_t out_size;     // values of a result row that are written
    uint32_t slope_heads;  // the largest power of two that is not above heads
    float scale;
    float softcap;
    float slope_low;  // base of ALiBi's slopes below slope_heads
    float slope_high; // and from there on
    uint64_t q_nb[3];
    uint64_t k_nb[3];
    uint64_t v_nb[3];
    uint64_t mask_nb[3];
    uint64_t dst_nb[3];
};

// Query heads that a threadgroup takes at most, and the room that they share: rows * head size stays within it, for K
// and for V.
#define KV_ATTN_ROWS 8
#define KV_ATTN_VALUES 1152
