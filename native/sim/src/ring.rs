//! A ring of sites in virtual time, each with a session to the next, that repeatedly run one
//! collective operation: a given sequence of sends and receives for each site.

use std::ops::Range;

use sealane_proto::link::Nanos;
use sealane_proto::session::PayloadMode;

use crate::scenario::{MESSAGES_MAX, Scenario, ScenarioError};
use crate::world::{Outcome, World, drive};

/// Most sites of a ring.
pub const SITES_MAX: usize = 64;
/// Most consecutive operations.
pub const REPEATS_MAX: u32 = 100_000;

/// Part of a site's array to send to the next site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingSend {
    /// Its range.
    pub range: Range<u64>,
    /// Number of messages that must have arrived, in order, before this one may be sent.
    pub after: u32,
}

/// Part of a site's array to receive from the previous site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingReceive {
    /// Its range.
    pub range: Range<u64>,
    /// Whether the bytes are combined with the existing ones instead of replacing them.
    pub is_combined: bool,
}

/// One site's part in an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// To the next site, in order.
    pub sends: Vec<RingSend>,
    /// From the previous site, in order.
    pub receives: Vec<RingReceive>,
}

/// A ring and its operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// Settings of every link and session; number and lengths of messages come from the operation.
    pub session: Scenario,
    /// The sites' parts.
    pub sites: Vec<Site>,
    /// Number of operations. All sites start one together, when everything before is acknowledged
    /// everywhere.
    pub repeats: u32,
}

/// Combines the bytes that have arrived (second) into those of a site (first), of equal length.
pub type Combine<'a> = &'a dyn Fn(&mut [u8], &[u8]);

/// Result of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingOutcome {
    /// By operation: nanoseconds until the last site had received everything. Shorter if a session
    /// broke a rule.
    pub completion_nanos: Vec<Nanos>,
    /// By site: its session to the next one.
    pub sessions: Vec<Outcome>,
}

/// Why a ring cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A session of the ring is not valid.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// Too few or too many sites.
    #[error("{0} sites: 2 to {SITES_MAX} are allowed")]
    Sites(usize),
    /// Too few or too many operations or messages.
    #[error(
        "{messages} messages, {repeats} times: 1 to {MESSAGES_MAX} in all, up to {REPEATS_MAX} times"
    )]
    Messages {
        /// Messages of a site in one operation.
        messages: usize,
        /// Operations.
        repeats: u32,
    },
    /// A site's sends do not match the next site's receives.
    #[error("the sends of site {0} do not match the receives of the next site")]
    Unequal(usize),
    /// With real payload each site needs an array that contains all its ranges.
    #[error("site {0} has no array that contains the ranges it sends and receives")]
    Array(usize),
}

/// Runs a ring to its end. With real payload, `arrays` are the sites' arrays and hold the results
/// of the operations afterwards; otherwise it is empty.
pub fn run_ring(
    ring: &Ring,
    arrays: &mut [Vec<u8>],
    combine: Combine<'_>,
) -> Result<RingOutcome, RingError> {
    ring.validate(arrays)?;
    let scenarios: Vec<Scenario> = (0..ring.sites.len()).map(|site| ring.scenario(site)).collect();
    let mut worlds = Vec::with_capacity(scenarios.len());
    for (scenario, site) in scenarios.iter().zip(&ring.sites) {
        scenario.validate()?;
        let mut world = World::new(scenario, None)?;
        world.hold(site.lengths().cycle().take(scenario.count as usize).collect());
        worlds.push(world);
    }
    let mut operations = Operations::new(ring, arrays, combine);
    drive(&mut worlds, |worlds, now| operations.go_on(worlds, now));
    let completion_nanos = operations.completion_nanos;
    Ok(RingOutcome { completion_nanos, sessions: worlds.into_iter().map(World::finish).collect() })
}

impl Ring {
    fn validate(&self, arrays: &[Vec<u8>]) -> Result<(), RingError> {
        let sites = self.sites.len();
        if !(2..=SITES_MAX).contains(&sites) {
            return Err(RingError::Sites(sites));
        }
        let is_real = self.session.payload == PayloadMode::Real;
        for (number, site) in self.sites.iter().enumerate() {
            let (messages, repeats) = (site.sends.len(), self.repeats);
            let all = messages as u64 * u64::from(repeats);
            if !(1..=u64::from(MESSAGES_MAX)).contains(&all) || repeats > REPEATS_MAX {
                return Err(RingError::Messages { messages, repeats });
            }
            let next = &self.sites[(number + 1) % sites];
            let received = next.receives.iter().map(|receive| length(&receive.range));
            let is_ascending = site.ranges().all(|range| range.start <= range.end);
            if !is_ascending || !site.lengths().eq(received) {
                return Err(RingError::Unequal(number));
            }
            let end = site.ranges().map(|range| range.end).max().unwrap_or(0);
            let has_array = arrays.get(number).is_some_and(|array| array.len() as u64 >= end);
            if is_real && !has_array {
                return Err(RingError::Array(number));
            }
        }
        Ok(())
    }

