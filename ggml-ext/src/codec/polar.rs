//! polar4, polar3: PolarQuant (arXiv 2502.02617): a rotated row in polar coordinates, blocks of sixteen values at a time.
//!
//! The rotation ([`crate::rotation`]) is the paper's random preconditioning. A block of sixteen becomes one radius and
//! fifteen angles by taking pairs again and again:
//!
//! ```text
//! level 1   8 pairs of values     angle atan2(y, x) in [0, 2 pi)           radius sqrt(x^2 + y^2)
//! level 2   4 pairs of radii      angle atan(r_right / r_left) in [0, pi/2]
//! level 3   2 pairs               the same
//! level 4   1 pair                the same                                 its radius is the norm of the block
//! ```
//!
//! After a rotation the distribution of the angles is known: uniform at level 1, proportional to sin(2 psi)^(2^(l-1) - 1)
//! at level l, all independent. So codebooks need no data and no scales: level 1 has 16 (polar4) or 8 (polar3) even
//! sectors, the others the four centroids that Lloyd's condition gives for the density. The radius is f16.
//!
//! ```text
//! row   = radii: f16 x d/16 | upper: 14 bits x d/16, tightly, low bits first | level 1: 32 (24) bits x d/16
//! upper   code of level 2, pair j, in bits 2j (j < 4); of level 3 in bits 8 + 2j (j < 2); of level 4 in bits 12
//! level 1 code of pair j in bits 4j (3j)
//! ```
//!
//! The norm of a block is kept, so of its square 2 - 2 E cos(error of direction) is lost, where E cos is the product of
//! that of the levels: 0.032 for polar4 and 0.069 for polar3, at 3.875 and 3.375 bits a value. (srft3 loses 0.024 at 3.5.)
//!
//! Scores. The vector of a block is radius * weight_j * (cos a_j, sin a_j) for its eight pairs, where weight_j is a product
//! of three cosines or sines. A query has a table of q_2j cos a + q_2j+1 sin a over the codes of each pair, made
//! once; a score is the sum of weight_j * radius * table_j[code], with the weights shared by all queries. No key
//! is rebuilt, and the query is not rounded. Cells lie in lanes, where a table of sixteen floats is one register; that
//! is why the codes of a block are words that sixteen cells can be transposed by.
//!
//! Values. For weighted sums a row becomes 8-bit levels with the radius as the scale of each sixteen, like any other type's.
//! All angles of a codebook mirror each other about pi/4, so the sine of a code is the cosine of 3 - code, and a
//! weight one of 64 products. Levels are weight * cosine in fixed point, the same bits everywhere; rounding them loses
//! 0.00005 of a block's square.
//!
//! Bad values: as in [`super::srft`].

use super::clean;
use super::levels::{LevelLayout, Packing, Scales};
use super::scales::{load_f16, store_f16};
use super::{RowFormat, Scorer};
use crate::domain::Domain;
use crate::lanes::Simd;
use crate::room::Room;
use crate::rotation::{Rotation, HEAD_SIZES, MAX_HEAD};

/// Values of a block.
pub const BLOCK: usize = 16;
/// Pairs of a block at level 1.
pub const PAIRS: usize = BLOCK / 2;
/// Entries of the table of a pair, whatever the bits: with 8 codes the second half repeats the first.
pub const TABLE: usize = 16;
/// Bits of the codes of levels 2 to 4 of a block.
pub const UPPER_BITS: usize = 14;

/// A level of a value is this times value / radius: the largest, 0.7363, stays below 128.
pub const LEVEL_UNIT: f32 = 172.0;

/// cos of the four centroids of levels 2, 3 and 4, descending; read backwards they are the sines.
pub const COSINES: [[f32; 4]; 3] = [
    [0.952_407_94, 0.805_676_2, 0.592_356_2, 0.304_826_37],
    [0.910_522_76, 0.781_091_1, 0.624_417_07, 0.413_458_98],
    [0.865_717_6, 0.761_021_9, 0.648_726_2, 0.500_532_8],
];

