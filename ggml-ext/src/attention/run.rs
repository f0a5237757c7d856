//! An attention as its threads run it: checked, in work memory of its size, and NaN where there is no result.

use super::{Attention, AttentionOp, Phase};
use crate::error::panic_text;
use crate::rows::refuse;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// One thread's share of a phase.
type Share = unsafe fn(&Attention, usize, usize, *mut u8);

fn share_of(phase: Phase) -> Share {
    match phase {
        Phase::Compute => |a, ith, nth, work| {
            // SAFETY: the caller's promise is passed on.
            unsafe { a.compute(ith, nth, work) }
        },
        Phase::Finish => |a, ith, nth, work| {
            // SAFETY: the caller's promise is passed on.
            unsafe { a.finish(ith, nth, work) }
        },
    }
}

/// Bytes of work memory for so many threads; why not, where the op is not served.
pub fn work_size(op: &AttentionOp, threads: usize) -> Result<usize, String> {
    Ok(Attention::new(op)?.work_size(threads.max(1)))
}

/// The share of thread `ith` of `nth` in a phase. Where it fails the result is NaN, so that the failure shows.
///
/// # Safety
/// The tensors hold what their shapes say; `work` is null or has `work_size` bytes, shared by the threads of the op; every
/// thread has returned from the first phase before one begins with the second.
pub unsafe fn step(
    op: &AttentionOp,
    phase: Phase,
    ith: usize,
    nth: usize,
    work: *mut u8,
    work_size: usize,
) -> Result<(), String> {
    // SAFETY: the caller's promise is passed on.
    unsafe { step_with(op, phase, ith, nth, work, work_size, share_of(phase)) }
}

/// # Safety
/// As [`step`].
unsafe fn step_with(
    op: &AttentionOp,
    phase: Phase,
    ith: usize,
    nth: usize,
    work: *mut u8,
    work_size: usize,
    share: Share,
) -> Result<(), String> {
    let a = match Attention::new(op).and_then(|a| a.check_data().map(|()| a)) {
        Ok(a) => a,
        // SAFETY: the caller's promise; all threads refuse, and one writes.
        Err(reason) => return Err(unsafe { refuse(&op.dst, ith, reason) }),
    };
    let need = a.work_size(nth);
    // SAFETY: the caller promises tensors as described; the work memory is checked before it is used.
    unsafe {
        if work.is_null() || work_size < need {
            a.poison(phase, ith, nth, None);
            return Err(format!("attention needs {need} bytes of work memory, got {work_size}"));
        }
        catch_unwind(AssertUnwindSafe(|| share(&a, ith, nth, work))).map_err(|panic| {
            a.poison(phase, ith, nth, Some(work));
            format!("attention failed; its result is NaN: {}", panic_text(&*panic))
        })
    }
}

/// What threads share: the op, and the work memory of which each writes its own part.
struct ThreadOp<'a>(&'a AttentionOp<'a>, *mut u8, usize);

// SAFETY: the op's tensors outlive the threads; each thread writes its own part of the result and of the memory.
unsafe impl Sync for ThreadOp<'_> {}

/// The whole op, on so many threads of its own.
///
/// # Safety
/// The tensors hold what their shapes say, and nobody else uses the result meanwhile.
pub unsafe fn run(op: &AttentionOp, threads: usize) -> Result<(), String> {
    // SAFETY: the caller's promise is passed on.
    unsafe { run_with(op, threads, share_of) }
}

