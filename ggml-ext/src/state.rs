//! Saved states: what a state says of itself, and whether a cache can take it.
//!
//! llama.cpp writes a state as it reads one, cell by cell, and notices what does not fit when half of it is restored and
//! what was there is cleared. A state of a cache with a type of ours begins with a header that is read and compared as a
//! whole before anything is touched. It says how rows are coded (family, head size, version of the tables, the signs of
//! the rotation, group geometry), layer by layer, which cells there are and how many bytes follow:
//!
//! ```text
//! magic u32 | version u32 | length of the body u32 | checksum of those and the body u64 | body
//!
//! body   = kind u32 | foreign version u32 | bytes and checksum of the metadata u64 u64 | bytes of data u64 | caches u32, each
//! cache  = streams u32 | cells of a stream u32 | sequences u32 | flags u32 | layers u32, each | ranges u32, each | calibration u64
//! layer  = number u32 | K | V | recent K | recent V   an absent side has type -1 and zeros
//! side   = type i32 | values u32 | row bytes u64 | head size u32 | version u32 | group cells u32 | digest of the signs u64
//! range  = stream u32 | first cell u32 | end u32      ascending in each stream
//! ```
//!
//! All little-endian. Version 1 has no recent sides, and versions 1 and 2 have no calibration.
//!
//! The metadata (llama.cpp's own, positions and sequences) and then the rows follow. Rows that stand alone are the bytes of their cells in order. Cells that are coded together travel as whole groups, every row of each group
//! that holds a cell of the state: an I-frame is spread over its group, and a chained row means nothing without those before
//! it. Rows of cells that are not in the state are emptied first ([`keep`]). Groups that find a free group to go to decode to the same keys bit for bit, whichever it is; where there is none,
//! rows are decoded and written to the cells that there are ([`recode`]), rounded once more as a context shift rounds them.
//!
//! Recent sides are those of the precise rows that a layer keeps of its last cells. They follow the rows of a stream, for the
//! cells that its metadata names; a context that keeps none, or fewer, leaves them out.
//!
//! The calibration is the digest of the matrices that keys were multiplied by before they were stored, and of the centers that values lost, 0 for none.
//!
//! A table that changes gets a new version in [`Concrete::version`]; a state of an older one is then decoded by the older
//! table and written by the new. No older table is there, and states of other versions are refused by name.

use crate::codec::delta::GROUP_CELLS;
use crate::codec::RowFormat;
use crate::groups::{self, GroupLayout, Walker};
use crate::isa;
use crate::rotation::Rotation;
use crate::spec::Member;
use crate::table::{self, Concrete, Entry};
use std::collections::BTreeMap;

mod context;
pub use context::Context;

/// The first four bytes: no number of streams, which is what a state of stock llama.cpp has there.
pub const MAGIC: u32 = 0x7473_766b;
/// Of the header.
pub const VERSION: u32 = 3;
/// Magic, version, length, checksum.
pub const PREFIX_BYTES: usize = 20;
/// A header longer than this is none.
const MAX_BODY: usize = 1 << 28;

/// One side of a layer: how its rows are coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSide {
    /// The type of the tensor; -1 where there is none.
    pub kind: i32,
    /// Values of a cell, all heads.
    pub values: u32,
    /// Bytes of a cell.
    pub row_bytes: u64,
    /// Zero for types of ggml, as all that follows.
    pub head_size: u32,
    /// Of the tables.
    pub version: u32,
    /// Cells that are coded together.
    pub group_cells: u32,
    /// Which rotation it is.
    pub signs: u64,
}

impl StateSide {
    /// No tensor.
    pub const NONE: StateSide =
        StateSide { kind: -1, values: 0, row_bytes: 0, head_size: 0, version: 0, group_cells: 0, signs: 0 };

