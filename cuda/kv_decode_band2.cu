// Decoding over K of band2 with V of srft3 or srft2.

#include "decode.cuh"

namespace kv {

decode_choice decode_of_band2(uint v_kind, uint size, uint row_blocks) {
    switch (v_kind) {
        case KV_KIND_SRFT3: return choice_of<KV_KIND_BAND2, KV_KIND_SRFT3>(size, row_blocks);
        case KV_KIND_SRFT2: return choice_of<KV_KIND_BAND2, KV_KIND_SRFT2>(size, row_blocks);
        default: return {};
    }
}

}  // namespace kv
