//! A cache type as programs name it.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::error::Error;
use crate::spec::{registry, Layer, Member, NativeType, Side, Spec, NATIVE};
use crate::table::{self, Concrete, Entry, Family};
use std::fmt;
use std::str::FromStr;

/// The type of a K or V cache: a family of this crate (`srft4`), a family at one head size (`srft4_128`), one of
/// ggml's own (`f16`, `q8_0`, …), or a spec of them by layer (`srft4,0-1=srft8,-1=f16`).
///
/// It parses from what llama.cpp's `--cache-type-k` takes and prints as that.
///
/// ```
/// use ggml_ext::KvType;
///
/// let k: KvType = "srft4".parse()?;
/// assert_eq!(k.to_string(), "srft4");
/// assert_eq!(k.bits_per_value(128), Some(4.25));
/// assert!(k.serves_k() && k.head_sizes().contains(&64));
///
/// let e = "srft5".parse::<KvType>().unwrap_err().to_string();
/// assert!(e.contains("srft4") && e.contains("q8_0"));
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # With llama-cpp-2
///
/// `KvCacheType` takes any number that ggml knows, so a `KvType` passes through it as `u32` (`i32` on Windows, where C's
/// enums are signed):
///
/// ```
/// # // llama-cpp-2 is not a dependency of this crate; this is its conversion.
/// # #[derive(Debug, PartialEq)] enum KvCacheType { Unknown(u32) }
/// # impl From<u32> for KvCacheType { fn from(id: u32) -> Self { KvCacheType::Unknown(id) } }
/// use ggml_ext::KvType;
///
/// let k: KvType = "srft4".parse()?;
/// let k = KvCacheType::from(u32::from(k)); // for LlamaContextParams::with_type_k
/// assert_eq!(k, KvCacheType::Unknown(159));
/// # Ok::<(), ggml_ext::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct KvType(Named);

