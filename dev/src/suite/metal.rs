//! The Metal shaders, run on the CPU and compared with the Rust library and with f64.

mod attention;
mod backend;
mod rows;
mod runtime;
mod upstream;
mod values;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread::{self, JoinHandle};

use anyhow::{anyhow, bail, ensure, Result};

use super::{parse_counts, Options, Tally};
use crate::metal::compile::{root, shaders};
use crate::metal::lint::lint;
use crate::metal::{Compiler, Library, Mode, Shader};
use kv::process::{self, Finished};
use kv::progress::Spinner;

pub use backend::PROGRAM;

/// Set in a process that runs with AddressSanitizer, to what it is to do.
const SANITIZED: &str = "KV_METAL_SANITIZED";
/// One launch that has to end the process.
const OVERRUN: &str = "overrun";

/// What the checks need.
struct Setup {
    compiler: Compiler,
    mode: Mode,
    quick: bool,
    soak: bool,
    /// On the GPU of this machine instead of the CPU.
    gpu: bool,
}

impl Setup {
    fn library(&self, shader: &Shader) -> Result<Library> {
        let _spinner = Spinner::new(&format!("compiling {}", shader.source.display()));
        Library::load(&self.compiler.library(shader, self.mode)?)
    }

    fn own(&self, source: PathBuf) -> Result<Library> {
        self.library(&Shader { source, include: &[], define: &[], kernels: &[] })
    }

    fn shader(&self, name: &str) -> Result<Library> {
        if self.gpu {
            return on_gpu(name);
        }
        self.own(shaders().join(format!("{name}.metal")))
    }

    fn test_shader(&self, name: &str) -> Result<Library> {
        self.own(root().join("shaders").join(name))
    }
}

/// A shader as Metal compiles it.
#[cfg(target_os = "macos")]
fn on_gpu(name: &str) -> Result<Library> {
    let text = ggml_ext::metal::source(name).ok_or_else(|| anyhow!("there is no shader {name}"))?;
    Library::on_gpu(text.to_str()?)
}

#[cfg(not(target_os = "macos"))]
fn on_gpu(_: &str) -> Result<Library> {
    bail!("Metal needs macOS")
}

/// The GPU that the kernels can run on, or why there is none.
#[cfg(target_os = "macos")]
fn gpu_name() -> Result<String> {
    crate::metal::gpu::usable()
}

#[cfg(not(target_os = "macos"))]
fn gpu_name() -> Result<String> {
    bail!("Metal needs macOS")
}

/// Takes away the barriers of a shader one after the other; `work` is a test that has to fail each time. A barrier may
/// go unnoticed where the source says that a shuffle stands beside it: here a shuffle is a meeting point too, while
/// Metal does not promise that it orders memory.
fn seeded_mistakes(library: &Library, tally: &mut Tally, shader: &str, work: impl Fn() -> Result<()>) -> Result<()> {
    let Some(library) = library.as_cpu() else { return Ok(()) };
    work()?;
    let barriers = library.barriers()?;
    ensure!(!barriers.is_empty(), "{shader} met no barrier");
    for (number, (file, line)) in barriers.iter().enumerate() {
        let source = fs::read_to_string(file)?;
        let excused = source.lines().nth(*line as usize - 2).is_some_and(|before| before.contains("a shuffle stands"));
        let file = file.rsplit('/').next().unwrap_or(file);
        let noticed = library.without_barrier(number, &work).is_err();
        if excused && !noticed {
            println!("      {file}:{line}: a shuffle hides that its barrier is missing");
            continue;
        }
        tally.check(&format!("{shader} without the barrier of {file}:{line} fails"), || match noticed {
            true => Ok(()),
            false => bail!("nobody noticed"),
        });
    }
    Ok(())
}

