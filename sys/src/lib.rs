//! The bindings of llama-cpp-sys-2, over a llama.cpp that has the KV-cache types of [`ggml_ext`].
//!
//! A program keeps its `llama-cpp-2` and adds to its Cargo.toml
//!
//! ```toml
//! [patch.crates-io]
//! llama-cpp-sys-2 = { git = "…" }
//! ```

#![allow(non_upper_case_globals, non_camel_case_types, non_snake_case)]
#![allow(unpredictable_function_pointer_comparisons)]
// Nearly all of it is generated.
#![allow(clippy::all)]

// libggml-base calls it: named here so that it is linked, after everything that needs it.
extern crate ggml_ext as _;

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// The folder of backends that are loaded at run time. There are none: `dynamic-backends` is not served.
pub const BACKENDS_DIR: Option<&str> = None;
