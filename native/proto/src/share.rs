//! One rate shared by many senders: deficit round robin by wire bytes, first over users, then over
//! the jobs of a user, then over the flows of a job (decisions 42 and 78).
//!
//! Sans-IO: flows [`SharedRate::ask`] and [`SharedRate::rest`]; the caller notifies the flows that
//! [`SharedRate::next_granted`] returns. The turn goes to the user that is furthest behind the
//! others, and likewise to a job of that user and to a flow of that job. Nothing is reserved: capacity that
//! nobody waits for is open to all, and what a flow returns goes to the next one. A deficit
//! outlives a turn, up to [`LAG_QUANTA`], so a flow whose thread is late to ask again does not lose
//! its place to a job with many threads.

use std::collections::{BTreeMap, VecDeque};

use crate::link::{NANOS_PER_SECOND, Nanos};
use crate::session::BURST_PACKETS;

/// Line time of one grant: long compared with taking a lock, short compared with a round trip …
const QUANTUM_NANOS: Nanos = 250_000;
/// … and at least two packets of a usual path, at most one list of datagrams.
const QUANTUM_BYTES_MIN: u64 = 3_000;
const QUANTUM_BYTES_MAX: u64 = 65_536;
/// Amount that may leave at once after the line was idle: this line time …
const BURST_NANOS: Nanos = 1_000_000;
/// … and at least the burst of one session with packets of 1500 bytes.
const BURST_BYTES_MIN: u64 = BURST_PACKETS * 1500;
/// Furthest that a user, job or flow may be behind or ahead of the others when it starts to wait, in
/// quanta.
const LAG_QUANTA: u64 = 16;

/// Identifies a user; returned by [`SharedRate::add_user`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct UserId(u64);

/// Identifies a job; returned by [`SharedRate::add_job`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(u64);

/// Identifies a flow; returned by [`SharedRate::add_flow`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowId(u64);

/// The answer to [`SharedRate::ask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// This many wire bytes may be sent now; a packet that starts within them may end beyond.
    Granted(u64),
    /// Not yet: ask again at this time, or when notified.
    Wait(Nanos),
}

/// What a job has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JobUse {
    /// Wire bytes sent by its flows, including control packets.
    pub wire_bytes: u64,
    /// How often one of its flows had to wait.
    pub waits: u64,
    /// Total time that they waited.
    pub waited_nanos: Nanos,
}

/// A token bucket in bytes times nanoseconds per second, so that nothing is rounded.
#[derive(Debug)]
struct Bucket {
    rate: u64,
    level: i128,
    level_max: i128,
    at: Nanos,
}

impl Bucket {
    fn new(rate_bytes_per_second: u64) -> Self {
        let rate = rate_bytes_per_second.max(1);
        let level_max = scaled(burst(rate));
        Self { rate, level: level_max, level_max, at: 0 }
    }

    fn refill(&mut self, now: Nanos) {
        let earned = i128::from(now.saturating_sub(self.at)) * i128::from(self.rate);
        self.level = (self.level + earned).min(self.level_max);
        self.at = self.at.max(now);
    }

    fn take(&mut self, bytes: u64) {
        self.level -= scaled(bytes);
    }

    fn give(&mut self, bytes: u64) {
        self.level = (self.level + scaled(bytes)).min(self.level_max);
    }

    fn holds(&self, bytes: u64) -> bool {
        self.level >= scaled(bytes)
    }

