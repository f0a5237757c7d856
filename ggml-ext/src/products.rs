//! Keys and queries by the matrices of a calibration: MUL_MAT of f16 matrices and f32 rows.
//!
//! ggml's own MUL_MAT rounds the rows to f16 first, waits for all threads, and takes each value of the result as a sum of its own.
//! That is much of what calibrated keys cost while one token is decoded, when a matrix meets a few rows: here its rows are
//! shared out, each is read by one thread, and nobody waits. Many rows are shared out themselves, and multiplied sixty-four
//! columns at a time.

use crate::codec::plain::Plain;
use crate::isa::{self, Kernels, Matrix, MatrixMut, CELLS, MATRIX_ROWS};
use crate::rotation::MAX_HEAD;
use crate::rows::{refuse, share};
use crate::tensor::Tensor;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows of one matrix up to which they are few.
const FEW: usize = 8;

/// Rows that are multiplied together, of many.
const BLOCK: usize = 12;

/// Are there products of matrices of this size?
pub fn serves(size: usize) -> bool {
    size > 0 && size <= MAX_HEAD && size.is_multiple_of(MATRIX_ROWS)
}

/// Can `x` be multiplied by the matrices `m`? The message says why not.
pub fn check_product(m: &Tensor, x: &Tensor, dst: &Tensor) -> Result<(), String> {
    let is = |t: &Tensor, kind: Plain| t.plain() == Some(kind) && t.nb[0] == kind.row_bytes(1);
    let (size, heads) = (m.n(0), m.n(2));
    let fits = serves(size) && m.n(1) == size && m.n(3) == 1 && x.n(0) == size;
    if !is(m, Plain::F16) || !is(x, Plain::F32) || !fits || heads == 0 || !x.n(2).is_multiple_of(heads) {
        return Err(format!(
            "a product of {:?} values of type {} and {:?} of type {}: wanted a square f16 matrix of a multiple of {MATRIX_ROWS} up \
             to {MAX_HEAD} for each head, and f32 rows as long for a multiple of heads",
            m.ne, m.kind, x.ne, x.kind
        ));
    }
    m.check("the matrices of a product")?;
    x.check("the rows of a product")?;
    dst.check_result("the result of a product")?;
    if dst.ne != x.ne {
        return Err(format!("a product of {:?} values to {:?}", x.ne, dst.ne));
    }
    if !(x.data as usize).is_multiple_of(size_of::<f32>()) || (1..4).any(|d| !x.nb[d].is_multiple_of(size_of::<f32>()))
    {
        return Err(format!("the rows of a product have steps of {:?}: wanted whole values", x.nb));
    }
    Ok(())
}

/// Are the tensors of a product what they should be, and is their memory there?
fn check(m: &Tensor, x: &Tensor, dst: &Tensor) -> Result<(), String> {
    check_product(m, x, dst)?;
    let tensors = [(m, "the matrices of a product"), (x, "its rows"), (dst, "its result")];
    tensors.iter().try_for_each(|(t, name)| t.check_there(name))
}

/// The share of a thread of dst[.., i1, i2, i3] = m[.., .., i2 / (heads of x for each of m)] x[.., i1, i2, i3].
///
/// # Safety
/// Memory is as described.
pub unsafe fn multiply(m: &Tensor, x: &Tensor, dst: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    if dst.is_empty() {
        return check_product(m, x, dst);
    }
    if let Err(reason) = check(m, x, dst) {
        // SAFETY: the caller's promise; all threads refuse, and one writes.
        return Err(unsafe { refuse(dst, ith, reason) });
    }
    let product = Product { m, x, dst, size: m.n(0), kernels: isa::kernels() };
    let parts = product.size / MATRIX_ROWS;
    // SAFETY: the caller's promise; tensors are as checked, and shares of threads do not overlap.
    unsafe {
        if product.rows() == 1 && by_heads(m.n(2), nth) {
            let heads = share(m.n(2), ith, nth);
            product.few(heads.start * parts..heads.end * parts);
        } else if product.rows() <= FEW {
            product.few(share(m.n(2) * parts, ith, nth));
        } else {
            product.many(share(product.rows(), ith, nth));
        }
    }
    Ok(())
}

