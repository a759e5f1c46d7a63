//! The paths of a session: which there are, which of them may take a unit, and which one a control
//! packet takes (`docs/formats/session-wire.md`, "Paths").

use std::ops::{Index, IndexMut};

use rand_chacha::ChaCha20Rng;
use rand_core::{Rng, SeedableRng};

use crate::link::Nanos;

use super::config::{Detection, SessionConfig};
use super::congestion::{Congestion, Verdict};
use super::path::{Pace, Path};
use super::path_choice::PathChoice;
use super::rtt::timeout_of;
use super::units::Units;
use super::unproven::Budget;

/// Paths of a session, most: a block of UnoRC, ten packets, finds a path for each of its packets, and
/// as many are there to take the place of those that fail.
pub const PATHS_MAX: u8 = 32;

/// A path of a session, from 0. It is the channel of the packets that take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PathId(pub u8);

impl PathId {
    /// Its place among the paths.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// Some paths of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PathSet(u32);

impl PathSet {
    /// With another path.
    #[must_use]
    pub fn with(self, path: PathId) -> Self {
        Self(self.0 | 1 << path.0)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether it has this one.
    #[must_use]
    pub fn has(self, path: PathId) -> bool {
        self.0 >> path.0 & 1 == 1
    }

    /// The first one behind `path`, in a circle; `None` if there is none at all.
    #[must_use]
    pub fn behind(self, path: PathId) -> Option<PathId> {
        let later = self.0 & u32::MAX.checked_shl(u32::from(path.0) + 1).unwrap_or(0);
        let found = if later == 0 { self.0 } else { later };
        (found != 0).then(|| PathId(found.trailing_zeros() as u8))
    }
}

/// All paths of one end.
#[derive(Debug)]
pub struct Paths {
    all: Vec<Path>,
    choice: Box<dyn PathChoice>,
    congestion: Box<dyn Congestion>,
    pace: Pace,
    /// On which the peer was heard last: what it says arrives there, so what is said to it should.
    heard: PathId,
    /// The greatest smoothed round trip of those in use; `None` before the first sample.
    slowest: Option<Nanos>,
    /// Whose report comes first in the next control packet.
    first_told: usize,
    /// What may be sent to addresses that have not answered.
    budget: Budget,
    /// Draws the tokens of challenges, which nobody knows who doesn't receive them.
    tokens: ChaCha20Rng,
}

impl Paths {
    /// Paths of which nothing is known, each beginning to be validated at `now`.
    #[must_use]
    pub fn new(
        config: &SessionConfig,
        units: Units,
        choice: Box<dyn PathChoice>,
        congestion: Box<dyn Congestion>,
        token_seed: [u8; 32],
        now: Nanos,
    ) -> Self {
        let largest = units.iter().next().unwrap_or(config.unit_bytes);
        let budget = Budget::new(
            SessionConfig { unit_bytes: largest, ..*config }.packet_bytes_max(),
            config.paths,
        );
        let all = (0..config.paths).map(|_| Path::new(config.reordering, units, now)).collect();
        let pace = Pace::of(config);
        let mut paths = Self {
            all,
            choice,
            congestion,
            pace,
            heard: PathId(0),
            slowest: None,
            first_told: 0,
            budget,
            tokens: ChaCha20Rng::from_seed(token_seed),
        };
        paths.adopt_allowances(now);
        paths
    }

