//! llama-perplexity: how far a cache moves the model from what it says with f16.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, Result};

use super::size::CacheSize;
use super::Setup;
use crate::pair::Pair;
use crate::process;

/// Tokens of a batch, for f16 beside itself. The base is computed in batches of 512, and below 64 ggml's attention has another
/// kernel on the CPU.
pub const SMALL_BATCH: u32 = 32;

const NINE_IN_TEN: &str = "90.0%   KLD:";

/// The closing statistics of `--kl-divergence`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    pub ppl: f64,
    /// The mean.
    pub kld: f64,
    pub kld_median: f64,
    /// What one in a thousand tokens is beyond.
    pub kld_999: f64,
    /// Tokens whose most likely token is the same, in percent.
    pub same_top: f64,
}

pub struct Measured {
    pub statistics: Statistics,
    /// What one in ten tokens is beyond.
    pub kld_90: Option<f64>,
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
        self.write_base_with(&[])
    }

    pub fn write_base_with(&self, extra: &[&str]) -> Result<f64> {
        let mut command = self.command();
        command.args(extra);
        let text = process::run_ok(&mut command)?.text();
        number_after(&text, "Final estimate: PPL =").ok_or_else(|| unreadable(&command, &text))
    }

    pub fn measure(&self, pair: &Pair) -> Result<Measured> {
        self.measure_with(pair, &[])
    }

    /// f16 in other batches: how far the order of sums alone moves the model.
    pub fn measure_noise(&self) -> Result<Measured> {
        self.measure_with(&Pair::f16(), &["-ub", &SMALL_BATCH.to_string()])
    }

    pub fn measure_with(&self, pair: &Pair, extra: &[&str]) -> Result<Measured> {
        let mut command = self.command();
        command.args(["--kl-divergence", "--cache-type-k", &pair.k, "--cache-type-v", &pair.v]).args(extra);
        let text = process::run_ok(&mut command)?.text();
        let statistics = parse_statistics(&text).ok_or_else(|| unreadable(&command, &text))?;
        Ok(Measured { statistics, kld_90: number_after(&text, NINE_IN_TEN), size: CacheSize::in_log(&text) })
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
        kld_median: number_after(text, "Median  KLD:")?,
        kld_999: number_after(text, "99.9%   KLD:")?,
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
   1      13.6284 ±    3.2251       0.03413 ±    0.03172       0.04634 ±    0.00730     4.303 ±  0.606 %    89.764 ±  2.700 %
   2      16.6783 ±    3.2205       0.04878 ±    0.01959       0.03932 ±    0.00387     4.434 ±  0.386 %    90.157 ±  1.873 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  16.678284 ±   3.220539
Mean PPL(base)                :  15.884206 ±   3.041708
Mean PPL(Q)/PPL(base)         :   1.049992 ±   0.020571

====== KL divergence statistics ======
Mean    KLD:   0.039321 ±   0.003870
Maximum KLD:   0.706910
99.9%   KLD:   0.645249
99.0%   KLD:   0.206329
Median  KLD:   0.027487
10.0%   KLD:   0.002840

====== Token probability statistics ======
Median  Δp: -0.004%
Same top p: 90.157 ± 1.873 %
";

    #[test]
    fn statistics_of_a_real_run() {
        let s = parse_statistics(OUTPUT).unwrap();
        let wanted =
            Statistics { ppl: 16.678284, kld: 0.039321, kld_median: 0.027487, kld_999: 0.645249, same_top: 90.157 };
        assert_eq!(s, wanted);
        assert_eq!(parse_statistics("nothing"), None);
        let broken = OUTPUT.replace("0.039321", "    -nan");
        assert!(parse_statistics(&broken).unwrap().kld.is_nan());
    }

    #[test]
    fn what_one_token_in_ten_is_beyond() {
        // Captured: SmolLM2-135M, calibrate/text.txt, -c 512 --chunks 4, band4,29=band2,recent=0 and srft4.
        assert_eq!(number_after("90.0%   KLD:   0.034669", NINE_IN_TEN), Some(0.034669));
        assert_eq!(number_after(OUTPUT, NINE_IN_TEN), None);
    }

    #[test]
    fn the_base_run_ends_a_line_of_another() {
        let text = "perplexity: 6.35 seconds per pass - ETA 0.07.482.618 I Final estimate: PPL = 55.9299 +/- 12.27359";
        assert_eq!(number_after(text, "Final estimate: PPL ="), Some(55.9299));
    }
}
