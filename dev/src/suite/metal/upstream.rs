//! ggml's own shaders, run the same way: code that is known to work on a Mac says whether the runtime is right.
//!
//! They come from the pinned tree. Its attention for decoding counts on lanes in step: a lane zeroes or adds to what
//! another has written without a barrier between, so that its result depends on their order here. The reverse order
//! happens to be the one of lanes in step; only that is asked for, and the others are told.

use std::path::PathBuf;

use anyhow::{ensure, Result};
use half::f16;

use super::values::{bytes, bytes_mut, row_bytes, store, Noise, Side};
use super::{cases, Setup};
use crate::metal::{Argument, Launch, Library, Order, Shader};
use crate::suite::Tally;
use kv::source::{self, Source, Tree};

const CELLS: usize = 96;
const SIZE: usize = 128;

pub fn run(setup: &Setup, tally: &mut Tally) -> Result<()> {
    if !setup.compiler.has_half() {
        tally.missing("ggml's own shaders", "they need a compiler with 16-bit floats: g++ 12 or clang 15");
        return Ok(());
    }
    let tree = source::patched(&Source::choose(Tree::Full, None)?)?.dir.join("ggml/src");
    let include = [tree.clone(), tree.join("ggml-metal"), tree.join("ggml-metal/kernels")];
    let shader = |name: &str, kernels: &[&str]| {
        let source: PathBuf = tree.join("ggml-metal/kernels").join(name);
        setup.library(&Shader { source, include: &include, define: &[], kernels })
    };
    let rows = shader(
        "quantize.metal",
        &[
            "kernel_set_rows_f32_i64_q8_0",
            "kernel_set_rows_f32_i64_q4_0",
            "kernel_get_rows_q8_0",
            "kernel_get_rows_q4_0",
        ],
    )?;
    for kind in ["q8_0", "q4_0"] {
        cases(tally, &format!("ggml's set_rows and get_rows of {kind} in 3 orders, byte for byte"), 6, || {
            Order::ALL.into_iter().try_for_each(|order| set_and_get(&rows, kind, order))
        });
    }
    let attention = shader("fa_vec_q8_0.metal", &[ATTENTION])?;
    let mut worst = 0.0;
    cases(tally, "ggml's attention of q8_0 against f64", 1, || {
        worst = attend(&attention, Order::Reverse)?;
        Ok(())
    });
    println!("      largest error {worst:.1e}");
    if attend(&attention, Order::Forward).is_err() {
        println!("      (in forward order it is wrong: it relies on lanes in lockstep)");
    }
    Ok(())
}

/// `ggml_metal_kargs_set_rows`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SetRows {
    nk0: i32,
    ne01: i32,
    nb0: [u64; 3],
    ne11: i32,
    ne12: i32,
    nb1: [u64; 3],
    nb: [u64; 3],
}

/// `ggml_metal_kargs_get_rows`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct GetRows {
    ne00t: i32,
    ne00: i32,
    nb0: [u64; 3],
    ne10: i32,
    padding: i32,
    nb1: [u64; 3],
    nb: [u64; 3],
}

fn set_and_get(library: &Library, kind: &str, order: Order) -> Result<()> {
    let rows = 9;
    let row = row_bytes(kind, SIZE)?;
    let mut x = Noise::new(11).row(rows * SIZE);
    let index: Vec<i64> = (0..rows as i64).map(|i| (4 * i + 2) % rows as i64).collect();
    let row_f32 = 4 * SIZE as u64;
    let args = SetRows {
        nk0: (SIZE / 32) as i32,
        ne01: rows as i32,
        nb0: [row_f32, row_f32 * rows as u64, row_f32 * rows as u64],
        ne11: 1,
        ne12: 1,
        nb1: [8, 8 * rows as u64, 8 * rows as u64],
        nb: [row as u64, (row * rows) as u64, (row * rows) as u64],
    };
    let mut cache = vec![0u8; rows * row];
    library.launch(Launch {
        kernel: &format!("kernel_set_rows_f32_i64_{kind}"),
        grid: [3, 1, 1],
        group: [4, 4, 1],
        buffers: vec![
            Argument::Read(bytes(&[args])),
            Argument::Read(bytes(&x)),
            Argument::Read(bytes(&index)),
            Argument::Write(&mut cache),
        ],
        threadgroup: &[],
        constants: &[],
        order,
        strict: false,
    })?;
    let mut wanted = vec![0u8; cache.len()];
    for (x, &i) in x.chunks_exact_mut(SIZE).zip(&index) {
        store(kind, x, Side::Value, &mut wanted[i as usize * row..][..row])?;
    }
    let differ = cache.iter().zip(&wanted).filter(|(a, b)| a != b).count();
    ensure!(differ == 0, "{differ} of {} bytes differ", cache.len());
    let args = GetRows {
        ne00t: (SIZE / 16) as i32,
        ne00: SIZE as i32,
        nb0: [row as u64, (row * rows) as u64, (row * rows) as u64],
        ne10: rows as i32,
        padding: 0,
        nb1: [4, 4 * rows as u64, 4 * rows as u64],
        nb: [row_f32, row_f32 * rows as u64, row_f32 * rows as u64],
    };
    let index: Vec<i32> = index.iter().map(|&i| i as i32).collect();
    let mut back = vec![f32::NAN; rows * SIZE];
    library.launch(Launch {
        kernel: &format!("kernel_get_rows_{kind}"),
        grid: [rows as u32, 1, 1],
        group: [(SIZE / 16) as u32, 1, 1],
        buffers: vec![
            Argument::Read(bytes(&[args])),
            Argument::Read(&cache),
            Argument::Read(bytes(&index)),
            Argument::Write(bytes_mut(&mut back)),
        ],
        threadgroup: &[],
        constants: &[],
        order,
        strict: false,
    })?;
    for (i, (&got, &wanted)) in back.iter().zip(&x).enumerate() {
        ensure!((got - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "value {i}: {got}, wanted {wanted}");
    }
    Ok(())
}

const ATTENTION: &str = "kernel_flash_attn_ext_vec_q8_0_dk128_dv128";

/// `ggml_metal_kargs_flash_attn_ext_vec`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FlashAttn {
    ne0: [i32; 3],
    nb0: [u64; 3],
    ne1: [i32; 3],
    ns10: i32,
    nb1: [u64; 3],
    ns20: i32,
    nb2: [u64; 3],
    ne3: [i32; 3],
    nb3: [u64; 3],
    ne: [i32; 3],
    scale: f32,
    max_bias: f32,
    m0: f32,
    m1: f32,
    n_head_log2: i32,
    logit_softcap: f32,
    n_kv_max_padded: i32,
}

