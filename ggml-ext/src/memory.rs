//! How much memory a cache takes, before there is one.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::error::Error;
use crate::kv_type::KvType;
use crate::spec::{recent, Side};

/// What a layer's cache is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerShape {
    /// Heads of K and V, which is fewer than query heads in most models.
    pub kv_heads: usize,
    /// Values of one head of K.
    pub k_head_size: usize,
    /// Values of one head of V.
    pub v_head_size: usize,
    /// Cells that the layer keeps at most, where it has a sliding window.
    pub window: Option<usize>,
}

impl LayerShape {
    /// A layer whose K and V have heads of the same size, without a sliding window.
    pub fn new(kv_heads: usize, head_size: usize) -> LayerShape {
        LayerShape { kv_heads, k_head_size: head_size, v_head_size: head_size, window: None }
    }
}

/// The layers of a model.
///
/// ```
/// use ggml_ext::{LayerShape, ModelShape};
///
/// let llama_8b = ModelShape::uniform(32, 8, 128);
/// // Every other layer looks back 1024 tokens only.
/// let mut local = LayerShape::new(4, 256);
/// local.window = Some(1024);
/// let mixed = ModelShape { layers: [LayerShape::new(4, 256), local].repeat(13) };
/// # assert_eq!((llama_8b.layers.len(), mixed.layers.len()), (32, 26));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// One entry a layer; one that keeps no K and V of its own (a recurrent one, or one that uses another's) has no heads.
    pub layers: Vec<LayerShape>,
}

impl ModelShape {
    /// A model whose layers are all alike.
    pub fn uniform(layers: usize, kv_heads: usize, head_size: usize) -> ModelShape {
        ModelShape { layers: vec![LayerShape::new(kv_heads, head_size); layers] }
    }
}

/// Bytes of the K and V caches of a model for `ctx` cells. llama.cpp rounds a context up to a multiple of 256 cells: give
/// the `n_ctx` that it reports. The precise rows of recent cells are those of one sequence; a layer with a sliding window may have
/// some more, since llama.cpp gives it room for a batch too. Layers that the guard raises, which
/// only the weights tell, are counted at the type asked for.
///
/// ```
/// use ggml_ext::{cache_bytes, KvType, ModelShape};
///
/// let llama_8b = ModelShape::uniform(32, 8, 128);
/// let srft4: KvType = "srft4".parse()?;
/// assert_eq!(cache_bytes(&llama_8b, 32768, KvType::F16, KvType::F16)?, 4 << 30);
/// let recent = 129 * 32 * 8 * 2 * 136; // 8.5 bits for the last 128 cells and one that is never read
/// assert_eq!(cache_bytes(&llama_8b, 32768, srft4, srft4)?, (4 << 30) * 9 / 32 + recent);
/// let none: KvType = "srft4,recent=0".parse()?;
/// assert_eq!(cache_bytes(&llama_8b, 32768, none, none)?, (4 << 30) * 9 / 32);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # Errors
/// Where a type does not serve a layer's head size or that side of the cache, and where a spec names layers that are not
/// there.
pub fn cache_bytes(shape: &ModelShape, ctx: usize, k: KvType, v: KvType) -> Result<u64, Error> {
    for (side, kind, serves) in [("K", k, k.serves_k()), ("V", v, v.serves_v())] {
        if !serves {
            return Err(Error::new(format!("{kind} is not for {side}")));
        }
    }
    k.check_layers(Side::K, shape.layers.len())?;
    v.check_layers(Side::V, shape.layers.len())?;
    let mut total = 0;
    for (i, layer) in shape.layers.iter().enumerate().filter(|(_, layer)| layer.kv_heads > 0) {
        let side = |name: &str, kind: KvType, size: usize| {
            let kind = kind.for_layer(i, shape.layers.len(), layer.window.is_some());
            kind.row_bytes_or_error(size).map_err(|e| Error::new(format!("layer {i}, {name}: {e}")))
        };
        let cell = side("K", k, layer.k_head_size)? + side("V", v, layer.v_head_size)?;
        let cells = layer.window.map_or(ctx, |window| window.min(ctx));
        total += (cell * layer.kv_heads) as u64 * cells as u64;
        total += recent_bytes(layer, i, shape.layers.len(), cells, (k, v));
    }
    Ok(total)
}

/// Bytes of a layer's precise rows: those of the slots, and of one that is never read.
fn recent_bytes(layer: &LayerShape, index: usize, layers: usize, cells: usize, (k, v): (KvType, KvType)) -> u64 {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let slots = recent::slots(k.id(), v.id(), count(cells), 1, count(layer.window.unwrap_or(0)));
    let own =
        |kind: KvType, size: usize| kind.for_layer(index, layers, layer.window.is_some()).at(size).map(KvType::id);
    let types = own(k, layer.k_head_size).zip(own(v, layer.v_head_size)).and_then(|(k, v)| recent::types(k, Some(v)));
    let Some((k, Some(v))) = types.filter(|_| slots > 0) else { return 0 };
    let row = |id: i32, size: usize| KvType::from_id(id).and_then(|kind| kind.row_bytes(size)).unwrap_or(0);
    let cell = (row(k, layer.k_head_size) + row(v, layer.v_head_size)) * layer.kv_heads;
    cell as u64 * (u64::from(slots) + 1)
}

