// Which pairs of types decode.cuh decodes, and how they are split.

#include "decode.h"
#include "levels.cuh"
#include "queries.cuh"

#include <atomic>

namespace kv {
namespace {

constexpr uint MOST_ROWS = 32;
// Precise rows beside tiles: blocks of a part, unless each would take more than so many steps.
constexpr uint MOST_PRECISE = 4, MOST_STEPS = 8;
constexpr int  MOST_DEVICES = 64;

uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

decode_choice choice_of(uint k_kind, uint v_kind, uint size, uint rows) {
    const uint row_blocks = rows <= ROWS/2 ? 1 : 2;
    switch (k_kind) {
        case KV_KIND_SRFT8:  return decode_of_srft8(v_kind, size, row_blocks);
        case KV_KIND_SRFT4:  return decode_of_srft4(v_kind, size, row_blocks);
        case KV_KIND_SRFT3:  return decode_of_srft3(v_kind, size, row_blocks);
        case KV_KIND_SRFT2:  return decode_of_srft2(v_kind, size, row_blocks);
        case KV_KIND_DELTA8: return decode_of_delta8(v_kind, size, row_blocks);
        case KV_KIND_DELTA4: return decode_of_delta4(v_kind, size, row_blocks);
        case KV_KIND_DELTA3: return decode_of_delta3(v_kind, size, row_blocks);
        case KV_KIND_BAND4:  return decode_of_band4(v_kind, size, row_blocks);
        case KV_KIND_BAND3:  return decode_of_band3(v_kind, size, row_blocks);
        case KV_KIND_BAND2:  return decode_of_band2(v_kind, size, row_blocks);
        case KV_KIND_POLAR4: return decode_of_polar4(v_kind, size, row_blocks);
        case KV_KIND_POLAR3: return decode_of_polar3(v_kind, size, row_blocks);
        case KV_KIND_TURBO4: return decode_of_turbo4(v_kind, size, row_blocks);
        case KV_KIND_TURBO3: return decode_of_turbo3(v_kind, size, row_blocks);
        case KV_KIND_QJL1:   return decode_of_qjl1(v_kind, size, row_blocks);
        default:             return {};
    }
}

bool is_aligned(const void * data, const uint64_t (&nb)[3], uint align) {
    return ((uintptr_t) data | nb[0] | nb[1] | nb[2]) % align == 0;
}

__global__ void kv_probe() {}

// Query rows of a block that copies tiles.
uint bulk_rows(uint rows) {
    return rows <= ROWS/2 ? ROWS/2 : ROWS;
}

// Can the kernels take the precise rows along?
bool parts_fit(const kv_cuda_attention & op) {
    const uint k_kind = precise_kind(op.k_kind), k_align = level_row_align(k_kind, op.k_size), v_align = level_row_align(KV_KIND_SRFT8, op.k_size);
    for (uint i = 0; i < op.parts; ++i) {
        const kv_cuda_recent & part = op.part[i];
        if (part.k_kind != k_kind || part.v_kind != KV_KIND_SRFT8 || !is_aligned(part.k, part.args.k_nb, k_align) || !is_aligned(part.v, part.args.v_nb, v_align) ||
            (uint64_t) part.args.cells*part.args.k_nb[0] >> 32 != 0 || (uint64_t) part.args.cells*part.args.v_nb[0] >> 32 != 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

bool has_early_launches() {
#if defined(_MSC_VER) && CUDART_VERSION < 12030
    return false; // as ggml, which found cudaLaunchKernelEx broken there
#endif
    static std::atomic<int> known[MOST_DEVICES]; // 1: no, 2: yes
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= MOST_DEVICES) {
        return false;
    }
    if (known[device] == 0) {
        cudaFuncAttributes attributes = {};
        known[device] = cudaFuncGetAttributes(&attributes, kv_probe) == cudaSuccess && attributes.ptxVersion >= 90 ? 2 : 1;
    }
    return known[device] == 2;
}

// Tiles of all KV heads, if they lie side by side, in units of 16 bytes, as rows of the mask do, and no head has a mask of its own.
static bool plan_bulk(const kv_cuda_attention & op, const decode_choice & choice, const kv_cuda_device & device, kv_cuda_split & plan) {
    const auto side_by_side = [&](const void * data, const uint64_t (&nb)[3], uint row_bytes) {
        return nb[1] == row_bytes && nb[0] == (uint64_t) row_bytes*op.args.kv_heads && ((uintptr_t) data | nb[2]) % 16 == 0;
    };
    const kv_attn_args & args = op.args;
    const bool mask_fits = !op.mask || (args.mask_rows[0] == 1 && ((uintptr_t) op.mask | (args.tokens > 1 ? args.mask_nb[0] : 0) | (args.mask_rows[1] > 1 ? args.mask_nb[2] : 0)) % 16 == 0);
    const bool fits = device.cc >= 900 && !kv_cuda_path_is("rows") && has_early_launches() && mask_fits && side_by_side(op.k, args.k_nb, op.k_bytes) && side_by_side(op.v, args.v_nb, op.v_bytes);
    if (fits) {
        plan.bulk = choice.teams_of(op.args.kv_heads, device.shared_bytes);
    }
    if (plan.bulk.teams == 0) {
        return false;
    }
    // A block for each multiprocessor that is free, a few of precise rows among them: these wait for rows that are written, and so may begin
    // when those that write them have ended.
    const uint heads_per_kv = op.args.heads/op.args.kv_heads, rows = heads_per_kv*op.args.tokens, block_rows = bulk_rows(rows);
    const uint others = divided(rows, block_rows)*op.args.streams, unit = is_delta(op.k_kind) ? 2*TILE : TILE;
    const uint step = plan.bulk.teams*STEP, most_precise = ::max(::min(device.sms/others/16, MOST_PRECISE), 1u);
    uint precise_cells = 0, precise = 0;
    for (uint i = 0; i < op.parts; ++i) {
        precise_cells = ::max(precise_cells, op.part[i].args.cells);
    }
    plan.part_cells = ::min(::max(divided(precise_cells, most_precise*step), 1u), MOST_STEPS)*step;
    for (uint i = 0; i < op.parts; ++i) {
        precise += divided(op.part[i].args.cells, plan.part_cells);
    }
    const uint wanted = (uint) ::max(device.sms - ::max(device.busy, (int) (precise*others)), 1)/others;
    const uint cells = divided(divided(op.args.cells, ::max(wanted, 1u)), unit)*unit;
    const uint tokens = (block_rows - 1)/heads_per_kv + 2, mask_rows = tokens < op.args.tokens ? tokens : op.args.tokens;
    const uint most = TILE_MASK/mask_rows/unit*unit;
    plan.chunk_cells  = cells < most ? cells : most;
    plan.shared_bytes = device.shared_bytes;
    return true;
}

size_t bulk_query_rows(const kv_cuda_attention & op) {
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens, block_rows = bulk_rows(rows);
    return (size_t) op.args.streams*op.args.kv_heads*divided(rows, block_rows)*block_rows*(has_precise_queries(op.k_kind, op.parts > 0) ? 2 : 1);
}

bool plan_decode(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_split & plan) {
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens, size = op.k_size;
    const bool known = size == op.v_size && (size == 64 || size == 128 || size == 256);
    if (device.cc < 800 || !known || rows > MOST_ROWS || !mask_is_small(op) ||
        (uint64_t) op.args.cells*op.args.k_nb[0] >> 32 != 0 || (uint64_t) op.args.cells*op.args.v_nb[0] >> 32 != 0) {
        return false;
    }
    const decode_choice choice = choice_of(op.k_kind, op.v_kind, size, rows);
    // Codes of bands are read by words, which lie two bytes behind one or begin with it.
    const uint row_align = level_row_align(op.k_kind, size), k_align = KV_KIND_IS_BAND(op.k_kind) && row_align < 4 ? 4 : row_align;
    if (!choice.kernel || choice.shared_bytes > device.shared_bytes || !is_aligned(op.k, op.args.k_nb, k_align) ||
        !is_aligned(op.v, op.args.v_nb, level_row_align(op.v_kind, size)) || !parts_fit(op)) {
        return false;
    }
    if (!plan_bulk(op, choice, device, plan)) {
        const uint others = op.args.kv_heads*divided(rows, ROWS)*op.args.streams;
        const uint wanted = choice.blocks_per_sm*device.sms/others;
        const uint chunks = wanted > 0 ? wanted : 1;
        plan.chunk_cells  = divided(divided(op.args.cells, chunks), BLOCK)*BLOCK;
        if (op.parts > 0 && plan.chunk_cells > MOST_CHUNK_CELLS) {
            plan.chunk_cells = MOST_CHUNK_CELLS;
        }
        plan.part_cells   = ::min(plan.chunk_cells, RECENT_WORDS);
        plan.shared_bytes = choice.shared_bytes;
    }
    plan.decode       = true;
    plan.chunks       = divided(op.args.cells, plan.chunk_cells);
    plan.shared_limit = device.shared_bytes;
    return true;
}

cudaError_t launch_decode(const attn_params & p, const kv_cuda_split & plan, const kv_cuda_writes & writes, cudaStream_t stream) {
    const uint rows = p.args.heads/p.args.kv_heads*p.args.tokens;
    const decode_choice choice = choice_of(p.k_kind, p.v_kind, p.k_size, rows);
    const bool bulk = plan.bulk.teams > 0;
    const auto kernel = bulk ? (p.columns ? choice.bulk_recent : choice.bulk) : p.columns ? choice.recent : choice.kernel;
    cudaError_t err = allow_shared(kernel, plan);
    if (err != cudaSuccess) {
        return err;
    }
    const uint chunks = p.columns ? p.args.chunks : plan.chunks;
    if (bulk) {
        const uint block_rows = bulk_rows(rows), blocks = divided(rows, block_rows), query_rows = p.args.streams*blocks*p.args.kv_heads*block_rows;
        err = launch_write_and_queries(writes, p, { small_divisor::of(block_rows), small_divisor::of(blocks), query_rows, has_precise_queries(p.k_kind, p.columns) ? 2*query_rows : query_rows }, stream);
        return err == cudaSuccess ? launch_early(kernel, dim3(blocks, p.args.streams, chunks), 32*(p.args.kv_heads*plan.bulk.teams + plan.bulk.askers), plan.shared_bytes, stream, p) : err;
    }
    kernel<<<dim3(p.args.kv_heads*divided(rows, ROWS), chunks, p.args.streams), THREADS, plan.shared_bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv
