use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use kv::source::{self, Source};
use kv::{bench, build_tree, compare, counts, mca, needle, patch, project_root, run, suite, types};

const ENVIRONMENT: &str = "\
Environment:
  KV_CACHE_DIR   where downloads and builds are kept (default: ~/.cache/ggml-kv)
  KV_BIN_DIR     folder of tools that were built in another way; nothing is built then
  KV_PYTHON      the Python whose pip is used (default: python3)
  LLAMA_CPP_DIR  your own llama.cpp tree instead of the pinned one; it is copied, never changed";

/// ggml-ext: compressed KV-cache types for llama.cpp
#[derive(Parser)]
#[command(name = "cargo kv", bin_name = "cargo kv", version, after_help = ENVIRONMENT)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Compare quality, size and speed of K/V pairs with f16
    Compare(compare::Options),
    /// Hide a number in a long text and check that every type finds it where f16 does
    Needle(needle::Options),
    /// Time attention and encoding alone, against upstream's ops and the memory bandwidth
    Bench(bench::Options),
    /// Run the tests; ends with `N passed, N failed, N skipped`
    Test(suite::Options),
    /// Build llama.cpp's tools with the types and print their folder
    Build {
        #[command(flatten)]
        options: build_tree::Options,
        /// CMake target instead of the tools (repeatable)
        #[arg(long, value_name = "NAME")]
        target: Vec<String>,
    },
    /// Predict the cycles of decode's inner loops and of ggml's on Arm cores, with llvm-mca
    Mca(mca::Options),
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
    /// The program whose instructions `test` counts
    #[command(hide = true)]
    CountLoops { way: String, only: String },
    /// Run llama-cli, llama-server, llama-perplexity, llama-bench, …: `cargo kv llama-cli -- ARGUMENTS`
    #[command(external_subcommand)]
    Tool(Vec<OsString>),
}

#[derive(Clone, Copy, ValueEnum)]
enum Tree {
    /// With all tools
    Full,
    /// The library that Rust users get
    Crate,
}

fn main() -> ExitCode {
    match dispatch(Arguments::parse().verb) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(verb: Verb) -> Result<ExitCode> {
    match verb {
        Verb::Compare(options) => compare::compare(&options)?,
        Verb::Bench(options) => bench::bench(&options)?,
        Verb::Needle(options) => return needle::needle(&options),
        Verb::Test(options) => return suite::test(&options),
        Verb::Build { options, target } => println!("{}", build_tree::build(&options, &target)?.display()),
        Verb::Mca(options) => mca::mca(&options)?,
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
        Verb::CountLoops { way, only } => counts::serve(&way, &only)?,
        Verb::Tool(words) => run::tool(&words)?,
    }
    Ok(ExitCode::SUCCESS)
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
    fn the_command_line_holds_together() {
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

    /// Commands as the documents and workflows have them: whole lines, and words between backticks.
    fn documented(text: &str) -> Vec<String> {
        let text = text.replace("\\\n", " ");
        let lines = text.lines().map(|l| l.trim().trim_start_matches("run: ")).filter(|l| l.starts_with("cargo kv "));
        let lines = lines.map(|l| l.split(['#', '|']).next().unwrap_or(l));
        let inline = text.split('`').skip(1).step_by(2).filter(|w| w.starts_with("cargo kv "));
        lines.chain(inline).map(String::from).collect()
    }

    #[test]
    fn the_documents_name_commands_that_exist() {
        let root = project_root();
        let mut files = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
        for folder in ["docs", ".github/workflows"] {
            files.extend(std::fs::read_dir(root.join(folder)).unwrap().map(|f| f.unwrap().path()));
        }
        let mut found = 0;
        for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "md" || e == "yml")) {
            for command in documented(&std::fs::read_to_string(file).unwrap()) {
                let words = ["cargo kv"].into_iter().chain(command.split_whitespace().skip(2));
                let known = match Arguments::try_parse_from(words) {
                    Ok(Arguments { verb: Verb::Tool(words) }) => words[0].to_string_lossy().starts_with("llama-"),
                    Ok(_) => true,
                    Err(e) => panic!("{}: {command}\n{e}", file.display()),
                };
                assert!(known, "{}: {command}", file.display());
                found += 1;
            }
        }
        assert!(found > 30, "only {found} commands were found");
    }

    #[test]
    fn commands_are_found_in_documents() {
        let text = "Text:\n\n    cargo kv test   # all\n    cargo kv bench --quick \\\n        --json f | tee g\n\nand `cargo kv types`.";
        let words: Vec<String> =
            documented(text).iter().map(|c| c.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(words, ["cargo kv test", "cargo kv bench --quick --json f", "cargo kv types"]);
    }

    #[test]
    fn patch_wants_one_of_its_two() {
        assert!(Arguments::try_parse_from(["cargo kv", "patch"]).is_err());
        assert!(Arguments::try_parse_from(["cargo kv", "patch", "--check", "a", "--apply", "b"]).is_err());
        assert!(Arguments::try_parse_from(["cargo kv", "patch", "--check", "a"]).is_ok());
    }
}
