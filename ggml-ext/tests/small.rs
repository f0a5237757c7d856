//! Every type once through all that programs do with it, as small as it can be: write, overwrite, read, attend to it with
//! one query and with many, on one thread and on several. `cargo kv test --soak` runs this under Miri, which sees every
//! byte that is touched and every thread that touches it, and is a thousand times slower.

use ggml_ext::{attend, AttendOptions, Cache, KvType};

const HEADS: usize = 1;
const QUERY_HEADS: usize = 2;

fn wave(seed: usize, n: usize) -> Vec<f32> {
    // Without the library's sine: Miri varies its last bits on purpose.
    (0..n).map(|i| ((i * 37 + seed * 101) % 64) as f32 / 32.0 - 1.0).collect()
}

fn near(a: &[f32], b: &[f32], bound: f32) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound)
}

/// Cells of a cache: where cells are coded in groups of 64, more than one group.
fn cells(kind: KvType) -> usize {
    if kind.to_string().starts_with("delta") {
        67
    } else {
        5
    }
}

/// One type on its side, f16 on the other.
fn once(kind: KvType, size: usize, as_k: bool) {
    let n = cells(kind);
    let new = |kind: KvType| Cache::new(kind, size, HEADS, n).expect("a size that is served");
    let (mut k, mut v) = if as_k { (new(kind), new(KvType::F16)) } else { (new(KvType::F16), new(kind)) };
    let keys: Vec<f32> = (0..n).flat_map(|cell| wave(cell % 3, HEADS * size)).collect();
    k.write(0, &keys).expect("all cells");
    k.write(n - 2, &keys[..HEADS * size]).expect("one cell anew");
    // All values alike, so that whatever attention looks at, it must find this one.
    let value = wave(7, HEADS * size);
    v.write(0, &value.repeat(n)).expect("all cells");
    let stored = v.read(n - 1).expect("the last cell");
    let read = k.read(n - 2).expect("within the cache");
    assert!(read.iter().chain(&stored).all(|x| x.is_finite()), "{kind} {size}");

    // One query and three take different ways.
    for queries in [1, 3] {
        let q = wave(5, queries * QUERY_HEADS * size);
        let with = |threads: usize| {
            let mut options = AttendOptions::default();
            options.threads = threads;
            attend(&q, QUERY_HEADS, &k, &v, n, &options).expect("caches that fit")
        };
        let (one, three) = (with(1), with(3));
        assert!(near(&one, &three, 1e-4), "{kind} {size}: threads change the result");
        let want = stored.repeat(queries * QUERY_HEADS);
        assert!(near(&one, &want, 0.03), "{kind} {size}: {:?} for {:?}", &one[..4], &want[..4]);
    }
}

#[test]
fn every_type_lives_and_is_attended_to() {
    for kind in KvType::all().filter(|kind| kind.is_ours()) {
        // 80 has groups of 16, and is no power of 2.
        for size in [64, 80] {
            if kind.serves_k() {
                once(kind, size, true);
            }
            if kind.serves_v() {
                once(kind, size, false);
            }
        }
    }
}

#[test]
fn bytes_come_back_as_a_cache() {
    for kind in KvType::all().filter(|kind| kind.is_ours()) {
        let mut cache = Cache::new(kind, 64, HEADS, 3).expect("64 is served");
        cache.write(0, &wave(1, 3 * HEADS * 64)).expect("three cells");
        let again = Cache::from_bytes(kind, 64, HEADS, cache.as_bytes().to_vec()).expect("whole cells");
        for cell in 0..3 {
            assert_eq!(cache.read(cell).expect("stored"), again.read(cell).expect("stored"), "{kind}");
        }
    }
}
