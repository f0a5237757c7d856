//! The type table as people and scripts see it. All that is known of ggml-ext's own table is known here.

use anyhow::{bail, Result};
use ggml_ext::table;
use serde_json::{json, Value};

use crate::table::Table;

/// Upstream's cache types, as its tools name them.
pub const UPSTREAM: [&str; 9] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"];

pub struct Family {
    pub name: &'static str,
    pub k: bool,
    pub v: bool,
    /// Why a side is not served, where one is not.
    pub refusal: &'static str,
    pub summary: &'static str,
    pub types: Vec<Concrete>,
}

pub struct Concrete {
    pub name: String,
    pub id: i32,
    pub head_size: usize,
    pub row_bytes: usize,
    pub bits: f64,
}

pub fn families() -> Vec<Family> {
    let concrete = |c: table::Concrete| Concrete {
        name: c.name(),
        id: c.id(),
        head_size: c.head_size,
        row_bytes: c.row_bytes(),
        bits: c.bits_per_value(),
    };
    table::families()
        .iter()
        .map(|f| Family {
            name: f.name,
            k: f.serves_k,
            v: f.serves_v,
            refusal: f.refusal,
            summary: f.summary,
            types: f.head_sizes().iter().filter_map(|&size| f.at(size)).map(concrete).collect(),
        })
        .collect()
}

pub fn as_json() -> Value {
    let mut all = Vec::new();
    for f in families() {
        for t in &f.types {
            all.push(json!({
                "family": f.name, "name": t.name, "id": t.id, "head_size": t.head_size, "row_bytes": t.row_bytes,
                "bits_per_value": t.bits, "k": f.k, "v": f.v, "backends": ["cpu"],
            }));
        }
    }
    Value::Array(all)
}

pub fn as_text() -> String {
    let mut out = Table::new(&["type", "bits", "for", "ids", "what it is"], 5);
    let mut sizes: Vec<String> = Vec::new();
    for f in families() {
        let bits = f.types.iter().find(|t| t.head_size == 128).map_or("-".into(), |t| format!("{:.3}", t.bits));
        let ids = match (f.types.first(), f.types.last()) {
            (Some(a), Some(b)) => format!("{}-{}", a.id, b.id),
            _ => "-".into(),
        };
        let sides = [(f.k, "K"), (f.v, "V")].iter().filter(|s| s.0).map(|s| s.1).collect::<Vec<_>>().join(" ");
        let own: Vec<String> = f.types.iter().map(|t| t.head_size.to_string()).collect();
        let mut what = f.summary.to_string();
        if sizes.is_empty() {
            sizes = own;
        } else if own != sizes {
            what += &format!(" (head sizes {})", own.join(" "));
        }
        out.row(vec![f.name.into(), bits, sides, ids, what]);
    }
    format!(
        "{out}\nbits: per value at head size 128, scales included\nhead sizes: {}; backends: cpu\n",
        sizes.join(" ")
    )
}

/// Which side of the cache a type is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    K,
    V,
}

/// An unknown name, or a family on a side it does not serve, is an error that lists what exists.
pub fn check(name: &str, side: Side) -> Result<()> {
    let all = families();
    let serves = |f: &Family| if side == Side::K { f.k } else { f.v };
    let letter = if side == Side::K { "K" } else { "V" };
    if UPSTREAM.contains(&name) {
        return Ok(());
    }
    let Some(family) = all.iter().find(|f| f.name == name) else {
        let ours: Vec<_> = all.iter().map(|f| f.name).collect();
        bail!("no cache type '{name}': there are {}, and of llama.cpp itself {}", ours.join(", "), UPSTREAM.join(", "));
    };
    if !serves(family) {
        let others: Vec<_> = all.iter().filter(|f| serves(f)).map(|f| f.name).collect();
        bail!(
            "{name} is not for {letter} ({}): for that there are {} and llama.cpp's own",
            family.refusal,
            others.join(", ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_100_columns() {
        let text = as_text();
        assert!(text.contains("srft4"));
        assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
    }

    #[test]
    fn json_has_every_type_at_every_size() {
        let Value::Array(all) = as_json() else { panic!("not an array") };
        for family in families() {
            let name = family.name;
            let sizes: Vec<_> = all.iter().filter(|t| t["family"] == name).map(|t| &t["head_size"]).collect();
            assert_eq!(sizes.len(), 9, "{name}");
        }
        let t = all.iter().find(|t| t["name"] == "srft4_128").unwrap();
        assert_eq!((t["bits_per_value"].as_f64(), t["id"].as_i64()), (Some(4.5), Some(148)));
    }

    #[test]
    fn unknown_types_list_what_exists() {
        let e = check("nosuch", Side::K).unwrap_err().to_string();
        assert!(e.contains("srft4") && e.contains("f16"), "{e}");
        check("srft4", Side::V).unwrap();
        check("delta4", Side::K).unwrap();
        let e = check("delta4", Side::V).unwrap_err().to_string();
        assert!(e.contains("not for V") && e.contains("srft4"), "{e}");
        check("q4_0", Side::K).unwrap();
    }

    #[test]
    fn a_side_that_is_not_served_is_refused_with_a_reason() {
        check("qjl1", Side::K).unwrap();
        let e = check("qjl1", Side::V).unwrap_err().to_string();
        assert!(e.contains("36%") && e.contains("turbo4") && !e.contains("qjl1,"), "{e}");
    }
}
