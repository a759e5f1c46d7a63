//! Sessions on real sockets: one worker thread per session between a UDP socket and a job's rings.

pub mod allocator;
pub mod bitmap;
pub mod endpoint;
pub mod entry;
pub mod job;
pub mod layout;
mod limits;
mod operations;
mod outbound;
mod pauses;
pub mod region;
pub mod ring;
#[cfg(test)]
mod ring_stress;
pub mod share;
pub mod statistics;
mod submission;
mod worker;
