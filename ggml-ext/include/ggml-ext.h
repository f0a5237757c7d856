// The C boundary of ggml-ext: KV-cache types that ggml does not have.
//
// Generated from ggml-ext/src/ffi, comments included: change it there. `cargo test -p kv --test header` compares the two and
// writes the new text.
//
// Nothing here knows of ggml: tensors cross as plain descriptions. The shim (../shim) is the only code that knows both
// sides. No function unwinds or aborts; what can fail says so in its result and writes a message into `err`, always
// terminated, also after a panic inside; it is empty where nothing is to be said.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Ids above ggml's own: GGML_EXT_TYPE_BASE + 16*family + size index is a concrete type (one family at one head
// size) and is stable for ever, because state files hold it. Size index 15 stands for the family as a whole: it is
// what a user asks for, and becomes a concrete type per layer (ggml_ext_resolve). No tensor has a family's id.
#define GGML_EXT_TYPE_BASE 128

// All ids of families and concrete types are below it.
#define GGML_EXT_TYPE_LIMIT 384

// Ids of specs ("srft4,0-1=srft8"): given out one after the other as ggml_ext_type_parse meets new texts, the same
// text always the same id, good for this process alone. They go wherever a cache type goes and become a concrete type
// per layer; no tensor and no state file has one.
#define GGML_EXT_SPEC_BASE 65536

// All ids of specs are below it.
#define GGML_EXT_SPEC_LIMIT 131072

// The first four bytes of a state of ours, 0x7473766b: a state of stock llama.cpp has the number of streams there.
#define GGML_EXT_STATE_MAGIC 1953724011

// Bytes from which the length of the header is known.
#define GGML_EXT_STATE_PREFIX 20

// A cache type of ours: a family, a concrete type or a spec.
struct ggml_ext_type {
    // As asked for.
    int32_t id;
    // "srft4" for a family, "srft4_128" for a concrete type, a spec's text
    const char *name;
    // "srft4"; of a spec, its first type
    const char *family;
    // values in a row of one head = ggml's block size; 0 for a family or a spec
    int32_t head_size;
    // bytes of such a row = ggml's type size; 0 for a family or a spec
    size_t row_bytes;
    // bits per value; for a family, those of head size 128; of a spec, its first type's
    double bits;
    // may hold keys
    bool serves_k;
    // may hold values
    bool serves_v;
    // cells that are coded together, 1 where each row stands alone
    int32_t group_cells;
    // false for a spec of f32, f16 and bf16 alone
    bool quantized;
};

// One layer of a model, as its cache is made. From `scale` on it is what the guard looks at: zeros and NULL where a model
// has none of it or its weights are not loaded.
struct ggml_ext_layer {
    // from 0
    int32_t index;
    // of the model
    int32_t n_layer;
    // of the side that is asked for
    int32_t head_size;
    // attends to a window alone
    bool sliding;
    // scores are multiplied by it; 0: 1/sqrt(head_size)
    float scale;
    // added to the keys of all heads
    const float *k_bias;
    int32_t n_k_bias;
    // gains of the norm of queries
    const float *q_norm;
    int32_t n_q_norm;
    // gains of the norm of keys
    const float *k_norm;
    int32_t n_k_norm;
};

// What a tensor is a view of; all zero where it is none. Cells that are coded together are counted from the beginning of
// the cache itself.
struct ggml_ext_view {
    // Bytes from the beginning of the viewed tensor to `data`.
    size_t offset;
    // The viewed tensor's nb[1]: a cell, all heads.
    size_t row_bytes;
    // The viewed tensor's ne[1]: cells of a stream.
    int64_t rows;
    // Where the viewed tensor begins.
    void *data;
    // Of the viewed tensor.
    size_t bytes;
    // Of the tensor itself, view or not, where it has a `to_float`.
    size_t foreign_bytes;
};

// A tensor as ggml lays it out. Shapes, steps, views and indices are not trusted: an op that would touch a byte outside
// of the tensor, or outside of what it is a view of, is refused. What is trusted is that this memory is there.
struct ggml_ext_tensor {
    // ggml's or our type id.
    int32_t type;
    // Values per dimension.
    int64_t ne[4];
    // Bytes per step of a dimension.
    size_t nb[4];
    // The first value.
    void *data;
    // For types that are not read here; may be NULL for ours, f32, f16, bf16, q8_0 and q4_0.
    void (*to_float)(const void *src, float *dst, int64_t n);
    // Where it is a view: of what.
    struct ggml_ext_view view;
};

