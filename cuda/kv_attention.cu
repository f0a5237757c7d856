// FLASH_ATTN_EXT: how it is split, its first step (queries into K's domain) and its last (chunks to results).
//
//     q' = R q                   once per query row                         kv_queries
//     s  = q' . k, softmax, o' = sum p v      for a chunk of cells          kv_decode.cu, kv_tile.cu
//     merge, sinks, 1/sum, R^-1  once per result                            kv_merge
//
// Precise rows of recent cells are attentions of their own, whose sums are merged with those of the cache: their domain is
// V's, but for turbo's second half, where they have nothing.

// Queries and results are rotated here, not rows: roots need not be exact to the last bit, nor come from a table in memory.
#define KV_ROOTS_BY_SINE

#include "attention.cuh"
#include "queries.cuh"

#include <cstdlib>

namespace kv {
namespace {

using namespace metal;

constexpr uint QUERY_WARPS = 4;

// A warp for a query row. Halves and what they leave, relative to a power of two near the largest value: 22 bits in all.
template <uint SIZE> __global__ void __launch_bounds__(32*QUERY_WARPS) kv_queries(const attn_params p) {
    extern __shared__ float memory[];
    const uint size = SIZE ? SIZE : p.k_size, width = kv_width(p.k_kind, size), lane = threadIdx.x % 32;
    const uint row = blockIdx.x*QUERY_WARPS + threadIdx.x/32;
    if (row >= p.args.streams*p.args.heads*p.args.tokens) {
        return;
    }
    const uint heads_per_kv = p.args.heads/p.args.kv_heads, rows = heads_per_kv*p.args.tokens;
    const uint stream = row/rows/p.args.kv_heads, kv_head = row/rows % p.args.kv_heads;
    const uint token = row % rows/heads_per_kv, head = kv_head*heads_per_kv + row % rows % heads_per_kv;
    const uint8_t * from = p.q + token*p.args.q_nb[0] + head*p.args.q_nb[1] + stream*p.args.q_nb[2];
    float * q = memory + threadIdx.x/32*width;
    for (uint i = lane; i < size; i += 32) {
        q[i] = kv_float_at(from + i*kv_float_bytes(p.q_kind), p.q_kind);
    }
    kv_enter_domain(q, p.k_kind, size, lane);
    __syncwarp();
    float largest = 0.0f;
    for (uint i = lane; i < width; i += 32) {
        largest = fmaxf(largest, fabsf(q[i]));
    }
    largest = simd_max(largest);
    // A power of two whose inverse is one too.
    const uint exponent = __float_as_uint(largest) >> 23;
    const bool usual = exponent > 1 && exponent < 253;
    const float scale = usual ? __uint_as_float(exponent << 23) : 1.0f, inverse = usual ? __uint_as_float((254 - exponent) << 23) : 1.0f;
    for (uint i = lane; i < width; i += 32) {
        const float x = q[i]*inverse;
        const __half high = __float2half_rn(x);
        p.query_high[(size_t) row*width + i] = high;
        p.query_low[(size_t) row*width + i] = __float2half_rn(x - __half2float(high));
    }
    if (lane == 0) {
        p.query_scale[row] = scale;
    }
}

constexpr uint MERGE_THREADS = 512, AHEAD = 9, METAS = 5;

// A result, to which the center of values is added that are stored without it: as an ADD of its own would.
__device__ __forceinline__ float centered(float x, const float * center, uint i) {
    return center ? __fadd_rn(x, center[i]) : x;
}

// R^-1 of a result in the warp's memory. A call of its own, so that what it needs is near when it counts: see kv_merge.
template <uint SIZE> __device__ __noinline__ void store_rotated_back(const float * o, uint of_size, uint lane, const float * center, float * result, uint out_size) {
    const uint size = SIZE ? SIZE : of_size;
    vec2 z[KV_ROTATION_VALUES];
    kv_rotate_back(o, size, KV_SIGNS_ROTATION, lane, z);
    const uint first = kv_rotated_first(size, lane);
    for (uint i = 0; i < 2*kv_rotation_values(size); ++i) {
        if (lane < kv_rotation_lanes(size) && first + i < out_size) {
            result[first + i] = centered(z[i/2][i % 2], center, first + i);
        }
    }
}

// A block for a result. A thread takes four values of every n-th chunk, and all it needs of the first ones is asked for at once:
// each answer is a wait for memory. Each warp finds the largest score for itself, and the sum of all weights. What follows may
// begin while chunks are under way: it is no kernel that reads before it waits.
template <uint SIZE> __global__ void __launch_bounds__(MERGE_THREADS) kv_merge(const KV_IN_PLACE attn_params p) {
    extern __shared__ __align__(16) float o[]; // [part][width]
    const uint size = SIZE ? SIZE : p.v_size, width = kv_width(p.v_kind, size), chunks = p.args.chunks;
    const uint lanes = width/4, parts = blockDim.x/lanes, part = threadIdx.x/lanes, value = threadIdx.x % lanes*4;
    const uint warp = threadIdx.x/32, lane = threadIdx.x % 32;
    const uint token = blockIdx.x, head = blockIdx.y, stream = blockIdx.z, number = (stream*gridDim.x + token)*gridDim.y + head;
    const float2 * metas = p.metas + (size_t) number*chunks;
    const float * sums = p.sums + (size_t) number*chunks*width + value;
    const float * const center = p.center ? p.center + p.heads_per_kv.quotient(head)*p.args.out_size : nullptr;
    float * const result = (float *) (p.dst + head*p.args.dst_nb[0] + token*p.args.dst_nb[1] + stream*p.args.dst_nb[2]);
    let_next_begin();
    if (warp == 0 && !kv_is_plain(p.v_kind)) {
        store_rotated_back<SIZE>(o, size, lane, nullptr, nullptr, 0); // brings its code and tables near while there is nothing else to do
    }
#ifdef __CUDA_ARCH__
    if (center && 32*threadIdx.x < p.args.out_size) {
        asm volatile("prefetch.global.L1 [%0];" :: "l"(center + 32*threadIdx.x));
    }
#endif
    wait_for_previous(); // chunks are there
    const auto meta_of = [&](uint c) { return c >= chunks ? make_float2(HIDDEN, 0.0f) : metas[c]; };
    float4 ahead[AHEAD];
    float top_of[AHEAD];
    // A chunk without a weight was perhaps not written, nor were values of precise rows beyond the head.
    const auto ask = [&](uint first) {
#pragma unroll
        for (uint n = 0; n < AHEAD; ++n) {
            const uint c = first + n*parts;
            const bool there = part < parts && c < chunks && (value < size || c < p.args.main_chunks);
            top_of[n] = meta_of(c).x;
            ahead[n]  = there ? *(const float4 *) (sums + (size_t) c*width) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    };
    float2 mine[METAS];
#pragma unroll
    for (uint n = 0; n < METAS; ++n) {
        mine[n] = meta_of(32*n + lane);
    }
    ask(part);

    float largest = HIDDEN, sum = 0.0f;
#pragma unroll
    for (uint n = 0; n < METAS; ++n) {
        largest = fmaxf(largest, mine[n].x);
    }
    for (uint c = 32*METAS + lane; c < chunks; c += 32) {
        largest = fmaxf(largest, meta_of(c).x);
    }
    largest = simd_max(largest);
#pragma unroll
    for (uint n = 0; n < METAS; ++n) {
        sum = fmaf(rescale(mine[n].x, largest), mine[n].y, sum);
    }
    for (uint c = 32*METAS + lane; c < chunks; c += 32) {
        sum = fmaf(rescale(meta_of(c).x, largest), meta_of(c).y, sum);
    }
    sum = simd_sum(sum);
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint first = part; part < parts && first < chunks; first += AHEAD*parts) {
        if (first != part) {
            ask(first);
        }
#pragma unroll
        for (uint n = 0; n < AHEAD; ++n) {
            const float weight = rescale(top_of[n], largest);
            if (weight != 0.0f) {
                x.x = fmaf(weight, ahead[n].x, x.x);
                x.y = fmaf(weight, ahead[n].y, x.y);
                x.z = fmaf(weight, ahead[n].z, x.z);
                x.w = fmaf(weight, ahead[n].w, x.w);
            }
        }
    }
    __syncthreads(); // the first warp has read what is there, for nothing
    if (part < parts) {
        *(float4 *) (o + part*width + value) = x;
    }
    float factor = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[head];
        if (sink > largest) {
            factor = rescale(largest, sink);
            sum *= factor;
            largest = sink;
        }
        sum += rescale(sink, largest);
    }
    // A row that sees no cell is zero.
    factor = sum == 0.0f ? 0.0f : factor/sum;
    __syncthreads();
    for (uint i = threadIdx.x; i < width; i += blockDim.x) {
        float y = 0.0f;
        for (uint j = 0; j < parts; ++j) {
            y += o[j*width + i];
        }
        o[i] = y*factor; // no other thread reads column i
    }
    __syncthreads();
    if (warp != 0) {
        return;
    }
    if (kv_is_plain(p.v_kind)) {
        for (uint i = lane; i < p.args.out_size; i += 32) {
            result[i] = centered(o[i], center, i);
        }
        return;
    }
    kv_leave_domain(o, p.v_kind, size, lane);
    store_rotated_back<SIZE>(o, size, lane, center, result, p.args.out_size);
}

// Precise rows as an attention of their own.
static kv_cuda_attention attention_of(const kv_cuda_attention & op, uint i) {
    const kv_cuda_recent & part = op.part[i];
    kv_cuda_attention res = op;
    res.args    = part.args;
    res.k_kind  = part.k_kind;
    res.v_kind  = part.v_kind;
    res.k_bytes = part.k_bytes;
    res.v_bytes = part.v_bytes;
    res.k       = part.k;
    res.v       = part.v;
    res.sinks   = nullptr;
    res.parts   = 0;
    return res;
}

// Are queries of both in the same domain?
static bool shares_queries(uint a, uint b) {
    return query_domain_of(a) == query_domain_of(b) && KV_KIND_IS_BAND(a) == KV_KIND_IS_BAND(b);
}

// Queries as halves, from `at` on.
struct query_layout {
    size_t high, low, scales, end;
};

static query_layout queries_at(size_t at, size_t rows, uint width) {
    query_layout res;
    res.high   = at;
    res.low    = res.high + padded(rows*width*sizeof(__half));
    res.scales = res.low + padded(rows*width*sizeof(__half));
    res.end    = res.scales + padded(rows*sizeof(float));
    return res;
}

// Where the parts of the scratch begin.
struct scratch_layout {
    query_layout queries, precise; // of K's domain, of that of precise rows
    size_t       hidden, mask;     // of the columns
    size_t       metas, sums, end;
};

static scratch_layout layout_of(const kv_cuda_attention & op, const kv_cuda_plan & plan) {
    const size_t rows = (size_t) op.args.streams*op.args.heads*op.args.tokens;
    scratch_layout res;
    // Of bytes there are as many planes as a half has bytes.
    res.queries = res.precise = queries_at(0, plan.main.bulk.teams > 0 ? bulk_query_rows(op) : plan.main.decode ? 0 : rows, width_of(op.k_kind, op.k_size));
    res.hidden = res.queries.end;
    if (op.parts > 0 && !plan.together && !shares_queries(op.k_kind, op.part[0].k_kind)) {
        res.precise = queries_at(res.queries.end, rows, width_of(op.part[0].k_kind, op.k_size));
        res.hidden  = res.precise.end;
    }
    const kv_recent_args & recent = op.recent;
    const bool listed = op.parts > 0 && !plan.together;
    res.mask  = res.hidden + (listed ? padded(sizeof(uint)*recent.hidden_words*recent.kv_streams) : 0);
    res.metas = res.mask + (listed ? padded(recent.row_bytes*recent.tokens*recent.mask_rows[0]*recent.streams) : 0);
    res.sums  = res.metas + padded(rows*plan.chunks*sizeof(float2));
    res.end   = res.sums + padded(rows*plan.chunks*width_of(op.v_kind, op.v_size)*sizeof(float));
    return res;
}

static attn_params params_of(const kv_cuda_attention & op, const kv_cuda_split & split, const query_layout & queries, uint8_t * scratch) {
    attn_params p = {};
    p.args = op.args;
    p.args.chunk_cells = split.chunk_cells;
    p.args.main_chunks = split.chunks;
    p.k_kind  = op.k_kind;
    p.v_kind  = op.v_kind;
    p.q_kind  = op.q_kind;
    p.k_size  = op.k_size;
    p.v_size  = op.v_size;
    p.k_bytes = op.k_bytes;
    p.v_bytes = op.v_bytes;
    p.alibi   = op.alibi;
    p.q      = (const uint8_t *) op.q;
    p.k      = (const uint8_t *) op.k;
    p.v      = (const uint8_t *) op.v;
    p.mask   = (const uint8_t *) op.mask;
    p.sinks  = op.sinks;
    p.center = op.center;
    p.dst    = (uint8_t *) op.dst;
    p.query_high  = (__half *) (scratch + queries.high);
    p.query_low   = (__half *) (scratch + queries.low);
    p.query_scale = (float *) (scratch + queries.scales);
    p.query_planes = (signed char *) (scratch + queries.high);
    p.bulk           = split.bulk;
    p.kv_heads       = small_divisor::of(op.args.kv_heads);
    p.heads_per_kv   = small_divisor::of(op.args.heads/op.args.kv_heads);
    p.streams_per_kv = small_divisor::of(op.args.streams/op.args.kv_streams);
    p.teams          = small_divisor::of(split.bulk.teams > 0 ? split.bulk.teams : 1);
    return p;
}

static cudaError_t launch_split(const attn_params & p, const kv_cuda_split & split, const kv_cuda_writes & writes, cudaStream_t stream) {
    return split.decode ? launch_decode(p, split, writes, stream) : launch_tile(p, split, stream);
}

}  // namespace

