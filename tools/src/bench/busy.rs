//! How much of the machine others used while something was measured: a thread that waits at a barrier for one that does
//! not run costs more than any kernel, and nothing in the times says so.

use std::fs;
use std::time::Instant;

/// CPU time in clock ticks: of all processes, and of this one with its children that have ended.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    all: u64,
    own: u64,
}

pub struct Watch {
    ticks: Option<Ticks>,
    start: Instant,
}

/// Ticks a second: fixed by the ABI of Linux.
const USER_HZ: f64 = 100.0;

impl Watch {
    pub fn start() -> Watch {
        Watch { ticks: now(), start: Instant::now() }
    }

    /// Cores that others kept busy since the start, on average; None where that cannot be known.
    pub fn others(&self) -> Option<f64> {
        let (before, after) = (self.ticks?, now()?);
        let others = (after.all - before.all).saturating_sub(after.own - before.own);
        Some(others as f64 / USER_HZ / self.start.elapsed().as_secs_f64())
    }
}

fn now() -> Option<Ticks> {
    let all = busy(&fs::read_to_string("/proc/stat").ok()?)?;
    Some(Ticks { all, own: own(&fs::read_to_string("/proc/self/stat").ok()?)? })
}

/// `cpu  user nice system idle iowait irq softirq …`
fn busy(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat.strip_prefix("cpu ")?.lines().next()?.split_whitespace().flat_map(str::parse).collect();
    Some(fields.get(..3)?.iter().chain(fields.get(5..7)?).sum())
}

/// Fields 14 to 17, counted behind the name, which may hold anything: user, system, and the same of children.
fn own(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    fields.get(11..15)?.iter().map(|f| f.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files() {
        assert_eq!(busy("cpu  10 20 30 1000 5 1 2 9 0 0\ncpu0 1 2 3\n"), Some(63));
        assert_eq!(busy("nothing"), None);
        let line = "42 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 100 20 3 1 20 0 1 0";
        assert_eq!(own(line), Some(124));
    }
}
