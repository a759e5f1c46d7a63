//! A long-haul link in real time: packets wait in a `Link` each way, on a thread of their own.
//!
//! What carries the packets is a [`Medium`]: interfaces of a network namespace ([`wan`], real IP
//! packets) or loopback ports ([`relay`], UDP, without privileges). Both handle *wire* packets: no
//! list of segments is ever delayed or lost as one.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use sealane_proto::link::{Delivery, LinkConfig, LinkError, Nanos};

use crate::clock::{now, sharpen_timers, timespec};

mod direction;
mod packet_socket;
mod relay;
#[cfg(test)]
mod tests;
mod wan;

pub use direction::DirectionReport;
pub use relay::FLOWS_MAX;
pub use wan::WanPort;

use direction::Direction;

/// Packets sent in one call at most, and between two looks at what came in.
const BATCH: usize = 64;

/// An interval in which a path is down both ways, from the start of the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outage {
    /// Index of the path.
    pub path: usize,
    /// When it fails.
    pub start_nanos: Nanos,
    /// When it is repaired.
    pub end_nanos: Nanos,
}

/// What the emulated link is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatorConfig {
    /// Parallel paths from the first side to the second; each flow keeps to one, chosen by a hash
    /// of its 5-tuple.
    pub forward: Vec<LinkConfig>,
    /// The same paths back.
    pub backward: Vec<LinkConfig>,
    /// Decides every random choice, and which flow takes which path.
    pub seed: u64,
    /// When paths are down. The schedule starts with the emulator.
    pub outages: Vec<Outage>,
    /// Corruption mends TCP's and UDP's checksum, so that only the receiving program can notice.
    pub corruption_passes_checksum: bool,
}

/// An emulator that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// Not as many paths one way as the other, or none at all.
    #[error("{forward} paths forward and {backward} back: as many each way, one at least")]
    Paths {
        /// Number of paths forward.
        forward: usize,
        /// Number of paths back.
        backward: usize,
    },
    /// An outage of a path that is not there, or one that ends before it starts.
    #[error("outage of path {path} from {start_nanos} to {end_nanos} ns: no such path or interval")]
    Outage {
        /// Index of the path.
        path: usize,
        /// When it would fail.
        start_nanos: Nanos,
        /// When it would be repaired.
        end_nanos: Nanos,
    },
    /// A link that cannot be.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The kernel refuses a socket, memory or a thread.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl EmulatorConfig {
    fn validate(&self) -> Result<(), EmulatorError> {
        let (forward, backward) = (self.forward.len(), self.backward.len());
        if forward == 0 || forward != backward {
            return Err(EmulatorError::Paths { forward, backward });
        }
        for &Outage { path, start_nanos, end_nanos } in &self.outages {
            if path >= forward || start_nanos >= end_nanos {
                return Err(EmulatorError::Outage { path, start_nanos, end_nanos });
            }
        }
        for link in self.forward.iter().chain(&self.backward) {
            link.validate()?;
        }
        Ok(())
    }
}

/// What a medium could not carry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MediumReport {
    /// Packets that the kernel dropped before the emulator saw them.
    pub missed_packets: u64,
    /// Packets longer than the MTU, which no wire would carry: dropped.
    pub oversized_packets: u64,
    /// Packets for nobody here, or from nobody known: dropped.
    pub foreign_packets: u64,
    /// Packets between hosts of one side, which do not cross the link.
    pub local_packets: u64,
}

/// What an emulator has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmulatorReport {
    /// From the first side to the second.
    pub forward: DirectionReport,
    /// And back.
    pub backward: DirectionReport,
    /// What could not be carried.
    pub medium: MediumReport,
    /// Processor time of the emulator's thread.
    pub cpu_nanos: Nanos,
}

/// What carries the packets of an emulator.
trait Medium: Send + 'static {
    type Packet: Clone + Send;

    /// What to wait for.
    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>>;
    /// Offers what has come in to the direction it goes in.
    fn receive(&mut self, directions: &mut [Direction<Self::Packet>; 2]);
    /// Sends what came out of direction `index` and empties the batch. Returns how many packets
    /// the kernel did not take.
    fn send(&mut self, index: usize, batch: &mut Vec<Delivery<Self::Packet>>) -> u64;
    fn report(&mut self) -> MediumReport;
}

enum Command {
    Report(Sender<EmulatorReport>),
    StartSchedule,
    Stop,
}

/// A running emulator; stops when dropped.
#[derive(Debug)]
pub struct Emulator {
    address: Option<SocketAddr>,
    commands: Sender<Command>,
    wake: OwnedFd,
    thread: Option<JoinHandle<EmulatorReport>>,
    last: EmulatorReport,
}

