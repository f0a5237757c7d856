// Decoding over K of qjl1 with V of srft4 or srft3.

#include "decode.cuh"

namespace kv {

decode_choice decode_of_qjl1(uint v_kind, uint size, uint row_blocks) {
    switch (v_kind) {
        case KV_KIND_SRFT4: return choice_of<KV_KIND_QJL1, KV_KIND_SRFT4>(size, row_blocks);
        case KV_KIND_SRFT3: return choice_of<KV_KIND_QJL1, KV_KIND_SRFT3>(size, row_blocks);
        default: return {};
    }
}

}  // namespace kv
