//! The session machine (DESIGN §7): sealed messages over datagrams, selective repeat or erasure coded.

pub mod packet;
mod types;

pub use types::*;
