// Tensors that no program makes. An RPC server computes the graphs that it is sent: it has looked at where each tensor
// begins and ends in its buffer, and not at steps, views and row numbers. Such ops are refused by supports_op and, since
// a server does not ask, when they are computed: an error in the log, a cache as it was, results of NaN. The cache ends
// where a page begins that may not be touched.

#include "ops.h"

#include <cmath>
#include <cstring>
#include <functional>

#ifdef _WIN32
#    include <cstdlib>
#else
#    include <sys/mman.h>
#    include <unistd.h>
#endif

namespace {

constexpr int64_t HEADS = 2, CELLS = 70, STREAMS = 2, QUERIES = 3;

int errors = 0;

void count_errors(ggml_log_level level, const char *, void *) {
    errors += level == GGML_LOG_LEVEL_ERROR;
}

// Memory that ends at a protected page.
class Fenced {
  public:
    explicit Fenced(size_t bytes) {
#ifdef _WIN32
        data_ = (uint8_t *) malloc(bytes);
#else
        const size_t page = sysconf(_SC_PAGESIZE), inner = GGML_PAD(bytes, page);
        mapped_ = inner + page;
        map_    = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        GGML_ASSERT(map_ != MAP_FAILED && mprotect((uint8_t *) map_ + inner, page, PROT_NONE) == 0);
        data_ = (uint8_t *) map_ + inner - bytes;
#endif
    }
    ~Fenced() {
#ifdef _WIN32
        free(data_);
#else
        munmap(map_, mapped_);
#endif
    }
    Fenced(const Fenced &) = delete;
    Fenced & operator=(const Fenced &) = delete;

    uint8_t * data() const { return data_; }

  private:
    uint8_t * data_;
    void    * map_    = nullptr;
    size_t    mapped_ = 0;
};

// A cache of two streams and the operands of every op, described one by one, as a server makes them of a message.
struct Operands {
    const ggml_ext_type * type;
    ggml_context        * ctx;
    int64_t               d, width;
    size_t                row, stride;
    Fenced                cache_memory;
    std::vector<uint8_t>  memory;  // of all others
    size_t                used = 0;

    ggml_tensor * cache, * merged, * by_head, * k, * v, * q, * rows, * two, * result, * scores, * answer, * floats;

    explicit Operands(const ggml_ext_type * t)
        : type(t), ctx(ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })), d(t->head_size), width(HEADS*d),
          row(t->row_bytes), stride(HEADS*row), cache_memory(stride*CELLS*STREAMS), memory(4 << 20, 0) {
        const ggml_type our = (ggml_type) t->id;
        cache = ggml_new_tensor_3d(ctx, our, width, CELLS, STREAMS);
        cache->data = cache_memory.data();
        memset(cache->data, 0, stride*CELLS*STREAMS);
        merged  = view({ width, CELLS*STREAMS, 1, 1 }, { row, stride, stride*CELLS*STREAMS, stride*CELLS*STREAMS });
        by_head = view({ d, HEADS, CELLS*STREAMS, 1 }, { row, row, stride, stride*CELLS*STREAMS });
        k       = view({ d, CELLS, HEADS, STREAMS }, { row, stride, row, stride*CELLS });
        v       = floats_of(GGML_TYPE_F16, { d, CELLS, HEADS, STREAMS });
        q       = floats_of(GGML_TYPE_F32, { d, QUERIES, HEADS, STREAMS });
        rows    = floats_of(GGML_TYPE_F32, { width, 2, 1, 1 });
        two     = floats_of(GGML_TYPE_I32, { 2, 1, 1, 1 });
        result  = floats_of(GGML_TYPE_F32, { width, 2, 1, 1 });
        scores  = floats_of(GGML_TYPE_F32, { CELLS, QUERIES, HEADS, STREAMS });
        answer  = floats_of(GGML_TYPE_F32, { d, HEADS, QUERIES, STREAMS });
        floats  = floats_of(GGML_TYPE_F32, { d, HEADS, CELLS*STREAMS, 1 });
        ((int32_t *) two->data)[1] = CELLS*STREAMS - 1;
    }
    ~Operands() { ggml_free(ctx); }
    Operands(const Operands &) = delete;
    Operands & operator=(const Operands &) = delete;

    ggml_tensor * view(std::vector<int64_t> ne, std::vector<size_t> nb) {
        ggml_tensor * t = ggml_new_tensor(ctx, (ggml_type) type->id, 4, ne.data());
        std::copy(nb.begin(), nb.end(), t->nb);
        t->view_src = cache;
        t->data     = cache->data;
        return t;
    }
    ggml_tensor * floats_of(ggml_type type, std::vector<int64_t> ne) {
        ggml_tensor * t = ggml_new_tensor(ctx, type, 4, ne.data());
        t->data = memory.data() + used;
        used += GGML_PAD(ggml_nbytes(t), 64);
        GGML_ASSERT(used <= memory.size());
        return t;
    }

    // the ops

    ggml_tensor * op(ggml_op op, ggml_tensor * like, std::vector<ggml_tensor *> src) {
        ggml_tensor * t = like;
        t->op = op;
        std::copy(src.begin(), src.end(), t->src);
        return t;
    }
    ggml_tensor * set_rows()  { return op(GGML_OP_SET_ROWS, merged, { rows, two }); }
    ggml_tensor * get_rows()  { return op(GGML_OP_GET_ROWS, result, { merged, two }); }
    ggml_tensor * read()      { return op(GGML_OP_CPY, floats, { by_head }); }
    ggml_tensor * write()     { return op(GGML_OP_CPY, by_head, { floats }); }
    ggml_tensor * mul_mat()   { return op(GGML_OP_MUL_MAT, scores, { k, q }); }
    ggml_tensor * attention() { return op(GGML_OP_FLASH_ATTN_EXT, answer, { q, k, v }); }
};

