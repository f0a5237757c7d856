//! Rows to levels and scales.
//!
//! A kind of row says how 64 of its values become levels in a register ([`Chunks`]); the forms that products want
//! are written once, over that.

use super::columns::{self, words_of_4};
use super::polar::PolarChunks;
use super::quads;
use super::signs::{Signs, TurboChunks};
use crate::codec::format::RowFormat;
use crate::codec::levels::{LevelLayout, Scales};
use crate::codec::plain::BLOCK;
use crate::codec::srft::{Srft, LEVELS_2, LEVELS_3, LEVELS_4};
use crate::isa::{with_chunks, LevelBlock, Role, BUNDLE, CELLS, MAX_ROW_BYTES};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")]
pub(super) unsafe fn unpack(
    layout: LevelLayout,
    data: *const u8,
    stride: usize,
    n: usize,
    role: Role,
    out: LevelBlock,
) {
    let (whole, rest) = (n / BUNDLE * BUNDLE, n % BUNDLE);
    // SAFETY: the caller's promise is passed on; the block has room for whole bundles.
    unsafe {
        unpack_bundles(Rows { layout, data, stride, n: whole }, role, 0, out);
        if rest > 0 {
            let mut copy = MaybeUninit::uninit();
            let (data, stride) = whole_bundle(data.add(whole * stride), stride, rest, layout.row_bytes, &mut copy);
            unpack_bundles(Rows { layout, data, stride, n: BUNDLE }, role, whole, out);
        }
        // Sums are taken over whole blocks: what is not there counts nothing.
        for c in (n.next_multiple_of(BUNDLE)..CELLS).step_by(BUNDLE) {
            for g in 0..out.groups() {
                _mm512_storeu_ps(out.scale_at(c, g), _mm512_setzero_ps());
            }
        }
    }
}

/// A bundle of rows, where they lie and how far apart: where there are fewer, in a copy whose other rows are nobody's.
#[inline(always)]
pub(super) unsafe fn whole_bundle(
    data: *const u8,
    stride: usize,
    n: usize,
    row_bytes: usize,
    copy: &mut MaybeUninit<[u8; BUNDLE * MAX_ROW_BYTES]>,
) -> (*const u8, usize) {
    if n >= BUNDLE {
        return (data, stride);
    }
    let to = copy.as_mut_ptr().cast::<u8>();
    for i in 0..BUNDLE {
        // SAFETY: row n - 1 is the last that is there; the copy has room for the longest rows.
        unsafe { std::ptr::copy_nonoverlapping(data.add(i.min(n - 1) * stride), to.add(i * row_bytes), row_bytes) };
    }
    (to, row_bytes)
}

/// Whole bundles, to the cells from `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")]
unsafe fn unpack_bundles(rows: Rows, role: Role, first: usize, out: LevelBlock) {
    let levels = out.levels.wrapping_add(first * out.width);
    // SAFETY: the caller's promise is passed on.
    unsafe {
        let out = LevelBlock { levels, scales: out.scale_at(first, 0), ..out };
        match role {
            Role::Dot => columns::unpack(rows, out),
            Role::Weigh => quads::unpack(rows, out),
            Role::Expand => unpack_rows(rows, out),
        }
        rows.scales(out);
    }
}

/// A kind of row, 64 values at a time.
pub(super) trait Chunks: Copy {
    /// Levels of values 64 * chunk .. 64 * chunk + 64 of a row, level zero beyond its end.
    ///
    /// # Safety
    /// A row of this kind that has such values, on a CPU with AVX-512.
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m512i;
}

#[derive(Clone, Copy)]
pub(super) struct SrftChunks<const BITS: u32> {
    table: __m512i,
    flips: __m512i,
    size: usize,
    /// Where the codes begin.
    codes: usize,
}

impl<const BITS: u32> SrftChunks<BITS> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub fn new(f: Srft, flip: u8) -> Self {
        let flips = _mm512_set1_epi8(flip as i8);
        SrftChunks { table: table::<BITS>(flip), flips, size: f.size(), codes: f.scale_bytes() }
    }

    /// The same packing with other levels, codes beginning at byte `codes`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub fn over(levels: &[i8], size: usize, codes: usize, flip: u8) -> Self {
        SrftChunks { table: table_of(levels, flip), flips: _mm512_set1_epi8(flip as i8), size, codes }
    }
}

