//! delta8, delta4, delta3, band4, band3, band2: a key as its difference from a prediction.
//!
//! Neighbouring keys are alike: they share the bias of their projection, the slow channels of RoPE hardly turn from one
//! cell to the next, and text stays with its subject. What a row of 4-bit codes loses is in proportion to what it
//! codes, so coding the difference from a good guess is worth more than any table (measured in docs/types.md).
//!
//! Keys of delta are rotated; those of band come in a space of their model's own, see [`super::band`].
//!
//! A group is 64 consecutive cells of one head. It has an I-frame m; with u = key - m in that space,
//!
//! ```text
//! u_t = d_t + RHO u_(t-1)        a chained row
//! u_t = d_t                      a restart row: the first of a group, or one whose predecessor is gone or unlike it
//! u_t = d_t - m                  a row alone: a key that has nothing to do with the I-frame
//! ```
//!
//! and d_t is stored as srft or band store a row. A writer takes the one with the least to code, so a row is never coded
//! worse than srft would, whatever its neighbours hold. RHO below one forgets: what went wrong with a row is down to a
//! thousandth after twenty cells. Everything is linear, so scores need no key: with w_t = q.d_t + RHO w_(t-1) the score
//! is q.m + w_t.
//!
//! ```text
//! row     = scales | codes | its share of m: f16 x slots        slots = head size / 64, rounded up
//! m         value i lies in slot i % slots of row i / slots; what would lie beyond the end of the cache is 0
//! kind      bits 0 and 1 of the row's first slot:    0 empty    1 alone    2 restart    3 chained
//! I-frame   is there: bit 2 of the first slot of the group's first row
//! ```
//!
//! The lowest three bits of a slot are not part of m, which needs no precision: keys are coded against the m that a reader
//! finds. Memory that was cleared to zero is empty, and empty rows are keys of zeros.
//!
//! Any bytes decode: a row that says chained without a predecessor in its group counts as a restart row, what is not
//! finite counts as zero.

use super::band::Band;
use super::levels::LevelLayout;
use super::srft::Srft;
use super::RowFormat;
use crate::domain::Domain;
use crate::lanes::{Lanes, Simd, LANES};
use crate::room::Room;
use crate::rotation::MAX_HEAD;
use half::f16;

/// Cells of a group.
pub const GROUP_CELLS: usize = 64;

/// How much of the previous row's distance from m is expected to be there again.
pub const RHO: f32 = 0.7;

/// What coding differences leaves of a key's error, where keys are large: the root of delta4's KLD over srft4's.
const LEFT_BY_PREDICTION: f32 = 0.4;

/// An I-frame with a value beyond this is not used: it would take the precision of f32 from keys that are not like it.
const FRAME_LIMIT: f32 = 4096.0;

/// The kinds of rows, as the lowest bits of their first slot say them.
const KIND: u8 = 3;
const RESTART: u8 = 2;
const CHAINED: u8 = 3;
const ALONE: u8 = 1;
/// A bit of the first slot of a group's first row.
const FRAMED: u8 = 4;
/// The bits of a slot that are not part of m.
const FLAGS: u16 = 7;

/// What a calibrated transform and bands leave of the error of scores, besides: the root of band3's KLD over delta3's.
const LEFT_BY_BANDS: f32 = 0.7;

/// The row format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    residual: Residual,
}

/// How differences are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// delta8, delta4, delta3.
    Equal(Srft),
    /// band4, band3, band2.
    Bands(Band),
}

impl Residual {
    /// Values of a head.
    pub fn size(self) -> usize {
        match self {
            Residual::Equal(f) => f.size(),
            Residual::Bands(f) => f.size(),
        }
    }

    /// Mean bits of a code.
    pub fn bits(self) -> u32 {
        match self {
            Residual::Equal(f) => f.bits(),
            Residual::Bands(f) => f.bits(),
        }
    }

    /// Bytes of scales and codes.
    pub fn row_bytes(self) -> usize {
        match self {
            Residual::Equal(f) => f.row_bytes(),
            Residual::Bands(f) => f.row_bytes(),
        }
    }

