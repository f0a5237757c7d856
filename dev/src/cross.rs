//! What building and running for another machine takes: Rust targets, cross compilers, emulators.
//!
//! Each is looked for and nothing is installed: a test changes nothing on the machine. What is missing is named with the
//! command that brings it.

use std::path::PathBuf;
use std::process::Command;

use kv::process;

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

/// The standard library of a target; an error says how to get it.
pub fn rust_target(target: &str) -> Result<(), String> {
    has_target(target).then_some(()).ok_or_else(|| format!("no Rust target {target}: rustup target add {target}"))
}

fn has_target(target: &str) -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let asked = process::run(Command::new(rustc).args(["--print", "target-libdir", "--target", target]), None);
    asked.is_ok_and(|done| std::fs::read_dir(done.stdout.trim()).is_ok_and(|mut files| files.next().is_some()))
}

/// All of these programs; an error says which are missing and what brings them.
pub fn programs(wanted: &[Program]) -> Result<(), String> {
    let missing: Vec<&Program> = wanted.iter().filter(|p| find(p.name).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|p| p.name).collect();
    let packages: Vec<&str> = missing.iter().flat_map(|p| p.packages).copied().collect();
    Err(format!("no {}: apt-get install {}", names.join(", "), packages.join(" ")))
}

/// A program of the PATH.
pub fn find(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).map(|dir| dir.join(name)).find(|file| file.is_file())
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
        let nowhere = Program { name: "kv-no-such-program", packages: &["some-package"] };
        assert_eq!(programs(&[nowhere]).unwrap_err(), "no kv-no-such-program: apt-get install some-package");
        assert!(rust_target("kv-no-such-target").unwrap_err().contains("rustup target add kv-no-such-target"));
    }
}