    /// When it will hold that many bytes if nothing is taken.
    fn holds_at(&self, bytes: u64) -> Nanos {
        let missing = (scaled(bytes) - self.level).max(0);
        let nanos = (missing + i128::from(self.rate) - 1) / i128::from(self.rate);
        self.at.saturating_add(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

fn scaled(bytes: u64) -> i128 {
    i128::from(bytes) * i128::from(NANOS_PER_SECOND)
}

fn burst(rate: u64) -> u64 {
    per(rate, BURST_NANOS).max(BURST_BYTES_MIN)
}

fn per(rate: u64, nanos: Nanos) -> u64 {
    (u128::from(rate) * u128::from(nanos) / u128::from(NANOS_PER_SECOND)) as u64
}

/// A user, or a job of a user: what is shared by the jobs or flows in it.
#[derive(Debug)]
struct Share {
    /// Its own limit, if it is below the whole rate.
    ceiling: Option<Bucket>,
    /// Bytes it has had, shifted so that those that wait stay close to each other.
    served: u64,
    /// Value of `served` of its most recently served job or flow.
    floor: u64,
    /// Number of its flows that wait.
    waiting: u32,
}

impl Share {
    fn new(ceiling: Option<u64>, served: u64) -> Self {
        Self { ceiling: ceiling.map(Bucket::new), served, floor: 0, waiting: 0 }
    }

    /// Starts to wait with one more flow, close to the others.
    fn join(&mut self, floor: u64, lag: u64) {
        if self.waiting == 0 {
            self.served = near(self.served, floor, lag);
        }
        self.waiting += 1;
    }

    fn is_below(&self, bytes: u64) -> bool {
        self.ceiling.as_ref().is_none_or(|ceiling| ceiling.holds(bytes))
    }

    fn below_at(&self, bytes: u64) -> Nanos {
        self.ceiling.as_ref().map_or(0, |ceiling| ceiling.holds_at(bytes))
    }
}

#[derive(Debug)]
struct Job {
    user: UserId,
    share: Share,
    usage: JobUse,
}

#[derive(Debug)]
struct Flow {
    job: JobId,
    /// Like the job's `served`.
    served: u64,
    turn: Turn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The flow wants nothing.
    Resting,
    Waiting {
        since: Nanos,
    },
    /// The flow may send this many bytes but has not been notified yet.
    Granted {
        allowance: u64,
    },
    /// The flow may send this many bytes.
    Sending {
        allowance: u64,
    },
}

/// The scheduler.
#[derive(Debug)]
pub struct SharedRate {
    bucket: Bucket,
    quantum: u64,
    users: BTreeMap<UserId, Share>,
    jobs: BTreeMap<JobId, Job>,
    flows: BTreeMap<FlowId, Flow>,
    /// Flows that wait.
    waiting: Vec<FlowId>,
    /// Value of `served` of the most recently served user.
    floor: u64,
    granted: VecDeque<FlowId>,
    ids: u64,
}

impl SharedRate {
    /// Creates an idle line with this rate.
    #[must_use]
    pub fn new(rate_bytes_per_second: u64) -> Self {
        let rate = rate_bytes_per_second.max(1);
        Self {
            bucket: Bucket::new(rate),
            quantum: per(rate, QUANTUM_NANOS).clamp(QUANTUM_BYTES_MIN, QUANTUM_BYTES_MAX),
            users: BTreeMap::new(),
            jobs: BTreeMap::new(),
            flows: BTreeMap::new(),
            waiting: Vec::new(),
            floor: 0,
            granted: VecDeque::new(),
            ids: 0,
        }
    }

    // Commands.

    /// Adds a user whose jobs get at most `rate_bytes_per_second`, even on an idle line.
    pub fn add_user(&mut self, rate_bytes_per_second: u64) -> UserId {
        let id = UserId(self.next_id());
        self.users.insert(id, Share::new(self.ceiling(rate_bytes_per_second), self.floor));
        id
    }

    /// Removes a user that has no jobs left.
    pub fn remove_user(&mut self, user: UserId) {
        self.users.remove(&user);
    }

    /// Adds a job that gets at most `rate_bytes_per_second`, even on an idle line.
    ///
    /// # Panics
    /// If the user doesn't exist.
    pub fn add_job(&mut self, user: UserId, rate_bytes_per_second: u64) -> JobId {
        let id = JobId(self.next_id());
        let share = Share::new(self.ceiling(rate_bytes_per_second), self.users[&user].floor);
        self.jobs.insert(id, Job { user, share, usage: JobUse::default() });
        id
    }

    fn ceiling(&self, rate_bytes_per_second: u64) -> Option<u64> {
        Some(rate_bytes_per_second).filter(|rate| *rate < self.bucket.rate)
    }

    /// Removes a job that has no flows left.
    pub fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// Adds a flow to a job.
    ///
    /// # Panics
    /// If the job doesn't exist.
    pub fn add_flow(&mut self, job: JobId) -> FlowId {
        let served = self.jobs[&job].share.floor;
        let id = FlowId(self.next_id());
        self.flows.insert(id, Flow { job, served, turn: Turn::Resting });
        id
    }

    /// Removes a flow. `wire_bytes`: bytes it has sent since its last report.
    pub fn remove_flow(&mut self, flow: FlowId, wire_bytes: u64, now: Nanos) {
        self.rest(flow, wire_bytes, now);
        self.flows.remove(&flow);
    }

    // Inputs.

    /// Asks for a grant for a flow with packets to send. `wire_bytes`: bytes it has sent since its
    /// last report, including control packets. Unused bytes of its grant return to the line; bytes
    /// beyond the grant put it ahead of the others.
    pub fn ask(&mut self, id: FlowId, wire_bytes: u64, now: Nanos) -> Answer {
        let Some(flow) = self.flows.get(&id) else { return Answer::Wait(Nanos::MAX) };
        let is_new = matches!(flow.turn, Turn::Resting | Turn::Sending { .. });
        self.settle(id, wire_bytes, now);
        if is_new {
            self.join(id, now);
        }
        self.distribute(now, Some(id));
        let Some(flow) = self.flows.get_mut(&id) else { return Answer::Wait(Nanos::MAX) };
        if let Turn::Granted { allowance } = flow.turn {
            flow.turn = Turn::Sending { allowance };
            return Answer::Granted(allowance);
        }
        if let Some(job) = self.jobs.get_mut(&flow.job) {
            job.usage.waits += u64::from(is_new);
        }
        Answer::Wait(self.turn_at(id))
    }

    /// Reports that a flow has nothing more to send. `wire_bytes`: bytes sent since its last
    /// report.
    pub fn rest(&mut self, id: FlowId, wire_bytes: u64, now: Nanos) {
        if let Some(flow) = self.flows.get_mut(&id) {
            if let Turn::Granted { allowance } = flow.turn {
                flow.turn = Turn::Sending { allowance };
            }
            self.settle(id, wire_bytes, now);
            self.leave(id, Turn::Resting, now);
            self.distribute(now, None);
        }
    }

    // Outputs.

    /// Returns a flow that got a grant while another one asked or reported; it must ask again.
    pub fn next_granted(&mut self) -> Option<FlowId> {
        self.granted.pop_front()
    }

    // Queries.

    /// What a job has used so far.
    #[must_use]
    pub fn job_use(&self, job: JobId) -> JobUse {
        self.jobs.get(&job).map_or_else(JobUse::default, |job| job.usage)
    }

    fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// Accounts for the sent bytes and ends a grant that the flow knows about.
    fn settle(&mut self, id: FlowId, wire_bytes: u64, now: Nanos) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let mut allowance = 0;
        if let Turn::Sending { allowance: granted } = flow.turn {
            allowance = granted;
            flow.turn = Turn::Resting;
        }
        if let Some(job) = self.jobs.get_mut(&flow.job) {
            job.usage.wire_bytes += wire_bytes;
        }
        self.refill(now);
        let ahead = wire_bytes.saturating_sub(allowance);
        self.charge(id, ahead, allowance.saturating_sub(wire_bytes));
    }

    /// Starts to wait, close to the others: bytes sent while nobody had to wait are not held
    /// against it.
    fn join(&mut self, id: FlowId, now: Nanos) {
        let lag = LAG_QUANTA * self.quantum;
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Some(job) = self.jobs.get_mut(&flow.job) else { return };
        let Some(user) = self.users.get_mut(&job.user) else { return };
        flow.served = near(flow.served, job.share.floor, lag);
        flow.turn = Turn::Waiting { since: now };
        job.share.join(user.floor, lag);
        user.join(self.floor, lag);
        self.waiting.push(id);
    }

    /// Ends the flow's wait with the turn `turn`.
    fn leave(&mut self, id: FlowId, turn: Turn, now: Nanos) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Turn::Waiting { since } = flow.turn else { return };
        flow.turn = turn;
        self.waiting.retain(|waiting| *waiting != id);
        if let Some(job) = self.jobs.get_mut(&flow.job) {
            job.share.waiting -= 1;
            job.usage.waited_nanos += now.saturating_sub(since);
            if let Some(user) = self.users.get_mut(&job.user) {
                user.waiting -= 1;
            }
        }
    }

    /// Grants quanta while the line has any; the flow that is asking needs no notification.
    fn distribute(&mut self, now: Nanos, asking: Option<FlowId>) {
        self.refill(now);
        while self.bucket.holds(self.quantum) {
            let Some((.., (.., id))) = self.turns().min() else { return };
            self.leave(id, Turn::Granted { allowance: self.quantum }, now);
            let Some(flow) = self.flows.get(&id) else { return };
            let Some(job) = self.jobs.get_mut(&flow.job) else { return };
            let Some(user) = self.users.get_mut(&job.user) else { return };
            self.floor = self.floor.max(user.served);
            user.floor = user.floor.max(job.share.served);
            job.share.floor = job.share.floor.max(flow.served);
            self.charge(id, self.quantum, 0);
            if asking != Some(id) {
                self.granted.push_back(id);
            }
        }
    }

    fn refill(&mut self, now: Nanos) {
        self.bucket.refill(now);
        let jobs = self.jobs.values_mut().map(|job| &mut job.share);
        let ceilings = self.users.values_mut().chain(jobs).filter_map(|each| each.ceiling.as_mut());
        ceilings.for_each(|ceiling| ceiling.refill(now));
    }

    /// The waiting flows that may send, as sort keys; the smallest, which is furthest behind, is
    /// next.
    fn turns(&self) -> impl Iterator<Item = Place> + '_ {
        self.waiting.iter().filter_map(|id| {
            let (place, user, job) = self.place(*id)?;
            (user.is_below(self.quantum) && job.is_below(self.quantum)).then_some(place)
        })
    }

