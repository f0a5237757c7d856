//! Unit and property tests, fmt, clippy, instruction counts.

use std::fs;

use anyhow::{bail, ensure, Result};

use super::cargo::command;
use super::{counts, Options, Tally};
use kv::progress::Spinner;
use kv::{process, project_root};

/// Of ggml-ext's tests: all ops, types and sizes with guard pages on both sides.
const GUARDED: &str = "every_op_stays_in_its_memory";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    if options.bless_counts {
        return counts::run(options, tally);
    }
    tally.check("cargo fmt --check", || cargo(&["fmt", "--all", "--check"]));
    tally.check("cargo clippy -D warnings", || {
        cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])
    });
    tally.check("cargo doc without warnings", || {
        let mut doc = command(&["doc", "--package", "ggml-ext", "--no-deps", "--quiet"]);
        let _spinner = Spinner::new("cargo doc");
        process::run_ok(doc.env("RUSTDOCFLAGS", "-D warnings")).map(drop)
    });
    tally.check("cargo package has all that ggml-ext is built from", package);
    tests(options, tally)?;
    counts::run(options, tally)
}

/// A packaged crate has only what lies in its folder, and shaders/ and LICENSE lie outside of it.
fn package() -> Result<()> {
    let done = process::run_ok(&mut command(&["package", "--package", "ggml-ext", "--list", "--allow-dirty"]))?;
    let packaged: Vec<&str> = done.stdout.lines().collect();
    let mut wanted = vec!["LICENSE".to_string(), "README.md".to_string()];
    for file in fs::read_dir(project_root().join("shaders"))? {
        wanted.push(format!("shaders/{}", file?.file_name().to_string_lossy()));
    }
    wanted.retain(|file| !packaged.contains(&file.as_str()));
    ensure!(wanted.is_empty(), "not in the package: {}; ggml-ext/ has links to what is outside", wanted.join(", "));
    Ok(())
}

fn cargo(args: &[&str]) -> Result<()> {
    let _spinner = Spinner::new(&format!("cargo {}", args[0]));
    let done = process::run(&mut command(args), None)?;
    if !done.status.success() {
        bail!("{}", process::tail(&done.text(), 60));
    }
    Ok(())
}

fn tests(options: &Options, tally: &mut Tally) -> Result<()> {
    let mut c = command(&["test", "--workspace", "--no-fail-fast"]);
    if options.quick {
        c.env("PROPTEST_CASES", "8").env("GGML_EXT_TEST_STEP", "7").args(["--", "--skip", GUARDED]);
        tally.skip("all ops beside guard pages", 1, "not in --quick: they take a minute and a half");
    } else if options.soak {
        c.env("PROPTEST_CASES", "5000");
    }
    let done = tally.timed("cargo test", || {
        let _spinner = Spinner::new("cargo test");
        process::run(&mut c, None)
    })?;
    let [passed, failed, ignored] = libtest_counts(&done.stdout);
    tally.add(passed, 0);
    println!("ok    rust: {passed} tests");
    if ignored > 0 {
        tally.skip("ignored tests", ignored, "marked #[ignore]");
    }
    for name in failed_names(&done.stdout) {
        tally.fail(name, "see below");
    }
    if !done.status.success() {
        println!("{}", process::tail(&done.text(), 80));
        if failed == 0 {
            tally.fail("cargo test", "it ended with an error and no failed test: it did not compile, or crashed");
        }
    }
    Ok(())
}

/// Sums of `test result: ok. 3 passed; 0 failed; 1 ignored; …`
pub(super) fn libtest_counts(text: &str) -> [u64; 3] {
    let mut sums = [0; 3];
    for line in text.lines().filter_map(|l| l.strip_prefix("test result: ")) {
        for field in line.split(['.', ';']) {
            let mut words = field.split_whitespace();
            if let (Some(Ok(n)), Some(word)) = (words.next().map(str::parse::<u64>), words.next()) {
                if let Some(i) = ["passed", "failed", "ignored"].iter().position(|w| *w == word) {
                    sums[i] += n;
                }
            }
        }
    }
    sums
}

/// `test a::b ... FAILED`
pub(super) fn failed_names(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|l| l.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtest_output() {
        let text = "test a::b ... ok\ntest a::c ... FAILED\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
            test result: ok. 20 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 1.50s\n";
        assert_eq!(libtest_counts(text), [21, 1, 2]);
        assert_eq!(failed_names(text).collect::<Vec<_>>(), ["a::c"]);
    }
}
