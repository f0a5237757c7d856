//! The two ends of the pipe between `cargo kv bench` and the child that measures for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{bail, Context, Result};
use serde::{Deserialize, Serialize};

use super::library::{Library, Problem};
use super::measure::{times, Times};
use super::plan::{Case, Kind, Plan};
use crate::pair::Pair;
use crate::process;
use crate::progress::Bar;

/// Marks the child's lines among those of ggml.
const MARK: &str = "@kv ";

/// What was measured of one pair of one case.
#[derive(Clone, Debug)]
pub struct Row {
    pub case: usize,
    pub pair: usize,
    pub isa: String,
    pub bytes: f64,
    /// One a round.
    pub rounds: Vec<Times>,
}

/// What the child tells, one a line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Message {
    /// The kernels that it uses.
    Isa(String),
    /// A measurement that was not needed.
    LeftOut,
    Measured {
        case: usize,
        pair: usize,
        best: f64,
        median: f64,
        bytes: u64,
    },
}

fn say(message: &Message) -> Result<()> {
    println!("{MARK}{}", serde_json::to_string(message)?);
    // A pipe is not flushed by the line.
    std::io::stdout().flush().map_err(Into::into)
}

/// The child: measures the plan and prints as it goes.
pub fn serve(plan: &Plan, library: &Path) -> Result<()> {
    let library = Library::load(library)?;
    say(&Message::Isa(library.isa()?))?;
    for (number, case) in plan.cases.iter().enumerate() {
        let problems: Vec<Problem> = case.pairs.iter().map(|p| problem(&library, case, p)).collect::<Result<_>>()?;
        let mut enough = vec![false; problems.len()];
        for _ in 0..plan.effort.rounds {
            for (i, problem) in problems.iter().enumerate() {
                if enough[i] {
                    say(&Message::LeftOut)?;
                    continue;
                }
                let start = Instant::now();
                let Times { best, median } = times(plan.effort, || problem.run())?;
                enough[i] = start.elapsed() > plan.effort.enough;
                say(&Message::Measured { case: number, pair: i, best, median, bytes: problem.bytes() })?;
            }
        }
    }
    Ok(())
}

fn problem<'a>(library: &'a Library, case: &Case, pair: &Pair) -> Result<Problem<'a>> {
    match case.kind {
        Kind::Attention { cells, queries } => library.attention(pair, case.shape, cells, queries, case.threads),
        Kind::Encode { tokens, operations } => library.encode(&pair.k, case.shape, tokens, operations, case.threads),
    }
}

/// The parent: runs the child with the kernels of `isa` (the best where None), or with those of the GPU.
pub fn collect(plan: &Plan, library: &Path, isa: Option<&str>, gpu: bool) -> Result<Vec<Row>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--worker").arg(library);
    match isa {
        Some(isa) => command.env("GGML_EXT_ISA", isa),
        None => &mut command,
    };
    if gpu {
        command.env("KV_BENCH_DEVICE", "gpu");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {}", process::shown(&command)))?;
    let errors = child.stderr.take().map(|mut pipe| {
        thread::spawn(move || {
            let mut all = Vec::new();
            let _ = pipe.read_to_end(&mut all);
            String::from_utf8_lossy(&all).into_owned()
        })
    });
    let total = plan.steps() as u64;
    let bar = Bar::new(total, "measuring");
    let (mut rows, mut running, mut done) = (Vec::new(), String::new(), 0);
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(|out| out.split(b'\n')) {
        let line = line?;
        let Some(message) = parse(&String::from_utf8_lossy(&line)) else { continue };
        if let Message::Isa(found) = message {
            if isa.is_some_and(|wanted| wanted != found) {
                child.kill()?;
                child.wait()?;
                bail!("{} is not available here, the kernels are {found}", isa.unwrap_or_default());
            }
            running = found;
            continue;
        }
        done += 1;
        take(&mut rows, &message, &running);
        bar.set(done, total, &describe(plan, &message));
    }
    let status = child.wait()?;
    drop(bar);
    if !status.success() {
        let text = errors.and_then(|t| t.join().ok()).unwrap_or_default();
        bail!("measuring failed ({status})\n{}", process::tail(&text, 20));
    }
    Ok(rows)
}

fn parse(line: &str) -> Option<Message> {
    serde_json::from_str(line.strip_prefix(MARK)?).ok()
}

/// Adds one measurement to its row.
fn take(rows: &mut Vec<Row>, message: &Message, isa: &str) {
    let Message::Measured { case, pair, best, median, bytes } = *message else { return };
    let times = Times { best, median };
    match rows.iter_mut().find(|r| r.case == case && r.pair == pair) {
        Some(row) => row.rounds.push(times),
        None => rows.push(Row { case, pair, isa: isa.into(), bytes: bytes as f64, rounds: vec![times] }),
    }
}

fn describe(plan: &Plan, message: &Message) -> String {
    let Message::Measured { case, pair, .. } = *message else { return String::new() };
    let Some(case) = plan.cases.get(case) else { return String::new() };
    let name = case.pairs.get(pair).map(Pair::name).unwrap_or_default();
    match case.kind {
        Kind::Attention { cells, .. } => format!("{}, {cells} cells, {name}", case.shape.name()),
        Kind::Encode { .. } => format!("{}, encode, {name}", case.shape.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_others_are_passed_over() {
        assert_eq!(parse("@kv {\"Isa\":\"avx2\"}"), Some(Message::Isa("avx2".into())));
        assert!(parse("ggml_backend_load: none").is_none());
        assert!(parse("@kv not json").is_none());
    }

    #[test]
    fn rounds_gather_in_their_row() {
        let mut rows = Vec::new();
        for (pair, best) in [(0, 10.0), (1, 20.0), (0, 11.0)] {
            take(&mut rows, &Message::Measured { case: 3, pair, best, median: best, bytes: 64 }, "avx2");
        }
        take(&mut rows, &Message::LeftOut, "avx2");
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].rounds.iter().map(|t| t.best).collect::<Vec<_>>(), [10.0, 11.0]);
        assert_eq!(rows[0].bytes, 64.0);
    }
}
