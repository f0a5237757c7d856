//! srft8, srft4, srft3, srft2: a rotated row as table codes with one scale per group.
//!
//! A row is the SRFT of one head of one cell (see [`crate::rotation`]), cut into groups of 32 values (16 where 32 does
//! not divide the head size). A value is stored as a code into a table of 8-bit levels and decodes to
//! `level * scale / 128`, with one scale per group, its sign included: 8 bits (see [`super::scales`]), for srft8 an f16.
//!
//! ```text
//! row    = scales: u8 x groups, padded to an even number, or f16 x groups | codes of chunk 0 | codes of chunk 1 | …
//! chunks = 64 values while 64 remain, then 32, then 16
//! 4 bit    byte j of c/2:  value j | value j+c/2 << 4
//! 2 bit    byte j of c/4:  value j | j+c/4 << 2 | j+2c/4 << 4 | j+3c/4 << 6
//! 3 bit    the two low bits as 2 bit, then c/8 bytes with the high bit of value i in bit i%8 of byte i/8
//! 8 bit    the level itself
//! ```
//!
//! So a vector unit widens a chunk with shifts and masks alone and values come out in order, and 64 high bits of a
//! 3-bit chunk are one mask register.
//!
//! Tables. The largest value of a group, sign included, maps to level -127; the other levels were fitted to
//! Gaussian groups of 32 (the sign trick makes the distribution lopsided, hence the lopsided tables). Mean squared error
//! on N(0,1): 4 bit 0.0057, 3 bit 0.024, 2 bit 0.107; absmax with an even grid: 0.0094 at 4 bits.
//!
//! Encoding a group: a few scales around that of the largest value are tried, and a few that map it to the other end of
//! the table; the one with the least squared error is kept. Scales are only those that can be stored, so codes fit the
//! scale that a reader finds. The least squared error shrinks values a little, by the same part in every group on
//! average, and attention averages noise away and bias not: so values are read as KAPPA times what was fitted.
//!
//! What is not a number counts as 0, what is beyond +-1e6 as +-1e6, and the scale saturates at its largest, so a bad row
//! stays finite and harms no other.

use super::levels::{expand, LevelLayout, Packing, Scales};
use super::scales::{code_below, code_scale, load_f16, store_f16, MAX_CODE};
use super::RowFormat;
use crate::domain::Domain;
use crate::lanes::{round_even, Simd, LANES};
use crate::room::Room;
use crate::rotation::{Rotation, HEAD_SIZES, MAX_HEAD};

/// Values that share a scale, where the head size allows.
pub const GROUP: usize = 32;

/// A decoded value is level * scale / SCALE_UNIT, which keeps the stored scale in the range of the values themselves.
pub const SCALE_UNIT: f32 = 128.0;

/// Groups of 8-bit levels below this are zero: f16 has no scale for them.
const SMALLEST: f32 = 1e-9;

/// A table and the search that belongs to it.
pub struct Levels<const N: usize> {
    /// The levels, ascending.
    pub table: [i8; N],
    /// Scales to try, in steps of their code from the one that maps the largest value to the first level; and from the
    /// one that maps it to the last.
    search: [&'static [i32]; 2],
    /// What fitting leaves of values is divided by this.
    pub(super) kappa: f32,
    /// The levels once more.
    values: [f32; N],
    /// Half way between level i-1 and level i.
    middles: [f32; N],
    /// 0, 1, 2, …
    codes: [f32; N],
}

impl<const N: usize> Levels<N> {
    pub(super) const fn new(table: [i8; N], search: [&'static [i32]; 2], kappa: f32) -> Self {
        let (mut values, mut middles, mut codes) = ([0.0; N], [0.0; N], [0.0; N]);
        let mut i = 0;
        while i < N {
            (values[i], codes[i]) = (table[i] as f32, i as f32);
            if i > 0 {
                middles[i] = 0.5 * (values[i - 1] + values[i]);
            }
            i += 1;
        }
        Levels { table, search, kappa, values, middles, codes }
    }
}

/// 4 bits.
pub static LEVELS_4: Levels<16> = Levels::new(
    [-127, -96, -76, -59, -45, -33, -21, -9, 3, 15, 28, 41, 56, 72, 92, 117],
    [&[-1, 0, 1], &[-1, 0, 1]],
    1.0059,
);
/// 3 bits.
pub static LEVELS_3: Levels<8> =
    Levels::new([-127, -77, -44, -17, 8, 34, 63, 101], [&[-2, -1, 0, 1], &[-3, -2, -1, 0]], 1.0251);
/// 2 bits.
pub static LEVELS_2: Levels<4> = Levels::new([-127, -44, 18, 88], [&[-5, -3, -2, -1], &[-7, -6, -5, -4]], 1.1079);

/// The row format: bits of a code and the head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Srft {
    bits: u32,
    size: usize,
}

impl Srft {
    /// None where no such format exists.
    pub fn new(bits: u32, size: usize) -> Option<Srft> {
        (matches!(bits, 2 | 3 | 4 | 8) && HEAD_SIZES.contains(&size)).then_some(Srft { bits, size })
    }

