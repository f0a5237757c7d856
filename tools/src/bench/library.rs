//! tests/bench/kv-bench.h, loaded at run time: the command is built before llama.cpp is.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Context, Result};
use libloading::Symbol;

use super::shape::Shape;
use crate::pair::Pair;

/// CMake's target.
pub const TARGET: &str = "kv-bench";

type Attention = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    c_int,
    c_int,
    c_int,
    i64,
    c_int,
    c_int,
    *mut c_char,
    usize,
) -> *mut c_void;
type Encode = unsafe extern "C" fn(*const c_char, c_int, c_int, c_int, c_int, c_int, *mut c_char, usize) -> *mut c_void;

pub struct Library(libloading::Library);

/// A problem that is ready to run.
pub struct Problem<'a> {
    raw: *mut c_void,
    run: Symbol<'a, unsafe extern "C" fn(*mut c_void) -> c_int>,
    bytes: Symbol<'a, unsafe extern "C" fn(*const c_void) -> u64>,
    free: Symbol<'a, unsafe extern "C" fn(*mut c_void)>,
}

impl Library {
    pub fn path(bin: &Path) -> PathBuf {
        bin.join(libloading::library_filename(TARGET))
    }

    pub fn load(path: &Path) -> Result<Library> {
        // SAFETY: our own library, whose initializers are ggml's.
        let library = unsafe { libloading::Library::new(path) };
        Ok(Library(library.with_context(|| format!("cannot load {}", path.display()))?))
    }

    /// # Safety
    /// T is the type that the header gives the function.
    unsafe fn get<T>(&self, name: &str) -> Result<Symbol<'_, T>> {
        // SAFETY: the caller's promise.
        unsafe { self.0.get(name) }.with_context(|| format!("the library has no {name}: build it again"))
    }

    /// The instruction set that our kernels use in this process.
    pub fn isa(&self) -> Result<String> {
        // SAFETY: as the header has it; the string is static.
        let name = unsafe { CStr::from_ptr(self.get::<unsafe extern "C" fn() -> *const c_char>("kvb_isa")?()) };
        Ok(name.to_string_lossy().into_owned())
    }

    pub fn attention(
        &self,
        pair: &Pair,
        shape: Shape,
        cells: usize,
        queries: usize,
        threads: usize,
    ) -> Result<Problem<'_>> {
        let (k, v) = (CString::new(pair.k.as_str())?, CString::new(pair.v.as_str())?);
        let [d, heads, kv_heads] = [shape.head_size, shape.heads, shape.kv_heads].map(|n| n as c_int);
        let (queries, threads) = (queries as c_int, threads as c_int);
        // SAFETY: as the header has it.
        let make = unsafe { self.get::<Attention>("kvb_attention")? };
        // SAFETY: the strings and the message outlive the call.
        self.problem(|err, size| unsafe {
            make(k.as_ptr(), v.as_ptr(), d, heads, kv_heads, cells as i64, queries, threads, err, size)
        })
        .with_context(|| format!("{} with {} and {cells} cells", pair.name(), shape.name()))
    }

    pub fn encode(
        &self,
        name: &str,
        shape: Shape,
        tokens: usize,
        operations: usize,
        threads: usize,
    ) -> Result<Problem<'_>> {
        let kind = CString::new(name)?;
        let [d, kv_heads, tokens, operations, threads] =
            [shape.head_size, shape.kv_heads, tokens, operations, threads].map(|n| n as c_int);
        // SAFETY: as the header has it.
        let make = unsafe { self.get::<Encode>("kvb_encode")? };
        // SAFETY: the string and the message outlive the call.
        self.problem(|err, size| unsafe { make(kind.as_ptr(), d, kv_heads, tokens, operations, threads, err, size) })
            .with_context(|| format!("encoding {name} with {}", shape.name()))
    }

    fn problem(&self, make: impl FnOnce(*mut c_char, usize) -> *mut c_void) -> Result<Problem<'_>> {
        // SAFETY: as the header has them.
        let (run, bytes, free) = unsafe { (self.get("kvb_run")?, self.get("kvb_cache_bytes")?, self.get("kvb_free")?) };
        let mut message = [0 as c_char; 512];
        let raw = make(message.as_mut_ptr(), message.len());
        if raw.is_null() {
            // SAFETY: terminated, whatever was written.
            let message = unsafe { CStr::from_ptr(message.as_ptr()) };
            return Err(anyhow!("{}", message.to_string_lossy()));
        }
        Ok(Problem { raw, run, bytes, free })
    }
}

impl Problem<'_> {
    pub fn run(&self) -> Result<()> {
        // SAFETY: raw lives until drop.
        if unsafe { (self.run)(self.raw) } != 0 {
            bail!("ggml could not compute it");
        }
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.bytes)(self.raw) }
    }
}

impl Drop for Problem<'_> {
    fn drop(&mut self) {
        // SAFETY: made by the library, freed once.
        unsafe { (self.free)(self.raw) }
    }
}
