//! llama.cpp's source: pinned, fetched, copied, patched. The copy is in the cache; a user's own tree is only read.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::BufReader;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

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

/// What CMake reads of a llama.cpp tree: the rest is models, documents and other languages.
const NEEDED: [&str; 15] = [
    "CMakeLists.txt",
    "LICENSE",
    "licenses",
    "app",
    "cmake",
    "common",
    "examples",
    "ggml",
    "include",
    "pocs",
    "scripts",
    "src",
    "tests",
    "tools",
    "vendor",
];

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
        copy_files(&from, part, &needed(&from)?)?;
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
            // By contents: a checkout that comes back to what it was, or a file that was only touched, is built already.
            let mut text = String::from("own\n");
            for path in needed(dir)? {
                text += &format!("{} {}\n", cache::sha256_file(&dir.join(&path))?, path.display());
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
        let plain = inner.components().all(|c| matches!(c, Component::Normal(_)));
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

/// The files of a llama.cpp tree that a build takes, with relative paths: those of [`NEEDED`], and of what else the tree's own
/// CMakeLists.txt adds.
fn needed(tree: &Path) -> Result<BTreeSet<PathBuf>> {
    let list = tree.join("CMakeLists.txt");
    let text = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let added = text.split("add_subdirectory(").skip(1).filter_map(|rest| rest.split([')', '/']).next());
    let added = added.map(|part| part.split_whitespace().next().unwrap_or_default());
    // A folder of the tree by its name, not a variable or a way out.
    let added = added.filter(|part| matches!(Path::new(part).components().next(), Some(Component::Normal(_))));
    let parts: BTreeSet<&str> = NEEDED.into_iter().chain(added).collect();
    let mut files = BTreeSet::new();
    for part in parts.into_iter().filter(|part| tree.join(part).exists()) {
        files.extend(walk(tree, Path::new(part))?);
    }
    files.retain(|file| file.extension().is_none_or(|e| e != "gguf"));
    Ok(files)
}

/// `start` where it is a file, and the files below it where it is a folder, as paths from `dir`; without what git, CMake, npm
/// and Python keep there.
fn walk(dir: &Path, start: &Path) -> Result<BTreeSet<PathBuf>> {
    const LEFT: [&str; 4] = [".git", "CMakeFiles", "node_modules", "__pycache__"];
    let (mut files, mut open) = (BTreeSet::new(), vec![start.to_path_buf()]);
    while let Some(path) = open.pop() {
        let here = dir.join(&path);
        // Through links: the copy must stand by itself. A dangling one has nothing to copy.
        let Ok(meta) = fs::metadata(&here) else { continue };
        if meta.is_file() {
            files.insert(path);
            continue;
        }
        let is_left = path.file_name().is_some_and(|name| LEFT.iter().any(|left| name == *left));
        // A build folder; a tree that was built in its own folder has its sources there all the same.
        let is_build = here.join("CMakeCache.txt").exists() && !here.join("CMakeLists.txt").exists();
        if meta.is_dir() && !is_left && !is_build {
            for entry in fs::read_dir(&here).with_context(|| format!("cannot read {}", here.display()))? {
                open.push(path.join(entry?.file_name()));
            }
        }
    }
    Ok(files)
}

/// Everything below `from` but what `walk` leaves.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    copy_files(from, to, &walk(from, Path::new(""))?)
}

fn copy_files(from: &Path, to: &Path, files: &BTreeSet<PathBuf>) -> Result<()> {
    fs::create_dir_all(to)?;
    for path in files {
        let target = to.join(path);
        fs::create_dir_all(target.parent().unwrap_or(to))?;
        fs::copy(from.join(path), &target).with_context(|| format!("cannot copy {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

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

    /// A small llama.cpp tree as people have them.
    fn own_tree(dir: &Path) -> Source {
        for (file, text) in [
            ("CMakeLists.txt", "add_subdirectory(src)\nadd_subdirectory(fork/deep)\n"),
            ("ggml/src/ggml.c", "int ggml;"),
            ("src/llama.cpp", "int llama;"),
            ("tools/ui/CMakeLists.txt", ""),
            ("tools/ui/node_modules/big.js", "x"),
            ("fork/deep/CMakeLists.txt", ""),
            ("models/model.gguf", "x"),
            ("tests/vocab.gguf", "x"),
            ("build/CMakeCache.txt", "x"),
            ("out-of-the-way/bin/llama-cli", "x"),
            ("examples/one/build/CMakeCache.txt", "x"),
            (".git/config", "x"),
            ("session.kv", "x"),
        ] {
            fs::create_dir_all(dir.join(file).parent().unwrap()).unwrap();
            fs::write(dir.join(file), text).unwrap();
        }
        Source::choose(Tree::Full, Some(dir.to_path_buf())).unwrap()
    }

    #[test]
    fn a_copy_has_the_sources_alone() {
        let scratch = cache::Scratch::new().unwrap();
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
        own_tree(&from);
        copy_files(&from, &to, &needed(&from).unwrap()).unwrap();
        let copied: Vec<_> = walk(&to, Path::new("")).unwrap().into_iter().collect();
        let sources = [
            "CMakeLists.txt",
            "fork/deep/CMakeLists.txt",
            "ggml/src/ggml.c",
            "src/llama.cpp",
            "tools/ui/CMakeLists.txt",
        ];
        assert_eq!(copied, sources.map(PathBuf::from));
    }

    #[test]
    fn a_tree_is_another_where_its_sources_are() {
        let scratch = cache::Scratch::new().unwrap();
        let own = own_tree(scratch.path());
        let before = identity(&own).unwrap();
        // Written again, a moment later, and things beside the sources.
        fs::write(scratch.path().join("src/llama.cpp"), "int llama;").unwrap();
        let touched = fs::File::options().write(true).open(scratch.path().join("ggml/src/ggml.c")).unwrap();
        touched.set_modified(UNIX_EPOCH).unwrap();
        fs::write(scratch.path().join("models/second.gguf"), "x").unwrap();
        fs::write(scratch.path().join("build/CMakeCache.txt"), "xy").unwrap();
        assert_eq!(before, identity(&own).unwrap());
        // As long as before.
        fs::write(scratch.path().join("src/llama.cpp"), "int other;").unwrap();
        assert_ne!(before, identity(&own).unwrap());
    }
}
