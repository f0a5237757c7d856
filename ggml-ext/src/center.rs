//! Values without the center of their head, as a calibrated cache stores them: SUB of f32 rows and a row for each head.
//!
//! ggml has the same op, behind which all threads wait. Here a thread takes the heads that it writes to the cache next.

use crate::codec::plain::Plain;
use crate::rotation::MAX_HEAD;
use crate::rows::{refuse, share};
use crate::tensor::Tensor;

/// Can `center` be taken off `x`, [head size, heads, tokens]? The message says why not.
pub fn check_center(x: &Tensor, center: &Tensor, dst: &Tensor) -> Result<(), String> {
    let floats = |t: &Tensor| t.plain() == Some(Plain::F32) && t.nb[0] == size_of::<f32>();
    let fits = (1..=MAX_HEAD).contains(&x.n(0)) && x.n(3) == 1 && center.ne == [x.ne[0], x.ne[1], 1, 1];
    if !floats(x) || !floats(center) || !fits {
        return Err(format!(
            "the center {:?} of type {} for {:?} values of type {}: wanted f32, and one of up to {MAX_HEAD} values for each head",
            center.ne, center.kind, x.ne, x.kind
        ));
    }
    x.check("values")?;
    center.check("the center of values")?;
    dst.check_result("values without their center")?;
    if dst.ne != x.ne {
        return Err(format!("{:?} values without their center to {:?}", x.ne, dst.ne));
    }
    Ok(())
}

fn check(x: &Tensor, center: &Tensor, dst: &Tensor) -> Result<(), String> {
    check_center(x, center, dst)?;
    let tensors = [(x, "values"), (center, "their center"), (dst, "what is left")];
    tensors.iter().try_for_each(|(t, name)| t.check_there(name))
}

/// The share of a thread of dst = x - center.
///
/// # Safety
/// Memory is as described.
pub unsafe fn subtract(x: &Tensor, center: &Tensor, dst: &Tensor, ith: usize, nth: usize) -> Result<(), String> {
    if dst.is_empty() {
        return check_center(x, center, dst);
    }
    if let Err(reason) = check(x, center, dst) {
        // SAFETY: the caller's promise; all threads refuse, and one writes.
        return Err(unsafe { refuse(dst, ith, reason) });
    }
    let (size, heads) = (x.n(0), x.n(1));
    for unit in share(heads * x.n(2), ith, nth) {
        let (head, token) = (unit % heads, unit / heads);
        // SAFETY: a row of each; what is written may be where x is, row by row.
        unsafe {
            let (from, by) = (x.row(head, token, 0).cast::<f32>(), center.row(head, 0, 0).cast::<f32>());
            let to = dst.row(head, token, 0).cast::<f32>();
            for i in 0..size {
                to.add(i).write_unaligned(from.add(i).read_unaligned() - by.add(i).read_unaligned());
            }
        }
    }
    Ok(())
}

