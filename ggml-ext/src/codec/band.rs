//! Bands: rows whose values come in order of weight, coded with more bits where they weigh more.
//!
//! Keys that were multiplied by a model's own matrices (docs/calibration.md) have few components that decide scores and many
//! that hardly matter. A row is cut into bands of 32 values, each with its scale. Chunks of 64 values hold two of them,
//! the first coded with two bits more than the second:
//!
//! ```text
//! row      = scales: u8 x size / 32 | chunk 0 | chunk 1 | …
//! 5 and 3    byte v: the second band's value v | the first band's << 3
//! 4 and 2    4 bits of the first band | 2 bits of the second, packed as those of [`super::srft`] in chunks of 32 values
//! 3 and 1    byte v: values v | those 16 behind << 4, each the first band's | the second's << 3
//! ```
//!
//! So a register of bytes holds the codes of both bands, and a shift or a mask apart they are numbers in a table. A value is
//! `level * scale / 128`.
//!
//! Codes of 5 bits are a sign and a place in a table of sixteen magnitudes, so that looking one up takes a table of
//! sixteen and not of 32. Such levels are odd, their scale needs no sign, and the bit that it would have is half a step of
//! the scale ([`super::scales`]). That leaves the squared error that 32 free levels had with a sign (0.00146), with six scales to try
//! instead of eight. Even steps would need no table at all and leave a quarter more.
//!
//! Which chunk has which widths is fixed for a mean width and a head size ([`Band::wide`]), and with it which component
//! goes where: [`Band::order`].

use super::levels::{expand, LevelLayout, Packing, Scales};
use super::scales::{code_scale, half_step_code, half_step_scale, half_steps_below, MAX_HALF_STEPS, MIN_HALF_STEPS};
use super::srft::{encode_group, Levels, Nearest, ScaleSearch, LEVELS_2, LEVELS_3, LEVELS_4, SCALE_UNIT};
use crate::lanes::{Simd, LANES};
use crate::room::Room;
use crate::rotation::{HEAD_SIZES, MAX_HEAD};

/// Values of a band.
pub const BAND: usize = 32;

/// Values of a chunk: two bands.
pub const CHUNK: usize = 2 * BAND;

/// The most bands of a row.
pub const MAX_BANDS: usize = MAX_HEAD / BAND;

/// The levels of 5-bit codes without a sign; those with one have the complement, which is -1 - level.
pub const MAGNITUDES_5: [i8; 16] = [2, 8, 14, 20, 26, 32, 38, 44, 51, 58, 66, 75, 85, 96, 109, 126];

/// The sign of a 5-bit code.
const SIGN_5: u8 = 16;

/// Scales to try for 5 bits, in half steps from the one that maps the largest value to the end of the table.
const SEARCH_5: [i32; 6] = [-1, 0, 1, 2, 3, 4];

/// As [`Levels::kappa`].
const KAPPA_5: f32 = 1.0015;

/// 1 bit.
pub static LEVELS_1: Levels<2> = Levels::new([-127, 77], [&[-12, -10, -9, -7], &[-17, -15, -13, -11]], 1.0);

/// The levels of codes of 1 to 4 bits.
#[inline(always)]
pub fn levels_of(bits: u32) -> &'static [i8] {
    match bits {
        4 => &LEVELS_4.table,
        3 => &LEVELS_3.table,
        2 => &LEVELS_2.table,
        _ => &LEVELS_1.table,
    }
}

/// The level of a code.
#[inline(always)]
fn level_of(bits: u32, code: u8) -> i8 {
    match bits {
        5 if code & SIGN_5 != 0 => !MAGNITUDES_5[usize::from(code % SIGN_5)],
        5 => MAGNITUDES_5[usize::from(code)],
        _ => levels_of(bits)[usize::from(code)],
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
                5 => encode_5::<S>(x, codes),
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
        for (i, (scale, &code)) in scales.iter_mut().zip(&row[..self.bands()]).enumerate() {
            let stored = if self.width(i) == 5 { half_step_scale(code) } else { code_scale(code) };
            *scale = stored * self.unit();
        }
        for (i, levels) in levels[..self.size].chunks_exact_mut(CHUNK).enumerate() {
            let (at, wide) = self.chunk(i);
            for (v, level) in levels.iter_mut().enumerate() {
                *level = level_of(wide - 2 * (v / BAND) as u32, code(wide, &row[at..], v));
            }
        }
    }

    /// Of what rows mean.
    pub fn version(self) -> u32 {
        3
    }

    /// Groups among which those with even numbers have scales with half steps.
    fn halved(self) -> usize {
        match self.wide() {
            [5, _] => 2 * self.first_chunks(),
            _ => 0,
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
            5 => KAPPA_5 / SCALE_UNIT,
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
            scales: Scales::Codes { unit: self.unit(), halved: self.halved() },
            packing: Packing::Bands(self),
        }
    }
}

