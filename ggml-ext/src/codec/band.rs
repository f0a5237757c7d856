//! Bands: rows whose values come in order of weight, coded with more bits where they weigh more.
//!
//! Keys that were multiplied by a model's own matrices (docs/calibration.md) have few components that decide scores and many
//! that hardly matter. A row is cut into bands of 32 values, each with its scale. Chunks of 64 values hold two of them,
//! the first coded with two bits more than the second:
//!
//! ```text
//! row      = scales: u8 x size / 32 | chunk 0 | chunk 1 | …
//! 5 and 3    4 low bits of the first band | 2 low bits of the second | the high bits of both, one per value
//! 4 and 2    4 bits of the first band | 2 bits of the second
//! 3 and 1    2 low bits of the first band | the high bits of both, which are all that the second has
//! ```
//!
//! Low bits are packed as those of [`super::srft`] in chunks of 32 values. A value is `level * scale / 128`.
//!
//! Which chunk has which widths is fixed for a mean width and a head size ([`Band::wide`]), and with it which component
//! goes where: [`Band::order`].

use super::levels::{expand, LevelLayout, Packing, Scales};
use super::scales::code_scale;
use super::srft::{encode_group, Levels, LEVELS_2, LEVELS_3, LEVELS_4, SCALE_UNIT};
use crate::lanes::Simd;
use crate::room::Room;
use crate::rotation::{HEAD_SIZES, MAX_HEAD};

/// Values of a band.
pub const BAND: usize = 32;

/// Values of a chunk: two bands.
pub const CHUNK: usize = 2 * BAND;

/// The most bands of a row.
pub const MAX_BANDS: usize = MAX_HEAD / BAND;

/// 5 bits.
pub static LEVELS_5: Levels<32> = Levels::new(
    [
        -127, -111, -96, -85, -76, -68, -61, -53, -46, -40, -33, -27, -21, -15, -9, -4, 2, 8, 14, 20, 26, 32, 38, 44,
        50, 57, 64, 72, 80, 89, 99, 111,
    ],
    [&[-1, 0, 1, 2], &[-1, 0, 1, 2]],
    1.0016,
);
/// 1 bit.
pub static LEVELS_1: Levels<2> = Levels::new([-127, 77], [&[-12, -10, -9, -7], &[-17, -15, -13, -11]], 1.0);

/// The levels of codes of 1 to 5 bits.
#[inline(always)]
pub fn levels_of(bits: u32) -> &'static [i8] {
    match bits {
        5 => &LEVELS_5.table,
        4 => &LEVELS_4.table,
        3 => &LEVELS_3.table,
        2 => &LEVELS_2.table,
        _ => &LEVELS_1.table,
    }
}

/// Rows of a mean width of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    bits: u32,
    size: usize,
}

impl Band {
    /// None where no such format exists: head sizes are multiples of 64.
    pub fn new(bits: u32, size: usize) -> Option<Band> {
        let served = HEAD_SIZES.contains(&size) && size.is_multiple_of(CHUNK);
        (matches!(bits, 2..=4) && served).then_some(Band { bits, size })
    }

    /// Mean bits of a code.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Values of a row.
    pub fn size(self) -> usize {
        self.size
    }

    /// Bands of a row, and bytes of its scales, which come first.
    pub fn bands(self) -> usize {
        self.size / BAND
    }

    /// Bytes of a row.
    pub fn row_bytes(self) -> usize {
        self.bands() + self.size * self.bits as usize / 8
    }

    /// Chunks whose first band has [`Band::wide`]'s first width. Those after them have its second.
    pub fn first_chunks(self) -> usize {
        let [first, second] = self.wide();
        let chunks = self.size / CHUNK;
        if first == second {
            chunks
        } else {
            chunks / 2
        }
    }

    /// Bits of the first band of a chunk, in the first half of the chunks and in the second: the other band has two less.
    pub fn wide(self) -> [u32; 2] {
        match self.bits {
            3 if self.size.is_multiple_of(2 * CHUNK) && self.size > 2 * CHUNK => [5, 3],
            bits => [bits + 1; 2],
        }
    }

    /// The first byte of a chunk, and the bits of its first band.
    pub fn chunk(self, i: usize) -> (usize, u32) {
        let ([first, second], half) = (self.wide(), self.first_chunks());
        let bytes = |wide: u32| (wide - 1) as usize * CHUNK / 8;
        match i.checked_sub(half) {
            None => (self.bands() + i * bytes(first), first),
            Some(i) => (self.bands() + half * bytes(first) + i * bytes(second), second),
        }
    }

