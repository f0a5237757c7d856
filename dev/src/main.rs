//! The developers' commands of `cargo kv`, which hands them over: a user who builds or compares compiles none of this.

mod counts;
mod cross;
mod cuda;
mod mca;
mod metal;
mod suite;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo kv", bin_name = "cargo kv", version)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run the tests; ends with `N passed, N failed, N skipped`
    Test(suite::Options),
    /// Predict the cycles of decode's inner loops and of ggml's on Arm cores, with llvm-mca
    Mca(mca::Options),
    /// The program whose instructions `test` counts
    #[command(hide = true)]
    CountLoops { way: String, only: String },
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
        Verb::Test(options) => return suite::test(&options),
        Verb::Mca(options) => mca::mca(&options)?,
        Verb::CountLoops { way, only } => counts::serve(&way, &only)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use kv::{cli, project_root};

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    /// Commands as the documents and workflows have them: whole lines, and words between backticks.
    fn documented(text: &str) -> Vec<String> {
        let text = text.replace("\\\n", " ");
        let lines = text.lines().map(|l| l.trim().trim_start_matches("run: ")).filter(|l| l.starts_with("cargo kv "));
        let lines = lines.map(|l| l.split(['#', '|']).next().unwrap_or(l));
        let inline = text.split('`').skip(1).step_by(2).filter(|w| w.starts_with("cargo kv "));
        lines.chain(inline).map(String::from).collect()
    }

    /// As a shell splits them, quotes of one kind alone.
    fn words(command: &str) -> Vec<String> {
        let parts = command.split('"').enumerate();
        parts
            .flat_map(|(i, part)| match i % 2 {
                0 => part.split_whitespace().map(String::from).collect(),
                _ => vec![part.to_string()],
            })
            .collect()
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
                let words: Vec<String> =
                    ["cargo kv".to_string()].into_iter().chain(words(&command).into_iter().skip(2)).collect();
                let fail = |e: clap::Error| format!("{}: {command}\n{e}", file.display());
                match cli::Arguments::try_parse_from(&words).map_err(fail).unwrap().verb {
                    cli::Verb::Tool(tool) => assert!(tool[0].to_string_lossy().starts_with("llama-"), "{command}"),
                    cli::Verb::Test(_) | cli::Verb::Mca(_) => {
                        Arguments::try_parse_from(&words).map_err(fail).unwrap();
                    }
                    _ => {}
                }
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
}
