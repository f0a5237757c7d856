//! cmake and ninja: the machine's, else PyPI's in a folder of the cache.
//!
//! `pip install --target` rather than a virtual environment: it needs neither `venv` nor `ensurepip`, which many
//! machines lack, and the folder can be renamed into place because the binaries in it do not know where they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, Result};

use crate::fetch::{self, Retry};
use crate::progress::Spinner;
use crate::{cache, process};

pub struct BuildTools {
    pub cmake: PathBuf,
    pub ninja: PathBuf,
}

const CMAKE_AT_LEAST: (u32, u32) = (3, 18);
const PACKAGES: [&str; 2] = ["cmake>=3.28", "ninja>=1.11"];

pub fn build_tools() -> Result<BuildTools> {
    let has_cmake = version_of("cmake").is_some_and(|v| v >= CMAKE_AT_LEAST);
    let has_ninja = version_of("ninja").is_some();
    if has_cmake && has_ninja {
        return Ok(BuildTools { cmake: "cmake".into(), ninja: "ninja".into() });
    }
    let dir = cache::root()?.join(format!("python-{}", cache::key(&PACKAGES)));
    let dir = cache::place(&dir, install)?;
    Ok(BuildTools { cmake: binary(&dir, "cmake")?, ninja: binary(&dir, "ninja")? })
}

fn version_of(tool: &str) -> Option<(u32, u32)> {
    let done = process::run(Command::new(tool).arg("--version"), None).ok()?;
    done.status.success().then(|| parse_version(&done.stdout)).flatten()
}

/// The first `N.N` in a text.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    text.split_whitespace().find_map(|word| {
        let mut parts = word.split('.').map(|part| part.parse().ok());
        Some((parts.next()??, parts.next()??))
    })
}

fn install(dir: &Path) -> Result<()> {
    let what = "installing cmake and ninja from PyPI (this machine has none that will do)";
    let spinner = Spinner::new(what);
    Retry::default().run(
        what,
        |line| spinner.line(line),
        || {
            cache::remove(dir)?;
            let mut pip = Command::new(fetch::python());
            pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--only-binary", ":all:"]);
            // A user-wide `--user` in pip's configuration would contradict --target.
            pip.arg("--target").arg(dir).args(PACKAGES).env("PIP_USER", "0");
            process::run_ok(&mut pip).map(drop)
        },
    )
}

/// The program itself: wheels also bring a script of the same name, which would need its packages on Python's path.
fn binary(dir: &Path, name: &str) -> Result<PathBuf> {
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if entry.file_name().to_string_lossy() == file
                && folder.ends_with("bin")
                && !fs::read(&path)?.starts_with(b"#!")
            {
                return Ok(path);
            }
        }
    }
    Err(anyhow!("the wheels in {} brought no {name}: install {name} yourself, or remove that folder", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(parse_version("cmake version 3.31.6\n\nCMake suite"), Some((3, 31)));
        assert_eq!(parse_version("1.13.2.git.kitware"), Some((1, 13)));
        assert_eq!(parse_version("none"), None);
    }

    #[test]
    fn scripts_are_not_binaries() {
        let scratch = cache::Scratch::new().unwrap();
        for (path, text) in [("bin/tool", "#!/usr/bin/python3"), ("tool/data/bin/tool", "\x7fELF"), ("tool/tool", "x")]
        {
            let path = scratch.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        if cfg!(unix) {
            assert!(binary(scratch.path(), "tool").unwrap().ends_with("tool/data/bin/tool"));
        }
        assert!(binary(scratch.path(), "other").is_err());
    }
}
