//! Every architecture of llama.cpp's test-llama-archs with caches of our types, and their sizes as they are planned.

use std::process::Command;

use anyhow::Result;

use super::{plan, program, Options, Tally};
use kv::source::{self, Source, Tree};
use kv::{build_tree, cache};

pub const PROGRAM: &str = "kv-test-archs";
const FIXTURES: &str = "tests/test-llama-archs.cpp";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let tree = source::patched(&Source::choose(Tree::Full, None)?)?;
    if !tree.dir.join(FIXTURES).is_file() {
        tally.skip("all", 1, &format!("this tree of llama.cpp has no {FIXTURES}"));
        return Ok(());
    }
    let bin = tally.timed("build", || build_tree::build(&build_tree::Options::default(), &[PROGRAM.into()]))?;
    program::run(&mut Command::new(bin.join(PROGRAM)), PROGRAM, options, tally)?;
    if options.quick {
        tally.skip("sizes as they are planned", 1, "not in --quick: it takes half a minute");
        return Ok(());
    }
    let headers = cache::Scratch::new()?;
    let mut sizes = Command::new(bin.join(PROGRAM));
    sizes.arg("--sizes").arg(headers.path());
    let (agree, differ) = tally.timed("plan", || plan::compare(&mut sizes))?;
    tally.add(agree, 0);
    differ.iter().for_each(|why| tally.fail("plan", why));
    Ok(())
}
