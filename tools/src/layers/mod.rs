//! `cargo kv layers`: what each layer of a model loses, and the specs by layer that lose least in as many bytes.
//!
//! Layers are measured one at a time ([`losses`]), types are chosen by what their errors are ([`choose`]), and what comes out is
//! measured beside the pair that was asked for: neither does a loss follow the square of an error to the last bit, nor do losses
//! of layers add up exactly.

mod choose;
mod ladder;
mod losses;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use ggml_ext::spec::{calibration, Side};
use ggml_ext::{CacheSize, ContextShape, KvType, LayerShape, ModelShape};

use crate::compare::{Perplexity, Setup};
use crate::pair::Pair;
use crate::progress::Bar;
use crate::table::Table;
use crate::{build_tree, cache, calibrate, cpu, digest, model, plan};

use choose::{Choice, Part};
use ladder::Half;
use losses::{Kld, Losses, Probes};

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// The pair K/V that all layers have so far: K of bands, delta or srft, V of srft
    #[arg(long, value_name = "K/V", default_value = "band4/srft4")]
    pub types: String,
    /// Plain text to measure with (default: the text of cargo kv calibrate)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Tokens per chunk of text when layers are measured
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    pub ctx: u32,
    /// Chunks of text when layers are measured
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: u32,
    /// Bytes that the plan may have more, in percent
    #[arg(long, default_value_t = 0.5, value_name = "PERCENT", value_parser = parse_growth)]
    pub growth: f64,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    /// Write what layers lose there
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Take what layers lose from a file of --json, for another pair of the same kinds
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "ctx", "chunks"])]
    pub from: Option<PathBuf>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

fn parse_growth(text: &str) -> Result<f64, String> {
    let percent = text.parse::<f64>().ok().filter(|p| (0.0..=100.0).contains(p));
    percent.ok_or_else(|| format!("'{text}' is no share in percent, 0 to 100"))
}

/// Two pairs closer than this are alike: another seed of the rotations moves a pair as far (docs/types.md).
const NOISE: f64 = 0.03;
/// The chunks by which plans are proved, where the text has as many tokens, and the most of them.
const PROOF_CTX: [u32; 2] = [2048, 1024];
const PROOF_CHUNKS: u32 = 6;

pub fn layers(options: &Options) -> Result<()> {
    let (k, v) = options.types.rsplit_once('/').unwrap_or((&options.types, &options.types));
    let asked = Asked { k: Half::parse(k.trim(), Side::K)?, v: Half::parse(v.trim(), Side::V)? };
    let path = model::model_or_default(options.model.as_deref())?;
    let model = plan::Model::open(&path)?;
    asked.check(&model)?;
    asked.check_calibration(&path)?;
    let model_sha = digest::file(&path)?;
    let known = options.from.as_deref().map(Losses::read).transpose()?;
    if let Some(known) = &known {
        known.check(&model_sha, asked.halves())?;
    }
    let scratch = cache::Scratch::new()?;
    let (text, text_name) = calibrate::text(options.text.as_deref(), scratch.path())?;
    let bin = build_tree::build(&options.build, &["llama-perplexity".into()])?;
    let threads = options.threads.unwrap_or_else(cpu::cores);
    let Options { ctx, chunks, .. } = *options;
    let setup = Setup { bin, model: path.clone(), text, ctx, chunks, depth: 0, threads };

    let losses = match known {
        Some(known) => known,
        None => {
            let (kld, k, v) = measure(&setup, &asked, &model.shape, scratch.path())?;
            let build = digest::programs(&setup.bin, "perplexity")?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Losses { model: name, model_sha, text: text_name, build, ctx, chunks, kld, k, v }
        }
    };
    if let Some(path) = &options.json {
        losses.write(path)?;
    }
    let planned = asked.plan(&model.shape, &losses, options.growth)?;
    print!("{}", planned.as_text(&asked, &losses));
    if planned.is_uniform() {
        println!("No layers gain by other types at this size: keep {}.", asked.uniform(None).name());
        return Ok(());
    }
    let proof = Proof::measure(&setup, &model.shape, &asked, &planned, scratch.path())?;
    print!("\n{}", proof.as_text(&asked, &planned));
    Ok(())
}

