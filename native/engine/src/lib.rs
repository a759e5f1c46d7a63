//! Threads, sockets, files and shared memory around the machines of `sealane-proto`.

pub mod clock;
pub mod emulator;
pub mod session;
pub mod udp;
