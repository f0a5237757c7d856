//! The tools of the patched llama.cpp, built into the cache.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};

use crate::progress::{Bar, Spinner};
use crate::source::{self, Patched, Source, Tree};
use crate::{cache, cpu, process, project_root, python};

pub const TOOLS: [&str; 5] = ["llama-cli", "llama-server", "llama-perplexity", "llama-bench", "llama-completion"];

const AARCH64: [&str; 6] = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "-DGGML_NATIVE=OFF",
    "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16",
];

#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct Options {
    /// Folder of tools that were built before; nothing is built then (also: KV_BIN_DIR)
    #[arg(long, value_name = "DIR")]
    pub bin: Option<PathBuf>,
    /// Metal backend (macOS)
    #[arg(long)]
    pub metal: bool,
    /// CUDA backend
    #[arg(long)]
    pub cuda: bool,
    /// RPC backend and rpc-server
    #[arg(long)]
    pub rpc: bool,
    /// Build for any CPU of this architecture, not only for this one
    #[arg(long)]
    pub portable: bool,
    /// Your own llama.cpp tree instead of the pinned one (also: LLAMA_CPP_DIR); it is copied, never changed
    #[arg(long, value_name = "DIR")]
    pub llama_cpp: Option<PathBuf>,
    /// With a sanitizer's checks, for tests
    #[arg(long, value_enum, hide = true)]
    pub sanitize: Option<Sanitizer>,
    /// Parallel jobs (default: one per core)
    #[arg(short, long, value_name = "N")]
    pub jobs: Option<u32>,
    /// For an aarch64 Linux, by a cross compiler, with dotprod and fp16, for tests
    #[arg(long, hide = true)]
    pub aarch64: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sanitizer {
    AddressUndefined,
}

impl Sanitizer {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Sanitizer::AddressUndefined => &["-DLLAMA_SANITIZE_ADDRESS=ON", "-DLLAMA_SANITIZE_UNDEFINED=ON"],
        }
    }
}

/// llama.cpp's name for what its documents call rpc-server.
pub const RPC_SERVER: &str = "ggml-rpc-server";

/// Builds `targets` (all tools where empty) and returns the folder of the programs.
///
/// `--bin` or `KV_BIN_DIR` names the folder of a build made some other way: then nothing is built.
pub fn build(options: &Options, targets: &[String]) -> Result<PathBuf> {
    let mut targets = targets.to_vec();
    if targets.is_empty() {
        targets.extend(TOOLS.map(String::from));
        targets.extend(options.rpc.then(|| RPC_SERVER.to_string()));
    }
    let variable = || std::env::var_os("KV_BIN_DIR").filter(|v| !v.is_empty() && !options.aarch64).map(PathBuf::from);
    if let Some(bin) = options.bin.clone().or_else(variable) {
        return check_bin(&bin, &targets);
    }
    let source = Source::choose(Tree::Full, options.llama_cpp.clone())?;
    let tree = source::patched(&source)?;
    let tools = python::build_tools()?;
    let mut flags = cmake_flags(options, &tree);
    if matches!(source, Source::Own(_)) {
        // Files of another version may not go together.
        flags.push("-DGGML_EXT_UNITY=OFF".to_string());
    }
    // Beside the source, so that the way from here to there is the same for every key and ccache can see that a file
    // which no patch touched was compiled before. Another checkout of this project is another source of the build.
    let root = project_root().display().to_string();
    let dir = tree.home.join(format!("build-{}", cache::key(&[root, flags.join("\n"), compiler()])));
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut lock = fd_lock::RwLock::new(fs::File::create(dir.join("kv.lock"))?);
    if lock.try_write().is_err() {
        eprintln!("waiting for another build in {}", dir.display());
    }
    let _alone = lock.write()?;
    configure(&dir, &flags, &tools)?;
    ninja(&dir, &targets, &tools, options.jobs)?;
    Ok(dir.join("bin"))
}

fn check_bin(bin: &Path, targets: &[String]) -> Result<PathBuf> {
    for name in targets {
        let program = bin.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
        if !program.is_file() && !bin.join(libloading::library_filename(name)).is_file() {
            bail!("there is no {}: build it there, or do without --bin and KV_BIN_DIR", program.display());
        }
    }
    Ok(bin.canonicalize()?)
}

fn cmake_flags(options: &Options, tree: &Patched) -> Vec<String> {
    let on = |name: &str, on: bool| format!("-D{name}={}", if on { "ON" } else { "OFF" });
    let mut flags = vec![
        "-DCMAKE_BUILD_TYPE=Release".to_string(),
        format!("-DKV_LLAMA_CPP_DIR={}", tree.dir.display()),
        format!("-DGGML_EXT_CARGO_TARGET_DIR={}", target_dir().display()),
        on("LLAMA_BUILD_SERVER", true),
        on("LLAMA_BUILD_UI", false),
        on("LLAMA_USE_PREBUILT_UI", false),
        on("LLAMA_OPENSSL", false),
        on("GGML_OPENMP", false),
        on("GGML_METAL", options.metal),
        on("GGML_CUDA", options.cuda),
        on("GGML_RPC", options.rpc),
    ];
    flags.extend(options.sanitize.iter().flat_map(|s| s.flags()).map(|f| f.to_string()));
    if options.aarch64 {
        flags.extend(AARCH64.map(String::from));
    } else {
        flags.extend(cpu::cmake_flags(options.portable));
    }
    flags
}

/// cargo's own: this command is linked with ggml-ext, so that there it is compiled already.
fn target_dir() -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let given = given.and_then(|dir| std::path::absolute(dir).ok());
    given.unwrap_or_else(|| project_root().join("target"))
}

