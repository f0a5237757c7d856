//! Calibrations: the file that says how the keys of a model are turned before they are stored (docs/calibration.md).
//!
//! Any K type may have one, by `cal=FILE`. A family that needs one finds it beside the model where a spec names none.

use super::{registry, Member, Spec};
use crate::codec::band::Band;
use crate::codec::RowFormat;
use crate::table::{self, Concrete, Entry};
use std::path::{Path, PathBuf};

/// Bits of a code up to which a calibration pays.
const MOST_BITS: u32 = 4;

/// A type, of a spec the one of the layers that nothing else is said of, at its smallest head size if it says none.
fn concrete(id: i32) -> Option<Concrete> {
    let entry = match registry::by_id(id).map(Spec::default) {
        Some(Member::Ours(entry)) => entry,
        Some(Member::Native(_)) => return None,
        None => table::by_id(id)?,
    };
    match entry {
        Entry::Concrete(c) => Some(c),
        Entry::Family(f) => f.smallest(),
    }
}

/// The bands that the rows of a type have: it needs a calibration, whose bands of components go where
/// [`Band::order`] says.
pub fn bands(id: i32) -> Option<Band> {
    concrete(id)?.format().grouped()?.bands()
}

/// Do keys of this type gain by a calibration? Those do that are predicted, and coded in few bits. Where they were asked for, layers
/// of other types, to which the guard raises large keys, are not calibrated: turning such keys loses more than it gains.
pub fn gains(id: i32) -> bool {
    concrete(id).is_some_and(|c| c.format().grouped().is_some() && c.family.bits <= MOST_BITS)
}

/// Does a K tensor of this type need a calibration?
pub fn needs(id: i32) -> bool {
    bands(id).is_some()
}

/// The file that a cache type names.
pub fn file(id: i32) -> Option<&'static str> {
    registry::by_id(id)?.calibration.as_deref()
}

/// Where the calibration of a model is, unless it is said: `model.gguf` has `model.kv-cal.gguf`.
pub fn beside(model: &Path) -> PathBuf {
    model.with_extension("kv-cal.gguf")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_or_lies_beside_the_model() {
        let id = |text: &str| registry::id_of(text).unwrap();
        assert_eq!(file(id("delta4,cal=a b/c=d.gguf,recent=0")), Some("a b/c=d.gguf"));
        assert_eq!((file(id("delta4,recent=0")), file(id("delta4")), file(-1)), (None, None, None));
        assert_eq!(beside(Path::new("x/smol.Q4_1.gguf")), Path::new("x/smol.Q4_1.kv-cal.gguf"));
        assert_eq!(beside(Path::new("model")), Path::new("model.kv-cal.gguf"));
    }

    #[test]
    fn types_that_stand_alone_need_none() {
        for text in ["f16", "srft4_64", "delta4_128", "qjl1_64"] {
            assert!(!needs(registry::id_of(text).unwrap()), "{text}");
        }
        for text in ["band4", "band3_64", "band2_256"] {
            assert!(needs(registry::id_of(text).unwrap()), "{text}");
        }
        assert!(!needs(-1));
    }

    #[test]
    fn delta_and_bands_gain() {
        for (text, expected) in [
            ("delta3", true),
            ("band4_128", true),
            ("delta4,0=srft8,recent=0", true),
            ("srft8_64", false),
            ("delta8_64", false),
            ("f16", false),
        ] {
            assert_eq!(gains(registry::id_of(text).unwrap()), expected, "{text}");
        }
        assert!(!gains(-1));
    }
}
