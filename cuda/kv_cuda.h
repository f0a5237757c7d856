// What the shim calls: launches of the kernels in this folder, on a stream, without synchronization or allocation.
//
// Kinds of rows and strides are those of ../shaders/kv_args.h. Nothing here knows ggml.
#pragma once

#include "../shaders/kv_args.h"

#include <cuda_runtime.h>

#include <stddef.h>
#include <stdint.h>

// Tensor cores of Turing; before it there are none that these kernels use.
#define KV_CUDA_OLDEST 750

struct kv_cuda_device {
    int    cc;           // 100*major + 10*minor
    int    sms;          // multiprocessors
    size_t shared_bytes; // of a block, by opt-in
    int    busy = 0;     // multiprocessors that have other work for a while
};

// Rows. `from` and `to` are tensors, `index` row numbers of 4 or 8 bytes, or null with 0 bytes: copies.

struct kv_cuda_rows {
    kv_rows_args args;
    uint32_t     kind;
    uint32_t     size;        // values of a head
    uint32_t     float_kind;  // KV_KIND_F32, KV_KIND_F16 or KV_KIND_BF16: the side that is not the cache
    uint32_t     index_bytes;
    const void * from;
    const void * index;
    void *       to;
    const float * center; // f32 of each head, which rows that stand alone are written without; null for none
};

// Ops that write rows in one launch: none of them reads what another writes.
#define KV_CUDA_WRITES 4

struct kv_cuda_writes {
    kv_cuda_rows op[KV_CUDA_WRITES];
    int          count;
};

// May one launch do both?
bool        kv_cuda_write_together(const kv_cuda_rows & a, const kv_cuda_rows & b);
cudaError_t kv_cuda_set_rows (const kv_cuda_writes & writes, cudaStream_t stream);
cudaError_t kv_cuda_get_rows (const kv_cuda_rows & op, cudaStream_t stream);
cudaError_t kv_cuda_copy_rows(const kv_cuda_rows & op, cudaStream_t stream);

// Attention.

// Precise rows of recent cells, of the head sizes of K and V: attended to like a cache of their own, and merged with it.
struct kv_cuda_recent {
    kv_attn_args args;
    uint32_t     k_kind, v_kind;
    uint32_t     k_bytes, v_bytes;
    uint32_t     first_column;
    const void * k;
    const void * v;
};

struct kv_cuda_attention {
    kv_attn_args  args; // how it is split is the plan's
    uint32_t      k_kind, v_kind, q_kind;
    uint32_t      k_size, v_size;   // values of a head
    uint32_t      k_bytes, v_bytes; // of its row
    bool          alibi;
    const void *  q;
    const void *  k;
    const void *  v;
    const void *  mask;  // null for none
    const float * sinks; // null for none
    const float * center; // of each KV head, which is added to results; null for none
    void *        dst;
    // precise rows: a window, and the batch's own
    uint32_t       parts; // none, one or both
    kv_cuda_recent part[2];
    kv_recent_args recent;
    const void *   columns; // i64: the cell of each column
};

// Kernels that copy tiles: teams of a block, tiles that each has at a time, how many of these lie before the table, and warps beside the teams that
// ask for tiles.
struct kv_cuda_teams {
    uint32_t teams, depth, front_slots, askers;
};

// How an attention over some rows is split.
struct kv_cuda_split {
    bool     decode;      // by the kernels of kv_decode.cu,
    kv_cuda_teams bulk;   // and if there are teams, by those that copy tiles,
                          // else by those of kv_tile.cu
    int      row_blocks;  // tile: blocks of 16 query rows in a thread block
    int      slabs;       // tile: slabs of V
    bool     staged;      // tile: rows go through shared memory
    uint32_t chunk_cells;
    uint32_t part_cells;  // decode: of a chunk of precise rows
    uint32_t chunks;
    size_t   shared_bytes;
    size_t   shared_limit; // the device's
};

struct kv_cuda_plan {
    kv_cuda_split main, part[2];
    bool          together; // one kernel for the cache and all precise rows
    bool          announced; // queries, while rows are written by the same launch
    uint32_t      chunks;   // of all
    size_t        scratch_bytes;
};

// False where no kernel fits the device. `writes`: what is to be written in the first launch, if it may be.
bool        kv_cuda_plan_attention(const kv_cuda_attention & op, const kv_cuda_device & device, const kv_cuda_writes & writes, kv_cuda_plan & plan);
// May rows that it reads be written in its first launch?
bool        kv_cuda_writes_first(const kv_cuda_attention & op, const kv_cuda_plan & plan, const kv_cuda_writes & writes);
// `writes`: none where kv_cuda_writes_first says no
cudaError_t kv_cuda_attend(const kv_cuda_attention & op, const kv_cuda_plan & plan, const kv_cuda_writes & writes, void * scratch, cudaStream_t stream);

// Attention by ggml's kernels for halves (kv_expand.cu): what they need, in values of each buffer.

struct kv_cuda_expanded {
    uint32_t k_width, v_width; // of a head
    size_t   queries, keys, values, results;
};

kv_cuda_expanded kv_cuda_expanded_of(const kv_cuda_attention & op);
// queries: floats, [stream][head][token][value]; keys and values: halves, [stream][KV head][cell][value]
cudaError_t kv_cuda_expand(const kv_cuda_attention & op, float * queries, void * keys, void * values, cudaStream_t stream);
// results: floats, [stream][token][head][value]
cudaError_t kv_cuda_leave_domain(const kv_cuda_attention & op, const float * results, cudaStream_t stream);

// The same by a kernel of our own for Hopper (hopper/kv_prompt.cu), where KV_CUDA_HOPPER says that it was compiled.

struct kv_cuda_prompt {
    uint32_t width, tile_cells, tiles, row_tiles;
    uint32_t shares, share_tiles;                            // of the cells, for as many blocks
    size_t   queries, keys, values, classes, metas, sums;    // where they begin in the scratch
    size_t   scratch_bytes;
};

// False where it does not serve the op.
bool        kv_cuda_plan_prompt(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_prompt & plan);
cudaError_t kv_cuda_attend_prompt(const kv_cuda_attention & op, const kv_cuda_prompt & plan, void * scratch, cudaStream_t stream);

// What GGML_EXT_CUDA_PATH asks for, to test and to see what each takes: "rows", what GPUs before Hopper run; "own", nothing by
// ggml's kernels; "tile", everything by kv_tile.cu.
bool        kv_cuda_path_is(const char * name);
