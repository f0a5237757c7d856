// The kernels of a pair of types.
#pragma once

#include "decode_bulk.cuh"
#include "decode_rows.cuh"

namespace kv {
namespace {

template <uint K, uint V, uint D> static decode_choice choice_of(uint row_blocks) {
    constexpr size_t main = sizeof(decode_memory<K, V, D>), precise = sizeof(decode_memory<precise_kind(K), KV_KIND_SRFT8, D>);
    const bool one = row_blocks == 1;
    decode_choice res;
    res.kernel        = one ? kv_decode<K, V, D, 1> : kv_decode<K, V, D, 2>;
    res.recent        = one ? kv_decode_recent<K, V, D, 1> : kv_decode_recent<K, V, D, 2>;
    res.blocks_per_sm = one ? blocks_per_sm<K, V, D, 1>() : blocks_per_sm<K, V, D, 2>();
    res.shared_bytes  = main > precise ? main : precise;
    res.bulk          = one ? kv_decode_bulk<K, V, D, 1> : kv_decode_bulk<K, V, D, 2>;
    res.bulk_recent   = one ? kv_decode_bulk_recent<K, V, D, 1> : kv_decode_bulk_recent<K, V, D, 2>;
    res.teams_of      = one ? teams_of<K, V, D, 1> : teams_of<K, V, D, 2>;
    return res;
}

template <uint K, uint V> static decode_choice choice_of(uint size, uint row_blocks) {
    return size == 64 ? choice_of<K, V, 64>(row_blocks) : size == 128 ? choice_of<K, V, 128>(row_blocks) : choice_of<K, V, 256>(row_blocks);
}

}  // namespace
}  // namespace kv
