//! The command line of `cargo kv`.
//!
//! What only developers need is another package, `kv-dev`: users do not compile it, and cargo does so when one of its
//! commands is first used.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{bail, Result};
use clap::{Parser, Subcommand, ValueEnum};

use crate::source::{self, Source};
use crate::{
    bench, build_tree, calibrate, compare, diverge, drift, layers, needle, patch, plan, process, project_root, run,
    tasks, types,
};

const ENVIRONMENT: &str = "\
Environment:
  KV_CACHE_DIR   where downloads and builds are kept (default: ~/.cache/ggml-kv)
  KV_BIN_DIR     folder of tools that were built in another way; nothing is built then
  KV_PYTHON      the Python whose pip is used (default: python3)
  LLAMA_CPP_DIR  your own llama.cpp tree instead of the pinned one; it is copied, never changed";

/// ggml-ext: compressed KV-cache types for llama.cpp
#[derive(Parser)]
#[command(name = "cargo kv", bin_name = "cargo kv", version, after_help = ENVIRONMENT)]
pub struct Arguments {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Subcommand)]
pub enum Verb {
    /// Compare quality, size and speed of K/V pairs with f16
    Compare(compare::Options),
    /// Learn the shape of a model's keys from a text, for specs with cal=FILE
    Calibrate(calibrate::Options),
    /// Measure what each layer of a model loses, and find types by layer that lose least at the same size
    Layers(layers::Options),
    /// Plan for a model: bytes of its caches by type, the context that fits a memory, the speed to expect
    Plan(plan::Options),
    /// Hide a number in a long text and check that every type finds it where f16 does
    Needle(needle::Options),
    /// Ask for what long documents hold and count the right answers beside f16's
    Tasks(tasks::Options),
    /// Continue texts by the most likely tokens and find where a pair leaves f16
    Diverge(diverge::Options),
    /// Divergence from f16 along a text, by position and over context shifts
    Drift(drift::Options),
    /// Time attention and encoding alone, against upstream's ops and the memory bandwidth
    Bench(bench::Options),
    /// Run the tests; ends with `N passed, N failed, N skipped`
    #[command(disable_help_flag = true)]
    Test(Handed),
    /// Build llama.cpp's tools with the types and print their folder
    Build {
        #[command(flatten)]
        options: build_tree::Options,
        /// CMake target instead of the tools (repeatable)
        #[arg(long, value_name = "NAME")]
        target: Vec<String>,
    },
    /// Predict the cycles of decode's inner loops and of ggml's on Arm cores, with llvm-mca
    #[command(disable_help_flag = true)]
    Mca(Handed),
    /// Print the type table
    Types {
        #[arg(long)]
        json: bool,
    },
    /// Check or apply the patches on your own llama.cpp tree
    #[command(group = clap::ArgGroup::new("what").required(true))]
    Patch {
        /// Print which patches apply; DIR is not changed
        #[arg(long, value_name = "DIR", group = "what")]
        check: Option<PathBuf>,
        /// Apply all patches, or none if one does not fit
        #[arg(long, value_name = "DIR", group = "what")]
        apply: Option<PathBuf>,
    },
    /// Fetch and patch llama.cpp and print the folder of the patched copy
    Fetch {
        #[arg(long, value_enum, default_value = "full")]
        tree: Tree,
        /// Your own llama.cpp tree instead of the pinned one (also: LLAMA_CPP_DIR)
        #[arg(long, value_name = "DIR")]
        llama_cpp: Option<PathBuf>,
    },
    /// Run llama-cli, llama-server, llama-perplexity, llama-bench, …: `cargo kv llama-cli -- ARGUMENTS`
    #[command(external_subcommand)]
    Tool(Vec<OsString>),
}

/// Arguments for a command of the other package, `--help` among them.
#[derive(clap::Args)]
pub struct Handed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub words: Vec<OsString>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Tree {
    /// With all tools
    Full,
    /// The library that Rust users get
    Crate,
}

