//! `cargo kv tasks`: tasks that have one right answer, with every pair and with f16.
//!
//! A mean divergence says how far distributions move, not what a user loses by it. Here an answer is right or wrong, and where
//! it stands in the document is random. The documents come from a seed, so that no model has seen them. Each is computed once
//! for a pair and stays in the cache of llama-server: a sample costs a question and its answer.

pub mod document;
mod report;
mod results;
pub mod words;

use std::fs;
use std::path::PathBuf;

use anyhow::{ensure, Context, Result};

use crate::pair::{pairs, Pair};
use crate::plot::{self, curves};
use crate::progress::Bar;
use crate::server::{self, Server};
use crate::{build_tree, digest, model};

use document::{Document, Task, Wanted};
use results::{Cell, Results, Sample, Setup};

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// GGUF model (default: SmolLM2-135M-Instruct, fetched)
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Pairs K/V,K/V,… (T alone is T/T); f16 is always included
    #[arg(long, value_name = "K/V,…", default_value = "srft4,delta4/srft4,delta3/srft3")]
    pub types: String,
    /// Lengths of documents in tokens, question and answer included
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "4096",
          value_parser = clap::value_parser!(u32).range(256..))]
    pub tokens: Vec<u32>,
    /// Only these tasks
    #[arg(
        long,
        value_name = "TASK,…",
        value_delimiter = ',',
        value_enum,
        default_value = "pairs,lines,variables,needles,copy"
    )]
    pub only: Vec<Task>,
    /// Questions per task and length
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub samples: u32,
    /// Documents that the questions of a task and length are about
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub documents: u32,
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Leave out tasks of which f16 has less than this right
    #[arg(long, default_value_t = 50, value_name = "%", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub least: u32,
    /// Write JSON there, with every answer
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Take over the answers that the file of --json has, and ask for the rest
    #[arg(long, requires = "json")]
    pub resume: bool,
    /// Ask nothing, and take the answers that earlier runs wrote by --json, of one model and setting
    #[arg(long, value_name = "FILE,…", value_delimiter = ',',
          conflicts_with_all = ["json", "model", "types", "tokens", "only", "samples", "documents", "seed"])]
    pub from: Vec<PathBuf>,
    /// Write the table as Markdown there
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Draw the share of right answers by length there
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub server: server::Options,
}

pub fn tasks(options: &Options) -> Result<()> {
    if let Some(path) = &options.plot {
        plot::check_name(path)?;
    }
    let (results, pairs, cells) = if options.from.is_empty() {
        measure(options)?
    } else {
        let results = Results::read_all(&options.from)?;
        let (pairs, cells) = (results.pairs(), results.cells());
        (results, pairs, cells)
    };
    print!("{}", report::as_text(&results, &pairs, &cells, options.least));
    if let Some(path) = &options.markdown {
        let text = report::as_markdown(&results, &pairs, &cells, options.least);
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &options.plot {
        let above = format!("right answers, % of those to tasks that f16 can do, {}", results.setup.model);
        let curves = report::by_length(&results, &pairs, &cells, options.least);
        curves::write(path, &curves::Frame { above: &above, below: "tokens", scale: curves::Scale::Linear }, &curves)?;
    }
    Ok(())
}

/// All answers, and what was asked for.
fn measure(options: &Options) -> Result<(Results, Vec<Pair>, Vec<Cell>)> {
    let pairs = pairs("none", std::slice::from_ref(&options.types))?;
    let model = model::model_or_default(options.model.as_deref())?;
    let bin = build_tree::build(&options.server.build, &["llama-server".into()])?;
    let setup = Setup {
        model: model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        model_sha: digest::file(&model)?,
        build: digest::programs(&bin, "llama-server")?,
        server_args: options.server.server_args.clone(),
        seed: options.seed,
        samples: options.samples as usize,
        documents: options.documents as usize,
    };
    let known = match &options.json {
        Some(path) if options.resume => Results::resume(path, setup)?,
        _ => Results::new(setup),
    };
    let tokens = options.tokens.iter().map(|n| *n as usize);
    let cells: Vec<Cell> =
        tokens.flat_map(|tokens| options.only.iter().map(move |&task| Cell { task, tokens })).collect();
    let mut run = Run { options, bin, model, results: known, prepared: Vec::new() };
    let bar = Bar::new(0, "asking");
    for (i, pair) in pairs.iter().enumerate() {
        run.ask_all(pair, &cells, (i, pairs.len()), &bar)?;
    }
    drop(bar);
    Ok((run.results, pairs, cells))
}

struct Run<'a> {
    options: &'a Options,
    bin: PathBuf,
    model: PathBuf,
    results: Results,
    /// Documents that were fitted to their length, which takes a tokenizer; the same for all pairs.
    prepared: Vec<Prepared>,
}

