// The C boundary of ggml-ext: KV-cache types that ggml does not have.
//
// Everything here is implemented in Rust (src/ffi.rs) and knows nothing of ggml: tensors cross as plain
// descriptions. The shim (../shim) is the only code that knows both sides. No function unwinds or aborts; what
// can fail says so in its result and writes a message into `err`, always terminated, also after a panic inside; it is
// empty where nothing is to be said.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Ids above ggml's own: GGML_EXT_TYPE_BASE + 16*family + size index is a concrete type (one family at one head
// size) and is stable for ever, because state files hold it. Size index 15 stands for the family as a whole: it is
// what a user asks for, and becomes a concrete type per layer (ggml_ext_resolve). No tensor has a family's id.
#define GGML_EXT_TYPE_BASE  128
#define GGML_EXT_TYPE_LIMIT 384

// Ids of specs ("srft4,0-1=srft8"): given out one after the other as ggml_ext_type_parse meets new texts, the same
// text always the same id, good for this process alone. They go wherever a cache type goes and become a concrete type
// per layer; no tensor and no state file has one.
#define GGML_EXT_SPEC_BASE  0x10000
#define GGML_EXT_SPEC_LIMIT 0x20000

struct ggml_ext_type {
    int32_t      id;
    const char * name;        // "srft4" for a family, "srft4_128" for a concrete type, a spec's text
    const char * family;      // "srft4"; of a spec, its first type
    int32_t      head_size;   // values in a row of one head = ggml's block size; 0 for a family or a spec
    size_t       row_bytes;   // bytes of such a row = ggml's type size; 0 for a family or a spec
    double       bits;        // bits per value; for a family, those of head size 128; of a spec, its first type's
    bool         serves_k;
    bool         serves_v;
    int32_t      group_cells; // cells that are coded together, 1 where each row stands alone
    bool         quantized;   // false for a spec of f32, f16 and bf16 alone
};

// NULL where the id is neither a family nor a concrete type nor a spec of ours.
const struct ggml_ext_type * ggml_ext_type_get(int32_t id);

// The id of a cache type as a user writes it: a family ("srft4"), a concrete type ("srft4_128"), one of ggml's own
// ("q8_0"), or a spec of them by layer ("srft4,0-1=srft8,-1=f16", "srft4,swa=srft3", "srft4,guard=off"). -1, with a
// message that points at the place and lists what exists, for anything else.
int32_t ggml_ext_type_parse(const char * text, char * err, size_t err_size);

// The same without a message.
int32_t ggml_ext_type_from_name(const char * name);

// "srft8, srft4, …": the families, for help texts and error messages.
const char * ggml_ext_family_names(void);

// May a context be made with these cache types, for a model of so many layers? `is_ggml_*`: the id is one of ggml's
// own types. Refuses ids that are nobody's, types on a side they do not serve, specs of layers that the model does not
// have, and a compressed V without flash attention: `flash_attn_off`, or an architecture (llama.cpp's name, may be NULL)
// that llama.cpp always computes without.
bool ggml_ext_check_cache(int32_t type_k, bool is_ggml_k, int32_t type_v, bool is_ggml_v, int32_t n_layer, const char * arch,
                          bool flash_attn_off, char * err, size_t err_size);

// What of a spec changes nothing on a model: layers named that keep no K and V, `swa` where none has a window. Empty for
// other types. `layers` has a character a layer: '-' keeps nothing of its own, 'a' all cells, 'w' those of a window.
void ggml_ext_idle_parts(int32_t type, const uint8_t * layers, int32_t n_layer, char * message, size_t size);

// One layer of a model, as its cache is made.
struct ggml_ext_layer {
    int32_t index;      // from 0
    int32_t n_layer;    // of the model
    int32_t head_size;  // of the side that is asked for
    bool    sliding;    // attends to a window alone

    // What the guard looks at; zeros and NULL where a model has none of it or its weights are not loaded.
    float         scale;   // scores are multiplied by it; 0: 1/sqrt(head_size)
    const float * k_bias;  // added to the keys of all heads
    int32_t       n_k_bias;
    const float * q_norm;  // gains of the norms of queries and keys
    int32_t       n_q_norm;
    const float * k_norm;
    int32_t       n_k_norm;
};

// The type of one layer's tensor: ids that are neither a family's nor a spec's come back as they are. -1 where a type
// does not serve that head size; the message names the layer, the size and what would do. Where the guard keeps the
// layer at a higher type, the message says why and what it costs; otherwise it is empty. `side` is 'k' or 'v'.
int32_t ggml_ext_resolve(int32_t type, char side, const struct ggml_ext_layer * layer, char * message, size_t size);

