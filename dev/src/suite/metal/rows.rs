//! kv_set_rows and kv_get_rows against the definition of the formats.

use anyhow::{ensure, Context, Result};
use ggml_ext::codec::srft::{Srft, SCALE_UNIT};
use ggml_ext::codec::{Format, RowFormat};
use ggml_ext::lanes::Lanes;
use ggml_ext::rotation::HEAD_SIZES;
use ggml_ext::table::{self, Concrete, Family};
use half::f16;

use super::values::{bytes, bytes_mut, concrete, format, kind, srft, store_cells, Noise, Side};
use super::{cases, seeded_mistakes, Setup};
use crate::metal::{Argument, Launch, Library, Order};
use crate::suite::Tally;

/// The families whose rows are of this kind.
fn families(wanted: fn(Format) -> bool) -> impl Iterator<Item = &'static Family> {
    let at = |f: &'static Family| f.smallest().map(Concrete::format);
    table::families().iter().filter(move |f| at(f).is_some_and(wanted))
}

fn is_srft(format: Format) -> bool {
    matches!(format, Format::Srft(_))
}

fn is_grouped(format: Format) -> bool {
    format.grouped().is_some()
}

/// Codes that may fall to the other side of a tie, of all.
const TIES: f64 = 1e-3;
/// Simdgroups of a threadgroup.
const SIMDGROUPS: usize = 4;
/// Floats of a table of levels.
const LEVELS: usize = 64;

/// `struct kv_rows_args` of shaders/kv_args.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Args {
    units: u32,
    heads: u32,
    rows: [u32; 3],
    index_rows: [u32; 2],
    cache_heads: u32,
    cache_rows: [u32; 2],
    cells: u32,
    first_cell: u32,
    cell_step: u64,
    value_step: u64,
    float_nb: [u64; 3],
    cache_nb: [u64; 3],
    index_nb: [u64; 3],
}

const _: () = assert!(std::mem::size_of::<Args>() == 12 * 4 + 11 * 8);

pub fn run(setup: &Setup, tally: &mut Tally) -> Result<()> {
    let library = setup.shader("kv_rows")?;
    let rows = if setup.quick {
        6
    } else if setup.soak {
        400
    } else {
        48
    };
    for family in families(|f| !is_grouped(f)).map(|f| f.name) {
        // Where rows are levels and scales alone, codes are compared; else bytes.
        let levels = is_srft(format(family, HEAD_SIZES[0])?);
        let unit = if levels { "codes" } else { "bytes" };
        let (mut all, mut ties) = (0, 0);
        let what = format!("kv_set_rows {family}: {} head sizes in 3 orders, against the definition", HEAD_SIZES.len());
        cases(tally, &what, 3 * HEAD_SIZES.len() as u64, || {
            for size in HEAD_SIZES {
                let set = if levels { set_rows } else { set_other };
                let found = set(&library, family, size, rows).with_context(|| format!("head size {size}"))?;
                all += found.codes;
                ties += found.ties;
            }
            ensure!((ties as f64) < TIES * all as f64, "{ties} of {all} {unit} differ");
            Ok(())
        });
        println!("      {ties} of {all} {unit} on the other side of a tie");
        let what = format!("kv_get_rows {family}: {} head sizes in 3 orders, to f32 and f16", HEAD_SIZES.len());
        cases(tally, &what, 6 * HEAD_SIZES.len() as u64, || {
            for size in HEAD_SIZES {
                get_rows(&library, family, size).with_context(|| format!("head size {size}"))?;
            }
            Ok(())
        });
    }
    // 256: half of the chunks of band3 have other widths.
    let all: &[usize] = if setup.quick { &[64, 80, 256] } else { &HEAD_SIZES };
    for family in families(is_grouped) {
        let (sizes, family): (Vec<_>, _) =
            (all.iter().filter(|&&size| family.at(size).is_some()).collect(), family.name);
        let what = format!("kv_set_groups and kv_get_rows {family}: {} head sizes in 3 orders", sizes.len());
        cases(tally, &what, 6 * sizes.len() as u64, || {
            sizes
                .iter()
                .try_for_each(|&&size| grouped(&library, family, size).with_context(|| format!("head size {size}")))
        });
    }
    tally.check("kv_set_rows: heads, strides, f16, 32-bit indices, repeated indices, bad indices", || shapes(&library));
    seeded_mistakes(&library, tally, "kv_rows.metal", || {
        for size in [64, 576] {
            set_rows(&library, "srft4", size, 8)?;
            get_rows(&library, "srft4", size)?;
            for family in ["polar4", "turbo4", "qjl1"] {
                set_other(&library, family, size, 8)?;
                get_rows(&library, family, size)?;
            }
        }
        // A size at which lanes read bytes of others, and one at which a lane has a whole band.
        grouped(&library, "delta4", 80)?;
        grouped(&library, "delta8", 96)?;
        grouped(&library, "band4", 576)
    })
}