// Precise rows of recent cells, as further sources of an attention.
struct ggml_ext_recent_rows {
    // [dk, slots, n_head_kv, ne3]
    struct ggml_ext_tensor k;
    // [dv, slots, n_head_kv, ne3]
    struct ggml_ext_tensor v;
    // i64 [slots + tokens, ne3]: the cell of each column
    struct ggml_ext_tensor cells;
    // [dk, tokens, n_head_kv, ne3] of the batch, or NULL
    const struct ggml_ext_tensor *batch_k;
    // [dv, tokens, n_head_kv, ne3] of the batch, or NULL
    const struct ggml_ext_tensor *batch_v;
};

// FLASH_ATTN_EXT.
struct ggml_ext_attention {
    // f32 or f16 [dk, n_q, n_head, ne3]
    struct ggml_ext_tensor q;
    // [dk, n_kv, n_head_kv, ne3]
    struct ggml_ext_tensor k;
    // [dv, n_kv, n_head_kv, ne3]
    struct ggml_ext_tensor v;
    // f32 [dv, n_head, n_q, ne3]
    struct ggml_ext_tensor dst;
    // f16 [n_kv, n_q, *, *], or NULL
    const struct ggml_ext_tensor *mask;
    // f32 [n_head], or NULL
    const struct ggml_ext_tensor *sinks;
    // Precise rows of recent cells, or NULL
    const struct ggml_ext_recent_rows *recent;
    // f32 [dv, 1, n_head_kv]: added to each result, that of a query that sees nothing too, or NULL
    const struct ggml_ext_tensor *center;
    // Multiplies the scores.
    float scale;
    // ALiBi.
    float max_bias;
    // 0: none.
    float logit_softcap;
};

// A layer of a cache.
struct ggml_ext_state_layer {
    // in the model
    uint32_t index;
    // -1: none
    int32_t type_k;
    // -1: none
    int32_t type_v;
    // values of a cell, all heads
    uint32_t n_k;
    uint32_t n_v;
    // of a cell
    uint64_t bytes_k;
    uint64_t bytes_v;
    // of precise rows of recent cells; -1: none
    int32_t recent_k;
    int32_t recent_v;
    // of a cell
    uint64_t recent_bytes_k;
    uint64_t recent_bytes_v;
};

// Cells from..to of a stream.
struct ggml_ext_state_range {
    // The stream.
    uint32_t stream;
    // The first cell.
    uint32_t from;
    // Behind the last.
    uint32_t to;
};

// A cache of a context, or what a state has of one.
struct ggml_ext_state_cache {
    uint32_t streams;
    // of a stream
    uint32_t cells;
    // a state's: those that it has; a context's: those that it may have
    uint32_t sequences;
    bool v_transposed;
    // by llama.cpp
    bool rotated;
    // a context's: bytes of a cell's metadata beside its position and sequences
    uint32_t extension;
    // digest of the calibration that keys and values are stored by; 0: none
    uint64_t calibration;
    const struct ggml_ext_state_layer *layers;
    size_t n_layers;
    // a state's: its cells; a context's: those that a sequence may take
    const struct ggml_ext_state_range *ranges;
    size_t n_ranges;
};

