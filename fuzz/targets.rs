// What is fuzzed: functions of any bytes that must come back. cargo-fuzz runs them as libFuzzer targets (fuzz_targets/),
// `cargo kv test --only life` as a bounded run over the corpus and mutations of it, on any toolchain.

use ggml_ext::codec::delta::GROUP_CELLS;
use ggml_ext::codec::RowFormat;
use ggml_ext::groups;
use ggml_ext::isa;
use ggml_ext::lanes::Lanes;
use ggml_ext::rows as cells;
use ggml_ext::spec::{parse, Layer, Side as CacheSide};
use ggml_ext::state::{self, Header};
use ggml_ext::table::{self, Concrete};

fn pick(byte: u8) -> Concrete {
    let n = table::concrete().count();
    table::concrete().nth(byte as usize % n).expect("within the list")
}

fn finite(x: &[f32]) {
    assert!(x.iter().all(|x| x.is_finite()), "a value that is no number");
}

/// Rows of any bytes decode to finite values, and to what the scalar definition says.
pub fn rows(data: &[u8]) {
    let Some((&first, bytes)) = data.split_first() else { return };
    let (c, kernels) = (pick(first), isa::kernels());
    let (size, row_bytes) = (c.head_size, c.row_bytes());
    let stored = &bytes[..bytes.len() / row_bytes * row_bytes];
    let n = stored.len() / row_bytes;
    let (mut fast, mut slow) = (vec![0.0f32; n * size], vec![0.0f32; n * size]);
    cells::decode(c.id(), kernels, stored, &mut fast).expect("whole rows");
    cells::decode(c.id(), &isa::scalar::KERNELS, stored, &mut slow).expect("whole rows");
    if c.group_cells() == 1 {
        for row in stored.chunks_exact(row_bytes) {
            let mut key = vec![0.0f32; size];
            c.format().decode_key::<Lanes>(row, &mut key);
            finite(&key);
        }
    }
    finite(&fast);
    let largest = slow.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    for (a, b) in fast.iter().zip(&slow) {
        assert!((a - b).abs() <= 1e-3 * largest, "{}: {a} for {b}", c.name());
    }
}

/// Keys of any values, written into groups that held any bytes, in any order: all that is read is finite.
pub fn keys(data: &[u8]) {
    let Some((&first, bytes)) = data.split_first() else { return };
    let delta: Vec<Concrete> = table::concrete().filter(|c| c.group_cells() > 1).collect();
    let c = delta[first as usize % delta.len()];
    let cells = 2 * GROUP_CELLS + 5;
    let mut cache: Vec<u8> = bytes.iter().copied().cycle().take(cells * c.row_bytes()).collect();
    cache.resize(cells * c.row_bytes(), 0);
    let mut source = vec![0u8; GROUP_CELLS * c.row_bytes()];
    let Some(f) = c.format().grouped() else { return };
    let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let x: Vec<f32> = values.iter().copied().cycle().take(GROUP_CELLS * c.head_size).collect();
    groups::encode(f, isa::kernels(), &x, &mut source);
    let to: Vec<u32> = bytes.iter().take(40).map(|&b| u32::from(b) % cells as u32).collect();
    let from: Vec<u32> = (0..to.len() as u32).collect();
    let src = state::CacheRows { data: source.as_mut_ptr(), cells: GROUP_CELLS };
    let dst = state::CacheRows { data: cache.as_mut_ptr(), cells };
    // SAFETY: both hold their cells.
    unsafe { state::recode(c.id(), 1, src, dst, &from, &to) }.expect("cells within both");
    let mut back = vec![0.0f32; cells * c.head_size];
    groups::decode(f, isa::kernels(), &cache, &mut back);
    finite(&back);
}

/// Any text is a spec or an error, and any spec has a type for any layer or an error.
pub fn spec(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match parse(&text) {
        Ok(spec) => {
            for side in [CacheSide::K, CacheSide::V] {
                for n_layer in [0, 1, 32] {
                    if spec.check(side, n_layer).is_ok() {
                        for index in 0..n_layer {
                            let layer = Layer { index, n_layer, head_size: 128, sliding: index % 2 == 0 };
                            let _ = spec.member(&layer).0.resolve(side, &layer);
                        }
                    }
                }
            }
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

/// Any bytes are a header or an error, with the checksum that they have and with one that fits; what is a header can be
/// compared and written again.
pub fn state(data: &[u8]) {
    let mut sealed = data.to_vec();
    if sealed.len() >= state::PREFIX_BYTES {
        sealed[..4].copy_from_slice(&state::MAGIC.to_le_bytes());
        sealed[4..8].copy_from_slice(&state::VERSION.to_le_bytes());
        let n = (sealed.len() - state::PREFIX_BYTES) as u32;
        sealed[8..12].copy_from_slice(&n.to_le_bytes());
        let sum = state::checksum(&[&sealed[..12], &sealed[state::PREFIX_BYTES..]]);
        sealed[12..20].copy_from_slice(&sum.to_le_bytes());
    }
    for bytes in [data, &sealed] {
        let Ok(header) = Header::from_bytes(bytes) else { continue };
        // Headers of an earlier version are read, and written as this one.
        if bytes[4..8] == state::VERSION.to_le_bytes() {
            assert_eq!(header.to_bytes(), bytes);
        }
        let _ = header.check(&header);
        let mut other = header.clone();
        other.caches.iter_mut().flat_map(|c| &mut c.layers).for_each(|l| l.k.kind ^= 1);
        let _ = header.check(&other);
        let (known, extensions) = (header.caches.len(), vec![data[0] as u32 % 16; header.caches.len()]);
        let context = state::Context { live: header.clone(), extensions, known, others: data[0] > 200 };
        let (_, _) = (context.check(&header), context.check_meta(&header, data));
        let meta =
            state::Header { meta_bytes: data.len() as u64, meta_sum: state::checksum(&[data]), ..header.clone() };
        let (_, _) = (context.check(&meta), context.check_meta(&meta, data));
        for cache in &header.caches {
            let cells: Vec<u32> = cache.ranges.iter().take(8).map(|r| r.from).collect();
            let _ = state::place_groups(&cells, cache.cells, &[true; 300], GROUP_CELLS);
        }
    }
}

/// A function of any bytes.
pub type Target = fn(&[u8]);

/// All of them, by name.
#[allow(dead_code)]
pub const ALL: [(&str, Target); 4] = [("rows", rows), ("keys", keys), ("spec", spec), ("state", state)];
