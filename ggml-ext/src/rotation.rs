//! The SRFT: random signs, then a real Fourier transform packed into a real orthonormal one.
//!
//! Why rotate: quantization error depends on the largest value of a group, and keys and values have channels
//! that are far larger than the rest. An orthonormal transform with random signs spreads every channel over all
//! of them, so that a group looks like Gaussian noise and one table fits all models. Scores do not change
//! (q.k = Rq.Rk), and a weighted sum of values is rotated back once.
//!
//! Why Fourier and not Hadamard: it exists at every head size, not at powers of two alone (80, 96, 112, 192, 320, 576
//! are in use), costs the same O(d log d), and mixes as well.
//!
//! For x of length n = 2N with signs s, X_k = sum_j s_j x_j e^(-2 pi i j k / n), the packed result is
//!
//! ```text
//! y[0]     = X_0 / sqrt(n)                y[N]     = X_N / sqrt(n)
//! y[k]     = Re X_k * sqrt(2/n)           y[N + k] = Im X_k * sqrt(2/n)        0 < k < N
//! ```
//!
//! which is orthonormal. It is computed as a complex transform of length N over z_j = x_2j + i x_2j+1 (Stockham, mixed
//! radix 4 2 3 5 7, real and imaginary parts apart so that the loops are plain vector loops), then unmixed. The inverse
//! runs the same steps backwards; since the transform is orthonormal it is also the transpose.
//!
//! [`Rotation::projection`] is two more transforms of the same shape with signs of their own, one after the other. The sign
//! bits of QJL and TurboQuant are taken behind them: two in a row make a Gaussian of any vector to within what statistics
//! can see. One alone makes a sine wave of a vector with a single large channel, and leaves TurboQuant's scores with
//! a bias of 0.07%, against less than 0.01%.
//!
//! The order of operations is part of the format (codes must not depend on the CPU): one source, compiled for each
//! instruction set, no reassociation.

use std::sync::OnceLock;

/// The head sizes that have a rotation. The position in this list is the low half of a type id: never reorder, only append.
pub const HEAD_SIZES: [usize; 11] = [64, 80, 96, 112, 128, 192, 256, 512, 576, 320, 384];

/// The largest of [`HEAD_SIZES`].
pub const MAX_HEAD: usize = 576;

/// The seed of the signs: version 1 of the format.
const SIGN_SEED: u64 = 0x5352_4654_0000_0001;
/// The same for [`Rotation::projection`].
const PROJECTION_SEEDS: [u64; 2] = [0x514a_4c53_0000_0001, 0x514a_4c53_0001_0001];

/// In place of half a head size where it is no constant.
const BY_PLAN: usize = 0;

/// w^(p j) for j in 1..radix, p in 0..m, j-major.
struct Twiddles {
    re: Vec<f32>,
    im: Vec<f32>,
}

/// The plan of one head size.
pub struct Rotation {
    size: usize,
    signs: Vec<f32>,
    stages: Vec<Twiddles>,
    /// e^(-2 pi i k / n) for k in 0..N.
    unmix_re: Vec<f32>,
    unmix_im: Vec<f32>,
}

/// splitmix64: small, fixed for ever, good enough to choose signs.
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn unit(k: usize, n: usize) -> (f32, f32) {
    let angle = -2.0 * std::f64::consts::PI * (k % n) as f64 / n as f64;
    (angle.cos() as f32, angle.sin() as f32)
}

/// Runs the body with half of the head size as a constant, and with the room that a spectrum takes, which has one value
/// more so that it can be mirrored.
macro_rules! for_size {
    ($size:expr, $N:ident, $ROOM:ident => $body:expr) => {
        for_size!(@ $size, $N, $ROOM, $body, 64 80 96 112 128 192 256 320 384 512)
    };
    (@ $size:expr, $N:ident, $ROOM:ident, $body:expr, $($n:literal)*) => {
        match $size {
            $($n => {
                const $N: usize = $n / 2;
                const $ROOM: usize = $N + 1;
                $body
            })*
            _ => {
                const $N: usize = 288;
                const $ROOM: usize = $N + 1;
                $body
            }
        }
    };
}

