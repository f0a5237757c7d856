//! A shader that was compiled for the CPU. The C side is `tests/metal/runtime.h`.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_long, c_void, CStr, CString};
use std::path::Path;
use std::ptr;

use anyhow::{anyhow, bail, Context, Result};
use libloading::Symbol;

use super::library::{Argument, Counts, Launch, Order};

pub struct CpuLibrary {
    library: libloading::Library,
    /// The number of a barrier that nobody waits at: how tests are tested.
    ignored_barrier: Cell<i32>,
}

#[repr(C)]
struct RawLaunch {
    kernel: *const c_char,
    grid: [u32; 3],
    group: [u32; 3],
    buffers: *const *mut c_void,
    n_buffers: usize,
    threadgroup_bytes: *const usize,
    n_threadgroup: usize,
    order: i32,
    seed: u32,
    strict: i32,
    ignored_barrier: i32,
}

type LaunchFn = unsafe extern "C" fn(*const RawLaunch, *mut Counts, *mut c_char, usize) -> c_int;

impl CpuLibrary {
    pub fn load(path: &Path) -> Result<CpuLibrary> {
        // SAFETY: our own library; its initializers only fill its tables.
        let library = unsafe { libloading::Library::new(path) };
        let library = library.with_context(|| format!("cannot load {}", path.display()))?;
        Ok(CpuLibrary { library, ignored_barrier: Cell::new(-1) })
    }

    /// # Safety
    /// T is the type that the header gives the function.
    unsafe fn get<T>(&self, name: &str) -> Result<Symbol<'_, T>> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get(name) }.with_context(|| format!("the library has no {name}"))
    }

    /// File and line of the barriers that launches so far have met.
    pub fn barriers(&self) -> Result<Vec<(String, i32)>> {
        // SAFETY: as the header has it; files are names in the library.
        unsafe {
            let barrier = self.get::<unsafe extern "C" fn(usize, *mut *const c_char) -> c_int>("msl_barrier")?;
            let mut all = Vec::new();
            let mut file = ptr::null();
            loop {
                let line = barrier(all.len(), &mut file);
                if line == 0 {
                    return Ok(all);
                }
                all.push((CStr::from_ptr(file).to_string_lossy().into_owned(), line));
            }
        }
    }

    /// Runs `work` as if one of [`CpuLibrary::barriers`] were missing.
    pub fn without_barrier<T>(&self, number: usize, work: impl FnOnce() -> T) -> T {
        self.ignored_barrier.set(number as i32);
        let result = work();
        self.ignored_barrier.set(-1);
        result
    }

    fn set_constants(&self, launch: &Launch) -> Result<()> {
        // SAFETY: as the header has them; the string is the library's.
        unsafe {
            self.get::<unsafe extern "C" fn()>("msl_clear_constants")?();
            let set = self.get::<unsafe extern "C" fn(c_long, f64) -> c_int>("msl_set_constant")?;
            for &(index, value) in launch.constants {
                if set(index as c_long, value) != 0 {
                    bail!("{}: the shader has no function constant {index}", launch.kernel);
                }
            }
            let unset = self.get::<unsafe extern "C" fn() -> *const c_char>("msl_unset_constant")?();
            if launch.strict && !unset.is_null() {
                bail!("{}: function constant {} is not set", launch.kernel, CStr::from_ptr(unset).to_string_lossy());
            }
        }
        Ok(())
    }

    /// Runs a kernel to its end. One at a time: function constants belong to the library.
    pub fn launch(&self, mut launch: Launch) -> Result<Counts> {
        self.set_constants(&launch)?;
        let kernel = CString::new(launch.kernel)?;
        let buffers: Vec<*mut c_void> = launch
            .buffers
            .iter_mut()
            .map(|b| match b {
                Argument::Read(bytes) => bytes.as_ptr().cast_mut().cast(),
                Argument::Write(bytes) => bytes.as_mut_ptr().cast(),
            })
            .collect();
        let (order, seed) = match launch.order {
            Order::Forward => (0, 0),
            Order::Reverse => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        let raw = RawLaunch {
            kernel: kernel.as_ptr(),
            grid: launch.grid,
            group: launch.group,
            buffers: if buffers.is_empty() { ptr::null() } else { buffers.as_ptr() },
            n_buffers: buffers.len(),
            threadgroup_bytes: launch.threadgroup.as_ptr(),
            n_threadgroup: launch.threadgroup.len(),
            order,
            seed,
            strict: launch.strict.into(),
            ignored_barrier: self.ignored_barrier.get(),
        };
        let mut counts = Counts::default();
        let mut message = [0 as c_char; 512];
        // SAFETY: as the header has it; the buffers outlive the call, and a shader that leaves them is what the
        // sanitizer's build is for.
        let failed =
            unsafe { self.get::<LaunchFn>("msl_launch")?(&raw, &mut counts, message.as_mut_ptr(), message.len()) != 0 };
        if failed {
            // SAFETY: terminated by snprintf.
            return Err(anyhow!("{}", unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy()));
        }
        Ok(counts)
    }
}
