//! turbo4, turbo3: TurboQuant (arXiv 2504.19874): a scalar quantizer at b-1 bits and the signs of what it leaves.
//!
//! Stage 1. The row is rotated ([`crate::rotation`]) and divided by its root mean square; a value then has the
//! marginal of a random direction, within 1/d a Gaussian, and the Lloyd-Max quantizer of the Gaussian with 8 (turbo4) or
//! 4 (turbo3) levels codes it. What is lost of the row's square is 0.0345 or 0.1175.
//!
//! Stage 2. The residual r, in the rotated domain, is coded as [`super::qjl`] codes a key: the signs of a projection P
//! of it, and its norm. That makes scores free of bias:
//!
//! ```text
//! q.k  ~  R q . c  +  1/e^2 * P R q . z          c: levels of stage 1, z = e |r| / sqrt(d) * sign(P r)
//! ```
//!
//! with e from [`super::qjl`]. The variance is that of QJL on the residual, (1 - 2/pi) / (d e^2) |q|^2 |r|^2; the paper's,
//! for a Gaussian instead of an orthonormal P, is pi/(2d) |q|^2 |r|^2, 2.75 times as large.
//!
//! ```text
//! row   = rms of the row: f16 | rms of the residual: f16 | codes of stage 1 | signs
//! codes   as srft packs 3 and 2 bits: in chunks of 64, 32, 16 values
//! signs   of value i in bit i%8 of byte i/8, set where it is negative
//! ```
//!
//! So a row is two rows of levels side by side, d values of stage 1 and d signs, each with one scale; the query is
//! [R q, P R q / e^2], and a score is one integer dot product over 2d values.
//!
//! The reconstruction, for values: c + P^T z loses 1 - e^2 = 0.36 of the residual's square, the signs at their length without
//! bias (z/e^2) lose 0.57 of it, stage 1 alone all of it; the first is used. Its squared error is 0.0126 for turbo4 and
//! 0.043 for turbo3. A weighted sum of values is taken over 2d values and turned back once: R^-1 (a + P^T b).
//!
//! The residual is that of what a reader finds, so the rounding of levels to 8 bits and of the norm to f16 is made good by
//! stage 2. Bad values: as in [`super::srft`].

use super::clean;
use super::levels::{padded, LevelLayout, Packing, Scales};
use super::plain::BLOCK;
use super::qjl::{mean_magnitude, pack_signs, rms, score_factor, unpack_signs};
use super::scales::{load_f16, store_f16};
use super::srft::Srft;
use super::RowFormat;
use crate::domain::Domain;
use crate::lanes::{Simd, LANES};
use crate::room::Room;
use crate::rotation::{Rotation, HEAD_SIZES};

/// A Lloyd-Max quantizer of N(0,1) in 8-bit levels.
#[derive(Debug, PartialEq, Eq)]
pub struct Quantizer {
    /// The levels, ascending; the first half mirrors the second.
    pub table: &'static [i8],
    /// level / unit is the value: of the units that leave room for the largest level, the one that rounds best.
    unit_hundredths: u32,
    /// The magnitude of the signs among levels, such that both stages have scales of a size.
    pub sign_level: i8,
}

impl Quantizer {
    /// Levels per standard deviation.
    pub fn unit(&self) -> f32 {
        self.unit_hundredths as f32 / 100.0
    }

    /// The level nearest to x, which is in levels, and its code.
    #[inline(always)]
    fn nearest<S: Simd>(&self, x: S) -> (S, S) {
        let (mut level, mut code) = (S::splat(f32::from(self.table[0])), S::splat(0.0));
        for (i, pair) in self.table.windows(2).enumerate() {
            let middle = S::splat(0.5 * (f32::from(pair[0]) + f32::from(pair[1])));
            level = x.above(middle, S::splat(f32::from(pair[1])), level);
            code = x.above(middle, S::splat((i + 1) as f32), code);
        }
        (level, code)
    }
}

/// Stage 1 of turbo4.
pub static QUANTIZER_3: Quantizer =
    Quantizer { table: &[-88, -55, -31, -10, 10, 31, 55, 88], unit_hundredths: 4091, sign_level: 10 };
