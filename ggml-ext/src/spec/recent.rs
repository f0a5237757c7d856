//! Recent cells: how many of them a cache keeps as precise rows too, and of what type.
//!
//! Most attention goes to the last tokens, and theirs are the errors that show. So the rows of the last cells are kept a second
//! time, in 8 bits. K and V of a cache have the same window: a cell's two rows are precise together.

use super::{registry, Member, NativeType, Spec, NATIVE};
use crate::table::{self, Concrete, Entry, Family};

/// Cells of a sequence where nobody says how many.
pub const DEFAULT: u32 = 128;
/// Then at most one in so many cells of the cache.
const SHARE: u32 = 16;

/// The family of precise rows.
fn precise() -> Option<&'static Family> {
    table::families().iter().find(|f| f.name == "srft8")
}

/// Would precise rows beside it be better than its own?
fn gains(member: Member) -> bool {
    member.family().is_some_and(|f| precise().is_some_and(|p| f.bits < p.bits))
}

fn spec_gains(spec: &Spec) -> bool {
    spec.members().any(gains)
}

/// Does a cache type of this id gain by precise rows, and how many cells does it ask for?
fn asked(id: i32) -> (bool, Option<u32>) {
    match registry::by_id(id) {
        Some(spec) => (spec_gains(spec), spec.recent),
        None => (Member::by_id(id).is_some_and(gains), None),
    }
}

/// Cells that a cache of these types keeps as precise rows: of so many cells and sequences that share them, of which each
/// sees `window` back, 0 for all.
///
/// Where both sides say a number, the larger one counts.
pub fn slots(k: i32, v: i32, cells: u32, sequences: u32, window: u32) -> u32 {
    let ((k_gains, k_asked), (v_gains, v_asked)) = (asked(k), asked(v));
    if !k_gains && !v_gains {
        return 0;
    }
    let named = k_asked.max(v_asked);
    let each = named.unwrap_or(DEFAULT).min(if window == 0 { u32::MAX } else { window });
    let most = if named.is_some() { cells } else { cells / SHARE };
    each.saturating_mul(sequences.max(1)).min(most)
}

/// Was a number of cells asked for, on either side?
pub fn is_named(k: i32, v: i32) -> bool {
    asked(k).1.max(asked(v).1).is_some_and(|n| n > 0)
}

/// The types of the precise rows of a layer whose tensors have these types, of which V may be none; None where neither side
/// gains by them.
pub fn types(k: i32, v: Option<i32>) -> Option<(i32, Option<i32>)> {
    let gains = |id: i32| Member::by_id(id).is_some_and(gains);
    // llama.cpp casts a side of f32 before attention, which then has no cells.
    let f32 = NATIVE[0].id;
    if (!gains(k) && !v.is_some_and(gains)) || k == f32 || v == Some(f32) {
        return None;
    }
    Some((type_beside(k)?, v.map(type_beside).map_or(Some(None), |v| v.map(Some))?))
}

/// The type of precise rows beside rows of a tensor's type: the precise one where that is coded, in the space that sums are
/// taken in. Differences of as many bits are finer than whole keys: f16 beside those.
pub fn type_beside(id: i32) -> Option<i32> {
    let f16 = NativeType::by_id(1).map(|f16| f16.id);
    match Member::by_id(id)? {
        Member::Ours(Entry::Concrete(c)) if c.group_cells() > 1 && c.family.bits >= precise()?.bits => f16,
        Member::Ours(Entry::Concrete(c)) => precise()?.at(c.head_size).map(Concrete::id),
        Member::Ours(Entry::Family(_)) => None,
        Member::Native(NativeType { block: 1, id, .. }) => Some(*id),
        Member::Native(_) => f16,
    }
}

/// The part of a spec that changes nothing, if it asks for precise rows that no type of it gains by.
pub(super) fn idle(spec: &Spec) -> Option<String> {
    let names = || spec.members().map(Member::name).collect::<Vec<_>>().join(" and ");
    spec.recent.filter(|&n| n > 0 && !spec_gains(spec)).map(|n| {
        format!("recent={n} does nothing by itself: rows of {} are as precise as those that would be kept", names())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> i32 {
        registry::id_of(text).unwrap()
    }

    fn of(k: &str, v: &str, cells: u32, sequences: u32, window: u32) -> u32 {
        slots(id(k), id(v), cells, sequences, window)
    }

    #[test]
    fn compressed_caches_have_a_window() {
        assert_eq!(of("srft4", "srft4", 8192, 1, 0), 128);
        assert_eq!(of("srft4", "f16", 8192, 4, 0), 512);
        assert_eq!(of("f16", "polar3", 8192, 1, 0), 128);
        assert_eq!(of("srft4", "srft4", 1024, 1, 0), 64, "one in sixteen");
        assert_eq!(of("srft4", "srft4", 1024, 4, 0), 64, "for all sequences together");
        assert_eq!(of("f16", "q8_0", 8192, 1, 0), 0);
        assert_eq!(of("srft8", "srft8", 8192, 1, 0), 0, "rows are as precise as the window's");
        assert_eq!(of("delta8", "srft8", 8192, 1, 0), 0);
        assert_eq!(of("srft8,0=srft4", "srft8", 8192, 1, 0), 128);
    }

    #[test]
    fn a_number_that_is_named_counts() {
        assert_eq!(of("srft4,recent=0", "srft4", 8192, 1, 0), 0);
        assert_eq!(of("srft4,recent=0", "srft4,recent=32", 8192, 1, 0), 32);
        assert_eq!(of("srft4,recent=512", "srft4,recent=32", 8192, 2, 0), 1024);
        assert_eq!(of("srft4,recent=512", "srft4", 256, 1, 0), 256, "no more than there are");
        assert_eq!(of("srft4,recent=512", "srft4", 8192, 1, 100), 100, "no more than a sliding window shows");
        assert!(is_named(id("srft4"), id("srft4,recent=1")) && !is_named(id("srft4"), id("srft4,recent=0")));
    }

    #[test]
    fn types_of_precise_rows() {
        let of = |k: &str, v: Option<&str>| types(id(k), v.map(id));
        assert_eq!(of("delta4_64", Some("srft4_128")), Some((id("srft8_64"), Some(id("srft8_128")))));
        assert_eq!(of("srft8_64", Some("turbo3_64")), Some((id("srft8_64"), Some(id("srft8_64")))));
        assert_eq!(of("srft8_64", Some("f16")), None, "neither gains");
        assert_eq!(of("delta8_64", Some("srft8_64")), None, "neither gains");
        assert_eq!(of("delta8_64", Some("srft4_64")), Some((id("f16"), Some(id("srft8_64")))));
        assert_eq!(of("bf16", Some("srft4_64")), Some((id("bf16"), Some(id("srft8_64")))));
        assert_eq!(of("srft4_64", Some("q4_0")), Some((id("srft8_64"), Some(id("f16")))));
        assert_eq!(of("srft4_576", None), Some((id("srft8_576"), None)));
        assert_eq!(of("srft4_64", Some("f32")), None);
        assert_eq!(of("srft4", None), None, "a family is no tensor's type");
    }
}
