//! The kernels that encoding and attention are made of, once per instruction set.
//!
//! A kernel works on a block of cells of one head, so one indirect call moves thousands of values and the choice of
//! the instruction set is made once, when the table is picked. [`scalar`] defines every result; the others agree with it
//! bit for bit on codes, levels and scores, because sums keep the order of [`crate::lanes`], and closely on weighted sums.
//!
//! A row of levels unpacks to the same shape whatever its type, which is what keeps attention free of codecs (an
//! instruction set may arrange the levels otherwise for its own products, see [`Role`]):
//!
//! ```text
//! levels  i8   value = level * scale, zero beyond the row's values; rows of `width`, the values rounded up to 64
//! scales  f32  one per group of 16 or 32 values; bundles of 16 cells: group 0 of the 16, group 1 of the 16, …
//! ```
//!
//! Queries meet levels as bytes with a scale per group of their own, so that a large channel takes precision from its
//! group alone. A score is the sum over groups of (integer dot) * (scale of the key * scale of the query).

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod generic;
pub mod scalar;

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;

use crate::codec::delta::{Chain, Delta, RowKind};
pub use crate::codec::levels::padded;
use crate::codec::levels::LevelLayout;
use crate::codec::plain::Plain;
use crate::codec::polar::Polar;
use crate::codec::Format;
use crate::rotation::{Rotation, MAX_HEAD};
use std::sync::OnceLock;

/// Cells of a block.
pub const CELLS: usize = 64;

/// Asks for what lies at `p`, or would; for what is read in another order than the processor foresees.
#[inline(always)]
pub fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it, and it reads nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Rows of a matrix of f16 that are multiplied at a time.
pub const MATRIX_ROWS: usize = 16;

/// Cells whose scales lie side by side.
pub const BUNDLE: usize = 16;

/// The most values that a row unpacks to, padded.
pub const MAX_WIDTH: usize = padded(2 * MAX_HEAD);

/// The most bytes of a row that unpacks to levels: 8-bit levels and a 16-bit scale per 16.
pub const MAX_ROW_BYTES: usize = MAX_HEAD + MAX_HEAD / 8;

/// What unpacked levels are for: an instruction set may want another form of them in dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// For [`Kernels::dot_levels`].
    Dot,
    /// For [`Kernels::weigh_levels`].
    Weigh,
    /// For [`Kernels::expand`]: signed levels, as described above.
    Expand,
}

/// What a row of the mask shows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Everything, as it is.
    Open,
    /// Nothing.
    Hidden,
    /// Some cells, or with a bias.
    Mixed,
}

/// width / group, without a division.
#[inline(always)]
fn scale_groups(width: usize, scale_group: usize) -> usize {
    if scale_group == 32 {
        width / 32
    } else {
        width / 16
    }
}

/// Stored rows of one head.
#[derive(Clone, Copy)]
pub struct StoredRows {
    /// The first.
    pub data: *const u8,
    /// Bytes from one to the next.
    pub stride: usize,
    /// How many.
    pub n: usize,
    /// Bytes from these to those that are read next, which a kernel may ask for; 0: nobody knows.
    pub ahead: isize,
}

impl StoredRows {
    /// `n` rows, `stride` bytes apart.
    pub fn new(data: *const u8, stride: usize, n: usize) -> StoredRows {
        StoredRows { data, stride, n, ahead: 0 }
    }

    /// Row c.
    ///
    /// # Safety
    /// c is below n.
    #[inline(always)]
    pub unsafe fn row(self, c: usize) -> *const u8 {
        // SAFETY: the caller's promise.
        unsafe { self.data.add(c * self.stride) }
    }
}

/// Buffers of one block of unpacked levels.
#[derive(Clone, Copy)]
pub struct LevelBlock {
    /// CELLS rows of `width` levels.
    pub levels: *mut i8,
    /// CELLS times `scale_groups()` scales.
    pub scales: *mut f32,
    /// Values of a row, padded.
    pub width: usize,
    /// Values that share a scale.
    pub scale_group: usize,
}

impl LevelBlock {
    /// Groups of a row, padding included.
    #[inline(always)]
    pub fn scale_groups(&self) -> usize {
        scale_groups(self.width, self.scale_group)
    }