struct Problem<'a> {
    kernel: &'a str,
    family: &'a str,
    size: usize,
    float_kind: u32,
    index_bytes: u32,
    order: Order,
}

fn launch(library: &Library, p: &Problem, args: Args, from: &[u8], index: &[u8], to: &mut [u8]) -> Result<()> {
    // kv_set_groups has a simdgroup for each head.
    let (groups, simdgroups, floats) = match p.kernel {
        "kv_set_groups" => (args.cache_heads, 1, 5 * p.size + LEVELS),
        _ => (args.units.div_ceil(SIMDGROUPS as u32), SIMDGROUPS, p.size + (p.size / 4).max(LEVELS)),
    };
    library.launch(Launch {
        kernel: p.kernel,
        grid: [groups, 1, 1],
        group: [32 * simdgroups as u32, 1, 1],
        buffers: vec![Argument::Read(bytes(&[args])), Argument::Read(from), Argument::Read(index), Argument::Write(to)],
        threadgroup: &[4 * simdgroups * floats],
        constants: &[
            (0, kind(p.family)?.into()),
            (1, p.size as f64),
            (2, p.float_kind.into()),
            (3, p.index_bytes.into()),
        ],
        order: p.order,
        strict: true,
    })?;
    Ok(())
}

/// Rows of noise, among them rows that are empty, tiny, huge, lopsided, or not numbers.
fn values(size: usize, rows: usize) -> Vec<f32> {
    let mut x = Noise::new(size as u64).row(size * rows);
    for (r, row) in x.chunks_exact_mut(size).enumerate() {
        match r {
            0 => row.fill(0.0),
            1 => row[3] = f32::NAN,
            2 => (row[0], row[size - 1]) = (f32::INFINITY, f32::NEG_INFINITY),
            3 => row.iter_mut().for_each(|x| *x *= 1e-12),
            4 => row[5] = 300.0,
            _ => row.iter_mut().for_each(|x| *x *= 0.1 + r as f32),
        }
    }
    x
}

fn contiguous(size: usize, heads: usize, rows: usize, row_bytes: usize) -> Args {
    Args {
        units: (heads * rows) as u32,
        heads: heads as u32,
        rows: [rows as u32, 1, 1],
        index_rows: [1, 1],
        cache_heads: heads as u32,
        cache_rows: [rows as u32, 1],
        cells: rows as u32,
        first_cell: 0,
        cell_step: (row_bytes * heads) as u64,
        value_step: 4,
        float_nb: [(4 * size * heads) as u64, 0, 0],
        cache_nb: [(row_bytes * heads) as u64, 0, 0],
        index_nb: [8, 0, 0],
    }
}

#[derive(Default)]
struct Found {
    codes: usize,
    ties: usize,
}

fn set_rows(library: &Library, family: &str, size: usize, rows: usize) -> Result<Found> {
    let format = srft(family, size)?;
    let x = values(size, rows);
    let index: Vec<i64> = (0..rows as i64).rev().collect();
    let mut all = Vec::new();
    for order in Order::ALL {
        let p = Problem { kernel: "kv_set_rows", family, size, float_kind: 0, index_bytes: 8, order };
        let mut cache = vec![0xeeu8; rows * format.row_bytes()];
        let args = contiguous(size, 1, rows, format.row_bytes());
        launch(library, &p, args, bytes(&x), bytes(&index), &mut cache)?;
        all.push(cache);
    }
    ensure!(all[0] == all[1] && all[0] == all[2], "the result depends on the order of lanes");
    let mut found = Found::default();
    for (r, x) in x.chunks_exact(size).enumerate() {
        let got = &all[0][(rows - 1 - r) * format.row_bytes()..][..format.row_bytes()];
        let mut wanted = vec![0u8; format.row_bytes()];
        format.encode::<Lanes>(x, &mut wanted);
        found.codes += size;
        found.ties += ties(format, x, got, &wanted).with_context(|| format!("row {r}"))?;
    }
    Ok(found)
}