    /// The unit is known: paths are asked about this one only, and know it to pass if a larger one has.
    pub fn unit_decided(&mut self, config: &SessionConfig, now: Nanos) {
        self.pace = Pace::of(config);
        for path in &mut self.all {
            path.challenges.narrow(Units::fixed(config.unit_bytes));
        }
        self.adopt_allowances(now);
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u8 {
        self.all.len() as u8
    }

    /// Each with its id.
    pub fn iter(&self) -> impl Iterator<Item = (PathId, &Path)> {
        (0..).map(PathId).zip(&self.all)
    }

    /// See [`Self::iter`].
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (PathId, &mut Path)> {
        (0..).map(PathId).zip(&mut self.all)
    }

    /// A path that the peer names.
    #[must_use]
    pub fn named(&self, channel: u32) -> Option<PathId> {
        (channel < u32::from(self.count())).then_some(PathId(channel as u8))
    }

    /// Those that units may take at all: validated, and answering unless none answers.
    fn usable(&self) -> PathSet {
        if let [only] = &self.all[..] {
            return if only.is_validated() { PathSet(1) } else { PathSet(0) };
        }
        let mut validated = PathSet::default();
        let mut answering = PathSet::default();
        for (id, path) in self.iter().filter(|(_, path)| path.is_validated()) {
            validated = validated.with(id);
            if !path.is_silent {
                answering = answering.with(id);
            }
        }
        if answering.is_empty() { validated } else { answering }
    }

    /// Whether units have another way than this path.
    #[must_use]
    pub fn has_other(&self, path: PathId) -> bool {
        self.iter().any(|(id, other)| id != path && other.is_validated() && !other.is_silent)
    }

    /// Those that may take a unit now.
    #[must_use]
    pub fn open(&self, now: Nanos) -> PathSet {
        let usable = self.usable();
        self.iter().fold(PathSet::default(), |open, (id, path)| {
            let is_open = usable.has(id) && path.allows_at().is_some_and(|at| at <= now);
            if is_open { open.with(id) } else { open }
        })
    }

    /// When one of them may take a unit; `None`: when the peer reports.
    #[must_use]
    pub fn open_at(&self) -> Option<Nanos> {
        let usable = self.usable();
        self.iter().filter(|(id, _)| usable.has(*id)).filter_map(|(_, path)| path.allows_at()).min()
    }

    /// Chooses one of the paths that are open, for one unit.
    pub fn choose(&mut self, open: PathSet, now: Nanos) -> Option<PathId> {
        let fallback = open.behind(PathId(PATHS_MAX - 1))?;
        let chosen = self.choice.choose(open, now);
        Some(if open.has(chosen) { chosen } else { fallback })
    }

    /// A path went silent.
    pub fn interrupted(&mut self, path: PathId, now: Nanos) {
        self.choice.interrupted(path, now);
        self.congestion.interrupted(path);
    }

    /// The peer has reported about a path.
    pub fn reported(&mut self, path: PathId, now: Nanos) -> Verdict {
        let account = self[path].account();
        self.choice.reported(path, &account, now);
        let verdict = self.congestion.reported(path, &account, now);
        if verdict == Verdict::Changed {
            self.adopt_allowances(now);
        }
        verdict
    }

    fn adopt_allowances(&mut self, now: Nanos) {
        let Self { all, congestion, pace, .. } = self;
        for (id, path) in (0..).map(PathId).zip(all) {
            path.allow(congestion.allowance(id), *pace, now);
        }
    }

    /// A packet leaves on a path.
    pub fn sent(&mut self, path: PathId, number: u64, wire_bytes: u64, now: Nanos) {
        let known = &mut self.all[path.index()];
        self.budget.sent(&mut known.unproven, wire_bytes, now);
        known.sent(number, wire_bytes, now);
        self.congestion.sent(path, wire_bytes, now);
    }

    /// When a control packet that has to take this path may leave.
    #[must_use]
    pub fn control_open_at(&self, path: PathId) -> Nanos {
        let known = &self[path];
        known.paced_at().max(self.budget.open_at(&known.unproven))
    }

    /// When a control packet that may take any path may leave. Units have no path before an address has
    /// answered, and then the packet goes to where the peer was heard.
    #[must_use]
    pub fn any_open_at(&self) -> Nanos {
        let has_answered = !self.usable().is_empty();
        if has_answered { 0 } else { self.budget.open_at(&self[self.heard].unproven) }
    }

    /// A token for a challenge that leaves now: nobody can guess it.
    pub fn new_token(&mut self) -> u64 {
        self.tokens.next_u64()
    }

    /// The peer was heard on a path.
    pub fn heard(&mut self, path: PathId) {
        self.heard = path;
    }

    /// Which one a control packet takes if anyone will do: the one on which the peer was heard last, if
    /// units could take it, too. That the peer is heard says nothing of the way there. `is_lost`: what
    /// was said on the last one seems not to arrive.
    pub fn for_control(&mut self, is_lost: bool) -> PathId {
        let usable = self.usable();
        if is_lost || !usable.has(self.heard) {
            self.heard = usable.behind(self.heard).unwrap_or(self.heard);
        }
        self.heard
    }

    /// Every path once, another one first each time: whoever finds no room is told of soon.
    pub fn in_turn(&mut self) -> impl Iterator<Item = PathId> + use<> {
        let count = self.all.len();
        let first = self.first_told;
        self.first_told = (first + 1) % count;
        (first..first + count).map(move |index| PathId((index % count) as u8))
    }

    /// A round trip was measured, or a path went into use or out of it.
    pub fn measured(&mut self) {
        let usable = self.usable();
        let known = self.iter().filter(|(id, _)| usable.has(*id));
        self.slowest = known.filter_map(|(_, path)| path.rtt.smoothed()).max();
    }

    /// The greatest smoothed round trip of those in use; `None` before the first sample.
    #[must_use]
    pub fn srtt(&self) -> Option<Nanos> {
        self.slowest
    }

    /// The greatest time-out of those in use.
    #[must_use]
    pub fn timeout(&self) -> Nanos {
        timeout_of(self.slowest)
    }

    /// How long a unit on a path may stay unacknowledged: it goes by this path, and what is said of
    /// it comes back by any.
    #[must_use]
    pub fn timeout_on(&self, path: PathId) -> Nanos {
        let mean = |own: Nanos| own.midpoint(self.slowest.unwrap_or(own));
        timeout_of(self[path].rtt.smoothed().map(mean))
    }

    /// How long a packet of a path may be waited for before what it carried is lost. `None`, where
    /// losses are reported, while the peer has not said anything about it or a later one: then a
    /// host may be late, or the path gone, which probes find out, and nothing is known to be lost.
    #[must_use]
    pub fn patience(&self, path: PathId, packet: u64, detection: Detection) -> Option<Nanos> {
        let is_passed = self[path].packets_reported > packet;
        (is_passed || detection == Detection::Timeout).then(|| self.timeout_on(path))
    }

    /// Wire bytes a second that may leave on all together, if each has its allowance.
    #[must_use]
    pub fn rate(&self) -> u64 {
        let rates = self.iter().map(|(id, _)| self.congestion.allowance(id).rate_bytes_per_second);
        rates.fold(0, u64::saturating_add)
    }

    /// Times that a rate was cut because the path could not carry it.
    #[must_use]
    pub fn trips(&self) -> u64 {
        self.congestion.trips()
    }
}

impl Index<PathId> for Paths {
    type Output = Path;

