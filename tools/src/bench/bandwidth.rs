//! What the memory gives when it is only read: the limit that attention on a long cache is held against.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

/// Bytes that are read: far more than the last-level cache holds.
pub fn buffer_bytes() -> usize {
    const MIB: usize = 1 << 20;
    (4 * last_level_cache().unwrap_or(32 * MIB)).clamp(256 * MIB, 1536 * MIB)
}

/// Bytes of the largest cache of the first core.
pub fn last_level_cache() -> Option<usize> {
    let indices = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |dir: std::fs::DirEntry| parse_size(std::fs::read_to_string(dir.path().join("size")).ok()?.trim());
    indices.flatten().filter_map(size).max()
}

/// "32K", "300M"
fn parse_size(text: &str) -> Option<usize> {
    let unit = match text.chars().last()? {
        'K' => 1 << 10,
        'M' => 1 << 20,
        'G' => 1 << 30,
        _ => return text.parse().ok(),
    };
    text[..text.len() - 1].parse::<usize>().ok()?.checked_mul(unit)
}

/// GB/s for each number of threads, the best of several passes.
pub fn measure(threads: &[usize], passes: usize) -> Vec<f64> {
    // Written, not only asked for: untouched pages are all the same page of zeros.
    let buffer: Vec<u64> = (0..buffer_bytes() as u64 / 8).collect();
    let pass = |n: usize| {
        let start = Instant::now();
        thread::scope(|scope| {
            for part in buffer.chunks(buffer.len().div_ceil(n)) {
                scope.spawn(move || black_box(sum(part)));
            }
        });
        (buffer.len() * 8) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    threads.iter().map(|&n| (0..passes).map(|_| pass(n)).fold(0.0, f64::max)).collect()
}

/// Eight sums, so that no addition waits for the one before.
fn sum(values: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    let chunks = values.chunks_exact(8);
    let rest = chunks.remainder().iter().fold(0, |a: u64, &x| a.wrapping_add(x));
    for chunk in chunks {
        for (s, &x) in sums.iter_mut().zip(chunk) {
            *s = s.wrapping_add(x);
        }
    }
    sums.iter().fold(rest, |a, &x| a.wrapping_add(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_sums() {
        for n in [0, 1, 7, 8, 1001] {
            assert_eq!(sum(&(0..n).collect::<Vec<u64>>()), (0..n).sum::<u64>());
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("48K"), Some(48 << 10));
        assert_eq!(parse_size("300M"), Some(300 << 20));
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("x"), None);
    }
}
