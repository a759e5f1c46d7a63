//! One direction of an emulated link: its paths, and the lateness of sent packets.

use hdrhistogram::Histogram;
use sealane_proto::link::{Delivery, Fate, Link, LinkConfig, LinkCounters, Nanos};

use super::{BATCH, Outage};

/// Largest lateness recorded: a minute.
const SLIP_NANOS_MAX: Nanos = 60_000_000_000;

/// Results of one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectionReport {
    /// Counters of each path's link.
    pub paths: Vec<LinkCounters>,
    /// Packets sent on, including copies.
    pub sent_packets: u64,
    /// Packets that the kernel did not accept.
    pub unsent_packets: u64,
    /// Lateness of sent packets, which is this machine's error in the delay: (nanoseconds to within
    /// a hundredth, number of packets).
    pub slips: Vec<(Nanos, u64)>,
}

pub(super) struct Direction<P> {
    links: Vec<Link<P>>,
    sent_packets: u64,
    unsent_packets: u64,
    slips: Histogram<u64>,
}

impl<P: Clone> Direction<P> {
    /// `index` distinguishes the two directions of one seed.
    pub fn new(configs: &[LinkConfig], seed: u64, index: u64) -> Self {
        // The seeds of a direction's paths differ by two, so that those of both directions
        // interleave.
        let seeds = (0..).map(|path: u64| seed.wrapping_add(2 * path + index));
        Self {
            links: configs
                .iter()
                .zip(seeds)
                .map(|(config, seed)| Link::new(*config, seed))
                .collect(),
            sent_packets: 0,
            unsent_packets: 0,
            slips: Histogram::new_with_max(SLIP_NANOS_MAX, 2).expect("the constants are valid"),
        }
    }

    pub fn set_outages(&mut self, outages: &[Outage], start: Nanos) {
        for (path, link) in self.links.iter_mut().enumerate() {
            let of_path = outages.iter().filter(|outage| outage.path == path);
            let absolute: Vec<_> = of_path
                .map(|outage| {
                    let at = |nanos| start.saturating_add(nanos);
                    (at(outage.start_nanos), at(outage.end_nanos))
                })
                .collect();
            link.set_outages(&absolute);
        }
    }

    /// Offers a packet to the path that `flow_hash` chooses.
    pub fn offer(
        &mut self,
        packet: P,
        flow_hash: u64,
        wire_bytes: u32,
        is_ecn_capable: bool,
        now: Nanos,
    ) -> Fate {
        let path = (flow_hash % self.links.len() as u64) as usize;
        self.links[path].offer(packet, wire_bytes, is_ecn_capable, now)
    }

    /// Takes due packets, at most one batch.
    pub fn take_due(&mut self, now: Nanos, batch: &mut Vec<Delivery<P>>) {
        for link in &mut self.links {
            while batch.len() < BATCH
                && let Some(delivery) = link.take(now)
            {
                batch.push(delivery);
            }
        }
    }

    /// Counts a batch that was sent.
    pub fn sent(&mut self, scheduled: &[Nanos], unsent: u64, now: Nanos) {
        self.sent_packets += scheduled.len() as u64 - unsent;
        self.unsent_packets += unsent;
        for at in scheduled {
            self.slips.saturating_record(now.saturating_sub(*at));
        }
    }

    pub fn next_at(&self) -> Option<Nanos> {
        self.links.iter().filter_map(Link::next_at).min()
    }

    pub fn report(&self) -> DirectionReport {
        let recorded = self.slips.iter_recorded();
        DirectionReport {
            paths: self.links.iter().map(Link::counters).collect(),
            sent_packets: self.sent_packets,
            unsent_packets: self.unsent_packets,
            slips: recorded.map(|step| (step.value_iterated_to(), step.count_at_value())).collect(),
        }
    }
}