/// tan of the boundary between the first and the second cell of levels 2, 3 and 4. The second boundary is 1, the third the
/// inverse of the first.
const FIRST_TANGENT: [f32; 3] = [0.510_318_36, 0.613_541_94, 0.706_48];

/// The row format: bits of an angle of level 1 and the head size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polar {
    bits: u32,
    size: usize,
}

/// The codes of a block.
#[derive(Clone, Copy, Default)]
struct Codes {
    first: [u8; PAIRS],
    upper: u16,
}

impl Polar {
    /// None where no such format exists.
    pub fn new(bits: u32, size: usize) -> Option<Polar> {
        (matches!(bits, 3 | 4) && HEAD_SIZES.contains(&size)).then_some(Polar { bits, size })
    }

    /// Bits of an angle of level 1.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Blocks of a row.
    pub fn blocks(self) -> usize {
        self.size / BLOCK
    }

    /// Where the codes of levels 2 to 4 begin.
    pub fn upper_offset(self) -> usize {
        2 * self.blocks()
    }

    /// Where the codes of level 1 begin.
    pub fn first_offset(self) -> usize {
        self.upper_offset() + (UPPER_BITS * self.blocks()).div_ceil(8)
    }

    /// Bytes of the codes of level 1 of a block.
    pub fn first_bytes(self) -> usize {
        self.bits as usize
    }

