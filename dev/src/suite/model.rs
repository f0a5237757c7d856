//! A real model in the real tools: what a user types, and what he must then see.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use super::{tasks, Options, Tally};
use kv::compare::{Perplexity, Setup, Statistics};
use kv::pair::Pair;
use kv::process::{self, Finished};
use kv::{build_tree, cache, model};

const PROMPT: &str = "The capital of France is";
/// Prompts that this small model is decided about: f16, bf16 and q8_0 agree on the whole answer, so a difference is a
/// fault. On [`PROMPT`] they part from each other at the first word.
const CHAT: &str = "Count from 1 to 10.";
pub const TEXT: &str = "1, 2, 3, 4, 5, 6, 7, 8,";
/// Of CPU time on each core, far more than any of these runs takes; a tool that waits for input or serves on is ended by
/// it too.
const LIMIT: Duration = Duration::from_secs(180);

pub const HISTORY: &str = "kv-history";
pub const STEPS: &str = "kv-steps";

/// Two spin while they wait for each other, which takes minutes beside another part. What threads share out has checks of its own
/// with [`TWO_THREADS`].
const ONE_THREAD: [&str; 2] = ["-t", "1"];
const TWO_THREADS: [&str; 2] = ["-t", "2"];

pub struct Bench {
    bin: PathBuf,
    model: PathBuf,
    /// What tools said with f16, by their command line: several types are compared with one of them.
    with_f16: RefCell<BTreeMap<String, String>>,
}

pub fn run(options: &Options, tally: &mut Tally) -> Result<()> {
    let bin = tally.timed("build", || build_tree::build(&build_tree::Options::default(), &[]))?;
    let bench = Bench::new(&bin, &model::default_model()?);
    tally.check("llama-cli answers with srft4/srft4", || {
        let types = ["-st", "--cache-type-k", "srft4", "--cache-type-v", "srft4"];
        let answer = bench.answer("llama-cli", PROMPT, &[&types[..], &TWO_THREADS].concat())?;
        ensure!(!answer.is_empty(), "the answer is empty");
        Ok(())
    });
    for (tool, prompt, extra) in [("llama-cli", CHAT, "-st"), ("llama-completion", TEXT, "-no-cnv")] {
        for name in ["srft8", "srft4"] {
            tally.check(&format!("{tool} answers with {name}/{name} as with f16"), || {
                bench.same_answer(tool, prompt, &[extra], &["--cache-type-k", name, "--cache-type-v", name])
            });
        }
    }
    for (tool, prompt, extra) in [("llama-cli", CHAT, "-st"), ("llama-completion", TEXT, "-no-cnv")] {
        tally.check(&format!("{tool} answers with delta4/srft4 as with f16"), || {
            bench.same_answer(tool, prompt, &[extra], &["--cache-type-k", "delta4", "--cache-type-v", "srft4"])
        });
    }
    for tool in build_tree::TOOLS {
        tally.check(&format!("{tool} --help names srft4"), || bench.help_names_types(tool));
        tally.check(&format!("{tool} refuses an unknown type"), || bench.unknown_type(tool));
    }
    for tool in ["llama-cli", "llama-completion", "llama-perplexity"] {
        tally.check(&format!("{tool} -fa off with V srft4 says what to do"), || bench.v_without_flash(tool));
    }
    for (name, reason) in [("qjl1", "36%"), ("delta4", "for K alone")] {
        tally.check(&format!("llama-cli with V {name} says why not"), || {
            let done = bench.tool("llama-cli", &["-st", "-p", PROMPT, "-n", "4", "--cache-type-v", name])?;
            refused(&done, &[&format!("{name} is not for V"), reason, "srft4"])
        });
    }
    for name in ["srft4", "delta4"] {
        tally.check(&format!("K {name} without flash attention answers as f16"), || {
            bench.same_answer("llama-completion", TEXT, &["-no-cnv", "-fa", "off"], &["--cache-type-k", name])
        });
    }
    for tool in ["llama-completion", "llama-perplexity", "llama-bench"] {
        tally.check(&format!("{tool} points at what is wrong in a spec"), || bench.bad_spec(tool));
    }
    tally.check("llama-completion refuses a layer that the model does not have", || bench.layer_beyond());
    tally
        .check("a cache of layers of four types has the mix and the size that were asked for", || bench.mixed_layers());
    tally.check("llama-completion answers with types by layer as with f16", || {
        let types = ["--cache-type-k", "srft4,0-1=srft8,5=q8_0,-1=f16", "--cache-type-v", "srft4,-2--1=srft3"];
        bench.same_answer("llama-completion", TEXT, &["-no-cnv"], &types)
    });
    if options.quick {
        tally.skip("context shift with types by layer", 1, "not in --quick: it takes a quarter of a minute");
    } else {
        // Layers of floats and of ours in a cache that upstream rotates for the sake of one layer. 256 cells are the fewest
        // that there are; prompt and answer are more.
        tally.check("context shift with types by layer answers as with f16", || {
            let common = ["-no-cnv", "-c", "256", "-n", "270", "--context-shift"];
            bench.same_answer("llama-completion", TEXT, &common, &["--cache-type-k", "srft8,0=q8_0,10-19=f16"])
        });
    }
    tasks::run(options, &bench.bin, &bench.model, tally);
    steps(&bench, tally)?;
    history(options, &bench, tally)?;
    quality(options, &bench, tally)
}

