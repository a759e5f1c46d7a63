//! Storage data path: queue threads of target, gateway and initiator, sector stores, freshness.
//!
//! One thread per I/O queue owns its socket. The control plane is elsewhere and asynchronous: it
//! hands over connected sockets, reads statistics and events, and stops queues, waiting until they
//! have ended.

pub mod connection;
pub mod events;
pub mod gateway;
pub mod initiator;
pub mod load;
pub mod pieces;
pub mod queues;
pub mod store;
pub mod stores;
pub mod target;
pub mod threads;
pub mod upkeep;
