// The shim's part in the CPU backend: an extra that computes the ops on our types, and those of calibrated keys, queries and values.
//
// Every op that computes with one of our types is claimed, so that none is computed by code that does not know the type. A
// graph that was placed by supports_op never meets one that the library refuses; an RPC server computes what it is sent
// and asks nobody, so all that supports_op looks at is looked at again when an op is computed. What is refused then is
// logged and left out.

#include "ggml-ext-center.h"
#include "ggml-ext-seam.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "traits.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int N_TYPES = GGML_EXT_TYPE_LIMIT - GGML_EXT_TYPE_BASE;

template <int ID> void from_float(const float * src, void * dst, int64_t n) {
    ggml_ext_encode(ID, src, dst, n);
}

// For ggml's own loops that ask the traits instead of the op; ours compute without decoding.
float decode_and_dot(int id, int n, const void * x, const float * y) {
    static thread_local std::vector<float> row;
    row.resize(n);
    ggml_ext_decode(id, x, row.data(), n);

    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += (double) row[i]*y[i];
    }
    return (float) sum;
}

template <int ID> void vec_dot(int n, float * s, size_t, const void * x, size_t, const void * y, size_t, int) {
    *s = decode_and_dot(ID, n, x, (const float *) y);
}

template <int ID> ggml_type_traits_cpu traits_of() {
    // families, and types whose rows mean nothing without their group
    if (!ggml_get_type_traits((ggml_type) ID)->to_float) {
        return { nullptr, nullptr, GGML_TYPE_F32, 1 };
    }
    return { from_float<ID>, vec_dot<ID>, GGML_TYPE_F32, 1 };
}

template <int... I> std::array<ggml_type_traits_cpu, N_TYPES> traits_of_all(std::integer_sequence<int, I...>) {
    return { { traits_of<GGML_EXT_TYPE_BASE + I>()... } };
}

// ggml_nbytes, which counts modulo 2^64: 0 where there are more bytes, or none.
size_t bytes_of(const ggml_tensor * t) {
    const int64_t block = ggml_blck_size(t->type);
    // Products of such numbers are below the most, and need no division, which takes 40 cycles on some CPUs: this is asked 50 times for a layer.
    const size_t  most = SIZE_MAX/8, small = (size_t) 1 << 30;
    bool fits = block > 0;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        const size_t n = (size_t) t->ne[i], step = t->nb[i];
        fits = fits && t->ne[i] > 0 && ((n | step) < small || step == 0 || n <= most/step);
    }
    if (!fits) {
        return 0;
    }
    size_t res = block == 1 ? (t->ne[0] - 1)*t->nb[0] + ggml_type_size(t->type) : t->ne[0]*t->nb[0]/block;
    for (int i = 1; i < GGML_MAX_DIMS; i++) {
        res += (t->ne[i] - 1)*t->nb[i];
    }
    return res;
}

ggml_ext_tensor describe(const ggml_tensor * t) {
    ggml_ext_tensor res = {};
    res.type = t->type;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        res.ne[i] = t->ne[i];
        res.nb[i] = t->nb[i];
    }
    res.data = t->data;
    if (t->view_src) {
        res.view.offset    = t->view_offs;
        res.view.row_bytes = t->view_src->nb[1];
        res.view.rows      = t->view_src->ne[1];
        res.view.data      = t->view_src->data;
        res.view.bytes     = bytes_of(t->view_src);
    }
    if (!ggml_ext_is_ours(t->type)) {
        // rows in whole blocks, or they cannot be read
        const bool whole = t->nb[0] == ggml_type_size(t->type) && ggml_blck_size(t->type) > 0 && t->ne[0] % ggml_blck_size(t->type) == 0;
        res.to_float           = whole ? ggml_get_type_traits(t->type)->to_float : nullptr;
        res.view.foreign_bytes = bytes_of(t);
    }
    return res;
}

