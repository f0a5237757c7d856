//! The whole in emulation: llama.cpp with the types, built for aarch64, against the same on this machine.
//!
//! A real model's perplexities are compared, and the text is chosen so that 0.5% means something. A code of 4 bits falls to
//! one side or the other by the last bit of a sum, and what follows from it is another draw of the same noise: on prose as
//! short as emulation allows, perplexities with the tables of one machine are a few percent apart (docs/neon.md). Years that
//! count upwards are another matter. Each digit is that of the year before or the next one, which the model knows by
//! attention alone, and it is sure of it: the perplexity is 1.00, and noise moves it by a tenth of a percent or two. A cache
//! that is written or read wrongly takes that away; that a code of one bit less does is shown on this machine, where it is
//! cheap.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::super::{program, Options, Tally};
use crate::cross::{self, AARCH64_GXX, AARCH64_ROOT, QEMU};
use kv::{build_tree, cache, model, process};

const TOOL: &str = "llama-perplexity";
const OPS: &str = "kv-test-ops";

const PAIRS: [[&str; 2]; 3] = [["f16", "f16"], ["srft4", "srft4"], ["delta4", "srft4"]];
/// An emulated core is a very slow one. The second half of the context counts.
const LENGTH: [&str; 8] = ["-c", "256", "-b", "256", "--chunks", "1", "-t", "2"];
/// Six tokens each, and the tool wants two contexts; those that count are of 1921 to 1942.
const YEARS: std::ops::Range<u32> = 1900..2100;
/// dotprod and fp16, as the build has them.
const CPU: &str = "cortex-a76";
const TABLE: &str = "dotprod";
/// How far a perplexity may be from this machine's.
const TOLERANCE: f64 = 0.005;
const LIMIT: Duration = Duration::from_secs(1800);

pub fn run(tally: &mut Tally) -> Result<()> {
    if let Err(why) = cross::programs(&[AARCH64_GXX]) {
        tally.missing("llama.cpp in emulation", &why);
        return Ok(());
    }
    let here = build_tree::build(&build_tree::Options::default(), &[TOOL.into()])?;
    let there = build_tree::Options { aarch64: true, ..Default::default() };
    let there = build_tree::build(&there, &[TOOL.into(), OPS.into()])?;
    ops(tally, &there)?;

    let (model, scratch) = (model::default_model()?, cache::Scratch::new()?);
    let text = scratch.path().join("years.txt");
    fs::write(&text, years())?;
    let bench = Bench { model, text };
    let native = |k, v| bench.perplexity(Command::new(here.join(TOOL)), k, v);
    for [k, v] in PAIRS {
        tally.check(&format!("{TOOL} with {k}/{v} on {CPU} as here"), || {
            let (here, emulated) = (native(k, v)?, bench.perplexity(qemu(&there, TOOL), k, v)?);
            let apart = 100.0 * (emulated / here - 1.0);
            println!("      perplexity {here:.4} here, {emulated:.4} emulated: {apart:+.2}%");
            ensure!(agree(emulated, here), "further apart than {}%", 100.0 * TOLERANCE);
            Ok(())
        });
    }
    tally.check("the same text tells srft3/srft3 from srft4/srft4", || {
        let (four, three) = (native("srft4", "srft4")?, native("srft3", "srft3")?);
        println!("      perplexity {four:.4} with srft4, {three:.4} with srft3");
        ensure!(!agree(three, four), "a cache of one bit less would pass");
        Ok(())
    });
    Ok(())
}

/// The ops of ggml's CPU backend against f64, by C and Rust of the other machine.
fn ops(tally: &mut Tally, bin: &Path) -> Result<()> {
    // The list of --quick has every op, type and head size; with all masks and shapes it is an hour of emulation.
    let quick = Options { quick: true, ..Options::default() };
    program::run(&mut qemu(bin, OPS), OPS, &quick, tally)
}

fn qemu(bin: &Path, program: &str) -> Command {
    let mut c = Command::new(QEMU.name);
    c.args(["-cpu", CPU, "-L", AARCH64_ROOT]).arg(bin.join(program)).env("GGML_EXT_ISA", TABLE);
    c
}

fn agree(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() <= TOLERANCE
}

/// `1900, 1901, 1902, …`
fn years() -> String {
    YEARS.map(|n| n.to_string()).collect::<Vec<_>>().join(", ")
}

struct Bench {
    model: PathBuf,
    text: PathBuf,
}

impl Bench {
    fn perplexity(&self, mut c: Command, k: &str, v: &str) -> Result<f64> {
        c.arg("-m").arg(&self.model).arg("-f").arg(&self.text).args(["-fa", "on"]).args(LENGTH);
        c.args(["--cache-type-k", k, "--cache-type-v", v]);
        let done = process::run(&mut c, Some(LIMIT))?;
        let shown = || format!("{} ({})\n{}", process::shown(&c), done.status, process::tail(&done.text(), 20));
        ensure!(done.status.success(), "{}", shown());
        // The library says so where the table that was asked for is not there.
        ensure!(!done.text().contains("is not available here"), "{}", shown());
        final_estimate(&done.text()).with_context(shown)
    }
}

/// `Final estimate: PPL = 55.3739 +/- 12.04522`
fn final_estimate(text: &str) -> Option<f64> {
    text.split_once("Final estimate: PPL =")?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_counts() {
        let text = years();
        assert!(text.starts_with("1900, 1901, 1902, ") && text.ends_with(", 2099"));
    }

    #[test]
    fn half_a_percent_agrees_and_more_does_not() {
        assert!(agree(1.0049, 1.0) && agree(0.9951, 1.0));
        assert!(!agree(1.0051, 1.0) && !agree(0.9949, 1.0));
        assert!(!agree(f64::NAN, 1.0) && !agree(f64::INFINITY, 1.0));
    }

    #[test]
    fn the_estimate_is_read() {
        assert_eq!(final_estimate("[1]80.9458,\nFinal estimate: PPL = 80.9458 +/- 26.1781\n"), Some(80.9458));
        assert_eq!(final_estimate("nothing"), None);
    }
}
