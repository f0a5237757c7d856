//! The patches against a tree of llama.cpp.
//!
//! Trees are somebody's: nothing is run inside one. The files that the patches touch are copied to a scratch folder,
//! `git apply` works there, and only a result without a single failure is moved over. So a tree that a patch does not
//! fit stays as it was, and asking costs nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use crate::{cache, process};

#[derive(Clone, Debug)]
pub struct Patch {
    pub name: String,
    pub path: PathBuf,
    /// The reason: what stands above the first diff.
    pub prose: String,
    /// `Needs: path`: the patch is for trees that have this file.
    pub needs: Vec<String>,
    pub touched: BTreeSet<String>,
    pub added: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Applies,
    Already,
    Skipped(String),
    Fails { files: Vec<String>, message: String },
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Applies => write!(f, "applies"),
            Outcome::Already => write!(f, "already applied"),
            Outcome::Skipped(why) => write!(f, "skipped: {why}"),
            Outcome::Fails { files, .. } => write!(f, "does not apply: {}", files.join(", ")),
        }
    }
}

impl Patch {
    pub fn parse(name: &str, path: &Path, text: &str) -> Result<Patch> {
        let mut patch = Patch {
            name: name.to_string(),
            path: path.to_path_buf(),
            prose: String::new(),
            needs: Vec::new(),
            touched: BTreeSet::new(),
            added: 0,
        };
        let mut head = true;
        for line in text.lines() {
            head = head && !line.starts_with("diff ") && !line.starts_with("--- a/") && line != "--- /dev/null";
            if head {
                match line.strip_prefix("Needs:") {
                    Some(file) => patch.needs.push(inside(name, file.trim())?),
                    None => patch.prose += &format!("{line}\n"),
                }
            } else if let Some(file) = file_of(line) {
                patch.touched.insert(inside(name, file)?);
            } else if line.starts_with('+') && !line.starts_with("+++ ") {
                patch.added += 1;
            }
        }
        patch.prose = patch.prose.trim().to_string();
        if patch.touched.is_empty() {
            bail!("{name} changes no file: expected a unified diff with a/ and b/ paths");
        }
        Ok(patch)
    }

    fn skip_reason(&self, tree: &Path) -> Option<String> {
        self.needs.iter().find(|file| !tree.join(file).is_file()).map(|file| format!("this tree has no {file}"))
    }
}

/// The path in a diff's header line.
fn file_of(line: &str) -> Option<&str> {
    let rest = line
        .strip_prefix("--- a/")
        .or_else(|| line.strip_prefix("+++ b/"))
        .or_else(|| line.strip_prefix("rename from "))
        .or_else(|| line.strip_prefix("rename to "))?;
    Some(rest.split('\t').next().unwrap_or(rest).trim_end())
}

fn inside(patch: &str, file: &str) -> Result<String> {
    if file.is_empty() || !Path::new(file).components().all(|c| matches!(c, Component::Normal(_))) {
        bail!("{patch} names '{file}', which is not a path inside the tree");
    }
    Ok(file.to_string())
}

/// `*.patch` of a folder in name order.
pub fn load(dir: &Path) -> Result<Vec<Patch>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir)
        .with_context(|| format!("cannot read the patches in {}", dir.display()))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "patch"))
        .collect();
    paths.sort();
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Patch::parse(&path.file_name().unwrap_or_default().to_string_lossy(), path, &text)
    };
    paths.iter().map(read).collect()
}

/// What each patch would do to `tree`, and a scratch copy of the touched files with all of it done.
pub struct Plan {
    pub outcomes: Vec<Outcome>,
    touched: BTreeSet<String>,
    result: cache::Scratch,
}

pub fn plan(tree: &Path, patches: &[Patch]) -> Result<Plan> {
    if !tree.is_dir() {
        bail!("{} is not a folder: give the top folder of a llama.cpp tree", tree.display());
    }
    let mut outcomes: Vec<Option<Outcome>> =
        patches.iter().map(|p| p.skip_reason(tree).map(Outcome::Skipped)).collect();
    let wanted: Vec<usize> = (0..patches.len()).filter(|&i| outcomes[i].is_none()).collect();
    let touched: BTreeSet<String> = wanted.iter().flat_map(|&i| patches[i].touched.iter().cloned()).collect();

    let result = cache::Scratch::new()?;
    copy_touched(tree, result.path(), &touched)?;
    let done = applied_prefix(tree, patches, &wanted, &touched)?;
    for (n, &i) in wanted.iter().enumerate() {
        outcomes[i] = Some(if n < done { Outcome::Already } else { try_one(result.path(), &patches[i])? });
    }
    Ok(Plan { outcomes: outcomes.into_iter().flatten().collect(), touched, result })
}

