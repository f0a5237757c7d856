//! No op touches a byte outside of its tensors: each buffer lies between two pages that may not be touched, at the very
//! edge of one and then of the other, so that a byte too far ends the process.
//!
//! A process has one table of kernels, and one that dies says little. So a test starts this program again, with
//! GGML_EXT_ISA for each instruction set that the machine has, and shows what the other was at when it died.

#![cfg(unix)]

#[path = "guard_pages/crafted.rs"]
mod crafted;
#[path = "guard_pages/memory.rs"]
mod memory;
#[path = "guard_pages/ops.rs"]
mod ops;

use ggml_ext::isa::{self, Kernels};
use ggml_ext::table;
use memory::{flush, Cache, Flush, Rows};
use std::process::{Command, Output};

/// Set where this is the other process.
const INNER: &str = "GGML_EXT_GUARD_PAGES";

fn again(test: &str, isa: &str) -> Output {
    let program = std::env::current_exe().expect("this program has a path");
    let args = [test, "--exact", "--nocapture", "--test-threads", "1"];
    Command::new(program).args(args).env(INNER, "1").env("GGML_EXT_ISA", isa).output().expect("it starts")
}

/// Runs `inner` in a process of its own, for each of these instruction sets.
fn on_each(tables: &[&Kernels], test: &str, inner: impl FnOnce()) {
    if std::env::var_os(INNER).is_some() {
        assert_eq!(Ok(isa::kernels().name), std::env::var("GGML_EXT_ISA").as_deref());
        return inner();
    }
    for table in tables {
        let done = again(test, table.name);
        let lines = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        let last = lines.iter().map(|text| text.lines().rev().take(12).collect::<Vec<_>>());
        let last: Vec<_> =
            last.flat_map(|lines| lines.into_iter().rev().map(str::to_owned).collect::<Vec<_>>()).collect();
        assert!(done.status.success(), "{}: {}\n{}", table.name, done.status, last.join("\n"));
        assert!(lines[0].contains("1 passed"), "{}: nothing ran", table.name);
    }
}

fn on_both_edges(step: impl Fn(table::Concrete, usize)) {
    for edge in [Flush::End, Flush::Begin] {
        flush(edge);
        for (number, c) in table::concrete().enumerate() {
            println!("{} {edge:?} {}", isa::kernels().name, c.name());
            // Other numbers of cells, threads and options at the other edge.
            step(c, number + 5 * usize::from(edge == Flush::Begin));
        }
    }
}

#[test]
fn every_op_stays_in_its_memory() {
    on_each(isa::available(), "every_op_stays_in_its_memory", || on_both_edges(ops::all));
}

/// Descriptions are looked at before there is a kernel: one table and two sizes are enough.
#[test]
fn crafted_tensors_lead_nowhere() {
    on_each(&isa::available()[..1], "crafted_tensors_lead_nowhere", || {
        on_both_edges(|c, number| {
            if [64, 80].contains(&c.head_size) {
                crafted::rows_that_are_not_there(c);
                crafted::all(c, number);
            }
        });
    });
}

/// A key more than there is memory for must end the process, or the tests above prove nothing.
#[test]
fn a_row_too_many_is_fatal() {
    if std::env::var_os(INNER).is_some() {
        let c = table::concrete().find(|c| c.group_cells() == 1).expect("there is a type");
        let cache = Cache::new(Rows::Ours(c), 1, 9, 1);
        let mut k = cache.whole();
        k.ne[1] = 10;
        let what = ops::Attended { queries: 1, group: 1, half_queries: false, options: 0 };
        ops::attend(&k, &k, c.head_size, what, 1);
        println!("a row that is not there was read");
        return;
    }
    for table in isa::available() {
        let done = again("a_row_too_many_is_fatal", table.name);
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(!done.status.success() && !said.contains("was read"), "{}: {}\n{said}", table.name, done.status);
    }
}
