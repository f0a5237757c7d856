// Rows of levels at head sizes that are multiples of 64, by words: what a lane takes of a row, and codes to levels.
//
//     row = scales: a byte (8 bits: f16) x size/32 | chunks of 64 values | delta and bands: its share of the I-frame
//
//     8 bits   64 bytes: value j
//     4 bits   32 bytes: values j and j + 32
//     2 bits   16 bytes: values j, j + 16, j + 32, j + 48
//     3 bits   the same of the lower two bits, then a bit for each of the 64 values
//     bands    decode_bands.cuh
//     polar    decode_polar.cuh
//     turbo    two norms, codes of 3 or 2 bits, signs: decode_signs.cuh
//
// A code of up to 3 bits is a selector of prmt, which looks four of them up in a table of eight bytes.
#pragma once

#include "codec.cuh"

#include <type_traits>

namespace kv {

using uint = unsigned;

static __device__ __forceinline__ uint prmt(uint a, uint b, uint selector) {
#ifdef __CUDA_ARCH__
    uint r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
#else
    // Each nibble names one of eight bytes, or with its upper bit the sign of it.
    const uint64_t bytes = (uint64_t) b << 32 | a;
    uint r = 0;
    for (uint i = 0; i < 4; ++i) {
        const uint of = selector >> 4*i & 15, byte = (uint) (bytes >> 8*(of & 7)) & 0xff;
        r |= (of < 8 ? byte : byte >> 7 != 0 ? 0xffu : 0) << 8*i;
    }
    return r;
#endif
}

__host__ __device__ constexpr uint four_bytes(int a, int b, int c, int d) {
    return (uint) (uint8_t) a | (uint) (uint8_t) b << 8 | (uint) (uint8_t) c << 16 | (uint) (uint8_t) d << 24;
}

// The bits of a half that is an integer other than zero, below 2048.
__host__ __device__ constexpr int half_of(int x) {
    const int magnitude = x < 0 ? -x : x;
    int exponent = 0;
    while (magnitude >> (exponent + 1) != 0) {
        ++exponent;
    }
    return (x < 0 ? 0x8000 : 0) | (exponent + 15) << 10 | ((magnitude << (10 - exponent)) & 0x3ff);
}

// Which levels codes of up to 3 bits stand for: srft's and delta's of so many bits, or those of turbo's first stage.
constexpr uint TURBO_TABLE = 16;

__host__ __device__ constexpr uint table_of_codes(uint kind, uint bits) {
    return (KV_KIND_IS_TURBO(kind) ? TURBO_TABLE : 0) + (bits == 3 ? 3 : 2);
}

// A table of eight bytes.
struct byte_table {
    uint first, second;
};

// Levels of kv_srft.h and, by turbo_unit, of kv_signs.h; of 2 bits the codes from 4 on are not met.
template <uint TABLE> __host__ __device__ constexpr int level_of(uint code) {
    constexpr int levels[4][8] = { { -127, -77, -44, -17, 8, 34, 63, 101 }, { -127, -44, 18, 88, -127, -44, 18, 88 },
                                   { -88, -55, -31, -10, 10, 31, 55, 88 }, { -110, -33, 33, 110, -110, -33, 33, 110 } };
    return levels[(TABLE % TURBO_TABLE == 3 ? 0 : 1) + (TABLE >= TURBO_TABLE ? 2 : 0)][code];
}

// turbo's levels are integers by this.
__host__ __device__ constexpr float turbo_unit(uint kind) {
    return kind == KV_KIND_TURBO4 ? 40.91f : 72.83f;
}

// Levels as bytes; as halves, the lower or the upper byte of each.
template <uint TABLE> __host__ __device__ constexpr byte_table level_bytes() {
    return { four_bytes(level_of<TABLE>(0), level_of<TABLE>(1), level_of<TABLE>(2), level_of<TABLE>(3)),
             four_bytes(level_of<TABLE>(4), level_of<TABLE>(5), level_of<TABLE>(6), level_of<TABLE>(7)) };
}

template <uint TABLE, uint SHIFT> __host__ __device__ constexpr byte_table half_bytes() {
    return { four_bytes(half_of(level_of<TABLE>(0)) >> SHIFT, half_of(level_of<TABLE>(1)) >> SHIFT,
                        half_of(level_of<TABLE>(2)) >> SHIFT, half_of(level_of<TABLE>(3)) >> SHIFT),
             four_bytes(half_of(level_of<TABLE>(4)) >> SHIFT, half_of(level_of<TABLE>(5)) >> SHIFT,
                        half_of(level_of<TABLE>(6)) >> SHIFT, half_of(level_of<TABLE>(7)) >> SHIFT) };
}

// Bit by bit: a where the mask has ones, else b.
static __device__ __forceinline__ uint choose(uint mask, uint a, uint b) {
#ifdef __CUDA_ARCH__
    uint res;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(res) : "r"(a), "r"(b), "r"(mask)); // one instruction, which is not always found
    return res;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// The same with the complement of a.
static __device__ __forceinline__ uint choose_not(uint mask, uint a, uint b) {
#ifdef __CUDA_ARCH__
    uint res;
    asm("lop3.b32 %0, %1, %2, %3, 0x4e;" : "=r"(res) : "r"(a), "r"(b), "r"(mask));
    return res;
#else
    return (~a & mask) | (b & ~mask);
#endif
}

// Selectors of values 4t to 4t + 3 of 32 that share a scale (the lower nibbles of the bytes) and of those 16 behind (the
// upper), from the word of a chunk that holds them and the 32 upper bits.
template <uint BITS> static __device__ __forceinline__ uint selectors_of(uint word, uint group, uint upper, uint t) {
    const uint x = group ? word >> 4 : word;
    uint res = choose(0x03030303, x, x << 2) & 0x33333333;
    if (BITS == 3) {
        // Bit i goes to byte i.
        const uint a = (upper >> 4*t & 15)*0x00810204, b = (upper >> (4*t + 16) & 15)*0x08102040;
        res |= a & 0x04040404;
        res |= b & 0x40404040;
    }
    return res;
}

static __device__ __forceinline__ uint subtracted(uint a, uint b) {
    const __half2 x = __hsub2(*(const __half2 *) &a, *(const __half2 *) &b);
    return *(const uint *) &x;
}

static __device__ __forceinline__ uint times(uint a, uint b) {
    const __half2 x = __hmul2(*(const __half2 *) &a, *(const __half2 *) &b);
    return *(const uint *) &x;
}

// Two bytes, at 0 and 1 or at 2 and 3 of a word, each with 128 added, as halves: 0x6400 and a byte is 1024 and its value.
static __device__ __forceinline__ uint halves_of_bytes(uint word, uint at) {
    return subtracted(prmt(word, 0x64646464, at ? 0x4342 : 0x4140), 0x64806480);
}

// Of bands the mean.
__host__ __device__ constexpr uint code_bits(uint kind) {
    return kind == KV_KIND_SRFT8 || kind == KV_KIND_DELTA8 ? 8 : kind == KV_KIND_SRFT4 || kind == KV_KIND_DELTA4 || kind == KV_KIND_BAND4 ? 4 : kind == KV_KIND_SRFT2 || kind == KV_KIND_BAND2 || kind == KV_KIND_TURBO3 ? 2 : 3;
}

// Rows that hang together in groups, bands among them.
__host__ __device__ constexpr bool is_delta(uint kind) {
    return KV_KIND_IS_DELTA(kind);
}

// Bits of the first band of a chunk, which is the wider one: kv_band_at of the host and of constants.
__host__ __device__ constexpr uint wide_band_bits(uint kind, uint size, uint chunk) {
    return kind == KV_KIND_BAND3 && size == 256 ? (chunk < 2 ? 5 : 3) : code_bits(kind) + 1;
}

// Rows that begin with norms and end in signs (kv_signs.h).
__host__ __device__ constexpr bool has_norms(uint kind) {
    return KV_KIND_IS_TURBO(kind) || kind == KV_KIND_QJL1;
}

__host__ __device__ constexpr uint level_scale_bytes(uint kind, uint size) {
    return KV_KIND_IS_POLAR(kind) ? size/16*2 : kind == KV_KIND_QJL1 ? KV_QJL_NORM_BYTES : KV_KIND_IS_TURBO(kind) ? KV_TURBO_NORM_BYTES : code_bits(kind) == 8 ? size/16 : size/32;
}

// Where the signs of a row begin.
__host__ __device__ constexpr uint signs_at(uint kind, uint size) {
    return level_scale_bytes(kind, size) + (KV_KIND_IS_TURBO(kind) ? size*code_bits(kind)/8 : 0);
}

__host__ __device__ constexpr uint level_row_bytes(uint kind, uint size) {
    if (KV_KIND_IS_POLAR(kind)) {
        return size/16*2 + (size/16*14 + 7)/8 + size/16*(kind == KV_KIND_POLAR4 ? 4 : 3);
    }
    return kind == KV_KIND_F16 ? 2*size : has_norms(kind) ? signs_at(kind, size) + size/8 : level_scale_bytes(kind, size) + size*code_bits(kind)/8 + (is_delta(kind) ? size/64*2 : 0);
}

// What rows and their codes are aligned to, where the beginning of the cache is.
__host__ __device__ constexpr uint level_row_align(uint kind, uint size) {
    const uint both = (kind == KV_KIND_F16 ? 0 : level_scale_bytes(kind, size)) | level_row_bytes(kind, size);
    return both % 8 == 0 ? 8 : both % 4 == 0 ? 4 : both % 2 == 0 ? 2 : 1;
}

// kv_srft_unit of its bits, or kv_band_unit; of halves and polar 1.
__host__ __device__ constexpr float level_unit(uint kind, uint size) {
    if (KV_KIND_IS_POLAR(kind) || kind == KV_KIND_F16) {
        return 1.0f;
    }
    if (KV_KIND_IS_TURBO(kind)) {
        return 1.0f/turbo_unit(kind);
    }
    const uint bits = KV_KIND_IS_BAND(kind) ? wide_band_bits(kind, size, 0) : code_bits(kind);
    return (bits == 8 ? 1.0f : bits == 5 ? KV_SRFT_KAPPA_5 : bits == 4 ? KV_SRFT_KAPPA_4 : bits == 3 ? KV_SRFT_KAPPA_3 : KV_SRFT_KAPPA_2)/KV_SRFT_UNIT;
}

// Two scales that are stored as bytes, in bytes 0 and 2 of a word, times 2^POWER as halves: kv_srft_scale is exact in them, up to
// a POWER of 7.
template <uint POWER> static __device__ __forceinline__ uint halves_of_scales(uint two) {
    constexpr uint BIAS = (8 + POWER) << 10; // exponents of halves begin 8 lower
    const uint x = ((two + (two & 0x00800080)) << 7) + BIAS*0x10001; // signs are a bit further up
    const __half2 magnitude = __habs2(*(const __half2 *) &x), none = __half2half2(__ushort_as_half(BIAS));
    return x & __hne2_mask(magnitude, none);
}

// The two scales of a chunk of bands, bytes `at` and `at` + 1 of a word, as halves; FINE: the first one has half steps.
template <bool FINE> static __device__ __forceinline__ uint halves_of_band_scales(uint word, uint at) {
    if constexpr (!FINE) {
        return halves_of_scales<0>(prmt(word, 0, at ? 0x4342 : 0x4140));
    } else {
        // A byte twice, shifted down by one: its bit 7 is behind the others. Signs are where they are needed before that.
        constexpr uint BIAS = 8 << 10, HALF_STEP = 1 << 6;
        const uint twice = prmt(word, 0, at ? 0x3322 : 0x1100);
        const uint x = (twice >> 1 & 0x3f803fc0) + BIAS*0x10001;
        const __half2 magnitude = *(const __half2 *) &x, none = __half2half2(__ushort_as_half(BIAS + HALF_STEP));
        return choose(0x80000000, twice, x & __hgt2_mask(magnitude, none));
    }
}

// Values lane*N and behind it of a row of 4, 3 or 2 bits, by its table of levels.
template <uint SIZE, uint BITS, uint N> static __device__ __forceinline__ void row_values(const uint8_t * row, const float * levels, uint lane, float (&d)[N]) {
    constexpr uint STEP = BITS == 4 ? 32 : 16; // values that share a byte are so far apart
    typedef typename std::conditional<N == 2, uint16_t, uint>::type word;
    const uint at = lane*N % 64;
    const uint8_t * codes = row + kv_srft_scale_bytes(BITS, SIZE) + lane*N/64*(64*BITS/8);
    const float scale = kv_srft_scale(row[lane*N/32])*kv_srft_unit(BITS);
    const uint high = BITS == 3 ? (uint) codes[16 + at/8] >> at % 8 : 0;
    word words[N < 4 ? 1 : N/4];
    for (uint i = 0; i < sizeof(words)/sizeof(word); ++i) {
        words[i] = ((const word *) (codes + at % STEP))[i];
    }
    for (uint i = 0; i < N; ++i) {
        const uint byte = words[i/sizeof(word)] >> 8*(i % sizeof(word)) & 255;
        const uint code = BITS == 4 ? byte >> at/STEP*4 & 15 : (byte >> at/STEP*2 & 3) | (high >> i & 1) << 2;
        d[i] = levels[code]*scale;
    }
}

// What a lane has of a row of bands: `lane*N` and behind it, N values of one band.
template <uint SIZE, uint N> struct band_lane {
    kv_band      band;
    uint         number; // of the band
    uint         at;     // its first value, of the band's
    float        unit;
    const float * levels; // of the band's width
    uint         shift;   // of the lane's codes in their bytes
    uint         mask;    // of four codes

    __device__ __forceinline__ band_lane(uint kind, const float * all_levels, uint lane) :
        band(kv_band_at(kind, SIZE, lane*N/KV_BAND)), number(lane*N/KV_BAND), at(lane*N % KV_BAND), unit(kv_band_unit(kind, SIZE)), levels(all_levels + (1u << band.bits)),
        shift(band.shift + 8/band.parts*(at/(KV_BAND/band.parts))), mask(((1u << band.bits) - 1)*0x01010101) {}

    // Which of the tables of a row's widths: those are two apart.
    static __device__ __forceinline__ uint table_of(uint bits) {
        return (5 - bits)/2;
    }

    __device__ __forceinline__ void values(const uint8_t * row, float (&d)[N]) const {
        typedef typename std::conditional<N == 2, uint16_t, uint>::type word;
        const float scale = kv_band_scale(band.bits, row[number])*unit;
        const uint8_t * from = row + band.codes + at % (KV_BAND/band.parts);
        uint words[N < 4 ? 1 : N/4];
        for (uint i = 0; i < sizeof(words)/4; ++i) {
            words[i] = (uint) ((const word *) from)[i] >> shift & mask;
        }
        for (uint i = 0; i < N; ++i) {
            d[i] = levels[words[i/4] >> 8*(i % 4) & 255]*scale;
        }
    }
};

}  // namespace kv
