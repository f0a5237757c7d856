//! States against damage, against contexts that differ in one thing, and groups that move against a decoder.

use super::*;
use crate::codec::delta::{Delta, RowKind};
use crate::codec::RowFormat;
use crate::random::Noise;
use proptest::prelude::*;

fn side(name: &str, heads: u32) -> StateSide {
    let Some(Entry::Concrete(c)) = table::by_name(name) else { panic!("{name}") };
    StateSide::new(c.id(), heads * c.head_size as u32, u64::from(heads) * c.row_bytes() as u64)
}

pub(super) fn cache(k: &str, v: &str) -> StateCache {
    let layer = |index| Layer { index, k: side(k, 2), v: side(v, 2), recent: [StateSide::NONE; 2] };
    let ranges = vec![Range { stream: 0, from: 3, to: 70 }, Range { stream: 0, from: 80, to: 81 }];
    StateCache {
        streams: 1,
        cells: 256,
        sequences: 2,
        flags: 0,
        calibration: 0,
        layers: vec![layer(0), layer(1)],
        ranges,
    }
}

fn header(k: &str, v: &str) -> Header {
    let caches = vec![cache(k, v)];
    Header { kind: 0, foreign: 10 << 16 | 3, meta_bytes: 12, meta_sum: 34, data_bytes: 56, caches }
}

/// A context that could have written it.
pub(super) fn context(k: &str, v: &str) -> Header {
    let mut live = header(k, v);
    live.caches[0].ranges = vec![Range { stream: 0, from: 0, to: 256 }];
    live
}

#[test]
fn a_header_comes_back() {
    let header = header("delta4_64", "srft4_64");
    assert_eq!(Header::from_bytes(&header.to_bytes()), Ok(header.clone()));
    assert_eq!(header.check(&context("delta4_64", "srft4_64")), Ok(()));
    assert_eq!(body_bytes(&header.to_bytes()), Ok(header.to_bytes().len() - PREFIX_BYTES));
}

#[test]
fn every_flipped_bit_and_every_cut_is_seen() {
    let bytes = header("delta4_64", "srft4_64").to_bytes();
    for bit in 0..8 * bytes.len() {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Header::from_bytes(&bad).is_err(), "bit {bit}");
    }
    for n in 0..bytes.len() {
        assert!(Header::from_bytes(&bytes[..n]).is_err(), "{n} bytes");
    }
}

/// A checksum that fits whatever the body says: what a hostile file has.
fn sealed(body: &[u8]) -> Vec<u8> {
    let mut all = Out(Vec::new());
    [MAGIC, VERSION, body.len() as u32].into_iter().for_each(|x| all.u32(x));
    all.u64(checksum(&[&all.0, body]));
    all.0.extend(body);
    all.0
}

/// A number that is only said must cost nothing: libFuzzer found a loop over it.
#[test]
fn any_number_of_streams_is_compared_at_once() {
    let mut many = header("delta4_64", "srft4_64");
    many.caches[0].streams = u32::MAX;
    assert_eq!(many.check(&many), Ok(()));
    assert!(many.check(&context("delta4_64", "srft4_64")).unwrap_err().contains("4294967295 streams"));
}

proptest! {
    #[test]
    fn any_bytes_are_a_header_or_an_error(body in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Header::from_bytes(&body);
        let _ = Header::from_bytes(&sealed(&body));
    }

    #[test]
    fn a_header_that_says_anything_is_compared(
        at in prop::collection::vec((0usize..400, any::<u8>()), 1..6),
    ) {
        let mut body = header("delta4_64", "srft4_64").to_bytes()[PREFIX_BYTES..].to_vec();
        let n = body.len();
        for (i, byte) in at {
            body[i % n] = byte;
        }
        if let Ok(header) = Header::from_bytes(&sealed(&body)) {
            let _ = header.check(&context("delta4_64", "srft4_64"));
        }
    }
}

