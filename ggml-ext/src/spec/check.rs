//! May a context be made with these cache types?

use super::{names, registry, Keeps, Member, Side, Spec};

/// A cache type that a context is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskedType {
    /// Any id.
    pub id: i32,
    /// Is it one of ggml's?
    pub is_ggml: bool,
}

/// The context around the two caches.
#[derive(Clone, Copy, Debug)]
pub struct ContextKind<'a> {
    /// Layers of the model.
    pub n_layer: usize,
    /// llama.cpp's name of the architecture; empty where it is not known.
    pub arch: &'a str,
    /// Flash attention is turned off.
    pub flash_attn_off: bool,
}

/// What a cache type stands for.
enum Meaning {
    Spec(&'static Spec),
    Member(Member),
    /// A type of ggml's that its tools do not offer for a cache: llama.cpp decides.
    Ggml,
}

impl Meaning {
    fn of(asked: AskedType, side: Side) -> Result<Meaning, String> {
        match (registry::by_id(asked.id), Member::by_id(asked.id)) {
            (Some(spec), _) => Ok(Meaning::Spec(spec)),
            (None, Some(member)) => Ok(Meaning::Member(member)),
            (None, None) if asked.is_ggml => Ok(Meaning::Ggml),
            (None, None) => Err(format!("{side} cache type {} does not exist: there are {}", asked.id, names())),
        }
    }

    fn check(&self, side: Side, n_layer: usize) -> Result<(), String> {
        match self {
            Meaning::Spec(spec) => spec.check(side, n_layer),
            Meaning::Member(member) => member.check_side(side),
            Meaning::Ggml => Ok(()),
        }
    }

    /// The first of its types that is coded, if it is more than one of ggml's alone.
    fn compressed(&self) -> Option<String> {
        match self {
            Meaning::Spec(spec) => spec.members().find(|m| m.is_quantized()).map(Member::name),
            Meaning::Member(member @ Member::Ours(_)) => Some(member.name()),
            Meaning::Member(_) | Meaning::Ggml => None,
        }
    }
}

/// Why llama.cpp computes an architecture's attention without flash attention, whatever was asked for.
fn no_flash_attention(arch: &str) -> Option<&'static str> {
    match arch {
        "grok" => Some("which llama.cpp turns off for grok"),
        "t5" => Some("which has no room for the bias that t5 adds to its scores"),
        _ => None,
    }
}

/// Refuses ids that do not exist, types on a side that they do not serve, specs of layers that the model does not have,
/// and a compressed V without flash attention.
pub fn check_cache(k: AskedType, v: AskedType, context: &ContextKind) -> Result<(), String> {
    Meaning::of(k, Side::K)?.check(Side::K, context.n_layer)?;
    let v = Meaning::of(v, Side::V)?;
    v.check(Side::V, context.n_layer)?;
    let Some(name) = v.compressed() else { return Ok(()) };
    match no_flash_attention(context.arch) {
        Some(why) => Err(format!(
            "V cache type {name} needs flash attention, {why}: use f16, bf16 or f32 for V; K may keep its type"
        )),
        None if context.flash_attn_off => Err(format!(
            "V cache type {name} needs flash attention: turn it on (-fa on), or use f16, bf16 or f32 for V"
        )),
        None => Ok(()),
    }
}

/// The parts of a spec that change nothing on a model of these layers, as one line; empty for other types.
pub fn idle_parts(id: i32, layers: &[Keeps]) -> String {
    registry::by_id(id).map_or_else(String::new, |spec| spec.idle_parts(layers).join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(k: &str, v: &str, context: ContextKind) -> Result<(), String> {
        let asked = |text: &str| AskedType { id: registry::id_of(text).unwrap(), is_ggml: false };
        check_cache(asked(k), asked(v), &context)
    }

    const PLAIN: ContextKind = ContextKind { n_layer: 4, arch: "llama", flash_attn_off: false };

    #[test]
    fn a_compressed_v_needs_flash_attention() {
        let off = ContextKind { flash_attn_off: true, ..PLAIN };
        assert_eq!(check("delta4", "srft4", PLAIN), Ok(()));
        assert_eq!(check("srft4", "f16", off), Ok(()));
        assert!(check("srft4", "srft4", off).unwrap_err().contains("-fa on"));
        assert!(check("f16", "f16,0=srft4", off).unwrap_err().contains("srft4 needs flash attention"));
        let grok = ContextKind { arch: "grok", ..PLAIN };
        assert!(check("srft4", "srft4", grok).unwrap_err().contains("turns off for grok"));
        assert_eq!(check("srft4", "f16", grok), Ok(()));
    }

    #[test]
    fn what_does_not_exist_or_fit_is_refused() {
        assert!(check("srft4", "delta4", PLAIN).unwrap_err().contains("delta4 is not for V"));
        assert!(check("srft4,9=srft8", "srft4", PLAIN).unwrap_err().contains("no layer 9"));
        let (nobodys, f16) = (AskedType { id: 99, is_ggml: false }, AskedType { id: 1, is_ggml: true });
        assert!(check_cache(nobodys, f16, &PLAIN).unwrap_err().contains("K cache type 99 does not exist"));
        assert_eq!(check_cache(AskedType { is_ggml: true, ..nobodys }, f16, &PLAIN), Ok(()), "llama.cpp decides");
    }

    #[test]
    fn idle_parts_are_those_of_specs() {
        let spec = registry::id_of("srft4,1=srft8,swa=srft3").unwrap();
        let line = idle_parts(spec, &[Keeps::All, Keeps::Nothing]);
        assert!(line.starts_with("1=srft8 does nothing") && line.contains("; swa=srft3 does nothing"), "{line}");
        assert_eq!(idle_parts(spec, &[Keeps::Window, Keeps::All]), "");
        assert_eq!(idle_parts(registry::id_of("srft4").unwrap(), &[]), "");
    }
}