    /// The rotation of this head size.
    pub fn rotation(self) -> &'static Rotation {
        Rotation::of(self.size).expect("checked by new")
    }

    /// [`RowFormat::encode`] of a rotated head.
    #[inline(always)]
    pub fn encode_rotated(self, x: &[f32], row: &mut [u8]) {
        const HALF: usize = MAX_HEAD / 2;
        let pairs = self.size / 2;
        let (mut right, mut up) = ([0.0f32; HALF], [0.0f32; HALF]);
        let (right, up) = (&mut right[..pairs], &mut up[..pairs]);
        for ((right, up), xy) in right.iter_mut().zip(up.iter_mut()).zip(x.chunks_exact(2)) {
            (*right, *up) = (xy[0], xy[1]);
        }
        let (mut first, mut radius) = ([0u8; HALF], [0.0f32; HALF]);
        // One simple thing a loop, so that each is taken sixteen at a time.
        let points = || right.iter().zip(up.iter());
        if self.bits == 4 {
            first.iter_mut().zip(points()).for_each(|(code, (&x, &y))| *code = sector_16(x, y));
        } else {
            first.iter_mut().zip(points()).for_each(|(code, (&x, &y))| *code = sector_8(x, y));
        }
        radius.iter_mut().zip(points()).for_each(|(radius, (&x, &y))| *radius = length(x, y));
        let mut upper = [[0u8; HALF / 2]; 3];
        for (level, codes) in upper.iter_mut().enumerate() {
            let n = pairs >> (level + 1);
            let (mut left, mut right) = ([0.0f32; HALF / 2], [0.0f32; HALF / 2]);
            for j in 0..n {
                (left[j], right[j]) = (radius[2 * j], radius[2 * j + 1]);
            }
            let low = FIRST_TANGENT[level];
            for j in 0..n {
                let (l, r) = (left[j], right[j]);
                codes[j] = u8::from(r > l * low) + u8::from(r > l) + u8::from(r * low > l);
                radius[j] = length(l, r);
            }
        }
        row[self.upper_offset()..self.row_bytes()].fill(0);
        for block in 0..self.blocks() {
            let mut codes = Codes::default();
            codes.first.copy_from_slice(&first[PAIRS * block..PAIRS * (block + 1)]);
            for (level, of_level) in upper.iter().enumerate() {
                let n = 4 >> level;
                for j in 0..n {
                    codes.upper |= u16::from(of_level[n * block + j]) << (UPPER_START[level] + 2 * j);
                }
            }
            self.put(row, block, codes);
            store_f16(radius[block], &mut row[2 * block..]);
        }
    }

    /// Writes codes into a row whose codes are zero.
    #[inline(always)]
    fn put(self, row: &mut [u8], block: usize, codes: Codes) {
        let mut word = 0u32;
        for (j, &code) in codes.first.iter().enumerate() {
            word |= u32::from(code) << (self.bits as usize * j);
        }
        let at = self.first_offset() + block * self.first_bytes();
        row[at..at + self.first_bytes()].copy_from_slice(&word.to_le_bytes()[..self.first_bytes()]);
        let (byte, shift) = (UPPER_BITS * block / 8, UPPER_BITS * block % 8);
        let bytes = (u32::from(codes.upper) << shift).to_le_bytes();
        for (to, &b) in row[self.upper_offset() + byte..self.first_offset()].iter_mut().zip(&bytes[..3]) {
            *to |= b;
        }
    }

    /// Reads the codes of a block.
    #[inline(always)]
    fn get(self, row: &[u8], block: usize) -> Codes {
        let at = self.first_offset() + block * self.first_bytes();
        let mut word = [0u8; 4];
        word[..self.first_bytes()].copy_from_slice(&row[at..at + self.first_bytes()]);
        let word = u32::from_le_bytes(word);
        let mut codes = Codes::default();
        for (j, code) in codes.first.iter_mut().enumerate() {
            *code = (word >> (self.bits as usize * j) & ((1 << self.bits) - 1)) as u8;
        }
        let (byte, shift) = (UPPER_BITS * block / 8, UPPER_BITS * block % 8);
        let mut bytes = [0u8; 4];
        for (b, &from) in bytes[..3].iter_mut().zip(&row[self.upper_offset() + byte..self.first_offset()]) {
            *b = from;
        }
        codes.upper = (u32::from_le_bytes(bytes) >> shift & ((1 << UPPER_BITS) - 1)) as u16;
        codes
    }

    /// [`RowFormat::decode`] without the rotation back.
    #[inline(always)]
    pub fn decode_rotated(self, row: &[u8], x: &mut [f32]) {
        for (block, x) in x[..self.size].chunks_exact_mut(BLOCK).enumerate() {
            let codes = self.get(row, block);
            let weights = weights(codes.upper, load_f16(&row[2 * block..]));
            for (j, xy) in x.chunks_exact_mut(2).enumerate() {
                let (cos, sin) = direction(self.bits, usize::from(codes.first[j]));
                (xy[0], xy[1]) = (weights[j] * cos, weights[j] * sin);
            }
        }
    }

    /// Levels of a row and the scale of each block of sixteen.
    #[inline(always)]
    pub fn unpack(self, row: &[u8], levels: &mut [i8], scales: &mut [f32]) {
        let table = self.level_table();
        for (block, levels) in levels[..self.size].chunks_exact_mut(BLOCK).enumerate() {
            scales[block] = load_f16(&row[2 * block..]) * (1.0 / LEVEL_UNIT);
            let codes = self.get(row, block);
            for (j, xy) in levels.chunks_exact_mut(2).enumerate() {
                let weight = FIXED_WEIGHTS[weight_index(codes.upper, j)];
                let (cos, sin) = table[usize::from(codes.first[j])];
                (xy[0], xy[1]) = (rounded_product(weight, cos) as i8, rounded_product(weight, sin) as i8);
            }
        }
    }

    /// LEVEL_UNIT times cosine and sine of the codes of level 1, rounded; the second half repeats where there are 8.
    #[inline(always)]
    pub fn level_table(self) -> &'static [(i16, i16); TABLE] {
        if self.bits == 4 {
            &LEVEL_TABLES[1]
        } else {
            &LEVEL_TABLES[0]
        }
    }

    /// f32 of the tables of a query.
    pub fn table_len(self) -> usize {
        self.size / 2 * TABLE
    }

    /// The tables of a rotated query, TABLE values for each pair: what every code of level 1 would contribute.
    #[inline(always)]
    pub fn tables(self, q: &[f32], out: &mut [f32]) {
        let directions: [(f32, f32); TABLE] = std::array::from_fn(|code| direction(self.bits, code));
        for (xy, out) in q[..self.size].chunks_exact(2).zip(out.chunks_exact_mut(TABLE)) {
            for (out, (cos, sin)) in out.iter_mut().zip(directions) {
                *out = xy[1].mul_add(sin, xy[0] * cos);
            }
        }
    }

    /// The score of a row by the tables of a query: the definition of the order of its sum.
    #[inline(always)]
    pub fn score(self, row: &[u8], tables: &[f32]) -> f32 {
        let mut sum = 0.0f32;
        for block in 0..self.blocks() {
            let codes = self.get(row, block);
            let weights = weights(codes.upper, load_f16(&row[2 * block..]));
            for j in 0..PAIRS {
                let table = &tables[(block * PAIRS + j) * TABLE..];
                sum = weights[j].mul_add(table[usize::from(codes.first[j])], sum);
            }
        }
        sum
    }
}

