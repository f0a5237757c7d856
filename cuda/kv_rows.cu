// SET_ROWS, GET_ROWS and copies: what ../shaders/kv_rows.metal does, with the same headers.
//
// One launch writes the rows of several tensors, a row of blocks for each: K, V and their precise rows are small when a token is
// decoded, and a launch costs more than they do. The queries of the attention that follows may come along, with warps of their own, and
// rows of blocks that make nothing else.
// There are few blocks, so that those of the attention find room beside them.

#include "launch.cuh"
#include "queries.cuh"
#include "rows_groups.cuh"

namespace kv {
namespace {

// Warps of the rows of one tensor; beyond these a warp takes several heads. More blocks than are there at once get in each other's way.
constexpr uint MOST_WARPS = 2048;

struct write_params {
    rows_params  op[KV_CUDA_WRITES];
    uint         count;
    uint         row_warps; // of a block; those behind them make queries
    bulk_queries queries;
    attn_params  attention;
};

static_assert(sizeof(group_memory<3>) + sizeof(float)*group_floats(256, 256) <= 48*1024, "what a block may have without asking");

// Rows that stand alone, of srft or of any kind, or cells that are coded together and, at common sizes, rows of srft beside them. What
// a kernel does not need is not in it: when a token is decoded its code comes from memory each time. Of what several ops need, the last
// in this order does for all: delta and bands are never written together (kv_cuda_write_together).
// srft_alone: without queries beside them.
enum class write_of { srft_alone, srft, rows, delta, bands };

static write_of needed_by(uint kind) {
    return KV_KIND_IS_BAND(kind) ? write_of::bands : KV_KIND_IS_DELTA(kind) ? write_of::delta : KV_KIND_IS_SRFT(kind) ? write_of::srft : write_of::rows;
}

constexpr __host__ __device__ bool is_of_srft(write_of of) {
    return of == write_of::srft || of == write_of::srft_alone;
}

// Warps of a block that writes rows, without those that make queries. (Alone, blocks of four take 13.8 us for 512 rows of srft4, of eight 15.1.)
constexpr __host__ __device__ uint row_warps_of(write_of of) {
    return of == write_of::rows || of == write_of::srft ? 8 : ROW_WARPS;
}

template <uint SIZE, write_of OF> __global__ void __launch_bounds__((OF == write_of::srft_alone ? 1 : 2)*32*row_warps_of(OF)) kv_write(const KV_IN_PLACE write_params p) {
    extern __shared__ float memory[];
    __shared__ group_memory<OF == write_of::bands ? 3 : 1> own_memory;
    prefetch_tables(threadIdx.x % 32);
    wait_for_previous();
    if (threadIdx.x/32 >= p.row_warps) {
        if constexpr (SIZE != 0 && OF != write_of::srft_alone) {
            const uint warps = blockDim.x/32 - p.row_warps, warp = (blockIdx.y*gridDim.x + blockIdx.x)*warps + threadIdx.x/32 - p.row_warps;
            write_queries<SIZE, OF == write_of::rows>(p.attention, p.queries, warp, gridDim.x*gridDim.y*warps, warps, threadIdx.x % 32);
        }
        return;
    }
    if (p.queries.all_rows == 0) {
        let_next_begin(); // else those who make queries say when
    }
    if (blockIdx.y >= p.count) {
        return;
    }
    const rows_params & op = p.op[blockIdx.y];
    if constexpr (OF == write_of::rows || is_of_srft(OF)) {
        write_rows<SIZE, is_of_srft(OF), row_warps_of(OF)>(op, memory, own_memory.levels, own_memory.nearest[0]);
    } else if (SIZE == 0 || KV_KIND_IS_DELTA(op.kind)) {
        write_groups<SIZE, OF == write_of::bands>(op, memory, own_memory);
    } else {
        write_rows<SIZE, true, row_warps_of(OF)>(op, memory, own_memory.levels, own_memory.nearest[0]);
    }
}

__device__ __forceinline__ void store_float(uint8_t * at, uint kind, float x) {
    if (kind == KV_KIND_F16) {
        *(__half *) at = __float2half_rn(x);
    } else if (kind == KV_KIND_BF16) {
        // To the nearest, ties to even.
        const uint bits = __float_as_uint(x);
        *(uint16_t *) at = (uint16_t) ((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        *(float *) at = x;
    }
}

// The floats of a head that has been decoded into its domain, in the warp's own shared memory.
__device__ __forceinline__ void store_floats(const rows_params & p, uint size, const float * y, uint lane, uint8_t * to) {
    const uint64_t step = p.args.value_step;
    __syncwarp();
    if (!kv_is_rotated(p.kind)) {
        for (uint i = lane; i < size; i += 32) {
            store_float(to + i*step, p.float_kind, y[i]);
        }
        return;
    }
    vec2 z[KV_ROTATION_VALUES];
    kv_rotate_back(y, size, KV_SIGNS_ROTATION, lane, z);
    const uint first = kv_rotated_first(size, lane);
    if (lane < kv_rotation_lanes(size)) {
        for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
            store_float(to + (first + i)*step, p.float_kind, z[i/2][i % 2]);
        }
    }
}

// What a row of a group stands for, in its domain: from the last row before it that is not chained.
__device__ __forceinline__ void delta_key(
        const uint8_t * group, uint64_t step, uint kind, uint size, uint rows, uint row, const float * levels, uint lane, float * y) {
    const auto kind_of = [&](uint t) { return kv_delta_kind(group + t*step, kind, size); };
    uint first = row;
    while (first > 0 && kind_of(first) == KV_DELTA_CHAINED && kind_of(first - 1) != KV_DELTA_EMPTY) {
        --first;
    }
    const bool empty = kind_of(row) == KV_DELTA_EMPTY;
    for (uint i = lane; i < size; i += 32) {
        const float m = kv_delta_frame(group, step, kind, size, rows, i);
        float u = 0.0f;
        for (uint t = first; t <= row; ++t) {
            const float d = kv_row_value(group + t*step, kind, size, i, levels);
            const bool alone = kind_of(t) == KV_DELTA_ALONE;
            u = t > first ? fmaf(u, KV_DELTA_RHO, d) : alone ? d - m : d;
        }
        y[i] = empty ? 0.0f : m + u;
    }
}

template <uint SIZE> __global__ void __launch_bounds__(32*ROW_WARPS) kv_get_rows(const rows_params p) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.size, kind = p.kind, warp = threadIdx.x/32, lane = threadIdx.x % 32;
    const uint unit = blockIdx.x*ROW_WARPS + warp;
    if (unit >= p.args.units) {
        return;
    }
    const unit_place u = place_of(p, unit, size*p.args.value_step);
    if (!u.found) {
        return;
    }
    // Behind the row of each warp is its table.
    float * y = memory + warp*KV_ROWS_FLOATS(size), * levels = y + size;
    const uint8_t * row = p.from + u.cache;
    kv_row_levels(kind, lane, levels);
    __syncwarp();
    if (KV_KIND_IS_DELTA(kind)) {
        const uint64_t step = p.args.cell_step;
        const uint cell = (uint) ((u.cache/step + p.args.first_cell) % p.args.cells), in_group = cell % KV_DELTA_CELLS;
        const uint rows = ::min((uint) KV_DELTA_CELLS, p.args.cells - (cell - in_group));
        delta_key(row - in_group*step, step, kind, size, rows, in_group, levels, lane, y);
        store_floats(p, size, y, lane, p.to + u.floats);
        return;
    }
    kv_row_decode(row, kind, size, levels, lane, y);
    store_floats(p, size, y, lane, p.to + u.floats);
}

__global__ void __launch_bounds__(32*ROW_WARPS) kv_copy_rows(const rows_params p) {
    const uint unit = blockIdx.x*ROW_WARPS + threadIdx.x/32, lane = threadIdx.x % 32;
    if (unit >= p.args.units) {
        return;
    }
    // The other side is a cache too: a head of it is one step.
    const unit_place u = place_of(p, unit, p.args.value_step);
    for (uint i = lane; i < kv_row_bytes(p.kind, p.size); i += 32) {
        p.to[u.floats + i] = p.from[u.cache + i];
    }
}

static bool is_common(uint size) {
    return size == 64 || size == 128 || size == 256;
}

// delta8 has no kernels for sizes: it is for the few layers whose keys are large.
static bool has_kernel_of_size(uint kind, uint size) {
    return is_common(size) && kind != KV_KIND_DELTA8;
}

static rows_params params_of(const kv_cuda_rows & op) {
    small_divisor heads = small_divisor::of(op.args.heads);
    if ((uint64_t) op.args.units*op.args.heads >> 31 != 0) {
        heads.factor = 0;
    }
    return { op.args, op.kind, op.size, op.float_kind, op.index_bytes, (const uint8_t *) op.from, (const uint8_t *) op.index, (uint8_t *) op.to, op.center, heads, op.args.rows[1]*op.args.rows[2] != 1 };
}

template <write_of OF> static auto write_kernel(uint size) {
    return size == 64 ? kv_write<64, OF> : size == 128 ? kv_write<128, OF> : size == 256 ? kv_write<256, OF> : kv_write<0, OF>;
}

static cudaError_t launch_write(const kv_cuda_writes & writes, const attn_params * attention, const bulk_queries & queries, cudaStream_t stream) {
    write_params p = {};
    const uint size = attention ? attention->k_size : writes.count > 0 ? writes.op[0].size : 0;
    const bool own_kernel = has_kernel_of_size(writes.count > 0 ? writes.op[0].kind : KV_KIND_SRFT8, size);
    // Keys that are projected are rows; beside them are no groups.
    write_of of = own_kernel && !(attention && is_projected(query_domain_of(attention->k_kind))) ? write_of::srft : write_of::rows;
    for (int i = 0; i < writes.count; ++i) {
        const write_of needed = needed_by(writes.op[i].kind);
        of = needed > of ? needed : of;
    }
    if (of == write_of::srft && !attention) {
        of = write_of::srft_alone;
    }
    const uint warps = row_warps_of(of);
    uint   blocks = 0, count = 0;
    size_t floats = 0;
    for (int i = 0; i < writes.count; ++i) {
        const kv_cuda_rows & op = writes.op[i];
        if (op.args.units == 0) {
            continue;
        }
        p.op[count++] = params_of(op);
        const bool groups = KV_KIND_IS_DELTA(op.kind);
        const uint stride = group_stride(op.args, op.index_bytes), block_rows = block_rows_of(op.args.units);
        const uint own_blocks = groups ? (op.args.units/stride + block_rows - 1)/block_rows*stride : (::min(op.args.units, MOST_WARPS) + warps - 1)/warps;
        const size_t own_floats = groups ? group_floats(own_kernel, size) : warps*KV_ROWS_FLOATS(size);
        blocks = own_blocks > blocks ? own_blocks : blocks;
        floats = own_floats > floats ? own_floats : floats;
    }
    if (count == 0 && !attention) {
        return cudaSuccess;
    }
    const uint kernel_size = own_kernel ? size : 0;
    const auto kernel = of == write_of::srft_alone ? write_kernel<write_of::srft_alone>(kernel_size) : of == write_of::rows ? write_kernel<write_of::rows>(kernel_size) : of == write_of::srft ? write_kernel<write_of::srft>(kernel_size) :
                        of == write_of::delta ? write_kernel<write_of::delta>(kernel_size) : write_kernel<write_of::bands>(kernel_size);
    p.count = count;
    if (count == 0) {
        count  = 1;
        blocks = (queries.all_rows + warps - 1)/warps;
    } else {
        p.row_warps = warps;
        // A warp for each query, where that takes few blocks.
        const uint wanted = (queries.all_rows + blocks*warps - 1)/(blocks*warps);
        count = ::max(count, ::min(wanted, (uint) KV_CUDA_WRITES));
    }
    if (attention) {
        p.attention = *attention;
        p.queries   = queries;
    }
    return launch_early<write_params>(kernel, dim3(blocks, count), 32*(p.row_warps + (attention ? warps : 0)), sizeof(float)*floats, stream, p);
}

}  // namespace

cudaError_t launch_write_and_queries(const kv_cuda_writes & writes, const attn_params & p, const bulk_queries & queries, cudaStream_t stream) {
    return launch_write(writes, &p, queries, stream);
}

}  // namespace kv

