//! The size of a cache, from the line that llama.cpp writes for each of a context's caches.
//!
//! ```text
//! llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells
//! llama_kv_cache: size =    8.95 MiB (   256 cells,  15 layers,  8/8 seqs), K (srft8 x1 + srft4 x14, 4.77 bits/value):    4.47 MiB, V …
//! ```
//!
//! `cargo kv plan` computes the exact size before there is a cache; this is what a measured run really had. Hundredths of a
//! MiB are what llama.cpp tells: enough for contexts of a thousand tokens, too coarse for a small model with a few hundred.

/// The cache of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheSize {
    pub mib: f64,
    pub cells: u32,
    /// Part of `mib` in layers that keep only a window.
    pub window_mib: f64,
    /// The most cells that these layers keep, however long the context is; 0 where there are none.
    pub window_cells: u32,
}

impl CacheSize {
    /// All caches of the first context in a log, together, for one of the sequences that they hold side by side.
    ///
    /// A tool may make several contexts, llama-bench one for each test; one is enough to know the cache.
    pub fn in_log(log: &str) -> Option<CacheSize> {
        let second = log.match_indices("llama_context: constructing llama_context").nth(1);
        let log = second.map_or(log, |(at, _)| &log[..at]);
        // Of layers with a window, and of those without.
        let (mut window, mut full) = ((0.0, 0), (0.0, 0));
        let mut in_window = false;
        for line in log.lines() {
            if let Some((_, kind)) = line.split_once(": creating ") {
                // By its name: in a short context it has as many cells as the others.
                in_window = kind.trim_start().starts_with("SWA KV cache");
            } else if let Some((mib, cells)) = parse_line(line) {
                let cache = if std::mem::take(&mut in_window) { &mut window } else { &mut full };
                *cache = (cache.0 + mib, cells.max(cache.1));
            }
        }
        let cells = full.1.max(window.1);
        let window_cells = if window.1 < cells || window.1 == 0 { window.1 } else { cells.max(largest_window(log)) };
        (cells > 0).then_some(CacheSize { mib: full.0 + window.0, cells, window_mib: window.0, window_cells })
    }

    /// The size for another number of cells.
    pub fn at(self, cells: u32) -> CacheSize {
        let grown = |mib: f64, from: u32, to: u32| mib * f64::from(to) / f64::from(from.max(1));
        let full = grown(self.mib - self.window_mib, self.cells, cells);
        let window_mib = grown(self.window_mib, self.cells.min(self.window_cells), cells.min(self.window_cells));
        CacheSize { mib: full + window_mib, cells, window_mib, ..self }
    }
}

/// MiB of one sequence and the cells, where it is the line of a cache.
fn parse_line(line: &str) -> Option<(f64, u32)> {
    let (mib, rest) = line.split_once("llama_kv_cache: size =")?.1.split_once("MiB (")?;
    let (cells, rest) = rest.split_once("cells")?;
    let streams = rest.split_once("seqs")?.0.rsplit('/').next()?.trim().parse::<f64>().ok()?;
    Some((mib.trim().parse::<f64>().ok()? / streams.max(1.0), cells.trim().parse().ok()?))
}

