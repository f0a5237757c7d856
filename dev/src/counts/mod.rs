//! A guard that does not look at the clock: how many instructions the inner loops take, compared with numbers in the
//! repository.
//!
//! Two ways of counting. callgrind counts what it emulates, which ends at AVX2. Above that the processor counts: with
//! its trap flag set it stops after every instruction, and a signal handler adds one (`step`). Both count the same
//! loops in a child of this program (`loops`), and one loop is counted both ways to see that they agree.
//!
//! A number is the difference between a long and a short run over the units between them, so that what is done once a
//! call (rotating queries, writing results) does not dilute it.

mod callgrind;
mod loops;
mod record;
mod step;

use std::process::Command;

use anyhow::{bail, Context, Result};

pub use kv::bench::pinned::file;
use kv::{process, project_root};
pub use loops::Counts;
pub use record::{Record, TOLERANCE};

/// How the loops of an instruction set are counted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Callgrind,
    Step,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Callgrind => "callgrind",
            Way::Step => "single steps",
        }
    }
}

/// The instruction sets that have numbers, and whether callgrind knows them.
const ISAS: [(&str, bool); 5] =
    [("scalar", true), ("avx2", true), ("avxvnni", false), ("avx512bw", false), ("avx512", false)];
/// Why the scalar loops are not counted: stepping through them takes minutes.
pub const NO_VALGRIND: &str = "no valgrind: apt-get install valgrind";
/// glibc copies and clears memory by what the CPU has, which is up to 4% of a row's instructions apart between two CPUs
/// with AVX-512. This has it take the same functions on all of them.
const PLAIN_COPIES: &str = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-SSSE3,-ERMS,-FSRM";
/// Counted both ways.
const BOTH: (&str, &str) = ("avx2", "decode srft4 d128 x4");

/// One instruction set: the way, or why there is none.
pub struct Plan {
    pub isa: &'static str,
    pub way: Result<Way, String>,
}

/// What can be counted on this machine; an error is why nothing can.
pub fn plans() -> Result<Vec<Plan>, String> {
    if cfg!(debug_assertions) {
        return Err("the numbers are those of release builds".into());
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("the numbers are those of x86-64, and counting needs Linux".into());
    }
    let here: Vec<&str> = ggml_ext::isa::available().iter().map(|k| k.name).collect();
    let valgrind = callgrind::available();
    Ok(ISAS.map(|(isa, emulated)| Plan { isa, way: way(isa, emulated, valgrind, &here) }).into())
}

fn way(isa: &str, emulated: bool, valgrind: bool, here: &[&str]) -> Result<Way, String> {
    match () {
        _ if !here.contains(&isa) => Err("this CPU does not have it".into()),
        _ if emulated && valgrind => Ok(Way::Callgrind),
        // Many millions of instructions, a microsecond each.
        _ if isa == "scalar" => Err(NO_VALGRIND.into()),
        _ => Ok(Way::Step),
    }
}

/// The loops of one instruction set, all of them or those whose name begins with `only`.
pub fn count(isa: &str, way: Way, only: &str) -> Result<Counts> {
    match way {
        Way::Callgrind => callgrind::count(isa, only),
        Way::Step => {
            let mut stepped = child(isa, "step", only)?;
            let done = process::run_ok(stepped.env("GLIBC_TUNABLES", PLAIN_COPIES))?;
            Counts::parse(isa, only, &done.stdout)
        }
    }
}

/// This program again, as the one whose instructions are counted.
fn child(isa: &str, way: &str, only: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["count-loops", way, only]).env("GGML_EXT_ISA", isa);
    Ok(command)
}

/// The child's part: `count-loops step` prints the counts, `count-loops run` only runs the loops, for callgrind.
pub fn serve(way: &str, only: &str) -> Result<()> {
    let mut count = match way {
        "step" => |work: &mut dyn FnMut()| step::count(work),
        "run" => |work: &mut dyn FnMut()| {
            loops::counted(work);
            Ok(0)
        },
        _ => bail!("count-loops is for `cargo kv test`"),
    };
    loops::run(only, &mut count)
}

/// Do the two ways agree? The error says how far they are apart.
pub fn cross_check() -> Result<()> {
    let (isa, name) = BOTH;
    let get = |way| -> Result<f64> {
        let counts = count(isa, way, name)?;
        counts.0.values().next().copied().with_context(|| format!("there is no loop {name}"))
    };
    let (emulated, stepped) = (get(Way::Callgrind)?, get(Way::Step)?);
    if (emulated / stepped - 1.0).abs() > TOLERANCE {
        bail!("{isa} {name}: {emulated:.1} by callgrind, {stepped:.1} by single steps");
    }
    Ok(())
}

/// The compiler that the numbers belong to.
pub fn rustc() -> Result<String> {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let done = process::run_ok(Command::new(program).arg("-V").current_dir(project_root()))?;
    Ok(done.stdout.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_follows_the_machine() {
        let here = ["avx512", "avx2", "scalar"];
        assert_eq!(way("avx2", true, true, &here), Ok(Way::Callgrind));
        assert_eq!(way("avx2", true, false, &here), Ok(Way::Step));
        assert_eq!(way("avx512", false, true, &here), Ok(Way::Step));
        assert!(way("scalar", true, false, &here).is_err());
        assert!(way("avx512", false, true, &here[1..]).is_err());
    }
}