/// Stage 1 of turbo3.
pub static QUANTIZER_2: Quantizer = Quantizer { table: &[-110, -33, 33, 110], unit_hundredths: 7283, sign_level: 32 };

/// Bytes of the two norms, which come first.
pub const NORM_BYTES: usize = 4;

/// The row format: bits of both stages together and the head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turbo {
    bits: u32,
    size: usize,
}

impl Turbo {
    /// None where no such format exists.
    pub fn new(bits: u32, size: usize) -> Option<Turbo> {
        (matches!(bits, 3 | 4) && HEAD_SIZES.contains(&size)).then_some(Turbo { bits, size })
    }

    /// Bits of a value, that of its sign included.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Stage 1.
    pub fn quantizer(self) -> &'static Quantizer {
        if self.bits == 4 {
            &QUANTIZER_3
        } else {
            &QUANTIZER_2
        }
    }

    /// How the codes of stage 1 are packed.
    pub fn packing(self) -> Srft {
        Srft::new(self.bits - 1, self.size).expect("checked by new")
    }

    /// Where the signs begin.
    pub fn sign_offset(self) -> usize {
        NORM_BYTES + self.size * (self.bits as usize - 1) / 8
    }

    /// What both stages are taken behind.
    pub fn rotation(self) -> &'static Rotation {
        Rotation::of(self.size).expect("checked by new")
    }

    /// What the signs are taken behind, after the rotation.
    pub fn projection(self) -> [&'static Rotation; 2] {
        Rotation::projection(self.size).expect("checked by new")
    }

    /// Codes of a rotated row, of which the residual is left.
    #[inline(always)]
    fn stage_1<S: Simd>(self, x: &mut [f32], scale: f32, codes: &mut [u8]) {
        let quantizer = self.quantizer();
        let inverse = S::splat(if scale > 0.0 { 1.0 / scale } else { 0.0 });
        for (x, codes) in x.chunks_exact_mut(LANES).zip(codes.chunks_exact_mut(LANES)) {
            let v = S::load(x);
            let (level, code) = quantizer.nearest(v.times(inverse));
            code.store_bytes(codes);
            level.fma(S::splat(-scale), v).store(x);
        }
    }

    #[inline(always)]
    fn decode_times<S: Simd>(self, factor: f32, row: &[u8], x: &mut [f32]) {
        let (mut levels, mut signs) = (Room::new(), Room::new());
        let (levels, signs) = (levels.zeros(self.size), signs.zeros(self.size));
        let [level_scale, sign_scale] = self.stages(row, levels, signs);
        let (mut a, mut b) = (Room::new(), Room::new());
        let (a, b) = (a.zeros(self.size), b.zeros(self.size));
        for (a, &s) in a.iter_mut().zip(&*signs) {
            *a = f32::from(s) * (sign_scale * factor);
        }
        let [first, second] = self.projection();
        S::rotate_back(second, a, b);
        S::rotate_back(first, b, a);
        for (a, &l) in a.iter_mut().zip(&*levels) {
            *a = f32::from(l).mul_add(level_scale, *a);
        }
        S::rotate_back(self.rotation(), a, x);
    }

    /// The levels of both stages, each padded with zeros, and the scale of each group.
    #[inline(always)]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        let (width, groups) = (padded(self.size), padded(self.size) / BLOCK);
        let (first, second) = levels[..2 * width].split_at_mut(width);
        first[self.size..].fill(0);
        second[self.size..].fill(0);
        let [of_levels, of_signs] = self.stages(row, first, second);
        scales[..groups].fill(of_levels);
        scales[groups..2 * groups].fill(of_signs);
    }

    /// Levels of both stages of a row; returns their scales.
    #[inline(always)]
    fn stages(self, row: &[u8], levels: &mut [i8], signs: &mut [i8]) -> [f32; 2] {
        let (body, bits) = row[NORM_BYTES..self.row_bytes()].split_at(self.sign_offset() - NORM_BYTES);
        for (level, code) in levels[..self.size].iter_mut().zip(self.packing().codes(body)) {
            *level = self.quantizer().table[usize::from(code)];
        }
        unpack_signs(bits, self.quantizer().sign_level, &mut signs[..self.size]);
        let [first, second] = self.scale_factors();
        [load_f16(row) * first, load_f16(&row[2..]) * second]
    }

    /// The stored norms times these are the scales of the levels.
    pub fn scale_factors(self) -> [f32; 2] {
        let quantizer = self.quantizer();
        [1.0 / quantizer.unit(), mean_magnitude(self.size) / f32::from(quantizer.sign_level)]
    }
}

