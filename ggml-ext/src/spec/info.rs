//! What is known of a cache type by its id, be it a family, a concrete type or a spec.

use super::{registry, Member, Side, Spec};
use crate::table::{self, Concrete, Entry, Family};

/// A cache type of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct TypeInfo {
    /// As asked for.
    pub id: i32,
    /// Of the type; a spec's text.
    pub name: String,
    /// Of a spec, its first type.
    pub family: String,
    /// 0 for a family or a spec.
    pub head_size: usize,
    /// Bytes of a row of one head; 0 for a family or a spec.
    pub row_bytes: usize,
    /// Bits per value; for a family, those of head size 128; of a spec, its first type's.
    pub bits: f64,
    /// May it hold keys?
    pub serves_k: bool,
    /// May it hold values?
    pub serves_v: bool,
    /// Cells that are coded together.
    pub group_cells: usize,
    /// False for a spec of f32, f16 and bf16 alone.
    pub quantized: bool,
}

impl TypeInfo {
    /// None where the id is not one of ours.
    pub fn of(id: i32) -> Option<TypeInfo> {
        if let Some(spec) = registry::by_id(id) {
            return Some(TypeInfo::of_spec(id, spec));
        }
        Some(match table::by_id(id)? {
            Entry::Family(f) => TypeInfo::of_family(f),
            Entry::Concrete(c) => TypeInfo::of_concrete(c),
        })
    }

    fn of_family(f: &'static Family) -> TypeInfo {
        TypeInfo {
            id: f.id(),
            name: f.name.into(),
            family: f.name.into(),
            head_size: 0,
            row_bytes: 0,
            bits: f.at(128).map_or(0.0, Concrete::bits_per_value),
            serves_k: f.serves(Side::K),
            serves_v: f.serves(Side::V),
            group_cells: f.at(128).map_or(1, Concrete::group_cells),
            quantized: true,
        }
    }

    fn of_concrete(c: Concrete) -> TypeInfo {
        TypeInfo {
            id: c.id(),
            name: c.name(),
            head_size: c.head_size,
            row_bytes: c.row_bytes(),
            bits: c.bits_per_value(),
            group_cells: c.group_cells(),
            ..TypeInfo::of_family(c.family)
        }
    }

    fn of_spec(id: i32, spec: &Spec) -> TypeInfo {
        let serves = |side| spec.members().all(|m| m.check_side(side).is_ok());
        TypeInfo {
            id,
            name: spec.text().into(),
            family: spec.default().name(),
            head_size: 0,
            row_bytes: 0,
            bits: spec.default().bits_per_value(),
            serves_k: serves(Side::K),
            serves_v: serves(Side::V),
            group_cells: 1,
            quantized: spec.members().any(Member::is_quantized),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> TypeInfo {
        TypeInfo::of(registry::id_of(text).unwrap()).unwrap()
    }

    #[test]
    fn every_kind_of_id_is_described() {
        let family = info("delta4");
        assert_eq!((family.name.as_str(), family.head_size, family.row_bytes), ("delta4", 0, 0));
        assert!(family.group_cells > 1 && family.serves_k && !family.serves_v && family.bits == 4.5);
        let concrete = info("srft4_128");
        assert_eq!((concrete.name.as_str(), concrete.family.as_str()), ("srft4_128", "srft4"));
        assert_eq!((concrete.head_size, concrete.row_bytes, concrete.group_cells), (128, 68, 1));
        let spec = info("srft4,0=delta4");
        assert_eq!((spec.name.as_str(), spec.family.as_str()), ("srft4,0=delta4", "srft4"));
        assert!(spec.serves_k && !spec.serves_v && spec.quantized && spec.bits == 4.25);
        assert!(!info("f16,0=f32").quantized);
        for id in [-1, 0, 127, registry::SPEC_LIMIT] {
            assert_eq!(TypeInfo::of(id), None, "{id} is not ours");
        }
    }
}
