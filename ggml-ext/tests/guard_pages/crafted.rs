//! Tensors that no program makes, as an RPC client may send them: whatever a description says, the op touches nothing outside of
//! the tensor that its operands are views of.
//!
//! Every operand is a view of a buffer between guard pages. Fields of the description are replaced by others, one or two
//! at a time; what tells where the buffer is stays true. The op may refuse or compute, and must not leave the buffer.

use super::memory::*;
use ggml_ext::attention::AttentionOp;
use ggml_ext::ffi;
use ggml_ext::random::Noise;
use ggml_ext::spec::Side;
use ggml_ext::table::Concrete;
use ggml_ext::tensor::Tensor;

/// The same tensor as a view of itself: then its memory is known, and what is changed can be seen to be wrong.
fn as_view(memory: &Guarded, t: Tensor) -> Tensor {
    memory.view(&t, 0, t.ne.map(|n| n as usize), t.nb)
}

/// Changes a field; true where the change must be refused, whatever else is so.
fn craft(t: &mut Tensor, row_bytes: usize, random: &mut Noise) -> bool {
    const COUNTS: [i64; 12] = [-1, 0, 1, 2, 3, 63, 64, 65, 130, 1 << 31, 1 << 62, i64::MAX];
    let strides = [
        0,
        1,
        4,
        row_bytes / 2,
        row_bytes - 1,
        row_bytes,
        row_bytes + 1,
        2 * row_bytes,
        64 * row_bytes,
        1 << 32,
        1 << 63,
        usize::MAX,
    ];
    let count = COUNTS[random.below(COUNTS.len())];
    let stride = strides[random.below(strides.len())];
    match random.below(12) {
        d @ 0..4 => t.ne[d] = count,
        d @ 4..8 => t.nb[d - 4] = stride,
        8 => {
            t.view.offset = stride;
            t.data = t.view.data.wrapping_add(stride);
        }
        9 => t.view.row_bytes = stride,
        10 => t.view.rows = count,
        _ => {
            t.data = t.data.wrapping_add(stride.max(1));
            return t.touched() != Some(0);
        }
    }
    false
}

/// Some crafted descriptions of each op.
pub fn all(c: Concrete, number: usize) {
    let mut random = Noise::new(number as u64);
    // Whole caches are copied: few cells, where there may be few.
    let (cells, heads, streams, size) = (if c.group_cells() > 1 { 70 } else { 5 }, 2, 2, c.head_size);
    let (width, row) = (heads * size, c.row_bytes());
    let cache = Cache::new(Rows::Ours(c), heads, cells, streams);
    let values = Guarded::of(&noise(1, 3 * width));
    let source = as_view(&values, values.tensor(F32, 4, 4 * width, [width, 3, 1, 1]));
    let indices = Guarded::of(&[0i32, cells as i32, (cells * streams) as i32 - 1]);
    let index = as_view(&indices, indices.tensor(I32, 4, 12, [3, 1, 1, 1]));
    let read = Guarded::new(4 * 3 * width);
    let result = as_view(&read, read.tensor(F32, 4, 4 * width, [width, 3, 1, 1]));
    let decoded = Guarded::of(&noise(2, width * cells * streams));
    let floats = as_view(&decoded, decoded.tensor(F32, 4, 4 * size, [size, heads, cells * streams, 1]));
    let asked = Guarded::of(&noise(3, size * 2 * heads * streams));
    let q = as_view(&asked, asked.tensor(F32, 4, 4 * size, [size, 2, heads, streams]));
    let scored = Guarded::new(4 * cells * 2 * heads * streams);
    let scores = as_view(&scored, scored.tensor(F32, 4, 4 * cells, [cells, 2, heads, streams]));
    let other = Cache::new(Rows::Ggml(F16, size), heads, cells, streams);
    let seen = Guarded::of(&vec![half::f16::ZERO; cells * 2 * streams]);
    let mask = as_view(&seen, seen.tensor(F16, 2, 2 * cells, [cells, 2, 1, streams]));
    let sunk = Guarded::of(&noise(4, heads));
    let sinks = as_view(&sunk, sunk.tensor(F32, 4, 4 * heads, [heads, 1, 1, 1]));
    let middle = Guarded::of(&noise(5, size * heads));
    let center = as_view(&middle, middle.tensor(F32, 4, 4 * size, [size, 1, heads, 1]));
    let lost = as_view(&middle, middle.tensor(F32, 4, 4 * size, [size, heads, 1, 1]));
    let answered = Guarded::new(4 * size * heads * 2 * streams);
    let answer = as_view(&answered, answered.tensor(F32, 4, 4 * size, [size, heads, 2, streams]));
    let ours = cache.attended(cells);
    let (k, v) = if c.family.serves(Side::K) { (ours, other.attended(cells)) } else { (other.attended(cells), ours) };
    let mut operands = [
        cache.merged(),
        cache.by_head(),
        source,
        index,
        result,
        floats,
        q,
        scores,
        k,
        v,
        mask,
        sinks,
        answer,
        center,
        lost,
    ];

    // First as they are, then with changes.
    for trial in 0..300 {
        let before = operands;
        let mut changed = Vec::new();
        for _ in 0..if trial == 0 { 0 } else { 1 + trial % 2 } {
            let at = random.below(operands.len());
            // Once each: a second change may take the first one back.
            if changed.iter().all(|&(before, _)| before != at) {
                changed.push((at, craft(&mut operands[at], row, &mut random)));
            }
        }
        let refused = |used: &[usize]| changed.iter().any(|(at, wrong)| *wrong && used.contains(at));
        let [merged, by_head, source, index, result, floats, q, scores, k, v, mask, sinks, answer, center, lost] =
            &operands;
        let op = AttentionOp {
            q: *q,
            k: *k,
            v: *v,
            dst: *answer,
            mask: Some(mask),
            sinks: Some(sinks),
            recent: None,
            center: Some(center),
            scale: 0.1,
            max_bias: 0.0,
            logit_softcap: 0.0,
        };
        // SAFETY: each operand says where its buffer is; all else is for the ops to find out.
        let outcomes = unsafe {
            let size = ffi::ggml_ext_attention_work_size(&op, 2);
            let work = Guarded::new(size.min(1 << 24));
            let attended = (0..2).map(|i| ffi::ggml_ext_attention_compute(&op, i, 2, work.data(), work.len())).min()
                == Some(true)
                && ffi::ggml_ext_attention_finish(&op, 0, 2, work.data(), work.len());
            [
                (ffi::ggml_ext_set_rows(merged, source, index, 4, 0, 1), &[0, 2, 3][..]),
                (ffi::ggml_ext_get_rows(result, merged, index, 0, 1), &[4, 0, 3]),
                (ffi::ggml_ext_copy(floats, by_head, 0, 1), &[5, 1]),
                (ffi::ggml_ext_copy(by_head, floats, 0, 1), &[1, 5]),
                (!c.family.serves(Side::K) || ffi::ggml_ext_mul_mat(k, q, scores, 0, 1), &[8, 6, 7]),
                (attended, &[6, 8, 9, 10, 11, 12, 13]),
                (ffi::ggml_ext_subtract(floats, lost, floats, 0, 1), &[5, 14]),
            ]
        };
        for (i, (done, used)) in outcomes.into_iter().enumerate() {
            assert!(done || trial > 0, "op {i} on {} is refused as it is", c.name());
            let (was, is) = (changed.iter().map(|c| before[c.0]).collect::<Vec<_>>(), &changed);
            assert!(
                !done || !refused(used) || (i == 4 && !c.family.serves(Side::K)),
                "op {i} on {}: {is:?} {was:?}",
                c.name()
            );
        }
        operands = before;
    }
}