/// Counts codes that differ; a group in which they do must be as good as the definition's.
fn ties(format: Srft, x: &[f32], got: &[u8], wanted: &[u8]) -> Result<usize> {
    let (size, group) = (format.size(), format.scale_group());
    let unpack = |row: &[u8]| {
        let (mut levels, mut scales) = (vec![0i8; size], vec![0.0f32; format.scale_groups()]);
        format.unpack(row, &mut levels, &mut scales);
        (levels, scales)
    };
    let clean: Vec<f32> = x.iter().map(|x| if x.is_nan() { 0.0 } else { x.clamp(-1e6, 1e6) }).collect();
    let mut rotated = vec![0.0; size];
    format.rotation().forward(&clean, &mut rotated);
    let (got, wanted) = (unpack(got), unpack(wanted));
    let mut differ = 0;
    for (g, x) in rotated.chunks_exact(group).enumerate() {
        let at = g * group..(g + 1) * group;
        let (a, b) = (&got.0[at.clone()], &wanted.0[at]);
        let (sa, sb) = (got.1[g], wanted.1[g]);
        let n = a.iter().zip(b).filter(|(a, b)| a != b).count();
        differ += n;
        if n == 0 {
            // Neighbours as f16.
            ensure!((sa - sb).abs() <= sb.abs() * 1.1e-3, "group {g}: scale {sa}, wanted {sb}");
            continue;
        }
        // As it was fitted: values are read as a little more than that.
        let kappa = f64::from(format.unit() * SCALE_UNIT);
        let error = |levels: &[i8], scale: f32| -> f64 {
            x.iter().zip(levels).map(|(&x, &l)| (f64::from(x) - f64::from(l) * f64::from(scale) / kappa).powi(2)).sum()
        };
        let (ea, eb) = (error(a, sa), error(b, sb));
        ensure!(ea <= eb * 1.01 + 1e-20, "group {g}: {n} codes differ and the error is {ea:e}, not {eb:e}");
    }
    Ok(differ)
}

/// Rows that are not levels and scales alone: bytes, and where they differ the row must be as good as the definition's.
fn set_other(library: &Library, family: &str, size: usize, rows: usize) -> Result<Found> {
    let format = format(family, size)?;
    let x = values(size, rows);
    let index: Vec<i64> = (0..rows as i64).rev().collect();
    let mut all = Vec::new();
    for order in Order::ALL {
        let p = Problem { kernel: "kv_set_rows", family, size, float_kind: 0, index_bytes: 8, order };
        let mut cache = vec![0xeeu8; rows * format.row_bytes()];
        launch(library, &p, contiguous(size, 1, rows, format.row_bytes()), bytes(&x), bytes(&index), &mut cache)?;
        all.push(cache);
    }
    ensure!(all[0] == all[1] && all[0] == all[2], "the result depends on the order of lanes");
    let mut found = Found::default();
    for (r, x) in x.chunks_exact(size).enumerate() {
        let got = &all[0][(rows - 1 - r) * format.row_bytes()..][..format.row_bytes()];
        let mut wanted = vec![0u8; format.row_bytes()];
        format.encode::<Lanes>(x, &mut wanted);
        found.codes += wanted.len();
        let differ = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        found.ties += differ;
        if differ == 0 {
            continue;
        }
        let error = |row: &[u8]| -> f64 {
            let mut y = vec![0.0f32; size];
            format.decode::<Lanes>(row, &mut y);
            let clean = x.iter().map(|x| if x.is_nan() { 0.0 } else { x.clamp(-1e6, 1e6) });
            clean.zip(y).map(|(x, y)| f64::from(x - y).powi(2)).sum()
        };
        let (a, b) = (error(got), error(&wanted));
        ensure!(a <= b * 1.01 + 1e-20, "row {r}: {differ} bytes differ and the error is {a:e}, not {b:e}");
    }
    Ok(found)
}