#[test]
fn what_differs_is_named() {
    let live = context("delta4_64", "srft4_64");
    let refused = |change: &dyn Fn(&mut Header), words: &[&str]| {
        let mut state = header("delta4_64", "srft4_64");
        change(&mut state);
        let reason = state.check(&live).expect_err("it differs");
        assert!(words.iter().all(|w| reason.contains(w)), "{reason}: wanted {words:?}");
    };
    refused(&|s| s.kind = 1, &["one sequence", "a whole context"]);
    refused(&|s| s.kind = 9, &["does not know"]);
    refused(&|s| s.foreign = 11 << 16 | 4, &["11.4", "10.3"]);
    refused(&|s| s.caches.clear(), &["0 caches", "1"]);
    refused(&|s| s.caches[0].streams = 4, &["4 streams"]);
    refused(&|s| s.caches[0].layers.truncate(1), &["1 layers"]);
    refused(&|s| s.caches[0].layers[1].index = 7, &["layer 7"]);
    refused(&|s| s.caches[0].layers[1].k = side("delta3_64", 2), &["layer 1, K", "delta3_64", "delta4_64"]);
    refused(&|s| s.caches[0].layers[1].v = StateSide::NONE, &["layer 1, V", "none", "srft4_64"]);
    refused(&|s| s.caches[0].layers[0].v.kind = 4711, &["type 4711", "srft4_64"]);
    refused(&|s| s.caches[0].layers[0].v.version = 1, &["version of the tables 1", "3 here"]);
    refused(&|s| s.caches[0].layers[0].k.signs ^= 1, &["signs of the rotation"]);
    refused(&|s| s.caches[0].layers[0].k.group_cells = 32, &["cells of a group 32", "64"]);
    refused(&|s| s.caches[0].layers[0].k.head_size = 80, &["head size 80", "64"]);
    refused(&|s| s.caches[0].layers[0].k = side("delta4_64", 4), &["values of a cell 256", "128"]);
    refused(&|s| s.caches[0].layers[0].k.row_bytes += 1, &["bytes of a cell"]);
    refused(&|s| s.caches[0].flags = V_TRANSPOSED, &["-fa off"]);
    refused(&|s| s.caches[0].flags = ROTATED, &["rotation"]);
    refused(&|s| s.caches[0].calibration = 0x1f, &["000000000000001f", "as they are in this context", "cal=FILE"]);
    refused(&|s| s.caches[0].sequences = 3, &["3 sequences", "2"]);
    refused(&|s| s.caches[0].ranges[0].to = 300, &["298 cells", "256 are free"]);
    let newer = body_bytes(&[&MAGIC.to_le_bytes()[..], &[4, 0, 0, 0], &[0; 12]].concat());
    assert!(newer.unwrap_err().contains("version 4"));
}

proptest! {
    #[test]
    fn groups_go_whole_or_not_at_all(
        used in prop::collection::btree_set(0u32..500, 1..80),
        source_cells in 500u32..600,
        taken in prop::collection::vec(prop::bool::weighted(0.01), 300..600),
    ) {
        let cells: Vec<u32> = used.into_iter().collect();
        let free: Vec<bool> = taken.iter().map(|t| !t).collect();
        let group = GROUP_CELLS;
        let mut groups: Vec<u32> = cells.iter().map(|c| c / group as u32).collect();
        groups.dedup();
        match place_groups(&cells, source_cells, &free, group) {
            Some(to) => {
                for (i, (&from, &to)) in cells.iter().zip(&to).enumerate() {
                    prop_assert_eq!(from as usize % group, to as usize % group);
                    let first = to as usize / group * group;
                    prop_assert!(free[first..].iter().take(group).all(|&f| f));
                    let rows = |first: usize, cells: usize| group.min(cells - first);
                    prop_assert_eq!(rows(from as usize / group * group, source_cells as usize), rows(first, free.len()));
                    for (&other, &other_to) in cells[i + 1..].iter().zip(&to_of(&cells, source_cells, &free)[i + 1..]) {
                        prop_assert_eq!(from / 64 == other / 64, to / 64 == other_to / 64);
                    }
                }
            }
            None => {
                let open = free.chunks_exact(group).filter(|g| g.iter().all(|&f| f)).count();
                let whole = groups.iter().filter(|&&g| (g as usize + 1) * group <= source_cells as usize).count();
                // Whole groups have no room, or a last group that is shorter has no other of its length.
                prop_assert!(open < whole || whole < groups.len());
            }
        }
    }
}

fn to_of(cells: &[u32], source_cells: u32, free: &[bool]) -> Vec<u32> {
    place_groups(cells, source_cells, free, GROUP_CELLS).expect("asked before")
}

const HEADS: usize = 2;

/// Keys as models have them, two heads a cell, written in order.
fn written(f: Delta, cells: usize, seed: u64) -> Vec<u8> {
    let mut noise = Noise::new(seed);
    let mean: Vec<f32> = (0..HEADS * f.size()).map(|_| 4.0 * noise.uniform()).collect();
    let mut bytes = vec![0u8; cells * HEADS * f.row_bytes()];
    for head in 0..HEADS {
        let mut one = vec![0.0f32; cells * f.size()];
        for (i, x) in one.iter_mut().enumerate() {
            *x = mean[head * f.size() + i % f.size()] + noise.uniform();
        }
        let mut rows = vec![0u8; cells * f.row_bytes()];
        groups::encode(f, isa::kernels(), &one, &mut rows);
        for (cell, row) in rows.chunks_exact(f.row_bytes()).enumerate() {
            bytes[(cell * HEADS + head) * f.row_bytes()..][..f.row_bytes()].copy_from_slice(row);
        }
    }
    bytes
}

