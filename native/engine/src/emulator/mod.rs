//! A long-haul link in real time: packets wait in a `Link` in each direction, on a dedicated
//! thread.
//!
//! A [`Medium`] carries the packets: interfaces of a network namespace ([`wan`], real IP packets)
//! or loopback ports ([`relay`], UDP, unprivileged). Both handle single *wire* packets, so a list
//! of segments is never delayed or lost as a unit.

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

/// Most packets sent in one call, and between two checks for incoming packets.
const BATCH: usize = 64;

/// An interval during which a path is down in both directions, relative to the start of the
/// schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outage {
    /// Index of the path.
    pub path: usize,
    /// When it fails.
    pub start_nanos: Nanos,
    /// When it is repaired.
    pub end_nanos: Nanos,
}

/// Configuration of the emulated link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatorConfig {
    /// Parallel paths from the first side to the second. Each flow keeps to one, selected by a hash
    /// of its 5-tuple.
    pub forward: Vec<LinkConfig>,
    /// The same paths back.
    pub backward: Vec<LinkConfig>,
    /// Determines every random choice, and the path of each flow.
    pub seed: u64,
    /// When paths are down. The schedule starts with the emulator.
    pub outages: Vec<Outage>,
    /// Whether corruption also updates TCP's or UDP's checksum, so that only the receiving program
    /// can notice.
    pub corruption_passes_checksum: bool,
}

/// Why an emulator cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// The numbers of paths in the two directions differ, or are zero.
    #[error("{forward} paths forward and {backward} back; both must be equal and at least 1")]
    Paths {
        /// Number of paths forward.
        forward: usize,
        /// Number of paths back.
        backward: usize,
    },
    /// The outage's path doesn't exist, or its end is not after its start.
    #[error("outage of path {path} from {start_nanos} to {end_nanos} ns: no such path or interval")]
    Outage {
        /// Index of the path.
        path: usize,
        /// Start of the outage.
        start_nanos: Nanos,
        /// End of the outage.
        end_nanos: Nanos,
    },
    /// The configuration of a link is not valid.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The kernel refused a socket, memory or a thread.
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

/// Packets that a medium could not carry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MediumReport {
    /// Packets that the kernel dropped before the emulator saw them.
    pub missed_packets: u64,
    /// Packets dropped because they are longer than the MTU.
    pub oversized_packets: u64,
    /// Packets dropped because their source or destination is unknown.
    pub foreign_packets: u64,
    /// Packets between hosts of the same side, which do not cross the link.
    pub local_packets: u64,
}

/// What an emulator has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmulatorReport {
    /// From the first side to the second.
    pub forward: DirectionReport,
    /// From the second side to the first.
    pub backward: DirectionReport,
    /// Packets that could not be carried.
    pub medium: MediumReport,
    /// Processor time of the emulator's thread.
    pub cpu_nanos: Nanos,
}

/// Carries an emulator's packets.
trait Medium: Send + 'static {
    type Packet: Clone + Send;

    /// The descriptors to wait for.
    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>>;
    /// Offers each incoming packet to the direction it belongs to.
    fn receive(&mut self, directions: &mut [Direction<Self::Packet>; 2]);
    /// Sends the packets that left direction `index` and empties the batch. Returns how many
    /// packets the kernel did not accept.
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

    /// The address to which a relay's clients send.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The results so far, or the final ones once stopped.
    pub fn report(&self) -> EmulatorReport {
        let (answer, answered) = bounded(1);
        self.command(Command::Report(answer));
        answered.recv().unwrap_or_else(|_| self.last.clone())
    }

    /// Starts or restarts the schedule of outages now.
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
        // Sending fails only once the thread has ended; then `last` has the results.
        if self.commands.send(command).is_ok() {
            // Writing 1 to an eventfd fails only after 2^64-2 unread ones.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The main loop of an emulator's thread.
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
                // On EINTR, loop again.
                poll(&mut fds, wait.as_ref()).is_ok() && !fds[0].revents().is_empty()
            };
            if is_woken && !self.obey(woken) {
                return self.report();
            }
        }
    }

    /// Sends the packets that are due, which are no more than came in at a time. Returns when the
    /// next is due.
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

    /// Executes commands; returns false after a command to stop.
    fn obey(&mut self, woken: &OwnedFd) -> bool {
        // Only commands write to it; if it is empty, they were read already.
        let _ = rustix::io::read(woken, &mut [0; 8]);
        for command in self.commands.clone().try_iter() {
            match command {
                // The requester may no longer exist.
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