/// How many patches, from the first, the tree has already. Patches build on each other, so a patch can be undone only
/// after those behind it: the longest run that can be undone from its end is what was applied.
fn applied_prefix(tree: &Path, patches: &[Patch], wanted: &[usize], touched: &BTreeSet<String>) -> Result<usize> {
    for n in (1..=wanted.len()).rev() {
        let scratch = cache::Scratch::new()?;
        copy_touched(tree, scratch.path(), touched)?;
        let mut all = true;
        for &i in wanted[..n].iter().rev() {
            all = all && git_apply(scratch.path(), &patches[i], &["--reverse"])?.is_ok();
        }
        if all {
            return Ok(n);
        }
    }
    Ok(0)
}

fn try_one(dir: &Path, patch: &Patch) -> Result<Outcome> {
    match git_apply(dir, patch, &[])? {
        Ok(()) => Ok(Outcome::Applies),
        Err(_) if git_apply(dir, patch, &["--reverse", "--check"])?.is_ok() => Ok(Outcome::Already),
        Err(message) => Ok(Outcome::Fails { files: failed_files(&message, patch), message }),
    }
}

/// Ok(Err(what git said)) where the patch does not fit; git itself changes all of a patch's files or none.
fn git_apply(dir: &Path, patch: &Patch, options: &[&str]) -> Result<Result<(), String>> {
    let dir = dir.canonicalize()?;
    let mut git = Command::new("git");
    git.args(["-c", "core.autocrlf=false", "apply", "-p1", "--whitespace=nowarn"]).args(options).arg(&patch.path);
    // A repository around the folder would make git skip, silently, every file that is not below its own root.
    git.env("GIT_CEILING_DIRECTORIES", dir.parent().unwrap_or(&dir));
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
        git.env_remove(name);
    }
    git.env("LC_ALL", "C").current_dir(&dir);
    let done = process::run(&mut git, None).context("git is needed to apply patches")?;
    Ok(if done.status.success() { Ok(()) } else { Err(done.stderr) })
}

/// From `error: patch failed: FILE:LINE` and `error: FILE: No such file or directory`.
fn failed_files(message: &str, patch: &Patch) -> Vec<String> {
    let named: BTreeSet<String> = message
        .lines()
        .filter_map(|line| line.strip_prefix("error: "))
        .filter_map(|line| patch.touched.iter().find(|file| line.contains(file.as_str())).cloned())
        .collect();
    if named.is_empty() { patch.touched.clone() } else { named }.into_iter().collect()
}

fn copy_touched(from: &Path, to: &Path, touched: &BTreeSet<String>) -> Result<()> {
    for file in touched {
        let source = from.join(file);
        // A file that a patch creates is missing, and one that a patch needs is git's to complain about.
        if source.is_file() {
            let target = to.join(file);
            fs::create_dir_all(target.parent().unwrap_or(to))?;
            fs::copy(&source, &target).with_context(|| format!("cannot copy {}", source.display()))?;
        }
    }
    Ok(())
}

/// Applies all patches to `tree` or, where one does not fit, none: the error names the patch and the files.
pub fn apply(tree: &Path, patches: &[Patch]) -> Result<Vec<Outcome>> {
    let plan = plan(tree, patches)?;
    for (patch, outcome) in patches.iter().zip(&plan.outcomes) {
        if let Outcome::Fails { files, message } = outcome {
            bail!(
                "{} does not apply to {} in {}\n{}\nNothing was changed. That tree is of another version than the \
                 patch: see what it says on top, and rebase it.",
                patch.name,
                files.join(", "),
                tree.display(),
                message.trim()
            );
        }
    }
    if plan.outcomes.contains(&Outcome::Applies) {
        move_over(plan.result.path(), tree, &plan.touched)?;
    }
    Ok(plan.outcomes)
}