impl RowFormat for Turbo {
    fn size(self) -> usize {
        self.size
    }

    fn row_bytes(self) -> usize {
        self.sign_offset() + self.size / 8
    }

    // Further off than scales and codes of as many bits (docs/types.md has the variances).
    fn score_error(self) -> f32 {
        if self.bits == 4 {
            0.14
        } else {
            0.26
        }
    }

    fn domain(self) -> Domain {
        Domain::Both(self.rotation(), self.projection())
    }

    fn levels(self) -> LevelLayout {
        LevelLayout {
            values: 2 * padded(self.size),
            scale_group: BLOCK,
            row_bytes: self.row_bytes(),
            scales: Scales::PerHalf(self.scale_factors()),
            packing: Packing::CodesAndSigns(self),
        }
    }

    #[inline(always)]
    fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let (mut a, mut b) = (Room::new(), Room::new());
        let (a, b) = (a.zeros(self.size), b.zeros(self.size));
        clean(x, a);
        S::rotate(self.rotation(), a, b);
        let (norms, rest) = row[..self.row_bytes()].split_at_mut(NORM_BYTES);
        let (body, signs) = rest.split_at_mut(self.sign_offset() - NORM_BYTES);
        let mut codes = Room::new();
        let codes = codes.zeros(self.size);
        let scale = store_f16(rms::<S>(b), norms) * (1.0 / self.quantizer().unit());
        self.stage_1::<S>(b, scale, codes);
        self.packing().pack(codes, body);
        let [first, second] = self.projection();
        S::rotate(first, b, a);
        S::rotate(second, a, b);
        store_f16(rms::<S>(b), &mut norms[2..]);
        pack_signs(b, signs);
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
mod tests {
    use super::super::qjl::mean_magnitude_squared;
    use super::super::qjl::tests::{dot, statistics, wild};
    use super::*;
    use crate::isa::scalar;
    use crate::isa::tests::stepped;
    use crate::random::Noise;
    use crate::rotation;
    use crate::rotation::MAX_HEAD;
    use proptest::prelude::*;

    /// The squared error of stage 1 on N(0,1): what Lloyd-Max has at 8 and 4 levels.
    const STAGE_1: [(u32, f64); 2] = [(4, 0.0345), (3, 0.1175)];

    fn rows(f: Turbo, n: u64) -> impl Iterator<Item = (Vec<f32>, Vec<u8>)> {
        (0..n).map(move |seed| {
            let x = Noise::new(seed + 1).row(f.size());
            let mut row = vec![0; f.row_bytes()];
            scalar::encode(f.into(), &x, &mut row);
            (x, row)
        })
    }

    /// The centroids of the cells that the levels have are the levels: the condition of Lloyd and Max.
    #[test]
    fn levels_are_those_of_lloyd_and_max() {
        for q in [&QUANTIZER_2, &QUANTIZER_3] {
            let value = |i: usize| f64::from(q.table[i]) / f64::from(q.unit());
            let n = q.table.len();
            for i in 0..n {
                let low = if i == 0 { -9.0 } else { 0.5 * (value(i - 1) + value(i)) };
                let high = if i + 1 == n { 9.0 } else { 0.5 * (value(i) + value(i + 1)) };
                let (mut mass, mut moment) = (0.0, 0.0);
                for j in 0..20_000 {
                    let x = low + (high - low) * (f64::from(j) + 0.5) / 20_000.0;
                    mass += (-0.5 * x * x).exp();
                    moment += x * (-0.5 * x * x).exp();
                }
                // Levels are whole numbers: a hundredth of a standard deviation is what rounding costs.
                assert!((moment / mass - value(i)).abs() < 0.01, "{n} levels: {} and {}", moment / mass, value(i));
            }
        }
    }

