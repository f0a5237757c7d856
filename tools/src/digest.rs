//! What a result was made from, by contents: files and programs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cache;

/// The first digits of what sha256sum prints.
pub fn file(file: &Path) -> Result<String> {
    Ok(cache::sha256_file(file)?[..16].to_string())
}

/// The libraries of ggml and llama.cpp in a folder, and what has `tool` in its name.
pub fn programs(bin: &Path, tool: &str) -> Result<String> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(bin).with_context(|| format!("cannot read {}", bin.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let counts =
            ["ggml", "llama.", "llama-common"].iter().any(|start| name.trim_start_matches("lib").starts_with(start));
        // A library's other names are links to it.
        if entry.file_type()?.is_file() && (counts || name.contains(tool)) {
            files.push(entry.path());
        }
    }
    let mut sums = files.iter().map(|file| cache::sha256_file(file)).collect::<Result<Vec<_>>>()?;
    // In an order of their own: folders have none, and a copy may have the links as files.
    sums.sort_unstable();
    sums.dedup();
    Ok(cache::key(&sums))
}