    /// Bits of a code.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Values of a group.
    pub fn scale_group(self) -> usize {
        if self.size.is_multiple_of(GROUP) {
            GROUP
        } else {
            GROUP / 2
        }
    }

    /// Groups of a row.
    pub fn scale_groups(self) -> usize {
        self.size / self.scale_group()
    }

    /// Bytes of the scales, which come first: rows are an even number of bytes.
    pub fn scale_bytes(self) -> usize {
        match self.bits {
            8 => 2 * self.scale_groups(),
            _ => self.scale_groups().next_multiple_of(2),
        }
    }

    /// What a level times its scale is multiplied by.
    pub fn unit(self) -> f32 {
        match self.bits {
            8 => 1.0 / SCALE_UNIT,
            4 => LEVELS_4.kappa / SCALE_UNIT,
            3 => LEVELS_3.kappa / SCALE_UNIT,
            _ => LEVELS_2.kappa / SCALE_UNIT,
        }
    }

    /// The rotation of this head size.
    pub fn rotation(self) -> &'static Rotation {
        Rotation::of(self.size).expect("checked by new")
    }

    /// [`RowFormat::encode`] of a rotated head.
    #[inline(always)]
    pub fn encode_rotated<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let (scales, body) = row[..self.row_bytes()].split_at_mut(self.scale_bytes());
        let (mut codes, group) = (Room::new(), self.scale_group());
        let codes: &mut [u8] = codes.zeros(self.size);
        scales.fill(0);
        for (g, (x, codes)) in x.chunks_exact(group).zip(codes.chunks_exact_mut(group)).enumerate() {
            match (self.bits, group) {
                (8, _) => _ = store_f16(encode_8::<S>(x, codes) * SCALE_UNIT, &mut scales[2 * g..]),
                (4, GROUP) => scales[g] = encode_group::<S, 16, 2>(&LEVELS_4, x, codes),
                (4, _) => scales[g] = encode_group::<S, 16, 1>(&LEVELS_4, x, codes),
                (3, GROUP) => scales[g] = encode_group::<S, 8, 2>(&LEVELS_3, x, codes),
                (3, _) => scales[g] = encode_group::<S, 8, 1>(&LEVELS_3, x, codes),
                (_, GROUP) => scales[g] = encode_group::<S, 4, 2>(&LEVELS_2, x, codes),
                _ => scales[g] = encode_group::<S, 4, 1>(&LEVELS_2, x, codes),
            }
        }
        self.pack(codes, body);
    }

    /// [`RowFormat::decode`] without the rotation back.
    #[inline(always)]
    pub fn decode_rotated(self, row: &[u8], x: &mut [f32]) {
        let (mut levels, mut scales) = (Room::new(), [0.0f32; MAX_HEAD / 16]);
        let levels = levels.zeros(self.size);
        self.unpack(row, levels, &mut scales);
        expand(levels, &scales, self.scale_group(), x);
    }

    /// Levels of a row, and what they are multiplied by.
    #[inline(always)]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        let (stored, body) = row[..self.row_bytes()].split_at(self.scale_bytes());
        for (g, scale) in scales.iter_mut().enumerate().take(self.scale_groups()) {
            let stored = if self.bits == 8 { load_f16(&stored[2 * g..]) } else { code_scale(stored[g]) };
            *scale = stored * self.unit();
        }
        for (level, code) in levels[..self.size].iter_mut().zip(self.codes(body)) {
            *level = match self.bits {
                8 => code as i8,
                4 => LEVELS_4.table[usize::from(code)],
                3 => LEVELS_3.table[usize::from(code)],
                _ => LEVELS_2.table[usize::from(code)],
            };
        }
    }

    /// The codes of a row's body, in the order of the values.
    #[inline(always)]
    pub(crate) fn codes(self, body: &[u8]) -> impl Iterator<Item = u8> + '_ {
        let bits = self.bits as usize;
        self.chunks().flat_map(move |(start, c)| {
            let bytes = &body[start * bits / 8..][..c * bits / 8];
            (0..c).map(move |i| match bits {
                8 => bytes[i],
                4 => bytes[i % (c / 2)] >> (4 * (i / (c / 2))) & 15,
                3 => two_bits(bytes, i, c) | (bytes[c / 4 + i / 8] >> (i % 8) & 1) << 2,
                _ => two_bits(bytes, i, c),
            })
        })
    }

    /// Codes, one a byte, to the body of a row.
    #[inline(always)]
    pub(crate) fn pack(self, codes: &[u8], body: &mut [u8]) {
        body.fill(0);
        for (start, c) in self.chunks() {
            let codes = &codes[start..start + c];
            let bytes = &mut body[start * self.bits as usize / 8..][..c * self.bits as usize / 8];
            match self.bits {
                8 => bytes.copy_from_slice(codes),
                4 => {
                    for (j, b) in bytes.iter_mut().enumerate() {
                        *b = codes[j] | codes[j + c / 2] << 4;
                    }
                }
                bits => {
                    let (low, high) = bytes.split_at_mut(c / 4);
                    for (j, b) in low.iter_mut().enumerate() {
                        *b = (0..4).fold(0, |b, part| b | (codes[j + part * c / 4] & 3) << (2 * part));
                    }
                    if bits == 3 {
                        for (i, b) in high.iter_mut().enumerate() {
                            *b = (0..8).fold(0, |b, bit| b | (codes[8 * i + bit] >> 2) << bit);
                        }
                    }
                }
            }
        }
    }

    /// (first value, values) of each chunk.
    pub fn chunks(self) -> impl Iterator<Item = (usize, usize)> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let c = [64, 32, 16].into_iter().find(|c| start + c <= self.size)?;
            start += c;
            Some((start - c, c))
        })
    }
}