/// Codes of one band of 5 bits, and the code of its scale.
#[inline(always)]
fn encode_5<S: Simd>(values: &[f32], codes: &mut [u8]) -> u8 {
    let (mut largest, mut x) = (S::splat(0.0), [S::splat(0.0); BAND / LANES]);
    for (x, values) in x.iter_mut().zip(values.chunks_exact(LANES)) {
        *x = S::load(values);
        largest = x.abs().max(largest);
    }
    let mut search = ScaleSearch::new(&x);
    let first = half_steps_below(largest.largest() * SCALE_UNIT / 127.0);
    for offset in SEARCH_5 {
        let code = half_step_code((first + offset).clamp(MIN_HALF_STEPS, MAX_HALF_STEPS));
        search.attempt(code, half_step_scale(code), &Levels5);
    }
    let best = search.best;
    if best == 0 {
        codes.fill(0);
        return 0;
    }
    let inverse = S::splat(SCALE_UNIT / half_step_scale(best));
    for (&x, codes) in x.iter().zip(codes.chunks_exact_mut(LANES)) {
        let x = x.times(inverse).plus(S::splat(0.5));
        let place = x.abs().between(&MIDDLES_5, &PLACES_5);
        x.above(S::splat(0.0), place, place.plus(S::splat(f32::from(SIGN_5)))).store_bytes(codes);
    }
    best
}

/// The levels of 5 bits, which lie on both sides of -1/2, as far from it.
struct Levels5;

impl Nearest for Levels5 {
    #[inline(always)]
    fn nearest<S: Simd>(&self, x: S) -> S {
        let x = x.plus(S::splat(0.5));
        let distance = x.abs().between(&MIDDLES_5, &DISTANCES_5);
        x.above(S::splat(0.0), distance, distance.times(S::splat(-1.0))).plus(S::splat(-0.5))
    }
}

/// How far the levels of 5 bits are from -1/2, the middles between these, and 0, 1, 2, …
static DISTANCES_5: [f32; 16] = TABLES_5[0];
static MIDDLES_5: [f32; 16] = TABLES_5[1];
static PLACES_5: [f32; 16] = TABLES_5[2];

const TABLES_5: [[f32; 16]; 3] = {
    let (mut tables, mut i) = ([[0.0; 16]; 3], 0);
    while i < 16 {
        tables[0][i] = MAGNITUDES_5[i] as f32 + 0.5;
        tables[2][i] = i as f32;
        if i > 0 {
            tables[1][i] = 0.5 * (tables[0][i - 1] + tables[0][i]);
        }
        i += 1;
    }
    tables
};

/// Codes of a chunk, one a byte, to its bytes.
#[inline(always)]
fn pack(wide: u32, codes: &[u8], bytes: &mut [u8]) {
    let (first, second) = codes.split_at(BAND);
    match wide {
        5 => {
            for (byte, (first, second)) in bytes.iter_mut().zip(first.iter().zip(second)) {
                *byte = second | first << 3;
            }
        }
        4 => {
            let (low, high) = bytes.split_at_mut(BAND / 2);
            for (j, byte) in low.iter_mut().enumerate() {
                *byte = first[j] | first[j + BAND / 2] << 4;
            }
            for (j, byte) in high[..BAND / 4].iter_mut().enumerate() {
                *byte = (0..4).fold(0, |b, part| b | second[j + part * BAND / 4] << (2 * part));
            }
        }
        _ => {
            for (j, byte) in bytes[..BAND / 2].iter_mut().enumerate() {
                let both = |v: usize| first[v] | second[v] << 3;
                *byte = both(j) | both(j + BAND / 2) << 4;
            }
        }
    }
}

/// The code of value v of a chunk.
#[inline(always)]
fn code(wide: u32, bytes: &[u8], v: usize) -> u8 {
    let nibble = |bytes: &[u8], v: usize| bytes[v % (BAND / 2)] >> (4 * (v / (BAND / 2))) & 15;
    match (wide, v.checked_sub(BAND)) {
        (5, None) => bytes[v] >> 3,
        (5, Some(v)) => bytes[v] & 7,
        (4, None) => nibble(bytes, v),
        (4, Some(v)) => bytes[BAND / 2 + v % (BAND / 4)] >> (2 * (v / (BAND / 4))) & 3,
        (_, None) => nibble(bytes, v) & 7,
        (_, Some(v)) => nibble(bytes, v) >> 3,
    }
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
                assert!((0..CHUNK).all(|v| code(wide, &bytes, v) == codes[v]), "{wide} bits");
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
                let bound = [0.0, 0.36, 0.105, 0.0255, 0.0062, 0.0015][bits as usize];
                assert!(error < bound, "{f:?}, band {i} of {bits} bits: {error}");
            }
        }
    }
}
