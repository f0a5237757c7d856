//! The CUDA kernels: compiled everywhere, run on the CPU, and where there is one on a GPU.

use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{anyhow, Result};

use super::{gpu, program, Options, Tally};
use crate::cuda::{self, Depth};
use kv::{build_tree, cache};

/// Kernels as C++, a fiber for each thread.
const EMULATED: &str = "kv-test-cuda-emulated";

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    match cuda::nvcc() {
        // Where it can be fetched, it should have been.
        Err(why) if cfg!(all(target_os = "linux", target_arch = "x86_64")) => {
            tally.missing("compiling the kernels", &format!("{why:#}"));
        }
        Err(why) => tally.skip("compiling the kernels", 1, &format!("{why:#}")),
        Ok(nvcc) => compile(&nvcc, options, tally)?,
    }
    emulated(options, tally)?;
    if cuda::has_gpu() {
        return gpu::run(options, tally);
    }
    tally.skip("everything on a GPU", 1, "this machine has no NVIDIA GPU (nvidia-smi lists none)");
    Ok(())
}

fn emulated(options: &Options, tally: &mut Tally) -> Result<()> {
    if !cfg!(unix) {
        tally.skip(EMULATED, 1, "its fibers are for Linux and macOS");
        return Ok(());
    }
    let bin = tally.timed("build", || build_tree::build(&build_tree::Options::default(), &[EMULATED.into()]))?;
    // The whole list takes minutes.
    let options = Options { quick: options.quick || !options.soak, ..options.clone() };
    program::run(&mut Command::new(bin.join(EMULATED)), EMULATED, &options, tally)
}

/// All files beside each other: the largest takes as long as the others together.
fn compile(nvcc: &Path, options: &Options, tally: &mut Tally) -> Result<()> {
    let depth = match (options.quick, options.soak) {
        (true, _) => Depth::Ptx,
        (_, true) => Depth::All,
        _ => Depth::Ends,
    };
    let scratch = cache::Scratch::new()?;
    let sources = cuda::kernels()?;
    let fast = cuda::fast_compile_options(nvcc, depth);
    let results: Vec<Result<()>> = tally.timed("compiling the kernels", || {
        thread::scope(|scope| {
            let threads: Vec<_> = sources
                .iter()
                .enumerate()
                .map(|(n, source)| {
                    let target = scratch.path().join(format!("{n}.fatbin"));
                    scope.spawn(move || cuda::compile(nvcc, source, depth, fast, &target))
                })
                .collect();
            threads.into_iter().map(|t| t.join().map_err(|_| anyhow!("the compiling thread panicked"))?).collect()
        })
    });
    for (source, result) in sources.iter().zip(results) {
        let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tally.check(&format!("{name} {}", depth.what()), || result);
    }
    Ok(())
}
