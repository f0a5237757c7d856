//! What an earlier run has found, so that a long comparison can be interrupted and goes on where it was.
//!
//! Quality is taken over where it comes from the same build: it is the same whenever it is measured. Speeds mean something
//! only beside others of the same run, so that they are kept in the file and shown nowhere else.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{report, CacheSize, Measured, Setup, Statistics};
use crate::digest;

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
            model: digest::file(&setup.model)?,
            text: digest::file(&setup.text)?,
            build: digest::programs(&setup.bin, "perplexity")?,
        })
    }
}

/// A row of a file of results. What was not measured is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    pub k: String,
    pub v: String,
    /// f16 beside itself.
    pub small_batch: bool,
    pub bits_per_value: Option<f64>,
    pub kv_mib: Option<f64>,
    pub kv_window_mib: Option<f64>,
    pub kv_window_cells: Option<u32>,
    pub ppl: Option<f64>,
    pub kld: Option<f64>,
    pub kld_median: Option<f64>,
    pub kld_999: Option<f64>,
    pub same_top: Option<f64>,
    pub pp: Option<f64>,
    pub tg: Option<f64>,
    pub tg_limit: Option<f64>,
    pub depth: u32,
    pub ctx: u32,
    pub chunks: u32,
    pub text: String,
    pub model: String,
    pub model_sha: Option<String>,
    pub text_sha: Option<String>,
    pub build: Option<String>,
}

impl Record {
    fn has_quality(&self) -> bool {
        self.ppl.or(self.kld).or(self.same_top).is_some()
    }

    fn has_speed(&self) -> bool {
        self.pp.or(self.tg).or(self.tg_limit).is_some()
    }

    fn has_size(&self) -> bool {
        self.bits_per_value.or(self.kv_mib).is_some()
    }

    /// Are they of the same model, text, lengths and pair? A row that does not say what it was made from goes by names.
    fn is_of(&self, new: &Record) -> bool {
        let source = match self.model_sha {
            Some(_) => self.model_sha == new.model_sha && self.text_sha == new.text_sha,
            None => self.model == new.model && self.text == new.text,
        };
        let row = |r: &Record| (r.ctx, r.chunks, r.k.clone(), r.v.clone(), r.small_batch);
        source && row(self) == row(new)
    }

    fn is_of_build(&self, new: &Record) -> bool {
        self.build.is_some() && self.build == new.build
    }

    fn quality(&self) -> Option<(Statistics, Option<CacheSize>)> {
        let statistics = Statistics {
            ppl: self.ppl?,
            kld: self.kld?,
            kld_median: self.kld_median?,
            kld_999: self.kld_999?,
            same_top: self.same_top?,
        };
        let size = || {
            Some(CacheSize {
                mib: self.kv_mib?,
                cells: self.ctx,
                window_mib: self.kv_window_mib?,
                window_cells: self.kv_window_cells?,
            })
        };
        Some((statistics, size()))
    }
}

/// The rows of a file of results.
#[derive(Default)]
pub struct Known(Vec<Record>);

