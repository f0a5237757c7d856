//! `cargo kv calibrate`: the shape of a model's keys, from a text, as a small file beside the model.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Result};
use ggml_ext::spec::calibration;

use crate::progress::{self, Bar};
use crate::{build_tree, cache, cpu, model, process};

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Plain text to read with it (default: prose, code and chat that come with this command)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Where to write (default: MODEL.kv-cal.gguf beside the model)
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Tokens of the text that are read
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(64..1 << 20))]
    pub tokens: u32,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

const PROGRAM: &str = "kv-calibrate";
/// Prose, code, chat, tables, a few languages.
pub const TEXT: &str = include_str!("../../calibrate/text.txt");

pub fn calibrate(options: &Options) -> Result<()> {
    let model = model::model_or_default(options.model.as_deref())?;
    let output = options.output.clone().unwrap_or_else(|| calibration::beside(&model));
    let scratch = cache::Scratch::new()?;
    let (text, name) = text(options.text.as_deref(), scratch.path())?;
    let bin = build_tree::build(&options.build, &[PROGRAM.into()])?;
    let mut command = Command::new(bin.join(PROGRAM));
    command.arg("--model").arg(&model).arg("--text").arg(&text).args(["--text-name", &name]).arg("--out").arg(&output);
    command.args(["--tokens", &options.tokens.to_string()]);
    command.args(["--threads", &options.threads.unwrap_or_else(cpu::cores).to_string()]);
    let done = follow(&mut command, u64::from(options.tokens))?;
    println!("{}: {done}", output.display());
    println!("use it: --cache-type-k TYPE,cal={}", shown(&output));
    Ok(())
}

/// A text and what it is called: the one given, or ours, which is written to `scratch`.
pub fn text(given: Option<&Path>, scratch: &Path) -> Result<(PathBuf, String)> {
    if let Some(path) = given {
        let path = model::text_or_default(Some(path))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Ok((path, name));
    }
    let path = scratch.join("text.txt");
    fs::write(&path, TEXT)?;
    Ok((path, "the text of cargo kv calibrate".into()))
}

/// A spec ends a file's name at a comma.
fn shown(file: &Path) -> String {
    let name = file.display().to_string();
    match name.contains(',') {
        true => format!("FILE, without a comma in its name as {name} has"),
        false => name,
    }
}

/// Runs the program and shows how far it is; its last words.
fn follow(command: &mut Command, tokens: u64) -> Result<String> {
    let bar = Bar::new(tokens, "calibrating");
    let mut done = String::new();
    process::follow(command, |line| {
        if let Some((n, total)) = progress::step(line) {
            bar.set(n, total, if n == total { "computing matrices" } else { "" });
        } else if let Some(text) = line.strip_prefix("done: ") {
            done = text.into();
        } else {
            bar.line(line);
        }
    })?;
    ensure!(!done.is_empty(), "{PROGRAM} ended without a result");
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_ends_the_name_of_a_file() {
        assert_eq!(shown(Path::new("a/b.gguf")), "a/b.gguf");
        assert!(shown(Path::new("a,b.gguf")).starts_with("FILE, without a comma"));
    }

    #[test]
    fn the_text_is_long_enough_for_the_default() {
        // Most vocabularies have a token for four characters of it, or fewer.
        assert!(TEXT.len() > 18_000 && TEXT.len() < 40_000, "{}", TEXT.len());
    }
}