/// What llama_kv_cache_iswa gives a layer with a window in a context that is long enough: room for the window and for the
/// tokens that are computed at once, in steps of 256. 0 where the log does not say.
fn largest_window(log: &str) -> u32 {
    let number = |name: &str| {
        let (_, value) = log.lines().find_map(|line| line.split_once(name))?;
        value.trim_start().strip_prefix('=')?.trim().parse::<u32>().ok()
    };
    let cells = number("print_info: n_swa ").zip(number("llama_context: n_ubatch "));
    cells.map_or(0, |(window, batch)| (window + batch).next_multiple_of(256))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Captured: Gemma-3-270M, llama-perplexity -c 1024 --chunks 1 -lv 4, f16.
    const F16: &str = "\
0.13.154.035 I print_info: n_swa                 = 512
0.13.273.965 I llama_context: constructing llama_context
0.13.299.422 I llama_context: n_ubatch              = 512
0.13.299.671 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 1024 cells
0.13.299.782 I llama_kv_cache:        CPU KV buffer size =     6.00 MiB
0.13.303.011 I llama_kv_cache: size =    6.00 MiB (  1024 cells,   3 layers,  2/2 seqs), K (f16):    3.00 MiB, V (f16):    3.00 MiB
0.13.303.021 I llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
0.13.303.128 I llama_kv_cache:        CPU KV buffer size =    30.00 MiB
0.13.465.874 I llama_kv_cache: size =   30.00 MiB (  1024 cells,  15 layers,  2/2 seqs), K (f16):   15.00 MiB, V (f16):   15.00 MiB
";

    /// The same with srft4,0=srft8 for both, of which the guard has raised three layers.
    const MIXED: &str = "\
0.38.879.436 I print_info: n_swa                 = 512
0.38.908.193 I llama_context: constructing llama_context
0.38.908.565 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 1024 cells
0.38.908.654 W guard: layer 5: K raised from srft4 to delta4: its norms have gains of 2.3 for queries and 4.0 for keys (rms), scores would be wrong by 0.7; +0.01 bits/value of K (guard=off keeps srft4)
0.38.908.945 I llama_kv_cache: size =    1.72 MiB (  1024 cells,   3 layers,  2/2 seqs), K (delta4 x2 + srft4 x1, 4.67 bits/value):    0.88 MiB, V (srft4, 4.50 bits/value):    0.84 MiB
0.38.908.975 I llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
0.38.915.329 I llama_kv_cache: size =    8.95 MiB (  1024 cells,  15 layers,  2/2 seqs), K (srft8 x1 + delta4 x1 + srft4 x13, 4.78 bits/value):    4.48 MiB, V (srft8 x1 + srft4 x14, 4.77 bits/value):    4.47 MiB
";

    fn size(log: &str) -> CacheSize {
        CacheSize::in_log(log).unwrap()
    }

    #[test]
    fn size_is_that_of_one_sequence_with_all_layers() {
        assert_eq!((size(F16).mib, size(F16).cells), (18.0, 1024));
        assert_eq!(CacheSize::in_log("nothing"), None);
        // Raised layers are in what llama.cpp counts.
        assert!((size(MIXED).mib - (1.72 + 8.95) / 2.0).abs() < 1e-9);
        assert!((size(MIXED).window_mib - 8.95 / 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_first_of_several_contexts_counts_and_all_that_is_in_it() {
        assert_eq!(size(&F16.repeat(2)), size(F16));
        // Gemma-2 has as many layers of either kind, and two lines that are the same.
        let gemma2 = F16.replace("   6.00 MiB (", "  30.00 MiB (");
        assert_eq!(size(&gemma2).mib, 30.0);
    }

    #[test]
    fn a_window_does_not_grow_though_it_has_as_many_cells() {
        let full = size(F16);
        assert_eq!((full.window_mib, full.window_cells), (15.0, 1024));
        assert_eq!(full.at(2048).mib, 15.0 + 6.0);
        assert_eq!(full.at(2048).at(1024), full);
        // Shorter than the window all layers are alike, and grow until it is full.
        let short = size(&F16.replace("1024 cells", " 256 cells"));
        assert_eq!((short.cells, short.window_cells), (256, 1024));
        assert_eq!((short.at(512).mib, short.at(4096).mib), (36.0, 60.0 + 48.0));
    }

    #[test]
    fn a_window_that_is_full_has_the_cells_it_has() {
        let long = F16.replace("size = 1024 cells", "").replacen("(  1024 cells", "(  4096 cells", 1);
        assert_eq!((size(&long).cells, size(&long).window_mib, size(&long).window_cells), (4096, 15.0, 1024));
        assert_eq!(size(&long.replace("n_swa", "n_other")), size(&long));
        // Without a window, all grows.
        let plain = size(&F16.replace("iswa: creating     SWA", "dsa: creating indexer"));
        assert_eq!((plain.window_cells, plain.at(2048).mib), (0, 36.0));
    }
}
