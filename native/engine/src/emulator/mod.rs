//! A long-haul link in real time: packets pass a small [`sealane_proto::fabric`], on a dedicated
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
use sealane_proto::link::{LinkConfig, LinkError, Nanos};

use crate::clock::{now, sharpen_timers, timespec};

mod network;
mod packet_socket;
mod relay;
#[cfg(test)]
mod tests;
mod wan;

pub use network::{AccessReport, DirectionReport};
pub use relay::FLOWS_MAX;
pub use wan::WanPort;

use network::{Arrived, Network};

/// Most packets sent in one call, and between two checks for incoming packets.
const BATCH: usize = 64;

/// An interval during which a path is down or longer in both directions, relative to the start of
/// the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spell {
    /// Index of the path.
    pub path: usize,
    /// When it begins.
    pub start_nanos: Nanos,
    /// When it ends: packets then overtake those that are still on a longer way.
    pub end_nanos: Nanos,
    /// How much later packets arrive; `None`: never, as the path is down.
    pub more_nanos: Option<Nanos>,
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
    /// When paths are down or longer. The schedule starts with the emulator.
    pub schedule: Vec<Spell>,
    /// The cable between each host and the switch of its side, in both directions. Without it hosts are at the
    /// switches, and packets between hosts of one side don't pass the emulator's links. Relays have
    /// none.
    pub access: Option<LinkConfig>,
    /// Whether CE becomes ECT(0) on what crosses from the first side to the second, and back.
    pub strips_ce: [bool; 2],
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
    /// The spell's path doesn't exist, or its end is not after its start.
    #[error("schedule: path {path} from {start_nanos} to {end_nanos} ns: no such path or interval")]
    Spell {
        /// Index of the path.
        path: usize,
        /// Start of the spell.
        start_nanos: Nanos,
        /// End of the spell.
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
        for &Spell { path, start_nanos, end_nanos, .. } in &self.schedule {
            if path >= forward || start_nanos >= end_nanos {
                return Err(EmulatorError::Spell { path, start_nanos, end_nanos });
            }
        }
        for link in self.forward.iter().chain(&self.backward).chain(&self.access) {
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
    /// Each host's access link, to its switch and from there.
    pub access: Vec<[AccessReport; 2]>,
    /// Bytes that arrived at each host, by the host that sent them; empty without access links.
    pub arrived_bytes: Vec<Vec<u64>>,
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
    /// The side of each host.
    fn sides(&self) -> Vec<usize>;
    /// Offers each incoming packet to the network.
    fn receive(&mut self, network: &mut Network<Self::Packet>);
    /// Sends packets that entered at one side, and empties the batch. Returns how many packets the
    /// kernel did not accept.
    fn send(&mut self, side: usize, batch: &mut Vec<Arrived<Self::Packet>>) -> u64;
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
        let relay = relay::Relay::bind(forward_to, &config)?;
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
        let wan = wan::Wan::open(ports, mtu, &config)?;
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

    /// Starts or restarts the schedule now.
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
            crate::event::ring(&self.wake);
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
    network: Network<M::Packet>,
    schedule: Vec<Spell>,
    commands: Receiver<Command>,
    /// Packets to be sent, by the side at which they entered.
    batches: [Vec<Arrived<M::Packet>>; 2],
}

impl<M: Medium> Pump<M> {
    fn new(config: EmulatorConfig, medium: M, commands: Receiver<Command>) -> Self {
        let network = Network::new(&config, &medium.sides());
        let batches = [0, 1].map(|_| Vec::with_capacity(BATCH));
        Self { medium, network, schedule: config.schedule, commands, batches }
    }

    fn run(mut self, woken: &OwnedFd) -> EmulatorReport {
        sharpen_timers();
        self.start_schedule();
        loop {
            self.medium.receive(&mut self.network);
            let wait = self.release().map(|at| timespec(at.saturating_sub(now())));
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

    /// Sends the packets that are due. Returns when the next one may be.
    fn release(&mut self) -> Option<Nanos> {
        let time = now();
        loop {
            self.network.take_due(time, &mut self.batches);
            if self.batches.iter().all(Vec::is_empty) {
                return self.network.next_at();
            }
            for (side, batch) in self.batches.iter_mut().enumerate() {
                let scheduled: Vec<Nanos> = batch.iter().map(|arrived| arrived.at).collect();
                let unsent = self.medium.send(side, batch);
                self.network.sent(side, &scheduled, unsent, now());
            }
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
        let absolute = |spell: &Spell| {
            let at = |nanos| start.saturating_add(nanos);
            Spell { start_nanos: at(spell.start_nanos), end_nanos: at(spell.end_nanos), ..*spell }
        };
        let schedule: Vec<_> = self.schedule.iter().map(absolute).collect();
        self.network.set_schedule(&schedule);
    }

    fn report(&mut self) -> EmulatorReport {
        EmulatorReport {
            forward: self.network.direction(0),
            backward: self.network.direction(1),
            access: self.network.access(now()),
            arrived_bytes: self.network.arrived_bytes(),
            medium: self.medium.report(),
            cpu_nanos: crate::clock::thread_cpu(),
        }
    }
}
