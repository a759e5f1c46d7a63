//! A session's counters, and what currently limits its sending.

use crate::counters;

use super::evidence::Losses;
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
        /// Datagrams with a data unit, including retransmissions.
        pub data_packets_sent: u64,
        /// Datagrams with a parity unit, including retransmissions.
        pub parity_packets_sent: u64,
        /// Data or parity units sent again.
        pub retransmitted_packets: u64,
        /// Datagrams with control frames.
        pub control_packets_sent: u64,
        /// Authentic datagrams received.
        pub packets_received: u64,
        /// Wire bytes of these datagrams.
        pub wire_bytes_received: u64,
        /// Data and parity units accepted.
        pub units_received: u64,
        /// Units of a selective-repeat message that had already landed.
        pub duplicates: u64,
        /// Units of an erasure-coded block that was already complete.
        pub surplus: u64,
        /// Units of a message that had already completed.
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
        /// How often sending paused because the peer had gone silent.
        pub stalls: u64,
        /// Payload bytes of sends that completed `Ok`.
        pub payload_bytes_sent: u64,
        /// Payload bytes in memory of receives that completed `Ok` or `Partial`.
        pub payload_bytes_received: u64,
        /// Sends that completed `Ok`.
        pub sends_completed: u64,
        /// Receives that completed `Ok` or `Partial`.
        pub receives_completed: u64,
        /// Requests that completed with another status.
        pub failed: u64,
        /// Smoothed round-trip time of the slowest usable path, in nanoseconds (0 before the first
        /// sample).
        pub srtt_nanos: u64,
        /// Current retransmission time-out in nanoseconds.
        pub rto_nanos: u64,
        /// Datagrams for another connection or channel.
        pub misdirected: u64,
        /// Datagrams from an address that doesn't belong to the session.
        pub foreign_packets: u64,
        /// Datagrams under a key that no longer exists or can't be in use yet.
        pub unknown_epoch: u64,
        /// Key updates by this end.
        pub key_updates_sent: u64,
        /// Key updates of the peer.
        pub key_updates_received: u64,
        /// Authentic datagrams that arrived marked CE.
        pub ce_received: u64,
        /// Datagrams of this end that arrived marked CE, according to the peer.
        pub ce_echoed: u64,
        /// 1 while this end marks its packets as ECN-capable.
        pub is_ecn_capable: u64,
        /// Packets of this end that the peer counted as lost on a path and that have not arrived
        /// since.
        pub lost_packets: u64,
        /// Runs of consecutive lost packets, according to the peer.
        pub lost_runs: u64,
        /// Runs of losses like those of `clear_runs` whose length in time is known …
        pub timed_runs: u64,
        /// … and the sum of these lengths: from the first lost packet to the last, and half of the
        /// time until the next one, in nanoseconds.
        pub timed_runs_nanos: u64,
        /// Units of this end that were sent again although the peer already had them.
        pub spurious_retransmissions: u64,
        /// Packets of the peer that were counted as lost here and have not arrived since.
        pub missing_packets: u64,
        /// Runs of these packets.
        pub missing_runs: u64,
        /// Packets of the peer that arrived after they were counted as lost.
        pub reordered_packets: u64,
        /// Transmissions of this end that were lost according to the peer's report.
        pub reported_losses: u64,
        /// Transmissions of this end that were taken for lost after their time-out.
        pub timeouts: u64,
        /// Packets sent only to show the peer the losses before them.
        pub probes_sent: u64,
        /// Time for which sending paused because the peer was silent, in nanoseconds.
        pub stalled_nanos: u64,
        /// Wire bytes per second that this end may send: the session's rate, or what congestion
        /// control and circuit breaker leave of it.
        pub rate_bytes_per_second: u64,
        /// How often the circuit breaker cut the rate.
        pub breaker_trips: u64,
        /// Largest IP packet that the path is known to carry (0 before it is validated).
        pub path_mtu_bytes: u64,
        /// Paths that are validated and not abandoned.
        pub paths_validated: u64,
        /// How often a path was skipped because it had gone silent.
        pub path_silences: u64,
        /// How often a path moved to another address of the peer.
        pub path_moves: u64,
        /// Packets of this end that the peer's host dropped because a buffer was full. Not in
        /// `lost_packets`.
        pub peer_drops: u64,
        /// Wire bytes of units that congestion control allows in flight (0: it does not limit).
        pub window_bytes: u64,
        /// How often marks on a path were found not to be accounted for: erased on the way, or not
        /// reported by the peer.
        pub marking_failures: u64,
        /// 1 while congestion control goes by delay and loss because marks don't arrive.
        pub is_fallen_back: u64,
        /// Least round-trip time of the last five to ten seconds, of the slowest path, in
        /// nanoseconds (0 before the first sample).
        pub rtt_least_nanos: u64,
        /// Packets of this end that arrived or were lost while their path had no queue.
        /// Excludes the last few round trips.
        pub clear_packets: u64,
        /// Those of them that were lost: not by congestion, as far as this end can know.
        pub clear_losses: u64,
        /// Runs of these losses.
        pub clear_runs: u64,
    }
}