impl Rotation {
    /// The plan for a head size of [`HEAD_SIZES`], made once.
    pub fn of(size: usize) -> Option<&'static Rotation> {
        static PLANS: [OnceLock<Rotation>; HEAD_SIZES.len()] = [const { OnceLock::new() }; HEAD_SIZES.len()];
        let index = HEAD_SIZES.iter().position(|&s| s == size)?;
        Some(PLANS[index].get_or_init(|| Rotation::new(size, SIGN_SEED)))
    }

    /// The two transforms that sign bits are taken behind, in the order in which they are applied.
    pub fn projection(size: usize) -> Option<[&'static Rotation; 2]> {
        static PLANS: [OnceLock<[Rotation; 2]>; HEAD_SIZES.len()] = [const { OnceLock::new() }; HEAD_SIZES.len()];
        let index = HEAD_SIZES.iter().position(|&s| s == size)?;
        let [first, second] = PLANS[index].get_or_init(|| PROJECTION_SEEDS.map(|seed| Rotation::new(size, seed)));
        Some([first, second])
    }

    /// A number for the signs of all transforms of a head size, which tells versions of them apart.
    pub fn digest(size: usize) -> u64 {
        let plans = Rotation::of(size).into_iter().chain(Rotation::projection(size).into_iter().flatten());
        let signs = plans.flat_map(|plan| plan.signs.iter());
        signs.fold(0xcbf2_9ce4_8422_2325, |d, &s| (d ^ u64::from(s < 0.0)).wrapping_mul(0x100_0000_01b3))
    }

    fn new(size: usize, seed: u64) -> Rotation {
        let n = size / 2;
        let mut seed = seed ^ ((size as u64) << 32);
        let signs = (0..size).map(|_| if splitmix(&mut seed) >> 63 == 0 { 1.0 } else { -1.0 }).collect();
        let mut stages = Vec::new();
        let mut left = n;
        for &(radix, m, _) in stage_list(size) {
            let (re, im) = (1..radix).flat_map(|j| (0..m).map(move |p| unit(p * j, left))).unzip();
            stages.push(Twiddles { re, im });
            left = m;
        }
        let (unmix_re, unmix_im) = (0..n).map(|k| unit(k, size)).unzip();
        Rotation { size, signs, stages, unmix_re, unmix_im }
    }

    /// The head size.
    pub fn size(&self) -> usize {
        self.size
    }

    /// y = R x.
    #[inline(always)]
    pub fn forward(&self, x: &[f32], y: &mut [f32]) {
        for_size!(self.size, N, ROOM => self.forward_sized::<N, ROOM>(x, y))
    }

    /// x = R^-1 y.
    #[inline(always)]
    pub fn backward(&self, y: &[f32], x: &mut [f32]) {
        for_size!(self.size, N, ROOM => self.backward_sized::<N, ROOM>(y, x))
    }

    /// [`Rotation::forward`] by loops whose lengths are numbers of the plan: the same bits from one small function for all
    /// head sizes, and slower.
    pub fn forward_by_plan(&self, x: &[f32], y: &mut [f32]) {
        self.forward_sized::<BY_PLAN, { MAX_HEAD / 2 + 1 }>(x, y);
    }

    /// The same for [`Rotation::backward`].
    pub fn backward_by_plan(&self, y: &[f32], x: &mut [f32]) {
        self.backward_sized::<BY_PLAN, { MAX_HEAD / 2 + 1 }>(y, x);
    }

    #[inline(always)]
    fn forward_sized<const N: usize, const ROOM: usize>(&self, x: &[f32], y: &mut [f32]) {
        let n = if N == BY_PLAN { self.size / 2 } else { N };
        let mut room = [[0.0f32; ROOM]; 4];
        let (x, y, signs) = (&x[..2 * n], &mut y[..2 * n], &self.signs[..2 * n]);
        let [ar, ai, br, bi] = &mut room;
        for j in 0..n {
            ar[j] = x[2 * j] * signs[2 * j];
            ai[j] = x[2 * j + 1] * signs[2 * j + 1];
        }
        let (zr, zi) = self.transform::<N, ROOM>((ar, ai), (br, bi));
        // X_k = E_k + w^k O_k with E, O the transforms of the even and odd samples; sqrt(2/n) and the halves of
        // E and O make 1/2 sqrt(1/N). With Z_N = Z_0 the loop is whole, and k = 0 is set right afterwards.
        (zr[n], zi[n]) = (zr[0], zi[0]);
        let half = 0.5 * (1.0 / n as f32).sqrt();
        let (wr, wi) = (&self.unmix_re[..n], &self.unmix_im[..n]);
        let (yr, yi) = y.split_at_mut(n);
        for k in 0..n {
            let (er, ei) = (zr[k] + zr[n - k], zi[k] - zi[n - k]);
            let (or, oi) = (zi[k] + zi[n - k], zr[n - k] - zr[k]);
            yr[k] = oi.mul_add(-wi[k], or.mul_add(wr[k], er)) * half;
            yi[k] = oi.mul_add(wr[k], or.mul_add(wi[k], ei)) * half;
        }
        let side = (0.5 / n as f32).sqrt();
        yr[0] = (zr[0] + zi[0]) * side;
        yi[0] = (zr[0] - zi[0]) * side;
    }

    #[inline(always)]
    fn backward_sized<const N: usize, const ROOM: usize>(&self, y: &[f32], x: &mut [f32]) {
        let n = if N == BY_PLAN { self.size / 2 } else { N };
        let mut room = [[0.0f32; ROOM]; 4];
        let (x, y, signs) = (&mut x[..2 * n], &y[..2 * n], &self.signs[..2 * n]);
        let [ar, ai, br, bi] = &mut room;
        let mut mirror = [[0.0f32; ROOM]; 2];
        let [yr, yi] = &mut mirror;
        yr[..n].copy_from_slice(&y[..n]);
        yi[..n].copy_from_slice(&y[n..]);
        let half = 0.5 * (1.0 / n as f32).sqrt();
        let (wr, wi) = (&self.unmix_re[..n], &self.unmix_im[..n]);
        for k in 0..n {
            let (er, ei) = (yr[k] + yr[n - k], yi[k] - yi[n - k]);
            let (dr, di) = (yr[k] - yr[n - k], yi[k] + yi[n - k]);
            // O_k = conj(w^k) (X_k - conj X_(N-k)), Z_k = E_k + i O_k.
            let or = di.mul_add(wi[k], dr * wr[k]);
            let oi = dr.mul_add(-wi[k], di * wr[k]);
            ar[k] = (er - oi) * half;
            ai[k] = (ei + or) * half;
        }
        let side = (0.5 / n as f32).sqrt();
        ar[0] = (yr[0] + yi[0]) * side;
        ai[0] = (yr[0] - yi[0]) * side;
        // The inverse of a transform is the transform with real and imaginary parts exchanged.
        let (zi, zr) = self.transform::<N, ROOM>((ai, ar), (bi, br));
        for j in 0..n {
            x[2 * j] = zr[j] * signs[2 * j];
            x[2 * j + 1] = zi[j] * signs[2 * j + 1];
        }
    }

    /// The complex transform of length N; returns where the result is.
    #[inline(always)]
    fn transform<'a, const N: usize, const ROOM: usize>(
        &self,
        a: Complex<'a, ROOM>,
        b: Complex<'a, ROOM>,
    ) -> Complex<'a, ROOM> {
        let (mut a, mut b) = (a, b);
        let w = &self.stages;
        macro_rules! stages {
            ($($i:literal: $r:literal $m:literal $s:literal),*) => {{
                $(stage::<$r, $m, $s, ROOM>(&w[$i], &a, &mut b); std::mem::swap(&mut a, &mut b);)*
            }};
        }
        // The same numbers as in `stage_list`, as constants, so that every loop has a known length.
        match N {
            BY_PLAN => return self.transform_by_plan(a, b),
            32 => stages!(0: 4 8 1, 1: 4 2 4, 2: 2 1 16),
            40 => stages!(0: 4 10 1, 1: 2 5 4, 2: 5 1 8),
            48 => stages!(0: 4 12 1, 1: 4 3 4, 2: 3 1 16),
            56 => stages!(0: 4 14 1, 1: 2 7 4, 2: 7 1 8),
            64 => stages!(0: 4 16 1, 1: 4 4 4, 2: 4 1 16),
            96 => stages!(0: 4 24 1, 1: 4 6 4, 2: 2 3 16, 3: 3 1 32),
            128 => stages!(0: 4 32 1, 1: 4 8 4, 2: 4 2 16, 3: 2 1 64),
            160 => stages!(0: 4 40 1, 1: 4 10 4, 2: 2 5 16, 3: 5 1 32),
            192 => stages!(0: 4 48 1, 1: 4 12 4, 2: 4 3 16, 3: 3 1 64),
            256 => stages!(0: 4 64 1, 1: 4 16 4, 2: 4 4 16, 3: 4 1 64),
            _ => stages!(0: 4 72 1, 1: 4 18 4, 2: 2 9 16, 3: 3 3 32, 4: 3 1 96),
        }
        a
    }

    /// The same, stage by stage as the list says.
    fn transform_by_plan<'a, const ROOM: usize>(
        &self,
        a: Complex<'a, ROOM>,
        b: Complex<'a, ROOM>,
    ) -> Complex<'a, ROOM> {
        let (mut a, mut b) = (a, b);
        for (w, &(radix, m, s)) in self.stages.iter().zip(stage_list(self.size)) {
            match radix {
                2 => strided::<2, ROOM>(m, s, w, &a, &mut b),
                3 => strided::<3, ROOM>(m, s, w, &a, &mut b),
                4 => strided::<4, ROOM>(m, s, w, &a, &mut b),
                5 => strided::<5, ROOM>(m, s, w, &a, &mut b),
                _ => strided::<7, ROOM>(m, s, w, &a, &mut b),
            }
            std::mem::swap(&mut a, &mut b);
        }
        a
    }
}

