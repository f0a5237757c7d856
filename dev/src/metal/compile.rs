//! From a .metal file to a library that the host can load.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{bail, Context, Result};

use super::translate::translate;
use kv::{cache, process, project_root};

/// A C++ compiler that can build shaders: any that knows C++17 and the two builtins that tell where a call stands.
#[derive(Clone, Debug)]
pub struct Compiler {
    program: OsString,
    clang: bool,
    version: String,
    half: bool,
}

/// How a shader is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As the language says.
    Plain,
    /// Out-of-range accesses end the process with a message.
    AddressSanitizer,
    /// With the liberties that Metal's compiler takes by default: sums in any order, reciprocals, no infinities.
    FastMath,
}

/// A shader and what is wanted of it.
#[derive(Clone, Debug)]
pub struct Shader<'a> {
    pub source: PathBuf,
    pub include: &'a [PathBuf],
    pub define: &'a [&'a str],
    /// The kernels, by the names that the host calls; all where there are none.
    pub kernels: &'a [&'a str],
}

const PROBE: &str = "int line(int l = __builtin_LINE(), const char *f = __builtin_FILE());\n\
    template <int... I> int sum() { return (I + ...); }\n\
    #if !defined(__x86_64__) && !defined(__aarch64__)\n#error fibers know x86-64 and aarch64\n#endif\n";

impl Compiler {
    /// `$CXX`, c++, clang++ or g++, the first that will do; otherwise the reason why none does.
    pub fn find() -> Result<Compiler> {
        let mut tried = Vec::new();
        let from_environment = std::env::var_os("CXX").filter(|v| !v.is_empty());
        for program in from_environment.into_iter().chain(["c++", "clang++", "g++"].map(OsString::from)) {
            match Compiler::probe(program.clone()) {
                Ok(compiler) => return Ok(compiler),
                Err(e) => tried.push(format!("{}: {e:#}", program.to_string_lossy())),
            }
        }
        bail!("no C++ compiler that knows C++17 ({})", tried.join("; "))
    }

    fn probe(program: OsString) -> Result<Compiler> {
        let version = process::run_ok(Command::new(&program).arg("--version"))?.stdout;
        let scratch = cache::Scratch::new()?;
        let takes = |text: &str| {
            let source = scratch.path().join("probe.cpp");
            fs::write(&source, text)?;
            process::run_ok(Command::new(&program).args(["-std=gnu++17", "-fsyntax-only"]).arg(&source))
        };
        takes(PROBE)?;
        let half = takes("_Float16 x;").is_ok();
        Ok(Compiler { clang: version.contains("clang"), program, version, half })
    }

    /// Has it 16-bit floats of its own?
    pub fn has_half(&self) -> bool {
        self.half
    }

    /// For the report: the first line of its version.
    pub fn name(&self) -> &str {
        self.version.lines().next().unwrap_or_default().trim()
    }

    fn flags(&self) -> Vec<&'static str> {
        let mut flags = vec!["-std=gnu++17", "-O2", "-g1", "-fPIC", "-fsigned-char", "-fno-strict-aliasing", "-w"];
        // A product and a sum are rounded apart unless the shader says fma; a literal without a suffix is a float.
        flags.push("-ffp-contract=off");
        flags.extend(match self.clang {
            true => vec!["-Xclang", "-cl-single-precision-constant", "-ferror-limit=2"],
            false => vec!["-fsingle-precision-constant", "-fmax-errors=2"],
        });
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            flags.extend(["-mavx2", "-mfma", "-mf16c"]);
        }
        flags
    }

    /// The path of AddressSanitizer's library, which has to be loaded first in a process that was not built with it.
    pub fn sanitizer_library(&self) -> Result<PathBuf> {
        let names: &[&str] = match self.clang {
            true => &["libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so", "libclang_rt.asan.so"],
            false => &["libasan.so"],
        };
        for name in names {
            let done = process::run_ok(Command::new(&self.program).arg(format!("-print-file-name={name}")))?;
            let path = PathBuf::from(done.stdout.trim());
            if path.is_absolute() && path.exists() {
                return Ok(path);
            }
        }
        bail!("{} has no AddressSanitizer to load", self.name())
    }

    /// The source with its includes and macros resolved, MSL's own headers left out.
    fn preprocess(&self, shader: &Shader) -> Result<String> {
        let mut c = Command::new(&self.program);
        c.args(["-E", "-x", "c++", "-std=gnu++17", "-nostdinc", "-nostdinc++", "-undef"]);
        c.args(["-D__METAL__=1", "-D__METAL_VERSION__=310", "-w"]);
        c.arg("-I").arg(root().join("stubs"));
        for dir in shader.include {
            c.arg("-I").arg(dir);
        }
        c.args(shader.define.iter().map(|d| format!("-D{d}"))).arg(&shader.source);
        Ok(process::run_ok(&mut c)?.stdout)
    }

    /// The library of a shader, kept in the cache by everything that it is made from.
    pub fn library(&self, shader: &Shader, mode: Mode) -> Result<PathBuf> {
        let shown = || shader.source.display().to_string();
        let text = self.preprocess(shader).with_context(|| format!("preprocessing {}", shown()))?;
        let text = translate(&text, shader.kernels).with_context(|| format!("translating {}", shown()))?;
        let mut flags = self.flags();
        match mode {
            Mode::Plain => {}
            Mode::AddressSanitizer => {
                flags.extend(["-fsanitize=address", "-fno-omit-frame-pointer"]);
                flags.extend(self.clang.then_some("-shared-libasan"));
            }
            // Not -ffast-math, which also changes the mode of the process that loads the library.
            Mode::FastMath => flags.extend([
                "-fassociative-math",
                "-freciprocal-math",
                "-ffinite-math-only",
                "-fno-signed-zeros",
                "-fno-trapping-math",
                "-fno-math-errno",
            ]),
        }
        let mut key = vec![self.version.clone(), flags.join(" "), text.clone()];
        for part in ["msl.h", "runtime.h", "runtime.cpp", "../harness/random.h"] {
            key.push(fs::read_to_string(root().join(part)).with_context(|| format!("cannot read {part}"))?);
        }
        let name = shader.source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let target = cache::root()?.join("metal").join(format!("{name}-{}.so", cache::key(&key)));
        cache::place(&target, |part| {
            let cpp = part.with_extension("cpp");
            fs::write(&cpp, &text).with_context(|| format!("cannot write {}", cpp.display()))?;
            let mut c = Command::new(&self.program);
            c.args(&flags).arg("-shared").arg("-I").arg(root()).arg("-o").arg(part);
            c.arg(&cpp).arg(root().join("runtime.cpp"));
            let done = process::run_ok(&mut c).with_context(|| format!("{} as C++", shown()));
            let _ = cache::remove(&cpp);
            done.map(drop)
        })
    }
}

/// The folder of the header and the runtime.
pub fn root() -> PathBuf {
    project_root().join("tests").join("metal")
}

/// The folder of the shaders.
pub fn shaders() -> PathBuf {
    project_root().join("shaders")
}
