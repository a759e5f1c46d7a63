//! A streaming send: a message whose units are announced part by part, from any place in memory to
//! any place in the peer's buffer, in any order.

use std::collections::{BTreeMap, VecDeque};

/// Most parts of a stream that wait to be sent. A part that repeats others may count as several.
pub const STREAM_PARTS_MAX: usize = 4096;

/// Units that are contiguous at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    /// First unit of the message.
    unit: u32,
    count: u32,
    /// Offset of its first byte in this end's memory.
    offset: u64,
}

/// The announced parts of a streaming send.
#[derive(Debug)]
pub struct Stream {
    unit_bytes: u64,
    /// Each announced unit once, with the memory announced first; the key is the span's first unit.
    sources: BTreeMap<u32, Span>,
    /// Number of units in `sources`.
    announced_units: u32,
    waiting: VecDeque<Span>,
    is_ended: bool,
}

impl Stream {
    /// Creates a stream without parts.
    #[must_use]
    pub fn new(unit_bytes: u16) -> Self {
        Self {
            unit_bytes: unit_bytes.into(),
            sources: BTreeMap::new(),
            announced_units: 0,
            waiting: VecDeque::new(),
            is_ended: false,
        }
    }

    /// Announces `count` units from `unit` on, whose bytes start at `offset`. Units announced
    /// before keep their memory and are sent again only if the stream `repeats`. Returns false,
    /// without any change, if too many parts wait.
    pub fn add(&mut self, (unit, count): (u32, u32), offset: u64, repeats: bool) -> bool {
        let part = Span { unit, count, offset };
        let fresh = self.unannounced(part);
        let added = if repeats { 1 } else { fresh.len() };
        if self.waiting.len() + added > STREAM_PARTS_MAX {
            return false;
        }
        for span in &fresh {
            self.announced_units += span.count;
            self.remember(*span);
        }
        if repeats {
            self.waiting.push_back(part);
        } else {
            self.waiting.extend(fresh);
        }
        true
    }

    /// Ends the stream: no more parts will come.
    pub fn end(&mut self) {
        self.is_ended = true;
    }

    /// Whether the stream has ended.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Units announced so far, each counted once.
    #[must_use]
    pub fn announced_units(&self) -> u32 {
        self.announced_units
    }

    /// The unit to send next, and the offset of its bytes.
    #[must_use]
    pub fn next(&self) -> Option<(u32, u64)> {
        self.waiting.front().map(|span| (span.unit, span.offset))
    }

    /// Records that [`Self::next`] has been sent.
    pub fn advance(&mut self) {
        if let Some(span) = self.waiting.front_mut() {
            span.unit += 1;
            span.count -= 1;
            span.offset += self.unit_bytes;
            if span.count == 0 {
                self.waiting.pop_front();
            }
        }
    }

    /// Offset of a unit's bytes, as first announced.
    #[must_use]
    pub fn source(&self, unit: u32) -> Option<u64> {
        let (_, span) = self.sources.range(..=unit).next_back()?;
        let within = unit - span.unit;
        (within < span.count).then(|| span.offset + u64::from(within) * self.unit_bytes)
    }

    /// The spans of a part that were not announced before, ascending.
    fn unannounced(&self, part: Span) -> Vec<Span> {
        let end = part.unit + part.count;
        let mut fresh = Vec::new();
        let mut at = part.unit;
        let before = self.sources.range(..=at).next_back();
        let announced = before.into_iter().chain(self.sources.range(at + 1..end));
        for (_, span) in announced {
            if span.unit > at {
                fresh.push(self.cut(part, at, span.unit));
            }
            at = at.max(span.unit + span.count);
        }
        if at < end {
            fresh.push(self.cut(part, at, end));
        }
        fresh
    }

    fn cut(&self, part: Span, start: u32, end: u32) -> Span {
        let offset = part.offset + u64::from(start - part.unit) * self.unit_bytes;
        Span { unit: start, count: end - start, offset }
    }

    /// Adds a new span, merged with the preceding one if it continues it.
    fn remember(&mut self, span: Span) {
        if let Some((_, before)) = self.sources.range_mut(..span.unit).next_back() {
            let bytes = u64::from(before.count) * self.unit_bytes;
            if before.unit + before.count == span.unit && before.offset + bytes == span.offset {
                before.count += span.count;
                return;
            }
        }
        self.sources.insert(span.unit, span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain(stream: &mut Stream) -> Vec<(u32, u64)> {
        let mut sent = Vec::new();
        while let Some(next) = stream.next() {
            sent.push(next);
            stream.advance();
        }
        sent
    }

    proptest! {
        /// Compared with a map from units to memory in which the first announcement wins.
        #[test]
        fn the_first_part_to_name_a_unit_decides_where_it_is_from(
            parts in proptest::collection::vec((0_u32..60, 1_u32..20, 0_u64..1000), 0..40),
            repeats: bool,
        ) {
            let mut stream = Stream::new(256);
            let mut naive = BTreeMap::new();
            let mut expected = Vec::new();
            for (unit, count, offset) in parts {
                prop_assert!(stream.add((unit, count), offset, repeats));
                for i in 0..count {
                    let source = offset + u64::from(i) * 256;
                    let is_fresh = !naive.contains_key(&(unit + i));
                    naive.entry(unit + i).or_insert(source);
                    if is_fresh || repeats {
                        expected.push((unit + i, source));
                    }
                }
            }
            prop_assert_eq!(stream.announced_units() as usize, naive.len());
            for unit in 0..90 {
                prop_assert_eq!(stream.source(unit), naive.get(&unit).copied());
            }
            prop_assert_eq!(drain(&mut stream), expected);
        }
    }

    #[test]
    fn neighbours_become_one_and_waiting_parts_are_bounded() {
        let mut stream = Stream::new(256);
        for unit in 0..1000 {
            assert!(stream.add((unit, 1), u64::from(unit) * 256, false));
        }
        assert_eq!(stream.sources.len(), 1);
        let mut stream = Stream::new(256);
        for part in 0..STREAM_PARTS_MAX as u32 {
            assert!(stream.add((part * 2, 1), 0, false));
        }
        assert!(!stream.add((1, 1), 0, false));
        assert_eq!(stream.source(1), None, "what is refused leaves nothing behind");
        assert!(!stream.add((0, 3), 0, false));
        stream.advance();
        assert!(stream.add((1, 1), 0, false));
    }
}
