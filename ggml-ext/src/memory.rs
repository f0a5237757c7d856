//! How much memory a cache takes, before there is one: the tensors that llama.cpp makes, counted as it makes them.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::error::Error;
use crate::guard::{self, LayerWeights, Resolved};
use crate::kv_type::KvType;
use crate::spec::{recent, Layer, Side};

/// What a layer's cache is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerShape {
    /// Heads of K and V, which is fewer than query heads in most models.
    pub kv_heads: usize,
    /// Values of one head of K.
    pub k_head_size: usize,
    /// Values of one head of V; 0 where V is a part of K's rows, as with MLA.
    pub v_head_size: usize,
    /// Tokens that the layer looks back, where it has a sliding window.
    pub window: Option<usize>,
    /// All cells are kept in spite of the window.
    pub keeps_all: bool,
    /// Tokens that share a cell: 1, except where a model compresses them.
    pub tokens_per_cell: usize,
    /// Keys of an indexer, which stay f16 beside a type of this crate.
    pub indexer: bool,
}

impl LayerShape {
    /// A layer whose K and V have heads of the same size, without a sliding window.
    pub fn new(kv_heads: usize, head_size: usize) -> LayerShape {
        LayerShape {
            kv_heads,
            k_head_size: head_size,
            v_head_size: head_size,
            window: None,
            keeps_all: false,
            tokens_per_cell: 1,
            indexer: false,
        }
    }

    /// Does `swa=` of a spec mean it?
    pub fn slides(&self) -> bool {
        self.window.is_some() && !self.keeps_all || self.tokens_per_cell > 1
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
/// let mixed = ModelShape::from_layers([LayerShape::new(4, 256), local].repeat(13));
/// # assert_eq!((llama_8b.layers.len(), mixed.layers.len()), (32, 26));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ModelShape {
    /// One entry a layer; one that keeps no K and V of its own (a recurrent one, or one that uses another's) has no heads.
    pub layers: Vec<LayerShape>,
    /// Further caches, each with the number of its layer: an indexer's keys, compressed cells.
    pub beside: Vec<(usize, LayerShape)>,
    /// Bytes of the tensors that hold a state of each sequence, whatever the context and the cache types.
    pub states: Vec<u64>,
    /// Sequences never share cells.
    pub own_streams: bool,
    /// What the guard looks at, for each layer.
    pub(crate) weights: Vec<LayerWeights>,
}

impl ModelShape {
    /// A model of these layers and nothing else.
    pub fn from_layers(layers: Vec<LayerShape>) -> ModelShape {
        ModelShape { layers, ..ModelShape::default() }
    }

    /// A model whose layers are all alike.
    pub fn uniform(layers: usize, kv_heads: usize, head_size: usize) -> ModelShape {
        ModelShape::from_layers(vec![LayerShape::new(kv_heads, head_size); layers])
    }

    /// Is V a part of K's rows? llama.cpp wants one type for both then.
    pub fn shares_rows(&self) -> bool {
        self.layers.iter().any(|layer| layer.kv_heads > 0 && layer.v_head_size == 0)
    }

    /// The type that a layer's tensor gets where `kind` is asked for, raised where the guard says so.
    #[doc(hidden)]
    pub fn resolve(&self, i: usize, layer: &LayerShape, side: Side, kind: KvType) -> Result<Resolved, Error> {
        let at = |e: Error| Error::new(format!("layer {i}, {side}: {e}"));
        let head_size = if side == Side::K { layer.k_head_size } else { layer.v_head_size };
        let (n_layer, sliding) = (self.layers.len(), layer.slides());
        kind.for_layer(i, n_layer, sliding).row_bytes_or_error(head_size).map_err(at)?;
        let weights = self.weights.get(i).map(LayerWeights::borrow).unwrap_or_default();
        guard::resolve(kind.id(), side, &Layer { index: i, n_layer, head_size, sliding }, &weights).map_err(Error::new)
    }

