//! What a stored row unpacks to, whatever its family: levels and scales.

use super::band::Band;
use super::plain::Blocks;
use super::polar::Polar;
use super::qjl::Qjl;
use super::srft::Srft;
use super::turbo::Turbo;

/// The width of a row in kernels' buffers: its levels, rounded up.
pub const fn padded(size: usize) -> usize {
    size.div_ceil(64) * 64
}

/// The values that levels stand for, where `group` of them share a scale.
#[inline(always)]
pub(super) fn expand(levels: &[i8], scales: &[f32], group: usize, x: &mut [f32]) {
    for (g, (levels, x)) in levels.chunks_exact(group).zip(x.chunks_exact_mut(group)).enumerate() {
        for (x, &level) in x.iter_mut().zip(levels) {
            *x = f32::from(level) * scales[g];
        }
    }
}

/// The levels of a row: how many, where their scales are and how they are packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LevelLayout {
    /// Levels of a row.
    pub values: usize,
    /// Levels that share a scale: 16 or 32.
    pub scale_group: usize,
    /// Bytes from the beginning of a row that unpacking reads.
    pub row_bytes: usize,
    /// Where the scales are.
    pub scales: Scales,
    /// How levels are packed.
    pub packing: Packing,
}

/// Where the scales of a row are, and what they are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    /// Codes of a byte, one for each group, from the row's beginning on: see [`super::scales`].
    Codes {
        /// The factor.
        unit: f32,
        /// Of the first so many groups those with even numbers have half steps instead of a sign.
        halved: usize,
    },
    /// An f16 for each group, the first at the row's beginning, with so many bytes from one to the next; 0 where all groups
    /// have the same.
    PerGroup {
        /// Bytes from one to the next.
        step: usize,
        /// The factor.
        unit: f32,
    },
    /// Two f16 at the row's beginning: one for the first half of the groups, one for the second.
    PerHalf([f32; 2]),
}

/// How levels are packed: each instruction set has an unpacker for each of these. Families may share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Codes behind the scales, which a table turns into levels.
    Codes(Srft),
    /// Codes, and from the middle on signs; each part padded to a multiple of 64 levels.
    CodesAndSigns(Turbo),
    /// Signs alone, padded to a multiple of 64 levels.
    Signs(Qjl),
    /// Codes behind the scales, of other widths from band to band.
    Bands(Band),
    /// Angles.
    Angles(Polar),
    /// ggml's blocks.
    Blocks(Blocks),
}

impl Packing {
    /// Do levels differ so much from what they stand for that rounding a query to 8 bits, or to a little less, is nothing beside it?
    pub fn is_coarse(self) -> bool {
        match self {
            Packing::Codes(f) => f.bits() < 8,
            Packing::CodesAndSigns(_) | Packing::Signs(_) | Packing::Bands(_) => true,
            Packing::Angles(_) | Packing::Blocks(_) => false,
        }
    }

    /// One row, which defines what the unpackers of all instruction sets do. `levels` and `scales` have room for the
    /// layout's; what is beyond is left alone.
    #[inline]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        match self {
            Packing::Codes(f) => f.unpack(row, levels, scales),
            Packing::CodesAndSigns(f) => f.unpack(row, levels, scales),
            Packing::Signs(f) => f.unpack(row, levels, scales),
            Packing::Bands(f) => f.unpack(row, levels, scales),
            Packing::Angles(f) => f.unpack(row, levels, scales),
            Packing::Blocks(f) => f.unpack(row, levels, scales),
        }
    }
}
