//! How long a receiver sleeps on although packets arrive, like an adapter's interrupt moderation.
//!
//! A wake-up costs as much as 40 packets. Packets of a long path arrive one by one, at its rate, so
//! each would wake the receiver. Nothing is lost if several wait for each other, except where a
//! message could be complete.

use crate::link::{NANOS_PER_SECOND, Nanos};

use super::Session;

/// An end that received this many bytes at once receives in bulk, on paths of any length, …
const BULK_BYTES: u64 = 32 << 10;
/// … and sleeps on for this time, well below the shortest delay of an acknowledgement, if as much
/// may arrive meanwhile: a slower session's trains are further apart.
const BULK_NANOS: Nanos = 50_000;
/// On a long path it sleeps on for this part of a round trip, by which what it reports is late, …
const ROUND_TRIP_PART: Nanos = 64;
/// … but no longer than this, …
const FAR_NANOS_MAX: Nanos = 500_000;
/// … nor for more than this many bytes at the session's rate, half of what the smallest socket
/// buffer holds (Linux's default `rmem_max`), …
const FAR_BYTES_MAX: u64 = 64 << 10;
/// … and only while the message lacks this many units, …
const UNITS_MISSING: u64 = 8;
/// … and this many times what the last look brought.
const LOOKS_MISSING: u64 = 4;

impl Session {
    /// How long this end need not look at what arrives, after a look that brought this many bytes;
    /// `None`: it must look at each packet.
    #[must_use]
    pub fn moderation(&self, received_bytes: u64) -> Option<Nanos> {
        let unit_bytes = u64::from(self.config.unit_bytes);
        let missing_units = self.receiver.units_missing();
        let rate = self.config.rate_bytes_per_second;
        let shortest = self.paths.iter().filter_map(|(_, path)| path.rtt.smoothed()).min();
        moderation((received_bytes, unit_bytes), missing_units, shortest, rate)
    }
}

fn moderation(
    (received_bytes, unit_bytes): (u64, u64),
    missing_units: u64,
    srtt: Option<Nanos>,
    rate_bytes_per_second: u64,
) -> Option<Nanos> {
    let filled = FAR_BYTES_MAX * NANOS_PER_SECOND / rate_bytes_per_second;
    let far = (srtt.unwrap_or(0) / ROUND_TRIP_PART).min(FAR_NANOS_MAX).min(filled);
    let is_amid = missing_units >= UNITS_MISSING.max(LOOKS_MISSING * received_bytes / unit_bytes);
    if received_bytes > 0 && is_amid && far > BULK_NANOS {
        return Some(far);
    }
    let is_bulk = received_bytes >= BULK_BYTES
        && rate_bytes_per_second >= BULK_BYTES * NANOS_PER_SECOND / BULK_NANOS;
    is_bulk.then_some(BULK_NANOS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 1408;
    const FAR: Option<Nanos> = Some(25_000_000);
    const NEAR: Option<Nanos> = Some(200_000);
    const GBIT: u64 = 125_000_000;

    #[test]
    fn packets_of_a_long_path_wait_for_each_other_while_much_of_the_message_is_missing() {
        assert_eq!(moderation((UNIT, UNIT), 40, FAR, GBIT), Some(390_625));
        assert_eq!(moderation((UNIT, UNIT), 40, Some(200_000_000), GBIT), Some(FAR_NANOS_MAX));
        assert_eq!(moderation((UNIT, UNIT), 7, FAR, GBIT), None, "it may be complete soon");
        assert_eq!(moderation((16 * UNIT, UNIT), 40, FAR, GBIT), None, "a look like the last");
        assert_eq!(moderation((0, UNIT), 40, FAR, GBIT), None, "nothing arrives");
        assert_eq!(moderation((UNIT, UNIT), 40, None, GBIT), None);
    }

    #[test]
    fn packets_of_a_short_path_wait_in_bulk_only() {
        assert_eq!(moderation((UNIT, UNIT), 40, NEAR, GBIT), None);
        assert_eq!(moderation((24 * UNIT, UNIT), 0, NEAR, 10 * GBIT), Some(BULK_NANOS));
    }

    #[test]
    fn a_train_of_a_slow_session_is_not_followed_by_another_at_once() {
        assert_eq!(moderation((44 * UNIT, UNIT), 1000, NEAR, GBIT), None);
    }

    #[test]
    fn what_arrives_meanwhile_fits_into_the_smallest_buffer() {
        let rate = 8 * GBIT;
        let far = moderation((UNIT, UNIT), 1000, FAR, rate);
        assert_eq!(far, Some(FAR_BYTES_MAX * NANOS_PER_SECOND / rate));
        assert_eq!(moderation((40 * UNIT, UNIT), 1000, FAR, 20 * rate), Some(BULK_NANOS));
    }
}
