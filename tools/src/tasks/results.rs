//! The file of results: every answer, so that a run can be interrupted and anybody can check what was counted as right.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

use super::document::Task;
use crate::pair::Pair;

/// What all answers of a file have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    pub model: String,
    pub model_sha: String,
    pub build: String,
    pub server_args: String,
    pub seed: u64,
    pub samples: usize,
    pub documents: usize,
}

/// Documents of one kind and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    pub task: Task,
    pub tokens: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    pub k: String,
    pub v: String,
    #[serde(flatten)]
    pub cell: Cell,
    /// Among the samples of the cell: the same question for every pair.
    pub number: usize,
    pub wanted: String,
    pub answer: String,
    pub right: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Results {
    #[serde(flatten)]
    pub setup: Setup,
    pub samples_asked: Vec<Sample>,
}

impl Results {
    pub fn new(setup: Setup) -> Results {
        Results { setup, samples_asked: Vec::new() }
    }

    /// `instead`: what to do where the file holds something else.
    fn read(path: &Path, instead: &str) -> Result<Results> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is not a result of cargo kv tasks --json{instead}", path.display()))
    }

    /// What an earlier run of the same setup has found. A file that is not there yet holds nothing.
    pub fn resume(path: &Path, setup: Setup) -> Result<Results> {
        if !path.exists() {
            return Ok(Results::new(setup));
        }
        let instead = ": name another file, or drop --resume";
        let known = Results::read(path, instead)?;
        ensure!(
            known.setup == setup,
            "{} is of another model, build or setting{instead}\nthere: {:?}\nhere: {setup:?}",
            path.display(),
            known.setup
        );
        Ok(known)
    }

    /// The answers of several files, which must be of the same setup.
    pub fn read_all(paths: &[PathBuf]) -> Result<Results> {
        let mut all: Option<Results> = None;
        for path in paths {
            let own = Results::read(path, "")?;
            let Some(known) = &mut all else {
                all = Some(own);
                continue;
            };
            ensure!(
                known.setup == own.setup,
                "{} is of another model, build or setting than {}:\n{:?}\n{:?}",
                path.display(),
                paths[0].display(),
                own.setup,
                known.setup
            );
            // f16 may be in each of them
            let new = |s: &Sample| {
                !known.samples_asked.iter().any(|k| (&k.k, &k.v, k.cell, k.number) == (&s.k, &s.v, s.cell, s.number))
            };
            let new: Vec<Sample> = own.samples_asked.into_iter().filter(new).collect();
            known.samples_asked.extend(new);
        }
        all.context("no file was given")
    }

    /// f16, and the others in the order in which they were asked.
    pub fn pairs(&self) -> Vec<Pair> {
        let mut all = vec![Pair::f16()];
        for sample in &self.samples_asked {
            let pair = Pair { k: sample.k.clone(), v: sample.v.clone() };
            if !all.contains(&pair) {
                all.push(pair);
            }
        }
        all
    }

    /// What was asked for, by length.
    pub fn cells(&self) -> Vec<Cell> {
        let mut all: Vec<Cell> = Vec::new();
        self.samples_asked.iter().for_each(|s| {
            if !all.contains(&s.cell) {
                all.push(s.cell);
            }
        });
        all.sort_by_key(|cell| cell.tokens);
        all
    }

    /// All at once, so that a file is never half written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let part = path.with_extension("json.part");
        let text = serde_json::to_string_pretty(self)? + "\n";
        let written = fs::write(&part, text).and_then(|()| fs::rename(&part, path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// The samples of a pair, by their numbers; None where one was not asked yet.
    pub fn of(&self, pair: &Pair, cell: Cell) -> Vec<Option<&Sample>> {
        let mut all = vec![None; self.setup.samples];
        for sample in self.samples_asked.iter().filter(|s| (&s.k, &s.v) == (&pair.k, &pair.v) && s.cell == cell) {
            if let Some(place) = all.get_mut(sample.number) {
                *place = Some(sample);
            }
        }
        all
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::cache;

    pub const LINES: Cell = Cell { task: Task::Lines, tokens: 4096 };

    pub fn results(samples: usize, rights: &[(&str, Cell, &[bool])]) -> Results {
        let setup = Setup {
            model: "m.gguf".into(),
            model_sha: "a".into(),
            build: "b".into(),
            server_args: "-ngl 99".into(),
            seed: 1,
            samples,
            documents: 2,
        };
        let mut results = Results::new(setup);
        for (name, cell, rights) in rights {
            let Pair { k, v } = Pair::parse(name).unwrap();
            for (number, &right) in rights.iter().enumerate() {
                let (k, v, answer) = (k.clone(), v.clone(), "12346".to_string());
                results.samples_asked.push(Sample { k, v, cell: *cell, number, wanted: "12345".into(), answer, right });
            }
        }
        results
    }

    #[test]
    fn an_interrupted_run_goes_on() {
        let known = results(4, &[("f16", LINES, &[true, true, false]), ("srft4", LINES, &[true])]);
        let dir = cache::Scratch::new().unwrap();
        let file = dir.path().join("tasks.json");
        assert!(Results::resume(&file, known.setup.clone()).unwrap().samples_asked.is_empty());
        known.write(&file).unwrap();
        assert_eq!(Results::resume(&file, known.setup.clone()).unwrap(), known);
        let rights = |name: &str, cell| {
            let all = known.of(&Pair::parse(name).unwrap(), cell);
            all.iter().map(|s| s.map(|s| s.right)).collect::<Vec<_>>()
        };
        assert_eq!(rights("f16", LINES), [Some(true), Some(true), Some(false), None]);
        assert_eq!(rights("srft4", LINES), [Some(true), None, None, None]);
        assert_eq!(rights("srft4", Cell { tokens: 8192, ..LINES }), [None; 4]);
        assert_eq!(rights("srft4/f16", LINES), [None; 4]);
    }

    #[test]
    fn answers_of_several_files() {
        let dir = cache::Scratch::new().unwrap();
        let longer = Cell { tokens: 8192, ..LINES };
        let files = [dir.path().join("a.json"), dir.path().join("b.json")];
        results(2, &[("f16", LINES, &[true, true]), ("srft4", longer, &[true])]).write(&files[0]).unwrap();
        results(2, &[("f16", LINES, &[true, true]), ("q4_0", LINES, &[false])]).write(&files[1]).unwrap();
        let all = Results::read_all(&files).unwrap();
        assert_eq!(all.samples_asked.len(), 4, "f16's are the same");
        assert_eq!(all.pairs().iter().map(Pair::name).collect::<Vec<_>>(), ["f16", "srft4", "q4_0"]);
        assert_eq!(all.cells(), [LINES, longer]);
        results(3, &[]).write(&files[1]).unwrap();
        let error = format!("{:#}", Results::read_all(&files).unwrap_err());
        assert!(error.contains("b.json is of another model"), "{error}");
    }

    #[test]
    fn what_another_run_left_is_refused() {
        let known = results(4, &[]);
        let dir = cache::Scratch::new().unwrap();
        let file = dir.path().join("tasks.json");
        known.write(&file).unwrap();
        for other in [
            Setup { seed: 2, ..known.setup.clone() },
            Setup { build: "c".into(), ..known.setup.clone() },
            Setup { samples: 8, ..known.setup.clone() },
        ] {
            let error = format!("{:#}", Results::resume(&file, other).unwrap_err());
            assert!(error.contains("another model, build or setting"), "{error}");
        }
        fs::write(&file, "[]").unwrap();
        assert!(Results::resume(&file, known.setup).is_err());
    }
}
