// What we do not serve is refused in supports_op: other ops, other types, rows in pieces.

#include "ops.h"

#include "ggml-ext-seam.h"

#include <cstring>
#include <memory>

namespace {

// An op node as a program might build it, without the asserts of ggml's own constructors.
ggml_tensor * node(ggml_context * ctx, ggml_op op, ggml_type type, std::vector<int64_t> ne, std::vector<ggml_tensor *> src) {
    ne.resize(4, 1);
    ggml_tensor * t = ggml_new_tensor(ctx, type, 4, ne.data());
    t->op = op;
    for (size_t i = 0; i < src.size(); i++) {
        t->src[i] = src[i];
    }
    return t;
}

void other_ops(const ggml_ext_type * type) {
    if (!begin_case(std::string("refusal of other ops ") + type->name)) {
        return;
    }
    const ggml_type our = (ggml_type) type->id;
    const int64_t d = type->head_size;
    for (ggml_op op : { GGML_OP_ADD, GGML_OP_MUL, GGML_OP_SCALE, GGML_OP_ROPE, GGML_OP_SOFT_MAX, GGML_OP_NORM, GGML_OP_RMS_NORM,
                        GGML_OP_CONCAT, GGML_OP_MUL_MAT_ID, GGML_OP_OUT_PROD, GGML_OP_REPEAT, GGML_OP_ACC, GGML_OP_SET,
                        GGML_OP_UNARY, GGML_OP_GET_ROWS_BACK, GGML_OP_SUM_ROWS, GGML_OP_ARGSORT, GGML_OP_PAD }) {
        Graph g;
        ggml_tensor * ours = ggml_new_tensor_2d(g.ctx(), our, d, 4);
        ggml_tensor * f32  = ggml_new_tensor_2d(g.ctx(), GGML_TYPE_F32, d, 4);
        ggml_tensor * rows = ggml_new_tensor_1d(g.ctx(), GGML_TYPE_I32, 4);
        check(!Graph::supports(node(g.ctx(), op, GGML_TYPE_F32, { d, 4 }, { ours, f32, rows })), std::string(ggml_op_name(op)) + " of ours");
        check(!Graph::supports(node(g.ctx(), op, GGML_TYPE_F32, { d, 4 }, { f32, ours, rows })), std::string(ggml_op_name(op)) + " by ours");
        check(!Graph::supports(node(g.ctx(), op, our, { d, 4 }, { f32, f32, rows })), std::string(ggml_op_name(op)) + " to ours");
    }
}

void views(const ggml_ext_type * type) {
    if (!begin_case(std::string("views are no ops ") + type->name)) {
        return;
    }
    Graph g;
    ggml_tensor * ours = ggml_new_tensor_3d(g.ctx(), (ggml_type) type->id, type->head_size, 4, 2);
    check(Graph::supports(ggml_permute(g.ctx(), ours, 0, 2, 1, 3)), "PERMUTE");
    check(Graph::supports(ggml_reshape_2d(g.ctx(), ours, type->head_size, 8)), "RESHAPE");
    check(Graph::supports(ggml_view_1d(g.ctx(), ours, type->head_size, 0)), "VIEW");
}

void odd_shapes(const ggml_ext_type * type) {
    if (!begin_case(std::string("refusal of odd shapes ") + type->name)) {
        return;
    }
    const ggml_type our = (ggml_type) type->id;
    const int64_t d = type->head_size;
    Graph g;
    ggml_context * ctx = g.ctx();

    ggml_tensor * cache = ggml_new_tensor_2d(ctx, our, 2*d, 8);
    ggml_tensor * half  = ggml_view_2d(ctx, cache, d/2, 8, cache->nb[1], 0);
    ggml_tensor * f32   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d, 4);
    ggml_tensor * f32_h = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d/2, 4);
    ggml_tensor * q8    = ggml_new_tensor_2d(ctx, GGML_TYPE_Q8_0, 32*d, 4);
    ggml_tensor * i64   = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 4);
    ggml_tensor * i32   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 4);
    ggml_tensor * whole = ggml_new_tensor_2d(ctx, our, d, 8);

    check(!Graph::supports(node(ctx, GGML_OP_SET_ROWS, our, { d, 8 }, { q8, i64, whole })), "SET_ROWS from q8_0");
    check(!Graph::supports(node(ctx, GGML_OP_SET_ROWS, our, { d, 8 }, { f32_h, i64, whole })), "SET_ROWS of another width");
    ggml_tensor * part = ggml_view_2d(ctx, cache, d/2, 8, cache->nb[1], 0);
    part->op = GGML_OP_SET_ROWS;
    part->src[0] = f32_h;
    part->src[1] = i64;
    part->src[2] = half;
    check(!Graph::supports(part), "SET_ROWS to a part of a row");

    check(!Graph::supports(node(ctx, GGML_OP_GET_ROWS, GGML_TYPE_F32, { d/2, 4 }, { half, i32 })), "GET_ROWS of a part of a row");
    check(!Graph::supports(node(ctx, GGML_OP_GET_ROWS, GGML_TYPE_F16, { d, 4 }, { whole, i32 })), "GET_ROWS to f16");
    check(!Graph::supports(node(ctx, GGML_OP_CPY, GGML_TYPE_F32, { d/2, 8 }, { half, f32_h })), "CPY of a part of a row");
    ggml_tensor * joined = node(ctx, GGML_OP_CONCAT, our, { d, 16 }, { whole, whole });
    check(!Graph::supports(joined), "CONCAT along a row");
    joined->op_params[0] = 1;
    check(type->group_cells == 1 || !Graph::supports(joined), "CONCAT along cells that are coded together");
    ggml_tensor * halves = node(ctx, GGML_OP_CONCAT, our, { d, 16 }, { half, half });
    halves->op_params[0] = 1;
    check(!Graph::supports(halves), "CONCAT of parts of rows");
    check(!Graph::supports(node(ctx, GGML_OP_CPY, our, { d, 4 }, { q8, whole })), "CPY from q8_0");
    check(!Graph::supports(node(ctx, GGML_OP_CPY, GGML_TYPE_Q8_0, { 32*d, 4 }, { whole, q8 })), "CPY to q8_0");
    check(!Graph::supports(node(ctx, GGML_OP_CPY, our, { d, 3 }, { f32, whole })), "CPY of another size");
    for (const ggml_ext_type * other : concrete_types()) {
        if (other != type && other->head_size == type->head_size) {
            check(!Graph::supports(node(ctx, GGML_OP_CPY, (ggml_type) other->id, { d, 8 }, { whole })), std::string("CPY to ") + other->name);
            break;
        }
    }
    check(!Graph::supports(node(ctx, GGML_OP_MUL_MAT, GGML_TYPE_F32, { 8, 4 }, { half, f32_h })), "MUL_MAT of a part of a row");
    check(!Graph::supports(node(ctx, GGML_OP_MUL_MAT, GGML_TYPE_F32, { 8, 4 }, { whole, q8 })), "MUL_MAT by q8_0");
    check(!Graph::supports(node(ctx, GGML_OP_MUL_MAT, GGML_TYPE_F32, { 8, 4 }, { f32, whole })), "MUL_MAT by ours");
}

