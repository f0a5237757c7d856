//! One measurement.
//!
//! The work is the same in every sample, and what else the machine does can only add to it. So the fastest sample is
//! the one that tells about the kernel, as the best pass tells about the memory; the median tells about the machine.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::plan::Effort;

/// Nanoseconds of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    pub best: f64,
    pub median: f64,
}

pub fn times(effort: Effort, mut run: impl FnMut() -> Result<()>) -> Result<Times> {
    let mut timed = |runs: u32| -> Result<Duration> {
        let start = Instant::now();
        (0..runs).try_for_each(|_| run())?;
        Ok(start.elapsed())
    };
    let first = timed(1)?;
    // The shorter the sample, the likelier that nothing came between; but a slow problem has no time for many.
    let samples = if first * 30 < effort.measurement { 30 } else { 10 };
    let (mut spent, mut runs) = (Duration::ZERO, 0u32);
    while runs == 0 || spent < effort.warm_up {
        spent += timed(1)?;
        runs += 1;
    }
    let one = (spent / runs).as_secs_f64().max(1e-9);
    let runs = (effort.measurement.as_secs_f64() / f64::from(samples) / one).clamp(1.0, 1e6) as u32;
    let mut all = Vec::new();
    for _ in 0..samples {
        all.push(timed(runs)?.as_secs_f64() * 1e9 / f64::from(runs));
    }
    Ok(Times::of(all))
}

impl Times {
    fn of(mut samples: Vec<f64>) -> Times {
        samples.sort_by(f64::total_cmp);
        let middle = samples.len() / 2;
        let median =
            if samples.len() % 2 == 1 { samples[middle] } else { (samples[middle - 1] + samples[middle]) / 2.0 };
        Times { best: samples[0], median }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn fastest_and_median() {
        assert_eq!(Times::of(vec![3.0, 2.0, 7.0]), Times { best: 2.0, median: 3.0 });
        assert_eq!(Times::of(vec![3.0, 2.0, 7.0, 4.0]), Times { best: 2.0, median: 3.5 });
    }

    #[test]
    fn runs_are_timed_and_errors_end_them() {
        let effort = Effort { rounds: 1, warm_up: MS, measurement: 5 * MS, enough: 1000 * MS };
        let mut runs = 0;
        let times = |run: &mut dyn FnMut() -> Result<()>| super::times(effort, run);
        let Times { best, median } = times(&mut || {
            runs += 1;
            std::thread::sleep(MS / 5);
            Ok(())
        })
        .unwrap();
        assert!(best > 200_000.0 && median >= best);
        // The first, the warm-up, and ten samples or more.
        assert!(runs >= 12, "{runs}");
        assert!(times(&mut || anyhow::bail!("no")).is_err());
    }
}