// FLASH_ATTN_EXT as the library sees it. `op` points into the object, so it stays where it is.
struct attention {
    ggml_ext_tensor      mask    = {};
    ggml_ext_tensor      sinks   = {};
    ggml_ext_tensor      center  = {};
    ggml_ext_tensor      batch_k = {};
    ggml_ext_tensor      batch_v = {};
    ggml_ext_recent_rows recent  = {};
    ggml_ext_attention   op      = {};

    explicit attention(const ggml_tensor * t) {
        op.q   = describe(t->src[0]);
        op.k   = describe(t->src[1]);
        op.v   = describe(t->src[2]);
        op.dst = describe(t);
        if (t->src[3]) {
            mask    = describe(t->src[3]);
            op.mask = &mask;
        }
        if (t->src[4]) {
            sinks    = describe(t->src[4]);
            op.sinks = &sinks;
        }
        // precise rows of recent cells (ggml-ext-recent.h)
        if (t->src[5]) {
            recent.k     = describe(t->src[5]);
            recent.v     = describe(t->src[6]);
            recent.cells = describe(t->src[7]);
            op.recent    = &recent;
            if (t->src[8]) {
                batch_k        = describe(t->src[8]);
                recent.batch_k = &batch_k;
            }
            if (t->src[9]) {
                batch_v        = describe(t->src[9]);
                recent.batch_v = &batch_v;
            }
        }
        memcpy(&op.scale,         (const float *) t->op_params + 0, sizeof(float));
        memcpy(&op.max_bias,      (const float *) t->op_params + 1, sizeof(float));
        memcpy(&op.logit_softcap, (const float *) t->op_params + 2, sizeof(float));
    }

    // With an ADD of centers to its result, in place.
    attention(const ggml_tensor * t, const ggml_tensor * add) : attention(t) {
        center    = describe(add->src[1]);
        op.center = &center;
    }

    attention(const attention &) = delete;
    attention & operator=(const attention &) = delete;
};

// CONCAT is ggml's own code, which copies rows as they are: whole ones that mean something by themselves.
bool is_concat_of_rows(const ggml_tensor * op) {
    const auto whole = [&](const ggml_tensor * src) {
        return src && src->type == op->type && src->ne[0] % ggml_blck_size(src->type) == 0 && ggml_is_contiguous_rows(src);
    };
    return op->op == GGML_OP_CONCAT && ggml_ext_is_ours(op->type) && ggml_get_type_traits(op->type)->to_float &&
           ggml_get_op_params_i32(op, 0) > 0 && whole(op->src[0]) && whole(op->src[1]);
}

// A product of calibrated keys or queries: ggml has it too, but takes longer.
bool is_product(const ggml_tensor * op) {
    return ggml_ext_is_product(op) && op->src[0] && op->src[1] && op->src[0]->type == GGML_TYPE_F16 && op->src[1]->type == GGML_TYPE_F32;
}

// The center of values that are written to a cache: as a product.
bool is_centering(const ggml_tensor * op) {
    return ggml_ext_is_centering(op) && op->src[0] && op->src[1] && op->src[0]->type == GGML_TYPE_F32 && op->src[1]->type == GGML_TYPE_F32;
}

// What else there is on these types comes here, and is refused where the library has no such op.
bool claims(const ggml_tensor * op) {
    // LIGHTNING_INDEXER is ggml's own code, through to_float
    return is_product(op) || is_centering(op) || (op->op != GGML_OP_LIGHTNING_INDEXER && !is_concat_of_rows(op) && ggml_ext_concerns(op));
}

// Is it an op that the library has, with the sources that it takes?
bool serves(const ggml_tensor * op) {
    const auto sources = [&](int n) {
        for (int i = 0; i < n; i++) {
            if (!op->src[i]) {
                return false;
            }
        }
        return true;
    };
    switch (op->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            // of precise rows, K, V and their cells, or none
            return sources(3) && (ggml_ext_is_ours(op->src[1]->type) || ggml_ext_is_ours(op->src[2]->type)) &&
                   !op->src[5] == !op->src[6] && !op->src[5] == !op->src[7] && (op->src[5] || (!op->src[8] && !op->src[9]));
        case GGML_OP_SET_ROWS:
            return sources(2) && ggml_ext_is_ours(op->type);
        case GGML_OP_MUL_MAT:
            return sources(2) && (ggml_ext_is_ours(op->src[0]->type) || is_product(op));
        case GGML_OP_SUB:
            return is_centering(op);
        case GGML_OP_GET_ROWS:
            return sources(2) && ggml_ext_is_ours(op->src[0]->type);
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            return sources(1) && (ggml_ext_is_ours(op->src[0]->type) || ggml_ext_is_ours(op->type));
        default:
            return false;
    }
}