impl RowFormat for Polar {
    fn size(self) -> usize {
        self.size
    }

    fn row_bytes(self) -> usize {
        self.first_offset() + self.first_bytes() * self.blocks()
    }

    // Further off than scales and codes of as many bits (docs/types.md has the errors).
    fn score_error(self) -> f32 {
        if self.bits == 4 {
            0.18
        } else {
            0.26
        }
    }

    fn domain(self) -> Domain {
        Domain::Rotated(self.rotation())
    }

    fn levels(self) -> LevelLayout {
        LevelLayout {
            values: self.size,
            scale_group: BLOCK,
            row_bytes: self.row_bytes(),
            scales: Scales::PerGroup { step: 2, unit: 1.0 / LEVEL_UNIT },
            packing: Packing::Angles(self),
        }
    }

    fn scorer(self) -> Scorer {
        Scorer::Tables(self)
    }

    #[inline(always)]
    fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let (mut a, mut b) = (Room::new(), Room::new());
        let (a, b) = (a.zeros(self.size), b.zeros(self.size));
        clean(x, a);
        S::rotate(self.rotation(), a, b);
        self.encode_rotated(b, row);
    }

    #[inline(always)]
    fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        let mut rotated = Room::new();
        let rotated = rotated.zeros(self.size);
        self.decode_rotated(row, rotated);
        S::rotate_back(self.rotation(), rotated, x);
    }
}

/// Where the codes of levels 2, 3 and 4 begin among the upper bits.
const UPPER_START: [usize; 3] = [0, 8, 12];

/// sqrt(a^2 + b^2).
#[inline(always)]
fn length(a: f32, b: f32) -> f32 {
    b.mul_add(b, a * a).sqrt()
}

/// The sector of sixteen that (x, y) lies in, counted from the positive x axis against the clock.
#[inline(always)]
fn sector_16(x: f32, y: f32) -> u8 {
    // tan(pi/8)
    const TANGENT: f32 = 0.414_213_57;
    let (a, b) = (x.abs(), y.abs());
    let n = u8::from(b > a * TANGENT) + u8::from(b > a) + u8::from(b * TANGENT > a);
    by_quadrant(x, y, n, 16)
}

/// The same with eight sectors.
#[inline(always)]
fn sector_8(x: f32, y: f32) -> u8 {
    by_quadrant(x, y, u8::from(y.abs() > x.abs()), 8)
}

/// Sector n of the first quadrant, mirrored into the quadrant of (x, y).
#[inline(always)]
fn by_quadrant(x: f32, y: f32, n: u8, sectors: u8) -> u8 {
    match (x < 0.0, y < 0.0) {
        (false, false) => n,
        (true, false) => sectors / 2 - 1 - n,
        (true, true) => sectors / 2 + n,
        (false, true) => sectors - 1 - n,
    }
}