/// Does each thread, which writes its share of `rows` to `cache`, find them made by itself, as its share of [`subtract`]?
pub fn rows_stay([x, center, dst]: [&Tensor; 3], [cache, rows]: [&Tensor; 2]) -> bool {
    let floats = rows.plain() == Some(Plain::F32) && rows.nb[0] == size_of::<f32>();
    let whole = dst.n(0) * dst.n(1) * size_of::<f32>();
    let same_rows = rows.ne == [dst.ne[0] * dst.ne[1], dst.ne[2], 1, 1] && rows.nb[1] == whole && dst.nb[2] == whole;
    let alone = cache.concrete().is_some_and(|c| c.head_size == dst.n(0) && c.group_cells() == 1);
    floats && same_rows && alone && rows.data == dst.data && check(x, center, dst).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Noise;
    use crate::rows::set_rows;
    use crate::table::{by_name, Entry};
    use crate::tensor::I64;

    fn floats(ne: [usize; 3], data: &mut [f32]) -> Tensor {
        let nb = [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]];
        let ne = [ne[0] as i64, ne[1] as i64, ne[2] as i64, 1];
        Tensor { kind: 0, ne, nb, data: data.as_mut_ptr().cast(), to_float: None, view: Default::default() }
    }

    #[test]
    fn each_head_loses_its_center() {
        for (size, heads, tokens, gap) in [(64, 3, 1, 0), (80, 2, 5, 0), (128, 8, 3, 40)] {
            let step = size * heads + gap;
            let (mut x, mut c) = (Noise::new(1).row(step * tokens), Noise::new(2).row(size * heads));
            let mut y = vec![f32::NAN; size * heads * tokens];
            // Tokens may lie apart, as part of rows that queries and keys share.
            let mut xt = floats([size, heads, tokens], &mut x);
            (xt.nb[2], xt.nb[3]) = (4 * step, 4 * step * tokens);
            let (ct, yt) = (floats([size, heads, 1], &mut c), floats([size, heads, tokens], &mut y));
            for nth in [1, 2, 5] {
                y.fill(f32::NAN);
                for ith in 0..nth {
                    // SAFETY: memory is as described.
                    unsafe { subtract(&xt, &ct, &yt, ith, nth) }.unwrap();
                }
                for (i, &y) in y.iter().enumerate() {
                    let (token, at) = (i / (size * heads), i % (size * heads));
                    assert_eq!(y, x[token * step + at] - c[at], "{size} {heads} {tokens}");
                }
            }
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let (mut x, mut c, mut y) = (vec![1.0; 256], vec![1.0; 128], vec![1.0; 256]);
        let (xt, ct, yt) = (floats([64, 2, 2], &mut x), floats([64, 2, 1], &mut c), floats([64, 2, 2], &mut y));
        assert!(check_center(&xt, &ct, &yt).is_ok());
        assert!(check_center(&xt, &floats([64, 1, 1], &mut c), &yt).is_err());
        assert!(check_center(&xt, &Tensor { kind: 1, ..floats([64, 2, 1], &mut c) }, &yt).is_err());
        assert!(check_center(&xt, &ct, &floats([64, 2, 1], &mut y)).is_err());
        // SAFETY: nothing is touched but what is described.
        let refused = unsafe { subtract(&xt, &Tensor { data: std::ptr::null_mut(), ..ct }, &yt, 0, 1) };
        assert!(refused.is_err() && y.iter().all(|y| y.is_nan()), "a failure shows");
    }

    /// A thread alone, with nothing from any other, writes the heads that all of them would.
    #[test]
    fn rows_that_stay_are_written_by_the_thread_that_made_them() {
        let size = 64;
        for (name, heads, tokens, nth) in
            ["srft4_64", "srft8_64", "delta4_64"].into_iter().flat_map(|n| [(n, 3, 1, 2), (n, 3, 7, 4), (n, 1, 2, 5)])
        {
            let Some(Entry::Concrete(c)) = by_name(name) else { panic!("{name}") };
            let mut x = Noise::new(1).row(size * heads * tokens);
            let mut center = Noise::new(2).row(size * heads);
            let mut y = vec![0.0f32; x.len()];
            let mut index: Vec<i64> = (0..tokens as i64).collect();
            let (x, center) = (floats([size, heads, tokens], &mut x), floats([size, heads, 1], &mut center));
            let rows_of =
                Tensor { kind: I64, nb: [8; 4], data: index.as_mut_ptr().cast(), ..floats([tokens, 1, 1], &mut []) };
            let mut write = |threads: &[usize], nth: usize| {
                let (bytes, cells) = (c.row_bytes(), 64);
                let mut cache = vec![0u8; cells * heads * bytes];
                let ne = [(size * heads) as i64, cells as i64, 1, 1];
                let nb = [bytes, bytes * heads, bytes * heads * cells, bytes * heads * cells];
                let to = Tensor { kind: c.id(), ne, nb, data: cache.as_mut_ptr(), ..floats([1; 3], &mut []) };
                // What others would have made: to be left alone.
                y.fill(7.0);
                let made = floats([size, heads, tokens], &mut y);
                let rows = floats([size * heads, tokens, 1], &mut y);
                for &ith in threads {
                    // SAFETY: memory is as described.
                    unsafe {
                        subtract(&x, &center, &made, ith, nth).unwrap();
                        set_rows(&to, &rows, &rows_of, 8, ith, nth).unwrap();
                    }
                }
                (cache, rows_stay([&x, &center, &made], [&to, &rows]))
            };
            let (want, _) = write(&[0], 1);
            let mut all = vec![0u8; want.len()];
            let mut stays = true;
            for ith in 0..nth {
                let (cache, stay) = write(&[ith], nth);
                stays &= stay;
                all.iter_mut().zip(cache).for_each(|(a, b)| *a |= b);
            }
            assert_eq!(stays, c.group_cells() == 1, "{name}");
            assert!(!stays || all == want, "{name} {heads} {tokens} {nth}");
        }
    }
}