    /// Where the scale of group `g` of cell `c` is.
    ///
    /// # Safety
    /// `scales` has room for CELLS cells, `c` is below CELLS and `g` at most `scale_groups()`.
    #[inline(always)]
    pub unsafe fn scale_at(&self, c: usize, g: usize) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe { self.scales.add((c / BUNDLE * self.scale_groups() + g) * BUNDLE + c % BUNDLE) }
    }
}

/// Query rows as signed bytes.
#[derive(Clone, Copy)]
pub struct Queries {
    /// `count` rows of `width` bytes.
    pub bytes: *mut i8,
    /// `count` rows of one scale per group.
    pub scales: *mut f32,
    /// `count` rows of the sum of each group's bytes.
    pub sums: *mut i32,
    /// The rows.
    pub count: usize,
    /// Bytes of a row: the key's.
    pub width: usize,
    /// Values that share a scale: the key's.
    pub scale_group: usize,
    /// Do bytes 2i and 2i + 1 add up to no more than 128 where they have one sign, so that their products with unsigned bytes fit 16 bits?
    pub pairs: bool,
}

impl Queries {
    /// Groups of a row, padding included.
    #[inline(always)]
    pub fn scale_groups(&self) -> usize {
        scale_groups(self.width, self.scale_group)
    }
}

/// See [`Kernels::encode_key`].
pub type EncodeKey = unsafe fn(Delta, x: &[f32], m: &[f32], before: Option<&[f32]>, row: &mut [u8]);

/// The kernels of one instruction set. All pointers must hold what the shapes say; nothing is aligned.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// "avx512", …
    pub name: &'static str,
    /// One row of one head.
    pub encode: unsafe fn(Format, &[f32], &mut [u8]),
    /// One row of one head.
    pub decode: unsafe fn(Format, &[u8], &mut [f32]),
    /// One row of one head of a group: a rotated key, the I-frame, the deviation of the row before.
    pub encode_key: EncodeKey,
    /// The deviation `u` of a row becomes that of the last of the rows after it that are in the block: a first row of any
    /// kind, and then chained ones.
    pub follow: unsafe fn(d: LevelBlock, cells: usize, first: RowKind, m: &[f32], u: &mut [f32]),
    /// The I-frame of the group of `rows` rows, `stride` bytes apart, padded with zeros, and who passes on to whom in it.
    pub frame_and_chain: unsafe fn(Delta, data: *const u8, stride: usize, rows: usize, m: &mut [f32]) -> Chain,
    /// Scores of differences become scores of keys: `rows` rows of CELLS, whose queries are factor * rows of q.
    pub chain_scores: unsafe fn(chain: &Chain, m: &[f32], q: Matrix, factor: f32, rows: usize, scores: *mut f32),
    /// y = R x.
    pub rotate: unsafe fn(&Rotation, &[f32], &mut [f32]),
    /// x = R^-1 y.
    pub rotate_back: unsafe fn(&Rotation, &[f32], &mut [f32]),
    /// A block of rows, or less.
    pub unpack: unsafe fn(layout: &LevelLayout, rows: StoredRows, role: Role, out: LevelBlock),
    /// `n` rows of f32, f16 or bf16 to f32 rows of `width`, zero beyond `size`.
    pub widen:
        unsafe fn(kind: Plain, data: *const u8, stride: usize, n: usize, size: usize, out: *mut f32, width: usize),
    /// Row `row` of `out` = factor * q, which is padded with zeros; NaN scales, and false, where q is not finite.
    pub quantize_query: unsafe fn(q: &[f32], factor: f32, out: Queries, row: usize) -> bool,
    /// Is `dot_levels` faster where queries have [`Queries::pairs`]?
    pub pairs: bool,
    /// out[r][c] = (levels of cell c) . (query r), for the cells of a whole block; rows of `out` are CELLS apart.
    pub dot_levels: unsafe fn(k: LevelBlock, n: usize, q: Queries, out: *mut f32),
    /// The same on f32 rows; `q` rows are `width` apart.
    pub dot_floats: unsafe fn(k: *const f32, width: usize, n: usize, q: *const f32, rows: usize, out: *mut f32),
    /// out[r][i] = (f16 row i, of MATRIX_ROWS rows) . x[r], all of `size` values, which is a multiple of sixteen; rows of f16 are `stride`
    /// bytes apart, those of x `size` values, those of `out` MATRIX_ROWS.
    pub dot_halves: unsafe fn(m: *const u8, stride: usize, size: usize, x: *const f32, rows: usize, out: *mut f32),
    /// acc[r] += sum over n cells of weights[r][c] * value c; rows of `weights` are CELLS apart, of `acc` `width`.
    pub weigh_levels: unsafe fn(v: LevelBlock, n: usize, weights: *const f32, rows: usize, acc: *mut f32),
    /// Levels to f32 rows.
    pub expand: unsafe fn(v: LevelBlock, n: usize, out: *mut f32),
    /// c[r][0..64] += sum over k of a[r][k] * b[k][0..64], with the row strides given.
    pub gemm64: unsafe fn(a: Matrix, b: Matrix, c: MatrixMut, rows: usize, depth: usize),
    /// out[i][c] = x[c][i] for CELLS rows of `width`.
    pub transpose: unsafe fn(x: *const f32, width: usize, out: *mut f32),
    /// CELLS scores become cap * tanh(score).
    pub softcap: unsafe fn(scores: &mut [f32; CELLS], cap: f32),
    /// What a mask row of n <= CELLS 16-bit floats shows.
    pub sight: unsafe fn(row: *const u8, n: usize) -> Sight,
    /// Adds slope * mask where there is one, and returns the largest score.
    pub mask_scores: unsafe fn(scores: &mut [f32; CELLS], mask: Option<&[f32; CELLS]>, slope: f32) -> f32,
    /// CELLS scores to weights e^(s - max), whose sum is returned.
    pub exponentials: unsafe fn(scores: &mut [f32; CELLS], max: f32) -> f32,
    /// x *= factor.
    pub scale: unsafe fn(x: &mut [f32], factor: f32),
    /// The tables of a rotated query: see [`Polar::tables`].
    pub polar_tables: unsafe fn(f: Polar, q: &[f32], out: &mut [f32]),
    /// Scores of rows by the tables of so many queries, which lie one after the other; rows of `out` are CELLS apart.
    pub polar_scores: unsafe fn(f: Polar, rows: StoredRows, tables: *const f32, queries: usize, out: *mut f32),
}