#[derive(Clone, Copy)]
enum Named {
    Family(&'static Family),
    Concrete(Concrete),
    Native(&'static NativeType),
    Spec(&'static Spec, i32),
}

impl KvType {
    /// Half-precision floats, llama.cpp's default.
    pub const F16: KvType = KvType(Named::Native(&NATIVE[1]));

    /// All types that can be asked for by name, ggml's own first.
    ///
    /// ```
    /// let names: Vec<_> = ggml_ext::KvType::all().map(|t| t.to_string()).collect();
    /// assert!(names.contains(&"f16".to_string()) && names.contains(&"srft4".to_string()));
    /// ```
    pub fn all() -> impl Iterator<Item = KvType> {
        let natives = NATIVE.iter().map(Named::Native);
        natives.chain(table::families().iter().map(Named::Family)).map(KvType)
    }

    /// The type behind a number that ggml, a state file or a context's parameters hold.
    ///
    /// ```
    /// use ggml_ext::KvType;
    /// assert_eq!(KvType::from_id(1), Some(KvType::F16));
    /// assert_eq!(KvType::from_id(148).unwrap().to_string(), "srft4_128");
    /// assert_eq!(KvType::from_id(127), None);
    /// ```
    pub fn from_id(id: i32) -> Option<KvType> {
        let spec = || registry::by_id(id).map(|spec| KvType(Named::Spec(spec, id)));
        Member::by_id(id).map(KvType::from_member).or_else(spec)
    }

    fn from_member(member: Member) -> KvType {
        KvType(match member {
            Member::Native(p) => Named::Native(p),
            Member::Ours(Entry::Family(f)) => Named::Family(f),
            Member::Ours(Entry::Concrete(c)) => Named::Concrete(c),
        })
    }

    /// The number that llama.cpp takes for it, as `ggml_type`. It never changes, except that of a spec, which is good
    /// for this process alone.
    pub fn id(self) -> i32 {
        match self.0 {
            Named::Family(f) => f.id(),
            Named::Concrete(c) => c.id(),
            Named::Native(n) => n.id,
            Named::Spec(_, id) => id,
        }
    }

    /// Is it one of this crate's types, not ggml's own?
    pub fn is_ours(self) -> bool {
        !matches!(self.0, Named::Native(_))
    }

    /// May it hold keys?
    pub fn serves_k(self) -> bool {
        self.serves(Side::K)
    }

    /// May it hold values?
    pub fn serves_v(self) -> bool {
        self.serves(Side::V)
    }

    fn serves(self, side: Side) -> bool {
        match self.0 {
            Named::Family(f) => f.serves(side),
            Named::Concrete(c) => c.family.serves(side),
            Named::Native(_) => true,
            Named::Spec(spec, _) => spec.members().all(|m| KvType::from_member(m).serves(side)),
        }
    }

    /// The type of one layer of a model: of a spec, what it says of that layer; every other type is itself. llama.cpp may
    /// raise a layer beyond that where it would break the model.
    ///
    /// ```
    /// let k: ggml_ext::KvType = "srft4,0-1=srft8,swa=srft3".parse()?;
    /// let names = [(0, false), (2, false), (3, true)].map(|(i, sliding)| k.for_layer(i, 30, sliding).to_string());
    /// assert_eq!(names, ["srft8", "srft4", "srft3"]);
    /// # Ok::<(), ggml_ext::Error>(())
    /// ```
    pub fn for_layer(self, index: usize, layers: usize, sliding: bool) -> KvType {
        match self.0 {
            Named::Spec(spec, _) => {
                KvType::from_member(spec.member(&Layer { index, n_layer: layers, head_size: 0, sliding }).0)
            }
            _ => self,
        }
    }

    /// The head sizes that it serves; empty for ggml's own types, which serve every multiple of their block, and for a
    /// spec, which serves what its types do.
    ///
    /// ```
    /// use ggml_ext::KvType;
    /// assert_eq!("srft4_128".parse::<KvType>()?.head_sizes(), [128]);
    /// assert!(KvType::F16.head_sizes().is_empty() && KvType::F16.serves_head_size(123));
    /// # Ok::<(), ggml_ext::Error>(())
    /// ```
    pub fn head_sizes(self) -> Vec<usize> {
        match self.0 {
            Named::Family(f) => f.head_sizes(),
            Named::Concrete(c) => vec![c.head_size],
            Named::Native(_) | Named::Spec(..) => Vec::new(),
        }
    }

    /// Can a head of this size be stored?
    pub fn serves_head_size(self, head_size: usize) -> bool {
        self.row_bytes(head_size).is_some()
    }

    /// Bytes of one head of one cell; None where that head size is not served, and for a spec, whose layers differ.
    pub fn row_bytes(self, head_size: usize) -> Option<usize> {
        match self.0 {
            Named::Native(n) => {
                (head_size > 0 && head_size.is_multiple_of(n.block)).then(|| head_size / n.block * n.bytes)
            }
            _ => self.concrete(head_size).map(Concrete::row_bytes),
        }
    }

    /// Bits per value, scales included; None where that head size is not served.
    pub fn bits_per_value(self, head_size: usize) -> Option<f64> {
        self.row_bytes(head_size).map(|bytes| bytes as f64 * 8.0 / head_size as f64)
    }

    /// The type at one head size, which is what tensors of a layer have; ggml's own types stay what they are.
    ///
    /// ```
    /// let k: ggml_ext::KvType = "srft4".parse()?;
    /// assert_eq!(k.at(128).unwrap().to_string(), "srft4_128");
    /// assert!(k.at(100).is_none());
    /// # Ok::<(), ggml_ext::Error>(())
    /// ```
    pub fn at(self, head_size: usize) -> Option<KvType> {
        match self.0 {
            Named::Native(_) => self.serves_head_size(head_size).then_some(self),
            _ => self.concrete(head_size).map(|c| KvType(Named::Concrete(c))),
        }
    }

    fn concrete(self, head_size: usize) -> Option<Concrete> {
        match self.0 {
            Named::Family(f) => f.at(head_size),
            Named::Concrete(c) => (c.head_size == head_size).then_some(c),
            Named::Native(_) | Named::Spec(..) => None,
        }
    }

    /// Cells that are coded together, 1 where each stands alone.
    #[cfg(test)]
    pub(crate) fn group_cells(self, head_size: usize) -> usize {
        self.concrete(head_size).map_or(1, Concrete::group_cells)
    }

    /// Has a model of so many layers all that a spec names?
    pub(crate) fn check_layers(self, side: Side, layers: usize) -> Result<(), Error> {
        match self.0 {
            Named::Spec(spec, _) => spec.check(side, layers).map_err(Error::new),
            _ => Ok(()),
        }
    }

    /// [`KvType::row_bytes`] as an error that says what would do.
    pub(crate) fn row_bytes_or_error(self, head_size: usize) -> Result<usize, Error> {
        self.row_bytes(head_size).ok_or_else(|| {
            let what = match self.0 {
                Named::Spec(..) => return Error::new(format!("{self} has a type a layer: take one of them")),
                Named::Native(n) => format!("multiples of {}", n.block),
                _ => self.head_sizes().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            };
            Error::new(format!("{self} does not serve head size {head_size} (it serves {what})"))
        })
    }
}

impl FromStr for KvType {
    type Err = Error;

    fn from_str(text: &str) -> Result<KvType, Error> {
        let id = registry::id_of(text).map_err(Error::new)?;
        KvType::from_id(id).ok_or_else(|| Error::new(format!("no cache type '{text}'")))
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Named::Family(family) => f.pad(family.name),
            Named::Concrete(c) => f.pad(&c.name()),
            Named::Native(n) => f.pad(n.name),
            Named::Spec(spec, _) => f.pad(spec.text()),
        }
    }
}

impl fmt::Debug for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvType({self}, {})", self.id())
    }
}

