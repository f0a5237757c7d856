//! A context that is to take a state: what it checks before anything is allocated or changed.
//!
//! A file may say anything, with checksums that fit. The header is bounded by the cells that the context has. The lengths of
//! what follows are derived from the layers and cells of the header and have to be equal. The metadata is then walked
//! as llama.cpp will walk it, so that llama.cpp finds nothing to refuse when it has begun to change its caches:
//!
//! ```text
//! cache  = streams u32 | each stream: cells u32, and where there are some: each cell | V transposed u32 | layers u32 | each K | each V | recent
//! cell   = position i32 | sequences u32 | extension | each sequence i32
//! recent = cells u32 | each: place among the cells u32, slot u32      nothing where no layer has recent sides
//! K, V   = type i32 | bytes of a row u64              V transposed: type i32 | bytes of a value u32 | values of a row u32
//! ```
//!
//! Models with recurrent layers write states of those too, of which no header tells. What comes behind them is bounded only.

use super::{body_bytes, checksum, Header, In, Layer, StateCache, V_TRANSPOSED};

/// Metadata of recurrent states: a few numbers for each sequence and layer.
const OTHERS_META_BYTES: u64 = 16 << 20;
/// A header without its ranges: room for thousands of layers, so that other models are refused by what differs.
const BODY_BYTES: u64 = 1 << 20;

/// The caches of a context, and what no header tells of them.
#[derive(Clone, Debug)]
pub struct Context {
    /// Its `ranges` are those that are free for the sequence where it is one.
    pub live: Header,
    /// Bytes that llama.cpp writes of a cell beside its position and sequences, for each cache.
    pub extensions: Vec<u32>,
    /// Caches whose metadata comes before that of anything else.
    pub known: usize,
    /// There is something else.
    pub others: bool,
}

impl Context {
    /// The length of the body that follows a prefix, where a state that fits could have it.
    pub fn body_bytes(&self, prefix: &[u8]) -> Result<usize, String> {
        let length = body_bytes(prefix)?;
        let ranges: u64 = self.live.caches.iter().map(|c| 12 * u64::from(c.streams) * u64::from(c.cells)).sum();
        let longest = BODY_BYTES + ranges;
        match length as u64 <= longest {
            true => Ok(length),
            false => Err(format!(
                "its header of {length} bytes is longer than that of any state for this context ({longest} bytes): it has \
                 more ranges of cells than there are cells here"
            )),
        }
    }

    /// Can the context take it, and do its lengths follow from its cells?
    pub fn check(&self, header: &Header) -> Result<(), String> {
        header.check(&self.live)?;
        let (mut meta, mut data) = ([0u128; 2], [0u128; 2]);
        for (cache, &extension) in header.caches.iter().zip(&self.extensions) {
            let [a, b] = cache.meta_bytes(extension, header.one_sequence());
            meta = [meta[0] + a, meta[1] + b];
            let [a, b] = cache.data_bytes();
            data = [data[0] + a, data[1] + b];
        }
        if self.others {
            meta[1] += u128::from(OTHERS_META_BYTES);
            data[1] = u128::MAX;
        }
        for (field, found, [least, most]) in
            [("meta_bytes", header.meta_bytes, meta), ("data_bytes", header.data_bytes, data)]
        {
            let wanted = match (least, most) {
                (a, b) if (a..=b).contains(&u128::from(found)) => continue,
                (a, b) if a == b => format!("{a}"),
                (a, u128::MAX) => format!("{a} at least"),
                (a, b) => format!("{a} to {b}"),
            };
            return Err(format!("its header has {field} {found}, and its layers and cells take {wanted}"));
        }
        Ok(())
    }

    /// The header in these bytes, where the context can take its state.
    pub fn read(&self, header: &[u8]) -> Result<Header, String> {
        let header = Header::from_bytes(header)?;
        self.check(&header).map(|()| header)
    }

    /// Is this the metadata of the state with the header in these bytes, which [`Context::read`] has passed?
    pub fn read_meta(&self, header: &[u8], meta: &[u8]) -> Result<(), String> {
        self.check_meta(&Header::from_bytes(header)?, meta)
    }

