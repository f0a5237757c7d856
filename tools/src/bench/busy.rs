//! How much of the machine others used while something was measured: a thread that waits at a barrier for one that does
//! not run costs more than any kernel, and nothing in the times says so.

use std::fs;
use std::time::Instant;

use crate::process;

/// CPU seconds: of all processes, and of this one with its children that have ended.
type Seconds = (f64, f64);

pub struct Watch {
    seconds: Option<Seconds>,
    start: Instant,
}

/// Ticks a second: fixed by the ABI of Linux.
const USER_HZ: f64 = 100.0;

impl Watch {
    pub fn start() -> Watch {
        Watch { seconds: now(), start: Instant::now() }
    }

    /// Cores that others kept busy since the start, on average; None where that cannot be known.
    pub fn others(&self) -> Option<f64> {
        let (before, after) = (self.seconds?, now()?);
        let others = (after.0 - before.0) - (after.1 - before.1);
        Some(others.max(0.0) / self.start.elapsed().as_secs_f64())
    }
}

fn now() -> Option<Seconds> {
    let all = busy(&fs::read_to_string("/proc/stat").ok()?)?;
    Some((all as f64 / USER_HZ, process::cpu_time("self")?.as_secs_f64()))
}

/// `cpu  user nice system idle iowait irq softirq …`
fn busy(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat.strip_prefix("cpu ")?.lines().next()?.split_whitespace().flat_map(str::parse).collect();
    Some(fields.get(..3)?.iter().chain(fields.get(5..7)?).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files() {
        assert_eq!(busy("cpu  10 20 30 1000 5 1 2 9 0 0\ncpu0 1 2 3\n"), Some(63));
        assert_eq!(busy("nothing"), None);
    }
}
