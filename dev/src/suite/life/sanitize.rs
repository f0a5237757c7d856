//! The same tests under tools that see what tests cannot: ASan and UBSan over llama.cpp and the shim, ASan over the vector
//! kernels, TSan over the threads of attention, Miri over the scalar definition of everything.
//!
//! What sees Rust takes a nightly toolchain; where there is none, that is skipped with a word.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Result};

use super::{cache, Tally, PROGRAM};
use crate::suite::rust::libtest_counts;
use kv::build_tree::{self, Sanitizer};
use kv::progress::Spinner;
use kv::{process, project_root};

pub fn run(tally: &mut Tally) -> Result<()> {
    shim(tally)?;
    addresses(tally);
    threads(tally);
    miri(tally);
    Ok(())
}

/// llama.cpp, the shim and the C++ tests, in their short forms.
fn shim(tally: &mut Tally) -> Result<()> {
    let options = build_tree::Options { sanitize: Some(Sanitizer::AddressUndefined), ..build_tree::Options::default() };
    let bin = build_tree::build(&options, &[PROGRAM, "kv-test-ops"].map(String::from))?;
    for program in [PROGRAM, "kv-test-ops"] {
        tally.check(&format!("{program} under AddressSanitizer and UndefinedBehaviorSanitizer"), || {
            let scratch = cache::Scratch::new()?;
            let mut c = Command::new(bin.join(program));
            c.arg("--quick")
                .env("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1")
                .env("ASAN_OPTIONS", "detect_leaks=1");
            if program == PROGRAM {
                c.arg("--dir").arg(scratch.path());
            }
            let _spinner = Spinner::new(program);
            let done = process::run(&mut c, None)?;
            ensure!(done.status.success(), "{}\n{}", done.status, process::tail(&done.text(), 60));
            Ok(())
        });
    }
    Ok(())
}

/// A nightly toolchain's root, where there is one.
pub fn nightly() -> Option<PathBuf> {
    let out = Command::new("rustc").args(["+nightly", "--print", "sysroot"]).output().ok()?;
    let root = PathBuf::from(String::from_utf8_lossy(&out.stdout).trim());
    (out.status.success() && root.is_dir()).then_some(root)
}

/// cargo of the nightly toolchain, in a target directory of its own. Miri takes down the folder it compiled in, so
/// that another checkout needs another one.
pub fn nightly_cargo(what: &str, dir: &Path) -> Result<Command> {
    let checkout = cache::key(&[project_root().display().to_string()]);
    let mut c = Command::new("cargo");
    c.arg("+nightly").current_dir(dir);
    c.env("CARGO_TARGET_DIR", cache::root()?.join("nightly").join(checkout).join(what));
    process::forget_cargo(&mut c);
    Ok(c)
}

/// This machine as rustc calls it: sanitizers ask for it by name.
pub fn host() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Tests of ggml-ext with these flags; they count one by one.
fn tests(tally: &mut Tally, what: &str, command: impl FnOnce() -> Result<Command>) {
    let mut passed = 0;
    tally.check(what, || {
        let _spinner = Spinner::new(what);
        let mut c = command()?;
        let done = process::run(&mut c, None)?;
        ensure!(
            done.status.success(),
            "{} failed ({})\n{}",
            process::shown(&c),
            done.status,
            process::tail(&done.text(), 60)
        );
        [passed, ..] = libtest_counts(&done.stdout);
        ensure!(passed > 0, "no test ran\n{}", process::tail(&done.text(), 20));
        Ok(())
    });
    if passed > 0 {
        println!("      {passed} tests");
    }
}

/// Kernels read rows and write tiles by pointers: every test of them with every address looked at.
fn addresses(tally: &mut Tally) {
    let what = "kernels and attention under AddressSanitizer";
    if !cfg!(target_os = "linux") {
        return tally.skip(what, 1, "it is run on Linux alone");
    }
    if nightly().is_none() {
        return tally.missing(what, "no nightly toolchain: rustup toolchain install nightly");
    }
    tests(tally, what, || {
        let mut c = nightly_cargo("address", &project_root())?;
        c.args(["test", "--target", &host(), "-p", "ggml-ext", "--lib", "--tests"]);
        c.env("RUSTFLAGS", "-Zsanitizer=address").env("PROPTEST_CASES", "16");
        Ok(c)
    });
}

/// Rust's threads are seen by TSan only where the standard library is compiled for it too.
fn threads(tally: &mut Tally) {
    let what = "the threads of attention under ThreadSanitizer";
    let source = nightly().is_some_and(|root| root.join("lib/rustlib/src/rust/library/std").is_dir());
    if !cfg!(target_os = "linux") {
        return tally.skip(what, 1, "it is run on Linux alone");
    }
    if !source {
        let why = "no nightly toolchain with its source: rustup component add --toolchain nightly rust-src";
        return tally.missing(what, why);
    }
    tests(tally, what, || {
        let mut c = nightly_cargo("thread", &project_root())?;
        c.args(["test", "-Zbuild-std", "--target", &host(), "-p", "ggml-ext", "--lib", "--test", "small", "--"]);
        // Those with threads; what compares kernels alone takes many minutes here and has none.
        c.args(["attention::tests::a", "attend::", "every_type_lives"]);
        c.env("RUSTFLAGS", "-Zsanitizer=thread").env("PROPTEST_CASES", "16");
        Ok(c)
    });
}

/// Headers, specs, tables, types, and the scalar formats with their attention. Vector kernels are none of Miri's.
const MIRI_TESTS: [&str; 8] = [
    "state::tests::every_flipped",
    "state::tests::what_differs",
    "state::tests::a_header",
    "spec::",
    "table::",
    "kv_type::",
    "memory::tests::what",
    "every_type_lives",
];

fn miri(tally: &mut Tally) {
    let what = "headers, specs, formats and attention under Miri";
    let version = Command::new("cargo").args(["+nightly", "miri", "--version"]).output();
    if !version.is_ok_and(|o| o.status.success()) {
        let why = "no nightly toolchain with Miri: rustup component add --toolchain nightly miri rust-src";
        return tally.missing(what, why);
    }
    tests(tally, what, || {
        let mut c = nightly_cargo("miri", &project_root())?;
        c.args(["miri", "test", "-p", "ggml-ext", "--lib", "--test", "small", "--"]).args(MIRI_TESTS);
        c.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "4");
        Ok(c)
    });
}
