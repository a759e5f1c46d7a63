//! Congestion controllers that only the simulator has, to compare with.

mod bbr;
mod cubic;
mod mprdma;
#[cfg(test)]
mod tests;

use sealane_proto::congestion::{Algorithm, Allowance, Controller, Setup, create};
use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

use bbr::Bbr;
use cubic::Cubic;
use mprdma::Mprdma;

/// The congestion control of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Congestion {
    /// One of the product's.
    Product(Algorithm),
    /// MPRDMA (Lu et al., NSDI 2018) within a data centre, BBR between data centres: what Uno's
    /// evaluation compares with. In per cent of a packet, what a mark takes.
    MprdmaBbr(u8),
    /// CUBIC (RFC 9438), without marks.
    Cubic,
}

/// Those that the product doesn't have, by name.
pub const RIVALS: [(&str, Congestion); 3] = [
    ("mprdma-bbr", Congestion::MprdmaBbr(15)),
    ("mprdma-bbr-half", Congestion::MprdmaBbr(50)),
    ("cubic", Congestion::Cubic),
];

impl Congestion {
    /// Creates the controller of a flow.
    pub(super) fn start(self, setup: &Setup, is_far: bool, now: Nanos) -> Box<dyn Controller> {
        match self {
            Self::Product(algorithm) => create(algorithm, setup, now),
            Self::MprdmaBbr(_) if is_far => Box::new(Bbr::new(setup)),
            Self::MprdmaBbr(percent) => Box::new(Mprdma::new(setup, percent)),
            Self::Cubic => Box::new(Cubic::new(setup)),
        }
    }
}

/// Bytes that fill a path at the line's rate.
fn product(setup: &Setup) -> f64 {
    setup.domain.line_bytes_per_second as f64 * setup.base_rtt as f64 / NANOS_PER_SECOND as f64
}

/// A window with a pace of this many windows per round trip.
fn allowance(setup: &Setup, window: f64, pace: f64) -> Allowance {
    let rate = pace * window * NANOS_PER_SECOND as f64 / setup.base_rtt as f64;
    let line = setup.domain.line_bytes_per_second;
    Allowance::new(window, rate, line)
}
