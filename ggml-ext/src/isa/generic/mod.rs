//! What the vector instruction sets share: rows to levels and scales, written once over a register of bytes.
//!
//! ```text
//! bundles       16 rows each; a copy fills up the last one                    (rows.rs)
//!   levels      Chunks: a register of levels of one row, for each packing     (chunks.rs)
//!               a few rows side by side, turned into the form of a product    (rows.rs)
//!               bands of several rows, turned while they are packed           (bands.rs)
//!   scales      ScaleLanes: a register of the scales of some rows             (scales.rs)
//! ```
//!
//! An instruction set implements [`Bytes`] and [`ScaleLanes`] for its registers and keeps what is different: products,
//! transposes, polar's arithmetic.
//!
//! Functions here are inlined into functions of the instruction set, which enable its instructions: nothing here does. So
//! everything is `#[inline(always)]` and unsafe, and the promise that is passed on is that the CPU has the instructions.

#[cfg(target_arch = "x86_64")]
mod bands;
mod chunks;
pub mod polar;
pub mod rows;
mod scales;

#[cfg(target_arch = "x86_64")]
pub use bands::{unpack_bands, Words};
pub use chunks::{BandChunks, BlockChunks, Chunks, CodeChunks, SignChunks, TurboChunks};
pub use rows::{by_bundles, unpack_rows, unpack_turned, PackedRows};
pub use scales::{unpack_scales, HalvedBytes, ScaleLanes, CODE_OFFSET, CODE_SHIFT};

use crate::codec::polar::Polar;
use std::arch::asm;

/// Values whose codes are packed together, and the multiple that rows are padded to.
pub const CHUNK: usize = 64;

/// A register of bytes.
///
/// # Safety
/// Of all methods: the CPU has the instructions, and pointers hold what is read or written.
pub trait Bytes: Copy {
    /// How many. A chunk is a whole number of registers.
    const COUNT: usize;

    /// How levels of polar rows are read.
    type Polar: PolarChunks<Self>;

    /// The same byte everywhere.
    unsafe fn splat(x: u8) -> Self;

    /// All of them.
    unsafe fn store(self, to: *mut i8);

    /// The sums of bytes, modulo 256.
    unsafe fn add(self, b: Self) -> Self;

    /// A table of sixteen bytes, for [`Bytes::lookup`].
    unsafe fn table(entries: [u8; 16]) -> Self;

    /// Entries of a table; codes are below 16.
    unsafe fn lookup(self, codes: Self) -> Self;

    /// Byte i of `set` where bit i is one, of `clear` where it is zero.
    unsafe fn choose(bits: u64, set: Self, clear: Self) -> Self;

    /// MASK of each byte, from bit SHIFT on.
    unsafe fn field<const SHIFT: u32, const MASK: u8>(self) -> Self;

    /// The complement of bytes where `signs` has bit 7, the others as they are.
    unsafe fn flipped_by(self, signs: Self) -> Self;

    /// Codes of 2, 4 or 8 bits of values COUNT * part .. COUNT * (part + 1), where VALUES are packed together: byte b has
    /// the codes of values b, b + bytes, b + 2 * bytes, … from its lowest bits on. Codes repeat from value VALUES on.
    unsafe fn codes<const BITS: u32, const VALUES: usize>(p: *const u8, part: usize) -> Self;

    /// Hints that the line at `p`, any address, will be read.
    #[inline(always)]
    fn prefetch(_p: *const u8) {}
}

/// Levels of polar rows.
pub trait PolarChunks<T>: Chunks<T> {
    /// With `bias` added to levels.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn new(f: Polar, bias: u8) -> Self;
}

/// Bytes of the codes of so many values.
pub const fn code_bytes(bits: u32, values: usize) -> usize {
    bits as usize * values / 8
}

/// How far down the code of the first value of a part lies in its byte, for [`Bytes::codes`]; [`code_shifts`] come on top.
#[inline(always)]
pub const fn first_shift<T: Bytes>(bits: u32, values: usize, part: usize) -> u32 {
    (T::COUNT * part / code_bytes(bits, values)) as u32 * bits % 8
}

/// How much further down lie the codes of each four values of a part.
pub const fn code_shifts(bits: u32, values: usize) -> [u32; CHUNK / 4] {
    let (mut shifts, mut i) = ([0; CHUNK / 4], 0);
    while i < CHUNK / 4 {
        shifts[i] = (4 * i / code_bytes(bits, values)) as u32 * bits % 8;
        i += 1;
    }
    shifts
}

/// The entries of a table of levels, repeated to sixteen, with `bias` added.
#[inline(always)]
pub fn level_table(levels: &[i8], bias: u8) -> [u8; 16] {
    let mut table = [0u8; 16];
    for (i, entry) in table.iter_mut().enumerate() {
        *entry = (levels[i % levels.len()] as u8).wrapping_add(bias);
    }
    table
}

/// The same number, of which the compiler knows nothing. (Not `pure`, or it would be moved out of loops and branches.)
#[inline(always)]
pub fn opaque(mut x: usize) -> usize {
    // SAFETY: nothing happens.
    unsafe { asm!("/* {0} */", inout(reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// Calls the body with the [`Chunks`] of a packing in registers `$bytes`, with `$bias` added to levels.
macro_rules! with_chunks {
    ($bytes:ty, $packing:expr, $bias:expr, |$chunks:ident| $body:expr) => {{
        use $crate::codec::levels::Packing;
        use $crate::isa::generic::{BandChunks, BlockChunks, Bytes, CodeChunks, PolarChunks, SignChunks, TurboChunks};
        match $packing {
            Packing::Codes(f) => match f.bits() {
                8 => {
                    let $chunks = CodeChunks::<$bytes, 8>::new(f, $bias);
                    $body
                }
                4 => {
                    let $chunks = CodeChunks::<$bytes, 4>::new(f, $bias);
                    $body
                }
                3 => {
                    let $chunks = CodeChunks::<$bytes, 3>::new(f, $bias);
                    $body
                }
                _ => {
                    let $chunks = CodeChunks::<$bytes, 2>::new(f, $bias);
                    $body
                }
            },
            Packing::Bands(f) => match f.wide() {
                [5, 5] => {
                    let $chunks = BandChunks::<$bytes, 5, 5>::new(f, $bias);
                    $body
                }
                [5, _] => {
                    let $chunks = BandChunks::<$bytes, 5, 3>::new(f, $bias);
                    $body
                }
                [4, _] => {
                    let $chunks = BandChunks::<$bytes, 4, 4>::new(f, $bias);
                    $body
                }
                _ => {
                    let $chunks = BandChunks::<$bytes, 3, 3>::new(f, $bias);
                    $body
                }
            },
            Packing::Angles(f) => {
                let $chunks = <$bytes as Bytes>::Polar::new(f, $bias);
                $body
            }
            Packing::CodesAndSigns(f) => match f.bits() {
                4 => {
                    let $chunks = TurboChunks::<$bytes, 3>::new(f, $bias);
                    $body
                }
                _ => {
                    let $chunks = TurboChunks::<$bytes, 2>::new(f, $bias);
                    $body
                }
            },
            Packing::Signs(f) => {
                let $chunks = SignChunks::<$bytes>::of_qjl(f, $bias);
                $body
            }
            Packing::Blocks(f) if f.bits() == 8 => {
                let $chunks = BlockChunks::<$bytes, 8>::new(f, $bias);
                $body
            }
            Packing::Blocks(f) => {
                let $chunks = BlockChunks::<$bytes, 4>::new(f, $bias);
                $body
            }
        }
    }};
}
pub(crate) use with_chunks;
