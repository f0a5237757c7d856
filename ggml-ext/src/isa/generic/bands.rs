//! Levels of bands as columns: values 4j..4j+4 of one row in each word of a register.
//!
//! Codes change places while they are still packed, so that a word has four neighbours of one row.

use super::chunks::band_tables;
use super::{Bytes, PackedRows};
use crate::codec::band::{Band, CHUNK};
use crate::isa::LevelBlock;

/// A register whose words are of one row each.
///
/// # Safety
/// As [`Bytes`].
pub trait Words: Bytes {
    /// Result k has word k of the sixteen bytes at `p` and at the places `stride` further each.
    unsafe fn words(p: *const u8, stride: usize) -> [Self; 4];

    /// The same of 32 bytes.
    #[inline(always)]
    unsafe fn eight_words(p: *const u8, stride: usize) -> [Self; 8] {
        // SAFETY: the caller's promise is passed on.
        let ([a, b, c, d], [e, f, g, h]) = unsafe { (Self::words(p, stride), Self::words(p.add(16), stride)) };
        [a, b, c, d, e, f, g, h]
    }
}

/// Columns of a band.
const COLUMNS: usize = 8;

/// Fills the levels of a block: whole bundles of rows, each register of them in columns.
///
/// # Safety
/// Whole bundles of rows and room for them, on a CPU that has the instructions.
#[inline(always)]
pub unsafe fn unpack_bands<T: Words>(rows: PackedRows, f: Band, bias: u8, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match f.wide() {
            [5, 5] => unpack_as::<T, 5, 5>(rows, f, bias, out),
            [5, _] => unpack_as::<T, 5, 3>(rows, f, bias, out),
            [4, _] => unpack_as::<T, 4, 4>(rows, f, bias, out),
            _ => unpack_as::<T, 3, 3>(rows, f, bias, out),
        }
    }
}

/// Chunks whose first band has codes of FIRST bits, and behind them of SECOND.
#[inline(always)]
unsafe fn unpack_as<T: Words, const FIRST: u32, const SECOND: u32>(
    rows: PackedRows,
    f: Band,
    bias: u8,
    out: LevelBlock,
) {
    let lanes = T::COUNT / 4;
    // SAFETY: the caller's promise: as many rows as lanes, and as many cells of the block.
    unsafe {
        let (first, second) = (ChunkTables::<T, FIRST>::new(bias), ChunkTables::<T, SECOND>::new(bias));
        for row in (0..rows.stored.n).step_by(lanes) {
            for chunk in 0..f.size() / CHUNK {
                let from = rows.row(row).add(f.chunk(chunk).0);
                let to = out.levels.add(row * out.width + chunk * CHUNK * lanes);
                if FIRST == SECOND || chunk < f.first_chunks() {
                    first.unpack(from, rows.stored.stride, to);
                } else {
                    second.unpack(from, rows.stored.stride, to);
                }
            }
        }
    }
}

/// The levels of the two bands of a chunk, the first of WIDE bits.
#[derive(Clone, Copy)]
struct ChunkTables<T, const WIDE: u32> {
    wide: T,
    narrow: T,
}

impl<T: Words, const WIDE: u32> ChunkTables<T, WIDE> {
    #[inline(always)]
    unsafe fn new(bias: u8) -> Self {
        let [wide, narrow] = band_tables(WIDE, bias);
        // SAFETY: the caller's promise is passed on.
        unsafe { ChunkTables { wide: T::table(wide), narrow: T::table(narrow) } }
    }

    /// The columns of a chunk of some rows.
    #[inline(always)]
    unsafe fn unpack(self, from: *const u8, stride: usize, to: *mut i8) {
        let wide_to = |j: usize| to.wrapping_add(j * T::COUNT);
        let narrow_to = |j: usize| to.wrapping_add((COLUMNS + j) * T::COUNT);
        // SAFETY: the caller's promise: what is read belongs to the chunk.
        unsafe {
            match WIDE {
                5 => {
                    for (j, both) in T::eight_words(from, stride).into_iter().enumerate() {
                        self.wide.lookup(both.field::<3, 15>()).flipped_by(both).store(wide_to(j));
                        self.narrow.lookup(both.field::<0, 7>()).store(narrow_to(j));
                    }
                }
                4 => {
                    // The chunk has 24 bytes.
                    for (j, codes) in T::words(from, stride).into_iter().enumerate() {
                        self.wide.lookup(codes.field::<0, 15>()).store(wide_to(j));
                        self.wide.lookup(codes.field::<4, 15>()).store(wide_to(j + 4));
                    }
                    let [_, _, a, b] = T::words(from.add(8), stride);
                    for (j, codes) in [a, b].into_iter().enumerate() {
                        self.narrow.lookup(codes.field::<0, 3>()).store(narrow_to(j));
                        self.narrow.lookup(codes.field::<2, 3>()).store(narrow_to(j + 2));
                        self.narrow.lookup(codes.field::<4, 3>()).store(narrow_to(j + 4));
                        self.narrow.lookup(codes.field::<6, 3>()).store(narrow_to(j + 6));
                    }
                }
                _ => {
                    for (j, both) in T::words(from, stride).into_iter().enumerate() {
                        let (low, high) = (both.field::<0, 15>(), both.field::<4, 15>());
                        self.wide.lookup(low).store(wide_to(j));
                        self.wide.lookup(high).store(wide_to(j + 4));
                        self.narrow.lookup(low).store(narrow_to(j));
                        self.narrow.lookup(high).store(narrow_to(j + 4));
                    }
                }
            }
        }
    }
}
