//! Every architecture of llama.cpp's test-llama-archs with caches of our types.

use std::process::Command;

use anyhow::Result;

use super::{program, Options, Tally};
use kv::build_tree;
use kv::source::{self, Source, Tree};

pub const PROGRAM: &str = "kv-test-archs";
const FIXTURES: &str = "tests/test-llama-archs.cpp";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let tree = source::patched(&Source::choose(Tree::Full, None)?)?;
    if !tree.dir.join(FIXTURES).is_file() {
        tally.skip("all", 1, &format!("this tree of llama.cpp has no {FIXTURES}"));
        return Ok(());
    }
    let bin = tally.timed("build", || build_tree::build(&build_tree::Options::default(), &[PROGRAM.into()]))?;
    program::run(&mut Command::new(bin.join(PROGRAM)), PROGRAM, options, tally)
}
