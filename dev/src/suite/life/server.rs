//! llama-server with four slots and more clients than that: some hang up in the middle, slots are saved and restored
//! meanwhile, and everybody gets the answer that he would have got alone.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use ggml_ext::state;
use serde_json::{json, Value};

use super::{Options, Tally};
use kv::{cache, http};

const SLOTS: usize = 4;
const PATH: &str = "/completion";

/// With slots whose files lie in its folder.
struct Server(kv::server::Server);

pub fn run(options: &Options, bin: &Path, model: &Path, tally: &mut Tally) {
    let (clients, time) = if options.soak { (16, Duration::from_secs(180)) } else { (8, Duration::ZERO) };
    let pairs: &[[&str; 2]] =
        if options.quick { &[["srft4", "srft4"]] } else { &[["srft4", "srft4"], ["delta4", "srft4"]] };
    for [k, v] in pairs {
        if options.quick {
            tally.skip("llama-server with many clients", 1, "not in --quick: it takes half a minute");
        } else {
            loaded(bin, model, [k, v], clients, time, tally);
        }
        tally.check(&format!("llama-server saves and restores a slot of {k}/{v}"), || {
            Server::start(bin, model, k, v)?.slot_files()
        });
        tally.check(&format!("llama-server refuses a slot file of another type than {k}/{v}"), || {
            foreign_slot_file(bin, model, k, v)
        });
    }
    // What llama.cpp does to its own types is its own affair, but it must not end the server.
    let all = [["srft4", "srft4"], ["f16", "f16"], ["delta4", "srft4"]];
    if options.quick {
        tally.skip("llama-server with bad slot files", 1, "not in --quick: it takes half a minute");
        return;
    }
    for [k, v] in &all[..2 + usize::from(options.soak)] {
        tally.check(&format!("llama-server refuses slot files of {k}/{v} that were cut or crafted"), || {
            bad_slot_files(bin, model, k, v)
        });
    }
}

/// Clients that ask at the same time.
fn loaded(bin: &Path, model: &Path, [k, v]: [&str; 2], clients: usize, time: Duration, tally: &mut Tally) {
    let mut served = [0; 3];
    tally.check(&format!("llama-server, {SLOTS} slots of {k}/{v}, {clients} clients, some hang up"), || {
        served = Server::start(bin, model, k, v)?.load(clients, time)?;
        Ok(())
    });
    for (what, n) in ["answers of llama-server", "streams left", "slots saved and restored"].iter().zip(served) {
        tally.count(what, n);
    }
}

/// Prompts of all sizes that this small model is decided about: rows of numbers.
fn prompt(i: usize) -> String {
    let (from, n) = (1 + 7 * (i % 5), [6, 20, 45, 12, 80, 9, 30][i % 7]);
    (from..from + n).map(|x| format!("{x}, ")).collect::<String>().trim_end().to_string()
}

fn question(i: usize) -> Value {
    json!({ "prompt": prompt(i), "n_predict": 8 + 4 * (i % 3), "temperature": 0, "cache_prompt": true })
}

impl Server {
    fn start(bin: &Path, model: &Path, k: &str, v: &str) -> Result<Server> {
        let scratch = cache::Scratch::new()?;
        let mut c = Command::new(bin.join("llama-server"));
        c.arg("-m").arg(model).args(["--parallel", &SLOTS.to_string(), "-c", "4096", "--cache-ram", "0", "-fa", "on"]);
        // Both ways to share cells between slots.
        c.arg(if k == "srft4" { "--no-kv-unified" } else { "--kv-unified" });
        c.args(["--cache-type-k", k, "--cache-type-v", v]).arg("--slot-save-path").arg(scratch.path());
        kv::server::Server::start(&mut c, scratch).map(Server)
    }

    fn ask(&self, question: &Value) -> Result<String> {
        let answer = self.0.post(PATH, question)?;
        let text = answer["content"].as_str().context("an answer without content")?;
        ensure!(!text.is_empty(), "an empty answer");
        Ok(text.to_string())
    }

    fn slot(&self, slot: usize, action: &str) -> Result<Value> {
        let file = json!({ "filename": format!("slot-{slot}.bin") });
        let (status, answer) = self.0.request("POST", &format!("/slots/{slot}?action={action}"), &file)?;
        ensure!(status == 200, "{action} of slot {slot}: {answer}\n{}", self.0.last_words());
        Ok(answer)
    }

