//! Room for the values of one head on the stack.
//!
//! Arrays of the largest head size would be cleared whole for every row, and clearing some kilobytes takes as long as encoding
//! sixty values. Only what is asked for is cleared here.

use crate::rotation::MAX_HEAD;
use std::mem::MaybeUninit;

/// Room for MAX_HEAD values.
pub struct Room<T>([MaybeUninit<T>; MAX_HEAD]);

impl<T: Copy + Default> Room<T> {
    /// Nothing in it.
    #[inline(always)]
    pub fn new() -> Room<T> {
        Room([MaybeUninit::uninit(); MAX_HEAD])
    }

    /// The first n values, cleared.
    #[inline(always)]
    pub fn zeros(&mut self, n: usize) -> &mut [T] {
        let room = &mut self.0[..n];
        room.fill(MaybeUninit::new(T::default()));
        // SAFETY: all of them were just written.
        unsafe { &mut *(std::ptr::from_mut(room) as *mut [T]) }
    }
}
