//! What `cargo kv` does, as a library: `main.rs` only reads the command line.
//!
//! From the bottom up: `cache` (where things are kept), `process` and `progress` (how children are run and shown),
//! `fetch` (downloads), `patch` and `source` (llama.cpp's tree), `build_tree` (its tools), `metal` (shaders on the CPU),
//! and then the verbs.

pub mod bench;
pub mod build_tree;
pub mod cache;
pub mod compare;
pub mod counts;
pub mod cpu;
pub mod cross;
pub mod cuda;
pub mod fetch;
pub mod mca;
pub mod metal;
pub mod model;
pub mod needle;
pub mod pair;
pub mod patch;
#[path = "../../sys/build/pip.rs"]
mod pip;
pub mod process;
pub mod progress;
pub mod python;
pub mod run;
pub mod source;
pub mod suite;
pub mod table;
pub mod types;

use std::path::PathBuf;

/// The checkout this command was compiled from: patches, CMakeLists.txt and the pins are read there.
pub fn project_root() -> PathBuf {
    let tools = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tools.parent().map(PathBuf::from).unwrap_or(tools)
}
