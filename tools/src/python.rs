//! cmake and ninja: the machine's, else PyPI's in a folder of the cache, in the versions and with the hashes of sys/pins.
//!
//! `pip install --target` rather than a virtual environment: it needs neither `venv` nor `ensurepip`, which many
//! machines lack, and the folder can be renamed into place because the binaries in it do not know where they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, Result};

use crate::fetch::{self, Retry};
use crate::{cache, pip, process, project_root};

pub struct BuildTools {
    pub cmake: PathBuf,
    pub ninja: PathBuf,
}

const CMAKE_AT_LEAST: (u32, u32) = (3, 18);

/// Where version and hashes of a package are.
fn pins(package: &str) -> PathBuf {
    project_root().join("sys").join("pins").join(format!("{package}.txt"))
}

pub fn build_tools() -> Result<BuildTools> {
    let has_cmake = version_of("cmake").is_some_and(|v| v >= CMAKE_AT_LEAST);
    let has_ninja = version_of("ninja").is_some();
    if has_cmake && has_ninja {
        return Ok(BuildTools { cmake: "cmake".into(), ninja: "ninja".into() });
    }
    let files = ["cmake", "ninja"].map(pins);
    let texts: Vec<_> = files.iter().map(fs::read).collect::<Result<_, _>>()?;
    let dir = cache::root()?.join(format!("python-{}", cache::key(&texts)));
    let dir = cache::place(&dir, |part| install(&files, part, &fetch::python(), &Retry::default()))?;
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

fn install(pins: &[PathBuf], dir: &Path, python: &Path, retry: &Retry) -> Result<()> {
    let what = "installing cmake and ninja from PyPI (this machine has none that will do)";
    fetch::pip(what, retry, &mut pip::install(python.as_os_str(), pins, dir), || cache::remove(dir))
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
    fn pins_have_a_hash_for_every_wheel() {
        for package in ["cmake", "ninja", "libclang"] {
            let text = fs::read_to_string(pins(package)).unwrap();
            let wheels: Vec<_> = text.lines().filter_map(|l| l.strip_prefix("#   ")).collect();
            let words: Vec<_> = text.lines().filter(|l| !l.starts_with('#')).flat_map(str::split_whitespace).collect();
            let hashes: Vec<_> = words.iter().filter_map(|w| w.strip_prefix("--hash=sha256:")).collect();
            let version = words[0].strip_prefix(&format!("{package}==")).expect("name and version come first");
            assert!(wheels.iter().all(|w| w.starts_with(&format!("{package}-{version}-")) && w.ends_with(".whl")));
            assert!(hashes.iter().all(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit())));
            assert_eq!(wheels.len(), hashes.len(), "{package}");
            // Machines that this project is built on.
            let any_of = [
                &["manylinux2014_x86_64", "manylinux2010_x86_64"][..],
                &["manylinux2014_aarch64"],
                &["musllinux_1_2_x86_64"],
                &["macosx_11_0_arm64", "universal2"],
                &["macosx_10_9_x86_64", "universal2"],
                &["win_amd64"],
            ];
            for names in any_of {
                assert!(
                    wheels.iter().any(|w| names.iter().any(|n| w.contains(n))),
                    "{package}: no wheel for {names:?}"
                );
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn only_wheels_with_a_pinned_hash_are_installed() {
        let scratch = cache::Scratch::new().unwrap();
        let at = |name: &str| scratch.path().join(name);
        for (path, text) in [
            ("thing/data/bin/thing", "\x7fELF"),
            ("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"),
            ("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("thing-1.0.dist-info/RECORD", ""),
        ] {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), text).unwrap();
        }
        let wheel = "thing-1.0-py3-none-any.whl";
        let mut zip = Command::new(fetch::python());
        zip.args(["-m", "zipfile", "-c", wheel, "thing", "thing-1.0.dist-info"]).current_dir(scratch.path());
        process::run_ok(&mut zip).unwrap();
        let right = cache::sha256_file(&at(wheel)).unwrap();
        let wrong = right.replace(|c: char| c.is_ascii_digit(), "a");
        let install = |pin: &str, to: &str| {
            let pins = at("pins.txt");
            fs::write(&pins, format!("--no-index\n--find-links {}\nthing==1.0{pin}\n", scratch.path().display()))?;
            super::install(&[pins], &at(to), &fetch::python(), &Retry { waits: Vec::new() })
        };
        let e = format!("{:#}", install(&format!(" --hash=sha256:{wrong}"), "wrong").unwrap_err());
        assert!(e.contains(&wrong) && e.contains(&right) && !at("wrong").exists(), "{e}");
        assert!(install("", "none").is_err() && !at("none").exists(), "a wheel without a hash was installed");
        install(&format!(" --hash=sha256:{wrong} --hash=sha256:{right}"), "right").unwrap();
        assert!(binary(&at("right"), "thing").unwrap().ends_with("thing/data/bin/thing"));
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