impl PartialEq for KvType {
    fn eq(&self, other: &KvType) -> bool {
        self.id() == other.id()
    }
}

impl Eq for KvType {}

impl std::hash::Hash for KvType {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.id().hash(state);
    }
}

/// `ggml_type` where C's enums are unsigned.
impl From<KvType> for u32 {
    fn from(kind: KvType) -> u32 {
        // Ids are never negative.
        kind.id() as u32
    }
}

/// `ggml_type` where C's enums are signed.
impl From<KvType> for i32 {
    fn from(kind: KvType) -> i32 {
        kind.id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_and_id_finds_its_type_again() {
        let concrete = table::concrete().map(|c| KvType(Named::Concrete(c)));
        let spec = "srft4,0-1=srft8,-1=f16".parse::<KvType>().unwrap();
        for t in KvType::all().chain(concrete).chain([spec]) {
            assert_eq!(t.to_string().parse::<KvType>().unwrap(), t);
            assert_eq!(KvType::from_id(t.id()), Some(t));
            assert_eq!(u32::from(t) as i32, i32::from(t));
        }
    }

    #[test]
    fn bits_are_those_of_the_blocks() {
        for (name, size, bits) in [
            ("f16", 80, Some(16.0)),
            ("q8_0", 128, Some(8.5)),
            ("q4_0", 128, Some(4.5)),
            ("q4_0", 80, None),
            ("q5_1", 64, Some(6.0)),
            ("srft4", 80, Some(4.6)),
            ("srft4_128", 64, None),
            ("srft4", 0, None),
            ("f16", 0, None),
        ] {
            assert_eq!(name.parse::<KvType>().unwrap().bits_per_value(size), bits, "{name} at {size}");
        }
    }

    #[test]
    fn a_head_size_that_is_not_served_says_what_is() {
        let e = "srft4".parse::<KvType>().unwrap().row_bytes_or_error(100).unwrap_err().to_string();
        assert!(e.contains("100") && e.contains("64, 80, 96"), "{e}");
        let e = "q4_0".parse::<KvType>().unwrap().row_bytes_or_error(80).unwrap_err().to_string();
        assert!(e.contains("multiples of 32"), "{e}");
    }
}
