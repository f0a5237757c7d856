//! llama-cpp-2 on top of sys/.
//!
//! The short form, part of every run but `--quick`, is one program with the two lines of the README. The long one has the examples on a
//! real model, the wrapper's own tests, and the original crate beside ours: two more builds of llama.cpp. All builds are
//! kept in the cache.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, ensure, Context, Result};

use super::cargo;
use super::model::answer_in;
use super::rust::{failed_names, libtest_counts};
use super::{Options, Tally};
use kv::process::{self, Finished};
use kv::progress::Spinner;
use kv::{build_tree, cache, model, project_root, python};

/// A prompt that the small model is decided about, with a system message so that no template adds one of its own.
const SYSTEM: &str = "You are a helpful AI assistant.";
const CHAT: &str = "Count from 1 to 10.";
/// The beginning of a text that goes on for as long as one likes.
const TEXT: &str = "It was a dark and stormy night, and";
const TOKENS: usize = 48;
/// Several would wait for each other in a spin, which takes minutes on a busy machine and adds in another order.
const ONE_THREAD: [&str; 2] = ["-t", "1"];

struct Bench {
    home: PathBuf,
    target: PathBuf,
    model: PathBuf,
    tools: python::BuildTools,
}

/// What cargo built, from its messages.
struct Built {
    programs: BTreeMap<String, PathBuf>,
    sys_out: PathBuf,
    wrapper: Option<PathBuf>,
}

/// cargo's folder for the short form.
pub fn short_target() -> Result<PathBuf> {
    Ok(cache::root()?.join("wrapper").join("target-short"))
}

/// The program of the short form, without a run of it.
pub fn build_short() -> Result<Command> {
    Bench::new()?.two_lines_here("build")
}

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let bench = Bench::new()?;
    tally.check("a program with the two lines of the README", || bench.short());
    if options.quick || (options.only.is_empty() && !options.soak) {
        tally.skip("the long form", 1, "slow: run it with --only wrapper, or --soak");
        return Ok(());
    }
    let examples = project_root().join("examples");
    let built = bench.build(&examples, &bench.target, "llama.cpp for Rust programs", &[])?;
    tally.check("fmt and clippy of sys and the examples", || bench.lint(&examples));
    tally.check("chat answers with srft4/srft4 as llama-cli does", || bench.chat_as_llama_cli(&built));
    tally.check("the cache takes what cache_bytes says", || bench.cache_mib(&built));
    tally.check("planner finds what fits in 8 GB", || bench.planner(&built));
    for kind in ["f16", "srft4"] {
        tally.check(&format!("a session with a {kind} cache is restored"), || bench.session(&built, kind));
    }
    tally.check("a session of another type is refused", || bench.session_of_another_type(&built));
    tally.check("a feature that is not served says so", || bench.refused_feature(&examples));

    let mut stock_tokens = String::new();
    tally.check("the original crate gives the same bindings", || {
        let stock = bench.stock(&built)?;
        let same = same_bindings(&stock.sys_out.join("bindings.rs"), &built.sys_out);
        let mut c = Command::new(stock.program("stock-tokens")?);
        let done = process::run_ok(c.arg(&bench.model).args([TEXT, &TOKENS.to_string()]))?;
        stock_tokens = done.stdout.trim().to_string();
        same
    });
    let tests = ["--test", "threads", "--test", "leaks", "--test", "stock"];
    bench.tests(tally, "the examples", &examples, &tests, |c| {
        c.env("KV_STOCK_TOKENS", &stock_tokens).env("KV_STOCK_PROMPT", TEXT);
    })?;
    let package = bench.own_tests(&built)?;
    bench.tests(tally, "llama-cpp-2", &package, &[], |_| ())?;
    if options.soak {
        tally.check("a new project with the two lines", || bench.two_lines());
        tally.check("feature dynamic-link", || bench.dynamic_link(&examples));
    }
    Ok(())
}

impl Built {
    fn program(&self, name: &str) -> Result<&PathBuf> {
        self.programs.get(name).with_context(|| format!("cargo built no {name}"))
    }
}

