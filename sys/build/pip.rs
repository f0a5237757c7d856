//! The one way that wheels are installed, here and by `cargo kv`, which includes this file.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// `pip install` of the wheels that requirements files pin by version and sha256, into a folder of their own.
///
/// pip compares the hash before it unpacks a wheel, and a wheel runs nothing when it is installed. Source archives would, and
/// dependencies would have no hash: neither is taken.
pub fn install(python: &OsStr, pins: &[impl AsRef<Path>], target: &Path) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input"]);
    pip.args(["--require-hashes", "--no-deps", "--only-binary", ":all:", "--upgrade", "--target"]).arg(target);
    for file in pins {
        pip.arg("-r").arg(file.as_ref());
    }
    // A user-wide `--user` in pip's configuration would contradict --target.
    pip.env("PIP_USER", "0");
    pip
}
