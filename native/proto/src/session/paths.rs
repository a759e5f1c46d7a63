//! The paths of a session: which ones may take a unit, and which one a control packet takes
//! (`docs/formats/session-wire.md`, "Paths").

use std::ops::{Index, IndexMut};

use rand_chacha::ChaCha20Rng;
use rand_core::{Rng, SeedableRng};

use crate::link::Nanos;

use super::config::{Detection, SessionConfig};
use super::congestion::{Congestion, Steering, Verdict};
use super::evidence::Signs;
use super::path::{Pace, Path};
use super::rtt::{Echo, timeout_of};
use super::subflows::Subflows;
use super::units::Units;
use super::unproven::Budget;

/// Most paths of a session: enough for each of the ten packets of an UnoRC block to take its own
/// path, with as many spare ones to replace paths that fail.
pub const PATHS_MAX: u8 = 32;

/// A path of a session, from 0. Also the channel of its packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PathId(pub u8);

impl PathId {
    /// The path of a session with `paths` paths that a channel belongs to, and whether it is the
    /// channel of that path's candidates.
    #[must_use]
    pub fn of_channel(channel: u32, paths: u8) -> Option<(Self, bool)> {
        let of_candidates = channel.checked_sub(PATHS_MAX.into());
        let path = of_candidates.unwrap_or(channel);
        (path < paths.into()).then_some((Self(path as u8), of_candidates.is_some()))
    }

    /// The channel of packets to its candidates.
    #[must_use]
    pub fn candidates_channel(self) -> u32 {
        u32::from(PATHS_MAX) + u32::from(self.0)
    }