/// (radix, butterflies, stride) of the stages of a head size.
fn stage_list(size: usize) -> &'static [(usize, usize, usize)] {
    match size {
        64 => &[(4, 8, 1), (4, 2, 4), (2, 1, 16)],
        80 => &[(4, 10, 1), (2, 5, 4), (5, 1, 8)],
        96 => &[(4, 12, 1), (4, 3, 4), (3, 1, 16)],
        112 => &[(4, 14, 1), (2, 7, 4), (7, 1, 8)],
        128 => &[(4, 16, 1), (4, 4, 4), (4, 1, 16)],
        192 => &[(4, 24, 1), (4, 6, 4), (2, 3, 16), (3, 1, 32)],
        256 => &[(4, 32, 1), (4, 8, 4), (4, 2, 16), (2, 1, 64)],
        320 => &[(4, 40, 1), (4, 10, 4), (2, 5, 16), (5, 1, 32)],
        384 => &[(4, 48, 1), (4, 12, 4), (4, 3, 16), (3, 1, 64)],
        512 => &[(4, 64, 1), (4, 16, 4), (4, 4, 16), (4, 1, 64)],
        _ => &[(4, 72, 1), (4, 18, 4), (2, 9, 16), (3, 3, 32), (3, 1, 96)],
    }
}