void odd_attention(const ggml_ext_type * type) {
    if (!begin_case(std::string("refusal of odd attention ") + type->name)) {
        return;
    }
    const ggml_type our = (ggml_type) type->id;
    const int64_t d = type->head_size;
    Graph g;
    ggml_context * ctx = g.ctx();
    const auto attention = [&](ggml_tensor * q, ggml_tensor * k, ggml_tensor * v) {
        return Graph::supports(node(ctx, GGML_OP_FLASH_ATTN_EXT, GGML_TYPE_F32, { v->ne[0], q->ne[2], q->ne[1], 1 }, { q, k, v }));
    };
    ggml_tensor * q  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, 2, 4);
    ggml_tensor * q2 = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 2*d, 2, 4);
    ggml_tensor * k  = ggml_new_tensor_3d(ctx, our, d, 8, 2);
    ggml_tensor * k2 = ggml_new_tensor_3d(ctx, our, 2*d, 8, 2);
    ggml_tensor * f  = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, d, 8, 2);

    if (type->serves_k && type->serves_v) {
        check(attention(q, k, k), "(the plain form is served)");
    }
    check(!attention(q2, k2, f), "K of two rows to a head");
    check(!attention(q, f, k2), "V of two rows to a head");
    ggml_tensor * k_part = ggml_view_3d(ctx, k, d/2, 8, 2, k->nb[1], k->nb[2], 0);
    ggml_tensor * q_part = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d/2, 2, 4);
    check(!attention(q_part, k_part, f), "K of a part of a row");
    check(!attention(ggml_new_tensor_3d(ctx, our, d, 2, 4), f, f), "q of ours");
}

