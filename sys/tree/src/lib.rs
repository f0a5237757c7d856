//! Empty: this package only pins llama-cpp-sys-2 by its lock file.
