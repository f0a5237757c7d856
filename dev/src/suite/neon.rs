//! The NEON kernels without such a machine: built for aarch64 and run in emulation, and checked for macOS.
//!
//! qemu emulates CPUs with and without the instructions that the tables differ in, so the choice of a table is tested as
//! well as the tables. Emulated seconds say nothing about speed; `cargo kv mca` does.

mod whole;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::cargo;
use super::rust::{failed_names, libtest_counts};
use super::{wrapper, Options, Tally};
use crate::cross::{self, AARCH64, AARCH64_GCC, AARCH64_ROOT, QEMU};
use kv::progress::Spinner;
use kv::{process, project_root};

/// What qemu calls a CPU, and the table that must be in use on it.
const CPUS: [(&str, &str); 3] = [("cortex-a57", "neon"), ("cortex-a76", "dotprod"), ("max,sve=off", "i8mm")];

/// Tests whose names begin so: what is made of kernels, for every table.
const LIST: [&str; 3] = ["isa::", "attention::", "groups::"];

/// The scalar definition, which is the same on every CPU: once is enough.
const DEFINITION: [&str; 2] = ["codec::", "lanes::"];

/// Part of the names of its slowest tests: averages over thousands of products with dense matrices, about the method and not
/// about a CPU. Only with --soak.
const AVERAGES: &str = "_projection";

/// Prints the table, and fails where another one was asked for.
const TABLE_TEST: &str = "isa::tests::the_table_in_use_is_the_best_or_the_one_named";

/// Of CPU time on each core, far more than the list takes.
const LIMIT: Duration = Duration::from_secs(1200);

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let emulated = emulate(options, tally);
    // Last: it waits for builds that other parts have under way.
    check_macos(options, tally);
    emulated
}

fn emulate(options: &Options, tally: &mut Tally) -> Result<()> {
    if cfg!(target_arch = "aarch64") {
        tally.skip("emulation", 1, "this CPU is aarch64: part rust runs these tests natively");
        return Ok(());
    }
    if let Err(why) = cross::programs(&[AARCH64_GCC, QEMU]).and_then(|()| cross::rust_target(AARCH64)) {
        tally.missing("emulation", &why);
        return Ok(());
    }
    let program = tally.timed("building tests for aarch64", || {
        let _spinner = Spinner::new("building tests for aarch64");
        build_tests()
    })?;
    for (cpu, table) in CPUS {
        let emulated = Emulated { program: &program, cpu };
        tally.check(&format!("{table} is the table of {cpu}"), || emulated.chooses(table));
        run_tests(options, tally, &emulated, table, &LIST)?;
    }
    let [first, ..] = CPUS;
    run_tests(options, tally, &Emulated { program: &program, cpu: first.0 }, "scalar", &DEFINITION)?;
    if options.soak {
        return whole::run(tally);
    }
    tally.skip("llama.cpp in emulation", 1, "slow: run it with --soak");
    Ok(())
}

/// What a Mac would compile; in the long form tests, examples and fuzz targets too.
fn check_macos(options: &Options, tally: &mut Tally) {
    const MACOS: &str = "aarch64-apple-darwin";
    let short = options.only.is_empty() && !options.soak;
    // sys is in the lock file of the examples, as it is in that of a program.
    for (what, folder) in [("the workspace", "."), ("sys and the examples", "examples"), ("the fuzz targets", "fuzz")] {
        let what = format!("cargo check of {what} for {MACOS}");
        if folder != "." && short {
            tally.skip(&what, 1, "slow: run it with --only neon, or --soak");
            continue;
        }
        if let Err(why) = cross::rust_target(MACOS) {
            tally.missing(&what, &why);
            continue;
        }
        tally.check(&what, || {
            let _spinner = Spinner::new(&what);
            let mut c = cargo::command(&["check", "--quiet", "--locked", "--workspace", "--target", MACOS]);
            c.current_dir(project_root().join(folder));
            if !short {
                c.arg("--all-targets");
            }
            if folder != "." {
                // What build scripts are made of is compiled there for part wrapper, too.
                c.arg("--target-dir").arg(wrapper::short_target()?);
            }
            // Nothing is linked: sys need not build llama.cpp, nor fuzz libFuzzer, and a dependency's C file needs none of
            // Apple's options to be compiled here.
            c.env("RUSTFLAGS", "-D warnings").env("CRATE_CC_NO_DEFAULTS", "1");
            c.env("LLAMA_CPP_SYS_2_CHECK", "1").env("CUSTOM_LIBFUZZER_PATH", "/libFuzzer.a");
            process::run_ok(&mut c).map(drop)
        });
    }
}