cudaError_t launch_queries(const attn_params & p, cudaStream_t stream) {
    const uint rows = p.args.streams*p.args.heads*p.args.tokens;
    const size_t shared = sizeof(float)*QUERY_WARPS*width_of(p.k_kind, p.k_size);
    KV_BY_SIZE(p.k_size, kv_queries)<<<(rows + QUERY_WARPS - 1)/QUERY_WARPS, 32*QUERY_WARPS, shared, stream>>>(p);
    return cudaGetLastError();
}

// Chunks to results: sinks, 1/sum, R^-1. Early: behind a kernel that lets it be launched before it ends.
static cudaError_t launch_merge(const attn_params & p, bool early, cudaStream_t stream) {
    // At least a thread for each four values of a result. Where a quarter of the threads asks for all chunks at once, more of them only make blocks that
    // begin later: of eight streams with 16 chunks each (srft4, 32K cells) a decode takes 0.0762 ms instead of 0.0801.
    const uint width = width_of(p.v_kind, p.v_size), few = MERGE_THREADS/4;
    const dim3 results(p.args.tokens, p.args.heads, p.args.streams);
    const uint threads = p.args.chunks <= AHEAD*(4*few/width) ? few : MERGE_THREADS;
    const size_t shared = sizeof(float)*(threads*4/width*width);
    const auto kernel = KV_BY_SIZE(p.v_size, kv_merge);
    if (early) {
        return launch_early(kernel, results, threads, shared, stream, p);
    }
    kernel<<<results, threads, shared, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv

bool kv_cuda_path_is(const char * name) {
    static const char * const path = getenv("GGML_EXT_CUDA_PATH");
    return path && strcmp(path, name) == 0;
}

bool kv_cuda_plan_attention(const kv_cuda_attention & op, const kv_cuda_device & whole, const kv_cuda_writes & writes, kv_cuda_plan & plan) {
    plan = {};
    // Rows of groups take long, so the multiprocessors that they are written by are left to them. Where they are many, all wait.
    kv_cuda_device device = whole;
    device.busy = 0;
    plan.announced = writes.count > 0;
    for (int i = 0; i < writes.count; ++i) {
        const uint32_t blocks = KV_KIND_IS_DELTA(writes.op[i].kind) ? writes.op[i].args.units : 0;
        const bool few = blocks <= (uint32_t) whole.sms/8;
        device.busy += few ? (int) blocks : 0;
        plan.announced = plan.announced && few;
    }
    if (device.cc < KV_CUDA_OLDEST || !kv::mask_is_small(op)) {
        return false;
    }
    plan.together = !kv_cuda_path_is("tile") && kv::plan_decode(op, device, plan.main);
    if (!plan.together) {
        kv::plan_tile(op, device, plan.main);
    }
    plan.chunks = plan.main.chunks;
    bool fits = plan.main.shared_bytes <= device.shared_bytes;
    for (uint32_t i = 0; i < op.parts; ++i) {
        const kv_cuda_attention part = kv::attention_of(op, i);
        kv_cuda_split & split = plan.part[i];
        if (plan.together) {
            split.chunks = (part.args.cells + plan.main.part_cells - 1)/plan.main.part_cells;
        } else {
            kv::plan_tile(part, device, split);
        }
        fits = fits && kv::mask_is_small(part) && split.shared_bytes <= device.shared_bytes;
        plan.chunks += split.chunks;
    }
    plan.scratch_bytes = kv::layout_of(op, plan).end;
    return fits;
}

bool kv_cuda_writes_first(const kv_cuda_attention & op, const kv_cuda_plan & plan, const kv_cuda_writes & writes) {
    bool res = plan.together && plan.main.bulk.teams > 0;
    for (int i = 0; i < writes.count; ++i) {
        const kv_rows_args & rows = writes.op[i].args;
        res = res && writes.op[i].kind != KV_KIND_DELTA8 && writes.op[i].size == op.k_size && writes.op[i].index_bytes != 0 && rows.rows[1]*rows.rows[2] == 1;
    }
    return res;
}

cudaError_t kv_cuda_attend(const kv_cuda_attention & op, const kv_cuda_plan & plan, const kv_cuda_writes & writes, void * scratch, cudaStream_t stream) {
    const kv::scratch_layout at = kv::layout_of(op, plan);
    uint8_t * base = (uint8_t *) scratch;
    const auto with_sums = [&](kv::attn_params p) {
        p.args.chunks = plan.chunks;
        p.metas       = (float2 *) (base + at.metas);
        p.sums        = (float *) (base + at.sums);
        return p;
    };
    kv::attn_params main = with_sums(kv::params_of(op, plan.main, at.queries, base));
    for (int i = 0; i < writes.count; ++i) {
        const kv_cuda_rows & rows = writes.op[i];
        if (rows.args.units == 0) {
            continue;
        }
        main.write_rows = rows.args.rows[0] > main.write_rows ? rows.args.rows[0] : main.write_rows;
        main.writes[main.write_count++] = { (const uint8_t *) rows.to, (const uint8_t *) rows.index, rows.args.cache_nb[0], rows.args.index_nb[0], rows.index_bytes, rows.args.rows[0] };
    }
    main.announced = plan.announced && main.write_count > 0;
    cudaError_t err = cudaSuccess;
    if (plan.together && op.parts > 0) {
        main.columns          = (const uint8_t *) op.columns;
        main.columns_nb[0]    = op.recent.columns_nb[0];
        main.columns_nb[1]    = op.recent.columns_nb[1];
        main.column_count     = op.recent.columns;
        main.part_chunk_cells = plan.main.part_cells;
        main.part[1].first_chunk = plan.chunks;
        for (uint32_t i = 0, first = plan.main.chunks; i < op.parts; ++i) {
            const kv_cuda_recent & from = op.part[i];
            kv::attn_part & part = main.part[i];
            part.k            = (const uint8_t *) from.k;
            part.v            = (const uint8_t *) from.v;
            part.count        = from.args.cells;
            part.first_column = from.first_column;
            part.first_chunk  = first;
            memcpy(part.k_nb, from.args.k_nb, sizeof(part.k_nb));
            memcpy(part.v_nb, from.args.v_nb, sizeof(part.v_nb));
            first += plan.part[i].chunks;
        }
    } else if (op.parts > 0) {
        main.hidden = (const uint32_t *) (base + at.hidden);
        err = kv::launch_columns(op, base + at.hidden, base + at.mask, stream);
    }
    if (err == cudaSuccess && !plan.main.decode) {
        err = kv::launch_queries(main, stream);
    }
    if (err == cudaSuccess) {
        err = kv::launch_split(main, plan.main, writes, stream);
    }
    bool made = at.precise.high == at.queries.high;
    for (uint32_t i = 0, first = plan.main.chunks; i < op.parts && !plan.together && err == cudaSuccess; ++i) {
        const kv_cuda_split & split = plan.part[i];
        kv::attn_params p = with_sums(kv::params_of(kv::attention_of(op, i), split, at.precise, base));
        p.mask = base + at.mask + sizeof(__half)*op.part[i].first_column;
        p.args.first_chunk = first;
        first += split.chunks;
        if (!split.decode && !made) {
            err  = kv::launch_queries(p, stream);
            made = true;
        }
        if (err == cudaSuccess) {
            err = kv::launch_split(p, split, {}, stream);
        }
    }
    return err == cudaSuccess ? kv::launch_merge(main, plan.main.bulk.teams > 0, stream) : err;
}
