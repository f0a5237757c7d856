// Attention of a few query rows over 4-bit rows: K of srft4 or delta4, V of srft4, head sizes 64, 128 and 256.
//
// A block of four warps takes one KV head, up to eight query rows and a chunk of cells; its warps take blocks of 64 cells in
// turn, each alone, 16 cells at a time. Rows go from memory to registers: keys while the values before
// them are added, values while keys are multiplied. What nobody sees is not read.
//
//     K   16 cells x 32 values by integer tensor cores. A code of 4 bits is a selector of prmt: one lookup has the levels of the
//         lower half of the table, one those of the upper half, and both are multiplied with the queries, so that nothing has
//         to choose between them. A byte of the row holds values of two scales; four columns have the queries of one of them
//         and zeros in between, four those of the other. Queries are two planes of 8 bits.
//     V   values x 16 cells by f16 tensor cores. Codes of two cells make a byte, and a table in shared memory (a copy for each
//         lane, so that no two lanes meet in a bank) has the two levels as halves. Weights carry the scales.
//
// The softmax is relative to the largest score so far, which changes a few times in a chunk: until then nothing is rescaled.
//
// delta: w_t = q.d_t + RHO w_(t-1) over 16 cells is a scan of three shuffles for each half of them.

#include "attention.cuh"
#include "mma.cuh"