type Complex<'a, const ROOM: usize> = (&'a mut [f32; ROOM], &'a mut [f32; ROOM]);

/// y[q + S (R p + j)] = w^(p j) * DFT_R(x[q + S (p + M i)])_j
#[inline(always)]
fn stage<const R: usize, const M: usize, const S: usize, const ROOM: usize>(
    w: &Twiddles,
    from: &Complex<ROOM>,
    to: &mut Complex<ROOM>,
) {
    if S == 1 {
        // The stride is too short for vectors: run over p instead, and interleave what comes out.
        let (xr, xi) = (&from.0[..R * M], &from.1[..R * M]);
        let (yr, yi) = (&mut to.0[..R * M], &mut to.1[..R * M]);
        let (wr, wi) = (&w.re[..(R - 1) * M], &w.im[..(R - 1) * M]);
        let (mut tr, mut ti) = ([[0.0f32; M]; R], [[0.0f32; M]; R]);
        for p in 0..M {
            let (mut ar, mut ai) = ([0.0; R], [0.0; R]);
            for i in 0..R {
                (ar[i], ai[i]) = (xr[p + M * i], xi[p + M * i]);
            }
            let (br, bi) = butterfly::<R>(ar, ai);
            (tr[0][p], ti[0][p]) = (br[0], bi[0]);
            for j in 1..R {
                let (cr, ci) = (wr[(j - 1) * M + p], wi[(j - 1) * M + p]);
                tr[j][p] = bi[j].mul_add(-ci, br[j] * cr);
                ti[j][p] = bi[j].mul_add(cr, br[j] * ci);
            }
        }
        for p in 0..M {
            for j in 0..R {
                (yr[R * p + j], yi[R * p + j]) = (tr[j][p], ti[j][p]);
            }
        }
        return;
    }
    strided::<R, ROOM>(M, S, w, from, to);
}

