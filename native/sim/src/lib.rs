//! The session machines of `sealane-proto` in virtual time: event loop, path model and checkers.
//!
//! A [`Scenario`] determines a run completely; [`run`] returns what happened and which rules were
//! broken. Small worlds use real payload and AEAD; statistics at 400 Gbit/s use lengths only.
#![forbid(unsafe_code)]

mod bitmap_only;
mod check;
mod flows;
mod memory;
mod ring;
mod scenario;
mod wire;
mod world;

pub use check::{Rule, Violation};
pub use flows::{
    Balance, Cell, CellError, CellOutcome, Chain, Change, Code, Congestion, Effect, FLOWS_MAX,
    FlowOutcome, FlowSetup, HEADER_BYTES, PAYLOAD_BYTES, Place, RIVALS, Sample, SessionsSetup,
    Shared, Tampering, Victims, run_cell, run_sessions, run_shared,
};
pub use ring::{
    Combine, REPEATS_MAX, Ring, RingError, RingOutcome, RingReceive, RingSend, SITES_MAX, Site,
    run_ring,
};
pub use scenario::{MEMORY_BYTES_MAX, MESSAGES_MAX, PathLinks, Pauses, Scenario, ScenarioError};
pub use world::{Outcome, run};

#[cfg(test)]
mod tests;
