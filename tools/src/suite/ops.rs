//! The ops against ggml's own.

use std::process::Command;

use anyhow::Result;

use super::{program, Options, Tally};
use crate::build_tree;

const PROGRAM: &str = "kv-test-ops";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let bin = build_tree::build(&build_tree::Options::default(), &[PROGRAM.into()])?;
    program::run(&mut Command::new(bin.join(PROGRAM)), PROGRAM, options, tally)
}
