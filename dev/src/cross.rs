//! What building and running for another machine takes: Rust targets, cross compilers, emulators.
//!
//! Each is looked for, installed where that can be done without asking (rustup; apt by root), and otherwise named, so that
//! the caller can report what is missing instead of failing.

use std::path::PathBuf;
use std::process::Command;

use kv::process;
use kv::progress::Spinner;

/// A program and the Debian packages that bring it.
pub struct Program {
    pub name: &'static str,
    pub packages: &'static [&'static str],
}

pub const AARCH64: &str = "aarch64-unknown-linux-gnu";
pub const AARCH64_GCC: Program =
    Program { name: "aarch64-linux-gnu-gcc", packages: &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"] };
pub const AARCH64_GXX: Program = Program { name: "aarch64-linux-gnu-g++", packages: &["g++-aarch64-linux-gnu"] };
pub const QEMU: Program = Program { name: "qemu-aarch64", packages: &["qemu-user"] };

/// Where the loader and the C library of emulated programs are.
pub const AARCH64_ROOT: &str = "/usr/aarch64-linux-gnu";

/// The standard library of a target; an error says what is missing.
pub fn rust_target(target: &str) -> Result<(), String> {
    if has_target(target) {
        return Ok(());
    }
    let spinner = Spinner::new(&format!("rustup target add {target}"));
    let added = process::run(Command::new("rustup").args(["target", "add", target]), None);
    drop(spinner);
    let why = match added {
        _ if has_target(target) => return Ok(()),
        Ok(done) => process::tail(&done.stderr, 1),
        Err(_) => "there is no rustup here".to_string(),
    };
    Err(format!("no Rust target {target} (rustup target add {target}: {why})"))
}

fn has_target(target: &str) -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let asked = process::run(Command::new(rustc).args(["--print", "target-libdir", "--target", target]), None);
    asked.is_ok_and(|done| std::fs::read_dir(done.stdout.trim()).is_ok_and(|mut files| files.next().is_some()))
}

/// All of these programs; an error says which are missing and what brings them.
pub fn programs(wanted: &[Program]) -> Result<(), String> {
    let missing = || -> Vec<&Program> { wanted.iter().filter(|p| find(p.name).is_none()).collect() };
    if missing().is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing().iter().flat_map(|p| p.packages).copied().collect();
    if !packages.is_empty() && is_root() && find("apt-get").is_some() {
        let _spinner = Spinner::new(&format!("apt-get install {}", packages.join(" ")));
        let apt = |words: &[&str]| {
            let mut c = Command::new("apt-get");
            c.args(words).env("DEBIAN_FRONTEND", "noninteractive");
            process::run(&mut c, None).is_ok_and(|done| done.status.success())
        };
        let install = [&["install", "--yes", "--no-install-recommends"], packages.as_slice()].concat();
        // A fresh container has no lists.
        let _ = apt(&install) || (apt(&["update"]) && apt(&install));
    }
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|p| p.name).collect();
    let packages: Vec<&str> = missing.iter().flat_map(|p| p.packages).copied().collect();
    Err(format!("no {} (on Debian: apt-get install {})", names.join(", "), packages.join(" ")))
}

/// A program of the PATH.
pub fn find(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn is_root() -> bool {
    #[cfg(unix)]
    // SAFETY: asks and changes nothing.
    return unsafe { libc::geteuid() } == 0;
    #[cfg(not(unix))]
    return false;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let there = Program { name: "sh", packages: &["dash"] };
        if cfg!(unix) {
            assert_eq!(programs(&[there]), Ok(()));
        }
        // Nothing is installed for a package that nobody has.
        let nowhere = Program { name: "kv-no-such-program", packages: &[] };
        let said = programs(&[nowhere]).unwrap_err();
        assert!(said.contains("kv-no-such-program"), "{said}");
        assert!(rust_target("kv-no-such-target").unwrap_err().contains("kv-no-such-target"));
    }
}
