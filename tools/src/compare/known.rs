//! What an earlier run has found, so that a long comparison can be interrupted and goes on where it was.
//!
//! Quality is taken over where it comes from the same build: it is the same whenever it is measured. Speeds mean something
//! only beside others of the same run, so that they are kept in the file and shown nowhere else.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use serde_json::Value;

use super::{report, CacheSize, Measured, Setup, Statistics};
use crate::cache;

/// What a row was made from: the model, the text and the programs, by their contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub model: String,
    pub text: String,
    pub build: String,
}

impl Source {
    pub fn of(setup: &Setup) -> Result<Source> {
        Ok(Source {
            model: digest(&setup.model)?,
            text: digest(&setup.text)?,
            build: cache::key(&libraries(&setup.bin)?),
        })
    }
}

/// The first digits of what sha256sum prints.
fn digest(file: &Path) -> Result<String> {
    Ok(cache::sha256_file(file)?[..16].to_string())
}

/// Checksums of what quality is computed by.
fn libraries(bin: &Path) -> Result<Vec<String>> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(bin).with_context(|| format!("cannot read {}", bin.display()))? {
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
    Ok(sums)
}

/// The parts of a row, each measured by a program of its own.
const QUALITY: [&str; 3] = ["ppl", "kld", "same_top"];
const SPEED: [&str; 3] = ["pp", "tg", "tg_limit"];
const SIZE: [&str; 4] = ["bits_per_value", "kv_mib", "kv_window_mib", "kv_window_cells"];

fn has(row: &Value, part: &[&str]) -> bool {
    part.iter().any(|name| !row[name].is_null())
}

/// Are they of the same model, text, lengths and pair? A row that does not say what it was made from goes by names.
fn same(old: &Value, new: &Value) -> bool {
    let source = if old["model_sha"].is_string() { ["model_sha", "text_sha"] } else { ["model", "text"] };
    source.iter().chain(&["ctx", "chunks", "k", "v"]).all(|name| old[name] == new[name])
}

fn same_build(old: &Value, new: &Value) -> bool {
    old["build"].is_string() && old["build"] == new["build"]
}

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

    /// Fills in the pairs whose quality is known; says so of those that another build has left.
    pub fn take_over(&self, measured: &mut Measured) {
        let mut stale = 0;
        let new = report::as_json(std::slice::from_ref(measured));
        for (row, new) in measured.rows.iter_mut().zip(new.as_array().into_iter().flatten()) {
            let old: Vec<&Value> = self.0.iter().filter(|old| same(old, new) && has(old, &QUALITY)).collect();
            match old.iter().find(|old| same_build(old, new)) {
                Some(current) => {
                    if let Some((statistics, size)) = quality(current, measured.setup.ctx) {
                        (row.quality, row.size) = (Some(statistics), size);
                    }
                }
                None => stale += usize::from(!old.is_empty()),
            }
        }
        if stale > 0 {
            let results = if stale == 1 { "result" } else { "results" };
            eprintln!("{stale} known {results} of {} came from another build: not taken over", measured.name());
        }
    }

    /// New rows, with what this run has not measured and the same build had; behind them the rest, which a file keeps:
    /// other models, pairs and lengths, and what another build has left and nobody has measured since.
    pub fn joined(&self, new: Value) -> Value {
        let Value::Array(mut rows) = new else { return new };
        let mut kept = Vec::new();
        for old in &self.0 {
            let mut old = old.clone();
            for new in &mut rows {
                if same(&old, new) {
                    settle(&mut old, new);
                }
            }
            if has(&old, &QUALITY) || has(&old, &SPEED) {
                kept.push(old);
            }
        }
        rows.extend(kept);
        Value::Array(rows)
    }
}

/// What the new row has replaces what the old one had; what it lacks moves there from the same build.
fn settle(old: &mut Value, new: &mut Value) {
    let current = same_build(old, new);
    if current && !has(new, &SIZE) {
        SIZE.iter().for_each(|name| new[name] = old[name].clone());
    }
    if current && !has(new, &SPEED) && has(old, &SPEED) {
        new["depth"] = old["depth"].clone();
    }
    for part in [QUALITY, SPEED] {
        if has(new, &part) {
            part.iter().for_each(|name| old[name] = Value::Null);
        } else if current {
            part.iter().for_each(|name| new[name] = old[name].take());
        }
    }
}

