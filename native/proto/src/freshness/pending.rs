//! The table of pending changes: entries and void ranges that are newer than their leaf pages.
//!
//! It is ordered by sector, so a merge processes it set by set, and a run of sectors is looked up
//! in one descent. It is a B-tree, so no insertion has to wait until the table is rebuilt. The
//! caller bounds its size: an insertion adds at most one entry, and a void range one range. Most
//! sectors that are looked up aren't in the table; a filter finds that out without a descent.

use std::collections::BTreeMap;
use std::ops::Range;

/// The state of a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known<E> {
    /// Written; this is the current entry.
    Entry(E),
    /// Unwritten.
    Void,
    /// Not in the table: the leaf page has the current entry.
    Absent,
    /// Orphaned: unknown, as its leaf page was wrong when a merge needed it. Reads fail until the
    /// sector is written or made unwritten again. Only leaf pages have this state.
    Orphaned,
}

/// A step of a merge, in order of sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<E> {
    /// These sets are completely void: their leaf pages needn't be read.
    Void(Range<u64>),
    /// One set changes: first sectors become unwritten, then entries are set, by index in the set.
    Change {
        /// The set.
        set: u64,
        /// Sectors that become unwritten, ascending and disjoint.
        voids: Vec<Range<usize>>,
        /// Entries, ascending.
        entries: Vec<(usize, E)>,
    },
}

/// Logarithm (base 2) of the filter's bits. The filter takes a megabyte; with a million scattered
/// entries, one group in eight is a false positive.
const FILTER_BITS_LOG: u32 = 23;
/// Sectors of a group, which has one bit, so that a run of sectors needs few bits.
const GROUP_SECTORS: u64 = 32;

/// Set of groups that may have entries; it includes all that do. Allocated with the first entry.
#[derive(Debug, Default)]
struct Filter(Vec<u64>);

impl Filter {
    /// Position of a group's bit. The multiplier is 2⁶⁴ over the golden ratio (Knuth, TAOCP §6.4).
    fn place(group: u64) -> (usize, u64) {
        let hash = group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - FILTER_BITS_LOG);
        ((hash / 64) as usize, 1 << (hash % 64))
    }

    fn add(&mut self, lba: u64) {
        if self.0.is_empty() {
            self.0 = vec![0; 1 << (FILTER_BITS_LOG - 6)];
        }
        let (word, bit) = Self::place(lba / GROUP_SECTORS);
        self.0[word] |= bit;
    }

    fn may_have(&self, sectors: Range<u64>) -> bool {
        let groups = sectors.start / GROUP_SECTORS..sectors.end.div_ceil(GROUP_SECTORS);
        !self.0.is_empty() && groups.map(Self::place).any(|(word, bit)| self.0[word] & bit != 0)
    }
}

/// Changes that are newer than their leaf pages.
#[derive(Debug)]
pub struct Pending<E> {
    filter: Filter,
    entries: BTreeMap<u64, E>,
    /// Maps start to end; disjoint. An entry inside a range is newer than the range.
    voids: BTreeMap<u64, u64>,
}

impl<E> Default for Pending<E> {
    fn default() -> Self {
        Self { filter: Filter::default(), entries: BTreeMap::new(), voids: BTreeMap::new() }
    }
}

impl<E: Copy> Pending<E> {
    /// Creates an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    // Commands.

    /// Sets the current entry of a sector. Returns the entry that it replaced in this table.
    pub fn insert(&mut self, lba: u64, entry: E) -> Option<E> {
        self.filter.add(lba);
        self.entries.insert(lba, entry)
    }

    /// Makes sectors unwritten, and moves their entries in this table to `removed`.
    pub fn void(&mut self, sectors: Range<u64>, removed: &mut Vec<E>) {
        if sectors.is_empty() {
            return;
        }
        let covered: Vec<u64> = self.entries.range(sectors.clone()).map(|(lba, _)| *lba).collect();
        removed.extend(covered.iter().filter_map(|lba| self.entries.remove(lba)));
        let (mut start, mut end) = (sectors.start, sectors.end);
        // Merge ranges that overlap or touch.
        while let Some((found, last)) =
            self.voids.range(..=end).next_back().map(|(start, end)| (*start, *end))
            && last >= start
        {
            self.voids.remove(&found);
            (start, end) = (start.min(found), end.max(last));
        }
        self.voids.insert(start, end);
    }

    // Questions.

    /// The state of a sector.
    #[must_use]
    pub fn get(&self, lba: u64) -> Known<E> {
        if self.filter.may_have(lba..lba.saturating_add(1))
            && let Some(entry) = self.entries.get(&lba)
        {
            return Known::Entry(*entry);
        }
        if self.is_void(lba) { Known::Void } else { Known::Absent }
    }

