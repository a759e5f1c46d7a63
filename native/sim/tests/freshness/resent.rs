//! One block, two gateways that may die, connections that end, and a target that restarts: which
//! changes are sent again, and which must not be made twice (`docs/understand/crash-consistency.md`
//! §5). What a store guarantees by itself (§3) is taken for granted, except for one device that is
//! rolled back once.

use super::device::Version;
use super::search::{Found, Step, search};
use super::spec::{Versions, one};

const WRITES: u8 = 3;
const FLUSHES: u8 = 2;
const NAMES: [&str; 2] = ["A", "B"];

/// The rules for sending again; a search leaves out each in turn.
#[derive(Debug, Clone, Copy)]
struct Rules {
    /// The fenced target is asked which changes it has made; these aren't sent again.
    target_is_asked: bool,
    /// Only the newest version of a block in the journal is sent again.
    newest_only: bool,
    /// After a journal is sent again, it is flushed before anything else is sent.
    journal_is_flushed: bool,
}

const ALL: Rules = Rules { target_is_asked: true, newest_only: true, journal_is_flushed: true };

#[derive(Debug, Clone, Copy)]
struct Setting {
    rules: Rules,
    /// Maximum number of lost connections.
    losses: u8,
    restarts: u8,
    /// Whether B writes, too; otherwise it only reads and flushes.
    both_write: bool,
    /// Whether the first restart finds the device as it was at the last answered flush.
    is_rolled_back: bool,
}

/// A write that hasn't been answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Flight {
    version: Version,
    is_forced: bool,
    /// Whether the target has made it, in the life to which it was sent.
    is_made: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Gateway {
    is_dead: bool,
    is_connected: bool,
    /// Life of the target to which it was last connected.
    life: u8,
    /// Acknowledged versions that it hasn't flushed, oldest first.
    journal: Vec<Version>,
    /// Versions of the journal still to be sent to this life, the next one last.
    pieces: Vec<Version>,
    /// The piece in flight, and whether it was made.
    piece: Option<(Version, bool)>,
    /// Whether the journal was sent again and must be flushed.
    is_to_flush: bool,
    flight: Option<Flight>,
}

impl Gateway {
    fn has_sent_again(&self) -> bool {
        self.is_connected && self.pieces.is_empty() && self.piece.is_none() && !self.is_to_flush
    }