fn quality(row: &Value, ctx: u32) -> Option<(Statistics, Option<CacheSize>)> {
    let number = |name: &str| row[name].as_f64();
    let statistics = Statistics { ppl: number("ppl")?, kld: number("kld")?, same_top: number("same_top")? };
    let size = || {
        let window_cells = row["kv_window_cells"].as_u64()?.try_into().ok()?;
        Some(CacheSize { mib: number("kv_mib")?, cells: ctx, window_mib: number("kv_window_mib")?, window_cells })
    };
    Some((statistics, size()))
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{measured, SOURCE};
    use super::super::report::{as_json, Row};
    use super::*;
    use crate::pair::Pair;

    fn known(rows: &[Measured]) -> Known {
        Known(as_json(rows).as_array().unwrap().clone())
    }

    /// The same models and pairs with nothing measured, but for what is known.
    fn begun(known: &Known, change: &dyn Fn(&mut Measured)) -> Measured {
        let old = measured();
        let pairs: Vec<Pair> = old.rows.iter().map(|row| row.pair.clone()).collect();
        let mut new = Measured::new(old.setup.clone(), &pairs, old.bandwidth);
        new.source = old.source.clone();
        change(&mut new);
        known.take_over(&mut new);
        new.finish();
        new
    }

    fn without_speed(mut measured: Measured) -> Measured {
        measured.rows.iter_mut().for_each(|row| (row.pp, row.tg) = (Vec::new(), Vec::new()));
        measured
    }

    fn another_build(measured: &mut Measured) {
        measured.source.build = "another".into();
    }

    #[test]
    fn what_was_written_is_known() {
        let old = measured();
        let dir = cache::Scratch::new().unwrap();
        let file = dir.path().join("known.json");
        fs::write(&file, as_json(std::slice::from_ref(&old)).to_string()).unwrap();
        let known = Known::read(&file).unwrap();
        for (old, new) in old.rows.iter().zip(begun(&known, &|_| {}).rows) {
            assert_eq!((old.quality, old.size, old.bits), (new.quality, new.size, new.bits));
            assert!(new.quality.is_some() && new.tg.is_empty());
        }
        let nothing = |change| begun(&known, change).rows.iter().all(|row| row.quality.is_none());
        assert!(nothing(&|m| m.setup.chunks += 1));
        assert!(nothing(&|m| m.source.model = "another".into()));
        assert!(nothing(&|m| m.source.text = "another".into()));
        assert!(nothing(&another_build));
        assert!(nothing(&|m| m.rows = vec![Row::new(Pair::parse("srft3").unwrap())]));
        fs::write(&file, "{}").unwrap();
        assert!(Known::read(&file).is_err());
        fs::remove_file(&file).unwrap();
        assert!(Known::read(&file).unwrap().0.is_empty());
    }

    #[test]
    fn a_file_keeps_what_a_run_does_not_measure() {
        let known = known(&[measured()]);
        let rows = measured().rows.len();
        assert_eq!(known.joined(Value::Array(Vec::new())).as_array().unwrap().len(), rows);
        // Only speed: what is known of quality stays.
        let mut speed = begun(&known, &|m| m.setup.depth = 8192);
        speed.rows.iter_mut().for_each(|row| (row.pp, row.tg) = (vec![7.0], vec![5.0]));
        let joined = known.joined(as_json(&[speed]));
        assert_eq!(joined.as_array().unwrap().len(), rows);
        let json = &joined[1];
        assert_eq!((&json["kld"], &json["tg"], &json["depth"]), (&0.01234.into(), &5.0.into(), &8192.into()));
        // Only quality, at another depth: speed stays with the depth it was measured at. So do sizes, with nothing yet.
        for quality in [without_speed(measured()), begun(&Known::default(), &|_| {})] {
            let setup = Setup { depth: 8192, ..quality.setup.clone() };
            let joined = known.joined(as_json(&[Measured { setup, ..quality }]));
            assert_eq!(joined, Value::Array(known.0.clone()));
        }
    }

    #[test]
    fn another_build_replaces_what_it_measures_and_nothing_else() {
        let known = known(&[measured()]);
        let mut all = measured();
        another_build(&mut all);
        let rows = all.rows.len();
        let joined = known.joined(as_json(std::slice::from_ref(&all)));
        assert_eq!(joined, as_json(&[all]), "all of it");
        // Speed alone: no row has the numbers of two builds.
        let mut speed = begun(&known, &another_build);
        speed.rows.iter_mut().for_each(|row| (row.pp, row.tg) = (vec![7.0], vec![5.0]));
        let joined = known.joined(as_json(&[speed]));
        assert_eq!(joined.as_array().unwrap().len(), 2 * rows);
        let (new, old) = (&joined[1], &joined[rows + 1]);
        assert_eq!((&new["build"], &new["kld"], &new["tg"]), (&"another".into(), &Value::Null, &5.0.into()));
        assert_eq!((&old["build"], &old["kld"], &old["tg"]), (&SOURCE.2.into(), &0.01234.into(), &Value::Null));
        // The old build's quality is still known to it.
        let known = Known(joined.as_array().unwrap().clone());
        assert!(begun(&known, &|_| {}).rows.iter().all(|row| row.quality.is_some()));
    }

    #[test]
    fn models_of_one_name_are_told_apart() {
        let mut other = measured();
        other.source.model = "another".into();
        other.rows.iter_mut().for_each(|row| row.quality = Some(Statistics { ppl: 1.0, kld: 2.0, same_top: 3.0 }));
        let both = known(&[measured(), other]);
        let kld = |m: Measured| m.rows[1].quality.unwrap().kld;
        assert_eq!(kld(begun(&both, &|_| {})), 0.01234);
        assert_eq!(kld(begun(&both, &|m| m.source.model = "another".into())), 2.0);
        assert_eq!(both.joined(as_json(&[measured()])).as_array().unwrap().len(), 2 * measured().rows.len());
    }

    #[test]
    fn rows_that_do_not_say_what_they_are_from_are_replaced() {
        let mut known = known(&[without_speed(measured())]);
        for row in known.0.iter_mut().filter_map(Value::as_object_mut) {
            row.retain(|name, _| !["model_sha", "text_sha", "build", "kv_window_cells"].contains(&name.as_str()));
        }
        assert!(begun(&known, &|_| {}).rows.iter().all(|row| row.quality.is_none()));
        let new = as_json(&[measured()]);
        assert_eq!(known.joined(new.clone()), new);
        let elsewhere = begun(&known, &|m| m.setup.model = "/m/another.gguf".into());
        assert_eq!(known.joined(as_json(&[elsewhere])).as_array().unwrap().len(), 2 * measured().rows.len());
    }

    #[test]
    fn another_library_model_or_text_is_another_source() {
        let dir = cache::Scratch::new().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["m.gguf", "t.txt", "llama-perplexity", "libggml-cpu.so", "libllama.so", "libllama-server-impl.so"]
        {
            fs::write(at(name), name).unwrap();
        }
        let setup = Setup { bin: dir.path().into(), model: at("m.gguf"), text: at("t.txt"), ..measured().setup };
        let first = Source::of(&setup).unwrap();
        assert_eq!(Source::of(&setup).unwrap(), first);
        fs::write(at("libllama-server-impl.so"), "another").unwrap();
        fs::write(at("libllama.so.0"), "libllama.so").unwrap();
        assert_eq!(Source::of(&setup).unwrap(), first, "no part of it, and a copy of a part");
        for name in ["m.gguf", "t.txt", "llama-perplexity", "libggml-cpu.so", "libllama.so.0"] {
            fs::write(at(name), "another").unwrap();
            let Source { model, text, build } = Source::of(&setup).unwrap();
            let changed = [model != first.model, text != first.text, build != first.build];
            let expected = match name {
                "m.gguf" => [true, false, false],
                "t.txt" => [false, true, false],
                _ => [false, false, true],
            };
            assert_eq!(changed, expected, "{name}");
            fs::write(at(name), name.trim_end_matches(".0")).unwrap();
        }
        assert_eq!(Source::of(&setup).unwrap(), first);
    }
}
