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
#define KV_KIND_BF16 30
#define KV_KIND_SRFT8 128
#define KV_KIND_SRFT4 144
#define KV_KIND_SRFT3 160
#define KV_KIND_SRFT2 176
#define KV_KIND_DELTA4 192
#define KV_KIND_DELTA3 208
#define KV_KIND_POLAR4 224
#define KV_KIND_POLAR3 240
#define KV_KIND_TURBO4 256
#define KV_KIND_TURBO3 272
#define KV_KIND_QJL1 288
#define KV_KIND_BAND4 304
#define KV_KIND_BAND3 320
#define KV_KIND_BAND2 336
#define KV_KIND_DELTA8 352

#define KV_KIND_IS_SRFT(kind) ((kind) >= KV_KIND_SRFT8 && (kind) <= KV_KIND_SRFT2)
#define KV_KIND_IS_BAND(kind) ((kind) >= KV_KIND_BAND4 && (kind) <= KV_KIND_BAND2)
// Cells are coded together, as differences: of equal codes, or in bands.
#define KV_KIND_IS_DELTA(kind) ((kind) == KV_KIND_DELTA4 || (kind) == KV_KIND_DELTA3 || (kind) == KV_KIND_DELTA8 || KV_KIND_IS_BAND(kind))
#define KV_KIND_IS_POLAR(kind) ((kind) == KV_KIND_POLAR4 || (kind) == KV_KIND_POLAR3)
#define KV_KIND_IS_TURBO(kind) ((kind) == KV_KIND_TURBO4 || (kind) == KV_KIND_TURBO3)
// Values of the row of a head in the domain that its scores and sums are taken in.
#define KV_WIDTH(kind, size) (KV_KIND_IS_TURBO(kind) ? 2*(size) : (size))
// Ours, and the shaders have kernels for it.
#define KV_KIND_IS_SERVED(kind) ((kind) >= KV_KIND_SRFT8 && (kind) <= KV_KIND_DELTA8)
// Rows that hold keys alone.
#define KV_KIND_K_ONLY(kind) (KV_KIND_IS_DELTA(kind) || (kind) == KV_KIND_QJL1)

#define KV_LARGEST_SIZE 576

// kv_set_rows, kv_get_rows and kv_copy_rows. A unit is one head of one row; one simdgroup works on one unit. `floats` is the
// side that is not the cache; of a copy between caches, the one that is written.
struct kv_rows_args {
    uint32_t units;         // heads * rows[0] * rows[1] * rows[2]
    uint32_t heads;         // heads that lie side by side in a row of the floats
    uint32_t rows[3];       // rows of the floats, by dimension
    uint32_t index_rows[2]; // the index repeats along dimensions 1 and 2
    uint32_t cache_heads;   // heads of a row of the cache
    uint32_t cache_rows[2]; // an index beyond the first is not followed
    uint32_t cells;         // where cells are coded together: of a stream,
    uint32_t first_cell;    // which of them the cache begins with,
    uint64_t cell_step;     // and bytes from one to the next
    uint64_t value_step;    // bytes from float to float
    uint64_t float_nb[3];
    uint64_t cache_nb[3];
    uint64_t index_nb[3]; // of its dimensions 0 to 2
};

// kv_attn_decode, kv_attn_merge and kv_attn_prefill.
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
    uint32_t k_cells;      // cells of K's cache, of which `cells` are looked at
    float scale;
    float softcap;
    float slope_low;  // base of ALiBi's slopes below slope_heads
    float slope_high; // and from there on
    uint32_t first_chunk;  // where the chunks of this dispatch begin among all
    uint32_t main_chunks;  // chunks of the cache; those behind them are of precise rows
    uint32_t sum_width;    // values of a chunk's sum: V's width
    uint32_t hidden_words; // of a KV stream, where cells have a bit each: is there a precise row?
    uint32_t padding;
    uint64_t q_nb[3];
    uint64_t k_nb[3];
    uint64_t v_nb[3];
    uint64_t mask_nb[3];
    uint64_t dst_nb[3];
};

// kv_attn_columns. A column is a precise row of a recent cell: `columns` of them stand for the cells that they name, if these
// are below `cells`. Out of it come the bits of those cells, and the mask of the columns: [stream][mask head][token][column].
struct kv_recent_args {
    uint32_t cells;
    uint32_t columns;
    uint32_t tokens; // 1 where there is no mask
    uint32_t streams;
    uint32_t kv_streams;
    uint32_t mask_rows[2];
    uint32_t hidden_words;
    uint64_t columns_nb[2]; // from column to column, from KV stream to KV stream
    uint64_t mask_nb[3];
    uint64_t row_bytes; // of the columns' mask
};

// Cells that a threadgroup of kv_attn_columns makes the bits of.
#define KV_COLUMNS_CELLS 2048
#define KV_HIDDEN_WORDS(cells) (((cells) + 63)/64*2)

// Query heads that a decoding threadgroup takes at most, and the room that they share: rows * width stays within it, for K
// and for V.
#define KV_ATTN_ROWS 8
#define KV_ATTN_VALUES 1152
// The widest rows that prefill has threadgroup memory for.
#define KV_PREFILL_WIDEST 640

#define KV_LARGER(a, b) ((a) > (b) ? (a) : (b))

// Tables of levels, of any kind and of one that V may have.
#define KV_LEVELS 64
#define KV_V_LEVELS 16

// Floats of threadgroup memory. Of a simdgroup, for a row of one head and codes or a table:
#define KV_ROWS_FLOATS(size) ((size) + KV_LARGER((size)/4, KV_LEVELS))
// of the one simdgroup that writes cells which are coded together:
#define KV_DELTA_FLOATS(size) (5*(size) + KV_LEVELS)
// of a threadgroup of a power of two of simdgroups:
#define KV_DECODE_FLOATS(rows, simdgroups, k_width, v_width) \
    (KV_LEVELS + KV_V_LEVELS + KV_LARGER((rows)*(k_width) + (simdgroups)*32*(rows), KV_LARGER((simdgroups)/2, 1)*(rows)*((v_width) + 2)))
#define KV_MERGE_FLOATS(v_width) (v_width)
// `rows` is 8 or 16:
#define KV_PREFILL_FLOATS(rows, k_width, v_width) \
    (KV_LEVELS + KV_V_LEVELS + 160 + 42*(rows) + KV_LARGER(32*64 + (rows)*(k_width), (rows)*(v_width)))
