//! What the socket reports about a received datagram, and how it should send one.

use super::ecn::Ecn;
use super::paths::PathId;

/// Source of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The peer's address on the path that the datagram names.
    Path,
    /// The path's only peer, as far as anybody can tell: the wire doesn't show who sent the datagram
    /// (a queue pair). It may have come from elsewhere than where the path's packets go, so it lets
    /// this end send no more there.
    Unnamed,
    /// The address that the path considers moving to ([`Follow::Candidate`]).
    Candidate,
    /// Another address, which this end may follow if the datagram is authentic: see
    /// [`super::Session::receive`].
    Elsewhere,
    /// An address from which nothing is accepted.
    Foreign,
}

/// What the caller does with the source of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// Nothing.
    Nowhere,
    /// The path's packets go there from now on.
    Path,
    /// It remembers it as the path's candidate, in place of an earlier one: packets with
    /// [`Departure::is_to_candidate`] go there.
    Candidate,
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
    /// It goes to the path's candidate instead of to its address.
    pub is_to_candidate: bool,
    /// The ECN field of its IP header.
    pub ecn: Ecn,
}