    /// The flow's sort key, and what it has its share of.
    fn place(&self, id: FlowId) -> Option<(Place, &Share, &Share)> {
        let flow = self.flows.get(&id)?;
        let job = self.jobs.get(&flow.job)?;
        let user = self.users.get(&job.user)?;
        let of_job = (job.share.served, flow.job, flow.served, id);
        Some(((user.served, job.user, of_job), user, &job.share))
    }

    /// Earliest turn of a waiting flow if those before it use theirs.
    fn turn_at(&self, id: FlowId) -> Nanos {
        let Some((place, user, job)) = self.place(id) else { return Nanos::MAX };
        let before = self.turns().filter(|other| *other < place).count() as u64;
        let at = self.bucket.holds_at(self.quantum * (before + 1));
        at.max(user.below_at(self.quantum)).max(job.below_at(self.quantum))
    }

    /// Takes bytes from the line for a flow, and returns others.
    fn charge(&mut self, id: FlowId, taken: u64, given: u64) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let Some(job) = self.jobs.get_mut(&flow.job) else { return };
        let Some(user) = self.users.get_mut(&job.user) else { return };
        let shares = [&mut user.ceiling, &mut job.share.ceiling];
        for bucket in std::iter::once(&mut self.bucket).chain(shares.into_iter().flatten()) {
            bucket.take(taken);
            bucket.give(given);
        }
        for served in [&mut flow.served, &mut job.share.served, &mut user.served] {
            *served = (*served + taken).saturating_sub(given);
        }
    }
}