/// # Safety
/// As [`run`].
unsafe fn run_with(op: &AttentionOp, threads: usize, share: fn(Phase) -> Share) -> Result<(), String> {
    let threads = i32::try_from(threads.max(1)).map_err(|_| format!("{threads} threads"))? as usize;
    let mut work = vec![0u8; work_size(op, threads)?];
    let shared = &ThreadOp(op, work.as_mut_ptr(), work.len());
    for phase in [Phase::Compute, Phase::Finish] {
        let one = move |ith: usize| {
            let ThreadOp(op, work, size) = shared;
            // SAFETY: the caller's promise; all threads of a phase are done before the next begins.
            unsafe { step_with(op, phase, ith, threads, *work, *size, share(phase)) }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|i| scope.spawn(move || one(i))).collect();
            let first = one(0);
            let join = |t: std::thread::ScopedJoinHandle<_>| t.join().unwrap_or_else(|p| Err(panic_text(&*p).into()));
            others.into_iter().map(join).fold(first, Result::and)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{dense, Cache};

    /// One query on two heads over a few cells.
    fn with_op<T>(call: impl FnOnce(&AttentionOp) -> T) -> (T, Vec<f32>) {
        let kind = "srft4".parse().expect("a family");
        let mut cache = Cache::new(kind, 64, 1, 600).expect("64 is served");
        cache.write(0, &vec![0.5; 600 * 64]).expect("all cells");
        let (q, mut out) = (vec![0.5f32; 2 * 64], vec![0.0f32; 2 * 64]);
        let op = AttentionOp {
            q: dense(0, 4, q.as_ptr().cast(), [64, 1, 2]),
            k: cache.attention_tensor(600),
            v: cache.attention_tensor(600),
            dst: dense(0, 4, out.as_mut_ptr().cast(), [64, 2, 1]),
            mask: None,
            sinks: None,
            recent: None,
            center: None,
            scale: 0.125,
            max_bias: 0.0,
            logit_softcap: 0.0,
        };
        (call(&op), out)
    }

    fn last_panics(_: &Attention, ith: usize, nth: usize, _: *mut u8) {
        assert!(ith + 1 < nth, "thread {ith} has an accident");
    }

    #[test]
    fn a_thread_that_panics_says_so_and_leaves_no_garbage() {
        for threads in [1, 2, 3] {
            let (results, out) = with_op(|op| {
                let mut work = vec![0u8; work_size(op, threads).unwrap()];
                let (memory, size) = (work.as_mut_ptr(), work.len());
                let mut results = Vec::new();
                for i in 0..threads {
                    let share = if i + 1 == threads { last_panics } else { share_of(Phase::Compute) };
                    // SAFETY: tensors as described, the memory that is asked for, one thread after the other.
                    results.push(unsafe { step_with(op, Phase::Compute, i, threads, memory, size, share) });
                }
                for i in 0..threads {
                    // SAFETY: as above, after every compute.
                    results.push(unsafe { step(op, Phase::Finish, i, threads, memory, size) });
                }
                results
            });
            let reason = results.into_iter().collect::<Result<(), String>>().unwrap_err();
            assert!(reason.contains(&format!("thread {} has an accident", threads - 1)), "{reason}");
            assert!(out.iter().all(|x| x.is_nan()), "{threads} threads: {:?}", &out[..4]);
        }
    }

    #[test]
    fn the_reason_comes_from_whichever_thread_fails() {
        let in_compute: fn(Phase) -> Share = |_| last_panics;
        let in_finish: fn(Phase) -> Share = |phase| match phase {
            Phase::Compute => share_of(phase),
            Phase::Finish => last_panics,
        };
        for (threads, share) in [(1, in_compute), (3, in_compute), (1, in_finish), (3, in_finish)] {
            // SAFETY: tensors as described.
            let (result, _) = with_op(|op| unsafe { run_with(op, threads, share) });
            let reason = result.unwrap_err();
            assert!(reason.ends_with(&format!("thread {} has an accident", threads - 1)), "{reason}");
        }
    }

    #[test]
    fn too_little_work_memory_is_refused() {
        let (result, out) = with_op(|op| {
            let mut work = [0u8; 64];
            // SAFETY: tensors as described, memory as said.
            unsafe { step(op, Phase::Compute, 0, 1, work.as_mut_ptr(), work.len()) }
        });
        assert!(result.unwrap_err().ends_with("bytes of work memory, got 64"));
        assert!(out.iter().all(|x| x.is_nan()));
    }
}
