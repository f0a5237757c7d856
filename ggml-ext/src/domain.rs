//! The space that stored rows live in: that of the model, or a rotated one.
//!
//! Attention brings queries into K's space once per row and results back from V's once per row; nothing else is ever
//! rotated.

use crate::isa::Kernels;
use crate::rotation::Rotation;

/// How a head of the model relates to what is stored.
#[derive(Clone, Copy)]
pub enum Domain {
    /// Stored as it is.
    Plain,
    /// Stored as R x.
    Rotated(&'static Rotation),
}

impl Domain {
    /// From a head of the model to what it is compared with; values beyond it become zero.
    ///
    /// # Safety
    /// The kernels can run on this CPU; `x` is a whole head and `out` no shorter than the stored row.
    pub unsafe fn enter(self, kernels: &Kernels, x: &[f32], out: &mut [f32]) {
        match self {
            Domain::Plain => out[..x.len()].copy_from_slice(x),
            // SAFETY: the caller's promise.
            Domain::Rotated(r) => unsafe { (kernels.rotate)(r, x, out) },
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
        }
    }
}
