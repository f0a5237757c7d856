//! Attention against f64 on the decoded rows, for every instruction set and kind of row.

use crate::codec::RowFormat;
use std::rc::Rc;

mod recent;

use super::*;
use crate::groups::{GroupLayout, Walker};
use crate::isa::tests::{others, stepped, tried};
use crate::isa::{kernels, scalar};
use crate::random::Noise;
use crate::table;
use crate::tensor::View;
use half::f16;

/// One side of a cache: [n_kv][heads] rows, as llama.cpp lays them out.
struct Cache {
    kind: i32,
    size: usize,
    row_bytes: usize,
    heads: usize,
    bytes: Vec<u8>,
    /// What the rows decode to; of keys, what their scores are products with.
    values: Vec<f32>,
}

fn cache(name: &str, keys: bool, size: usize, cells: usize, heads: usize, noise: &mut Noise) -> Cache {
    let mut values = noise.row(cells * heads * size);
    let (kind, row_bytes, bytes) = match name {
        "f32" => (0, 4 * size, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        "f16" => {
            let bytes = values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
            values = values.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            (1, 2 * size, bytes)
        }
        "q8_0" => {
            let mut bytes = Vec::new();
            for block in values.chunks_exact_mut(32) {
                let d = f16::from_f32(block.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0);
                bytes.extend(d.to_le_bytes());
                for x in block {
                    let q = (*x / d.to_f32()).round().clamp(-127.0, 127.0);
                    bytes.push(q as i8 as u8);
                    *x = q * d.to_f32();
                }
            }
            (8, size / 32 * 34, bytes)
        }
        _ => {
            let Some(table::Entry::Family(f)) = table::by_name(name) else { panic!("{name}") };
            let c = f.at(size).unwrap();
            let mut bytes = vec![0u8; cells * heads * c.row_bytes()];
            let f = c.format();
            if f.grouped().is_some() {
                return grouped(c, cells, heads, values);
            }
            for (row, x) in bytes.chunks_exact_mut(c.row_bytes()).zip(values.chunks_exact_mut(size)) {
                scalar::encode(f, x, row);
                if keys {
                    scalar::decode_key(f, row, x);
                } else {
                    scalar::decode(f, row, x);
                }
            }
            (c.id(), c.row_bytes(), bytes)
        }
    };
    Cache { kind, size, row_bytes, heads, bytes, values }
}

/// Rows that are coded together: a mean is added that keys share, every fifth is far from it, some cells stay empty, and
/// they are written out of order.
fn grouped(c: table::Concrete, cells: usize, heads: usize, mut values: Vec<f32>) -> Cache {
    let (size, f) = (c.head_size, c.format().grouped().unwrap());
    let (row_bytes, mut noise) = (c.row_bytes(), Noise::new(17));
    let (mean, mut bytes) = (noise.row(size), vec![0u8; cells * heads * c.row_bytes()]);
    let (data, stride) = (bytes.as_mut_ptr(), heads * row_bytes);
    let tensor = Tensor {
        kind: c.id(),
        ne: [(heads * size) as i64, cells as i64, 1, 1],
        nb: [row_bytes, stride, stride * cells, stride * cells],
        data,
        to_float: None,
        view: Default::default(),
    };
    let layout = GroupLayout::of(&tensor, f).unwrap();
    let mut walker = Walker::new(f, kernels());
    for i in 0..cells {
        let cell = if i % 16 == 9 { i - 5 } else { i };
        for head in 0..heads {
            let x = &mut values[(cell * heads + head) * size..][..size];
            x.iter_mut().zip(&mean).for_each(|(x, m)| *x += if cell % 5 == 2 { 0.0 } else { *m });
            // SAFETY: the cells of the buffer.
            unsafe { walker.write(layout.place(data.add(cell * stride + head * row_bytes)).0, x) };
        }
    }
    for (i, x) in values.chunks_exact_mut(size).enumerate() {
        // SAFETY: as above.
        unsafe { walker.read(layout.place(data.add(i * row_bytes)).0, x) };
    }
    Cache { kind: c.id(), size, row_bytes, heads, bytes, values }
}

impl Cache {
    fn tensor(&self, cells: usize, unit: usize) -> Tensor {
        let cell = self.row_bytes * self.heads;
        Tensor {
            kind: self.kind,
            ne: [self.size as i64, cells as i64, self.heads as i64, 1],
            nb: [unit, cell, self.row_bytes, cell * cells],
            data: self.bytes.as_ptr().cast_mut(),
            to_float: None,
            view: Default::default(),
        }
    }

    fn unit(&self) -> usize {
        match self.kind {
            0 => 4,
            1 => 2,
            8 => 34,
            _ => self.row_bytes,
        }
    }

    fn value(&self, cell: usize, head: usize) -> &[f32] {
        &self.values[(cell * self.heads + head) * self.size..][..self.size]
    }
}

fn float_tensor(data: &[f32], ne: [usize; 4]) -> Tensor {
    let nb = [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]];
    Tensor {
        kind: 0,
        ne: ne.map(|n| n as i64),
        nb,
        data: data.as_ptr() as *mut u8,
        to_float: None,
        view: Default::default(),
    }
}

