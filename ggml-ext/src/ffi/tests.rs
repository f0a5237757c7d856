use super::*;
use crate::spec::registry;
use std::cell::Cell;

#[test]
fn a_panic_becomes_an_error() {
    assert_eq!(guarded(7, || panic!("injected")), 7);
    assert!(!report(|| panic!("injected")));
    assert!(!report(|| Err("a reason".into())) && report(|| Ok(())));
}

thread_local! {
    static PANIC: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn panic_where_asked() {
    if PANIC.take() {
        panic!("injected");
    }
}

/// What a function leaves in a caller's buffer that nobody initialised, and what it answers.
fn message_of<T>(call: impl FnOnce(*mut c_char, usize) -> T) -> (T, String) {
    let mut buffer = [0x5au8; 256];
    let answer = call(buffer.as_mut_ptr().cast(), buffer.len() - 1);
    assert_eq!(buffer[buffer.len() - 1], 0x5a, "it was written behind the buffer");
    let message = CStr::from_bytes_until_nul(&buffer).expect("a message is terminated");
    (answer, message.to_str().expect("it is text").to_string())
}

#[test]
#[expect(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all calls: what is pointed to is there or null, and the buffer as large as said"
)]
fn messages_are_written_whatever_happens() {
    let layer = CLayer::plain(2, 64);
    let id = registry::id_of("srft4").expect("a family");
    let spec = registry::id_of("srft4,0=srft8").expect("a spec");
    let (null, none) = (std::ptr::null(), std::ptr::null_mut());
    // Each answers true where it succeeds.
    type Call<'a> = (&'a str, &'a dyn Fn(*mut c_char, usize) -> bool);
    let calls: [Call; 8] = [
        ("parse", &|err, n| unsafe { ggml_ext_type_parse(c"srft4".as_ptr(), err, n) >= 0 }),
        ("check_cache", &|err, n| unsafe {
            ggml_ext_check_cache(id, false, id, false, 2, std::ptr::null(), false, err, n)
        }),
        ("idle_parts", &|err, n| unsafe {
            ggml_ext_idle_parts(spec, b"aa".as_ptr(), 2, err, n);
            true
        }),
        ("resolve", &|err, n| unsafe { ggml_ext_resolve(id, b'k' as c_char, &layer, err, n) >= 0 }),
        ("attention_supports", &|err, n| unsafe { ggml_ext_attention_supports(null, err, n) }),
        ("state_header_rest", &|err, n| unsafe { ggml_ext_state_header_rest(null.cast(), null.cast(), err, n) >= 0 }),
        ("state_check_meta", &|err, n| unsafe {
            ggml_ext_state_check_meta(null.cast(), 0, null.cast(), null.cast(), 0, err, n)
        }),
        ("state_check", &|err, n| unsafe { ggml_ext_state_check(null.cast(), 0, null.cast(), none, err, n) }),
    ];
    for (name, call) in calls {
        // The last four are given nothing, and say so.
        let (ok, said) = message_of(call);
        assert_eq!(said.is_empty(), ok, "{name}: {said:?}");
        PANIC.set(true);
        let (ok, said) = message_of(call);
        assert!(!PANIC.take(), "{name} has its message from somewhere else");
        assert!(said.contains("injected"), "{name}: {said:?}");
        assert!(!ok || name == "idle_parts", "{name}: a panic is no success");
        // No room, or none wanted.
        PANIC.set(true);
        call(std::ptr::null_mut(), 0);
        assert!(!PANIC.take());
    }
}

#[test]
fn what_is_not_there_is_refused() {
    let null = std::ptr::null();
    let cache = [0u8; 8];
    // SAFETY: null, or memory as said.
    unsafe {
        assert!(!ggml_ext_set_rows_supports(null, null, null) && !ggml_ext_set_rows(null, null, null, 8, 0, 1));
        assert!(!ggml_ext_get_rows_supports(null, null, null) && !ggml_ext_get_rows(null, null, null, 0, 1));
        assert!(!ggml_ext_copy_supports(null, null) && !ggml_ext_copy(null, null, 0, 1));
        assert!(!ggml_ext_mul_mat_supports(null, null, null) && !ggml_ext_mul_mat(null, null, null, 0, 1));
        assert!(!ggml_ext_multiply(null, null, null, 0, 1));
        assert!(!ggml_ext_attention_compute(std::ptr::null(), 0, 1, std::ptr::null_mut(), 0));
        assert_eq!(ggml_ext_attention_work_size(std::ptr::null(), 1), 0);
        assert!(!ggml_ext_encode(148, std::ptr::null(), std::ptr::null_mut(), 128), "no values");
        assert!(!ggml_ext_decode(148, cache.as_ptr(), std::ptr::null_mut(), 100), "no whole row");
        assert!(ggml_ext_metal_source(std::ptr::null()).is_null());
        ggml_ext_not_served(null);
    }
    assert!(thread(1, 1).is_err() && thread(-1, 2).is_err() && thread(0, 0).is_err());
}

#[test]
fn without_layers_no_part_of_a_spec_is_idle() {
    let spec = registry::id_of("srft4,0=f16").expect("a spec");
    // SAFETY: null, or as many characters as said, and a buffer as large as said.
    let idle =
        |layers: *const u8| message_of(|message, n| unsafe { ggml_ext_idle_parts(spec, layers, 1, message, n) }).1;
    assert!(idle(b"-".as_ptr()).contains("0=f16 does nothing"));
    assert_eq!(idle(std::ptr::null()), "");
}

#[test]
fn every_function_that_c_calls_is_guarded() {
    let files = [
        include_str!("attention.rs"),
        include_str!("cache.rs"),
        include_str!("rows.rs"),
        include_str!("state.rs"),
        include_str!("types.rs"),
    ];
    let exported: Vec<&str> = files.iter().flat_map(|source| source.split("#[no_mangle]\n").skip(1)).collect();
    assert!(exported.len() > 30, "{} functions", exported.len());
    for text in exported {
        let body = text.split("\n}\n").next().unwrap_or_default();
        let guards = ["guarded(", "answered(", "noted(", "report(", "ggml_ext_type_parse("];
        assert!(guards.iter().any(|g| body.contains(g)), "it could unwind into C:\n{body}");
        let has_buffer = ["err: *mut c_char", "message: *mut c_char"].iter().any(|p| body.contains(p));
        let answers = ["answered(", "noted("].iter().any(|g| body.contains(g));
        assert!(!has_buffer || answers, "a panic would leave no message:\n{body}");
    }
}
