//! A type for K and one for V: what is compared, measured and searched with.

use anyhow::Result;

use crate::types::{self, Side};

/// A cache type for K and one for V.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub k: String,
    pub v: String,
}

impl Pair {
    /// What others are compared with.
    pub fn f16() -> Pair {
        Pair { k: "f16".into(), v: "f16".into() }
    }

    pub fn parse(text: &str) -> Result<Pair> {
        // The last one: K may name a file.
        let (k, v) = text.rsplit_once('/').unwrap_or((text, text));
        let (k, v) = (k.trim(), v.trim());
        types::check(k, Side::K)?;
        types::check(v, Side::V)?;
        Ok(Pair { k: k.into(), v: v.into() })
    }

    pub fn name(&self) -> String {
        if self.k == self.v {
            self.k.clone()
        } else {
            format!("{}/{}", self.k, self.v)
        }
    }
}

/// f16 first, because the others are compared with it; then upstream's; then what was asked for, once each.
pub fn pairs(beside: &str, asked: &[String]) -> Result<Vec<Pair>> {
    let listed = |list: &str| types::split(list).into_iter().filter(|name| !name.trim().is_empty()).collect::<Vec<_>>();
    let mut names = vec!["f16".to_string()];
    if beside != "none" {
        names.extend(listed(beside));
    }
    if asked.is_empty() {
        // A type for keys alone stands beside f16, or what one would put beside it.
        let beside = |f: &types::Family| match f.name {
            _ if f.v => f.name.to_string(),
            "delta8" => "delta8/srft8".into(),
            "delta4" => "delta4/srft4".into(),
            "delta3" => "delta3/srft3".into(),
            name => format!("{name}/f16"),
        };
        names.extend(types::families().iter().filter(|f| f.k).map(beside));
        names.push("q8_0/srft4".into());
    }
    names.extend(asked.iter().flat_map(|list| listed(list)));
    let mut pairs: Vec<Pair> = Vec::new();
    for name in &names {
        let pair = Pair::parse(name)?;
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_begin_with_upstream_and_are_named_once() {
        let names = |asked: &[&str]| {
            let asked: Vec<String> = asked.iter().map(|s| s.to_string()).collect();
            pairs("q8_0,q4_0", &asked).unwrap().iter().map(Pair::name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["srft4,q8_0/srft4", "q4_0", "srft4/srft4"]), ["f16", "q8_0", "q4_0", "srft4", "q8_0/srft4"]);
        assert_eq!(
            names(&["srft4,0-1=srft8/srft3,-1=f16,srft4"])[3..],
            ["srft4,0-1=srft8/srft3,-1=f16".to_string(), "srft4".into()]
        );
        assert_eq!(Pair::parse("delta4,cal=a/b.gguf/f16").unwrap().k, "delta4,cal=a/b.gguf");
        let default = names(&[]);
        assert!(["srft8", "srft4", "polar3", "delta4/srft4", "qjl1/f16", "q8_0/srft4"]
            .iter()
            .all(|n| default.contains(&n.to_string())));
        assert_eq!(pairs("none", &["srft4".into()]).unwrap().len(), 2);
        assert!(pairs("none", &["f16/nosuch".into()]).is_err());
        assert!(pairs("nosuch", &[]).is_err());
    }
}