/// Cosine and sine of the middle of a sector; codes beyond the last begin again.
#[inline(always)]
const fn direction(bits: u32, code: usize) -> (f32, f32) {
    // Of the first quadrant: cos of (code + 1/2) of a sector.
    const OF_16: [f32; 4] = [0.980_785_25, 0.831_469_6, 0.555_570_24, 0.195_090_32];
    const OF_8: [f32; 2] = [0.923_879_5, 0.382_683_43];
    let quarter = 1usize << (bits - 2);
    let (quadrant, n) = (code / quarter % 4, code % quarter);
    let (cos, sin) = match bits {
        4 => (OF_16[n], OF_16[quarter - 1 - n]),
        _ => (OF_8[n], OF_8[quarter - 1 - n]),
    };
    match quadrant {
        0 => (cos, sin),
        1 => (-sin, cos),
        2 => (-cos, -sin),
        _ => (sin, -cos),
    }
}

/// For 3 and 4 bits.
static LEVEL_TABLES: [[(i16, i16); TABLE]; 2] = [level_table(3), level_table(4)];

const fn level_table(bits: u32) -> [(i16, i16); TABLE] {
    let (mut table, mut code) = ([(0, 0); TABLE], 0);
    while code < TABLE {
        let (cos, sin) = direction(bits, code);
        table[code] = (rounded(LEVEL_UNIT * cos), rounded(LEVEL_UNIT * sin));
        code += 1;
    }
    table
}

/// To the nearest, halves away from zero.
const fn rounded(x: f32) -> i16 {
    if x < 0.0 {
        (x - 0.5) as i16
    } else {
        (x + 0.5) as i16
    }
}

/// The codes that the weight of pair j is made of, mirrored where it takes the sine: level 4 in bits 0, 3 in 2, 2 in 4.
#[inline(always)]
pub fn weight_index(upper: u16, j: usize) -> usize {
    let code = |level: usize, at: usize, right: usize| {
        usize::from(upper >> (UPPER_START[level] + 2 * at) & 3) ^ (3 * (right & 1))
    };
    code(2, 0, j >> 2) | code(1, j >> 2, j >> 1) << 2 | code(0, j >> 1, j) << 4
}

/// What the pairs of a block are multiplied by.
#[inline(always)]
fn weights(upper: u16, radius: f32) -> [f32; PAIRS] {
    std::array::from_fn(|j| {
        let index = weight_index(upper, j);
        radius * COSINES[2][index & 3] * COSINES[1][index >> 2 & 3] * COSINES[0][index >> 4]
    })
}

/// The weights without the radius, 1.0 being 2^15.
pub static FIXED_WEIGHTS: [i16; 64] = {
    let (mut weights, mut i) = ([0; 64], 0);
    while i < 64 {
        weights[i] = fixed_weight(i);
        i += 1;
    }
    weights
};

const fn fixed_weight(index: usize) -> i16 {
    let (a, b, c) = (index & 3, index >> 2 & 3, index >> 4);
    rounded_product(rounded_product(fixed_cosine(2, a), fixed_cosine(1, b)), fixed_cosine(0, c))
}

/// An entry of [`COSINES`], 1.0 being 2^15.
#[inline(always)]
pub const fn fixed_cosine(level: usize, code: usize) -> i16 {
    rounded(32768.0 * COSINES[level][code])
}

/// a * b / 2^15, rounded: what `pmulhrsw` computes.
#[inline(always)]
const fn rounded_product(a: i16, b: i16) -> i16 {
    ((a as i32 * b as i32 + (1 << 14)) >> 15) as i16
}

#[cfg(test)]
mod tests {
    use super::super::qjl::tests::{dot, wild};
    use super::*;
    use crate::isa::scalar;
    use crate::random::Noise;
    use crate::rotation;
    use proptest::prelude::*;
    use std::f64::consts::{FRAC_PI_2, FRAC_PI_4, TAU};

    fn formats() -> impl Iterator<Item = Polar> {
        HEAD_SIZES.into_iter().flat_map(|size| [3, 4].into_iter().filter_map(move |bits| Polar::new(bits, size)))
    }

    /// Angles of the codebook of a level from 2 on.
    fn codebook(level: usize) -> [f64; 4] {
        COSINES[level - 2].map(|c| f64::from(c).acos())
    }

    /// The density of an angle of a level from 2 on, not normalized.
    fn density(level: usize, angle: f64) -> f64 {
        (2.0 * angle).sin().powi((1 << (level - 1)) - 1)
    }