    /// Answers, streams left, slots saved and restored.
    fn load(&self, clients: usize, time: Duration) -> Result<[u64; 3]> {
        let alone: Vec<String> = (0..7).map(|i| self.ask(&question(i))).collect::<Result<_>>()?;
        let before = self.resident_mib();
        let (start, answers, hung_up, saved) =
            (Instant::now(), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let client = |n: usize| -> Result<()> {
            for round in 0.. {
                if round >= 2 && start.elapsed() >= time {
                    break;
                }
                let i = (n + 3 * round) % 7;
                match (n + round) % 4 {
                    3 => {
                        let mut long = question(i);
                        long["stream"] = true.into();
                        long["n_predict"] = 120.into();
                        hang_up(self.0.port(), PATH, &long, 700)?;
                        hung_up.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => {
                        let answer = self.ask(&question(i))?;
                        ensure!(answer == alone[i], "{:?} alone: {:?}\namong others: {answer:?}", prompt(i), alone[i]);
                        answers.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            Ok(())
        };
        // Slots are saved as they come free, and restored into the same.
        let saver = || -> Result<()> {
            for round in 0.. {
                if round >= 3 && start.elapsed() >= time {
                    break;
                }
                self.slot(round % SLOTS, "save")?;
                self.slot(round % SLOTS, "restore")?;
                saved.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(200));
            }
            Ok(())
        };
        let results: Vec<Result<()>> = thread::scope(|scope| {
            let mut threads: Vec<_> = (0..clients).map(|n| scope.spawn(move || client(n))).collect();
            threads.push(scope.spawn(saver));
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| bail!("a client panicked"))).collect()
        });
        for result in results {
            result.with_context(|| format!("the server's last words:\n{}", self.0.last_words()))?;
        }
        // It still answers, and has not grown.
        ensure!(self.ask(&question(0))? == alone[0], "another answer afterwards");
        if let (Some(before), Some(after)) = (before, self.resident_mib()) {
            ensure!(after < before + 64.0, "it grew from {before:.0} to {after:.0} MiB");
        }
        let [answers, left, saved] = [answers, hung_up, saved].map(AtomicU64::into_inner);
        let seconds = start.elapsed().as_secs();
        println!("      {answers} answers, {left} streams left, {saved} slots saved and restored in {seconds} s");
        Ok([answers, left, saved])
    }

    /// Where the system tells.
    fn resident_mib(&self) -> Option<f64> {
        self.memory_mib("VmRSS:")
    }

    /// The most that it had.
    fn peak_mib(&self) -> Option<f64> {
        self.memory_mib("VmHWM:")
    }

    fn memory_mib(&self, name: &str) -> Option<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok().map(|kib| kib / 1024.0)
    }

    fn slot_files(&self) -> Result<()> {
        let mut first = question(4);
        first["id_slot"] = 1.into();
        let alone = self.ask(&first)?;
        let saved = self.slot(1, "save")?;
        let n = saved["n_saved"].as_u64().context("how many were saved?")?;
        ensure!(n > 100, "{n} tokens were saved");
        // Others write to the cells meanwhile.
        self.slot(1, "erase")?;
        for i in 0..3 {
            self.ask(&question(i))?;
        }
        let restored = self.slot(1, "restore")?;
        ensure!(restored["n_restored"].as_u64() == Some(n), "{n} tokens were saved: {restored}");
        let (status, answer) = self.0.request("POST", PATH, &first)?;
        ensure!(status == 200, "status {status}: {answer}");
        ensure!(answer["content"].as_str() == Some(&alone), "before: {alone:?}\nafterwards: {}", answer["content"]);
        let cached = answer["timings"]["cache_n"].as_u64().or(answer["tokens_cached"].as_u64()).unwrap_or(0);
        ensure!(cached > 0, "the restored tokens were not used: {answer}");
        Ok(())
    }
}

fn foreign_slot_file(bin: &Path, model: &Path, k: &str, v: &str) -> Result<()> {
    let other = Server::start(bin, model, "srft8", "srft8")?;
    let mut q = question(1);
    q["id_slot"] = 0.into();
    other.ask(&q)?;
    other.slot(0, "save")?;
    let server = Server::start(bin, model, k, v)?;
    let alone = server.ask(&q)?;
    let name = "slot-0.bin";
    fs::copy(other.0.folder().join(name), server.0.folder().join(name))?;
    let (status, answer) = server.0.request("POST", "/slots/0?action=restore", &json!({ "filename": name }))?;
    ensure!(status != 200, "it was taken: {answer}");
    // The log has a thread of its own, which may be late.
    let named = || {
        let log = server.0.log();
        log.contains("srft8_64") && log.contains(&format!("{k}_64"))
    };
    let until = Instant::now() + Duration::from_secs(120);
    while !named() && Instant::now() < until {
        thread::sleep(Duration::from_millis(100));
    }
    ensure!(named(), "the log does not name both\n{}", server.0.last_words());
    ensure!(server.ask(&q)? == alone, "another answer afterwards");
    Ok(())
}

/// Cut everywhere, and with lengths that promise more than there is.
fn bad_slot_files(bin: &Path, model: &Path, k: &str, v: &str) -> Result<()> {
    let server = Server::start(bin, model, k, v)?;
    let mut q = question(4);
    q["id_slot"] = 0.into();
    let alone = server.ask(&q)?;
    server.slot(0, "save")?;
    let path = server.0.folder().join("slot-0.bin");
    let file = fs::read(&path)?;
    let mut bad: Vec<(String, Vec<u8>)> = [11, 1000, 30000.min(file.len() / 2), file.len() - 1]
        .map(|n| (format!("cut to {n} of {} bytes", file.len()), file[..n].to_vec()))
        .into();
    if k != "f16" {
        let crafted =
            |field: &str, at: usize, value: u64| Ok::<_, anyhow::Error>((field.to_string(), craft(&file, at, value)?));
        bad.extend([crafted("meta_bytes of 6 GiB", 8, 6 << 30)?, crafted("data_bytes of 6 GiB", 24, 6 << 30)?]);
    }
    let before = server.peak_mib();
    for (what, bytes) in bad {
        fs::write(&path, bytes)?;
        let name = json!({ "filename": "slot-0.bin" });
        let (status, answer) = server
            .0
            .request("POST", "/slots/0?action=restore", &name)
            .with_context(|| format!("{what}: the server's last words:\n{}", server.0.last_words()))?;
        ensure!(status != 200, "{what}: it was taken: {answer}");
        ensure!(server.ask(&q)? == alone, "{what}: another answer afterwards");
    }
    if let (Some(before), Some(after)) = (before, server.peak_mib()) {
        ensure!(after < before + 64.0, "its peak grew from {before:.0} to {after:.0} MiB");
    }
    fs::write(&path, file)?;
    server.slot(0, "restore")?;
    ensure!(server.ask(&q)? == alone, "another answer from the file as it was saved");
    Ok(())
}

/// A slot file with another number in its header, and the checksum that fits.
fn craft(file: &[u8], at: usize, value: u64) -> Result<Vec<u8>> {
    let magic = state::MAGIC.to_le_bytes();
    let begin = file.windows(4).position(|w| w == magic).context("a slot file without a header")?;
    let mut file = file.to_vec();
    let header = &mut file[begin..];
    let body = state::PREFIX_BYTES..state::PREFIX_BYTES + state::body_bytes(header).map_err(anyhow::Error::msg)?;
    header[body.start + at..][..8].copy_from_slice(&value.to_le_bytes());
    let sum = state::checksum(&[&header[..12], &header[body]]);
    header[12..20].copy_from_slice(&sum.to_le_bytes());
    Ok(file)
}

/// Asks for a stream, reads `bytes` of it and hangs up.
fn hang_up(port: u16, path: &str, body: &Value, bytes: usize) -> Result<()> {
    let mut stream = http::send(port, "POST", path, &body.to_string())?;
    let mut some = vec![0; bytes];
    stream.read_exact(&mut some).context("a stream that ended before it was left")?;
    if !String::from_utf8_lossy(&some).starts_with("HTTP/1.1 200") {
        bail!("no stream: {}", String::from_utf8_lossy(&some));
    }
    Ok(())
}
