//! One block, two gateways that keep running, and a target that restarts
//! (`docs/understand/crash-consistency.md` §4): the order of the two gateways' writes over
//! restarts. What the store guarantees by itself (§3) is searched by the other model and taken for
//! granted here.

use super::device::Version;
use super::search::{Found, Step, search};
use super::spec::{Versions, one};

const WRITES: u8 = 3;
const FLUSHES: u8 = 2;
const CRASHES: u8 = 2;
const NAMES: [&str; 2] = ["A", "B"];

/// A promise that every read must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// When both gateways have sent their changes again, it returns the last version acknowledged
    /// to either.
    Latest,
    /// It returns nothing older than the version at a flush of either gateway.
    Flushed,
    /// It returns nothing older than a version first written and acknowledged in this life of the
    /// target.
    New,
    /// It returns no version that was overwritten when a flush of the version's own gateway was
    /// answered.
    OwnFlushed,
}

/// The rules that order the writes of two gateways; a search leaves out each in turn.
#[allow(clippy::struct_excessive_bools)] // each is left out in turn
#[derive(Debug, Clone, Copy)]
struct Rules {
    /// A change sent again doesn't replace a block that was changed in this life of the target.
    spares_changed: bool,
    /// The store is flushed before a gateway changes a block whose last change, by another gateway,
    /// isn't flushed.
    flushes_between: bool,
    /// Each change has a mark, and isn't sent again if its life is known to have come at least that
    /// far.
    compares_marks: bool,
    /// A change sent again gets a mark of the life that acknowledged it.
    marks_again: bool,
    /// If a block is left as it is, it is flushed before the change is answered.
    flushes_spared: bool,
    /// A gateway fails if others changed something in a life to which it sent nothing.
    fails_if_absent: bool,
    /// A flush empties the journal of the gateway that requested it.
    empties_journal: bool,
}

const ALL: Rules = Rules {
    spares_changed: true,
    flushes_between: true,
    compares_marks: true,
    marks_again: true,
    flushes_spared: true,
    fails_if_absent: true,
    empties_journal: true,
};

/// The rules for a store without marks.
const UNMARKED: Rules = Rules {
    flushes_between: false,
    compares_marks: false,
    marks_again: false,
    flushes_spared: false,
    fails_if_absent: false,
    ..ALL
};

#[derive(Debug, Clone, Copy)]
struct Setting {
    claim: Claim,
    /// Whether each host flushes before the other one uses the block.
    hands_over: bool,
    rules: Rules,
}

/// When a change was made: the life, and the number of changes that the life had made by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Mark {
    life: u8,
    count: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Gateway {
    /// The newest acknowledged version that it hasn't flushed.
    journal: Option<(Version, Mark)>,
    /// A version that hasn't been answered.
    flight: Option<Version>,
    is_connected: bool,
    /// Whether the journal must still be sent to this life of the target.
    must_send: bool,
    /// The life to which it last sent a change.
    sent_in: Option<u8>,
    /// Whether it has failed, as it couldn't determine which version is newer.
    is_failed: bool,
}

impl Gateway {
    fn is_ready(&self) -> bool {
        self.is_connected && !self.must_send && self.flight.is_none() && !self.is_failed
    }
}

