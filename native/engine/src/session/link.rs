//! One path's way to the network: its socket, used by the worker itself or by a path thread.

use std::net::SocketAddr;

use sealane_proto::session::Train;

use super::outbound::{Batch, SendCounters};
use super::path_threads::Port;
use crate::udp::Udp;

/// A socket.
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

    /// The socket, if it is the worker's.
    pub(super) fn udp(&self) -> Option<&Udp> {
        match self {
            Self::Own { udp, .. } => Some(udp),
            Self::Threaded(_) => None,
        }
    }

    /// An empty batch: its packets are sealed where they are sent.
    pub(super) fn new_train(&self) -> Train {
        match self {
            Self::Own { .. } => Train::default(),
            Self::Threaded(_) => Train::deferred(),
        }
    }

    /// Most datagrams of a batch.
    pub(super) fn segments_max(&self) -> usize {
        match self {
            Self::Own { udp, .. } => udp.segments_max(),
            Self::Threaded(port) => port.segments_max(),
        }
    }

    /// Sends a batch, whose packets may be gone afterwards. False if it is not accepted at present.
    pub(super) fn send(&mut self, to: SocketAddr, train: &mut Train, batch: Batch) -> bool {
        match self {
            Self::Own { udp, counters } => batch.send(udp, (to, train), counters),
            Self::Threaded(port) => port.send(to, train, batch),
        }
    }

    /// Counts a batch that is given up.
    pub(super) fn lost(&mut self, batch: Batch) {
        match self {
            Self::Own { counters, .. } => counters.count(false, batch.segments as u64),
            Self::Threaded(port) => port.lost(batch),
        }
    }

    /// Whether a batch that was not accepted may be now.
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Own { .. } => false,
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
            Self::Own { counters, .. } => *counters,
            Self::Threaded(port) => port.counters(),
        }
    }

    /// Number of receive calls that returned data.
    pub(super) fn receive_calls(&self) -> u64 {
        match self {
            Self::Own { udp, .. } => udp.calls(),
            Self::Threaded(port) => port.receive_calls(),
        }
    }

    /// Datagrams that the kernel dropped so far because the socket's buffer was full.
    pub(super) fn receive_drops(&self) -> u64 {
        match self {
            Self::Own { udp, .. } => udp.drops(),
            Self::Threaded(port) => port.receive_drops(),
        }
    }
}