impl Bench {
    fn new() -> Result<Bench> {
        let home = cache::root()?.join("wrapper");
        let target = home.join(format!("target-{}", cache::key(&[project_root().display().to_string()])));
        Ok(Bench { home, target, model: model::default_model()?, tools: python::build_tools()? })
    }

    /// cargo in `dir`, with the build tools that this machine has or was given.
    fn cargo(&self, dir: &Path, target: &Path, args: &[&str]) -> Command {
        let mut c = cargo::command(args);
        c.current_dir(dir).env("CARGO_TARGET_DIR", target).env("KV_MODEL", &self.model);
        if self.tools.cmake.components().count() > 1 {
            c.env("CMAKE", &self.tools.cmake);
        }
        if process::run(Command::new("make").arg("--version"), None).is_err() {
            c.env("CMAKE_GENERATOR", "Ninja").env("CMAKE_MAKE_PROGRAM", &self.tools.ninja);
        }
        c
    }

    fn build(&self, dir: &Path, target: &Path, what: &str, envs: &[(&str, PathBuf)]) -> Result<Built> {
        let mut c = self.cargo(dir, target, &["build", "--release", "--locked", "--message-format=json"]);
        c.envs(envs.iter().map(|(name, value)| (name, value)));
        let done = {
            let _spinner = Spinner::new(&format!("building {what}"));
            process::run(&mut c, None)?
        };
        if !done.status.success() {
            bail!("building {what} failed ({})\n{}", done.status, process::tail(&done.stderr, 60));
        }
        let mut built = Built { programs: BTreeMap::new(), sys_out: PathBuf::new(), wrapper: None };
        for message in cargo::messages(&done.stdout) {
            let name = message.target.map(|t| t.name).unwrap_or_default();
            if name == "llama_cpp_2" {
                built.wrapper = message.manifest_path;
            }
            if let Some(path) = message.executable {
                built.programs.insert(name, path);
            }
            if message.reason == "build-script-executed" && message.package_id.contains("llama-cpp-sys-2") {
                built.sys_out = message.out_dir.unwrap_or_default();
            }
        }
        ensure!(built.sys_out.join("bindings.rs").is_file(), "no bindings in '{}'", built.sys_out.display());
        Ok(built)
    }

    /// The original crate. Where ours had to bring libclang, the original is given that one.
    fn stock(&self, ours: &Built) -> Result<Built> {
        let mut envs = Vec::new();
        let libclang = ours.sys_out.join("pypi/libclang/clang/native");
        if libclang.is_dir() {
            let include = process::run_ok(Command::new("cc").arg("-print-file-name=include"))?;
            envs.push(("LIBCLANG_PATH", libclang));
            envs.push(("BINDGEN_EXTRA_CLANG_ARGS", format!("-I{}", include.stdout.trim()).into()));
        }
        let dir = project_root().join("tests/wrapper/stock");
        self.build(&dir, &self.home.join("target-stock"), "the original llama-cpp-sys-2", &envs)
    }

    fn lint(&self, examples: &Path) -> Result<()> {
        let _spinner = Spinner::new("cargo clippy");
        for dir in [examples.to_path_buf(), project_root().join("sys"), project_root().join("tests/wrapper/stock")] {
            process::run_ok(&mut self.cargo(&dir, &self.target, &["fmt", "--check"]))?;
        }
        let clippy = ["clippy", "--release", "--locked", "--all-targets", "--quiet", "--", "-D", "warnings"];
        process::run_ok(&mut self.cargo(examples, &self.target, &clippy)).map(drop)
    }

    fn example(&self, built: &Built, name: &str, args: &[&str]) -> Result<Finished> {
        let mut c = Command::new(built.program(name)?);
        c.arg("-m").arg(&self.model);
        if name != "planner" {
            c.args(ONE_THREAD);
        }
        process::run(c.args(args), None)
    }

    fn example_ok(&self, built: &Built, name: &str, args: &[&str]) -> Result<Finished> {
        let done = self.example(built, name, args)?;
        ensure!(done.status.success(), "{name} {}: {}\n{}", args.join(" "), done.status, done.text());
        Ok(done)
    }

