//! Memory between pages that nobody may touch, and tensors in it.

use ggml_ext::random::Noise;
use ggml_ext::table::Concrete;
use ggml_ext::tensor::{Tensor, View};
use std::cell::Cell;

/// ggml's type ids.
pub const F32: i32 = 0;
pub const F16: i32 = 1;
pub const Q4_0: i32 = 2;
pub const Q8_0: i32 = 8;
pub const I32: i32 = 26;
pub const I64: i32 = 27;
/// A type that only `to_float` reads: 4-byte floats.
pub const FOREIGN: i32 = 40;

/// Which of the two pages a buffer touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// It ends where the page behind it begins.
    End,
    /// It begins where the page before it ends.
    Begin,
}

thread_local! {
    static FLUSH: Cell<Flush> = const { Cell::new(Flush::End) };
}

/// For all buffers from now on.
pub fn flush(to: Flush) {
    FLUSH.set(to);
}

/// What lies in the page beside a buffer, which cannot be protected as well.
const SLACK: u8 = 0xa5;

/// A buffer with a protected page on both sides, one of them at its very edge.
pub struct Guarded {
    map: *mut u8,
    map_bytes: usize,
    page: usize,
    data: *mut u8,
    bytes: usize,
}

impl Guarded {
    /// Zeros.
    pub fn new(bytes: usize) -> Guarded {
        // SAFETY: fresh pages of which the inner ones are then opened; no pointer is used before that.
        unsafe {
            let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).expect("a page has a size");
            let inner = bytes.next_multiple_of(page);
            let map_bytes = inner + 2 * page;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
            let map = libc::mmap(std::ptr::null_mut(), map_bytes, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(map, libc::MAP_FAILED, "{bytes} bytes");
            let map = map.cast::<u8>();
            let opened = libc::mprotect(map.add(page).cast(), inner, libc::PROT_READ | libc::PROT_WRITE);
            assert!(inner == 0 || opened == 0, "{bytes} bytes");
            let at = match FLUSH.get() {
                Flush::End => page + inner - bytes,
                Flush::Begin => page,
            };
            let buffer = Guarded { map, map_bytes, page, data: map.add(at), bytes };
            buffer.slack().for_each(|byte| *byte = SLACK);
            buffer
        }
    }

    pub fn of<T: Copy>(values: &[T]) -> Guarded {
        let buffer = Guarded::new(size_of_val(values));
        // SAFETY: as many bytes, in memory of its own.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), buffer.data, buffer.bytes) };
        buffer
    }

    pub fn data(&self) -> *mut u8 {
        self.data
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: its own memory, which ops write only while they are called.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    pub fn floats(&self) -> Vec<f32> {
        self.bytes().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    fn slack(&self) -> impl Iterator<Item = &mut u8> {
        let (first, end) = (self.page, self.map_bytes - self.page);
        let used = self.data as usize - self.map as usize..self.data as usize - self.map as usize + self.bytes;
        // SAFETY: bytes of the inner pages that are not of the buffer, each once.
        (first..end).filter(move |at| !used.contains(at)).map(|at| unsafe { &mut *self.map.add(at) })
    }

    /// The tensor that has all of it: rows of `row_bytes` without gaps.
    pub fn tensor(&self, kind: i32, value_bytes: usize, row_bytes: usize, ne: [usize; 4]) -> Tensor {
        let nb = [value_bytes, row_bytes, row_bytes * ne[1], row_bytes * ne[1] * ne[2]];
        Tensor {
            kind,
            ne: ne.map(|n| n as i64),
            nb,
            data: self.data,
            to_float: (kind == FOREIGN).then_some(read_foreign),
            view: View { foreign_bytes: nb[3] * ne[3], ..View::default() },
        }
    }

    /// A view of `tensor`, which has all of the buffer, from byte `offset` on.
    pub fn view(&self, tensor: &Tensor, offset: usize, ne: [usize; 4], nb: [usize; 4]) -> Tensor {
        let view = View {
            offset,
            row_bytes: tensor.nb[1],
            rows: tensor.ne[1],
            data: tensor.data,
            bytes: self.bytes,
            foreign_bytes: 4 * ne[0] + (1..4).map(|d| (ne[d] - 1) * nb[d]).sum::<usize>(),
        };
        Tensor { ne: ne.map(|n| n as i64), nb, data: tensor.data.wrapping_add(offset), view, ..*tensor }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let spoiled = self.slack().filter(|byte| **byte != SLACK).count();
        // SAFETY: mapped by new, used by nobody anymore.
        unsafe { libc::munmap(self.map.cast(), self.map_bytes) };
        assert!(spoiled == 0 || std::thread::panicking(), "{spoiled} bytes beside a buffer were written to");
    }
}

unsafe extern "C" fn read_foreign(src: *const u8, dst: *mut f32, n: i64) {
    // SAFETY: the caller's promise: n values on both sides.
    unsafe { std::ptr::copy_nonoverlapping(src, dst.cast(), 4 * n as usize) };
}

/// Values between -1 and 1.
pub fn noise(seed: usize, n: usize) -> Vec<f32> {
    Noise::new(seed as u64).flat_row(n)
}

pub fn halves(values: &[f32]) -> Vec<half::f16> {
    values.iter().map(|&x| half::f16::from_f32(x)).collect()
}

/// 0..n in an order of its own.
pub fn shuffled(n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for i in (1..n).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}

/// Rows of a cache: ours, or one of ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    Ours(Concrete),
    Ggml(i32, usize),
}

impl Rows {
    pub fn kind(self) -> i32 {
        match self {
            Rows::Ours(c) => c.id(),
            Rows::Ggml(kind, _) => kind,
        }
    }

