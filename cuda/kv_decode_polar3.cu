// Decoding over K of polar3 with V of polar3 or srft3.

#include "decode.cuh"

namespace kv {

decode_choice decode_of_polar3(uint v_kind, uint size, uint row_blocks) {
    switch (v_kind) {
        case KV_KIND_POLAR3: return choice_of<KV_KIND_POLAR3, KV_KIND_POLAR3>(size, row_blocks);
        case KV_KIND_SRFT3:  return choice_of<KV_KIND_POLAR3, KV_KIND_SRFT3>(size, row_blocks);
        default: return {};
    }
}

}  // namespace kv
