//! Levels of a row, a register at a time: what is different from packing to packing.

use super::{code_bytes, level_table, Bytes, CHUNK};
use crate::codec::band::{levels_of, Band, BAND, MAGNITUDES_5};
use crate::codec::plain::{Blocks, BLOCK};
use crate::codec::qjl::{self, Qjl};
use crate::codec::srft::{Srft, LEVELS_2, LEVELS_3, LEVELS_4};
use crate::codec::turbo::{self, Turbo};
use crate::codec::RowFormat;
use crate::isa::padded;

/// Levels of a packing: register `at` has the values COUNT * at .. COUNT * (at + 1) of a row padded to whole chunks, and
/// level zero beyond the row's end.
pub trait Chunks<T>: Copy {
    /// Whether register `at` has nothing but values, packed as most are: [`Chunks::whole`] reads it, else
    /// [`Chunks::tail`]. Apart, because only the first must be fast.
    fn is_whole(self, at: usize) -> bool;

    /// Levels of a whole register.
    ///
    /// # Safety
    /// Of such a row, on a CPU that has the instructions.
    unsafe fn whole(self, row: *const u8, at: usize) -> T;

    /// Levels of another register.
    ///
    /// # Safety
    /// As [`Chunks::whole`].
    unsafe fn tail(self, row: *const u8, at: usize) -> T;
}

/// Codes packed by chunks of 64 values, what is left in one of 32 and one of 16, and a table of levels; 8-bit codes are the
/// levels.
#[derive(Clone, Copy)]
pub struct CodeChunks<T, const BITS: u32> {
    levels: LevelTable<T, BITS>,
    size: usize,
    /// Where the codes begin.
    codes: usize,
}

impl<T: Bytes, const BITS: u32> CodeChunks<T, BITS> {
    #[inline(always)]
    pub unsafe fn new(f: Srft, bias: u8) -> Self {
        let levels: &[i8] = match BITS {
            4 => &LEVELS_4.table,
            3 => &LEVELS_3.table,
            _ => &LEVELS_2.table,
        };
        // SAFETY: the caller's promise is passed on.
        unsafe { Self::over(levels, f.size(), f.scale_bytes(), bias) }
    }

    /// Other levels, codes beginning at byte `codes`.
    #[inline(always)]
    unsafe fn over(levels: &[i8], size: usize, codes: usize, bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        CodeChunks { levels: unsafe { LevelTable::new(levels, bias) }, size, codes }
    }

    /// Where the codes of the chunk with register `at` are, and which part of it the register is.
    #[inline(always)]
    fn place(self, at: usize) -> (usize, usize) {
        (self.codes + code_bytes(BITS, at * T::COUNT / CHUNK * CHUNK), at % (CHUNK / T::COUNT))
    }
}

impl<T: Bytes, const BITS: u32> Chunks<T> for CodeChunks<T, BITS> {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        at < self.size / CHUNK * (CHUNK / T::COUNT)
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> T {
        let (codes, part) = self.place(at);
        // SAFETY: the caller's promise.
        unsafe { self.levels.of::<CHUNK>(row.add(codes), part) }
    }

    #[inline(always)]
    unsafe fn tail(self, row: *const u8, at: usize) -> T {
        let ((codes, part), left) = (self.place(at), self.size % CHUNK);
        // Which bytes of the register are of these values.
        let of = |first: usize, count: usize| {
            (u64::MAX >> (64 - count) << first >> (T::COUNT * part)) & (u64::MAX >> (64 - T::COUNT))
        };
        // SAFETY: the caller's promise: what is read belongs to the chunks of 32 and 16 values.
        unsafe {
            let (codes, mut levels) = (row.add(codes), self.levels.zero);
            if left >= 32 && of(0, 32) != 0 {
                levels = T::choose(of(0, 32), self.levels.of::<32>(codes, part), levels);
            }
            let first = left & 32;
            if !left.is_multiple_of(32) && of(first, 16) != 0 {
                let codes = codes.add(code_bytes(BITS, first));
                levels = T::choose(of(first, 16), self.levels.of::<16>(codes, part), levels);
            }
            levels
        }
    }
}