/// Two query heads on one KV head; returns the largest error.
fn attend(library: &Library, order: Order) -> Result<f64> {
    let (heads, simdgroups) = (2usize, 2usize);
    let noise = &mut Noise::new(17);
    let row = row_bytes("q8_0", SIZE)?;
    let mut sides = Vec::new();
    for _ in 0..2 {
        let (mut values, mut bytes) = (noise.row(CELLS * SIZE), vec![0u8; CELLS * row]);
        for (x, row) in values.chunks_exact_mut(SIZE).zip(bytes.chunks_exact_mut(row)) {
            store("q8_0", x, Side::Value, row)?;
        }
        sides.push((values, bytes));
    }
    // The kernel keeps queries as halves.
    let q: Vec<f32> = noise.row(heads * SIZE).into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
    let mask: Vec<f16> =
        (0..CELLS).map(|c| if c % 5 == 3 { f16::NEG_INFINITY } else { f16::from_f32(-0.01 * c as f32) }).collect();
    let (row_f32, plane) = (4 * SIZE as u64, (row * CELLS) as u64);
    let blocks = (row / 34) as i32;
    let scale = 1.0 / (SIZE as f32).sqrt();
    let args = FlashAttn {
        ne0: [1, heads as i32, 1],
        nb0: [row_f32 * heads as u64, row_f32, row_f32 * heads as u64],
        ne1: [CELLS as i32, 1, 1],
        ns10: blocks,
        nb1: [row as u64, plane, plane],
        ns20: blocks,
        nb2: [row as u64, plane, plane],
        ne3: [1, 1, 1],
        nb3: [2 * CELLS as u64; 3],
        ne: [heads as i32, 1, 1],
        scale,
        ..FlashAttn::default()
    };
    let mut dst = vec![f32::NAN; heads * SIZE];
    // The function constants of FC_FLASH_ATTN_EXT_VEC: mask, sinks, bias, softcap, padding, sparse, strides, simdgroups.
    let constants = [
        (400, 1.0),
        (401, 0.0),
        (402, 0.0),
        (403, 0.0),
        (404, 0.0),
        (405, 0.0),
        (420, blocks.into()),
        (421, blocks.into()),
        (422, simdgroups as f64),
        (423, 1.0),
    ];
    let halves = simdgroups * (SIZE + 4 * 32 + 2 * SIZE);
    library.launch(Launch {
        kernel: ATTENTION,
        grid: [1, heads as u32, 1],
        group: [32, simdgroups as u32, 1],
        buffers: vec![
            Argument::Read(bytes(&[args])),
            Argument::Read(bytes(&q)),
            Argument::Read(&sides[0].1),
            Argument::Read(&sides[1].1),
            Argument::Read(bytes(&mask)),
            Argument::Read(&[]),
            Argument::Read(&[]),
            Argument::Write(bytes_mut(&mut dst)),
            Argument::Read(&[]),
        ],
        threadgroup: &[2 * halves],
        constants: &constants,
        order,
        strict: false,
    })?;
    let mut worst = 0.0f64;
    for head in 0..heads {
        let scores: Vec<f64> = (0..CELLS)
            .map(|c| {
                let k = &sides[0].0[c * SIZE..][..SIZE];
                let dot: f64 = q[head * SIZE..].iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                dot * f64::from(scale) + mask[c].to_f64()
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..SIZE {
            let wanted: f64 = (0..CELLS).map(|c| weights[c] / sum * f64::from(sides[1].0[c * SIZE + i])).sum();
            let error = (f64::from(dst[head * SIZE + i]) - wanted).abs();
            ensure!(error <= 2e-3, "head {head}, value {i}: {}, wanted {wanted}", dst[head * SIZE + i]);
            worst = worst.max(error);
        }
    }
    Ok(worst)
}
