//! The header of a GGUF file: what a model says of itself, and where its tensors lie.
//!
//! A header is a list of keys with values and a list of tensors with shapes, types and places. It is read once, from front
//! to back. Weights stay in the file; [`Gguf::floats`] reads a few when the guard wants to see them. Arrays of numbers are
//! kept, since layers differ by them; of arrays of texts, which are the vocabulary, only the length is.

#![warn(rustdoc::broken_intra_doc_links)]

use crate::error::Error;
use half::{bf16, f16};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The header of a model's file, or of the first of several with those of the others.
///
/// ```no_run
/// use ggml_ext::{cache_bytes, Gguf, KvType};
///
/// let model = Gguf::open("model.gguf".as_ref())?;
/// let srft4: KvType = "srft4".parse()?;
/// let cache = cache_bytes(&model.shape()?, 32768, srft4, srft4)?;
/// println!("{}: {} bytes of weights, {cache} of cache", model.architecture(), model.weight_bytes()?);
/// # Ok::<(), ggml_ext::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gguf {
    values: HashMap<String, Value>,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Int(i64),
    Float(f64),
    Text(String),
    Ints(Vec<i64>),
    /// An array of anything else, by its length.
    Other(usize),
}

/// A tensor that a file describes.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    values: u64,
    kind: u32,
    file: PathBuf,
    at: u64,
}

/// ggml's types of tensors: id, values of a block, bytes of a block.
#[rustfmt::skip]
const TYPES: [(u32, u64, u64); 35] = [
    (0, 1, 4), (1, 1, 2), (2, 32, 18), (3, 32, 20), (6, 32, 22), (7, 32, 24), (8, 32, 34), (9, 32, 36),
    (10, 256, 84), (11, 256, 110), (12, 256, 144), (13, 256, 176), (14, 256, 210), (15, 256, 292), (16, 256, 66),
    (17, 256, 74), (18, 256, 98), (19, 256, 50), (20, 32, 18), (21, 256, 110), (22, 256, 82), (23, 256, 136),
    (24, 1, 1), (25, 1, 2), (26, 1, 4), (27, 1, 8), (28, 1, 8), (29, 256, 56), (30, 1, 2), (34, 256, 54),
    (35, 256, 66), (39, 32, 17), (40, 64, 36), (41, 128, 18), (42, 64, 18),
];

impl Tensor {
    fn bytes(&self) -> Result<u64, Error> {
        let Some(&(_, block, bytes)) = TYPES.iter().find(|t| t.0 == self.kind) else {
            return Err(Error::new(format!("tensor {} has type {}, which is not known here", self.name, self.kind)));
        };
        Ok(self.values.div_ceil(block).saturating_mul(bytes))
    }
}