    /// Passes the state of each sector of a run to `found`, in order.
    pub fn get_run(&self, sectors: Range<u64>, mut found: impl FnMut(u64, Known<E>)) {
        if self.voids.is_empty() && !self.filter.may_have(sectors.clone()) {
            sectors.for_each(|lba| found(lba, Known::Absent));
            return;
        }
        let mut entries = self.entries.range(sectors.clone()).peekable();
        let mut voids = self.voids_in(sectors.clone()).peekable();
        for lba in sectors {
            while voids.peek().is_some_and(|void| void.end <= lba) {
                voids.next();
            }
            let known = match entries.next_if(|(entry, _)| **entry == lba) {
                Some((_, entry)) => Known::Entry(*entry),
                None if voids.peek().is_some_and(|void| void.contains(&lba)) => Known::Void,
                None => Known::Absent,
            };
            found(lba, known);
        }
    }

    /// The first sector from `lba` on that has an entry.
    #[must_use]
    pub fn next_entry(&self, lba: u64) -> Option<u64> {
        self.entries.range(lba..).next().map(|(lba, _)| *lba)
    }

    /// Number of entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Number of void ranges.
    #[must_use]
    pub fn voids(&self) -> usize {
        self.voids.len()
    }

    /// Whether the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.voids.is_empty()
    }

    /// All entries, in order of sectors.
    pub fn all_entries(&self) -> impl Iterator<Item = (u64, E)> {
        self.entries.iter().map(|(lba, entry)| (*lba, *entry))
    }

    /// All void ranges, in order.
    pub fn all_voids(&self) -> impl Iterator<Item = Range<u64>> {
        self.voids.iter().map(|(start, end)| *start..*end)
    }

    /// The next step of a merge from set `set` on; None if nothing is left. Sets have `size`
    /// sectors; the last one of `sector_count` sectors may have fewer.
    #[must_use]
    pub fn next_step(&self, set: u64, size: u64, sector_count: u64) -> Option<Step<E>> {
        let from = set.checked_mul(size)?;
        let entry = self.entries.range(from..).next().map(|(lba, _)| *lba);
        let void = self.voids_in(from..u64::MAX).next();
        let first = entry.into_iter().chain(void.as_ref().map(|void| void.start)).min()?;
        let set = first / size;
        let set_end = |set: u64| ((set + 1) * size).min(sector_count);
        if let Some(void) = void.filter(|void| void.start <= set * size && void.end >= set_end(set))
        {
            // Up to the first set that has an entry or isn't covered completely.
            let covered = if void.end >= sector_count {
                sector_count.div_ceil(size)
            } else {
                void.end / size
            };
            let end = covered.min(entry.map_or(u64::MAX, |lba| lba / size));
            if end > set {
                return Some(Step::Void(set..end));
            }
        }
        let sectors = set * size..set_end(set);
        let index = |lba: u64| (lba - sectors.start) as usize;
        let voids = self.voids_in(sectors.clone());
        Some(Step::Change {
            set,
            voids: voids.map(|void| index(void.start)..index(void.end)).collect(),
            entries: self
                .entries
                .range(sectors.clone())
                .map(|(lba, e)| (index(*lba), *e))
                .collect(),
        })
    }

    fn is_void(&self, lba: u64) -> bool {
        self.voids.range(..=lba).next_back().is_some_and(|(_, end)| lba < *end)
    }

    /// The parts of void ranges that are inside a range, in order.
    fn voids_in(&self, sectors: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let before = self.voids.range(..sectors.start).next_back();
        let from = before.map_or(sectors.start, |(start, _)| *start).min(sectors.end);
        let clip =
            move |(start, end): (&u64, &u64)| (*start).max(sectors.start)..(*end).min(sectors.end);
        self.voids.range(from..sectors.end).map(clip).filter(|void| !void.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sectors of a set, and in total, in these tests: the last set is shorter.
    const SIZE: u64 = 7;
    const SECTORS: u64 = 60;

    #[derive(Debug, Clone)]
    enum Operation {
        Insert(u64),
        Void(Range<u64>),
    }

    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let range =
            (0..SECTORS, 0..SECTORS).prop_map(|(one, other)| one.min(other)..one.max(other));
        let operation = prop_oneof![
            4 => (0..SECTORS).prop_map(Operation::Insert),
            1 => range.prop_map(Operation::Void),
        ];
        prop::collection::vec(operation, 0..80)
    }

    /// Runs operations on the table and on a simple model.
    fn run(operations: &[Operation]) -> (Pending<usize>, Vec<Known<usize>>) {
        let mut table = Pending::new();
        let mut naive = vec![Known::Absent; SECTORS as usize];
        for (number, operation) in operations.iter().enumerate() {
            match operation {
                Operation::Insert(lba) => {
                    let before = std::mem::replace(&mut naive[*lba as usize], Known::Entry(number));
                    let replaced = table.insert(*lba, number);
                    assert_eq!(
                        replaced.map_or(Known::Absent, Known::Entry),
                        match before {
                            Known::Void => Known::Absent,
                            before => before,
                        }
                    );
                }
                Operation::Void(sectors) => {
                    let mut removed = Vec::new();
                    table.void(sectors.clone(), &mut removed);
                    let naive = &mut naive[sectors.start as usize..sectors.end as usize];
                    let expected: Vec<usize> = naive.iter().filter_map(entry).collect();
                    assert_eq!(removed, expected);
                    naive.fill(Known::Void);
                }
            }
        }
        (table, naive)
    }

    fn entry(known: &Known<usize>) -> Option<usize> {
        if let Known::Entry(entry) = known { Some(*entry) } else { None }
    }

    proptest! {
            #[test]
            fn the_last_operation_on_each_sector_counts(operations in operations(), start in 0..SECTORS) {
                let (table, naive) = run(&operations);
                let found: Vec<_> = (0..SECTORS).map(|lba| table.get(lba)).collect();
                prop_assert_eq!(&found, &naive);
                let mut found = Vec::new();
                table.get_run(start..SECTORS, |lba, known| found.push((lba, known)));
                let expected: Vec<_> = (start..SECTORS).zip(naive[start as usize..].to_vec()).collect();
                prop_assert_eq!(found, expected);
                let next = (start..SECTORS).find(|lba| entry(&naive[*lba as usize]).is_some());
                prop_assert_eq!(table.next_entry(start), next);
                prop_assert_eq!(table.entries(), naive.iter().filter_map(entry).count());
                prop_assert!(table.voids() <= operations.len());
                prop_assert_eq!(table.is_empty(), naive.iter().all(|known| *known == Known::Absent));
            }

            #[test]
            fn the_steps_of_a_merge_bring_the_leaves_to_the_state_of_the_table(operations in operations()) {
                let (table, naive) = run(&operations);
                let mut leaves = vec![Known::Absent; SECTORS as usize];
                let mut next = 0;
                while let Some(step) = table.next_step(next, SIZE, SECTORS) {
                    match step {
                        Step::Void(sets) => {
                            prop_assert!(sets.start >= next && sets.end > sets.start);
                            let end = (sets.end * SIZE).min(SECTORS);
                            leaves[(sets.start * SIZE) as usize..end as usize].fill(Known::Void);
                            next = sets.end;
                        }
                        Step::Change { set, voids, entries } => {
                            prop_assert!(set >= next && !(voids.is_empty() && entries.is_empty()));
                            let first = (set * SIZE) as usize;
                            for void in voids {
                            leaves[first + void.start..first + void.end].fill(Known::Void);
                        }
                            for (index, entry) in entries {
    leaves[first + index] = Known::Entry(entry);
    }
                            next = set + 1;
                        }
                    }
                }
                prop_assert_eq!(leaves, naive);
            }
        }

    #[test]
    fn completely_void_sets_are_one_step() {
        let mut table = Pending::new();
        table.void(3..SECTORS, &mut Vec::new());
        table.insert(30, 1);
        let step = |set| table.next_step(set, SIZE, SECTORS);
        let change = |set, void: Range<usize>, entries: &[(usize, i32)]| {
            Some(Step::Change { set, voids: Vec::from_iter([void]), entries: entries.to_vec() })
        };
        assert_eq!(step(0), change(0, 3..7, &[]));
        assert_eq!(step(1), Some(Step::Void(1..4)));
        assert_eq!(step(4), change(4, 0..7, &[(2, 1)]));
        assert_eq!(step(5), Some(Step::Void(5..9)));
        assert_eq!(step(9), None);
    }

    #[test]
    fn adjacent_ranges_are_merged() {
        let mut table: Pending<u8> = Pending::new();
        for range in [0..5, 10..15, 20..25, 15..20, 5..9, 30..30] {
            table.void(range, &mut Vec::new());
        }
        assert_eq!(table.all_voids().collect::<Vec<_>>(), [0..9, 10..25]);
        table.insert(12, 3);
        assert_eq!(table.all_entries().collect::<Vec<_>>(), [(12, 3)]);
        assert_eq!(
            (table.get(12), table.get(13), table.get(9)),
            (Known::Entry(3), Known::Void, Known::Absent)
        );
    }
}
