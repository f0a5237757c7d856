//! Weighted sums: two cells at a time, values side by side in the lanes of a register.
//!
//! ```text
//! levels  per pair of cells: width / 32 pieces of 64 bytes; bytes alternate between the two cells, and the 8 values of
//!         each 16 bytes are, of the piece's 32: 0..8, 16..24, 8..16, 24..32
//! ```
//!
//! A weight times a scale becomes a 16-bit number. One `vpmaddwd` and an addition, or one `vpdpwssd`, then take two cells
//! of eight values, as many instructions per value as a fused multiply-add or half of that, and levels are only widened
//! to 16 bits, never converted to floats. What a row loses is 1/65534 of the largest product of a cell's weight and scale
//! in the block, far below what 8-bit queries leave.

use super::products::WeightProducts;
use super::settled;
use super::unpack::{nibble_levels, nibble_table};
use crate::codec::levels::Packing;
use crate::codec::srft::Srft;
use crate::codec::RowFormat;
use crate::isa::generic::{code_bytes, unpack_turned, with_chunks, PackedRows};
use crate::isa::{by_rows, LevelBlock, BUNDLE, CELLS};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// The largest 16-bit weight. CELLS of them times a level of 128 stay within 32 bits.
const LARGEST: f32 = 32767.0;

/// Rows that are multiplied by what is widened once.
const ROWS: usize = 128;
/// From so many on it pays.
const MANY: usize = 12;
/// Values that are widened at a time: those of one scale.
const WIDENED: usize = 32;

/// Fills the levels of a block; cells beyond n have weight 0 and may hold anything.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn unpack(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.packing {
            Packing::Codes(f) if f.bits() == 4 && f.size().is_multiple_of(64) => unpack_nibbles(rows, f, out),
            packing => with_chunks!(__m256i, packing, 0, |chunks| {
                unpack_turned::<_, 2>(chunks, rows, out, |[a, b]| interleave(a, b))
            }),
        }
    }
}

/// Codes change places while they are still packed: half the shuffles.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_nibbles(rows: PackedRows, f: Srft, out: LevelBlock) {
    let table = nibble_table(0);
    for first in (0..rows.stored.n).step_by(2) {
        for chunk in 0..f.size() / 64 {
            // SAFETY: two rows, and a pair of the block.
            unsafe {
                let from = rows.row(first).add(f.scale_bytes() + chunk * code_bytes(4, 64));
                let to = out.levels.add(first * out.width + chunk * 128);
                let (a, b) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(rows.stored.stride).cast()));
                for (i, codes) in interleave(a, b).into_iter().enumerate() {
                    let (low, high) = nibble_levels(codes, table);
                    _mm256_storeu_si256(to.add(32 * i).cast(), low);
                    _mm256_storeu_si256(to.add(64 + 32 * i).cast(), high);
                }
            }
        }
    }
}

/// The bytes of both by turns: of each 128-bit part the lower eight, then the upper eight.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave(a: __m256i, b: __m256i) -> [__m256i; 2] {
    [_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)]
}

/// See [`crate::isa::Kernels::weigh_levels`].
#[inline(always)]
pub(super) unsafe fn weigh_levels<P: WeightProducts>(
    v: LevelBlock,
    n: usize,
    weights: *const f32,
    rows: usize,
    acc: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let tops = largest_scales(v, n);
        for first in (0..rows).step_by(ROWS) {
            let mut units = [const { MaybeUninit::uninit() }; ROWS];
            let count = ROWS.min(rows - first);
            let (weights, acc) = (weights.add(first * CELLS), acc.add(first * v.width));
            for (r, unit) in units[..count].iter_mut().enumerate() {
                unit.write(Unit::of(weights.add(r * CELLS), &tops));
            }
            let rows = Rows { weights, units: units.as_ptr().cast(), count, acc };
            if v.scale_group == WIDENED && count >= MANY {
                weigh_widened::<P>(v, n, rows);
            } else {
                weigh_bytes::<P>(v, n, rows);
            }
        }
    }
}

/// Rows of weights, at most [`ROWS`], and of sums.
#[derive(Clone, Copy)]
struct Rows {
    weights: *const f32,
    units: *const Unit,
    count: usize,
    acc: *mut f32,
}

