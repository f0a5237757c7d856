//! The CUDA kernels: compiled everywhere, run where there is a GPU.

use std::process::Command;

use anyhow::Result;

use super::{program, Options, Tally};
use crate::{build_tree, cache, cuda};

const PROGRAM: &str = "kv-test-cuda";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    match cuda::nvcc() {
        Err(why) => tally.skip("compiling the kernels", 1, &format!("{why:#}")),
        Ok(nvcc) => {
            let scratch = cache::Scratch::new()?;
            for source in cuda::kernels()? {
                let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let target = scratch.path().join(format!("{name}.fatbin"));
                tally.check(&format!("{name} for sm_75, 80, 86, 89 and 90"), || cuda::compile(&nvcc, &source, &target));
            }
        }
    }
    if !cuda::has_gpu() {
        tally.skip("the ops on a GPU", 1, "this machine has no NVIDIA GPU (nvidia-smi lists none)");
        return Ok(());
    }
    let build = build_tree::Options { cuda: true, ..build_tree::Options::default() };
    let bin = build_tree::build(&build, &[PROGRAM.into()])?;
    program::run(&mut Command::new(bin.join(PROGRAM)), PROGRAM, options, tally)?;
    // What GPUs without the fast path run.
    let mut tiles = Command::new(bin.join(PROGRAM));
    tiles.args(["--filter", "srft4"]).env("GGML_EXT_CUDA_PATH", "tile");
    program::run(&mut tiles, "kv-test-cuda by tiles alone", options, tally)
}