    pub fn size(self) -> usize {
        match self {
            Rows::Ours(c) => c.head_size,
            Rows::Ggml(_, size) => size,
        }
    }

    /// Bytes of a step of dimension 0, and of the row of one head.
    pub fn row_bytes(self) -> (usize, usize) {
        match self {
            Rows::Ours(c) => (c.row_bytes(), c.row_bytes()),
            Rows::Ggml(F16, n) => (2, 2 * n),
            Rows::Ggml(Q8_0, n) => (34, n / 32 * 34),
            Rows::Ggml(Q4_0, n) => (18, n / 32 * 18),
            Rows::Ggml(_, n) => (4, 4 * n),
        }
    }

    /// The rows of one head in so many cells; few of them differ.
    fn encoded(self, cells: usize) -> Vec<u8> {
        let (size, bytes) = (self.size(), self.row_bytes().1);
        match self {
            Rows::Ours(c) => {
                let n = if c.group_cells() > 1 { cells } else { cells.min(3) };
                let (x, mut rows) = (noise(1, n * size), vec![0u8; n * bytes]);
                // SAFETY: n rows of values and of bytes.
                let done =
                    unsafe { ggml_ext::ffi::ggml_ext_encode(c.id(), x.as_ptr(), rows.as_mut_ptr(), (n * size) as i64) };
                assert!(done, "{}", c.name());
                rows.iter().copied().cycle().take(cells * bytes).collect()
            }
            Rows::Ggml(F16, _) => halves(&noise(2, cells * size)).iter().flat_map(|x| x.to_le_bytes()).collect(),
            Rows::Ggml(kind @ (Q8_0 | Q4_0), _) => {
                let scale = half::f16::from_f32(if kind == Q8_0 { 0.01 } else { 0.1 }).to_le_bytes();
                let block = self.row_bytes().0;
                (0..cells * bytes).map(|i| if i % block < 2 { scale[i % block] } else { (i * 89) as u8 }).collect()
            }
            Rows::Ggml(..) => noise(3, cells * size).iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }
}

/// A cache of one layer and side: streams of cells of heads.
pub struct Cache {
    pub rows: Rows,
    pub memory: Guarded,
    pub heads: usize,
    pub cells: usize,
    pub streams: usize,
}

impl Cache {
    pub fn new(rows: Rows, heads: usize, cells: usize, streams: usize) -> Cache {
        let (row, one) = (rows.row_bytes().1, rows.encoded(cells));
        let cell = |c: usize| std::iter::repeat_n(&one[c * row..(c + 1) * row], heads).flatten().copied();
        let bytes: Vec<u8> = (0..streams).flat_map(|_| (0..cells).flat_map(cell)).collect();
        Cache { rows, memory: Guarded::of(&bytes), heads, cells, streams }
    }

    pub fn empty(rows: Rows, heads: usize, cells: usize, streams: usize) -> Cache {
        let memory = Guarded::new(rows.row_bytes().1 * heads * cells * streams);
        Cache { rows, memory, heads, cells, streams }
    }

    /// Bytes of a cell.
    pub fn stride(&self) -> usize {
        self.heads * self.rows.row_bytes().1
    }

    /// As llama.cpp makes it: [heads * size, cells, streams].
    pub fn whole(&self) -> Tensor {
        let ne = [self.heads * self.rows.size(), self.cells, self.streams, 1];
        self.memory.tensor(self.rows.kind(), self.rows.row_bytes().0, self.stride(), ne)
    }

    /// The streams as one, as it is written to.
    pub fn merged(&self) -> Tensor {
        let (whole, stride, cells) = (self.whole(), self.stride(), self.cells * self.streams);
        let ne = [self.heads * self.rows.size(), cells, 1, 1];
        self.memory.view(&whole, 0, ne, [whole.nb[0], stride, stride * cells, stride * cells])
    }

    /// As the K-shift sees it: [size, heads, cells of all streams].
    pub fn by_head(&self) -> Tensor {
        let (whole, row) = (self.whole(), self.rows.row_bytes().1);
        let (stride, cells) = (self.stride(), self.cells * self.streams);
        self.memory.view(
            &whole,
            0,
            [self.rows.size(), self.heads, cells, 1],
            [whole.nb[0], row, stride, stride * cells],
        )
    }

    /// As attention sees its first cells: [size, cells, heads, streams].
    pub fn attended(&self, cells: usize) -> Tensor {
        let (whole, row, stride) = (self.whole(), self.rows.row_bytes().1, self.stride());
        let ne = [self.rows.size(), cells, self.heads, self.streams];
        self.memory.view(&whole, 0, ne, [whole.nb[0], stride, row, stride * self.cells])
    }
}
