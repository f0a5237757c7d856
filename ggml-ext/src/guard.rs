//! The guard: keeps a layer's K at a higher type where few bits would break it.
//!
//! A coded key is wrong by about the family's relative error times the key's size, and a score by that times the
//! query's: σ = scale · sqrt(d) · rms(q) · rms(k) · error(bits). Softmax forgives errors well below 1 and nothing above.
//! Where a key's size comes from the model and not from the text, it can be known before a token is seen:
//!
//! - A bias of the K projection is added to every key. Qwen2.5 has layers where a head's bias has an rms of 80 beside
//!   content of about 1: at 4 bits the error is larger than the content. What rms(q) is cannot be seen there; it is
//!   taken as 1.
//! - Norms of queries and keys (QK-norm) fix both sizes by their gains, and the attention's scale is known: σ is.
//!
//! The threshold was measured on models with either (docs/guard.md).
//!
//! Without a bias and without norms there is nothing to see, and nothing is raised. Only K is looked at: errors of V are
//! averaged by the weights and never reach softmax. A type that the user named for this very layer is left alone.

use crate::codec::error_of_bits;
use crate::codec::RowFormat;
use crate::spec::{registry, Layer, Member, Side};
use crate::table::{self, Entry, Family};

/// The guard looks at families of so many bits a code and fewer.
const MOST_BITS: u32 = 4;

/// What is tried instead, the smallest first.
const LADDER: [&str; 5] = ["delta3", "srft4", "delta4", "delta8", "f16"];

/// The largest σ that is left alone.
pub const MOST: f32 = 0.6;

/// What a model tells of a layer before it has read anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weights<'a> {
    /// Added to the keys of all heads, one after the other; empty: none.
    pub k_bias: &'a [f32],
    /// Gains of the norm of queries, for one head or for all; empty: none.
    pub q_norm: &'a [f32],
    /// The same of keys.
    pub k_norm: &'a [f32],
    /// What scores are multiplied by; 0: one over the root of the head size.
    pub scale: f32,
}

/// The same with values of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerWeights {
    /// As in [`Weights`].
    pub k_bias: Vec<f32>,
    /// As in [`Weights`].
    pub q_norm: Vec<f32>,
    /// As in [`Weights`].
    pub k_norm: Vec<f32>,
    /// As in [`Weights`].
    pub scale: f32,
}

impl LayerWeights {
    /// For the functions below.
    pub fn borrow(&self) -> Weights<'_> {
        Weights { k_bias: &self.k_bias, q_norm: &self.q_norm, k_norm: &self.k_norm, scale: self.scale }
    }
}

/// A layer that got more than was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Raised {
    /// The type it gets.
    pub to: Member,
    /// One line for the log.
    pub reason: String,
}

/// Root mean square error of scores by a family, relative to what is coded.
fn error_of_family(family: &'static Family) -> f32 {
    family.smallest().map_or(0.0, |c| c.format().score_error())
}

/// Root mean square error of scores by a type, relative to what is coded; 0 of floats.
pub fn error_of(member: Member) -> f32 {
    match member {
        Member::Native(p) if p.block == 1 => 0.0,
        Member::Native(p) => error_of_bits(p.bits_per_value() as u32),
        Member::Ours(Entry::Family(f)) => error_of_family(f),
        Member::Ours(Entry::Concrete(c)) => error_of_family(c.family),
    }
}

fn rms(values: &[f32]) -> f32 {
    if values.is_empty() {
        return 0.0;
    }
    (values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / values.len() as f64).sqrt() as f32
}

/// The largest of the heads: one broken head breaks a layer.
fn rms_of_worst_head(values: &[f32], head_size: usize) -> f32 {
    values.chunks(head_size.max(1)).map(rms).fold(0.0, f32::max)
}

/// What a model tells of the size of a layer's scores.
struct Seen {
    /// rms(q) · rms(k) · scale · sqrt(d)
    size: f32,
    /// What tells it.
    by: String,
}

