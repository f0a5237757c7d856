//! The instructions that a program executed between its marks, in order, as assembly.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Command;

use anyhow::{bail, ensure, Context, Result};

use super::simulate::Simulator;
use crate::cross::QEMU;
use kv::process;

/// The function that is called at the beginning and at the end.
const MARK: &str = "kv_mark";

/// A program's instructions by their addresses.
pub struct Disassembly {
    instructions: HashMap<u64, String>,
    mark: u64,
}

impl Disassembly {
    pub fn of(program: &Path, simulator: &Simulator) -> Result<Disassembly> {
        let mut objdump = Command::new(simulator.objdump());
        objdump.args(["-d", "--no-show-raw-insn", "--mattr=+v8.6a,+fullfp16"]).arg(program);
        Disassembly::parse(&process::run_ok(&mut objdump)?.stdout)
    }

    /// `0000000000400d80 <name>:` begins a function, `  400d80:   ldr q0, [x1]` is an instruction.
    fn parse(text: &str) -> Result<Disassembly> {
        let (mut instructions, mut mark) = (HashMap::new(), None);
        for line in text.lines() {
            let Some((address, rest)) = line.split_once([':', ' ']).filter(|_| !line.starts_with(' ')) else {
                if let Some((address, instruction)) = line.split_once(':') {
                    if let Ok(address) = u64::from_str_radix(address.trim(), 16) {
                        instructions.insert(address, instruction.trim().to_string());
                    }
                }
                continue;
            };
            if rest.trim() == format!("<{MARK}>:") {
                mark = u64::from_str_radix(address, 16).ok();
            }
        }
        Ok(Disassembly { instructions, mark: mark.with_context(|| format!("the program has no {MARK}"))? })
    }

    /// Assembly for llvm-mca, which follows no branch: where one leads to does not matter, and has no name there.
    pub fn listing(&self, executed: &[u64]) -> Result<String> {
        let mut text = String::new();
        for address in executed {
            let known = self.instructions.get(address).with_context(|| format!("no instruction at {address:#x}"))?;
            text += &without_targets(known);
            text.push('\n');
        }
        Ok(text)
    }
}

/// The same instruction, leading to a label.
fn without_targets(instruction: &str) -> String {
    let code = instruction.split(['<', '/']).next().unwrap_or_default().trim().replace('\t', " ");
    let (name, operands) = code.split_once(' ').unwrap_or((&code, ""));
    let all_but_last = operands.rsplit_once(',').map_or("", |(first, _)| first);
    match name {
        "b" | "bl" | "br" | "blr" | "ret" => "b there".to_string(),
        "cbz" | "cbnz" | "tbz" | "tbnz" | "adr" | "adrp" => format!("{name} {all_but_last}, there"),
        _ if name.starts_with("b.") => format!("{name} there"),
        _ => code,
    }
}

/// Runs the program in emulation, an instruction at a time.
pub fn between_marks(program: &Path, arguments: &[String], code: &Disassembly, dir: &Path) -> Result<Vec<u64>> {
    let log = dir.join("trace.log");
    let help = process::run(Command::new(QEMU.name).arg("-help"), None)?.text();
    let single = if help.contains("-one-insn-per-tb") { "-one-insn-per-tb" } else { "-singlestep" };
    let mut qemu = Command::new(QEMU.name);
    qemu.args(["-cpu", "max,sve=off", single, "-d", "exec,nochain", "-D"]).arg(&log).arg(program).args(arguments);
    process::run_ok(&mut qemu)?;
    let lines = BufReader::new(File::open(&log)?).lines();
    let executed = cut(lines.map_while(Result::ok).filter_map(|line| traced(&line)), code.mark)?;
    std::fs::remove_file(log)?;
    Ok(executed)
}

/// `Trace 0: 0x7f8234000100 [0000000000009301/0000000000400d80/00000001/00000201] _start`
fn traced(line: &str) -> Option<u64> {
    let place = line.strip_prefix("Trace ")?.split_once('[')?.1;
    u64::from_str_radix(place.split('/').nth(1)?, 16).ok()
}

/// From behind the first call of the mark to the second.
fn cut(addresses: impl Iterator<Item = u64>, mark: u64) -> Result<Vec<u64>> {
    let mut executed = Vec::new();
    let mut marks = 0;
    for address in addresses {
        marks += usize::from(address == mark);
        match marks {
            0 => {}
            1 => executed.push(address),
            _ => {
                ensure!(executed.len() > 1, "nothing was executed between the marks");
                return Ok(executed);
            }
        }
    }
    bail!("the program met {marks} of its two marks")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_becomes_assembly() {
        let text = "\nDisassembly of section .text:\n\n0000000000400d80 <kv_mark>:\n  400d80:      \tret\n\n\
            0000000000400d90 <work>:\n  400d90:      \tldr\tq0, [x1], #16\n  400d94:      \tcbnz\tx2, 0x400d90 <work>\n\
            \x20 400d98:      \tb.ne\t0x400d90 <work+0x0>\n  400d9c:      \tadd\tx0, x1, #8 // =8\n";
        let code = Disassembly::parse(text).unwrap();
        let log = "Trace 0: 0x7f [0/400d9c/1/2] a\nTrace 0: 0x7f [0/400d80/1/2]\nTrace 0: 0x7f [0/400d90/1/2]\nother\n\
            Trace 0: 0x7f [0/400d94/1/2]\nTrace 0: 0x7f [0/400d98/1/2]\nTrace 0: 0x7f [0/400d80/1/2]\n";
        let executed = cut(log.lines().filter_map(traced), code.mark).unwrap();
        assert_eq!(code.listing(&executed).unwrap(), "b there\nldr q0, [x1], #16\ncbnz x2, there\nb.ne there\n");
        assert_eq!(without_targets("add\tx0, x1, #8 // =8"), "add x0, x1, #8");
        assert!(cut([0x400d80, 0x400d90].into_iter(), 0x400d80).is_err());
    }
}
