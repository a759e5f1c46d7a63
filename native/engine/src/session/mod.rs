//! Sessions on real sockets: one worker thread per session between a UDP socket and a job's rings.

pub mod layout;
pub mod region;
pub mod ring;