impl RowFormat for Srft {
    fn size(self) -> usize {
        self.size
    }

    fn row_bytes(self) -> usize {
        self.scale_bytes() + self.size * self.bits as usize / 8
    }

    fn version(self) -> u32 {
        match self.bits {
            8 => 1,
            4 => 3,
            _ => 2,
        }
    }

    fn score_error(self) -> f32 {
        super::error_of_bits(self.bits)
    }

    fn domain(self) -> Domain {
        Domain::Rotated(self.rotation())
    }

    fn levels(self) -> LevelLayout {
        LevelLayout {
            values: self.size,
            scale_group: self.scale_group(),
            row_bytes: self.row_bytes(),
            scales: match self.bits {
                8 => Scales::PerGroup { step: 2, unit: self.unit() },
                _ => Scales::Codes { unit: self.unit(), halved: 0 },
            },
            packing: Packing::Codes(self),
        }
    }

    #[inline(always)]
    fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let (mut clean, mut rotated) = (Room::new(), Room::new());
        let (clean, rotated) = (clean.zeros(self.size), rotated.zeros(self.size));
        super::clean(x, clean);
        S::rotate(self.rotation(), clean, rotated);
        self.encode_rotated::<S>(rotated, row);
    }

    #[inline(always)]
    fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        let mut rotated = Room::new();
        let rotated = rotated.zeros(self.size);
        self.decode_rotated(row, rotated);
        S::rotate_back(self.rotation(), rotated, x);
    }
}