    /// What they unpack to.
    pub fn levels(self) -> LevelLayout {
        match self {
            Residual::Equal(f) => f.levels(),
            Residual::Bands(f) => f.levels(),
        }
    }

    /// Encodes a difference, in the space that rows are stored in.
    #[inline(always)]
    pub fn encode<S: Simd>(self, d: &[f32], row: &mut [u8]) {
        match self {
            Residual::Equal(f) => f.encode_rotated::<S>(d, row),
            Residual::Bands(f) => f.encode::<S>(d, row),
        }
    }

    /// The way back.
    #[inline(always)]
    pub fn decode(self, row: &[u8], d: &mut [f32]) {
        match self {
            Residual::Equal(f) => f.decode_rotated(row, d),
            Residual::Bands(f) => f.decode(row, d),
        }
    }
}

/// What a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// Never written: a key of zeros.
    Empty,
    /// A difference from m.
    Restart,
    /// A difference from what m and the row before make expect.
    Chained,
    /// A key.
    Alone,
}

/// The kinds of a group's rows, row t in bit t.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Not empty.
    pub written: u64,
    /// Chained, and the row before is there.
    pub chained: u64,
    /// Alone.
    pub alone: u64,
}

impl Delta {
    /// None where no such format exists.
    pub fn new(bits: u32, size: usize) -> Option<Delta> {
        let residual = Residual::Equal(Srft::new(bits, size)?);
        matches!(bits, 3 | 4 | 8).then_some(Delta { residual })
    }

    /// The same with bands.
    pub fn banded(bits: u32, size: usize) -> Option<Delta> {
        Some(Delta { residual: Residual::Bands(Band::new(bits, size)?) })
    }

    /// How differences are stored, at the beginning of a row.
    pub fn residual(self) -> Residual {
        self.residual
    }

    /// The bands of its rows, if they have some: keys must then come by the matrices of their model.
    pub fn bands(self) -> Option<Band> {
        match self.residual {
            Residual::Equal(_) => None,
            Residual::Bands(f) => Some(f),
        }
    }

    /// Values of the I-frame that a row carries.
    pub fn slots(self) -> usize {
        self.size().div_ceil(GROUP_CELLS)
    }

    /// Encodes a key x of a group, in the space that rows are stored in, from the deviation of the row before where there is one and it helps.
    #[inline(always)]
    pub fn encode_key<S: Simd>(self, x: &[f32], m: &[f32], before: Option<&[f32]>, row: &mut [u8]) {
        let (mut y, mut d) = (Room::new(), Room::new());
        let (y, d) = (y.zeros(self.size()), d.zeros(self.size()));
        let zero = S::splat(0.0);
        let (mut alone, mut restart, mut chained) = (zero, zero, zero);
        for i in (0..self.size()).step_by(LANES) {
            let x = S::load(&x[i..]);
            let from_m = x.minus(S::load(&m[i..]));
            alone = x.fma(x, alone);
            restart = from_m.fma(from_m, restart);
            from_m.store(&mut y[i..]);
            if let Some(before) = before {
                let from_both = S::load(&before[i..]).fma(S::splat(-RHO), from_m);
                chained = from_both.fma(from_both, chained);
                from_both.store(&mut d[i..]);
            }
        }
        let (alone, restart, chained) = (alone.sum(), restart.sum(), chained.sum());
        let (kind, d) = if before.is_some() && chained < restart.min(alone) {
            (CHAINED, &*d)
        } else if restart <= alone {
            (RESTART, &*y)
        } else {
            (ALONE, &x[..self.size()])
        };
        self.residual.encode::<S>(d, row);
        let flags = &mut row[self.residual.row_bytes()];
        *flags = *flags & !KIND | kind;
    }