    /// Bits of the codes of band i of a row.
    pub fn width(self, i: usize) -> u32 {
        self.chunk(i / 2).1 - 2 * (i as u32 % 2)
    }

    /// Which band of components in order of weight is the row's i-th.
    pub fn order(self) -> impl Iterator<Item = usize> {
        // Wide ones first, within each half of the chunks.
        let (half, chunks) = (self.first_chunks(), self.size / CHUNK);
        (0..chunks).flat_map(move |chunk| {
            let (first, count) = if chunk < half { (0, half) } else { (half, chunks - half) };
            let at = 2 * first + (chunk - first);
            [at, at + count]
        })
    }

    /// Encodes a row.
    #[inline(always)]
    pub fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let (scales, _) = row.split_at_mut(self.bands());
        let mut codes = Room::new();
        let codes: &mut [u8] = codes.zeros(self.size);
        for (i, (x, codes)) in x.chunks_exact(BAND).zip(codes.chunks_exact_mut(BAND)).enumerate().take(self.bands()) {
            scales[i] = match self.width(i) {
                5 => encode_group::<S, 32, 2>(&LEVELS_5, x, codes),
                4 => encode_group::<S, 16, 2>(&LEVELS_4, x, codes),
                3 => encode_group::<S, 8, 2>(&LEVELS_3, x, codes),
                2 => encode_group::<S, 4, 2>(&LEVELS_2, x, codes),
                _ => encode_group::<S, 2, 2>(&LEVELS_1, x, codes),
            };
        }
        for (i, codes) in codes.chunks_exact(CHUNK).enumerate() {
            let (at, wide) = self.chunk(i);
            pack(wide, codes, &mut row[at..]);
        }
    }

    /// Levels of a row, and what they are multiplied by.
    #[inline(always)]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        for (scale, &code) in scales.iter_mut().zip(&row[..self.bands()]) {
            *scale = code_scale(code) * self.unit();
        }
        for (i, levels) in levels[..self.size].chunks_exact_mut(CHUNK).enumerate() {
            let (at, wide) = self.chunk(i);
            for (v, level) in levels.iter_mut().enumerate() {
                let code = code(wide, &row[at..], v);
                *level = levels_of(wide - 2 * (v / BAND) as u32)[code];
            }
        }
    }

    /// Of what rows mean. Those with codes of 4 bits have the levels of srft4.
    pub fn version(self) -> u32 {
        match self.wide() {
            [4, _] => 3,
            _ => 2,
        }
    }

    /// The values of a row.
    #[inline(always)]
    pub fn decode(self, row: &[u8], x: &mut [f32]) {
        let (mut levels, mut scales) = (Room::new(), [0.0f32; MAX_BANDS]);
        let levels = levels.zeros(self.size);
        self.unpack(row, levels, &mut scales);
        expand(levels, &scales, BAND, x);
    }

    /// What a level times its scale is multiplied by. The first bands shall not shrink; the others have less to say.
    fn unit(self) -> f32 {
        match self.wide()[0] {
            5 => LEVELS_5.kappa / SCALE_UNIT,
            4 => LEVELS_4.kappa / SCALE_UNIT,
            _ => LEVELS_3.kappa / SCALE_UNIT,
        }
    }

    /// What rows unpack to.
    pub fn levels(self) -> LevelLayout {
        LevelLayout {
            values: self.size,
            scale_group: BAND,
            row_bytes: self.row_bytes(),
            scales: Scales::Codes { unit: self.unit() },
            packing: Packing::Bands(self),
        }
    }
}

/// Low bits of the two bands of a chunk.
const fn low_bits(wide: u32) -> [usize; 2] {
    match wide {
        5 | 4 => [4, 2],
        _ => [2, 0],
    }
}

/// Are there high bits?
const fn has_high(wide: u32) -> bool {
    wide != 4
}

/// Codes of a chunk, one a byte, to its bytes.
#[inline(always)]
fn pack(wide: u32, codes: &[u8], bytes: &mut [u8]) {
    let mut at = 0;
    for (band, bits) in codes.chunks_exact(BAND).zip(low_bits(wide)) {
        let count = BAND * bits / 8;
        for (j, byte) in bytes[at..at + count].iter_mut().enumerate() {
            let parts = BAND / count;
            *byte = (0..parts).fold(0, |b, part| b | (band[j + part * count] & ((1 << bits) - 1)) << (bits * part));
        }
        at += count;
    }
    if has_high(wide) {
        for (i, byte) in bytes[at..at + CHUNK / 8].iter_mut().enumerate() {
            let low = low_bits(wide)[8 * i / BAND];
            *byte = (0..8).fold(0, |b, bit| b | (codes[8 * i + bit] >> low & 1) << bit);
        }
    }
}

