//! What runs on an NVIDIA GPU: the ops, what caches go through there and between it and the CPU, and a real model.

use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Result};

use super::model::{Bench, TEXT};
use super::{life, program, Options, Tally};
use kv::compare::{Perplexity, Setup};
use kv::pair::Pair;
use kv::{build_tree, cache, model, process};

const OPS: &str = "kv-test-cuda";
const SANITIZER: &str = "compute-sanitizer";

/// Layers of a model that are on the GPU: all, some of SmolLM2's 30, and some of the three of `kv-test-life`'s.
const ALL: &str = "99";
const SOME: &str = "12";
const SOME_OF_THREE: &str = "2";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let build = build_tree::Options { cuda: true, ..build_tree::Options::default() };
    let targets = [OPS, life::PROGRAM, life::CALIBRATE, "llama-completion", "llama-perplexity", "llama-server"];
    let bin = tally.timed("build", || build_tree::build(&build, &targets.map(String::from)))?;
    ops(options, &bin, tally)?;
    sanitized(options, &bin, tally);
    caches(options, &bin, tally)?;
    let bench = Bench::new(&bin, &model::default_model()?);
    answers(&bench, tally);
    life::server::run(options, &bin, bench.model(), tally);
    quality(options, &bin, bench.model(), tally)
}

/// The list of ops, and again what GPUs run that have no bulk copies, and what is left where ggml has no kernel.
fn ops(options: &Options, bin: &Path, tally: &mut Tally) -> Result<()> {
    program::run(&mut Command::new(bin.join(OPS)), OPS, options, tally)?;
    for path in ["rows", "tile"] {
        let mut others = Command::new(bin.join(OPS));
        others.args(["--filter", "srft4"]).env("GGML_EXT_CUDA_PATH", path);
        program::run(&mut others, &format!("{OPS}, GGML_EXT_CUDA_PATH={path}"), options, tally)?;
    }
    Ok(())
}

/// A layer token by token, which has every launch that begins early, under CUDA's own tool. It slows kernels down a hundredfold.
fn sanitized(options: &Options, bin: &Path, tally: &mut Tally) {
    if options.quick {
        return tally.skip(SANITIZER, 4, "not in --quick: it takes minutes");
    }
    if !process::run(Command::new(SANITIZER).arg("--version"), None).is_ok_and(|done| done.status.success()) {
        return tally.missing(SANITIZER, "it is not there: install the CUDA toolkit, or put it into PATH");
    }
    let raced = ["srft4/srft4 d=128", "delta3/srft3 d=64", "band4/srft4 d=128"] // of the short list
        .map(|of| ("racecheck", format!("steps of {of}")));
    for (tool, filter) in [("memcheck", "steps".to_string())].into_iter().chain(raced) {
        tally.check(&format!("{tool} of {filter}"), || {
            let mut c = Command::new(SANITIZER);
            // A captured graph that cannot be updated is captured anew: ggml asks and takes no for an answer.
            c.args(["--tool", tool, "--error-exitcode", "3", "--report-api-errors", "no"]);
            c.arg(bin.join(OPS)).args(["--quick", "--filter", &filter]);
            let done = process::run(&mut c, None)?;
            let text = done.text();
            // Hazards that may be none are warnings, which do not change the exit status.
            let silent = tool != "racecheck" || text.contains("(0 errors, 0 warnings)");
            ensure!(done.status.success() && silent, "{}\n{}", done.status, process::tail(&text, 40));
            Ok(())
        });
    }
}

/// States of caches on the GPU, from there to the CPU and back, and with some layers on each.
fn caches(options: &Options, bin: &Path, tally: &mut Tally) -> Result<()> {
    for (layers, filter) in [(ALL, "state"), (SOME_OF_THREE, "state in order"), (SOME_OF_THREE, "state of a sequence")]
    {
        let scratch = cache::Scratch::new()?;
        let mut c = Command::new(bin.join(life::PROGRAM));
        c.arg("--dir").arg(scratch.path()).arg("--calibrate").arg(bin.join(life::CALIBRATE));
        c.args(["--gpu-layers", layers, "--filter", filter]);
        program::run(&mut c, &format!("{}, {layers} layers on the GPU, {filter}", life::PROGRAM), options, tally)?;
    }
    Ok(())
}

