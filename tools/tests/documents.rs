//! The documents: links lead somewhere, and the README stays short.

use std::fs;
use std::path::{Path, PathBuf};

fn documents() -> Vec<PathBuf> {
    let root = kv::project_root();
    let mut all: Vec<PathBuf> = Vec::new();
    for folder in [".", "docs", "shaders", "sys"] {
        let files = fs::read_dir(root.join(folder)).expect("a folder of the project").flatten().map(|f| f.path());
        all.extend(files.filter(|f| f.extension().is_some_and(|e| e == "md")));
    }
    all
}

/// `[text](target)`, without addresses.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|target| !target.contains("://"))
}

/// The name that a heading has in a link.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>().replace(' ', "-")
}

fn has_anchor(document: &Path, wanted: &str) -> bool {
    let text = fs::read_to_string(document).expect("it exists");
    let found = text.lines().filter(|l| l.starts_with('#')).any(|l| anchor(l.trim_start_matches('#')) == wanted);
    found
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut count = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document can be read");
        for link in links(&text) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => document.clone(),
                file => document.parent().expect("it lies in a folder").join(file),
            };
            assert!(target.exists(), "{}: there is no {file}", document.display());
            assert!(heading.is_empty() || has_anchor(&target, heading), "{}: no heading {link}", document.display());
            count += 1;
        }
    }
    assert!(count > 20, "only {count} links were found");
}

#[test]
fn the_readme_is_read_in_a_minute() {
    let text = fs::read_to_string(kv::project_root().join("README.md")).expect("there is a README");
    let lines = text.lines().count();
    assert!(lines <= 100, "README.md has {lines} lines, and at most 100 are wanted: move some to docs/");
}
