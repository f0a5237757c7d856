//! The size of a cache, from llama.cpp's log.
//!
//! ```text
//! llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells
//! llama_kv_cache: size =    8.95 MiB (   256 cells,  15 layers,  8/8 seqs), K (srft8 x1 + srft4 x14, 4.77 bits/value):    4.47 MiB, V …
//! llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
//! ```
//!
//! Hundredths of a MiB are too coarse for a small cache: q4_1 came out at 5.01 bits/value. But a cache has whole heads, and
//! the types that the line names have known bits; so the rounded size only tells how many heads there are, and the size is
//! that of so many. Where the log has no head size, or the layers of a mix differ in width, the rounded size is all there
//! is.

use crate::types;

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
    /// The size for another number of cells.
    pub fn at(self, cells: u32) -> CacheSize {
        let grown = |mib: f64, from: u32, to: u32| mib * f64::from(to) / f64::from(from.max(1));
        let full = grown(self.mib - self.window_mib, self.cells, cells);
        let window_mib = grown(self.window_mib, self.cells.min(self.window_cells), cells.min(self.window_cells));
        CacheSize { mib: full + window_mib, cells, window_mib, ..self }
    }
}

/// One of a model's caches: layers of different kinds have one each.
struct Cache {
    mib: f64,
    cells: u32,
    window: bool,
}

/// All caches of the first context in a log, together, for one of the sequences that they hold side by side.
pub fn parse_size(log: &str) -> Option<CacheSize> {
    let lines: Vec<&str> = first_context(log).lines().collect();
    let mut caches: Vec<Cache> = Vec::new();
    let mut window = false;
    for (i, line) in lines.iter().enumerate() {
        if let Some((_, kind)) = line.split_once(": creating ") {
            // By its name: in a short context it has as many cells as the others.
            window = kind.trim_start().starts_with("SWA KV cache");
        } else if let Some((_, size)) = line.split_once("llama_kv_cache: size =") {
            caches.extend(parse_cache(size, &lines[i + 1..]).map(|(mib, cells)| Cache { mib, cells, window }));
            window = false;
        }
    }
    let cells = caches.iter().map(|c| c.cells).max()?;
    let sum = |window: bool| caches.iter().filter(|c| c.window == window).fold(0.0, |sum, c| sum + c.mib);
    let most = |c: &Cache| if c.cells < cells { c.cells } else { c.cells.max(window_of(&lines)) };
    let window_cells = caches.iter().filter(|c| c.window).map(most).max().unwrap_or(0);
    Some(CacheSize { mib: sum(false) + sum(true), cells, window_mib: sum(true), window_cells })
}

/// A tool may make several contexts, llama-bench one for each test; one is enough to know the cache. What repeats within
/// one is not the same cache twice: Gemma-2 has as many layers with a window as without.
fn first_context(log: &str) -> &str {
    match log.match_indices("llama_context: constructing llama_context").nth(1) {
        Some((at, _)) => &log[..at],
        None => log,
    }
}

/// What llama_kv_cache_iswa gives a layer with a window in a context that is long enough: room for the window and for the
/// tokens that are computed at once, in steps of 256. 0 where the log does not say.
fn window_of(lines: &[&str]) -> u32 {
    let number = |name: &str| {
        let (_, value) = lines.iter().find_map(|line| line.split_once(name))?;
        value.trim_start().strip_prefix('=')?.trim().parse::<u32>().ok()
    };
    let cells = number("print_info: n_swa ").zip(number("llama_context: n_ubatch "));
    cells.map_or(0, |(window, batch)| (window + batch).next_multiple_of(256))
}

/// MiB of one sequence and the cells. `after` is the log behind the line.
fn parse_cache(line: &str, after: &[&str]) -> Option<(f64, u32)> {
    let (mib, rest) = line.split_once("MiB (")?;
    let (cells, rest) = rest.split_once("cells")?;
    let (sequences, sides) = rest.split_once("seqs")?;
    let (mib, cells): (f64, u32) = (mib.trim().parse().ok()?, cells.trim().parse().ok()?);
    let streams = sequences.rsplit('/').next()?.trim().parse::<f64>().ok()?.max(1.0);
    let rows = f64::from(cells) * streams;
    let side = |name: &str, rotation: &str| side_mib(sides.split_once(name)?.1, rows, head_size(after, rotation));
    // llama.cpp writes k_all on both lines.
    let exact = side(" K (", "attn_rot_k =").zip(side(" V (", "attn_rot_v =")).map(|(k, v)| k + v);
    Some((exact.unwrap_or(mib) / streams, cells))
}

/// `n_embd_head_k_all = 256` of the cache whose line is before these; none where its layers differ.
fn head_size(after: &[&str], mark: &str) -> Option<usize> {
    let own = after.iter().take_while(|line| !line.contains("llama_kv_cache: size ="));
    let (_, size) = own.filter(|line| line.contains(mark)).find_map(|line| line.split_once("n_embd_head_k_all ="))?;
    size.trim().parse().ok().filter(|size| *size > 0)
}

