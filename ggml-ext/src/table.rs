//! The type table: families, concrete types, ids, names.
//!
//! A family is what a user types; a concrete type is a family at one head size, because the rotation spans one head.
//! Ids are stable for ever, state files hold them: 128 + 16 * family + position in [`HEAD_SIZES`], and position 15
//! for the family as a whole.

use crate::codec::delta::{Delta, GROUP_CELLS};
use crate::codec::polar::Polar;
use crate::codec::qjl::Qjl;
use crate::codec::srft::Srft;
use crate::codec::turbo::Turbo;
use crate::codec::{Format, RowFormat};
use crate::rotation::HEAD_SIZES;
use std::sync::LazyLock;

/// The first id that is ours.
pub const ID_BASE: i32 = 128;
/// Ids of one family.
const IDS_PER_FAMILY: i32 = 16;
/// The place of the family itself among its ids.
const FAMILY_SLOT: i32 = 15;

/// A family of types.
#[derive(Debug)]
pub struct Family {
    /// What a user types.
    pub name: &'static str,
    /// The number that ids are made from: never reused.
    pub number: i32,
    /// The codec, at so many bits and a head size.
    codec: Codec,
    /// Bits of a code.
    pub bits: u32,
    /// What it may hold.
    pub sides: Sides,
    /// One line for the type table.
    pub summary: &'static str,
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.number == other.number
    }
}

impl Eq for Family {}

/// What a family may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sides {
    /// Keys and values.
    Both,
    /// Keys alone, and why.
    KeysOnly(&'static str),
}

impl Sides {
    /// May it hold values?
    pub fn serve_v(self) -> bool {
        self == Sides::Both
    }

    /// Why a side is not served; empty where both are.
    pub fn refusal(self) -> &'static str {
        match self {
            Sides::Both => "",
            Sides::KeysOnly(why) => why,
        }
    }
}

const DELTA_KEYS: Sides = Sides::KeysOnly("it codes a key by how it differs from the one before and is for K alone");
const QJL_KEYS: Sides = Sides::KeysOnly("signs alone estimate products with keys, but lose 36% of a value");

fn srft(bits: u32, size: usize) -> Option<Format> {
    Srft::new(bits, size).map(Format::from)
}

fn delta(bits: u32, size: usize) -> Option<Format> {
    Delta::new(bits, size).map(Format::from)
}

fn band(bits: u32, size: usize) -> Option<Format> {
    Delta::banded(bits, size).map(Format::from)
}

fn polar(bits: u32, size: usize) -> Option<Format> {
    Polar::new(bits, size).map(Format::from)
}

fn turbo(bits: u32, size: usize) -> Option<Format> {
    Turbo::new(bits, size).map(Format::from)
}

fn qjl(_bits: u32, size: usize) -> Option<Format> {
    Qjl::new(size).map(Format::from)
}

type Codec = fn(u32, usize) -> Option<Format>;

const fn family(
    name: &'static str,
    number: i32,
    codec: Codec,
    bits: u32,
    sides: Sides,
    summary: &'static str,
) -> Family {
    Family { name, number, codec, bits, sides, summary }
}

