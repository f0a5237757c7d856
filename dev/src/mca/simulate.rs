//! llvm-mca: the newest one that is there, since models of cores are added and corrected.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, Context, Result};

use crate::cross::{self, Program};
use kv::process;

const LLVM: Program = Program { name: "llvm-mca", packages: &["llvm"] };

pub struct Simulator {
    mca: PathBuf,
    objdump: PathBuf,
    version: String,
}

impl Simulator {
    pub fn find() -> Result<Simulator> {
        // Debian has several side by side, with the version in their names; `llvm` is its default, often an old one.
        let both = |suffix: &str| {
            Some((cross::find(&format!("llvm-mca{suffix}"))?, cross::find(&format!("llvm-objdump{suffix}"))?))
        };
        let newest = (14..40).rev().find_map(|version| both(&format!("-{version}")));
        let (mca, objdump) = match newest {
            Some(found) => found,
            None => {
                cross::programs(&[LLVM]).map_err(|why| anyhow!(why))?;
                both("").context("llvm-mca is there and llvm-objdump is not")?
            }
        };
        let text = process::run_ok(Command::new(&mca).arg("--version"))?.stdout;
        let version = text.lines().find(|l| l.contains("version")).unwrap_or_default().trim().to_string();
        Ok(Simulator { mca, objdump, version })
    }

    pub fn name(&self) -> String {
        format!("llvm-mca of {}", self.version)
    }

    pub fn objdump(&self) -> &Path {
        &self.objdump
    }

    /// Cycles of a straight run through the assembly.
    pub fn cycles(&self, cpu: &str, assembly: &str, dir: &Path) -> Result<u64> {
        let file = dir.join("trace.s");
        std::fs::write(&file, assembly)?;
        let mut c = Command::new(&self.mca);
        c.args(["-mtriple=aarch64", "-mattr=+fullfp16,+dotprod,+i8mm", "-iterations=1"]);
        c.args(["-instruction-info=0", "-resource-pressure=0"]).arg(format!("-mcpu={cpu}")).arg(&file);
        total_cycles(&process::run_ok(&mut c)?.stdout)
    }
}

/// `Total Cycles:      6214`
fn total_cycles(text: &str) -> Result<u64> {
    let number = text.lines().find_map(|l| l.strip_prefix("Total Cycles:")).context("llvm-mca named no cycles")?;
    Ok(number.trim().parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_are_read() {
        assert_eq!(total_cycles("Iterations:        1\nTotal Cycles:      6214\nTotal uOps: 3\n").unwrap(), 6214);
        assert!(total_cycles("error").is_err());
    }
}
