//! ggml-ext/include/ggml-ext.h is generated from the C boundary in ggml-ext/src: structs, functions, comments, and the list
//! of entry points that the shim keeps in its library. A change of either without the other fails here.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use cbindgen::{Bindings, Builder, Config, DocumentationStyle, ItemType, Language, Style};

/// Where structs and functions of the boundary are, in the order of the header.
const SOURCES: [&str; 9] = [
    "ffi/types.rs",
    "ffi/cache.rs",
    "tensor.rs",
    "ffi/rows.rs",
    "attention/recent.rs",
    "attention/mod.rs",
    "ffi/attention.rs",
    "state.rs",
    "ffi/state.rs",
];

/// Names of Rust's that are others in C.
const NAMES: [(&str, &str); 11] = [
    ("CType", "ggml_ext_type"),
    ("CLayer", "ggml_ext_layer"),
    ("Tensor", "ggml_ext_tensor"),
    ("View", "ggml_ext_view"),
    ("RecentRows", "ggml_ext_recent_rows"),
    ("AttentionOp", "ggml_ext_attention"),
    ("CStateLayer", "ggml_ext_state_layer"),
    ("Range", "ggml_ext_state_range"),
    ("CStateCache", "ggml_ext_state_cache"),
    ("CState", "ggml_ext_state"),
    ("Untyped", "void"),
];

const ABOVE: &str = "\
// The C boundary of ggml-ext: KV-cache types that ggml does not have.
//
// Generated from ggml-ext/src/ffi, comments included: change it there. `cargo test -p kv --test header` compares the two and
// writes the new text.
//
// Nothing here knows of ggml: tensors cross as plain descriptions. The shim (../shim) is the only code that knows both
// sides. No function unwinds or aborts; what can fail says so in its result and writes a message into `err`, always
// terminated, also after a panic inside; it is empty where nothing is to be said.";

/// `excluded`: constants that C does not know.
fn config(excluded: Vec<String>) -> Config {
    let mut config = Config {
        language: Language::C,
        style: Style::Tag,
        cpp_compat: true,
        pragma_once: true,
        no_includes: true,
        sys_includes: ["stdbool.h", "stddef.h", "stdint.h"].map(String::from).to_vec(),
        usize_is_size_t: true,
        documentation_style: DocumentationStyle::C99,
        header: Some(ABOVE.into()),
        line_length: 130,
        tab_width: 4,
        ..Config::default()
    };
    config.export.item_types = vec![ItemType::Constants, ItemType::Structs, ItemType::Typedefs, ItemType::Functions];
    config.export.rename = NAMES.map(|(rust, c)| (rust.into(), c.into())).into();
    config.export.exclude = excluded;
    // It stands for void, which needs no definition.
    config.export.exclude.push("Untyped".into());
    config
}

fn bindings(excluded: Vec<String>) -> (Bindings, String) {
    let src = kv::project_root().join("ggml-ext/src");
    let mut builder = Builder::new().with_config(config(excluded));
    for file in SOURCES {
        builder = builder.with_src(src.join(file));
    }
    let bindings = builder.generate().expect("the boundary can be written in C");
    let mut text = Vec::new();
    bindings.write(&mut text);
    (bindings, String::from_utf8(text).expect("it is text"))
}

/// The header as the sources have it.
fn generated() -> String {
    // The files have constants for Rust too; those for C have the prefix.
    let (_, text) = bindings(Vec::new());
    let constants = text.lines().filter_map(|l| l.strip_prefix("#define ")?.split(' ').next());
    let excluded = constants.filter(|name| !name.starts_with("GGML_EXT_")).map(String::from).collect();
    let (bindings, text) = bindings(excluded);
    let text = text.replace("//\n// # Safety\n// ", "// Safety: ").replace("\n\n\n", "\n");

    let list = Path::new(env!("CARGO_TARGET_TMPDIR")).join("entry-points");
    bindings.generate_symfile(&list);
    let symbols = fs::read_to_string(&list).expect("it was just written");
    let functions: Vec<&str> =
        symbols.lines().filter_map(|l| l.trim().strip_suffix(';')).filter(|l| l.starts_with("ggml_ext_")).collect();
    assert!(functions.len() > 30, "{symbols}");

    let mut all = text.trim_end().to_string();
    all.push_str("\n\n// Every function above, for code that must name them all.\n#define GGML_EXT_ENTRY_POINTS(X)");
    for f in functions {
        let _ = write!(all, " \\\n    X({f})");
    }
    all.push('\n');
    all
}

#[test]
fn the_header_is_what_the_sources_say() {
    let path = kv::project_root().join("ggml-ext/include/ggml-ext.h");
    let (now, committed) = (generated(), fs::read_to_string(&path).expect("the header is there"));
    if now == committed {
        return;
    }
    let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ggml-ext.h");
    fs::write(&new, &now).expect("cargo's own folder for this");
    let at = now.lines().zip(committed.lines()).position(|(a, b)| a != b);
    let line = at.unwrap_or_else(|| now.lines().count().min(committed.lines().count()));
    panic!(
        "ggml-ext/include/ggml-ext.h differs from ggml-ext/src/ffi in line {}:\n  header:  {}\n  sources: {}\n\
         If the change is wanted: cp {} {}",
        line + 1,
        committed.lines().nth(line).unwrap_or("(its end)"),
        now.lines().nth(line).unwrap_or("(their end)"),
        new.display(),
        path.display()
    );
}

#[test]
fn every_exported_function_is_in_a_source_of_the_header() {
    let src = kv::project_root().join("ggml-ext/src");
    let (mut folders, mut found) = (vec![src.clone()], 0);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(&folder).expect("a folder of the crate").flatten().map(|f| f.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if fs::read_to_string(&path).is_ok_and(|text| text.lines().any(|l| l.trim() == "#[no_mangle]")) {
                assert!(SOURCES.iter().any(|s| src.join(s) == path), "{} is not in SOURCES", path.display());
                found += 1;
            }
        }
    }
    assert!(found >= 5, "{found} files export functions");
}