    fn chat_as_llama_cli(&self, built: &Built) -> Result<()> {
        let bin = build_tree::build(&build_tree::Options::default(), &["llama-cli".into()])?;
        let types = ["--cache-type-k", "srft4", "--cache-type-v", "srft4"];
        let mut cli = Command::new(bin.join("llama-cli"));
        cli.arg("-m").arg(&self.model).args(types).args(ONE_THREAD);
        cli.args(["-st", "-sys", SYSTEM, "-p", CHAT, "-n", "24", "--temp", "0"]);
        let cli = process::run_ok(&mut cli)?.stdout;
        let cli = answer_in(&cli, CHAT).with_context(|| format!("no answer in\n{cli}"))?;
        let ask = ["--system", SYSTEM, "--prompt", CHAT, "-n", "24"];
        let chat = self.example_ok(built, "chat", &[&types[..], &ask].concat())?.stdout;
        let (answer, end) = chat.rsplit_once("\n[ ").with_context(|| format!("no closing line in\n{chat}"))?;
        ensure!(!cli.is_empty() && answer.trim() == cli, "llama-cli: {cli:?}\nchat: {:?}", answer.trim());
        ensure!(end.starts_with("srft4/srft4: ") && end.contains(" tokens/s, cache "), "it ends with {end:?}");
        Ok(())
    }

    /// chat's figure against the one in llama.cpp's own log.
    fn cache_mib(&self, built: &Built) -> Result<()> {
        for (k, v) in [("f16", "f16"), ("srft4", "srft4"), ("q8_0", "srft3")] {
            let args = ["--cache-type-k", k, "--cache-type-v", v, "--log", "-p", "hello", "-n", "1"];
            let done = self.example_ok(built, "chat", &args)?;
            let after = |text: &str, mark: &str| -> Option<f64> {
                let number = text.split(mark).nth(1)?.split_whitespace().next()?;
                number.parse().ok()
            };
            let ours = after(&done.stdout, ", cache ").with_context(|| format!("no MiB in\n{}", done.stdout))?;
            let line = done.stderr.lines().find(|l| l.contains("llama_kv_cache: size"));
            let theirs = line.and_then(|l| after(l, "size =")).context("llama.cpp's log has no size of the cache")?;
            ensure!((ours - theirs).abs() < 0.011, "{k}/{v}: chat says {ours}, llama.cpp {theirs}");
        }
        Ok(())
    }

    fn planner(&self, built: &Built) -> Result<()> {
        let done = self.example_ok(built, "planner", &["--memory", "8G"])?;
        let context = |types: &str| -> Result<u64> {
            let line = done.stdout.lines().find(|l| l.split_whitespace().next() == Some(types));
            let last = line.and_then(|l| l.split_whitespace().last()?.parse().ok());
            last.with_context(|| format!("no context for {types} in\n{}", done.stdout))
        };
        let (f16, srft4) = (context("f16")?, context("srft4")?);
        // 16 bits against 4.25, both rounded down to 256.
        let want = f16 as f64 * 16.0 / 4.25;
        ensure!(f16 > 0 && (srft4 as f64 - want).abs() <= 1024.0, "f16 {f16}, srft4 {srft4}, expected {want}");
        let by_layer = ["--memory", "8G", "--types", "srft4", "srft4,0-1=f16/srft4", "srft4,99=f16"];
        let done = self.example_ok(built, "planner", &by_layer)?;
        let [_, _, srft4, mixed, refused] = done.stdout.lines().collect::<Vec<_>>()[..] else {
            bail!("not three pairs in\n{}", done.stdout);
        };
        let last = |line: &str| line.split_whitespace().last().and_then(|n| n.parse::<u64>().ok());
        ensure!(last(mixed) > Some(0) && last(mixed) < last(srft4), "{mixed}\n{srft4}");
        ensure!(refused.contains("no layer 99"), "{refused}");
        Ok(())
    }

