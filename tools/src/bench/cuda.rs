//! `cargo kv bench --cuda`: kv-test-cuda times the ops on the GPU, ours and upstream's, as nodes of captured graphs.

use std::process::Command;

use anyhow::{bail, ensure, Context, Result};

use super::Options;
use crate::{build_tree, process};

const PROGRAM: &str = "kv-test-cuda";

pub fn bench(options: &Options) -> Result<()> {
    let Options { shapes, cells, types, isa, threads, queries, encode, quick, json, .. } = options;
    let others =
        !shapes.is_empty() || !isa.is_empty() || !threads.is_empty() || queries != &[1] || *encode || json.is_some();
    if others {
        bail!("--cuda measures fixed shapes: of the other options it takes --cells, --types and --quick");
    }
    let mut c = Command::new(build_tree::build(&options.build, &[PROGRAM.into()])?.join(PROGRAM));
    c.arg("--bench");
    if !cells.is_empty() {
        c.args(["--cells", &cells.iter().map(usize::to_string).collect::<Vec<_>>().join(",")]);
    } else if *quick {
        c.args(["--cells", "8192,32768"]);
    }
    if !types.is_empty() {
        c.args(["--pairs", &types.iter().map(|t| pair_of(t)).collect::<Vec<_>>().join(",")]);
    } else if *quick {
        c.args(["--pairs", "srft4/srft4,delta4/srft4"]);
    }
    let status = c.status().with_context(|| format!("cannot run {}", process::shown(&c)))?;
    ensure!(status.success(), "{} ended with {status}", process::shown(&c));
    Ok(())
}

/// T alone is T/T.
fn pair_of(name: &str) -> String {
    if name.contains('/') {
        name.to_string()
    } else {
        format!("{name}/{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_type_is_both_sides() {
        assert_eq!(pair_of("srft4"), "srft4/srft4");
        assert_eq!(pair_of("delta4/srft4"), "delta4/srft4");
    }
}
