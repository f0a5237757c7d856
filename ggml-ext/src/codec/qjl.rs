//! qjl1: the signs of a projection and a norm (QJL, arXiv 2406.03482), for keys.
//!
//! A key k is stored as sign(P k), one bit a value, and |k|. P is a Johnson-Lindenstrauss projection; a query is projected
//! too but not cut to signs, and
//!
//! ```text
//! q.k  ~  |k| / (e sqrt(d)) * (P q).sign(P k)          e = sqrt(d) E|u_1|, u uniform on the unit sphere
//! ```
//!
//! is an estimate without bias. The paper's P has m = d rows of independent Gaussian values, for which the factor is
//! sqrt(pi/2) / m and the variance (pi/2 |q|^2 |k|^2 - (q.k)^2) / m. Here P is orthonormal, two signed Fourier transforms in
//! a row ([`Rotation::projection`]). The errors of its rows are not independent but cancel in part; of the variance is left
//!
//! ```text
//! (1 - 2/pi) / (d e^2) * (|q|^2 |k|^2 - (q.k)^2)  +  ((1 + (d-1) 2/pi) / (d e^2) - 1) * (q.k)^2
//! ```
//!
//! where the first term is about (pi/2 - 1) / d and the second a tenth of that: 0.36 of the paper's at the same number of
//! bits. e tends to sqrt(2/pi); its exact value, 0.4% away at d = 64, is what makes the estimate free of bias there.
//!
//! ```text
//! row = |k| / sqrt(d): f16 | sign of value i in bit i%8 of byte i/8, set where it is negative
//! ```
//!
//! Levels and scales. A row decodes to e |k| / sqrt(d) * sign, the reconstruction of least squared error (1 - e^2 of the
//! key's square). The estimate without bias is 1/e^2 times as large, and since that factor is the same for all keys it is
//! given to the query ([`score_factor`]): the stored side is plain levels like any other type's.
//!
//! As values such rows would be useless (36% of a value's square is lost and nothing averages it away), so V refuses them.
//!
//! Bad values: as in [`super::srft`].

use super::clean;
use super::levels::{padded, LevelLayout, Packing, Scales};
use super::plain::BLOCK;
use super::scales::{load_f16, store_f16};
use super::RowFormat;
use crate::domain::Domain;
use crate::lanes::{Simd, LANES};
use crate::room::Room;
use crate::rotation::{Rotation, HEAD_SIZES};

/// The magnitude of a sign among the levels: any would do.
pub const SIGN_LEVEL: i8 = 64;

/// The row format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qjl {
    size: usize,
}

/// Bytes of the norm, which comes first.
pub const NORM_BYTES: usize = 2;

/// e^2 = d (E|u_1|)^2 for a unit vector u of random direction: d/pi (Gamma(d/2) / Gamma((d+1)/2))^2.
pub fn mean_magnitude_squared(size: usize) -> f64 {
    const OF_SIZE: [f64; HEAD_SIZES.len()] = {
        let mut of_size = [0.0; HEAD_SIZES.len()];
        let mut i = 0;
        while i < HEAD_SIZES.len() {
            // Gamma(1) / Gamma(3/2) = 2 / sqrt(pi), then two dimensions at a time.
            let (mut ratio, mut d) = (1.0, 2.0);
            while d < HEAD_SIZES[i] as f64 {
                ratio *= d / (d + 1.0);
                d += 2.0;
            }
            of_size[i] = 4.0 * ratio * ratio * d / (std::f64::consts::PI * std::f64::consts::PI);
            i += 1;
        }
        of_size
    };
    OF_SIZE[HEAD_SIZES.iter().position(|&s| s == size).expect("a head size")]
}

/// What the projected query is multiplied by: 1/e^2.
pub fn score_factor(size: usize) -> f32 {
    (1.0 / mean_magnitude_squared(size)) as f32
}

/// e: the mean magnitude of the values of a projected vector whose root mean square is 1.
pub fn mean_magnitude(size: usize) -> f32 {
    mean_magnitude_squared(size).sqrt() as f32
}

