//! What a session has counted, and what keeps it from sending more.

use crate::counters;

use super::ecn::Ecn;
use super::gaps::LossCounts;
use super::path::PathAccount;
use super::{Session, State};

counters! {
    /// Counters since the start of the session. Bytes and packets are of UDP datagrams; wire bytes
    /// include IP and UDP headers.
    pub struct SessionStatistics {
        /// Datagrams sent.
        pub packets_sent: u64,
        /// Wire bytes of all of them.
        pub wire_bytes_sent: u64,
        /// Datagrams with a data unit, retransmissions included.
        pub data_packets_sent: u64,
        /// Datagrams with a parity unit, retransmissions included.
        pub parity_packets_sent: u64,
        /// Data or parity units sent again.
        pub retransmitted_packets: u64,
        /// Datagrams with control frames.
        pub control_packets_sent: u64,
        /// Authentic datagrams received.
        pub packets_received: u64,
        /// Wire bytes of those.
        pub wire_bytes_received: u64,
        /// Data and parity units accepted.
        pub units_received: u64,
        /// Units of a selective-repeat message that had landed before.
        pub duplicates: u64,
        /// Units of an erasure-coded block that was whole before they came.
        pub surplus: u64,
        /// Units of a message that had completed before they came.
        pub late: u64,
        /// Datagrams that failed authentication.
        pub forged: u64,
        /// Packet numbers seen before, or older than the replay window.
        pub replayed: u64,
        /// Datagrams with a wrong length, version or content.
        pub malformed: u64,
        /// Units of a message for which no receive was posted.
        pub unposted: u64,
        /// Parity units dropped because the private scratch was full.
        pub scratch_full: u64,
        /// Data units that were computed from parity.
        pub decoded_units: u64,
        /// Erasure-coded messages that needed a retransmission.
        pub fallbacks: u64,
        /// Times that sending paused because the peer had gone silent.
        pub stalls: u64,
        /// Payload bytes of sends that completed `Ok`.
        pub payload_bytes_sent: u64,
        /// Payload bytes of receives that completed `Ok`.
        pub payload_bytes_received: u64,
        /// Sends that completed `Ok`.
        pub sends_completed: u64,
        /// Receives that completed `Ok`.
        pub receives_completed: u64,
        /// Requests that completed otherwise.
        pub failed: u64,
        /// Smoothed round trip, in nanoseconds (0 before the first): of the slowest path in use.
        pub srtt_nanos: u64,
        /// Retransmission time-out in force, in nanoseconds.
        pub rto_nanos: u64,
        /// Datagrams for another connection or channel.
        pub misdirected: u64,
        /// Datagrams from an address that is none of the session's.
        pub foreign_packets: u64,
        /// Datagrams under a key that is gone or can't be in use yet.
        pub unknown_epoch: u64,
        /// Key updates of what this end sends.
        pub key_updates_sent: u64,
        /// Key updates of the peer.
        pub key_updates_received: u64,
        /// Authentic datagrams that arrived marked CE.
        pub ce_received: u64,
        /// Datagrams of this end that arrived marked CE, as the peer has counted.
        pub ce_echoed: u64,
        /// 1 while what this end sends is marked ECN-capable.
        pub is_ecn_capable: u64,
        /// Packets of this end that the peer counted as lost and that have not come since.
        pub lost_packets: u64,
        /// Runs of packets that were lost one after the other, as the peer counted.
        pub lost_runs: u64,
        /// Units of this end that the peer had when they came again.
        pub spurious_retransmissions: u64,
        /// Packets of the peer that were counted as lost here and have not come since.
        pub missing_packets: u64,
        /// Runs of those.
        pub missing_runs: u64,
        /// Packets of the peer that came after they were counted as lost.
        pub reordered_packets: u64,
        /// Transmissions of this end that were lost by the peer's report.
        pub reported_losses: u64,
        /// Transmissions of this end that were lost by their time-out.
        pub timeouts: u64,
        /// Packets sent for nothing but to show the peer what was lost before them.
        pub probes_sent: u64,
        /// Time in which sending paused because the peer was silent, in nanoseconds.
        pub stalled_nanos: u64,
        /// Wire bytes that this end may send a second: the session's, or what its circuit breaker
        /// has left of it.
        pub rate_bytes_per_second: u64,
        /// Times that the circuit breaker cut the rate.
        pub breaker_trips: u64,
        /// Largest IP packet that the path is known to carry (0 before it is validated).
        pub path_mtu_bytes: u64,
        /// Paths that are validated, and not given up.
        pub paths_validated: u64,
        /// Times that a path was passed over because it had gone silent.
        pub path_silences: u64,
    }
}

