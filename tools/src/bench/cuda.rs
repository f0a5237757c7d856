//! `cargo kv bench --cuda`: kv-test-cuda times the ops on the GPU, ours and upstream's, as nodes of captured graphs.

use std::process::Command;

use anyhow::{bail, ensure, Context, Result};

use super::Options;
use crate::pair::Pair;
use crate::{build_tree, process};

const PROGRAM: &str = "kv-test-cuda";

pub fn bench(options: &Options) -> Result<()> {
    let Options { shapes, cells, types, isa, threads, queries, encode, quick, json, .. } = options;
    let cpu_alone = !shapes.is_empty() || !isa.is_empty() || !threads.is_empty() || queries != &[1];
    if cpu_alone || *encode || *quick || json.is_some() {
        bail!("--cuda measures fixed shapes: of the other options it takes --cells and --types");
    }
    let types = types.iter().map(|t| Pair::parse(t)).collect::<Result<Vec<_>>>()?;
    let mut c = Command::new(build_tree::build(&options.build, &[PROGRAM.into()])?.join(PROGRAM));
    c.arg("--bench");
    if !cells.is_empty() {
        c.args(["--cells", &cells.iter().map(usize::to_string).collect::<Vec<_>>().join(",")]);
    }
    if !types.is_empty() {
        c.args(["--pairs", &types.iter().map(|t| format!("{}/{}", t.k, t.v)).collect::<Vec<_>>().join(",")]);
    }
    let status = c.status().with_context(|| format!("cannot run {}", process::shown(&c)))?;
    ensure!(status.success(), "{} ended with {status}", process::shown(&c));
    Ok(())
}
