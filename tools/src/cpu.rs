//! The CPU that is really here: its cores, and llama.cpp's build flags for it.
//!
//! GGML_NATIVE would do the same by -march=native, but virtual machines report AMX and trap on it; so each set is
//! named, in a list that CMake reads too where it is run without this command.

use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Result};

use crate::{process, project_root};

const OPTIONS: &str = include_str!("../../cmake/cpu-options.txt");

pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// `-DGGML_…=ON|OFF` for this CPU, or for any of its kind where `portable`.
pub fn cmake_flags(portable: bool) -> Vec<String> {
    let mut flags = vec!["-DGGML_NATIVE=OFF".to_string()];
    if cfg!(target_arch = "x86_64") {
        // SSE4.2 is in every x86-64 that can hold a model in memory, and ggml's own baseline.
        flags.extend(if portable { options(|flag| flag == "sse4_2") } else { options(|flag| has(flag) == Some(true)) });
    }
    flags
}

/// The list, for a CPU that has what `has` says.
fn options(has: impl Fn(&str) -> bool) -> Vec<String> {
    let lines = OPTIONS.lines().filter(|line| !line.starts_with('#'));
    let option = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let on = words.all(|word| word.strip_prefix('!').map_or_else(|| has(word), |flag| !has(flag)));
        Some(format!("-DGGML_{name}={}", if on { "ON" } else { "OFF" }))
    };
    lines.filter_map(option).collect()
}

/// Does this CPU have what /proc/cpuinfo calls so, and may programs use it? Nothing for a name that is not known here.
fn has(flag: &str) -> Option<bool> {
    #[cfg(target_arch = "x86_64")]
    return {
        use std::is_x86_feature_detected as has;
        Some(match flag {
            "sse4_2" => has!("sse4.2"),
            "avx" => has!("avx"),
            "avx2" => has!("avx2"),
            "fma" => has!("fma"),
            "f16c" => has!("f16c"),
            "bmi2" => has!("bmi2"),
            "avx512f" => has!("avx512f"),
            "avx512cd" => has!("avx512cd"),
            "avx512vl" => has!("avx512vl"),
            "avx512dq" => has!("avx512dq"),
            "avx512bw" => has!("avx512bw"),
            "avx512vbmi" => has!("avx512vbmi"),
            "avx512_vnni" => has!("avx512vnni"),
            "avx512_bf16" => has!("avx512bf16"),
            "avx_vnni" => has!("avxvnni"),
            _ => return None,
        })
    };
    #[cfg(not(target_arch = "x86_64"))]
    return {
        let _ = flag;
        None
    };
}

/// Does CMake by itself choose what `cargo kv build` tells it, here and on CPUs that were not at hand?
pub fn check_agreement(cmake: &Path) -> Result<()> {
    let script = project_root().join("cmake").join("cpu.cmake");
    let ask = |more: &[String]| -> Result<Vec<String>> {
        let done = process::run_ok(Command::new(cmake).args(more).arg("-P").arg(&script))?;
        Ok(done.stderr.split_whitespace().map(String::from).collect())
    };
    if cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        let (cmake, ours) = (ask(&[])?, cmake_flags(false).split_off(1));
        ensure!(cmake == ours, "for this CPU CMake chooses {cmake:?}, and cargo kv build {ours:?}");
    }
    for cpu in CPUS {
        let flags: Vec<_> = cpu.split_whitespace().collect();
        let cmake = ask(&[format!("-DFLAGS={}", flags.join(";"))])?;
        let ours = options(|flag| flags.contains(&flag));
        ensure!(cmake == ours, "for a CPU with {cpu} CMake chooses {cmake:?}, and cargo kv build {ours:?}");
    }
    Ok(())
}

/// Nehalem, Haswell, Alder Lake, Skylake-X, Zen 4 and Sapphire Rapids.
const CPUS: [&str; 6] = [
    "sse4_2",
    "sse4_2 avx avx2 fma f16c bmi2",
    "sse4_2 avx avx2 fma f16c bmi2 avx_vnni",
    "sse4_2 avx avx2 fma f16c bmi2 avx512f avx512cd avx512vl avx512dq avx512bw",
    "sse4_2 avx avx2 fma f16c bmi2 avx512f avx512cd avx512vl avx512dq avx512bw avx512vbmi avx512_vnni avx512_bf16",
    "sse4_2 avx avx2 fma f16c bmi2 avx512f avx512cd avx512vl avx512dq avx512bw avx512vbmi avx512_vnni avx512_bf16 avx_vnni \
     amx_tile amx_int8",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_native_never_amx() {
        for portable in [false, true] {
            let flags = cmake_flags(portable);
            assert_eq!(flags[0], "-DGGML_NATIVE=OFF");
            assert!(!flags.iter().any(|f| f.contains("AMX")));
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn portable_is_the_baseline() {
        let on: Vec<_> = cmake_flags(true).into_iter().filter(|f| f.ends_with("=ON")).collect();
        assert_eq!(on, ["-DGGML_SSE42=ON"]);
    }

    fn on(cpu: &str) -> Vec<String> {
        options(|flag| cpu.split_whitespace().any(|f| f == flag)).into_iter().filter(|o| o.ends_with("=ON")).collect()
    }

    #[test]
    fn vnni_is_the_wider_one() {
        let has = |cpu: &str, name: &str| on(cpu).contains(&format!("-DGGML_{name}=ON"));
        assert!(has(CPUS[2], "AVX_VNNI") && !has(CPUS[2], "AVX512_VNNI"));
        assert!(!has(CPUS[5], "AVX_VNNI") && has(CPUS[5], "AVX512_VNNI"));
        assert_eq!(on(CPUS[1]).len(), 6);
        assert!(on("").is_empty());
    }

    /// The two ways of asking: the processor, as here, and the kernel, as in CMake.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn the_list_is_known_and_found_as_the_kernel_finds_it() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = text.lines().find(|l| l.starts_with("flags")).unwrap();
        let names = OPTIONS.lines().filter(|l| !l.starts_with('#')).flat_map(|l| l.split_whitespace().skip(1));
        for name in names.map(|n| n.trim_start_matches('!')) {
            assert_eq!(has(name), Some(flags.split_whitespace().any(|f| f == name)), "{name}");
        }
        assert_eq!(cmake_flags(false)[1..], options(|flag| flags.split_whitespace().any(|f| f == flag)));
    }
}