impl Emulator {
    /// Relays UDP between a new loopback port and `forward_to`.
    pub fn relay(config: EmulatorConfig, forward_to: SocketAddr) -> Result<Self, EmulatorError> {
        config.validate()?;
        let relay = relay::Relay::bind(forward_to, config.seed)?;
        let address = relay.address()?;
        Self::start(config, relay, Some(address))
    }

    /// Forwards IP packets of up to `mtu` bytes between interfaces of this thread's namespace.
    pub fn wan(
        config: EmulatorConfig,
        ports: Vec<WanPort>,
        mtu: u16,
    ) -> Result<Self, EmulatorError> {
        config.validate()?;
        let wan = wan::Wan::open(ports, mtu, config.seed, config.corruption_passes_checksum)?;
        Self::start(config, wan, None)
    }

    fn start<M: Medium>(
        config: EmulatorConfig,
        medium: M,
        address: Option<SocketAddr>,
    ) -> Result<Self, EmulatorError> {
        let wake =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let woken = wake.try_clone()?;
        let (commands, received) = unbounded();
        let thread = std::thread::Builder::new()
            .name("sealane-emulator".into())
            .spawn(move || Pump::new(config, medium, received).run(&woken))?;
        let last = EmulatorReport::default();
        Ok(Self { address, commands, wake, thread: Some(thread), last })
    }

    /// Where a relay's clients send to.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// What happened so far; once stopped, what had happened then.
    pub fn report(&self) -> EmulatorReport {
        let (answer, answered) = bounded(1);
        self.command(Command::Report(answer));
        answered.recv().unwrap_or_else(|_| self.last.clone())
    }

    /// Starts the schedule of outages (again), now.
    pub fn start_schedule(&self) {
        self.command(Command::StartSchedule);
    }

    /// Stops the thread and waits for it; packets in transit are dropped.
    pub fn stop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.command(Command::Stop);
            self.last = thread.join().unwrap_or_default();
        }
    }

    fn command(&self, command: Command) {
        // Refused only once the thread has ended, when `last` has the answers.
        if self.commands.send(command).is_ok() {
            // An eventfd takes a one unless it was already told 2^64-2 times.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The loop of an emulator's thread.
struct Pump<M: Medium> {
    medium: M,
    directions: [Direction<M::Packet>; 2],
    outages: Vec<Outage>,
    commands: Receiver<Command>,
    batch: Vec<Delivery<M::Packet>>,
}

impl<M: Medium> Pump<M> {
    fn new(config: EmulatorConfig, medium: M, commands: Receiver<Command>) -> Self {
        let directions = [
            Direction::new(&config.forward, config.seed, 0),
            Direction::new(&config.backward, config.seed, 1),
        ];
        let batch = Vec::with_capacity(BATCH);
        Self { medium, directions, outages: config.outages, commands, batch }
    }

    fn run(mut self, woken: &OwnedFd) -> EmulatorReport {
        sharpen_timers();
        self.start_schedule();
        loop {
            self.medium.receive(&mut self.directions);
            let due = [self.release(0), self.release(1)];
            let wait = due.into_iter().flatten().min().map(|at| timespec(at.saturating_sub(now())));
            let is_woken = {
                let descriptors = std::iter::once(woken.as_fd()).chain(self.medium.descriptors());
                let mut fds: Vec<_> =
                    descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                // EINTR: look again.
                poll(&mut fds, wait.as_ref()).is_ok() && !fds[0].revents().is_empty()
            };
            if is_woken && !self.obey(woken) {
                return self.report();
            }
        }
    }

    /// Sends what is due, which is no more than what came in at a time. Returns when the next is.
    fn release(&mut self, index: usize) -> Option<Nanos> {
        let direction = &mut self.directions[index];
        let time = now();
        loop {
            direction.take_due(time, &mut self.batch);
            if self.batch.is_empty() {
                return direction.next_at();
            }
            let scheduled: Vec<Nanos> = self.batch.iter().map(|delivery| delivery.at).collect();
            let unsent = self.medium.send(index, &mut self.batch);
            direction.sent(&scheduled, unsent, now());
        }
    }

    /// Carries out commands; false after the one to stop.
    fn obey(&mut self, woken: &OwnedFd) -> bool {
        // Only ever written to by commands; empty means that they were read before.
        let _ = rustix::io::read(woken, &mut [0; 8]);
        for command in self.commands.clone().try_iter() {
            match command {
                // Whoever asked may have gone.
                Command::Report(answer) => drop(answer.send(self.report())),
                Command::StartSchedule => self.start_schedule(),
                Command::Stop => return false,
            }
        }
        true
    }

    fn start_schedule(&mut self) {
        let start = now();
        for direction in &mut self.directions {
            direction.set_outages(&self.outages, start);
        }
    }

    fn report(&mut self) -> EmulatorReport {
        EmulatorReport {
            forward: self.directions[0].report(),
            backward: self.directions[1].report(),
            medium: self.medium.report(),
            cpu_nanos: crate::clock::thread_cpu(),
        }
    }
}