/// First everything beside its place, which is where a full disk or a missing right shows; then renames.
fn move_over(from: &Path, tree: &Path, touched: &BTreeSet<String>) -> Result<()> {
    let beside = |file: &str| tree.join(format!("{file}.kv-patch"));
    let staged = touched.iter().try_for_each(|file| -> Result<()> {
        let source = from.join(file);
        if source.is_file() {
            let target = beside(file);
            fs::create_dir_all(target.parent().unwrap_or(tree))?;
            fs::copy(&source, &target).with_context(|| format!("cannot write {}", target.display()))?;
        }
        Ok(())
    });
    if staged.is_err() {
        touched.iter().for_each(|file| drop(cache::remove(&beside(file))));
        return staged;
    }
    for file in touched {
        let (target, part) = (tree.join(file), beside(file));
        if !part.exists() {
            cache::remove(&target)?;
        } else if fs::read(&part).ok() == fs::read(&target).ok() {
            // An unchanged file keeps its time, so that a build does not see it as new.
            cache::remove(&part)?;
        } else {
            fs::rename(&part, &target).with_context(|| format!("cannot replace {}", target.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "Why one.\n\ndiff --git a/src/a.c b/src/a.c\n--- a/src/a.c\n+++ b/src/a.c\n@@ -1,3 +1,4 @@\n one\n+one and a half\n two\n three\n";
    // Builds on ONE: its context holds ONE's line.
    const TWO: &str = "Why two.\n\n--- a/src/a.c\n+++ b/src/a.c\n@@ -1,4 +1,5 @@\n one\n one and a half\n+nearly two\n two\n three\n--- /dev/null\n+++ b/src/new.c\n@@ -0,0 +1 @@\n+new\n";
    const TOOL: &str = "Why a tool.\nNeeds: tools/t.c\n\n--- a/tools/t.c\n+++ b/tools/t.c\n@@ -1 +1 @@\n-old\n+young\n";

    struct Bench {
        scratch: cache::Scratch,
        patches: Vec<Patch>,
    }

    impl Bench {
        fn new(patches: &[&str]) -> Bench {
            let scratch = cache::Scratch::new().unwrap();
            let dir = scratch.path().join("patches");
            fs::create_dir_all(&dir).unwrap();
            fs::create_dir_all(scratch.path().join("tree/src")).unwrap();
            fs::write(scratch.path().join("tree/src/a.c"), "one\ntwo\nthree\n").unwrap();
            for (n, text) in patches.iter().enumerate() {
                fs::write(dir.join(format!("{:04}-p.patch", n + 1)), text).unwrap();
            }
            Bench { patches: load(&dir).unwrap(), scratch }
        }
        fn tree(&self) -> PathBuf {
            self.scratch.path().join("tree")
        }
        fn a(&self) -> String {
            fs::read_to_string(self.tree().join("src/a.c")).unwrap()
        }
        fn outcomes(&self) -> Vec<Outcome> {
            plan(&self.tree(), &self.patches).unwrap().outcomes
        }
    }

    #[test]
    fn parse_reads_the_head_and_the_files() {
        let p = Patch::parse("p", Path::new("p"), TOOL).unwrap();
        assert_eq!(p.prose, "Why a tool.");
        assert_eq!(p.needs, ["tools/t.c"]);
        assert_eq!(p.added, 1);
        let p = Patch::parse("p", Path::new("p"), TWO).unwrap();
        assert_eq!(p.touched.iter().collect::<Vec<_>>(), ["src/a.c", "src/new.c"]);
        assert_eq!(p.added, 2);
        for bad in ["only prose", "--- a/../x\n+++ b/../x\n"] {
            assert!(Patch::parse("p", Path::new("p"), bad).is_err());
        }
    }

    #[test]
    fn patches_that_build_on_each_other_apply_and_are_seen_applied() {
        let b = Bench::new(&[ONE, TWO]);
        assert_eq!(b.outcomes(), [Outcome::Applies, Outcome::Applies]);
        assert_eq!(b.a(), "one\ntwo\nthree\n", "a plan changes nothing");
        apply(&b.tree(), &b.patches).unwrap();
        assert_eq!(b.a(), "one\none and a half\nnearly two\ntwo\nthree\n");
        assert!(b.tree().join("src/new.c").is_file());
        assert_eq!(b.outcomes(), [Outcome::Already, Outcome::Already]);
        apply(&b.tree(), &b.patches).unwrap();
        assert_eq!(fs::read_dir(b.tree().join("src")).unwrap().count(), 2, "nothing is left beside");
    }

    #[test]
    fn a_half_patched_tree_is_finished() {
        let b = Bench::new(&[ONE, TWO]);
        apply(&b.tree(), &b.patches[..1]).unwrap();
        assert_eq!(b.outcomes(), [Outcome::Already, Outcome::Applies]);
    }

    #[test]
    fn a_tree_that_does_not_fit_is_left_alone() {
        let b = Bench::new(&[ONE, TWO, "Why.\n\n--- a/src/b.c\n+++ b/src/b.c\n@@ -1 +1 @@\n-x\n+y\n"]);
        fs::write(b.tree().join("src/b.c"), "another version\n").unwrap();
        let e = format!("{:#}", apply(&b.tree(), &b.patches).unwrap_err());
        assert!(e.contains("0003-p.patch") && e.contains("src/b.c"), "{e}");
        assert_eq!(b.a(), "one\ntwo\nthree\n");
        assert!(!b.tree().join("src/new.c").exists());
        fs::remove_file(b.tree().join("src/b.c")).unwrap();
        let Outcome::Fails { files, .. } = &b.outcomes()[2] else { panic!("fits a missing file") };
        assert_eq!(files, &["src/b.c"]);
    }

    #[test]
    fn a_patch_for_another_kind_of_tree_is_skipped_with_its_reason() {
        let b = Bench::new(&[ONE, TOOL]);
        assert_eq!(b.outcomes()[1], Outcome::Skipped("this tree has no tools/t.c".into()));
        apply(&b.tree(), &b.patches).unwrap();
        fs::create_dir_all(b.tree().join("tools")).unwrap();
        fs::write(b.tree().join("tools/t.c"), "old\n").unwrap();
        assert_eq!(b.outcomes(), [Outcome::Already, Outcome::Applies]);
    }

    #[test]
    fn a_repository_around_the_scratch_does_not_matter() {
        let b = Bench::new(&[ONE]);
        let around = Command::new("git").args(["init", "-q"]).current_dir(b.scratch.path()).status().unwrap();
        assert!(around.success());
        apply(&b.tree(), &b.patches).unwrap();
        assert!(b.a().contains("one and a half"));
    }
}
