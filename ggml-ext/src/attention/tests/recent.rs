//! Precise rows in the place of cells.

use super::*;
use crate::attention::RecentRows;

/// Precise rows of a few cells: of slots, and of the tokens of a batch.
pub struct Columns {
    slots: usize,
    window: (Cache, Cache),
    batch: Option<(Cache, Cache)>,
    cells: Vec<i64>,
}

/// The type of the precise rows beside rows of a type.
fn precise(name: &'static str) -> &'static str {
    match name {
        "f32" | "f16" => name,
        "q8_0" | "delta8" => "f16",
        _ => "srft8",
    }
}

impl Columns {
    fn new(case: Case, slots: usize, batch: usize, cells: Vec<i64>) -> Columns {
        assert_eq!(cells.len(), slots + batch);
        let mut noise = Noise::new(slots as u64 + 1);
        let mut rows = |n: usize| {
            let k = cache(precise(case.k), true, case.k_size, n, case.kv_heads, &mut noise);
            (k, cache(precise(case.v), false, case.v_size, n, case.kv_heads, &mut noise))
        };
        let window = rows(slots);
        Columns { slots, window, batch: (batch > 0).then(|| rows(batch)), cells }
    }

    /// The batch's tensors.
    pub fn batch(&self) -> Option<(Tensor, Tensor)> {
        let n = self.cells.len() - self.slots;
        self.batch.as_ref().map(|(k, v)| (k.tensor(n, k.unit()), v.tensor(n, v.unit())))
    }

    pub fn rows<'a>(&self, batch: Option<&'a (Tensor, Tensor)>) -> RecentRows<'a> {
        let (k, v) = &self.window;
        let n = self.cells.len();
        RecentRows {
            k: k.tensor(self.slots, k.unit()),
            v: v.tensor(self.slots, v.unit()),
            cells: Tensor {
                kind: 27,
                ne: [n as i64, 1, 1, 1],
                nb: [8, 8 * n, 8 * n, 8 * n],
                data: self.cells.as_ptr().cast_mut().cast(),
                to_float: None,
                view: Default::default(),
            },
            batch_k: batch.map(|b| &b.0),
            batch_v: batch.map(|b| &b.1),
        }
    }

    /// The precise key and value of a cell, if it has some.
    pub fn values(&self, cell: usize, head: usize) -> Option<(&[f32], &[f32])> {
        let column = self.cells.iter().position(|&c| c == cell as i64)?;
        let (at, (k, v)) = match column.checked_sub(self.slots) {
            None => (column, &self.window),
            Some(at) => (at, self.batch.as_ref()?),
        };
        Some((k.value(at, head), v.value(at, head)))
    }
}

/// Slots hold the cells before the batch in an order of their own, and some hold none, or one that is not looked at; the
/// batch is the last cells.
fn columns(case: Case, slots: usize, batch: usize) -> Columns {
    let past = case.cells - batch;
    let cell = |slot: usize| match slot % 11 {
        3 => -1,
        5 => (case.cells + slot) as i64,
        _ => {
            let back = slot * 5 % slots;
            if back < past {
                (past - 1 - back) as i64
            } else {
                -1
            }
        }
    };
    assert!(!slots.is_multiple_of(5) || slots == 1, "5 and the slots have no divisor in common");
    let cells = (0..slots).map(cell).chain((past..case.cells).map(|c| c as i64)).collect();
    Columns::new(case, slots, batch, cells)
}

fn check_columns(case: Case, slots: usize, batch: usize, threads: &[usize]) {
    let trial = Trial { recent: Some(columns(case, slots, batch)), ..Trial::new(case) };
    trial.check(threads);
}

#[test]
fn every_pair_of_types() {
    let ours = || table::families().iter();
    let pairs = ours().flat_map(|k| ours().filter(|v| v.sides.serve_v()).map(|v| (k.name, v.name)));
    let beside = [("f16", "srft4"), ("q8_0", "srft3"), ("srft4", "f16"), ("delta4", "q8_0"), ("polar3", "f32")];
    for (k, v) in stepped(pairs.chain(beside)) {
        check_columns(Case { k, v, queries: 3, ..PLAIN }, 64, 3, &[1]);
    }
}

