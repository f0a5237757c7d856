// Ops of a graph that are done by fewer launches: what a layer writes for a token, the attention over it, and between them the ops of a
// calibrated cache (ggml-ext-calibrated.h). In the order of the graph, views left out:
//
//     SET_ROWS of K, and of its precise rows
//     SUB: values without their center          rows of V are written from the values, less their center
//     SET_ROWS of V, and of its precise rows
//     MUL_MAT: queries for calibrated keys      computed before all of these
//     FLASH_ATTN_EXT
//     ADD: the center that results get back     added by the attention
//
// What an op that is left out would have made is not there, so nothing else may need it.
#pragma once

#include "ggml-ext-center.h"
#include "ggml-ext-cuda-args.h"

#include "ggml-impl.h"

namespace ggml_ext_gpu {

inline bool is_computed(const ggml_tensor * op) {
    return (op->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

// The first node behind this one that computes something; the number of nodes where there is none.
inline int node_behind(const ggml_cgraph * graph, int node) {
    do {
        ++node;
    } while (node < graph->n_nodes && is_nothing(graph->nodes[node]));
    return node;
}

// Do nodes up to `last` alone need what `node` makes, themselves or by a view of it? Not known of an op in place, whose views are its source's.
inline bool is_needed_only_until(const ggml_cgraph * graph, int node, int last) {
    const ggml_tensor * made = graph->nodes[node];
    if (made->view_src) {
        return false;
    }
    int uses = 0;
    for (int i = node; i <= last; ++i) {
        const ggml_tensor * t = graph->nodes[i];
        if (t == made || t->view_src == made) {
            if ((t->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) {
                return false;
            }
            uses += ggml_node_get_use_count(graph, i);
        }
        for (const ggml_tensor * src : t->src) {
            uses -= src && (src == made || src->view_src == made) ? 1 : 0;
        }
    }
    return uses == 0;
}

// Rows that one launch writes, beginning with node `first`, and the node of the last.
struct writes_of_graph {
    kv_cuda_writes      writes = {};
    const ggml_tensor * op[KV_CUDA_WRITES];
    int                 last = 0;

    writes_of_graph(const ggml_cgraph * graph, int first) : last(first) {
        int before = 0, last_before = first, centering = -1; // writes before the SUB
        for (int i = first; i < graph->n_nodes && writes.count < KV_CUDA_WRITES; i = node_behind(graph, i)) {
            const ggml_tensor * node = graph->nodes[i];
            if (centering < 0 && is_computed(node) && ggml_ext_is_centering(node)) {
                centering   = i;
                before      = writes.count;
                last_before = last;
                continue;
            }
            if (node->op != GGML_OP_SET_ROWS || !ggml_ext_is_ours(node->type) || !is_computed(node) || !add(node, centering < 0 ? nullptr : graph->nodes[centering])) {
                break;
            }
            last = i;
        }
        if (last > centering && centering >= 0 && !is_needed_only_until(graph, centering, last)) {
            writes.count = before;
            last         = last_before;
        }
    }

  private:
    static bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
        const char * of_a = (const char *) a->data, * of_b = (const char *) b->data;
        return of_a < of_b + ggml_nbytes(b) && of_b < of_a + ggml_nbytes(a);
    }

    // Can the rows of `set`, which are what `sub` makes, be written from what that takes?
    static bool subtracts(const ggml_tensor * set, const ggml_tensor * sub) {
        const ggml_tensor * rows = set->src[0], * x = sub->src[0], * center = sub->src[1];
        return rows->data == sub->data && rows->ne[0] == x->ne[0]*x->ne[1] && rows->ne[1] == x->ne[2] && rows->ne[2]*rows->ne[3]*x->ne[3] == 1 && rows->nb[1] == sub->nb[2] &&
               sub->type == GGML_TYPE_F32 && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->nb[1] == x->ne[0]*sizeof(float) && ggml_are_same_shape(x, sub) &&
               center->type == GGML_TYPE_F32 && ggml_is_contiguous(center) && center->ne[0] == x->ne[0] && center->ne[1] == x->ne[1] && center->ne[2]*center->ne[3] == 1 &&
               describe(set).size == x->ne[0] && !is_grouped(set->type);
    }

    bool add(const ggml_tensor * node, const ggml_tensor * sub) {
        kv_cuda_rows rows = describe_rows(node, node->src[0], node->src[1], node);
        const ggml_tensor * from = node->src[0];
        if (sub && (from == sub || from->view_src == sub)) {
            if (!subtracts(node, sub)) {
                return false;
            }
            from                  = sub->src[0];
            rows.from             = from->data;
            rows.args.float_nb[0] = from->nb[2];
            rows.center           = (const float *) sub->src[1]->data;
        }
        for (int i = 0; i < writes.count; ++i) {
            if (!kv_cuda_write_together(writes.op[i], rows) || overlap(node, op[i]) || overlap(from, op[i]) || overlap(node->src[1], op[i]) ||
                overlap(node, op[i]->src[0]) || overlap(node, op[i]->src[1])) {
                return false;
            }
        }
        op[writes.count]          = node;
        writes.op[writes.count++] = rows;
        return true;
    }
};

// An attention behind rows that are written: what its queries are multiplied by before, if anything, and the center that its result gets.
struct attention_of_graph {
    const ggml_tensor * op = nullptr;      // null where there is none
    const ggml_tensor * product = nullptr; // a MUL_MAT that nothing else needs
    const float *       center = nullptr;
    int                 last = 0;

    attention_of_graph(const ggml_cgraph * graph, int first) {
        int at = first;
        if (at < graph->n_nodes && ggml_ext_is_product(graph->nodes[at]) && is_computed(graph->nodes[at])) {
            product = graph->nodes[at];
            at      = node_behind(graph, at);
        }
        const ggml_tensor * node = at < graph->n_nodes ? graph->nodes[at] : nullptr;
        if (!node || node->op != GGML_OP_FLASH_ATTN_EXT || !ggml_ext_concerns(node) || !is_computed(node) ||
            (product && (node->src[0]->view_src != product || !is_needed_only_until(graph, first, at)))) {
            return;
        }
        op   = node;
        last = at;
        const int behind = node_behind(graph, at);
        if (behind < graph->n_nodes && ggml_ext_adds_center(graph->nodes[behind], op)) {
            center = (const float *) graph->nodes[behind]->src[1]->data;
            last   = behind;
        }
    }
};

}  // namespace ggml_ext_gpu
