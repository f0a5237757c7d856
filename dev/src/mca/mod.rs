//! `cargo kv mca`: the cost of decode's inner loops on Arm cores that are not here.
//!
//! Programs that run one block of cells between two marks ([`programs`]: ours, and ggml's own loops from the patched tree) are
//! built for aarch64 and traced in emulation ([`trace`]); what was executed between the marks, in that order, goes to
//! llvm-mca, whose model of a core says how many cycles it takes ([`simulate`]). So no loop is picked out by hand, and
//! set-up, unpacking and what compilers made of it all count. Left out is what a model leaves out: caches, and branches
//! that are mispredicted.

mod programs;
mod simulate;
mod trace;

use std::path::PathBuf;

use anyhow::{anyhow, Result};
use serde_json::json;

use crate::cross::{self, Program, AARCH64, AARCH64_GCC, AARCH64_GXX, QEMU};
use kv::cache;
use kv::progress::Spinner;
use kv::table::Table;
use programs::Programs;
use simulate::Simulator;
use trace::Disassembly;

/// Cells between the marks.
const CELLS: f64 = 64.0;
const CLANG: Program = Program { name: "clang++", packages: &["clang"] };

#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Options {
    /// Models of cores, as llvm-mca names them
    #[arg(long, value_name = "CPU,…", value_delimiter = ',', default_value = "apple-m1,neoverse-n1")]
    pub cpu: Vec<String>,
    /// The table of kernels: neon, dotprod or i8mm
    #[arg(long, value_name = "TABLE", default_value = "dotprod")]
    pub table: String,
    /// Families as K/V, ggml's f16 and q4_0 among them
    #[arg(
        long,
        value_name = "K/V,…",
        value_delimiter = ',',
        default_value = "f16/f16,q4_0/q4_0,srft4/srft4,delta4/srft4,polar4/polar4"
    )]
    pub types: Vec<String>,
    /// Write the figures there (- is stdout)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Keep the traces, as assembly, in this folder
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
}

/// Cycles and instructions per cell and KV head of one pair on one core.
struct Cost {
    cpu: String,
    pair: String,
    k: [f64; 2],
    v: [f64; 2],
}

impl Cost {
    fn cycles(&self) -> f64 {
        self.k[0] + self.v[0]
    }
}

pub fn mca(options: &Options) -> Result<()> {
    cross::programs(&[AARCH64_GCC, AARCH64_GXX, QEMU, CLANG]).map_err(|why| anyhow!(why))?;
    cross::rust_target(AARCH64).map_err(|why| anyhow!(why))?;
    let simulator = Simulator::find()?;
    let scratch = cache::Scratch::new()?;
    let programs = Programs::build(scratch.path())?;
    let mut costs = Vec::new();
    for pair in &options.types {
        let (k, v) = pair.split_once('/').unwrap_or((pair, pair));
        let sides = [format!("{k}-k"), format!("{v}-v")];
        for cpu in &options.cpu {
            let _spinner = Spinner::new(&format!("{pair} on {cpu}"));
            let mut figures = [[0.0; 2]; 2];
            for (side, figures) in sides.iter().zip(&mut figures) {
                let (program, arguments) = programs.command(&options.table, side);
                let code = Disassembly::of(program, &simulator)?;
                let executed = trace::between_marks(program, &arguments, &code, scratch.path())?;
                let assembly = code.listing(&executed)?;
                if let Some(dir) = &options.keep {
                    std::fs::create_dir_all(dir)?;
                    std::fs::write(dir.join(format!("{side}.s")), &assembly)?;
                }
                let cycles = simulator.cycles(cpu, &assembly, scratch.path())?;
                *figures = [cycles as f64 / CELLS, executed.len() as f64 / CELLS];
            }
            costs.push(Cost { cpu: cpu.clone(), pair: pair.clone(), k: figures[0], v: figures[1] });
        }
    }
    print!("{}", report(&costs));
    println!("\ncycles per cell and KV head, head size 128, 4 query heads; instructions in brackets");
    println!("{}, {}, kernels: {}", simulator.name(), programs.compiler(), options.table);
    write_json(options, &costs)
}

/// Cycles with the ratio to f16/f16 and q4_0/q4_0 of the same core, where these were asked for.
fn report(costs: &[Cost]) -> Table {
    let mut table = Table::new(&["core", "K/V", "K", "", "V", "", "K + V", "x f16", "x q4_0"], 2);
    for cost in costs {
        let against = |pair: &str| {
            let of = costs.iter().find(|c| c.cpu == cost.cpu && c.pair == pair);
            of.map_or("-".to_string(), |of| format!("{:.2}", cost.cycles() / of.cycles()))
        };
        let [k, v] =
            [cost.k, cost.v].map(|[cycles, instructions]| (format!("{cycles:.1}"), format!("({instructions:.0})")));
        table.row(vec![
            cost.cpu.clone(),
            cost.pair.clone(),
            k.0,
            k.1,
            v.0,
            v.1,
            format!("{:.1}", cost.cycles()),
            against("f16/f16"),
            against("q4_0/q4_0"),
        ]);
    }
    table
}

fn write_json(options: &Options, costs: &[Cost]) -> Result<()> {
    let Some(path) = &options.json else { return Ok(()) };
    let rows: Vec<_> = costs
        .iter()
        .map(|c| {
            json!({
                "cpu": c.cpu, "pair": c.pair, "table": options.table,
                "k_cycles": c.k[0], "k_instructions": c.k[1], "v_cycles": c.v[0], "v_instructions": c.v[1],
            })
        })
        .collect();
    let text = serde_json::to_string_pretty(&rows)?;
    if path.as_os_str() == "-" {
        println!("{text}");
        return Ok(());
    }
    std::fs::write(path, text + "\n").map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_same_core() {
        let cost =
            |cpu: &str, pair: &str, k: f64| Cost { cpu: cpu.into(), pair: pair.into(), k: [k, 9.0], v: [1.0, 9.0] };
        let costs = [cost("a", "f16/f16", 9.0), cost("a", "srft4/srft4", 4.0), cost("b", "srft4/srft4", 4.0)];
        let text = report(&costs).to_string();
        let line = |n: usize| text.lines().nth(n).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(line(2), "a srft4/srft4 4.0 (9) 1.0 (9) 5.0 0.50 -");
        assert_eq!(line(3), "b srft4/srft4 4.0 (9) 1.0 (9) 5.0 - -");
    }
}