    /// Its index among the paths.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A set of paths of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PathSet(u32);

impl PathSet {
    /// Adds a path.
    #[must_use]
    pub fn with(self, path: PathId) -> Self {
        Self(self.0 | 1 << path.0)
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Removes a path.
    #[must_use]
    pub fn without(self, path: PathId) -> Self {
        Self(self.0 & !(1 << path.0))
    }

    /// The paths that are not in `others`.
    #[must_use]
    pub fn without_all(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// The paths that are in both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Number of paths.
    #[must_use]
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether it contains this path.
    #[must_use]
    pub fn has(self, path: PathId) -> bool {
        self.0 >> path.0 & 1 == 1
    }

    /// The next path after `path`, cyclically; `None` if the set is empty.
    #[must_use]
    pub fn next_after(self, path: PathId) -> Option<PathId> {
        let later = self.0 & u32::MAX.checked_shl(u32::from(path.0) + 1).unwrap_or(0);
        let found = if later == 0 { self.0 } else { later };
        (found != 0).then(|| PathId(found.trailing_zeros() as u8))
    }
}

/// All paths of one end.
#[derive(Debug)]
pub struct Paths {
    all: Vec<Path>,
    subflows: Subflows,
    congestion: Congestion,
    pace: Pace,
    /// The path on which the peer was heard last. Its control packets arrive there, so ours are
    /// sent there, too.
    heard: PathId,
    /// The largest smoothed round-trip time of the usable paths; `None` before the first sample.
    slowest: Option<Nanos>,
    /// The path whose report comes first in the next control packet.
    first_reported: usize,
    /// Limits the bytes sent to addresses that have not answered.
    budget: Budget,
    /// Source of the tokens of challenges, and of what else the peer must not know beforehand.
    tokens: ChaCha20Rng,
}

impl Paths {
    /// Creates the paths, each starting its validation at `now`.
    #[must_use]
    pub fn new(
        config: &SessionConfig,
        units: Units,
        steering: Steering,
        token_seed: [u8; 32],
        now: Nanos,
    ) -> Self {
        let largest = units.iter().next().unwrap_or(config.unit_bytes);
        let budget = Budget::new(
            SessionConfig { unit_bytes: largest, ..*config }.packet_bytes_max(),
            config.paths,
        );
        let has_canaries = steering.congestion.is_some_and(|(algorithm, _)| algorithm.uses_marks());
        let path = || Path::new(config.reordering, units, has_canaries, now);
        let all = (0..config.paths).map(|_| path()).collect();
        let pace = Pace::of(config);
        let mut paths = Self {
            all,
            subflows: Subflows::default(),
            congestion: Congestion::new(config, steering),
            pace,
            heard: PathId(0),
            slowest: None,
            first_reported: 0,
            budget,
            tokens: ChaCha20Rng::from_seed(token_seed),
        };
        paths.adopt_allowances(now);
        paths
    }

    /// The unit is decided: paths are only tested for it; one that carried a larger unit passes.
    pub fn unit_decided(&mut self, config: &SessionConfig, now: Nanos) {
        self.pace = Pace::of(config);
        for path in &mut self.all {
            path.challenges.narrow(Units::fixed(config.unit_bytes));
        }
        self.adopt_allowances(now);
    }

    /// Number of paths.
    #[must_use]
    pub fn count(&self) -> u8 {
        self.all.len() as u8
    }

    /// Iterates over the paths with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (PathId, &Path)> {
        (0..).map(PathId).zip(&self.all)
    }

    /// See [`Self::iter`].
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (PathId, &mut Path)> {
        (0..).map(PathId).zip(&mut self.all)
    }

    /// The path that the peer means by a channel, and whether the packet is one to a candidate.
    #[must_use]
    pub fn with_channel(&self, channel: u32) -> Option<(PathId, bool)> {
        PathId::of_channel(channel, self.count())
    }

    /// Paths that units may take in principle: validated, and not silent unless all are.
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

    /// Whether units can take a path other than this one.
    #[must_use]
    pub fn has_other(&self, path: PathId) -> bool {
        self.iter().any(|(id, other)| id != path && other.is_validated() && !other.is_silent)
    }

    /// Paths that may take a unit now.
    #[must_use]
    pub fn open(&self, now: Nanos) -> PathSet {
        let usable = self.for_units();
        self.iter().fold(PathSet::default(), |open, (id, path)| {
            let is_open = usable.has(id) && path.paced_at() <= now;
            if is_open { open.with(id) } else { open }
        })
    }

    /// The path that may take a unit before any is validated: the one on which the peer was heard
    /// last, if packets came from where the peer said it is.
    fn early(&self) -> PathSet {
        let path = &self[self.heard];
        let is_early = path.is_challenged() && path.is_as_stated && self.early_units() > 0;
        if is_early { PathSet::default().with(self.heard) } else { PathSet::default() }
    }

    /// Units that may still leave before any path is validated.
    #[must_use]
    pub fn early_units(&self) -> u8 {
        self.budget.units_left()
    }

    /// No unit leaves any more before its path is validated.
    pub fn end_early(&mut self) {
        self.budget.bar_units();
    }

    fn for_units(&self) -> PathSet {
        let early = self.early();
        if early.is_empty() { self.usable() } else { early }
    }

    /// When one of them may take a unit; `None` if no path is usable.
    #[must_use]
    pub fn open_at(&self) -> Option<Nanos> {
        let usable = self.for_units();
        self.iter().filter(|(id, _)| usable.has(*id)).map(|(_, path)| path.paced_at()).min()
    }

    /// Chooses one of the open paths for one unit.
    pub fn choose(&mut self, open: PathSet) -> Option<PathId> {
        // One that may still fail is no subflow.
        let early = self.early().and(open);
        if early.is_empty() { self.subflows.choose(open) } else { early.next_after(PathId(0)) }
    }

    /// Records that a path, or all of them, went silent.
    pub fn interrupted(&mut self, path: PathId) {
        self.congestion.interrupted(path);
    }

    /// Records that units must no longer take a path if they can take another one.
    pub fn failed(&mut self, path: PathId) {
        self.subflows.failed(path);
    }

    /// Number of other paths on which the peer has reported a packet that must have arrived after one
    /// that left on this path at `sent_at`, so that its report would have named this one, too.
    #[must_use]
    pub fn witnesses(&self, path: PathId, sent_at: Nanos) -> usize {
        // At the latest, and that of others at the earliest.
        let Some(srtt) = self[path].rtt.smoothed() else { return 0 };
        let arrival = sent_at.saturating_add(srtt / 2);
        let others = self.iter().filter(|(id, other)| *id != path && other.is_validated());
        let arrivals = others.filter_map(|(_, other)| {
            Some(other.reported_sent_at.saturating_add(other.rtt.least()? / 2))
        });
        arrivals.filter(|at| *at > arrival).count()
    }

    /// Processes the peer's report about a path, whose newest packet was `echo`. `is_limited`: only
    /// congestion control keeps units back.
    pub fn reported(
        &mut self,
        path: PathId,
        echo: Option<Echo>,
        is_limited: bool,
        now: Nanos,
    ) -> Verdict {
        let account = self[path].account();
        if let Some(echo) = echo {
            self.subflows.heard(path, now);
            let newest = &mut self[path].reported_sent_at;
            *newest = echo.sent_at.max(*newest);
        }
        let own = self[path].rtt.least().unwrap_or(0);
        let validated = || self.iter().map(|(_, path)| path).filter(|path| path.is_validated());
        let slowest = validated().filter_map(|path| path.rtt.least()).max().unwrap_or(own);
        let do_marks_arrive = validated().all(|path| path.marking.is_trusted());
        self.congestion.rely_on_marks(do_marks_arrive, slowest, now);
        let verdict =
            self.congestion.reported(path, &account, (echo, (own, slowest)), is_limited, now);
        let signs = Signs {
            rtt: echo.and_then(|echo| echo.rtt),
            marked: self.congestion.queue_marks(&account),
            is_found: self.congestion.finds_queue(),
        };
        self[path].evidence.reported(&account, signs, now);
        if verdict == Verdict::Changed {
            self.adopt_allowances(now);
        }
        verdict
    }

    fn adopt_allowances(&mut self, now: Nanos) {
        let Self { all, congestion, pace, .. } = self;
        for (id, path) in (0..).map(PathId).zip(all) {
            path.allow(congestion.rate_of(id), *pace, now);
        }
    }

    /// Records that a packet leaves for the candidate of a path. It says nothing about the path.
    pub fn sent_to_candidate(&mut self, path: PathId, wire_bytes: u64, now: Nanos) {
        if let Some(candidate) = self.all[path.index()].candidate_mut() {
            self.budget.sent(&mut candidate.unproven, wire_bytes, now);
        }
    }

    /// Records that a packet leaves on a path; `is_unit`: that it is no control packet.
    pub fn sent(
        &mut self,
        path: PathId,
        (number, is_unit): (u64, bool),
        wire_bytes: u64,
        now: Nanos,
    ) {
        let known = &mut self.all[path.index()];
        if is_unit && known.is_challenged() {
            self.budget.unit_sent();
        } else {
            self.budget.sent(&mut known.unproven, wire_bytes, now);
        }
        known.sent(number, wire_bytes, &mut self.tokens, now);
        self.congestion.sent(wire_bytes, now);
    }

    /// Earliest time at which a control packet that must take this path may leave.
    #[must_use]
    pub fn control_open_at(&self, path: PathId) -> Nanos {
        let known = &self[path];
        known.paced_at().max(self.budget.open_at(&known.unproven))
    }

    /// When a challenge to the candidate of a path may leave; `None` if none has to.
    #[must_use]
    pub fn candidate_due(&self, path: PathId) -> Option<Nanos> {
        let known = &self[path];
        let candidate = known.candidate()?;
        let due = candidate.due()?;
        Some(due.max(self.budget.open_at(&candidate.unproven)))
    }

    /// Earliest time at which a control packet that may take any path may leave. Before any path is
    /// usable, the packet goes to the address where the peer was heard last.
    #[must_use]
    pub fn any_open_at(&self) -> Nanos {
        let has_answered = !self.usable().is_empty();
        if has_answered { 0 } else { self.budget.open_at(&self[self.heard].unproven) }
    }

    /// Draws an unpredictable token for a challenge.
    pub fn new_token(&mut self) -> u64 {
        self.tokens.next_u64()
    }

    /// Records that the peer was heard on a path.
    pub fn heard(&mut self, path: PathId) {
        self.heard = path;
    }

    /// Chooses the path of a control packet that may take any: the one on which the peer was heard
    /// last, if units may take it, too; hearing the peer does not prove that packets reach it
    /// there. `is_lost`: control packets on the previous one seem not to arrive.
    pub fn for_control(&mut self, is_lost: bool) -> PathId {
        let usable = self.usable();
        if is_lost || !usable.has(self.heard) {
            self.heard = usable.next_after(self.heard).unwrap_or(self.heard);
        }
        self.heard
    }

    /// All paths, each call starting with the next one, so that a report that finds no room is sent
    /// soon.
    pub fn in_turn(&mut self) -> impl Iterator<Item = PathId> + use<> {
        let count = self.all.len();
        let first = self.first_reported;
        self.first_reported = (first + 1) % count;
        (first..first + count).map(move |index| PathId((index % count) as u8))
    }

    /// Updates the round-trip time after a sample, or after a path became usable or unusable.
    pub fn measured(&mut self) {
        let usable = self.usable();
        let known = self.iter().filter(|(id, _)| usable.has(*id));
        self.slowest = known.filter_map(|(_, path)| path.rtt.smoothed()).max();
    }

    /// The largest smoothed round-trip time of the usable paths; `None` before the first sample.
    #[must_use]
    pub fn srtt(&self) -> Option<Nanos> {
        self.slowest
    }

    /// The largest time-out of the usable paths.
    #[must_use]
    pub fn timeout(&self) -> Nanos {
        timeout_of(self.slowest)
    }

    /// How long a unit on a path may stay unacknowledged. The unit takes this path; its
    /// acknowledgement may take any.
    #[must_use]
    pub fn timeout_on(&self, path: PathId) -> Nanos {
        let mean = |own: Nanos| own.midpoint(self.slowest.unwrap_or(own));
        timeout_of(self[path].rtt.smoothed().map(mean))
    }

    /// How long to wait for a packet of a path before its contents count as lost. `None` with
    /// reported losses until the peer has reported this packet or a later one: until then the host
    /// may be late or the path down, which probes find out, and no loss is known.
    #[must_use]
    pub fn patience(&self, path: PathId, packet: u64, detection: Detection) -> Option<Nanos> {
        let is_passed = self[path].packets_reported > packet;
        (is_passed || detection == Detection::Timeout).then(|| self.timeout_on(path))
    }

    /// Wire bytes per second that all paths together may carry if each uses its allowance.
    #[must_use]
    pub fn rate(&self) -> u64 {
        let rates = self.iter().map(|(id, _)| self.congestion.rate_of(id));
        rates.fold(0, u64::saturating_add)
    }

    /// What limits all paths together.
    #[must_use]
    pub fn congestion(&self) -> &Congestion {
        &self.congestion
    }

    /// See [`Self::congestion`].
    pub fn congestion_mut(&mut self) -> &mut Congestion {
        &mut self.congestion
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
    use super::super::{Detection, IpVersion, PayloadMode, Version};
    use super::*;

    #[test]
    fn a_set_is_walked_in_a_circle() {
        let set = [1, 4, 31].map(PathId).into_iter().fold(PathSet::default(), PathSet::with);
        let walk: Vec<u8> =
            [0, 1, 3, 4, 30, 31].map(|at| set.next_after(PathId(at)).unwrap().0).to_vec();
        assert_eq!(walk, [1, 4, 4, 31, 31, 1]);
        assert_eq!(PathSet::default().next_after(PathId(3)), None);
        assert!(set.has(PathId(4)) && !set.has(PathId(3)) && !set.is_empty());
    }

    #[test]
    fn control_packets_take_a_path_on_which_the_peer_was_heard_only_if_it_is_validated() {
        let config = SessionConfig {
            version: Version::V6,
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
        let mut paths = Paths::new(&config, units, Steering::default(), [0; 32], 0);
        paths.heard(PathId(1));
        assert_eq!(paths.for_control(false), PathId(1), "none is validated yet");
        paths[PathId(0)].validated();
        paths[PathId(2)].validated();
        paths.heard(PathId(1));
        assert_eq!(paths.for_control(false), PathId(2), "only its challenges are known to arrive");
        paths.heard(PathId(0));
        assert_eq!(paths.for_control(false), PathId(0));
        assert_eq!(paths.for_control(true), PathId(2), "nothing came back on the other");
        paths[PathId(2)].abandon();
        assert_eq!(paths.for_control(false), PathId(0));
    }
}
