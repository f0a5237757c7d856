//! `cargo kv plan` against llama.cpp: the same bytes for the caches of every architecture, in contexts of several kinds.

use std::path::Path;
use std::process::Command;

use anyhow::{bail, Context, Result};
use ggml_ext::ContextShape;
use kv::plan::Model;
use kv::process;

/// What the program printed of a context.
struct Line<'a> {
    file: &'a Path,
    types: [&'a str; 2],
    context: ContextShape,
    alignment: u64,
    /// None: it was refused.
    bytes: Option<u64>,
}

impl Line<'_> {
    fn parse(line: &str) -> Result<Option<Line<'_>>> {
        let words: Vec<&str> = line.split('\t').collect();
        let [first, file, k, v, ref numbers @ ..] = words[..] else { return Ok(None) };
        if first != "size" {
            return Ok(None);
        }
        let numbers = numbers.iter().map(|n| n.parse::<i64>()).collect::<Result<Vec<_>, _>>()?;
        let [cells, sequences, unified, batch, full_windows, flash, alignment, bytes] = numbers.as_slice() else {
            bail!("not eight numbers: {line}")
        };
        let mut context = ContextShape::new(usize::try_from(*cells)?);
        context.sequences = usize::try_from(*sequences)?;
        context.unified = *unified != 0;
        context.batch = usize::try_from(*batch)?;
        context.full_windows = *full_windows != 0;
        context.flash_attention = *flash != 0;
        let (alignment, bytes) = (u64::try_from(*alignment)?, u64::try_from(*bytes).ok());
        Ok(Some(Line { file: Path::new(file), types: [k, v], context, alignment, bytes }))
    }

    /// An error where the plan says something else.
    fn check(&self, model: &Model) -> Result<()> {
        let planned = model.cache(&self.context, self.types[0].parse()?, self.types[1].parse()?);
        // llama.cpp's allocator rounds each tensor up.
        let rounded = |tensors: &[u64]| tensors.iter().map(|n| n.next_multiple_of(self.alignment)).sum::<u64>();
        match (planned, self.bytes) {
            (Ok(size), Some(bytes)) if rounded(&size.tensors) == bytes => Ok(()),
            (Ok(size), Some(bytes)) => bail!("{} bytes are planned, llama.cpp takes {bytes}", rounded(&size.tensors)),
            (Err(why), Some(bytes)) => bail!("llama.cpp takes {bytes} bytes, the plan refuses: {why:#}"),
            (Ok(size), None) => bail!("llama.cpp refuses, {} bytes are planned", size.bytes()),
            (Err(_), None) => Ok(()),
        }
    }
}

/// Runs kv-test-archs for its sizes: how many contexts agree, and what is said of those that do not.
pub fn compare(program: &mut Command) -> Result<(u64, Vec<String>)> {
    compare_lines(&process::run_ok(program)?.stdout)
}

fn compare_lines(output: &str) -> Result<(u64, Vec<String>)> {
    let (mut agree, mut differ) = (0, Vec::new());
    // The contexts of a model come one after another.
    let mut model: Option<(&Path, Model)> = None;
    for text in output.lines() {
        let Some(line) = Line::parse(text).with_context(|| format!("a line of sizes: {text}"))? else { continue };
        let opened = match model.take() {
            Some(last) if last.0 == line.file => Ok(last.1),
            _ => Model::open(line.file),
        };
        match opened.and_then(|opened| line.check(&model.insert((line.file, opened)).1)) {
            Ok(()) => agree += 1,
            Err(why) => differ.push(format!("{}: {why:#}", text.replace('\t', " "))),
        }
    }
    Ok((agree, differ))
}
