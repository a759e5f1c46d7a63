//! What a socket says of a datagram, and what it is told of one.

use super::ecn::Ecn;
use super::paths::PathId;

/// Where a datagram came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The address that this end sends to on the path that the datagram names.
    Path,
    /// Another one, which this end would follow if the datagram is authentic: see
    /// [`super::Session::receive`].
    Elsewhere,
    /// Another one.
    Foreign,
}

/// What the socket says of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The path whose address of this end it came to.
    pub path: PathId,
    /// Where it came from.
    pub source: Source,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}

/// How a datagram is to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departure {
    /// By which path.
    pub path: PathId,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}
