//! What polar's loops share.

use crate::codec::polar::{Polar, PAIRS, UPPER_BITS};

/// The codes of level 1 of a block, from bit 0 on. What lies above them is not cleared.
///
/// # Safety
/// A row with such a block.
#[inline(always)]
pub unsafe fn first_codes(f: Polar, row: *const u8, block: usize) -> u32 {
    // SAFETY: with 3 bits a word would reach past the last block, so it begins a byte before; other codes lie there.
    unsafe {
        if f.bits() == 4 {
            row.add(f.first_offset() + 4 * block).cast::<u32>().read_unaligned()
        } else {
            row.add(f.first_offset() + 3 * block - 1).cast::<u32>().read_unaligned() >> 8
        }
    }
}

/// The same of the upper levels: codes of level 1 follow them, so a word is always there.
///
/// # Safety
/// A row with such a block.
#[inline(always)]
pub unsafe fn upper_codes(f: Polar, row: *const u8, block: usize) -> u32 {
    let bit = UPPER_BITS * block;
    // SAFETY: see above.
    unsafe { row.add(f.upper_offset() + bit / 8).cast::<u32>().read_unaligned() >> (bit % 8) }
}

/// What the tables' entries of the eight pairs are multiplied by: the radius goes down the tree of angles. `split` takes
/// the bit where the code of an angle begins, its level and what comes from above, and returns that times the angle's
/// cosine and sine.
#[inline(always)]
pub fn pair_weights<F: Copy>(radius: F, split: impl Fn(u32, usize, F) -> (F, F)) -> [F; PAIRS] {
    let (left, right) = split(12, 4, radius);
    let (a, b) = split(8, 3, left);
    let (c, d) = split(10, 3, right);
    let (w0, w1) = split(0, 2, a);
    let (w2, w3) = split(2, 2, b);
    let (w4, w5) = split(4, 2, c);
    let (w6, w7) = split(6, 2, d);
    [w0, w1, w2, w3, w4, w5, w6, w7]
}
