// Which cells have precise rows, and what the mask says of these: what the kernels of kv_tile.cu need before they attend to the
// cache and to the precise rows in turn. The others find out for themselves.

#include "attention.cuh"

namespace kv {
namespace {

constexpr uint THREADS = 256, WORDS = KV_COLUMNS_CELLS/32;

// Bits of KV_COLUMNS_CELLS cells. Those beyond the last cell are set: nobody sees them.
__global__ void __launch_bounds__(THREADS) kv_hidden_cells(const kv_recent_args args, const uint8_t * columns, uint * hidden) {
    __shared__ uint words[WORDS];
    const uint first = blockIdx.x*KV_COLUMNS_CELLS, stream = blockIdx.y;
    for (uint i = threadIdx.x; i < WORDS; i += THREADS) {
        const uint cell = first + 32*i;
        words[i] = cell >= args.cells ? ~0u : args.cells - cell < 32 ? ~0u << (args.cells - cell) : 0;
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < args.columns; i += THREADS) {
        const uint at = cell_of(columns, args.columns_nb, i, stream, args.cells) - first; // large where the cell comes before
        if (at < KV_COLUMNS_CELLS) {
            atomicOr(&words[at/32], 1u << at % 32);
        }
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < WORDS; i += THREADS) {
        const uint word = first/32 + i;
        if (word < args.hidden_words) {
            hidden[stream*args.hidden_words + word] = words[i];
        }
    }
}

// A block for a row of the mask.
__global__ void __launch_bounds__(THREADS) kv_columns_mask(const kv_recent_args args, const uint8_t * columns, const uint8_t * mask, uint8_t * to) {
    const uint token = blockIdx.x, head = blockIdx.y, stream = blockIdx.z, kv_stream = stream/(args.streams/args.kv_streams);
    const unsigned short * from = (const unsigned short *) (mask + token*args.mask_nb[0] + head*args.mask_nb[1] + stream % args.mask_rows[1]*args.mask_nb[2]);
    unsigned short * row = (unsigned short *) (to + ((size_t) (stream*args.mask_rows[0] + head)*args.tokens + token)*args.row_bytes);
    for (uint i = threadIdx.x; i < args.columns; i += THREADS) {
        const uint cell = cell_of(columns, args.columns_nb, i, kv_stream, args.cells);
        row[i] = cell == ~0u ? 0xfc00 : mask ? from[cell] : 0; // -inf
    }
}

}  // namespace

cudaError_t launch_columns(const kv_cuda_attention & op, void * hidden, void * mask, cudaStream_t stream) {
    const kv_recent_args & args = op.recent;
    const uint8_t * columns = (const uint8_t *) op.columns;
    const dim3 pieces((args.hidden_words + WORDS - 1)/WORDS, args.kv_streams), rows(args.tokens, args.mask_rows[0], args.streams);
    kv_hidden_cells<<<pieces, THREADS, 0, stream>>>(args, columns, (uint *) hidden);
    kv_columns_mask<<<rows, THREADS, 0, stream>>>(args, columns, (const uint8_t *) op.mask, (uint8_t *) mask);
    return cudaGetLastError();
}

}  // namespace kv
