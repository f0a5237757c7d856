//! llama-bench: prompt and decode speed with so many tokens already in the cache.

use std::process::Command;

use anyhow::{anyhow, Context, Result};
use serde_json::Value;

use super::perplexity::{parse_size, CacheSize};
use super::{Pair, Setup};
use crate::process;

pub const PROMPT: u32 = 512;
pub const DECODE: u32 = 16;
/// llama-bench fills the cache once and restores it for each of these, so they cost little.
const REPETITIONS: &str = "3";

pub struct Speed {
    /// Tokens a second, one entry a repetition.
    pub pp: Vec<f64>,
    pub tg: Vec<f64>,
    pub size: Option<CacheSize>,
}

/// One round of one pair.
pub fn measure(setup: &Setup, pair: &Pair) -> Result<Speed> {
    let (done, mut speeds) = run(setup, pair, setup.depth, &[(PROMPT, 0), (0, DECODE)])?;
    let (tg, pp) = (speeds.pop().unwrap_or_default(), speeds.pop().unwrap_or_default());
    Ok(Speed { pp, tg, size: parse_size(first_context(&done.stderr)) })
}

/// Decoding with nothing in the cache: what the model alone takes.
pub fn measure_empty(setup: &Setup) -> Result<Vec<f64>> {
    let f16 = Pair { k: "f16".into(), v: "f16".into() };
    Ok(run(setup, &f16, 0, &[(0, DECODE)])?.1.pop().unwrap_or_default())
}

/// Runs tests of (prompt, decode) tokens; the speeds of the repetitions of each.
fn run(setup: &Setup, pair: &Pair, depth: u32, tests: &[(u32, u32)]) -> Result<(process::Finished, Vec<Vec<f64>>)> {
    let (prompt, decode) = tests.iter().fold((0, 0), |(p, d), test| (p.max(test.0), d.max(test.1)));
    let mut c = Command::new(setup.bin.join("llama-bench"));
    c.arg("-m").arg(&setup.model).args(["-fa", "1", "-r", REPETITIONS, "-o", "json", "-v"]);
    c.args(["-t", &setup.threads.to_string(), "-d", &depth.to_string()]);
    c.args(["-p", &prompt.to_string(), "-n", &decode.to_string()]);
    c.args(["-ctk", &pair.k, "-ctv", &pair.v]);
    let done = process::run_ok(&mut c)?;
    let speeds = parse(&done.stdout, tests).with_context(|| {
        format!("no result in the output of {}\n{}", process::shown(&c), process::tail(&done.text(), 20))
    })?;
    Ok((done, speeds))
}

/// llama-bench makes a context for each test, of different sizes; one is enough to know the cache.
fn first_context(log: &str) -> &str {
    let mark = "llama_context: constructing llama_context";
    match log.match_indices(mark).nth(1) {
        Some((at, _)) => &log[..at],
        None => log,
    }
}

fn parse(json: &str, wanted: &[(u32, u32)]) -> Result<Vec<Vec<f64>>> {
    let tests: Value = serde_json::from_str(json).context("not JSON")?;
    let speed = |&(prompt, gen): &(u32, u32)| {
        tests
            .as_array()
            .into_iter()
            .flatten()
            .find(|t| t["n_prompt"] == prompt && t["n_gen"] == gen)
            .and_then(|t| t["samples_ts"].as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>())
            .filter(|speeds| !speeds.is_empty())
            .ok_or_else(|| anyhow!("no test with n_prompt {prompt}, n_gen {gen}"))
    };
    wanted.iter().map(speed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_tests_are_told_apart() {
        let json = r#"[
            {"type_k": "q8_0", "n_prompt": 512, "n_gen": 0, "n_depth": 256, "samples_ts": [122.7, 120.5]},
            {"type_k": "q8_0", "n_prompt": 0, "n_gen": 16, "n_depth": 256, "samples_ts": [74.5]}
        ]"#;
        assert_eq!(parse(json, &[(PROMPT, 0), (0, DECODE)]).unwrap(), [vec![122.7, 120.5], vec![74.5]]);
        assert_eq!(parse(json, &[(0, DECODE)]).unwrap(), [[74.5]]);
        assert!(parse("[]", &[(0, DECODE)]).is_err() && parse("error", &[]).is_err());
    }
}
