//! One direction of a long-haul link: a finite buffer, then a wire with a fixed rate that also
//! delays, jitters, loses, reorders, duplicates, corrupts and blacks out packets.
//!
//! The emulator drives it with real packets and clocks, the simulator in virtual time. All
//! arithmetic is on integers: the same seed and the same offers give the same fates on every
//! machine.

use std::collections::VecDeque;

use crate::counters;

mod chance;
mod marking;
#[cfg(test)]
mod tests;
mod transit;

pub use chance::{GilbertElliott, Loss, PARTS, TimedBursts};
pub use marking::{Phantom, Thresholds};

use chance::{Dice, LossProcess};
use marking::Marking;
use transit::Transit;

/// Monotonic time in nanoseconds since an origin that the caller chooses once.
pub type Nanos = u64;

/// Nanoseconds in a second.
pub const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Most packets that a link holds, waiting and in transit, which bounds its memory. 2^20 packets of
/// 4 KiB are 20 ms at 1.6 Tbit/s.
pub const HELD_PACKETS_MAX: usize = 1 << 20;

/// Properties of a link. Probabilities are in parts of [`PARTS`], per packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkConfig {
    /// Bits per second that leave the sending end. A rate of 0 counts as 1.
    pub rate_bits_per_second: u64,
    /// One-way propagation delay in nanoseconds.
    pub delay_nanos: Nanos,
    /// Bytes that may wait for serialisation, including the packet being serialised.
    pub buffer_bytes: u64,
    /// Loss on the wire.
    pub loss: Loss,
    /// Extra delay of each packet, uniform from 0 to this. It preserves the order.
    pub jitter_nanos: Nanos,
    /// Probability that a packet arrives later than its turn …
    pub reorder_parts_per_billion: u32,
    /// … by up to this time.
    pub reorder_nanos_max: Nanos,
    /// Probability that a packet arrives twice, the copy up to one delay (or `reorder_nanos_max`)
    /// later.
    pub duplicate_parts_per_billion: u32,
    /// Probability that one bit of a packet is flipped.
    pub corrupt_parts_per_billion: u32,
    /// Random early detection on the real buffer's length.
    pub red: Option<Thresholds>,
    /// A phantom queue, which only marks packets.
    pub phantom: Option<Phantom>,
}

/// The configuration of a link is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// A probability is above one.
    #[error("{0} parts per billion are more than {PARTS}")]
    Probability(u32),
    /// The upper threshold of marking is below the lower one.
    #[error("marking from {low_bytes} to {high_bytes} bytes: the first must not exceed the second")]
    Thresholds {
        /// Bytes at which marking begins.
        low_bytes: u64,
        /// Bytes at which marking is certain.
        high_bytes: u64,
    },
}

impl LinkConfig {
    /// A link that only delays packets and limits their rate.
    #[must_use]
    pub const fn clean(rate_bits_per_second: u64, delay_nanos: Nanos, buffer_bytes: u64) -> Self {
        Self {
            rate_bits_per_second,
            delay_nanos,
            buffer_bytes,
            loss: Loss::Independent(0),
            jitter_nanos: 0,
            reorder_parts_per_billion: 0,
            reorder_nanos_max: 0,
            duplicate_parts_per_billion: 0,
            corrupt_parts_per_billion: 0,
            red: None,
            phantom: None,
        }
    }

    /// Rejects probabilities above one and thresholds in the wrong order.
    pub fn validate(&self) -> Result<(), LinkError> {
        let [first, second, third, fourth] = self.loss.parts();
        let thresholds = self.red.into_iter().chain(self.phantom.map(|phantom| phantom.thresholds));
        let ceilings = thresholds.clone().map(|thresholds| thresholds.probability_max_parts);
        let drain = self.phantom.map(|phantom| phantom.drain_parts_per_billion);
        let parts = [
            first,
            second,
            third,
            fourth,
            self.reorder_parts_per_billion,
            self.duplicate_parts_per_billion,
            self.corrupt_parts_per_billion,
        ];
        for parts in parts.into_iter().chain(ceilings).chain(drain) {
            if parts > PARTS {
                return Err(LinkError::Probability(parts));
            }
        }
        for Thresholds { low_bytes, high_bytes, .. } in thresholds {
            if low_bytes > high_bytes {
                return Err(LinkError::Thresholds { low_bytes, high_bytes });
            }
        }
        Ok(())
    }
}

/// The outcome of offering a packet. An accepted one may still be lost on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The packet waits for its turn.
    Accepted,
    /// The buffer was full.
    Overflowed,
    /// The link was down.
    Down,
    /// Early detection dropped the packet because it is not ECN-capable.
    DroppedEarly,
    /// The link already holds [`HELD_PACKETS_MAX`], which is a limit of the model, not of the link.
    Crowded,
}

