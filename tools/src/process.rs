//! Children: run with a time limit, output kept, failures told with the end of their output.

use std::ffi::OsStr;
use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

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

/// Runs to the end with nothing on stdin. With a limit, the child is killed when it is over.
pub fn run(command: &mut Command, limit: Option<Duration>) -> Result<Finished> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {}", shown(command)))?;
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let start = Instant::now();
    let mut timed_out = false;
    let status = match limit {
        None => child.wait()?,
        Some(limit) => loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if start.elapsed() > limit {
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

    #[cfg(unix)]
    #[test]
    fn a_limit_ends_the_child() {
        let done = run(Command::new("sleep").arg("30"), Some(Duration::from_millis(50))).unwrap();
        assert!(done.timed_out && !done.exited());
        let done = run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]), None).unwrap();
        assert!(done.exited());
        assert_eq!((done.stdout.as_str(), done.stderr.as_str()), ("out\n", "err\n"));
        assert!(run_ok(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err_text().contains("why"));
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
