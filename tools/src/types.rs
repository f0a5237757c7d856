//! The type table as people and scripts see it. All that is known of ggml-ext's own table is known here.

use anyhow::{anyhow, bail, Result};
use ggml_ext::spec::{self, Member};
use ggml_ext::table;
use serde_json::{json, Value};

use crate::table::Table;

pub struct Family {
    pub name: &'static str,
    pub k: bool,
    pub v: bool,
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
            k: true,
            v: f.sides.serve_v(),
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
                "bits_per_value": t.bits, "k": f.k, "v": f.v, "backends": ["cpu", "metal"],
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
        // Sizes came in another order than they have.
        let ids = match (f.types.iter().map(|t| t.id).min(), f.types.iter().map(|t| t.id).max()) {
            (Some(first), Some(last)) => format!("{first}-{last}"),
            _ => "-".into(),
        };
        let sides = [(f.k, "K"), (f.v, "V")].iter().filter(|s| s.0).map(|s| s.1).collect::<Vec<_>>().join(" ");
        let own: Vec<String> = f.types.iter().map(|t| t.head_size.to_string()).collect();
        let mut what = f.summary.to_string();
        if sizes.is_empty() {
            sizes = own;
        } else if own != sizes {
            let missing: Vec<_> = sizes.iter().filter(|size| !own.contains(size)).map(String::as_str).collect();
            what += &format!(" (not at {})", missing.join(" "));
        }
        out.row(vec![f.name.into(), bits, sides, ids, what]);
    }
    format!(
        "{out}\nbits: per value at head size 128, scales included\nhead sizes: {}; backends: cpu, metal, cuda\n",
        sizes.join(" ")
    )
}

pub use spec::Side;

/// Is it one of llama.cpp's own, or a spec of nothing else?
pub fn is_upstream(text: &str) -> bool {
    spec::parse(text).is_ok_and(|spec| spec.members().all(|member| matches!(member, Member::Native(_))))
}

/// The pieces of a list of cache types or pairs of them: what has a '=' belongs to the spec before it.
pub fn split(list: &str) -> Vec<String> {
    let mut types: Vec<String> = Vec::new();
    for part in list.split(',') {
        match types.last_mut() {
            Some(before) if part.contains('=') => *before += &format!(",{part}"),
            _ => types.push(part.into()),
        }
    }
    types
}

/// What is no cache type, and a type on a side it does not serve, is an error that says where and lists what exists.
pub fn check(text: &str, side: Side) -> Result<()> {
    let spec = spec::parse(text)?;
    for member in spec.members() {
        member.check_side(side).map_err(|e| anyhow!(e))?;
    }
    if side == Side::V && spec.calibration.is_some() {
        bail!("{text} is not for V: a calibration (cal=FILE) is for keys, as in {text}/f16");
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
            assert_eq!(sizes.len(), family.types.len(), "{name}");
            assert!(sizes.len() >= 8, "{name}");
        }
        let t = all.iter().find(|t| t["name"] == "srft4_128").unwrap();
        assert_eq!((t["bits_per_value"].as_f64(), t["id"].as_i64()), (Some(4.25), Some(148)));
    }

    #[test]
    fn a_list_of_types_may_hold_specs() {
        assert_eq!(split("srft4,q8_0/srft4"), ["srft4", "q8_0/srft4"]);
        assert_eq!(
            split("srft4,0=srft8,-1=f16/srft3,q8_0/srft4,swa=srft3,f16"),
            ["srft4,0=srft8,-1=f16/srft3", "q8_0/srft4,swa=srft3", "f16"]
        );
        assert_eq!(split("0=f16"), ["0=f16"]);
    }

    #[test]
    fn a_spec_is_upstreams_where_all_of_it_is() {
        for text in ["f16", "q8_0", "q8_0,0=f16", "q4_0,0-1=q8_0,swa=f16"] {
            assert!(is_upstream(text), "{text}");
        }
        for text in ["srft4", "q8_0,0=srft8", "srft4,0=f16", "f16,swa=srft4", "srft4,guard=off", "nosuch"] {
            assert!(!is_upstream(text), "{text}");
        }
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
        check("srft4,0-1=srft8,-1=f16", Side::K).unwrap();
        check("srft4,cal=x.gguf", Side::K).unwrap();
        let e = check("srft4,cal=x.gguf", Side::V).unwrap_err().to_string();
        assert!(e.contains("for keys"), "{e}");
        let e = check("srft4,0=srft9", Side::K).unwrap_err().to_string();
        assert!(e.contains("character 9"), "{e}");
    }

    #[test]
    fn a_side_that_is_not_served_is_refused_with_a_reason() {
        check("qjl1", Side::K).unwrap();
        let e = check("qjl1", Side::V).unwrap_err().to_string();
        assert!(e.contains("36%") && e.contains("turbo4") && !e.contains("qjl1,"), "{e}");
    }
}