    /// Is this the metadata of a state with that header, which [`Context::check`] has passed?
    pub fn check_meta(&self, header: &Header, meta: &[u8]) -> Result<(), String> {
        if meta.len() as u64 != header.meta_bytes || checksum(&[meta]) != header.meta_sum {
            return Err("what it says of its cells is damaged: the checksum differs".into());
        }
        let (mut input, mut data) = (In(meta), 0u128);
        let caches = header.caches.iter().zip(&self.extensions);
        for (cache, &extension) in caches.take(self.known) {
            data += cache
                .walk_meta(&mut input, extension as usize, header.one_sequence())
                .map_err(|e| format!("what it says of its cells does not fit its header: {e}"))?;
        }
        if self.others {
            return Ok(());
        }
        if !input.0.is_empty() {
            return Err(format!("what it says of its cells has {} bytes too many", input.0.len()));
        }
        match data == u128::from(header.data_bytes) {
            true => Ok(()),
            false => Err(format!("its header has data_bytes {}, and its rows take {data}", header.data_bytes)),
        }
    }
}

impl StateCache {
    /// Of what llama.cpp writes of the cells, at least and at most: a cell of a whole context may be in several sequences.
    fn meta_bytes(&self, extension: u32, one_sequence: bool) -> [u128; 2] {
        let streams = self.stream_cells();
        let cells: u128 = streams.values().map(|&n| u128::from(n)).sum();
        let sides = self.layers.iter().flat_map(|l| [l.k, l.v]).filter(|s| s.kind >= 0).count() as u128;
        let fixed = 4
            + 4 * u128::from(self.streams)
            + streams.len() as u128 * (8 + 12 * sides)
            + cells * (8 + u128::from(extension));
        let sequences = if one_sequence { 1 } else { u128::from(self.sequences.max(1)) };
        let (least, most) = if self.has_recent() { (4 * streams.len() as u128, 8 * cells) } else { (0, 0) };
        [fixed + least + 4 * cells, fixed + least + most + 4 * cells * sequences]
    }

    /// Of the rows, at least and at most: transposed values may have fewer than the tensor has room for.
    fn data_bytes(&self) -> [u128; 2] {
        let cells: u128 = self.stream_cells().values().map(|&n| u128::from(n)).sum();
        let v_rows: u128 = self.layers.iter().map(|l| u128::from(l.v.row_bytes)).sum();
        let k_bytes: u128 =
            self.layers.iter().map(|l| self.rows(l.k.group_cells, None) * u128::from(l.k.row_bytes)).sum();
        let least = if self.flags & V_TRANSPOSED == 0 { cells * v_rows } else { 0 };
        let recent: u128 = self.layers.iter().map(Layer::recent_bytes).sum();
        [k_bytes + least, k_bytes + cells * (v_rows + recent)]
    }

    fn has_recent(&self) -> bool {
        self.layers.iter().any(|l| l.recent.iter().any(|s| s.kind >= 0))
    }

    /// Rows that travel, of one stream or all: every row of each group that has a cell of the state.
    fn rows(&self, group: u32, stream: Option<u32>) -> u128 {
        let (group, cells) = (u64::from(group.max(1)), u64::from(self.cells));
        let (mut rows, mut before) = (0, None);
        for r in self.ranges.iter().filter(|r| stream.is_none_or(|s| s == r.stream)) {
            let (first, last) = (u64::from(r.from) / group, (u64::from(r.to) - 1) / group);
            // The group that the range before ended in has been counted.
            let first = if before == Some((r.stream, first)) { first + 1 } else { first };
            rows += u128::from(((last + 1) * group).min(cells).saturating_sub(first * group));
            before = Some((r.stream, last));
        }
        rows
    }

