//! What is measured, in which order, and what is left out and why. Parent and child make the same plan from the same
//! arguments, so that a measurement is known by its numbers.

use std::time::Duration;

use anyhow::{bail, Result};

use super::shape::{Shape, SHAPES, SMOLLM2};
use super::Options;
use crate::pair::Pair;
use crate::{cpu, types};

/// Upstream's, measured beside ours whatever is asked for.
const UPSTREAM: [&str; 3] = ["f16", "q8_0", "q4_0"];
/// All caches of a case are in memory at once, so that their measurements can take turns.
const MEMORY: usize = 4 << 30;
/// Tokens of a batch of a prompt.
const BATCH: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Attention {
        cells: usize,
        queries: usize,
    },
    /// SET_ROWS of `tokens` tokens, `operations` times.
    Encode {
        tokens: usize,
        operations: usize,
    },
}

/// Pairs that take turns at one problem; f16 is the first.
#[derive(Clone, Debug)]
pub struct Case {
    pub kind: Kind,
    pub shape: Shape,
    pub threads: usize,
    pub pairs: Vec<Pair>,
}

/// How long one measurement takes, and how often it is taken.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    pub rounds: usize,
    pub warm_up: Duration,
    pub measurement: Duration,
    /// A measurement that took longer averages over so much of the machine's moods that once is enough.
    pub enough: Duration,
}

#[derive(Debug)]
pub struct LeftOut {
    pub shape: Shape,
    pub what: String,
    pub why: String,
}

impl LeftOut {
    pub fn text(&self) -> String {
        format!("left out: {}, {}: {}", self.shape.name(), self.what, self.why)
    }
}

pub struct Plan {
    pub cases: Vec<Case>,
    pub left_out: Vec<LeftOut>,
    pub threads: Vec<usize>,
    pub effort: Effort,
}

impl Plan {
    pub fn new(options: &Options) -> Result<Plan> {
        let effort = if options.quick { effort(1, 10, 50) } else { effort(3, 20, 100) };
        let threads = match options.threads.as_slice() {
            [] => vec![cpu::cores() as usize],
            some => some.to_vec(),
        };
        let cells = match (options.cells.as_slice(), options.quick) {
            ([], false) => vec![1024, 8192, 32768, 131072],
            ([], true) => vec![1024, 8192, 32768],
            (some, _) => some.to_vec(),
        };
        if [&threads, &cells, &options.queries].iter().any(|list| list.contains(&0)) {
            bail!("cells, threads and queries are counted from 1");
        }
        let (pairs, shapes) = (pairs(options)?, shapes(options)?);
        if let Some(shape) = shapes.iter().find(|s| s.view.is_some()) {
            bail!("{}: V as a view of K is measured with --tokens alone", shape.name());
        }
        let mut plan = Plan { cases: Vec::new(), left_out: Vec::new(), threads, effort };
        for shape in shapes {
            let pairs = plan.served(shape, &pairs);
            for t in plan.threads.clone() {
                if !options.encode {
                    for &queries in &options.queries {
                        cells.iter().for_each(|&cells| plan.attention(shape, cells, queries, t, &pairs));
                    }
                }
                plan.encode(shape, t, &pairs);
            }
        }
        Ok(plan)
    }

    fn served(&mut self, shape: Shape, pairs: &[Pair]) -> Vec<Pair> {
        let (good, bad): (Vec<_>, Vec<_>) = pairs.iter().cloned().partition(|p| shape.cell_bytes(p).is_some());
        for pair in bad {
            let why = format!("does not serve heads of {}", shape.head_size);
            self.left_out.push(LeftOut { shape, what: pair.name(), why });
        }
        good
    }

    fn attention(&mut self, shape: Shape, cells: usize, queries: usize, threads: usize, pairs: &[Pair]) {
        let mask = 2 * cells * queries;
        let bytes: usize = pairs.iter().filter_map(|p| shape.cell_bytes(p)).map(|cell| cells * cell + mask).sum();
        if bytes > MEMORY {
            let why = format!("its caches would need {:.1} GB, the limit is {:.1}", giga(bytes), giga(MEMORY));
            self.left_out.push(LeftOut { shape, what: format!("{cells} cells"), why });
            return;
        }
        self.cases.push(Case { kind: Kind::Attention { cells, queries }, shape, threads, pairs: pairs.to_vec() });
    }

