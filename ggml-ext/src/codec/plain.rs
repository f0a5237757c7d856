//! ggml's own row formats that attention reads beside ours: f32, f16, bf16, q8_0 and q4_0.

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
