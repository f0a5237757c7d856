//! `cargo kv test`: everything that proves the project, in parts.

mod ahead;
mod archs;
mod cargo;
mod counts;
mod cuda;
mod gpu;
mod life;
mod metal;
mod model;
mod neon;
mod ops;
mod plan;
mod program;
mod rust;
mod tasks;
mod wrapper;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use kv::cpu;
use serde_json::{json, Value};

#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct Options {
    /// Only these parts
    #[arg(long, value_name = "PART,…", value_delimiter = ',')]
    pub only: Vec<Part>,
    /// For the inner loop: fewer cases, shorter texts
    #[arg(long)]
    pub quick: bool,
    /// The long forms: fuzzing, sanitizers, Miri, a loaded server
    #[arg(long, conflicts_with = "quick")]
    pub soak: bool,
    /// Fail if a check was skipped because something is not installed, as in CI
    #[arg(long)]
    pub no_skips: bool,
    /// In part `rust`, write today's instruction counts to tests/counts and do nothing else
    #[arg(long)]
    pub bless_counts: bool,
    /// Write the counts of each part there (- is stdout)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Unit and property tests, fmt, clippy, instruction counts
    Rust,
    /// Against ggml's own ops
    Ops,
    /// Every architecture that llama.cpp has a fixture for
    Archs,
    /// A real model in the real tools
    Model,
    /// NEON in emulation
    Neon,
    /// Metal shaders run on the CPU
    Metal,
    /// CUDA kernels compiled, and run where there is a GPU
    Cuda,
    /// llama-cpp-2 on top of sys/
    Wrapper,
    /// State files, shifts, server, RPC
    Life,
}

impl Options {
    /// Emulated and foreign targets take minutes even in short: --quick has them where they are named.
    fn leaves_out(&self, part: Part) -> bool {
        let slow = matches!(part, Part::Neon | Part::Metal | Part::Cuda | Part::Wrapper);
        slow && self.quick && self.only.is_empty()
    }
}

impl Part {
    fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default()
    }
}

/// The results of one part; prints each check as it ends.
pub struct Tally {
    part: String,
    passed: u64,
    failed: u64,
    skipped: u64,
    /// Those of the skipped checks that wait for something to be installed.
    missing: u64,
    reasons: Vec<String>,
    /// What took how long.
    steps: Vec<(String, Duration)>,
    /// What was tried, in the order in which it was first counted.
    tried: Vec<(String, u64)>,
    start: Instant,
    /// [`Tally::tried`], once the part is over.
    summary: Option<String>,
}

impl Tally {
    fn new(part: Part) -> Tally {
        Tally {
            part: part.name(),
            passed: 0,
            failed: 0,
            skipped: 0,
            missing: 0,
            reasons: Vec::new(),
            steps: Vec::new(),
            tried: Vec::new(),
            start: Instant::now(),
            summary: None,
        }
    }

    /// One check. An error fails it, and the checks after it still run.
    pub fn check(&mut self, what: &str, check: impl FnOnce() -> Result<()>) {
        let start = Instant::now();
        let result = check();
        self.took(what, start.elapsed());
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("ok    {}: {what} ({:.1} s)", self.part, start.elapsed().as_secs_f64());
            }
            Err(e) => self.fail(what, &format!("{e:#}")),
        }
    }

    /// A step that is no check of its own, for the list of the slowest.
    pub fn timed<T>(&mut self, what: &str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.took(what, start.elapsed());
        result
    }

    pub fn took(&mut self, what: &str, time: Duration) {
        self.steps.push((format!("{}: {what}", self.part), time));
    }

    fn fail(&mut self, what: &str, why: &str) {
        self.failed += 1;
        self.reasons.push(format!("{what} failed"));
        println!("FAIL  {}: {what}\n{}", self.part, indented(why));
    }

    pub fn skip(&mut self, what: &str, count: u64, why: &str) {
        self.skipped += count;
        self.reasons.push(why.to_string());
        println!("skip  {}: {what}: {why}", self.part);
    }

    /// A check that this machine could make if something were installed; the reason names the command for that.
    pub fn missing(&mut self, what: &str, why: &str) {
        self.missing += 1;
        self.skip(what, 1, why);
    }

    /// Checks that another program made and counted.
    pub fn add(&mut self, passed: u64, failed: u64) {
        self.passed += passed;
        self.failed += failed;
    }

    /// `n` more random cases of a kind; the sums are printed at the end.
    pub fn count(&mut self, what: &str, n: u64) {
        match self.tried.iter_mut().find(|(name, _)| name == what) {
            Some((_, sum)) => *sum += n,
            None => self.tried.push((what.to_string(), n)),
        }
    }

    /// `life tried 148 walks, 7770 operations on caches in 120 s`
    fn tried(&self) -> Option<String> {
        let all: Vec<_> = self.tried.iter().map(|(what, n)| format!("{n} {what}")).collect();
        let seconds = self.start.elapsed().as_secs();
        (!all.is_empty()).then(|| format!("{} tried {} in {seconds} s", self.part, all.join(", ")))
    }

    fn as_json(&self) -> Value {
        let reason = (!self.reasons.is_empty()).then(|| self.reasons.join("; "));
        json!({
            "part": self.part, "passed": self.passed, "failed": self.failed, "skipped": self.skipped, "reason": reason,
        })
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("      {line}\n")).collect::<String>().trim_end().to_string()
}

