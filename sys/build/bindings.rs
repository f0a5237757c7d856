//! The bindings: bindgen over the headers of the original crate, with its choices, so that the items are the same.

use std::env;
use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::Command;

use bindgen::callbacks::{EnumVariantCustomBehavior, EnumVariantValue, ParseCallbacks};

use crate::{has, python, Result, Setup};

/// A patch widens `ggml_type` by an enumerator that says nothing to a program; the original has none.
#[derive(Debug)]
struct HideOurs;

impl ParseCallbacks for HideOurs {
    fn enum_variant_behavior(
        &self,
        _: Option<&str>,
        name: &str,
        _: EnumVariantValue,
    ) -> Option<EnumVariantCustomBehavior> {
        name.starts_with("GGML_TYPE_EXT_").then_some(EnumVariantCustomBehavior::Hide)
    }
}

pub fn write(setup: &Setup, source: &Path) -> Result<()> {
    let mut builder = bindgen::Builder::default()
        .header(source.join("wrapper.h").display().to_string())
        .clang_arg(format!("-I{}", source.join("llama.cpp/include").display()))
        .clang_arg(format!("-I{}", source.join("llama.cpp/ggml/include").display()))
        .derive_partialeq(true)
        .allowlist_item("ggml_.*")
        .allowlist_item("gguf_.*")
        .allowlist_item("llama_.*")
        .allowlist_recursively(false)
        .parse_callbacks(Box::new(HideOurs))
        .raw_line("type FILE = ::std::os::raw::c_void;")
        .prepend_enum_name(false);
    if has("common") {
        builder = builder.clang_arg("-DLLAMA_RS_BUILD_COMMON");
    }
    if let Some(include) = provide_libclang(setup)? {
        builder = builder.clang_arg(format!("-I{include}"));
    }
    if setup.check_only {
        builder = builder.clang_args(without_a_system(setup)?);
    }
    builder.generate()?.write_to_file(setup.out.join("bindings.rs"))?;
    Ok(())
}

/// For a target whose C library is not on this machine. All that the headers want of one is `FILE`, which is bound as nothing
/// that one can look into; numbers of so many bits are the compiler's, and it knows the target.
fn without_a_system(setup: &Setup) -> Result<[String; 3]> {
    let folder = setup.out.join("headers");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("stdio.h"), "typedef struct FILE FILE;\n")?;
    Ok(["-ffreestanding".into(), "-isystem".into(), folder.display().to_string()])
}

/// Where the machine has no libclang, PyPI's; that one comes without the compiler's own headers, whose folder is returned.
fn provide_libclang(setup: &Setup) -> Result<Option<String>> {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    // bindgen panics where it finds none, and has no other way to ask.
    if catch_unwind(bindgen::clang_version).is_ok() {
        return Ok(None);
    }
    let folder = python::install(setup, "libclang")?.join("clang").join("native");
    env::set_var("LIBCLANG_PATH", &folder);
    let asked = Command::new(env::var("CC").unwrap_or("cc".into())).arg("-print-file-name=include").output()?;
    Ok(Some(String::from_utf8_lossy(&asked.stdout).trim().to_string()))
}