#[rustfmt::skip]
static FAMILIES: [Family; 15] = [
    family("srft8", 0, srft, 8, Sides::Both, "SRFT, 8-bit levels, f16 scale per 32"),
    family("srft4", 1, srft, 4, Sides::Both, "SRFT, 16-level table, 8-bit scale per 32"),
    family("srft3", 2, srft, 3, Sides::Both, "SRFT, 8-level table, 8-bit scale per 32"),
    family("srft2", 3, srft, 2, Sides::Both, "SRFT, 4-level table, 8-bit scale per 32"),
    family("delta8", 14, delta, 8, DELTA_KEYS, "difference from a predicted key as srft8, an I-frame per 64 cells"),
    family("delta4", 4, delta, 4, DELTA_KEYS, "difference from a predicted key as srft4, an I-frame per 64 cells"),
    family("delta3", 5, delta, 3, DELTA_KEYS, "difference from a predicted key as srft3, an I-frame per 64 cells"),
    family("band4", 11, band, 4, DELTA_KEYS, "delta in bands of 5 and 3 bits, calibrated"),
    family("band3", 12, band, 3, DELTA_KEYS, "delta in bands of 4 and 2 bits or 5 to 1, calibrated"),
    family("band2", 13, band, 2, DELTA_KEYS, "delta in bands of 3 and 1 bits, calibrated"),
    family("polar4", 6, polar, 4, Sides::Both, "PolarQuant: blocks of 16 as angles of 4+2+2+2 bits and an f16 radius"),
    family("polar3", 7, polar, 3, Sides::Both, "PolarQuant: blocks of 16 as angles of 3+2+2+2 bits and an f16 radius"),
    family("turbo4", 8, turbo, 4, Sides::Both, "TurboQuant: Lloyd-Max at 3 bits, signs of the residual, two f16 norms"),
    family("turbo3", 9, turbo, 3, Sides::Both, "TurboQuant: Lloyd-Max at 2 bits, signs of the residual, two f16 norms"),
    family("qjl1", 10, qjl, 1, QJL_KEYS, "QJL: signs of a projection, f16 norm"),
];

/// All families, those of a codec together, best quality first.
pub fn families() -> &'static [Family] {
    &FAMILIES
}

/// A family at one head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concrete {
    /// The family.
    pub family: &'static Family,
    /// The head size.
    pub head_size: usize,
    format: Format,
    row_bytes: usize,
}

impl Family {
    /// The id that stands for the family.
    pub fn id(&self) -> i32 {
        ID_BASE + IDS_PER_FAMILY * self.number + FAMILY_SLOT
    }

    /// The family's type for a head size, if it serves it.
    pub fn at(&'static self, head_size: usize) -> Option<Concrete> {
        let format = self.format(head_size)?;
        Some(Concrete { family: self, head_size, format, row_bytes: format.row_bytes() })
    }

    /// The head sizes that it serves, smallest first.
    pub fn head_sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<_> = HEAD_SIZES.into_iter().filter(|&size| self.format(size).is_some()).collect();
        sizes.sort_unstable();
        sizes
    }

    /// The family's type for the smallest of them: for what does not depend on the head size.
    pub fn smallest(&'static self) -> Option<Concrete> {
        self.at(*self.head_sizes().first()?)
    }

    fn format(&self, head_size: usize) -> Option<Format> {
        HEAD_SIZES.contains(&head_size).then(|| (self.codec)(self.bits, head_size))?
    }
}

impl Concrete {
    /// The id that tensors and state files hold.
    pub fn id(self) -> i32 {
        let index = HEAD_SIZES.iter().position(|&s| s == self.head_size).expect("made by Family::at");
        ID_BASE + IDS_PER_FAMILY * self.family.number + index as i32
    }

    /// "srft4_128".
    pub fn name(self) -> String {
        format!("{}_{}", self.family.name, self.head_size)
    }

    /// The format of its rows.
    pub fn format(self) -> Format {
        self.format
    }

    /// Cells that are coded together: 1 where each row stands alone.
    pub fn group_cells(self) -> usize {
        self.format().grouped().map_or(1, |_| GROUP_CELLS)
    }

    /// Bytes of the row of one head.
    pub fn row_bytes(self) -> usize {
        self.row_bytes
    }

    /// The version of what its rows mean.
    pub fn version(self) -> u32 {
        self.format().version()
    }

    /// Bits per value, scales included.
    pub fn bits_per_value(self) -> f64 {
        self.row_bytes() as f64 * 8.0 / self.head_size as f64
    }
}

/// All concrete types, in the order of their ids.
pub fn concrete() -> impl Iterator<Item = Concrete> {
    families().iter().flat_map(|family| HEAD_SIZES.iter().filter_map(|&size| family.at(size)))
}

/// What an id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A family as a whole.
    Family(&'static Family),
    /// A type that tensors can have.
    Concrete(Concrete),
}

