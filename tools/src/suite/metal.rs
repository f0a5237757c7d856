//! The Metal shaders, run on the CPU and compared with the Rust library and with f64.

mod attention;
mod rows;
mod runtime;
mod upstream;
mod values;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{bail, Result};

use super::{parse_counts, Options, Tally};
use crate::metal::compile::{root, shaders};
use crate::metal::lint::lint;
use crate::metal::{Compiler, Library, Mode, Shader};
use crate::process;
use crate::progress::Spinner;

/// Set in the process that runs with AddressSanitizer.
const SANITIZED: &str = "KV_METAL_SANITIZED";

/// What the checks need.
struct Bench {
    compiler: Compiler,
    mode: Mode,
    quick: bool,
    soak: bool,
}

impl Bench {
    fn library(&self, shader: &Shader) -> Result<Library> {
        let _spinner = Spinner::new(&format!("compiling {}", shader.source.display()));
        Library::load(&self.compiler.library(shader, self.mode)?)
    }

    fn own(&self, source: PathBuf) -> Result<Library> {
        self.library(&Shader { source, include: &[], define: &[], kernels: &[] })
    }

    fn shader(&self, name: &str) -> Result<Library> {
        self.own(shaders().join(name))
    }

    fn test_shader(&self, name: &str) -> Result<Library> {
        self.own(root().join("shaders").join(name))
    }
}

/// Takes away the barriers of a shader one after the other; `work` is a test that has to fail each time. A barrier may
/// go unnoticed where the source says that a shuffle stands beside it: here a shuffle is a meeting point too, while
/// Metal does not promise that it orders memory.
fn seeded_mistakes(library: &Library, tally: &mut Tally, shader: &str, work: impl Fn() -> Result<()>) -> Result<()> {
    work()?;
    let barriers = library.barriers()?;
    if barriers.is_empty() {
        bail!("{shader} met no barrier");
    }
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
    let sanitized = std::env::var_os(SANITIZED).is_some();
    // The compiler is not to be watched.
    std::env::remove_var("LD_PRELOAD");
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(e) => {
            tally.skip("all", 1, &format!("shaders are run as C++: {e:#}"));
            return Ok(());
        }
    };
    let mode = if sanitized { Mode::AddressSanitizer } else { Mode::Plain };
    let mut bench = Bench { compiler, mode, quick: options.quick || sanitized, soak: options.soak };
    if !sanitized {
        println!("metal: shaders as C++ by {}", bench.compiler.name());
        tally.check("lint of shaders/", lint_shaders);
    }
    runtime::run(&bench, tally)?;
    rows::run(&bench, tally)?;
    attention::run(&bench, tally)?;
    if sanitized || options.quick {
        return Ok(());
    }
    with_sanitizer(&bench, tally)?;
    upstream::run(&bench, tally)?;
    println!("metal: the quick list again with fast mathematics, as Metal's compiler takes it");
    (bench.mode, bench.quick) = (Mode::FastMath, true);
    rows::run(&bench, tally)?;
    attention::run(&bench, tally)
}

fn lint_shaders() -> Result<()> {
    let mut findings = Vec::new();
    let mut files: Vec<PathBuf> = fs::read_dir(shaders())?.flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "metal" || e == "h"));
    files.sort();
    if files.is_empty() {
        bail!("there are no shaders in {}", shaders().display());
    }
    // A header's types are known where it is included.
    for file in &files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        findings.extend(lint(&name, &fs::read_to_string(file)?));
    }
    if !findings.is_empty() {
        bail!("{}", findings.join("\n"));
    }
    Ok(())
}

/// The same list again in a process in which AddressSanitizer watches every buffer.
fn with_sanitizer(bench: &Bench, tally: &mut Tally) -> Result<()> {
    let what = "the quick list with AddressSanitizer";
    let library = match bench.compiler.sanitizer_library() {
        Ok(library) => library,
        Err(e) => {
            tally.skip(what, 1, &format!("{e:#}"));
            return Ok(());
        }
    };
    let mut c = Command::new(std::env::current_exe()?);
    c.args(["test", "--only", "metal", "--quick"]).env(SANITIZED, "1").env("LD_PRELOAD", library);
    // What the process keeps to its end is not a leak.
    c.env("ASAN_OPTIONS", "detect_leaks=0");
    let done = {
        let _spinner = Spinner::new(what);
        process::run(&mut c, None)?
    };
    match done.stdout.lines().rev().find_map(parse_counts) {
        Some([passed, 0, 0]) if done.status.success() => {
            println!("ok    metal: {what} ({passed} cases)");
            tally.add(passed, 0);
        }
        _ => tally.fail(what, &process::tail(&done.text(), 60)),
    }
    Ok(())
}