using Make  = std::function<ggml_tensor *(Operands &)>;
using Craft = std::function<void(Operands &)>;

bool all_nan(const ggml_tensor * t, int64_t n) {
    const float * x = (const float *) t->data;
    for (int64_t i = 0; i < n; i++) {
        if (!std::isnan(x[i])) {
            return false;
        }
    }
    return true;
}

enum class By { supports_op, compute_alone };

void refused(const ggml_ext_type * type, const std::string & what, const Make & make, const Craft & craft, By by = By::supports_op) {
    static ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    Operands o(type);
    const std::vector<uint8_t> before(o.cache_memory.data(), o.cache_memory.data() + o.stride*CELLS*STREAMS);
    ggml_tensor * op = make(o);
    const int64_t n  = ggml_nelements(op);
    check(ggml_backend_supports_op(cpu, op), what + ": (the plain form is served)");
    craft(o);
    if (by == By::supports_op) {
        check(!ggml_backend_supports_op(cpu, op), what + ": supports_op");
    }
    ggml_cgraph * graph = ggml_new_graph(o.ctx);
    ggml_build_forward_expand(graph, op);
    errors = 0;
    ggml_log_set(count_errors, nullptr);
    const ggml_status status = ggml_backend_graph_compute(cpu, graph);
    ggml_log_set(nullptr, nullptr);
    check(status == GGML_STATUS_SUCCESS && errors > 0, what + ": an error is logged");
    check(memcmp(before.data(), o.cache_memory.data(), before.size()) == 0, what + ": the cache is as it was");
    if (op == o.result || op == o.scores || op == o.answer) {
        check(all_nan(op, n), what + ": the result is NaN");
    }
}

// What may be wrong with a view of the cache, whatever the op: `t` says which.
void views(const ggml_ext_type * type, const std::string & op, const Make & make, ggml_tensor * Operands::*t, int cell_dim) {
    const auto with = [&](const char * what, const std::function<void(Operands &, ggml_tensor *)> & craft) {
        refused(type, op + ", " + what, make, [&](Operands & o) { craft(o, o.*t); });
    };
    with("cells beyond the end",        [&](Operands &,   ggml_tensor * t) { t->ne[cell_dim] += CELLS*STREAMS; });
    with("a step of two cells",         [&](Operands &,   ggml_tensor * t) { t->nb[cell_dim] *= 2; });
    with("a step that is no row's",     [&](Operands &,   ggml_tensor * t) { t->nb[cell_dim] -= 1; });
    with("a step that counts over",     [&](Operands &,   ggml_tensor * t) { t->nb[cell_dim] = SIZE_MAX - 7; });
    with("no step",                     [&](Operands & o, ggml_tensor * t) { t->nb[0] = o.row/2; });
    with("a negative count",            [&](Operands &,   ggml_tensor * t) { t->ne[3] = -1; });
    with("a count of 2^62",             [&](Operands &,   ggml_tensor * t) { t->ne[cell_dim] = int64_t(1) << 62; });
    with("data elsewhere",              [&](Operands & o, ggml_tensor * t) { t->data = (char *) t->data + o.row; });
    with("an offset that data has not", [&](Operands & o, ggml_tensor * t) { t->view_offs = o.stride; });
    with("an offset beyond the end",    [&](Operands & o, ggml_tensor * t) { t->view_offs = o.stride; t->data = (char *) t->data + o.stride; });
    with("a smaller cache",             [&](Operands & o, ggml_tensor *)   { o.cache->ne[2] = 1; });
    if (type->group_cells > 1) {
        with("a cache of half rows",    [&](Operands & o, ggml_tensor *)   { o.cache->nb[1] = o.row/2; });
        with("a cache of more cells",   [&](Operands & o, ggml_tensor *)   { o.cache->ne[1] = CELLS + 3; });
        with("a cache with gaps",       [&](Operands & o, ggml_tensor *)   { o.cache->nb[1] = 2*o.stride; });
    }
    refused(type, op + ", no memory", make, [&](Operands & o) { (o.*t)->data = nullptr; }, By::compute_alone);
}

