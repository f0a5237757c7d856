//! Children: run with a limit, output kept, failures reported with the end of their output.
//!
//! A limit ends what hangs, on a machine that may be busy with other things. So it counts CPU time, not time: see
//! [`Watch`].

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::cpu;

pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub timed_out: bool,
}

impl Finished {
    pub fn text(&self) -> String {
        format!("{}\n{}", self.stdout, self.stderr)
    }

    /// Anything but success is an error that shows the command and the end of its output.
    pub fn ok(self, command: &Command) -> Result<Finished> {
        if !self.status.success() {
            bail!("{} failed ({})\n{}", shown(command), self.status, tail(&self.text(), 20));
        }
        Ok(self)
    }

    /// Ended by itself with a code, not by a signal (an abort or a crash) and not by our limit.
    pub fn exited(&self) -> bool {
        !self.timed_out && self.status.code().is_some()
    }
}

/// Does a child hang? It does if it has computed for longer than the limit on a few cores, or has done nothing for that
/// long. A child that only waits its turn on a busy machine does neither.
pub struct Watch {
    limit: Duration,
    /// Since when, and the CPU time then.
    window: (Instant, Duration),
}

/// Share of a core below which a child does nothing: one that waits for input may still look up now and then.
const IDLE: u32 = 100;
/// Cores that a tool of ours keeps busy: a loop without end is on one of them, and must not run for days on a large machine.
const MOST_CORES: u32 = 4;
/// Where CPU time cannot be read, the clock counts, and this much more of it.
const PATIENCE: u32 = 5;

impl Watch {
    pub fn new(limit: Duration) -> Watch {
        Watch { limit, window: (Instant::now(), Duration::ZERO) }
    }

    pub fn hangs(&mut self, child: u32) -> bool {
        let (since, then) = self.window;
        let Some(now) = cpu_time(&child.to_string()) else { return since.elapsed() > self.limit * PATIENCE };
        if now > self.limit * cpu::cores().min(MOST_CORES) {
            return true;
        }
        if since.elapsed() <= self.limit {
            return false;
        }
        self.window = (Instant::now(), now);
        now.saturating_sub(then) < self.limit / IDLE
    }
}

/// CPU time of a process (a number, or "self") and of its children that have ended; None where /proc does not have it.
pub fn cpu_time(process: &str) -> Option<Duration> {
    // Ticks a second: fixed by the ABI of Linux.
    const USER_HZ: u32 = 100;
    let ticks = parse_ticks(&std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?)?;
    Some(Duration::from_secs(ticks) / USER_HZ)
}

/// Fields 14 to 17, counted behind the name, which may hold anything: user, system, and the same of children.
fn parse_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    fields.get(11..15)?.iter().map(|f| f.parse::<u64>().ok()).sum()
}

/// Runs to the end with nothing on stdin. With a limit, the child is killed if it hangs ([`Watch`]).
pub fn run(command: &mut Command, limit: Option<Duration>) -> Result<Finished> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {}", shown(command)))?;
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let mut timed_out = false;
    let status = match limit.map(Watch::new) {
        None => child.wait()?,
        Some(mut watch) => loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if watch.hangs(child.id()) {
                timed_out = true;
                child.kill()?;
                break child.wait()?;
            }
            thread::sleep(Duration::from_millis(20));
        },
    };
    let join = |t: thread::JoinHandle<Vec<u8>>| String::from_utf8_lossy(&t.join().unwrap_or_default()).into_owned();
    Ok(Finished { status, stdout: join(stdout), stderr: join(stderr), timed_out })
}

/// As `run`, where anything but success is an error.
pub fn run_ok(command: &mut Command) -> Result<Finished> {
    run(command, None)?.ok(command)
}

