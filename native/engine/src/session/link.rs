//! One path's way to the network: its socket, used by the worker itself or by a path thread, or its
//! queue pair.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use sealane_proto::session::Train;
use sealane_verbs::{QueuePair, QueuePairAddress, SEGMENTS_MAX};

use super::outbound::{Batch, SendCounters};
use super::path_threads::Port;
use crate::udp::Udp;

/// A socket or queue pair.
#[derive(Debug)]
pub(super) enum Link {
    /// The worker's own.
    Own {
        /// The socket.
        udp: Box<Udp>,
        /// Results of sending.
        counters: SendCounters,
    },
    /// A path thread's.
    Threaded(Port),
    /// A queue pair, which the worker uses itself.
    Verbs {
        /// The queue pair.
        pair: Box<QueuePair>,
        /// Results of sending.
        counters: SendCounters,
    },
}

impl Link {
    /// A socket that the worker uses itself.
    pub(super) fn own(udp: Udp) -> Self {
        Self::Own { udp: Box::new(udp), counters: SendCounters::default() }
    }

    /// A socket that a path thread uses.
    pub(super) fn threaded(port: Port) -> Self {
        Self::Threaded(port)
    }

    /// A queue pair, connected to a peer's.
    pub(super) fn verbs(mut pair: Box<QueuePair>, peer: QueuePairAddress) -> Self {
        pair.set_peer(peer);
        Self::Verbs { pair, counters: SendCounters::default() }
    }

    /// What to wait for so that something arrives, and so that a blocked batch may go; none if
    /// another thread waits.
    pub(super) fn poll_fd(&self, wants_datagrams: bool, is_blocked: bool) -> Option<PollFd<'_>> {
        let mut wanted = PollFlags::empty();
        Some(match self {
            Self::Own { udp, .. } => {
                wanted.set(PollFlags::IN, wants_datagrams);
                wanted.set(PollFlags::OUT, is_blocked);
                PollFd::from_borrowed_fd(udp.as_fd(), wanted)
            }
            Self::Verbs { pair, .. } => {
                wanted.set(PollFlags::IN, wants_datagrams || is_blocked || !pair.is_up());
                PollFd::from_borrowed_fd(pair.event(), wanted)
            }
            Self::Threaded(_) => return None,
        })
    }

    /// Announces that the thread will sleep on [`Self::poll_fd`]; false if there is something to do.
    pub(super) fn fall_asleep(&mut self, wants_datagrams: bool, is_blocked: bool) -> bool {
        match self {
            Self::Verbs { pair, .. } => pair.fall_asleep(wants_datagrams || is_blocked),
            Self::Own { .. } | Self::Threaded(_) => true,
        }
    }

    /// Takes what `poll` has found.
    pub(super) fn woken(&mut self, found: PollFlags) {
        if let Self::Verbs { pair, .. } = self
            && !found.is_empty()
        {
            pair.woken(found.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL));
        }
    }

    /// Time until it needs attention although nothing arrives, if it does.
    pub(super) fn due_in(&self) -> Option<Duration> {
        match self {
            Self::Verbs { pair, .. } => pair.due_in(),
            Self::Own { .. } | Self::Threaded(_) => None,
        }
    }

    /// How often its device failed.
    pub(super) fn failures(&self) -> u64 {
        match self {
            Self::Verbs { pair, .. } => pair.failures(),
            Self::Own { .. } | Self::Threaded(_) => 0,
        }
    }

    /// An empty batch: its packets are sealed where they are sent.
    pub(super) fn new_train(&self) -> Train {
        match self {
            Self::Own { .. } | Self::Verbs { .. } => Train::default(),
            Self::Threaded(_) => Train::deferred(),
        }
    }

    /// Most datagrams of a batch.
    pub(super) fn segments_max(&self) -> usize {
        match self {
            Self::Own { udp, .. } => udp.segments_max(),
            Self::Threaded(port) => port.segments_max(),
            Self::Verbs { .. } => SEGMENTS_MAX,
        }
    }

    /// Sends a batch, whose packets may be gone afterwards. False if it is not accepted at present.
    pub(super) fn send(&mut self, to: SocketAddr, train: &mut Train, batch: Batch) -> bool {
        match self {
            Self::Own { udp, counters } => batch.send(udp, (to, train), counters),
            Self::Threaded(port) => port.send(to, train, batch),
            Self::Verbs { pair, counters } => {
                match pair.send(train.sealed(), batch.segment_bytes) {
                    Ok(false) => false,
                    sent => {
                        counters.count(sent.is_ok(), batch.segments as u64);
                        true
                    }
                }
            }
        }
    }

    /// Counts a batch that is given up.
    pub(super) fn lost(&mut self, batch: Batch) {
        match self {
            Self::Own { counters, .. } | Self::Verbs { counters, .. } => {
                counters.count(false, batch.segments as u64);
            }
            Self::Threaded(port) => port.lost(batch),
        }
    }

    /// Whether a batch that was not accepted may be now.
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Own { .. } | Self::Verbs { .. } => false,
            Self::Threaded(port) => port.has_room(),
        }
    }

    /// Sets the peer's address.
    pub(super) fn set_peer(&self, peer: SocketAddr) {
        if let Self::Threaded(port) = self {
            port.set_peer(peer);
        }
    }

    /// Results of sending so far.
    pub(super) fn counters(&self) -> SendCounters {
        match self {
            Self::Own { counters, .. } | Self::Verbs { counters, .. } => *counters,
            Self::Threaded(port) => port.counters(),
        }
    }

    /// Number of receive calls that returned data.
    pub(super) fn receive_calls(&self) -> u64 {
        match self {
            Self::Own { udp, .. } => udp.calls(),
            Self::Threaded(port) => port.receive_calls(),
            Self::Verbs { pair, .. } => pair.calls(),
        }
    }

    /// Datagrams that the kernel dropped so far because the socket's buffer was full. A queue pair
    /// does not tell.
    pub(super) fn receive_drops(&self) -> u64 {
        match self {
            Self::Own { udp, .. } => udp.drops(),
            Self::Threaded(port) => port.receive_drops(),
            Self::Verbs { .. } => 0,
        }
    }
}
