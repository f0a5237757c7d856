//! llama-bench: prompt and decode speed with so many tokens already in the cache.

use std::process::Command;

use anyhow::{ensure, Context, Result};
use serde::Deserialize;

use super::size::CacheSize;
use super::Setup;
use crate::pair::Pair;
use crate::process;

pub const PROMPT: u32 = 512;
pub const DECODE: u32 = 16;
/// llama-bench fills the cache once and restores it for each repetition of each test. A prompt takes seconds; decoding
/// takes a fraction of one and meets whatever else the machine does, so that its test is asked for several times.
const REPETITIONS: u32 = 3;
const DECODE_TESTS: usize = 12;

pub struct Speed {
    /// Tokens a second, one entry a repetition.
    pub pp: Vec<f64>,
    pub tg: Vec<f64>,
    pub size: Option<CacheSize>,
}

/// One round of one pair.
pub fn measure(setup: &Setup, pair: &Pair) -> Result<Speed> {
    let done = run(setup, pair, setup.depth, PROMPT)?;
    Ok(Speed {
        pp: speeds(&done.stdout, PROMPT, 0)?,
        tg: speeds(&done.stdout, 0, DECODE)?,
        size: CacheSize::in_log(&done.stderr),
    })
}

/// Decoding with nothing in the cache: what the model alone takes.
pub fn measure_empty(setup: &Setup) -> Result<Vec<f64>> {
    let f16 = Pair::f16();
    speeds(&run(setup, &f16, 0, 0)?.stdout, 0, DECODE)
}

/// Decoding, and a prompt where it has any tokens.
fn run(setup: &Setup, pair: &Pair, depth: u32, prompt: u32) -> Result<process::Finished> {
    let mut c = Command::new(setup.bin.join("llama-bench"));
    c.arg("-m").arg(&setup.model).args(["-fa", "1", "-r", &REPETITIONS.to_string(), "-o", "json", "-v"]);
    c.args(["-t", &setup.threads.to_string(), "-d", &depth.to_string()]);
    c.args(["-p", &prompt.to_string(), "-n", &vec![DECODE.to_string(); DECODE_TESTS].join(",")]);
    c.args(["-ctk", &pair.k, "-ctv", &pair.v]);
    process::run_ok(&mut c)
}

/// What llama-bench writes of a test, as far as it is read.
#[derive(Deserialize)]
struct Test {
    n_prompt: u32,
    n_gen: u32,
    samples_ts: Vec<f64>,
}

/// Tokens a second of every repetition of the tests of these lengths.
fn speeds(json: &str, prompt: u32, decode: u32) -> Result<Vec<f64>> {
    let tests: Vec<Test> = serde_json::from_str(json).with_context(|| format!("llama-bench wrote no JSON: {json}"))?;
    let wanted = tests.into_iter().filter(|t| t.n_prompt == prompt && t.n_gen == decode);
    let samples: Vec<f64> = wanted.flat_map(|t| t.samples_ts).collect();
    ensure!(!samples.is_empty(), "llama-bench has timed no test with n_prompt {prompt}, n_gen {decode}: {json}");
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_told_apart_by_their_lengths() {
        let json = r#"[
            {"type_k": "q8_0", "n_prompt": 512, "n_gen": 0, "n_depth": 256, "samples_ts": [122.7, 120.5]},
            {"type_k": "q8_0", "n_prompt": 0, "n_gen": 16, "n_depth": 256, "samples_ts": [74.5]},
            {"type_k": "q8_0", "n_prompt": 0, "n_gen": 16, "n_depth": 256, "samples_ts": [75.5, 71.0]}
        ]"#;
        assert_eq!(speeds(json, PROMPT, 0).unwrap(), [122.7, 120.5]);
        assert_eq!(speeds(json, 0, DECODE).unwrap(), [74.5, 75.5, 71.0]);
        assert!(speeds("[]", 0, DECODE).is_err() && speeds("error", PROMPT, 0).is_err());
    }
}