/// One head, decoded from the beginning.
fn head_of(f: Delta, bytes: &[u8], head: usize) -> Vec<f32> {
    let rows: Vec<u8> = bytes.chunks_exact(f.row_bytes()).skip(head).step_by(HEADS).flatten().copied().collect();
    let mut x = vec![0.0; rows.len() / f.row_bytes() * f.size()];
    groups::decode(f, isa::kernels(), &rows, &mut x);
    x
}

fn deltas() -> impl Iterator<Item = (i32, Delta)> {
    table::concrete().filter_map(|c| Some((c.id(), c.format().grouped()?)))
}

#[test]
fn a_group_means_the_same_wherever_it_lies() {
    for (_, f) in deltas() {
        let stride = HEADS * f.row_bytes();
        let source = written(f, 3 * GROUP_CELLS, 1);
        let mut target = written(f, 4 * GROUP_CELLS, 2);
        for (from, to) in [(0usize, 2usize), (1, 0), (2, 3)] {
            let n = GROUP_CELLS * stride;
            target[to * n..(to + 1) * n].copy_from_slice(&source[from * n..(from + 1) * n]);
        }
        for head in 0..HEADS {
            let (a, b) = (head_of(f, &source, head), head_of(f, &target, head));
            let n = GROUP_CELLS * f.size();
            for (from, to) in [(0, 2), (1, 0), (2, 3)] {
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&a[from * n..(from + 1) * n]), bits(&b[to * n..(to + 1) * n]), "{f:?}");
            }
        }
    }
}

#[test]
fn recoded_cells_lose_one_rounding() {
    for (id, f) in deltas() {
        let source = written(f, 2 * GROUP_CELLS, 3);
        let mut target = written(f, 3 * GROUP_CELLS, 4);
        let from: Vec<u32> = (10..100).collect();
        let to: Vec<u32> = (10..100).map(|i| (i * 2 - 13) % 191).collect();
        let rows = |bytes: &[u8], cells| CacheRows { data: bytes.as_ptr().cast_mut(), cells };
        let (src, dst) =
            (rows(&source, 2 * GROUP_CELLS), CacheRows { data: target.as_mut_ptr(), cells: 3 * GROUP_CELLS });
        // SAFETY: both hold their cells, and are this test's alone.
        unsafe { recode(id, HEADS, src, dst, &from, &to) }.unwrap();
        for head in 0..HEADS {
            let (a, b) = (head_of(f, &source, head), head_of(f, &target, head));
            let (mut lost, mut power) = (0.0f64, 0.0f64);
            for (&from, &to) in from.iter().zip(&to) {
                let row = |x: &[f32], cell: u32| x[cell as usize * f.size()..][..f.size()].to_vec();
                for (a, b) in row(&a, from).iter().zip(row(&b, to)) {
                    lost += f64::from(a - b).powi(2);
                    power += f64::from(*a).powi(2);
                }
            }
            let bound = if f.residual().bits() == 4 { 0.02 } else { 0.08 };
            assert!(lost < bound * power, "{f:?}: {} of the energy", lost / power);
        }
    }
    let none = CacheRows { data: std::ptr::null_mut(), cells: 0 };
    // SAFETY: nothing is touched.
    unsafe {
        assert!(recode(148, 1, none, none, &[], &[]).is_err(), "srft4 has no groups");
        assert!(recode(196, 1, none, none, &[0], &[0]).is_err(), "no cells");
    }
}

/// Which rows of a head are there.
fn rows_of(f: Delta, bytes: &[u8], head: usize) -> Vec<bool> {
    bytes.chunks_exact(f.row_bytes()).skip(head).step_by(HEADS).map(|row| f.kind(row) != RowKind::Empty).collect()
}

/// What one kept key may lose of the distance to a neighbour when it is coded anew.
fn bound(f: Delta) -> f64 {
    if f.residual().bits() == 4 {
        0.02
    } else {
        0.08
    }
}