/// How far a life that has ended had come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Past {
    /// Number of its changes, from the first on, known to have been recovered.
    found: u8,
    /// Whether it made any changes.
    has_changes: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct World {
    block: Version,
    /// Whether it was changed in this life of the target, not counting changes sent again.
    is_changed: bool,
    /// The version at the last flush, and versions given to the store since: a restart may leave
    /// any of them (§3).
    flushed: Version,
    issued: Versions,
    /// Versions made by this life, in order, and the number of them that are flushed.
    made: Vec<Version>,
    flushed_count: u8,
    /// The gateway of the last version, if that isn't flushed.
    unflushed: Option<usize>,
    pasts: Vec<Past>,
    gateways: [Gateway; 2],
    /// The last version used.
    version: Version,
    /// The last version acknowledged when it was new.
    latest: Version,
    /// All such versions, in order.
    answers: Vec<Version>,
    /// Versions that must not be read according to the claim.
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
            let others = &self.gateways[1 - number];
            let is_others =
                setting.hands_over && (others.journal.is_some() || others.flight.is_some());
            if gateway.is_failed {
                continue;
            }
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
            } else if gateway.must_send {
                let version = gateway.journal.map_or(0, |(version, _)| version);
                let what = format!("{name} looks at version {version}, which it may send again");
                add(what, Ok(self.sent_again(number, setting.rules)));
            } else if gateway.flight.is_some() {
                let what = format!("{name}'s write is answered");
                add(what, Ok(self.answered(number, setting)));
            }
        }
        if self.crashes < CRASHES {
            let left = self.issued | one(self.flushed);
            for version in (0..=self.version).filter(|version| left & one(*version) != 0) {
                for found in self.flushed_count..=self.place_of(version) {
                    let what = format!(
                        "the target restarts, the block is version {version}, {found} changes are found"
                    );
                    add(what, Ok(self.restarted(version, found, setting.claim)));
                }
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

    fn is_in_flight(&self, version: Version) -> bool {
        self.gateways.iter().any(|gateway| gateway.flight == Some(version))
    }

    /// The most changes that may be recovered if the block has this version.
    fn place_of(&self, version: Version) -> u8 {
        let place = self.made.iter().rposition(|made| *made == version).map(|place| place + 1);
        let is_unmade = self.made.is_empty() || self.issued & one(version) != 0;
        let unmade = if is_unmade { self.made.len() } else { self.flushed_count.into() };
        place.unwrap_or(unmade) as u8
    }

    /// Versions that are neither in the block nor in flight.
    fn overwritten(&self) -> Versions {
        let in_flight = self.gateways.iter().filter_map(|gateway| gateway.flight);
        let is_there = in_flight.fold(one(self.block), |there, version| there | one(version));
        (one(self.version + 1) - 1) & !is_there
    }

    /// Versions acknowledged before the block's, and overwritten.
    fn older(&self) -> Versions {
        let place = self.answers.iter().position(|version| *version == self.block);
        let before = place.map(|place| &self.answers[..place]);
        let before =
            before.map(|before| before.iter().fold(one(0), |all, version| all | one(*version)));
        self.overwritten() & before.unwrap_or_default()
    }

    fn life(&self) -> u8 {
        self.pasts.len() as u8
    }

    fn mark(&self) -> Mark {
        Mark { life: self.life(), count: self.made.len() as u8 }
    }

    fn connected(&self, number: usize) -> Self {
        let mut world = self.clone();
        let gateway = &mut world.gateways[number];
        gateway.is_connected = true;
        gateway.must_send = gateway.journal.is_some();
        world
    }

    fn writes(&self, number: usize) -> Self {
        let mut world = self.clone();
        world.version += 1;
        world.issued |= one(world.version);
        if number == 1 {
            world.seconds |= one(world.version);
        }
        world.gateways[number].flight = Some(world.version);
        world.gateways[number].sent_in = Some(world.life());
        world
    }

    /// The target makes a version.
    fn makes(&mut self, number: usize, version: Version, rules: Rules) -> Mark {
        self.flush_between(number, rules);
        self.block = version;
        self.issued |= one(version);
        self.made.push(version);
        self.unflushed = Some(number);
        self.gateways[number].sent_in = Some(self.life());
        self.mark()
    }

    fn flush_between(&mut self, number: usize, rules: Rules) {
        if rules.flushes_between && self.unflushed == Some(1 - number) {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.flushed = self.block;
        self.issued &= !self.overwritten();
        self.flushed_count = self.made.len() as u8;
        self.unflushed = None;
    }

    fn answered(&self, number: usize, setting: Setting) -> Self {
        let mut world = self.clone();
        let Some(version) = world.gateways[number].flight.take() else { return world };
        let mark = world.makes(number, version, setting.rules);
        world.gateways[number].journal = Some((version, mark));
        world.latest = version;
        world.answers.push(version);
        world.is_changed = true;
        if setting.claim == Claim::New {
            world.gone |= world.older();
        }
        world
    }

    fn sent_again(&self, number: usize, rules: Rules) -> Self {
        let mut world = self.clone();
        let life = world.life();
        world.gateways[number].must_send = false;
        let Some((version, mark)) = world.gateways[number].journal else { return world };
        if rules.compares_marks {
            let since = self.pasts.get(usize::from(mark.life)..).unwrap_or_default();
            if since.first().is_some_and(|past| past.found >= mark.count) {
                return world;
            }
            let is_others = since.iter().skip(1).any(|past| past.has_changes);
            let sent_nothing = world.gateways[number].sent_in == Some(mark.life);
            if rules.fails_if_absent && is_others && sent_nothing {
                world.gateways[number].is_failed = true;
                return world;
            }
        }
        let made = if rules.spares_changed && world.is_changed {
            let made = world.mark();
            if rules.flushes_spared {
                world.flush();
            }
            world.gateways[number].sent_in = Some(life);
            made
        } else {
            world.makes(number, version, rules)
        };
        if rules.marks_again {
            world.gateways[number].journal = Some((version, made));
        }
        world
    }

    fn flushed_by(&self, number: usize, setting: Setting) -> Self {
        let mut world = self.clone();
        world.flushes += 1;
        let overwritten = world.overwritten();
        world.flush();
        if setting.rules.empties_journal {
            world.gateways[number].journal = None;
        }
        let own = if number == 1 { world.seconds } else { !world.seconds };
        match setting.claim {
            // A version that hasn't been answered may be made again, as its host still waits for
            // it.
            Claim::Flushed if self.is_in_flight(self.block) => {}
            Claim::Flushed => world.gone |= world.older(),
            Claim::OwnFlushed => world.gone |= overwritten & own,
            Claim::Latest | Claim::New => {}
        }
        world
    }

    fn restarted(&self, version: Version, found: u8, claim: Claim) -> Self {
        let mut world = self.clone();
        world.crashes += 1;
        world.block = version;
        world.flushed = version;
        world.issued = 0;
        world.is_changed = false;
        world.pasts.push(Past { found, has_changes: !world.made.is_empty() });
        world.made.clear();
        world.flushed_count = 0;
        world.unflushed = None;
        if claim == Claim::New {
            world.gone = 0;
        }
        for gateway in &mut world.gateways {
            gateway.is_connected = false;
            gateway.must_send = false;
        }
        world
    }
}

fn look(setting: Setting) -> Found {
    search(World::default(), 8_000_000, |world: &World| world.steps(setting))
}

fn holds(setting: Setting) {
    match look(setting) {
        Found::Nothing { states } => println!("{setting:?}: {states} states"),
        Found::Violation { trace, .. } => panic!("{setting:?}:\n{}", trace.join("\n")),
    }
}

fn goes_wrong(why: &str, setting: Setting) {
    let Found::Violation { trace, .. } = look(setting) else { panic!("{why}: {setting:?} holds") };
    println!("{why}, {:?}:", setting.claim);
    for line in trace {
        println!("    {line}");
    }
}

const fn apart(claim: Claim, rules: Rules) -> Setting {
    Setting { claim, hands_over: false, rules }
}

#[test]
fn writes_of_two_gateways_have_one_order_over_restarts() {
    for claim in [Claim::Latest, Claim::Flushed, Claim::New, Claim::OwnFlushed] {
        holds(apart(claim, ALL));
    }
}

#[test]
fn without_marks_writes_are_ordered_only_if_the_gateways_flush() {
    for claim in [Claim::Latest, Claim::Flushed] {
        goes_wrong("without marks", apart(claim, UNMARKED));
        holds(Setting { hands_over: true, ..apart(claim, UNMARKED) });
    }
    for claim in [Claim::New, Claim::OwnFlushed] {
        holds(apart(claim, UNMARKED));
    }
}

#[test]
fn each_of_these_rules_is_needed() {
    for (why, setting) in [
        (
            "changed blocks are replaced",
            apart(Claim::New, Rules { spares_changed: false, ..UNMARKED }),
        ),
        (
            "a flush leaves the journal as it is",
            apart(Claim::OwnFlushed, Rules { empties_journal: false, ..UNMARKED }),
        ),
        (
            "no flush between two gateways",
            apart(Claim::Flushed, Rules { flushes_between: false, ..ALL }),
        ),
        ("marks are not compared", apart(Claim::Flushed, Rules { compares_marks: false, ..ALL })),
        (
            "changes sent again keep their marks",
            apart(Claim::Flushed, Rules { marks_again: false, ..ALL }),
        ),
        (
            "blocks left as they are are not flushed",
            apart(Claim::Latest, Rules { flushes_spared: false, ..ALL }),
        ),
        (
            "an absent gateway goes on",
            apart(Claim::Flushed, Rules { fails_if_absent: false, ..ALL }),
        ),
    ] {
        goes_wrong(why, setting);
    }
}