/// What codes stand for.
#[derive(Clone, Copy)]
struct LevelTable<T, const BITS: u32> {
    table: T,
    /// Level zero, which is the bias.
    zero: T,
}

impl<T: Bytes, const BITS: u32> LevelTable<T, BITS> {
    #[inline(always)]
    unsafe fn new(levels: &[i8], bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe { LevelTable { table: T::table(level_table(levels, bias)), zero: T::splat(bias) } }
    }

    /// The levels of a part of VALUES values whose codes are packed together; they repeat from there on.
    ///
    /// # Safety
    /// Their codes are at `p`.
    #[inline(always)]
    unsafe fn of<const VALUES: usize>(self, p: *const u8, part: usize) -> T {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match BITS {
                8 => T::codes::<8, VALUES>(p, part).add(self.zero),
                4 => self.table.lookup(T::codes::<4, VALUES>(p, part)),
                2 => self.table.lookup(T::codes::<2, VALUES>(p, part)),
                _ => {
                    // Two bits as above, and behind all of them the third.
                    let low = T::codes::<2, VALUES>(p, part);
                    let bits = bits::<T, VALUES>(p.add(code_bytes(2, VALUES)), part);
                    self.table.lookup(low.add(T::choose(bits, T::splat(4), T::splat(0))))
                }
            }
        }
    }
}

/// The bits of a part of VALUES values, a bit each; they repeat from there on.
#[inline(always)]
unsafe fn bits<T: Bytes, const VALUES: usize>(p: *const u8, part: usize) -> u64 {
    // SAFETY: the caller has them.
    unsafe {
        let p = p.add(T::COUNT * part % VALUES / 8);
        match if T::COUNT < VALUES { T::COUNT } else { VALUES } {
            16 => u64::from(p.cast::<u16>().read_unaligned()) * 0x0001_0001_0001_0001,
            32 => u64::from(p.cast::<u32>().read_unaligned()) * 0x0000_0001_0000_0001,
            _ => p.cast::<u64>().read_unaligned(),
        }
    }
}

/// Bands: chunks of two, whose first band has codes of FIRST bits in the first half of the chunks and of SECOND in the
/// other, and whose second band has two bits less.
#[derive(Clone, Copy)]
pub struct BandChunks<T, const FIRST: u32, const SECOND: u32> {
    first: BandTables<T, FIRST>,
    second: BandTables<T, SECOND>,
    format: Band,
}

impl<T: Bytes, const FIRST: u32, const SECOND: u32> BandChunks<T, FIRST, SECOND> {
    #[inline(always)]
    pub unsafe fn new(format: Band, bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe { BandChunks { first: BandTables::new(bias), second: BandTables::new(bias), format } }
    }
}

impl<T: Bytes, const FIRST: u32, const SECOND: u32> Chunks<T> for BandChunks<T, FIRST, SECOND> {
    #[inline(always)]
    fn is_whole(self, _at: usize) -> bool {
        true
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> T {
        let (chunk, part) = (at * T::COUNT / CHUNK, at % (CHUNK / T::COUNT));
        // SAFETY: the caller's promise.
        unsafe {
            let codes = row.add(self.format.chunk(chunk).0);
            if FIRST == SECOND || chunk < self.format.first_chunks() {
                self.first.of(codes, part)
            } else {
                self.second.of(codes, part)
            }
        }
    }

    #[inline(always)]
    unsafe fn tail(self, _row: *const u8, _at: usize) -> T {
        unreachable!("rows of bands are whole chunks")
    }
}

/// Tables for the levels of two bands, the first of WIDE bits. A register of both bands has them side by side.
#[derive(Clone, Copy)]
struct BandTables<T, const WIDE: u32> {
    tables: [T; 2],
}

impl<T: Bytes, const WIDE: u32> BandTables<T, WIDE> {
    #[inline(always)]
    unsafe fn new(bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let tables = band_tables(WIDE, bias).map(|table| T::table(table));
            match T::COUNT {
                CHUNK => BandTables { tables: [side_by_side(tables[0], tables[1]); 2] },
                _ => BandTables { tables },
            }
        }
    }