/// The program that docs/measuring.md has for single steps. What they take is for a quiet machine.
fn steps(bench: &Bench, tally: &mut Tally) -> Result<()> {
    let program = build_tree::build(&build_tree::Options::default(), &[STEPS.into()])?.join(STEPS);
    let run = |pairs: &[&str]| {
        let mut c = Command::new(&program);
        c.arg("-m").arg(&bench.model).args(["--depth", "70", "--tokens", "2", "--rounds", "3"]).args(ONE_THREAD);
        c.args(pairs.iter().flat_map(|pair| ["--pair", pair]));
        process::run(&mut c, Some(LIMIT))
    };
    tally.check("kv-steps has a line for each pair, and the first beside itself", || {
        let pairs = ["f16/f16", "delta4/srft4", "srft4,recent=0/q8_0"];
        let done = run(&pairs)?;
        ensure!(done.status.success(), "{}\n{}", done.status, process::tail(&done.text(), 20));
        for pair in pairs {
            let line = done.stdout.lines().find(|line| line.split_whitespace().next() == Some(pair));
            let words: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
            let numbers: Vec<f64> = words.iter().filter_map(|word| word.parse().ok()).collect();
            ensure!(numbers.len() == 6 && numbers.iter().all(|x| *x > 0.0), "{pair}: {words:?}");
            ensure!(pair != pairs[0] || numbers.iter().skip(1).step_by(2).all(|x| *x == 1.0), "{words:?}");
        }
        Ok(())
    });
    tally.check("kv-steps refuses a pair without a V", || {
        let done = run(&["srft4"])?;
        ensure!(!done.status.success() && done.text().contains("srft4 is not a pair K/V"), "{}", done.text());
        Ok(())
    });
    Ok(())
}

/// Keys that are coded by their neighbours lose no more in a cache with a history than in a fresh one. Without precise rows of recent
/// cells: of those a batch shows its tokens more than slots that take turns.
fn history(options: &Options, bench: &Bench, tally: &mut Tally) -> Result<()> {
    if options.quick {
        tally.skip("what a cache's history costs", 1, "not in --quick: it decodes for two minutes");
        return Ok(());
    }
    let program = build_tree::build(&build_tree::Options::default(), &[HISTORY.into()])?.join(HISTORY);
    let text = model::default_text()?;
    let pairs = ["delta4,recent=0/f16", "delta3,recent=0/srft4"];
    for pair in pairs.into_iter().take(if options.soak { 2 } else { 1 }) {
        tally.check(&format!("{pair} in used cells and four slots within 10% of a fresh cache"), || {
            let mut c = Command::new(&program);
            c.arg("-m").arg(&bench.model).arg("-f").arg(&text).args(["--pair", pair, "--limit", "1.1"]);
            // Three groups of cells a piece. It decodes seven thousand tokens.
            c.args(["-n", "136"]).args(ONE_THREAD);
            let done = process::run(&mut c, Some(5 * LIMIT))?;
            done.stdout.lines().for_each(|line| println!("      {line}"));
            ensure!(done.status.success(), "{}\n{}", done.status, process::tail(&done.text(), 20));
            Ok(())
        });
    }
    Ok(())
}