/// Does a thread take whole matrices where each meets one row? Then nobody has to wait before these rows are written to a cache. Not
/// where that leaves a thread with more than a third beyond its part.
fn by_heads(heads: usize, nth: usize) -> bool {
    3 * heads.div_ceil(nth) * nth <= 4 * heads
}

/// Does each of `nth` threads, which writes its heads of `rows` to `cache`, find them made by itself, as its share of `product`, which
/// is m x?
pub fn heads_stay([m, x, product]: [&Tensor; 3], [cache, rows]: [&Tensor; 2], nth: usize) -> bool {
    let (size, heads) = (m.n(0), m.n(2));
    let one_row = x.ne == [m.ne[0], 1, m.ne[2], 1] && rows.ne == [m.ne[0] * m.ne[2], 1, 1, 1];
    let same_heads = rows.data == product.data && product.nb[2] == size * size_of::<f32>();
    let same_type = rows.plain() == Some(Plain::F32) && cache.concrete().is_some_and(|c| c.head_size == size);
    check(m, x, product).is_ok() && one_row && same_heads && same_type && by_heads(heads, nth)
}

struct Product<'a> {
    m: &'a Tensor,
    x: &'a Tensor,
    dst: &'a Tensor,
    size: usize,
    kernels: &'static Kernels,
}