    /// Sixteen values of the deviation u of the row before become those of this row, which has these levels and this scale.
    #[inline(always)]
    pub fn follow(levels: &[i8; LANES], scale: f32, kind: RowKind, m: &[f32], u: &mut [f32; LANES]) {
        let d = levels.map(|level| f32::from(level) * scale);
        match kind {
            RowKind::Chained => u.iter_mut().zip(d).for_each(|(u, d)| *u = u.mul_add(RHO, d)),
            RowKind::Alone => u.iter_mut().zip(d).zip(m).for_each(|((u, d), m)| *u = d - m),
            _ => *u = d,
        }
    }

    /// What a row says it is.
    #[inline(always)]
    pub fn kind(self, row: &[u8]) -> RowKind {
        match row[self.residual.row_bytes()] & KIND {
            0 => RowKind::Empty,
            RESTART => RowKind::Restart,
            CHAINED => RowKind::Chained,
            _ => RowKind::Alone,
        }
    }

    /// The kinds of `rows` rows, as a reader takes them.
    ///
    /// # Safety
    /// `data` holds as many rows, `stride` bytes apart; there are at most GROUP_CELLS.
    #[inline(always)]
    pub unsafe fn flags<S: Simd>(self, data: *const u8, stride: usize, rows: usize) -> Flags {
        let mut words = [0u32; GROUP_CELLS];
        // SAFETY: the last codes of the caller's rows and their first slots.
        unsafe { words_of_rows::<S>(data.add(self.residual.row_bytes() - 2), stride, rows, &mut words) };
        let (mut high, mut low) = (0u64, 0u64);
        for (i, words) in words.chunks_exact(LANES).enumerate() {
            high |= u64::from(S::bits::<17>(words)) << (LANES * i);
            low |= u64::from(S::bits::<16>(words)) << (LANES * i);
        }
        let written = high | low;
        Flags { written, chained: high & low & written << 1, alone: low & !high }
    }

    /// Is there an I-frame in the group that begins with this row?
    ///
    /// # Safety
    /// It is one.
    #[inline(always)]
    pub unsafe fn has_frame(self, first_row: *const u8) -> bool {
        // SAFETY: the row's share of m follows the codes.
        unsafe { *first_row.add(self.residual.row_bytes()) & FRAMED != 0 }
    }

    /// Empties a row, whose share of m stays.
    ///
    /// # Safety
    /// It is one.
    pub unsafe fn empty(self, row: *mut u8) {
        let residual = self.residual.row_bytes();
        // SAFETY: scales and codes, and the first slot.
        unsafe {
            row.write_bytes(0, residual);
            *row.add(residual) &= !KIND;
        }
    }

    /// The I-frame of a group of `rows` rows: `m` takes `size` values.
    ///
    /// # Safety
    /// `data` holds as many rows, `stride` bytes apart; there are at most GROUP_CELLS.
    #[inline(always)]
    pub unsafe fn frame<S: Simd>(self, data: *const u8, stride: usize, rows: usize, m: &mut [f32]) {
        let mut stored = [0u16; MAX_HEAD + GROUP_CELLS];
        // SAFETY: the shares of rows below `rows`, or the end of the codes and a share; GROUP_CELLS shares are fewer
        // values than `stored` has.
        unsafe {
            let first = data.add(self.residual.row_bytes());
            if rows > 0 && self.has_frame(data) {
                let mut words = [0u32; GROUP_CELLS];
                match self.slots() {
                    1 => {
                        words_of_rows::<S>(first.sub(2), stride, rows, &mut words);
                        for (stored, word) in stored.iter_mut().zip(words) {
                            *stored = (word >> 16) as u16;
                        }
                    }
                    2 => {
                        words_of_rows::<S>(first, stride, rows, &mut words);
                        for (stored, word) in stored.chunks_exact_mut(2).zip(words) {
                            stored.copy_from_slice(&[word as u16, (word >> 16) as u16]);
                        }
                    }
                    3 => gather::<3>(first, stride, rows, &mut stored),
                    4 => gather::<4>(first, stride, rows, &mut stored),
                    5 => gather::<5>(first, stride, rows, &mut stored),
                    6 => gather::<6>(first, stride, rows, &mut stored),
                    8 => gather::<8>(first, stride, rows, &mut stored),
                    _ => gather::<9>(first, stride, rows, &mut stored),
                }
            }
        }
        for (m, &bits) in m[..self.size()].iter_mut().zip(&stored) {
            *m = widened(bits);
        }
    }