pub fn dispatch(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Compare(options) => compare::compare(&options)?,
        Verb::Plan(options) => plan::plan(&options)?,
        Verb::Bench(options) => bench::bench(&options)?,
        Verb::Calibrate(options) => calibrate::calibrate(&options)?,
        Verb::Layers(options) => layers::layers(&options)?,
        Verb::Needle(options) => return needle::needle(&options),
        Verb::Tasks(options) => tasks::tasks(&options)?,
        Verb::Diverge(options) => diverge::diverge(&options)?,
        Verb::Drift(options) => drift::drift(&options)?,
        Verb::Test(handed) => return hand_over("test", &handed),
        Verb::Build { options, target } => println!("{}", build_tree::build(&options, &target)?.display()),
        Verb::Mca(handed) => return hand_over("mca", &handed),
        Verb::Types { json: true } => println!("{}", serde_json::to_string_pretty(&types::as_json())?),
        Verb::Types { json: false } => print!("{}", types::as_text()),
        Verb::Patch { check: Some(tree), .. } => return patch_check(&tree),
        Verb::Patch { apply, .. } => patch_apply(&apply.unwrap_or_default())?,
        Verb::Fetch { tree, llama_cpp } => {
            let tree = match tree {
                Tree::Full => source::Tree::Full,
                Tree::Crate => source::Tree::Crate,
            };
            println!("{}", source::patched(&Source::choose(tree, llama_cpp)?)?.dir.display());
        }
        Verb::Tool(words) => run::tool(&words)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command of `kv-dev` in this process's place, by cargo, which compiles it where needed.
fn hand_over(command: &str, handed: &Handed) -> Result<ExitCode> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut c = Command::new(&cargo);
    c.args(["run", "--quiet", "--release", "--package", "kv-dev", "--manifest-path"]);
    c.arg(project_root().join("Cargo.toml")).args(["--", command]).args(&handed.words);
    let Err(e) = run::replace(process::forget_cargo(&mut c)) else { return Ok(ExitCode::SUCCESS) };
    bail!(
        "cannot run {}: {e}\n`cargo kv {command}` is in a package of its own, which cargo compiles: install Rust with \
         rustup, or set CARGO to the program",
        cargo.to_string_lossy()
    )
}

fn patch_check(tree: &std::path::Path) -> Result<ExitCode> {
    let patches = patch::load(&project_root().join("patches"))?;
    let outcomes = patch::plan(tree, &patches)?.outcomes;
    let mut code = ExitCode::SUCCESS;
    for (p, outcome) in patches.iter().zip(&outcomes) {
        println!("{}: {outcome}", p.name);
        if let patch::Outcome::Fails { message, .. } = outcome {
            eprintln!("{}", message.trim());
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn patch_apply(tree: &std::path::Path) -> Result<()> {
    let patches = patch::load(&project_root().join("patches"))?;
    for (p, outcome) in patches.iter().zip(patch::apply(tree, &patches)?) {
        let done = if outcome == patch::Outcome::Applies { "applied".into() } else { outcome.to_string() };
        println!("{}: {done}", p.name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn tools_take_their_arguments_untouched() {
        let words = ["cargo kv", "llama-cli", "--", "-st", "--temp", "0", "--help"];
        let Verb::Tool(got) = Arguments::try_parse_from(words).unwrap_or_else(|e| panic!("{e}")).verb else {
            panic!("not a tool")
        };
        assert_eq!(got[0], "llama-cli");
        assert!(got[1..].ends_with(&["-st", "--temp", "0", "--help"].map(OsString::from)));
    }

    #[test]
    fn the_other_package_gets_its_arguments_untouched() {
        let words = ["cargo kv", "test", "--only", "rust", "--help", "--", "x"];
        let Verb::Test(got) = Arguments::try_parse_from(words).unwrap_or_else(|e| panic!("{e}")).verb else {
            panic!("not the tests")
        };
        assert_eq!(got.words, ["--only", "rust", "--help", "--", "x"]);
        let help = Arguments::command().render_help().to_string();
        assert!(help.contains("Run the tests") && help.contains("llvm-mca"), "{help}");
    }

    #[test]
    fn patch_wants_one_of_its_two() {
        assert!(Arguments::try_parse_from(["cargo kv", "patch"]).is_err());
        assert!(Arguments::try_parse_from(["cargo kv", "patch", "--check", "a", "--apply", "b"]).is_err());
        assert!(Arguments::try_parse_from(["cargo kv", "patch", "--check", "a"]).is_ok());
    }
}
