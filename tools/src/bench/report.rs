//! The result as tables and as JSON.

use serde_json::{json, Value};

use super::bandwidth;
use super::plan::{Case, Kind, Plan};
use super::shape::{Shape, SMOLLM2};
use super::worker::Row;
use crate::pair::Pair;
use crate::table::Table;
use crate::types;

pub struct Report<'a> {
    pub plan: &'a Plan,
    pub rows: Vec<Row>,
    /// GB/s by threads.
    pub read: Vec<(usize, f64)>,
    /// Cores that other processes kept busy meanwhile.
    pub others: Option<f64>,
}

/// How the time of a cell changes with their number.
struct Growth<'a> {
    row: &'a Row,
    from: usize,
    to: usize,
    /// 0.1: a tenth slower.
    change: f64,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

impl Report<'_> {
    fn case(&self, row: &Row) -> &Case {
        &self.plan.cases[row.case]
    }

    fn pair(&self, row: &Row) -> &Pair {
        &self.case(row).pairs[row.pair]
    }

    /// Upstream's code runs whatever our kernels are.
    fn isa<'a>(&self, row: &'a Row) -> &'a str {
        let pair = self.pair(row);
        let ours = [&pair.k, &pair.v].iter().any(|name| !types::is_upstream(name));
        if ours {
            &row.isa
        } else {
            "ggml"
        }
    }

    fn ns(&self, row: &Row) -> f64 {
        row.rounds.iter().map(|t| t.best).fold(f64::INFINITY, f64::min)
    }

    /// f16's time over this row's, both of the same process.
    fn over_f16(&self, row: &Row) -> Option<f64> {
        let f16 = self.rows.iter().find(|r| r.case == row.case && r.pair == 0 && r.isa == row.isa)?;
        Some(self.ns(f16) / self.ns(row))
    }

    /// Nanoseconds of a cell, or a row that is written, of one KV head.
    fn unit_ns(&self, row: &Row) -> f64 {
        let case = self.case(row);
        let units = match case.kind {
            Kind::Attention { cells, .. } => cells,
            Kind::Encode { tokens, operations } => tokens * operations,
        };
        self.ns(row) / (units * case.shape.kv_heads) as f64
    }

    /// GB/s of cache bytes, and their share of what the memory gives.
    fn rate(&self, row: &Row) -> (f64, f64) {
        let rate = row.bytes / self.ns(row);
        let read = self.read.iter().find(|(threads, _)| *threads == self.case(row).threads);
        (rate, read.map_or(f64::NAN, |(_, read)| rate / read))
    }

    /// Microseconds that SmolLM2 spends on writing a token.
    fn token_us(&self, row: &Row) -> Option<f64> {
        let (shape, layers) = SMOLLM2;
        (self.case(row).shape == shape).then(|| self.unit_ns(row) * (2 * layers * shape.kv_heads) as f64 / 1e3)
    }

    /// From the fewest cells to the most, and from 8K to 128K.
    fn growth(&self) -> Vec<Growth<'_>> {
        let mut all: Vec<Growth> = Vec::new();
        let cells = |row: &Row| match self.case(row).kind {
            Kind::Attention { cells, .. } => Some(cells),
            Kind::Encode { .. } => None,
        };
        for row in self.rows.iter().filter(|r| cells(r).is_some()) {
            let same: Vec<(usize, f64)> = self
                .rows
                .iter()
                .filter(|r| self.series(r) == self.series(row))
                .filter_map(|r| Some((cells(r)?, self.unit_ns(r))))
                .collect();
            let (Some(first), Some(last)) = (same.iter().min_by_key(|s| s.0), same.iter().max_by_key(|s| s.0)) else {
                continue;
            };
            if cells(row) != Some(first.0) {
                continue;
            }
            let at = |n: usize| same.iter().find(|s| s.0 == n);
            let whole = (first.0 < last.0).then_some((first, last));
            let long = at(8192).zip(at(131072)).filter(|pair| Some(*pair) != whole);
            for (a, b) in whole.into_iter().chain(long) {
                all.push(Growth { row, from: a.0, to: b.0, change: b.1 / a.1 - 1.0 });
            }
        }
        all
    }

    /// What the rows of one line of growth have in common.
    fn series<'a>(&'a self, row: &'a Row) -> Option<(Shape, usize, usize, &'a Pair, &'a str)> {
        let case = self.case(row);
        match case.kind {
            Kind::Attention { queries, .. } => Some((case.shape, queries, case.threads, self.pair(row), &row.isa)),
            Kind::Encode { .. } => None,
        }
    }

    pub fn as_json(&self) -> Value {
        let common = |row: &Row, kind: &str| {
            let (case, pair) = (self.case(row), self.pair(row));
            json!({
                "kind": kind, "shape": case.shape.name(), "head_size": case.shape.head_size,
                "heads": case.shape.heads, "kv_heads": case.shape.kv_heads,
                "k": pair.k, "v": pair.v, "isa": self.isa(row), "threads": case.threads,
            })
        };
        let measured = |row: &Row| {
            let (rate, share) = self.rate(row);
            let (mut value, own) = match self.case(row).kind {
                Kind::Attention { cells, queries } => (
                    common(row, "attention"),
                    json!({ "cells": cells, "queries": queries, "ns_per_cell": self.unit_ns(row) }),
                ),
                Kind::Encode { tokens, operations } => (
                    common(row, "encode"),
                    json!({
                        "tokens": tokens, "operations": operations, "ns_per_row": self.unit_ns(row),
                        "smollm2_us_per_token": self.token_us(row),
                    }),
                ),
            };
            extend(&mut value, own);
            extend(
                &mut value,
                json!({
                    "ns": self.ns(row), "median_ns": median(&row.rounds.iter().map(|t| t.median).collect::<Vec<_>>()),
                    "bytes": row.bytes, "gb_s": rate, "share_of_read": share,
                    "read_gb_s": rate / share, "x_f16": self.over_f16(row),
                }),
            );
            value
        };
        let growth = |g: &Growth| {
            let mut value = common(g.row, "growth");
            extend(&mut value, json!({ "from": g.from, "to": g.to, "change": g.change }));
            value
        };
        let mut all: Vec<Value> = self.rows.iter().map(measured).collect();
        all.extend(self.growth().iter().map(growth));
        all.extend(
            self.plan
                .left_out
                .iter()
                .map(|l| json!({ "kind": "left_out", "shape": l.shape.name(), "what": l.what, "why": l.why })),
        );
        Value::Array(all)
    }

    pub fn as_text(&self) -> String {
        let parts = [self.attention_text(), self.growth_text(), self.encode_text(), self.notes()];
        parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join("\n")
    }

    fn attention_text(&self) -> String {
        let header = ["shape", "K/V", "ISA", "cells", "queries", "threads", "ns/cell", "GB/s", "of read", "x f16"];
        let mut table = Table::new(&header, 3);
        let mut any = false;
        for row in &self.rows {
            let case = self.case(row);
            let Kind::Attention { cells, queries } = case.kind else { continue };
            any = true;
            let (rate, share) = self.rate(row);
            table.row(vec![
                case.shape.name(),
                self.pair(row).name(),
                self.isa(row).into(),
                cells.to_string(),
                queries.to_string(),
                case.threads.to_string(),
                format!("{:.2}", self.unit_ns(row)),
                format!("{rate:.2}"),
                format!("{:.0}%", 100.0 * share),
                ratio(self.over_f16(row)),
            ]);
        }
        if any {
            table.to_string()
        } else {
            String::new()
        }
    }

    fn growth_text(&self) -> String {
        let growth = self.growth();
        let mut table = Table::new(&["time per cell", "K/V", "ISA", "queries", "threads", "growth"], 3);
        // Both spans of a row follow each other: one line.
        for same in growth.chunk_by(|a, b| std::ptr::eq(a.row, b.row)) {
            let row = same[0].row;
            let case = self.case(row);
            let Kind::Attention { queries, .. } = case.kind else { continue };
            let span = |g: &Growth| {
                let span = format!("{} to {}", thousands(g.from), thousands(g.to));
                format!("{span} {:>+5.0}%", 100.0 * g.change)
            };
            let mut cells = vec![
                case.shape.name(),
                self.pair(row).name(),
                self.isa(row).into(),
                queries.to_string(),
                case.threads.to_string(),
            ];
            cells.extend(same.iter().map(span));
            table.row(cells);
        }
        if growth.is_empty() {
            return String::new();
        }
        table.to_string()
    }

    fn encode_text(&self) -> String {
        let header = ["encode", "type", "ISA", "tokens", "threads", "ns/row", "SmolLM2 us/token", "x f16"];
        let mut table = Table::new(&header, 3);
        let mut any = false;
        for row in &self.rows {
            let case = self.case(row);
            let Kind::Encode { tokens, .. } = case.kind else { continue };
            any = true;
            table.row(vec![
                case.shape.name(),
                self.pair(row).name(),
                self.isa(row).into(),
                tokens.to_string(),
                case.threads.to_string(),
                format!("{:.1}", self.unit_ns(row)),
                self.token_us(row).map_or("-".into(), |us| format!("{us:.1}")),
                ratio(self.over_f16(row)),
            ]);
        }
        if any {
            table.to_string()
        } else {
            String::new()
        }
    }

    fn notes(&self) -> String {
        let read: Vec<String> =
            self.read.iter().map(|(threads, rate)| format!("{rate:.1} GB/s at {threads}")).collect();
        let size = bandwidth::buffer_bytes() as f64 / 1e9;
        let mut text = format!("read bandwidth by threads: {} (a sum over {size:.1} GB)\n", read.join(", "));
        if let Some(cache) = bandwidth::last_level_cache() {
            let mib = cache >> 20;
            text += &format!("a cache below {mib} MiB may stay in the processor, and be read faster than memory\n");
        }
        text += "ns/cell and ns/row: of one KV head, fastest sample; x f16: upstream's f16 over this, same process\n";
        if let Some(others) = self.others.filter(|cores| *cores > 0.1) {
            text += &format!("other processes kept {others:.1} cores busy meanwhile: these times are partly theirs\n");
        }
        for left in &self.plan.left_out {
            text += &format!("{}\n", left.text());
        }
        text
    }
}