// Rows of concrete types: n is a multiple of the head size. False (nothing written) for other ids or sizes. Where
// cells are coded together, the rows are those of one head in consecutive cells from the beginning of a group.
bool ggml_ext_encode(int32_t type, const float * src, void * dst, int64_t n);
bool ggml_ext_decode(int32_t type, const void * src, float * dst, int64_t n);
// The vectors whose products with queries are the scores: what rows decode to, except where a type's estimate without
// bias is not its best reconstruction (turbo, qjl). For tests.
bool ggml_ext_decode_key(int32_t type, const void * src, float * dst, int64_t n);
// The scalar definition of the format, whatever the CPU offers: what every fast path is compared with.
bool ggml_ext_encode_ref(int32_t type, const float * src, void * dst, int64_t n);

// A tensor as ggml lays it out; `to_float` decodes n values of a foreign type and may be NULL for ours, f32, f16,
// bf16, q8_0 and q4_0, which are read here.
// `view` says what the tensor is a view of, all zero where it is none: cells that are coded together are counted from the
// beginning of the cache itself. Shapes, steps, views and indices are not trusted: an op that would touch a byte outside
// of the tensor, or outside of what it is a view of, is refused. What is trusted is that this memory is there.
struct ggml_ext_view {
    size_t  offset;     // bytes from the beginning of the viewed tensor to `data`
    size_t  row_bytes;  // the viewed tensor's nb[1]: a cell, all heads
    int64_t rows;       // the viewed tensor's ne[1]: cells of a stream
    void  * data;       // where the viewed tensor begins
    size_t  bytes;      // of the viewed tensor
    size_t  foreign_bytes;  // of the tensor itself, view or not, where it has a `to_float`
};

struct ggml_ext_tensor {
    int32_t  type;
    int64_t  ne[4];
    size_t   nb[4];
    void   * data;
    void  (* to_float)(const void * src, float * dst, int64_t n);
    struct ggml_ext_view view;
};

// FLASH_ATTN_EXT: q [dk, n_q, n_head, ne3] f32 or f16, k [dk, n_kv, n_head_kv, ne3], v [dv, n_kv, n_head_kv, ne3],
// mask f16 [n_kv, n_q, *, *] or NULL, sinks f32 [n_head] or NULL, dst f32 [dv, n_head, n_q, ne3].
struct ggml_ext_attention {
    struct ggml_ext_tensor         q, k, v, dst;
    const struct ggml_ext_tensor * mask;
    const struct ggml_ext_tensor * sinks;
    float scale;
    float max_bias;
    float logit_softcap;
};

// Can it be served? The message says why not. Shapes and types alone are looked at, not `data`.
bool   ggml_ext_attention_supports(const struct ggml_ext_attention * op, char * err, size_t err_size);
size_t ggml_ext_attention_work_size(const struct ggml_ext_attention * op, int n_threads);
// Every thread calls _compute, all wait for each other, every thread calls _finish. `work` is shared by all.
// False: something went wrong inside; dst is filled with NaN so that it shows, and the reason is on stderr.
bool   ggml_ext_attention_compute(const struct ggml_ext_attention * op, int ith, int nth, void * work, size_t work_size);
bool   ggml_ext_attention_finish (const struct ggml_ext_attention * op, int ith, int nth, void * work, size_t work_size);

// The ops below: _supports looks at descriptions alone. False from the others: nothing was computed, dst of GET_ROWS and
// MUL_MAT is filled with NaN, that of the others is as it was, and the reason is on stderr.

// MUL_MAT with k of ours: dst[i, j] = k_row(i) . q_row(j), broadcast over dims 2 and 3 as ggml does; q f32 or f16.
bool ggml_ext_mul_mat_supports(const struct ggml_ext_tensor * k, const struct ggml_ext_tensor * q,
                               const struct ggml_ext_tensor * dst);
bool ggml_ext_mul_mat(const struct ggml_ext_tensor * k, const struct ggml_ext_tensor * q,
                      const struct ggml_ext_tensor * dst, int ith, int nth);

// SET_ROWS: dst row rows[i] = encode(src row i); index tensor i32 or i64 (index_bytes 4 or 8).
bool ggml_ext_set_rows_supports(const struct ggml_ext_tensor * dst, const struct ggml_ext_tensor * src,
                                const struct ggml_ext_tensor * rows);
bool ggml_ext_set_rows(const struct ggml_ext_tensor * dst, const struct ggml_ext_tensor * src,
                       const struct ggml_ext_tensor * rows, int index_bytes, int ith, int nth);

// GET_ROWS: dst row i = decode(src row rows[i]), dst f32, rows i32.
bool ggml_ext_get_rows_supports(const struct ggml_ext_tensor * dst, const struct ggml_ext_tensor * src,
                                const struct ggml_ext_tensor * rows);
bool ggml_ext_get_rows(const struct ggml_ext_tensor * dst, const struct ggml_ext_tensor * src,
                       const struct ggml_ext_tensor * rows, int ith, int nth);

// CPY, DUP, CONT: between a type of ours and f32 or f16 or itself, any strides, shapes that hold the same rows.
bool ggml_ext_copy_supports(const struct ggml_ext_tensor * dst, const struct ggml_ext_tensor * src);
bool ggml_ext_copy(const struct ggml_ext_tensor * dst, const struct ggml_ext_tensor * src, int ith, int nth);