bool attend(const ggml_compute_params * params, const attention & att) {
    const bool computed = ggml_ext_attention_compute(&att.op, params->ith, params->nth, params->wdata, params->wsize);
    ggml_barrier(params->threadpool);
    return ggml_ext_attention_finish(&att.op, params->ith, params->nth, params->wdata, params->wsize) && computed;
}

bool compute(const ggml_compute_params * params, const ggml_tensor * op) {
    const int ith = params->ith;
    const int nth = params->nth;

    if (!serves(op)) {
        // a view is somebody's memory: that stays
        if (ith == 0 && !op->view_src) {
            const ggml_ext_tensor dst = describe(op);
            ggml_ext_not_served(&dst);
        }
        return false;
    }
    if (op->op == GGML_OP_FLASH_ATTN_EXT) {
        return attend(params, attention(op));
    }

    const ggml_ext_tensor dst  = describe(op);
    const ggml_ext_tensor src0 = describe(op->src[0]);

    switch (op->op) {
        case GGML_OP_SET_ROWS: {
            const ggml_ext_tensor rows = describe(op->src[1]);
            return ggml_ext_set_rows(&dst, &src0, &rows, op->src[1]->type == GGML_TYPE_I64 ? 8 : 4, ith, nth);
        }
        case GGML_OP_GET_ROWS: {
            const ggml_ext_tensor rows = describe(op->src[1]);
            return ggml_ext_get_rows(&dst, &src0, &rows, ith, nth);
        }
        case GGML_OP_MUL_MAT: {
            const ggml_ext_tensor src1 = describe(op->src[1]);
            return is_product(op) ? ggml_ext_multiply(&src0, &src1, &dst, ith, nth) : ggml_ext_mul_mat(&src0, &src1, &dst, ith, nth);
        }
        case GGML_OP_SUB: {
            const ggml_ext_tensor center = describe(op->src[1]);
            return ggml_ext_subtract(&src0, &center, &dst, ith, nth);
        }
        default:
            return ggml_ext_copy(&dst, &src0, ith, nth);
    }
}

std::atomic<int64_t> waits_saved{0};

void say_unless(bool computed, const ggml_tensor * op) {
    if (!computed) {
        GGML_LOG_ERROR("ggml-ext: %s failed for %s (%s)\n", ggml_op_name(op->op), op->name, ggml_type_name(op->type));
    }
}

void compute_or_say(const ggml_compute_params * params, const ggml_tensor * op) {
    say_unless(compute(params, op), op);
}

// An op of which each thread does its share and is done: nothing in it waits, and it needs no work data.
bool waits_for_nobody(const ggml_tensor * op) {
    return is_product(op) || is_centering(op) || (op->op == GGML_OP_SET_ROWS && ggml_ext_is_ours(op->type) && op->src[0] && op->src[1]);
}

struct memory {
    const char * begin = nullptr, * end = nullptr;

    memory() = default;
    explicit memory(const ggml_tensor * t) : begin((const char *) t->data), end(begin + bytes_of(t)) {}

    // One that is not known meets all others.
    bool meets(const memory & other) const { return begin >= end || other.begin >= other.end || (begin < other.end && other.begin < end); }
};

// What such an op writes and reads.
struct footprint {
    const ggml_tensor * op = nullptr;
    memory              writes, reads[2];

    footprint() = default;
    // Where cells are coded together, a row changes others of its group, which may lie outside of the view of the op.
    explicit footprint(const ggml_tensor * op)
        : op(op), writes(op->view_src ? op->view_src : op), reads{ memory(op->src[0]), memory(op->src[1]) } {}

