//! Every type once through all that programs do with it, as small as it can be: write, overwrite, read, attend to it with
//! one query and with many, on one thread and on several. `cargo kv test --soak` runs this under Miri, which sees every
//! byte that is touched and every thread that touches it, and is a thousand times slower.

use ggml_ext::random::Noise;
use ggml_ext::{attend, AttendOptions, Cache, KvType};

const HEADS: usize = 1;
const QUERY_HEADS: usize = 2;

fn values(seed: usize, n: usize) -> Vec<f32> {
    // Without a sine or logarithm: Miri varies their last bits on purpose.
    Noise::new(seed as u64).flat_row(n)
}

fn near(a: &[f32], b: &[f32], bound: f32) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound)
}

/// Cells of a cache: where cells are coded in groups of 64, more than one group.
fn cells(kind: KvType) -> usize {
    if ["delta", "band"].iter().any(|family| kind.to_string().starts_with(family)) {
        65
    } else {
        3
    }
}

/// One type on its side, f16 on the other.
fn once(kind: KvType, size: usize, as_k: bool) {
    let n = cells(kind);
    let new = |kind: KvType| Cache::new(kind, size, HEADS, n).expect("a size that is served");
    let (mut k, mut v) = if as_k { (new(kind), new(KvType::F16)) } else { (new(KvType::F16), new(kind)) };
    // The last few, which lie on both sides of a border between groups.
    let keys: Vec<f32> = (0..3).flat_map(|cell| values(cell, HEADS * size)).collect();
    k.write(n - 3, &keys).expect("three cells");
    k.write(n - 2, &keys[..HEADS * size]).expect("one cell anew");
    // All values alike, so that whatever attention looks at, it must find this one.
    let value = values(7, HEADS * size);
    v.write(0, &value.repeat(n)).expect("all cells");
    let stored = v.read(n - 1).expect("the last cell");
    let read = k.read(n - 2).expect("within the cache");
    assert!(read.iter().chain(&stored).all(|x| x.is_finite()), "{kind} {size}");

    // One query and three take different ways.
    for queries in [1, 3] {
        let q = values(5, queries * QUERY_HEADS * size);
        let with = |threads: usize| {
            let mut options = AttendOptions::default();
            options.threads = threads;
            attend(&q, QUERY_HEADS, &k, &v, n, &options).expect("caches that fit")
        };
        let (got, want) = (with(2), stored.repeat(queries * QUERY_HEADS));
        assert!(near(&got, &want, 0.03), "{kind} {size}: {:?} for {:?}", &got[..4], &want[..4]);
        if !cfg!(miri) {
            assert!(near(&got, &with(1), 1e-4), "{kind} {size}: threads change the result");
        }
    }
}

/// 80 has groups of 16, and is no power of 2.
const SIZES: &[usize] = if cfg!(miri) { &[64] } else { &[64, 80] };

fn lives(kind: KvType) {
    for &size in SIZES.iter().filter(|&&size| kind.serves_head_size(size)) {
        if kind.serves_k() {
            once(kind, size, true);
        }
        if kind.serves_v() {
            once(kind, size, false);
        }
    }
    let mut cache = Cache::new(kind, 64, HEADS, 2).expect("64 is served");
    cache.write(0, &values(1, 2 * HEADS * 64)).expect("two cells");
    let again = Cache::from_bytes(kind, 64, HEADS, cache.as_bytes().to_vec()).expect("whole cells");
    assert_eq!(cache.read(1).expect("stored"), again.read(1).expect("stored"), "{kind}");
}

#[test]
fn every_type_lives() {
    for kind in KvType::all().filter(|kind| kind.is_ours()) {
        println!("{kind}");
        lives(kind);
    }
}
