//! Records of the log whose data an opening doesn't find, and the first flush that this undoes.

use std::collections::BTreeMap;

use super::log::Record;

/// Records that don't count, by block, each with the last log page that contains it. Records
/// superseded by a later one of their block are removed.
#[derive(Debug)]
pub(super) struct Lost<E>(BTreeMap<u64, Vec<(E, u64)>>);

impl<E> Default for Lost<E> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<E: Copy + PartialEq> Lost<E> {
    /// Adds a record of a log page, and whether it counts. Must be called in the order of the log.
    pub fn note(&mut self, page: u64, record: &Record<E>, counts: bool) {
        let (lba, blocks) = record.range();
        match record {
            Record::Entry { entry, is_carried, .. } if !counts => {
                let lost = self.0.entry(lba).or_default();
                // A write in flight at a flush is carried behind it and isn't part of it: only the
                // carried record counts as lost. An earlier write of the same entry stays.
                let before = lost.iter().rposition(|(other, _)| other == entry);
                if let Some(before) = before.filter(|_| *is_carried) {
                    lost.remove(before);
                }
                lost.push((*entry, page));
            }
            _ if self.0.is_empty() => {}
            _ => self.make_up_for(lba, lba + blocks),
        }
    }

    fn make_up_for(&mut self, start: u64, end: u64) {
        while let Some((lba, _)) = self.0.range(start..end).next() {
            let lba = *lba;
            self.0.remove(&lba);
        }
    }

    /// The first page with a lost record: no flush beyond it was recovered completely.
    pub fn first_page(&self) -> Option<u64> {
        self.0.values().flatten().map(|(_, page)| *page).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(records: &[(u64, Record<u8>, bool)]) -> Option<u64> {
        let mut lost = Lost::default();
        for (page, record, counts) in records {
            lost.note(*page, record, *counts);
        }
        lost.first_page()
    }

    fn entry(lba: u64, entry: u8) -> Record<u8> {
        Record::written(lba, entry)
    }

    fn carried(lba: u64, entry: u8) -> Record<u8> {
        Record::Entry { lba, entry, is_carried: true }
    }

    #[test]
    fn the_first_page_with_a_lost_record_bounds_what_is_found() {
        assert_eq!(noted(&[]), None);
        assert_eq!(noted(&[(3, entry(1, 1), true), (4, entry(2, 1), true)]), None);
        assert_eq!(noted(&[(3, entry(1, 1), false), (4, entry(2, 1), false)]), Some(3));
    }

    #[test]
    fn a_later_record_of_the_block_supersedes_it() {
        assert_eq!(noted(&[(3, entry(1, 1), false), (4, entry(1, 2), true)]), None);
        assert_eq!(noted(&[(3, entry(1, 1), true), (4, entry(1, 2), false)]), Some(4));
        let void = Record::Void { lba: 0, blocks: 2 };
        assert_eq!(noted(&[(3, entry(1, 1), false), (4, void, true)]), None);
        assert_eq!(noted(&[(3, entry(2, 1), false), (4, void, true)]), Some(3));
    }

    #[test]
    fn a_write_carried_behind_a_flush_is_not_part_of_it() {
        assert_eq!(noted(&[(3, entry(1, 1), false), (7, carried(1, 1), false)]), Some(7));
        assert_eq!(noted(&[(3, entry(1, 1), false), (7, entry(1, 2), false)]), Some(3));
    }

    #[test]
    fn the_same_sent_again_behind_a_flush_does_not_excuse_it() {
        let again = [(3, entry(1, 1), false), (7, entry(1, 1), false)];
        assert_eq!(noted(&again), Some(3));
        let on_its_way = (9, carried(1, 1), false);
        assert_eq!(noted(&[again[0], again[1], on_its_way]), Some(3));
    }
}
