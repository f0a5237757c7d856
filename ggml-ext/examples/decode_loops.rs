//! One block of a decode step, between two marks: what `cargo kv mca` traces.
//!
//! `decode_loops TABLE NAME` runs kernels of that table on 64 cells of one KV head of size 128 with four query heads.
//! NAME is a family and what it is: `srft4-k` (scores), `srft4-v` (weighted sums), and so on. Rows are noise, since any
//! bytes decode and all of them at the same speed.

use std::hint::black_box;

use ggml_ext::codec::levels::LevelLayout;
use ggml_ext::codec::{RowFormat, Scorer};
use ggml_ext::isa::{self, padded, Kernels, LevelBlock, Matrix, Queries, Role, StoredRows, CELLS};
use ggml_ext::random::Noise;
use ggml_ext::table::{self, Concrete, Entry};

const SIZE: usize = 128;
const HEADS: usize = 4;

/// The trace is cut here.
#[no_mangle]
#[inline(never)]
extern "C" fn kv_mark() {
    black_box(());
}

fn main() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, table, name] = arguments.as_slice() else { return Err("usage: decode_loops TABLE NAME".into()) };
    let kernels = isa::available().iter().copied().find(|k| k.name == table).ok_or("no such table on this CPU")?;
    let (family, side) = name.split_once('-').ok_or("a name is FAMILY-k or FAMILY-v")?;
    let Some(Entry::Family(family)) = table::by_name(family) else { return Err(format!("no family {family}")) };
    let block = Block::new(kernels, family.at(SIZE).ok_or("not at this size")?);
    match side {
        "k" => block.scores(),
        _ => block.sums(),
    }
    Ok(())
}

struct Block {
    kernels: &'static Kernels,
    kind: Concrete,
    rows: Vec<u8>,
}

fn noise(n: usize) -> impl Iterator<Item = u8> {
    let mut noise = Noise::new(1);
    (0..n).map(move |_| (noise.bits() >> 32) as u8)
}

impl Block {
    fn new(kernels: &'static Kernels, kind: Concrete) -> Block {
        Block { kernels, kind, rows: noise(CELLS * kind.row_bytes()).collect() }
    }

    fn levels(&self) -> LevelLayout {
        self.kind.format().levels()
    }

    /// Scores of the block by four queries.
    fn scores(&self) {
        let (rows, stride) = (self.rows.as_ptr(), self.kind.row_bytes());
        let (kind, mut out) = (self.levels(), [0.0f32; HEADS * CELLS]);
        if let Scorer::Tables(f) = self.kind.format().scorer() {
            let tables = vec![0.5f32; HEADS * f.table_len()];
            kv_mark();
            // SAFETY: rows, tables and scores of the shapes that the kernel wants, on a CPU of the table.
            unsafe {
                (self.kernels.polar_scores)(
                    f,
                    StoredRows::new(rows, stride, CELLS),
                    tables.as_ptr(),
                    HEADS,
                    out.as_mut_ptr(),
                )
            };
            kv_mark();
            black_box(&out);
            return;
        }
        let (width, groups) = (padded(kind.values), padded(kind.values) / kind.scale_group);
        let mut buffers = Buffers::new(kind);
        let mut bytes: Vec<i8> = noise(HEADS * width).map(|b| b as i8).collect();
        let (mut scales, mut sums) = (vec![0.5f32; HEADS * groups], vec![0i32; HEADS * groups]);
        let queries = Queries {
            bytes: bytes.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            sums: sums.as_mut_ptr(),
            count: HEADS,
            width,
            scale_group: kind.scale_group,
            pairs: self.kernels.pairs && kind.packing.is_coarse(),
        };
        let (block, floats, mut frame) = (buffers.block(kind), vec![0.5f32; HEADS * width], vec![0.0f32; width]);
        kv_mark();
        // SAFETY: buffers of the shapes that the kernels want, on a CPU of the table.
        unsafe {
            (self.kernels.unpack)(&kind, StoredRows::new(rows, stride, CELLS), Role::Dot, block);
            (self.kernels.dot_levels)(block, CELLS, queries, out.as_mut_ptr());
            if let Some(f) = self.kind.format().grouped() {
                let chain = (self.kernels.frame_and_chain)(f, rows, stride, CELLS, &mut frame);
                let q = Matrix(floats.as_ptr(), width);
                (self.kernels.chain_scores)(&chain, &frame, q, 1.0, HEADS, out.as_mut_ptr());
            }
        }
        kv_mark();
        black_box(&out);
    }

    /// The block's values, weighted for four queries.
    fn sums(&self) {
        let kind = self.levels();
        let mut buffers = Buffers::new(kind);
        let (block, weights) = (buffers.block(kind), [1.0f32 / CELLS as f32; HEADS * CELLS]);
        let mut acc = vec![0.0f32; HEADS * padded(kind.values)];
        kv_mark();
        // SAFETY: buffers of the shapes that the kernels want, on a CPU of the table.
        unsafe {
            (self.kernels.unpack)(
                &kind,
                StoredRows::new(self.rows.as_ptr(), self.kind.row_bytes(), CELLS),
                Role::Weigh,
                block,
            );
            (self.kernels.weigh_levels)(block, CELLS, weights.as_ptr(), HEADS, acc.as_mut_ptr());
        }
        kv_mark();
        black_box(&acc);
    }
}

struct Buffers {
    levels: Vec<i8>,
    scales: Vec<f32>,
}

impl Buffers {
    fn new(kind: LevelLayout) -> Buffers {
        let width = padded(kind.values);
        Buffers { levels: vec![0; CELLS * width], scales: vec![0.0; CELLS * width / kind.scale_group] }
    }

    fn block(&mut self, kind: LevelLayout) -> LevelBlock {
        LevelBlock {
            levels: self.levels.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            width: padded(kind.values),
            scale_group: kind.scale_group,
        }
    }
}
