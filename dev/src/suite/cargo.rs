//! cargo, run for a test, and what it says of what it built.

use std::path::PathBuf;
use std::process::Command;

use kv::{process, project_root};
use serde::Deserialize;

/// In the project's folder.
pub fn command(args: &[&str]) -> Command {
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.args(args).current_dir(project_root());
    process::forget_cargo(&mut c);
    c
}

/// A line of `--message-format json`, as far as it is read.
#[derive(Debug, Deserialize)]
pub struct Message {
    pub reason: String,
    #[serde(default)]
    pub package_id: String,
    pub target: Option<Target>,
    pub executable: Option<PathBuf>,
    pub manifest_path: Option<PathBuf>,
    pub out_dir: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
pub struct Target {
    pub name: String,
}

pub fn messages(output: &str) -> impl Iterator<Item = Message> + '_ {
    output.lines().filter_map(|line| serde_json::from_str(line).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_other_lines_are_not() {
        let output = "{\"reason\":\"compiler-artifact\",\"executable\":null}\nwarning: something\n\
            {\"reason\":\"compiler-artifact\",\"executable\":\"/t/deps/a-1\",\"target\":{\"name\":\"a\",\"kind\":[\"lib\"]}}\n\
            {\"reason\":\"build-script-executed\",\"package_id\":\"sys 1\",\"out_dir\":\"/o\"}\n{\"reason\":\"build-finished\"}";
        let all: Vec<Message> = messages(output).collect();
        assert_eq!(all.len(), 4);
        assert_eq!(all[1].executable, Some(PathBuf::from("/t/deps/a-1")));
        assert_eq!(all[1].target.as_ref().map(|t| t.name.as_str()), Some("a"));
        assert_eq!((all[2].package_id.as_str(), all[2].out_dir.clone()), ("sys 1", Some("/o".into())));
    }
}