/// Cells of two heads, one after the other: keys like each other, some unlike, some zero.
fn grouped(library: &Library, family: &str, size: usize) -> Result<()> {
    let (heads, rows) = (2usize, 140usize);
    let row_bytes = concrete(family, size)?.row_bytes();
    let noise = &mut Noise::new(size as u64 + 11);
    let mean = noise.row(heads * size);
    let mut x = noise.row(heads * size * rows);
    for (cell, x) in x.chunks_exact_mut(heads * size).enumerate() {
        let (like, own) = match cell % 50 {
            20 => (0.0, 1.0),
            30 => (0.0, 0.0),
            _ => (2.0, 0.3),
        };
        x.iter_mut().zip(&mean).for_each(|(x, m)| *x = own * *x + like * m);
    }
    let index: Vec<i64> = (0..rows as i64).collect();
    let args = contiguous(size, heads, rows, row_bytes);
    let (mut caches, mut backs) = (Vec::new(), Vec::new());
    for order in Order::ALL {
        let mut cache = vec![0u8; rows * heads * row_bytes];
        let p = Problem { kernel: "kv_set_groups", family, size, float_kind: 0, index_bytes: 8, order };
        launch(library, &p, args, bytes(&x), bytes(&index), &mut cache)?;
        let mut back = vec![f32::NAN; x.len()];
        let p = Problem { kernel: "kv_get_rows", ..p };
        launch(library, &p, args, &cache, bytes(&index), bytes_mut(&mut back))?;
        caches.push(cache);
        backs.push(back);
    }
    ensure!(caches[0] == caches[1] && caches[0] == caches[2], "the cache depends on the order of lanes");
    ensure!(
        bytes(&backs[0]) == bytes(&backs[1]) && bytes(&backs[0]) == bytes(&backs[2]),
        "rows depend on the order of lanes"
    );
    let (mut differ, mut error, mut power) = (0, 0.0f64, 0.0f64);
    for head in 0..heads {
        let of = |x: &[f32]| -> Vec<f32> {
            x.chunks_exact(heads * size).flat_map(|x| x[head * size..(head + 1) * size].to_vec()).collect()
        };
        let (mut wanted, mut rows_of_head) = (of(&x), vec![0u8; rows * row_bytes]);
        store_cells(family, size, &mut wanted, Side::Key, &mut rows_of_head, row_bytes)?;
        for (cell, row) in rows_of_head.chunks_exact(row_bytes).enumerate() {
            let got = &caches[0][(cell * heads + head) * row_bytes..][..row_bytes];
            differ += got.iter().zip(row).filter(|(a, b)| a != b).count();
        }
        for (a, b) in of(&backs[0]).iter().zip(&wanted) {
            error += f64::from(a - b).powi(2);
            power += f64::from(*b).powi(2);
        }
    }
    // A tie moves the differences of the rows behind it.
    ensure!(differ as f64 <= 2e-2 * caches[0].len() as f64, "{differ} of {} bytes differ", caches[0].len());
    ensure!(error <= 1e-4 * power, "rows come back with an error of {error:e} of {power:e}");
    Ok(())
}

