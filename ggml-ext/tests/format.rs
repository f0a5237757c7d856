//! The formats as they are, type by type: states hold rows, and programs of tomorrow must read those of today.
//!
//! tests/format/rows.txt has a line for each type at each head size: its version, a checksum of the bytes that the
//! scalar definition makes of a fixed group of rows, and two sums over the values that those bytes decode to. Whoever changes
//! a table, the order of bits or a rotation's signs changes a line.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use ggml_ext::codec::delta::GROUP_CELLS;
use ggml_ext::isa::scalar;
use ggml_ext::rows;
use ggml_ext::state::checksum;
use ggml_ext::table::{self, Concrete};

const GOLDEN: &str = include_str!("format/rows.txt");

/// Numbers in -1..1 that no library function has a part in. Not `random::Noise`: the golden file is made of these.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A group of keys as models have them: a mean for each channel, some of them far off, and what is around it.
fn input(size: usize) -> Vec<f32> {
    let mut noise = Noise(size as u64);
    let mean: Vec<f32> = (0..size).map(|i| noise.next() * if i % 16 == 3 { 8.0 } else { 1.0 }).collect();
    (0..GROUP_CELLS * size).map(|i| mean[i % size] + noise.next() + noise.next()).collect()
}

fn encoded(c: Concrete, x: &[f32]) -> Vec<u8> {
    let mut rows = vec![0u8; GROUP_CELLS * c.row_bytes()];
    rows::encode(c.id(), &scalar::KERNELS, x, &mut rows).unwrap();
    rows
}

fn decoded(c: Concrete, rows: &[u8]) -> Vec<f32> {
    let mut x = vec![0.0f32; GROUP_CELLS * c.head_size];
    rows::decode(c.id(), &scalar::KERNELS, rows, &mut x).unwrap();
    x
}

/// One type's line: what is stored, and what it means.
struct Line {
    name: String,
    version: u32,
    rows: u64,
    /// The values' energy, and their sum with weights that no two have in common.
    sums: [f64; 2],
}

impl Line {
    fn today(c: Concrete) -> Line {
        let rows = encoded(c, &input(c.head_size));
        let mut weights = Noise(1);
        let mut sums = [0.0f64; 2];
        for x in decoded(c, &rows) {
            sums[0] += f64::from(x) * f64::from(x);
            sums[1] += f64::from(x) * f64::from(weights.next());
        }
        Line { name: c.name(), version: c.version(), rows: checksum(&[&rows]), sums }
    }

    fn parse(text: &str) -> Option<Line> {
        let mut words = text.split_whitespace();
        let (name, version) = (words.next()?.to_string(), words.next()?.parse().ok()?);
        let rows = u64::from_str_radix(words.next()?, 16).ok()?;
        let sums = [words.next()?.parse().ok()?, words.next()?.parse().ok()?];
        words.next().is_none().then_some(Line { name, version, rows, sums })
    }

    /// The last digits of sums are the business of compilers.
    fn means_the_same(&self, other: &Line) -> bool {
        let near = |i: usize| (self.sums[i] - other.sums[i]).abs() <= 1e-5 * self.sums[0];
        near(0) && near(1)
    }
}

#[test]
fn rows_are_those_of_the_list() {
    let golden: Vec<Line> = GOLDEN
        .lines()
        .filter(|l| !l.starts_with('#'))
        .map(|l| Line::parse(l).unwrap_or_else(|| panic!("not a line of the list: {l}")))
        .collect();
    let today: Vec<Line> = table::concrete().map(Line::today).collect();

    let mut changed = String::new();
    for now in &today {
        let what = match golden.iter().find(|g| g.name == now.name) {
            Some(then) if then.version != now.version => "has another version than its line",
            Some(then) if then.rows != now.rows => "is stored in other bytes",
            Some(then) if !then.means_the_same(now) => "reads the same bytes as other values",
            Some(_) => continue,
            None => "is new",
        };
        let _ = writeln!(changed, "{} {what}", now.name);
    }
    for then in &golden {
        if !today.iter().any(|now| now.name == then.name) {
            let _ = writeln!(changed, "{} is gone", then.name);
        }
    }
    if changed.is_empty() {
        return;
    }
    let mut list: String = GOLDEN.lines().filter(|l| l.starts_with('#')).flat_map(|l| [l, "\n"]).collect();
    for Line { name, version, rows, sums } in &today {
        let _ = writeln!(list, "{name:<10} {version} {rows:016x} {:.4} {:.4}", sums[0], sums[1]);
    }
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rows.txt");
    fs::write(&kept, list).expect("cargo's own folder for this");
    panic!(
        "\n{changed}\nSaved states hold these rows. If bytes mean other values than before, raise the version of the format\n\
         (RowFormat::version), by which states of the old one are refused. A new type, or an encoder that chooses better\n\
         codes of the same meaning, needs new lines only: today's are in\n{}\n",
        kept.display()
    );
}
