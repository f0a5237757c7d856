//! The row formats: what everything outside of a codec reads of its rows.
//!
//! A codec describes its rows once, by [`RowFormat`]. The type table, reading and writing of rows, attention, states and
//! the guard take what they need from there.

use super::delta::Delta;
use super::levels::LevelLayout;
use super::polar::Polar;
use crate::domain::Domain;
use crate::lanes::Simd;

/// A row format at one head size.
pub trait RowFormat: Copy {
    /// Values of a head.
    fn size(self) -> usize;

    /// Bytes of a row.
    fn row_bytes(self) -> usize;

    /// The version of what rows mean: tables, geometry, order of bits. States name it.
    fn version(self) -> u32 {
        1
    }

    /// Root mean square error of scores, relative to what is coded. The guard reads it.
    fn score_error(self) -> f32;

    /// The space that rows are stored in.
    fn domain(self) -> Domain;

    /// What rows unpack to.
    fn levels(self) -> LevelLayout;

    /// How keys are scored.
    fn scorer(self) -> Scorer {
        Scorer::Levels
    }

    /// Where rows are coded with the group of cells that they belong to: how. Such rows are read and written by
    /// [`crate::groups`].
    fn grouped(self) -> Option<Delta> {
        None
    }

    /// Encodes one head by itself: `x` holds `size` values, `row` takes `row_bytes` bytes.
    fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]);

    /// Decodes one head by itself, with the least squared error.
    fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]);

    /// The vector whose product with a query is the score. It is what the row decodes to, except where a type has an
    /// estimate without bias that is not its best reconstruction.
    #[inline(always)]
    fn decode_key<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        self.decode::<S>(row, x);
    }
}

/// How the scores of keys are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scorer {
    /// By integer products of levels and 8-bit queries.
    Levels,
    /// By tables of the query, in which codes are looked up.
    Tables(Polar),
}

/// Defines `Format`, an enum of codecs, and hands its methods on to them.
macro_rules! formats {
    ($($(#[$doc:meta])+ $codec:ident),+ $(,)?) => {
        /// All row formats of this crate.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Format {
            $($(#[$doc])+ $codec($codec)),+
        }

        $(impl From<$codec> for Format {
            fn from(f: $codec) -> Format {
                Format::$codec(f)
            }
        })+

        impl RowFormat for Format {
            fn size(self) -> usize {
                match self { $(Format::$codec(f) => f.size()),+ }
            }
            fn row_bytes(self) -> usize {
                match self { $(Format::$codec(f) => f.row_bytes()),+ }
            }
            fn version(self) -> u32 {
                match self { $(Format::$codec(f) => f.version()),+ }
            }
            fn score_error(self) -> f32 {
                match self { $(Format::$codec(f) => f.score_error()),+ }
            }
            fn domain(self) -> Domain {
                match self { $(Format::$codec(f) => f.domain()),+ }
            }
            fn levels(self) -> LevelLayout {
                match self { $(Format::$codec(f) => f.levels()),+ }
            }
            fn scorer(self) -> Scorer {
                match self { $(Format::$codec(f) => f.scorer()),+ }
            }
            fn grouped(self) -> Option<Delta> {
                match self { $(Format::$codec(f) => f.grouped()),+ }
            }
            #[inline(always)]
            fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
                match self { $(Format::$codec(f) => f.encode::<S>(x, row)),+ }
            }
            #[inline(always)]
            fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]) {
                match self { $(Format::$codec(f) => f.decode::<S>(row, x)),+ }
            }
            #[inline(always)]
            fn decode_key<S: Simd>(self, row: &[u8], x: &mut [f32]) {
                match self { $(Format::$codec(f) => f.decode_key::<S>(row, x)),+ }
            }
        }
    };
}
pub(crate) use formats;
