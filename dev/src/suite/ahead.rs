//! What later parts need built, begun when the first part begins: it takes the cores that tests on one thread leave idle.
//!
//! Nothing waits for it and nobody hears of it. A part builds what it needs as if it were alone; the locks of the builds make it wait
//! for what is under way, it finds the rest done, and an error here is its error again.

use std::process::Command;
use std::thread::{self, JoinHandle};

use super::{archs, cargo, life, metal, model, ops, wrapper, Part};
use kv::{build_tree, process};

pub struct Ahead(Option<JoinHandle<()>>);

impl Ahead {
    pub fn start(parts: &[Part]) -> Ahead {
        let targets = targets(parts);
        let wrapper = parts.contains(&Part::Wrapper);
        Ahead((!targets.is_empty() || wrapper).then(|| {
            thread::spawn(move || {
                if !targets.is_empty() {
                    run(tree(&targets));
                }
                if let Some(command) = wrapper.then(wrapper::build_short).and_then(Result::ok) {
                    run(command);
                }
            })
        }))
    }
}

impl Drop for Ahead {
    /// A build without the test that it was for should not go on behind the user's back.
    fn drop(&mut self) {
        let _ = self.0.take().map(JoinHandle::join);
    }
}

/// Of the build without options, which all of these parts share, each once.
fn targets(parts: &[Part]) -> Vec<&'static str> {
    let mut all = Vec::new();
    for part in parts {
        let tools: &[&str] = if *part == Part::Model { &build_tree::TOOLS } else { &[] };
        let own: &[&'static str] = match part {
            Part::Ops => &[ops::PROGRAM],
            Part::Archs => &[archs::PROGRAM],
            Part::Model => &[model::HISTORY, model::STEPS],
            Part::Metal if !cfg!(target_os = "macos") => &[metal::PROGRAM],
            Part::Life => &life::TARGETS,
            _ => &[],
        };
        for name in tools.iter().chain(own) {
            if !all.contains(name) {
                all.push(name);
            }
        }
    }
    all
}

fn tree(targets: &[&str]) -> Command {
    let mut c = cargo::command(&["run", "--quiet", "--release", "--package", "kv", "--", "build"]);
    for name in targets {
        c.args(["--target", name]);
    }
    c
}

/// At the lowest priority, so that a test beside it is not slowed down.
fn run(mut command: Command) {
    #[cfg(unix)]
    {
        use std::os::unix::process::CommandExt;
        // SAFETY: between fork and exec it makes one system call, which touches nothing but the child's priority.
        unsafe {
            command.pre_exec(|| {
                libc::nice(19);
                Ok(())
            });
        }
    }
    let _ = process::run(&mut command, None);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_target_once() {
        let all = targets(Part::value_variants());
        let programs = [ops::PROGRAM, archs::PROGRAM, model::HISTORY, model::STEPS, life::PROGRAM];
        for name in build_tree::TOOLS.iter().chain(&programs) {
            assert_eq!(all.iter().filter(|t| *t == name).count(), 1, "{name}");
        }
        assert!(targets(&[Part::Rust, Part::Neon, Part::Cuda]).is_empty());
    }
}
