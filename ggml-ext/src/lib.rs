//! KV-cache types.
