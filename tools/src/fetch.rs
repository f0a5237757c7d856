//! Downloads with the ordinary clients: pinned, tried again when they fail, checked before anything of them runs.
//!
//! pip compares a file with its hash before it opens it, in the mode that takes nothing without a hash. Of a source archive it
//! then asks the build backend for metadata, though nothing is to be built; no_build.py answers in the backend's place.

use std::env;
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
    env::var_os("KV_PYTHON").filter(|v| !v.is_empty()).map_or_else(|| PathBuf::from("python3"), PathBuf::from)
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
        let scratch = cache::Scratch::new()?;
        let mut command = pip_download(pin, part, python, scratch.path())?;
        pip(&format!("fetching {} {} from PyPI", pin.name, pin.version), retry, &mut command, || {
            // What a broken try left must not be taken for the file.
            cache::remove(part)?;
            fs::create_dir_all(part).map_err(Into::into)
        })?;
        verify(&only_file(part)?, pin.sha256)
    })?;
    only_file(&dir)
}

/// Runs pip until it succeeds, after `clear` each time. A file with another hash than the pinned one ends it at once.
pub fn pip(what: &str, retry: &Retry, command: &mut Command, mut clear: impl FnMut() -> Result<()>) -> Result<()> {
    let spinner = Spinner::new(what);
    let refused = retry.run(
        what,
        |line| spinner.line(line),
        || {
            clear()?;
            let done = process::run(command, None)?;
            match other_hash(&done.stderr) {
                Some(said) if !done.status.success() => Ok(Some(said.to_string())),
                _ => done.ok(command).map(|_| None),
            }
        },
    )?;
    match refused {
        None => Ok(()),
        Some(said) => bail!(
            "{what}: that is not the file that is pinned.\n{said}\n\
             It was thrown away, and nothing of it has run. Try again; if this stays, the package index serves another file."
        ),
    }
}

/// What pip says about a file with another hash: its name, what was expected, what came.
fn other_hash(said: &str) -> Option<&str> {
    let (_, rest) = said.split_once("DO NOT MATCH THE HASHES")?;
    rest.split_once('\n').map(|(_, names)| names.trim_end())
}

/// `scratch` is for what pip reads, and has to stay until it has run.
fn pip_download(pin: &Pin, dir: &Path, python: &Path, scratch: &Path) -> Result<Command> {
    let pins = scratch.join("pins.txt");
    fs::write(&pins, format!("{}=={} --hash=sha256:{}\n", pin.name, pin.version, pin.sha256))?;
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--require-hashes", "--no-deps"]);
    if pin.sdist {
        // By name: `:all:` would also build the build tools from source.
        pip.args(["--no-binary", pin.name, "--no-build-isolation", "--use-pep517"]);
        pip.env("PYTHONPATH", no_build(scratch)?);
    } else {
        pip.args(["--only-binary", pin.name]);
    }
    pip.arg("-r").arg(pins).arg("-d").arg(dir);
    Ok(pip)
}

/// A search path on which no_build.py has the names of the backends, before what is there already.
fn no_build(scratch: &Path) -> Result<std::ffi::OsString> {
    for (package, module) in [("scikit_build_core", "build.py"), ("setuptools", "build_meta.py")] {
        let folder = scratch.join("no_build").join(package);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("__init__.py"), "")?;
        fs::write(folder.join(module), include_str!("no_build.py"))?;
    }
    let given = env::var_os("PYTHONPATH").unwrap_or_default();
    let given = env::split_paths(&given).filter(|path| !path.as_os_str().is_empty());
    Ok(env::join_paths(std::iter::once(scratch.join("no_build")).chain(given))?)
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
        let scratch = cache::Scratch::new().unwrap();
        let pip = pip_download(&pin(HELLO), Path::new("d"), Path::new("python3"), scratch.path()).unwrap();
        let shown = process::shown(&pip);
        assert!(shown.contains("--no-binary thing ") && !shown.contains(":all:"), "{shown}");
    }

    /// The machine's Python with a folder for an index, and the path where traps leave their mark.
    fn offline(dir: &Path) -> (PathBuf, PathBuf) {
        let script = dir.join("offline");
        let body = format!(
            "#!/bin/sh\nPIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS={} exec '{}' \"$@\"\n",
            dir.display(),
            python().display()
        );
        fs::write(&script, body).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        (script, dir.join("mark"))
    }

    /// thing-1.0.tar.gz in `dir`, with these files beside its PKG-INFO; returns its pin.
    fn sdist(dir: &Path, files: &[(&str, &str)]) -> Pin {
        let path = dir.join("thing-1.0.tar.gz");
        let gz = flate2::write::GzEncoder::new(fs::File::create(&path).unwrap(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gz);
        for (name, text) in files.iter().chain(&[("PKG-INFO", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")]) {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, format!("thing-1.0/{name}"), text.as_bytes()).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap();
        pin(Box::leak(cache::sha256_file(&path).unwrap().into_boxed_str()))
    }

    #[test]
    fn nothing_of_a_package_runs_before_its_hash_is_checked() {
        let scratch = cache::Scratch::new().unwrap();
        let (python, mark) = offline(scratch.path());
        let home = scratch.path().join("home");
        // A backend in the package itself: pip asks this one whatever is on the search path.
        let project = "[build-system]\nrequires = []\nbuild-backend = \"trap\"\nbackend-path = [\".\"]\n";
        let trap = format!("open({mark:?}, 'w')\n{}", include_str!("no_build.py"));
        let good = sdist(scratch.path(), &[("pyproject.toml", project), ("trap.py", &trap)]);
        let wrong = "0000000000000000000000000000000000000000000000000000000000000000";
        let e = format!("{:#}", pypi_with(&pin(wrong), &home, &python, &quick()).unwrap_err());
        assert!(e.contains("thing") && e.contains(wrong) && e.contains(good.sha256), "{e}");
        assert!(!e.contains("failed 3 times"), "it was asked for again:\n{e}");
        assert!(!mark.exists(), "code of a package with a wrong hash has run");
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
        // The trap is one.
        pypi_with(&good, &home, &python, &quick()).unwrap();
        assert!(mark.exists());
    }

    #[test]
    fn an_archive_is_fetched_without_building_or_installing() {
        let old = "[build-system]\nrequires = [\"kv-no-such-package\"]\nbuild-backend = \"setuptools.build_meta\"\n";
        let new = old.replace("setuptools.build_meta", "scikit_build_core.build");
        for project in [None, Some(old), Some(&*new)] {
            let scratch = cache::Scratch::new().unwrap();
            let (python, mark) = offline(scratch.path());
            let setup =
                format!("open({mark:?}, 'w')\nfrom setuptools import setup\nsetup(name='thing', version='1.0')\n");
            let files: Vec<_> =
                [("setup.py", &*setup)].into_iter().chain(project.map(|p| ("pyproject.toml", p))).collect();
            let pin = sdist(scratch.path(), &files);
            let file = pypi_with(&pin, &scratch.path().join("home"), &python, &quick()).unwrap();
            verify(&file, pin.sha256).unwrap();
            assert!(!mark.exists(), "setup.py of an archive that is only read has run ({project:?})");
        }
    }
}
