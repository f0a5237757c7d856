//! What each layer loses: its K or V by a coarse type, all other keys exact and all other values in 8 bits.
//!
//! Any change of a layer makes the layers behind it round anew, and that alone moves a model: by V of 8 bits in the first layer
//! as far as by V of 8 bits in all, which lose nothing else that could be measured. So all runs have these, and one of them without a
//! coarse layer is the floor that the others are above. With f16 instead the floor would fall from layer to layer, and a
//! coarse last layer, behind which little is rounded, would look worse than it is beside others.
//!
//! Most layers lose in proportion to the squared error of a type. Some lose more by 4 bits than follows from 3 (SmolLM2's V of
//! layer 1: twice as much), and it is those that 8 bits are for. So the layers that lose most are measured by two types.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use anyhow::{ensure, Context, Result};
use ggml_ext::spec::Side;
use serde::{Deserialize, Serialize};

use super::ladder::{Half, Ladder};
use crate::compare::Perplexity;
use crate::pair::Pair;
use crate::progress::Bar;

/// A loss that is a smaller share of the floor cannot be told from nothing.
const LEAST: f64 = 0.05;
const EXACT_K: &str = "f16,recent=0";
const EXACT_V: &str = "srft8";

/// Of the layers of a side, one in so many is measured by a second type.
const SECOND: usize = 4;

/// The KLD of one layer by one type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probed {
    pub layer: usize,
    pub by: String,
    pub kld: f64,
}

/// What was measured of a model: the file of --json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Losses {
    pub model: String,
    pub model_sha: String,
    pub text: String,
    pub build: String,
    pub ctx: u32,
    pub chunks: u32,
    pub k: Vec<Probed>,
    pub v: Vec<Probed>,
    /// The KLD without a coarse layer: rounding alone.
    pub floor: f64,
}

impl Losses {
    pub fn read(path: &Path) -> Result<Losses> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is not a result of cargo kv layers --json", path.display()))
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Are they of this model and of types of this kind?
    pub fn check(&self, model_sha: &str, halves: [&Half; 2]) -> Result<()> {
        ensure!(
            self.model_sha == model_sha,
            "these losses are of {}, another model: measure without --from",
            self.model
        );
        for half in halves {
            let (probe, side) = (half.ladder.probe, half.side);
            ensure!(
                self.side(side).iter().any(|p| p.by == probe),
                "these losses have no {side} by {probe}, which {} needs: measure without --from",
                half.ladder.types[half.usual],
            );
        }
        Ok(())
    }

    fn side(&self, side: Side) -> &[Probed] {
        if side == Side::K {
            &self.k
        } else {
            &self.v
        }
    }

    /// What a layer lost by a type, however little; None where that was not measured.
    pub fn measured(&self, side: Side, layer: usize, by: &str) -> Option<f64> {
        let probed = self.side(side).iter().find(|p| p.layer == layer && p.by == by);
        probed.map(|p| (p.kld - self.floor).max(self.least()))
    }

    /// What cannot be told from nothing.
    fn least(&self) -> f64 {
        LEAST * self.floor
    }

    /// What a layer loses by a type, measured or by its error; None where nothing was measured.
    pub fn of(&self, half: &Half, layer: usize, name: &str) -> Option<f64> {
        let Ladder { probe, second_probe, .. } = *half.ladder;
        let first = self.measured(half.side, layer, probe)?;
        let by_error = |name: &str| first * half.ladder.share(name);
        let second = self.measured(half.side, layer, second_probe).filter(|_| name == second_probe);
        Some(match second {
            Some(second) if second > by_error(name) + self.least() => second,
            _ => by_error(name),
        })
    }
}

/// What is run: the layers of each side, of `layers` in all.
pub struct Probes<'a> {
    pub halves: [&'a Half; 2],
    pub k: Vec<usize>,
    pub v: Vec<usize>,
    pub layers: usize,
    pub calibration: Option<String>,
}