/// Row numbers that are not there: nothing is written, and what is read instead is NaN.
pub fn rows_that_are_not_there(c: Concrete) {
    let (cells, size) = (70, c.head_size);
    let cache = Cache::new(Rows::Ours(c), 1, cells, 1);
    let values = Guarded::of(&noise(1, 3 * size));
    let source = values.tensor(F32, 4, 4 * size, [size, 3, 1, 1]);
    let read = Guarded::new(4 * 3 * size);
    let result = read.tensor(F32, 4, 4 * size, [size, 3, 1, 1]);
    let before = cache.memory.bytes().to_vec();
    for bad in [-1, -2, cells as i32, i32::MAX, i32::MIN] {
        let indices = Guarded::of(&[3, 5, bad]);
        let index = indices.tensor(I32, 4, 12, [3, 1, 1, 1]);
        for ith in 0..2 {
            // SAFETY: memory as described.
            unsafe {
                // -1 leaves a row out, where rows stand alone: see below.
                if bad != -1 || c.group_cells() > 1 {
                    assert!(!ffi::ggml_ext_set_rows(&cache.whole(), &source, &index, 4, ith, 2), "row {bad}");
                }
                assert!(!ffi::ggml_ext_get_rows(&result, &cache.whole(), &index, ith, 2), "row {bad}");
            }
        }
        assert_eq!(cache.memory.bytes(), before, "{}: row {bad}", c.name());
        assert!(read.floats().iter().all(|x| x.is_nan()), "{}: row {bad}", c.name());
    }
    if c.group_cells() > 1 {
        return;
    }
    let indices = Guarded::of(&[3, -1, 5]);
    let index = indices.tensor(I32, 4, 12, [3, 1, 1, 1]);
    let cache = Cache::empty(Rows::Ours(c), 1, cells, 1);
    let before = cache.memory.bytes().to_vec();
    // SAFETY: memory as described.
    assert!(unsafe { ffi::ggml_ext_set_rows(&cache.whole(), &source, &index, 4, 0, 1) }, "a row that is left out");
    let row = c.row_bytes();
    let changed = |cell: usize| cache.memory.bytes()[cell * row..][..row] != before[cell * row..][..row];
    assert_eq!((0..cells).filter(|&cell| changed(cell)).collect::<Vec<_>>(), [3, 5], "{}", c.name());
}
