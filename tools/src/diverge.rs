//! `cargo kv diverge`: where does a greedy continuation leave f16's?
//!
//! The most likely token is taken each time, so that a text goes another way at the first token where a cache has changed the
//! order of the best two. Any other order of sums does that too: f16 in smaller batches is the measure of how much it means.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};
use serde::Serialize;

use crate::calibrate;
use crate::pair::{pairs, Pair};
use crate::progress::Bar;
use crate::server::{self, Server};
use crate::table::{self, Table};
use crate::tasks::document::{document, Task};
use crate::{build_tree, digest, model};

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Plain text that prompts are cut from (default: prose, code and chat that come with this command, and lists)
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Pairs K/V,K/V,… (T alone is T/T); f16 is always included
    #[arg(long, value_name = "K/V,…", default_value = "srft8,srft4,delta4/srft4,delta3/srft3")]
    pub types: String,
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub prompts: u32,
    /// Tokens that follow each prompt
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub generate: u32,
    /// Write JSON there, with the place of each first difference
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the table as Markdown there
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    #[command(flatten)]
    pub server: server::Options,
}

/// Tokens of the shortest and of the longest prompt.
const SHORTEST: usize = 512;
const LONGEST: usize = 2048;
/// Tokens of a batch, for f16 beside itself. llama-server's default is 512, and below 64 ggml's attention has another kernel on
/// the CPU.
const SMALL_BATCH: &str = "32";

/// One row: a pair, perhaps in small batches, and where it leaves f16 on each prompt.
#[derive(Serialize)]
struct Row {
    k: String,
    v: String,
    small_batch: bool,
    /// Tokens that are the same; null where all are.
    first_difference: Vec<Option<usize>>,
}

#[derive(Serialize)]
struct Results {
    model: String,
    model_sha: String,
    build: String,
    server_args: String,
    text: String,
    generate: usize,
    prompt_tokens: Vec<usize>,
    rows: Vec<Row>,
}

