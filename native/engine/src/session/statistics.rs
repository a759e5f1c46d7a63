//! Names and order of a session's statistics, in the shared statistics area and in Python.

use sealane_proto::counters;
use sealane_proto::session::SessionStatistics;

counters! {
    /// Counters of the worker itself.
    pub struct WorkerStatistics {
        /// Sends that the kernel refused.
        pub send_errors: u64,
        /// Sends that the kernel accepted, each with one or more datagrams.
        pub send_calls: u64,
        /// Datagrams of the refused sends, which are lost for the session machine.
        pub send_drops: u64,
        /// Receive calls that returned data, each with one or more datagrams.
        pub receive_calls: u64,
        /// Datagrams that the kernel dropped because the socket's buffer was full.
        pub receive_drops: u64,
        /// Nanoseconds during which the job had posted nothing to send ...
        pub limited_application_nanos: u64,
        /// ... the peer had posted no receive ...
        pub limited_credit_nanos: u64,
        /// ... the rate held units back ...
        pub limited_pacing_nanos: u64,
        /// ... lost packets were being sent again or waited for ...
        pub limited_loss_nanos: u64,
        /// ... everything was sent and not yet acknowledged ...
        pub limited_round_trip_nanos: u64,
        /// ... the peer was silent ...
        pub limited_stall_nanos: u64,
        /// ... the job did not read its completions ...
        pub limited_completions_nanos: u64,
        /// ... other sessions had their turn at the shared rate ...
        pub limited_shared_rate_nanos: u64,
        /// ... and the congestion controller held units back.
        pub limited_congestion_nanos: u64,
    }
}

/// Names in the order of the statistics area (docs/formats/ring-abi.md): first the machine's, then
/// the worker's.
pub fn names() -> impl Iterator<Item = &'static str> {
    let machine = SessionStatistics::default();
    let worker = WorkerStatistics::default();
    machine.fields().chain(worker.fields()).map(|(name, _)| name)
}

/// Values in the order of [`names`].
pub fn values(machine: &SessionStatistics, worker: &WorkerStatistics) -> Vec<u64> {
    machine.fields().chain(worker.fields()).map(|(_, value)| value).collect()
}

#[cfg(test)]
mod tests {
    use super::super::layout::STATISTICS_COUNT;
    use super::*;

    #[test]
    fn every_counter_has_its_name_and_a_place() {
        let machine = SessionStatistics { packets_sent: 1, breaker_trips: 2, ..Default::default() };
        let worker =
            WorkerStatistics { send_errors: 3, limited_congestion_nanos: 4, ..Default::default() };
        let values = values(&machine, &worker);
        let names: Vec<_> = names().collect();
        assert_eq!(values.len(), names.len());
        assert!(values.len() <= STATISTICS_COUNT);
        let at = |name| names.iter().position(|found| *found == name).map(|at| values[at]);
        assert_eq!(at("packets_sent"), Some(1));
        assert_eq!(at("breaker_trips"), Some(2));
        assert_eq!(at("send_errors"), Some(3));
        assert_eq!(values.last(), Some(&4));
    }
}
