//! The fuzz targets as a bounded run: every input of the corpus, and mutations of them from a fixed seed.

use std::fs;
use std::panic;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::{Options, Tally};
use crate::project_root;

#[path = "../../../../fuzz/targets.rs"]
mod targets;

pub fn run(options: &Options, tally: &mut Tally) {
    let time = Duration::from_secs(if options.quick { 1 } else { 4 } * if options.soak { 15 } else { 1 });
    for (name, target) in targets::ALL {
        tally.check(&format!("any bytes for {name}"), || {
            let n = bounded(name, target, time)?;
            println!("      {n} inputs for {name}");
            Ok(())
        });
    }
}

fn corpus(name: &str) -> Result<Vec<Vec<u8>>> {
    let dir = project_root().join("fuzz").join("corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(&dir)
        .with_context(|| format!("no corpus in {}", dir.display()))?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<std::io::Result<_>>()?;
    paths.sort();
    let inputs: Vec<_> = paths.iter().map(fs::read).collect::<std::io::Result<_>>()?;
    ensure!(!inputs.is_empty(), "the corpus in {} is empty", dir.display());
    Ok(inputs)
}

fn bounded(name: &str, target: targets::Target, time: Duration) -> Result<u64> {
    let inputs = corpus(name)?;
    let (start, mut random, mut n) = (Instant::now(), Random(7), 0u64);
    while start.elapsed() < time || n < inputs.len() as u64 {
        // The corpus as it is, then what becomes of it.
        let mut input = inputs[n as usize % inputs.len()].clone();
        if n >= inputs.len() as u64 {
            random.mutate(&mut input, &inputs);
        }
        if panic::catch_unwind(|| target(&input)).is_err() {
            let kept = project_root().join("fuzz").join("corpus").join(name).join(format!("fault-{n}"));
            fs::write(&kept, &input)?;
            bail!("input {n} panicked; it is kept in {}", kept.display());
        }
        n += 1;
    }
    Ok(n)
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n.max(1)
    }

    fn mutate(&mut self, input: &mut Vec<u8>, others: &[Vec<u8>]) {
        for _ in 0..1 + self.below(6) {
            let at = self.below(input.len() + 1);
            match self.below(7) {
                0 if at < input.len() => input[at] ^= 1 << self.below(8),
                1 if at < input.len() => input[at] = self.below(256) as u8,
                2 => input.insert(at, self.below(256) as u8),
                3 if at < input.len() => drop(input.remove(at)),
                4 => input.truncate(at),
                // Numbers that make trouble: none, all ones, the sign, and f32 and f16 that are not finite.
                5 => {
                    let odd = [0u32, u32::MAX, 0x8000_0000, 0x7f80_0000, 0x7fc0_0001, 0x7c00_7c00, 1][self.below(7)];
                    for (i, byte) in odd.to_le_bytes().into_iter().enumerate() {
                        if let Some(b) = input.get_mut(at + i) {
                            *b = byte;
                        }
                    }
                }
                _ => {
                    let other = &others[self.below(others.len())];
                    let from = self.below(other.len() + 1);
                    let n = self.below(200).min(other.len() - from);
                    input.splice(at..at, other[from..from + n].iter().copied());
                }
            }
        }
        input.truncate(1 << 14);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_corpus_that_it_bears() {
        for (name, target) in targets::ALL {
            corpus(name).unwrap().iter().for_each(|input| target(input));
        }
    }
}