    /// Integrals of density and of f times density over [low, high].
    fn integrals(level: usize, low: f64, high: f64, f: impl Fn(f64) -> f64) -> (f64, f64) {
        let step = (high - low) / 20_000.0;
        (0..20_000).fold((0.0, 0.0), |(mass, sum), i| {
            let x = low + (f64::from(i) + 0.5) * step;
            (mass + density(level, x) * step, sum + f(x) * density(level, x) * step)
        })
    }

    /// The bounds of the cells of a level from 2 on.
    fn bounds(level: usize) -> [f64; 5] {
        let c = codebook(level);
        [0.0, 0.5 * (c[0] + c[1]), FRAC_PI_4, 0.5 * (c[2] + c[3]), FRAC_PI_2]
    }

    #[test]
    fn codebooks_meet_the_condition_of_lloyd() {
        for level in 2..=4 {
            let (centers, bounds) = (codebook(level), bounds(level));
            for i in 0..4 {
                let (mass, moment) = integrals(level, bounds[i], bounds[i + 1], |x| x);
                assert!((moment / mass - centers[i]).abs() < 1e-5, "level {level}: {} {}", moment / mass, centers[i]);
                assert!((centers[i] + centers[3 - i] - FRAC_PI_2).abs() < 1e-6, "level {level} mirrors itself");
            }
            assert!(
                (bounds[1].tan() - f64::from(FIRST_TANGENT[level - 2])).abs() < 1e-6,
                "level {level}: {}",
                bounds[1].tan()
            );
        }
    }

    /// E cos of the error of an angle: at level 1 over even sectors, then over the cells of a level.
    fn mean_cosine(bits: u32, level: usize) -> f64 {
        if level == 1 {
            let half = TAU / f64::from(1 << bits) / 2.0;
            return half.sin() / half;
        }
        let (centers, bounds) = (codebook(level), bounds(level));
        let (mass, sum) = (0..4).fold((0.0, 0.0), |(mass, sum), i| {
            let (m, s) = integrals(level, bounds[i], bounds[i + 1], |x| (x - centers[i]).cos());
            (mass + m, sum + s)
        });
        sum / mass
    }