/// The library's own tests as a program.
fn build_tests() -> Result<PathBuf> {
    let args = ["test", "--package", "ggml-ext", "--lib", "--no-run", "--target", AARCH64, "--message-format", "json"];
    let mut c = cargo::command(&args);
    c.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", AARCH64_GCC.name);
    // Nobody debugs it here, and without it compiling takes less.
    c.env("CARGO_PROFILE_TEST_DEBUG", "0");
    let built = process::run_ok(&mut c)?.stdout;
    let program = cargo::messages(&built).find_map(|m| m.executable);
    program.context("cargo named no program of the tests")
}

struct Emulated<'a> {
    program: &'a Path,
    cpu: &'a str,
}

impl Emulated<'_> {
    fn command(&self) -> Command {
        let mut c = Command::new(QEMU.name);
        c.args(["-cpu", self.cpu, "-L", AARCH64_ROOT]).arg(self.program).env_remove("GGML_EXT_ISA");
        c
    }

    /// Without being told.
    fn chooses(&self, table: &str) -> Result<()> {
        let mut c = self.command();
        let done = process::run(c.args(["--exact", TABLE_TEST, "--nocapture"]), Some(LIMIT))?;
        let line = format!("table in use: {table}");
        // libtest may have begun the line with the test's name.
        let seen = done.status.success() && done.stdout.lines().any(|l| l.ends_with(&line));
        ensure!(seen, "no '{line}' in\n{}", process::tail(&done.text(), 20));
        Ok(())
    }
}

/// How much of the tests: random cases of each property, and one in so many of the cases that are products of lists.
fn amount(options: &Options) -> (u32, u32) {
    match (options.quick, options.soak) {
        (true, _) => (2, 23),
        (_, true) => (64, 1),
        _ => (2, 17),
    }
}

/// Tests with a table forced.
fn run_tests(options: &Options, tally: &mut Tally, emulated: &Emulated, table: &str, names: &[&str]) -> Result<()> {
    let (cases, step) = amount(options);
    let mut c = emulated.command();
    c.args(names).env("GGML_EXT_ISA", table);
    if !options.soak {
        c.args(["--skip", AVERAGES]);
    }
    c.env("PROPTEST_CASES", cases.to_string()).env("GGML_EXT_TEST_STEP", step.to_string());
    let start = Instant::now();
    let done = {
        let _spinner = Spinner::new(&format!("tests with {table} on {}", emulated.cpu));
        process::run(&mut c, Some(LIMIT))?
    };
    let [passed, failed, _] = libtest_counts(&done.stdout);
    tally.add(passed, 0);
    tally.count(&format!("tests with {table} on {}", emulated.cpu), passed);
    let seconds = start.elapsed().as_secs_f64();
    tally.took(&format!("tests with {table} on {}", emulated.cpu), start.elapsed());
    println!(
        "ok    neon: {passed} tests with {table} on {}, {cases} random cases of each property ({seconds:.1} s)",
        emulated.cpu
    );
    for name in failed_names(&done.stdout) {
        tally.fail(&format!("{name} with {table} on {}", emulated.cpu), "see below");
    }
    if !done.status.success() {
        println!("{}", process::tail(&done.text(), 80));
        if failed == 0 {
            let why = if done.timed_out { "hung and were killed" } else { "ended with an error and no failed test" };
            bail!("the tests with {table} on {} {why} ({})", emulated.cpu, done.status);
        }
    }
    ensure!(passed + failed > 0, "no test is named {}…", names.join("…, "));
    Ok(())
}