    /// The levels of a part of the chunk that is at `p`.
    ///
    /// # Safety
    /// It is there.
    #[inline(always)]
    unsafe fn of(self, p: *const u8, part: usize) -> T {
        let band = part * T::COUNT / BAND;
        // SAFETY: the caller's promise: parts of a band, or both bands one after the other.
        unsafe {
            let pick = |first: T, second: T| match (T::COUNT, band) {
                (CHUNK, _) => side_by_side(first, second),
                (_, 0) => first,
                _ => second,
            };
            let table = self.tables[band % 2];
            match WIDE {
                5 => {
                    let both = T::codes::<8, BAND>(p, part);
                    let levels = table.lookup(pick(both.field::<3, 15>(), both.field::<0, 7>()));
                    levels.flipped_by(pick(both, T::splat(0)))
                }
                4 => {
                    let narrow = p.add(code_bytes(4, BAND));
                    let second = || T::codes::<2, BAND>(narrow, part % (BAND / T::COUNT).max(1));
                    table.lookup(match (T::COUNT, band) {
                        (CHUNK, _) => side_by_side(T::codes::<4, BAND>(p, part), second()),
                        (_, 0) => T::codes::<4, BAND>(p, part),
                        _ => second(),
                    })
                }
                _ => table.lookup(T::codes::<4, BAND>(p, part)),
            }
        }
    }
}

/// Bytes of the first band, then of the second.
#[inline(always)]
unsafe fn side_by_side<T: Bytes>(first: T, second: T) -> T {
    // SAFETY: the caller's promise is passed on.
    unsafe { T::choose(u64::MAX >> (64 - BAND), first, second) }
}

/// The tables of the two bands of a chunk, for what is looked up: magnitudes of 5 bits, the codes of others, and the four bits
/// of a value in both bands of 3 and 1 bits.
#[inline(always)]
pub(super) fn band_tables(wide: u32, bias: u8) -> [[u8; 16]; 2] {
    match wide {
        5 => [level_table(&MAGNITUDES_5, bias), level_table(levels_of(3), bias)],
        3 => {
            let mut narrow = [0; 16];
            for (i, level) in narrow.iter_mut().enumerate() {
                *level = levels_of(1)[i / 8];
            }
            [level_table(levels_of(3), bias), level_table(&narrow, bias)]
        }
        _ => [level_table(levels_of(wide), bias), level_table(levels_of(wide - 2), bias)],
    }
}

/// q8_0 and q4_0: blocks of 32 with the scale in front.
#[derive(Clone, Copy)]
pub struct BlockChunks<T, const BITS: u32> {
    levels: LevelTable<T, BITS>,
    size: usize,
}

impl<T: Bytes, const BITS: u32> BlockChunks<T, BITS> {
    #[inline(always)]
    pub unsafe fn new(f: Blocks, bias: u8) -> Self {
        const LEVELS: [i8; 16] = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7];
        // SAFETY: the caller's promise is passed on.
        BlockChunks { levels: unsafe { LevelTable::new(&LEVELS, bias) }, size: f.size() }
    }

    /// Part of a block, repeated if the register is wider.
    #[inline(always)]
    unsafe fn block(self, row: *const u8, block: usize, part: usize) -> T {
        // SAFETY: the caller has a row with such a block.
        unsafe { self.levels.of::<BLOCK>(row.add(block * (2 + code_bytes(BITS, BLOCK)) + 2), part) }
    }
}

impl<T: Bytes, const BITS: u32> Chunks<T> for BlockChunks<T, BITS> {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        T::COUNT * (at + 1) <= self.size
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> T {
        let block = T::COUNT * at / BLOCK;
        // SAFETY: the caller's promise.
        unsafe {
            let levels = self.block(row, block, at % (CHUNK / T::COUNT));
            if T::COUNT <= BLOCK {
                return levels;
            }
            T::choose(u64::MAX >> (64 - BLOCK), levels, self.block(row, block + 1, 0))
        }
    }

