//! What the socket reports about a received datagram, and how it should send one.

use super::ecn::Ecn;
use super::paths::PathId;

/// Source of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The peer's address on the path that the datagram names.
    Path,
    /// Another address, which this end follows if the datagram is authentic: see
    /// [`super::Session::receive`].
    Elsewhere,
    /// Any other address.
    Foreign,
}

/// What the socket reports about a received datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The path on whose local address it arrived.
    pub path: PathId,
    /// Its source.
    pub source: Source,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}

/// How to send a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// The path to use.
    pub path: PathId,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}
