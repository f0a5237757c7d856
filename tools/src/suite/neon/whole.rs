//! The whole in emulation: llama.cpp with the types, built for aarch64, on a real model, against the same on this machine.
//!
//! A code of 4 bits falls to one side or the other by the last bit of a sum, and what follows from it is another draw of
//! the same noise: on a text as short as emulation allows, perplexities with the tables of one machine are a few percent
//! apart. One run here and one run there do not agree within 0.5% (docs/neon.md has by how much), so that is printed and
//! not required. Required is less: to be within 0.5% of the range that this machine gives with each of its tables and two
//! sizes of batches. It finds a kernel that is wrong, not one that is a little worse.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use ggml_ext::isa;

use super::super::Tally;
use crate::cross::{self, AARCH64_GXX, AARCH64_ROOT, QEMU};
use crate::{build_tree, cache, model, process};

const TOOL: &str = "llama-perplexity";
const PAIRS: [[&str; 2]; 3] = [["f16", "f16"], ["srft4", "srft4"], ["delta4", "srft4"]];
/// An emulated core is a very slow one: two chunks, of the beginning of a text, since all of a file is made tokens of.
const LENGTH: [&str; 6] = ["-c", "128", "--chunks", "2", "-t", "2"];
const TEXT_BYTES: usize = 4000;
/// dotprod and fp16, as the build has them.
const CPU: &str = "cortex-a76";
const TABLE: &str = "dotprod";
/// How far a perplexity may be from the range of this machine's.
const TOLERANCE: f64 = 0.005;
/// Arguments with which this machine is asked.
const BATCHES: [&str; 2] = ["512", "128"];
const LIMIT: Duration = Duration::from_secs(1200);

pub fn run(tally: &mut Tally) -> Result<()> {
    if let Err(why) = cross::programs(&[AARCH64_GXX]) {
        tally.skip("llama-perplexity in emulation", 1, &why);
        return Ok(());
    }
    let here = build_tree::build(&build_tree::Options::default(), &[TOOL.into()])?;
    let emulated = build_tree::build(&build_tree::Options { aarch64: true, ..Default::default() }, &[TOOL.into()])?;
    let (model, scratch) = (model::default_model()?, cache::Scratch::new()?);
    let text = scratch.path().join("beginning.txt");
    let whole = fs::read(model::default_text()?)?;
    fs::write(&text, beginning(&whole))?;
    for [k, v] in PAIRS {
        tally.check(&format!("{TOOL} with {k}/{v} on {CPU} in the range of this machine's"), || {
            let types = ["--cache-type-k", k, "--cache-type-v", v];
            let usual = perplexity(Command::new(here.join(TOOL)), &model, &text, &types)?;
            let mut range = [usual; 2];
            for table in isa::available().iter().map(|t| t.name) {
                for batch in BATCHES {
                    let mut native = Command::new(here.join(TOOL));
                    native.env("GGML_EXT_ISA", table).args(["--ubatch-size", batch]);
                    let native = perplexity(native, &model, &text, &types)?;
                    range = [range[0].min(native), range[1].max(native)];
                }
            }
            let emulated = perplexity(qemu(&emulated), &model, &text, &types)?;
            let direct = 100.0 * (emulated / usual - 1.0);
            println!("      perplexity {usual:.4} here, {emulated:.4} emulated: {direct:+.2}%");
            println!("      with other tables and batches {:.4} to {:.4} here", range[0], range[1]);
            let apart = apart(emulated, range);
            ensure!(apart <= TOLERANCE, "{:.2}% outside of this machine's range", 100.0 * apart);
            Ok(())
        });
    }
    Ok(())
}

/// The distance from a range, as a part of its nearer end.
fn apart(x: f64, [low, high]: [f64; 2]) -> f64 {
    (low / x - 1.0).max(x / high - 1.0).max(0.0)
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

/// Whole lines of the text.
fn beginning(text: &[u8]) -> &[u8] {
    let some = &text[..text.len().min(TEXT_BYTES)];
    some.iter().rposition(|&b| b == b'\n').map_or(some, |end| &some[..=end])
}

/// `Final estimate: PPL = 55.3739 +/- 12.04522`
fn final_estimate(text: &str) -> Option<f64> {
    text.split_once("Final estimate: PPL =")?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_lines() {
        assert_eq!(beginning(b"one\ntwo"), b"one\n");
        let long = "0123456789\n".repeat(1000);
        let short = beginning(long.as_bytes());
        assert!(short.len() <= TEXT_BYTES && short.len() + 11 > TEXT_BYTES && short.ends_with(b"9\n"));
    }

    #[test]
    fn distances_are_from_the_nearer_end() {
        assert_eq!(apart(10.5, [10.0, 11.0]), 0.0);
        assert!((apart(12.1, [10.0, 11.0]) - 0.1).abs() < 1e-9);
        assert!((apart(8.0, [10.0, 11.0]) - 0.25).abs() < 1e-9);
        assert!(apart(f64::INFINITY, [10.0, 11.0]) > TOLERANCE);
    }

    #[test]
    fn the_estimate_is_read() {
        assert_eq!(final_estimate("[1]80.9458,\nFinal estimate: PPL = 80.9458 +/- 26.1781\n"), Some(80.9458));
        assert_eq!(final_estimate("nothing"), None);
    }
}
