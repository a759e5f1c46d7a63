//! Units in flight: when and on which path each was sent, and which of them were lost.

use std::collections::VecDeque;

use crate::link::Nanos;

use super::paths::PathId;
use super::requests::PRIORITIES;

/// Most transmissions kept: 3 round trips of 25 ms at 400 Gbit/s in 4 KiB units. When full, nothing
/// new is sent until the oldest is acknowledged or lost.
const TRANSMISSIONS_MAX: usize = 1 << 20;
/// Most transmissions looked up for the loss reports of one packet. Reports are repeated, and any
/// losses still unmarked after that are detected by their time-out.
const LOOKUPS_MAX: u32 = 1 << 17;

/// A unit that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmission {
    /// The path …
    pub path: PathId,
    /// … and the packet on it.
    pub packet: u64,
    /// Priority of the message.
    pub priority: u8,
    /// Its message.
    pub message: u64,
    /// Its coded index.
    pub coded: u32,
    /// Send time.
    pub sent_at: Nanos,
}

#[derive(Debug)]
struct Entry {
    transmission: Transmission,
    /// 0: not reported lost. Otherwise the number of entries, from this one on, that were reported
    /// lost together.
    lost: u32,
}

/// Transmissions of one path, in packet order.
#[derive(Debug, Default)]
struct Line {
    entries: VecDeque<Entry>,
    /// Packet of the newest retransmission.
    repeated_in: Option<u64>,
}

/// All transmissions whose outcome is unknown.
#[derive(Debug)]
pub struct Flight {
    /// By path.
    lines: Vec<Line>,
    /// Reported lost and not processed yet, by priority.
    lost: [VecDeque<Transmission>; PRIORITIES as usize],
    /// Lookups left for the loss reports of the current packet.
    lookups: u32,
    /// Transmissions lost according to reports, and according to time-outs.
    counts: (u64, u64),
}

impl Flight {
    /// Creates the state before any transmission.
    #[must_use]
    pub fn new(paths: u8) -> Self {
        Self {
            lines: (0..paths).map(|_| Line::default()).collect(),
            lost: std::array::from_fn(|_| VecDeque::new()),
            lookups: 0,
            counts: (0, 0),
        }
    }

