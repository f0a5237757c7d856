//! Fetches the original crate, patches its llama.cpp, binds it and builds it with the types in it.
//!
//! [`original`] brings the source, [`bindings`] runs bindgen over it, [`library`] runs the project's CMakeLists.txt and
//! tells cargo what to link. What the machine lacks of tools comes by [`python`].

mod bindings;
mod library;
mod original;
mod pip;
mod python;

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What cargo says about this build.
struct Setup {
    /// This project.
    project: PathBuf,
    out: PathBuf,
    host: String,
    target: String,
    shared: bool,
    /// Nothing will be linked: no llama.cpp.
    check_only: bool,
}

impl Setup {
    fn new() -> Result<Setup> {
        let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
        let project = manifest.parent().ok_or("this package is not in its project")?.to_path_buf();
        let shared = match env::var("LLAMA_BUILD_SHARED_LIBS") {
            Ok(value) => value == "1",
            Err(_) => has("dynamic-link"),
        };
        println!("cargo::rerun-if-env-changed=LLAMA_CPP_SYS_2_CHECK");
        let check_only = env::var("LLAMA_CPP_SYS_2_CHECK").is_ok_and(|value| value == "1");
        Ok(Setup {
            project,
            out: env::var("OUT_DIR")?.into(),
            host: env::var("HOST")?,
            target: env::var("TARGET")?,
            shared,
            check_only,
        })
    }

    fn is_apple(&self) -> bool {
        self.target.contains("apple")
    }
}

/// Is a feature of this package on?
fn has(feature: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{}", feature.to_uppercase().replace('-', "_"))).is_some()
}

/// Features of the original that are not served here, and what to do without them.
const REFUSED: [(&str, &str); 11] = [
    ("dynamic-backends", "use `dynamic-link`: one CPU backend, made for the target"),
    ("mkl", "the CPU backend needs no BLAS"),
    ("mtmd", "images and audio need the original crate"),
    ("opencl", "there is `cuda`, `metal` and the CPU"),
    ("rocm", "there is `cuda`, `metal` and the CPU"),
    ("static-openmp", "use `openmp`, or neither: ggml has threads of its own"),
    ("static-stdcxx", "link it with RUSTFLAGS=-Clink-arg=-static-libstdc++"),
    ("system-ggml", "the types live in this ggml"),
    ("system-ggml-static", "the types live in this ggml"),
    ("vulkan", "there is `cuda`, `metal` and the CPU"),
    ("webgpu", "there is `cuda`, `metal` and the CPU"),
];

fn check(setup: &Setup) -> Result<()> {
    let refused = REFUSED.iter().filter(|(feature, _)| has(feature));
    let lines: Vec<_> = refused.map(|(feature, instead)| format!("feature `{feature}`: {instead}")).collect();
    if !lines.is_empty() {
        return Err(format!("llama-cpp-sys-2 with KV-cache types does not have\n{}", lines.join("\n")).into());
    }
    let os = env::var("CARGO_CFG_TARGET_OS")?;
    if !["linux", "macos", "ios"].contains(&os.as_str()) {
        let target = &setup.target;
        return Err(format!("llama-cpp-sys-2 with KV-cache types builds for Linux, macOS and iOS, not {target}").into());
    }
    Ok(())
}

fn build() -> Result<()> {
    let setup = Setup::new()?;
    check(&setup)?;
    let source = original::patched(&setup)?;
    bindings::write(&setup, &source)?;
    if setup.check_only {
        return Ok(());
    }
    library::build(&setup, &source)
}

fn main() -> ExitCode {
    let ours = ["build", "pins", "tree", "../CMakeLists.txt", "../cmake", "../patches"];
    for path in ours.into_iter().chain(["../ggml-ext/include", "../ggml-ext/shim"]) {
        println!("cargo::rerun-if-changed={path}");
    }
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            e.to_string().lines().for_each(|line| println!("cargo::error={line}"));
            ExitCode::FAILURE
        }
    }
}
