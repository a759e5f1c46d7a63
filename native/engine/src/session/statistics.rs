//! Names and order of a session's statistics: in the shared statistics area and in Python.

use sealane_proto::session::SessionStatistics;

macro_rules! statistics {
    (machine: $($name:ident),+; worker: $($(#[$doc:meta])* $own:ident),+ $(,)?) => {
        /// Names, in the order of the statistics area (docs/ring-abi.md).
        pub const NAMES: &[&str] = &[$(stringify!($name)),+, $(stringify!($own)),+];

        /// The machine's counters, then the worker's own.
        pub fn values(machine: &SessionStatistics, worker: &WorkerStatistics) -> Vec<u64> {
            vec![$(machine.$name),+, $(worker.$own),+]
        }

        /// What the worker counts itself.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct WorkerStatistics { $($(#[$doc])* pub $own: u64),+ }
    };
}

statistics!(
    machine:
    packets_sent,
    wire_bytes_sent,
    data_packets_sent,
    parity_packets_sent,
    retransmitted_packets,
    control_packets_sent,
    packets_received,
    wire_bytes_received,
    units_received,
    duplicates,
    surplus,
    late,
    forged,
    replayed,
    malformed,
    unposted,
    scratch_full,
    decoded_units,
    fallbacks,
    stalls,
    payload_bytes_sent,
    payload_bytes_received,
    sends_completed,
    receives_completed,
    failed,
    srtt_nanos,
    rto_nanos,
    misdirected,
    foreign_packets,
    unknown_epoch,
    key_updates_sent,
    key_updates_received,
    ce_received,
    ce_echoed,
    is_ecn_capable;
    worker:
    /// Sends that the kernel refused.
    send_errors,
    /// Sends that it took, each of one or more datagrams.
    send_calls,
    /// Datagrams of the sends that it refused: to the machine they are lost.
    send_drops,
    /// Receives that brought something, each one or more datagrams.
    receive_calls,
    /// Datagrams that the kernel dropped because the socket's buffer was full.
    receive_drops,
);

#[cfg(test)]
mod tests {
    use super::super::layout::STATISTICS_COUNT;
    use super::*;

    #[test]
    fn every_counter_has_its_name_and_a_place() {
        let machine =
            SessionStatistics { packets_sent: 1, is_ecn_capable: 2, ..Default::default() };
        let worker = WorkerStatistics { send_errors: 3, receive_drops: 4, ..Default::default() };
        let values = values(&machine, &worker);
        assert_eq!(values.len(), NAMES.len());
        assert!(values.len() <= STATISTICS_COUNT);
        assert_eq!((values[0], &values[values.len() - 6..]), (1, &[2, 3, 0, 0, 0, 4][..]));
    }
}
