//! A compiled shader and its launches, on the CPU or on a GPU.

use std::path::Path;

use anyhow::Result;

use super::cpu::CpuLibrary;
#[cfg(target_os = "macos")]
use super::gpu::GpuLibrary;

pub enum Library {
    Cpu(CpuLibrary),
    #[cfg(target_os = "macos")]
    Gpu(GpuLibrary),
}

/// In which order threads run between two points where they meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Forward,
    Reverse,
    Random(u32),
}

impl Order {
    /// One of each: results that differ are a race.
    pub const ALL: [Order; 3] = [Order::Forward, Order::Reverse, Order::Random(1)];
}

/// A buffer of a launch.
pub enum Argument<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
}

pub struct Launch<'a> {
    pub kernel: &'a str,
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of one.
    pub group: [u32; 3],
    pub buffers: Vec<Argument<'a>>,
    /// Bytes of `[[threadgroup(n)]]`.
    pub threadgroup: &'a [usize],
    /// Index and value of every function constant of the shader.
    pub constants: &'a [(i64, f64)],
    pub order: Order,
    /// What the language leaves open is an error.
    pub strict: bool,
}

/// What a launch did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub threadgroups: u64,
    pub switches: u64,
    pub simd_operations: u64,
    pub barriers: u64,
}

impl Library {
    /// A library that the compiler made.
    pub fn load(path: &Path) -> Result<Library> {
        CpuLibrary::load(path).map(Library::Cpu)
    }

    /// Compiled by Metal, for the GPU of this machine.
    #[cfg(target_os = "macos")]
    pub fn on_gpu(source: &str) -> Result<Library> {
        GpuLibrary::new(source).map(Library::Gpu)
    }

    /// The CPU's, on which barriers can be taken away.
    pub fn as_cpu(&self) -> Option<&CpuLibrary> {
        match self {
            Library::Cpu(cpu) => Some(cpu),
            #[cfg(target_os = "macos")]
            Library::Gpu(_) => None,
        }
    }

    /// Runs a kernel to its end. One at a time: function constants belong to the library.
    pub fn launch(&self, launch: Launch) -> Result<Counts> {
        match self {
            Library::Cpu(cpu) => cpu.launch(launch),
            #[cfg(target_os = "macos")]
            Library::Gpu(gpu) => gpu.launch(launch),
        }
    }
}
