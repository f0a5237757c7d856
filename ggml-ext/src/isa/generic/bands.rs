//! Levels of bands as columns: values 4j..4j+4 of one row in each word of a register.
//!
//! Codes change places while they are still packed, so that a word has four neighbours of one row. Their high bits are a nibble of a
//! word that the lane has too.

use super::{level_table, Bytes, PackedRows};
use crate::codec::band::{levels_of, Band, CHUNK};
use crate::isa::LevelBlock;

/// A register whose words are of one row each.
///
/// # Safety
/// As [`Bytes`].
pub trait Words: Bytes {
    /// Result k has word k of the sixteen bytes at `p` and at the places `stride` further each.
    unsafe fn words(p: *const u8, stride: usize) -> [Self; 4];

    /// MASK of each byte, from bit SHIFT on.
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self) -> Self;

    /// In every word its byte n everywhere.
    unsafe fn byte_of_words(self, n: usize) -> Self;

    /// Byte i of `set` where byte i of `self` has a bit of `bits`, in every word the same; else of `clear`.
    unsafe fn choose_by(self, bits: u32, set: Self, clear: Self) -> Self;
}

/// Columns of a band.
const COLUMNS: usize = 8;

/// Levels by the low bits of codes, where the high bit is clear and where it is set.
#[derive(Clone, Copy)]
struct Tables<T> {
    clear: T,
    set: T,
}

impl<T: Words> Tables<T> {
    #[inline(always)]
    unsafe fn new(levels: &[i8], bias: u8) -> Self {
        let (clear, set) = match levels.len() {
            4 | 16 => (levels, levels),
            half => levels.split_at(half / 2),
        };
        // SAFETY: the caller's promise is passed on.
        unsafe { Tables { clear: T::table(level_table(clear, bias)), set: T::table(level_table(set, bias)) } }
    }

    /// Column j of a band whose high bits are in the words of `high`, if it has any.
    #[inline(always)]
    unsafe fn column(self, low: T, high: Option<[T; 4]>, j: usize) -> T {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let clear = self.clear.lookup(low);
            match high {
                None => clear,
                Some(bytes) => bytes[j / 2].choose_by(0x0804_0201 << (4 * (j % 2)), self.set.lookup(low), clear),
            }
        }
    }
}

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
        for row in (0..rows.n).step_by(lanes) {
            for chunk in 0..f.size() / CHUNK {
                let from = rows.row(row).add(f.chunk(chunk).0);
                let to = out.levels.add(row * out.width + chunk * CHUNK * lanes);
                if FIRST == SECOND || chunk < f.first_chunks() {
                    first.unpack(from, rows.stride, to);
                } else {
                    second.unpack(from, rows.stride, to);
                }
            }
        }
    }
}

/// The levels of the two bands of a chunk, the first of WIDE bits.
#[derive(Clone, Copy)]
struct ChunkTables<T, const WIDE: u32> {
    wide: Tables<T>,
    narrow: Tables<T>,
}

impl<T: Words, const WIDE: u32> ChunkTables<T, WIDE> {
    #[inline(always)]
    unsafe fn new(bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            ChunkTables { wide: Tables::new(levels_of(WIDE), bias), narrow: Tables::new(levels_of(WIDE - 2), bias) }
        }
    }

    /// The columns of a chunk of some rows.
    #[inline(always)]
    unsafe fn unpack(self, from: *const u8, stride: usize, to: *mut i8) {
        // SAFETY: the caller's promise: what is read belongs to the chunk.
        unsafe {
            let first = T::words(from, stride);
            let narrow_to = to.add(COLUMNS * T::COUNT);
            match WIDE {
                5 => {
                    let second = T::words(from.add(16), stride);
                    self.nibbles(first, Some(bytes_of(second[2])), to);
                    pairs_of_bits([second[0], second[1]], self.narrow, Some(bytes_of(second[3])), narrow_to);
                }
                4 => {
                    // The chunk has 24 bytes.
                    let second = T::words(from.add(8), stride);
                    self.nibbles(first, None, to);
                    pairs_of_bits([second[2], second[3]], self.narrow, None, narrow_to);
                }
                _ => {
                    pairs_of_bits([first[0], first[1]], self.wide, Some(bytes_of(first[2])), to);
                    let high = Some(bytes_of(first[3]));
                    for j in 0..COLUMNS {
                        self.narrow.column(T::splat(0), high, j).store(narrow_to.add(j * T::COUNT));
                    }
                }
            }
        }
    }

    /// A band whose codes have four low bits: a byte has those of two values, 16 apart.
    #[inline(always)]
    unsafe fn nibbles(self, words: [T; 4], high: Option<[T; 4]>, to: *mut i8) {
        for (j, word) in words.into_iter().enumerate() {
            // SAFETY: the caller's promise is passed on.
            unsafe {
                self.wide.column(word.field::<0, 15>(), high, j).store(to.add(j * T::COUNT));
                self.wide.column(word.field::<4, 15>(), high, j + 4).store(to.add((j + 4) * T::COUNT));
            }
        }
    }
}

/// Each byte of the words by itself. Not `array::map`: the compiler would call its closure instead of inlining it.
#[inline(always)]
unsafe fn bytes_of<T: Words>(word: T) -> [T; 4] {
    // SAFETY: the caller's promise is passed on.
    unsafe { [word.byte_of_words(0), word.byte_of_words(1), word.byte_of_words(2), word.byte_of_words(3)] }
}

/// A band whose codes have two low bits: a byte has those of four values, 8 apart.
#[inline(always)]
unsafe fn pairs_of_bits<T: Words>(words: [T; 2], levels: Tables<T>, high: Option<[T; 4]>, to: *mut i8) {
    for (j, word) in words.into_iter().enumerate() {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let parts = [word.field::<0, 3>(), word.field::<2, 3>(), word.field::<4, 3>(), word.field::<6, 3>()];
            for (part, low) in parts.into_iter().enumerate() {
                levels.column(low, high, j + 2 * part).store(to.add((j + 2 * part) * T::COUNT));
            }
        }
    }
}
