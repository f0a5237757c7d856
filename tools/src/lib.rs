//! What users run as `cargo kv`, as a library, because the developers' commands (`dev/`) stand on the same ground.
//!
//! From the bottom up: `cache` (where things are kept), `process` and `progress` (how children are run and shown),
//! `fetch` (downloads), `patch` and `source` (llama.cpp's tree), `build_tree` (its tools), `server` (one of them), the commands,
//! and `cli`.

pub mod bench;
pub mod build_tree;
pub mod cache;
pub mod calibrate;
pub mod cli;
pub mod compare;
pub mod cpu;
pub mod digest;
pub mod diverge;
pub mod drift;
pub mod fetch;
pub mod http;
pub mod layers;
pub mod model;
pub mod needle;
pub mod pair;
pub mod patch;
#[path = "../../sys/build/pip.rs"]
mod pip;
pub mod plan;
mod plot;
pub mod process;
pub mod progress;
pub mod python;
pub mod run;
pub mod server;
pub mod source;
pub mod table;
pub mod tasks;
pub mod types;

use std::path::PathBuf;

/// The checkout this command was compiled from: patches, CMakeLists.txt and the pins are read there.
pub fn project_root() -> PathBuf {
    let tools = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tools.parent().map(PathBuf::from).unwrap_or(tools)
}
