//! Periods in which the session was not driven because the driver's thread did not run. Packets
//! then neither left on time nor were read on arrival, so such a period does not count as silence
//! of the peer.

use std::collections::VecDeque;

use crate::link::Nanos;

/// Most absences kept: a loaded host has several within a time-out, and the oldest matter least.
const ABSENCES_MAX: usize = 16;

/// The latest absences, in order and without overlap.
#[derive(Debug, Default)]
pub struct Absences(VecDeque<(Nanos, Nanos)>);

impl Absences {
    /// Records an absence. Any part before the end of an earlier absence is already known.
    pub fn note(&mut self, start: Nanos, end: Nanos) {
        let known = self.0.back().map_or(0, |(_, end)| *end);
        let start = start.max(known);
        if start >= end {
            return;
        }
        if self.0.len() == ABSENCES_MAX {
            self.0.pop_front();
        }
        self.0.push_back((start, end));
    }

    /// When something that began at `since` will have lasted for `duration`, not counting absences.
    #[must_use]
    pub fn extend(&self, since: Nanos, duration: Nanos) -> Nanos {
        self.0.iter().fold(since.saturating_add(duration), |until, (start, end)| {
            let start = (*start).max(since);
            if start < until { until.saturating_add(end.saturating_sub(start)) } else { until }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_away_is_added_to_what_it_interrupts() {
        let mut absences = Absences::default();
        assert_eq!(absences.extend(10, 5), 15);
        absences.note(20, 30);
        absences.note(40, 45);
        assert_eq!(absences.extend(5, 10), 15, "over before");
        assert_eq!(absences.extend(5, 20), 35, "interrupted once");
        assert_eq!(absences.extend(5, 26), 46, "over 15 of it, then 10 away, 10, 5 away, 1");
        assert_eq!(absences.extend(25, 10), 40, "begun while away");
        assert_eq!(absences.extend(50, 10), 60, "begun after them");
    }

    #[test]
    fn what_overlaps_counts_once_and_the_oldest_are_forgotten() {
        let mut absences = Absences::default();
        absences.note(10, 20);
        absences.note(15, 25);
        absences.note(12, 18);
        assert_eq!(absences.extend(0, 11), 26);
        for index in 1..=ABSENCES_MAX as u64 {
            absences.note(index * 100, index * 100 + 1);
        }
        assert_eq!(absences.0.len(), ABSENCES_MAX);
        assert_eq!(absences.extend(0, 11), 11);
    }
}
