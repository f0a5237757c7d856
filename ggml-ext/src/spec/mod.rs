//! Cache specs: which layer of a cache has which type.
//!
//! ```text
//! srft4                        every layer
//! srft4,0-1=srft8,-1=f16       layers by number, from the end where negative
//! delta4,swa=srft4             layers with a sliding window
//! srft4,guard=off              without the guard
//! srft4,recent=64              precise rows of the last 64 cells; 0 for none
//! delta4,cal=FILE              keys turned by a calibration of the model
//! ```
//!
//! A spec stands wherever a type's name does. llama.cpp carries a cache type as a number from the command line to the
//! constructor of its cache and knows nothing of layers on the way; so a parsed spec is kept for the life of the process
//! and the number of its place ([`registry`]) travels instead. The constructor asks for each layer, and gets the id of a
//! type that tensors can have. State files hold those alone, so a spec's number never leaves the process.
//!
//! A layer that is named by number has that type, whatever else is said; where several ranges name it, the last one
//! counts. A layer with a sliding window has the type of `swa`, if given. All others have the first type.

pub mod calibration;
mod check;
mod info;
mod parse;
pub mod recent;
pub mod registry;

pub use check::{check_cache, idle_parts, AskedType, ContextKind};
pub use info::TypeInfo;
pub use parse::{parse, SpecError};

use crate::table::{self, Concrete, Entry, Family};
use std::fmt;

/// A cache type of ggml's own.
#[derive(Debug, PartialEq, Eq)]
pub struct NativeType {
    /// As llama.cpp's tools name it.
    pub name: &'static str,
    /// ggml's id.
    pub id: i32,
    /// Values of a block.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
}

/// What llama.cpp itself takes for a cache.
pub static NATIVE: [NativeType; 9] = [
    NativeType { name: "f32", id: 0, block: 1, bytes: 4 },
    NativeType { name: "f16", id: 1, block: 1, bytes: 2 },
    NativeType { name: "bf16", id: 30, block: 1, bytes: 2 },
    NativeType { name: "q8_0", id: 8, block: 32, bytes: 34 },
    NativeType { name: "q5_1", id: 7, block: 32, bytes: 24 },
    NativeType { name: "q5_0", id: 6, block: 32, bytes: 22 },
    NativeType { name: "q4_1", id: 3, block: 32, bytes: 20 },
    NativeType { name: "q4_0", id: 2, block: 32, bytes: 18 },
    NativeType { name: "iq4_nl", id: 20, block: 32, bytes: 18 },
];

impl NativeType {
    /// ggml's type of that id, if a cache may have it.
    pub fn by_id(id: i32) -> Option<&'static NativeType> {
        NATIVE.iter().find(|p| p.id == id)
    }

    /// Bits per value, scales included.
    pub fn bits_per_value(&self) -> f64 {
        8.0 * self.bytes as f64 / self.block as f64
    }
}

/// A side of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    K,
    /// Values.
    V,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Side::K { "K" } else { "V" })
    }
}

impl Family {
    /// May it hold this side?
    pub fn serves(&self, side: Side) -> bool {
        side == Side::K || self.sides.serve_v()
    }
}

/// A type that a spec names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// ggml's.
    Native(&'static NativeType),
    /// Ours.
    Ours(Entry),
}

impl Member {
    /// The type of that name, ggml's or ours.
    pub fn by_name(name: &str) -> Option<Member> {
        let plain = NATIVE.iter().find(|p| p.name == name).map(Member::Native);
        plain.or_else(|| table::by_name(name).map(Member::Ours))
    }

    /// The type of that id, ggml's or ours.
    pub fn by_id(id: i32) -> Option<Member> {
        NativeType::by_id(id).map(Member::Native).or_else(|| table::by_id(id).map(Member::Ours))
    }