    fn session(&self, built: &Built, kind: &str) -> Result<()> {
        let scratch = cache::Scratch::new()?;
        let file = scratch.path().join("session");
        let file = file.to_string_lossy();
        let types = ["--cache-type-k", kind, "--cache-type-v", kind];
        let answer = |args: &[&str]| -> Result<String> {
            let done = self.example_ok(built, "session", &[&types[..], args].concat())?;
            let (answer, _) = done.stdout.rsplit_once("\n[ ").context("no closing line")?;
            Ok(answer.to_string())
        };
        let saved = answer(&["save", &file, "--prompt", TEXT])?;
        let restored = answer(&["restore", &file])?;
        ensure!(!saved.trim().is_empty() && saved == restored, "before: {saved:?}\nafter:  {restored:?}");
        let other = answer(&["restore", &file, "--prompt", " nobody"])?;
        ensure!(other != saved, "a further prompt changes nothing: {other:?}");
        Ok(())
    }

    fn session_of_another_type(&self, built: &Built) -> Result<()> {
        let scratch = cache::Scratch::new()?;
        let file = scratch.path().join("session");
        let file = file.to_string_lossy();
        let f16 = ["--cache-type-k", "f16", "--cache-type-v", "f16"];
        self.example_ok(built, "session", &[&f16[..], &["save", &file, "--prompt", TEXT]].concat())?;
        let done = self.example(built, "session", &["restore", &file])?;
        ensure!(done.exited() && !done.status.success(), "it was not refused ({})\n{}", done.status, done.text());
        ensure!(done.stderr.contains("no session of this model and these types"), "it said\n{}", done.stderr);
        Ok(())
    }

    fn refused_feature(&self, examples: &Path) -> Result<()> {
        let _spinner = Spinner::new("cargo check");
        let args = ["check", "--release", "--locked", "--features", "llama-cpp-2/vulkan"];
        let done = process::run(&mut self.cargo(examples, &self.target, &args), None)?;
        ensure!(!done.status.success(), "vulkan was not refused");
        ensure!(done.stderr.contains("feature `vulkan`: there is `cuda`"), "{}", process::tail(&done.stderr, 20));
        Ok(())
    }

    /// `cargo test`; the tests count one by one.
    fn tests(
        &self,
        tally: &mut Tally,
        what: &str,
        dir: &Path,
        args: &[&str],
        more: impl FnOnce(&mut Command),
    ) -> Result<()> {
        let mut c = self.cargo(dir, &self.target, &["test", "--release", "--locked", "--no-fail-fast"]);
        c.args(args).env("LLAMA_TEST_VOCAB_GGUF", &self.model);
        more(&mut c);
        let start = std::time::Instant::now();
        let done = {
            let _spinner = Spinner::new(&format!("tests of {what}"));
            process::run(&mut c, None)?
        };
        let [passed, failed, ignored] = libtest_counts(&done.stdout);
        tally.add(passed, 0);
        tally.took(&format!("tests of {what}"), start.elapsed());
        println!("ok    wrapper: {passed} tests of {what} ({:.1} s)", start.elapsed().as_secs_f64());
        if ignored > 0 {
            tally.skip(&format!("ignored tests of {what}"), ignored, "marked #[ignore] there");
        }
        for name in failed_names(&done.stdout) {
            tally.fail(&format!("{what}: {name}"), "see below");
        }
        if !done.status.success() {
            println!("{}", process::tail(&done.text(), 80));
            if failed == 0 {
                tally.fail(&format!("tests of {what}"), "it ended with an error and no failed test");
            }
        }
        Ok(())
    }

    /// llama-cpp-2's package as cargo unpacked it, with our sys under it and a lock file that has its test dependencies.
    fn own_tests(&self, built: &Built) -> Result<PathBuf> {
        let manifest = built.wrapper.as_ref().context("cargo built no llama-cpp-2")?;
        let to = self.home.join("llama-cpp-2");
        let folder = manifest.parent().context("a manifest lies in a folder")?;
        kv::source::copy_tree(folder, &to)?;
        let mut text = fs::read_to_string(manifest)?;
        text += &format!(
            "\n[workspace]\n\n[patch.crates-io]\nllama-cpp-sys-2 = {{ path = {:?} }}\n",
            project_root().join("sys")
        );
        fs::write(to.join("Cargo.toml"), text)?;
        fs::copy(project_root().join("tests/wrapper/llama-cpp-2.lock"), to.join("Cargo.lock"))?;
        Ok(to)
    }

