//! Downloads with the ordinary clients: pinned, tried again when they fail, checked before they are used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{anyhow, bail, Context, Result};

use crate::{cache, process, progress::Spinner};

/// A file on PyPI.
pub struct Pin {
    pub name: &'static str,
    pub version: &'static str,
    pub sha256: &'static str,
    /// The source archive rather than a wheel.
    pub sdist: bool,
}

/// `python3`, or what `KV_PYTHON` names.
pub fn python() -> PathBuf {
    std::env::var_os("KV_PYTHON").filter(|v| !v.is_empty()).map_or_else(|| PathBuf::from("python3"), PathBuf::from)
}

/// How often and how patiently a download is tried.
pub struct Retry {
    pub waits: Vec<Duration>,
}

impl Default for Retry {
    fn default() -> Self {
        Retry { waits: vec![Duration::from_secs(2), Duration::from_secs(10)] }
    }
}

impl Retry {
    /// Runs `attempt` until it succeeds, once more than there are waits.
    pub fn run<T>(&self, what: &str, mut say: impl FnMut(&str), mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let tries = self.waits.len() + 1;
        for (n, wait) in self.waits.iter().enumerate() {
            match attempt() {
                Ok(got) => return Ok(got),
                Err(e) => {
                    say(&format!("{e:#}"));
                    say(&format!("{what}: try {} of {tries} failed, again in {} s", n + 1, wait.as_secs()));
                    thread::sleep(*wait);
                }
            }
        }
        attempt().with_context(|| format!("{what}: failed {tries} times; is the network there?"))
    }
}

/// The file of `pin` in the cache, downloaded first where it is missing.
pub fn pypi(pin: &Pin) -> Result<PathBuf> {
    let home = cache::root()?.join("download");
    pypi_with(pin, &home, &python(), &Retry::default())
}

pub fn pypi_with(pin: &Pin, home: &Path, python: &Path, retry: &Retry) -> Result<PathBuf> {
    let dir = home.join(format!("{}-{}-{}", pin.name, pin.version, &pin.sha256[..12]));
    let dir = cache::place(&dir, |part| {
        let what = format!("fetching {} {} from PyPI", pin.name, pin.version);
        let spinner = Spinner::new(&what);
        retry.run(
            &what,
            |line| spinner.line(line),
            || {
                // What a broken try left must not be taken for the file.
                cache::remove(part)?;
                fs::create_dir_all(part)?;
                process::run_ok(&mut pip_download(pin, part, python)).map(drop)
            },
        )?;
        verify(&only_file(part)?, pin.sha256)
    })?;
    only_file(&dir)
}

fn pip_download(pin: &Pin, dir: &Path, python: &Path) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]);
    if pin.sdist {
        // By name: `:all:` would also build the build tools from source.
        pip.args(["--no-binary", pin.name]);
    } else {
        pip.args(["--only-binary", pin.name]);
    }
    pip.arg(format!("{}=={}", pin.name, pin.version)).arg("-d").arg(dir);
    pip
}

fn only_file(dir: &Path) -> Result<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .with_context(|| format!("cannot read {}", dir.display()))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .collect();
    match files.pop() {
        Some(file) if files.is_empty() => Ok(file),
        _ => bail!("expected one downloaded file in {}: remove that folder and try again", dir.display()),
    }
}

/// An error that says which file, what was expected and what came.
pub fn verify(file: &Path, sha256: &str) -> Result<()> {
    let found = cache::sha256_file(file)?;
    if found != sha256 {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        return Err(anyhow!(
            "{name} is not the file that is pinned: its sha256 should be\n  {sha256}, but is\n  {found}\n\
             It was thrown away. Try again; if this stays, the package index serves another file."
        ));
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const HELLO: &str = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";

    fn pin(sha256: &'static str) -> Pin {
        Pin { name: "thing", version: "1.0", sha256, sdist: true }
    }

    /// A `python3` whose `-m pip download … -d DIR` fails `failures` times, leaving rubbish, and then gives a file.
    fn fake_python(dir: &Path, failures: u32) -> PathBuf {
        let script = dir.join("python3");
        let body = format!(
            "#!/bin/sh\nfor last; do :; done\necho x >> {0}/calls\nif [ $(wc -l < {0}/calls) -le {failures} ]; then\n\
             echo rubbish > $last/partial; echo no route >&2; exit 1; fi\necho hello > $last/thing-1.0.tar.gz\n",
            dir.display()
        );
        fs::write(&script, body).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        script
    }

    fn quick() -> Retry {
        Retry { waits: vec![Duration::ZERO; 2] }
    }

    #[test]
    fn a_failed_download_is_tried_again() {
        let scratch = cache::Scratch::new().unwrap();
        let python = fake_python(scratch.path(), 2);
        let home = scratch.path().join("home");
        let file = pypi_with(&pin(HELLO), &home, &python, &quick()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "hello\n");
        assert_eq!(fs::read_to_string(scratch.path().join("calls")).unwrap().lines().count(), 3);
        // The second time nothing is run.
        pypi_with(&pin(HELLO), &home, Path::new("/nonexistent"), &quick()).unwrap();
    }

    #[test]
    fn three_failures_are_an_error() {
        let scratch = cache::Scratch::new().unwrap();
        let python = fake_python(scratch.path(), 3);
        let home = scratch.path().join("home");
        let e = format!("{:#}", pypi_with(&pin(HELLO), &home, &python, &quick()).unwrap_err());
        assert!(e.contains("failed 3 times") && e.contains("no route"), "{e}");
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
    }

    #[test]
    fn a_wrong_hash_says_what_was_expected() {
        let scratch = cache::Scratch::new().unwrap();
        let python = fake_python(scratch.path(), 0);
        let home = scratch.path().join("home");
        let wrong = "0000000000000000000000000000000000000000000000000000000000000000";
        let e = format!("{:#}", pypi_with(&pin(wrong), &home, &python, &quick()).unwrap_err());
        assert!(e.contains("thing-1.0.tar.gz") && e.contains(wrong) && e.contains(HELLO), "{e}");
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
    }

    #[test]
    fn sdists_are_asked_for_by_name() {
        let shown = process::shown(&pip_download(&pin(HELLO), Path::new("d"), Path::new("python3")));
        assert!(shown.contains("--no-binary thing thing==1.0") && !shown.contains(":all:"), "{shown}");
    }
}