    /// Walks what llama.cpp says of the cells; the bytes of their rows.
    fn walk_meta(&self, input: &mut In, extension: usize, one_sequence: bool) -> Result<u128, String> {
        let same = |what: &str, found: u64, wanted: u64| match found == wanted {
            true => Ok(()),
            false => Err(format!("{what} {found} instead of {wanted}")),
        };
        let cells = self.stream_cells();
        let transposed = self.flags & V_TRANSPOSED != 0;
        let mut data = 0;
        same("streams", input.u32()?.into(), self.streams.into())?;
        for stream in 0..self.streams {
            let n = cells.get(&stream).copied().unwrap_or(0);
            same("cells", input.u32()?.into(), n)?;
            if n == 0 {
                continue;
            }
            for _ in 0..n {
                input.cell(extension, if one_sequence { None } else { Some(self.sequences) })?;
            }
            same("a V that is transposed", input.u32()?.into(), transposed.into())?;
            same("layers", input.u32()?.into(), self.layers.len() as u64)?;
            for l in &self.layers {
                same("type of K", input.u32()?.into(), (l.k.kind as u32).into())?;
                same("bytes of a K row", input.u64()?, l.k.row_bytes)?;
                data += self.rows(l.k.group_cells, Some(stream)) * u128::from(l.k.row_bytes);
            }
            for v in self.layers.iter().map(|l| l.v).filter(|v| v.kind >= 0) {
                same("type of V", input.u32()?.into(), (v.kind as u32).into())?;
                let mut bytes = v.row_bytes;
                if transposed {
                    let (value, values) = (u64::from(input.u32()?), u64::from(input.u32()?));
                    same("bytes of all V values", value * u64::from(v.values), v.row_bytes)?;
                    if values > u64::from(v.values) {
                        return Err(format!("{values} V values where there are at most {}", v.values));
                    }
                    bytes = value * values;
                } else {
                    same("bytes of a V row", input.u64()?, v.row_bytes)?;
                }
                data += u128::from(n) * u128::from(bytes);
            }
            if self.has_recent() {
                let recent = input.u32()?;
                if u64::from(recent) > n {
                    return Err(format!("precise rows of {recent} cells of {n}"));
                }
                for _ in 0..recent {
                    let (place, _slot) = (u64::from(input.u32()?), input.u32()?);
                    if place >= n {
                        return Err(format!("a precise row of cell {place} of {n}"));
                    }
                }
                data += u128::from(recent) * self.layers.iter().map(Layer::recent_bytes).sum::<u128>();
            }
        }
        Ok(data)
    }
}