#[inline(always)]
fn two_bits(bytes: &[u8], i: usize, c: usize) -> u8 {
    bytes[i % (c / 4)] >> (2 * (i / (c / 4))) & 3
}

/// The value of largest magnitude, sign included; the positive one of two equals.
#[inline(always)]
fn signed_max<S: Simd, const V: usize>(x: &[S; V]) -> f32 {
    let (mut top, mut bottom) = (x[0], x[0]);
    for &x in &x[1..] {
        top = top.max(x);
        bottom = bottom.min(x);
    }
    let (top, bottom) = (top.largest(), bottom.smallest());
    if -bottom > top {
        bottom
    } else {
        top
    }
}

/// Codes of one group of V * 16 values, and the code of its scale.
#[inline(always)]
pub(super) fn encode_group<S: Simd, const N: usize, const V: usize>(
    levels: &Levels<N>,
    values: &[f32],
    codes: &mut [u8],
) -> u8 {
    let mut x = [S::splat(0.0); V];
    for (v, x) in x.iter_mut().enumerate() {
        *x = S::load(&values[v * LANES..]);
    }
    let largest = signed_max(&x);
    let mut search = ScaleSearch::new(&x);
    for (turn, tries) in levels.search.into_iter().enumerate() {
        let end = f32::from(levels.table[if turn == 0 { 0 } else { N - 1 }]);
        let sign = if (largest < 0.0) == (end < 0.0) { 0 } else { 0x80 };
        let first = code_below(largest.abs() * SCALE_UNIT / end.abs());
        for offset in tries {
            let code = (first + offset).clamp(1, i32::from(MAX_CODE)) as u8 | sign;
            search.attempt(code, code_scale(code), levels);
        }
    }
    let best = search.best;
    if best == 0 {
        codes.fill(0);
        return 0;
    }
    let inverse = S::splat(SCALE_UNIT / code_scale(best));
    for (v, &x) in x.iter().enumerate() {
        x.times(inverse).between(&levels.middles, &levels.codes).store_bytes(&mut codes[v * LANES..]);
    }
    best
}

/// Levels. (A closure would be called, since it does not have its caller's instructions.)
pub(super) trait Nearest {
    /// The level that is nearest to each value.
    fn nearest<S: Simd>(&self, x: S) -> S;
}

impl<const N: usize> Nearest for Levels<N> {
    #[inline(always)]
    fn nearest<S: Simd>(&self, x: S) -> S {
        x.between(&self.middles, &self.values)
    }
}

/// Looks for the scale that leaves a group the least squared error, sum(x^2) - gain.
pub(super) struct ScaleSearch<'x, S, const V: usize> {
    x: &'x [S; V],
    /// The code of the best scale so far; 0: none is better than zeros.
    pub best: u8,
    gain: f32,
}

impl<'x, S: Simd, const V: usize> ScaleSearch<'x, S, V> {
    #[inline(always)]
    pub fn new(x: &'x [S; V]) -> Self {
        ScaleSearch { x, best: 0, gain: 0.0 }
    }

    /// With what a reader finds for `code`.
    #[inline(always)]
    pub fn attempt(&mut self, code: u8, stored: f32, levels: &impl Nearest) {
        let (scale, inverse) = (stored / SCALE_UNIT, S::splat(SCALE_UNIT / stored));
        let (mut xq, mut qq) = (S::splat(0.0), S::splat(0.0));
        for &x in self.x {
            let q = levels.nearest(x.times(inverse));
            xq = x.fma(q, xq);
            qq = q.fma(q, qq);
        }
        let gain = scale * (2.0 * xq.sum() - scale * qq.sum());
        if gain > self.gain {
            (self.best, self.gain) = (code, gain);
        }
    }
}