    /// As this library codes rows of that type; [`StateSide::NONE`] for a negative one.
    pub fn new(kind: i32, values: u32, row_bytes: u64) -> StateSide {
        if kind < 0 {
            return StateSide::NONE;
        }
        let plain = StateSide { kind, values, row_bytes, ..StateSide::NONE };
        match concrete(kind) {
            Some(c) => StateSide {
                head_size: c.head_size as u32,
                version: c.version(),
                group_cells: c.group_cells() as u32,
                signs: Rotation::digest(c.head_size),
                ..plain
            },
            None => plain,
        }
    }

    fn name(&self) -> String {
        if self.kind < 0 {
            return "none".into();
        }
        Member::by_id(self.kind).map_or_else(|| format!("type {}", self.kind), Member::name)
    }
}

/// The concrete type of an id.
fn concrete(id: i32) -> Option<Concrete> {
    match table::by_id(id) {
        Some(Entry::Concrete(c)) => Some(c),
        _ => None,
    }
}

/// A layer of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its number in the model.
    pub index: u32,
    /// Keys.
    pub k: StateSide,
    /// Values.
    pub v: StateSide,
    /// Precise keys and values of recent cells.
    pub recent: [StateSide; 2],
}

impl Layer {
    /// Bytes of the precise rows of a cell.
    fn recent_bytes(&self) -> u128 {
        self.recent.iter().map(|s| u128::from(s.row_bytes)).sum()
    }
}

/// Cells from..to of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// The stream.
    pub stream: u32,
    /// The first cell.
    pub from: u32,
    /// Behind the last.
    pub to: u32,
}

/// A cache, or what a state holds of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCache {
    /// Streams.
    pub streams: u32,
    /// Cells of a stream.
    pub cells: u32,
    /// Sequences: a state's are those that it has, a cache's those that it may have.
    pub sequences: u32,
    /// V_TRANSPOSED, ROTATED.
    pub flags: u32,
    /// Digest of the calibration that keys and values are stored by; 0 for none.
    pub calibration: u64,
    /// Those that have a cache.
    pub layers: Vec<Layer>,
    /// The cells of the state.
    pub ranges: Vec<Range>,
}

impl StateCache {
    /// The value of `flags`.
    pub fn flags(v_transposed: bool, rotated: bool) -> u32 {
        (if v_transposed { V_TRANSPOSED } else { 0 }) | (if rotated { ROTATED } else { 0 })
    }
}

/// V is stored transposed.
pub const V_TRANSPOSED: u32 = 1;
/// llama.cpp's own rotation is on.
pub const ROTATED: u32 = 2;

/// A header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 0: a whole context, 1: one sequence.
    pub kind: u32,
    /// The version of llama.cpp's own part, as it numbers it.
    pub foreign: u32,
    /// Bytes of metadata.
    pub meta_bytes: u64,
    /// Their [`checksum`].
    pub meta_sum: u64,
    /// Bytes of rows.
    pub data_bytes: u64,
    /// In the order of writing.
    pub caches: Vec<StateCache>,
}