/// A row-major f32 matrix: where it begins, and values from one row to the next.
#[derive(Clone, Copy)]
pub struct Matrix(pub *const f32, pub usize);
/// One to write.
#[derive(Clone, Copy)]
pub struct MatrixMut(pub *mut f32, pub usize);

/// Every table that this CPU can run, the best first.
pub fn available() -> &'static [&'static Kernels] {
    static TABLES: OnceLock<Vec<&'static Kernels>> = OnceLock::new();
    TABLES.get_or_init(|| {
        let mut tables: Vec<&'static Kernels> = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            tables.extend(avx512::kernels());
            tables.extend(avx512::bw_kernels());
            tables.extend(avx2::vnni_kernels());
            tables.extend(avx2::kernels());
        }
        #[cfg(target_arch = "aarch64")]
        {
            tables.extend(neon::i8mm_kernels());
            tables.extend(neon::dotprod_kernels());
            tables.push(neon::kernels());
        }
        tables.push(&scalar::KERNELS);
        tables
    })
}

/// The table in use: the best one, or the one that GGML_EXT_ISA names.
pub fn kernels() -> &'static Kernels {
    static CHOSEN: OnceLock<&'static Kernels> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let tables = available();
        let Ok(wanted) = std::env::var("GGML_EXT_ISA") else { return tables[0] };
        tables.iter().copied().find(|t| t.name == wanted).unwrap_or_else(|| {
            let names: Vec<_> = tables.iter().map(|t| t.name).collect();
            eprintln!(
                "ggml-ext: GGML_EXT_ISA={wanted} is not available here (there is {}); using {}",
                names.join(", "),
                tables[0].name
            );
            tables[0]
        })
    })
}

