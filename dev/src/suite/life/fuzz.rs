//! The fuzz targets: as a bounded run over every input of the corpus and mutations of them from a fixed seed, and with
//! `--soak` as libFuzzer runs them, guided by what they reach.

use std::fs;
use std::panic;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::sanitize::{host, nightly, nightly_cargo};
use super::{Options, Tally};
use kv::progress::Spinner;
use kv::{cache, process, project_root};

#[path = "../../../../fuzz/targets.rs"]
mod targets;

/// For each target.
const LIBFUZZER_SECONDS: u32 = 120;

pub fn run(options: &Options, tally: &mut Tally) {
    let time = Duration::from_secs(if options.quick {
        1
    } else if options.soak {
        30
    } else {
        4
    });
    for (name, target) in targets::ALL {
        let mut n = 0;
        tally.check(&format!("any bytes for {name}"), || {
            n = bounded(name, target, time)?;
            println!("      {n} inputs for {name}");
            Ok(())
        });
        tally.count("fuzzed inputs", n);
    }
    if options.soak {
        guided(tally);
    }
}

fn guided(tally: &mut Tally) {
    if !cfg!(target_os = "linux") {
        return tally.skip("libFuzzer", 1, "it is run on Linux alone");
    }
    if nightly().is_none() {
        return tally.missing("libFuzzer", "no nightly toolchain: rustup toolchain install nightly");
    }
    let mut programs = None;
    tally.check("fuzz targets build for libFuzzer", || {
        programs = Some(build_guided()?);
        Ok(())
    });
    let Some(programs) = programs else { return };
    for (name, _) in targets::ALL {
        let mut n = 0;
        tally.check(&format!("{LIBFUZZER_SECONDS} s of libFuzzer for {name}"), || {
            n = one_guided(&programs.join(name), name)?;
            println!("      {n} inputs for {name}");
            Ok(())
        });
        tally.count("inputs of libFuzzer", n);
    }
}

/// What `cargo fuzz build` does: edges and comparisons are counted, every address is looked at, overflows panic.
const GUIDED_FLAGS: [&str; 9] = [
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
    "-Ccodegen-units=1",
    "-Cdebug-assertions=yes",
];

fn build_guided() -> Result<std::path::PathBuf> {
    let _spinner = Spinner::new("building the fuzz targets");
    let mut c = nightly_cargo("fuzz", &project_root().join("fuzz"))?;
    c.args(["build", "--release", "--locked", "--bins", "--target", &host()]).env("RUSTFLAGS", GUIDED_FLAGS.join(" "));
    process::run_ok(&mut c)?;
    Ok(cache::root()?.join("nightly/fuzz").join(host()).join("release"))
}

fn one_guided(program: &Path, name: &str) -> Result<u64> {
    let scratch = cache::Scratch::new()?;
    let found = scratch.path().join("found");
    fs::create_dir(&found)?;
    let mut c = Command::new(program);
    // What it finds goes to the first folder; an input that fails is written where the second points.
    c.arg(&found).arg(project_root().join("fuzz/corpus").join(name));
    c.arg(format!("-artifact_prefix={}/", scratch.path().display()));
    c.args(["-print_final_stats=1", "-max_len=16384", "-timeout=60"])
        .arg(format!("-max_total_time={LIBFUZZER_SECONDS}"));
    let _spinner = Spinner::new(&format!("libFuzzer, {name}"));
    let done = process::run(&mut c, None)?;
    if !done.status.success() {
        let mut kept = String::new();
        for entry in fs::read_dir(scratch.path())?.flatten().filter(|e| e.path().is_file()) {
            let to = project_root().join("fuzz/corpus").join(name).join(entry.file_name());
            fs::copy(entry.path(), &to)?;
            kept = format!("; the input is kept in {}", to.display());
        }
        bail!("it ended with {}{kept}\n{}", done.status, process::tail(&done.stderr, 40));
    }
    executed(&done.stderr).with_context(|| format!("no count in\n{}", process::tail(&done.stderr, 20)))
}

/// `stat::number_of_executed_units: 4711`
fn executed(text: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix("stat::number_of_executed_units:"))?.trim().parse().ok()
}

fn corpus(name: &str) -> Result<Vec<Vec<u8>>> {
    let dir = project_root().join("fuzz").join("corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(&dir)
        .with_context(|| format!("no corpus in {}", dir.display()))?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<std::io::Result<_>>()?;
    paths.sort();
    let inputs: Vec<_> = paths.iter().map(fs::read).collect::<std::io::Result<_>>()?;
    ensure!(!inputs.is_empty(), "the corpus in {} is empty", dir.display());
    Ok(inputs)
}

fn bounded(name: &str, target: targets::Target, time: Duration) -> Result<u64> {
    let inputs = corpus(name)?;
    let (start, mut random, mut n) = (Instant::now(), Random(7), 0u64);
    while start.elapsed() < time || n < inputs.len() as u64 {
        // The corpus as it is, then what becomes of it.
        let mut input = inputs[n as usize % inputs.len()].clone();
        if n >= inputs.len() as u64 {
            random.mutate(&mut input, &inputs);
        }
        if panic::catch_unwind(|| target(&input)).is_err() {
            let kept = project_root().join("fuzz").join("corpus").join(name).join(format!("fault-{n}"));
            fs::write(&kept, &input)?;
            bail!("input {n} panicked; it is kept in {}", kept.display());
        }
        n += 1;
    }
    Ok(n)
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n.max(1)
    }

    fn mutate(&mut self, input: &mut Vec<u8>, others: &[Vec<u8>]) {
        for _ in 0..1 + self.below(6) {
            let at = self.below(input.len() + 1);
            match self.below(7) {
                0 if at < input.len() => input[at] ^= 1 << self.below(8),
                1 if at < input.len() => input[at] = self.below(256) as u8,
                2 => input.insert(at, self.below(256) as u8),
                3 if at < input.len() => drop(input.remove(at)),
                4 => input.truncate(at),
                // Numbers that make trouble: none, all ones, the sign, and f32 and f16 that are not finite.
                5 => {
                    let odd = [0u32, u32::MAX, 0x8000_0000, 0x7f80_0000, 0x7fc0_0001, 0x7c00_7c00, 1][self.below(7)];
                    for (i, byte) in odd.to_le_bytes().into_iter().enumerate() {
                        if let Some(b) = input.get_mut(at + i) {
                            *b = byte;
                        }
                    }
                }
                _ => {
                    let other = &others[self.below(others.len())];
                    let from = self.below(other.len() + 1);
                    let n = self.below(200).min(other.len() - from);
                    input.splice(at..at, other[from..from + n].iter().copied());
                }
            }
        }
        input.truncate(1 << 14);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_libfuzzer() {
        assert_eq!(executed("Done 12 runs\nstat::number_of_executed_units: 12\n"), Some(12));
        assert_eq!(executed("nothing"), None);
    }

    #[test]
    fn every_target_has_a_corpus_that_it_bears() {
        for (name, target) in targets::ALL {
            corpus(name).unwrap().iter().for_each(|input| target(input));
        }
    }
}
