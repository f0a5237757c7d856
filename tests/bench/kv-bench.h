// What `cargo kv bench` times: one op on a cache that ggml itself filled, run as llama.cpp runs it. The timing is the
// caller's; everything here that is not kvb_run may take as long as it likes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#    define KVB_API __declspec(dllexport)
#else
#    define KVB_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct kvb_problem;

// One layer's FLASH_ATTN_EXT: `cells` cells that SET_ROWS wrote, all of them seen, and `queries` queries at their end.
// Types by name, a family of ours or one of ggml's. NULL, and the reason in `err`, where it cannot be had.
KVB_API struct kvb_problem * kvb_attention(const char * type_k, const char * type_v, int head_size, int n_head,
                                           int n_head_kv, int64_t cells, int queries, int threads,
                                           char * err, size_t err_size);

// `ops` SET_ROWS in a row, each of `tokens` tokens into a cache of its own.
KVB_API struct kvb_problem * kvb_encode(const char * type, int head_size, int n_head_kv, int tokens, int ops,
                                        int threads, char * err, size_t err_size);

KVB_API int      kvb_run(struct kvb_problem * problem);  // 0: computed
KVB_API uint64_t kvb_cache_bytes(const struct kvb_problem * problem);
KVB_API void     kvb_free(struct kvb_problem * problem);

// Of the kernels of ours in this process.
KVB_API const char * kvb_isa(void);

#ifdef __cplusplus
}
#endif
