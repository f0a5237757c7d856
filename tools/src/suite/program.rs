//! Test programs in C++, built in the tree, which count for themselves.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{parse_counts, Options, Tally};
use crate::process;

/// Runs one with the options that all of them know and takes its counts over.
pub fn run(command: &mut Command, name: &str, options: &Options, tally: &mut Tally) -> Result<()> {
    if options.quick {
        command.arg("--quick");
    }
    if options.soak {
        command.arg("--soak");
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", process::shown(command)))?;
    let mut counts = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line?;
        match parse_counts(&line) {
            // Kept off the output: the suite has a closing line of its own.
            Some(found) => counts = Some(found),
            // `life: 148 walks`
            None => match line.strip_prefix(&format!("{}: ", tally.part)).and_then(|l| l.split_once(' ')) {
                Some((n, what)) if n.parse::<u64>().is_ok() => tally.count(what, n.parse()?),
                _ => println!("{line}"),
            },
        }
    }
    let status = child.wait()?;
    let Some([passed, failed, skipped]) = counts else {
        tally.fail(name, &format!("it ended ({status}) without counting its tests"));
        return Ok(());
    };
    tally.add(passed, failed);
    println!("{}: {passed} passed, {failed} failed, {skipped} skipped in {name}", tally.part);
    if skipped > 0 {
        tally.skip("some cases", skipped, &format!("{name} names them"));
    }
    if !status.success() && failed == 0 {
        tally.fail(name, &format!("it counted no failure but ended with {status}"));
    }
    Ok(())
}
