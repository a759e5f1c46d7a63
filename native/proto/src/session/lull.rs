//! How long a paced sender may wait so that more units leave together, and whether it has to read
//! meanwhile. Each train costs both ends a wake-up, as much as 40 packets.

use crate::link::{NANOS_PER_SECOND, Nanos};

use super::Session;
use super::statistics::SendLimit;

/// Most bytes of a longer train: 32 packets of 1500 bytes, so the pacer's burst makes up for as late
/// wake-ups as without longer trains.
const TRAIN_BYTES_MAX: u64 = 48 << 10;
/// On a near path the train may be that long, and half for each such round trip more. Linux's TCP
/// does the same (`tcp_tso_rtt_log`): losses are soon repaired there. Where the rate is the path's own,
/// the path idles once in each message, until trains are that long.
const NEAR_ROUND_TRIP: Nanos = 512_000;
/// A pause takes at most this part of the time until the message may be complete, so its last
/// packets leave as promptly as without longer trains.
const TO_GO_PART: Nanos = 2;
/// A pause takes no longer: whoever cancels, closes or drains at the other end waits for so long,
/// and slow sessions save little by fewer wake-ups.
const LULL_NANOS_MAX: Nanos = 5_000_000;
/// The peer's reports may wait for so long even if another message awaits its end.
const READ_NANOS: Nanos = 500_000;

impl Session {
    /// How long units that only the rate holds back may wait for each other. 0: no longer than they
    /// would anyway, as their message or another's pause before its parity soon ends or a congestion
    /// controller judges the trains.
    #[must_use]
    pub fn lull(&self, now: Nanos) -> Nanos {
        if !self.is_only_paced() {
            return 0;
        }
        let rate = self.config.rate_bytes_per_second;
        let round_trip = self.paths.iter().filter_map(|(_, path)| path.rtt.least()).max();
        let lull = round_trip.map_or(0, |round_trip| lull(self.nanos_to_go(), round_trip, rate));
        self.sender.parity_at().map_or(lull, |at| lull.min(at.saturating_sub(now)))
    }

    /// Whether the peer's packets may wait unread for `pause`, in which no unit leaves: they are
    /// reports about a message with much left to send, no message can come, and unless the pause is
    /// short nobody waits for another's end.
    #[must_use]
    pub fn may_read_late(&self, pause: Nanos) -> bool {
        let may_come = self.receiver.posted_end() != self.receiver.completed_end();
        if !self.is_only_paced() || may_come || pause > LULL_NANOS_MAX {
            return false;
        }
        let goes_on = || self.nanos_to_go() >= TO_GO_PART * pause;
        pause <= READ_NANOS || goes_on() && !self.sender.awaits_another()
    }

    /// Reports whether the packets to be received next may have waited unread: then they don't
    /// measure round trips.
    pub fn reads_late(&mut self, is_late: bool) {
        self.is_reading_late = is_late;
    }

    /// Whether units wait for the rate, and for no congestion controller.
    fn is_only_paced(&self) -> bool {
        self.limit() == SendLimit::Pacing && self.steering().congestion.is_none()
    }

    /// Time until the message that would leave first may be complete.
    fn nanos_to_go(&self) -> Nanos {
        let units = u64::from(self.sender.units_to_go());
        time_of(units * u64::from(self.config.unit_bytes), self.config.rate_bytes_per_second)
    }
}

fn lull(nanos_to_go: Nanos, round_trip: Nanos, rate_bytes_per_second: u64) -> Nanos {
    let train = TRAIN_BYTES_MAX >> (round_trip / NEAR_ROUND_TRIP).min(63);
    let longest = time_of(train, rate_bytes_per_second).min(LULL_NANOS_MAX);
    (nanos_to_go / TO_GO_PART).min(longest)
}

/// Time that bytes take at a rate.
fn time_of(bytes: u64, rate_bytes_per_second: u64) -> Nanos {
    bytes.saturating_mul(NANOS_PER_SECOND) / rate_bytes_per_second.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Nanos = 1_000_000;
    const SLOW: u64 = 12_500_000;

    #[test]
    fn trains_are_long_on_near_paths_and_short_before_the_end() {
        let long = 1000 * MILLISECOND;
        let whole = time_of(TRAIN_BYTES_MAX, SLOW);
        assert_eq!(lull(long, 100_000, SLOW), whole);
        assert_eq!(lull(long, 512_000, SLOW), whole / 2);
        assert_eq!(lull(long, 25 * MILLISECOND, SLOW), 0, "a far path would idle meanwhile");
        assert_eq!(lull(3 * MILLISECOND, 100_000, SLOW), 3 * MILLISECOND / 2);
        assert_eq!(lull(0, 100_000, SLOW), 0);
    }

    #[test]
    fn no_pause_of_a_slow_session_is_longer_than_others_can_wait() {
        assert_eq!(lull(1_000_000 * MILLISECOND, 100_000, SLOW / 100), 5 * MILLISECOND);
        assert_eq!(lull(Nanos::MAX, 100_000, 1), 5 * MILLISECOND);
    }
}