bool kv_cuda_write_together(const kv_cuda_rows & a, const kv_cuda_rows & b) {
    // Groups take long, so that what is written beside them would wait for the few blocks that they leave.
    const uint32_t most = 1024;
    const bool     groups = KV_KIND_IS_DELTA(a.kind) || KV_KIND_IS_DELTA(b.kind);
    const auto     fits = [&](const kv_cuda_rows & op) { return op.args.units <= most && (!groups || KV_KIND_IS_DELTA(op.kind) || KV_KIND_IS_SRFT(op.kind)); };
    return a.size == b.size && !(KV_KIND_IS_DELTA(a.kind) && KV_KIND_IS_DELTA(b.kind)) && fits(a) && fits(b) && (!groups || (kv::has_kernel_of_size(a.kind, a.size) && kv::has_kernel_of_size(b.kind, b.size)));
}

cudaError_t kv_cuda_set_rows(const kv_cuda_writes & writes, cudaStream_t stream) {
    return kv::launch_write(writes, nullptr, {}, stream);
}

cudaError_t kv_cuda_get_rows(const kv_cuda_rows & op, cudaStream_t stream) {
    using namespace kv;
    if (op.args.units == 0) {
        return cudaSuccess;
    }
    const size_t shared = sizeof(float)*ROW_WARPS*KV_ROWS_FLOATS(op.size);
    KV_BY_SIZE(op.size, kv_get_rows)<<<(op.args.units + ROW_WARPS - 1)/ROW_WARPS, 32*ROW_WARPS, shared, stream>>>(params_of(op));
    return cudaGetLastError();
}

cudaError_t kv_cuda_copy_rows(const kv_cuda_rows & op, cudaStream_t stream) {
    using namespace kv;
    if (op.args.units == 0) {
        return cudaSuccess;
    }
    kv_copy_rows<<<(op.args.units + ROW_WARPS - 1)/ROW_WARPS, 32*ROW_WARPS, 0, stream>>>(params_of(op));
    return cudaGetLastError();
}
