//! The result as tables, as Markdown, as JSON and as what is plotted.

use super::known::{Record, Source};
use super::perplexity::SMALL_BATCH;
use super::{speed, CacheSize, Setup, Statistics};
use crate::pair::Pair;
use crate::plot;
use crate::table::Table;
use crate::types;

pub struct Row {
    pub pair: Pair,
    /// f16 beside itself, in smaller batches: the noise that every other row has too.
    pub small_batch: bool,
    pub quality: Option<Statistics>,
    pub size: Option<CacheSize>,
    /// One entry a repetition.
    pub pp: Vec<f64>,
    pub tg: Vec<f64>,
    pub bits: Option<f64>,
}

impl Row {
    pub fn name(&self) -> String {
        let batch = if self.small_batch { format!(", -ub {SMALL_BATCH}") } else { String::new() };
        self.pair.name() + &batch
    }

    pub fn new(pair: Pair) -> Row {
        Row { pair, small_batch: false, quality: None, size: None, pp: Vec::new(), tg: Vec::new(), bits: None }
    }
}

/// All that was measured of one model.
pub struct Measured {
    pub setup: Setup,
    /// What it is made from; empty where no JSON is written, which alone holds it.
    pub source: Source,
    pub rows: Vec<Row>,
    /// Tokens a second with nothing in the cache, one entry a repetition.
    pub tg_empty: Vec<f64>,
    /// GB/s that the memory gives when it is only read.
    pub bandwidth: Option<f64>,
}

impl Measured {
    pub fn new(setup: Setup, pairs: &[Pair], bandwidth: Option<f64>) -> Measured {
        let rows = pairs.iter().map(|pair| Row::new(pair.clone())).collect();
        Measured { setup, source: Source::default(), rows, tg_empty: Vec::new(), bandwidth }
    }

    /// Behind f16, which is always the first row.
    pub fn add_noise(&mut self) {
        let f16 = self.rows[0].pair.clone();
        self.rows.insert(1, Row { small_batch: true, ..Row::new(f16) });
    }

