//! A streaming send: a message whose units are named one part after the other, from anywhere in
//! memory to anywhere in the peer's buffer, in any order.

use std::collections::{BTreeMap, VecDeque};

/// Parts of one stream that wait to be sent, most. A part that repeats others may count as several.
pub const STREAM_PARTS_MAX: usize = 4096;

/// Units that lie one behind the other at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    /// First unit of the message.
    unit: u32,
    count: u32,
    /// Where its bytes start in this end's memory.
    offset: u64,
}

/// What of a streaming send has been named so far.
#[derive(Debug)]
pub struct Stream {
    unit_bytes: u64,
    /// Every unit named, once, with the memory that it was named with first: by first unit.
    sources: BTreeMap<u32, Span>,
    /// Units in `sources`.
    named_units: u32,
    waiting: VecDeque<Span>,
    is_ended: bool,
}

impl Stream {
    /// Nothing named yet.
    #[must_use]
    pub fn new(unit_bytes: u16) -> Self {
        Self {
            unit_bytes: unit_bytes.into(),
            sources: BTreeMap::new(),
            named_units: 0,
            waiting: VecDeque::new(),
            is_ended: false,
        }
    }

    /// Names `count` units from `unit` on, whose bytes start at `offset`. Units named before keep
    /// the memory they had; they are sent again only if the stream `repeats`. False: too many parts
    /// wait, and nothing has changed.
    pub fn add(&mut self, (unit, count): (u32, u32), offset: u64, repeats: bool) -> bool {
        let part = Span { unit, count, offset };
        let fresh = self.unnamed(part);
        let added = if repeats { 1 } else { fresh.len() };
        if self.waiting.len() + added > STREAM_PARTS_MAX {
            return false;
        }
        for span in &fresh {
            self.named_units += span.count;
            self.remember(*span);
        }
        if repeats {
            self.waiting.push_back(part);
        } else {
            self.waiting.extend(fresh);
        }
        true
    }

    /// No more parts will come.
    pub fn end(&mut self) {
        self.is_ended = true;
    }

    /// Whether no more parts will come.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Units named so far, each counted once.
    #[must_use]
    pub fn named_units(&self) -> u32 {
        self.named_units
    }

    /// The unit to be sent next, and where its bytes are.
    #[must_use]
    pub fn next(&self) -> Option<(u32, u64)> {
        self.waiting.front().map(|span| (span.unit, span.offset))
    }

    /// [`Self::next`] has been sent.
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

    /// Where the bytes of a unit are, by the part that named it first.
    #[must_use]
    pub fn source(&self, unit: u32) -> Option<u64> {
        let (_, span) = self.sources.range(..=unit).next_back()?;
        let within = unit - span.unit;
        (within < span.count).then(|| span.offset + u64::from(within) * self.unit_bytes)
    }

    /// The stretches of a part that no part before it named, in rising order.
    fn unnamed(&self, part: Span) -> Vec<Span> {
        let end = part.unit + part.count;
        let mut fresh = Vec::new();
        let mut at = part.unit;
        let before = self.sources.range(..=at).next_back();
        let named = before.into_iter().chain(self.sources.range(at + 1..end));
        for (_, span) in named {
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

    /// Adds a stretch that is not named yet, as one with the stretch before if it goes on there.
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
        /// Beside a map from units to memory, in which the first to name a unit wins.
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
            prop_assert_eq!(stream.named_units() as usize, naive.len());
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