/// 8 bits need no table and no search: the grid is even and fine.
#[inline(always)]
fn encode_8<S: Simd>(x: &[f32], codes: &mut [u8]) -> f32 {
    let mut top = S::splat(0.0);
    for x in x.chunks_exact(LANES) {
        top = S::load(x).abs().max(top);
    }
    let largest = top.largest();
    if largest < SMALLEST {
        codes.fill(0);
        return 0.0;
    }
    let inverse = S::splat(127.0 / largest);
    for (codes, x) in codes.chunks_exact_mut(LANES).zip(x.chunks_exact(LANES)) {
        round_even(S::load(x).times(inverse)).store_bytes(codes);
    }
    largest / 127.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::scalar;
    use crate::lanes::Lanes;
    use crate::random::Noise;
    use proptest::prelude::*;

    /// The encoder once more in f64, with plain loops over all scales that can be stored.
    fn naive_codes(levels: &[i8], x: &[f32]) -> (Vec<usize>, f64, f64) {
        let x: Vec<f64> = x.iter().map(|&v| v as f64).collect();
        let nearest = |y: f64| {
            (0..levels.len())
                .min_by(|&a, &b| (y - levels[a] as f64).abs().total_cmp(&(y - levels[b] as f64).abs()))
                .unwrap()
        };
        let fit = |code: u8| {
            let scale = f64::from(code_scale(code)) / 128.0;
            let codes: Vec<usize> = x.iter().map(|v| nearest(v / scale)).collect();
            let error: f64 = x.iter().zip(&codes).map(|(x, &c)| (x - levels[c] as f64 * scale).powi(2)).sum();
            (codes, scale, error)
        };
        (0..=255u8).filter(|code| code & 127 != 0).map(fit).min_by(|a, b| a.2.total_cmp(&b.2)).unwrap()
    }

    #[test]
    fn mean_squared_error_on_gaussian_rows() {
        for (bits, bound) in [(8, 0.00004), (4, 0.0058), (3, 0.0245), (2, 0.109)] {
            let f = Srft::new(bits, 128).unwrap();
            let (mut error, mut bias, mut power) = (0.0f64, 0.0f64, 0.0f64);
            let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; 128]);
            for seed in 0..4000 {
                let x = Noise::new(seed).row(128);
                scalar::encode(f.into(), &x, &mut row);
                scalar::decode(f.into(), &row, &mut y);
                for (&x, &y) in x.iter().zip(&y) {
                    error += (x as f64 - y as f64).powi(2);
                    bias += (x as f64) * (y as f64 - x as f64);
                    power += (x as f64).powi(2);
                }
            }
            let mse = error / (4000.0 * 128.0);
            assert!(mse <= bound, "{bits} bits: {mse}");
            // sum(x y) = sum(x^2): no shrinking towards zero.
            assert!((bias / power).abs() < 1e-3, "{bits} bits: bias {}", bias / power);
        }
    }

    /// The few scales that are tried are the best of all in most groups, and never far from it.
    #[test]
    fn codes_agree_with_the_naive_encoder() {
        fn check<const N: usize>(levels: &Levels<N>, apart: usize, worse: f64) {
            let (mut differ, mut error, mut least) = (0, 0.0, 0.0);
            for seed in 0..1000 {
                let x = Noise::new(seed).row(32);
                let mut codes = [0u8; 32];
                let scale = f64::from(code_scale(encode_group::<Lanes, N, 2>(levels, &x, &mut codes))) / 128.0;
                let (want, want_scale, want_error) = naive_codes(&levels.table, &x);
                differ +=
                    usize::from(scale != want_scale || codes.iter().zip(&want).any(|(&a, &b)| usize::from(a) != b));
                for (&x, &code) in x.iter().zip(&codes) {
                    error += (f64::from(x) - f64::from(levels.table[usize::from(code)]) * scale).powi(2);
                }
                least += want_error;
            }
            assert!(differ <= apart, "{N} levels: {differ} of 1000 groups differ");
            assert!(error <= worse * least, "{N} levels: {error} instead of {least}");
        }
        check(&LEVELS_4, 250, 1.01);
        check(&LEVELS_3, 150, 1.01);
        check(&LEVELS_2, 350, 1.02);
    }

    #[test]
    fn every_code_survives_packing() {
        for size in HEAD_SIZES {
            for bits in [2u32, 3, 4, 8] {
                let f = Srft::new(bits, size).unwrap();
                let codes: Vec<u8> = (0..size).map(|i| ((i * 37 + i / 7) % (1 << bits)) as u8).collect();
                let mut row = vec![0u8; f.row_bytes()];
                f.pack(&codes, &mut row[f.scale_bytes()..]);
                let (mut levels, mut scales) = (vec![0i8; size], vec![0.0; f.scale_groups()]);
                f.unpack(&row, &mut levels, &mut scales);
                for i in 0..size {
                    let want = match bits {
                        8 => codes[i] as i8,
                        4 => LEVELS_4.table[codes[i] as usize],
                        3 => LEVELS_3.table[codes[i] as usize],
                        _ => LEVELS_2.table[codes[i] as usize],
                    };
                    assert_eq!(levels[i], want, "size {size}, {bits} bits, value {i}");
                }
            }
        }
    }

    #[test]
    fn sizes_are_the_published_ones() {
        let bytes = |bits, size| Srft::new(bits, size).unwrap().row_bytes();
        assert_eq!(bytes(4, 64), 34);
        assert_eq!(bytes(4, 80), 46);
        assert_eq!(bytes(3, 112), 50);
        assert_eq!(bytes(2, 128), 36);
        assert_eq!(bytes(8, 576), 612);
        assert_eq!(Srft::new(5, 64), None);
        assert_eq!(Srft::new(4, 72), None);
    }

    fn wild() -> impl Strategy<Value = f32> {
        prop_oneof![
            6 => -4.0f32..4.0,
            1 => Just(0.0),
            1 => any::<f32>(),
            1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-42]),
        ]
    }

    proptest! {
        #[test]
        fn encoding_never_panics_and_stays_finite(
            values in prop::collection::vec(wild(), MAX_HEAD),
            size in prop::sample::select(HEAD_SIZES.to_vec()),
            bits in prop::sample::select(vec![2u32, 3, 4, 8]),
        ) {
            let f = Srft::new(bits, size).unwrap();
            let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; size]);
            scalar::encode(f.into(), &values[..size], &mut row);
            scalar::decode(f.into(), &row, &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
        }

        #[test]
        fn any_bytes_decode_to_finite_values(
            bytes in prop::collection::vec(any::<u8>(), 612),
            size in prop::sample::select(HEAD_SIZES.to_vec()),
            bits in prop::sample::select(vec![2u32, 3, 4, 8]),
        ) {
            let f = Srft::new(bits, size).unwrap();
            let mut y = vec![0.0; size];
            scalar::decode(f.into(), &bytes[..f.row_bytes()], &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
        }

        #[test]
        fn error_is_relative_to_the_row(
            values in prop::collection::vec(-1.0f32..1.0, 128),
            scale in prop::sample::select(vec![0.02f32, 1.0, 200.0]),
        ) {
            let x: Vec<f32> = values.iter().map(|v| v * scale).collect();
            let norm: f32 = x.iter().map(|v| v * v).sum();
            prop_assume!(norm > 1e-6 * scale * scale);
            for (bits, bound) in [(8u32, 2e-4f32), (4, 0.02), (3, 0.08), (2, 0.35)] {
                let f = Srft::new(bits, 128).unwrap();
                let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; 128]);
                scalar::encode(f.into(), &x, &mut row);
                scalar::decode(f.into(), &row, &mut y);
                let error: f32 = x.iter().zip(&y).map(|(a, b)| (a - b) * (a - b)).sum();
                // The smallest scale leaves that much of any row.
                prop_assert!(error <= bound * norm + 1e-3, "{bits} bits: {}", error / norm);
            }
        }
    }
}
