//! The life of a cache: states, shifts and everything else that is done to it, serving, spreading over machines, bad input.

mod fuzz;
mod rpc;
mod sanitize;
pub mod server;

use std::process::{Child, Command};

use anyhow::Result;

use super::{program, Options, Tally};
use kv::{build_tree, cache, model};

pub const PROGRAM: &str = "kv-test-life";
pub const CALIBRATE: &str = "kv-calibrate";
pub const TARGETS: [&str; 3] = [PROGRAM, CALIBRATE, "llama-server"];

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    fuzz::run(options, tally);
    let targets = TARGETS.map(String::from);
    let bin = tally.timed("build", || build_tree::build(&build_tree::Options::default(), &targets))?;
    let scratch = cache::Scratch::new()?;
    let mut life = Command::new(bin.join(PROGRAM));
    life.arg("--dir").arg(scratch.path()).arg("--calibrate").arg(bin.join(CALIBRATE));
    program::run(&mut life, PROGRAM, options, tally)?;
    server::run(options, &bin, &model::default_model()?, tally);
    // Builds of their own.
    if options.soak || !options.only.is_empty() {
        rpc::run(tally)?;
    } else {
        tally.skip("RPC", 1, "another build of llama.cpp: run it with --only life, or --soak");
    }
    if options.soak {
        sanitize::run(tally)?;
    } else {
        tally.skip("sanitizers and Miri", 1, "slow: run them with --soak");
    }
    Ok(())
}

/// A server that ends with its value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