/// A check that stands for `count` cases.
fn cases(tally: &mut Tally, what: &str, count: u64, check: impl FnOnce() -> Result<()>) {
    let before = tally.failed;
    tally.check(what, check);
    if tally.failed == before {
        tally.add(count - 1, 0);
    }
}

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let list = std::env::var_os(SANITIZED);
    let sanitized = list.is_some();
    if sanitized {
        // The compiler is not to be watched.
        std::env::remove_var("LD_PRELOAD");
    }
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(e) => {
            tally.missing("all", &format!("shaders are run as C++: {e:#}: apt-get install g++"));
            return Ok(());
        }
    };
    let mode = if sanitized { Mode::AddressSanitizer } else { Mode::Plain };
    let mut setup = Setup { compiler, mode, quick: options.quick || sanitized, soak: options.soak, gpu: false };
    if list.is_some_and(|list| list == OVERRUN) {
        return runtime::overrun(&setup);
    }
    let whole = !sanitized && !options.quick;
    let sanitizing = whole.then(|| Sanitized::start(&setup.compiler));
    if !sanitized {
        println!("metal: shaders as C++ by {}", setup.compiler.name());
        tally.check("lint of shaders/", lint_shaders);
    }
    runtime::run(&setup, tally)?;
    rows::run(&setup, tally)?;
    attention::run(&setup, tally)?;
    if !sanitized {
        backend::run(&setup, options, tally)?;
    }
    if whole {
        upstream::run(&setup, tally)?;
        println!("metal: the quick list again with fast mathematics, as Metal's compiler takes it");
        (setup.mode, setup.quick) = (Mode::FastMath, true);
        rows::run(&setup, tally)?;
        attention::run(&setup, tally)?;
    }
    if cfg!(target_os = "macos") && !sanitized {
        match gpu_name() {
            Err(why) => tally.skip("the lists on the GPU", 1, &format!("{why:#}")),
            Ok(name) => {
                println!("metal: the lists again on the GPU, {name}");
                (setup.mode, setup.quick, setup.gpu) = (Mode::Plain, options.quick, true);
                rows::run(&setup, tally)?;
                attention::run(&setup, tally)?;
            }
        }
    }
    match sanitizing {
        None => {}
        Some(Err(why)) => tally.skip("AddressSanitizer", 1, &format!("{why:#}")),
        Some(Ok(thread)) => {
            thread.join().map_err(|_| anyhow!("the thread of AddressSanitizer panicked"))??.report(tally)
        }
    }
    Ok(())
}

fn lint_shaders() -> Result<()> {
    let mut paths: Vec<PathBuf> = fs::read_dir(shaders())?.flatten().map(|e| e.path()).collect();
    paths.retain(|f| f.extension().is_some_and(|e| e == "metal" || e == "h"));
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        files.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), fs::read_to_string(&path)?));
    }
    ensure!(!files.is_empty(), "there are no shaders in {}", shaders().display());
    let findings = lint(&files);
    ensure!(findings.is_empty(), "{}", findings.join("\n"));
    Ok(())
}

/// The quick list again in a process in which AddressSanitizer watches every buffer; it runs beside the rest.
struct Sanitized {
    overrun: Finished,
    list: Finished,
}

impl Sanitized {
    /// An error says why this machine cannot.
    fn start(compiler: &Compiler) -> Result<JoinHandle<Result<Sanitized>>> {
        let library = compiler.sanitizer_library()?;
        let program = std::env::current_exe()?;
        let child = move |list: &str| {
            let mut c = Command::new(&program);
            c.args(["test", "--only", "metal", "--quick"]).env(SANITIZED, list).env("LD_PRELOAD", &library);
            // What the process keeps to its end is not a leak.
            c.env("ASAN_OPTIONS", "detect_leaks=0");
            process::run(&mut c, None)
        };
        Ok(thread::spawn(move || Ok(Sanitized { overrun: child(OVERRUN)?, list: child("list")? })))
    }

    fn report(&self, tally: &mut Tally) {
        tally.check("AddressSanitizer ends a shader that leaves its threadgroup memory", || {
            let seen = !self.overrun.status.success() && self.overrun.stderr.contains("heap-buffer-overflow");
            ensure!(seen, "{}", process::tail(&self.overrun.text(), 20));
            Ok(())
        });
        match self.list.stdout.lines().rev().find_map(parse_counts) {
            Some([passed, 0, 0]) if self.list.status.success() => {
                cases(tally, &format!("the quick list with AddressSanitizer, {passed} cases"), passed, || Ok(()));
            }
            _ => tally.fail("the quick list with AddressSanitizer", &process::tail(&self.list.text(), 60)),
        }
    }
}
