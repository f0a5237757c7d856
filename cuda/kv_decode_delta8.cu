// Decoding over K of delta8 with V of srft8 or srft4.

#include "decode.cuh"

namespace kv {

decode_choice decode_of_delta8(uint v_kind, uint size, uint row_blocks) {
    switch (v_kind) {
        case KV_KIND_SRFT8: return choice_of<KV_KIND_DELTA8, KV_KIND_SRFT8>(size, row_blocks);
        case KV_KIND_SRFT4: return choice_of<KV_KIND_DELTA8, KV_KIND_SRFT4>(size, row_blocks);
        default: return {};
    }
}

}  // namespace kv