    #[test]
    fn squared_errors_are_the_published_ones() {
        for (bits, stage_1) in STAGE_1 {
            let f = Turbo::new(bits, 128).unwrap();
            let (mut power, mut first, mut residual, mut whole, mut unbiased) = (0.0, 0.0, 0.0, 0.0, 0.0);
            for (x, row) in rows(f, 4000) {
                let mut without = row.clone();
                without[2..4].fill(0);
                let error = |y: &[f32]| x.iter().zip(y).map(|(&a, &b)| f64::from(a - b).powi(2)).sum::<f64>();
                let mut y = vec![0.0; 128];
                power += dot(&x, &x);
                scalar::decode(f.into(), &without, &mut y);
                first += error(&y);
                scalar::decode(f.into(), &row, &mut y);
                whole += error(&y);
                scalar::decode_key(f.into(), &row, &mut y);
                unbiased += error(&y);
                residual += f64::from(load_f16(&row[2..])).powi(2) * 128.0;
            }
            assert!((first / power / stage_1 - 1.0).abs() < 0.02, "{bits} bits: {}", first / power);
            assert!((residual / first - 1.0).abs() < 0.002, "{bits} bits: {residual} and {first}");
            // Of the residual the signs leave 1 - e^2; at their length without bias 1/e^2 - 1.
            let e2 = mean_magnitude_squared(128);
            assert!((whole / first - (1.0 - e2)).abs() < 0.01, "{bits} bits: {}", whole / first);
            assert!((unbiased / first - (1.0 / e2 - 1.0)).abs() < 0.01, "{bits} bits: {}", unbiased / first);
        }
    }

    #[test]
    fn inner_products_have_no_bias_and_the_variance_of_an_orthonormal_projection() {
        for (bits, stage_1) in STAGE_1 {
            let f = Turbo::new(bits, 128).unwrap();
            let (mut row, mut key) = (vec![0; f.row_bytes()], vec![0.0; 128]);
            let s = statistics(128, 100_000, 4, |q, k| {
                scalar::encode(f.into(), k, &mut row);
                scalar::decode_key(f.into(), &row, &mut key);
                dot(q, &key)
            });
            assert!(s.slope.0.abs() < 3.0 * s.slope.1, "{bits} bits: bias {:?}", s.slope);
            assert!(s.mean.0.abs() < 3.0 * s.mean.1, "{bits} bits: mean {:?}", s.mean);
            // Across the residual, which takes its own share of the cosine: k.r = |r|^2.
            let across = (1.0 - std::f64::consts::FRAC_2_PI) / (128.0 * mean_magnitude_squared(128));
            let want = across * stage_1 * (1.0 - s.cosine2 * stage_1);
            assert!((s.variance / want - 1.0).abs() < 0.05, "{bits} bits: {} instead of {want}", s.variance);
            // Below the formula of the paper, which is that of a Gaussian projection.
            let paper = std::f64::consts::FRAC_PI_2 / 128.0 * stage_1;
            assert!(s.variance < 0.4 * paper, "{bits} bits: {} of {paper}", s.variance);
        }
    }

    /// Stage 1 as it is, stage 2 with the paper's own Gaussian projection in f64: the paper's formula holds, and what the
    /// orthonormal one saves is not an artefact of stage 1.
    #[test]
    fn a_gaussian_projection_has_the_variance_of_the_paper() {
        for (bits, stage_1) in STAGE_1 {
            let f = Turbo::new(bits, 128).unwrap();
            let mut noise = Noise::new(5);
            let mut projection = vec![0.0f32; 128 * 128];
            let mut pair = 0;
            let s = statistics(128, 20_000, 6, |q, k| {
                if pair % 40 == 0 {
                    projection = noise.row(128 * 128);
                }
                pair += 1;
                let (mut row, mut first) = (vec![0; f.row_bytes()], vec![0.0; 128]);
                scalar::encode(f.into(), k, &mut row);
                row[2..4].fill(0);
                scalar::decode(f.into(), &row, &mut first);
                let residual: Vec<f32> = k.iter().zip(&first).map(|(a, b)| a - b).collect();
                let signs: f64 = projection.chunks_exact(128).map(|p| dot(p, q) * dot(p, &residual).signum()).sum();
                let norm = dot(&residual, &residual).sqrt();
                dot(q, &first) + norm * std::f64::consts::FRAC_PI_2.sqrt() / 128.0 * signs
            });
            let paper = std::f64::consts::FRAC_PI_2 / 128.0 * stage_1;
            assert!((s.variance / paper - 1.0).abs() < 0.2, "{bits} bits: {} instead of {paper}", s.variance);
        }
    }