/// The code of value v of a chunk.
#[inline(always)]
fn code(wide: u32, bytes: &[u8], v: usize) -> usize {
    let (band, v_in_band) = (v / BAND, v % BAND);
    let [first, second] = low_bits(wide);
    let (bits, at) = if band == 0 { (first, 0) } else { (second, BAND * first / 8) };
    let mut code = 0;
    if bits > 0 {
        let count = BAND * bits / 8;
        code = usize::from(bytes[at + v_in_band % count]) >> (bits * (v_in_band / count)) & ((1 << bits) - 1);
    }
    if has_high(wide) {
        code |= usize::from(bytes[BAND * (first + second) / 8 + v / 8] >> (v % 8) & 1) << bits;
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::Lanes;
    use crate::random::Noise;

    fn all() -> impl Iterator<Item = Band> {
        (2..=4).flat_map(|bits| HEAD_SIZES.into_iter().filter_map(move |size| Band::new(bits, size)))
    }

    #[test]
    fn sizes_and_widths_are_the_published_ones() {
        assert_eq!(Band::new(3, 80), None);
        assert_eq!(Band::new(4, 64).unwrap().row_bytes(), 34);
        assert_eq!(Band::new(3, 128).unwrap().row_bytes(), 52);
        let widths = |bits, size| {
            let f = Band::new(bits, size).unwrap();
            let mut widths = vec![0; f.bands()];
            for (i, band) in f.order().enumerate() {
                widths[band] = f.width(i);
            }
            widths
        };
        assert_eq!(widths(4, 64), [5, 3]);
        assert_eq!(widths(3, 128), [4, 4, 2, 2]);
        assert_eq!(widths(3, 256), [5, 5, 3, 3, 3, 3, 1, 1]);
        assert_eq!(widths(2, 192), [3, 3, 3, 1, 1, 1]);
        for f in all() {
            let widths = widths(f.bits(), f.size());
            assert!(widths.is_sorted_by(|a, b| a >= b), "{f:?}: {widths:?}");
            assert_eq!(widths.iter().sum::<u32>() as usize, f.bits() as usize * f.bands());
            let (at, wide) = f.chunk(f.size() / CHUNK - 1);
            assert_eq!(at + (wide - 1) as usize * CHUNK / 8, f.row_bytes());
        }
    }

    #[test]
    fn every_code_survives_packing() {
        for wide in [5, 4, 3] {
            for seed in 0..64 {
                let width = |v: usize| wide - 2 * (v / BAND) as u32;
                let codes: Vec<u8> = (0..CHUNK).map(|v| ((v * 7 + seed) % (1 << width(v))) as u8).collect();
                let mut bytes = vec![0xaa; (wide - 1) as usize * CHUNK / 8];
                pack(wide, &codes, &mut bytes);
                assert!((0..CHUNK).all(|v| code(wide, &bytes, v) == usize::from(codes[v])), "{wide} bits");
            }
        }
    }

    /// On N(0,1), by the width of codes.
    #[test]
    fn mean_squared_error_of_bands() {
        for f in all().filter(|f| matches!(f.size(), 64 | 256)) {
            let (mut row, mut levels, mut scales) =
                (vec![0; f.row_bytes()], vec![0i8; f.size()], vec![0.0f32; f.bands()]);
            let mut errors = vec![0.0f64; f.bands()];
            for seed in 0..400 {
                let x = Noise::new(seed).row(f.size());
                f.encode::<Lanes>(&x, &mut row);
                f.unpack(&row, &mut levels, &mut scales);
                for (v, &x) in x.iter().enumerate() {
                    let error = x - f32::from(levels[v]) * scales[v / BAND];
                    errors[v / BAND] += f64::from(error * error) / (400.0 * BAND as f64);
                }
            }
            for (i, error) in errors.into_iter().enumerate() {
                let bits = f.width(i);
                let bound = [0.0, 0.36, 0.105, 0.0255, 0.0062, 0.0016][bits as usize];
                assert!(error < bound, "{f:?}, band {i} of {bits} bits: {error}");
            }
        }
    }
}
