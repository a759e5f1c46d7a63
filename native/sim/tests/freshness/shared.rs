//! One block, two gateways that live, a target that restarts (`docs/understand/crash-consistency.md` §4): which
//! orders are kept between the two, and which are not. What the store keeps by itself (§3) is the
//! other model's matter and taken for granted here.

use super::device::Version;
use super::search::{Found, Step, search};
use super::spec::{Versions, one};

const WRITES: u8 = 3;
const FLUSHES: u8 = 2;
const CRASHES: u8 = 2;
const NAMES: [&str; 2] = ["A", "B"];

/// What is held against every read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// When both have sent their changes again, it returns what was acknowledged last, to either.
    Latest,
    /// It returns nothing older than what a flush of either found.
    Flushed,
    /// It returns nothing older than what was new in this life of the target and acknowledged.
    New,
    /// It returns no version that was overwritten when a flush of its own gateway was answered.
    OwnFlushed,
}

#[derive(Debug, Clone, Copy)]
struct Setting {
    claim: Claim,
    /// Each host flushes before the other one uses the block.
    hands_over: bool,
    /// A flush empties the journal of who asked for it.
    empties_journal: bool,
    /// What is sent again leaves a block alone that was changed in this life of the target.
    spares_changed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Gateway {
    /// Versions not flushed by itself, oldest first.
    journal: Vec<Version>,
    /// The last of the journal has no answer yet.
    is_in_flight: bool,
    is_connected: bool,
    /// How many of the journal, the last ones, this life of the target is still to be sent.
    to_send: usize,
}

impl Gateway {
    fn is_ready(&self) -> bool {
        self.is_connected && self.to_send == 0 && !self.is_in_flight
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct World {
    block: Version,
    /// It was changed in this life of the target, by more than what was sent again.
    is_changed: bool,
    /// What the last flush found, and what was given to the store since: either may be left (§3).
    flushed: Version,
    issued: Versions,
    gateways: [Gateway; 2],
    /// The last that was given out.
    version: Version,
    /// The last that was acknowledged when it was new.
    latest: Version,
    /// Versions that the claim says are gone.
    gone: Versions,
    /// Versions of the second gateway.
    seconds: Versions,
    flushes: u8,
    crashes: u8,
}

impl World {
    fn steps(&self, setting: Setting) -> Vec<Step<Self>> {
        let mut steps = Vec::new();
        let mut add = |what: String, outcome| steps.push(Step { what, outcome });
        for (number, name) in NAMES.iter().enumerate() {
            let gateway = &self.gateways[number];
            let is_others = setting.hands_over && !self.gateways[1 - number].journal.is_empty();
            if gateway.is_ready() && !is_others {
                add(format!("{name} reads version {}", self.block), self.read(setting.claim));
                if self.version < WRITES {
                    let version = self.version + 1;
                    add(format!("{name} writes version {version}"), Ok(self.writes(number)));
                }
            }
            if gateway.is_ready() && self.flushes < FLUSHES {
                add(format!("{name} flushes"), Ok(self.flushed_by(number, setting)));
            }
            if !gateway.is_connected {
                add(format!("{name} connects"), Ok(self.connected(number)));
            } else if gateway.to_send > 0 {
                let version = gateway.journal[gateway.journal.len() - gateway.to_send];
                let what = format!("{name} sends version {version} again");
                add(what, Ok(self.sent_again(number, version, setting)));
            } else if gateway.is_in_flight {
                let what = format!("{name}'s write is answered");
                add(what, Ok(self.answered(number, setting.claim)));
            }
        }
        if self.crashes < CRASHES {
            let left = self.issued | one(self.flushed);
            for version in (0..=self.version).filter(|version| left & one(*version) != 0) {
                let what = format!("the target restarts, the block is version {version}");
                add(what, Ok(self.restarted(version, setting.claim)));
            }
        }
        steps
    }

    fn read(&self, claim: Claim) -> Result<Self, String> {
        let holds = match claim {
            Claim::Latest => {
                self.block == self.latest || !self.gateways.iter().all(Gateway::is_ready)
            }
            Claim::Flushed | Claim::New | Claim::OwnFlushed => self.gone & one(self.block) == 0,
        };
        holds.then(|| self.clone()).ok_or_else(|| format!("VIOLATION: {claim:?}"))
    }

    /// Versions that are in the block no more and on no way to it.
    fn overwritten(&self) -> Versions {
        let in_flight = self.gateways.iter().filter(|gateway| gateway.is_in_flight);
        let in_flight = in_flight.filter_map(|gateway| gateway.journal.last());
        let is_there = in_flight.fold(one(self.block), |there, version| there | one(*version));
        (one(self.version + 1) - 1) & !is_there
    }

    fn older(&self) -> Versions {
        self.overwritten() & (one(self.block) - 1)
    }

    fn connected(&self, number: usize) -> Self {
        let mut world = self.clone();
        let gateway = &mut world.gateways[number];
        gateway.is_connected = true;
        gateway.to_send = gateway.journal.len();
        world
    }

    fn writes(&self, number: usize) -> Self {
        let mut world = self.clone();
        world.version += 1;
        world.issued |= one(world.version);
        if number == 1 {
            world.seconds |= one(world.version);
        }
        world.gateways[number].journal.push(world.version);
        world.gateways[number].is_in_flight = true;
        world
    }

    fn answered(&self, number: usize, claim: Claim) -> Self {
        let mut world = self.clone();
        let gateway = &mut world.gateways[number];
        gateway.is_in_flight = false;
        world.block = gateway.journal.last().copied().unwrap_or_default();
        world.latest = world.block;
        world.is_changed = true;
        if claim == Claim::New {
            world.gone |= world.older();
        }
        world
    }

    fn sent_again(&self, number: usize, version: Version, setting: Setting) -> Self {
        let mut world = self.clone();
        let gateway = &mut world.gateways[number];
        gateway.to_send -= 1;
        let is_first_answer = gateway.to_send == 0 && std::mem::take(&mut gateway.is_in_flight);
        if is_first_answer {
            // Nobody was told of it before: it is a change of this life.
            world.latest = version;
            world.is_changed = true;
        } else if setting.spares_changed && world.is_changed {
            return world;
        }
        world.block = version;
        world.issued |= one(version);
        world
    }

    fn flushed_by(&self, number: usize, setting: Setting) -> Self {
        let mut world = self.clone();
        world.flushes += 1;
        world.flushed = world.block;
        let overwritten = world.overwritten();
        world.issued &= !overwritten;
        if setting.empties_journal {
            world.gateways[number].journal.clear();
        }
        let own = if number == 1 { world.seconds } else { !world.seconds };
        match setting.claim {
            Claim::Flushed => world.gone |= world.older(),
            Claim::OwnFlushed => world.gone |= overwritten & own,
            Claim::Latest | Claim::New => {}
        }
        world
    }

    fn restarted(&self, version: Version, claim: Claim) -> Self {
        let mut world = self.clone();
        world.crashes += 1;
        world.block = version;
        world.flushed = version;
        world.issued = 0;
        world.is_changed = false;
        if claim == Claim::New {
            world.gone = 0;
        }
        for gateway in &mut world.gateways {
            gateway.is_connected = false;
            gateway.to_send = 0;
        }
        world
    }
}

fn look(setting: Setting) -> Found {
    search(World::default(), 4_000_000, |world: &World| world.steps(setting))
}

#[test]
fn two_gateways_have_an_order_over_restarts_as_far_as_they_flush() {
    let alone =
        |claim| Setting { claim, hands_over: false, empties_journal: true, spares_changed: true };
    let holds = |setting| matches!(look(setting), Found::Nothing { .. });
    for claim in [Claim::Latest, Claim::Flushed] {
        let Found::Violation { trace, .. } = look(alone(claim)) else {
            panic!("{claim:?} holds without a flush before each change of hands")
        };
        println!("{claim:?} does not hold between two gateways:");
        for line in trace {
            println!("    {line}");
        }
        assert!(holds(Setting { hands_over: true, ..alone(claim) }), "{claim:?}");
    }
    for claim in [Claim::New, Claim::OwnFlushed] {
        assert!(holds(alone(claim)), "{claim:?}");
    }
}

#[test]
fn each_of_these_rules_is_needed() {
    let keeps =
        |claim| Setting { claim, hands_over: false, empties_journal: true, spares_changed: true };
    for setting in [
        Setting { spares_changed: false, ..keeps(Claim::New) },
        Setting { empties_journal: false, ..keeps(Claim::OwnFlushed) },
    ] {
        let found = look(setting);
        assert!(matches!(found, Found::Violation { .. }), "{:?}: {found:?}", setting.claim);
    }
}
