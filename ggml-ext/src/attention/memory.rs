//! Work memory of a thread, cut into buffers.

use crate::isa::CELLS;

/// Bytes of a buffer of n values, rounded up to where the next may begin.
pub(super) const fn bytes_of<T>(n: usize) -> usize {
    (n * size_of::<T>()).next_multiple_of(64)
}

/// Cuts memory into buffers that begin at multiples of 64.
pub(super) struct Cut {
    here: *mut u8,
    left: usize,
}

impl Cut {
    /// # Safety
    /// `memory` is 64-byte aligned, has so many bytes and is the caller's alone.
    pub unsafe fn new(memory: *mut u8, bytes: usize) -> Cut {
        Cut { here: memory, left: bytes }
    }

    /// Room for n values, whatever is in it.
    pub fn take<T>(&mut self, n: usize) -> *mut T {
        let (here, bytes) = (self.here, bytes_of::<T>(n));
        self.left = self.left.checked_sub(bytes).expect("shapes count all buffers that are taken");
        self.here = here.wrapping_add(bytes);
        here.cast()
    }
}

/// Room for one unpacked block of K or V.
pub(super) struct BlockRoom {
    pub levels: *mut i8,
    pub scales: *mut f32,
    /// The I-frame of the block, where its cells are a group.
    pub frame: *mut f32,
    pub floats: *mut f32,
    pub transposed: *mut f32,
}

/// What a [`BlockRoom`] is sized by.
#[derive(Clone, Copy)]
pub(super) struct BlockShape {
    /// The widest row.
    pub width: usize,
    /// Is a side stored as floats?
    pub floats: bool,
}

impl BlockShape {
    fn float_values(self) -> usize {
        if self.floats {
            CELLS * self.width
        } else {
            0
        }
    }

    pub fn bytes(self) -> usize {
        let cells = CELLS * self.width;
        bytes_of::<i8>(cells)
            + bytes_of::<f32>(cells / 16)
            + bytes_of::<f32>(self.width)
            + 2 * bytes_of::<f32>(self.float_values())
    }

    pub fn take(self, cut: &mut Cut) -> BlockRoom {
        let cells = CELLS * self.width;
        BlockRoom {
            levels: cut.take(cells),
            scales: cut.take(cells / 16),
            frame: cut.take(self.width),
            floats: cut.take(self.float_values()),
            transposed: cut.take(self.float_values()),
        }
    }
}
