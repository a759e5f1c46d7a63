//! MPRDMA's window: a packet more per window without marks, part of a packet less per mark.

use sealane_proto::congestion::{Allowance, Controller, Report, Setup};
use sealane_proto::link::Nanos;

use super::{allowance, product};

#[derive(Debug)]
pub(super) struct Mprdma {
    setup: Setup,
    window: f64,
    /// What a mark takes, in packets.
    decrease: f64,
}

impl Mprdma {
    pub fn new(setup: &Setup, percent: u8) -> Self {
        Self { setup: *setup, window: product(setup), decrease: f64::from(percent) / 100.0 }
    }
}

impl Controller for Mprdma {
    fn allowance(&self) -> Allowance {
        allowance(&self.setup, self.window, 1.0)
    }

    fn sent(&mut self, _bytes: u64, _now: Nanos) {}

    fn reported(&mut self, report: &Report, _now: Nanos) {
        let packet = self.setup.domain.packet_bytes as f64;
        let marked = report.marked_bytes as f64;
        let unmarked = report.bytes as f64 - marked;
        self.window += packet * unmarked / self.window - self.decrease * marked;
        self.window = self.window.clamp(packet, product(&self.setup).max(packet));
    }

    fn timed_out(&mut self, _now: Nanos) {}
}