/// An op without mask, sinks, bias or cap.
fn plain_op([q, k, v, dst]: [Tensor; 4], scale: f32) -> AttentionOp<'static> {
    AttentionOp {
        q,
        k,
        v,
        dst,
        mask: None,
        sinks: None,
        recent: None,
        center: None,
        scale,
        max_bias: 0.0,
        logit_softcap: 0.0,
    }
}

/// What one query of KV head 0 gives in f64: the first `size` values of the rows of `v` in these cells, weighted.
fn exact_answer(
    query: &[f32],
    k: &Cache,
    v: &Cache,
    cells: std::ops::Range<usize>,
    scale: f64,
    size: usize,
) -> Vec<f64> {
    let (mut sum, mut out) = (0.0f64, vec![0.0f64; size]);
    for c in cells {
        let dot: f64 = query.iter().zip(k.value(c, 0)).map(|(&a, &b)| a as f64 * b as f64).sum();
        let weight = (dot * scale).exp();
        sum += weight;
        out.iter_mut().zip(v.value(c, 0)).for_each(|(o, &x)| *o += weight * x as f64);
    }
    out.iter_mut().for_each(|o| *o /= sum);
    out
}

/// Runs the op as ggml does: all threads at once, and once more when all have ended.
///
/// # Safety
/// The tensors of the op hold what they say.
unsafe fn compute(attention: &Attention, threads: usize) {
    let mut work = vec![0xa5u8; attention.work_size(threads)];
    let work = work.as_mut_ptr();
    let step = |phase: Phase, attention: &Attention, ith: usize, work: *mut u8| {
        // SAFETY: the caller's promise, and every thread has its own number.
        unsafe {
            match phase {
                Phase::Compute => attention.compute(ith, threads, work),
                Phase::Finish => attention.finish(ith, threads, work),
            }
        }
    };
    for phase in [Phase::Compute, Phase::Finish] {
        // More than a machine has: one after another, which gives the same bits.
        if threads > 3 {
            (0..threads).for_each(|ith| step(phase, attention, ith, work));
            continue;
        }
        std::thread::scope(|scope| {
            for ith in 0..threads {
                let (attention, work) = (Shared(attention), Shared(work));
                scope.spawn(move || {
                    let (attention, work) = (attention, work);
                    step(phase, attention.0, ith, work.0);
                });
            }
        });
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    k: &'static str,
    v: &'static str,
    k_size: usize,
    v_size: usize,
    kv_heads: usize,
    heads_per_kv: usize,
    queries: usize,
    cells: usize,
    threads: usize,
    max_bias: f32,
    softcap: f32,
    sinks: bool,
    centered: bool,
    masked: bool,
}

const PLAIN: Case = Case {
    k: "srft4",
    v: "srft4",
    k_size: 64,
    v_size: 64,
    kv_heads: 2,
    heads_per_kv: 3,
    queries: 1,
    cells: 200,
    threads: 2,
    max_bias: 0.0,
    softcap: 0.0,
    sinks: false,
    centered: false,
    masked: true,
};

/// Pointers that ggml's threads share too.
struct Shared<T>(T);
// SAFETY: what is behind them outlives the threads, which write to places of their own.
unsafe impl<T> Send for Shared<T> {}

/// What a case attends to, made once for all that is tried on it.
struct Trial {
    case: Case,
    /// K and V, and what made them: other queries and options meet the same rows.
    rows: Rc<(Cache, Cache, Noise)>,
    q: Vec<f32>,
    mask: Vec<f16>,
    sinks: Vec<f32>,
    center: Vec<f32>,
    recent: Option<recent::Columns>,
}

impl Trial {
    fn new(case: Case) -> Trial {
        let mut noise = Noise::new(case.cells as u64 * 31 + case.k_size as u64);
        let k = cache(case.k, true, case.k_size, case.cells, case.kv_heads, &mut noise);
        let v = cache(case.v, false, case.v_size, case.cells, case.kv_heads, &mut noise);
        Trial::of(case, Rc::new((k, v, noise)))
    }

    /// Another case on the same rows.
    fn with(&self, case: Case) -> Trial {
        let rows = |c: Case| (c.k, c.v, c.k_size, c.v_size, c.kv_heads, c.cells);
        assert_eq!(rows(case), rows(self.case));
        Trial::of(case, self.rows.clone())
    }

    fn of(case: Case, rows: Rc<(Cache, Cache, Noise)>) -> Trial {
        let heads = case.kv_heads * case.heads_per_kv;
        let q = rows.2.clone().row(case.k_size * case.queries * heads);
        let mut mask = vec![f16::ZERO; case.cells * case.queries];
        for t in 0..case.queries {
            for c in 0..case.cells {
                // Causal, with some cells hidden and a soft bias here and there; one query sees nothing.
                let hidden = c + case.queries > case.cells + t || c % 7 == 3 || (case.queries > 4 && t == 2);
                let bias = f16::from_f32((c % 5) as f32 * -0.25);
                mask[t * case.cells + c] = if hidden { f16::NEG_INFINITY } else { bias };
            }
        }
        let sinks = (0..heads).map(|h| h as f32 * 0.3 - 0.5).collect();
        let center = Noise::new(9).row(case.v_size * case.kv_heads);
        Trial { case, rows, q, mask, sinks, center, recent: None }
    }

    fn heads(&self) -> usize {
        self.case.kv_heads * self.case.heads_per_kv
    }

    fn scale(&self) -> f32 {
        1.0 / (self.case.k_size as f32).sqrt()
    }

    /// The op's result: \[queries]\[heads] rows.
    fn attend(&self, kernels: &'static Kernels, threads: usize) -> Vec<f32> {
        let Trial { case, rows, q, mask, sinks, center, recent } = self;
        let (k, v, _) = &**rows;
        let heads = self.heads();
        let batch = recent.as_ref().and_then(recent::Columns::batch);
        let recent = recent.as_ref().map(|r| r.rows(batch.as_ref()));
        let dst = vec![7.0f32; case.v_size * heads * case.queries];
        let mask_tensor = Tensor {
            kind: 1,
            ne: [case.cells as i64, case.queries as i64, 1, 1],
            nb: [2, 2 * case.cells, 2 * case.cells * case.queries, 2 * case.cells * case.queries],
            data: mask.as_ptr().cast_mut().cast(),
            to_float: None,
            view: Default::default(),
        };
        let sinks_tensor = float_tensor(sinks, [heads, 1, 1, 1]);
        let center_tensor = float_tensor(center, [case.v_size, 1, case.kv_heads, 1]);
        let op = AttentionOp {
            q: float_tensor(q, [case.k_size, case.queries, heads, 1]),
            k: k.tensor(case.cells, k.unit()),
            v: v.tensor(case.cells, v.unit()),
            dst: float_tensor(&dst, [case.v_size, heads, case.queries, 1]),
            mask: case.masked.then_some(&mask_tensor),
            sinks: case.sinks.then_some(&sinks_tensor),
            recent: recent.as_ref(),
            center: case.centered.then_some(&center_tensor),
            scale: self.scale(),
            max_bias: case.max_bias,
            logit_softcap: case.softcap,
        };
        let attention = Attention::with(&op, kernels).unwrap();
        // SAFETY: the tensors above hold what they say.
        unsafe { compute(&attention, threads) };
        dst
    }

    /// The same in f64 from the decoded rows; `None` is a query that sees nothing, and gets no center.
    fn exact(&self) -> Vec<Option<Vec<f64>>> {
        let rows = (0..self.case.queries).flat_map(|t| (0..self.heads()).map(move |h| (t, h)));
        rows.map(|(t, h)| self.exact_row(t, h)).collect()
    }

    fn exact_row(&self, t: usize, h: usize) -> Option<Vec<f64>> {
        let Trial { case, rows, q, mask, sinks, center, .. } = self;
        let (k, v, _) = &**rows;
        let query = &q[(h * case.queries + t) * case.k_size..][..case.k_size];
        let slope = if case.max_bias > 0.0 { slope(case.max_bias.into(), h, self.heads()) } else { 1.0 };
        let (mut sum, mut out) = (0.0f64, vec![0.0f64; case.v_size]);
        if case.sinks {
            sum += (sinks[h] as f64).exp();
        }
        for c in 0..case.cells {
            let head = h / case.heads_per_kv;
            let precise = self.recent.as_ref().and_then(|r| r.values(c, head));
            let (key, value) = precise.unwrap_or_else(|| (k.value(c, head), v.value(c, head)));
            let dot: f64 = query.iter().zip(key).map(|(&a, &b)| a as f64 * b as f64).sum();
            let mut s = dot * self.scale() as f64;
            if case.softcap > 0.0 {
                s = case.softcap as f64 * (s / case.softcap as f64).tanh();
            }
            if case.masked {
                s += slope * mask[t * case.cells + c].to_f64();
            }
            let w = s.exp();
            sum += w;
            if w > 0.0 {
                for (o, &x) in out.iter_mut().zip(value) {
                    *o += w * x as f64;
                }
            }
        }
        out.iter_mut().filter(|_| sum > 0.0).for_each(|o| *o /= sum);
        if case.centered {
            out.iter_mut().zip(&center[h / case.heads_per_kv * case.v_size..]).for_each(|(o, &c)| *o += f64::from(c));
        }
        (sum > 0.0 || case.centered).then_some(out)
    }

    /// The largest error of a row, relative to its norm.
    fn error(&self, got: &[f32], exact: &[Option<Vec<f64>>]) -> f64 {
        let case = self.case;
        let mut worst = 0.0f64;
        for (got, want) in got.chunks_exact(case.v_size).zip(exact) {
            let Some(want) = want else {
                assert!(got.iter().all(|&x| x == 0.0), "a query that sees nothing gives zeros: {case:?}");
                continue;
            };
            let norm: f64 = want.iter().map(|o| o.powi(2)).sum::<f64>().sqrt();
            let e: f64 = got.iter().zip(want).map(|(&g, o)| (g as f64 - o).powi(2)).sum::<f64>().sqrt();
            assert!(e.is_finite(), "not finite: {case:?}");
            worst = worst.max(e / norm.max(1e-3));
        }
        worst
    }
}

/// ALiBi's slope of a head.
fn slope(max_bias: f64, h: usize, heads: usize) -> f64 {
    let base = 1usize << heads.ilog2();
    let m = |bias: f64, n: usize| 2f64.powf(-bias / base as f64).powi(n as i32);
    if h < base {
        m(max_bias, h + 1)
    } else {
        m(max_bias / 2.0, 2 * (h - base) + 1)
    }
}

/// 8-bit queries leave about 0.6% of noise in the scores, 0.8% where neighbours are rounded together; 16-bit weights 0.01% in the sums;
/// float rows have neither.
fn check(case: Case) {
    Trial::new(case).check(&[case.threads]);
}

impl Trial {
    fn check(&self, threads: &[usize]) {
        let case = self.case;
        let float = |name: &str| matches!(name, "f32" | "f16" | "bf16");
        let k = table::by_name(&format!("{}_{}", case.k, case.k_size));
        let coarse = matches!(k, Some(table::Entry::Concrete(t)) if t.format().levels().packing.is_coarse());
        let bound = |kernels: &Kernels| match (float(case.k), float(case.v)) {
            (true, true) => 1e-5,
            (true, false) => 2e-4,
            _ if kernels.pairs && coarse => 2.6e-2,
            _ => 2e-2,
        };
        let exact = self.exact();
        for kernels in tried() {
            for &threads in threads {
                let e = self.error(&self.attend(kernels, threads), &exact);
                assert!(e < bound(kernels), "{}, {threads} threads: relative error {e} in {case:?}", kernels.name);
            }
        }
    }
}

/// The family itself, or f16 where it does not serve V.
fn v_beside(family: &'static table::Family) -> &'static str {
    if family.sides.serve_v() {
        family.name
    } else {
        "f16"
    }
}

/// Scalar kernels, with queries rounded value by value and by pairs.
static SCALAR: [Kernels; 2] = [scalar::KERNELS, Kernels { pairs: true, ..scalar::KERNELS }];

/// The fast paths against the definition, which rounds queries in the same way.
#[test]
fn every_instruction_set_agrees_with_scalar() {
    let mut cases = Vec::new();
    for family in table::families() {
        for size in [64, 80, 128, 256].into_iter().filter(|&size| family.at(size).is_some()) {
            for queries in [1, 5, 40] {
                let sides = Case { k: family.name, v: v_beside(family), k_size: size, v_size: size, queries, ..PLAIN };
                cases.extend([sides, Case { sinks: true, softcap: 5.0, max_bias: 8.0, ..sides }]);
            }
        }
    }
    let mut last: Option<Trial> = None;
    for case in stepped(cases) {
        let same = last.take().filter(|t| (t.case.k, t.case.k_size) == (case.k, case.k_size));
        let trial = same.map_or_else(|| Trial::new(case), |t| t.with(case));
        let wanted = SCALAR.each_ref().map(|scalar| trial.attend(scalar, case.threads));
        for kernels in others() {
            let want = &wanted[usize::from(kernels.pairs)];
            let got = trial.attend(kernels, case.threads);
            for (got, want) in got.chunks_exact(case.v_size).zip(want.chunks_exact(case.v_size)) {
                let error: f32 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
                let norm: f32 = want.iter().map(|b| b * b).sum();
                assert!(error <= 1e-6 * norm, "{}: {} of {case:?}", kernels.name, (error / norm).sqrt());
            }
        }
        last = Some(trial);
    }
}

#[test]
fn every_type_and_head_size() {
    for c in stepped(table::concrete()) {
        check(Case { k: c.family.name, v: v_beside(c.family), k_size: c.head_size, v_size: c.head_size, ..PLAIN });
    }
}

#[test]
fn groups_of_cells() {
    let mut cases = Vec::new();
    for k in ["delta8", "delta4", "delta3", "band3"] {
        for cells in [50, 64, 100, 300] {
            let floats = Case { k, v: "f16", cells, threads: 1 + cells % 3, ..PLAIN };
            let codes = Case { k, v: "srft4", cells, k_size: 128, softcap: 5.0, sinks: true, ..PLAIN };
            for queries in [1, 9, 50] {
                cases.extend([floats, codes].map(|case| Case { queries, ..case }));
            }
        }
    }
    for case in stepped(cases) {
        Trial::new(case).check(&[case.threads]);
    }
}

/// A view that ends within a group reads the I-frame that lies behind it; one that begins within a group is refused.
#[test]
fn views_of_groups() {
    let mut noise = Noise::new(23);
    let (k, v) = (cache("delta4", true, 64, 256, 1, &mut noise), cache("f32", false, 64, 256, 1, &mut noise));
    let q = noise.row(64);
    let attend = |first: usize, cells: usize| -> Result<Vec<f32>, String> {
        let dst = vec![0.0f32; 64];
        let view = |c: &Cache| {
            let whole = c.tensor(256, c.unit());
            let offset = first * whole.nb[1];
            let view = crate::tensor::View {
                offset,
                row_bytes: whole.nb[1],
                rows: 256,
                data: whole.data,
                bytes: c.bytes.len(),
                ..Default::default()
            };
            // SAFETY: within the cache.
            Tensor { ne: [64, cells as i64, 1, 1], data: unsafe { whole.data.add(offset) }, view, ..whole }
        };
        let op =
            plain_op([float_tensor(&q, [64, 1, 1, 1]), view(&k), view(&v), float_tensor(&dst, [64, 1, 1, 1])], 0.125);
        let attention = Attention::new(&op)?;
        // SAFETY: the tensors above hold what they say.
        unsafe { compute(&attention, 1) };
        Ok(dst)
    };
    for (first, cells) in [(0, 70), (64, 64), (128, 100), (192, 3)] {
        let got = attend(first, cells).unwrap();
        for (got, want) in got.into_iter().zip(exact_answer(&q, &k, &v, first..first + cells, 0.125, 64)) {
            assert!((got as f64 - want).abs() < 0.02, "from {first}, {cells} cells: {got}, wanted {want}");
        }
    }
    let reason = attend(5, 64).unwrap_err();
    assert!(reason.contains("from cell 5") && reason.contains("multiple of 64"), "{reason}");
}

#[test]
fn mixed_pairs() {
    for other in ["f32", "f16", "q8_0", "srft8", "srft2", "turbo3"] {
        for queries in [1, 9] {
            check(Case { k: "srft4", v: other, queries, ..PLAIN });
            check(Case { k: other, v: "srft4", queries, ..PLAIN });
        }
    }
}

#[test]
fn keys_of_every_family_beside_floats() {
    for family in table::families() {
        for queries in [1, 9] {
            check(Case { k: family.name, v: "f16", queries, ..PLAIN });
        }
    }
}

#[test]
fn a_family_that_is_not_for_values_is_refused() {
    let mut noise = Noise::new(19);
    let k = cache("qjl1", true, 64, 70, 1, &mut noise);
    let (q, dst) = (noise.row(64), [0.0f32; 64]);
    let op = plain_op(
        [
            float_tensor(&q, [64, 1, 1, 1]),
            k.tensor(70, k.unit()),
            k.tensor(70, k.unit()),
            float_tensor(&dst, [64, 1, 1, 1]),
        ],
        0.125,
    );
    let reason = Attention::new(&op).err().unwrap();
    assert!(reason.contains("qjl1_64 is not for V") && reason.contains("36%"), "{reason}");
}

#[test]
fn shapes() {
    let mut cases = Vec::new();
    for (kv_heads, heads_per_kv) in [(1, 1), (3, 3), (2, 4), (1, 8), (1, 13), (1, 130)] {
        for queries in [1, 2, 7, 33] {
            for cells in [1, 31, 64, 300] {
                cases.push(Case { kv_heads, heads_per_kv, queries, cells: cells.max(queries), ..PLAIN });
            }
        }
    }
    for case in stepped(cases) {
        Trial::new(case).check(&[1, 2, 3]);
    }
}

#[test]
fn all_that_the_op_means() {
    for queries in [1, 6, 50] {
        check(Case { queries, masked: false, ..PLAIN });
        check(Case { queries, max_bias: 8.0, ..PLAIN });
        check(Case { queries, softcap: 5.0, ..PLAIN });
        check(Case { queries, sinks: true, ..PLAIN });
        check(Case { queries, centered: true, ..PLAIN });
        check(Case { queries, centered: true, sinks: true, v: "srft8", cells: 1000, threads: 5, ..PLAIN });
        check(Case { queries, max_bias: 8.0, softcap: 5.0, sinks: true, heads_per_kv: 5, ..PLAIN });
        check(Case { queries, k_size: 192, v_size: 128, ..PLAIN });
    }
}

#[test]
fn a_query_that_is_not_finite_shows() {
    let mut noise = Noise::new(3);
    let k = cache("srft4", true, 64, 70, 1, &mut noise);
    let v = cache("srft4", false, 64, 70, 1, &mut noise);
    let mut q = noise.row(64 * 2);
    q[5] = f32::NAN;
    let dst = vec![0.0f32; 64 * 2];
    let op = plain_op(
        [
            float_tensor(&q, [64, 1, 2, 1]),
            k.tensor(70, k.unit()),
            v.tensor(70, v.unit()),
            float_tensor(&dst, [64, 2, 1, 1]),
        ],
        0.125,
    );
    let attention = Attention::new(&op).unwrap();
    // SAFETY: the tensors above hold what they say.
    unsafe { compute(&attention, 1) };
    assert!(dst[..64].iter().all(|x| x.is_nan()));
    assert!(dst[64..].iter().all(|x| x.is_finite()));
}

/// Odd shapes on any number of threads, with every way to divide them.
#[test]
fn every_split() {
    let threads = [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 150];
    let base = Case { sinks: true, ..PLAIN };
    let cases = [
        // Decoding: heads together, then fewer, then one; fewer blocks than threads.
        Case { kv_heads: 6, heads_per_kv: 3, cells: 2500, ..base },
        Case { kv_heads: 4, heads_per_kv: 1, cells: 700, ..base },
        Case { kv_heads: 1, heads_per_kv: 7, cells: 64, ..base },
        // Some tokens at the end of a cache.
        Case { kv_heads: 2, heads_per_kv: 5, queries: 11, cells: 1000, ..base },
        Case { kv_heads: 1, heads_per_kv: 130, queries: 2, cells: 333, ..base },
        Case { kv_heads: 3, heads_per_kv: 4, queries: 45, cells: 400, masked: false, ..base },
        // Prompts.
        Case { kv_heads: 2, heads_per_kv: 3, queries: 90, cells: 130, ..base },
        Case { kv_heads: 1, heads_per_kv: 16, queries: 37, cells: 70, ..base },
        // Rows of other kinds.
        Case { k: "polar4", v: "f16", kv_heads: 3, heads_per_kv: 2, queries: 3, cells: 500, ..base },
        Case { k: "f16", v: "srft4", kv_heads: 2, heads_per_kv: 4, queries: 20, cells: 900, ..base },
        Case { k: "delta4", v: "srft4", kv_heads: 4, heads_per_kv: 2, queries: 2, cells: 777, ..base },
    ];
    for case in stepped(cases) {
        let trial = Trial::new(case);
        let exact = trial.exact();
        for threads in threads {
            let got = trial.attend(kernels(), threads);
            let e = trial.error(&got, &exact);
            assert!(e < 2e-2, "{threads} threads: relative error {e} in {case:?}");
            assert!(got == trial.attend(kernels(), threads), "{threads} threads: other bits in {case:?}");
        }
    }
}

/// An op on buffers of its own, which other shapes are cut from.
struct Streams {
    k: Cache,
    v: Cache,
    q: Vec<f32>,
}

impl Streams {
    /// Streams `from..` of `count`, `cells` cells each: `queries` queries of 6 heads on 2 KV heads.
    fn attend(&self, from: usize, count: usize, cells: usize, queries: usize, threads: usize) -> Vec<f32> {
        let (d, heads) = (64, 6);
        let stream = |c: &Cache| {
            let whole = c.tensor(cells, c.unit());
            // SAFETY: within the cache.
            let data = unsafe { whole.data.add(from * whole.nb[3]) };
            Tensor { ne: [whole.ne[0], whole.ne[1], whole.ne[2], count as i64], data, ..whole }
        };
        let dst = vec![7.0f32; d * heads * queries * count];
        let op = plain_op(
            [
                float_tensor(&self.q[from * d * queries * heads..], [d, queries, heads, count]),
                stream(&self.k),
                stream(&self.v),
                float_tensor(&dst, [d, heads, queries, count]),
            ],
            0.125,
        );
        let attention = Attention::new(&op).unwrap();
        // SAFETY: the tensors above hold what they say.
        unsafe { compute(&attention, threads) };
        dst
    }
}

#[test]
fn streams_do_not_meet() {
    let (streams, mut noise) = (3, Noise::new(29));
    for (cells, queries) in [(300, 1), (150, 9), (70, 60)] {
        let mut side = |keys| cache("srft4", keys, 64, streams * cells, 2, &mut noise);
        let (k, v) = (side(true), side(false));
        let all = Streams { k, v, q: noise.row(64 * queries * 6 * streams) };
        for threads in [1, 2, 4, 7, 40] {
            let got = all.attend(0, streams, cells, queries, threads);
            let alone = (0..streams).flat_map(|s| all.attend(s, 1, cells, queries, 1));
            for (i, (a, b)) in got.iter().zip(alone).enumerate() {
                assert!((a - b).abs() < 1e-3, "{cells} cells, {queries} queries, {threads} threads, {i}: {a} and {b}");
            }
        }
    }
}

#[test]
fn no_cells_give_zeros() {
    let mut noise = Noise::new(31);
    let mut side = |keys| cache("srft4", keys, 64, 0, 2, &mut noise);
    let (k, v) = (side(true), side(false));
    let all = Streams { k, v, q: noise.row(64 * 40 * 6) };
    for (queries, threads) in [(1, 1), (1, 5), (40, 3), (40, 64)] {
        assert!(all.attend(0, 1, 0, queries, threads).iter().all(|&x| x == 0.0));
    }
}

/// The first values of each row, as MLA takes them for V.
fn beginning_of(rows: &Tensor, values: usize) -> Tensor {
    let bytes = rows.nb[3] * rows.n(3);
    let view = View { row_bytes: rows.nb[1], rows: rows.ne[1], data: rows.data, bytes, ..View::default() };
    Tensor { ne: [values as i64, rows.ne[1], rows.ne[2], rows.ne[3]], view, ..*rows }
}

/// MLA: V is the first values of K's rows, and all query heads share one KV head.
#[test]
fn values_that_are_a_view_of_keys() {
    let (d, dv, heads, cells) = (576, 512, 128, 130);
    let mut noise = Noise::new(37);
    let k = cache("srft4", true, d, cells, 1, &mut noise);
    for (tokens, threads) in [(1, 1), (1, 3), (2, 5), (3, 64)] {
        let (q, dst) = (noise.row(d * tokens * heads), vec![7.0f32; dv * heads * tokens]);
        let keys = k.tensor(cells, k.unit());
        let op = plain_op(
            [
                float_tensor(&q, [d, tokens, heads, 1]),
                keys,
                beginning_of(&keys, dv),
                float_tensor(&dst, [dv, heads, tokens, 1]),
            ],
            1.0 / 24.0,
        );
        let attention = Attention::new(&op).unwrap();
        // SAFETY: the tensors above hold what they say.
        unsafe { compute(&attention, threads) };
        for (t, h) in [(0, 0), (tokens - 1, 77), (tokens / 2, 127)] {
            let query = &q[(h * tokens + t) * d..][..d];
            let want = exact_answer(query, &k, &k, 0..cells, 1.0 / 24.0, dv);
            let got = &dst[(t * heads + h) * dv..][..dv];
            let error: f64 = got.iter().zip(&want).map(|(&g, w)| (g as f64 - w).powi(2)).sum();
            let norm: f64 = want.iter().map(|w| w.powi(2)).sum();
            assert!(error < 4e-4 * norm, "{tokens} tokens, {threads} threads: {}", (error / norm).sqrt());
        }
    }
}

/// A tensor that is described and never read.
fn described(name: &str, size: usize, cells: usize, heads: usize) -> Tensor {
    let (kind, unit, row_bytes) = match name {
        "f16" => (1, 2, 2 * size),
        "q8_0" => (8, 34, size / 32 * 34),
        _ => {
            let Some(table::Entry::Family(f)) = table::by_name(name) else { panic!("{name}") };
            let c = f.at(size).unwrap();
            (c.id(), c.row_bytes(), c.row_bytes())
        }
    };
    let cell = row_bytes * heads;
    Tensor {
        kind,
        ne: [size as i64, cells as i64, heads as i64, 1],
        nb: [unit, cell, row_bytes, cell * cells],
        data: std::ptr::null_mut(),
        to_float: None,
        view: Default::default(),
    }
}

/// 4 MiB a thread, whatever the shape: once it was all tiles for every thread, 15 GiB for DeepSeek-V3 on 128.
#[test]
fn work_memory_is_bounded() {
    let pairs = [
        ["srft4", "srft4"],
        ["delta4", "srft4"],
        ["delta8", "srft4"],
        ["polar4", "polar4"],
        ["polar4", "f16"],
        ["qjl1", "f16"],
        ["q8_0", "srft4"],
        ["f16", "srft4"],
    ];
    let mut shapes = Vec::new();
    for pair in pairs {
        for size in crate::rotation::HEAD_SIZES.into_iter().filter(|size| pair[0] != "q8_0" || size % 32 == 0) {
            for heads_per_kv in [1, 2, 3, 4, 5, 6, 7, 8, 12, 16] {
                shapes.extend([1, 8, 40].map(|kv_heads| (pair, [size, size], heads_per_kv, kv_heads)));
            }
        }
    }
    // DeepSeek's, where V is a view of K.
    shapes.extend(["srft4", "srft8", "polar4", "f16"].map(|k| ([k, k], [576, 512], 128, 1)));
    let tokens = [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 96, 112, 127, 128, 129, 200, 256, 511, 512, 1000, 2048];
    let threads = [1, 2, 3, 4, 6, 8, 12, 16, 31, 32, 64, 96, 127, 128, 200, 256];
    for (pair, [dk, dv], heads_per_kv, kv_heads) in stepped(shapes) {
        for (cells, tokens) in [64, 1024, 8192].into_iter().flat_map(|c| tokens.map(|t| (c, t))) {
            let heads = kv_heads * heads_per_kv;
            let (k, v) = (described(pair[0], dk, cells, kv_heads), described(pair[1], dk, cells, kv_heads));
            let mask = Tensor { nb: [2, 2 * cells, 0, 0], ..described("f16", cells, tokens, 1) };
            let op = AttentionOp {
                q: float_tensor(&[], [dk, tokens, heads, 1]),
                k,
                v: if dv < dk { beginning_of(&v, dv) } else { v },
                dst: float_tensor(&[], [dv, heads, tokens, 1]),
                mask: Some(&mask),
                sinks: None,
                recent: None,
                center: None,
                scale: 1.0,
                max_bias: 0.0,
                logit_softcap: 0.0,
            };
            let attention = Attention::new(&op).unwrap();
            for threads in threads {
                let size = attention.work_size(threads);
                assert!(
                    size <= threads * (4 << 20),
                    "{:.1} MiB for {pair:?}, {dk}/{dv}, {heads_per_kv} x {kv_heads} heads, {cells} cells, {tokens} tokens, \
                     {threads} threads",
                    size as f64 / (1 << 20) as f64
                );
            }
        }
    }
}

/// A thread that fails leaves NaN in all rows that it has a part in, and in no other.
#[test]
fn a_failure_shows_where_it_was() {
    let mut noise = Noise::new(41);
    for (cells, queries, threads) in [(640, 1, 3), (300, 7, 5), (64, 90, 4)] {
        let (k, v) = (cache("srft4", true, 64, cells, 2, &mut noise), cache("srft4", false, 64, cells, 2, &mut noise));
        let q = noise.row(64 * queries * 6);
        for phase in [Phase::Compute, Phase::Finish] {
            let (mut failed, mut shares) = (0, false);
            for bad in 0..threads {
                let dst = vec![7.0f32; 64 * 6 * queries];
                let op = plain_op(
                    [
                        float_tensor(&q, [64, queries, 6, 1]),
                        k.tensor(cells, k.unit()),
                        v.tensor(cells, v.unit()),
                        float_tensor(&dst, [64, 6, queries, 1]),
                    ],
                    0.125,
                );
                let attention = Attention::new(&op).unwrap();
                let mut work = vec![0u8; attention.work_size(threads)];
                let work = work.as_mut_ptr();
                for step in [Phase::Compute, Phase::Finish] {
                    for ith in 0..threads {
                        // SAFETY: the tensors above hold what they say.
                        unsafe {
                            match step {
                                _ if step == phase && ith == bad => attention.poison(step, ith, threads, Some(work)),
                                Phase::Compute => attention.compute(ith, threads, work),
                                Phase::Finish => attention.finish(ith, threads, work),
                            }
                        }
                    }
                }
                let split = attention.split(threads);
                shares |= split.shares_panels();
                let mut mine = vec![false; queries * 6];
                if phase == Phase::Finish {
                    attention.merged(&split, bad, threads, |_, _, head, token| mine[token * 6 + head] = true);
                } else {
                    for rows in split.pieces(bad).flat_map(|p| p.panel.tiles().collect::<Vec<_>>()) {
                        (0..rows.rows.len())
                            .map(|r| attention.place(&rows, r))
                            .for_each(|(h, t)| mine[t * 6 + h] = true);
                    }
                }
                for (row, &mine) in dst.chunks_exact(64).zip(&mine) {
                    assert!(row.iter().all(|x| if mine { x.is_nan() } else { x.is_finite() }), "{phase:?} {bad}");
                }
                failed += mine.iter().filter(|&&m| m).count();
            }
            // Every row is somebody's; who merges has rows of panels that are shared.
            assert_eq!(failed >= queries * 6, phase == Phase::Compute || shares, "{phase:?}: {failed}");
        }
    }
}