    /// The caches of the layers, and those beside them.
    fn caches(&self) -> impl Iterator<Item = (usize, &LayerShape)> {
        let beside = self.beside.iter().map(|(i, layer)| (*i, layer));
        self.layers.iter().enumerate().chain(beside).filter(|(_, layer)| layer.kv_heads > 0)
    }
}

/// A context as llama.cpp makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContextShape {
    /// Cells of all sequences (`-c`).
    pub cells: usize,
    /// Sequences (`-np`).
    pub sequences: usize,
    /// Sequences share the cells (`-kvu`); otherwise each has its part.
    pub unified: bool,
    /// Tokens that are computed at once (`-ub`): layers with a window have room for them.
    pub batch: usize,
    /// Layers with a window keep all cells (`--swa-full`).
    pub full_windows: bool,
    /// Without it there are no recent cells, and V is padded.
    pub flash_attention: bool,
}

impl ContextShape {
    /// One sequence, and what llama.cpp takes by default. It rounds a context up to a multiple of 256 cells, and so does this.
    pub fn new(cells: usize) -> ContextShape {
        ContextShape {
            cells: cells.next_multiple_of(STEP),
            sequences: 1,
            unified: false,
            batch: 512,
            full_windows: false,
            flash_attention: true,
        }
    }

    /// Streams of cells, and the cells of each.
    fn streams(&self, model: &ModelShape) -> (usize, usize) {
        let sequences = self.sequences.max(1);
        // Cells are dealt out before a model insists on streams of its own.
        let cells =
            if self.unified || sequences == 1 { self.cells } else { (self.cells / sequences).next_multiple_of(STEP) };
        (if self.unified && !model.own_streams { 1 } else { sequences }, cells)
    }
}

/// llama.cpp's step of cells.
const STEP: usize = 256;

/// Bytes of the tensors of a context's caches.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CacheSize {
    /// Of K, precise rows of recent cells included.
    pub k: u64,
    /// Of V.
    pub v: u64,
    /// Of states that do not grow with the context.
    pub states: u64,
    /// Values in the cells of K and V.
    pub values: u64,
    /// Each tensor's: allocators round them up.
    pub tensors: Vec<u64>,
    /// Why layers have a higher type than was asked for: a line for each.
    pub raised: Vec<String>,
}

impl CacheSize {
    /// The caches of a context.
    ///
    /// ```
    /// use ggml_ext::{CacheSize, ContextShape, KvType, ModelShape};
    ///
    /// let mut context = ContextShape::new(32768);
    /// context.sequences = 4;
    /// let f16 = CacheSize::of(&ModelShape::uniform(32, 8, 128), &context, KvType::F16, KvType::F16)?;
    /// assert_eq!((f16.bytes(), f16.bits_per_value()), (4 << 30, 16.0));
    /// # Ok::<(), ggml_ext::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`cache_bytes`].
    pub fn of(model: &ModelShape, context: &ContextShape, k: KvType, v: KvType) -> Result<CacheSize, Error> {
        for (side, kind, serves) in [("K", k, k.serves_k()), ("V", v, v.serves_v())] {
            if !serves {
                return Err(Error::new(format!("{kind} is not for {side}")));
            }
        }
        k.check_layers(Side::K, model.layers.len())?;
        v.check_layers(Side::V, model.layers.len())?;
        let mut size = CacheSize::default();
        for (i, layer) in model.caches() {
            Count { model, context, i, layer, k, v }.add_to(&mut size)?;
        }
        for state in model.states.iter().map(|bytes| bytes.saturating_mul(context.sequences.max(1) as u64)) {
            size.states = size.states.saturating_add(state);
            size.tensors.push(state);
        }
        Ok(size)
    }

    /// Of everything.
    pub fn bytes(&self) -> u64 {
        self.k.saturating_add(self.v).saturating_add(self.states)
    }

    /// Of K and V, recent cells included; 0 where there are none.
    pub fn bits_per_value(&self) -> f64 {
        self.k.saturating_add(self.v) as f64 * 8.0 / self.values.max(1) as f64
    }
}