/// Greedy answers of a model that is decided about them.
fn answers(bench: &Bench, tally: &mut Tally) {
    for (k, v) in [("srft8", "srft8"), ("srft4", "srft4"), ("delta4", "srft4")] {
        for layers in [ALL, SOME] {
            tally.check(&format!("llama-completion -ngl {layers} answers with {k}/{v} as with f16"), || {
                let types = ["--cache-type-k", k, "--cache-type-v", v];
                bench.same_answer("llama-completion", TEXT, &["-no-cnv", "-ngl", layers], &types)
            });
        }
    }
    for (layers, places) in [(ALL, &["CUDA0"][..]), (SOME, &["CUDA0", "CPU"])] {
        tally.check(&format!("with -ngl {layers} the cache lies on {}", places.join(" and ")), || {
            let types = ["--cache-type-k", "srft4", "--cache-type-v", "srft4"];
            let common = ["-no-cnv", "-p", TEXT, "-n", "1", "-lv", "4", "-ngl", layers];
            let text = bench.tool("llama-completion", &[&common[..], &types].concat())?.text();
            for device in ["CUDA0", "CPU"] {
                let there = text.contains(&format!("{device} KV buffer size"));
                ensure!(there == places.contains(&device), "{device}: {there}\n{}", process::tail(&text, 40));
            }
            Ok(())
        });
    }
}

/// KL divergence from what the CPU says with f16. The GPU's other sums of weights alone move this model by 0.016, so what counts is
/// how much more a type moves it than srft8, which hardly does. In batches of eight tokens, which our own
/// kernels attend: larger ones go through ggml's.
fn quality(options: &Options, bin: &Path, of: &Path, tally: &mut Tally) -> Result<()> {
    if options.quick {
        tally.skip("KLD on the GPU", 1, "not in --quick: it takes a minute");
        return Ok(());
    }
    let setup = Setup {
        bin: bin.to_path_buf(),
        model: of.to_path_buf(),
        text: model::default_text()?,
        ctx: 512,
        chunks: 6,
        depth: 0,
        threads: kv::cpu::cores(),
    };
    let scratch = cache::Scratch::new()?;
    let run = Perplexity::new(&setup, &scratch.path().join("base"));
    let on_cpu = ["-dev", "none"];
    tally.check("llama-perplexity writes f16's logits", || run.write_base_with(&on_cpu).map(drop));
    let kld = |name: &str, place: &[&str]| -> Result<f64> {
        Ok(run.measure_with(&Pair::parse(name)?, &[place, &["-ub", "8"]].concat())?.statistics.kld)
    };
    let mut least = None;
    tally.check("llama-perplexity srft8 on the GPU and on the CPU", || {
        least = Some((kld("srft8", &["-ngl", ALL])?, kld("srft8", &on_cpu)?));
        Ok(())
    });
    let Some((least_gpu, least_cpu)) = least else { return Ok(()) };
    for name in ["srft4,recent=0", "delta4,recent=0/srft4,recent=0", "delta3,recent=0/srft3,recent=0"] {
        tally.check(&format!("{name} loses on the GPU what it loses on the CPU"), || {
            let (gpu, cpu) = (kld(name, &["-ngl", ALL])? - least_gpu, kld(name, &on_cpu)? - least_cpu);
            println!("      {name}: KLD {gpu:.4} more than srft8 on the GPU, {cpu:.4} on the CPU");
            ensure!((gpu - cpu).abs() < 0.1 * cpu + NOISE, "{gpu} on the GPU, {cpu} on the CPU");
            Ok(())
        });
    }
    Ok(())
}

/// Of such a difference over six chunks: about its standard error.
const NOISE: f64 = 0.003;
