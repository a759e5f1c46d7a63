//! Protocol state machines and codecs of Sealane, without sockets, clocks or random sources.
//!
//! Time is a parameter (monotonic nanoseconds) and bytes go in and come out, so the same code runs
//! with real sockets (`sealane-engine`) and in virtual time (`sealane-sim`).
#![forbid(unsafe_code)]

pub mod aead;
pub mod congestion;
mod counters;
pub mod digest;
pub mod fabric;
pub mod freshness;
pub mod ip;
pub mod key_ring;
pub mod link;
pub mod nvme;
pub mod sector;
pub mod secure_queue;
pub mod session;
pub mod share;

/// Conversions between wire structures and bytes, for callers that hold the structures.
pub mod wire {
    pub use zerocopy::{FromBytes, IntoBytes};
}