/// The largest scale of each cell: a sink has much weight and small values, and must not set the unit of the others.
#[inline(always)]
unsafe fn largest_scales(v: LevelBlock, n: usize) -> [f32; CELLS] {
    let mut tops = [0.0f32; CELLS];
    for c in (0..n).step_by(8) {
        // SAFETY: scales of eight cells.
        unsafe {
            let mut top = _mm256_setzero_ps();
            for g in 0..v.scale_groups() {
                let scales = _mm256_loadu_ps(v.scale_at(c, g));
                top = _mm256_max_ps(top, _mm256_andnot_ps(_mm256_set1_ps(-0.0), scales));
            }
            _mm256_storeu_ps(tops.as_mut_ptr().add(c), top);
        }
    }
    tops
}

/// Few rows: levels are widened where they are multiplied, four rows at a time.
#[inline(always)]
unsafe fn weigh_bytes<P: WeightProducts>(v: LevelBlock, n: usize, rows: Rows) {
    for g in 0..v.scale_groups() {
        by_rows!(rows.count, [1 2 3 4], |first, COUNT| {
            // SAFETY: COUNT rows of weights and sums, sixteen values of the block at a time.
            unsafe {
                let mut words = [const { MaybeUninit::uninit() }; COUNT];
                let words = pack(&mut words, v, n, g, rows, first);
                for at in (g * v.scale_group..(g + 1) * v.scale_group).step_by(16) {
                    let turn = |turn: usize| {
                        let levels = v.levels.add(first_cell(turn) * v.width + at / 32 * 64 + at % 32);
                        move |_, word: usize, i: usize| {
                            let bytes = _mm_loadu_si128(levels.add(CELLS_OF_TURN[word] * v.width + 32 * i).cast());
                            _mm256_cvtepi8_epi16(bytes)
                        }
                    };
                    add_sums(weigh::<P, _, COUNT, 2>(words, n, turn), v, rows, first, at);
                }
            }
        });
    }
}

/// Many rows: levels are widened once, and need no register of their own where they are multiplied, so that there are some for 32 values of
/// three rows and a broadcast word serves four times.
#[inline(always)]
unsafe fn weigh_widened<P: WeightProducts>(v: LevelBlock, n: usize, rows: Rows) {
    let mut room = [const { MaybeUninit::<__m256i>::uninit() }; CELLS / 2 * 4];
    let room = room.as_mut_ptr().cast::<__m256i>();
    for g in 0..v.scale_groups() {
        for turn in 0..turns(n) {
            for (word, cell) in CELLS_OF_TURN.into_iter().enumerate() {
                // SAFETY: two cells of the block, which has room for whole bundles.
                unsafe {
                    let levels = v.levels.add((first_cell(turn) + cell) * v.width + 64 * g);
                    for (i, piece) in [0, 2, 1, 3].into_iter().enumerate() {
                        let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(levels.add(16 * piece).cast()));
                        _mm256_store_si256(room.add(4 * (TURN * turn + word) + i), wide);
                    }
                }
            }
        }
        by_rows!(rows.count, [1 2 3], |first, COUNT| {
            // SAFETY: COUNT rows of weights and sums, what has been widened.
            unsafe {
                let mut words = [const { MaybeUninit::uninit() }; COUNT];
                let words = pack(&mut words, v, n, g, rows, first);
                let turn = |turn: usize| {
                    let levels: [_; COUNT] = std::array::from_fn(|_| elsewhere(room.add(4 * TURN * turn)));
                    move |h: usize, word: usize, i: usize| _mm256_load_si256(levels[h].add(4 * word + i))
                };
                add_sums(weigh::<P, _, COUNT, 4>(words, n, turn), v, rows, first, g * WIDENED);
            }
        });
    }
}

/// The same, but the compiler does not know: it would load once for all rows, and have no registers left. Nor does it add an index where it
/// loads then, which would take an instruction apart in the processor.
#[inline(always)]
fn elsewhere(mut p: *const __m256i) -> *const __m256i {
    // SAFETY: nothing happens.
    unsafe { asm!("/* {0} */", inout(reg) p, options(readonly, nostack, preserves_flags)) };
    p
}

/// Words, of two cells each, in one turn of a loop.
const TURN: usize = 4;

fn turns(n: usize) -> usize {
    n.div_ceil(BUNDLE) * (BUNDLE / 2 / TURN)
}

/// `vpackssdw` joins the halves of registers: the words that it makes of a bundle are of the cells 0, 2, 8, 10, 4, 6, 12 and 14, and those behind
/// them.
const CELLS_OF_TURN: [usize; TURN] = [0, 2, 8, 10];

