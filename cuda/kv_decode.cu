// Which pairs of types decode.cuh decodes, and how they are split.

#include "decode.h"
#include "levels.cuh"

namespace kv {
namespace {

constexpr uint MOST_ROWS = 32;

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
        case KV_KIND_DELTA4: return decode_of_delta4(v_kind, size, row_blocks);
        case KV_KIND_DELTA3: return decode_of_delta3(v_kind, size, row_blocks);
        default:             return {};
    }
}

bool is_aligned(const void * data, const uint64_t (&nb)[3], uint align) {
    return ((uintptr_t) data | nb[0] | nb[1] | nb[2]) % align == 0;
}

// Can the kernels take the precise rows along?
bool parts_fit(const kv_cuda_attention & op) {
    const uint align = level_row_align(KV_KIND_SRFT8, op.k_size);
    for (uint i = 0; i < op.parts; ++i) {
        const kv_cuda_recent & part = op.part[i];
        if (part.k_kind != KV_KIND_SRFT8 || part.v_kind != KV_KIND_SRFT8 || !is_aligned(part.k, part.args.k_nb, align) || !is_aligned(part.v, part.args.v_nb, align) ||
            (uint64_t) part.args.cells*part.args.k_nb[0] >> 32 != 0 || (uint64_t) part.args.cells*part.args.v_nb[0] >> 32 != 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

uint part_chunk_cells(const kv_cuda_split & main) {
    return main.chunk_cells < RECENT_WORDS ? main.chunk_cells : RECENT_WORDS;
}

bool plan_decode(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_split & plan) {
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens, size = op.k_size;
    const bool known = size == op.v_size && (size == 64 || size == 128 || size == 256);
    if (device.cc < 800 || !known || rows > MOST_ROWS || !mask_is_small(op) ||
        (uint64_t) op.args.cells*op.args.k_nb[0] >> 32 != 0 || (uint64_t) op.args.cells*op.args.v_nb[0] >> 32 != 0) {
        return false;
    }
    const decode_choice choice = choice_of(op.k_kind, op.v_kind, size, rows);
    if (!choice.kernel || choice.shared_bytes > device.shared_bytes || !is_aligned(op.k, op.args.k_nb, level_row_align(op.k_kind, size)) ||
        !is_aligned(op.v, op.args.v_nb, level_row_align(op.v_kind, size)) || !parts_fit(op)) {
        return false;
    }
    const uint others = op.args.kv_heads*divided(rows, ROWS)*op.args.streams;
    const uint wanted = choice.blocks_per_sm*device.sms/others;
    const uint chunks = wanted > 0 ? wanted : 1;
    plan.decode       = true;
    plan.chunk_cells  = divided(divided(op.args.cells, chunks), BLOCK)*BLOCK;
    if (op.parts > 0 && plan.chunk_cells > MOST_CHUNK_CELLS) {
        plan.chunk_cells = MOST_CHUNK_CELLS;
    }
    plan.chunks       = divided(op.args.cells, plan.chunk_cells);
    plan.shared_bytes = choice.shared_bytes;
    plan.shared_limit = device.shared_bytes;
    return true;
}

cudaError_t launch_decode(const attn_params & p, const kv_cuda_split & plan, cudaStream_t stream) {
    const uint rows = p.args.heads/p.args.kv_heads*p.args.tokens;
    const decode_choice choice = choice_of(p.k_kind, p.v_kind, p.k_size, rows);
    const auto kernel = p.columns ? choice.recent : choice.kernel;
    const cudaError_t err = allow_shared(kernel, plan);
    if (err != cudaSuccess) {
        return err;
    }
    const dim3 grid(p.args.kv_heads*divided(rows, ROWS), p.columns ? p.args.chunks : plan.chunks, p.args.streams);
    kernel<<<grid, THREADS, plan.shared_bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv
