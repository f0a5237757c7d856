//! A cache in plain Rust, for engines that are not llama.cpp.
//!
//! It calls the ops that ggml reaches through the C boundary, so what a program gets here is what llama.cpp gets, whatever
//! the type.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::error::Error;
use crate::kv_type::KvType;
use crate::rows;
use crate::tensor::{Tensor, View, I32, I64};
use half::{bf16, f16};

/// K or V of one layer: cells of `heads` rows, compressed, in the layout that llama.cpp gives them.
///
/// ```
/// use ggml_ext::{Cache, KvType};
///
/// let (head_size, heads) = (64, 2);
/// let mut cache = Cache::new("srft8".parse()?, head_size, heads, 1024)?;
///
/// let cell: Vec<f32> = (0..heads * head_size).map(|i| (i as f32 * 0.37).sin()).collect();
/// cache.write(5, &cell)?;
/// let decoded = cache.read(5)?;
/// assert!(cell.iter().zip(&decoded).all(|(a, b)| (a - b).abs() < 0.02));
///
/// // What to put into a file, and back.
/// let restored = Cache::from_bytes("srft8".parse()?, head_size, heads, cache.as_bytes().to_vec())?;
/// assert_eq!(restored.read(5)?, decoded);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cache {
    kind: KvType,
    head_size: usize,
    heads: usize,
    cell_bytes: usize,
    bytes: Vec<u8>,
}

impl Cache {
    /// An empty cache of `cells` cells.
    ///
    /// # Errors
    /// Where the type does not serve the head size, or is one of ggml's block types, which only ggml writes.
    pub fn new(kind: KvType, head_size: usize, heads: usize, cells: usize) -> Result<Cache, Error> {
        let mut cache = Cache::from_bytes(kind, head_size, heads, Vec::new())?;
        cache.bytes = vec![0; cache.cell_bytes * cells];
        Ok(cache)
    }

    /// A cache from the bytes of another one.
    ///
    /// # Errors
    /// As [`Cache::new`], and where the bytes are no whole number of cells.
    pub fn from_bytes(kind: KvType, head_size: usize, heads: usize, bytes: Vec<u8>) -> Result<Cache, Error> {
        let row_bytes = kind.row_bytes_or_error(head_size)?;
        let float = ["f32", "f16", "bf16"].contains(&kind.to_string().as_str());
        if !kind.is_ours() && !float {
            return Err(Error::new(format!("{kind} is written by ggml alone; here there are f32, f16, bf16 and ours")));
        }
        let cell_bytes = row_bytes * heads;
        if heads == 0 || !bytes.len().is_multiple_of(cell_bytes) {
            return Err(Error::new(format!("{} bytes are no whole cells of {heads} rows of {row_bytes}", bytes.len())));
        }
        let kind = kind.at(head_size).unwrap_or(kind);
        Ok(Cache { kind, head_size, heads, cell_bytes, bytes })
    }

    /// The type, at this head size.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Values of a head.
    pub fn head_size(&self) -> usize {
        self.head_size
    }

    /// Heads of a cell.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Cells, written or not.
    pub fn cells(&self) -> usize {
        self.bytes.len() / self.cell_bytes
    }

    /// The compressed rows: cell by cell, head by head.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Values of a cell, all heads together.
    fn cell_values(&self) -> usize {
        self.heads * self.head_size
    }

    /// Encodes `values` into consecutive cells from `first` on: whole cells, head after head.
    ///
    /// # Errors
    /// Where the values are no whole number of cells, or run past the end.
    pub fn write(&mut self, first: usize, values: &[f32]) -> Result<(), Error> {
        let n = values.len() / self.cell_values();
        if values.len() != n * self.cell_values() {
            let want = self.cell_values();
            return Err(Error::new(format!("{} values are no whole cells of {want}", values.len())));
        }
        self.check_cells(first, n)?;
        if !self.kind.is_ours() {
            let at = first * self.cell_bytes;
            write_floats(self.kind, values, &mut self.bytes[at..at + n * self.cell_bytes]);
            return Ok(());
        }
        let index: Vec<i64> = (first as i64..(first + n) as i64).collect();
        let cells = self.tensor();
        let source = dense(0, 4, values.as_ptr().cast(), [self.cell_values(), n, 1]);
        let index = dense(I64, 8, index.as_ptr().cast(), [n, 1, 1]);
        // SAFETY: the tensors describe the slices above; the rows are checked; nobody else has the bytes.
        unsafe { rows::set_rows(&cells, &source, &index, size_of::<i64>(), 0, 1) }.map_err(Error::new)?;
        Ok(())
    }