/// What currently limits a session's sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendLimit {
    /// Nothing is posted.
    Idle,
    /// The peer has posted no receive for the next message.
    Credit,
    /// The rate; there are units to send.
    Pacing,
    /// The congestion controller; there are units to send.
    Congestion,
    /// Lost units are being sent again or await their acknowledgement.
    Loss,
    /// Everything has been sent and awaits its acknowledgement.
    Flight,
    /// The peer is silent and units are held back, or no path is validated yet.
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
        let allowance = self.paths.congestion().allowance();
        let clear = paths().map(|path| path.evidence.clear()).sum::<Losses>();
        let mut statistics = SessionStatistics {
            lost_packets: ours.lost.saturating_sub(ours.found),
            lost_runs: ours.runs,
            spurious_retransmissions: ours.duplicates,
            peer_drops: ours.dropped,
            missing_packets: theirs.lost.saturating_sub(theirs.found),
            missing_runs: theirs.runs,
            reordered_packets: theirs.found,
            reported_losses,
            timeouts,
            key_updates_sent,
            key_updates_received,
            rate_bytes_per_second: allowance
                .map_or(u64::MAX, |allowance| allowance.rate_bytes_per_second)
                .min(self.paths.rate())
                .min(self.config.rate_bytes_per_second),
            window_bytes: allowance.map_or(0, |allowance| allowance.window_bytes),
            rtt_least_nanos: paths().filter_map(|path| path.rtt.least()).max().unwrap_or(0),
            clear_packets: clear.packets,
            clear_losses: clear.lost,
            clear_runs: clear.runs,
            timed_runs: clear.timed_runs,
            timed_runs_nanos: clear.timed_nanos,
            marking_failures: paths().map(|path| path.marking.failures()).sum(),
            is_fallen_back: self.paths.congestion().is_fallen_back().into(),
            breaker_trips: self.paths.congestion().trips(),
            path_mtu_bytes: self.path_mtu_bytes,
            ce_received: paths().map(|path| path.arrived.ce).sum(),
            ce_echoed: paths().map(|path| path.marking.peer().ce).sum(),
            is_ecn_capable: u64::from(paths().any(|path| path.marking.is_trusted())),
            paths_validated: paths().filter(|path| path.is_validated()).count() as u64,
            decoded_units: self.receiver.decoded_units(),
            srtt_nanos: self.paths.srtt().unwrap_or(0),
            rto_nanos: self.paths.timeout(),
            ..self.statistics
        };
        self.events.count_into(&mut statistics);
        statistics
    }

    /// Statistics of each path, in the order of their ids.
    pub fn path_accounts(&self) -> impl Iterator<Item = PathAccount> {
        self.paths.iter().map(|(_, path)| path.account())
    }

    /// Wire bytes sent so far (also in [`Self::statistics`], but cheaper here).
    #[must_use]
    pub fn wire_bytes_sent(&self) -> u64 {
        self.statistics.wire_bytes_sent
    }

    /// Whether the congestion controller allows less than the session's rate.
    fn is_congested(&self) -> bool {
        let allowance = self.paths.congestion().allowance();
        allowance.is_some_and(|allowance| {
            allowance.rate_bytes_per_second < self.config.rate_bytes_per_second
        })
    }

    /// What currently limits this end's sending.
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
            if self.is_congested() { SendLimit::Congestion } else { SendLimit::Pacing }
        } else if sender.is_without_credit() {
            SendLimit::Credit
        } else {
            SendLimit::Flight
        }
    }
}
