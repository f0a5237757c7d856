//! What an earlier run has found, so that a long comparison can be interrupted and goes on where it was.
//!
//! Quality alone: it is the same whenever it is measured. Speeds mean something only beside others of the same run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use serde_json::Value;

use super::{CacheSize, Measured, Setup, Statistics};
use crate::cache;
use crate::pair::Pair;

/// The rows of a file of results.
#[derive(Default)]
pub struct Known(Vec<Value>);

impl Known {
    /// A file that is not there yet holds nothing.
    pub fn read(path: &Path) -> Result<Known> {
        if !path.exists() {
            return Ok(Known::default());
        }
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        match serde_json::from_str(&text) {
            Ok(Value::Array(rows)) => Ok(Known(rows)),
            _ => bail!(
                "{} is not a result of cargo kv compare --json: name another file, or drop --resume",
                path.display()
            ),
        }
    }

    /// Fills in the pairs whose quality is known; says so of those that another build, model or text has left.
    pub fn take_over(&self, measured: &mut Measured) {
        let mut stale = 0;
        for i in 0..measured.rows.len() {
            let pair = &measured.rows[i].pair;
            match self.row(measured, pair) {
                Some(row) if row["made_from"] == measured.made_from.as_str() => {
                    if let Some((statistics, size)) = quality(row, measured.setup.ctx) {
                        (measured.rows[i].quality, measured.rows[i].size) = (Some(statistics), size);
                    }
                }
                Some(_) => stale += 1,
                None => {}
            }
        }
        if stale > 0 {
            eprintln!(
                "{stale} known {} of {} came from another build, model or text: measured again",
                if stale == 1 { "result" } else { "results" },
                measured.name()
            );
        }
    }

    /// The row of a pair at the same lengths.
    fn row(&self, measured: &Measured, pair: &Pair) -> Option<&Value> {
        let (model, text) = (measured.name(), measured.text());
        self.0.iter().find(|row| {
            row["model"] == model.as_str()
                && row["text"] == text.as_str()
                && row["ctx"] == measured.setup.ctx
                && row["chunks"] == measured.setup.chunks
                && row["k"] == pair.k.as_str()
                && row["v"] == pair.v.as_str()
                && row["kld"].is_number()
        })
    }

    /// New rows, and behind them the rows of other models, pairs and lengths, which a file keeps.
    pub fn joined(&self, new: Value) -> Value {
        let Value::Array(mut rows) = new else { return new };
        let same = |a: &Value, b: &Value| ["model", "text", "ctx", "chunks", "k", "v"].iter().all(|n| a[n] == b[n]);
        let kept: Vec<Value> = self.0.iter().filter(|old| !rows.iter().any(|new| same(old, new))).cloned().collect();
        rows.extend(kept);
        Value::Array(rows)
    }
}

fn quality(row: &Value, ctx: u32) -> Option<(Statistics, Option<CacheSize>)> {
    let number = |name: &str| row[name].as_f64();
    let statistics = Statistics { ppl: number("ppl")?, kld: number("kld")?, same_top: number("same_top")? };
    let size = number("kv_mib").zip(number("kv_window_mib"));
    Some((statistics, size.map(|(mib, window_mib)| CacheSize { mib, cells: ctx, window_mib })))
}

/// What the quality of a cache depends on, as a short name: the programs, the model and the text, by their contents.
pub fn made_from(setup: &Setup) -> Result<String> {
    let mut files: Vec<PathBuf> = vec![setup.model.clone(), setup.text.clone()];
    for entry in fs::read_dir(&setup.bin).with_context(|| format!("cannot read {}", setup.bin.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let counts =
            ["ggml", "llama.", "llama-common"].iter().any(|start| name.trim_start_matches("lib").starts_with(start));
        // A library's other names are links to it.
        if entry.file_type()?.is_file() && (counts || name.contains("perplexity")) {
            files.push(entry.path());
        }
    }
    let mut sums = files.iter().map(|file| cache::sha256_file(file)).collect::<Result<Vec<_>>>()?;
    // In an order of their own: folders have none, and a copy may have the links as files.
    sums.sort_unstable();
    sums.dedup();
    Ok(cache::key(&sums))
}

#[cfg(test)]
mod tests {
    use super::super::report::{self, Row};
    use super::*;

    #[test]
    fn what_was_written_is_known() {
        let measured = report::tests::measured();
        let file = std::env::temp_dir().join(format!("kv-known-{}.json", std::process::id()));
        fs::write(&file, report::as_json(std::slice::from_ref(&measured)).to_string()).unwrap();
        let known = Known::read(&file).unwrap();
        let taken = |change: &dyn Fn(&mut Measured)| {
            let mut new = Measured::new(measured.setup.clone(), &pairs_of(&measured), None);
            new.made_from = measured.made_from.clone();
            change(&mut new);
            known.take_over(&mut new);
            new.rows
        };
        for (old, new) in measured.rows.iter().zip(taken(&|_| {})) {
            assert_eq!((old.quality, old.size), (new.quality, new.size));
            assert!(new.quality.is_some());
        }
        let nothing = |rows: Vec<Row>| rows.iter().all(|row| row.quality.is_none());
        assert!(nothing(taken(&|m| m.setup.chunks += 1)));
        assert!(nothing(taken(&|m| m.setup.model = "/m/another.gguf".into())));
        assert!(nothing(taken(&|m| m.made_from = "another build".into())));
        assert!(nothing(taken(&|m| m.rows = vec![Row::new(Pair::parse("srft3").unwrap())])));
        let again = known.joined(report::as_json(std::slice::from_ref(&measured)));
        assert_eq!(again.as_array().unwrap().len(), measured.rows.len());
        assert_eq!(known.joined(Value::Array(Vec::new())).as_array().unwrap().len(), measured.rows.len());
        fs::write(&file, "{}").unwrap();
        assert!(Known::read(&file).is_err());
        fs::remove_file(&file).unwrap();
        assert!(Known::read(&file).unwrap().0.is_empty());
    }

    fn pairs_of(measured: &Measured) -> Vec<Pair> {
        measured.rows.iter().map(|row| row.pair.clone()).collect()
    }

    #[test]
    fn another_library_model_or_text_is_another_source() {
        let dir = cache::Scratch::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["m.gguf", "t.txt", "llama-perplexity", "libggml-cpu.so", "libllama.so", "libllama-server-impl.so"]
        {
            fs::write(at(name), name).unwrap();
        }
        let setup =
            Setup { bin: dir.path().into(), model: at("m.gguf"), text: at("t.txt"), ..report::tests::measured().setup };
        let first = made_from(&setup).unwrap();
        assert_eq!(made_from(&setup).unwrap(), first);
        fs::write(at("libllama-server-impl.so"), "another").unwrap();
        fs::write(at("libllama.so.0"), "libllama.so").unwrap();
        assert_eq!(made_from(&setup).unwrap(), first, "no part of it, and a copy of a part");
        for name in ["m.gguf", "t.txt", "llama-perplexity", "libggml-cpu.so", "libllama.so.0"] {
            fs::write(at(name), "another").unwrap();
            assert_ne!(made_from(&setup).unwrap(), first, "{name}");
            fs::write(at(name), name.trim_end_matches(".0")).unwrap();
        }
        assert_eq!(made_from(&setup).unwrap(), first);
    }
}
