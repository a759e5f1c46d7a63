//! The daemon's handle on one session: first memories and sockets, then keys and the worker.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use sealane_proto::link::Nanos;
use sealane_proto::session::{
    Detection, IpVersion, PACKETS_PER_KEY, PATHS_MAX, PayloadMode, Plan, PlanRow, Session,
    SessionConfig, SessionKeys, Steering, Units, Version,
};

use super::doorbell::{self, DaemonBell, JobBell};
use super::lanes::Lanes;
use super::layout::Layout;
use super::limits::Limits;
use super::pauses::Pauses;
use super::region::Region;
use super::report::Report;
pub use super::report::{Figures, State};
use super::ring::{DaemonRing, PACKET_MAP_BYTES};
use super::share::{Flow, JobAccount};
use super::wire::{self, Bind, Ends, Refused, Wire, WireAddress};
use super::worker::{JobMemory, Progress, Worker};
use crate::clock::now;
use crate::event;
use crate::latency::{self, Latencies};
use crate::permit::Permit;
use crate::shared_memory::{PeerAccess, SharedMemory};

/// Sizes of a session's packets and queues; both ends use the same units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Entries of each queue, a power of two.
    pub ring_entries: u32,
    /// Payload bytes of a packet, unless the start gives others.
    pub unit_bytes: u16,
    /// Units of a bitmap chunk.
    pub chunk_units: u16,
    /// Messages in flight, a power of two.
    pub slots: u16,
}

/// Results of session establishment.
#[derive(Debug, Clone)]
pub struct StartConfig {
    /// Of packets and frames, as agreed on in establishment.
    pub version: Version,
    /// Destination of each path's packets. The session has this many paths; each uses the next
    /// local end of its kind.
    pub peer_addresses: Vec<WireAddress>,
    /// Connection id in the packets that we receive.
    pub connection_id_local: u64,
    /// Connection id in the packets that we send.
    pub connection_id_peer: u64,
    /// Candidates for the payload bytes of a packet, descending. The session uses the largest that
    /// the first path carries, as determined by the initiator.
    pub units: Units,
    /// Wire bits per second, including headers.
    pub rate_bits_per_second: u64,
    /// How this end steers what it sends.
    pub steering: Steering,
    /// Silence after which the session ends.
    pub idle_timeout_nanos: Nanos,
    /// Known skew of the path: a packet that arrives up to this much later than one sent after it
    /// isn't taken for lost.
    pub reordering_nanos: Nanos,
    /// Whether this side opened the session. It knows the paths (perhaps relays): until a path is
    /// validated, it accepts packets only from `peer_addresses`, and the other side follows its
    /// authentic packets.
    pub is_initiator: bool,
    /// The session ends when this permit no longer holds. `None`: no permit limits it.
    pub permit: Option<Arc<Permit>>,
    /// Threads beside the session's own that seal, send, receive and open for its paths; 0: its own
    /// does. At most one for each path is started.
    pub path_threads: u8,
}

/// Why an endpoint could not be created or started.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// A size is not valid in the ring ABI or for the session machine.
    #[error("{0}")]
    Invalid(String),
    /// The session was already started.
    #[error("the session was already started")]
    Started,
    /// The job has its descriptors, and the session would need others.
    #[error("the job already has memories for another unit")]
    OtherMemories,
    /// The system refused a socket, a memory or a thread.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Draws a seed for [`SessionKeys::token_seed`]. Fails if the system has no random numbers.
pub fn random_seed() -> io::Result<[u8; 32]> {
    let mut seed = [0; 32];
    let length = rustix::rand::getrandom(&mut seed[..], rustix::rand::GetRandomFlags::empty())?;
    (length == seed.len()).then_some(seed).ok_or_else(|| io::ErrorKind::Interrupted.into())
}

/// The descriptors passed to the job's process by SCM_RIGHTS.
#[derive(Debug)]
pub struct JobDescriptors {
    /// The region, read and write.
    pub region: OwnedFd,
    /// Submission queue and the job's consumer index, read and write.
    pub submission: OwnedFd,
    /// Completion queue, bitmap, statistics, read only.
    pub completion: OwnedFd,
    /// The job's end of the doorbell.
    pub bell: JobBell,
}

struct Prepared {
    wires: Vec<Wire>,
    memory: JobMemory,
    bell: DaemonBell,
}

/// The job's descriptors until the job takes them; replaced if the session finds another unit.
pub(super) type ForJob = Arc<Mutex<Option<JobDescriptors>>>;

/// Memories and doorbell shared by job and worker.
pub(super) struct Memories {
    pub(super) layout: Layout,
    pub(super) memory: JobMemory,
    pub(super) bell: DaemonBell,
    pub(super) job: JobDescriptors,
}