/// What keeps a session from sending more at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendLimit {
    /// Nothing is posted.
    Idle,
    /// The peer has posted no receive for the next message.
    Credit,
    /// The rate: there are units to send.
    Pacing,
    /// Units were lost and are sent again, or have been and are not acknowledged yet.
    Loss,
    /// All has been sent and waits for its acknowledgement.
    Flight,
    /// The peer is silent, and units are held back; or the path is not validated yet.
    Stalled,
}

impl Session {
    /// Counters since the start.
    #[must_use]
    pub fn statistics(&self) -> SessionStatistics {
        let (key_updates_sent, key_updates_received) = self.protection.key_updates();
        let (reported_losses, timeouts) = self.sender.losses();
        let ours = self.paths.iter().map(|(_, path)| path.peer_losses).sum::<LossCounts>();
        let theirs = self.paths.iter().map(|(_, path)| path.gaps.counts()).sum::<LossCounts>();
        let paths = || self.paths.iter().map(|(_, path)| path);
        let mut statistics = SessionStatistics {
            lost_packets: ours.lost.saturating_sub(ours.found),
            lost_runs: ours.runs,
            spurious_retransmissions: ours.duplicates,
            missing_packets: theirs.lost - theirs.found,
            missing_runs: theirs.runs,
            reordered_packets: theirs.found,
            reported_losses,
            timeouts,
            key_updates_sent,
            key_updates_received,
            rate_bytes_per_second: self.paths.rate().min(self.config.rate_bytes_per_second),
            breaker_trips: self.paths.trips(),
            path_mtu_bytes: self.path_mtu_bytes,
            ce_received: paths().map(|path| path.arrived.ce).sum(),
            ce_echoed: paths().map(|path| path.marking.peer().ce).sum(),
            is_ecn_capable: u64::from(paths().any(|path| path.marking.codepoint() != Ecn::NotEct)),
            paths_validated: paths().filter(|path| path.is_validated()).count() as u64,
            decoded_units: self.receiver.decoded_units(),
            srtt_nanos: self.paths.srtt().unwrap_or(0),
            rto_nanos: self.paths.timeout(),
            ..self.statistics
        };
        self.events.count_into(&mut statistics);
        statistics
    }

    /// What is known of the packets of each path, in the order of their ids.
    pub fn path_accounts(&self) -> impl Iterator<Item = PathAccount> {
        self.paths.iter().map(|(_, path)| path.account())
    }

    /// Wire bytes sent so far (also in [`Self::statistics`], but cheaper here).
    #[must_use]
    pub fn wire_bytes_sent(&self) -> u64 {
        self.statistics.wire_bytes_sent
    }

    /// What keeps this end from sending more.
    #[must_use]
    pub fn limit(&self) -> SendLimit {
        let (sender, is_established) = (&self.sender, self.state == State::Established);
        let has_work = sender.has_new() || sender.has_outstanding() || sender.is_without_credit();
        if !has_work {
            SendLimit::Idle
        } else if self.is_stalled || !is_established {
            SendLimit::Stalled
        } else if sender.is_recovering() {
            SendLimit::Loss
        } else if sender.has_new() {
            SendLimit::Pacing
        } else if sender.is_without_credit() {
            SendLimit::Credit
        } else {
            SendLimit::Flight
        }
    }
}