/// Another compiler means another build folder: CMake keeps the one it was configured with.
fn compiler() -> String {
    let ask = |var: &str, default: &str| {
        let name = std::env::var(var).unwrap_or_else(|_| default.to_string());
        let version = process::run(Command::new(&name).arg("--version"), None).map(|d| d.stdout).unwrap_or_default();
        format!("{name} {version}")
    };
    format!("{}\n{}", ask("CC", "cc"), ask("CXX", "c++"))
}

/// Once per folder; ninja itself runs cmake again when a CMakeLists.txt changes.
fn configure(dir: &Path, flags: &[String], tools: &python::BuildTools) -> Result<()> {
    let done = dir.join("kv-configured");
    if done.exists() && dir.join("build.ninja").exists() {
        return Ok(());
    }
    let log = dir.join("kv-configure.log");
    let mut cmake = Command::new(&tools.cmake);
    cmake.arg("-S").arg(project_root()).arg("-B").arg(dir).args(["-G", "Ninja"]);
    cmake.arg(format!("-DCMAKE_MAKE_PROGRAM={}", absolute(&tools.ninja).display())).args(flags);
    let result = {
        let _spinner = Spinner::new("configuring llama.cpp");
        process::run(process::forget_cargo(&mut cmake), None)?
    };
    fs::write(&log, result.text())?;
    if !result.status.success() {
        bail!(
            "configuring llama.cpp failed ({}); the end of {}:\n{}",
            result.status,
            log.display(),
            process::tail(&result.text(), 40)
        );
    }
    fs::write(done, process::shown(&cmake)).map_err(Into::into)
}

/// CMake wants a path; a bare name is looked up as a shell would.
fn absolute(program: &Path) -> PathBuf {
    if program.components().count() > 1 {
        return program.to_path_buf();
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let file = format!("{}{}", program.display(), std::env::consts::EXE_SUFFIX);
    std::env::split_paths(&paths).map(|dir| dir.join(&file)).find(|p| p.is_file()).unwrap_or(program.to_path_buf())
}

fn ninja(dir: &Path, targets: &[String], tools: &python::BuildTools, jobs: Option<u32>) -> Result<()> {
    let log_path = dir.join("kv-build.log");
    let mut log = fs::File::create(&log_path)?;
    let mut command = Command::new(&tools.ninja);
    command.arg("-C").arg(dir).args(targets);
    if let Some(jobs) = jobs {
        command.arg(format!("-j{jobs}"));
    }
    process::forget_cargo(&mut command);
    // Fixed, because the lines are parsed; and one stream, so that the log reads in order.
    command.env("NINJA_STATUS", "[%f/%t] ").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.try_clone()?);
    if std::env::var_os("CCACHE_BASEDIR").is_none() {
        command.env("CCACHE_BASEDIR", cache::root()?);
    }
    let mut child = command.spawn().with_context(|| format!("cannot run {}", process::shown(&command)))?;
    let mut bar = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(|out| out.split(b'\n')) {
        let line = line?;
        log.write_all(&line)?;
        log.write_all(b"\n")?;
        if let Some((n, total, what)) = ninja_step(&String::from_utf8_lossy(&line)) {
            // A step or two is the check that nothing is to be done.
            if bar.is_none() && total > 3 {
                bar = Some(Bar::new(total, "building llama.cpp"));
            }
            bar.iter().for_each(|bar| bar.set(n, total, &what));
        }
    }
    let status = child.wait()?;
    drop(bar);
    if !status.success() {
        let text = String::from_utf8_lossy(&fs::read(&log_path)?).into_owned();
        bail!(
            "building {} failed ({status}); the last lines of {}:\n{}",
            targets.join(", "),
            log_path.display(),
            process::tail(&text, 40)
        );
    }
    Ok(())
}

/// `[12/345] Building CXX object a/b/c.cpp.o` -> (12, 345, "c.cpp.o")
fn ninja_step(line: &str) -> Option<(u64, u64, String)> {
    let (numbers, what) = line.strip_prefix('[')?.split_once("] ")?;
    let (n, total) = numbers.split_once('/')?;
    let what = what.rsplit([' ', '/']).next().unwrap_or(what).to_string();
    Some((n.parse().ok()?, total.parse().ok()?, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ninja_lines() {
        assert_eq!(ninja_step("[12/345] Building CXX object a/b/c.cpp.o"), Some((12, 345, "c.cpp.o".into())));
        assert_eq!(ninja_step("ninja: no work to do."), None);
        assert_eq!(ninja_step("[x/y] z"), None);
    }

    #[test]
    fn flags_follow_the_options() {
        let tree = Patched { dir: "/t/src".into(), home: "/t".into(), key: "k".into() };
        let plain = cmake_flags(&Options::default(), &tree);
        for flag in ["-DGGML_METAL=OFF", "-DGGML_CUDA=OFF", "-DGGML_RPC=OFF", "-DLLAMA_BUILD_SERVER=ON"] {
            assert!(plain.iter().any(|f| f == flag), "{flag}");
        }
        let rpc = cmake_flags(&Options { rpc: true, ..Options::default() }, &tree);
        assert!(rpc.iter().any(|f| f == "-DGGML_RPC=ON"));
        let cross = cmake_flags(&Options { aarch64: true, ..Options::default() }, &tree);
        assert!(cross.iter().any(|f| f == "-DCMAKE_SYSTEM_PROCESSOR=aarch64"));
        assert!(!cross.iter().any(|f| f.contains("AVX")));
    }
}