impl Memories {
    pub(super) fn new(config: &EndpointConfig, region: Region) -> Result<Self, EndpointError> {
        let layout = Layout {
            entries: config.ring_entries,
            region_bytes: region.size_bytes(),
            slots: config.slots,
            chunk_bytes: u32::from(config.unit_bytes) * u32::from(config.chunk_units),
        };
        let fits_packet_map = usize::from(config.chunk_units) <= 8 * PACKET_MAP_BYTES;
        if !layout.is_valid() || !fits_packet_map {
            return Err(EndpointError::Invalid(format!("sizes are out of range: {layout:?}")));
        }
        let submission = SharedMemory::create(
            "sealane-submission",
            layout.submission_bytes(),
            PeerAccess::Writes,
        )?;
        let completion = SharedMemory::create(
            "sealane-completion",
            layout.completion_bytes(),
            PeerAccess::Reads,
        )?;
        let (bell, job_bell) = doorbell::pair()?;
        let job = JobDescriptors {
            region: region.memory.file().try_clone_to_owned()?,
            submission: submission.file().try_clone_to_owned()?,
            completion: completion.file().try_clone_to_owned()?,
            bell: job_bell,
        };
        let ring = DaemonRing::new(layout, submission, completion);
        Ok(Self { layout, memory: JobMemory { region, ring }, bell, job })
    }
}

/// One session's resources in the daemon.
pub struct Endpoint {
    config: EndpointConfig,
    layout: Layout,
    local_addresses: Vec<WireAddress>,
    unavailable: Vec<String>,
    pinned_bytes: usize,
    prepared: Option<Prepared>,
    account: Option<Arc<JobAccount>>,
    job: ForJob,
    stop: OwnedFd,
    report: Arc<Report>,
    next_plan: Arc<Mutex<Option<Plan>>>,
    is_running: bool,
}

impl Endpoint {
    /// Makes an end for each path that the session may have, and creates the memories. Queue pairs
    /// that can't be had, or would pin more than `pinned_bytes_max` together, are left out
    /// ([`Self::unavailable`]), unless nothing else is wanted.
    ///
    /// The region may have other sessions of the same job.
    ///
    /// With an account, the session shares that job's limits and turns; without one, only its own
    /// limits apply.
    pub fn new(
        config: EndpointConfig,
        region: Region,
        bind_addresses: &[Bind],
        account: Option<Arc<JobAccount>>,
        pinned_bytes_max: usize,
    ) -> Result<Self, EndpointError> {
        let made = Memories::new(&config, region)?;
        if !(1..=usize::from(PATHS_MAX)).contains(&bind_addresses.len()) {
            let count = bind_addresses.len();
            return Err(EndpointError::Invalid(format!(
                "{count} paths; allowed: 1 to {PATHS_MAX}"
            )));
        }
        let (mut wires, mut unavailable, mut pinned_bytes) = (Vec::new(), Vec::new(), 0);
        for address in bind_addresses {
            match Wire::bind(*address) {
                Ok(wire) if pinned_bytes + wire.pinned_bytes() > pinned_bytes_max => {
                    unavailable.push(format!(
                        "{} bytes of pinned memory are too many (fabric.pinned_bytes_max)",
                        pinned_bytes + wire.pinned_bytes()
                    ));
                }
                Ok(wire) => {
                    pinned_bytes += wire.pinned_bytes();
                    wires.push(wire);
                }
                Err(Refused::Socket(error)) => return Err(error.into()),
                Err(Refused::QueuePair(error)) => unavailable.push(error.to_string()),
            }
        }
        if wires.is_empty() {
            return Err(io::Error::other(unavailable.join("; ")).into());
        }
        let local_addresses = wires.iter().map(Wire::local_address).collect::<Result<_, _>>()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let report = Report {
            is_to_drain: AtomicBool::new(false),
            end: Mutex::new(None),
            state: Mutex::new(State::Establishing),
            statistics: Mutex::new(Vec::new()),
            message_sizes: AtomicU64::new(0),
            unit_bytes: AtomicU16::new(config.unit_bytes),
            paths: Mutex::new(Vec::new()),
            sends: Latencies::new(&latency::SENDS),
            changed: eventfd(0, flags).map_err(io::Error::from)?,
            settled: Condvar::new(),
        };
        let Memories { layout, memory, bell, job } = made;
        Ok(Self {
            config,
            layout,
            local_addresses,
            unavailable,
            pinned_bytes,
            prepared: Some(Prepared { wires, memory, bell }),
            account,
            job: Arc::new(Mutex::new(Some(job))),
            stop: eventfd(0, flags).map_err(io::Error::from)?,
            report: Arc::new(report),
            next_plan: Arc::default(),
            is_running: false,
        })
    }