/// A packet that arrives at the far end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery<T> {
    /// Arrival of its last bit.
    pub at: Nanos,
    /// Its number among the packets that reached the wire; a copy has its original's number.
    pub number: u64,
    /// The packet.
    pub packet: T,
    /// Congestion experienced (RFC 3168): the caller sets CE.
    pub is_marked: bool,
    /// The packet arrives twice, and this is one of the two.
    pub is_duplicated: bool,
    /// A random number that selects the bit to flip, if the packet was corrupted.
    pub corruption: Option<u64>,
}

counters! {
    /// What a link has done so far.
    pub struct LinkCounters {
        /// Packets offered.
        pub offered_packets: u64,
        /// Bytes offered.
        pub offered_bytes: u64,
        /// Packets that have been or will be delivered, not counting copies.
        pub delivered_packets: u64,
        /// Bytes of these packets.
        pub delivered_bytes: u64,
        /// Packets lost on the wire.
        pub lost_packets: u64,
        /// Packets dropped because the buffer was full.
        pub overflowed_packets: u64,
        /// Packets offered while the link was down.
        pub down_packets: u64,
        /// Packets that early detection dropped because they are not ECN-capable.
        pub dropped_early_packets: u64,
        /// Packets marked "congestion experienced".
        pub marked_packets: u64,
        /// Packets delivered later than their turn, not counting detours.
        pub reordered_packets: u64,
        /// Packets delivered twice.
        pub duplicated_packets: u64,
        /// Packets with a bit flipped.
        pub corrupted_packets: u64,
        /// Packets dropped because the model's memory was full.
        pub crowded_packets: u64,
        /// Most bytes waiting at the same time.
        pub queued_bytes_max: u64,
    }
}

/// A packet that waits for the wire.
#[derive(Debug)]
struct Waiting<T> {
    ends_at: Nanos,
    wire_bytes: u32,
    is_ecn_capable: bool,
    packet: T,
}

/// One direction of a link that carries packets of type `T`.
#[derive(Debug)]
pub struct Link<T> {
    config: LinkConfig,
    /// When the wire is next free, in whole nanoseconds …
    free_at: Nanos,
    /// … and the fraction, in 1/rate nanoseconds, so that rounding never changes the rate.
    free_fraction: u64,
    /// Latest time of any offer.
    offered_at: Nanos,
    /// Start and end of each outage, in order.
    outages: VecDeque<(Nanos, Nanos)>,
    /// Start and end of each detour, in order, and how much longer it is.
    detours: VecDeque<(Nanos, Nanos, Nanos)>,
    /// Start and end of each time with a smaller MTU, in order, and the most bytes of a packet then.
    narrows: VecDeque<(Nanos, Nanos, u32)>,
    /// Rates in bits per second to come, in order, each with its first instant.
    rates: VecDeque<(Nanos, u64)>,
    waiting: VecDeque<Waiting<T>>,
    transit: Transit<T>,
    /// Packets that reached the wire.
    numbers: u64,
    loss: LossProcess,
    marking: Marking,
    // Each kind of fate has its own dice, so that changing one does not change the others.
    jitter: Dice,
    reorder: Dice,
    duplicate: Dice,
    corrupt: Dice,
    counters: LinkCounters,
}

impl<T: Clone> Link<T> {
    /// Creates an idle link. Each direction needs its own seed.
    #[must_use]
    pub fn new(config: LinkConfig, seed: u64) -> Self {
        let rate_bits_per_second = config.rate_bits_per_second.max(1);
        let config = LinkConfig { rate_bits_per_second, ..config };
        Self {
            config,
            free_at: 0,
            free_fraction: 0,
            offered_at: 0,
            outages: VecDeque::new(),
            detours: VecDeque::new(),
            narrows: VecDeque::new(),
            rates: VecDeque::new(),
            waiting: VecDeque::new(),
            transit: Transit::default(),
            numbers: 0,
            loss: LossProcess::new(config.loss, Dice::new(seed, 0)),
            marking: Marking::new(&config, Dice::new(seed, 1)),
            jitter: Dice::new(seed, 2),
            reorder: Dice::new(seed, 3),
            duplicate: Dice::new(seed, 4),
            corrupt: Dice::new(seed, 5),
            counters: LinkCounters::default(),
        }
    }

    /// Sets the start and end of each outage. Packets offered during an outage vanish; packets
    /// already waiting or in transit are not affected.
    pub fn set_outages(&mut self, outages: &[(Nanos, Nanos)]) {
        let mut sorted = outages.to_vec();
        sorted.sort_unstable();
        self.outages = sorted.into();
    }

    /// Sets start and end of each detour, which don't overlap, and how much later packets arrive that
    /// leave the buffer in that time. As on a network whose routes change, packets that leave after
    /// a detour overtake those still on it.
    pub fn set_detours(&mut self, detours: &[(Nanos, Nanos, Nanos)]) {
        let mut sorted = detours.to_vec();
        sorted.sort_unstable();
        self.detours = sorted.into();
    }