    #[inline(always)]
    unsafe fn tail(self, row: *const u8, at: usize) -> T {
        // SAFETY: the caller's promise; one block may be left for a register of two.
        unsafe {
            if T::COUNT * at >= self.size {
                return self.levels.zero;
            }
            T::choose(u64::MAX >> (64 - BLOCK), self.block(row, T::COUNT * at / BLOCK, 0), self.levels.zero)
        }
    }
}

/// Signs of one level: qjl1, and the second half of turbo's rows.
#[derive(Clone, Copy)]
pub struct SignChunks<T> {
    plus: T,
    minus: T,
    zero: T,
    size: usize,
    /// Where the bits begin.
    bits: usize,
}

impl<T: Bytes> SignChunks<T> {
    #[inline(always)]
    unsafe fn new(level: i8, size: usize, bits: usize, bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            let all = |level: i8| T::splat((level as u8).wrapping_add(bias));
            SignChunks { plus: all(level), minus: all(-level), zero: all(0), size, bits }
        }
    }

    #[inline(always)]
    pub unsafe fn of_qjl(f: Qjl, bias: u8) -> Self {
        // SAFETY: the caller's promise is passed on.
        unsafe { Self::new(qjl::SIGN_LEVEL, f.size(), qjl::NORM_BYTES, bias) }
    }
}

impl<T: Bytes> Chunks<T> for SignChunks<T> {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        T::COUNT * (at + 1) <= self.size
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> T {
        // SAFETY: the caller's promise.
        unsafe { T::choose(bits::<T, CHUNK>(row.add(self.bits + T::COUNT / 8 * at), 0), self.minus, self.plus) }
    }

    #[inline(always)]
    unsafe fn tail(self, row: *const u8, at: usize) -> T {
        let left = self.size.saturating_sub(T::COUNT * at);
        let mut negative = 0;
        // SAFETY: bits of the row.
        unsafe {
            for i in 0..left / 16 {
                let from = row.add(self.bits + T::COUNT / 8 * at + 2 * i);
                negative |= u64::from(from.cast::<u16>().read_unaligned()) << (16 * i);
            }
            T::choose((1 << left) - 1, T::choose(negative, self.minus, self.plus), self.zero)
        }
    }
}

/// Levels of stage 1, packed in BITS, and signs behind them.
#[derive(Clone, Copy)]
pub struct TurboChunks<T, const BITS: u32> {
    levels: CodeChunks<T, BITS>,
    signs: SignChunks<T>,
    /// The first register of signs.
    half: usize,
}

impl<T: Bytes, const BITS: u32> TurboChunks<T, BITS> {
    #[inline(always)]
    pub unsafe fn new(f: Turbo, bias: u8) -> Self {
        let quantizer = f.quantizer();
        // SAFETY: the caller's promise is passed on.
        unsafe {
            TurboChunks {
                levels: CodeChunks::over(quantizer.table, f.size(), turbo::NORM_BYTES, bias),
                signs: SignChunks::new(quantizer.sign_level, f.size(), f.sign_offset(), bias),
                half: padded(f.size()) / T::COUNT,
            }
        }
    }
}

impl<T: Bytes, const BITS: u32> Chunks<T> for TurboChunks<T, BITS> {
    #[inline(always)]
    fn is_whole(self, at: usize) -> bool {
        if at < self.half {
            self.levels.is_whole(at)
        } else {
            self.signs.is_whole(at - self.half)
        }
    }

    #[inline(always)]
    unsafe fn whole(self, row: *const u8, at: usize) -> T {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            if at < self.half {
                self.levels.whole(row, at)
            } else {
                self.signs.whole(row, at - self.half)
            }
        }
    }

    #[inline(always)]
    unsafe fn tail(self, row: *const u8, at: usize) -> T {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            if at < self.half {
                self.levels.tail(row, at)
            } else {
                self.signs.tail(row, at - self.half)
            }
        }
    }
}
