//! Pacing: a token bucket on wire bytes, represented by the time at which it will be full again.

use crate::link::{NANOS_PER_SECOND, Nanos};

/// Most packets of the largest size sent back to back to catch up after a late wake-up of the
/// worker: two batched system calls. With a wake-up 3.8 ms late 64 packets still reached 200 Mbit/s;
/// with 8 packets it lost 13 % of its rate.
pub const BURST_PACKETS: u64 = 88;
/// Most bytes of them, unless one packet is larger: 64 packets of 9000 bytes.
const BURST_BYTES_MAX: u64 = 576_000;
/// Most packets sent back to back after a pause. If the rate is the path's own, such a burst stays
/// in the path's queue, adding to every round-trip time and three times to every time-out: 64
/// packets cost selective repeat 12 ms per loss at 200 Mbit/s.
pub const RESTART_PACKETS: u64 = 8;

/// The pace of one sender.
#[derive(Debug)]
pub struct Pacer {
    rate_bytes_per_second: u64,
    packet_bytes_max: u64,
    /// How far sending may run ahead of the rate …
    burst_nanos: Nanos,
    /// … and how far directly after a pause.
    restart_nanos: Nanos,
    /// When the rate will have covered everything sent so far, in whole nanoseconds …
    earned_at: Nanos,
    /// … and the fraction, in 1/rate nanoseconds.
    earned_fraction: u64,
}

impl Pacer {
    /// Creates a bucket that is full at `now`.
    #[must_use]
    pub fn new(rate_bytes_per_second: u64, packet_bytes_max: u64, now: Nanos) -> Self {
        let mut pacer = Self {
            rate_bytes_per_second: 1,
            packet_bytes_max,
            burst_nanos: 0,
            restart_nanos: 0,
            earned_at: now,
            earned_fraction: 0,
        };
        pacer.adopt(rate_bytes_per_second, BURST_PACKETS);
        pacer
    }

    /// Changes the rate, and how many packets may leave back to back. Bytes sent ahead, and bytes
    /// earned so far, are kept, so that frequent small changes neither delay nor speed up packets.
    pub fn adjust(&mut self, rate_bytes_per_second: u64, burst_packets: u64, now: Nanos) {
        let (rate_before, burst_before) = (self.rate_bytes_per_second, self.burst_nanos);
        let scaled = |nanos: Nanos, rate: u64| {
            let nanos = u128::from(nanos) * u128::from(rate_before) / u128::from(rate);
            u64::try_from(nanos).unwrap_or(u64::MAX)
        };
        let full_at = now.saturating_add(burst_before);
        let (ahead, earned) =
            (self.earned_at.saturating_sub(full_at), full_at.saturating_sub(self.earned_at));
        self.adopt(rate_bytes_per_second, burst_packets);
        let rate = self.rate_bytes_per_second;
        let earned = scaled(earned, rate).min(self.burst_nanos);
        self.earned_at =
            now.saturating_add(self.burst_nanos - earned).saturating_add(scaled(ahead, rate));
    }

    /// Changes the rate. Bytes sent ahead of the old rate are still covered at the old rate.
    pub fn set_rate(&mut self, rate_bytes_per_second: u64, now: Nanos) {
        self.adopt(rate_bytes_per_second, BURST_PACKETS);
        // The bucket does not grow, so that a formerly slow rate does not cause a burst.
        self.restart(now);
    }

    fn adopt(&mut self, rate_bytes_per_second: u64, burst_packets: u64) {
        let rate = rate_bytes_per_second.max(1);
        let ahead = |packets: u64| {
            let most = BURST_BYTES_MAX.saturating_sub(self.packet_bytes_max);
            let bytes = u128::from(((packets - 1) * self.packet_bytes_max).min(most));
            let nanos = bytes * u128::from(NANOS_PER_SECOND) / u128::from(rate);
            u64::try_from(nanos).unwrap_or(u64::MAX)
        };
        self.rate_bytes_per_second = rate;
        self.burst_nanos = ahead(burst_packets.max(1));
        self.restart_nanos = ahead(RESTART_PACKETS.min(burst_packets.max(1)));
        self.earned_fraction = 0;
    }

    /// Resumes after a pause; unused capacity from the pause is lost.
    pub fn restart(&mut self, now: Nanos) {
        let earned_at = now.saturating_add(self.burst_nanos - self.restart_nanos);
        if self.earned_at < earned_at {
            self.earned_at = earned_at;
            self.earned_fraction = 0;
        }
    }

    /// When the next packet may leave; a time not after `now` means at once.
    #[must_use]
    pub fn next_at(&self) -> Nanos {
        self.earned_at.saturating_sub(self.burst_nanos)
    }

