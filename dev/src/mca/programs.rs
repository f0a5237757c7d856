//! The programs that are traced, built for aarch64: linked at fixed addresses and statically, so that a trace can be read.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::CLANG;
use crate::cross::{AARCH64, AARCH64_GCC, AARCH64_GXX};
use kv::progress::Spinner;
use kv::source::{self, Source, Tree};
use kv::{process, project_root};

pub struct Programs {
    ours: PathBuf,
    upstream: PathBuf,
    compiler: String,
}

impl Programs {
    pub fn build(dir: &Path) -> Result<Programs> {
        let clang = process::run_ok(Command::new(CLANG.name).arg("--version"))?.stdout;
        let compiler = clang.lines().next().unwrap_or_default().to_string();
        Ok(Programs { ours: ours(dir)?, upstream: upstream(dir)?, compiler })
    }

    /// What ggml's loops were compiled with.
    pub fn compiler(&self) -> &str {
        &self.compiler
    }

    /// The program and its arguments for a side like `srft4-k`.
    pub fn command(&self, table: &str, side: &str) -> (&Path, Vec<String>) {
        if side.starts_with("f16-") || side.starts_with("q4_0-") {
            return (&self.upstream, vec![side.to_string()]);
        }
        (&self.ours, vec![table.to_string(), side.to_string()])
    }
}

/// The example of ggml-ext, in its release profile.
fn ours(dir: &Path) -> Result<PathBuf> {
    let _spinner = Spinner::new("building our loops for aarch64");
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "ggml-ext",
        "--example",
        "decode_loops",
        "--target",
        AARCH64,
    ]);
    // Other flags mean another build: not in the folder of the tests.
    let target = kv::cache::root()?.join("mca-target");
    c.arg("--target-dir").arg(&target).current_dir(project_root());
    c.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", AARCH64_GCC.name);
    c.env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static");
    process::run_ok(process::forget_cargo(&mut c))?;
    let program = dir.join("decode_loops");
    std::fs::copy(target.join(AARCH64).join("release/examples/decode_loops"), &program)?;
    Ok(program)
}

/// ggml's functions and the program around them, as a Mac would compile them: by clang, for its first such core.
fn upstream(dir: &Path) -> Result<PathBuf> {
    let tree = source::patched(&Source::choose(Tree::Full, None)?)?.dir;
    let _spinner = Spinner::new("building ggml's loops for aarch64");
    let ggml = tree.join("ggml/src");
    let sources = [
        ggml.join("ggml-cpu/arch/arm/quants.c"),
        ggml.join("ggml-quants.c"),
        ggml.join("ggml-cpu/vec.cpp"),
        project_root().join("tests/mca/upstream.cpp"),
    ];
    let program = dir.join("upstream");
    let mut link = Command::new(AARCH64_GXX.name);
    link.args(["-static", "-no-pie", "-Wl,--gc-sections", "-o"]).arg(&program);
    for (i, source) in sources.iter().enumerate() {
        let object = dir.join(format!("{i}.o"));
        let mut c = Command::new(CLANG.name);
        c.args(["--target=aarch64-linux-gnu", "-mcpu=apple-m1", "-O3", "-DNDEBUG", "-w", "-c"]);
        c.args(["-ffunction-sections", "-fdata-sections", "-x"]);
        c.args(if source.extension().is_some_and(|e| e == "c") { ["c", "-std=c11"] } else { ["c++", "-std=c++17"] });
        c.arg(source).arg("-o").arg(&object);
        for include in [tree.join("ggml/include"), ggml.clone(), ggml.join("ggml-cpu")] {
            c.arg("-I").arg(include);
        }
        process::run_ok(&mut c)?;
        link.arg(object);
    }
    process::run_ok(&mut link)?;
    Ok(program)
}