    pub fn name(&self) -> String {
        self.setup.model.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn text(&self) -> String {
        self.setup.text.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Bits per value from what llama.cpp allocated: f16, always the first row, has 16.
    pub fn finish(&mut self) {
        let Some(f16) = self.rows.first().and_then(|r| r.size) else { return };
        // Halves are rounded up, though a last bit be missing: 4.625 is 4.63.
        let rounded = |bits: f64| (bits * 100.0 + 1e-6).round() / 100.0;
        for row in &mut self.rows {
            row.bits = row.size.map(|size| rounded(16.0 * size.mib / f16.mib));
        }
    }

    fn has_quality(&self) -> bool {
        self.rows.iter().any(|r| r.quality.is_some())
    }

    fn has_speed(&self) -> bool {
        self.rows.iter().any(|r| !r.tg.is_empty())
    }

    fn f16(&self) -> &Row {
        &self.rows[0]
    }

    /// Tokens a second if the cache cost no more than reading it: the time of the model alone, and its bytes at the
    /// memory's pace.
    fn limit(&self, row: &Row) -> Option<f64> {
        let bytes = row.size?.at(self.setup.depth).mib * (1u64 << 20) as f64;
        let seconds = 1.0 / fastest(&self.tg_empty)? + bytes / (self.bandwidth? * 1e9);
        Some(1.0 / seconds)
    }
}

/// The fastest repetition: what else a machine does slows it down and never speeds it up.
fn fastest(speeds: &[f64]) -> Option<f64> {
    speeds.iter().copied().max_by(f64::total_cmp)
}

/// This row's speed over f16's.
fn ratio(own: &[f64], f16: &[f64]) -> Option<f64> {
    Some(fastest(own)? / fastest(f16)?)
}

pub fn as_records(all: &[Measured]) -> Vec<Record> {
    let record = |m: &Measured, r: &Row| Record {
        k: r.pair.k.clone(),
        v: r.pair.v.clone(),
        small_batch: r.small_batch,
        bits_per_value: r.bits,
        kv_mib: r.size.map(|s| s.mib),
        kv_window_mib: r.size.map(|s| s.window_mib),
        kv_window_cells: r.size.map(|s| s.window_cells),
        ppl: r.quality.map(|q| q.ppl),
        kld: r.quality.map(|q| q.kld),
        kld_median: r.quality.map(|q| q.kld_median),
        kld_999: r.quality.map(|q| q.kld_999),
        same_top: r.quality.map(|q| q.same_top),
        pp: fastest(&r.pp),
        tg: fastest(&r.tg),
        tg_limit: if r.tg.is_empty() { None } else { m.limit(r) },
        depth: m.setup.depth,
        ctx: m.setup.ctx,
        chunks: m.setup.chunks,
        text: m.text(),
        model: m.name(),
        model_sha: Some(m.source.model.clone()),
        text_sha: Some(m.source.text.clone()),
        build: Some(m.source.build.clone()),
    };
    all.iter().flat_map(|m| m.rows.iter().map(move |r| record(m, r))).collect()
}

/// What is plotted: one series a model.
pub fn as_series(all: &[Measured]) -> Vec<plot::Series> {
    let dot = |m: &Measured, r: &Row| {
        Some(plot::Dot {
            name: r.pair.name(),
            bits: r.bits?,
            kld: r.quality.map(|q| q.kld).filter(|kld| kld.is_finite()),
            speed: ratio(&r.tg, &m.f16().tg),
            upstream: types::is_upstream(&r.pair.k) && types::is_upstream(&r.pair.v),
        })
    };
    let series = |m: &Measured| plot::Series {
        name: legend(m),
        dots: m.rows.iter().filter(|r| !r.small_batch).filter_map(|r| dot(m, r)).collect(),
    };
    all.iter().map(series).collect()
}

/// "SmolLM2-135M-Instruct.Q4_1 (ctx 1024; f16 decodes 26.3 tokens/s at depth 4096)"
fn legend(m: &Measured) -> String {
    let name = m.name();
    let mut facts = Vec::new();
    if m.has_quality() {
        facts.push(format!("ctx {}", m.setup.ctx));
    }
    if let Some(tg) = fastest(&m.f16().tg) {
        facts.push(format!("f16 decodes {tg:.1} tokens/s at depth {}", m.setup.depth));
    }
    format!("{} ({})", name.strip_suffix(".gguf").unwrap_or(&name), facts.join("; "))
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

/// Header and rows: the first column is the pair, the others are numbers.
fn cells(m: &Measured) -> Vec<Vec<String>> {
    let (quality, speed) = (m.has_quality(), m.has_speed());
    let mut header = vec!["K/V".to_string(), "bits/value".into(), "KV MiB".into()];
    if quality {
        header.extend(["PPL", "KLD", "median", "99.9%", "top %"].map(String::from));
    }
    if speed {
        let (pp, tg) = (format!("pp{}", speed::PROMPT), format!("tg{}", speed::DECODE));
        header.extend([pp, "x f16".into(), tg, "x f16".into(), "limit".into(), "%".into()]);
    }
    let mut all = vec![header];
    for row in &m.rows {
        let q = row.quality;
        let mut cells = vec![row.name(), cell(row.bits, 2), cell(row.size.map(|s| s.mib), 2)];
        if quality {
            cells.push(cell(q.map(|q| q.ppl), 4));
            cells.extend([q.map(|q| q.kld), q.map(|q| q.kld_median), q.map(|q| q.kld_999)].map(|kld| cell(kld, 5)));
            cells.push(cell(q.map(|q| q.same_top), 2));
        }
        if speed {
            for (own, f16) in [(&row.pp, &m.f16().pp), (&row.tg, &m.f16().tg)] {
                cells.extend([cell(fastest(own), 1), cell(ratio(own, f16), 2)]);
            }
            let limit = m.limit(row);
            let share = fastest(&row.tg).zip(limit).map(|(tg, limit)| 100.0 * tg / limit);
            cells.extend([cell(limit, 1), cell(share, 0)]);
        }
        all.push(cells);
    }
    all
}

pub fn as_text(all: &[Measured]) -> String {
    let one = |m: &Measured| {
        let cells = cells(m);
        let header: Vec<&str> = cells[0].iter().map(String::as_str).collect();
        let mut table = Table::new(&header, 1);
        cells[1..].iter().for_each(|row| table.row(row.clone()));
        format!("{table}\n{}\n", notes(m).join("\n"))
    };
    all.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// A heading, a table and its notes for each model.
pub fn as_markdown(all: &[Measured]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let one = |m: &Measured| {
        let cells = cells(m);
        let rules: Vec<String> = (0..cells[0].len()).map(|i| if i == 0 { "---" } else { "---:" }.into()).collect();
        let rows: String = cells[1..].iter().map(|row| line(row)).collect();
        let notes: String = notes(m).iter().map(|note| format!("- {note}\n")).collect();
        format!("### {}\n\n{}{}{rows}\n{notes}", m.name(), line(&cells[0]), line(&rules))
    };
    all.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// What was run, so that a number can be had again.
fn notes(m: &Measured) -> Vec<String> {
    let Setup { ctx, chunks, depth, threads, .. } = &m.setup;
    let plural = if *threads == 1 { "" } else { "s" };
    let mut notes = vec![format!("model {}, {threads} thread{plural}, KV MiB for {ctx} tokens", m.name())];
    if m.has_quality() {
        let text = m.text();
        notes.push(format!(
            "quality: llama-perplexity -f {text} -c {ctx} --chunks {chunks}, against f16's logits; KLD: mean, median and 99.9th percentile; top %: same most likely token"
        ));
    }
    if m.has_speed() {
        notes.push(format!(
            "speed: tokens/s, llama-bench -d {depth} -p {} -n {}, the fastest repetition of alternating rounds",
            speed::PROMPT,
            speed::DECODE
        ));
    }
    if let (Some(empty), Some(bandwidth)) = (fastest(&m.tg_empty), m.bandwidth) {
        notes.push(format!(
            "limit: {empty:.1} tokens/s without a cache, and the cache read once at {bandwidth:.1} GB/s; %: share of it reached"
        ));
    }
    notes
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Of model, text and build.
    pub const SOURCE: (&str, &str, &str) = ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc");

    pub fn measured() -> Measured {
        let setup = Setup {
            bin: "/b".into(),
            model: "/m/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            text: "/t/hamlet.txt".into(),
            ctx: 2048,
            chunks: 6,
            depth: 4096,
            threads: 16,
        };
        let size = |mib: &str| {
            CacheSize::in_log(&format!("llama_kv_cache: size = {mib} MiB ( 2048 cells,  30 layers,  1/1 seqs), K"))
        };
        let pairs = [Pair::parse("f16").unwrap(), Pair::parse("q8_0/srft4").unwrap()];
        let mut measured = Measured::new(setup, &pairs, Some(100.0));
        measured.source = Source { model: SOURCE.0.into(), text: SOURCE.1.into(), build: SOURCE.2.into() };
        measured.tg_empty = vec![400.0, 500.0, 600.0];
        for (row, mib) in measured.rows.iter_mut().zip(["8000.00", "3250.00"]) {
            row.size = size(mib);
            row.quality = Some(Statistics {
                ppl: 12345.6789,
                kld: 0.01234,
                kld_median: 0.00123,
                kld_999: 1.23456,
                same_top: 99.123,
            });
            row.pp = vec![10000.0, 12000.0, 11000.0];
            row.tg = vec![1.0, 3.0, 2.0];
        }
        measured.finish();
        measured
    }

    #[test]
    fn the_table_fits_120_columns() {
        let text = as_text(&[measured()]);
        let table = text.lines().take_while(|l| !l.is_empty());
        assert!(table.clone().all(|l| l.chars().count() <= 120), "{text}");
        assert_eq!(table.count(), 3);
        assert!(text.contains("q8_0/srft4") && text.contains("6.50"), "{text}");
    }

    #[test]
    fn the_limit_is_the_model_and_the_bytes() {
        let m = measured();
        // 3250 MiB for 2048 cells are twice as many at depth 4096; 100 GB/s; 600 tokens/s without
        let seconds = 1.0 / 600.0 + 2.0 * 3250.0 * 1048576.0 / 100e9;
        assert!((m.limit(&m.rows[1]).unwrap() * seconds - 1.0).abs() < 1e-12);
        assert!(Measured { bandwidth: None, ..measured() }.limit(&m.rows[1]).is_none());
    }

    #[test]
    fn json_has_null_where_nothing_was_measured() {
        let mut m = measured();
        m.rows[1].quality = None;
        m.rows[1].pp.clear();
        m.rows[1].tg.clear();
        let json = serde_json::to_value(as_records(&[m, measured()])).unwrap();
        assert_eq!(json.as_array().unwrap().len(), 4);
        assert_eq!(json[0]["pp"], 12000.0);
        assert_eq!(json[1]["bits_per_value"], 6.5);
        for name in ["ppl", "kld", "same_top", "pp", "tg", "tg_limit"] {
            assert!(json[1].as_object().unwrap().contains_key(name) && json[1][name].is_null(), "{name}");
        }
    }

    #[test]
    fn markdown_is_a_table_a_model() {
        let text = as_markdown(&[measured(), measured()]);
        assert_eq!(text.matches("### SmolLM2-135M-Instruct.Q4_1.gguf").count(), 2);
        let rows: Vec<&str> = text.lines().filter(|l| l.starts_with('|')).collect();
        assert_eq!(rows.len(), 2 * 4);
        assert!(rows.iter().all(|r| r.matches('|').count() == rows[0].matches('|').count()), "{text}");
        assert!(text.contains("- quality: llama-perplexity -f hamlet.txt -c 2048 --chunks 6"), "{text}");
    }

    #[test]
    fn noise_is_a_row_but_no_dot() {
        let mut m = measured();
        m.add_noise();
        m.rows[1].quality = m.rows[0].quality;
        let text = as_text(&[m]);
        assert_eq!(text.lines().filter(|l| l.starts_with("f16")).count(), 2, "{text}");
        assert!(text.contains("f16, -ub 32"), "{text}");
        let mut m = measured();
        m.add_noise();
        assert_eq!(as_series(std::slice::from_ref(&m))[0].dots.len(), 2);
        assert_eq!(as_records(&[m]).iter().map(|r| r.small_batch).collect::<Vec<_>>(), [false, true, false]);
    }

    #[test]
    fn halves_of_a_hundredth_are_rounded_up() {
        let mut m = measured();
        for mib in [2312.5, 2312.5 * (1.0 - f64::EPSILON)] {
            m.rows[1].size.as_mut().unwrap().mib = mib;
            m.finish();
            assert_eq!(m.rows[1].bits, Some(4.63));
        }
    }

    #[test]
    fn series_tell_upstream_from_ours() {
        let series = as_series(&[measured()]);
        let dots: Vec<_> = series[0].dots.iter().map(|d| (d.name.as_str(), d.upstream, d.speed)).collect();
        assert_eq!(dots, [("f16", true, Some(1.0)), ("q8_0/srft4", false, Some(1.0))]);
        assert_eq!(series[0].name, "SmolLM2-135M-Instruct.Q4_1 (ctx 2048; f16 decodes 3.0 tokens/s at depth 4096)");
    }

    #[test]
    fn single_cells() {
        assert_eq!(cell(Some(-0.000001), 5), "0.00000");
        assert_eq!(cell(Some(-0.5), 1), "-0.5");
        assert_eq!(cell(None, 1), "-");
    }

    #[test]
    fn ratios_are_of_the_fastest() {
        // The machine was busy once for each; the ratio does not see it.
        assert_eq!(ratio(&[20.0, 7.0, 20.0], &[10.0, 10.0, 3.0]), Some(2.0));
        assert_eq!(fastest(&[1.0, 3.0, 2.0]), Some(3.0));
        assert_eq!(fastest(&[]), None);
    }
}
