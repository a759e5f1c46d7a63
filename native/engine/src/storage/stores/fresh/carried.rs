//! Finds log records that no flush covers although they are before its boundary: those of writes
//! that were in progress at the flush and are carried behind it.
//!
//! A sector may be written twice with one IV: a gateway that gets no answer sends the sector again
//! unchanged. So the records of one block and entry form chains. A chain starts with a record that
//! isn't carried, and represents one write; it doesn't affect the chain before it.

use std::collections::{HashMap, HashSet};

use super::keys::Tag;
use super::log::{LogPage, Record};

/// Records by the number of their page and their index in it.
pub(super) type Places = HashSet<(u64, usize)>;

/// Records on pages before `flushed` whose write had not ended at that flush.
pub(super) fn unfinished<E: Copy + PartialEq>(log: &[(LogPage<E>, Tag)], flushed: u64) -> Places {
    let mut unfinished = Places::new();
    // Blocks and entries whose preceding record belongs to a write that had not ended.
    let mut carried: HashMap<u64, Vec<E>> = HashMap::new();
    for (page, _) in log.iter().rev() {
        if page.number < flushed && carried.is_empty() {
            break;
        }
        for (place, record) in page.records.iter().enumerate().rev() {
            let Record::Entry { lba, entry, is_carried } = record else { continue };
            let is_unfinished = take(&mut carried, *lba, entry);
            if page.number < flushed && is_unfinished {
                unfinished.insert((page.number, place));
            }
            if *is_carried && (page.number >= flushed || is_unfinished) {
                carried.entry(*lba).or_default().push(*entry);
            }
        }
    }
    unfinished
}

fn take<E: PartialEq>(carried: &mut HashMap<u64, Vec<E>>, lba: u64, entry: &E) -> bool {
    let Some(entries) = carried.get_mut(&lba) else { return false };
    let before = entries.len();
    entries.retain(|other| other != entry);
    let is_taken = entries.len() < before;
    if entries.is_empty() {
        carried.remove(&lba);
    }
    is_taken
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Indices of unfinished records, for pages with one record each: block, entry, whether it is
    /// carried.
    fn found(records: &[(u64, u8, bool)], flushed: u64) -> Vec<u64> {
        let page = |(number, (lba, entry, is_carried)): (u64, &(u64, u8, bool))| {
            let records = vec![Record::Entry { lba: *lba, entry: *entry, is_carried: *is_carried }];
            let (flushed, previous) = (0, Tag::default());
            (LogPage { epoch: 1, number, flushed, sequence: 0, previous, records }, previous)
        };
        let log: Vec<_> = (0..).zip(records).map(page).collect();
        let mut found: Vec<u64> = unfinished(&log, flushed).into_iter().map(|(at, _)| at).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn a_write_in_progress_at_the_flush_is_not_part_of_it() {
        assert_eq!(found(&[(5, 1, false), (6, 1, false), (5, 1, true)], 2), [0]);
        assert_eq!(found(&[(5, 1, false), (5, 1, true), (5, 1, true)], 2), [0, 1]);
    }

    #[test]
    fn the_same_sent_again_takes_nothing_from_the_flush_before() {
        assert_eq!(found(&[(5, 1, false), (5, 1, false)], 1), []);
        // In progress at the second flush, the second write isn't part of it; the first stays part
        // of its own.
        assert_eq!(found(&[(5, 1, false), (5, 1, false), (5, 1, true)], 2), [1]);
    }

    #[test]
    fn a_write_that_ended_before_the_flush_is_part_of_it_however_often_it_was_carried() {
        assert_eq!(found(&[(5, 1, false), (5, 1, true), (5, 2, false)], 2), []);
    }
}
