//! The original crate, fetched by cargo and patched in a copy.
//!
//! It cannot be a dependency: it has the same `links`, and a program that replaces it would get this package again. So
//! cargo is asked from here, for a manifest of its own whose lock file holds the hash: tree/. `cargo metadata` downloads
//! and unpacks into cargo's own cache, which the build around this one permits (`cargo vendor` would want that cache for
//! itself and wait for ever), and says where the package lies.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, Setup};

const NAME: &str = "llama-cpp-sys-2";

/// The folder of the original crate, patched: `wrapper.h` and its kin, and `llama.cpp/`.
pub fn patched(setup: &Setup) -> Result<PathBuf> {
    let original = locate(setup)?;
    let (fresh, source) = (setup.out.join("source.new"), setup.out.join("source"));
    remove(&fresh)?;
    for part in ["wrapper.h", "wrapper_common.cpp", "wrapper_common.h", "wrapper_utils.h"] {
        copy_changed(&original.join(part), &fresh.join(part))?;
    }
    for part in ["CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "src", "tools", "vendor"] {
        let inside = Path::new("llama.cpp").join(part);
        copy_changed(&original.join(&inside), &fresh.join(&inside))?;
    }
    patch(&setup.project.join("patches"), &fresh.join("llama.cpp"))?;
    // A file that is as before keeps its time, so that an edited patch does not compile everything again.
    copy_changed(&fresh, &source)?;
    remove(&fresh)?;
    Ok(source)
}

fn locate(setup: &Setup) -> Result<PathBuf> {
    println!("cargo::rerun-if-env-changed=LLAMA_CPP_SYS_2_DIR");
    if let Some(dir) = env::var_os("LLAMA_CPP_SYS_2_DIR").map(PathBuf::from) {
        if !dir.join("llama.cpp/ggml/src/ggml.c").is_file() {
            return Err(format!("LLAMA_CPP_SYS_2_DIR={} is not the unpacked crate {NAME}", dir.display()).into());
        }
        return Ok(dir);
    }
    // Copied, so that cargo finds the configuration of the program that is being built, not of this project.
    let manifest = setup.out.join("tree");
    copy_changed(&setup.project.join("sys").join("tree"), &manifest)?;
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--format-version=1", "--locked", "--filter-platform", &setup.host]);
    let asked = cargo.current_dir(&manifest).output()?;
    if !asked.status.success() {
        let said = String::from_utf8_lossy(&asked.stderr);
        return Err(format!(
            "cargo could not fetch the original {NAME}, whose llama.cpp is built here:\n{}\n\
             Without a network, unpack that crate and set LLAMA_CPP_SYS_2_DIR to its folder.",
            said.trim()
        )
        .into());
    }
    let found: serde_json::Value = serde_json::from_slice(&asked.stdout)?;
    let packages = found["packages"].as_array().into_iter().flatten();
    packages
        .filter(|p| p["name"] == NAME)
        .find_map(|p| Path::new(p["manifest_path"].as_str()?).parent().map(Path::to_path_buf))
        .ok_or_else(|| format!("cargo metadata names no {NAME}").into())
}

/// In order; one that is for another kind of tree says so by `Needs: FILE`.
fn patch(patches: &Path, tree: &Path) -> Result<()> {
    let files: BTreeSet<PathBuf> = fs::read_dir(patches)?.flatten().map(|e| e.path()).collect();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "patch")) {
        let text = fs::read_to_string(file)?;
        let mut needs = text.lines().filter_map(|l| l.strip_prefix("Needs:")).map(|f| tree.join(f.trim()));
        if needs.any(|needed| !needed.is_file()) {
            continue;
        }
        let mut git = Command::new("git");
        git.args(["-c", "core.autocrlf=false", "apply", "-p1", "--whitespace=nowarn"]).arg(file).current_dir(tree);
        // A repository around the target folder would make git skip, silently, what lies outside of it.
        git.env("GIT_CEILING_DIRECTORIES", tree.parent().unwrap_or(tree));
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
            git.env_remove(name);
        }
        let done = git.output().map_err(|e| format!("git is needed to patch llama.cpp: {e}"))?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            return Err(format!("{} does not apply:\n{}", file.display(), said.trim()).into());
        }
    }
    Ok(())
}

/// A file or a folder with what is in it; files that are the same already are left alone.
fn copy_changed(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from).map_err(|e| format!("cannot read {}: {e}", from.display()))? {
            let entry = entry?;
            copy_changed(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let bytes = fs::read(from).map_err(|e| format!("cannot read {}: {e}", from.display()))?;
    if fs::read(to).ok().as_deref() != Some(&bytes) {
        fs::create_dir_all(to.parent().unwrap_or(to))?;
        fs::write(to, bytes).map_err(|e| format!("cannot write {}: {e}", to.display()))?;
    }
    Ok(())
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {e}", dir.display()).into())
        }
        _ => Ok(()),
    }
}