fn get_rows(library: &Library, family: &str, size: usize) -> Result<()> {
    let rows = 5;
    let format = format(family, size)?;
    let x = Noise::new(size as u64 + 7).row(size * rows);
    let mut cache = vec![0u8; rows * format.row_bytes()];
    for (x, row) in x.chunks_exact(size).zip(cache.chunks_exact_mut(format.row_bytes())) {
        format.encode::<Lanes>(x, row);
    }
    // Any bytes decode: a scale that is infinite, and noise for codes.
    cache[format.row_bytes()..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
    let index = [4i32, 1, 1, 3, 0];
    for float_kind in [0u32, 1] {
        let width = if float_kind == 0 { 4 } else { 2 };
        let mut all = Vec::new();
        for order in Order::ALL {
            let p = Problem { kernel: "kv_get_rows", family, size, float_kind, index_bytes: 4, order };
            let mut target = vec![0xffu8; index.len() * size * width];
            let mut args = contiguous(size, 1, index.len(), format.row_bytes());
            args.value_step = width as u64;
            args.float_nb[0] = (width * size) as u64;
            args.index_nb[0] = 4;
            launch(library, &p, args, &cache, bytes(&index), &mut target)?;
            all.push(target);
        }
        ensure!(all[0] == all[1] && all[0] == all[2], "the result depends on the order of lanes");
        for (got, &row) in all[0].chunks_exact(size * width).zip(&index) {
            let mut wanted = vec![0.0f32; size];
            format.decode::<Lanes>(&cache[row as usize * format.row_bytes()..][..format.row_bytes()], &mut wanted);
            let norm = wanted.iter().map(|x| x * x).sum::<f32>().sqrt();
            let bound = if width == 4 { 1e-6 } else { 1e-3 };
            for (i, wanted) in wanted.iter().enumerate() {
                let got = float(&got[i * width..][..width]);
                let error = (got - wanted).abs();
                // Written so that NaN fails.
                ensure!(error <= bound * norm.max(1.0), "row {row}, value {i}: {got}, wanted {wanted}");
            }
        }
    }
    Ok(())
}

fn float(at: &[u8]) -> f32 {
    match at {
        &[a, b] => f16::from_le_bytes([a, b]).to_f32(),
        at => f32::from_le_bytes(at.try_into().unwrap_or_default()),
    }
}

/// Three heads of f16 values two apart, in rows that are padded, two by two by two dimensions, an index that repeats along
/// the last, and two bad ones whose rows must not be written.
fn shapes(library: &Library) -> Result<()> {
    let (family, size, heads, n) = ("srft4", 96usize, 3usize, [4usize, 2, 2]);
    let format = srft(family, size)?;
    let row_values = 2 * size * heads + 10;
    let x: Vec<u16> =
        Noise::new(3).row(row_values * n[0] * n[1] * n[2]).into_iter().map(|x| f16::from_f32(x).to_bits()).collect();
    let index: [i32; 8] = [2, 5, -1, 0, 6, 1, 1 << 20, 3];
    let cache_rows = 7;
    let row_bytes = format.row_bytes() * heads + 6;
    let args = Args {
        units: (heads * n[0] * n[1] * n[2]) as u32,
        heads: heads as u32,
        rows: n.map(|n| n as u32),
        index_rows: [2, 1],
        cache_heads: heads as u32,
        cache_rows: [cache_rows as u32, n[1] as u32],
        cells: cache_rows as u32,
        first_cell: 0,
        cell_step: row_bytes as u64,
        value_step: 4,
        float_nb: [2 * row_values, 2 * row_values * n[0], 2 * row_values * n[0] * n[1]].map(|n| n as u64),
        cache_nb: [row_bytes, row_bytes * cache_rows, row_bytes * cache_rows * n[1]].map(|n| n as u64),
        index_nb: [4, 16, 32],
    };
    let p = Problem { kernel: "kv_set_rows", family, size, float_kind: 1, index_bytes: 4, order: Order::Random(3) };
    let mut cache = vec![0x11u8; row_bytes * cache_rows * n[1] * n[2]];
    launch(library, &p, args, bytes(&x), bytes(&index), &mut cache)?;
    let mut wanted = vec![0x11u8; cache.len()];
    for row in 0..n[0] * n[1] * n[2] {
        let (i1, i2, i3) = (row % n[0], row / n[0] % n[1], row / n[0] / n[1]);
        let Some(target) = usize::try_from(index[i1 + 4 * i2]).ok().filter(|&t| t < cache_rows) else { continue };
        for head in 0..heads {
            let values: Vec<f32> =
                (0..size).map(|i| f16::from_bits(x[row * row_values + 2 * (head * size + i)]).to_f32()).collect();
            let at = row_bytes * (target + cache_rows * (i2 + n[1] * i3)) + head * format.row_bytes();
            format.encode::<Lanes>(&values, &mut wanted[at..at + format.row_bytes()]);
        }
    }
    let differ = cache.iter().zip(&wanted).filter(|(a, b)| a != b).count();
    ensure!(differ <= 2, "{differ} of {} bytes differ", cache.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_code_is_no_tie() {
        let format = Srft::new(4, 64).unwrap();
        let x = Noise::new(5).row(64);
        let mut row = vec![0u8; format.row_bytes()];
        format.encode::<Lanes>(&x, &mut row);
        assert_eq!(ties(format, &x, &row, &row).unwrap(), 0);
        let mut wrong = row.clone();
        wrong[10] ^= 0x30;
        assert!(ties(format, &x, &wrong, &row).is_err());
        let mut wrong = row.clone();
        wrong[1] ^= 1;
        assert!(ties(format, &x, &wrong, &row).is_err());
    }
}