impl Product<'_> {
    /// Rows of one matrix.
    fn rows(&self) -> usize {
        self.x.n(1) * self.x.n(3) * self.heads()
    }

    /// Heads of one matrix.
    fn heads(&self) -> usize {
        self.x.n(2) / self.m.n(2)
    }

    /// Row `r` of a matrix: its dimensions 1, 2 and 3.
    fn row(&self, matrix: usize, r: usize) -> [usize; 3] {
        let (n1, heads) = (self.x.n(1), self.heads());
        [r % n1, matrix * heads + r / n1 % heads, r / n1 / heads]
    }

    /// Parts of MATRIX_ROWS rows of the matrices, which lie one after the other, with all rows of x.
    ///
    /// # Safety
    /// As [`multiply`]; at most FEW rows.
    unsafe fn few(&self, parts: Range<usize>) {
        let (size, rows) = (self.size, self.rows());
        let mut x = [MaybeUninit::<f32>::uninit(); FEW * MAX_HEAD];
        let mut out = [0.0f32; FEW * MATRIX_ROWS];
        let x = x.as_mut_ptr().cast::<f32>();
        let mut to = [std::ptr::null_mut::<f32>(); FEW]; // rows of the result
        let mut loaded = None;
        for part in parts {
            let (matrix, first) = (part / (size / MATRIX_ROWS), part % (size / MATRIX_ROWS) * MATRIX_ROWS);
            // SAFETY: MATRIX_ROWS rows of a matrix and all of x, which buffers have room for; kernels run on the CPU they were chosen for.
            unsafe {
                if loaded != Some(matrix) {
                    // Where rows are takes divisions: once for a matrix.
                    for (r, to) in to[..rows].iter_mut().enumerate() {
                        let [i1, i2, i3] = self.row(matrix, r);
                        std::ptr::copy_nonoverlapping(self.x.row(i1, i2, i3).cast(), x.add(r * size), size);
                        *to = self.dst.row(i1, i2, i3).cast();
                    }
                    loaded = Some(matrix);
                }
                let from = self.m.row(first, matrix, 0);
                (self.kernels.dot_halves)(from, self.m.nb[1], size, x, rows, out.as_mut_ptr());
                for (r, to) in to[..rows].iter().enumerate() {
                    std::ptr::copy_nonoverlapping(out.as_ptr().add(r * MATRIX_ROWS), to.add(first), MATRIX_ROWS);
                }
            }
        }
    }

    /// Rows of every matrix, by whole matrices.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn many(&self, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let size = self.size;
        let mut memory = Vec::<f32>::with_capacity(2 * CELLS * size);
        let wide = memory.as_mut_ptr();
        // SAFETY: the second half.
        let columns = unsafe { wide.add(CELLS * size) };
        for matrix in 0..self.m.n(2) {
            for first in (0..size).step_by(CELLS) {
                let n = CELLS.min(size - first);
                // SAFETY: n rows of the matrix; rows of the room behind them are zeros.
                unsafe {
                    std::ptr::write_bytes(wide.add(n * size), 0, (CELLS - n) * size);
                    let from = self.m.row(first, matrix, 0);
                    (self.kernels.widen)(Plain::F16, from, self.m.nb[1], n, size, wide, size);
                    (self.kernels.transpose)(wide, size, columns);
                }
                let mut r = rows.start;
                while r < rows.end {
                    let [i1, i2, i3] = self.row(matrix, r);
                    // Rows that lie in one dimension.
                    let count = (self.x.n(1) - i1).min(rows.end - r).min(BLOCK);
                    // SAFETY: `count` rows of x and dst from there on, n columns of them.
                    unsafe { self.block([i1, i2, i3], count, columns, first, n) };
                    r += count;
                }
            }
        }
    }

    /// n columns of a few rows of the result.
    ///
    /// # Safety
    /// As [`multiply`]; at most BLOCK rows from `at` on along dimension 1.
    unsafe fn block(&self, at: [usize; 3], count: usize, columns: *const f32, first: usize, n: usize) {
        let mut out = [0.0f32; BLOCK * CELLS];
        let step = self.x.nb[1] / size_of::<f32>();
        // SAFETY: the caller's promise.
        unsafe {
            let x = Matrix(self.x.row(at[0], at[1], at[2]).cast(), step);
            (self.kernels.gemm64)(x, Matrix(columns, CELLS), MatrixMut(out.as_mut_ptr(), CELLS), count, self.size);
            for (r, out) in out.chunks_exact(CELLS).take(count).enumerate() {
                let to = self.dst.row(at[0] + r, at[1], at[2]).cast::<f32>().add(first);
                std::ptr::copy_nonoverlapping(out.as_ptr(), to, n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Noise;
    use crate::rows::set_rows;
    use crate::table::{by_name, Entry};
    use crate::tensor::I64;
    use half::f16;

    fn tensor<T>(kind: Plain, ne: [usize; 4], data: &mut [T]) -> Tensor {
        let unit = size_of::<T>();
        let nb = [unit, unit * ne[0], unit * ne[0] * ne[1], unit * ne[0] * ne[1] * ne[2]];
        Tensor {
            kind: if kind == Plain::F16 { 1 } else { 0 },
            ne: ne.map(|n| n as i64),
            nb,
            data: data.as_mut_ptr().cast(),
            to_float: None,
            view: Default::default(),
        }
    }

    /// Against f64, few rows and many, as llama.cpp lays them out while it decodes and while it reads a prompt.
    #[test]
    fn products_are_those_of_f64() {
        for size in [16, 64, 80, 128, 576] {
            for (heads, queries, tokens) in
                [(1, 1, 1), (3, 3, 1), (2, 1, 3), (2, 4, 2), (3, 3, 4), (2, 2, 37), (1, 7, 70)]
            {
                for permuted in [false, true] {
                    let halves: Vec<f32> = (0..size * heads).flat_map(|i| Noise::new(i as u64).row(size)).collect();
                    let mut m: Vec<f16> = halves.iter().map(|&x| f16::from_f32(x)).collect();
                    let n = heads * queries * tokens;
                    let mut x: Vec<f32> = (0..n).flat_map(|i| Noise::new(1000 + i as u64).row(size)).collect();
                    let mut y = vec![f32::NAN; n * size];
                    let mt = tensor(Plain::F16, [size, size, heads, 1], &mut m);
                    // [size, queries, heads, tokens], or the same rows seen as [size, tokens, heads * queries].
                    let (mut xt, mut yt) = (
                        tensor(Plain::F32, [size, queries, heads, tokens], &mut x),
                        tensor(Plain::F32, [size, queries, heads, tokens], &mut y),
                    );
                    if permuted {
                        let row = 4 * size;
                        (xt.ne, xt.nb) = (
                            [size as i64, tokens as i64, (heads * queries) as i64, 1],
                            [4, row * heads * queries, row, row * n],
                        );
                        yt = tensor(Plain::F32, [size, tokens, heads * queries, 1], &mut y);
                    }
                    for nth in [1, 3] {
                        y.fill(f32::NAN);
                        for ith in 0..nth {
                            // SAFETY: memory is as described.
                            unsafe { multiply(&mt, &xt, &yt, ith, nth) }.unwrap();
                        }
                        for (i3, i2, i1) in (0..xt.n(3))
                            .flat_map(|a| (0..xt.n(2)).flat_map(move |b| (0..xt.n(1)).map(move |c| (a, b, c))))
                        {
                            let matrix = i2 / (xt.n(2) / heads);
                            // SAFETY: rows of the tensors.
                            let (x, y) = unsafe {
                                let row =
                                    |t: &Tensor| std::slice::from_raw_parts(t.row(i1, i2, i3).cast::<f32>(), size);
                                (row(&xt), row(&yt))
                            };
                            for (o, &y) in y.iter().enumerate() {
                                let m = &m[(matrix * size + o) * size..][..size];
                                let terms = || m.iter().zip(x).map(|(m, &x)| f64::from(m.to_f32()) * f64::from(x));
                                let (want, sum) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                                let error = (f64::from(y) - want).abs();
                                assert!(error <= 1e-6 * sum, "{size} {heads} {queries} {tokens}: {y}, not {want}");
                            }
                        }
                    }
                }
            }
        }
    }

    /// A thread alone, with nothing from any other, writes the heads that all of them would.
    #[test]
    fn heads_that_stay_are_written_by_the_thread_that_made_them() {
        let size = 64;
        let mut stayed = 0;
        for (name, heads, nth) in
            ["srft4_64", "srft8_64", "delta4_64"].into_iter().flat_map(|n| [(n, 3, 2), (n, 8, 8), (n, 3, 5), (n, 1, 2)])
        {
            let Some(Entry::Concrete(c)) = by_name(name) else { panic!("{name}") };
            let mut m: Vec<f16> = Noise::new(1).row(size * size * heads).into_iter().map(f16::from_f32).collect();
            let mut x = Noise::new(2).row(size * heads);
            let (mut y, mut rows) = (vec![0.0f32; size * heads], vec![0i64]);
            let m = tensor(Plain::F16, [size, size, heads, 1], &mut m);
            let x = tensor(Plain::F32, [size, 1, heads, 1], &mut x);
            let index = Tensor { kind: I64, ..tensor(Plain::F32, [1, 1, 1, 1], &mut rows) };
            let mut write = |threads: &[usize], nth: usize| {
                let (bytes, cells) = (c.row_bytes(), 64);
                let mut cache = vec![0u8; cells * heads * bytes];
                let ne = [(size * heads) as i64, cells as i64, 1, 1];
                let nb = [bytes, bytes * heads, bytes * heads * cells, bytes * heads * cells];
                let cache_of = Tensor { kind: c.id(), ne, nb, ..tensor(Plain::F32, [1; 4], &mut cache) };
                // What others would have made: to be left alone.
                y.fill(7.0);
                let product = tensor(Plain::F32, [size, 1, heads, 1], &mut y);
                let keys = tensor(Plain::F32, [size * heads, 1, 1, 1], &mut y);
                for &ith in threads {
                    // SAFETY: memory is as described.
                    unsafe {
                        multiply(&m, &x, &product, ith, nth).unwrap();
                        set_rows(&cache_of, &keys, &index, 8, ith, nth).unwrap();
                    }
                }
                (cache, heads_stay([&m, &x, &product], [&cache_of, &keys], nth))
            };
            let (want, _) = write(&[0], 1);
            let mut cache = vec![0u8; want.len()];
            let mut stay = true;
            for ith in 0..nth {
                let (own, stays) = write(&[ith], nth);
                stay &= stays;
                // What it did not write is zero.
                cache.iter_mut().zip(own).for_each(|(all, own)| *all |= own);
            }
            assert_eq!(stay, (heads, nth) != (3, 5) && (heads, nth) != (1, 2), "{name} {heads} heads, {nth} threads");
            if stay {
                assert!(cache == want, "{name} {heads} heads, {nth} threads");
                stayed += 1;
            }
        }
        assert_eq!(stayed, 6);
    }

    #[test]
    fn heads_of_other_rows_do_not_stay() {
        let (size, heads) = (64, 4);
        let mut m = vec![f16::ONE; size * size * heads];
        let (mut x, mut y, cache) = (vec![1.0f32; size * heads], vec![0.0f32; 2 * size * heads], vec![0u8; 1 << 16]);
        let m = tensor(Plain::F16, [size, size, heads, 1], &mut m);
        let x = tensor(Plain::F32, [size, 1, heads, 1], &mut x);
        let product = tensor(Plain::F32, [size, 1, heads, 1], &mut y);
        let rows = tensor(Plain::F32, [size * heads, 1, 1, 1], &mut y);
        let cache = |name: &str| {
            let Some(Entry::Concrete(c)) = by_name(name) else { panic!("{name}") };
            Tensor { kind: c.id(), ..tensor(Plain::F32, [1; 4], &mut cache.clone()) }
        };
        let stay = |m: &Tensor, x: &Tensor, product: &Tensor, cache: &Tensor, rows: &Tensor| {
            heads_stay([m, x, product], [cache, rows], 2)
        };
        let srft4 = cache("srft4_64");
        assert!(stay(&m, &x, &product, &srft4, &rows));
        assert!(!stay(&m, &x, &product, &cache("srft4_128"), &rows), "other heads");
        assert!(!stay(&m, &x, &product, &srft4, &Tensor { data: y[size..].as_mut_ptr().cast(), ..rows }), "other rows");
        assert!(!stay(&m, &x, &product, &srft4, &Tensor { kind: 1, ..rows }), "f16");
        assert!(!stay(&m, &x, &product, &srft4, &Tensor { ne: [128, 2, 1, 1], ..rows }), "two rows");
        let spread = Tensor { nb: [4, 4 * size, 8 * size, 8 * size * heads], ..product };
        assert!(!stay(&m, &x, &spread, &srft4, &rows), "heads that lie apart");
        assert!(!stay(&Tensor { data: std::ptr::null_mut(), ..m }, &x, &product, &srft4, &rows), "no matrices");
        assert!(!stay(&Tensor { ne: [64, 32, 4, 1], ..m }, &x, &product, &srft4, &rows), "a product that is refused");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (mut m, mut x, mut y) = (vec![f16::ZERO; 64 * 64 * 2], vec![0.0f32; 64 * 6], vec![0.0f32; 64 * 6]);
        let good = || {
            (
                tensor(Plain::F16, [64, 64, 2, 1], &mut m.clone()),
                tensor(Plain::F32, [64, 3, 2, 1], &mut x.clone()),
                tensor(Plain::F32, [64, 3, 2, 1], &mut y.clone()),
            )
        };
        let (mt, xt, yt) = good();
        assert_eq!(check_product(&mt, &xt, &yt), Ok(()));
        type Change = fn(&mut Tensor, &mut Tensor, &mut Tensor);
        let changes: [Change; 7] = [
            |m, _, _| m.kind = 0,
            |m, _, _| m.ne[1] = 32,
            |m, _, _| m.ne[2] = 4,
            |_, x, _| x.nb[0] = 8,
            |_, x, _| x.nb[1] = 258,
            |_, x, y| (x.ne[2], y.ne[2]) = (3, 3),
            |_, _, y| y.ne[1] = 2,
        ];
        for (i, change) in changes.iter().enumerate() {
            let (mut mt, mut xt, mut yt) = good();
            change(&mut mt, &mut xt, &mut yt);
            assert!(check_product(&mt, &xt, &yt).is_err(), "change {i}");
        }
        let bad = tensor(Plain::F32, [64, 3, 1, 1], &mut x);
        let (mt, yt) = (tensor(Plain::F16, [64, 64, 2, 1], &mut m), tensor(Plain::F32, [64, 3, 2, 1], &mut y));
        // SAFETY: memory is as described.
        assert!(unsafe { multiply(&mt, &bad, &yt, 0, 1) }.is_err());
        assert!(y.iter().all(|y| y.is_nan()), "a refused result is NaN");
    }
}