/// Wraps the portable kernels of [`scalar`] so that the compiler vectorizes them for `$feature`, with `$simd` as the
/// vector of those that are written on [`crate::lanes::Simd`].
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! compile_portable_kernels {
    ($feature:literal, $simd:ty) => {
        #[target_feature(enable = $feature)]
        unsafe fn encode(f: Format, x: &[f32], row: &mut [u8]) {
            f.encode::<$simd>(x, row)
        }
        #[target_feature(enable = $feature)]
        unsafe fn decode(f: Format, row: &[u8], x: &mut [f32]) {
            f.decode::<$simd>(row, x)
        }
        #[target_feature(enable = $feature)]
        unsafe fn encode_key(f: Delta, x: &[f32], m: &[f32], before: Option<&[f32]>, row: &mut [u8]) {
            f.encode_key::<$simd>(x, m, before, row)
        }
        #[target_feature(enable = $feature)]
        unsafe fn follow(d: LevelBlock, cells: usize, first: RowKind, m: &[f32], u: &mut [f32]) {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::follow(d, cells, first, m, u) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn frame_and_chain(f: Delta, data: *const u8, stride: usize, rows: usize, m: &mut [f32]) -> Chain {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::frame_and_chain::<$simd>(f, data, stride, rows, m) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn chain_scores(chain: &Chain, m: &[f32], q: Matrix, factor: f32, rows: usize, scores: *mut f32) {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::chain_scores::<$simd>(chain, m, q, factor, rows, scores) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn rotate(r: &Rotation, x: &[f32], y: &mut [f32]) {
            r.forward(x, y)
        }
        #[target_feature(enable = $feature)]
        unsafe fn rotate_back(r: &Rotation, y: &[f32], x: &mut [f32]) {
            r.backward(y, x)
        }
        #[target_feature(enable = $feature)]
        unsafe fn quantize_query(q: &[f32], factor: f32, out: Queries, row: usize) -> bool {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::quantize_query::<$simd>(q, factor, out, row) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn dot_floats(k: *const f32, width: usize, n: usize, q: *const f32, rows: usize, out: *mut f32) {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::dot_floats::<$simd>(k, width, n, q, rows, out) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn dot_halves(m: *const u8, stride: usize, size: usize, x: *const f32, rows: usize, out: *mut f32) {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::dot_halves::<$simd>(m, stride, size, x, rows, out) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn softcap(scores: &mut [f32; CELLS], cap: f32) {
            scalar::softcap::<$simd>(scores, cap)
        }
        #[target_feature(enable = $feature)]
        unsafe fn mask_scores(scores: &mut [f32; CELLS], mask: Option<&[f32; CELLS]>, slope: f32) -> f32 {
            scalar::mask_scores::<$simd>(scores, mask, slope)
        }
        #[target_feature(enable = $feature)]
        unsafe fn sight(row: *const u8, n: usize) -> Sight {
            // SAFETY: the caller's promise is passed on.
            unsafe { scalar::sight(row, n) }
        }
        #[target_feature(enable = $feature)]
        unsafe fn scale(x: &mut [f32], factor: f32) {
            scalar::scale(x, factor)
        }
        #[target_feature(enable = $feature)]
        unsafe fn polar_tables(f: Polar, q: &[f32], out: &mut [f32]) {
            f.tables(q, out)
        }
        #[target_feature(enable = $feature)]
        unsafe fn exponentials(scores: &mut [f32; CELLS], max: f32) -> f32 {
            scalar::exponentials::<$simd>(scores, max)
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use compile_portable_kernels;

/// Splits rows into nearly equal parts, none larger than the last of the listed sizes 1, 2, …, and calls the body
/// with the part's first row and its size as a constant.
macro_rules! by_rows {
    ($rows:expr, [$($size:literal)+], |$first:ident, $count:ident| $body:expr) => {{
        const MOST: usize = [$($size),+].len();
        let (rows, mut $first) = ($rows, 0);
        let parts = usize::div_ceil(rows, MOST);
        for part in 0..parts {
            let count = usize::div_ceil(rows - $first, parts - part);
            match count {
                $($size => {
                    const $count: usize = $size;
                    $body
                })+
                _ => unreachable!("parts are no larger than MOST"),
            }
            $first += count;
        }
    }};
}
pub(crate) use by_rows;

#[cfg(test)]
pub(crate) mod tests;
