// Decoding over K of polar4 with V of polar4 or srft4.

#include "decode.cuh"

namespace kv {

decode_choice decode_of_polar4(uint v_kind, uint size, uint row_blocks) {
    switch (v_kind) {
        case KV_KIND_POLAR4: return choice_of<KV_KIND_POLAR4, KV_KIND_POLAR4>(size, row_blocks);
        case KV_KIND_SRFT4:  return choice_of<KV_KIND_POLAR4, KV_KIND_SRFT4>(size, row_blocks);
        default: return {};
    }
}

}  // namespace kv