    /// Stores an I-frame in a group of `rows` rows, and gives `m` the values that are then there.
    ///
    /// # Safety
    /// As [`Delta::frame`].
    pub unsafe fn set_frame(self, m: &mut [f32], data: *mut u8, stride: usize, rows: usize) {
        let slots = self.slots();
        if m[..self.size()].iter().any(|m| m.abs() > FRAME_LIMIT) {
            m.fill(0.0);
        }
        for i in 0..rows * slots {
            let value = m[..self.size()].get(i).copied().unwrap_or(0.0);
            // To the nearest without those bits.
            let bits = f16::from_f32(value).to_bits().wrapping_add(FLAGS.div_ceil(2)) & !FLAGS;
            // SAFETY: slot i % slots of row i / slots.
            unsafe {
                let row = data.add(i / slots * stride + self.residual.row_bytes());
                let slot = row.cast::<u16>().add(i % slots);
                let kind = if i % slots == 0 { u16::from(KIND) } else { 0 };
                let kept = u16::from_le(slot.read_unaligned()) & kind;
                let framed = u16::from(FRAMED) * u16::from(i == 0);
                slot.write_unaligned((bits | kept | framed).to_le());
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.frame::<Lanes>(data, stride, rows, m) };
    }
}

impl RowFormat for Delta {
    fn size(self) -> usize {
        self.residual.size()
    }

    fn row_bytes(self) -> usize {
        self.residual.row_bytes() + 2 * self.slots()
    }

    fn version(self) -> u32 {
        match self.residual {
            Residual::Equal(f) => f.version(),
            Residual::Bands(f) => f.version(),
        }
    }

    fn score_error(self) -> f32 {
        match self.residual {
            Residual::Equal(f) => LEFT_BY_PREDICTION * f.score_error(),
            Residual::Bands(f) => LEFT_BY_BANDS * LEFT_BY_PREDICTION * super::error_of_bits(f.bits()),
        }
    }

    fn domain(self) -> Domain {
        match self.residual {
            Residual::Equal(f) => f.domain(),
            Residual::Bands(_) => Domain::Plain,
        }
    }

    fn levels(self) -> LevelLayout {
        self.residual.levels()
    }

    fn grouped(self) -> Option<Delta> {
        Some(self)
    }

    /// As the first row of a group without I-frame.
    #[inline(always)]
    fn encode<S: Simd>(self, x: &[f32], row: &mut [u8]) {
        let residual = self.residual.row_bytes();
        row[residual..self.row_bytes()].fill(0);
        match self.residual {
            Residual::Equal(f) => f.encode::<S>(x, row),
            Residual::Bands(f) => {
                let mut clean = Room::new();
                let clean = clean.zeros(self.size());
                super::clean(x, clean);
                f.encode::<S>(clean, row);
            }
        }
        row[residual] = ALONE;
    }

    /// As a key that has nothing to do with others.
    #[inline(always)]
    fn decode<S: Simd>(self, row: &[u8], x: &mut [f32]) {
        match self.residual {
            Residual::Equal(f) => f.decode::<S>(row, x),
            Residual::Bands(f) => f.decode(row, x),
        }
    }
}

/// RHO, RHO^2, …
const POWERS: [f32; LANES] = {
    let (mut powers, mut power, mut i) = ([0.0; LANES], 1.0f64, 0);
    while i < LANES {
        power *= RHO as f64;
        powers[i] = power as f32;
        i += 1;
    }
    powers
};

/// What four rows are worth to those 4, 8, 12 and 16 behind them.
const CARRIED: [f32; LANES] = {
    let (mut carried, mut i) = ([0.0; LANES], 0);
    while i < LANES {
        carried[i] = POWERS[i | 3];
        i += 1;
    }
    carried
};

/// Which rows of a group pass on to which: what the scores of a block have in common for all queries.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    written: u64,
    alone: u64,
    /// The row and so many rows before it are chained: [`RUNS`].
    runs: [u64; RUNS.len()],
    /// The row hangs on one of the last four of the sixteen before it, the one whose distance to it is a multiple of four.
    from_before: u64,
}

