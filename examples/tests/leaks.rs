//! Contexts that are made and dropped leave nothing behind. glibc counts what malloc has given out, C++'s part included.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use kv_examples::{answer, load, new_context, tokens, CacheOptions};

mod common;

/// Bytes in use, in all arenas and mapped blocks.
fn in_use() -> usize {
    // SAFETY: it only reads malloc's own counts.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

#[test]
fn contexts_made_and_dropped_do_not_leak() {
    let kind = "srft4".parse().unwrap();
    let options = CacheOptions { cache_type_k: kind, cache_type_v: kind, ..common::options() };
    let (backend, model) = load(&options).unwrap();
    let prompt = tokens(&model, "1, 2, 3,", true, false);
    let once = || {
        let mut context = new_context(&backend, &model, &options).unwrap();
        answer(&model, &mut context, &prompt, 0, 2, |_| ()).unwrap();
        context
    };
    // Tables that are made once and kept.
    for _ in 0..3 {
        once();
    }
    let before = in_use();
    for _ in 0..20 {
        once();
    }
    let grown = in_use().saturating_sub(before);
    // A context has megabytes; what the library keeps in between (names of threads, say) is far below a page each.
    assert!(grown < 20 * 1024, "20 contexts left {grown} bytes");

    // The measure sees a context that is not dropped.
    let before = in_use();
    let kept = once();
    assert!(in_use() - before > 1 << 20);
    drop(kept);
}