/// FNV-1a: a flipped bit always shows.
pub fn checksum(parts: &[&[u8]]) -> u64 {
    parts
        .iter()
        .copied()
        .flatten()
        .fold(0xcbf2_9ce4_8422_2325, |sum, &b| (sum ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

struct Out(Vec<u8>);

impl Out {
    fn u32(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }

    fn u64(&mut self, x: u64) {
        self.0.extend(x.to_le_bytes());
    }

    fn side(&mut self, s: &StateSide) {
        self.u32(s.kind as u32);
        self.u32(s.values);
        self.u64(s.row_bytes);
        self.u32(s.head_size);
        self.u32(s.version);
        self.u32(s.group_cells);
        self.u64(s.signs);
    }
}

struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or("it ends too early")?;
        self.0 = rest;
        Ok(*head)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_le_bytes)
    }

    /// A count of things that take at least `bytes` each: what cannot be there is not allocated.
    fn count(&mut self, bytes: usize) -> Result<usize, String> {
        let n = self.u32()? as usize;
        if n > self.0.len() / bytes {
            return Err(format!("its header counts {n} entries where there is room for {}", self.0.len() / bytes));
        }
        Ok(n)
    }

    fn side(&mut self) -> Result<StateSide, String> {
        Ok(StateSide {
            kind: self.u32()? as i32,
            values: self.u32()?,
            row_bytes: self.u64()?,
            head_size: self.u32()?,
            version: self.u32()?,
            group_cells: self.u32()?,
            signs: self.u64()?,
        })
    }

    fn cache(&mut self, version: u32) -> Result<StateCache, String> {
        let (streams, cells, sequences, flags) = (self.u32()?, self.u32()?, self.u32()?, self.u32()?);
        let has_recent = version > 1;
        let layer = |input: &mut Self| {
            let (index, k, v) = (input.u32()?, input.side()?, input.side()?);
            let recent = if has_recent { [input.side()?, input.side()?] } else { [StateSide::NONE; 2] };
            if recent.iter().any(|s| (s.kind < 0) != (s.row_bytes == 0)) {
                return Err(format!("its layer {index} has precise rows without a type, or without bytes"));
            }
            Ok(Layer { index, k, v, recent })
        };
        let layers = (0..self.count(if has_recent { 148 } else { 76 })?)
            .map(|_| layer(self))
            .collect::<Result<Vec<_>, String>>()?;
        let ranges = (0..self.count(12)?)
            .map(|_| Ok(Range { stream: self.u32()?, from: self.u32()?, to: self.u32()? }))
            .collect::<Result<Vec<_>, String>>()?;
        let mut before: Option<Range> = None;
        for r in &ranges {
            let ascends = before.is_none_or(|b| b.stream < r.stream || (b.stream == r.stream && b.to <= r.from));
            if !ascends || r.from >= r.to || r.to > cells || r.stream >= streams {
                return Err(format!("its cells {} to {} of stream {} are not in order", r.from, r.to, r.stream));
            }
            before = Some(*r);
        }
        let calibration = if version > 2 { self.u64()? } else { 0 };
        Ok(StateCache { streams, cells, sequences, flags, calibration, layers, ranges })
    }
}

/// The length of the body that follows a prefix.
pub fn body_bytes(prefix: &[u8]) -> Result<usize, String> {
    let mut input = In(prefix);
    let (magic, version, length) = (input.u32()?, input.u32()?, input.u32()? as usize);
    if magic != MAGIC {
        return Err("it does not begin as a state of these cache types does".into());
    }
    if !(1..=VERSION).contains(&version) {
        return Err(format!("it has version {version} of the header, this build reads versions 1 to {VERSION}"));
    }
    if length > MAX_BODY {
        return Err("its header is damaged: the length makes no sense".into());
    }
    Ok(length)
}

impl Header {
    /// Is it of one sequence, not of a whole context?
    pub fn one_sequence(&self) -> bool {
        self.kind == 1
    }