// A state, or the context that is to take one.
struct ggml_ext_state {
    bool one_sequence;
    // version of llama.cpp's states
    uint32_t foreign;
    // what llama.cpp writes of cells
    uint64_t meta_bytes;
    // its ggml_ext_state_checksum
    uint64_t meta_sum;
    // rows
    uint64_t data_bytes;
    const struct ggml_ext_state_cache *caches;
    size_t n_caches;
    // a context's: caches whose metadata comes before that of anything else
    size_t n_known;
    // a context's: there is something else, recurrent states
    bool others;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// NULL where the id is neither a family nor a concrete type nor a spec of ours.
const struct ggml_ext_type *ggml_ext_type_get(int32_t id);

// The id of a cache type as a user writes it: a family ("srft4"), a concrete type ("srft4_128"), one of ggml's own
// ("q8_0"), or a spec of them by layer ("srft4,0-1=srft8,-1=f16", "srft4,swa=srft3", "srft4,guard=off"). -1, with a
// message that points at the place and lists what exists, for anything else.
// Safety: `name` is NULL or a C string; `err` is NULL or has room for `err_size` bytes.
int32_t ggml_ext_type_parse(const char *name, char *err, size_t err_size);

// The same without a message.
// Safety: `name` is NULL or a C string.
int32_t ggml_ext_type_from_name(const char *name);

// "srft8, srft4, …": the families, for help texts and error messages.
const char *ggml_ext_family_names(void);

// The text of one of the Metal shaders ("kv_rows", "kv_decode", "kv_prefill"), headers included; NULL for any other name.
// Safety: `shader` is NULL or a C string.
const char *ggml_ext_metal_source(const char *shader);

// The instruction set in use ("avx512", "avx2", "neon", "scalar"); GGML_EXT_ISA in the environment chooses a lesser one.
const char *ggml_ext_isa(void);

// May a context be made with these cache types, for a model of so many layers? `is_ggml_*`: the id is one of ggml's
// own types. Refuses ids that are nobody's, types on a side they do not serve, specs of layers that the model does not
// have, and a compressed V without flash attention: `flash_attn_off`, or an architecture (llama.cpp's name, may be NULL)
// that llama.cpp always computes without.
// Safety: `arch` is NULL or a C string; `err` is NULL or has room for `err_size` bytes.
bool ggml_ext_check_cache(int32_t type_k,
                          bool is_ggml_k,
                          int32_t type_v,
                          bool is_ggml_v,
                          int32_t n_layer,
                          const char *arch,
                          bool flash_attn_off,
                          char *err,
                          size_t err_size);

// What of a spec changes nothing on a model: layers named that keep no K and V, `swa` where none has a window. Empty for
// other types. `layers` has a character a layer: '-' keeps nothing of its own, 'a' all cells, 'w' those of a window.
// Safety: `layers` is NULL or has `n_layer` characters; `message` is NULL or has room for `size` bytes.
void ggml_ext_idle_parts(int32_t id, const uint8_t *layers, int32_t n_layer, char *message, size_t size);

// The type of one layer's tensor: ids that are neither a family's nor a spec's come back as they are. -1 where a type
// does not serve that head size; the message names the layer, the size and what would do. Where the guard keeps the
// layer at a higher type, the message says why and what it costs; otherwise it is empty. `side` is 'k' or 'v'.
// Safety: `layer` is NULL or a description with arrays as long as said; `message` is NULL or has room for `size` bytes.
int32_t ggml_ext_resolve(int32_t id, char side, const struct ggml_ext_layer *layer, char *message, size_t size);

// Cells that a cache of these types keeps as precise rows too: 128 of a sequence, at most one in 16, unless a spec says
// another number ("srft4,recent=64"). `cells` of a stream, which so many sequences share; `window`: cells that a layer looks back
// at, 0 for all.
uint32_t ggml_ext_recent_slots(int32_t type_k, int32_t type_v, uint32_t cells, uint32_t sequences, uint32_t window);

// Does a spec of either side ask for precise rows by number?
bool ggml_ext_recent_named(int32_t type_k, int32_t type_v);

// The type of precise rows beside rows of this one, -1 where it has none.
int32_t ggml_ext_recent_type(int32_t id);

// The types of the precise rows of a layer whose tensors have these types; `type_v` is -1 where there is no V, and so is
// `recent_v` then. False where neither side gains by them.
// Safety: The pointers are NULL or places to write to.
bool ggml_ext_recent_types(int32_t type_k, int32_t type_v, int32_t *recent_k, int32_t *recent_v);

// The calibration that a K cache type names ("delta4,cal=FILE"), or where it names none the file beside a model of this path
// (NULL or empty: not known). True where it was named; `file` is empty where there is neither.
// Safety: `model` is NULL or a C string; `file` is NULL or has room for `size` bytes.
bool ggml_ext_calibration_file(int32_t type_k, const char *model, char *file, size_t size);

// The order in which the rows of a type hold the bands of calibrated keys, 32 components each: `order`, of `size`, gets the
// band of components that is the row's first, second, … The number of bands; 0 for types without.
// Safety: `order` has room for `size` numbers.
size_t ggml_ext_band_order(int32_t id, int32_t *order, size_t size);

// Does a K tensor of this type need a calibration?
bool ggml_ext_needs_calibration(int32_t id);

// Do keys of this type gain by a calibration? Of a spec: those of most layers.
bool ggml_ext_gains_by_calibration(int32_t id);

// Encodes rows of a concrete type: n is a multiple of the head size. False (nothing written) for other ids or sizes.
// Where cells are coded together, the rows are those of one head in consecutive cells from the beginning of a group.
// Safety: `src` holds n values, `dst` has room for their rows.
bool ggml_ext_encode(int32_t id, const float *src, void *dst, int64_t n);

// The same by the scalar definition of the format, whatever the CPU offers: what every fast path is compared with.
// Safety: As ggml_ext_encode.
bool ggml_ext_encode_ref(int32_t id, const float *src, void *dst, int64_t n);

// The way back.
// Safety: `src` holds the rows of n values, `dst` has room for the values.
bool ggml_ext_decode(int32_t id, const void *src, float *dst, int64_t n);

// The vectors whose products with queries are the scores: what rows decode to, except where a type's estimate without
// bias is not its best reconstruction (turbo, qjl). For tests.
// Safety: As ggml_ext_decode.
bool ggml_ext_decode_key(int32_t id, const void *src, float *dst, int64_t n);

// SET_ROWS: can dst row rows[i] = encode(src row i) be served? This and the other _supports look at descriptions alone.
// Safety: The pointers are NULL or descriptions.
bool ggml_ext_set_rows_supports(const struct ggml_ext_tensor *dst,
                                const struct ggml_ext_tensor *src,
                                const struct ggml_ext_tensor *rows);

// The share of a thread; index tensor i32 or i64 (index_bytes 4 or 8). False from this and the other ops: nothing was
// computed, dst of GET_ROWS and MUL_MAT is filled with NaN, that of the others is as it was, and the reason is on stderr.
// Safety: The pointers are NULL or descriptions of memory that is there.
bool ggml_ext_set_rows(const struct ggml_ext_tensor *dst,
                       const struct ggml_ext_tensor *src,
                       const struct ggml_ext_tensor *rows,
                       int index_bytes,
                       int ith,
                       int nth);

// GET_ROWS: can dst row i = decode(src row rows[i]) be served, dst f32, rows i32?
// Safety: The pointers are NULL or descriptions.
bool ggml_ext_get_rows_supports(const struct ggml_ext_tensor *dst,
                                const struct ggml_ext_tensor *src,
                                const struct ggml_ext_tensor *rows);

// The share of a thread.
// Safety: The pointers are NULL or descriptions of memory that is there.
bool ggml_ext_get_rows(const struct ggml_ext_tensor *dst,
                       const struct ggml_ext_tensor *src,
                       const struct ggml_ext_tensor *rows,
                       int ith,
                       int nth);

// CPY, DUP, CONT: between a type of ours and f32 or f16 or itself, any strides, shapes that hold the same rows.
// Safety: The pointers are NULL or descriptions.
bool ggml_ext_copy_supports(const struct ggml_ext_tensor *dst, const struct ggml_ext_tensor *src);

// The share of a thread.
// Safety: The pointers are NULL or descriptions of memory that is there.
bool ggml_ext_copy(const struct ggml_ext_tensor *dst, const struct ggml_ext_tensor *src, int ith, int nth);

// An op that there is not: its result becomes NaN, where it is rows of f32 and memory is as described.
// Safety: `dst` is NULL or a description of memory that is there, and no thread uses it.
void ggml_ext_not_served(const struct ggml_ext_tensor *dst);

// Can it be served? The message says why not. Shapes and types alone are looked at, not `data`.
// Safety: `op` is NULL or a description; `err` is NULL or has room for `err_size` bytes.
bool ggml_ext_attention_supports(const struct ggml_ext_attention *op, char *err, size_t err_size);

// Bytes that the threads of the op share; 0 where it is not served.
// Safety: `op` is NULL or a description.
size_t ggml_ext_attention_work_size(const struct ggml_ext_attention *op, int n_threads);

// Every thread calls _compute, all wait for each other, every thread calls _finish. `work` is shared by all.
// False: something went wrong inside; dst is filled with NaN so that it shows, and the reason is on stderr.
// Safety: `op` is NULL or a description of memory that is there; `work` is NULL or has `work_size` bytes.
bool ggml_ext_attention_compute(const struct ggml_ext_attention *op, int ith, int nth, void *work, size_t work_size);

// The second step of a thread.
// Safety: As ggml_ext_attention_compute, after every thread's has returned.
bool ggml_ext_attention_finish(const struct ggml_ext_attention *op, int ith, int nth, void *work, size_t work_size);

// MUL_MAT with k of ours: dst[i, j] = k_row(i) . q_row(j), broadcast over dims 2 and 3 as ggml does; q f32 or f16.
// Safety: The pointers are NULL or descriptions.
bool ggml_ext_mul_mat_supports(const struct ggml_ext_tensor *k,
                               const struct ggml_ext_tensor *q,
                               const struct ggml_ext_tensor *dst);

// The share of a thread.
// Safety: The pointers are NULL or descriptions of memory that is there.
bool ggml_ext_mul_mat(const struct ggml_ext_tensor *k,
                      const struct ggml_ext_tensor *q,
                      const struct ggml_ext_tensor *dst,
                      int ith,
                      int nth);

// Is there ggml_ext_multiply for matrices of this size?
bool ggml_ext_multiplies(int64_t size);

// Does each of nth threads find in its share of ggml_ext_multiply all heads that its share of ggml_ext_set_rows writes? Then there is
// no need to wait between the two.
// Safety: The pointers are NULL or descriptions.
bool ggml_ext_heads_stay(const struct ggml_ext_tensor *m,
                         const struct ggml_ext_tensor *x,
                         const struct ggml_ext_tensor *product,
                         const struct ggml_ext_tensor *cache,
                         const struct ggml_ext_tensor *rows,
                         int nth);

// MUL_MAT of f16 matrices and f32 rows, dst[i, j] = m_row(i) . x_row(j), as calibrated keys and queries are multiplied: a
// square matrix for each of some heads.
// Safety: The pointers are NULL or descriptions of memory that is there.
bool ggml_ext_multiply(const struct ggml_ext_tensor *m,
                       const struct ggml_ext_tensor *x,
                       const struct ggml_ext_tensor *dst,
                       int ith,
                       int nth);

// SUB of f32 values, [head size, heads, tokens], and the center of each head: what a calibrated cache stores.
// Safety: The pointers are NULL or descriptions of memory that is there.
bool ggml_ext_subtract(const struct ggml_ext_tensor *x,
                       const struct ggml_ext_tensor *center,
                       const struct ggml_ext_tensor *dst,
                       int ith,
                       int nth);

// Does each thread find in its share of ggml_ext_subtract all rows that its share of ggml_ext_set_rows writes? Then there is
// no need to wait between the two.
// Safety: The pointers are NULL or descriptions.
bool ggml_ext_rows_stay(const struct ggml_ext_tensor *x,
                        const struct ggml_ext_tensor *center,
                        const struct ggml_ext_tensor *dst,
                        const struct ggml_ext_tensor *cache,
                        const struct ggml_ext_tensor *rows);

// The header of a state, prefix included: its length; written where it fits into `size`.
// Safety: `state` is NULL or a description with arrays as long as said; `dst` is NULL or has room for `size` bytes.
size_t ggml_ext_state_header(const struct ggml_ext_state *state, void *dst, size_t size);

// Bytes of the header behind the prefix; -1, with a message, where it is none, of another version, or longer than that of
// any state that the context could take.
// Safety: `prefix` is NULL or has GGML_EXT_STATE_PREFIX bytes; `context` is NULL or a description; `err` is NULL or has room for
// `err_size` bytes.
int64_t ggml_ext_state_header_rest(const void *prefix, const struct ggml_ext_state *context, char *err, size_t err_size);

// Can the context take the state with this header, and do the lengths that it tells follow from its cells? `found` (not its
// caches) is filled where it can; the message says what differs.
// Safety: `header` has `size` bytes; `context` is NULL or a description; `found` is NULL or may be written; `err` is NULL or has
// room for `err_size` bytes.
bool ggml_ext_state_check(const void *header,
                          size_t size,
                          const struct ggml_ext_state *context,
                          struct ggml_ext_state *found,
                          char *err,
                          size_t err_size);

// Is this the metadata of the state with this header, and can the context take it?
// Safety: `header` and `meta` have so many bytes; `context` is NULL or a description; `err` is NULL or has room for `err_size`
// bytes.
bool ggml_ext_state_check_meta(const void *header,
                               size_t size,
                               const struct ggml_ext_state *context,
                               const void *meta,
                               size_t meta_size,
                               char *err,
                               size_t err_size);

// The cells of cache number `cache` of a header: how many ranges, at most `n` of them written; `cells` gets the size of a
// stream.
// Safety: `header` has `size` bytes; `dst` is NULL or has room for n ranges; `cells` is NULL or may be written.
size_t ggml_ext_state_ranges(const void *header,
                             size_t size,
                             size_t cache,
                             struct ggml_ext_state_range *dst,
                             size_t n,
                             uint32_t *cells);

// The layers of cache number `cache` of a header: how many, at most `n` of them written.
// Safety: `header` has `size` bytes; `dst` is NULL or has room for n layers.
size_t ggml_ext_state_layers(const void *header, size_t size, size_t cache, struct ggml_ext_state_layer *dst, size_t n);

// Of the metadata of a state.
// Safety: `data` has `size` bytes.
uint64_t ggml_ext_state_checksum(const void *data, size_t size);

// Where the cells of whole groups go: to[i] for the ascending cells[i] of a stream of `source_cells`, in a stream of n_free
// cells of which free[i] says whether they are. False where there are not enough free groups.
// Safety: `cells` and `to` have n elements, `free` has n_free.
bool ggml_ext_state_place(const uint32_t *cells,
                          size_t n,
                          uint32_t source_cells,
                          const bool *free,
                          size_t n_free,
                          int32_t group_cells,
                          uint32_t *to);

// Whole groups of a cache, `cells` cells of so many heads: what belongs to cells that keep[i] does not name is taken out.
// Rows that are left keep their bits, unless they or their I-frame are coded by what goes: then they are coded anew.
// Safety: `rows` has the cells from the beginning of a group on, and is the caller's alone; `keep` has a flag for each cell.
bool ggml_ext_state_keep(int32_t id, int32_t heads, void *rows, size_t cells, const bool *keep);

// Cells from[i] of `src` decoded and written to cells to[i] of `dst`, for types whose cells are coded together.
// Safety: `src` and `dst` have their cells of so many heads, and `dst` is the caller's alone; `from` and `to` have n cells each.
bool ggml_ext_state_recode(int32_t id,
                           int32_t heads,
                           const void *src,
                           size_t src_cells,
                           void *dst,
                           size_t dst_cells,
                           const uint32_t *from,
                           const uint32_t *to,
                           size_t n);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// Every function above, for code that must name them all.
#define GGML_EXT_ENTRY_POINTS(X) \
    X(ggml_ext_type_get) \
    X(ggml_ext_type_parse) \
    X(ggml_ext_type_from_name) \
    X(ggml_ext_family_names) \
    X(ggml_ext_metal_source) \
    X(ggml_ext_isa) \
    X(ggml_ext_check_cache) \
    X(ggml_ext_idle_parts) \
    X(ggml_ext_resolve) \
    X(ggml_ext_recent_slots) \
    X(ggml_ext_recent_named) \
    X(ggml_ext_recent_type) \
    X(ggml_ext_recent_types) \
    X(ggml_ext_calibration_file) \
    X(ggml_ext_band_order) \
    X(ggml_ext_needs_calibration) \
    X(ggml_ext_gains_by_calibration) \
    X(ggml_ext_encode) \
    X(ggml_ext_encode_ref) \
    X(ggml_ext_decode) \
    X(ggml_ext_decode_key) \
    X(ggml_ext_set_rows_supports) \
    X(ggml_ext_set_rows) \
    X(ggml_ext_get_rows_supports) \
    X(ggml_ext_get_rows) \
    X(ggml_ext_copy_supports) \
    X(ggml_ext_copy) \
    X(ggml_ext_not_served) \
    X(ggml_ext_attention_supports) \
    X(ggml_ext_attention_work_size) \
    X(ggml_ext_attention_compute) \
    X(ggml_ext_attention_finish) \
    X(ggml_ext_mul_mat_supports) \
    X(ggml_ext_mul_mat) \
    X(ggml_ext_multiplies) \
    X(ggml_ext_heads_stay) \
    X(ggml_ext_multiply) \
    X(ggml_ext_subtract) \
    X(ggml_ext_rows_stay) \
    X(ggml_ext_state_header) \
    X(ggml_ext_state_header_rest) \
    X(ggml_ext_state_check) \
    X(ggml_ext_state_check_meta) \
    X(ggml_ext_state_ranges) \
    X(ggml_ext_state_layers) \
    X(ggml_ext_state_checksum) \
    X(ggml_ext_state_place) \
    X(ggml_ext_state_keep) \
    X(ggml_ext_state_recode)
