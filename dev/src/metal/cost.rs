//! What decoding should cost on an Apple GPU: counted from formats and shaders, never timed.
//!
//! docs/metal.md holds the tables that [`text`] makes; a test compares.

use std::fmt::Write;
use std::path::PathBuf;

use ggml_ext::table::{self, Entry};

use kv::project_root;

/// Cores have 128 lanes, each of them an operation a cycle.
struct Gpu {
    name: &'static str,
    cores: f64,
    gigahertz: f64,
    gigabytes: f64,
}

const GPUS: [Gpu; 3] = [
    Gpu { name: "M1, 8 cores", cores: 8.0, gigahertz: 1.28, gigabytes: 68.0 },
    Gpu { name: "M1 Max, 32 cores", cores: 32.0, gigahertz: 1.30, gigabytes: 400.0 },
    Gpu { name: "M4 Max, 40 cores", cores: 40.0, gigahertz: 1.58, gigabytes: 546.0 },
];

/// Llama-3.1-70B at 128K.
const LAYERS: f64 = 80.0;
const KV_HEADS: f64 = 8.0;
const QUERY_HEADS: f64 = 8.0;
const SIZE: usize = 128;
const CELLS: f64 = 131_072.0;

const PAIRS: [(&str, &str); 7] = [
    ("f16", "f16"),
    ("srft8", "srft8"),
    ("srft4", "srft4"),
    ("srft8", "srft3"),
    ("delta4", "srft4"),
    ("turbo4", "turbo4"),
    ("polar4", "polar4"),
];

/// Bytes of the row of one head.
fn bytes(name: &str) -> f64 {
    match table::by_name(name) {
        Some(Entry::Family(family)) => family.at(SIZE).map_or(f64::NAN, |c| c.row_bytes() as f64),
        _ => 2.0 * SIZE as f64,
    }
}

/// Values of a row that meet a query: turbo's rows are twice as wide.
fn width(name: &str) -> f64 {
    SIZE as f64 * if name.starts_with("turbo") { 2.0 } else { 1.0 }
}

/// Operations of a lane to have one value in a register, as key and as value. A key's bytes are loaded once for the values that
/// share them, and so is its scale; a value is found by its own lane, with its scale.
fn unpacking(name: &str) -> (f64, f64) {
    match name {
        "f16" => (1.25, 2.0),
        "srft8" | "delta8" => (2.25, 6.0),
        // Two look-ups of weights and a direction for each pair.
        "polar4" | "polar3" => (9.0, 16.0),
        // Half of its values are signs: a shift, a mask and a choice.
        "turbo4" | "turbo3" => (3.75, 7.0),
        // Shift, mask, look-up, scale.
        _ => (4.5, 8.0),
    }
}

/// Operations of a cell for all query heads of a KV head: unpacking, a multiply-add for each head, and a load of four
/// queries or of a weight for four of them.
fn operations(k: &str, v: &str) -> f64 {
    let heads = QUERY_HEADS * 1.25;
    // A scan of five shuffles for each head, of which a lane makes one for its cell.
    let chain = if k.starts_with("delta") { 32.0 + 11.0 * QUERY_HEADS } else { 0.0 };
    width(k) * (unpacking(k).0 + heads) + width(v) * (unpacking(v).1 + heads) + chain
}

pub fn path() -> PathBuf {
    project_root().join("docs").join("metal.md")
}

/// The tables, as docs/metal.md has them.
pub fn text() -> String {
    let mut text = String::from("| K/V | bytes of a cell and KV head | lane operations of it, 8 query heads | share of them that are multiply-adds |\n|---|---|---|---|\n");
    for (k, v) in PAIRS {
        let (all, useful) = (operations(k, v), (width(k) + width(v)) * QUERY_HEADS);
        let _ = writeln!(text, "| {k}/{v} | {:.0} | {all:.0} | {:.0}% |", bytes(k) + bytes(v), 100.0 * useful / all);
    }
    text.push_str("\n| GPU | K/V | bytes | time of bytes | time of operations | expected share of bandwidth | a layer |\n|---|---|---|---|---|---|---|\n");
    for gpu in &GPUS {
        for (k, v) in PAIRS {
            let cells = LAYERS * KV_HEADS * CELLS;
            let gigabytes = cells * (bytes(k) + bytes(v)) / 1e9;
            let of_bytes = gigabytes / gpu.gigabytes * 1e3;
            let of_operations = cells * operations(k, v) / (gpu.cores * 128.0 * gpu.gigahertz * 1e9) * 1e3;
            let longer = of_bytes.max(of_operations);
            let _ = writeln!(
                text,
                "| {} | {k}/{v} | {gigabytes:.1} GB | {of_bytes:.0} ms | {of_operations:.0} ms | {:.0}% | {:.2} ms |",
                gpu.name,
                100.0 * of_bytes / longer,
                longer / LAYERS
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_formats() {
        assert_eq!([bytes("f16"), bytes("srft8"), bytes("srft4"), bytes("delta4")], [256.0, 136.0, 68.0, 72.0]);
    }

    #[test]
    fn the_document_has_these_tables() {
        let (begin, end) = ("<!-- dev/src/metal/cost.rs -->\n", "<!-- end -->\n");
        let document = std::fs::read_to_string(path()).unwrap_or_default();
        let (head, rest) = document.split_once(begin).expect("docs/metal.md has no place for the tables");
        let (found, tail) = rest.split_once(end).expect("the place for the tables has no end");
        if std::env::var_os("KV_BLESS").is_some() {
            std::fs::write(path(), format!("{head}{begin}{}{end}{tail}", text())).unwrap();
        } else {
            assert!(found == text(), "the tables of docs/metal.md are old: KV_BLESS=1 cargo test -p kv-dev cost");
        }
    }
}
