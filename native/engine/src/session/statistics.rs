//! Names and order of a session's statistics: in the shared statistics area and in Python.

use sealane_proto::session::SessionStatistics;

macro_rules! statistics {
    ($($name:ident),+ $(,)?) => {
        /// Names, in the order of the statistics area (docs/ring-abi.md).
        pub const NAMES: &[&str] = &[$(stringify!($name)),+, "send_errors", "foreign_packets"];

        /// The machine's counters, then the worker's own.
        pub fn values(machine: &SessionStatistics, worker: &WorkerStatistics) -> Vec<u64> {
            vec![$(machine.$name),+, worker.send_errors, worker.foreign_packets]
        }
    };
}

/// What the worker counts itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerStatistics {
    /// Sends that the kernel refused; to the machine their packets are lost.
    pub send_errors: u64,
    /// Datagrams from an address that is not the peer's.
    pub foreign_packets: u64,
}

statistics!(
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
);

#[cfg(test)]
mod tests {
    use super::super::layout::STATISTICS_COUNT;
    use super::*;

    #[test]
    fn every_counter_has_its_name_and_a_place() {
        let machine = SessionStatistics { packets_sent: 1, rto_nanos: 2, ..Default::default() };
        let worker = WorkerStatistics { send_errors: 3, foreign_packets: 4 };
        let values = values(&machine, &worker);
        assert_eq!(values.len(), NAMES.len());
        assert!(values.len() <= STATISTICS_COUNT);
        assert_eq!((values[0], &values[values.len() - 3..]), (1, &[2, 3, 4][..]));
    }
}