    /// The session from a site to the next.
    fn scenario(&self, number: usize) -> Scenario {
        let site = &self.sites[number];
        Scenario {
            // Losses of different links are independent.
            seed: self.session.seed.wrapping_mul(SITES_MAX as u64).wrapping_add(number as u64),
            count: site.sends.len() as u32 * self.repeats,
            message_bytes_min: 0,
            message_bytes_max: site.lengths().max().unwrap_or(0),
            streams: false,
            ..self.session.clone()
        }
    }
}

impl Site {
    fn lengths(&self) -> impl Iterator<Item = u64> + Clone {
        self.sends.iter().map(|send| length(&send.range))
    }

    fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        let received = self.receives.iter().map(|receive| &receive.range);
        self.sends.iter().map(|send| &send.range).chain(received)
    }
}

/// Progress of the operations.
struct Operations<'a> {
    ring: &'a Ring,
    arrays: &'a mut [Vec<u8>],
    combine: Combine<'a>,
    /// When the current operation started, if one is in progress.
    begun: Option<Nanos>,
    /// By site: number of its messages sent and received.
    progress: Vec<(usize, usize)>,
    completion_nanos: Vec<Nanos>,
}

impl<'a> Operations<'a> {
    fn new(ring: &'a Ring, arrays: &'a mut [Vec<u8>], combine: Combine<'a>) -> Self {
        let progress = vec![(0, 0); ring.sites.len()];
        Self { ring, arrays, combine, begun: None, progress, completion_nanos: Vec::new() }
    }

    /// Number, in its session, of a message of the current operation.
    fn message(&self, site: usize, index: usize) -> u64 {
        (self.completion_nanos.len() * self.ring.sites[site].sends.len() + index) as u64
    }

    fn go_on(&mut self, worlds: &mut [World<'_>], now: Nanos) {
        if self.begun.is_none() {
            if self.completion_nanos.len() == self.ring.repeats as usize || !self.may_begin(worlds)
            {
                return;
            }
            self.begun = Some(now);
            self.progress.fill((0, 0));
        }
        for site in 0..worlds.len() {
            self.receive(worlds, site);
            self.send(worlds, site, now);
        }
        let mut sites = self.ring.sites.iter().zip(&self.progress);
        let is_over = sites.all(|(site, (_, received))| *received == site.receives.len());
        if let Some(begun) = self.begun.take_if(|_| is_over) {
            self.completion_nanos.push(now - begun);
        }
    }

    /// Whether all sites are ready and have nothing outstanding from the previous operation.
    fn may_begin(&self, worlds: &[World<'_>]) -> bool {
        worlds.iter().enumerate().all(|(site, world)| {
            let newest = self.message(site, 0).checked_sub(1);
            world.is_ready() && newest.is_none_or(|message| world.has_sent_all(message))
        })
    }

    /// Processes what has arrived at a site, in order.
    fn receive(&mut self, worlds: &mut [World<'_>], site: usize) {
        let before = (site + worlds.len() - 1) % worlds.len();
        while let Some(receive) = self.ring.sites[site].receives.get(self.progress[site].1) {
            let message = self.message(before, self.progress[site].1);
            if !worlds[before].has_received(message) {
                return;
            }
            if let Some(bytes) = worlds[before].take_arrived(message) {
                let ours = &mut self.arrays[site][as_indices(&receive.range)];
                if receive.is_combined {
                    (self.combine)(ours, &bytes);
                } else {
                    ours.copy_from_slice(&bytes);
                }
            }
            self.progress[site].1 += 1;
        }
    }

    /// Lets a site send what it may send now.
    fn send(&mut self, worlds: &mut [World<'_>], site: usize, now: Nanos) {
        let is_real = self.ring.session.payload == PayloadMode::Real;
        let (sent, received) = &mut self.progress[site];
        while let Some(send) = self.ring.sites[site].sends.get(*sent) {
            if (send.after as usize) > *received {
                return;
            }
            let bytes = is_real.then(|| self.arrays[site][as_indices(&send.range)].to_vec());
            worlds[site].release(bytes, now);
            *sent += 1;
        }
    }
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

fn as_indices(range: &Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}
