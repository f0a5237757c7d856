//! Runs a built tool in place of this process, with the default model where none is named.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{bail, Context, Result};

use crate::{build_tree, model};

/// Arguments that name a model or do without one.
const OWN_MODEL: [&str; 22] = [
    "-m",
    "--model",
    "-hf",
    "-hfr",
    "--hf-repo",
    "-mu",
    "--model-url",
    "-dr",
    "--docker-repo",
    "--models-dir",
    "--models-preset",
    "-h",
    "--help",
    "--usage",
    "--version",
    "--license",
    "--list-devices",
    "-cl",
    "--cache-list",
    "--completion-bash",
    "--hf-file",
    "-hff",
];
/// Tools whose arguments have no model among them.
const NO_MODEL: [&str; 5] =
    [build_tree::RPC_SERVER, "llama-quantize", "llama-gguf", "llama-gguf-split", "llama-gguf-hash"];

/// The short name of the server is the one that llama.cpp's documents use.
fn full_name(name: &str) -> &str {
    if name == "rpc-server" {
        build_tree::RPC_SERVER
    } else {
        name
    }
}

pub fn is_tool(name: &str) -> bool {
    full_name(name) == build_tree::RPC_SERVER || name.strip_prefix("llama-").is_some_and(|rest| !rest.is_empty())
}

fn needs_model(tool: &str, args: &[OsString]) -> bool {
    let named = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        OWN_MODEL.iter().any(|own| arg == *own || arg.strip_prefix(own).is_some_and(|rest| rest.starts_with('=')))
    };
    !NO_MODEL.contains(&tool) && !args.iter().any(named)
}

/// Returns only where the tool could not be started.
pub fn tool(words: &[OsString]) -> Result<()> {
    let name = words.first().map(|w| w.to_string_lossy().into_owned()).unwrap_or_default();
    if !is_tool(&name) {
        bail!("no command '{name}': `cargo kv --help` lists the commands; llama.cpp's tools are called llama-… here");
    }
    let mut args = words[1..].to_vec();
    if args.first().is_some_and(|a| a == "--") {
        args.remove(0);
    }
    let name = full_name(&name).to_string();
    let options = build_tree::Options { rpc: name == build_tree::RPC_SERVER, ..Default::default() };
    let program = build_tree::build(&options, std::slice::from_ref(&name))?.join(&name);
    let mut command = Command::new(&program);
    if needs_model(&name, &args) && std::env::var_os("LLAMA_ARG_MODEL").is_none() {
        command.arg("-m").arg(model::default_model()?);
    }
    command.args(args);
    replace(&mut command).with_context(|| format!("cannot run {}", program.display()))
}

/// Runs a program in place of this process: signals and the exit code are then its own. Returns only with an error.
#[cfg(unix)]
pub fn replace(command: &mut Command) -> Result<()> {
    use std::os::unix::process::CommandExt;
    Err(command.exec().into())
}

#[cfg(not(unix))]
pub fn replace(command: &mut Command) -> Result<()> {
    std::process::exit(command.status()?.code().unwrap_or(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_by_name() {
        assert!(is_tool("llama-cli") && is_tool("rpc-server"));
        assert!(!is_tool("llama-") && !is_tool("build") && !is_tool("ls"));
    }

    #[test]
    fn the_default_model_gives_way() {
        let args = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        assert!(needs_model("llama-cli", &args(&["-p", "hello"])));
        for own in [&["-m", "x"][..], &["--model=x"], &["--help"], &["-hf", "a/b"]] {
            assert!(!needs_model("llama-cli", &args(own)), "{own:?}");
        }
        assert!(!needs_model(full_name("rpc-server"), &[]));
    }
}
