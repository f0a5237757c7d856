//! The space that stored rows live in: that of the model, or a rotated one.
//!
//! Attention brings queries into K's space once per row and results back from V's once per row; nothing else is ever
//! rotated.
//!
//! Where a row holds two parts side by side, the levels of a rotated head and signs of its projection, a query enters as
//! both and a sum leaves as one: see [`crate::codec::turbo`].

use crate::codec::qjl::score_factor;
use crate::isa::{padded, Kernels};
use crate::room::Room;
use crate::rotation::Rotation;

/// How a head of the model relates to what is stored.
#[derive(Clone, Copy)]
pub enum Domain {
    /// Stored as it is.
    Plain,
    /// Stored as R x.
    Rotated(&'static Rotation),
    /// Signs of P x. Queries are multiplied by what takes the bias from their scores.
    Projected([&'static Rotation; 2]),
    /// Levels of R x, and from `padded(size)` values on signs of P R x.
    Both(&'static Rotation, [&'static Rotation; 2]),
}

impl Domain {
    /// Are rows of the other stored in the same space?
    pub fn is(self, other: Domain) -> bool {
        match (self, other) {
            (Domain::Plain, Domain::Plain) => true,
            (Domain::Rotated(a), Domain::Rotated(b)) => std::ptr::eq(a, b),
            _ => false,
        }
    }

    /// Can a sum of rows of the other be added to the first values of a sum of these?
    pub fn takes(self, other: Domain) -> bool {
        match (self, other) {
            (Domain::Both(a, _), Domain::Rotated(b)) => std::ptr::eq(a, b),
            _ => self.is(other),
        }
    }

    /// From a head of the model to what it is compared with; values beyond it become zero.
    ///
    /// # Safety
    /// The kernels can run on this CPU; `x` is a whole head and `out` no shorter than the stored row.
    pub unsafe fn enter(self, kernels: &Kernels, x: &[f32], out: &mut [f32]) {
        match self {
            Domain::Plain => out[..x.len()].copy_from_slice(x),
            // SAFETY: the caller's promise.
            Domain::Rotated(r) => unsafe { (kernels.rotate)(r, x, out) },
            // SAFETY: the caller's promise.
            Domain::Projected(p) => unsafe { project(kernels, p, x, out) },
            Domain::Both(r, p) => {
                let (first, second) = out.split_at_mut(padded(x.len()));
                // SAFETY: the caller's promise; the row is two padded heads wide.
                unsafe {
                    (kernels.rotate)(r, x, first);
                    project(kernels, p, &first[..x.len()], second);
                }
                first[x.len()..].fill(0.0);
                return second[x.len()..].fill(0.0);
            }
        }
        out[x.len()..].fill(0.0);
    }

    /// From a sum of stored rows to a head of the model.
    ///
    /// # Safety
    /// The kernels can run on this CPU; `y` is a whole row and `out` has room for a head.
    pub unsafe fn leave(self, kernels: &Kernels, y: &[f32], out: &mut [f32]) {
        match self {
            Domain::Plain => out.copy_from_slice(&y[..out.len()]),
            // SAFETY: the caller's promise.
            Domain::Rotated(r) => unsafe { (kernels.rotate_back)(r, y, out) },
            // SAFETY: the caller's promise.
            Domain::Projected(p) => unsafe { project_back(kernels, p, y, out) },
            Domain::Both(r, p) => {
                let mut sum = Room::new();
                let sum = sum.zeros(out.len());
                let (first, second) = y.split_at(padded(out.len()));
                // SAFETY: the caller's promise.
                unsafe { project_back(kernels, p, second, sum) };
                for (s, x) in sum.iter_mut().zip(&first[..out.len()]) {
                    *s += x;
                }
                // SAFETY: the caller's promise.
                unsafe { (kernels.rotate_back)(r, sum, out) };
            }
        }
    }
}

/// P x, times the factor that scores by signs want.
unsafe fn project(kernels: &Kernels, [first, second]: [&Rotation; 2], x: &[f32], out: &mut [f32]) {
    let mut half = Room::new();
    let half = half.zeros(first.size());
    // SAFETY: the kernels can run here.
    unsafe {
        (kernels.rotate)(first, x, half);
        (kernels.rotate)(second, half, out);
        (kernels.scale)(&mut out[..x.len()], score_factor(x.len()));
    }
}

/// P^-1 y.
unsafe fn project_back(kernels: &Kernels, [first, second]: [&Rotation; 2], y: &[f32], out: &mut [f32]) {
    let mut half = Room::new();
    let half = half.zeros(first.size());
    // SAFETY: the kernels can run here.
    unsafe {
        (kernels.rotate_back)(second, y, half);
        (kernels.rotate_back)(first, half, out);
    }
}