/// Keeps cells of a cache and checks that the others are gone; the bits of kept rows are the same where `exact`.
fn check_kept(id: i32, f: Delta, bytes: &[u8], keep: &[bool], exact: bool) -> Vec<u8> {
    let mut kept = bytes.to_vec();
    let rows = CacheRows { data: kept.as_mut_ptr(), cells: keep.len() };
    // SAFETY: the cells are there, and this test's alone.
    unsafe { super::keep(id, HEADS, rows, keep) }.unwrap();
    for head in 0..HEADS {
        assert_eq!(rows_of(f, &kept, head), keep, "{f:?}: rows of others are left");
        let (a, b) = (head_of(f, bytes, head), head_of(f, &kept, head));
        let (mut lost, mut power) = (0.0f64, 0.0f64);
        for cell in (0..keep.len()).filter(|&cell| keep[cell]) {
            for (a, b) in a[cell * f.size()..][..f.size()].iter().zip(&b[cell * f.size()..]) {
                lost += f64::from(a - b).powi(2);
                power += f64::from(*a).powi(2);
            }
        }
        assert!(lost <= bound(f) * power, "{f:?}: {} of the energy", lost / power);
        assert!(!exact || lost == 0.0, "{f:?}: kept rows have moved");
    }
    kept
}

#[test]
fn what_is_not_kept_is_gone() {
    for (id, f) in deltas() {
        let cells = 2 * GROUP_CELLS;
        let bytes = written(f, cells, 5);
        let pick = |keep: fn(usize) -> bool| (0..cells).map(keep).collect::<Vec<_>>();
        assert_eq!(check_kept(id, f, &bytes, &pick(|_| true), true), bytes, "all is kept");
        // The beginning of each group: nothing that is kept is coded by what goes.
        check_kept(id, f, &bytes, &pick(|cell| cell % GROUP_CELLS < 7), true);
        // A cache that ends within a group has no room for the whole I-frame, so its first key cannot be told from others.
        check_kept(id, f, &written(f, GROUP_CELLS + 20, 5), &[true; GROUP_CELLS + 20], false);
        // The first key, which is the I-frame, goes; rows go that others are chained to.
        check_kept(id, f, &bytes, &pick(|cell| cell % GROUP_CELLS > 9), false);
        check_kept(id, f, &bytes, &pick(|cell| cell % 3 == 1), false);
        let none = check_kept(id, f, &bytes, &pick(|_| false), true);
        assert!(none.iter().all(|&b| b == 0), "{f:?}: bytes are left of cells of which none is kept");
    }
}

/// Two caches that differ in the keys of others alone leave the same bytes, the I-frame included, wherever the kept keys
/// are coded by none of those.
#[test]
fn nothing_of_others_is_left_in_the_bytes() {
    for (id, f) in deltas() {
        let keep: Vec<bool> = (0..GROUP_CELLS).map(|cell| cell < 30).collect();
        let (a, b) = (written(f, GROUP_CELLS, 6), written(f, GROUP_CELLS, 7));
        // The first thirty rows and the I-frame of one, the other rows of the other.
        let mixed: Vec<u8> = a
            .chunks_exact(f.row_bytes())
            .zip(b.chunks_exact(f.row_bytes()))
            .enumerate()
            .flat_map(|(i, (a, b))| {
                let codes = if i / HEADS < 30 { a } else { b };
                [&codes[..f.residual().row_bytes()], &a[f.residual().row_bytes()..]].concat()
            })
            .collect();
        assert_ne!(a, mixed);
        assert_eq!(check_kept(id, f, &a, &keep, true), check_kept(id, f, &mixed, &keep, true), "{f:?}");
    }
}

/// An I-frame that is nobody's whose key is kept: its key was overwritten by another.
#[test]
fn an_i_frame_of_others_is_replaced() {
    for (id, f) in deltas() {
        let mut bytes = written(f, GROUP_CELLS, 8);
        let key = vec![0.5f32; f.size()];
        for head in 0..HEADS {
            let row = bytes.as_mut_ptr().wrapping_add(head * f.row_bytes());
            let layout = GroupLayout::new(bytes.as_mut_ptr(), HEADS * f.row_bytes(), GROUP_CELLS, f);
            // SAFETY: a row of this test's cache.
            unsafe { Walker::new(f, isa::kernels()).write(layout.place(row).0, &key) };
        }
        let frame = |bytes: &[u8]| {
            let shares =
                bytes.chunks_exact(f.row_bytes()).step_by(HEADS).map(|row| row[f.residual().row_bytes()..].to_vec());
            shares.collect::<Vec<_>>()
        };
        let kept = check_kept(id, f, &bytes, &[true; GROUP_CELLS], false);
        assert_ne!(frame(&bytes), frame(&kept), "{f:?}: the I-frame of a key that is gone was kept");
    }
}
