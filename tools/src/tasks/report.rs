//! How many answers are right, beside f16's, with the interval that so few samples allow.

use super::results::{Cell, Results};
use crate::pair::Pair;
use crate::plot::curves::Curve;
use crate::table::{self, Table};

/// Right answers among those that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Score {
    pub right: usize,
    pub asked: usize,
}

impl Score {
    fn of(results: &Results, pair: &Pair, cells: &[Cell]) -> Score {
        let samples = cells.iter().flat_map(|cell| results.of(pair, *cell)).flatten();
        samples.fold(Score::default(), |score, s| Score {
            right: score.right + usize::from(s.right),
            asked: score.asked + 1,
        })
    }

    fn percent(self) -> String {
        table::percent(self.right, self.asked)
    }

    /// Wilson's interval of 95% for the share of right answers.
    fn interval(self) -> (f64, f64) {
        const Z: f64 = 1.959_964;
        let (x, n) = (self.right as f64, self.asked as f64);
        if self.asked == 0 {
            return (0.0, 1.0);
        }
        let middle = (x + Z * Z / 2.0) / (n + Z * Z);
        let half = Z / (n + Z * Z) * (x * (n - x) / n + Z * Z / 4.0).sqrt();
        ((middle - half).max(0.0), (middle + half).min(1.0))
    }

    fn shown_interval(self) -> String {
        let (low, high) = self.interval();
        format!("{:.0}-{:.0}", 100.0 * low, 100.0 * high)
    }
}

/// What f16 has answered of a cell, and whether that is enough to compare others with it.
pub struct Ability {
    pub score: Score,
    pub enough: bool,
}

pub fn ability(results: &Results, cell: Cell, least: u32) -> Ability {
    let f16 = Pair::f16();
    let score = Score::of(results, &f16, &[cell]);
    Ability { score, enough: score.asked > 0 && 100 * score.right >= least as usize * score.asked }
}

/// Samples that f16 has right and this pair wrong, and the other way round.
fn changes(results: &Results, f16: &Pair, pair: &Pair, cells: &[Cell]) -> (usize, usize) {
    let both = cells.iter().flat_map(|cell| results.of(f16, *cell).into_iter().zip(results.of(pair, *cell)));
    both.filter_map(|(f16, own)| Some((f16?.right, own?.right)))
        .fold((0, 0), |(lost, gained), (f16, own)| (lost + usize::from(f16 && !own), gained + usize::from(!f16 && own)))
}

/// A curve for each pair: right answers in percent by length, to the tasks that f16 can do at it.
pub fn by_length(results: &Results, pairs: &[Pair], cells: &[Cell], least: u32) -> Vec<Curve> {
    let mut lengths: Vec<usize> = cells.iter().map(|cell| cell.tokens).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let point = |pair: &Pair, tokens: usize| {
        let able: Vec<Cell> =
            cells.iter().copied().filter(|c| c.tokens == tokens && ability(results, *c, least).enough).collect();
        let score = Score::of(results, pair, &able);
        (score.asked > 0).then(|| (tokens as f64, 100.0 * score.right as f64 / score.asked as f64))
    };
    let curve =
        |pair: &Pair| Curve { name: pair.name(), points: lengths.iter().filter_map(|n| point(pair, *n)).collect() };
    pairs.iter().map(curve).collect()
}

const HEADER: [&str; 10] = ["task", "tokens", "K/V", "right", "%", "95%", "f16 %", "f16 95%", "lost", "gained"];

/// Rows of the table: each task at each length, then all that f16 can do together.
fn rows(results: &Results, pairs: &[Pair], cells: &[Cell], least: u32) -> Vec<Vec<String>> {
    let (able, unable): (Vec<Cell>, Vec<Cell>) = cells.iter().partition(|cell| ability(results, **cell, least).enough);
    let row = |name: String, tokens: String, cells: &[Cell], pair: &Pair| {
        let (own, f16) = (Score::of(results, pair, cells), Score::of(results, &pairs[0], cells));
        let (lost, gained) = changes(results, &pairs[0], pair, cells);
        let is_f16 = *pair == pairs[0];
        let beside = |text: String| if is_f16 { "-".to_string() } else { text };
        (own.asked > 0).then(|| {
            vec![
                name,
                tokens,
                pair.name(),
                format!("{}/{}", own.right, own.asked),
                own.percent(),
                own.shown_interval(),
                beside(f16.percent()),
                beside(f16.shown_interval()),
                beside(lost.to_string()),
                beside(gained.to_string()),
            ]
        })
    };
    let mut all: Vec<Vec<String>> = Vec::new();
    for cell in cells.iter().filter(|cell| !unable.contains(cell)) {
        let of_cell = |pair| row(cell.task.name(), cell.tokens.to_string(), &[*cell], pair);
        all.extend(pairs.iter().filter_map(of_cell));
    }
    if able.len() > 1 {
        all.extend(pairs.iter().filter_map(|pair| row("all".into(), "-".into(), &able, pair)));
    }
    all
}

