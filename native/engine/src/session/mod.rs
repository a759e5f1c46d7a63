//! Sessions on real sockets: one worker thread per session between a UDP socket and a job's rings.

pub mod allocator;
pub mod bitmap;
pub mod completion;
pub mod doorbell;
mod endings;
pub mod endpoint;
pub mod entry;
mod events;
#[cfg(test)]
mod full_socket_tests;
pub mod job;
mod lanes;
pub mod layout;
mod limits;
mod link;
mod operations;
mod outbound;
pub mod path_report;
mod path_threads;
mod pauses;
mod presence;
pub mod region;
mod report;
pub mod ring;
#[cfg(test)]
mod ring_stress;
pub mod share;
pub mod statistics;
mod submission;
pub mod wire;
mod worker;
