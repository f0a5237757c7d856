use ggml_ext::attention::*;
use ggml_ext::tensor::Tensor;
use ggml_ext::{isa, table};
use std::time::Instant;
fn main() {
    for (size, kvh, group) in [(64usize, 3usize, 3usize), (128, 8, 4), (256, 1, 4)] {
        for name in ["srft4", "srft8", "srft3", "srft2"] {
            for nq in [1usize, 4, 64] {
                let cells = 4096usize;
                let Some(table::Entry::Family(f)) = table::by_name(name) else { panic!() };
                let c = f.at(size).unwrap();
                let mut s = 1u64;
                let mut rnd = || {
                    s ^= s << 13;
                    s ^= s >> 7;
                    s ^= s << 17;
                    (s >> 40) as f32 / 8388608.0 - 1.0
                };
                let mut bytes = vec![0u8; cells * kvh * c.row_bytes()];
                let t0 = Instant::now();
                for row in bytes.chunks_exact_mut(c.row_bytes()) {
                    let x: Vec<f32> = (0..size).map(|_| rnd()).collect();
                    unsafe { (isa::kernels().encode)(c.format(), &x, row) };
                }
                let enc = t0.elapsed().as_secs_f64() / (cells * kvh) as f64 * 1e9;
                let heads = kvh * group;
                let q: Vec<f32> = (0..size * nq * heads).map(|_| rnd()).collect();
                let dst = vec![0f32; size * heads * nq];
                let ft = |d: &[f32], ne: [usize; 4]| Tensor {
                    kind: 0,
                    ne: ne.map(|x| x as i64),
                    nb: [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]],
                    data: d.as_ptr() as *mut u8,
                    to_float: None,
                };
                let kt = Tensor {
                    kind: c.id(),
                    ne: [size as i64, cells as i64, kvh as i64, 1],
                    nb: [c.row_bytes(), c.row_bytes() * kvh, c.row_bytes(), c.row_bytes() * kvh * cells],
                    data: bytes.as_mut_ptr(),
                    to_float: None,
                };
                let op = AttentionOp {
                    q: ft(&q, [size, nq, heads, 1]),
                    k: kt,
                    v: kt,
                    dst: ft(&dst, [size, heads, nq, 1]),
                    mask: std::ptr::null(),
                    sinks: std::ptr::null(),
                    scale: 1.0 / (size as f32).sqrt(),
                    max_bias: 0.0,
                    logit_softcap: 0.0,
                };
                let a = Attention::new(&op).unwrap();
                let mut work = vec![0u8; a.work_size(1)];
                let mut best = f64::MAX;
                for _ in 0..15 {
                    let t = Instant::now();
                    unsafe {
                        a.compute(0, 1, work.as_mut_ptr());
                        a.finish(0, 1, work.as_mut_ptr());
                    }
                    best = best.min(t.elapsed().as_secs_f64());
                }
                println!("{} d{size} {heads}/{kvh} {name} nq{nq}: {:.1} ns per cell and kv head, {:.2} per query row; encode {enc:.0} ns", isa::kernels().name, best * 1e9 / (cells * kvh) as f64, best * 1e9 / (cells * kvh * group * nq) as f64);
            }
        }
    }
}