    #[test]
    fn relative_error_is_that_of_the_densities() {
        for (bits, published) in [(4, 0.0321), (3, 0.0694)] {
            let f = Polar::new(bits, 128).unwrap();
            let want = 2.0 - 2.0 * (1..=4).map(|level| mean_cosine(bits, level)).product::<f64>();
            assert!((want - published).abs() < 0.001, "{bits} bits: {want}");
            let (mut error, mut power) = (0.0, 0.0);
            let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; 128]);
            for seed in 0..4000 {
                let x = Noise::new(seed + 1).row(128);
                scalar::encode(f.into(), &x, &mut row);
                scalar::decode(f.into(), &row, &mut y);
                error += x.iter().zip(&y).map(|(&a, &b)| f64::from(a - b).powi(2)).sum::<f64>();
                power += dot(&x, &x);
            }
            assert!((error / power / want - 1.0).abs() < 0.02, "{bits} bits: {} instead of {want}", error / power);
        }
    }

    /// How often each code comes, of every level: exactly as the densities say on Gaussian rows, and nearly so where a few
    /// channels are far larger than the rest, of which the rotation makes a Gaussian nearly.
    #[test]
    fn codes_come_as_often_as_the_densities_say() {
        codes_come_as_often(0, 0.04, 0.01);
        codes_come_as_often(14, 0.08, 0.025);
    }

    fn codes_come_as_often(large_channels: usize, first_bound: f64, upper_bound: f64) {
        let f = Polar::new(4, 128).unwrap();
        let (mut first, mut upper) = ([0usize; 16], [[0usize; 4]; 3]);
        let mut noise = Noise::new(11);
        let mut row = vec![0; f.row_bytes()];
        for _ in 0..3000 {
            let mut x = noise.row(128);
            for _ in 0..large_channels {
                x[(noise.bits() >> 20) as usize % 128] *= 5.0;
            }
            scalar::encode(f.into(), &x, &mut row);
            for block in 0..f.blocks() {
                let codes = f.get(&row, block);
                for c in codes.first {
                    first[usize::from(c)] += 1;
                }
                for (level, counts) in upper.iter_mut().enumerate() {
                    for j in 0..4 >> level {
                        counts[usize::from(codes.upper >> (UPPER_START[level] + 2 * j) & 3)] += 1;
                    }
                }
            }
        }
        let total: usize = first.iter().sum();
        for (code, n) in first.iter().enumerate() {
            let share = *n as f64 / total as f64;
            assert!((share * 16.0 - 1.0).abs() < first_bound, "level 1, code {code}: {share}");
        }
        for level in 2..=4 {
            let (all, _) = integrals(level, 0.0, FRAC_PI_2, |_| 0.0);
            let (counts, bounds) = (upper[level - 2], bounds(level));
            let total: usize = counts.iter().sum();
            for i in 0..4 {
                let want = integrals(level, bounds[i], bounds[i + 1], |_| 0.0).0 / all;
                let got = counts[i] as f64 / total as f64;
                assert!((got - want).abs() < upper_bound, "level {level}, code {i}: {got}, wanted {want}");
            }
        }
    }

    /// The whole format once more in f64, with angles.
    #[test]
    fn rows_agree_with_a_naive_encoder() {
        for f in formats() {
            for seed in 0..8 {
                let x = Noise::new(seed + 100).row(f.size());
                let mut row = vec![0; f.row_bytes()];
                scalar::encode(f.into(), &x, &mut row);
                let mut got = vec![0.0; f.size()];
                f.decode_rotated(&row, &mut got);
                let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                let rotated = rotation::tests::naive(f.rotation(), &wide);
                for (block, x) in rotated.chunks_exact(BLOCK).enumerate() {
                    let (want, close) = naive_block(f.bits(), x);
                    for i in 0..BLOCK {
                        let error = (want[i] - f64::from(got[block * BLOCK + i])).abs();
                        // An angle between two codes within float rounding may fall either way.
                        assert!(close || error < 2e-3, "{f:?} block {block} value {i}: {error}");
                    }
                }
            }
        }
    }

    /// The reconstruction of a block, and whether an angle is too near to the bound of its cell to be sure of.
    fn naive_block(bits: u32, x: &[f64]) -> (Vec<f64>, bool) {
        let mut close = false;
        let sector = TAU / f64::from(1 << bits);
        let mut radii: Vec<f64> = x.chunks_exact(2).map(|p| p[0].hypot(p[1])).collect();
        let mut parts: Vec<Vec<f64>> = x
            .chunks_exact(2)
            .map(|p| {
                let place = p[1].atan2(p[0]).rem_euclid(TAU) / sector;
                close |= (place - place.round()).abs() < 1e-4;
                let angle = (place.floor() + 0.5) * sector;
                vec![angle.cos(), angle.sin()]
            })
            .collect();
        for level in 2..=4 {
            let centers = codebook(level);
            let mut next = Vec::new();
            for (r, p) in radii.chunks_exact(2).zip(parts.chunks_exact(2)) {
                let angle = r[1].atan2(r[0]);
                let mut order = centers.to_vec();
                order.sort_by(|a, b| (a - angle).abs().total_cmp(&(b - angle).abs()));
                close |= (order[1] - angle).abs() - (order[0] - angle).abs() < 1e-4;
                let (cos, sin) = (order[0].cos(), order[0].sin());
                next.push(p[0].iter().map(|v| v * cos).chain(p[1].iter().map(|v| v * sin)).collect());
            }
            radii = radii.chunks_exact(2).map(|r| r[0].hypot(r[1])).collect();
            parts = next;
        }
        (parts[0].iter().map(|v| v * radii[0]).collect(), close)
    }

    #[test]
    fn scores_by_tables_are_products_with_the_decoded_row() {
        let mut noise = Noise::new(12);
        for f in formats() {
            let (x, q) = (noise.row(f.size()), noise.row(f.size()));
            let (mut row, mut k) = (vec![0; f.row_bytes()], vec![0.0; f.size()]);
            scalar::encode(f.into(), &x, &mut row);
            f.decode_rotated(&row, &mut k);
            let mut tables = vec![0.0; f.size() / 2 * TABLE];
            f.tables(&q, &mut tables);
            let want = dot(&q, &k);
            let got = f64::from(f.score(&row, &tables));
            assert!((got - want).abs() < 1e-4 * (1.0 + want.abs()), "{f:?}: {got}, wanted {want}");
        }
    }

    #[test]
    fn levels_are_the_decoded_row_in_8_bits() {
        let mut noise = Noise::new(13);
        for f in formats() {
            let (mut error, mut power) = (0.0, 0.0);
            for _ in 0..20 {
                let x = noise.row(f.size());
                let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; f.size()]);
                let (mut levels, mut scales) = (vec![0i8; f.size()], vec![0.0; f.blocks()]);
                scalar::encode(f.into(), &x, &mut row);
                f.decode_rotated(&row, &mut y);
                f.unpack(&row, &mut levels, &mut scales);
                for i in 0..f.size() {
                    let got = f32::from(levels[i]) * scales[i / BLOCK];
                    assert!((got - y[i]).abs() < 1.2 * scales[i / BLOCK], "{f:?} value {i}: {got} and {}", y[i]);
                    error += f64::from(got - y[i]).powi(2);
                    power += f64::from(y[i]).powi(2);
                }
            }
            assert!(error / power < 1e-4, "{f:?}: {}", error / power);
        }
    }

    #[test]
    fn no_level_overflows() {
        for bits in [3, 4] {
            let table = Polar::new(bits, 64).unwrap().level_table();
            for index in 0..64 {
                for &(cos, sin) in table {
                    for v in [cos, sin] {
                        let level = rounded_product(fixed_weight(index), v);
                        assert!((-127..=127).contains(&level), "{level}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_code_survives_packing() {
        let mut noise = Noise::new(14);
        for f in formats() {
            let mut row = vec![0; f.row_bytes()];
            let all: Vec<Codes> = (0..f.blocks())
                .map(|_| Codes {
                    first: std::array::from_fn(|_| (noise.bits() >> 20) as u8 & ((1 << f.bits()) - 1)),
                    upper: (noise.bits() >> 20) as u16 & 0x3fff,
                })
                .collect();
            for (block, &codes) in all.iter().enumerate() {
                f.put(&mut row, block, codes);
            }
            for (block, codes) in all.iter().enumerate() {
                let got = f.get(&row, block);
                assert_eq!((got.first, got.upper), (codes.first, codes.upper), "{f:?} block {block}");
            }
            assert!(row[..f.upper_offset()].iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn sizes_are_the_published_ones() {
        let bytes = |bits, size| Polar::new(bits, size).unwrap().row_bytes();
        assert_eq!(bytes(4, 128), 62);
        assert_eq!(bytes(3, 128), 54);
        assert_eq!(bytes(4, 64), 31);
        assert_eq!(bytes(4, 80), 39);
        assert_eq!(bytes(3, 96), 41);
        assert_eq!(bytes(4, 576), 279);
        assert_eq!(Polar::new(2, 64), None);
        assert_eq!(Polar::new(4, 72), None);
    }

    proptest! {
        #[test]
        fn anything_encodes_and_any_bytes_decode(
            values in prop::collection::vec(wild(), MAX_HEAD),
            bytes in prop::collection::vec(any::<u8>(), 279),
            size in prop::sample::select(HEAD_SIZES.to_vec()),
            bits in prop::sample::select(vec![3u32, 4]),
        ) {
            let f = Polar::new(bits, size).unwrap();
            let (mut row, mut y) = (vec![0; f.row_bytes()], vec![0.0; size]);
            scalar::encode(f.into(), &values[..size], &mut row);
            scalar::decode(f.into(), &row, &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
            scalar::decode(f.into(), &bytes[..f.row_bytes()], &mut y);
            prop_assert!(y.iter().all(|v| v.is_finite()));
        }
    }
}
