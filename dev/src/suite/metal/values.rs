//! Numbers for the tests, and ggml's plain formats.

use anyhow::{Context, Result};
use ggml_ext::codec::srft::Srft;
use ggml_ext::codec::{Format, RowFormat};
use ggml_ext::domain::Domain;
use ggml_ext::groups;
use ggml_ext::isa::kernels;
use ggml_ext::lanes::Lanes;
use ggml_ext::table::{self, Concrete, Entry};
use half::{bf16, f16};

pub use ggml_ext::random::Noise;

pub fn concrete(family: &str, size: usize) -> Result<Concrete> {
    match table::by_name(family) {
        Some(Entry::Family(f)) => f.at(size).with_context(|| format!("{family} at {size}")),
        _ => Err(anyhow::anyhow!("no family {family}")),
    }
}

/// The row format of a family.
pub fn format(family: &str, size: usize) -> Result<Format> {
    Ok(concrete(family, size)?.format())
}

/// The same of one of srft's.
pub fn srft(family: &str, size: usize) -> Result<Srft> {
    match format(family, size)? {
        Format::Srft(format) => Ok(format),
        _ => Err(anyhow::anyhow!("{family} is not one of srft's")),
    }
}

/// `KV_KIND_…` of the shaders.
pub fn kind(name: &str) -> Result<u32> {
    Ok(match name {
        "f32" => 0,
        "f16" => 1,
        "q4_0" => 2,
        "q8_0" => 8,
        "bf16" => 30,
        family => concrete(family, 64)?.id() as u32,
    })
}

pub fn row_bytes(name: &str, size: usize) -> Result<usize> {
    Ok(match name {
        "f32" => 4 * size,
        "f16" | "bf16" => 2 * size,
        "q8_0" => size / 32 * 34,
        "q4_0" => size / 32 * 18,
        family => concrete(family, size)?.row_bytes(),
    })
}

/// Values of a row in the domain that scores and sums are taken in.
pub fn width(name: &str, size: usize) -> usize {
    match concrete(name, size).map(|c| c.format().domain()) {
        Ok(Domain::Both(..)) => 2 * size,
        _ => size,
    }
}

/// What a row is read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The vector whose products with queries are the scores.
    Key,
    Value,
}

/// Are cells of this type coded together?
pub fn is_grouped(name: &str) -> bool {
    concrete(name, 64).is_ok_and(|c| c.group_cells() > 1)
}

/// Stores rows of one head in consecutive cells, `stride` bytes apart, and leaves in `x` what they decode to.
pub fn store_cells(name: &str, size: usize, x: &mut [f32], side: Side, rows: &mut [u8], stride: usize) -> Result<()> {
    if !is_grouped(name) {
        for (x, row) in x.chunks_exact_mut(size).zip(rows.chunks_mut(stride)) {
            store(name, x, side, row)?;
        }
        return Ok(());
    }
    let Some(format) = concrete(name, size)?.format().grouped() else {
        return Err(anyhow::anyhow!("{name} has no groups"));
    };
    let bytes = format.row_bytes();
    let mut close = vec![0u8; x.len() / size * bytes];
    groups::encode(format, kernels(), x, &mut close);
    groups::decode(format, kernels(), &close, x);
    for (row, close) in rows.chunks_mut(stride).zip(close.chunks_exact(bytes)) {
        row[..bytes].copy_from_slice(close);
    }
    Ok(())
}

/// Stores a row and leaves in `x` what it decodes to.
pub fn store(name: &str, x: &mut [f32], side: Side, row: &mut [u8]) -> Result<()> {
    match name {
        "f32" => row[..4 * x.len()].copy_from_slice(bytes(x)),
        "bf16" => {
            for (x, out) in x.iter_mut().zip(row.chunks_exact_mut(2)) {
                let h = bf16::from_f32(*x);
                out.copy_from_slice(&h.to_le_bytes());
                *x = h.to_f32();
            }
        }
        "f16" => {
            for (x, out) in x.iter_mut().zip(row.chunks_exact_mut(2)) {
                let h = f16::from_f32(*x);
                out.copy_from_slice(&h.to_le_bytes());
                *x = h.to_f32();
            }
        }
        // As ggml does it: codes by the scale before it is rounded.
        "q8_0" => {
            for (block, out) in x.chunks_exact_mut(32).zip(row.chunks_exact_mut(34)) {
                let d = block.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
                let (inverse, stored) = (if d == 0.0 { 0.0 } else { 1.0 / d }, f16::from_f32(d));
                out[..2].copy_from_slice(&stored.to_le_bytes());
                for (x, out) in block.iter_mut().zip(&mut out[2..]) {
                    let q = (*x * inverse).round();
                    *out = q as i8 as u8;
                    *x = q * stored.to_f32();
                }
            }
        }
        "q4_0" => {
            for (block, out) in x.chunks_exact_mut(32).zip(row.chunks_exact_mut(18)) {
                let d = block.iter().fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m }) / -8.0;
                let (inverse, stored) = (if d == 0.0 { 0.0 } else { 1.0 / d }, f16::from_f32(d));
                out[..2].copy_from_slice(&stored.to_le_bytes());
                let codes: Vec<u8> = block.iter().map(|x| ((*x * inverse + 8.5) as u8).min(15)).collect();
                for j in 0..16 {
                    out[2 + j] = codes[j] | codes[j + 16] << 4;
                }
                for (x, code) in block.iter_mut().zip(codes) {
                    *x = (f32::from(code) - 8.0) * stored.to_f32();
                }
            }
        }
        family => {
            let format = format(family, x.len())?;
            format.encode::<Lanes>(x, row);
            match side {
                Side::Key => format.decode_key::<Lanes>(row, x),
                Side::Value => format.decode::<Lanes>(row, x),
            }
        }
    }
    Ok(())
}

/// The bytes of a struct or a slice, as a shader sees them.
pub fn bytes<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: plain numbers without padding, read only.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values)) }
}

pub fn bytes_mut<T: Copy>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: plain numbers, any bytes are some of them.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), std::mem::size_of_val(values)) }
}
