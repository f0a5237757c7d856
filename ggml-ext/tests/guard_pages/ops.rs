//! Every op on every type, with all of its memory between guard pages.

use super::memory::*;
use ggml_ext::attention::AttentionOp;
use ggml_ext::ffi;
use ggml_ext::spec::Side;
use ggml_ext::table::Concrete;
use ggml_ext::tensor::Tensor;
use std::ffi::c_int;

const HEADS: usize = 2;
const STREAMS: usize = 2;
/// Numbers of cells: one, ends of vectors, blocks and groups, and what is odd.
const CELLS: [usize; 6] = [67, 1, 64, 33, 130, 15];

fn succeeds(ok: bool, what: &str) {
    assert!(ok, "{what} was refused");
}

/// All that is done with one type; `number` varies what is not tried with all of them.
pub fn all(c: Concrete, number: usize) {
    rows_alone(c);
    rows_of_cache(c, number);
    copies(c, number);
    if c.family.serves(Side::K) {
        scores(c, number);
    }
    attentions(c, number);
    products(c.head_size, number);
    centers(c.head_size, number);
}

/// Products of calibrated keys and queries: few rows and many.
fn products(size: usize, number: usize) {
    for (i, tokens) in [1, 11].into_iter().enumerate() {
        let (heads, n) = (HEADS * (1 + i), tokens * HEADS * (1 + i));
        let (m, x, y) =
            (Guarded::new(2 * size * size * HEADS), Guarded::of(&noise(9, n * size)), Guarded::new(4 * n * size));
        let m_tensor = m.tensor(F16, 2, 2 * size, [size, size, HEADS, 1]);
        let [x_tensor, y_tensor] = [&x, &y].map(|t| t.tensor(F32, 4, 4 * size, [size, tokens, heads, 1]));
        let threads = 1 + number as c_int % 3;
        for ith in 0..threads {
            // SAFETY: memory as described.
            succeeds(unsafe { ffi::ggml_ext_multiply(&m_tensor, &x_tensor, &y_tensor, ith, threads) }, "a product");
        }
        assert!(y.floats().iter().all(|&y| y == 0.0), "matrices of zeros");
    }
}

/// Values without their centers, whose tokens lie apart.
fn centers(size: usize, number: usize) {
    let (tokens, step, threads) = (3, size * (HEADS + 1), 1 + number as c_int % 3);
    let x = Guarded::of(&noise(9, 2 * step + size * HEADS));
    let (center, y) = (Guarded::of(&noise(8, size * HEADS)), Guarded::new(4 * size * HEADS * tokens));
    let mut x_tensor = x.tensor(F32, 4, 4 * size, [size, HEADS, tokens, 1]);
    (x_tensor.nb[2], x_tensor.nb[3]) = (4 * step, 4 * step * tokens);
    let c_tensor = center.tensor(F32, 4, 4 * size, [size, HEADS, 1, 1]);
    let y_tensor = y.tensor(F32, 4, 4 * size, [size, HEADS, tokens, 1]);
    for ith in 0..threads {
        // SAFETY: memory as described.
        succeeds(unsafe { ffi::ggml_ext_subtract(&x_tensor, &c_tensor, &y_tensor, ith, threads) }, "a center");
    }
    assert!(y.floats().iter().all(|&y| y != 0.0), "a value is missing");
}

/// Encoding and decoding without a cache.
fn rows_alone(c: Concrete) {
    let (size, n) = (c.head_size, if c.group_cells() > 1 { 66 } else { 2 });
    let values = Guarded::of(&noise(5, n * size));
    let (rows, back) = (Guarded::new(n * c.row_bytes()), Guarded::new(4 * n * size));
    let count = (n * size) as i64;
    // SAFETY: n rows of values and of bytes each.
    unsafe {
        succeeds(ffi::ggml_ext_encode(c.id(), values.data().cast(), rows.data(), count), "encoding");
        succeeds(ffi::ggml_ext_decode(c.id(), rows.data(), back.data().cast(), count), "decoding");
        if c.group_cells() == 1 {
            succeeds(ffi::ggml_ext_decode_key(c.id(), rows.data(), back.data().cast(), count), "decoding of a key");
        }
    }
    assert!(back.floats().iter().all(|x| x.is_finite()));
}

