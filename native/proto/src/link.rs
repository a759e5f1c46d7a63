//! A long-haul link in one direction: serialisation at a rate, a finite buffer, a delay, seeded loss.
//!
//! The link only answers *when* a packet comes out, or that it never does; whoever owns the packets
//! (the simulator's event queue, the emulator's delay line) keeps them until then. All integers:
//! the same seed and the same offers give the same fates on every machine.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

/// Monotonic time, in nanoseconds since an origin that the caller chooses once.
pub type Nanos = u64;

/// Nanoseconds in a second.
pub const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Parts of the loss probability: `loss_parts_per_billion` out of this many packets are lost.
pub const LOSS_PARTS: u32 = 1_000_000_000;

/// What a link is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkConfig {
    /// Bits that leave the sending end per second. A rate of 0 is taken as 1.
    pub rate_bits_per_second: u64,
    /// Propagation, one way, in nanoseconds.
    pub delay_nanos: u64,
    /// Bytes that may wait for serialisation, the packet being serialised included.
    pub buffer_bytes: u64,
    /// Independent loss of each packet, in parts of [`LOSS_PARTS`].
    pub loss_parts_per_billion: u32,
    /// Seed of the loss process. Give each direction its own.
    pub seed: u64,
}

/// What becomes of one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It comes out of the far end.
    Delivered {
        /// When its last bit arrives.
        at: Nanos,
    },
    /// It used the wire and was lost on it.
    Lost,
    /// The buffer was full, so it never used the wire.
    Overflowed,
}

/// What a link has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Packets offered.
    pub offered_packets: u64,
    /// Bytes offered.
    pub offered_bytes: u64,
    /// Packets that came, or will come, out.
    pub delivered_packets: u64,
    /// Bytes of those.
    pub delivered_bytes: u64,
    /// Packets lost on the wire.
    pub lost_packets: u64,
    /// Packets refused for want of buffer.
    pub overflowed_packets: u64,
}

/// One direction of a link. First in, first out.
#[derive(Debug)]
pub struct Link {
    config: LinkConfig,
    random: ChaCha8Rng,
    /// When the wire is free again, in whole nanoseconds …
    free_at: Nanos,
    /// … and the fraction, in 1/rate nanoseconds, so that rounding never changes the rate.
    free_fraction: u64,
    counters: LinkCounters,
}

impl Link {
    /// A link that is idle.
    #[must_use]
    pub fn new(config: LinkConfig) -> Self {
        let rate_bits_per_second = config.rate_bits_per_second.max(1);
        Self {
            config: LinkConfig { rate_bits_per_second, ..config },
            random: ChaCha8Rng::seed_from_u64(config.seed),
            free_at: 0,
            free_fraction: 0,
            counters: LinkCounters::default(),
        }
    }

    /// Puts a packet of `wire_bytes` (IP and UDP headers included) on the link at `now`.
    /// `now` must not run backwards.
    pub fn offer(&mut self, wire_bytes: u32, now: Nanos) -> Fate {
        self.counters.offered_packets += 1;
        self.counters.offered_bytes += u64::from(wire_bytes);
        if self.free_at < now {
            self.free_at = now;
            self.free_fraction = 0;
        }
        if self.queued_bytes(now) + u64::from(wire_bytes) > self.config.buffer_bytes {
            self.counters.overflowed_packets += 1;
            return Fate::Overflowed;
        }
        let rate = u128::from(self.config.rate_bits_per_second);
        let parts = u128::from(wire_bytes) * 8 * u128::from(NANOS_PER_SECOND)
            + u128::from(self.free_fraction);
        self.free_at = self.free_at.saturating_add((parts / rate) as u64);
        self.free_fraction = (parts % rate) as u64;
        if self.is_lost() {
            self.counters.lost_packets += 1;
            return Fate::Lost;
        }
        self.counters.delivered_packets += 1;
        self.counters.delivered_bytes += u64::from(wire_bytes);
        Fate::Delivered { at: self.free_at.saturating_add(self.config.delay_nanos) }
    }

