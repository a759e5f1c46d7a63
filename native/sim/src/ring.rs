//! A ring of sites in virtual time, each with a session to the next, that run one collective
//! operation again and again: what each sends and receives, in order, is given.

use std::ops::Range;

use sealane_proto::link::Nanos;
use sealane_proto::session::PayloadMode;

use crate::scenario::{MESSAGES_MAX, Scenario, ScenarioError};
use crate::world::{Outcome, World, drive};

/// Sites of a ring, most.
pub const SITES_MAX: usize = 64;
/// Operations one after the other, most.
pub const REPEATS_MAX: u32 = 100_000;

/// Bytes of a site's array that go to the next site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingSend {
    /// Where they are.
    pub range: Range<u64>,
    /// So many messages have to have arrived, in order, before this one may go.
    pub after: u32,
}

/// Bytes of a site's array that the site before fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingReceive {
    /// Where they are.
    pub range: Range<u64>,
    /// Whether they are combined with what is there, or take its place.
    pub is_combined: bool,
}

/// What one site does in an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// To the next site, in this order.
    pub sends: Vec<RingSend>,
    /// From the site before, in this order.
    pub receives: Vec<RingReceive>,
}

/// A ring and its operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// Every link and session of it. Number and lengths of messages are those of the operation.
    pub session: Scenario,
    /// What the sites do.
    pub sites: Vec<Site>,
    /// How often. Each time all begin at once, when what was before is acknowledged everywhere.
    pub repeats: u32,
}

/// Combines bytes that have arrived (second) with those of a site (first), of equal length.
pub type Combine<'a> = &'a dyn Fn(&mut [u8], &[u8]);

/// What a ring showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingOutcome {
    /// By operation: nanoseconds until the last site had all it was to receive. Fewer than asked
    /// for if a session broke a rule.
    pub completion_nanos: Vec<Nanos>,
    /// By site: the session to the next one.
    pub sessions: Vec<Outcome>,
}

/// A ring that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A session of it cannot be.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// Too few or too many sites.
    #[error("{0} sites: 2 to {SITES_MAX} are needed")]
    Sites(usize),
    /// Too few or too many operations or messages.
    #[error(
        "{messages} messages, {repeats} times: 1 to {MESSAGES_MAX} in all, {REPEATS_MAX} times"
    )]
    Messages {
        /// Of a site and operation.
        messages: usize,
        /// Operations.
        repeats: u32,
    },
    /// What one site sends the next does not receive.
    #[error("what site {0} sends is not what the next one receives")]
    Unequal(usize),
    /// With real payload each site has an array, all equally long, in which all ranges lie.
    #[error("site {0} has no array for what it sends and receives")]
    Array(usize),
}

/// Runs a ring to its end. With real payload `arrays` are those of the sites, and hold what the
/// operations made of them afterwards; without, there are none.
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
            let is_rising = site.ranges().all(|range| range.start <= range.end);
            if !is_rising || !site.lengths().eq(received) {
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
            // Losses of one link say nothing of another's.
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

/// The operations as they go on.
struct Operations<'a> {
    ring: &'a Ring,
    arrays: &'a mut [Vec<u8>],
    combine: Combine<'a>,
    /// When the newest operation began, if one is under way.
    begun: Option<Nanos>,
    /// By site: messages of it that have been sent, and received.
    progress: Vec<(usize, usize)>,
    completion_nanos: Vec<Nanos>,
}

impl<'a> Operations<'a> {
    fn new(ring: &'a Ring, arrays: &'a mut [Vec<u8>], combine: Combine<'a>) -> Self {
        let progress = vec![(0, 0); ring.sites.len()];
        Self { ring, arrays, combine, begun: None, progress, completion_nanos: Vec::new() }
    }

    /// Number of a message of the operation under way, in its session.
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

    /// Whether all sites are ready, and have nothing left of the operation before.
    fn may_begin(&self, worlds: &[World<'_>]) -> bool {
        worlds.iter().enumerate().all(|(site, world)| {
            let newest = self.message(site, 0).checked_sub(1);
            world.is_ready() && newest.is_none_or(|message| world.has_sent_all(message))
        })
    }

    /// Takes what has arrived at a site, in order.
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

    /// Lets a site send what it may by now.
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
