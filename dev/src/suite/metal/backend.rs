//! ggml's own Metal backend, with our patch, over a device that is a CPU (on a Mac: the GPU): a C++ program built in the same
//! tree, which counts for itself. Here are made the shaders that it runs, from the very texts that Metal's compiler would get.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ggml_ext::metal::{source, SHADERS};

use super::Setup;
use crate::metal::Shader;
use crate::suite::{program, Options, Tally};
use kv::source::{self as tree, Source, Tree};
use kv::{build_tree, cache};

pub const PROGRAM: &str = "kv-test-metal";
/// ggml's types that stand beside ours in a cache.
const PLAIN: [&str; 4] = ["f32", "f16", "q8_0", "q4_0"];

pub fn run(setup: &Setup, options: &Options, tally: &mut Tally) -> Result<()> {
    if !setup.compiler.has_half() {
        tally.missing("ggml's Metal backend", "its shaders need a compiler with 16-bit floats: g++ 12 or clang 15");
        return Ok(());
    }
    // On a Mac the backend is the real one, and Metal compiles.
    let mac = cfg!(target_os = "macos");
    if mac {
        if let Err(why) = super::gpu_name() {
            tally.skip("ggml's Metal backend", 1, &format!("{why:#}"));
            return Ok(());
        }
    }
    let folder = cache::Scratch::new()?;
    if !mac {
        libraries(setup, folder.path())?;
    }
    let build = build_tree::Options { metal: mac, ..build_tree::Options::default() };
    let bin = tally.timed("build", || build_tree::build(&build, &[PROGRAM.into()]))?;
    println!("metal: ggml's Metal backend against its CPU backend");
    // In emulation the whole list takes ten minutes.
    let options = Options { quick: options.quick || !(mac || options.soak), ..options.clone() };
    program::run(Command::new(bin.join(PROGRAM)).env("KV_METAL_LIBRARIES", folder.path()), PROGRAM, &options, tally)
}

/// For each shader of ours its text and its library, and ggml's kernels that fill a cache.
fn libraries(setup: &Setup, folder: &Path) -> Result<()> {
    for name in SHADERS {
        let path = folder.join(format!("{name}.metal"));
        fs::write(&path, source(name).with_context(|| format!("there is no shader {name}"))?.to_bytes())?;
        let library =
            setup.compiler.library(&Shader { source: path, include: &[], define: &[], kernels: &[] }, setup.mode)?;
        fs::copy(library, folder.join(format!("{name}.so")))?;
    }
    fs::write(folder.join("list"), SHADERS.join("\n"))?;
    let src = tree::patched(&Source::choose(Tree::Full, None)?)?.dir.join("ggml/src");
    let include = [src.clone(), src.join("ggml-metal"), src.join("ggml-metal/kernels")];
    let kernels: Vec<String> = PLAIN
        .iter()
        .flat_map(|kind| [format!("kernel_set_rows_f32_i64_{kind}"), format!("kernel_get_rows_{kind}")])
        .collect();
    let kernels: Vec<&str> = kernels.iter().map(String::as_str).collect();
    let shader = Shader {
        source: src.join("ggml-metal/kernels/quantize.metal"),
        include: &include,
        define: &[],
        kernels: &kernels,
    };
    fs::copy(setup.compiler.library(&shader, setup.mode)?, folder.join("ggml.so"))?;
    Ok(())
}