    /// Prefix and body.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut body = Out(Vec::new());
        body.u32(self.kind);
        body.u32(self.foreign);
        body.u64(self.meta_bytes);
        body.u64(self.meta_sum);
        body.u64(self.data_bytes);
        body.u32(self.caches.len() as u32);
        for c in &self.caches {
            [c.streams, c.cells, c.sequences, c.flags].into_iter().for_each(|x| body.u32(x));
            body.u32(c.layers.len() as u32);
            for l in &c.layers {
                body.u32(l.index);
                [l.k, l.v].iter().chain(&l.recent).for_each(|s| body.side(s));
            }
            body.u32(c.ranges.len() as u32);
            for r in &c.ranges {
                [r.stream, r.from, r.to].into_iter().for_each(|x| body.u32(x));
            }
            body.u64(c.calibration);
        }
        let mut all = Out(Vec::new());
        [MAGIC, VERSION, body.0.len() as u32].into_iter().for_each(|x| all.u32(x));
        all.u64(checksum(&[&all.0, &body.0]));
        all.0.extend(body.0);
        all.0
    }

    /// The way back. Every bit of it is covered by the checksum.
    pub fn from_bytes(bytes: &[u8]) -> Result<Header, String> {
        let length = body_bytes(bytes)?;
        let (prefix, body) = bytes.split_at_checked(PREFIX_BYTES).ok_or("its header ends too early")?;
        if body.len() != length {
            return Err("its header ends too early".into());
        }
        let (version, sum) = (In(&prefix[4..]).u32()?, In(&prefix[12..]).u64()?);
        if sum != checksum(&[&prefix[..12], body]) {
            return Err("its header is damaged: the checksum differs".into());
        }
        let mut input = In(body);
        let (kind, foreign) = (input.u32()?, input.u32()?);
        let (meta_bytes, meta_sum, data_bytes) = (input.u64()?, input.u64()?, input.u64()?);
        let caches = (0..input.count(24)?).map(|_| input.cache(version)).collect::<Result<_, _>>()?;
        if !input.0.is_empty() {
            return Err(format!("its header has {} bytes too many", input.0.len()));
        }
        Ok(Header { kind, foreign, meta_bytes, meta_sum, data_bytes, caches })
    }

    /// Can the caches of a context take it? `live` is the context as a header, its `ranges` those that are free for the
    /// sequence where it is one.
    pub fn check(&self, live: &Header) -> Result<(), String> {
        let kinds = ["a whole context", "one sequence"].map(String::from);
        differ("it holds", kinds.get(self.kind as usize), kinds.get(live.kind as usize))?;
        if self.foreign != live.foreign {
            let number = |x: u32| format!("{}.{}", x >> 16, x & 0xffff);
            let (theirs, ours) = (number(self.foreign), number(live.foreign));
            return Err(format!("it was written by a llama.cpp with states of version {theirs}, this one has {ours}"));
        }
        if self.caches.len() != live.caches.len() {
            return Err(format!("it has {} caches, this context has {}", self.caches.len(), live.caches.len()));
        }
        let several = self.caches.len() > 1;
        for (i, (state, cache)) in self.caches.iter().zip(&live.caches).enumerate() {
            state.check(cache, self.kind == 0).map_err(|e| if several { format!("cache {i}: {e}") } else { e })?;
        }
        Ok(())
    }
}

/// Both are there and the same, or an error that names both.
fn differ<T: PartialEq + std::fmt::Display>(what: &str, state: Option<T>, cache: Option<T>) -> Result<(), String> {
    match (state, cache) {
        (Some(a), Some(b)) if a == b => Ok(()),
        (Some(a), Some(b)) => Err(format!("{what} {a}, {b} is asked for")),
        _ => Err(format!("{what} something that this build does not know")),
    }
}

impl StateSide {
    fn check(&self, cache: &StateSide, layer: u32, side: char) -> Result<(), String> {
        if self == cache {
            return Ok(());
        }
        let number = |x: u64| x.to_string();
        let sign = |x: u64| format!("{x:016x}");
        let wide = u64::from;
        let fields = [
            ("type", self.name(), cache.name()),
            ("head size", number(wide(self.head_size)), number(wide(cache.head_size))),
            ("version of the tables", number(wide(self.version)), number(wide(cache.version))),
            ("cells of a group", number(wide(self.group_cells)), number(wide(cache.group_cells))),
            ("signs of the rotation", sign(self.signs), sign(cache.signs)),
            ("values of a cell", number(wide(self.values)), number(wide(cache.values))),
            ("bytes of a cell", number(self.row_bytes), number(cache.row_bytes)),
        ];
        // Types that differ differ in what follows from them.
        let n = if self.kind == cache.kind { fields.len() } else { 1 };
        let differ = fields[..n].iter().filter(|(_, state, cache)| state != cache);
        let what: Vec<_> =
            differ.map(|(name, state, cache)| format!("{name} {state} in the state and {cache} here")).collect();
        let what = what.join(", ");
        Err(format!("layer {layer}, {side}: {what}"))
    }
}