/// SET_ROWS in any order, with the last cell of each stream among the rows, and GET_ROWS.
fn rows_of_cache(c: Concrete, number: usize) {
    let cells = CELLS[number % CELLS.len()];
    let cache = Cache::empty(Rows::Ours(c), HEADS, cells, STREAMS);
    let width = HEADS * c.head_size;
    // Slow codecs write few rows.
    let n = (cells * STREAMS).min(if c.group_cells() > 1 { 80 } else { 6 });
    let mut targets = shuffled(cells * STREAMS);
    let edge = |t: &usize| t % cells == cells - 1 || t.is_multiple_of(cells);
    targets.sort_by_key(|t| !edge(t));
    targets.truncate(n);
    let targets: Vec<usize> = shuffled(n).into_iter().map(|i| targets[i]).collect();

    let values = noise(number, n * width);
    let (source, kind, bytes) =
        if number.is_multiple_of(2) { (Guarded::of(&values), F32, 4) } else { (Guarded::of(&halves(&values)), F16, 2) };
    let source_tensor = source.tensor(kind, bytes, bytes * width, [width, n, 1, 1]);
    let narrow = Guarded::of(&targets.iter().map(|&t| t as i32).collect::<Vec<_>>());
    let wide = Guarded::of(&targets.iter().map(|&t| t as i64).collect::<Vec<_>>());
    let narrow = (&narrow, narrow.tensor(I32, 4, 4 * n, [n, 1, 1, 1]));
    let wide = (&wide, wide.tensor(I64, 8, 8 * n, [n, 1, 1, 1]));
    let threads = 1 + number as c_int % 3;
    for (index, index_bytes) in [(narrow.1, 4), (wide.1, 8)] {
        for ith in 0..threads {
            // SAFETY: memory as described.
            let ok =
                unsafe { ffi::ggml_ext_set_rows(&cache.merged(), &source_tensor, &index, index_bytes, ith, threads) };
            succeeds(ok, "SET_ROWS");
        }
    }
    let result = Guarded::new(4 * n * width);
    let result_tensor = result.tensor(F32, 4, 4 * width, [width, n, 1, 1]);
    for ith in 0..threads {
        // SAFETY: as above.
        let ok = unsafe { ffi::ggml_ext_get_rows(&result_tensor, &cache.merged(), &narrow.1, ith, threads) };
        succeeds(ok, "GET_ROWS");
    }
    let (mut error, mut energy) = (0.0f64, 0.0f64);
    for (got, want) in result.floats().iter().zip(&values) {
        error += f64::from(got - want).powi(2);
        energy += f64::from(*want).powi(2);
    }
    assert!(error < energy, "rows came back as something else");
    if c.group_cells() > 1 {
        recode(&cache);
    }
}

/// Cells decoded and written elsewhere, as a state is restored where no whole group is free.
fn recode(cache: &Cache) {
    let to = Cache::empty(cache.rows, HEADS, cache.cells, 1);
    let cells: Vec<u32> = shuffled(cache.cells).into_iter().map(|c| c as u32).collect();
    let (from, targets) = (Guarded::of(&cells), Guarded::of(&cells));
    let (id, n) = (cache.rows.kind(), cache.cells);
    let (from, targets) = (from.data().cast(), targets.data().cast());
    // SAFETY: cells of both caches.
    let ok = unsafe {
        ffi::ggml_ext_state_recode(id, HEADS as i32, cache.memory.data(), n, to.memory.data(), n, from, targets, n)
    };
    succeeds(ok, "recoding");
}