void crafted(const ggml_ext_type * type) {
    if (!begin_case(std::string("crafted tensors ") + type->name)) {
        return;
    }
    const Make set_rows  = [](Operands & o) { return o.set_rows(); };
    const Make get_rows  = [](Operands & o) { return o.get_rows(); };
    const Make read      = [](Operands & o) { return o.read(); };
    const Make write     = [](Operands & o) { return o.write(); };
    const Make mul_mat   = [](Operands & o) { return o.mul_mat(); };
    const Make attention = [](Operands & o) { return o.attention(); };

    views(type, "SET_ROWS",  set_rows, &Operands::merged,  1);
    views(type, "GET_ROWS",  get_rows, &Operands::merged,  1);
    views(type, "CPY from",  read,     &Operands::by_head, 2);
    views(type, "CPY to",    write,    &Operands::by_head, 2);

    for (const int32_t bad : { -1, (int32_t) (CELLS*STREAMS), INT32_MAX, INT32_MIN }) {
        const auto name = [&](Operands & o) { ((int32_t *) o.two->data)[1] = bad; };
        // -1 leaves a row out, where rows stand alone
        if (bad != -1 || type->group_cells > 1) {
            refused(type, "SET_ROWS, row " + std::to_string(bad), set_rows, name, By::compute_alone);
        }
        refused(type, "GET_ROWS, row " + std::to_string(bad), get_rows, name, By::compute_alone);
    }
    refused(type, "SET_ROWS, more rows than numbers", set_rows, [](Operands & o) { o.rows->ne[1] = 3; });
    refused(type, "SET_ROWS, numbers of another type", set_rows, [](Operands & o) { o.two->type = GGML_TYPE_I16; });
    refused(type, "SET_ROWS, other streams than the cache", set_rows, [](Operands & o) { o.rows->ne[2] = 2; });
    refused(type, "SET_ROWS without numbers", set_rows, [](Operands & o) { o.merged->src[1] = nullptr; });
    refused(type, "GET_ROWS, other numbers than results", get_rows, [](Operands & o) { o.two->ne[0] = 1; });
    refused(type, "GET_ROWS, numbers of another type", get_rows, [](Operands & o) { o.two->type = GGML_TYPE_F16; });
    refused(type, "CPY of fewer values", write, [](Operands & o) { o.floats->ne[2] -= 1; });

    if (!type->serves_k) {
        return;
    }
    views(type, "MUL_MAT",        mul_mat,   &Operands::k, 1);
    views(type, "FLASH_ATTN_EXT", attention, &Operands::k, 1);
    refused(type, "MUL_MAT, other heads than the result", mul_mat, [](Operands & o) { o.q->ne[2] = 2*HEADS; });
    refused(type, "FLASH_ATTN_EXT without V", attention, [](Operands & o) { o.answer->src[2] = nullptr; });
    refused(type, "FLASH_ATTN_EXT, V with overlapping rows", attention, [](Operands & o) { o.v->nb[1] = 0; });
    refused(type, "FLASH_ATTN_EXT, a part of rows that is no view", attention, [](Operands & o) { o.k->view_src = nullptr; o.k->ne[0] = o.q->ne[0] = 1; });
    refused(type, "an op that there is not", attention, [](Operands & o) { o.answer->op = GGML_OP_ADD; });
}

}  // namespace

void test_crafted() {
    for (const ggml_ext_type * type : concrete_types()) {
        // the checks are the same at all sizes
        if (type->head_size == 128 || (!quick && type->head_size == 80)) {
            crafted(type);
        }
    }
}
