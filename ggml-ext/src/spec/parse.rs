//! Text to spec. An error says where it is, what it is and what exists.
//!
//! ```text
//! spec   = type *( "," item )
//! item   = layers "=" type | "swa" "=" type | "guard" "=" ( "on" | "off" ) | "recent" "=" digits | "cal" "=" file
//! layers = layer [ "-" layer ]            layer = [ "-" ] digits
//! ```
//!
//! Blanks may stand between the parts. A file's name has no comma.

use super::{names, Member, Range, Spec};
use std::fmt;

/// Longer is not a spec that anyone wrote: 512 layers, each named, fit.
const LONGEST: usize = 8192;
/// More precise rows would be a cache of their own.
const MOST_RECENT: u32 = 1 << 16;

/// Where a spec is bad, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    text: String,
    /// Characters before the place.
    pub at: usize,
    /// What is wrong there.
    pub reason: String,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Signs that move a terminal's cursor are not passed on.
        let shown = |text: &str| -> String { text.chars().map(|c| if c.is_control() { '?' } else { c }).collect() };
        writeln!(f, "bad cache type, character {}: {}", self.at + 1, shown(&self.reason))?;
        if self.text.len() <= 200 {
            writeln!(f, "    {}\n    {}^", shown(&self.text), " ".repeat(self.at))?;
        }
        write!(
            f,
            "types: {}\nform: TYPE[,LAYERS=TYPE…][,swa=TYPE][,guard=off][,recent=CELLS][,cal=FILE], as in srft4,0-1=srft8,-1=f16",
            names()
        )
    }
}

impl std::error::Error for SpecError {}

/// Reads a spec.
pub fn parse(text: &str) -> Result<Spec, SpecError> {
    let fail = |at: usize, reason: String| SpecError {
        text: text.chars().take(LONGEST).collect(),
        at: text[..at].chars().count(),
        reason,
    };
    if text.len() > LONGEST {
        return Err(fail(0, format!("longer than {LONGEST} bytes")));
    }
    let pieces = pieces(text);
    let mut spec = Spec {
        text: text.trim().into(),
        default: member(pieces[0]).map_err(|(at, e)| fail(at, e))?,
        layers: Vec::new(),
        sliding: None,
        guard: true,
        recent: None,
        calibration: None,
    };
    let mut guard_given = false;
    for piece in &pieces[1..] {
        item(*piece, &mut spec, &mut guard_given).map_err(|(at, e)| fail(at, e))?;
    }
    Ok(spec)
}

/// A part of the text and the byte where it begins.
#[derive(Clone, Copy)]
struct Piece<'a> {
    at: usize,
    text: &'a str,
}

impl<'a> Piece<'a> {
    fn trimmed(self) -> Piece<'a> {
        let rest = self.text.trim_start();
        Piece { at: self.at + self.text.len() - rest.len(), text: rest.trim_end() }
    }

    fn split_once(self, mark: char) -> Option<(Piece<'a>, Piece<'a>)> {
        let (a, b) = self.text.split_once(mark)?;
        let at = self.at + a.len() + mark.len_utf8();
        Some((Piece { at: self.at, text: a }.trimmed(), Piece { at, text: b }.trimmed()))
    }
}

/// The parts between the commas; at least one.
fn pieces(text: &str) -> Vec<Piece<'_>> {
    let mut at = 0;
    let mut pieces = Vec::new();
    for part in text.split(',') {
        pieces.push(Piece { at, text: part }.trimmed());
        at += part.len() + 1;
    }
    pieces
}

type Bad = (usize, String);

fn member(name: Piece) -> Result<Member, Bad> {
    if name.text.is_empty() {
        return Err((name.at, "a type's name is missing".into()));
    }
    Member::by_name(name.text).ok_or_else(|| (name.at, format!("no cache type '{}'", name.text)))
}

fn item(piece: Piece, spec: &mut Spec, guard_given: &mut bool) -> Result<(), Bad> {
    let Some((key, value)) = piece.split_once('=') else {
        let reason = match piece.text {
            "" => "nothing between the commas".to_string(),
            text if Member::by_name(text).is_some() => {
                format!(
                    "which layers are to be {text}? Say LAYERS={text} or swa={text}; the first type is for the rest"
                )
            }
            text if spec.calibration.is_some() => format!(
                "'{text}' is not LAYERS=TYPE, swa=TYPE, guard=off or recent=CELLS; the file of cal= cannot have a comma in its name"
            ),
            text => format!("'{text}' is not LAYERS=TYPE, swa=TYPE, guard=off, recent=CELLS or cal=FILE"),
        };
        return Err((piece.at, reason));
    };
    match key.text {
        "swa" if spec.sliding.is_some() => return Err((key.at, "swa is given twice".into())),
        "swa" => spec.sliding = Some(member(value)?),
        "guard" if *guard_given => return Err((key.at, "guard is given twice".into())),
        "guard" => {
            *guard_given = true;
            spec.guard = match value.text {
                "on" => true,
                "off" => false,
                other => return Err((value.at, format!("guard is on or off, not '{other}'"))),
            };
        }
        "recent" if spec.recent.is_some() => return Err((key.at, "recent is given twice".into())),
        "recent" => {
            let cells = value.text.parse().ok().filter(|&n: &u32| n <= MOST_RECENT && !value.text.starts_with('+'));
            let wanted = || format!("recent is a number of cells, 0 to {MOST_RECENT}, not '{}'", value.text);
            spec.recent = Some(cells.ok_or_else(|| (value.at, wanted()))?);
        }
        "cal" if spec.calibration.is_some() => return Err((key.at, "cal is given twice".into())),
        "cal" if value.text.is_empty() => return Err((value.at, "cal wants the file of a calibration".into())),
        "cal" => spec.calibration = Some(value.text.into()),
        _ => {
            let layers = range(key)?;
            spec.layers.push((layers, member(value)?));
        }
    }
    Ok(())
}

fn range(key: Piece) -> Result<Range, Bad> {
    let wanted =
        |found: &str| format!("'{found}' is no layer: numbers as 3, -1 (the last), ranges as 0-1, -2--1, or swa");
    let layer = |piece: Piece| match piece.text.parse::<i32>() {
        Ok(number) if !piece.text.starts_with('+') => Ok(number),
        _ => Err((piece.at, wanted(piece.text))),
    };
    // The dash that ends a number, not one that begins it.
    let dash = key.text.char_indices().skip(1).find(|c| c.1 == '-').map(|c| c.0);
    match dash {
        None => layer(key).map(|one| Range { first: one, last: one }),
        Some(dash) => {
            let first = layer(Piece { at: key.at, text: &key.text[..dash] }.trimmed())?;
            let last = layer(Piece { at: key.at + dash + 1, text: &key.text[dash + 1..] }.trimmed())?;
            if (first < 0) == (last < 0) && first > last {
                return Err((key.at, format!("layers {first} to {last} are none: the smaller number comes first")));
            }
            Ok(Range { first, last })
        }
    }
}