    /// The README's two lines, with the folder of sys for the address. Nothing is optimized: what is tested is that a
    /// program builds, links and gets its cache, and compiling takes the time.
    fn two_lines_here(&self, verb: &str) -> Result<Command> {
        let dir = self.home.join(format!("short-{}", cache::key(&[project_root().display().to_string()])));
        // The versions that the examples have; cargo drops what this program does not use.
        fs::create_dir_all(dir.join("src"))?;
        fs::copy(project_root().join("examples/Cargo.lock"), dir.join("Cargo.lock"))?;
        let sys = format!("path = {:?}", project_root().join("sys"));
        write_project(&dir, &sys, "", TWO_LINES)?;
        let mut c = self.cargo(&dir, &short_target()?, &[verb, "--quiet"]);
        c.env("CMAKE_C_FLAGS_RELEASE", "-O0").env("CMAKE_CXX_FLAGS_RELEASE", "-O0");
        Ok(c)
    }

    fn short(&self) -> Result<()> {
        let _spinner = Spinner::new("a program with the two lines");
        has_context(&process::run_ok(&mut self.two_lines_here("run")?)?)
    }

    /// As a new user, with what git has committed here for an address: a project outside the checkout, the README's two lines
    /// and then its third, which gives the types names.
    fn two_lines(&self) -> Result<()> {
        let scratch = cache::Scratch::new()?;
        let dir = scratch.path();
        fs::create_dir(dir.join("src"))?;
        let _spinner = Spinner::new("a new project with the two lines");
        let address = format!("git = \"file://{}\"", project_root().display());
        let third = format!("ggml-ext = {{ {address} }}\n");
        for (program, more) in [(TWO_LINES, ""), (THREE_LINES, &third)] {
            write_project(dir, &address, more, program)?;
            let mut c = self.cargo(dir, &self.home.join("target-two-lines"), &["run", "--release", "--quiet"]);
            has_context(&process::run_ok(&mut c)?)?;
        }
        Ok(())
    }

    fn dynamic_link(&self, examples: &Path) -> Result<()> {
        let _spinner = Spinner::new("building with dynamic-link");
        let args =
            ["run", "--release", "--locked", "--quiet", "--features", "llama-cpp-2/dynamic-link", "--bin", "chat"];
        let mut c = self.cargo(examples, &self.home.join("target-dynamic"), &args);
        c.arg("--").arg("-m").arg(&self.model).args(ONE_THREAD).args(["-p", CHAT, "-n", "8"]);
        let done = process::run_ok(&mut c)?;
        ensure!(done.stdout.contains("[ srft4/srft4: "), "{}", done.stdout);
        Ok(())
    }
}

fn write_project(dir: &Path, sys: &str, more: &str, program: &str) -> Result<()> {
    let manifest = format!(
        "[package]\nname = \"two-lines\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\n[workspace]\n\n[dependencies]\n\
         llama-cpp-2 = \"0.1.160\"\n{more}\n[patch.crates-io]\nllama-cpp-sys-2 = {{ {sys} }}\n"
    );
    fs::write(dir.join("Cargo.toml"), manifest)?;
    fs::write(dir.join("src/main.rs"), program).map_err(Into::into)
}

fn has_context(done: &Finished) -> Result<()> {
    ensure!(done.stdout.trim() == "true", "a context with srft4: {}", done.text());
    Ok(())
}

const TWO_LINES: &str = r#"
use llama_cpp_2::context::params::{KvCacheType, LlamaContextParams};
use llama_cpp_2::{llama_backend::LlamaBackend, model::{params::LlamaModelParams, LlamaModel}};

fn main() {
    let backend = LlamaBackend::init().unwrap();
    let file = std::env::var("KV_MODEL").unwrap();
    let model = LlamaModel::load_from_file(&backend, file, &LlamaModelParams::default()).unwrap();
    let srft4 = KvCacheType::Unknown(159);
    let params = LlamaContextParams::default().with_type_k(srft4).with_type_v(srft4);
    println!("{}", model.new_context(&backend, params).is_ok());
}
"#;

