//! The same tests under tools that see what tests cannot: ASan and UBSan over llama.cpp and the shim, Miri over the
//! safe core, TSan over the threads of attention.

use std::process::Command;

use anyhow::{ensure, Result};

use super::{cache, Tally, PROGRAM};
use crate::build_tree::{self, Sanitizer};
use crate::{process, project_root};

pub fn run(tally: &mut Tally) -> Result<()> {
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
            let done = process::run(&mut c, None)?;
            ensure!(done.status.success(), "{}\n{}", done.status, process::tail(&done.text(), 60));
            Ok(())
        });
    }
    miri(tally);
    threads(tally);
    Ok(())
}

/// Rust's own code is seen by TSan only where it and the standard library are compiled for it.
fn threads(tally: &mut Tally) {
    let what = "the threads of attention under ThreadSanitizer";
    let source = Command::new("rustc").args(["+nightly", "--print", "sysroot"]).output();
    let source = source.ok().map(|o| String::from_utf8_lossy(&o.stdout).trim().to_string()).unwrap_or_default();
    if !std::path::Path::new(&source).join("lib/rustlib/src/rust/library/std").is_dir() || !cfg!(target_os = "linux") {
        tally.skip(what, 1, "no nightly toolchain with its source: rustup component add --toolchain nightly rust-src");
        return;
    }
    tally.check(what, || {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut c = Command::new("cargo");
        c.args([
            "+nightly",
            "test",
            "-Zbuild-std",
            "--target",
            &target,
            "-p",
            "ggml-ext",
            "--lib",
            "--",
            "attention::",
        ]);
        c.env("RUSTFLAGS", "-Zsanitizer=thread").current_dir(project_root());
        process::run_ok(process::forget_cargo(&mut c)).map(drop)
    });
}

/// Headers, specs, tables and the scalar formats; not the vector kernels, which Miri does not know.
const MIRI_TESTS: [&str; 4] =
    ["state::tests::every_flipped", "state::tests::what_differs", "state::tests::a_header", "spec::"];

fn miri(tally: &mut Tally) {
    let found =
        Command::new("cargo").args(["+nightly", "miri", "--version"]).output().is_ok_and(|o| o.status.success());
    if !found {
        tally.skip("Miri", 1, "no nightly toolchain with Miri: rustup component add --toolchain nightly miri rust-src");
        return;
    }
    tally.check("state headers and specs under Miri", || {
        let mut c = Command::new("cargo");
        c.args(["+nightly", "miri", "test", "-p", "ggml-ext", "--lib", "--"])
            .args(MIRI_TESTS)
            .current_dir(project_root());
        c.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "4");
        process::run_ok(process::forget_cargo(&mut c)).map(drop)
    });
}