    /// Bytes that wait for serialisation at `now`, rounded down.
    #[must_use]
    pub fn queued_bytes(&self, now: Nanos) -> u64 {
        let waiting = u128::from(self.free_at.saturating_sub(now));
        let rate = u128::from(self.config.rate_bits_per_second);
        u64::try_from(waiting * rate / (8 * u128::from(NANOS_PER_SECOND))).unwrap_or(u64::MAX)
    }

    /// Changes the loss from the next packet on (a blackout is a loss of all [`LOSS_PARTS`]).
    pub fn set_loss(&mut self, loss_parts_per_billion: u32) {
        self.config.loss_parts_per_billion = loss_parts_per_billion;
    }

    /// What the link is like.
    #[must_use]
    pub fn config(&self) -> LinkConfig {
        self.config
    }

    /// What the link has done so far.
    #[must_use]
    pub fn counters(&self) -> LinkCounters {
        self.counters
    }

    /// Draws once per packet on the wire, so that a change of one fate does not move the others.
    fn is_lost(&mut self) -> bool {
        let draw = u128::from(self.random.next_u64()) * u128::from(LOSS_PARTS);
        (draw >> 64) < u128::from(self.config.loss_parts_per_billion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: LinkConfig = LinkConfig {
        rate_bits_per_second: 200_000_000,
        delay_nanos: 12_500_000,
        buffer_bytes: 1 << 20,
        loss_parts_per_billion: 0,
        seed: 1,
    };

    #[test]
    fn a_packet_takes_its_serialisation_and_the_delay() {
        let mut link = Link::new(CONFIG);
        assert_eq!(link.offer(1500, 1000), Fate::Delivered { at: 1000 + 60_000 + 12_500_000 });
        assert_eq!(link.offer(1500, 1000), Fate::Delivered { at: 1000 + 120_000 + 12_500_000 });
        assert_eq!(link.offer(1500, 9_000_000), Fate::Delivered { at: 9_060_000 + 12_500_000 });
    }

    #[test]
    fn rounding_never_changes_the_rate() {
        // 8 bits at 3 Gbit/s take 2⅔ ns.
        let mut link = Link::new(LinkConfig { rate_bits_per_second: 3_000_000_000, ..CONFIG });
        let ends: Vec<_> = (0..6).map(|_| link.offer(1, 0)).collect();
        let at = |nanos: u64| Fate::Delivered { at: nanos + 12_500_000 };
        assert_eq!(ends, [at(2), at(5), at(8), at(10), at(13), at(16)]);
    }

    #[test]
    fn a_full_buffer_refuses_and_drains() {
        let mut link = Link::new(LinkConfig { buffer_bytes: 3000, ..CONFIG });
        assert!(matches!(link.offer(1500, 0), Fate::Delivered { .. }));
        assert!(matches!(link.offer(1500, 0), Fate::Delivered { .. }));
        assert_eq!(link.offer(1500, 0), Fate::Overflowed);
        assert!(matches!(link.offer(1500, 60_000), Fate::Delivered { .. }));
        assert_eq!(link.counters().overflowed_packets, 1);
        assert_eq!(link.counters().delivered_bytes, 4500);
    }

    #[test]
    fn loss_is_seeded_and_close_to_its_probability() {
        let run = |seed| {
            let config = LinkConfig { loss_parts_per_billion: 10_000_000, seed, ..CONFIG };
            let mut link = Link::new(config);
            let lost: Vec<u64> = (0..100_000_u64)
                .filter(|i| link.offer(100, i * NANOS_PER_SECOND) == Fate::Lost)
                .collect();
            assert_eq!(link.counters().lost_packets, lost.len() as u64);
            lost
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        assert!((850..1150).contains(&run(1).len()), "{}", run(1).len());
    }

    #[test]
    fn certain_loss_loses_all_and_none_loses_none() {
        let mut link = Link::new(CONFIG);
        link.set_loss(LOSS_PARTS);
        assert!((0..1000).all(|i| link.offer(100, i * NANOS_PER_SECOND) == Fate::Lost));
        link.set_loss(0);
        assert!((1000..2000).all(|i| link.offer(100, i * NANOS_PER_SECOND) != Fate::Lost));
    }
}