const THREE_LINES: &str = r#"
use ggml_ext::ModelShape;
use llama_cpp_2::context::params::{KvCacheType, LlamaContextParams};
use llama_cpp_2::{llama_backend::LlamaBackend, model::{params::LlamaModelParams, LlamaModel}};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let backend = LlamaBackend::init()?;
    let model = LlamaModel::load_from_file(&backend, std::env::var("KV_MODEL")?, &LlamaModelParams::default())?;
    let k: ggml_ext::KvType = "srft4,0-1=srft8".parse()?;
    let v: ggml_ext::KvType = "srft4".parse()?;
    let bytes = ggml_ext::cache_bytes(&ModelShape::uniform(32, 8, 128), 32768, v, v)?;
    let params = LlamaContextParams::default()
        .with_type_k(KvCacheType::from(u32::from(k)))
        .with_type_v(KvCacheType::from(u32::from(v)));
    println!("{}", model.new_context(&backend, params).is_ok() && bytes == 32 * 8 * 2 * (32768 * 72 + 129 * 136));
    Ok(())
}
"#;

/// The public items of the original's bindings are ours, word for word; ours have `common`'s beside them.
fn same_bindings(stock: &Path, ours: &Path) -> Result<()> {
    let read = |file: &Path| fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()));
    let (stock, text) = (items(&read(stock)?), read(&ours.join("bindings.rs"))?);
    let mut found = items(&text);
    ensure!(stock.len() > 500, "only {} items in the original's bindings", stock.len());
    for (name, item) in &stock {
        match found.remove(name) {
            Some(same) if same == *item => {}
            Some(other) => bail!("{name} differs:\n{item}\n{other}"),
            None => bail!("{name} is missing"),
        }
    }
    let foreign: Vec<_> = found.keys().filter(|n| !n.to_lowercase().contains("llama_rs_")).collect();
    ensure!(foreign.is_empty(), "items that the original does not have: {foreign:?}");
    let header = read(&ours.join("source/wrapper_common.h"))?;
    let words = header.split(|c: char| !c.is_alphanumeric() && c != '_');
    for name in words.filter(|word| word.starts_with("llama_rs_")) {
        ensure!(text.contains(name), "{name} of common is missing");
    }
    Ok(())
}

/// Public items by kind and name, with their text: what stands before an item in brackets, and all up to the next one.
/// Without spaces and closing commas, because bindgen's rustfmt obeys the rustfmt.toml that it finds.
fn items(bindings: &str) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    let (mut name, mut before) = (String::new(), String::new());
    for line in bindings.lines().map(str::trim) {
        let mut words = line.strip_prefix("pub ").into_iter().flat_map(str::split_whitespace);
        // Fields begin with a name and a colon, items with what they are.
        match (words.next(), words.next()) {
            (Some(kind @ ("fn" | "const" | "static" | "struct" | "union" | "type")), Some(word)) => {
                name = format!("{kind} {}", word.split(['(', ':', '<', ';']).next().unwrap_or(word));
            }
            _ if line.starts_with("#[") || line.starts_with("unsafe extern") => {
                before += line;
                continue;
            }
            _ => {}
        }
        let text = all.entry(name.clone()).or_default();
        *text += &std::mem::take(&mut before);
        *text += line;
    }
    all.remove("");
    for text in all.values_mut() {
        text.retain(|c| !c.is_whitespace());
        *text = text.replace(",)", ")").replace(",>", ">");
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_bindings() {
        let text = "pub const A: u32 = 1;\n#[repr(C)]\npub struct S {\n    pub a: i32,\n}\nunsafe extern \"C\" {\n    \
                    pub fn f(a: i32) -> i32;\n}\npub type T = i32;\n";
        let found = items(text);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["const A", "fn f", "struct S", "type T"]);
        assert!(found["struct S"].contains("puba:i32"));
        assert_eq!(items("pub fn f(\n    a: i32,\n) -> i32;")["fn f"], items("pub fn f(a: i32) -> i32;")["fn f"]);
    }
}