/// MiB of so many rows of one side: "srft8 x1 + srft4 x14, 4.77 bits/value):    4.47 MiB, …".
fn side_mib(text: &str, rows: f64, head_size: Option<usize>) -> Option<f64> {
    let (mix, rest) = text.split_once("):")?;
    let rounded: f64 = rest.split_once("MiB")?.0.trim().parse().ok()?;
    let exact = || {
        let head_size = head_size?;
        let head = rows * head_size as f64 * mean_bits(mix, head_size)? / 8.0 / f64::from(1 << 20);
        let whole = (rounded / head).round() * head;
        // llama.cpp computes with f32.
        ((whole - rounded).abs() < 0.0051 + 1e-6 * rounded).then_some(whole)
    };
    Some(exact().unwrap_or(rounded))
}

/// Bits per value of layers of the same width, from the names of their types; none where the mean that the line itself
/// tells, rounded, is another.
fn mean_bits(mix: &str, head_size: usize) -> Option<f64> {
    let (names, told) = match mix.split_once(", ") {
        Some((names, told)) => (names, Some(told.strip_suffix(" bits/value")?.parse::<f64>().ok()?)),
        None => (mix, None),
    };
    let (mut bits, mut layers) = (0.0, 0.0);
    for name in names.split(" + ") {
        let (name, count) = name.split_once(" x").unwrap_or((name, "1"));
        let count: f64 = count.parse().ok()?;
        bits += count * types::bits_of(name, head_size)?;
        layers += count;
    }
    let mean = bits / layers;
    told.is_none_or(|told| (told - mean).abs() < 0.0051).then_some(mean)
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
0.13.303.019 I llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
0.13.303.019 I llama_kv_cache: attn_rot_v = 0, n_embd_head_k_all = 256
0.13.303.021 I llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
0.13.303.128 I llama_kv_cache:        CPU KV buffer size =    30.00 MiB
0.13.465.874 I llama_kv_cache: size =   30.00 MiB (  1024 cells,  15 layers,  2/2 seqs), K (f16):   15.00 MiB, V (f16):   15.00 MiB
0.13.487.422 I llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
0.13.487.423 I llama_kv_cache: attn_rot_v = 0, n_embd_head_k_all = 256
";

    /// The same with srft4,0=srft8 for both, of which the guard has raised three layers.
    const MIXED: &str = "\
0.38.879.436 I print_info: n_swa                 = 512
0.38.908.193 I llama_context: constructing llama_context
0.38.908.565 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 1024 cells
0.38.908.654 W guard: layer 5: K raised from srft4 to delta4: its norms have gains of 2.3 for queries and 4.0 for keys (rms), scores would be wrong by 0.7; +0.01 bits/value of K (guard=off keeps srft4)
0.38.908.721 I llama_kv_cache:        CPU KV buffer size =     1.72 MiB
0.38.908.945 I llama_kv_cache: size =    1.72 MiB (  1024 cells,   3 layers,  2/2 seqs), K (delta4 x2 + srft4 x1, 4.67 bits/value):    0.88 MiB, V (srft4, 4.50 bits/value):    0.84 MiB
0.38.908.957 I llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
0.38.908.966 I llama_kv_cache: attn_rot_v = 0, n_embd_head_k_all = 256
0.38.908.975 I llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
0.38.915.329 I llama_kv_cache: size =    8.95 MiB (  1024 cells,  15 layers,  2/2 seqs), K (srft8 x1 + delta4 x1 + srft4 x13, 4.78 bits/value):    4.48 MiB, V (srft8 x1 + srft4 x14, 4.77 bits/value):    4.47 MiB
0.38.915.375 I llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
0.38.915.387 I llama_kv_cache: attn_rot_v = 0, n_embd_head_k_all = 256
";

    /// Captured: llama-bench -d 0 -p 16 -n 1 -ctk delta4 -ctv q4_1 -v, whose first context has 256 cells.
    const BENCH: &str = "\
print_info: n_swa                 = 512
llama_context: constructing llama_context
llama_context: n_ubatch              = 16
llama_kv_cache_iswa: creating non-SWA KV cache, size = 256 cells
llama_kv_cache: layer   0: filtered
llama_kv_cache: size =    0.23 MiB (   256 cells,   3 layers,  1/1 seqs), K (delta4, 4.75 bits/value):    0.11 MiB, V (q4_1):    0.12 MiB
llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
llama_kv_cache: attn_rot_v = 1, n_embd_head_k_all = 256
llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells
llama_kv_cache: size =    1.14 MiB (   256 cells,  15 layers,  1/1 seqs), K (delta4, 4.75 bits/value):    0.56 MiB, V (q4_1):    0.59 MiB
llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 256
llama_kv_cache: attn_rot_v = 1, n_embd_head_k_all = 256
llama_context: constructing llama_context
llama_context: n_ubatch              = 1
llama_kv_cache_iswa: creating non-SWA KV cache, size = 256 cells
llama_kv_cache: size =    0.23 MiB (   256 cells,   3 layers,  1/1 seqs), K (delta4, 4.75 bits/value):    0.11 MiB, V (q4_1):    0.12 MiB
";

    /// MiB of so many layers with one head of 256, 1024 cells and so many bits.
    fn mib(layers: f64, bits: f64) -> f64 {
        layers * 256.0 * 1024.0 * bits / 8.0 / 1048576.0
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn size_is_that_of_one_sequence() {
        let size = parse_size(F16).unwrap();
        assert_eq!((size.mib, size.cells), (18.0, 1024));
        assert_eq!(parse_size("nothing"), None);
    }

    #[test]
    fn the_first_of_several_contexts_counts_and_all_that_is_in_it() {
        assert_eq!(parse_size(&F16.repeat(2)), parse_size(F16));
        // Gemma-2 has as many layers of either kind, and two lines that are the same.
        let gemma2 = F16.replace("   6.00 MiB (", "  30.00 MiB (").replace("  3 layers", " 15 layers");
        let gemma2 = gemma2.replace("    3.00 MiB", "   15.00 MiB");
        assert_eq!(parse_size(&gemma2).unwrap().mib, 30.0);
    }

    #[test]
    fn a_window_does_not_grow_though_it_has_as_many_cells() {
        let size = parse_size(F16).unwrap();
        assert_eq!((size.window_mib, size.window_cells), (15.0, 1024));
        assert_eq!(size.at(2048).mib, 15.0 + 6.0);
        assert_eq!(size.at(2048).at(1024), size);
        // Shorter than the window all layers are alike, and grow until it is full.
        let short = parse_size(&F16.replace("1024 cells", " 256 cells")).unwrap();
        assert_eq!((short.cells, short.window_cells), (256, 1024));
        assert_eq!((short.at(512).mib, short.at(4096).mib), (36.0, 60.0 + 48.0));
    }

    #[test]
    fn a_window_that_is_full_has_the_cells_it_has() {
        let long = F16.replace("size = 1024 cells", "").replacen("(  1024 cells", "(  4096 cells", 1);
        let size = parse_size(&long).unwrap();
        assert_eq!((size.cells, size.window_mib, size.window_cells), (4096, 15.0, 1024));
        let unknown = long.replace("n_swa", "n_other");
        assert_eq!(parse_size(&unknown).unwrap(), size);
        // Without a window, all grows.
        let plain = F16.replace("iswa: creating     SWA", "dsa: creating indexer");
        assert_eq!(parse_size(&plain).unwrap().window_cells, 0);
        assert_eq!(parse_size(&plain).unwrap().at(2048).mib, 36.0);
    }

    #[test]
    fn sizes_are_exact_though_the_log_is_rounded() {
        let size = parse_size(MIXED).unwrap();
        let full = mib(1.0, 2.0 * 4.75 + 4.5) + mib(3.0, 4.5);
        let window = mib(1.0, 8.5 + 4.75 + 13.0 * 4.5) + mib(1.0, 8.5 + 14.0 * 4.5);
        assert!(close(size.mib, full + window) && close(size.window_mib, window), "{size:?}");
        // 0.11 and 0.12 MiB are 12 heads; the window has 1.15, and the line of the cache says 1.14.
        let bench = parse_size(BENCH).unwrap();
        assert!(close(bench.mib, mib(18.0, 4.75 + 5.0) / 4.0), "{bench:?}");
        assert_eq!(bench.window_cells, 768);
    }

    #[test]
    fn bits_follow_the_head_size() {
        // turbo4 has two norms a head.
        assert_eq!(
            (mean_bits("turbo4, 4.25 bits/value", 128), mean_bits("turbo4, 4.50 bits/value", 64)),
            (Some(4.25), Some(4.5))
        );
        assert_eq!(mean_bits("q8_0 x1 + f16 x3, 14.13 bits/value", 80), Some(14.125));
        assert_eq!(mean_bits("nosuch", 128), None);
    }

    #[test]
    fn what_is_not_told_is_taken_as_rounded() {
        let differ = MIXED.replace("n_embd_head_k_all = 256", "n_embd_head_k_all = -1");
        assert!(close(parse_size(&differ).unwrap().mib, (0.88 + 0.84 + 4.48 + 4.47) / 2.0));
        // A mean that is not that of the names: the raised layers are wider.
        let wide = "srft8 x1 + srft4 x1, 7.50 bits/value):    4.47 MiB";
        assert_eq!(
            (mean_bits(wide.split(')').next().unwrap(), 128), side_mib(wide, 2048.0, Some(128))),
            (None, Some(4.47))
        );
        let bare = "llama_kv_cache: size =   12.66 MiB (   256 cells,  30 layers,  8/8 seqs), K";
        assert!(close(parse_size(bare).unwrap().mib, 12.66 / 8.0));
        // A model without V.
        let none =
            "llama_kv_cache: size = 3.00 MiB ( 1024 cells, 3 layers, 2/2 seqs), K (f16): 3.00 MiB, V (f16): 0.00 MiB";
        assert_eq!(parse_size(none).unwrap().mib, 1.5);
    }
}
