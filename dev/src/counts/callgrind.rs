//! Instructions by valgrind: collecting is on inside `kv_counted` alone, and each call of it ends with a dump.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::loops::{self, Counts};
use kv::cache::Scratch;
use kv::process;

pub fn available() -> bool {
    process::run(Command::new("valgrind").arg("--version"), None).is_ok_and(|done| done.status.success())
}

pub fn count(isa: &str, only: &str) -> Result<Counts> {
    let scratch = Scratch::new()?;
    let out = scratch.path().join("out");
    let child = super::child(isa, "run", only)?;
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--toggle-collect=kv_counted", "--dump-after=kv_counted"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(child.get_program())
        .args(child.get_args())
        .env("GGML_EXT_ISA", isa);
    process::run_ok(&mut command)?;
    let mut totals = Vec::new();
    loop {
        let dump = out.with_extension(format!("{}", totals.len() + 1));
        if !dump.exists() {
            break;
        }
        totals.push(read_total(&dump)?);
    }
    let loops = loops::names(only);
    let missing = || format!("{} loops, {} dumps of callgrind", loops.len(), totals.len());
    let pairs = totals.chunks_exact(2).map(|pair| (pair[0], pair[1]));
    (totals.len() == 2 * loops.len()).then_some(()).with_context(missing)?;
    Ok(Counts::of(isa, only, pairs))
}

fn read_total(path: &Path) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    total(&text).with_context(|| format!("{} has no total", path.display()))
}

/// `totals: 12345`, the only event being instructions.
fn total(text: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix("totals:").or(l.strip_prefix("summary:")))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumps() {
        assert_eq!(total("events: Ir\nfn=(1)\n16 5\n\ntotals: 1234\n"), Some(1234));
        assert_eq!(total("events: Ir\n"), None);
    }
}
