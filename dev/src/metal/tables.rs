//! `shaders/kv_tables.h`: the numbers of the rotation, from the definition in `ggml_ext::rotation`.
//!
//! Roots of unity are kept for five sizes; the others divide one of them.

use std::fmt::Write;
use std::path::PathBuf;

use ggml_ext::codec::qjl::{mean_magnitude, score_factor};
use ggml_ext::rotation::{Rotation, HEAD_SIZES};

use super::compile::shaders;

/// Sizes whose roots are written down.
const ROOTS: [usize; 5] = [112, 320, 384, 512, 576];

pub fn path() -> PathBuf {
    shaders().join("kv_tables.h")
}

/// What the file must hold.
pub fn text() -> String {
    let mut text = String::from(
        "// Generated from ggml-ext/src/rotation.rs; a test of `cargo kv` compares, and writes it with KV_BLESS=1.\n\n\
         #pragma once\n\n#include <metal_stdlib>\nusing namespace metal;\n",
    );
    for size in ROOTS {
        let root = |k: usize| {
            let angle = -2.0 * std::f64::consts::PI * k as f64 / size as f64;
            format!("{{ {}, {} }}", float(angle.cos() as f32), float(angle.sin() as f32))
        };
        array(
            &mut text,
            &format!("e^(-2 pi i k / {size}) for k below {}", size / 2),
            &format!("constant float2 kv_roots_{size}[{}]", size / 2),
            &(0..size / 2).map(root).collect::<Vec<_>>(),
            4,
        );
    }
    let (mut words, mut starts) = (Vec::new(), Vec::new());
    for set in 0..3 {
        for size in HEAD_SIZES {
            if set == 0 {
                starts.push(format!("{size} from word {}", words.len()));
            }
            words.extend(signs(plans(size)[set]).chunks(32).map(|signs| {
                let word = signs.iter().enumerate().fold(0u32, |word, (i, &negative)| word | u32::from(negative) << i);
                format!("0x{word:08x}")
            }));
        }
    }
    let note = format!(
        "Signs, a bit that is set being -1: of the rotation {}; of the projection's\n\
         // first transform {} words further on, of its second as many again",
        starts.join(", "),
        words.len() / 3
    );
    array(&mut text, &note, &format!("constant uint kv_signs[{}]", words.len()), &words, 8);
    let of_sizes = |f: fn(usize) -> f32| HEAD_SIZES.iter().map(|&size| float(f(size))).collect::<Vec<_>>();
    let count = HEAD_SIZES.len();
    array(
        &mut text,
        "The mean magnitude of the values of a projected vector whose root mean square is 1, by head size",
        &format!("constant float kv_mean_magnitudes[{count}]"),
        &of_sizes(mean_magnitude),
        count,
    );
    array(
        &mut text,
        "What a projected query is multiplied by, by head size",
        &format!("constant float kv_score_factors[{count}]"),
        &of_sizes(score_factor),
        count,
    );
    text
}

/// Shortest text that is this float again.
fn float(x: f32) -> String {
    // -0 and 0 are the same root.
    let x = if x == 0.0 { 0.0 } else { x };
    let digits = format!("{x:?}");
    digits + "f"
}

fn array(text: &mut String, note: &str, declaration: &str, values: &[String], per_line: usize) {
    // Writing to a string cannot fail.
    let _ = write!(text, "\n// {note}.\n{declaration} = {{\n");
    for line in values.chunks(per_line) {
        let _ = writeln!(text, "    {},", line.join(", "));
    }
    text.push_str("};\n");
}

/// The rotation, and the two transforms of the projection.
fn plans(size: usize) -> [&'static Rotation; 3] {
    let [first, second] = Rotation::projection(size).expect("one of HEAD_SIZES");
    [Rotation::of(size).expect("one of HEAD_SIZES"), first, second]
}

/// Which values change their sign, read off the transform: R of a unit vector begins with its sign / sqrt(n).
fn signs(rotation: &Rotation) -> Vec<bool> {
    let size = rotation.size();
    (0..size)
        .map(|i| {
            let (mut x, mut y) = (vec![0.0; size], vec![0.0; size]);
            x[i] = 1.0;
            rotation.forward(&x, &mut y);
            y[0] < 0.0
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_what_the_definition_says() {
        let wanted = text();
        if std::env::var_os("KV_BLESS").is_some() {
            std::fs::write(path(), &wanted).unwrap();
        }
        let found = std::fs::read_to_string(path()).unwrap_or_default();
        assert!(
            found == wanted,
            "{} is not of this rotation: KV_BLESS=1 cargo test -p kv-dev tables",
            path().display()
        );
    }
}
