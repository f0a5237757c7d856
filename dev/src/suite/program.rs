//! Test programs in C++, built in the tree, which count for themselves.

use std::io::{self, BufRead, BufReader};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{parse_counts, Options, Tally};
use kv::process;

/// Of CPU time on each core ([`process::Watch`]), several times what the longest of them takes, in emulation too.
const LIMIT: Duration = Duration::from_secs(45 * 60);
const SOAK_LIMIT: Duration = Duration::from_secs(12 * 3600);

/// Runs one with the options that all of them know and takes its counts over.
pub fn run(command: &mut Command, name: &str, options: &Options, tally: &mut Tally) -> Result<()> {
    if options.quick {
        command.arg("--quick");
    }
    if options.soak {
        command.arg("--soak");
    }
    run_within(command, name, if options.soak { SOAK_LIMIT } else { LIMIT }, tally)
}

fn run_within(command: &mut Command, name: &str, limit: Duration, tally: &mut Tally) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", process::shown(command)))?;
    let lines = lines_of(child.stdout.take());
    let (start, mut watch) = (Instant::now(), process::Watch::new(limit));
    let (mut counts, mut looked) = (None, Instant::now());
    let often = limit.min(Duration::from_secs(1));
    let hangs = loop {
        let line = lines.recv_timeout(often);
        // One that prints for ever hangs too.
        if looked.elapsed() >= often {
            looked = Instant::now();
            if watch.hangs(child.id()) {
                break true;
            }
        }
        let line = match line {
            Ok(line) => line?,
            Err(RecvTimeoutError::Disconnected) => break false,
            Err(RecvTimeoutError::Timeout) => continue,
        };
        match parse_counts(&line) {
            // Kept off the output: the suite has a closing line of its own.
            Some(found) => counts = Some(found),
            // `life: 148 walks`
            None => match line.strip_prefix(&format!("{}: ", tally.part)).and_then(|l| l.split_once(' ')) {
                Some((n, what)) if n.parse::<u64>().is_ok() => tally.count(what, n.parse()?),
                _ => println!("{line}"),
            },
        }
    };
    if hangs {
        child.kill()?;
        child.wait()?;
        let minutes = limit.as_secs() / 60;
        tally.fail(name, &format!("it computed or did nothing for {minutes} minutes and was killed"));
        return Ok(());
    }
    let status = child.wait()?;
    tally.took(name, start.elapsed());
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

/// Read beside the program: children of its own may hold its output open when it is gone.
fn lines_of(stdout: Option<ChildStdout>) -> mpsc::Receiver<io::Result<String>> {
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in stdout.map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn tally_of(script: &str, limit: Duration) -> Tally {
        let mut tally = Tally::new(super::super::Part::Life);
        run_within(Command::new("sh").args(["-c", script]), "it", limit, &mut tally).unwrap();
        tally
    }

    #[test]
    fn counts_are_taken_over_and_a_program_that_hangs_is_ended() {
        let long = Duration::from_secs(60);
        let tally = tally_of("echo '3 passed, 0 failed, 0 skipped'", long);
        assert_eq!((tally.passed, tally.failed), (3, 0));
        let tally = tally_of("echo '3 passed, 1 failed, 0 skipped'; exit 1", long);
        assert_eq!((tally.passed, tally.failed), (3, 1));
        for bad in ["exit 0", "echo '3 passed, 0 failed, 0 skipped'; exit 1"] {
            assert_eq!(tally_of(bad, long).failed, 1, "{bad}");
        }
        let tally = tally_of("echo '3 passed, 0 failed, 0 skipped'; sleep 5 & wait", Duration::from_millis(100));
        assert_eq!((tally.passed, tally.failed), (0, 1));
    }
}
