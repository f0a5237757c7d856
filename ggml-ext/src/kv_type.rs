//! A cache type as programs name it.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::error::Error;
use crate::table::{self, Concrete, Entry, Family};
use std::fmt;
use std::str::FromStr;

/// ggml's own types that a cache can have: name, ggml's id, values and bytes of a block.
struct Native {
    name: &'static str,
    id: i32,
    block: usize,
    bytes: usize,
}

const fn native(name: &'static str, id: i32, block: usize, bytes: usize) -> Native {
    Native { name, id, block, bytes }
}

/// In the order in which llama.cpp lists them.
static NATIVES: [Native; 9] = [
    native("f32", 0, 1, 4),
    native("f16", 1, 1, 2),
    native("bf16", 30, 1, 2),
    native("q8_0", 8, 32, 34),
    native("q4_0", 2, 32, 18),
    native("q4_1", 3, 32, 20),
    native("iq4_nl", 20, 32, 18),
    native("q5_0", 6, 32, 22),
    native("q5_1", 7, 32, 24),
];

/// The type of a K or V cache: a family of this crate (`srft4`), a family at one head size (`srft4_128`), or one of
/// ggml's own (`f16`, `q8_0`, …).
///
/// It parses from the names that llama.cpp's `--cache-type-k` takes and prints as one of them.
///
/// ```
/// use ggml_ext::KvType;
///
/// let k: KvType = "srft4".parse()?;
/// assert_eq!(k.to_string(), "srft4");
/// assert_eq!(k.bits_per_value(128), Some(4.5));
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
pub struct KvType(Kind);

#[derive(Clone, Copy)]
enum Kind {
    Family(&'static Family),
    Concrete(Concrete),
    Native(&'static Native),
}

impl KvType {
    /// Half-precision floats, llama.cpp's default.
    pub const F16: KvType = KvType(Kind::Native(&NATIVES[1]));

    /// All types that can be asked for by name, ggml's own first.
    ///
    /// ```
    /// let names: Vec<_> = ggml_ext::KvType::all().map(|t| t.to_string()).collect();
    /// assert!(names.contains(&"f16".to_string()) && names.contains(&"srft4".to_string()));
    /// ```
    pub fn all() -> impl Iterator<Item = KvType> {
        let natives = NATIVES.iter().map(Kind::Native);
        natives.chain(table::families().iter().map(Kind::Family)).map(KvType)
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
        if let Some(native) = NATIVES.iter().find(|n| n.id == id) {
            return Some(KvType(Kind::Native(native)));
        }
        table::by_id(id).map(KvType::from_entry)
    }

    fn from_entry(entry: Entry) -> KvType {
        match entry {
            Entry::Family(f) => KvType(Kind::Family(f)),
            Entry::Concrete(c) => KvType(Kind::Concrete(c)),
        }
    }

    /// The number that llama.cpp takes for it, as `ggml_type`. It never changes.
    pub fn id(self) -> i32 {
        match self.0 {
            Kind::Family(f) => f.id(),
            Kind::Concrete(c) => c.id(),
            Kind::Native(n) => n.id,
        }
    }

    /// Is it one of this crate's types, not ggml's own?
    pub fn is_ours(self) -> bool {
        !matches!(self.0, Kind::Native(_))
    }

    /// May it hold keys?
    pub fn serves_k(self) -> bool {
        self.family().is_none_or(|f| f.serves_k)
    }

    /// May it hold values?
    pub fn serves_v(self) -> bool {
        self.family().is_none_or(|f| f.serves_v)
    }

    fn family(self) -> Option<&'static Family> {
        match self.0 {
            Kind::Family(f) => Some(f),
            Kind::Concrete(c) => Some(c.family),
            Kind::Native(_) => None,
        }
    }

    /// The head sizes that it serves; empty for ggml's own types, which serve every multiple of their block.
    ///
    /// ```
    /// use ggml_ext::KvType;
    /// assert_eq!("srft4_128".parse::<KvType>()?.head_sizes(), [128]);
    /// assert!(KvType::F16.head_sizes().is_empty() && KvType::F16.serves_head_size(123));
    /// # Ok::<(), ggml_ext::Error>(())
    /// ```
    pub fn head_sizes(self) -> Vec<usize> {
        match self.0 {
            Kind::Family(f) => f.head_sizes().to_vec(),
            Kind::Concrete(c) => vec![c.head_size],
            Kind::Native(_) => Vec::new(),
        }
    }

    /// Can a head of this size be stored?
    pub fn serves_head_size(self, head_size: usize) -> bool {
        self.row_bytes(head_size).is_some()
    }

    /// Bytes of one head of one cell; None where that head size is not served.
    pub fn row_bytes(self, head_size: usize) -> Option<usize> {
        match self.0 {
            Kind::Native(n) => {
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
            Kind::Native(_) => self.serves_head_size(head_size).then_some(self),
            _ => self.concrete(head_size).map(|c| KvType(Kind::Concrete(c))),
        }
    }

    fn concrete(self, head_size: usize) -> Option<Concrete> {
        match self.0 {
            Kind::Family(f) => f.at(head_size),
            Kind::Concrete(c) => (c.head_size == head_size).then_some(c),
            Kind::Native(_) => None,
        }
    }

    /// [`KvType::row_bytes`] as an error that says what would do.
    pub(crate) fn row_bytes_or_error(self, head_size: usize) -> Result<usize, Error> {
        self.row_bytes(head_size).ok_or_else(|| {
            let what = match self.0 {
                Kind::Native(n) => format!("multiples of {}", n.block),
                _ => self.head_sizes().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            };
            Error::new(format!("{self} does not serve head size {head_size} (it serves {what})"))
        })
    }
}

impl FromStr for KvType {
    type Err = Error;

    fn from_str(name: &str) -> Result<KvType, Error> {
        if let Some(native) = NATIVES.iter().find(|n| n.name == name) {
            return Ok(KvType(Kind::Native(native)));
        }
        table::by_name(name).map(KvType::from_entry).ok_or_else(|| {
            let names: Vec<_> = KvType::all().map(|t| t.to_string()).collect();
            Error::new(format!("no cache type '{name}': there are {}", names.join(", ")))
        })
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Kind::Family(family) => f.pad(family.name),
            Kind::Concrete(c) => f.pad(&c.name()),
            Kind::Native(n) => f.pad(n.name),
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
        let concrete = table::concrete().map(|c| KvType(Kind::Concrete(c)));
        for t in KvType::all().chain(concrete) {
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
            ("srft4", 80, Some(5.0)),
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