impl<const BITS: u32> Chunks for SrftChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = row.add(self.codes + chunk * code_bytes(BITS, 64));
            let left = self.size - 64 * chunk;
            if left >= 64 {
                levels_64::<BITS>(codes, self.table, self.flips)
            } else {
                levels_of_tail::<BITS>(left, codes, self.table, self.flips)
            }
        }
    }
}

/// q8_0 and q4_0: blocks of 32 with the scale in front.
#[derive(Clone, Copy)]
pub(super) struct BlockChunks<const BITS: u32> {
    pub size: usize,
    pub flip: u8,
}

impl<const BITS: u32> Chunks for BlockChunks<BITS> {
    #[inline(always)]
    unsafe fn levels(self, row: *const u8, chunk: usize) -> __m512i {
        // SAFETY: the caller's promise; the second block of a chunk may not be there.
        unsafe {
            let bytes = 2 + code_bytes(BITS, BLOCK);
            let block = row.add(2 * chunk * bytes + 2);
            let half = |codes: *const u8| match BITS {
                8 => _mm256_loadu_si256(codes.cast()),
                _ => _mm256_sub_epi8(codes_32::<4>(codes), _mm256_set1_epi8(8)),
            };
            let second = if self.size >= 64 * (chunk + 1) { half(block.add(bytes)) } else { _mm256_setzero_si256() };
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(half(block)), second);
            _mm512_xor_si512(both, _mm512_set1_epi8(self.flip as i8))
        }
    }
}

/// Levels one row after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn unpack_rows(rows: Rows, out: LevelBlock) {
    with_chunks!(rows.layout.packing, flip: 0, |chunks| {
        for c in 0..rows.n {
            for chunk in 0..out.width / 64 {
                // SAFETY: a chunk of row c, and room for it.
                unsafe {
                    let levels = chunks.levels(rows.row(c), chunk);
                    _mm512_storeu_si512(out.levels.add(c * out.width + 64 * chunk).cast(), levels);
                }
            }
        }
    })
}

/// Packed rows of one kind, whole bundles of them.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub layout: LevelLayout,
    pub data: *const u8,
    pub stride: usize,
    pub n: usize,
}

impl Rows {
    /// Row c.
    #[inline(always)]
    pub unsafe fn row(self, c: usize) -> *const u8 {
        // SAFETY: the caller keeps c below n.
        unsafe { self.data.add(c * self.stride) }
    }

    /// See [`expect`].
    #[inline(always)]
    pub fn expect<const COUNT: usize>(self, first: usize) {
        expect::<COUNT>(self.data.wrapping_add(first * self.stride), self.stride, self.layout.row_bytes);
    }

    /// The scales of all rows, sixteen rows at a time.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    pub unsafe fn scales(self, out: LevelBlock) {
        let (step, unit) = match self.layout.scales {
            Scales::PerGroup { step, unit } => (step, unit),
            // SAFETY: the caller's promise is passed on.
            Scales::PerHalf(units) => return unsafe { self.scales_per_half(units, out) },
        };
        let groups = self.layout.values / self.layout.group;
        for first in (0..self.n).step_by(BUNDLE) {
            // SAFETY: a bundle of rows and of the block; fourteen bytes of codes at least follow neighbouring scales.
            unsafe {
                let mut to = out.scale_at(first, 0);
                let stride = forget(self.stride);
                if step == 2 {
                    for g in (0..groups).step_by(8) {
                        let from = self.row(first).add(2 * g);
                        let words = match groups - g {
                            1 | 2 => [words(from, stride); 4],
                            _ => words_of_4(sixteens(from, stride)),
                        };
                        for (i, words) in words.into_iter().take((groups - g).div_ceil(2)).enumerate() {
                            let [even, odd] = finite_halves(words);
                            store_scales(even, unit, to);
                            to = to.add(BUNDLE);
                            if g + 2 * i + 1 < groups {
                                store_scales(odd, unit, to);
                                to = to.add(BUNDLE);
                            }
                        }
                    }
                } else {
                    for g in 0..groups {
                        let words = words(self.row(first).add(g * step), stride);
                        store_scales(finite_halves(words)[0], unit, to);
                        to = to.add(BUNDLE);
                    }
                }
                for _ in groups..out.groups() {
                    _mm512_storeu_ps(to, _mm512_setzero_ps());
                    to = to.add(BUNDLE);
                }
            }
        }
    }

    /// Two scales a row: that of the levels for the first half of the groups, that of the signs for the second.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn scales_per_half(self, [of_levels, of_signs]: [f32; 2], out: LevelBlock) {
        let groups = out.groups();
        for first in (0..self.n).step_by(BUNDLE) {
            // SAFETY: a bundle of rows and of the block.
            unsafe {
                let [levels, signs] = finite_halves(words(self.row(first), self.stride));
                for g in 0..groups / 2 {
                    store_scales(levels, of_levels, out.scale_at(first, g));
                    store_scales(signs, of_signs, out.scale_at(first, groups / 2 + g));
                }
            }
        }
    }
}