    /// Of a type of ours.
    pub fn family(self) -> Option<&'static Family> {
        match self {
            Member::Native(_) => None,
            Member::Ours(Entry::Family(f)) => Some(f),
            Member::Ours(Entry::Concrete(c)) => Some(c.family),
        }
    }

    /// Its id.
    pub fn id(self) -> i32 {
        match self {
            Member::Native(p) => p.id,
            Member::Ours(Entry::Family(f)) => f.id(),
            Member::Ours(Entry::Concrete(c)) => c.id(),
        }
    }

    /// Its name.
    pub fn name(self) -> String {
        match self {
            Member::Native(p) => p.name.into(),
            Member::Ours(Entry::Family(f)) => f.name.into(),
            Member::Ours(Entry::Concrete(c)) => c.name(),
        }
    }

    /// Are its values in blocks with a scale?
    pub fn is_quantized(self) -> bool {
        !matches!(self, Member::Native(NativeType { block: 1, .. }))
    }

    /// Bits per value; for a family, those of head size 128.
    pub fn bits_per_value(self) -> f64 {
        match self {
            Member::Native(p) => p.bits_per_value(),
            Member::Ours(Entry::Family(f)) => f.at(128).map_or(0.0, Concrete::bits_per_value),
            Member::Ours(Entry::Concrete(c)) => c.bits_per_value(),
        }
    }

    /// Bits per value at a head size; those of head size 128 where it does not serve that one.
    pub fn bits_at(self, head_size: usize) -> f64 {
        match self {
            Member::Ours(Entry::Family(f)) => f.at(head_size).map_or(self.bits_per_value(), Concrete::bits_per_value),
            _ => self.bits_per_value(),
        }
    }

    /// Is it for this side of the cache?
    pub fn check_side(self, side: Side) -> Result<(), String> {
        let Some(family) = self.family().filter(|f| !f.serves(side)) else { return Ok(()) };
        let others: Vec<_> = table::families().iter().filter(|f| f.serves(side)).map(|f| f.name).collect();
        Err(format!(
            "{} is not for {side} ({}): use {} or ggml's own",
            family.name,
            family.sides.refusal(),
            others.join(", ")
        ))
    }

    /// The id of the type that a layer's tensor gets.
    pub fn resolve(self, side: Side, layer: &Layer) -> Result<i32, String> {
        let Layer { index, head_size, .. } = *layer;
        let heads = |f: &Family| f.head_sizes().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let ggml = if head_size % 32 == 0 { "f16, bf16, q8_0 or q4_0" } else { "f16 or bf16" };
        match self {
            Member::Native(p) if head_size % p.block == 0 => Ok(p.id),
            Member::Native(p) => Err(format!(
                "layer {index}: {side} cache type {} has blocks of {}, which do not divide this layer's head size {head_size}; use {ggml} for {side} here",
                p.name, p.block
            )),
            Member::Ours(Entry::Family(f)) => f.at(head_size).map(Concrete::id).ok_or_else(|| {
                format!(
                    "layer {index}: {side} cache type {} does not serve head size {head_size} (it serves {}); use {ggml} for {side} with this model",
                    f.name,
                    heads(f)
                )
            }),
            Member::Ours(Entry::Concrete(c)) if c.head_size == head_size => Ok(c.id()),
            Member::Ours(Entry::Concrete(c)) => Err(format!(
                "layer {index}: {side} cache type {} is for heads of {}, this layer has {head_size}; use {} and each layer gets its size",
                c.name(),
                c.head_size,
                c.family.name
            )),
        }
    }
}

/// "srft8, srft4, … and of ggml's f32, f16, …"
pub fn names() -> String {
    let plain: Vec<_> = NATIVE.iter().map(|p| p.name).collect();
    format!("{}, and of ggml's own {}", table::family_names(), plain.join(", "))
}

/// A layer of a model, as its cache is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its number, from 0.
    pub index: usize,
    /// Layers of the model.
    pub n_layer: usize,
    /// Values of a head on the side that is asked for.
    pub head_size: usize,
    /// Does it attend to a window alone?
    pub sliding: bool,
}

/// What a layer of a model keeps of its K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// It has none, or uses another layer's.
    Nothing,
    /// All cells.
    All,
    /// Those of a sliding window.
    Window,
}

/// Layers by number: both ends belong to it, negative numbers count from the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    first: i32,
    last: i32,
}