namespace kv {
namespace {

using namespace metal;

constexpr uint WARPS = 4, THREADS = 32*WARPS, ROWS = 8, BLOCK = 64, STEP = 16;

__device__ __forceinline__ uint prmt(uint a, uint b, uint selector) {
    uint r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

__device__ __forceinline__ void mma_s8(int (&d)[4], const uint (&a)[4], uint b0, uint b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

constexpr uint four_bytes(int a, int b, int c, int d) {
    return (uint) (uint8_t) a | (uint) (uint8_t) b << 8 | (uint) (uint8_t) c << 16 | (uint) (uint8_t) d << 24;
}

// Levels of kv_srft.h. A selector from 8 on gives the sign of a byte: of the lower half -1, of the upper half 0, so the upper
// half is one larger. The upper half is found by the complement of the code.
constexpr uint LOWER_0 = four_bytes(-127, -98, -78, -61), LOWER_1 = four_bytes(-46, -32, -19, -7);
constexpr uint UPPER_0 = four_bytes(113, 91, 73, 58), UPPER_1 = four_bytes(45, 32, 19, 7);

// Steps of the second plane of queries in one of the first.
constexpr int SECOND_PLANE = 254;

__device__ __forceinline__ uint load_word(const uint8_t * at, uint align) {
    if (align >= 4) {
        return __ldg((const uint *) at);
    }
    return __ldg((const unsigned short *) at) | (uint) __ldg((const unsigned short *) (at + 2)) << 16;
}

// The compiler is to keep it, not to make it anew in the loop.
__device__ __forceinline__ void keep(uint & x) {
    asm volatile("" : "+r"(x));
}

__device__ __forceinline__ void keep(const uint8_t *& x) {
    asm volatile("" : "+l"(x));
}

// A stored scale; any bytes give something finite.
__device__ __forceinline__ float scale_at(uint stored) {
    return (stored & 0x7c00) != 0x7c00 ? __half2float(__ushort_as_half((unsigned short) stored)) : 0.0f;
}

__device__ __forceinline__ uint finite(uint halves) {
    const __half2 low = __float2half2_rn(-65504.0f), high = __float2half2_rn(65504.0f);
    const __half2 x = __hmin2(__hmax2(*(const __half2 *) &halves, low), high);
    return *(const uint *) &x;
}

__host__ __device__ constexpr uint row_bytes(uint d, bool is_delta) {
    return d/32*2 + d/2 + (is_delta ? d/64*2 : 0);
}

// What rows are aligned to, where the beginning of the cache is.
__host__ __device__ constexpr uint row_align(uint d, bool is_delta) {
    return row_bytes(d, is_delta) % 8 == 0 && d >= 128 ? 8 : row_bytes(d, is_delta) % 4 == 0 ? 4 : 2;
}

// Blocks that a multiprocessor has registers for.
__host__ __device__ constexpr uint blocks_per_sm(uint d, uint row_blocks) {
    return d == 256 ? 2 : d == 128 && row_blocks == 2 ? 3 : 4;
}

// Bytes of K and V of one lane for 16 cells.
template <uint D> struct k_words {
    uint scales[2][D/64]; // [cell g, g + 8][chunk]: both scales of a chunk
    uint codes[2][D/64][2];
};

template <uint D> struct v_words {
    uint scales[4][D/64]; // [cell 2t, 2t + 1, 2t + 8, 2t + 9][chunk]
    uint codes[4][D/64];
};

template <uint C> __device__ __forceinline__ void load_scales(uint (&scales)[C], const uint8_t * row, uint align) {
    if (align >= 8 && C % 2 == 0) {
#pragma unroll
        for (uint c = 0; c < C; c += 2) {
            const ::uint2 two = __ldg((const ::uint2 *) (row + 4*c));
            scales[c] = two.x;
            scales[(c + 1) % C] = two.y;
        }
        return;
    }
#pragma unroll
    for (uint c = 0; c < C; ++c) {
        scales[c] = load_word(row + 4*c, align);
    }
}

// `codes_of` is where the lane's codes of row 0 are. Caches are below 4 GiB.
template <uint D, uint ALIGN> __device__ __forceinline__ void load_k(
        k_words<D> & w, const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint g) {
#pragma unroll
    for (uint n = 0; n < 2; ++n) {
        const uint at = min(cell + g + 8*n, last)*step;
        load_scales(w.scales[n], rows + at, ALIGN);
#pragma unroll
        for (uint c = 0; c < D/64; ++c) {
            const uint8_t * codes = codes_of + at + 32*c;
            if (ALIGN >= 8) {
                const ::uint2 two = __ldg((const ::uint2 *) codes);
                w.codes[n][c][0] = two.x;
                w.codes[n][c][1] = two.y;
            } else {
                w.codes[n][c][0] = load_word(codes, ALIGN);
                w.codes[n][c][1] = load_word(codes + 4, ALIGN);
            }
        }
    }
}

template <uint D> __device__ __forceinline__ void load_v(
        v_words<D> & w, const uint8_t * rows, const uint8_t * codes_of, uint step, uint cell, uint last, uint t) {
#pragma unroll
    for (uint n = 0; n < 4; ++n) {
        const uint at = min(cell + 2*t + n % 2 + n/2*8, last)*step;
        load_scales(w.scales[n], rows + at, row_align(D, false));
#pragma unroll
        for (uint c = 0; c < D/64; ++c) {
            w.codes[n][c] = load_word(codes_of + at + 32*c, 4);
        }
    }
}

template <uint D> struct decode_memory {
    uint   table[256][32];              // [two codes][lane]: two halves
    float  q[ROWS][D];                  // rotated queries; behind the loop, what warps hand over
    signed char planes[2][ROWS][D];
    float  query_scale[ROWS];
    __half weights[WARPS][ROWS][STEP + 8];
    float  softs[WARPS][ROWS][2];
};

// Queries of row r, rotated, and as two planes of bytes.
template <uint D, typename Memory> __device__ __forceinline__ void prepare_query(const attn_params & p, Memory & m, uint r, const uint8_t * from, uint lane) {
    float * q = m.q[r];
    float largest = 0.0f;
    if (from) {
        for (uint i = lane; i < D; i += 32) {
            q[i] = kv_float_at(from + i*kv_float_bytes(p.q_kind), p.q_kind);
        }
        kv_rotate_from(q, D, KV_SIGNS_ROTATION, 1.0f, lane, q);
        __syncwarp();
        for (uint i = lane; i < D; i += 32) {
            largest = fmaxf(largest, fabsf(q[i]));
        }
        largest = simd_max(largest);
    } else {
        for (uint i = lane; i < D; i += 32) {
            q[i] = 0.0f;
        }
    }
    const float inverse = largest > 0.0f ? 127.0f/largest : 0.0f;
    for (uint i = lane; i < D; i += 32) {
        const float x = q[i]*inverse, first = rintf(x);
        m.planes[0][r][i] = (signed char) (int) first;
        m.planes[1][r][i] = (signed char) (int) rintf((x - first)*SECOND_PLANE);
    }
    if (lane == 0) {
        m.query_scale[r] = largest/127.0f/SECOND_PLANE/128.0f; // and the unit of scales
    }
}

// s[r] of cells g and g + 8, in units of the queries' planes and of the scales; lanes t and t ^ 2 have a half of the values
// each. b: the queries as [plane][chunk][word][block of rows][half].
template <uint D, uint QB> __device__ __forceinline__ void products(
        const k_words<D> & k, const uint (&b)[2][D/64][2][QB][2], uint t, float (&s)[QB][4]) {
#pragma unroll
    for (uint i = 0; i < 4*QB; ++i) {
        s[i/4][i % 4] = 0.0f;
    }
#pragma unroll
    for (uint c = 0; c < D/64; ++c) {
        int sums[2][QB][4] = {};
#pragma unroll
        for (uint word = 0; word < 2; ++word) {
            const uint x = k.codes[0][c][word], y = k.codes[1][c][word];
            const uint lower[4] = { prmt(LOWER_0, LOWER_1, x), prmt(LOWER_0, LOWER_1, y), prmt(LOWER_0, LOWER_1, x >> 16), prmt(LOWER_0, LOWER_1, y >> 16) };
            const uint upper[4] = { prmt(UPPER_0, UPPER_1, ~x), prmt(UPPER_0, UPPER_1, ~y), prmt(UPPER_0, UPPER_1, ~x >> 16), prmt(UPPER_0, UPPER_1, ~y >> 16) };
#pragma unroll
            for (uint i = 0; i < 2*QB; ++i) {
                const uint plane = i/QB, qb = i % QB;
                mma_s8(sums[plane][qb], lower, b[plane][c][word][qb][0], b[plane][c][word][qb][1]);
                mma_s8(sums[plane][qb], upper, b[plane][c][word][qb][0], b[plane][c][word][qb][1]);
            }
        }
        const float s0 = scale_at(k.scales[0][c] >> (t < 2 ? 0 : 16) & 0xffff), s1 = scale_at(k.scales[1][c] >> (t < 2 ? 0 : 16) & 0xffff);
#pragma unroll
        for (uint i = 0; i < 4*QB; ++i) {
            const float x = (float) (sums[0][i/4][i % 4]*SECOND_PLANE + sums[1][i/4][i % 4]);
            s[i/4][i % 4] = fmaf(i % 4 < 2 ? s0 : s1, x, s[i/4][i % 4]);
        }
    }
}

// Two halves of the table for byte n of a word.
__device__ __forceinline__ uint look_up(uint table, uint word, uint n) {
    uint r;
    asm("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(table + prmt(word, 0, 0x4440 | n)*128));
    return r;
}

__device__ __forceinline__ uint times(uint a, uint b) {
    const __half2 x = __hmul2(*(const __half2 *) &a, *(const __half2 *) &b);
    return *(const uint *) &x;
}

// Rows of the sums are values, columns query rows; w01 and w23 are the weights of row g for cells 2t and 2t + 8 and the next.
template <uint D> __device__ __forceinline__ void add_values(const v_words<D> & v, uint w01, uint w23, uint table, float (&acc)[D/64][2][2][4]) {
#pragma unroll
    for (uint c = 0; c < D/64; ++c) {
#pragma unroll
        for (uint nibble = 0; nibble < 2; ++nibble) {
            const uint selector = nibble ? 0x7632 : 0x5410;
            const uint b0 = times(w01, finite(prmt(v.scales[0][c], v.scales[1][c], selector)));
            const uint b1 = times(w23, finite(prmt(v.scales[2][c], v.scales[3][c], selector)));
            const uint p01 = nibble ? (v.codes[0][c] >> 4 & 0x0f0f0f0f) | (v.codes[1][c] & 0xf0f0f0f0)
                                    : (v.codes[0][c] & 0x0f0f0f0f) | (v.codes[1][c] << 4 & 0xf0f0f0f0);
            const uint p23 = nibble ? (v.codes[2][c] >> 4 & 0x0f0f0f0f) | (v.codes[3][c] & 0xf0f0f0f0)
                                    : (v.codes[2][c] & 0x0f0f0f0f) | (v.codes[3][c] << 4 & 0xf0f0f0f0);
#pragma unroll
            for (uint pair = 0; pair < 2; ++pair) {
                const uint a[4] = { look_up(table, p01, 2*pair), look_up(table, p01, 2*pair + 1), look_up(table, p23, 2*pair),
                                    look_up(table, p23, 2*pair + 1) };
                mma_f16(acc[c][nibble][pair], a, b0, b1);
            }
        }
    }
}

// How 16 cells of a group hang together, and what they leave to the next 16.
template <uint QB> struct decode_group {
    float base[QB][2];  // q.m
    float carry[QB][2]; // w of the cell before
    bool  written;      // is there one?

    template <uint D> __device__ __forceinline__ void begin(
            const decode_memory<D> & m, const uint8_t * group, uint64_t step, uint rows, uint lane, uint t) {
        float dots[4*QB] = {};
#pragma unroll
        for (uint i = 0; i < D/32; ++i) {
            const float frame = kv_delta_frame(group, step, KV_KIND_DELTA4, D, rows, lane + 32*i);
#pragma unroll
            for (uint r = 0; r < 4*QB; ++r) {
                dots[r] = fmaf(m.q[r][lane + 32*i], frame, dots[r]);
            }
        }
#pragma unroll
        for (uint r = 0; r < 4*QB; ++r) {
            dots[r] = simd_sum(dots[r]);
        }
#pragma unroll
        for (uint i = 0; i < 2*QB; ++i) {
            base[i/2][i % 2] = t % 2 ? dots[i/2*4 + 2 + i % 2] : dots[i/2*4 + i % 2];
            carry[i/2][i % 2] = 0.0f;
        }
        written = false;
    }

    // From q.d of cells g and g + 8 to the scores of their keys. The first scales of the rows say what they are.
    __device__ __forceinline__ void follow(uint scales0, uint scales1, bool there0, bool there1, uint lane, float (&s)[QB][4]) {
        const uint g = lane/4, last = 28 + lane % 4;
        const uint scales[2] = { scales0, scales1 };
        const bool there[2] = { there0, there1 };
        bool empty[2], alone[2];
        float factor[2][3], whole[2];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint kind = there[n] ? (scales[n] >> 16 & 1) << 1 | (scales[n] & 1) : KV_DELTA_EMPTY;
            empty[n] = kind == KV_DELTA_EMPTY;
            alone[n] = kind == KV_DELTA_ALONE;
            const bool before = __shfl_up_sync(KV_ALL_LANES, (int) !empty[n], 4) != 0;
            float f = kind == KV_DELTA_CHAINED && (g == 0 ? written : before) ? KV_DELTA_RHO : 0.0f;
#pragma unroll
            for (uint i = 0; i < 3; ++i) {
                const float other = __shfl_up_sync(KV_ALL_LANES, f, 4u << i);
                factor[n][i] = g >= 1u << i ? f : 0.0f;
                f = g >= 1u << i ? f*other : f;
            }
            whole[n] = f;
            written = __shfl_sync(KV_ALL_LANES, (int) !empty[n], last) != 0;
        }
#pragma unroll
        for (uint qb = 0; qb < QB; ++qb) {
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                const uint n = i/2;
                // cells g of both rows come before cells g + 8
                float w = alone[n] ? s[qb][i] - base[qb][i % 2] : s[qb][i];
#pragma unroll
                for (uint j = 0; j < 3; ++j) {
                    w = fmaf(factor[n][j], __shfl_up_sync(KV_ALL_LANES, w, 4u << j), w);
                }
                w = fmaf(whole[n], carry[qb][i % 2], w);
                carry[qb][i % 2] = __shfl_sync(KV_ALL_LANES, w, last);
                s[qb][i] = empty[n] ? 0.0f : w + base[qb][i % 2];
            }
        }
    }
};

// Of up to 32 blocks of a warp, from `first` on, those that a row sees. Several are looked at together: each is a wait for
// memory.
__device__ __forceinline__ uint visible_blocks(
        const attn_params & p, bool one_mask, uint first_row, uint used, uint kv_head, uint stream, uint first, uint end, uint count, uint lane) {
    count = min(count, 32u);
    if (!p.mask) {
        return count == 32 ? ~0u : (1u << count) - 1;
    }
    const uint heads_per_kv = p.args.heads/p.args.kv_heads;
    constexpr uint AT_ONCE = 8;
    uint visible = 0;
    for (uint r = 0; r < (one_mask ? 1 : used); ++r) {
        const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        const uint at = mask_offset(p, token, head, stream);
        for (uint n = 0; n < count; n += AT_ONCE) {
            bool seen[AT_ONCE];
#pragma unroll
            for (uint i = 0; i < AT_ONCE; ++i) {
                const uint cell = first + (n + i)*WARPS*BLOCK + lane;
                seen[i] = bias_at(p, at, cell, end) > HIDDEN || bias_at(p, at, cell + 32, end) > HIDDEN;
            }
#pragma unroll
            for (uint i = 0; i < AT_ONCE; ++i) {
                visible |= simd_any(seen[i]) ? 1u << (n + i) : 0;
            }
        }
    }
    return visible;
}

template <uint D, bool DELTA, uint QB> __global__ void __launch_bounds__(THREADS, blocks_per_sm(D, QB)) kv_decode(const attn_params p) {
    constexpr uint C = D/64;
    constexpr uint K_ALIGN = row_align(D, DELTA);
    extern __shared__ __align__(16) uint8_t raw[];
    auto & m = *(decode_memory<D> *) raw;
    const kv_attn_args & args = p.args;
    uint warp = threadIdx.x/32, lane = threadIdx.x % 32, g = lane/4, t = lane % 4;
    keep(warp);
    keep(lane);
    keep(g);
    keep(t);
    const uint heads_per_kv = args.heads/args.kv_heads, all_rows = heads_per_kv*args.tokens;
    const uint row_blocks = (all_rows + ROWS - 1)/ROWS;
    const uint kv_head = blockIdx.x % args.kv_heads, first_row = blockIdx.x/args.kv_heads % row_blocks*ROWS, chunk = blockIdx.y, stream = blockIdx.z;
    const uint used = min(ROWS, all_rows - first_row), kv_stream = stream/(args.streams/args.kv_streams);
    const uint8_t * keys   = p.k + kv_head*args.k_nb[1] + kv_stream*args.k_nb[2];
    const uint8_t * values = p.v + kv_head*args.v_nb[1] + kv_stream*args.v_nb[2];
    const uint8_t * k_codes = keys + D/16 + 8*t, * v_codes = values + D/16 + 4*g;
    keep(keys);
    keep(values);
    keep(k_codes);
    keep(v_codes);
    const uint k_step = (uint) args.k_nb[0], v_step = (uint) args.v_nb[0];

    for (uint i = threadIdx.x; i < 256; i += THREADS) {
        const __half2 pair = __floats2half2_rn(kv_levels_4[i % 16], kv_levels_4[i/16]);
        const uint x = *(const uint *) &pair;
        for (uint l = 0; l < 8; ++l) {
            *(uint4 *) &m.table[i][(l + i) % 8*4] = make_uint4(x, x, x, x);
        }
    }
    for (uint i = threadIdx.x; i < sizeof(m.weights)/4; i += THREADS) {
        ((uint *) m.weights)[i] = 0;
    }
    for (uint r = warp; r < ROWS; r += WARPS) {
        const uint row = first_row + r, token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        const uint8_t * from = p.q + token*args.q_nb[0] + head*args.q_nb[1] + stream*args.q_nb[2];
        prepare_query<D>(p, m, r, r < used ? from : nullptr, lane);
    }
    __syncthreads();

    // Queries as the second operand: column g is row g % 4 of the queries, of the first scale of a byte's two or the second.
    uint b[2][C][2][QB][2]; // [plane][chunk][word][block of rows][half]
#pragma unroll
    for (uint i = 0; i < 2*C*2*QB*2; ++i) {
        const uint half_of = i % 2, qb = i/2 % QB, word = i/2/QB % 2, c = i/4/QB % C, plane = i/4/QB/C;
        const signed char * q = &m.planes[plane][4*qb + g % 4][64*c + 8*t + 4*word + 2*half_of + (g < 4 ? 0 : 32)];
        const uint two = (uint) (uint8_t) q[0] | (uint) (uint8_t) q[1] << 16;
        b[plane][c][word][qb][half_of] = g < 4 ? two : two << 8;
        keep(b[plane][c][word][qb][half_of]);
    }
    // What the lane has of the rows: 2 (t % 2) and the next, of each block. Scores are in units of log 2.
    const bool softcap = args.softcap != 0.0f;
    float factor_of[QB][2], slope[QB][2], ref[QB][2], sum[QB][2];
    uint mask_at[QB][2];
#pragma unroll
    for (uint i = 0; i < 2*QB; ++i) {
        const uint r = i/2*4 + t % 2*2 + i % 2, row = first_row + min(r, used - 1);
        const uint token = row/heads_per_kv, head = kv_head*heads_per_kv + row % heads_per_kv;
        mask_at[i/2][i % 2] = mask_offset(p, token, head, stream);
        factor_of[i/2][i % 2] = m.query_scale[r]*(DELTA || softcap ? 1.0f : args.scale*LOG2_E);
        slope[i/2][i % 2] = slope_of(p, head)*LOG2_E;
        ref[i/2][i % 2] = HIDDEN;
        sum[i/2][i % 2] = 0.0f;
    }
    const bool one_mask = args.tokens == 1 && args.mask_rows[0] == 1;
    const uint table = (uint) __cvta_generic_to_shared(&m.table[0][lane]);
    // Where the lane's weights go, and where its operand comes from.
    __half * const weights_to = &m.weights[warp][(QB == 2 && t >= 2 ? 4 : 0) + t % 2*2][g];
    const uint * const weights_from = (const uint *) &m.weights[warp][g][2*t];

    float acc[C][2][2][4]; // [chunk][scale of a byte][pair of values]
#pragma unroll
    for (uint i = 0; i < C*16; ++i) {
        (&acc[0][0][0][0])[i] = 0.0f;
    }
    const uint begin = chunk*args.chunk_cells, end = min(args.cells, begin + args.chunk_cells), last = args.cells - 1;
    const uint blocks = end > begin ? (end - begin + BLOCK - 1)/BLOCK : 0;

    decode_group<QB> group;
    // 32 blocks of this warp at a time: which of them somebody sees.
    for (uint span = warp; span < blocks; span += 32*WARPS) {
        uint visible = visible_blocks(p, one_mask, first_row, used, kv_head, stream, begin + span*BLOCK, end, (blocks - span + WARPS - 1)/WARPS, lane);
        if (visible == 0) {
            continue;
        }
        uint cell = begin + (span + (__ffs(visible) - 1)*WARPS)*BLOCK;
        visible &= visible - 1;
        k_words<D> k;
        v_words<D> v;
        load_k<D, K_ALIGN>(k, keys, k_codes, k_step, cell, last, g);
        for (bool more = true; more;) {
            load_v<D>(v, values, v_codes, v_step, cell, last, t);
            // Masks are asked for here and looked at behind the products.
            unsigned short masked[QB][4];
            const uint here = cell;
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                if (i % 2 == 0 && (i < 4 || !one_mask)) {
                    masked[i/4][i % 4] = mask_bits(p, mask_at[i/4][0], min(here + g + i % 4/2*8, last));
                } else if (one_mask) {
                    masked[i/4][i % 4] = masked[0][i % 4/2*2];
                } else {
                    masked[i/4][i % 4] = mask_bits(p, mask_at[i/4][1], min(here + g + i % 4/2*8, last));
                }
            }

            float s[QB][4];
            products<D, QB>(k, b, t, s);
#pragma unroll
            for (uint qb = 0; qb < QB; ++qb) {
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    s[qb][i] = (s[qb][i] + __shfl_xor_sync(KV_ALL_LANES, s[qb][i], 2))*factor_of[qb][i % 2];
                }
            }
            if (DELTA) {
                if ((cell - begin) % BLOCK == 0) {
                    group.template begin<D>(m, keys + cell*k_step, k_step, min(BLOCK, args.k_cells - cell), lane, t);
                }
                group.follow(k.scales[0][0], k.scales[1][0], cell + g < end, cell + g + 8 < end, lane, s);
            }
            // Keys of the next 16 cells are on their way while these values are added; values while keys are multiplied.
            cell += STEP;
            if ((cell - begin) % BLOCK == 0 || cell >= end) {
                more = visible != 0;
                cell = begin + (span + (more ? __ffs(visible) - 1 : 0)*WARPS)*BLOCK;
                visible &= visible - 1;
            }
            if (more) {
                load_k<D, K_ALIGN>(k, keys, k_codes, k_step, cell, last, g);
            }

            bool larger = false;
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                float & x = s[i/4][i % 4];
                if (softcap) {
                    x = soft_capped(x*args.scale, args.softcap)*LOG2_E;
                } else if (DELTA) {
                    x *= args.scale*LOG2_E;
                }
                const float bias = __half2float(__ushort_as_half(masked[i/4][i % 4]));
                const bool hidden = !(bias > -65504.0f) || here + g + i % 4/2*8 >= end;
                x = hidden ? -INFINITY : fmaf(slope[i/4][i % 2], bias, x);
                larger = larger || x > ref[i/4][i % 2];
            }
            if (__any_sync(KV_ALL_LANES, larger)) {
                float factor[QB][2];
#pragma unroll
                for (uint i = 0; i < 2*QB; ++i) {
                    float & r = ref[i/2][i % 2];
                    float top = fmaxf(s[i/2][i % 2], s[i/2][i % 2 + 2]);
                    top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 4));
                    top = fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 8));
                    top = fmaxf(fmaxf(top, __shfl_xor_sync(KV_ALL_LANES, top, 16)), r);
                    factor[i/2][i % 2] = exp2f(r - top);
                    sum[i/2][i % 2] *= factor[i/2][i % 2];
                    r = top;
                }
                // Columns 2t and 2t + 1 of the sums.
                const float f0 = t < 2 ? factor[0][0] : factor[QB - 1][0], f1 = t < 2 ? factor[0][1] : factor[QB - 1][1];