/// Runs a program of ours to the end and hands over what it prints, line by line. Where it fails, the reason is the last line of its
/// errors that begins with `error: `.
pub fn follow(command: &mut Command, mut line: impl FnMut(&str)) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {}", shown(command)))?;
    let stderr = drain(child.stderr.take());
    for text in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        line(&text?);
    }
    let status = child.wait()?;
    if !status.success() {
        let errors = String::from_utf8_lossy(&stderr.join().unwrap_or_default()).into_owned();
        match errors.lines().rev().find_map(|l| l.strip_prefix("error: ")) {
            Some(reason) => bail!("{reason}"),
            None => bail!("{} failed ({status})\n{}", shown(command), tail(&errors, 20)),
        }
    }
    Ok(())
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut all = Vec::new();
        if let Some(mut pipe) = pipe {
            // A broken pipe ends the output; the exit status tells the rest.
            let _ = pipe.read_to_end(&mut all);
        }
        all
    })
}

/// The command as one could type it.
pub fn shown(command: &Command) -> String {
    let quote = |arg: &OsStr| {
        let arg = arg.to_string_lossy();
        if arg.is_empty() || arg.contains(|c: char| c.is_whitespace() || "'\"$;|&<>()*?".contains(c)) {
            format!("'{}'", arg.replace('\'', r"'\''"))
        } else {
            arg.into_owned()
        }
    };
    std::iter::once(command.get_program()).chain(command.get_args()).map(quote).collect::<Vec<_>>().join(" ")
}

pub fn tail(text: &str, n: usize) -> String {
    let lines: Vec<_> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(n)..].join("\n")
}

/// `cargo run` describes this package in the environment; a cargo below would take that for its own and rebuild.
pub fn forget_cargo(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"].iter().any(|p| text.starts_with(p)) {
            command.env_remove(&name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_can_be_typed() {
        let mut c = Command::new("llama-cli");
        c.args(["-p", "The capital of", "it's", ""]);
        assert_eq!(shown(&c), r"llama-cli -p 'The capital of' 'it'\''s' ''");
    }

    #[test]
    fn tail_skips_empty_lines() {
        assert_eq!(tail("a\n\nb\n\nc\n", 2), "b\nc");
        assert_eq!(tail("", 2), "");
    }

    #[test]
    fn ticks() {
        let line = "42 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 100 20 3 1 20 0 1 0";
        assert_eq!(parse_ticks(line), Some(124));
        assert_eq!(parse_ticks("nothing"), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_limit_ends_the_child() {
        let within =
            |words: &[&str], ms| run(Command::new("sh").arg("-c").args(words), Some(Duration::from_millis(ms)));
        for hangs in ["exec sleep 30", "while :; do :; done"] {
            let done = within(&[hangs], 50).unwrap();
            assert!(done.timed_out && !done.exited(), "{hangs}");
        }
        let done = run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]), None).unwrap();
        assert!(done.exited());
        assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("out\n", "err\n"));
        assert!(run_ok(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err_text().contains("why"));
    }

    #[cfg(unix)]
    #[test]
    fn lines_are_followed_and_the_reason_is_told() {
        let mut lines = Vec::new();
        let mut sh =
            |script: &str| follow(Command::new("sh").args(["-c", script]), |line| lines.push(line.to_string()));
        sh("echo one; echo noise >&2; echo two").unwrap();
        assert_eq!(sh("echo three; echo error: why >&2; echo more >&2; exit 3").unwrap_err_text(), "why");
        assert!(sh("echo end >&2; exit 3").unwrap_err_text().contains("end"));
        assert_eq!(lines, ["one", "two", "three"]);
    }

    /// Longer than the limit by the clock, and at work all the time, though not on all of a core.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_child_that_works_is_not_ended_by_the_clock() {
        let script = "for i in 1 2 3 4 5 6; do j=0; while [ $j -lt 20000 ]; do j=$((j+1)); done; sleep 0.2; done";
        let start = Instant::now();
        let limit = Duration::from_millis(600);
        let done = run(Command::new("sh").args(["-c", script]), Some(limit)).unwrap();
        assert!(start.elapsed() > 2 * limit && !done.timed_out && done.status.success());
    }

    trait ErrText {
        fn unwrap_err_text(self) -> String;
    }
    impl<T> ErrText for Result<T> {
        fn unwrap_err_text(self) -> String {
            self.err().map(|e| format!("{e:#}")).unwrap_or_default()
        }
    }
}
