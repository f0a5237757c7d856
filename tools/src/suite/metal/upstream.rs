//! ggml's own shaders, run the same way: what the runtime makes of code that is known to work on a Mac.
use anyhow::Result;

use super::Bench;
use crate::suite::Tally;

pub fn run(_bench: &Bench, _tally: &mut Tally) -> Result<()> {
    Ok(())
}