fn measure(setup: &Setup, asked: &Asked, shape: &ModelShape, scratch: &Path) -> Result<(Kld, Probes, Probes)> {
    let [k, v] = asked.to_measure(shape)?;
    let base = scratch.join("logits");
    let run = Perplexity::new(setup, &base);
    let bar = Bar::new((2 + k.len() + v.len()) as u64, "layers");
    bar.begin(0, "f16 logits");
    run.write_base()?;
    let measured = losses::measure(&run, &bar, asked.halves(), [&k, &v])?;
    cache::remove(&base)?;
    Ok(measured)
}

/// The pair that was asked for.
struct Asked {
    k: Half,
    v: Half,
}

impl Asked {
    fn halves(&self) -> [&Half; 2] {
        [&self.k, &self.v]
    }

    fn check(&self, model: &plan::Model) -> Result<()> {
        let arch = model.file.architecture();
        ensure!(!model.shape.shares_rows(), "K and V share their rows in {arch}: they cannot have types of their own");
        ensure!(model.shape.layers.iter().any(|l| l.kv_heads > 0), "{arch} models have no KV cache");
        // What llama.cpp would refuse.
        model.cache(&ContextShape::new(512), self.k.kind(self.k.usual)?, self.v.kind(self.v.usual)?)?;
        Ok(())
    }

    /// Is there the file that K is calibrated by?
    fn check_calibration(&self, model: &Path) -> Result<()> {
        let name = self.k.ladder.types[self.k.usual];
        let file = match &self.k.calibration {
            Some(named) => PathBuf::from(named),
            None if calibration::needs(self.k.kind(self.k.usual)?.id()) => calibration::beside(model),
            None => return Ok(()),
        };
        ensure!(
            file.is_file(),
            "{name} needs a calibration, and there is none at {}: make one by `cargo kv calibrate -m {}`, or name one, {name},cal=FILE",
            file.display(),
            model.display()
        );
        Ok(())
    }

    /// The same types in all layers.
    fn uniform(&self, recent: Option<u32>) -> Pair {
        Planned::default().pair(self, recent)
    }

    /// The layers whose K and V are measured: those that the guard raises have the type they need.
    fn to_measure(&self, shape: &ModelShape) -> Result<[Vec<usize>; 2]> {
        let free = |half: &Half| -> Result<Vec<usize>> {
            let mut layers = Vec::new();
            for (i, layer) in shape.layers.iter().enumerate().filter(|(_, layer)| layer.kv_heads > 0) {
                if shape.resolve(i, layer, half.side, half.kind(half.usual)?)?.raised.is_none() {
                    layers.push(i);
                }
            }
            Ok(layers)
        };
        Ok([free(&self.k)?, free(&self.v)?])
    }

    /// The types by layer that lose least.
    fn plan(&self, shape: &ModelShape, losses: &Losses, growth: f64) -> Result<Planned> {
        let mut parts = Vec::new();
        let mut places = Vec::new();
        for (half, layers) in self.halves().into_iter().zip(self.to_measure(shape)?) {
            for i in layers {
                let layer = &shape.layers[i];
                let rungs = rungs(half, shape, i, layer)?;
                let usual = rungs.iter().position(|r| r.0 == half.usual).context("the guard leaves it alone")?;
                let loss = |rung: usize| losses.of(half, i, half.ladder.types[rung]);
                let choice = |&(rung, bytes): &(usize, u64)| Some(Choice { bytes, loss: loss(rung)? });
                let Some(choices) = rungs.iter().map(choice).collect() else { continue };
                // Layers with a window keep fewer cells.
                parts.push(Part { pool: usize::from(layer.slides()), choices, usual });
                places.push((half.side, i, rungs));
            }
        }
        let chosen = choose::choose(&parts, growth);
        let mut planned = Planned::default();
        for ((part, (side, layer, rungs)), choice) in parts.iter().zip(places).zip(chosen) {
            planned.loss_before += part.choices[part.usual].loss;
            planned.loss += part.choices[choice].loss;
            if choice != part.usual {
                if side == Side::K { &mut planned.k } else { &mut planned.v }.push((layer, rungs[choice].0));
            }
        }
        Ok(planned)
    }
}