/// A layer's cache on its way into a sum.
struct Count<'a> {
    model: &'a ModelShape,
    context: &'a ContextShape,
    i: usize,
    layer: &'a LayerShape,
    k: KvType,
    v: KvType,
}

impl Count<'_> {
    fn add_to(&self, size: &mut CacheSize) -> Result<(), Error> {
        let (layer, (streams, of_context)) = (self.layer, self.context.streams(self.model));
        let cells = self.cells(of_context);
        let asked_k = if layer.indexer && self.k.is_ours() { KvType::F16 } else { self.k };
        let k = self.resolve(Side::K, asked_k, size)?;
        let v = if layer.v_head_size > 0 { Some(self.resolve(Side::V, self.v, size)?) } else { None };
        let row = |kind: KvType, values: usize| kind.row_bytes(values).unwrap_or(0);
        // Without flash attention V lies across, and all layers have the width of the widest.
        let across = !self.context.flash_attention && !layer.indexer;
        let widest = || self.model.layers.iter().map(|l| l.v_head_size * l.kv_heads).max().unwrap_or(0);
        let rows_of = |k: KvType, v: Option<KvType>| {
            let v_row = |v| if across { row(v, widest()) } else { row(v, layer.v_head_size) * layer.kv_heads };
            (row(k, layer.k_head_size) * layer.kv_heads, v.map(v_row))
        };
        let mut add = |(k, v): (usize, Option<usize>), rows: usize| {
            let [k, v] = [Some(k), v].map(|row| row.map(|row| (row as u64).saturating_mul((rows * streams) as u64)));
            size.k = size.k.saturating_add(k.unwrap_or(0));
            size.v = size.v.saturating_add(v.unwrap_or(0));
            size.tensors.extend([k, v].into_iter().flatten());
        };
        add(rows_of(k, v), cells);
        if let Some((slots, k, v)) = self.recent(asked_k, k, v, cells, streams) {
            // And one that is never read.
            add(rows_of(k, v), slots + 1);
        }
        let values = ((layer.k_head_size + layer.v_head_size) * layer.kv_heads) as u64;
        size.values = size.values.saturating_add(values.saturating_mul((cells * streams) as u64));
        Ok(())
    }

    /// Cells of a stream, of a context that has so many.
    fn cells(&self, of_context: usize) -> usize {
        let (layer, context) = (self.layer, self.context);
        match layer.window.filter(|_| !layer.keeps_all && !context.full_windows) {
            Some(window) => {
                let shared = context.unified && !self.model.own_streams;
                let seen = window.saturating_mul(if shared { context.sequences.max(1) } else { 1 });
                of_context.min(seen.saturating_add(context.batch)).next_multiple_of(STEP)
            }
            None if layer.tokens_per_cell > 1 => {
                of_context.div_ceil(layer.tokens_per_cell).max(1).next_multiple_of(STEP)
            }
            None => of_context,
        }
    }

    /// The type of the layer's tensor, raised where the guard says so.
    fn resolve(&self, side: Side, kind: KvType, size: &mut CacheSize) -> Result<KvType, Error> {
        let resolved = self.model.resolve(self.i, self.layer, side, kind)?;
        size.raised.extend(resolved.raised);
        let none = || Error::new(format!("layer {}, {side}: {kind} has no type for it", self.i));
        KvType::from_id(resolved.id).ok_or_else(none)
    }

    /// Precise rows of recent cells: how many of a stream, and their types.
    fn recent(
        &self,
        asked_k: KvType,
        k: KvType,
        v: Option<KvType>,
        cells: usize,
        streams: usize,
    ) -> Option<(usize, KvType, Option<KvType>)> {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let sequences = self.context.sequences.max(1) / streams;
        let window = self.layer.window.unwrap_or(0);
        let slots = recent::slots(asked_k.id(), self.v.id(), count(cells), count(sequences), count(window));
        let (k, v) = recent::types(k.id(), v.map(KvType::id)).filter(|_| slots > 0 && self.context.flash_attention)?;
        Some((slots as usize, KvType::from_id(k)?, v.and_then(KvType::from_id)))
    }
}