impl Gguf {
    /// Reads a header, and those of the other files if the model is in several.
    ///
    /// # Errors
    /// Where a file cannot be read, is no GGUF, or ends within its header.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        let mut model = read_file(path)?;
        let parts = model.int("split.count").unwrap_or(1);
        for n in 2..=parts {
            let other = part(path, n, parts).ok_or_else(|| {
                let name = path.display();
                Error::new(format!(
                    "{name} is one of {parts} files: give the first, whose name ends in -00001-of-{parts:05}.gguf"
                ))
            })?;
            model.tensors.append(&mut read_file(&other)?.tensors);
        }
        Ok(model)
    }

    /// llama.cpp's name of the architecture; empty where the file has none.
    pub fn architecture(&self) -> &str {
        self.text("general.architecture").unwrap_or_default()
    }

    /// Bytes of all tensors.
    ///
    /// # Errors
    /// Where a tensor has a type that is not known.
    pub fn weight_bytes(&self) -> Result<u64, Error> {
        self.tensors.iter().try_fold(0u64, |sum, t| Ok(sum.saturating_add(t.bytes()?)))
    }

    /// Bytes of the weights that one token reads: of experts, those that are chosen; of the embeddings, a row, unless they are
    /// the output's weights too.
    ///
    /// # Errors
    /// As [`Gguf::weight_bytes`].
    pub fn weight_bytes_per_token(&self) -> Result<u64, Error> {
        let experts = self.own("expert_count").filter(|&n| n > 0);
        let used = self.largest_number("expert_used_count");
        let share = experts.zip(used).map_or(1.0, |(all, used)| (used as f64 / all as f64).clamp(0.0, 1.0));
        let tied = !self.tensors.iter().any(|t| t.name == "output.weight");
        self.tensors.iter().try_fold(0u64, |sum, t| {
            let bytes = match t.name.as_str() {
                "token_embd.weight" | "per_layer_token_embd.weight" if !tied || t.name.starts_with("per") => 0,
                name if name.contains("_exps.") => (t.bytes()? as f64 * share) as u64,
                _ => t.bytes()?,
            };
            Ok(sum.saturating_add(bytes))
        })
    }

    /// A number of the architecture's, `block_count` or `attention.head_count`; None where there is none or an array.
    pub fn number(&self, key: &str) -> Option<usize> {
        self.own(key).and_then(|n| usize::try_from(n).ok())
    }

    /// The same, or of an array the largest.
    pub fn largest_number(&self, key: &str) -> Option<usize> {
        let largest = || usize::try_from(*self.own_ints(key)?.iter().max()?).ok();
        self.number(key).or_else(largest)
    }

    /// Tokens of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        match self.values.get("tokenizer.ggml.tokens") {
            Some(Value::Other(n)) => *n,
            _ => self.number("vocab_size").unwrap_or(0),
        }
    }

    pub(crate) fn own(&self, key: &str) -> Option<i64> {
        self.int(&format!("{}.{key}", self.architecture()))
    }

    pub(crate) fn own_float(&self, key: &str) -> Option<f32> {
        match self.values.get(&format!("{}.{key}", self.architecture()))? {
            Value::Float(x) => Some(*x as f32),
            _ => None,
        }
    }

    pub(crate) fn own_ints(&self, key: &str) -> Option<&[i64]> {
        match self.values.get(&format!("{}.{key}", self.architecture()))? {
            Value::Ints(all) => Some(all),
            _ => None,
        }
    }

    /// A number of the architecture's that no model has, with its key: what is computed of the others stays within bounds.
    pub(crate) fn absurd(&self) -> Option<(&str, i64)> {
        const MOST: i64 = 1 << 26;
        let own = format!("{}.", self.architecture());
        self.values.iter().filter(|(key, _)| key.starts_with(&own)).find_map(|(key, value)| match value {
            Value::Int(n) if !(-1..=MOST).contains(n) => Some((key.as_str(), *n)),
            _ => None,
        })
    }

    fn int(&self, key: &str) -> Option<i64> {
        match self.values.get(key)? {
            Value::Int(n) => Some(*n),
            _ => None,
        }
    }

    fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.tensors.iter().any(|t| t.name == name)
    }

    /// The values of a tensor of floats; None where there is none, or its data are not in the file.
    pub(crate) fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let tensor = self.tensors.iter().find(|t| t.name == name)?;
        let mut file = File::open(&tensor.file).ok()?;
        let bytes = tensor.bytes().ok().filter(|&n| n <= file.metadata().map_or(0, |m| m.len()))?;
        file.seek(SeekFrom::Start(tensor.at)).ok()?;
        let mut data = vec![0; usize::try_from(bytes).ok()?];
        file.read_exact(&mut data).ok()?;
        let halves = || data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        match tensor.kind {
            0 => Some(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
            1 => Some(halves().map(|h| f16::from_bits(h).to_f32()).collect()),
            30 => Some(halves().map(|h| bf16::from_bits(h).to_f32()).collect()),
            _ => None,
        }
    }
}

/// The name of another file of a model: NAME-00001-of-00003.gguf is the first of three.
fn part(path: &Path, n: i64, parts: i64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?.strip_suffix(&format!("-00001-of-{parts:05}.gguf"))?;
    Some(path.with_file_name(format!("{name}-{n:05}-of-{parts:05}.gguf")))
}