pub fn diverge(options: &Options) -> Result<()> {
    let pairs = pairs("none", std::slice::from_ref(&options.types))?;
    let model = model::model_or_default(options.model.as_deref())?;
    let text = options.text.as_deref().map(|path| model::text_or_default(Some(path))).transpose()?;
    let bin = build_tree::build(&options.server.build, &["llama-server".into()])?;
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut results = Results {
        model: name(&model),
        model_sha: digest::file(&model)?,
        build: digest::programs(&bin, "llama-server")?,
        server_args: options.server.server_args.clone(),
        text: text.as_deref().map_or("prose, code, chat and lists".into(), name),
        generate: options.generate as usize,
        prompt_tokens: Vec::new(),
        rows: Vec::new(),
    };
    let runs: Vec<(&Pair, bool)> = [(&pairs[0], false), (&pairs[0], true)]
        .into_iter()
        .chain(pairs[1..].iter().map(|pair| (pair, false)))
        .collect();
    let count = options.prompts as usize;
    let bar = Bar::new((runs.len() * count) as u64, "continuing");
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    let mut with_f16: Vec<Vec<u32>> = Vec::new();
    for (i, &(pair, small_batch)) in runs.iter().enumerate() {
        let further: &[&str] = if small_batch { &["-ub", SMALL_BATCH] } else { &[] };
        let server = options.server.start(&bin, &model, pair, LONGEST + results.generate, further)?;
        if prompts.is_empty() {
            prompts = cut_prompts(&server, text.as_deref(), count)?;
            results.prompt_tokens = prompts.iter().map(Vec::len).collect();
        }
        let mut all = Vec::new();
        for (j, prompt) in prompts.iter().enumerate() {
            bar.set((i * count + j) as u64, (runs.len() * count) as u64, &shown(&pair.name(), small_batch));
            all.push(server.complete(prompt, results.generate, &[])?.tokens);
        }
        if i == 0 {
            with_f16 = all;
            continue;
        }
        let first_difference = with_f16.iter().zip(&all).map(|(a, b)| first_difference(a, b)).collect();
        results.rows.push(Row { k: pair.k.clone(), v: pair.v.clone(), small_batch, first_difference });
        if let Some(path) = &options.json {
            let text = serde_json::to_string_pretty(&results)? + "\n";
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    drop(bar);
    print!("{}\n{}\n", table(&results), notes(&results).join("\n"));
    if let Some(path) = &options.markdown {
        let notes: String = notes(&results).iter().map(|note| format!("- {note}\n")).collect();
        let text = format!("### {}\n\n{}\n{notes}", results.model, table(&results).markdown());
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn shown(pair: &str, small_batch: bool) -> String {
    format!("{pair}{}", if small_batch { format!(", -ub {SMALL_BATCH}") } else { String::new() })
}

/// Prompts of growing length, each from another place of the text; of our own, every third is a list.
fn cut_prompts(server: &Server, text: Option<&Path>, count: usize) -> Result<Vec<Vec<u32>>> {
    let own = match text {
        Some(path) => Some(fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?),
        None => None,
    };
    let begin = server.tokenize("", true)?;
    let tokens = server.tokenize(own.as_deref().unwrap_or(calibrate::TEXT), false)?;
    ensure!(tokens.len() >= LONGEST, "the text has {} tokens, {LONGEST} are needed: give a longer one", tokens.len());
    (0..count)
        .map(|i| {
            let length = length_of(i, count) - begin.len();
            let piece = if own.is_none() && i % 3 == 2 {
                let lists = server.tokenize(&document(Task::Copy, i as u64, LONGEST / 64, 1).text, false)?;
                ensure!(lists.len() >= length, "lists of {} tokens", lists.len());
                lists[..length].to_vec()
            } else {
                window(&tokens, length, i, count).to_vec()
            };
            Ok([&begin[..], &piece].concat())
        })
        .collect()
}

/// From the shortest to the longest, in equal steps.
fn length_of(i: usize, count: usize) -> usize {
    SHORTEST + (LONGEST - SHORTEST) * i / (count - 1).max(1)
}

/// The windows of a text begin at equal distances, and the last one ends with it.
fn window(tokens: &[u32], length: usize, i: usize, count: usize) -> &[u32] {
    let from = (tokens.len() - length) * i / (count - 1).max(1);
    &tokens[from..from + length]
}

/// How many tokens are the same, if any is not.
fn first_difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (same < a.len().max(b.len())).then_some(same)
}

/// The one in the middle, the lower of two; None where it is among those without a difference.
fn median(places: &[Option<usize>]) -> Option<usize> {
    let mut sorted: Vec<usize> = places.iter().map(|place| place.unwrap_or(usize::MAX)).collect();
    sorted.sort_unstable();
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().filter(|&place| place != usize::MAX)
}

fn table(results: &Results) -> Table {
    let mut table = Table::new(&["K/V", "first difference (median)", "same to the end", "%"], 1);
    for row in &results.rows {
        let pair = Pair { k: row.k.clone(), v: row.v.clone() };
        let (all, same) = (row.first_difference.len(), row.first_difference.iter().filter(|d| d.is_none()).count());
        table.row(vec![
            shown(&pair.name(), row.small_batch),
            median(&row.first_difference).map_or("none".into(), |place| place.to_string()),
            format!("{same}/{all}"),
            table::percent(same, all),
        ]);
    }
    table
}

fn notes(results: &Results) -> Vec<String> {
    let mut notes = vec![format!(
        "model {}, {} prompts of {SHORTEST} to {LONGEST} tokens ({}), {} tokens each at temperature 0, beside f16",
        results.model,
        results.prompt_tokens.len(),
        results.text,
        results.generate
    )];
    if !results.server_args.is_empty() {
        notes.push(format!("llama-server {}", results.server_args));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 4, 3]), Some(1));
        // One ended earlier.
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(first_difference(&[], &[]), None);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[Some(9), None, Some(3)]), Some(9));
        assert_eq!(median(&[Some(9), None, Some(3), Some(5)]), Some(5));
        assert_eq!(median(&[None, None, Some(3)]), None);
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn prompts_come_from_all_of_the_text() {
        let tokens: Vec<u32> = (0..5000).collect();
        let windows: Vec<&[u32]> = (0..20).map(|i| window(&tokens, length_of(i, 20), i, 20)).collect();
        assert_eq!((windows[0].len(), windows[19].len()), (SHORTEST, LONGEST));
        assert_eq!((windows[0][0], windows[19][LONGEST - 1]), (0, 4999));
        assert!(windows.windows(2).all(|two| two[0].len() < two[1].len() && two[0].last() < two[1].last()));
        assert_eq!(window(&tokens, length_of(0, 1), 0, 1).len(), SHORTEST);
    }

    #[test]
    fn rows() {
        let row =
            |k: &str, small_batch, first_difference| Row { k: k.into(), v: k.into(), small_batch, first_difference };
        let results = Results {
            model: "m.gguf".into(),
            model_sha: "a".into(),
            build: "b".into(),
            server_args: String::new(),
            text: "t".into(),
            generate: 256,
            prompt_tokens: vec![512, 2048],
            rows: vec![row("f16", true, vec![None, None]), row("srft4", false, vec![Some(17), None])],
        };
        let text = table(&results).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["f16,", "-ub", "32", "none", "2/2", "100"]);
        assert_eq!(lines[2], ["srft4", "17", "1/2", "50"]);
    }
}
