//! The row formats under one name, for all that does not care which it is.

use super::polar::Polar;
use super::qjl::Qjl;
use super::srft::Srft;
use super::turbo::Turbo;
use crate::lanes::Simd;

/// A row format at one head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// srft8, srft4, srft3, srft2.
    Srft(Srft),
    /// polar4, polar3.
    Polar(Polar),
    /// turbo4, turbo3.
    Turbo(Turbo),
    /// qjl1.
    Qjl(Qjl),
}

impl Format {
    /// Values of a row.
    pub fn size(self) -> usize {
        match self {
            Format::Srft(f) => f.size(),
            Format::Polar(f) => f.size(),
            Format::Turbo(f) => f.size(),
            Format::Qjl(f) => f.size(),
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(self) -> usize {
        match self {
            Format::Srft(f) => f.row_bytes(),
            Format::Polar(f) => f.row_bytes(),
            Format::Turbo(f) => f.row_bytes(),
            Format::Qjl(f) => f.row_bytes(),
        }
    }

    /// Encodes one head: `x` holds `size` values, `row` takes `row_bytes` bytes.
    #[inline(always)]
    pub fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        match self {
            Format::Srft(f) => f.encode::<S>(x, row),
            Format::Polar(f) => f.encode::<S>(x, row),
            Format::Turbo(f) => f.encode::<S>(x, row),
            Format::Qjl(f) => f.encode::<S>(x, row),
        }
    }

    /// Decodes one head, with the least squared error.
    #[inline(always)]
    pub fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        match self {
            Format::Srft(f) => f.decode::<S>(row, x),
            Format::Polar(f) => f.decode::<S>(row, x),
            Format::Turbo(f) => f.decode::<S>(row, x),
            Format::Qjl(f) => f.decode::<S>(row, x),
        }
    }

    /// The vector whose product with a query is the score. It is what the row decodes to, except where a type has an
    /// estimate without bias that is not its best reconstruction.
    #[inline(always)]
    pub fn decode_key<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        match self {
            Format::Srft(_) | Format::Polar(_) => self.decode::<S>(row, x),
            Format::Turbo(f) => f.decode_key::<S>(row, x),
            Format::Qjl(f) => f.decode_key::<S>(row, x),
        }
    }
}