    // Must all threads be done with this op before one begins the other?
    bool before(const footprint & other, int n_threads) const {
        const bool reused = other.writes.meets(writes) || other.writes.meets(reads[0]) || other.writes.meets(reads[1]);
        return reused || writes.meets(other.reads[1]) || (writes.meets(other.reads[0]) && !heads_stay(other.op, n_threads));
    }

  private:
    bool heads_stay(const ggml_tensor * written, int n_threads) const {
        if (written->op != GGML_OP_SET_ROWS) {
            return false;
        }
        if (is_centering(op)) {
            const ggml_ext_tensor x = describe(op->src[0]), center = describe(op->src[1]), left = describe(op), cache = describe(written), rows = describe(written->src[0]);
            return ggml_ext_rows_stay(&x, &center, &left, &cache, &rows);
        }
        if (!is_product(op)) {
            return false;
        }
        const ggml_ext_tensor m = describe(op->src[0]), x = describe(op->src[1]), product = describe(op), cache = describe(written), rows = describe(written->src[0]);
        return ggml_ext_heads_stay(&m, &x, &product, &cache, &rows, n_threads);
    }
};

// Asks for what a thread takes of a product's matrices, or of centers, while one token is decoded, or nearly that: weights have driven them out of all caches
// since the token before.
void prefetch_share(const ggml_tensor * m, const ggml_compute_params * params) {
#if defined(__GNUC__)
    // what a layer may have, and a cache holds
    constexpr size_t MOST = 4*1024*1024;
    const size_t bytes = bytes_of(m);
    if (!m->data || !ggml_is_contiguous(m) || bytes > MOST) {
        return;
    }
    for (size_t i = bytes*params->ith/params->nth; i < bytes*(params->ith + 1)/params->nth; i += 64) {
        __builtin_prefetch((const char *) m->data + i);
    }
#else
    GGML_UNUSED(m);
    GGML_UNUSED(params);
#endif
}

// The product that is computed next, where nothing but small ops comes before it: what follows the last of the weights that a layer
// multiplies its input by.
const ggml_tensor * next_product(const ggml_cgraph * graph, int node) {
    constexpr int FAR = 12;
    for (int i = node + 1; i < graph->n_nodes && i <= node + FAR; i++) {
        const ggml_tensor * op = graph->nodes[i];
        if (is_product(op)) {
            return op;
        }
        if (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID || waits_for_nobody(op)) {
            break;
        }
    }
    return nullptr;
}

// An attention and the centers that its result gets back, where it lies. 0: there is none here; else how many nodes are done behind the first.
int attend_and_add(const ggml_cgraph * graph, int node, const ggml_compute_params * params) {
    const ggml_tensor * op = graph->nodes[node];
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !claims(op) || !serves(op)) {
        return 0;
    }
    int at = node + 1;
    while (at < graph->n_nodes && ggml_op_is_empty(graph->nodes[at]->op)) {
        at++;
    }
    const ggml_tensor * add = at < graph->n_nodes ? graph->nodes[at] : op;
    if (!ggml_ext_adds_center(add, op)) {
        return 0;
    }
    say_unless(attend(params, attention(op, add)), op);
    if (params->ith == 0) {
        waits_saved++;
    }
    return at - node;
}

class ext_traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = 0;
        if (op->op == GGML_OP_FLASH_ATTN_EXT && serves(op)) {
            const attention att(op);
            size = ggml_ext_attention_work_size(&att.op, n_threads);
        }
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        compute_or_say(params, op);
        return true;
    }
};

class ext_buffer_type : public ggml::cpu::extra_buffer_type {
    // asked for tensors that live in this buffer type: there are none, and weights must not get the idea
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        static ext_traits traits;
        return claims(op) ? &traits : nullptr;
    }
};

const char * buft_name(ggml_backend_buffer_type_t) {
    return "CPU_EXT";
}

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t, size_t) {
    return nullptr;
}