#pragma unroll
                for (uint i = 0; i < C*16; i += 2) {
                    (&acc[0][0][0][0])[i] *= f0;
                    (&acc[0][0][0][0])[i + 1] *= f1;
                }
            }
            __half w[QB][4];
#pragma unroll
            for (uint i = 0; i < 4*QB; ++i) {
                w[i/4][i % 4] = __float2half_rn(exp2f(s[i/4][i % 4] - ref[i/4][i % 2]));
                sum[i/4][i % 2] += __half2float(w[i/4][i % 4]);
            }
            // Lanes t and t ^ 2 have the same: one of them stores a block of rows.
            if (QB == 2 || t < 2) {
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    weights_to[i % 2*(STEP + 8) + i/2*8] = QB == 2 && t >= 2 ? w[QB - 1][i] : w[0][i];
                }
            }
            __syncwarp();
            add_values<D>(v, weights_from[0], weights_from[4], table, acc);
            // The next weights take the place of these.
            __syncwarp();
        }
    }
#pragma unroll
    for (uint i = 0; i < 2*QB; ++i) {
        for (uint n = 4; n < 32; n *= 2) {
            sum[i/2][i % 2] += __shfl_xor_sync(KV_ALL_LANES, sum[i/2][i % 2], n);
        }
        if (g == 0 && t/2 == i/2) {
            m.softs[warp][i/2*4 + t % 2*2 + i % 2][0] = ref[i/2][i % 2];
            m.softs[warp][i/2*4 + t % 2*2 + i % 2][1] = sum[i/2][i % 2];
        }
    }
    // The table is done with: sums of the warps, [warp][row][value].
    __syncthreads();
    float * o = (float *) &m.table[0][0];
    if (t < 2*QB) {
#pragma unroll
        for (uint i = 0; i < C*16; ++i) {
            const uint at = i/16*64 + i/8 % 2*32 + 4*g + i/4 % 2*2 + i/2 % 2, r = 2*t + i % 2;
            o[(warp*ROWS + r)*D + at] = (&acc[0][0][0][0])[i];
        }
    }
    __syncthreads();
    const uint results = stream*args.tokens*args.heads + kv_head*heads_per_kv;
    for (uint i = threadIdx.x; i < used*D; i += THREADS) {
        const uint r = i/D, value = i % D, row = first_row + r;
        float largest = HIDDEN, all = 0.0f, x = 0.0f;
        for (uint w = 0; w < WARPS; ++w) {
            largest = fmaxf(largest, m.softs[w][r][0]);
        }
        for (uint w = 0; w < WARPS; ++w) {
            const float factor = exp2f(m.softs[w][r][0] - largest);
            all = fmaf(factor, m.softs[w][r][1], all);
            x = fmaf(factor, o[(w*ROWS + r)*D + value], x);
        }
        const size_t at = (size_t) (results + row/heads_per_kv*args.heads + row % heads_per_kv)*args.chunks + chunk;
        p.sums[at*D + value] = x*(1.0f/128.0f); // the unit of scales
        if (value == 0) {
            p.metas[at] = make_float2(largest <= HIDDEN ? HIDDEN : largest/LOG2_E, all);
        }
    }
}

