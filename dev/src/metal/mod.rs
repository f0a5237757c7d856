//! Metal shaders: how they are made to run on a machine without a Mac, and on one.
//!
//! ```text
//! x.metal --c++ -E--> one text --translate--> C++ --c++ with tests/metal/msl.h + runtime.cpp--> a library --library--> launch
//! ```
//!
//! `tests/metal/msl.h` holds the language's types and functions, `tests/metal/runtime.cpp` runs every GPU thread as a
//! fiber. On a Mac the same launches run on its GPU too (`gpu`). `lint` looks for what the translation would let pass and Metal would not.

pub mod compile;
#[cfg(test)]
mod cost;
pub mod cpu;
#[cfg(target_os = "macos")]
pub mod gpu;
pub mod library;
pub mod lint;
#[cfg(test)]
mod tables;
pub mod token;
pub mod translate;

pub use compile::{Compiler, Mode, Shader};
pub use library::{Argument, Launch, Library, Order};