/// The rungs that a layer may have, with the bytes of a cell: not those that the guard would raise.
fn rungs(half: &Half, shape: &ModelShape, i: usize, layer: &LayerShape) -> Result<Vec<(usize, u64)>> {
    let head_size = if half.side == Side::K { layer.k_head_size } else { layer.v_head_size };
    let mut rungs = Vec::new();
    for rung in 0..half.ladder.types.len() {
        let kind: KvType = half.ladder.types[rung].parse()?;
        let left_alone = shape.resolve(i, layer, half.side, half.kind(rung)?).is_ok_and(|r| r.raised.is_none());
        if let Some(row) = kind.row_bytes(head_size).filter(|_| left_alone) {
            rungs.push((rung, (row * layer.kv_heads) as u64));
        }
    }
    Ok(rungs)
}

/// The layers that get another type than was asked for, and what is expected of it.
#[derive(Default)]
struct Planned {
    k: Vec<(usize, usize)>,
    v: Vec<(usize, usize)>,
    loss_before: f64,
    loss: f64,
}

impl Planned {
    fn is_uniform(&self) -> bool {
        self.k.is_empty() && self.v.is_empty()
    }

    fn pair(&self, asked: &Asked, recent: Option<u32>) -> Pair {
        Pair {
            k: asked.k.spec(&self.k, recent.or(asked.k.recent)),
            v: asked.v.spec(&self.v, if recent.is_some() { None } else { asked.v.recent }),
        }
    }

    /// What each layer loses, and what it gets.
    fn as_text(&self, asked: &Asked, losses: &Losses) -> String {
        let [k, v] = [&losses.k, &losses.v].map(|p| &p.probe);
        let (k, v) = (format!("K by {k}"), format!("V by {v}"));
        let mut table = Table::new(&["layer", &k, "gets", &v, "gets"], 0);
        let mut layers: Vec<usize> = losses.k.layers.iter().chain(&losses.v.layers).map(|p| p.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        for layer in layers {
            let mut row = vec![layer.to_string()];
            for (half, others) in asked.halves().into_iter().zip([&self.k, &self.v]) {
                row.push(losses.measured(half, layer).map_or(String::new(), |loss| format!("{loss:.5}")));
                let rung = others.iter().find(|o| o.0 == layer).map(|o| half.ladder.types[o.1]);
                row.push(rung.unwrap_or("").into());
            }
            table.row(row);
        }
        let Losses { model, text, ctx, chunks, kld, .. } = losses;
        format!(
            "{table}\nmodel {model}, {text}, {ctx} x {chunks}: the KLD that one token in ten is beyond, above the {:.5} of {}/{}\nexpected of this plan: {:+.5}\n",
            kld.p90,
            losses.k.usual,
            losses.v.usual,
            self.loss - self.loss_before
        )
    }
}

/// A pair as it was measured, without recent cells or with them.
struct Run {
    bits: f64,
    kld: f64,
}

/// The pair that was asked for and the plan, side by side.
struct Proof {
    ctx: u32,
    /// Uniform and planned, without recent cells.
    plain: [Run; 2],
    /// The same with recent cells, where the pair has any.
    recent: Option<[Run; 2]>,
}

impl Proof {
    fn measure(setup: &Setup, shape: &ModelShape, asked: &Asked, planned: &Planned, scratch: &Path) -> Result<Proof> {
        let (ctx, chunks) = proof_size(setup);
        let setup = Setup { ctx, chunks, ..setup.clone() };
        let run = Perplexity::new(&setup, &scratch.join("logits"));
        let has_recent = asked.k.recent.max(asked.v.recent) != Some(0);
        let bar = Bar::new(if has_recent { 5 } else { 3 }, "proof");
        bar.begin(0, &format!("f16 logits, {ctx} tokens x {chunks}"));
        run.write_base()?;
        let one = |step: u64, pair: Pair| -> Result<Run> {
            bar.begin(step, &pair.name());
            let size = CacheSize::of(shape, &ContextShape::new(ctx as usize), pair.k.parse()?, pair.v.parse()?)?;
            Ok(Run { bits: size.bits_per_value(), kld: run.measure(&pair)?.statistics.kld })
        };
        let plain = [one(1, asked.uniform(Some(0)))?, one(2, planned.pair(asked, Some(0)))?];
        let recent = match has_recent {
            true => Some([one(3, asked.uniform(None))?, one(4, planned.pair(asked, None))?]),
            false => None,
        };
        if plain.iter().chain(recent.iter().flatten()).any(|run| !run.kld.is_finite()) {
            bail!("a divergence is no number: the model breaks with these types");
        }
        Ok(Proof { ctx, plain, recent })
    }

