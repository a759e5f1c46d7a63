//! The daemon's handle on one session: memories and socket first, then keys and the worker.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sealane_proto::link::Nanos;
use sealane_proto::session::{
    Detection, IpVersion, PACKETS_PER_KEY, PayloadMode, Plan, PlanRow, Session, SessionConfig,
    SessionKeys,
};

use super::layout::Layout;
use super::limits::Limits;
use super::pauses::Pauses;
use super::region::{JobAccess, SharedMemory};
use super::ring::{DaemonRing, PACKET_MAP_BYTES};
use super::share::{Flow, JobAccount};
pub use super::worker::State;
use super::worker::{JobMemory, Progress, Report, Worker};
use crate::clock::now;
use crate::udp::Udp;

/// Shape of a session's packets and memories; both ends use the same units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Address of the data socket; port 0 takes a free one.
    pub bind_address: SocketAddr,
    /// Bytes of the job's region.
    pub region_bytes: u64,
    /// Entries of either queue, a power of two.
    pub ring_entries: u32,
    /// Payload bytes of a packet.
    pub unit_bytes: u16,
    /// Units of a bitmap chunk.
    pub chunk_units: u16,
    /// Messages in flight, a power of two.
    pub slots: u16,
}

/// What establishment decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartConfig {
    /// Where packets go.
    pub peer_address: SocketAddr,
    /// Names the packets that come to us.
    pub connection_id_local: u64,
    /// Names the packets that we send.
    pub connection_id_peer: u64,
    /// Wire bits per second, headers included.
    pub rate_bits_per_second: u64,
    /// Silence after which the session ends.
    pub idle_timeout_nanos: Nanos,
    /// Skew of the path that is known: what comes this much later than what was sent after it is
    /// not lost.
    pub reordering_nanos: Nanos,
    /// The side that opened the session knows the path (a relay, perhaps) and accepts packets from
    /// `peer_address` only; the other one follows its authentic packets until the path is validated.
    pub is_initiator: bool,
}

/// Why an endpoint could not be made or started.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// A size is not one the ring ABI or the machine can have.
    #[error("{0}")]
    Invalid(String),
    /// The session was started before.
    #[error("the session has been started already")]
    Started,
    /// The system refused a socket, a memory or a thread.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// What the job's process gets, by SCM_RIGHTS.
#[derive(Debug)]
pub struct JobDescriptors {
    /// The region, read and write.
    pub region: OwnedFd,
    /// Submission queue and the job's consumer index, read and write.
    pub submission: OwnedFd,
    /// Completion queue, bitmap, statistics, read only.
    pub completion: OwnedFd,
    /// The job's end of the doorbell.
    pub doorbell: OwnedFd,
}

struct Prepared {
    udp: Udp,
    memory: JobMemory,
    doorbell: OwnedFd,
}

/// What the job and the worker share.
struct Memories {
    layout: Layout,
    memory: JobMemory,
    doorbell: OwnedFd,
    job: JobDescriptors,
}

impl Memories {
    fn new(config: &EndpointConfig) -> Result<Self, EndpointError> {
        let layout = Layout {
            entries: config.ring_entries,
            region_bytes: config.region_bytes,
            slots: config.slots,
            chunk_bytes: u32::from(config.unit_bytes) * u32::from(config.chunk_units),
        };
        let is_told = usize::from(config.chunk_units) <= 8 * PACKET_MAP_BYTES;
        if !layout.is_valid() || !is_told {
            return Err(EndpointError::Invalid(format!("sizes are out of range: {layout:?}")));
        }
        let region = SharedMemory::create(
            "sealane-region",
            config.region_bytes as usize,
            JobAccess::Writes,
        )?;
        let submission = SharedMemory::create(
            "sealane-submission",
            layout.submission_bytes(),
            JobAccess::Writes,
        )?;
        let completion = SharedMemory::create(
            "sealane-completion",
            layout.completion_bytes(),
            JobAccess::Reads,
        )?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (doorbell, job_doorbell) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .map_err(io::Error::from)?;
        let job = JobDescriptors {
            region: region.file().try_clone_to_owned()?,
            submission: submission.file().try_clone_to_owned()?,
            completion: completion.file().try_clone_to_owned()?,
            doorbell: job_doorbell,
        };
        let ring = DaemonRing::new(layout, submission, completion);
        Ok(Self { layout, memory: JobMemory { region, ring }, doorbell, job })
    }
}

/// One session's resources in the daemon.
pub struct Endpoint {
    config: EndpointConfig,
    layout: Layout,
    local_address: SocketAddr,
    prepared: Option<Prepared>,
    account: Option<Arc<JobAccount>>,
    job: Option<JobDescriptors>,
    stop: OwnedFd,
    report: Arc<Report>,
    next_plan: Arc<Mutex<Option<Plan>>>,
    is_running: bool,
}

