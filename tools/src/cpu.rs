//! The CPU that is really here: its cores, and llama.cpp's build flags for it.
//!
//! GGML_NATIVE would do the same by -march=native, but virtual machines report AMX and trap on it; so each set is
//! named, and AMX never is.

pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// `-DGGML_…=ON|OFF` for this CPU, or for any of its kind where `portable`.
pub fn cmake_flags(portable: bool) -> Vec<String> {
    let mut flags = vec!["-DGGML_NATIVE=OFF".to_string()];
    for (name, here) in features() {
        // SSE4.2 is in every x86-64 that can hold a model in memory, and ggml's own baseline.
        let on = if portable { name == "SSE42" } else { here };
        flags.push(format!("-DGGML_{name}={}", if on { "ON" } else { "OFF" }));
    }
    flags
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<(&'static str, bool)> {
    use std::is_x86_feature_detected as has;
    let avx512 = has!("avx512f") && has!("avx512cd") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw");
    vec![
        ("SSE42", has!("sse4.2")),
        ("AVX", has!("avx")),
        ("AVX2", has!("avx2")),
        ("FMA", has!("fma")),
        ("F16C", has!("f16c")),
        ("BMI2", has!("bmi2")),
        ("AVX512", avx512),
        ("AVX512_VBMI", avx512 && has!("avx512vbmi")),
        ("AVX512_VNNI", avx512 && has!("avx512vnni")),
        ("AVX512_BF16", avx512 && has!("avx512bf16")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

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
}