    /// What users run has recent cells, but shows a difference less.
    fn is_better(&self) -> bool {
        let gains = |[before, after]: &[Run; 2], by: f64| after.kld < before.kld * (1.0 - by);
        gains(&self.plain, NOISE) && self.recent.as_ref().is_none_or(|runs| gains(runs, -NOISE))
    }

    fn as_text(&self, asked: &Asked, planned: &Planned) -> String {
        let mut table = Table::new(&["K/V", "bits/value", "KLD", "with recent cells", "KLD"], 1);
        for (i, name) in [asked.uniform(None).name(), "by layer".into()].into_iter().enumerate() {
            let mut row = vec![name, format!("{:.3}", self.plain[i].bits), format!("{:.5}", self.plain[i].kld)];
            let recent = self.recent.as_ref().map(|runs| &runs[i]);
            row.push(recent.map_or("-".into(), |run| format!("{:.3}", run.bits)));
            row.push(recent.map_or("-".into(), |run| format!("{:.5}", run.kld)));
            table.row(row);
        }
        let pair = planned.pair(asked, None);
        let specs = format!("    --cache-type-k {} --cache-type-v {}\n", pair.k, pair.v);
        let less = |[before, after]: &[Run; 2]| {
            let percent = 100.0 * (1.0 - after.kld / before.kld);
            format!("{:.0}% {}", percent.abs(), if percent < 0.0 { "more" } else { "less" })
        };
        let mut gain = format!("{} divergence at {} tokens without recent cells", less(&self.plain), self.ctx);
        if let Some(recent) = &self.recent {
            gain += &format!(", {} with them", less(recent));
        }
        let noise = format!("{:.0}% may be chance", 100.0 * NOISE);
        match self.is_better() {
            true => format!("{table}\n{gain} ({noise}):\n\n{specs}"),
            false => {
                format!("{table}\n{gain}, where {noise}: keep {}. The plan was\n\n{specs}", asked.uniform(None).name())
            }
        }
    }
}

/// Tokens and chunks of the proof: the longest that the text has two of.
fn proof_size(setup: &Setup) -> (u32, u32) {
    // Most vocabularies have a token for four characters, or fewer.
    let tokens = fs::metadata(&setup.text).map_or(0, |m| u32::try_from(m.len() / 4).unwrap_or(u32::MAX));
    let ctx = PROOF_CTX.into_iter().find(|&ctx| tokens >= 2 * ctx).unwrap_or(setup.ctx);
    (ctx, (tokens / ctx).clamp(1, PROOF_CHUNKS))
}

#[cfg(test)]
mod tests {
    use super::losses::tests::losses;
    use super::*;

    fn asked(k: &str, v: &str) -> Asked {
        Asked { k: Half::parse(k, Side::K).unwrap(), v: Half::parse(v, Side::V).unwrap() }
    }

    fn bytes(shape: &ModelShape, pair: &Pair) -> u64 {
        let kind = |text: &str| text.parse::<KvType>().unwrap();
        CacheSize::of(shape, &ContextShape::new(4096), kind(&pair.k), kind(&pair.v)).unwrap().bytes()
    }

