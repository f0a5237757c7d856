//! The whole in emulation: llama.cpp with the types, built for aarch64, on a real model, against the same on this machine.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::super::Tally;
use crate::cross::{self, AARCH64_GXX, AARCH64_ROOT, QEMU};
use crate::{build_tree, model, process};

const TOOL: &str = "llama-perplexity";
const PAIRS: [[&str; 2]; 3] = [["f16", "f16"], ["srft4", "srft4"], ["delta4", "srft4"]];
/// A short text: an emulated core is a very slow one.
const LENGTH: [&str; 6] = ["-c", "128", "--chunks", "1", "-t", "2"];
/// dotprod and fp16, as the build has them.
const CPU: &str = "cortex-a76";
const TABLE: &str = "dotprod";
/// How far perplexities may be apart.
const TOLERANCE: f64 = 0.005;
const LIMIT: Duration = Duration::from_secs(1200);

pub fn run(tally: &mut Tally) -> Result<()> {
    if let Err(why) = cross::programs(&[AARCH64_GXX]) {
        tally.skip("llama-perplexity in emulation", 1, &why);
        return Ok(());
    }
    let here = build_tree::build(&build_tree::Options::default(), &[TOOL.into()])?;
    let emulated = build_tree::build(&build_tree::Options { aarch64: true, ..Default::default() }, &[TOOL.into()])?;
    let (model, text) = (model::default_model()?, model::default_text()?);
    for [k, v] in PAIRS {
        tally.check(&format!("{TOOL} with {k}/{v} on {CPU} as on this machine"), || {
            let types = ["--cache-type-k", k, "--cache-type-v", v];
            let native = perplexity(Command::new(here.join(TOOL)), &model, &text, &types)?;
            let emulated = perplexity(qemu(&emulated), &model, &text, &types)?;
            println!("      perplexity {native:.4} here, {emulated:.4} emulated");
            let apart = (emulated / native - 1.0).abs();
            ensure!(apart <= TOLERANCE, "{native} here, {emulated} emulated: {:.2}% apart", 100.0 * apart);
            Ok(())
        });
    }
    Ok(())
}

fn qemu(bin: &Path) -> Command {
    let mut c = Command::new(QEMU.name);
    c.args(["-cpu", CPU, "-L", AARCH64_ROOT]).arg(bin.join(TOOL)).env("GGML_EXT_ISA", TABLE);
    c
}

fn perplexity(mut c: Command, model: &Path, text: &Path, types: &[&str]) -> Result<f64> {
    c.arg("-m").arg(model).arg("-f").arg(text).args(["-fa", "on"]).args(LENGTH).args(types);
    let done = process::run(&mut c, Some(LIMIT))?;
    let shown = || format!("{} ({})\n{}", process::shown(&c), done.status, process::tail(&done.text(), 20));
    ensure!(done.status.success(), "{}", shown());
    // The library says so where the table that was asked for is not there.
    ensure!(!done.text().contains("is not available here"), "{}", shown());
    final_estimate(&done.text()).with_context(shown)
}

/// `Final estimate: PPL = 55.3739 +/- 12.04522`
fn final_estimate(text: &str) -> Option<f64> {
    text.split_once("Final estimate: PPL =")?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_is_read() {
        assert_eq!(final_estimate("[1]80.9458,\nFinal estimate: PPL = 80.9458 +/- 26.1781\n"), Some(80.9458));
        assert_eq!(final_estimate("nothing"), None);
    }
}
