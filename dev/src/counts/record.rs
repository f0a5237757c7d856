//! tests/counts/counts.json: the numbers as they were when someone last looked at them.
//!
//! `{"rustc 1.95.0 (…)": {"avx2 decode srft4 d128 x4, per cell": 92.4, …}}`: another compiler makes another program,
//! so numbers are those of one compiler, and only its numbers are kept.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{bail, Context, Result};

use super::loops::Counts;

/// A number may move so far: a memcpy or an allocation that glibc does in another way.
pub const TOLERANCE: f64 = 0.03;

#[derive(Debug, Default, PartialEq)]
pub struct Record(kv::bench::pinned::Counts);

impl Record {
    pub fn read(path: &Path) -> Result<Record> {
        if !path.exists() {
            return Ok(Record::default());
        }
        let wrong = || format!("{} is not {{compiler: {{name: count}}}}", path.display());
        serde_json::from_str(&fs::read_to_string(path)?).map(Record).with_context(wrong)
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.0)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
    }

    /// Whose numbers these are.
    pub fn compilers(&self) -> String {
        self.0.keys().cloned().collect::<Vec<_>>().join(", ")
    }

    /// Are there numbers of this instruction set, by this compiler?
    pub fn has(&self, compiler: &str, isa: &str) -> bool {
        self.0.get(compiler).is_some_and(|loops| loops.keys().any(|name| of_isa(name, isa)))
    }

    /// Takes the numbers of one instruction set; those of others stay where they are of the same compiler.
    pub fn bless(&mut self, compiler: &str, isa: &str, counts: &Counts) {
        self.0.retain(|name, _| name == compiler);
        let own = self.0.entry(compiler.to_string()).or_default();
        own.retain(|name, _| !of_isa(name, isa));
        own.extend(counts.0.iter().map(|(name, count)| (name.clone(), (count * 10.0).round() / 10.0)));
    }

    /// An error names every number of the instruction set that moved.
    pub fn compare(&self, compiler: &str, isa: &str, counts: &Counts) -> Result<()> {
        let empty = BTreeMap::new();
        let kept = self.0.get(compiler).unwrap_or(&empty);
        let mut moved = Vec::new();
        for (name, &now) in &counts.0 {
            match kept.get(name) {
                None => moved.push(format!("{name}: {now:.1}, not in the file")),
                Some(&was) if (now / was - 1.0).abs() > TOLERANCE => moved
                    .push(format!("{name}: {was:.1} -> {now:.1} instructions ({:+.1}%)", 100.0 * (now / was - 1.0))),
                Some(_) => {}
            }
        }
        let gone = kept.keys().filter(|name| of_isa(name, isa) && !counts.0.contains_key(*name));
        moved.extend(gone.map(|name| format!("{name}: in the file, but no longer counted")));
        if !moved.is_empty() {
            bail!(
                "{}\nmore than {:.0}% from tests/counts/counts.json; where that is meant: \
                 cargo kv test --only rust --bless-counts",
                moved.join("\n"),
                100.0 * TOLERANCE
            );
        }
        Ok(())
    }
}

fn of_isa(name: &str, isa: &str) -> bool {
    name.strip_prefix(isa).is_some_and(|rest| rest.starts_with(' '))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv::cache::Scratch;

    fn counts(all: &[(&str, f64)]) -> Counts {
        Counts(all.iter().map(|(name, n)| (name.to_string(), *n)).collect())
    }

    #[test]
    fn a_number_that_moved_is_named() {
        let mut record = Record::default();
        record.bless("rustc 1", "avx2", &counts(&[("avx2 a", 100.0), ("avx2 b", 50.0), ("avx2 c", 7.0)]));
        record.compare("rustc 1", "avx2", &counts(&[("avx2 a", 102.9), ("avx2 b", 48.6), ("avx2 c", 7.0)])).unwrap();
        let e = record.compare("rustc 1", "avx2", &counts(&[("avx2 a", 110.0), ("avx2 b", 50.0), ("avx2 d", 1.0)]));
        let e = e.unwrap_err().to_string();
        assert!(e.contains("avx2 a: 100.0 -> 110.0 instructions (+10.0%)"), "{e}");
        assert!(e.contains("avx2 c: in the file") && e.contains("avx2 d: 1.0, not in the file"), "{e}");
        assert!(!e.contains("avx2 b") && e.contains("--bless-counts"), "{e}");
    }

    #[test]
    fn blessing_keeps_other_sets_and_drops_other_compilers() {
        let mut record = Record::default();
        record.bless("rustc 1", "avx2", &counts(&[("avx2 a", 1.0)]));
        record.bless("rustc 1", "avx512", &counts(&[("avx512 a", 2.0)]));
        record.bless("rustc 1", "avx2", &counts(&[("avx2 b", 2.7449)]));
        record.compare("rustc 1", "avx512", &counts(&[("avx512 a", 2.0)])).unwrap();
        record.compare("rustc 1", "avx2", &counts(&[("avx2 b", 2.7)])).unwrap();
        record.bless("rustc 2", "avx2", &counts(&[("avx2 a", 1.0)]));
        assert!(record.has("rustc 2", "avx2") && !record.has("rustc 1", "avx2") && !record.has("rustc 2", "avx512"));
        assert_eq!(record.compilers(), "rustc 2");
    }

    #[test]
    fn the_file_holds_it() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("counts.json");
        assert_eq!(Record::read(&path).unwrap(), Record::default());
        let mut record = Record::default();
        record.bless("rustc 1", "avx2", &counts(&[("avx2 a", 1.5)]));
        record.write(&path).unwrap();
        assert_eq!(Record::read(&path).unwrap(), record);
    }
}