impl Bench {
    pub fn new(bin: &Path, model: &Path) -> Bench {
        Bench { bin: bin.to_path_buf(), model: model.to_path_buf(), with_f16: RefCell::default() }
    }

    pub fn model(&self) -> &Path {
        &self.model
    }

    pub fn tool(&self, tool: &str, args: &[&str]) -> Result<Finished> {
        let mut c = Command::new(self.bin.join(tool));
        // What is given counts: the last one does.
        c.arg("-m").arg(&self.model).args(ONE_THREAD).args(args);
        process::run(&mut c, Some(LIMIT))
    }

    fn answer(&self, tool: &str, prompt: &str, args: &[&str]) -> Result<String> {
        let all = [&["-p", prompt, "-n", "12", "--temp", "0"], args].concat();
        let done = self.tool(tool, &all)?;
        ensure!(
            done.status.success(),
            "{tool} {}: {}\n{}",
            all.join(" "),
            done.status,
            process::tail(&done.text(), 20)
        );
        answer_in(&done.stdout, prompt).with_context(|| format!("no answer in\n{}", done.stdout))
    }

    /// The same answer with `types` as without.
    pub fn same_answer(&self, tool: &str, prompt: &str, common: &[&str], types: &[&str]) -> Result<()> {
        let key = format!("{tool} {prompt} {common:?}");
        let known = self.with_f16.borrow().get(&key).cloned();
        let f16 = known.map_or_else(|| self.answer(tool, prompt, common), Ok)?;
        self.with_f16.borrow_mut().insert(key, f16.clone());
        let ours = self.answer(tool, prompt, &[common, types].concat())?;
        ensure!(!f16.is_empty(), "the answer with f16 is empty");
        ensure!(f16 == ours, "with f16: {f16:?}\nwith {types:?}: {ours:?}");
        Ok(())
    }

    fn help_names_types(&self, tool: &str) -> Result<()> {
        let done = process::run(Command::new(self.bin.join(tool)).arg("--help"), Some(LIMIT))?;
        ensure!(done.exited(), "ended by {}", done.status);
        ensure!(done.text().contains("srft4"), "no srft4 in its help");
        Ok(())
    }

    fn unknown_type(&self, tool: &str) -> Result<()> {
        let done = self.tool(tool, &["--cache-type-k", "nosuch"])?;
        refused(&done, &["srft4", "f16"])
    }

    fn bad_spec(&self, tool: &str) -> Result<()> {
        let done = self.tool(tool, &["--cache-type-k", "srft4,0-1=srft9"])?;
        refused(&done, &["    srft4,0-1=srft9\n              ^", "srft8", "q8_0"])
    }

    fn layer_beyond(&self) -> Result<()> {
        let done =
            self.tool("llama-completion", &["-no-cnv", "-p", TEXT, "-n", "1", "--cache-type-k", "srft4,28-30=f16"])?;
        refused(&done, &["layers 28-30=f16", "no layer 30", "0 to 29"])
    }

    /// 30 layers of 3 heads of 64: K rows are 192 values, 204 bytes with srft8, 102 with srft4, 384 with f16. Of 256 cells 16 are
    /// kept as precise rows, in layers of srft4, with one more that is never read.
    fn mixed_layers(&self) -> Result<()> {
        let types = ["--cache-type-k", "srft4,0-1=srft8,5=q8_0,-1=f16", "--cache-type-v", "f16"];
        let all = [&["-no-cnv", "-p", TEXT, "-n", "1", "-c", "256", "-lv", "4"][..], &types].concat();
        let text = self.tool("llama-completion", &all)?.text();
        let bytes = 256 * (2 * 204 + 26 * 102 + 204 + 384) + 26 * 17 * 204;
        let bits = 8.0 * f64::from(bytes) / f64::from(256 * 30 * 192);
        let k = format!("K (srft8 x2 + srft4 x26 + q8_0 x1 + f16 x1, {bits:.2} bits/value with 16 recent cells)");
        ensure!(text.contains(&k), "no '{k}' in\n{}", process::tail(&text, 40));
        ensure!(!text.contains("guard:"), "the guard raised a layer of a model that needs none");
        let after = &text[text.find(&k).unwrap_or(0) + k.len()..];
        let mib: f64 = after.trim_start_matches(':').split_whitespace().next().unwrap_or("").parse()?;
        ensure!((mib - f64::from(bytes) / 1048576.0).abs() < 0.01, "K has {mib} MiB, {bytes} bytes were asked for");
        Ok(())
    }