    #[test]
    fn a_plan_is_as_large_as_the_pair_and_keeps_its_options() {
        let shape = ModelShape::uniform(10, 3, 64);
        let mut klds = [0.014; 10];
        (klds[1], klds[7]) = (0.9, 0.009);
        let losses = losses(&klds, &klds);
        let asked = asked("band4,cal=c.gguf", "srft4,recent=32");
        let planned = asked.plan(&shape, &losses, 0.0).unwrap();
        assert!(planned.loss < planned.loss_before);
        let pair = planned.pair(&asked, None);
        assert!(pair.k.contains(",1=delta8") && pair.k.ends_with(",cal=c.gguf"), "{}", pair.k);
        assert!(pair.v.contains(",1=srft8") && pair.v.ends_with(",recent=32"), "{}", pair.v);
        let plain = planned.pair(&asked, Some(0));
        assert!(plain.k.contains("recent=0") && !plain.v.contains("recent"), "{} {}", plain.k, plain.v);
        assert!(bytes(&shape, &plain) <= bytes(&shape, &asked.uniform(Some(0))));
        let text = planned.as_text(&asked, &losses);
        assert!(text.contains("K by band2") && text.contains("delta8"), "{text}");
        assert!(asked
            .plan(&shape, &super::losses::tests::losses(&[0.014; 10], &[0.014; 10]), 0.0)
            .unwrap()
            .is_uniform());
    }

    #[test]
    fn layers_with_a_window_pay_for_themselves() {
        let mut local = LayerShape::new(1, 256);
        local.window = Some(512);
        let shape = ModelShape::from_layers([local, LayerShape::new(1, 256)].repeat(5));
        // All that is precious is in layers without a window.
        let klds: Vec<f64> = (0..10).map(|i| if i % 2 == 0 { 0.014 } else { 0.01 + 0.01 * f64::from(i * i) }).collect();
        let asked = asked("band3,recent=0", "srft3");
        let planned = asked.plan(&shape, &losses(&klds, &klds), 0.0).unwrap();
        assert!(!planned.is_uniform());
        for ctx in [1024, 32768] {
            let size = |pair: Pair| {
                let (k, v) = (pair.k.parse().unwrap(), pair.v.parse().unwrap());
                CacheSize::of(&shape, &ContextShape::new(ctx), k, v).unwrap().bytes()
            };
            assert!(size(planned.pair(&asked, None)) <= size(asked.uniform(None)), "{ctx}");
        }
        assert!(planned.k.iter().chain(&planned.v).all(|(layer, _)| layer % 2 == 1));
    }

    #[test]
    fn a_plan_that_gains_nothing_is_not_recommended() {
        let asked = asked("band4", "srft4");
        let planned = Planned { k: vec![(0, 1)], ..Planned::default() };
        let run = |kld: f64| Run { bits: 4.375, kld };
        let mut proof = Proof { ctx: 2048, plain: [run(0.0138), run(0.0127)], recent: None };
        let text = proof.as_text(&asked, &planned);
        assert!(
            text.contains("8% less") && text.contains("--cache-type-k band4,0=band3 --cache-type-v srft4"),
            "{text}"
        );
        proof.plain[1].kld = 0.0136;
        assert!(proof.as_text(&asked, &planned).contains("keep band4/srft4"));
        proof.plain[1].kld = 0.0127;
        proof.recent = Some([run(0.0051), run(0.0060)]);
        assert!(!proof.is_better());
        assert!(proof
            .as_text(&asked, &planned)
            .contains("8% less divergence at 2048 tokens without recent cells, 18% more with them"));
    }

    #[test]
    fn growth_is_a_share() {
        assert_eq!(parse_growth("0.5"), Ok(0.5));
        for bad in ["-1", "x", "nan", "1000"] {
            assert!(parse_growth(bad).unwrap_err().contains("percent"), "{bad}");
        }
    }
}
