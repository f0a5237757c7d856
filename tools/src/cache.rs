//! The cache folder. Everything in it is keyed by what it was made from and appears whole or not at all.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{bail, Context, Result};
use sha2::{Digest, Sha256};

/// `$KV_CACHE_DIR`, else `$XDG_CACHE_HOME/ggml-kv`, else `~/.cache/ggml-kv`; made where it is missing.
pub fn root() -> Result<PathBuf> {
    let dir = root_from(|name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from))?;
    fs::create_dir_all(&dir).with_context(|| {
        format!("cannot make the cache folder {}: set KV_CACHE_DIR to a folder that can be written", dir.display())
    })?;
    // A canonical path, because git and ccache compare paths as text.
    Ok(dir.canonicalize()?)
}

fn root_from(var: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf> {
    if let Some(dir) = var("KV_CACHE_DIR") {
        return Ok(dir);
    }
    if let Some(dir) = var("XDG_CACHE_HOME") {
        return Ok(dir.join("ggml-kv"));
    }
    match var("HOME").or_else(|| var("USERPROFILE")) {
        Some(home) => Ok(home.join(".cache").join("ggml-kv")),
        None => bail!("no place for the cache: neither KV_CACHE_DIR, XDG_CACHE_HOME nor HOME is set"),
    }
}

/// A short name for the contents of `parts`; parts are told apart by their lengths.
pub fn key<P: AsRef<[u8]>>(parts: &[P]) -> String {
    let mut sum = Sha256::new();
    for part in parts {
        let part = part.as_ref();
        sum.update((part.len() as u64).to_le_bytes());
        sum.update(part);
    }
    hex(&sum.finalize())[..16].to_string()
}

pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut sum = Sha256::new();
    std::io::copy(&mut file, &mut sum).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hex(&sum.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns `target`, made first by `make` where it is missing. `make` fills a path beside it which is then renamed,
/// so an interrupted step leaves nothing that looks done.
pub fn place(target: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    if target.exists() {
        return Ok(target.to_path_buf());
    }
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
        bail!("{} is no place in the cache", target.display());
    };
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    let part = parent.join(format!(".{}.{}.part", name.to_string_lossy(), std::process::id()));
    remove(&part)?;
    let made = make(&part).and_then(|()| match fs::rename(&part, target) {
        Ok(()) => Ok(()),
        // Another process was faster; what it made came from the same key.
        Err(_) if target.exists() => Ok(()),
        Err(e) => Err(e).with_context(|| format!("cannot put {} in place", target.display())),
    });
    // The error that matters is `made`'s.
    let _ = remove(&part);
    made.map(|()| target.to_path_buf())
}

/// Removes a file or a folder; a missing one is fine.
pub fn remove(path: &Path) -> Result<()> {
    let gone = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    gone.with_context(|| format!("cannot remove {}", path.display()))
}

/// An empty folder that goes away with its value.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Result<Scratch> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let parent = root()?.join("tmp");
        sweep(&parent);
        let dir = parent.join(format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        remove(&dir)?;
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Scratch(dir))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = remove(&self.0);
    }
}

/// Scratch folders of killed processes. Where nobody can say whether a process lives, a day is longer than any run.
fn sweep(parent: &Path) {
    let day = Duration::from_secs(24 * 3600);
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let modified = entry.metadata().and_then(|m| m.modified()).ok();
        let old = modified.and_then(|t| SystemTime::now().duration_since(t).ok()).is_some_and(|age| age > day);
        if old || owner_is_gone(&entry.file_name().to_string_lossy()) {
            let _ = remove(&entry.path());
        }
    }
}

/// From a name like `1234-0`. Only Linux shows processes as files; elsewhere the answer is no.
fn owner_is_gone(name: &str) -> bool {
    let Some(Ok(pid)) = name.split('-').next().map(str::parse::<u32>) else { return false };
    Path::new("/proc/self").exists() && !Path::new(&format!("/proc/{pid}")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_prefers_its_own_variable() {
        let vars = |given: &'static [(&'static str, &'static str)]| {
            move |name: &str| given.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v))
        };
        let all = [("KV_CACHE_DIR", "/k"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        let all: &'static [_] = Box::leak(Box::new(all));
        assert_eq!(root_from(vars(all)).unwrap(), PathBuf::from("/k"));
        assert_eq!(root_from(vars(&all[1..])).unwrap(), PathBuf::from("/x/ggml-kv"));
        assert_eq!(root_from(vars(&all[2..])).unwrap(), PathBuf::from("/h/.cache/ggml-kv"));
        assert!(root_from(vars(&[])).is_err());
    }

    #[test]
    fn key_tells_parts_apart() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab", "c"]), key(&["ab", "c"]));
    }

    #[test]
    fn scratch_folders_of_the_dead_are_swept() {
        let scratch = Scratch::new().unwrap();
        let own = scratch.path().join(format!("{}-0", std::process::id()));
        let dead = scratch.path().join(format!("{}-0", u32::MAX));
        for dir in [&own, &dead] {
            fs::create_dir(dir).unwrap();
        }
        sweep(scratch.path());
        assert!(own.exists());
        assert_eq!(dead.exists(), !cfg!(target_os = "linux"));
    }

    #[test]
    fn a_failed_step_leaves_nothing() {
        let scratch = Scratch::new().unwrap();
        let target = scratch.path().join("thing");
        let failed = place(&target, |part| {
            fs::create_dir(part)?;
            fs::write(part.join("half"), "x")?;
            bail!("stopped")
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
        place(&target, |part| Ok(fs::write(part, "whole")?)).unwrap();
        place(&target, |_| bail!("must not be made twice")).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "whole");
    }
}