impl In<'_> {
    /// One cell; `sequences` are those that there are, None where the cell is written for one alone.
    fn cell(&mut self, extension: usize, sequences: Option<u32>) -> Result<(), String> {
        let (position, n) = (self.u32()? as i32, self.u32()?);
        if position < 0 {
            return Err(format!("a cell has position {position}"));
        }
        if n == 0 || n > sequences.unwrap_or(1) {
            return Err(format!("a cell is in {n} sequences of {}", sequences.unwrap_or(1)));
        }
        self.0 = self.0.get(extension..).ok_or("it ends too early")?;
        let mut before = None;
        for _ in 0..n {
            let sequence = self.u32()?;
            if sequences.is_some_and(|all| sequence >= all) || before.is_some_and(|b| b >= sequence) {
                return Err(format!("a cell is in sequence {sequence}, out of order or beyond the last"));
            }
            before = Some(sequence);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{cache, context};
    use super::super::{Out, Range};
    use super::*;

    /// What llama.cpp writes of the cells; cell i is in the sequences that `sequences` tells.
    fn meta_of(cache: &StateCache, extension: usize, sequences: impl Fn(u64) -> Vec<u32>) -> Vec<u8> {
        let mut out = Out(Vec::new());
        out.u32(cache.streams);
        for stream in 0..cache.streams {
            let n = cache.stream_cells().get(&stream).copied().unwrap_or(0);
            out.u32(n as u32);
            for i in 0..n {
                out.u32(i as u32);
                out.u32(sequences(i).len() as u32);
                out.0.extend(vec![0xee; extension]);
                sequences(i).into_iter().for_each(|s| out.u32(s));
            }
            if n > 0 {
                out.u32(u32::from(cache.flags & V_TRANSPOSED != 0));
                out.u32(cache.layers.len() as u32);
                for side in cache.layers.iter().map(|l| l.k).chain(cache.layers.iter().map(|l| l.v)) {
                    out.u32(side.kind as u32);
                    out.u64(side.row_bytes);
                }
            }
        }
        out.0
    }

    const EXTENSION: u32 = 12;

    /// 67 cells from 3 on and cell 80, in two groups of 64 of which the second is whole.
    fn data_of(cache: &StateCache, k_rows: u64) -> u64 {
        cache.layers.iter().map(|l| k_rows * l.k.row_bytes + 68 * l.v.row_bytes).sum()
    }

    fn target() -> Context {
        let live = context("delta4_64", "srft4_64");
        Context { live, extensions: vec![EXTENSION], known: 1, others: false }
    }

    /// A state as the writer would write it.
    fn state() -> (Header, Vec<u8>) {
        let cache = cache("delta4_64", "srft4_64");
        let meta = meta_of(&cache, EXTENSION as usize, |i| if i % 3 == 0 { vec![0, 1] } else { vec![1] });
        let data_bytes = data_of(&cache, 128);
        (sealed(Header { data_bytes, caches: vec![cache], ..target().live }, &meta), meta)
    }

    /// As a hostile file has it: lengths and checksum are those of the metadata.
    fn sealed(header: Header, meta: &[u8]) -> Header {
        Header { meta_bytes: meta.len() as u64, meta_sum: checksum(&[meta]), ..header }
    }

    #[test]
    fn lengths_follow_from_the_cells() {
        let (header, meta) = state();
        assert_eq!(target().check(&header), Ok(()));
        assert_eq!(target().check_meta(&header, &meta), Ok(()));
        let refused = |change: &dyn Fn(&mut Header), words: &[&str]| {
            let mut bad = header.clone();
            change(&mut bad);
            let why = target().check(&bad).expect_err("it does not follow");
            assert!(words.iter().all(|w| why.contains(w)), "{why}: wanted {words:?}");
        };
        for bytes in [0, 1407, 6 << 30, u64::MAX] {
            refused(&|h| h.meta_bytes = bytes, &["meta_bytes", &bytes.to_string()]);
        }
        for bytes in [0, header.data_bytes - 1, header.data_bytes + 1, u64::MAX] {
            refused(&|h| h.data_bytes = bytes, &["data_bytes", &bytes.to_string(), &header.data_bytes.to_string()]);
        }
        refused(&|h| h.caches[0].ranges[0].to -= 1, &["data_bytes"]);
        refused(&|h| h.caches[0].cells = 100, &["data_bytes"]);
        refused(&|h| h.caches[0].sequences = 1, &["meta_bytes"]);
    }

    #[test]
    fn a_sequence_has_one_length() {
        let one = |n: u64| -> Result<(), String> {
            let mut target = target();
            target.live.kind = 1;
            let mut header = Header { kind: 1, ..state().0 };
            header.meta_bytes = n;
            target.check(&header)
        };
        let cache = cache("delta4_64", "srft4_64");
        let exact = meta_of(&cache, EXTENSION as usize, |_| vec![0]).len() as u64;
        assert_eq!(one(exact), Ok(()));
        assert!(one(exact + 4).is_err() && one(exact - 4).is_err());
        let mut split = Header { kind: 1, ..state().0 };
        split.caches[0].streams = 2;
        split.caches[0].ranges[1].stream = 1;
        let mut target = target();
        target.live.kind = 1;
        target.live.caches[0].streams = 2;
        assert!(target.check(&split).unwrap_err().contains("2 streams"));
    }

    #[test]
    fn recurrent_states_beside_the_caches_are_bounded() {
        let (header, meta) = state();
        let target = Context { others: true, ..target() };
        let more =
            Header { meta_bytes: header.meta_bytes + 500, data_bytes: header.data_bytes + 5000, ..header.clone() };
        assert_eq!(target.check(&more), Ok(()));
        assert!(target.check(&Header { meta_bytes: 6 << 30, ..header.clone() }).is_err());
        assert!(target.check(&Header { data_bytes: 0, ..header.clone() }).is_err());
        let longer = [&meta[..], &[7; 500]].concat();
        assert_eq!(target.check_meta(&sealed(header, &longer), &longer), Ok(()));
    }

    #[test]
    fn rows_of_groups_are_counted_once() {
        let mut cache = cache("delta4_64", "srft4_64");
        let range = |stream, from, to| Range { stream, from, to };
        for (ranges, cells, rows) in [
            (vec![range(0, 0, 1)], 256, 64),
            (vec![range(0, 0, 1), range(0, 63, 64)], 256, 64),
            (vec![range(0, 0, 1), range(0, 63, 65)], 256, 128),
            (vec![range(0, 60, 200)], 210, 210),
            (vec![range(0, 0, 1), range(1, 0, 1)], 256, 128),
            (vec![range(0, 200, 201)], 210, 18),
        ] {
            cache.ranges = ranges;
            cache.cells = cells;
            assert_eq!(cache.rows(64, None), rows, "{:?}", cache.ranges);
        }
    }

    #[test]
    fn a_header_is_as_long_as_its_context_allows() {
        let prefix = |n: u32| [super::super::MAGIC, super::super::VERSION, n, 0, 0].map(u32::to_le_bytes).concat();
        assert_eq!(target().body_bytes(&prefix(700)), Ok(700));
        assert!(target().body_bytes(&prefix(1 << 27)).unwrap_err().contains("134217728 bytes"));
    }

    #[test]
    fn metadata_that_llama_would_refuse_is_refused_before() {
        let (header, meta) = state();
        // Whatever is changed, with a checksum that fits: nothing but positions and extensions may be anything.
        for at in 0..meta.len() {
            let mut bad = meta.clone();
            bad[at] ^= 0x80;
            let result = target().check_meta(&sealed(header.clone(), &bad), &bad);
            let cells = 8..meta.len() - 8 - 12 * 4;
            assert!(result.is_err() || cells.contains(&at), "byte {at}");
        }
        let changed = |at: usize, value: u32, word: &str| {
            let mut bad = meta.clone();
            bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let why = target().check_meta(&sealed(header.clone(), &bad), &bad).expect_err("it does not fit");
            assert!(why.contains(word), "{why}: wanted {word}");
        };
        changed(4, 67, "cells 67 instead of 68");
        changed(8, u32::MAX, "position -1");
        changed(12, 0, "0 sequences");
        changed(12, 3, "3 sequences");
        changed(12, u32::MAX, "4294967295 sequences");
        changed(28, 1, "sequence 1");
        changed(32, 2, "sequence 2");
        changed(meta.len() - 12, 1, "type of V");
        changed(meta.len() - 8, 1, "bytes of a V row");
        for n in 0..meta.len() {
            assert!(target().check_meta(&sealed(header.clone(), &meta[..n]), &meta[..n]).is_err(), "{n} bytes");
        }
        let mut damaged = meta.clone();
        damaged[9] ^= 1;
        assert!(target().check_meta(&header, &damaged).unwrap_err().contains("checksum"));
    }

    /// Precise rows of some cells, behind the rest of a stream.
    #[test]
    fn precise_rows_follow_from_their_list() {
        let mut state = cache("delta4_64", "srft4_64");
        for layer in &mut state.layers {
            layer.recent = [super::super::StateSide::new(132, 128, 136); 2]; // srft8_64
        }
        let with = |places: &[u32], n: u32, rows: u64, target: &Context| {
            let mut meta = meta_of(&state, EXTENSION as usize, |_| vec![0]);
            meta.extend(n.to_le_bytes());
            meta.extend(places.iter().flat_map(|p| [p.to_le_bytes(), [7; 4]].concat()));
            let data_bytes = data_of(&state, 128) + rows * 4 * 136;
            let header = sealed(Header { data_bytes, caches: vec![state.clone()], ..target.live.clone() }, &meta);
            let bytes = header.to_bytes();
            assert_eq!(Header::from_bytes(&bytes), Ok(header.clone()));
            target.check(&header).and_then(|()| target.check_meta(&header, &meta))
        };
        let mut keeps = target();
        keeps.live.caches[0].layers = state.layers.clone();
        for context in [&target(), &keeps] {
            assert_eq!(with(&[], 0, 0, context), Ok(()));
            assert_eq!(with(&[67, 0, 3], 3, 3, context), Ok(()), "in the order of slots");
            assert!(with(&[68], 1, 1, context).unwrap_err().contains("cell 68 of 68"));
            assert!(with(&[0], 1, 0, context).is_err() && with(&[0], 1, 2, context).is_err());
            assert!(with(&[], u32::MAX, 0, context).is_err());
        }
        keeps.live.caches[0].layers[0].recent[0].row_bytes = 140;
        assert!(with(&[], 0, 0, &keeps).unwrap_err().contains("bytes of a cell"));
    }

    #[test]
    fn transposed_values_may_be_fewer() {
        let mut state = cache("delta4_64", "srft4_64");
        state.flags = V_TRANSPOSED;
        for layer in &mut state.layers {
            layer.v = super::super::StateSide::new(1, 128, 256); // f16
        }
        let mut target = target();
        target.live.caches[0].flags = V_TRANSPOSED;
        target.live.caches[0].layers = state.layers.clone();
        let with = |values: u32, data_bytes: u64| {
            let mut meta = meta_of(&state, EXTENSION as usize, |_| vec![0]);
            let n = meta.len();
            for at in [n - 8, n - 20] {
                meta[at..at + 4].copy_from_slice(&2u32.to_le_bytes());
                meta[at + 4..at + 8].copy_from_slice(&values.to_le_bytes());
            }
            let header = sealed(Header { data_bytes, caches: vec![state.clone()], ..target.live.clone() }, &meta);
            target.check(&header).and_then(|()| target.check_meta(&header, &meta))
        };
        let data = |v: u64| state.layers.iter().map(|l| 128 * l.k.row_bytes + 68 * v).sum::<u64>();
        assert_eq!(with(128, data(256)), Ok(()));
        assert_eq!(with(64, data(128)), Ok(()));
        assert!(with(64, data(256)).is_err() && with(129, data(258)).is_err());
    }
}
