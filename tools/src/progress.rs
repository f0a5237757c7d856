//! Progress on stderr: a bar or a spinner on a terminal, a few plain lines elsewhere (logs, CI).

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

pub struct Bar {
    bar: Option<ProgressBar>,
    what: String,
    total: Cell<u64>,
    tenth: Cell<u64>,
}

impl Bar {
    pub fn new(total: u64, what: &str) -> Bar {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {elapsed} {wide_msg}") {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(what.to_string());
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        Bar { bar, what: what.to_string(), total: Cell::new(total), tenth: Cell::new(0) }
    }

    /// For many small steps: without a terminal, a line each tenth.
    pub fn set(&self, done: u64, total: u64, now: &str) {
        self.total.set(total);
        match &self.bar {
            Some(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                bar.set_message(now.to_string());
            }
            None => {
                let tenth = (done * 10).checked_div(total).unwrap_or(0);
                if tenth > self.tenth.get() {
                    self.tenth.set(tenth);
                    eprintln!("{}: {}% ({done}/{total})", self.what, tenth * 10);
                }
            }
        }
    }

    /// For few long steps: names the one that begins now.
    pub fn begin(&self, step: u64, now: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(now.to_string());
            }
            None => eprintln!("[{}/{}] {}: {now}", step + 1, self.total.get(), self.what),
        }
    }

    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// `[512/4096]`, as programs of ours print how far they are.
pub fn step(line: &str) -> Option<(u64, u64)> {
    let (n, total) = line.strip_prefix('[')?.strip_suffix(']')?.split_once('/')?;
    Some((n.parse().ok()?, total.parse().ok()?))
}

/// One step of unknown length.
pub struct Spinner(Option<ProgressBar>);

impl Spinner {
    pub fn new(what: &str) -> Spinner {
        if !std::io::stderr().is_terminal() {
            eprintln!("{what} …");
            return Spinner(None);
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(what.to_string());
        bar.enable_steady_tick(Duration::from_millis(100));
        Spinner(Some(bar))
    }

    pub fn line(&self, text: &str) {
        match &self.0 {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps() {
        assert_eq!(step("[512/4096]"), Some((512, 4096)));
        assert_eq!(step("note: the text is short"), None);
    }
}
