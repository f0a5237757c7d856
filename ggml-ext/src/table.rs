//! The type table: families, concrete types, ids, names.
//!
//! A family is what a user types; a concrete type is a family at one head size, because the rotation spans one head.
//! Ids are stable for ever, state files hold them: 128 + 16 * family + position in [`HEAD_SIZES`], and position 15
//! for the family as a whole.

use crate::codec::delta::{Delta, GROUP_CELLS};
use crate::codec::format::Format;
use crate::codec::polar::Polar;
use crate::codec::qjl::Qjl;
use crate::codec::srft::Srft;
use crate::codec::turbo::Turbo;
use crate::rotation::HEAD_SIZES;

/// The first id that is ours.
pub const ID_BASE: i32 = 128;
/// Ids of one family.
const IDS_PER_FAMILY: i32 = 16;
/// The place of the family itself among its ids.
const FAMILY_SLOT: i32 = 15;

/// What rows of a family are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`crate::codec::srft`]
    Srft,
    /// [`crate::codec::polar`]
    Polar,
    /// [`crate::codec::turbo`]
    Turbo,
    /// [`crate::codec::qjl`]
    Qjl,
    /// [`crate::codec::delta`]
    Delta,
}

/// How rows are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Each by itself.
    Alone(Format),
    /// With the group of cells that they belong to.
    Grouped(Delta),
}

/// A family of types.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// What a user types.
    pub name: &'static str,
    /// The number that ids are made from: never reused.
    pub number: i32,
    /// The codec.
    pub kind: Kind,
    /// Bits of a code.
    pub bits: u32,
    /// May it hold keys?
    pub serves_k: bool,
    /// May it hold values?
    pub serves_v: bool,
    /// Why a side is not served, where one is not.
    pub refusal: &'static str,
    /// One line for the type table.
    pub summary: &'static str,
}

static FAMILIES: [Family; 11] = [
    Family {
        name: "srft8",
        number: 0,
        kind: Kind::Srft,
        bits: 8,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "SRFT, 8-bit levels, f16 scale per 32",
    },
    Family {
        name: "srft4",
        number: 1,
        kind: Kind::Srft,
        bits: 4,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "SRFT, 16-level table, f16 scale per 32",
    },
    Family {
        name: "srft3",
        number: 2,
        kind: Kind::Srft,
        bits: 3,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "SRFT, 8-level table, f16 scale per 32",
    },
    Family {
        name: "srft2",
        number: 3,
        kind: Kind::Srft,
        bits: 2,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "SRFT, 4-level table, f16 scale per 32",
    },
    Family {
        name: "delta4",
        number: 4,
        kind: Kind::Delta,
        bits: 4,
        serves_k: true,
        serves_v: false,
        refusal: "it codes a key by how it differs from the one before and is for K alone",
        summary: "difference from a predicted key as srft4, an I-frame per 64 cells",
    },
    Family {
        name: "delta3",
        number: 5,
        kind: Kind::Delta,
        bits: 3,
        serves_k: true,
        serves_v: false,
        refusal: "it codes a key by how it differs from the one before and is for K alone",
        summary: "difference from a predicted key as srft3, an I-frame per 64 cells",
    },
    Family {
        name: "polar4",
        number: 6,
        kind: Kind::Polar,
        bits: 4,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "PolarQuant: blocks of 16 as angles of 4+2+2+2 bits and an f16 radius",
    },
    Family {
        name: "polar3",
        number: 7,
        kind: Kind::Polar,
        bits: 3,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "PolarQuant: blocks of 16 as angles of 3+2+2+2 bits and an f16 radius",
    },
    Family {
        name: "turbo4",
        number: 8,
        kind: Kind::Turbo,
        bits: 4,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "TurboQuant: Lloyd-Max at 3 bits, signs of the residual, two f16 norms",
    },
    Family {
        name: "turbo3",
        number: 9,
        kind: Kind::Turbo,
        bits: 3,
        serves_k: true,
        serves_v: true,
        refusal: "",
        summary: "TurboQuant: Lloyd-Max at 2 bits, signs of the residual, two f16 norms",
    },
    Family {
        name: "qjl1",
        number: 10,
        kind: Kind::Qjl,
        bits: 1,
        serves_k: true,
        serves_v: false,
        refusal: "signs alone estimate products with keys, but lose 36% of a value",
        summary: "QJL: signs of a projection, f16 norm",
    },
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
}

