//! What each layer loses: its K or V by the coarsest type, all others as the pair has them.
//!
//! The pair itself is what these runs are compared with, and not f16. Any change of a layer makes the layers behind it round anew, which
//! alone moves a model, and errors of many layers are less together than the sum of what each is alone. Beside
//! f16 a harmless layer loses by that too: SmolLM2's V of layer 6 has a third of what layer 1 has by 2 bits, and beside band4/srft4 a
//! sixth. K of layer 0 loses a little, and beside band4/srft4 nothing.
//!
//! What counts is the KLD that one token in ten is beyond. The mean of a thousand tokens hangs on a few of them.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use anyhow::{ensure, Context, Result};
use ggml_ext::spec::Side;
use serde::{Deserialize, Serialize};

use super::ladder::Half;
use crate::compare::Perplexity;
use crate::pair::Pair;
use crate::progress::Bar;

/// A loss that is a smaller share of the pair's own divergence cannot be told from nothing.
const LEAST: f64 = 0.03;

/// The KLD of a text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kld {
    pub mean: f64,
    /// What one token in ten is beyond.
    pub p90: f64,
}

/// The KLD with one layer by another type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probed {
    pub layer: usize,
    pub kld: Kld,
}

/// One side, layer by layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probes {
    /// The type of all layers but one.
    pub usual: String,
    /// The type of that one.
    pub probe: String,
    pub layers: Vec<Probed>,
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
    /// Of the pair as it is.
    pub kld: Kld,
    pub k: Probes,
    pub v: Probes,
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
            let Probes { usual, probe, .. } = self.side(half.side);
            ensure!(
                [usual, probe].iter().all(|name| half.ladder.types.contains(&name.as_str())),
                "these losses are of {usual} and {probe} as {}, which say nothing of {}: measure without --from",
                half.side,
                half.ladder.types[half.usual],
            );
        }
        Ok(())
    }

    pub fn side(&self, side: Side) -> &Probes {
        if side == Side::K {
            &self.k
        } else {
            &self.v
        }
    }

    /// How far the probe moved a layer for the worse, or a finer one for the better; None where that was not measured.
    pub fn measured(&self, half: &Half, layer: usize) -> Option<f64> {
        let Probes { usual, probe, layers } = self.side(half.side);
        let is_coarser = half.ladder.squared_error(probe) > half.ladder.squared_error(usual);
        let sign = if is_coarser { 1.0 } else { -1.0 };
        layers.iter().find(|p| p.layer == layer).map(|p| sign * (p.kld.p90 - self.kld.p90))
    }

    /// What a layer loses by a type, in proportion to its squared error; None where nothing was measured.
    pub fn of(&self, half: &Half, layer: usize, name: &str) -> Option<f64> {
        let error = |name: &str| half.ladder.squared_error(name);
        let Probes { usual, probe, .. } = self.side(half.side);
        let measured = self.measured(half, layer)?.max(LEAST * self.kld.p90);
        Some(measured / (error(probe) - error(usual)).abs() * error(name))
    }
}

/// Measures layers of K and of V; the KLD of the pair as it is comes first.
pub fn measure(
    run: &Perplexity,
    bar: &Bar,
    halves: [&Half; 2],
    layers: [&[usize]; 2],
) -> Result<(Kld, Probes, Probes)> {
    let step = Cell::new(1);
    let kld = |name: &str, k: &[(usize, usize)], v: &[(usize, usize)]| -> Result<Kld> {
        bar.begin(step.replace(step.get() + 1), name);
        let pair = Pair { k: halves[0].spec(k, Some(0)), v: halves[1].spec(v, None) };
        let measured = run.measure(&pair)?;
        let (mean, p90) = (measured.statistics.kld, measured.kld_90.unwrap_or(f64::NAN));
        ensure!(mean.is_finite() && p90.is_finite(), "{name}: the divergence is no number");
        Ok(Kld { mean, p90 })
    };
    let side = |half: &Half, layers: &[usize]| -> Result<Probes> {
        let [usual, probe] = [half.usual, half.probe()].map(|rung| half.ladder.types[rung].to_string());
        let probed = layers.iter().map(|&layer| {
            let name = format!("layer {layer}, {} by {probe}", half.side);
            let other = [(layer, half.probe())];
            let kld = if half.side == Side::K { kld(&name, &other, &[]) } else { kld(&name, &[], &other) }?;
            Ok(Probed { layer, kld })
        });
        let layers = probed.collect::<Result<Vec<_>>>()?;
        Ok(Probes { usual, probe, layers })
    };
    let uniform = kld("the pair as it is", &[], &[])?;
    Ok((uniform, side(halves[0], layers[0])?, side(halves[1], layers[1])?))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::cache::Scratch;

    /// Of a pair with a KLD of 0.01, by what one token in ten is beyond.
    pub fn losses(k: &[f64], v: &[f64]) -> Losses {
        let probes = |klds: &[f64], usual: &str, probe: &str| {
            let layers =
                klds.iter().enumerate().map(|(layer, &p90)| Probed { layer, kld: Kld { mean: 0.0, p90 } }).collect();
            Probes { usual: usual.into(), probe: probe.into(), layers }
        };
        Losses {
            model: "m.gguf".into(),
            model_sha: "1234".into(),
            text: "t".into(),
            build: "b".into(),
            ctx: 512,
            chunks: 1,
            kld: Kld { mean: 0.0, p90: 0.01 },
            k: probes(k, "band4", "band2"),
            v: probes(v, "srft4", "srft2"),
        }
    }

    fn half(text: &str) -> Half {
        Half::parse(text, if text.starts_with("srft") { Side::V } else { Side::K }).unwrap()
    }

    #[test]
    fn a_loss_follows_the_squared_error() {
        let v = half("srft3");
        let mut of = losses(&[], &[0.02, 0.0101, 0.005]);
        let (two, four) = (v.ladder.squared_error("srft2"), v.ladder.squared_error("srft4"));
        let close = |got: Option<f64>, wanted: f64| assert!((got.unwrap() - wanted).abs() < 1e-9, "{got:?} {wanted}");
        close(of.of(&v, 0, "srft4"), 0.01 * four / (two - four));
        close(of.of(&v, 0, "srft2").zip(of.of(&v, 0, "srft4")).map(|(a, b)| a - b), 0.01);
        // As little as the one cannot be told from a gain.
        assert_eq!(of.of(&v, 1, "srft2"), of.of(&v, 2, "srft2"));
        close(of.of(&v, 1, "srft2").zip(of.of(&v, 1, "srft4")).map(|(a, b)| a - b), 0.0003);
        assert_eq!(of.of(&v, 3, "srft2"), None);
        // A finer probe takes the loss away.
        (of.v.usual, of.v.probe) = ("srft2".into(), "srft4".into());
        close(of.of(&v, 2, "srft2").zip(of.of(&v, 2, "srft4")).map(|(a, b)| a - b), 0.005);
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
        assert!(e.contains("of band4 and band2 as K") && e.contains("nothing of delta4"), "{e}");
        assert!(of.check("1235", [&half("band3"), &v]).unwrap_err().to_string().contains("another model"));
        fs::write(&file, "{}").unwrap();
        assert!(Losses::read(&file).unwrap_err().to_string().contains("--json"));
    }
}