fn read_file(path: &Path) -> Result<Gguf, Error> {
    let at = |e: io::Error| {
        let name = path.display();
        Error::new(match e.kind() {
            io::ErrorKind::UnexpectedEof => format!("{name} is truncated: it ends within its header"),
            io::ErrorKind::InvalidData => format!("{name}: {e}"),
            _ => format!("cannot read {name}: {e}"),
        })
    };
    let file = File::open(path).map_err(at)?;
    let size = file.metadata().map_err(at)?.len();
    Reader { from: BufReader::new(file), size }.header(path).map_err(at)
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

struct Reader {
    from: BufReader<File>,
    size: u64,
}

/// Longer arrays are no layers'.
const LONGEST: usize = 1 << 16;

// GGUF's numbers of the types of values.
const KIND_F32: u32 = 6;
const KIND_BOOL: u32 = 7;
const KIND_TEXT: u32 = 8;
const KIND_ARRAY: u32 = 9;
const KIND_F64: u32 = 12;

impl Reader {
    fn header(mut self, path: &Path) -> io::Result<Gguf> {
        let mut magic = [0; 4];
        let read = self.from.read_exact(&mut magic);
        if read.is_err() || &magic != b"GGUF" {
            return Err(bad("not a GGUF file: it does not begin with the letters GGUF"));
        }
        match self.u32()? {
            2 | 3 => {}
            1 => return Err(bad("GGUF of version 1, which llama.cpp does not read any more: convert the model again")),
            n if n.swap_bytes() <= 3 => return Err(bad("a GGUF of big-endian numbers, which are not read here")),
            n => return Err(bad(format!("GGUF of version {n}: versions 2 and 3 are known"))),
        }
        let (n_tensors, n_values) = (self.count(24)?, self.count(13)?);
        let mut values = HashMap::new();
        for _ in 0..n_values {
            let key = self.string()?;
            let kind = self.u32()?;
            values.insert(key, self.value(kind)?);
        }
        let mut tensors = Vec::new();
        for _ in 0..n_tensors {
            tensors.push(self.tensor(path)?);
        }
        let align = match values.get("general.alignment") {
            Some(Value::Int(n)) if (1..=1 << 20).contains(n) => *n as u64,
            _ => 32,
        };
        let data = self.from.stream_position()?.next_multiple_of(align);
        tensors.iter_mut().for_each(|t| t.at = t.at.saturating_add(data));
        Ok(Gguf { values, tensors })
    }

    fn tensor(&mut self, path: &Path) -> io::Result<Tensor> {
        let name = self.string()?;
        let dimensions = self.u32()?;
        if dimensions > 4 {
            return Err(bad(format!("tensor {name} has {dimensions} dimensions, more than 4")));
        }
        let mut values = 1u64;
        for _ in 0..dimensions {
            values = values.saturating_mul(self.u64()?);
        }
        Ok(Tensor { name, values, kind: self.u32()?, file: path.into(), at: self.u64()? })
    }

    fn value(&mut self, kind: u32) -> io::Result<Value> {
        match kind {
            KIND_TEXT => self.string().map(Value::Text),
            KIND_ARRAY => self.array(),
            KIND_F32 => Ok(Value::Float(f32::from_bits(self.u32()?).into())),
            KIND_F64 => Ok(Value::Float(f64::from_bits(self.u64()?))),
            _ => self.int(kind).map(Value::Int),
        }
    }

    fn array(&mut self) -> io::Result<Value> {
        let kind = self.u32()?;
        match width(kind) {
            Some(bytes) if kind != KIND_F32 && kind != KIND_F64 => {
                let n = self.count(bytes)?;
                if n > LONGEST {
                    self.skip(n as u64 * bytes)?;
                    return Ok(Value::Other(n));
                }
                (0..n).map(|_| self.int(kind)).collect::<io::Result<_>>().map(Value::Ints)
            }
            Some(bytes) => {
                let n = self.count(bytes)?;
                self.skip(n as u64 * bytes)?;
                Ok(Value::Other(n))
            }
            None if kind == KIND_TEXT => {
                let n = self.count(8)?;
                for _ in 0..n {
                    let bytes = self.count(1)?;
                    self.skip(bytes as u64)?;
                }
                Ok(Value::Other(n))
            }
            None => Err(bad(format!("an array of values of type {kind}, which GGUF does not have"))),
        }
    }

    fn int(&mut self, kind: u32) -> io::Result<i64> {
        let bytes = width(kind).ok_or_else(|| bad(format!("a value of type {kind}, which GGUF does not have")))?;
        let mut raw = [0; 8];
        self.from.read_exact(&mut raw[..bytes as usize])?;
        let wide = i64::from_le_bytes(raw);
        // Odd numbers are signed, up to 32 bits.
        let unused = 64 - 8 * bytes as u32;
        Ok(if kind % 2 == 1 && kind != KIND_BOOL { wide << unused >> unused } else { wide })
    }

    fn u32(&mut self) -> io::Result<u32> {
        let mut raw = [0; 4];
        self.from.read_exact(&mut raw).map(|()| u32::from_le_bytes(raw))
    }

    fn u64(&mut self) -> io::Result<u64> {
        let mut raw = [0; 8];
        self.from.read_exact(&mut raw).map(|()| u64::from_le_bytes(raw))
    }

    /// A number of things that take so many bytes each, at least: no more than the file can hold.
    fn count(&mut self, bytes: u64) -> io::Result<usize> {
        let n = self.u64()?;
        match n.checked_mul(bytes).is_some_and(|all| all <= self.size) {
            true => usize::try_from(n).map_err(|_| bad("too large")),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn string(&mut self) -> io::Result<String> {
        let mut text = vec![0; self.count(1)?];
        self.from.read_exact(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.from.seek_relative(i64::try_from(bytes).map_err(|_| bad("too large"))?)
    }
}

/// Bytes of a number of this type; None where it is no number.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | KIND_BOOL => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
