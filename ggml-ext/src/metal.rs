//! The Metal shaders, as the text that Metal's compiler gets.
//!
//! The library carries shaders/ with it, so that a program needs no file beside it. (`ggml-ext/shaders` is a link to that
//! folder, so that a packaged crate has the files too.) Each of the `.metal` files becomes one
//! text: Metal compiles from memory and knows no folder, so every header stands where it is first included.

use std::ffi::{CStr, CString};
use std::sync::OnceLock;

macro_rules! files {
    ($($name:literal),+ $(,)?) => { [$(($name, include_str!(concat!("../shaders/", $name)))),+] };
}

static FILES: [(&str, &str); 13] = files![
    "kv_rows.metal",
    "kv_decode.metal",
    "kv_prefill.metal",
    "kv_args.h",
    "kv_attention.h",
    "kv_band.h",
    "kv_delta.h",
    "kv_polar.h",
    "kv_rotation.h",
    "kv_row.h",
    "kv_signs.h",
    "kv_srft.h",
    "kv_tables.h",
];

/// The shaders that can be asked for.
pub const SHADERS: [&str; 3] = ["kv_rows", "kv_decode", "kv_prefill"];

/// The whole text of one of [`SHADERS`].
pub fn source(shader: &str) -> Option<&'static CStr> {
    static TEXTS: [OnceLock<CString>; SHADERS.len()] = [const { OnceLock::new() }; SHADERS.len()];
    let index = SHADERS.iter().position(|&s| s == shader)?;
    let text = TEXTS[index].get_or_init(|| {
        let mut text = String::new();
        append(&format!("{shader}.metal"), &mut text, &mut Vec::new());
        CString::new(text).expect("shaders hold no zero byte")
    });
    Some(text)
}

/// Appends a file, unless it stands there already.
fn append(name: &str, text: &mut String, seen: &mut Vec<String>) {
    if seen.iter().any(|s| s == name) {
        return;
    }
    seen.push(name.to_string());
    let (_, file) = FILES.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("shaders/{name} is not carried"));
    for line in file.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(included) => append(included, text, seen),
            None if line == "#pragma once" => {}
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_stands_once_and_before_its_use() {
        for shader in SHADERS {
            let text = source(shader).unwrap().to_str().unwrap();
            assert!(!text.contains("#include \""), "{shader} includes a file that Metal cannot find");
            assert_eq!(text.matches("struct kv_rows_args {").count(), 1, "{shader}");
            assert!(text.find("struct kv_rows_args {") < text.find("kernel void"), "{shader}");
        }
        assert!(source("kv_other").is_none());
    }

    #[test]
    fn all_of_the_folder_is_carried() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            assert!(name.ends_with(".md") || FILES.iter().any(|(n, _)| *n == name), "shaders/{name} is not carried");
        }
    }
}