    /// Sets start and end of each time in which packets of more than so many bytes vanish without a
    /// word, as on a route with a smaller MTU. They count like packets during an outage.
    pub fn set_narrows(&mut self, narrows: &[(Nanos, Nanos, u32)]) {
        let mut sorted = narrows.to_vec();
        sorted.sort_unstable();
        self.narrows = sorted.into();
    }

    /// Sets the rates in bits per second that the link has from these times on. What waits then
    /// leaves at the new rate, and a phantom queue drains in proportion to it.
    pub fn set_rates(&mut self, rates: &[(Nanos, u64)]) {
        let mut sorted = rates.to_vec();
        sorted.sort_unstable();
        self.rates = sorted.into();
    }

    /// Puts a packet of `wire_bytes` (including the IP header) on the link at `now`. A time before
    /// that of an earlier offer counts as the earlier offer's time.
    pub fn offer(&mut self, packet: T, wire_bytes: u32, is_ecn_capable: bool, now: Nanos) -> Fate {
        let now = now.max(self.offered_at);
        self.offered_at = now;
        self.settle(now);
        self.counters.offered_packets += 1;
        self.counters.offered_bytes += u64::from(wire_bytes);
        if self.is_down(now) || self.is_too_long(wire_bytes, now) {
            self.counters.down_packets += 1;
            return Fate::Down;
        }
        if self.held_packets() >= HELD_PACKETS_MAX {
            self.counters.crowded_packets += 1;
            return Fate::Crowded;
        }
        // A phantom queue also counts packets that the buffer then refuses.
        self.marking.arrive(wire_bytes, now);
        let queued_bytes = self.queued_bytes(now);
        let queued_then = queued_bytes + u64::from(wire_bytes);
        if queued_then > self.config.buffer_bytes {
            self.counters.overflowed_packets += 1;
            return Fate::Overflowed;
        }
        if !is_ecn_capable && self.marking.drops_early(queued_bytes) {
            self.counters.dropped_early_packets += 1;
            return Fate::DroppedEarly;
        }
        self.counters.queued_bytes_max = self.counters.queued_bytes_max.max(queued_then);
        let ends_at = self.serialise(wire_bytes, now);
        self.waiting.push_back(Waiting { ends_at, wire_bytes, is_ecn_capable, packet });
        Fate::Accepted
    }

    /// Takes time on the wire for bytes that are sent outside of this queue, before what is offered
    /// from now on.
    pub fn occupy(&mut self, wire_bytes: u32, now: Nanos) {
        let now = now.max(self.offered_at);
        if self.rates.front().is_some_and(|(at, _)| *at <= now) {
            self.settle(now);
        }
        self.serialise(wire_bytes, now);
    }

    /// Earliest time of the next delivery, or of a change of the rate. A delivery may come later if a
    /// packet is lost.
    #[must_use]
    pub fn next_at(&self) -> Option<Nanos> {
        let waiting = self.waiting.front();
        let waiting = waiting.map(|front| front.ends_at.saturating_add(self.config.delay_nanos));
        let change = self.rates.front().map(|(at, _)| *at);
        waiting.into_iter().chain(self.transit.next_at()).chain(change).min()
    }

    /// Takes the next packet that has arrived, if any.
    pub fn take(&mut self, now: Nanos) -> Option<Delivery<T>> {
        self.settle(now);
        self.transit.take(now)
    }

    /// Bytes waiting for serialisation at `now`, rounded down.
    #[must_use]
    pub fn queued_bytes(&self, now: Nanos) -> u64 {
        let waiting = u128::from(self.free_at.saturating_sub(now));
        let rate = u128::from(self.config.rate_bits_per_second);
        u64::try_from(waiting * rate / (8 * u128::from(NANOS_PER_SECOND))).unwrap_or(u64::MAX)
    }

    /// Number of packets waiting or in transit.
    #[must_use]
    pub fn held_packets(&self) -> usize {
        self.waiting.len() + self.transit.len()
    }

    /// What the link has done so far.
    #[must_use]
    pub fn counters(&self) -> LinkCounters {
        self.counters
    }

    fn is_down(&mut self, now: Nanos) -> bool {
        while self.outages.front().is_some_and(|(_, end)| *end <= now) {
            self.outages.pop_front();
        }
        self.outages.front().is_some_and(|(start, _)| *start <= now)
    }

    /// Whether a packet is longer than what the link carries at present.
    fn is_too_long(&mut self, wire_bytes: u32, now: Nanos) -> bool {
        while self.narrows.front().is_some_and(|(_, end, _)| *end <= now) {
            self.narrows.pop_front();
        }
        let present = self.narrows.front().filter(|(start, ..)| *start <= now);
        present.is_some_and(|(.., most)| wire_bytes > *most)
    }

