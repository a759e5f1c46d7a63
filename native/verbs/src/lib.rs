//! InfiniBand verbs for sessions: an unreliable connected (UC) queue pair that carries datagrams.
//!
//! libibverbs is loaded at run time, so that a machine without it needs nothing. A queue pair owns
//! private memory of its own. In mode `send` no memory is registered for remote access, so that a packet
//! that somebody else has forged can only fill a posted slot, as a forged datagram fills a socket's
//! buffer. In mode `write` peers write to a ring, which others can write to as well, at any time: what
//! is there is copied before it is looked at. What arrives is untrusted in both modes.
//!
//! Each message is one packet: it arrives whole or not at all, in any order (InfiniBand
//! Architecture Specification 1.4, §9.8: UC drops what it does not expect and goes on).

mod address;
#[allow(clippy::all, clippy::pedantic, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]
#[allow(dead_code, missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals)]
#[allow(unused_qualifications)]
#[rustfmt::skip]
mod bindings;
mod devices;
mod library;
mod queue_pair;
mod resources;

pub use address::{ParseError, QueuePairAddress};
pub use devices::{Device, device_of};
pub use queue_pair::{QueuePair, Received, SEGMENTS_MAX};
pub use resources::{Mode, Unavailable};

/// Port of UDP to which RoCE v2 sends its packets (IANA).
pub const ROCE_PORT: u16 = 4791;

/// Smallest path MTU, in bytes, over which a queue pair is offered: with less, the session's packets
/// would not fit one.
pub const MTU_BYTES_MIN: u16 = 2048;
