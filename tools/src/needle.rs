//! `cargo kv needle`: is a number that was hidden in a long text found again?
//!
//! Mean divergences say little about a single far cell. Here all depends on one: a pass key stands somewhere in a text that
//! has nothing to do with it, and is asked for at the end. Wherever f16 gives it back, so must the others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{bail, Context, Result};

use crate::pair::{pairs, Pair};
use crate::progress::Bar;
use crate::table::Table;
use crate::{build_tree, cache, cpu, model, process};

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Plain text to hide it in (default: Hamlet, fetched)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Pairs K/V,K/V,… (T alone is T/T); f16 is always included
    #[arg(long, value_name = "K/V,…", default_value = "srft4,delta4/srft4,delta3/srft3")]
    pub types: String,
    /// Approximate length of the text in tokens
    #[arg(long, default_value_t = 3072, value_name = "N", value_parser = clap::value_parser!(u32).range(256..))]
    pub tokens: u32,
    /// Where it is hidden, in percent of the text
    #[arg(long, value_name = "%,…", value_delimiter = ',', default_value = "10,50,90",
          value_parser = clap::value_parser!(u32).range(0..=100))]
    pub at: Vec<u32>,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

/// Digits that no text has by chance, another number at each place.
const KEYS: [&str; 4] = ["68231", "40957", "91364", "25718"];
/// Characters of English text to a token, a little less than they are.
const CHARACTERS: usize = 4;

pub fn needle(options: &Options) -> Result<ExitCode> {
    let pairs = pairs("none", std::slice::from_ref(&options.types))?;
    let model = model::model_or_default(options.model.as_deref())?;
    let text = model::text_or_default(options.text.as_deref())?;
    let text = fs::read_to_string(&text).with_context(|| format!("cannot read {}", text.display()))?;
    let prompts: Vec<(u32, &str, String)> = options
        .at
        .iter()
        .zip(KEYS.iter().cycle())
        .map(|(&at, &key)| Ok((at, key, prompt(&text, options.tokens as usize, at, key)?)))
        .collect::<Result<_>>()?;
    let bin = build_tree::build(&options.build, &["llama-completion".into()])?;

    let bar = Bar::new((pairs.len() * prompts.len()) as u64, "searching");
    let scratch = cache::Scratch::new()?;
    let file = scratch.path().join("prompt");
    let mut found = Vec::new();
    for pair in &pairs {
        let mut row = Vec::new();
        for (at, key, prompt) in &prompts {
            bar.begin((found.len() * prompts.len() + row.len()) as u64, &format!("{} at {at}%", pair.name()));
            fs::write(&file, prompt)?;
            row.push(ask(options, &bin, &model, &file, pair)?.contains(key));
        }
        found.push(row);
    }
    drop(bar);
    print!("{}", table(&pairs, &options.at, &found));
    if !f16_finds_any(&found) {
        println!("\nf16 itself finds none: use a larger model, or a shorter text (--tokens)");
    }
    Ok(if passed(&found) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn f16_finds_any(found: &[Vec<bool>]) -> bool {
    found[0].contains(&true)
}

/// Do the others find what f16, the first, finds? Where it finds nothing, nothing was tested.
fn passed(found: &[Vec<bool>]) -> bool {
    let lost = |row: &Vec<bool>| row.iter().zip(&found[0]).any(|(own, f16)| *f16 && !own);
    f16_finds_any(found) && !found[1..].iter().any(lost)
}

/// The text with the key in it and the question behind it.
fn prompt(text: &str, tokens: usize, at: u32, key: &str) -> Result<String> {
    let length = tokens * CHARACTERS;
    if text.len() < length {
        bail!("the text has about {} tokens: give a longer one, or fewer --tokens", text.len() / CHARACTERS);
    }
    // At the end of a line, so that nothing is torn.
    let line_end =
        |from: usize| text[..].bytes().skip(from).position(|b| b == b'\n').map_or(text.len(), |i| from + i + 1);
    let (middle, end) = (line_end(length * at as usize / 100), line_end(length));
    let hidden = format!("\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n");
    Ok(format!(
        "There is a pass key hidden in the following text. Find it and remember it.\n\n{}{hidden}{}\n\nWhat is the pass key? \
         The pass key is",
        &text[..middle.min(end)],
        &text[middle.min(end)..end]
    ))
}

fn ask(options: &Options, bin: &Path, model: &Path, prompt: &Path, pair: &Pair) -> Result<String> {
    let mut c = Command::new(bin.join("llama-completion"));
    c.arg("-m").arg(model).arg("-f").arg(prompt);
    // Room for texts with more tokens than expected; what does not fit is an error of llama.cpp's.
    let context = options.tokens * 3 / 2 + 256;
    c.args(["-c", &context.to_string(), "-n", "12", "--temp", "0", "-fa", "on", "-no-cnv", "--no-display-prompt"]);
    c.args(["-t", &options.threads.unwrap_or_else(cpu::cores).to_string()]);
    c.args(["--cache-type-k", &pair.k, "--cache-type-v", &pair.v]);
    Ok(process::run_ok(&mut c)?.stdout)
}

fn table(pairs: &[Pair], at: &[u32], found: &[Vec<bool>]) -> String {
    let places: Vec<String> = at.iter().map(|at| format!("at {at}%")).collect();
    let header: Vec<&str> = std::iter::once("K/V").chain(places.iter().map(String::as_str)).collect();
    let mut table = Table::new(&header, 1);
    for (pair, row) in pairs.iter().zip(found) {
        let cells = row.iter().map(|&found| if found { "found" } else { "lost" }.to_string());
        table.row(std::iter::once(pair.name()).chain(cells).collect());
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_stands_where_it_should() {
        let text = "word word word word\n".repeat(1000);
        for at in [0, 50, 100] {
            let prompt = prompt(&text, 1000, at, "68231").unwrap();
            let place = prompt.find("68231").unwrap() as f64 / prompt.len() as f64;
            assert!((place - f64::from(at) / 100.0).abs() < 0.06, "{at}: {place}");
            assert!(prompt.ends_with("The pass key is"));
            // Nothing of the text is lost, and it is as long as was asked for.
            assert!((1000 * CHARACTERS..1000 * CHARACTERS + 300).contains(&prompt.len()));
        }
        assert!(prompt(&text, 100_000, 50, "1").is_err());
    }

    #[test]
    fn what_is_lost_shows() {
        let pairs = [Pair::parse("f16").unwrap(), Pair::parse("srft4").unwrap()];
        let text = table(&pairs, &[10, 90], &[vec![true, false], vec![true, true]]);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["f16", "found", "lost"]);
        assert_eq!(lines[2], ["srft4", "found", "found"]);
    }

    #[test]
    fn a_search_that_tested_nothing_has_not_passed() {
        assert!(passed(&[vec![true, true], vec![true, true]]));
        assert!(passed(&[vec![true, false], vec![true, false]]));
        assert!(!passed(&[vec![true, true], vec![true, false]]));
        assert!(!passed(&[vec![false, false], vec![false, true]]));
    }
}