// An op that there is not: its result becomes NaN, where it is rows of f32 and memory is as described.
void ggml_ext_not_served(const struct ggml_ext_tensor * dst);

// Saved states. A state of a cache with a type of ours begins with a header that names the format, is compared with the
// caches of a context before anything is touched, and covers what llama.cpp itself does not check. src/state.rs has the
// layout.

#define GGML_EXT_STATE_MAGIC  0x7473766b  // a state of stock llama.cpp has the number of streams there
#define GGML_EXT_STATE_PREFIX 20          // bytes from which the length of the header is known

struct ggml_ext_state_layer {
    uint32_t index;     // in the model
    int32_t  type_k;    // -1: none
    int32_t  type_v;
    uint32_t n_k;       // values of a cell, all heads
    uint32_t n_v;
    uint64_t bytes_k;   // of a cell
    uint64_t bytes_v;
};

struct ggml_ext_state_range {  // cells from..to, `to` excluded
    uint32_t stream;
    uint32_t from;
    uint32_t to;
};

struct ggml_ext_state_cache {
    uint32_t streams;
    uint32_t cells;         // of a stream
    uint32_t sequences;     // a state's: those that it has; a context's: those that it may have
    bool     v_transposed;
    bool     rotated;       // by llama.cpp
    uint32_t extension;     // a context's: bytes of a cell's metadata beside its position and sequences
    const struct ggml_ext_state_layer * layers;
    size_t                              n_layers;
    const struct ggml_ext_state_range * ranges;    // a state's: its cells; a context's: those that a sequence may take
    size_t                              n_ranges;
};

struct ggml_ext_state {
    bool     one_sequence;
    uint32_t foreign;       // version of llama.cpp's states
    uint64_t meta_bytes;    // what llama.cpp writes of cells
    uint64_t meta_sum;      // its ggml_ext_state_checksum
    uint64_t data_bytes;    // rows
    const struct ggml_ext_state_cache * caches;
    size_t                              n_caches;
    size_t   n_known;       // a context's: caches whose metadata comes before that of anything else
    bool     others;        // a context's: there is something else, recurrent states
};

// The header of a state, prefix included: its length; written where it fits into `size`.
size_t ggml_ext_state_header(const struct ggml_ext_state * state, void * dst, size_t size);
// Bytes of the header behind the prefix; -1, with a message, where it is none, of another version, or longer than that of
// any state that the context could take.
int64_t ggml_ext_state_header_rest(const void * prefix, const struct ggml_ext_state * context, char * err, size_t err_size);
// Can the context take the state with this header, and do the lengths that it tells follow from its cells? `found` (not its
// caches) is filled where it can; the message says what differs.
bool ggml_ext_state_check(const void * header, size_t size, const struct ggml_ext_state * context,
                          struct ggml_ext_state * found, char * err, size_t err_size);
// The cells of cache number `cache` of a header: how many ranges, at most `n` of them written; `cells` gets the size of a stream.
size_t ggml_ext_state_ranges(const void * header, size_t size, size_t cache, struct ggml_ext_state_range * dst, size_t n,
                             uint32_t * cells);
// Is this the metadata of the state with this header, and can the context take it?
bool ggml_ext_state_check_meta(const void * header, size_t size, const struct ggml_ext_state * context, const void * meta,
                               size_t meta_size, char * err, size_t err_size);
uint64_t ggml_ext_state_checksum(const void * data, size_t size);

// Where the cells of whole groups go: to[i] for the ascending cells[i] of a stream of `source_cells`, in a stream of n_free
// cells of which free[i] says whether they are. False where there are not enough free groups.
bool ggml_ext_state_place(const uint32_t * cells, size_t n, uint32_t source_cells, const bool * free, size_t n_free,
                          int32_t group_cells, uint32_t * to);
// Whole groups of a cache, `cells` cells of so many heads: what belongs to cells that keep[i] does not name is taken out.
// Rows that are left keep their bits, unless they or their I-frame are coded by what goes: then they are coded anew.
bool ggml_ext_state_keep(int32_t type, int32_t heads, void * rows, size_t cells, const bool * keep);
// Cells from[i] of `src` decoded and written to cells to[i] of `dst`, for types whose cells are coded together.
bool ggml_ext_state_recode(int32_t type, int32_t heads, const void * src, size_t src_cells, void * dst, size_t dst_cells,
                           const uint32_t * from, const uint32_t * to, size_t n);

// The text of one of the Metal shaders ("kv_rows", "kv_decode", "kv_prefill"), headers included; NULL for any other name.
const char * ggml_ext_metal_source(const char * shader);

// The instruction set in use ("avx512", "avx2", "neon", "scalar"); GGML_EXT_ISA in the environment chooses a lesser one.
const char * ggml_ext_isa(void);

#ifdef __cplusplus
}
#endif