/// Asks for the rows that have the places of these COUNT rows in the next block. They lie too far apart for the processor
/// to expect them, and a third of the time would go by waiting for memory.
#[inline(always)]
pub(super) fn expect<const COUNT: usize>(data: *const u8, stride: usize, row_bytes: usize) {
    let next = data.wrapping_add(CELLS * stride);
    for i in 0..COUNT {
        let row = next.wrapping_add(i * stride);
        // SAFETY: it is a hint, for whatever address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(row.cast()) };
        if row_bytes > 64 {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(row_bytes - 1).cast()) };
        }
    }
}

/// The same number, of which the compiler knows nothing: it would keep sixteen row pointers where one and multiples of the
/// stride do, and spend more instructions on saving and loading them than on the rows. (Not `pure`, or it would be moved
/// out of the loop.)
#[inline(always)]
pub(super) fn forget(mut x: usize) -> usize {
    // SAFETY: nothing happens.
    unsafe { asm!("/* {0} */", inout(reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// The four bytes at `p` and those of the fifteen rows after it; inside the rows, since codes follow scales.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn words(p: *const u8, stride: usize) -> __m512i {
    // SAFETY: see above.
    unsafe {
        let four = |p: *const u8| {
            let word = |offset: usize| p.add(offset).cast::<i32>().read_unaligned();
            _mm_setr_epi32(word(0), word(stride), word(2 * stride), word(3 * stride))
        };
        let low = _mm256_set_m128i(four(p.add(4 * stride)), four(p));
        let high = _mm256_set_m128i(four(p.add(12 * stride)), four(p.add(8 * stride)));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

/// The sixteen bytes at `p` and those of the fifteen rows after it: part k of result i is row i + 4k.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn sixteens(p: *const u8, stride: usize) -> [__m512i; 4] {
    let mut out = [_mm512_setzero_si512(); 4];
    for (i, out) in out.iter_mut().enumerate() {
        // SAFETY: the caller's rows have these bytes.
        unsafe {
            let part = |k: usize| _mm_loadu_si128(p.add((i + 4 * k) * stride).cast());
            let x = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(part(0)), part(1));
            *out = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(x, part(2)), part(3));
        }
    }
    out
}

/// The f16 numbers in the lower halves of words, and those in the upper ones; NaN and infinities become zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn finite_halves(words: __m512i) -> [__m256i; 2] {
    const ORDER: [i16; 32] = {
        let (mut order, mut i) = ([0; 32], 0);
        while i < 16 {
            (order[i], order[16 + i]) = (2 * i as i16, 2 * i as i16 + 1);
            i += 1;
        }
        order
    };
    // SAFETY: 64 bytes.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    let both = _mm512_permutexvar_epi16(order, words);
    let exponent = _mm512_set1_epi16(0x7c00);
    let finite = _mm512_cmpneq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
    let both = _mm512_maskz_mov_epi16(finite, both);
    [_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64::<1>(both)]
}

/// Sixteen stored scales.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_scales(stored: __m256i, unit: f32, out: *mut f32) {
    // SAFETY: room for sixteen.
    unsafe { _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtph_ps(stored), _mm512_set1_ps(unit))) };
}

/// The level table of a width in bits in each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn table<const BITS: u32>(flip: u8) -> __m512i {
    match BITS {
        4 => table_of(&LEVELS_4.table, flip),
        3 => table_of(&LEVELS_3.table, flip),
        _ => table_of(&LEVELS_2.table, flip),
    }
}