/// Rows before one that must be chained too for it to hang on the row 1, 2, 3, 4 and 8 before it.
const RUNS: [usize; 5] = [0, 1, 2, 3, 7];

impl Flags {
    /// As [`Chain::links`] needs it.
    #[inline(always)]
    pub fn chain(self) -> Chain {
        let one = self.chained;
        let two = one & one << 1;
        let three = two & one << 2;
        let four = two & two << 2;
        let eight = four & four << 4;
        let (twelve, sixteen) = (eight & four << 8, eight & eight << 8);
        let fours = 0x000f_000f_000f_000f;
        let from_before = four & fours | eight & fours << 4 | twelve & fours << 8 | sixteen & fours << 12;
        Chain { written: self.written, alone: self.alone, runs: [one, two, three, four, eight], from_before }
    }
}

impl Chain {
    /// Where each row hangs on the one before, but perhaps the second: most groups are written in order, and their first key is their
    /// I-frame, so that the second has nothing to gain from it.
    #[inline(always)]
    pub fn whole(&self) -> Option<Whole> {
        let whole = Whole { first_alone: self.alone & 1 != 0, first_passes: self.runs[0] & 2 != 0 };
        (self.runs[0] | 3 == u64::MAX && self.alone & !1 == 0 && self.written == u64::MAX).then_some(whole)
    }

    /// What rows pass on to each other, where they are not [`Whole`].
    #[inline(always)]
    pub fn links<S: Simd>(&self) -> Broken {
        let (mut before, mut carried) = ([[0.0; GROUP_CELLS]; RUNS.len()], [0.0; GROUP_CELLS]);
        for i in (0..GROUP_CELLS).step_by(LANES) {
            for (k, before) in before.iter_mut().enumerate() {
                only::<S>(self.runs[k] >> i, S::splat(POWERS[RUNS[k]])).store(&mut before[i..]);
            }
            only::<S>(self.from_before >> i, S::load(&CARRIED)).store(&mut carried[i..]);
        }
        Broken { written: self.written, alone: self.alone, before, carried }
    }
}

/// `x` where there are bits, else 0.
#[inline(always)]
fn only<S: Simd>(bits: u64, x: S) -> S {
    x.fma_where(bits as u16, S::splat(1.0), S::splat(0.0))
}

/// What rows of a group take of others, of sixteen rows from i on; 0 where they do not hang on them.
pub trait Links {
    /// Of the differences of the rows 1, 2 and 3 before (k = 0, 1, 2), and of what the rows 4 and 8 before (3, 4) have come to.
    fn before<S: Simd>(&self, k: usize, i: usize) -> S;
    /// Of what the last four of the sixteen before have come to, each of the one whose distance is a multiple of four.
    fn carried<S: Simd>(&self, i: usize) -> S;

    /// Scores of differences become scores of keys: w_t = q.d_t + RHO w_(t-1), plus `base` = q.m; 0 for empty rows.
    fn scores<S: Simd>(&self, scores: &mut [f32; GROUP_CELLS], base: f32);
}

/// Each row hangs on the one before, but the first, and perhaps the second.
pub struct Whole {
    first_alone: bool,
    first_passes: bool,
}

impl Links for Whole {
    #[inline(always)]
    fn before<S: Simd>(&self, k: usize, _i: usize) -> S {
        S::splat(POWERS[RUNS[k]])
    }

    #[inline(always)]
    fn carried<S: Simd>(&self, _i: usize) -> S {
        S::load(&CARRIED)
    }