    /// How much longer the way is for a packet that leaves the buffer now.
    fn detour(&mut self, now: Nanos) -> Nanos {
        while self.detours.front().is_some_and(|(_, end, _)| *end <= now) {
            self.detours.pop_front();
        }
        let present = self.detours.front().filter(|(start, ..)| *start <= now);
        present.map_or(0, |(.., more)| *more)
    }

    /// Occupies the wire for a packet and returns the time when its last bit leaves.
    fn serialise(&mut self, wire_bytes: u32, now: Nanos) -> Nanos {
        if self.free_at < now {
            self.free_at = now;
            self.free_fraction = 0;
        }
        let rate = u128::from(self.config.rate_bits_per_second);
        let parts = u128::from(wire_bytes) * 8 * u128::from(NANOS_PER_SECOND)
            + u128::from(self.free_fraction);
        self.free_at = self.free_at.saturating_add((parts / rate) as u64);
        self.free_fraction = (parts % rate) as u64;
        self.free_at
    }

    /// Moves everything serialised by `now` from the buffer to the wire. Marks are decided here, as
    /// in a switch that marks at dequeue, and so is the packet's fate on the wire.
    fn settle(&mut self, now: Nanos) {
        while let Some((at, rate)) = self.rates.front().copied().filter(|(at, _)| *at <= now) {
            self.rates.pop_front();
            self.settle_at_rate(at);
            self.change_rate(rate.max(1), at);
        }
        self.settle_at_rate(now);
    }

    /// From now on everything leaves at this rate.
    fn change_rate(&mut self, rate: u64, now: Nanos) {
        let before = std::mem::replace(&mut self.config.rate_bits_per_second, rate);
        let moved = |ends_at: Nanos| {
            let left = u128::from(ends_at.saturating_sub(now)) * u128::from(before);
            let left = u64::try_from(left / u128::from(rate)).unwrap_or(u64::MAX);
            now.saturating_add(left)
        };
        for waiting in &mut self.waiting {
            waiting.ends_at = moved(waiting.ends_at);
        }
        (self.free_at, self.free_fraction) = (moved(self.free_at), 0);
        self.marking.change_rate(rate, now);
    }

    fn settle_at_rate(&mut self, now: Nanos) {
        while self.waiting.front().is_some_and(|front| front.ends_at <= now) {
            if let Some(packet) = self.waiting.pop_front() {
                self.leave(packet);
            }
        }
    }

    fn leave(&mut self, waiting: Waiting<T>) {
        let Waiting { ends_at, wire_bytes, is_ecn_capable, packet } = waiting;
        let queued_bytes = self.queued_bytes(ends_at);
        let is_marked = is_ecn_capable && self.marking.marks(queued_bytes, ends_at);
        let is_lost = self.loss.loses(ends_at);
        let jitter = self.jitter.up_to(self.config.jitter_nanos);
        let is_reordered = self.reorder.happens(self.config.reorder_parts_per_billion);
        let is_duplicated = self.duplicate.happens(self.config.duplicate_parts_per_billion);
        let is_corrupted = self.corrupt.happens(self.config.corrupt_parts_per_billion);
        let later =
            if is_reordered { self.reorder.up_to(self.config.reorder_nanos_max) } else { 0 };
        let copy_spread = self.config.reorder_nanos_max.max(self.config.delay_nanos);
        let copy_later = if is_duplicated { self.duplicate.up_to(copy_spread) } else { 0 };
        let corruption = is_corrupted.then(|| self.corrupt.draw());
        let number = self.numbers;
        self.numbers += 1;
        if is_lost {
            self.counters.lost_packets += 1;
            return;
        }
        self.counters.delivered_packets += 1;
        self.counters.delivered_bytes += u64::from(wire_bytes);
        self.counters.marked_packets += u64::from(is_marked);
        self.counters.reordered_packets += u64::from(is_reordered);
        self.counters.duplicated_packets += u64::from(is_duplicated);
        self.counters.corrupted_packets += u64::from(is_corrupted);
        let detour = self.detour(ends_at);
        let turn = ends_at.saturating_add(self.config.delay_nanos).saturating_add(jitter);
        // In order among the packets on the same way.
        let turn = self.transit.turn(turn).saturating_add(detour);
        let delivery = Delivery { at: turn, number, packet, is_marked, is_duplicated, corruption };
        if is_duplicated {
            let at = turn.saturating_add(copy_later);
            self.transit.put_late(Delivery { at, corruption: None, ..delivery.clone() });
        }
        if is_reordered || detour > 0 {
            self.transit.put_late(Delivery { at: turn.saturating_add(later), ..delivery });
        } else {
            self.transit.put(delivery);
        }
    }
}