/// Levels, repeated to sixteen, in each 128-bit lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn table_of(levels: &[i8], flip: u8) -> __m512i {
    let mut t = [0u8; 16];
    for (i, t) in t.iter_mut().enumerate() {
        *t = levels[i % levels.len()] as u8 ^ flip;
    }
    // SAFETY: sixteen bytes.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(t.as_ptr().cast()) })
}

/// Bytes of the codes of one chunk of C values.
pub(super) const fn code_bytes(bits: u32, c: usize) -> usize {
    bits as usize * c / 8
}

/// The levels of a whole chunk.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn levels_64<const BITS: u32>(codes: *const u8, table: __m512i, flips: __m512i) -> __m512i {
    // SAFETY: the chunk's bytes.
    unsafe {
        match BITS {
            8 => _mm512_xor_si512(_mm512_loadu_si512(codes.cast()), flips),
            _ => _mm512_shuffle_epi8(table, codes_64::<BITS>(codes)),
        }
    }
}

/// The values behind the last whole chunk, padded to one.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn levels_of_tail<const BITS: u32>(tail: usize, codes: *const u8, table: __m512i, flips: __m512i) -> __m512i {
    // SAFETY: the tail's chunks of 32 and 16 values.
    unsafe {
        let mut codes = codes;
        let mut l = [0u8; 64];
        _mm512_storeu_si512(l.as_mut_ptr().cast(), flips);
        if tail >= 32 {
            let x = match BITS {
                8 => _mm256_xor_si256(_mm256_loadu_si256(codes.cast()), _mm512_castsi512_si256(flips)),
                _ => _mm256_shuffle_epi8(_mm512_castsi512_si256(table), codes_32::<BITS>(codes)),
            };
            _mm256_storeu_si256(l.as_mut_ptr().cast(), x);
            codes = codes.add(code_bytes(BITS, 32));
        }
        if !tail.is_multiple_of(32) {
            let x = match BITS {
                8 => _mm_xor_si128(_mm_loadu_si128(codes.cast()), _mm512_castsi512_si128(flips)),
                _ => _mm_shuffle_epi8(_mm512_castsi512_si128(table), codes_16::<BITS>(codes)),
            };
            _mm_storeu_si128(l.as_mut_ptr().add(tail & 32).cast(), x);
        }
        _mm512_loadu_si512(l.as_ptr().cast())
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn codes_64<const BITS: u32>(p: *const u8) -> __m512i {
    // SAFETY: the chunk's 32, 24 or 16 bytes.
    unsafe {
        if BITS == 4 {
            let b = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
            let shifts = _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4);
            return _mm512_and_si512(_mm512_srlv_epi64(b, shifts), _mm512_set1_epi8(15));
        }
        let b = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
        let shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        let low = _mm512_and_si512(_mm512_srlv_epi32(b, shifts), _mm512_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(16).cast::<u64>().read_unaligned();
        _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(4))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn codes_32<const BITS: u32>(p: *const u8) -> __m256i {
    // SAFETY: the chunk's 16, 12 or 8 bytes.
    unsafe {
        if BITS == 4 {
            let b = _mm_loadu_si128(p.cast());
            let high = _mm_srli_epi16::<4>(b);
            return _mm256_and_si256(_mm256_set_m128i(high, b), _mm256_set1_epi8(15));
        }
        let b = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
        let low = _mm256_and_si256(_mm256_srlv_epi64(b, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(8).cast::<u32>().read_unaligned();
        _mm256_mask_add_epi8(low, high, low, _mm256_set1_epi8(4))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn codes_16<const BITS: u32>(p: *const u8) -> __m128i {
    // SAFETY: the chunk's 8, 6 or 4 bytes.
    unsafe {
        if BITS == 4 {
            let b = p.cast::<i64>().read_unaligned();
            return _mm_and_si128(_mm_set_epi64x(b >> 4, b), _mm_set1_epi8(15));
        }
        let b = _mm_set1_epi32(p.cast::<i32>().read_unaligned());
        let low = _mm_and_si128(_mm_srlv_epi32(b, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
        if BITS == 2 {
            return low;
        }
        let high = p.add(4).cast::<u16>().read_unaligned();
        _mm_mask_add_epi8(low, high, low, _mm_set1_epi8(4))
    }
}
