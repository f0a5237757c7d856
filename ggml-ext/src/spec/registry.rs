//! Specs by number, for the life of the process.
//!
//! The same text has the same number. Numbers lie above every id that a tensor can have, in a range of their own.

use super::{parse, Spec};
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

/// The first id of a spec.
pub const SPEC_BASE: i32 = 0x1_0000;
/// The first id above all specs'.
pub const SPEC_LIMIT: i32 = 0x2_0000;

#[derive(Default)]
struct Registry {
    specs: Vec<&'static Spec>,
    ids: HashMap<&'static str, i32>,
}

static REGISTRY: RwLock<Option<Registry>> = RwLock::new(None);

/// The id of a text: a type's own where it names one and nothing else, otherwise a spec's.
pub fn id_of(text: &str) -> Result<i32, String> {
    let spec = parse(text).map_err(|e| e.to_string())?;
    match spec.alone() {
        Some(member) => Ok(member.id()),
        None => intern(spec),
    }
}

fn intern(spec: Spec) -> Result<i32, String> {
    let mut guard = REGISTRY.write().unwrap_or_else(PoisonError::into_inner);
    let registry = guard.get_or_insert_default();
    if let Some(id) = registry.ids.get(spec.text()) {
        return Ok(*id);
    }
    let id = SPEC_BASE + registry.specs.len() as i32;
    if id >= SPEC_LIMIT {
        return Err(format!("more than {} cache specs in one process", SPEC_LIMIT - SPEC_BASE));
    }
    // Ids are given out for good, so the specs stay.
    let spec: &'static Spec = Box::leak(Box::new(spec));
    registry.specs.push(spec);
    registry.ids.insert(spec.text(), id);
    Ok(id)
}

/// The spec of an id that [`id_of`] gave.
pub fn by_id(id: i32) -> Option<&'static Spec> {
    let place = usize::try_from(id.checked_sub(SPEC_BASE)?).ok()?;
    REGISTRY.read().unwrap_or_else(PoisonError::into_inner).as_ref()?.specs.get(place).copied()
}
