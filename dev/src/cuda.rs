//! nvcc: the machine's, else PyPI's in a folder of the cache. It compiles kernels for any GPU, on machines without one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use kv::fetch::{self, Pin};
use kv::progress::Spinner;
use kv::{cache, process, project_root};

const fn wheel(name: &'static str, version: &'static str, sha256: &'static str) -> Pin {
    Pin { name, version, sha256, sdist: false }
}

/// The compiler, what it runs, and the headers that kernels include.
const WHEELS: [Pin; 5] = [
    wheel("nvidia-cuda-nvcc", "13.0.88", "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03"),
    wheel("nvidia-nvvm", "13.0.88", "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0"),
    wheel("nvidia-cuda-crt", "13.0.88", "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4"),
    wheel("nvidia-cuda-runtime", "13.0.96", "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548"),
    wheel("nvidia-cuda-cccl", "13.0.85", "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649"),
];

/// How far kernels are compiled.
#[derive(Clone, Copy, Debug)]
pub enum Depth {
    /// To PTX for one GPU, which checks all but the instructions of inline assembly and the code for others.
    Ptx,
    /// To the machine code of the oldest and of the newest GPU.
    Ends,
    /// To the machine code of all.
    All,
}

/// The folder of kernels that only Hopper can run.
const HOPPER: &str = "hopper";

impl Depth {
    /// Of kernels for Hopper alone, or of the others.
    fn targets(self, hopper: bool) -> &'static [(&'static str, &'static str)] {
        match self {
            Depth::Ptx if hopper => &[("compute_90a", "compute_90a")],
            _ if hopper => &[("compute_90a", "sm_90a")],
            Depth::Ptx => &[("compute_80", "compute_80")],
            Depth::Ends => &[("compute_75", "sm_75"), ("compute_90", "sm_90")],
            Depth::All => &[("compute_75", "sm_75"), ("compute_80", "[sm_80,sm_86,sm_89]"), ("compute_90", "sm_90")],
        }
    }

    pub fn what(self) -> &'static str {
        match self {
            Depth::Ptx => "to PTX of compute_80 or 90a",
            Depth::Ends => "for sm_75, sm_90 and sm_90a",
            Depth::All => "for sm_75, 80, 86, 89, 90 and 90a",
        }
    }
}

/// An error says why there is none.
pub fn nvcc() -> Result<PathBuf> {
    if process::run(Command::new("nvcc").arg("--version"), None).is_ok_and(|done| done.status.success()) {
        return Ok("nvcc".into());
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("this machine has no nvcc, and the wheels that bring it are for x86-64 Linux: install the CUDA toolkit");
    }
    let dir = cache::root()?.join(format!("nvcc-{}", cache::key(&WHEELS.map(|w| w.sha256))));
    let dir = cache::place(&dir, |part| {
        let wheels = WHEELS.iter().map(fetch::pypi).collect::<Result<Vec<_>>>()?;
        let _spinner = Spinner::new("unpacking nvcc");
        let mut pip = Command::new(fetch::python());
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-index", "--no-deps"]);
        pip.arg("--target").arg(part).args(wheels).env("PIP_USER", "0");
        process::run_ok(&mut pip).map(drop)
    })?;
    Ok(dir.join("nvidia/cu13/bin/nvcc"))
}

/// The kernels, one file after the other.
pub fn kernels() -> Result<Vec<PathBuf>> {
    let dir = project_root().join("cuda");
    let mut files = vec![];
    for dir in [dir.join(HOPPER), dir] {
        let entries = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
        files.extend(entries.flatten().map(|e| e.path()).filter(|f| f.extension().is_some_and(|e| e == "cu")));
    }
    files.sort();
    Ok(files)
}

/// Options that skip optimizations, for code that is only compiled; none where this nvcc has no such (12.9 and later do).
pub fn fast_compile_options(nvcc: &Path, depth: Depth) -> &'static [&'static str] {
    let known =
        || process::run(Command::new(nvcc).arg("--help"), None).is_ok_and(|d| d.stdout.contains("--Ofast-compile"));
    match depth {
        Depth::Ptx | Depth::Ends if known() => &["--Ofast-compile", "max"],
        _ => &[],
    }
}

/// An error has the compiler's messages.
pub fn compile(nvcc: &Path, source: &Path, depth: Depth, options: &[&str], target: &Path) -> Result<()> {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-use_fast_math", "-Werror", "all-warnings", "-DKV_CUDA_HOPPER"]).args(options);
    let hopper = source.parent().is_some_and(|dir| dir.ends_with(HOPPER));
    for (virtual_arch, code) in depth.targets(hopper) {
        command.args(["-gencode", &format!("arch={virtual_arch},code={code}")]);
    }
    command.arg("-I").arg(project_root().join("cuda/msl"));
    command.arg("-fatbin").arg(source).arg("-o").arg(target);
    process::run_ok(&mut command).map(drop)
}

/// Is there a GPU that CUDA could use?
pub fn has_gpu() -> bool {
    process::run(Command::new("nvidia-smi").arg("-L"), None)
        .is_ok_and(|done| done.status.success() && done.stdout.contains("GPU "))
}