/// A stage whose loops run over q.
#[inline(always)]
fn strided<const R: usize, const ROOM: usize>(
    m: usize,
    s: usize,
    w: &Twiddles,
    from: &Complex<ROOM>,
    to: &mut Complex<ROOM>,
) {
    let (xr, xi) = (&from.0[..R * m * s], &from.1[..R * m * s]);
    let (yr, yi) = (&mut to.0[..R * m * s], &mut to.1[..R * m * s]);
    let (wr, wi) = (&w.re[..(R - 1) * m], &w.im[..(R - 1) * m]);
    for p in 0..m {
        for q in 0..s {
            let (mut ar, mut ai) = ([0.0; R], [0.0; R]);
            for i in 0..R {
                (ar[i], ai[i]) = (xr[q + s * (p + m * i)], xi[q + s * (p + m * i)]);
            }
            let (br, bi) = butterfly::<R>(ar, ai);
            (yr[q + s * R * p], yi[q + s * R * p]) = (br[0], bi[0]);
            for j in 1..R {
                let (cr, ci) = (wr[(j - 1) * m + p], wi[(j - 1) * m + p]);
                yr[q + s * (R * p + j)] = bi[j].mul_add(-ci, br[j] * cr);
                yi[q + s * (R * p + j)] = bi[j].mul_add(cr, br[j] * ci);
            }
        }
    }
}

/// A complex transform of R values.
#[inline(always)]
fn butterfly<const R: usize>(ar: [f32; R], ai: [f32; R]) -> ([f32; R], [f32; R]) {
    let (mut br, mut bi) = ([0.0; R], [0.0; R]);
    match R {
        2 => {
            (br[0], bi[0]) = (ar[0] + ar[1], ai[0] + ai[1]);
            (br[1], bi[1]) = (ar[0] - ar[1], ai[0] - ai[1]);
        }
        4 => {
            let (s0r, s0i) = (ar[0] + ar[2], ai[0] + ai[2]);
            let (d0r, d0i) = (ar[0] - ar[2], ai[0] - ai[2]);
            let (s1r, s1i) = (ar[1] + ar[3], ai[1] + ai[3]);
            let (d1r, d1i) = (ar[1] - ar[3], ai[1] - ai[3]);
            (br[0], bi[0]) = (s0r + s1r, s0i + s1i);
            (br[2], bi[2]) = (s0r - s1r, s0i - s1i);
            (br[1], bi[1]) = (d0r + d1i, d0i - d1r);
            (br[3], bi[3]) = (d0r - d1i, d0i + d1r);
        }
        // Odd radices: sums and differences of mirrored inputs against cos and sin of 2 pi j i / R.
        _ => {
            let half = (R - 1) / 2;
            (br[0], bi[0]) = (ar[0], ai[0]);
            for i in 1..R {
                br[0] += ar[i];
                bi[0] += ai[i];
            }
            for j in 1..=half {
                let (mut cr, mut ci, mut sr, mut si) = (ar[0], ai[0], 0.0f32, 0.0f32);
                for i in 1..=half {
                    let (c, s) = COS_SIN[R][(i * j) % R];
                    cr = (ar[i] + ar[R - i]).mul_add(c, cr);
                    ci = (ai[i] + ai[R - i]).mul_add(c, ci);
                    sr = (ar[i] - ar[R - i]).mul_add(s, sr);
                    si = (ai[i] - ai[R - i]).mul_add(s, si);
                }
                (br[j], bi[j]) = (cr + si, ci - sr);
                (br[R - j], bi[R - j]) = (cr - si, ci + sr);
            }
        }
    }
    (br, bi)
}