fn seen(weights: &Weights, head_size: usize) -> Seen {
    let root = (head_size as f32).sqrt();
    let scale = if weights.scale == 0.0 { 1.0 } else { weights.scale * root };
    let (q, k) = (rms_of_worst_head(weights.q_norm, head_size), rms_of_worst_head(weights.k_norm, head_size));
    if q > 0.0 && k > 0.0 {
        let by = format!("its norms have gains of {q:.1} for queries and {k:.1} for keys (rms)");
        return Seen { size: scale * q * k, by };
    }
    let bias = rms_of_worst_head(weights.k_bias, head_size);
    Seen { size: scale * bias, by: format!("its K bias has an rms of {bias:.1} in a head") }
}

/// What a layer gets instead of `asked`, if it must.
pub fn raise(asked: Member, side: Side, layer: &Layer, weights: &Weights) -> Option<Raised> {
    let guarded = match asked {
        Member::Ours(Entry::Family(f)) => f.bits <= MOST_BITS,
        Member::Ours(Entry::Concrete(c)) => c.family.bits <= MOST_BITS,
        Member::Native(_) => false,
    };
    if !guarded || side != Side::K {
        return None;
    }
    let Seen { size, by } = seen(weights, layer.head_size);
    // Exact is exact, however large the values; a bias that is no number says nothing.
    let error = |member| if error_of(member) == 0.0 { 0.0 } else { size * error_of(member) };
    if error(asked).is_nan() || error(asked) <= MOST {
        return None;
    }
    let more_bits = |m: Member| m.bits_at(layer.head_size) - asked.bits_at(layer.head_size);
    let fits = |m: &Member| m.resolve(side, layer).is_ok() && more_bits(*m) > 0.0 && error(*m) <= MOST;
    let to = LADDER.iter().filter_map(|name| Member::by_name(name)).find(fits)?;
    Some(Raised {
        to,
        reason: format!(
            "layer {}: K raised from {} to {}: {by}, scores would be wrong by {:.1}; +{:.2} bits/value of its K (guard=off keeps {})",
            layer.index,
            asked.name(),
            to.name(),
            error(asked),
            more_bits(to),
            asked.name()
        ),
    })
}

/// The type of a layer's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// A type that a tensor can have.
    pub id: i32,
    /// Why it is a higher one than was asked for, where it is: one line for the log.
    pub raised: Option<String>,
}

