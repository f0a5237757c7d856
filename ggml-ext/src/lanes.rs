//! Sixteen f32 lanes: the order in which every sum of this crate is taken.
//!
//! A format is only defined when its arithmetic is, so sums run over 16 lanes with fused multiply-add and end in
//! one fixed tree. [`Lanes`] is that definition in plain Rust; each instruction set has a type of its own behind
//! [`Simd`], and since none of them reorders anything, code written on the trait gives the same bits everywhere.

use crate::rotation::Rotation;
use half::f16;

/// The number of lanes.
pub const LANES: usize = 16;

/// Sixteen f32 in an instruction set's own registers.
///
/// Methods are inlined into functions that enable the instruction set; a value of such a type must only be used there.
pub trait Simd: Copy {
    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// The same, for one of more constants than there are registers: made once, and read where it is used from then on.
    #[inline(always)]
    fn constant(x: f32) -> Self {
        Self::splat(x)
    }
    /// The first sixteen values of `x`.
    fn load(x: &[f32]) -> Self;
    /// Sixteen 16-bit floats.
    ///
    /// # Safety
    /// They are there.
    unsafe fn load_halves(x: *const u8) -> Self;
    /// Into the first sixteen values of `x`.
    fn store(self, x: &mut [f32]);
    /// Lanes that hold whole numbers, as bytes.
    fn store_bytes(self, x: &mut [u8]);
    /// `self * b`.
    fn times(self, b: Self) -> Self;
    /// `self / b`.
    fn over(self, b: Self) -> Self;
    /// `self + b`.
    fn plus(self, b: Self) -> Self;
    /// `self - b`.
    fn minus(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// The bits of each lane, shifted up into the exponent: 2^(n - 127) where the lowest of them are n, below 255; 0 for n = 0.
    fn power_of_lowest_bits(self) -> Self;
    /// The larger of each pair; `b` where there is a NaN.
    fn max(self, b: Self) -> Self;
    /// The smaller of each pair; `b` where there is a NaN.
    fn min(self, b: Self) -> Self;
    /// Magnitudes.
    fn abs(self) -> Self;
    /// `yes` where self > limit, else `no`.
    fn above(self, limit: Self, yes: Self, no: Self) -> Self;
    /// values[i], where i is how many of limits[1..] are below the lane. Limits ascend; N is 16, 8, 4 or 2.
    #[inline(always)]
    fn between<const N: usize>(self, limits: &[f32; N], values: &[f32; N]) -> Self {
        let mut value = Self::splat(values[0]);
        for i in 1..N {
            value = self.above(Self::splat(limits[i]), Self::splat(values[i]), value);
        }
        value
    }
    /// `self * b + c` where the lane's bit of `mask` is set, else `c`.
    fn fma_where(self, mask: u16, b: Self, c: Self) -> Self;
    /// Lane i becomes lane i + N, for N = 1, 2, 4 or 8; zeros below.
    fn shifted<const N: usize>(self) -> Self;
    /// The last four lanes, four times.
    fn last_four(self) -> Self;
    /// Bit BIT of each of sixteen words.
    fn bits<const BIT: u32>(words: &[u32]) -> u16;
    /// Sixteen words, `stride` bytes apart, which is less than 2^27.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    unsafe fn words(data: *const u8, stride: usize, words: &mut [u32]) {
        for (i, word) in words[..LANES].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *word = u32::from_le(unsafe { data.add(i * stride).cast::<u32>().read_unaligned() });
        }
    }
    /// The sum: lane i with i+8, then i+4, i+2, i+1.
    fn sum(self) -> f32;
    /// The sums of four, each as [`Simd::sum`] takes it.
    #[inline(always)]
    fn sums(four: [Self; 4]) -> [f32; 4] {
        four.map(Self::sum)
    }
    /// The largest lane.
    fn largest(self) -> f32;
    /// The smallest lane.
    fn smallest(self) -> f32;
    /// y = R x. A call, not inlined: the transforms are large, and instruction sets have one for each head size.
    fn rotate(r: &Rotation, x: &[f32], y: &mut [f32]);
    /// x = R^-1 y.
    fn rotate_back(r: &Rotation, y: &[f32], x: &mut [f32]);
}