    /// Decodes one cell: its heads one after the other.
    ///
    /// # Errors
    /// Where there is no such cell.
    pub fn read(&self, cell: usize) -> Result<Vec<f32>, Error> {
        self.check_cells(cell, 1)?;
        let mut values = vec![0.0f32; self.cell_values()];
        if !self.kind.is_ours() {
            read_floats(self.kind, &self.bytes[cell * self.cell_bytes..], &mut values);
            return Ok(values);
        }
        let index = [i32::try_from(cell).map_err(|_| Error::new(format!("cell {cell} is beyond 32 bits")))?];
        let target = dense(0, 4, values.as_mut_ptr().cast(), [self.cell_values(), 1, 1]);
        let index = dense(I32, 4, index.as_ptr().cast(), [1, 1, 1]);
        // SAFETY: as in write; the rows are only read.
        unsafe { rows::get_rows(&target, &self.tensor(), &index, 0, 1) }.map_err(Error::new)?;
        Ok(values)
    }

    pub(crate) fn check_cells(&self, first: usize, n: usize) -> Result<(), Error> {
        match first.checked_add(n) {
            Some(end) if end <= self.cells() => Ok(()),
            _ => Err(Error::new(format!("cells {first} and {n} from there on, in a cache of {}", self.cells()))),
        }
    }

    /// The cache as SET_ROWS and GET_ROWS see it: a cell is a row.
    fn tensor(&self) -> Tensor {
        let row_bytes = self.cell_bytes / self.heads;
        let nb = [row_bytes, self.cell_bytes, self.bytes.len()];
        describe(self.kind.id(), [self.cell_values(), self.cells(), 1], nb, self.bytes.as_ptr())
    }

    /// The first `cells` cells as attention sees them: heads apart.
    pub(crate) fn attention_tensor(&self, cells: usize) -> Tensor {
        let row_bytes = self.cell_bytes / self.heads;
        let unit = if self.kind.is_ours() { row_bytes } else { row_bytes / self.head_size };
        let nb = [unit, self.cell_bytes, row_bytes];
        let view = View {
            row_bytes: self.cell_bytes,
            rows: self.cells() as i64,
            data: self.bytes.as_ptr().cast_mut(),
            bytes: self.bytes.len(),
            ..View::default()
        };
        Tensor { view, ..describe(self.kind.id(), [self.head_size, cells, self.heads], nb, self.bytes.as_ptr()) }
    }
}

/// A tensor of three dimensions, over memory that the caller keeps.
pub(crate) fn describe(kind: i32, ne: [usize; 3], nb: [usize; 3], data: *const u8) -> Tensor {
    Tensor {
        kind,
        ne: [ne[0] as i64, ne[1] as i64, ne[2] as i64, 1],
        nb: [nb[0], nb[1], nb[2], nb[2] * ne[2]],
        data: data.cast_mut(),
        to_float: None,
        view: View::default(),
    }
}

/// The same without gaps, of values of `width` bytes.
pub(crate) fn dense(kind: i32, width: usize, data: *const u8, ne: [usize; 3]) -> Tensor {
    describe(kind, ne, [width, width * ne[0], width * ne[0] * ne[1]], data)
}

fn write_floats(kind: KvType, values: &[f32], bytes: &mut [u8]) {
    let width = bytes.len() / values.len().max(1);
    for (to, &x) in bytes.chunks_exact_mut(width.max(1)).zip(values) {
        match width {
            4 => to.copy_from_slice(&x.to_le_bytes()),
            _ if kind == KvType::F16 => to.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
            _ => to.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
        }
    }
}

fn read_floats(kind: KvType, bytes: &[u8], values: &mut [f32]) {
    let width = kind.row_bytes(1).unwrap_or(4);
    for (x, from) in values.iter_mut().zip(bytes.chunks_exact(width)) {
        *x = match *from {
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            [a, b] if kind == KvType::F16 => f16::from_le_bytes([a, b]).to_f32(),
            [a, b] => bf16::from_le_bytes([a, b]).to_f32(),
            _ => f32::NAN,
        };
    }
}

/// Encodes rows of one head, as consecutive cells of an empty cache.
///
/// ```
/// let rows: Vec<f32> = (0..3 * 128).map(|i| (i as f32).cos()).collect();
/// let srft4: ggml_ext::KvType = "srft4".parse()?;
/// let bytes = ggml_ext::encode(srft4, 128, &rows)?;
/// assert_eq!(bytes.len(), 3 * 68);
/// assert_eq!(ggml_ext::decode(srft4, 128, &bytes)?.len(), rows.len());
/// # Ok::<(), ggml_ext::Error>(())
/// ```
///
/// # Errors
/// As [`Cache::new`] and [`Cache::write`].
pub fn encode(kind: KvType, head_size: usize, values: &[f32]) -> Result<Vec<u8>, Error> {
    let mut cache = Cache::new(kind, head_size, 1, values.len() / head_size.max(1))?;
    cache.write(0, values)?;
    Ok(cache.bytes)
}