    #[inline(always)]
    fn scores<S: Simd>(&self, scores: &mut [f32; GROUP_CELLS], base: f32) {
        let (one, mut first) = (S::splat(1.0), S::load(&scores[..]));
        let of_first = if self.first_alone { scores[0] } else { scores[0] + base };
        if !self.first_passes {
            first = first.fma_where(0xfffe, one, S::splat(0.0));
        } else if self.first_alone {
            first = S::splat(-base).fma_where(1, one, first);
        }
        pass_on(self, first, scores, base);
        scores[0] = of_first;
    }
}

/// As the flags say.
pub struct Broken {
    written: u64,
    alone: u64,
    before: [[f32; GROUP_CELLS]; RUNS.len()],
    carried: [f32; GROUP_CELLS],
}

impl Links for Broken {
    #[inline(always)]
    fn before<S: Simd>(&self, k: usize, i: usize) -> S {
        S::load(&self.before[k][i..])
    }

    #[inline(always)]
    fn carried<S: Simd>(&self, i: usize) -> S {
        S::load(&self.carried[i..])
    }

    #[inline(always)]
    fn scores<S: Simd>(&self, scores: &mut [f32; GROUP_CELLS], base: f32) {
        if self.alone != 0 {
            for i in (0..GROUP_CELLS).step_by(LANES) {
                let w = S::load(&scores[i..]);
                S::splat(-base).fma_where((self.alone >> i) as u16, S::splat(1.0), w).store(&mut scores[i..]);
            }
        }
        pass_on(self, S::load(&scores[..]), scores, base);
        if self.written != u64::MAX {
            for i in (0..GROUP_CELLS).step_by(LANES) {
                only(self.written >> i, S::load(&scores[i..])).store(&mut scores[i..]);
            }
        }
    }
}

/// Sixteen rows at a time: what the three rows before a row bring, by loads that overlap, which nothing has to be shuffled for; steps over
/// 4 and 8 rows within the sixteen; and what the last four of the sixteen before have come to. `first` are the first
/// sixteen scores.
#[inline(always)]
fn pass_on<S: Simd>(links: &impl Links, first: S, scores: &mut [f32; GROUP_CELLS], base: f32) {
    let mut near = [first; GROUP_CELLS / LANES];
    near[0] = near[0].shifted::<1>().fma(links.before(0, 0), near[0]);
    near[0] = near[0].shifted::<2>().fma(links.before(1, 0), near[0]);
    for n in 1..GROUP_CELLS / LANES {
        let i = n * LANES;
        let one = S::load(&scores[i - 1..]).fma(links.before(0, i), S::load(&scores[i..]));
        let two = S::load(&scores[i - 2..]).fma(links.before(1, i), one);
        near[n] = S::load(&scores[i - 3..]).fma(links.before(2, i), two);
    }
    let mut last = S::splat(0.0);
    for (n, &near) in near.iter().enumerate() {
        let i = n * LANES;
        let four = near.shifted::<4>().fma(links.before(3, i), near);
        let eight = four.shifted::<8>().fma(links.before(4, i), four);
        let all = if n == 0 { eight } else { last.fma(links.carried(i), eight) };
        last = all.last_four();
        all.plus(S::splat(base)).store(&mut scores[i..]);
    }
}

/// The value of a slot, an f16 with flags, in steps that a vector unit has everywhere; what is not finite becomes 0.
#[inline(always)]
fn widened(slot: u16) -> f32 {
    let bits = slot & !FLAGS;
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let x = f32::from_bits(magnitude.to_bits() | u32::from(bits & 0x8000) << 16);
    if bits & 0x7c00 == 0x7c00 {
        0.0
    } else {
        x
    }
}

/// A word of each of `rows` rows; those of others are left alone.
#[inline(always)]
unsafe fn words_of_rows<S: Simd>(data: *const u8, stride: usize, rows: usize, words: &mut [u32; GROUP_CELLS]) {
    // SAFETY: the caller's rows.
    unsafe {
        for t in (0..rows / LANES * LANES).step_by(LANES) {
            S::words(data.add(t * stride), stride, &mut words[t..]);
        }
        for (t, word) in words[..rows].iter_mut().enumerate().skip(rows / LANES * LANES) {
            *word = u32::from_le(data.add(t * stride).cast::<u32>().read_unaligned());
        }
    }
}