    /// Accounts for a packet that leaves at `now`.
    pub fn sent(&mut self, wire_bytes: u64, now: Nanos) {
        if self.earned_at < now {
            self.earned_at = now;
            self.earned_fraction = 0;
        }
        // A packet of 16 GB would overflow 64 bits; this way each packet needs only one 64-bit
        // division.
        let parts =
            wire_bytes.saturating_mul(NANOS_PER_SECOND).saturating_add(self.earned_fraction);
        let rate = self.rate_bytes_per_second;
        self.earned_at = self.earned_at.saturating_add(parts / rate);
        self.earned_fraction = parts % rate;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_full_bucket_lets_one_burst_go_and_then_the_rate() {
        let mut pacer = Pacer::new(1_000_000, 1000, 0);
        let mut now = 0;
        let mut sent_at = Vec::new();
        let packets = BURST_PACKETS + 4;
        for _ in 0..packets {
            now = pacer.next_at().max(now);
            sent_at.push(now);
            pacer.sent(1000, now);
        }
        let millisecond = 1_000_000;
        let earned = |index: u64| index.saturating_sub(BURST_PACKETS - 1) * millisecond;
        let expected: Vec<u64> = (0..packets).map(earned).collect();
        assert_eq!(sent_at, expected);
    }

    #[test]
    fn of_large_packets_fewer_leave_back_to_back() {
        let mut pacer = Pacer::new(1_000_000, 9000, 0);
        let burst = (0..BURST_PACKETS).take_while(|_| {
            let is_due = pacer.next_at() == 0;
            pacer.sent(9000, 0);
            is_due
        });
        assert_eq!(burst.count(), 64);
    }

    #[test]
    fn after_a_pause_only_the_first_packets_leave_back_to_back() {
        let mut pacer = Pacer::new(1_000_000, 1000, 0);
        let millisecond = 1_000_000;
        for pause in [0, 5, 1000] {
            let start = pacer.next_at() + pause * millisecond;
            pacer.restart(start);
            let mut now = start;
            for index in 0..2 * RESTART_PACKETS {
                now = pacer.next_at().max(now);
                let earned = index.saturating_sub(RESTART_PACKETS - 1) * millisecond;
                assert!(now >= start + earned, "packet {index} after {pause} ms");
                pacer.sent(1000, now);
            }
        }
    }

    #[test]
    fn a_late_worker_makes_up_for_what_it_missed() {
        let mut pacer = Pacer::new(1_000_000, 1000, 0);
        pacer.restart(0);
        (0..RESTART_PACKETS).for_each(|_| pacer.sent(1000, 0));
        let late = 20 * 1_000_000;
        let made_up = (0..30).take_while(|_| {
            let is_due = pacer.next_at() <= late;
            if is_due {
                pacer.sent(1000, late);
            }
            is_due
        });
        assert_eq!(made_up.count(), 20);
    }

    #[test]
    fn another_rate_holds_from_the_next_packet_on() {
        let millisecond = 1_000_000;
        let mut pacer = Pacer::new(10_000_000, 1000, 0);
        (0..BURST_PACKETS).for_each(|_| pacer.sent(1000, 0));
        pacer.set_rate(1_000_000, 0);
        let mut now = 0;
        for _ in 0..BURST_PACKETS {
            now = pacer.next_at().max(now);
            pacer.sent(1000, now);
        }
        // At a tenth of the rate the next burst takes at least as long as 56 packets.
        assert!(now >= (BURST_PACKETS - RESTART_PACKETS - 1) * millisecond, "{now}");
    }

    #[test]
    fn adjusting_to_the_same_rate_changes_nothing_and_to_half_halves_the_pace() {
        let millisecond = 1_000_000;
        let sent_by = |adjusted: bool, rate: u64| {
            let mut pacer = Pacer::new(1_000_000, 1000, 0);
            (0..BURST_PACKETS + 10).for_each(|_| pacer.sent(1000, 0));
            (1..=200).fold(0, |sent, step| {
                let now = step * millisecond;
                if adjusted {
                    pacer.adjust(rate, BURST_PACKETS, now);
                }
                let due = (0..1000).take_while(|_| {
                    let is_due = pacer.next_at() <= now;
                    if is_due {
                        pacer.sent(1000, now);
                    }
                    is_due
                });
                sent + due.count()
            })
        };
        assert_eq!(sent_by(true, 1_000_000), sent_by(false, 0));
        let half = sent_by(true, 500_000);
        assert!((90..=100).contains(&half), "{half} packets in 200 ms");
    }

    #[test]
    fn a_smaller_burst_holds_after_a_pause() {
        let mut pacer = Pacer::new(1_000_000, 1000, 0);
        pacer.adjust(1_000_000, 4, 0);
        let now = 1_000_000_000;
        let burst = (0..1000).take_while(|_| {
            let is_due = pacer.next_at() <= now;
            if is_due {
                pacer.sent(1000, now);
            }
            is_due
        });
        assert_eq!(burst.count(), 4);
    }

    proptest! {
        /// Over every interval: bytes ≤ rate × time + burst.
        #[test]
        fn never_faster_than_the_rate(
            rate in 1_000_u64..10_000_000_000,
            packets in proptest::collection::vec((1_u64..=1500, 0_u64..100_000), 2..100),
        ) {
            let mut pacer = Pacer::new(rate, 1500, 0);
            let mut log: Vec<(u64, u64)> = Vec::new();
            let mut now = 0;
            for (bytes, pause) in packets {
                now = pacer.next_at().max(now + pause);
                pacer.sent(bytes, now);
                log.push((now, bytes));
            }
            for first in 0..log.len() {
                let mut sum = 0_u128;
                for (at, bytes) in &log[first..] {
                    sum += u128::from(*bytes);
                    let elapsed = u128::from(at - log[first].0) + 1;
                    let earned = elapsed * u128::from(rate) / u128::from(NANOS_PER_SECOND);
                    prop_assert!(sum <= earned + u128::from(BURST_PACKETS * 1500) + 1);
                }
            }
        }
    }
}