    /// The local address of each path's end; after the start, only of the paths in use.
    pub fn local_addresses(&self) -> &[WireAddress] {
        &self.local_addresses
    }

    /// Why queue pairs were left out, one text for each.
    pub fn unavailable(&self) -> &[String] {
        &self.unavailable
    }

    /// Bytes of memory that are pinned for its queue pairs; after the start, for those in use.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned_bytes
    }

    /// The job's descriptors; can be taken once.
    pub fn take_job_descriptors(&mut self) -> Option<JobDescriptors> {
        self.for_job().take()
    }

    fn for_job(&self) -> MutexGuard<'_, Option<JobDescriptors>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Payload bytes of a packet; final once the session is established.
    pub fn unit_bytes(&self) -> u16 {
        self.report.unit_bytes.load(Ordering::Acquire)
    }

    /// Starts the worker with the keys of this session.
    ///
    /// If the unit differs from the one that the memories were created for, the memories are
    /// created again, at the latest on establishment. This fails once the job has its descriptors.
    pub fn start(&mut self, start: &StartConfig, keys: &SessionKeys) -> Result<(), EndpointError> {
        let unit_of_memories = self.config.unit_bytes;
        let config = SessionConfig {
            version: start.version,
            connection_id_local: start.connection_id_local,
            connection_id_peer: start.connection_id_peer,
            unit_bytes: unit_of_memories,
            // If both occur, the one with the larger headers.
            ip: if start.peer_addresses.iter().any(|peer| peer.network_address().is_ipv6()) {
                IpVersion::V6
            } else {
                IpVersion::V4
            },
            paths: u8::try_from(start.peer_addresses.len()).unwrap_or(u8::MAX),
            chunk_units: self.config.chunk_units,
            slots: self.config.slots,
            rate_bytes_per_second: start.rate_bits_per_second / 8,
            idle_timeout: start.idle_timeout_nanos,
            reordering: start.reordering_nanos,
            detection: Detection::Reports,
            packets_per_key: PACKETS_PER_KEY,
            payload: PayloadMode::Real,
        };
        for unit_bytes in start.units.iter() {
            let config = SessionConfig { unit_bytes, ..config };
            config.validate().map_err(|error| EndpointError::Invalid(error.to_string()))?;
        }
        if !start.units.iter().eq([unit_of_memories]) && self.for_job().is_none() {
            return Err(EndpointError::OtherMemories);
        }
        let stop = self.stop.try_clone()?;
        let Prepared { wires, memory, bell } =
            self.prepared.take().ok_or(EndpointError::Started)?;
        let paths = wire::pair(wires, &start.peer_addresses).map_err(|peer| {
            EndpointError::Invalid(format!("no local end is left for a path to {peer}"))
        })?;
        self.local_addresses = paths.iter().map(Ends::local_address).collect::<Result<_, _>>()?;
        self.pinned_bytes = paths.iter().map(Ends::pinned_bytes).sum();
        let search = (start.units, start.is_initiator);
        let session = Session::searching(config, start.steering, search, keys, now());
        let lanes = match start.path_threads {
            0 => Ok(Lanes::new(paths)),
            threads => {
                let paths = paths.into_iter().map(Ends::into_udp).collect::<Option<_>>();
                let paths = paths.ok_or_else(|| io::Error::other("path threads serve UDP only"));
                paths.and_then(|paths| Lanes::threaded(paths, threads.into(), &session))
            }
        };
        let flow = self.account.take().map(Flow::new).transpose();
        let (lanes, flow) = lanes.and_then(|lanes| Ok((lanes, flow?))).inspect_err(|_| {
            let reason = "session.endpoint.resources";
            memory.ring.publish_closed(reason);
            self.report.set(State::Closed { reason: reason.into() });
        })?;
        let progress = Progress::new(&memory.region);
        let worker = Worker {
            shape: self.config,
            job: Arc::clone(&self.job),
            lanes,
            local_addresses: self.local_addresses.clone(),
            follows_peer: !start.is_initiator,
            pauses: Pauses::new(&session),
            session,
            layout: self.layout,
            memory,
            bell: Some(bell),
            stop,
            report: Arc::clone(&self.report),
            next_plan: Arc::clone(&self.next_plan),
            limits: Limits::new(now()),
            permit: start.permit.clone(),
            flow,
            progress,
        };
        let thread = std::thread::Builder::new().name("sealane-session".into());
        // The worker owns everything it needs and reports its own end, so its handle is not needed.
        thread.spawn(move || worker.run())?;
        self.is_running = true;
        Ok(())
    }

    /// Sets the plan for sends that leave the scheme open, from the next submission on.
    pub fn install_plan(&self, rows: &[PlanRow]) -> Result<(), EndpointError> {
        let plan = Plan::new(rows, self.unit_bytes())
            .map_err(|error| EndpointError::Invalid(error.to_string()))?;
        *self.next_plan.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
        Ok(())
    }

    /// The state of the session; clears the notification.
    pub fn state(&self) -> State {
        event::clear(&self.report.changed);
        self.report.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Readable when `state` has changed since its last call.
    pub fn notification(&self) -> BorrowedFd<'_> {
        self.report.changed.as_fd()
    }

    /// What its worker counts; for readers on any thread, also after the session's end.
    pub fn figures(&self) -> Figures {
        Figures(Arc::clone(&self.report))
    }

    /// Stops new sends at either end, and closes the session once nothing is in progress. If it is
    /// closed before that, the peer gets the same close code: the time was up.
    pub fn drain(&self) {
        self.report.is_to_drain.store(true, Ordering::Release);
        event::ring(&self.stop);
    }

    /// Ends the session and waits until it is closed, which takes one turn of its worker. The
    /// worker then repeats CLOSE on its own for some round trips and ends.
    ///
    /// The reason is an id that `state` and the job's ring then report, unless the session had
    /// already ended: then the earlier reason stays.
    pub fn close(&mut self, reason: &str) {
        if std::mem::take(&mut self.is_running) {
            let asked = Some(reason.to_owned());
            *self.report.end.lock().unwrap_or_else(PoisonError::into_inner) = asked;
            event::ring(&self.stop);
            let state = self.report.state.lock().unwrap_or_else(PoisonError::into_inner);
            let is_open = |state: &mut State| !matches!(state, State::Closed { .. });
            drop(self.report.settled.wait_while(state, is_open));
        } else if let Some(Prepared { memory, .. }) = self.prepared.take() {
            memory.ring.publish_closed(reason);
            self.report.set(State::Closed { reason: reason.to_owned() });
        }
        *self.for_job() = None;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close("session.closed.requested");
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rustix::event::{PollFd, PollFlags, poll};
    use sealane_proto::aead::Secret;
    use sealane_proto::session::Reliability;

    use super::super::completion::Status;
    use super::super::entry::{Operation, Submission, Terms};
    use super::super::job::Job;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn job_of(endpoint: &mut Endpoint) -> Job {
        let JobDescriptors { region, submission, completion, bell } =
            endpoint.take_job_descriptors().unwrap();
        Job::attach(region, submission, completion, bell, None).unwrap()
    }

    /// An end whose peer is silent.
    fn started() -> Endpoint {
        let config =
            EndpointConfig { ring_entries: 16, unit_bytes: 1408, chunk_units: 16, slots: 16 };
        let bind = [Bind::Udp("127.0.0.1:0".parse().unwrap())];
        let mut endpoint =
            Endpoint::new(config, Region::new(1 << 16).unwrap(), &bind, None, 0).unwrap();
        let own = endpoint.local_addresses().to_vec();
        let start = StartConfig {
            version: Version::V6,
            peer_addresses: own,
            connection_id_local: 1,
            connection_id_peer: 2,
            units: Units::fixed(1408),
            rate_bits_per_second: 1_000_000_000,
            steering: Steering::default(),
            idle_timeout_nanos: 60_000_000_000,
            reordering_nanos: 0,
            is_initiator: true,
            permit: None,
            path_threads: 0,
        };
        let secret = |byte: u8| Secret::take(&mut [byte; 32]);
        let keys = SessionKeys { send: secret(1), receive: secret(2), token_seed: [3; 32] };
        endpoint.start(&start, &keys).unwrap();
        endpoint
    }

    #[test]
    fn what_the_job_submits_after_a_drain_is_refused_even_if_the_worker_sees_it_first() {
        let mut endpoint = started();
        let mut job = job_of(&mut endpoint);
        // As if `drain` had come this far when the job posts.
        endpoint.report.is_to_drain.store(true, Ordering::Release);
        let kind = Operation::Send(Terms::new(Reliability::SelectiveRepeat));
        job.post(&Submission { kind, offset: 0, length: 8, user_data: 7 }).unwrap();
        let until = Instant::now() + PATIENCE;
        let found = loop {
            let left = until.checked_duration_since(Instant::now()).expect("a completion in time");
            let timeout = left.try_into().unwrap();
            let doorbell = job.doorbell();
            poll(&mut [PollFd::from_borrowed_fd(doorbell, PollFlags::IN)], Some(&timeout)).unwrap();
            if let Some(found) = job.completions(1).unwrap().pop() {
                break found;
            }
        };
        assert_eq!((found.user_data, found.status), (7, Status::Draining));
    }
}
