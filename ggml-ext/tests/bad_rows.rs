//! Rows that no model should write, for every type: what is stored is finite, and other rows keep their bytes or, where
//! rows are coded by their neighbours, their values.

use ggml_ext::table;
use ggml_ext::{Cache, KvType};

const HEADS: usize = 2;
const CELLS: usize = 70;
const BAD: usize = 20;

fn wave(cell: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + cell) as f32 * 0.37).sin() + if i % 9 == 0 { 3.0 } else { 0.0 }).collect()
}

/// A cache with `row` in cell BAD and ordinary rows around it.
fn cache_with(kind: KvType, size: usize, row: &[f32]) -> Cache {
    let mut cache = Cache::new(kind, size, HEADS, CELLS).expect("a type that exists");
    for cell in 0..CELLS {
        let ordinary = wave(cell, HEADS * size);
        cache.write(cell, if cell == BAD { row } else { &ordinary }).expect("within the cache");
    }
    cache
}

fn kinds() -> impl Iterator<Item = (KvType, usize, usize)> {
    table::concrete().map(|c| (c.family.name.parse().expect("a family"), c.head_size, c.group_cells()))
}

fn energy(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum()
}

#[test]
fn a_bad_row_is_finite_and_harms_no_other() {
    for (kind, size, group) in kinds() {
        let n = HEADS * size;
        let good = cache_with(kind, size, &wave(BAD, n));
        let cell_bytes = good.as_bytes().len() / CELLS;
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -3e38, 1e30, 1e-42, -1e-45] {
            for at in [0, n / 2, n - 1] {
                let mut row = wave(BAD, n);
                row[at] = bad;
                let cache = cache_with(kind, size, &row);
                for cell in 0..CELLS {
                    let got = cache.read(cell).expect("within the cache");
                    assert!(got.iter().all(|x| x.is_finite()), "{kind} {size}: {bad} in cell {BAD}, read in {cell}");
                    if cell == BAD {
                        continue;
                    }
                    if group == 1 {
                        let bytes = |c: &Cache| c.as_bytes()[cell * cell_bytes..(cell + 1) * cell_bytes].to_vec();
                        assert_eq!(bytes(&cache), bytes(&good), "{kind} {size}: {bad} changed cell {cell}");
                    } else {
                        let lost = |got: &[f32]| {
                            energy(&got.iter().zip(wave(cell, n)).map(|(a, b)| a - b).collect::<Vec<_>>())
                        };
                        // Bands of one bit lose a third of what is in them, whatever the row before is.
                        let without = lost(&good.read(cell).expect("within the cache"));
                        assert!(
                            lost(&got) < 0.1 * energy(&wave(cell, n)) + without,
                            "{kind} {size}: {bad} in cell {BAD} spoiled cell {cell}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_is_stored_as_zero() {
    for (kind, size, _) in kinds() {
        let n = HEADS * size;
        let mut row = wave(BAD, n);
        (row[3], row[size + 1]) = (f32::NAN, f32::NAN);
        let with_nan = cache_with(kind, size, &row);
        (row[3], row[size + 1]) = (0.0, 0.0);
        assert_eq!(with_nan.as_bytes(), cache_with(kind, size, &row).as_bytes(), "{kind} {size}");
    }
}

#[test]
fn the_smallest_numbers_are_zeros_and_nothing_worse() {
    for (kind, size, _) in kinds() {
        let tiny = vec![1e-42; HEADS * size];
        let got = cache_with(kind, size, &tiny).read(BAD).expect("within the cache");
        assert!(got.iter().all(|x| x.abs() < 1e-3), "{kind} {size}: {:?}", &got[..4]);
    }
}
