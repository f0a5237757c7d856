//! The result as a table and as JSON.

use serde_json::{json, Value};

use super::{speed, CacheSize, Pair, Setup, Statistics};
use crate::table::Table;

pub struct Row {
    pub pair: Pair,
    pub quality: Option<Statistics>,
    pub size: Option<CacheSize>,
    /// One entry a round.
    pub pp: Vec<f64>,
    pub tg: Vec<f64>,
    pub bits: Option<f64>,
}

impl Row {
    pub fn new(pair: Pair) -> Row {
        Row { pair, quality: None, size: None, pp: Vec::new(), tg: Vec::new(), bits: None }
    }
}

/// Bits per value from what llama.cpp allocated: f16, always the first row, has 16.
pub fn finish(rows: &mut [Row]) {
    let Some(f16) = rows.first().and_then(|r| r.size) else { return };
    for row in rows {
        row.bits = row.size.map(|size| (16.0 * size.mib / f16.mib * 100.0).round() / 100.0);
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The median over the rounds of this row's speed over f16's in the same round: a round is one moment of the machine.
fn ratio(own: &[f64], f16: &[f64]) -> Option<f64> {
    median(&own.iter().zip(f16).map(|(a, b)| a / b).collect::<Vec<_>>())
}

pub fn as_json(rows: &[Row], setup: &Setup) -> Value {
    let model = setup.model.file_name().unwrap_or_default().to_string_lossy();
    let row = |r: &Row| {
        let q = r.quality;
        json!({
            "k": r.pair.k, "v": r.pair.v,
            "bits_per_value": r.bits, "kv_mib": r.size.map(|s| s.mib),
            "ppl": q.map(|q| q.ppl), "kld": q.map(|q| q.kld), "same_top": q.map(|q| q.same_top),
            "pp": median(&r.pp), "tg": median(&r.tg),
            "depth": setup.depth, "ctx": setup.ctx, "model": model,
        })
    };
    Value::Array(rows.iter().map(row).collect())
}

fn cell(value: Option<f64>, digits: usize) -> String {
    let Some(value) = value else { return "-".into() };
    let text = format!("{value:.digits$}");
    // A KLD of minus nothing is nothing.
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|c| c == '0' || c == '.') => rest.to_string(),
        _ => text,
    }
}

pub fn as_text(rows: &[Row], setup: &Setup) -> String {
    let (quality, speed) = (rows.iter().any(|r| r.quality.is_some()), rows.iter().any(|r| !r.pp.is_empty()));
    let pp = format!("pp{}", speed::PROMPT);
    let tg = format!("tg{}", speed::DECODE);
    let mut header = vec!["K/V", "bits/value", "KV MiB"];
    if quality {
        header.extend(["PPL", "KLD", "same top %"]);
    }
    if speed {
        header.extend([pp.as_str(), "x f16", tg.as_str(), "x f16"]);
    }
    let mut table = Table::new(&header, 1);
    for row in rows {
        let q = row.quality;
        let mut cells = vec![row.pair.name(), cell(row.bits, 2), cell(row.size.map(|s| s.mib), 2)];
        if quality {
            cells.extend([cell(q.map(|q| q.ppl), 4), cell(q.map(|q| q.kld), 5), cell(q.map(|q| q.same_top), 2)]);
        }
        if speed {
            for (own, f16) in [(&row.pp, &rows[0].pp), (&row.tg, &rows[0].tg)] {
                cells.extend([cell(median(own), 1), cell(ratio(own, f16), 2)]);
            }
        }
        table.row(cells);
    }
    format!("{table}\n{}", notes(setup, quality, speed))
}

/// What was run, so that a number can be had again.
fn notes(setup: &Setup, quality: bool, speed: bool) -> String {
    let name = |p: &std::path::Path| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Setup { ctx, chunks, depth, threads, .. } = setup;
    let mut text = format!("model {}, {threads} threads, KV MiB for {ctx} tokens\n", name(&setup.model));
    if quality {
        text += &format!(
            "quality: llama-perplexity -f {} -c {ctx} --chunks {chunks}, against f16's logits\n",
            name(&setup.text)
        );
    }
    if speed {
        text += &format!(
            "speed: tokens/s, llama-bench -d {depth} -p {} -n {}, median of alternating rounds\n",
            speed::PROMPT,
            speed::DECODE
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::perplexity::parse_size;

    fn setup() -> Setup {
        Setup {
            bin: "/b".into(),
            model: "/m/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            text: "/t/hamlet.txt".into(),
            ctx: 2048,
            chunks: 6,
            depth: 4096,
            threads: 16,
        }
    }

    fn rows() -> Vec<Row> {
        let size = |mib: &str| {
            parse_size(&format!("llama_kv_cache: size = {mib} MiB ( 2048 cells,  30 layers,  1/1 seqs), K"))
        };
        let mut rows = vec![Row::new(Pair::parse("f16").unwrap()), Row::new(Pair::parse("q8_0/srft4").unwrap())];
        for (row, mib) in rows.iter_mut().zip(["45000.00", "18281.25"]) {
            row.size = size(mib);
            row.quality = Some(Statistics { ppl: 12345.6789, kld: 0.01234, same_top: 99.123 });
            row.pp = vec![10000.0, 12000.0, 11000.0];
            row.tg = vec![100.0, 300.0, 200.0];
        }
        finish(&mut rows);
        rows
    }

    #[test]
    fn the_table_fits_100_columns() {
        let text = as_text(&rows(), &setup());
        assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
        assert!(text.contains("q8_0/srft4") && text.contains("6.50"), "{text}");
    }

    #[test]
    fn json_has_null_where_nothing_was_measured() {
        let mut rows = rows();
        rows[1].quality = None;
        rows[1].pp.clear();
        let json = as_json(&rows, &setup());
        assert_eq!(json[0]["pp"], 11000.0);
        assert_eq!(json[1]["bits_per_value"], 6.5);
        for name in ["ppl", "kld", "same_top", "pp"] {
            assert!(json[1].as_object().unwrap().contains_key(name) && json[1][name].is_null(), "{name}");
        }
    }

    #[test]
    fn cells() {
        assert_eq!(cell(Some(-0.000001), 5), "0.00000");
        assert_eq!(cell(Some(-0.5), 1), "-0.5");
        assert_eq!(cell(None, 1), "-");
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        // The machine halves its speed between the rounds; the ratio does not see it.
        assert_eq!(ratio(&[20.0, 10.0, 20.0], &[10.0, 5.0, 10.0]), Some(2.0));
        assert_eq!(median(&[3.0, 1.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }
}
