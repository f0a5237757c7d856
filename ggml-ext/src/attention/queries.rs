//! Query rows in the form that keys are scored in, and the scores of cells by them. FLASH_ATTN_EXT and MUL_MAT share it.
//!
//! Levels meet 8-bit queries in integer products; angles are looked up in tables of queries; floats meet floats, and where
//! there are many query rows K's are transposed first, so that the product is one small matrix kernel.

use super::memory::{bytes_of, BlockRoom, Cut};
use super::side::{Cells, KvSide};
use crate::codec::Scorer;
use crate::isa::{Kernels, Matrix, MatrixMut, Queries, Role, CELLS};
use crate::tensor::Tensor;

/// Rows from which transposing K's floats pays.
pub(super) const MANY_ROWS: usize = 12;

/// Query rows of one KV head.
pub(super) struct QueryRows<'a> {
    /// What they are shaped for: it is scored, or another that has its form.
    k: &'a KvSide,
    kernels: &'static Kernels,
    /// What scores are multiplied by.
    factor: f32,
    /// In K's domain, rows of its width.
    floats: *mut f32,
    bytes: Queries,
    /// Rows of `table_len`.
    tables: *mut f32,
    table_len: usize,
}

/// Are queries rounded by pairs for it?
fn by_pairs(k: &KvSide, kernels: &Kernels) -> bool {
    kernels.pairs && k.has_coarse_levels()
}

/// Is a query for one the same as for the other?
pub(super) fn same_form(a: &KvSide, b: &KvSide, kernels: &Kernels) -> bool {
    let by_levels = |k: &KvSide| k.has_levels() && matches!(k.scorer, Scorer::Levels);
    let alike = a.width == b.width && a.scale_group() == b.scale_group() && a.domain.is(b.domain);
    by_levels(a) && by_levels(b) && alike && by_pairs(a, kernels) == by_pairs(b, kernels)
}

fn table_len(k: &KvSide) -> usize {
    match k.scorer {
        Scorer::Levels => 0,
        Scorer::Tables(f) => f.table_len(),
    }
}

impl<'a> QueryRows<'a> {
    /// Bytes of so many rows.
    pub fn bytes(k: &KvSide, rows: usize) -> usize {
        let groups = rows * k.width / k.scale_group();
        bytes_of::<f32>(rows * k.width)
            + bytes_of::<i8>(rows * k.width)
            + 2 * bytes_of::<f32>(groups)
            + bytes_of::<f32>(rows * table_len(k))
    }

    /// Room for so many rows.
    ///
    /// # Safety
    /// `cut` is the memory of these rows for as long as they are used.
    pub unsafe fn new(k: &'a KvSide, kernels: &'static Kernels, rows: usize, factor: f32, cut: &mut Cut) -> Self {
        let groups = rows * k.width / k.scale_group();
        QueryRows {
            k,
            kernels,
            factor,
            floats: cut.take(rows * k.width),
            bytes: Queries {
                bytes: cut.take(rows * k.width),
                scales: cut.take(groups),
                sums: cut.take(groups),
                count: rows,
                width: k.width,
                scale_group: k.scale_group(),
                pairs: by_pairs(k, kernels),
            },
            tables: cut.take(rows * table_len(k)),
            table_len: table_len(k),
        }
    }

    /// Row r becomes row `at` of q. Is it finite?
    ///
    /// # Safety
    /// r is one of the rows; `q` has that row, of K's size; the kernels can run here.
    pub unsafe fn set(&mut self, r: usize, q: &Tensor, at: [usize; 3]) -> bool {
        let (kernels, width) = (self.kernels, self.k.width);
        // SAFETY: the caller's promise; row r of the buffers.
        unsafe {
            let row = std::slice::from_raw_parts_mut(self.floats.add(r * width), width);
            self.k.enter_query(kernels, q, at, row);
            if self.k.scorer == Scorer::Levels && self.k.has_levels() {
                return (kernels.quantize_query)(row, self.factor, self.bytes, r);
            }
            let finite = row.iter().all(|x| x.is_finite());
            (kernels.scale)(row, self.factor);
            if let Scorer::Tables(f) = self.k.scorer {
                let table = self.tables.add(r * self.table_len);
                (kernels.polar_tables)(f, row, std::slice::from_raw_parts_mut(table, self.table_len));
            }
            finite
        }
    }

    /// Scores of cells of `k` by the first `rows` rows: `out[r][c]`, rows of CELLS. `many`: the op has many query rows.
    ///
    /// # Safety
    /// The rows are set, for this side or one of its form; it has these cells, a block or what there is of one; `room` is as
    /// wide as it.
    pub unsafe fn score(&self, k: &KvSide, cells: Cells, rows: usize, many: bool, room: &BlockRoom, out: *mut f32) {
        let kernels = self.kernels;
        let q = Matrix(self.floats, k.width);
        // SAFETY: the caller's promise.
        unsafe {
            match k.scorer {
                Scorer::Tables(f) => {
                    (kernels.polar_scores)(f, k.rows(cells), self.tables, rows, out);
                }
                Scorer::Levels if k.has_levels() => {
                    let block = k.block(room.levels, room.scales);
                    k.levels(kernels, cells, Role::Dot, block);
                    (kernels.dot_levels)(block, cells.n, Queries { count: rows, ..self.bytes }, out);
                    if let Some(chain) = k.chain(kernels, cells, room.frame) {
                        // The I-frame meets the query as it is: it is far larger than the differences.
                        let m = std::slice::from_raw_parts(room.frame, k.width);
                        (kernels.chain_scores)(&chain, m, q, self.factor, rows, out);
                    }
                }
                Scorer::Levels => {
                    k.floats(kernels, cells, room.floats);
                    if many {
                        (kernels.transpose)(room.floats, k.width, room.transposed);
                        std::slice::from_raw_parts_mut(out, rows * CELLS).fill(0.0);
                        let k_columns = Matrix(room.transposed, CELLS);
                        (kernels.gemm64)(q, k_columns, MatrixMut(out, CELLS), rows, k.size);
                    } else {
                        (kernels.dot_floats)(room.floats, k.width, cells.n, self.floats, rows, out);
                    }
                }
            }
        }
    }
}
