//! llama-server as a child: on a free port, asked over HTTP, ended with its value.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde::Deserialize;
use serde_json::{json, Value};

use crate::pair::Pair;
use crate::{build_tree, cache, cpu, http, process};

/// A model of many gigabytes on a slow disk takes minutes.
const START: Duration = Duration::from_secs(1800);

/// How llama-server is had and run.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// Further arguments for llama-server, such as "-ngl 99"
    #[arg(long, value_name = "ARGUMENTS", default_value = "", allow_hyphen_values = true)]
    pub server_args: String,
    /// Threads (default: all cores)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub threads: Option<u32>,
    #[command(flatten)]
    pub build: build_tree::Options,
}

impl Options {
    /// One slot with `context` cells. `further` comes last, and what comes last counts.
    pub fn start(&self, bin: &Path, model: &Path, pair: &Pair, context: usize, further: &[&str]) -> Result<Server> {
        let mut c = Command::new(bin.join("llama-server"));
        c.arg("-m").arg(model).args(["-c", &context.to_string(), "--parallel", "1", "-fa", "on", "--cache-ram", "0"]);
        c.args(["-t", &self.threads.unwrap_or_else(cpu::cores).to_string()]);
        c.args(["--cache-type-k", &pair.k, "--cache-type-v", &pair.v]);
        c.args(self.server_args.split_whitespace()).args(further);
        Server::start(&mut c, cache::Scratch::new()?).with_context(|| format!("with {}", pair.name()))
    }
}

pub struct Server {
    child: Child,
    port: u16,
    scratch: cache::Scratch,
}

/// What a prompt was continued with.
#[derive(Debug, Deserialize)]
pub struct Completion {
    #[serde(rename = "content")]
    pub text: String,
    #[serde(default)]
    pub tokens: Vec<u32>,
    timings: Timings,
}

#[derive(Debug, Deserialize)]
struct Timings {
    cache_n: usize,
}

impl Completion {
    /// Tokens of the prompt that were in the cache before.
    pub fn cached(&self) -> usize {
        self.timings.cache_n
    }
}

impl Server {
    /// `command` is llama-server with all but its address. It is ready when this returns. The log is kept in `scratch`.
    pub fn start(command: &mut Command, scratch: cache::Scratch) -> Result<Server> {
        // It takes a port that is free, and says which.
        command.args(["--host", "127.0.0.1", "--port", "0"]);
        let log = fs::File::create(log_in(&scratch))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        end_with_parent(command);
        let child = command.spawn().with_context(|| format!("cannot run {}", process::shown(command)))?;
        let mut server = Server { child, port: 0, scratch };
        let start = Instant::now();
        while !server.is_ready() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{} ended with {status}\n{}", process::shown(command), server.last_words());
            }
            ensure!(start.elapsed() < START, "not ready after {} s\n{}", START.as_secs(), server.last_words());
            thread::sleep(Duration::from_millis(100));
        }
        Ok(server)
    }

    fn is_ready(&mut self) -> bool {
        if self.port == 0 {
            match port_in(&self.log()) {
                Some(port) => self.port = port,
                None => return false,
            }
        }
        matches!(self.request("GET", "/health", &Value::Null), Ok((200, _)))
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The folder that goes away with it.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(log_in(&self.scratch)).unwrap_or_default()).into_owned()
    }

    pub fn last_words(&self) -> String {
        process::tail(&self.log(), 20)
    }

    /// The status and the body.
    pub fn request(&self, method: &str, path: &str, body: &Value) -> Result<(u16, Value)> {
        http::request(self.port, method, path, body)
    }

    /// The body of an answer; any status but 200 is an error.
    pub fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let (status, answer) =
            self.request("POST", path, body).with_context(|| format!("llama-server:\n{}", self.last_words()))?;
        ensure!(status == 200, "llama-server answers {path} with status {status}: {answer}");
        Ok(answer)
    }

    /// `begins`: with what the model wants in front of a text, if anything.
    pub fn tokenize(&self, text: &str, begins: bool) -> Result<Vec<u32>> {
        let answer = self.post("/tokenize", &json!({ "content": text, "add_special": begins }))?;
        serde_json::from_value(answer["tokens"].clone()).with_context(|| format!("no tokens in {answer}"))
    }

    /// Continues a prompt by the most likely tokens. What the prompt before had in common with it is in the cache.
    pub fn complete(&self, prompt: &[u32], tokens: usize, stop: &[&str]) -> Result<Completion> {
        let question = json!({
            "prompt": prompt, "n_predict": tokens, "stop": stop, "temperature": 0, "cache_prompt": true, "return_tokens": true,
        });
        let answer = self.post("/completion", &question)?;
        serde_json::from_value(answer).context("an answer of llama-server that is no completion")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whoever ends this process by a signal does not mean to leave a server behind that holds a GPU's memory.
#[cfg(target_os = "linux")]
fn end_with_parent(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: prctl may be called between fork and exec; it takes no memory and no lock.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}

#[cfg(not(target_os = "linux"))]
fn end_with_parent(_command: &mut Command) {}

fn log_in(scratch: &cache::Scratch) -> PathBuf {
    scratch.path().join("server.log")
}

/// `… listening on http://127.0.0.1:40123`
fn port_in(log: &str) -> Option<u16> {
    let (_, rest) = log.split_once("listening on http://127.0.0.1:")?;
    rest.split_once('\n')?.0.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_a_log() {
        assert_eq!(port_in("srv main: listening on http://127.0.0.1:40123\nmore"), Some(40123));
        assert_eq!(port_in("srv main: listening on http://127.0.0.1:401"), None, "the line goes on");
        assert_eq!(port_in("loading"), None);
    }

    #[test]
    fn a_completion() {
        // Captured, without its settings.
        let answer =
            r#"{"index":0,"content":" where","tokens":[837],"stop":true,"timings":{"cache_n":3,"prompt_n":1}}"#;
        let completion: Completion = serde_json::from_str(answer).unwrap();
        assert_eq!((completion.text.as_str(), &completion.tokens[..], completion.cached()), (" where", &[837][..], 3));
    }

    #[cfg(unix)]
    #[test]
    fn a_server_that_ends_is_told_with_its_last_words() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such model >&2; exit 3", "sh"]);
        let failed = Server::start(&mut command, cache::Scratch::new().unwrap()).err().unwrap();
        assert!(format!("{failed:#}").contains("no such model"), "{failed:#}");
    }
}