/// CPY, DUP and CONT: to floats and back as the K-shift does it, and as bytes.
fn copies(c: Concrete, number: usize) {
    let cells = if c.group_cells() > 1 { CELLS[number % CELLS.len()] } else { 2 + number % 2 };
    let cache = Cache::new(Rows::Ours(c), HEADS, cells, STREAMS);
    let other = Cache::empty(Rows::Ours(c), HEADS, cells, STREAMS);
    let n = HEADS * cells * STREAMS;
    let (kind, bytes) = if number.is_multiple_of(2) { (F16, 2) } else { (F32, 4) };
    let floats = Guarded::new(bytes * n * c.head_size);
    let float_tensor = floats.tensor(kind, bytes, bytes * c.head_size, [c.head_size, HEADS, cells * STREAMS, 1]);
    // The same values, a head over several rows.
    let pieces = floats.tensor(kind, bytes, bytes * 16, [16, n * c.head_size / 16, 1, 1]);
    let threads = 1 + number as c_int % 3;
    let copy = |dst: &Tensor, src: &Tensor, what: &str| {
        for ith in 0..threads {
            // SAFETY: memory as described.
            succeeds(unsafe { ffi::ggml_ext_copy(dst, src, ith, threads) }, what);
        }
    };
    copy(&float_tensor, &cache.by_head(), "a copy to floats");
    copy(&other.by_head(), &float_tensor, "a copy from floats");
    copy(&pieces, &cache.whole(), "a copy to pieces");
    copy(&other.whole(), &cache.whole(), "a copy of rows");
    assert_eq!(other.memory.bytes(), cache.memory.bytes());
}

/// MUL_MAT, which is attention's first half where flash attention is off.
fn scores(c: Concrete, number: usize) {
    let cells = CELLS[number % CELLS.len()];
    let cache = Cache::new(Rows::Ours(c), HEADS, cells, STREAMS);
    for (i, queries) in [1, 5, 17].into_iter().enumerate() {
        let heads = HEADS * (1 + i % 2);
        let n = queries * heads * STREAMS;
        let q = Guarded::of(&noise(8, n * c.head_size));
        let q = (&q, q.tensor(F32, 4, 4 * c.head_size, [c.head_size, queries, heads, STREAMS]));
        let seen = if i == 0 { cells } else { cells - cells / 3 };
        let out = Guarded::new(4 * n * seen);
        let out_tensor = out.tensor(F32, 4, 4 * seen, [seen, queries, heads, STREAMS]);
        let threads = 1 + (number + i) as c_int % 3;
        for ith in 0..threads {
            // SAFETY: memory as described.
            let ok = unsafe { ffi::ggml_ext_mul_mat(&cache.attended(seen), &q.1, &out_tensor, ith, threads) };
            succeeds(ok, "MUL_MAT");
        }
        assert!(out.floats().iter().all(|x| x.is_finite()));
    }
}

/// FLASH_ATTN_EXT, on both sides it serves, beside itself and ggml's types.
fn attentions(c: Concrete, number: usize) {
    let (own, size) = (Rows::Ours(c), c.head_size);
    let mut pairs = Vec::new();
    if c.family.serves(Side::V) {
        pairs.push((own, own));
    }
    let blocks = size % 32 == 0;
    for kind in [F16, FOREIGN, Q8_0, Q4_0] {
        if !blocks && matches!(kind, Q8_0 | Q4_0) {
            continue;
        }
        let other = Rows::Ggml(kind, size);
        pairs.extend(c.family.serves(Side::K).then_some((own, other)));
        pairs.extend(c.family.serves(Side::V).then_some((other, own)));
    }
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        let cells = CELLS[(number + i) % CELLS.len()];
        let (k, v) = (Cache::new(k, HEADS, cells, STREAMS), Cache::new(v, HEADS, cells, STREAMS));
        for (j, queries) in [1, 2, 7].into_iter().enumerate() {
            let vary = number + i + j;
            let seen = if j == 0 { cells } else { cells - cells / 3 };
            let what = Attended { queries, group: 1 + vary % 3, half_queries: vary.is_multiple_of(4), options: vary };
            attend(&k.attended(seen), &v.attended(seen), size, what, 1 + vary % 3);
        }
        if i == 0 {
            // Enough rows that threads share these instead of cells.
            let what = Attended { queries: 40, group: 2, half_queries: false, options: number };
            attend(&k.attended(cells), &v.attended(cells), size, what, 1 + number % 3);
        }
    }
    // MLA: V is the first values of K's rows.
    if size == 576 && c.family.serves(Side::V) {
        let k = Cache::new(own, 1, 67, 1);
        let v = Tensor { ne: [512, 67, 1, 1], ..k.attended(67) };
        attend(&k.attended(67), &v, 512, Attended { queries: 1, group: 16, half_queries: false, options: 1 }, 2);
    }
}