    fn index(&self, path: PathId) -> &Path {
        &self.all[path.index()]
    }
}

impl IndexMut<PathId> for Paths {
    fn index_mut(&mut self, path: PathId) -> &mut Path {
        &mut self.all[path.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Detection, IpVersion, MandatoryRate, PayloadMode, RoundRobin};
    use super::*;

    #[test]
    fn a_set_is_walked_in_a_circle() {
        let set = [1, 4, 31].map(PathId).into_iter().fold(PathSet::default(), PathSet::with);
        let walk: Vec<u8> =
            [0, 1, 3, 4, 30, 31].map(|at| set.behind(PathId(at)).unwrap().0).to_vec();
        assert_eq!(walk, [1, 4, 4, 31, 31, 1]);
        assert_eq!(PathSet::default().behind(PathId(3)), None);
        assert!(set.has(PathId(4)) && !set.has(PathId(3)) && !set.is_empty());
    }

    #[test]
    fn control_packets_take_a_path_on_which_the_peer_was_heard_only_if_it_is_validated() {
        let config = SessionConfig {
            connection_id_local: 1,
            connection_id_peer: 2,
            unit_bytes: 1408,
            ip: IpVersion::V4,
            paths: 3,
            chunk_units: 1,
            slots: 4,
            rate_bytes_per_second: 1,
            idle_timeout: 1,
            reordering: 0,
            detection: Detection::Reports,
            packets_per_key: 1,
            payload: PayloadMode::Real,
        };
        let units = Units::fixed(config.unit_bytes);
        let choice = Box::new(RoundRobin::default());
        let congestion = Box::new(MandatoryRate::new(config.rate_bytes_per_second, config.paths));
        let mut paths = Paths::new(&config, units, choice, congestion, [0; 32], 0);
        paths.heard(PathId(1));
        assert_eq!(paths.for_control(false), PathId(1), "none is validated yet");
        paths[PathId(0)].validated();
        paths[PathId(2)].validated();
        paths.heard(PathId(1));
        assert_eq!(
            paths.for_control(false),
            PathId(2),
            "its challenges arrive, who knows what else"
        );
        paths.heard(PathId(0));
        assert_eq!(paths.for_control(false), PathId(0));
        assert_eq!(paths.for_control(true), PathId(2), "nothing came back on the other");
        paths[PathId(2)].abandon();
        assert_eq!(paths.for_control(false), PathId(0));
    }
}