    fn v_without_flash(&self, tool: &str) -> Result<()> {
        let text = model::default_text()?;
        let text = text.to_string_lossy();
        let extra: &[&str] = match tool {
            "llama-perplexity" => &["-f", &text, "-c", "128", "--chunks", "1"],
            "llama-cli" => &["-st", "-p", PROMPT, "-n", "4"],
            _ => &["-no-cnv", "-p", PROMPT, "-n", "4"],
        };
        let done = self.tool(tool, &[extra, &["-fa", "off", "--cache-type-v", "srft4"]].concat())?;
        refused(&done, &["flash", "-fa on"])
    }
}

/// Ended by itself, unsuccessfully, with all of `words` in its message.
fn refused(done: &Finished, words: &[&str]) -> Result<()> {
    let text = done.text();
    ensure!(!done.timed_out, "it was not refused: it hung and was killed");
    ensure!(done.exited(), "ended by {}, not by itself\n{}", done.status, process::tail(&text, 20));
    ensure!(!done.status.success(), "it was not refused");
    for word in words {
        ensure!(text.contains(word), "its message does not have '{word}':\n{}", process::tail(&text, 20));
    }
    Ok(())
}

/// llama-cli's answer is between the prompt and its timings; llama-completion prints prompt and answer alone.
pub(super) fn answer_in(stdout: &str, prompt: &str) -> Option<String> {
    let after = &stdout[stdout.rfind(prompt)? + prompt.len()..];
    let answer = after.split("\n[ Prompt:").next().unwrap_or(after);
    Some(answer.trim().to_string())
}