impl Probes<'_> {
    /// The floor is one of them, the base one more.
    pub fn runs(&self) -> u64 {
        let of_side = |layers: &[usize]| layers.len() + layers.len().div_ceil(SECOND);
        (1 + of_side(&self.k) + of_side(&self.v)) as u64
    }

    /// The KLDs of K and of V, and the floor.
    pub fn run(&self, run: &Perplexity, bar: &Bar) -> Result<(Vec<Probed>, Vec<Probed>, f64)> {
        let step = Cell::new(1);
        let kld = |name: &str, k: &str, v: &str| -> Result<f64> {
            bar.begin(step.replace(step.get() + 1), name);
            let kld = run.measure(&Pair { k: k.into(), v: v.into() })?.statistics.kld;
            ensure!(kld.is_finite(), "{name}: the divergence is no number");
            Ok(kld)
        };
        let of_layer = |side: Side, layer: usize, by: &str| -> Result<Probed> {
            let name = format!("layer {layer}, {side} by {by}");
            let kld = match side {
                Side::K => {
                    kld(&name, &Half::in_one_layer(by, layer, self.layers, self.calibration.as_deref()), EXACT_V)?
                }
                Side::V => kld(&name, EXACT_K, &format!("{EXACT_V},{layer}={by}"))?,
            };
            Ok(Probed { layer, by: by.into(), kld })
        };
        let of_side = |half: &Half, layers: &[usize]| -> Result<Vec<Probed>> {
            let first = layers.iter().map(|&layer| of_layer(half.side, layer, half.ladder.probe));
            let mut all = first.collect::<Result<Vec<_>>>()?;
            for layer in worst(&all) {
                all.push(of_layer(half.side, layer, half.ladder.second_probe)?);
            }
            Ok(all)
        };
        let floor = kld("rounding", EXACT_K, EXACT_V)?;
        let [half_k, half_v] = self.halves;
        Ok((of_side(half_k, &self.k)?, of_side(half_v, &self.v)?, floor))
    }
}

/// The layers that lose most.
fn worst(probed: &[Probed]) -> Vec<usize> {
    let mut sorted: Vec<&Probed> = probed.iter().collect();
    sorted.sort_by(|a, b| b.kld.total_cmp(&a.kld));
    sorted.iter().take(probed.len().div_ceil(SECOND)).map(|p| p.layer).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::cache::Scratch;

    /// By three bits.
    pub fn losses(k: &[f64], v: &[f64]) -> Losses {
        let probed = |klds: &[f64], by: &str| {
            klds.iter().enumerate().map(|(layer, &kld)| Probed { layer, by: by.into(), kld }).collect::<Vec<_>>()
        };
        Losses {
            model: "m.gguf".into(),
            model_sha: "1234".into(),
            text: "t".into(),
            build: "b".into(),
            ctx: 512,
            chunks: 1,
            k: probed(k, "band3"),
            v: probed(v, "srft3"),
            floor: 0.004,
        }
    }

    fn half(text: &str) -> Half {
        Half::parse(text, if text.starts_with("srft") { Side::V } else { Side::K }).unwrap()
    }

    #[test]
    fn a_loss_is_above_the_floor_and_follows_the_error() {
        let (k, v) = (half("band4"), half("srft4"));
        let mut of = losses(&[0.0045, 0.014, 0.0], &[0.014; 5]);
        let close = |got: Option<f64>, wanted: f64| assert!((got.unwrap() - wanted).abs() < 1e-8, "{got:?} {wanted}");
        close(of.of(&k, 0, "band3"), 0.0005);
        close(of.of(&k, 1, "band3"), 0.010);
        close(of.of(&k, 2, "band3"), 0.0002);
        assert_eq!(of.of(&k, 3, "band3"), None);
        close(of.of(&v, 4, "srft4"), 0.010 * 0.075 * 0.075 / (0.155 * 0.155));
        // Measured, and more than that or not.
        of.v.push(Probed { layer: 4, by: "srft4".into(), kld: 0.010 });
        of.v.push(Probed { layer: 3, by: "srft4".into(), kld: 0.0041 });
        close(of.of(&v, 4, "srft4"), 0.006);
        assert_eq!(of.of(&v, 3, "srft4"), of.of(&v, 2, "srft4"));
        assert_eq!(of.of(&v, 4, "srft8"), of.of(&v, 3, "srft8"));
    }

    #[test]
    fn the_worst_are_measured_twice() {
        let of = losses(&[0.1, 0.4, 0.2, 0.3, 0.0], &[0.1]);
        assert_eq!(worst(&of.k), [1, 3]);
        assert_eq!(worst(&of.v), [0]);
        assert_eq!(worst(&[]), [0; 0]);
    }

    #[test]
    fn a_file_serves_other_pairs_of_the_same_kinds() {
        let dir = Scratch::new().unwrap();
        let file = dir.path().join("l.json");
        let of = losses(&[0.01], &[0.02]);
        of.write(&file).unwrap();
        assert_eq!(Losses::read(&file).unwrap(), of);
        let v = half("srft3");
        of.check("1234", [&half("band3"), &v]).unwrap();
        let e = of.check("1234", [&half("delta4"), &v]).unwrap_err().to_string();
        assert!(e.contains("no K by delta3") && e.contains("delta4 needs"), "{e}");
        assert!(of.check("1235", [&half("band3"), &v]).unwrap_err().to_string().contains("another model"));
        fs::write(&file, "{}").unwrap();
        assert!(Losses::read(&file).unwrap_err().to_string().contains("--json"));
    }
}