/// A document as the model sees it.
#[derive(Clone)]
struct Prepared {
    cell: Cell,
    index: usize,
    tokens: Vec<u32>,
    questions: Vec<PreparedQuestion>,
}

#[derive(Clone)]
struct PreparedQuestion {
    tokens: Vec<u32>,
    wanted: Wanted,
    /// The most tokens that an answer may have.
    room: usize,
}

impl Run<'_> {
    /// Asks for what is not known of a pair. `at`: which one of how many.
    fn ask_all(&mut self, pair: &Pair, cells: &[Cell], at: (usize, usize), bar: &Bar) -> Result<()> {
        let samples = self.results.setup.samples;
        let total = at.1 * cells.len() * samples;
        let context = cells.iter().map(|cell| cell.tokens).max().unwrap_or(0);
        let mut server = None;
        for (i, &cell) in cells.iter().enumerate() {
            let done = (at.0 * cells.len() + i) * samples;
            // f16 comes first.
            if at.0 > 0 && !report::ability(&self.results, cell, self.options.least).enough {
                continue;
            }
            let missing: Vec<usize> =
                self.results.of(pair, cell).iter().enumerate().filter(|(_, s)| s.is_none()).map(|(n, _)| n).collect();
            for index in 0..self.results.setup.documents {
                let numbers = self.numbers(index);
                let wanted: Vec<usize> = missing.iter().copied().filter(|n| numbers.contains(n)).collect();
                if wanted.is_empty() {
                    continue;
                }
                let now = format!("{} {} {}", pair.name(), cell.task.name(), cell.tokens);
                bar.set((done + wanted[0]) as u64, total as u64, &now);
                if server.is_none() {
                    server = Some(self.options.server.start(&self.bin, &self.model, pair, context, &[])?);
                }
                let server = server.as_ref().context("was started")?;
                let document = self.prepare(server, cell, index)?;
                for number in wanted {
                    bar.set((done + number) as u64, total as u64, &now);
                    let question = &document.questions[number - numbers.start];
                    let answer = ask(server, &document, question)?;
                    self.results.samples_asked.push(Sample {
                        k: pair.k.clone(),
                        v: pair.v.clone(),
                        cell,
                        number,
                        wanted: question.wanted.shown(),
                        right: question.wanted.is_in(&answer),
                        answer,
                    });
                }
                if let Some(path) = &self.options.json {
                    self.results.write(path)?;
                }
            }
        }
        Ok(())
    }

    /// The samples that are about a document, as many for each as can be.
    fn numbers(&self, document: usize) -> std::ops::Range<usize> {
        let Setup { samples, documents, .. } = self.results.setup;
        document * samples / documents..(document + 1) * samples / documents
    }

    fn prepare(&mut self, server: &Server, cell: Cell, index: usize) -> Result<Prepared> {
        if let Some(known) = self.prepared.iter().find(|p| p.cell == cell && p.index == index) {
            return Ok(known.clone());
        }
        // Any two are another document, those of another length too.
        let parts = [self.options.seed, cell.task as u64, cell.tokens as u64, index as u64];
        let seed = parts.iter().fold(0u64, |all, part| all.wrapping_mul(1_000_003).wrapping_add(*part));
        let count = self.numbers(index).len();
        let generate = |units: usize| document::document(cell.task, seed, units, count);
        let fitted = fit(count, |units| {
            let prepared = prepared(server, cell, index, &generate(units))?;
            Ok((prepared.tokens_in_all() <= cell.tokens).then_some(prepared))
        })?;
        let fitted = fitted.with_context(|| {
            format!(
                "{} tokens are too few for {count} questions of {} on one document: give more --tokens or --documents, or \
                 fewer --samples",
                cell.tokens,
                cell.task.name()
            )
        })?;
        self.prepared.push(fitted.clone());
        Ok(fitted)
    }
}

