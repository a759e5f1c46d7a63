//! Blocks being changed: a gateway makes overlapping changes one at a time.
//!
//! Hosts rarely overlap their writes. If they do, the order in which the target makes them must be
//! known, because the journal sends them again in that order.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The blocks of a change, in the host's order.
#[derive(Debug, Clone)]
pub(super) enum BlockRanges {
    /// Blocks of a write, without an allocation in the most frequent case.
    One([Range<u64>; 1]),
    /// Blocks of a deallocation.
    Many(Arc<[Range<u64>]>),
}

impl BlockRanges {
    /// `blocks` from `lba` on.
    #[allow(clippy::single_range_in_vec_init)] // a list of one range is intended
    pub(super) fn one(lba: u64, blocks: u64) -> Self {
        Self::One([lba..lba + blocks])
    }
}

impl Deref for BlockRanges {
    type Target = [Range<u64>];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::One(range) => range,
            Self::Many(ranges) => ranges,
        }
    }
}

/// Disjoint block ranges, each with the association epoch in which its change was first sent.
#[derive(Debug, Default)]
pub(super) struct ChangingRanges {
    /// Maps first block to (end, epoch).
    ranges: BTreeMap<u64, (u64, u64)>,
}

impl ChangingRanges {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        let before = self.ranges.range(..range.end).next_back();
        before.is_some_and(|(_, (end, _))| *end > range.start)
    }

    /// Claims all of `ranges`; false, and claims none, if any overlaps a range claimed before. They
    /// may overlap each other.
    pub(super) fn claim(&mut self, ranges: &[Range<u64>], epoch: u64) -> bool {
        if let [range] = ranges
            && !range.is_empty()
        {
            let is_free = !self.overlaps(range);
            if is_free {
                self.ranges.insert(range.start, (range.end, epoch));
            }
            return is_free;
        }
        let merged = merged(ranges);
        if merged.iter().any(|range| self.overlaps(range)) {
            return false;
        }
        for range in merged {
            self.ranges.insert(range.start, (range.end, epoch));
        }
        true
    }

    /// Releases a claim made with the same `ranges`.
    pub(super) fn release(&mut self, ranges: &[Range<u64>]) {
        if let [range] = ranges
            && !range.is_empty()
        {
            self.ranges.remove(&range.start);
            return;
        }
        for range in merged(ranges) {
            self.ranges.remove(&range.start);
        }
    }

    /// Whether a change first sent before `epoch` hasn't ended.
    pub(super) fn has_older(&self, epoch: u64) -> bool {
        self.ranges.values().any(|(_, begun)| *begun < epoch)
    }
}

/// A set of blocks.
#[derive(Debug, Default)]
pub(super) struct BlockSet {
    /// Disjoint ranges; maps first block to end.
    ranges: BTreeMap<u64, u64>,
}

impl BlockSet {
    /// Adds blocks; returns those that weren't in the set, as ranges in ascending order.
    pub(super) fn add(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut start, mut end) = (range.start, range.end);
        let mut added = Vec::new();
        if start >= end {
            return added;
        }
        if let Some((&known, &known_end)) = self.ranges.range(..=start).next_back()
            && known_end >= start
        {
            // Also if the ranges only touch: adjacent ones are merged.
            start = known;
        }
        let mut from = range.start;
        while let Some((&known, &known_end)) = self.ranges.range(start..=end).next() {
            self.ranges.remove(&known);
            if from < known {
                added.push(from..known.min(range.end));
            }
            from = from.max(known_end);
            end = end.max(known_end);
        }
        if from < range.end {
            added.push(from..range.end);
        }
        self.ranges.insert(start, end);
        added
    }
}

/// The same blocks as disjoint ranges in ascending order.
fn merged(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted: Vec<Range<u64>> =
        ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
    sorted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of one range are intended
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn adjacent_ranges_can_be_claimed_and_overlapping_ones_can_not() {
        let mut changing = ChangingRanges::default();
        assert!(changing.claim(&[10..20], 1));
        assert!(changing.claim(&[20..30], 1) && changing.claim(&[0..10], 1));
        for overlapping in [9..11, 10..11, 19..20, 0..100, 12..13] {
            assert!(!changing.claim(&[40..41, overlapping], 1));
        }
        assert!(changing.claim(&[40..41], 1), "a refused claim claims nothing");
        changing.release(&[10..20]);
        assert!(changing.claim(&[12..13], 1));
    }

    #[test]
    fn older_changes_are_recognised_by_their_epoch() {
        let mut changing = ChangingRanges::default();
        assert!(changing.claim(&[0..1], 5) && changing.claim(&[1..2], 6));
        assert!(changing.has_older(6) && !changing.has_older(5));
        changing.release(&[0..1]);
        assert!(!changing.has_older(6));
    }

    proptest! {
        #[test]
        fn a_block_set_agrees_with_a_set_of_single_blocks(
            ranges in proptest::collection::vec((0u64..60, 0u64..20), 1..60),
        ) {
            let (mut set, mut known) = (BlockSet::default(), std::collections::BTreeSet::new());
            for (start, blocks) in ranges {
                let expected: Vec<u64> =
                    (start..start + blocks).filter(|block| known.insert(*block)).collect();
                let added: Vec<u64> = set.add(start..start + blocks).into_iter().flatten().collect();
                prop_assert_eq!(added, expected);
                let disjoint = set.ranges.iter().zip(set.ranges.iter().skip(1));
                prop_assert!(disjoint.into_iter().all(|((_, end), (next, _))| end < next));
            }
        }

        #[test]
        fn claims_agree_with_a_set_of_blocks(
            steps in proptest::collection::vec(proptest::collection::vec((0u64..60, 0u64..9), 1..5), 1..40),
        ) {
            let mut changing = ChangingRanges::default();
            let mut held: Vec<Vec<Range<u64>>> = Vec::new();
            for (index, step) in steps.into_iter().enumerate() {
                let ranges: Vec<Range<u64>> = step.into_iter().map(|(start, blocks)| start..start + blocks).collect();
                let blocks: Vec<u64> = ranges.iter().cloned().flatten().collect();
                let taken = held.iter().flatten().cloned().flatten().any(|block| blocks.contains(&block));
                prop_assert_eq!(changing.claim(&ranges, 1), !taken);
                if !taken { held.push(ranges) }
                if index % 3 == 2 && !held.is_empty() { changing.release(&held.remove(0)) }
            }
            for ranges in held { changing.release(&ranges) }
            prop_assert!(!changing.has_older(2));
        }
    }
}