fn ratio(value: Option<f64>) -> String {
    value.map_or("-".into(), |x| format!("{x:.2}"))
}

/// 131072 -> "128K"
fn thousands(cells: usize) -> String {
    if cells.is_multiple_of(1024) {
        format!("{}K", cells / 1024)
    } else {
        cells.to_string()
    }
}

fn extend(value: &mut Value, with: Value) {
    if let (Value::Object(all), Value::Object(more)) = (value, with) {
        all.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use super::super::measure::Times;
    use super::super::plan::tests::plan;
    use super::*;

    fn times(best: f64) -> Times {
        Times { best, median: 1.5 * best }
    }

    /// 10 ns a cell for f16, half of it for srft4, and a tenth more at 128K.
    fn rows(plan: &Plan) -> Vec<Row> {
        let mut rows = Vec::new();
        for (case, c) in plan.cases.iter().enumerate() {
            for (pair, p) in c.pairs.iter().enumerate() {
                let per_unit = if p.k == "srft4" { 5.0 } else { 10.0 };
                let (units, bytes) = match c.kind {
                    Kind::Attention { cells, .. } => (cells, cells * c.shape.cell_bytes(p).unwrap()),
                    Kind::Encode { tokens, operations } => (tokens * operations, 1),
                };
                let grown = if units == 131072 { 1.1 } else { 1.0 };
                let ns = per_unit * grown * (units * c.shape.kv_heads) as f64;
                rows.push(Row {
                    case,
                    pair,
                    isa: "avx2".into(),
                    bytes: bytes as f64,
                    rounds: [1.0, 2.0, 1.0].map(|slow| times(slow * ns)).to_vec(),
                });
            }
        }
        rows
    }

    #[test]
    fn tables_and_json_tell_the_same() {
        let plan = plan("--shapes d64 --types srft4 --cells 1024,8192,131072,33554432 --threads 2");
        let report = Report { rows: rows(&plan), plan: &plan, read: vec![(2, 20.0)], others: Some(0.5) };
        let text = report.as_text();
        assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
        let line = text.lines().find(|l| l.starts_with("d64 9/3  srft4  avx2")).unwrap();
        // 68 bytes a cell and head in 5 ns.
        let fields: Vec<_> = line.split_whitespace().skip(4).collect();
        assert_eq!(fields, ["1024", "1", "2", "5.00", "13.60", "68%", "2.00"]);
        assert!(text.contains("1K to 128K   +10%  8K to 128K   +10%"), "{text}");
        assert!(text.contains("left out: d64 9/3, 33554432 cells"), "{text}");
        let Value::Array(all) = report.as_json() else { panic!("not an array") };
        let row = all.iter().find(|r| r["k"] == "srft4" && r["cells"] == 1024).unwrap();
        assert_eq!((&row["x_f16"], &row["ns_per_cell"], &row["isa"]), (&json!(2.0), &json!(5.0), &json!("avx2")));
        let token = all.iter().find(|r| r["kind"] == "encode" && r["k"] == "srft4").unwrap();
        assert_eq!(token["smollm2_us_per_token"].as_f64().map(|us| (us * 1e3).round()), Some(900.0));
        assert_eq!(all.iter().filter(|r| r["kind"] == "growth").count(), 2 * 4);
        assert_eq!(all.iter().filter(|r| r["kind"] == "left_out").count(), 1);
    }

    #[test]
    fn upstream_has_no_isa_of_ours() {
        let plan = plan("--shapes d64 --types f16/srft4 --cells 1024 --threads 2");
        let report = Report { rows: rows(&plan), plan: &plan, read: vec![(2, 20.0)], others: Some(0.5) };
        assert_eq!(report.isa(&report.rows[0]), "ggml");
        assert_eq!(report.isa(&report.rows[3]), "avx2");
    }
}