impl StateCache {
    /// Cells of each stream that has some. By the ranges that there are: a header may say any number of streams.
    fn stream_cells(&self) -> BTreeMap<u32, u64> {
        let mut res = BTreeMap::new();
        for r in &self.ranges {
            *res.entry(r.stream).or_insert(0) += u64::from(r.to - r.from);
        }
        res
    }

    fn check(&self, live: &StateCache, whole: bool) -> Result<(), String> {
        let same = |what: &str, state: usize, cache: usize| match state == cache {
            true => Ok(()),
            false => Err(format!("it has {state} {what}, this context has {cache}")),
        };
        same("layers", self.layers.len(), live.layers.len())?;
        for (a, b) in self.layers.iter().zip(&live.layers) {
            if a.index != b.index {
                return Err(format!("it has layer {} where this context has layer {}", a.index, b.index));
            }
            a.k.check(&b.k, a.index, 'K')?;
            a.v.check(&b.v, a.index, 'V')?;
            // Precise rows that this context does not keep are left out; those of the same type are taken.
            for (a_side, b_side) in a.recent.iter().zip(&b.recent).filter(|(a, b)| a.kind == b.kind) {
                a_side.check(b_side, a.index, 'R')?;
            }
        }
        same("streams", self.streams as usize, live.streams as usize)?;
        for (flag, what) in [(V_TRANSPOSED, "V is transposed (-fa off)"), (ROTATED, "llama.cpp's own rotation is on")] {
            if (self.flags ^ live.flags) & flag != 0 {
                let (there, here) = if self.flags & flag != 0 { ("is", "not") } else { ("is not", "is") };
                return Err(format!("{what}: it {there} so in the state, and {here} here"));
            }
        }
        if self.calibration != live.calibration {
            let shown = |digest: u64| match digest {
                0 => "as they are".into(),
                digest => format!("by a calibration of digest {digest:016x}"),
            };
            let (there, here) = (shown(self.calibration), shown(live.calibration));
            return Err(format!(
                "its keys and values are stored {there}, and {here} in this context: give the same cal=FILE"
            ));
        }
        if whole && self.sequences > live.sequences {
            return Err(format!("it has {} sequences, this context may have {}", self.sequences, live.sequences));
        }
        // A sequence goes to the stream that it has here, whichever it had.
        let cells = |r: &Range| u64::from(r.to - r.from);
        let room = if whole { u64::from(live.cells) } else { live.ranges.iter().map(cells).sum() };
        let needs = self.stream_cells();
        if !whole && needs.len() > 1 {
            return Err(format!("it has cells of one sequence in {} streams", needs.len()));
        }
        match needs.values().find(|&&need| need > room) {
            Some(need) => Err(format!("it has {need} cells, and {room} are free here")),
            None => Ok(()),
        }
    }
}

/// Cells of a cache whose rows are coded together, as memory.
#[derive(Clone, Copy, Debug)]
pub struct CacheRows {
    /// Cell 0.
    pub data: *mut u8,
    /// Cells.
    pub cells: usize,
}

