//! KV-cache types for ggml and llama.cpp.
//!
//! Data flows one way: f32 rows -> codec (encode) -> cache bytes -> attention (reads bytes) -> f32 output.

#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs)]
// Lanes and cells are numbered; an index says more than an iterator there.
#![allow(clippy::needless_range_loop)]

pub mod attention;
pub mod codec;
pub mod domain;
pub mod ffi;
pub mod groups;
pub mod guard;
pub mod isa;
pub mod lanes;
pub mod rotation;
pub mod rows;
pub mod spec;
pub mod table;
pub mod tensor;
