//! The stored scales of rows, some rows at a time, in the order of a [`LevelBlock`].

use super::PackedRows;
use crate::codec::levels::Scales;
use crate::isa::{LevelBlock, BUNDLE};

/// A register with a float per row.
///
/// # Safety
/// Of all methods: the CPU has the instructions, and pointers hold what is read or written.
pub trait ScaleLanes: Copy {
    /// Rows of a register: a bundle is a whole number of registers.
    const ROWS: usize;

    /// Four bytes of each row: two f16, or four codes.
    type Words: Copy;

    /// Some of them that follow each other in rows.
    type Neighbours: AsRef<[Self::Words]>;

    /// The four bytes at `p` and those of the rows after it.
    unsafe fn words(p: *const u8, stride: usize) -> Self::Words;

    /// Words that hold the first of `bytes` bytes at `p` and after it; at least one word. Fourteen bytes of codes at least
    /// follow the scales of a row.
    unsafe fn neighbours(p: *const u8, stride: usize, bytes: usize) -> Self::Neighbours;

    /// The f16 in the lower halves of words and those in the upper ones; NaN and infinities become zero.
    unsafe fn finite_halves(words: Self::Words) -> [Self; 2];

    /// The scales of the codes in bytes 0, 1, 2 and 3 of words, over [`CODE_UNIT`]. Bytes 0 and 2 may have half steps
    /// instead of a sign.
    unsafe fn code_scales(words: Self::Words, halved: HalvedBytes) -> [Self; 4];

    /// Stores the scales times `unit`.
    unsafe fn store_scaled(self, unit: f32, to: *mut f32);
}

/// A code, shifted to be the exponent and mantissa of an f16, is off by this factor: see [`crate::codec::scales`]. What lies
/// between is a one in the exponent, so that no f16 is subnormal: it is left out for code 0.
pub const CODE_UNIT: f32 = 128.0;
pub const CODE_SHIFT: i32 = 7;
pub const CODE_OFFSET: i16 = 1 << 10;

/// Where a word has the sign of an f16 in bytes 0 and 2, and where the half step, from bit 7 of those bytes.
#[derive(Clone, Copy)]
pub struct HalvedBytes {
    pub sign: i32,
    pub half: i32,
}

impl HalvedBytes {
    /// Both are signs.
    pub const NONE: HalvedBytes = HalvedBytes { sign: 0x8000_8000u32 as i32, half: 0 };

    /// Of the groups `first` and `first + 2`, where those below `halved` have half steps.
    #[inline(always)]
    fn new(first: usize, halved: usize) -> Self {
        let mut bytes = HalvedBytes { sign: 0, half: 0 };
        for n in 0..2 {
            if first + 2 * n < halved {
                bytes.half |= 1 << (CODE_SHIFT - 1) << (16 * n);
            } else {
                bytes.sign |= 1 << 15 << (16 * n);
            }
        }
        bytes
    }
}

/// The scales of whole bundles of rows.
///
/// # Safety
/// Such rows and room for them, on a CPU that has the instructions.
#[inline(always)]
pub unsafe fn unpack_scales<S: ScaleLanes>(rows: PackedRows, out: LevelBlock) {
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match rows.layout.scales {
            Scales::Codes { unit, halved: 0 } => codes::<S, false>(rows, unit * CODE_UNIT, 0, out),
            Scales::Codes { unit, halved } => codes::<S, true>(rows, unit * CODE_UNIT, halved, out),
            Scales::PerGroup { step, unit } => per_group::<S>(rows, step, unit, out),
            Scales::PerHalf(units) => per_half::<S>(rows, units, out),
        }
    }
}

/// One byte for each group.
#[inline(always)]
unsafe fn codes<S: ScaleLanes, const HALVED: bool>(rows: PackedRows, unit: f32, halved: usize, out: LevelBlock) {
    let groups = rows.layout.values / rows.layout.scale_group;
    for first in (0..rows.stored.n).step_by(S::ROWS) {
        // SAFETY: as many rows and cells of the block; codes follow the scales.
        unsafe {
            let (from, mut to) = (rows.row(first), out.scale_at(first, 0));
            let mut g = 0;
            while g < groups {
                for &words in S::neighbours(from.add(g), rows.stored.stride, groups - g).as_ref() {
                    if g >= groups {
                        break;
                    }
                    let halved = if HALVED { HalvedBytes::new(g, halved) } else { HalvedBytes::NONE };
                    let [a, b, c, d] = S::code_scales(words, halved);
                    a.store_scaled(unit, to);
                    if g + 1 < groups {
                        b.store_scaled(unit, to.add(BUNDLE));
                    }
                    if g + 2 < groups {
                        c.store_scaled(unit, to.add(2 * BUNDLE));
                    }
                    if g + 3 < groups {
                        d.store_scaled(unit, to.add(3 * BUNDLE));
                    }
                    to = to.add(BUNDLE * (groups - g).min(4));
                    g += 4;
                }
            }
            for _ in groups..out.scale_groups() {
                to.write_bytes(0, S::ROWS);
                to = to.add(BUNDLE);
            }
        }
    }
}

#[inline(always)]
unsafe fn per_group<S: ScaleLanes>(rows: PackedRows, step: usize, unit: f32, out: LevelBlock) {
    let groups = rows.layout.values / rows.layout.scale_group;
    for first in (0..rows.stored.n).step_by(S::ROWS) {
        // SAFETY: as many rows and cells of the block.
        unsafe {
            let (from, mut to) = (rows.row(first), out.scale_at(first, 0));
            if step == 2 {
                let mut g = 0;
                while g < groups {
                    for &words in S::neighbours(from.add(2 * g), rows.stored.stride, 2 * (groups - g)).as_ref() {
                        if g >= groups {
                            break;
                        }
                        let [even, odd] = S::finite_halves(words);
                        even.store_scaled(unit, to);
                        to = to.add(BUNDLE);
                        if g + 1 < groups {
                            odd.store_scaled(unit, to);
                            to = to.add(BUNDLE);
                        }
                        g += 2;
                    }
                }
            } else {
                for g in 0..groups {
                    S::finite_halves(S::words(from.add(g * step), rows.stored.stride))[0].store_scaled(unit, to);
                    to = to.add(BUNDLE);
                }
            }
            for _ in groups..out.scale_groups() {
                to.write_bytes(0, S::ROWS);
                to = to.add(BUNDLE);
            }
        }
    }
}

/// Two scales a row: one for the first half of the groups, one for the second.
#[inline(always)]
unsafe fn per_half<S: ScaleLanes>(rows: PackedRows, units: [f32; 2], out: LevelBlock) {
    let half = out.scale_groups() / 2;
    for first in (0..rows.stored.n).step_by(S::ROWS) {
        // SAFETY: as many rows and cells of the block.
        unsafe {
            let [low, high] = S::finite_halves(S::words(rows.row(first), rows.stored.stride));
            for g in 0..half {
                low.store_scaled(units[0], out.scale_at(first, g));
                high.store_scaled(units[1], out.scale_at(first, half + g));
            }
        }
    }
}
