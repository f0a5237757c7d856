//! The runtime itself: what it must catch, and the language as shaders see it.

use anyhow::{bail, ensure, Result};

use super::values::{bytes, bytes_mut, Noise};
use super::{cases, Setup};
use crate::metal::{Argument, Launch, Library, Mode, Order};
use crate::suite::Tally;

pub fn run(setup: &Setup, tally: &mut Tally) -> Result<()> {
    let library = setup.test_shader("runtime.metal")?;
    for (kernel, threads, memory) in [("reverse", 96, 0), ("reverse_lanes", 32, 32)] {
        cases(tally, &format!("{kernel}: the same in every order"), 3, || {
            let all = reversed(&library, kernel, threads, memory, 0)?;
            let (source, wanted) = &all[0];
            ensure!(source != wanted, "nothing was reversed");
            for (_, got) in &all {
                let right =
                    wanted == got && got.iter().rev().take(8).eq(source[source.len() - threads..].iter().take(8));
                ensure!(right, "not the reverse");
            }
            Ok(())
        });
        tally.check(&format!("{kernel} without its barrier: orders differ"), || {
            let all = reversed(&library, kernel, threads, memory, 1)?;
            let same = all.windows(2).all(|two| bytes(&two[0].1) == bytes(&two[1].1));
            ensure!(!same, "a missing barrier was not noticed");
            Ok(())
        });
    }
    tally.check("a shader without mistakes passes strict mode", || mistake(&library, 0, 64));
    // In the sanitizer's build it is the sanitizer that sees 5, and ends the process.
    let is_plain = setup.mode == Mode::Plain;
    let named = [
        (1, 64, "different"),
        (2, 64, "different places"),
        (3, 64, "ended that others wait for"),
        (4, 64, "lane that is not there"),
        (5, 64, "beside its bounds"),
        (6, 9000, "bytes of threadgroup memory"),
        (7, 64, "orders no memory"),
    ];
    for (number, floats, message) in named.into_iter().filter(|&(n, ..)| n != 5 || is_plain) {
        tally.check(&format!("strict mode names mistake {number}: {message}"), || {
            match mistake(&library, number, floats) {
                Ok(()) => bail!("it was not noticed"),
                Err(e) if format!("{e:#}").contains(message) => Ok(()),
                Err(e) => bail!("another message: {e:#}"),
            }
        });
    }
    tally.check("threadgroup memory that was not written is NaN", || {
        let target = launch_mistakes(&library, 8, 128)?;
        ensure!(target.iter().all(|x| x.is_nan()), "{target:?}");
        Ok(())
    });
    tally.check("a function constant that is not set is an error", || {
        let mut target = [0.0f32; 64];
        let buffers = vec![Argument::Write(bytes_mut(&mut target))];
        let launch = Launch {
            kernel: "mistakes",
            grid: [1, 1, 1],
            group: [64, 1, 1],
            buffers,
            threadgroup: &[256],
            constants: &[],
            order: Order::Forward,
            strict: true,
        };
        ensure!(library.launch(launch).is_err_and(|e| format!("{e}").contains("FC_mistake")), "it was not noticed");
        Ok(())
    });
    tally.check("vectors, halves, swizzles, shuffles", || language(&library));
    Ok(())
}

/// A write behind threadgroup memory, for AddressSanitizer to see.
pub fn overrun(setup: &Setup) -> Result<()> {
    launch_mistakes(&setup.test_shader("runtime.metal")?, 5, 64).map(drop)
}

/// (source, result) for each order.
fn reversed(
    library: &Library,
    kernel: &str,
    threads: usize,
    memory: usize,
    mistake: u32,
) -> Result<Vec<(Vec<f32>, Vec<f32>)>> {
    let source = Noise::new(1).row(2 * threads);
    Order::ALL
        .into_iter()
        .map(|order| {
            let mut target = vec![0.0f32; source.len()];
            library.launch(Launch {
                kernel,
                grid: [2, 1, 1],
                group: [threads as u32, 1, 1],
                buffers: vec![Argument::Read(bytes(&source)), Argument::Write(bytes_mut(&mut target))],
                threadgroup: &[4 * memory],
                constants: &[(0, mistake.into())],
                order,
                strict: true,
            })?;
            Ok((source.clone(), target))
        })
        .collect()
}

fn launch_mistakes(library: &Library, number: u32, floats: usize) -> Result<Vec<f32>> {
    let mut target = vec![0.0f32; 64];
    library.launch(Launch {
        kernel: "mistakes",
        grid: [1, 1, 1],
        group: [64, 1, 1],
        buffers: vec![Argument::Write(bytes_mut(&mut target))],
        threadgroup: &[4 * floats],
        constants: &[(0, number.into())],
        order: Order::Forward,
        strict: true,
    })?;
    Ok(target)
}

fn mistake(library: &Library, number: u32, floats: usize) -> Result<()> {
    let target = launch_mistakes(library, number, floats)?;
    for (i, &x) in target.iter().enumerate() {
        ensure!(x == 32.0 + 63.0 - i as f32, "thread {i}: {x}");
    }
    Ok(())
}

fn language(library: &Library) -> Result<()> {
    let mut target = vec![0.0f32; 20 * 32];
    library.launch(Launch {
        kernel: "language",
        grid: [1, 1, 1],
        group: [32, 1, 1],
        buffers: vec![Argument::Write(bytes_mut(&mut target))],
        threadgroup: &[],
        constants: &[(0, 0.0)],
        order: Order::Random(7),
        strict: true,
    })?;
    for (i, got) in target.chunks_exact(20).enumerate() {
        let (down, up) = (if i < 31 { i + 1 } else { i }, if i >= 2 { i - 2 } else { i });
        let wanted = [
            2.0,
            1.0,
            6.0,
            8.0,
            2048.0,
            1.0,
            255.0,
            0.0,
            // (2, 1, 0.5) . (0.5, 1, 2)
            3.0,
            down as f32,
            up as f32,
            (i ^ 5) as f32,
            496.0,
            31.0,
            i as f32,
            std::f32::consts::PI,
            1.0,
            f32::INFINITY,
            // 2048 + 1 in a half
            2048.0,
            1.0 / 3.0,
        ];
        ensure!(got == wanted, "thread {i}: {got:?}, wanted {wanted:?}");
    }
    Ok(())
}