/// KL divergence against f16: small where it must be, and ordered as the bits are.
fn quality(options: &Options, bench: &Bench, tally: &mut Tally) -> Result<()> {
    let (ctx, chunks) = match (options.quick, options.soak) {
        (true, _) => (512, 1),
        (_, true) => (2048, 6),
        _ => (1024, 2),
    };
    let setup = Setup {
        bin: bench.bin.clone(),
        model: bench.model.clone(),
        text: model::default_text()?,
        ctx,
        chunks,
        depth: 0,
        threads: 1,
    };
    let scratch = cache::Scratch::new()?;
    let run = Perplexity::new(&setup, &scratch.path().join("logits"));
    run.write_base()?;
    let small_batches = ["-b", "8", "-ub", "8"];
    let by_two = [&small_batches[..], &TWO_THREADS].concat();
    // Whole batches are split among threads by queries.
    const BY_TWO: &str = "srft4";
    println!("model: KLD at {ctx} tokens, {chunks} chunks");
    let mut kld = |name: &str| measured(&run, tally, name, if name == BY_TWO { &TWO_THREADS } else { &[] });
    // The types themselves, and then with precise rows of recent cells.
    let [q4_0, srft8, srft4] = ["q4_0", "srft8", "srft4,recent=0"].map(&mut kld);
    let k_delta4 = kld("delta4,recent=0/f16");
    let recent = kld(BY_TWO);
    tally.check("recent cells take two thirds of srft4's KLD", || below(recent, srft4.map(|kld| kld / 3.0)));
    tally.check("delta4's KLD does not depend on the size of batches", || {
        let small = run.measure_with(&Pair::parse("delta4,recent=0/f16")?, &small_batches)?.statistics.kld;
        println!("      delta4/f16, batches of 8: KLD {small:.6}");
        below(Some(small), k_delta4.map(|kld| 1.1 * kld + 0.001))
    });
    tally.check("srft8's KLD is below 0.01", || below(srft8, Some(0.01)));
    tally.check("srft4's KLD is not above upstream's q4_0", || {
        below(srft4, q4_0.map(|kld| kld * (1.0 + f64::EPSILON) + f64::MIN_POSITIVE))
    });
    if options.quick {
        tally.skip("KLD of the other types", 1, "not in --quick: it takes a minute");
        return Ok(());
    }
    let mut kld = |name: &str| measured(&run, tally, name, &[]);
    let [srft3, srft2] = ["srft3,recent=0", "srft2,recent=0"].map(&mut kld);
    let [k_q4_0, k_srft4, k_delta3] = ["q4_0/f16", "srft4,recent=0/f16", "delta3,recent=0/f16"].map(&mut kld);
    let mixed = kld("srft4,0-14=srft8,recent=0");
    if options.soak {
        tally.check("in batches of 8, 128 recent cells take half of srft4's KLD", || {
            let small = run.measure_with(&Pair::parse("srft4,recent=128")?, &by_two)?.statistics.kld;
            println!("      srft4,recent=128, batches of 8: KLD {small:.6}");
            below(Some(small), srft4.map(|kld| kld / 2.0))
        });
    } else {
        tally.skip("recent cells in batches of 8", 1, "slow: run it with --soak");
    }
    tally.check("delta4's KLD as K is below half of srft4's", || below(k_delta4, k_srft4.map(|kld| 0.5 * kld)));
    // A bit less, and as good.
    tally.check("delta3's KLD as K is about that of upstream's q4_0", || below(k_delta3, k_q4_0.map(|kld| 1.1 * kld)));
    // Batches of eight tokens are split among threads by cells, as decoding is.
    tally.check("srft4's KLD in small batches is that of large ones", || {
        let small = run.measure_with(&Pair::parse("srft4,recent=0")?, &by_two)?.statistics.kld;
        println!("      srft4, batches of 8: KLD {small:.6}");
        below(Some(small), srft4.map(|kld| 1.2 * kld + 0.003))
    });
    tally.check("half of the layers at 8 bits, a KLD between: srft8 < srft4,0-14=srft8 < srft4", || {
        below(srft8, mixed).and(below(mixed, srft4))
    });
    tally.check("fewer bits, more KLD: srft8 < srft4 < srft3 < srft2", || {
        below(srft8, srft4).and(below(srft4, srft3)).and(below(srft3, srft2))
    });
    Ok(())
}

/// The KLD of a pair, a check of its own.
fn measured(run: &Perplexity, tally: &mut Tally, name: &str, threads: &[&str]) -> Option<f64> {
    let mut found = None;
    tally.check(&format!("llama-perplexity {name}"), || {
        let Statistics { ppl, kld, .. } = run.measure_with(&Pair::parse(name)?, threads)?.statistics;
        ensure!(ppl.is_finite() && kld.is_finite(), "perplexity {ppl}, KLD {kld}");
        println!("      {name}: KLD {kld:.6}, perplexity {ppl:.4}");
        found = Some(kld);
        Ok(())
    });
    found
}

fn below(a: Option<f64>, b: Option<f64>) -> Result<()> {
    match (a, b) {
        (Some(a), Some(b)) if a < b => Ok(()),
        (Some(a), Some(b)) => bail!("{a} is not below {b}"),
        _ => bail!("not measured: its run failed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        // Captured: llama-cli -st, and llama-completion -no-cnv.
        let cli = "Loading model... |\x08-\x08 \n\n> The capital of France is\nL'aujourcé! Welcome to my world.\n\n[ Prompt: 235.0 t/s | Generation: 94.7 t/s ]\n\n\nExiting...\n";
        assert_eq!(answer_in(cli, PROMPT).unwrap(), "L'aujourcé! Welcome to my world.");
        let completion = "The capital of France is Paris.\n\nThe United States has\n\n";
        assert_eq!(answer_in(completion, PROMPT).unwrap(), "Paris.\n\nThe United States has");
        assert_eq!(answer_in("error", PROMPT), None);
    }
}
