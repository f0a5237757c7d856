//! KV-cache types for ggml and llama.cpp.
//!
//! Keys and values are rotated, quantized to 8, 4, 3 or 2 bits, and attended to as they are stored. Data flows one way:
//! f32 rows -> codec (encode) -> cache bytes -> attention (reads bytes) -> f32 output.
//!
//! llama.cpp finds the types by name or number: [`KvType`] parses names into numbers. [`cache_bytes`] and
//! [`largest_context`] compute the size of a cache before it is made, for a shape that is given or that [`Gguf`] reads from a
//! model's file. Other engines use [`Cache`] and [`attend`], or [`encode`] and [`decode`] for single rows.
//!
//! ```
//! use ggml_ext::{attend, AttendOptions, Cache, KvType};
//!
//! let kind: KvType = "srft4".parse()?;
//! let mut k = Cache::new(kind, 128, 8, 4096)?;
//! let mut v = Cache::new(kind, 128, 8, 4096)?;
//! // Each token appends a cell of 8 heads …
//! let (key, value) = (vec![0.5; 8 * 128], vec![0.25; 8 * 128]);
//! k.write(0, &key)?;
//! v.write(0, &value)?;
//! // … and 32 query heads look at the cells that there are.
//! let query = vec![0.1; 32 * 128];
//! let out = attend(&query, 32, &k, &v, 1, &AttendOptions::default())?;
//! assert!((out[0] - 0.25).abs() < 0.05);
//! # Ok::<(), ggml_ext::Error>(())
//! ```

#![forbid(missing_docs)]
// Lanes and cells are numbered; an index says more than an iterator there.
#![allow(clippy::needless_range_loop)]
// Hidden modules write a[i] in comments and link to private items; the public modules turn the lints on again.
#![allow(rustdoc::broken_intra_doc_links, rustdoc::private_intra_doc_links)]

mod attend;
mod cache;
mod error;
mod gguf;
mod kv_type;
mod memory;
mod room;
mod shape;

pub use attend::{attend, AttendOptions};
pub use cache::{decode, encode, Cache};
pub use error::Error;
pub use gguf::Gguf;
pub use kv_type::KvType;
pub use memory::{cache_bytes, largest_context, CacheSize, ContextShape, LayerShape, ModelShape};

// Not part of the interface: used by tools/, dev/ and the C boundary, and changes without notice.
#[doc(hidden)]
pub mod attention;
#[doc(hidden)]
pub mod center;
#[doc(hidden)]
pub mod codec;
#[doc(hidden)]
pub mod domain;
#[doc(hidden)]
pub mod ffi;
#[doc(hidden)]
pub mod groups;
#[doc(hidden)]
pub mod guard;
#[doc(hidden)]
pub mod isa;
#[doc(hidden)]
pub mod lanes;
#[doc(hidden)]
pub mod metal;
#[doc(hidden)]
pub mod products;
#[doc(hidden)]
pub mod random;
#[doc(hidden)]
pub mod rotation;
#[doc(hidden)]
pub mod rows;
#[doc(hidden)]
pub mod spec;
#[doc(hidden)]
pub mod state;
#[doc(hidden)]
pub mod table;
#[doc(hidden)]
pub mod tensor;