    fn encode(&mut self, shape: Shape, threads: usize, pairs: &[Pair]) {
        let mut single: Vec<Pair> = Vec::new();
        for name in pairs.iter().flat_map(|p| [&p.k, &p.v]) {
            if !single.iter().any(|p| p.k == *name) {
                single.push(Pair { k: name.clone(), v: name.clone() });
            }
        }
        let mut case = |tokens, operations| {
            let kind = Kind::Encode { tokens, operations };
            self.cases.push(Case { kind, shape, threads, pairs: single.clone() });
        };
        case(BATCH, 2);
        // A token while decoding: every layer's K and V, one row of each at a time.
        if shape == SMOLLM2.0 {
            case(1, 2 * SMOLLM2.1);
        }
    }

    /// Measurements, where none is cut short.
    pub fn steps(&self) -> usize {
        self.cases.iter().map(|c| c.pairs.len() * self.effort.rounds).sum()
    }
}

fn effort(rounds: usize, warm_up: u64, measurement: u64) -> Effort {
    let ms = Duration::from_millis;
    Effort { rounds, warm_up: ms(warm_up), measurement: ms(measurement), enough: ms(1000) }
}

fn giga(bytes: usize) -> f64 {
    bytes as f64 / 1e9
}

fn pairs(options: &Options) -> Result<Vec<Pair>> {
    let mut names: Vec<String> = UPSTREAM.map(String::from).to_vec();
    match (options.types.as_slice(), options.quick) {
        ([], true) => names.extend(["srft4", "delta4/srft4"].map(String::from)),
        ([], false) => {
            names.extend(types::families().iter().filter(|f| f.k && f.v).map(|f| f.name.to_string()));
            names.push("delta4/srft4".into());
        }
        (some, _) => names.extend_from_slice(some),
    }
    let mut pairs: Vec<Pair> = Vec::new();
    for name in names {
        let pair = Pair::parse(&name)?;
        if let Some(spec) = [&pair.k, &pair.v].into_iter().find(|t| t.contains('=')) {
            bail!("{spec} differs by layer, and here attention is timed without a model: give one type a side");
        }
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    Ok(pairs)
}

pub(super) fn shapes(options: &Options) -> Result<Vec<Shape>> {
    if options.shapes.is_empty() {
        return Ok(if options.quick { vec![SHAPES[0], SHAPES[2]] } else { SHAPES.to_vec() });
    }
    let mut shapes = Vec::new();
    for text in &options.shapes {
        for shape in Shape::parse(text)? {
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
    }
    Ok(shapes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    pub fn plan(words: &str) -> Plan {
        Plan::new(&Line::parse_from(std::iter::once("bench").chain(words.split_whitespace())).options).unwrap()
    }

    #[test]
    fn upstream_is_always_there_and_f16_first() {
        let plan = plan("--shapes d64 --cells 1024 --types srft4,f16/srft3,f16 --threads 1");
        let names: Vec<_> = plan.cases[0].pairs.iter().map(Pair::name).collect();
        assert_eq!(names, ["f16", "q8_0", "q4_0", "srft4", "f16/srft3"]);
    }

    #[test]
    fn the_default_covers_the_shapes() {
        let plan = plan("--threads 2");
        let attention = plan.cases.iter().filter(|c| matches!(c.kind, Kind::Attention { .. })).count();
        assert_eq!(attention, SHAPES.len() * 4);
        assert!(plan.left_out.is_empty());
        assert!(plan.cases.iter().all(|c| c.pairs.len() >= 7));
    }

    #[test]
    fn too_much_memory_is_left_out_and_said() {
        let plan = plan("--shapes d128:32/8 --cells 1024,1048576 --threads 1");
        let cells: Vec<_> = plan.left_out.iter().map(|l| l.what.as_str()).collect();
        assert_eq!(cells, ["1048576 cells"]);
        assert!(plan.left_out[0].text().contains("GB"));
    }

    #[test]
    fn types_that_do_not_serve_the_size() {
        let plan = plan("--shapes d100:2/2 --cells 64 --threads 1 --types srft4");
        assert_eq!(plan.cases[0].pairs.iter().map(Pair::name).collect::<Vec<_>>(), ["f16"]);
        assert_eq!(plan.left_out.len(), 3);
    }

    #[test]
    fn encode_writes_each_type_once() {
        let plan = plan("--encode --shapes d64 --types q8_0/srft4 --threads 1");
        assert_eq!(plan.cases.len(), 2);
        assert_eq!(plan.cases[0].pairs.len(), 4);
        assert_eq!(plan.cases[1].kind, Kind::Encode { tokens: 1, operations: 60 });
    }
}