impl Prepared {
    /// With the question and the answer that take most.
    fn tokens_in_all(&self) -> usize {
        self.tokens.len() + self.questions.iter().map(|q| q.tokens.len() + q.room).max().unwrap_or(0)
    }
}

fn prepared(server: &Server, cell: Cell, index: usize, document: &Document) -> Result<Prepared> {
    let question = |q: &document::Question| {
        let wanted = server.tokenize(&q.wanted.shown(), false)?.len();
        let room = match q.wanted {
            // It begins at once, but a text may be put in tokens in several ways.
            Wanted::Text(_) => wanted + wanted / 4 + 4,
            // With words of the model's own, and without room for every number of the document.
            Wanted::All(_) => wanted + 16,
        };
        Ok(PreparedQuestion { tokens: server.tokenize(&q.text, false)?, wanted: q.wanted.clone(), room })
    };
    let questions = document.questions.iter().map(question).collect::<Result<_>>()?;
    Ok(Prepared { cell, index, tokens: server.tokenize(&document.text, true)?, questions })
}

/// The largest number of units that `try_units` has a document for, at least `least`, and that document.
fn fit<T>(least: usize, mut try_units: impl FnMut(usize) -> Result<Option<T>>) -> Result<Option<T>> {
    let Some(mut best) = try_units(least)? else { return Ok(None) };
    let (mut fits, mut beyond) = (least, 2 * least.max(1));
    while let Some(larger) = try_units(beyond)? {
        (best, fits, beyond) = (larger, beyond, 2 * beyond);
    }
    while fits + 1 < beyond {
        let middle = fits.midpoint(beyond);
        match try_units(middle)? {
            Some(larger) => (best, fits) = (larger, middle),
            None => beyond = middle,
        }
    }
    Ok(Some(best))
}

fn ask(server: &Server, document: &Prepared, question: &PreparedQuestion) -> Result<String> {
    let prompt = [&document.tokens[..], &question.tokens].concat();
    let answer = server.complete(&prompt, question.room, &["\n\n"])?;
    ensure!(answer.tokens.len() <= question.room, "{} tokens of at most {}", answer.tokens.len(), question.room);
    Ok(answer.text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn arguments() {
        let words =
            ["tasks", "--tokens", "4096,8192", "--server-args", "-ngl 99 -ub 256", "--only", "copy", "--bin", "/b"];
        let options = Cli::parse_from(words).options;
        assert_eq!((options.tokens, options.samples, options.only), (vec![4096, 8192], 20, vec![Task::Copy]));
        assert_eq!(options.server.server_args, "-ngl 99 -ub 256");
        assert_eq!(options.server.build.bin, Some("/b".into()));
        assert!(Cli::try_parse_from(["tasks", "--resume"]).is_err());
        assert_eq!(Cli::parse_from(["tasks"]).options.only.len(), 5);
    }

    #[test]
    fn the_longest_document_that_fits() {
        for limit in [10, 11, 13, 64, 99, 1000, 4097] {
            let mut calls = 0;
            let found = fit(10, |units| {
                calls += 1;
                Ok((units <= limit).then_some(units))
            });
            assert_eq!(found.unwrap(), Some(limit));
            assert!(calls < 30, "{calls}");
        }
        assert_eq!(fit(10, |units| Ok((units <= 9).then_some(units))).unwrap(), None);
        assert!(fit(1, |units| if units < 4 { Ok(Some(units)) } else { anyhow::bail!("gone") }).is_err());
    }

    #[test]
    fn samples_are_shared_out_evenly() {
        let options = Cli::parse_from(["tasks", "--samples", "20", "--documents", "3"]).options;
        let mut results = results::tests::results(20, &[]);
        results.setup.documents = 3;
        let run = Run { options: &options, bin: "".into(), model: "".into(), results, prepared: Vec::new() };
        assert_eq!([0, 1, 2].map(|i| run.numbers(i)), [0..6, 6..13, 13..20]);
    }
}
