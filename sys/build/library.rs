//! llama.cpp by the project's CMakeLists.txt, and what cargo must link.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{has, python, Result, Setup};

pub fn build(setup: &Setup, source: &Path) -> Result<()> {
    provide_cmake(setup)?;
    if has("common") {
        compile_wrapper(setup, source);
    }
    configure(setup, source).build();
    link(setup)
}

fn configure(setup: &Setup, source: &Path) -> cmake::Config {
    let mut config = cmake::Config::new(&setup.project);
    for (name, value) in env::vars().filter(|(name, _)| name.starts_with("CMAKE_") || name.starts_with("GGML_")) {
        println!("cargo::rerun-if-env-changed={name}");
        config.define(name, value);
    }
    let mut set = |name: &str, on: bool| {
        config.define(name, if on { "ON" } else { "OFF" });
    };
    set("BUILD_SHARED_LIBS", setup.shared);
    set("LLAMA_BUILD_COMMON", has("common"));
    for part in ["APP", "SERVER", "TOOLS"] {
        set(&format!("LLAMA_BUILD_{part}"), false);
    }
    set("GGML_OPENMP", has("openmp"));
    if setup.is_apple() {
        set("GGML_BLAS", false);
    }
    if has("cuda") {
        set("GGML_CUDA", true);
        set("GGML_CUDA_NCCL", false);
        set("GGML_CUDA_NO_VMM", has("cuda-no-vmm"));
    }
    // With target-cpu=native the CMakeLists finds out what this CPU runs; else the program must run elsewhere too.
    if !env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default().contains("target-cpu=native") {
        set("GGML_NATIVE", false);
        if setup.target.starts_with("aarch64") && !setup.is_apple() && env::var_os("GGML_CPU_ARM_ARCH").is_none() {
            config.define("GGML_CPU_ARM_ARCH", "armv8-a");
        }
    }
    // A shared ggml-base holds the Rust library itself, and CMake has cargo build that; a static one finds it in the
    // program.
    if setup.shared {
        config.define("GGML_EXT_RUST_TARGET", &setup.target);
    } else {
        config.define("GGML_EXT_LIBRARY", "none");
    }
    config.define("KV_LLAMA_CPP_DIR", source.join("llama.cpp")).define("CMAKE_INSTALL_LIBDIR", "lib");
    // ccache then sees the same relative paths in every program's target folder.
    if env::var_os("CCACHE_BASEDIR").is_none() {
        config.env("CCACHE_BASEDIR", &setup.out);
    }
    println!("cargo::rerun-if-env-changed=LLAMA_LIB_PROFILE");
    println!("cargo::rerun-if-env-changed=LLAMA_BUILD_SHARED_LIBS");
    config.profile(&env::var("LLAMA_LIB_PROFILE").unwrap_or("Release".into()));
    config
}

/// The original's C interface to llama.cpp's `common`.
fn compile_wrapper(setup: &Setup, source: &Path) {
    let llama = source.join("llama.cpp");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").pic(true).file(source.join("wrapper_common.cpp"));
    build.includes(["", "common", "include", "ggml/include", "vendor"].map(|folder| llama.join(folder)));
    if setup.is_apple() {
        // link() names it.
        build.cpp_link_stdlib(None);
    }
    build.compile("llama_cpp_sys_2_common_wrapper");
}

fn provide_cmake(setup: &Setup) -> Result<()> {
    let runs = |tool: &str| Command::new(tool).arg("--version").output().is_ok_and(|done| done.status.success());
    if env::var_os("CMAKE").is_none() && !runs("cmake") {
        // The program itself, not the script beside it that looks for its package.
        env::set_var("CMAKE", python::install(setup, "cmake")?.join("cmake/data/bin/cmake"));
    }
    if env::var_os("CMAKE_GENERATOR").is_none() && !runs("make") {
        if !runs("ninja") {
            env::set_var("CMAKE_MAKE_PROGRAM", python::install(setup, "ninja")?.join("bin/ninja"));
        }
        env::set_var("CMAKE_GENERATOR", "Ninja");
    }
    Ok(())
}

fn link(setup: &Setup) -> Result<()> {
    let lib = setup.out.join("lib");
    let (kind, suffix) = match (setup.shared, setup.is_apple()) {
        (false, _) => ("static", ".a"),
        (true, true) => ("dylib", ".dylib"),
        (true, false) => ("dylib", ".so"),
    };
    println!("cargo::rustc-link-search=native={}", lib.display());
    println!("cargo::metadata=ggml_cmake_dir={}", lib.join("cmake").display());
    // Part of `common` that is never installed.
    let base = setup.out.join("build/llama.cpp/common");
    if has("common") {
        println!("cargo::rustc-link-search=native={}", base.display());
        println!("cargo::rustc-link-lib=static=llama-common-base");
    }
    let mut found = 0;
    for entry in fs::read_dir(&lib)?.flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        if let Some(name) = file.strip_prefix("lib").and_then(|f| f.strip_suffix(suffix)) {
            println!("cargo::rustc-link-lib={kind}={name}");
            found += 1;
        }
        if setup.shared && file.contains(suffix) {
            copy_beside_programs(setup, &entry.path())?;
        }
    }
    if found == 0 {
        return Err(format!("CMake installed no lib*{suffix} in {}", lib.display()).into());
    }
    link_system(setup);
    Ok(())
}

fn link_system(setup: &Setup) {
    if has("cuda") && !setup.shared {
        println!("cargo::rerun-if-env-changed=CUDA_PATH");
        let root = PathBuf::from(env::var("CUDA_PATH").unwrap_or("/usr/local/cuda".into()));
        for folder in ["lib64", "lib64/stubs", "lib"] {
            println!("cargo::rustc-link-search=native={}", root.join(folder).display());
        }
        for name in ["static=cudart_static", "static=cublas_static", "static=cublasLt_static", "static=culibos"] {
            println!("cargo::rustc-link-lib={name}");
        }
        if !has("cuda-no-vmm") {
            println!("cargo::rustc-link-lib=cuda");
        }
    }
    if setup.is_apple() {
        for name in ["Foundation", "Metal", "MetalKit", "Accelerate"] {
            println!("cargo::rustc-link-lib=framework={name}");
        }
        println!("cargo::rustc-link-lib=c++");
        return;
    }
    if has("openmp") && setup.target.contains("gnu") {
        println!("cargo::rustc-link-lib=gomp");
    }
    println!("cargo::rustc-link-lib=stdc++");
}

/// Where the loader of a program in the target folder, of its tests and of its examples may be pointed.
fn copy_beside_programs(setup: &Setup, library: &Path) -> Result<()> {
    let target = setup.out.ancestors().nth(3).ok_or("OUT_DIR is not in a target folder")?;
    for folder in [target.to_path_buf(), target.join("deps"), target.join("examples")] {
        if folder.is_dir() {
            fs::copy(library, folder.join(library.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}
