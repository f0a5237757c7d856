//! The shapes of attention that are measured, and the bytes of their caches.

use anyhow::{bail, Context, Result};

use crate::pair::Pair;
use crate::types;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub head_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// MLA: V is a view of the first values of K's rows, and has no bytes of its own.
    pub view: Option<usize>,
}

/// SmolLM2-135M, Qwen2.5-1.5B, Llama-3-8B, Gemma-3-1B, and a layer of wide heads.
pub const SHAPES: [Shape; 5] =
    [shape(64, 9, 3), shape(128, 12, 2), shape(128, 32, 8), shape(256, 4, 1), shape(512, 16, 2)];

/// The model whose cost per token is told: this shape, so many layers.
pub const SMOLLM2: (Shape, usize) = (SHAPES[0], 30);

const fn shape(head_size: usize, heads: usize, kv_heads: usize) -> Shape {
    Shape { head_size, heads, kv_heads, view: None }
}

impl Shape {
    /// "d128 32/8"; a colon may stand for the space, and "d128" alone means all known shapes of that size. "d576/512 128/1"
    /// is MLA: V is the first 512 values of K.
    pub fn parse(text: &str) -> Result<Vec<Shape>> {
        let wrong = || {
            format!(
                "'{text}' is no shape: wanted d128, d128:32/8 (head size, query heads, KV heads) or d576/512:128/1 (V a \
                 view of K)"
            )
        };
        let (size, heads) = match text.trim().split_once([':', ' ']) {
            Some((size, heads)) => (size, Some(heads)),
            None => (text.trim(), None),
        };
        let size = size.strip_prefix('d').unwrap_or(size);
        let (size, view) = match size.split_once('/') {
            Some((size, view)) => (size, Some(view.parse().with_context(wrong)?)),
            None => (size, None),
        };
        let head_size = size.parse().with_context(wrong)?;
        let Some(heads) = heads else {
            let known: Vec<Shape> = SHAPES.into_iter().filter(|s| s.head_size == head_size).collect();
            if known.is_empty() {
                bail!("no known shape has heads of {head_size}: say how many there are, as in d{head_size}:32/8");
            }
            return Ok(known);
        };
        let (heads, kv_heads) = heads.trim().split_once('/').with_context(wrong)?;
        let (heads, kv_heads) = (heads.parse().with_context(wrong)?, kv_heads.parse().with_context(wrong)?);
        let one = Shape { view, ..shape(head_size, heads, kv_heads) };
        if one.head_size == 0 || one.kv_heads == 0 || one.heads == 0 || !one.heads.is_multiple_of(one.kv_heads) {
            bail!("{}: query heads must be a multiple of the KV heads", one.name());
        }
        if view.is_some_and(|v| v == 0 || v > head_size) {
            bail!("{}: V cannot be a view of more values than K has", one.name());
        }
        Ok(vec![one])
    }

    pub fn name(self) -> String {
        let view = self.view.map_or(String::new(), |v| format!("/{v}"));
        format!("d{}{view} {}/{}", self.head_size, self.heads, self.kv_heads)
    }

    /// K and V of a cell; None where a type does not serve the head size.
    pub fn cell_bytes(self, pair: &Pair) -> Option<usize> {
        Some(self.kv_heads * (row_bytes(&pair.k, self.head_size)? + row_bytes(&pair.v, self.head_size)?))
    }
}

/// The row of one head.
fn row_bytes(name: &str, head_size: usize) -> Option<usize> {
    // Values and bytes of a block of ggml's.
    let (values, bytes) = match name {
        "f32" => (1, 4),
        "f16" | "bf16" => (1, 2),
        "q8_0" => (32, 34),
        "q4_0" | "iq4_nl" => (32, 18),
        "q4_1" => (32, 20),
        "q5_0" => (32, 22),
        "q5_1" => (32, 24),
        _ => {
            let family = types::families().into_iter().find(|f| f.name == name)?;
            return family.types.iter().find(|t| t.head_size == head_size).map(|t| t.row_bytes);
        }
    };
    head_size.is_multiple_of(values).then_some(head_size / values * bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for shape in SHAPES {
            assert_eq!(Shape::parse(&shape.name()).unwrap(), [shape]);
        }
        assert_eq!(Shape::parse("96:8/8").unwrap(), [shape(96, 8, 8)]);
        assert_eq!(Shape::parse("d128").unwrap().len(), 2);
        let mla = Shape { view: Some(512), ..shape(576, 128, 1) };
        assert_eq!(Shape::parse("d576/512:128/1").unwrap(), [mla]);
        assert_eq!(mla.name(), "d576/512 128/1");
    }

    #[test]
    fn what_is_no_shape() {
        for text in ["", "d", "d96", "d64:9", "d64:9/2", "d64:9/0", "d64 x/3", "d64/65:1/1", "d64/0:1/1"] {
            assert!(Shape::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_of_a_cell() {
        let bytes = |shape: Shape, pair: &str| shape.cell_bytes(&Pair::parse(pair).unwrap());
        assert_eq!(bytes(SHAPES[2], "f16"), Some(8 * 2 * 256));
        assert_eq!(bytes(SHAPES[2], "srft4"), Some(8 * 2 * 68));
        assert_eq!(bytes(SHAPES[0], "q8_0/q4_0"), Some(3 * (68 + 36)));
        assert_eq!(bytes(shape(80, 2, 2), "q4_0"), None);
        assert_eq!(bytes(shape(100, 2, 2), "srft4"), None);
    }
}
