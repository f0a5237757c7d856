//! One measurement by criterion.
//!
//! The work is the same in every sample, and what else the machine does can only add to it. So the fastest sample is
//! the one that tells about the kernel, as the best pass tells about the memory; the median tells about the machine.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};
use criterion::{Criterion, SamplingMode};
use serde_json::Value;

use super::plan::Effort;
use crate::cache::{self, Scratch};

/// Nanoseconds of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    pub best: f64,
    pub median: f64,
}

pub fn times(scratch: &Scratch, effort: Effort, mut run: impl FnMut() -> Result<()>) -> Result<Times> {
    let start = Instant::now();
    run()?;
    // The shorter the sample, the likelier that nothing came between; but a slow problem has no time for many.
    let samples = if start.elapsed() * 30 < effort.measurement { 30 } else { 10 };
    let mut criterion = Criterion::default()
        .without_plots()
        .output_directory(scratch.path())
        .sample_size(samples)
        // Of the confidence interval, which is not read.
        .nresamples(10)
        .warm_up_time(effort.warm_up)
        .measurement_time(effort.measurement);
    let mut failed = None;
    let mut group = criterion.benchmark_group("kv");
    // Every sample alike: a slow problem then runs ten times, not fifty-five.
    group.sampling_mode(SamplingMode::Flat).bench_function("run", |b| {
        b.iter_custom(|iterations| {
            let start = Instant::now();
            for _ in 0..iterations {
                if let Err(e) = run() {
                    failed = Some(e);
                    break;
                }
            }
            start.elapsed()
        })
    });
    group.finish();
    if let Some(e) = failed {
        return Err(e);
    }
    let dir = scratch.path().join("kv");
    let read = |name: &str| {
        let path = dir.join("run/new").join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("criterion left no {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
    };
    let times = Times::of(&read("sample.json")?, &read("estimates.json")?);
    // Or the next measurement would be compared with this one.
    cache::remove(&dir)?;
    times.context("criterion's files do not hold what they used to")
}

impl Times {
    fn of(sample: &Value, estimates: &Value) -> Option<Times> {
        let numbers = |key: &str| sample[key].as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
        let (times, iterations) = (numbers("times")?, numbers("iters")?);
        let best = times.iter().zip(&iterations).map(|(t, n)| t / n).min_by(f64::total_cmp)?;
        Some(Times { best, median: estimates["median"]["point_estimate"].as_f64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn fastest_and_median() {
        let sample = json!({ "iters": [2.0, 2.0, 2.0], "times": [6.0, 4.0, 5.0] });
        let estimates = json!({ "mean": { "point_estimate": 2.6 }, "median": { "point_estimate": 2.5 } });
        assert_eq!(Times::of(&sample, &estimates), Some(Times { best: 2.0, median: 2.5 }));
        assert_eq!(Times::of(&json!({}), &estimates), None);
        assert_eq!(Times::of(&sample, &json!({})), None);
    }

    #[test]
    fn criterion_is_asked_and_read() {
        let ms = Duration::from_millis;
        let effort = Effort { rounds: 1, warm_up: ms(1), measurement: ms(5), enough: ms(1000) };
        let scratch = Scratch::new().unwrap();
        for _ in 0..2 {
            let times = times(&scratch, effort, || {
                std::thread::sleep(Duration::from_micros(200));
                Ok(())
            });
            let Times { best, median } = times.unwrap();
            assert!(best > 200_000.0 && median >= best);
        }
        assert!(times(&scratch, effort, || anyhow::bail!("no")).is_err());
    }
}
