//! Engine: threads, sockets, files and shared memory around the machines of `sealane-proto`.
//!
//! All per-sector and per-packet work runs here, without the GIL.

pub mod accelerator;
pub mod calls;
pub mod clock;
pub mod emulator;
mod event;
pub mod latency;
pub mod permit;
pub mod reduce;
pub mod session;
pub mod shared_memory;
pub mod storage;
pub mod udp;