fn first_cell(turn: usize) -> usize {
    turn / 2 * BUNDLE + turn % 2 * 4
}

/// A row of weights, times scales: 16 bits each.
type Packed = [__m256i; CELLS / BUNDLE];

/// Weights of H rows times the scales of group g.
#[inline(always)]
unsafe fn pack<const H: usize>(
    to: &mut [MaybeUninit<Packed>; H],
    v: LevelBlock,
    n: usize,
    g: usize,
    rows: Rows,
    first: usize,
) -> [*const i32; H] {
    // SAFETY: rows first..first + H, bundles of the block.
    unsafe {
        let to = std::array::from_fn(|h| to[h].as_mut_ptr().cast::<__m256i>());
        for b in 0..n.div_ceil(BUNDLE) {
            let scales = v.scale_at(b * BUNDLE, g);
            let (low, high) = (_mm256_loadu_ps(scales), _mm256_loadu_ps(scales.add(8)));
            for (h, to) in to.iter().enumerate() {
                let weights = rows.weights.add((first + h) * CELLS + b * BUNDLE);
                let factor = _mm256_set1_ps((*rows.units.add(first + h)).factor);
                let whole = |scale: __m256, weights: *const f32| {
                    let x = _mm256_mul_ps(scale, _mm256_loadu_ps(weights));
                    _mm256_cvtps_epi32(_mm256_mul_ps(x, factor))
                };
                _mm256_store_si256(to.add(b), _mm256_packs_epi32(whole(low, weights), whole(high, weights.add(8))));
            }
        }
        to.map(|to| to.cast_const().cast())
    }
}

/// Weighted sums of 8 * N values of H rows. `turn(turn)(h, word, i)`: values 8i.. of two cells, for row h.
#[inline(always)]
unsafe fn weigh<P: WeightProducts, L: Fn(usize, usize, usize) -> __m256i, const H: usize, const N: usize>(
    words: [*const i32; H],
    n: usize,
    turn: impl Fn(usize) -> L,
) -> [[__m256i; N]; H] {
    // SAFETY: words of all bundles.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); N]; H];
        for t in 0..turns(n) {
            let level = turn(t);
            for word in 0..TURN {
                for h in 0..H {
                    let w = _mm256_set1_epi32(*words[h].add(TURN * t + word));
                    for i in 0..N {
                        sums[h][i] = settled(P::add_pairs(sums[h][i], w, level(h, word, i)));
                    }
                }
            }
        }
        sums
    }
}

/// Adds them to the results of H rows, from value `at` on.
#[inline(always)]
unsafe fn add_sums<const H: usize, const N: usize>(
    sums: [[__m256i; N]; H],
    v: LevelBlock,
    rows: Rows,
    first: usize,
    at: usize,
) {
    for (h, sums) in sums.into_iter().enumerate() {
        // SAFETY: 8 * N values of row first + h.
        unsafe {
            let unit = _mm256_set1_ps((*rows.units.add(first + h)).unit);
            for (i, sum) in sums.into_iter().enumerate() {
                let to = rows.acc.add((first + h) * v.width + at + 8 * i);
                _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), unit, _mm256_loadu_ps(to)));
            }
        }
    }
}

/// What a row of weights is multiplied by so that times any scale they fit 16 bits, and what one of these is worth.
#[derive(Clone, Copy)]
struct Unit {
    factor: f32,
    unit: f32,
}

impl Unit {
    #[inline(always)]
    unsafe fn of(weights: *const f32, tops: &[f32; CELLS]) -> Unit {
        // SAFETY: CELLS weights.
        unsafe {
            let mut most = _mm256_setzero_ps();
            for (i, tops) in tops.as_chunks::<8>().0.iter().enumerate() {
                let x = _mm256_mul_ps(_mm256_loadu_ps(tops.as_ptr()), _mm256_loadu_ps(weights.add(8 * i)));
                most = _mm256_max_ps(most, x);
            }
            let half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
            let two = _mm_max_ps(half, _mm_movehl_ps(half, half));
            let largest = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
            // Below this nothing is left in f32 either.
            match largest > 1e-30 {
                true => Unit { factor: LARGEST / largest, unit: largest * (1.0 / LARGEST) },
                false => Unit { factor: 0.0, unit: 0.0 },
            }
        }
    }
}