impl Family {
    /// The id that stands for the family.
    pub fn id(&self) -> i32 {
        ID_BASE + IDS_PER_FAMILY * self.number + FAMILY_SLOT
    }

    /// The family's type for a head size, if it serves it.
    pub fn at(&'static self, head_size: usize) -> Option<Concrete> {
        HEAD_SIZES.contains(&head_size).then_some(Concrete { family: self, head_size })
    }

    /// The head sizes that it serves, smallest first.
    pub fn head_sizes(&self) -> &'static [usize] {
        static SIZES: [usize; HEAD_SIZES.len()] = sorted(HEAD_SIZES);
        &SIZES
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

    /// How its rows are stored.
    pub fn storage(self) -> Storage {
        let (bits, size) = (self.family.bits, self.head_size);
        match self.family.kind {
            Kind::Srft => Srft::new(bits, size).map(Format::Srft).map(Storage::Alone),
            Kind::Polar => Polar::new(bits, size).map(Format::Polar).map(Storage::Alone),
            Kind::Turbo => Turbo::new(bits, size).map(Format::Turbo).map(Storage::Alone),
            Kind::Qjl => Qjl::new(size).map(Format::Qjl).map(Storage::Alone),
            Kind::Delta => Delta::new(bits, size).map(Storage::Grouped),
        }
        .expect("families serve the head sizes they list")
    }

    /// The format of a row that stands alone.
    pub fn format(self) -> Option<Format> {
        match self.storage() {
            Storage::Alone(f) => Some(f),
            Storage::Grouped(_) => None,
        }
    }

    /// Cells that are coded together: 1 where each row stands alone.
    pub fn group_cells(self) -> usize {
        match self.storage() {
            Storage::Alone(_) => 1,
            Storage::Grouped(_) => GROUP_CELLS,
        }
    }

    /// Bytes of the row of one head.
    pub fn row_bytes(self) -> usize {
        match self.storage() {
            Storage::Alone(f) => f.row_bytes(),
            Storage::Grouped(f) => f.row_bytes(),
        }
    }

    /// The version of what its rows mean: tables, geometry, order of bits. States name it.
    pub fn version(self) -> u32 {
        match self.family.kind {
            Kind::Srft | Kind::Polar | Kind::Turbo | Kind::Qjl | Kind::Delta => 1,
        }
    }

    /// Bits per value, scales included.
    pub fn bits_per_value(self) -> f64 {
        self.row_bytes() as f64 * 8.0 / self.head_size as f64
    }
}

/// The same sizes, smallest first.
const fn sorted<const N: usize>(mut sizes: [usize; N]) -> [usize; N] {
    let mut end = N;
    while end > 1 {
        let mut i = 1;
        while i < end {
            if sizes[i - 1] > sizes[i] {
                (sizes[i - 1], sizes[i]) = (sizes[i], sizes[i - 1]);
            }
            i += 1;
        }
        end -= 1;
    }
    sizes
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
    let offset = id.checked_sub(ID_BASE).filter(|&o| o >= 0)?;
    let family = families().iter().find(|f| f.number == offset / IDS_PER_FAMILY)?;
    match offset % IDS_PER_FAMILY {
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
            ("srft4_128", 4.5),
            ("srft3_64", 3.5),
            ("srft2_576", 2.5),
            ("srft4_80", 5.0),
            ("delta4_128", 4.75),
            ("delta3_128", 3.75),
            ("delta4_576", 4.75),
            ("delta4_80", 5.4),
            ("delta4_320", 4.75),
            ("delta3_384", 3.75),
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
