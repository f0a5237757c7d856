//! How rows are stored. A codec knows nothing of ggml, and the instruction sets know nothing of attention.

pub mod band;
pub mod delta;
mod format;
pub mod levels;
pub mod plain;
pub mod polar;
pub mod qjl;
pub(crate) mod scales;
pub mod srft;
pub mod turbo;

use crate::domain::Domain;
use crate::lanes::Simd;
use delta::Delta;
use levels::LevelLayout;
use polar::Polar;
use qjl::Qjl;
use srft::Srft;
use turbo::Turbo;

pub use format::{RowFormat, Scorer};

format::formats! {
    /// srft8, srft4, srft3, srft2.
    Srft,
    /// delta8, delta4, delta3, band4, band3, band2.
    Delta,
    /// polar4, polar3.
    Polar,
    /// turbo4, turbo3.
    Turbo,
    /// qjl1.
    Qjl,
}

/// Larger values are stored as this.
const INPUT_LIMIT: f32 = 1e6;

/// What is not a number becomes 0, what is beyond the limit the limit: a bad row stays finite and harms no other.
#[inline(always)]
pub(crate) fn clean(x: &[f32], out: &mut [f32]) {
    for (c, &x) in out.iter_mut().zip(x) {
        let x = if x.is_nan() { 0.0 } else { x };
        *c = x.clamp(-INPUT_LIMIT, INPUT_LIMIT);
    }
}

/// Root mean square error of scores by codes of so many bits and a scale per group, relative to what is coded: the roots
/// of srft's errors on N(0,1), which `mean_squared_error` checks.
pub(crate) fn error_of_bits(bits: u32) -> f32 {
    match bits {
        0 | 1 => 0.6,
        2 => 0.33,
        3 => 0.155,
        4 => 0.075,
        5..=7 => 0.02,
        _ => 0.0045,
    }
}
