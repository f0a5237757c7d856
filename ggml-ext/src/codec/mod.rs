//! How rows are stored. A codec knows nothing of ggml, and the instruction sets know nothing of attention.

pub mod delta;
pub mod plain;
pub mod srft;