/// [`Simd`] in plain Rust.
#[derive(Clone, Copy)]
pub struct Lanes(pub [f32; LANES]);

impl Lanes {
    /// All lanes zero.
    pub const ZERO: Lanes = Lanes([0.0; LANES]);

    #[inline(always)]
    fn zip(self, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
        let mut v = [0.0; LANES];
        for i in 0..LANES {
            v[i] = f(self.0[i], b.0[i]);
        }
        Lanes(v)
    }

    #[inline(always)]
    fn fold(self, f: impl Fn(f32, f32) -> f32) -> f32 {
        let v = self.0;
        let mut a = [0.0; 8];
        for i in 0..8 {
            a[i] = f(v[i], v[i + 8]);
        }
        let mut b = [0.0; 4];
        for i in 0..4 {
            b[i] = f(a[i], a[i + 4]);
        }
        f(f(b[0], b[2]), f(b[1], b[3]))
    }
}

impl Simd for Lanes {
    #[inline(always)]
    fn splat(x: f32) -> Lanes {
        Lanes([x; LANES])
    }

    #[inline(always)]
    fn load(x: &[f32]) -> Lanes {
        let mut v = [0.0; LANES];
        v.copy_from_slice(&x[..LANES]);
        Lanes(v)
    }

    #[inline(always)]
    unsafe fn load_halves(x: *const u8) -> Lanes {
        // SAFETY: the caller's promise; bytes need no alignment.
        Lanes(std::array::from_fn(|i| f16::from_bits(unsafe { x.add(2 * i).cast::<u16>().read_unaligned() }).to_f32()))
    }

    #[inline(always)]
    fn store(self, x: &mut [f32]) {
        x[..LANES].copy_from_slice(&self.0);
    }

    #[inline(always)]
    fn store_bytes(self, x: &mut [u8]) {
        for (x, v) in x[..LANES].iter_mut().zip(self.0) {
            *x = v as i32 as u8;
        }
    }

    #[inline(always)]
    fn times(self, b: Lanes) -> Lanes {
        self.zip(b, |a, b| a * b)
    }

    #[inline(always)]
    fn over(self, b: Lanes) -> Lanes {
        self.zip(b, |a, b| a / b)
    }

    #[inline(always)]
    fn plus(self, b: Lanes) -> Lanes {
        self.zip(b, |a, b| a + b)
    }

    #[inline(always)]
    fn minus(self, b: Lanes) -> Lanes {
        self.zip(b, |a, b| a - b)
    }

    #[inline(always)]
    fn power_of_lowest_bits(self) -> Lanes {
        Lanes(self.0.map(|x| f32::from_bits(x.to_bits() << 23)))
    }

    // A call: without the instruction it is sixteen of them.
    #[inline(never)]
    fn fma(self, b: Lanes, c: Lanes) -> Lanes {
        let mut v = [0.0; LANES];
        for i in 0..LANES {
            v[i] = self.0[i].mul_add(b.0[i], c.0[i]);
        }
        Lanes(v)
    }