/// The root mean square of a vector, in the order of [`crate::lanes`].
#[inline(always)]
pub(crate) fn rms<S: Simd>(x: &[f32]) -> f32 {
    let mut sum = S::splat(0.0);
    for x in x.chunks_exact(LANES) {
        let x = S::load(x);
        sum = x.fma(x, sum);
    }
    (sum.sum() / x.len() as f32).sqrt()
}

/// Signs to bits.
#[inline(always)]
pub(crate) fn pack_signs(x: &[f32], bits: &mut [u8]) {
    for (b, x) in bits.iter_mut().zip(x.chunks_exact(8)) {
        *b = (0..8).fold(0, |b, i| b | u8::from(x[i] < 0.0) << i);
    }
}

/// Bits to +-level.
#[inline(always)]
pub(crate) fn unpack_signs(bits: &[u8], level: i8, levels: &mut [i8]) {
    for (i, l) in levels.iter_mut().enumerate() {
        *l = if bits[i / 8] >> (i % 8) & 1 == 1 { -level } else { level };
    }
}

impl Qjl {
    /// None where no such format exists.
    pub fn new(size: usize) -> Option<Qjl> {
        HEAD_SIZES.contains(&size).then_some(Qjl { size })
    }

    /// What signs are taken behind.
    pub fn projection(self) -> [&'static Rotation; 2] {
        Rotation::projection(self.size).expect("checked by new")
    }

    #[inline(always)]
    fn decode_times<S: Simd>(self, factor: f32, row: &[u8], x: &mut [f32]) {
        let (mut a, mut b) = (Room::new(), Room::new());
        let (a, b) = (a.zeros(self.size), b.zeros(self.size));
        let mut levels = Room::new();
        let levels = levels.zeros(self.size);
        let scale = self.signs(row, levels) * factor;
        for (a, &l) in a.iter_mut().zip(&*levels) {
            *a = f32::from(l) * scale;
        }
        let [first, second] = self.projection();
        S::rotate_back(second, a, b);
        S::rotate_back(first, b, x);
    }

    /// Levels of a row, level zero beyond its values, and the scale of each group.
    #[inline(always)]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        levels[self.size..padded(self.size)].fill(0);
        let scale = self.signs(row, levels);
        scales[..padded(self.size) / BLOCK].fill(scale);
    }

    /// The levels of a row; returns their scale.
    #[inline(always)]
    fn signs(self, row: &[u8], levels: &mut [i8]) -> f32 {
        let (scale, bits) = row[..self.row_bytes()].split_at(NORM_BYTES);
        unpack_signs(bits, SIGN_LEVEL, &mut levels[..self.size]);
        load_f16(scale) * self.scale_factor()
    }

    /// The stored scale times this is the scale of the levels.
    pub fn scale_factor(self) -> f32 {
        mean_magnitude(self.size) / f32::from(SIGN_LEVEL)
    }
}

impl RowFormat for Qjl {
    fn size(self) -> usize {
        self.size
    }

    fn row_bytes(self) -> usize {
        NORM_BYTES + self.size / 8
    }

    fn score_error(self) -> f32 {
        0.75
    }

    fn domain(self) -> Domain {
        Domain::Projected(self.projection())
    }

    fn levels(self) -> LevelLayout {
        LevelLayout {
            values: padded(self.size),
            scale_group: BLOCK,
            row_bytes: self.row_bytes(),
            // One for all of them, whatever the padding.
            scales: Scales::PerGroup { step: 0, unit: self.scale_factor() },
            packing: Packing::Signs(self),
        }
    }

