//! llama-perplexity: how far a cache moves the model from what it says with f16.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, Result};

use super::size::CacheSize;
use super::Setup;
use crate::pair::Pair;
use crate::process;

/// The closing statistics of `--kl-divergence`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    pub ppl: f64,
    pub kld: f64,
    /// Tokens whose most likely token is the same, in percent.
    pub same_top: f64,
}

pub struct Measured {
    pub statistics: Statistics,
    pub size: Option<CacheSize>,
}

/// Runs against one file of base logits.
pub struct Perplexity<'a> {
    setup: &'a Setup,
    base: PathBuf,
}

impl<'a> Perplexity<'a> {
    pub fn new(setup: &'a Setup, base: &Path) -> Perplexity<'a> {
        Perplexity { setup, base: base.to_path_buf() }
    }

    fn command(&self) -> Command {
        let Setup { bin, model, text, ctx, chunks, threads, .. } = self.setup;
        let mut c = Command::new(bin.join("llama-perplexity"));
        c.arg("-m").arg(model).arg("-f").arg(text).args(["-fa", "on", "-lv", "4"]);
        c.args(["-c", &ctx.to_string(), "--chunks", &chunks.to_string(), "-t", &threads.to_string()]);
        c.arg("--kl-divergence-base").arg(&self.base);
        c
    }

    /// The f16 logits that the others are measured against; returns f16's perplexity.
    pub fn write_base(&self) -> Result<f64> {
        let mut command = self.command();
        let text = process::run_ok(&mut command)?.text();
        number_after(&text, "Final estimate: PPL =").ok_or_else(|| unreadable(&command, &text))
    }

    pub fn measure(&self, pair: &Pair) -> Result<Measured> {
        self.measure_with(pair, &[])
    }

    pub fn measure_with(&self, pair: &Pair, extra: &[&str]) -> Result<Measured> {
        let mut command = self.command();
        command.args(["--kl-divergence", "--cache-type-k", &pair.k, "--cache-type-v", &pair.v]).args(extra);
        let text = process::run_ok(&mut command)?.text();
        let statistics = parse_statistics(&text).ok_or_else(|| unreadable(&command, &text))?;
        Ok(Measured { statistics, size: CacheSize::in_log(&text) })
    }
}

fn unreadable(command: &Command, text: &str) -> anyhow::Error {
    anyhow!(
        "no result in the output of {}\n{}\nIs the text long enough for --ctx and --chunks?",
        process::shown(command),
        process::tail(text, 20)
    )
}

pub fn parse_statistics(text: &str) -> Option<Statistics> {
    Some(Statistics {
        ppl: number_after(text, "Mean PPL(Q)                   :")?,
        kld: number_after(text, "Mean    KLD:")?,
        same_top: number_after(text, "Same top p:")?,
    })
}

fn number_after(text: &str, mark: &str) -> Option<f64> {
    let at = text.rfind(mark)? + mark.len();
    text[at..].split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Captured: SmolLM2-135M, -c 256 --chunks 2 -ctk q4_0 -ctv q4_0 -lv 4.
    const OUTPUT: &str = "\
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   1      80.9458 ±   26.1781      -0.04130 ±    0.03082       0.05206 ±    0.00553     3.785 ±  0.524 %    85.827 ±  3.107 %
   2      55.3739 ±   12.0452      -0.00999 ±    0.02025       0.04439 ±    0.00307     3.493 ±  0.356 %    86.614 ±  2.141 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  55.373859 ±  12.045222
Mean PPL(base)                :  55.929898 ±  12.273572
Mean PPL(Q)/PPL(base)         :   0.990058 ±   0.020053

====== KL divergence statistics ======
Mean    KLD:   0.044388 ±   0.003070
Maximum KLD:   0.554123

====== Token probability statistics ======
Same top p: 86.614 ± 2.141 %
";

    #[test]
    fn statistics_of_a_real_run() {
        let s = parse_statistics(OUTPUT).unwrap();
        assert_eq!(s, Statistics { ppl: 55.373859, kld: 0.044388, same_top: 86.614 });
        assert_eq!(parse_statistics("nothing"), None);
        let broken = OUTPUT.replace("0.044388", "    -nan");
        assert!(parse_statistics(&broken).unwrap().kld.is_nan());
    }

    #[test]
    fn the_base_run_ends_a_line_of_another() {
        let text = "perplexity: 6.35 seconds per pass - ETA 0.07.482.618 I Final estimate: PPL = 55.9299 +/- 12.27359";
        assert_eq!(number_after(text, "Final estimate: PPL ="), Some(55.9299));
    }
}
