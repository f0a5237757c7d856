//! What a tensor may touch, and where the groups of its rows lie. tests/guard_pages.rs has the ops.

use super::*;
use crate::attention::side::KvSide;
use crate::codec::delta::Delta;
use crate::codec::RowFormat;
use crate::groups::GroupLayout;

const HEADS: usize = 3;
const CELLS: usize = 100;
const STREAMS: usize = 2;

fn delta() -> (Concrete, Delta) {
    let Some(Entry::Concrete(c)) = table::by_name("delta4_128") else { panic!("there is such a type") };
    (c, c.format().grouped().expect("its cells are coded together"))
}

/// A cache that is nowhere: nothing here looks at memory.
fn cache() -> Tensor {
    let (c, _) = delta();
    let stride = HEADS * c.row_bytes();
    Tensor {
        kind: c.id(),
        ne: [(HEADS * 128) as i64, CELLS as i64, STREAMS as i64, 1],
        nb: [c.row_bytes(), stride, stride * CELLS, stride * CELLS * STREAMS],
        data: std::ptr::without_provenance_mut(1 << 20),
        to_float: None,
        view: View::default(),
    }
}

/// Cells first.. of it, as attention sees them.
fn view(first: usize, cells: usize) -> Tensor {
    let (whole, row) = (cache(), delta().0.row_bytes());
    let offset = first * whole.nb[1];
    Tensor {
        ne: [128, cells as i64, HEADS as i64, 1],
        nb: [row, whole.nb[1], row, whole.nb[2]],
        data: whole.data.wrapping_add(offset),
        view: View {
            offset,
            row_bytes: whole.nb[1],
            rows: CELLS as i64,
            data: whole.data,
            bytes: HEADS * row * CELLS * STREAMS,
            foreign_bytes: 0,
        },
        ..whole
    }
}

fn layout(t: &Tensor) -> Result<GroupLayout, String> {
    GroupLayout::of(t, delta().1)
}

#[test]
fn groups_of_every_row_lie_within_the_cache() {
    let (whole, row) = (cache(), delta().0.row_bytes());
    let end = whole.data as usize + HEADS * row * CELLS * STREAMS;
    for tensor in [whole, view(0, CELLS), view(CELLS, CELLS), view(64, 10), view(99, 1)] {
        let layout = layout(&tensor).unwrap();
        for cell in 0..CELLS * STREAMS {
            for head in 0..HEADS {
                let at = whole.data.wrapping_add((cell * HEADS + head) * row);
                let (place, lane) = layout.place(at);
                assert_eq!(place.group.wrapping_add(place.row * place.stride), at);
                assert_eq!(lane, cell / CELLS * HEADS + head);
                let last = place.group as usize + (place.rows - 1) * place.stride + row;
                assert!(place.group >= whole.data && last <= end && place.row < place.rows, "cell {cell}: {place:?}");
            }
        }
    }
}

/// What is changed, and what the message must say.
type Changes<'a> = Vec<(&'a str, Box<dyn Fn(&mut Tensor)>)>;

fn all_refused(base: Tensor, changes: Changes, check: impl Fn(&Tensor) -> Result<(), String>) {
    check(&base).unwrap();
    for (i, (says, change)) in changes.into_iter().enumerate() {
        let mut t = base;
        change(&mut t);
        let reason = check(&t).expect_err(says);
        assert!(reason.contains(says), "change {i}: {says:?} in {reason:?}");
    }
}