/// SLOTS 16-bit values from each of `rows` places, one after the other.
#[inline(always)]
unsafe fn gather<const SLOTS: usize>(first: *const u8, stride: usize, rows: usize, out: &mut [u16]) {
    for (t, out) in out.chunks_exact_mut(SLOTS).take(rows).enumerate() {
        // SAFETY: the caller's rows; byte-wise, alignment does not matter.
        let share = unsafe { first.add(t * stride).cast::<[u16; SLOTS]>().read_unaligned() };
        out.copy_from_slice(&share.map(u16::from_le));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::scalar;
    use proptest::prelude::*;

    #[test]
    fn halves_widen_exactly() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits & 0xfff8);
            let want = if x.is_finite() { x.to_f32() } else { 0.0 };
            assert_eq!(widened(bits).to_bits(), want.to_bits(), "{bits:#06x}");
        }
    }

    #[test]
    fn a_row_by_itself_is_a_group_of_one() {
        for size in crate::rotation::HEAD_SIZES {
            let format = Delta::new(4, size).unwrap();
            let key = crate::random::Noise::new(size as u64).row(size);
            let mut row = vec![0xaau8; format.row_bytes()];
            scalar::encode(format.into(), &key, &mut row);
            let (mut alone, mut grouped) = (vec![0.0; size], vec![0.0; size]);
            scalar::decode(format.into(), &row, &mut alone);
            crate::groups::decode(format, &crate::isa::scalar::KERNELS, &row, &mut grouped);
            let norm = key.iter().map(|x| x * x).sum::<f32>();
            for decoded in [&alone, &grouped] {
                let error = key.iter().zip(decoded).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
                assert!(error < 0.012 * norm, "{size}: {error} of {norm}");
            }
            assert!(alone.iter().zip(&grouped).all(|(a, b)| (a - b).abs() < 1e-5), "{size}");
        }
    }

    proptest! {
        #[test]
        fn scores_pass_on_as_defined(
            dots in prop::collection::vec(-10.0f32..10.0, GROUP_CELLS),
            high in any::<u64>(),
            low in any::<u64>(),
            order in 0..3,
            base in -5.0f32..5.0,
        ) {
            // Most caches are written in order.
            let (high, low) = match order {
                0 => (high, low),
                1 => (u64::MAX, high | low),
                // The first may be a row alone, and the second a restart row.
                _ => (u64::MAX << (low & 1), u64::MAX ^ low & 2),
            };
            let flags =
                Flags { written: high | low, chained: high & low & (high | low) << 1, alone: low & !high };
            let mut scores: [f32; GROUP_CELLS] = dots.clone().try_into().unwrap();
            let chain = flags.chain();
            prop_assert!(order < 2 || chain.whole().is_some());
            let whole = chain.whole().map(|links| {
                let mut whole = scores;
                links.scores::<Lanes>(&mut whole, base);
                whole
            });
            chain.links::<Lanes>().scores::<Lanes>(&mut scores, base);
            for (t, whole) in whole.iter().flatten().enumerate() {
                prop_assert!((whole - scores[t]).abs() < 1e-5, "row {}: {} and {}", t, whole, scores[t]);
            }
            let mut w = 0.0f64;
            for t in 0..GROUP_CELLS {
                let is = |mask: u64| mask >> t & 1 != 0;
                w = f64::from(dots[t]) + if is(flags.chained) { f64::from(RHO) * w } else { 0.0 };
                w -= if is(flags.alone) { f64::from(base) } else { 0.0 };
                let want = if is(flags.written) { w + f64::from(base) } else { 0.0 };
                prop_assert!((f64::from(scores[t]) - want).abs() < 1e-4, "row {}: {} for {}", t, scores[t], want);
            }
        }
    }
}
