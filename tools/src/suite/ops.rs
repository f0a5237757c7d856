//! The ops against ggml's own: a C++ program built in the same tree, which counts for itself.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{parse_counts, Options, Tally};
use crate::{build_tree, process};

const PROGRAM: &str = "kv-test-ops";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let bin = build_tree::build(&build_tree::Options::default(), &[PROGRAM.into()])?;
    let mut c = Command::new(bin.join(PROGRAM));
    if options.quick {
        c.arg("--quick");
    }
    if options.soak {
        c.arg("--soak");
    }
    let mut child = c
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", process::shown(&c)))?;
    let mut counts = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line?;
        match parse_counts(&line) {
            // Kept off the output: the suite has a closing line of its own.
            Some(found) => counts = Some(found),
            None => println!("{line}"),
        }
    }
    let status = child.wait()?;
    let Some([passed, failed, skipped]) = counts else {
        tally.fail(PROGRAM, &format!("it ended ({status}) without counting its tests"));
        return Ok(());
    };
    tally.add(passed, failed);
    println!("ops: {passed} passed, {failed} failed, {skipped} skipped in {PROGRAM}");
    if skipped > 0 {
        tally.skip("some cases", skipped, &format!("{PROGRAM} names them"));
    }
    if !status.success() && failed == 0 {
        tally.fail(PROGRAM, &format!("it counted no failure but ended with {status}"));
    }
    Ok(())
}
