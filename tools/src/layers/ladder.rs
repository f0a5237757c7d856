//! The types that the layers of one side may have, and specs of them.

use anyhow::{bail, ensure, Context, Result};
use ggml_ext::guard;
use ggml_ext::spec::{self, Member, Side};
use ggml_ext::KvType;

/// Types of one kind, the smallest first.
#[derive(Debug, PartialEq)]
pub struct Ladder {
    /// What their names begin with.
    pub kind: &'static str,
    pub types: &'static [&'static str],
}

const LADDERS: [Ladder; 3] = [
    Ladder { kind: "band", types: &["band2", "band3", "band4", "delta8"] },
    Ladder { kind: "delta", types: &["delta3", "delta4", "delta8"] },
    Ladder { kind: "srft", types: &["srft2", "srft3", "srft4", "srft8"] },
];

impl Ladder {
    fn of(side: Side, name: &str) -> Result<&'static Ladder> {
        let serves = |ladder: &&Ladder| side == Side::K || ladder.kind == "srft";
        let found = LADDERS.iter().filter(serves).find(|l| name.starts_with(l.kind) && l.types.contains(&name));
        found.with_context(|| {
            let own = |l: &'static Ladder| l.types.iter().copied().filter(|name| name.starts_with(l.kind));
            let types: Vec<&str> = LADDERS.iter().filter(serves).flat_map(own).collect();
            format!("{name} has no finer and coarser types to choose from: {side} may be {}", types.join(", "))
        })
    }

    /// The mean squared error of a type, relative to what it codes.
    pub fn squared_error(&self, name: &str) -> f64 {
        Member::by_name(name).map_or(1.0, |member| f64::from(guard::error_of(member)).powi(2))
    }
}

/// One side of a pair that all layers have, and what else its spec says.
#[derive(Clone, Debug, PartialEq)]
pub struct Half {
    pub side: Side,
    pub ladder: &'static Ladder,
    /// The type that was asked for.
    pub usual: usize,
    pub guard: bool,
    pub recent: Option<u32>,
    pub calibration: Option<String>,
}

impl Half {
    pub fn parse(text: &str, side: Side) -> Result<Half> {
        let parsed = spec::parse(text)?;
        ensure!(
            parsed.members().count() == 1,
            "{text} names layers, which is what this command finds: give a type, and cal=, recent= or guard= if you like"
        );
        let name = parsed.default().name();
        let ladder = Ladder::of(side, &name)?;
        let usual = ladder.types.iter().position(|&t| t == name).context("it was found by this name")?;
        if ladder.kind == "srft" && parsed.calibration.is_some() {
            bail!("{name} loses by a calibration (docs/calibration.md): leave cal= out, or ask for bands or delta");
        }
        let spec::Spec { guard, recent, calibration, .. } = parsed;
        Ok(Half { side, ladder, usual, guard, recent, calibration })
    }

    /// The type of a rung, as a layer that is not named gets it.
    pub fn kind(&self, rung: usize) -> Result<KvType> {
        let guard = if self.guard { "" } else { ",guard=off" };
        Ok(format!("{}{guard}", self.ladder.types[rung]).parse()?)
    }

    /// The type that layers are measured by: the coarsest, which is seen best, or the next finer one where they have that.
    pub fn probe(&self) -> usize {
        usize::from(self.usual == 0)
    }

    /// The spec that has these layers at other types, numbers ascending; with as many recent cells, if that is said.
    pub fn spec(&self, others: &[(usize, usize)], recent: Option<u32>) -> String {
        let types = self.ladder.types;
        let mut text = types[self.usual].to_string();
        for run in others.chunk_by(|a, b| a.0 + 1 == b.0 && a.1 == b.1) {
            let (first, last) = (run[0], run[run.len() - 1].0);
            text += &match first.0 == last {
                true => format!(",{last}={}", types[first.1]),
                false => format!(",{}-{last}={}", first.0, types[first.1]),
            };
        }
        if !self.guard {
            text += ",guard=off";
        }
        if let Some(cells) = recent {
            text += &format!(",recent={cells}");
        }
        if let Some(file) = &self.calibration {
            text += &format!(",cal={file}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_has_fewer_errors_with_each_rung() {
        for ladder in &LADDERS {
            let errors: Vec<f64> = ladder.types.iter().map(|name| ladder.squared_error(name)).collect();
            assert!(errors.windows(2).all(|pair| pair[0] > pair[1] && pair[1] > 0.0), "{}: {errors:?}", ladder.kind);
        }
    }

    #[test]
    fn a_half_keeps_what_its_spec_says() {
        let half = Half::parse("band4,cal=a/b.gguf,recent=64", Side::K).unwrap();
        assert_eq!((half.ladder.kind, half.usual, half.recent), ("band", 2, Some(64)));
        assert_eq!(half.spec(&[], half.recent), "band4,recent=64,cal=a/b.gguf");
        let others = [(0, 1), (3, 1), (4, 1), (5, 3), (7, 3)];
        assert_eq!(half.spec(&others, Some(0)), "band4,0=band3,3-4=band3,5=delta8,7=delta8,recent=0,cal=a/b.gguf");
        assert_eq!((half.probe(), Half::parse("band2", Side::K).unwrap().probe()), (0, 1));
        let off = Half::parse("srft4,guard=off", Side::K).unwrap();
        assert_eq!(
            (off.spec(&[], None).as_str(), off.kind(1).unwrap().to_string().as_str()),
            ("srft4,guard=off", "srft3,guard=off")
        );
        for half in [&half, &off] {
            spec::parse(&half.spec(&others, Some(0))).unwrap();
        }
    }

    #[test]
    fn what_has_no_ladder_is_refused_with_what_has() {
        let refused = |text: &str, side| Half::parse(text, side).unwrap_err().to_string();
        for (text, side) in [("q4_0", Side::K), ("polar4", Side::K), ("band4_64", Side::K), ("delta4", Side::V)] {
            let e = refused(text, side);
            assert!(e.contains("srft4") && e.contains("band4") == (side == Side::K), "{e}");
        }
        assert!(refused("srft4,0=srft8", Side::V).contains("names layers"));
        assert!(refused("srft4,swa=srft8", Side::V).contains("names layers"));
        assert!(refused("srft4,cal=x", Side::K).contains("loses by a calibration"));
        assert!(refused("nosuch", Side::K).contains("srft4"));
    }
}
