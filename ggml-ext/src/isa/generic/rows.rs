//! Blocks of rows: whole bundles of them, a few side by side.

use super::{opaque, with_chunks, Bytes, Chunks};
use crate::codec::levels::LevelLayout;
use crate::isa::{LevelBlock, StoredRows, BUNDLE, MAX_ROW_BYTES};
use std::mem::MaybeUninit;

/// Packed rows of one layout.
#[derive(Clone, Copy)]
pub struct PackedRows<'a> {
    pub layout: &'a LevelLayout,
    pub stored: StoredRows,
}

impl PackedRows<'_> {
    /// Row c.
    ///
    /// # Safety
    /// c is below n.
    #[inline(always)]
    pub unsafe fn row(self, c: usize) -> *const u8 {
        // SAFETY: the caller's promise.
        unsafe { self.stored.row(c) }
    }

    /// See [`StoredRows::prefetch_next`].
    #[inline(always)]
    pub fn prefetch_next<T: Bytes, const COUNT: usize>(self, first: usize) {
        self.stored.prefetch_next::<T, COUNT>(first, self.layout.row_bytes);
    }
}

impl StoredRows {
    /// Prefetches the rows that have the places of these COUNT rows in the block that is read next. They lie too far apart for the processor
    /// to foresee them.
    #[inline(always)]
    pub fn prefetch_next<T: Bytes, const COUNT: usize>(self, first: usize, row_bytes: usize) {
        let next = self.data.wrapping_add(first * self.stride).wrapping_offset(self.ahead);
        for i in 0..COUNT {
            let row = next.wrapping_add(i * self.stride);
            T::prefetch(row);
            if row_bytes > 64 {
                T::prefetch(row.wrapping_add(row_bytes - 1));
            }
        }
    }
}

/// Calls `unpack` with whole bundles of rows and the cells of the block that they go to: the rows as they are, and a copy
/// of what is left.
///
/// # Safety
/// Rows of the layout, a block with room for whole bundles.
#[inline(always)]
pub unsafe fn by_bundles(
    layout: &LevelLayout,
    rows: StoredRows,
    out: LevelBlock,
    unpack: impl Fn(PackedRows, LevelBlock),
) {
    let (whole, rest) = (rows.n / BUNDLE * BUNDLE, rows.n % BUNDLE);
    if whole > 0 {
        unpack(PackedRows { layout, stored: StoredRows { n: whole, ..rows } }, out);
    }
    if rest > 0 {
        let mut copy = MaybeUninit::uninit();
        // SAFETY: the caller's promise: rows and cells from `whole` on.
        unsafe {
            let (data, stride) = whole_bundle(rows.row(whole), rows.stride, rest, layout.row_bytes, &mut copy);
            let out = LevelBlock { levels: out.levels.add(whole * out.width), scales: out.scale_at(whole, 0), ..out };
            unpack(PackedRows { layout, stored: StoredRows::new(data, stride, BUNDLE) }, out);
        }
    }
}

/// A bundle of rows, where they lie and how far apart: where there are fewer, in a copy whose other rows are the last one.
///
/// # Safety
/// n rows, at least one, of no more than MAX_ROW_BYTES.
#[inline(always)]
pub unsafe fn whole_bundle(
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

/// Levels one row after the other.
///
/// # Safety
/// Whole bundles of rows and room for them, on a CPU that has the instructions.
#[inline(always)]
pub unsafe fn unpack_rows<T: Bytes>(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe { with_chunks!(T, rows.layout.packing, 0, |chunks| unpack_turned::<T, 1>(chunks, rows, out, |x| x)) }
}

/// Registers of N rows side by side, which `turn` mixes: the levels of COUNT values of N cells follow each other in the
/// block.
///
/// # Safety
/// As [`unpack_rows`]; N divides a bundle.
#[inline(always)]
pub unsafe fn unpack_turned<T: Bytes, const N: usize>(
    chunks: impl Chunks<T>,
    rows: PackedRows,
    out: LevelBlock,
    turn: impl Fn([T; N]) -> [T; N],
) {
    for first in (0..rows.stored.n).step_by(N) {
        // A row by itself is read by who writes it, not by who walks the cache.
        if N > 1 {
            rows.prefetch_next::<T, N>(first);
        }
        for at in 0..out.width / T::COUNT {
            // SAFETY: registers of N rows, as many cells of the block.
            unsafe {
                // Not `array::from_fn`: the compiler would call its closure instead of inlining what a packing does.
                let mut levels = [T::splat(0); N];
                if chunks.is_whole(at) {
                    // Many row pointers would be saved and loaded; multiples of the stride need not.
                    let stride = if N >= 8 { opaque(rows.stored.stride) } else { rows.stored.stride };
                    for (i, levels) in levels.iter_mut().enumerate() {
                        *levels = chunks.whole(rows.row(first).add(i * stride), at);
                    }
                } else {
                    // One after the other, of which the compiler knows nothing: else it would unroll the loop and keep
                    // pointers for it that cost the whole registers.
                    let (mut tails, at, mut i) = (levels, opaque(at), 0);
                    while i < N {
                        tails[i] = chunks.tail(rows.row(first + i), at);
                        i = opaque(i + 1);
                    }
                    levels = tails;
                }
                let to = out.levels.add((first * out.width) + at * T::COUNT * N);
                for (j, x) in turn(levels).into_iter().enumerate() {
                    x.store(to.add(T::COUNT * j));
                }
            }
        }
    }
}
