//! Units under way: when each left, and which of them were lost.

use std::collections::VecDeque;

use crate::link::Nanos;

/// Transmissions remembered: 3 round trips of 25 ms at 400 Gbit/s in 4 KiB units.
/// When full, nothing new is sent until the oldest is acknowledged or lost.
const TRANSMISSIONS_MAX: usize = 1 << 20;
/// Transmissions that one packet's reports may be looked up in, most. A report is repeated, and what
/// is left then is lost by its time-out.
const LOOKUPS_MAX: u32 = 1 << 17;

/// A unit that left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmission {
    /// In which packet.
    pub packet: u64,
    /// Its message.
    pub message: u64,
    /// Its coded index.
    pub coded: u32,
    /// When.
    pub sent_at: Nanos,
}

#[derive(Debug)]
struct Entry {
    transmission: Transmission,
    /// 0: nothing is known of it. Else it was reported lost, and so were the next ones, so many
    /// together.
    lost: u32,
}

/// All transmissions of which nobody knows yet what became of them, in the order of their packets.
#[derive(Debug, Default)]
pub struct Flight {
    entries: VecDeque<Entry>,
    /// Reported lost, and not looked at since.
    lost: VecDeque<Transmission>,
    /// Lookups left for the reports of the packet being received.
    lookups: u32,
    /// Packet of the newest retransmission.
    repeated_in: Option<u64>,
    /// Transmissions lost by report, and by time-out.
    counts: (u64, u64),
}

impl Flight {
    /// Nothing more may be sent but what was sent before.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.entries.len() >= TRANSMISSIONS_MAX
    }

    /// Whether nothing is under way or to be sent again.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.lost.is_empty()
    }

    /// Whether there are reported losses to look at.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Whether something that was sent again is not known to have arrived.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        let oldest = self.entries.front().map(|oldest| oldest.transmission.packet);
        self.has_lost() || oldest.is_some_and(|oldest| self.repeated_in >= Some(oldest))
    }

    /// Transmissions lost by report, and by time-out.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        self.counts
    }

    /// A unit has left.
    pub fn sent(&mut self, transmission: Transmission, is_retransmission: bool) {
        if is_retransmission {
            self.repeated_in = Some(transmission.packet);
        }
        self.entries.push_back(Entry { transmission, lost: 0 });
    }

    /// Reports of one packet follow.
    pub fn begin_reports(&mut self) {
        self.lookups = LOOKUPS_MAX;
    }

    /// The peer reports the packets `start..end` as lost.
    pub fn report(&mut self, start: u64, end: u64) {
        let from = self.entries.partition_point(|entry| entry.transmission.packet < start);
        let to = self.entries.partition_point(|entry| entry.transmission.packet < end);
        let mut at = from;
        while at < to && self.lookups > 0 {
            self.lookups -= 1;
            let entry = &mut self.entries[at];
            if entry.lost > 0 {
                at += entry.lost as usize;
                continue;
            }
            // What is marked now is passed in one step when it is reported again.
            entry.lost = u32::try_from(to - at).unwrap_or(1).min(self.lookups + 1);
            self.lost.push_back(entry.transmission);
            self.counts.0 += 1;
            at += 1;
        }
    }

    /// Takes the oldest transmission that was reported lost.
    pub fn take_lost(&mut self) -> Option<Transmission> {
        self.lost.pop_front()
    }

    /// Forgets the oldest as long as they are lost or not outstanding.
    pub fn prune(&mut self, is_outstanding: impl Fn(&Transmission) -> bool) {
        let is_over = |oldest: &Entry| oldest.lost > 0 || !is_outstanding(&oldest.transmission);
        while self.entries.front().is_some_and(is_over) {
            self.entries.pop_front();
        }
    }

    /// When the oldest is given up.
    #[must_use]
    pub fn next_at(&self, timeout: Nanos) -> Option<Nanos> {
        let oldest = self.entries.front()?;
        Some(oldest.transmission.sent_at.saturating_add(timeout))
    }

    /// Takes the oldest outstanding transmission whose time is up.
    pub fn take_expired(
        &mut self,
        now: Nanos,
        timeout: Nanos,
        is_outstanding: impl Fn(&Transmission) -> bool,
    ) -> Option<Transmission> {
        self.prune(is_outstanding);
        if self.next_at(timeout)? > now {
            return None;
        }
        self.counts.1 += 1;
        self.entries.pop_front().map(|entry| entry.transmission)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.lost.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(count: u64) -> Flight {
        let mut flight = Flight::default();
        for packet in 0..count {
            let transmission =
                Transmission { packet, message: 0, coded: packet as u32, sent_at: 0 };
            flight.sent(transmission, false);
        }
        flight
    }

    #[test]
    fn the_reports_of_a_packet_cost_bounded_work_and_repeating_them_goes_on() {
        let count = u64::from(LOOKUPS_MAX) * 2;
        let mut flight = flight(count);
        flight.begin_reports();
        flight.report(0, u64::MAX);
        assert_eq!(flight.counts().0, u64::from(LOOKUPS_MAX));
        flight.begin_reports();
        flight.report(0, u64::MAX);
        // One lookup passes what was marked before.
        assert_eq!(flight.counts().0, count - 1);
        flight.begin_reports();
        flight.report(1, u64::MAX);
        assert_eq!(flight.counts().0, count);
        assert!(flight.lookups > LOOKUPS_MAX - 4);
    }

    #[test]
    fn what_is_reported_is_lost_once_and_the_rest_by_its_time() {
        let mut flight = flight(6);
        flight.begin_reports();
        for (start, end) in [(1, 3), (2, 4), (9, 12)] {
            flight.report(start, end);
        }
        let lost: Vec<u64> =
            std::iter::from_fn(|| flight.take_lost()).map(|lost| lost.packet).collect();
        assert_eq!(lost, [1, 2, 3]);
        assert!(flight.take_expired(9, 10, |_| true).is_none());
        let expired = std::iter::from_fn(|| flight.take_expired(10, 10, |t| t.packet != 4));
        assert_eq!(expired.map(|t| t.packet).collect::<Vec<_>>(), [0, 5]);
        assert_eq!(flight.counts(), (3, 2));
        assert!(flight.is_empty());
    }
}