impl Known {
    /// A file that is not there yet holds nothing.
    pub fn read(path: &Path) -> Result<Known> {
        if !path.exists() {
            return Ok(Known::default());
        }
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).map(Known).with_context(|| {
            format!(
                "{} is not a result of cargo kv compare --json: name another file, or drop --resume",
                path.display()
            )
        })
    }

    /// Fills in the pairs whose quality is known; says so of those that another build has left.
    pub fn take_over(&self, measured: &mut Measured) {
        let mut stale = 0;
        let new = report::as_records(std::slice::from_ref(measured));
        for (row, new) in measured.rows.iter_mut().zip(&new) {
            let old: Vec<&Record> = self.0.iter().filter(|old| old.is_of(new) && old.has_quality()).collect();
            match old.iter().find(|old| old.is_of_build(new)) {
                Some(current) => {
                    if let Some((statistics, size)) = current.quality() {
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
    pub fn joined(&self, mut rows: Vec<Record>) -> Vec<Record> {
        let mut kept = self.0.clone();
        for old in &mut kept {
            for new in &mut rows {
                if old.is_of(new) {
                    settle(old, new);
                }
            }
        }
        rows.extend(kept.into_iter().filter(|old| old.has_quality() || old.has_speed()));
        rows
    }
}

/// What the new row has replaces what the old one had; what it lacks moves there from the same build.
fn settle(old: &mut Record, new: &mut Record) {
    let current = old.is_of_build(new);
    if current && !new.has_size() {
        (new.bits_per_value, new.kv_mib) = (old.bits_per_value, old.kv_mib);
        (new.kv_window_mib, new.kv_window_cells) = (old.kv_window_mib, old.kv_window_cells);
    }
    if current && !new.has_speed() && old.has_speed() {
        new.depth = old.depth;
        (new.pp, new.tg, new.tg_limit) = (old.pp, old.tg, old.tg_limit);
    }
    if current && !new.has_quality() {
        (new.ppl, new.kld, new.same_top) = (old.ppl, old.kld, old.same_top);
        (new.kld_median, new.kld_999) = (old.kld_median, old.kld_999);
    }
    if new.has_quality() {
        (old.ppl, old.kld, old.same_top) = (None, None, None);
        (old.kld_median, old.kld_999) = (None, None);
    }
    if new.has_speed() {
        (old.pp, old.tg, old.tg_limit) = (None, None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{measured, SOURCE};
    use super::super::report::{as_records, Row};
    use super::*;
    use crate::cache;
    use crate::pair::Pair;

    fn known(rows: &[Measured]) -> Known {
        Known(as_records(rows))
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
        fs::write(&file, serde_json::to_string(&as_records(std::slice::from_ref(&old))).unwrap()).unwrap();
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
        assert_eq!(known.joined(Vec::new()).len(), rows);
        // Only speed: what is known of quality stays.
        let mut speed = begun(&known, &|m| m.setup.depth = 8192);
        speed.rows.iter_mut().for_each(|row| (row.pp, row.tg) = (vec![7.0], vec![5.0]));
        let joined = known.joined(as_records(&[speed]));
        assert_eq!(joined.len(), rows);
        let row = &joined[1];
        assert_eq!((row.kld, row.tg, row.depth), (Some(0.01234), Some(5.0), 8192));
        // Only quality, at another depth: speed stays with the depth it was measured at. So do sizes, with nothing yet.
        for quality in [without_speed(measured()), begun(&Known::default(), &|_| {})] {
            let setup = Setup { depth: 8192, ..quality.setup.clone() };
            let joined = known.joined(as_records(&[Measured { setup, ..quality }]));
            assert_eq!(joined, known.0);
        }
    }

    #[test]
    fn another_build_replaces_what_it_measures_and_nothing_else() {
        let known = known(&[measured()]);
        let mut all = measured();
        another_build(&mut all);
        let rows = all.rows.len();
        let joined = known.joined(as_records(std::slice::from_ref(&all)));
        assert_eq!(joined, as_records(&[all]), "all of it");
        // Speed alone: no row has the numbers of two builds.
        let mut speed = begun(&known, &another_build);
        speed.rows.iter_mut().for_each(|row| (row.pp, row.tg) = (vec![7.0], vec![5.0]));
        let joined = known.joined(as_records(&[speed]));
        assert_eq!(joined.len(), 2 * rows);
        let (new, old) = (&joined[1], &joined[rows + 1]);
        assert_eq!((new.build.as_deref(), new.kld, new.tg), (Some("another"), None, Some(5.0)));
        assert_eq!((old.build.as_deref(), old.kld, old.tg), (Some(SOURCE.2), Some(0.01234), None));
        // The old build's quality is still known to it.
        let known = Known(joined);
        assert!(begun(&known, &|_| {}).rows.iter().all(|row| row.quality.is_some()));
    }

    #[test]
    fn models_of_one_name_are_told_apart() {
        let mut other = measured();
        other.source.model = "another".into();
        other.rows.iter_mut().for_each(|row| row.quality = Some(Statistics { kld: 2.0, ..row.quality.unwrap() }));
        let both = known(&[measured(), other]);
        let kld = |m: Measured| m.rows[1].quality.unwrap().kld;
        assert_eq!(kld(begun(&both, &|_| {})), 0.01234);
        assert_eq!(kld(begun(&both, &|m| m.source.model = "another".into())), 2.0);
        assert_eq!(both.joined(as_records(&[measured()])).len(), 2 * measured().rows.len());
    }

    #[test]
    fn rows_that_do_not_say_what_they_are_from_are_replaced() {
        let mut known = known(&[without_speed(measured())]);
        for row in &mut known.0 {
            (row.model_sha, row.text_sha, row.build, row.kv_window_cells) = (None, None, None, None);
        }
        assert!(begun(&known, &|_| {}).rows.iter().all(|row| row.quality.is_none()));
        let new = as_records(&[measured()]);
        assert_eq!(known.joined(new.clone()), new);
        let elsewhere = begun(&known, &|m| m.setup.model = "/m/another.gguf".into());
        assert_eq!(known.joined(as_records(&[elsewhere])).len(), 2 * measured().rows.len());
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
