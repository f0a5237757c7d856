//! Caches on other machines: two rpc-servers on loopback hold the layers of a model and their caches, and the answer is the
//! one of a single process. A server that does not say that it has the types is not given any.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::{cache, Running, Tally};
use kv::process::{self, Finished};
use kv::{build_tree, model};

const PROMPT: &str = "1, 2, 3, 4, 5, 6, 7, 8,";
/// The client waits while the servers compute: to it that is time in which nothing happens.
const LIMIT: Duration = Duration::from_secs(1800);

pub fn run(tally: &mut Tally) -> Result<()> {
    let options = build_tree::Options { rpc: true, ..build_tree::Options::default() };
    let bin = build_tree::build(&options, &[build_tree::RPC_SERVER, "llama-completion"].map(String::from))?;
    let model = model::default_model()?;
    for (k, v) in [("srft4", "srft4"), ("delta4", "srft4")] {
        tally.check(&format!("two rpc-servers with {k}/{v} answer as one process"), || {
            let (_a, first) = server(&bin)?;
            let (_b, second) = server(&bin)?;
            let alone = answer(&bin, &model, k, v, None)?;
            let spread = answer(&bin, &model, k, v, Some(&format!("127.0.0.1:{first},127.0.0.1:{second}")))?;
            ensure!(alone == spread, "alone: {alone:?}\nspread: {spread:?}");
            Ok(())
        });
    }
    tally.check("a server that does not have the types is refused by name", || {
        let (_a, port) = server(&bin)?;
        let without = without_types(port)?;
        let done = complete(&bin, &model, "srft4", "srft4", Some(&format!("127.0.0.1:{without}")))?;
        let text = done.text();
        ensure!(done.exited() && !done.status.success(), "it ended with {}\n{}", done.status, process::tail(&text, 20));
        for word in ["does not serve cache type srft4", "the server behind it", "--no-kv-offload"] {
            ensure!(text.contains(word), "no '{word}' in\n{}", process::tail(&text, 20));
        }
        let f16 = complete(&bin, &model, "f16", "f16", Some(&format!("127.0.0.1:{without}")))?;
        ensure!(f16.status.success(), "f16 is refused too\n{}", process::tail(&f16.text(), 20));
        Ok(())
    });
    Ok(())
}

/// A server and its port. It takes no port 0, and one that was free a moment ago may be another's by now, who would answer
/// in its place: so a server is ours when it says itself that somebody came.
fn server(bin: &Path) -> Result<(Running, u16)> {
    let mut words = String::new();
    for _ in 0..8 {
        let scratch = cache::Scratch::new()?;
        let log = scratch.path().join("rpc-server.log");
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut c = Command::new(bin.join(build_tree::RPC_SERVER));
        c.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        let file = fs::File::create(&log)?;
        c.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let mut running = Running(c.spawn().with_context(|| format!("cannot run {}", process::shown(&c)))?);
        let start = Instant::now();
        while running.0.try_wait()?.is_none() {
            let _ = TcpStream::connect(("127.0.0.1", port));
            thread::sleep(Duration::from_millis(50));
            words = fs::read_to_string(&log)?;
            if words.contains("Accepted client connection") {
                return Ok((running, port));
            }
            ensure!(start.elapsed() < Duration::from_secs(600), "rpc-server does not listen\n{words}");
        }
    }
    bail!("rpc-server found no port\n{words}");
}

fn complete(bin: &Path, model: &Path, k: &str, v: &str, rpc: Option<&str>) -> Result<Finished> {
    let mut c = Command::new(bin.join("llama-completion"));
    c.arg("-m").arg(model).args(["-p", PROMPT, "-n", "16", "--temp", "0", "-no-cnv", "-fa", "on", "-lv", "4"]);
    c.args(["-c", "512", "--cache-type-k", k, "--cache-type-v", v]);
    if let Some(servers) = rpc {
        c.args(["--rpc", servers, "-ngl", "99"]);
    }
    process::run(&mut c, Some(LIMIT))
}

fn answer(bin: &Path, model: &Path, k: &str, v: &str, rpc: Option<&str>) -> Result<String> {
    let done = complete(bin, model, k, v, rpc)?;
    ensure!(done.status.success(), "{}\n{}", done.status, process::tail(&done.text(), 20));
    if rpc.is_some() {
        // The caches are where the layers are.
        let buffers = done.text().lines().filter(|l| l.contains("RPC") && l.contains("KV buffer")).count();
        ensure!(buffers >= 2, "{buffers} cache buffers on servers\n{}", process::tail(&done.text(), 60));
    }
    let text = done.stdout.trim().to_string();
    ensure!(!text.is_empty(), "an empty answer");
    Ok(text)
}

/// A way to a server on which its greeting loses the byte that tells of our types: how one without them greets.
fn without_types(port: u16) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?.port();
    // The threads end with their connections; nobody connects when the test is over.
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { return };
            let (Ok(to_server), Ok(to_client)) = (server.try_clone(), client.try_clone()) else { return };
            thread::spawn(move || pass(client, to_server, false));
            thread::spawn(move || pass(server, to_client, true));
        }
    });
    Ok(own)
}

fn pass(mut from: TcpStream, mut to: TcpStream, greets: bool) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    if greets {
        // The length of the answer, three numbers of the version, the byte.
        from.read_exact(&mut buffer[..12])?;
        if buffer[11] == 0 {
            bail!("a greeting without our types");
        }
        buffer[11] = 0;
        to.write_all(&buffer[..12])?;
    }
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            to.shutdown(std::net::Shutdown::Write)?;
            return Ok(());
        }
        to.write_all(&buffer[..n])?;
    }
}