#[test]
fn a_layout_that_leads_out_of_the_cache_is_refused() {
    let row = delta().0.row_bytes();
    let changes: Changes = vec![
        ("bytes from byte", Box::new(|t| t.ne[1] += (CELLS * STREAMS) as i64)),
        ("bytes from byte", Box::new(|t| t.nb[1] *= 4)),
        ("bytes from byte", Box::new(|t| t.view.bytes /= 2)),
        ("bytes from byte", Box::new(|t| t.view.offset = usize::MAX - 100)),
        ("rows are of", Box::new(|t| t.nb[1] += 2)),
        ("rows are of", Box::new(|t| t.nb[0] = 4)),
        ("cannot be read", Box::new(|t| t.nb[1] = usize::MAX / 2)),
        ("cannot be read", Box::new(|t| t.ne[1] = i64::MAX)),
        ("negative", Box::new(|t| t.ne[2] = -1)),
        ("does not begin there", Box::new(|t| t.data = t.data.wrapping_add(1))),
        ("does not begin there", Box::new(|t| t.view.offset = 0)),
        ("whole rows", Box::new(move |t| t.view.row_bytes = row / 2)),
        ("whole rows", Box::new(|t| t.view.row_bytes = 0)),
        ("whole streams", Box::new(|t| t.view.rows = 0)),
        ("whole streams", Box::new(|t| t.view.rows = -5)),
        ("whole streams", Box::new(|t| t.view.rows = CELLS as i64 - 1)),
        ("whole streams", Box::new(|t| t.view.rows = i64::MAX)),
        ("whole streams", Box::new(move |t| t.view.row_bytes += row)),
        ("whole streams", Box::new(|t| t.view.bytes += 1)),
    ];
    all_refused(view(CELLS, CELLS), changes, |t| layout(t).map(drop));
}

#[test]
fn attention_to_cells_that_are_not_in_a_row_is_refused() {
    let row = delta().0.row_bytes();
    let changes: Changes = vec![
        ("consecutive", Box::new(|t| (t.ne[1], t.nb[1]) = (20, 2 * t.nb[1]))),
        // The heads would be those of another cell.
        ("consecutive", Box::new(|t| (t.ne[1], t.nb[2]) = (20, 20 * t.nb[1]))),
        ("consecutive", Box::new(move |t| (t.ne[1], t.ne[3], t.nb[3]) = (20, 2, 64 * HEADS * row))),
        (
            "multiple of 64",
            Box::new(move |t| {
                t.view.offset += HEADS * row;
                t.data = t.data.wrapping_add(HEADS * row);
                t.ne[1] -= 1;
            }),
        ),
        ("stay within a stream", Box::new(|t| t.ne[1] = CELLS as i64 + 1)),
        ("overlap", Box::new(|t| t.nb[1] = 0)),
    ];
    all_refused(view(0, CELLS), changes, |t| KvSide::new(t, "K").map(drop));
}

#[test]
fn a_part_of_a_row_is_a_view_or_nothing() {
    let Some(Entry::Concrete(c)) = table::by_name("srft4_576") else { panic!("there is such a type") };
    let row = c.row_bytes();
    let nb = [row, row, 10 * row, 10 * row];
    let whole = Tensor { kind: c.id(), ne: [576, 10, 1, 1], nb, ..cache() };
    let bytes = 10 * row;
    // ggml counts the last row as 512/576 of one, and all of it is read.
    let part = Tensor { ne: [512, 10, 1, 1], ..whole };
    let seen = View { row_bytes: row, rows: 10, data: whole.data, bytes, ..View::default() };
    assert!(KvSide::new(&whole, "V").is_ok());
    assert!(KvSide::new(&Tensor { view: seen, ..part }, "V").is_ok());
    assert!(KvSide::new(&Tensor { view: View { bytes: bytes - 1, ..seen }, ..part }, "V").is_err());
    let reason = KvSide::new(&part, "V").err().unwrap();
    assert!(reason.contains("must be a view"), "{reason}");
}

#[test]
fn overlaps_are_found_in_any_order_of_steps() {
    let floats = |ne: [i64; 4], nb: [usize; 4]| Tensor { kind: 0, ne, nb, ..cache() };
    for (ne, nb) in [([4, 3, 2, 1], [4, 16, 48, 96]), ([4, 3, 2, 1], [12, 4, 48, 0]), ([4, 3, 2, 1], [8, 32, 4, 96])] {
        // The last one weaves two planes of floats into each other.
        floats(ne, nb).check_apart("x").unwrap();
    }
    for (ne, nb) in [([4, 3, 2, 1], [4, 12, 48, 96]), ([4, 3, 2, 1], [4, 0, 16, 96]), ([1, 2, 1, 1], [4, 3, 0, 0])] {
        floats(ne, nb).check_apart("x").expect_err("overlap");
    }
}