    /// Whether only units that were sent before may be sent.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.lines.iter().map(|line| line.entries.len()).sum::<usize>() >= TRANSMISSIONS_MAX
    }

    /// Whether nothing is in flight or has to be sent again.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.has_lost() && self.lines.iter().all(|line| line.entries.is_empty())
    }

    /// The oldest transmission of a path: its packet and send time.
    #[must_use]
    pub fn oldest(&self, path: PathId) -> Option<(u64, Nanos)> {
        let oldest = &self.lines[path.index()].entries.front()?.transmission;
        Some((oldest.packet, oldest.sent_at))
    }

    /// Number of transmissions of a path in this packet and later ones.
    #[must_use]
    pub fn sent_since(&self, path: PathId, packet: u64) -> u64 {
        let entries = &self.lines[path.index()].entries;
        let earlier = entries.partition_point(|entry| entry.transmission.packet < packet);
        (entries.len() - earlier) as u64
    }

    /// Whether there are unprocessed loss reports.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.lost_priority().is_some()
    }

    /// The highest priority with unprocessed loss reports.
    #[must_use]
    pub fn lost_priority(&self) -> Option<u8> {
        self.lost.iter().rposition(|lost| !lost.is_empty()).map(|priority| priority as u8)
    }

    /// Whether a resent unit is not known to have arrived.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.has_lost()
            || self.lines.iter().any(|line| {
                let oldest = line.entries.front().map(|oldest| oldest.transmission.packet);
                oldest.is_some_and(|oldest| line.repeated_in >= Some(oldest))
            })
    }

    /// Transmissions lost according to reports, and according to time-outs.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        self.counts
    }

    /// Records that a unit has left.
    pub fn sent(&mut self, transmission: Transmission, is_retransmission: bool) {
        let line = &mut self.lines[transmission.path.index()];
        if is_retransmission {
            line.repeated_in = Some(transmission.packet);
        }
        line.entries.push_back(Entry { transmission, lost: 0 });
    }

    /// Starts to process the loss reports of one packet.
    pub fn begin_reports(&mut self) {
        self.lookups = LOOKUPS_MAX;
    }

    /// Processes the peer's report that packets `start..end` of a path are lost.
    pub fn report(&mut self, path: PathId, start: u64, end: u64) {
        let entries = &mut self.lines[path.index()].entries;
        let from = entries.partition_point(|entry| entry.transmission.packet < start);
        let to = entries.partition_point(|entry| entry.transmission.packet < end);
        let mut at = from;
        while at < to && self.lookups > 0 {
            self.lookups -= 1;
            let entry = &mut entries[at];
            if entry.lost > 0 {
                at += entry.lost as usize;
                continue;
            }
            // Entries marked now are skipped in one step when they are reported again.
            entry.lost = u32::try_from(to - at).unwrap_or(1).min(self.lookups + 1);
            let lost = entry.transmission;
            self.lost[usize::from(lost.priority)].push_back(lost);
            self.counts.0 += 1;
            at += 1;
        }
    }

    /// Counts everything on a path as lost by time-out.
    pub fn abandon(&mut self, path: PathId) {
        for entry in self.lines[path.index()].entries.drain(..) {
            if entry.lost == 0 {
                let lost = entry.transmission;
                self.lost[usize::from(lost.priority)].push_back(lost);
                self.counts.1 += 1;
            }
        }
    }

    /// Takes the transmission of the highest priority that was reported lost first.
    pub fn take_lost(&mut self) -> Option<Transmission> {
        let priority = self.lost_priority()?;
        self.lost[usize::from(priority)].pop_front()
    }

    /// Drops the oldest transmissions of each path while they are lost or no longer outstanding.
    pub fn prune(&mut self, is_outstanding: impl Fn(&Transmission) -> bool) {
        let is_over = |oldest: &Entry| oldest.lost > 0 || !is_outstanding(&oldest.transmission);
        for line in &mut self.lines {
            while line.entries.front().is_some_and(is_over) {
                line.entries.pop_front();
            }
        }
    }

    /// The time and path of the next time-out. `patience` is how long to wait for a packet of a
    /// path; `None`: until more is known.
    #[must_use]
    pub fn next(&self, patience: impl Fn(PathId, u64) -> Option<Nanos>) -> Option<(Nanos, PathId)> {
        let paths = (0..self.lines.len()).map(|index| PathId(index as u8));
        let given_up = paths.filter_map(|path| {
            let (packet, sent_at) = self.oldest(path)?;
            Some((sent_at.saturating_add(patience(path, packet)?), path))
        });
        given_up.min()
    }

    /// The priority of a transmission whose time-out has passed.
    #[must_use]
    pub fn expired_priority(
        &self,
        now: Nanos,
        patience: impl Fn(PathId, u64) -> Option<Nanos>,
    ) -> Option<u8> {
        let (_, path) = self.next(patience).filter(|(at, _)| *at <= now)?;
        let oldest = self.lines[path.index()].entries.front()?;
        Some(oldest.transmission.priority)
    }

    /// Takes an outstanding transmission whose time-out has passed.
    pub fn take_expired(
        &mut self,
        now: Nanos,
        patience: impl Fn(PathId, u64) -> Option<Nanos>,
        is_outstanding: impl Fn(&Transmission) -> bool,
    ) -> Option<Transmission> {
        self.prune(is_outstanding);
        let (_, path) = self.next(patience).filter(|(at, _)| *at <= now)?;
        self.counts.1 += 1;
        self.lines[path.index()].entries.pop_front().map(|entry| entry.transmission)
    }

    /// Takes the oldest outstanding transmission of a path, which is about to be sent again.
    pub fn take_oldest(
        &mut self,
        path: PathId,
        is_outstanding: impl Fn(&Transmission) -> bool,
    ) -> Option<Transmission> {
        self.prune(is_outstanding);
        self.lines[path.index()].entries.pop_front().map(|entry| entry.transmission)
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.lines.iter_mut().for_each(|line| line.entries.clear());
        self.lost.iter_mut().for_each(VecDeque::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: PathId = PathId(1);

    fn flight(count: u64) -> Flight {
        let mut flight = Flight::new(2);
        for packet in 0..count {
            let transmission = Transmission {
                path: PATH,
                priority: 0,
                packet,
                message: 0,
                coded: packet as u32,
                sent_at: 0,
            };
            flight.sent(transmission, false);
        }
        flight
    }

    #[test]
    fn the_reports_of_a_packet_cost_bounded_work_and_repeating_them_goes_on() {
        let count = u64::from(LOOKUPS_MAX) * 2;
        let mut flight = flight(count);
        flight.begin_reports();
        flight.report(PATH, 0, u64::MAX);
        assert_eq!(flight.counts().0, u64::from(LOOKUPS_MAX));
        flight.begin_reports();
        flight.report(PATH, 0, u64::MAX);
        // One lookup skips the entries marked before.
        assert_eq!(flight.counts().0, count - 1);
        flight.begin_reports();
        flight.report(PATH, 1, u64::MAX);
        assert_eq!(flight.counts().0, count);
        assert!(flight.lookups > LOOKUPS_MAX - 4);
    }

    #[test]
    fn what_is_reported_is_lost_once_and_the_rest_by_its_time() {
        let mut flight = flight(6);
        flight.begin_reports();
        for (start, end) in [(1, 3), (2, 4), (9, 12)] {
            flight.report(PATH, start, end);
        }
        let lost: Vec<u64> =
            std::iter::from_fn(|| flight.take_lost()).map(|lost| lost.packet).collect();
        assert_eq!(lost, [1, 2, 3]);
        assert!(flight.take_expired(9, |_, _| Some(10), |_| true).is_none());
        let expired =
            std::iter::from_fn(|| flight.take_expired(10, |_, _| Some(10), |t| t.packet != 4));
        assert_eq!(expired.map(|t| t.packet).collect::<Vec<_>>(), [0, 5]);
        assert_eq!(flight.counts(), (3, 2));
        assert!(flight.is_empty());
    }

    #[test]
    fn a_report_about_one_path_says_nothing_of_another_and_each_has_its_time() {
        let mut flight = flight(4);
        for packet in 0..4 {
            let transmission = Transmission {
                path: PathId(0),
                priority: 0,
                packet,
                message: 1,
                coded: packet as u32,
                sent_at: 5,
            };
            flight.sent(transmission, false);
        }
        flight.begin_reports();
        flight.report(PATH, 1, 3);
        let lost: Vec<_> = std::iter::from_fn(|| flight.take_lost()).collect();
        assert!(lost.iter().all(|lost| lost.path == PATH) && lost.len() == 2);
        let timeout = |path, _| Some(if path == PATH { 100 } else { 10 });
        assert_eq!(flight.next(timeout), Some((15, PathId(0))));
        assert_eq!(flight.take_expired(15, timeout, |_| true).map(|one| one.path), Some(PathId(0)));
        flight.abandon(PathId(0));
        assert_eq!(std::iter::from_fn(|| flight.take_lost()).count(), 3);
        assert_eq!(flight.next(timeout), Some((100, PATH)));
        assert_eq!(flight.counts(), (2, 4));
    }
}