/// What was run, and what was left out and why.
fn notes(results: &Results, cells: &[Cell], least: u32) -> Vec<String> {
    let setup = &results.setup;
    let mut notes = vec![
        format!(
            "model {}, temperature 0, seed {}; per task and length {} samples, documents: {}",
            setup.model, setup.seed, setup.samples, setup.documents
        ),
        "95%: Wilson's interval; lost: right with f16 and wrong with this pair; gained: the other way round".into(),
    ];
    if !setup.server_args.is_empty() {
        notes.push(format!("llama-server {}", setup.server_args));
    }
    for cell in cells {
        let Ability { score, enough } = ability(results, *cell, least);
        if score.asked > 0 && !enough {
            notes.push(format!(
                "left out: {} with {} tokens, where f16 itself has {} of {} right, less than {least}%",
                cell.task.name(),
                cell.tokens,
                score.right,
                score.asked
            ));
        }
    }
    notes
}

fn in_table(results: &Results, pairs: &[Pair], cells: &[Cell], least: u32) -> Table {
    let mut table = Table::new(&HEADER, 3);
    rows(results, pairs, cells, least).into_iter().for_each(|row| table.row(row));
    table
}

pub fn as_text(results: &Results, pairs: &[Pair], cells: &[Cell], least: u32) -> String {
    format!("{}\n{}\n", in_table(results, pairs, cells, least), notes(results, cells, least).join("\n"))
}

pub fn as_markdown(results: &Results, pairs: &[Pair], cells: &[Cell], least: u32) -> String {
    let notes: String = notes(results, cells, least).iter().map(|note| format!("- {note}\n")).collect();
    format!("### {}\n\n{}\n{notes}", results.setup.model, in_table(results, pairs, cells, least).markdown())
}

#[cfg(test)]
mod tests {
    use super::super::document::Task;
    use super::super::results::tests::{results, LINES};
    use super::*;

    const PAIRS_TASK: Cell = Cell { task: Task::Pairs, tokens: 4096 };
    const COPY: Cell = Cell { task: Task::Copy, tokens: 4096 };

    fn pairs() -> [Pair; 2] {
        ["f16", "srft4"].map(|name| Pair::parse(name).unwrap())
    }

    #[test]
    fn intervals_are_wilsons() {
        // By R: binom::binom.confint(x, n, methods = "wilson").
        for (right, asked, low, high) in
            [(0, 20, 0.0, 0.1611), (10, 20, 0.2993, 0.7007), (20, 20, 0.8389, 1.0), (19, 20, 0.7639, 0.9911)]
        {
            let (l, h) = Score { right, asked }.interval();
            assert!((l - low).abs() < 1e-4 && (h - high).abs() < 1e-4, "{right}/{asked}: {l} {h}");
        }
        assert_eq!(Score::default().interval(), (0.0, 1.0));
    }

    #[test]
    fn rows_stand_beside_f16() {
        let all = results(
            4,
            &[
                ("f16", LINES, &[true, true, true, false]),
                ("srft4", LINES, &[true, false, false, true]),
                ("f16", COPY, &[true, true, true, true]),
                ("srft4", COPY, &[true, true, true, true]),
            ],
        );
        let rows = rows(&all, &pairs(), &[LINES, COPY], 50);
        assert_eq!(rows[0], ["lines", "4096", "f16", "3/4", "75", "30-95", "-", "-", "-", "-"]);
        assert_eq!(rows[1], ["lines", "4096", "srft4", "2/4", "50", "15-85", "75", "30-95", "2", "1"]);
        assert_eq!(rows[3][6..], ["100", "51-100", "0", "0"]);
        assert_eq!(rows[5][..4], ["all", "-", "srft4", "6/8"]);
        assert_eq!(rows.len(), 6);
        let curves = by_length(&all, &pairs(), &[LINES, COPY], 50);
        assert_eq!((curves[0].points[0], curves[1].points[0]), ((4096.0, 87.5), (4096.0, 75.0)));
    }

    #[test]
    fn what_f16_cannot_do_is_left_out_by_name() {
        let all = results(
            4,
            &[
                ("f16", LINES, &[true, true, false, false]),
                ("srft4", LINES, &[true, true, true, true]),
                ("f16", PAIRS_TASK, &[true, false, false, false]),
            ],
        );
        assert!(ability(&all, LINES, 50).enough && !ability(&all, PAIRS_TASK, 50).enough);
        assert!(ability(&all, PAIRS_TASK, 25).enough);
        assert!(!ability(&all, COPY, 0).enough, "nothing was asked");
        let text = as_text(&all, &pairs(), &[LINES, PAIRS_TASK], 50);
        assert!(text.contains("left out: pairs with 4096 tokens, where f16 itself has 1 of 4 right"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("pairs")).count(), 0, "{text}");
        let markdown = as_markdown(&all, &pairs(), &[LINES, PAIRS_TASK], 50);
        let rows: Vec<&str> = markdown.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(rows.len(), 2 + 2, "{markdown}");
        assert!(rows.iter().all(|row| row.matches('|').count() == HEADER.len() + 1));
    }
}