/// Bytes of the caches of a model for `ctx` cells, of one sequence, with llama.cpp's default batch. llama.cpp rounds a context
/// up to a multiple of 256 cells: give the `n_ctx` that it reports. The guard is asked where the shape comes from a
/// [`Gguf`](crate::Gguf), whose weights it looks at.
///
/// ```
/// use ggml_ext::{cache_bytes, KvType, ModelShape};
///
/// let llama_8b = ModelShape::uniform(32, 8, 128);
/// let srft4: KvType = "srft4".parse()?;
/// assert_eq!(cache_bytes(&llama_8b, 32768, KvType::F16, KvType::F16)?, 4 << 30);
/// let recent = 129 * 32 * 8 * 2 * 136; // 8.5 bits for the last 128 cells and one that is never read
/// assert_eq!(cache_bytes(&llama_8b, 32768, srft4, srft4)?, (4 << 30) * 17 / 64 + recent);
/// let none: KvType = "srft4,recent=0".parse()?;
/// assert_eq!(cache_bytes(&llama_8b, 32768, none, none)?, (4 << 30) * 17 / 64);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # Errors
/// Where a type does not serve a layer's head size or that side of the cache, and where a spec names layers that are not
/// there.
pub fn cache_bytes(shape: &ModelShape, ctx: usize, k: KvType, v: KvType) -> Result<u64, Error> {
    let context = ContextShape { cells: ctx, ..ContextShape::new(0) };
    CacheSize::of(shape, &context, k, v).map(|size| size.bytes())
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
/// assert_eq!(largest_context(&llama_8b, 3 << 30, srft4, srft4)?, 92160);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # Errors
/// As [`cache_bytes`], and where the cache stops growing with the context because every layer has a window.
pub fn largest_context(shape: &ModelShape, budget: u64, k: KvType, v: KvType) -> Result<usize, Error> {
    let fits =
        |context: &ContextShape| -> Result<bool, Error> { Ok(CacheSize::of(shape, context, k, v)?.bytes() <= budget) };
    let largest = ContextShape::new(0).largest(fits)?;
    largest.ok_or_else(|| Error::new("this cache fits the memory at every context"))
}

impl ContextShape {
    /// The most cells of such a context that fit; None where any number does. What fits must go on fitting with fewer.
    ///
    /// # Errors
    /// Those of `fits`.
    pub fn largest<E>(&self, fits: impl Fn(&ContextShape) -> Result<bool, E>) -> Result<Option<usize>, E> {
        // Each sequence has whole steps of its own.
        let step = if self.unified { STEP } else { STEP * self.sequences.max(1) };
        let fits = |steps: usize| fits(&ContextShape { cells: steps * step, ..*self });
        // Far beyond any memory there is.
        let (mut most, mut beyond) = (0, 1 << 24);
        if fits(beyond)? {
            return Ok(None);
        }
        while beyond - most > 1 {
            let middle = (most + beyond) / 2;
            if fits(middle)? {
                most = middle;
            } else {
                beyond = middle;
            }
        }
        Ok(Some(most * step))
    }
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
        let shape = ModelShape::from_layers(vec![local, LayerShape::new(1, 256)]);
        assert_eq!(
            cache_bytes(&shape, 4096, KvType::F16, KvType::F16).unwrap(),
            (1024 + 4096) * 1024,
            "a batch beside it"
        );
        let mut mla = LayerShape::new(1, 576);
        mla.v_head_size = 512;
        let shape = ModelShape::from_layers(vec![mla]);
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
        let shape = ModelShape::from_layers(vec![LayerShape::new(8, 128), LayerShape::new(8, 100)]);
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
        assert!(largest_context(&ModelShape::from_layers(vec![local]), 1 << 30, KvType::F16, KvType::F16).is_err());
    }
}