/// Decodes what [`encode`] made.
///
/// # Errors
/// As [`Cache::from_bytes`].
pub fn decode(kind: KvType, head_size: usize, bytes: &[u8]) -> Result<Vec<f32>, Error> {
    let cache = Cache::from_bytes(kind, head_size, 1, bytes.to_vec())?;
    let mut values = Vec::with_capacity(cache.cells() * head_size);
    for cell in 0..cache.cells() {
        values.extend(cache.read(cell)?);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Noise;
    use crate::table;

    fn writable() -> impl Iterator<Item = KvType> {
        KvType::all().filter(|t| t.is_ours() || ["f32", "f16", "bf16"].contains(&t.to_string().as_str()))
    }

    /// The mean squared error relative to the values.
    fn error(a: &[f32], b: &[f32]) -> f64 {
        let (mut e, mut p) = (0.0, 0.0);
        for (&a, &b) in a.iter().zip(b) {
            e += (f64::from(a) - f64::from(b)).powi(2);
            p += f64::from(a).powi(2);
        }
        e / p
    }

    #[test]
    fn cells_come_back_from_where_they_were_written() {
        for kind in writable() {
            let (size, heads) = (64, 3);
            let values = Noise::new(7).row(5 * heads * size);
            let mut cache = Cache::new(kind, size, heads, 9).unwrap();
            cache.write(2, &values).unwrap();
            for (i, want) in values.chunks_exact(heads * size).enumerate() {
                let e = error(want, &cache.read(2 + i).unwrap());
                assert!(e < 0.6, "{kind}, cell {i}: {e}");
            }
            let untouched = &cache.as_bytes()[7 * cache.cell_bytes..];
            let grouped = kind.group_cells(size) > 1;
            assert!(grouped || untouched.iter().all(|&b| b == 0), "{kind} wrote beyond its cells");
            assert_eq!(cache.cells(), 9);
        }
    }

    #[test]
    fn more_bits_less_error() {
        let values = Noise::new(3).row(100 * 128);
        let e = |name: &str| {
            let kind = name.parse().unwrap();
            error(&values, &decode(kind, 128, &encode(kind, 128, &values).unwrap()).unwrap())
        };
        assert!(e("f32") == 0.0 && e("f16") < 1e-6);
        assert!(e("srft8") < 1e-4 && e("srft8") < e("srft4") && e("srft4") < e("srft3") && e("srft3") < e("srft2"));
        assert!(e("srft4") < 0.007);
    }

    #[test]
    fn rows_are_those_of_the_c_boundary() {
        let values = Noise::new(11).row(128);
        let Some(table::Entry::Concrete(c)) = table::by_name("srft3_128") else { panic!() };
        let mut want = vec![0u8; c.row_bytes()];
        // SAFETY: 128 values and one row.
        assert!(unsafe { crate::ffi::ggml_ext_encode(c.id(), values.as_ptr(), want.as_mut_ptr(), 128) });
        assert_eq!(encode("srft3".parse().unwrap(), 128, &values).unwrap(), want);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let srft4: KvType = "srft4".parse().unwrap();
        assert!(Cache::new(srft4, 100, 2, 8).is_err());
        assert!(Cache::new(srft4, 64, 0, 8).is_err());
        assert!(Cache::new("q8_0".parse().unwrap(), 64, 1, 8).unwrap_err().to_string().contains("q8_0"));
        assert!(Cache::from_bytes(srft4, 64, 2, vec![0; 73]).is_err());
        let mut cache = Cache::new(srft4, 64, 2, 8).unwrap();
        assert!(cache.write(0, &[0.0; 100]).is_err());
        assert!(cache.write(7, &[0.0; 256]).is_err());
        assert!(cache.write(usize::MAX, &[0.0; 128]).is_err());
        assert!(cache.read(8).is_err());
        assert!(encode(srft4, 64, &[0.0; 65]).is_err());
        assert!(encode(srft4, 0, &[]).is_err());
        cache.write(8, &[]).unwrap();
    }
    #[test]
    fn an_error_has_the_reason_of_the_op() {
        let cache = Cache::new("srft4".parse().unwrap(), 64, 2, 8).unwrap();
        // No public function makes such a cache: it stands for whatever the op finds and the checks above it do not.
        let mut odd = Cache { head_size: 48, ..cache.clone() };
        let reason = odd.write(0, &[0.0; 2 * 48]).unwrap_err().to_string();
        assert!(reason.starts_with("SET_ROWS of") && reason.contains("wanted the same rows"), "{reason}");
        let mut family = Cache { kind: "srft4".parse().unwrap(), ..cache };
        let reason = family.write(0, &[0.0; 128]).unwrap_err().to_string();
        assert_eq!(reason, format!("SET_ROWS to type {}, which is not ours", family.kind.id()));
        let reason = family.read(0).unwrap_err().to_string();
        assert_eq!(reason, format!("GET_ROWS of type {}, which is not ours", family.kind.id()));
        let mut empty = Cache::new("delta4".parse().unwrap(), 64, 1, 0).unwrap();
        let reason = empty.write(0, &[]).unwrap_err().to_string();
        assert!(reason.contains("a cache of 0 bytes: wanted whole streams"), "{reason}");
    }
}
