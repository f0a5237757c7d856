//! Build tools from PyPI, for machines that lack them.

use std::env;
use std::fs;
use std::path::PathBuf;

use crate::{pip, Result, Setup};

/// The folder that holds `package`, below OUT_DIR; version and hashes are those of pins/. An error tells how to do without.
pub fn install(setup: &Setup, package: &str) -> Result<PathBuf> {
    let pins = setup.project.join("sys").join("pins").join(format!("{package}.txt"));
    let text = fs::read_to_string(&pins).map_err(|e| format!("cannot read {}: {e}", pins.display()))?;
    let pinned = text.split_whitespace().find(|word| word.contains("==")).ok_or("a pin has no version")?;
    let folder = setup.out.join("pypi").join(pinned);
    if folder.is_dir() {
        return Ok(folder);
    }
    println!("cargo::warning=this machine has no {package}: installing {pinned} of PyPI below OUT_DIR");
    let unfinished = setup.out.join("pypi").join(format!("{package}.part"));
    // Of a build that was interrupted.
    let _ = fs::remove_dir_all(&unfinished);
    let python = env::var_os("KV_PYTHON").unwrap_or_else(|| "python3".into());
    let why = match pip::install(&python, &[pins], &unfinished).output() {
        Ok(done) if done.status.success() => {
            fs::rename(&unfinished, &folder)?;
            return Ok(folder);
        }
        Ok(done) => String::from_utf8_lossy(&done.stderr).trim().to_string(),
        Err(e) => format!("cannot run {}: {e}", python.to_string_lossy()),
    };
    Err(format!("{package} is needed and not on this machine: install it, or python3 with pip.\n{why}").into())
}
