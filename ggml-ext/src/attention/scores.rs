//! MUL_MAT with compressed keys: what llama.cpp does where flash attention is off.

use super::memory::{BlockShape, Cut};
use super::queries::QueryRows;
use super::side::{Cells, KvSide};
use crate::isa::{kernels, CELLS};
use crate::rows::refuse;
use crate::tensor::Tensor;

/// Query rows that are multiplied together.
const ROWS: usize = 16;

/// Can `k` of ours be multiplied by `q`? The message says why not.
pub fn check_mul_mat(k: &Tensor, q: &Tensor, dst: &Tensor) -> Result<KvSide, String> {
    let Some(c) = k.concrete() else { return Err(format!("MUL_MAT of type {}, which is not ours", k.kind)) };
    let side = KvSide::new(k, "K")?;
    let broadcasts = |d: usize| k.n(d) > 0 && q.n(d).is_multiple_of(k.n(d));
    if k.n(0) != c.head_size || q.n(0) != c.head_size || !q.is_float() || !broadcasts(2) || !broadcasts(3) {
        return Err(format!(
            "MUL_MAT of {:?} values of {} by {:?} of type {}: wanted rows of one head, and f32 or f16 for a multiple of heads",
            k.ne,
            c.name(),
            q.ne,
            q.kind
        ));
    }
    q.check("the second factor of MUL_MAT")?;
    dst.check_result("the result of MUL_MAT")?;
    if dst.n(0) != k.n(1) || (1..4).any(|d| dst.n(d) != q.n(d)) {
        return Err(format!("MUL_MAT of {:?} by {:?} values to {:?}: wanted a score of each", k.ne, q.ne, dst.ne));
    }
    Ok(side)
}

/// The share of a thread of dst[i, j] = k_row(i) . q_row(j).
///
/// # Safety
/// Memory is as described.
pub unsafe fn mul_mat(k: &Tensor, q: &Tensor, dst: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    if dst.is_empty() {
        return check_mul_mat(k, q, dst).map(drop);
    }
    let check = || {
        let side = check_mul_mat(k, q, dst)?;
        let tensors = [(k, "K"), (q, "the second factor of MUL_MAT"), (dst, "the result of MUL_MAT")];
        tensors.iter().try_for_each(|(t, name)| t.check_data(name)).map(|()| side)
    };
    let side = match check() {
        Ok(side) => side,
        // SAFETY: the caller's promise; all threads refuse, and one writes.
        Err(reason) => return Err(unsafe { refuse(dst, ith, reason) }),
    };
    let room = BlockShape { width: side.width, floats: false };
    let bytes = room.bytes() + QueryRows::bytes(&side, ROWS);
    let mut memory = vec![0u8; bytes + 64];
    // SAFETY: the memory is this call's alone and lives until its end.
    let (room, mut queries) = unsafe {
        let first = memory.as_mut_ptr();
        let mut cut = Cut::new(first.add(first.align_offset(64)), bytes);
        (room.take(&mut cut), QueryRows::new(&side, kernels(), ROWS, 1.0, &mut cut))
    };
    let mut scores = [0.0f32; ROWS * CELLS];
    let blocks = k.n(1).div_ceil(CELLS);
    let mine = blocks * ith / nth..blocks * (ith + 1) / nth;
    for i3 in 0..q.n(3) {
        for i2 in 0..q.n(2) {
            let (head, stream) = (i2 / (q.n(2) / k.n(2)), i3 / (q.n(3) / k.n(3)));
            for first_row in (0..q.n(1)).step_by(ROWS) {
                let rows = ROWS.min(q.n(1) - first_row);
                for r in 0..rows {
                    // SAFETY: a row of q; kernels run on the CPU they were chosen for.
                    unsafe { queries.set(r, q, [first_row + r, i2, i3]) };
                }
                for first in mine.clone().map(|b| b * CELLS) {
                    let n = CELLS.min(k.n(1) - first);
                    // SAFETY: n cells of K, buffers of CELLS cells and ROWS rows, n values of rows of dst.
                    unsafe {
                        let cells = Cells { first, n, next: first + n, head, stream };
                        queries.score(&side, cells, rows, false, &room, scores.as_mut_ptr());
                        for r in 0..rows {
                            let out = dst.row(first_row + r, i2, i3).cast::<f32>().add(first);
                            std::slice::from_raw_parts_mut(out, n).copy_from_slice(&scores[r * CELLS..][..n]);
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
