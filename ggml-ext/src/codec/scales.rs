//! Stored scales: f16, or 8 bits.
//!
//! ```text
//! code    s eeee mmm       0, or with c = eeee mmm from 1 on:   (1 + mmm / 8) * 2^(eeee - 7), negative where s is 1
//! ```
//!
//! Eight steps an octave from 0.009 to 480. The bits of c, shifted, are those of a float whose exponent is off by a
//! constant: a reader needs no table.
//!
//! A group whose levels are odd has no use for a sign. Its scale has half steps instead, sixteen an octave:
//!
//! ```text
//! code    h eeee mmm       0 where eeee mmm is, else   (1 + mmm / 8 + h / 16) * 2^(eeee - 7)
//! ```

use half::f16;

/// The largest code, without its sign.
pub const MAX_CODE: u8 = 127;

/// Bits of an f32 below those that a code has.
const BELOW: u32 = 20;

/// What the exponent of an f32 has more than that of a code, in place.
const OFFSET: u32 = 120 << 23;

/// The scale of a code.
#[inline(always)]
pub fn code_scale(code: u8) -> f32 {
    let c = u32::from(code & MAX_CODE);
    let magnitude = if c == 0 { 0 } else { (c << BELOW) + OFFSET };
    f32::from_bits(magnitude | u32::from(code >> 7) << 31)
}

/// The code of the largest scale that is not above x, which is not negative. Below 1 where there is none, and beyond
/// [`MAX_CODE`] where x is.
#[inline(always)]
pub fn code_below(x: f32) -> i32 {
    (x.to_bits() >> BELOW) as i32 - (OFFSET >> BELOW) as i32
}

/// The scale of a code with half steps.
#[inline(always)]
pub fn half_step_scale(code: u8) -> f32 {
    let half = u32::from(code >> 7) << (BELOW - 1);
    match code & MAX_CODE {
        0 => 0.0,
        c => f32::from_bits(code_scale(c).to_bits() | half),
    }
}

/// The largest scale with half steps that is not above x, as a count of half steps; below [`MIN_HALF_STEPS`] where there
/// is none, and beyond [`MAX_HALF_STEPS`] where x is.
#[inline(always)]
pub fn half_steps_below(x: f32) -> i32 {
    (x.to_bits() >> (BELOW - 1)) as i32 - (OFFSET >> (BELOW - 1)) as i32
}

pub const MIN_HALF_STEPS: i32 = 2;
pub const MAX_HALF_STEPS: i32 = 255;

/// The code of a count of half steps.
#[inline(always)]
pub fn half_step_code(steps: i32) -> u8 {
    (steps as u8).rotate_right(1)
}

/// Stores a scale as f16, saturated, and returns what a reader will find.
#[inline(always)]
pub fn store_f16(scale: f32, to: &mut [u8]) -> f32 {
    let stored = f16::from_f32(scale.clamp(-65504.0, 65504.0));
    to[..2].copy_from_slice(&stored.to_le_bytes());
    stored.to_f32()
}

/// Reads a scale; any bytes are something finite.
#[inline(always)]
pub fn load_f16(from: &[u8]) -> f32 {
    let scale = f16::from_le_bytes([from[0], from[1]]);
    if scale.is_finite() {
        scale.to_f32()
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_scales_that_the_formula_gives() {
        assert_eq!((code_scale(0), code_scale(1), code_scale(127)), (0.0, 1.125 / 128.0, 480.0));
        for code in 1..=MAX_CODE {
            let want = (1.0 + f32::from(code % 8) / 8.0) * 2f32.powi(i32::from(code / 8) - 7);
            assert_eq!((code_scale(code), code_scale(code | 0x80)), (want, -want));
            assert_eq!(code_below(want), i32::from(code));
            assert_eq!(code_below(want * 1.06), i32::from(code));
            assert_eq!(code_below(want * 0.999), i32::from(code) - 1);
        }
        assert!(code_below(0.0) < 1 && code_below(1e6) > i32::from(MAX_CODE));
    }

    #[test]
    fn half_steps_lie_between_the_scales() {
        assert_eq!((half_step_scale(0), half_step_scale(0x80)), (0.0, 0.0));
        for steps in MIN_HALF_STEPS..=MAX_HALF_STEPS {
            let want = (1.0 + (steps % 16) as f32 / 16.0) * 2f32.powi(steps / 16 - 7);
            assert_eq!(half_step_scale(half_step_code(steps)), want);
            assert_eq!((half_steps_below(want), half_steps_below(want * 1.03)), (steps, steps));
            assert_eq!(half_steps_below(want * 0.999), steps - 1);
        }
        assert_eq!(half_step_scale(half_step_code(2 * 40)), code_scale(40));
        assert!(half_steps_below(0.0) < MIN_HALF_STEPS && half_steps_below(1e6) > MAX_HALF_STEPS);
    }
}