    #[inline(always)]
    fn max(self, b: Lanes) -> Lanes {
        self.zip(b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, b: Lanes) -> Lanes {
        self.zip(b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn abs(self) -> Lanes {
        Lanes(self.0.map(f32::abs))
    }

    #[inline(always)]
    fn above(self, limit: Lanes, yes: Lanes, no: Lanes) -> Lanes {
        let mut v = [0.0; LANES];
        for i in 0..LANES {
            v[i] = if self.0[i] > limit.0[i] { yes.0[i] } else { no.0[i] };
        }
        Lanes(v)
    }

    #[inline(never)]
    fn between<const N: usize>(self, limits: &[f32; N], values: &[f32; N]) -> Lanes {
        let steps = || limits.iter().zip(values).skip(1);
        Lanes(self.0.map(|x| steps().fold(values[0], |below, (&limit, &value)| if x > limit { value } else { below })))
    }

    #[inline(never)]
    fn fma_where(self, mask: u16, b: Lanes, c: Lanes) -> Lanes {
        let mut v = c.0;
        for (i, v) in v.iter_mut().enumerate() {
            if mask >> i & 1 != 0 {
                *v = self.0[i].mul_add(b.0[i], *v);
            }
        }
        Lanes(v)
    }

    #[inline(always)]
    fn shifted<const N: usize>(self) -> Lanes {
        let mut v = [0.0; LANES];
        v[N..].copy_from_slice(&self.0[..LANES - N]);
        Lanes(v)
    }

    #[inline(always)]
    fn last_four(self) -> Lanes {
        Lanes(std::array::from_fn(|i| self.0[LANES - 4 + i % 4]))
    }

    #[inline(always)]
    fn bits<const BIT: u32>(words: &[u32]) -> u16 {
        words[..LANES].iter().enumerate().fold(0, |bits, (i, word)| bits | ((word >> BIT & 1) as u16) << i)
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        self.fold(|a, b| a + b)
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.fold(|a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn smallest(self) -> f32 {
        self.fold(|a, b| if a < b { a } else { b })
    }

    fn rotate(r: &Rotation, x: &[f32], y: &mut [f32]) {
        r.forward_by_plan(x, y);
    }

    fn rotate_back(r: &Rotation, y: &[f32], x: &mut [f32]) {
        r.backward_by_plan(y, x);
    }
}

/// Rounds to the nearest integer, ties to even, for |x| below 2^22: the same bits on every target.
#[inline(always)]
pub fn round_even<S: Simd>(x: S) -> S {
    x.plus(S::splat(MAGIC)).minus(S::splat(MAGIC))
}

/// 1.5 * 2^23: behind its last bit there is no fraction.
const MAGIC: f32 = 12_582_912.0;

/// e^x for x <= 0 with a relative error below 2e-7; 0 below -87.7; NaN stays.
///
/// It is 2^n 2^f for the nearest whole n. What rounds to n has n + 127 in its lowest bits, which are the exponent of 2^n; of -127 that is
/// no number but 0, so that nothing needs to be chosen in the end.
#[derive(Clone, Copy)]
pub struct Exp<S> {
    least: S,
    log2_e: S,
    /// What LOG2_E lacks of log2(e).
    more: S,
    magic: S,
    polynomial: [S; 6],
}

impl<S: Simd> Exp<S> {
    /// What it needs, once for all lanes that it is used on.
    #[inline(always)]
    pub fn constants() -> Exp<S> {
        use std::f32::consts::{LN_2, LOG2_E};
        let c = [1.330_026_8e-3, 9.669_709e-3, 5.550_56e-2, 2.402_228_1e-1, LN_2, 1.0];
        Exp {
            least: S::constant(-88.02),
            log2_e: S::constant(LOG2_E),
            more: S::constant(1.925_963e-8),
            magic: S::constant(MAGIC + 127.0),
            polynomial: std::array::from_fn(|i| S::constant(c[i])),
        }
    }

    /// e^x.
    #[inline(always)]
    pub fn of(&self, x: S) -> S {
        let bound = self.least.max(x);
        let rounded = bound.fma(self.log2_e, self.magic);
        let f = bound.fma(self.log2_e, self.magic.minus(rounded));
        let f = bound.fma(self.more, f);
        let mut p = self.polynomial[0];
        for &c in &self.polynomial[1..] {
            p = p.fma(f, c);
        }
        p.times(rounded.power_of_lowest_bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate() {
        let exp = |x: f32| Exp::constants().of(Lanes::splat(x)).0[3];
        let mut x = -86.9f32;
        while x <= 0.0 {
            let want = (x as f64).exp();
            let got = exp(x) as f64;
            assert!((got / want - 1.0).abs() < 2e-7, "exp({x}) = {got}, wanted {want}");
            x += 0.0137;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sum_takes_the_documented_tree() {
        let v: Vec<f32> = (0..16).map(|i| 1.0 + i as f32 * 1e-7).collect();
        let mut w = v.clone();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                w[i] += w[i + half];
            }
        }
        assert_eq!(Lanes::load(&v).sum().to_bits(), w[0].to_bits());
    }

    #[test]
    fn round_even_rounds_ties_to_even() {
        for (x, y) in [(0.5, 0.0), (1.5, 2.0), (-0.5, 0.0), (-2.5, -2.0), (126.6, 127.0)] {
            assert_eq!(round_even(Lanes::splat(x)).0, [y; LANES]);
        }
    }
}