    #[inline(always)]
    fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let (mut a, mut b) = (Room::new(), Room::new());
        let (a, b) = (a.zeros(self.size), b.zeros(self.size));
        clean(x, a);
        let [first, second] = self.projection();
        S::rotate(first, a, b);
        S::rotate(second, b, a);
        let (scale, bits) = row[..self.row_bytes()].split_at_mut(NORM_BYTES);
        store_f16(rms::<S>(a), scale);
        pack_signs(a, bits);
    }

    #[inline(always)]
    fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        self.decode_times::<S>(1.0, row, x);
    }

    #[inline(always)]
    fn decode_key<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        self.decode_times::<S>(score_factor(self.size), row, x);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::isa::scalar;
    use crate::random::Noise;
    use crate::rotation;
    use crate::rotation::MAX_HEAD;
    use proptest::prelude::*;

    /// The error of an estimate of q.k, q and k of unit length with cosines from 0 to 1.
    pub(crate) struct Statistics {
        /// sum(error * cosine) / sum(cosine^2) and its standard error: 0 where there is no bias.
        pub slope: (f64, f64),
        /// Mean of the error and its standard error.
        pub mean: (f64, f64),
        /// Mean of error^2.
        pub variance: f64,
        /// Mean of cosine^2.
        pub cosine2: f64,
    }

    /// `estimate` gets q and k, both of unit length.
    pub(crate) fn statistics(
        size: usize,
        pairs: usize,
        seed: u64,
        mut estimate: impl FnMut(&[f32], &[f32]) -> f64,
    ) -> Statistics {
        let mut noise = Noise::new(seed);
        let unit = |v: Vec<f32>| {
            let norm = dot(&v, &v).sqrt();
            v.iter().map(|&x| (f64::from(x) / norm) as f32).collect::<Vec<f32>>()
        };
        let (mut et, mut tt, mut eett, mut e1, mut e2) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for _ in 0..pairs {
            let k = unit(noise.row(size));
            let other = unit(noise.row(size));
            let share = noise.uniform();
            let q = unit(k.iter().zip(&other).map(|(k, o)| share * k + (1.0 - share) * o).collect());
            let truth = dot(&q, &k);
            let error = estimate(&q, &k) - truth;
            et += error * truth;
            tt += truth * truth;
            eett += (error * truth).powi(2);
            e1 += error;
            e2 += error * error;
        }
        let n = pairs as f64;
        Statistics {
            slope: (et / tt, eett.sqrt() / tt),
            mean: (e1 / n, (e2 / n).sqrt() / n.sqrt()),
            variance: e2 / n,
            cosine2: tt / n,
        }
    }

    /// The variance that the essay above gives.
    fn orthonormal_variance(size: usize, cosine2: f64) -> f64 {
        let (d, e2) = (size as f64, mean_magnitude_squared(size));
        let across = (1.0 - std::f64::consts::FRAC_2_PI) / (d * e2);
        let along = (1.0 + (d - 1.0) * std::f64::consts::FRAC_2_PI) / (d * e2) - 1.0;
        across * (1.0 - cosine2) + along * cosine2
    }

    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    }

    #[test]
    fn inner_products_have_no_bias_and_the_variance_of_an_orthonormal_projection() {
        for size in [64, 128] {
            let f = Qjl::new(size).unwrap();
            let (mut row, mut key) = (vec![0; f.row_bytes()], vec![0.0; size]);
            let s = statistics(size, 100_000, 1, |q, k| {
                scalar::encode(f.into(), k, &mut row);
                scalar::decode_key(f.into(), &row, &mut key);
                dot(q, &key)
            });
            assert!(s.slope.0.abs() < 3.0 * s.slope.1, "d={size}: bias {:?}", s.slope);
            assert!(s.mean.0.abs() < 3.0 * s.mean.1, "d={size}: mean {:?}", s.mean);
            let want = orthonormal_variance(size, s.cosine2);
            assert!((s.variance / want - 1.0).abs() < 0.02, "d={size}: {} instead of {want}", s.variance);
            // Below that of the paper, whose rows are independent.
            let paper = (std::f64::consts::FRAC_PI_2 - s.cosine2) / size as f64;
            assert!(s.variance < 0.4 * paper, "d={size}: {} of {paper}", s.variance);
        }
    }

    /// The paper's own projection, in f64: its formula is the yardstick that the orthonormal one is compared with.
    #[test]
    fn a_gaussian_projection_has_the_variance_of_the_paper() {
        let size = 128;
        let mut noise = Noise::new(2);
        let mut projection = vec![0.0f32; size * size];
        let mut pair = 0;
        let s = statistics(size, 20_000, 3, |q, k| {
            // A fresh matrix now and then; one matrix alone has a bias of its own.
            if pair % 40 == 0 {
                projection = noise.row(size * size);
            }
            pair += 1;
            let sum: f64 = projection.chunks_exact(size).map(|p| dot(p, q) * dot(p, k).signum()).sum();
            std::f64::consts::FRAC_PI_2.sqrt() / size as f64 * sum
        });
        let paper = (std::f64::consts::FRAC_PI_2 - s.cosine2) / size as f64;
        assert!((s.variance / paper - 1.0).abs() < 0.2, "{} instead of {paper}", s.variance);
    }

    /// The whole format once more in f64, from the definitions.
    #[test]
    fn rows_agree_with_a_naive_encoder() {
        for size in HEAD_SIZES {
            let f = Qjl::new(size).unwrap();
            for seed in 0..12 {
                let x = Noise::new(seed).row(size);
                let (mut row, mut levels) = (vec![0; f.row_bytes()], vec![0i8; size]);
                scalar::encode(f.into(), &x, &mut row);
                f.signs(&row, &mut levels);
                let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                let projected = rotation::tests::naive_projection(size, &wide);
                for (i, &p) in projected.iter().enumerate() {
                    assert!(p.abs() < 1e-5 || (p < 0.0) == (levels[i] < 0), "d={size}, sign {i} of {p}");
                }
                let norm = (dot(&x, &x) / size as f64).sqrt();
                assert!((f64::from(load_f16(&row)) / norm - 1.0).abs() < 1e-3, "d={size}");
            }
        }
    }

    /// E|u_1| by integration over the density (1 - u^2)^((d-3)/2).
    #[test]
    fn mean_magnitude_is_that_of_the_sphere() {
        for size in HEAD_SIZES {
            let (mut above, mut below) = (0.0, 0.0);
            for i in 0..200_000 {
                let u: f64 = (f64::from(i) + 0.5) / 200_000.0;
                let density = (1.0 - u * u).powf((size as f64 - 3.0) / 2.0);
                above += u * density;
                below += density;
            }
            let want = size as f64 * (above / below).powi(2);
            let got = mean_magnitude_squared(size);
            assert!((got / want - 1.0).abs() < 1e-6, "d={size}: {got}, wanted {want}");
        }
    }

    #[test]
    fn a_key_with_one_large_channel_keeps_its_length() {
        for size in HEAD_SIZES {
            let f = Qjl::new(size).unwrap();
            let mut sum = 0.0;
            for channel in 0..size {
                let mut x = vec![0.0f32; size];
                x[channel] = 3.0;
                let (mut row, mut key) = (vec![0; f.row_bytes()], vec![0.0; size]);
                scalar::encode(f.into(), &x, &mut row);
                scalar::decode_key(f.into(), &row, &mut key);
                sum += f64::from(key[channel]) / 3.0;
                // One transform alone would give 1.13 in nearly every channel.
                assert!((key[channel] / 3.0 - 1.0).abs() < 0.25, "d={size}, channel {channel}: {}", key[channel] / 3.0);
            }
            assert!((sum / size as f64 - 1.0).abs() < 0.04, "d={size}: {}", sum / size as f64);
        }
    }

    #[test]
    fn sizes_are_the_published_ones() {
        assert_eq!(Qjl::new(128).unwrap().row_bytes(), 18);
        assert_eq!(Qjl::new(64).unwrap().row_bytes(), 10);
        assert_eq!(Qjl::new(80).unwrap().row_bytes(), 12);
        assert_eq!(Qjl::new(576).unwrap().row_bytes(), 74);
        assert_eq!(Qjl::new(72), None);
    }

    pub(crate) fn wild() -> impl Strategy<Value = f32> {
        prop_oneof![
            6 => -4.0f32..4.0,
            1 => Just(0.0),
            1 => any::<f32>(),
            1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-42]),
        ]
    }

    proptest! {
        #[test]
        fn anything_encodes_and_any_bytes_decode(
            values in prop::collection::vec(wild(), MAX_HEAD),
            bytes in prop::collection::vec(any::<u8>(), 74),
            size in prop::sample::select(HEAD_SIZES.to_vec()),
        ) {
            let f = Qjl::new(size).unwrap();
            let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; size]);
            scalar::encode(f.into(), &values[..size], &mut row);
            scalar::decode(f.into(), &row, &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
            scalar::decode_key(f.into(), &bytes[..f.row_bytes()], &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
        }
    }
}