/// Looks an id up; None where it is not ours.
pub fn by_id(id: i32) -> Option<Entry> {
    // Every op asks, several times.
    static ENTRIES: LazyLock<Vec<Option<Entry>>> = LazyLock::new(|| {
        let numbers = 0..=families().iter().map(|f| f.number).max().unwrap_or(0);
        numbers.flat_map(|number| (0..IDS_PER_FAMILY).map(move |slot| entry_at(number, slot))).collect()
    });
    *ENTRIES.get(usize::try_from(id.checked_sub(ID_BASE)?).ok()?)?
}

fn entry_at(number: i32, slot: i32) -> Option<Entry> {
    let family = families().iter().find(|f| f.number == number)?;
    match slot {
        FAMILY_SLOT => Some(Entry::Family(family)),
        index => family.at(*HEAD_SIZES.get(index as usize)?).map(Entry::Concrete),
    }
}

/// Looks a name up: a family's or a concrete type's.
pub fn by_name(name: &str) -> Option<Entry> {
    if let Some(family) = families().iter().find(|f| f.name == name) {
        return Some(Entry::Family(family));
    }
    let (family, size) = name.rsplit_once('_')?;
    let family = families().iter().find(|f| f.name == family)?;
    family.at(size.parse().ok()?).map(Entry::Concrete)
}

/// "srft8, srft4, …"
pub fn family_names() -> String {
    families().iter().map(|f| f.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_the_promised_ones() {
        let id = |name| match by_name(name).unwrap() {
            Entry::Family(f) => f.id(),
            Entry::Concrete(c) => c.id(),
        };
        // State files hold these numbers.
        assert_eq!(id("srft8_64"), 128);
        assert_eq!(id("srft4_64"), 144);
        assert_eq!(id("srft4_128"), 148);
        assert_eq!(id("srft4"), 159);
        assert_eq!(id("srft3_576"), 168);
        assert_eq!(id("srft2_80"), 177);
        assert_eq!(id("delta4_64"), 192);
        assert_eq!(id("delta4_128"), 196);
        assert_eq!(id("delta3_128"), 212);
        assert_eq!(id("delta3"), 223);
        assert_eq!(id("polar4_64"), 224);
        assert_eq!(id("polar3_128"), 244);
        assert_eq!(id("turbo4"), 271);
        assert_eq!(id("turbo3_80"), 273);
        assert_eq!(id("qjl1_576"), 296);
        assert_eq!(id("srft8_320"), 137);
        assert_eq!(id("srft4_384"), 154);
        assert_eq!(id("qjl1_384"), 298);
        assert_eq!(id("delta8_64"), 352);
    }

    #[test]
    fn every_id_and_name_finds_its_type() {
        for c in concrete() {
            assert_eq!(by_id(c.id()), Some(Entry::Concrete(c)));
            assert_eq!(by_name(&c.name()), Some(Entry::Concrete(c)));
        }
        for f in families() {
            assert_eq!(by_id(f.id()), Some(Entry::Family(f)));
        }
    }

    #[test]
    fn unknown_ids_and_names_are_nobodys() {
        for id in [i32::MIN, -1, 0, 43, 127, 128 + 11, 128 + 14, 128 + 16 * 200, i32::MAX] {
            assert_eq!(by_id(id), None, "{id}");
        }
        for name in ["", "srft", "srft4_", "srft4_65", "srft5_64", "_64", "q4_0"] {
            assert_eq!(by_name(name), None, "{name}");
        }
    }

    #[test]
    fn bits_per_value_are_the_published_ones() {
        for (name, bits) in [
            ("srft8_128", 8.5),
            ("srft4_128", 4.25),
            ("srft3_64", 3.25),
            ("srft2_576", 2.25),
            ("srft4_80", 4.6),
            ("delta8_128", 8.75),
            ("delta4_128", 4.5),
            ("delta3_128", 3.5),
            ("delta4_576", 4.5),
            ("delta4_80", 5.0),
            ("delta4_320", 4.5),
            ("delta3_384", 3.5),
            ("polar4_128", 3.875),
            ("polar3_128", 3.375),
            ("turbo4_128", 4.25),
            ("turbo3_128", 3.25),
            ("qjl1_128", 1.125),
        ] {
            let Some(Entry::Concrete(c)) = by_name(name) else { panic!("{name}") };
            assert_eq!(c.bits_per_value(), bits, "{name}");
        }
    }
}