size_t buft_alignment(ggml_backend_buffer_type_t) {
    return GGML_MEM_ALIGN;
}

}  // namespace

const ggml_type_traits_cpu * ggml_ext_type_traits_cpu(ggml_type type) {
    static const std::array<ggml_type_traits_cpu, N_TYPES> all = traits_of_all(std::make_integer_sequence<int, N_TYPES>());
    static const ggml_type_traits_cpu unknown = { nullptr, nullptr, GGML_TYPE_F32, 1 };

    return ggml_ext_is_ours(type) ? &all[(uint32_t) type - GGML_EXT_TYPE_BASE] : &unknown;
}

ggml_backend_buffer_type_t ggml_ext_cpu_buffer_type(void) {
    static ext_buffer_type context;
    // by name: the interface has grown between versions of ggml
    static ggml_backend_buffer_type buft = [] {
        ggml_backend_buffer_type res = {};
        res.iface.get_name      = buft_name;
        res.iface.alloc_buffer  = buft_alloc;
        res.iface.get_alignment = buft_alignment;
        res.device  = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
        res.context = &context;
        return res;
    }();
    return &buft;
}

int64_t ggml_ext_cpu_waits_saved(void) {
    return waits_saved;
}

int ggml_ext_cpu_fuse(const ggml_cgraph * graph, int first, const ggml_compute_params * params) {
    if (const int n = attend_and_add(graph, first, params)) {
        return n;
    }
    if (!waits_for_nobody(graph->nodes[first])) {
        if (const ggml_tensor * product = graph->nodes[first]->op == GGML_OP_MUL_MAT ? next_product(graph, first) : nullptr) {
            prefetch_share(product->src[0], params);
        }
        return 0;
    }
    constexpr int MOST = 8;
    footprint     of[MOST];
    int           n = 0, last = first;

    for (int i = first; i < graph->n_nodes && n < MOST; i++) {
        const ggml_tensor * op = graph->nodes[i];
        if (ggml_op_is_empty(op->op) || ggml_is_empty(op) || !(op->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            continue;
        }
        if (!waits_for_nobody(op)) {
            break;
        }
        of[n] = footprint(op);
        if (std::any_of(of, of + n, [&](const footprint & f) { return f.before(of[n], params->nth); })) {
            break;
        }
        n++;
        last = i;
    }
    if (n < 2) {
        return 0;
    }
    for (int i = 1; i < n; i++) {
        if (is_product(of[i].op)) {
            prefetch_share(of[i].op->src[0], params);
        } else if (is_centering(of[i].op)) {
            prefetch_share(of[i].op->src[1], params);
        }
    }
    std::for_each(of, of + n, [&](const footprint & f) { compute_or_say(params, f.op); });
    if (params->ith == 0) {
        waits_saved += n - 1;
    }
    return last - first;
}

bool ggml_ext_cpu_supports_op(const ggml_tensor * op) {
    if (op->op == GGML_OP_CONCAT) {
        return is_concat_of_rows(op);
    }
    if (!serves(op)) {
        return false;
    }
    if (op->op == GGML_OP_FLASH_ATTN_EXT) {
        const attention att(op);
        char err[256];
        return ggml_ext_attention_supports(&att.op, err, sizeof(err));
    }

    const ggml_ext_tensor dst  = describe(op);
    const ggml_ext_tensor src0 = describe(op->src[0]);

    switch (op->op) {
        case GGML_OP_SET_ROWS: {
            const ggml_ext_tensor rows = describe(op->src[1]);
            return ggml_ext_set_rows_supports(&dst, &src0, &rows);
        }
        case GGML_OP_GET_ROWS: {
            const ggml_ext_tensor rows = describe(op->src[1]);
            return ggml_ext_get_rows_supports(&dst, &src0, &rows);
        }
        case GGML_OP_MUL_MAT: {
            const ggml_ext_tensor src1 = describe(op->src[1]);
            return ggml_ext_mul_mat_supports(&src0, &src1, &dst);
        }
        default:
            return ggml_ext_copy_supports(&dst, &src0);
    }
}
