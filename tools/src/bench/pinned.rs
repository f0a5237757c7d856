//! The instructions of the inner loops, which `cargo kv test --only rust` pins in tests/counts: beside times, because they do not
//! depend on what else the machine does.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use crate::project_root;
use crate::table::Table;

const FILE: &str = "tests/counts/counts.json";

/// By compiler, of which the file keeps one: by instruction set and loop, "avx2 decode srft4 d128 x4, per cell".
pub type Counts = BTreeMap<String, BTreeMap<String, f64>>;

pub fn file() -> PathBuf {
    project_root().join(FILE)
}

/// A row for each loop, a column for each of these instruction sets. None where there is no such file, outside a checkout.
pub fn table(isas: &[&str]) -> Option<String> {
    let text = fs::read_to_string(file()).ok()?;
    let counts: Counts = serde_json::from_str(&text).ok()?;
    let (compiler, loops) = counts.first_key_value()?;
    Some(format!("Instructions as {FILE} pins them, of {compiler}:\n\n{}", rows(loops, isas)))
}

fn rows(loops: &BTreeMap<String, f64>, isas: &[&str]) -> Table {
    let mut by_loop: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, count) in loops {
        let Some((isa, what)) = name.split_once(' ') else { continue };
        let Some(column) = isas.iter().position(|&wanted| wanted == isa) else { continue };
        by_loop.entry(what).or_insert_with(|| vec![String::new(); isas.len()])[column] = format!("{count:.1}");
    }
    let mut table = Table::new(&[&["loop"], isas].concat(), 1);
    for (what, cells) in by_loop {
        table.row([vec![what.to_string()], cells].concat());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_each_loop() {
        let loops =
            [("avx2 decode srft4, per cell", 348.0), ("avx512 decode srft4, per cell", 172.04), ("scalar x", 1.0)];
        let loops = loops.map(|(name, count)| (name.to_string(), count)).into();
        let text = rows(&loops, &["avx512", "avx2"]).markdown();
        assert!(text.ends_with("| decode srft4, per cell | 172.0 | 348.0 |\n"), "{text}");
        assert!(!text.contains("| x |"));
    }

    #[test]
    fn this_checkout_has_them() {
        let text = table(&["avx2", "avx512"]).unwrap();
        assert!(text.contains("prefill srft4") && text.contains("decode srft4"), "{text}");
    }
}