impl Endpoint {
    /// Binds the socket and makes the memories.
    ///
    /// The session is one of that job, whose limits and turns it shares; of none, it has no limits
    /// but its own.
    pub fn new(
        config: EndpointConfig,
        account: Option<Arc<JobAccount>>,
    ) -> Result<Self, EndpointError> {
        let made = Memories::new(&config)?;
        let udp = Udp::bind(config.bind_address)?;
        let local_address = udp.local_address()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let report = Report {
            is_to_drain: AtomicBool::new(false),
            is_to_end: AtomicBool::new(false),
            state: Mutex::new(State::Establishing),
            statistics: Mutex::new(Vec::new()),
            changed: eventfd(0, flags).map_err(io::Error::from)?,
            settled: Condvar::new(),
        };
        let Memories { layout, memory, doorbell, job } = made;
        Ok(Self {
            config,
            layout,
            local_address,
            prepared: Some(Prepared { udp, memory, doorbell }),
            account,
            job: Some(job),
            stop: eventfd(0, flags).map_err(io::Error::from)?,
            report: Arc::new(report),
            next_plan: Arc::default(),
            is_running: false,
        })
    }

    /// Makes the memories anew for units of another size, before the worker starts and the job has
    /// them. The socket stays.
    pub fn set_unit_bytes(&mut self, unit_bytes: u16) -> Result<(), EndpointError> {
        let (Some(prepared), Some(job)) = (&mut self.prepared, &mut self.job) else {
            return Err(EndpointError::Started);
        };
        let config = EndpointConfig { unit_bytes, ..self.config };
        let made = Memories::new(&config)?;
        self.config = config;
        self.layout = made.layout;
        prepared.memory = made.memory;
        prepared.doorbell = made.doorbell;
        *job = made.job;
        Ok(())
    }

    /// Where the data socket is bound.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    /// The job's descriptors, once.
    pub fn take_job_descriptors(&mut self) -> Option<JobDescriptors> {
        self.job.take()
    }

    /// Starts the worker with the keys of this session.
    pub fn start(&mut self, start: &StartConfig, keys: &SessionKeys) -> Result<(), EndpointError> {
        let config = SessionConfig {
            connection_id_local: start.connection_id_local,
            connection_id_peer: start.connection_id_peer,
            unit_bytes: self.config.unit_bytes,
            ip: match start.peer_address {
                SocketAddr::V4(_) => IpVersion::V4,
                SocketAddr::V6(_) => IpVersion::V6,
            },
            paths: 1,
            chunk_units: self.config.chunk_units,
            slots: self.config.slots,
            rate_bytes_per_second: start.rate_bits_per_second / 8,
            idle_timeout: start.idle_timeout_nanos,
            reordering: start.reordering_nanos,
            detection: Detection::Reports,
            packets_per_key: PACKETS_PER_KEY,
            payload: PayloadMode::Real,
        };
        config.validate().map_err(|error| EndpointError::Invalid(error.to_string()))?;
        let stop = self.stop.try_clone()?;
        let Prepared { udp, memory, doorbell } =
            self.prepared.take().ok_or(EndpointError::Started)?;
        let worker = Worker {
            session: Session::new(config, keys, now()),
            udp,
            peer: start.peer_address,
            follows_peer: !start.is_initiator,
            pauses: Pauses::new(&config),
            layout: self.layout,
            memory,
            doorbell: Some(doorbell),
            stop,
            report: Arc::clone(&self.report),
            next_plan: Arc::clone(&self.next_plan),
            limits: Limits::new(now()),
            flow: self.account.take().map(Flow::new).transpose()?,
            progress: Progress::default(),
        };
        let thread = std::thread::Builder::new().name("sealane-session".into());
        // The worker owns all it needs and reports its end; it is not waited for by its handle.
        thread.spawn(move || worker.run())?;
        self.is_running = true;
        Ok(())
    }

    /// Puts a plan in force for sends that leave the scheme open, from the next submission on.
    pub fn install_plan(&self, rows: &[PlanRow]) -> Result<(), EndpointError> {
        let plan = Plan::new(rows, self.config.unit_bytes)
            .map_err(|error| EndpointError::Invalid(error.to_string()))?;
        *self.next_plan.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
        Ok(())
    }

    /// Where the session stands; the notification is taken back.
    pub fn state(&self) -> State {
        let mut count = [0; 8];
        // Nothing to read means no change since the last look.
        let _ = rustix::io::read(&self.report.changed, &mut count);
        self.report.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Readable when `state` has changed since it was last asked.
    pub fn notification(&self) -> BorrowedFd<'_> {
        self.report.changed.as_fd()
    }

    /// The counters, in the order of `statistics::names`; empty before the start.
    pub fn statistics(&self) -> Vec<u64> {
        self.report.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has the session send nothing new, at either end, and close when nothing is under way. If it
    /// is closed before, the reason is the same: it had no more time.
    pub fn drain(&self) {
        self.report.is_to_drain.store(true, Ordering::Release);
        // An eventfd refuses a one only after 2^64-2 of them.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// Ends the session and waits until it is closed: a turn of its worker, no more. The worker
    /// repeats CLOSE for some round trips on its own and then ends.
    pub fn close(&mut self) {
        if std::mem::take(&mut self.is_running) {
            self.report.is_to_end.store(true, Ordering::Release);
            // An eventfd refuses a one only after 2^64-2 of them.
            let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
            let state = self.report.state.lock().unwrap_or_else(PoisonError::into_inner);
            let is_open = |state: &mut State| !matches!(state, State::Closed { .. });
            drop(self.report.settled.wait_while(state, is_open));
        } else if self.prepared.take().is_some() {
            self.report.set(State::Closed { reason: "session.closed.requested".into() });
        }
        self.job = None;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}