#[derive(Clone, Copy)]
pub struct Attended {
    pub queries: usize,
    /// Query heads of a KV head.
    pub group: usize,
    pub half_queries: bool,
    /// Bits: mask, sinks and center, softcap, ALiBi.
    pub options: usize,
}

/// One attention, thread by thread; the first query sees nothing where there is a mask.
pub fn attend(k: &Tensor, v: &Tensor, v_size: usize, what: Attended, threads: usize) {
    let (size, cells, kv_heads, streams) = (k.n(0), k.n(1), k.n(2), k.n(3));
    let Attended { queries, group, half_queries, options } = what;
    let heads = kv_heads * group;
    let values = noise(options, size * queries * heads * streams);
    let (q, kind, bytes) =
        if half_queries { (Guarded::of(&halves(&values)), F16, 2) } else { (Guarded::of(&values), F32, 4) };
    let hidden = |at: usize| at / cells == 0 || at % cells % 7 == 3;
    let mask: Vec<f32> =
        (0..cells * queries * streams).map(|at| if hidden(at) { f32::NEG_INFINITY } else { (at % 2) as f32 }).collect();
    let mask = Guarded::of(&halves(&mask));
    let mask = (&mask, mask.tensor(F16, 2, 2 * cells, [cells, queries, 1, streams]));
    let sinks = Guarded::of(&noise(1, heads));
    let sinks = (&sinks, sinks.tensor(F32, 4, 4 * heads, [heads, 1, 1, 1]));
    let center = Guarded::of(&noise(2, v_size * kv_heads));
    let center = (&center, center.tensor(F32, 4, 4 * v_size, [v_size, 1, kv_heads, 1]));
    let out = Guarded::of(&vec![f32::NAN; v_size * heads * queries * streams]);
    let op = AttentionOp {
        q: q.tensor(kind, bytes, bytes * size, [size, queries, heads, streams]),
        k: *k,
        v: *v,
        dst: out.tensor(F32, 4, 4 * v_size, [v_size, heads, queries, streams]),
        mask: (options & 1 != 0).then_some(&mask.1),
        sinks: (options & 2 != 0).then_some(&sinks.1),
        recent: None,
        center: (options & 2 != 0).then_some(&center.1),
        scale: 0.05,
        logit_softcap: if options & 4 != 0 { 5.0 } else { 0.0 },
        max_bias: if options & 8 != 0 { 8.0 } else { 0.0 },
    };
    let threads = threads as c_int;
    // SAFETY: memory as described, and the work memory that is asked for.
    unsafe {
        let work = Guarded::new(ffi::ggml_ext_attention_work_size(&op, threads));
        for step in [ffi::ggml_ext_attention_compute, ffi::ggml_ext_attention_finish] {
            for ith in 0..threads {
                succeeds(step(&op, ith, threads, work.data(), work.len()), "attention");
            }
        }
    }
    assert!(out.floats().iter().all(|x| x.is_finite()), "a result is missing");
}