pub fn test(options: &Options) -> Result<ExitCode> {
    let parts: Vec<Part> = Part::value_variants()
        .iter()
        .copied()
        .filter(|p| options.only.is_empty() || options.only.contains(p))
        .collect();
    let active: Vec<Part> = parts.iter().copied().filter(|part| !options.leaves_out(*part)).collect();
    let ahead = ahead::Ahead::start(&active);
    let start = Instant::now();
    let tallies = side_by_side(options, parts);
    let time = start.elapsed();
    drop(ahead);
    let tried: Vec<&String> = tallies.iter().filter_map(|t| t.summary.as_ref()).collect();
    tried.iter().for_each(|line| println!("{line}"));
    print_slowest(&tallies, time);
    write_json(options, &tallies)?;
    let sum = |count: fn(&Tally) -> u64| tallies.iter().map(count).sum::<u64>();
    let failed = sum(|t| t.failed);
    // What failed or was skipped, once more at the end.
    tallies.iter().filter(|t| !t.reasons.is_empty()).for_each(|t| println!("{}: {}", t.part, t.reasons.join("; ")));
    let missing = sum(|t| t.missing);
    if missing > 0 {
        println!("{missing} of the skipped checks wait for something to be installed; the reasons above say how");
    }
    println!("{} passed, {failed} failed, {} skipped", sum(|t| t.passed), sum(|t| t.skipped));
    let good = failed == 0 && (missing == 0 || !options.no_skips);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Parts that run beside each other: each has one thread at work for most of its time.
const LANES: usize = 2;

/// The tallies in the order of `parts`, though a long part begins early.
fn side_by_side(options: &Options, parts: Vec<Part>) -> Vec<Tally> {
    let mut queue = parts.clone();
    // The longest first, so that none of them is alone at the end.
    queue.sort_by_key(|part| match part {
        Part::Rust | Part::Model => 0,
        Part::Neon | Part::Life => 1,
        _ => 2,
    });
    // --soak looks for what happens once in a long while: nothing else should be at work then.
    let lanes = if options.soak { 1 } else { LANES.min(cpu::cores() as usize) };
    let next = AtomicUsize::new(0);
    let (send, done) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                while let Some(part) = queue.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // The other end is there for as long as this scope.
                    let _ = send.send((*part, run_part(options, *part)));
                }
            });
        }
    });
    drop(send);
    let mut tallies: Vec<(Part, Tally)> = done.iter().collect();
    tallies.sort_by_key(|(part, _)| parts.iter().position(|p| p == part));
    tallies.into_iter().map(|(_, tally)| tally).collect()
}

fn run_part(options: &Options, part: Part) -> Tally {
    let mut tally = Tally::new(part);
    let ran = match part {
        part if options.leaves_out(part) => {
            tally.skip("all", 1, &format!("not in --quick without --only {}", part.name()));
            Ok(())
        }
        Part::Rust => rust::run(options, &mut tally),
        Part::Ops => ops::run(options, &mut tally),
        Part::Archs => archs::run(options, &mut tally),
        Part::Model => model::run(options, &mut tally),
        Part::Metal => metal::run(options, &mut tally),
        Part::Cuda => cuda::run(options, &mut tally),
        Part::Wrapper => wrapper::run(options, &mut tally),
        Part::Life => life::run(options, &mut tally),
        Part::Neon => neon::run(options, &mut tally),
    };
    // A part that cannot begin is a failure of that part, not the end of the others.
    if let Err(e) = ran {
        tally.fail("set up", &format!("{e:#}"));
    }
    tally.summary = tally.tried();
    tally
}

const SLOWEST: usize = 10;

fn print_slowest(tallies: &[Tally], time: Duration) {
    let mut steps: Vec<&(String, Duration)> = tallies.iter().flat_map(|t| &t.steps).collect();
    steps.sort_by_key(|step| std::cmp::Reverse(step.1));
    println!("{} s in all; the slowest steps:", time.as_secs());
    for (what, time) in steps.into_iter().take(SLOWEST) {
        println!("{:8.1} s  {what}", time.as_secs_f64());
    }
}

fn write_json(options: &Options, tallies: &[Tally]) -> Result<()> {
    let Some(path) = &options.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(&Value::Array(tallies.iter().map(Tally::as_json).collect()))?;
    if path.as_os_str() == "-" {
        println!("{text}");
        return Ok(());
    }
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// `N passed, N failed, N skipped`
fn parse_counts(line: &str) -> Option<[u64; 3]> {
    let mut counts = [0; 3];
    let mut fields = line.trim().split(", ");
    for (count, word) in counts.iter_mut().zip(["passed", "failed", "skipped"]) {
        *count = fields.next()?.strip_suffix(word)?.trim().parse().ok()?;
    }
    fields.next().is_none().then_some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn counts() {
        assert_eq!(parse_counts("12 passed, 0 failed, 3 skipped\n"), Some([12, 0, 3]));
        assert_eq!(parse_counts("12 passed, 0 failed"), None);
        assert_eq!(parse_counts("all well"), None);
    }

    #[test]
    fn a_tally_keeps_reasons() {
        let mut tally = Tally::new(Part::Model);
        tally.check("good", || Ok(()));
        tally.check("bad", || bail!("because"));
        tally.skip("later", 2, "no such machine");
        let json = tally.as_json();
        assert_eq!((&json["passed"], &json["failed"], &json["skipped"]), (&json!(1), &json!(1), &json!(2)));
        assert_eq!(json["reason"], "bad failed; no such machine");
        assert_eq!(Tally::new(Part::Rust).as_json()["reason"], Value::Null);
        tally.missing("abroad", "no compass: apt-get install compass");
        assert_eq!((tally.skipped, tally.missing), (3, 1));
        assert_eq!(tally.steps.iter().map(|s| s.0.as_str()).collect::<Vec<_>>(), ["model: good", "model: bad"]);
        assert_eq!(tally.tried(), None);
        tally.count("walks", 2);
        tally.count("states", 5);
        tally.count("walks", 1);
        assert!(tally.tried().unwrap().starts_with("model tried 3 walks, 5 states in "));
    }
}