/// Decodes cell `from[i]` of `src` and writes it to cell `to[i]` of `dst`, for each i in order; `heads` rows a cell.
///
/// # Safety
/// `src` and `dst` hold their cells, and nobody else uses `dst` meanwhile.
pub unsafe fn recode(
    id: i32,
    heads: usize,
    src: CacheRows,
    dst: CacheRows,
    from: &[u32],
    to: &[u32],
) -> Result<(), String> {
    let Some((c, format)) = concrete(id).and_then(|c| Some((c, c.format().grouped()?))) else {
        return Err(format!("type {id} has no cells that are coded together"));
    };
    let outside = |at: &[u32], cells: usize| at.iter().find(|&&i| i as usize >= cells).copied();
    if let Some(cell) = outside(from, src.cells).or(outside(to, dst.cells)) {
        return Err(format!("cell {cell} is outside of the cache"));
    }
    let stride = heads * c.row_bytes();
    let layout = |rows: CacheRows| GroupLayout::new(rows.data, stride, rows.cells, format);
    let (reads, writes) = (layout(src), layout(dst));
    let mut key = vec![0.0f32; c.head_size];
    for head in 0..heads {
        let (mut reader, mut writer) = (Walker::new(format, isa::kernels()), Walker::new(format, isa::kernels()));
        for (&from, &to) in from.iter().zip(to) {
            let row =
                |rows: CacheRows, cell: u32| rows.data.wrapping_add(cell as usize * stride + head * c.row_bytes());
            // SAFETY: cells within both caches, one head of each.
            unsafe {
                reader.read(reads.place(row(src, from)).0, &mut key);
                writer.write(writes.place(row(dst, to)).0, &key);
            }
        }
    }
    Ok(())
}

/// Takes out of whole groups what belongs to cells that `keep` does not name: their rows, and an I-frame that is none of
/// the kept keys. Kept rows stay as they are, bit for bit, unless they are coded by what goes: then the kept keys of that
/// group and head are decoded and written anew, rounded once more.
///
/// # Safety
/// `rows` holds its cells, from the beginning of a group on, and nobody else uses them meanwhile.
pub unsafe fn keep(id: i32, heads: usize, rows: CacheRows, keep: &[bool]) -> Result<(), String> {
    let Some((c, format)) = concrete(id).and_then(|c| Some((c, c.format().grouped()?))) else {
        return Err(format!("type {id} has no cells that are coded together"));
    };
    if keep.len() != rows.cells {
        return Err(format!("there are {} flags for {} cells", keep.len(), rows.cells));
    }
    let stride = heads * c.row_bytes();
    let layout = GroupLayout::new(rows.data, stride, rows.cells, format);
    for (group, keep) in keep.chunks(GROUP_CELLS).enumerate() {
        let bits = keep.iter().enumerate().fold(0u64, |bits, (i, &keep)| bits | u64::from(keep) << i);
        for head in 0..heads {
            let first = rows.data.wrapping_add(group * GROUP_CELLS * stride + head * c.row_bytes());
            // SAFETY: one head of a group of the caller's.
            unsafe { groups::keep(format, isa::kernels(), layout.place(first).0, bits) };
        }
    }
    Ok(())
}

/// Where cells of whole groups go: for each cell of `cells` (ascending) the cell that it is to have, in a cache where
/// `free` says which cells are. Groups keep their places where all of these are free, else they go to the first free ones
/// in order; None where there are not enough.
pub fn place_groups(cells: &[u32], source_cells: u32, free: &[bool], group: usize) -> Option<Vec<u32>> {
    if group == 0 {
        return None;
    }
    let rows = |g: usize, cells: usize| group.min(cells.saturating_sub(g * group));
    let mut groups: Vec<usize> = cells.iter().map(|&c| c as usize / group).collect();
    groups.dedup();
    let open: Vec<bool> = free.chunks(group).map(|cells| cells.iter().all(|&f| f)).collect();
    let takes = |from: usize, to: usize| {
        open.get(to) == Some(&true) && rows(from, source_cells as usize) == rows(to, free.len())
    };
    let own = groups.iter().all(|&g| takes(g, g)).then(|| groups.clone());
    let mut next = 0;
    let first = || {
        let mut place = |&g: &usize| {
            let to = (next..open.len()).find(|&to| takes(g, to))?;
            next = to + 1;
            Some(to)
        };
        groups.iter().map(&mut place).collect::<Option<Vec<_>>>()
    };
    let placed = own.or_else(first)?;
    let target = |cell: u32| {
        let at = groups.binary_search(&(cell as usize / group)).ok()?;
        Some((placed[at] * group + cell as usize % group) as u32)
    };
    cells.iter().map(|&c| target(c)).collect()
}

#[cfg(test)]
mod tests;
