//! What an earlier run has found, so that a long comparison can be interrupted and goes on where it was.
//!
//! Quality alone: it is the same whenever it is measured. Speeds mean something only beside others of the same run.

use std::fs;
use std::path::Path;

use anyhow::{bail, Context, Result};
use serde_json::Value;

use super::{CacheSize, Pair, Setup, Statistics};

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

    /// The quality of a pair, measured with the same model, text and lengths.
    pub fn quality(&self, setup: &Setup, model: &str, pair: &Pair) -> Option<(Statistics, Option<CacheSize>)> {
        let text = setup.text.file_name()?.to_str()?;
        let row = self.0.iter().find(|row| {
            row["model"] == model
                && row["text"] == text
                && row["ctx"] == setup.ctx
                && row["chunks"] == setup.chunks
                && row["k"] == pair.k.as_str()
                && row["v"] == pair.v.as_str()
                && row["kld"].is_number()
        })?;
        let number = |name: &str| row[name].as_f64();
        let statistics = Statistics { ppl: number("ppl")?, kld: number("kld")?, same_top: number("same_top")? };
        let size = number("kv_mib").zip(number("kv_window_mib"));
        Some((statistics, size.map(|(mib, window_mib)| CacheSize { mib, cells: setup.ctx, window_mib })))
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

#[cfg(test)]
mod tests {
    use super::super::report;
    use super::*;

    #[test]
    fn what_was_written_is_known() {
        let measured = report::tests::measured();
        let file = std::env::temp_dir().join(format!("kv-known-{}.json", std::process::id()));
        fs::write(&file, report::as_json(std::slice::from_ref(&measured)).to_string()).unwrap();
        let known = Known::read(&file).unwrap();
        let (setup, name) = (&measured.setup, measured.name());
        for row in &measured.rows {
            let (statistics, size) = known.quality(setup, &name, &row.pair).unwrap();
            assert_eq!((Some(statistics), size), (row.quality, row.size));
        }
        let again = known.joined(report::as_json(std::slice::from_ref(&measured)));
        assert_eq!(again.as_array().unwrap().len(), measured.rows.len());
        assert_eq!(known.joined(Value::Array(Vec::new())).as_array().unwrap().len(), measured.rows.len());
        let other = Setup { chunks: setup.chunks + 1, ..setup.clone() };
        assert!(known.quality(&other, &name, &measured.rows[0].pair).is_none());
        assert!(known.quality(setup, "another.gguf", &measured.rows[0].pair).is_none());
        assert!(known.quality(setup, &name, &Pair::parse("srft3").unwrap()).is_none());
        fs::write(&file, "{}").unwrap();
        assert!(Known::read(&file).is_err());
        fs::remove_file(&file).unwrap();
        assert!(Known::read(&file).unwrap().0.is_empty());
    }
}