/// What a layer gets for a cache type that was asked for: ids that are neither a family's nor a spec's come back as they are.
pub fn resolve(id: i32, side: Side, layer: &Layer, weights: &Weights) -> Result<Resolved, String> {
    let (member, guarded) = match registry::by_id(id) {
        Some(spec) => {
            spec.check(side, layer.n_layer)?;
            let (member, named) = spec.member(layer);
            (member, spec.guard && !named)
        }
        None => match table::by_id(id) {
            Some(ours) => (Member::Ours(ours), true),
            None => return Ok(Resolved { id, raised: None }),
        },
    };
    // What cannot be had at all is an error, not something to raise.
    let asked = member.resolve(side, layer)?;
    match guarded.then(|| raise(member, side, layer, weights)).flatten() {
        Some(raised) => Ok(Resolved { id: raised.to.resolve(side, layer)?, raised: Some(raised.reason) }),
        None => Ok(Resolved { id: asked, raised: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: Layer = Layer { index: 3, n_layer: 10, head_size: 64, sliding: false };

    fn raised(asked: &str, weights: Weights) -> Option<String> {
        raise(Member::by_name(asked).unwrap(), Side::K, &LAYER, &weights).map(|r| r.to.name())
    }

    fn bias(rms: f32) -> Vec<f32> {
        // One head is quiet, the other is not.
        (0..128).map(|i| if i < 64 { 0.1 } else { rms * if i % 2 == 0 { 1.0 } else { -1.0 } }).collect()
    }

    #[test]
    fn a_huge_bias_raises_and_a_small_one_does_not() {
        let with = |asked: &str, rms: f32| raised(asked, Weights { k_bias: &bias(rms), ..Weights::default() });
        assert_eq!(with("srft4", 1.0), None);
        assert_eq!(with("srft4", 7.0), None);
        assert_eq!(with("srft4", 15.0).as_deref(), Some("delta4"));
        assert_eq!(with("srft4", 30.0).as_deref(), Some("delta8"));
        assert_eq!(with("srft4_64", 80.0).as_deref(), Some("delta8"));
        assert_eq!(with("srft4", 1e4).as_deref(), Some("f16"));
        let scaled = |scale| raised("srft4", Weights { k_bias: &bias(15.0), scale, ..Weights::default() });
        assert_eq!(scaled(0.125).as_deref(), Some("delta4"), "as said by 0");
        assert_eq!(scaled(0.05), None, "scores are smaller, and so is what they are wrong by");
        assert_eq!(scaled(0.5).as_deref(), Some("delta8"));
        assert_eq!(with("srft3", 5.0).as_deref(), Some("delta3"), "no more than needed");
        assert_eq!(with("srft2", 25.0).as_deref(), Some("delta8"));
        assert_eq!(with("polar4", 5.0).as_deref(), Some("srft4"), "coarser at as many bits, and never to fewer");
        assert_eq!(with("delta4", 15.0), None, "neighbours share it");
        assert_eq!(with("delta4", 30.0).as_deref(), Some("delta8"));
        for asked in ["srft8", "q4_0", "f16"] {
            assert_eq!(with(asked, 80.0), None, "{asked} is not guarded");
        }
    }

    #[test]
    fn norms_tell_the_size_of_scores() {
        let with = |q: f32, k: f32, scale: f32| {
            raised("srft4", Weights { q_norm: &[q; 64], k_norm: &[k; 64], scale, k_bias: &[] })
        };
        assert_eq!(with(1.0, 4.7, 0.0), None);
        assert_eq!(with(1.0, 4.7, 0.125), None, "as said by 0");
        assert_eq!(with(2.0, 4.7, 0.125).as_deref(), Some("delta4"), "the worst of Gemma 3");
        assert_eq!(with(5.0, 4.7, 0.125).as_deref(), Some("delta8"));
        // Scale 1 with gains to match is no different from another scale.
        assert_eq!(with(0.125, 4.7, 1.0), None);
        assert_eq!(with(1.0, 4.7, 1.0).as_deref(), Some("delta8"), "8 times as much");
    }

    #[test]
    fn nothing_to_see_raises_nothing() {
        assert_eq!(raised("srft2", Weights::default()), None);
        assert_eq!(raised("srft4", Weights { k_bias: &[f32::NAN; 64], ..Weights::default() }), None);
        assert_eq!(
            raised("srft4", Weights { k_bias: &[f32::INFINITY; 64], ..Weights::default() }).as_deref(),
            Some("f16")
        );
        let v = raise(
            Member::by_name("srft4").unwrap(),
            Side::V,
            &LAYER,
            &Weights { k_bias: &bias(80.0), ..Weights::default() },
        );
        assert_eq!(v, None, "V is left alone");
    }

    #[test]
    fn the_line_says_what_why_and_what_it_costs() {
        let member = Member::by_name("srft4").unwrap();
        let line =
            raise(member, Side::K, &LAYER, &Weights { k_bias: &bias(80.0), ..Weights::default() }).unwrap().reason;
        for part in ["layer 3", "from srft4 to delta8", "rms of 80.0", "+4.50 bits/value of its K", "guard=off"] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
    #[test]
    fn a_layer_gets_what_its_spec_or_the_guard_says() {
        let id = |text: &str| registry::id_of(text).unwrap();
        let (quiet, loud) = (Weights::default(), bias(80.0));
        let loud = Weights { k_bias: &loud, ..Weights::default() };
        let got = |text: &str, weights: &Weights| resolve(id(text), Side::K, &LAYER, weights).unwrap();
        assert_eq!(got("srft4", &quiet), Resolved { id: id("srft4_64"), raised: None });
        let raised = got("srft4", &loud);
        assert_eq!(raised.id, id("delta8_64"));
        assert!(raised.raised.unwrap().contains("from srft4 to delta8"));
        for left_alone in ["srft4,guard=off", "srft8,3=srft4"] {
            assert_eq!(got(left_alone, &loud), Resolved { id: id("srft4_64"), raised: None }, "{left_alone}");
        }
        assert_eq!(got("q4_0", &loud).id, id("q4_0"));
        let odd = Layer { head_size: 72, ..LAYER };
        assert!(resolve(id("srft4"), Side::K, &odd, &quiet).unwrap_err().contains("does not serve head size 72"));
    }
}
