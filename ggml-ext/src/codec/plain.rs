//! ggml's own row formats that attention reads beside ours: f32, f16, bf16, q8_0 and q4_0.

use super::levels::{LevelLayout, Packing, Scales};
use super::scales::load_f16;

/// Values of a q8_0 or q4_0 block.
pub const BLOCK: usize = 32;

/// A row format of ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// 4-byte floats.
    F32,
    /// 2-byte floats.
    F16,
    /// The upper halves of floats.
    Bf16,
    /// f16 scale and 32 signed bytes.
    Q8_0,
    /// f16 scale and 32 nibbles, 8 meaning zero: byte j holds value j and value j+16.
    Q4_0,
}

impl Plain {
    /// From ggml's type id.
    pub fn from_ggml(id: i32) -> Option<Plain> {
        Some(match id {
            0 => Plain::F32,
            1 => Plain::F16,
            2 => Plain::Q4_0,
            8 => Plain::Q8_0,
            30 => Plain::Bf16,
            _ => return None,
        })
    }

    /// Bytes of `n` values.
    pub fn row_bytes(self, n: usize) -> usize {
        match self {
            Plain::F32 => 4 * n,
            Plain::F16 | Plain::Bf16 => 2 * n,
            Plain::Q8_0 => n / BLOCK * 34,
            Plain::Q4_0 => n / BLOCK * 18,
        }
    }
}

/// Rows of q8_0 or q4_0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// 8 or 4.
    bits: u32,
    /// Values of a row, whole blocks.
    size: usize,
}

impl Blocks {
    /// None where the type has no blocks, or a row would not be made of whole ones.
    pub fn new(kind: Plain, size: usize) -> Option<Blocks> {
        let bits = match kind {
            Plain::Q8_0 => 8,
            Plain::Q4_0 => 4,
            Plain::F32 | Plain::F16 | Plain::Bf16 => return None,
        };
        (size > 0 && size.is_multiple_of(BLOCK)).then_some(Blocks { bits, size })
    }

    /// 8 or 4.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Values of a row.
    pub fn size(self) -> usize {
        self.size
    }

    /// Bytes of a block: a scale and codes.
    pub fn block_bytes(self) -> usize {
        2 + BLOCK * self.bits as usize / 8
    }

    /// What rows unpack to.
    pub fn levels(self) -> LevelLayout {
        LevelLayout {
            values: self.size,
            scale_group: BLOCK,
            row_bytes: self.size / BLOCK * self.block_bytes(),
            scales: Scales::PerGroup { step: self.block_bytes(), unit: 1.0 },
            packing: Packing::Blocks(self),
        }
    }

    /// Levels and scales of a row.
    #[inline(always)]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        let blocks = row.chunks_exact(self.block_bytes()).zip(levels[..self.size].chunks_exact_mut(BLOCK));
        for ((block, levels), scale) in blocks.zip(scales) {
            *scale = load_f16(block);
            for (i, level) in levels.iter_mut().enumerate() {
                *level = match self.bits {
                    8 => block[2 + i] as i8,
                    _ => (block[2 + i % 16] >> (4 * (i / 16)) & 15) as i8 - 8,
                };
            }
        }
    }
}
