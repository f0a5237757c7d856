// The op of a graph that gives results of an attention the centers of its values back (ggml-ext-calibrated.h), where a backend may leave it to the attention.
#pragma once

#include "ggml-ext-seam.h"

#include "ggml.h"

// Is it an ADD to the result of this attention, in place: query heads of a KV head in a row, and one center for them?
inline bool ggml_ext_adds_center(const ggml_tensor * add, const ggml_tensor * attention) {
    const ggml_tensor * sum = add->src[0], * center = add->src[1];
    if (!ggml_ext_is_uncentering(add) || (add->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || !sum || !center) {
        return false;
    }
    const bool in_place = sum->view_src == attention && sum->data == attention->data && add->data == attention->data && ggml_nelements(add) == ggml_nelements(attention) &&
                          ggml_is_contiguous(sum) && ggml_is_contiguous(add) && ggml_is_contiguous(attention);
    const int64_t size = attention->ne[0], heads = attention->src[1]->ne[2];
    return in_place && center->type == GGML_TYPE_F32 && ggml_is_contiguous(center) && center->ne[0] == size && center->ne[1] == 1 && center->ne[2] == heads &&
           center->ne[3] == 1 && sum->ne[0] == size && sum->ne[1]*heads == attention->ne[1] && sum->ne[2] == heads;
}