    /// The whole format once more in f64, from the definitions.
    #[test]
    fn rows_agree_with_a_naive_encoder() {
        for (bits, size) in stepped(HEAD_SIZES.iter().flat_map(|&s| [(3, s), (4, s)])) {
            let f = Turbo::new(bits, size).unwrap();
            for (x, row) in rows(f, 12) {
                let (mut levels, mut signs) = (vec![0i8; size], vec![0i8; size]);
                let scales = f.stages(&row, &mut levels, &mut signs);
                let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                let rotated = rotation::tests::naive(Rotation::of(size).unwrap(), &wide);
                let q = f.quantizer();
                let norm = (rotated.iter().map(|v| v * v).sum::<f64>() / size as f64).sqrt();
                let scale = f64::from(half::f16::from_f64(norm).to_f32()) / f64::from(q.unit());
                assert!((f64::from(scales[0]) / scale - 1.0).abs() < 1e-6);
                let mut residual = Vec::new();
                for (i, &v) in rotated.iter().enumerate() {
                    let distance = |l: i8| (v / scale - f64::from(l)).abs();
                    let best = q.table.iter().copied().min_by(|&a, &b| distance(a).total_cmp(&distance(b))).unwrap();
                    // A value between two levels within float rounding may fall either way.
                    assert!(distance(levels[i]) < distance(best) + 1e-3, "{f:?}, value {i}");
                    residual.push(v - scale * f64::from(levels[i]));
                }
                let projected = rotation::tests::naive_projection(size, &residual);
                let norm = (residual.iter().map(|v| v * v).sum::<f64>() / size as f64).sqrt();
                assert!((f64::from(load_f16(&row[2..])) / norm - 1.0).abs() < 1e-3);
                for (i, &p) in projected.iter().enumerate() {
                    assert!(p.abs() < 1e-5 || (p < 0.0) == (signs[i] < 0), "{f:?}, sign {i} of {p}");
                }
            }
        }
    }

    #[test]
    fn sizes_are_the_published_ones() {
        let bytes = |bits, size| Turbo::new(bits, size).unwrap().row_bytes();
        assert_eq!(bytes(4, 128), 68);
        assert_eq!(bytes(3, 128), 52);
        assert_eq!(bytes(4, 80), 44);
        assert_eq!(bytes(3, 112), 46);
        assert_eq!(bytes(4, 576), 292);
        assert_eq!(Turbo::new(2, 64), None);
        assert_eq!(Turbo::new(4, 72), None);
    }

    proptest! {
        #[test]
        fn anything_encodes_and_any_bytes_decode(
            values in prop::collection::vec(wild(), MAX_HEAD),
            bytes in prop::collection::vec(any::<u8>(), 292),
            size in prop::sample::select(HEAD_SIZES.to_vec()),
            bits in prop::sample::select(vec![3u32, 4]),
        ) {
            let f = Turbo::new(bits, size).unwrap();
            let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; size]);
            scalar::encode(f.into(), &values[..size], &mut row);
            scalar::decode(f.into(), &row, &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
            scalar::decode_key(f.into(), &bytes[..f.row_bytes()], &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
        }

        #[test]
        fn error_is_relative_to_the_row(
            values in prop::collection::vec(-1.0f32..1.0, 128),
            scale in prop::sample::select(vec![1e-3f32, 1.0, 1e3]),
        ) {
            let x: Vec<f32> = values.iter().map(|v| v * scale).collect();
            let norm: f32 = x.iter().map(|v| v * v).sum();
            prop_assume!(norm > 1e-6 * scale * scale);
            for (bits, bound) in [(4u32, 0.06f32), (3, 0.12)] {
                let f = Turbo::new(bits, 128).unwrap();
                let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; 128]);
                scalar::encode(f.into(), &x, &mut row);
                scalar::decode(f.into(), &row, &mut y);
                let error: f32 = x.iter().zip(&y).map(|(a, b)| (a - b) * (a - b)).sum();
                prop_assert!(error <= bound * norm, "{bits} bits: {}", error / norm);
            }
        }
    }
}