#[test]
fn windows_batches_and_masks() {
    let mut cases = Vec::new();
    for (slots, batch) in [(1, 0), (64, 0), (128, 0), (128, 1), (128, 70), (333, 0), (1, 200), (7, 333)] {
        for k in ["srft4", "delta4"] {
            let base = Case { k, cells: 333, queries: batch.clamp(1, 60), ..PLAIN };
            cases.push((base, slots, batch));
            cases.push((Case { masked: false, sinks: true, threads: 3, ..base }, slots, batch));
            cases.push((Case { max_bias: 8.0, softcap: 5.0, ..base }, slots, batch));
        }
    }
    for (case, slots, batch) in stepped(cases) {
        check_columns(case, slots, batch, &[1, case.threads]);
    }
}

#[test]
fn head_sizes() {
    let cases = crate::rotation::HEAD_SIZES.into_iter().flat_map(|size| [(size, "srft4"), (size, "turbo3")]);
    for (size, v) in stepped(cases) {
        check_columns(Case { v, k_size: size, v_size: size, queries: 2, ..PLAIN }, 128, 2, &[2]);
    }
}

/// Rows that nobody is to read hold bytes that would show.
#[test]
fn what_is_not_named_is_not_read() {
    for k in ["srft4", "turbo3", "f16"] {
        let case = Case { k, queries: 4, ..PLAIN };
        let trial = Trial { recent: Some(columns(case, 128, 4)), ..Trial::new(case) };
        let want = trial.attend(kernels(), 2);
        let Trial { rows, recent: Some(mut columns), .. } = trial else { unreachable!() };
        let Ok(mut rows) = Rc::try_unwrap(rows) else { panic!("they are this test's alone") };
        let poison = |c: &mut Cache, row: usize| {
            let bytes = c.row_bytes * c.heads;
            c.bytes[row * bytes..][..bytes].fill(0xff);
        };
        for cell in (0..case.cells).filter(|&c| columns.cells.contains(&(c as i64))) {
            poison(&mut rows.0, cell);
            poison(&mut rows.1, cell);
        }
        for slot in (0..columns.slots).filter(|&s| !(0..case.cells as i64).contains(&columns.cells[s])) {
            poison(&mut columns.window.0, slot);
            poison(&mut columns.window.1, slot);
        }
        let poisoned = Trial { recent: Some(columns), ..Trial::of(case, Rc::new(rows)) };
        // Levels are weighed with zero; a float that is none is kept out of the sums.
        assert_eq!(poisoned.attend(kernels(), 2), want, "{k}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let case = Case { queries: 4, ..PLAIN };
    let trial = Trial::new(case);
    let columns = columns(case, 128, 4);
    let (k, v, _) = &*trial.rows;
    let dst = vec![0.0f32; case.v_size * trial.heads() * case.queries];
    let refusal = |change: &dyn Fn(&mut RecentRows)| {
        let batch = columns.batch();
        let mut rows = columns.rows(batch.as_ref());
        change(&mut rows);
        let tensors = [
            float_tensor(&trial.q, [case.k_size, case.queries, trial.heads(), 1]),
            k.tensor(case.cells, k.unit()),
            v.tensor(case.cells, v.unit()),
            float_tensor(&dst, [case.v_size, trial.heads(), case.queries, 1]),
        ];
        let op = AttentionOp { recent: Some(&rows), ..plain_op(tensors, 1.0) };
        Attention::new(&op).err().unwrap_or_default()
    };
    assert_eq!(refusal(&|_| ()), "");
    assert!(refusal(&|r| r.cells.kind = 26).contains("a list of i64"));
    assert!(refusal(&|r| r.cells.ne[0] -= 1).contains("a list of i64"));
    assert!(refusal(&|r| r.batch_k = None).contains("both K and V"));
    assert!(refusal(&|r| r.v.ne[1] -= 1).contains("one number of cells"));
    assert!(refusal(&|r| r.k.ne[2] = 1).contains("heads and streams"));
    let other: &'static Tensor = Box::leak(Box::new(v.tensor(4, v.unit())));
    assert!(refusal(&|r| r.batch_k = Some(other)).contains("the window's types"));
    let delta = cache("delta4", true, 64, 128, case.kv_heads, &mut Noise::new(3));
    let grouped =
        refusal(&|r| (r.k, r.batch_k, r.batch_v, r.cells.ne[0]) = (delta.tensor(128, delta.unit()), None, None, 128));
    assert!(grouped.contains("stand alone"), "{grouped}");
    let plain = cache("f16", false, 64, 128, case.kv_heads, &mut Noise::new(3));
    let plain =
        refusal(&|r| (r.v, r.batch_k, r.batch_v, r.cells.ne[0]) = (plain.tensor(128, plain.unit()), None, None, 128));
    assert!(plain.contains("rotated as V is"), "{plain}");
}
