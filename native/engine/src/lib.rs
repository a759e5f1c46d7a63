//! Engine: threads, sockets, files and shared memory around the machines of `sealane-proto`.
//!
//! Everything that is per sector or per packet runs here, without the interpreter's lock.

pub mod clock;
pub mod emulator;
pub mod permit;
pub mod reduce;
pub mod session;
pub mod storage;
pub mod udp;