    fn is_ready(&self) -> bool {
        self.has_sent_again() && self.flight.is_none()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct World {
    block: Version,
    /// The durable version, and versions made since: a restart leaves any of them.
    durable: Version,
    since: Versions,
    /// The version at the last answered flush: a device can't be rolled back behind it unnoticed.
    told: Version,
    life: u8,
    /// Versions that this life has made.
    made: Versions,
    gateways: [Gateway; 2],
    version: Version,
    /// Versions overwritten when a newer one was acknowledged as durable or flushed.
    gone: Versions,
    /// The same before a rollback of the device: they are gone again once the journal has been
    /// sent.
    gone_again: Versions,
    /// Versions made by any life.
    ever_made: Versions,
    losses: u8,
    flushes: u8,
}

impl World {
    /// The target makes a version. It may make it twice only if nothing else was made in between.
    fn makes(&mut self, version: Version, is_forced: bool) -> Result<(), String> {
        if self.made & one(version) != 0 && self.block != version {
            return Err("VIOLATION: made twice".into());
        }
        self.made |= one(version);
        self.ever_made |= one(version) | one(0);
        self.block = version;
        self.since |= one(version);
        if is_forced {
            self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) {
        self.durable = self.block;
        self.since = 0;
    }

    /// The block's version is durable: overwritten versions that no gateway still has to send are
    /// gone.
    fn mark_gone(&mut self) {
        let alive = self.gateways.iter().filter(|gateway| !gateway.is_dead);
        let to_send = alive.flat_map(|gateway| {
            let flight = gateway.flight.map(|flight| flight.version);
            flight.into_iter().chain(gateway.journal.last().copied())
        });
        let stays = to_send.fold(one(self.block), |stays, version| stays | one(version));
        self.gone |= self.ever_made & !stays;
    }

    /// Versions gone before a rollback are gone again once the only writer has sent its journal.
    fn settles(&mut self) {
        if self.gateways[0].has_sent_again() {
            self.gone |= std::mem::take(&mut self.gone_again);
        }
    }

    fn reads(&self) -> Result<Self, String> {
        if self.gone & one(self.block) != 0 {
            return Err("VIOLATION: a durable change was undone".into());
        }
        Ok(self.clone())
    }

    fn steps(&self, setting: Setting) -> Vec<Step<Self>> {
        let mut steps = Vec::new();
        let mut add = |what: String, outcome| steps.push(Step { what, outcome });
        let alive = || self.gateways.iter().filter(|gateway| !gateway.is_dead);
        // The reader is a gateway that is ready, or a new one when both are dead.
        if alive().any(Gateway::is_ready) || alive().next().is_none() {
            add("the block is read".into(), self.reads());
        }
        for (number, name) in NAMES.iter().enumerate() {
            let gateway = &self.gateways[number];
            if gateway.is_dead {
                continue;
            }
            let mut with = |what: &str, change: &dyn Fn(&mut Self, usize) -> Result<(), String>| {
                let mut world = self.clone();
                let outcome = change(&mut world, number).map(|()| {
                    world.settles();
                    world
                });
                add(format!("{name} {what}"), outcome);
            };
            if !gateway.is_connected {
                with("connects", &|world, number| {
                    world.connects(number, setting.rules);
                    Ok(())
                });
            } else if let Some((version, is_made)) = gateway.piece {
                if is_made {
                    with("gets the answer to a piece of its journal", &|world, number| {
                        world.gateways[number].piece = None;
                        Ok(())
                    });
                } else {
                    with("'s piece of its journal is made", &|world, number| {
                        world.gateways[number].piece = Some((version, true));
                        world.makes(version, false)
                    });
                }
            } else if let Some(version) = gateway.pieces.last().copied() {
                with(&format!("sends version {version} of its journal"), &|world, number| {
                    world.gateways[number].pieces.pop();
                    world.gateways[number].piece = Some((version, false));
                    Ok(())
                });
            } else if gateway.is_to_flush {
                with("flushes its journal", &|world, number| {
                    world.gateways[number].is_to_flush = false;
                    world.flushed_by(number);
                    Ok(())
                });
            } else if let Some(flight) = gateway.flight {
                if flight.is_made {
                    with("gets the answer to its write", &|world, number| {
                        world.acknowledges(number, flight);
                        Ok(())
                    });
                } else {
                    with(&format!("'s version {} is made", flight.version), &|world, number| {
                        world.gateways[number].flight = Some(Flight { is_made: true, ..flight });
                        world.makes(flight.version, flight.is_forced)
                    });
                }
            } else {
                if self.version < WRITES && (number == 0 || setting.both_write) {
                    for is_forced in [false, true] {
                        let how = if is_forced { "durably" } else { "" };
                        with(&format!("writes {how}"), &|world, number| {
                            world.version += 1;
                            let (version, is_made) = (world.version, false);
                            let flight = Flight { version, is_forced, is_made };
                            world.gateways[number].flight = Some(flight);
                            Ok(())
                        });
                    }
                }
                if self.flushes < FLUSHES {
                    with("flushes", &|world, number| {
                        world.flushes += 1;
                        world.flushed_by(number);
                        Ok(())
                    });
                }
            }
            if gateway.is_connected && self.losses < setting.losses {
                with("loses its connection and is fenced", &|world, number| {
                    world.losses += 1;
                    world.gateways[number].is_connected = false;
                    Ok(())
                });
            }
            with("dies", &|world, number| {
                world.gateways[number] = Gateway { is_dead: true, ..Gateway::default() };
                Ok(())
            });
        }
        steps.extend(self.restarts(setting));
        steps
    }

    fn restarts(&self, setting: Setting) -> Vec<Step<Self>> {
        let mut steps = Vec::new();
        let mut add = |what: String, outcome| steps.push(Step { what, outcome });
        if self.life < setting.restarts {
            if setting.is_rolled_back && self.life == 0 {
                if self.gateways.iter().any(|gateway| !gateway.is_dead) {
                    let what = "the target restarts on a device that was rolled back";
                    let mut world = self.restarted(self.told);
                    world.gone_again = std::mem::take(&mut world.gone);
                    add(what.into(), Ok(world));
                }
            } else {
                let left = self.since | one(self.durable);
                for version in (0..=self.version).filter(|version| left & one(*version) != 0) {
                    let what = format!("the target restarts, the block is version {version}");
                    add(what, Ok(self.restarted(version)));
                }
            }
        }
        steps
    }

    fn restarted(&self, version: Version) -> Self {
        let mut world = self.clone();
        world.life += 1;
        world.block = version;
        world.durable = version;
        (world.since, world.made) = (0, 0);
        for gateway in &mut world.gateways {
            gateway.is_connected = false;
        }
        world
    }

    fn connects(&mut self, number: usize, rules: Rules) {
        let life = self.life;
        let gateway = &mut self.gateways[number];
        let is_new_life = gateway.life != life;
        (gateway.is_connected, gateway.life) = (true, life);
        let piece = gateway.piece.take();
        let starts_over = !rules.target_is_asked && (piece.is_some() || !gateway.pieces.is_empty());
        if is_new_life || starts_over {
            gateway.pieces = gateway.journal.iter().rev().copied().collect();
            if rules.newest_only {
                gateway.pieces.truncate(1);
            }
            gateway.is_to_flush = rules.journal_is_flushed && !gateway.pieces.is_empty();
        } else if let Some((version, false)) = piece {
            gateway.pieces.push(version);
        }
        let Some(flight) = gateway.flight else { return };
        if rules.target_is_asked && !is_new_life && flight.is_made {
            self.acknowledges(number, flight);
        } else {
            gateway.flight = Some(Flight { is_made: false, ..flight });
        }
    }

    fn acknowledges(&mut self, number: usize, flight: Flight) {
        let gateway = &mut self.gateways[number];
        gateway.flight = None;
        gateway.journal.push(flight.version);
        if flight.is_forced {
            self.mark_gone();
        }
    }

    fn flushed_by(&mut self, number: usize) {
        self.flush();
        self.told = self.block;
        self.gateways[number].journal.clear();
        self.mark_gone();
    }
}

fn look(setting: Setting) -> Found {
    search(World::default(), 8_000_000, |world: &World| world.steps(setting))
}

/// Asserts that the promise holds with all rules, but not without this one.
fn needs(setting: Setting, leave_out: impl Fn(&mut Rules), violation: &str) {
    match look(setting) {
        Found::Nothing { states } => println!("{setting:?}: {states} states"),
        found @ Found::Violation { .. } => panic!("{setting:?}: {found:?}"),
    }
    let mut rules = setting.rules;
    leave_out(&mut rules);
    match look(Setting { rules, ..setting }) {
        Found::Violation { trace, .. } if trace.last().is_some_and(|last| last == violation) => {
            println!("{rules:?}:");
            for line in trace {
                println!("    {line}");
            }
        }
        found => panic!("{rules:?}: no violation found, or another one: {found:?}"),
    }
}

const ONE_LIFE: Setting =
    Setting { rules: ALL, losses: 2, restarts: 0, both_write: true, is_rolled_back: false };

#[test]
fn no_change_is_made_twice_in_a_life_of_the_target() {
    let once = "VIOLATION: made twice";
    needs(ONE_LIFE, |rules| rules.target_is_asked = false, once);
}

#[test]
fn durable_changes_are_not_undone_by_sending_again() {
    let undone = "VIOLATION: a durable change was undone";
    let restarts = Setting { restarts: 2, losses: 1, both_write: false, ..ONE_LIFE };
    needs(restarts, |rules| rules.newest_only = false, undone);
    let rolled_back = Setting { is_rolled_back: true, losses: 0, ..restarts };
    needs(rolled_back, |rules| rules.journal_is_flushed = false, undone);
}
