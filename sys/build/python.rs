//! Build tools from PyPI, for machines that lack them.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use crate::{Result, Setup};

/// The folder that holds `package`, below OUT_DIR. An error tells how to do without.
pub fn install(setup: &Setup, package: &str) -> Result<PathBuf> {
    let folder = setup.out.join("pypi").join(package);
    if folder.is_dir() {
        return Ok(folder);
    }
    println!("cargo::warning=this machine has no {package}: installing PyPI's below OUT_DIR");
    let unfinished = folder.with_extension("part");
    let mut pip = Command::new(env::var_os("KV_PYTHON").unwrap_or_else(|| "python3".into()));
    pip.args([
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--only-binary",
        ":all:",
        "--upgrade",
    ]);
    pip.arg("--target").arg(&unfinished).arg(package).env("PIP_USER", "0");
    let why = match pip.output() {
        Ok(done) if done.status.success() => {
            std::fs::rename(&unfinished, &folder)?;
            return Ok(folder);
        }
        Ok(done) => String::from_utf8_lossy(&done.stderr).trim().to_string(),
        Err(e) => format!("cannot run {}: {e}", pip.get_program().to_string_lossy()),
    };
    Err(format!("{package} is needed and not on this machine: install it, or python3 with pip.\n{why}").into())
}