typedef void (*decode_kernel)(const attn_params);

template <uint QB> static decode_kernel kernel_of(uint size, bool is_delta) {
    switch (size) {
        case 64:  return is_delta ? kv_decode<64, true, QB> : kv_decode<64, false, QB>;
        case 128: return is_delta ? kv_decode<128, true, QB> : kv_decode<128, false, QB>;
        default:  return is_delta ? kv_decode<256, true, QB> : kv_decode<256, false, QB>;
    }
}

static size_t memory_of(uint size) {
    return size == 64 ? sizeof(decode_memory<64>) : size == 128 ? sizeof(decode_memory<128>) : sizeof(decode_memory<256>);
}

static uint divided(uint a, uint b) {
    return (a + b - 1)/b;
}

static bool is_aligned(const void * data, const uint64_t (&nb)[3], uint align) {
    return ((uintptr_t) data | nb[0] | nb[1] | nb[2]) % align == 0;
}

constexpr uint MOST_ROWS = 32;

}  // namespace

bool plan_decode(const kv_cuda_attention & op, const kv_cuda_device & device, kv_cuda_plan & plan) {
    const bool is_delta = op.k_kind == KV_KIND_DELTA4;
    const uint rows = op.args.heads/op.args.kv_heads*op.args.tokens;
    const bool known = op.k_size == op.v_size && (op.k_size == 64 || op.k_size == 128 || op.k_size == 256);
    if (device.cc < 800 || (op.k_kind != KV_KIND_SRFT4 && !is_delta) || op.v_kind != KV_KIND_SRFT4 || !known || rows > MOST_ROWS ||
        !is_aligned(op.k, op.args.k_nb, row_align(op.k_size, is_delta)) || !is_aligned(op.v, op.args.v_nb, 4) ||
        (uint64_t) op.args.cells*op.args.k_nb[0] >> 32 != 0 || (uint64_t) op.args.cells*op.args.v_nb[0] >> 32 != 0 ||
        !mask_is_small(op)) {
        return false;
    }
    const uint others = op.args.kv_heads*divided(rows, ROWS)*op.args.streams;
    const uint wanted = blocks_per_sm(op.k_size, rows <= ROWS/2 ? 1 : 2)*device.sms/others;
    const uint chunks = wanted > 0 ? wanted : 1;
    plan.decode       = true;
    plan.chunk_cells  = divided(divided(op.args.cells, chunks), BLOCK)*BLOCK;
    plan.chunks       = divided(op.args.cells, plan.chunk_cells);
    plan.shared_bytes = memory_of(op.k_size);
    return true;
}

cudaError_t launch_decode(const attn_params & p, const kv_cuda_plan & plan, cudaStream_t stream) {
    const uint rows = p.args.heads/p.args.kv_heads*p.args.tokens;
    const bool is_delta = p.k_kind == KV_KIND_DELTA4;
    const decode_kernel kernel = rows <= ROWS/2 ? kernel_of<1>(p.k_size, is_delta) : kernel_of<2>(p.k_size, is_delta);
    const cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) plan.shared_bytes);
    if (err != cudaSuccess) {
        return err;
    }
    const dim3 grid(p.args.kv_heads*divided(rows, ROWS), plan.chunks, p.args.streams);
    kernel<<<grid, THREADS, plan.shared_bytes, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace kv