impl Range {
    /// The layers of a model with `n_layer`; why not, where there are no such layers.
    fn within(self, n_layer: usize) -> Result<std::ops::RangeInclusive<usize>, String> {
        let n = i64::try_from(n_layer).unwrap_or(i64::MAX);
        let place = |layer: i32| {
            let from_start = if layer < 0 { n + i64::from(layer) } else { i64::from(layer) };
            if (0..n).contains(&from_start) {
                Ok(from_start as usize)
            } else {
                Err(format!("the model has no layer {layer}: its {n} layers are 0 to {}, or -{n} to -1", n - 1))
            }
        };
        let (first, last) = (place(self.first)?, place(self.last)?);
        if first > last {
            return Err(format!("it ends before it begins: of {n} layers, it is {first} to {last}"));
        }
        Ok(first..=last)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Range { first, last } if first == last => write!(f, "{first}"),
            Range { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

/// A parsed spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    text: String,
    default: Member,
    layers: Vec<(Range, Member)>,
    sliding: Option<Member>,
    /// May the guard raise layers?
    pub guard: bool,
    /// Cells that are kept as precise rows too, where that is said.
    pub recent: Option<u32>,
    /// The file of a calibration of the model, where one is named.
    pub calibration: Option<String>,
}

impl Spec {
    /// As the user wrote it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The type of the layers that nothing else is said of.
    pub fn default(&self) -> Member {
        self.default
    }

    /// One type for all layers and nothing else said: then a type's own id says the same.
    pub fn alone(&self) -> Option<Member> {
        let only_types = self.recent.is_none() && self.calibration.is_none();
        let plain = self.layers.is_empty() && self.sliding.is_none() && self.guard && only_types;
        plain.then_some(self.default)
    }

    /// All types in it.
    pub fn members(&self) -> impl Iterator<Item = Member> + '_ {
        std::iter::once(self.default).chain(self.layers.iter().map(|l| l.1)).chain(self.sliding)
    }

    /// As the user wrote it, cut where it would take a message over.
    fn shown(&self) -> String {
        const MOST: usize = 100;
        match self.text.char_indices().nth(MOST) {
            Some((end, _)) => format!("{}…", &self.text[..end]),
            None => self.text.clone(),
        }
    }

    /// Can it be this side's, with so many layers?
    pub fn check(&self, side: Side, n_layer: usize) -> Result<(), String> {
        for member in self.members() {
            member.check_side(side).map_err(|e| format!("{side} cache type {}: {e}", self.shown()))?;
        }
        if let Some(file) = self.calibration.as_deref().filter(|_| side == Side::V) {
            return Err(format!(
                "{side} cache type {}: cal={file} is said of keys: put it in --cache-type-k, and values are calibrated too",
                self.shown()
            ));
        }
        for (range, member) in &self.layers {
            range
                .within(n_layer)
                .map_err(|e| format!("{side} cache type {}: layers {range}={}: {e}", self.shown(), member.name()))?;
        }
        Ok(())
    }

    /// The parts that change nothing on a model of these layers, each with the reason: what is named and not there is most
    /// likely a slip.
    pub fn idle_parts(&self, layers: &[Keeps]) -> Vec<String> {
        let mut idle = Vec::new();
        for (range, member) in &self.layers {
            let any = range.within(layers.len()).is_ok_and(|r| layers[r].iter().any(|l| *l != Keeps::Nothing));
            if !any {
                idle.push(format!("{range}={} does nothing: no such layer keeps K and V of its own", member.name()));
            }
        }
        if let Some(member) = self.sliding.filter(|_| !layers.contains(&Keeps::Window)) {
            idle.push(format!("swa={} does nothing: no layer has a sliding window", member.name()));
        }
        idle.extend(recent::idle(self));
        idle
    }

    /// The type of one layer, and whether it was named for this very layer.
    pub fn member(&self, layer: &Layer) -> (Member, bool) {
        let named = |range: &Range| range.within(layer.n_layer).is_ok_and(|layers| layers.contains(&layer.index));
        if let Some((_, member)) = self.layers.iter().rev().find(|(range, _)| named(range)) {
            return (*member, true);
        }
        (self.sliding.filter(|_| layer.sliding).unwrap_or(self.default), false)
    }
}

#[cfg(test)]
mod tests;