// llama.cpp asks before it hands a graph to the scheduler, which would abort.
void whole_graphs() {
    if (!begin_case("refusal of whole graphs")) {
        return;
    }
    const std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)> cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr), ggml_backend_free);
    const std::vector<ggml_backend_t> backends = { cpu.get() };
    Graph g;
    ggml_context * ctx   = g.ctx();
    ggml_tensor *  cache = ggml_set_name(ggml_new_tensor_3d(ctx, type_for("srft4", 128), 128, 4, 2), "cache_v_l7");
    ggml_tensor *  view  = ggml_permute(ctx, cache, 0, 2, 1, 3);
    ggml_tensor *  f32   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 128, 2, 4);

    ggml_cgraph * served = ggml_new_graph_custom(ctx, 16, false);
    ggml_build_forward_expand(served, ggml_add(ctx, ggml_cast(ctx, view, GGML_TYPE_F32), f32));
    char err[1024] = "";
    check(ggml_ext_graph_served(served, backends.data(), backends.size(), err, sizeof(err)), std::string("what is served passes: ") + err);

    ggml_cgraph * refused = ggml_new_graph_custom(ctx, 16, false);
    ggml_build_forward_expand(refused, node(ctx, GGML_OP_ADD, GGML_TYPE_F32, { 128, 2, 4 }, { view, f32 }));
    std::string why;
    try {
        ggml_ext_check_graph(refused, backends);
    } catch (const std::exception & e) {
        why = e.what();
    }
    for (const char * part : { "ADD", "cache_v_l7", "srft4_128", "f16" }) {
        check(why.find(part) != std::string::npos, std::string("the reason names ") + part + ": " + why);
    }
}

void extra_buffer_type() {
    if (!begin_case("the extra buffer type is harmless")) {
        return;
    }
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto get = (ggml_backend_dev_get_extra_bufts_t)
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    int seen = 0;
    for (ggml_backend_buffer_type_t * buft = get(dev); buft && *buft; buft++) {
        if (strcmp(ggml_backend_buft_name(*buft), "CPU_EXT") == 0) {
            seen++;
            check(ggml_backend_buft_alloc_buffer(*buft, 1024) == nullptr, "it holds nothing");
            check(ggml_backend_buft_get_device(*buft) == dev, "it belongs to the CPU");
            check(ggml_backend_buft_get_alignment(*buft) > 0, "it has an alignment");
        }
    }
    check(seen == 1, "it is there once");
}

}  // namespace

void test_refusal() {
    for (const ggml_ext_type * type : concrete_types()) {
        if (quick && type->head_size != 128) {
            continue;
        }
        other_ops(type);
        views(type);
        odd_shapes(type);
        odd_attention(type);
    }
    whole_graphs();
    extra_buffer_type();
}