/// cos and sin of 2 pi k / R for the odd radices.
const COS_SIN: [[(f32, f32); 7]; 8] = {
    let mut t = [[(1.0, 0.0); 7]; 8];
    t[3][1] = (-0.5, 0.866_025_4);
    t[3][2] = (-0.5, -0.866_025_4);
    t[5][1] = (0.309_017, 0.951_056_5);
    t[5][2] = (-0.809_017, 0.587_785_24);
    t[5][3] = (-0.809_017, -0.587_785_24);
    t[5][4] = (0.309_017, -0.951_056_5);
    t[7][1] = (0.623_489_8, 0.781_831_5);
    t[7][2] = (-0.222_520_93, 0.974_927_9);
    t[7][3] = (-0.900_968_9, 0.433_883_73);
    t[7][4] = (-0.900_968_9, -0.433_883_73);
    t[7][5] = (-0.222_520_93, -0.974_927_9);
    t[7][6] = (0.623_489_8, -0.781_831_5);
    t
};

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::random::Noise;

    /// Row y of the packed transform, straight from the definition in f64.
    pub(crate) fn naive(rotation: &Rotation, x: &[f64]) -> Vec<f64> {
        let n = rotation.size;
        let mut y = vec![0.0; n];
        for k in 0..=n / 2 {
            let (mut re, mut im) = (0.0, 0.0);
            for j in 0..n {
                let angle = -2.0 * std::f64::consts::PI * (j * k % n) as f64 / n as f64;
                let v = x[j] * rotation.signs[j] as f64;
                re += v * angle.cos();
                im += v * angle.sin();
            }
            if k == 0 || k == n / 2 {
                y[k] = re / (n as f64).sqrt();
            } else {
                y[k] = re * (2.0 / n as f64).sqrt();
                y[n / 2 + k] = im * (2.0 / n as f64).sqrt();
            }
        }
        y
    }

    /// Both transforms of a projection.
    pub(crate) fn naive_projection(size: usize, x: &[f64]) -> Vec<f64> {
        Rotation::projection(size).unwrap().iter().fold(x.to_vec(), |x, r| naive(r, &x))
    }

    fn plans(size: usize) -> [&'static Rotation; 3] {
        let [first, second] = Rotation::projection(size).unwrap();
        [Rotation::of(size).unwrap(), first, second]
    }

    #[test]
    fn agrees_with_the_naive_dft_and_comes_back() {
        for r in HEAD_SIZES.iter().flat_map(|&s| plans(s)) {
            let size = r.size();
            for seed in 0..4 {
                let x = Noise::new(seed).flat_row(size);
                let wide: Vec<f64> = x.iter().map(|&x| x as f64).collect();
                let (mut y, mut back) = (vec![0.0; size], vec![0.0; size]);
                r.forward_by_plan(&x, &mut y);
                for (i, (a, b)) in y.iter().zip(naive(r, &wide)).enumerate() {
                    assert!((*a as f64 - b).abs() < 2e-6, "size {size}, y[{i}] = {a}, wanted {b}");
                }
                r.backward_by_plan(&y, &mut back);
                for (a, b) in x.iter().zip(&back) {
                    assert!((a - b).abs() < 2e-6, "size {size}: {a} came back as {b}");
                }
            }
        }
    }

    #[test]
    fn signs_are_those_of_version_1() {
        let digest =
            |r: &Rotation| format!("{:016x}", r.signs[..64].iter().fold(0u64, |d, &s| d << 1 | u64::from(s < 0.0)));
        // State files depend on these for ever.
        for (i, &size) in HEAD_SIZES.iter().enumerate() {
            assert_eq!(digest(Rotation::of(size).unwrap()), VERSION_1[i], "head size {size}");
            assert_eq!(Rotation::projection(size).unwrap().map(digest), PROJECTION_1[i], "head size {size}");
        }
    }

    const PROJECTION_1: [[&str; 2]; 11] = [
        ["5416d21bba652935", "6785e4c66a9c57be"],
        ["45d4df4049487441", "9443e2fd18785496"],
        ["2ce9a363019b7149", "32633cd133813bdb"],
        ["7ad43f87c507c2d1", "1fbf78da25105f1d"],
        ["06301cff60ffba54", "7c1e2cd8cdc1ef22"],
        ["7da204a2d9e798ad", "4372efe08ee6a898"],
        ["6ebbc661c14c773d", "edd2d9346803098b"],
        ["0f60e621738a0a1d", "c8264ff84b885ec4"],
        ["d578126bbccfde78", "1c989155300822db"],
        ["d92165152f380db6", "5333bfccdf5e8a19"],
        ["316a495a40b41ed1", "310f4b865e6a875c"],
    ];

    const VERSION_1: [&str; 11] = [
        "54a8f85e07b03fd1",
        "4461871fef276807",
        "b45bad8bcf7880bd",
        "91e9e9db3934b078",
        "412c913bf7666f6a",
        "7218995dc9558a50",
        "989acd3d349ac635",
        "ebcdcdc2947f9847",
        "b9943dcefe9e22af",
        "5adf3556ef3501b3",
        "16b4727e15d4f6f6",
    ];
}
