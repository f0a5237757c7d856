//! The ops against ggml's own.

use std::process::Command;

use anyhow::Result;

use super::{program, Options, Tally};
use kv::{build_tree, cpu, python};

pub const PROGRAM: &str = "kv-test-ops";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    tally.check("CMake alone and cargo kv build compile for the same CPU", || {
        cpu::check_agreement(&python::build_tools()?.cmake)
    });
    let bin = tally.timed("build", || build_tree::build(&build_tree::Options::default(), &[PROGRAM.into()]))?;
    program::run(&mut Command::new(bin.join(PROGRAM)), PROGRAM, options, tally)
}
