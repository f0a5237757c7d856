//! Contexts with different cache types at work in one process at once.

use std::sync::Barrier;

use ggml_ext::KvType;
use kv_examples::{answer, load, new_context, tokens, CacheOptions};

mod common;

#[test]
fn contexts_of_two_types_on_threads_answer_as_alone() {
    let options = |name: &str| {
        let kind: KvType = name.parse().unwrap();
        CacheOptions { cache_type_k: kind, cache_type_v: kind, ..common::options() }
    };
    let (backend, model) = load(&options("f16")).unwrap();
    let prompt = tokens(&model, "1, 2, 3, 4, 5, 6, 7, 8,", true, false);
    let run = |name: &str, start: &Barrier| {
        let mut context = new_context(&backend, &model, &options(name)).unwrap();
        start.wait();
        answer(&model, &mut context, &prompt, 0, 24, |_| ()).unwrap()
    };
    let names = ["srft4", "srft8", "f16", "srft2"];
    let alone = names.map(|name| run(name, &Barrier::new(1)));
    assert!(alone.iter().all(|a| a.len() == 24));
    assert_ne!(alone[2], alone[3], "2 bits answer as 16: is the cache read at all?");
    for _ in 0..3 {
        let start = Barrier::new(names.len());
        let together = std::thread::scope(|scope| {
            let (run, start) = (&run, &start);
            names.map(|name| scope.spawn(move || run(name, start))).map(|t| t.join().unwrap())
        });
        assert_eq!(together, alone);
    }
}
