//! Attention over [`Cache`]s, for engines that are not llama.cpp.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::attention::{self, AttentionOp};
use crate::cache::{dense, describe, Cache};
use crate::error::Error;
use half::f16;

/// What attention means beyond softmax(q k) v. `Default` is the plain one.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct AttendOptions<'a> {
    /// Multiplies the scores; one over the root of the head size where None.
    pub scale: Option<f32>,
    /// Added to the scores: for each query a value per cell, minus infinity to hide it. Held in 16 bits.
    pub mask: Option<&'a [f32]>,
    /// Scores become cap * tanh(score / cap); 0 for none.
    pub softcap: f32,
    /// The largest slope of ALiBi, with which the mask is multiplied head by head; 0 for none.
    pub max_bias: f32,
    /// A score per query head that takes part in the softmax and has no value.
    pub sinks: Option<&'a [f32]>,
    /// Threads to work on; 0 counts as 1.
    pub threads: usize,
}

/// softmax(q k) v over the first `cells` cells, without decompressing them.
///
/// `queries` holds token after token, each `query_heads` heads of K's head size; so does the result, with V's head size.
/// Query heads are a multiple of the caches' heads, and neighbours share one.
///
/// ```
/// use ggml_ext::{attend, AttendOptions, Cache};
///
/// let (head_size, kv_heads, query_heads, cells) = (64, 2, 4, 100);
/// let mut k = Cache::new("srft4".parse()?, head_size, kv_heads, cells)?;
/// let mut v = Cache::new("srft3".parse()?, head_size, kv_heads, cells)?;
/// let rows: Vec<f32> = (0..cells * kv_heads * head_size).map(|i| (i as f32 * 0.7).sin()).collect();
/// k.write(0, &rows)?;
/// v.write(0, &rows)?;
///
/// // Two tokens; the first does not see the last cell.
/// let queries = vec![0.1; 2 * query_heads * head_size];
/// let mut mask = vec![0.0; 2 * cells];
/// mask[cells - 1] = f32::NEG_INFINITY;
/// let mut options = AttendOptions::default();
/// options.mask = Some(&mask);
/// options.threads = 2;
/// let out = attend(&queries, query_heads, &k, &v, cells, &options)?;
/// assert_eq!(out.len(), 2 * query_heads * head_size);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # Errors
/// Where slices and caches do not fit each other.
pub fn attend(
    queries: &[f32],
    query_heads: usize,
    k: &Cache,
    v: &Cache,
    cells: usize,
    options: &AttendOptions,
) -> Result<Vec<f32>, Error> {
    let want = |ok: bool, what: &dyn Fn() -> String| if ok { Ok(()) } else { Err(Error::new(what())) };
    k.check_cells(0, cells)?;
    v.check_cells(0, cells)?;
    want(k.heads() == v.heads(), &|| format!("K has {} heads, V has {}", k.heads(), v.heads()))?;
    want(query_heads > 0 && query_heads.is_multiple_of(k.heads()), &|| {
        format!("{query_heads} query heads are no multiple of {} KV heads", k.heads())
    })?;
    let token = query_heads * k.head_size();
    let n = queries.len() / token;
    want(queries.len() == n * token, &|| format!("{} query values are no whole tokens of {token}", queries.len()))?;
    if let Some(mask) = options.mask {
        want(mask.len() == n * cells, &|| {
            format!("a mask of {} values for {n} queries and {cells} cells", mask.len())
        })?;
    }
    if let Some(sinks) = options.sinks {
        want(sinks.len() == query_heads, &|| format!("{} sinks for {query_heads} query heads", sinks.len()))?;
    }
    let mut out = vec![0.0f32; n * query_heads * v.head_size()];
    if out.is_empty() || cells == 0 {
        return Ok(out);
    }

    let halves: Option<Vec<f16>> = options.mask.map(|m| m.iter().map(|&x| f16::from_f32(x)).collect());
    let mask = halves.as_ref().map(|m| dense(1, 2, m.as_ptr().cast(), [cells, n, 1]));
    let sinks = options.sinks.map(|s| dense(0, 4, s.as_ptr().cast(), [query_heads, 1, 1]));
    let head = 4 * k.head_size();
    let op = AttentionOp {
        // Tokens first, then heads, over memory where a token's heads lie together.
        q: describe(0, [k.head_size(), n, query_heads], [4, 4 * token, head], queries.as_ptr().cast()),
        k: k.attention_tensor(cells),
        v: v.attention_tensor(cells),
        dst: dense(0, 4, out.as_mut_ptr().cast(), [v.head_size(), query_heads, n]),
        mask: mask.as_ref(),
        sinks: sinks.as_ref(),
        recent: None,
        center: None,
        scale: options.scale.unwrap_or(1.0 / (k.head_size() as f32).sqrt()),
        max_bias: options.max_bias,
        logit_softcap: options.softcap,
    };
    // SAFETY: the tensors describe the slices above and the bytes of the caches, and this function alone has the result.
    unsafe { attention::run(&op, options.threads) }.map_err(Error::new)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_type::KvType;
    use crate::random::Noise;

    /// The vectors whose products with queries are the scores, which for some types are not what a cell decodes to.
    fn key(k: &Cache, cell: usize) -> Vec<f32> {
        let mut values = k.read(cell).unwrap();
        let bytes = k.as_bytes().len() / k.cells();
        let rows = &k.as_bytes()[cell * bytes..][..bytes];
        if k.kind().is_ours() && k.kind().group_cells(k.head_size()) == 1 {
            crate::rows::decode_key(k.kind().id(), rows, &mut values).unwrap();
        }
        values
    }

    /// The same in f64 on decoded rows, with plain loops.
    fn naive(q: &[f32], heads: usize, k: &Cache, v: &Cache, cells: usize, o: &AttendOptions) -> Vec<f64> {
        let (dk, dv, heads_per_kv) = (k.head_size(), v.head_size(), heads / k.heads());
        let n = q.len() / heads / dk;
        let keys: Vec<Vec<f32>> = (0..cells).map(|c| key(k, c)).collect();
        let values: Vec<Vec<f32>> = (0..cells).map(|c| v.read(c).unwrap()).collect();
        let mut out = vec![0.0; n * heads * dv];
        for t in 0..n {
            for h in 0..heads {
                let query = &q[(t * heads + h) * dk..][..dk];
                let kv = h / heads_per_kv;
                let mut weights = Vec::new();
                for c in 0..cells {
                    let dot: f64 = (0..dk).map(|i| f64::from(query[i]) * f64::from(keys[c][kv * dk + i])).sum();
                    let mut s = dot * o.scale.map_or(1.0 / (dk as f64).sqrt(), f64::from);
                    if o.softcap > 0.0 {
                        s = f64::from(o.softcap) * (s / f64::from(o.softcap)).tanh();
                    }
                    weights.push((s + o.mask.map_or(0.0, |m| f64::from(m[t * cells + c]))).exp());
                }
                let sum = weights.iter().sum::<f64>() + o.sinks.map_or(0.0, |s| f64::from(s[h]).exp());
                for i in 0..dv {
                    let x: f64 = (0..cells).map(|c| weights[c] * f64::from(values[c][kv * dv + i])).sum();
                    out[(t * heads + h) * dv + i] = if sum > 0.0 { x / sum } else { 0.0 };
                }
            }
        }
        out
    }

    fn filled(kind: KvType, size: usize, heads: usize, cells: usize, seed: u64) -> Cache {
        let mut cache = Cache::new(kind, size, heads, cells).unwrap();
        cache.write(0, &Noise::new(seed).row(cells * heads * size)).unwrap();
        cache
    }

    #[test]
    fn agrees_with_plain_loops_for_every_pair() {
        let ours = |t: &KvType| t.is_ours() || *t == KvType::F16;
        for kk in KvType::all().filter(|t| ours(t) && t.serves_k()) {
            for vk in KvType::all().filter(|t| ours(t) && t.serves_v()) {
                let (heads, cells) = (4, 130);
                let (k, v) = (filled(kk, 64, 2, cells + 10, 1), filled(vk, 128, 2, cells + 10, 2));
                let q = Noise::new(5).row(3 * heads * 64);
                let mask: Vec<f32> = (0..3 * cells)
                    .map(|i| if i % 7 == 2 { f32::NEG_INFINITY } else { (i % 3) as f32 * -0.5 })
                    .collect();
                let sinks = [0.5, -1.0, 0.0, 2.0];
                for threads in [1, 3] {
                    let o = AttendOptions {
                        mask: Some(&mask),
                        sinks: Some(&sinks),
                        softcap: 20.0,
                        threads,
                        ..AttendOptions::default()
                    };
                    let got = attend(&q, heads, &k, &v, cells, &o).unwrap();
                    let want = naive(&q, heads, &k, &v, cells, &o);
                    let norm = want.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let e = got.iter().zip(&want).map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum::<f64>().sqrt();
                    // 8-bit queries and 16-bit weights while decoding.
                    assert!(e < 0.02 * norm, "{kk}/{vk}, {threads} threads: {}", e / norm);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let (k, v) = (filled("srft4".parse().unwrap(), 64, 2, 8, 1), filled(KvType::F16, 64, 2, 8, 2));
        let plain = AttendOptions::default();
        let q = vec![0.0; 4 * 64];
        assert!(attend(&q, 4, &k, &v, 8, &plain).is_ok());
        assert!(attend(&q, 4, &k, &v, 9, &plain).is_err());
        assert!(attend(&q, 3, &k, &v, 8, &plain).is_err());
        assert!(attend(&q, 0, &k, &v, 8, &plain).is_err());
        assert!(attend(&q[1..], 4, &k, &v, 8, &plain).is_err());
        let mask = [0.0; 7];
        assert!(attend(&q, 4, &k, &v, 8, &AttendOptions { mask: Some(&mask), ..plain }).is_err());
        assert!(attend(&q, 4, &k, &v, 8, &AttendOptions { sinks: Some(&mask), ..plain }).is_err());
        let one_head = filled(KvType::F16, 64, 1, 8, 2);
        assert!(attend(&q, 4, &k, &one_head, 8, &plain).is_err());
        assert_eq!(attend(&[], 4, &k, &v, 8, &plain).unwrap(), []);
        assert!(attend(&q, 4, &k, &v, 0, &plain).unwrap().iter().all(|&x| x == 0.0));
    }
    #[test]
    fn an_error_has_the_reason_of_the_op() {
        let (k, v) = (filled("srft4".parse().unwrap(), 64, 2, 8, 1), filled("delta4".parse().unwrap(), 64, 2, 8, 2));
        for threads in [1, 3] {
            let options = AttendOptions { threads, ..AttendOptions::default() };
            let reason = attend(&[0.0; 4 * 64], 4, &k, &v, 8, &options).unwrap_err().to_string();
            assert!(reason.starts_with("delta4_64 is not for V: "), "{reason}");
        }
    }
}