/// How far behind a flow's user, job and the flow itself are; the ids decide between equals.
type Place = (u64, UserId, (u64, JobId, u64, FlowId));

fn near(value: u64, floor: u64, lag: u64) -> u64 {
    value.clamp(floor.saturating_sub(lag), floor.saturating_add(lag))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RATE: u64 = 125_000_000;
    const PACKET: u64 = 1500;

    /// A flow's behaviour: it has `backlog` bytes to send, in packets, and acts `latency` after it
    /// was notified or its time came.
    #[derive(Debug, Clone, Copy)]
    struct Load {
        job: usize,
        latency: Nanos,
        backlog: u64,
    }

    fn greedy(job: usize) -> Load {
        Load { job, latency: 0, backlog: u64::MAX }
    }

    struct World {
        rate: SharedRate,
        jobs: Vec<JobId>,
        flows: Vec<(FlowId, Load, Nanos)>,
        sent: Vec<u64>,
    }

    impl World {
        /// Jobs of a user each.
        fn new(ceilings: &[u64], loads: &[Load]) -> Self {
            let users: Vec<_> = ceilings.iter().map(|most| (RATE, vec![*most])).collect();
            Self::of_users(&users, loads)
        }

        /// Users with their ceiling, and the ceilings of the jobs of each.
        fn of_users(users: &[(u64, Vec<u64>)], loads: &[Load]) -> Self {
            let mut rate = SharedRate::new(RATE);
            let mut jobs = Vec::new();
            for (most, ceilings) in users {
                let user = rate.add_user(*most);
                jobs.extend(ceilings.iter().map(|most| rate.add_job(user, *most)));
            }
            let flows = loads.iter().map(|load| (rate.add_flow(jobs[load.job]), *load, 0));
            let flows: Vec<_> = flows.collect();
            let sent = vec![0; flows.len()];
            Self { rate, jobs, flows, sent }
        }

        /// Runs the flows until `end`; each acts at its time or when it is notified.
        fn run(&mut self, end: Nanos) {
            loop {
                let next = self.flows.iter().enumerate().map(|(index, (.., at))| (*at, index));
                let Some((now, index)) = next.min().filter(|(at, _)| *at < end) else { return };
                self.flows[index].2 = self.work(index, now);
                while let Some(granted) = self.rate.next_granted() {
                    let granted = self.flows.iter_mut().find(|(id, ..)| *id == granted).unwrap();
                    granted.2 = granted.2.min(now + granted.1.latency);
                }
            }
        }

        fn work(&mut self, index: usize, now: Nanos) -> Nanos {
            let (id, load, _) = self.flows[index];
            let mut unreported = 0;
            while load.backlog > self.sent[index] {
                match self.rate.ask(id, unreported, now) {
                    Answer::Wait(at) => return at.max(now + 1) + load.latency,
                    Answer::Granted(allowance) => unreported = allowance.div_ceil(PACKET) * PACKET,
                }
                self.sent[index] += unreported;
            }
            self.rate.rest(id, unreported, now);
            Nanos::MAX
        }

        fn shares(&self) -> Vec<f64> {
            let total: u64 = self.jobs.iter().map(|job| self.rate.job_use(*job).wire_bytes).sum();
            let share = |job: &JobId| self.rate.job_use(*job).wire_bytes as f64 / total as f64;
            self.jobs.iter().map(share).collect()
        }

        fn total(&self) -> u64 {
            self.sent.iter().sum()
        }
    }

    fn jain(shares: &[f64]) -> f64 {
        let sum: f64 = shares.iter().sum();
        sum * sum / (shares.len() as f64 * shares.iter().map(|share| share * share).sum::<f64>())
    }

    #[test]
    fn jobs_share_alike_however_many_flows_they_have() {
        let loads = [0, 1, 1, 1, 1, 1, 2, 2].map(greedy);
        let mut world = World::new(&[RATE; 3], &loads);
        world.run(NANOS_PER_SECOND);
        assert!(jain(&world.shares()) > 0.999, "{:?}", world.shares());
        let flows: Vec<f64> = world.sent[1..6].iter().map(|sent| *sent as f64).collect();
        assert!(jain(&flows) > 0.999, "{flows:?}");
    }

    #[test]
    fn users_share_alike_however_many_jobs_they_have_and_so_do_the_jobs_of_one() {
        let loads = [0, 1, 2, 2, 3, 4].map(greedy);
        let mut world = World::of_users(&[(RATE, vec![RATE]), (RATE, vec![RATE; 4])], &loads);
        world.run(NANOS_PER_SECOND);
        let shares = world.shares();
        assert!((shares[0] - 0.5).abs() < 0.01, "{shares:?}");
        assert!(jain(&shares[1..]) > 0.999, "{shares:?}");
    }

    #[test]
    fn a_user_has_no_more_than_its_ceiling_over_all_its_jobs() {
        let users = [(RATE / 10, vec![RATE; 3]), (RATE, vec![RATE])];
        let mut world = World::of_users(&users, &[0, 1, 2, 3].map(greedy));
        world.run(NANOS_PER_SECOND);
        let used = |job: &JobId| world.rate.job_use(*job).wire_bytes;
        let capped: u64 = world.jobs[..3].iter().map(used).sum();
        let ceiling = RATE / 10;
        assert!(capped <= ceiling + burst(ceiling) + 3 * world.rate.quantum, "{capped}");
        assert!(capped >= ceiling, "{capped}");
        assert!(world.total() >= RATE);
    }

    #[test]
    fn a_flow_that_is_late_to_ask_again_keeps_its_share() {
        let late = Load { latency: 1_000_000, ..greedy(0) };
        let mut world = World::new(&[RATE; 2], &[late, greedy(1), greedy(1), greedy(1)]);
        world.run(NANOS_PER_SECOND);
        // It can get at most one grant per millisecond.
        let quantum = world.rate.quantum as f64;
        let possible = (quantum * 1000.0 / RATE as f64).min(0.5);
        assert!(world.shares()[0] > 0.9 * possible, "{:?}", world.shares());
    }

    #[test]
    fn what_one_job_does_not_want_another_has() {
        let small = Load { backlog: 1_000_000, ..greedy(0) };
        let mut world = World::new(&[RATE; 2], &[small, greedy(1)]);
        world.run(NANOS_PER_SECOND);
        assert_eq!(world.rate.job_use(world.jobs[0]).wire_bytes, world.sent[0]);
        let most = RATE + burst(RATE) + 2 * world.rate.quantum;
        assert!(world.total() <= most, "{}", world.total());
        assert!(world.total() >= RATE, "nothing is reserved: {}", world.total());
        let mut alone = World::new(&[RATE; 2], &[greedy(0)]);
        alone.run(NANOS_PER_SECOND);
        assert!(alone.total() >= RATE);
    }

    #[test]
    fn a_job_has_no_more_than_its_ceiling_and_holds_nobody_up() {
        let mut world = World::new(&[RATE / 10, RATE], &[greedy(0), greedy(0), greedy(1)]);
        world.run(NANOS_PER_SECOND);
        let capped = world.rate.job_use(world.jobs[0]).wire_bytes;
        let ceiling = RATE / 10;
        assert!(capped <= ceiling + burst(ceiling) + 3 * world.rate.quantum, "{capped}");
        assert!(capped >= ceiling, "{capped}");
        assert!(world.total() >= RATE);
    }

    #[test]
    fn what_was_sent_unasked_counts_against_the_next_turns() {
        let mut rate = SharedRate::new(RATE);
        let user = rate.add_user(RATE);
        let jobs = [rate.add_job(user, RATE), rate.add_job(user, RATE)];
        let flows = jobs.map(|job| rate.add_flow(job));
        // The line is exhausted, and both flows wait.
        while let Answer::Granted(bytes) = rate.ask(flows[0], 0, 0) {
            rate.rest(flows[0], bytes, 0);
        }
        assert!(matches!(rate.ask(flows[1], 0, 0), Answer::Wait(_)));
        // The second sends eight quanta of control packets, twice what the first has had.
        rate.ask(flows[1], 8 * rate.quantum, 1);
        let mut now = 1;
        let mut turns = Vec::new();
        for _ in 0..16 {
            now += QUANTUM_NANOS;
            let (first, second) = (rate.ask(flows[0], 0, now), rate.ask(flows[1], 0, now));
            for (flow, answer) in [(0, first), (1, second)] {
                if let Answer::Granted(bytes) = answer {
                    turns.push(flow);
                    rate.rest(flows[flow], bytes, now);
                }
            }
        }
        assert_eq!(turns[..3], [0, 0, 0]);
        assert!(turns.contains(&1));
    }

    #[test]
    fn waiting_is_counted_until_the_grant_or_until_it_is_given_up() {
        let mut rate = SharedRate::new(RATE);
        let user = rate.add_user(RATE);
        let job = rate.add_job(user, RATE);
        let [first, second] = [rate.add_flow(job), rate.add_flow(job)];
        while let Answer::Granted(bytes) = rate.ask(first, 0, 0) {
            rate.rest(first, bytes, 0);
        }
        assert!(matches!(rate.ask(second, 0, 0), Answer::Wait(_)));
        assert!(matches!(rate.ask(second, 0, 10), Answer::Wait(_)));
        rate.rest(second, 0, 100);
        rate.rest(second, 0, 200);
        assert_eq!(rate.job_use(job).waits, 2);
        assert_eq!(rate.job_use(job).waited_nanos, 100);
        rate.rest(first, 0, QUANTUM_NANOS);
        assert_eq!(rate.job_use(job).waited_nanos, 100 + QUANTUM_NANOS);
        assert_eq!(rate.next_granted(), None, "nobody waits");
    }

    proptest! {
        /// The rate and burst are never exceeded, every flow with work is served, and the line
        /// never idles.
        #[test]
        fn any_load_is_served_within_the_rate(
            loads in prop::collection::vec(
                (0_usize..4, 0_u64..2_000_000, 1_u64..40_000_000), 1..12),
        ) {
            let load = |(job, latency, backlog)| Load { job, latency, backlog };
            let loads: Vec<Load> = loads.into_iter().map(load).collect();
            let mut world = World::new(&[RATE; 4], &loads);
            let end = NANOS_PER_SECOND / 4;
            world.run(end);
            let most = per(RATE, end) + burst(RATE) + (loads.len() as u64 + 1) * 2 * QUANTUM_BYTES_MAX;
            prop_assert!(world.total() <= most);
            for (load, sent) in loads.iter().zip(&world.sent) {
                let least = per(RATE, end) / 4 / loads.len() as u64;
                let slow = world.rate.quantum * (end / (load.latency + 4_000_000));
                prop_assert!(*sent >= load.backlog.min(least).min(slow), "{load:?} {sent}");
            }
        }
    }
}