/// The largest context, a multiple of 256 as llama.cpp has it, whose caches take no more than `budget` bytes; 0 where
/// not even 256 cells fit.
///
/// ```
/// use ggml_ext::{largest_context, KvType, ModelShape};
///
/// let llama_8b = ModelShape::uniform(32, 8, 128);
/// let srft4: KvType = "srft4".parse()?;
/// assert_eq!(largest_context(&llama_8b, 3 << 30, KvType::F16, KvType::F16)?, 24576);
/// assert_eq!(largest_context(&llama_8b, 3 << 30, srft4, srft4)?, 87040);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # Errors
/// As [`cache_bytes`], and where the cache stops growing with the context because every layer has a window.
pub fn largest_context(shape: &ModelShape, budget: u64, k: KvType, v: KvType) -> Result<usize, Error> {
    const STEP: usize = 256;
    let bytes = |steps: usize| cache_bytes(shape, steps * STEP, k, v);
    // Far beyond any memory there is; the products above stay within 64 bits.
    let (mut fits, mut beyond) = (0, 1 << 24);
    if bytes(beyond)? <= budget {
        return Err(Error::new("this cache fits the memory at every context"));
    }
    while beyond - fits > 1 {
        let middle = (fits + beyond) / 2;
        if bytes(middle)? <= budget {
            fits = middle;
        } else {
            beyond = middle;
        }
    }
    Ok(fits * STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(name: &str) -> KvType {
        name.parse().unwrap()
    }

    #[test]
    fn bytes_are_those_of_the_rows() {
        // SmolLM2-135M: 30 layers, 3 KV heads of 64; llama.cpp reports 22.50 and 6.73 MiB for 1024 cells.
        let shape = ModelShape::uniform(30, 3, 64);
        let mib = |k, v| cache_bytes(&shape, 1024, kind(k), kind(v)).unwrap() as f64 / 1048576.0;
        assert_eq!(mib("f16", "f16"), 22.5);
        let recent = (65 * 30 * 3 * 2 * 68) as f64 / 1048576.0;
        assert!((mib("srft4", "srft4") - 5.9765625 - recent).abs() < 1e-9);
        assert!((mib("srft4,recent=0", "srft4") - 5.9765625).abs() < 1e-9);
        assert_eq!(mib("q8_0", "f16"), (22.5 + 22.5 * 8.5 / 16.0) / 2.0);
    }

    #[test]
    fn windows_and_mla_count_as_they_are() {
        let mut local = LayerShape::new(1, 256);
        local.window = Some(512);
        let shape = ModelShape { layers: vec![local, LayerShape::new(1, 256)] };
        assert_eq!(cache_bytes(&shape, 4096, KvType::F16, KvType::F16).unwrap(), (512 + 4096) * 1024);
        let mut mla = LayerShape::new(1, 576);
        mla.v_head_size = 512;
        let shape = ModelShape { layers: vec![mla] };
        assert_eq!(cache_bytes(&shape, 10, kind("srft8"), KvType::F16).unwrap(), 10 * (612 + 1024));
    }

    #[test]
    fn specs_count_layer_by_layer() {
        let shape = ModelShape::uniform(4, 1, 128);
        let bytes = cache_bytes(&shape, 1, kind("srft4,0=f16,-1=srft8"), kind("srft3")).unwrap();
        assert_eq!(bytes, 256 + 2 * 68 + 136 + 4 * 52);
        let e = cache_bytes(&shape, 1, KvType::F16, kind("srft4,4=f16")).unwrap_err().to_string();
        assert!(e.contains("no layer 4") && e.contains("0 to 3"), "{e}");
    }

    #[test]
    fn a_layer_without_a_cache_keeps_its_number() {
        let mut shape = ModelShape::uniform(4, 1, 128);
        shape.layers[0] = LayerShape::new(0, 0);
        let bytes = cache_bytes(&shape, 1, kind("srft4,1=f16"), kind("srft4,0=f16")).unwrap();
        assert_eq!(bytes, 256 + 2 * 68 + 3 * 68);
    }

    #[test]
    fn what_does_not_fit_names_the_layer() {
        let shape = ModelShape { layers: vec![LayerShape::new(8, 128), LayerShape::new(8, 100)] };
        let e = cache_bytes(&shape, 512, kind("srft4"), KvType::F16).unwrap_err().to_string();
        assert!(e.contains("layer 1, K") && e.contains("100"), "{e}");
    }

    #[test]
    fn the_largest_context_fits_and_the_next_does_not() {
        let shape = ModelShape::uniform(30, 3, 64);
        for budget in [0u64, 1 << 20, 123_456_789, 8 << 30] {
            let ctx = largest_context(&shape, budget, kind("srft4"), kind("srft3")).unwrap();
            let bytes = |ctx| cache_bytes(&shape, ctx, kind("srft4"), kind("srft3")).unwrap();
            assert!(bytes(ctx) <= budget && bytes(ctx + 256) > budget, "{budget}: {ctx}");
        }
        let mut local = LayerShape::new(1, 64);
        local.window = Some(512);
        assert!(largest_context(&ModelShape { layers: vec![local] }, 1 << 30, KvType::F16, KvType::F16).is_err());
    }
}
